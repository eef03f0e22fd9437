//! The outbox handle: the file, its connection pool, and the table in it.

use std::{path::Path, str::FromStr, sync::Arc, time::Duration};

use airtight_core::{
    Class, Code, Error, Result,
    log::{Log, LogOptions},
    queue::{Queue, QueueOptions},
    table::{Shape, TableSpec},
};
use sqlx::{
    ConnectOptions, Connection, SqlSafeStr, Sqlite, SqliteConnection, SqlitePool, Transaction,
    pool::PoolConnection,
    sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::{Mutex, Notify, OnceCell, OwnedMutexGuard};

use crate::{error::db, file::Anchor, inbox::Inbox, log::SqliteLog, queue::SqliteQueue, schema, sql::Sql};

/// How long a writer waits for another one.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

/// Writers take turns anyway; these are mostly readers.
const MAX_CONNECTIONS: u32 = 8;

/// An outbox in a SQLite file. Cheap to clone; clones share the pool.
#[derive(Debug, Clone)]
pub struct SqliteOutbox {
    pool: SqlitePool,
    sql: Arc<Sql>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Writers of this process queue here, in turn, instead of racing for the file's lock.
    turn: Arc<Mutex<()>>,
    /// Something was published through this handle.
    published: Notify,
    /// Knows whether the file is still the same; none for one in memory.
    anchor: OnceCell<Option<Arc<Anchor>>>,
}

/// A transaction that may write. Rolls back when dropped.
pub(crate) struct Tx {
    tx: Transaction<'static, Sqlite>,
    /// After the transaction: its turn ends when it does.
    _turn: OwnedMutexGuard<()>,
}

impl Tx {
    pub(crate) fn conn(&mut self) -> &mut SqliteConnection {
        &mut self.tx
    }

    pub(crate) async fn commit(self) -> Result<()> {
        self.tx.commit().await.map_err(db)
    }
}

impl SqliteOutbox {
    /// Opens the canonical outbox in a file, which is created if it is not there; its directory must be.
    /// Accepts `sqlite:PATH`, `sqlite://PATH` and a path as it is.
    ///
    /// The file is set to WAL mode, and commits are synced, so that a committed event survives a power loss.
    pub async fn open(url_or_path: &str) -> Result<Self> {
        let options = connect_options(url_or_path)?;
        prepare_file(&options).await?;
        // From now on a file that is not there was removed, and an empty one in its place would hide that.
        let options = options.create_if_missing(false);
        let anchor = Anchor::open(&options).await?.map(Arc::new);
        let watched = anchor.clone();
        let pool = SqlitePoolOptions::new()
            .max_connections(MAX_CONNECTIONS)
            .acquire_timeout(BUSY_TIMEOUT)
            .max_lifetime(None)
            .after_connect(move |_, _| {
                let changed = watched.as_ref().and_then(|anchor| anchor.change());
                Box::pin(async move { changed.map_or(Ok(()), |changed| Err(sqlx::Error::Protocol(changed))) })
            })
            .after_release(|conn, _| Box::pin(is_clean(conn)))
            .connect_with(options.clone())
            .await
            .map_err(|error| cannot_open(error, options.get_filename()))?;
        let shared = Shared { anchor: OnceCell::new_with(Some(anchor)), ..Shared::default() };
        Ok(Self { pool, sql: Arc::new(Self::canonical_sql()), shared: Arc::new(shared) })
    }

    /// An outbox over a pool that exists already, with the table it describes.
    ///
    /// The pool's settings stay as they are: `synchronous = FULL`, WAL mode and a busy timeout of some seconds
    /// are advised, and `check` says when they are missing.
    pub fn with_pool(pool: SqlitePool, spec: TableSpec) -> Self {
        Self { pool, sql: Arc::new(Sql::new(spec)), shared: Arc::default() }
    }

    /// The same file with another table as the outbox.
    #[must_use]
    pub fn spec(mut self, spec: TableSpec) -> Self {
        self.sql = Arc::new(Sql::new(spec));
        self
    }

    /// The same file with airtight's own table in this shape, which `migrate` creates. A file keeps the shape
    /// it was created with; see [`SqliteOutbox::detect`]. A table of the application's own is left as it is.
    #[must_use]
    pub fn shape(mut self, shape: Shape) -> Self {
        if self.sql.canonical {
            let spec = &self.sql.spec;
            let spec = TableSpec::of_shape(shape, spec.schema.as_deref(), &spec.table);
            self.sql = Arc::new(Sql::new(spec));
        }
        self
    }

    /// The same in the shape that the file holds; as it is where the file holds none yet.
    pub async fn detect(self) -> Result<Self> {
        let mut conn = self.acquire().await?;
        let found = schema::found_shape(&mut conn, &self.sql).await?;
        drop(conn);
        Ok(match found {
            Some(shape) => self.shape(shape),
            None => self,
        })
    }

    /// The pool, for the application's own statements and transactions.
    pub fn pool(&self) -> &SqlitePool {
        &self.pool
    }

    /// The table's spec.
    pub fn table(&self) -> &TableSpec {
        &self.sql.spec
    }

    /// A source that claims this outbox's events.
    pub fn queue(&self, options: QueueOptions) -> Queue<SqliteQueue> {
        Queue::new(SqliteQueue::new(self.clone()), options)
    }

    /// A source that follows this outbox as a log, as one of any number of consumers.
    pub fn log(&self, options: LogOptions) -> Log<SqliteLog> {
        Log::new(SqliteLog::new(self.clone()), options)
    }

    /// The record that makes a repeated event a no-op, for handlers that write to this file.
    pub fn inbox(&self) -> Inbox {
        Inbox::new(self.sql.name())
    }

    pub(crate) fn sql(&self) -> &Sql {
        &self.sql
    }

    pub(crate) fn is_log(&self) -> bool {
        self.sql.shape == Shape::Log
    }

    /// The same for those who need states, which not every table has.
    pub(crate) fn queue_sql(&self) -> Result<&Sql> {
        if self.is_log() && self.sql.canonical {
            return Err(schema::wrong_shape(&self.sql.spec.display_name(), Shape::Log));
        }
        self.sql.spec.require_status()?;
        Ok(&self.sql)
    }

    /// The same for those who follow it as a log.
    pub(crate) fn log_sql(&self) -> Result<&Sql> {
        if self.is_log() {
            return Ok(&self.sql);
        }
        let name = self.sql.spec.display_name();
        if self.sql.canonical {
            return Err(schema::wrong_shape(&name, Shape::Queue));
        }
        Err(Error::permanent(
            Code::WRONG_SHAPE,
            format!(
                "{name} has a status column, so its rows change and it cannot be followed as a log: read it with \
                 `queue`, or describe it without the status"
            ),
        ))
    }

    pub(crate) fn published(&self) -> &Notify {
        &self.shared.published
    }

    pub(crate) fn canonical_sql() -> Sql {
        Sql::new(TableSpec::canonical(None, "airtight_outbox"))
    }

    /// Begins a transaction that has the write lock from the start, so that it cannot fail half-way for want
    /// of it, and so that what it reads stays true until it commits.
    pub(crate) async fn begin(&self) -> Result<Tx> {
        self.check_file().await?;
        let turn = self.shared.turn.clone().lock_owned().await;
        Ok(Tx { tx: self.begin_with("BEGIN IMMEDIATE").await?, _turn: turn })
    }

    /// Begins a transaction that only reads, and sees one state of the file.
    pub(crate) async fn snapshot(&self) -> Result<Transaction<'static, Sqlite>> {
        self.check_file().await?;
        self.begin_with("BEGIN").await
    }

    /// A connection for single statements.
    pub(crate) async fn acquire(&self) -> Result<PoolConnection<Sqlite>> {
        self.check_file().await?;
        self.clean_connection().await
    }

    /// Fails once the file is not the one that was opened.
    pub(crate) async fn check_file(&self) -> Result<()> {
        let open = || async {
            let options = self.pool.connect_options();
            Ok::<_, Error>(Anchor::open(&options).await?.map(Arc::new))
        };
        match self.shared.anchor.get_or_try_init(open).await? {
            Some(anchor) => anchor.check().await,
            None => Ok(()),
        }
    }

    /// The same, but opens nothing: for those who are in a transaction that another connection may wait for.
    pub(crate) async fn check_known_file(&self) -> Result<()> {
        match self.shared.anchor.get() {
            Some(Some(anchor)) => anchor.check().await,
            _ => Ok(()),
        }
    }

    /// What `Pool::begin_with` does, on a connection that is fit for it. A plain `BEGIN` is said as well: sqlx would make
    /// a savepoint of it on one that it believes to be in a transaction, and that one's snapshot would never end.
    async fn begin_with(&self, statement: &'static str) -> Result<Transaction<'static, Sqlite>> {
        let conn = self.clean_connection().await?;
        let begun = Transaction::begin(conn, Some(statement.into_sql_str())).await;
        self.or_file(begun).await
    }

    /// An error that may come from a file that was removed since the last look is told as that: ended by any other, the
    /// relay would take what only it has open with it.
    async fn or_file<T>(&self, result: sqlx::Result<T>) -> Result<T> {
        match result {
            Ok(value) => Ok(value),
            Err(error) => {
                self.check_known_file().await?;
                Err(db(error))
            }
        }
    }

    /// A pool of the application's own lets connections back that [`is_clean`] would not.
    async fn clean_connection(&self) -> Result<PoolConnection<Sqlite>> {
        loop {
            let conn = self.or_file(self.pool.acquire().await).await?;
            if !conn.is_in_transaction() {
                return Ok(conn);
            }
            // It is of no use, whatever closing it says.
            let _ = conn.close().await;
        }
    }
}

/// Whether a connection may be used again. On a full disk or another I/O error SQLite rolls a transaction back by itself;
/// sqlx's own rollback then fails, and the connection would refuse every later transaction.
async fn is_clean(conn: &mut SqliteConnection) -> sqlx::Result<bool> {
    // Behind a rollback that is on its way.
    conn.ping().await?;
    Ok(!conn.is_in_transaction())
}

fn connect_options(url_or_path: &str) -> Result<SqliteConnectOptions> {
    let options = if url_or_path.starts_with("sqlite:") {
        SqliteConnectOptions::from_str(url_or_path)
            .map_err(|error| Error::permanent(Code::BAD_URL, format!("{url_or_path}: {error}")))?
    } else {
        SqliteConnectOptions::new().filename(url_or_path)
    };
    let file = options.get_filename().to_string_lossy();
    if file.is_empty() || file.contains(":memory:") || file.starts_with("file:sqlx-in-memory") {
        return Err(Error::permanent(
            Code::NO_FILE,
            format!("`{url_or_path}` names no file: an outbox in memory would lose what was committed"),
        ));
    }
    Ok(options
        .create_if_missing(true)
        .busy_timeout(BUSY_TIMEOUT)
        .synchronous(SqliteSynchronous::Full)
        .disable_statement_logging())
}

/// Creates the file and sets WAL mode, once; the mode stays with the file. It needs a lock that SQLite does
/// not wait for, so when several processes start at once this does.
async fn prepare_file(options: &SqliteConnectOptions) -> Result<()> {
    let deadline = tokio::time::Instant::now() + BUSY_TIMEOUT;
    loop {
        let error = match set_wal(options).await {
            Ok(()) => return Ok(()),
            Err(error) => cannot_open(error, options.get_filename()),
        };
        if !error.is(&Code::LOCKED) || tokio::time::Instant::now() >= deadline {
            return Err(error);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn set_wal(options: &SqliteConnectOptions) -> sqlx::Result<()> {
    let mut conn = options.connect().await?;
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut conn).await?;
    if !mode.eq_ignore_ascii_case("wal") {
        sqlx::query("PRAGMA journal_mode = WAL").execute(&mut conn).await?;
    }
    conn.close().await
}

fn cannot_open(error: sqlx::Error, file: &Path) -> Error {
    let error = db(error).context(file.display());
    if !error.is(&Code::CANNOT_OPEN) {
        return error;
    }
    error
        .with_class(Class::Permanent)
        .context("cannot open (check that the directory exists and that this user may write to it)")
}
