//! Shared by the tests of the engine: a sink made of a closure, and a relay that runs in the background.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_core::{
    Backoff, Capabilities, Code, Delivery, Error, NewEvent, Outcome, Policy, Relay, Result, Sink, Source,
    queue::{Queue, QueueOptions},
    relay::{Stats, Summary},
    state::State,
};
use airtight_testkit::{memory_queue::MemoryStore, wait::eventually};
use async_trait::async_trait;
use futures::future::BoxFuture;
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn event(key: &str) -> NewEvent {
    NewEvent::new("s", "Tested", "Test", key).json_text("{}")
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A door that is shut until somebody opens it, for good.
#[derive(Clone)]
pub(crate) struct Door(Arc<watch::Sender<bool>>);

impl Door {
    pub(crate) fn shut() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    pub(crate) fn open(&self) {
        self.0.send_replace(true);
    }

    pub(crate) async fn pass(&self) {
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

type Deliver = dyn Fn(Vec<Delivery>) -> BoxFuture<'static, Vec<Outcome>> + Send + Sync;
type Open = dyn Fn() -> BoxFuture<'static, Result<()>> + Send + Sync;

/// A sink made of closures. Notes every event that reaches it, in order, before the closure decides.
#[derive(Clone)]
pub(crate) struct TestSink {
    caps: Capabilities,
    deliver: Arc<Deliver>,
    open: Arc<Open>,
    arrived: Arc<Mutex<Vec<(String, i64)>>>,
    hangs_in_close: bool,
}

impl TestSink {
    pub(crate) fn new<F: Future<Output = Vec<Outcome>> + Send + 'static>(
        deliver: impl Fn(Vec<Delivery>) -> F + Send + Sync + 'static,
    ) -> Self {
        Self {
            caps: Capabilities { concurrency: 4, max_batch_events: 10, ..Capabilities::default() },
            deliver: Arc::new(move |batch| Box::pin(deliver(batch))),
            open: Arc::new(|| Box::pin(async { Ok(()) })),
            arrived: Arc::default(),
            hangs_in_close: false,
        }
    }

    /// Delivers everything.
    pub(crate) fn fine() -> Self {
        Self::new(async |batch: Vec<Delivery>| vec![Outcome::Delivered; batch.len()])
    }

    pub(crate) fn caps(mut self, caps: Capabilities) -> Self {
        self.caps = caps;
        self
    }

    pub(crate) fn on_open<F: Future<Output = Result<()>> + Send + 'static>(
        mut self,
        open: impl Fn() -> F + Send + Sync + 'static,
    ) -> Self {
        self.open = Arc::new(move || Box::pin(open()));
        self
    }

    pub(crate) fn hang_in_close(mut self) -> Self {
        self.hangs_in_close = true;
        self
    }

    /// Keys and seqs of everything that reached it.
    pub(crate) fn arrived(&self) -> Vec<(String, i64)> {
        lock(&self.arrived).clone()
    }

    /// The seqs that reached it, for one key.
    pub(crate) fn of_key(&self, key: &str) -> Vec<i64> {
        self.arrived().into_iter().filter(|(k, _)| k == key).map(|(_, seq)| seq).collect()
    }
}

#[async_trait]
impl Sink for TestSink {
    fn capabilities(&self) -> Capabilities {
        self.caps
    }

    async fn open(&self) -> Result<()> {
        (self.open)().await
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        lock(&self.arrived).extend(batch.iter().map(|d| (d.event.aggregate_id.clone(), d.event.seq)));
        (self.deliver)(batch.to_vec()).await
    }

    async fn close(&self) -> Result<()> {
        if self.hangs_in_close {
            std::future::pending::<()>().await;
        }
        Ok(())
    }
}

pub(crate) fn refused() -> Outcome {
    Outcome::Failed(Error::retryable(Code::REFUSED, "not now"))
}

pub(crate) fn away() -> Outcome {
    Outcome::Failed(Error::unavailable(Code::custom("away"), "nobody there"))
}

/// Policies that do not make a test wait.
pub(crate) fn policy() -> Policy {
    let quick = |base| Backoff { base, multiplier: 1.5, cap: ms(60), jitter: 0.0 };
    Policy {
        backoff: quick(ms(15)),
        circuit: quick(ms(20)),
        poll: ms(10),
        batch_events: 20,
        in_flight_events: 60,
        grace: ms(300),
        max_attempts: 1_000,
        ..Policy::default()
    }
}

pub(crate) fn options() -> QueueOptions {
    QueueOptions { lease: Duration::from_secs(30), partitions: 8, ..QueueOptions::default() }
}

/// A relay that runs in a task of its own.
pub(crate) struct Running {
    pub(crate) task: JoinHandle<Result<Summary>>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) stats: Arc<Stats>,
}

impl Running {
    pub(crate) fn start(
        store: &MemoryStore,
        options: QueueOptions,
        sink: &(impl Sink + Clone),
        policy: Policy,
    ) -> Self {
        Self::of(Arc::new(Queue::new(store.clone(), options)), sink, policy, false)
    }

    pub(crate) fn drain(
        store: &MemoryStore,
        options: QueueOptions,
        sink: &(impl Sink + Clone),
        policy: Policy,
    ) -> Self {
        Self::of(Arc::new(Queue::new(store.clone(), options)), sink, policy, true)
    }

    pub(crate) fn of(
        source: Arc<dyn Source>,
        sink: &(impl Sink + Clone),
        policy: Policy,
        drain: bool,
    ) -> Self {
        let relay = Relay::from_parts(source, Arc::new(sink.clone())).policy(policy);
        let (stats, shutdown) = (relay.stats(), CancellationToken::new());
        let token = shutdown.clone();
        let task =
            tokio::spawn(
                async move { if drain { relay.drain(token).await } else { relay.run(token).await } },
            );
        Self { task, shutdown, stats }
    }

    pub(crate) fn summary(&self) -> Summary {
        self.stats.summary()
    }

    /// Waits for its end, which must come.
    pub(crate) async fn end(self) -> Result<Summary> {
        let ended = tokio::time::timeout(PATIENCE, self.task).await;
        ended.expect("the relay ends in time").expect("the relay does not panic")
    }

    pub(crate) async fn stop(self) -> Result<Summary> {
        self.shutdown.cancel();
        self.end().await
    }

    /// As a killed process ends.
    pub(crate) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// Waits until so many events are done, and nobody has broken the store's contract on the way.
pub(crate) async fn all_done(store: &MemoryStore, count: usize) {
    eventually(PATIENCE, "all events to be done", async || store.count(State::Done) == count).await;
    assert_eq!(store.violations(), Vec::<String>::new());
}

/// A sink whose first call waits for the door and then answers with `first`; all others deliver.
pub(crate) fn first_call(door: &Door, first: fn() -> Outcome) -> TestSink {
    let (door, calls) = (door.clone(), Arc::new(AtomicUsize::new(0)));
    TestSink::new(move |batch| {
        let (door, call) = (door.clone(), calls.fetch_add(1, Ordering::SeqCst));
        async move {
            if call > 0 {
                return vec![Outcome::Delivered; batch.len()];
            }
            door.pass().await;
            batch.iter().map(|_| first()).collect()
        }
    })
}
