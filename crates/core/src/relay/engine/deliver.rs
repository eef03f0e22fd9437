//! Delivering: batches from the lanes to the sink, what the sink said of them, and the circuit that opens when
//! it is away as a whole.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, atomic::Ordering},
};

use futures::FutureExt;

use super::{Engine, log_failure};
use crate::{
    Class, Delivery, Error, Outcome, Result, Sink, Verdict,
    event::Event,
    hash::Set,
    relay::{
        Order, judge,
        lanes::{Lane, Queued},
        panic_message,
        stats::add,
    },
};

pub(super) struct Delivered {
    call: u64,
    deliveries: Vec<Delivery>,
    /// Of each of them, and their sizes.
    lanes: Vec<(Option<Lane>, usize)>,
    outcomes: Vec<Outcome>,
}

impl Engine {
    pub(super) fn start_deliveries(&mut self) {
        let probing = self.circuit.is_probing();
        while self.circuit.open_until().is_none()
            && self.deliveries.len() < if probing { 1 } else { self.caps.concurrency.max(1) }
            && self.lanes.has_ready()
        {
            let one = probing || self.policy.order == Order::Total;
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
    pub(super) fn drop_lost(&mut self, taken: Vec<Queued>) -> Vec<Queued> {
        if taken.iter().all(|queued| !queued.ownership.is_lost()) {
            return taken;
        }
        let mut lost_lanes: Set<Lane> = Set::default();
        let mut kept_lanes: Set<Lane> = Set::default();
        let mut kept = Vec::with_capacity(taken.len());
        for queued in taken {
            let lane = queued.lane;
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

    pub(super) fn on_delivered(&mut self, delivered: Delivered) {
        let Delivered { call, deliveries, lanes, outcomes } = delivered;
        if self.delivering.remove(&call).is_none() {
            return;
        }
        // A sink that finds nobody there leaves out what it has not sent, wherever that stands in the batch.
        let failed =
            outcomes.iter().any(|outcome| matches!(outcome, Outcome::Failed(_) | Outcome::Unknown(_)));
        let mut outcomes = outcomes.into_iter();
        let mut away: Option<Error> = None;
        let mut finished: Vec<Lane> = Vec::new();
        for (delivery, (lane, size)) in deliveries.into_iter().zip(lanes) {
            let outcome = outcomes.next().unwrap_or_else(|| {
                Outcome::Failed(Error::retryable("no_outcome", "the sink gave no outcome for this event"))
            });
            // Released, it would come again at once and at no cost, for ever.
            let outcome = match outcome {
                Outcome::Skipped if !failed => Outcome::Failed(Error::retryable(
                    "skipped",
                    "the sink skipped this event, though none had failed",
                )),
                other => other,
            };
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
            if matches!(outcome, Outcome::Duplicate) {
                add(&self.stats.duplicates, 1);
            }
            let verdict = judge::verdict(&delivery, outcome, &self.policy);
            self.log_verdict(&delivery.event, delivery.attempt, &verdict);
            let holds = judge::holds_lane(&verdict, &self.policy);
            self.shrink(1, size);
            self.push_outcome(delivery.position, lane, verdict);
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

    pub(super) fn log_verdict(&self, event: &Event, attempt: u32, verdict: &Verdict) {
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
            Verdict::Delivered | Verdict::SettledInTransaction | Verdict::Released => {}
        }
    }

    pub(super) fn open_circuit(&mut self, error: &Error) {
        let Some(wait) = self.circuit.open(error) else { return };
        tracing::warn!(
            pipeline = self.name, code = error.code(), %error,
            "the sink is unavailable; no attempt is spent, trying again in {wait:.1?}"
        );
        add(&self.stats.circuit_opened, 1);
        self.stats.circuit_open.store(true, Ordering::Relaxed);
        self.release_waiting();
    }

    pub(super) fn on_reopened(&mut self, opened: Result<()>) {
        self.circuit.probe();
        match opened {
            Ok(()) => self.stats.circuit_open.store(false, Ordering::Relaxed),
            Err(error) if error.class() == Class::Permanent => self.stop(Some(error)),
            Err(error) => self.open_circuit(&error),
        }
    }
}

async fn deliver(sink: Arc<dyn Sink>, call: u64, batch: Vec<Queued>) -> Delivered {
    let (deliveries, lanes): (Vec<Delivery>, Vec<_>) =
        batch.into_iter().map(|queued| (queued.delivery, (queued.lane, queued.size))).unzip();
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
    Delivered { call, deliveries, lanes, outcomes }
}
