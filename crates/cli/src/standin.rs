//! Stands in for the backends until their branches are merged; nothing in here works.
#![allow(dead_code, clippy::unused_async, clippy::unused_self)]

use std::time::Duration;

use airtight::{
    Backlog, Batch, Capabilities, Delivery, Error, Limits, NewEvent, Outcome, Published, Result, Settlement,
    Sink, Source, admin::*, queue::QueueOptions, source::Settled, table::TableSpec,
};
use async_trait::async_trait;
use sqlx::{SqliteConnection, SqlitePool};

fn no<T>() -> Result<T> {
    Err(Error::permanent("not_built", "this backend is not built in yet"))
}

pub(crate) struct SqliteOutbox(SqlitePool);
impl SqliteOutbox {
    pub(crate) async fn open(_: &str) -> Result<Self> {
        no()
    }
    pub(crate) fn pool(&self) -> &SqlitePool {
        &self.0
    }
    pub(crate) async fn publish_many(
        &self,
        _: &mut SqliteConnection,
        _: &[NewEvent],
    ) -> Result<Vec<Published>> {
        no()
    }
    pub(crate) fn queue(&self, _: QueueOptions) -> NoSource {
        NoSource
    }
    pub(crate) fn spec(self, _: TableSpec) -> Self {
        self
    }
    pub(crate) fn migration_sql() -> String {
        String::new()
    }
}

#[derive(Default)]
pub(crate) struct PgOptions {
    pub(crate) schema: String,
    pub(crate) table: String,
    pub(crate) spec: Option<TableSpec>,
    pub(crate) max_connections: u32,
    pub(crate) listen: bool,
    pub(crate) listen_url: Option<String>,
    pub(crate) prepared_statements: bool,
}
pub(crate) struct PgOutbox;
impl PgOutbox {
    pub(crate) async fn connect(_: &str, _: PgOptions) -> Result<Self> {
        no()
    }
    pub(crate) fn queue(&self, _: QueueOptions) -> NoSource {
        NoSource
    }
    pub(crate) fn migration_sql(_: &str, _: &str) -> String {
        String::new()
    }
}

pub(crate) struct NoSource;
#[async_trait]
impl Source for NoSource {
    async fn next(&self, _: Limits) -> Result<Batch> {
        no()
    }
    async fn settle(&self, _: &[Settlement]) -> Result<Settled> {
        no()
    }
    async fn backlog(&self) -> Result<Backlog> {
        no()
    }
}

macro_rules! no_admin {
    ($type:ty) => {
        #[async_trait]
        impl Admin for $type {
            async fn migrate(&self) -> Result<Vec<String>> {
                no()
            }
            async fn check(&self) -> Result<Vec<Finding>> {
                no()
            }
            async fn publish(&self, _: &[NewEvent]) -> Result<Vec<Published>> {
                no()
            }
            async fn status(&self) -> Result<Status> {
                no()
            }
            async fn list(&self, _: &Filter) -> Result<Vec<Row>> {
                no()
            }
            async fn show(&self, _: &str) -> Result<Option<Detail>> {
                no()
            }
            async fn retry(&self, _: &str) -> Result<Acted> {
                no()
            }
            async fn retry_dead(&self, _: &Filter) -> Result<u64> {
                no()
            }
            async fn discard(&self, _: &str) -> Result<Acted> {
                no()
            }
            async fn discard_dead(&self, _: &Filter) -> Result<u64> {
                no()
            }
            async fn prune(&self, _: Duration, _: &(dyn Fn(u64) + Sync)) -> Result<u64> {
                no()
            }
            async fn blocked(&self, _: usize) -> Result<Vec<BlockedKey>> {
                no()
            }
        }
    };
}
no_admin!(SqliteOutbox);
no_admin!(PgOutbox);

pub(crate) struct WebhookConfig;
impl WebhookConfig {
    pub(crate) fn new(_: &str) -> Self {
        Self
    }
    pub(crate) fn secret(self, _: &str) -> Self {
        self
    }
    pub(crate) fn header(self, _: &str, _: &str) -> Self {
        self
    }
    pub(crate) fn timeout(self, _: Duration) -> Self {
        self
    }
    pub(crate) fn concurrency(self, _: usize) -> Self {
        self
    }
}
pub(crate) struct WebhookSink;
impl WebhookSink {
    pub(crate) fn new(_: WebhookConfig) -> Result<Self> {
        no()
    }
}
#[async_trait]
impl Sink for WebhookSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }
    async fn deliver(&self, _: &[Delivery]) -> Vec<Outcome> {
        Vec::new()
    }
}
