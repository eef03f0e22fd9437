//! [`PgOutbox`]: a database, a table, and what can be done with them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use airtight_core::{
    Code, Error, Result,
    queue::{Queue, QueueOptions},
    table::{Shape, TableSpec, quote},
};
use sqlx::{
    ConnectOptions, Connection, Executor, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{
    error::doing,
    queue::PgQueue,
    session::{Session, Watchdog},
};

/// What a session of ours begins with. The planner, guessing high, would compile short statements for longer than
/// they run. A relay that is gone without a word is found out by the server, which then lets go of its locks.
const SETTINGS: &str = "SET jit = off; SET tcp_keepalives_idle = 30; SET tcp_keepalives_interval = 10; \
     SET tcp_keepalives_count = 3; SET tcp_user_timeout = 30000";

/// A pool that has room takes no longer than this, unless the server refuses it a connection.
const SLOW_ACQUIRE: Duration = Duration::from_secs(1);

/// How to reach an outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PgOptions {
    /// The schema of airtight's own tables, and of the canonical outbox.
    pub schema: String,
    /// The canonical outbox's name.
    pub table: String,
    /// Whether the canonical outbox is a queue or a log.
    pub shape: Shape,
    /// A foreign table, instead of the canonical one.
    pub spec: Option<TableSpec>,
    /// The maximum number of connections that this outbox opens.
    pub max_connections: u32,
    /// Whether to listen for notifications, if the outbox notifies.
    pub listen: bool,
    /// The URL to listen at, if it is another one: a listener needs a session, which a transaction pooler does
    /// not give.
    pub listen_url: Option<String>,
    /// Whether the outbox notifies, by a trigger. `migrate` adds the trigger, removes it, or with `None` leaves it as it is.
    pub notify: Option<bool>,
    /// Turn this off behind a transaction pooler. Then every statement is unnamed and runs in its own transaction.
    /// `?statement-cache-capacity=0` in the URL does the same.
    pub prepared_statements: bool,
    /// How long to wait for an answer while PostgreSQL is not working on the statement. Then the connection is given
    /// up as broken. Statements that take long are not affected.
    pub answer_within: Duration,
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
            answer_within: Duration::from_secs(10),
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
    pub(crate) watchdog: Arc<Watchdog>,
}

impl PgOutbox {
    /// Prepares a connection pool. The server need not be reachable yet. A URL that is not valid is refused.
    pub async fn connect(url: &str, options: PgOptions) -> Result<Self> {
        let pooled = !options.prepared_statements || url.contains("statement-cache-capacity=0");
        let mut connect: PgConnectOptions = url.parse().map_err(doing("reading the database URL"))?;
        connect = connect.application_name("airtight");
        if pooled {
            connect = connect.statement_cache_capacity(0);
        }
        // The statement itself tells an operator nothing; what it waits for is told by the watchdog.
        if let Ok(debug) = "debug".parse() {
            connect = connect.log_slow_statements(debug, Duration::from_secs(1));
        }
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections.max(1))
            .acquire_timeout(Duration::from_secs(5))
            .idle_timeout(Duration::from_secs(300))
            // A broken connection shows itself at the next statement, which is repeated anyway.
            .test_before_acquire(false)
            .after_connect(move |connection, _| {
                Box::pin(async move {
                    // Behind a pooler there is no session to set anything in.
                    if !pooled {
                        connection.execute(sqlx::raw_sql(SETTINGS)).await?;
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
                    Code::BAD_NAME,
                    format!("{name} must have 1 to 40 bytes, `{value}` does not"),
                ));
            }
        }
        let canonical = || TableSpec::of_shape(options.shape, Some(&options.schema), &options.table);
        let spec = Arc::new(options.spec.clone().unwrap_or_else(canonical));
        // Every statement of ours mentions one of these.
        let names = vec![spec.qualified(), quote(&options.schema), "airtight".into()];
        let watchdog = Arc::new(Watchdog::new(pool.clone(), options.answer_within, names));
        Ok(Self { pool, spec, options: Arc::new(options), pooled, watchdog })
    }

    /// The pool, for the caller's own transactions.
    pub fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// The table and the meaning of its columns.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// The outbox read as a queue: a source for a relay.
    pub fn queue(&self, options: QueueOptions) -> Queue<PgQueue> {
        Queue::new(PgQueue::new(self.clone(), options.keep_done), options)
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
            return self.begin().await;
        }
        Ok(Conn { session: Some(self.session().await?), open: false })
    }

    /// A connection with a transaction open on it.
    pub(crate) async fn begin(&self) -> Result<Conn> {
        let mut session = self.session().await?;
        session.run("BEGIN").await.map_err(doing("beginning a transaction"))?;
        Ok(Conn { session: Some(session), open: true })
    }

    /// A connection with nothing begun on it.
    pub(crate) async fn session(&self) -> Result<Session<'static>> {
        let asked = Instant::now();
        let raw = match self.pool.acquire().await {
            Ok(raw) => raw,
            Err(error) => return Err(self.why_not(error).await),
        };
        // The pool waits for one of its own without a word while the server refuses it another.
        if asked.elapsed() > SLOW_ACQUIRE && self.pool.size() < self.options.max_connections {
            let outbox = self.clone();
            tokio::spawn(async move { outbox.say_if_refused().await });
        }
        Ok(Session::pooled(raw, self.watchdog.clone()))
    }

    async fn say_if_refused(&self) {
        if !self.watchdog.may_say_refused() {
            return;
        }
        if let Err(error) = self.try_connecting().await {
            tracing::warn!(code = error.code(), %error, "continuing with fewer connections than configured, and more slowly");
        }
    }

    /// One plain attempt, which says what the server says. The pool tries on until its time is over, and then says
    /// only that.
    async fn try_connecting(&self) -> Result<()> {
        let options = self.pool.connect_options();
        let connected = tokio::time::timeout(Duration::from_secs(2), options.connect()).await;
        let connection = connected.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map_err(doing("connecting"))?;
        // It was only to see.
        let _ = connection.close().await;
        Ok(())
    }

    /// Why there is no connection.
    async fn why_not(&self, error: sqlx::Error) -> Error {
        if !matches!(error, sqlx::Error::PoolTimedOut) {
            return doing("connecting")(error);
        }
        match self.try_connecting().await {
            Err(cause) => cause,
            Ok(()) => Error::retryable(
                Code::POOL_EXHAUSTED,
                format!("all {} connections of the pool are busy", self.options.max_connections),
            ),
        }
    }
}

/// A connection for one operation: plain, or in a transaction, which keeps a transaction pooler from moving
/// it to another server between two messages.
pub(crate) struct Conn {
    /// None once it was committed or rolled back.
    session: Option<Session<'static>>,
    /// A transaction is open.
    open: bool,
}

impl Conn {
    pub(crate) fn get(&mut self) -> &mut Session<'static> {
        self.session.get_or_insert_with(Session::none)
    }

    /// Makes it last.
    pub(crate) async fn commit(mut self) -> Result<()> {
        // Taken out, so that dropping this half-way closes the connection instead of rolling back on it.
        let Some(mut session) = self.session.take() else { return Ok(()) };
        if !self.open {
            return Ok(());
        }
        session.run("COMMIT").await.map_err(doing("committing"))
    }

    /// Closes the connection instead of giving it back: more rows are on their way than anybody wants.
    pub(crate) fn hang_up(mut self) {
        if let Some(session) = &mut self.session {
            session.hang_up();
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        let Some(mut session) = self.session.take().filter(|_| self.open) else { return };
        match tokio::runtime::Handle::try_current() {
            // One that is in the middle of a statement is closed, and the server rolls back by itself.
            Ok(runtime) if !session.is_busy() => {
                runtime.spawn(async move { session.run("ROLLBACK").await });
            }
            _ => session.hang_up(),
        }
    }
}
