//! A destination with the faults of a real one, which remembers everything that arrived.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use airtight::{Capabilities, Delivery, Error, Outcome, Sink};
use async_trait::async_trait;

/// Of 1,000 calls, how many meet which fault.
const FAILS_BEFORE: u32 = 40;
const FAILS_AFTER: u32 = 40;
const IS_SLOW: u32 = 50;
/// Of 1,000 events, how many are refused once.
const REFUSED: u32 = 5;

/// Which calls meet the faults that even a short demo should have.
const FIRST_LOST_ANSWER: u32 = 4;
const FIRST_ABSENCE: u32 = 8;

/// How long it stays away, and after how many calls it goes again.
const AWAY: Duration = Duration::from_millis(300);
const ABSENCES: std::ops::Range<u32> = 100..300;

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
    random: fastrand::Rng,
    away_until: Option<Instant>,
    calls: u32,
    next_absence: u32,
    received: Received,
}

/// See the module. Clones share everything.
#[derive(Debug, Clone)]
pub(super) struct FlakySink {
    state: Arc<Mutex<State>>,
    arrivals: Arc<AtomicU64>,
    distinct: Arc<AtomicU64>,
}

/// What befalls one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Before,
    After,
    Away,
}

impl FlakySink {
    pub(super) fn new(seed: u64) -> Self {
        let random = fastrand::Rng::with_seed(seed.rotate_left(32));
        let state = State {
            random,
            away_until: None,
            calls: 0,
            next_absence: FIRST_ABSENCE,
            received: Received::default(),
        };
        Self { state: Arc::new(Mutex::new(state)), arrivals: Arc::default(), distinct: Arc::default() }
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

    /// Rolls the dice for one call: its fault, and how long it takes.
    fn roll(&self) -> (Fault, Duration) {
        let mut state = self.state();
        if state.away_until.is_some_and(|until| Instant::now() < until) {
            return (Fault::Away, Duration::ZERO);
        }
        state.calls += 1;
        if state.calls == FIRST_LOST_ANSWER {
            return (Fault::After, Duration::ZERO);
        }
        if state.calls >= state.next_absence {
            state.next_absence = state.calls + state.random.u32(ABSENCES);
            state.away_until = Some(Instant::now() + AWAY);
            return (Fault::Away, Duration::ZERO);
        }
        let slow = state.random.u32(0..1_000) < IS_SLOW;
        let delay = if slow { Duration::from_millis(state.random.u64(5..30)) } else { Duration::ZERO };
        let fault = match state.random.u32(0..1_000) {
            dice if dice < FAILS_BEFORE => Fault::Before,
            dice if dice < FAILS_BEFORE + FAILS_AFTER => Fault::After,
            _ => Fault::None,
        };
        (fault, delay)
    }

    /// Takes the batch in order. An event that is refused takes those behind it in its key with it.
    fn take(&self, batch: &[Delivery], reports: bool) -> Vec<Outcome> {
        let mut state = self.state();
        let mut refused: HashSet<&str> = HashSet::new();
        let mut outcomes = Vec::with_capacity(batch.len());
        for delivery in batch {
            let key = delivery.event.aggregate_id.as_str();
            if refused.contains(key) {
                outcomes.push(Outcome::Skipped);
                continue;
            }
            if state.random.u32(0..1_000) < REFUSED {
                refused.insert(key);
                outcomes.push(failed("busy", "refused this one, try again"));
                continue;
            }
            state.received.arrive(delivery);
            self.arrivals.fetch_add(1, Ordering::Relaxed);
            outcomes.push(if reports {
                Outcome::Delivered
            } else {
                failed("lost_answer", "took it, but the answer got lost")
            });
        }
        self.distinct.store(state.received.ids.len() as u64, Ordering::Relaxed);
        outcomes
    }
}

fn failed(code: &'static str, message: &str) -> Outcome {
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
        let (fault, delay) = self.roll();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        match fault {
            Fault::None => self.take(batch, true),
            Fault::After => self.take(batch, false),
            Fault::Before => vec![failed("broken_pipe", "the connection broke"); batch.len()],
            Fault::Away => {
                let error = Error::unavailable("refused", "nobody is there");
                vec![Outcome::Failed(error); batch.len()]
            }
        }
    }
}
