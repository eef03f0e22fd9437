//! One JSON envelope a line on standard output.

use async_trait::async_trait;
use tokio::io::{AsyncWrite, AsyncWriteExt};

use crate::{Capabilities, Delivery, Error, Outcome, Sink, envelope};

/// Writes envelopes to standard output. Whoever reads the pipe has the event once it was flushed there;
/// nothing is promised beyond that.
pub struct StdoutSink {
    out: tokio::sync::Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
}

impl StdoutSink {
    /// A sink on this process's standard output.
    pub fn new() -> Self {
        Self::to(tokio::io::stdout())
    }

    /// The same on anything else that takes bytes.
    pub fn to(out: impl AsyncWrite + Send + Unpin + 'static) -> Self {
        Self { out: tokio::sync::Mutex::new(Box::new(out)) }
    }
}

impl Default for StdoutSink {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Sink for StdoutSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut lines = Vec::new();
        for delivery in batch {
            envelope::write_line(&mut lines, &delivery.event);
        }
        let mut out = self.out.lock().await;
        let written = match out.write_all(&lines).await {
            Ok(()) => out.flush().await,
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
