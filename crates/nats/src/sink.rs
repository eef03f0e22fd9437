//! The sink: one event of a key at a time, many keys side by side.

use std::fmt;

use airtight_core::{Capabilities, Delivery, Event, Outcome, Preview, Result, Sink, keyed::deliver_keyed};
use async_trait::async_trait;

use crate::{client::Client, config::NatsConfig, encode::Outgoing, errors};

/// How many batches may be under way. While one waits for its last answers, the next is on its way.
const CONCURRENCY: usize = 4;

/// Publishes each event to JetStream; see the crate's documentation for what is sent and what an answer means.
pub struct NatsSink {
    client: Client,
}

impl NatsSink {
    /// Checks the config, and nothing on the network. A permanent error names the key that is wrong.
    pub fn new(config: NatsConfig) -> Result<Self> {
        Ok(Self { client: Client::new(config.resolve()?) })
    }
}

impl fmt::Debug for NatsSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.client.config();
        f.debug_struct("NatsSink")
            .field("servers", &config.shown)
            .field("subject", &config.subject)
            .field("stream", &config.stream)
            .field("format", &config.format)
            .finish()
    }
}

#[async_trait]
impl Sink for NatsSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, concurrency: CONCURRENCY, ..Capabilities::default() }
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        let subject = &self.client.config().subject;
        match (subject.constant(), subject.render(event)) {
            (None, Ok(subject)) => vec![errors::destination(&subject)],
            _ => Vec::new(),
        }
    }

    async fn open(&self) -> Result<()> {
        let connection = self.client.connection().await?;
        self.client.check_destination(&connection).await
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if batch.is_empty() {
            return Vec::new();
        }
        let connection = match self.client.connection().await {
            Ok(connection) => connection,
            Err(error) => return vec![Outcome::Failed(error); batch.len()],
        };
        let window = self.client.config().window;
        deliver_keyed(batch, window, async |at| {
            let Delivery { event, replay, .. } = &batch[at];
            let outgoing = match Outgoing::new(event, *replay, self.client.config()) {
                Ok(outgoing) => outgoing,
                Err(error) => return Outcome::Failed(error),
            };
            self.client.publish(&connection, &outgoing).await.into()
        })
        .await
    }

    fn preview(&self, event: &Event) -> Result<Option<Preview>> {
        Outgoing::new(event, None, self.client.config()).map(|outgoing| Some(outgoing.into_preview()))
    }

    async fn close(&self) -> Result<()> {
        self.client.close();
        Ok(())
    }
}
