//! Instances of a consumer that come back too late: after an eviction, after their lease, after the consumer was removed.

use std::time::{Duration, Instant};

use airtight_core::{
    Limits, Order, Source,
    log::{LogAdmin, LogOptions},
};

use crate::support::{Fixture, SOON};

const LIMITS: Limits = Limits { events: 100, bytes: 8 << 20 };

fn only(consumer: &str, streams: &[&str]) -> LogOptions {
    LogOptions::consumer(consumer)
        .reading(|read| read.streams = streams.iter().map(|stream| (*stream).to_owned()).collect())
}

/// What it leaves out, the others would take for done.
#[tokio::test]
async fn an_instance_that_was_evicted_does_not_come_back_to_others_that_read_otherwise() {
    let Some(f) = Fixture::create("evicted_streams").await else { return };
    let old = f.reader_with(only("c", &["other"])).await;
    // It stands still for longer than its lease, and meanwhile the consumer is given all streams.
    f.sql("UPDATE airtight.relay SET expires_at = now() - interval '1 s'").await;
    let new = f.reader("c").await;
    assert_eq!(new.log.owned_partitions(), [0]);
    let deadline = Instant::now() + SOON;
    let error = loop {
        assert!(Instant::now() < deadline, "it works beside the new one");
        match old.log.next(LIMITS).await {
            Ok(batch) => assert!(batch.is_empty()),
            Err(error) => break error,
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(error.code(), "overlap", "{error}");
}

/// One whose lease has run out, and who has not been evicted yet, would be renewed by its next heartbeat.
#[tokio::test]
async fn an_instance_whose_lease_has_run_out_is_gone_once_another_reads_otherwise() {
    let Some(f) = Fixture::create("expired_streams").await else { return };
    let _old = f.reader_with(only("c", &["other"])).await;
    f.sql("UPDATE airtight.relay SET expires_at = now() - interval '1 s'").await;
    let new = f.outbox.log(LogOptions::consumer("c"));
    use airtight_core::{
        group::{GroupName, Member},
        log::LogStore,
    };
    let member = Member {
        id: uuid::Uuid::new_v4(),
        host: "here".into(),
        group: GroupName::log("c"),
        streams: Vec::new(),
        order: Order::Key,
        block_on_dead: false,
        lease: Duration::from_secs(20),
        partitions: 1,
    };
    new.store().open(&airtight_core::Capabilities::default()).await.unwrap();
    new.store().attach(&member, airtight_core::log::Start::Earliest).await.unwrap();
    let left = f.number("SELECT count(*) FROM airtight.relay WHERE grp = 'log:c'").await;
    assert_eq!(left, 0, "the old one comes back with its next heartbeat, and reads otherwise");
    new.store().members().leave(&member).await.unwrap();
}

/// A relay that outlived its consumer must leave nothing behind that a new one of that name begins with.
#[tokio::test]
async fn a_consumer_that_was_removed_begins_anew() {
    let Some(f) = Fixture::create("anew").await else { return };
    for n in 1..=3 {
        f.publish("k", n).await;
    }
    let old = f.reader("c").await;
    f.sql("UPDATE airtight.relay SET expires_at = now() - interval '1 s'").await;
    f.outbox.remove("c").await.unwrap();
    let deadline = Instant::now() + SOON;
    while old.log.next(LIMITS).await.is_ok() {
        assert!(Instant::now() < deadline, "it does not hear that its consumer was removed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    old.close().await;
    let start = airtight_core::log::Start::Latest;
    let new = f.reader_with(LogOptions { start, ..LogOptions::consumer("c") }).await;
    f.publish("k", 4).await;
    assert_eq!(new.seqs(1).await, [4]);
}
