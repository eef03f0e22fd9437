//! Rows from the log.
//!
//! A read sees the floor, the rows and the parked events in one snapshot. It skips events that are already parked for the
//! consumer: after a crash, or with another number of partitions, the offset may be before them. They are handed out as
//! parked events, or not at all if they are dead or unknown.

use std::collections::HashSet;

use airtight_core::{
    Result,
    log::{LogRow, Read, ReadRequest, behind_retention},
};
use futures::TryStreamExt;
use serde_json::json;
use sqlx::{AssertSqlSafe, Row, SqliteConnection, sqlite::SqliteRow};

use super::{floor, partition_of, seq};
use crate::{
    candidate::{streams_bind, streams_where},
    decode::{self, integer, lossy},
    error::db,
    outbox::SqliteOutbox,
    sql::Sql,
};

pub(super) async fn read(outbox: &SqliteOutbox, request: &ReadRequest<'_>) -> Result<Read> {
    let sql = outbox.log_sql()?;
    let consumer = request.member.consumer();
    let mut tx = outbox.snapshot().await?;
    let conn = &mut *tx;
    let floor = floor(conn, sql).await?.seq;
    if request.after < floor {
        return Err(behind_retention(consumer, request.after, floor));
    }
    let limit = i64::try_from(request.events).unwrap_or(i64::MAX);
    let look = format!(
        "SELECT count(*), max(seq) FROM (SELECT {0} AS seq FROM {1} AS o WHERE {0} > ?1 ORDER BY {0} LIMIT ?2)",
        seq(sql, "o"),
        sql.spec.qualified()
    );
    let looked = sqlx::query(AssertSqlSafe(look))
        .bind(request.after)
        .bind(limit)
        .fetch_one(&mut *conn)
        .await
        .map_err(db)?;
    let count: i64 = looked.try_get(0).map_err(db)?;
    let Some(last) = looked.try_get::<Option<i64>, _>(1).map_err(db)? else {
        return Ok(Read { through: request.after, ..Read::default() });
    };
    let parked = parked_between(conn, sql, consumer, request.after, last).await?;
    let select = format!(
        "SELECT {} FROM {} AS o WHERE {3} > ?1 AND {3} <= ?3{} ORDER BY {3}",
        decode::columns(sql),
        sql.spec.qualified(),
        streams_where(sql, "o", &request.member.streams, 4),
        seq(sql, "o")
    );
    let mut rows = sqlx::query(AssertSqlSafe(select))
        .bind(request.after)
        .bind(max_payload(request))
        .bind(last)
        .bind(streams_bind(&request.member.streams))
        .fetch(&mut *conn);
    let mut taken = Taken::new(request);
    let mut read = Read { through: last, more: count >= limit, ..Read::default() };
    let mut passed = request.after;
    while let Some(row) = rows.try_next().await.map_err(db)? {
        let row = log_row(&row, sql, request);
        let seq = row.seq;
        let wanted = request.partitions.contains(&row.partition) && !parked.contains(&seq);
        if wanted && !taken.take(row) {
            read.through = passed;
            read.more = true;
            break;
        }
        passed = seq;
    }
    read.rows = taken.rows;
    Ok(read)
}

/// Rows up to the bounds of a request.
pub(super) struct Taken {
    pub(super) rows: Vec<LogRow>,
    bytes: usize,
    at_most: usize,
}

impl Taken {
    pub(super) fn new(request: &ReadRequest<'_>) -> Self {
        Self { rows: Vec::new(), bytes: 0, at_most: request.bytes }
    }

    /// Whether the row still fits; the first always does.
    pub(super) fn fits(&mut self, row: &LogRow) -> bool {
        let size = row.event.as_ref().map_or(0, airtight_core::Event::size);
        let first = self.bytes == 0 && self.rows.is_empty();
        if !first && self.bytes.saturating_add(size) > self.at_most {
            return false;
        }
        self.bytes = self.bytes.saturating_add(size.max(1));
        true
    }

    fn take(&mut self, row: LogRow) -> bool {
        let fits = self.fits(&row);
        if fits {
            self.rows.push(row);
        }
        fits
    }
}

pub(super) fn max_payload(request: &ReadRequest<'_>) -> i64 {
    i64::try_from(request.max_payload).unwrap_or(i64::MAX)
}

/// One row of [`decode::columns`].
pub(super) fn log_row(row: &SqliteRow, sql: &Sql, request: &ReadRequest<'_>) -> LogRow {
    let (event, max_attempts) = decode::decode(row, sql, request.max_payload);
    let key = lossy(row, 6).unwrap_or_default();
    LogRow {
        seq: integer(row, 2).unwrap_or(0),
        partition: partition_of(&key, request.member.partitions),
        max_attempts,
        event,
    }
}

async fn parked_between(
    conn: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
    after: i64,
    last: i64,
) -> Result<HashSet<i64>> {
    let select = format!(
        "SELECT seq FROM airtight_parked WHERE outbox = {} AND consumer = ?1 AND seq > ?2 AND seq <= ?3",
        sql.name()
    );
    let seqs: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(select))
        .bind(consumer)
        .bind(after)
        .bind(last)
        .fetch_all(conn)
        .await
        .map_err(db)?;
    Ok(seqs.into_iter().collect())
}

pub(super) async fn reread(
    outbox: &SqliteOutbox,
    request: &ReadRequest<'_>,
    seqs: &[i64],
) -> Result<Vec<LogRow>> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.snapshot().await?;
    let conn = &mut *tx;
    let floor = floor(conn, sql).await?.seq;
    let mut wanted = seqs.to_vec();
    wanted.sort_unstable();
    wanted.dedup();
    wanted.truncate(request.events);
    let select = format!(
        "SELECT {} FROM {} AS o WHERE {2} IN (SELECT value FROM json_each(?1)) ORDER BY {2}",
        decode::columns(sql),
        sql.spec.qualified(),
        seq(sql, "o")
    );
    let mut rows = sqlx::query(AssertSqlSafe(select))
        .bind(json!(wanted).to_string())
        .bind(max_payload(request))
        .fetch(&mut *conn);
    let mut taken = Taken::new(request);
    for seq in wanted {
        let row = rows.try_next().await.map_err(db)?.map(|row| log_row(&row, sql, request));
        match row.filter(|row| row.seq == seq) {
            None => return Err(behind_retention(request.member.consumer(), seq - 1, floor.max(seq))),
            Some(row) => {
                if !taken.take(row) {
                    break;
                }
            }
        }
    }
    Ok(taken.rows)
}
