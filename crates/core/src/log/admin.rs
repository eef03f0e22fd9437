//! What an operator may ask of a log: its consumers, their lag and parked events, replay and retention.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use serde::Serialize;
use time::OffsetDateTime;

use crate::{Code, Error, Result, admin::Detail, admin::EventRow};

/// The operator's side of a log. A consumer that nobody has heard of is an error with the code
/// `unknown_consumer`, which names those there are.
#[async_trait]
pub trait LogAdmin: Send + Sync {
    /// All consumers, by name, with their lag.
    async fn consumers(&self) -> Result<Vec<Consumer>>;

    /// Moves a consumer, also while relays run: what they have under way is fenced. Parked events behind the
    /// target are dropped, since they come again. With `dry_run` nothing is changed.
    ///
    /// A target that is negative, beyond the last event, or before what retention has removed is an error, and
    /// nothing moves.
    async fn seek(&self, consumer: &str, to: SeekTo, options: SeekOptions) -> Result<Seek>;

    /// Lets a consumer stand still, or go on. Relays notice within two seconds.
    async fn pause(&self, consumer: &str, paused: bool) -> Result<()>;

    /// Removes a consumer with its offset and its parked events, so that retention no longer waits for it.
    /// Refused while a relay works for it.
    async fn remove(&self, consumer: &str) -> Result<()>;

    /// How many events a consumer has still before it, cheaply: for a producer that holds back a backfill while
    /// somebody is behind. Holes count, so it is an upper bound.
    async fn lag(&self, consumer: &str) -> Result<u64>;

    /// Parked events, in the order of `seq`.
    async fn parked(&self, filter: &ParkedFilter) -> Result<Vec<Parked>>;

    /// One parked event in full.
    async fn show_parked(&self, consumer: &str, seq: i64) -> Result<Option<Detail>>;

    /// Makes the dead ones of the filter due now with their attempts at zero; others, unknown ones among them,
    /// only where the filter names them by `seq`. Returns how many.
    async fn retry_parked(&self, filter: &ParkedFilter) -> Result<u64>;

    /// Removes the dead ones of the filter; others, unknown ones among them, only where the filter names them by
    /// `seq`. Returns how many.
    async fn discard_parked(&self, filter: &ParkedFilter) -> Result<u64>;

    /// Removes events that are older than retention wants them, and says how far it got. `progress` is told
    /// the running total.
    async fn prune_log(&self, retention: Retention, progress: &(dyn Fn(u64) + Sync)) -> Result<Pruned>;

    /// What [`LogAdmin::prune_log`] would remove, counted and left alone. The floor is the present one.
    async fn prunable(&self, retention: Retention) -> Result<Pruned>;

    /// Removes what consumers remember of events that they saw longer ago than `keep`. Returns how many.
    async fn prune_inbox(&self, keep: Duration) -> Result<u64>;
}

/// Where to move a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeekTo {
    /// Behind this `seq`: the next event is the first with a greater one. 0 is the beginning.
    Seq(i64),
    /// To the first event that was published at this time or later.
    Time(OffsetDateTime),
    /// To the oldest event there is.
    Earliest,
    /// Behind the last event, or before the first hole that an open transaction may still fill.
    Latest,
}

/// How to move it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SeekOptions {
    /// Say what would happen, and change nothing.
    pub dry_run: bool,
    /// Make the consumer's inbox forget the events that come again, so that handlers process them again.
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
    /// Parked events that are dropped, since they come again or were skipped.
    pub parked_dropped: u64,
    /// Entries that the inbox forgets.
    pub forgotten: u64,
}

/// A consumer and how far it has come.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Consumer {
    /// Its name.
    pub name: String,
    /// Into how many key partitions it is divided; 1 for a consumer of which one instance works at a time.
    pub partitions: u16,
    /// Whether it is told to stand still.
    pub paused: bool,
    /// Everything up to here is settled, in all partitions.
    pub offset: i64,
    /// The newest `seq` of the log.
    pub end: i64,
    /// How many events it has still before it.
    pub lag_events: u64,
    /// How long ago the first of these was published.
    pub lag_seconds: f64,
    /// Whether retention has removed events that it has not seen.
    pub behind_retention: bool,
    /// Parked: to be tried again, or held back behind such a one.
    pub retrying: u64,
    /// Parked: given up on.
    pub dead: u64,
    /// Parked: outcome not known.
    pub unknown: u64,
    /// It stands before an event that a transaction may still commit: which are open.
    pub waits_for: Vec<OpenPublisher>,
    /// The relays that work for it.
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
    /// What the application calls itself.
    pub application: Option<String>,
    /// What its session does; not told of other users' sessions.
    pub state: Option<String>,
    /// How long it is open, in seconds; not told of other users' sessions.
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

/// What they are called in a sentence.
pub fn open_publishers(open: &[OpenPublisher]) -> String {
    open.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A relay that works for a consumer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Instance {
    /// Its id.
    pub id: String,
    /// Where it runs.
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
    /// At most so many; zero for a default of 50. For lists only.
    pub limit: usize,
}

/// A parked event in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Parked {
    /// Whose.
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
    /// Partitions of the table that were dropped whole.
    pub partitions: u64,
    /// Up to here events have been removed, now or before.
    pub floor: i64,
    /// The consumer for whose sake older events stay.
    pub held_by: Option<String>,
}

/// The error for a consumer that is not there.
pub fn unknown_consumer(name: &str, known: &[String]) -> Error {
    let known = if known.is_empty() {
        "there is none yet: one is made by `airtight run --read log --consumer NAME`".to_owned()
    } else {
        format!("there are: {}", known.join(", "))
    };
    Error::permanent(Code::UNKNOWN_CONSUMER, format!("there is no consumer `{name}`; {known}"))
}

/// Refuses an offset that cannot be, before anything moves.
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
            format!("seq {to} is in the future: the last event has seq {end}; to skip to it say `--latest`"),
        ));
    }
    if to < floor {
        return Err(Error::permanent(
            Code::BEFORE_RETENTION,
            format!("events up to seq {floor} were removed by retention; the oldest place is `--earliest`"),
        ));
    }
    Ok(())
}
