//! What a database must be able to do for its table to be a queue.
//!
//! A store is SQL and nothing else: what is claimed by whom, for how long and in what order is decided in
//! [`super::Queue`], once for all stores. Every time in here is the database's.

use std::{collections::BTreeMap, time::Duration};

use async_trait::async_trait;
use uuid::Uuid;

use crate::{Backlog, Error, Event, Order, Result, Verdict};

/// After so many lost leases an event is delivered alone.
pub const SUSPECT_AFTER: u32 = 3;

/// The verbs of a queue in a database.
///
/// Each is one short transaction, and safe to repeat. None stays open across a call to a sink.
#[async_trait]
pub trait QueueStore: Send + Sync + 'static {
    /// Connects and checks that the table fits its spec.
    async fn open(&self) -> Result<()>;

    /// Writes down a relay with its lease, and refuses one that would share streams with a live relay of
    /// another group: two groups on one stream would break the order of both. Creates the group's partitions.
    async fn join(&self, member: &Member) -> Result<()>;

    /// Renews the relay's lease and those of the rows given, and tells who else is there.
    ///
    /// A relay that has been evicted stays so: [`Pulse::alive`] is false and nothing was renewed.
    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse>;

    /// Evicts relays whose lease has run out, then takes those of `wanted` that no live relay owns. Returns
    /// what was taken. Atomic, one caller at a time in a group.
    ///
    /// Evicting must wait for, and thereby fence, any claim that the evicted relay has under way.
    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>>;

    /// Gives partitions up. Called only when none of their rows is in flight.
    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()>;

    /// Claims rows in order; see [`ClaimRequest`]. Fenced: a relay that was evicted claims nothing and gets an
    /// error with the code [`EVICTED`].
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed>;

    /// Applies verdicts, each fenced by its claim token, and says of each whether it took effect. With order,
    /// nothing that an evicted relay settles takes effect.
    ///
    /// Verdicts that hold a key back (retry, dead, unknown) are committed no later than releases of events
    /// behind them, since a claim may run at the same time.
    async fn settle(&self, member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>>;

    /// Frees events that were held back behind one that is finished now. Returns how many.
    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64>;

    /// Takes the relay off the list, with all its partitions.
    async fn leave(&self, member: &Member) -> Result<()>;

    /// What is left to deliver.
    async fn backlog(&self, member: &Member) -> Result<Backlog>;

    /// Returns when there may be something new, or after `at_most`. May be dropped at any time.
    async fn wait(&self, at_most: Duration) {
        tokio::time::sleep(at_most).await;
    }
}

/// The error code of a claim by a relay that was evicted.
pub const EVICTED: &str = "evicted";

/// A relay as its peers see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// New for every start, so that nobody is taken for a former self.
    pub id: Uuid,
    /// Where it runs, for people.
    pub host: String,
    /// Which relays share partitions: those with the same order, streams and policy for dead events.
    pub group: String,
    /// The streams it reads; empty for all.
    pub streams: Vec<String>,
    /// The order it keeps.
    pub order: Order,
    /// Whether a key stays blocked behind a dead event.
    pub block_on_dead: bool,
    /// How long a lease lasts.
    pub lease: Duration,
    /// How many partitions the group has; zero without order.
    pub partitions: u16,
}

/// What a heartbeat brought back.
#[derive(Debug, Clone, Default)]
pub struct Pulse {
    /// Whether this relay is still on the list.
    pub alive: bool,
    /// Live relays of the group, this one included.
    pub members: Vec<Uuid>,
    /// Who owns which partition; partitions nobody owns are missing.
    pub owners: BTreeMap<u16, Uuid>,
    /// Rows that were no longer this relay's to renew.
    pub lost: Vec<RowKey>,
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
