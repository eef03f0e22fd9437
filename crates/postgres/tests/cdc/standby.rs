//! Two relays on one slot: one streams, and the other takes over when it is needed.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use airtight_core::{Capabilities, Delivery, Outcome, Relay, Sink};
use airtight_testkit::wait::eventually;
use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::support::{Fixture, Recorder, SOON, policy};

#[tokio::test]
async fn one_streams_and_the_other_takes_over() {
    let Some(f) = Fixture::create("standby").await else { return };
    let (one, two) = (Recorder::default(), Recorder::default());
    let first = f.start(&one);
    f.publish("a", 1..2).await;
    one.has(1).await;
    f.streams().await;
    let second = f.start(&two);
    eventually(SOON, "both to be there", async || f.number("SELECT count(*) FROM airtight.relay").await == 2)
        .await;
    // Whoever comes later only stands by, whatever its id: both have beaten several times.
    let beats = "SELECT min(xmin::text::bigint) FROM airtight.relay";
    for _ in 0..3 {
        let before = f.number(beats).await;
        eventually(SOON, "heartbeats", async || f.number(beats).await > before).await;
    }
    f.publish("a", 2..10).await;
    one.has(9).await;
    assert!(two.arrived().is_empty(), "it stands by");
    let killed = Instant::now();
    first.kill().await;
    f.publish("a", 10..20).await;
    two.has(10).await;
    println!("taken over {:?} after the kill", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?} with a lease of 2 s", killed.elapsed());
    // Politely.
    let third = f.start(&one);
    eventually(SOON, "both to be there", async || {
        f.number("SELECT count(*) FROM airtight.relay WHERE expires_at > now()").await == 2
    })
    .await;
    let delivered = two.count();
    let stopped = Instant::now();
    second.stop().await;
    let had = one.count();
    f.publish("a", 20..30).await;
    one.has(had + 10).await;
    println!("taken over {:?} after the stop", stopped.elapsed());
    assert!(stopped.elapsed() < Duration::from_secs(2), "{:?}", stopped.elapsed());
    third.stop().await;
    assert_eq!(one.count(), had + 10, "after a polite stop nothing comes twice");
    assert_eq!(two.count(), delivered);
}

/// Stops the whole thread that it runs on, and with it the relay.
#[derive(Clone, Default)]
struct Brake {
    recorder: Recorder,
    on: Arc<(Mutex<bool>, Condvar)>,
}

impl Brake {
    fn set(&self, on: bool) {
        *self.on.0.lock().unwrap() = on;
        self.on.1.notify_all();
    }
}

#[async_trait]
impl Sink for Brake {
    fn capabilities(&self) -> Capabilities {
        self.recorder.capabilities()
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let outcomes = self.recorder.deliver(batch).await;
        let on = self.on.0.lock().unwrap();
        drop(self.on.1.wait_while(on, |on| *on).unwrap());
        outcomes
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_relay_that_sleeps_past_its_lease_loses_nothing_and_disturbs_nobody() {
    let Some(f) = Fixture::create("sleeper").await else { return };
    let sleeper = Brake::default();
    let stop = CancellationToken::new();
    let thread = {
        let (sink, stop) = (sleeper.clone(), stop.clone());
        let (url, slot) = (f.url(), f.options());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let outbox =
                    airtight_postgres::PgOutbox::connect(&url, airtight_postgres::PgOptions::default());
                let source = outbox.await.unwrap().cdc(slot).unwrap();
                Relay::new(source, sink).policy(policy()).run(stop).await
            })
        })
    };
    f.publish("a", 0..1).await;
    sleeper.recorder.has(1).await;
    f.streams().await;
    // Before that, the table would be read again.
    eventually(SOON, "the snapshot to be settled", async || {
        f.text("SELECT phase FROM airtight.slot").await == "streaming"
    })
    .await;
    sleeper.set(true);
    f.publish("a", 1..50).await;
    sleeper.recorder.has(2).await;
    let other = Recorder::default();
    let second = f.start(&other);
    f.publish("a", 50..100).await;
    other.has(60).await;
    let asleep = sleeper.recorder.count();
    sleeper.set(false);
    for n in 100..200 {
        f.publish("a", n..n + 1).await;
    }
    eventually(SOON, "everything", async || {
        let mut all = other.arrived();
        all.extend(sleeper.recorder.arrived());
        (0..200).all(|n| all.contains(&format!("a:{n}")))
    })
    .await;
    second.stop().await;
    stop.cancel();
    thread.join().unwrap().unwrap();
    let (slept, awake) = (sleeper.recorder.count() - asleep, other.count());
    println!("the sleeper delivered {asleep}, then {slept}; the other {awake}");
    let twice = sleeper.recorder.count() + other.count() - 200;
    assert!(twice <= 50, "{twice} events twice");
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status <> 'done'").await, 0);
}
