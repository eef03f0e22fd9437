//! What a database must be able to do for its table to be a queue.
//!
//! A store is SQL and nothing else: what is claimed by whom, for how long and in what order is decided in
//! [`super::Queue`], once for all stores. Every time in here is the database's.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use crate::{
    Backlog, Error, Event, Result, Verdict,
    group::{Member, Members},
    table::TableSpec,
};

/// After so many lost leases an event is delivered alone.
pub const SUSPECT_AFTER: u32 = 3;

/// The verbs of a queue in a database.
///
/// Each is one short transaction, and safe to repeat. None stays open across a call to a sink.
#[async_trait]
pub trait QueueStore: Send + Sync + 'static {
    /// The group that the queue's relays are in.
    fn members(&self) -> &dyn Members;

    /// The table, where it has one.
    fn table(&self) -> Option<&TableSpec> {
        None
    }

    /// Connects and checks that the table fits its spec.
    async fn open(&self) -> Result<()>;

    /// Claims rows in order; see [`ClaimRequest`]. Fenced: a relay that was evicted claims nothing and gets an
    /// error with the code [`crate::Code::EVICTED`].
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed>;

    /// Applies verdicts, each fenced by its claim token, and says of each whether it took effect. With order,
    /// nothing that an evicted relay settles takes effect.
    ///
    /// Verdicts that hold a key back (retry, dead, unknown) are committed no later than releases of events
    /// behind them, since a claim may run at the same time.
    async fn settle(&self, member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>>;

    /// Frees events that were held back behind one that is finished now. Returns how many.
    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64>;

    /// What is left to deliver.
    async fn backlog(&self, member: &Member) -> Result<Backlog>;

    /// Returns when there may be something new, or after `at_most`. May be dropped at any time.
    async fn wait(&self, at_most: Duration) {
        tokio::time::sleep(at_most).await;
    }
}

/// How a store tells its rows apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RowKey {
    /// An integer identity.
    Int(i64),
    /// Any other, as text.
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
/// A claim takes rows that are pending and due, and rows whose claim is void: by the lease's end without
/// order; by a token other than `tokens` in an owned partition with order, since nobody else may hold one
/// there. Taking over such a row costs no attempt but grows its lost leases, and one that reaches
/// [`SUSPECT_AFTER`] becomes a *suspect*: pending, due, and left to a claim with `alone`.
#[derive(Debug, Clone)]
pub struct ClaimRequest<'a> {
    /// Who claims.
    pub member: &'a Member,
    /// The token for this claim.
    pub token: Uuid,
    /// At most so many rows.
    pub events: usize,
    /// At most so many bytes of payload, though always at least one row.
    pub bytes: usize,
    /// Payloads larger than this are not read but rejected.
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
    /// Rows that were claimed but did not fit the byte bound; given back at once.
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
    /// Which attempt this is, from one.
    pub attempt: u32,
    /// Its own limit.
    pub max_attempts: Option<u32>,
    /// How often a relay vanished with it.
    pub lost_leases: u32,
    /// Whether it had failed before, so that others of its key may wait behind it.
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
