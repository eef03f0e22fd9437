//! Fetching: when to ask the source, for how much, and what to do with the events that it returns.

use std::time::Duration;

use futures::FutureExt;
use tokio::time::Instant;

use super::{Engine, SOURCE_BACKOFF, log_failure};
use crate::{
    Backlog, Batch, Class, Code, Error, Limits, Result, Verdict,
    relay::{judge, key_queues::Queued, stats::add},
};

/// After how long a drain first logs what it waits for, and how long until it logs this again.
const FIRST_REPORT: Duration = Duration::from_secs(3);
const NEXT_REPORT: Duration = Duration::from_secs(60);

pub(super) enum Fetched {
    /// The number of the fetch, how many events it could have returned, and how long it took.
    Batch(u64, usize, Duration, Result<Batch>),
    Backlog(Result<crate::Backlog>),
    Waited,
}

impl Engine {
    pub(super) fn start_fetch(&mut self) {
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
        let (fetch, room) = (self.fetches, limits.events);
        let next = async move {
            let began = Instant::now();
            let batch = source.next(limits).await;
            Fetched::Batch(fetch, room, began.elapsed(), batch)
        };
        self.fetch = Some(next.boxed());
    }

    /// How much may be fetched; none while there is too little room for a round trip to be worthwhile.
    pub(super) fn room(&self) -> Option<Limits> {
        if self.circuit.is_probing() {
            let limits = Limits { events: 1, bytes: self.policy.in_flight_bytes };
            return (self.events == 0).then_some(limits);
        }
        // Events that are delivered but not settled are still claimed, so they count. Otherwise, while settles fail, the
        // relay would claim every row of the source.
        let held = self.events + self.unsettled.len() + self.settling;
        let events = self.policy.in_flight_events.saturating_sub(held).min(self.policy.batch_events);
        let bytes = self.policy.in_flight_bytes.saturating_sub(self.bytes);
        let worth_it = events * 2 >= self.policy.batch_events && bytes * 4 >= self.policy.in_flight_bytes;
        (held == 0 || worth_it).then_some(Limits { events: events.max(1), bytes: bytes.max(1) })
    }

    pub(super) fn on_fetched(&mut self, fetched: Fetched) {
        self.waiting = false;
        match fetched {
            Fetched::Waited => {}
            Fetched::Backlog(Ok(backlog)) => {
                if backlog.unfinished <= backlog.blocked && self.is_quiet() {
                    self.stop(None);
                } else if let Some(error) = self.hopeless(backlog) {
                    self.stop(Some(error));
                } else {
                    self.say_what_is_left(&backlog);
                    self.idle = true;
                }
            }
            Fetched::Batch(fetch, room, took, Ok(batch)) => {
                self.fetch_failures = 0;
                let events = batch.deliveries.len();
                self.destinations.fetched(events, events >= room, took);
                self.accept(fetch, batch);
            }
            Fetched::Batch(.., Err(error)) | Fetched::Backlog(Err(error)) => self.on_source_error(error),
        }
    }

    /// Why a drain ends although events are left: all that are not blocked wait for a destination that refuses them.
    fn hopeless(&self, backlog: crate::Backlog) -> Option<Error> {
        let retries = self.retries_until.is_some_and(|until| until > Instant::now());
        let what = self.destinations.hopeless().filter(|_| !retries && self.is_quiet())?;
        let left = backlog.unfinished.saturating_sub(backlog.blocked);
        Some(Error::unavailable(
            Code::DESTINATION_AWAY,
            format!(
                "{left} event(s) are left in the outbox, and wait for {what}; this has cost none of them an attempt"
            ),
        )
        .with_remedy("remove the cause that the message names, and run again"))
    }

    /// A drain that has nothing to do but is not finished logs why: after three seconds, and then every minute.
    fn say_what_is_left(&mut self, backlog: &Backlog) {
        let now = Instant::now();
        let due = *self.say_at.get_or_insert(now + FIRST_REPORT);
        if now < due {
            return;
        }
        self.say_at = Some(now + NEXT_REPORT);
        tracing::info!(pipeline = self.name, "the drain {}", what_is_left(backlog));
    }

    pub(super) fn on_source_error(&mut self, error: Error) {
        if error.class() == Class::Permanent {
            tracing::error!(pipeline = self.name, code = error.code(), %error, "the source cannot continue; the relay stops");
            self.stop(Some(error));
            return;
        }
        self.fetch_failures += 1;
        // A source with background work may fail between two fetches; only the source knows how often it has failed.
        let wait = SOURCE_BACKOFF.after(self.fetch_failures).max(error.retry_after().unwrap_or_default());
        tracing::warn!(pipeline = self.name, code = error.code(), %error, "cannot read the outbox; trying again in {wait:.1?}");
        if !self.stopping {
            self.fetch = Some(tokio::time::sleep(wait).map(|()| Fetched::Waited).boxed());
            self.waiting = true;
        }
    }

    pub(super) fn accept(&mut self, fetch: u64, batch: Batch) {
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
                "this row cannot be read as an event; it is dead"
            );
            let key_hash = reject.key.as_deref().and_then(|key| self.key_queues.hash_of(key));
            self.push_verdict(reject.position, key_hash, Verdict::Dead { error: reject.error });
        }
        let unwanted = self.stopping || self.circuit.open_until().is_some();
        for delivery in batch.deliveries {
            let key_hash = self.key_queues.hash_of(&delivery.event.aggregate_id);
            if unwanted || key_hash.is_some_and(|key_hash| self.held.contains_key(&key_hash)) {
                self.push_verdict(delivery.position, key_hash, Verdict::Released);
            } else if let Some(error) = judge::crashed_too_often(&delivery, &self.policy) {
                log_failure(&self.name, &delivery.event, &error, "the event is dead: it may crash relays");
                self.push_verdict(delivery.position, key_hash, Verdict::Dead { error });
            } else {
                let size = delivery.event.size();
                self.grow(1, size);
                self.key_queues.push(Queued { delivery, key_hash, ownership: batch.ownership.clone(), size });
            }
        }
    }
}

fn what_is_left(backlog: &Backlog) -> String {
    let events = |count: u64| if count == 1 { "1 event".to_owned() } else { format!("{count} events") };
    let left = backlog.unfinished - backlog.blocked.min(backlog.unfinished);
    let not_due = backlog.not_due.min(left);
    let mut parts = Vec::new();
    if not_due > 0 {
        let next = match backlog.next_due {
            Some(wait) => format!(", the next in {}", spoken(wait)),
            None => String::new(),
        };
        let verb = if not_due == 1 { "is" } else { "are" };
        parts.push(format!("{} that {verb} not due{next}", events(not_due)));
    }
    if left > not_due {
        parts.push(format!(
            "{} behind those, held by another relay, or held by a vanished relay until its lease expires",
            events(left - not_due)
        ));
    }
    if backlog.blocked > 0 {
        parts.push(format!("it does not wait for {} behind a dead event", events(backlog.blocked)));
    }
    format!("waits for {}", parts.join("; "))
}

/// `8h 59m`, `4m 10s`, `3s`.
fn spoken(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m {}s", seconds / 60, seconds % 60),
        _ => format!("{}h {}m", seconds / 3_600, seconds % 3_600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_says_what_it_waits_for() {
        let hours = Some(Duration::from_secs(9 * 3_600 - 5));
        let backlog = Backlog { unfinished: 1, blocked: 0, not_due: 1, next_due: hours };
        assert_eq!(what_is_left(&backlog), "waits for 1 event that is not due, the next in 8h 59m");
        let backlog = Backlog { unfinished: 7, blocked: 2, not_due: 3, next_due: None };
        assert_eq!(
            what_is_left(&backlog),
            "waits for 3 events that are not due; 2 events behind those, held by another relay, or held by a vanished \
             relay until its lease expires; it does not wait for 2 events behind a dead event"
        );
    }
}
