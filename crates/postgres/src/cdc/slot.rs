//! The server and the slot: the slot is created, or checked if it exists already.
//!
//! A server or slot that does not fit is refused, with the statement that fixes it.

use airtight_core::{
    Code, Error, Result,
    table::{literal, quote},
};
use sqlx::{AssertSqlSafe, Row};

use super::{
    Lsn,
    state::{Phase, Stored},
    wire::{Endpoint, Wire},
};
use crate::{
    PgOutbox,
    columns::EventColumns,
    error::{doing, sqlstate},
};

/// The first version that sends messages of the WAL.
pub(super) const MESSAGES: i32 = 140_000;

/// What the server says of itself on a replication connection.
#[derive(Debug, Clone)]
pub(super) struct Server {
    pub(super) system: String,
    pub(super) timeline: String,
    /// How far its WAL goes.
    pub(super) end: Lsn,
    /// Where this timeline began: everything before it is another server's.
    pub(super) promoted_at: Option<Lsn>,
}

/// A slot as the server has it.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) plugin: Option<String>,
    pub(crate) database: Option<String>,
    pub(crate) active_pid: Option<i32>,
    /// Who holds it: the application's name. None for one that has just ended.
    pub(crate) holder: Option<String>,
    /// It is held by a statement, which makes or moves it, and not by a stream.
    pub(crate) is_passing: bool,
    pub(crate) confirmed: Option<Lsn>,
    pub(crate) wal_status: Option<String>,
    /// Why the server has given it up; PostgreSQL 17 and later.
    pub(crate) invalidated: Option<String>,
    pub(crate) temporary: bool,
    /// Copied from a primary; on a server that was a standby it stays so.
    pub(crate) synced: bool,
}

impl Slot {
    /// Whether WAL that it needs is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.wal_status.as_deref() == Some("lost") || self.confirmed.is_none()
    }

    /// Why WAL that it needs is gone, for people.
    fn why_lost(&self) -> &'static str {
        match self.invalidated.as_deref() {
            Some("idle_timeout") => "it was not read for longer than idle_replication_slot_timeout",
            Some("rows_removed") => "rows of the system catalogs that it needs were removed",
            Some("wal_level_insufficient") => "wal_level was lowered",
            // Before 17 this is the only reason there is on a primary.
            _ => "it fell further behind than max_slot_wal_keep_size",
        }
    }
}

/// Refuses a server that cannot be followed, and asks who it is.
pub(super) async fn check_server(outbox: &PgOutbox, endpoint: &Endpoint) -> Result<Server> {
    let failed = doing("checking the server");
    let mut conn = outbox.acquire().await?;
    let row = sqlx::query(
        "SELECT current_setting('wal_level') AS wal_level, pg_is_in_recovery() AS standby, current_user::text AS role",
    )
    .persistent(!outbox.pooled)
    .fetch_one(conn.get())
    .await
    .map_err(&failed)?;
    conn.commit().await?;
    let wal_level: String = row.try_get("wal_level").map_err(&failed)?;
    if row.try_get::<bool, _>("standby").map_err(&failed)? {
        return Err(Error::unavailable(Code::READ_ONLY, "this server is a standby: connect to the primary"));
    }
    if wal_level != "logical" {
        return Err(Error::permanent(
            Code::WAL_LEVEL,
            format!(
                "the server writes its WAL with wal_level = {wal_level}, from which no rows can be read. Set \
                 wal_level, and restart the server"
            ),
        )
        .with_remedy("ALTER SYSTEM SET wal_level = 'logical'"));
    }
    let role: String = row.try_get("role").map_err(&failed)?;
    let mut wire = Wire::connect_for_replication(endpoint).await.map_err(|error| no_right(error, &role))?;
    let server = identify(&mut wire).await;
    wire.close().await;
    server
}

fn no_right(error: Error, role: &str) -> Error {
    if !error.is(&Code::NOT_PERMITTED) {
        return error.context("connecting for replication");
    }
    Error::permanent(Code::NO_REPLICATION, error.message())
        .with_remedy(format!("ALTER ROLE {} REPLICATION", quote(role)))
}

/// The version, as a number.
pub(super) async fn server_version(outbox: &PgOutbox) -> Result<i32> {
    let mut conn = outbox.acquire().await?;
    let version = sqlx::query_scalar("SELECT current_setting('server_version_num')::int")
        .persistent(!outbox.pooled)
        .fetch_one(conn.get())
        .await
        .map_err(doing("reading the server's version"))?;
    conn.commit().await?;
    Ok(version)
}

/// Asks the server who it is.
pub(super) async fn identify(wire: &mut Wire) -> Result<Server> {
    let answer = wire.query("IDENTIFY_SYSTEM", "identifying the server").await?;
    let text = |name: &str| answer.first(name).unwrap_or_default();
    let (system, timeline) = (text("systemid"), text("timeline"));
    let end = text("xlogpos").parse().unwrap_or_default();
    let promoted_at = match timeline.as_str() {
        "1" => None,
        later => {
            let command = format!("TIMELINE_HISTORY {later}");
            let history = wire.query(&command, "reading the history of the timeline").await;
            // Without the file we only know less.
            history.ok().and_then(|history| history.first("content")).as_deref().and_then(last_switch)
        }
    };
    Ok(Server { system, timeline, end, promoted_at })
}

/// The position in the last line of a timeline's history: `1  0/3000148  no recovery target specified`.
fn last_switch(history: &str) -> Option<Lsn> {
    let mut lines = history.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.next_back()?.split_whitespace().nth(1)?.parse().ok()
}

/// The slot of this name, if there is one.
pub(crate) async fn find(outbox: &PgOutbox, name: &str) -> Result<Option<Slot>> {
    let failed = doing("reading the slot");
    let mut conn = outbox.acquire().await?;
    let row = sqlx::query(
        "SELECT r.plugin::text, r.database::text, r.active_pid, \
           CASE WHEN a.pid IS NOT NULL THEN coalesce(a.application_name, '') END AS holder, r.temporary, \
           coalesce(a.backend_type = 'client backend', false) AS is_passing, \
           r.confirmed_flush_lsn::text AS confirmed, r.wal_status, \
           to_jsonb(r) ->> 'invalidation_reason' AS invalidated, \
           coalesce((to_jsonb(r) ->> 'synced')::boolean, false) AS synced \
         FROM pg_replication_slots r LEFT JOIN pg_stat_activity a ON a.pid = r.active_pid WHERE r.slot_name = $1",
    )
    .persistent(!outbox.pooled)
    .bind(name)
    .fetch_optional(conn.get())
    .await
    .map_err(&failed)?;
    conn.commit().await?;
    let Some(row) = row else { return Ok(None) };
    let confirmed: Option<String> = row.try_get("confirmed").map_err(&failed)?;
    Ok(Some(Slot {
        plugin: row.try_get("plugin").map_err(&failed)?,
        database: row.try_get("database").map_err(&failed)?,
        active_pid: row.try_get("active_pid").map_err(&failed)?,
        holder: row.try_get("holder").map_err(&failed)?,
        is_passing: row.try_get("is_passing").map_err(&failed)?,
        confirmed: confirmed.map(|lsn| lsn.parse()).transpose()?,
        wal_status: row.try_get("wal_status").map_err(&failed)?,
        invalidated: row.try_get("invalidated").map_err(&failed)?,
        temporary: row.try_get("temporary").map_err(&failed)?,
        synced: row.try_get("synced").map_err(&failed)?,
    }))
}

/// Refuses a slot that is not one of ours to read.
pub(super) async fn check_kind(outbox: &PgOutbox, name: &str, slot: &Slot) -> Result<()> {
    let mut conn = outbox.acquire().await?;
    let database: String = sqlx::query_scalar("SELECT current_database()::text")
        .persistent(!outbox.pooled)
        .fetch_one(conn.get())
        .await
        .map_err(doing("checking the slot"))?;
    conn.commit().await?;
    let what = match (&slot.plugin, &slot.database) {
        (Some(plugin), _) if plugin != "pgoutput" => {
            format!("decodes with `{plugin}`, but airtight reads `pgoutput`")
        }
        (None, _) => "is for physical replication".into(),
        (_, Some(other)) if *other != database => {
            format!("is for the database `{other}`, but this is `{database}`")
        }
        _ if slot.temporary => "is a temporary slot of another session".into(),
        _ => return Ok(()),
    };
    Err(Error::permanent(
        Code::BAD_SLOT,
        format!("the slot `{name}` {what}: use another name (`--slot NAME`)"),
    ))
}

/// The position to continue from. Refuses to continue past a gap: whatever lies between what was settled and what the slot still has is
/// missing.
///
/// After a promotion there may be one that the table can close. A standby takes over the slot's position and what was stored
/// about it by different ways, and the latter may be the older. Up to the slot's position everything was settled on the old
/// primary, but with the stored position the marks of what was delivered are gone, and what was parked. So with `has_marks`
/// the rows that are not finished are read again, and some of them come twice.
pub(super) async fn check_gap(
    outbox: &PgOutbox,
    c: &EventColumns,
    name: &str,
    mut stored: Stored,
    slot: Option<&Slot>,
    server: &Server,
    has_marks: bool,
) -> Result<Stored> {
    let at = stored.lsn.map_or("its beginning".into(), |lsn| lsn.to_string());
    let known = stored.clone();
    let lost = |code: Code, what: String| async move {
        let advice = recovery(outbox, c, name, &known).await;
        Err(Error::permanent(code, format!("{what}. {advice}")))
    };
    // A reader that starts over cannot read from it, either.
    if let Some(slot) = slot.filter(|slot| slot.is_lost()) {
        let why = slot.why_lost();
        let what = format!(
            "the server has invalidated the slot `{name}`, and everything after {at} is lost with it: {why}"
        );
        return lost(Code::SLOT_LOST, what).await;
    }
    if stored.phase == Phase::New {
        return Ok(stored);
    }
    if stored.system.as_ref().is_some_and(|system| *system != server.system) {
        return lost(
            Code::OTHER_SERVER,
            format!("the position {at} of `{name}` was stored on another server: this database was copied or restored"),
        )
        .await;
    }
    let Some(slot) = slot else {
        // Killed before it was made.
        if stored.phase == Phase::Snapshot && stored.lsn.is_none() {
            return Ok(stored);
        }
        return lost(
            Code::SLOT_LOST,
            format!("the slot `{name}` is gone, and everything after {at} is lost with it"),
        )
        .await;
    };
    let at = stored.lsn.unwrap_or_default();
    if let Some(confirmed) =
        slot.confirmed.filter(|confirmed| *confirmed > at && stored.phase == Phase::Streaming)
    {
        let was_copied = slot.synced && server.promoted_at.is_some_and(|promoted| confirmed <= promoted);
        if was_copied && has_marks {
            tracing::warn!(
                slot = name, stored = %at, slots = %confirmed,
                "this server was promoted before it had the last stored position; rows that are not finished are \
                 delivered again. The events without a table that were parked last may be missing"
            );
            (stored.phase, stored.lsn) = (Phase::Snapshot, Some(confirmed));
            return Ok(stored);
        }
        return lost(
            Code::SLOT_MOVED,
            format!(
                "the slot `{name}` stands at {confirmed}, but only events before {at} were delivered: the slot was \
                 recreated or moved manually, and {} bytes of WAL would be skipped",
                confirmed.since(at)
            ),
        )
        .await;
    }
    Ok(stored)
}

/// What is still in the table, and how to deliver it.
pub(super) async fn recovery(outbox: &PgOutbox, c: &EventColumns, name: &str, stored: &Stored) -> String {
    let since =
        stored.lsn_time.map_or(String::new(), |time| format!(" Everything up to {time} is delivered."));
    let created = c.spec.created_at.as_ref().zip(stored.lsn_time);
    let rows = match created {
        Some((column, time)) => {
            let sql = format!("SELECT count(*) FROM {} t WHERE {} >= $1", c.table, c.read_time(column));
            let count = match outbox.acquire().await {
                Ok(mut conn) => sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql))
                    .persistent(!outbox.pooled)
                    .bind(time)
                    .fetch_one(conn.get())
                    .await
                    .ok(),
                Err(_) => None,
            };
            count.map_or(String::new(), |count| {
                format!(" {} has {count} rows from after that time.", c.outbox)
            })
        }
        None => String::new(),
    };
    format!(
        "Events in that gap are lost to the stream.{since}{rows} To make a new slot and deliver what the table still \
         has: `airtight cdc recover {name}` (docs/cdc.md, \"A lost slot\")"
    )
}

/// The open transactions that a new slot waits for, for people: the oldest ones.
pub(super) async fn writers(outbox: &PgOutbox) -> Result<Vec<String>> {
    let failed = doing("looking for open transactions");
    let mut conn = outbox.acquire().await?;
    let found: Vec<String> = sqlx::query_scalar(
        "SELECT format('pid %s (%s, %s, open for %s s)', pid, coalesce(nullif(application_name, ''), 'no name'), state, \
           extract(epoch FROM now() - xact_start)::int) \
         FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 5",
    )
    .persistent(!outbox.pooled)
    .fetch_all(conn.get())
    .await
    .map_err(&failed)?;
    let prepared: Vec<String> = sqlx::query_scalar(
        "SELECT format('prepared transaction %s', quote_literal(gid)) FROM pg_prepared_xacts ORDER BY prepared LIMIT 5",
    )
    .persistent(!outbox.pooled)
    .fetch_all(conn.get())
    .await
    .map_err(&failed)?;
    conn.commit().await?;
    Ok(found.into_iter().chain(prepared).collect())
}

/// Creates the slot. Returns its position and the name of a snapshot of exactly that moment, which exists until the next
/// command on the connection.
pub(super) async fn create(
    wire: &mut Wire,
    name: &str,
    version: i32,
    failover: bool,
) -> Result<(Lsn, Option<String>)> {
    let options = match version {
        170_000.. if failover => "(SNAPSHOT 'export', FAILOVER)",
        150_000.. => "(SNAPSHOT 'export')",
        _ => "EXPORT_SNAPSHOT",
    };
    let command = format!("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput {options}", quote(name));
    let made = wire.ask(&command, "creating the slot").await.map_err(|error| {
        if error.sqlstate() == Some(sqlstate::CONFIGURATION_LIMIT) {
            Error::permanent(Code::NO_SLOTS, error.message()).with_remedy(
                "free one (SELECT pg_drop_replication_slot('NAME')), or raise max_replication_slots and restart the \
                 server",
            )
        } else {
            error
        }
    })?;
    let place = made.first("consistent_point").unwrap_or_default().parse()?;
    Ok((place, made.first("snapshot_name")))
}

/// The command that begins the stream.
pub(super) fn start_command(
    name: &str,
    from: Lsn,
    publication: &str,
    messages: bool,
    version: i32,
) -> String {
    // A name list in a literal: each name is quoted for itself.
    let publications = literal(&quote(publication));
    // Asked for only where the server knows the word.
    let messages = if messages && version >= MESSAGES { ", messages 'true'" } else { "" };
    format!(
        "START_REPLICATION SLOT {} LOGICAL {from} (proto_version '1', publication_names {publications}{messages})",
        quote(name)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_of_a_timeline_ends_with_where_it_began() {
        let history = "# comment\n1\t0/3000148\tno recovery target specified\n\n2\t1/A0\tno recovery target specified\n";
        assert_eq!(last_switch(history), Some(Lsn(0x1_0000_00A0)));
        assert_eq!(last_switch(""), None);
    }
}
