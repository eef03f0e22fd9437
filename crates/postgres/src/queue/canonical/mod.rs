//! The canonical table: the one that `migrations/0001_outbox.sql` creates, under any name.
//!
//! Its columns are known, so the statements are plain SQL files in `sql/`. Nothing here is used for another table, and
//! nothing outside depends on these statements.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `reader` | what a relay remembers of the rows that it reads, and why this loses nothing |
//! | `read` | the statements that read: looks, pages, what is due, the net |
//! | `settle` | settling and marking |
//! | `lost` | counts lost leases when a relay is evicted |
//! | `held` | frees held events |
//! | `table` | how its rows are shown to an operator |
//! | `statements` | fills the placeholders of `sql/` |
//! | `version` | the version of a row |

mod held;
mod lost;
#[cfg(test)]
mod plans;
mod read;
mod reader;
mod settle;
mod statements;
mod table;
mod version;

use std::{
    ops::Deref,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use airtight_core::{
    Code, Error, Order, Result,
    group::Member,
    queue::{ClaimRequest, Claimed, RowClaim, RowKey},
    table::TableSpec,
};
use async_trait::async_trait;
use sqlx::AssertSqlSafe;

pub(crate) use self::lost::{Evicted, count as count_lost_leases, forget_marks};
use self::{
    reader::Reader,
    statements::{Names, Statements},
};
use super::{
    settle::{Kind, Settled},
    store::Store,
};
use crate::{
    PgOutbox,
    columns::Columns,
    error::doing,
    log::check::{self, Sequence},
    outbox::Conn,
    session::Session,
    slots::KEY_SLOTS,
};

/// How many held events one statement frees.
const UNHOLD_BATCH: i64 = 10_000;

/// The columns of the table, with their types. What a mapped table must have to be served as canonical.
const COLUMNS: [(&str, &str); 26] = [
    ("seq", "bigint"),
    ("id", "uuid"),
    ("stream", "text"),
    ("event_type", "text"),
    ("aggregate_type", "text"),
    ("aggregate_id", "text"),
    ("op", "text"),
    ("payload", "jsonb"),
    ("payload_bytes", "bytea"),
    ("headers", "jsonb"),
    ("occurred_at", "timestamp with time zone"),
    ("schema_version", "integer"),
    ("max_attempts", "integer"),
    ("status", "text"),
    ("attempts", "integer"),
    ("lost_leases", "integer"),
    ("next_retry_at", "timestamp with time zone"),
    ("locked_until", "timestamp with time zone"),
    ("claim_token", "uuid"),
    ("error_code", "text"),
    ("error_message", "text"),
    ("created_at", "timestamp with time zone"),
    ("last_attempt_at", "timestamp with time zone"),
    ("finished_at", "timestamp with time zone"),
    ("part", "smallint"),
    ("phase", "smallint"),
];

/// The store of a canonical table.
#[derive(Debug)]
pub(super) struct Canonical {
    columns: Columns,
    /// Known once the queue is open.
    reading: OnceLock<(Sequence, Statements)>,
    reader: Mutex<Reader>,
}

impl Deref for Canonical {
    type Target = Columns;

    fn deref(&self) -> &Columns {
        &self.columns
    }
}

impl Canonical {
    /// Whether a table is canonical: airtight made it, or it is a copy, column by column.
    pub(super) fn fits(outbox: &PgOutbox, columns: &Columns) -> bool {
        let spec = &columns.spec;
        outbox.options.spec.is_none()
            || **spec == TableSpec::canonical(spec.schema.as_deref(), &spec.table)
                && COLUMNS.iter().all(|(column, of_type)| columns.type_of(column) == *of_type)
    }

    pub(super) fn new(columns: Columns) -> Self {
        Self { columns, reading: OnceLock::new(), reader: Mutex::new(Reader::new()) }
    }

    fn reading(&self) -> Result<&(Sequence, Statements)> {
        self.reading.get().ok_or_else(|| Error::permanent(Code::NOT_OPEN, "the queue was not opened"))
    }

    fn sql(&self) -> Result<&Statements> {
        self.reading().map(|(_, sql)| sql)
    }

    fn reader(&self) -> MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for Canonical {
    async fn joined(&self, outbox: &PgOutbox, member: &Member) -> Result<()> {
        if member.order == Order::Key {
            return Ok(());
        }
        // Held by a group with order, which is gone: nobody else would free them.
        let mut conn = outbox.acquire().await?;
        sqlx::query(AssertSqlSafe(held::unhold_all(self, member)))
            .persistent(!outbox.pooled)
            .bind(&member.streams)
            .execute(conn.get())
            .await
            .map_err(doing("freeing held events"))?;
        conn.commit().await
    }

    fn reads(&self) -> bool {
        true
    }

    async fn opened(&self, outbox: &PgOutbox, conn: &mut Conn) -> Result<()> {
        let sequence = check::check(outbox, conn, self).await?;
        let sql = Statements::new(&Names::new(self, &sequence.name));
        // Opening again finds it known already.
        let _ = self.reading.set((sequence, sql));
        Ok(())
    }

    /// Keeps the marks true and few: what was given back is not in flight, and an earlier mark does not count.
    async fn beat(&self, outbox: &PgOutbox, member: &Member) -> Result<()> {
        let outdated = self.reader().outdated_marks();
        let Some((page, marks)) = outdated else { return Ok(()) };
        read::mark(self, outbox, member, page, marks).await?;
        let mut conn = outbox.acquire().await?;
        sqlx::query(AssertSqlSafe(format!("DELETE FROM {} WHERE relay = $1 AND page < $2", self.mark)))
            .persistent(!outbox.pooled)
            .bind(member.id)
            .bind(i64::try_from(page).unwrap_or(i64::MAX))
            .execute(conn.get())
            .await
            .map_err(doing("removing marks"))?;
        conn.commit().await
    }

    fn gave(&self, member: &Member, partitions: &[u16]) {
        self.reader().gave(&slots(partitions, member.partitions));
    }

    async fn claim(&self, outbox: &PgOutbox, request: &ClaimRequest<'_>) -> Result<Claimed> {
        read::next(self, outbox, request).await
    }

    /// The relay's own lease is all there is.
    async fn renew(&self, _: &PgOutbox, _: &mut Conn, _: &Member, rows: &[RowClaim]) -> Result<Vec<RowKey>> {
        Ok(rows.iter().map(|row| row.key.clone()).collect())
    }

    fn settled(&self, member: &Member, claim: &RowClaim, kind: Kind, applied: bool) {
        settle::remember(self, member, claim, kind, applied);
    }

    async fn settle(
        &self,
        outbox: &PgOutbox,
        conn: &mut Conn,
        member: &Member,
        kind: Kind,
        rows: Settled<'_>,
    ) -> Result<Vec<RowKey>> {
        settle::settle(self, outbox, conn, member, kind, rows).await
    }

    async fn mark(
        &self,
        outbox: &PgOutbox,
        conn: &mut Session<'_>,
        rows: &[(String, Option<&Error>)],
        unknown: bool,
    ) -> Result<()> {
        settle::mark(self, outbox, conn, rows, unknown).await
    }

    async fn unhold(&self, outbox: &PgOutbox, member: &Member, partitions: &[u16]) -> Result<u64> {
        let mut conn = outbox.acquire().await?;
        let found: Vec<(i16, String)> = sqlx::query_as(AssertSqlSafe(held::freeable(self, member)))
            .persistent(!outbox.pooled)
            .bind(slots(partitions, member.partitions))
            .bind(UNHOLD_BATCH)
            .bind(&member.streams)
            .fetch_all(conn.get())
            .await
            .map_err(doing("looking for held events"))?;
        if found.is_empty() {
            conn.commit().await?;
            return Ok(0);
        }
        let (slots, keys): (Vec<i16>, Vec<String>) = found.into_iter().unzip();
        let done = sqlx::query(AssertSqlSafe(held::unhold(self, member)))
            .persistent(!outbox.pooled)
            .bind(slots)
            .bind(keys)
            .bind(UNHOLD_BATCH)
            .bind(&member.streams)
            .execute(conn.get())
            .await
            .map_err(doing("freeing held events"))?;
        conn.commit().await?;
        Ok(done.rows_affected())
    }

    fn backlog_statement(&self, member: &Member) -> String {
        table::backlog(self, member)
    }

    fn has_dead_statement(&self) -> String {
        table::has_dead(self)
    }
}

fn seq_of(key: &RowKey) -> i64 {
    match key {
        RowKey::Int(key) => *key,
        RowKey::Text(text) => text.parse().unwrap_or(-1),
    }
}

/// The slots of the given partitions.
fn slots(partitions: &[u16], count: u16) -> Vec<i16> {
    (0..KEY_SLOTS)
        .filter(|slot| partitions.contains(&partition_of(*slot, count)))
        .filter_map(|slot| i16::try_from(slot).ok())
        .collect()
}

fn partition_of(slot: u16, count: u16) -> u16 {
    airtight_core::group::partition_of(slot.into(), count)
}

/// ` AND` the stream is one of the relay's, or nothing when all streams are meant. The parameter has them.
fn of_streams(member: &Member, parameter: &str) -> String {
    if member.streams.is_empty() {
        String::new()
    } else {
        format!(" AND t.stream = ANY({parameter}::text[])")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_are_those_of_the_spec() {
        let spec = TableSpec::canonical(None, "outbox");
        let mut columns = COLUMNS.map(|(column, _)| column);
        columns.sort_unstable();
        assert_eq!(spec.columns(), columns);
    }
}
