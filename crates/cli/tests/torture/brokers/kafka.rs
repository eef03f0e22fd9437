//! Kafka.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use airtight_testkit::brokers::kafka::Kafka;
use async_trait::async_trait;
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};

use super::{Broker, Plan, entry, outlast, survive};
use crate::bank::{Bank, Entry};

pub(crate) const TOPIC: &str = "bank";
pub(crate) const PARTITIONS: i32 = 12;
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_between_postgres_and_kafka() {
    let test = "nothing_is_lost_between_postgres_and_kafka";
    let (Some(bank), Some(kafka)) = (Bank::postgres("to_kafka").await, Kafka::start(test).await) else {
        return;
    };
    kafka.create_topic(TOPIC, PARTITIONS.unsigned_abs()).await;
    survive(&bank, &kafka, Plan::new(10_000, 1_000)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kafka_that_is_away_costs_nothing() {
    let test = "a_kafka_that_is_away_costs_nothing";
    let (Some(bank), Some(kafka)) = (Bank::postgres("away_kafka").await, Kafka::start(test).await) else {
        return;
    };
    kafka.create_topic(TOPIC, PARTITIONS.unsigned_abs()).await;
    outlast(&bank, &kafka).await;
}

#[async_trait]
impl Broker for Kafka {
    fn to(&self) -> String {
        format!("kafka://{}/{TOPIC}", self.bootstrap())
    }

    async fn stop(&self) {
        self.kill().await;
    }

    async fn start(&self) {
        self.start_again().await;
    }

    async fn count(&self) -> usize {
        let consumer = consumer(self);
        let ends = ends(&consumer);
        usize::try_from(ends.values().sum::<i64>()).unwrap()
    }

    async fn messages(&self) -> Vec<Entry> {
        let consumer = consumer(self);
        let mut left = ends(&consumer);
        left.retain(|_, end| *end > 0);
        let mut assignment = TopicPartitionList::new();
        for partition in left.keys() {
            assignment.add_partition_offset(TOPIC, *partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&assignment).unwrap();
        let mut entries = Vec::new();
        while !left.is_empty() {
            let message = consumer.poll(PATIENCE).expect("a message within the time").unwrap();
            let entry = entry(message.payload().unwrap());
            assert_eq!(message.key(), Some(entry.key.as_bytes()));
            entries.push(entry);
            if left[&message.partition()] == message.offset() + 1 {
                left.remove(&message.partition());
            }
        }
        entries
    }
}

fn consumer(kafka: &Kafka) -> BaseConsumer {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", kafka.bootstrap()).set("group.id", "audit");
    config.set("enable.auto.commit", "false").create().unwrap()
}

/// One past the last offset of each partition. After a restart a partition has no leader for a moment.
fn ends(consumer: &BaseConsumer) -> HashMap<i32, i64> {
    let end = |partition| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match consumer.fetch_watermarks(TOPIC, partition, PATIENCE) {
                Ok((_, end)) => return (partition, end),
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        }
    };
    (0..PARTITIONS).map(end).collect()
}
