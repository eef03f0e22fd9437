//! The queue: rows claimed under a lease, shared by all stores.
//!
//! [`Queue`] is the [`Source`] for any [`QueueStore`]. It keeps what a store need not know: which rows are in
//! flight under which token, which partitions this relay owns, when a lease was last renewed, and which events
//! must be delivered alone. A background task renews leases, joins the group, and takes and gives up partitions. The task
//! ends with [`Source::close`], or when the queue is dropped.
//!
//! A process that is killed at any point leaves rows that are `processing` under a token that is no longer renewed, and
//! a member whose lease runs out. Other relays evict that member and take over its rows, in order; nothing else is needed.

mod store;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use uuid::Uuid;

pub use self::store::{
    BadRow, ClaimRequest, Claimed, ClaimedRow, QueueStore, RowClaim, RowKey, SUSPECT_AFTER,
};
use crate::{
    Backlog, Batch, Capabilities, Code, Delivery, Limits, Order, Ownership, Policy, Position, ReadOptions,
    Result, Rules, Settlement, Source, Verdict,
    group::{
        self, Group, GroupKind, GroupName, Member, Members, Pulse,
        driver::{self, Heartbeat, Membered, Membership},
    },
    source::{Reject, Settled},
};

/// Roughly what an event needs in memory in addition to its payload: the limit of a claim counts only payloads.
const EVENT_OVERHEAD: usize = 512;

/// How a queue is read. A queue has no options beyond the common ones.
pub type QueueOptions = ReadOptions;

/// `reads`: see [`QueueStore::reads`]. The names of such groups differ from those of groups whose relays claim rows, so
/// that the two never share a partition.
fn member(options: &QueueOptions, reads: bool) -> Member {
    let streams = options.distinct_streams();
    let partitions = match options.order {
        Order::None if !reads => 0,
        Order::None => options.partitions.max(1),
        Order::Key => options.partitions.max(1),
        Order::Total => 1,
    };
    let names = if streams.is_empty() { "*".to_owned() } else { streams.join(",") };
    let on_dead = if options.block_on_dead { "/block" } else { "" };
    let form = if reads { "/reads" } else { "" };
    Member {
        id: Uuid::new_v4(),
        host: group::host_name(),
        group: GroupName::new(
            GroupKind::Queue,
            &format!("{}/{partitions}{on_dead}{form}:{names}", options.order.as_str()),
        ),
        streams,
        order: options.order,
        block_on_dead: options.block_on_dead,
        lease: options.lease,
        partitions,
    }
}

/// A [`Source`] over any [`QueueStore`].
pub struct Queue<S> {
    shared: Arc<Shared<S>>,
    heartbeat: Heartbeat,
}

struct Shared<S> {
    store: S,
    options: QueueOptions,
    state: Mutex<QueueState>,
    /// `changed` says that there may be a partition, or room for a suspect.
    membership: Membership,
    /// Held while the queue renews or settles: both write to rows in flight, each in a different order, which could
    /// deadlock in the database.
    rows: tokio::sync::Mutex<()>,
}

struct QueueState {
    group: Group,
    in_flight: HashMap<Position, InFlight>,
    /// Partitions of the running claim: its rows are not in flight yet, but will be as soon as it returns.
    claiming: Vec<u16>,
    next_position: u64,
    /// Suspects are due: claim nothing more until one of them can be alone.
    suspects: bool,
    /// A suspect is being delivered alone.
    alone: bool,
}

struct InFlight {
    claim: RowClaim,
    partition: u16,
    waited: bool,
    generation: u64,
    claimed_at: Instant,
    ownership: Ownership,
}

impl<S: QueueStore> Queue<S> {
    /// A queue over `store`. Nothing happens before [`Source::open`].
    pub fn new(store: S, options: QueueOptions) -> Self {
        let state = QueueState {
            group: Group::new(member(&options, false)),
            in_flight: HashMap::new(),
            claiming: Vec::new(),
            next_position: 0,
            suspects: false,
            alone: false,
        };
        let shared = Shared {
            store,
            options,
            state: Mutex::new(state),
            membership: Membership::default(),
            rows: tokio::sync::Mutex::default(),
        };
        Self { shared: Arc::new(shared), heartbeat: Heartbeat::default() }
    }

    /// The partitions that this relay owns now; for tests and status.
    pub fn owned_partitions(&self) -> Vec<u16> {
        self.shared.state().group.owned.iter().copied().collect()
    }
}

#[async_trait]
impl<S: QueueStore> Source for Queue<S> {
    fn rules(&self) -> Rules {
        self.shared.options.rules()
    }

    fn accepts(&self, policy: &Policy) -> Result<()> {
        self.shared.store.table().map_or(Ok(()), |table| table.check_attempts(policy.max_attempts))
    }

    async fn open(&self, _sink: &Capabilities) -> Result<()> {
        self.shared.store.open().await?;
        if self.shared.store.reads() {
            self.shared.state().group = Group::new(self.shared.new_member());
        }
        driver::join(&*self.shared).await?;
        driver::tick(&*self.shared).await?;
        self.heartbeat.start(self.shared.options.lease, self.shared.clone());
        Ok(())
    }

    async fn next(&self, limits: Limits) -> Result<Batch> {
        loop {
            if let Some(error) = self.shared.membership.failure() {
                return Err(error);
            }
            let asked = self.shared.state().ask();
            let Some(asked) = asked else { return Ok(Batch::empty()) };
            let batch = self.shared.claim(&asked, limits).await;
            self.shared.state().claiming.clear();
            let batch = batch?;
            // The last suspect is finished: the events that it blocked can be claimed now.
            if !(asked.alone && batch.is_empty()) {
                return Ok(batch);
            }
        }
    }

    async fn wait(&self, at_most: Duration) {
        tokio::select! {
            () = self.shared.store.wait(at_most) => {}
            () = self.shared.membership.changed.notified() => {}
        }
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled> {
        let shared = &self.shared;
        let (member, rows, mut unhold) = {
            let state = shared.state();
            let mut rows = Vec::with_capacity(settlements.len());
            let mut unhold = BTreeSet::new();
            for settlement in settlements {
                let Some(row) = state.in_flight.get(&settlement.position) else { continue };
                // The rows of an earlier membership belong to the next owner of their partition, which may be this relay.
                if row.generation != state.group.generation && state.group.member.partitions > 0 {
                    continue;
                }
                rows.push((row.claim.clone(), &settlement.verdict));
                // Events may wait behind this one. Behind an event that dies at its first attempt nothing waits yet,
                // unless it blocks its key, and then the key stays blocked.
                let waits_on = matches!(
                    settlement.verdict,
                    Verdict::Retry { .. } | Verdict::Away { .. } | Verdict::Released
                );
                if row.waited && !waits_on {
                    unhold.insert(row.partition);
                }
            }
            (state.group.member.clone(), rows, unhold)
        };
        let results = {
            let _alone = shared.rows.lock().await;
            shared.store.settle(&member, &rows).await?
        };
        shared.state().forget(settlements);
        shared.membership.changed.notify_one();

        if shared.options.order != Order::Key {
            unhold.clear();
        }
        if !unhold.is_empty() {
            let partitions: Vec<u16> = unhold.into_iter().collect();
            match shared.store.unhold(&member, &partitions).await {
                // The fetch that was woken above may have looked too early.
                Ok(freed) if freed > 0 => shared.membership.changed.notify_one(),
                Ok(_) => {}
                // This need not fail the settle: the next heartbeat does the same.
                Err(error) => tracing::debug!(%error, "could not free held events yet"),
            }
        }
        let applied = results.iter().filter(|applied| **applied).count();
        Ok(Settled { applied, fenced: settlements.len() - applied })
    }

    async fn backlog(&self) -> Result<Backlog> {
        let member = self.shared.state().group.member.clone();
        self.shared.store.backlog(&member).await
    }

    async fn close(&self) -> Result<()> {
        self.heartbeat.stop().await;
        let (member, rows) = {
            let state = self.shared.state();
            let rows = state.in_flight.values().filter(|row| row.generation == state.group.generation);
            let rows: Vec<RowClaim> = rows.map(|row| row.claim.clone()).collect();
            (state.group.member.clone(), rows)
        };
        let mut given_back = Ok(());
        if !rows.is_empty() {
            let rows: Vec<_> = rows.into_iter().map(|claim| (claim, &Verdict::Released)).collect();
            given_back = self.shared.store.settle(&member, &rows).await.map(|_| ());
        }
        // The relay leaves in any case: then other relays immediately take over what could not be given back.
        self.shared.store.members().leave(&member).await.and(given_back)
    }
}

impl<S: QueueStore> Shared<S> {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn claim(&self, asked: &Asked, limits: Limits) -> Result<Batch> {
        let token = Uuid::new_v4();
        let since = Instant::now();
        // At least half of the bytes remain for payloads.
        let events = limits.events.min(limits.bytes / (2 * EVENT_OVERHEAD)).max(1);
        let request = ClaimRequest {
            member: &asked.member,
            token,
            events,
            bytes: limits.bytes.saturating_sub(events * EVENT_OVERHEAD).max(1),
            max_payload: self.options.max_payload,
            partitions: &asked.partitions,
            tokens: &asked.tokens,
            alone: asked.alone,
        };
        let claimed = match self.store.claim(&request).await {
            Err(error) if error.is(&Code::EVICTED) => {
                driver::rejoin(self, asked.generation).await?;
                return Ok(Batch::empty());
            }
            other => other?,
        };
        if !claimed.overflow.is_empty() {
            let rows: Vec<_> = claimed
                .overflow
                .iter()
                .map(|key| (RowClaim { key: key.clone(), token }, &Verdict::Released))
                .collect();
            self.store.settle(&asked.member, &rows).await?;
        }
        Ok(self.state().admit(claimed, asked, token, since, self.options.lease))
    }
}

#[async_trait]
impl<S: QueueStore> Membered for Shared<S> {
    fn members(&self) -> &dyn Members {
        self.store.members()
    }

    fn membership(&self) -> &Membership {
        &self.membership
    }

    fn group<T>(&self, act: impl FnOnce(&mut Group) -> T) -> T {
        act(&mut self.state().group)
    }

    fn new_member(&self) -> Member {
        member(&self.options, self.store.reads())
    }

    /// The leases of rows are renewed with the relay's own.
    async fn heartbeat(&self, member: &Member) -> Result<(Pulse, Instant)> {
        // A settle that hangs must not cost us all leases. With order the partitions' leases are what counts, and those of
        // rows are left for the next heartbeat: renewing them beside a settle could end in a deadlock.
        let alone = tokio::time::timeout(self.options.lease / 6, self.rows.lock()).await;
        let rows = if alone.is_ok() || member.partitions == 0 {
            self.state().due_for_renewal(self.options.lease / 3)
        } else {
            Vec::new()
        };
        let sent = Instant::now();
        let pulse = self.store.members().heartbeat(member, &rows).await?;
        drop(alone);
        self.state().renewed(&pulse, rows, sent, self.options.lease);
        Ok((pulse, sent))
    }

    /// Other relays take over its rows, as those of any evicted relay.
    fn evicted(&self) {
        self.state().alone = false;
    }

    fn start_giving(&self, give: &[u16]) -> Vec<u16> {
        self.state().start_giving(give)
    }

    async fn after_moving(&self, member: &Member) -> Result<()> {
        let owned: Vec<u16> = self.state().group.owned.iter().copied().collect();
        if member.by_key() && !owned.is_empty() && self.store.unhold(member, &owned).await? > 0 {
            self.membership.changed.notify_one();
        }
        Ok(())
    }
}

/// What a claim asks for, and under which membership.
struct Asked {
    member: Member,
    generation: u64,
    partitions: Vec<u16>,
    tokens: Vec<Uuid>,
    alone: bool,
}

impl QueueState {
    /// What may be claimed now; nothing while a suspect is out or waits to be alone, or without a partition or
    /// a valid lease on it.
    fn ask(&mut self) -> Option<Asked> {
        // With order nothing can be delivered under a lease that has run out: claiming it would be giving it
        // back, over and over, until the renewal gets through.
        if self.group.member.partitions > 0 && self.group.ownership.is_lost() {
            return None;
        }
        let busy = self.in_flight.values().any(|row| row.generation == self.group.generation);
        if self.alone || (self.suspects && busy) {
            return None;
        }
        let partitions: Vec<u16> = self.group.owned.difference(&self.group.giving).copied().collect();
        if self.group.member.partitions > 0 && partitions.is_empty() {
            return None;
        }
        self.claiming.clone_from(&partitions);
        let mut tokens: Vec<Uuid> = self
            .in_flight
            .values()
            .filter(|row| row.generation == self.group.generation)
            .map(|row| row.claim.token)
            .collect();
        tokens.sort_unstable();
        tokens.dedup();
        Some(Asked {
            member: self.group.member.clone(),
            generation: self.group.generation,
            partitions,
            tokens,
            alone: self.suspects,
        })
    }

    /// Turns claimed rows into a batch and keeps track of them.
    fn admit(
        &mut self,
        claimed: Claimed,
        asked: &Asked,
        token: Uuid,
        since: Instant,
        lease: Duration,
    ) -> Batch {
        let current = asked.generation == self.group.generation;
        // What counts is the lease on the partitions, which is the relay's own. Without partitions each claim has its own.
        let ownership = match self.group.member.partitions {
            0 => Ownership::leased(since, lease),
            _ if current => self.group.ownership.clone(),
            _ => Ownership::leased(since, Duration::ZERO),
        };
        if asked.alone {
            self.alone = current && !claimed.rows.is_empty();
            self.suspects = !claimed.rows.is_empty();
        } else {
            self.suspects |= claimed.suspects;
        }
        let mut batch = Batch { deliveries: Vec::new(), rejects: Vec::new(), ownership: ownership.clone() };
        for row in claimed.rows {
            let position = Position(self.next_position);
            self.next_position += 1;
            let in_flight = InFlight {
                claim: RowClaim { key: row.key, token },
                partition: row.partition,
                waited: row.waited,
                generation: asked.generation,
                claimed_at: since,
                ownership: ownership.clone(),
            };
            self.in_flight.insert(position, in_flight);
            match row.event {
                Ok(event) => batch.deliveries.push(Delivery {
                    event,
                    position,
                    attempt: row.attempt,
                    max_attempts: row.max_attempts,
                    lost_leases: row.lost_leases,
                    replay: None,
                }),
                Err(bad) => {
                    batch.rejects.push(Reject { position, id: bad.id, key: bad.key, error: bad.error });
                }
            }
        }
        batch
    }

    fn forget(&mut self, settlements: &[Settlement]) {
        for settlement in settlements {
            self.in_flight.remove(&settlement.position);
        }
        if self.alone && !self.in_flight.values().any(|row| row.generation == self.group.generation) {
            self.alone = false;
        }
    }

    /// Rows whose leases are to be renewed: those claimed so long ago or more.
    fn due_for_renewal(&self, age: Duration) -> Vec<RowClaim> {
        let due = self
            .in_flight
            .values()
            .filter(|row| row.generation == self.group.generation && row.claimed_at.elapsed() >= age);
        due.map(|row| row.claim.clone()).collect()
    }

    /// Takes in what a heartbeat for `rows` brought. Rows too young to have been in it keep the end that their
    /// claim gave them, in the database and here.
    fn renewed(&mut self, pulse: &Pulse, rows: Vec<RowClaim>, sent: Instant, lease: Duration) {
        // With order a single row is lost only to an operator, or to a settle that overtook this heartbeat. The
        // ownership that it shares with everything else is the relay's, and goes on.
        if !pulse.alive || self.group.member.partitions > 0 {
            return;
        }
        let rows: HashSet<RowClaim> = rows.into_iter().collect();
        for row in self.in_flight.values().filter(|row| rows.contains(&row.claim)) {
            if pulse.lost.contains(&row.claim.key) {
                row.ownership.lose();
            } else {
                row.ownership.renew(sent, lease);
            }
        }
    }

    /// Stops claiming from `give`, and returns those of them that have nothing in flight.
    fn start_giving(&mut self, give: &[u16]) -> Vec<u16> {
        let in_flight = self.in_flight.values().map(|row| row.partition);
        let busy = in_flight.chain(self.claiming.iter().copied()).collect();
        self.group.start_giving(give, &busy)
    }
}
