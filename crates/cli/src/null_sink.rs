//! The sink `null:` accepts every event and discards it, to measure an outbox without a sink.

use airtight::{Capabilities, Delivery, Outcome, Sink};
use async_trait::async_trait;

/// Reports every event as delivered, and discards it.
#[derive(Debug)]
pub(crate) struct NullSink;

#[async_trait]
impl Sink for NullSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        vec![Outcome::Delivered; batch.len()]
    }
}
