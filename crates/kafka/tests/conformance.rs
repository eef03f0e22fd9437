//! The contract of a sink, on a Kafka of its own that is stopped, killed and closed to us meanwhile.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::{sync::Arc, time::Duration};

use airtight_core::{Format, format::Incoming, format::decode};
use airtight_kafka::{KafkaConfig, KafkaSink};
use airtight_testkit::{
    brokers::kafka::{Kafka, KafkaOptions, Listener, PASSWORD, USER},
    sinks::{Hooks, Received, SinkUnderTest, conformance},
};
use async_trait::async_trait;

use self::support::{Seen, Tail};

const TOPIC: &str = "conformance";
const PARTITIONS: u32 = 6;

struct UnderTest {
    kafka: Arc<Kafka>,
    format: Format,
    tail: Tail,
    /// Ends it as a crash would.
    crashes: bool,
}

impl UnderTest {
    async fn start(test: &str, format: Format, crashes: bool) -> Option<Self> {
        let options = KafkaOptions { listeners: vec![Listener::Sasl], acls: true, ..KafkaOptions::default() };
        let kafka = Kafka::start_with(test, options).await?;
        kafka.create_topic(TOPIC, PARTITIONS).await;
        kafka.allow(USER, "Write", "*").await;
        let tail = Tail::new(&kafka.bootstrap(), TOPIC, PARTITIONS.try_into().unwrap());
        Some(Self { kafka: Arc::new(kafka), format, tail, crashes })
    }
}

#[async_trait]
impl SinkUnderTest for UnderTest {
    type Sink = KafkaSink;

    async fn sink(&self) -> KafkaSink {
        let url = format!(
            "kafka://{USER}:{PASSWORD}@{}/{TOPIC}?sasl=scram-sha-256&format={}&tombstones=false&compression=zstd&connect_timeout=2s",
            self.kafka.address(Listener::Sasl),
            self.format.as_str()
        );
        KafkaSink::new(KafkaConfig::from_url(&url).unwrap()).unwrap()
    }

    async fn received(&self) -> Vec<Received> {
        self.tail.seen().iter().map(|seen| received(self.format, seen)).collect()
    }

    // Kafka refuses by size only, and not one event by its id: tests/kafka.rs has what `can_refuse` would ask.
    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, can_refuse: false, can_be_unavailable: true }
    }

    async fn stop(&self) {
        if self.crashes { self.kafka.kill().await } else { self.kafka.stop().await }
    }

    async fn start(&self) {
        self.kafka.start_again().await;
    }

    async fn turn_away(&self, everyone: bool) {
        if everyone {
            self.kafka.forbid(USER, "Write", "*").await;
        } else {
            self.kafka.allow(USER, "Write", "*").await;
        }
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }
}

fn received(format: Format, seen: &Seen) -> Received {
    let incoming = Incoming {
        topic: TOPIC,
        place: format!("{}/{}", seen.partition, seen.offset),
        offset: seen.offset,
        written_at: None,
        key: seen.key.as_deref().map(str::as_bytes),
        body: seen.body.clone().map(Into::into),
        headers: seen.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect(),
    };
    Received::from(&decode(format, &incoming).unwrap())
}

#[tokio::test]
async fn the_envelope_on_a_kafka_that_is_stopped() {
    let test = "the_envelope_on_a_kafka_that_is_stopped";
    let Some(kafka) = UnderTest::start(test, Format::Envelope, false).await else { return };
    conformance(kafka).await;
}

#[tokio::test]
async fn the_payload_on_a_kafka_that_crashes() {
    let test = "the_payload_on_a_kafka_that_crashes";
    let Some(kafka) = UnderTest::start(test, Format::Raw, true).await else { return };
    conformance(kafka).await;
}
