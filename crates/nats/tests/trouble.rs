//! A server that is killed, frozen and started again under a sink that delivers all the while: nothing that was
//! acknowledged is missing, each key is in order, and what waits for an answer is not left waiting.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use airtight_core::{Class, Delivery, Outcome, Sink};
use airtight_testkit::{
    brokers::nats::NatsServer,
    deliveries::{delivery, of, sample_event},
    wait::eventually,
};
use support::{config, create_stream, jetstream, orders, send, sink, stored};

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_connection_that_breaks_answers_for_all_that_is_under_way() {
    let name = "a_connection_that_breaks_answers_for_all_that_is_under_way";
    let Some(server) = NatsServer::start(name).await else { return };
    create_stream(&jetstream(&server.address(), None).await, orders()).await;
    let mut config = config(&server.address());
    // Whoever waits for this has not noticed.
    config.timeout = Duration::from_secs(600);
    let sink = sink(config);
    sink.open().await.unwrap();
    server.suspend();
    let batch: Vec<Delivery> = (1..=600).map(|seq| delivery(seq, &format!("k{}", seq % 300))).collect();
    // Frozen, it cannot answer; so all of the window is under way, as far as the socket takes it.
    let delivering = tokio::time::timeout(PATIENCE, sink.deliver(&batch));
    let (outcomes, ()) = tokio::join!(delivering, server.kill());
    let outcomes = outcomes.expect("who waits for an answer hears that there will be none");
    for outcome in &outcomes {
        match outcome {
            Outcome::Failed(error) => assert_eq!(error.class(), Class::Unavailable, "{error:?}"),
            Outcome::Skipped => {}
            other => panic!("{other:?} with a server that never answered"),
        }
    }
    let error = send(&sink, delivery(1, "k")).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unreachable"), "{error:?}");
    server.start_again().await;
    let back = Instant::now();
    eventually(PATIENCE, "the same sink delivers again", async || {
        send(&sink, delivery(1, "k")).await.is_ok()
    })
    .await;
    println!("delivered {:?} after the server was up", back.elapsed());
}

#[tokio::test]
async fn a_frozen_server_is_unavailable_and_nothing_overtakes() {
    let name = "a_frozen_server_is_unavailable_and_nothing_overtakes";
    let Some(server) = NatsServer::start(name).await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, orders()).await;
    let mut config = config(&server.address());
    (config.timeout, config.connect_timeout) = (Duration::from_millis(300), Duration::from_millis(300));
    let sink = sink(config);
    send(&sink, delivery(1, "k")).await.unwrap();
    server.suspend();
    let outcomes = sink.deliver(&[delivery(2, "k"), delivery(3, "k"), delivery(4, "other")]).await;
    for (at, code) in [(0, "timeout"), (2, "timeout")] {
        let Outcome::Failed(error) = &outcomes[at] else { panic!("{outcomes:?}") };
        assert_eq!((error.class(), error.code()), (Class::Unavailable, code), "{error:?}");
    }
    assert!(matches!(outcomes[1], Outcome::Skipped), "{outcomes:?}");
    // The connection is not trusted any more, and a new one finds nobody.
    let error = send(&sink, delivery(2, "k")).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unreachable"), "{error:?}");
    server.resume();
    for seq in [2, 3] {
        eventually(PATIENCE, "delivered again", async || send(&sink, delivery(seq, "k")).await.is_ok()).await;
    }
    eventually(PATIENCE, "the other key too", async || send(&sink, delivery(4, "other")).await.is_ok()).await;
    let keys_of: Vec<(Option<String>, i64)> = stored(&jetstream, "ORDERS")
        .await
        .iter()
        .map(|message| {
            let event = airtight_testkit::sinks::Received::from_envelope(&message.body).unwrap();
            (Some(event.key), event.seq)
        })
        .collect();
    let of_key: Vec<i64> =
        keys_of.iter().filter(|(key, _)| key.as_deref() == Some("k")).map(|(_, seq)| *seq).collect();
    // What was in the socket when the server froze was stored when it went on, and its repeat was dropped.
    assert_eq!(of_key, [1, 2, 3]);
}

/// Calls side by side share the window. Those behind must not wait for a timeout each.
#[tokio::test]
async fn a_frozen_server_is_found_out_once_for_all() {
    let Some(server) = NatsServer::start("a_frozen_server_is_found_out_once_for_all").await else { return };
    create_stream(&jetstream(&server.address(), None).await, orders()).await;
    let mut config = config(&server.address());
    (config.timeout, config.window) = (Duration::from_secs(3), 1);
    let sink = sink(config);
    sink.open().await.unwrap();
    server.suspend();
    let started = Instant::now();
    let calls = (0..4).map(|call| {
        let batch =
            [delivery(2 * call + 1, &format!("a{call}")), delivery(2 * call + 2, &format!("b{call}"))];
        let sink = &sink;
        async move { sink.deliver(&batch).await }
    });
    for outcomes in futures::future::join_all(calls).await {
        let Outcome::Failed(error) = &outcomes[0] else { panic!("{outcomes:?}") };
        assert_eq!(error.class(), Class::Unavailable, "{error:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(8), "took {:?}", started.elapsed());
}

/// As a relay would: per key the next events, again until they are delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_missing_and_keys_are_in_order_after_kills_and_freezes() {
    const KEYS: usize = 40;
    const EACH: i64 = 100;
    let name = "nothing_is_missing_and_keys_are_in_order_after_kills_and_freezes";
    let Some(server) = NatsServer::start(name).await else { return };
    create_stream(&jetstream(&server.address(), None).await, orders()).await;
    let mut config = config(&server.address());
    (config.timeout, config.connect_timeout) = (Duration::from_millis(500), Duration::from_millis(500));
    config.window = 16;
    let sink = sink(config);

    let mut waiting: Vec<VecDeque<Delivery>> = (0..KEYS)
        .map(|key| {
            let event = |n| {
                let seq = i64::try_from(key).unwrap() * EACH + n;
                of(sample_event(1 + seq, &format!("key-{key}")))
            };
            (0..EACH).map(event).collect()
        })
        .collect();
    let (delivered, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let delivering = async {
        while waiting.iter().any(|key| !key.is_empty()) {
            let batch: Vec<Delivery> = waiting.iter().flat_map(|key| key.iter().take(4)).cloned().collect();
            let mut outcomes = sink.deliver(&batch).await.into_iter();
            for key in &mut waiting {
                let asked = key.len().min(4);
                let answers: Vec<Outcome> = outcomes.by_ref().take(asked).collect();
                let prefix = answers.iter().take_while(|outcome| outcome.is_delivered()).count();
                for outcome in &answers[prefix..] {
                    match outcome {
                        Outcome::Failed(error) => {
                            assert_eq!(error.class(), Class::Unavailable, "{error:?}");
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                        Outcome::Skipped => {}
                        other => panic!("{other:?} after an event that was not delivered"),
                    }
                }
                key.drain(..prefix);
                delivered.fetch_add(prefix, Ordering::Relaxed);
            }
            tokio::task::yield_now().await;
        }
    };
    let total = KEYS * usize::try_from(EACH).unwrap();
    let troubling = async {
        for round in 1..=6 {
            // In the middle of things, each time.
            let due = total * round / 8;
            eventually(PATIENCE, "deliveries go on", async || delivered.load(Ordering::Relaxed) >= due).await;
            if round % 2 == 1 {
                server.kill().await;
                server.start_again().await;
            } else {
                let before = failed.load(Ordering::Relaxed);
                server.suspend();
                eventually(PATIENCE, "it is noticed", async || failed.load(Ordering::Relaxed) > before).await;
                server.resume();
            }
        }
    };
    tokio::time::timeout(2 * PATIENCE, async { tokio::join!(delivering, troubling) }).await.unwrap();

    let jetstream = jetstream(&server.address(), None).await;
    let (mut seen, mut last) = (HashSet::new(), HashMap::new());
    let mut repeats = 0;
    for message in stored(&jetstream, "ORDERS").await {
        let event = airtight_testkit::sinks::Received::from_envelope(&message.body).unwrap();
        if !seen.insert(event.id.clone()) {
            repeats += 1;
            continue;
        }
        let before = last.insert(event.key.clone(), event.seq).unwrap_or(i64::MIN);
        assert!(before < event.seq, "{} came after {before} of {}", event.seq, event.key);
    }
    assert_eq!(seen.len(), total, "missing events");
    println!("{total} events, 3 kills, 3 freezes, {repeats} repeats");
}
