//! The inbox: which events a consumer has already seen, in the file that its handlers write to.
//!
//! The entry is written in the handler's own transaction, so it is there exactly when the handler's writes are.

use airtight_core::Result;
use sqlx::{AssertSqlSafe, SqliteConnection};

use crate::error::db;

/// The record that makes a repeated event a no-op; see [`crate::SqliteOutbox::inbox`].
///
/// ```no_run
/// # async fn example(outbox: airtight_sqlite::SqliteOutbox) -> airtight_core::Result<()> {
/// let inbox = outbox.inbox();
/// let mut tx = outbox.pool().begin_with("BEGIN IMMEDIATE").await.expect("a transaction");
/// if inbox.first_time(&mut tx, "billing", "0198a5c2-…").await? {
///     // ... the handler's own statements on `tx` ...
/// }
/// tx.commit().await.expect("committed: both or neither");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Inbox {
    /// The outbox's name, as a literal.
    outbox: String,
}

impl Inbox {
    pub(crate) fn new(outbox: &str) -> Self {
        Self { outbox: outbox.to_owned() }
    }

    /// Whether the consumer sees this key for the first time. If so, it is written down in the caller's
    /// transaction: rolled back with it, it was never seen.
    pub async fn first_time(&self, conn: &mut SqliteConnection, consumer: &str, key: &str) -> Result<bool> {
        self.remember(conn, consumer, key, None).await
    }

    /// The same, with the event's `seq` in the log: a seek that makes the inbox forget goes by it. Without one it
    /// goes by the time at which the event was seen.
    pub async fn first_time_at(
        &self,
        conn: &mut SqliteConnection,
        consumer: &str,
        key: &str,
        seq: i64,
    ) -> Result<bool> {
        self.remember(conn, consumer, key, Some(seq)).await
    }

    async fn remember(
        &self,
        conn: &mut SqliteConnection,
        consumer: &str,
        key: &str,
        seq: Option<i64>,
    ) -> Result<bool> {
        let insert = format!(
            "INSERT INTO airtight_inbox (outbox, consumer, key, seq) VALUES ({}, ?1, ?2, ?3) ON CONFLICT DO NOTHING",
            self.outbox
        );
        let done = sqlx::query(AssertSqlSafe(insert))
            .bind(consumer)
            .bind(key)
            .bind(seq)
            .execute(conn)
            .await
            .map_err(db)?;
        Ok(done.rows_affected() == 1)
    }
}
