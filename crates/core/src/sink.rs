//! The sink's half of the delivery contract.

use async_trait::async_trait;

use bytes::Bytes;

use crate::{Error, Event, Result, source::Delivery};

/// Delivers a batch, and reports an outcome for each event.
///
/// # The contract
///
/// - **Delivered means durable.** [`Outcome::Delivered`] says that the destination has taken responsibility for the
///   event: it was acknowledged, fsynced or confirmed. An event that was only buffered, written without fsync, or
///   "probably" stored is not delivered.
/// - **One outcome per event**, in the order of the batch. A missing outcome counts as a retryable failure, so a
///   sink that returns too few outcomes loses no event.
/// - **Duplicates are allowed, gaps are not.** A sink may get the same event again, after a crash or a lost lease.
/// - **A prefix per key.** Where [`Capabilities::prefix_per_key`] is set, a batch may hold several events of
///   one key, in order, and the events that the sink reports as delivered for that key are a prefix of them: after the
///   first event that is not delivered, the rest are [`Outcome::Skipped`] (or fail too), and were *not* sent. A sink
///   that cannot promise this leaves it unset and never gets two events of one key at once.
/// - **Classes.** Each failure has a class ([`crate::Class`]). A wrong class loses no event, but it
///   dead-letters healthy events or retries hopeless ones.
/// - **Scope.** An *unavailable* error is about the whole sink, or about one of several destinations ([`Error::at`]).
///   When one destination fails, the sink still delivers the events of the batch that are for the others.
/// - **Concurrency.** At most [`Capabilities::concurrency`] calls of `deliver` run at the same time, and never
///   two for one key.
/// - **Bounds.** A sink buffers no more than the batch that it was given, and has its own timeouts.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// What this sink promises and needs.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Connects and checks the connection. Called before the first batch, and again after the circuit was open. An
    /// *unavailable* or *retryable* error here keeps the circuit open; a *permanent* one stops the relay.
    async fn open(&self) -> Result<()> {
        Ok(())
    }

    /// Delivers a batch; see the contract.
    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome>;

    /// The destinations of an event that may be unavailable while others work, widest first: an exchange, then a routing
    /// key of that exchange. The names are the same as in [`Error::at`]. Empty if all events have the same destination:
    /// then the whole sink is unavailable with it. Called only while a destination is unavailable, or when an error
    /// names one.
    fn destinations(&self, _event: &Event) -> Vec<String> {
        Vec::new()
    }

    /// The event as it would be sent, for a person to read; none if there is nothing to show. Sends nothing, and needs no
    /// connection.
    fn preview(&self, _event: &Event) -> Result<Option<Preview>> {
        Ok(None)
    }

    /// Flushes and disconnects. No method is called after `close`.
    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// What a sink promises and needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Reports a prefix per key; see [`Sink`].
    pub prefix_per_key: bool,
    /// How many `deliver` calls may run at the same time.
    pub concurrency: usize,
    /// The most events in one call.
    pub max_batch_events: usize,
    /// The most bytes in one call. A call may always have one event, however large.
    pub max_batch_bytes: usize,
    /// The sink uses the row of an event ([`Event::row`]), so a source that can keep the row should do so.
    pub wants_rows: bool,
}

impl Default for Capabilities {
    /// Batches one after the other, without a promise about keys.
    fn default() -> Self {
        Self {
            prefix_per_key: false,
            concurrency: 1,
            max_batch_events: 1_000,
            max_batch_bytes: 8 << 20,
            wants_rows: false,
        }
    }
}

/// A message as a sink would send it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preview {
    /// The destination, in the broker's terms: `topic orders`, `subject orders.placed`.
    pub destination: String,
    /// The key, if messages of this broker have one.
    pub key: Option<String>,
    /// The headers, under whatever name the broker gives them.
    pub headers: Vec<(String, String)>,
    /// The body; none for a tombstone.
    pub body: Option<Bytes>,
}

impl Preview {
    /// The preview of a message to `destination`.
    pub fn new(
        destination: impl Into<String>,
        key: Option<&str>,
        message: crate::format::Message<'_>,
    ) -> Self {
        let mut headers: Vec<(String, String)> = message
            .headers
            .into_iter()
            .map(|(name, value)| (name.into_owned(), value.into_owned()))
            .collect();
        if let Some(content_type) = message.content_type {
            headers.push(("content-type".into(), content_type.into()));
        }
        Self { destination: destination.into(), key: key.map(str::to_owned), headers, body: message.body }
    }
}

/// What a sink reports for one event.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// The destination has stored the event durably.
    Delivered,
    /// The destination says that it already had the event, from an earlier try whose outcome was lost. This counts as
    /// delivered.
    Duplicate,
    /// The event was delivered, and the source's record of this was written in the same transaction.
    Committed,
    /// The event was not accepted; the error's class says what happens next.
    Failed(Error),
    /// The delivery may or may not have happened, and a second try would be wrong (an order that timed out).
    Unknown(Error),
    /// The delivery was not tried, because an earlier event of its key failed.
    Skipped,
}

impl Outcome {
    /// Whether the destination has the event.
    pub fn is_delivered(&self) -> bool {
        matches!(self, Self::Delivered | Self::Duplicate | Self::Committed)
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Delivered
    }
}

impl<T: Into<Outcome>> From<Result<T>> for Outcome {
    fn from(result: Result<T>) -> Self {
        match result {
            Ok(value) => value.into(),
            Err(error) => Self::Failed(error),
        }
    }
}
