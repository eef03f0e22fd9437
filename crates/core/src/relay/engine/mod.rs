//! The relay's loop; the parent module describes it. What the loop does with each thing that happens is in the
//! child modules.

mod deliver;
mod fetch;
mod settle;

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use self::{
    deliver::Delivered,
    fetch::Fetched,
    settle::{Hold, SettleDone, Then},
};
use super::{
    Policy, Relay, Stats,
    circuit::Circuit,
    destinations::Destinations,
    key_queues::{KeyHash, KeyQueues, Queued},
};
use crate::{
    Backoff, Capabilities, Class, Error, Position, Result, Rules, Settlement, Sink, Source, Verdict,
    event::Event, hash::Map,
};

/// How long leaving may take. A relay that hangs at its end would also renew its lease without end, and no other relay
/// could take its partitions.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a running claim or settle may take after the grace for deliveries has ended, and how long leaving may take
/// after that. A source that has not answered by then is not expected to answer.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// The waits between tries, while the source fails.
const SOURCE_BACKOFF: Backoff =
    Backoff { base: Duration::from_millis(200), multiplier: 2.0, cap: Duration::from_secs(10), jitter: 0.2 };

pub(super) struct Engine {
    source: Arc<dyn Source>,
    sink: Arc<dyn Sink>,
    policy: Policy,
    /// The source's rules, as it gave them when the relay started.
    rules: Rules,
    caps: Capabilities,
    stats: Arc<Stats>,
    name: String,
    drain: bool,
    /// When a drain next logs what it waits for.
    say_at: Option<Instant>,

    key_queues: KeyQueues,
    deliveries: JoinSet<Delivered>,
    /// The events that are being delivered, to give them back if a shutdown cannot wait for them.
    delivering: HashMap<u64, Vec<Position>>,
    next_call: u64,
    circuit: Circuit,
    /// The destinations that are unavailable while the sink works.
    destinations: Destinations,
    /// When the last of the retries that this relay has asked for is due.
    retries_until: Option<Instant>,
    /// The sink is being opened again. This may take long, and must delay nothing else.
    reopen: Option<BoxFuture<'static, Result<()>>>,

    fetch: Option<BoxFuture<'static, Fetched>>,
    fetches: u64,
    fetch_failures: u32,
    /// The last fetch found nothing: wait before the next.
    idle: bool,
    /// The running fetch is only a wait, which may be dropped. A claim may not be dropped.
    waiting: bool,

    /// Verdicts that wait to be settled.
    unsettled: Vec<(Settlement, Then)>,
    settle: Option<BoxFuture<'static, SettleDone>>,
    settle_failures: u32,
    /// How many verdicts the running settle has.
    settling: usize,
    /// Keys whose first event failed. A fetch that began before the source knew of the failure may return later events of
    /// these keys; they are given back.
    held: Map<KeyHash, Hold>,
    /// Keys that continue once the source has stored that one of their events is dead or unknown, with the number of
    /// such verdicts that are not stored yet. After a crash before that, the event is fetched again. If it were delivered
    /// then, it would come after events that are behind it.
    ending: Map<KeyHash, usize>,

    events: usize,
    bytes: usize,
    stopping: bool,
    /// Set once nothing more can be done: why the relay stops.
    fatal: Option<Error>,
}

impl Engine {
    pub(super) fn new(relay: Relay, drain: bool) -> Self {
        let caps = relay.sink.capabilities();
        let rules = relay.source.rules();
        Self {
            key_queues: KeyQueues::new(rules.order),
            circuit: Circuit::new(relay.policy.circuit),
            destinations: Destinations::new(relay.policy.circuit),
            retries_until: None,
            source: relay.source,
            sink: relay.sink,
            policy: relay.policy,
            rules,
            caps,
            stats: relay.stats,
            name: relay.name,
            drain,
            say_at: None,
            deliveries: JoinSet::new(),
            delivering: HashMap::new(),
            next_call: 0,
            reopen: None,
            fetch: None,
            fetches: 0,
            fetch_failures: 0,
            idle: false,
            waiting: false,
            unsettled: Vec::new(),
            settle: None,
            settle_failures: 0,
            settling: 0,
            held: Map::default(),
            ending: Map::default(),
            events: 0,
            bytes: 0,
            stopping: false,
            fatal: None,
        }
    }

    pub(super) async fn run(mut self, shutdown: CancellationToken) -> Result<()> {
        if !self.open(&shutdown).await? {
            return Ok(());
        }
        let mut give_up_at = None;
        let mut end_at = None;
        let leave_within = loop {
            if !self.stopping {
                self.start_fetch();
                self.start_deliveries();
            }
            self.start_settle();
            if self.stopping {
                let now = Instant::now();
                let end_at = *end_at.get_or_insert(now + self.policy.grace + LAST_ANSWER);
                if self.is_quiet() {
                    // A renewal may wait for an answer that never comes, and leaving waits for the renewal.
                    break LEAVE_TIMEOUT.min(end_at.saturating_duration_since(now) + LAST_ANSWER);
                }
            }
            let closed = self.stopping || self.reopen.is_some();
            let circuit_timer = self.circuit.open_until().filter(|_| !closed);
            tokio::select! {
                biased;
                () = shutdown.cancelled(), if !self.stopping => {
                    self.stop(None);
                    give_up_at = Some(Instant::now() + self.policy.grace);
                }
                Some(delivered) = self.deliveries.join_next(), if !self.deliveries.is_empty() => {
                    // The task cannot panic (the sink's panics are caught inside) and is aborted only below.
                    if let Ok(delivered) = delivered {
                        self.on_delivered(delivered);
                    }
                }
                done = poll_option(&mut self.settle) => self.on_settled(done),
                fetched = poll_option(&mut self.fetch) => self.on_fetched(fetched),
                opened = poll_option(&mut self.reopen) => self.on_reopened(opened),
                () = sleep_until(circuit_timer) => {
                    let sink = self.sink.clone();
                    self.reopen = Some(async move { sink.open().await }.boxed());
                }
                () = sleep_until(give_up_at), if give_up_at.is_some() => {
                    give_up_at = None;
                    self.abandon_deliveries();
                }
                () = sleep_until(end_at) => {
                    tracing::warn!(
                        pipeline = self.name,
                        "the source does not answer; the relay stops without it, and its leases will expire"
                    );
                    break LAST_ANSWER;
                }
            }
            if self.stopping && give_up_at.is_none() && !self.deliveries.is_empty() {
                give_up_at = Some(Instant::now() + self.policy.grace);
            }
        };
        self.close(leave_within).await;
        self.fatal.map_or(Ok(()), Err)
    }

    /// Opens source and sink. The relay waits for a source that is unavailable, but not for one that refuses the
    /// credentials.
    async fn open(&mut self, shutdown: &CancellationToken) -> Result<bool> {
        self.source.accepts(&self.policy)?;
        let mut failures = 0;
        loop {
            let opened = tokio::select! {
                () = shutdown.cancelled() => None,
                opened = self.source.open(&self.caps) => Some(opened),
            };
            let Some(opened) = opened else {
                self.leave(LEAVE_TIMEOUT).await;
                return Ok(false);
            };
            let Err(error) = opened else { break };
            failures += 1;
            if error.class() != Class::Retryable {
                self.leave(LEAVE_TIMEOUT).await;
                return Err(error);
            }
            let wait = SOURCE_BACKOFF.after(failures);
            tracing::warn!(pipeline = self.name, %error, "the source is not available yet; trying again in {wait:.1?}");
            // The next round sees a shutdown.
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        let opened = tokio::select! {
            () = shutdown.cancelled() => None,
            opened = self.sink.open() => Some(opened),
        };
        match opened {
            Some(Ok(())) => Ok(true),
            Some(Err(error)) if error.class() != Class::Permanent => {
                self.open_circuit(&error);
                Ok(true)
            }
            // The relay leaves its group before the error is reported.
            ended => {
                self.leave(LEAVE_TIMEOUT).await;
                ended.map_or(Ok(false), |opened| opened.map(|()| false))
            }
        }
    }

    /// Gives back the waiting events of a key whose first event was not delivered.
    fn clear_key(&mut self, key_hash: Option<KeyHash>) {
        let Some(key_hash) = key_hash else { return };
        let waiting = self.key_queues.clear_key(key_hash);
        self.release(waiting);
    }

    fn release_waiting(&mut self) {
        let waiting = self.key_queues.clear();
        self.release(waiting);
    }

    fn release(&mut self, waiting: Vec<Queued>) {
        for queued in waiting {
            self.shrink(1, queued.size);
            self.push_verdict(queued.delivery.position, queued.key_hash, Verdict::Released);
        }
    }

    fn grow(&mut self, events: usize, bytes: usize) {
        self.events += events;
        self.bytes += bytes;
        self.publish_size();
        self.stats.peak_bytes.fetch_max(self.bytes as u64, Ordering::Relaxed);
    }

    fn shrink(&mut self, events: usize, bytes: usize) {
        self.events -= events;
        self.bytes -= bytes;
        self.publish_size();
    }

    fn publish_size(&self) {
        self.stats.in_flight_events.store(self.events as u64, Ordering::Relaxed);
        self.stats.in_flight_bytes.store(self.bytes as u64, Ordering::Relaxed);
    }

    /// Whether no event is held, being delivered or waiting to be settled.
    fn is_quiet(&self) -> bool {
        self.events == 0
            && self.deliveries.is_empty()
            && self.unsettled.is_empty()
            && self.settle.is_none()
            && (!self.stopping || self.fetch.is_none())
    }

    fn stop(&mut self, fatal: Option<Error>) {
        self.stopping = true;
        self.fatal = self.fatal.take().or(fatal);
        self.release_waiting();
        self.reopen = None;
        if self.waiting {
            self.fetch = None;
        }
    }

    fn abandon_deliveries(&mut self) {
        self.deliveries.abort_all();
        let abandoned = std::mem::take(&mut self.delivering);
        let positions: Vec<Position> = abandoned.into_values().flatten().collect();
        if !positions.is_empty() {
            tracing::warn!(
                pipeline = self.name,
                events = positions.len(),
                "the shutdown did not wait for all deliveries: their events are given back, and will be delivered again"
            );
        }
        for position in positions {
            self.push_verdict(position, None, Verdict::Released);
        }
        (self.events, self.bytes) = (0, 0);
        self.publish_size();
    }

    /// Closes source and sink. This method and `leave` take `&mut self`: with a shared reference across an await, the
    /// relay could not be spawned.
    async fn close(&mut self, leave_within: Duration) {
        // A claim that hangs keeps a reference to the source.
        (self.fetch, self.settle) = (None, None);
        let sink = self.sink.clone();
        let closing = async move { tokio::time::timeout(LEAVE_TIMEOUT, sink.close()).await };
        let ((), closed) = tokio::join!(self.leave(leave_within), closing);
        match closed {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(pipeline = self.name, %error, "the sink did not close cleanly");
            }
            Err(_) => tracing::warn!(pipeline = self.name, "the sink did not close in time"),
        }
    }

    async fn leave(&mut self, within: Duration) {
        match tokio::time::timeout(within, self.source.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(pipeline = self.name, %error, "could not leave the group cleanly; the leases of this relay will expire");
            }
            Err(_) => {
                tracing::warn!(
                    pipeline = self.name,
                    "could not leave the group in time; the leases of this relay will expire"
                );
            }
        }
    }
}

async fn poll_option<T>(slot: &mut Option<BoxFuture<'static, T>>) -> T {
    match slot {
        Some(future) => {
            let value = future.await;
            *slot = None;
            value
        }
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn log_failure(pipeline: &str, event: &Event, error: &Error, what: &str) {
    tracing::warn!(
        pipeline,
        traceId = event.trace_id(),
        eventId = event.id,
        stream = event.stream,
        eventType = event.event_type,
        aggregateType = event.aggregate_type,
        aggregateId = event.aggregate_id,
        code = error.code(),
        %error,
        "{what}"
    );
}
