//! The business side: writers that commit a ledger row and its event together, or neither.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use airtight::{
    NewEvent,
    admin::Admin,
    postgres::{PgOptions, PgOutbox},
    sqlite::SqliteOutbox,
};
use airtight_testkit::{postgres::TestDb, postgres_server::PrivateServer};
use uuid::Uuid;

/// A database with a ledger and an outbox.
#[derive(Clone)]
pub(crate) enum Bank {
    Postgres {
        db: Arc<TestDb>,
        outbox: PgOutbox,
    },
    /// On a server that may crash.
    Private {
        server: Arc<PrivateServer>,
        outbox: PgOutbox,
    },
    Sqlite {
        path: PathBuf,
        outbox: SqliteOutbox,
    },
}

/// One row of the ledger: the `n`-th of its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) key: String,
    pub(crate) n: i64,
}

const LEDGER: &str = "CREATE TABLE ledger (id TEXT PRIMARY KEY, account TEXT NOT NULL, n BIGINT NOT NULL)";

impl Bank {
    pub(crate) async fn postgres(name: &str) -> Option<Self> {
        let db = TestDb::create(name).await?;
        let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
        outbox.migrate().await.unwrap();
        sqlx::query(LEDGER).execute(outbox.pool()).await.unwrap();
        Some(Self::Postgres { db: Arc::new(db), outbox })
    }

    pub(crate) async fn private(test: &str, settings: &[&str]) -> Option<Self> {
        let server = PrivateServer::start_with(test, settings)?;
        let outbox = PgOutbox::connect(&server.url(), PgOptions::default()).await.unwrap();
        outbox.migrate().await.unwrap();
        sqlx::query(LEDGER).execute(outbox.pool()).await.unwrap();
        Some(Self::Private { server: Arc::new(server), outbox })
    }

    /// Ends the server as a crash would, and starts it again.
    pub(crate) fn crash(&self) {
        match self {
            Self::Private { server, .. } => server.crash(),
            Self::Postgres { .. } | Self::Sqlite { .. } => panic!("this server is not the test's own"),
        }
    }

    /// The outbox, for what only PostgreSQL has.
    pub(crate) fn pg(&self) -> &PgOutbox {
        match self {
            Self::Postgres { outbox, .. } | Self::Private { outbox, .. } => outbox,
            Self::Sqlite { .. } => panic!("this is SQLite"),
        }
    }

    pub(crate) async fn sqlite(dir: &tempfile::TempDir) -> Self {
        let path = dir.path().join("bank.db");
        let outbox = SqliteOutbox::open(path.to_str().unwrap()).await.unwrap();
        outbox.migrate().await.unwrap();
        sqlx::query(LEDGER).execute(outbox.pool()).await.unwrap();
        Self::Sqlite { path, outbox }
    }

    pub(crate) fn url(&self) -> String {
        match self {
            Self::Postgres { db, .. } => db.url(),
            Self::Private { server, .. } => server.url(),
            Self::Sqlite { path, .. } => format!("sqlite:{}", path.display()),
        }
    }

    pub(crate) fn admin(&self) -> &dyn Admin {
        match self {
            Self::Postgres { outbox, .. } | Self::Private { outbox, .. } => outbox,
            Self::Sqlite { outbox, .. } => outbox,
        }
    }

    /// One business transaction. It fails only where the server may crash; whether it was committed is not known then.
    async fn transact(
        &self,
        key: &str,
        n: i64,
        commit: bool,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let id = Uuid::now_v7();
        let event = NewEvent::new("bank", "Moved", "Account", key)
            .id(id)
            .json(&serde_json::json!({"n": n, "committed": commit}))
            .unwrap();
        let insert = "INSERT INTO ledger (id, account, n) VALUES ($1, $2, $3)";
        match self {
            Self::Postgres { outbox, .. } | Self::Private { outbox, .. } => {
                let mut tx = outbox.pool().begin().await?;
                sqlx::query(insert).bind(id.to_string()).bind(key).bind(n).execute(&mut *tx).await?;
                outbox.publish(&mut tx, &event).await?;
                if commit { tx.commit().await? } else { tx.rollback().await? }
            }
            Self::Sqlite { outbox, .. } => {
                let mut tx = outbox.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
                sqlx::query(insert).bind(id.to_string()).bind(key).bind(n).execute(&mut *tx).await.unwrap();
                outbox.publish(&mut tx, &event).await.unwrap();
                if commit { tx.commit().await.unwrap() } else { tx.rollback().await.unwrap() }
            }
        }
        Ok(())
    }

    /// The newest entry of a key, once the server is there again.
    async fn last_of(&self, key: &str) -> i64 {
        let select = "SELECT coalesce(max(n), 0) FROM ledger WHERE account = $1";
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match sqlx::query_scalar(select).bind(key).fetch_one(self.pg().pool()).await {
                Ok(last) => return last,
                Err(error) => assert!(Instant::now() < end, "the server is not back: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// How much was committed.
    pub(crate) async fn committed(&self) -> usize {
        let select = "SELECT count(*) FROM ledger";
        let count: i64 = match self {
            Self::Postgres { outbox, .. } | Self::Private { outbox, .. } => {
                sqlx::query_scalar(select).fetch_one(outbox.pool()).await.unwrap()
            }
            Self::Sqlite { outbox, .. } => sqlx::query_scalar(select).fetch_one(outbox.pool()).await.unwrap(),
        };
        usize::try_from(count).unwrap()
    }

    /// What is neither done nor dead.
    pub(crate) async fn unfinished(&self) -> u64 {
        let status = self.admin().status().await.unwrap();
        status.streams.iter().map(|stream| stream.pending + stream.retrying + stream.processing).sum()
    }

    /// What was committed.
    pub(crate) async fn ledger(&self) -> Vec<Entry> {
        let select = "SELECT id, account, n FROM ledger";
        let rows: Vec<(String, String, i64)> = match self {
            Self::Postgres { outbox, .. } | Self::Private { outbox, .. } => {
                sqlx::query_as(select).fetch_all(outbox.pool()).await.unwrap()
            }
            Self::Sqlite { outbox, .. } => sqlx::query_as(select).fetch_all(outbox.pool()).await.unwrap(),
        };
        rows.into_iter().map(|(id, key, n)| Entry { id, key, n }).collect()
    }

    /// Starts writers, each with keys of its own, so that the writers of a key are serialised.
    pub(crate) fn start_writers(&self, writers: usize, keys: usize, pace: Duration) -> Writers {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = (0..writers)
            .map(|writer| {
                let (bank, stop) = (self.clone(), stop.clone());
                tokio::spawn(async move {
                    let mut counts: HashMap<String, i64> = HashMap::new();
                    let mut pace = tokio::time::interval(pace);
                    while !stop.load(Ordering::Relaxed) {
                        pace.tick().await;
                        let key = format!("w{writer}-k{}", fastrand::usize(..keys));
                        let commit = fastrand::u8(..100) >= 15;
                        let n = counts.entry(key.clone()).or_default();
                        match bank.transact(&key, *n + 1, commit).await {
                            Ok(()) => *n += i64::from(commit),
                            Err(_) if matches!(bank, Self::Private { .. }) => *n = bank.last_of(&key).await,
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        Writers { stop, tasks }
    }
}

pub(crate) struct Writers {
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Writers {
    pub(crate) async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.expect("writers do not fail");
        }
    }
}

/// Compares what arrived, in order of arrival, with what was committed.
pub(crate) fn audit(ledger: &[Entry], arrived: &[Entry]) {
    let committed: HashMap<&str, &Entry> = ledger.iter().map(|entry| (entry.id.as_str(), entry)).collect();
    let mut seen: HashMap<&str, ()> = HashMap::new();
    let mut last: HashMap<&str, i64> = HashMap::new();
    for entry in arrived {
        assert!(committed.contains_key(entry.id.as_str()), "phantom: {entry:?} was never committed");
        if seen.insert(&entry.id, ()).is_some() {
            continue;
        }
        let last = last.entry(&entry.key).or_default();
        assert_eq!(entry.n, *last + 1, "out of order: {entry:?} came when {last} was the last of its key");
        *last = entry.n;
    }
    let lost: Vec<&Entry> = ledger.iter().filter(|entry| !seen.contains_key(entry.id.as_str())).collect();
    assert!(lost.is_empty(), "lost {} of {}: {:?}", lost.len(), ledger.len(), &lost[..lost.len().min(5)]);
}
