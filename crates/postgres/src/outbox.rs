//! [`PgOutbox`]: a database, a table, and what can be done with them.

use std::{sync::Arc, time::Duration};

use airtight_core::{
    Error, Result,
    queue::{Queue, QueueOptions},
    table::{Shape, TableSpec, quote},
};
use sqlx::{
    ConnectOptions, Executor, PgConnection, PgPool, Postgres, Transaction,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{error::doing, queue::PgQueue};

/// How to reach an outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PgOptions {
    /// The schema of airtight's own tables, and of the canonical outbox.
    pub schema: String,
    /// The canonical outbox's name.
    pub table: String,
    /// What the canonical outbox is made for.
    pub shape: Shape,
    /// A table of the application's own, in place of the canonical one.
    pub spec: Option<TableSpec>,
    /// The most connections this outbox opens.
    pub max_connections: u32,
    /// Whether to listen for wake-ups, where the outbox notifies.
    pub listen: bool,
    /// Where to listen, if not at the same URL: a listener needs a session, which a transaction pooler does
    /// not give.
    pub listen_url: Option<String>,
    /// Whether the outbox is to notify: a trigger that `migrate` adds or removes, or leaves as it is.
    pub notify: Option<bool>,
    /// Off behind a transaction pooler: every statement then runs unnamed, in a transaction of its own.
    /// `?statement-cache-capacity=0` in the URL does the same.
    pub prepared_statements: bool,
}

impl Default for PgOptions {
    fn default() -> Self {
        Self {
            schema: "airtight".into(),
            table: "outbox".into(),
            shape: Shape::Queue,
            spec: None,
            max_connections: 5,
            listen: true,
            listen_url: None,
            notify: None,
            prepared_statements: true,
        }
    }
}

/// An outbox in PostgreSQL. Cheap to clone.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use airtight_core::{NewEvent, admin::Admin};
/// use airtight_postgres::{PgOptions, PgOutbox};
///
/// let outbox = PgOutbox::connect("postgres://localhost/shop", PgOptions::default()).await?;
/// outbox.migrate().await?;
///
/// let mut tx = outbox.pool().begin().await?;
/// sqlx::query("UPDATE orders SET state = 'paid' WHERE id = 42").execute(&mut *tx).await?;
/// let event = NewEvent::new("shop.orders", "OrderPaid", "Order", "42").json(&serde_json::json!({"total": 12}))?;
/// outbox.publish(&mut *tx, &event).await?;
/// tx.commit().await?; // both, or neither
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct PgOutbox {
    pub(crate) pool: PgPool,
    pub(crate) options: Arc<PgOptions>,
    pub(crate) spec: Arc<TableSpec>,
    pub(crate) pooled: bool,
}

impl PgOutbox {
    /// Prepares for a database. The server need not be there yet; a URL that makes no sense is refused.
    pub async fn connect(url: &str, options: PgOptions) -> Result<Self> {
        let pooled = !options.prepared_statements || url.contains("statement-cache-capacity=0");
        let mut connect: PgConnectOptions = url.parse().map_err(doing("reading the database URL"))?;
        connect = connect.application_name("airtight");
        if pooled {
            connect = connect.statement_cache_capacity(0);
        }
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections.max(1))
            .acquire_timeout(Duration::from_secs(5))
            .idle_timeout(Duration::from_secs(300))
            // A broken connection shows itself at the next statement, which is repeated anyway.
            .test_before_acquire(false)
            .after_connect(move |connection, _| {
                Box::pin(async move {
                    // The planner, guessing high, would compile short statements for longer than they run. Behind a
                    // pooler there is no session to set it in.
                    if !pooled {
                        connection.execute("SET jit = off").await?;
                    }
                    Ok(())
                })
            })
            .connect_lazy_with(connect);
        Self::build(pool, options, pooled)
    }

    /// An outbox over the application's own pool.
    pub fn with_pool(pool: PgPool, options: PgOptions) -> Result<Self> {
        let pooled = !options.prepared_statements;
        Self::build(pool, options, pooled)
    }

    pub(crate) fn build(pool: PgPool, options: PgOptions, pooled: bool) -> Result<Self> {
        for (name, value) in [("schema", &options.schema), ("table", &options.table)] {
            // The server cuts longer names off silently, and two tables could become one. Suffixes of index
            // names need room as well.
            if value.is_empty() || value.len() > 40 || value.contains('\0') {
                return Err(Error::permanent(
                    "bad_name",
                    format!("{name} must have 1 to 40 bytes, `{value}` does not"),
                ));
            }
        }
        let canonical = || TableSpec::of_shape(options.shape, Some(&options.schema), &options.table);
        let spec = Arc::new(options.spec.clone().unwrap_or_else(canonical));
        Ok(Self { pool, spec, options: Arc::new(options), pooled })
    }

    /// The pool, for transactions of one's own.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// The table and the meaning of its columns.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// The outbox read as a queue: a source for a relay.
    pub fn queue(&self, options: QueueOptions) -> Queue<PgQueue> {
        Queue::new(PgQueue::new(self.clone()), options)
    }

    /// Whether it can only be followed, for it has no status.
    pub(crate) fn is_log(&self) -> bool {
        self.spec.status.is_none()
    }

    /// One of airtight's own tables, quoted.
    pub(crate) fn own(&self, table: &str) -> String {
        format!("{}.{}", quote(&self.options.schema), quote(table))
    }

    /// The channel that the outbox notifies on.
    pub(crate) fn channel(&self) -> String {
        if let Some(channel) = &self.spec.log.channel {
            return channel.clone();
        }
        crate::schema::channel(&self.options.schema, &self.options.table)
    }

    /// A connection for one operation.
    pub(crate) async fn acquire(&self) -> Result<Conn> {
        if self.pooled {
            self.begin().await
        } else {
            match self.pool.acquire().await {
                Ok(connection) => Ok(Conn::Plain(connection)),
                Err(error) => Err(self.why_not(error).await),
            }
        }
    }

    /// A connection with a transaction open on it.
    pub(crate) async fn begin(&self) -> Result<Conn> {
        match self.transaction().await {
            Ok(transaction) => Ok(Conn::Transaction(transaction)),
            Err(error) => Err(self.why_not(error).await),
        }
    }

    /// A transaction, begun in a task of its own, which is never dropped half-way: sqlx would put the connection back into
    /// the pool with the transaction open, and nothing of what the next one writes there would ever be committed.
    pub(crate) async fn transaction(&self) -> sqlx::Result<Transaction<'static, Postgres>> {
        let pool = self.pool.clone();
        tokio::spawn(async move { pool.begin().await }).await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
    }

    /// Why there is no connection. The pool tries on until its time is over and then says only that; one plain
    /// attempt says what the server said.
    async fn why_not(&self, error: sqlx::Error) -> Error {
        if !matches!(error, sqlx::Error::PoolTimedOut) {
            return doing("connecting")(error);
        }
        let options = self.pool.connect_options();
        match tokio::time::timeout(Duration::from_secs(2), options.connect()).await {
            Ok(Err(cause)) => doing("connecting")(cause),
            Ok(Ok(_)) => Error::retryable(
                "pool_exhausted",
                format!("all {} connections of the pool are busy", self.options.max_connections),
            ),
            Err(_) => doing("connecting")(error),
        }
    }
}

/// A connection for one operation: plain, or in a transaction, which keeps a transaction pooler from moving
/// it to another server between two messages.
pub(crate) enum Conn {
    Plain(PoolConnection<Postgres>),
    Transaction(Transaction<'static, Postgres>),
}

impl Conn {
    pub(crate) fn get(&mut self) -> &mut PgConnection {
        match self {
            Self::Plain(connection) => connection,
            Self::Transaction(transaction) => transaction,
        }
    }

    /// Makes it last.
    pub(crate) async fn commit(self) -> Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Transaction(transaction) => transaction.commit().await.map_err(doing("committing")),
        }
    }
}
