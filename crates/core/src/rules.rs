//! A pipeline's rules: which order its events keep, and what a dead event means for its key.
//!
//! The rules are set in one place, the source. A relay asks its source for them ([`crate::Source::rules`]) and has no
//! such setting itself, so the two cannot differ.

use std::time::Duration;

use crate::event::MAX_PAYLOAD_BYTES;

/// The order of deliveries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Order {
    /// No order: rows are claimed freely.
    None,
    /// Per key (the aggregate id), across any number of relays.
    #[default]
    Key,
    /// The order of all events: one event at a time, by one relay at a time.
    Total,
}

impl Order {
    /// The word for this order in configs and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Key => "key",
            Self::Total => "total",
        }
    }

    /// The order that a word stands for.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::None, Self::Key, Self::Total].into_iter().find(|order| order.as_str() == word)
    }
}

/// What a source promises about order. The relay keeps this promise for the events that it has in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rules {
    /// The order of deliveries.
    pub order: Order,
    /// Whether a key stays blocked behind an event that is dead, or whose outcome is unknown.
    pub block_on_dead: bool,
}

/// How an outbox is read: the options that queue, log and CDC have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOptions {
    /// Read only these streams; empty for all.
    pub streams: Vec<String>,
    /// The order of deliveries.
    pub order: Order,
    /// Whether a key stays blocked behind a dead event.
    pub block_on_dead: bool,
    /// How long a relay keeps its claims, or its partitions, without renewal.
    pub lease: Duration,
    /// How many partitions the keys are divided into, with `order = key`. At most this many relays can work at once.
    pub partitions: u16,
    /// Larger payloads are rejected without being read.
    pub max_payload: usize,
    /// Of a queue: whether delivered events stay in the table, as done. If not, they are deleted at delivery, and a
    /// repeated id is a new event.
    pub keep_done: bool,
}

impl Default for ReadOptions {
    /// The options of a queue. A log has one partition by default: see [`crate::log::LogOptions::consumer`].
    fn default() -> Self {
        Self {
            streams: Vec::new(),
            order: Order::Key,
            block_on_dead: false,
            lease: Duration::from_secs(30),
            partitions: 64,
            max_payload: MAX_PAYLOAD_BYTES,
            keep_done: true,
        }
    }
}

impl ReadOptions {
    /// The rules that these options set.
    pub fn rules(&self) -> Rules {
        Rules { order: self.order, block_on_dead: self.block_on_dead }
    }

    /// The streams without repeats, in the order of their names.
    pub(crate) fn distinct_streams(&self) -> Vec<String> {
        let mut streams = self.streams.clone();
        streams.sort();
        streams.dedup();
        streams
    }
}
