//! Reads of a log for operators: lists, single events, status, and what `check` finds.
//!
//! The log's own rows have no state; they are shown as `stored`. A filter by state selects parked events.

use std::collections::BTreeMap;

use airtight_core::{
    Result,
    admin::{AWAY_SHOWN, Acted, BlockedKey, Detail, EventRow, Filter, Finding, Status, StreamStatus},
    log::{LogAdmin, Parked, ParkedFilter},
    state::State,
    table::quote,
};
use serde_json::json;
use sqlx::{
    AssertSqlSafe, Row as _, Sqlite, SqliteConnection,
    query::Query,
    sqlite::{SqliteArguments, SqliteRow},
};

use super::{
    admin::consumers,
    created,
    parked::{PARKED, unpack},
    seq,
};
use crate::{
    decode::{self, integer, lossy},
    error::db,
    inspect::{self, DEFAULT_LIMIT, read, relays},
    outbox::SqliteOutbox,
    sql::Sql,
};

// --- parked events --------------------------------------------------------------------------------------

/// The columns that [`read`] reads, and the consumer.
const PARKED_COLUMNS: &str = "p.seq, p.seq, p.id, p.stream, p.event_type, p.aggregate_type, p.aggregate_id, p.state, \
     p.attempts, 0, CASE WHEN p.state = 'pending' THEN COALESCE(p.next_retry_at, '9999-12-31T00:00:00.000Z') END, \
     p.error_code, p.error_message, strftime('%Y-%m-%dT%H:%M:%fZ', p.created_at), p.consumer";

/// The condition for a filter; [`bind_parked`] gives its parameters.
pub(super) fn parked_where(sql: &Sql, filter: &ParkedFilter) -> String {
    let mut all = vec![format!("p.outbox = {}", sql.name())];
    let tests = [
        (filter.consumer.is_some(), "p.consumer = ?1"),
        (!filter.seqs.is_empty(), "p.seq IN (SELECT value FROM json_each(?2))"),
        (filter.dead_only, "p.state IN ('dead', 'unknown')"),
        (filter.stream.is_some(), "p.stream = ?3"),
        (filter.event_type.is_some(), "p.event_type = ?4"),
        (filter.aggregate_id.is_some(), "p.aggregate_id = ?5"),
        (filter.error_code.is_some(), "p.error_code = ?6"),
        (filter.after_seq.is_some(), "p.seq > ?7"),
    ];
    all.extend(tests.into_iter().filter(|(on, _)| *on).map(|(_, test)| test.to_owned()));
    // SQLite wants no more parameters bound than the statement names.
    all.push("(?7 IS NULL OR ?7 IS NOT NULL)".into());
    all.join(" AND ")
}

pub(super) fn bind_parked<'q>(
    query: Query<'q, Sqlite, SqliteArguments>,
    filter: &'q ParkedFilter,
) -> Query<'q, Sqlite, SqliteArguments> {
    query
        .bind(&filter.consumer)
        .bind(json!(filter.seqs).to_string())
        .bind(&filter.stream)
        .bind(&filter.event_type)
        .bind(&filter.aggregate_id)
        .bind(&filter.error_code)
        .bind(filter.after_seq)
}

pub(super) async fn list_parked(
    conn: &mut SqliteConnection,
    sql: &Sql,
    filter: &ParkedFilter,
) -> Result<Vec<Parked>> {
    let limit = if filter.limit == 0 { DEFAULT_LIMIT } else { filter.limit };
    let select = format!(
        "SELECT {PARKED_COLUMNS} FROM airtight_parked AS p WHERE {} ORDER BY p.seq, p.consumer LIMIT ?8",
        parked_where(sql, filter)
    );
    let rows = bind_parked(sqlx::query(AssertSqlSafe(select)), filter)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(conn)
        .await
        .map_err(db)?;
    rows.iter().map(|row| Ok(Parked { consumer: row.try_get(14).map_err(db)?, row: read(row) })).collect()
}

pub(super) async fn show_parked(
    conn: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
    seq: i64,
) -> Result<Option<Detail>> {
    let which = format!("outbox = {} AND consumer = ?1 AND seq = ?3", sql.name());
    let select = format!("SELECT {PARKED_COLUMNS} FROM airtight_parked AS p WHERE {which} AND ?2 = ?2");
    let row = fetch_parked(conn, select, consumer, seq).await?;
    let Some(row) = row else { return Ok(None) };
    let row = read(&row);
    let select = format!("SELECT {} FROM airtight_parked AS o WHERE {which}", decode::columns(&PARKED));
    let Some(event) = fetch_parked(conn, select, consumer, seq).await? else { return Ok(None) };
    let (event, _) = decode::decode(&event, &PARKED, usize::MAX);
    let event = event.map_err(|bad| bad.error.to_string()).map(|mut event| {
        unpack(&mut event);
        event
    });
    Ok(Some(Detail { row, event }))
}

async fn fetch_parked(
    conn: &mut SqliteConnection,
    select: String,
    consumer: &str,
    seq: i64,
) -> Result<Option<SqliteRow>> {
    sqlx::query(AssertSqlSafe(select))
        .bind(consumer)
        .bind(i64::MAX)
        .bind(seq)
        .fetch_optional(conn)
        .await
        .map_err(db)
}

// --- the log --------------------------------------------------------------------------------------------

/// The columns that [`read`] reads, for a row of the log.
fn columns(sql: &Sql) -> String {
    [
        sql.identity("o"),
        seq(sql, "o"),
        format!("CAST(o.{} AS TEXT)", quote(&sql.spec.id)),
        sql.stream("o"),
        sql.field("o", &sql.spec.event_type),
        sql.field("o", &sql.spec.aggregate_type),
        sql.key("o"),
        "'stored', 0, 0, NULL, NULL, NULL".into(),
        created(sql, "o"),
    ]
    .join(", ")
}

pub(crate) async fn list(outbox: &SqliteOutbox, filter: &Filter) -> Result<Vec<EventRow>> {
    let sql = outbox.log_sql()?;
    let mut conn = outbox.acquire().await?;
    let limit =
        i64::try_from(if filter.limit == 0 { DEFAULT_LIMIT } else { filter.limit }).unwrap_or(i64::MAX);
    let direction = if filter.newest_first { "DESC" } else { "ASC" };
    let parked = !filter.states.is_empty() || filter.error_code.is_some();
    let select = if parked {
        let states = match filter.states.as_slice() {
            [] => String::new(),
            states => {
                let words: Vec<String> = states.iter().map(|state| format!("'{}'", state.as_str())).collect();
                format!(" AND p.state IN ({})", words.join(", "))
            }
        };
        format!(
            "SELECT {PARKED_COLUMNS} FROM airtight_parked AS p WHERE p.outbox = {} AND (?1 IS NULL OR p.stream = ?1) \
             AND (?2 IS NULL OR p.event_type = ?2) AND (?3 IS NULL OR p.aggregate_id = ?3) \
             AND (?4 IS NULL OR p.error_code = ?4) AND (?5 IS NULL OR p.seq > ?5){states} \
             ORDER BY p.seq {direction} LIMIT ?6",
            sql.name()
        )
    } else {
        format!(
            "SELECT {} FROM {} AS o WHERE (?1 IS NULL OR {} = ?1) AND (?2 IS NULL OR {} = ?2) AND (?3 IS NULL OR {} = ?3) \
             AND ?4 IS NULL AND {seq} > COALESCE(?5, {seq} - 1) ORDER BY {seq} {direction} LIMIT ?6",
            columns(sql),
            sql.spec.qualified(),
            sql.stream("o"),
            sql.field("o", &sql.spec.event_type),
            sql.key("o"),
            seq = seq(sql, "o")
        )
    };
    let rows = sqlx::query(AssertSqlSafe(select))
        .bind(&filter.stream)
        .bind(&filter.event_type)
        .bind(&filter.aggregate_id)
        .bind(&filter.error_code)
        .bind(filter.after_seq)
        .bind(limit)
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    Ok(rows.iter().map(read).collect())
}

/// One event of the log; or, where retention has removed it, as somebody has parked it.
pub(crate) async fn show(outbox: &SqliteOutbox, id: &str) -> Result<Option<Detail>> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.snapshot().await?;
    let conn = &mut *tx;
    if let Some(number) = find(conn, sql, id).await? {
        let which = format!("FROM {} AS o WHERE {} = ?1", sql.spec.qualified(), seq(sql, "o"));
        let select = format!("SELECT {} {which}", columns(sql));
        let row = sqlx::query(AssertSqlSafe(select)).bind(number).fetch_one(&mut *conn).await.map_err(db)?;
        let select = format!("SELECT {} {which}", decode::columns(sql));
        let event = sqlx::query(AssertSqlSafe(select))
            .bind(number)
            .bind(i64::MAX)
            .fetch_one(&mut *conn)
            .await
            .map_err(db)?;
        let (event, _) = decode::decode(&event, sql, usize::MAX);
        return Ok(Some(Detail { row: read(&row), event: event.map_err(|bad| bad.error.to_string()) }));
    }
    match parked_by_id(conn, sql, id).await?.first() {
        Some((consumer, seq, _)) => show_parked(conn, sql, consumer, *seq).await,
        None => Ok(None),
    }
}

/// The seq of an event in the log, by its id or by itself.
async fn find(conn: &mut SqliteConnection, sql: &Sql, id: &str) -> Result<Option<i64>> {
    let mut tests = vec![format!("o.{} = ?1", quote(&sql.spec.id))];
    if id.parse::<i64>().is_ok() {
        tests.push(format!("{} = CAST(?1 AS INTEGER)", seq(sql, "o")));
    }
    for test in tests {
        let select =
            format!("SELECT {} FROM {} AS o WHERE {test} LIMIT 1", seq(sql, "o"), sql.spec.qualified());
        let found: Option<i64> = sqlx::query_scalar(AssertSqlSafe(select))
            .bind(id)
            .fetch_optional(&mut *conn)
            .await
            .map_err(db)?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Whose parked event has this id or seq, with its state.
async fn parked_by_id(
    conn: &mut SqliteConnection,
    sql: &Sql,
    id: &str,
) -> Result<Vec<(String, i64, Option<State>)>> {
    let select = format!(
        "SELECT consumer, seq, state FROM airtight_parked WHERE outbox = {} AND (id = ?1 OR seq = ?2) ORDER BY consumer, seq",
        sql.name()
    );
    let rows = sqlx::query(AssertSqlSafe(select))
        .bind(id)
        .bind(id.parse::<i64>().ok())
        .fetch_all(conn)
        .await
        .map_err(db)?;
    rows.iter()
        .map(|row| {
            let state = State::parse(&lossy(row, 2).unwrap_or_default());
            Ok((row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?, state))
        })
        .collect()
}

/// Retries or discards an event wherever it is parked and waits for a person.
pub(crate) async fn act(outbox: &SqliteOutbox, id: &str, retry: bool) -> Result<Acted> {
    let sql = outbox.log_sql()?;
    let mut conn = outbox.acquire().await?;
    let parked = parked_by_id(&mut conn, sql, id).await?;
    let stored = find(&mut conn, sql, id).await?.is_some();
    drop(conn);
    let mut acted = 0;
    for (consumer, seq, _) in &parked {
        let filter =
            ParkedFilter { consumer: Some(consumer.clone()), seqs: vec![*seq], ..ParkedFilter::default() };
        acted +=
            if retry { outbox.retry_parked(&filter).await? } else { outbox.discard_parked(&filter).await? };
    }
    Ok(match (acted, parked.is_empty(), stored) {
        (1.., ..) => Acted::Yes,
        // It waits for its own next attempt.
        (0, false, _) => Acted::Refused(State::Pending),
        // Nobody has failed with it: there is nothing to decide.
        (0, true, true) => Acted::Refused(State::Done),
        (0, true, false) => Acted::NotFound,
    })
}

/// A filter for events as one for those of them that are parked and dead.
pub(crate) fn dead(filter: &Filter) -> ParkedFilter {
    ParkedFilter {
        dead_only: true,
        stream: filter.stream.clone(),
        event_type: filter.event_type.clone(),
        aggregate_id: filter.aggregate_id.clone(),
        error_code: filter.error_code.clone(),
        after_seq: filter.after_seq,
        ..ParkedFilter::default()
    }
}

// --- status and check -----------------------------------------------------------------------------------

pub(crate) async fn status(outbox: &SqliteOutbox) -> Result<Status> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.snapshot().await?;
    let conn = &mut *tx;
    let held = format!(
        "SELECT count(*) FROM (SELECT DISTINCT consumer, aggregate_id FROM airtight_parked \
         WHERE outbox = {} AND state = 'pending' AND next_retry_at IS NULL)",
        sql.name()
    );
    let held: i64 = sqlx::query_scalar(AssertSqlSafe(held)).fetch_one(&mut *conn).await.map_err(db)?;
    let away = format!(
        "SELECT consumer, error_code, COALESCE(error_message, ''), count(*) AS n FROM airtight_parked \
         WHERE outbox = {} AND state = 'pending' AND error_code LIKE ?1 GROUP BY 1, 2, 3 ORDER BY n DESC, 3 \
         LIMIT {AWAY_SHOWN}",
        sql.name()
    );
    Ok(Status {
        outbox: sql.spec.display_name(),
        streams: streams(conn, sql).await?.into_values().collect(),
        relays: relays(conn, sql).await?,
        blocked_keys: held.unsigned_abs(),
        consumers: consumers(conn, sql).await?,
        slots: Vec::new(),
        away: inspect::away(conn, &away).await?,
    })
}

/// What is parked, per stream; how far each consumer has come is with the consumer.
async fn streams(conn: &mut SqliteConnection, sql: &Sql) -> Result<BTreeMap<String, StreamStatus>> {
    let select = format!(
        "SELECT stream, state, count(*), (julianday('now') - julianday(min(created_at))) * 86400.0 FROM airtight_parked \
         WHERE outbox = {} GROUP BY 1, 2",
        sql.name()
    );
    let mut streams: BTreeMap<String, StreamStatus> = BTreeMap::new();
    for row in sqlx::query(AssertSqlSafe(select)).fetch_all(conn).await.map_err(db)? {
        let name = lossy(&row, 0).unwrap_or_default();
        let stream = streams
            .entry(name.clone())
            .or_insert_with(|| StreamStatus { stream: name, ..StreamStatus::default() });
        let count = integer(&row, 2).unwrap_or(0).unsigned_abs();
        match lossy(&row, 1).as_deref() {
            Some("dead") => stream.dead += count,
            Some("unknown") => stream.unknown += count,
            _ => {
                stream.retrying += count;
                let age: Option<f64> = row.try_get_unchecked(3).map_err(db)?;
                stream.oldest_pending_seconds = age.map(|age| age.max(0.0));
            }
        }
    }
    Ok(streams)
}

pub(crate) async fn blocked(outbox: &SqliteOutbox, limit: usize) -> Result<Vec<BlockedKey>> {
    let sql = outbox.log_sql()?;
    let mut conn = outbox.acquire().await?;
    let select = format!(
        "SELECT p.aggregate_id, e.id, e.state, count(*) FROM airtight_parked AS p JOIN airtight_parked AS e \
         ON e.outbox = p.outbox AND e.consumer = p.consumer AND e.aggregate_id = p.aggregate_id AND e.seq = \
         (SELECT min(f.seq) FROM airtight_parked AS f WHERE f.outbox = p.outbox AND f.consumer = p.consumer \
         AND f.aggregate_id = p.aggregate_id AND f.seq < p.seq) \
         WHERE p.outbox = {} AND p.state = 'pending' AND p.next_retry_at IS NULL \
         GROUP BY p.consumer, p.aggregate_id, e.seq ORDER BY min(p.seq) LIMIT ?1",
        sql.name()
    );
    let rows = sqlx::query(AssertSqlSafe(select))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    Ok(rows
        .iter()
        .map(|row| BlockedKey {
            aggregate_id: lossy(row, 0).unwrap_or_default(),
            behind_id: lossy(row, 1).unwrap_or_default(),
            behind_state: lossy(row, 2).unwrap_or_default(),
            held: integer(row, 3).unwrap_or(0).unsigned_abs(),
        })
        .collect())
}

/// What keeps the log from being followed, or is worth knowing about its consumers.
pub(crate) async fn check(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<Finding>> {
    let mut findings = super::problems(conn, sql).await?;
    if !findings.is_empty() {
        return Ok(findings);
    }
    for consumer in consumers(conn, sql).await? {
        let name = &consumer.name;
        if consumer.behind_retention {
            let message = format!(
                "consumer `{name}` stands at seq {}, and retention has removed events beyond that",
                consumer.offset
            );
            let remedy = "rebuild what it feeds and seek it (docs/operations.md, \"Rebuilding a consumer\")";
            findings.push(Finding::fatal(message).with_remedy(remedy));
        }
        if consumer.offset > consumer.end {
            findings
                .push(super::restarted(&sql.spec.display_name(), name, consumer.offset, consumer.end).into());
        }
        let idle = consumer.instances.is_empty() && consumer.lag_events > 0 && !consumer.paused;
        if idle {
            findings.push(Finding::note(format!(
                "consumer `{name}` has {} events to read, and no live relay works for it",
                consumer.lag_events
            )));
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::PARKED_COLUMNS;
    use crate::sql::HELD;

    #[test]
    fn a_held_event_is_told_as_the_queue_tells_it() {
        assert!(PARKED_COLUMNS.contains(HELD));
    }
}
