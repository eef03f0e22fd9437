//! What a database must be able to do for its table to be followed as a log.
//!
//! A store is SQL and nothing else: who delivers what, when an offset may move and what is held back behind a
//! failure is decided in [`super::Log`], once for all stores. Every time in here is the database's.

use std::time::Duration;

use async_trait::async_trait;

use crate::{
    Backlog, Capabilities, Code, Error, Event, Result,
    group::{GroupKind, Member, Members, Pulse},
    queue::BadRow,
};

/// The verbs of a log in a database.
///
/// Each is one short transaction, and safe to repeat. None stays open across a call to a sink. The member's
/// group names the consumer: [`Member::consumer`].
#[async_trait]
pub trait LogStore: Send + Sync + 'static {
    /// The group that the consumer's relays are in.
    fn members(&self) -> &dyn Members;

    /// What kind of group the consumer's relays are.
    fn kind(&self) -> GroupKind {
        GroupKind::Log
    }

    /// What a heartbeat brought.
    fn renewed(&self, _member: &Member, _pulse: &Pulse) {}

    /// Called before partitions are given up: whatever is settled and not written yet is written now, and what was begun
    /// for them ends.
    async fn before_giving(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// The same before the relay leaves, which it does even if this fails. The store may not have been opened.
    async fn before_leaving(&self, _member: &Member) -> Result<()> {
        Ok(())
    }

    /// Connects, and refuses a table that cannot be followed, with the statement that mends it. `sink` is what the
    /// sink promises and wants.
    async fn open(&self, sink: &Capabilities) -> Result<()>;

    /// Writes the consumer down if it is new, at `start`, and creates its partitions. With another number of
    /// partitions than before, all of them restart from the smallest offset; refused while live members have
    /// the old number. Called before [`Members::join`].
    async fn attach(&self, member: &Member, start: Start) -> Result<()>;

    /// Where those of `partitions` stand that the member owns. An offset below what retention has removed is an
    /// error with the code [`Code::BEHIND_RETENTION`].
    async fn positions(&self, member: &Member, partitions: &[u16]) -> Result<Vec<Standing>>;

    /// What operators have said about the consumer since.
    async fn consumer_state(&self, member: &Member) -> Result<ConsumerState>;

    /// Reads on from `after` in the order of `seq`; see [`Read`].
    ///
    /// A `seq` that is missing is passed over only when it is certain that it never will be there: a hole that
    /// an open transaction may still fill stops the read. A row that retention has removed is no hole but an
    /// error with the code [`Code::BEHIND_RETENTION`].
    async fn read(&self, request: &ReadRequest<'_>) -> Result<Read>;

    /// Reads these again, in the order of `seq`, within the bounds of the request. All of them were read
    /// before; one that is gone is an error with the code [`Code::BEHIND_RETENTION`].
    async fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>>;

    /// Parked events that are due, each with what is held behind it, in the order of `seq`, but for those of
    /// `except`. With [`Member::by_key`] none comes while an earlier one of its key is not due; without it,
    /// what was held under another order is due as well.
    async fn due(&self, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due>;

    /// Applies all of `changes`, in one transaction, except those to partitions that are no longer the
    /// member's under the epoch given, or whose offset somebody has changed: these are returned.
    ///
    /// An event of [`Changes::park`] may be parked already, by a try whose answer was lost: what became of it counts,
    /// and one that is only held stays as it is. With [`Member::by_key`], what was held behind an event that is
    /// finished now, or is held behind nothing, becomes due here or with the next [`LogStore::unhold`].
    async fn settle(&self, member: &Member, changes: &Changes) -> Result<Vec<u16>>;

    /// Makes held events due that wait behind nothing any more: a person may have removed it. Returns how many.
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
    /// With the oldest event there is.
    #[default]
    Earliest,
    /// With what is published from now on.
    Latest,
}

/// Where a partition of a consumer stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Which one.
    pub partition: u16,
    /// Grows whenever it is taken, and with every seek.
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

/// What a seek to an earlier place asked for. It belongs to the consumer and stays until the next one: a takeover or a
/// restart is no replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replay {
    /// The database's time at the seek, in microseconds: no other replay of this log, nor of another, is likely to
    /// have it.
    pub id: i64,
    /// What is behind this `seq` comes again,
    pub after: i64,
    /// up to this one, the last that was drawn when it was asked for. What comes later is new.
    pub through: i64,
}

impl Replay {
    /// The replay's id, for an event that it asked for.
    pub fn of(&self, seq: i64) -> Option<i64> {
        (self.after < seq && seq <= self.through).then_some(self.id)
    }
}

/// What operators have said about a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsumerState {
    /// Whether it is to stand still.
    pub paused: bool,
    /// Whether something about its partitions has changed.
    pub revision: Revision,
}

/// How a relay learns that what it remembers of a consumer's partitions is no longer true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revision {
    /// Grows whenever a person has changed something about parked events, and with every seek.
    At(i64),
    /// Whatever is remembered may be wrong: all partitions are looked at again.
    Moved,
}

/// What to read.
#[derive(Debug, Clone)]
pub struct ReadRequest<'a> {
    /// Who reads.
    pub member: &'a Member,
    /// The partitions whose events are wanted. Rows of others, and of streams that the member does not read,
    /// are passed over but still count for holes.
    pub partitions: &'a [u16],
    /// Read what is behind this `seq`.
    pub after: i64,
    /// Look at most at so many rows.
    pub events: usize,
    /// At most so many bytes, though always at least one row.
    pub bytes: usize,
    /// Payloads larger than this are not read but rejected.
    pub max_payload: usize,
}

/// What was read.
#[derive(Debug, Default)]
pub struct Read {
    /// The wanted rows, in the order of `seq`.
    pub rows: Vec<LogRow>,
    /// Everything up to here was passed: it is in `rows`, or not wanted, or never was.
    pub through: i64,
    /// There is more, right now.
    pub more: bool,
    /// There is more, behind a hole that an open transaction may still fill: look again soon.
    pub blocked: bool,
}

/// One row of the log.
#[derive(Debug)]
pub struct LogRow {
    /// Its place.
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
    /// When the next one is, if none is now.
    pub next_in: Option<Duration>,
}

/// A parked event.
#[derive(Debug)]
pub struct ParkedRow {
    /// The row as it was in the log.
    pub row: LogRow,
    /// Attempts so far; none for one that was only held back.
    pub attempts: u32,
}

/// What a settle changes, all of it or, per partition, none.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    /// Every partition that has a change, with its offset before and after (often the same).
    pub moves: Vec<Move>,
    /// Events to copy from the log to the parked ones.
    pub park: Vec<Park>,
    /// What became of events that were parked already.
    pub parked: Vec<Park>,
}

/// A partition and its offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// Which partition.
    pub partition: u16,
    /// The epoch it was taken with.
    pub epoch: i64,
    /// The offset as it is stored.
    pub from: i64,
    /// The offset as it is to be. Finding this stored already is right, too: the answer to an earlier try was
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
        /// After so long.
        after: Duration,
        /// What went wrong.
        error: Error,
    },
    /// It stays until a person decides.
    Dead {
        /// Why.
        error: Error,
    },
    /// Its outcome is not known: it stays, out of reach of bulk retries.
    Unknown {
        /// What was seen.
        error: Error,
    },
}

/// The error for a consumer that retention has overtaken.
pub fn behind_retention(consumer: &str, offset: i64, floor: i64) -> Error {
    Error::permanent(
        Code::BEHIND_RETENTION,
        format!(
            "consumer `{consumer}` stands at seq {offset}, but retention has removed events up to {floor}: \
             they cannot be delivered any more. Rebuild what it feeds and seek it (docs/operations.md, \
             \"Rebuilding a consumer\"): `airtight consumers seek {consumer} --earliest`"
        ),
    )
}
