//! A pipeline's rules: which order its events keep, and what a dead event means for its key.
//!
//! The source is the one place where they are set. A relay asks its source ([`crate::Source::rules`]) and has no
//! setting of its own, so that the two cannot differ.

use std::time::Duration;

use crate::event::MAX_PAYLOAD_BYTES;

/// Which order deliveries keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// None: rows are claimed freely.
    None,
    /// Per key (the aggregate id), across any number of relays.
    #[default]
    Key,
    /// Of all events, one at a time, by one relay at a time.
    Total,
}

impl Order {
    /// The word in configs and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Key => "key",
            Self::Total => "total",
        }
    }

    /// Reads the word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::None, Self::Key, Self::Total].into_iter().find(|order| order.as_str() == word)
    }
}

/// What a source promises about order. The relay keeps it for the events that it has in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rules {
    /// Which order deliveries keep.
    pub order: Order,
    /// Whether a key stays blocked behind an event that is dead, or whose outcome is not known.
    pub block_on_dead: bool,
}

/// How an outbox is read: what a queue, a log and the WAL have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// Only these streams; empty for all.
    pub streams: Vec<String>,
    /// Which order is kept.
    pub order: Order,
    /// Whether a key stays blocked behind a dead event.
    pub block_on_dead: bool,
    /// How long a relay's claims, or its partitions, stay its own without renewal.
    pub lease: Duration,
    /// How many partitions the keys are divided into, with `order = key`: the most relays that can work side by side.
    pub partitions: u16,
    /// Payloads larger than this are rejected, unread.
    pub max_payload: usize,
}

impl Default for ReadOptions {
    /// For a queue. A log has one partition, unless it is told otherwise: see [`crate::log::LogOptions::consumer`].
    fn default() -> Self {
        Self {
            streams: Vec::new(),
            order: Order::Key,
            block_on_dead: false,
            lease: Duration::from_secs(30),
            partitions: 64,
            max_payload: MAX_PAYLOAD_BYTES,
        }
    }
}

impl ReadOptions {
    /// The rules that these options set.
    pub fn rules(&self) -> Rules {
        Rules { order: self.order, block_on_dead: self.block_on_dead }
    }

    /// The streams, each once, in the order of their names.
    pub(crate) fn distinct_streams(&self) -> Vec<String> {
        let mut streams = self.streams.clone();
        streams.sort();
        streams.dedup();
        streams
    }
}
