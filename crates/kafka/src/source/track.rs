//! What this member knows about its partitions: what is read, handed out, waiting and settled. It does no I/O.
//!
//! A partition's offset is its first unsettled event, or, with none, the place behind the last one that was read. So
//! it moves over a settled prefix only, and events that are settled out of order cost no memory.
//!
//! An unsettled event is in exactly one of four places: `ready` to be handed out, `out`, `waiting` for its next
//! attempt, or `behind` an event of its key that is to be tried again. Each time a partition is taken up it has a new
//! `load`: events that were handed out under an earlier `load` no longer belong to this member, even if the partition has come back.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use airtight_core::{
    Batch, Code, Delivery, Error, Event, Limits, Order, Ownership, Position, Settlement, Verdict,
    source::{Reject, Settled},
};

use super::{
    KafkaSourceConfig, Retry,
    message::{Origin, Raw, TopicPartition},
    partition::{Buffer, NEVER, Open, Partition},
};

#[derive(Clone, Copy)]
struct Lost {
    committed: i64,
    offset: i64,
}

struct Out {
    topic_partition: TopicPartition,
    load: u64,
    offset: i64,
}

/// A message that is to be written to another topic before its event counts as settled.
pub(super) struct Letter {
    pub(super) position: Position,
    pub(super) raw: Arc<Raw>,
    pub(super) origin: Origin,
    /// Attempts that failed, this one included.
    pub(super) attempts: u32,
    pub(super) verdict: Verdict,
}

pub(super) struct GroupTracker {
    config: Arc<KafkaSourceConfig>,
    topics: Vec<Arc<str>>,
    partitions: BTreeMap<TopicPartition, Partition>,
    /// How far this process had settled partitions that it lost, and from which committed offset.
    lost: HashMap<TopicPartition, Lost>,
    in_flight: HashMap<Position, Out>,
    fresh: Buffer,
    retries: Buffer,
    /// Where the last batch came from; the next one comes from another partition, if there is one.
    last: Option<TopicPartition>,
    next_position: u64,
    next_load: u64,
    hasher: RandomState,
    /// The source cannot go on.
    pub(super) failed: Option<Error>,
    /// Something is wrong that may pass; told once.
    pub(super) trouble: Option<Error>,
}

impl GroupTracker {
    pub(super) fn new(config: Arc<KafkaSourceConfig>) -> Self {
        Self {
            config,
            topics: Vec::new(),
            partitions: BTreeMap::new(),
            lost: HashMap::new(),
            in_flight: HashMap::new(),
            fresh: Buffer::default(),
            retries: Buffer::default(),
            last: None,
            next_position: 0,
            next_load: 0,
            hasher: RandomState::new(),
            failed: None,
            trouble: None,
        }
    }

    /// Where to continue in a partition that is committed at this offset: at the offset; or, if this process had the partition
    /// before and settled more of it than it could commit, after what it settled. Those events are done, whichever member
    /// had the partition since. An offset that has gone back in the meantime was set on purpose, to read the events again.
    pub(super) fn resume_at(&self, topic_partition: &TopicPartition, committed: i64) -> i64 {
        let lost = self.lost.get(topic_partition).filter(|lost| committed >= lost.committed);
        lost.map_or(committed, |lost| lost.offset.max(committed))
    }

    /// Takes up a partition at this offset. `committed` is what the broker has, or none for a group that is new there.
    pub(super) fn assign(
        &mut self,
        topic_partition: &TopicPartition,
        offset: i64,
        committed: Option<i64>,
        ownership: Ownership,
    ) {
        self.drop_partition(topic_partition);
        self.lost.remove(topic_partition);
        self.next_load += 1;
        let is_retry = self.config.retry_topic() == Some(&topic_partition.topic);
        let partition = Partition::new(self.next_load, is_retry, offset, committed, ownership);
        self.partitions.insert(topic_partition.clone(), partition);
    }

    /// Partitions that go to another member. What the relay has not sent yet comes back unsent; what is being handled
    /// may still be settled.
    pub(super) fn leave(&mut self, topic_partitions: &[TopicPartition]) {
        for topic_partition in topic_partitions {
            if let Some(partition) = self.partitions.get_mut(topic_partition) {
                partition.is_leaving = true;
                partition.ownership.lose();
            }
        }
    }

    /// Whether something of these is handed out.
    pub(super) fn is_out(&self, topic_partitions: &[TopicPartition]) -> bool {
        topic_partitions
            .iter()
            .filter_map(|topic_partition| self.partitions.get(topic_partition))
            .any(|partition| !partition.out.is_empty())
    }

    /// Forgets a partition: whatever is settled of it from now on is fenced.
    pub(super) fn drop_partition(&mut self, topic_partition: &TopicPartition) {
        let Some(partition) = self.partitions.remove(topic_partition) else { return };
        partition.ownership.lose();
        if partition.offset() > partition.committed && partition.committed != NEVER {
            let lost = Lost { committed: partition.committed, offset: partition.offset() };
            self.lost.insert(topic_partition.clone(), lost);
        }
        let buffer = if partition.is_retry { &mut self.retries } else { &mut self.fresh };
        for open in partition.open.values() {
            buffer.remove(open.size);
        }
        self.in_flight.retain(|_, out| out.topic_partition != *topic_partition);
    }

    pub(super) fn topic_partitions(&self) -> Vec<TopicPartition> {
        self.partitions.keys().cloned().collect()
    }

    /// A topic and partition, without an allocation for each message.
    pub(super) fn topic_partition(&mut self, topic: &str, partition: i32) -> TopicPartition {
        let known = self.topics.iter().find(|known| &***known == topic);
        let topic = known.cloned().unwrap_or_else(|| {
            self.topics.push(topic.into());
            topic.into()
        });
        TopicPartition { topic, partition }
    }

    /// The process is alive: what it owns is its own for another `lease`.
    pub(super) fn renew(&self, now: Instant, lease: Duration) {
        for partition in self.partitions.values() {
            partition.ownership.renew(now, lease);
        }
    }

    /// Takes in a message. Returns whether there is room for more.
    pub(super) fn admit(&mut self, raw: Raw, now: Instant) -> bool {
        let Some(partition) = self.partitions.get_mut(&raw.topic_partition) else { return true };
        let offset = raw.offset;
        if partition.is_leaving || offset < partition.next_offset {
            return true;
        }
        partition.next_offset = offset + 1;
        let origin = raw.origin(partition.is_retry);
        // Another group's, in a retry topic that is shared by mistake: its own members read it, too.
        if origin.group.as_ref().is_some_and(|group| *group != self.config.group) {
            return true;
        }
        match origin.due.and_then(time_until) {
            Some(wait) => drop(partition.waiting.insert((now + wait, offset))),
            None => drop(partition.ready.insert(offset)),
        }
        let (size, attempts) = (raw.size(), origin.attempts);
        let buffer = if partition.is_retry { &mut self.retries } else { &mut self.fresh };
        buffer.add(size);
        let open = Open { raw: Arc::new(raw), origin, size, attempts, key: None, is_sent: false };
        partition.open.insert(offset, open);
        !self.judge_room()
    }

    /// Whether any buffer is full. Retries that are not due yet have a share of their own, so that they never keep
    /// new events out.
    fn judge_room(&mut self) -> bool {
        let (events, bytes) = (self.config.buffer_events, self.config.buffer_bytes);
        let fresh = self.fresh.judge(events, bytes);
        let retries = self.retries.judge(events / 4, bytes / 4);
        fresh || retries
    }

    /// Which partitions are to be paused, and which resumed.
    pub(super) fn pauses(&mut self) -> (Vec<TopicPartition>, Vec<TopicPartition>) {
        self.judge_room();
        let max_ahead = i64::try_from(self.config.max_ahead).unwrap_or(i64::MAX);
        let (mut pause, mut resume) = (Vec::new(), Vec::new());
        for (topic_partition, partition) in &mut self.partitions {
            let buffer = if partition.is_retry { self.retries } else { self.fresh };
            let ahead = partition.next_offset - partition.offset();
            let limit = if partition.is_too_far { (max_ahead / 2).max(1) } else { max_ahead };
            partition.is_too_far = ahead >= limit;
            let wanted = buffer.is_full || partition.is_too_far;
            if wanted != partition.is_paused {
                partition.is_paused = wanted;
                if wanted { &mut pause } else { &mut resume }.push(topic_partition.clone());
            }
        }
        (pause, resume)
    }

    /// What can be handled now, from one partition: a batch is lost as a whole, and so is a partition.
    pub(super) fn next(&mut self, limits: Limits, now: Instant) -> Batch {
        let after = self.last.clone();
        let later = self.partitions.keys().filter(|topic_partition| Some(*topic_partition) > after.as_ref());
        let earlier =
            self.partitions.keys().filter(|topic_partition| Some(*topic_partition) <= after.as_ref());
        let order: Vec<TopicPartition> = later.chain(earlier).cloned().collect();
        for topic_partition in order {
            let batch = self.next_of(&topic_partition, limits, now);
            if !batch.is_empty() {
                self.last = Some(topic_partition);
                return batch;
            }
        }
        Batch::empty()
    }

    fn next_of(&mut self, topic_partition: &TopicPartition, limits: Limits, now: Instant) -> Batch {
        let Some(partition) = self.partitions.get_mut(topic_partition) else { return Batch::empty() };
        if partition.is_leaving || partition.ownership.is_lost() {
            return Batch::empty();
        }
        partition.wake(now);
        let by_key = self.config.order == Order::Key;
        let mut batch =
            Batch { deliveries: Vec::new(), rejects: Vec::new(), ownership: partition.ownership.clone() };
        let (mut events, mut bytes) = (0, 0);
        while events < limits.events.max(1) {
            let Some(offset) = partition.ready.first().copied() else { break };
            let Some(open) = partition.open.get_mut(&offset) else {
                partition.ready.remove(&offset);
                continue;
            };
            if events > 0 && bytes + open.size > limits.bytes {
                break;
            }
            let event = open.raw.event(self.config.format, &open.origin);
            let raw_key = || String::from_utf8_lossy(open.raw.key.as_deref().unwrap_or_default());
            let key = match &event {
                Ok(event) => self.hasher.hash_one(event.aggregate_id.as_str()),
                Err(_) => self.hasher.hash_one(&*raw_key()),
            };
            open.key = Some(key);
            partition.ready.remove(&offset);
            if by_key && partition.is_blocked(key, offset) {
                partition.behind.entry(key).or_default().insert(offset);
                continue;
            }
            let Some(open) = partition.open.get(&offset) else { continue };
            partition.out.insert(offset);
            let position = Position(self.next_position);
            self.next_position += 1;
            self.in_flight.insert(
                position,
                Out { topic_partition: topic_partition.clone(), load: partition.load, offset },
            );
            (events, bytes) = (events + 1, bytes + open.size);
            hand_out(&mut batch, position, open, event);
        }
        batch
    }

    /// When something that waits is due next.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let first = self.partitions.values().filter_map(|partition| partition.waiting.first());
        first.map(|(due, _)| *due).min()
    }

    /// What has to be written to other topics before these verdicts can be settled.
    pub(super) fn letters(&self, settlements: &[Settlement]) -> Vec<Letter> {
        let retries_elsewhere = matches!(self.config.retry, Retry::Topic(_));
        let to_write = settlements.iter().filter(|settlement| match settlement.verdict {
            Verdict::Dead { .. } | Verdict::Unknown { .. } => self.config.dead_letter_topic.is_some(),
            Verdict::Retry { .. } => retries_elsewhere,
            Verdict::Delivered | Verdict::SettledInTransaction | Verdict::Released | Verdict::Away { .. } => {
                false
            }
        });
        let letter = |settlement: &Settlement| {
            let (_, open) = self.own(settlement.position)?;
            (!open.is_sent).then(|| Letter {
                position: settlement.position,
                raw: open.raw.clone(),
                origin: open.origin.clone(),
                attempts: open.attempts + 1,
                verdict: settlement.verdict.clone(),
            })
        };
        to_write.filter_map(letter).collect()
    }

    /// These were written, so that a settle that is repeated does not write them again.
    pub(super) fn sent(&mut self, positions: &[Position]) {
        for position in positions {
            let Some(out) = self.in_flight.get(position) else { continue };
            let partition = self.partitions.get_mut(&out.topic_partition).filter(|own| own.load == out.load);
            if let Some(open) = partition.and_then(|partition| partition.open.get_mut(&out.offset)) {
                open.is_sent = true;
            }
        }
    }

    fn own(&self, position: Position) -> Option<(&Partition, &Open)> {
        let out = self.in_flight.get(&position)?;
        let partition = self.partitions.get(&out.topic_partition).filter(|own| own.load == out.load)?;
        Some((partition, partition.open.get(&out.offset)?))
    }

    /// Takes the verdicts. What had to be written elsewhere has been.
    pub(super) fn settle(&mut self, settlements: &[Settlement], now: Instant) -> Settled {
        let mut settled = Settled::default();
        for settlement in settlements {
            if self.settle_one(settlement, now) {
                settled.applied += 1;
            } else {
                settled.fenced += 1;
            }
        }
        settled
    }

    fn settle_one(&mut self, Settlement { position, verdict }: &Settlement, now: Instant) -> bool {
        let Some(Out { topic_partition, load, offset }) = self.in_flight.remove(position) else {
            return false;
        };
        let Some(partition) = self.partitions.get_mut(&topic_partition).filter(|own| own.load == load) else {
            return false;
        };
        let Some(open) = partition.open.get_mut(&offset) else { return false };
        partition.out.remove(&offset);
        let is_over = match verdict {
            Verdict::Delivered | Verdict::SettledInTransaction => true,
            Verdict::Released => {
                partition.ready.insert(offset);
                false
            }
            Verdict::Retry { after, .. } | Verdict::Away { after, .. } if !open.is_sent => {
                open.attempts += u32::from(matches!(verdict, Verdict::Retry { .. }));
                partition.waiting.insert((now + *after, offset));
                if let Some(key) = open.key.filter(|_| self.config.order == Order::Key) {
                    partition.blockers.entry(key).or_default().insert(offset);
                }
                false
            }
            Verdict::Dead { error } | Verdict::Unknown { error } if !open.is_sent => {
                // It stays unsettled, and so does the offset: to go on would be to skip it.
                let halt = halted(&open.origin, error);
                self.failed.get_or_insert(halt);
                false
            }
            Verdict::Retry { .. } | Verdict::Away { .. } | Verdict::Dead { .. } | Verdict::Unknown { .. } => {
                true
            }
        };
        if is_over && let Some(open) = partition.open.remove(&offset) {
            let buffer = if partition.is_retry { &mut self.retries } else { &mut self.fresh };
            buffer.remove(open.size);
            if let Some(key) = open.key {
                partition.unblock(key, offset);
            }
        }
        true
    }

    /// Offsets that have moved since they were committed; of all partitions, or of these.
    pub(super) fn to_commit(&self, only: Option<&[TopicPartition]>) -> Vec<(TopicPartition, i64)> {
        let wanted = self.partitions.iter().filter(|(topic_partition, partition)| {
            only.is_none_or(|only| only.contains(topic_partition)) && partition.offset() > partition.committed
        });
        wanted.map(|(topic_partition, partition)| (topic_partition.clone(), partition.offset())).collect()
    }

    /// The offsets of all partitions.
    pub(super) fn offsets(&self) -> Vec<(TopicPartition, i64)> {
        self.partitions
            .iter()
            .map(|(topic_partition, partition)| (topic_partition.clone(), partition.offset()))
            .collect()
    }

    /// These are committed.
    pub(super) fn committed(&mut self, offsets: &[(TopicPartition, i64)]) {
        for (topic_partition, offset) in offsets {
            if let Some(partition) = self.partitions.get_mut(topic_partition) {
                partition.committed = partition.committed.max(*offset);
            }
        }
    }

    /// How many events of a partition are not settled, and where it is read next; none if it is not ours.
    pub(super) fn standing(&self, topic_partition: &TopicPartition) -> Option<(usize, i64)> {
        self.partitions.get(topic_partition).map(|partition| (partition.open.len(), partition.next_offset))
    }

    /// Where each partition is read next.
    pub(super) fn positions(&self) -> Vec<(TopicPartition, i64)> {
        self.partitions
            .iter()
            .map(|(topic_partition, partition)| (topic_partition.clone(), partition.next_offset))
            .collect()
    }

    /// Events and bytes in memory.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.fresh.events + self.retries.events, self.fresh.bytes + self.retries.bytes)
    }
}

fn hand_out(batch: &mut Batch, position: Position, open: &Open, event: Result<Event, Error>) {
    match event {
        Ok(event) => batch.deliveries.push(Delivery {
            event,
            position,
            attempt: open.attempts + 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        }),
        Err(error) => {
            let Origin { topic_partition, offset, .. } = &open.origin;
            let key = open.raw.key.as_deref().and_then(|key| std::str::from_utf8(key).ok());
            batch.rejects.push(Reject {
                position,
                id: format!("{}/{}/{offset}", topic_partition.topic, topic_partition.partition),
                key: key.map(str::to_owned),
                error,
            });
        }
    }
}

fn halted(origin: &Origin, error: &Error) -> Error {
    let Origin { topic_partition: TopicPartition { topic, partition }, offset, .. } = origin;
    Error::permanent(
        Code::NO_DEAD_LETTER_TOPIC,
        format!(
            "the event at {topic}/{partition}/{offset} cannot be handled ({}: {error}), and there is no dead-letter topic for it",
            error.code()
        ),
    )
    .with_remedy(
        "set `dead_letter_topic`, or remove the cause, or move the group's offset past the event with kafka-consumer-groups",
    )
}

/// How long until then, by this host's clock; none if it is past.
fn time_until(due_ms: i64) -> Option<Duration> {
    let due = UNIX_EPOCH + Duration::from_millis(u64::try_from(due_ms).ok()?);
    due.duration_since(SystemTime::now()).ok()
}

#[cfg(test)]
#[path = "track_tests.rs"]
mod tests;
