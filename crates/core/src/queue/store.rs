//! What a database must do so that a table can be read as a queue.
//!
//! A store is only SQL. [`super::Queue`] decides for all stores which relay claims what, for how long and in what order.
//! All times here are times of the database's clock.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use crate::{
    Backlog, Error, Event, Result, Verdict,
    group::{Member, Members},
    table::TableSpec,
};

/// After this many lost leases an event is delivered alone.
pub const SUSPECT_AFTER: u32 = 3;

/// The operations of a queue in a database.
///
/// Each is safe to repeat. A settle is one transaction. The others may run several short statements, each a transaction of its
/// own: a claim that found only events to hold back looks again, for example. What one claim returns was claimed in one
/// transaction. [`QueueStore::wait`] has none. No transaction outlives the call that began it, so none is open during a
/// call to a sink.
#[async_trait]
pub trait QueueStore: Send + Sync + 'static {
    /// The group of the queue's relays.
    fn members(&self) -> &dyn Members;

    /// The table, if the store has one.
    fn table(&self) -> Option<&TableSpec> {
        None
    }

    /// Whether the relays of this queue own partitions in every order, and read their rows instead of claiming them. Known
    /// once the store is open.
    fn reads(&self) -> bool {
        false
    }

    /// Connects and checks that the table fits its spec.
    async fn open(&self) -> Result<()>;

    /// Claims rows in order; see [`ClaimRequest`]. Fenced: a relay that was evicted claims nothing and gets an
    /// error with the code [`crate::Code::EVICTED`].
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed>;

    /// Applies verdicts, each fenced by its claim token, and returns for each whether it took effect. With order,
    /// no verdict of an evicted relay takes effect.
    ///
    /// Verdicts that hold a key back (retry, dead, unknown) are committed no later than releases of events
    /// behind them, since a claim may run at the same time.
    async fn settle(&self, member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>>;

    /// Frees events that were held back behind an event that is finished now. Returns how many.
    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64>;

    /// What is left to deliver.
    async fn backlog(&self, member: &Member) -> Result<Backlog>;

    /// Returns when there may be something new, or after `at_most`. May be dropped at any time.
    async fn wait(&self, at_most: Duration) {
        tokio::time::sleep(at_most).await;
    }
}

/// How a store identifies its rows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowKey {
    /// An integer identity.
    Int(i64),
    /// Any other identity, as text.
    Text(String),
}

/// A row and the claim token that fences it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RowClaim {
    /// The row.
    pub key: RowKey,
    /// New for every claim.
    pub token: Uuid,
}

/// What to claim.
///
/// A claim takes rows that are pending and due, and rows whose claim is void. Without order, a claim is void when its
/// lease has ended. With order, it is void if it is in a partition that this relay owns and its token is not in `tokens`,
/// since no other relay may hold a row there. The takeover of such a row costs no attempt, but counts a lost lease. A row
/// that reaches [`SUSPECT_AFTER`] lost leases becomes a *suspect*: pending, due, and left to a claim with `alone`.
#[derive(Debug, Clone)]
pub struct ClaimRequest<'a> {
    /// The relay that claims.
    pub member: &'a Member,
    /// The token for this claim.
    pub token: Uuid,
    /// The most rows.
    pub events: usize,
    /// The most bytes of payload. One row is always allowed, however large.
    pub bytes: usize,
    /// Larger payloads are rejected without being read.
    pub max_payload: usize,
    /// With order: the partitions to claim from, in seq order per key. Total order has the partition 0.
    pub partitions: &'a [u16],
    /// Tokens under which this relay holds rows now.
    pub tokens: &'a [Uuid],
    /// Claim exactly one suspect, and nothing else.
    pub alone: bool,
}

/// What was claimed.
#[derive(Debug, Default)]
pub struct Claimed {
    /// The rows, in seq order.
    pub rows: Vec<ClaimedRow>,
    /// Rows that were claimed but did not fit the limit of bytes; they are given back immediately.
    pub overflow: Vec<RowKey>,
    /// Whether suspects are due, to be claimed alone.
    pub suspects: bool,
}

/// One claimed row.
#[derive(Debug)]
pub struct ClaimedRow {
    /// The row.
    pub key: RowKey,
    /// The partition of its key; zero without order.
    pub partition: u16,
    /// The number of this attempt, starting at one.
    pub attempt: u32,
    /// The event's own limit of attempts.
    pub max_attempts: Option<u32>,
    /// How often a relay vanished while it held this row.
    pub lost_leases: u32,
    /// Whether the event has failed before, so that other events of its key may wait behind it.
    pub waited: bool,
    /// The event, or why the row cannot be one.
    pub event: std::result::Result<Event, BadRow>,
}

/// A row that cannot become an event.
#[derive(Debug)]
pub struct BadRow {
    /// Its id, for the operator.
    pub id: String,
    /// Its ordering key, if it could be read.
    pub key: Option<String>,
    /// Why.
    pub error: Error,
}
