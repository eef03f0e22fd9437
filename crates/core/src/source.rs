//! The source's half of the delivery contract.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::{Capabilities, Error, Event, Policy, Result, Rules};

/// Hands out events that nobody else is delivering, and is told what became of each.
///
/// # The contract
///
/// - **At least once.** An event that was handed out and not settled comes again: after its lease, after a
///   restart, after a takeover. Nothing but [`Verdict::Delivered`],
///   [`Verdict::SettledInTransaction`], [`Verdict::Dead`] and [`Verdict::Unknown`] ends that.
/// - **Committed only.** An event of a transaction that rolled back is never handed out.
/// - **Order.** Events of one key leave `next` in order, across calls. When an event of a key was settled as
///   [`Verdict::Retry`] or [`Verdict::Away`], no later event of that key is handed out by a `next` that *began* after
///   that settle returned, until the event is finished. (The relay takes care of calls that overlapped with the settle.)
/// - **Fencing.** A settle by someone who has lost ownership changes nothing and is counted in
///   [`Settled::fenced`]. Ownership is lost when its lease runs out; the batch's [`Ownership`] tells early.
/// - **Attempts.** Handing out costs an attempt; [`Verdict::Released`] and [`Verdict::Away`] give it back; a lost lease
///   costs none.
/// - **Concurrency.** `next` and `settle` run side by side, one call of each at a time. Renewing leases while a
///   batch is being delivered is the source's own business.
/// - **Cancellation.** `next` and `settle` are awaited to the end, unless one hangs when the relay stops: after
///   that only `close` is called. `wait` may be dropped, and `open` by a shutdown.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// The order that events are handed out in, and what a dead one means for its key. The relay asks once, when it
    /// starts, and keeps to the answer.
    fn rules(&self) -> Rules;

    /// Refuses policies that contradict what the source itself says of an event. Called before `open`.
    fn accepts(&self, _policy: &Policy) -> Result<()> {
        Ok(())
    }

    /// Connects, checks the table, joins the other relays. Called before anything else, and again if it failed. `sink`
    /// is what the sink promises and wants: a source that can give rows does so if [`Capabilities::wants_rows`] is set.
    async fn open(&self, _sink: &Capabilities) -> Result<()> {
        Ok(())
    }

    /// What can be delivered right now, within `limits`; empty when there is nothing.
    async fn next(&self, limits: Limits) -> Result<Batch>;

    /// Returns when there may be something new, or after `at_most`. A hint only: polling is the truth.
    async fn wait(&self, at_most: Duration) {
        tokio::time::sleep(at_most).await;
    }

    /// Takes the verdicts on events that were handed out, all of them or none when it returns an error.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled>;

    /// What is left to deliver; asked when a relay is to stop at an empty backlog.
    async fn backlog(&self) -> Result<Backlog>;

    /// Gives back what is still held and leaves. Nothing is called after it. It is called also when opening
    /// failed or was given up, and after a `next` or a `settle` that hung at a shutdown was dropped.
    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// How much the relay has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// At most so many events.
    pub events: usize,
    /// At most so many bytes, though always at least one event.
    pub bytes: usize,
}

/// Events that were handed out together.
#[derive(Debug)]
pub struct Batch {
    /// The events, in order.
    pub deliveries: Vec<Delivery>,
    /// Rows that cannot become an event (payload that is not JSON, unknown op): settled as dead.
    pub rejects: Vec<Reject>,
    /// Says when these are no longer ours.
    pub ownership: Ownership,
}

impl Batch {
    /// Nothing to deliver.
    pub fn empty() -> Self {
        Self { deliveries: Vec::new(), rejects: Vec::new(), ownership: Ownership::forever() }
    }

    /// Whether there is neither an event nor a reject.
    pub fn is_empty(&self) -> bool {
        self.deliveries.is_empty() && self.rejects.is_empty()
    }
}

/// One event on its way, with what the engine needs to judge it.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The event.
    pub event: Event,
    /// The source's handle for it.
    pub position: Position,
    /// Which attempt this is, from one.
    pub attempt: u32,
    /// The event's own limit, if it has one.
    pub max_attempts: Option<u32>,
    /// How often a relay vanished while it held this event.
    pub lost_leases: u32,
    /// The replay that asked for it again, by a number that no other replay has: [`crate::log::Replay::id`]. None for
    /// what is delivered for the first time, and for repeats that nobody asked for (a crash, a takeover): where a
    /// destination knows repeats by an id, those stay under the event's own.
    pub replay: Option<i64>,
}

/// A row that cannot be delivered as it is.
#[derive(Debug, Clone)]
pub struct Reject {
    /// The source's handle for it.
    pub position: Position,
    /// The row's id, for the operator.
    pub id: String,
    /// The ordering key, if it could be read.
    pub key: Option<String>,
    /// Why.
    pub error: Error,
}

/// The source's own handle for an event that it handed out. Opaque to everyone else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position(pub u64);

/// What became of one event.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// The sink has it.
    Delivered,
    /// It failed, and is to be tried again after this long.
    Retry {
        /// How long to wait.
        after: Duration,
        /// Why it failed.
        error: Error,
    },
    /// Its destination is away: it waits as long, as a retry does, with its key behind it, and is given back its
    /// attempt. It is not in anybody's hands meanwhile.
    Away {
        /// How long to wait.
        after: Duration,
        /// What is wrong with the destination, to be stored with it.
        error: Error,
    },
    /// It was given up on. It stays until a person decides.
    Dead {
        /// Why.
        error: Error,
    },
    /// The outcome cannot be known: kept for reconciliation, out of reach of automatic and bulk retry.
    Unknown {
        /// What was seen.
        error: Error,
    },
    /// The sink has it, and has written so in the handler's own transaction: see
    /// [`crate::log::Log::committing`]. To a source that knows no such thing it is [`Verdict::Delivered`].
    SettledInTransaction,
    /// It was not tried, or not to its end; given back without costing an attempt.
    Released,
}

/// A verdict and the event it is about.
#[derive(Debug, Clone)]
pub struct Settlement {
    /// Which event.
    pub position: Position,
    /// What became of it.
    pub verdict: Verdict,
}

/// What settling did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settled {
    /// Verdicts that took effect.
    pub applied: usize,
    /// Verdicts refused because somebody else owns the event now.
    pub fenced: usize,
}

/// What is left in an outbox, for one pipeline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Events that are neither done nor dead nor unknown, those of blocked keys included.
    pub unfinished: u64,
    /// Of these, events behind a dead one whose key stays blocked: only a person moves them.
    pub blocked: u64,
    /// Of these, events that wait for a time, as far as the source knows.
    pub not_due: u64,
    /// How long until the first of those is due; none where that is unknown, or never.
    pub next_due: Option<Duration>,
}

/// Says whether a batch still belongs to this relay.
///
/// It has a deadline by the local monotonic clock, which each renewal moves on, so that a process that was
/// paused past its lease knows it the moment it wakes up, before any renewal could run. The database decides
/// in the end; this only spares duplicates.
#[derive(Debug, Clone)]
pub struct Ownership(Arc<OwnershipInner>);

#[derive(Debug)]
struct OwnershipInner {
    start: Instant,
    deadline_ms: AtomicU64,
    lost: CancellationToken,
}

impl Ownership {
    /// Ownership for `lease` from `since`, which is when the statement that gave it was *sent*.
    pub fn leased(since: Instant, lease: Duration) -> Self {
        let inner =
            OwnershipInner { start: since, deadline_ms: AtomicU64::new(0), lost: CancellationToken::new() };
        let ownership = Self(Arc::new(inner));
        ownership.renew(since, lease);
        ownership
    }

    /// Ownership that only ends by [`Ownership::lose`].
    pub fn forever() -> Self {
        Self::leased(Instant::now(), Duration::from_secs(u64::from(u32::MAX)))
    }

    /// Moves the deadline to `since + lease`; never back.
    pub fn renew(&self, since: Instant, lease: Duration) {
        let deadline = since.saturating_duration_since(self.0.start) + lease;
        let deadline = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        self.0.deadline_ms.fetch_max(deadline, Ordering::AcqRel);
    }

    /// Another one with the same deadline, which outlives this one's [`Ownership::lose`].
    pub(crate) fn succeed(&self) -> Self {
        let deadline_ms = AtomicU64::new(self.0.deadline_ms.load(Ordering::Acquire));
        Self(Arc::new(OwnershipInner { start: self.0.start, deadline_ms, lost: CancellationToken::new() }))
    }

    /// Ends it.
    pub fn lose(&self) {
        self.0.lost.cancel();
    }

    /// Whether it has ended.
    pub fn is_lost(&self) -> bool {
        let elapsed = u64::try_from(self.0.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.lost.is_cancelled() || elapsed >= self.0.deadline_ms.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ownership_ends_at_its_deadline_and_renewal_moves_it() {
        let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        let ownership = Ownership::leased(long_ago, Duration::from_secs(30));
        assert!(ownership.is_lost());
        ownership.renew(Instant::now(), Duration::from_secs(30));
        assert!(!ownership.is_lost());
        ownership.renew(long_ago, Duration::from_secs(1));
        assert!(!ownership.is_lost(), "a late renewal must not shorten a lease");
        ownership.lose();
        assert!(ownership.is_lost());
    }
}
