//! The sink: keys side by side, one event of a key at a time.

use std::fmt;

use airtight_core::{Capabilities, Delivery, Event, Outcome, Preview, Result, Sink, keyed::deliver_keyed};
use async_trait::async_trait;

use crate::{client::Client, config::RabbitmqConfig, encode::Writer};

/// How many batches may be under way. They share the window; a second one keeps it full while the first waits for
/// its last confirmations.
const BATCHES: usize = 4;

/// Publishes each event to an exchange; see the crate's documentation for what is sent and what an answer means.
pub struct RabbitmqSink {
    client: Client,
    writer: Writer,
}

impl RabbitmqSink {
    /// Checks the config, and nothing on the network. A permanent error names the key that is wrong.
    pub fn new(config: RabbitmqConfig) -> Result<Self> {
        let config = config.resolve()?;
        Ok(Self { writer: Writer::new(&config), client: Client::new(config) })
    }
}

impl fmt::Debug for RabbitmqSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.client.config();
        f.debug_struct("RabbitmqSink")
            .field("address", &config.address)
            .field("vhost", &config.uri.vhost)
            .field("exchange", &config.exchange)
            .field("routing_key", &config.routing_key)
            .field("format", &config.format)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Sink for RabbitmqSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, concurrency: BATCHES, ..Capabilities::default() }
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        let Ok((exchange, key)) = self.writer.names(event) else { return Vec::new() };
        let (config, exchange, key) = (self.client.config(), exchange.as_str(), key.as_str());
        let mut names: Vec<String> = config.wide(exchange, key).into_iter().collect();
        names.extend(config.narrow(exchange, key).filter(|narrow| !names.contains(narrow)));
        names
    }

    async fn open(&self) -> Result<()> {
        let link = self.client.link().await?;
        link.ensure_open()?;
        link.prepare().await
    }

    /// One connection for the whole batch: once it is lost, the rest waits for the next call.
    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if batch.is_empty() {
            return Vec::new();
        }
        let link = match self.client.link().await {
            Ok(link) => link,
            Err(error) => return vec![Outcome::Failed(error); batch.len()],
        };
        let send = async |at: usize| -> Result<()> {
            let message = self.writer.write(&batch[at].event)?;
            link.publish(&message).await
        };
        deliver_keyed(batch, self.client.config().window, async |at| send(at).await.into()).await
    }

    fn preview(&self, event: &Event) -> Result<Option<Preview>> {
        self.writer.preview(event).map(Some)
    }

    async fn close(&self) -> Result<()> {
        self.client.close().await;
        Ok(())
    }
}
