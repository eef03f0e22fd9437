//! What the slot no longer has is reported, not skipped.

use airtight_core::Error;
use airtight_testkit::{postgres_server::PrivateServer, wait::eventually};

use crate::support::{Fixture, Recorder, SOON};

/// Delivered one event, and then stopped.
async fn delivered_one(name: &str) -> Option<(Fixture, Recorder)> {
    let f = Fixture::create(name).await?;
    let sink = Recorder::default();
    f.publish("a", 1..2).await;
    f.drain(&sink).await.unwrap();
    Some((f, sink))
}

fn refused(error: &Error, code: &str) {
    assert_eq!(error.code(), code, "{error}");
    for text in ["airtight cdc recover", "Everything up to", "rows from after that"] {
        assert!(error.message().contains(text), "{error} should have: {text}");
    }
}

#[tokio::test]
async fn a_slot_that_was_dropped() {
    let Some((f, sink)) = delivered_one("dropped").await else { return };
    f.drop_slot().await;
    f.publish("a", 2..4).await;
    let error = f.drain(&sink).await.unwrap_err();
    refused(&error, "slot_lost");
    assert!(error.message().contains("has 2 rows from after that"), "{error}");
    assert_eq!(sink.arrived(), ["a:1"]);
    f.recover().await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3"], "what the table still has, and that only");
}

#[tokio::test]
async fn a_slot_that_was_made_anew() {
    let Some((f, sink)) = delivered_one("anew").await else { return };
    f.drop_slot().await;
    f.publish("a", 2..4).await;
    f.sql(&format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", f.slot())).await;
    refused(&f.drain(&sink).await.unwrap_err(), "slot_moved");
    f.recover().await;
    f.publish("a", 4..5).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3", "a:4"]);
}

#[tokio::test]
async fn a_slot_that_was_moved_by_hand() {
    let Some((f, sink)) = delivered_one("moved").await else { return };
    f.publish("a", 2..4).await;
    f.advance_slot().await;
    let error = f.drain(&sink).await.unwrap_err();
    refused(&error, "slot_moved");
    assert!(error.message().contains("bytes of WAL would be skipped"), "{error}");
    f.recover().await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3"]);
}

#[tokio::test]
async fn a_slot_that_is_dropped_under_a_relay() {
    let Some(f) = Fixture::create("under").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.publish("a", 1..2).await;
    sink.has(1).await;
    f.drop_slot().await;
    refused(&relay.error().await, "slot_lost");
}

#[tokio::test]
async fn a_slot_that_is_made_anew_under_a_relay() {
    let Some(f) = Fixture::create("under_anew").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.publish("a", 1..2).await;
    sink.has(1).await;
    // The relay may look in between: then it finds nothing, and says that.
    f.sql(&format!(
        "DO $$ DECLARE pid int; BEGIN FOR i IN 1..2000 LOOP BEGIN \
           SELECT active_pid INTO pid FROM pg_replication_slots WHERE slot_name = '{0}'; \
           PERFORM pg_terminate_backend(pid); PERFORM pg_drop_replication_slot('{0}'); EXIT; \
         EXCEPTION WHEN object_in_use THEN PERFORM pg_sleep(0.001); END; END LOOP; END $$",
        f.slot()
    ))
    .await;
    f.publish("lost", 1..2).await;
    f.sql(&format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", f.slot())).await;
    let error = relay.error().await;
    assert!(["slot_moved", "slot_lost"].contains(&error.code()), "{error}");
    f.recover().await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "lost:1"]);
}

#[tokio::test]
async fn a_database_that_was_restored_elsewhere() {
    let Some((f, sink)) = delivered_one("restored").await else { return };
    f.sql("UPDATE airtight.slot SET system = '7000000000000000000'").await;
    f.publish("a", 2..3).await;
    refused(&f.drain(&sink).await.unwrap_err(), "other_server");
    f.recover().await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "a:2"]);
}

#[tokio::test]
async fn a_slot_that_the_server_gave_up() {
    let settings =
        ["wal_level = logical", "max_slot_wal_keep_size = 1MB", "min_wal_size = 32MB", "max_wal_size = 32MB"];
    let Some(server) = PrivateServer::start_with("gave_up", &settings) else { return };
    let f = Fixture::on(&server.url()).await;
    let sink = Recorder::default();
    f.publish("a", 1..2).await;
    f.drain(&sink).await.unwrap();
    f.publish("a", 2..3).await;
    f.sql("CREATE TABLE filler (x text)").await;
    eventually(SOON, "the slot to be lost", async || {
        f.sql("INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 5000); SELECT pg_switch_wal(); CHECKPOINT").await;
        f.text(&format!("SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{}'", f.slot())).await == "lost"
    })
    .await;
    let error = f.drain(&sink).await.unwrap_err();
    refused(&error, "slot_lost");
    assert!(error.message().contains("max_slot_wal_keep_size"), "{error}");
    // A half recovery: the reader is new, but the slot is still the lost one.
    f.sql("UPDATE airtight.slot SET phase = 'new', lsn = NULL").await;
    let error = f.drain(&sink).await.unwrap_err();
    assert_eq!(error.code(), "slot_lost", "{error}");
    f.recover().await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "a:2"]);
}
