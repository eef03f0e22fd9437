//! The inbox: the record of the events that a consumer has processed, written in the transaction of its handler.

use std::time::Duration;

use airtight_core::{Event, Result, inbox::DedupeKey};
use sqlx::{AssertSqlSafe, Executor, PgConnection, PgPool, Postgres};

use crate::{PgOutbox, error::doing};

/// How many rows one statement of retention removes.
const CHUNK: i64 = 10_000;

/// Remembers, for each consumer, which events were processed. It is the table `inbox` next to the outbox's own tables,
/// or in the database that the handlers write to, after `migrate` was run there.
///
/// ```no_run
/// # async fn example(outbox: airtight_postgres::PgOutbox, id: &str) -> Result<(), Box<dyn std::error::Error>> {
/// let inbox = outbox.inbox();
/// let mut tx = outbox.pool().begin().await?;
/// if inbox.first_time(&mut tx, "billing", id).await? {
///     sqlx::query("UPDATE account SET balance = balance - 12").execute(&mut *tx).await?;
/// }
/// tx.commit().await?; // both, or neither
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Inbox {
    table: String,
    pooled: bool,
}

impl PgOutbox {
    /// The inbox in this database.
    pub fn inbox(&self) -> Inbox {
        Inbox { table: self.own("inbox"), pooled: self.pooled }
    }
}

impl Inbox {
    /// Whether the consumer sees this key for the first time. The key counts as seen when the transaction of `conn`
    /// commits. Waits for another open transaction that has recorded the same key.
    pub async fn first_time(&self, conn: &mut PgConnection, consumer: &str, key: &str) -> Result<bool> {
        self.note(conn, consumer, key, None).await
    }

    /// The same for an event. `dedupe` defines which events count as the same. The `seq` is recorded, so that a replay
    /// can forget the event (`consumers seek --forget-inbox`).
    pub async fn first_time_for(
        &self,
        conn: &mut PgConnection,
        consumer: &str,
        event: &Event,
        dedupe: &DedupeKey,
    ) -> Result<bool> {
        self.note(conn, consumer, &dedupe.of(event)?, Some(event.seq)).await
    }

    pub(crate) async fn note(
        &self,
        conn: &mut PgConnection,
        consumer: &str,
        key: &str,
        seq: Option<i64>,
    ) -> Result<bool> {
        let noted = sqlx::query(AssertSqlSafe(self.sql()))
            .persistent(!self.pooled)
            .bind(consumer)
            .bind(key)
            .bind(seq)
            .execute(conn)
            .await
            .map_err(doing("asking the inbox"))?;
        Ok(noted.rows_affected() == 1)
    }

    pub(crate) fn sql(&self) -> String {
        format!("INSERT INTO {} (consumer, key, seq) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING", self.table)
    }

    /// Removes entries older than `keep`, in bounded statements. Returns how many.
    pub async fn prune(&self, pool: &PgPool, keep: Duration) -> Result<u64> {
        let mut total = 0;
        loop {
            let gone = self.prune_some(pool, keep).await?;
            total += gone;
            if gone == 0 {
                return Ok(total);
            }
        }
    }

    /// One of these statements.
    pub(crate) async fn prune_some<'c>(
        &self,
        executor: impl Executor<'c, Database = Postgres>,
        keep: Duration,
    ) -> Result<u64> {
        let sql = format!(
            "DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} \
             WHERE seen_at < now() - make_interval(secs => $1) LIMIT {CHUNK}))",
            table = self.table
        );
        let gone = sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(keep.as_secs_f64())
            .execute(executor)
            .await
            .map_err(doing("pruning the inbox"))?;
        Ok(gone.rows_affected())
    }
}
