//! The sink's half of the delivery contract.

use async_trait::async_trait;

use bytes::Bytes;

use crate::{Error, Event, Result, source::Delivery};

/// Delivers a batch and answers for each event on its own.
///
/// # The contract
///
/// - **Delivered means durable.** [`Outcome::Delivered`] says that the destination has taken responsibility:
///   acknowledged, fsynced, confirmed. Buffered, written without fsync, or "probably" is not delivered.
/// - **One outcome per event**, in the order of the batch. A missing one counts as a retryable failure, so a
///   sink cannot lose an event by answering short.
/// - **Duplicates are allowed, gaps are not.** The same event may come again, after a crash or a lost lease.
/// - **A prefix per key.** Where [`Capabilities::prefix_per_key`] is set, a batch may hold several events of
///   one key, in order, and what is reported delivered for that key is a prefix of them: after the first one
///   that is not, the rest are [`Outcome::Skipped`] (or fail too), and were *not* sent. A sink that cannot
///   promise this leaves it unset and never sees two events of one key at once.
/// - **Classes.** Each failure says what it is ([`crate::Class`]): wrong classes lose nothing, but they
///   dead-letter healthy events or retry hopeless ones.
/// - **Scope.** What is *unavailable* is the whole sink, or one of several destinations ([`Error::at`]). A failure of
///   one destination leaves the events for the others in the batch to be delivered.
/// - **Concurrency.** `deliver` is called [`Capabilities::concurrency`] times side by side at most, never
///   twice for one key.
/// - **Bounds.** A sink buffers no more than the batch it was given, and has timeouts of its own.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// What this sink promises and wants.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Connects and checks, called before the first batch and again after the circuit was open. An
    /// *unavailable* or *retryable* error here keeps the circuit open; a *permanent* one stops the relay.
    async fn open(&self) -> Result<()> {
        Ok(())
    }

    /// Delivers a batch; see the contract.
    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome>;

    /// The destinations of an event that may be away while others are not, widest first: an exchange, and a routing key
    /// of that exchange. Names as in [`Error::at`]. Empty where all events have the same destination: then the whole
    /// sink is away with it. Asked only while a destination is away, or an error names one.
    fn destinations(&self, _event: &Event) -> Vec<String> {
        Vec::new()
    }

    /// The event as it would be sent, for a person to look at; none where there is nothing to show. Sends nothing
    /// and needs no connection.
    fn preview(&self, _event: &Event) -> Result<Option<Preview>> {
        Ok(None)
    }

    /// Flushes and disconnects. Nothing is called after it.
    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// What a sink promises and wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Reports a prefix per key; see [`Sink`].
    pub prefix_per_key: bool,
    /// How many `deliver` calls may run side by side.
    pub concurrency: usize,
    /// The most events in one call.
    pub max_batch_events: usize,
    /// The most bytes in one call, though always at least one event.
    pub max_batch_bytes: usize,
    /// Makes more of an event that has its row ([`Event::row`]), so a source that can should keep it.
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
    /// Where to, in the broker's own words: `topic orders`, `subject orders.placed`.
    pub destination: String,
    /// The key, where there is such a thing.
    pub key: Option<String>,
    /// Headers, or whatever the broker calls them.
    pub headers: Vec<(String, String)>,
    /// The body; none is a tombstone.
    pub body: Option<Bytes>,
}

impl Preview {
    /// Of a message on its way to `destination`.
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

/// What a sink says of one event.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// The destination has it, durably.
    Delivered,
    /// The destination says that it had it already, from an earlier try whose outcome was lost: as good as delivered.
    Duplicate,
    /// The same as delivered, and the source's record of it was written in the same transaction.
    Committed,
    /// It was refused or not accepted; the error's class says what follows.
    Failed(Error),
    /// It may or may not have happened, and trying again would be wrong (an order that timed out).
    Unknown(Error),
    /// Not tried, because an earlier event of its key failed.
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
