//! Faults that a test asks for: calls that fail before or after they took effect, and calls that pause.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use airtight_core::{Code, Error, Result};
use tokio::sync::watch;

/// The operations of a queue's or a log's store, to count and to script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// `open`
    Open,
    /// `Members::join`
    Join,
    /// `Members::heartbeat`
    Heartbeat,
    /// `Members::take`
    Take,
    /// `Members::give`
    Give,
    /// `QueueStore::claim`
    Claim,
    /// `settle`
    Settle,
    /// `unhold`
    Unhold,
    /// `Members::leave`
    Leave,
    /// `backlog`
    Backlog,
    /// `LogStore::attach`
    Attach,
    /// `LogStore::positions`
    Positions,
    /// `LogStore::consumer_state`
    Watch,
    /// `LogStore::read`
    Read,
    /// `LogStore::reread`
    Reread,
    /// `LogStore::due`
    Due,
}

/// When in a call a fault happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Nothing has happened yet.
    Before,
    /// It took effect, and then the connection broke, or the answer was slow.
    After,
}

/// A call that waits until the test lets it go on.
#[derive(Debug, Clone)]
pub struct Gate {
    reached: Arc<watch::Sender<bool>>,
    open: Arc<watch::Sender<bool>>,
}

impl Gate {
    fn new() -> Self {
        Self { reached: Arc::new(watch::Sender::new(false)), open: Arc::new(watch::Sender::new(false)) }
    }

    /// Returns once a call stands at the gate.
    pub async fn reached(&self) {
        let mut reached = self.reached.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = reached.wait_for(|reached| *reached).await;
    }

    /// Whether a call stands at the gate, or has passed it.
    pub fn is_reached(&self) -> bool {
        *self.reached.borrow()
    }

    /// Lets the call continue.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    async fn pass(&self) {
        self.reached.send_replace(true);
        let mut open = self.open.subscribe();
        let _ = open.wait_for(|open| *open).await;
    }
}

#[derive(Debug)]
enum Fault {
    Fail(When, Error),
    Pause(When, Gate),
}

/// The scripted faults of one connection to the store, and how often it was called.
#[derive(Debug, Default)]
pub(crate) struct Script {
    faults: Mutex<HashMap<Verb, VecDeque<Fault>>>,
    calls: Mutex<HashMap<Verb, u64>>,
    down: AtomicBool,
    chaos: Mutex<Option<Chaos>>,
}

#[derive(Debug)]
struct Chaos {
    random: fastrand::Rng,
    before: f64,
    after: f64,
    slow: Duration,
}

/// The rest of a scripted call: what happens after it took effect.
#[derive(Debug)]
pub(crate) struct Rest {
    fault: Option<Fault>,
    wait: Duration,
}

impl Script {
    pub(crate) fn fail(&self, verb: Verb, when: When, error: Error) {
        lock(&self.faults).entry(verb).or_default().push_back(Fault::Fail(when, error));
    }

    pub(crate) fn pause(&self, verb: Verb, when: When) -> Gate {
        let gate = Gate::new();
        lock(&self.faults).entry(verb).or_default().push_back(Fault::Pause(when, gate.clone()));
        gate
    }

    pub(crate) fn chaos(&self, seed: u64, before: f64, after: f64, slow: Duration) {
        *lock(&self.chaos) = Some(Chaos { random: fastrand::Rng::with_seed(seed), before, after, slow });
    }

    pub(crate) fn calm(&self) {
        *lock(&self.chaos) = None;
        lock(&self.faults).clear();
        self.down.store(false, Ordering::SeqCst);
    }

    pub(crate) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    pub(crate) fn calls(&self, verb: Verb) -> u64 {
        lock(&self.calls).get(&verb).copied().unwrap_or(0)
    }

    /// Before a call takes effect.
    pub(crate) async fn before(&self, verb: Verb) -> Result<Rest> {
        *lock(&self.calls).entry(verb).or_default() += 1;
        if self.down.load(Ordering::SeqCst) {
            return Err(broken("the store is down"));
        }
        let fault = lock(&self.faults).get_mut(&verb).and_then(VecDeque::pop_front);
        let fault = fault.or_else(|| self.roll());
        let (before, wait) = self.roll_waits();
        pause(before).await;
        match fault {
            Some(Fault::Fail(When::Before, error)) => Err(error),
            Some(Fault::Pause(When::Before, gate)) => {
                gate.pass().await;
                Ok(Rest { fault: None, wait })
            }
            fault => Ok(Rest { fault, wait }),
        }
    }

    /// How long a call takes before and after it takes effect. Half of them are quick.
    fn roll_waits(&self) -> (Duration, Duration) {
        let mut chaos = lock(&self.chaos);
        let Some(Chaos { random, slow, .. }) = chaos.as_mut() else { return Default::default() };
        let mut wait = || slow.mul_f64((random.f64() * 2.0 - 1.0).max(0.0));
        (wait(), wait())
    }

    fn roll(&self) -> Option<Fault> {
        let mut chaos = lock(&self.chaos);
        let Chaos { random, before, after, .. } = chaos.as_mut()?;
        let dice = random.f64();
        if dice < *before {
            Some(Fault::Fail(When::Before, broken("chaos, before")))
        } else if dice < *before + *after {
            Some(Fault::Fail(When::After, broken("chaos, after it took effect")))
        } else {
            None
        }
    }
}

impl Rest {
    /// After a call took effect.
    pub(crate) async fn after<T>(self, value: T) -> Result<T> {
        pause(self.wait).await;
        match self.fault {
            Some(Fault::Fail(_, error)) => Err(error),
            Some(Fault::Pause(_, gate)) => {
                gate.pass().await;
                Ok(value)
            }
            None => Ok(value),
        }
    }
}

async fn pause(wait: Duration) {
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
}

/// The error of a connection that broke.
pub(crate) fn broken(what: &str) -> Error {
    Error::retryable(Code::custom("broken_connection"), what)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
