//! Handlers that write to the same database: their writes, the inbox's entry and the offset are one transaction,
//! so that each event has its effect exactly once.

use std::{
    collections::{HashMap, HashSet},
    panic::AssertUnwindSafe,
    sync::Arc,
};

use airtight_core::{
    Capabilities, Class, Code, Delivery, Error, Event, Outcome, Position, Result, Sink,
    dispatch::{Context, decode},
    inbox::DedupeKey,
    log::Log,
};
use async_trait::async_trait;
use futures::{FutureExt, future::BoxFuture};
use serde::de::DeserializeOwned;
use sqlx::{Connection, PgConnection, Postgres, Transaction};

use crate::{Inbox, PgLog, PgOutbox, error::doing};

/// What a handler returns: `?` works on errors of sqlx, of JSON and of airtight.
pub type Handled = std::result::Result<(), HandlerError>;

/// Why a handler failed, with its class.
#[derive(Debug)]
pub struct HandlerError(Error);

impl From<Error> for HandlerError {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<sqlx::Error> for HandlerError {
    /// A violated constraint or bad data is permanent, what may pass is retryable.
    fn from(error: sqlx::Error) -> Self {
        Self(doing("in a handler")(error))
    }
}

impl From<serde_json::Error> for HandlerError {
    fn from(error: serde_json::Error) -> Self {
        Self(Error::permanent(Code::BAD_PAYLOAD, format!("in a handler: {error}")))
    }
}

type Handler = Arc<dyn for<'a> Fn(Context, &'a mut PgConnection) -> BoxFuture<'a, Handled> + Send + Sync>;

/// Handlers by event type. Each handler gets a transaction.
///
/// A batch is one transaction. In it, each event has a savepoint, an entry in the inbox (an event that is already in
/// the inbox is skipped) and its handler. An event that fails is rolled back to its savepoint and retried later, by
/// itself. With [`PgHandlers::with_log`], the consumer's offset moves in that transaction, too.
///
/// ```no_run
/// # async fn example(outbox: airtight_postgres::PgOutbox) -> airtight_core::Result<()> {
/// use airtight_core::{CancellationToken, Relay, log::LogOptions};
/// use airtight_postgres::PgHandlers;
/// use futures::FutureExt;
///
/// #[derive(serde::Deserialize)]
/// struct OrderPlaced { total: i64 }
///
/// let log = outbox.log(LogOptions::consumer("billing"));
/// let handlers = PgHandlers::new(&outbox, "billing").with_log(&log).on(
///     "OrderPlaced",
///     |order: OrderPlaced, _context, tx: &mut sqlx::PgConnection| {
///         async move {
///             sqlx::query("UPDATE revenue SET total = total + $1").bind(order.total).execute(tx).await?;
///             Ok(())
///         }
///         .boxed()
///     },
/// );
/// Relay::new(log, handlers).run(CancellationToken::new()).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PgHandlers {
    outbox: PgOutbox,
    inbox: Inbox,
    consumer: String,
    dedupe: DedupeKey,
    handlers: HashMap<String, Handler>,
    fallback: Option<Handler>,
    log: Option<Log<PgLog>>,
}

impl PgHandlers {
    /// No handlers yet: every event would be dead with the code `no_handler`. `consumer` is the name in the inbox.
    pub fn new(outbox: &PgOutbox, consumer: impl Into<String>) -> Self {
        Self {
            inbox: outbox.inbox(),
            dedupe: outbox.spec().log.dedupe.clone(),
            outbox: outbox.clone(),
            consumer: consumer.into(),
            handlers: HashMap::new(),
            fallback: None,
            log: None,
        }
    }

    /// Which events count as the same in the inbox. The default is that of the table's spec.
    #[must_use]
    pub fn dedupe(mut self, dedupe: DedupeKey) -> Self {
        self.dedupe = dedupe;
        self
    }

    /// Moves this log's offset in the same transaction. It must be the log of the relay whose sink these handlers
    /// are.
    #[must_use]
    pub fn with_log(mut self, log: &Log<PgLog>) -> Self {
        self.log = Some(log.clone());
        self
    }

    /// Handles events of this type. A payload that is not a `T` is a permanent error.
    #[must_use]
    pub fn on<T, F>(mut self, event_type: impl Into<String>, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        F: for<'a> Fn(T, Context, &'a mut PgConnection) -> BoxFuture<'a, Handled> + Send + Sync + 'static,
    {
        let handler: Handler = Arc::new(move |context, conn| match decode::<T>(&context.event) {
            Ok(payload) => handler(payload, context, conn),
            Err(error) => Box::pin(std::future::ready(Err(error.into()))),
        });
        self.handlers.insert(event_type.into(), handler);
        self
    }

    /// Handles events that have no other handler.
    #[must_use]
    pub fn otherwise<F>(mut self, handler: F) -> Self
    where
        F: for<'a> Fn(Context, &'a mut PgConnection) -> BoxFuture<'a, Handled> + Send + Sync + 'static,
    {
        self.fallback = Some(Arc::new(handler));
        self
    }

    async fn handle_batch(&self, batch: &[Delivery]) -> Result<Vec<Outcome>> {
        // Without a database nothing can be handled, and no event is to blame.
        let mut session = self.outbox.session().await.map_err(unavailable)?;
        let watchdog = &self.outbox.watchdog;
        let begun = async {
            let raw = session.raw()?;
            watchdog.wait(raw.begin()).await?
        };
        let begun = begun.await.map_err(doing("beginning the handlers' transaction"));
        let mut tx = begun.map_err(unavailable)?;
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut failed_keys: HashSet<&str> = HashSet::new();
        for delivery in batch {
            let key = delivery.event.aggregate_id.as_str();
            let outcome = if failed_keys.contains(key) {
                Outcome::Skipped
            } else {
                self.handle(&mut tx, delivery).await?
            };
            if !matches!(outcome, Outcome::Delivered) {
                failed_keys.insert(key);
            }
            outcomes.push(outcome);
        }
        let commit = async |tx: Transaction<'_, Postgres>| {
            let committed = watchdog.wait(tx.commit()).await.flatten();
            committed.map_err(doing("committing the handlers' transaction"))
        };
        let Some(log) = &self.log else {
            commit(tx).await?;
            session.done();
            return Ok(outcomes);
        };
        let delivered: Vec<Position> = batch
            .iter()
            .zip(&outcomes)
            .filter(|(_, outcome)| matches!(outcome, Outcome::Delivered))
            .map(|(delivery, _)| delivery.position)
            .collect();
        let committing = log.committing(&delivered).await;
        let settled = !committing.is_fenced()
            && log
                .store()
                .settle_in(&mut tx, committing.member(), committing.changes())
                .await
                .map_err(not_their_fault)?;
        if !settled {
            return Err(Error::retryable(
                Code::FENCED,
                "another relay owns these events now, or the consumer was moved: nothing was committed",
            ));
        }
        commit(tx).await?;
        committing.done();
        session.done();
        for outcome in &mut outcomes {
            if matches!(outcome, Outcome::Delivered) {
                *outcome = Outcome::Committed;
            }
        }
        Ok(outcomes)
    }

    /// One event in a savepoint. An error of the database's connection ends the batch; one of the handler's is
    /// an outcome.
    async fn handle(&self, tx: &mut Transaction<'_, Postgres>, delivery: &Delivery) -> Result<Outcome> {
        let watchdog = &self.outbox.watchdog;
        let savepoint = watchdog.wait(tx.begin()).await.flatten();
        let mut savepoint = savepoint.map_err(doing("beginning a savepoint"))?;
        let event = Arc::new(delivery.event.clone());
        match self.run(&mut savepoint, event, delivery.attempt).await {
            Ok(()) => match watchdog.wait(savepoint.commit()).await.flatten() {
                Ok(()) => Ok(Outcome::Delivered),
                // The handler has passed over an error of the database's. Dropped, the savepoint is rolled back.
                Err(error @ sqlx::Error::Database(_)) => {
                    Ok(Outcome::Failed(doing("releasing a savepoint")(error)))
                }
                Err(error) => Err(doing("releasing a savepoint")(error)),
            },
            Err(error) => {
                let back = watchdog.wait(savepoint.rollback()).await.flatten();
                back.map_err(doing("rolling back to a savepoint"))?;
                Ok(Outcome::Failed(error))
            }
        }
    }

    async fn run(&self, conn: &mut PgConnection, event: Arc<Event>, attempt: u32) -> Result<()> {
        let Some(handler) = self.handlers.get(&event.event_type).or(self.fallback.as_ref()) else {
            return Err(Error::permanent(
                Code::NO_HANDLER,
                format!("no handler for event type `{}`", event.event_type),
            ));
        };
        let key = self.dedupe.of(&event)?;
        // The place means something to this log's consumer only.
        let seq = self.log.as_ref().map(|_| event.seq);
        let first = self.inbox.note(conn, &self.consumer, &key, seq).await.map_err(not_their_fault)?;
        if !first {
            tracing::debug!(consumer = self.consumer, eventId = event.id, "seen before; skipped");
            return Ok(());
        }
        // The call is inside as well: a handler may panic before it returns its future.
        let handled = AssertUnwindSafe(async { handler(Context { event, attempt }, conn).await });
        match handled.catch_unwind().await {
            Ok(handled) => handled.map_err(|error| error.0),
            Err(_) => Err(Error::retryable(Code::PANIC, "the handler panicked")),
        }
    }

    /// Each event in a transaction of its own: something failed that is the whole transaction's, and only one of
    /// them need be to blame.
    async fn one_by_one(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut failed_keys: HashSet<&str> = HashSet::new();
        let mut ended: Option<Error> = None;
        for delivery in batch {
            let key = delivery.event.aggregate_id.as_str();
            let outcome = match &ended {
                Some(error) => Outcome::Failed(error.clone()),
                None if failed_keys.contains(key) => Outcome::Skipped,
                None => match self.handle_batch(std::slice::from_ref(delivery)).await {
                    Ok(outcomes) => outcomes.into_iter().next().unwrap_or(Outcome::Skipped),
                    Err(error) => {
                        ended = Some(error.clone()).filter(|error| !may_be_one_events(error));
                        Outcome::Failed(error)
                    }
                },
            };
            if !matches!(outcome, Outcome::Delivered | Outcome::Committed) {
                failed_keys.insert(key);
            }
            outcomes.push(outcome);
        }
        outcomes
    }
}

/// Whether what ended a transaction may be the doing of one event in it: a constraint that is checked at its end,
/// two transactions in each other's way. Not a lost connection, or a lost partition.
fn may_be_one_events(error: &Error) -> bool {
    const MAY_PASS: [Code; 3] = [Code::SERVER_ERROR, Code::LOCKED, Code::DEADLOCK];
    error.class() == Class::Permanent || MAY_PASS.iter().any(|code| error.is(code))
}

#[async_trait]
impl Sink for PgHandlers {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            prefix_per_key: true,
            concurrency: 1,
            max_batch_events: 500,
            ..Capabilities::default()
        }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        match self.handle_batch(batch).await {
            Ok(outcomes) => outcomes,
            Err(error) if batch.len() > 1 && may_be_one_events(&error) => self.one_by_one(batch).await,
            // Nothing of the batch was committed; or, if the answer was lost, the inbox knows.
            Err(error) => vec![Outcome::Failed(error); batch.len()],
        }
    }
}

/// Without a database nothing can be handled, and no event is to blame.
fn unavailable(error: Error) -> Error {
    error.with_class(Class::Unavailable)
}

/// An inbox or an offset that cannot be written is nothing that an event could be dead for.
fn not_their_fault(error: Error) -> Error {
    match error.class() {
        Class::Permanent => unavailable(error),
        Class::Retryable | Class::Unavailable => error,
    }
}
