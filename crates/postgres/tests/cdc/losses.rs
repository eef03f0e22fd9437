//! Every committed event arrives, no other event does, and keys keep their order.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use airtight_testkit::wait::eventually;

use crate::{
    support::{Fixture, Recorder, SOON},
    writers::Writers,
};

const PHASE: &str = "SELECT max(phase) FROM airtight.slot";

const LONG: Duration = Duration::from_secs(120);

fn verify(sink: &Recorder, committed: &[String]) {
    let arrived: BTreeSet<String> = sink.arrived().into_iter().collect();
    let committed: BTreeSet<String> = committed.iter().cloned().collect();
    let missing: Vec<_> = committed.difference(&arrived).take(20).collect();
    let ghosts: Vec<_> = arrived.difference(&committed).take(20).collect();
    assert!(missing.is_empty() && ghosts.is_empty(), "missing {missing:?}, never committed {ghosts:?}");
    let mut last: HashMap<String, i64> = HashMap::new();
    for name in sink.first_arrivals() {
        let (key, n) = name.split_once(':').unwrap();
        let n: i64 = n.parse().unwrap();
        if let Some(before) = last.insert(key.to_owned(), n) {
            assert!(before < n, "{key}: {n} came after {before}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_relay_that_is_killed_again_and_again_loses_nothing() {
    let Some(f) = Fixture::create("killed").await else { return };
    let sink = Recorder::default();
    let mut committed = Vec::new();
    // So that the first relays are killed within the snapshot.
    f.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'test.cdc', 'Tested', 'Thing', 'old', jsonb_build_object('n', n) FROM generate_series(1, 5000) AS n",
    )
    .await;
    committed.extend((1..=5000).map(|n| format!("old:{n}")));
    let writers = Writers::start(&f, 6);
    let (mut kills, mut within) = (0, 0);
    let end = std::time::Instant::now() + crate::seconds(15);
    while std::time::Instant::now() < end {
        let relay = f.start(&sink);
        let more = sink.count() + fastrand::usize(1..1500);
        eventually(LONG, "some events", async || sink.count() >= more || relay.has_ended()).await;
        if sink.count() < more {
            panic!("it ended by itself: {}", relay.error().await);
        }
        if kills == 3 {
            // From now on they are killed within the stream.
            eventually(LONG, "the stream", async || f.text(PHASE).await == "streaming").await;
        }
        relay.kill().await;
        within += i32::from(f.text(PHASE).await != "streaming");
        kills += 1;
    }
    committed.extend(writers.stop().await);
    f.drain(&sink).await.unwrap();
    println!(
        "{kills} kills, {within} within the snapshot, {} events, {} deliveries",
        committed.len(),
        sink.count()
    );
    verify(&sink, &committed);
    assert!(kills > within && within >= 1, "{kills} kills, {within} within the snapshot");
    let open = "SELECT count(*) FROM airtight.outbox WHERE status <> 'done'";
    assert_eq!(f.number(open).await, 0, "all are marked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_connection_that_is_ended_in_the_middle_of_a_large_transaction_goes_on() {
    let Some(f) = Fixture::create("large").await else { return };
    let sink = Recorder::default();
    f.publish("first", 0..1).await;
    let mut options = f.options();
    options.buffer_bytes = 256 << 10;
    let relay = f.start_with(options, &sink);
    sink.has(1).await;
    f.streams().await;
    sink.hold_at(1);
    // More than sockets hold, so that the server is in the middle of it, too.
    f.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'test.cdc', 'Tested', 'Thing', 'k' || n % 7, jsonb_build_object('n', n, 'x', repeat('x', 1500)) FROM generate_series(1, 20000) AS n",
    )
    .await;
    f.publish("last", 0..1).await;
    for step in 1..=12 {
        if step % 4 == 0 {
            // Long enough for a keepalive in the middle of the transaction, which the next step reads.
            f.is_read().await;
            let end = std::time::Instant::now() + Duration::from_millis(2200);
            eventually(SOON, "some time to pass", async || std::time::Instant::now() > end).await;
        } else {
            eventually(SOON, "a stream to end", async || f.end_walsender().await).await;
        }
        sink.hold_at(1500 * step);
        sink.has(1500 * step).await;
    }
    sink.release();
    sink.has(20_002).await;
    relay.stop().await;
    let mut committed: Vec<String> = (1..=20_000).map(|n| format!("k{}:{n}", n % 7)).collect();
    committed.extend(["first:0".into(), "last:0".into()]);
    verify(&sink, &committed);
    assert_eq!(sink.count(), 20_002, "what was read once is not read again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn connections_of_every_kind_that_end_lose_nothing() {
    let Some(f) = Fixture::create("cut").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    let writers = Writers::start(&f, 4);
    for _ in 0..40 {
        let more = sink.count() + 100;
        eventually(LONG, "some events", async || sink.count() >= more).await;
        // The relay's own: the walsender, and those that settle and renew.
        f.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() \
             AND pid <> pg_backend_pid() AND (backend_type = 'walsender' OR query LIKE '%airtight\".\"partition%' \
             OR query LIKE '%airtight.partition%')",
        )
        .await;
    }
    let committed = writers.stop().await;
    eventually(LONG, "the rest", async || {
        f.number("SELECT count(*) FROM airtight.outbox WHERE status <> 'done'").await == 0
    })
    .await;
    relay.stop().await;
    println!("{} events, {} deliveries", committed.len(), sink.count());
    verify(&sink, &committed);
}

/// Refuses now and then as a broker does whose topics come and go, and skips what is behind that.
#[derive(Clone, Default)]
struct Fickle {
    kept: Recorder,
}

#[async_trait::async_trait]
impl airtight_core::Sink for Fickle {
    fn capabilities(&self) -> airtight_core::Capabilities {
        airtight_core::Capabilities {
            prefix_per_key: true,
            concurrency: 4,
            ..airtight_core::Capabilities::default()
        }
    }

    async fn deliver(&self, batch: &[airtight_core::Delivery]) -> Vec<airtight_core::Outcome> {
        use airtight_core::Outcome;
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..5))).await;
        let mut stopped: BTreeSet<String> = BTreeSet::new();
        let mut outcomes = Vec::new();
        for delivery in batch {
            let key = &delivery.event.aggregate_id;
            if stopped.contains(key) {
                outcomes.push(Outcome::Skipped);
            } else if fastrand::u8(..100) < 3 {
                stopped.insert(key.clone());
                outcomes.push(Outcome::Failed(airtight_core::Error::unavailable(
                    airtight_core::Code::NO_TOPIC,
                    "not yet",
                )));
            } else {
                outcomes.extend(self.kept.deliver(std::slice::from_ref(delivery)).await);
            }
        }
        outcomes
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_a_sink_gives_back_comes_again() {
    let Some(f) = Fixture::create("fickle").await else { return };
    let sink = Fickle::default();
    let mut options = f.options();
    options.mark = false;
    let stop = airtight_core::CancellationToken::new();
    let relay = airtight_core::Relay::new(f.outbox.cdc(options).unwrap(), sink.clone())
        .policy(crate::support::policy());
    let task = tokio::spawn(relay.run(stop.clone()));
    let mut committed = Vec::new();
    for n in 1..=300_i64 {
        for key in ["a", "b", "c", "d", "e", "f", "g"] {
            committed.push(format!("{key}:{n}"));
        }
        let events: Vec<_> =
            ["a", "b", "c", "d", "e", "f", "g"].map(|key| crate::support::event(key, n)).into();
        airtight_core::admin::Admin::publish(&f.outbox, &events).await.unwrap();
    }
    eventually(LONG, "all of them", async || {
        sink.kept.arrived().into_iter().collect::<BTreeSet<_>>().len() >= committed.len()
    })
    .await;
    stop.cancel();
    task.await.unwrap().unwrap();
    verify(&sink.kept, &committed);
}
