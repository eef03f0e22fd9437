//! What is PostgreSQL's own: publishing in four ways, migrations, HOT claims, bad rows, wake-ups, errors; the choice
//! between the canonical and the foreign store.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "outbox/stores.rs"]
mod stores;
mod support;

use std::time::{Duration, Instant};

use airtight_core::{
    Capabilities, Class, Limits, NewEvent, Op, Order, Policy, Relay, Settlement, Source, Verdict,
    admin::{Admin, Filter, Prune},
    queue::QueueOptions,
    sinks::MemorySink,
    state::State,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, wait::eventually};
use sqlx::{Connection, Row};
use support::Canonical;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const LONG: Duration = Duration::from_secs(20);

fn event(key: &str, n: i64) -> NewEvent {
    NewEvent::new("test", "Tested", "Test", key).json(&serde_json::json!({ "n": n })).unwrap()
}

async fn drain(outbox: &PgOutbox, order: Order) -> MemorySink {
    let sink = MemorySink::new();
    let queue = outbox.queue(QueueOptions { order, ..QueueOptions::default() });
    Relay::new(queue, sink.clone()).drain(CancellationToken::new()).await.unwrap();
    sink
}

/// sqlx, tokio-postgres, the SQL functions and plain INSERT: each commits and rolls back with its transaction.
#[tokio::test]
async fn four_ways_to_publish_all_bound_to_the_transaction() {
    let Some(sut) = Canonical::create("four_ways").await else { return };
    let outbox = &sut.outbox;
    let (mut client, connection) =
        tokio_postgres::connect(&sut.db.url(), tokio_postgres::NoTls).await.unwrap();
    let driver = tokio::spawn(connection);

    for commit in [false, true] {
        let mut tx = outbox.pool().begin().await.unwrap();
        outbox.publish(&mut tx, &event("sqlx", 1)).await.unwrap();
        outbox.publish_many(&mut tx, &[event("sqlx", 2), event("sqlx", 3)]).await.unwrap();
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }

        let tx = client.transaction().await.unwrap();
        outbox.publish_tokio(&tx, &event("tokio", 1)).await.unwrap();
        outbox.publish_many_tokio(&tx, &[event("tokio", 2), event("tokio", 3)]).await.unwrap();
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }

        let mut tx = outbox.pool().begin().await.unwrap();
        for n in 1..=3 {
            let row = sqlx::query("SELECT * FROM airtight.publish('test', 'Tested', 'Test', 'sql', jsonb_build_object('n', $1::int))")
                .bind(n)
                .fetch_one(&mut *tx)
                .await
                .unwrap();
            assert!(row.get::<bool, _>("is_new") && row.get::<i64, _>("seq") > 0);
            assert_eq!(row.get::<Uuid, _>("id").get_version_num(), 7);
        }
        sqlx::query("SELECT airtight.publish_bytes('test', 'Tested', 'Test', 'bytes', '\\x00ff'::bytea, op => 'delete', headers => '{\"a\":\"b\"}')")
            .execute(&mut *tx)
            .await
            .unwrap();
        sqlx::query("INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) VALUES ('test', 'Tested', 'Test', 'insert', '{\"n\":1}')")
            .execute(&mut *tx)
            .await
            .unwrap();
        if commit { tx.commit().await.unwrap() } else { tx.rollback().await.unwrap() }
    }
    let events = drain(outbox, Order::Key).await.events();
    let of = |key: &str| events.iter().filter(|event| event.aggregate_id == key).collect::<Vec<_>>();
    for key in ["sqlx", "tokio", "sql"] {
        let numbers: Vec<i64> = of(key)
            .iter()
            .map(|event| {
                serde_json::from_slice::<serde_json::Value>(event.payload.as_bytes()).unwrap()["n"]
                    .as_i64()
                    .unwrap()
            })
            .collect();
        assert_eq!(numbers, [1, 2, 3], "{key}");
    }
    assert_eq!(of("bytes")[0].payload.as_bytes(), [0, 255]);
    assert_eq!((of("bytes")[0].op, of("bytes")[0].headers["a"].as_str()), (Op::Delete, "b"));
    assert_eq!((of("insert").len(), events.len()), (1, 11));
    drop(client);
    driver.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_duplicate_id_is_reported_in_every_way() {
    let Some(sut) = Canonical::create("duplicate").await else { return };
    let id = Uuid::now_v7();
    let mut tx = sut.outbox.pool().begin().await.unwrap();
    let first = sut.outbox.publish(&mut tx, &event("k", 1).id(id)).await.unwrap();
    let again = sut.outbox.publish(&mut tx, &event("k", 2).id(id)).await.unwrap();
    assert_eq!((first.is_new, again.is_new, again.seq), (true, false, first.seq));
    let twice = Uuid::now_v7();
    let both =
        sut.outbox.publish_many(&mut tx, &[event("k", 3).id(twice), event("k", 4).id(twice)]).await.unwrap();
    assert_eq!((both[0].is_new, both[1].is_new, both[0].seq), (true, false, both[1].seq));
    tx.commit().await.unwrap();
    let row = sqlx::query("SELECT * FROM airtight.publish('s', 't', 'a', 'k', '{}', event_id => $1)")
        .bind(id)
        .fetch_one(sut.outbox.pool())
        .await
        .unwrap();
    assert_eq!((row.get::<bool, _>("is_new"), row.get::<i64, _>("seq")), (false, first.seq));
}

#[tokio::test]
async fn what_cannot_be_stored_is_refused_before_the_transaction_is_touched() {
    let Some(sut) = Canonical::create("refused").await else { return };
    let mut tx = sut.outbox.pool().begin().await.unwrap();
    for bad in [
        event("k\0", 1),
        event("k", 1).json_text("{nonsense"),
        event("k", 1).json_text(r#""\u0000""#),
        event("k", 1).bytes(vec![0; airtight_core::event::MAX_PAYLOAD_BYTES + 1]),
    ] {
        let error = sut.outbox.publish(&mut tx, &bad).await.unwrap_err();
        assert_eq!(error.class(), Class::Permanent, "{error}");
    }
    // The transaction is not aborted.
    sut.outbox.publish(&mut tx, &event("k", 1)).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(drain(&sut.outbox, Order::Key).await.len(), 1);
}

#[tokio::test]
async fn ten_processes_may_migrate_at_once() {
    let Some(db) = TestDb::create("migrate_ten").await else { return };
    let mut tasks = Vec::new();
    for _ in 0..10 {
        let url = db.url();
        tasks.push(tokio::spawn(async move {
            let outbox = PgOutbox::connect(&url, PgOptions::default()).await.unwrap();
            outbox.migrate().await.unwrap().len()
        }));
    }
    let mut applied = 0;
    for task in tasks {
        applied += task.await.unwrap();
    }
    assert_eq!(applied, 11, "each migration once");
}

#[tokio::test]
async fn the_printed_sql_does_what_migrate_does() {
    let Some(db) = TestDb::create("migrate_print").await else { return };
    let pool = db.pool(2).await;
    for (schema, table) in [("airtight", "outbox"), ("My \"Schema\"", "second")] {
        let named = PgOptions { schema: schema.into(), table: table.into(), ..PgOptions::default() };
        let sql = PgOutbox::migration_sql(&named);
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&pool).await.unwrap();
        let options = PgOptions { schema: schema.into(), table: table.into(), ..PgOptions::default() };
        let outbox = PgOutbox::with_pool(pool.clone(), options).unwrap();
        assert!(outbox.migrate().await.unwrap().is_empty(), "nothing is left to do");
        Admin::publish(&outbox, &[event("k", 1)]).await.unwrap();
        assert_eq!(drain(&outbox, Order::Key).await.len(), 1);
    }
}

#[tokio::test]
async fn a_schema_newer_than_this_program_is_refused() {
    let Some(sut) = Canonical::create("newer").await else { return };
    sut.sql("INSERT INTO airtight.migration (outbox, version) VALUES ('outbox', 999)").await;
    let error = sut.outbox.migrate().await.unwrap_err();
    assert_eq!(error.code(), "schema_too_new");
    assert!(error.message().contains("999"), "{error}");
}

/// Events that have waited are the only ones that are claimed by a write. It changes nothing that is indexed.
#[tokio::test]
async fn a_claim_of_events_that_are_due_is_a_hot_update() {
    let Some(sut) = Canonical::create("hot").await else { return };
    // Room on every page for a second version of each row: what is then not HOT touched an index.
    sut.sql("ALTER TABLE airtight.outbox SET (fillfactor = 40)").await;
    let events: Vec<NewEvent> = (0..300).map(|n| event(&format!("k{n}"), n)).collect();
    Admin::publish(&sut.outbox, &events).await.unwrap();
    sut.sql("UPDATE airtight.outbox SET next_retry_at = now()").await;
    // The new versions are in other pages; there must be room for the next.
    sut.sql("VACUUM FULL airtight.outbox").await;
    let hot = async || {
        // Statistics of this session's own transactions are visible at once, of others after they are sent.
        let row = sqlx::query("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = 'airtight.outbox'::regclass")
            .fetch_one(sut.outbox.pool())
            .await
            .unwrap();
        (row.get::<i64, _>(0), row.get::<i64, _>(1))
    };
    eventually(LONG, "statistics of the update", async || hot().await.0 >= 300).await;
    let before = hot().await;
    let queue = sut.outbox.queue(QueueOptions { order: Order::Key, ..QueueOptions::default() });
    queue.open(&Capabilities::default()).await.unwrap();
    let batch = queue.next(Limits { events: 300, bytes: 1 << 20 }).await.unwrap();
    assert_eq!(batch.deliveries.len(), 300);
    eventually(LONG, "statistics to arrive", async || hot().await.0 >= before.0 + 300).await;
    let (updated, hot) = hot().await;
    let (updated, hot) = (updated - before.0, hot - before.1);
    assert!(hot * 100 >= updated * 95, "of {updated} claims only {hot} were HOT");
    queue.close().await.unwrap();
}

/// The claim walks its index however the table looks: no sort, no scan of the whole table.
#[tokio::test]
async fn waiting_events_do_not_stand_in_the_way() {
    let Some(sut) = Canonical::create("in_the_way").await else { return };
    sut.sql("INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, attempts, next_retry_at) \
             SELECT 'test', 'T', 'A', 'w' || n, 1, now() + interval '1 hour' FROM generate_series(1, 5000) n").await;
    Admin::publish(&sut.outbox, &[event("k", 1)]).await.unwrap();
    let queue = sut.outbox.queue(QueueOptions::default());
    queue.open(&Capabilities::default()).await.unwrap();
    let batch = queue.next(Limits { events: 10, bytes: 1 << 20 }).await.unwrap();
    assert_eq!(batch.deliveries.len(), 1);
    queue.close().await.unwrap();
}

#[tokio::test]
async fn a_row_that_cannot_be_an_event_is_dead_and_the_others_go_on() {
    let Some(sut) = support::Foreign::create("bad_rows").await else { return };
    let pool = sut.outbox.pool();
    for (key, body, meta, op, tries) in [
        ("good", "{\"n\":1}", "{}", "upsert", None),
        ("not-json", "{oops", "{}", "upsert", None),
        ("bad-meta", "{}", "[1]", "upsert", None),
        ("bad-op", "{}", "{}", "merge", None),
        ("good", "{\"n\":2}", "{}", "upsert", Some(3)),
    ] {
        sqlx::query("INSERT INTO shop.\"Legacy Outbox\" (id, topic, kind, entity, entity_id, op, body, meta, tries) VALUES (gen_random_uuid(), 't', 'K', 'E', $1, $2, $3, $4, $5)")
            .bind(key).bind(op).bind(body).bind(meta).bind(tries)
            .execute(pool)
            .await
            .unwrap();
    }
    sqlx::query("INSERT INTO shop.\"Legacy Outbox\" (id, topic, kind, entity, entity_id, body, state) VALUES (gen_random_uuid(), 't', 'K', 'E', 'odd-state', '{}', 'WEIRD')")
        .execute(pool)
        .await
        .unwrap();
    let sink = drain(&sut.outbox, Order::Key).await;
    assert_eq!(
        sink.events().iter().map(|event| event.aggregate_id.as_str()).collect::<Vec<_>>(),
        ["good", "good"]
    );
    assert_eq!(sink.events()[0].extra["tenant"], "acme", "extra columns come along");
    let dead = sut.outbox.list(&Filter { states: vec![State::Dead], ..Filter::default() }).await.unwrap();
    let mut codes: Vec<_> = dead
        .iter()
        .map(|row| (row.aggregate_id.as_str(), row.error_code.clone().unwrap_or_default()))
        .collect();
    codes.sort();
    assert_eq!(
        codes,
        [("bad-meta", "bad_headers".into()), ("bad-op", "bad_op".into()), ("not-json", "bad_payload".into())]
    );
    for row in &dead {
        assert!(row.error_message.as_ref().unwrap().contains(&row.id), "the message names the event");
    }
    // A word that nobody knows is left alone, and shown as it is.
    let all = sut.outbox.list(&Filter::default()).await.unwrap();
    assert!(all.iter().any(|row| row.aggregate_id == "odd-state" && row.state == "WEIRD"));
}

#[tokio::test]
async fn notify_wakes_an_idle_relay_long_before_the_next_poll() {
    let options = PgOptions { notify: Some(true), ..PgOptions::default() };
    let Some(sut) = Canonical::with("notify", options).await else { return };
    let sink = MemorySink::new();
    let stop = CancellationToken::new();
    let policy = Policy { poll: Duration::from_secs(30), ..Policy::default() };
    let relay = Relay::new(sut.outbox.queue(QueueOptions::default()), sink.clone()).policy(policy);
    let running = tokio::spawn(relay.run(stop.clone()));
    // The first may be found by the first look already; the others only by being woken.
    for n in 1..=3 {
        let published = Instant::now();
        Admin::publish(&sut.outbox, &[event("k", n)]).await.unwrap();
        eventually(LONG, "the event to arrive", async || sink.len() == usize::try_from(n).unwrap()).await;
        assert!(published.elapsed() < Duration::from_secs(5), "woken, not polled");
    }
    // A connection that breaks is replaced, and polling at once makes up for what was missed.
    sut.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND query ILIKE 'listen%'").await;
    Admin::publish(&sut.outbox, &[event("k", 4)]).await.unwrap();
    eventually(LONG, "the event to arrive after a reconnect", async || sink.len() == 4).await;
    stop.cancel();
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn errors_say_what_to_do() {
    let Some(db) = TestDb::create("errors").await else { return };
    let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
    let open = |outbox: PgOutbox| async move {
        outbox.queue(QueueOptions::default()).open(&Capabilities::default()).await.unwrap_err()
    };
    let error = open(outbox).await;
    assert_eq!((error.class(), error.code()), (Class::Permanent, "no_table"));
    assert!(error.remedy().unwrap().contains("airtight migrate"), "{error}");

    let elsewhere = db.url().replace(db.name(), "no_such_database");
    let error = open(PgOutbox::connect(&elsewhere, PgOptions::default()).await.unwrap()).await;
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "no_database"));

    let nowhere = "postgres://airtight@127.0.0.1:1/x";
    let error = open(PgOutbox::connect(nowhere, PgOptions::default()).await.unwrap()).await;
    assert_eq!((error.class(), error.code()), (Class::Retryable, "unreachable"));

    let error = PgOutbox::connect("nonsense", PgOptions::default()).await.unwrap_err();
    assert_eq!(error.class(), Class::Permanent);
    let mut spec = support::foreign_spec();
    spec.schema = None;
    spec.table = "incomplete".into();
    let outbox =
        PgOutbox::connect(&db.url(), PgOptions { spec: Some(spec), ..PgOptions::default() }).await.unwrap();
    sqlx::query("CREATE TABLE incomplete (id uuid)").execute(outbox.pool()).await.unwrap();
    let error = open(outbox).await;
    assert!(error.message().contains("has no column") && error.message().contains("body"), "{error}");
}

/// A worker suspended past its lease wakes up and settles: refused, counted, and the event goes to its new owner.
#[tokio::test]
async fn a_worker_suspended_past_its_lease_is_fenced() {
    let Some(sut) = Canonical::create("suspended").await else { return };
    Admin::publish(&sut.outbox, &[event("k", 1)]).await.unwrap();
    for order in [Order::None, Order::Key] {
        let options = QueueOptions { order, lease: Duration::from_secs(60), ..QueueOptions::default() };
        let suspended = sut.outbox.queue(options.clone());
        suspended.open(&Capabilities::default()).await.unwrap();
        let held = suspended.next(Limits { events: 10, bytes: 1 << 20 }).await.unwrap();
        assert_eq!(held.deliveries.len(), 1);
        // Its heartbeat, every two seconds, is too late for this.
        sut.sql("UPDATE airtight.relay SET expires_at = now() - interval '1 s'").await;
        sut.sql("UPDATE airtight.outbox SET locked_until = now() - interval '1 s'").await;
        let heir = sut.outbox.queue(options);
        heir.open(&Capabilities::default()).await.unwrap();
        let mut taken = None;
        eventually(LONG, "the heir to take the event over", async || {
            let batch = heir.next(Limits { events: 10, bytes: 1 << 20 }).await.unwrap();
            taken = batch.deliveries.into_iter().next().or(taken.take());
            taken.is_some()
        })
        .await;
        let taken = taken.unwrap();
        assert_eq!((taken.attempt, taken.lost_leases), (1, 1), "no attempt is spent by a lost lease");
        let late = Settlement { position: held.deliveries[0].position, verdict: Verdict::Delivered };
        let settled = suspended.settle(&[late]).await.unwrap();
        assert_eq!((settled.applied, settled.fenced), (0, 1));
        let retry = Verdict::Retry {
            after: Duration::ZERO,
            error: airtight_core::Error::retryable(airtight_core::Code::custom("x"), "again"),
        };
        let mine = Settlement { position: taken.position, verdict: retry };
        assert_eq!(heir.settle(&[mine]).await.unwrap().applied, 1);
        heir.close().await.unwrap();
        drop(suspended);
        sut.sql("DELETE FROM airtight.relay").await;
        sut.sql("UPDATE airtight.outbox SET attempts = 0, next_retry_at = NULL").await;
    }
}

/// `statement_timeout`, a pooler or a network may leave a session idle in a transaction; publishing one that is
/// never committed must not be seen, and must not keep others waiting.
#[tokio::test]
async fn an_open_transaction_is_neither_seen_nor_waited_for() {
    let Some(sut) = Canonical::create("open_tx").await else { return };
    let mut other = sqlx::PgConnection::connect(&sut.db.url()).await.unwrap();
    let mut open = other.begin().await.unwrap();
    sut.outbox.publish(&mut open, &event("k", 1)).await.unwrap();
    Admin::publish(&sut.outbox, &[event("k", 2), event("l", 3)]).await.unwrap();
    assert_eq!(drain(&sut.outbox, Order::Key).await.len(), 2);
    open.commit().await.unwrap();
    assert_eq!(drain(&sut.outbox, Order::Key).await.len(), 1);
}

#[tokio::test]
async fn retention_removes_done_events_only() {
    let Some(sut) = Canonical::create("prune").await else { return };
    let events: Vec<NewEvent> = (0..12_000).map(|n| event(&format!("k{}", n % 50), n)).collect();
    Admin::publish(&sut.outbox, &events).await.unwrap();
    drain(&sut.outbox, Order::None).await;
    sut.sql("UPDATE airtight.outbox SET status = 'dead' WHERE seq = 5").await;
    sut.sql("UPDATE airtight.outbox SET created_at = now() - interval '9 days', finished_at = now() - interval '8 days' WHERE seq <= 11000").await;
    let deleted =
        sut.outbox.prune(Prune::older_than(Duration::from_secs(7 * 86_400)), &|_| {}).await.unwrap();
    assert_eq!((deleted.events, deleted.column.as_str()), (10_999, "finished_at"));
    let left = sut.outbox.status().await.unwrap().streams.remove(0);
    assert_eq!((left.done, left.dead), (1_000, 1));
}
