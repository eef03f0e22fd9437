//! The sink conformance suite against a real JetStream, killed and started again, for a format with everything in
//! the body and one with everything in the headers.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::Format;
use airtight_nats::{NatsConfig, NatsSink};
use airtight_testkit::{
    brokers::nats::NatsServer,
    sinks::{Hooks, Received, SinkUnderTest, conformance},
};
use async_nats::jetstream::stream::Config;
use async_trait::async_trait;
use support::{Stored, create_stream, jetstream, stored};

const ADMIN: (&str, &str) = ("admin", "admin");

struct Nats {
    server: NatsServer,
    format: Format,
}

impl Nats {
    /// Events go to subjects that hold their ids, so that the server can be told to refuse one of them: it maps that
    /// subject to one of a second stream, which takes no message of more than a byte.
    async fn start(test_name: &str, format: Format) -> Option<Self> {
        let server = NatsServer::start_with(test_name, |_| server_config("relay", None)).await?;
        let nats = Self { server, format };
        let jetstream = jetstream(&nats.server.address(), Some(ADMIN)).await;
        let stream = |name: &str, subject: &str, max_message_size| Config {
            name: name.into(),
            subjects: vec![subject.into()],
            max_message_size,
            ..Config::default()
        };
        create_stream(&jetstream, stream("EVENTS", "events.>", -1)).await;
        create_stream(&jetstream, stream("TINY", "tiny", 1)).await;
        Some(nats)
    }
}

fn server_config(password: &str, refused: Option<&str>) -> String {
    let mapping = refused.map(|id| format!("mappings {{ \"events.{id}\": tiny }}")).unwrap_or_default();
    format!(
        "accounts {{ A {{
            jetstream: enabled
            {mapping}
            users: [ {{ user: admin, password: admin }}, {{ user: relay, password: \"{password}\" }} ]
        }} }}"
    )
}

#[async_trait]
impl SinkUnderTest for Nats {
    type Sink = NatsSink;

    async fn sink(&self) -> NatsSink {
        let mut config = NatsConfig::new(self.server.address());
        config.user = Some("relay".into());
        config.password = Some("relay".into());
        config.subject = "events.{id}".into();
        config.format = self.format;
        NatsSink::new(config).unwrap()
    }

    async fn received(&self) -> Vec<Received> {
        let jetstream = jetstream(&self.server.address(), Some(ADMIN)).await;
        let read = |message: Stored| match self.format {
            Format::Envelope => Received::from_envelope(&message.body).expect("the body is an envelope"),
            _ => Received {
                id: message.header("id").expect("every message has its id"),
                key: message.header("aggregateId").expect("and its key"),
                seq: message.header("seq").expect("and its place").parse().unwrap(),
                body: message.body.to_vec(),
            },
        };
        stored(&jetstream, "EVENTS").await.into_iter().map(read).collect()
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, can_refuse: true, can_be_unavailable: true }
    }

    async fn stop(&self) {
        self.server.kill().await;
    }

    async fn start(&self) {
        self.server.start_again().await;
    }

    async fn refuse(&self, event_id: Option<&str>) {
        self.server.reload(&server_config("relay", event_id)).await;
    }

    async fn turn_away(&self, everyone: bool) {
        self.server.reload(&server_config(if everyone { "another" } else { "relay" }, None)).await;
    }
}

#[tokio::test]
async fn envelopes_conform() {
    let Some(nats) = Nats::start("envelopes_conform", Format::Envelope).await else { return };
    conformance(nats).await;
}

#[tokio::test]
async fn raw_payloads_conform() {
    let Some(nats) = Nats::start("raw_payloads_conform", Format::Raw).await else { return };
    conformance(nats).await;
}
