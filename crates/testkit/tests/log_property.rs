//! A property of `airtight_core::log`, over random interleavings of everything that can happen to a consumer: the
//! stored offset never passes an event that is neither delivered nor parked, and in the end all are delivered.
//!
//! `AIRTIGHT_CHAOS_SECONDS` makes it longer, `AIRTIGHT_CHAOS_SEED` starts it elsewhere.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use airtight_core::{
    Capabilities, Code, Delivery, Error, Limits, NewEvent, Order, ReadOptions, Settlement, Source, Verdict,
    log::{Log, LogAdmin, LogOptions, OnFailure, SeekOptions, SeekTo},
};
use airtight_testkit::memory_log::{MemoryLogStore, MemoryLogTransaction, Verb, When};
use fastrand::Rng;

const C: &str = "c";
const KEYS: usize = 6;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

struct Relay {
    store: MemoryLogStore,
    log: Arc<Log<MemoryLogStore>>,
    held: Vec<Delivery>,
}

struct Life {
    seed: u64,
    random: Rng,
    store: MemoryLogStore,
    options: LogOptions,
    relays: Vec<Relay>,
    open: Vec<MemoryLogTransaction>,
    /// The key of every event that was committed.
    keys: BTreeMap<i64, String>,
    /// Events that somebody has said were delivered, or that a person has removed.
    delivered: HashSet<i64>,
}

impl Life {
    fn new(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let options = LogOptions {
            read: ReadOptions {
                order: [Order::Key, Order::Key, Order::Total, Order::None][random.usize(0..4)],
                partitions: [1, 2, 5][random.usize(0..3)],
                block_on_dead: random.u32(0..4) == 0,
                lease: ms(80),
                ..ReadOptions::default()
            },
            on_failure: if random.u32(0..4) == 0 { OnFailure::Halt } else { OnFailure::Park },
            max_parked: [3, 1_000][random.usize(0..2)],
            max_ahead: [8, 100_000][random.usize(0..2)],
            ..LogOptions::consumer(C)
        };
        Self {
            seed,
            random,
            store: MemoryLogStore::new(),
            options,
            relays: Vec::new(),
            open: Vec::new(),
            keys: BTreeMap::new(),
            delivered: HashSet::new(),
        }
    }

    async fn start(&mut self) {
        let store = self.store.connection();
        let log = Arc::new(Log::new(store.clone(), self.options.clone()));
        if log.open(&Capabilities::default()).await.is_ok() {
            self.relays.push(Relay { store, log, held: Vec::new() });
        }
    }

    fn begin(&mut self) -> MemoryLogTransaction {
        let mut transaction = self.store.begin();
        for _ in 0..self.random.usize(1..6) {
            let key = format!("k{}", self.random.usize(0..KEYS));
            transaction.publish(&NewEvent::new("s", "Tested", "Test", &key).json_text("{}"));
        }
        transaction
    }

    fn commit(&mut self, transaction: MemoryLogTransaction) {
        let keys = transaction.keys();
        let stored = transaction.commit();
        self.keys.extend(stored.into_iter().map(|event| event.seq).zip(keys));
    }

    fn verdict(&mut self) -> Verdict {
        let error = Error::retryable(Code::REFUSED, "the dice say so");
        match self.random.u32(0..20) {
            0..12 => Verdict::Delivered,
            12..15 => Verdict::Retry { after: ms(self.random.u64(0..20)), error },
            15..18 => Verdict::Released,
            // A consumer that halts ends by one of these.
            18 if self.options.on_failure == OnFailure::Park => Verdict::Dead { error },
            19 if self.options.on_failure == OnFailure::Park => Verdict::Unknown { error },
            _ => Verdict::Released,
        }
    }

    /// Settles some of what a relay holds, perhaps with an answer that is lost. As in a relay, an event is tried only
    /// when those of its key before it were delivered, and given back with them otherwise.
    async fn settle(&mut self, n: usize) {
        let mut held = std::mem::take(&mut self.relays[n].held);
        if self.options.read.order == Order::None {
            self.random.shuffle(&mut held);
        } else {
            held.sort_by_key(|delivery| delivery.event.seq);
        }
        let count = self.random.usize(0..=held.len());
        let mut broken = HashSet::new();
        let mut settlements = Vec::new();
        for (at, delivery) in held.into_iter().enumerate() {
            let ordering_key = match self.options.read.order {
                Order::Total => String::new(),
                Order::Key => delivery.event.aggregate_id.clone(),
                Order::None => delivery.event.id.clone(),
            };
            if at >= count && !broken.contains(&ordering_key) {
                self.relays[n].held.push(delivery);
                continue;
            }
            let verdict = if broken.contains(&ordering_key) { Verdict::Released } else { self.verdict() };
            match verdict {
                Verdict::Delivered => {
                    self.delivered.insert(delivery.event.seq);
                }
                Verdict::Dead { .. } | Verdict::Unknown { .. } if !self.options.read.block_on_dead => {}
                _ => {
                    broken.insert(ordering_key);
                }
            }
            settlements.push(Settlement { position: delivery.position, verdict });
        }
        let relay = &self.relays[n];
        if self.random.u32(0..4) == 0 {
            let when = if self.random.bool() { When::Before } else { When::After };
            relay.store.fail_next(Verb::Settle, when);
        }
        while relay.log.settle(&settlements).await.is_err() {
            self.random.bool().then(|| self.store.evict_all());
        }
    }

    async fn step(&mut self) {
        let any = (!self.relays.is_empty()).then(|| self.random.usize(0..self.relays.len()));
        match (self.random.u32(0..30), any) {
            (0..4, _) => {
                let transaction = self.begin();
                match self.random.u32(0..4) {
                    0 => transaction.rollback(),
                    1 => self.open.push(transaction),
                    _ => self.commit(transaction),
                }
            }
            (4, _) if !self.open.is_empty() => {
                let transaction = self.open.swap_remove(self.random.usize(0..self.open.len()));
                self.commit(transaction);
            }
            (5, _) if self.relays.len() < 3 => self.start().await,
            (6, Some(n)) => drop(self.relays.swap_remove(n)),
            (7, Some(n)) => {
                let relay = self.relays.swap_remove(n);
                relay.store.calm();
                relay.log.close().await.expect("close");
            }
            (8, _) => self.store.expire_leases(),
            (9, _) => self.store.evict_all(),
            (10, _) if self.random.u32(0..3) == 0 && !self.store.offsets(C).is_empty() => {
                // Never ahead: that leaves events out, as it is meant to.
                let to = self.random.i64(0..=self.store.offsets(C).into_iter().min().unwrap_or(0));
                let to = if to <= self.newest() { SeekTo::Seq(to) } else { SeekTo::Earliest };
                self.store.seek(C, to, SeekOptions::default()).await.expect("seek");
            }
            (11..19, Some(n)) => {
                let limits = Limits { events: self.random.usize(1..10), bytes: 1 << 20 };
                // A settle of what is held back may be the one that fails.
                if let Ok(batch) = self.relays[n].log.next(limits).await {
                    self.relays[n].held.extend(batch.deliveries);
                }
            }
            (19..27, Some(n)) => self.settle(n).await,
            _ => tokio::time::sleep(ms(self.random.u64(1..15))).await,
        }
    }

    fn newest(&self) -> i64 {
        self.keys.last_key_value().map_or(0, |(seq, _)| *seq)
    }

    fn check(&self) {
        let offsets = self.store.offsets(C);
        let parked: HashSet<i64> = self.store.parked_of(C).iter().map(|parked| parked.seq).collect();
        let partitions = u16::try_from(offsets.len()).expect("few");
        for (seq, key) in self.keys.iter().filter(|_| partitions > 0) {
            let partition = MemoryLogStore::partition_of(key, partitions);
            assert!(
                *seq > offsets[usize::from(partition)]
                    || self.delivered.contains(seq)
                    || parked.contains(seq),
                "seed {}: {:?}: {seq} of {key} was passed: {offsets:?}, parked {parked:?}",
                self.seed,
                self.options
            );
        }
        assert_eq!(self.store.violations(), Vec::<String>::new(), "seed {}: {:?}", self.seed, self.options);
    }

    /// One relay is left and delivers everything; a person retries what died.
    async fn finish(&mut self) {
        while let Some(transaction) = self.open.pop() {
            self.commit(transaction);
        }
        for relay in self.relays.drain(..) {
            relay.store.calm();
            relay.log.close().await.expect("close");
        }
        self.start().await;
        let log = self.relays[0].log.clone();
        let began = Instant::now();
        let mut last: BTreeMap<String, i64> = BTreeMap::new();
        let (mut retried, mut seen) = (false, self.delivered.clone());
        loop {
            let batch = log.next(Limits { events: 7, bytes: 1 << 20 }).await.expect("next").deliveries;
            for delivery in &batch {
                let (mut key, seq) = (delivery.event.aggregate_id.clone(), delivery.event.seq);
                if self.options.read.order == Order::Total {
                    key.clear();
                }
                // Only first deliveries are in order, and what a person retries comes when it comes.
                if retried || seen.contains(&seq) {
                    continue;
                }
                let before = last.insert(key.clone(), seq).unwrap_or(0);
                let ordered = self.options.read.order != Order::None && seen.insert(seq);
                assert!(
                    !ordered || before < seq,
                    "seed {}: {key}: {seq} after {before}: {:?}",
                    self.seed,
                    self.options
                );
            }
            self.delivered.extend(batch.iter().map(|delivery| delivery.event.seq));
            let settle = |d: &Delivery| Settlement { position: d.position, verdict: Verdict::Delivered };
            let settlements: Vec<_> = batch.iter().map(settle).collect();
            log.settle(&settlements).await.expect("settle");
            self.check();
            let backlog = log.backlog().await.expect("backlog");
            // Behind so many parked events that wait for a person, nothing new is read either.
            let full =
                self.options.read.block_on_dead && self.store.parked_of(C).len() >= self.options.max_parked;
            if batch.is_empty() && (full || backlog.unfinished <= backlog.blocked) && !retried {
                retried = true;
                let seqs = self.store.parked_of(C).iter().map(|parked| parked.seq).collect();
                let filter = airtight_core::log::ParkedFilter { seqs, ..Default::default() };
                self.store.retry_parked(&filter).await.expect("retry");
            }
            let ends = self.store.offsets(C).iter().all(|offset| *offset >= self.newest());
            if retried && ends && self.store.parked_of(C).is_empty() {
                break;
            }
            assert!(
                began.elapsed() < Duration::from_secs(20),
                "seed {}: {:?}: stuck at {:?} of {}, {backlog:?}, parked {:?}",
                self.seed,
                self.options,
                self.store.offsets(C),
                self.newest(),
                self.store.parked_of(C)
            );
            if batch.is_empty() {
                log.wait(ms(10)).await;
            }
        }
        let lost: Vec<&i64> = self.keys.keys().filter(|seq| !self.delivered.contains(seq)).collect();
        assert!(lost.is_empty(), "seed {}: never delivered: {lost:?}", self.seed);
        assert_eq!(log.backlog().await.expect("backlog").unfinished, 0, "seed {}", self.seed);
    }

    async fn run(mut self) {
        self.start().await;
        for _ in 0..300 {
            self.step().await;
            self.check();
        }
        self.finish().await;
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_offset_never_passes_what_is_neither_delivered_nor_parked() {
    let end = Instant::now() + Duration::from_secs(number("AIRTIGHT_CHAOS_SECONDS", 8));
    let first = number("AIRTIGHT_CHAOS_SEED", fastrand::u64(0..1 << 32));
    let mut seed = first;
    while Instant::now() < end {
        futures::future::join_all((0..8).map(|n| Life::new(seed + n).run())).await;
        seed += 8;
    }
    println!("{} lives, from seed {first}", seed - first);
}
