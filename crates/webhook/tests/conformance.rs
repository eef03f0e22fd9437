//! The sink conformance suite over a real socket, restarts included, for both formats: what a receiver gets
//! back out of a request is what the outbox held.

#![allow(clippy::unwrap_used, reason = "this whole file is a test")]

use airtight_testkit::{
    deliveries::percent_decode,
    http::{HttpServer, Reply},
    sinks::{Hooks, Received, SinkUnderTest, conformance},
};
use airtight_webhook::{Format, WebhookConfig, WebhookSink};
use async_trait::async_trait;

struct Webhook {
    server: HttpServer,
    format: Format,
}

impl Webhook {
    async fn new(format: Format) -> Self {
        Self { server: HttpServer::start().await, format }
    }
}

#[async_trait]
impl SinkUnderTest for Webhook {
    type Sink = WebhookSink;

    async fn sink(&self) -> WebhookSink {
        let config = WebhookConfig::new(self.server.url("/hooks")).secret("test").format(self.format);
        WebhookSink::new(config).unwrap()
    }

    async fn received(&self) -> Vec<Received> {
        let accepted = self.server.requests().into_iter().filter(|request| request.answered == Some(200));
        let read = accepted.map(|request| match self.format {
            Format::Envelope => Received::from_envelope(&request.body).expect("the body is an envelope"),
            _ => Received {
                id: percent_decode(request.header("webhook-id").expect("every request has its id")),
                key: percent_decode(request.header("airtight-aggregate-id").expect("these keys fit")),
                seq: request.header("airtight-seq").expect("every request has it").parse().unwrap(),
                body: request.body,
            },
        });
        read.collect()
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, can_refuse: true, can_be_unavailable: true }
    }

    async fn stop(&self) {
        self.server.stop().await;
    }

    async fn start(&self) {
        self.server.restart().await;
    }

    async fn refuse(&self, event_id: Option<&str>) {
        let refused = event_id.map(str::to_owned);
        self.server.rule(move |request| match refused.as_deref() {
            Some(id) if request.header("webhook-id") == Some(id) => Reply::status(422),
            _ => Reply::status(200),
        });
    }

    async fn turn_away(&self, everyone: bool) {
        self.server.rule(move |_| Reply::status(if everyone { 401 } else { 200 }));
    }

    fn large_payload(&self) -> usize {
        4 * 1024 * 1024
    }
}

#[tokio::test]
async fn envelopes_conform() {
    conformance(Webhook::new(Format::Envelope).await).await;
}

#[tokio::test]
async fn raw_payloads_conform() {
    conformance(Webhook::new(Format::Raw).await).await;
}
