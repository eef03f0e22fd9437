//! Several relays in one process. When one of them ends, the others continue, unless [`OnEnd`] says otherwise.
//!
//! A relay ends by itself when its source or its sink cannot continue: retention has removed events that a consumer had
//! not read, an event halts the consumer, a slot is gone. This does not affect the other relays. [`Relays`] starts each
//! relay as a task, logs when one has ended and why, and reports each end as it happens ([`RunningRelays::next`]).

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

/// What happens to the other relays when one ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnEnd {
    /// They continue.
    #[default]
    Continue,
    /// They are asked to stop, as by [`RunningRelays::stop`].
    Stop,
}

/// Relays that are to run at the same time.
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
///     // The others continue.
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
    /// No relays yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a relay with the default policies.
    #[must_use]
    pub fn add(self, name: impl Into<String>, source: impl Source, sink: impl Sink) -> Self {
        self.add_relay(Relay::new(source, sink).name(name))
    }

    /// Adds a relay under its own name ([`Relay::name`]).
    #[must_use]
    pub fn add_relay(mut self, relay: Relay) -> Self {
        self.relays.push(relay);
        self
    }

    /// Sets what happens to the others when one relay ends by itself.
    #[must_use]
    pub fn on_end(mut self, on_end: OnEnd) -> Self {
        self.on_end = on_end;
        self
    }

    /// Stops all relays also when this token fires.
    #[must_use]
    pub fn shutdown_on(mut self, shutdown: &CancellationToken) -> Self {
        self.shutdown = shutdown.child_token();
        self
    }

    /// Starts all relays. Each runs until it is asked to stop or cannot continue.
    pub fn spawn(self) -> RunningRelays {
        self.start(false)
    }

    /// The same, but each relay also ends when its backlog is empty.
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
                // The source is not closed then: an event that was being delivered may still arrive at its destination,
                // and until the lease expires no other relay can deliver later events of its key.
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

/// Running relays. If this value is dropped, the relays are aborted, as if they were killed: see
/// [`RunningRelays::shutdown`].
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
    /// Why it was asked to stop, if that was not a shutdown.
    told: Arc<OnceLock<Error>>,
}

/// How one relay ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// The relay's name.
    pub name: String,
    /// What the relay had done by then.
    pub summary: Summary,
    /// Why the relay ended by itself; none if it was asked to stop, or if its backlog is empty.
    pub error: Option<Error>,
}

impl Ended {
    /// Whether the relay ended because something is wrong. A closed pipe on standard output ends a relay, but is no failure.
    pub fn is_failure(&self) -> bool {
        self.error.as_ref().is_some_and(|error| !error.is(&Code::READER_GONE))
    }
}

impl RunningRelays {
    /// Waits for the next relay to end; none when all have ended. Dropping the future loses nothing.
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
            (true, _) => "no other pipeline runs in this process".to_owned(),
            (false, true) => format!("the other pipelines are asked to stop: {others}"),
            (false, false) => format!("the other pipelines continue: {others}"),
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

    /// The names of the relays that still run.
    pub fn names(&self) -> Vec<&str> {
        self.live.values().map(|one| one.name.as_str()).collect()
    }

    /// Asks all relays to stop: each finishes its running deliveries and gives the rest back.
    pub fn stop(&self) {
        self.shutdown.cancel();
    }

    /// Asks the relays of this name to stop. The reason is then in their [`Ended::error`].
    pub fn end(&self, name: &str, why: &Error) {
        for one in self.live.values().filter(|one| one.name == name) {
            // The first reason is kept.
            let _ = one.told.set(why.clone());
            one.shutdown.cancel();
        }
    }

    /// Waits until all relays have ended.
    pub async fn wait(mut self) -> Vec<Ended> {
        let mut all = Vec::new();
        while let Some(ended) = self.next().await {
            all.push(ended);
        }
        all
    }

    /// Asks all relays to stop, and waits until they have.
    pub async fn shutdown(self) -> Vec<Ended> {
        self.stop();
        self.wait().await
    }
}
