//! One interface for publishing: a service depends on [`EventBus`] and does not know what is behind it.
//!
//! ```
//! use airtight_core::{EventBus, NewEvent, Published, Result};
//!
//! /// `Tx` is whatever the service writes its own rows with: `sqlx::PgConnection`, say.
//! async fn accept<Tx: Send>(bus: &dyn EventBus<Tx>, tx: &mut Tx, order: &str) -> Result<Published> {
//!     // … the order itself, through `tx` …
//!     bus.publish(tx, &NewEvent::new("shop.orders", "OrderAccepted", "Order", order)).await
//! }
//! ```

use async_trait::async_trait;
use time::OffsetDateTime;
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::{Code, Delivery, Error, Event, NewEvent, Outcome, Position, Published, Result, Sink};

/// Publishes events on behalf of a transaction.
///
/// An outbox implements this trait. There, the event is part of the transaction: it exists if and only if the transaction
/// commits. Any other implementation is a second write, which a crash or a rollback can separate from the first: such a
/// bus has `NonAtomic` in its name.
#[async_trait]
pub trait EventBus<Tx: ?Sized + Send>: Send + Sync {
    /// Publishes one event.
    async fn publish(&self, tx: &mut Tx, event: &NewEvent) -> Result<Published>;
}

/// Publishes directly to a sink, outside of any transaction.
///
/// `publish` returns when the broker has the event, and ignores the transaction. So, unlike with an outbox:
///
/// - **Rolled back, but published.** If the process crashes after `publish` and before the commit, or the commit fails,
///   consumers get an event for a change that never happened.
/// - **Visible too early.** A handler may run before the commit and not find the rows that the event is about.
/// - **Committed, and never published.** If `publish` is called after the commit instead, a crash in between loses
///   the event.
/// - **The broker must be available.** While it is unavailable, nothing can be published, and the transaction stays open.
///
/// Use it for events that may be wrong or missing, and for a stepwise move to a broker. Nothing is retried here: the
/// caller handles errors, including a timeout, after which the event may or may not have been published.
///
/// The `seq` of a published event is 0, and `is_new` is true: there is no outbox to get them from.
pub struct NonAtomicBus<S> {
    sink: S,
    /// Limits the calls that run at the same time to the sink's concurrency.
    calls: Semaphore,
}

impl<S: Sink> NonAtomicBus<S> {
    /// Connects.
    pub async fn open(sink: S) -> Result<Self> {
        sink.open().await?;
        let calls = Semaphore::new(sink.capabilities().concurrency.max(1));
        Ok(Self { sink, calls })
    }

    /// Disconnects.
    pub async fn close(self) -> Result<()> {
        self.sink.close().await
    }
}

#[async_trait]
impl<S: Sink, Tx: ?Sized + Send> EventBus<Tx> for NonAtomicBus<S> {
    async fn publish(&self, _not_asked: &mut Tx, event: &NewEvent) -> Result<Published> {
        event.validate()?;
        let event = placeless(event);
        let id = event.id.clone();
        let delivery = Delivery {
            event,
            position: Position(0),
            attempt: 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        };
        // Never closed, so never an error.
        let _turn = self.calls.acquire().await;
        match self.sink.deliver(&[delivery]).await.pop() {
            Some(Outcome::Delivered | Outcome::Duplicate | Outcome::Committed) => {
                Ok(Published { id, seq: 0, is_new: true })
            }
            Some(Outcome::Failed(error) | Outcome::Unknown(error)) => Err(error),
            Some(Outcome::Skipped) | None => {
                Err(Error::retryable(Code::NO_OUTCOME, "the sink gave no outcome for this event"))
            }
        }
    }
}

/// The event as an outbox would hand it out, except for its `seq`.
fn placeless(event: &NewEvent) -> Event {
    Event {
        id: event.id.unwrap_or_else(Uuid::now_v7).to_string(),
        seq: 0,
        stream: event.stream.clone(),
        event_type: event.event_type.clone(),
        aggregate_type: event.aggregate_type.clone(),
        aggregate_id: event.aggregate_id.clone(),
        op: event.op,
        payload: event.payload.clone(),
        headers: event.headers.clone(),
        occurred_at: event.occurred_at.unwrap_or_else(OffsetDateTime::now_utc),
        schema_version: event.schema_version,
        extra: serde_json::Map::new(),
        row: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Capabilities, sinks::memory::MemorySink};

    struct Refusing;

    #[async_trait]
    impl Sink for Refusing {
        fn capabilities(&self) -> Capabilities {
            Capabilities::default()
        }

        async fn deliver(&self, _: &[Delivery]) -> Vec<Outcome> {
            vec![Outcome::Failed(Error::unavailable(Code::custom("away"), "nobody there"))]
        }
    }

    #[tokio::test]
    async fn an_event_goes_straight_to_the_sink_and_its_error_to_the_caller() {
        let sink = MemorySink::new();
        let bus = NonAtomicBus::open(sink.clone()).await.unwrap();
        // Any transaction will do, since it is not asked.
        let bus: &dyn EventBus<str> = &bus;
        let mut nothing = String::new();
        let event = NewEvent::new("s", "T", "A", "1").json_text("{\"n\":1}").header("a", "b");
        let published = bus.publish(nothing.as_mut_str(), &event).await.unwrap();
        let arrived = sink.events();
        assert_eq!((arrived.len(), &arrived[0].id), (1, &published.id));
        assert_eq!((&arrived[0].payload, &arrived[0].headers), (&event.payload, &event.headers));
        let bad = NewEvent::new("", "T", "A", "1");
        assert_eq!(bus.publish(nothing.as_mut_str(), &bad).await.unwrap_err().code(), "bad_event");

        let refusing = NonAtomicBus::open(Refusing).await.unwrap();
        let error = EventBus::<()>::publish(&refusing, &mut (), &event).await.unwrap_err();
        assert_eq!(error.code(), "away");
    }
}
