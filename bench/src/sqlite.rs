//! The embedded default: how fast events are published to an SQLite file, and how fast it is drained.

use std::time::Instant;

use airtight_core::{CancellationToken, NewEvent, Order, Relay, admin::Admin, queue::QueueOptions};
use airtight_sqlite::SqliteOutbox;

use crate::drain::NullSink;

/// Events per transaction.
const BATCH: usize = 1_000;

pub(crate) async fn run(events: usize) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for order in [Order::None, Order::Key] {
        let path = dir.path().join(format!("{}.db", order.as_str()));
        let outbox = SqliteOutbox::open(path.to_str().expect("UTF-8")).await.expect("opening");
        outbox.migrate().await.expect("migrating");
        let text = "x".repeat(470);
        let new = |n: usize| {
            let body = serde_json::json!({"n": n, "text": text});
            NewEvent::new("bench", "Happened", "Thing", format!("key-{}", n % 1_000))
                .json(&body)
                .expect("JSON")
        };
        let begun = Instant::now();
        for start in (0..events).step_by(BATCH) {
            let batch: Vec<NewEvent> = (start..events.min(start + BATCH)).map(new).collect();
            Admin::publish(&outbox, &batch).await.expect("publishing");
        }
        let published = events as f64 / begun.elapsed().as_secs_f64();

        let queue = outbox.queue(QueueOptions { order, ..QueueOptions::default() });
        let begun = Instant::now();
        let relay = Relay::new(queue, NullSink);
        let summary = relay.drain(CancellationToken::new()).await.expect("draining");
        assert_eq!(summary.delivered, events as u64, "all of them, once");
        let drained = events as f64 / begun.elapsed().as_secs_f64();
        println!(
            "SQLite, order = {}: published {published:.0} events/s in batches of {BATCH}, drained {drained:.0} events/s",
            order.as_str()
        );
        println!(
            "{}",
            serde_json::json!({"bench": "sqlite", "order": order.as_str(), "events": events, "published": published, "drained": drained})
        );
    }
}
