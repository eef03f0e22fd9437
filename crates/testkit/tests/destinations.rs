//! What the engine does when one destination of a sink is away and the others are not, over the model of a queue and of a
//! log: nobody else waits, nothing is spent, nothing is held in memory, and keys stay in order.

mod kit;

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex},
};

use airtight_core::{
    Capabilities, Code, Delivery, Error, Event, NewEvent, Order, Outcome, Policy, Result, Sink,
    admin::{Acted, Admin},
    keyed::deliver_keyed,
    log::{Log, LogOptions, OnFailure},
    queue::QueueOptions,
    state::State,
};
use airtight_testkit::{memory_log::MemoryLogStore, memory_queue::MemoryStore, wait::eventually};
use async_trait::async_trait;

use crate::kit::{PATIENCE, Running, lock, ms, options, policy};

/// A sink whose destinations are the streams of its events.
#[derive(Clone, Default)]
struct Streams(Arc<Mutex<World>>);

#[derive(Default)]
struct World {
    away: HashSet<String>,
    /// Stream, key and seq of what was taken.
    taken: Vec<(String, String, i64)>,
    /// How often each destination was tried in vain.
    tried: BTreeMap<String, usize>,
    /// The most events for destinations that are away that were in one call.
    most_at_once: usize,
}

impl Streams {
    fn without(away: &[&str]) -> Self {
        let sink = Self::default();
        lock(&sink.0).away = away.iter().map(|name| (*name).to_owned()).collect();
        sink
    }

    fn back(&self, name: &str) {
        lock(&self.0).away.remove(name);
    }

    fn taken(&self) -> usize {
        lock(&self.0).taken.len()
    }

    fn tried(&self, name: &str) -> usize {
        lock(&self.0).tried.get(name).copied().unwrap_or(0)
    }

    /// Every key was taken in order, and nothing twice.
    fn assert_order(&self) {
        let mut last: BTreeMap<String, i64> = BTreeMap::new();
        for (_, key, seq) in &lock(&self.0).taken {
            let before = last.insert(key.clone(), *seq).unwrap_or(0);
            assert!(before < *seq, "{key}: {seq} after {before}");
        }
    }
}

#[async_trait]
impl Sink for Streams {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, concurrency: 4, max_batch_events: 50, ..Capabilities::default() }
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        vec![event.stream.clone()]
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        {
            let mut world = lock(&self.0);
            let away = batch.iter().filter(|d| world.away.contains(&d.event.stream)).count();
            world.most_at_once = world.most_at_once.max(away);
        }
        deliver_keyed(batch, 8, async |at| {
            tokio::task::yield_now().await;
            let event = &batch[at].event;
            let mut world = lock(&self.0);
            if world.away.contains(&event.stream) {
                *world.tried.entry(event.stream.clone()).or_default() += 1;
                let what = format!("there is no `{}`", event.stream);
                return Outcome::Failed(Error::unavailable(Code::custom("missing"), what).at(&event.stream));
            }
            world.taken.push((event.stream.clone(), event.aggregate_id.clone(), event.seq));
            Outcome::Delivered
        })
        .await
    }
}

fn event(stream: &str, key: impl std::fmt::Display) -> NewEvent {
    NewEvent::new(stream, "Tested", "Test", key.to_string()).json_text("{}")
}

fn quick() -> Policy {
    Policy { in_flight_events: 200, batch_events: 100, ..policy() }
}

/// As an operator saw it: a missing topic first, healthy events afterwards. And what the operator does then.
#[tokio::test]
async fn one_destination_that_is_away_keeps_nobody_else_waiting() {
    for order in [Order::Key, Order::None] {
        let store = MemoryStore::new();
        let sink = Streams::without(&["bad"]);
        let bad: Vec<NewEvent> = (0..40).map(|n| event("bad", format!("b{}", n % 20))).collect();
        let bad = store.publish(&bad);
        let relay = Running::start(&store, QueueOptions { order, ..options() }, &sink, quick());
        eventually(PATIENCE, "the destination to refuse", async || sink.tried("bad") > 0).await;
        let good: Vec<NewEvent> = (0..300).map(|n| event("good", format!("g{}", n % 30))).collect();
        store.publish(&good);
        eventually(PATIENCE, "the healthy ones", async || store.count(State::Done) == 300).await;
        assert_eq!(relay.summary().destinations_away, 1);
        assert_eq!(relay.summary().circuit_opened, 0);
        // They wait in the store, in nobody's hands but for the moment of a look, and have cost nothing.
        eventually(PATIENCE, "all of them to wait", async || store.count(State::Processing) == 0).await;
        assert!(store.rows().iter().all(|row| row.attempts <= 1 && row.state != State::Dead));
        let status = Admin::status(&store).await.expect("status");
        let [waiting] = &status.away[..] else { panic!("{order:?}: {:?}", status.away) };
        assert_eq!(waiting.message, "bad is away: there is no `bad`");
        eventually(PATIENCE, "one of them to be discarded", async || {
            store.discard(&bad[0].id).await.expect("discard") == Acted::Yes
        })
        .await;
        sink.back("bad");
        eventually(PATIENCE, "all the others", async || store.count(State::Done) == 339).await;
        assert_eq!(relay.summary().destinations_away, 0);
        assert!(store.rows().iter().all(|row| row.attempts <= 1), "none has cost an attempt");
        if order == Order::Key {
            sink.assert_order();
        }
        assert_eq!(store.violations(), Vec::<String>::new());
        relay.stop().await.expect("stops");
    }
}

/// An event waits for its destination, and so does the next of its key, though that goes elsewhere.
#[tokio::test]
async fn a_key_waits_behind_its_event_and_others_go_on() {
    let store = MemoryStore::new();
    let sink = Streams::without(&["bad"]);
    let published = store.publish(&[
        event("good", "mixed"),
        event("bad", "mixed"),
        event("good", "mixed"),
        event("bad", "other"),
        event("good", "free"),
    ]);
    let relay = Running::start(&store, options(), &sink, quick());
    eventually(PATIENCE, "those that can go", async || sink.taken() == 2).await;
    store.publish(&[event("good", "mixed"), event("good", "free")]);
    eventually(PATIENCE, "those that can go", async || sink.taken() == 3 && sink.tried("bad") > 3).await;
    assert_eq!(store.row(&published[2].id).expect("a row").state, State::Pending);
    sink.back("bad");
    eventually(PATIENCE, "all", async || store.count(State::Done) == 7).await;
    sink.assert_order();
    assert_eq!(store.violations(), Vec::<String>::new());
    relay.stop().await.expect("stops");
}

/// Total order means that everything waits.
#[tokio::test]
async fn with_total_order_everything_waits() {
    let store = MemoryStore::new();
    let sink = Streams::without(&["bad"]);
    store.publish(&[event("bad", "a"), event("good", "b")]);
    let order = Order::Total;
    let relay = Running::start(&store, QueueOptions { order, ..options() }, &sink, quick());
    eventually(PATIENCE, "several tries", async || sink.tried("bad") > 3).await;
    assert_eq!(sink.taken(), 0);
    sink.back("bad");
    eventually(PATIENCE, "both", async || store.count(State::Done) == 2).await;
    sink.assert_order();
    relay.stop().await.expect("stops");
}

/// However many wait: they are not all tried, not all in memory, and the claims are free for others.
#[tokio::test]
async fn thousands_that_wait_fill_nothing_and_starve_nobody() {
    let store = MemoryStore::new();
    let sink = Streams::without(&["bad"]);
    for chunk in 0..30 {
        let bad: Vec<NewEvent> = (0..100).map(|n| event("bad", chunk * 100 + n)).collect();
        store.publish(&bad);
    }
    let relay = Running::start(&store, options(), &sink, quick());
    eventually(PATIENCE, "all of them to be put aside", async || {
        relay.summary().waiting >= 3_000 && store.count(State::Processing) < 200
    })
    .await;
    for n in 0..20 {
        store.publish(&(0..50).map(|k| event("good", format!("g{}", k + n))).collect::<Vec<_>>());
    }
    eventually(PATIENCE, "the healthy ones", async || sink.taken() == 1_000).await;
    // Those of the first batches, which nobody could know of, and then one at a time.
    assert!(sink.tried("bad") < 600, "{} tries", sink.tried("bad"));
    let before = sink.tried("bad");
    lock(&sink.0).most_at_once = 0;
    eventually(PATIENCE, "a few probes", async || sink.tried("bad") >= before + 4).await;
    assert_eq!(lock(&sink.0).most_at_once, 1, "a probe is one event");
    sink.back("bad");
    eventually(PATIENCE * 3, "all", async || store.count(State::Done) == 4_000).await;
    assert_eq!(store.violations(), Vec::<String>::new());
    relay.stop().await.expect("stops");
}

/// A relay that is killed while events wait leaves nothing behind that another could not go on with.
#[tokio::test]
async fn a_crash_leaves_what_waits_to_the_next_relay() {
    let store = MemoryStore::new();
    let sink = Streams::without(&["bad"]);
    let short = || QueueOptions { lease: ms(200), ..options() };
    for round in 0..6 {
        store.publish(&(0..10).map(|n| event("bad", n)).collect::<Vec<_>>());
        let connection = store.connection();
        let relay = Running::start(&connection, short(), &sink, quick());
        let before = sink.tried("bad");
        eventually(PATIENCE, "a try", async || sink.tried("bad") > before).await;
        relay.kill().await;
        store.publish(&[event("good", round)]);
    }
    sink.back("bad");
    let relay = Running::start(&store, short(), &sink, quick());
    eventually(PATIENCE, "all", async || store.count(State::Done) == 66).await;
    sink.assert_order();
    assert!(store.rows().iter().all(|row| row.state == State::Done && row.attempts <= 1));
    relay.stop().await.expect("stops");
}

/// A drain delivers what it can, and then says what is left instead of waiting for ever.
#[tokio::test]
async fn a_drain_ends_when_only_a_destination_that_refuses_is_left() {
    let store = MemoryStore::new();
    let sink = Streams::without(&["bad", "worse"]);
    store.publish(&[event("bad", "a"), event("worse", "b"), event("good", "c"), event("good", "a")]);
    let error = Running::drain(&store, options(), &sink, quick()).end().await.expect_err("something is left");
    assert_eq!(error.code(), "destination_away");
    let message = error.message();
    assert!(
        message.contains("3 event(s)") && message.contains("bad: there is no `bad`; and for 1 more"),
        "{message}"
    );
    assert_eq!((store.count(State::Done), store.count(State::Pending)), (1, 3));
    assert!(sink.tried("bad") >= 3 && sink.tried("worse") >= 3);
    assert!(store.rows().iter().all(|row| row.attempts <= 1));
    // What the message says: mend it, and run again.
    sink.back("bad");
    sink.back("worse");
    let summary = Running::drain(&store, options(), &sink, quick()).end().await.expect("drained");
    assert_eq!((summary.delivered, store.count(State::Done)), (3, 4));
}

/// A drain waits for a sink that is away, but not for one that says it will stay so.
#[tokio::test]
async fn a_drain_does_not_wait_for_a_sink_that_is_gone_for_good() {
    let store = MemoryStore::new();
    store.publish(&[event("s", "a")]);
    let sink = kit::TestSink::new(async |batch: Vec<Delivery>| {
        vec![Outcome::Failed(Error::unavailable(Code::http(410), "Gone").lasting()); batch.len()]
    });
    let error = Running::drain(&store, options(), &sink, policy()).end().await.expect_err("it is gone");
    assert_eq!((error.code(), store.count(State::Pending)), ("http_410", 1));
    let relay = Running::start(&store, options(), &sink, policy());
    eventually(PATIENCE, "a relay to go on trying", async || sink.arrived().len() > 3).await;
    relay.stop().await.expect("stops");
    assert_eq!(store.rows()[0].attempts, 0);
}

/// An error that names a destination which the sink does not tell apart is about the whole sink.
#[tokio::test]
async fn a_sink_with_one_destination_is_away_as_a_whole() {
    let store = MemoryStore::new();
    store.publish(&[event("s", "a"), event("s", "b")]);
    let sink = kit::TestSink::new(async |batch: Vec<Delivery>| {
        vec![
            Outcome::Failed(Error::unavailable(Code::custom("missing"), "no topic").at("topic t"));
            batch.len()
        ]
    });
    let relay = Running::start(&store, options(), &sink, policy());
    eventually(PATIENCE, "the circuit", async || relay.summary().circuit_opened > 2).await;
    assert_eq!((relay.summary().destinations_away, relay.summary().waiting), (0, 0));
    relay.stop().await.expect("stops");
}

async fn log_settled(store: &MemoryLogStore) -> Result<()> {
    eventually(PATIENCE, "offsets at the end and nothing parked", async || {
        store.offsets("c").iter().all(|offset| *offset >= store.end()) && store.parked_of("c").is_empty()
    })
    .await;
    Ok(())
}

/// The same over a log: what waits is parked, with its attempts, and the offset goes on.
#[tokio::test]
async fn a_log_goes_on_past_a_destination_that_is_away() {
    let store = MemoryLogStore::new();
    let sink = Streams::without(&["bad"]);
    store.publish(&(0..40).map(|n| event("bad", format!("b{}", n % 20))).collect::<Vec<_>>());
    let options = LogOptions::consumer("c").reading(|read| read.partitions = 4);
    let relay = Running::of(Arc::new(Log::new(store.clone(), options)), &sink, quick(), false);
    eventually(PATIENCE, "the destination to refuse", async || sink.tried("bad") > 0).await;
    store.publish(&(0..300).map(|n| event("good", format!("g{}", n % 30))).collect::<Vec<_>>());
    store.publish(&[event("good", "b7")]);
    eventually(PATIENCE, "the healthy ones", async || sink.taken() == 300).await;
    eventually(PATIENCE, "the offset to go on", async || {
        store.offsets("c").iter().all(|offset| *offset >= store.end()) && store.parked_of("c").len() == 41
    })
    .await;
    assert!(store.parked_of("c").iter().all(|parked| parked.attempts == 0), "none has cost an attempt");
    sink.back("bad");
    eventually(PATIENCE, "all", async || sink.taken() == 341).await;
    sink.assert_order();
    log_settled(&store).await.expect("settled");
    assert_eq!(store.violations(), Vec::<String>::new());
    relay.stop().await.expect("stops");
}

/// A consumer that is to halt at a failure waits for the destination, and spends nothing either.
#[tokio::test]
async fn a_log_that_halts_waits_for_the_destination() {
    let store = MemoryLogStore::new();
    let sink = Streams::without(&["bad"]);
    store.publish(&[event("bad", "a"), event("good", "b")]);
    let options = LogOptions { on_failure: OnFailure::Halt, ..LogOptions::consumer("c") };
    let policy = Policy { max_attempts: 2, ..quick() };
    let relay = Running::of(Arc::new(Log::new(store.clone(), options)), &sink, policy, false);
    eventually(PATIENCE, "more tries than it has attempts", async || sink.tried("bad") > 5).await;
    sink.back("bad");
    eventually(PATIENCE, "both", async || sink.taken() == 2).await;
    log_settled(&store).await.expect("settled");
    relay.stop().await.expect("stops");
}
