//! What a hostile review of the log has found, one test for each defect.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{
    CancellationToken, Capabilities, Error, Limits, Order, Outcome, Relay, Sink, Source, Verdict,
    admin::Admin,
    log::{LogAdmin, LogOptions, ParkedFilter, Retention, SeekOptions, SeekTo},
    table::{Shape, TableSpec},
};
use airtight_postgres::{PgHandlers, PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, postgres_server::PrivateServer};
use futures::FutureExt;
use sqlx::PgConnection;

use crate::support::{Fixture, Reader, SOON, event, insert};

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
    new.store().open(&Capabilities::default()).await.unwrap();
    new.store().attach(&member, airtight_core::log::Start::Earliest).await.unwrap();
    let left = f.number("SELECT count(*) FROM airtight.relay WHERE grp = 'log:c'").await;
    assert_eq!(left, 0, "the old one comes back with its next heartbeat, and reads otherwise");
    new.store().members().leave(&member).await.unwrap();
}

/// After a failover to a standby that lacks the last events, their places are drawn again.
#[tokio::test]
async fn what_another_server_had_is_not_settled_here() {
    let Some(server) = PrivateServer::start("failover") else { return };
    let options = PgOptions { shape: Shape::Log, ..PgOptions::default() };
    let outbox = PgOutbox::connect(&server.url(), options).await.unwrap();
    outbox.migrate().await.unwrap();
    let publish = async |key: &str| Admin::publish(&outbox, &[event(key, 1)]).await.unwrap()[0].seq;
    for n in 1..=4 {
        publish(&format!("k{n}")).await;
    }
    let reader = Reader { log: outbox.log(LogOptions::consumer("c")) };
    reader.log.open(&Capabilities::default()).await.unwrap();
    let batch = reader.look().await;
    assert_eq!(batch.len(), 4, "read, and being delivered");
    let crashed = tokio::task::spawn_blocking(move || {
        server.crash();
        server
    });
    let _server = crashed.await.unwrap();
    // As a standby that had not got the last two has it.
    let sql = "DELETE FROM airtight.outbox WHERE seq > 2; SELECT setval('airtight.outbox_seq', 2)";
    let deadline = Instant::now() + SOON;
    while let Err(error) = sqlx::raw_sql(sql).execute(outbox.pool()).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!((publish("new").await, publish("new").await), (3, 4));
    let settlements: Vec<airtight_core::Settlement> = batch
        .iter()
        .map(|one| airtight_core::Settlement { position: one.position, verdict: Verdict::Delivered })
        .collect();
    while let Err(error) = reader.log.settle(&settlements).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut came = Vec::new();
    while came.iter().filter(|key| *key == "new").count() < 2 {
        assert!(Instant::now() < deadline, "only {came:?} came");
        if let Ok(batch) = reader.log.next(LIMITS).await {
            came.extend(batch.deliveries.iter().map(|one| one.event.aggregate_id.to_string()));
        }
        reader.log.wait(Duration::from_millis(50)).await;
    }
}

type Work = for<'a> fn(&'a mut PgConnection, bool) -> futures::future::BoxFuture<'a, ()>;

/// Ten events of ten keys, the fourth of which breaks; returns outcomes.
async fn with_one_that_breaks(f: &Fixture, work: Work) -> Vec<Outcome> {
    for n in 1..=10 {
        f.publish(&format!("k{n}"), n).await;
    }
    let reader = f.reader("c").await;
    let handlers = PgHandlers::new(&f.outbox, "c").with_log(&reader.log).otherwise(move |context, tx| {
        async move {
            work(tx, context.event.aggregate_id == "k4").await;
            Ok(())
        }
        .boxed()
    });
    let batch = reader.look().await;
    assert_eq!(batch.len(), 10);
    handlers.deliver(&batch).await
}

fn assert_only_the_fourth_failed(outcomes: &[Outcome]) {
    for (n, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Outcome::Committed => assert_ne!(n, 3, "{outcomes:?}"),
            Outcome::Failed(_) => assert_eq!(n, 3, "{outcomes:?}"),
            other => panic!("{n}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_handler_that_swallows_an_error_takes_no_other_event_with_it() {
    let Some(f) = Fixture::create("swallows").await else { return };
    let outcomes = with_one_that_breaks(&f, |tx, breaks| {
        async move {
            if breaks {
                let _ = sqlx::query("SELECT 1 / 0").execute(tx).await;
            }
        }
        .boxed()
    })
    .await;
    assert_only_the_fourth_failed(&outcomes);
}

#[tokio::test]
async fn a_handler_that_panics_takes_no_other_event_with_it() {
    let Some(f) = Fixture::create("panics").await else { return };
    let outcomes = with_one_that_breaks(&f, |_, breaks| {
        async move {
            assert!(!breaks, "on purpose");
        }
        .boxed()
    })
    .await;
    assert_only_the_fourth_failed(&outcomes);
}

/// Such a constraint is checked at COMMIT, which is the whole batch's.
#[tokio::test]
async fn a_deferred_constraint_kills_only_the_event_that_violates_it() {
    let Some(f) = Fixture::create("deferred").await else { return };
    f.sql(
        "CREATE TABLE parent (id int PRIMARY KEY); \
         CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
    )
    .await;
    let outcomes = with_one_that_breaks(&f, |tx, breaks| {
        async move {
            if breaks {
                sqlx::query("INSERT INTO child VALUES (1)").execute(tx).await.unwrap();
            }
        }
        .boxed()
    })
    .await;
    assert_only_the_fourth_failed(&outcomes);
}

/// A database that is away is nobody's fault: §4.4 of the design, no attempt is spent.
#[tokio::test]
async fn handlers_without_a_database_blame_no_event() {
    let Some(f) = Fixture::create("away").await else { return };
    f.publish("k", 1).await;
    let reader = f.reader("c").await;
    let away =
        PgOutbox::connect("postgres://nobody@127.0.0.1:1/nowhere", PgOptions::default()).await.unwrap();
    let handlers = PgHandlers::new(&away, "c").otherwise(|_, _| async { Ok(()) }.boxed());
    let outcomes = handlers.deliver(&reader.look().await).await;
    assert!(
        matches!(&outcomes[..], [Outcome::Failed(error)] if error.class() == airtight_core::Class::Unavailable),
        "{outcomes:?}"
    );
}

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
    tokio::time::sleep(Duration::from_millis(200)).await;
    let made = f.outbox.make_partitions().await;
    stop.store(true, Ordering::Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(made.unwrap() > 0);
}

/// A key that a dead event blocks must not stand in the way of other keys, nor be asked for all the time.
#[tokio::test]
async fn keys_that_are_blocked_hold_up_no_others() {
    let Some(f) = Fixture::create("blocked").await else { return };
    let soon = Duration::from_millis(1);
    let retry = |after| Verdict::Retry { after, error: Error::retryable("r", "again") };
    let dead = Verdict::Dead { error: Error::permanent("d", "no") };
    for n in 0..4 {
        f.publish(&format!("blocked{}", n / 2), n).await;
    }
    let reader = f.reader("c").await;
    // A dead one does not block: the next of its key fails, too, and waits for its time.
    let batch = reader.look().await;
    reader.settle(&batch[..1], &dead).await;
    reader.settle(&batch[2..3], &dead).await;
    reader.settle(&batch[1..2], &retry(soon)).await;
    reader.settle(&batch[3..4], &retry(soon)).await;
    reader.close().await;
    // From now on it does.
    let reader = f.reader_with(LogOptions::consumer("c").reading(|read| read.block_on_dead = true)).await;
    f.publish("free", 1).await;
    let batch = reader.look().await;
    assert_eq!(batch.len(), 1, "{batch:?}");
    reader.settle(&batch, &retry(soon)).await;
    let deadline = Instant::now() + SOON;
    loop {
        assert!(Instant::now() < deadline, "it never comes");
        let batch = reader.log.next(Limits { events: 1, bytes: 1 << 20 }).await.unwrap();
        if let Some(one) = batch.deliveries.first() {
            assert_eq!(one.event.aggregate_id, "free");
            reader.deliver(&batch.deliveries).await;
            break;
        }
        reader.log.wait(Duration::from_millis(50)).await;
    }
    let (mut looks, begin) = (0, Instant::now());
    while begin.elapsed() < Duration::from_secs(2) {
        assert!(reader.look().await.is_empty());
        reader.log.wait(Duration::from_secs(1)).await;
        looks += 1;
    }
    assert!(looks < 40, "{looks} looks in two seconds for what a person must decide");
}

/// While an event retries, its key waits: also if a person has brought an earlier one back.
#[tokio::test]
async fn nothing_of_a_key_passes_an_earlier_event_that_waits() {
    let Some(f) = Fixture::create("passes").await else { return };
    let retry = |seconds| Verdict::Retry {
        after: Duration::from_millis(seconds),
        error: Error::retryable("r", "again"),
    };
    for n in 1..=3 {
        f.publish("k", n).await;
    }
    let reader = f.reader("c").await;
    let batch = reader.look().await;
    reader.settle(&batch[..1], &Verdict::Dead { error: Error::permanent("d", "no") }).await;
    reader.settle(&batch[1..2], &retry(1_500)).await;
    reader.settle(&batch[2..3], &Verdict::Released).await;
    assert_eq!(f.outbox.retry_parked(&ParkedFilter::default()).await.unwrap(), 1);
    let first = {
        let deadline = Instant::now() + SOON;
        loop {
            assert!(Instant::now() < deadline, "it never comes");
            let batch = reader.look().await;
            if !batch.is_empty() {
                break batch;
            }
            reader.log.wait(Duration::from_millis(50)).await;
        }
    };
    assert_eq!(first[0].event.seq, 1);
    reader.settle(&first[..1], &retry(60_000)).await;
    reader.settle(&first[1..], &Verdict::Released).await;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let seqs: Vec<i64> = reader.look().await.iter().map(|one| one.event.seq).collect();
        assert!(seqs.is_empty(), "{seqs:?} came while 1 waits for its next try");
        reader.log.wait(Duration::from_millis(50)).await;
    }
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

const RELAY_LOG: &str = "CREATE SCHEMA cn_relay; \
    CREATE TABLE cn_relay.events (event_id text PRIMARY KEY, content text); \
    CREATE TABLE cn_relay.events_outbox (seq BIGSERIAL PRIMARY KEY, op TEXT NOT NULL, event_id TEXT NOT NULL, \
      topic_id TEXT NOT NULL, kind INT NOT NULL, created_at INT NOT NULL, ingested_at TIMESTAMPTZ NOT NULL, \
      effective_key TEXT NULL, reason TEXT NULL); \
    CREATE TABLE cn_relay.consumer_offsets (consumer TEXT PRIMARY KEY, last_seq BIGINT NOT NULL, \
      updated_at TIMESTAMPTZ NOT NULL)";

async fn relay_log(name: &str) -> Option<Fixture> {
    let db = TestDb::create(&format!("log_{name}")).await?;
    let pool = db.pool(5).await;
    sqlx::raw_sql(RELAY_LOG).execute(&pool).await.unwrap();
    let options = PgOptions { spec: Some(TableSpec::relay_log()), ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
    outbox.migrate().await.unwrap();
    Some(Fixture { db, outbox, pool })
}

async fn relay_log_publish(f: &Fixture, n: i64, ingested: &str) {
    f.sql(&format!(
        "INSERT INTO cn_relay.events VALUES ('e{n}', 'hello {n}'); \
         INSERT INTO cn_relay.events_outbox (op, event_id, topic_id, kind, created_at, ingested_at) \
         VALUES ('upsert', 'e{n}', 't', 1, 1700000000, {ingested})"
    ))
    .await;
}

#[tokio::test]
async fn the_relay_log_is_followed_as_its_document_says() {
    let Some(f) = relay_log("relay").await else { return };
    for n in 1..=5 {
        relay_log_publish(&f, n, "now()").await;
    }
    let reader = f.reader("index-v1").await;
    let batch = reader.look().await;
    assert_eq!(batch.len(), 5);
    let one = &batch[0].event;
    assert_eq!((&*one.stream, &*one.event_type, &*one.aggregate_id), ("t", "1", "e1"));
    reader.deliver(&batch).await;
    let offset = "SELECT last_seq FROM cn_relay.consumer_offsets WHERE consumer = 'index-v1'";
    assert_eq!(f.number(offset).await, 5);
    // Replay by hand, while it runs and has nothing to settle.
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 2").await;
    assert_eq!(reader.seqs(3).await, [3, 4, 5]);
    assert_eq!(f.number(offset).await, 5);
    // And while something is in flight.
    relay_log_publish(&f, 6, "now()").await;
    let batch = reader.look().await;
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 0").await;
    reader.deliver(&batch).await;
    assert_eq!(f.number(offset).await, 0, "what a person says wins");
    assert_eq!(reader.seqs(6).await, [1, 2, 3, 4, 5, 6]);
    // What fails is parked; the offset goes on.
    relay_log_publish(&f, 7, "now()").await;
    let batch = reader.look().await;
    let after = Duration::from_millis(1);
    reader.settle(&batch, &Verdict::Retry { after, error: Error::retryable("r", "again") }).await;
    assert_eq!(f.number(offset).await, 7);
    assert_eq!(reader.seqs(1).await, [7]);
    reader.close().await;
    // Time alone decides, and whoever is behind is told so.
    f.sql("UPDATE cn_relay.events_outbox SET ingested_at = now() - interval '31 days' WHERE seq <= 4").await;
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 1").await;
    let told = Retention { keep: Duration::from_secs(30 * 86_400), wait_for_consumers: false };
    let pruned = f.outbox.prune_log(told, &|_| {}).await.unwrap();
    assert_eq!((pruned.events, pruned.floor), (4, 4));
    let late = f.outbox.log(LogOptions::consumer("index-v1"));
    let error = late.open(&Capabilities::default()).await.unwrap_err();
    assert_eq!(error.code(), "behind_retention", "{error}");
    late.close().await.unwrap();
    let seek = f.outbox.seek("index-v1", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
    assert_eq!((seek.from, seek.to), (1, 4));
    let reader = f.reader("index-v1").await;
    assert_eq!(reader.seqs(3).await, [5, 6, 7]);
}

/// Counted from the offset that counts, which is not airtight's own.
#[tokio::test]
async fn a_seek_counts_from_the_offset_that_was_set_by_hand() {
    let Some(f) = relay_log("by_hand").await else { return };
    for n in 1..=5 {
        relay_log_publish(&f, n, "now()").await;
    }
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(5).await.len(), 5);
    reader.close().await;
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 1").await;
    let dry = SeekOptions { dry_run: true, ..SeekOptions::default() };
    let seek = f.outbox.seek("c", SeekTo::Seq(3), dry).await.unwrap();
    assert_eq!((seek.from, seek.to, seek.again, seek.skipped), (1, 3, 0, 2));
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
    assert_eq!(outbox.migrate().await.unwrap().len(), 7, "all that came since");
    Admin::publish(&outbox, &[event("k", 2)]).await.unwrap();
    let sink = airtight_core::sinks::MemorySink::default();
    let queue = outbox.queue(airtight_core::queue::QueueOptions::default());
    Relay::new(queue, sink.clone()).drain(CancellationToken::new()).await.unwrap();
    assert_eq!(sink.len(), 2);
}
