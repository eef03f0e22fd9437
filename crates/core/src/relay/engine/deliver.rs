//! Delivering: batches from the key queues to the sink, the outcomes that the sink reports, the circuit that opens when
//! the whole sink is unavailable, and the events that wait while one destination is unavailable.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::FutureExt;

use super::{Engine, log_failure};
use crate::{
    Class, Code, Delivery, Error, Order, Outcome, Result, Sink, Verdict,
    event::Event,
    hash::Set,
    relay::{
        destinations::Gate,
        judge,
        key_queues::{KeyHash, Queued},
        panic_message,
        stats::add,
    },
};

pub(super) struct Delivered {
    call: u64,
    deliveries: Vec<Delivery>,
    /// The key hash and the size of each delivery.
    hashes_and_sizes: Vec<(Option<KeyHash>, usize)>,
    outcomes: Vec<Outcome>,
}

impl Engine {
    pub(super) fn start_deliveries(&mut self) {
        let probing = self.circuit.is_probing();
        while self.circuit.open_until().is_none()
            && self.deliveries.len() < if probing { 1 } else { self.caps.concurrency.max(1) }
            && self.key_queues.has_ready()
        {
            let one = probing || self.rules.order == Order::Total;
            let max_events = if one { 1 } else { self.caps.max_batch_events.max(1) };
            let taken =
                self.key_queues.take(max_events, self.caps.max_batch_bytes, self.caps.prefix_per_key && !one);
            let batch = self.keep_sendable(taken);
            if batch.is_empty() {
                continue;
            }
            let call = self.next_call;
            self.next_call += 1;
            self.delivering.insert(call, batch.iter().map(|queued| queued.delivery.position).collect());
            self.deliveries.spawn(deliver(self.sink.clone(), call, batch));
        }
    }

    /// Removes events whose lease ran out before they were sent, events whose destination is unavailable, and the later
    /// events of their keys. Another relay delivers the events without a lease: the source gets the verdict *released*, so
    /// that it can give back those that no relay has taken yet.
    fn keep_sendable(&mut self, taken: Vec<Queued>) -> Vec<Queued> {
        if self.destinations.count() == 0 && taken.iter().all(|queued| !queued.ownership.is_lost()) {
            return taken;
        }
        let mut stopped: Set<KeyHash> = Set::default();
        let mut kept_keys: Set<KeyHash> = Set::default();
        let mut kept = Vec::with_capacity(taken.len());
        for queued in taken {
            let key_hash = queued.key_hash;
            let is_behind = key_hash.is_some_and(|key_hash| stopped.contains(&key_hash));
            let verdict = if is_behind || queued.ownership.is_lost() {
                Some(Verdict::Released)
            } else {
                self.waits(&queued.delivery.event)
            };
            let Some(verdict) = verdict else {
                kept_keys.extend(key_hash);
                kept.push(queued);
                continue;
            };
            stopped.extend(key_hash);
            self.shrink(1, queued.size);
            self.push_verdict(queued.delivery.position, key_hash, verdict);
            self.clear_key(key_hash);
        }
        for key_hash in stopped.difference(&kept_keys) {
            self.key_queues.finish(*key_hash);
        }
        kept
    }

    /// The verdict on an event that is not sent because its destination is unavailable.
    fn waits(&mut self, event: &Event) -> Option<Verdict> {
        match self.destinations.gate(&self.destinations_of(event)) {
            Gate::Open => None,
            Gate::Wait { after, error } => Some(judge::waits(after, &error)),
        }
    }

    fn destinations_of(&self, event: &Event) -> Vec<String> {
        if self.destinations.count() == 0 { Vec::new() } else { self.sink.destinations(event) }
    }

    pub(super) fn on_delivered(&mut self, delivered: Delivered) {
        let Delivered { call, deliveries, hashes_and_sizes, outcomes } = delivered;
        if self.delivering.remove(&call).is_none() {
            return;
        }
        // A sink that is unavailable skips the events that it has not sent, wherever they are in the batch.
        let failed =
            outcomes.iter().any(|outcome| matches!(outcome, Outcome::Failed(_) | Outcome::Unknown(_)));
        let mut outcomes = outcomes.into_iter();
        let mut away: Option<Error> = None;
        let mut finished: Vec<KeyHash> = Vec::new();
        for (delivery, (key_hash, size)) in deliveries.into_iter().zip(hashes_and_sizes) {
            let outcome = outcomes.next().unwrap_or_else(|| {
                Outcome::Failed(Error::retryable(Code::NO_OUTCOME, "the sink gave no outcome for this event"))
            });
            // If the event were released, it would be fetched again immediately, without an attempt and without end.
            let outcome = match outcome {
                Outcome::Skipped if !failed => Outcome::Failed(Error::retryable(
                    Code::SKIPPED,
                    "the sink skipped this event, although no event had failed",
                )),
                other => other,
            };
            let waits = self.learn(&delivery.event, &outcome);
            match &outcome {
                Outcome::Failed(error) if error.class() == Class::Unavailable && waits.is_none() => {
                    away = Some(error.clone());
                }
                Outcome::Skipped => {}
                _ => {
                    if self.circuit.answered() {
                        tracing::info!(pipeline = self.name, "the sink is available again");
                        self.stats.circuit_open.store(false, Ordering::Relaxed);
                    }
                }
            }
            if matches!(outcome, Outcome::Duplicate) {
                add(&self.stats.duplicates, 1);
            }
            let verdict = judge::verdict(&delivery, outcome, waits, &self.policy);
            self.log_verdict(&delivery.event, delivery.attempt, &verdict);
            let holds = judge::holds_key(&verdict, self.rules);
            self.shrink(1, size);
            self.push_outcome(delivery.position, key_hash, verdict);
            if holds {
                self.clear_key(key_hash);
            }
            finished.extend(key_hash);
        }
        for key_hash in finished {
            if !self.ending.contains_key(&key_hash) {
                self.key_queues.finish(key_hash);
            }
        }
        if let Some(error) = away {
            self.open_circuit(&error);
        }
    }

    /// Records what an outcome says about the event's destinations. Returns how long the event is to wait, if one of them
    /// is unavailable.
    fn learn(&mut self, event: &Event, outcome: &Outcome) -> Option<Duration> {
        let refused = match outcome {
            Outcome::Failed(error) => error.destination().map(|name| (name, error)),
            _ => None,
        };
        if self.destinations.count() == 0 && refused.is_none() {
            return None;
        }
        let names = self.sink.destinations(event);
        let refused = refused.and_then(|(name, error)| {
            let at = names.iter().position(|known| known == name)?;
            Some((at, error))
        });
        let is_untried = match outcome {
            Outcome::Failed(error) => error.class() == Class::Unavailable,
            Outcome::Skipped => true,
            Outcome::Delivered | Outcome::Duplicate | Outcome::Committed | Outcome::Unknown(_) => false,
        };
        let (answered, untried) = match refused {
            // An error about a routing key without a queue shows that the exchange exists.
            Some((at, _)) => (&names[..at], &names[at + 1..]),
            None if is_untried => (&names[..0], &names[..]),
            None => (&names[..], &names[..0]),
        };
        for name in self.destinations.answered(answered) {
            tracing::info!(pipeline = self.name, destination = name, "the destination is available again");
        }
        self.destinations.untried(untried);
        let after = refused.map(|(at, error)| {
            let refused = self.destinations.refused(&names[at], error);
            if let Some(wait) = refused.news {
                tracing::warn!(
                    pipeline = self.name, destination = names[at], code = error.code(), %error,
                    "a destination is unavailable: its events wait and cost no attempt, all other events continue; trying again in {wait:.1?}"
                );
            }
            refused.after
        });
        self.stats.destinations_away.store(self.destinations.count() as u64, Ordering::Relaxed);
        after
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
            Verdict::Delivered | Verdict::SettledInTransaction | Verdict::Released | Verdict::Away { .. } => {
            }
        }
    }

    pub(super) fn open_circuit(&mut self, error: &Error) {
        if self.drain && error.is_lasting() {
            tracing::error!(pipeline = self.name, code = error.code(), %error, "the sink is unavailable, and the cause is lasting; the drain stops");
            self.stop(Some(error.clone()));
            return;
        }
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
    let (deliveries, hashes_and_sizes): (Vec<Delivery>, Vec<_>) =
        batch.into_iter().map(|queued| (queued.delivery, (queued.key_hash, queued.size))).unzip();
    // The call itself is inside, too: a sink that does not use `async_trait` may panic before it returns its future.
    let attempt = AssertUnwindSafe(async { sink.deliver(&deliveries).await });
    let outcomes = match attempt.catch_unwind().await {
        Ok(outcomes) => outcomes,
        Err(panic) => {
            let what = panic_message(&*panic);
            let error = Error::retryable(Code::PANIC, format!("the sink panicked: {what}"));
            vec![Outcome::Failed(error); deliveries.len()]
        }
    };
    Delivered { call, deliveries, hashes_and_sizes, outcomes }
}
