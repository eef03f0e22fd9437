//! `airtight_core::log` under scripted faults: what a store's slow or broken answers must not lead to.

use std::{sync::Arc, time::Duration};

use airtight_core::{
    Batch, Capabilities, Code, Delivery, Error, Limits, NewEvent, Order, Position, Settlement, Source,
    Verdict,
    group::Members,
    log::{Log, LogAdmin, LogOptions, LogStore, ParkedFilter, SeekOptions, SeekTo},
    source::Settled,
};
use airtight_testkit::{
    memory_log::{MemoryLogStore, Verb, When},
    wait::{eventually, eventually_some},
};

const PATIENCE: Duration = Duration::from_secs(30);
const ALL: Limits = Limits { events: 100, bytes: 1 << 20 };
const C: &str = "c";

fn options(partitions: u16, lease_ms: u64) -> LogOptions {
    LogOptions::consumer(C).reading(|read| {
        read.partitions = partitions;
        read.lease = Duration::from_millis(lease_ms);
    })
}

fn event(key: &str) -> NewEvent {
    NewEvent::new("s", "Tested", "Test", key).json_text("{}")
}

fn retry(after: Duration) -> Verdict {
    Verdict::Retry { after, error: Error::retryable(Code::REFUSED, "not now") }
}

async fn open(store: &MemoryLogStore, options: LogOptions) -> Arc<Log<MemoryLogStore>> {
    let log = Arc::new(Log::new(store.clone(), options));
    log.open(&Capabilities::default()).await.expect("opens");
    log
}

async fn next(log: &Log<MemoryLogStore>) -> Batch {
    log.next(ALL).await.expect("next")
}

async fn some(log: &Log<MemoryLogStore>) -> Vec<Delivery> {
    eventually_some(PATIENCE, "a batch", async || {
        let batch = next(log).await.deliveries;
        (!batch.is_empty()).then_some(batch)
    })
    .await
}

async fn settle(log: &Log<MemoryLogStore>, deliveries: &[Delivery], verdict: &Verdict) -> Settled {
    let settle = |position| Settlement { position, verdict: verdict.clone() };
    let settlements: Vec<_> = deliveries.iter().map(|d| settle(d.position)).collect();
    log.settle(&settlements).await.expect("settle")
}

/// A key of this partition of two.
fn key(partition: u16, prefix: &str) -> String {
    let keys = (0..).map(|n| format!("{prefix}{n}"));
    keys.into_iter().find(|key| MemoryLogStore::partition_of(key, 2) == partition).expect("there is one")
}

/// A settle that also parks what is held back takes its time. Meanwhile the partition of what is held is lost, and
/// something else is read that is to be held: that is not in the settle, and must not be taken for settled.
#[tokio::test]
async fn what_is_held_while_a_settle_is_under_way_is_not_lost() {
    let store = MemoryLogStore::new();
    let log = open(&store, options(2, 2_000)).await;
    let (a, b, c) = (key(0, "a"), key(1, "b"), key(0, "c"));
    store.publish(&[event(&a), event(&b), event(&c)]);
    let held = some(&log).await;
    assert_eq!(settle(&log, &held[..2], &retry(Duration::from_secs(60))).await.applied, 2);
    store.publish(&[event(&b)]);
    assert!(next(&log).await.is_empty(), "b waits, and is held back");

    let gate = store.pause_next(Verb::Settle, When::Before);
    let settling = tokio::spawn({
        let (log, last) = (log.clone(), held[2..].to_vec());
        async move { settle(&log, &last, &Verdict::Delivered).await }
    });
    tokio::time::timeout(PATIENCE, gate.reached()).await.expect("the settle is under way");
    // An operator of the store takes partition 1 away; the next heartbeat notices.
    let member = store.members().into_iter().next().expect("the relay is there");
    store.give(&member, &[1]).await.expect("give");
    eventually(PATIENCE, "the relay to notice", async || log.owned_partitions() == [0]).await;
    let late = store.publish(&[event(&a)])[0].seq;
    assert!(next(&log).await.is_empty(), "a waits, and is held back");
    gate.open();
    settling.await.expect("settles");

    let parked = async || store.parked_of(C).iter().any(|parked| parked.seq == late);
    eventually(PATIENCE, "what was held meanwhile to be parked", async || {
        assert!(next(&log).await.is_empty());
        assert!(parked().await || store.offsets(C)[0] < late, "the offset has passed it");
        parked().await
    })
    .await;
}

/// A relay is moved while it has nothing to do, and the news of it is lost once: it is asked for again.
#[tokio::test]
async fn the_news_of_a_seek_may_be_lost_once() {
    let store = MemoryLogStore::new();
    let log = open(&store, options(1, 200)).await;
    store.publish(&[event("a"), event("a")]);
    let held = some(&log).await;
    settle(&log, &held, &Verdict::Delivered).await;
    eventually(PATIENCE, "the offset to move", async || store.offsets(C) == [2]).await;
    store.fail_next(Verb::Positions, When::After);
    store.seek(C, SeekTo::Earliest, SeekOptions::default()).await.expect("seek");
    assert_eq!(some(&log).await.len(), 2);
}

/// A relay comes back after an eviction and never hears that it was let in. It is, and works on.
#[tokio::test]
async fn a_lost_answer_to_joining_again_does_not_end_a_relay() {
    let store = MemoryLogStore::new();
    let log = open(&store, options(2, 100)).await;
    store.fail_next(Verb::Join, When::After);
    store.fail_next(Verb::Take, When::After);
    store.evict_all();
    eventually(PATIENCE, "the relay to have joined again", async || store.calls(Verb::Join) >= 2).await;
    store.publish(&[event("a")]);
    let got = some(&log).await;
    assert_eq!(settle(&log, &got, &Verdict::Delivered).await.applied, 1);
}

/// A relay that cannot reach its store for longer than its lease hands out nothing of what it does not own any
/// more, and goes on once it can.
#[tokio::test]
async fn an_outage_longer_than_the_lease_is_survived() {
    let store = MemoryLogStore::new();
    let cut = store.connection();
    let log = open(&cut, options(2, 150)).await;
    store.publish(&[event("a"), event("b")]);
    let held = some(&log).await;
    cut.set_down(true);
    let heir = open(&store, options(2, 150)).await;
    let mut got = Vec::new();
    eventually(PATIENCE, "another relay to take over", async || {
        let batch = next(&heir).await.deliveries;
        settle(&heir, &batch, &Verdict::Delivered).await;
        got.extend(batch);
        got.len() == 2
    })
    .await;
    cut.set_down(false);
    eventually(PATIENCE, "the settle to be refused", async || {
        let settle = |d: &Delivery| Settlement { position: d.position, verdict: Verdict::Delivered };
        let settlements: Vec<_> = held.iter().map(settle).collect();
        match log.settle(&settlements).await {
            Ok(settled) => {
                assert_eq!((settled.applied, settled.fenced), (0, held.len()));
                true
            }
            Err(_) => false,
        }
    })
    .await;
    heir.close().await.expect("close");
    store.publish(&[event("a"), event("b")]);
    let mut count = 0;
    eventually(PATIENCE, "the first relay to go on", async || {
        let batch = next(&log).await.deliveries;
        count += settle(&log, &batch, &Verdict::Delivered).await.applied;
        count == 2
    })
    .await;
}

/// Offsets that a handler's own transaction has written are settled with it: what the relay says of them afterwards
/// changes nothing. A transaction that rolled back leaves everything as it was.
#[tokio::test]
async fn offsets_are_settled_in_a_handlers_transaction() {
    let store = MemoryLogStore::new();
    let log = open(&store, options(1, 2_000)).await;
    store.publish(&[event("a"), event("b"), event("c")]);
    let held = some(&log).await;
    let positions: Vec<Position> = held.iter().map(|d| d.position).collect();
    let rolled_back = log.committing(&positions[..2]).await;
    assert!(!rolled_back.is_fenced());
    drop(rolled_back);
    assert_eq!(store.offsets(C), [0]);

    let committing = log.committing(&positions[..2]).await;
    let refused = LogStore::settle(&store, committing.member(), committing.changes()).await.expect("commits");
    assert!(refused.is_empty());
    committing.done();
    assert_eq!(store.offsets(C), [2]);
    let settled = settle(&log, &held[..2], &Verdict::SettledInTransaction).await;
    assert_eq!((settled.applied, settled.fenced), (2, 0));
    settle(&log, &held[2..], &Verdict::Delivered).await;
    assert_eq!(store.offsets(C), [3]);

    store.publish(&[event("a")]);
    let held = some(&log).await;
    store.seek(C, SeekTo::Earliest, SeekOptions::default()).await.expect("seek");
    eventually(PATIENCE, "the relay to know that it must not commit", async || {
        log.committing(&[held[0].position]).await.is_fenced()
    })
    .await;
}

/// An event that is parked is discarded or retried by a person while its relay looks elsewhere: the key goes on.
#[tokio::test]
async fn a_person_and_a_relay_do_not_get_in_each_others_way() {
    let store = MemoryLogStore::new();
    let log = open(
        &store,
        options(1, 100).reading(|read| {
            read.order = Order::Total;
            read.block_on_dead = true;
        }),
    )
    .await;
    store.publish(&[event("a"), event("b"), event("c")]);
    let dead = Verdict::Dead { error: Error::permanent(Code::custom("hopeless"), "never") };
    for n in 0..3 {
        let held = eventually_some(PATIENCE, "an event", async || {
            let batch = log.next(Limits { events: 1, bytes: 1 << 20 }).await.expect("next").deliveries;
            (!batch.is_empty()).then_some(batch)
        })
        .await;
        settle(&log, &held, &dead).await;
        assert!(next(&log).await.is_empty(), "in total order all are blocked by a dead one");
        let filter = ParkedFilter { seqs: vec![n + 1], ..ParkedFilter::default() };
        assert_eq!(store.discard_parked(&filter).await.expect("discard"), 1);
    }
    eventually(PATIENCE, "the offset to be at the end", async || store.offsets(C) == [3]).await;
    assert_eq!(store.violations(), Vec::<String>::new());
}
