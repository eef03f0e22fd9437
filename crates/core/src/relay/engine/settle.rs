//! Settling: verdicts that are sent to the source, and what follows for their keys when the source has stored them.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use tokio::time::Instant;

use super::{Engine, SOURCE_BACKOFF};
use crate::{
    Class, Position, Result, Settlement, Source, Verdict,
    relay::{judge, key_queues::KeyHash, stats::add},
    source::Settled,
};

/// The most verdicts in one settle. This limits the size of the statement, not the throughput.
const SETTLE_BATCH: usize = 4_000;

pub(super) struct SettleDone {
    settlements: Vec<Settlement>,
    thens: Vec<Then>,
    result: Result<Settled>,
}

/// What follows for a key when a verdict is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    Nothing,
    /// The source holds the key from now on.
    Held(KeyHash),
    /// The key continues.
    Continue(KeyHash),
}

/// A key whose first event was not delivered. A fetch that began before the source knew this may return later events of
/// that key; they are given back. A fetch that begins afterwards does not return them. No fetch begins while such
/// verdicts are unsettled; otherwise the same events could be fetched and given back without end.
#[derive(Default)]
pub(super) struct Hold {
    /// Verdicts that the source has not stored yet.
    pub(super) unsettled: usize,
    /// The newest fetch that began before the source knew.
    fetches: u64,
}

impl Engine {
    /// Queues a verdict for the source. If the verdict says so, the key is held back until the source has stored it.
    pub(super) fn push_verdict(&mut self, position: Position, key_hash: Option<KeyHash>, verdict: Verdict) {
        if let Verdict::Retry { after, .. } = &verdict {
            self.retries_until = self.retries_until.max(Instant::now().checked_add(*after));
        }
        let then = match key_hash {
            Some(key_hash) if judge::holds_key(&verdict, self.rules) => {
                self.held.entry(key_hash).or_default().unsettled += 1;
                Then::Held(key_hash)
            }
            _ => Then::Nothing,
        };
        self.unsettled.push((Settlement { position, verdict }, then));
    }

    /// The same for a verdict that ends a delivery. Only here a key may be kept busy until the source has stored the
    /// verdict, because this delivery made the key busy.
    pub(super) fn push_outcome(&mut self, position: Position, key_hash: Option<KeyHash>, verdict: Verdict) {
        let ends = matches!(verdict, Verdict::Dead { .. } | Verdict::Unknown { .. });
        match key_hash {
            Some(key_hash) if ends && !judge::holds_key(&verdict, self.rules) => {
                *self.ending.entry(key_hash).or_default() += 1;
                self.unsettled.push((Settlement { position, verdict }, Then::Continue(key_hash)));
            }
            key_hash => self.push_verdict(position, key_hash, verdict),
        }
    }

    pub(super) fn start_settle(&mut self) {
        if self.settle.is_some() || self.unsettled.is_empty() {
            return;
        }
        let batch = self.unsettled.drain(..self.unsettled.len().min(SETTLE_BATCH));
        let (settlements, thens): (Vec<_>, Vec<_>) = batch.unzip();
        self.settling = settlements.len();
        self.settle = Some(settle(self.source.clone(), settlements, thens, Duration::ZERO));
    }

    pub(super) fn on_settled(&mut self, done: SettleDone) {
        let SettleDone { settlements, thens, result } = done;
        let settled = match result {
            Ok(settled) => settled,
            Err(error) => {
                // The same verdicts again, before any later ones: a release must not be stored before the retry of an
                // earlier event of its key. Fencing makes the repetition harmless.
                self.settle_failures += 1;
                let wait = SOURCE_BACKOFF.after(self.settle_failures);
                tracing::warn!(pipeline = self.name, code = error.code(), %error, "cannot settle {} events; trying again in {wait:.1?}", settlements.len());
                let is_permanent = error.class() == Class::Permanent;
                if is_permanent && !self.stopping {
                    tracing::error!(pipeline = self.name, code = error.code(), %error, "the source cannot continue; the relay stops");
                    self.stop(Some(error));
                }
                if self.stopping && (self.settle_failures > 5 || is_permanent) {
                    tracing::warn!(
                        pipeline = self.name,
                        "the relay stops without settling; the events will be delivered again"
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
                "settles were refused: this relay no longer owns these events, and they are delivered again"
            );
            add(&self.stats.fenced, settled.fenced);
        }
        for (settlement, then) in settlements.into_iter().zip(thens) {
            let counter = match settlement.verdict {
                Verdict::Delivered | Verdict::SettledInTransaction => &self.stats.delivered,
                Verdict::Retry { .. } => &self.stats.retried,
                Verdict::Dead { .. } => &self.stats.dead,
                Verdict::Unknown { .. } => &self.stats.unknown,
                Verdict::Released => &self.stats.released,
                Verdict::Away { .. } => &self.stats.waiting,
            };
            add(counter, 1);
            self.follow(then);
        }
    }

    pub(super) fn follow(&mut self, then: Then) {
        match then {
            Then::Nothing => {}
            Then::Held(key_hash) => {
                if let Some(hold) = self.held.get_mut(&key_hash) {
                    hold.unsettled -= 1;
                    hold.fetches = self.fetches;
                }
            }
            Then::Continue(key_hash) => {
                let left = self.ending.get(&key_hash).map_or(0, |count| count - 1);
                if left > 0 {
                    self.ending.insert(key_hash, left);
                } else {
                    self.ending.remove(&key_hash);
                    self.key_queues.finish(key_hash);
                }
            }
        }
    }
}

impl Hold {
    pub(super) fn is_known_to(&self, fetch: u64) -> bool {
        self.unsettled == 0 && fetch > self.fetches
    }
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
