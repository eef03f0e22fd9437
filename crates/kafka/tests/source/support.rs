//! A cluster, topics, messages, and a reader that shares nothing with the source.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use airtight_core::{
    Batch, CancellationToken, Capabilities, Code, Delivery, Dispatcher, Error, Event, Limits, Outcome,
    Policy, Position, Relay, Result, Settlement, Sink, Source, Verdict, dispatch::Context, relay::Summary,
};
use airtight_kafka::{KafkaConfig, KafkaConnection, KafkaSink, KafkaSource, KafkaSourceConfig};
use airtight_testkit::{deliveries::sample_event, ledger, wait::eventually_some};
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    message::Headers,
    producer::{FutureProducer, FutureRecord},
};

/// Long enough for a machine that is busy with other tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The address of the shared Kafka; none, and a line that says so, where there is none.
pub(crate) fn cluster(test_name: &str) -> Option<String> {
    let Some(brokers) = ledger::variable("AIRTIGHT_TEST_KAFKA") else {
        ledger::skip(test_name, "no Kafka", "AIRTIGHT_TEST_KAFKA");
        return None;
    };
    ledger::met("kafka", test_name);
    Some(brokers)
}

/// A name that no other test uses.
pub(crate) fn unique(name: &str) -> String {
    format!("{name}-{}", uuid::Uuid::new_v4().simple())
}

pub(crate) fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config
}

pub(crate) fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    client(brokers).create().unwrap()
}

/// Creates a topic of a unique name.
pub(crate) async fn topic(brokers: &str, name: &str, partitions: i32) -> String {
    let name = unique(name);
    create(brokers, &name, partitions).await;
    name
}

pub(crate) async fn create(brokers: &str, name: &str, partitions: i32) {
    let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
    let created = admin(brokers).create_topics(&[topic], &AdminOptions::new()).await.unwrap();
    created.into_iter().for_each(|created| drop(created.unwrap()));
}

/// A source of one topic as a group named after it, with quick commits.
pub(crate) fn config(brokers: &str, topic: &str) -> KafkaSourceConfig {
    let mut config = KafkaSourceConfig::new(KafkaConnection::new(brokers), [topic], format!("{topic}.group"));
    config.create = true;
    config.commit_interval = Duration::from_millis(100);
    config.handover = Duration::from_secs(3);
    // A member that is gone without a word is missed soon.
    config.set("session.timeout.ms", "6000").unwrap();
    config.set("heartbeat.interval.ms", "500").unwrap();
    config
}

pub(crate) async fn open(config: KafkaSourceConfig) -> KafkaSource {
    let source = KafkaSource::new(config).unwrap();
    source.open(&Capabilities::default()).await.unwrap();
    source
}

/// Writes events as airtight's own sink does.
pub(crate) async fn publish(brokers: &str, topic: &str, events: impl IntoIterator<Item = (i64, String)>) {
    let mut config = KafkaConfig::new(brokers);
    config.set("topic", topic).unwrap();
    let sink = KafkaSink::new(config).unwrap();
    let deliveries: Vec<Delivery> = events
        .into_iter()
        .map(|(seq, key)| Delivery {
            event: sample_event(seq, &key),
            position: Position(0),
            attempt: 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        })
        .collect();
    for batch in deliveries.chunks(2_000) {
        let outcomes = sink.deliver(batch).await;
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Delivered)), "{outcomes:?}");
    }
    sink.close().await.unwrap();
}

/// Writes one message as it is.
pub(crate) async fn write(brokers: &str, topic: &str, key: &[u8], value: &[u8]) {
    let producer: FutureProducer = client(brokers).create().unwrap();
    producer.send(FutureRecord::to(topic).key(key).payload(value), PATIENCE).await.unwrap();
}

/// A message as an independent reader sees it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) value: Option<Vec<u8>>,
    pub(crate) headers: HashMap<String, String>,
}

/// Waits until a topic has so many messages, and reads them.
pub(crate) async fn read(brokers: &str, topic: &str, at_least: usize) -> Vec<Seen> {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    let reading = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = client(&brokers).set("group.id", unique("reader")).create().unwrap();
        let mut list = TopicPartitionList::new();
        let metadata = consumer.fetch_metadata(Some(&topic), PATIENCE).unwrap();
        for partition in metadata.topics()[0].partitions() {
            list.add_partition_offset(&topic, partition.id(), Offset::Beginning).unwrap();
        }
        consumer.assign(&list).unwrap();
        let mut seen = Vec::new();
        let end = std::time::Instant::now() + PATIENCE;
        while seen.len() < at_least {
            assert!(std::time::Instant::now() < end, "{topic} has {} of {at_least} messages", seen.len());
            let Some(message) = consumer.poll(Duration::from_millis(100)) else { continue };
            let message = message.unwrap();
            let text = |value: Option<&[u8]>| String::from_utf8_lossy(value.unwrap_or_default()).into_owned();
            let headers = message.headers().map(|headers| {
                headers.iter().map(|header| (header.key.to_owned(), text(header.value))).collect()
            });
            seen.push(Seen {
                key: message.key().map(<[u8]>::to_vec),
                value: message.payload().map(<[u8]>::to_vec),
                headers: headers.unwrap_or_default(),
            });
        }
        seen
    });
    reading.await.unwrap()
}

/// The committed offset of a partition, as the broker has it.
pub(crate) async fn committed(brokers: &str, group: &str, topic: &str, partition: i32) -> Option<i64> {
    let (mut config, topic) = (client(brokers), topic.to_owned());
    config.set("group.id", group);
    let asking = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = config.create().unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition(&topic, partition);
        let committed = consumer.committed_offsets(list, PATIENCE).unwrap();
        match committed.elements()[0].offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        }
    });
    asking.await.unwrap()
}

/// How many messages a partition has.
pub(crate) async fn end_of(brokers: &str, topic: &str, partition: i32) -> usize {
    let (config, topic) = (client(brokers), topic.to_owned());
    let asking = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = config.create().unwrap();
        consumer.fetch_watermarks(&topic, partition, PATIENCE).unwrap().1
    });
    usize::try_from(asking.await.unwrap()).unwrap()
}

pub(crate) const LIMITS: Limits = Limits { events: 1_000, bytes: 1 << 20 };

/// The next batch that has something in it.
pub(crate) async fn next(source: &KafkaSource) -> Batch {
    eventually_some(PATIENCE, "a batch", async || {
        let batch = source.next(LIMITS).await.unwrap();
        (!batch.is_empty()).then_some(batch)
    })
    .await
}

/// So many deliveries, of as many batches as it takes.
pub(crate) async fn take(source: &KafkaSource, events: usize) -> Vec<Delivery> {
    let mut taken = Vec::new();
    while taken.len() < events {
        taken.extend(next(source).await.deliveries);
    }
    taken
}

pub(crate) fn verdict(delivery: &Delivery, verdict: Verdict) -> Settlement {
    Settlement { position: delivery.position, verdict }
}

pub(crate) fn delivered(deliveries: &[Delivery]) -> Vec<Settlement> {
    deliveries.iter().map(|delivery| verdict(delivery, Verdict::Delivered)).collect()
}

pub(crate) fn retry(after: Duration) -> Verdict {
    Verdict::Retry { after, error: Error::retryable(Code::BUSY, "come back later") }
}

pub(crate) fn dead() -> Verdict {
    Verdict::Dead { error: Error::permanent(Code::custom("no_good"), "no good at all") }
}

pub(crate) fn seqs(deliveries: &[Delivery]) -> Vec<i64> {
    deliveries.iter().map(|delivery| delivery.event.seq).collect()
}

/// What handlers saw, in order: the key, the seq and the attempt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<(String, i64, u32)>>>);

impl Log {
    pub(crate) fn note(&self, context: &Context) {
        let entry = (context.event.aggregate_id.clone(), context.event.seq, context.attempt);
        self.0.lock().unwrap().push(entry);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Different events.
    pub(crate) fn distinct(&self) -> usize {
        let log = self.0.lock().unwrap();
        log.iter().map(|(_, seq, _)| seq).collect::<std::collections::HashSet<_>>().len()
    }

    pub(crate) fn entries(&self) -> Vec<(String, i64, u32)> {
        self.0.lock().unwrap().clone()
    }

    /// Events by key, in the order in which each was seen first.
    pub(crate) fn first_sights(&self) -> HashMap<String, Vec<i64>> {
        let mut known = std::collections::HashSet::new();
        let mut by_key: HashMap<String, Vec<i64>> = HashMap::new();
        for (key, seq, _) in self.entries() {
            if known.insert(seq) {
                by_key.entry(key).or_default().push(seq);
            }
        }
        by_key
    }
}

/// Handlers that note what they see, and take so long for it.
pub(crate) fn noting(log: &Log, takes: Duration) -> Dispatcher {
    let log = log.clone();
    Dispatcher::new().otherwise(move |context: Context| {
        let log = log.clone();
        async move {
            if !takes.is_zero() {
                tokio::time::sleep(takes).await;
            }
            log.note(&context);
        }
    })
}

/// A relay in the background.
pub(crate) struct Running {
    pub(crate) stop: CancellationToken,
    pub(crate) task: tokio::task::JoinHandle<Result<Summary>>,
}

pub(crate) fn run(source: KafkaSource, sink: impl Sink, policy: Policy) -> Running {
    let stop = CancellationToken::new();
    let relay = Relay::new(source, sink).policy(policy);
    let task = tokio::spawn(relay.run(stop.clone()));
    Running { stop, task }
}

impl Running {
    pub(crate) async fn end(self) -> Summary {
        self.stop.cancel();
        self.task.await.unwrap().unwrap()
    }
}

pub(crate) fn key_of(event: &Event) -> &str {
    &event.aggregate_id
}
