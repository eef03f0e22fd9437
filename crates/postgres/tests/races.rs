//! Scripted interleavings and unusual tables: what must hold when two sessions meet, or a row is odd.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

mod support;

use std::{task::Poll, time::Duration};

use airtight_core::{
    Capabilities, Code, Error, Limits, NewEvent, Order, Policy, Relay, Settlement, Source, Verdict,
    admin::{Acted, Admin, Filter, Prune},
    queue::QueueOptions,
    sinks::MemorySink,
    state::State,
    table::{Count, Field, Role, TableSpec},
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, sources::SourceUnderTest, wait::eventually};
use sqlx::{AssertSqlSafe, Connection};
use support::Canonical;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const LONG: Duration = Duration::from_secs(20);
const LIMITS: Limits = Limits { events: 100, bytes: 1 << 20 };

fn event(key: &str, n: i64) -> NewEvent {
    NewEvent::new("test", "Tested", "Test", key).json(&serde_json::json!({ "n": n })).unwrap()
}

fn retry(after: Duration) -> Verdict {
    Verdict::Retry { after, error: Error::retryable(Code::custom("x"), "again") }
}

async fn run(pool: &sqlx::PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap();
}

/// Drains with a bound on the time that may take.
async fn drain(outbox: &PgOutbox, options: QueueOptions) -> MemorySink {
    let sink = MemorySink::new();
    let relay = Relay::new(outbox.queue(options), sink.clone());
    tokio::time::timeout(LONG, relay.drain(CancellationToken::new()))
        .await
        .expect("drained in time")
        .unwrap();
    sink
}

/// A suspect that was held back behind another event of its key, and freed, still gets its turn alone.
#[tokio::test]
async fn a_suspect_that_was_held_is_delivered() {
    let Some(sut) = Canonical::create("held_suspect").await else { return };
    Admin::publish(&sut.outbox, &[event("k", 1), event("k", 2), event("k", 3)]).await.unwrap();
    // The first waits for a retry that is due in a moment, the second has lost three leases.
    sut.sql(
        "UPDATE airtight.outbox SET attempts = 1, next_retry_at = now() + interval '200 ms' WHERE seq = 1",
    )
    .await;
    sut.sql("UPDATE airtight.outbox SET lost_leases = 3, next_retry_at = now() WHERE seq = 2").await;
    let sink = drain(&sut.outbox, QueueOptions::default()).await;
    assert_eq!(sink.events().iter().map(|event| event.seq).collect::<Vec<_>>(), [1, 2, 3]);
}

/// A long backlog of a key that waits is put aside at once, and does not keep its neighbours waiting.
#[tokio::test]
async fn a_backlog_behind_a_waiting_event_does_not_delay_other_keys() {
    let Some(sut) = Canonical::create("behind").await else { return };
    sut.sql("INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, attempts, next_retry_at) \
             VALUES ('test', 'T', 'A', 'stuck', 1, now() + interval '1 hour')").await;
    sut.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id) \
             SELECT 'test', 'T', 'A', 'stuck' FROM generate_series(1, 5000)",
    )
    .await;
    // A key of the same slot.
    sut.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id) \
             SELECT 'test', 'T', 'A', 'n' || n FROM generate_series(1, 1000) n \
             WHERE hashtextextended('n' || n, 0) & 63 = hashtextextended('stuck', 0) & 63 LIMIT 1",
    )
    .await;
    let queue = sut.outbox.queue(QueueOptions::default());
    queue.open(&Capabilities::default()).await.unwrap();
    let batch = queue.next(LIMITS).await.unwrap();
    assert_eq!(batch.deliveries.len(), 1, "one look is enough");
    queue.close().await.unwrap();
}

/// A relay whose lease ran out while it was suspended does not come back beside one that reads its streams in
/// another way.
#[tokio::test]
async fn an_expired_relay_of_another_group_does_not_come_back() {
    let Some(sut) = Canonical::create("comes_back").await else { return };
    let options = |order| QueueOptions { order, ..QueueOptions::default() };
    let suspended = sut.outbox.queue(options(Order::Key));
    suspended.open(&Capabilities::default()).await.unwrap();
    sut.sql("UPDATE airtight.relay SET expires_at = now() - interval '1 s'").await;
    let heir = sut.outbox.queue(options(Order::None));
    heir.open(&Capabilities::default()).await.unwrap();
    Admin::publish(&sut.outbox, &[event("k", 1)]).await.unwrap();
    assert_eq!(heir.next(LIMITS).await.unwrap().deliveries.len(), 1);
    // What its heartbeat does when it wakes up.
    sut.sql("UPDATE airtight.relay SET expires_at = now() + interval '30 s' WHERE ord = 'key'").await;
    let stolen = suspended.next(LIMITS).await.map_or(0, |batch| batch.deliveries.len());
    assert_eq!(stolen, 0, "the event belongs to the other relay");
    heir.close().await.unwrap();
    drop(suspended);
}

/// An id that another transaction commits while this one waits for it is found with its place.
#[tokio::test]
async fn a_duplicate_that_commits_meanwhile_has_its_place() {
    let Some(sut) = Canonical::create("meanwhile").await else { return };
    let mut twin = event("k", 1);
    twin.id = Some(Uuid::now_v7());
    let mut other = sqlx::PgConnection::connect(&sut.db.url()).await.unwrap();
    let mut first = other.begin().await.unwrap();
    let stored = sut.outbox.publish(&mut first, &twin).await.unwrap();
    let (outbox, again) = (sut.outbox.clone(), twin.clone());
    let second = tokio::spawn(async move { Admin::publish(&outbox, &[again]).await.unwrap().remove(0) });
    let (mut client, connection) =
        tokio_postgres::connect(&sut.db.url(), tokio_postgres::NoTls).await.unwrap();
    let driver = tokio::spawn(connection);
    let (outbox, again) = (sut.outbox.clone(), twin.clone());
    let third = tokio::spawn(async move {
        let tx = client.transaction().await.unwrap();
        let published = outbox.publish_tokio(&tx, &again).await.unwrap();
        tx.commit().await.unwrap();
        published
    });
    waiting(&sut.db, 2).await;
    first.commit().await.unwrap();
    for published in [second.await.unwrap(), third.await.unwrap()] {
        assert_eq!((published.seq, published.is_new), (stored.seq, false));
    }
    driver.abort();
}

/// Waits until so many sessions of the database wait for a lock.
async fn waiting(db: &TestDb, sessions: i64) {
    let pool = db.pool(1).await;
    eventually(LONG, "sessions to wait for a lock", async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        sqlx::query_scalar::<_, i64>(sql).fetch_one(&pool).await.unwrap() >= sessions
    })
    .await;
    pool.close().await;
}

/// The server takes channel names of up to 63 bytes, and refuses an INSERT that notifies on a longer one.
#[tokio::test]
async fn long_names_can_notify() {
    let Some(db) = TestDb::create("long_names").await else { return };
    let options = PgOptions {
        schema: "s".repeat(40),
        table: "t".repeat(40),
        notify: Some(true),
        ..PgOptions::default()
    };
    let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
    outbox.migrate().await.unwrap();
    let sink = MemorySink::new();
    let stop = CancellationToken::new();
    let policy = Policy { poll: Duration::from_secs(60), ..Policy::default() };
    let relay = Relay::new(outbox.queue(QueueOptions::default()), sink.clone()).policy(policy);
    let running = tokio::spawn(relay.run(stop.clone()));
    for n in 1..=3 {
        Admin::publish(&outbox, &[event("k", n)]).await.unwrap();
        eventually(LONG, "the event to arrive", async || sink.len() == usize::try_from(n).unwrap()).await;
    }
    stop.cancel();
    running.await.unwrap().unwrap();
}

/// A row without a key cannot be an event: it is dead and visible, not silently left.
#[tokio::test]
async fn a_row_without_a_key_is_dead_and_can_be_listed() {
    let Some(sut) = support::Foreign::create("no_key").await else { return };
    let pool = sut.outbox.pool();
    run(pool, "ALTER TABLE shop.\"Legacy Outbox\" ALTER entity_id DROP NOT NULL, ALTER topic DROP NOT NULL; \
               INSERT INTO shop.\"Legacy Outbox\" (id, topic, kind, entity, entity_id, body) \
               VALUES (gen_random_uuid(), 't', 'K', 'E', NULL, '{}'), (gen_random_uuid(), NULL, 'K', 'E', 'k', '{}'), \
               (gen_random_uuid(), 't', 'K', 'E', 'k', '{}')").await;
    for order in [Order::Key, Order::None] {
        drain(&sut.outbox, QueueOptions { order, ..QueueOptions::default() }).await;
        let dead = sut.outbox.list(&Filter { states: vec![State::Dead], ..Filter::default() }).await.unwrap();
        assert_eq!(dead.len(), 2);
        sut.outbox.status().await.unwrap();
        sut.outbox.blocked(10).await.unwrap();
        sut.outbox.check().await.unwrap();
        assert_eq!(sut.outbox.retry_dead(&Filter::default()).await.unwrap(), 2);
        sut.outbox.check().await.unwrap();
    }
}

/// Types that are not text: an identity of fixed length, an enum for the status, short error columns, smallint
/// counts, mixed-case names.
fn odd_spec() -> TableSpec {
    let column = |name: &str| Some(name.to_owned());
    let mut spec = support::foreign_spec();
    spec.schema = None;
    spec.table = "Odd".into();
    spec.identity = "Id".into();
    spec.id = "Id".into();
    spec.seq = None;
    spec.created_at = column("first.seen");
    spec.stream = Field::Constant("odd".into());
    spec.event_type = Field::Constant("Odd".into());
    spec.aggregate_type = Field::Constant("Odd".into());
    spec.aggregate_id = Field::Column("event.key".into());
    spec.op = None;
    spec.payload = "body".into();
    spec.payload_bytes = None;
    spec.headers = None;
    spec.occurred_at = None;
    spec.schema_version = None;
    spec.max_attempts = None;
    spec.extra = Vec::new();
    spec.finished_at = None;
    spec.error_code = column("Code");
    spec.error_message = column("Error");
    spec.count = Some(Count::Attempts("Tries".into()));
    let status = spec.status.as_mut().unwrap();
    status.column = "event.state".into();
    status.retrying = Role::word("AGAIN");
    status.processing = Some(Role::word("BUSY"));
    spec
}

async fn odd(name: &str) -> Option<(TestDb, PgOutbox)> {
    let db = TestDb::create(name).await?;
    let options = PgOptions { spec: Some(odd_spec()), ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
    run(outbox.pool(), "CREATE TYPE \"Word\" AS ENUM ('NEW', 'AGAIN', 'BUSY', 'SENT', 'FAILED'); \
        CREATE TABLE \"Odd\" (\"Id\" char(36) PRIMARY KEY DEFAULT gen_random_uuid()::text, body text DEFAULT '{}', \
        \"event.key\" int, \"event.state\" \"Word\" DEFAULT 'NEW', \"Tries\" smallint, \"Code\" varchar(3), \
        \"Error\" varchar(10), \"first.seen\" timestamp DEFAULT (clock_timestamp() AT TIME ZONE 'UTC'))").await;
    outbox.migrate().await.unwrap();
    Some((db, outbox))
}

#[tokio::test]
async fn a_table_of_odd_types_is_served() {
    let Some((_db, outbox)) = odd("odd_types").await else { return };
    let pool = outbox.pool();
    for (key, state) in [(1, "SENT"), (2, "FAILED"), (3, "NEW"), (4, "AGAIN")] {
        run(pool, &format!("INSERT INTO \"Odd\" (\"event.key\") VALUES ({key})")).await;
        let options = QueueOptions { block_on_dead: true, ..QueueOptions::default() };
        let queue = outbox.queue(options);
        queue.open(&Capabilities::default()).await.unwrap();
        let batch = queue.next(LIMITS).await.unwrap();
        let taken: Vec<_> =
            batch.deliveries.iter().filter(|d| d.event.aggregate_id == key.to_string()).collect();
        assert_eq!(taken.len(), 1);
        let long = || Error::retryable(Code::custom("a-long-code"), "a message longer than its column");
        let verdict = match state {
            "SENT" => Verdict::Delivered,
            "FAILED" => Verdict::Dead { error: long() },
            "NEW" => Verdict::Released,
            _ => Verdict::Retry { after: Duration::from_secs(60), error: long() },
        };
        let settled = queue.settle(&[Settlement { position: taken[0].position, verdict }]).await.unwrap();
        assert_eq!(settled.applied, 1, "{state}");
        let stored: String =
            sqlx::query_scalar("SELECT \"event.state\"::text FROM \"Odd\" WHERE \"event.key\" = $1")
                .bind(key)
                .fetch_one(pool)
                .await
                .unwrap();
        assert_eq!(stored, state);
        queue.backlog().await.unwrap();
        queue.close().await.unwrap();
    }
    let dead = outbox.list(&Filter { states: vec![State::Dead], ..Filter::default() }).await.unwrap();
    assert!(outbox.show(&dead[0].id).await.unwrap().is_some());
    // A table without an ascending column has no seq to filter by.
    let filter = Filter { after_seq: Some(0), ..Filter::default() };
    assert_eq!(outbox.retry_dead(&filter).await.unwrap(), 1);
}

/// Claimed, failed and set back by another relay while this claim was on its way: its attempt stays counted
/// and its wait is respected.
#[tokio::test]
async fn a_claim_that_was_overtaken_does_not_undo_a_failure() {
    let Some(sut) = support::Foreign::create("overtaken").await else { return };
    sut.publish(&[event("k", 1)]).await;
    let options = QueueOptions { order: Order::None, ..QueueOptions::default() };
    let (slow, quick) = (std::sync::Arc::new(sut.outbox.queue(options.clone())), sut.outbox.queue(options));
    slow.open(&Capabilities::default()).await.unwrap();
    let mut other = sqlx::PgConnection::connect(&sut.db.url()).await.unwrap();
    // Stops the claim after it has taken its snapshot.
    let mut lock = other.begin().await.unwrap();
    sqlx::query("SELECT FROM airtight.relay FOR UPDATE").execute(&mut *lock).await.unwrap();
    let claim = tokio::spawn({
        let slow = slow.clone();
        async move { slow.next(LIMITS).await.unwrap() }
    });
    waiting(&sut.db, 1).await;
    quick.open(&Capabilities::default()).await.unwrap();
    let batch = quick.next(LIMITS).await.unwrap();
    let verdict = retry(Duration::from_secs(3600));
    let settled =
        quick.settle(&[Settlement { position: batch.deliveries[0].position, verdict }]).await.unwrap();
    assert_eq!(settled.applied, 1);
    lock.rollback().await.unwrap();
    let overtaken = claim.await.unwrap();
    assert!(overtaken.deliveries.is_empty(), "it waits for an hour: {overtaken:?}");
    slow.close().await.unwrap();
    quick.close().await.unwrap();
}

/// An event that may crash relays is delivered alone, but not before an earlier one of its key.
#[tokio::test]
async fn a_suspect_on_a_foreign_table_waits_for_what_is_before_it() {
    let Some(sut) = support::Foreign::create("suspect_order").await else { return };
    let published = sut.publish(&[event("k", 1), event("k", 2), event("l", 3)]).await;
    let pool = sut.outbox.pool();
    for (row, attempts, lost, wait) in [(0, 1, 0, "1 hour"), (1, 0, 3, "0"), (2, 0, 3, "0")] {
        run(
            pool,
            &format!(
                "INSERT INTO airtight.side (outbox, event, attempts, lost_leases, next_retry_at) \
            VALUES ('shop.Legacy Outbox', '{}', {attempts}, {lost}, now() + interval '{wait}')",
                published[row].id
            ),
        )
        .await;
    }
    let queue = sut.outbox.queue(QueueOptions::default());
    queue.open(&Capabilities::default()).await.unwrap();
    // It sees that there is a suspect, of the key l.
    assert!(queue.next(LIMITS).await.unwrap().is_empty());
    run(pool, "UPDATE airtight.side SET next_retry_at = now() WHERE attempts = 1").await;
    let mut order = Vec::new();
    eventually(LONG, "all three", async || {
        let batch = queue.next(LIMITS).await.unwrap();
        for delivery in &batch.deliveries {
            order.push(delivery.event.seq);
            let verdict = Verdict::Delivered;
            queue.settle(&[Settlement { position: delivery.position, verdict }]).await.unwrap();
        }
        order.len() == 3
    })
    .await;
    let place = |seq: i64| order.iter().position(|found| *found == seq).unwrap();
    assert!(place(published[0].seq) < place(published[1].seq), "{order:?}");
    queue.close().await.unwrap();
}

/// Times that PostgreSQL knows and Rust's calendar does not.
#[tokio::test]
async fn endless_times_are_delivered() {
    let Some(sut) = Canonical::create("endless").await else { return };
    Admin::publish(&sut.outbox, &[event("k", 1), event("l", 2), event("m", 3)]).await.unwrap();
    sut.sql("UPDATE airtight.outbox SET occurred_at = 'infinity', created_at = 'infinity' WHERE seq = 1")
        .await;
    sut.sql("UPDATE airtight.outbox SET occurred_at = '-infinity' WHERE seq = 2").await;
    sut.sql(
        "UPDATE airtight.outbox SET occurred_at = '20000-01-01', created_at = '20000-01-01' WHERE seq = 3",
    )
    .await;
    assert_eq!(sut.outbox.list(&Filter::default()).await.unwrap().len(), 3);
    assert_eq!(sut.outbox.status().await.unwrap().streams[0].pending, 3);
    assert_eq!(drain(&sut.outbox, QueueOptions::default()).await.len(), 3);
}

/// What another pipeline's dead events block is its own business, and not counted as blocked here.
#[tokio::test]
async fn a_dead_event_of_another_stream_blocks_nothing_in_the_backlog() {
    let Some(sut) = Canonical::create("other_dead").await else { return };
    let on = |stream: &str, n: i64| {
        NewEvent::new(stream, "T", "A", "k").json(&serde_json::json!({ "n": n })).unwrap()
    };
    Admin::publish(&sut.outbox, &[on("a", 1), on("b", 2)]).await.unwrap();
    sut.sql("UPDATE airtight.outbox SET status = 'dead' WHERE seq = 1").await;
    sut.sql(
        "UPDATE airtight.outbox SET attempts = 1, next_retry_at = now() + interval '300 ms' WHERE seq = 2",
    )
    .await;
    let options = QueueOptions { streams: vec!["b".into()], block_on_dead: true, ..QueueOptions::default() };
    assert_eq!(drain(&sut.outbox, options).await.len(), 1);
}

/// A row that was set to done by hand has no time of finishing, and is pruned by its age all the same.
#[tokio::test]
async fn what_was_finished_by_hand_is_pruned() {
    let Some(sut) = Canonical::create("by_hand").await else { return };
    Admin::publish(&sut.outbox, &[event("k", 1)]).await.unwrap();
    sut.sql("UPDATE airtight.outbox SET status = 'done', created_at = now() - interval '9 days'").await;
    let week = Prune::older_than(Duration::from_secs(7 * 86_400));
    assert_eq!(sut.outbox.prune(week, &|_| {}).await.unwrap().events, 1);
}

/// An operator who comes while a claim is under way finds the event taken.
#[tokio::test]
async fn an_operator_does_not_take_away_what_was_just_claimed() {
    let Some(sut) = support::Foreign::create("just_claimed").await else { return };
    let published = sut.publish(&[event("k", 1)]).await;
    let mut other = sqlx::PgConnection::connect(&sut.db.url()).await.unwrap();
    // What a claim does.
    let mut claim = other.begin().await.unwrap();
    sqlx::query("SELECT FROM shop.\"Legacy Outbox\" FOR UPDATE").execute(&mut *claim).await.unwrap();
    sqlx::query("INSERT INTO airtight.side (outbox, event, attempts, claim_token) VALUES ('shop.Legacy Outbox', $1, 1, gen_random_uuid())")
        .bind(&published[0].id)
        .execute(&mut *claim)
        .await
        .unwrap();
    let (outbox, id) = (sut.outbox.clone(), published[0].id.clone());
    let discard = tokio::spawn(async move { outbox.discard(&id).await.unwrap() });
    waiting(&sut.db, 1).await;
    claim.commit().await.unwrap();
    assert_eq!(discard.await.unwrap(), Acted::Refused(State::Processing));
}

/// A wait that ends after the end of PostgreSQL's calendar is a long wait, not the end of the relay.
#[tokio::test]
async fn a_wait_without_end_is_stored() {
    let Some(sut) = Canonical::create("no_end").await else { return };
    Admin::publish(&sut.outbox, &[event("k", 1)]).await.unwrap();
    let queue = sut.outbox.queue(QueueOptions::default());
    queue.open(&Capabilities::default()).await.unwrap();
    let batch = queue.next(LIMITS).await.unwrap();
    let verdict = retry(Duration::MAX);
    let settled =
        queue.settle(&[Settlement { position: batch.deliveries[0].position, verdict }]).await.unwrap();
    assert_eq!(settled.applied, 1);
    queue.close().await.unwrap();
    assert_eq!(sut.outbox.list(&Filter::default()).await.unwrap().len(), 1);
}

/// What was unknown, set back by hand, and then failed for good is dead: a bulk retry finds it.
#[tokio::test]
async fn an_unknown_event_that_dies_later_is_dead() {
    let Some(sut) = support::Foreign::create("unknown_dead").await else { return };
    let published = sut.publish(&[event("k", 1)]).await;
    let queue = sut.outbox.queue(QueueOptions::default());
    queue.open(&Capabilities::default()).await.unwrap();
    let error = || Error::permanent(Code::custom("x"), "no");
    for verdict in [Verdict::Unknown { error: error() }, Verdict::Dead { error: error() }] {
        sut.set_back_by_hand(&published[0].id).await;
        let batch = queue.next(LIMITS).await.unwrap();
        queue.settle(&[Settlement { position: batch.deliveries[0].position, verdict }]).await.unwrap();
    }
    queue.close().await.unwrap();
    assert_eq!(sut.outbox.list(&Filter::default()).await.unwrap()[0].state, "dead");
}

/// A relay of the same kind that vanished long ago leaves no trace, order or not.
#[tokio::test]
async fn relays_that_vanished_are_forgotten() {
    let Some(sut) = Canonical::create("vanished").await else { return };
    for order in [Order::None, Order::Key, Order::Total] {
        sut.sql(&format!(
            "INSERT INTO airtight.relay (id, outbox, grp, host, streams, ord, expires_at) SELECT gen_random_uuid(), \
             'airtight.outbox', '{0}/' || CASE '{0}' WHEN 'total' THEN 1 ELSE 64 END || '/reads:*', 'h', '{{}}', '{0}', now() - interval '2 days'",
            order.as_str()
        ))
        .await;
        let queue = sut.outbox.queue(QueueOptions { order, ..QueueOptions::default() });
        queue.open(&Capabilities::default()).await.unwrap();
        queue.close().await.unwrap();
        let left: i64 = sqlx::query_scalar("SELECT count(*) FROM airtight.relay")
            .fetch_one(sut.outbox.pool())
            .await
            .unwrap();
        assert_eq!(left, 0, "{order:?}");
    }
}

/// Renewing leases and settling touch the same rows, each in its own order. Side by side they would lock each other
/// out, and stand still until the server finds out, a second later.
#[tokio::test]
async fn renewing_and_settling_do_not_lock_each_other_out() {
    let Some(sut) = Canonical::create("renew_and_settle").await else { return };
    sut.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id) \
             SELECT 'test', 'T', 'A', 'k' || n % 997 FROM generate_series(1, 30000) n",
    )
    .await;
    let options = QueueOptions { lease: Duration::from_millis(400), ..QueueOptions::default() };
    let sink = Slow(MemorySink::new());
    let relay = Relay::new(sut.outbox.queue(options), sink);
    tokio::time::timeout(LONG, relay.drain(CancellationToken::new()))
        .await
        .expect("drained in time")
        .unwrap();
    // A session that ends has reported what it counted. An older server's collector needs a moment more: it has all of it
    // when it has counted a settle of each event.
    let pool = sut.outbox.pool();
    let mut observer = sqlx::PgConnection::connect_with(&pool.connect_options()).await.unwrap();
    pool.close().await;
    let counted = "SELECT tup_updated + tup_deleted, deadlocks, \
             (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()) \
             FROM pg_stat_database WHERE datname = current_database()";
    let mut deadlocks = 0;
    eventually(LONG, "the counts of all sessions", async || {
        let (written, met, sessions): (i64, i64, i64) =
            sqlx::query_as(counted).fetch_one(&mut observer).await.unwrap();
        deadlocks = met;
        sessions == 0 && written >= 30_000
    })
    .await;
    assert_eq!(deadlocks, 0);
}

/// Takes long enough for leases to be renewed meanwhile.
struct Slow(MemorySink);

#[airtight_core::async_trait]
impl airtight_core::Sink for Slow {
    fn capabilities(&self) -> airtight_core::Capabilities {
        airtight_core::Capabilities { prefix_per_key: true, concurrency: 4, ..Default::default() }
    }

    async fn deliver(&self, batch: &[airtight_core::Delivery]) -> Vec<airtight_core::Outcome> {
        tokio::time::sleep(Duration::from_millis(100 + batch.len() as u64 % 7 * 30)).await;
        self.0.deliver(batch).await
    }
}

/// A call that is dropped anywhere on its way, as everything is that a relay aborts when it stops, leaves no connection in
/// the pool with its transaction open: what came next on that connection would never be committed.
#[tokio::test]
async fn a_call_that_is_dropped_half_way_leaves_no_transaction_open() {
    let Some(sut) = Canonical::create("dropped").await else { return };
    let pool = sut.outbox.pool();
    let mut observer = sqlx::PgConnection::connect_with(&pool.connect_options()).await.unwrap();
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in tr%'";
    for polls in 1..40 {
        let events = [event("k", polls)];
        let mut call = Admin::publish(&sut.outbox, &events);
        let mut left = polls;
        std::future::poll_fn(|context| {
            left -= 1;
            if left < 0 { Poll::Ready(()) } else { call.as_mut().poll(context).map(|_| ()) }
        })
        .await;
        drop(call);
        // Each time, since the next call on that connection would end the transaction with its own.
        eventually(LONG, "a pool at rest", async || pool.num_idle() == pool.size() as usize).await;
        // A connection that was closed with its transaction takes the server a moment to notice. One that was given back to
        // the pool stays as it is.
        eventually(LONG, &format!("nothing open, dropped after {polls} polls"), async || {
            sqlx::query_scalar::<_, i64>(open).fetch_one(&mut observer).await.unwrap() == 0
        })
        .await;
    }
}
