//! Memory while the server is away. Alone in its process, since it looks at the process's memory.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::time::{Duration, Instant};

use airtight_core::{Class, Delivery, Outcome, Payload, Sink};
use airtight_testkit::{
    brokers::nats::NatsServer,
    deliveries::{of, sample_event},
    wait::eventually,
};
use support::{config, create_stream, jetstream, orders, sink};

/// Resident bytes of this process.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4_096
}

async fn deliver_for(how_long: Duration, sink: &impl Sink, batch: &[Delivery]) -> usize {
    let (end, mut calls) = (Instant::now() + how_long, 0);
    while Instant::now() < end {
        for outcome in sink.deliver(batch).await {
            match outcome {
                Outcome::Failed(error) => assert_eq!(error.class(), Class::Unavailable, "{error:?}"),
                Outcome::Skipped => {}
                other => panic!("{other:?} without a server"),
            }
        }
        calls += 1;
    }
    calls
}

#[tokio::test]
async fn memory_is_flat_while_the_server_is_away() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let Some(server) = NatsServer::start("memory_is_flat_while_the_server_is_away").await else { return };
    create_stream(&jetstream(&server.address(), None).await, orders()).await;
    let mut config = config(&server.address());
    (config.timeout, config.connect_timeout) = (Duration::from_millis(20), Duration::from_millis(20));
    let sink = sink(config);
    let event = |seq: i64| {
        let mut event = sample_event(seq, &format!("key-{seq}"));
        event.payload = Payload::Json(format!("\"{}\"", "x".repeat(20_000)).into());
        of(event)
    };
    let batch: Vec<Delivery> = (1..=200).map(event).collect();
    sink.open().await.unwrap();

    // Frozen: connections are there, and take as much as the socket's buffers do.
    server.suspend();
    deliver_for(Duration::from_millis(500), &sink, &batch).await;
    let before = resident();
    let frozen = deliver_for(Duration::from_secs(4), &sink, &batch).await;
    let after_frozen = resident();
    // Gone.
    server.kill().await;
    let gone = deliver_for(Duration::from_secs(4), &sink, &batch).await;
    let after_gone = resident();
    println!(
        "{frozen} batches of 4 MB to a frozen server, {gone} to none: {before}, {after_frozen}, {after_gone} bytes"
    );
    assert!(frozen >= 10 && gone >= 100, "{frozen} and {gone} batches are not many");
    for after in [after_frozen, after_gone] {
        assert!(after < before + (24 << 20), "from {before} to {after} bytes");
    }
    server.start_again().await;
    let back = Instant::now();
    eventually(Duration::from_secs(30), "everything is delivered", async || {
        sink.deliver(&batch).await.iter().all(Outcome::is_delivered)
    })
    .await;
    println!("delivered {:?} after the server was up", back.elapsed());
}
