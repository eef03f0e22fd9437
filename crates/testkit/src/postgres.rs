//! A separate PostgreSQL database for each test.
//!
//! The server is the one that `scripts/services start` has started (`AIRTIGHT_TEST_POSTGRES`), or any other
//! that `DATABASE_URL` names. Without a server, a test skips itself and says so; it fails if `CI` is set:
//!
//! ```no_run
//! # use airtight_testkit::postgres::TestDb;
//! # async fn test() {
//! let Some(db) = TestDb::create("claim_takes_due_rows").await else { return };
//! let pool = db.pool(4).await;
//! # }
//! ```

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection};

use crate::ledger::{met, skip, variable};

const SERVER: &str = "AIRTIGHT_TEST_POSTGRES";
const POOLER: &str = "AIRTIGHT_TEST_PGBOUNCER";
const KEEP: &str = "AIRTIGHT_KEEP_DATABASES";

/// Every database made here is named `at_<test>_<random>` and carries this comment. A server that
/// `DATABASE_URL` names may hold others with such a name, and those are not ours to drop.
const PREFIX: &str = "at_";
const COMMENT: &str = "made by airtight's tests, which also remove it";
/// A test must not hang on a server that it has killed itself.
const DROP_TIMEOUT: Duration = Duration::from_secs(20);

/// An empty database that no other test uses. It is dropped with this value.
///
/// Dropping ends all connections to it, rolls back its prepared transactions and removes its replication
/// slots, whether the test has passed or not. With `AIRTIGHT_KEEP_DATABASES=1` it stays until the next run of
/// any test, to be looked at.
#[derive(Debug)]
pub struct TestDb {
    test: String,
    name: String,
    server_url: String,
    server: PgConnectOptions,
    gone: bool,
    /// Its application name is the database's name; while it lives, no other test process takes the database
    /// for a leftover. It is connected elsewhere, so that a test can end all connections to its database.
    _guard: PgConnection,
}

impl TestDb {
    /// Creates a database for the named test, or returns `None` where there is no server to create it on.
    ///
    /// # Panics
    ///
    /// If `CI` is set and there is no server, or if there is one that does not do what it is asked.
    pub async fn create(test_name: &str) -> Option<TestDb> {
        let test = test_name.to_owned();
        let Some(server_url) = variable(SERVER).or_else(|| variable("DATABASE_URL")) else {
            skip(&test, "no PostgreSQL", SERVER);
            return None;
        };
        let server = PgConnectOptions::from_str(&server_url)
            .unwrap_or_else(|error| panic!("the URL of the test server is not valid: {error}"));
        let name = unique_name(test_name);
        let mut guard = PgConnection::connect_with(&server.clone().application_name(&name))
            .await
            .unwrap_or_else(|error| panic!("cannot connect to the test server ({SERVER}): {error}"));

        // Once per process is enough.
        static SWEPT: AtomicBool = AtomicBool::new(false);
        if !SWEPT.swap(true, Ordering::Relaxed) {
            drop_leftovers(&mut guard, &server).await;
        }

        create_database(&mut guard, &name)
            .await
            .unwrap_or_else(|error| panic!("cannot create the database {name}: {error}"));
        met("postgres", &test);
        Some(TestDb { test, name, server_url, server, gone: false, _guard: guard })
    }

    /// The database's name. A good start for the names of replication slots, prepared transactions and roles
    /// too: all databases of a server share those, and so do all tests.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The database's URL, straight to the server.
    pub fn url(&self) -> String {
        with_database(&self.server_url, &self.name)
    }

    /// The database's URL through pgbouncer in transaction mode; `None`, and the test counts as skipped,
    /// where there is none.
    ///
    /// # Panics
    ///
    /// If `CI` is set and there is no pgbouncer.
    pub fn pooled_url(&self) -> Option<String> {
        let Some(pooler) = variable(POOLER) else {
            skip(&self.test, "no pgbouncer", POOLER);
            return None;
        };
        Some(with_database(&pooler, &self.name))
    }

    /// How to connect to the database, straight to the server.
    pub fn connect_options(&self) -> PgConnectOptions {
        self.server.clone().database(&self.name)
    }

    /// A pool of at most `max` connections, straight to the server. Each call makes a new one.
    ///
    /// # Panics
    ///
    /// If no connection can be made.
    pub async fn pool(&self, max: u32) -> PgPool {
        PgPoolOptions::new()
            .max_connections(max)
            .acquire_timeout(Duration::from_secs(10))
            .connect_with(self.connect_options())
            .await
            .unwrap_or_else(|error| panic!("cannot connect to {}: {error}", self.name))
    }

    /// Drops the database now, and waits for it.
    ///
    /// # Panics
    ///
    /// If the database cannot be dropped: a test that gets here has a server that works.
    pub async fn drop_now(mut self) {
        self.gone = true;
        if let Err(error) = drop_by_force(&self.server, &self.name).await {
            panic!("cannot drop the database {}: {error}", self.name);
        }
    }
}

impl Drop for TestDb {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        if variable(KEEP).is_some() {
            eprintln!("{}: kept {}", self.test, self.url());
            return;
        }
        let (server, name) = (self.server.clone(), self.name.clone());
        // A thread with a runtime of its own: the test's may be busy, shutting down, or single-threaded.
        let dropper = std::thread::spawn(move || -> Result<(), String> {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|error| error.to_string())?;
            runtime.block_on(async {
                tokio::time::timeout(DROP_TIMEOUT, drop_by_force(&server, &name))
                    .await
                    .map_err(|_| "timed out".to_owned())?
                    .map_err(|error| error.to_string())
            })
        });
        // Not a reason to fail: the next run removes what is left.
        match dropper.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => eprintln!("{}: left the database {} behind: {error}", self.test, self.name),
            Err(_) => eprintln!("{}: left the database {} behind", self.test, self.name),
        }
    }
}

/// From template0: nobody can be connected to it, which would be a reason to refuse.
async fn create_database(connection: &mut PgConnection, name: &str) -> Result<(), sqlx::Error> {
    let create = format!(r#"CREATE DATABASE "{name}" TEMPLATE template0"#);
    sqlx::query(AssertSqlSafe(create)).execute(&mut *connection).await?;
    let comment = format!(r#"COMMENT ON DATABASE "{name}" IS '{}'"#, COMMENT.replace('\'', "''"));
    sqlx::query(AssertSqlSafe(comment)).execute(connection).await?;
    Ok(())
}

/// `WITH (FORCE)` ends ordinary connections, but refuses where a slot is being streamed from or a prepared
/// transaction waits, so those go first.
async fn drop_by_force(server: &PgConnectOptions, name: &str) -> Result<(), sqlx::Error> {
    let mut connection = PgConnection::connect_with(server).await?;
    let exists: bool = sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
        .bind(name)
        .fetch_one(&mut connection)
        .await?;
    if !exists {
        return Ok(());
    }
    roll_back_prepared(&mut connection, server, name).await?;
    let drop = format!(r#"DROP DATABASE IF EXISTS "{name}" WITH (FORCE)"#);
    // A streaming connection takes a moment to end, and may be opened again by code under test meanwhile.
    let mut attempts = 20;
    loop {
        sqlx::query(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
             WHERE database = $1 AND active_pid IS NOT NULL",
        )
        .bind(name)
        .execute(&mut connection)
        .await?;
        attempts -= 1;
        match sqlx::query(AssertSqlSafe(drop.clone())).execute(&mut connection).await {
            Err(error) if attempts > 0 && is_object_in_use(&error) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            outcome => return outcome.map(|_| ()),
        }
    }
}

fn is_object_in_use(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55006")
}

/// A prepared transaction can only be ended from within its own database.
async fn roll_back_prepared(
    connection: &mut PgConnection,
    server: &PgConnectOptions,
    name: &str,
) -> Result<(), sqlx::Error> {
    let statements: Vec<String> = sqlx::query_scalar(
        "SELECT format('ROLLBACK PREPARED %L', gid) FROM pg_prepared_xacts WHERE database = $1",
    )
    .bind(name)
    .fetch_all(&mut *connection)
    .await?;
    if statements.is_empty() {
        return Ok(());
    }
    let mut inside = PgConnection::connect_with(&server.clone().database(name)).await?;
    for statement in statements {
        sqlx::query(AssertSqlSafe(statement)).execute(&mut inside).await?;
    }
    inside.close().await
}

/// What killed test processes left behind goes at once: a prepared transaction among it would keep every test
/// from creating a replication slot. Best effort, and without FORCE, so that the server itself refuses where
/// somebody is connected.
async fn drop_leftovers(connection: &mut PgConnection, server: &PgConnectOptions) {
    let names: Vec<String> = sqlx::query_scalar(
        "SELECT datname::text FROM pg_database d \
         WHERE starts_with(datname::text, $1) AND shobj_description(oid, 'pg_database') = $2 \
         AND NOT EXISTS (SELECT FROM pg_stat_activity a \
                         WHERE a.datid = d.oid OR a.application_name = d.datname)",
    )
    .bind(PREFIX)
    .bind(COMMENT)
    .fetch_all(&mut *connection)
    .await
    .unwrap_or_default();
    for name in names {
        if roll_back_prepared(connection, server, &name).await.is_ok() {
            let drop = format!(r#"DROP DATABASE IF EXISTS "{name}""#);
            sqlx::query(AssertSqlSafe(drop)).execute(&mut *connection).await.ok();
        }
    }
}

/// At most 52 bytes of lower-case letters, digits and underscores. PostgreSQL would cut it off after 63.
fn unique_name(test_name: &str) -> String {
    let test: String = test_name
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' })
        .take(40)
        .collect();
    format!("{PREFIX}{test}_{:08x}", fastrand::u32(..))
}

/// Replaces the database in a URL, or adds one.
fn with_database(url: &str, name: &str) -> String {
    let (base, query) = match url.split_once('?') {
        Some((base, query)) => (base, format!("?{query}")),
        None => (url, String::new()),
    };
    let authority = base.find("://").map_or(0, |at| at + 3);
    let end = base[authority..].find('/').map_or(base.len(), |at| authority + at);
    format!("{}/{name}{query}", &base[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_database_of_a_url_is_replaced() {
        let cases = [
            ("postgres://u@h:1/postgres", "postgres://u@h:1/x"),
            ("postgres://u@h:1", "postgres://u@h:1/x"),
            ("postgres://u:p@h:1/a?sslmode=disable", "postgres://u:p@h:1/x?sslmode=disable"),
            ("postgres://h?options=a/b", "postgres://h/x?options=a/b"),
        ];
        for (url, expected) in cases {
            assert_eq!(with_database(url, "x"), expected);
        }
    }

    #[test]
    fn names_are_short_and_need_no_quoting() {
        let name = unique_name("Queue::claim — takes over an \"expired\" lease, in order of seq");
        assert!(name.len() <= 63, "{name}");
        assert!(name.starts_with("at_queue__claim___takes_over"), "{name}");
        assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{name}");
    }

    async fn exists(server: &PgConnectOptions, name: &str) -> bool {
        let mut connection = PgConnection::connect_with(server).await.unwrap();
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
            .bind(name)
            .fetch_one(&mut connection)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn a_dropped_database_is_gone_whatever_was_left_in_it() {
        let Some(db) = TestDb::create("a_dropped_database_is_gone_whatever_was_left_in_it").await else {
            return;
        };
        let pool = db.pool(3).await;
        // First of all: creating a slot waits for open transactions, prepared ones included.
        sqlx::query("SELECT pg_create_logical_replication_slot(current_database() || '_slot', 'pgoutput')")
            .execute(&pool)
            .await
            .unwrap();
        let gid = format!("{}''s", db.name());
        let prepare =
            format!("CREATE TABLE t (x int); BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION '{gid}'");
        sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&pool).await.unwrap();
        let _open = pool.begin().await.unwrap();
        let (server, name) = (db.server.clone(), db.name().to_owned());
        assert!(exists(&server, &name).await);
        drop(db);
        assert!(!exists(&server, &name).await);
    }

    #[tokio::test]
    async fn two_databases_of_one_test_differ() {
        let Some(one) = TestDb::create("two_databases_of_one_test_differ").await else { return };
        let Some(two) = TestDb::create("two_databases_of_one_test_differ").await else { return };
        assert_ne!(one.url(), two.url());
        let (server, name) = (one.server.clone(), one.name().to_owned());
        one.drop_now().await;
        assert!(!exists(&server, &name).await);
        assert!(exists(&server, two.name()).await);
    }

    #[tokio::test]
    async fn leftovers_are_dropped_and_nothing_else() {
        let Some(db) = TestDb::create("leftovers_are_dropped_and_nothing_else").await else { return };
        let mut connection = PgConnection::connect_with(&db.server).await.unwrap();
        let leftover = unique_name("leftover");
        create_database(&mut connection, &leftover).await.unwrap();
        let strangers = unique_name("strangers");
        let create = format!(r#"CREATE DATABASE "{strangers}" TEMPLATE template0"#);
        sqlx::query(AssertSqlSafe(create)).execute(&mut connection).await.unwrap();

        drop_leftovers(&mut connection, &db.server).await;

        assert!(!exists(&db.server, &leftover).await);
        assert!(exists(&db.server, &strangers).await);
        assert!(exists(&db.server, db.name()).await, "its test is still running");
        drop_by_force(&db.server, &strangers).await.unwrap();
    }

    #[tokio::test]
    async fn the_pooler_reaches_the_same_database() {
        let Some(db) = TestDb::create("the_pooler_reaches_the_same_database").await else { return };
        let Some(url) = db.pooled_url() else { return };
        let mut connection = PgConnection::connect(&url).await.unwrap();
        // The simple protocol: prepared statements are what a transaction pooler does not carry over.
        let row = sqlx::raw_sql("SELECT current_database()::text").fetch_one(&mut connection).await.unwrap();
        assert_eq!(sqlx::Row::get::<String, _>(&row, 0), db.name());
    }
}
