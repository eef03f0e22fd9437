//! The log: any number of consumers follow one append-only table, each with its offset.
//!
//! [`Log`] is the [`Source`] for any [`LogStore`]. It reads ahead of what is settled, in the order of `seq`, and
//! moves the offset over the settled prefix. The log itself is never updated. An event that fails is *parked*: the
//! transaction that moves the offset past it copies it to a second table, with its consumer, its attempts, its error and
//! the time of its next try. Later events of the same key are parked behind it.
//!
//! A consumer is divided into partitions of the keys. Each partition has its own offset, and is leased to one instance
//! at a time. With one partition, one instance works and the others stand by.
//!
//! A process that is killed at any point leaves an offset that is too small, never one that is too large: events that
//! were delivered after that offset are delivered once more. A settle is fenced by the partition's epoch, which changes
//! with every owner and every seek, and by the offset itself, so that an offset that a person has changed is kept.

mod admin;
mod plan;
mod store;
mod track;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use uuid::Uuid;

pub use self::{
    admin::{
        Consumer, Instance, LogAdmin, OpenPublisher, Parked, ParkedFilter, PartitionOffset, Pruned,
        Retention, Seek, SeekOptions, SeekTo, check_offset, open_publishers, unknown_consumer,
    },
    store::{
        Changes, ConsumerState, Due, Fate, LogRow, LogStore, Move, Park, ParkedRow, Read, ReadRequest,
        Replay, Revision, Standing, Start, behind_retention,
    },
};
use self::{
    plan::Plan,
    track::{Asked, ConsumerTracker},
};
use crate::{
    Backlog, Batch, Capabilities, Code, Error, Limits, Order, Position, ReadOptions, Result, Rules,
    Settlement, Source, Verdict,
    group::{
        self, Group, GroupKind, GroupName, Member, Members, Pulse,
        driver::{self, Heartbeat, Membered, Membership},
    },
    source::Settled,
};

/// The first wait when there is nothing new; doubled each time, up to the poll interval.
const FIRST_WAIT: Duration = Duration::from_millis(5);

/// The same while a hole may be filled any moment.
const HOLE_WAIT: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// How long to wait before looking again for parked events of which none will be due by itself.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How a log is followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// The consumer's name. A log with this name continues where the consumer stopped.
    pub consumer: String,
    /// The options that queue, log and CDC have in common. At most as many instances as partitions can work at once.
    pub read: ReadOptions,
    /// Where a new consumer begins.
    pub start: Start,
    /// What happens to an event that fails.
    pub on_failure: OnFailure,
    /// When this many parked events wait, nothing new is read until some are delivered.
    pub max_parked: usize,
    /// How many events to read ahead of one that is not settled. A crash repeats at most this many.
    pub max_ahead: u32,
}

impl LogOptions {
    /// The defaults for a consumer of this name.
    pub fn consumer(name: impl Into<String>) -> Self {
        Self {
            consumer: name.into(),
            read: ReadOptions { partitions: 1, ..ReadOptions::default() },
            start: Start::Earliest,
            on_failure: OnFailure::Park,
            max_parked: 10_000,
            max_ahead: 100_000,
        }
    }

    /// The same, with a change to the common options:
    /// `LogOptions::consumer("mail").reading(|read| read.partitions = 4)`.
    #[must_use]
    pub fn reading(mut self, change: impl FnOnce(&mut ReadOptions)) -> Self {
        change(&mut self.read);
        self
    }

    /// The rules that these options set. A consumer that halts blocks the key of the event that halted it, whatever
    /// `block_on_dead` says: that event is delivered again after the halt, and the events behind it must come later.
    pub fn rules(&self) -> Rules {
        let rules = self.read.rules();
        Rules { block_on_dead: rules.block_on_dead || self.on_failure == OnFailure::Halt, ..rules }
    }

    fn member(&self, kind: GroupKind) -> Member {
        let ReadOptions { order, block_on_dead, lease, partitions, .. } = self.read;
        Member {
            id: Uuid::new_v4(),
            host: group::host_name(),
            group: GroupName::new(kind, &self.consumer),
            streams: self.read.distinct_streams(),
            order,
            // The option itself, and not the value of `rules`: a consumer that halts makes no event dead. A dead event
            // was parked before the consumer was set to halt, and blocks its key only if the option says so.
            block_on_dead,
            // The others learn of it with their next heartbeat, which is within the lease.
            lease: lease.mul_f64(2.0 / 3.0),
            partitions: if order == Order::Total { 1 } else { partitions.max(1) },
        }
    }

    fn check(&self) -> Result<()> {
        let name = &self.consumer;
        if name.is_empty() || name.len() > 200 || name.contains('\0') {
            return Err(Error::permanent(
                Code::BAD_NAME,
                format!("a consumer's name must have 1 to 200 bytes; `{name}` does not"),
            ));
        }
        Ok(())
    }
}

/// What happens to an event that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFailure {
    /// It is parked and retried automatically; the other events continue.
    #[default]
    Park,
    /// The consumer waits for the event, and stops when the event is given up on.
    Halt,
}

/// A [`Source`] over any [`LogStore`]. Cheap to clone; all clones share one state.
pub struct Log<S> {
    inner: Arc<Inner<S>>,
}

impl<S> Clone for Log<S> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

struct Inner<S> {
    shared: Arc<Shared<S>>,
    /// The background task. It ends when the last clone is dropped without `close`.
    heartbeat: Heartbeat,
}

struct Shared<S> {
    store: S,
    options: LogOptions,
    track: Mutex<ConsumerTracker>,
    membership: Membership,
    /// Held while offsets or parked events are changed.
    settling: tokio::sync::Mutex<()>,
}

impl<S: LogStore> Log<S> {
    /// A log over `store`. Nothing happens before [`Source::open`].
    pub fn new(store: S, options: LogOptions) -> Self {
        let shared = Shared {
            track: Mutex::new(ConsumerTracker::new(options.member(store.kind()))),
            store,
            options,
            membership: Membership::default(),
            settling: tokio::sync::Mutex::default(),
        };
        Self { inner: Arc::new(Inner { shared: Arc::new(shared), heartbeat: Heartbeat::default() }) }
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.inner.shared.store
    }

    /// The options.
    pub fn options(&self) -> &LogOptions {
        &self.inner.shared.options
    }

    /// The partitions that this relay owns now; for tests and status.
    pub fn owned_partitions(&self) -> Vec<u16> {
        self.inner.shared.track().known()
    }

    /// Prepares to settle these events as delivered in the handler's own transaction: the store writes
    /// [`Committing::changes`] there, and [`Committing::done`] is called after it has committed. Meanwhile nothing
    /// else is settled. The outcome of each event is then [`crate::Outcome::Committed`].
    pub async fn committing(&self, positions: &[Position]) -> Committing<'_, S> {
        let shared = &self.inner.shared;
        let one = shared.settling.lock().await;
        let plan = shared.plan_committed(positions);
        Committing { shared, _one: one, plan }
    }
}

/// Offsets that are about to be written in a handler's transaction; see [`Log::committing`].
pub struct Committing<'a, S> {
    shared: &'a Shared<S>,
    _one: tokio::sync::MutexGuard<'a, ()>,
    plan: Plan,
}

impl<S: LogStore> Committing<'_, S> {
    /// The relay that settles.
    pub fn member(&self) -> &Member {
        &self.plan.member
    }

    /// What to write.
    pub fn changes(&self) -> &Changes {
        &self.plan.changes
    }

    /// Plans again, for these events only, after others have failed. If the database allows one writer at a time, this must
    /// begin before the transaction does; otherwise each would wait for the other.
    pub fn replan(&mut self, positions: &[Position]) {
        self.plan = self.shared.plan_committed(positions);
    }

    /// Whether this relay no longer owns some of the events: then nothing may be committed.
    pub fn is_fenced(&self) -> bool {
        self.plan.fenced > 0
    }

    /// The transaction has committed.
    pub fn done(self) {
        self.shared.track().apply(self.plan, &[], true);
        self.shared.membership.changed.notify_one();
    }
}

#[async_trait]
impl<S: LogStore> Source for Log<S> {
    fn rules(&self) -> Rules {
        self.inner.shared.options.rules()
    }

    async fn open(&self, sink: &Capabilities) -> Result<()> {
        let shared = &self.inner.shared;
        shared.options.check()?;
        shared.store.open(sink).await?;
        let member = shared.track().group.member.clone();
        shared.store.attach(&member, shared.options.start).await?;
        driver::join(&**shared).await?;
        // Check once more, now that others see this relay: of two relays that start at the same time with different
        // settings, each may have found no other relay before.
        shared.store.attach(&member, Start::Earliest).await?;
        driver::tick(&**shared).await?;
        self.inner.heartbeat.start(shared.options.read.lease, shared.clone());
        Ok(())
    }

    async fn next(&self, limits: Limits) -> Result<Batch> {
        let shared = &self.inner.shared;
        let batch = shared.next(limits).await?;
        if !batch.is_empty() {
            shared.track().idle = 0;
        }
        Ok(batch)
    }

    async fn wait(&self, at_most: Duration) {
        let shared = &self.inner.shared;
        let wait = shared.track().wait(at_most);
        tokio::select! {
            () = shared.store.wait(wait) => {}
            () = shared.membership.changed.notified() => {}
        }
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled> {
        self.inner.shared.settle(settlements, false).await
    }

    async fn backlog(&self) -> Result<Backlog> {
        let shared = &self.inner.shared;
        if shared.track().paused {
            let name = &shared.options.consumer;
            return Err(Error::permanent(Code::PAUSED, format!("consumer `{name}` is paused"))
                .with_remedy(format!("`airtight consumers resume {name}`")));
        }
        shared.settle(&[], true).await?;
        let member = shared.track().group.member.clone();
        shared.store.backlog(&member).await
    }

    async fn close(&self) -> Result<()> {
        let shared = &self.inner.shared;
        self.inner.heartbeat.stop().await;
        let settled = shared.settle(&[], true).await.map(|_| ());
        let member = shared.track().group.member.clone();
        let ready = shared.store.before_leaving(&member).await;
        shared.store.members().leave(&member).await.and(ready).and(settled)
    }
}

impl<S: LogStore> Shared<S> {
    fn track(&self) -> MutexGuard<'_, ConsumerTracker> {
        self.track.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn by_key(&self) -> bool {
        self.options.read.order == Order::Key
    }

    fn plan_committed(&self, positions: &[Position]) -> Plan {
        let settlements: Vec<Settlement> = positions
            .iter()
            .map(|position| Settlement { position: *position, verdict: Verdict::SettledInTransaction })
            .collect();
        self.track().plan(&settlements, false, &self.options)
    }

    async fn next(&self, limits: Limits) -> Result<Batch> {
        loop {
            let (asked, waiting) = {
                let mut track = self.track();
                if let Some(error) = self.membership.failure().or_else(|| track.halted()) {
                    return Err(error);
                }
                if track.halted_until.is_some_and(|until| until <= Instant::now()) {
                    track.halted_until = None;
                }
                let still = track.paused || track.halted_until.is_some();
                let Some(asked) = track.ask().filter(|_| !still) else { return Ok(Batch::empty()) };
                track.blocked = false;
                (asked, track.waiting())
            };
            // Held events of the last round stand in the way of the offset until they are parked.
            self.settle_held().await?;
            let batch = self.due(&asked, waiting, limits).await?;
            if !batch.is_empty() {
                return Ok(batch);
            }
            if self.options.read.order == Order::Total && waiting > 0 {
                return Ok(Batch::empty());
            }
            let released = self.track().released(limits.events);
            let Some(released) = released else { return Ok(Batch::empty()) };
            if !released.is_empty() {
                let request = self.request(&asked, limits);
                let rows = self.store.reread(&request, &released).await?;
                return Ok(self.track().readmit(rows, &asked, self.by_key()));
            }
            if self.is_full(waiting) || self.track().ahead() >= self.options.max_ahead.into() {
                return Ok(Batch::empty());
            }
            let read = self.store.read(&self.request(&asked, limits)).await?;
            let mut track = self.track();
            track.blocked = read.blocked;
            let batch = track.admit(read.rows, read.through, &asked, self.by_key());
            if !batch.is_empty() || !read.more {
                return Ok(batch);
            }
        }
    }

    /// Whether so much is parked that nothing new is read. This is logged once.
    fn is_full(&self, waiting: usize) -> bool {
        let is_full = waiting >= self.options.max_parked;
        if !std::mem::replace(&mut self.track().full, is_full) && is_full {
            tracing::warn!(
                consumer = self.options.consumer,
                parked = waiting,
                "nothing new is read: `max_parked` events wait for another try, or for a destination that is \
                 unavailable; `airtight status` names it"
            );
        }
        is_full
    }

    async fn due(&self, asked: &Asked, waiting: usize, limits: Limits) -> Result<Batch> {
        let (look, except) = {
            let track = self.track();
            (track.look_at.is_none_or(|at| at <= Instant::now()), track.parked_out())
        };
        if waiting == 0 || !look {
            return Ok(Batch::empty());
        }
        let due = self.store.due(&self.request(asked, limits), &except).await?;
        let mut track = self.track();
        if due.rows.is_empty() {
            track.look_at = Some(Instant::now() + due.next_in.unwrap_or(LOOK_AGAIN));
        }
        Ok(track.admit_parked(due.rows, asked))
    }

    fn request<'a>(&self, asked: &'a Asked, limits: Limits) -> ReadRequest<'a> {
        ReadRequest {
            member: &asked.member,
            partitions: &asked.partitions,
            after: asked.after,
            events: limits.events.max(1),
            bytes: limits.bytes.max(1),
            max_payload: self.options.read.max_payload,
        }
    }

    async fn settle_held(&self) -> Result<()> {
        if self.track().has_held() {
            self.settle(&[], false).await?;
        }
        Ok(())
    }

    /// Writes verdicts and what follows from them; with `all`, the offsets of idle partitions move, too.
    async fn settle(&self, settlements: &[Settlement], all: bool) -> Result<Settled> {
        let _one = self.settling.lock().await;
        let plan = self.track().plan(settlements, all, &self.options);
        let refused = if plan.changes.is_empty() {
            Vec::new()
        } else {
            self.store.settle(&plan.member, &plan.changes).await?
        };
        if !refused.is_empty() {
            tracing::debug!(
                consumer = self.options.consumer,
                partitions = refused.len(),
                "offsets were refused: another relay owns these partitions, or a person has moved their offsets"
            );
        }
        let settled = self.track().apply(plan, &refused, false);
        self.membership.changed.notify_one();
        Ok(settled)
    }

    /// Reads the offsets of partitions that are new to this relay, and which keys wait, if a person has changed that.
    async fn take_up(&self, member: &Member, watch: ConsumerState) -> Result<()> {
        // Meanwhile, no offset and no parked event may change.
        let _one = self.settling.lock().await;
        let revision = Some(watch.revision).filter(|revision| *revision != Revision::Moved);
        let known = {
            let mut track = self.track();
            track.paused = watch.paused;
            let is_same = revision.is_some() && track.revision == revision;
            if is_same { Vec::new() } else { track.known() }
        };
        if !known.is_empty() {
            let standings = self.store.positions(member, &known).await?;
            self.track().recount(standings);
            self.membership.changed.notify_one();
        }
        // Only now: if the read had failed, it would have to be repeated.
        self.track().revision = revision;
        let unknown = self.track().unknown();
        if !unknown.is_empty() {
            let standings = self.store.positions(member, &unknown).await?;
            self.track().adopt(standings);
            self.membership.changed.notify_one();
        }
        Ok(())
    }
}

#[async_trait]
impl<S: LogStore> Membered for Shared<S> {
    fn members(&self) -> &dyn Members {
        self.store.members()
    }

    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn group<T>(&self, act: impl FnOnce(&mut Group) -> T) -> T {
        let mut track = self.track();
        let answer = act(&mut track.group);
        track.keep_owned();
        answer
    }

    fn new_member(&self) -> Member {
        self.options.member(self.store.kind())
    }

    async fn before_joining_again(&self, member: &Member) -> Result<()> {
        // A consumer that was removed meanwhile is not created again.
        self.store.consumer_state(member).await?;
        // Relays with other settings may have joined meanwhile: they would take events that this one leaves out for done.
        self.store.attach(member, Start::Earliest).await
    }

    async fn heartbeat(&self, member: &Member) -> Result<(Pulse, Instant)> {
        let sent = Instant::now();
        let pulse = self.store.members().heartbeat(member, &[]).await?;
        self.store.renewed(member, &pulse);
        Ok((pulse, sent))
    }

    async fn before_giving(&self, member: &Member) -> Result<()> {
        self.store.before_giving(member).await
    }

    fn start_giving(&self, give: &[u16]) -> Vec<u16> {
        let mut track = self.track();
        let busy = track.busy();
        track.group.start_giving(give, &busy)
    }

    /// Moves the offsets of idle partitions.
    async fn before_moving(&self) -> Result<()> {
        self.settle(&[], true).await.map(|_| ())
    }

    /// Reads what operators have changed, starts with new partitions, and frees events that no longer wait for another.
    async fn after_moving(&self, member: &Member) -> Result<()> {
        let watch = self.store.consumer_state(member).await?;
        self.take_up(member, watch).await?;
        let (known, waiting) = {
            let track = self.track();
            (track.known(), track.waiting())
        };
        if self.by_key() && waiting > 0 && self.store.unhold(member, &known).await? > 0 {
            self.track().look_at = None;
            self.membership.changed.notify_one();
        }
        Ok(())
    }
}

impl ConsumerTracker {
    /// How long to wait before the next look, if nothing wakes the relay.
    fn wait(&mut self, at_most: Duration) -> Duration {
        self.idle = self.idle.saturating_add(1);
        let (first, longest) = if self.blocked { HOLE_WAIT } else { (FIRST_WAIT, at_most) };
        let mut wait = first.saturating_mul(1 << self.idle.saturating_sub(1).min(16)).min(longest);
        for at in [self.halted_until, self.look_at.filter(|_| self.waiting() > 0)].into_iter().flatten() {
            wait = wait.min(at.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        }
        wait.min(at_most)
    }
}
