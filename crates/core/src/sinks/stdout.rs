//! One JSON envelope per line on standard output.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};

use async_trait::async_trait;
use tokio::io::{AsyncWrite, AsyncWriteExt};

use crate::{Capabilities, Class, Code, Delivery, Error, Outcome, Result, Sink, envelope};

/// The reader has closed the pipe, as `head` does when it has enough. This ends the relay, and is no failure.
pub fn reader_gone(class: Class) -> Error {
    Error::new(
        class,
        Code::READER_GONE,
        "the reader of standard output has closed the pipe; events that were not written stay in the outbox",
    )
}

/// Writes envelopes to standard output. An event counts as delivered when it was flushed to the pipe; nothing is
/// promised about what the reader does with it. When the reader closes the pipe, the relay ends.
pub struct StdoutSink {
    out: tokio::sync::Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
    closed: AtomicBool,
}

impl StdoutSink {
    /// A sink on this process's standard output.
    pub fn new() -> Self {
        Self::to(tokio::io::stdout())
    }

    /// A sink on any other writer.
    pub fn to(out: impl AsyncWrite + Send + Unpin + 'static) -> Self {
        Self { out: tokio::sync::Mutex::new(Box::new(out)), closed: AtomicBool::new(false) }
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

    async fn open(&self) -> Result<()> {
        if self.closed.load(Ordering::Relaxed) { Err(reader_gone(Class::Permanent)) } else { Ok(()) }
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
                // The events are not the cause. A permanent error here would make them dead, so only the next `open`
                // reports that a closed pipe is permanent.
                let error = if error.kind() == io::ErrorKind::BrokenPipe {
                    self.closed.store(true, Ordering::Relaxed);
                    reader_gone(Class::Unavailable)
                } else {
                    Error::unavailable(Code::IO, format!("cannot write to standard output: {error}"))
                };
                vec![Outcome::Failed(error); batch.len()]
            }
        }
    }
}
