//! Which position is acknowledged, and which is stored.

use std::time::Duration;

use airtight_postgres::Lsn;
use airtight_testkit::{postgres_server::PrivateServer, wait::eventually};

use crate::{
    support::{Fixture, Recorder, SOON},
    writers::Writers,
};

impl Fixture {
    async fn confirmed(&self) -> Lsn {
        let sql = format!(
            "SELECT coalesce(max(confirmed_flush_lsn), '0/0')::text FROM pg_replication_slots WHERE slot_name = '{}'",
            self.slot()
        );
        self.text(&sql).await.parse().unwrap()
    }

    async fn lsn(&self, sql: &str) -> Lsn {
        self.text(sql).await.parse().unwrap()
    }
}

const STORED: &str = "SELECT coalesce(max(lsn), 'FFFFFFFF/FFFFFFFF')::text FROM airtight.slot";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_is_acknowledged_before_it_is_stored_and_delivered() {
    let Some(f) = Fixture::create("acknowledged").await else { return };
    let sink = Recorder::default();
    let writers = Writers::start(&f, 4);
    let mut looks = 0;
    for _ in 0..3 {
        let relay = f.start(&sink);
        let (mut first, end) = (Lsn(0), std::time::Instant::now() + Duration::from_millis(1500));
        eventually(Duration::from_secs(60), "it to move", async || {
            // In this order: both only grow.
            let confirmed = f.confirmed().await;
            let stored = f.lsn(STORED).await;
            assert!(confirmed <= stored, "{confirmed} is acknowledged, {stored} is stored");
            looks += 1;
            if first == Lsn(0) {
                first = confirmed;
            }
            confirmed > first && std::time::Instant::now() > end
        })
        .await;
        relay.kill().await;
    }
    writers.stop().await;
    assert!(looks > 100, "{looks}");
}

#[tokio::test]
async fn a_transaction_that_is_settled_in_part_goes_on_in_its_middle() {
    let Some(f) = Fixture::create("partly").await else { return };
    let sink = Recorder::default();
    f.publish("first", 0..1).await;
    let relay = f.start(&sink);
    sink.has(1).await;
    f.streams().await;
    sink.hold_at(3000);
    f.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'test.cdc', 'Tested', 'Thing', 'a', jsonb_build_object('n', n) FROM generate_series(1, 10000) AS n",
    )
    .await;
    sink.has(3000).await;
    let place =
        "SELECT p.last_seq - s.seq FROM airtight.partition p, airtight.slot s WHERE p.grp LIKE 'cdc:%'";
    eventually(SOON, "some of it to be settled", async || f.number(place).await >= 1000).await;
    relay.kill().await;
    let settled = f.number("SELECT last_seq FROM airtight.partition WHERE grp LIKE 'cdc:%'").await;
    let before = sink.count();
    sink.release();
    f.drain(&sink).await.unwrap();
    let events = sink.arrived();
    assert_eq!(
        events.len() - before,
        usize::try_from(10_001 - settled).unwrap(),
        "none of those that were settled"
    );
    assert_eq!(sink.first_arrivals().len(), 10_001);
}

#[tokio::test]
async fn an_idle_outbox_with_a_busy_neighbour_pins_no_wal() {
    let Some(f) = Fixture::create("neighbour").await else { return };
    let sink = Recorder::default();
    f.publish("a", 1..2).await;
    let relay = f.start(&sink);
    sink.has(1).await;
    f.streams().await;
    f.sql("CREATE TABLE neighbour AS SELECT repeat('x', 1000) AS x FROM generate_series(1, 8000)").await;
    let busy = f.lsn("SELECT pg_current_wal_lsn()::text").await;
    eventually(Duration::from_secs(5), "the slot to follow", async || f.confirmed().await >= busy).await;
    assert!(f.confirmed().await <= f.lsn(STORED).await);
    relay.stop().await;
}

#[tokio::test]
async fn an_open_transaction_of_the_outbox_is_not_acknowledged_over() {
    let Some(f) = Fixture::create("open").await else { return };
    let sink = Recorder::default();
    f.publish("a", 1..2).await;
    let relay = f.start(&sink);
    sink.has(1).await;
    f.streams().await;
    let mut tx = f.pool.begin().await.unwrap();
    f.outbox.publish(&mut tx, &crate::support::event("late", 1)).await.unwrap();
    f.sql("CREATE TABLE neighbour AS SELECT repeat('x', 1000) AS x FROM generate_series(1, 8000)").await;
    let busy = f.lsn("SELECT pg_current_wal_lsn()::text").await;
    eventually(Duration::from_secs(8), "the slot to follow", async || f.confirmed().await >= busy).await;
    relay.kill().await;
    tx.commit().await.unwrap();
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "late:1"]);
}

#[tokio::test]
async fn an_idle_reader_writes_little() {
    let Some(server) = PrivateServer::start_with("idle", &["wal_level = logical", "autovacuum = off"]) else {
        return;
    };
    let f = Fixture::on(&server.url()).await;
    let sink = Recorder::default();
    f.publish("a", 1..2).await;
    let mut options = f.options();
    options.log.read.lease = Duration::from_secs(30);
    let relay = f.start_with(options, &sink);
    sink.has(1).await;
    f.streams().await;
    f.sql("CHECKPOINT").await;
    // The first writes after a checkpoint cost whole pages.
    let moved = "SELECT moved_at::text FROM airtight.slot";
    let first = f.text(moved).await;
    eventually(SOON, "the position to be written", async || f.text(moved).await != first).await;
    let before = f.lsn("SELECT pg_current_wal_insert_lsn()::text").await;
    let end = std::time::Instant::now() + Duration::from_secs(13);
    eventually(SOON, "some time to pass", async || std::time::Instant::now() > end).await;
    let after = f.lsn("SELECT pg_current_wal_insert_lsn()::text").await;
    println!("{} bytes of WAL in 13 s", after.since(before));
    // The lease is renewed every two seconds, the position is stored behind that, and the server writes a little.
    assert!(after.since(before) < 32 << 10, "{} bytes", after.since(before));
    relay.stop().await;
}
