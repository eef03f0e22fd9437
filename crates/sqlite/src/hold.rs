//! Freeing events that were held back.
//!
//! An event is held while an earlier event of its key waits for a retry, or is dead and the relay blocks keys on dead
//! events. Held events are in a separate index, so claims and other keys do not read them. There is no notification when
//! an event becomes free: relays look key by key, after a settle that may have freed events and with every heartbeat.

use std::collections::HashSet;

use airtight_core::{
    Order, Result,
    group::{Member, hash_of, partition_of},
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, SqliteConnection, sqlite::SqliteRow};

use crate::{
    candidate::{key_value, streams_bind, streams_where},
    decode::{self, row_key},
    error::db,
    outbox::SqliteOutbox,
    settle::run,
    sql::{HELD, RowField, Sql},
};

/// Rows freed in one call.
const FREE_AT_ONCE: usize = 10_000;

pub(crate) async fn unhold(outbox: &SqliteOutbox, member: &Member, partitions: &[u16]) -> Result<u64> {
    let sql = outbox.queue_sql()?;
    // A look without the write lock first: most of the time nothing is to be freed, and writers go on.
    let mut conn = outbox.acquire().await?;
    if free_rows(&mut conn, sql, member, partitions).await?.is_empty() {
        return Ok(0);
    }
    drop(conn);
    let mut tx = outbox.begin().await?;
    let rows = free_rows(tx.conn(), sql, member, partitions).await?;
    free(tx.conn(), sql, &rows).await?;
    tx.commit().await?;
    Ok(rows.len() as u64)
}

/// Frees everything that is held in a member's streams: for orders that hold nothing back.
pub(crate) async fn unhold_all(conn: &mut SqliteConnection, sql: &Sql, member: &Member) -> Result<()> {
    let statement = format!(
        "SELECT {} FROM {} WHERE {}{}",
        sql.order_key("o"),
        sql.from("o"),
        is_held(sql, "o"),
        streams_where(sql, "o", &member.streams, 1)
    );
    let rows = sqlx::query(AssertSqlSafe(statement))
        .bind(streams_bind(&member.streams))
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    let items = rows.iter().map(item).collect::<Result<Vec<Value>>>()?;
    free(conn, sql, &items).await
}

/// How many events a person must free: those behind a dead one.
pub(crate) async fn blocked(conn: &mut SqliteConnection, sql: &Sql, member: &Member) -> Result<u64> {
    if !member.block_on_dead {
        return Ok(0);
    }
    let streams = |alias: &str| streams_where(sql, alias, &member.streams, 1);
    let (candidates, same_key) = match member.order {
        Order::None => return Ok(0),
        Order::Key => (is_held(sql, "o"), format!("{} = {} AND ", sql.key("e"), sql.key("o"))),
        Order::Total => (sql.open("o"), String::new()),
    };
    let statement = format!(
        "SELECT count(*) FROM {} WHERE {candidates}{} AND EXISTS (SELECT 1 FROM {} AS e WHERE {same_key}{} AND {}{})",
        sql.from("o"),
        streams("o"),
        sql.spec.qualified(),
        sql.before("e", "o"),
        sql.closed("e"),
        streams("e")
    );
    let count: i64 = sqlx::query_scalar(AssertSqlSafe(statement))
        .bind(streams_bind(&member.streams))
        .fetch_one(conn)
        .await
        .map_err(db)?;
    Ok(count.unsigned_abs())
}

/// Whether a row is held back.
pub(crate) fn is_held(sql: &Sql, alias: &str) -> String {
    format!("{} AND {} = '{HELD}'", sql.open(alias), sql.retry(alias))
}

/// A common table expression `k(key)`: every key with held events. Where there is an index, it is skipped
/// along from key to key, however many events each of them holds.
pub(crate) fn held_keys(sql: &Sql) -> String {
    if !sql.canonical {
        return format!(
            "k(key) AS (SELECT DISTINCT {} FROM {} WHERE {})",
            sql.key("o"),
            sql.from("o"),
            is_held(sql, "o")
        );
    }
    let (table, key, held) = (sql.from("o"), sql.key("o"), is_held(sql, "o"));
    format!(
        "RECURSIVE k(key) AS (SELECT * FROM (SELECT {key} FROM {table} WHERE {held} ORDER BY {key} LIMIT 1) \
         UNION ALL SELECT (SELECT {key} FROM {table} WHERE {held} AND {key} > k.key ORDER BY {key} LIMIT 1) \
         FROM k WHERE k.key IS NOT NULL)"
    )
}

/// Held rows that nothing stands in front of any more, lowest first.
async fn free_rows(
    conn: &mut SqliteConnection,
    sql: &Sql,
    member: &Member,
    partitions: &[u16],
) -> Result<Vec<Value>> {
    if !sql.canonical {
        return free_rows_of_all(conn, sql, member, partitions).await;
    }
    let mut rows = Vec::new();
    for key in keys_with_free_rows(conn, sql, member).await? {
        if !is_in(&key, member, partitions) {
            continue;
        }
        let statement = format!(
            "SELECT {} FROM {} WHERE {} AND {} = ?2{}{} {} LIMIT ?3",
            sql.order_key("o"),
            sql.from("o"),
            is_held(sql, "o"),
            sql.key("o"),
            streams_where(sql, "o", &member.streams, 1),
            nothing_before(sql, member, "o"),
            sql.order_by("o", "ASC")
        );
        let found = sqlx::query(AssertSqlSafe(statement))
            .bind(streams_bind(&member.streams))
            .bind(&key)
            .bind(i64::try_from(FREE_AT_ONCE - rows.len()).unwrap_or(0))
            .fetch_all(&mut *conn)
            .await
            .map_err(db)?;
        for row in &found {
            rows.push(item(row)?);
        }
        if rows.len() >= FREE_AT_ONCE {
            break;
        }
    }
    Ok(rows)
}

/// The same in one pass over a table that no index of ours helps with.
async fn free_rows_of_all(
    conn: &mut SqliteConnection,
    sql: &Sql,
    member: &Member,
    partitions: &[u16],
) -> Result<Vec<Value>> {
    let blocks = if member.block_on_dead { sql.closed("o") } else { "false".into() };
    let statement = format!(
        "SELECT {}, {}, COALESCE({} AND {} = '{HELD}', 0) FROM {} \
         WHERE (({2} AND {3} IS NOT NULL) OR {blocks}){} {}",
        sql.order_key("o"),
        sql.key("o"),
        sql.open("o"),
        sql.retry("o"),
        sql.from("o"),
        streams_where(sql, "o", &member.streams, 1),
        sql.order_by("o", "ASC")
    );
    let found = sqlx::query(AssertSqlSafe(statement))
        .bind(streams_bind(&member.streams))
        .fetch_all(conn)
        .await
        .map_err(db)?;
    let mut blocked: HashSet<String> = HashSet::new();
    let mut rows = Vec::new();
    for row in &found {
        let key = decode::lossy(row, 3).unwrap_or_default();
        if decode::integer(row, 4) != Some(1) {
            blocked.insert(key);
        } else if !blocked.contains(&key) && is_in(&key, member, partitions) {
            rows.push(item(row)?);
        }
    }
    rows.truncate(FREE_AT_ONCE);
    Ok(rows)
}

fn is_in(key: &str, member: &Member, partitions: &[u16]) -> bool {
    partitions.contains(&partition_of(hash_of(key.as_bytes()), member.partitions))
}

/// Keys whose first held event has nothing in front of it.
async fn keys_with_free_rows(conn: &mut SqliteConnection, sql: &Sql, member: &Member) -> Result<Vec<String>> {
    let rows = sqlx::query(AssertSqlSafe(free_keys_statement(sql, member)))
        .bind(streams_bind(&member.streams))
        .fetch_all(conn)
        .await
        .map_err(db)?;
    Ok(rows.iter().filter_map(|row| decode::lossy(row, 0)).collect())
}

pub(crate) fn free_keys_statement(sql: &Sql, member: &Member) -> String {
    let first = format!(
        "{} = (SELECT {} FROM {} WHERE {} AND {} = k.key{} {} LIMIT 1)",
        sql.identity("o"),
        sql.identity("f"),
        sql.from("f"),
        is_held(sql, "f"),
        sql.key("f"),
        streams_where(sql, "f", &member.streams, 1),
        sql.order_by("f", "ASC")
    );
    format!(
        "WITH {} SELECT k.key FROM k WHERE k.key IS NOT NULL AND EXISTS (SELECT 1 FROM {} WHERE {first}{})",
        held_keys(sql),
        sql.from("o"),
        nothing_before(sql, member, "o")
    )
}

/// ` AND NOT EXISTS …`: no earlier event of its key waits, or is dead where that blocks.
fn nothing_before(sql: &Sql, member: &Member, alias: &str) -> String {
    let streams = streams_where(sql, "e", &member.streams, 1);
    let same = format!("{} = {} AND {}", sql.key("e"), sql.key(alias), sql.before("e", alias));
    let mut text = format!(
        " AND NOT EXISTS (SELECT 1 FROM {} WHERE {same} AND {} AND {} IS NOT NULL AND {2} <> '{HELD}'{streams})",
        sql.from("e"),
        sql.open("e"),
        sql.retry("e")
    );
    if member.block_on_dead {
        text.push_str(&format!(
            " AND NOT EXISTS (SELECT 1 FROM {} AS e WHERE {same} AND {}{streams})",
            sql.spec.qualified(),
            sql.closed("e")
        ));
    }
    text
}

fn item(row: &SqliteRow) -> Result<Value> {
    Ok(json!({"k": key_value(&row_key(row, 2)?)}))
}

async fn free(conn: &mut SqliteConnection, sql: &Sql, items: &[Value]) -> Result<()> {
    run(conn, &sql.change(None, &[(RowField::NextRetryAt, "NULL")]), items, &[]).await
}
