//! Writers of every kind. Each is the only writer of its keys, and knows what it has committed.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::task::JoinHandle;

use crate::support::Fixture;

/// Writers in the background.
pub(crate) struct Writers {
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Vec<String>>>,
}

impl Writers {
    pub(crate) fn start(f: &Fixture, count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let start = |n: usize| {
            let (url, slot, stop) = (f.url(), f.slot().to_owned(), stop.clone());
            tokio::spawn(async move {
                let conn = PgConnection::connect(&url).await.unwrap();
                let mut writer = Writer {
                    conn,
                    name: format!("w{n}"),
                    slot,
                    next: 0,
                    prepared: None,
                    committed: Vec::new(),
                };
                // As fast as they can, a dozen of them leave a relay on the same two cores no time at all.
                let mut pace = tokio::time::interval(std::time::Duration::from_millis(20));
                while !stop.load(Ordering::Relaxed) {
                    pace.tick().await;
                    writer.write().await;
                }
                writer.end_prepared().await;
                writer.committed
            })
        };
        Self { tasks: (0..count).map(start).collect(), stop }
    }

    /// Ends them. Returns what was committed, as `key:n`.
    pub(crate) async fn stop(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        let mut committed = Vec::new();
        for task in self.tasks {
            committed.extend(task.await.unwrap());
        }
        committed
    }
}

struct Writer {
    conn: PgConnection,
    name: String,
    slot: String,
    next: i64,
    /// A prepared transaction: its name, and what it holds.
    prepared: Option<(String, Vec<String>)>,
    committed: Vec<String>,
}

impl Writer {
    async fn sql(&mut self, sql: impl Into<String>) {
        let sql = sql.into();
        sqlx::raw_sql(AssertSqlSafe(sql.clone()))
            .execute(&mut self.conn)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    async fn insert(&mut self, key: &str, from: i64, to: i64) {
        self.sql(format!(
            "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
             SELECT 'test.cdc', 'Tested', 'Thing', '{key}', jsonb_build_object('n', n) \
             FROM generate_series({from}, {to} - 1) AS n"
        ))
        .await;
    }

    /// One by one.
    async fn insert_rows(&mut self, key: &str, from: i64, to: i64) {
        for n in from..to {
            self.insert(key, n, n + 1).await;
        }
    }

    async fn copy(&mut self, key: &str, from: i64, to: i64) {
        let mut copy = self
            .conn
            .copy_in_raw(
                "COPY airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) FROM STDIN",
            )
            .await
            .unwrap();
        for n in from..to {
            copy.send(format!("test.cdc\tTested\tThing\t{key}\t{{\"n\": {n}}}\n").as_bytes()).await.unwrap();
        }
        copy.finish().await.unwrap();
    }

    async fn write(&mut self) {
        let key = self.name.clone();
        let (from, to) = (self.next, self.next + fastrand::i64(1..=50));
        let kind = fastrand::u8(0..9);
        match kind {
            0 | 1 => self.insert(&key, from, to).await,
            2 => self.copy(&key, from, to).await,
            3 => {
                // Open for longer than others take for several.
                self.sql("BEGIN").await;
                self.insert(&key, from, from + 1).await;
                self.sql("SELECT pg_sleep(0.05)").await;
                self.insert_rows(&key, from + 1, to).await;
                self.sql("COMMIT").await;
            }
            4 => {
                self.sql("BEGIN; SAVEPOINT first").await;
                self.insert("ghost", from, to).await;
                self.sql("ROLLBACK TO first").await;
                self.insert(&key, from, from + 1).await;
                self.sql("SAVEPOINT second").await;
                self.insert(&key, from + 1, to).await;
                self.sql("RELEASE second; SAVEPOINT third").await;
                self.insert("ghost", from, to).await;
                self.sql("ROLLBACK TO third; COMMIT").await;
            }
            5 => {
                self.sql("BEGIN").await;
                self.insert("ghost", from, to).await;
                self.sql("ROLLBACK").await;
                return;
            }
            6 => return self.prepare().await,
            7 => {
                self.end_prepared().await;
                return;
            }
            _ => {
                self.sql("BEGIN").await;
                self.insert_rows(&key, from, to.min(from + 5)).await;
                self.sql("COMMIT").await;
                self.passed(&key, from, to.min(from + 5));
                return;
            }
        }
        self.passed(&key, from, to);
    }

    fn passed(&mut self, key: &str, from: i64, to: i64) {
        self.committed.extend((from..to).map(|n| format!("{key}:{n}")));
        self.next = to;
    }

    /// Prepares a transaction with a key of its own, and leaves it.
    async fn prepare(&mut self) {
        if self.prepared.is_some() {
            return;
        }
        let (gid, key) =
            (format!("{}_{}_{}", self.slot, self.name, self.next), format!("{}p{}", self.name, self.next));
        self.sql("BEGIN").await;
        self.insert(&key, 0, 5).await;
        self.sql(format!("PREPARE TRANSACTION '{gid}'")).await;
        self.prepared = Some((gid, (0..5).map(|n| format!("{key}:{n}")).collect()));
        self.next += 1;
    }

    async fn end_prepared(&mut self) {
        let Some((gid, events)) = self.prepared.take() else { return };
        if fastrand::u8(0..4) == 0 {
            self.sql(format!("ROLLBACK PREPARED '{gid}'")).await;
        } else {
            self.sql(format!("COMMIT PREPARED '{gid}'")).await;
            self.committed.extend(events);
        }
    }
}
