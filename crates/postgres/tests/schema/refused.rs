//! An event that no relay could deliver is refused when it is written, whichever program writes it.

use airtight_core::{
    NewEvent, Relay, admin::Admin, event::MAX_PAYLOAD_BYTES, log::LogOptions, queue::QueueOptions,
    sinks::MemorySink, state::State, table::Shape,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, wait::eventually};
use sqlx::{AssertSqlSafe, PgPool};
use tokio_util::sync::CancellationToken;

use crate::support::{SOON, event};

async fn create(name: &str, shape: Shape) -> Option<(TestDb, PgOutbox, PgPool)> {
    let db = TestDb::create(name).await?;
    let outbox = PgOutbox::connect(&db.url(), PgOptions { shape, ..PgOptions::default() }).await.unwrap();
    outbox.migrate().await.unwrap();
    let pool = db.pool(3).await;
    Some((db, outbox, pool))
}

async fn run(pool: &PgPool, sql: &str) -> Result<(), String> {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await;
    done.map(|_| ()).map_err(|error| {
        let error = error.as_database_error().unwrap();
        format!("{}: {}", error.code().unwrap(), error.message())
    })
}

async fn drain(outbox: &PgOutbox) -> MemorySink {
    let sink = MemorySink::new();
    let stop = CancellationToken::new();
    if outbox.spec().status.is_some() {
        Relay::new(outbox.queue(QueueOptions::default()), sink.clone()).drain(stop).await.unwrap();
    } else {
        let log = outbox.log(LogOptions::consumer("c"));
        Relay::new(log, sink.clone()).drain(stop).await.unwrap();
    }
    sink
}

/// An INSERT of a payload, bytes and headers, given as SQL.
fn insert(payload: &str, bytes: &str, headers: &str) -> String {
    format!(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload, payload_bytes, headers) \
         VALUES ('test.log', 'Tested', 'Thing', 'k', {payload}, {bytes}, {headers})"
    )
}

fn publish(payload: &str, headers: &str) -> String {
    format!("SELECT airtight.publish('test.log', 'Tested', 'Thing', 'k', {payload}, headers => {headers})")
}

fn publish_bytes(payload: &str, headers: &str) -> String {
    format!(
        "SELECT airtight.publish_bytes('test.log', 'Tested', 'Thing', 'k', {payload}, headers => {headers})"
    )
}

#[tokio::test]
async fn headers_that_are_no_strings_are_refused_in_every_way() {
    for shape in [Shape::Queue, Shape::Log] {
        let Some((_db, outbox, pool)) = create("refused_headers", shape).await else { return };
        for (headers, says) in [
            (r#"'{"a": "b", "n": 1}'"#, "n is a number"),
            (r#"'{"n": null}'"#, "n is null"),
            (r#"'{"n": true}'"#, "n is a boolean"),
            (r#"'{"n": {"x": "y"}}'"#, "n is an object"),
            (r#"'{"n": ["x"]}'"#, "n is an array"),
        ] {
            for sql in
                [insert("'{}'", "NULL", headers), publish("'{}'", headers), publish_bytes("'\\x00'", headers)]
            {
                let error = run(&pool, &sql).await.unwrap_err();
                assert!(
                    error.starts_with("23514") && error.contains("headers") && error.contains(says),
                    "{sql}: {error}"
                );
            }
            let emit = format!("SELECT airtight.emit('s', 'T', 'A', 'k', '{{}}', headers => {headers})");
            let error = run(&pool, &emit).await.unwrap_err();
            assert!(error.contains("headers") && error.contains(says), "{emit}: {error}");
        }
        for headers in ["'[]'", "'1'"] {
            assert!(run(&pool, &insert("'{}'", "NULL", headers)).await.unwrap_err().starts_with("23514"));
        }
        for sql in [
            insert("'{}'", "NULL", r#"'{"a": "b"}'"#),
            publish("'{}'", "'{}'"),
            publish_bytes("'\\x00'", "NULL"),
        ] {
            run(&pool, &sql).await.unwrap();
        }
        let sink = drain(&outbox).await;
        assert_eq!(sink.len(), 3, "what is let in is delivered");
    }
}

#[tokio::test]
async fn payloads_above_the_limit_are_refused_in_every_way() {
    for shape in [Shape::Queue, Shape::Log] {
        let Some((_db, outbox, pool)) = create("refused_large", shape).await else { return };
        let json = |bytes: usize| format!("to_jsonb(repeat('x', {}))", bytes - 2);
        let bytes = |bytes: usize| format!("convert_to(repeat('x', {bytes}), 'UTF8')");
        let over = MAX_PAYLOAD_BYTES + 1;
        // Small as it is stored, large as it is sent.
        let numbers = "(SELECT jsonb_agg(1e100000) FROM generate_series(1, 200))";
        for sql in [
            insert(&json(over), "NULL", "'{}'"),
            insert("NULL", &bytes(over), "'{}'"),
            insert(numbers, "NULL", "'{}'"),
            publish(&json(over), "'{}'"),
            publish(numbers, "'{}'"),
            publish_bytes(&bytes(over), "'{}'"),
            format!("SELECT airtight.emit('s', 'T', 'A', 'k', {})", json(over)),
        ] {
            let error = run(&pool, &sql).await.unwrap_err();
            assert!(error.contains("the limit is 16777216"), "{}: {error}", &sql[..60]);
        }
        // Compact where it is published, with blanks where it is stored: the relay would refuse it.
        let compact = format!("[{}1]", "1,".repeat(MAX_PAYLOAD_BYTES / 2 - 10));
        let error = Admin::publish(&outbox, &[event("k", 1).json_text(compact)]).await.unwrap_err();
        assert!(error.code() == "constraint" && error.message().contains("the limit is 16777216"), "{error}");

        run(&pool, &insert(&json(MAX_PAYLOAD_BYTES), "NULL", "'{}'")).await.unwrap();
        run(&pool, &publish_bytes(&bytes(MAX_PAYLOAD_BYTES), "'{}'")).await.unwrap();
        assert_eq!(drain(&outbox).await.len(), 2, "what is let in is delivered");
    }
}

/// Rows of before the rule: they are dead as they were, hold nobody up, and can be mended and retried.
#[tokio::test]
async fn rows_that_were_there_before_stay_as_they_are() {
    let Some((_db, outbox, pool)) = create("refused_before", Shape::Queue).await else { return };
    // As an older airtight left it.
    let older =
        "DROP TRIGGER outbox_refuse ON airtight.outbox; DELETE FROM airtight.migration WHERE version > 5";
    run(&pool, older).await.unwrap();
    run(&pool, &insert("'{}'", "NULL", r#"'{"n": 1}'"#)).await.unwrap();
    Admin::publish(&outbox, &[event("other", 2)]).await.unwrap();
    outbox.migrate().await.unwrap();
    assert_eq!(drain(&outbox).await.len(), 1);
    let filter = airtight_core::admin::Filter { states: vec![State::Dead], ..Default::default() };
    let dead = outbox.list(&filter).await.unwrap();
    assert_eq!(dead.len(), 1);
    assert_eq!(dead[0].error_code.as_deref(), Some("bad_headers"));
    run(&pool, r#"UPDATE airtight.outbox SET headers = '{"n": "1"}' WHERE status = 'dead'"#).await.unwrap();
    assert_eq!(outbox.retry_dead(&filter).await.unwrap(), 1);
    assert_eq!(drain(&outbox).await.len(), 1);
}

/// The migration wants a lock that an open publisher holds. It asks in short turns, so nobody waits behind it for long.
#[tokio::test]
async fn an_upgrade_waits_for_publishers_in_short_turns() {
    for shape in [Shape::Queue, Shape::Log] {
        let Some((_db, outbox, pool)) = create("refused_upgrade", shape).await else { return };
        let older =
            "DROP TRIGGER outbox_refuse ON airtight.outbox; DELETE FROM airtight.migration WHERE version > 5";
        run(&pool, older).await.unwrap();
        let events: Vec<NewEvent> = (0..5).map(|n| event("k", n)).collect();
        Admin::publish(&outbox, &events).await.unwrap();
        let mut open = pool.begin().await.unwrap();
        outbox.publish(&mut open, &event("k", 6)).await.unwrap();
        let migrating = tokio::spawn({
            let outbox = outbox.clone();
            async move { outbox.migrate().await }
        });
        eventually(SOON, "the migration to want its lock", async || {
            let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'";
            sqlx::query_scalar::<_, i64>(waiting).fetch_one(&pool).await.unwrap() > 0
        })
        .await;
        let begun = std::time::Instant::now();
        Admin::publish(&outbox, &[event("k", 7)]).await.unwrap();
        assert!(begun.elapsed() < std::time::Duration::from_secs(4), "{:?}", begun.elapsed());
        open.commit().await.unwrap();
        let did = migrating.await.unwrap().unwrap();
        assert!(!did.is_empty());
        assert!(run(&pool, &insert("'{}'", "NULL", r#"'{"n": 1}'"#)).await.is_err());
    }
}
