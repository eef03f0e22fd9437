//! A sink that fails on purpose.
//!
//! [`FaultySink`] wraps any sink and makes chosen deliveries fail: by a rule, or at random from a seed. The most
//! important fault is [`Fault::DeliverThenFail`]: the destination has the event, but the relay does not know. A relay
//! that works with all of these faults loses nothing.
//!
//! The wrapper keeps what the wrapped sink promises: after an event with a fault, the later events of its key in the
//! same batch are skipped and not sent. So a wrong order is the relay's fault.

use std::{
    collections::HashSet,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use airtight_core::{Capabilities, Code, Delivery, Error, Event, Outcome, Result, Sink};
use async_trait::async_trait;
use tokio::sync::watch;

/// What goes wrong with one delivery.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Nothing.
    None,
    /// Fails with this error; the event was not sent.
    Fail(Error),
    /// Sends the event, then fails with this error.
    DeliverThenFail(Error),
    /// Reports that the outcome cannot be known.
    Unknown {
        /// Whether the event was really sent.
        delivered: bool,
    },
    /// Returns too few outcomes: none for this event and those behind it. None of these was sent, except for this one if
    /// `delivered` says so.
    AnswerShort {
        /// Whether this event was really sent.
        delivered: bool,
    },
    /// Panics, after what came before it in the batch was sent.
    Panic,
    /// Takes this long, then continues normally.
    Delay(Duration),
    /// Waits until the gate opens, then continues normally.
    Hang(Gate),
}

impl Fault {
    /// Fails before sending, with a retryable error.
    pub fn retryable() -> Self {
        Self::Fail(Error::retryable(Code::custom("injected"), "an injected retryable failure"))
    }

    /// Fails before sending, with a permanent error.
    pub fn permanent() -> Self {
        Self::Fail(Error::permanent(Code::custom("injected"), "an injected permanent failure"))
    }

    /// Fails before sending, as if the destination were gone.
    pub fn unavailable() -> Self {
        Self::Fail(Error::unavailable(Code::custom("injected"), "an injected outage"))
    }

    /// Fails before sending, as if this one destination were gone.
    pub fn away(destination: impl Into<String>) -> Self {
        Self::Fail(
            Error::unavailable(Code::custom("injected"), "an injected outage of one destination")
                .at(destination),
        )
    }

    /// Sends, then fails with a retryable error.
    pub fn lost_answer() -> Self {
        Self::DeliverThenFail(Error::retryable(
            Code::custom("injected"),
            "delivered, but the answer was lost",
        ))
    }
}

/// A gate that callers wait at until it is opened. All clones are the same gate.
#[derive(Clone)]
pub struct Gate(Arc<GateInner>);

struct GateInner {
    open: watch::Sender<bool>,
    arrived: watch::Sender<usize>,
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Self {
        Self(Arc::new(GateInner { open: watch::Sender::new(false), arrived: watch::Sender::new(0) }))
    }

    /// Opens the gate, permanently.
    pub fn open(&self) {
        self.0.open.send_replace(true);
    }

    /// Waits until it is open.
    pub async fn pass(&self) {
        self.0.arrived.send_modify(|count| *count += 1);
        // The sender lives in this very gate, so this cannot fail.
        let _ = self.0.open.subscribe().wait_for(|open| *open).await;
    }

    /// Waits until so many have come to the gate. A test puts a deadline around it.
    pub async fn reached(&self, by: usize) {
        let _ = self.0.arrived.subscribe().wait_for(|count| *count >= by).await;
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("open", &*self.0.open.borrow()).finish_non_exhaustive()
    }
}

/// How likely each fault is for one delivery, in percent. What is left is a delivery without a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Odds {
    /// A retryable failure before sending.
    pub retryable: u8,
    /// A permanent failure before sending. The event ends up dead.
    pub permanent: u8,
    /// An outage before sending.
    pub unavailable: u8,
    /// Sent, then a retryable failure.
    pub lost_answer: u8,
    /// Reported as unknown, sent or not. Retries do not touch the event.
    pub unknown: u8,
    /// No outcome, sent or not.
    pub answer_short: u8,
    /// A panic.
    pub panic: u8,
    /// A few milliseconds' delay.
    pub delay: u8,
}

impl Odds {
    /// About a third of deliveries go wrong, in every way after which an event must still arrive.
    pub fn survivable() -> Self {
        Self {
            retryable: 10,
            unavailable: 2,
            lost_answer: 10,
            answer_short: 4,
            panic: 2,
            delay: 5,
            ..Self::default()
        }
    }

    fn draw(&self, seed: u64, delivery: &Delivery) -> Fault {
        // By event and attempt rather than by call, so that a seed means the same however calls interleave.
        let mut hasher = DefaultHasher::new();
        (seed, &delivery.event.id, delivery.event.seq, delivery.attempt).hash(&mut hasher);
        let mut rng = fastrand::Rng::with_seed(hasher.finish());
        let mut roll = rng.u8(..100);
        let mut hit = |percent: u8| match roll.checked_sub(percent) {
            Some(rest) => {
                roll = rest;
                false
            }
            None => true,
        };
        if hit(self.retryable) {
            Fault::retryable()
        } else if hit(self.permanent) {
            Fault::permanent()
        } else if hit(self.unavailable) {
            Fault::unavailable()
        } else if hit(self.lost_answer) {
            Fault::lost_answer()
        } else if hit(self.unknown) {
            Fault::Unknown { delivered: rng.bool() }
        } else if hit(self.answer_short) {
            Fault::AnswerShort { delivered: rng.bool() }
        } else if hit(self.panic) {
            Fault::Panic
        } else if hit(self.delay) {
            Fault::Delay(Duration::from_millis(rng.u64(1..10)))
        } else {
            Fault::None
        }
    }
}

type Rule = Arc<dyn Fn(&Delivery) -> Fault + Send + Sync>;

/// A sink that fails on purpose. Clones share the rule and what was counted.
pub struct FaultySink<S>(Arc<Inner<S>>);

struct Inner<S> {
    sink: S,
    state: Mutex<State>,
}

struct State {
    rule: Rule,
    down: Option<Error>,
    injected: usize,
}

impl<S> Clone for FaultySink<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Sink> FaultySink<S> {
    /// A sink without faults yet.
    pub fn new(sink: S) -> Self {
        let state = State { rule: Arc::new(|_| Fault::None), down: None, injected: 0 };
        Self(Arc::new(Inner { sink, state: Mutex::new(state) }))
    }

    /// A sink with random faults. With the same seed, the same attempts of the same events fail.
    pub fn seeded(sink: S, seed: u64, odds: Odds) -> Self {
        let faulty = Self::new(sink);
        faulty.set_rule(move |delivery| odds.draw(seed, delivery));
        faulty
    }

    /// A sink with faults by this rule.
    #[must_use]
    pub fn rule(self, rule: impl Fn(&Delivery) -> Fault + Send + Sync + 'static) -> Self {
        self.set_rule(rule);
        self
    }

    /// Uses another rule from now on.
    pub fn set_rule(&self, rule: impl Fn(&Delivery) -> Fault + Send + Sync + 'static) {
        self.state().rule = Arc::new(rule);
    }

    /// Makes the destination fail with this error, also in `open`, or work again.
    pub fn set_down(&self, error: Option<Error>) {
        self.state().down = error;
    }

    /// The wrapped sink.
    pub fn inner(&self) -> &S {
        &self.0.sink
    }

    /// How many faults were injected: a test that meant to have some should see some.
    pub fn injected(&self) -> usize {
        self.state().injected
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fault(&self, delivery: &Delivery) -> Fault {
        let mut state = self.state();
        let fault = match &state.down {
            Some(error) => Fault::Fail(error.clone()),
            None => {
                let rule = state.rule.clone();
                drop(state);
                // Without the lock: the rule is the test's own code.
                let fault = rule(delivery);
                state = self.state();
                fault
            }
        };
        state.injected += usize::from(!matches!(fault, Fault::None));
        fault
    }
}

#[async_trait]
impl<S: Sink> Sink for FaultySink<S> {
    fn capabilities(&self) -> Capabilities {
        self.0.sink.capabilities()
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        self.0.sink.destinations(event)
    }

    async fn open(&self) -> Result<()> {
        let down = self.state().down.clone();
        match down {
            Some(error) => Err(error),
            None => self.0.sink.open().await,
        }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut run = Run { sink: &self.0.sink, outcomes: Vec::new(), pending: 0, broken: HashSet::new() };
        for (at, delivery) in batch.iter().enumerate() {
            let key = delivery.event.aggregate_id.as_str();
            if run.broken.contains(key) {
                // Sent first, because outcomes are in the order of the batch.
                run.send(batch, at).await;
                run.outcomes.push(Outcome::Skipped);
                continue;
            }
            let fault = self.fault(delivery);
            if matches!(fault, Fault::None) {
                run.pending += 1;
                continue;
            }
            // What came before it is out when it happens, and may have broken its key just now.
            run.send(batch, at).await;
            if run.broken.contains(key) {
                run.outcomes.push(Outcome::Skipped);
                continue;
            }
            match fault {
                Fault::Delay(time) => {
                    tokio::time::sleep(time).await;
                    run.pending += 1;
                }
                Fault::Hang(gate) => {
                    gate.pass().await;
                    run.pending += 1;
                }
                fault => {
                    match run.spoil(delivery, fault).await {
                        Some(outcome) => run.outcomes.push(outcome),
                        None => return run.outcomes,
                    }
                    run.broken.insert(key);
                }
            }
        }
        run.send(batch, batch.len()).await;
        run.outcomes
    }

    async fn close(&self) -> Result<()> {
        self.0.sink.close().await
    }
}

/// One call's progress: outcomes so far, and how many deliveries behind them wait to be sent together.
struct Run<'a, S> {
    sink: &'a S,
    outcomes: Vec<Outcome>,
    pending: usize,
    broken: HashSet<&'a str>,
}

impl<'a, S: Sink> Run<'a, S> {
    /// Sends what is pending, which ends before `end`.
    async fn send(&mut self, batch: &'a [Delivery], end: usize) {
        let part = &batch[end - self.pending..end];
        self.pending = 0;
        if part.is_empty() {
            return;
        }
        let mut outcomes = self.sink.deliver(part).await;
        // A short answer of the wrapped sink must not shift what comes after it.
        let missing =
            || Outcome::Failed(Error::retryable(Code::NO_OUTCOME, "the wrapped sink answered short"));
        outcomes.resize_with(part.len(), missing);
        for (delivery, outcome) in part.iter().zip(&outcomes) {
            if !outcome.is_delivered() {
                self.broken.insert(&delivery.event.aggregate_id);
            }
        }
        self.outcomes.append(&mut outcomes);
    }

    /// The outcome of a spoiled delivery; none to answer short.
    async fn spoil(&self, delivery: &Delivery, fault: Fault) -> Option<Outcome> {
        let unknown =
            || Outcome::Unknown(Error::retryable(Code::custom("injected"), "an injected unknown outcome"));
        let (deliver, outcome) = match fault {
            Fault::Fail(error) => (false, Some(Outcome::Failed(error))),
            Fault::DeliverThenFail(error) => (true, Some(Outcome::Failed(error))),
            Fault::Unknown { delivered } => (delivered, Some(unknown())),
            Fault::AnswerShort { delivered } => (delivered, None),
            Fault::Panic => panic!("an injected panic at event {}", delivery.event.id),
            Fault::None | Fault::Delay(_) | Fault::Hang(_) => unreachable!("these go on as pending"),
        };
        if deliver {
            self.sink.deliver(std::slice::from_ref(delivery)).await;
        }
        outcome
    }
}
