//! Counters of a relay. Any thread can read them while the relay runs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Serialize;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Live counters.
        #[derive(Debug, Default)]
        pub struct Stats {
            $(pub(super) $name: AtomicU64,)*
            pub(super) circuit_open: AtomicBool,
        }

        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        pub struct Summary {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// The counters now.
            pub fn summary(&self) -> Summary {
                Summary { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters!(
    /// Events that the source handed out, including repeats.
    fetched,
    /// Events that this relay delivered, including repeats and events whose settle was refused.
    delivered,
    /// Of those, events that the destination reported as already present: repeats that it dropped.
    duplicates,
    /// Events that failed and are to be tried again.
    retried,
    /// Events that were given up on.
    dead,
    /// Events whose outcome is unknown.
    unknown,
    /// Events that were given back untried.
    released,
    /// Events that were put back to wait for their destination.
    waiting,
    /// Settles that were refused because this relay no longer owned the event: lost leases, not failures.
    fenced,
    /// How often the circuit opened.
    circuit_opened,
    /// Destinations that are unavailable now.
    destinations_away,
    /// Events in memory now.
    in_flight_events,
    /// Bytes in memory now.
    in_flight_bytes,
    /// The most bytes that were ever in memory.
    peak_bytes,
);

impl Stats {
    /// Whether the circuit is open, so that nothing is sent to the sink.
    pub fn is_circuit_open(&self) -> bool {
        self.circuit_open.load(Ordering::Relaxed)
    }
}

pub(super) fn add(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}
