//! The thread that does everything with the consumer: it polls, rebalances, commits and leaves the group.
//!
//! One thread for all of it is what keeps offsets safe. librdkafka calls back for a rebalance from inside `poll`, and
//! the group continues only after the callback has returned; commits are made on this thread too, and awaited. So no
//! commit is under way while partitions change hands, and each one goes out as the member and generation that owns
//! what it is about. A broker that has meanwhile given the partitions to others knows neither, and refuses it.
//!
//! The thread polls all the time, even when the buffers are full: then it pauses partitions. So a slow handler never costs
//! the process its membership in the group.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{Code, Error, Ownership};
use rdkafka::{
    ClientContext, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol},
    error::{KafkaError, KafkaResult, RDKafkaErrorCode as KafkaCode},
    types::RDKafkaRespErr,
};
use tokio::sync::Notify;

use super::{
    KafkaSourceConfig, Start,
    message::{Raw, TopicPartition},
    track::GroupTracker,
};
use crate::{
    complaint::{self, Complaint},
    errors,
};

/// How long one poll waits; also how soon a stop, a commit or a resume is noticed.
const POLL: Duration = Duration::from_millis(50);
/// So many messages between two looks at everything else.
const BURST: usize = 100;
/// How long one question to the broker may take.
const ASK: Duration = Duration::from_secs(5);
/// Between two tries of something that failed.
const AGAIN: Duration = Duration::from_millis(500);
/// How often a commit is tried before partitions are given away.
const LAST_COMMITS: usize = 4;

/// What the thread and the source share.
pub(super) struct Shared {
    pub(super) config: Arc<KafkaSourceConfig>,
    track: Mutex<GroupTracker>,
    /// Something was settled.
    settled: Condvar,
    /// There may be something to hand out.
    pub(super) news: Notify,
    stop: AtomicBool,
    complaint: Complaint,
}

impl Shared {
    pub(super) fn new(config: Arc<KafkaSourceConfig>) -> Self {
        Self {
            track: Mutex::new(GroupTracker::new(config.clone())),
            config,
            settled: Condvar::new(),
            news: Notify::new(),
            stop: AtomicBool::new(false),
            complaint: Complaint::default(),
        }
    }

    pub(super) fn track(&self) -> MutexGuard<'_, GroupTracker> {
        self.track.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whoever waits for it that something was settled.
    pub(super) fn tell_settled(&self) {
        self.settled.notify_all();
        self.news.notify_one();
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.settled.notify_all();
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Waits, unless it is time to stop.
    fn pause(&self, wait: Duration) {
        let until = Instant::now() + wait;
        let mut track = self.track();
        while !self.is_stopping() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            track = self.settled.wait_timeout(track, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Why the cluster does not answer, in words.
    pub(super) fn away(&self) -> Error {
        errors::away(&self.config.connection.brokers, self.complaint.last(), "")
    }
}

/// Connects librdkafka's callbacks with what is shared.
pub(super) struct SourceContext(pub(super) Arc<Shared>);

pub(super) type KafkaConsumer = BaseConsumer<SourceContext>;

impl ClientContext for SourceContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        complaint::log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.complaint.note(&error, reason);
    }
}

impl ConsumerContext for SourceContext {
    fn rebalance(&self, consumer: &KafkaConsumer, what: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let topic_partitions = topic_partitions(list);
        let is_incremental = matches!(consumer.rebalance_protocol(), RebalanceProtocol::Cooperative);
        let done = if what == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            tracing::info!(target: "airtight::kafka", group = self.0.config.group, "the group assigned {}", names(&topic_partitions));
            self.0.take_up(consumer, list);
            let assigned =
                if is_incremental { consumer.incremental_assign(list) } else { consumer.assign(list) };
            // librdkafka remembers that a partition was paused when it went, and would leave it so.
            assigned.and_then(|()| consumer.resume(list))
        } else {
            tracing::info!(target: "airtight::kafka", group = self.0.config.group, "the group revoked {}", names(&topic_partitions));
            self.0.give_up(consumer, &topic_partitions);
            if is_incremental { consumer.incremental_unassign(list) } else { consumer.unassign() }
        };
        if let Err(error) = done {
            // librdkafka refuses it only where the assignment is not its own any more; the group goes on with another.
            tracing::warn!(target: "airtight::kafka", %error, "the assignment could not be changed");
            let mut track = self.0.track();
            topic_partitions.iter().for_each(|topic_partition| track.drop_partition(topic_partition));
        }
    }
}

impl Shared {
    /// Finds out where new partitions go on, and writes that into the list.
    fn take_up(&self, consumer: &KafkaConsumer, list: &mut TopicPartitionList) {
        // The group waits for this callback, for as long as `max.poll.interval.ms`: without the offsets there is
        // nothing to do but to ask again.
        let begin = loop {
            match self.positions(consumer, list) {
                Ok(begin) => break begin,
                Err(error) if self.is_stopping() || consumer.assignment_lost() => {
                    tracing::debug!(target: "airtight::kafka", %error, "the offsets could not be read, and are no longer needed");
                    // A rebalance takes these away again; until then nothing of them is taken in.
                    drop(list.set_all_offsets(Offset::End));
                    return;
                }
                Err(error) => {
                    tracing::warn!(target: "airtight::kafka", %error, "cannot read the group's offsets yet");
                    self.track().trouble = Some(self.away().context("cannot read the group's offsets"));
                    self.news.notify_one();
                    self.pause(AGAIN);
                }
            }
        };
        let (now, lease) = (Instant::now(), self.config.session());
        let mut topic_partitions = Vec::new();
        let mut track = self.track();
        for Begin { topic_partition, committed, offset } in begin {
            let offset = committed.map_or(offset, |committed| track.resume_at(&topic_partition, committed));
            // Fails only for an offset below zero, and none is.
            drop(list.set_partition_offset(
                &topic_partition.topic,
                topic_partition.partition,
                Offset::Offset(offset),
            ));
            track.assign(&topic_partition, offset, committed, Ownership::leased(now, lease));
            topic_partitions.push(topic_partition);
        }
        drop(track);
        // From now on the group has a place, and neither a restart nor another member begins anywhere else. If it does
        // not work, the next commit does it.
        self.commit(consumer, Some(&topic_partitions));
    }

    /// The committed offsets, or where a group without them begins.
    fn positions(&self, consumer: &KafkaConsumer, list: &TopicPartitionList) -> KafkaResult<Vec<Begin>> {
        let mut begin = Vec::with_capacity(list.count());
        for element in consumer.committed_offsets(list.clone(), ASK)?.elements() {
            element.error()?;
            let topic_partition = TopicPartition::new(element.topic(), element.partition());
            if let Offset::Offset(offset) = element.offset() {
                begin.push(Begin { topic_partition, committed: Some(offset), offset });
                continue;
            }
            let (first, end) =
                consumer.fetch_watermarks(&topic_partition.topic, topic_partition.partition, ASK)?;
            let is_retry = self.config.retry_topic() == Some(&topic_partition.topic);
            let offset = if self.config.start == Start::Latest && !is_retry { end } else { first };
            begin.push(Begin { topic_partition, committed: None, offset });
        }
        Ok(begin)
    }

    /// Partitions go to other members: waits for what is being handled, commits it, then gives the partitions up.
    fn give_up(&self, consumer: &KafkaConsumer, topic_partitions: &[TopicPartition]) {
        let mut track = self.track();
        track.leave(topic_partitions);
        self.news.notify_one();
        // Lost, they are somebody else's already, and there is nothing to wait for.
        if !consumer.assignment_lost() {
            let wait = |track: &mut GroupTracker| track.is_out(topic_partitions) && !self.is_stopping();
            let waited = self.settled.wait_timeout_while(track, self.config.handover, wait);
            drop(waited);
            for _ in 0..LAST_COMMITS {
                if self.commit(consumer, Some(topic_partitions)) {
                    break;
                }
                self.pause(POLL);
            }
            track = self.track();
        }
        for topic_partition in topic_partitions {
            track.drop_partition(topic_partition);
        }
    }

    /// Whether the broker still takes this process for the owner of its partitions. It is asked by committing once
    /// more what is committed already.
    fn is_member(&self, consumer: &KafkaConsumer) -> bool {
        let offsets = self.track().offsets();
        offsets.is_empty()
            || to_list(&offsets).and_then(|offsets| consumer.commit(&offsets, CommitMode::Sync)).is_ok()
    }

    /// Commits what was settled. Returns false if it is worth another try.
    fn commit(&self, consumer: &KafkaConsumer, only: Option<&[TopicPartition]>) -> bool {
        let offsets = self.track().to_commit(only);
        if offsets.is_empty() {
            return true;
        }
        let committed = to_list(&offsets).and_then(|offsets| consumer.commit(&offsets, CommitMode::Sync));
        match committed {
            Ok(()) => {
                self.track().committed(&offsets);
                true
            }
            // Not a member any more: the rebalance that follows takes the partitions away.
            Err(KafkaError::ConsumerCommit(
                code @ (KafkaCode::UnknownMemberId
                | KafkaCode::IllegalGeneration
                | KafkaCode::FencedInstanceId
                | KafkaCode::FencedMemberEpoch
                | KafkaCode::StaleMemberEpoch),
            )) => {
                tracing::warn!(target: "airtight::kafka", group = self.config.group, %code, "Kafka refused the offsets: these events are read again");
                true
            }
            Err(error) => {
                tracing::warn!(target: "airtight::kafka", group = self.config.group, %error, "offsets are not committed yet");
                false
            }
        }
    }
}

/// Where a partition is taken up.
struct Begin {
    topic_partition: TopicPartition,
    /// None: the group has no offset there yet.
    committed: Option<i64>,
    offset: i64,
}

/// Runs until it is told to stop. Then, or killed, nothing is lost: what was not committed comes again.
pub(super) fn run(shared: &Shared, consumer: Arc<KafkaConsumer>) {
    let mut turn_at = Instant::now();
    let mut commit_at = turn_at + shared.config.commit_interval;
    while !shared.is_stopping() {
        read(shared, &consumer);
        let now = Instant::now();
        let lease = shared.config.session();
        // A process that was asleep for so long may have lost its partitions without knowing: the broker does.
        if now - turn_at < lease || shared.is_member(&consumer) {
            shared.track().renew(now, lease);
            turn_at = now;
        }
        if now >= commit_at {
            let is_done = shared.commit(&consumer, None);
            let wait = if is_done {
                shared.config.commit_interval
            } else {
                shared.config.commit_interval.max(AGAIN)
            };
            commit_at = Instant::now() + wait;
        }
        make_room(shared, &consumer);
    }
    shared.commit(&consumer, None);
    // Leaves the group, with a last rebalance.
    drop(consumer);
}

/// Takes in what is there, up to a burst.
fn read(shared: &Shared, consumer: &KafkaConsumer) {
    let mut wait = POLL;
    for _ in 0..BURST {
        // Taken in one by one: the next poll may bring a rebalance, after which a message that was read before it must
        // not be mistaken for one of the partition's new life.
        match consumer.poll(wait) {
            Some(Ok(message)) => {
                use rdkafka::Message as _;
                let mut track = shared.track();
                let topic_partition = track.topic_partition(message.topic(), message.partition());
                let has_room = track.admit(Raw::new(&message, topic_partition), Instant::now());
                drop(track);
                shared.news.notify_one();
                if !has_room {
                    return;
                }
            }
            Some(Err(error)) => complain(shared, consumer, &error),
            None => return,
        }
        wait = Duration::ZERO;
    }
}

/// Pauses what there is no room for, and resumes what there is.
fn make_room(shared: &Shared, consumer: &KafkaConsumer) {
    let (pause, resume) = shared.track().pauses();
    let changed = |topic_partitions: &[TopicPartition],
                   change: &dyn Fn(&TopicPartitionList) -> KafkaResult<()>| {
        if topic_partitions.is_empty() {
            return;
        }
        let mut list = TopicPartitionList::new();
        for topic_partition in topic_partitions {
            list.add_partition(&topic_partition.topic, topic_partition.partition);
        }
        if let Err(error) = change(&list) {
            tracing::warn!(target: "airtight::kafka", %error, "partitions could not be paused or resumed");
        }
    };
    changed(&pause, &|list| consumer.pause(list));
    changed(&resume, &|list| consumer.resume(list));
}

fn complain(shared: &Shared, consumer: &KafkaConsumer, error: &KafkaError) {
    let code = error.rdkafka_error_code().unwrap_or(KafkaCode::Fail);
    let brokers = &shared.config.connection.brokers;
    let group = &shared.config.group;
    match code {
        KafkaCode::AutoOffsetReset | KafkaCode::OffsetOutOfRange | KafkaCode::LogTruncation => {
            let gone = gone(shared, consumer);
            shared.track().failed.get_or_insert(gone);
        }
        _ if matches!(error, KafkaError::MessageConsumptionFatal(_)) => {
            let fatal = Error::permanent(
                Code::SERVER_ERROR,
                format!("Kafka has ended this member of group `{group}`: {error}"),
            );
            shared.track().failed.get_or_insert(fatal);
        }
        // The rebalance that follows says it all.
        KafkaCode::PollExceeded => {
            tracing::warn!(target: "airtight::kafka", "this process did not poll for longer than `max.poll.interval.ms`");
        }
        KafkaCode::GroupAuthorizationFailed => {
            let message = format!("Kafka at {brokers} does not let this user read as group `{group}`");
            let error = Error::unavailable(Code::NOT_PERMITTED, message)
                .with_remedy(format!("grant the user Read on group `{group}`"));
            shared.track().trouble = Some(error);
        }
        KafkaCode::TopicAuthorizationFailed => {
            let topics = shared.config.subscription().join("`, `");
            let message = format!("Kafka at {brokers} does not let this user read from `{topics}`");
            let error = Error::unavailable(Code::NOT_PERMITTED, message)
                .with_remedy("grant the user Read and Describe on these topics");
            shared.track().trouble = Some(error);
        }
        KafkaCode::UnknownTopicOrPartition | KafkaCode::UnknownTopic | KafkaCode::UnknownPartition => {
            let topics = shared.config.subscription().join("`, `");
            let message = format!("one of the topics `{topics}` does not exist at {brokers} any more");
            shared.track().trouble = Some(Error::retryable(Code::NO_TOPIC, message));
        }
        _ => {
            let away = shared.away();
            shared.track().trouble = Some(away);
        }
    }
    shared.news.notify_one();
}

/// The error for offsets that no longer exist, with the offsets.
fn gone(shared: &Shared, consumer: &KafkaConsumer) -> Error {
    let group = &shared.config.group;
    let positions = shared.track().positions();
    let mut lost = Vec::new();
    for (TopicPartition { topic, partition }, offset) in positions {
        match consumer.fetch_watermarks(&topic, partition, ASK) {
            Ok((first, _)) if offset < first => lost.push(format!(
                "{topic}/{partition} is at offset {offset}, and the oldest message is {first}: {} are gone",
                first - offset
            )),
            Ok((_, end)) if offset > end => lost.push(format!(
                "{topic}/{partition} is at offset {offset}, and the topic ends at {end}: it may have been deleted and created again"
            )),
            _ => {}
        }
    }
    let what = if lost.is_empty() { "it is not known which".to_owned() } else { lost.join("; ") };
    Error::permanent(
        Code::BEHIND_RETENTION,
        format!(
            "messages that group `{group}` has not read are gone, most likely because of the topic's retention: {what}. The source does not skip them by itself"
        ),
    )
    .with_remedy(format!(
        "find out what is missing, then move the group (kafka-consumer-groups --group {group} --reset-offsets --to-earliest --execute --topic …) and start again"
    ))
}

fn topic_partitions(list: &TopicPartitionList) -> Vec<TopicPartition> {
    list.elements().iter().map(|element| TopicPartition::new(element.topic(), element.partition())).collect()
}

fn names(topic_partitions: &[TopicPartition]) -> String {
    let names: Vec<String> = topic_partitions
        .iter()
        .map(|topic_partition| format!("{}/{}", topic_partition.topic, topic_partition.partition))
        .collect();
    if names.is_empty() { "nothing".into() } else { names.join(", ") }
}

fn to_list(offsets: &[(TopicPartition, i64)]) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(offsets.len());
    for (topic_partition, offset) in offsets {
        list.add_partition_offset(
            &topic_partition.topic,
            topic_partition.partition,
            Offset::Offset(*offset),
        )?;
    }
    Ok(list)
}
