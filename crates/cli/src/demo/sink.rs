//! A destination with the faults of a real one, which remembers everything that arrived.

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

/// Of 1,000 events, how many meet which fault, each once. Which ones goes by their ids, and so by the seed: how events
/// fall into batches is the machine's affair, and must not decide.
const REFUSED: u32 = 5;
const LOST_ANSWERS: u32 = 10;
const BREAKS: u32 = 2;

/// Of 1,000 calls, how many are slow: that changes no number.
const SLOW: u32 = 50;

/// How long it stays away, and after how many arrivals it goes: by the seed as well.
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
    /// At how many events, each counted once, it goes away next.
    next_absence: u64,
    absences: u64,
    /// Events that have met their fault.
    spoiled: HashSet<String>,
    received: Received,
}

/// See the module. Clones share everything.
#[derive(Debug, Clone)]
pub(super) struct FlakySink {
    seed: u64,
    state: Arc<Mutex<State>>,
    arrivals: Arc<AtomicU64>,
    distinct: Arc<AtomicU64>,
}

/// What befalls one event, the first time that it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// It is refused.
    Refused,
    /// It arrives, and nobody is told.
    LostAnswer,
    /// The connection breaks before it: it and all behind it in the batch have not arrived.
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

    /// How often it went away.
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

    /// Cuts an absence short, so that the last few events do not wait for it.
    pub(super) fn recover_soon(&self) {
        self.state().away_until = None;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fault of an event, whenever and with whatever others it comes.
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

    /// Whether nobody is there.
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

    /// Takes the batch in order. An event that fails takes those behind it in its key with it.
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
                    outcomes.push(failed(Code::BUSY, "refused this one, try again"));
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
                failed(Code::TIMEOUT, "took it, but the answer got lost")
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
        // Several calls side by side, each small enough that a fault hits some and not all.
        Capabilities {
            prefix_per_key: true,
            concurrency: 4,
            max_batch_events: 100,
            ..Capabilities::default()
        }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if self.is_away() {
            let error = Error::unavailable(Code::UNREACHABLE, "nobody is there");
            return vec![Outcome::Failed(error); batch.len()];
        }
        if fastrand::u32(0..1_000) < SLOW {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(5..30))).await;
        }
        self.take(batch)
    }
}
