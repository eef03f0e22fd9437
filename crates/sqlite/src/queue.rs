//! The methods of [`QueueStore`]; those that relays of a log share are in `members`.

use std::time::Duration;

use airtight_core::{
    Backlog, Code, Result, Verdict,
    admin::Finding,
    group::{Member, Members},
    queue::{ClaimRequest, Claimed, QueueStore, RowClaim},
    table::TableSpec,
};
use async_trait::async_trait;
use sqlx::AssertSqlSafe;

use crate::{
    candidate::{streams_bind, streams_where},
    claim,
    error::db,
    fits, hold,
    outbox::SqliteOutbox,
    schema, settle,
    sql::{HELD, NOW},
    watch::CommitWatcher,
};

/// The queue in a SQLite file; [`SqliteOutbox::queue`] makes it a source.
#[derive(Debug)]
pub struct SqliteQueue {
    outbox: SqliteOutbox,
    watch: CommitWatcher,
}

impl SqliteQueue {
    /// The queue in `outbox`.
    pub fn new(outbox: SqliteOutbox) -> Self {
        Self { watch: CommitWatcher::new(outbox.clone()), outbox }
    }
}

#[async_trait]
impl QueueStore for SqliteQueue {
    fn members(&self) -> &dyn Members {
        &self.outbox
    }

    fn table(&self) -> Option<&TableSpec> {
        Some(self.outbox.table())
    }

    async fn open(&self) -> Result<()> {
        let sql = self.outbox.queue_sql()?;
        let mut conn = self.outbox.acquire().await?;
        let problems = schema::problems(&mut conn, sql).await?;
        if !problems.is_empty() {
            return Err(Finding::refusal(Code::BAD_TABLE, &problems));
        }
        if let Some(note) = fits::suspicion(&mut conn, sql).await? {
            tracing::warn!("{note}");
        }
        Ok(())
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
        let later = format!(
            "SELECT count(*), (julianday(min({0})) - julianday('now')) * 86400.0 FROM {1} WHERE {2} AND {0} > {NOW} \
             AND {0} < '{HELD}'{3}",
            sql.retry("o"),
            sql.from("o"),
            sql.open("o"),
            streams_where(sql, "o", &member.streams, 1)
        );
        let later: (i64, Option<f64>) = sqlx::query_as(AssertSqlSafe(later))
            .bind(streams_bind(&member.streams))
            .fetch_one(&mut *conn)
            .await
            .map_err(db)?;
        let next_due = later.1.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        Ok(Backlog { unfinished, blocked, not_due: later.0.unsigned_abs(), next_due })
    }

    async fn wait(&self, at_most: Duration) {
        self.watch.wait(at_most).await;
    }
}
