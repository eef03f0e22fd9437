//! The plan of a settle: what each verdict changes, before anything is written or forgotten.

use std::time::Duration;

use super::{Changes, Fate, LogOptions, OnFailure, Park, track::InFlight};
use crate::{Code, Error, Position, Verdict, group::Member, hash::Set};

/// A settle that was planned and not applied yet.
pub(super) struct Plan {
    pub(super) member: Member,
    pub(super) changes: Changes,
    pub(super) fenced: usize,
    pub(super) steps: Vec<Step>,
    /// The events that it holds back, with the load of their partition. More may be read meanwhile.
    pub(super) held: Set<(i64, u64)>,
    pub(super) halts: Vec<(i64, Halt)>,
}

pub(super) enum Halt {
    Retry(u32, Duration),
    Stop(Error),
}

pub(super) enum Step {
    /// This relay no longer owns the event.
    Fenced(Position),
    /// Written by the handler's own transaction, and applied with it.
    Committed(Position),
    /// Settled, and nothing is stored.
    Done(Position),
    /// Parked; with a key that waits from now on, or not.
    Parked(Position, bool),
    /// To be read again.
    Back(Position),
    /// A parked event stays as it was.
    Stays(Position),
    /// A parked event no longer keeps its key waiting.
    Freed(Position),
}

impl Plan {
    /// A verdict on an event that came from the log.
    pub(super) fn fresh(
        &mut self,
        position: Position,
        row: &InFlight,
        verdict: &Verdict,
        waits: bool,
        options: &LogOptions,
    ) -> Step {
        let attempts = spent(row, verdict);
        let failure = match verdict {
            Verdict::Delivered | Verdict::SettledInTransaction => return Step::Done(position),
            // Behind a parked event, this one cannot be handed out again before the parked one is finished.
            Verdict::Released if waits => {
                self.park(row, 0, Fate::Held);
                return Step::Parked(position, true);
            }
            Verdict::Released => return Step::Back(position),
            Verdict::Retry { after, error } | Verdict::Away { after, error } => {
                Fate::Retry { after: *after, error: error.clone() }
            }
            Verdict::Dead { error } => Fate::Dead { error: error.clone() },
            Verdict::Unknown { error } => Fate::Unknown { error: error.clone() },
        };
        if options.on_failure == OnFailure::Halt {
            self.halts.push((row.seq, halt(row, attempts, &failure, options)));
            return Step::Back(position);
        }
        let waits = matches!(failure, Fate::Retry { .. }) || options.read.block_on_dead;
        self.park(row, attempts, failure);
        Step::Parked(position, waits)
    }

    pub(super) fn park(&mut self, row: &InFlight, attempts: u32, fate: Fate) {
        self.changes.park.push(Park { seq: row.seq, partition: row.partition, attempts, fate });
    }

    /// A verdict on an event that was parked.
    pub(super) fn parked(
        &mut self,
        position: Position,
        row: &InFlight,
        verdict: &Verdict,
        options: &LogOptions,
    ) -> Step {
        let (fate, step) = match verdict {
            Verdict::Released => return Step::Stays(position),
            Verdict::Delivered | Verdict::SettledInTransaction => (Fate::Delivered, Step::Freed(position)),
            Verdict::Retry { after, error } | Verdict::Away { after, error } => {
                (Fate::Retry { after: *after, error: error.clone() }, Step::Stays(position))
            }
            Verdict::Dead { error } => (Fate::Dead { error: error.clone() }, ended(position, options)),
            Verdict::Unknown { error } => (Fate::Unknown { error: error.clone() }, ended(position, options)),
        };
        let (seq, partition, attempts) = (row.seq, row.partition, spent(row, verdict));
        self.changes.parked.push(Park { seq, partition, attempts, fate });
        step
    }
}

/// A parked event was given up on.
fn ended(position: Position, options: &LogOptions) -> Step {
    if options.read.block_on_dead { Step::Stays(position) } else { Step::Freed(position) }
}

/// The attempts of an event after this verdict. An event whose destination is unavailable gets its last attempt back.
fn spent(row: &InFlight, verdict: &Verdict) -> u32 {
    row.attempt.saturating_sub(u32::from(matches!(verdict, Verdict::Away { .. })))
}

fn halt(row: &InFlight, attempts: u32, failure: &Fate, options: &LogOptions) -> Halt {
    let stop = |error: &Error| {
        let (seq, consumer) = (row.seq, &options.consumer);
        let message = format!("consumer `{consumer}` halts at seq {seq}: {}", error.message());
        let cause = error.remedy().unwrap_or("remove the cause");
        Halt::Stop(Error::permanent(Code::HALTED, message).with_remedy(format!(
            "{cause} and start the consumer again, or skip the event with `airtight consumers seek {consumer} --to-seq {seq}`"
        )))
    };
    match failure {
        Fate::Retry { after, .. } => Halt::Retry(attempts, *after),
        Fate::Dead { error } | Fate::Unknown { error } => stop(error),
        // These verdicts are not failures.
        Fate::Delivered | Fate::Held => Halt::Retry(0, Duration::ZERO),
    }
}

impl Step {
    pub(super) fn position(&self) -> Position {
        match self {
            Self::Fenced(position)
            | Self::Committed(position)
            | Self::Done(position)
            | Self::Parked(position, _)
            | Self::Back(position)
            | Self::Stays(position)
            | Self::Freed(position) => *position,
        }
    }
}

impl Changes {
    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.park.is_empty() && self.parked.is_empty()
    }

    pub(super) fn touches(&self, partition: u16) -> bool {
        self.park.iter().chain(&self.parked).any(|park| park.partition == partition)
    }
}
