//! What the tests share: sinks, deliveries, and a way to read a queue that is not the sink's own.

#![allow(dead_code, reason = "each test file uses its part of it")]

use std::time::Duration;

use airtight_core::{Delivery, Outcome, Sink, format::Formats};
use airtight_rabbitmq::{RabbitmqConfig, RabbitmqSink};
use lapin::{
    Connection, ConnectionProperties,
    message::BasicGetMessage,
    options::{BasicGetOptions, QueueDeclareOptions, QueueDeleteOptions},
    types::FieldTable,
};
use uuid::Uuid;

/// What sinks here may be told to write.
const FORMATS: Formats = Formats::with(&[airtight_debezium::FORMAT]);

/// How long a test waits for what must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A sink on the broker at `url`, with these keys on top.
pub(crate) fn sink(url: &str, keys: &[(&str, &str)]) -> RabbitmqSink {
    let mut config = RabbitmqConfig::from_url_with(url, FORMATS).unwrap();
    for (key, value) in keys {
        config.set(key, value).unwrap();
    }
    RabbitmqSink::new(config).unwrap()
}

/// A name that nobody else has.
pub(crate) fn unique(what: &str) -> String {
    format!("{what}-{}", Uuid::now_v7().simple())
}

pub(crate) async fn deliver_one(sink: &RabbitmqSink, delivery: &Delivery) -> Outcome {
    sink.deliver(std::slice::from_ref(delivery)).await.pop().unwrap()
}

/// A second client of the broker, for what a test does behind the sink's back.
pub(crate) struct Hand(Connection);

impl Hand {
    pub(crate) async fn on(url: &str) -> Self {
        Self(Connection::connect(url, ConnectionProperties::default()).await.unwrap())
    }

    pub(crate) async fn channel(&self) -> lapin::Channel {
        self.0.create_channel().await.unwrap()
    }

    pub(crate) async fn make_queue(&self, name: &str, arguments: FieldTable) {
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel().await.queue_declare(name.into(), options, arguments).await.unwrap();
    }

    pub(crate) async fn delete_queue(&self, name: &str) {
        self.channel().await.queue_delete(name.into(), QueueDeleteOptions::default()).await.unwrap();
    }

    /// Takes all that is in a queue.
    pub(crate) async fn drain(&self, queue: &str) -> Vec<BasicGetMessage> {
        let channel = self.channel().await;
        let mut messages = Vec::new();
        let options = BasicGetOptions { no_ack: true };
        while let Some(message) = channel.basic_get(queue.into(), options).await.unwrap() {
            messages.push(message);
        }
        messages
    }

    /// The ids of the messages in a queue, in order.
    pub(crate) async fn ids(&self, queue: &str) -> Vec<String> {
        let messages = self.drain(queue).await;
        messages.iter().map(|message| message.properties.message_id().clone().unwrap().to_string()).collect()
    }
}

/// As many bytes as this process has in memory.
pub(crate) fn resident_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// As many threads as this process has.
pub(crate) fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}
