//! The traits that both kinds of a queue's table implement.
//!
//! [`Canonical`] is the table that airtight's migrations make: its columns are known, and its statements name them.
//! [`Foreign`] is any other table: its statements are assembled from the mapping, and leases are in the side table.
//! [`load`] chooses between the two, and nothing else asks which one a table is.

use std::{fmt, ops::Deref};

use airtight_core::{
    Error, Result,
    group::Member,
    queue::{ClaimRequest, Claimed, RowClaim, RowKey},
};
use async_trait::async_trait;

use super::{
    canonical::Canonical,
    foreign::Foreign,
    settle::{Kind, Settled},
};
use crate::{PgOutbox, columns::Columns, outbox::Conn, session::Session};

/// Reads the table's columns and makes the store for its kind.
pub(crate) async fn load(outbox: &PgOutbox, conn: &mut Conn) -> Result<Box<dyn Store>> {
    let columns = Columns::load(outbox, conn).await?;
    Ok(if Canonical::fits(outbox, &columns) {
        Box::new(Canonical::new(columns))
    } else {
        Box::new(Foreign::new(columns))
    })
}

/// What an operator's statements need to know of a table: SQL expressions about its row `t` and, where
/// [`QueueTable::side`] joins one, the side table's row `s`. What both kinds express alike is in [`Columns`].
pub(crate) trait QueueTable: Deref<Target = Columns> + fmt::Debug + Send + Sync {
    /// The join that the other expressions need; empty where the table holds everything itself.
    fn side(&self) -> String;

    /// A statement that removes what the side table has of the rows in `target`, by their `identity`.
    fn forget_side(&self) -> Option<String>;

    /// The state as the canonical word; the table's own word where no role explains it.
    fn state(&self) -> String;

    /// How often a relay vanished with the row.
    fn lost_leases(&self) -> String;

    /// Whether the row is marked as held back behind an earlier event of its key.
    fn is_held(&self) -> String;

    /// When the row is tried again, for a program; NULL for one that is held.
    fn shown_retry(&self) -> String;

    /// Whether an open row has failed before, or waits for a time.
    fn waits(&self) -> String;

    /// Whether a row that stands behind a waiting one of its key is blocked by it.
    fn is_blocked(&self) -> String;

    /// The key by which [`QueueTable::is_blocked`] looks.
    fn blocked_key(&self) -> String;

    /// What to write into the column of the retry time so that the row is due at once.
    fn due_now(&self, column: &str) -> String;

    /// When a done row was finished, by the column that the mapping gives for it.
    fn finished(&self, column: &str) -> String;

    /// Whether no role explains the row's status; none where the table refuses such words itself.
    fn unexplained(&self) -> Option<String>;
}

/// What a relay does with a table. Each kind has its own statements for all of it.
#[async_trait]
pub(crate) trait Store: QueueTable {
    /// What is left to do when a relay has joined.
    async fn joined(&self, _outbox: &PgOutbox, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// See [`airtight_core::queue::QueueStore::reads`].
    fn reads(&self) -> bool {
        false
    }

    /// Checks what reading needs, before a relay joins.
    async fn opened(&self, _outbox: &PgOutbox, _conn: &mut Conn) -> Result<()> {
        Ok(())
    }

    /// What is left to do with every heartbeat.
    async fn beat(&self, _outbox: &PgOutbox, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// The relay has given up partitions: another one may read them until they come back.
    fn gave(&self, _member: &Member, _partitions: &[u16]) {}

    /// A verdict was committed, or refused for good.
    fn settled(&self, _member: &Member, _claim: &RowClaim, _kind: Kind, _applied: bool) {}

    /// See [`airtight_core::queue::QueueStore::claim`].
    async fn claim(&self, outbox: &PgOutbox, request: &ClaimRequest<'_>) -> Result<Claimed>;

    /// Renews the leases of rows; returns those that are still the relay's.
    async fn renew(
        &self,
        outbox: &PgOutbox,
        conn: &mut Conn,
        member: &Member,
        rows: &[RowClaim],
    ) -> Result<Vec<RowKey>>;

    /// Applies verdicts of one kind; returns the rows on which they took effect.
    async fn settle(
        &self,
        outbox: &PgOutbox,
        conn: &mut Conn,
        member: &Member,
        kind: Kind,
        rows: Settled<'_>,
    ) -> Result<Vec<RowKey>>;

    /// Writes what became of rows that were not claimed: another way to read the table has delivered or given up on
    /// them. What is finished already stays as it is. Rows are named by their identity, as text.
    async fn mark(
        &self,
        outbox: &PgOutbox,
        conn: &mut Session<'_>,
        rows: &[(String, Option<&Error>)],
        unknown: bool,
    ) -> Result<()>;

    /// See [`airtight_core::queue::QueueStore::unhold`].
    async fn unhold(&self, outbox: &PgOutbox, member: &Member, partitions: &[u16]) -> Result<u64>;

    /// Counts the backlog. Parameter: streams. Columns: unfinished, blocked by a dead event of the same key, not due,
    /// seconds until the next one is due.
    fn backlog_statement(&self, member: &Member) -> String;

    /// Whether a row of the streams waits for a person. Parameter: streams.
    fn has_dead_statement(&self) -> String;
}
