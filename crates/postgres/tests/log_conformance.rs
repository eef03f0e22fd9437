//! The conformance suite for logs against a real PostgreSQL: airtight's own partitioned table, a plain table of an
//! application's, and once more through a transaction pooler.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

use std::sync::Arc;

use airtight_core::{
    NewEvent, Published, Source,
    admin::Admin,
    log::{Log, LogAdmin, LogOptions},
    table::{Shape, TableSpec},
};
use airtight_postgres::{PgLog, PgOptions, PgOutbox};
use airtight_testkit::{
    logs::{Flaky, LogUnderTest, LostAnswers, OpenPublish},
    postgres::TestDb,
};
use async_trait::async_trait;
use sqlx::{Postgres, Transaction};

struct Canonical {
    _db: TestDb,
    /// Publishes into the table under test.
    writer: PgOutbox,
    outbox: PgOutbox,
}

struct Open(Transaction<'static, Postgres>);

#[async_trait]
impl OpenPublish for Open {
    async fn commit(self: Box<Self>) {
        self.0.commit().await.unwrap();
    }

    async fn rollback(self: Box<Self>) {
        self.0.rollback().await.unwrap();
    }
}

impl Canonical {
    async fn create(name: &str) -> Option<Self> {
        let db = TestDb::create(&format!("logs_{name}")).await?;
        Some(Self::over(&db.url(), PgOptions::default(), db).await)
    }

    async fn pooled(name: &str) -> Option<Self> {
        let db = TestDb::create(&format!("logs_pooled_{name}")).await?;
        let options = PgOptions { prepared_statements: false, ..PgOptions::default() };
        Some(Self::over(&db.pooled_url()?, options, db).await)
    }

    async fn over(url: &str, options: PgOptions, db: TestDb) -> Self {
        let outbox = PgOutbox::connect(url, PgOptions { shape: Shape::Log, ..options }).await.unwrap();
        outbox.migrate().await.unwrap();
        Self { _db: db, writer: outbox.clone(), outbox }
    }

    /// The same columns in a table that is not partitioned and not airtight's own.
    async fn plain(name: &str) -> Option<Self> {
        let db = TestDb::create(&format!("logs_plain_{name}")).await?;
        let pool = db.pool(1).await;
        sqlx::raw_sql(
            "CREATE SCHEMA shop; CREATE TABLE shop.journal (seq bigserial PRIMARY KEY, id uuid NOT NULL UNIQUE, stream text, \
             event_type text, aggregate_type text, aggregate_id text, op text, payload jsonb, payload_bytes bytea, \
             headers jsonb NOT NULL DEFAULT '{}', occurred_at timestamptz, schema_version integer, max_attempts integer, \
             created_at timestamptz NOT NULL DEFAULT now())",
        )
        .execute(&pool)
        .await
        .unwrap();
        let spec = TableSpec::canonical_log(Some("shop"), "journal");
        let options = PgOptions { spec: Some(spec), ..PgOptions::default() };
        let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
        outbox.migrate().await.unwrap();
        let writer = PgOptions {
            schema: "shop".into(),
            table: "journal".into(),
            shape: Shape::Log,
            ..PgOptions::default()
        };
        let writer = PgOutbox::connect(&db.url(), writer).await.unwrap();
        Some(Self { _db: db, writer, outbox })
    }

    async fn begin(&self, events: &[NewEvent]) -> Transaction<'static, Postgres> {
        let mut tx = self.writer.pool().begin().await.unwrap();
        self.writer.publish_many(&mut tx, events).await.unwrap();
        tx
    }
}

#[async_trait]
impl LogUnderTest for Canonical {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        Admin::publish(&self.writer, events).await.unwrap()
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        self.begin(events).await.rollback().await.unwrap();
    }

    async fn publish_open(&self, events: &[NewEvent]) -> Option<Box<dyn OpenPublish>> {
        Some(Box::new(Open(self.begin(events).await)))
    }

    async fn publish_bad(&self, key: &str) -> Option<i64> {
        let sql = format!(
            "INSERT INTO {} (id, stream, event_type, aggregate_type, aggregate_id, headers) \
             VALUES (gen_random_uuid(), 's', 'T', 'A', $1, '{{\"a\": 1}}') RETURNING seq",
            self.writer.spec().qualified()
        );
        let mut tx = self.writer.pool().begin().await.unwrap();
        // The table refuses such a row today; one of before may be there.
        sqlx::raw_sql("SET LOCAL session_replication_role = replica").execute(&mut *tx).await.unwrap();
        let query = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).persistent(false);
        let seq = query.bind(key).fetch_one(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        Some(seq)
    }

    fn log(&self, options: LogOptions) -> Arc<dyn Source> {
        Arc::new(self.outbox.log(options))
    }

    fn flaky_log(&self, options: LogOptions, answers: LostAnswers) -> Option<Arc<dyn Source>> {
        Some(Arc::new(Log::new(Flaky::new(PgLog::new(self.outbox.clone()), answers), options)))
    }

    fn admin(&self) -> Arc<dyn LogAdmin> {
        Arc::new(self.outbox.clone())
    }

    async fn away(&self) -> Option<Vec<airtight_core::admin::AwayStatus>> {
        Some(self.outbox.status().await.unwrap().away)
    }

    async fn expire_leases(&self) {
        let sql = "UPDATE airtight.relay SET expires_at = now() - interval '1 s'";
        sqlx::raw_sql(sql).execute(self.outbox.pool()).await.unwrap();
    }
}

mod canonical {
    airtight_testkit::log_conformance!(|name| async move { crate::Canonical::create(name).await });
}

mod plain {
    airtight_testkit::log_conformance!(|name| async move { crate::Canonical::plain(name).await });
}

mod pooled {
    airtight_testkit::log_conformance!(|name| async move { crate::Canonical::pooled(name).await });
}
