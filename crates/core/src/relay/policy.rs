//! How often a relay tries, how long it waits, and how much it may hold in memory.

use std::time::Duration;

use crate::Backoff;

/// The policies of one relay. Order, and what a dead event means for its key, are not among them: the source sets those
/// ([`crate::Rules`]).
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// After this many failed attempts an event is dead, unless the event has its own limit.
    pub max_attempts: u32,
    /// How long to wait between attempts.
    pub backoff: Backoff,
    /// How many events to ask a source for at once.
    pub batch_events: usize,
    /// The most events in memory: fetched, being delivered, or waiting to be.
    pub in_flight_events: usize,
    /// The most bytes in memory. One event is always allowed, however large.
    pub in_flight_bytes: usize,
    /// The longest wait between two fetches from an idle source.
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
            max_attempts: 10,
            backoff: Backoff::default(),
            batch_events: 1_000,
            in_flight_events: 4_000,
            in_flight_bytes: 32 << 20,
            poll: Duration::from_secs(1),
            // A probe is one attempt to connect. It is cheap, so a short wait lets deliveries continue soon after the
            // sink is available again.
            circuit: Backoff { cap: Duration::from_secs(5), ..Backoff::default() },
            crashes_alone: 3,
            grace: Duration::from_secs(10),
        }
    }
}
