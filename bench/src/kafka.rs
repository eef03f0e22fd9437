//! PostgreSQL to Kafka, compared with librdkafka's own producer and the same messages; and how long a committed event takes
//! to reach a consumer, compared with a bare producer and consumer.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use airtight_core::{
    CancellationToken, Event, NewEvent, Payload, Relay, Sink, admin::Admin, log::LogOptions,
    queue::QueueOptions, table::Shape,
};
use airtight_kafka::{KafkaConfig, KafkaSink};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{ledger, postgres::TestDb};
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{Consumer, StreamConsumer},
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, Headers, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext, ThreadedProducer},
};

use crate::{idle::cpu_seconds, sample};

pub(crate) const PARTITIONS: i32 = 6;

pub(crate) fn brokers() -> String {
    ledger::variable("AIRTIGHT_TEST_KAFKA").unwrap_or_else(|| {
        eprintln!("no Kafka: run `bench/run`, which starts one");
        std::process::exit(1);
    })
}

fn sink(topic: &str) -> KafkaSink {
    let url = format!("kafka://{}/{topic}?create=true&create_partitions={PARTITIONS}", brokers());
    KafkaConfig::from_url(&url).and_then(KafkaSink::new).expect("a sink")
}

fn unique(name: &str) -> String {
    format!("bench-{name}-{:08x}", fastrand::u32(..))
}

/// A rate and what it cost this process.
struct Figures {
    rate: f64,
    cpu_per_million: f64,
}

impl Figures {
    async fn of(events: i64, work: impl Future<Output = ()>) -> Self {
        let (begun, before) = (Instant::now(), cpu_seconds(std::process::id()));
        work.await;
        let spent = cpu_seconds(std::process::id()) - before;
        Self {
            rate: events as f64 / begun.elapsed().as_secs_f64(),
            cpu_per_million: spent / events as f64 * 1e6,
        }
    }

    fn print(&self, name: &str, beside: &Self) {
        println!(
            "{name}: {:.0} events/s ({:.0} % of librdkafka's), {:.1} CPU seconds per million",
            self.rate,
            100.0 * self.rate / beside.rate,
            self.cpu_per_million
        );
    }
}

pub(crate) async fn throughput(db: &TestDb, events: i64) {
    let bare = bare_producer(events).await;
    bare.print("librdkafka's producer, the same messages", &bare);

    let outbox = sample::outbox(db, "kafka").await;
    sample::fill(&outbox, events).await;
    let queue =
        drained(events, Relay::new(outbox.queue(QueueOptions::default()), sink(&unique("queue")))).await;
    queue.print("PostgreSQL queue to Kafka", &bare);

    let options = PgOptions { shape: Shape::Log, table: "kafka_log".into(), ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.expect("connecting");
    outbox.migrate().await.expect("migrating");
    sample::fill(&outbox, events).await;
    let log =
        drained(events, Relay::new(outbox.log(LogOptions::consumer("bench")), sink(&unique("log")))).await;
    log.print("PostgreSQL log to Kafka", &bare);
    println!(
        "{}",
        serde_json::json!({"bench": "kafka", "events": events,
            "producer": {"rate": bare.rate, "cpu_per_million": bare.cpu_per_million},
            "queue": {"rate": queue.rate, "cpu_per_million": queue.cpu_per_million, "ratio": queue.rate / bare.rate},
            "log": {"rate": log.rate, "cpu_per_million": log.cpu_per_million, "ratio": log.rate / bare.rate}})
    );
}

async fn drained(events: i64, relay: Relay) -> Figures {
    Figures::of(events, async {
        let summary = relay.drain(CancellationToken::new()).await.expect("draining");
        assert_eq!(i64::try_from(summary.delivered), Ok(events), "all of them, once");
    })
    .await
}

/// As the sink is set up, and nothing else: no database, no reports looked at, the queue always full.
async fn bare_producer(events: i64) -> Figures {
    let topic = unique("producer");
    // The topic is made, and one message shows what they look like.
    let sink = sink(&topic);
    sink.open().await.expect("Kafka answers");
    let message = sink.preview(&sampled()).expect("a message").expect("a message");
    tokio::task::spawn_blocking(move || {
        let producer: BaseProducer = producer_config().create().expect("a producer");
        let body = message.body.expect("a body");
        let send = || {
            for n in 0..events {
                let key = format!("key-{}", n % 1000);
                let mut headers = OwnedHeaders::new();
                for (name, value) in &message.headers {
                    headers = headers.insert(Header { key: name, value: Some(value.as_bytes()) });
                }
                let mut record = BaseRecord::to(&topic).key(&key).payload(&body[..]).headers(headers);
                while let Err((error, back)) = producer.send(record) {
                    assert!(
                        matches!(error, KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)),
                        "{error}"
                    );
                    producer.poll(Duration::from_millis(1));
                    record = back;
                }
                if n % 256 == 0 {
                    producer.poll(Duration::ZERO);
                }
            }
            producer.flush(Duration::from_secs(60)).expect("all acknowledged");
        };
        futures::executor::block_on(Figures::of(events, async { send() }))
    })
    .await
    .expect("the producer")
}

fn producer_config() -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers())
        .set("enable.idempotence", "true")
        .set("linger.ms", "1")
        .set("partitioner", "murmur2_random");
    config
}

/// An event like those of the outbox.
fn sampled() -> Event {
    let mut event = airtight_testkit::deliveries::sample_event(1, "key-1");
    event.payload = Payload::Json(format!("{{\"n\": 1, \"text\": \"{}\"}}", "x".repeat(470)).into());
    event
}

/// When each event began its way, by id.
pub(crate) type Begun = Arc<Mutex<HashMap<String, Instant>>>;

pub(crate) async fn latency(db: &TestDb, rate: u32, seconds: u64) {
    let total = usize::try_from(u64::from(rate) * seconds).expect("few");
    let bare = bare_latency(rate, total).await;
    println!("bare producer and consumer at {rate} events/s: {bare}");

    let outbox = PgOutbox::connect(
        &db.url(),
        PgOptions { notify: Some(true), table: "kafka_latency".into(), ..PgOptions::default() },
    )
    .await
    .expect("connecting");
    outbox.migrate().await.expect("migrating");
    let topic = unique("latency");
    let sink = sink(&topic);
    sink.open().await.expect("Kafka answers");
    let begun = Begun::default();
    let reader = tokio::spawn(consume(consumer(&topic), begun.clone(), total));
    let stop = CancellationToken::new();
    let relay = tokio::spawn(Relay::new(outbox.queue(QueueOptions::default()), sink).run(stop.clone()));
    paced(rate, total, async |n| {
        let event = NewEvent::new("bench", "Benched", "Thing", format!("key-{}", n % 100));
        let published = Admin::publish(&outbox, &[event]).await.expect("publishing").remove(0);
        begun.lock().expect("not poisoned").insert(published.id, Instant::now());
    })
    .await;
    let through = reader.await.expect("the consumer");
    stop.cancel();
    relay.await.expect("the relay").expect("the relay");
    println!("commit to Kafka's consumer at {rate} events/s, NOTIFY on: {through}");
    println!(
        "{}",
        serde_json::json!({"bench": "kafka-latency", "rate": rate, "median_ms": through.median, "p99_ms": through.p99,
            "bare_median_ms": bare.median, "bare_p99_ms": bare.p99})
    );
}

pub(crate) struct Quantiles {
    pub(crate) median: f64,
    pub(crate) p99: f64,
}

impl std::fmt::Display for Quantiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "median {:.2} ms, 99th percentile {:.2} ms", self.median, self.p99)
    }
}

/// Nobody waits for reports here.
struct Silent;

impl rdkafka::ClientContext for Silent {}

impl ProducerContext for Silent {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &DeliveryResult<'_>, (): ()) {}
}

async fn bare_latency(rate: u32, total: usize) -> Quantiles {
    let topic = unique("bare");
    sink(&topic).open().await.expect("Kafka answers");
    let begun = Begun::default();
    let reader = tokio::spawn(consume(consumer(&topic), begun.clone(), total));
    let producer: ThreadedProducer<Silent> =
        producer_config().create_with_context(Silent).expect("a producer");
    paced(rate, total, async |n| {
        let (id, key) = (format!("bare-{n}"), format!("key-{}", n % 100));
        begun.lock().expect("not poisoned").insert(id.clone(), Instant::now());
        let headers = OwnedHeaders::new().insert(Header { key: "id", value: Some(id.as_bytes()) });
        let record = BaseRecord::to(&topic).key(&key).payload("{}").headers(headers);
        producer.send(record).map_err(|(error, _)| error).expect("sending");
    })
    .await;
    reader.await.expect("the consumer")
}

pub(crate) async fn paced(rate: u32, total: usize, mut work: impl AsyncFnMut(usize)) {
    let mut tick = tokio::time::interval(Duration::from_secs(1) / rate);
    for n in 0..total {
        tick.tick().await;
        work(n).await;
    }
}

/// A consumer of everything that a topic has.
pub(crate) fn consumer(topic: &str) -> StreamConsumer {
    follow(topic, Offset::Beginning)
}

/// A consumer of everything that comes from now on.
pub(crate) async fn consumer_from_now(topic: &str) -> StreamConsumer {
    let consumer = follow(topic, Offset::End);
    // Where the end is, it finds out while it is asked for messages; what still comes is from before.
    while tokio::time::timeout(Duration::from_secs(3), consumer.recv()).await.is_ok() {}
    consumer
}

fn follow(topic: &str, from: Offset) -> StreamConsumer {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers()).set("group.id", topic).set("enable.auto.commit", "false");
    let consumer: StreamConsumer = config.create().expect("a consumer");
    let mut assignment = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        assignment.add_partition_offset(topic, partition, from).expect("a partition");
    }
    consumer.assign(&assignment).expect("assigning");
    consumer
}

/// Reads so many messages, and tells how long they took.
pub(crate) async fn consume(consumer: StreamConsumer, begun: Begun, total: usize) -> Quantiles {
    let mut taken = Vec::with_capacity(total);
    while taken.len() < total {
        let message = consumer.recv().await.expect("a message");
        let now = Instant::now();
        let headers = message.headers().expect("headers");
        let id =
            headers.iter().find(|header| header.key == "id").and_then(|header| header.value).expect("an id");
        // One that overtook its own publisher's return took no time.
        let since = begun.lock().expect("not poisoned").remove(&*String::from_utf8_lossy(id)).unwrap_or(now);
        taken.push(now.saturating_duration_since(since));
    }
    // While the consumer found its partitions, events waited for it.
    let mut taken = taken.split_off(total / 10);
    taken.sort_unstable();
    let at = |percent: usize| taken[taken.len() * percent / 100].as_secs_f64() * 1_000.0;
    Quantiles { median: at(50), p99: at(99) }
}
