//! Events without a table.

use airtight_testkit::wait::eventually;

use crate::support::{Fixture, Recorder, SOON};

fn emit(key: &str, n: i64) -> String {
    format!("SELECT airtight.emit('test.cdc', 'Tested', 'Thing', '{key}', '{{\"n\": {n}}}')")
}

fn insert(key: &str, n: i64) -> String {
    format!(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         VALUES ('test.cdc', 'Tested', 'Thing', '{key}', '{{\"n\": {n}}}')"
    )
}

#[tokio::test]
async fn they_come_in_the_order_of_their_transaction() {
    let Some(f) = Fixture::create("emit").await else { return };
    let sink = Recorder::default();
    let early = sqlx::raw_sql(sqlx::AssertSqlSafe(emit("a", 0))).execute(&f.pool).await.unwrap_err();
    assert!(early.to_string().contains("would vanish"), "{early}");
    let relay = f.start(&sink);
    f.streams().await;
    f.sql(&format!("{}; {}; {}; {}", insert("a", 1), emit("a", 2), insert("a", 3), emit("a", 4))).await;
    f.sql(&format!("BEGIN; {}; ROLLBACK", emit("a", 99))).await;
    f.sql(&format!("BEGIN; SAVEPOINT s; {}; ROLLBACK TO s; {}; COMMIT", emit("a", 98), emit("a", 5))).await;
    // Not ours: without a transaction, of another prefix.
    f.sql("SELECT pg_logical_emit_message(false, 'airtight', '{\"id\": \"x\"}')").await;
    f.sql("SELECT pg_logical_emit_message(true, 'somebody', 'anything')").await;
    f.sql("SELECT pg_logical_emit_message(true, 'airtight2', 'anything')").await;
    f.sql(&insert("a", 6)).await;
    sink.has(6).await;
    relay.stop().await;
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3", "a:4", "a:5", "a:6"]);
    assert_eq!(f.number("SELECT count(*) FROM airtight.parked").await, 0);
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status = 'done'").await, 3);
    // While nobody reads, the slot keeps them.
    f.sql(&emit("a", 7)).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived().last().unwrap(), "a:7");
}

#[tokio::test]
async fn one_that_is_malformed_is_parked_as_dead() {
    let Some(f) = Fixture::create("malformed").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.streams().await;
    for body in [
        "{oops",
        "",
        "[1]",
        "{\"id\": \"\\u0000\"}",
        "{\"id\":\"1\",\"stream\":\"s\",\"eventType\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"k\",\"headers\":[]}",
    ] {
        sqlx::query("SELECT pg_logical_emit_message(true, 'airtight', $1)")
            .bind(body)
            .execute(&f.pool)
            .await
            .unwrap();
    }
    sqlx::query("SELECT pg_logical_emit_message(true, 'airtight', $1::bytea)")
        .bind(&b"\xff\x00\xfe"[..])
        .execute(&f.pool)
        .await
        .unwrap();
    f.sql(&emit("good", 1)).await;
    sink.has(1).await;
    eventually(SOON, "them to be parked", async || {
        f.number("SELECT count(*) FROM airtight.parked WHERE state = 'dead' AND error_message <> ''").await
            == 6
    })
    .await;
    relay.stop().await;
    assert_eq!(sink.arrived(), ["good:1"]);
}

#[tokio::test]
async fn another_prefix_than_before_skips_nothing() {
    let Some(f) = Fixture::create("prefix").await else { return };
    let sink = Recorder::default();
    f.publish("first", 0..1).await;
    let relay = f.start(&sink);
    sink.has(1).await;
    f.streams().await;
    sink.hold_at(2001);
    // Messages and rows in turn: without the messages, the rows have other numbers.
    f.sql(
        "DO $$ BEGIN FOR n IN 1..4000 LOOP PERFORM airtight.emit('test.cdc', 'Tested', 'Thing', 'm', jsonb_build_object('n', n)); \
         INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         VALUES ('test.cdc', 'Tested', 'Thing', 'r', jsonb_build_object('n', n)); END LOOP; END $$",
    )
    .await;
    sink.has(2001).await;
    let place =
        "SELECT p.last_seq - s.seq FROM airtight.partition p, airtight.slot s WHERE p.grp LIKE 'cdc:%'";
    eventually(SOON, "some of it to be settled", async || f.number(place).await >= 1000).await;
    relay.kill().await;
    sink.release();
    let mut options = f.options();
    options.messages = None;
    f.drain_with(options, &sink).await.unwrap();
    let arrived: std::collections::HashSet<String> = sink.arrived().into_iter().collect();
    let missing: Vec<i64> = (1..=4000).filter(|n| !arrived.contains(&format!("r:{n}"))).collect();
    assert!(
        missing.is_empty(),
        "{} rows are missing: {:?}…",
        missing.len(),
        &missing[..missing.len().min(5)]
    );
}
