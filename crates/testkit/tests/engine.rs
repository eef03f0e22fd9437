//! What the relay's engine guarantees, on the model, with overlaps that a gate makes certain.

mod kit;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{
    Capabilities, Delivery, Error, Limits, Order, Outcome, Policy, Sink, Source,
    queue::{Queue, QueueOptions},
    state::State,
};
use airtight_testkit::{
    memory_queue::{MemoryStore, Verb, When},
    wait::eventually,
};
use futures::future::BoxFuture;

use crate::kit::{Door, PATIENCE, Running, TestSink, away, event, lock, ms, options, policy, refused};

async fn all_done(store: &MemoryStore, count: usize) {
    eventually(PATIENCE, "all events to be done", async || store.count(State::Done) == count).await;
    assert_eq!(store.violations(), Vec::<String>::new());
}

/// A sink whose first call waits for the door and then answers with `first`; all others deliver.
fn first_call(door: &Door, first: fn() -> Outcome) -> TestSink {
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

// --- order ----------------------------------------------------------------------------------------------

/// A claim began before the head of a key failed, and returns afterwards with a later event of that key.
async fn overlap(first: fn() -> Outcome) {
    for order in [Order::Key, Order::Total] {
        let store = MemoryStore::new();
        let door = Door::shut();
        let sink = first_call(&door, first);
        let head = store.publish(&[event("a")]);
        let relay =
            Running::start(&store, QueueOptions { order, ..options() }, &sink, Policy { order, ..policy() });
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
        let once = Policy { order, max_attempts: 1, ..policy() };
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
            0 => Outcome::Failed(Error::permanent("no", "never")),
            1 => Outcome::Unknown(Error::retryable("timeout", "who knows")),
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
        let relay =
            Running::start(&store, QueueOptions { order, ..options() }, &sink, Policy { order, ..policy() });
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
        async move { if n < 3 { Err(Error::unavailable("password", "wrong")) } else { Ok(()) } }
    });
    let relay = Running::start(&store, options(), &sink, policy());
    all_done(&store, 1).await;
    assert_eq!(tries.load(Ordering::SeqCst), 4);
    assert_eq!(store.rows()[0].attempts, 1);
    relay.stop().await.expect("stops");

    let sink = TestSink::fine().on_open(async || Err(Error::permanent("bad_topic", "no such thing")));
    let error = Running::start(&store, options(), &sink, policy()).end().await.expect_err("it cannot go on");
    assert_eq!(error.code(), "bad_topic");
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
        async move { if n < 2 { Err(Error::unavailable("refused", "starting")) } else { Ok(()) } }
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

// --- stopping -------------------------------------------------------------------------------------------

/// A shutdown gives back what is not delivered, at no cost, even when a delivery hangs past the grace.
#[tokio::test]
async fn a_shutdown_gives_back_what_hangs() {
    let store = MemoryStore::new();
    store.publish(&(0..40).map(|n| event(&format!("k{}", n % 5))).collect::<Vec<_>>());
    let sink = TestSink::new(async |_| std::future::pending().await);
    let relay = Running::start(&store, options(), &sink, policy());
    eventually(PATIENCE, "deliveries to hang", async || !sink.arrived().is_empty()).await;
    relay.stop().await.expect("stops after its grace");
    assert_eq!(store.count(State::Pending), 40);
    assert!(store.rows().iter().all(|row| row.attempts == 0 && row.lost_leases == 0), "at no cost");
    assert_eq!(store.relays(), 0, "it has left");
}

/// A shutdown waits for what is under way, and settles it.
#[tokio::test]
async fn a_shutdown_finishes_what_is_under_way() {
    let store = MemoryStore::new();
    store.publish(&[event("a"), event("a")]);
    let door = Door::shut();
    let sink = first_call(&door, || Outcome::Delivered);
    let relay = Running::start(&store, options(), &sink, Policy { grace: PATIENCE, ..policy() });
    eventually(PATIENCE, "a delivery", async || !sink.arrived().is_empty()).await;
    relay.shutdown.cancel();
    eventually(PATIENCE, "the rest to be given back", async || store.count(State::Pending) == 1).await;
    door.open();
    assert_eq!(relay.end().await.expect("stops").delivered, 1);
    assert_eq!((store.count(State::Done), store.count(State::Pending)), (1, 1));
}

/// A shutdown while the store is away ends all the same; the leases run out by themselves.
#[tokio::test]
async fn a_shutdown_without_a_store_ends() {
    let store = MemoryStore::new();
    store.publish(&[event("a")]);
    let door = Door::shut();
    let sink = first_call(&door, || Outcome::Delivered);
    let relay = Running::start(&store, options(), &sink, policy());
    eventually(PATIENCE, "a delivery", async || !sink.arrived().is_empty()).await;
    store.set_down(true);
    door.open();
    relay.shutdown.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(30), relay.task).await.expect("it ends");
    ended.expect("no panic").expect("not an error");
}

/// Whatever hangs at a shutdown, the relay ends and leaves: renewing on and on, it would keep its partitions from
/// everyone.
#[tokio::test]
async fn a_shutdown_ends_whatever_hangs() {
    let quick = Policy { grace: ms(50), ..policy() };
    let hung = |verb| {
        let store = MemoryStore::new();
        store.publish(&[event("a")]);
        let gate = store.pause_next(verb, When::After);
        (store, gate)
    };
    let ended = async |relay: Running, store: MemoryStore| {
        relay.shutdown.cancel();
        eventually(ms(9_000), "the relay to leave", async || store.relays() == 0).await;
        relay.end().await.expect("stops");
    };
    let (claim, claim_gate) = hung(Verb::Claim);
    let (settle, settle_gate) = hung(Verb::Settle);
    let closing = MemoryStore::new();
    closing.publish(&[event("a")]);
    let sink = TestSink::fine();
    let relays = (
        Running::start(&claim, options(), &sink, quick.clone()),
        Running::start(&settle, options(), &sink, quick.clone()),
        Running::start(&closing, options(), &sink.clone().hang_in_close(), quick),
    );
    claim_gate.reached().await;
    settle_gate.reached().await;
    all_done(&closing, 1).await;
    futures::join!(ended(relays.0, claim), ended(relays.1, settle), ended(relays.2, closing));
}

/// A relay that is stopped, or fails, while it opens its source leaves nothing of itself behind.
#[tokio::test]
async fn an_end_while_opening_leaves_nothing_behind() {
    let store = MemoryStore::new();
    let beat = store.pause_next(Verb::Heartbeat, When::After);
    let relay = Running::start(&store, options(), &TestSink::fine(), policy());
    beat.reached().await;
    assert_eq!(store.relays(), 1, "it has joined");
    relay.stop().await.expect("stops");
    assert_eq!(store.relays(), 0, "it has left");

    store.fail_next_with(
        Verb::Heartbeat,
        When::After,
        Error::unavailable("rights", "no UPDATE on this table"),
    );
    let relay = Running::start(&store, options(), &TestSink::fine(), policy());
    assert_eq!(relay.end().await.expect_err("it cannot go on").code(), "rights");
    assert_eq!(store.relays(), 0, "it has left");
}

/// What is held cannot be given back at the end; the relay leaves all the same, and another need not wait.
#[tokio::test]
async fn a_close_leaves_although_it_cannot_give_back() {
    let store = MemoryStore::new();
    store.publish(&[event("a")]);
    let queue = Queue::new(store.clone(), options());
    queue.open().await.expect("opens");
    assert_eq!(queue.next(Limits { events: 1, bytes: 1_000 }).await.expect("next").deliveries.len(), 1);
    store.fail_next(Verb::Settle, When::Before);
    queue.close().await.expect_err("it says that something went wrong");
    assert_eq!(store.relays(), 0, "it has left");
}

// --- bounds ---------------------------------------------------------------------------------------------

/// Memory stays within the bound in bytes, and an event that is larger than all of it passes.
#[tokio::test]
async fn the_bound_in_bytes_holds() {
    let store = MemoryStore::new();
    let large =
        |n: usize, size: usize| event(&format!("k{n}")).json_text(format!("\"{}\"", "x".repeat(size)));
    store.publish(&(0..150).map(|n| large(n, 500 + n * 30)).collect::<Vec<_>>());
    let sink = TestSink::new(async |batch: Vec<Delivery>| {
        tokio::task::yield_now().await;
        vec![Outcome::Delivered; batch.len()]
    });
    let bound = 40_000;
    let tight = Policy { in_flight_bytes: bound, ..policy() };
    let relay = Running::start(&store, options(), &sink, tight);
    all_done(&store, 150).await;
    let peak = relay.summary().peak_bytes;
    assert!(peak <= bound as u64, "{peak} bytes in memory");
    assert!(peak > bound as u64 / 4, "the bound is made use of: {peak}");
    store.publish(&[large(0, 200_000)]);
    all_done(&store, 151).await;
    assert_eq!(relay.stop().await.expect("stops").delivered, 151);
}

/// When verdicts do not get through, nothing more is claimed: what is delivered and not settled is bounded, too.
#[tokio::test]
async fn unsettled_events_are_bounded() {
    for slow in [true, false] {
        let store = MemoryStore::new();
        store.publish(&(0..2_000).map(|n| event(&format!("k{}", n % 50))).collect::<Vec<_>>());
        let gate = slow.then(|| store.pause_next(Verb::Settle, When::Before));
        if !slow {
            (0..4).for_each(|_| store.fail_next(Verb::Settle, When::Before));
        }
        let sink = TestSink::fine();
        let relay = Running::start(&store, options(), &sink, policy());
        let end = Instant::now() + ms(400);
        eventually(PATIENCE, "a while to pass", async || {
            assert!(store.count(State::Processing) <= 2 * 60, "{} claimed", store.count(State::Processing));
            Instant::now() > end
        })
        .await;
        if let Some(gate) = gate {
            gate.open();
        }
        all_done(&store, 2_000).await;
        relay.stop().await.expect("stops");
    }
}

/// A settle that can never succeed ends the relay, with the reason.
#[tokio::test]
async fn a_permanent_error_of_the_source_ends_the_relay() {
    for verb in [Verb::Claim, Verb::Settle] {
        let store = MemoryStore::new();
        store.publish(&[event("a")]);
        store.fail_next_with(verb, When::Before, Error::permanent("no_table", "it was dropped"));
        let error = Running::start(&store, options(), &TestSink::fine(), policy()).end().await;
        assert_eq!(error.expect_err("it cannot go on").code(), "no_table", "{verb:?}");
        assert_eq!(store.relays(), 0, "it has left");
        assert_eq!(store.count(State::Processing), 0, "and holds nothing");
    }
}

/// An idle relay asks the store once per poll interval and not more.
#[tokio::test]
async fn an_idle_relay_is_quiet() {
    let store = MemoryStore::new();
    let sink = TestSink::fine();
    let relay = Running::start(&store, options(), &sink, Policy { poll: ms(50), ..policy() });
    eventually(PATIENCE, "the first claim", async || store.calls(Verb::Claim) > 0).await;
    let (since, claims) = (Instant::now(), store.calls(Verb::Claim));
    eventually(PATIENCE, "half a second", async || since.elapsed() > ms(500)).await;
    let asked = store.calls(Verb::Claim) - claims;
    assert!((5..=12).contains(&asked), "{asked} claims in ten poll intervals");
    assert_eq!((store.calls(Verb::Settle), store.calls(Verb::Backlog)), (0, 0));
    relay.stop().await.expect("stops");
}

// --- draining -------------------------------------------------------------------------------------------

/// A drain ends on an empty backlog, and not while something waits for its retry.
#[tokio::test]
async fn a_drain_waits_for_retries_and_ends() {
    for order in [Order::None, Order::Key, Order::Total] {
        let store = MemoryStore::new();
        store.publish(&(0..30).map(|n| event(&format!("k{}", n % 4))).collect::<Vec<_>>());
        let failed = Arc::new(Mutex::new(std::collections::HashSet::new()));
        let sink = TestSink::new(move |batch: Vec<Delivery>| {
            let failed = failed.clone();
            async move {
                let outcome = |d: &Delivery| match d.event.seq % 3 == 0 && lock(&failed).insert(d.event.seq) {
                    true => refused(),
                    false => Outcome::Delivered,
                };
                batch.iter().map(outcome).collect()
            }
        });
        let relay =
            Running::drain(&store, QueueOptions { order, ..options() }, &sink, Policy { order, ..policy() });
        let summary = relay.end().await.expect("ends by itself");
        assert_eq!((store.count(State::Done), summary.delivered, summary.retried), (30, 30, 10), "{order:?}");
        assert_eq!(store.relays(), 0);
    }
}

/// A drain ends although keys are blocked, or an outcome is not known: only a person moves those.
#[tokio::test]
async fn a_drain_ends_with_blocked_keys() {
    for order in [Order::Key, Order::Total] {
        let store = MemoryStore::new();
        store.publish(&[event("a"), event("a"), event("b"), event("a")]);
        let sink = TestSink::new(async |batch: Vec<Delivery>| {
            let outcome = |d: &Delivery| match d.event.aggregate_id.as_str() {
                "a" => Outcome::Unknown(Error::retryable("timeout", "who knows")),
                _ => Outcome::Delivered,
            };
            batch.iter().map(outcome).collect()
        });
        let options = QueueOptions { order, block_on_dead: true, ..options() };
        let policy = Policy { order, block_on_dead: true, ..policy() };
        Running::drain(&store, options, &sink, policy).end().await.expect("ends by itself");
        let done = if order == Order::Key { 1 } else { 0 };
        assert_eq!((store.count(State::Unknown), store.count(State::Done)), (1, done), "{order:?}");
    }
}

// --- leases ---------------------------------------------------------------------------------------------

/// A lease lost during a delivery is counted as that, and not as a failure of the event.
#[tokio::test]
async fn a_lost_lease_is_fenced_and_not_failed() {
    let store = MemoryStore::new();
    let published = store.publish(&[event("a")]);
    let door = Door::shut();
    let sink = first_call(&door, refused);
    let free = QueueOptions { order: Order::None, ..options() };
    let relay =
        Running::start(&store.connection(), free.clone(), &sink, Policy { order: Order::None, ..policy() });
    eventually(PATIENCE, "a delivery", async || !sink.arrived().is_empty()).await;
    store.expire_leases();
    let heir = Queue::new(store.connection(), free);
    heir.open().await.expect("opens");
    let taken = heir.next(Limits { events: 10, bytes: 1 << 20 }).await.expect("next");
    assert_eq!(taken.deliveries.len(), 1);
    door.open();
    eventually(PATIENCE, "the settle to be refused", async || relay.summary().fenced == 1).await;
    let row = store.row(&published[0].id).expect("a row");
    assert_eq!((row.state, row.attempts, row.error_code), (State::Processing, 1, None), "the heir's");
    relay.stop().await.expect("stops");
}

/// An event that relays keep vanishing with is dead at last, and nothing else is.
#[tokio::test]
async fn an_event_that_crashes_relays_is_dead_at_last() {
    let store = MemoryStore::new();
    let poison = store.publish(&[event("a")]);
    let short = QueueOptions { lease: ms(80), ..options() };
    let crashes = Policy::default().crashes_alone + airtight_core::queue::SUSPECT_AFTER;
    for _ in 0..crashes {
        let queue = Queue::new(store.clone(), short.clone());
        queue.open().await.expect("opens");
        eventually(PATIENCE, "the event", async || {
            !queue.next(Limits { events: 10, bytes: 1 << 20 }).await.expect("next").is_empty()
        })
        .await;
    }
    store.publish(&[event("a"), event("b")]);
    let relay = Running::start(&store, short, &TestSink::fine(), policy());
    all_done(&store, 2).await;
    let row = store.row(&poison[0].id).expect("a row");
    assert_eq!((row.state, row.error_code.as_deref()), (State::Dead, Some("lost_leases")));
    relay.stop().await.expect("stops");
}
