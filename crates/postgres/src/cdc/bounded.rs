//! A test that the memory for a transaction is bounded, however large the transaction is.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_core::{Capabilities, Delivery, Outcome, Relay, Sink, admin::Admin};
use airtight_testkit::{postgres::TestDb, wait::eventually};
use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::CdcOptions;
use crate::{PgOptions, PgOutbox};

const BUDGET: usize = 1 << 20;

/// Takes its time with the first batches.
#[derive(Clone, Default)]
struct Slow(Arc<AtomicUsize>);

#[async_trait]
impl Sink for Slow {
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if self.0.fetch_add(batch.len(), Ordering::Relaxed) < 5000 {
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        vec![Outcome::Delivered; batch.len()]
    }
}

async fn deliver(name: &str, events: usize, first: usize) {
    let Some(db) = TestDb::create(name).await else { return };
    let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
    outbox.migrate().await.unwrap();
    let insert = "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
        SELECT 's', 'T', 'A', 'k' || n % 100, jsonb_build_object('n', n, 'x', repeat('x', 100)) FROM generate_series(1, $1) AS n";
    let publish = async |events: usize| {
        let events = i32::try_from(events).unwrap();
        sqlx::query(insert).bind(events).execute(outbox.pool()).await.unwrap();
    };
    publish(first).await;
    let options = CdcOptions { buffer_bytes: BUDGET, mark: false, ..CdcOptions::slot(db.name()) };
    let log = outbox.cdc(options).unwrap();
    let sink = Slow::default();
    let stop = CancellationToken::new();
    let relay = tokio::spawn(Relay::new(log.clone(), sink.clone()).run(stop.clone()));
    let has = async |count: usize| {
        let all = async || sink.0.load(Ordering::Relaxed) >= count;
        eventually(Duration::from_secs(180), "all of them", all).await;
    };
    has(first).await;
    publish(events).await;
    has(first + events).await;
    let peak = log.store().shared.feed().peak;
    stop.cancel();
    relay.await.unwrap().unwrap();
    println!("at most {peak} bytes at once");
    // And one message, which has less than two KiB here.
    assert!(peak > BUDGET / 2 && peak < BUDGET + 2048, "{peak} bytes at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_large_transaction() {
    deliver("cdc_bounded_stream", 200_000, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_large_table() {
    deliver("cdc_bounded_table", 1, 30_000).await;
}
