//! One JSON envelope a line on standard output.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
};

use async_trait::async_trait;
use tokio::io::{AsyncWrite, AsyncWriteExt};

use crate::{Capabilities, Class, Code, Delivery, Error, Outcome, Result, Sink, envelope};

/// The pipe was closed at its other end, as `head` does when it has enough: the end of a relay, and no failure.
pub fn reader_gone(class: Class) -> Error {
    Error::new(
        class,
        Code::READER_GONE,
        "nobody reads standard output any more; events that were not written stay in the outbox",
    )
}

/// Writes envelopes to standard output. Whoever reads the pipe has the event once it was flushed there;
/// nothing is promised beyond that. When the reader closes the pipe, the relay ends.
pub struct StdoutSink {
    out: tokio::sync::Mutex<Box<dyn AsyncWrite + Send + Unpin>>,
    closed: AtomicBool,
}

impl StdoutSink {
    /// A sink on this process's standard output.
    pub fn new() -> Self {
        Self::to(tokio::io::stdout())
    }

    /// The same on anything else that takes bytes.
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
                // None of it is these events' fault. A permanent error here would make them dead, so the relay
                // hears only from the next `open` that a closed pipe is for good.
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
