//! The sink conformance suite against a RabbitMQ node of its own, restarts and a changed password included.
//!
//! The suite's hook for one refused event is left out: a broker refuses a message for its size or its headers, not
//! for its id. `tests/rabbitmq.rs` has the same checks with a message over the limit.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_rabbitmq::RabbitmqSink;
use airtight_testkit::{
    brokers::rabbitmq::RabbitmqServer,
    sinks::{Hooks, Received, SinkUnderTest, conformance},
};
use async_trait::async_trait;
use lapin::types::{AMQPValue, FieldTable};
use tokio::sync::Mutex;

use crate::support::{Hand, sink};

const QUEUE: &str = "conformance";
/// Who reads, and is never turned away.
const READER: &str = "reader";

struct Broker {
    server: RabbitmqServer,
    format: &'static str,
    /// What was taken from the queue so far, in order.
    taken: Mutex<Vec<Received>>,
}

impl Broker {
    async fn start(test_name: &str, format: &'static str, queue_type: &str) -> Option<Self> {
        let server = RabbitmqServer::start(test_name).await?;
        server.ctl(&["add_user", READER, READER]);
        server.ctl(&["set_permissions", READER, ".*", ".*", ".*"]);
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(queue_type.into()));
        Hand::on(&server.url_as(READER, READER)).await.make_queue(QUEUE, arguments).await;
        Some(Self { server, format, taken: Mutex::default() })
    }
}

#[async_trait]
impl SinkUnderTest for Broker {
    type Sink = RabbitmqSink;

    async fn sink(&self) -> RabbitmqSink {
        sink(&self.server.url(), &[("routing_key", QUEUE), ("format", self.format)])
    }

    async fn received(&self) -> Vec<Received> {
        let mut taken = self.taken.lock().await;
        for message in Hand::on(&self.server.url_as(READER, READER)).await.drain(QUEUE).await {
            taken.push(match self.format {
                "envelope" => Received::from_envelope(&message.data).expect("an envelope"),
                _ => {
                    let headers = message.properties.headers().clone().unwrap();
                    let header = |name: &str| match headers.inner().get(name) {
                        Some(AMQPValue::LongString(text)) => text.to_string(),
                        other => panic!("the header {name} is {other:?}"),
                    };
                    Received {
                        id: header("id"),
                        key: header("aggregateId"),
                        seq: header("seq").parse().unwrap(),
                        body: message.data.clone(),
                    }
                }
            });
        }
        taken.clone()
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, can_refuse: false, can_be_unavailable: true }
    }

    async fn stop(&self) {
        self.server.process().stop().await;
    }

    async fn start(&self) {
        self.server.process().start_again().await;
    }

    /// A changed password, and nobody stays logged in.
    async fn turn_away(&self, everyone: bool) {
        let password = if everyone { "changed" } else { RabbitmqServer::PASSWORD };
        self.server.ctl(&["change_password", RabbitmqServer::USER, password]);
        if everyone {
            self.server.ctl(&["close_all_connections", "the password has changed"]);
        }
    }

    fn large_payload(&self) -> usize {
        4 * 1024 * 1024
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn envelopes_conform() {
    if let Some(broker) = Broker::start("envelopes_conform", "envelope", "classic").await {
        conformance(broker).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_payloads_conform() {
    if let Some(broker) = Broker::start("raw_payloads_conform", "raw", "quorum").await {
        conformance(broker).await;
    }
}
