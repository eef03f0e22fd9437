//! The table itself: order, repeated ids, partitions, the net, retention, wake-ups, and tables that are refused.

use std::time::{Duration, Instant};

use airtight_core::{
    Capabilities, NewEvent, Source,
    admin::Admin,
    log::{LogAdmin, LogOptions, Retention},
    table::{Shape, TableSpec},
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::wait::eventually;
use uuid::Uuid;

use crate::support::{Fixture, Reader, SOON, event, insert};

#[tokio::test]
async fn events_come_in_order_and_offsets_last() {
    let Some(f) = Fixture::create("smoke").await else { return };
    for n in 1..=10 {
        f.publish(&format!("k{}", n % 3), n).await;
    }
    let reader = f.reader("one").await;
    assert_eq!(reader.seqs(10).await, (1..=10).collect::<Vec<i64>>());
    reader.close().await;
    f.publish("k", 11).await;
    let again = f.reader("one").await;
    assert_eq!(again.seqs(1).await, [11]);
    let other = f.reader("two").await;
    assert_eq!(other.seqs(11).await.len(), 11);
}

/// No index over all partitions can be unique by id alone: each partition has its own.
#[tokio::test]
async fn a_repeated_id_is_refused_by_its_partition_and_elsewhere_only_by_the_inbox() {
    let Some(f) = Fixture::create("ids").await else { return };
    let twice = NewEvent { id: Some(Uuid::now_v7()), ..event("k", 1) };
    let first = Admin::publish(&f.outbox, &[twice.clone(), twice.clone()]).await.unwrap();
    assert!(first[0].is_new && !first[1].is_new, "{first:?}");
    let same = Admin::publish(&f.outbox, std::slice::from_ref(&twice)).await.unwrap();
    assert_eq!((same[0].seq, same[0].is_new), (first[0].seq, false));

    // The next partition does not know of it.
    f.sql("SELECT setval('airtight.outbox_seq', 2000000)").await;
    let elsewhere = Admin::publish(&f.outbox, std::slice::from_ref(&twice)).await.unwrap();
    assert!(elsewhere[0].is_new, "{elsewhere:?}");
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox").await, 2);
    let inbox = f.outbox.inbox();
    let mut seen = Vec::new();
    let reader = f.reader("c").await;
    let deadline = Instant::now() + SOON;
    while seen.len() < 2 && Instant::now() < deadline {
        let batch = reader.look().await;
        for delivery in &batch {
            let mut tx = f.pool.begin().await.unwrap();
            seen.push(inbox.first_time(&mut tx, "c", &delivery.event.id).await.unwrap());
            tx.commit().await.unwrap();
        }
        reader.deliver(&batch).await;
        reader.log.wait(Duration::from_millis(20)).await;
    }
    assert_eq!(seen, [true, false]);
}

#[tokio::test]
async fn partitions_are_made_ahead_and_the_net_catches_what_comes_before() {
    let Some(f) = Fixture::create("ahead").await else { return };
    assert_eq!(f.outbox.make_partitions().await.unwrap(), 0, "there is room");
    // Past the middle of the last one, another is made.
    f.sql("SELECT setval('airtight.outbox_seq', 600000)").await;
    f.publish("k", 1).await;
    assert!(f.outbox.make_partitions().await.unwrap() >= 1);
    assert_eq!(f.outbox.make_partitions().await.unwrap(), 0);
    let analysed = "SELECT count(*) FROM pg_statistic WHERE starelid = 'airtight.outbox'::regclass";
    assert!(f.number(analysed).await > 0, "the table as a whole is analysed");

    // Far beyond them all: the net takes it, it is delivered, and said to operators.
    f.sql("SELECT setval('airtight.outbox_seq', 90000000)").await;
    let caught = f.publish("k", 2).await;
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox_default").await, 1);
    let findings = f.outbox.check().await.unwrap();
    assert!(
        findings.iter().any(|finding| !finding.fatal && finding.message.contains("DEFAULT")),
        "{findings:?}"
    );
    assert!(f.outbox.make_partitions().await.unwrap() >= 1);
    // It begins well behind what the net has caught, since more may come before it is there.
    let begins = "SELECT max(substring(c.relname FROM '[0-9]+$')::bigint) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid";
    let begins = f.number(begins).await;
    assert!(begins > caught);
    f.sql(&format!("SELECT setval('airtight.outbox_seq', {begins})")).await;
    let beyond = f.publish("k", 3).await;
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox_default").await, 1, "{beyond} has a partition");
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(3).await, [600_001, caught, beyond]);
}

/// DDL that waits for an open writer would make everybody behind it wait: it lets go, and comes again.
#[tokio::test]
async fn partitions_are_made_beside_open_writers() {
    let Some(f) = Fixture::create("beside").await else { return };
    let mut open = f.writer().await;
    open.run("BEGIN").await;
    open.insert("k").await;
    f.sql("SELECT setval('airtight.outbox_seq', 900000)").await;
    assert!(
        f.outbox.make_partitions().await.unwrap() >= 1,
        "a writer that is in another partition is no obstacle"
    );
    open.run("COMMIT").await;
}

#[tokio::test]
async fn retention_drops_whole_partitions_behind_the_slowest_consumer() {
    let Some(f) = Fixture::create("retention").await else { return };
    let keep = Duration::from_secs(30 * 86_400);
    f.publish("k", 1).await;
    f.sql("SELECT setval('airtight.outbox_seq', 1000000)").await;
    f.publish("k", 2).await;
    assert!(f.outbox.make_partitions().await.unwrap() >= 1);
    f.sql("SELECT setval('airtight.outbox_seq', 1000100)").await;
    let young = f.publish("k", 3).await;
    f.sql("UPDATE airtight.outbox SET created_at = now() - interval '31 days' WHERE seq = 1").await;
    let partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'airtight.outbox'::regclass";
    let before = f.number(partitions).await;

    let slow = f.reader("slow").await;
    let retention = Retention { keep, wait_for_consumers: true };
    let pruned = f.outbox.prune_log(retention, &|_| {}).await.unwrap();
    assert_eq!(
        (pruned.events, pruned.partitions, pruned.held_by.as_deref()),
        (0, 0, Some("slow")),
        "{pruned:?}"
    );

    assert_eq!(slow.seqs(3).await.len(), 3);
    slow.close().await;
    // A writer has the table open: dropping waits for nobody for long, and comes again until it can.
    let mut open = f.writer().await;
    open.run("BEGIN").await;
    open.insert("k").await;
    let outbox = f.outbox.clone();
    let pruning = tokio::spawn(async move { outbox.prune_log(retention, &|_| {}).await });
    let mut other = f.writer().await;
    eventually(SOON, "the drop to ask for its lock", async || {
        f.number("SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND NOT granted").await > 0
    })
    .await;
    let begun = Instant::now();
    other.insert("k").await;
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "writers wait for a lock_timeout at most: {:?}",
        begun.elapsed()
    );
    open.run("COMMIT").await;
    let pruned = pruning.await.unwrap().unwrap();
    assert_eq!((pruned.events, pruned.partitions, pruned.floor), (1, 1, 1), "{pruned:?}");
    assert_eq!(f.number(partitions).await, before - 1);

    let late = f.reader("late").await;
    assert_eq!(late.seqs(2).await[..2], [1_000_001, young], "a new consumer begins with the oldest there is");
}

#[tokio::test]
async fn rows_that_no_dropped_partition_takes_along_are_deleted() {
    let Some(f) = Fixture::create("rows").await else { return };
    for n in 1..=20 {
        f.publish("k", n).await;
    }
    f.sql("UPDATE airtight.outbox SET created_at = now() - interval '40 days' WHERE seq <= 15").await;
    let pruned = f.outbox.prune_log(Retention::default(), &|_| {}).await.unwrap();
    assert_eq!((pruned.events, pruned.floor), (15, 15));
    assert_eq!(f.number("SELECT min(seq) FROM airtight.outbox").await, 16);
}

#[tokio::test]
async fn wake_ups_carry_the_newest_seq_and_keep_a_transaction_from_being_prepared() {
    let options = PgOptions { shape: Shape::Log, notify: Some(true), ..PgOptions::default() };
    let Some(f) = Fixture::with("notify", options).await else { return };
    let mut listener = sqlx::postgres::PgListener::connect_with(&f.pool).await.unwrap();
    listener.listen("airtight_outbox").await.unwrap();
    let events: Vec<NewEvent> = (0..5).map(|n| event("k", n)).collect();
    Admin::publish(&f.outbox, &events).await.unwrap();
    let woken = tokio::time::timeout(SOON, listener.recv()).await.unwrap().unwrap();
    assert_eq!(woken.payload(), "5", "once for the statement, with the highest seq");
    let more = tokio::time::timeout(Duration::from_millis(200), listener.recv()).await;
    assert!(more.is_err(), "{more:?}");

    // A relay that would look once a minute has it at once.
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(5).await.len(), 5);
    for _ in 0..20 {
        // So that it does not look by itself any more.
        assert!(reader.look().await.is_empty());
        reader.log.wait(Duration::from_millis(1)).await;
    }
    let waiting = reader.log.clone();
    let waited = tokio::spawn(async move {
        let begun = Instant::now();
        waiting.wait(Duration::from_secs(60)).await;
        begun.elapsed()
    });
    f.publish("k", 6).await;
    assert!(waited.await.unwrap() < SOON);
    assert_eq!(reader.seqs(1).await, [6]);

    let mut writer = f.writer().await;
    writer.run("BEGIN").await;
    writer.insert("k").await;
    let refused = writer.try_run(&format!("PREPARE TRANSACTION '{}'", f.db.name())).await.unwrap_err();
    assert!(refused.to_string().contains("NOTIFY"), "{refused}");
}

#[tokio::test]
async fn what_would_break_the_rule_is_refused_with_the_statement_that_mends_it() {
    let Some(f) = Fixture::create("refused").await else { return };
    f.publish("k", 1).await;
    let cases = [
        (
            "ALTER SEQUENCE airtight.outbox_seq CACHE 20",
            "bad_sequence",
            "ALTER SEQUENCE airtight.outbox_seq INCREMENT 1 CACHE 1 NO CYCLE",
            "ALTER SEQUENCE airtight.outbox_seq INCREMENT 1 CACHE 1 NO CYCLE",
        ),
        (
            "ALTER SEQUENCE airtight.outbox_seq INCREMENT 2",
            "bad_sequence",
            "INCREMENT 1",
            "ALTER SEQUENCE airtight.outbox_seq INCREMENT 1 CACHE 1 NO CYCLE",
        ),
        (
            "ALTER SEQUENCE airtight.outbox_seq CYCLE",
            "bad_sequence",
            "NO CYCLE",
            "ALTER SEQUENCE airtight.outbox_seq NO CYCLE",
        ),
        (
            "ALTER TABLE airtight.outbox_1 SET UNLOGGED",
            "unlogged",
            "SET LOGGED",
            "ALTER TABLE airtight.outbox_1 SET LOGGED",
        ),
        (
            "SELECT setval('airtight.outbox_seq', 500); INSERT INTO airtight.partition (outbox, grp, n, last_seq) \
             VALUES ('airtight.outbox', 'log:c', 0, 600)",
            "sequence_behind",
            "`airtight consumers seek c --earliest`",
            // There is no such consumer, only its offset.
            "DELETE FROM airtight.partition WHERE grp = 'log:c'",
        ),
    ];
    for (breaks, code, mends, mend) in cases {
        f.sql(breaks).await;
        let log = f.outbox.log(LogOptions::consumer("c"));
        let error = log.open(&Capabilities::default()).await.unwrap_err();
        assert_eq!(error.code(), code, "{breaks}: {error}");
        assert!(error.remedy().unwrap_or_default().contains(mends), "{breaks}: {error}");
        let _ = log.close().await;
        f.sql(mend).await;
    }
    let reader = f.reader("fine").await;
    assert_eq!(reader.seqs(1).await, [1]);
}

#[tokio::test]
async fn row_security_that_hides_rows_is_refused() {
    let Some(f) = Fixture::create("rls").await else { return };
    let role = f.db.name().to_owned();
    f.sql(&format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA airtight TO {role}; \
         GRANT ALL ON ALL TABLES IN SCHEMA airtight TO {role}; GRANT ALL ON ALL SEQUENCES IN SCHEMA airtight TO {role}; \
         ALTER TABLE airtight.outbox ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON airtight.outbox USING (stream = 'mine')"
    ))
    .await;
    let url = f.db.url().replace("//airtight@", &format!("//{role}@"));
    let outbox =
        PgOutbox::connect(&url, PgOptions { shape: Shape::Log, ..PgOptions::default() }).await.unwrap();
    let error = outbox.log(LogOptions::consumer("c")).open(&Capabilities::default()).await.unwrap_err();
    assert_eq!(error.code(), "row_security", "{error}");
    let remedy = error.remedy().unwrap();
    assert_eq!(remedy, format!("ALTER ROLE {role} BYPASSRLS"));
    f.publish("k", 1).await;
    f.sql(remedy).await;
    let reader = Reader { log: outbox.log(LogOptions::consumer("c")) };
    reader.log.open(&Capabilities::default()).await.unwrap();
    assert_eq!(reader.seqs(1).await, [1]);
    reader.close().await;
    outbox.pool().close().await;
    f.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn a_column_without_a_sequence_is_refused() {
    let Some(f) = Fixture::create("plain_seq").await else { return };
    f.sql(
        "CREATE TABLE public.journal (seq bigint PRIMARY KEY, id uuid, stream text, event_type text, aggregate_type text, \
         aggregate_id text, op text, payload jsonb, payload_bytes bytea, headers jsonb, occurred_at timestamptz, \
         schema_version int, max_attempts int, created_at timestamptz)",
    )
    .await;
    let spec = TableSpec::canonical_log(Some("public"), "journal");
    let outbox =
        PgOutbox::connect(&f.db.url(), PgOptions { spec: Some(spec), ..PgOptions::default() }).await.unwrap();
    let error = outbox.log(LogOptions::consumer("c")).open(&Capabilities::default()).await.unwrap_err();
    assert_eq!(error.code(), "no_sequence", "{error}");
    assert!(error.remedy().unwrap().contains("SET DEFAULT nextval"), "{error}");
    let findings = outbox.check().await.unwrap();
    assert!(findings[0].fatal, "{findings:?}");
    let row = |seq: &str| {
        format!(
            "INSERT INTO public.journal (seq, id, stream, event_type, aggregate_type, aggregate_id, op, occurred_at, created_at) \
             VALUES ({seq}, gen_random_uuid(), 's', 'T', 'A', 'k', 'upsert', now(), now())"
        )
    };
    f.sql(&row("1")).await;
    let remedy = error.remedy().unwrap();
    f.sql(remedy).await;
    f.sql(&row("DEFAULT")).await;
    let reader = Reader { log: outbox.log(LogOptions::consumer("c")) };
    reader.log.open(&Capabilities::default()).await.unwrap();
    assert_eq!(reader.seqs(2).await, [1, 2], "what was there, and what came since");
    reader.close().await;
}

/// Dropping a partition needs a lock that an open transaction is in the way of, and whoever publishes meanwhile
/// stands behind it.
#[tokio::test]
async fn retention_behind_an_open_transaction_holds_publishers_up_for_a_moment_only() {
    let Some(f) = Fixture::create("prune_open").await else { return };
    f.publish("k", 1).await;
    f.sql("UPDATE airtight.outbox SET created_at = now() - interval '1 year'; SELECT setval('airtight.outbox_seq', 2000000)")
        .await;
    f.outbox.make_partitions().await.unwrap();
    let mut reader = f.writer().await;
    reader.run("SET application_name = 'report'; BEGIN; SELECT count(*) FROM airtight.outbox").await;
    let outbox = f.outbox.clone();
    let pruning = tokio::spawn(async move { outbox.prune_log(Retention::default(), &|_| ()).await });
    let mut longest = Duration::ZERO;
    let mut published = 0;
    while !pruning.is_finished() {
        let begun = Instant::now();
        f.publish("k", 2).await;
        longest = longest.max(begun.elapsed());
        published += 1;
    }
    let error = pruning.await.unwrap().unwrap_err();
    assert!(error.code() == "locked" && error.message().contains("(report, idle in transaction)"), "{error}");
    println!("{published} published meanwhile, the longest took {longest:?}");
    assert!(published > 10 && longest < Duration::from_millis(700), "{published}, {longest:?}");
    reader.run("COMMIT").await;
    let pruned = f.outbox.prune_log(Retention::default(), &|_| ()).await.unwrap();
    assert_eq!((pruned.events, pruned.partitions), (1, 1), "{pruned:?}");
}

#[tokio::test]
async fn a_queue_is_not_followed_and_a_log_is_not_claimed() {
    let Some(f) = Fixture::with("shapes", PgOptions::default()).await else { return };
    let error = f.outbox.log(LogOptions::consumer("c")).open(&Capabilities::default()).await.unwrap_err();
    assert!(error.code() == "wrong_shape" && error.message().contains("--shape log"), "{error}");
    let log = PgOutbox::connect(&f.db.url(), PgOptions { shape: Shape::Log, ..PgOptions::default() })
        .await
        .unwrap();
    let error = log.migrate().await.unwrap_err();
    assert_eq!(error.code(), "wrong_shape", "{error}");
    let second = PgOptions { shape: Shape::Log, table: "events".into(), ..PgOptions::default() };
    let second = PgOutbox::connect(&f.db.url(), second).await.unwrap();
    second.migrate().await.unwrap();
    let error = second
        .queue(airtight_core::queue::QueueOptions::default())
        .open(&Capabilities::default())
        .await
        .unwrap_err();
    assert_eq!(error.code(), "no_status", "{error}");
    let found = PgOptions { table: "events".into(), ..PgOptions::default() };
    let found = PgOutbox::connect(&f.db.url(), found).await.unwrap().detect().await.unwrap();
    assert!(found.spec().status.is_none(), "what it is can be asked");
}

#[tokio::test]
async fn the_backlog_is_one_cheap_query() {
    let Some(f) = Fixture::create("backlog").await else { return };
    let reader = f.reader("c").await;
    let backlog = "SELECT airtight.backlog('c')";
    assert_eq!(f.number(backlog).await, 0);
    for n in 0..7 {
        f.publish("k", n).await;
    }
    assert_eq!(f.number(backlog).await, 7);
    assert_eq!(f.outbox.lag("c").await.unwrap(), 7);
    assert_eq!(reader.seqs(7).await.len(), 7);
    assert_eq!(f.number(backlog).await, 0);
    let status = f.outbox.status().await.unwrap();
    assert_eq!((status.consumers[0].lag_events, status.consumers[0].offset), (0, 7));
    let unknown: Option<i64> =
        sqlx::query_scalar("SELECT airtight.backlog('nobody')").fetch_one(&f.pool).await.unwrap();
    assert_eq!(unknown, None);
}

#[tokio::test]
async fn nothing_is_ever_updated_in_the_log() {
    let Some(f) = Fixture::create("append_only").await else { return };
    for n in 0..200 {
        f.publish(&format!("k{}", n % 5), n).await;
    }
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(200).await.len(), 200);
    let changed = "SELECT coalesce(sum(pg_stat_get_xact_tuples_updated(relid) + pg_stat_get_tuples_updated(relid) \
                   + pg_stat_get_tuples_deleted(relid)), 0)::bigint FROM pg_partition_tree('airtight.outbox')";
    assert_eq!(f.number(changed).await, 0);
}

/// The same in tokio-postgres.
#[tokio::test]
async fn the_inbox_is_asked_through_tokio_postgres_too() {
    let Some(f) = Fixture::create("inbox_tokio").await else { return };
    let (mut client, connection) = tokio_postgres::connect(&f.db.url(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let inbox = f.outbox.inbox();
    let tx = client.transaction().await.unwrap();
    assert!(inbox.first_time_tokio(&tx, "c", "1").await.unwrap());
    assert!(!inbox.first_time_tokio(&tx, "c", "1").await.unwrap());
    tx.rollback().await.unwrap();
    let tx = client.transaction().await.unwrap();
    assert!(inbox.first_time_tokio(&tx, "c", "1").await.unwrap(), "what rolled back never was");
    tx.commit().await.unwrap();
    let mut conn = f.pool.acquire().await.unwrap();
    assert!(!inbox.first_time(&mut conn, "c", "1").await.unwrap());
    assert!(inbox.first_time(&mut conn, "d", "1").await.unwrap(), "another consumer's own");
    drop(conn);
    f.sql("UPDATE airtight.inbox SET seen_at = now() - interval '31 days' WHERE consumer = 'c'").await;
    assert_eq!(f.outbox.prune_inbox(airtight_core::inbox::KEEP).await.unwrap(), 1);
}

/// A leaf's own default draws from the same sequence.
#[tokio::test]
async fn inserts_of_every_kind_draw_from_one_sequence() {
    let Some(f) = Fixture::create("one_sequence").await else { return };
    let mut writer = f.writer().await;
    writer.run(&insert("airtight.outbox", "DEFAULT", "a")).await;
    writer.run(&insert("airtight.outbox_1", "DEFAULT", "a")).await;
    writer.run("SELECT airtight.publish('s', 'T', 'A', 'a', '{}')").await;
    writer.run("SELECT airtight.publish_bytes('s', 'T', 'A', 'a', '\\x00')").await;
    assert_eq!(f.reader("c").await.seqs(4).await, [1, 2, 3, 4]);
}
