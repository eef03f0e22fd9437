//! Reads for operators: lists, counts, ages, blocked keys, and what `check` finds.

use std::collections::BTreeMap;

use airtight_core::{
    Code, Error, Result,
    admin::{
        AWAY_SHOWN, AwayStatus, BlockedKey, Detail, EventRow, Filter, Finding, RelayStatus, Status,
        StreamStatus,
    },
    queue::RowKey,
    state::State,
    table::quote,
};
use sqlx::{AssertSqlSafe, Row as _, SqliteConnection, sqlite::SqliteRow};

use crate::{
    candidate::key_value,
    decode::{self, integer, lossy, parse_time, row_key},
    error::db,
    fits,
    hold::{held_keys, is_held},
    log,
    outbox::SqliteOutbox,
    schema,
    sql::{HELD, NOW, Sql},
};

/// Events in a list when the filter does not say.
pub(crate) const DEFAULT_LIMIT: usize = 50;

/// Done events are counted up to this.
const COUNT_DONE: u32 = 1_000_000;

// --- lists ----------------------------------------------------------------------------------------------

pub(crate) async fn list(outbox: &SqliteOutbox, filter: &Filter) -> Result<Vec<EventRow>> {
    let sql = outbox.queue_sql()?;
    let mut conn = outbox.acquire().await?;
    let rows = select(&mut conn, sql, filter).await?;
    Ok(rows.iter().map(read).collect())
}

/// The identities of what a filter finds.
pub(crate) async fn matching(conn: &mut SqliteConnection, sql: &Sql, filter: &Filter) -> Result<Vec<RowKey>> {
    select(conn, sql, filter).await?.iter().map(|row| row_key(row, 0)).collect()
}

async fn select(conn: &mut SqliteConnection, sql: &Sql, filter: &Filter) -> Result<Vec<SqliteRow>> {
    let limit = if filter.limit == 0 { DEFAULT_LIMIT } else { filter.limit };
    sqlx::query(AssertSqlSafe(list_statement(sql, filter)))
        .bind(&filter.stream)
        .bind(&filter.event_type)
        .bind(&filter.aggregate_id)
        .bind(&filter.error_code)
        .bind(filter.after_seq)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(conn)
        .await
        .map_err(db)
}

pub(crate) fn list_statement(sql: &Sql, filter: &Filter) -> String {
    let direction = if filter.newest_first { "DESC" } else { "ASC" };
    let closed = |state: &State| matches!(state, State::Dead | State::Unknown);
    let order_by = if !filter.states.is_empty() && filter.states.iter().all(closed) {
        sql.sorted("o", direction)
    } else {
        sql.order_by("o", direction)
    };
    format!(
        "SELECT {} FROM {} WHERE {} {order_by} LIMIT ?6",
        columns(sql),
        sql.from("o"),
        conditions(sql, filter)
    )
}

fn conditions(sql: &Sql, filter: &Filter) -> String {
    let mut all = Vec::new();
    if !filter.states.is_empty() {
        let states: Vec<String> = filter.states.iter().map(|state| in_state(sql, *state)).collect();
        all.push(format!("({})", states.join(" OR ")));
    }
    if filter.stream.is_some() {
        all.push(format!("{} = ?1", sql.stream("o")));
    }
    if filter.event_type.is_some() {
        all.push(format!("{} = ?2", sql.field("o", &sql.spec.event_type)));
    }
    if filter.aggregate_id.is_some() {
        all.push(format!("{} = ?3", sql.key("o")));
    }
    if filter.error_code.is_some() {
        all.push(format!("{} = ?4", sql.error_code("o")));
    }
    if let (Some(_), Some(seq)) = (filter.after_seq, sql.seq("o")) {
        all.push(format!("{seq} > ?5"));
    }
    if all.is_empty() { "true".into() } else { all.join(" AND ") }
}

/// A test for a state. The phase comes first where there is one, since the indexes go by it.
fn in_state(sql: &Sql, state: State) -> String {
    let (phase, test) = match state {
        State::Pending => (sql.open("o"), sql.pending("o")),
        State::Processing => (sql.open("o"), sql.processing("o")),
        State::Done => return sql.done("o"),
        State::Dead => (sql.closed("o"), sql.dead("o")),
        State::Unknown => (sql.closed("o"), sql.unknown("o")),
    };
    format!("({phase} AND {test})")
}

fn columns(sql: &Sql) -> String {
    let spec = &sql.spec;
    let id = format!("CAST(o.{} AS TEXT)", quote(&spec.id));
    let seq = sql.seq("o").unwrap_or_else(|| sql.identity("o"));
    [
        sql.identity("o"),
        format!("CASE typeof({seq}) WHEN 'integer' THEN {seq} ELSE 0 END"),
        id,
        sql.stream("o"),
        sql.field("o", &spec.event_type),
        sql.field("o", &spec.aggregate_type),
        sql.key("o"),
        sql.state("o"),
        sql.count("o"),
        sql.lost("o"),
        sql.retry("o"),
        sql.error_code("o"),
        sql.error_message("o"),
        sql.created("o"),
    ]
    .join(", ")
}

pub(crate) fn read(row: &SqliteRow) -> EventRow {
    let text = |at| lossy(row, at).unwrap_or_default();
    let number = |at| integer(row, at).and_then(|number| u32::try_from(number).ok()).unwrap_or(0);
    let retry_at = lossy(row, 10);
    let held = retry_at.as_deref() == Some(HELD);
    EventRow {
        seq: integer(row, 1).unwrap_or(0),
        id: text(2),
        stream: text(3),
        event_type: text(4),
        aggregate_type: text(5),
        aggregate_id: text(6),
        state: text(7),
        attempts: number(8),
        lost_leases: number(9),
        next_retry_at: retry_at.filter(|_| !held).and_then(|text| parse_time(&text)),
        held,
        error_code: lossy(row, 11),
        error_message: lossy(row, 12),
        created_at: lossy(row, 13).and_then(|text| parse_time(&text)),
    }
}

/// One row by the event's id, or else by its seq.
async fn find_row(conn: &mut SqliteConnection, sql: &Sql, id: &str) -> Result<Option<SqliteRow>> {
    let mut tests = vec![format!("o.{} = ?1", quote(&sql.spec.id))];
    if let (Some(seq), Ok(_)) = (sql.seq("o"), id.parse::<i64>()) {
        tests.push(format!("{seq} = CAST(?1 AS INTEGER)"));
    }
    // What lists show in its place.
    if sql.spec.seq.is_none() && id.parse::<i64>().is_ok() {
        tests.push(format!("{} = CAST(?1 AS INTEGER)", sql.identity("o")));
    }
    for test in tests {
        let statement = format!("SELECT {} FROM {} WHERE {test} LIMIT 1", columns(sql), sql.from("o"));
        let row =
            sqlx::query(AssertSqlSafe(statement)).bind(id).fetch_optional(&mut *conn).await.map_err(db)?;
        if row.is_some() {
            return Ok(row);
        }
    }
    Ok(None)
}

/// An event's identity and state; an error when the table's word means nothing to us, since it may mean
/// something to others.
pub(crate) async fn find(
    conn: &mut SqliteConnection,
    sql: &Sql,
    id: &str,
) -> Result<Option<(RowKey, State)>> {
    let Some(row) = find_row(conn, sql, id).await? else { return Ok(None) };
    let word = lossy(&row, 7).unwrap_or_default();
    let state = State::parse(&word).ok_or_else(|| {
        Error::permanent(
            Code::BAD_STATUS,
            format!("event {id}: the mapping does not say what its status `{word}` means"),
        )
    })?;
    Ok(Some((row_key(&row, 0)?, state)))
}

pub(crate) async fn show(outbox: &SqliteOutbox, id: &str) -> Result<Option<Detail>> {
    let sql = outbox.queue_sql()?;
    let mut conn = outbox.acquire().await?;
    let Some(found) = find_row(&mut conn, sql, id).await? else { return Ok(None) };
    let key = row_key(&found, 0)?;
    let mut events = decode::events(&mut conn, sql, &[key_value(&key)], usize::MAX).await?;
    let event = match events.remove(&key) {
        Some((Ok(event), _)) => Ok(event),
        Some((Err(bad), _)) => Err(bad.error.to_string()),
        None => return Ok(None),
    };
    Ok(Some(Detail { row: read(&found), event }))
}

// --- status ---------------------------------------------------------------------------------------------

pub(crate) async fn status(outbox: &SqliteOutbox) -> Result<Status> {
    let sql = outbox.queue_sql()?;
    let mut conn = outbox.acquire().await?;
    let streams = streams(&mut conn, sql).await?;
    let relays = relays(&mut conn, sql).await?;
    let count = format!("WITH {} SELECT count(*) FROM k WHERE key IS NOT NULL", held_keys(sql));
    let blocked: i64 = sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(&mut *conn).await.map_err(db)?;
    let away = format!(
        "SELECT NULL, COALESCE({code}, ''), COALESCE({message}, ''), count(*) AS n FROM {from} \
         WHERE {open} AND {retry} IS NOT NULL AND COALESCE({code}, {message}) LIKE ?1 \
         GROUP BY 2, 3 ORDER BY n DESC, 3 LIMIT {AWAY_SHOWN}",
        code = sql.error_code("o"),
        message = sql.error_message("o"),
        from = sql.from("o"),
        open = sql.open("o"),
        retry = sql.retry("o"),
    );
    Ok(Status {
        consumers: Vec::new(),
        outbox: sql.spec.display_name(),
        streams: streams.into_values().collect(),
        relays,
        blocked_keys: blocked.unsigned_abs(),
        slots: Vec::new(),
        away: self::away(&mut conn, &away).await?,
    })
}

/// What events wait for that are not to blame: a consumer, code, message and count for each row of `select`.
pub(crate) async fn away(conn: &mut SqliteConnection, select: &str) -> Result<Vec<AwayStatus>> {
    let rows =
        sqlx::query(AssertSqlSafe(select)).bind(Error::AWAY_CODES).fetch_all(conn).await.map_err(db)?;
    let status = |row| AwayStatus {
        consumer: lossy(row, 0),
        code: lossy(row, 1).unwrap_or_default(),
        message: lossy(row, 2).unwrap_or_default(),
        events: integer(row, 3).unwrap_or(0).unsigned_abs(),
    };
    Ok(rows.iter().map(status).collect())
}

async fn streams(conn: &mut SqliteConnection, sql: &Sql) -> Result<BTreeMap<String, StreamStatus>> {
    let age = match &sql.spec.created_at {
        // A row from the future is as young as can be.
        Some(name) => format!("max((julianday('now') - min(julianday(o.{}))) * 86400.0, 0.0)", quote(name)),
        None => "NULL".into(),
    };
    // Apart, because each has an index and both together have none.
    let [hot, waiting] = [("IS NULL", "pending"), ("IS NOT NULL", "retrying")].map(|(test, word)| {
        format!(
            "SELECT {}, CASE WHEN {} THEN 'processing' ELSE '{word}' END, count(*), {age} FROM {} \
             WHERE {} AND {} {test} GROUP BY 1, 2",
            sql.stream("o"),
            sql.processing("o"),
            sql.from("o"),
            sql.open("o"),
            sql.retry("o")
        )
    });
    let closed = format!(
        "SELECT {}, CASE WHEN {} THEN 'unknown' ELSE 'dead' END, count(*), NULL FROM {} WHERE {} GROUP BY 1, 2",
        sql.stream("o"),
        sql.unknown("o"),
        sql.from("o"),
        sql.closed("o")
    );
    let done = format!(
        "SELECT stream, 'done', count(*), NULL FROM (SELECT {} AS stream FROM {} WHERE {} LIMIT {COUNT_DONE}) GROUP BY 1",
        sql.stream("o"),
        sql.from("o"),
        sql.done("o")
    );
    let unexplained = format!(
        "SELECT {}, 'unexplained', count(*), NULL FROM {} WHERE {} GROUP BY 1",
        sql.stream("o"),
        sql.from("o"),
        sql.unexplained("o")
    );
    let mut statements = vec![hot, waiting, closed, done];
    if !sql.canonical {
        // airtight's own table takes no other words.
        statements.push(unexplained);
    }
    let mut streams: BTreeMap<String, StreamStatus> = BTreeMap::new();
    for statement in statements {
        for row in sqlx::query(AssertSqlSafe(statement)).fetch_all(&mut *conn).await.map_err(db)? {
            let name = lossy(&row, 0).unwrap_or_default();
            let stream = streams
                .entry(name.clone())
                .or_insert_with(|| StreamStatus { stream: name, ..StreamStatus::default() });
            let count = integer(&row, 2).unwrap_or(0).unsigned_abs();
            match lossy(&row, 1).as_deref() {
                Some("processing") => stream.processing += count,
                Some("retrying") => stream.retrying += count,
                Some("pending") => stream.pending += count,
                Some("unknown") => stream.unknown += count,
                Some("dead") => stream.dead += count,
                Some("unexplained") => stream.unexplained += count,
                _ => stream.done += count,
            }
            let age: Option<f64> = row.try_get_unchecked(3).map_err(db)?;
            if let Some(age) = age {
                let oldest = stream.oldest_pending_seconds.unwrap_or(0.0);
                stream.oldest_pending_seconds = Some(oldest.max(age));
            }
        }
    }
    Ok(streams)
}

pub(crate) async fn relays(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<RelayStatus>> {
    let statement = format!(
        "SELECT r.id, r.host, r.streams, r.ord, \
         (SELECT count(*) FROM airtight_partition AS p WHERE p.outbox = r.outbox AND p.grp = r.grp AND p.owner = r.id), \
         (julianday(r.expires_at) - julianday('now')) * 86400.0 \
         FROM airtight_relay AS r WHERE r.outbox = {} AND r.expires_at >= {NOW} ORDER BY r.host, r.id",
        sql.name()
    );
    let rows = sqlx::query(AssertSqlSafe(statement)).fetch_all(conn).await.map_err(db)?;
    rows.iter()
        .map(|row| {
            let streams: String = row.try_get(2).map_err(db)?;
            Ok(RelayStatus {
                id: row.try_get(0).map_err(db)?,
                host: row.try_get(1).map_err(db)?,
                streams: serde_json::from_str(&streams).unwrap_or_default(),
                order: row.try_get(3).map_err(db)?,
                partitions: integer(row, 4).unwrap_or(0).unsigned_abs(),
                lease_seconds: row.try_get_unchecked::<f64, _>(5).map_err(db)?.max(0.0),
            })
        })
        .collect()
}

pub(crate) async fn blocked(outbox: &SqliteOutbox, limit: usize) -> Result<Vec<BlockedKey>> {
    let sql = outbox.queue_sql()?;
    let mut conn = outbox.acquire().await?;
    // A few more than asked for, since some may be about to be freed.
    let keys = format!("WITH {} SELECT key FROM k WHERE key IS NOT NULL LIMIT ?1", held_keys(sql));
    let keys = sqlx::query(AssertSqlSafe(keys))
        .bind(i64::try_from(limit.saturating_add(100)).unwrap_or(i64::MAX))
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    // What waits for a retry is the nearer reason; a dead one blocks only where the relay wants that.
    let reasons = [
        format!("{} AND {} IS NOT NULL AND {1} <> '{HELD}'", sql.open("o"), sql.retry("o")),
        sql.closed("o"),
    ];
    let mut blocked = Vec::new();
    for key in keys.iter().filter_map(|row| lossy(row, 0)) {
        if blocked.len() >= limit {
            break;
        }
        let count = format!(
            "SELECT count(*) FROM {} WHERE {} AND {} = ?1",
            sql.from("o"),
            is_held(sql, "o"),
            sql.key("o")
        );
        let held: i64 =
            sqlx::query_scalar(AssertSqlSafe(count)).bind(&key).fetch_one(&mut *conn).await.map_err(db)?;
        for reason in &reasons {
            let statement = format!(
                "SELECT {} FROM {} WHERE {reason} AND {} = ?1 {} LIMIT 1",
                columns(sql),
                sql.from("o"),
                sql.key("o"),
                sql.order_by("o", "ASC")
            );
            let row = sqlx::query(AssertSqlSafe(statement))
                .bind(&key)
                .fetch_optional(&mut *conn)
                .await
                .map_err(db)?;
            if let Some(behind) = row.as_ref().map(read) {
                blocked.push(BlockedKey {
                    aggregate_id: key.clone(),
                    behind_id: behind.id,
                    behind_state: behind.state,
                    held: held.unsigned_abs(),
                });
                break;
            }
        }
    }
    Ok(blocked)
}

// --- check ----------------------------------------------------------------------------------------------

pub(crate) async fn check(outbox: &SqliteOutbox) -> Result<Vec<Finding>> {
    let sql = outbox.sql();
    let mut conn = outbox.acquire().await?;
    let mut findings = if outbox.is_log() {
        log::inspect::check(&mut conn, sql).await?
    } else {
        schema::problems(&mut conn, sql).await?
    };
    if !findings.is_empty() && findings.iter().all(|finding| finding.fatal) {
        return Ok(findings);
    }
    findings.extend(schema::notes(&mut conn, sql).await?);
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *conn).await.map_err(db)?;
    if !mode.eq_ignore_ascii_case("wal") {
        findings.push(Finding::note(format!(
            "journal_mode is {mode}: with WAL, readers and the writer do not block each other"
        )));
    }
    let synchronous: i64 =
        sqlx::query_scalar("PRAGMA synchronous").fetch_one(&mut *conn).await.map_err(db)?;
    if synchronous < 2 {
        findings.push(Finding::note(
            "synchronous is below FULL on this connection: a power loss may lose committed events",
        ));
    }
    if sql.spec.seq.is_none() {
        findings.push(Finding::note(format!(
            "{} has no ascending column: its order is by creation time and identity, unspecified within one transaction",
            sql.spec.display_name()
        )));
    }
    findings.extend(fits::suspicion(&mut conn, sql).await?);
    if outbox.is_log() {
        return Ok(findings);
    }
    findings.extend(fits::unexplained(&mut conn, sql).await?);
    let relays = relays(&mut conn, sql).await?;
    for stream in unread(&mut conn, sql, &relays).await? {
        findings
            .push(Finding::note(format!("stream {stream} has pending events, and no live relay reads it")));
    }
    Ok(findings)
}

async fn unread(conn: &mut SqliteConnection, sql: &Sql, relays: &[RelayStatus]) -> Result<Vec<String>> {
    if relays.iter().any(|relay| relay.streams.is_empty()) {
        return Ok(Vec::new());
    }
    let open = |test: &str| {
        format!(
            "SELECT {} FROM {} WHERE {} AND {} {test}",
            sql.stream("o"),
            sql.from("o"),
            sql.open("o"),
            sql.retry("o")
        )
    };
    let select = format!("{} UNION {} ORDER BY 1 LIMIT 1000", open("IS NULL"), open("IS NOT NULL"));
    let rows = sqlx::query(AssertSqlSafe(select)).fetch_all(conn).await.map_err(db)?;
    let streams = rows.iter().filter_map(|row| lossy(row, 0));
    Ok(streams.filter(|stream| !relays.iter().any(|relay| relay.streams.contains(stream))).collect())
}
