//! Groups of relays that share work: the members, and which of them owns which partition of the keys.
//!
//! The relays of a group read the same events in the same way: the streams of a queue with one order, or a log as one
//! consumer. Each relay has a lease, which a heartbeat renews. Relays take and give up partitions until each has its
//! fair share. [`Members`] is what a database must do for this, `Group` is what one relay knows, `driver` renews leases
//! and moves partitions for queue and log, and `balance` computes the shares.

mod balance;
pub(crate) mod driver;
mod name;
mod partition;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use uuid::Uuid;

use crate::{
    Code, Error, Order, Ownership, Result,
    queue::{RowClaim, RowKey},
};

use self::balance::plan;
pub use self::{
    name::{GroupKind, GroupName},
    partition::{hash_of, partition_of},
};

/// The operations of a group in a database. Each is one short transaction, and safe to repeat.
#[async_trait]
pub trait Members: Send + Sync + 'static {
    /// Records a relay with its lease, and creates the group's partitions. Refuses a relay that would share streams with a
    /// live relay of another group: two groups on one stream would break the order of both. Consumers of a log
    /// ([`Member::is_consumer`]) may share streams with any group.
    async fn join(&self, member: &Member) -> Result<()>;

    /// Renews the lease of the relay and of the given rows, and returns the other members.
    ///
    /// A relay that was evicted stays evicted: [`Pulse::alive`] is false, and nothing was renewed.
    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse>;

    /// Evicts relays whose lease has run out, then takes those of `wanted` that no live relay owns. Returns
    /// the partitions that were taken. Atomic, with one caller at a time in a group.
    ///
    /// The eviction must wait for a running claim of the evicted relay, and thereby fence it.
    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>>;

    /// Gives partitions up. Called only when none of their rows is in flight.
    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()>;

    /// Removes the relay from the group, and frees all its partitions.
    async fn leave(&self, member: &Member) -> Result<()>;
}

/// A relay as its peers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// New for every start, so that a relay is never confused with an earlier run.
    pub id: Uuid,
    /// The host that it runs on, for people.
    pub host: String,
    /// Which relays share partitions: those of a queue with the same order, streams and rule for dead events; those of
    /// one consumer; those of one slot.
    pub group: GroupName,
    /// The streams it reads; empty for all.
    pub streams: Vec<String>,
    /// The order it keeps.
    pub order: Order,
    /// Whether a key stays blocked behind a dead event.
    pub block_on_dead: bool,
    /// How long a lease lasts.
    pub lease: Duration,
    /// How many partitions the group has; zero where rows are claimed without order.
    pub partitions: u16,
}

impl Member {
    /// Whether events of a key wait for one another.
    pub fn by_key(&self) -> bool {
        self.order == Order::Key
    }

    /// Whether this relay reads the rows of its partitions instead of claiming them.
    pub fn reads(&self) -> bool {
        self.group.kind() == GroupKind::Queue && self.group.name().contains("/reads:")
    }

    /// The consumer that this relay works for; empty for a queue's relay.
    pub fn consumer(&self) -> &str {
        match self.group.kind() {
            GroupKind::Queue => "",
            GroupKind::Log | GroupKind::Cdc => self.group.name(),
        }
    }

    /// Whether this relay is a log's consumer, which may share its streams with any group.
    pub fn is_consumer(&self) -> bool {
        self.group.kind() == GroupKind::Log
    }
}

/// What a heartbeat returns.
#[derive(Debug, Clone, Default)]
pub struct Pulse {
    /// Whether this relay is still a member.
    pub alive: bool,
    /// Live relays of the group, including this one.
    pub members: Vec<Uuid>,
    /// The owner of each partition; partitions without an owner are missing.
    pub owners: BTreeMap<u16, Uuid>,
    /// Rows that this relay no longer owned, and that were not renewed.
    pub lost: Vec<RowKey>,
    /// The leases of the other live relays of the group.
    pub peers: Vec<Peer>,
}

/// Another relay's lease, as stored in the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The relay's id.
    pub id: Uuid,
    /// Where it runs, for people.
    pub host: String,
    /// Changes with every renewal.
    pub renewal: String,
    /// How long the lease is still valid.
    pub left: Duration,
}

/// What is known about a peer that does not renew its lease.
#[derive(Debug)]
struct Silence {
    renewal: String,
    beats: u32,
}

/// After this many heartbeats of this relay without a renewal by a peer, the relay logs that the peer is gone.
const SILENT_BEATS: u32 = 2;

/// What one relay knows about its group.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) member: Member,
    /// Grows with every membership: this relay no longer owns what it held under an earlier one.
    pub(crate) generation: u64,
    /// Of the current membership.
    pub(crate) ownership: Ownership,
    pub(crate) owned: BTreeSet<u16>,
    /// Owned, beyond our share, and given up once nothing of theirs is in flight.
    pub(crate) giving: BTreeSet<u16>,
    /// Since when the others have not renewed.
    silent: HashMap<Uuid, Silence>,
}

impl Group {
    pub(crate) fn new(member: Member) -> Self {
        Self {
            member,
            generation: 0,
            ownership: Ownership::leased(Instant::now(), Duration::ZERO),
            owned: BTreeSet::new(),
            giving: BTreeSet::new(),
            silent: HashMap::new(),
        }
    }

    /// The statement that made us a member was sent at `since`.
    pub(crate) fn joined(&mut self, since: Instant) {
        self.ownership = Ownership::leased(since, self.member.lease);
    }

    /// Joins again under a new id after an eviction.
    pub(crate) fn reborn(&mut self, member: Member) {
        tracing::warn!(relay = %self.member.id, "this relay was evicted after its lease ran out; it joins again");
        self.ownership.lose();
        // Lost ownership stays lost. If the answer to the join is lost, the next heartbeat renews this membership.
        self.ownership = Ownership::leased(Instant::now(), Duration::ZERO);
        self.generation += 1;
        self.member = member;
        self.owned.clear();
        self.giving.clear();
    }

    /// Ends the ownership of what was handed out, but not the lease.
    pub(crate) fn recall(&mut self) {
        let next = self.ownership.succeed();
        self.ownership.lose();
        self.ownership = next;
    }

    /// Records the result of a heartbeat that was sent at `since`. Returns whether a lease that had run out is
    /// valid again.
    pub(crate) fn renewed(&mut self, pulse: &Pulse, since: Instant) -> bool {
        let had_lost = self.ownership.is_lost();
        self.ownership.renew(since, self.member.lease);
        self.owned = pulse
            .owners
            .iter()
            .filter(|(_, owner)| **owner == self.member.id)
            .map(|(partition, _)| *partition)
            .collect();
        for (peer, partitions) in self.gone(pulse) {
            tracing::warn!(
                host = peer.host,
                "another relay has not renewed its lease, and has ended or is stalled: {} are taken over when the lease has \
                 run out, in {:.0?}",
                if partitions == 0 {
                    "the events that it is delivering".into()
                } else {
                    format!("its {partitions} partitions")
                },
                peer.left
            );
        }
        had_lost
    }

    /// Peers that do not renew their lease, each reported once, with how many partitions wait for the lease to expire.
    fn gone<'a>(&mut self, pulse: &'a Pulse) -> Vec<(&'a Peer, usize)> {
        self.silent.retain(|id, _| pulse.peers.iter().any(|peer| peer.id == *id));
        let mut gone = Vec::new();
        for peer in &pulse.peers {
            let Some(silence) =
                self.silent.get_mut(&peer.id).filter(|silence| silence.renewal == peer.renewal)
            else {
                self.silent.insert(peer.id, Silence { renewal: peer.renewal.clone(), beats: 0 });
                continue;
            };
            silence.beats = silence.beats.saturating_add(1);
            let partitions = pulse.owners.values().filter(|owner| **owner == peer.id).count();
            if silence.beats == SILENT_BEATS + 1 && (partitions > 0 || self.member.partitions == 0) {
                gone.push((peer, partitions));
            }
        }
        gone
    }

    /// Stops reading from `give`, and returns those of them that are not `busy`.
    pub(crate) fn start_giving(&mut self, give: &[u16], busy: &BTreeSet<u16>) -> Vec<u16> {
        self.giving = give.iter().copied().collect();
        self.giving.difference(busy).copied().collect()
    }

    pub(crate) fn gave(&mut self, given: &[u16]) {
        for partition in given {
            self.owned.remove(partition);
            self.giving.remove(partition);
        }
    }
}

/// Where this process runs, for people.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .unwrap_or_else(|| "unknown-host".into());
    format!("{}:{}", name.trim(), std::process::id())
}

/// The error for a relay that was evicted.
pub fn evicted() -> Error {
    Error::retryable(Code::EVICTED, "this relay's lease ran out and another relay evicted it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_does_not_renew_is_told_of_once_and_one_that_does_is_not() {
        let id = Uuid::new_v4;
        let (me, dead, alive) = (id(), id(), id());
        let member = Member {
            id: me,
            host: "here".into(),
            group: GroupName::new(GroupKind::Queue, "g"),
            streams: Vec::new(),
            order: Order::Key,
            block_on_dead: false,
            lease: Duration::from_secs(30),
            partitions: 4,
        };
        let mut group = Group::new(member);
        let mut told = 0;
        for beat in 0..10_u64 {
            let peer = |id, renewal: String| Peer {
                id,
                host: "there".into(),
                renewal,
                left: Duration::from_secs(30 - 2 * beat),
            };
            let pulse = Pulse {
                alive: true,
                members: vec![me, dead, alive],
                owners: [(0, dead), (1, dead), (2, alive)].into(),
                lost: Vec::new(),
                peers: vec![peer(dead, "once".into()), peer(alive, beat.to_string())],
            };
            for (peer, partitions) in group.gone(&pulse) {
                assert_eq!((peer.id, partitions), (dead, 2));
                assert_eq!(beat, 3, "after a few heartbeats");
                told += 1;
            }
        }
        assert_eq!(told, 1);
    }
}
