//! How many events a consumer has not read yet.
//!
//! SQL has no hash of a key, so rows between the smallest and the greatest offset are examined here, one by one. Beyond the
//! greatest offset, the consumer has read none. Both are seldom many, because the offsets of the partitions advance
//! together.

use std::{collections::BTreeMap, ops::Range};

use airtight_core::{Backlog, Result, group::Member};
use futures::TryStreamExt;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{created, partition_of, seq};
use crate::{
    candidate::{streams_bind, streams_where},
    decode::{integer, lossy},
    error::db,
    outbox::SqliteOutbox,
    sql::Sql,
};

/// The offset of each partition.
pub(super) type Offsets = BTreeMap<u16, i64>;

pub(super) async fn offsets(conn: &mut SqliteConnection, sql: &Sql, consumer: &str) -> Result<Offsets> {
    let select =
        format!("SELECT n, last_seq FROM airtight_offset WHERE outbox = {} AND consumer = ?1", sql.name());
    let rows = sqlx::query(AssertSqlSafe(select)).bind(consumer).fetch_all(conn).await.map_err(db)?;
    rows.iter().map(|row| Ok((row.try_get(0).map_err(db)?, row.try_get(1).map_err(db)?))).collect()
}

pub(super) fn smallest(offsets: &Offsets) -> i64 {
    offsets.values().copied().min().unwrap_or(0)
}

pub(super) fn greatest(offsets: &Offsets) -> i64 {
    offsets.values().copied().max().unwrap_or(0)
}

/// A consumer as far as counting needs it.
pub(super) struct Counted<'a> {
    pub(super) sql: &'a Sql,
    pub(super) consumer: &'a str,
    pub(super) streams: &'a [String],
    pub(super) offsets: &'a Offsets,
}

/// Events before a consumer, and when the first of them was written.
#[derive(Default)]
pub(super) struct Ahead {
    pub(super) events: u64,
    pub(super) first_age: Option<f64>,
}

impl Counted<'_> {
    /// The same, but with more than `at_most` numbers before it the numbers are taken for the events.
    pub(super) async fn ahead_within(
        &self,
        conn: &mut SqliteConnection,
        end: i64,
        at_most: i64,
    ) -> Result<Ahead> {
        let offset = smallest(self.offsets);
        if end - offset <= at_most {
            return self.ahead(conn).await;
        }
        let sql = self.sql;
        let age = format!(
            "SELECT (julianday('now') - julianday({})) * 86400.0 FROM {} AS o WHERE {2} > ?1 ORDER BY {2} LIMIT 1",
            created(sql, "o"),
            sql.spec.qualified(),
            seq(sql, "o")
        );
        let first_age: Option<Option<f64>> =
            sqlx::query_scalar(AssertSqlSafe(age)).bind(offset).fetch_optional(conn).await.map_err(db)?;
        Ok(Ahead { events: (end - offset).unsigned_abs(), first_age: first_age.flatten() })
    }

    /// Events that it has not passed; parked ones are not among them.
    pub(super) async fn ahead(&self, conn: &mut SqliteConnection) -> Result<Ahead> {
        let (sql, last) = (self.sql, greatest(self.offsets));
        let mut ahead = self
            .count(conn, smallest(self.offsets)..last, Parked::Without, |seq, offset| seq > offset)
            .await?;
        let age = format!("(julianday('now') - julianday({})) * 86400.0", created(sql, "o"));
        let from = format!(
            "FROM {} AS o WHERE {} > ?1{}{}",
            sql.spec.qualified(),
            seq(sql, "o"),
            streams_where(sql, "o", self.streams, 2),
            not_parked(sql, 3)
        );
        let count = format!("SELECT count(*) {from}");
        let beyond: i64 = sqlx::query_scalar(AssertSqlSafe(count))
            .bind(last)
            .bind(streams_bind(self.streams))
            .bind(self.consumer)
            .fetch_one(&mut *conn)
            .await
            .map_err(db)?;
        ahead.events += beyond.unsigned_abs();
        if ahead.first_age.is_none() && beyond > 0 {
            let first = format!("SELECT {age} {from} ORDER BY {} LIMIT 1", seq(sql, "o"));
            ahead.first_age = sqlx::query_scalar(AssertSqlSafe(first))
                .bind(last)
                .bind(streams_bind(self.streams))
                .bind(self.consumer)
                .fetch_optional(conn)
                .await
                .map_err(db)?
                .flatten();
        }
        Ok(ahead)
    }

    /// Events behind the start of `range`, up to its end included, of which `counts` says yes, given the event's `seq` and its
    /// partition's offset.
    pub(super) async fn count(
        &self,
        conn: &mut SqliteConnection,
        range: Range<i64>,
        parked: Parked,
        counts: impl Fn(i64, i64) -> bool,
    ) -> Result<Ahead> {
        let mut ahead = Ahead::default();
        if range.is_empty() {
            return Ok(ahead);
        }
        let sql = self.sql;
        let filter = match parked {
            Parked::With => " AND ?3 IS NOT NULL".into(),
            Parked::Without => not_parked(sql, 3),
        };
        let select = format!(
            "SELECT {0}, {1}, (julianday('now') - julianday({2})) * 86400.0 FROM {3} AS o \
             WHERE {0} > ?1 AND {0} <= ?4{4}{5} ORDER BY {0}",
            seq(sql, "o"),
            sql.key("o"),
            created(sql, "o"),
            sql.spec.qualified(),
            streams_where(sql, "o", self.streams, 2),
            filter
        );
        let mut rows = sqlx::query(AssertSqlSafe(select))
            .bind(range.start)
            .bind(streams_bind(self.streams))
            .bind(self.consumer)
            .bind(range.end)
            .fetch(conn);
        let partitions = u16::try_from(self.offsets.len()).unwrap_or(u16::MAX);
        while let Some(row) = rows.try_next().await.map_err(db)? {
            let key = lossy(&row, 1).unwrap_or_default();
            let offset = self.offsets.get(&partition_of(&key, partitions)).copied().unwrap_or(0);
            if counts(integer(&row, 0).unwrap_or(0), offset) {
                ahead.events += 1;
                if ahead.first_age.is_none() {
                    ahead.first_age = row.try_get_unchecked(2).map_err(db)?;
                }
            }
        }
        Ok(ahead)
    }
}

/// Whether parked events count.
#[derive(Debug, Clone, Copy)]
pub(super) enum Parked {
    With,
    Without,
}

fn not_parked(sql: &Sql, consumer: usize) -> String {
    format!(
        " AND NOT EXISTS (SELECT 1 FROM airtight_parked AS p WHERE p.outbox = {} AND p.consumer = ?{consumer} \
         AND p.seq = {})",
        sql.name(),
        seq(sql, "o")
    )
}

pub(super) async fn backlog(outbox: &SqliteOutbox, member: &Member) -> Result<Backlog> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.snapshot().await?;
    let conn = &mut *tx;
    let consumer = member.consumer();
    let offsets = offsets(conn, sql, consumer).await?;
    let counted = Counted { sql, consumer, streams: &member.streams, offsets: &offsets };
    let ahead = counted.ahead(conn).await?;
    let select = format!(
        "SELECT count(*), COALESCE(sum(EXISTS (SELECT 1 FROM airtight_parked AS e WHERE e.outbox = p.outbox \
         AND e.consumer = p.consumer AND e.aggregate_id = p.aggregate_id AND e.seq < p.seq \
         AND e.state IN ('dead', 'unknown'))), 0) \
         FROM airtight_parked AS p WHERE p.outbox = {} AND p.consumer = ?1 AND p.state = 'pending'",
        sql.name()
    );
    let row = sqlx::query(AssertSqlSafe(select)).bind(consumer).fetch_one(conn).await.map_err(db)?;
    let waiting = integer(&row, 0).unwrap_or(0).unsigned_abs();
    let blocked = integer(&row, 1).unwrap_or(0).unsigned_abs();
    Ok(Backlog {
        unfinished: ahead.events + waiting,
        blocked: if member.block_on_dead && member.by_key() { blocked } else { 0 },
        ..Backlog::default()
    })
}
