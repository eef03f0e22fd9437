//! What one relay knows about its consumer: the offset of each partition, what is in flight, which keys wait.
//!
//! This module does no I/O. A settle is planned, then written by the store, and only then applied, so that an error in
//! between changes nothing.
//!
//! The offset of a partition is one less than the smallest `seq` that is not settled. If everything is settled, it is
//! the last `seq` that was read. So the offset moves only over a settled prefix, and events that are settled out of
//! order need no memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::BuildHasher,
    time::{Duration, Instant},
};

use super::{
    Changes, Fate, LogOptions, LogRow, Move, Park, ParkedRow, Replay, Revision, Standing,
    plan::{Halt, Plan, Step},
};
use crate::{
    Batch, Delivery, Error, Order, Position, Settlement,
    group::{Group, Member},
    hash::{Map, Seed, Set},
    queue::BadRow,
    source::{Reject, Settled},
};

/// The hash of a key. Two keys with the same hash wait for each other; this has no other effect.
type Key = u64;

pub(super) struct Partition {
    /// New for each time this relay took it up: what it handed out before is no longer its own.
    load: u64,
    epoch: i64,
    /// As stored.
    pub(super) offset: i64,
    read_to: i64,
    /// Handed out, or to be held back, and not settled.
    outstanding: BTreeSet<i64>,
    /// Given back; to be read again before anything new.
    released: BTreeSet<i64>,
    /// Parked events that were handed out.
    parked_out: BTreeSet<i64>,
    /// How many parked events a key has that keep later ones waiting.
    waiting: Map<Key, u32>,
    /// Parked before this relay took it up, and not read past yet: these do not come from the log.
    parked: BTreeSet<i64>,
    replay: Option<Replay>,
}

impl Partition {
    /// How far the offset may move when `done` are settled.
    fn prefix(&self, done: &Set<i64>) -> i64 {
        let outstanding = self.outstanding.iter().find(|seq| !done.contains(seq));
        let first = [outstanding, self.released.first()].into_iter().flatten().min();
        first.map_or(self.read_to, |seq| seq - 1).max(self.offset)
    }

    fn is_busy(&self) -> bool {
        !self.outstanding.is_empty() || !self.parked_out.is_empty()
    }

    fn wait(&mut self, key: Key) {
        *self.waiting.entry(key).or_default() += 1;
    }

    fn unwait(&mut self, key: Key) {
        if let Some(count) = self.waiting.get_mut(&key) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.waiting.remove(&key);
            }
        }
    }
}

pub(super) struct InFlight {
    pub(super) seq: i64,
    pub(super) partition: u16,
    pub(super) load: u64,
    pub(super) key: Key,
    pub(super) attempt: u32,
    pub(super) parked: bool,
}

/// An event that was read while its key waits: to be parked with the next settle.
struct Held {
    seq: i64,
    partition: u16,
    load: u64,
    key: Key,
}

/// What a read was asked for, under which circumstances.
pub(super) struct Asked {
    pub(super) member: Member,
    pub(super) partitions: Vec<u16>,
    pub(super) after: i64,
    loads: Map<u16, u64>,
    generation: u64,
}

pub(super) struct ConsumerTracker {
    pub(super) group: Group,
    pub(super) paused: bool,
    /// As it was when parked events were counted last; none if they are to be counted again.
    pub(super) revision: Option<Revision>,
    /// The policy is to halt, and this event was given up on. Told once nothing before it is open.
    stopped: Option<(i64, Error)>,
    /// Nothing is handed out before this: the policy is to halt, and an event failed.
    pub(super) halted_until: Option<Instant>,
    /// When to look for due parked events again.
    pub(super) look_at: Option<Instant>,
    /// How many looks in a row found nothing.
    pub(super) idle: u32,
    /// The last look ended at a hole.
    pub(super) blocked: bool,
    /// So much is parked that nothing new is read.
    pub(super) full: bool,
    partitions: BTreeMap<u16, Partition>,
    in_flight: Map<Position, InFlight>,
    committed: Set<Position>,
    held: Vec<Held>,
    /// Failed attempts of events that halt the consumer.
    attempts: Map<i64, u32>,
    next_position: u64,
    next_load: u64,
    seed: Seed,
}

impl ConsumerTracker {
    pub(super) fn new(member: Member) -> Self {
        Self {
            group: Group::new(member),
            paused: false,
            revision: None,
            stopped: None,
            halted_until: None,
            look_at: None,
            idle: 0,
            blocked: false,
            full: false,
            partitions: BTreeMap::new(),
            in_flight: Map::default(),
            committed: Set::default(),
            held: Vec::new(),
            attempts: Map::default(),
            next_position: 0,
            next_load: 0,
            seed: Seed::default(),
        }
    }

    /// Forgets partitions that this relay no longer owns. Their events that were handed out are fenced at the settle.
    pub(super) fn keep_owned(&mut self) {
        let owned = &self.group.owned;
        self.partitions.retain(|partition, _| owned.contains(partition));
        self.drop_stale_held();
    }

    pub(super) fn drop_partitions(&mut self, partitions: &[u16]) {
        self.partitions.retain(|partition, _| !partitions.contains(partition));
        self.drop_stale_held();
    }

    fn drop_stale_held(&mut self) {
        let partitions = &self.partitions;
        self.held.retain(|held| partitions.get(&held.partition).is_some_and(|own| own.load == held.load));
    }

    /// Partitions that this relay owns, but whose offsets it does not know yet.
    pub(super) fn unknown(&self) -> Vec<u16> {
        self.group.owned.iter().filter(|n| !self.partitions.contains_key(n)).copied().collect()
    }

    pub(super) fn known(&self) -> Vec<u16> {
        self.partitions.keys().copied().collect()
    }

    pub(super) fn adopt(&mut self, standings: Vec<Standing>) {
        for standing in standings {
            self.next_load += 1;
            let partition = Partition {
                load: self.next_load,
                epoch: standing.epoch,
                offset: standing.offset,
                read_to: standing.offset,
                outstanding: BTreeSet::new(),
                released: BTreeSet::new(),
                parked_out: BTreeSet::new(),
                waiting: self.count(&standing.waiting),
                parked: standing.parked.into_iter().collect(),
                replay: standing.replay,
            };
            self.partitions.insert(standing.partition, partition);
        }
        self.look_at = None;
    }

    /// Records which keys wait, after a person has changed something. It forgets partitions that were moved: a relay with
    /// nothing to settle would not learn of the move otherwise.
    pub(super) fn recount(&mut self, standings: Vec<Standing>) {
        let mut moved = Vec::new();
        for standing in standings {
            let waiting = self.count(&standing.waiting);
            let Some(partition) = self.partitions.get_mut(&standing.partition) else { continue };
            if (partition.epoch, partition.offset) == (standing.epoch, standing.offset) {
                partition.waiting = waiting;
            } else {
                moved.push(standing.partition);
            }
        }
        self.drop_partitions(&moved);
        self.look_at = None;
    }

    fn count(&self, keys: &[String]) -> Map<Key, u32> {
        let mut waiting = Map::default();
        for key in keys {
            *waiting.entry(self.seed.hash_one(key.as_str())).or_default() += 1;
        }
        waiting
    }

    /// Partitions with something in flight: they cannot be given up.
    pub(super) fn busy(&self) -> BTreeSet<u16> {
        let busy = self.partitions.iter().filter(|(_, partition)| partition.is_busy());
        busy.map(|(n, _)| *n).collect()
    }

    /// Whether something is to be parked behind an event that failed.
    pub(super) fn has_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// How many parked events keep something waiting.
    pub(super) fn waiting(&self) -> usize {
        let counts = self.partitions.values().flat_map(|partition| partition.waiting.values());
        counts.map(|count| *count as usize).sum()
    }

    /// Parked events that are out already.
    pub(super) fn parked_out(&self) -> Vec<i64> {
        self.partitions.values().flat_map(|partition| partition.parked_out.iter().copied()).collect()
    }

    /// The first events that were given back, at most so many. Behind one that failed, where the consumer halts for
    /// it, nothing else is handed out: none, while it is out.
    pub(super) fn released(&self, at_most: usize) -> Option<Vec<i64>> {
        let open = |seq: &&i64| {
            let has = |own: &Partition| own.outstanding.contains(*seq) || own.released.contains(*seq);
            self.partitions.values().any(has)
        };
        let failing = self.attempts.keys().filter(open).min().copied();
        let stopped = self.stopped.as_ref().map(|(seq, _)| seq - 1);
        let failing = [failing, stopped].into_iter().flatten().min();
        let readable = self.partitions.iter().filter(|(n, _)| !self.group.giving.contains(n));
        let mut seqs: Vec<i64> =
            readable.flat_map(|(_, partition)| partition.released.iter().take(at_most).copied()).collect();
        seqs.sort_unstable();
        seqs.truncate(at_most);
        let Some(failing) = failing else { return Some(seqs) };
        seqs.retain(|seq| *seq <= failing);
        (!seqs.is_empty()).then_some(seqs)
    }

    /// Why the consumer halts for good, once everything before that event is settled.
    pub(super) fn halted(&self) -> Option<Error> {
        let (seq, error) = self.stopped.as_ref()?;
        let before = |own: &Partition| {
            let open = own.outstanding.first().into_iter().chain(own.released.first());
            open.min().is_some_and(|first| first < seq)
        };
        (!self.partitions.values().any(before)).then(|| error.clone())
    }

    /// How far ahead of its offset the slowest partition has read.
    pub(super) fn ahead(&self) -> i64 {
        let none = Set::default();
        let ahead = self.partitions.values().map(|partition| partition.read_to - partition.prefix(&none));
        ahead.max().unwrap_or(0)
    }

    /// From where to read on; nothing without a partition or a valid lease on it.
    pub(super) fn ask(&self) -> Option<Asked> {
        if self.group.ownership.is_lost() {
            return None;
        }
        let readable = self.partitions.iter().filter(|(n, _)| !self.group.giving.contains(n));
        let loads: Map<u16, u64> = readable.map(|(n, partition)| (*n, partition.load)).collect();
        let mut partitions: Vec<u16> = loads.keys().copied().collect();
        partitions.sort_unstable();
        let after = partitions.iter().filter_map(|n| self.partitions.get(n)).map(|own| own.read_to).min()?;
        Some(Asked {
            member: self.group.member.clone(),
            generation: self.group.generation,
            partitions,
            after,
            loads,
        })
    }

    /// Hands out rows that were read on, up to `through`.
    pub(super) fn admit(&mut self, rows: Vec<LogRow>, through: i64, asked: &Asked, by_key: bool) -> Batch {
        let mut batch = self.batch(asked);
        for row in rows {
            let Some(partition) = self.asked_partition(row.partition, asked) else { continue };
            if row.seq > partition.read_to && !partition.parked.remove(&row.seq) {
                self.hand_out(&mut batch, row, by_key);
            }
        }
        for (n, load) in &asked.loads {
            if let Some(partition) = self.partitions.get_mut(n).filter(|own| own.load == *load) {
                partition.read_to = partition.read_to.max(through);
            }
        }
        batch
    }

    /// Hands out rows again that were given back.
    pub(super) fn readmit(&mut self, rows: Vec<LogRow>, asked: &Asked, by_key: bool) -> Batch {
        let mut batch = self.batch(asked);
        for row in rows {
            let Some(partition) = self.asked_partition(row.partition, asked) else { continue };
            if partition.released.remove(&row.seq) {
                self.hand_out(&mut batch, row, by_key);
            }
        }
        batch
    }

    /// Hands out parked events.
    pub(super) fn admit_parked(&mut self, rows: Vec<ParkedRow>, asked: &Asked) -> Batch {
        let mut batch = self.batch(asked);
        for ParkedRow { row, attempts } in rows {
            let Some(partition) = self.asked_partition(row.partition, asked) else { continue };
            if partition.parked_out.insert(row.seq) {
                let key = self.key(&row);
                self.send(&mut batch, row, key, attempts + 1, true);
            }
        }
        batch
    }

    fn batch(&self, asked: &Asked) -> Batch {
        let current = asked.generation == self.group.generation;
        let ownership = if current {
            self.group.ownership.clone()
        } else {
            crate::Ownership::leased(Instant::now(), Duration::ZERO)
        };
        Batch { deliveries: Vec::new(), rejects: Vec::new(), ownership }
    }

    fn asked_partition(&mut self, n: u16, asked: &Asked) -> Option<&mut Partition> {
        let load = asked.loads.get(&n)?;
        self.partitions.get_mut(&n).filter(|partition| partition.load == *load)
    }

    fn hand_out(&mut self, batch: &mut Batch, row: LogRow, by_key: bool) {
        let key = self.key(&row);
        let Some(partition) = self.partitions.get_mut(&row.partition) else { return };
        partition.outstanding.insert(row.seq);
        if by_key && partition.waiting.contains_key(&key) {
            self.held.push(Held { seq: row.seq, partition: row.partition, load: partition.load, key });
            return;
        }
        let attempt = self.attempts.get(&row.seq).map_or(1, |attempts| attempts + 1);
        self.send(batch, row, key, attempt, false);
    }

    fn send(&mut self, batch: &mut Batch, row: LogRow, key: Key, attempt: u32, parked: bool) {
        let partition = self.partitions.get(&row.partition);
        let load = partition.map_or(0, |partition| partition.load);
        let replay = partition.and_then(|partition| partition.replay?.of(row.seq));
        let position = Position(self.next_position);
        self.next_position += 1;
        let in_flight = InFlight { seq: row.seq, partition: row.partition, load, key, attempt, parked };
        self.in_flight.insert(position, in_flight);
        match row.event {
            Ok(event) => batch.deliveries.push(Delivery {
                event,
                position,
                attempt,
                max_attempts: row.max_attempts,
                lost_leases: 0,
                replay,
            }),
            Err(BadRow { id, key, error }) => batch.rejects.push(Reject { position, id, key, error }),
        }
    }

    fn key(&self, row: &LogRow) -> Key {
        let key = match &row.event {
            Ok(event) => event.aggregate_id.as_str(),
            Err(bad) => bad.key.as_deref().unwrap_or_default(),
        };
        self.seed.hash_one(key)
    }

    /// What these verdicts, and what is to be held back, change. With `all`, offsets of partitions without a
    /// verdict move on as well.
    pub(super) fn plan(&self, settlements: &[Settlement], all: bool, options: &LogOptions) -> Plan {
        let by_key = options.read.order == Order::Key;
        let mut plan = Plan {
            member: self.group.member.clone(),
            changes: Changes::default(),
            fenced: 0,
            steps: Vec::with_capacity(settlements.len()),
            held: self.held.iter().map(|held| (held.seq, held.load)).collect(),
            halts: Vec::new(),
        };
        let mut done: Map<u16, Set<i64>> = Map::default();
        let mut blocked: Set<(u16, Key)> = Set::default();
        for held in &self.held {
            done.entry(held.partition).or_default().insert(held.seq);
            let park = Park { seq: held.seq, partition: held.partition, attempts: 0, fate: Fate::Held };
            plan.changes.park.push(park);
        }
        for settlement in settlements {
            let position = settlement.position;
            if self.committed.contains(&position) {
                plan.steps.push(Step::Committed(position));
                continue;
            }
            let Some((own, row)) = self.own(position) else {
                plan.fenced += 1;
                plan.steps.push(Step::Fenced(position));
                continue;
            };
            let touched = done.entry(row.partition).or_default();
            let step = if row.parked {
                plan.parked(position, row, &settlement.verdict, options)
            } else {
                let waits = by_key
                    && (own.waiting.contains_key(&row.key) || blocked.contains(&(row.partition, row.key)));
                plan.fresh(position, row, &settlement.verdict, waits, options)
            };
            if matches!(step, Step::Done(_) | Step::Parked(..)) && !row.parked {
                touched.insert(row.seq);
            }
            if matches!(step, Step::Parked(_, true)) {
                blocked.insert((row.partition, row.key));
            }
            plan.steps.push(step);
        }
        let none = Set::default();
        for (n, partition) in &self.partitions {
            if !all && !done.contains_key(n) {
                continue;
            }
            let to = self.prefix_after(partition, done.get(n).unwrap_or(&none), &plan);
            let changed = plan.changes.touches(*n);
            if to > partition.offset || changed {
                let (epoch, from) = (partition.epoch, partition.offset);
                plan.changes.moves.push(Move { partition: *n, epoch, from, to });
            }
        }
        plan
    }

    /// The offset after the plan. What the plan gives back still stands in the way.
    fn prefix_after(&self, partition: &Partition, done: &Set<i64>, plan: &Plan) -> i64 {
        let back = plan.steps.iter().filter_map(|step| match step {
            Step::Back(position) => {
                self.in_flight.get(position).filter(|row| row.load == partition.load).map(|row| row.seq)
            }
            _ => None,
        });
        let prefix = partition.prefix(done);
        back.min().map_or(prefix, |seq| prefix.min(seq - 1)).max(partition.offset)
    }

    fn own(&self, position: Position) -> Option<(&Partition, &InFlight)> {
        let row = self.in_flight.get(&position)?;
        let partition = self.partitions.get(&row.partition).filter(|own| own.load == row.load)?;
        Some((partition, row))
    }

    /// Does what was planned, once the store has; except in partitions where it was refused, which are no longer
    /// known.
    pub(super) fn apply(&mut self, plan: Plan, refused: &[u16], in_transaction: bool) -> Settled {
        let mut settled = Settled { applied: 0, fenced: plan.fenced };
        self.drop_partitions(refused);
        let held = self.held.extract_if(.., |held| plan.held.contains(&(held.seq, held.load)));
        for held in held {
            if let Some(partition) = self.partitions.get_mut(&held.partition) {
                partition.outstanding.remove(&held.seq);
                partition.wait(held.key);
            }
        }
        for change in &plan.changes.moves {
            if let Some(partition) = self.partitions.get_mut(&change.partition) {
                partition.offset = change.to;
            }
        }
        if !plan.changes.park.is_empty() {
            self.look_at = None;
        }
        for step in plan.steps {
            let position = step.position();
            if let Step::Committed(_) = step {
                self.committed.remove(&position);
                settled.applied += 1;
                continue;
            }
            let Some(row) = self.in_flight.remove(&position) else { continue };
            let partition = self.partitions.get_mut(&row.partition).filter(|own| own.load == row.load);
            let Some(partition) = partition else {
                settled.fenced += usize::from(!matches!(step, Step::Fenced(_)));
                continue;
            };
            if row.parked {
                partition.parked_out.remove(&row.seq);
                self.look_at = None;
            } else {
                partition.outstanding.remove(&row.seq);
                // What is given back keeps the attempts that it has spent.
                if !matches!(step, Step::Back(_)) {
                    self.attempts.remove(&row.seq);
                }
            }
            match step {
                Step::Parked(_, true) if !row.parked => partition.wait(row.key),
                Step::Freed(_) => partition.unwait(row.key),
                Step::Back(_) => {
                    partition.released.insert(row.seq);
                }
                _ => {}
            }
            settled.applied += 1;
            if in_transaction {
                self.committed.insert(position);
            }
        }
        for (seq, halt) in plan.halts {
            match halt {
                Halt::Retry(attempts, after) => {
                    self.attempts.insert(seq, attempts);
                    self.halted_until = self.halted_until.max(Some(Instant::now() + after));
                }
                // The first of them: the advice is to seek behind it, and none before it may be lost.
                Halt::Stop(error) if self.stopped.as_ref().is_none_or(|(first, _)| seq < *first) => {
                    self.stopped = Some((seq, error));
                }
                Halt::Stop(_) => {}
            }
            // What the relay still has is not to be sent any more.
            self.group.recall();
        }
        settled
    }
}
