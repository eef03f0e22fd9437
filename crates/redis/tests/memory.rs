//! Memory while the server is away: alone in its binary, because it looks at the whole process.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]
#![cfg(target_os = "linux")]

mod support;

use airtight_core::{Class, Delivery, Outcome, Payload, Sink};
use airtight_redis::RedisSink;
use airtight_testkit::{brokers::redis::RedisServer, deliveries::delivery, wait};
use support::*;

/// What the process holds, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4_096
}

async fn in_vain(sink: &RedisSink, batch: &[Delivery], times: usize) {
    for _ in 0..times {
        for outcome in sink.deliver(batch).await {
            match outcome {
                Outcome::Failed(error) => assert_eq!(error.class(), Class::Unavailable, "{error}"),
                other => assert!(matches!(other, Outcome::Skipped), "{other:?}"),
            }
        }
    }
}

#[tokio::test]
async fn memory_is_flat_while_the_server_is_away() {
    let Some(server) = RedisServer::start("memory_is_flat").await else { return };
    let sink = sink(&server, "?timeout=100ms&connect_timeout=100ms");
    let batch: Vec<_> = (1..=200)
        .map(|seq| {
            let mut delivery = delivery(seq, &format!("key-{seq}"));
            delivery.event.payload = Payload::Bytes(vec![b'x'; 4_000].into());
            delivery
        })
        .collect();
    server.stop().await;
    in_vain(&sink, &batch, 200).await;
    let before = resident();
    // Gone: gigabytes are offered, and refused.
    in_vain(&sink, &batch, 10_000).await;
    let gone = resident();
    assert!(gone < before + (16 << 20), "from {before} to {gone} bytes while the server was gone");

    // Frozen, again and again, with a request under way each time: what it held is gone with its connection.
    server.start_again().await;
    drop(admin(&server).await);
    let mut before = 0;
    for round in 0..40 {
        wait::eventually(PATIENCE, "Redis to take an event again", async || {
            send(&sink, delivery(1, "a")).await.is_ok()
        })
        .await;
        server.suspend();
        in_vain(&sink, &batch, 2).await;
        server.resume();
        if round == 10 {
            before = resident();
        }
    }
    let frozen = resident();
    assert!(frozen < before + (16 << 20), "from {before} to {frozen} bytes while the server was frozen");
}
