//! The relay: moves events from one source to one sink, with order, retry and dead letters.
//!
//! One task runs `Engine::run`, a loop over four things that may happen: a fetch returns, a delivery
//! returns, a settle returns, a timer or the shutdown fires. Fetching, delivering and settling overlap; of
//! fetches and settles there is one at a time, so what piles up meanwhile makes the next settle a batch by
//! itself.
//!
//! Killed at any await, the relay loses nothing, since everything it knows is in the source as *claimed*;
//! what was delivered but not settled is delivered once more.

mod circuit;
mod destinations;
mod engine;
mod judge;
mod key_queues;
mod policy;
mod stats;

use std::{any::Any, sync::Arc};

use tokio_util::sync::CancellationToken;

pub use self::{
    policy::Policy,
    stats::{Stats, Summary},
};
use crate::{Result, Sink, Source};

/// A source, a sink and the policies between them.
///
/// ```no_run
/// # async fn example(source: impl airtight_core::Source, sink: impl airtight_core::Sink) -> airtight_core::Result<()> {
/// use airtight_core::{Policy, Relay};
/// use tokio_util::sync::CancellationToken;
///
/// let shutdown = CancellationToken::new();
/// let summary = Relay::new(source, sink).policy(Policy::default()).run(shutdown).await?;
/// println!("{} delivered", summary.delivered);
/// # Ok(()) }
/// ```
pub struct Relay {
    source: Arc<dyn Source>,
    sink: Arc<dyn Sink>,
    policy: Policy,
    stats: Arc<Stats>,
    pub(crate) name: String,
}

impl Relay {
    /// A relay with the default policies.
    pub fn new(source: impl Source, sink: impl Sink) -> Self {
        Self::from_parts(Arc::new(source), Arc::new(sink))
    }

    /// The same from parts whose types are known at run time only.
    pub fn from_parts(source: Arc<dyn Source>, sink: Arc<dyn Sink>) -> Self {
        Self { source, sink, policy: Policy::default(), stats: Arc::default(), name: "default".into() }
    }

    /// Sets the policies.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Names the pipeline, for logs.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Counters to watch while it runs.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }

    /// Runs until `shutdown` fires, then finishes what is under way, gives the rest back without costing an
    /// attempt, and returns what was done. An error means that it cannot go on: a permanent error of the
    /// source or the sink.
    pub async fn run(self, shutdown: CancellationToken) -> Result<Summary> {
        self.start(shutdown, false).await
    }

    /// Runs until the backlog is empty, or `shutdown` fires. An error, too, once nothing is left but events for
    /// destinations that have refused several times: these stay in the outbox.
    pub async fn drain(self, shutdown: CancellationToken) -> Result<Summary> {
        self.start(shutdown, true).await
    }

    async fn start(self, shutdown: CancellationToken, drain: bool) -> Result<Summary> {
        let stats = self.stats.clone();
        engine::Engine::new(self, drain).run(shutdown).await?;
        Ok(stats.summary())
    }
}

/// What a panic said, for errors that report it.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
