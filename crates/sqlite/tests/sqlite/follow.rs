//! The log with its engine: relays that follow it, sinks that fail, instances that come and go.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use airtight_core::{
    CancellationToken, Capabilities, Code, Delivery, Error, Limits, Order, Outcome, Policy, Relay, Sink,
    Source,
    admin::Admin,
    log::{LogAdmin, LogOptions, OnFailure, ParkedFilter, Retention, SeekOptions, SeekTo, Start},
};
use airtight_sqlite::SqliteOutbox;
use airtight_testkit::wait::eventually;
use async_trait::async_trait;
use tokio::{sync::Semaphore, task::JoinHandle};

use crate::{
    common::{Fixture, event},
    relay::policy,
};

const LONG: Duration = Duration::from_secs(60);

/// Notes what it was given, and fails where it is told to.
#[derive(Clone, Default)]
pub(crate) struct Notes(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Every delivery, in order.
    seen: Mutex<Vec<(String, i64)>>,
    /// What these keys get instead of being delivered.
    failing: Mutex<BTreeMap<String, Error>>,
    /// When set, each call takes a permit first.
    gate: Mutex<Option<Arc<Semaphore>>>,
    /// Calls that have come to a closed gate.
    at_gate: AtomicUsize,
}

impl Notes {
    pub(crate) fn seqs(&self) -> Vec<i64> {
        self.0.seen.lock().unwrap().iter().map(|(_, seq)| *seq).collect()
    }

    pub(crate) fn of(&self, key: &str) -> Vec<i64> {
        let seen = self.0.seen.lock().unwrap();
        seen.iter().filter(|(of, _)| of == key).map(|(_, seq)| *seq).collect()
    }

    pub(crate) fn fail(&self, key: &str, error: Error) {
        self.0.failing.lock().unwrap().insert(key.to_owned(), error);
    }

    pub(crate) fn mend(&self) {
        self.0.failing.lock().unwrap().clear();
    }

    fn close_gate(&self) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        *self.0.gate.lock().unwrap() = Some(gate.clone());
        gate
    }

    fn distinct(&self) -> usize {
        self.seqs().into_iter().collect::<HashSet<_>>().len()
    }

    /// First deliveries of each key must ascend.
    fn assert_order(&self) {
        let mut last: HashMap<String, i64> = HashMap::new();
        let mut known = HashSet::new();
        for (key, seq) in self.0.seen.lock().unwrap().iter() {
            if known.insert(*seq) {
                let before = last.insert(key.clone(), *seq).unwrap_or(0);
                assert!(before < *seq, "{key}: {seq} after {before}");
            }
        }
    }
}

#[async_trait]
impl Sink for Notes {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, max_batch_events: 20, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let gate = self.0.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            self.0.at_gate.fetch_add(1, Relaxed);
            gate.acquire().await.unwrap().forget();
        }
        let failing = self.0.failing.lock().unwrap().clone();
        let mut seen = self.0.seen.lock().unwrap();
        let mut failed = HashSet::new();
        batch
            .iter()
            .map(|delivery| {
                let key = delivery.event.aggregate_id.clone();
                if failed.contains(&key) {
                    return Outcome::Skipped;
                }
                if let Some(error) = failing.get(&key) {
                    failed.insert(key);
                    return Outcome::Failed(error.clone());
                }
                seen.push((key, delivery.event.seq));
                Outcome::Delivered
            })
            .collect()
    }
}

/// A relay in the background.
pub(crate) struct Running {
    stop: CancellationToken,
    task: JoinHandle<airtight_core::Result<()>>,
}

impl Running {
    pub(crate) fn start(outbox: &SqliteOutbox, options: LogOptions, sink: impl Sink, policy: Policy) -> Self {
        let stop = CancellationToken::new();
        let relay = Relay::new(outbox.log(options), sink).policy(policy);
        let running = stop.clone();
        let task = tokio::spawn(async move { relay.run(running).await.map(|_| ()) });
        Self { stop, task }
    }

    pub(crate) async fn stop(self) -> airtight_core::Result<()> {
        self.stop.cancel();
        self.task.await.unwrap()
    }

    /// As if killed: nothing is given back, nobody leaves.
    async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

fn options(name: &str) -> LogOptions {
    LogOptions::consumer(name).reading(|read| read.lease = Duration::from_millis(800))
}

fn retryable() -> Error {
    Error::retryable(Code::custom("down"), "try again")
}

fn permanent() -> Error {
    Error::permanent(Code::custom("bad"), "never")
}

/// The only consumer, once it is written down.
async fn only(outbox: &SqliteOutbox) -> airtight_core::log::Consumer {
    outbox.consumers().await.unwrap().pop().unwrap_or_default()
}

async fn offset(outbox: &SqliteOutbox, name: &str) -> i64 {
    let all = outbox.consumers().await.unwrap();
    all.iter().find(|found| found.name == name).map_or(-1, |found| found.offset)
}

async fn reaches(outbox: &SqliteOutbox, name: &str, seq: i64) {
    let what = format!("{name} to reach {seq}");
    eventually(LONG, &what, async || offset(outbox, name).await == seq).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_consumer_sees_everything_in_order() {
    let fixture = Fixture::log().await;
    let (one, two) = (Notes::default(), Notes::default());
    let relays = [("one", &one), ("two", &two)]
        .map(|(name, sink)| Running::start(&fixture.outbox, options(name), sink.clone(), policy()));
    let writer = fixture.second().await.detect().await.unwrap();
    for round in 0..20 {
        let events: Vec<_> = (0..10).map(|n| event(&format!("k{}", (round + n) % 7))).collect();
        Admin::publish(&writer, &events).await.unwrap();
    }
    for name in ["one", "two"] {
        reaches(&fixture.outbox, name, 200).await;
    }
    for sink in [&one, &two] {
        let mut seqs = sink.seqs();
        seqs.sort_unstable();
        assert_eq!(seqs, (1..=200).collect::<Vec<i64>>(), "each once");
        sink.assert_order();
    }
    for relay in relays {
        relay.stop().await.unwrap();
    }
    // The next start repeats nothing, and a late one begins at the beginning.
    let again = Notes::default();
    fixture.publish(&["last"]).await;
    let relay = Relay::new(fixture.outbox.log(options("one")), again.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!(again.seqs(), [201]);
    let late = Notes::default();
    let relay = Relay::new(fixture.outbox.log(options("late")), late.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!(late.seqs().len(), 201);
    let latest = Notes::default();
    let from_now = LogOptions { start: Start::Latest, ..options("latest") };
    let relay = Relay::new(fixture.outbox.log(from_now), latest.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!(latest.seqs(), Vec::<i64>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_key_waits_and_all_others_go_on() {
    let fixture = Fixture::log().await;
    let sink = Notes::default();
    sink.fail("bad", retryable());
    let relay = Running::start(&fixture.outbox, options("one"), sink.clone(), policy());
    for _ in 0..10 {
        fixture.publish(&["bad", "good", "fine"]).await;
    }
    // The offset passes what is parked.
    reaches(&fixture.outbox, "one", 30).await;
    eventually(LONG, "the others to be delivered", async || sink.seqs().len() == 20).await;
    let found = &fixture.outbox.consumers().await.unwrap()[0];
    assert_eq!((found.retrying, found.dead, found.lag_events), (10, 0, 0));
    assert!(sink.of("bad").is_empty());
    sink.mend();
    let due = "UPDATE airtight_parked SET next_retry_at = '2000' WHERE next_retry_at IS NOT NULL";
    eventually(LONG, "the key to catch up", async || {
        fixture.exec(due).await;
        sink.of("bad").len() >= 10
    })
    .await;
    fixture.publish(&["bad"]).await;
    eventually(LONG, "it to be as any other", async || sink.of("bad").len() >= 11).await;
    assert_eq!(sink.of("bad"), (0..11).map(|n| n * 3 + 1).collect::<Vec<i64>>(), "once each, in order");
    relay.stop().await.unwrap();
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_parked").await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_event_stays_and_its_key_goes_on() {
    let fixture = Fixture::log().await;
    let sink = Notes::default();
    sink.fail("bad", permanent());
    let relay = Running::start(&fixture.outbox, options("one"), sink.clone(), policy());
    fixture.publish(&["bad", "good"]).await;
    eventually(LONG, "it to be dead", async || only(&fixture.outbox).await.dead == 1).await;
    sink.mend();
    fixture.publish(&["bad"]).await;
    eventually(LONG, "its key to go on", async || sink.of("bad") == [3]).await;
    assert_eq!(fixture.outbox.retry_parked(&ParkedFilter::default()).await.unwrap(), 1);
    eventually(LONG, "the dead one to be tried again", async || sink.of("bad") == [3, 1]).await;
    relay.stop().await.unwrap();
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_parked").await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_event_that_blocks_holds_its_key_until_a_person_acts() {
    let fixture = Fixture::log().await;
    let sink = Notes::default();
    sink.fail("bad", permanent());
    let blocking = options("one").reading(|read| read.block_on_dead = true);
    fixture.publish(&["bad", "good", "bad", "good"]).await;
    let relay = Relay::new(fixture.outbox.log(blocking.clone()), sink.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    sink.mend();
    let relay = Running::start(&fixture.outbox, blocking, sink.clone(), policy());
    fixture.publish(&["bad", "good"]).await;
    reaches(&fixture.outbox, "one", 6).await;
    assert_eq!((sink.of("good"), sink.of("bad")), (vec![2, 4, 6], vec![]));
    let found = &fixture.outbox.consumers().await.unwrap()[0];
    assert_eq!((found.dead, found.retrying), (1, 2));
    fixture.outbox.retry_parked(&ParkedFilter::default()).await.unwrap();
    eventually(LONG, "the key to go on", async || sink.of("bad") == [1, 3, 5]).await;
    relay.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn halting_passes_nothing() {
    let fixture = Fixture::log().await;
    fixture.publish(&["good", "bad", "good"]).await;
    let sink = Notes::default();
    sink.fail("bad", permanent());
    let halting = LogOptions { on_failure: OnFailure::Halt, ..options("one") }
        .reading(|read| read.order = Order::Total);
    // The relay has what is behind a dead event in memory already: it must not go on by itself.
    let relay = Relay::new(fixture.outbox.log(halting.clone()), sink.clone()).policy(policy());
    let error = relay.run(CancellationToken::new()).await.unwrap_err();
    assert_eq!(error.code(), "halted");
    assert!(error.remedy().unwrap().contains("seek one --to-seq 2"), "{error}");
    assert_eq!((sink.seqs(), offset(&fixture.outbox, "one").await), (vec![1], 1));
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_parked").await, "0");
    // What the message says.
    fixture.outbox.seek("one", SeekTo::Seq(2), SeekOptions::default()).await.unwrap();
    let relay = Relay::new(fixture.outbox.log(halting), sink.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!((sink.seqs(), offset(&fixture.outbox, "one").await), (vec![1, 3], 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_while_a_relay_delivers_wins() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "c", "d"]).await;
    let sink = Notes::default();
    let relay = Running::start(&fixture.outbox, options("one"), sink.clone(), policy());
    reaches(&fixture.outbox, "one", 4).await;
    let gate = sink.close_gate();
    fixture.publish(&["e", "f"]).await;
    // It is in the sink's hands; its settle comes after the seek.
    eventually(LONG, "the next batch to be in the sink", async || sink.0.at_gate.load(Relaxed) > 0).await;
    let sought = fixture.outbox.seek("one", SeekTo::Seq(1), SeekOptions::default()).await.unwrap();
    assert_eq!((sought.from, sought.again), (4, 3));
    gate.add_permits(1_000);
    eventually(LONG, "all to come again", async || {
        let seen = sink.seqs();
        seen.iter().filter(|seq| **seq == 4).count() == 2 && seen.contains(&6)
    })
    .await;
    reaches(&fixture.outbox, "one", 6).await;
    for seq in [2, 3, 4] {
        assert_eq!(sink.seqs().iter().filter(|seen| **seen == seq).count(), 2, "{seq}");
    }
    assert_eq!(sink.of("a"), [1], "before the target");
    relay.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_consumer_stands_still_and_goes_on() {
    let fixture = Fixture::log().await;
    let sink = Notes::default();
    let quick = LogOptions::consumer("one").reading(|read| read.lease = Duration::from_millis(400));
    fixture.publish(&["a"]).await;
    let relay = Running::start(&fixture.outbox, quick.clone(), sink.clone(), policy());
    reaches(&fixture.outbox, "one", 1).await;
    fixture.outbox.pause("one", true).await.unwrap();
    // Another instance, opened while it is paused, shows when the news is there.
    let log = fixture.outbox.log(LogOptions { consumer: "one".into(), ..quick });
    log.open(&Capabilities::default()).await.unwrap();
    assert_eq!(log.backlog().await.unwrap_err().code(), "paused");
    assert!(log.next(Limits { events: 10, bytes: 1000 }).await.unwrap().is_empty());
    log.close().await.unwrap();
    relay.stop().await.unwrap();
    fixture.publish(&["b"]).await;
    let relay = Running::start(&fixture.outbox, options("one"), sink.clone(), policy());
    eventually(LONG, "it to be there", async || !only(&fixture.outbox).await.instances.is_empty()).await;
    assert!(fixture.outbox.consumers().await.unwrap()[0].paused);
    assert_eq!(sink.seqs(), [1]);
    fixture.outbox.pause("one", false).await.unwrap();
    reaches(&fixture.outbox, "one", 2).await;
    assert_eq!(sink.seqs(), [1, 2]);
    relay.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_retention_has_overtaken_says_so() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b"]).await;
    let sink = Notes::default();
    let relay = Relay::new(fixture.outbox.log(options("one")), sink.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    fixture.publish(&["c", "d"]).await;
    fixture.exec("UPDATE airtight_outbox SET created_at = '2024-01-01T00:00:00.000Z'").await;
    let all = Retention { wait_for_consumers: false, ..Retention::default() };
    assert_eq!(fixture.outbox.prune_log(all, &|_| {}).await.unwrap().events, 4);
    let relay = Relay::new(fixture.outbox.log(options("one")), sink.clone()).policy(policy());
    let error = relay.run(CancellationToken::new()).await.unwrap_err();
    assert_eq!(error.code(), "behind_retention");
    assert_eq!(offset(&fixture.outbox, "one").await, 2, "it is not moved behind anybody's back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_share_partitions_and_go_on_when_one_leaves_or_dies() {
    let fixture = Fixture::log().await;
    let sink = Notes::default();
    let shared = options("one").reading(|read| read.partitions = 8);
    let start = async || {
        let outbox = fixture.second().await.detect().await.unwrap();
        Running::start(&outbox, shared.clone(), sink.clone(), policy())
    };
    let publish = async |rounds: usize| {
        for round in 0..rounds {
            let keys: Vec<String> = (0..20).map(|n| format!("k{}", (round * 3 + n) % 31)).collect();
            fixture.publish(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
        }
    };
    let (one, two) = (start().await, start().await);
    eventually(LONG, "both to have a share", async || {
        let found = &fixture.outbox.consumers().await.unwrap()[..];
        found.first().is_some_and(|found| {
            found.instances.len() == 2 && found.instances.iter().all(|instance| instance.partitions == 4)
        })
    })
    .await;
    publish(10).await;
    eventually(LONG, "all to be delivered", async || sink.distinct() == 200).await;
    // One leaves: its share is taken over.
    one.stop().await.unwrap();
    publish(5).await;
    eventually(LONG, "the rest to be delivered by the other", async || sink.distinct() == 300).await;
    // One joins, and the other is killed in mid-air.
    let three = start().await;
    publish(5).await;
    two.kill().await;
    publish(5).await;
    eventually(LONG, "the last one to take over", async || sink.distinct() == 500).await;
    reaches(&fixture.outbox, "one", 500).await;
    sink.assert_order();
    three.stop().await.unwrap();
    assert!(fixture.outbox.consumers().await.unwrap()[0].instances.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_delivered_but_not_settled_comes_again() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b"]).await;
    let quick = LogOptions::consumer("one").reading(|read| read.lease = Duration::from_millis(300));
    let log = fixture.outbox.log(quick.clone());
    log.open(&Capabilities::default()).await.unwrap();
    let batch = log.next(Limits { events: 10, bytes: 1 << 20 }).await.unwrap();
    assert_eq!(batch.deliveries.len(), 2);
    // Killed here, with both in the sink.
    drop(log);
    let sink = Notes::default();
    let relay = Relay::new(fixture.outbox.log(quick), sink.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!(sink.seqs(), [1, 2]);
}
