//! What a database must do so that a table can be followed as a log.
//!
//! A store is only SQL. [`super::Log`] decides for all stores which relay delivers what, when an offset may move, and
//! what is held back behind a failure. All times here are times of the database's clock.

use std::time::Duration;

use async_trait::async_trait;

use crate::{
    Backlog, Capabilities, Code, Error, Event, Result,
    group::{GroupKind, Member, Members, Pulse},
    queue::BadRow,
};

/// The operations of a log in a database.
///
/// Each is safe to repeat. A settle is one transaction, and so is what [`LogStore::attach`] writes. The others may run several
/// short statements, each a transaction of its own: a read that meets a hole looks for the transactions that may fill it,
/// and reads again, for example. [`LogStore::wait`] has none. No transaction outlives the call that began it, so none is
/// open during a call to a sink, with one exception: the first snapshot of a reader of the WAL is one transaction that
/// only reads, and lasts until the snapshot has been read. The member's group names the consumer: [`Member::consumer`].
#[async_trait]
pub trait LogStore: Send + Sync + 'static {
    /// The group of the consumer's relays.
    fn members(&self) -> &dyn Members;

    /// The kind of that group.
    fn kind(&self) -> GroupKind {
        GroupKind::Log
    }

    /// Called with the result of each heartbeat.
    fn renewed(&self, _member: &Member, _pulse: &Pulse) {}

    /// Called before partitions are given up. The store writes what is settled and not written yet, and ends what it has
    /// begun for these partitions.
    async fn before_giving(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// Called before the relay leaves, to do the same. The relay leaves even if this fails. The store may not have been
    /// opened.
    async fn before_leaving(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// Connects, and refuses a table that cannot be followed, with the statement that fixes it. `sink` says what the
    /// sink promises and needs.
    async fn open(&self, sink: &Capabilities) -> Result<()>;

    /// Records the consumer at `start`, if it is new, and creates its partitions. If the number of partitions has changed,
    /// all of them restart from the smallest offset; this is refused while live members have the old number. Called
    /// before [`Members::join`].
    async fn attach(&self, member: &Member, start: Start) -> Result<()>;

    /// The state of those of `partitions` that the member owns. An offset below what retention has removed is an
    /// error with the code [`Code::BEHIND_RETENTION`].
    async fn positions(&self, member: &Member, partitions: &[u16]) -> Result<Vec<Standing>>;

    /// What operators have set for the consumer.
    async fn consumer_state(&self, member: &Member) -> Result<ConsumerState>;

    /// Reads the events after `after`, in the order of `seq`; see [`Read`].
    ///
    /// A read skips a missing `seq` only if it is certain that no transaction will commit it: a hole that an open
    /// transaction may still fill stops the read. A row that retention has removed is no hole, but an error with the
    /// code [`Code::BEHIND_RETENTION`].
    async fn read(&self, request: &ReadRequest<'_>) -> Result<Read>;

    /// Reads these events again, in the order of `seq`, within the limits of the request. All of them were read
    /// before; a missing one is an error with the code [`Code::BEHIND_RETENTION`].
    async fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>>;

    /// Parked events that are due, each with the events that are held behind it, in the order of `seq`, except for those
    /// of `except`. With [`Member::by_key`], an event is not returned while an earlier one of its key is not due; without
    /// it, events that were held under another order are due as well.
    async fn due(&self, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due>;

    /// Applies all of `changes` in one transaction, except those to partitions that the member no longer owns under the
    /// given epoch, or whose offset was changed: these partitions are returned.
    ///
    /// An event of [`Changes::park`] may already be parked, by a try whose answer was lost: then its new fate is stored,
    /// except that an event that is only held stays as it is. With [`Member::by_key`], an event that was held behind an
    /// event that is finished now, or that is held behind nothing, becomes due here or with the next [`LogStore::unhold`].
    async fn settle(&self, member: &Member, changes: &Changes) -> Result<Vec<u16>>;

    /// Makes held events due that no longer wait behind another event: a person may have removed that event. Returns how
    /// many.
    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64>;

    /// What is left to deliver, for all partitions of the consumer.
    async fn backlog(&self, member: &Member) -> Result<Backlog>;

    /// Returns when there may be something new, or after `at_most`. May be dropped at any time.
    async fn wait(&self, at_most: Duration) {
        tokio::time::sleep(at_most).await;
    }
}

/// Where a new consumer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// With the oldest event of the log.
    #[default]
    Earliest,
    /// With the events that are published from now on.
    Latest,
}

/// The state of a partition of a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Which one.
    pub partition: u16,
    /// Grows with every new owner, and with every seek.
    pub epoch: i64,
    /// Everything up to this `seq` is settled.
    pub offset: i64,
    /// The keys of its parked events that are still to be delivered, once for each event. With
    /// [`Member::block_on_dead`] a dead or unknown one counts as well.
    pub waiting: Vec<String>,
    /// The `seq`s of its parked events beyond the offset, whatever their state: parked while an earlier event was
    /// still unsettled. The log holds them, too, and reading on must not deliver them from there.
    pub parked: Vec<i64>,
    /// The last replay that was asked for.
    pub replay: Option<Replay>,
}

/// The replay that a seek to an earlier offset asked for. It belongs to the consumer and stays until the next replay: a
/// takeover or a restart is no replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replay {
    /// The database's time at the seek, in microseconds: another replay, of this log or of another, is unlikely to
    /// have the same id.
    pub id: i64,
    /// Events after this `seq` are delivered again,
    pub after: i64,
    /// up to this one, the last that was assigned when the replay was requested. Later events are new.
    pub through: i64,
}

impl Replay {
    /// The replay's id, for an event that it asked for.
    pub fn of(&self, seq: i64) -> Option<i64> {
        (self.after < seq && seq <= self.through).then_some(self.id)
    }
}

/// What operators have set for a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsumerState {
    /// Whether the consumer is paused.
    pub paused: bool,
    /// Whether something about its partitions has changed.
    pub revision: Revision,
}

/// How a relay learns that what it remembers about a consumer's partitions is outdated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revision {
    /// Grows whenever a person has changed something about parked events, and with every seek.
    At(i64),
    /// A person has set the offset to this value in the application's own table of offsets, and no settle has followed
    /// it yet.
    SetByHand(i64),
    /// Everything that is remembered may be wrong: the relay reads all partitions again.
    Moved,
}

/// What to read.
#[derive(Debug, Clone)]
pub struct ReadRequest<'a> {
    /// The relay that reads.
    pub member: &'a Member,
    /// The partitions whose events are wanted. Rows of other partitions, and of streams that the member does not read,
    /// are skipped but still count when holes are looked for.
    pub partitions: &'a [u16],
    /// Read the rows after this `seq`.
    pub after: i64,
    /// The most rows to look at.
    pub events: usize,
    /// The most bytes. One row is always allowed, however large.
    pub bytes: usize,
    /// Larger payloads are rejected without being read.
    pub max_payload: usize,
}

/// What was read.
#[derive(Debug, Default)]
pub struct Read {
    /// The wanted rows, in the order of `seq`.
    pub rows: Vec<LogRow>,
    /// The read covers everything up to here: a `seq` is in `rows`, or not wanted, or was never committed.
    pub through: i64,
    /// There is more to read now.
    pub more: bool,
    /// There is more, after a hole that an open transaction may still fill: read again soon.
    pub blocked: bool,
}

/// One row of the log.
#[derive(Debug)]
pub struct LogRow {
    /// Its number in the log.
    pub seq: i64,
    /// The partition of its key.
    pub partition: u16,
    /// Its own limit of attempts.
    pub max_attempts: Option<u32>,
    /// The event, or why the row cannot be one.
    pub event: std::result::Result<Event, BadRow>,
}

/// Parked events that are due.
#[derive(Debug, Default)]
pub struct Due {
    /// The events.
    pub rows: Vec<ParkedRow>,
    /// When the next one is due, if none is due now.
    pub next_in: Option<Duration>,
}

/// A parked event.
#[derive(Debug)]
pub struct ParkedRow {
    /// The row as it was in the log.
    pub row: LogRow,
    /// Attempts so far; zero for an event that was only held back.
    pub attempts: u32,
}

/// What a settle changes: for each partition, everything or nothing.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    /// Every partition that has a change, with its offset before and after (often the same).
    pub moves: Vec<Move>,
    /// Events to copy from the log to the parked ones.
    pub park: Vec<Park>,
    /// What became of events that were already parked.
    pub parked: Vec<Park>,
}

/// A partition and its offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Which partition.
    pub partition: u16,
    /// The epoch under which the relay owns it.
    pub epoch: i64,
    /// The offset as it is stored.
    pub from: i64,
    /// The new offset. It is no conflict if this offset is already stored: the answer to an earlier try was
    /// lost.
    pub to: i64,
}

/// An event and what became of it.
#[derive(Debug, Clone)]
pub struct Park {
    /// Which event.
    pub seq: i64,
    /// Its partition.
    pub partition: u16,
    /// Attempts so far.
    pub attempts: u32,
    /// What is to become of it.
    pub fate: Fate,
}

/// What is to become of a parked event.
#[derive(Debug, Clone)]
pub enum Fate {
    /// It was delivered: nothing is kept.
    Delivered,
    /// It waits behind an earlier event of its key.
    Held,
    /// It is tried again.
    Retry {
        /// How long to wait.
        after: Duration,
        /// What went wrong.
        error: Error,
    },
    /// It stays until a person decides.
    Dead {
        /// Why.
        error: Error,
    },
    /// Its outcome is unknown: the event stays, and bulk retries do not touch it.
    Unknown {
        /// What was seen.
        error: Error,
    },
}

/// The error for a consumer that has not read events that retention has removed.
pub fn behind_retention(consumer: &str, offset: i64, floor: i64) -> Error {
    Error::permanent(
        Code::BEHIND_RETENTION,
        format!(
            "consumer `{consumer}` stands at seq {offset}, but retention has removed events up to {floor}: \
             they cannot be delivered any more"
        ),
    )
    .with_remedy(format!(
        "rebuild what the consumer feeds, and seek it (docs/operations.md, \"Rebuilding a consumer\"): `airtight \
         consumers seek {consumer} --earliest`"
    ))
}
