//! The operations of a log for an operator: its consumers, their lag and parked events, replay and retention.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use serde::Serialize;
use time::OffsetDateTime;

use crate::{Code, Error, Result, admin::Detail, admin::EventRow};

/// The operator's side of a log. An unknown consumer is an error with the code `unknown_consumer`, whose message names
/// the consumers that exist.
#[async_trait]
pub trait LogAdmin: Send + Sync {
    /// All consumers, by name, with their lag.
    async fn consumers(&self) -> Result<Vec<Consumer>>;

    /// Moves a consumer, also while relays run: the settles of events that they are delivering are fenced. Parked events
    /// behind the target are dropped, since they are delivered again. With `dry_run` nothing is changed.
    ///
    /// A target that is negative, beyond the last event, or before what retention has removed is an error, and
    /// nothing moves.
    async fn seek(&self, consumer: &str, to: SeekTo, options: SeekOptions) -> Result<Seek>;

    /// Pauses or resumes a consumer. Relays notice within two seconds.
    async fn pause(&self, consumer: &str, paused: bool) -> Result<()>;

    /// Removes a consumer with its offset and its parked events, so that retention no longer waits for it.
    /// Refused while a relay runs for it.
    async fn remove(&self, consumer: &str) -> Result<()>;

    /// How many events a consumer still has to read, computed cheaply: for a producer that slows a backfill down while
    /// a consumer is behind. Holes count, so this is an upper bound.
    async fn lag(&self, consumer: &str) -> Result<u64>;

    /// Parked events, in the order of `seq`.
    async fn parked(&self, filter: &ParkedFilter) -> Result<Vec<Parked>>;

    /// One parked event in full.
    async fn show_parked(&self, consumer: &str, seq: i64) -> Result<Option<Detail>>;

    /// Makes the dead events of the filter due now, with their attempts at zero. Other events, including unknown ones, are
    /// retried only if the filter names them by `seq`. Returns how many.
    async fn retry_parked(&self, filter: &ParkedFilter) -> Result<u64>;

    /// Removes the dead events of the filter. Other events, including unknown ones, are removed only if the filter names
    /// them by `seq`. Returns how many.
    async fn discard_parked(&self, filter: &ParkedFilter) -> Result<u64>;

    /// Removes events that are older than retention keeps them, and returns how far it got. It calls `progress` with
    /// the running total.
    async fn prune_log(&self, retention: Retention, progress: &(dyn Fn(u64) + Sync)) -> Result<Pruned>;

    /// Counts what [`LogAdmin::prune_log`] would remove, and removes nothing. The floor is the present one.
    async fn prunable(&self, retention: Retention) -> Result<Pruned>;

    /// Removes inbox entries of events that consumers saw longer ago than `keep`. Returns how many.
    async fn prune_inbox(&self, keep: Duration) -> Result<u64>;
}

/// Where to move a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeekTo {
    /// After this `seq`: the next event is the first with a greater `seq`. 0 is the beginning.
    Seq(i64),
    /// To the first event that was published at this time or later.
    Time(OffsetDateTime),
    /// To the oldest event of the log.
    Earliest,
    /// After the last event, or before the first hole that an open transaction may still fill.
    Latest,
}

/// How to move it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SeekOptions {
    /// Say what would happen, and change nothing.
    pub dry_run: bool,
    /// Make the consumer's inbox forget the events that are delivered again, so that handlers process them again.
    pub forget_inbox: bool,
}

/// What a seek did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Seek {
    /// The consumer.
    pub consumer: String,
    /// The smallest offset before.
    pub from: i64,
    /// The offset of all partitions after.
    pub to: i64,
    /// Events that are delivered again.
    pub again: u64,
    /// Events that are never delivered to this consumer.
    pub skipped: u64,
    /// Parked events that are dropped, since they are delivered again or were skipped.
    pub parked_dropped: u64,
    /// Entries that the inbox forgets.
    pub forgotten: u64,
}

/// A consumer and its progress.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Consumer {
    /// Its name.
    pub name: String,
    /// How many partitions of the keys it has; 1 for a consumer with one working instance at a time.
    pub partitions: u16,
    /// Whether it is paused.
    pub paused: bool,
    /// Everything up to here is settled, in all partitions.
    pub offset: i64,
    /// The newest `seq` of the log.
    pub end: i64,
    /// How many events it still has to read.
    pub lag_events: u64,
    /// How long ago the first of these was published.
    pub lag_seconds: f64,
    /// Whether retention has removed events that it has not seen.
    pub behind_retention: bool,
    /// Parked: to be tried again, or held back behind such an event.
    pub retrying: u64,
    /// Parked: given up on.
    pub dead: u64,
    /// Parked: the outcome is unknown.
    pub unknown: u64,
    /// The open transactions, if the consumer waits for an event that one of them may still commit.
    pub waits_for: Vec<OpenPublisher>,
    /// The relays that run for it.
    pub instances: Vec<Instance>,
    /// The offset of each partition.
    pub offsets: Vec<PartitionOffset>,
}

/// A transaction that has published to a log and has not ended. All consumers wait for it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OpenPublisher {
    /// Its process; none for a prepared transaction.
    pub pid: Option<i32>,
    /// The name of a prepared transaction.
    pub prepared: Option<String>,
    /// The application's name, as its session gives it.
    pub application: Option<String>,
    /// The state of its session; not visible for other users' sessions.
    pub state: Option<String>,
    /// How long it has been open, in seconds; not visible for other users' sessions.
    pub seconds: Option<f64>,
}

impl fmt::Display for OpenPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.prepared, self.pid) {
            (Some(name), _) => write!(f, "prepared transaction `{name}`")?,
            (None, Some(pid)) => {
                let application = self.application.as_deref().unwrap_or("no application name");
                write!(f, "pid {pid} ({application}")?;
                if let Some(state) = &self.state {
                    write!(f, ", {state}")?;
                }
                f.write_str(")")?;
            }
            (None, None) => f.write_str("a prepared transaction")?,
        }
        match self.seconds {
            Some(seconds) => write!(f, ", open for {seconds:.0} s"),
            None => Ok(()),
        }
    }
}

/// The open transactions, as text for a sentence.
pub fn open_publishers(open: &[OpenPublisher]) -> String {
    open.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A relay that runs for a consumer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Instance {
    /// Its id.
    pub id: String,
    /// The host that it runs on.
    pub host: String,
    /// How many partitions it owns.
    pub partitions: u64,
    /// How long its lease is still valid, in seconds.
    pub lease_seconds: f64,
}

/// The offset of one partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PartitionOffset {
    /// Which one.
    pub partition: u16,
    /// Everything up to here is settled.
    pub offset: i64,
    /// The relay that owns it.
    pub owner: Option<String>,
}

/// Which parked events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParkedFilter {
    /// Only of this consumer.
    pub consumer: Option<String>,
    /// Only these.
    pub seqs: Vec<i64>,
    /// Only those that a person must decide about: dead or unknown.
    pub dead_only: bool,
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
    /// The most events; zero for a default of 50. For lists only.
    pub limit: usize,
}

/// A parked event in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parked {
    /// The consumer.
    pub consumer: String,
    /// The event; its state is `pending`, `dead` or `unknown`.
    #[serde(flatten)]
    pub row: EventRow,
}

/// How long events of a log are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Events younger than this stay.
    pub keep: Duration,
    /// Whether events that a consumer has not settled stay, however old.
    pub wait_for_consumers: bool,
}

impl Default for Retention {
    /// Thirty days, and as long as a consumer needs.
    fn default() -> Self {
        Self { keep: Duration::from_secs(30 * 24 * 3_600), wait_for_consumers: true }
    }
}

/// What retention did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Pruned {
    /// Events removed.
    pub events: u64,
    /// Table partitions that were dropped as a whole.
    pub partitions: u64,
    /// Up to here events have been removed, now or before.
    pub floor: i64,
    /// The consumer that still needs the older events, so that they stay.
    pub held_by: Option<String>,
}

/// The error for a consumer that does not exist.
pub fn unknown_consumer(name: &str, known: &[String]) -> Error {
    let known = if known.is_empty() {
        "there is none yet: `airtight run --read log --consumer NAME` creates one".to_owned()
    } else {
        format!("there are: {}", known.join(", "))
    };
    Error::permanent(Code::UNKNOWN_CONSUMER, format!("there is no consumer `{name}`; {known}"))
}

/// Refuses an impossible offset, before anything moves.
pub fn check_offset(to: i64, floor: i64, end: i64) -> Result<()> {
    if to < 0 {
        return Err(Error::permanent(
            Code::BAD_OFFSET,
            format!("seq {to} is negative; 0 is the beginning, {end} the last event"),
        ));
    }
    if to > end {
        return Err(Error::permanent(
            Code::BAD_OFFSET,
            format!(
                "seq {to} is in the future: the last event has seq {end}; to skip to the end, use `--latest`"
            ),
        ));
    }
    if to < floor {
        return Err(Error::permanent(
            Code::BEFORE_RETENTION,
            format!(
                "events up to seq {floor} were removed by retention; `--earliest` is the oldest offset that is left"
            ),
        ));
    }
    Ok(())
}
