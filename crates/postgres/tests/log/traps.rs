//! The hole rule, one trap at a time: scripted interleavings of a few connections. Many writers hide what is
//! tested here, so there are few.

use std::time::Duration;

use airtight_core::Source;

use crate::support::{Fixture, insert};

#[tokio::test]
async fn an_event_that_commits_late_is_not_skipped() {
    let Some(f) = Fixture::create("late").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN").await;
    let first = one.insert("a").await;
    let second = two.insert("b").await;
    assert_eq!((first, second), (1, 2));
    reader.nothing_comes().await;
    one.run("COMMIT").await;
    assert_eq!(reader.seqs(2).await, [1, 2]);
}

#[tokio::test]
async fn what_rolls_back_never_was() {
    let Some(f) = Fixture::create("rollback").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN").await;
    one.insert("a").await;
    two.insert("b").await;
    reader.nothing_comes().await;
    one.run("ROLLBACK").await;
    assert_eq!(reader.seqs(1).await, [2]);
}

#[tokio::test]
async fn a_savepoint_that_is_rolled_back_leaves_a_hole_until_its_transaction_ends() {
    let Some(f) = Fixture::create("savepoint").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN; SAVEPOINT s").await;
    assert_eq!(one.insert("a").await, 1);
    one.run("ROLLBACK TO s").await;
    assert_eq!(one.insert("a").await, 2);
    assert_eq!(two.insert("b").await, 3);
    reader.nothing_comes().await;
    one.run("COMMIT").await;
    assert_eq!(reader.seqs(2).await, [2, 3]);
}

/// PREPARE takes the process id away, and with it every identity but the transaction's own.
#[tokio::test]
async fn a_transaction_that_is_prepared_after_it_was_noted_is_still_waited_for() {
    let Some(f) = Fixture::create("prepare").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN").await;
    one.insert("a").await;
    two.insert("b").await;
    // Noted, under the name that it is about to lose.
    assert!(reader.look().await.is_empty());
    let gid = f.db.name().to_owned();
    one.run(&format!("PREPARE TRANSACTION '{gid}'")).await;
    // The session goes on with something else, and holds the sequence again.
    one.run("BEGIN").await;
    assert_eq!(one.insert("c").await, 3);
    reader.nothing_comes().await;
    one.run("COMMIT").await;
    reader.nothing_comes().await;
    two.run(&format!("COMMIT PREPARED '{gid}'")).await;
    assert_eq!(reader.seqs(3).await, [1, 2, 3]);
}

#[tokio::test]
async fn a_prepared_transaction_that_is_rolled_back_never_was() {
    let Some(f) = Fixture::create("prepared_rollback").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    let gid = f.db.name().to_owned();
    one.run("BEGIN").await;
    one.insert("a").await;
    one.run(&format!("PREPARE TRANSACTION '{gid}'")).await;
    two.insert("b").await;
    reader.nothing_comes().await;
    two.run(&format!("ROLLBACK PREPARED '{gid}'")).await;
    assert_eq!(reader.seqs(1).await, [2]);
}

/// Such an insert does not lock the parent table.
#[tokio::test]
async fn an_insert_straight_into_a_partition_is_waited_for() {
    let Some(f) = Fixture::create("leaf").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN").await;
    one.run(&insert("airtight.outbox_1", "DEFAULT", "a")).await;
    two.insert("b").await;
    reader.nothing_comes().await;
    one.run("COMMIT").await;
    assert_eq!(reader.seqs(2).await, [1, 2]);
}

/// Before its INSERT such a transaction has no lock on any table.
#[tokio::test]
async fn a_value_that_is_drawn_ahead_of_the_insert_is_waited_for() {
    let Some(f) = Fixture::create("ahead").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN").await;
    let drawn = one.number("SELECT nextval('airtight.outbox_seq')").await;
    two.insert("b").await;
    reader.nothing_comes().await;
    one.run(&insert("airtight.outbox", &drawn.to_string(), "a")).await;
    reader.nothing_comes().await;
    one.run("COMMIT").await;
    assert_eq!(reader.seqs(2).await, [1, 2]);
}

/// The value of the row that was not inserted is a hole in a transaction that goes on.
#[tokio::test]
async fn on_conflict_leaves_a_hole_that_is_passed_when_its_transaction_ends() {
    let Some(f) = Fixture::create("conflict").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    let publish = |key: &str| {
        format!(
            "SELECT * FROM airtight.publish('s', 'T', 'A', '{key}', '{{}}', event_id => '018f0000-0000-7000-8000-000000000001')"
        )
    };
    one.run(&publish("a")).await;
    assert_eq!(reader.seqs(1).await, [1]);
    one.run("BEGIN").await;
    one.run(&publish("a")).await;
    let third = two.insert("b").await;
    reader.nothing_comes().await;
    one.run("COMMIT").await;
    assert_eq!(reader.seqs(1).await, [third]);
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox").await, 2);
}

#[tokio::test]
async fn copy_is_followed_like_any_insert() {
    let Some(f) = Fixture::create("copy").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN").await;
    let mut copy = one
        .0
        .copy_in_raw("COPY airtight.outbox (stream, event_type, aggregate_type, aggregate_id) FROM STDIN")
        .await
        .unwrap();
    copy.send("s\tT\tA\tk\ns\tT\tA\tk\ns\tT\tA\tk\n".as_bytes()).await.unwrap();
    copy.finish().await.unwrap();
    two.insert("b").await;
    reader.nothing_comes().await;
    one.run("COMMIT").await;
    assert_eq!(reader.seqs(4).await, [1, 2, 3, 4]);
}

#[tokio::test]
async fn a_transaction_that_does_not_publish_is_never_waited_for() {
    let Some(f) = Fixture::create("unrelated").await else { return };
    f.sql("CREATE TABLE business (n bigint)").await;
    let (mut idle, mut one, mut two) = (f.writer().await, f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    idle.run("BEGIN; INSERT INTO business VALUES (1)").await;
    assert_eq!(f.number("SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND datname = current_database()").await, 1);
    one.run("BEGIN").await;
    one.insert("a").await;
    two.insert("b").await;
    reader.nothing_comes().await;
    one.run("ROLLBACK").await;
    assert_eq!(reader.seqs(1).await, [2]);
    idle.run("COMMIT").await;
}

/// A publisher that came after the hole was seen cannot fill it.
#[tokio::test]
async fn a_later_publisher_is_not_waited_for() {
    let Some(f) = Fixture::create("later").await else { return };
    let (mut one, mut two, mut three) = (f.writer().await, f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    one.run("BEGIN").await;
    one.insert("a").await;
    two.insert("b").await;
    assert!(reader.look().await.is_empty(), "the hole is seen, its holder noted");
    three.run("BEGIN").await;
    assert_eq!(three.insert("c").await, 3);
    one.run("ROLLBACK").await;
    assert_eq!(reader.seqs(1).await, [2], "three holds the sequence, too, but drew later");
    three.run("COMMIT").await;
    assert_eq!(reader.seqs(1).await, [3]);
}

#[tokio::test]
async fn a_writer_that_is_killed_leaves_a_hole_that_is_passed() {
    let Some(f) = Fixture::create("killed").await else { return };
    let (mut one, mut two) = (f.writer().await, f.writer().await);
    let reader = f.reader("r").await;
    let pid = one.number("SELECT pg_backend_pid()::bigint").await;
    one.run("BEGIN").await;
    one.insert("a").await;
    two.insert("b").await;
    reader.nothing_comes().await;
    two.run(&format!("SELECT pg_terminate_backend({pid})")).await;
    assert_eq!(reader.seqs(1).await, [2]);
    assert!(one.try_run("COMMIT").await.is_err());
}

/// What retention removes is a hole that nobody holds: it is told by the floor, and is an error.
#[tokio::test]
async fn what_retention_has_removed_is_an_error_and_no_hole() {
    use airtight_core::{
        Capabilities, Limits,
        log::{LogAdmin, Retention},
    };
    let Some(f) = Fixture::create("floor").await else { return };
    let reader = f.reader("r").await;
    for n in 1..=6 {
        f.publish("k", n).await;
    }
    assert_eq!(reader.look().await.len(), 6, "read, and never settled");
    f.sql("UPDATE airtight.outbox SET created_at = now() - interval '1 year' WHERE seq <= 4").await;
    let told = Retention { keep: Duration::from_secs(86_400), wait_for_consumers: false };
    let pruned = f.outbox.prune_log(told, &|_| {}).await.unwrap();
    assert_eq!((pruned.events, pruned.floor), (4, 4));
    // One that stands below the floor, by its memory alone.
    let late = f.outbox.log(airtight_core::log::LogOptions::consumer("late"));
    late.open(&Capabilities::default()).await.unwrap();
    f.sql("UPDATE airtight.partition SET last_seq = 2 WHERE grp = 'log:late'").await;
    let error = late.close().await.err();
    drop(error);
    let late = f.outbox.log(airtight_core::log::LogOptions::consumer("late"));
    let error = late.open(&Capabilities::default()).await.unwrap_err();
    assert_eq!(error.code(), "behind_retention", "{error}");
    assert!(error.to_string().contains("Rebuilding a consumer"), "{error}");
    late.close().await.unwrap();

    // And one that runs into it while it follows.
    let mut running = f.writer().await;
    let follower = f.reader("follower").await;
    assert_eq!(follower.seqs(2).await, [5, 6]);
    let mut seqs = Vec::new();
    for _ in 0..4 {
        seqs.push(running.insert("k").await);
    }
    running
        .run(&format!(
            "DELETE FROM airtight.outbox WHERE seq <= {0}; UPDATE airtight.log SET floor = {0}",
            seqs[1]
        ))
        .await;
    let error = loop {
        match follower.log.next(Limits { events: 10, bytes: 1 << 20 }).await {
            Ok(batch) => assert!(batch.is_empty(), "{:?}", batch.deliveries),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), "behind_retention", "{error}");
}
