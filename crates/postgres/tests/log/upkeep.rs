//! What an operator does while others work: making partitions, counting, an upgrade.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{
    CancellationToken, Relay,
    admin::Admin,
    log::{LogAdmin, SeekOptions, SeekTo},
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, wait::eventually};

use crate::support::{Fixture, SOON, event, insert};

/// Events fell into the DEFAULT partition, and more come all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_are_made_again_while_events_fall_into_the_net() {
    let Some(f) = Fixture::create("net").await else { return };
    f.sql("SELECT setval('airtight.outbox_seq', 1000001)").await;
    f.publish("k", 1).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for _ in 0..3 {
        let (mut writer, stop) = (f.writer().await, stop.clone());
        writers.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                writer.run(&insert("airtight.outbox", "DEFAULT", "k")).await;
            }
        }));
    }
    eventually(SOON, "events in the net", async || {
        f.number("SELECT count(*) FROM airtight.outbox WHERE seq > 1000001").await > 30
    })
    .await;
    let made = f.outbox.make_partitions().await;
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(made.unwrap() > 0);
}

/// Counting may take minutes on a large log. Relays must be able to settle, and with that to renew their leases.
#[tokio::test]
async fn a_seek_that_counts_holds_up_no_settle() {
    let Some(f) = Fixture::create("dry").await else { return };
    f.publish("k", 1).await;
    let reader = f.reader("c").await;
    let batch = reader.look().await;
    // As good as a log that takes long to count.
    let mut slow = f.writer().await;
    slow.run("BEGIN; LOCK TABLE airtight.outbox IN ACCESS EXCLUSIVE MODE").await;
    let outbox = f.outbox.clone();
    let dry = tokio::spawn(async move {
        outbox.seek("c", SeekTo::Earliest, SeekOptions { dry_run: true, ..SeekOptions::default() }).await
    });
    // It looks at the log first; so does the consumer's heartbeat, which does not wait for the lock so long.
    let counting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' \
         AND (query LIKE '%skipped%' OR query LIKE '%witness_seq%' AND clock_timestamp() - query_start > interval '1 s')";
    let deadline = Instant::now() + SOON;
    while f.number(counting).await == 0 {
        assert!(Instant::now() < deadline, "it does not count");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let settled = tokio::time::timeout(Duration::from_secs(2), reader.deliver(&batch)).await;
    slow.run("ROLLBACK").await;
    let seek = dry.await.unwrap().unwrap();
    assert!(settled.is_ok(), "the dry run keeps offsets locked");
    assert_eq!(seek.to, 0);
    let offset = f.number("SELECT last_seq FROM airtight.partition WHERE grp = 'log:c'").await;
    assert_eq!(offset, 1);
}

/// A schema that an airtight without logs has made.
#[tokio::test]
async fn a_queue_of_an_older_version_works_on_after_the_upgrade() {
    let Some(db) = TestDb::create("log_upgrade").await else { return };
    let pool = db.pool(2).await;
    let all = PgOutbox::migration_sql(&PgOptions::default());
    let (old, _) = all.split_once("-- 3: ").unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("{old} COMMIT;"))).execute(&pool).await.unwrap();
    let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
    Admin::publish(&outbox, &[event("k", 1)]).await.unwrap();
    assert_eq!(outbox.migrate().await.unwrap().len(), 9, "all that came since");
    Admin::publish(&outbox, &[event("k", 2)]).await.unwrap();
    let sink = airtight_core::sinks::MemorySink::default();
    let queue = outbox.queue(airtight_core::queue::QueueOptions::default());
    Relay::new(queue, sink.clone()).drain(CancellationToken::new()).await.unwrap();
    assert_eq!(sink.len(), 2);
}
