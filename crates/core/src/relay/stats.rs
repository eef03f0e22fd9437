//! Counters of a running relay, readable from anywhere while it runs.

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
    /// Events that the source handed out, repeats included.
    fetched,
    /// Delivered by this relay, repeats and those whose settle was refused included.
    delivered,
    /// Of those, what the destination said that it had already: repeats that it dropped.
    duplicates,
    /// Failed, to be tried again.
    retried,
    /// Given up on.
    dead,
    /// Outcome not known.
    unknown,
    /// Given back untried.
    released,
    /// Put back to wait for their destination.
    waiting,
    /// Settles refused because somebody else owned the event by then: lost leases, not failures.
    fenced,
    /// How often the circuit opened.
    circuit_opened,
    /// Destinations that are away now.
    destinations_away,
    /// Events in memory now.
    in_flight_events,
    /// Bytes in memory now.
    in_flight_bytes,
    /// The most bytes that were ever in memory.
    peak_bytes,
);

impl Stats {
    /// Whether the sink is being left alone right now.
    pub fn is_circuit_open(&self) -> bool {
        self.circuit_open.load(Ordering::Relaxed)
    }
}

pub(super) fn add(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}
