//! In-process handlers as a sink: by event type, with typed payloads.
//!
//! A handler does not know where its event came from. It returns what became of it: `Ok` is delivered, an
//! [`Error`] carries its class, and [`Outcome::Unknown`] is for calls whose result cannot be known, such as
//! an order that timed out and must not be sent again blindly.

use std::{collections::HashMap, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures::{FutureExt, future::BoxFuture};
use serde::de::DeserializeOwned;

use crate::{Capabilities, Code, Delivery, Error, Event, Outcome, Payload, Sink};

type Handler = Arc<dyn Fn(Context) -> BoxFuture<'static, Outcome> + Send + Sync>;

/// What a handler gets in addition to its payload.
#[derive(Debug, Clone)]
pub struct Context {
    /// The event.
    pub event: Arc<Event>,
    /// The number of this attempt, starting at one. Above one, an earlier attempt may have had an effect.
    pub attempt: u32,
}

/// What a handler's timeout means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnTimeout {
    /// Try again: for handlers that may run twice.
    #[default]
    Retry,
    /// The outcome is unknown: the event is kept for reconciliation, and not retried automatically.
    Unknown,
}

/// Handlers by event type.
///
/// ```
/// use airtight_core::{Dispatcher, Code, Error, Outcome, dispatch::Context};
///
/// #[derive(serde::Deserialize)]
/// struct OrderPlaced { total: u64 }
///
/// let dispatcher = Dispatcher::new()
///     .on("OrderPlaced", |order: OrderPlaced, ctx: Context| async move {
///         if order.total == 0 {
///             return Err(Error::permanent(Code::custom("empty_order"), "an order of nothing"));
///         }
///         println!("{} is {}", ctx.event.aggregate_id, order.total);
///         Ok(())
///     })
///     .on("PaymentSent", |_: serde_json::Value, _| async {
///         Outcome::Unknown(Error::retryable(Code::TIMEOUT, "the bank did not answer"))
///     });
/// # let _ = dispatcher;
/// ```
#[derive(Clone)]
pub struct Dispatcher {
    handlers: HashMap<String, Handler>,
    fallback: Option<Handler>,
    timeout: Duration,
    on_timeout: OnTimeout,
    concurrency: usize,
}

impl Default for Dispatcher {
    fn default() -> Self {
        Self {
            handlers: HashMap::new(),
            fallback: None,
            timeout: Duration::from_secs(30),
            on_timeout: OnTimeout::Retry,
            concurrency: 16,
        }
    }
}

impl Dispatcher {
    /// A dispatcher without handlers: every event would be dead with the code `no_handler`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Handles events of this type. A payload that is not a `T` is a permanent error.
    #[must_use]
    pub fn on<T, F, Fut, R>(mut self, event_type: impl Into<String>, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        F: Fn(T, Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Into<Outcome>,
    {
        let handler = Arc::new(handler);
        let erased: Handler = Arc::new(move |context: Context| {
            let handler = handler.clone();
            async move {
                match decode::<T>(&context.event) {
                    Ok(payload) => handler(payload, context).await.into(),
                    Err(error) => Outcome::Failed(error),
                }
            }
            .boxed()
        });
        self.handlers.insert(event_type.into(), erased);
        self
    }

    /// Handles events that have no handler for their type.
    #[must_use]
    pub fn otherwise<F, Fut, R>(mut self, handler: F) -> Self
    where
        F: Fn(Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: Into<Outcome> + 'static,
    {
        self.fallback = Some(Arc::new(move |context| handler(context).map(Into::into).boxed()));
        self
    }

    /// How long one handler may take (default: 30 s), and what it means if the handler takes longer.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration, meaning: OnTimeout) -> Self {
        self.timeout = timeout;
        self.on_timeout = meaning;
        self
    }

    /// How many handlers may run at the same time (default: 16), each for a different key.
    #[must_use]
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers.max(1);
        self
    }

    /// Passes one event to its handler. A consumer without a relay calls this directly.
    pub async fn dispatch(&self, event: Arc<Event>, attempt: u32) -> Outcome {
        let Some(handler) = self.handlers.get(&event.event_type).or(self.fallback.as_ref()) else {
            let known: Vec<&str> = self.handlers.keys().map(String::as_str).collect();
            return Outcome::Failed(Error::permanent(
                Code::NO_HANDLER,
                format!("no handler for event type `{}`; there are: {}", event.event_type, known.join(", ")),
            ));
        };
        let running = handler(Context { event, attempt });
        match tokio::time::timeout(self.timeout, running).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let error = Error::retryable(
                    Code::HANDLER_TIMEOUT,
                    format!("the handler took longer than {:?}", self.timeout),
                );
                match self.on_timeout {
                    OnTimeout::Retry => Outcome::Failed(error),
                    OnTimeout::Unknown => Outcome::Unknown(error),
                }
            }
        }
    }
}

#[async_trait]
impl Sink for Dispatcher {
    /// One event per call, so that a slow handler does not delay other events.
    fn capabilities(&self) -> Capabilities {
        Capabilities { concurrency: self.concurrency, max_batch_events: 1, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(batch.len());
        for delivery in batch {
            outcomes.push(self.dispatch(Arc::new(delivery.event.clone()), delivery.attempt).await);
        }
        outcomes
    }
}

/// The payload of an event as a handler expects it; anything else is a permanent error.
pub fn decode<T: DeserializeOwned>(event: &Event) -> Result<T, Error> {
    let text: &[u8] = match &event.payload {
        Payload::None => b"null",
        Payload::Json(bytes) | Payload::Bytes(bytes) => bytes,
    };
    serde_json::from_slice(text).map_err(|error| {
        Error::permanent(
            Code::BAD_PAYLOAD,
            format!("payload of {} is not what its handler expects: {error}", event.event_type),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::sample_event;

    #[derive(serde::Deserialize)]
    struct Tested {
        n: i64,
    }

    async fn outcome(dispatcher: Dispatcher, event: Event) -> Outcome {
        dispatcher.dispatch(Arc::new(event), 1).await
    }

    fn code(outcome: &Outcome) -> &str {
        match outcome {
            Outcome::Failed(error) | Outcome::Unknown(error) => error.code(),
            Outcome::Delivered | Outcome::Duplicate | Outcome::Committed => "delivered",
            Outcome::Skipped => "skipped",
        }
    }

    #[tokio::test]
    async fn payloads_are_typed_and_types_without_a_handler_are_named() {
        let dispatcher = Dispatcher::new().on("Tested", |tested: Tested, _| async move {
            assert_eq!(tested.n, 4);
        });
        assert_eq!(code(&outcome(dispatcher.clone(), sample_event(4, "k")).await), "delivered");
        let mut wrong = sample_event(4, "k");
        wrong.payload = Payload::Json("[]".into());
        assert_eq!(code(&outcome(dispatcher.clone(), wrong).await), "bad_payload");
        let mut other = sample_event(4, "k");
        other.event_type = "Other".into();
        assert_eq!(code(&outcome(dispatcher.clone(), other.clone()).await), "no_handler");
        let with_fallback = dispatcher.otherwise(|_| async {});
        assert_eq!(code(&outcome(with_fallback, other).await), "delivered");
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_is_a_retry_or_unknown_as_told() {
        let slow = || Dispatcher::new().on("Tested", |_: Tested, _| std::future::pending::<()>());
        let retried = slow().timeout(Duration::from_secs(1), OnTimeout::Retry);
        assert!(matches!(outcome(retried, sample_event(1, "k")).await, Outcome::Failed(_)));
        let unknown = slow().timeout(Duration::from_secs(1), OnTimeout::Unknown);
        assert!(matches!(outcome(unknown, sample_event(1, "k")).await, Outcome::Unknown(_)));
    }
}
