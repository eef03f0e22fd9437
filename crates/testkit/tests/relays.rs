//! Several relays in one process: one that ends, fails or panics, and what becomes of the others.

mod kit;

use airtight_core::{
    Backlog, Batch, Code, Error, Limits, OnEnd, Relay, Relays, Result, Rules, RunningRelays, Settlement,
    Source, queue::Queue, relays::Ended, sinks, source::Settled, state::State,
};
use airtight_testkit::{memory_queue::MemoryStore, wait::eventually};
use async_trait::async_trait;

use crate::kit::{PATIENCE, TestSink, event, options, policy};

/// How a source comes to an end.
enum Broken {
    Fails,
    Panics,
}

#[async_trait]
impl Source for Broken {
    fn rules(&self) -> Rules {
        Rules::default()
    }

    async fn next(&self, _limits: Limits) -> Result<Batch> {
        match self {
            Self::Fails => Err(Error::permanent(Code::custom("gone"), "the slot is gone")),
            Self::Panics => panic!("out of bounds"),
        }
    }

    async fn settle(&self, _settlements: &[Settlement]) -> Result<Settled> {
        Ok(Settled::default())
    }

    async fn backlog(&self) -> Result<Backlog> {
        Ok(Backlog::default())
    }
}

fn relay(name: &str, store: &MemoryStore, sink: &TestSink) -> Relay {
    Relay::new(Queue::new(store.clone(), options()), sink.clone()).policy(policy()).name(name)
}

async fn next(running: &mut RunningRelays) -> Option<Ended> {
    tokio::time::timeout(PATIENCE, running.next()).await.expect("an end in time")
}

#[tokio::test]
async fn the_others_go_on_when_one_fails_or_panics() {
    let (store, sink) = (MemoryStore::new(), TestSink::fine());
    let mut running = Relays::new()
        .add("fails", Broken::Fails, TestSink::fine())
        .add("panics", Broken::Panics, TestSink::fine())
        .add_relay(relay("works", &store, &sink))
        .spawn();
    let mut ends = [next(&mut running).await.unwrap(), next(&mut running).await.unwrap()];
    ends.sort_by(|one, other| one.name.cmp(&other.name));
    let codes = ends.each_ref().map(|end| (end.name.as_str(), end.error.as_ref().map(Error::code)));
    assert_eq!(codes, [("fails", Some("gone")), ("panics", Some("panic"))]);
    assert!(ends.iter().all(Ended::is_failure));
    assert!(ends[1].error.as_ref().unwrap().message().contains("out of bounds"), "{ends:?}");
    assert_eq!(running.names(), ["works"]);

    // After the others have ended.
    store.publish(&[event("a"), event("b")]);
    eventually(PATIENCE, "deliveries", async || store.count(State::Done) == 2).await;
    let last = running.shutdown().await;
    assert_eq!((last[0].name.as_str(), last[0].summary.delivered), ("works", 2));
    assert!(last[0].error.is_none() && !last[0].is_failure());
    assert_eq!(store.relays(), 0, "it has left");
}

#[tokio::test]
async fn all_stop_when_one_ends_where_that_is_wanted() {
    let (store, sink) = (MemoryStore::new(), TestSink::fine());
    let running = Relays::new()
        .on_end(OnEnd::Stop)
        .add("fails", Broken::Fails, TestSink::fine())
        .add_relay(relay("works", &store, &sink))
        .spawn();
    let ends = tokio::time::timeout(PATIENCE, running.wait()).await.expect("all end");
    assert_eq!(ends.len(), 2);
    assert_eq!((ends[1].name.as_str(), ends[1].is_failure()), ("works", false));
}

#[tokio::test]
async fn each_ends_when_drained_and_what_it_did_is_known_also_of_one_that_failed() {
    let (store, sink) = (MemoryStore::new(), TestSink::fine());
    store.publish(&[event("a"), event("b"), event("c")]);
    let running = Relays::new()
        .add("fails", Broken::Fails, TestSink::fine())
        .add_relay(relay("drains", &store, &sink))
        .spawn_drain();
    let mut ends = tokio::time::timeout(PATIENCE, running.wait()).await.expect("all end");
    ends.sort_by(|one, other| one.name.cmp(&other.name));
    assert_eq!((ends[0].summary.delivered, ends[0].is_failure()), (3, false));
    assert_eq!((ends[1].summary.delivered, ends[1].is_failure()), (0, true));
}

#[tokio::test]
async fn one_is_ended_for_a_reason_and_a_token_stops_the_rest() {
    let (store, sink) = (MemoryStore::new(), TestSink::fine());
    let token = airtight_core::CancellationToken::new();
    let mut running = Relays::new()
        .shutdown_on(&token)
        .add_relay(relay("one", &store, &sink))
        .add_relay(relay("two", &MemoryStore::new(), &sink))
        .spawn();
    running.end("one", &sinks::reader_gone(airtight_core::Class::Permanent));
    let ended = next(&mut running).await.unwrap();
    assert_eq!((ended.name.as_str(), ended.is_failure()), ("one", false), "an end, and no failure");
    assert_eq!(ended.error.unwrap().code(), "reader_gone");
    token.cancel();
    assert_eq!(next(&mut running).await.unwrap().name, "two");
    assert!(next(&mut running).await.is_none());
}
