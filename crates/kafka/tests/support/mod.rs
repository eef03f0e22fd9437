//! A real Kafka, topics of a test's own, and a consumer that shares nothing with the sink.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread::JoinHandle,
    time::Duration,
};

use airtight_core::{Delivery, Payload};
use airtight_kafka::{KafkaConfig, KafkaSink};
use airtight_testkit::{
    deliveries::{of, sample_event},
    ledger,
    wait::eventually,
};
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    message::Headers,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The shared broker; none, and a line that says so, where there is none.
pub(crate) fn shared(test: &str) -> Option<String> {
    match ledger::variable("AIRTIGHT_TEST_KAFKA") {
        Some(brokers) => {
            ledger::met("kafka", test);
            Some(brokers)
        }
        None => {
            ledger::skip(test, "no Kafka", "AIRTIGHT_TEST_KAFKA");
            None
        }
    }
}

/// The shared broker or, outside of CI, librdkafka's own mock cluster: for what that can do as well.
pub(crate) fn shared_or_mock(test: &str) -> Option<String> {
    if ledger::variable("AIRTIGHT_TEST_KAFKA").is_some() || ledger::in_ci() {
        return shared(test);
    }
    ledger::met("kafka-mock", test);
    Some(mock().brokers.clone())
}

/// A cluster inside this process.
struct Mock {
    brokers: String,
    topics: Mutex<Sender<(String, i32, Sender<()>)>>,
}

/// Its handle cannot leave the thread that made it.
fn mock() -> &'static Mock {
    static MOCK: OnceLock<Mock> = OnceLock::new();
    MOCK.get_or_init(|| {
        let (topics, wanted) = std::sync::mpsc::channel::<(String, i32, Sender<()>)>();
        let (started, starting) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let cluster = rdkafka::mocking::MockCluster::new(1).unwrap();
            started.send(cluster.bootstrap_servers()).unwrap();
            for (topic, partitions, created) in wanted {
                cluster.create_topic(&topic, partitions, 1).unwrap();
                created.send(()).unwrap();
            }
        });
        Mock { brokers: starting.recv().unwrap(), topics: Mutex::new(topics) }
    })
}

/// A name that no other test has.
pub(crate) fn unique(test: &str) -> String {
    format!("{test}.{}", uuid::Uuid::now_v7().simple())
}

fn settings(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("reconnect.backoff.max.ms", "500");
    config
}

/// Creates a topic and waits until it is there.
pub(crate) async fn create_topic(brokers: &str, topic: &str, partitions: i32, extra: &[(&str, &str)]) {
    let admin: AdminClient<DefaultClientContext> = settings(brokers).create().unwrap();
    if ledger::variable("AIRTIGHT_TEST_KAFKA").is_none() {
        // Before anybody asks for it, for the mock makes up what it is asked for.
        let (created, creating) = std::sync::mpsc::channel();
        mock().topics.lock().unwrap().send((topic.to_owned(), partitions, created)).unwrap();
        creating.recv().unwrap();
        return until_led(&admin, topic).await;
    }
    let mut new = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
    for (key, value) in extra {
        new = new.set(key, value);
    }
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
    for created in admin.create_topics([&new], &options).await.unwrap() {
        created.unwrap();
    }
    until_led(&admin, topic).await;
}

/// Deletes a topic and waits until it is gone.
pub(crate) async fn delete_topic(brokers: &str, topic: &str) {
    let admin: AdminClient<DefaultClientContext> = settings(brokers).create().unwrap();
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
    for deleted in admin.delete_topics(&[topic], &options).await.unwrap() {
        deleted.unwrap();
    }
    let is_gone = async || {
        let metadata = admin.inner().fetch_metadata(None, PATIENCE).unwrap();
        metadata.topics().iter().all(|known| known.name() != topic)
    };
    eventually(PATIENCE, "the topic to be gone", is_gone).await;
}

async fn until_led(admin: &AdminClient<DefaultClientContext>, topic: &str) {
    let exists = async || {
        let metadata = admin.inner().fetch_metadata(Some(topic), PATIENCE).unwrap();
        let partitions = metadata.topics()[0].partitions();
        !partitions.is_empty() && partitions.iter().all(|partition| partition.leader() >= 0)
    };
    eventually(PATIENCE, "the topic to be there", exists).await;
}

/// A message as a consumer sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) key: Option<String>,
    pub(crate) body: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) timestamp: Option<i64>,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone().unwrap()).unwrap()
    }
}

/// Reads a topic from its beginning, on and on, through restarts of the broker.
pub(crate) struct Tail {
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Tail {
    pub(crate) fn new(brokers: &str, topic: &str, partitions: i32) -> Self {
        let mut config = settings(brokers);
        config.set("group.id", "tail").set("enable.auto.commit", "false").set("fetch.wait.max.ms", "50");
        config.set("fetch.message.max.bytes", "40000000");
        let consumer: BaseConsumer = config.create().unwrap();
        let mut assignment = TopicPartitionList::new();
        for partition in 0..partitions {
            assignment.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&assignment).unwrap();
        let seen = Arc::<Mutex<Vec<Seen>>>::default();
        let stop = Arc::<AtomicBool>::default();
        let (ours, stopped) = (seen.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                if let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) {
                    ours.lock().unwrap().push(read(&message));
                }
            }
        });
        Self { seen, stop, thread: Some(thread) }
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Waits for so many messages.
    pub(crate) async fn at_least(&self, count: usize) -> Vec<Seen> {
        eventually(PATIENCE, "messages to arrive", async || self.seen.lock().unwrap().len() >= count).await;
        self.seen()
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read(message: &impl Message) -> Seen {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let headers = message.headers().map(|headers| {
        headers.iter().map(|header| (header.key.to_owned(), text(header.value.unwrap_or_default()))).collect()
    });
    Seen {
        partition: message.partition(),
        offset: message.offset(),
        key: message.key().map(text),
        body: message.payload().map(<[u8]>::to_vec),
        headers: headers.unwrap_or_default(),
        timestamp: message.timestamp().to_millis(),
    }
}

/// An event of this key with a payload of about this size.
pub(crate) fn sized(seq: i64, key: &str, bytes: usize) -> Delivery {
    let mut event = sample_event(seq, key);
    event.payload = Payload::Json(format!("\"{}\"", "x".repeat(bytes)).into());
    of(event)
}

pub(crate) fn sink(url: &str) -> KafkaSink {
    KafkaSink::new(KafkaConfig::from_url(url).unwrap()).unwrap()
}
