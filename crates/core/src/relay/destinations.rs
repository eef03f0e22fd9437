//! Destinations that are unavailable while the sink works: a missing topic, an exchange without a binding.
//!
//! Their events go back to the source and wait there. Memory holds only the destination. After a wait that grows with
//! each failure, one event probes the destination. All other events that are due meanwhile are put back unsent, each
//! with its own due time. However many events wait, the relay looks at a limited number per second, and at fewer if the
//! source is slow, so that there is always capacity for the events of other destinations.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::{Backoff, Error};

/// The shortest time between the due times of two events of one destination: 500 per second are looked at.
const SPACING: Duration = Duration::from_millis(2);
/// The longest such time, for a slow source.
const WIDEST: Duration = Duration::from_secs(1);
/// How many other events could be fetched between two due times. A settle takes about as long as a fetch, so the events
/// that wait use a quarter of the source's capacity.
const SHARE: u32 = 8;
/// A fetch with at least this many events shows how long the fetch of one event takes.
const TELLING: usize = 20;
/// The longest that an event waits, however many wait with it. It is delivered at most this long after its destination
/// is available again.
const LONGEST: Duration = Duration::from_secs(600);
/// How many destinations are remembered. For any others, each event has to find out that its destination is unavailable.
const REMEMBERED: usize = 1_000;
/// How many of them are logged one by one; after that, one is logged each time that the number doubles.
const LOGGED: usize = 10;
/// How often a destination must have refused before a drain no longer waits for it.
const DRAIN_TRIES: u32 = 3;

#[derive(Debug)]
struct Away {
    error: Error,
    /// Refusals in a row.
    failures: u32,
    /// Nothing is sent to it until then.
    until: Instant,
    /// One event is being delivered to it.
    probing: bool,
    /// When the next event that is put back is due.
    next_due: Instant,
}

impl Away {
    fn take_due_time(&mut self, not_before: Instant, spacing: Duration) -> Duration {
        let due = self.next_due.max(not_before);
        self.next_due = due + spacing;
        due.saturating_duration_since(Instant::now()).min(LONGEST)
    }
}

/// What to do with an event that is about to be sent.
pub(super) enum Gate {
    /// Send it.
    Open,
    /// Its destination is unavailable: put it back.
    Wait { after: Duration, error: Error },
}

/// A destination that refused.
pub(super) struct Refused {
    /// How long the event is to wait.
    pub(super) after: Duration,
    /// How long nothing is sent to the destination, if that is to be logged.
    pub(super) news: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Destinations {
    away: HashMap<String, Away>,
    backoff: Backoff,
    /// How long the fetch of one event takes: a moving average.
    cost: Duration,
    spacing: Duration,
}

impl Destinations {
    pub(super) fn new(backoff: Backoff) -> Self {
        Self { away: HashMap::new(), backoff, cost: Duration::ZERO, spacing: SPACING }
    }

    /// Records how long a fetch took, and how many events it returned. Only a full or large fetch shows how long the fetch
    /// of one event takes.
    pub(super) fn fetched(&mut self, events: usize, is_full: bool, took: Duration) {
        if is_full || events >= TELLING {
            let each = took / u32::try_from(events.max(1)).unwrap_or(u32::MAX);
            self.cost = (self.cost * 3 + each) / 4;
            self.spacing = (self.cost * SHARE).clamp(SPACING, WIDEST);
        }
    }

    pub(super) fn count(&self) -> usize {
        self.away.len()
    }

    /// Whether an event for these destinations may be sent now. The first event after the wait of its destinations is
    /// the probe.
    pub(super) fn gate(&mut self, names: &[String]) -> Gate {
        let now = Instant::now();
        let waits = |away: &Away| away.probing || away.until > now;
        let closed = names.iter().find(|name| self.away.get(*name).is_some_and(waits));
        if let Some(away) = closed.and_then(|name| self.away.get_mut(name)) {
            let not_before = if away.probing { now + self.backoff.base } else { away.until };
            return Gate::Wait {
                after: away.take_due_time(not_before, self.spacing),
                error: away.error.clone(),
            };
        }
        for name in names {
            if let Some(away) = self.away.get_mut(name) {
                away.probing = true;
            }
        }
        Gate::Open
    }

    /// A destination has refused an event.
    pub(super) fn refused(&mut self, name: &str, error: &Error) -> Refused {
        let now = Instant::now();
        if !self.away.contains_key(name) && self.away.len() >= REMEMBERED {
            // A destination without events is never probed, so it would never be found to be available again.
            self.away.retain(|_, away| away.probing || away.until + LONGEST > now);
            if self.away.len() >= REMEMBERED {
                return Refused { after: self.backoff.after(u32::MAX), news: None };
            }
        }
        let (known, before) = (self.away.contains_key(name), self.away.len());
        let away = self.away.entry(name.to_owned()).or_insert_with(|| Away {
            error: error.clone(),
            failures: 0,
            until: now,
            probing: true,
            next_due: now,
        });
        // Other events that were sent at the same time give no new information.
        if std::mem::take(&mut away.probing) {
            away.failures = away.failures.saturating_add(1);
            away.until = now + self.backoff.after(away.failures).max(error.retry_after().unwrap_or_default());
            away.error = error.clone();
        }
        let until = away.until;
        let is_logged = !known && (before < LOGGED || (before + 1).is_power_of_two());
        Refused {
            after: away.take_due_time(until, self.spacing),
            news: is_logged.then(|| until.saturating_duration_since(now)),
        }
    }

    /// Records that an event for these destinations got an answer of any kind. Returns the destinations that are
    /// available again because of this.
    pub(super) fn answered(&mut self, names: &[String]) -> Vec<String> {
        let is_probe = |name: &&String| self.away.get(*name).is_some_and(|away| away.probing);
        let back: Vec<String> = names.iter().filter(is_probe).cloned().collect();
        for name in &back {
            self.away.remove(name);
        }
        back
    }

    /// Records that an event for these destinations was not tried after all: the next one is the probe.
    pub(super) fn untried(&mut self, names: &[String]) {
        for name in names {
            if let Some(away) = self.away.get_mut(name) {
                away.probing = false;
            }
        }
    }

    /// The destinations that a drain would wait for without end: each of them has refused several times. None while one of
    /// them has not refused often enough, or if all destinations are available.
    pub(super) fn hopeless(&self) -> Option<String> {
        let mut all: Vec<&Error> = self.away.values().map(|away| &away.error).collect();
        all.sort_by_key(|error| error.destination().unwrap_or_default().to_owned());
        let is_tried = self.away.values().all(|away| away.failures >= DRAIN_TRIES);
        let first = all.first().filter(|_| is_tried)?;
        let others = match all.len() - 1 {
            0 => String::new(),
            others => format!("; and for {others} more"),
        };
        Some(format!("{}: {first}{others}", first.destination().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code;

    fn destinations() -> Destinations {
        let base = Duration::from_secs(1);
        Destinations::new(Backoff { base, multiplier: 2.0, cap: Duration::from_secs(5), jitter: 0.0 })
    }

    fn error() -> Error {
        Error::unavailable(Code::NO_TOPIC, "missing").at("t")
    }

    fn names() -> Vec<String> {
        vec!["t".into()]
    }

    fn waits(gate: Gate) -> Option<Duration> {
        match gate {
            Gate::Open => None,
            Gate::Wait { after, .. } => Some(after),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_probe_at_a_time_after_a_wait_that_grows() {
        let mut all = destinations();
        let first = all.refused("t", &error());
        assert_eq!((first.after, first.news), (Duration::from_secs(1), Some(Duration::from_secs(1))));
        // A second one that was on its way already changes nothing but its own place.
        let second = all.refused("t", &error());
        assert_eq!((second.after, second.news), (Duration::from_secs(1) + SPACING, None));
        assert_eq!(waits(all.gate(&names())), Some(Duration::from_secs(1) + 2 * SPACING));
        assert_eq!(waits(all.gate(&["u".to_owned()])), None);

        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(waits(all.gate(&names())), None, "the probe");
        assert!(waits(all.gate(&names())).is_some(), "and nobody beside it");
        assert!(all.refused("t", &error()).after >= Duration::from_secs(2));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(waits(all.gate(&names())), None);
        all.untried(&names());
        assert_eq!(waits(all.gate(&names())), None, "one that was not tried says nothing");
        assert_eq!(all.answered(&names()), names());
        assert_eq!((all.count(), waits(all.gate(&names()))), (0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn however_many_wait_so_many_a_second_come_and_no_more() {
        let mut all = destinations();
        all.refused("t", &error());
        let places: Vec<Duration> = (0..10_000).filter_map(|_| waits(all.gate(&names()))).collect();
        assert_eq!(places.len(), 10_000);
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] == SPACING));
        let last = (0..1_000_000).filter_map(|_| waits(all.gate(&names()))).last();
        assert_eq!(last, Some(LONGEST), "and none waits for ever");
    }

    #[tokio::test(start_paused = true)]
    async fn they_come_less_often_where_the_source_is_slow() {
        let mut all = destinations();
        all.refused("t", &error());
        let apart = |all: &mut Destinations| {
            let places: Vec<Duration> = (0..2).filter_map(|_| waits(all.gate(&names()))).collect();
            places[1] - places[0]
        };
        assert_eq!(apart(&mut all), SPACING);
        (0..50).for_each(|_| all.fetched(1_000, true, Duration::from_millis(50)));
        assert_eq!(apart(&mut all), SPACING, "20,000 a second");
        (0..50).for_each(|_| all.fetched(100, true, Duration::from_millis(200)));
        assert!(apart(&mut all) > Duration::from_millis(15), "500 a second");
        (0..50).for_each(|_| all.fetched(1, true, Duration::from_secs(1)));
        assert_eq!(apart(&mut all), WIDEST);
        (0..50).for_each(|_| all.fetched(1_000, true, Duration::from_millis(50)));
        all.fetched(2, false, Duration::from_secs(1));
        assert_eq!(apart(&mut all), SPACING, "few events say nothing of what the source can do");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_was_on_its_way_before_does_not_bring_it_back() {
        let mut all = destinations();
        all.refused("t", &error());
        assert!(all.answered(&names()).is_empty());
        assert_eq!(all.count(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded() {
        let mut all = destinations();
        let news = (0..2 * REMEMBERED).filter(|n| all.refused(&n.to_string(), &error()).news.is_some());
        assert!(news.count() < 20, "nor does each of them make a line in the log");
        assert_eq!(all.count(), REMEMBERED);
        tokio::time::advance(2 * LONGEST).await;
        all.refused("new", &error());
        assert_eq!(all.count(), 1, "those that nobody asks for any more make room");
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_gives_up_on_what_has_refused_several_times() {
        let mut all = destinations();
        assert_eq!(all.hopeless(), None);
        for _ in 0..DRAIN_TRIES {
            assert_eq!(all.hopeless(), None);
            all.refused("t", &error());
            tokio::time::advance(Duration::from_secs(10)).await;
            all.gate(&names());
        }
        assert_eq!(all.hopeless().as_deref(), Some("t: missing"));
    }
}
