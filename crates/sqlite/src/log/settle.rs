//! Moving offsets and parking events, in one transaction.
//!
//! The transaction has the write lock from its start, so what the fence has seen stays true until it commits.

use std::collections::HashSet;

use airtight_core::{
    Error, Result,
    group::Member,
    log::{Changes, Fate, Park, behind_retention},
    table::{PayloadKind, literal, quote},
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, SqliteConnection};

use super::{
    floor,
    parked::{Rule, Scope},
    seq,
};
use crate::{
    error::db,
    members::seconds,
    settle::{LONGEST_RETRY, cut},
    sql::{NOW, Sql},
};

/// Applies `changes` in the transaction it is given, except those to partitions that are no longer the
/// member's, which are returned.
pub(crate) async fn settle_in(
    conn: &mut SqliteConnection,
    sql: &Sql,
    member: &Member,
    changes: &Changes,
) -> Result<Vec<u16>> {
    let accepted = move_offsets(conn, sql, member, changes).await?;
    let all = changes.moves.iter().map(|change| change.partition);
    let touched = changes.park.iter().chain(&changes.parked).map(|park| park.partition);
    let mut refused: Vec<u16> = all.chain(touched).filter(|n| !accepted.contains(n)).collect();
    refused.sort_unstable();
    refused.dedup();

    let ours = |parks: &[Park]| -> Vec<Value> {
        parks.iter().filter(|park| accepted.contains(&park.partition)).map(item).collect()
    };
    let park = ours(&changes.park);
    let mut keys = copy(conn, sql, member.consumer(), &park).await?;
    keys.extend(update(conn, sql, member.consumer(), &ours(&changes.parked)).await?);
    if member.by_key() {
        keys.sort_unstable();
        keys.dedup();
        let rule = Rule { sql, consumer: member.consumer(), block_on_dead: member.block_on_dead };
        rule.restore(conn, Scope::Keys(&keys)).await?;
    }
    Ok(refused)
}

/// Moves what is still the member's under its epoch, and where the offset is as the member knows it, or as
/// it shall be: then the answer to an earlier try was lost. Returns the partitions where that is so.
async fn move_offsets(
    conn: &mut SqliteConnection,
    sql: &Sql,
    member: &Member,
    changes: &Changes,
) -> Result<HashSet<u16>> {
    let items: Vec<Value> = changes
        .moves
        .iter()
        .map(|change| json!({"n": change.partition, "e": change.epoch, "f": change.from, "t": change.to}))
        .collect();
    let update = format!(
        "UPDATE airtight_offset AS f SET last_seq = j.value->>'t', \
         updated_at = CASE WHEN f.last_seq = j.value->>'t' THEN f.updated_at ELSE {NOW} END \
         FROM json_each(?1) AS j JOIN airtight_partition AS p \
         ON p.outbox = {0} AND p.grp = ?2 AND p.n = j.value->>'n' \
         WHERE f.outbox = {0} AND f.consumer = ?3 AND f.n = p.n \
         AND p.owner = ?4 AND p.epoch = j.value->>'e' \
         AND f.last_seq IN (j.value->>'f', j.value->>'t') RETURNING n",
        sql.name()
    );
    let moved: Vec<u16> = sqlx::query_scalar(AssertSqlSafe(update))
        .bind(Value::from(items).to_string())
        .bind(member.group.stored())
        .bind(member.consumer())
        .bind(member.id.to_string())
        .fetch_all(conn)
        .await
        .map_err(db)?;
    Ok(moved.into_iter().collect())
}

/// An event and what becomes of it, as JSON: state, time until it is due, error.
fn item(park: &Park) -> Value {
    let (state, after, error) = match &park.fate {
        Fate::Delivered => ("done", None, None),
        Fate::Held => ("held", None, None),
        Fate::Retry { after, error } => ("pending", Some(seconds((*after).min(LONGEST_RETRY))), Some(error)),
        Fate::Dead { error } => ("dead", None, Some(error)),
        Fate::Unknown { error } => ("unknown", None, Some(error)),
    };
    json!({
        "q": park.seq, "n": park.partition, "a": park.attempts, "s": state, "w": after,
        "c": error.map(Error::code), "m": error.map(|error| cut(error.to_string())),
    })
}

/// When an item is due: a held one has no time.
const WHEN: &str =
    "CASE WHEN j.value->>'w' IS NULL THEN NULL ELSE strftime('%Y-%m-%dT%H:%M:%fZ','now',j.value->>'w') END";

/// Copies events from the log to the parked ones. Returns their keys, in hex.
async fn copy(
    conn: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
    items: &[Value],
) -> Result<Vec<String>> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let (names, values): (Vec<&str>, Vec<String>) = event_columns(sql).into_iter().unzip();
    let names = names.join(", ");
    // CROSS JOIN keeps the order of the tables: rows are looked up by their seq. An event that is there
    // already was parked by an earlier try of this settle; a held one may have changed since.
    let insert = format!(
        "INSERT INTO airtight_parked (outbox, consumer, seq, n, state, attempts, next_retry_at, error_code, error_message, \
         {names}) SELECT {}, ?2, {seq}, j.value->>'n', \
         CASE j.value->>'s' WHEN 'held' THEN 'pending' ELSE j.value->>'s' END, j.value->>'a', {WHEN}, j.value->>'c', \
         j.value->>'m', {} FROM json_each(?1) AS j CROSS JOIN {} AS o WHERE {seq} = j.value->>'q' \
         ON CONFLICT (outbox, consumer, seq) DO UPDATE SET state = excluded.state, attempts = excluded.attempts, \
         next_retry_at = excluded.next_retry_at, error_code = excluded.error_code, \
         error_message = excluded.error_message WHERE excluded.error_code IS NOT NULL",
        sql.name(),
        values.join(", "),
        sql.spec.qualified(),
        seq = seq(sql, "o"),
    );
    let json = Value::from(items).to_string();
    sqlx::query(AssertSqlSafe(insert)).bind(&json).bind(consumer).execute(&mut *conn).await.map_err(db)?;
    let missing = format!(
        "SELECT min(j.value->>'q') FROM json_each(?1) AS j WHERE NOT EXISTS (SELECT 1 FROM airtight_parked AS p \
         WHERE p.outbox = {} AND p.consumer = ?2 AND p.seq = j.value->>'q')",
        sql.name()
    );
    let missing: Option<i64> = sqlx::query_scalar(AssertSqlSafe(missing))
        .bind(&json)
        .bind(consumer)
        .fetch_one(&mut *conn)
        .await
        .map_err(db)?;
    if let Some(missing) = missing {
        let floor = floor(conn, sql).await?.seq;
        return Err(behind_retention(consumer, missing - 1, floor.max(missing)));
    }
    let keys = format!(
        "SELECT DISTINCT hex(p.aggregate_id) FROM json_each(?1) AS j CROSS JOIN airtight_parked AS p \
         WHERE p.outbox = {} AND p.consumer = ?2 AND p.seq = j.value->>'q'",
        sql.name()
    );
    sqlx::query_scalar(AssertSqlSafe(keys)).bind(&json).bind(consumer).fetch_all(conn).await.map_err(db)
}

/// The columns of a parked event, and where they are in the log.
fn event_columns(sql: &Sql) -> Vec<(&'static str, String)> {
    let spec = &sql.spec;
    let raw =
        |name: Option<&String>| name.map_or_else(|| "NULL".to_owned(), |name| format!("o.{}", quote(name)));
    let created = raw(spec.created_at.as_ref());
    let occurred = match &spec.occurred_at {
        Some(name) => format!("COALESCE(o.{}, {created})", quote(name)),
        None => created.clone(),
    };
    let body = raw(Some(&spec.payload));
    let (text, bytes) = match (spec.payload_kind, &spec.payload_bytes) {
        (PayloadKind::Bytes | PayloadKind::Text, None) => ("NULL".into(), body),
        (PayloadKind::Bytes | PayloadKind::Text, Some(second)) => {
            ("NULL".into(), format!("COALESCE(o.{}, {body})", quote(second)))
        }
        (_, second) => (body, raw(second.as_ref())),
    };
    let extra: Vec<String> = spec
        .extra
        .iter()
        .map(|(name, column)| {
            let column = quote(column);
            // JSON has no bytes.
            format!(
                "{}, CASE typeof(o.{column}) WHEN 'blob' THEN CAST(o.{column} AS TEXT) ELSE o.{column} END",
                literal(name)
            )
        })
        .collect();
    let extra = if extra.is_empty() { "NULL".into() } else { format!("json_object({})", extra.join(", ")) };
    vec![
        ("id", format!("CAST(o.{} AS TEXT)", quote(&spec.id))),
        ("stream", sql.stream("o")),
        ("event_type", sql.field("o", &spec.event_type)),
        ("aggregate_type", sql.field("o", &spec.aggregate_type)),
        ("aggregate_id", sql.key("o")),
        ("op", raw(spec.op.as_ref())),
        ("headers", raw(spec.headers.as_ref())),
        ("occurred_at", occurred),
        ("created_at", created),
        ("schema_version", raw(spec.schema_version.as_ref())),
        ("max_attempts", raw(spec.max_attempts.as_ref())),
        ("extra", extra),
        ("payload", text),
        ("payload_bytes", bytes),
    ]
}

/// What became of events that were parked already. Returns their keys, in hex.
async fn update(
    conn: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
    items: &[Value],
) -> Result<Vec<String>> {
    let (done, rest): (Vec<Value>, Vec<Value>) = items.iter().cloned().partition(|item| item["s"] == "done");
    let delete = format!(
        "DELETE FROM airtight_parked WHERE outbox = {} AND consumer = ?2 \
         AND seq IN (SELECT j.value->>'q' FROM json_each(?1) AS j) RETURNING hex(aggregate_id)",
        sql.name()
    );
    let mut keys = Vec::new();
    for (statement, items) in [(delete, done), (change_statement(sql), rest)] {
        if items.is_empty() {
            continue;
        }
        let touched: Vec<String> = sqlx::query_scalar(AssertSqlSafe(statement))
            .bind(Value::from(items).to_string())
            .bind(consumer)
            .fetch_all(&mut *conn)
            .await
            .map_err(db)?;
        keys.extend(touched);
    }
    Ok(keys)
}

/// Changes the parked events of `?1`, of the consumer `?2`.
pub(crate) fn change_statement(sql: &Sql) -> String {
    // Found from the items, then by rowid: left to itself, SQLite goes through all parked events for each item.
    format!(
        "WITH j AS MATERIALIZED (SELECT q.rowid AS id, k.value AS value FROM json_each(?1) AS k \
         CROSS JOIN airtight_parked AS q WHERE q.outbox = {} AND q.consumer = ?2 AND q.seq = k.value->>'q') \
         UPDATE airtight_parked AS p SET state = CASE j.value->>'s' WHEN 'held' THEN 'pending' ELSE j.value->>'s' END, \
         attempts = j.value->>'a', next_retry_at = {WHEN}, error_code = j.value->>'c', error_message = j.value->>'m' \
         FROM j WHERE p.rowid = j.id RETURNING hex(aggregate_id)",
        sql.name()
    )
}
