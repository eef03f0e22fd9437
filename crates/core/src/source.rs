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

/// Hands out events that no other relay is delivering, and stores what became of each.
///
/// # The contract
///
/// - **At least once.** An event that was handed out and not settled is handed out again: after its lease, after a
///   restart, after a takeover. Only [`Verdict::Delivered`], [`Verdict::SettledInTransaction`], [`Verdict::Dead`]
///   and [`Verdict::Unknown`] end this.
/// - **Committed only.** An event of a transaction that rolled back is never handed out.
/// - **Order.** `next` returns the events of one key in order, across calls. When an event of a key was settled as
///   [`Verdict::Retry`] or [`Verdict::Away`], a `next` that *began* after that settle returned hands out no later event
///   of that key, until the event is finished. (The relay handles calls that overlapped with the settle.)
/// - **Fencing.** A settle by a relay that has lost ownership changes nothing and is counted in
///   [`Settled::fenced`]. Ownership is lost when its lease runs out; the batch's [`Ownership`] shows this earlier.
/// - **Attempts.** Handing out an event costs an attempt. [`Verdict::Released`] and [`Verdict::Away`] give the attempt
///   back. A lost lease costs none.
/// - **Concurrency.** `next` and `settle` run concurrently, one call of each at a time. The source itself renews leases
///   while a batch is being delivered.
/// - **Cancellation.** The relay awaits `next` and `settle` to the end, except for a call that hangs when the relay
///   stops: after that, the relay calls only `close`. The relay may drop `wait` at any time, and `open` at a shutdown.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// The order in which events are handed out, and what a dead event means for its key. The relay asks once, when it
    /// starts, and follows the answer.
    fn rules(&self) -> Rules;

    /// Refuses a policy that contradicts what the source itself says about an event. Called before `open`.
    fn accepts(&self, _policy: &Policy) -> Result<()> {
        Ok(())
    }

    /// Connects, checks the table, joins the other relays. Called first, and again if it failed. `sink` says what the sink
    /// promises and needs: a source that can hand out rows does so if [`Capabilities::wants_rows`] is set.
    async fn open(&self, _sink: &Capabilities) -> Result<()> {
        Ok(())
    }

    /// Returns what can be delivered now, within `limits`; an empty batch when there is nothing.
    async fn next(&self, limits: Limits) -> Result<Batch>;

    /// Returns when there may be something new, or after `at_most`. This is only a hint: the relay polls in any case.
    async fn wait(&self, at_most: Duration) {
        tokio::time::sleep(at_most).await;
    }

    /// Stores the verdicts on events that were handed out: all of them, or none when it returns an error.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled>;

    /// What is left to deliver. Called when the relay is to stop at an empty backlog.
    async fn backlog(&self) -> Result<Backlog>;

    /// Gives back what this relay still holds, and leaves the group. No method is called after `close`. It is also called
    /// when `open` failed or was abandoned, and after a `next` or a `settle` that hung at a shutdown was dropped.
    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// How much a relay can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most events.
    pub events: usize,
    /// The most bytes. A batch may always have one event, however large.
    pub bytes: usize,
}

/// Events that were handed out together.
#[derive(Debug)]
pub struct Batch {
    /// The events, in order.
    pub deliveries: Vec<Delivery>,
    /// Rows that cannot become an event (the payload is not JSON, the op is unknown). The relay settles them as dead.
    pub rejects: Vec<Reject>,
    /// Says whether these events still belong to this relay.
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

/// One event that is being delivered, with what the engine needs to judge it.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The event.
    pub event: Event,
    /// The source's handle for it.
    pub position: Position,
    /// The number of this attempt, starting at one.
    pub attempt: u32,
    /// The event's own limit, if it has one.
    pub max_attempts: Option<u32>,
    /// How often a relay vanished while it held this event.
    pub lost_leases: u32,
    /// The replay that asked for this event again, by its unique number: [`crate::log::Replay::id`]. None for a first
    /// delivery, and for repeats that no operator asked for (after a crash or a takeover): a destination that
    /// recognizes repeats by an id sees those under the event's own id.
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

/// The source's own handle for an event that it handed out. Opaque to all other code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position(pub u64);

/// What became of one event.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// The sink has it.
    Delivered,
    /// The delivery failed, and is to be tried again after `after`.
    Retry {
        /// How long to wait.
        after: Duration,
        /// Why it failed.
        error: Error,
    },
    /// The event's destination is unavailable. The event waits for `after`, as for a retry, the later events of its key
    /// wait behind it, and the attempt is given back. No relay holds the event meanwhile.
    Away {
        /// How long to wait.
        after: Duration,
        /// What is wrong with the destination, to be stored with the event.
        error: Error,
    },
    /// The event was given up on. It stays until a person decides.
    Dead {
        /// Why.
        error: Error,
    },
    /// The outcome cannot be known. The event is kept for reconciliation; no automatic or bulk retry touches it.
    Unknown {
        /// What was seen.
        error: Error,
    },
    /// The sink has the event, and recorded this in the handler's own transaction: see
    /// [`crate::log::Log::committing`]. A source without such transactions treats it as [`Verdict::Delivered`].
    SettledInTransaction,
    /// The delivery was not tried, or not finished. The event is given back, and this costs no attempt.
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
    /// Verdicts that were refused because this relay no longer owns the event.
    pub fenced: usize,
}

/// What is left in an outbox, for one pipeline.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Events that are neither done nor dead nor unknown, including those of blocked keys.
    pub unfinished: u64,
    /// Of these, events behind a dead one whose key stays blocked: only a person can unblock them.
    pub blocked: u64,
    /// Of these, events that wait for a time, as far as the source knows.
    pub not_due: u64,
    /// How long until the first of those is due; none if this is unknown, or if none of them will be due.
    pub next_due: Option<Duration>,
}

/// Says whether a batch still belongs to this relay.
///
/// An ownership has a deadline on the local monotonic clock, and each renewal extends it. So a process that was suspended
/// for longer than its lease knows this as soon as it runs again, before any renewal could run. The database has the
/// final decision; this type only avoids duplicates.
#[derive(Debug, Clone)]
pub struct Ownership(Arc<OwnershipInner>);

#[derive(Debug)]
struct OwnershipInner {
    start: Instant,
    deadline_ms: AtomicU64,
    lost: CancellationToken,
}

impl Ownership {
    /// Ownership for `lease` from `since`, the time when the statement that granted it was *sent*.
    pub fn leased(since: Instant, lease: Duration) -> Self {
        let inner =
            OwnershipInner { start: since, deadline_ms: AtomicU64::new(0), lost: CancellationToken::new() };
        let ownership = Self(Arc::new(inner));
        ownership.renew(since, lease);
        ownership
    }

    /// Ownership that ends only by [`Ownership::lose`].
    pub fn forever() -> Self {
        Self::leased(Instant::now(), Duration::from_secs(u64::from(u32::MAX)))
    }

    /// Moves the deadline to `since + lease`; never back.
    pub fn renew(&self, since: Instant, lease: Duration) {
        let deadline = since.saturating_duration_since(self.0.start) + lease;
        let deadline = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        self.0.deadline_ms.fetch_max(deadline, Ordering::AcqRel);
    }

    /// A new ownership with the same deadline. [`Ownership::lose`] on `self` does not end it.
    pub(crate) fn succeed(&self) -> Self {
        let deadline_ms = AtomicU64::new(self.0.deadline_ms.load(Ordering::Acquire));
        Self(Arc::new(OwnershipInner { start: self.0.start, deadline_ms, lost: CancellationToken::new() }))
    }

    /// Ends the ownership.
    pub fn lose(&self) {
        self.0.lost.cancel();
    }

    /// Whether the ownership has ended.
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
