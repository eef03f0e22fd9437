//! Several relays in one process. One that ends takes none of the others with it, unless told so.
//!
//! A relay ends by itself when its source or its sink cannot go on: a consumer that retention has overtaken, an
//! event that halts it, a slot that is gone. That is its own matter. [`Relays`] starts each relay as a task, says in
//! the log when one has ended and why, and hands out each end as it happens ([`RunningRelays::next`]).

use std::{
    collections::BTreeMap,
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
};

use futures::FutureExt;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    Code, Error, Relay, Result, Sink, Source,
    relay::{Stats, Summary, panic_message},
};

/// What becomes of the others when one relay ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnEnd {
    /// They go on.
    #[default]
    Continue,
    /// They are asked to stop, as by [`RunningRelays::stop`].
    Stop,
}

/// Relays that are to run side by side.
///
/// ```no_run
/// # async fn example(
/// #     orders: impl airtight_core::Source, broker: impl airtight_core::Sink,
/// #     audit: impl airtight_core::Source, file: impl airtight_core::Sink,
/// # ) {
/// use airtight_core::Relays;
///
/// let mut relays = Relays::new().add("orders", orders, broker).add("audit", audit, file).spawn();
/// while let Some(ended) = relays.next().await {
///     // The others go on.
///     eprintln!("{} ended: {:?}", ended.name, ended.error);
/// }
/// # }
/// ```
#[derive(Default)]
pub struct Relays {
    relays: Vec<Relay>,
    on_end: OnEnd,
    shutdown: CancellationToken,
}

impl Relays {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a relay with the default policies.
    #[must_use]
    pub fn add(self, name: impl Into<String>, source: impl Source, sink: impl Sink) -> Self {
        self.add_relay(Relay::new(source, sink).name(name))
    }

    /// Adds a relay under the name that it has ([`Relay::name`]).
    #[must_use]
    pub fn add_relay(mut self, relay: Relay) -> Self {
        self.relays.push(relay);
        self
    }

    /// What becomes of the others when one ends by itself.
    #[must_use]
    pub fn on_end(mut self, on_end: OnEnd) -> Self {
        self.on_end = on_end;
        self
    }

    /// Stops all of them when this token fires, too.
    #[must_use]
    pub fn shutdown_on(mut self, shutdown: &CancellationToken) -> Self {
        self.shutdown = shutdown.child_token();
        self
    }

    /// Starts all of them; each runs until it is asked to stop or cannot go on.
    pub fn spawn(self) -> RunningRelays {
        self.start(false)
    }

    /// The same, but each also ends when its backlog is empty.
    pub fn spawn_drain(self) -> RunningRelays {
        self.start(true)
    }

    fn start(self, drain: bool) -> RunningRelays {
        let mut running = RunningRelays {
            tasks: JoinSet::new(),
            live: BTreeMap::new(),
            on_end: self.on_end,
            shutdown: self.shutdown,
        };
        for (index, relay) in self.relays.into_iter().enumerate() {
            let one = Live {
                name: relay.name.clone(),
                stats: relay.stats(),
                shutdown: running.shutdown.child_token(),
                told: Arc::default(),
            };
            let shutdown = one.shutdown.clone();
            running.live.insert(index, one);
            running.tasks.spawn(async move {
                let run =
                    async { if drain { relay.drain(shutdown).await } else { relay.run(shutdown).await } };
                // The source is not closed then: what was under way may still arrive somewhere, and only a lease
                // that runs out keeps others from overtaking it.
                let ended = AssertUnwindSafe(run).catch_unwind().await.unwrap_or_else(|panic| {
                    let what = panic_message(&*panic);
                    Err(Error::permanent(
                        Code::PANIC,
                        format!("the relay panicked: {what}; this is a bug in airtight or in a source"),
                    ))
                });
                (index, ended)
            });
        }
        running
    }
}

/// Relays at work. Dropped, they are aborted, as a kill would: see [`RunningRelays::shutdown`].
pub struct RunningRelays {
    tasks: JoinSet<(usize, Result<Summary>)>,
    live: BTreeMap<usize, Live>,
    on_end: OnEnd,
    shutdown: CancellationToken,
}

struct Live {
    name: String,
    stats: Arc<Stats>,
    shutdown: CancellationToken,
    /// Why it was told to end, where that was not a shutdown.
    told: Arc<OnceLock<Error>>,
}

/// How one relay ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Whose end it is.
    pub name: String,
    /// What it had done by then.
    pub summary: Summary,
    /// Why it ended by itself; none when it was asked to stop, or when its backlog is empty.
    pub error: Option<Error>,
}

impl Ended {
    /// Whether it ended because something is wrong. Nobody reading standard output any more is an end, and no failure.
    pub fn is_failure(&self) -> bool {
        self.error.as_ref().is_some_and(|error| !error.is(&Code::READER_GONE))
    }
}

impl RunningRelays {
    /// Waits for the next relay to end; none when all have. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Ended> {
        loop {
            // Aborted only when this is dropped, and panics are caught inside.
            let Ok((index, result)) = self.tasks.join_next().await? else { continue };
            if let Some(ended) = self.ended(index, result) {
                return Some(ended);
            }
        }
    }

    fn ended(&mut self, index: usize, result: Result<Summary>) -> Option<Ended> {
        let one = self.live.remove(&index)?;
        let error = result.err().or_else(|| one.told.get().cloned());
        let ended = Ended { name: one.name, summary: one.stats.summary(), error };
        let Some(error) = &ended.error else { return Some(ended) };
        let others = self.names().join(", ");
        let stops = self.on_end == OnEnd::Stop;
        let follows = match (others.is_empty(), stops || self.shutdown.is_cancelled()) {
            (true, _) => "no other one runs here".to_owned(),
            (false, true) => format!("the others are stopped: {others}"),
            (false, false) => format!("the others go on: {others}"),
        };
        if ended.is_failure() {
            tracing::error!(
                pipeline = ended.name, code = error.code(), %error,
                "the pipeline has ended and delivers nothing until it is started again; {follows}"
            );
        } else {
            tracing::info!(pipeline = ended.name, code = error.code(), %error, "the pipeline has ended; {follows}");
        }
        if stops {
            self.stop();
        }
        Some(ended)
    }

    /// The names of those that still run.
    pub fn names(&self) -> Vec<&str> {
        self.live.values().map(|one| one.name.as_str()).collect()
    }

    /// Asks all of them to stop: each finishes what it has under way and gives the rest back.
    pub fn stop(&self) {
        self.shutdown.cancel();
    }

    /// Asks those of this name to stop, for a reason that then is in their [`Ended::error`].
    pub fn end(&self, name: &str, why: &Error) {
        for one in self.live.values().filter(|one| one.name == name) {
            // The first reason stands.
            let _ = one.told.set(why.clone());
            one.shutdown.cancel();
        }
    }

    /// Waits until all have ended.
    pub async fn wait(mut self) -> Vec<Ended> {
        let mut all = Vec::new();
        while let Some(ended) = self.next().await {
            all.push(ended);
        }
        all
    }

    /// Asks all of them to stop and waits until they have.
    pub async fn shutdown(self) -> Vec<Ended> {
        self.stop();
        self.wait().await
    }
}
