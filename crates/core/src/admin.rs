//! The operations of a store for an operator: counts, lists, retries, retention. Used by the CLI and the dashboard.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use serde::Serialize;
use time::OffsetDateTime;

use crate::{Code, Error, Event, NewEvent, Published, Result, state::State};

/// The operator's side of a store.
#[async_trait]
pub trait Admin: Send + Sync {
    /// Creates or upgrades airtight's tables. Many processes may call it at once. Refuses a schema that is newer than
    /// this program. Returns what it did, one line each; empty if everything already existed.
    async fn migrate(&self) -> Result<Vec<String>>;

    /// What is wrong, or might be unexpected; empty if there is nothing to report.
    async fn check(&self) -> Result<Vec<Finding>>;

    /// Publishes in a separate transaction. For tools; an application publishes in its own transaction.
    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Published>>;

    /// Counts and ages per stream, and the live relays.
    async fn status(&self) -> Result<Status>;

    /// Events by filter, in seq order, oldest first unless the filter says otherwise.
    async fn list(&self, filter: &Filter) -> Result<Vec<EventRow>>;

    /// One event in full, by id (or by seq, when the text is a number).
    async fn show(&self, id: &str) -> Result<Option<Detail>>;

    /// Makes one event due now, with its attempts at zero. Refused for an event that is done or processing.
    async fn retry(&self, id: &str) -> Result<Acted>;

    /// The same for all dead events of the filter (never unknown ones). Returns how many.
    async fn retry_dead(&self, filter: &Filter) -> Result<u64>;

    /// Deletes one event that is not processing and not done.
    async fn discard(&self, id: &str) -> Result<Acted>;

    /// The same for all dead events of the filter (never unknown ones). Returns how many.
    async fn discard_dead(&self, filter: &Filter) -> Result<u64>;

    /// Deletes done events that are older than `what` says, in statements of limited size, and the records of relays that
    /// ended long ago. It calls `progress` with the running total. Returns an error if the table does not say when an
    /// event was delivered: see [`TableSpec::age_column`](crate::table::TableSpec::age_column).
    async fn prune(&self, what: Prune, progress: &(dyn Fn(u64) + Sync)) -> Result<Removed>;

    /// Keys that wait behind a failed or dead event, with how many events wait.
    async fn blocked(&self, limit: usize) -> Result<Vec<BlockedKey>>;
}

/// Which done events [`Admin::prune`] deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prune {
    /// Those that were delivered longer ago than this.
    pub keep: Duration,
    /// Whether to use the time when an event was written, if its table does not say when it was delivered.
    pub by_creation: bool,
    /// Whether to only count.
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

/// A finding of `check`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Whether airtight cannot work because of it; otherwise it is only information.
    pub fatal: bool,
    /// What was found.
    pub message: String,
    /// What to do about it, if that is known.
    pub remedy: Option<String>,
}

impl Finding {
    /// airtight cannot work because of it.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self { fatal: true, message: message.into(), remedy: None }
    }

    /// It is only information.
    pub fn note(message: impl Into<String>) -> Self {
        Self { fatal: false, message: message.into(), remedy: None }
    }

    /// Adds what to do about it: a command, a statement or an instruction that can be followed literally.
    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// One error for all of `findings`, for a caller that refuses to start because of them.
    pub fn refusal(code: Code, findings: &[Self]) -> Error {
        let messages: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
        let mut remedies: Vec<&str> =
            findings.iter().filter_map(|finding| finding.remedy.as_deref()).collect();
        remedies.dedup();
        let error = Error::permanent(code, messages.join("; "));
        if remedies.is_empty() { error } else { error.with_remedy(remedies.join("; ")) }
    }
}

/// As [`Error`] does: the message, and the remedy behind it.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.remedy {
            Some(remedy) => write!(f, ". Fix: {remedy}"),
            None => Ok(()),
        }
    }
}

impl From<Error> for Finding {
    fn from(error: Error) -> Self {
        Self { fatal: true, message: error.message().into(), remedy: error.remedy().map(str::to_owned) }
    }
}

/// The result of an operator's request for one event.
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
    /// The most events; zero for a default of 50.
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
    /// Its state, as the canonical word; or the table's own word, if the mapping does not explain it.
    pub state: String,
    /// Attempts so far.
    pub attempts: u32,
    /// How often a relay vanished while it held this event.
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
    /// The event itself; the text of an error if the row cannot be read as an event.
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
    /// The readers that follow the outbox through the WAL.
    pub slots: Vec<SlotStatus>,
    /// Destinations that are unavailable, and that events wait for: those with the most events first, at most
    /// [`AWAY_SHOWN`] of them.
    pub away: Vec<AwayStatus>,
}

/// How many unavailable destinations a status names.
pub const AWAY_SHOWN: usize = 100;

/// A destination that is unavailable, as stored with the events that wait for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct AwayStatus {
    /// The consumer of the events, for log and CDC; none for a queue.
    pub consumer: Option<String>,
    /// The error's code, as it is stored: see [`crate::Error::is_away_code`].
    pub code: String,
    /// Which destination, and what is wrong with it.
    pub message: String,
    /// How many events the destination has refused, or were not sent to it. Later events of their keys are not counted.
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
    /// The position that the server has recorded; none if the slot is gone.
    pub confirmed_lsn: Option<String>,
    /// Whether a relay is connected to the slot.
    pub active: bool,
    /// What the server says of the slot's WAL: `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    /// How many bytes of WAL were written after `lsn`.
    pub lag_bytes: Option<u64>,
    /// For how long there has been something that is not settled; zero for a reader that has caught up.
    pub lag_seconds: Option<f64>,
    /// How many bytes of WAL the server keeps for the slot.
    pub retained_bytes: Option<u64>,
    /// How many more bytes the server will keep before it invalidates the slot; none if there is no limit.
    pub safe_bytes: Option<i64>,
    /// Whether it is paused.
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
    /// Failed before and waiting for the next attempt, or held back behind such an event.
    pub retrying: u64,
    /// Claimed.
    pub processing: u64,
    /// Delivered and still kept. Counted up to one million.
    pub done: u64,
    /// Given up on.
    pub dead: u64,
    /// Outcome not known.
    pub unknown: u64,
    /// Rows whose status airtight does not know, or is NULL: airtight does not touch them.
    pub unexplained: u64,
    /// Age in seconds of the oldest event that is not finished; never negative.
    pub oldest_pending_seconds: Option<f64>,
}

/// A live relay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RelayStatus {
    /// Its id.
    pub id: String,
    /// The host that it runs on.
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
