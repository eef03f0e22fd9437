//! What a pipeline promises and how much it may hold.

use std::time::Duration;

use crate::Backoff;

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

/// The policies of one pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// Which order deliveries keep; the source must be set to the same.
    pub order: Order,
    /// Whether a key stays blocked behind a dead event; the source must be set to the same.
    pub block_on_dead: bool,
    /// The attempt that, when it fails, makes an event dead, unless the event has a limit of its own.
    pub max_attempts: u32,
    /// How long to wait between attempts.
    pub backoff: Backoff,
    /// How many events to ask a source for at once.
    pub batch_events: usize,
    /// The most events in memory: fetched, being delivered, or waiting to be.
    pub in_flight_events: usize,
    /// The most bytes in memory, though always at least one event.
    pub in_flight_bytes: usize,
    /// The longest wait between two looks at an idle source.
    pub poll: Duration,
    /// How long the circuit stays open before the sink is tried again.
    pub circuit: Backoff,
    /// How often a relay may vanish while delivering one event alone before that event is dead.
    pub crashes_alone: u32,
    /// How long a shutdown waits for deliveries under way.
    pub grace: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            order: Order::Key,
            block_on_dead: false,
            max_attempts: 10,
            backoff: Backoff::default(),
            batch_events: 1_000,
            in_flight_events: 4_000,
            in_flight_bytes: 32 << 20,
            poll: Duration::from_secs(1),
            // A probe is one attempt to connect: cheap enough to go on soon after the sink is back.
            circuit: Backoff { cap: Duration::from_secs(5), ..Backoff::default() },
            crashes_alone: 3,
            grace: Duration::from_secs(10),
        }
    }
}
