//! The sink: one request per event, several side by side.

use std::fmt;

use airtight_core::{Capabilities, Delivery, Event, Format, Outcome, Position, Preview, Result, Sink};
use async_trait::async_trait;
use time::OffsetDateTime;

use crate::{
    client::Client,
    config::WebhookConfig,
    encode::{Signer, encode},
};

/// Posts each event to an HTTP endpoint; see the crate's documentation for what is sent and what an answer
/// means.
pub struct WebhookSink {
    client: Client,
    signer: Option<Signer>,
    format: Format,
    concurrency: usize,
}

impl WebhookSink {
    /// Checks the config, and nothing on the network. A permanent error names the key that is wrong.
    pub fn new(config: WebhookConfig) -> Result<Self> {
        let config = config.resolve()?;
        let client = Client::new(&config)?;
        Ok(Self { client, signer: config.signer, format: config.format, concurrency: config.concurrency })
    }
}

impl fmt::Debug for WebhookSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookSink")
            .field("endpoint", &self.client.endpoint().origin())
            .field("signed", &self.signer.is_some())
            .field("format", &self.format)
            .field("concurrency", &self.concurrency)
            .finish()
    }
}

#[async_trait]
impl Sink for WebhookSink {
    /// One event per call, so that a slow answer keeps nobody else waiting.
    fn capabilities(&self) -> Capabilities {
        Capabilities { concurrency: self.concurrency, max_batch_events: 1, ..Capabilities::default() }
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        self.client.endpoint().destination(event).into_iter().collect()
    }

    // `open` has nothing to check: a request that is not an event may have effects, or be refused where
    // events are not. The relay's probe is the next event itself.

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(batch.len());
        for delivery in batch {
            let now = OffsetDateTime::now_utc();
            let encoded = encode(delivery, self.format, self.signer.as_ref(), now);
            outcomes.push(self.client.send(&delivery.event, encoded).await.into());
        }
        outcomes
    }

    fn preview(&self, event: &Event) -> Result<Option<Preview>> {
        let delivery = Delivery {
            event: event.clone(),
            position: Position(0),
            attempt: 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        };
        let encoded = encode(&delivery, self.format, self.signer.as_ref(), OffsetDateTime::now_utc());
        let text =
            |value: &reqwest::header::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        let headers = encoded.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        // Refuses an event that has no URL, too.
        self.client.endpoint().of(event)?;
        let destination = format!("POST {}", self.client.endpoint().shown(event));
        Ok(Some(Preview { destination, key: None, headers, body: Some(encoded.body) }))
    }
}
