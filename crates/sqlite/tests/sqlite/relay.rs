//! The whole thing: relays over one file, a sink that fails, and nothing lost or out of order.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use airtight_core::{
    Backoff, Capabilities, Code, Delivery, Error, Order, Outcome, Policy, Relay, Sink, admin::Admin,
    queue::QueueOptions,
};
use airtight_sqlite::SqliteOutbox;
use airtight_testkit::wait::eventually;
use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::common::{Fixture, event};

/// Fails now and then, and notes first deliveries in order.
#[derive(Clone, Default)]
struct Flaky(Arc<Notes>);

#[derive(Default)]
struct Notes {
    dice: AtomicU64,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    delivered: HashSet<i64>,
    last: HashMap<String, i64>,
    out_of_order: Vec<(String, i64, i64)>,
}

impl Flaky {
    fn fails(&self) -> bool {
        let roll = self.0.dice.fetch_add(1, Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (roll >> 33).is_multiple_of(10)
    }
}

#[async_trait]
impl Sink for Flaky {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, concurrency: 2, max_batch_events: 20, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        tokio::task::yield_now().await;
        let mut failed: HashSet<&str> = HashSet::new();
        let mut seen = self.0.seen.lock().unwrap();
        batch
            .iter()
            .map(|delivery| {
                let event = &delivery.event;
                if failed.contains(event.aggregate_id.as_str()) {
                    return Outcome::Skipped;
                }
                if self.fails() {
                    failed.insert(&event.aggregate_id);
                    return Outcome::Failed(Error::retryable(Code::custom("dice"), "bad luck"));
                }
                if seen.delivered.insert(event.seq) {
                    let last = seen.last.insert(event.aggregate_id.clone(), event.seq).unwrap_or(0);
                    if last > event.seq {
                        seen.out_of_order.push((event.aggregate_id.clone(), last, event.seq));
                    }
                }
                Outcome::Delivered
            })
            .collect()
    }
}

pub(crate) fn policy() -> Policy {
    let quick = Backoff {
        base: Duration::from_millis(5),
        multiplier: 1.5,
        cap: Duration::from_millis(40),
        jitter: 0.2,
    };
    Policy {
        max_attempts: 1_000,
        backoff: quick,
        batch_events: 50,
        in_flight_events: 200,
        poll: Duration::from_millis(50),
        ..Policy::default()
    }
}

async fn run(order: Order, lease: Duration) {
    let fixture = Fixture::new().await;
    let sink = Flaky::default();
    let options = QueueOptions { order, lease, partitions: 16, ..QueueOptions::default() };
    let stop = CancellationToken::new();
    let mut relays = Vec::new();
    for n in 0..3 {
        let outbox = SqliteOutbox::open(&fixture.path()).await.unwrap();
        let relay =
            Relay::new(outbox.queue(options.clone()), sink.clone()).policy(policy()).name(format!("r{n}"));
        relays.push(relay.run(stop.clone()));
    }
    let total = 1_500;
    let work = async {
        let publisher = fixture.second().await;
        for round in 0..total / 50 {
            let events: Vec<_> = (0..50).map(|n| event(&format!("k{}", (round * 7 + n) % 23))).collect();
            Admin::publish(&publisher, &events).await.unwrap();
        }
        eventually(Duration::from_secs(90), "everything to be done", async || {
            let done = fixture.text("SELECT count(*) FROM airtight_outbox WHERE status = 'done'").await;
            done == total.to_string()
        })
        .await;
        stop.cancel();
    };
    let (ended, ()) = futures::future::join(futures::future::join_all(relays), work).await;
    for relay in ended {
        relay.unwrap();
    }
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_relay").await, "0", "they left");
    let seen = sink.0.seen.lock().unwrap();
    assert_eq!(seen.delivered.len(), total, "nothing is lost");
    if order != Order::None {
        assert!(seen.out_of_order.is_empty(), "{:?}", seen.out_of_order);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_relays_keep_the_order_of_keys_over_a_failing_sink() {
    run(Order::Key, Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_relays_without_order_lose_nothing() {
    run(Order::None, Duration::from_secs(20)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_drains_stops_at_an_empty_backlog() {
    for order in [Order::Key, Order::Total] {
        let fixture = Fixture::new().await;
        fixture.publish(&["a", "b", "a", "c"]).await;
        let sink = Flaky::default();
        let queue = fixture.outbox.queue(QueueOptions { order, ..QueueOptions::default() });
        let relay = Relay::new(queue, sink.clone()).policy(policy());
        let summary = relay.drain(CancellationToken::new()).await.unwrap();
        assert_eq!(summary.delivered, 4);
    }
}

/// A sink that never answers: whoever waits for it can only be killed.
struct Silent(tokio::sync::mpsc::UnboundedSender<usize>);

#[async_trait]
impl Sink for Silent {
    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        self.0.send(batch.len()).unwrap();
        std::future::pending().await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_relay_held_is_delivered_by_another() {
    for order in [Order::None, Order::Key, Order::Total] {
        let fixture = Fixture::new().await;
        fixture.publish(&["a", "b", "a", "c", "a"]).await;
        let lease = Duration::from_millis(400);
        let options = QueueOptions { order, lease, ..QueueOptions::default() };
        let (sent, mut held) = tokio::sync::mpsc::unbounded_channel();
        let doomed = Relay::new(fixture.second().await.queue(options.clone()), Silent(sent)).policy(policy());
        tokio::select! {
            _ = doomed.run(CancellationToken::new()) => panic!("it cannot end"),
            count = held.recv() => assert!(count.is_some_and(|count| count > 0)),
        }
        // Dropped where it stood: nothing was given back, nobody left.
        assert_ne!(
            fixture.text("SELECT count(*) FROM airtight_outbox WHERE status = 'processing'").await,
            "0"
        );
        let sink = Flaky::default();
        let heir = Relay::new(fixture.outbox.queue(options), sink.clone()).policy(policy());
        heir.drain(CancellationToken::new()).await.unwrap();
        let seen = sink.0.seen.lock().unwrap();
        assert_eq!(seen.delivered.len(), 5);
        assert!(order == Order::None || seen.out_of_order.is_empty());
    }
}

/// Two processes publish and claim at the same time, each with a pool of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_claim_side_by_side_and_never_the_same() {
    let fixture = Fixture::new().await;
    let keys: Vec<String> = (0..600).map(|n| format!("k{n}")).collect();
    fixture.publish(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut claims = Vec::new();
    for _ in 0..2 {
        let outbox = fixture.second().await;
        claims.push(tokio::spawn(async move {
            let mut relay = crate::common::Hand::join(&outbox, crate::common::member(Order::None)).await;
            let mut seqs = Vec::new();
            loop {
                let got = relay.claim(20).await;
                if got.claimed.rows.is_empty() {
                    return seqs;
                }
                seqs.extend(got.seqs());
                relay.settle(&got, airtight_core::Verdict::Delivered).await;
            }
        }));
    }
    let mut all = Vec::new();
    for claim in claims {
        all.extend(claim.await.unwrap());
    }
    all.sort_unstable();
    assert_eq!(all, (1..=600).collect::<Vec<i64>>());
}
