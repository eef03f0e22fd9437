//! A log in its own database, and readers of it.

use std::time::{Duration, Instant};

use airtight_core::{
    Capabilities, Delivery, Limits, NewEvent, Settlement, Source, Verdict,
    admin::Admin,
    log::{Log, LogOptions},
    table::Shape,
};
use airtight_postgres::{PgLog, PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;
use sqlx::{AssertSqlSafe, PgConnection, PgPool};

pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) struct Fixture {
    pub(crate) db: TestDb,
    pub(crate) outbox: PgOutbox,
    pub(crate) pool: PgPool,
}

impl Fixture {
    pub(crate) async fn create(name: &str) -> Option<Self> {
        Self::with(name, PgOptions { shape: Shape::Log, ..PgOptions::default() }).await
    }

    pub(crate) async fn with(name: &str, options: PgOptions) -> Option<Self> {
        let db = TestDb::create(&format!("log_{name}")).await?;
        let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
        outbox.migrate().await.unwrap();
        let pool = db.pool(10).await;
        Some(Self { db, outbox, pool })
    }

    pub(crate) async fn sql(&self, sql: &str) -> u64 {
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await;
        done.unwrap_or_else(|error| panic!("{sql}: {error}")).rows_affected()
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap()
    }

    /// A connection of its own, outside the pool: a writer.
    pub(crate) async fn writer(&self) -> Writer {
        use sqlx::Connection;
        Writer(PgConnection::connect_with(&self.db.connect_options()).await.unwrap())
    }

    pub(crate) async fn publish(&self, key: &str, n: i64) -> i64 {
        Admin::publish(&self.outbox, &[event(key, n)]).await.unwrap()[0].seq
    }

    pub(crate) async fn reader(&self, consumer: &str) -> Reader {
        self.reader_with(LogOptions::consumer(consumer)).await
    }

    pub(crate) async fn reader_with(&self, options: LogOptions) -> Reader {
        let log = self.outbox.log(options);
        log.open(&Capabilities::default()).await.unwrap();
        Reader { log }
    }
}

pub(crate) fn event(key: &str, n: i64) -> NewEvent {
    NewEvent::new("test.log", "Tested", "Thing", key).json(&serde_json::json!({"n": n})).unwrap()
}

pub(crate) struct Writer(pub(crate) PgConnection);

impl Writer {
    pub(crate) async fn run(&mut self, sql: &str) {
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut self.0).await;
        done.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    pub(crate) async fn try_run(&mut self, sql: &str) -> sqlx::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut self.0).await.map(|_| ())
    }

    pub(crate) async fn number(&mut self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut self.0).await.unwrap()
    }

    /// Inserts one event in whatever transaction is open; returns its seq.
    pub(crate) async fn insert(&mut self, key: &str) -> i64 {
        let sql = format!("{} RETURNING seq", insert("airtight.outbox", "DEFAULT", key));
        self.number(&sql).await
    }
}

pub(crate) fn insert(table: &str, seq: &str, key: &str) -> String {
    format!(
        "INSERT INTO {table} (seq, stream, event_type, aggregate_type, aggregate_id) \
         VALUES ({seq}, 'test.log', 'Tested', 'Thing', '{key}')"
    )
}

pub(crate) struct Reader {
    pub(crate) log: Log<PgLog>,
}

impl Reader {
    /// One look: what can be delivered right now.
    pub(crate) async fn look(&self) -> Vec<Delivery> {
        let batch = self.log.next(Limits { events: 100, bytes: 8 << 20 }).await.unwrap();
        assert!(batch.rejects.is_empty(), "{:?}", batch.rejects);
        batch.deliveries
    }

    /// Looks until something comes, and settles it as delivered.
    pub(crate) async fn seqs(&self, at_least: usize) -> Vec<i64> {
        let deadline = Instant::now() + SOON;
        let mut seqs = Vec::new();
        while seqs.len() < at_least {
            assert!(Instant::now() < deadline, "only {seqs:?} came");
            let batch = self.look().await;
            seqs.extend(batch.iter().map(|delivery| delivery.event.seq));
            self.deliver(&batch).await;
            if batch.is_empty() {
                self.log.wait(Duration::from_millis(50)).await;
            }
        }
        seqs
    }

    /// Looks often, and long enough for any rule to have made up its mind.
    pub(crate) async fn nothing_comes(&self) {
        for _ in 0..30 {
            let batch = self.look().await;
            let seqs: Vec<i64> = batch.iter().map(|delivery| delivery.event.seq).collect();
            assert!(seqs.is_empty(), "{seqs:?} came, though a hole before them may still be filled");
            self.log.wait(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn deliver(&self, batch: &[Delivery]) {
        self.settle(batch, &Verdict::Delivered).await;
    }

    pub(crate) async fn settle(&self, batch: &[Delivery], verdict: &Verdict) -> usize {
        let settlements: Vec<Settlement> = batch
            .iter()
            .map(|delivery| Settlement { position: delivery.position, verdict: verdict.clone() })
            .collect();
        self.log.settle(&settlements).await.unwrap().applied
    }

    pub(crate) async fn close(self) {
        self.log.close().await.unwrap();
    }
}
