//! The relay: moves events from one source to one sink, with order, retry and dead letters.
//!
//! One task runs `Engine::run`, a loop over four things that may happen: a fetch returns, a delivery
//! returns, a settle returns, a timer or the shutdown fires. Fetching, delivering and settling overlap. There is
//! at most one fetch and one settle at a time, so verdicts that arrive during a settle form the batch of the next
//! settle.
//!
//! A relay that is killed at any await loses nothing, since every event that it holds is *claimed* in the source. An
//! event that was delivered but not settled is delivered once more.

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

    /// The same, from parts whose types are known only at run time.
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

    /// The counters, which can be read while the relay runs.
    pub fn stats(&self) -> Arc<Stats> {
        self.stats.clone()
    }

    /// Runs until `shutdown` fires, then finishes the deliveries that are running, gives the rest back without costing
    /// an attempt, and returns what was done. An error means that the relay cannot continue: a permanent error of the
    /// source or the sink.
    pub async fn run(self, shutdown: CancellationToken) -> Result<Summary> {
        self.start(shutdown, false).await
    }

    /// Runs until the backlog is empty, or `shutdown` fires. It also returns an error when only events for destinations
    /// that have refused several times are left: these events stay in the outbox.
    pub async fn drain(self, shutdown: CancellationToken) -> Result<Summary> {
        self.start(shutdown, true).await
    }

    async fn start(self, shutdown: CancellationToken, drain: bool) -> Result<Summary> {
        let stats = self.stats.clone();
        engine::Engine::new(self, drain).run(shutdown).await?;
        Ok(stats.summary())
    }
}

/// The message of a panic, for errors that report it.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
