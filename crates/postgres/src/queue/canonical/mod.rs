//! The canonical table: the one that `migrations/0001_outbox.sql` creates, under any name.
//!
//! Its columns are known, so the statements name them. Only the names of the tables and what depends on a relay's
//! order and streams are filled in. Nothing here is used for another table, and nothing outside depends on these
//! statements.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `claim` | the claim, and the reasons for its shape |
//! | `held` | frees held events |
//! | `settle` | settling and marking |
//! | `table` | how its rows are shown to an operator |

mod claim;
mod held;
mod settle;
mod table;

use std::{
    collections::HashMap,
    ops::Deref,
    sync::atomic::{AtomicUsize, Ordering},
};

use airtight_core::{
    Error, Order, Result,
    group::Member,
    queue::{ClaimRequest, Claimed, RowClaim, RowKey},
    table::TableSpec,
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, postgres::PgRow};

use super::{
    as_i64, collect, most_events,
    settle::{Kind, Settled},
    store::Store,
};
use crate::{
    PgOutbox, columns::Columns, decode, error::doing, outbox::Conn, session::Session, slots::KEY_SLOTS,
};

/// How often a claim that found only events to hold back looks again: bounds how long it takes.
const HOLD_ROUNDS: u32 = 100;

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
    /// How many events to ask of each index range; adapts to how many ranges have something.
    per_range: AtomicUsize,
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
        Self { columns, per_range: AtomicUsize::new(0) }
    }

    /// Asks more of each index range when few ranges have everything, and less when all have plenty.
    fn adapt(&self, claimed: &Claimed, events: usize, per_range: usize, fair: usize) {
        let found = claimed.rows.len() + claimed.overflow.len();
        if found >= events {
            self.per_range.store((per_range / 2).max(fair), Ordering::Relaxed);
            return;
        }
        let mut ranges: HashMap<(u16, &str), usize> = HashMap::new();
        for row in &claimed.rows {
            if let Ok(event) = &row.event {
                *ranges.entry((row.partition, &event.stream)).or_default() += 1;
            }
        }
        if ranges.values().any(|count| *count >= per_range) {
            self.per_range.store(per_range * 4, Ordering::Relaxed);
        }
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

    async fn claim(&self, outbox: &PgOutbox, request: &ClaimRequest<'_>) -> Result<Claimed> {
        let member = request.member;
        let slots = slots(request.partitions, member.partitions);
        let ranges = slots.len() * member.streams.len().max(1);
        let events = most_events(request);
        let fair = (events.div_ceil(ranges.max(1)) * 2).max(8);
        let mut per_range = match member.order {
            Order::Total => events,
            Order::None | Order::Key => self.per_range.load(Ordering::Relaxed).clamp(fair, events.max(fair)),
        };
        let sql = claim::claim(self, member, request.alone);
        let mut rounds = HOLD_ROUNDS;
        let mut claimed = loop {
            let mut conn = outbox.acquire().await?;
            let rows = sqlx::query(AssertSqlSafe(sql.clone()))
                .persistent(!outbox.pooled)
                .bind(request.token)
                .bind(as_i64(events))
                .bind(as_i64(request.bytes))
                .bind(member.lease.as_secs_f64())
                .bind(member.id)
                .bind(&slots)
                .bind(request.tokens)
                .bind(&member.streams)
                .bind(as_i64(per_range))
                .bind(as_i64(request.max_payload))
                .fetch(conn.get());
            let (claimed, held) = collect(rows, &self.spec, request, row_key).await?;
            conn.commit().await?;
            rounds -= 1;
            // Nothing was found but events behind one that waits. They are out of the way now: an empty answer
            // would let the relay rest, with who knows what behind them.
            if !held || !claimed.rows.is_empty() || claimed.suspects || rounds == 0 {
                break claimed;
            }
            per_range = (per_range * 4).min(events.max(fair));
        };
        for row in &mut claimed.rows {
            row.partition = partition_of(row.partition, member.partitions);
        }
        self.adapt(&claimed, events, per_range, fair);
        Ok(claimed)
    }

    async fn renew(
        &self,
        outbox: &PgOutbox,
        conn: &mut Conn,
        member: &Member,
        rows: &[RowClaim],
    ) -> Result<Vec<RowKey>> {
        settle::renew(self, outbox, conn, member, rows).await
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

/// What tells rows apart.
fn row_key(row: &PgRow) -> Result<Option<RowKey>> {
    Ok(decode::get::<Option<i64>>(row, "row_id")?.map(RowKey::Int))
}

/// The identities of rows as an array that a statement can take.
fn seqs<'a>(rows: impl Iterator<Item = &'a RowClaim>) -> Vec<i64> {
    rows.map(|row| match &row.key {
        RowKey::Int(key) => *key,
        RowKey::Text(text) => text.parse().unwrap_or(-1),
    })
    .collect()
}

/// The slots of the given partitions. Without order, all of them.
fn slots(partitions: &[u16], count: u16) -> Vec<i16> {
    (0..KEY_SLOTS)
        .filter(|slot| count == 0 || partitions.contains(&partition_of(*slot, count)))
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
