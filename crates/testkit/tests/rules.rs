//! A pipeline's rules are said once, by the source. These tests try to make a relay keep other rules than its source,
//! and find no way: each sets the source only, and leaves the relay's policy as it is.

mod kit;

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use airtight_core::{
    Backlog, Batch, Capabilities, Delivery, Error, Limits, Order, Outcome, Result, Rules, Settlement, Source,
    log::{Log, LogOptions, OnFailure},
    queue::QueueOptions,
    source::Settled,
    state::State,
};
use airtight_testkit::{memory_log::MemoryLogStore, memory_queue::MemoryStore, wait::eventually};
use async_trait::async_trait;

use kit::{PATIENCE, Running, TestSink, event, lock, options, policy, refused};

/// Refuses the first event of key `a` for good and takes everything else.
fn first_of_a_dies() -> TestSink {
    let first = Arc::new(Mutex::new(true));
    TestSink::new(move |batch: Vec<Delivery>| {
        let first = first.clone();
        async move {
            let outcome = |d: &Delivery| {
                if d.event.aggregate_id == "a" && std::mem::take(&mut *lock(&first)) {
                    Outcome::Failed(Error::permanent(airtight_core::Code::custom("no_good"), "never"))
                } else {
                    Outcome::Delivered
                }
            };
            batch.iter().map(outcome).collect()
        }
    })
}

/// The relay has fetched what is behind the dead event before it dies, and still does not deliver it.
#[tokio::test]
async fn what_a_relay_has_fetched_waits_behind_a_dead_event_if_the_queue_says_so() {
    for block_on_dead in [true, false] {
        let store = MemoryStore::new();
        store.publish(&[event("a"), event("a"), event("b"), event("a")]);
        let sink = first_of_a_dies();
        let options = QueueOptions { block_on_dead, ..options() };
        Running::drain(&store, options, &sink, policy()).end().await.expect("ends by itself");
        let (of_a, done) = if block_on_dead { (1, 1) } else { (3, 3) };
        assert_eq!(sink.of_key("a").len(), of_a, "block_on_dead = {block_on_dead}");
        assert_eq!((store.count(State::Dead), store.count(State::Done)), (1, done));
    }
}

/// With a total order nothing is delivered beside anything else, and nothing overtakes an event that failed.
#[tokio::test]
async fn a_relay_keeps_the_order_that_the_queue_says() {
    let store = MemoryStore::new();
    store.publish(&(0..12).map(|n| event(&format!("k{n}"))).collect::<Vec<_>>());
    let (calls, most, failed) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::default());
    let sink = TestSink::new({
        let most = most.clone();
        move |batch: Vec<Delivery>| {
            let (calls, most, failed): (_, _, Arc<Mutex<bool>>) =
                (calls.clone(), most.clone(), Arc::clone(&failed));
            async move {
                most.fetch_max(calls.fetch_add(1, Ordering::SeqCst) + batch.len(), Ordering::SeqCst);
                tokio::task::yield_now().await;
                calls.fetch_sub(1, Ordering::SeqCst);
                let refuse = !std::mem::replace(&mut *lock(&failed), true);
                batch.iter().map(|_| if refuse { refused() } else { Outcome::Delivered }).collect()
            }
        }
    });
    let options = QueueOptions { order: Order::Total, ..options() };
    Running::drain(&store, options, &sink, policy()).end().await.expect("ends by itself");
    let seqs: Vec<i64> = sink.arrived().into_iter().map(|(_, seq)| seq).collect();
    assert_eq!(most.load(Ordering::SeqCst), 1, "one event at a time");
    assert!(seqs.is_sorted() && seqs.len() == 13, "{seqs:?}");
}

/// A consumer that halts delivers the event that halted it again: what is behind it must not have gone ahead.
#[tokio::test]
async fn a_relay_delivers_nothing_behind_the_event_that_halts_its_consumer() {
    let store = MemoryLogStore::new();
    store.publish(&[event("a"), event("a"), event("a")]);
    let sink = first_of_a_dies();
    let options = LogOptions { on_failure: OnFailure::Halt, ..LogOptions::consumer("c") };
    let relay = Running::of(Arc::new(Log::new(store, options)), &sink, policy(), false);
    eventually(PATIENCE, "the relay to end", async || relay.task.is_finished()).await;
    assert_eq!(relay.end().await.expect_err("halts").code(), "halted");
    assert_eq!(sink.of_key("a"), [1]);
}

/// Notes what it is told of the sink, and has nothing to deliver.
#[derive(Default)]
struct Told(Mutex<Vec<Capabilities>>);

#[async_trait]
impl Source for Told {
    fn rules(&self) -> Rules {
        Rules::default()
    }

    async fn open(&self, sink: &Capabilities) -> Result<()> {
        lock(&self.0).push(*sink);
        Ok(())
    }

    async fn next(&self, _limits: Limits) -> Result<Batch> {
        Ok(Batch::empty())
    }

    async fn settle(&self, _settlements: &[Settlement]) -> Result<Settled> {
        Ok(Settled::default())
    }

    async fn backlog(&self) -> Result<Backlog> {
        Ok(Backlog::default())
    }
}

/// Nobody between the two has to pass it on.
#[tokio::test]
async fn a_source_is_told_what_the_sink_wants() {
    for wants_rows in [true, false] {
        let caps = Capabilities { wants_rows, ..Capabilities::default() };
        let source = Arc::new(Told::default());
        Running::of(source.clone(), &TestSink::fine().caps(caps), policy(), true).end().await.expect("ends");
        assert_eq!(*lock(&source.0), [caps]);
    }
}
