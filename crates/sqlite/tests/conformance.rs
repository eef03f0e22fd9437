//! The conformance suite for sources, on a real SQLite file.

#![allow(clippy::unwrap_used, reason = "all of it is test code")]

use std::sync::Arc;

use airtight_core::{NewEvent, Published, Source, admin::Admin, queue::QueueOptions};
use airtight_sqlite::SqliteOutbox;
use airtight_testkit::sources::SourceUnderTest;
use async_trait::async_trait;

struct Sqlite {
    outbox: SqliteOutbox,
    _dir: tempfile::TempDir,
}

impl Sqlite {
    async fn create(_name: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("outbox.db");
        let outbox = SqliteOutbox::open(path.to_str().unwrap()).await.unwrap();
        outbox.migrate().await.unwrap();
        Some(Self { outbox, _dir: dir })
    }

    async fn sql(&self, sql: &'static str) {
        sqlx::raw_sql(sql).execute(self.outbox.pool()).await.unwrap();
    }
}

#[async_trait]
impl SourceUnderTest for Sqlite {
    async fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        Admin::publish(&self.outbox, events).await.unwrap()
    }

    async fn publish_rolled_back(&self, events: &[NewEvent]) {
        let mut tx = self.outbox.pool().begin().await.unwrap();
        self.outbox.publish_many(&mut tx, events).await.unwrap();
        tx.rollback().await.unwrap();
    }

    fn queue(&self, options: QueueOptions) -> Arc<dyn Source> {
        Arc::new(self.outbox.queue(options))
    }

    fn admin(&self) -> Option<Arc<dyn Admin>> {
        Some(Arc::new(self.outbox.clone()))
    }

    async fn set_back_by_hand(&self, id: &str) {
        sqlx::query("UPDATE airtight_outbox SET status = 'pending' WHERE id = ?1")
            .bind(id)
            .execute(self.outbox.pool())
            .await
            .unwrap();
    }

    async fn expire_leases(&self) {
        self.sql("UPDATE airtight_relay SET expires_at = '2000-01-01T00:00:00.000Z'").await;
        self.sql("UPDATE airtight_outbox SET locked_until = '2000-01-01T00:00:00.000Z' WHERE status = 'processing'")
            .await;
    }
}

airtight_testkit::source_conformance!(|name| async move { Sqlite::create(name).await });
