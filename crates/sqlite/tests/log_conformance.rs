//! The conformance suite for logs, on a real SQLite file.

#![allow(clippy::unwrap_used, reason = "all of it is test code")]

use std::sync::Arc;

use airtight_core::{
    NewEvent, Published, Source,
    admin::Admin,
    log::{Log, LogAdmin, LogOptions},
    table::Shape,
};
use airtight_sqlite::{SqliteLog, SqliteOutbox};
use airtight_testkit::logs::{Flaky, LogUnderTest, LostAnswers};
use async_trait::async_trait;

struct Sqlite {
    outbox: SqliteOutbox,
    _dir: tempfile::TempDir,
}

impl Sqlite {
    async fn create(_name: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.db");
        let outbox = SqliteOutbox::open(path.to_str().unwrap()).await.unwrap().shape(Shape::Log);
        outbox.migrate().await.unwrap();
        Some(Self { outbox, _dir: dir })
    }
}

#[async_trait]
impl LogUnderTest for Sqlite {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        Admin::publish(&self.outbox, events).await.unwrap()
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        let mut tx = self.outbox.pool().begin().await.unwrap();
        self.outbox.publish_many(&mut tx, events).await.unwrap();
        tx.rollback().await.unwrap();
    }

    async fn publish_bad(&self, key: &str) -> Option<i64> {
        let sql = "INSERT INTO airtight_outbox (id, stream, event_type, aggregate_type, aggregate_id, headers) \
                   VALUES (lower(hex(randomblob(16))), 's', 'T', 'A', ?1, '{\"a\": 1}') RETURNING seq";
        sqlx::query_scalar(sql).bind(key).fetch_one(self.outbox.pool()).await.ok()
    }

    fn log(&self, options: LogOptions) -> Arc<dyn Source> {
        Arc::new(self.outbox.log(options))
    }

    fn flaky_log(&self, options: LogOptions, answers: LostAnswers) -> Option<Arc<dyn Source>> {
        Some(Arc::new(Log::new(Flaky::new(SqliteLog::new(self.outbox.clone()), answers), options)))
    }

    fn admin(&self) -> Arc<dyn LogAdmin> {
        Arc::new(self.outbox.clone())
    }

    async fn away(&self) -> Option<Vec<airtight_core::admin::AwayStatus>> {
        Some(self.outbox.status().await.unwrap().away)
    }

    async fn expire_leases(&self) {
        let sql = "UPDATE airtight_relay SET expires_at = '2000-01-01T00:00:00.000Z'";
        sqlx::raw_sql(sql).execute(self.outbox.pool()).await.unwrap();
    }
}

airtight_testkit::log_conformance!(|name| async move { Sqlite::create(name).await });
