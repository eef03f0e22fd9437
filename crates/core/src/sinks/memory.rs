//! A sink that keeps events in memory, for tests and examples.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use crate::{Capabilities, Delivery, Event, Outcome, Sink};

/// A sink that keeps every event in memory. Clones share the events.
#[derive(Debug, Clone, Default)]
pub struct MemorySink {
    events: Arc<Mutex<Vec<Event>>>,
}

impl MemorySink {
    /// An empty sink.
    pub fn new() -> Self {
        Self::default()
    }

    /// A copy of what has arrived, in order of arrival.
    pub fn events(&self) -> Vec<Event> {
        self.lock().clone()
    }

    /// How many have arrived.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether nothing has arrived.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Sink for MemorySink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        self.lock().extend(batch.iter().map(|delivery| delivery.event.clone()));
        vec![Outcome::Delivered; batch.len()]
    }
}
