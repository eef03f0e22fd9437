//! PostgreSQL fails over to a standby that has a copy of the slot (PostgreSQL 17 and later).

use std::time::Duration;

use airtight_postgres::CdcOptions;
use airtight_testkit::{ledger, postgres_server::PrivateServer, wait::eventually};
use sqlx::PgPool;

use crate::support::{Fixture, Recorder, SOON};

/// The standby looks for slots every 30 s at worst.
const PATIENCE: Duration = Duration::from_secs(60);
const PRIMARY: [&str; 3] =
    ["wal_level = logical", "max_wal_senders = 10", "synchronized_standby_slots = 'standby'"];

/// A primary with a reader that has delivered ten events, and a standby with a copy of its slot.
async fn pair(test: &str) -> Option<(PrivateServer, PrivateServer, Fixture, Recorder)> {
    let bindir = "AIRTIGHT_TEST_PG17_BINDIR";
    if ledger::variable(bindir).is_none() {
        ledger::leave_out(test, "no PostgreSQL 17", bindir);
        return None;
    }
    let primary = PrivateServer::start_from(bindir, test, &PRIMARY)?;
    let pool = PgPool::connect(&primary.url()).await.unwrap();
    sqlx::query("SELECT pg_create_physical_replication_slot('standby', true)").execute(&pool).await.unwrap();
    pool.close().await;
    let standby =
        primary.standby("standby", &["sync_replication_slots = on", "synchronized_standby_slots = ''"]);
    let f = Fixture::on(&primary.url()).await;
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.publish("a", 1..11).await;
    sink.has(10).await;
    assert_eq!(f.number("SELECT count(*) FROM pg_replication_slots WHERE failover").await, 1);
    is_copied(&f, &standby).await;
    relay.stop().await;
    Some((primary, standby, f, sink))
}

/// Waits until the standby has a copy of the slot, which takes until the primary's has moved past where the standby began.
async fn is_copied(f: &Fixture, standby: &PrivateServer) {
    let pool = PgPool::connect(&standby.url()).await.unwrap();
    let copied =
        "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1 AND synced AND NOT temporary)";
    eventually(PATIENCE, "a copy of the slot", async || {
        // What the server does by itself every 15 s.
        f.sql("SELECT pg_log_standby_snapshot()").await;
        sqlx::query_scalar::<_, bool>(copied).bind(f.slot()).fetch_one(&pool).await.unwrap()
    })
    .await;
    pool.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_standby_goes_on_where_the_primary_was() {
    let test = "a_promoted_standby_goes_on_where_the_primary_was";
    let Some((primary, standby, f, sink)) = pair(test).await else { return };
    // Some more that the copy of the slot does not know, delivered and not.
    let relay = f.start(&sink);
    f.publish("a", 11..21).await;
    sink.has(20).await;
    relay.kill().await;
    f.publish("a", 21..31).await;
    let written = f.text("SELECT pg_current_wal_lsn()::text").await;
    received(&standby, &written).await;
    f.outbox.pool().close().await;
    f.pool.close().await;
    primary.stop();
    standby.promote();
    let f = Fixture::on(&standby.url()).await;
    let relay = f.start(&sink);
    f.publish("a", 31..41).await;
    eventually(SOON, "all of them", async || sink.first_arrivals().len() == 40).await;
    relay.stop().await;
    assert_eq!(sink.first_arrivals(), names(40));
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status <> 'done'").await, 0);
}

/// The slot's copy may be newer than the copy of what was stored about it, so that it is not known what was delivered of
/// the last events, and what was parked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_the_slot_that_is_ahead_loses_nothing() {
    let test = "a_copy_of_the_slot_that_is_ahead_loses_nothing";
    let Some((primary, standby, f, sink)) = pair(test).await else { return };
    f.outbox.pool().close().await;
    f.pool.close().await;
    primary.stop();
    standby.promote();
    let f = Fixture::on(&standby.url()).await;
    // As if the last thing that was stored had not got through: with the position went the mark of `a:10`.
    let behind = "UPDATE airtight.slot s SET lsn = confirmed_flush_lsn - 8 FROM pg_replication_slots r WHERE r.slot_name = s.name";
    assert_eq!(f.sql(behind).await, 1);
    f.sql("UPDATE airtight.outbox SET status = 'pending', finished_at = NULL WHERE payload ->> 'n' = '10'")
        .await;
    // Without marks nobody knows which rows those are.
    let unmarked = CdcOptions { mark: false, ..f.options() };
    assert_eq!(f.start_with(unmarked, &sink).error().await.code(), "slot_moved");
    let relay = f.start(&sink);
    f.publish("a", 11..21).await;
    eventually(SOON, "all of them", async || sink.first_arrivals().len() == 20).await;
    f.streams().await;
    relay.stop().await;
    assert_eq!(sink.first_arrivals(), names(20));
    assert_eq!(sink.arrived().iter().filter(|name| *name == "a:10").count(), 2, "it may have been parked");
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status <> 'done'").await, 0);
    // But whoever moves it on the new primary makes a gap.
    f.publish("a", 21..31).await;
    f.advance_slot().await;
    let error = f.start(&sink).error().await;
    assert_eq!(error.code(), "slot_moved", "{error}");
}

fn names(count: i64) -> Vec<String> {
    (1..=count).map(|n| format!("a:{n}")).collect()
}

async fn received(standby: &PrivateServer, lsn: &str) {
    let pool = PgPool::connect(&standby.url()).await.unwrap();
    let received = "SELECT coalesce(pg_last_wal_receive_lsn() >= $1::pg_lsn, false)";
    eventually(SOON, "the WAL at the standby", async || {
        sqlx::query_scalar::<_, bool>(received).bind(lsn).fetch_one(&pool).await.unwrap()
    })
    .await;
    pool.close().await;
}
