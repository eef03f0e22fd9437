//! The circuit: while a whole sink is unavailable, nothing is sent to it and no attempt is spent.

use std::time::Duration;

use tokio::time::Instant;

use crate::{Backoff, Error};

#[derive(Debug)]
enum CircuitState {
    Closed,
    Open {
        until: Instant,
    },
    /// One event at a time is tried, until one is not refused as *unavailable*.
    Probing,
}

#[derive(Debug)]
pub(super) struct Circuit {
    state: CircuitState,
    failures: u32,
    backoff: Backoff,
}

impl Circuit {
    pub(super) fn new(backoff: Backoff) -> Self {
        Self { state: CircuitState::Closed, failures: 0, backoff }
    }

    /// Opens the circuit, for longer after each failure in a row. Returns for how long; none if it was already open.
    pub(super) fn open(&mut self, error: &Error) -> Option<Duration> {
        if matches!(self.state, CircuitState::Open { .. }) {
            return None;
        }
        self.failures = self.failures.saturating_add(1);
        let wait = self.backoff.after(self.failures).max(error.retry_after().unwrap_or_default());
        self.state = CircuitState::Open { until: Instant::now() + wait };
        Some(wait)
    }

    /// Records that the sink has answered. Returns whether this closed the circuit.
    pub(super) fn answered(&mut self) -> bool {
        let closed = matches!(self.state, CircuitState::Probing);
        if closed {
            self.state = CircuitState::Closed;
            self.failures = 0;
        }
        closed
    }

    /// Starts probing.
    pub(super) fn probe(&mut self) {
        self.state = CircuitState::Probing;
    }

    /// Until when nothing is sent to the sink.
    pub(super) fn open_until(&self) -> Option<Instant> {
        match self.state {
            CircuitState::Open { until } => Some(until),
            CircuitState::Closed | CircuitState::Probing => None,
        }
    }

    pub(super) fn is_probing(&self) -> bool {
        matches!(self.state, CircuitState::Probing)
    }
}
