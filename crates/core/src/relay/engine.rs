//! The loop itself; see the module above for its shape.

use std::{
    collections::{HashMap, HashSet},
    panic::AssertUnwindSafe,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    Policy, Relay, Stats,
    circuit::Circuit,
    judge,
    lanes::{Lane, Lanes, Queued},
    stats::add,
};
use crate::{
    Backoff, Batch, Capabilities, Class, Delivery, Error, Limits, Outcome, Position, Result, Settlement,
    Sink, Source, Verdict, event::Event, source::Settled,
};

/// The most verdicts in one settle: bounds the statement, not the throughput.
const SETTLE_BATCH: usize = 4_000;

/// How long leaving may take, and what of a claim or a settle is under way, beyond the grace for deliveries. A
/// relay that hangs for ever at its end would renew for ever, too, and keep its partitions from everyone.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits between tries of a source that fails.
const SOURCE_BACKOFF: Backoff =
    Backoff { base: Duration::from_millis(200), multiplier: 2.0, cap: Duration::from_secs(10), jitter: 0.2 };

pub(super) struct Engine {
    source: Arc<dyn Source>,
    sink: Arc<dyn Sink>,
    policy: Policy,
    caps: Capabilities,
    stats: Arc<Stats>,
    name: String,
    drain: bool,

    lanes: Lanes,
    deliveries: JoinSet<Delivered>,
    /// What is being delivered, to give it back if a shutdown cannot wait for it.
    delivering: HashMap<u64, Vec<Position>>,
    next_call: u64,
    circuit: Circuit,
    /// The sink is being opened again, which may take long and must hold up nothing else.
    reopen: Option<BoxFuture<'static, Result<()>>>,

    fetch: Option<BoxFuture<'static, Fetched>>,
    fetches: u64,
    fetch_failures: u32,
    /// The last fetch found nothing: wait before the next.
    idle: bool,
    /// The fetch under way is only a wait, which may be dropped; a claim may not.
    waiting: bool,

    /// Verdicts that wait to be settled.
    unsettled: Vec<(Settlement, Then)>,
    settle: Option<BoxFuture<'static, SettleDone>>,
    settle_failures: u32,
    /// How many verdicts the settle under way has.
    settling: usize,
    /// Lanes whose head failed: what a fetch brings that began before the source knew is given back.
    held: HashMap<Lane, Hold>,
    /// Lanes that go on, once the source knows that an event of theirs is dead or unknown, with the number of
    /// such verdicts on their way. A crash before that brings the event again, and if it was delivered then, it
    /// must not come after what is behind it.
    ending: HashMap<Lane, usize>,

    events: usize,
    bytes: usize,
    stopping: bool,
    /// Set once nothing more can be done: why the relay stops.
    fatal: Option<Error>,
}

struct Delivered {
    call: u64,
    batch: Vec<Queued>,
    outcomes: Vec<Outcome>,
}

enum Fetched {
    Batch(u64, Result<Batch>),
    Backlog(Result<crate::Backlog>),
    Waited,
}

struct SettleDone {
    settlements: Vec<Settlement>,
    thens: Vec<Then>,
    result: Result<Settled>,
}

/// What follows for a lane when a verdict is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Nothing,
    /// The source holds it from now on.
    Held(Lane),
    /// It goes on.
    GoOn(Lane),
}

/// A lane whose head was not delivered. A fetch that began before the source knew may bring later events of
/// that lane; they are given back. A fetch that begins afterwards respects it by itself, and none begins
/// while verdicts are unsettled, or giving back could go round in circles.
#[derive(Default)]
struct Hold {
    /// Verdicts on their way to the source.
    unsettled: usize,
    /// The newest fetch that began before the source knew.
    fetches: u64,
}

impl Engine {
    pub(super) fn new(relay: Relay, drain: bool) -> Self {
        let caps = relay.sink.capabilities();
        Self {
            lanes: Lanes::new(relay.policy.order),
            circuit: Circuit::new(relay.policy.circuit),
            source: relay.source,
            sink: relay.sink,
            policy: relay.policy,
            caps,
            stats: relay.stats,
            name: relay.name,
            drain,
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
            held: HashMap::new(),
            ending: HashMap::new(),
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
        loop {
            if !self.stopping {
                self.start_fetch();
                self.start_deliveries();
            }
            self.start_settle();
            if self.stopping && self.is_quiet() {
                break;
            }

            if self.stopping && end_at.is_none() {
                end_at = Some(Instant::now() + self.policy.grace + LEAVE_TIMEOUT);
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
                        "the source does not answer; stopping without it: leases will run out by themselves"
                    );
                    break;
                }
            }
            if self.stopping && give_up_at.is_none() && !self.deliveries.is_empty() {
                give_up_at = Some(Instant::now() + self.policy.grace);
            }
        }
        self.close().await;
        self.fatal.map_or(Ok(()), Err)
    }

    /// Opens both ends. A source that is away is waited for; wrong credentials are not.
    async fn open(&mut self, shutdown: &CancellationToken) -> Result<bool> {
        let mut failures = 0;
        loop {
            let opened = tokio::select! {
                () = shutdown.cancelled() => None,
                opened = self.source.open() => Some(opened),
            };
            let Some(opened) = opened else {
                self.leave().await;
                return Ok(false);
            };
            let Err(error) = opened else { break };
            failures += 1;
            if error.class() != Class::Retryable {
                self.leave().await;
                return Err(error);
            }
            let wait = SOURCE_BACKOFF.after(failures);
            tracing::warn!(pipeline = self.name, %error, "the source is not there yet; trying again in {wait:.1?}");
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
            // The place among the relays is given back before anything is reported.
            ended => {
                self.leave().await;
                ended.map_or(Ok(false), |opened| opened.map(|()| false))
            }
        }
    }

    // --- fetching ---------------------------------------------------------------------------------------

    fn start_fetch(&mut self) {
        if self.fetch.is_some() || self.circuit.open_until().is_some() {
            return;
        }
        if self.held.values().any(|hold| hold.unsettled > 0) {
            return;
        }
        let source = self.source.clone();
        if self.idle {
            self.idle = false;
            let poll = self.policy.poll;
            let wait = async move {
                source.wait(poll).await;
                Fetched::Waited
            };
            self.fetch = Some(wait.boxed());
            self.waiting = true;
            return;
        }
        let Some(limits) = self.room() else { return };
        self.fetches += 1;
        let fetch = self.fetches;
        self.fetch = Some(async move { Fetched::Batch(fetch, source.next(limits).await) }.boxed());
    }

    /// How much may be fetched; none while there is less room than is worth a round trip.
    fn room(&self) -> Option<Limits> {
        if self.circuit.is_probing() {
            let limits = Limits { events: 1, bytes: self.policy.in_flight_bytes };
            return (self.events == 0).then_some(limits);
        }
        // What is delivered but not settled is held by the source for us: it counts, or a source whose settles
        // do not get through would be claimed to the last row.
        let held = self.events + self.unsettled.len() + self.settling;
        let events = self.policy.in_flight_events.saturating_sub(held).min(self.policy.batch_events);
        let bytes = self.policy.in_flight_bytes.saturating_sub(self.bytes);
        let worth_it = events * 2 >= self.policy.batch_events && bytes * 4 >= self.policy.in_flight_bytes;
        (held == 0 || worth_it).then_some(Limits { events: events.max(1), bytes: bytes.max(1) })
    }

    fn on_fetched(&mut self, fetched: Fetched) {
        self.waiting = false;
        match fetched {
            Fetched::Waited => {}
            Fetched::Backlog(Ok(backlog)) => {
                if backlog.unfinished <= backlog.blocked && self.is_quiet() {
                    self.stop(None);
                } else {
                    self.idle = true;
                }
            }
            Fetched::Batch(fetch, Ok(batch)) => {
                self.fetch_failures = 0;
                self.accept(fetch, batch);
            }
            Fetched::Batch(_, Err(error)) | Fetched::Backlog(Err(error)) => self.on_source_error(error),
        }
    }

    fn on_source_error(&mut self, error: Error) {
        if error.class() == Class::Permanent {
            tracing::error!(pipeline = self.name, code = error.code(), %error, "the source cannot go on");
            self.stop(Some(error));
            return;
        }
        self.fetch_failures += 1;
        let wait = SOURCE_BACKOFF.after(self.fetch_failures);
        tracing::warn!(pipeline = self.name, code = error.code(), %error, "cannot read the outbox; trying again in {wait:.1?}");
        if !self.stopping {
            self.fetch = Some(tokio::time::sleep(wait).map(|()| Fetched::Waited).boxed());
            self.waiting = true;
        }
    }

    fn accept(&mut self, fetch: u64, batch: Batch) {
        self.held.retain(|_, hold| !hold.is_known_to(fetch));
        if batch.is_empty() {
            if self.drain && self.is_quiet() {
                let source = self.source.clone();
                self.fetch = Some(async move { Fetched::Backlog(source.backlog().await) }.boxed());
            } else {
                self.idle = true;
            }
            return;
        }
        add(&self.stats.fetched, batch.deliveries.len() + batch.rejects.len());
        for reject in batch.rejects {
            tracing::error!(
                pipeline = self.name, eventId = reject.id, code = reject.error.code(), error = %reject.error,
                "row cannot be an event; dead"
            );
            let lane = reject.key.as_deref().and_then(|key| self.lanes.lane(key));
            self.push_verdict(reject.position, lane, Verdict::Dead { error: reject.error });
        }
        let unwanted = self.stopping || self.circuit.open_until().is_some();
        for delivery in batch.deliveries {
            let lane = self.lanes.lane(&delivery.event.aggregate_id);
            if unwanted || lane.is_some_and(|lane| self.held.contains_key(&lane)) {
                self.push_verdict(delivery.position, lane, Verdict::Released);
            } else if let Some(error) = judge::crashed_too_often(&delivery, &self.policy) {
                log_failure(&self.name, &delivery.event, &error, "dead: it may crash relays");
                self.push_verdict(delivery.position, lane, Verdict::Dead { error });
            } else {
                let size = delivery.event.size();
                self.grow(1, size);
                self.lanes.push(Queued { delivery, ownership: batch.ownership.clone(), size });
            }
        }
    }

    // --- delivering -------------------------------------------------------------------------------------

    fn start_deliveries(&mut self) {
        let probing = self.circuit.is_probing();
        while self.circuit.open_until().is_none()
            && self.deliveries.len() < if probing { 1 } else { self.caps.concurrency.max(1) }
            && self.lanes.has_ready()
        {
            let one = probing || self.policy.order == super::Order::Total;
            let max_events = if one { 1 } else { self.caps.max_batch_events.max(1) };
            let taken =
                self.lanes.take(max_events, self.caps.max_batch_bytes, self.caps.prefix_per_key && !one);
            let batch = self.drop_lost(taken);
            if batch.is_empty() {
                continue;
            }
            let call = self.next_call;
            self.next_call += 1;
            self.delivering.insert(call, batch.iter().map(|queued| queued.delivery.position).collect());
            self.deliveries.spawn(deliver(self.sink.clone(), call, batch));
        }
    }

    /// Takes out events whose lease ran out before they were sent, and all behind them in their lane:
    /// somebody else delivers them. The source is told, so that it can give back what nobody has taken yet.
    fn drop_lost(&mut self, taken: Vec<Queued>) -> Vec<Queued> {
        let mut lost_lanes: HashSet<Lane> = HashSet::new();
        let mut kept_lanes: HashSet<Lane> = HashSet::new();
        let mut kept = Vec::with_capacity(taken.len());
        for queued in taken {
            let lane = self.lanes.lane(&queued.delivery.event.aggregate_id);
            let behind_lost = lane.is_some_and(|lane| lost_lanes.contains(&lane));
            if !behind_lost && !queued.ownership.is_lost() {
                kept_lanes.extend(lane);
                kept.push(queued);
                continue;
            }
            lost_lanes.extend(lane);
            self.shrink(1, queued.size);
            self.push_verdict(queued.delivery.position, lane, Verdict::Released);
            self.clear_lane(lane);
        }
        for lane in lost_lanes.difference(&kept_lanes) {
            self.lanes.finish(*lane);
        }
        kept
    }

    fn on_delivered(&mut self, delivered: Delivered) {
        let Delivered { call, batch, outcomes } = delivered;
        if self.delivering.remove(&call).is_none() {
            return;
        }
        let mut outcomes = outcomes.into_iter();
        let mut away: Option<Error> = None;
        let mut failed = false;
        let mut finished: Vec<Lane> = Vec::new();
        for queued in batch {
            let outcome = outcomes.next().unwrap_or_else(|| {
                Outcome::Failed(Error::retryable("no_outcome", "the sink gave no outcome for this event"))
            });
            // Released, it would come again at once and at no cost, for ever.
            let outcome = match outcome {
                Outcome::Skipped if !failed => Outcome::Failed(Error::retryable(
                    "skipped",
                    "the sink skipped this event, though none before it had failed",
                )),
                other => other,
            };
            failed |= !matches!(outcome, Outcome::Delivered);
            match &outcome {
                Outcome::Failed(error) if error.class() == Class::Unavailable => away = Some(error.clone()),
                Outcome::Skipped => {}
                _ => {
                    if self.circuit.answered() {
                        tracing::info!(pipeline = self.name, "the sink is back");
                        self.stats.circuit_open.store(false, Ordering::Relaxed);
                    }
                }
            }
            let event = &queued.delivery.event;
            let verdict = judge::verdict(&queued.delivery, outcome, &self.policy);
            self.log_verdict(event, queued.delivery.attempt, &verdict);
            let lane = self.lanes.lane(&event.aggregate_id);
            let holds = judge::holds_lane(&verdict, &self.policy);
            self.shrink(1, queued.size);
            self.push_outcome(queued.delivery.position, lane, verdict);
            if holds {
                self.clear_lane(lane);
            }
            finished.extend(lane);
        }
        for lane in finished {
            if !self.ending.contains_key(&lane) {
                self.lanes.finish(lane);
            }
        }
        if let Some(error) = away {
            self.open_circuit(&error);
        }
    }

    fn log_verdict(&self, event: &Event, attempt: u32, verdict: &Verdict) {
        match verdict {
            Verdict::Retry { after, error } => {
                log_failure(
                    &self.name,
                    event,
                    error,
                    &format!("attempt {attempt} failed; next in {after:.1?}"),
                );
            }
            Verdict::Dead { error } => log_failure(&self.name, event, error, "dead"),
            Verdict::Unknown { error } => log_failure(&self.name, event, error, "outcome unknown"),
            Verdict::Delivered | Verdict::Released => {}
        }
    }

    // --- the circuit ------------------------------------------------------------------------------------

    fn open_circuit(&mut self, error: &Error) {
        let Some(wait) = self.circuit.open(error) else { return };
        tracing::warn!(
            pipeline = self.name, code = error.code(), %error,
            "the sink is unavailable; no attempt is spent, trying again in {wait:.1?}"
        );
        add(&self.stats.circuit_opened, 1);
        self.stats.circuit_open.store(true, Ordering::Relaxed);
        self.release_waiting();
    }

    fn on_reopened(&mut self, opened: Result<()>) {
        self.circuit.probe();
        match opened {
            Ok(()) => self.stats.circuit_open.store(false, Ordering::Relaxed),
            Err(error) if error.class() == Class::Permanent => self.stop(Some(error)),
            Err(error) => self.open_circuit(&error),
        }
    }

    // --- settling ---------------------------------------------------------------------------------------

    /// Notes a verdict. `lane` is held back if the verdict says so, and until the source knows it.
    fn push_verdict(&mut self, position: Position, lane: Option<Lane>, verdict: Verdict) {
        let then = match lane {
            Some(lane) if judge::holds_lane(&verdict, &self.policy) => {
                self.held.entry(lane).or_default().unsettled += 1;
                Then::Held(lane)
            }
            _ => Then::Nothing,
        };
        self.unsettled.push((Settlement { position, verdict }, then));
    }

    /// The same for a verdict that ends a delivery. Only here a lane may be kept busy until the source knows:
    /// it is this delivery that made it busy.
    fn push_outcome(&mut self, position: Position, lane: Option<Lane>, verdict: Verdict) {
        let ends = matches!(verdict, Verdict::Dead { .. } | Verdict::Unknown { .. });
        match lane {
            Some(lane) if ends && !judge::holds_lane(&verdict, &self.policy) => {
                *self.ending.entry(lane).or_default() += 1;
                self.unsettled.push((Settlement { position, verdict }, Then::GoOn(lane)));
            }
            lane => self.push_verdict(position, lane, verdict),
        }
    }

    fn start_settle(&mut self) {
        if self.settle.is_some() || self.unsettled.is_empty() {
            return;
        }
        let batch = self.unsettled.drain(..self.unsettled.len().min(SETTLE_BATCH));
        let (settlements, thens): (Vec<_>, Vec<_>) = batch.unzip();
        self.settling = settlements.len();
        self.settle = Some(settle(self.source.clone(), settlements, thens, Duration::ZERO));
    }

    fn on_settled(&mut self, done: SettleDone) {
        let SettleDone { settlements, thens, result } = done;
        let settled = match result {
            Ok(settled) => settled,
            Err(error) => {
                // The same verdicts again, before any later ones: a release must not overtake the retry that
                // it stands behind. The fence makes repeating harmless.
                self.settle_failures += 1;
                let wait = SOURCE_BACKOFF.after(self.settle_failures);
                tracing::warn!(pipeline = self.name, code = error.code(), %error, "cannot settle {} events; trying again in {wait:.1?}", settlements.len());
                if error.class() == Class::Permanent && !self.stopping {
                    tracing::error!(pipeline = self.name, code = error.code(), %error, "the source cannot go on");
                    self.stop(Some(error));
                }
                if self.stopping && self.settle_failures > 5 {
                    tracing::warn!(
                        pipeline = self.name,
                        "stopping without settling: these events will be delivered again"
                    );
                    self.settling = 0;
                    return;
                }
                self.settle = Some(settle(self.source.clone(), settlements, thens, wait));
                return;
            }
        };
        self.settle_failures = 0;
        self.settling = 0;
        if settled.fenced > 0 {
            tracing::warn!(
                pipeline = self.name,
                events = settled.fenced,
                "settles refused: the lease was lost, and somebody else owns these events now"
            );
            add(&self.stats.fenced, settled.fenced);
        }
        for (settlement, then) in settlements.into_iter().zip(thens) {
            let counter = match settlement.verdict {
                Verdict::Delivered => &self.stats.delivered,
                Verdict::Retry { .. } => &self.stats.retried,
                Verdict::Dead { .. } => &self.stats.dead,
                Verdict::Unknown { .. } => &self.stats.unknown,
                Verdict::Released => &self.stats.released,
            };
            add(counter, 1);
            self.follow(then);
        }
    }

    fn follow(&mut self, then: Then) {
        match then {
            Then::Nothing => {}
            Then::Held(lane) => {
                if let Some(hold) = self.held.get_mut(&lane) {
                    hold.unsettled -= 1;
                    hold.fetches = self.fetches;
                }
            }
            Then::GoOn(lane) => {
                let left = self.ending.get(&lane).map_or(0, |count| count - 1);
                if left > 0 {
                    self.ending.insert(lane, left);
                } else {
                    self.ending.remove(&lane);
                    self.lanes.finish(lane);
                }
            }
        }
    }

    // --- bookkeeping ------------------------------------------------------------------------------------

    /// Gives back what waits in a lane whose head was not delivered.
    fn clear_lane(&mut self, lane: Option<Lane>) {
        let Some(lane) = lane else { return };
        let waiting = self.lanes.clear_lane(lane);
        self.release(waiting);
    }

    fn release_waiting(&mut self) {
        let waiting = self.lanes.clear();
        self.release(waiting);
    }

    fn release(&mut self, waiting: Vec<Queued>) {
        for queued in waiting {
            self.shrink(1, queued.size);
            let lane = self.lanes.lane(&queued.delivery.event.aggregate_id);
            self.push_verdict(queued.delivery.position, lane, Verdict::Released);
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

    /// Nothing is held, under way or waiting to be settled.
    fn is_quiet(&self) -> bool {
        self.events == 0
            && self.deliveries.is_empty()
            && self.unsettled.is_empty()
            && self.settle.is_none()
            && (!self.stopping || self.fetch.is_none())
    }

    // --- stopping ---------------------------------------------------------------------------------------

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
                "deliveries still under way at shutdown are given back"
            );
        }
        for position in positions {
            self.push_verdict(position, None, Verdict::Released);
        }
        (self.events, self.bytes) = (0, 0);
        self.publish_size();
    }

    /// Closes both ends. These take `&mut`, since a shared reference across an await would keep the relay from
    /// being spawned.
    async fn close(&mut self) {
        // A claim that hangs holds on to the source.
        (self.fetch, self.settle) = (None, None);
        self.leave().await;
        match tokio::time::timeout(LEAVE_TIMEOUT, self.sink.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(pipeline = self.name, %error, "the sink did not close cleanly");
            }
            Err(_) => tracing::warn!(pipeline = self.name, "the sink did not close in time"),
        }
    }

    async fn leave(&mut self) {
        match tokio::time::timeout(LEAVE_TIMEOUT, self.source.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(pipeline = self.name, %error, "could not leave cleanly: leases will run out by themselves");
            }
            Err(_) => {
                tracing::warn!(
                    pipeline = self.name,
                    "could not leave in time: leases will run out by themselves"
                );
            }
        }
    }
}

impl Hold {
    fn is_known_to(&self, fetch: u64) -> bool {
        self.unsettled == 0 && fetch > self.fetches
    }
}

async fn deliver(sink: Arc<dyn Sink>, call: u64, batch: Vec<Queued>) -> Delivered {
    let (deliveries, rest): (Vec<Delivery>, Vec<_>) =
        batch.into_iter().map(|queued| (queued.delivery, (queued.ownership, queued.size))).unzip();
    // The call is inside as well: a sink written by hand may panic before it returns its future.
    let attempt = AssertUnwindSafe(async { sink.deliver(&deliveries).await });
    let outcomes = match attempt.catch_unwind().await {
        Ok(outcomes) => outcomes,
        Err(panic) => {
            let what = panic_message(&*panic);
            let error = Error::retryable("panic", format!("the sink panicked: {what}"));
            vec![Outcome::Failed(error); deliveries.len()]
        }
    };
    let batch = deliveries
        .into_iter()
        .zip(rest)
        .map(|(delivery, (ownership, size))| Queued { delivery, ownership, size })
        .collect();
    Delivered { call, batch, outcomes }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}

fn settle(
    source: Arc<dyn Source>,
    settlements: Vec<Settlement>,
    thens: Vec<Then>,
    wait: Duration,
) -> BoxFuture<'static, SettleDone> {
    async move {
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        let result = source.settle(&settlements).await;
        SettleDone { settlements, thens, result }
    }
    .boxed()
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
