//! Relays that come, go, crash and lose their store, over sinks that fail in every way they can: nothing is lost,
//! and first deliveries of each key are in order. A loop over seeds, for some seconds.
//!
//! `AIRTIGHT_CHAOS_SECONDS` makes it longer, `AIRTIGHT_CHAOS_SEED` starts it elsewhere. A seed decides what is
//! done, not when the scheduler runs whom, so a failure may take several runs of its seed to come again.

mod kit;

use std::{
    collections::{BTreeMap, HashSet},
    env,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{
    Backoff, Capabilities, Code, Delivery, Error, Event, Order, Outcome, Policy, Sink,
    queue::{Queue, QueueOptions},
    state::State,
};
use airtight_testkit::memory_queue::MemoryStore;
use async_trait::async_trait;
use fastrand::Rng;

use crate::kit::{Running, away, event, lock, ms, policy, refused};

/// A source that failed is left alone for up to ten seconds; a life that stands still for longer is stuck.
const STUCK: Duration = Duration::from_secs(25);

/// What has reached the destination, whoever brought it.
#[derive(Default)]
struct World {
    first: Mutex<Vec<(String, i64)>>,
    seen: Mutex<HashSet<i64>>,
    problems: Mutex<Vec<String>>,
}

impl World {
    fn accept(&self, delivery: &Delivery) {
        // One lock for both, or two relays could note two events in the wrong order.
        let mut first = lock(&self.first);
        if lock(&self.seen).insert(delivery.event.seq) {
            first.push((delivery.event.aggregate_id.clone(), delivery.event.seq));
        }
    }

    fn problem(&self, what: String) {
        lock(&self.problems).push(what);
    }

    fn check(&self, order: Order) -> Vec<String> {
        let mut problems = lock(&self.problems).clone();
        let mut last_seqs: BTreeMap<&str, i64> = BTreeMap::new();
        let first = lock(&self.first);
        for (key, seq) in first.iter().filter(|_| order != Order::None) {
            let ordering_key = if order == Order::Total { "" } else { key.as_str() };
            let before = last_seqs.insert(ordering_key, *seq).unwrap_or(0);
            if before > *seq {
                problems.push(format!("key {key}: {seq} was first delivered after {before}"));
            }
        }
        problems
    }
}

/// One relay's sink.
#[derive(Clone)]
struct Wild {
    world: Arc<World>,
    caps: Capabilities,
    order: Order,
    random: Arc<Mutex<Rng>>,
    calls: Arc<AtomicUsize>,
    busy: Arc<Mutex<HashSet<String>>>,
}

/// Ends a call also when it panics or is aborted.
struct Call<'a>(&'a Wild, Vec<String>);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
        let mut busy = lock(&self.0.busy);
        self.1.iter().for_each(|key| {
            busy.remove(key);
        });
    }
}

impl Wild {
    fn enter(&self, batch: &[Delivery]) -> Call<'_> {
        let concurrent = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        if concurrent > self.caps.concurrency || batch.len() > self.caps.max_batch_events {
            self.world.problem(format!("{concurrent} calls at once, {} events", batch.len()));
        }
        let mut keys: Vec<String> = batch.iter().map(|d| d.event.aggregate_id.clone()).collect();
        let events = keys.len();
        keys.sort();
        keys.dedup();
        if self.order != Order::None {
            if !self.caps.prefix_per_key && keys.len() < events {
                self.world.problem("two events of a key in one call, without a prefix".into());
            }
            let mut busy = lock(&self.busy);
            for key in &keys {
                if !busy.insert(key.clone()) {
                    self.world.problem(format!("key {key} is in two calls at once"));
                }
            }
        }
        Call(self, keys)
    }
}

#[async_trait]
impl Sink for Wild {
    fn capabilities(&self) -> Capabilities {
        self.caps
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        vec![event.aggregate_id.clone()]
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let _call = self.enter(batch);
        let mut failed: HashSet<&str> = HashSet::new();
        let mut outcomes = Vec::new();
        let mut gone = false;
        for delivery in batch {
            let (dice, pause) = {
                let mut random = lock(&self.random);
                (random.u32(0..1_000), random.u64(0..3_000))
            };
            match pause {
                // Longer than the lease.
                0..3 => tokio::time::sleep(ms(250)).await,
                3..300 => tokio::time::sleep(ms(pause % 5)).await,
                _ => tokio::task::yield_now().await,
            }
            let key = delivery.event.aggregate_id.as_str();
            let outcome = match dice {
                _ if gone => away(),
                _ if failed.contains(key) => Outcome::Skipped,
                0..60 => refused(),
                60..70 => {
                    gone = true;
                    away()
                }
                70..74 => panic!("wild"),
                84..100 => {
                    Outcome::Failed(Error::unavailable(Code::custom("missing"), "no such topic").at(key))
                }
                74..80 => {
                    // It arrived, and the answer was lost: the caller is to think that it did not.
                    self.world.accept(delivery);
                    refused()
                }
                80..84 => return outcomes,
                _ => {
                    self.world.accept(delivery);
                    Outcome::Delivered
                }
            };
            if !matches!(outcome, Outcome::Delivered) {
                failed.insert(key);
            }
            outcomes.push(outcome);
        }
        outcomes
    }
}

struct Life {
    store: MemoryStore,
    world: Arc<World>,
    random: Rng,
    options: QueueOptions,
    policy: Policy,
    caps: Capabilities,
    relays: Vec<(MemoryStore, Running)>,
    /// Whether events may run out of attempts.
    mortal: bool,
}

impl Life {
    fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let order = [Order::Key, Order::Key, Order::Key, Order::Total, Order::None][random.usize(0..5)];
        let mortal = random.u32(0..4) == 0;
        let quick = Backoff { base: ms(2), multiplier: 2.0, cap: ms(20), jitter: 0.5 };
        let policy = Policy {
            backoff: quick,
            circuit: quick,
            batch_events: random.usize(1..30),
            in_flight_events: random.usize(1..80),
            // Relays vanish all the time in here, and it is nobody's fault.
            crashes_alone: 1_000_000,
            max_attempts: if mortal { 2 } else { 1_000_000 },
            grace: ms(random.u64(0..40)),
            ..policy()
        };
        let caps = Capabilities {
            prefix_per_key: random.bool(),
            concurrency: [1, 3, 8][random.usize(0..3)],
            max_batch_events: random.usize(1..12),
            ..Capabilities::default()
        };
        let partitions = [1, 4, 16][random.usize(0..3)];
        let options = QueueOptions { order, lease: ms(150), partitions, ..QueueOptions::default() };
        Self {
            store: MemoryStore::new(),
            world: Arc::default(),
            random,
            options,
            policy,
            caps,
            relays: Vec::new(),
            mortal,
        }
    }

    fn start(&mut self) {
        let connection = self.store.connection();
        let slow = ms([0, 5, 30][self.random.usize(0..3)]);
        connection.chaos(self.random.u64(..), 0.02, 0.02, slow);
        let sink = Wild {
            world: self.world.clone(),
            caps: self.caps,
            order: self.options.order,
            random: Arc::new(Mutex::new(self.random.fork())),
            calls: Arc::default(),
            busy: Arc::default(),
        };
        let queue = Arc::new(Queue::new(connection.clone(), self.options.clone()));
        let relay = Running::of(queue, &sink, self.policy.clone(), false);
        self.relays.push((connection, relay));
    }

    fn any(&mut self) -> Option<usize> {
        (!self.relays.is_empty()).then(|| self.random.usize(0..self.relays.len()))
    }

    fn publish(&mut self) -> usize {
        let count = self.random.usize(1..25);
        let keys = [2, 9, 40][self.random.usize(0..3)];
        for _ in 0..count {
            self.store.publish(&[event(&format!("k{}", self.random.usize(0..keys)))]);
        }
        count
    }

    async fn step(&mut self) -> usize {
        match self.random.u32(0..20) {
            0..8 => return self.publish(),
            8..11 if self.relays.len() < 3 => self.start(),
            11 => {
                if let Some(n) = self.any() {
                    self.relays.swap_remove(n).1.kill().await;
                }
            }
            12 => {
                if let Some(n) = self.any() {
                    let (connection, relay) = self.relays.swap_remove(n);
                    connection.calm();
                    relay.stop().await.expect("a relay stops without an error");
                }
            }
            13 | 14 => {
                if let Some(n) = self.any() {
                    let down = self.random.bool();
                    self.relays[n].0.set_down(down);
                }
            }
            // Here a store takes back what it has promised, as a clock does that jumps. A relay cannot know, and
            // goes on behind an event that it saw die while another relay delivers that one.
            15 if !self.mortal => self.store.expire_leases(),
            16 if !self.mortal => self.store.evict_all(),
            _ => tokio::time::sleep(ms(self.random.u64(1..25))).await,
        }
        0
    }

    /// Waits until everything is done, as long as it goes on: what matters is that nothing is stuck.
    async fn finish(&self, published: usize, seed: u64) {
        let finished = || self.store.count(State::Done) + self.store.count(State::Dead);
        loop {
            let before = finished();
            if before == published {
                return;
            }
            let moved = tokio::time::timeout(STUCK, async {
                while finished() == before {
                    tokio::time::sleep(ms(5)).await;
                }
            });
            if moved.await.is_err() {
                let left: Vec<_> =
                    self.store.rows().into_iter().filter(|row| row.state != State::Done).take(8).collect();
                let relays: Vec<_> = self.relays.iter().map(|(_, relay)| relay.summary()).collect();
                panic!(
                    "seed {seed}: stuck at {before} of {published}: {left:#?}\n{relays:#?}\n{:?} {:?} {:?}",
                    self.options, self.caps, self.policy
                );
            }
        }
    }

    /// Lives, then calms down and finishes.
    async fn run(mut self, seed: u64) {
        self.start();
        let mut published = self.publish();
        for _ in 0..80 {
            published += self.step().await;
        }
        self.start();
        self.relays.iter().for_each(|(connection, _)| connection.calm());
        self.finish(published, seed).await;
        for (_, relay) in self.relays {
            relay.stop().await.expect("a relay stops without an error");
        }
        let problems = self.world.check(self.options.order);
        assert!(problems.is_empty(), "seed {seed}, {:?}, {:?}: {problems:#?}", self.options, self.caps);
        let lost = self.store.rows().into_iter().filter(|row| row.state == State::Done);
        let lost: Vec<i64> =
            lost.map(|row| row.seq).filter(|seq| !lock(&self.world.seen).contains(seq)).collect();
        assert!(lost.is_empty(), "seed {seed}: done and never delivered: {lost:?}");
        assert!(self.mortal || self.store.count(State::Dead) == 0, "seed {seed}: nothing dies in here");
        assert_eq!(self.store.violations(), Vec::<String>::new(), "seed {seed}");
    }
}

fn number(name: &str, default: u64) -> u64 {
    env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_and_keys_stay_in_order() {
    std::panic::set_hook(Box::new(|panic| {
        let wild = panic.payload().downcast_ref::<&str>() == Some(&"wild");
        if !wild {
            eprintln!("{panic}");
        }
    }));
    let end = Instant::now() + Duration::from_secs(number("AIRTIGHT_CHAOS_SECONDS", 10));
    let first = number("AIRTIGHT_CHAOS_SEED", fastrand::u64(0..1 << 32));
    let mut seed = first;
    while Instant::now() < end {
        // Several lives at once use the time that each of them spends waiting.
        futures::future::join_all((0..6).map(|n| Life::new(seed + n).run(seed + n))).await;
        seed += 6;
    }
    println!("{} lives, from seed {first}", seed - first);
}
