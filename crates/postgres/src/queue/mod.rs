//! The queue's statements: what [`airtight_core::queue::Queue`] asks of PostgreSQL.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `store` | the traits of a table, and the choice between the two kinds |
//! | `canonical` | airtight's own table: statements that name its columns |
//! | `foreign` | any other table: statements assembled from its mapping, leases in the side table |
//! | `settle` | verdicts by kind, in the order in which they are applied |

mod canonical;
mod foreign;
mod settle;
mod store;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use airtight_core::{
    Backlog, Order, Result, Verdict,
    group::{Member, Members, evicted},
    queue::{ClaimRequest, Claimed, ClaimedRow, QueueStore, RowClaim, RowKey},
    table::TableSpec,
};
use async_trait::async_trait;
use futures::TryStreamExt;
use sqlx::{AssertSqlSafe, Row, postgres::PgRow};

pub(crate) use self::{
    canonical::{Evicted, count_lost_leases, forget_marks},
    settle::{LONGEST_WAIT, storable},
    store::{QueueTable, Store, load},
};
use crate::{PgOutbox, decode, error::doing, fits, listen::Listener, members::RelayGroup};

/// With total order more would only be given back when one fails.
const TOTAL_BATCH: usize = 100;

/// An outbox in PostgreSQL as a [`QueueStore`].
#[derive(Debug)]
pub struct PgQueue {
    outbox: PgOutbox,
    keep_done: bool,
    group: RelayGroup,
    /// Set when the queue is opened.
    store: OnceLock<Arc<dyn Store>>,
    listener: OnceLock<Listener>,
}

impl PgQueue {
    pub(crate) fn new(outbox: PgOutbox, keep_done: bool) -> Self {
        Self {
            group: RelayGroup::new(outbox.clone()),
            outbox,
            keep_done,
            store: OnceLock::new(),
            listener: OnceLock::new(),
        }
    }

    fn store(&self) -> Result<&dyn Store> {
        self.store.get().map(|store| &**store).ok_or_else(|| {
            airtight_core::Error::permanent(airtight_core::Code::NOT_OPEN, "the queue was not opened")
        })
    }
}

#[async_trait]
impl QueueStore for PgQueue {
    fn members(&self) -> &dyn Members {
        &self.group
    }

    fn table(&self) -> Option<&TableSpec> {
        Some(&self.outbox.spec)
    }

    fn reads(&self) -> bool {
        self.store.get().is_some_and(|store| store.reads())
    }

    async fn open(&self) -> Result<()> {
        let mut conn = self.outbox.acquire().await?;
        let store = load(&self.outbox, &mut conn).await?;
        store.opened(&self.outbox, &mut conn).await?;
        if !self.keep_done && !store.reads() {
            return Err(airtight_core::Error::permanent(
                airtight_core::Code::FOREIGN_TABLE,
                format!(
                    "{} is the application's own table: its rows are not deleted at delivery",
                    store.outbox
                ),
            ));
        }
        let notifying = self.outbox.options.listen
            && self.outbox.options.spec.is_none()
            && self.outbox.is_notifying(&mut conn).await?;
        conn.commit().await?;
        fits::at_start(&self.outbox, &store, Some(&store.status)).await?;
        let store: Arc<dyn Store> = store.into();
        // Opening again after a failure further on finds these set already.
        self.group.read_queue(store.clone());
        let _ = self.store.set(store);
        // Behind a pooler there is no session to listen in, unless another URL leads to one.
        let session = !self.outbox.pooled || self.outbox.options.listen_url.is_some();
        if notifying && session && self.listener.get().is_none() {
            let _ = self.listener.set(Listener::start(&self.outbox).await?);
        }
        Ok(())
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed> {
        self.store()?.claim(&self.outbox, request).await
    }

    async fn settle(&self, member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>> {
        settle::settle(&self.outbox, self.store()?, member, rows, self.keep_done).await
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        self.store()?.unhold(&self.outbox, member, partitions).await
    }

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        let store = self.store()?;
        let mut conn = self.outbox.acquire().await?;
        let row = sqlx::query(AssertSqlSafe(store.backlog_statement(member)))
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
        if member.block_on_dead && member.order == Order::Total && self.has_dead(store, member).await? {
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
    async fn has_dead(&self, store: &dyn Store, member: &Member) -> Result<bool> {
        let mut conn = self.outbox.acquire().await?;
        let found = sqlx::query_scalar(AssertSqlSafe(store.has_dead_statement()))
            .persistent(!self.outbox.pooled)
            .bind(&member.streams)
            .fetch_one(conn.get())
            .await
            .map_err(doing("looking for dead events"))?;
        conn.commit().await?;
        Ok(found)
    }
}

/// Reads claimed rows as they come, and keeps no more bytes than the request allows. Says, too, whether the
/// claim held events back. `key` reads what tells a row apart, none where the result has no row.
async fn collect(
    mut rows: impl futures::Stream<Item = sqlx::Result<PgRow>> + Unpin,
    spec: &TableSpec,
    request: &ClaimRequest<'_>,
    key: fn(&PgRow) -> Result<Option<RowKey>>,
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
        let Some(key) = key(&row)? else { continue };
        if bytes >= request.bytes && !claimed.rows.is_empty() {
            claimed.overflow.push(key);
            continue;
        }
        let event = decode::event(&row, spec, request.max_payload);
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

/// How many events a claim takes at most.
fn most_events(request: &ClaimRequest<'_>) -> usize {
    match request.member.order {
        Order::Total => request.events.min(TOTAL_BATCH),
        Order::None | Order::Key => request.events,
    }
}

fn as_i64(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
