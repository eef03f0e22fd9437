//! The life of a row in a queue, as types.
//!
//! ```text
//!            claim                    deliver
//! Pending ───────────▶ Processing ───────────────▶ Done
//!    ▲  ▲                 │  │ │
//!    │  └── fail, release,┘  │ └── cannot be known ─▶ Unknown ─┐
//!    │      lease lost       └── give up ──▶ Dead               │
//!    └────────── operator's retry ◀───────────┴─────────────────┘
//! ```
//!
//! A transition that is not drawn does not compile:
//!
//! ```compile_fail,E0599
//! use airtight_core::state::*;
//! let done: Row<Done> = Row::pending(0, None).claim().deliver();
//! done.retry_by_operator(); // a done row refuses it
//! ```
//! ```compile_fail,E0599
//! use airtight_core::state::*;
//! Row::pending(0, None).deliver(); // nobody has claimed it
//! ```
//! ```compile_fail,E0599
//! use airtight_core::state::*;
//! let dead: Row<Dead> = Row::pending(0, None).claim().give_up();
//! dead.claim(); // only a person revives a dead letter
//! ```
//! ```compile_fail,E0382
//! use airtight_core::state::*;
//! let row = Row::pending(0, None).claim();
//! let done = row.deliver();
//! row.release(); // the claim was used up
//! ```
//!
//! The transitions that are drawn do:
//!
//! ```
//! use airtight_core::state::*;
//! let row = Row::pending(0, Some(1)).claim();
//! assert_eq!(row.attempts(), 1);
//! match row.fail(10) {
//!     Failed::Dead(row) => assert_eq!(row.retry_by_operator().attempts(), 0),
//!     Failed::Retry(_) => unreachable!("its own limit is one attempt"),
//! }
//! ```
//!
//! Rows that come from a database have a state that the compiler cannot know; [`AnyRow::check`] is the one
//! gate through which they enter.

use std::marker::PhantomData;

use crate::{Code, Error, Result};

/// The states, as words: what a table's status column means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Waits to be claimed, for the first time or again.
    Pending,
    /// Claimed by a relay, under a lease.
    Processing,
    /// Delivered.
    Done,
    /// Given up on.
    Dead,
    /// The outcome cannot be known.
    Unknown,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 5] = [Self::Pending, Self::Processing, Self::Done, Self::Dead, Self::Unknown];

    /// The canonical table's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Processing => "processing",
            Self::Done => "done",
            Self::Dead => "dead",
            Self::Unknown => "unknown",
        }
    }

    /// Reads a canonical word.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    /// Whether an operator's retry may bring a row of this state back: all but a done one, which has
    /// happened, and a processing one, whose owner is at it.
    pub fn can_retry(self) -> bool {
        matches!(self, Self::Pending | Self::Dead | Self::Unknown)
    }
}

macro_rules! states {
    ($($(#[$doc:meta])* $name:ident),*) => {
        $($(#[$doc])* #[derive(Debug, Clone, Copy, PartialEq, Eq)] pub enum $name {})*
    };
}
states!(
    /// See [`State::Pending`].
    Pending,
    /// See [`State::Processing`].
    Processing,
    /// See [`State::Done`].
    Done,
    /// See [`State::Dead`].
    Dead,
    /// See [`State::Unknown`].
    Unknown
);

/// A row in state `S`.
#[derive(Debug, PartialEq, Eq)]
pub struct Row<S> {
    attempts: u32,
    max_attempts: Option<u32>,
    state: PhantomData<S>,
}

impl<S> Row<S> {
    /// Attempts so far, the one under way included.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    fn into_state<T>(self) -> Row<T> {
        Row { attempts: self.attempts, max_attempts: self.max_attempts, state: PhantomData }
    }
}

impl Row<Pending> {
    /// A row that waits, with the attempts it has used and its own limit.
    pub fn pending(attempts: u32, max_attempts: Option<u32>) -> Self {
        Self { attempts, max_attempts, state: PhantomData }
    }

    /// Claims it, which costs an attempt.
    pub fn claim(mut self) -> Row<Processing> {
        self.attempts = self.attempts.saturating_add(1);
        self.into_state()
    }
}

/// Where a failure leads.
#[derive(Debug, PartialEq, Eq)]
pub enum Failed {
    /// Attempts remain.
    Retry(Row<Pending>),
    /// None remain.
    Dead(Row<Dead>),
}

impl Row<Processing> {
    /// A row that a source handed out, on its `attempts`-th attempt.
    pub fn claimed(attempts: u32, max_attempts: Option<u32>) -> Self {
        Self { attempts, max_attempts, state: PhantomData }
    }

    /// The sink has it.
    pub fn deliver(self) -> Row<Done> {
        self.into_state()
    }

    /// The attempt failed: the row's own limit, or else the pipeline's, says whether there is another.
    pub fn fail(self, limit: u32) -> Failed {
        if self.attempts >= self.max_attempts.unwrap_or(limit) {
            Failed::Dead(self.into_state())
        } else {
            Failed::Retry(self.into_state())
        }
    }

    /// No attempt can succeed.
    pub fn give_up(self) -> Row<Dead> {
        self.into_state()
    }

    /// Nobody can say whether it succeeded.
    pub fn lose_track(self) -> Row<Unknown> {
        self.into_state()
    }

    /// Given back untried; the attempt is refunded.
    pub fn release(mut self) -> Row<Pending> {
        self.attempts = self.attempts.saturating_sub(1);
        self.into_state()
    }

    /// Its owner vanished. The takeover that follows is the same attempt, not a further one, because a
    /// crash-looping relay must not use up the attempts of healthy events.
    pub fn expire(mut self) -> Row<Pending> {
        self.attempts = self.attempts.saturating_sub(1);
        self.into_state()
    }
}

impl Row<Dead> {
    /// A person wants it tried again, from the first attempt.
    pub fn retry_by_operator(self) -> Row<Pending> {
        Row::pending(0, self.max_attempts)
    }
}

impl Row<Unknown> {
    /// A person has found out that it did not happen.
    pub fn retry_by_operator(self) -> Row<Pending> {
        Row::pending(0, self.max_attempts)
    }
}

/// A row whose state was read at run time.
#[derive(Debug, PartialEq, Eq)]
pub enum AnyRow {
    /// See [`State::Pending`].
    Pending(Row<Pending>),
    /// See [`State::Processing`].
    Processing(Row<Processing>),
    /// See [`State::Done`].
    Done(Row<Done>),
    /// See [`State::Dead`].
    Dead(Row<Dead>),
    /// See [`State::Unknown`].
    Unknown(Row<Unknown>),
}

impl AnyRow {
    /// The gate for rows from a database: a status word that nobody knows, or a count that cannot be, is
    /// refused with the row's id.
    pub fn check(id: &str, status: &str, attempts: i64, max_attempts: Option<i64>) -> Result<Self> {
        let count = |name: &str, value: i64| {
            u32::try_from(value).map_err(|_| {
                Error::permanent(Code::BAD_ROW, format!("event {id}: {name} is {value}, which cannot be"))
            })
        };
        let attempts = count("attempts", attempts)?;
        let max_attempts = max_attempts.map(|value| count("max_attempts", value)).transpose()?;
        let row = Row::<Pending>::pending(attempts, max_attempts);
        Ok(match State::parse(status) {
            Some(State::Pending) => Self::Pending(row),
            Some(State::Processing) => Self::Processing(row.into_state()),
            Some(State::Done) => Self::Done(row.into_state()),
            Some(State::Dead) => Self::Dead(row.into_state()),
            Some(State::Unknown) => Self::Unknown(row.into_state()),
            None => {
                return Err(Error::permanent(
                    Code::BAD_STATUS,
                    format!("event {id}: unknown status word `{status}`"),
                ));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_gate_names_the_row_it_refuses() {
        let error = AnyRow::check("e-7", "sent", 0, None).unwrap_err();
        assert_eq!(error.code(), "bad_status");
        assert!(error.message().contains("e-7") && error.message().contains("sent"));
        assert!(AnyRow::check("e-7", "pending", -1, None).is_err());
        assert!(matches!(AnyRow::check("e-7", "processing", 1, Some(3)), Ok(AnyRow::Processing(_))));
    }

    proptest! {
        /// A model of any sequence of claims, failures, releases and crashes: only failures use up attempts.
        #[test]
        fn only_failures_use_up_attempts(steps in proptest::collection::vec(0u8..3, 1..40), limit in 1u32..8) {
            let mut row = Row::pending(0, None);
            let mut failures = 0;
            for step in steps {
                let claimed = row.claim();
                prop_assert_eq!(claimed.attempts(), failures + 1);
                row = match step {
                    0 => claimed.release(),
                    1 => claimed.expire(),
                    _ => {
                        failures += 1;
                        match claimed.fail(limit) {
                            Failed::Retry(row) => { prop_assert!(failures < limit); row }
                            Failed::Dead(_) => { prop_assert_eq!(failures, limit); return Ok(()); }
                        }
                    }
                };
                prop_assert_eq!(row.attempts(), failures);
            }
        }
    }
}
