//! `null:`, which takes everything and keeps nothing: measures an outbox without measuring a sink.

use airtight::{Capabilities, Delivery, Outcome, Sink};
use async_trait::async_trait;

/// Reports everything delivered. What passes through here is gone.
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
