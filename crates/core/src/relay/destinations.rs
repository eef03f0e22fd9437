//! Destinations that are away while the sink is not: a missing topic, an exchange without a binding.
//!
//! Their events go back to the source, to wait there: nothing is kept in memory for them but the destination itself. A
//! probe is one event, after a wait that grows. All others that come due meanwhile are put back unsent, each to a place of
//! its own in time: however many wait, so many a second come to be looked at and no more, and fewer where the source is
//! slow, so that there is always room for everybody else.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::{Backoff, Error};

/// How far apart the events of one destination come due, at least: 500 a second are looked at.
const SPACING: Duration = Duration::from_millis(2);
/// The same at most, on a source that is slow.
const WIDEST: Duration = Duration::from_secs(1);
/// How many other events could be fetched in the time between two of them. To settle takes about as long as to fetch, so
/// looking at them takes a quarter of what the source can do.
const SHARE: u32 = 8;
/// So many events make a fetch that tells what one costs.
const TELLING: usize = 20;
/// The longest that an event waits, however many wait with it: so long at most after its destination is back.
const LONGEST: Duration = Duration::from_secs(600);
/// How many destinations are remembered. Others are found to be away event by event.
const REMEMBERED: usize = 1_000;
/// How many of them are logged one by one; then at each doubling.
const LOGGED: usize = 10;
/// How often a destination must have refused before a drain no longer waits for it.
const DRAIN_TRIES: u32 = 3;

#[derive(Debug)]
struct Away {
    error: Error,
    /// Refusals in a row.
    failures: u32,
    /// It is left alone until then.
    until: Instant,
    /// One event is on its way to it.
    probing: bool,
    /// When the next event that is put back comes due.
    place: Instant,
}

impl Away {
    fn next_place(&mut self, not_before: Instant, spacing: Duration) -> Duration {
        let place = self.place.max(not_before);
        self.place = place + spacing;
        place.saturating_duration_since(Instant::now()).min(LONGEST)
    }
}

/// What to do with an event that is about to be sent.
pub(super) enum Gate {
    /// Nothing is known against it.
    Open,
    /// Its destination is away: put it back.
    Wait { after: Duration, error: Error },
}

/// A destination that refused.
pub(super) struct Refused {
    /// How long the event is to wait.
    pub(super) after: Duration,
    /// When this is news: until when the destination is left alone, if that is to be logged.
    pub(super) news: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Destinations {
    away: HashMap<String, Away>,
    backoff: Backoff,
    /// What it takes to fetch one event, lately.
    cost: Duration,
    spacing: Duration,
}

impl Destinations {
    pub(super) fn new(backoff: Backoff) -> Self {
        Self { away: HashMap::new(), backoff, cost: Duration::ZERO, spacing: SPACING }
    }

    /// Takes in how long a fetch took that brought so many events. Only a fetch that was worth it tells what one costs.
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

    /// Whether an event for these may be sent now. The first one whose destinations have been left alone for long enough
    /// is the probe.
    pub(super) fn gate(&mut self, names: &[String]) -> Gate {
        let now = Instant::now();
        let waits = |away: &Away| away.probing || away.until > now;
        let closed = names.iter().find(|name| self.away.get(*name).is_some_and(waits));
        if let Some(away) = closed.and_then(|name| self.away.get_mut(name)) {
            let not_before = if away.probing { now + self.backoff.base } else { away.until };
            return Gate::Wait {
                after: away.next_place(not_before, self.spacing),
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
            // One whose events are gone is never probed, and never found to be back.
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
            place: now,
        });
        // Others that were on their way to it as well say nothing new.
        if std::mem::take(&mut away.probing) {
            away.failures = away.failures.saturating_add(1);
            away.until = now + self.backoff.after(away.failures).max(error.retry_after().unwrap_or_default());
            away.error = error.clone();
        }
        let until = away.until;
        let is_logged = !known && (before < LOGGED || (before + 1).is_power_of_two());
        Refused {
            after: away.next_place(until, self.spacing),
            news: is_logged.then(|| until.saturating_duration_since(now)),
        }
    }

    /// An event for these was answered for, in whatever way. Returns those that are back by this.
    pub(super) fn answered(&mut self, names: &[String]) -> Vec<String> {
        let is_probe = |name: &&String| self.away.get(*name).is_some_and(|away| away.probing);
        let back: Vec<String> = names.iter().filter(is_probe).cloned().collect();
        for name in &back {
            self.away.remove(name);
        }
        back
    }

    /// An event for these was not tried after all: the next one is the probe.
    pub(super) fn untried(&mut self, names: &[String]) {
        for name in names {
            if let Some(away) = self.away.get_mut(name) {
                away.probing = false;
            }
        }
    }

    /// What a drain would wait for without end: each of them has refused several times. None while one of them may yet
    /// be back, or none is away.
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
