//! One JSON envelope a line on standard output.

use async_trait::async_trait;
use tokio::io::AsyncWriteExt;

use crate::{Capabilities, Delivery, Error, Outcome, Sink, envelope};

/// Writes envelopes to standard output. Whoever reads the pipe has the event once it was flushed there;
/// nothing is promised beyond that.
#[derive(Debug, Default)]
pub struct StdoutSink {
    // Two writers would interleave lines.
    turn: tokio::sync::Mutex<()>,
}

impl StdoutSink {
    /// A sink on this process's standard output.
    pub fn new() -> Self {
        Self::default()
    }
}

#[async_trait]
impl Sink for StdoutSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let _turn = self.turn.lock().await;
        let mut lines = Vec::new();
        for delivery in batch {
            envelope::write_line(&mut lines, &delivery.event);
        }
        let mut stdout = tokio::io::stdout();
        let written = match stdout.write_all(&lines).await {
            Ok(()) => stdout.flush().await,
            error => error,
        };
        match written {
            Ok(()) => vec![Outcome::Delivered; batch.len()],
            Err(error) => {
                // A closed pipe is nobody reading: not this event's fault.
                let error = Error::unavailable("stdout", format!("cannot write to standard output: {error}"));
                vec![Outcome::Failed(error); batch.len()]
            }
        }
    }
}
