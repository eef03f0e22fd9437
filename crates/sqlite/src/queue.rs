//! The verbs of [`QueueStore`]; those that relays of a log share are in `members`.

use std::time::Duration;

use airtight_core::{
    Backlog, Error, Result, Verdict,
    group::{Member, Members, Pulse},
    queue::{ClaimRequest, Claimed, QueueStore, RowClaim},
};
use async_trait::async_trait;
use sqlx::AssertSqlSafe;

use crate::{
    candidate::{streams_bind, streams_where},
    claim,
    error::db,
    hold, members,
    outbox::SqliteOutbox,
    schema, settle,
    watch::CommitWatch,
};

/// The queue in a SQLite file; [`SqliteOutbox::queue`] makes it a source.
#[derive(Debug)]
pub struct SqliteQueue {
    outbox: SqliteOutbox,
    watch: CommitWatch,
}

impl SqliteQueue {
    /// The queue in `outbox`.
    pub fn new(outbox: SqliteOutbox) -> Self {
        Self { watch: CommitWatch::new(outbox.clone()), outbox }
    }
}

#[async_trait]
impl Members for SqliteQueue {
    async fn join(&self, member: &Member) -> Result<()> {
        self.outbox.queue_sql()?;
        members::join(&self.outbox, member).await
    }

    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse> {
        members::heartbeat(&self.outbox, member, rows).await
    }

    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>> {
        members::take(&self.outbox, member, wanted).await
    }

    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()> {
        members::give(&self.outbox, member, partitions).await
    }

    async fn leave(&self, member: &Member) -> Result<()> {
        members::leave(&self.outbox, member).await
    }
}

#[async_trait]
impl QueueStore for SqliteQueue {
    async fn open(&self) -> Result<()> {
        let sql = self.outbox.queue_sql()?;
        let mut conn = self.outbox.acquire().await?;
        let problems = schema::problems(&mut conn, sql).await?;
        if problems.is_empty() { Ok(()) } else { Err(Error::permanent("bad_table", problems.join("; "))) }
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed> {
        claim::claim(&self.outbox, request).await
    }

    async fn settle(&self, _member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>> {
        settle::settle(&self.outbox, rows).await
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        hold::unhold(&self.outbox, member, partitions).await
    }

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        let sql = self.outbox.queue_sql()?;
        let mut conn = self.outbox.acquire().await?;
        let mut unfinished = 0;
        for arm in ["IS NULL", "IS NOT NULL"] {
            let count = format!(
                "SELECT count(*) FROM {} WHERE {} AND {} {arm}{}",
                sql.from("o"),
                sql.open("o"),
                sql.retry("o"),
                streams_where(sql, "o", &member.streams, 1)
            );
            let count: i64 = sqlx::query_scalar(AssertSqlSafe(count))
                .bind(streams_bind(&member.streams))
                .fetch_one(&mut *conn)
                .await
                .map_err(db)?;
            unfinished += count.unsigned_abs();
        }
        let blocked = hold::blocked(&mut conn, sql, member).await?;
        Ok(Backlog { unfinished, blocked })
    }

    async fn wait(&self, at_most: Duration) {
        self.watch.wait(at_most).await;
    }
}
