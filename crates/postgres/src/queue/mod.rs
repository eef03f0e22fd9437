//! The queue's statements: what [`airtight_core::queue::Queue`] asks of PostgreSQL.

mod fast;
mod general;
mod settle;

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_core::{
    Backlog, Order, Result, Verdict,
    group::{Member, Members, Pulse, evicted},
    queue::{ClaimRequest, Claimed, ClaimedRow, QueueStore, RowClaim, RowKey},
    table::TableSpec,
};
use async_trait::async_trait;
use futures::TryStreamExt;
use sqlx::{AssertSqlSafe, Row, postgres::PgRow};

pub(crate) use self::settle::{LONGEST_WAIT, mark, storable};
use crate::{PgOutbox, columns::Columns, decode, error::doing, fits, listen::Listener, members};

/// With total order more would only be given back when one fails.
const TOTAL_BATCH: usize = 100;

/// How often a claim that found only events to hold back looks again: bounds how long it takes.
const HOLD_ROUNDS: u32 = 100;

/// How many held events one statement frees.
const UNHOLD_BATCH: i64 = 10_000;

/// An outbox in PostgreSQL as a [`QueueStore`].
#[derive(Debug)]
pub struct PgQueue {
    outbox: PgOutbox,
    columns: OnceLock<Arc<Columns>>,
    listener: OnceLock<Listener>,
    /// How many events to ask of each lane; adapts to how many lanes have something.
    per_lane: AtomicUsize,
}

impl PgQueue {
    pub(crate) fn new(outbox: PgOutbox) -> Self {
        Self { outbox, columns: OnceLock::new(), listener: OnceLock::new(), per_lane: AtomicUsize::new(0) }
    }

    fn columns(&self) -> Result<&Arc<Columns>> {
        self.columns
            .get()
            .ok_or_else(|| airtight_core::Error::permanent("not_open", "the queue was not opened"))
    }
}

#[async_trait]
impl Members for PgQueue {
    async fn join(&self, member: &Member) -> Result<()> {
        let columns = self.columns()?;
        members::join(&self.outbox, columns, member).await?;
        if columns.is_fast() && member.order != Order::Key {
            // Held by a group with order, which is gone: nobody else would free them.
            let mut conn = self.outbox.acquire().await?;
            sqlx::query(AssertSqlSafe(fast::unhold_all(columns, member)))
                .persistent(!self.outbox.pooled)
                .bind(&member.streams)
                .execute(conn.get())
                .await
                .map_err(doing("freeing held events"))?;
            conn.commit().await?;
        }
        Ok(())
    }

    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse> {
        members::heartbeat(&self.outbox, self.columns()?, member, rows).await
    }

    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>> {
        members::take(&self.outbox, self.columns()?, member, wanted).await
    }

    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()> {
        members::give(&self.outbox, self.columns()?, member, partitions).await
    }

    async fn leave(&self, member: &Member) -> Result<()> {
        members::leave(&self.outbox, self.columns()?, member).await
    }
}

#[async_trait]
impl QueueStore for PgQueue {
    fn members(&self) -> &dyn Members {
        self
    }

    fn table(&self) -> Option<&TableSpec> {
        Some(&self.outbox.spec)
    }

    async fn open(&self) -> Result<()> {
        let mut conn = self.outbox.acquire().await?;
        let columns = Columns::load(&self.outbox, &mut conn).await?;
        let notifying = self.outbox.options.listen
            && self.outbox.options.spec.is_none()
            && self.outbox.is_notifying(&mut conn).await?;
        conn.commit().await?;
        fits::at_start(&self.outbox, &columns, Some(&columns.status)).await?;
        // Opening again after a failure further on finds these set already.
        let _ = self.columns.set(Arc::new(columns));
        // Behind a pooler there is no session to listen in, unless another URL leads to one.
        let session = !self.outbox.pooled || self.outbox.options.listen_url.is_some();
        if notifying && session && self.listener.get().is_none() {
            let _ = self.listener.set(Listener::start(&self.outbox).await?);
        }
        Ok(())
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed> {
        let columns = self.columns()?;
        if columns.is_fast() {
            self.claim_fast(columns, request).await
        } else {
            self.claim_general(columns, request).await
        }
    }

    async fn settle(&self, member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>> {
        settle::settle(&self.outbox, self.columns()?, member, rows).await
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        let columns = self.columns()?;
        if !columns.is_fast() {
            // There nothing is marked: what waits is worked out at each claim.
            return Ok(0);
        }
        let mut conn = self.outbox.acquire().await?;
        let found: Vec<(i16, String)> = sqlx::query_as(AssertSqlSafe(fast::freeable(columns, member)))
            .persistent(!self.outbox.pooled)
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
        let done = sqlx::query(AssertSqlSafe(fast::unhold(columns, member)))
            .persistent(!self.outbox.pooled)
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

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        let c = self.columns()?;
        let ours = format!("(cardinality($1::text[]) = 0 OR {} = ANY($1))", c.field(&c.spec.stream));
        let order = c.order().join(", ");
        let blocked = if member.block_on_dead && member.order == Order::Key {
            format!(
                "count(*) FILTER (WHERE EXISTS (SELECT FROM {} t WHERE {} = o.key AND {} AND {ours} \
                 AND ROW({order}) < o.place))",
                c.table,
                c.key(),
                c.is_dead_or_unknown(),
            )
        } else {
            "0::bigint".into()
        };
        // What is held there waits for another event, and not for a time.
        let (side, later) = match c.is_fast() {
            true => (String::new(), "o.retry > now() AND o.retry < 'infinity'"),
            false => (c.join_side(), "o.retry > now()"),
        };
        let sql = format!(
            "SELECT count(*), {blocked}, count(*) FILTER (WHERE {later}), \
               least(extract(epoch FROM min(o.retry) FILTER (WHERE {later} AND isfinite(o.retry)) - now()), 3e9)::float8 \
             FROM (SELECT {} AS key, ROW({order}) AS place, {} AS retry FROM {} t {side} WHERE {} AND {ours}) AS o",
            c.key(),
            c.next_retry_at(),
            c.table,
            c.is_open(),
        );
        let mut conn = self.outbox.acquire().await?;
        let row = sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.outbox.pooled)
            .bind(&member.streams)
            .fetch_one(conn.get())
            .await
            .map_err(doing("counting the backlog"))?;
        conn.commit().await?;
        let count = |index: usize| row.try_get::<i64, _>(index).map_err(doing("counting the backlog"));
        let not_due = count(2)?.unsigned_abs();
        let next: Option<f64> = row.try_get(3).map_err(doing("counting the backlog"))?;
        // As long as a century is never.
        let next_due =
            next.filter(|next| *next < 3e9).and_then(|next| Duration::try_from_secs_f64(next).ok());
        let mut backlog = Backlog {
            unfinished: count(0)?.unsigned_abs(),
            blocked: count(1)?.unsigned_abs(),
            not_due,
            next_due,
        };
        if member.block_on_dead && member.order == Order::Total && self.has_dead(c, member).await? {
            backlog.blocked = backlog.unfinished;
        }
        Ok(backlog)
    }

    async fn wait(&self, at_most: Duration) {
        match self.listener.get() {
            Some(listener) => {
                // Running out of time is the usual end of a wait.
                let _ = tokio::time::timeout(at_most, listener.woken()).await;
            }
            None => tokio::time::sleep(at_most).await,
        }
    }
}

impl PgQueue {
    async fn has_dead(&self, c: &Columns, member: &Member) -> Result<bool> {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM {} t WHERE {} AND (cardinality($1::text[]) = 0 OR {} = ANY($1)))",
            c.table,
            c.is_dead_or_unknown(),
            c.field(&c.spec.stream)
        );
        let mut conn = self.outbox.acquire().await?;
        let found = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!self.outbox.pooled)
            .bind(&member.streams)
            .fetch_one(conn.get())
            .await
            .map_err(doing("looking for dead events"))?;
        conn.commit().await?;
        Ok(found)
    }

    async fn claim_fast(&self, columns: &Columns, request: &ClaimRequest<'_>) -> Result<Claimed> {
        let member = request.member;
        let slots = slots(request.partitions, member.partitions);
        let lanes = slots.len() * member.streams.len().max(1);
        let events = match member.order {
            Order::Total => request.events.min(TOTAL_BATCH),
            Order::None | Order::Key => request.events,
        };
        let fair = (events.div_ceil(lanes.max(1)) * 2).max(8);
        let mut per_lane = match member.order {
            Order::Total => events,
            Order::None | Order::Key => self.per_lane.load(Ordering::Relaxed).clamp(fair, events.max(fair)),
        };
        let sql = fast::claim(columns, member, request.alone);
        let mut rounds = HOLD_ROUNDS;
        let mut claimed = loop {
            let mut conn = self.outbox.acquire().await?;
            let rows = sqlx::query(AssertSqlSafe(sql.clone()))
                .persistent(!self.outbox.pooled)
                .bind(request.token)
                .bind(as_i64(events))
                .bind(as_i64(request.bytes))
                .bind(member.lease.as_secs_f64())
                .bind(member.id)
                .bind(&slots)
                .bind(request.tokens)
                .bind(&member.streams)
                .bind(as_i64(per_lane))
                .bind(as_i64(request.max_payload))
                .bind(request.alone)
                .fetch(conn.get());
            let (claimed, held) = collect(rows, columns, request).await?;
            conn.commit().await?;
            rounds -= 1;
            // Nothing was found but events behind one that waits. They are out of the way now: an empty answer
            // would let the relay rest, with who knows what behind them.
            if !held || !claimed.rows.is_empty() || claimed.suspects || rounds == 0 {
                break claimed;
            }
            per_lane = (per_lane * 4).min(events.max(fair));
        };
        for row in &mut claimed.rows {
            row.partition = partition_of(row.partition, member.partitions);
        }
        self.adapt(&claimed, events, per_lane, fair);
        Ok(claimed)
    }

    /// Asks more of each lane when few lanes have everything, and less when all have plenty.
    fn adapt(&self, claimed: &Claimed, events: usize, per_lane: usize, fair: usize) {
        let found = claimed.rows.len() + claimed.overflow.len();
        if found >= events {
            self.per_lane.store((per_lane / 2).max(fair), Ordering::Relaxed);
            return;
        }
        let mut lanes: HashMap<(u16, &str), usize> = HashMap::new();
        for row in &claimed.rows {
            if let Ok(event) = &row.event {
                *lanes.entry((row.partition, &event.stream)).or_default() += 1;
            }
        }
        if lanes.values().any(|count| *count >= per_lane) {
            self.per_lane.store(per_lane * 4, Ordering::Relaxed);
        }
    }
}

/// Reads claimed rows as they come, and keeps no more bytes than the request allows. Says, too, whether the
/// claim held events back.
async fn collect(
    mut rows: impl futures::Stream<Item = sqlx::Result<PgRow>> + Unpin,
    columns: &Columns,
    request: &ClaimRequest<'_>,
) -> Result<(Claimed, bool)> {
    let failed = doing("claiming");
    let mut claimed = Claimed::default();
    let mut held = false;
    let mut bytes = 0;
    while let Some(row) = rows.try_next().await.map_err(&failed)? {
        let alive: bool = row.try_get("alive").map_err(&failed)?;
        if !alive {
            return Err(evicted());
        }
        held |= row.try_get::<bool, _>("held").map_err(&failed)?;
        claimed.suspects |= row.try_get::<bool, _>("suspects").map_err(&failed)?;
        let Some(key) = row_key(&row, columns)? else { continue };
        if bytes >= request.bytes && !claimed.rows.is_empty() {
            claimed.overflow.push(key);
            continue;
        }
        let event = decode::event(&row, &columns.spec, request.max_payload);
        bytes += event.as_ref().map_or(0, |event| event.payload.len());
        let attempt: i64 = decode::get::<Option<i32>>(&row, "attempt")?.unwrap_or(1).into();
        let lost: i64 = decode::get::<Option<i32>>(&row, "lost")?.unwrap_or(0).into();
        let max_attempts = decode::get::<Option<i64>>(&row, "e_max_attempts")?;
        claimed.rows.push(ClaimedRow {
            key,
            partition: u16::try_from(decode::get::<Option<i16>>(&row, "slot")?.unwrap_or(0)).unwrap_or(0),
            attempt: u32::try_from(attempt).unwrap_or(1).max(1),
            max_attempts: max_attempts.and_then(|limit| u32::try_from(limit).ok()),
            lost_leases: u32::try_from(lost).unwrap_or(0),
            waited: decode::get::<Option<bool>>(&row, "waited")?.unwrap_or(false),
            event,
        });
    }
    Ok((claimed, held))
}

fn row_key(row: &PgRow, columns: &Columns) -> Result<Option<RowKey>> {
    if columns.is_fast() {
        return Ok(decode::get::<Option<i64>>(row, "row_id")?.map(RowKey::Int));
    }
    Ok(decode::get::<Option<String>>(row, "row_id")?.map(RowKey::Text))
}

/// The slots of the given partitions. Without order, all of them.
fn slots(partitions: &[u16], count: u16) -> Vec<i16> {
    (0..fast::SLOTS)
        .filter(|slot| count == 0 || partitions.contains(&partition_of(*slot, count)))
        .filter_map(|slot| i16::try_from(slot).ok())
        .collect()
}

fn partition_of(slot: u16, count: u16) -> u16 {
    airtight_core::group::partition_of(slot.into(), count)
}

fn as_i64(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// The identity of rows as arrays that a statement can take.
pub(crate) fn int_keys(rows: &[&RowClaim]) -> Vec<i64> {
    rows.iter()
        .map(|row| match &row.key {
            RowKey::Int(key) => *key,
            RowKey::Text(text) => text.parse().unwrap_or(-1),
        })
        .collect()
}

pub(crate) fn text_keys(rows: &[&RowClaim]) -> Vec<String> {
    rows.iter()
        .map(|row| match &row.key {
            RowKey::Int(key) => key.to_string(),
            RowKey::Text(text) => text.clone(),
        })
        .collect()
}
