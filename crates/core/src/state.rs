//! The states of a row in a queue, and the transitions between them.
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
//! Each store writes these transitions in its own SQL, fenced by the claim's token. `relay/judge.rs` decides which
//! transition follows from a sink's outcome. The conformance suites of `airtight-testkit` check them for every store.

/// The states of a row, as a table's status column stores them.
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

    /// The state that a canonical word stands for.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    /// Whether an operator may retry a row of this state: every state except done, since the event was delivered, and
    /// processing, since a relay owns the row.
    pub fn can_retry(self) -> bool {
        matches!(self, Self::Pending | Self::Dead | Self::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_is_read_from_its_own_word_and_no_other() {
        for state in State::ALL {
            assert_eq!(State::parse(state.as_str()), Some(state));
        }
        assert_eq!(State::parse("sent"), None);
    }

    #[test]
    fn a_retry_brings_back_what_has_neither_happened_nor_an_owner() {
        let back = State::ALL.into_iter().filter(|state| state.can_retry());
        assert!(back.eq([State::Pending, State::Dead, State::Unknown]));
    }
}
