//! `airtight_core::queue` under scripted faults: what a store's slow or broken answers must not lead to.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use airtight_core::{
    Batch, Capabilities, Code, Error, Limits, NewEvent, Order, Settlement, Source, Verdict,
    queue::{Queue, QueueOptions},
    state::State,
};
use airtight_testkit::{
    memory_queue::{MemoryStore, Verb, When},
    wait::{eventually, eventually_some},
};

const PATIENCE: Duration = Duration::from_secs(30);
const ALL: Limits = Limits { events: 100, bytes: 1 << 20 };

fn options(order: Order, lease_ms: u64) -> QueueOptions {
    let lease = Duration::from_millis(lease_ms);
    QueueOptions { order, lease, partitions: 8, ..QueueOptions::default() }
}

fn event(key: &str) -> NewEvent {
    NewEvent::new("s", "Tested", "Test", key).json_text("{}")
}

async fn open(store: &MemoryStore, options: QueueOptions) -> Arc<Queue<MemoryStore>> {
    let queue = Arc::new(Queue::new(store.clone(), options));
    queue.open(&Capabilities::default()).await.expect("opens");
    queue
}

async fn some(queue: &Queue<MemoryStore>) -> Batch {
    eventually_some(PATIENCE, "a batch", async || {
        let batch = queue.next(ALL).await.expect("next");
        (!batch.is_empty()).then_some(batch)
    })
    .await
}

async fn settle(queue: &Queue<MemoryStore>, batch: &Batch, verdict: Verdict) {
    let settle = |position| Settlement { position, verdict: verdict.clone() };
    let settlements: Vec<_> = batch.deliveries.iter().map(|d| settle(d.position)).collect();
    queue.settle(&settlements).await.expect("settle");
}

/// The answer to `take` is slow. Meanwhile the relay is evicted, learns of it by a claim, and joins again. The
/// late answer speaks of partitions that were another membership's.
#[tokio::test]
async fn partitions_taken_under_a_former_membership_are_not_ours() {
    let store = MemoryStore::new();
    let mine = store.connection();
    let queue = open(&mine, options(Order::Key, 400)).await;
    let partner = open(&store.connection(), options(Order::Key, 400)).await;
    eventually(PATIENCE, "both to own half", async || partner.owned_partitions().len() == 4).await;
    let slow = mine.pause_next(Verb::Take, When::After);
    partner.close().await.expect("close");
    slow.reached().await;
    store.evict_all();
    let rival = open(&store.connection(), options(Order::Key, 400)).await;
    eventually(PATIENCE, "the rival to own everything", async || rival.owned_partitions().len() == 8).await;

    let claim = tokio::spawn({
        let queue = queue.clone();
        async move { queue.next(ALL).await }
    });
    // Whether the claim is through with joining again, or waits for the answer, it has noticed by now.
    let noticed = Instant::now();
    eventually(PATIENCE, "the claim", async || {
        claim.is_finished() || noticed.elapsed() > Duration::from_millis(100)
    })
    .await;
    for key in 0..20 {
        store.publish(&[event(&key.to_string())]);
    }
    slow.open();
    claim.await.expect("no panic").expect("next");
    // The late answer is taken in by the task that renews, which runs when this one waits.
    let looked = Instant::now();
    eventually(PATIENCE, "a while to pass", async || {
        let batch = queue.next(ALL).await.expect("next");
        settle(&queue, &batch, Verdict::Delivered).await;
        looked.elapsed() > Duration::from_millis(100)
    })
    .await;
    eventually(PATIENCE, "all events to be delivered", async || {
        for relay in [&queue, &rival] {
            let batch = relay.next(ALL).await.expect("next");
            settle(relay, &batch, Verdict::Delivered).await;
        }
        store.count(State::Done) == 20
    })
    .await;
    assert_eq!(store.violations(), Vec::<String>::new());
}

/// Two tasks notice an eviction at once, a claim and the renewal: the relay comes back once, not twice.
#[tokio::test]
async fn an_eviction_that_is_noticed_twice_leads_to_one_new_membership() {
    for round in 0..20 {
        let store = MemoryStore::new();
        let queue = open(&store, options(Order::Key, 80)).await;
        store.publish(&[event("a")]);
        let join = store.pause_next(Verb::Join, When::Before);
        store.evict_all();
        // A claim notices it first and stands at the gate, on its way to join.
        let claim = tokio::spawn({
            let queue = queue.clone();
            async move { queue.next(ALL).await }
        });
        join.reached().await;
        let beats = store.calls(Verb::Heartbeat);
        let waited = Instant::now();
        eventually(PATIENCE, "the renewal to look", async || {
            store.calls(Verb::Heartbeat) > beats || waited.elapsed() > Duration::from_millis(60)
        })
        .await;
        join.open();
        claim.await.expect("no panic").expect("next");
        some(&queue).await;
        assert_eq!(store.relays(), 1, "round {round}: a second self holds partitions until its lease ends");
        assert_eq!(store.violations(), Vec::<String>::new());
    }
}

/// Renewals fail for longer than the lease while claims would work: claiming what cannot be delivered would only
/// go round in circles.
#[tokio::test]
async fn nothing_is_claimed_without_a_valid_lease() {
    let store = MemoryStore::new();
    store.publish(&[event("a")]);
    let queue = open(&store, options(Order::Key, 200)).await;
    for _ in 0..15 {
        store.fail_next(Verb::Heartbeat, When::Before);
    }
    let lease_over = Instant::now() + Duration::from_millis(210);
    eventually(PATIENCE, "the lease to run out", async || Instant::now() > lease_over).await;
    let beats = store.calls(Verb::Heartbeat);
    eventually(PATIENCE, "some more renewals to fail", async || {
        let batch = queue.next(ALL).await.expect("next");
        assert!(
            batch.is_empty() || !batch.ownership.is_lost(),
            "a claim under a lease that has run out is of no use"
        );
        settle(&queue, &batch, Verdict::Released).await;
        store.calls(Verb::Heartbeat) > beats + 2
    })
    .await;
    let batch = some(&queue).await;
    assert!(!batch.ownership.is_lost(), "renewed, so it goes on");
}

/// Without order a row that a renewal left out, being young, keeps the end that its claim gave it.
#[tokio::test]
async fn a_young_row_is_owned_no_longer_than_the_database_says() {
    let store = MemoryStore::new();
    let queue = open(&store, options(Order::None, 900)).await;
    store.publish(&[event("a")]);
    let beats = store.calls(Verb::Heartbeat);
    let claimed = Instant::now();
    let batch = some(&queue).await;
    eventually(PATIENCE, "a renewal", async || store.calls(Verb::Heartbeat) > beats).await;
    // Renewed or not, from here on it is not any more.
    store.set_down(true);
    let renewed = claimed.elapsed() >= Duration::from_millis(300);
    eventually(PATIENCE, "the lease to end", async || claimed.elapsed() > Duration::from_millis(930)).await;
    assert!(renewed || batch.ownership.is_lost(), "the database has let go of it");
}

/// What a finished head frees is there for whoever was waiting, at once and not after a poll.
#[tokio::test]
async fn freeing_held_events_wakes_the_waiting() {
    let store = MemoryStore::new();
    let queue = open(&store, options(Order::Key, 30_000)).await;
    store.publish(&[event("a")]);
    let head = some(&queue).await;
    let error = Error::retryable(Code::REFUSED, "no");
    settle(&queue, &head, Verdict::Retry { after: Duration::from_millis(100), error }).await;
    store.publish(&[event("a")]);
    assert!(queue.next(ALL).await.expect("next").is_empty(), "it waits behind its head");
    let head = some(&queue).await;
    assert_eq!(head.deliveries.len(), 1, "the head only");
    // Use up what may have been signalled before.
    queue.wait(Duration::from_millis(1)).await;

    let freeing = store.pause_next(Verb::Unhold, When::Before);
    let settled = tokio::spawn({
        let queue = queue.clone();
        async move { settle(&queue, &head, Verdict::Delivered).await }
    });
    freeing.reached().await;
    // A relay that looks now is too early, and waits.
    queue.wait(Duration::from_millis(1)).await;
    assert!(queue.next(ALL).await.expect("next").is_empty());
    let waiting = Instant::now();
    freeing.open();
    queue.wait(PATIENCE).await;
    assert!(waiting.elapsed() < Duration::from_secs(1), "woken after {:?} only", waiting.elapsed());
    assert_eq!(queue.next(ALL).await.expect("next").deliveries.len(), 1);
    settled.await.expect("no panic");
}

/// A claim took effect and its answer was lost: the rows come back in order, before what is newer.
#[tokio::test]
async fn a_lost_answer_to_a_claim_loses_nothing_and_no_order() {
    let store = MemoryStore::new();
    let queue = open(&store, options(Order::Key, 30_000)).await;
    let first = store.publish(&[event("a"), event("a")]);
    store.fail_next(Verb::Claim, When::After);
    assert!(queue.next(ALL).await.is_err());
    assert_eq!(store.count(State::Processing), 2, "claimed, and nobody knows");
    let last = store.publish(&[event("a")]);
    let batch = some(&queue).await;
    let got: Vec<&str> = batch.deliveries.iter().map(|d| d.event.id.as_str()).collect();
    let expected: Vec<&str> = first.iter().chain(&last).map(|p| p.id.as_str()).collect();
    assert_eq!(got, expected);
    assert!(batch.deliveries.iter().all(|d| d.attempt == 1), "it costs no attempt");
}

/// Without order the lost rows wait for the end of their lease.
#[tokio::test]
async fn a_lost_answer_to_a_claim_loses_nothing_without_order() {
    let store = MemoryStore::new();
    let queue = open(&store, options(Order::None, 300)).await;
    store.publish(&[event("a")]);
    store.fail_next(Verb::Claim, When::After);
    assert!(queue.next(ALL).await.is_err());
    let batch = some(&queue).await;
    assert_eq!((batch.deliveries[0].attempt, batch.deliveries[0].lost_leases), (1, 1));
}

/// What did not fit is given back; when that fails, nothing of the claim may be handed out, or what is newer
/// would overtake it.
#[tokio::test]
async fn overflow_that_cannot_be_given_back_costs_no_order() {
    for when in [When::Before, When::After] {
        let store = MemoryStore::new();
        let queue = open(&store, options(Order::Key, 30_000)).await;
        let large = |n: usize| event("a").json_text(format!("\"{n}{}\"", "x".repeat(4_000)));
        let published = store.publish(&(0..5).map(large).collect::<Vec<_>>());
        store.fail_next(Verb::Settle, when);
        let limits = Limits { events: 100, bytes: 10_000 };
        assert!(queue.next(limits).await.is_err(), "the overflow could not be given back");
        let mut got = Vec::new();
        while got.len() < 5 {
            let batch = queue.next(limits).await.expect("next");
            got.extend(batch.deliveries.into_iter().map(|d| d.event.id));
        }
        assert_eq!(got, published.iter().map(|p| p.id.clone()).collect::<Vec<_>>(), "{when:?}");
    }
}

/// Opening fails halfway and is tried again.
#[tokio::test]
async fn opening_can_be_repeated() {
    for verb in [Verb::Open, Verb::Join, Verb::Heartbeat, Verb::Take, Verb::Unhold] {
        for when in [When::Before, When::After] {
            let store = MemoryStore::new();
            store.publish(&[event("a")]);
            let queue = Queue::new(store.clone(), options(Order::Key, 30_000));
            store.fail_next(verb, when);
            assert!(queue.open(&Capabilities::default()).await.is_err(), "{verb:?} {when:?}");
            queue.open(&Capabilities::default()).await.expect("the second time");
            assert_eq!(some(&queue).await.deliveries.len(), 1);
            assert_eq!(store.relays(), 1, "{verb:?} {when:?}: one relay");
        }
    }
}

/// The bytes asked for hold what an event costs in memory, not its payload alone.
#[tokio::test]
async fn small_events_count_for_more_than_their_payload() {
    let store = MemoryStore::new();
    store.publish(&vec![event("a"); 200]);
    let queue = open(&store, options(Order::Key, 30_000)).await;
    let limits = Limits { events: 1_000, bytes: 20_000 };
    let batch = queue.next(limits).await.expect("next");
    let size: usize = batch.deliveries.iter().map(|d| d.event.size()).sum();
    assert!(size <= limits.bytes, "{} events with {size} bytes in memory", batch.deliveries.len());
    assert!(!batch.is_empty());
}

/// A relay comes back after an eviction and never hears that it was let in. It is, and works on.
#[tokio::test]
async fn a_lost_answer_to_joining_again_does_not_end_a_relay() {
    let store = MemoryStore::new();
    let queue = open(&store, options(Order::Key, 100)).await;
    store.fail_next(Verb::Join, When::After);
    store.evict_all();
    eventually(PATIENCE, "the relay to have joined again", async || store.calls(Verb::Join) == 2).await;
    store.publish(&[event("a")]);
    let batch = some(&queue).await;
    assert!(!batch.ownership.is_lost());
}

/// A relay whose leases can never be renewed again would own its partitions to no end and deliver nothing: whoever
/// asks it for events is told, and stops.
#[tokio::test]
async fn a_permanent_error_of_the_heartbeat_reaches_the_relay() {
    let store = MemoryStore::new();
    let queue = open(&store, options(Order::Key, 400)).await;
    let error = Error::permanent(Code::OVERLAP, "another group reads these streams now");
    store.fail_next_with(Verb::Heartbeat, When::Before, error);
    let told = eventually_some(PATIENCE, "the error", async || queue.next(ALL).await.err()).await;
    assert_eq!(told.code(), "overlap");
    queue.close().await.expect("close");
}
