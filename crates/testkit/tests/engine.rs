//! What the relay's engine guarantees about order, outages and sinks that break their contract, on the model, with
//! overlaps that a gate makes certain. Its ends and bounds are in `engine_ends.rs`.

mod kit;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use airtight_core::{
    Capabilities, Code, Delivery, Error, Order, Outcome, Policy, Sink,
    keyed::deliver_keyed,
    queue::{Queue, QueueOptions},
    state::State,
};
use airtight_testkit::{
    memory_queue::{MemoryStore, Verb, When},
    wait::eventually,
};
use futures::future::BoxFuture;

use crate::kit::{
    Door, PATIENCE, Running, TestSink, all_done, away, event, first_call, ms, options, policy, refused,
};

// --- order ----------------------------------------------------------------------------------------------

/// A claim began before the head of a key failed, and returns afterwards with a later event of that key.
async fn overlap(first: fn() -> Outcome) {
    for order in [Order::Key, Order::Total] {
        let store = MemoryStore::new();
        let door = Door::shut();
        let sink = first_call(&door, first);
        let head = store.publish(&[event("a")]);
        let relay = Running::start(&store, QueueOptions { order, ..options() }, &sink, policy());
        eventually(PATIENCE, "the head to be on its way", async || sink.arrived().len() == 1).await;

        let claim = store.pause_next(Verb::Claim, When::After);
        let later = store.publish(&[event("a")]);
        claim.reached().await;
        assert_eq!(store.row(&later[0].id).expect("a row").state, State::Processing, "claimed, not returned");
        let settles = store.calls(Verb::Settle);
        door.open();
        eventually(PATIENCE, "the head's verdict", async || store.calls(Verb::Settle) > settles).await;
        claim.open();
        all_done(&store, 2).await;
        let (head, later) = (head[0].seq, later[0].seq);
        assert_eq!(sink.of_key("a"), [head, head, later], "{order:?}: the later one must wait for its head");
        relay.stop().await.expect("stops");
        assert_eq!(store.row("1"), None);
        assert!(store.rows().iter().all(|row| row.lost_leases == 0));
    }
}

#[tokio::test]
async fn a_failed_head_holds_what_an_overlapping_claim_brings() {
    overlap(refused).await;
}

#[tokio::test]
async fn a_released_head_holds_what_an_overlapping_claim_brings() {
    overlap(away).await;
}

/// The verdict on a failed head cannot be settled at first. What stands behind it must not overtake it.
#[tokio::test]
async fn verdicts_that_could_not_be_settled_go_before_later_ones() {
    for when in [When::Before, When::After] {
        let store = MemoryStore::new();
        let door = Door::shut();
        let sink = first_call(&door, refused);
        let published = store.publish(&vec![event("a"); 4]);
        let relay = Running::start(&store, options(), &sink, policy());
        eventually(PATIENCE, "the head to be on its way", async || sink.arrived().len() == 1).await;
        store.fail_next(Verb::Settle, when);
        store.fail_next(Verb::Settle, when);
        door.open();
        all_done(&store, 4).await;
        let mut expected: Vec<i64> = published.iter().map(|p| p.seq).collect();
        expected.insert(0, published[0].seq);
        assert_eq!(sink.of_key("a"), expected, "{when:?}");
        relay.stop().await.expect("stops");
    }
}

/// A claim took effect and its answer never came: its rows come again, in order.
#[tokio::test]
async fn a_lost_answer_to_a_claim_keeps_the_order() {
    let store = MemoryStore::new();
    let published = store.publish(&vec![event("a"); 50]);
    store.fail_next(Verb::Claim, When::After);
    let sink = TestSink::fine();
    let relay = Running::start(&store, options(), &sink, policy());
    all_done(&store, 50).await;
    assert_eq!(sink.of_key("a"), published.iter().map(|p| p.seq).collect::<Vec<_>>());
    assert_eq!(relay.stop().await.expect("stops").delivered, 50);
}

/// With one call in flight and one key failing all the time, the other keys are delivered.
#[tokio::test]
async fn a_key_that_always_fails_is_in_nobodys_way() {
    let store = MemoryStore::new();
    let sink = TestSink::new(async |batch: Vec<Delivery>| {
        let outcome = |d: &Delivery| match d.event.aggregate_id.as_str() {
            "bad" => refused(),
            _ => Outcome::Delivered,
        };
        batch.iter().map(outcome).collect()
    })
    .caps(Capabilities { prefix_per_key: false, concurrency: 1, ..Capabilities::default() });
    store.publish(&vec![event("bad"); 30]);
    let relay = Running::start(&store, options(), &sink, policy());
    for n in 0..100 {
        store.publish(&[event(&format!("good{}", n % 7)), event("bad")]);
    }
    eventually(PATIENCE, "the good ones", async || store.count(State::Done) == 100).await;
    let bad = sink.of_key("bad");
    assert!(bad.iter().all(|seq| *seq == bad[0]), "only the head of a failing key is tried: {bad:?}");
    relay.stop().await.expect("stops");
}

/// A head is given up on, and its key goes on. Until the store knows the head is dead, a crash would bring it
/// again, and delivered then it would come after what was behind it.
#[tokio::test]
async fn a_key_goes_on_only_when_its_dead_head_is_settled() {
    for order in [Order::Key, Order::Total] {
        let store = MemoryStore::new();
        let door = Door::shut();
        let sink = first_call(&door, refused);
        let published = store.publish(&[event("a"), event("a"), event("a")]);
        let lease = QueueOptions { order, lease: ms(200), ..options() };
        let once = Policy { max_attempts: 1, ..policy() };
        let connection = store.connection();
        let relay = Running::start(&connection, lease.clone(), &sink, once.clone());
        eventually(PATIENCE, "the head to be on its way", async || sink.arrived().len() == 1).await;
        let settle = connection.pause_next(Verb::Settle, When::Before);
        door.open();
        settle.reached().await;
        let beats = connection.calls(Verb::Claim);
        let waited = Instant::now();
        eventually(PATIENCE, "a while to pass", async || {
            connection.calls(Verb::Claim) > beats + 2 || waited.elapsed() > ms(100)
        })
        .await;
        relay.kill().await;
        Running::drain(&store.connection(), lease, &sink, once).end().await.expect("drains");
        let first: Vec<i64> = sink.of_key("a");
        assert_eq!(first[0], published[0].seq);
        assert_eq!(first[1..], published.iter().map(|p| p.seq).collect::<Vec<_>>(), "{order:?}");
    }
}

/// With the verdict settled, a key goes on behind its dead head, from memory and in order.
#[tokio::test]
async fn a_key_goes_on_behind_its_dead_head() {
    let store = MemoryStore::new();
    let published = store.publish(&vec![event("a"); 12]);
    let sink = TestSink::new(async |batch: Vec<Delivery>| {
        let outcome = |d: &Delivery| match d.event.seq % 3 {
            0 => Outcome::Failed(Error::permanent(Code::custom("no"), "never")),
            1 => Outcome::Unknown(Error::retryable(Code::TIMEOUT, "who knows")),
            _ => Outcome::Delivered,
        };
        batch.iter().map(outcome).collect()
    });
    let relay = Running::drain(&store, options(), &sink, policy());
    let summary = relay.end().await.expect("drains");
    assert_eq!((summary.delivered, summary.dead, summary.unknown, summary.released), (4, 4, 4, 0));
    assert_eq!(sink.of_key("a"), published.iter().map(|p| p.seq).collect::<Vec<_>>());
}

/// A row that cannot be an event dies while its key is busy; that must not set the key free.
#[tokio::test]
async fn a_reject_leaves_a_busy_key_busy() {
    let store = MemoryStore::new();
    let door = Door::shut();
    let sink = first_call(&door, || Outcome::Delivered);
    let large = event("a").json_text(format!("\"{}\"", "x".repeat(500)));
    let published = store.publish(&[event("a"), large, event("a")]);
    let relay = Running::start(&store, QueueOptions { max_payload: 100, ..options() }, &sink, policy());
    eventually(PATIENCE, "the reject to be dead", async || store.count(State::Dead) == 1).await;
    let (waited, claims) = (Instant::now(), store.calls(Verb::Claim));
    eventually(PATIENCE, "a while to pass", async || {
        store.calls(Verb::Claim) > claims + 3 || waited.elapsed() > ms(100)
    })
    .await;
    assert_eq!(sink.of_key("a"), [published[0].seq], "one event of a key at a time");
    door.open();
    all_done(&store, 2).await;
    assert_eq!(sink.of_key("a"), [published[0].seq, published[2].seq]);
    relay.stop().await.expect("stops");
}

// --- the circuit ----------------------------------------------------------------------------------------

/// While nothing can be delivered, no attempt is spent, little is held and little is asked; then all goes on.
#[tokio::test]
async fn an_unavailable_sink_costs_no_attempt() {
    for order in [Order::None, Order::Key, Order::Total] {
        let store = MemoryStore::new();
        let down = Arc::new(AtomicBool::new(true));
        let is_down = down.clone();
        let sink = TestSink::new(move |batch: Vec<Delivery>| {
            let down = is_down.load(Ordering::SeqCst);
            async move { batch.iter().map(|_| if down { away() } else { Outcome::Delivered }).collect() }
        });
        let keys: Vec<_> = (0..120).map(|n| event(&format!("k{}", n % 9))).collect();
        store.publish(&keys);
        let relay = Running::start(&store, QueueOptions { order, ..options() }, &sink, policy());
        eventually(PATIENCE, "the circuit to open thrice", async || relay.summary().circuit_opened >= 3)
            .await;
        assert!(relay.stats.is_circuit_open());
        assert!(store.count(State::Processing) <= 60, "bounded by what may be in flight");
        let tried = sink.arrived().len();
        assert!(tried <= 60, "one event at a time after the first try, not {tried}");
        down.store(false, Ordering::SeqCst);
        all_done(&store, 120).await;
        assert!(!relay.stats.is_circuit_open());
        assert!(store.rows().iter().all(|row| row.attempts == 1), "{order:?}: an outage costs no attempt");
        let summary = relay.stop().await.expect("stops");
        assert_eq!((summary.retried, summary.dead, summary.delivered), (0, 0, 120));
    }
}

/// A wrong password at the start is an outage, too; a hopeless configuration is an end.
#[tokio::test]
async fn opening_the_sink_may_fail() {
    let store = MemoryStore::new();
    store.publish(&[event("a")]);
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = tries.clone();
    let sink = TestSink::fine().on_open(move || {
        let n = counted.fetch_add(1, Ordering::SeqCst);
        async move { if n < 3 { Err(Error::unavailable(Code::custom("password"), "wrong")) } else { Ok(()) } }
    });
    let relay = Running::start(&store, options(), &sink, policy());
    all_done(&store, 1).await;
    assert_eq!(tries.load(Ordering::SeqCst), 4);
    assert_eq!(store.rows()[0].attempts, 1);
    relay.stop().await.expect("stops");

    let sink = TestSink::fine().on_open(async || Err(Error::permanent(Code::BAD_NAME, "no such thing")));
    let error = Running::start(&store, options(), &sink, policy()).end().await.expect_err("it cannot go on");
    assert_eq!(error.code(), "bad_name");
    assert_eq!(store.relays(), 0, "it has left");
}

/// The sink is there again but there is nothing to deliver: the circuit is not shown as open for ever.
#[tokio::test]
async fn a_sink_that_opened_again_is_not_left_alone() {
    let store = MemoryStore::new();
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = tries.clone();
    let sink = TestSink::fine().on_open(move || {
        let n = counted.fetch_add(1, Ordering::SeqCst);
        async move { if n < 2 { Err(Error::unavailable(Code::REFUSED, "starting")) } else { Ok(()) } }
    });
    let relay = Running::start(&store, options(), &sink, policy());
    eventually(PATIENCE, "the sink to be opened", async || tries.load(Ordering::SeqCst) == 3).await;
    eventually(PATIENCE, "the circuit to be shown shut", async || !relay.stats.is_circuit_open()).await;
    relay.stop().await.expect("stops");
}

/// Opening the sink again hangs. Verdicts are settled meanwhile, and a shutdown does not wait for it.
#[tokio::test]
async fn a_sink_that_hangs_in_open_stops_nothing_else() {
    let store = MemoryStore::new();
    store.publish(&[event("a"), event("b")]);
    let opens = Arc::new(AtomicUsize::new(0));
    let (counted, slow) = (opens.clone(), Door::shut());
    let door = slow.clone();
    let sink = TestSink::new(move |batch: Vec<Delivery>| {
        let slow = slow.clone();
        async move {
            if batch[0].event.aggregate_id == "b" {
                slow.pass().await;
                return vec![Outcome::Delivered; batch.len()];
            }
            batch.iter().map(|_| away()).collect()
        }
    })
    .caps(Capabilities { max_batch_events: 1, concurrency: 2, ..Capabilities::default() })
    .on_open(move || {
        let n = counted.fetch_add(1, Ordering::SeqCst);
        async move { if n == 0 { Ok(()) } else { std::future::pending().await } }
    });
    let relay = Running::start(&store, options(), &sink, policy());
    eventually(PATIENCE, "the sink to hang in open", async || opens.load(Ordering::SeqCst) == 2).await;
    door.open();
    eventually(PATIENCE, "b to be settled", async || store.count(State::Done) == 1).await;
    relay.stop().await.expect("a shutdown is heard");

    let sink = TestSink::fine().on_open(std::future::pending);
    let relay = Running::start(&store, options(), &sink, policy());
    eventually(PATIENCE, "the relay to have joined", async || store.relays() == 1).await;
    relay.stop().await.expect("a shutdown is heard at the first open, too");
    assert_eq!(store.relays(), 0, "it has left");
}

// --- sinks that break their contract --------------------------------------------------------------------

/// A sink that answers for fewer events than it was given cannot lose the rest.
#[tokio::test]
async fn a_short_answer_loses_nothing() {
    let store = MemoryStore::new();
    store.publish(&(0..10).map(|n| event(&n.to_string())).collect::<Vec<_>>());
    let calls = Arc::new(AtomicUsize::new(0));
    let sink = TestSink::new(move |batch: Vec<Delivery>| {
        let short = if calls.fetch_add(1, Ordering::SeqCst) == 0 { 3 } else { batch.len() };
        async move { vec![Outcome::Delivered; short] }
    });
    let relay = Running::start(&store, options(), &sink, policy());
    all_done(&store, 10).await;
    assert_eq!(sink.arrived().len(), 17, "seven came twice");
    let summary = relay.stop().await.expect("stops");
    assert_eq!((summary.delivered, summary.retried), (10, 7));
}

/// Panics on its first calls: before it returns a future, then inside it.
#[derive(Clone, Default)]
struct Panics(Arc<AtomicUsize>);

impl Sink for Panics {
    fn deliver<'a, 'b, 'f>(&'a self, batch: &'b [Delivery]) -> BoxFuture<'f, Vec<Outcome>>
    where
        'a: 'f,
        'b: 'f,
        Self: 'f,
    {
        let call = self.0.fetch_add(1, Ordering::SeqCst);
        assert!(call != 0, "panics before there is a future");
        let count = batch.len();
        Box::pin(async move {
            assert!(call != 1, "panics inside the future");
            vec![Outcome::Delivered; count]
        })
    }
}

/// A panic in a sink is a failed attempt, wherever it happens.
#[tokio::test]
async fn a_panic_in_the_sink_is_a_failed_attempt() {
    let store = MemoryStore::new();
    store.publish(&[event("a"), event("b")]);
    let source = Arc::new(Queue::new(store.clone(), options()));
    let relay = Running::of(source, &Panics::default(), policy(), false);
    all_done(&store, 2).await;
    assert!(store.rows().iter().all(|row| row.attempts == 3 && row.error_code.as_deref() == Some("panic")));
    relay.stop().await.expect("stops");
}

/// "Skipped" means that something before it failed. From a sink that says so for no reason, it is a failure, or
/// the event would go round for ever at no cost.
#[tokio::test]
async fn a_skip_without_a_failure_is_a_failure() {
    let store = MemoryStore::new();
    store.publish(&[event("a"), event("a")]);
    let sink = TestSink::new(async |batch: Vec<Delivery>| vec![Outcome::Skipped; batch.len()]);
    let relay = Running::start(&store, options(), &sink, Policy { max_attempts: 3, ..policy() });
    eventually(PATIENCE, "both to be dead", async || store.count(State::Dead) == 2).await;
    assert_eq!(sink.arrived().len(), 6, "three attempts each");
    relay.stop().await.expect("stops");
}

/// What was skipped behind a failure costs no attempt.
#[tokio::test]
async fn a_skip_behind_a_failure_costs_nothing() {
    let store = MemoryStore::new();
    store.publish(&vec![event("a"); 3]);
    let failed = Arc::new(AtomicBool::new(false));
    let sink = TestSink::new(move |batch: Vec<Delivery>| {
        let fail = !failed.swap(true, Ordering::SeqCst);
        async move {
            if !fail {
                return vec![Outcome::Delivered; batch.len()];
            }
            let skipped = batch.iter().skip(1).map(|_| Outcome::Skipped);
            std::iter::once(refused()).chain(skipped).collect()
        }
    })
    .caps(Capabilities { prefix_per_key: true, ..Capabilities::default() });
    let relay = Running::start(&store, options(), &sink, policy());
    all_done(&store, 3).await;
    let attempts: Vec<u32> = store.rows().iter().map(|row| row.attempts).collect();
    assert_eq!(attempts, [2, 1, 1]);
    relay.stop().await.expect("stops");
}

/// A sink that finds nobody there leaves out what it has not sent yet, wherever that stands in the batch: it costs these
/// events no attempt, however often it happens.
#[tokio::test]
async fn a_skip_in_front_of_an_outage_costs_nothing() {
    let store = MemoryStore::new();
    let mut events = vec![event("good"); 60];
    events.insert(10, event("missing"));
    store.publish(&events);
    let refusals = Arc::new(AtomicUsize::new(0));
    let sink = TestSink::new(move |batch: Vec<Delivery>| {
        let refusals = refusals.clone();
        async move {
            deliver_keyed(&batch, 8, async |at| {
                tokio::task::yield_now().await;
                let is_missing = batch[at].event.aggregate_id == "missing";
                if is_missing && refusals.fetch_add(1, Ordering::SeqCst) < 20 {
                    away()
                } else {
                    Outcome::Delivered
                }
            })
            .await
        }
    })
    .caps(Capabilities { prefix_per_key: true, ..Capabilities::default() });
    let relay = Running::start(&store, options(), &sink, Policy { max_attempts: 2, ..policy() });
    eventually(PATIENCE, "all to end", async || store.count(State::Done) + store.count(State::Dead) == 61)
        .await;
    assert_eq!(store.count(State::Dead), 0, "an outage is nobody's fault");
    assert!(store.rows().iter().all(|row| row.attempts == 1), "an outage costs no attempt");
    relay.stop().await.expect("stops");
}
