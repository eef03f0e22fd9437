//! What an operator may ask of a store: counts, lists, retries, retention. Used by the CLI and the dashboard.

use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use time::OffsetDateTime;

use crate::{Event, NewEvent, Published, Result, state::State};

/// The operator's side of a store.
#[async_trait]
pub trait Admin: Send + Sync {
    /// Creates or upgrades airtight's tables. Safe when many processes call it at once; refuses a schema that
    /// is newer than this program. Returns what it did, a line each; empty when all was there already.
    async fn migrate(&self) -> Result<Vec<String>>;

    /// What is wrong, or would surprise; empty when all is well.
    async fn check(&self) -> Result<Vec<Finding>>;

    /// Publishes in a transaction of its own. For tools; an application publishes in its own transaction.
    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Published>>;

    /// Counts and ages per stream, and the relays that are there.
    async fn status(&self) -> Result<Status>;

    /// Events by filter, in seq order, oldest first unless the filter says otherwise.
    async fn list(&self, filter: &Filter) -> Result<Vec<EventRow>>;

    /// One event in full, by id (or by seq, when the text is a number).
    async fn show(&self, id: &str) -> Result<Option<Detail>>;

    /// Makes one event due now with its attempts at zero. A done one refuses, a processing one too.
    async fn retry(&self, id: &str) -> Result<Acted>;

    /// The same for all dead events of the filter (never unknown ones). Returns how many.
    async fn retry_dead(&self, filter: &Filter) -> Result<u64>;

    /// Deletes one event that is not processing and not done.
    async fn discard(&self, id: &str) -> Result<Acted>;

    /// The same for all dead events of the filter (never unknown ones). Returns how many.
    async fn discard_dead(&self, filter: &Filter) -> Result<u64>;

    /// Deletes done events that are older than asked for, in bounded statements, and records of relays long
    /// gone. `progress` is told the running total. An error where the table does not say when an event was
    /// delivered: see [`TableSpec::age_column`](crate::table::TableSpec::age_column).
    async fn prune(&self, what: Prune, progress: &(dyn Fn(u64) + Sync)) -> Result<Removed>;

    /// Keys that wait behind a failed or dead event, with how many events wait.
    async fn blocked(&self, limit: usize) -> Result<Vec<BlockedKey>>;
}

/// Which done events [`Admin::prune`] deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prune {
    /// Those that were delivered longer ago than this.
    pub keep: Duration,
    /// Whether to go by when an event was written, where its table does not say when it was delivered.
    pub by_creation: bool,
    /// Whether to count only.
    pub dry_run: bool,
}

impl Prune {
    /// Those that were delivered longer ago than this.
    pub fn older_than(keep: Duration) -> Self {
        Self { keep, by_creation: false, dry_run: false }
    }
}

/// What [`Admin::prune`] did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    /// How many events.
    pub events: u64,
    /// The column that said how old they were.
    pub column: String,
}

/// Something `check` found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Whether it keeps airtight from working, or is only worth knowing.
    pub fatal: bool,
    /// What, and what to do about it.
    pub message: String,
}

/// What became of an operator's wish for one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acted {
    /// Done as asked.
    Yes,
    /// There is no such event.
    NotFound,
    /// Its state does not allow it.
    Refused(State),
}

/// Which events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only these states; empty for all.
    pub states: Vec<State>,
    /// Only this stream.
    pub stream: Option<String>,
    /// Only this type.
    pub event_type: Option<String>,
    /// Only this key.
    pub aggregate_id: Option<String>,
    /// Only with this error code.
    pub error_code: Option<String>,
    /// Only after this seq.
    pub after_seq: Option<i64>,
    /// Newest first.
    pub newest_first: bool,
    /// At most so many; zero for a default of 50.
    pub limit: usize,
}

/// An event in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EventRow {
    /// See [`Event::seq`].
    pub seq: i64,
    /// See [`Event::id`].
    pub id: String,
    /// See [`Event::stream`].
    pub stream: String,
    /// See [`Event::event_type`].
    pub event_type: String,
    /// See [`Event::aggregate_type`].
    pub aggregate_type: String,
    /// See [`Event::aggregate_id`].
    pub aggregate_id: String,
    /// Its state, as the canonical word, or the table's own word when nobody knows what that means.
    pub state: String,
    /// Attempts so far.
    pub attempts: u32,
    /// How often a relay vanished with it.
    pub lost_leases: u32,
    /// When it is due again.
    #[serde(with = "time::serde::rfc3339::option")]
    pub next_retry_at: Option<OffsetDateTime>,
    /// Whether it is held back behind an earlier event of its key.
    pub held: bool,
    /// The last error's code.
    pub error_code: Option<String>,
    /// The last error's message.
    pub error_message: Option<String>,
    /// When it was written.
    #[serde(with = "time::serde::rfc3339::option")]
    pub created_at: Option<OffsetDateTime>,
}

/// An event in full.
#[derive(Debug, Clone)]
pub struct Detail {
    /// What a list shows.
    pub row: EventRow,
    /// The event itself; an error's text when the row cannot be one.
    pub event: std::result::Result<Event, String>,
}

/// The state of an outbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Status {
    /// The table.
    pub outbox: String,
    /// Per stream.
    pub streams: Vec<StreamStatus>,
    /// Relays whose lease is valid.
    pub relays: Vec<RelayStatus>,
    /// Keys that wait behind a failed or dead event.
    pub blocked_keys: u64,
    /// The consumers of a log; a queue has none.
    pub consumers: Vec<crate::log::Consumer>,
    /// Those that follow the outbox through the WAL.
    pub slots: Vec<SlotStatus>,
    /// What events wait for that are not to blame: destinations that are away, those with the most events first, at most
    /// [`AWAY_SHOWN`] of them.
    pub away: Vec<AwayStatus>,
}

/// How many destinations a status names.
pub const AWAY_SHOWN: usize = 100;

/// A destination that is away, as the events say that wait for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct AwayStatus {
    /// Whose events, in a log and in the WAL; none in a queue.
    pub consumer: Option<String>,
    /// The error's code, as it is stored: see [`crate::Error::is_away_code`].
    pub code: String,
    /// Which destination, and what is wrong with it.
    pub message: String,
    /// How many events have been refused there, or kept from it. Those behind them in their keys are not counted.
    pub events: u64,
}

/// A reader of the WAL, and the replication slot that it reads from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SlotStatus {
    /// The slot's name.
    pub name: String,
    /// The publication.
    pub publication: String,
    /// `new`, `snapshot` or `streaming`.
    pub phase: String,
    /// Everything up to here is settled.
    pub lsn: Option<String>,
    /// What the server knows of that; none where the slot is gone.
    pub confirmed_lsn: Option<String>,
    /// Whether a relay is connected to the slot.
    pub active: bool,
    /// What the server says of the slot's WAL: `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// How many bytes of WAL were written since.
    pub lag_bytes: Option<u64>,
    /// For how long there has been something that is not settled; zero for a reader that has caught up.
    pub lag_seconds: Option<f64>,
    /// How many bytes of WAL the server keeps for the slot.
    pub retained_bytes: Option<u64>,
    /// How many more it will keep before it gives the slot up; none for any number.
    pub safe_bytes: Option<i64>,
    /// Whether it stands still.
    pub paused: bool,
    /// Events that wait for another try, or behind one that does.
    pub waiting: u64,
    /// Given up on.
    pub dead: u64,
    /// Outcome not known.
    pub unknown: u64,
}

/// The state of one stream.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StreamStatus {
    /// The stream.
    pub stream: String,
    /// Due, never failed.
    pub pending: u64,
    /// Failed before and waiting for the next attempt, or held back behind such a one.
    pub retrying: u64,
    /// Claimed.
    pub processing: u64,
    /// Delivered, as far as still kept; capped at a million, counted no further.
    pub done: u64,
    /// Given up on.
    pub dead: u64,
    /// Outcome not known.
    pub unknown: u64,
    /// Rows whose status means nothing to airtight, or is NULL: left alone.
    pub unexplained: u64,
    /// Age in seconds of the oldest event that is not finished; never negative.
    pub oldest_pending_seconds: Option<f64>,
}

/// A relay that is there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RelayStatus {
    /// Its id.
    pub id: String,
    /// Where it runs.
    pub host: String,
    /// Its streams; empty for all.
    pub streams: Vec<String>,
    /// `none`, `key` or `total`.
    pub order: String,
    /// How many partitions it owns.
    pub partitions: u64,
    /// How long its lease is still valid, in seconds.
    pub lease_seconds: f64,
}

/// A key that waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BlockedKey {
    /// The key.
    pub aggregate_id: String,
    /// The event it waits for.
    pub behind_id: String,
    /// That event's state: `pending` when it will be retried, `dead` or `unknown` when a person must act.
    pub behind_state: String,
    /// How many events wait.
    pub held: u64,
}
