//! Retention: what is removed from the log and from the inbox, in bounded statements.
//!
//! Rows are removed from the beginning of the log only, and the transaction that deletes them records how far it got.

use std::time::Duration;

use airtight_core::{
    Code, Error, Result,
    log::{Pruned, Retention},
};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{created, floor, seq};
use crate::{error::db, members::before, outbox::SqliteOutbox, sql::Sql};

/// Rows that one transaction removes.
const AT_ONCE: i64 = 1_000;

pub(super) async fn prune_log(
    outbox: &SqliteOutbox,
    retention: Retention,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Pruned> {
    let sql = timed(outbox)?;
    let mut pruned = Pruned::default();
    loop {
        let mut tx = outbox.begin().await?;
        let conn = tx.conn();
        let slowest = if retention.wait_for_consumers { slowest(conn, sql).await? } else { None };
        let chunk = old(conn, sql, retention.keep, slowest.as_ref().map(|(_, offset)| *offset)).await?;
        if chunk.blocked {
            pruned.held_by = slowest.map(|(name, _)| name);
        }
        if let Some(last) = chunk.last {
            let delete = format!("DELETE FROM {} AS o WHERE {} <= ?1", sql.spec.qualified(), seq(sql, "o"));
            let deleted =
                sqlx::query(AssertSqlSafe(delete)).bind(last).execute(&mut *conn).await.map_err(db)?;
            let record = format!(
                "INSERT INTO airtight_floor (outbox, seq, created_at) VALUES ({}, ?1, ?2) ON CONFLICT (outbox) \
                 DO UPDATE SET seq = max(seq, ?1), created_at = max(COALESCE(created_at, ''), ?2)",
                sql.name()
            );
            sqlx::query(AssertSqlSafe(record))
                .bind(last)
                .bind(chunk.created_at)
                .execute(&mut *conn)
                .await
                .map_err(db)?;
            pruned.events += deleted.rows_affected();
        }
        pruned.floor = floor(conn, sql).await?.seq;
        tx.commit().await?;
        progress(pruned.events);
        if chunk.count < AT_ONCE {
            return Ok(pruned);
        }
    }
}

/// What [`prune_log`] would remove.
pub(super) async fn prunable(outbox: &SqliteOutbox, retention: Retention) -> Result<Pruned> {
    let sql = timed(outbox)?;
    let mut conn = outbox.acquire().await?;
    let slowest = if retention.wait_for_consumers { slowest(&mut conn, sql).await? } else { None };
    let count = format!(
        "SELECT count(*), count(*) FILTER (WHERE {0} > ?2) FROM {1} AS o WHERE {0} < COALESCE((SELECT min({0}) FROM {1} AS o \
         WHERE NOT COALESCE({2} < strftime('%Y-%m-%dT%H:%M:%fZ','now',?1), false)), {3})",
        seq(sql, "o"),
        sql.spec.qualified(),
        created(sql, "o"),
        i64::MAX
    );
    let row = sqlx::query(AssertSqlSafe(count))
        .bind(before(retention.keep))
        .bind(slowest.as_ref().map_or(i64::MAX, |(_, offset)| *offset))
        .fetch_one(&mut *conn)
        .await
        .map_err(db)?;
    let (old, held): (i64, i64) = (row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?);
    Ok(Pruned {
        events: (old - held).unsigned_abs(),
        partitions: 0,
        floor: floor(&mut conn, sql).await?.seq,
        held_by: slowest.filter(|_| held > 0).map(|(name, _)| name),
    })
}

/// The table, if it says how old an event is.
fn timed(outbox: &SqliteOutbox) -> Result<&Sql> {
    let sql = outbox.log_sql()?;
    if sql.spec.created_at.is_none() {
        return Err(Error::permanent(
            Code::NO_TIME,
            format!("{} has no column that says how old an event is", sql.spec.display_name()),
        ));
    }
    Ok(sql)
}

/// The consumer that has come the least far.
async fn slowest(conn: &mut SqliteConnection, sql: &Sql) -> Result<Option<(String, i64)>> {
    let select = format!(
        "SELECT consumer, min(last_seq) FROM airtight_offset WHERE outbox = {} GROUP BY consumer ORDER BY 2, 1 LIMIT 1",
        sql.name()
    );
    let row = sqlx::query(AssertSqlSafe(select)).fetch_optional(conn).await.map_err(db)?;
    row.map(|row| Ok((row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?))).transpose()
}

/// The oldest rows that may go.
#[derive(Default)]
struct Chunk {
    count: i64,
    last: Option<i64>,
    created_at: Option<String>,
    /// The next row is old enough, too, but a consumer has not settled it.
    blocked: bool,
}

async fn old(conn: &mut SqliteConnection, sql: &Sql, keep: Duration, settled: Option<i64>) -> Result<Chunk> {
    let select = format!(
        "SELECT {0}, {1}, {1} < strftime('%Y-%m-%dT%H:%M:%fZ','now',?1) FROM {2} AS o ORDER BY {0} LIMIT {3}",
        seq(sql, "o"),
        created(sql, "o"),
        sql.spec.qualified(),
        AT_ONCE
    );
    let rows = sqlx::query(AssertSqlSafe(select)).bind(before(keep)).fetch_all(conn).await.map_err(db)?;
    let mut chunk = Chunk::default();
    for row in rows {
        let seq: i64 = row.try_get(0).map_err(db)?;
        // A row without a time that can be read is never old.
        if row.try_get::<Option<bool>, _>(2).map_err(db)? != Some(true) {
            break;
        }
        if settled.is_some_and(|settled| seq > settled) {
            chunk.blocked = true;
            break;
        }
        let created_at: Option<String> = row.try_get(1).map_err(db)?;
        chunk.count += 1;
        chunk.last = Some(seq);
        chunk.created_at = chunk.created_at.max(created_at);
    }
    Ok(chunk)
}

pub(super) async fn prune_inbox(outbox: &SqliteOutbox, keep: Duration) -> Result<u64> {
    let name = outbox.sql().name();
    let delete = format!(
        "DELETE FROM airtight_inbox WHERE outbox = {name} AND (consumer, key) IN (SELECT consumer, key FROM airtight_inbox \
         WHERE outbox = {name} AND seen_at < strftime('%Y-%m-%dT%H:%M:%fZ','now',?1) ORDER BY seen_at LIMIT {AT_ONCE})"
    );
    let mut total = 0;
    loop {
        let mut tx = outbox.begin().await?;
        let done = sqlx::query(AssertSqlSafe(delete.clone()))
            .bind(before(keep))
            .execute(tx.conn())
            .await
            .map_err(db)?;
        tx.commit().await?;
        total += done.rows_affected();
        if done.rows_affected() < AT_ONCE.unsigned_abs() {
            return Ok(total);
        }
    }
}
