//! What is stored about a reader of the WAL: which relay reads, its position, and its parked events.
//!
//! A reader is a consumer with one partition, so that one relay streams and the others stand by, and every write
//! here is fenced by the partition's owner and epoch, in the same statement.

use std::collections::{BTreeSet, HashSet};

use airtight_core::{
    Code, Error, Event, Payload, Result,
    group::Member,
    log::{Changes, ConsumerState, Fate, LogRow, Park, Revision, Standing},
    queue::BadRow,
};
use sqlx::{AssertSqlSafe, Row, types::Json};

use super::{Lsn, feed::Boundary, values::from_pg_micros};
use crate::{
    PgOutbox,
    columns::EventColumns,
    error::doing,
    log::{consumers, settle},
    members,
    outbox::Conn,
    queue::{Store, storable},
    session::Session,
    slots,
};

/// The timeline of the server, from the name of the file that it writes its WAL to.
pub(super) const TIMELINE: &str =
    "('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint";

/// How far a reader is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    New,
    Snapshot,
    Streaming,
}

/// What is stored about a reader.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) phase: Phase,
    pub(crate) lsn: Option<Lsn>,
    pub(crate) seq: i64,
    pub(crate) system: Option<String>,
    pub(crate) lsn_time: Option<time::OffsetDateTime>,
}

/// Writes the reader down if it is new. Its partition begins at nothing.
pub(super) async fn attach(
    outbox: &PgOutbox,
    c: &EventColumns,
    member: &Member,
    publication: &str,
    prefix: Option<&str>,
) -> Result<()> {
    let failed = doing("registering the reader");
    let mut conn = outbox.begin().await?;
    members::lock_group(outbox, &mut conn, c).await?;
    consumers::refuse_other_instances(outbox, &mut conn, c, member, 1).await?;
    // With another prefix other events are counted: numbers of a transaction that is settled in part say nothing any
    // more. Without a timeline, new ones are given.
    let sql = format!(
        "WITH place AS (INSERT INTO {partition} (outbox, grp, n, last_seq, moved_at) VALUES ($1, $3, 0, 0, now()) \
           ON CONFLICT (outbox, grp, n) DO UPDATE SET last_seq = coalesce({partition}.last_seq, 0) \
           WHERE {partition}.last_seq IS NULL), \
         known AS (INSERT INTO {consumer} (outbox, name, partitions, streams) VALUES ($1, $2, 1, $4) \
           ON CONFLICT (outbox, name) DO UPDATE SET streams = excluded.streams) \
         INSERT INTO {slot} AS s (outbox, name, publication, prefix) VALUES ($1, $2, $5, $6) \
           ON CONFLICT (name) DO UPDATE SET publication = excluded.publication, prefix = excluded.prefix, \
             timeline = CASE WHEN s.prefix IS DISTINCT FROM excluded.prefix THEN NULL ELSE s.timeline END \
           WHERE s.outbox = excluded.outbox RETURNING s.name",
        partition = outbox.own("partition"),
        consumer = outbox.own("consumer"),
        slot = outbox.own("slot"),
    );
    let found: Option<String> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(member.group.stored())
        .bind(&member.streams)
        .bind(publication)
        .bind(prefix)
        .fetch_optional(conn.get())
        .await
        .map_err(&failed)?;
    if found.is_none() {
        return Err(Error::permanent(
            Code::OVERLAP,
            format!(
                "the slot `{}` serves another outbox: use another name (`--slot NAME`)",
                member.consumer()
            ),
        ));
    }
    conn.commit().await
}

/// Reads what is stored.
pub(super) async fn load(outbox: &PgOutbox, c: &EventColumns, name: &str) -> Result<Stored> {
    let mut conn = outbox.acquire().await?;
    let stored = load_in(outbox, &mut conn, c, name).await?;
    conn.commit().await?;
    stored.ok_or_else(|| {
        Error::permanent(Code::UNKNOWN_CONSUMER, format!("the reader `{name}` was removed while it ran"))
    })
}

pub(super) async fn load_in(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &EventColumns,
    name: &str,
) -> Result<Option<Stored>> {
    let failed = doing("reading the stored position");
    let sql = format!(
        "SELECT phase, lsn::text AS lsn, seq, system, lsn_time FROM {} WHERE outbox = $1 AND name = $2",
        outbox.own("slot")
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(name)
        .fetch_optional(conn.get())
        .await
        .map_err(&failed)?;
    let Some(row) = row else { return Ok(None) };
    let phase: String = row.try_get("phase").map_err(&failed)?;
    let lsn: Option<String> = row.try_get("lsn").map_err(&failed)?;
    Ok(Some(Stored {
        phase: match phase.as_str() {
            "streaming" => Phase::Streaming,
            "snapshot" => Phase::Snapshot,
            _ => Phase::New,
        },
        lsn: lsn.map(|lsn| lsn.parse()).transpose()?,
        seq: row.try_get("seq").map_err(&failed)?,
        system: row.try_get("system").map_err(&failed)?,
        lsn_time: row.try_get("lsn_time").map_err(&failed)?,
    }))
}

/// Whether the reader is the member's under this epoch.
pub(super) async fn owns(outbox: &PgOutbox, c: &EventColumns, member: &Member, epoch: i64) -> Result<bool> {
    let sql = format!(
        "SELECT EXISTS (SELECT FROM {} WHERE outbox = $1 AND grp = $2 AND n = 0 AND owner = $3 AND epoch = $4)",
        outbox.own("partition")
    );
    let mut conn = outbox.acquire().await?;
    let owns = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.group.stored())
        .bind(member.id)
        .bind(epoch)
        .fetch_one(conn.get())
        .await
        .map_err(doing("reading the owner of the reader"))?;
    conn.commit().await?;
    Ok(owns)
}

/// A phase that begins.
pub(super) struct Entry<'a> {
    pub(super) phase: Phase,
    pub(super) at: Boundary,
    /// Which server.
    pub(super) system: &'a str,
    /// What the publication has.
    pub(super) published: Option<String>,
}

/// A phase begins, at a position. Returns whether the reader is still the member's under this epoch.
pub(super) async fn enter(
    outbox: &PgOutbox,
    c: &EventColumns,
    member: &Member,
    epoch: i64,
    entry: Entry<'_>,
) -> Result<bool> {
    let Entry { phase, at, system, published } = entry;
    let sql = format!(
        "UPDATE {slot} s SET phase = $5, lsn = nullif($6::pg_lsn, '0/0'), seq = $7, system = $8, timeline = {TIMELINE}, moved_at = now(), \
           lsn_time = coalesce(s.lsn_time, now()), published = $10::jsonb \
         FROM {partition} p WHERE s.outbox = $1 AND s.name = $2 AND p.outbox = $1 AND p.grp = $3 AND p.n = 0 \
           AND p.owner = $4 AND p.epoch = $9",
        slot = outbox.own("slot"),
        partition = outbox.own("partition"),
    );
    let mut conn = outbox.acquire().await?;
    let done = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(member.group.stored())
        .bind(member.id)
        .bind(if phase == Phase::Streaming { "streaming" } else { "snapshot" })
        .bind(at.lsn.to_string())
        .bind(at.seq)
        .bind(system)
        .bind(epoch)
        .bind(published)
        .execute(conn.get())
        .await
        .map_err(doing("storing the position"))?;
    conn.commit().await?;
    Ok(done.rows_affected() == 1)
}

/// Where the reader stands, if it is the member's. With `fresh`, no stream is under way: where the events that
/// come next cannot have the numbers that they had (a snapshot that was interrupted; another timeline; with `is_set_back`, a
/// server that was set back), they get new ones, beyond all that were given, under a new epoch.
pub(super) async fn positions(
    outbox: &PgOutbox,
    c: &EventColumns,
    member: &Member,
    fresh: bool,
    is_set_back: bool,
) -> Result<Vec<Standing>> {
    let failed = doing("reading the reader's position");
    let mut conn = outbox.begin().await?;
    if fresh {
        let sql = format!(
            "WITH s AS (SELECT phase, seq, phase = 'streaming' AND timeline IS DISTINCT FROM {TIMELINE} AS promoted FROM {slot} \
               WHERE outbox = $1 AND name = $2), \
             top AS (SELECT greatest(p.last_seq, s.seq, (SELECT max(seq) FROM {parked} WHERE outbox = $1 AND consumer = $2)) AS seq \
               FROM s, {partition} p WHERE p.outbox = $1 AND p.grp = $3 AND p.n = 0 AND p.owner = $4 \
               AND (s.phase <> 'streaming' OR s.promoted OR $5)), \
             moved AS (UPDATE {partition} p SET last_seq = top.seq, epoch = p.epoch + 1 FROM top \
               WHERE p.outbox = $1 AND p.grp = $3 AND p.n = 0 AND p.owner = $4 RETURNING p.last_seq) \
             UPDATE {slot} s SET seq = moved.last_seq, timeline = {TIMELINE} FROM moved WHERE s.outbox = $1 AND s.name = $2",
            slot = outbox.own("slot"),
            parked = outbox.own("parked"),
            partition = outbox.own("partition"),
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&c.outbox)
            .bind(member.consumer())
            .bind(member.group.stored())
            .bind(member.id)
            .bind(is_set_back)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
    }
    let sql = format!(
        "SELECT epoch, coalesce(last_seq, 0) FROM {} WHERE outbox = $1 AND grp = $2 AND n = 0 AND owner = $3 FOR SHARE",
        outbox.own("partition")
    );
    let place: Option<(i64, i64)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.group.stored())
        .bind(member.id)
        .fetch_optional(conn.get())
        .await
        .map_err(&failed)?;
    let Some((epoch, offset)) = place else {
        conn.commit().await?;
        return Ok(Vec::new());
    };
    let sql = format!(
        "SELECT key, seq, state = 'waiting' OR $3 FROM {} WHERE outbox = $1 AND consumer = $2 \
         AND (state = 'waiting' OR $3 OR seq > $4)",
        outbox.own("parked")
    );
    let parked: Vec<(String, i64, bool)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(member.block_on_dead)
        .bind(offset)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    conn.commit().await?;
    let ahead = parked.iter().map(|(_, seq, _)| *seq).filter(|seq| *seq > offset).collect();
    let waiting = parked.into_iter().filter(|(_, _, waits)| *waits).map(|(key, _, _)| key).collect();
    Ok(vec![Standing { partition: 0, epoch, offset, waiting, parked: ahead, replay: None }])
}

/// What operators have said.
pub(super) async fn consumer_state(outbox: &PgOutbox, c: &EventColumns, name: &str) -> Result<ConsumerState> {
    let sql =
        format!("SELECT paused, revision FROM {} WHERE outbox = $1 AND name = $2", outbox.own("consumer"));
    let mut conn = outbox.acquire().await?;
    let found: Option<(bool, i64)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(name)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("checking the state of the reader"))?;
    conn.commit().await?;
    let (paused, revision) = found.ok_or_else(|| {
        Error::permanent(Code::UNKNOWN_CONSUMER, format!("the reader `{name}` was removed while it ran"))
    })?;
    Ok(ConsumerState { paused, revision: Revision::At(revision) })
}

/// Parked events that wait, and those of them that only a person can move.
pub(super) async fn waiting(outbox: &PgOutbox, c: &EventColumns, member: &Member) -> Result<(u64, u64)> {
    let sql = format!(
        "SELECT count(*), count(*) FILTER (WHERE $3 AND EXISTS (SELECT FROM {parked} d WHERE d.outbox = p.outbox \
           AND d.consumer = p.consumer AND d.key = p.key AND d.state <> 'waiting' AND d.seq < p.seq)) \
         FROM {parked} p WHERE p.outbox = $1 AND p.consumer = $2 AND p.state = 'waiting'",
        parked = outbox.own("parked")
    );
    let mut conn = outbox.acquire().await?;
    let (all, blocked): (i64, i64) = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(member.block_on_dead)
        .fetch_one(conn.get())
        .await
        .map_err(doing("counting parked events"))?;
    conn.commit().await?;
    Ok((all.unsigned_abs(), blocked.unsigned_abs()))
}

/// An event that is to be parked.
pub(super) struct Parking<'a> {
    pub(super) park: &'a Park,
    pub(super) row: LogRow,
    /// Which row of the table it is, where it has one.
    pub(super) identity: Option<String>,
}

/// What is to be written: where the reader is now, and what became of events.
pub(super) struct Write<'a> {
    pub(super) epoch: i64,
    /// The number up to which everything is settled, as stored and as it is to be.
    pub(super) from: i64,
    pub(super) to: i64,
    /// What is stored may also be something between the two: the answer to an earlier write was lost.
    pub(super) is_uncertain: bool,
    /// The boundary at or before it.
    pub(super) position: Boundary,
    /// What this relay has stored last, zero before it has stored anything.
    pub(super) stored_lsn: Lsn,
    /// Nothing that was read waits to be settled.
    pub(super) caught_up: bool,
    /// What is to be parked, with the events.
    pub(super) park: Vec<Parking<'a>>,
    /// What became of parked ones.
    pub(super) parked: Vec<&'a Park>,
    /// Rows that were delivered, by their identity.
    pub(super) delivered: &'a [String],
    /// Rows that were given up on, with the error and whether their outcome is not known.
    pub(super) dead: Vec<(String, &'a Error, bool)>,
    pub(super) changes: Option<&'a Changes>,
    /// What the publication has, as an expression.
    pub(super) contents: &'a str,
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    Stored,
    /// Nothing was written: the reader is no longer the member's under this epoch.
    Fenced,
    /// Nothing was written: the publication has not what it had when the last position was stored, so something before
    /// this one may have been left out.
    Changed,
}

/// Writes all of it in one transaction, or nothing.
pub(super) async fn write(
    outbox: &PgOutbox,
    c: &EventColumns,
    marks: Option<&dyn Store>,
    member: &Member,
    write: &Write<'_>,
) -> Result<Written> {
    let plain = write.park.is_empty()
        && write.parked.is_empty()
        && write.delivered.is_empty()
        && write.dead.is_empty();
    let mut conn = if plain { outbox.acquire().await? } else { outbox.begin().await? };
    let written = advance(outbox, conn.get(), c, member, write).await?;
    if written != Written::Stored {
        return Ok(written);
    }
    let mut keys = BTreeSet::new();
    // Rows to mark: those of this write, and those behind parked events that are finished now.
    let mut rows: Vec<(String, Option<&Error>)> =
        write.delivered.iter().map(|id| (id.clone(), None)).collect();
    let mut unknown: Vec<(String, Option<&Error>)> = Vec::new();
    for (id, error, is_unknown) in &write.dead {
        if *is_unknown { &mut unknown } else { &mut rows }.push((id.clone(), Some(*error)));
    }
    if !write.park.is_empty() {
        park(outbox, conn.get(), c, member, &write.park).await?;
        keys.extend(write.park.iter().map(|one| key(&one.row.event).to_owned()));
    }
    if !write.parked.is_empty() {
        if marks.is_some() {
            let seqs: Vec<i64> = write.parked.iter().map(|park| park.seq).collect();
            for (seq, id) in identities(outbox, conn.get(), c, member, &seqs).await? {
                match write.parked.iter().find(|park| park.seq == seq).map(|park| &park.fate) {
                    Some(Fate::Delivered) => rows.push((id, None)),
                    Some(Fate::Dead { error }) => rows.push((id, Some(error))),
                    Some(Fate::Unknown { error }) => unknown.push((id, Some(error))),
                    _ => {}
                }
            }
        }
        keys.extend(settle::update(outbox, conn.get(), c, member, &write.parked).await?);
    }
    if write.changes.is_some() && member.by_key() && !keys.is_empty() {
        let keys: Vec<String> = keys.into_iter().collect();
        settle::free(outbox, conn.get(), c, member.consumer(), &keys, member.block_on_dead).await?;
    }
    if let Some(marks) = marks {
        marks.mark(outbox, conn.get(), &rows, false).await?;
        marks.mark(outbox, conn.get(), &unknown, true).await?;
    }
    conn.commit().await?;
    Ok(Written::Stored)
}

/// Moves the position forward, fenced. A server that was set back to an earlier state has neither the position that was stored last
/// nor WAL up to the new one: the position is no longer ours there, either. What is acknowledged to the server must survive a crash, whatever
/// `synchronous_commit` says.
async fn advance(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    c: &EventColumns,
    member: &Member,
    write: &Write<'_>,
) -> Result<Written> {
    let sql = format!(
        "WITH sync AS MATERIALIZED (SELECT CASE current_setting('synchronous_commit') WHEN 'off' \
             THEN set_config('synchronous_commit', 'on', true) ELSE '' END AS word), \
         seen AS MATERIALIZED (SELECT s.published IS NULL OR coalesce(s.published = {contents}, false) AS same, \
             coalesce(s.lsn, '0/0') >= $13::pg_lsn AND $8::pg_lsn <= pg_current_wal_insert_lsn() AS ours FROM {slot} s \
           WHERE s.outbox = $1 AND s.name = $2), \
         moved AS (UPDATE {partition} p SET last_seq = $6, moved_at = now() FROM sync, seen \
           WHERE seen.same AND seen.ours AND p.outbox = $1 AND p.grp = $3 AND p.n = 0 AND p.owner = $4 AND p.epoch = $5 \
             AND (p.last_seq IN ($6, $7) OR $11 AND p.last_seq BETWEEN $7 AND $6) AND sync.word IS NOT NULL RETURNING p.n), \
         place AS (UPDATE {slot} s SET lsn = $8::pg_lsn, seq = $9, phase = 'streaming', \
             lsn_time = coalesce($10, s.lsn_time, now()), moved_at = now(), \
             idle_at = CASE WHEN $12 THEN now() ELSE s.idle_at END FROM moved \
           WHERE s.outbox = $1 AND s.name = $2 AND $8::pg_lsn > '0/0' AND (s.lsn < $8::pg_lsn OR s.lsn IS NULL OR s.phase <> 'streaming')) \
         SELECT (SELECT count(*) FROM moved), coalesce((SELECT same FROM seen), true)",
        partition = outbox.own("partition"),
        slot = outbox.own("slot"),
        contents = write.contents,
    );
    let (moved, same): (i64, bool) = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(member.group.stored())
        .bind(member.id)
        .bind(write.epoch)
        .bind(write.to)
        .bind(write.from)
        .bind(write.position.lsn.to_string())
        .bind(write.position.seq)
        .bind((write.position.time > 0).then(|| from_pg_micros(write.position.time)))
        .bind(write.is_uncertain)
        .bind(write.caught_up)
        .bind(write.stored_lsn.to_string())
        .fetch_one(conn)
        .await
        .map_err(doing("storing the position"))?;
    Ok(match (moved, same) {
        (1, _) => Written::Stored,
        (_, true) => Written::Fenced,
        (_, false) => Written::Changed,
    })
}

fn key(event: &std::result::Result<Event, BadRow>) -> &str {
    match event {
        Ok(event) => &event.aggregate_id,
        Err(bad) => bad.key.as_deref().unwrap_or_default(),
    }
}

/// Whether one of these transactions, whose commits are in the WAL, still runs in the eyes of others.
pub(super) async fn are_running(outbox: &PgOutbox, transactions: &HashSet<u32>) -> Result<bool> {
    let mut conn = outbox.acquire().await?;
    let (running, next): (Vec<i64>, i64) = sqlx::query_as(
        "WITH s AS (SELECT pg_current_snapshot() AS s) SELECT ARRAY(SELECT x::text::bigint FROM s, pg_snapshot_xip(s.s) x), \
         (SELECT pg_snapshot_xmax(s.s)::text::bigint FROM s)",
    )
    .persistent(!outbox.pooled)
    .fetch_one(conn.get())
    .await
    .map_err(doing("looking for commits that are not visible"))?;
    conn.commit().await?;
    // The WAL has the lower half of a transaction's number only.
    let low = |xid: i64| u32::try_from(xid & 0xFFFF_FFFF).unwrap_or_default();
    let is_ahead = |xid: u32| xid != 0 && xid.wrapping_sub(low(next)) < 1 << 31;
    Ok(running.iter().any(|xid| transactions.contains(&low(*xid)))
        || transactions.iter().any(|xid| is_ahead(*xid)))
}

/// Copies events to the parked ones, from here: the table need not have them.
async fn park(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    c: &EventColumns,
    member: &Member,
    parking: &[Parking<'_>],
) -> Result<()> {
    let fates = settle::Fates::new(parking.iter().map(|one| one.park));
    let sql = format!(
        "INSERT INTO {} AS p (outbox, consumer, seq, slot, key, id, stream, event_type, aggregate_type, aggregate_id, \
           op, payload, payload_bytes, headers, occurred_at, schema_version, extra, source_row, state, attempts, \
           due_at, error_code, error_message, max_attempts, identity) \
         VALUES ($1, $2, $3, {slot}, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, \
           $16, $17, $18, $19, now() + make_interval(secs => $20), $21, $22, $23, $24) \
         ON CONFLICT (outbox, consumer, seq) DO UPDATE SET state = excluded.state, attempts = excluded.attempts, \
           due_at = excluded.due_at, error_code = excluded.error_code, error_message = excluded.error_message \
           WHERE excluded.error_code IS NOT NULL",
        outbox.own("parked"),
        slot = slots::slot_of("$4"),
    );
    for (at, Parking { row, identity, .. }) in parking.iter().enumerate() {
        let event = &row.event;
        let query = sqlx::query(AssertSqlSafe(sql.clone()))
            .persistent(!outbox.pooled)
            .bind(&c.outbox)
            .bind(member.consumer())
            .bind(fates.seqs[at])
            .bind(storable(key(event), usize::MAX));
        let query = match event {
            Ok(event) => {
                let (text, bytes) = match &event.payload {
                    Payload::None => (None, None),
                    Payload::Json(text) => (Some(String::from_utf8_lossy(text).into_owned()), None),
                    Payload::Bytes(bytes) => (None, Some(bytes.to_vec())),
                };
                let extra = (!event.extra.is_empty())
                    .then(|| serde_json::Value::Object(event.extra.clone()).to_string());
                query
                    .bind(Some(event.id.clone()))
                    .bind(Some(event.stream.clone()))
                    .bind(Some(event.event_type.clone()))
                    .bind(Some(event.aggregate_type.clone()))
                    .bind(Some(event.aggregate_id.clone()))
                    .bind(Some(event.op.as_str()))
                    .bind(text)
                    .bind(bytes)
                    .bind(Some(serde_json::to_string(&event.headers).unwrap_or_default()))
                    .bind(Some(event.occurred_at))
                    .bind(Some(event.schema_version))
                    .bind(extra)
                    .bind(event.row.as_ref().map(|row| Json(super::parked_row::to_json(row))))
            }
            Err(bad) => query
                .bind(Some(storable(&bad.id, usize::MAX)))
                .bind(None::<String>)
                .bind(None::<String>)
                .bind(None::<String>)
                .bind(bad.key.as_deref().map(|key| storable(key, usize::MAX)))
                .bind(None::<&str>)
                .bind(None::<String>)
                .bind(None::<Vec<u8>>)
                .bind(None::<String>)
                .bind(None::<time::OffsetDateTime>)
                .bind(None::<i32>)
                .bind(None::<String>)
                .bind(None::<Json<serde_json::Value>>),
        };
        query
            .bind(fates.states[at])
            .bind(fates.attempts[at])
            .bind(fates.waits[at])
            .bind(&fates.codes[at])
            .bind(&fates.messages[at])
            .bind(row.max_attempts.map(i64::from))
            .bind(identity)
            .execute(&mut *conn)
            .await
            .map_err(doing("parking events"))?;
    }
    Ok(())
}

/// The rows behind parked events, where they have one.
async fn identities(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    c: &EventColumns,
    member: &Member,
    seqs: &[i64],
) -> Result<Vec<(i64, String)>> {
    let sql = format!(
        "SELECT seq, identity FROM {} WHERE outbox = $1 AND consumer = $2 AND seq = ANY($3::bigint[]) \
         AND identity IS NOT NULL",
        outbox.own("parked")
    );
    sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(seqs)
        .fetch_all(conn)
        .await
        .map_err(doing("looking for parked rows"))
}
