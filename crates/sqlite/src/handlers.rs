//! Handlers that write to the same file: their writes, the inbox's entry and the offset in one transaction.
//!
//! Each batch is one transaction, and each event a savepoint in it. An event that fails is rolled back to its
//! savepoint; only the later events of its key are affected, which are not tried. If the process is killed at any point,
//! either all of the batch is stored or nothing; and the inbox recognizes an event that comes again. So each event takes
//! effect on the file exactly once.

use std::{
    collections::{HashMap, HashSet},
    panic::AssertUnwindSafe,
    sync::Arc,
};

use airtight_core::{
    Capabilities, Class, Code, Delivery, Error, Outcome, Position, Result, Sink,
    dispatch::{Context, decode},
    inbox::DedupeKey,
    log::{Committing, Log},
};
use async_trait::async_trait;
use futures::{FutureExt, future::BoxFuture};
use serde::de::DeserializeOwned;
use sqlx::{Connection, SqliteConnection};

use crate::{
    error::db,
    inbox::Inbox,
    log::{SqliteLog, settle_in},
    outbox::SqliteOutbox,
};

/// While a batch's transaction is open nobody else can write to the file, and leases are not renewed.
const MAX_BATCH: usize = 100;

type Handler =
    Arc<dyn for<'a> Fn(Context, &'a mut SqliteConnection) -> BoxFuture<'a, Result<()>> + Send + Sync>;

/// Handlers by event type, each with the connection of the transaction that its event is settled in.
///
/// ```
/// # async fn example(outbox: airtight_sqlite::SqliteOutbox) {
/// use airtight_core::{Code, Error, log::LogOptions};
/// use airtight_sqlite::SqliteHandlers;
/// use futures::FutureExt;
/// use sqlx::SqliteConnection;
///
/// #[derive(serde::Deserialize)]
/// struct OrderPlaced { total: i64 }
///
/// let log = outbox.log(LogOptions::consumer("billing"));
/// let handlers = SqliteHandlers::new(&outbox, "billing")
///     .on::<OrderPlaced, _>("OrderPlaced", |order, _ctx, conn: &mut SqliteConnection| {
///         async move {
///             sqlx::query("UPDATE revenue SET total = total + ?1")
///                 .bind(order.total)
///                 .execute(conn)
///                 .await
///                 .map_err(|error| Error::retryable(Code::custom("revenue"), error.to_string()))?;
///             Ok(())
///         }
///         .boxed()
///     })
///     .with_log(&log);
/// # let _ = handlers;
/// # }
/// ```
///
/// A handler writes through the connection it is given, and neither commits nor rolls back. Writing through
/// another one would wait for itself.
#[derive(Clone)]
pub struct SqliteHandlers {
    outbox: SqliteOutbox,
    consumer: String,
    inbox: Inbox,
    dedupe: DedupeKey,
    handlers: HashMap<String, Handler>,
    fallback: Option<Handler>,
    log: Option<Log<SqliteLog>>,
}

impl SqliteHandlers {
    /// One without handlers, for the file of `outbox`; `consumer` is whom the inbox remembers events for. Without
    /// a handler, and without [`SqliteHandlers::otherwise`], an event is dead with the code `no_handler`.
    pub fn new(outbox: &SqliteOutbox, consumer: impl Into<String>) -> Self {
        Self {
            outbox: outbox.clone(),
            consumer: consumer.into(),
            inbox: outbox.inbox(),
            dedupe: outbox.table().log.dedupe.clone(),
            handlers: HashMap::new(),
            fallback: None,
            log: None,
        }
    }

    /// Which events count as the same; what the table's spec says, unless set.
    #[must_use]
    pub fn dedupe(mut self, key: DedupeKey) -> Self {
        self.dedupe = key;
        self
    }

    /// Handles events of this type. A payload that is not a `T` is a permanent error.
    #[must_use]
    pub fn on<T, F>(mut self, event_type: impl Into<String>, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        F: for<'a> Fn(T, Context, &'a mut SqliteConnection) -> BoxFuture<'a, Result<()>>
            + Send
            + Sync
            + 'static,
    {
        let erased: Handler = Arc::new(move |context: Context, conn: &mut SqliteConnection| {
            match decode::<T>(&context.event) {
                Ok(payload) => handler(payload, context, conn),
                Err(error) => Box::pin(std::future::ready(Err(error))),
            }
        });
        self.handlers.insert(event_type.into(), erased);
        self
    }

    /// Handles events that no other handler is for.
    #[must_use]
    pub fn otherwise<F>(mut self, handler: F) -> Self
    where
        F: for<'a> Fn(Context, &'a mut SqliteConnection) -> BoxFuture<'a, Result<()>> + Send + Sync + 'static,
    {
        self.fallback = Some(Arc::new(handler));
        self
    }

    /// Moves this log's offsets in the same transaction. It must be in the same file, and be the source of the
    /// relay that these handlers are the sink of.
    #[must_use]
    pub fn with_log(mut self, log: &Log<SqliteLog>) -> Self {
        self.log = Some(log.clone());
        self
    }

    async fn batch(&self, batch: &[Delivery]) -> Result<Vec<Outcome>> {
        // Before the transaction: a settle that has this turn waits for the file's write lock.
        let mut committing = match &self.log {
            Some(log) => Some(log.committing(&positions(batch.iter())).await),
            None => None,
        };
        let mut tx = self.outbox.begin().await?;
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut failed: HashSet<&str> = HashSet::new();
        for delivery in batch {
            let key = delivery.event.aggregate_id.as_str();
            if failed.contains(key) {
                outcomes.push(Outcome::Skipped);
                continue;
            }
            let outcome = self.one(tx.conn(), delivery).await?;
            if !matches!(outcome, Outcome::Delivered) {
                failed.insert(key);
            }
            outcomes.push(outcome);
        }
        if let Some(committing) = &mut committing {
            let done =
                batch.iter().zip(&outcomes).filter(|(_, outcome)| matches!(outcome, Outcome::Delivered));
            committing.replan(&positions(done.map(|(delivery, _)| delivery)));
            self.settle(tx.conn(), committing).await?;
        }
        tx.commit().await?;
        if let Some(committing) = committing {
            committing.done();
            for outcome in &mut outcomes {
                if matches!(outcome, Outcome::Delivered) {
                    *outcome = Outcome::Committed;
                }
            }
        }
        Ok(outcomes)
    }

    /// One event in its savepoint. An error is of the transaction, not of the event.
    async fn one(&self, conn: &mut SqliteConnection, delivery: &Delivery) -> Result<Outcome> {
        let mut savepoint = conn.begin().await.map_err(db)?;
        match self.handle(&mut savepoint, delivery).await {
            Ok(()) => {
                savepoint.commit().await.map_err(db)?;
                Ok(Outcome::Delivered)
            }
            Err(error) => {
                savepoint.rollback().await.map_err(db)?;
                Ok(Outcome::Failed(error))
            }
        }
    }

    async fn handle(&self, conn: &mut SqliteConnection, delivery: &Delivery) -> Result<()> {
        let event = &delivery.event;
        let Some(handler) = self.handlers.get(&event.event_type).or(self.fallback.as_ref()) else {
            let mut known: Vec<&str> = self.handlers.keys().map(String::as_str).collect();
            known.sort_unstable();
            return Err(Error::permanent(
                Code::NO_HANDLER,
                format!("no handler for event type `{}`; there are: {}", event.event_type, known.join(", ")),
            ));
        };
        let key = self.dedupe.of(event)?;
        let new = match &self.log {
            Some(_) => self.inbox.first_time_at(conn, &self.consumer, &key, event.seq).await?,
            // From elsewhere its seq would mean nothing to this file's log.
            None => self.inbox.first_time(conn, &self.consumer, &key).await?,
        };
        if !new {
            return Ok(());
        }
        let context = Context { event: Arc::new(event.clone()), attempt: delivery.attempt };
        // The call is inside as well: a handler may panic before it returns its future.
        let handled = AssertUnwindSafe(async { handler(context, conn).await });
        match handled.catch_unwind().await {
            Ok(handled) => handled,
            Err(_) => Err(Error::retryable(Code::PANIC, "the handler panicked")),
        }
    }

    /// Each event in a transaction of its own: something only the commit has found (a deferred constraint), and
    /// only one of them need be to blame.
    async fn one_by_one(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(batch.len());
        let mut failed: HashSet<&str> = HashSet::new();
        for delivery in batch {
            let key = delivery.event.aggregate_id.as_str();
            let outcome = if failed.contains(key) {
                Outcome::Skipped
            } else {
                match self.batch(std::slice::from_ref(delivery)).await {
                    Ok(outcomes) => outcomes.into_iter().next().unwrap_or(Outcome::Skipped),
                    Err(error) => Outcome::Failed(error),
                }
            };
            if !matches!(outcome, Outcome::Delivered | Outcome::Committed) {
                failed.insert(key);
            }
            outcomes.push(outcome);
        }
        outcomes
    }

    async fn settle(
        &self,
        conn: &mut SqliteConnection,
        committing: &Committing<'_, SqliteLog>,
    ) -> Result<()> {
        let fenced = || {
            Error::retryable(
                Code::FENCED,
                "another relay owns these events now, or a seek has moved the consumer",
            )
        };
        if committing.is_fenced() {
            return Err(fenced());
        }
        let refused = settle_in(conn, self.outbox.sql(), committing.member(), committing.changes()).await?;
        if refused.is_empty() { Ok(()) } else { Err(fenced()) }
    }
}

fn positions<'a>(deliveries: impl Iterator<Item = &'a Delivery>) -> Vec<Position> {
    deliveries.map(|delivery| delivery.position).collect()
}

#[async_trait]
impl Sink for SqliteHandlers {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            prefix_per_key: true,
            concurrency: 1,
            max_batch_events: MAX_BATCH,
            ..Capabilities::default()
        }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        match self.batch(batch).await {
            Ok(outcomes) => outcomes,
            Err(error) if error.is(&Code::CONSTRAINT) && error.class() == Class::Permanent => {
                self.one_by_one(batch).await
            }
            // Nothing of it was kept, and none of the events is to blame.
            Err(error) => {
                let error = error.with_class(Class::Retryable);
                batch.iter().map(|_| Outcome::Failed(error.clone())).collect()
            }
        }
    }
}
