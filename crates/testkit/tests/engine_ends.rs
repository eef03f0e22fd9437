//! How the relay's engine ends, drains, stays within its bounds and loses leases, on the model.

mod kit;

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use airtight_core::{
    Capabilities, Code, Delivery, Error, Limits, Order, Outcome, Policy, Source,
    queue::{Queue, QueueOptions},
    state::State,
};
use airtight_testkit::{
    logged::Logged,
    memory_queue::{MemoryStore, Verb, When},
    wait::eventually,
};

use crate::kit::{
    Door, PATIENCE, Running, TestSink, all_done, event, first_call, lock, ms, options, policy, refused,
};

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
        Error::unavailable(Code::NOT_PERMITTED, "no UPDATE on this table"),
    );
    let relay = Running::start(&store, options(), &TestSink::fine(), policy());
    assert_eq!(relay.end().await.expect_err("it cannot go on").code(), "not_permitted");
    assert_eq!(store.relays(), 0, "it has left");
}

/// What is held cannot be given back at the end; the relay leaves all the same, and another need not wait.
#[tokio::test]
async fn a_close_leaves_although_it_cannot_give_back() {
    let store = MemoryStore::new();
    store.publish(&[event("a")]);
    let queue = Queue::new(store.clone(), options());
    queue.open(&Capabilities::default()).await.expect("opens");
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
        store.fail_next_with(verb, When::Before, Error::permanent(Code::NO_TABLE, "it was dropped"));
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
        let relay = Running::drain(&store, QueueOptions { order, ..options() }, &sink, policy());
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
                "a" => Outcome::Unknown(Error::retryable(Code::TIMEOUT, "who knows")),
                _ => Outcome::Delivered,
            };
            batch.iter().map(outcome).collect()
        });
        let options = QueueOptions { order, block_on_dead: true, ..options() };
        Running::drain(&store, options, &sink, policy()).end().await.expect("ends by itself");
        let done = if order == Order::Key { 1 } else { 0 };
        assert_eq!((store.count(State::Unknown), store.count(State::Done)), (1, done), "{order:?}");
    }
}

// --- leases ---------------------------------------------------------------------------------------------

/// A lease lost during a delivery is counted as that, and not as a failure of the event. The log does not say whose the
/// event is now: after a restart of the server it may be nobody's.
#[tokio::test]
async fn a_lost_lease_is_fenced_and_not_failed() {
    let logged = Logged::start();
    let store = MemoryStore::new();
    let published = store.publish(&[event("a")]);
    let door = Door::shut();
    let sink = first_call(&door, refused);
    let free = QueueOptions { order: Order::None, ..options() };
    let relay = Running::start(&store.connection(), free.clone(), &sink, policy());
    eventually(PATIENCE, "a delivery", async || !sink.arrived().is_empty()).await;
    store.expire_leases();
    let heir = Queue::new(store.connection(), free);
    heir.open(&Capabilities::default()).await.expect("opens");
    let taken = heir.next(Limits { events: 10, bytes: 1 << 20 }).await.expect("next");
    assert_eq!(taken.deliveries.len(), 1);
    door.open();
    eventually(PATIENCE, "the settle to be refused", async || relay.summary().fenced == 1).await;
    let row = store.row(&published[0].id).expect("a row");
    assert_eq!((row.state, row.attempts, row.error_code), (State::Processing, 1, None), "the heir's");
    assert_eq!(logged.count("this relay no longer owns these events, and they are delivered again"), 1);
    assert_eq!(logged.count("another relay owns"), 0);
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
        queue.open(&Capabilities::default()).await.expect("opens");
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
