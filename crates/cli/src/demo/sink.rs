//! A sink with the faults of a real one, which remembers everything that arrived.

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use airtight::{Capabilities, Code, Delivery, Error, Outcome, Sink};
use async_trait::async_trait;

/// How many of 1,000 events meet which fault, each once. The event's id decides, and so the seed does: batches differ from
/// run to run, so they must not decide.
const REFUSED: u32 = 5;
const LOST_ANSWERS: u32 = 10;
const BREAKS: u32 = 2;

/// How many of 1,000 calls are slow: that changes no count.
const SLOW: u32 = 50;

/// How long the sink is unavailable, and after how many arrivals: the seed decides this as well.
const AWAY: Duration = Duration::from_millis(300);
const FIRST_ABSENCE: std::ops::Range<u64> = 20..150;
const ABSENCES: std::ops::Range<u64> = 5_000..20_000;

/// What arrived, and how.
#[derive(Debug, Default, Clone)]
pub(super) struct Received {
    /// Ids, each once.
    pub(super) ids: HashSet<String>,
    /// Arrivals of an id that had arrived before.
    pub(super) duplicates: u64,
    /// First arrivals with a number lower than one that had arrived for the same account.
    pub(super) out_of_order: u64,
    /// The highest number of each account so far.
    highest: HashMap<String, i64>,
}

impl Received {
    fn arrive(&mut self, delivery: &Delivery) {
        let event = &delivery.event;
        if !self.ids.insert(event.id.clone()) {
            self.duplicates += 1;
            return;
        }
        let number = number(event.payload.as_bytes());
        let highest = self.highest.entry(event.aggregate_id.clone()).or_insert(0);
        if number <= *highest {
            self.out_of_order += 1;
        }
        *highest = number.max(*highest);
    }
}

/// The transfer's number within its account; a payload without one counts as out of order.
fn number(payload: &[u8]) -> i64 {
    #[derive(serde::Deserialize)]
    struct Body {
        number: i64,
    }
    serde_json::from_slice(payload).map_or(0, |body: Body| body.number)
}

#[derive(Debug)]
struct State {
    /// For absences.
    random: fastrand::Rng,
    away_until: Option<Instant>,
    /// After how many events, each counted once, it becomes unavailable next.
    next_absence: u64,
    absences: u64,
    /// Events that have met their fault.
    spoiled: HashSet<String>,
    received: Received,
}

/// The sink that the module describes. Clones share their state.
#[derive(Debug, Clone)]
pub(super) struct FlakySink {
    seed: u64,
    state: Arc<Mutex<State>>,
    arrivals: Arc<AtomicU64>,
    distinct: Arc<AtomicU64>,
}

/// The fault of one event, at its first delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The event is refused.
    Refused,
    /// The event arrives, but the answer is lost.
    LostAnswer,
    /// The connection breaks before the event: this event and all later ones of the batch do not arrive.
    Breaks,
}

impl FlakySink {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed.rotate_left(32));
        let state = State {
            away_until: None,
            next_absence: random.u64(FIRST_ABSENCE),
            absences: 0,
            spoiled: HashSet::new(),
            received: Received::default(),
            random,
        };
        Self { seed, state: Arc::new(Mutex::new(state)), arrivals: Arc::default(), distinct: Arc::default() }
    }

    /// How often the sink was unavailable.
    pub(super) fn absences(&self) -> u64 {
        self.state().absences
    }

    /// A copy of what has arrived.
    pub(super) fn received(&self) -> Received {
        self.state().received.clone()
    }

    /// How often anything arrived.
    pub(super) fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    /// How many events arrived, each counted once.
    pub(super) fn distinct(&self) -> u64 {
        self.distinct.load(Ordering::Relaxed)
    }

    /// Ends an absence early, so that the last few events do not wait for it.
    pub(super) fn recover_soon(&self) {
        self.state().away_until = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fault of an event, independent of its batch and of the time.
    fn fault(&self, id: &str) -> Fault {
        let mut hasher = DefaultHasher::new();
        (self.seed, id).hash(&mut hasher);
        match hasher.finish() % 1_000 {
            dice if dice < u64::from(REFUSED) => Fault::Refused,
            dice if dice < u64::from(REFUSED + LOST_ANSWERS) => Fault::LostAnswer,
            dice if dice < u64::from(REFUSED + LOST_ANSWERS + BREAKS) => Fault::Breaks,
            _ => Fault::None,
        }
    }

    /// Whether the sink is unavailable now.
    fn is_away(&self) -> bool {
        let mut state = self.state();
        if state.away_until.is_some_and(|until| Instant::now() < until) {
            return true;
        }
        if state.received.ids.len() as u64 >= state.next_absence {
            state.next_absence += state.random.u64(ABSENCES);
            state.absences += 1;
            state.away_until = Some(Instant::now() + AWAY);
            return true;
        }
        false
    }

    /// Takes the batch in order. After an event that fails, the later events of its key are skipped.
    fn take(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut state = self.state();
        let mut failing: HashSet<&str> = HashSet::new();
        let mut broken = false;
        let mut outcomes = Vec::with_capacity(batch.len());
        for delivery in batch {
            let key = delivery.event.aggregate_id.as_str();
            if broken {
                outcomes.push(failed(Code::CONNECTION_LOST, "the connection broke"));
                continue;
            }
            if failing.contains(key) {
                outcomes.push(Outcome::Skipped);
                continue;
            }
            let fault = match self.fault(&delivery.event.id) {
                Fault::None => Fault::None,
                fault if state.spoiled.insert(delivery.event.id.clone()) => fault,
                _ => Fault::None,
            };
            match fault {
                Fault::Refused => {
                    failing.insert(key);
                    outcomes.push(failed(Code::BUSY, "refused this event for now"));
                    continue;
                }
                Fault::Breaks => {
                    broken = true;
                    outcomes.push(failed(Code::CONNECTION_LOST, "the connection broke"));
                    continue;
                }
                Fault::None | Fault::LostAnswer => {}
            }
            state.received.arrive(delivery);
            self.arrivals.fetch_add(1, Ordering::Relaxed);
            outcomes.push(if fault == Fault::LostAnswer {
                failing.insert(key);
                failed(Code::TIMEOUT, "accepted the event, but the answer was lost")
            } else {
                Outcome::Delivered
            });
        }
        self.distinct.store(state.received.ids.len() as u64, Ordering::Relaxed);
        outcomes
    }
}

fn failed(code: Code, message: &str) -> Outcome {
    Outcome::Failed(Error::retryable(code, message))
}

#[async_trait]
impl Sink for FlakySink {
    fn capabilities(&self) -> Capabilities {
        // Several calls at the same time, each small enough that a fault hits some and not all.
        Capabilities {
            prefix_per_key: true,
            concurrency: 4,
            max_batch_events: 100,
            ..Capabilities::default()
        }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if self.is_away() {
            let error = Error::unavailable(Code::UNREACHABLE, "the sink is unavailable");
            return vec![Outcome::Failed(error); batch.len()];
        }
        if fastrand::u32(0..1_000) < SLOW {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(5..30))).await;
        }
        self.take(batch)
    }
}
