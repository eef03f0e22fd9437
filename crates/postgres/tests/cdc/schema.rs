//! The table changes while it is read.

use airtight_core::{admin::Admin, table::Field};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::wait::eventually;

use crate::support::{Fixture, Recorder, SOON};

#[tokio::test]
async fn columns_that_are_not_mapped_come_and_go() {
    let Some(f) = Fixture::create("columns").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.publish("a", 1..2).await;
    f.sql("ALTER TABLE airtight.outbox ADD COLUMN tenant text DEFAULT 'acme'").await;
    f.publish("a", 2..3).await;
    f.sql("ALTER TABLE airtight.outbox DROP COLUMN tenant").await;
    f.publish("a", 3..4).await;
    f.sql("ALTER TABLE airtight.outbox ALTER COLUMN stream TYPE varchar(200)").await;
    f.publish("a", 4..5).await;
    sink.has(4).await;
    relay.stop().await;
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3", "a:4"]);
}

/// A table of its own, with little in it.
pub(crate) async fn plain(name: &str) -> Option<(Fixture, PgOptions)> {
    let mut spec = crate::foreign::foreign_spec();
    (spec.schema, spec.table, spec.status) = (None, "plain".into(), None);
    for column in [
        &mut spec.op,
        &mut spec.payload_bytes,
        &mut spec.headers,
        &mut spec.occurred_at,
        &mut spec.schema_version,
        &mut spec.max_attempts,
        &mut spec.created_at,
        &mut spec.finished_at,
    ] {
        *column = None;
    }
    spec.extra.clear();
    spec.stream = Field::Constant("test.cdc".into());
    let options = PgOptions { spec: Some(spec), ..PgOptions::default() };
    let db = airtight_testkit::postgres::TestDb::create(&format!("cdc_{name}")).await?;
    let outbox = PgOutbox::connect(&db.url(), options.clone()).await.unwrap();
    sqlx::raw_sql(
        "CREATE TABLE plain (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), position bigserial, kind text NOT NULL DEFAULT 'K', \
         entity text NOT NULL DEFAULT 'E', entity_id text NOT NULL, body text)",
    )
    .execute(outbox.pool())
    .await
    .unwrap();
    outbox.migrate().await.unwrap();
    Some((Fixture::of(db, outbox).await, options))
}

async fn insert(f: &Fixture, table: &str, key: &str, n: i64) {
    f.sql(&format!("INSERT INTO {table} (entity_id, body) VALUES ('{key}', '{{\"n\":{n}}}')")).await;
}

#[tokio::test]
async fn a_mapped_column_that_is_renamed_stops_the_relay_at_that_place() {
    let Some((mut f, mut options)) = plain("renamed").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    insert(&f, "plain", "a", 1).await;
    sink.has(1).await;
    f.sql(
        "INSERT INTO plain (entity_id, body) VALUES ('a', '{\"n\":2}'); ALTER TABLE plain RENAME COLUMN kind TO sort; \
         INSERT INTO plain (entity_id, body) VALUES ('a', '{\"n\":3}')",
    )
    .await;
    insert(&f, "plain", "a", 4).await;
    let error = relay.error().await;
    assert_eq!(error.code(), "bad_column", "{error}");
    for text in ["kind", "\"plain\"", "/", "correct the mapping"] {
        assert!(error.message().contains(text), "{error} should have: {text}");
    }
    // The mapping is mended.
    if let Some(spec) = &mut options.spec {
        spec.event_type = Field::Column("sort".into());
    }
    let url = f.url();
    f.outbox = PgOutbox::connect(&url, options).await.unwrap();
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.first_arrivals(), ["a:1", "a:2", "a:3", "a:4"]);
}

#[tokio::test]
async fn a_mapped_column_that_is_dropped_stops_the_relay() {
    let Some((f, _)) = plain("dropped_column").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    insert(&f, "plain", "a", 1).await;
    sink.has(1).await;
    f.sql("ALTER TABLE plain DROP COLUMN entity").await;
    insert(&f, "plain", "a", 2).await;
    let error = relay.error().await;
    assert!(error.code() == "bad_column" && error.message().contains("entity"), "{error}");
    f.sql("ALTER TABLE plain ADD COLUMN entity text NOT NULL DEFAULT 'E'").await;
    insert(&f, "plain", "a", 3).await;
    // What was written without it cannot become an event: still nothing is skipped.
    let error = f.drain(&sink).await.unwrap_err();
    assert!(error.code() == "bad_column" && error.message().contains("entity"), "{error}");
    assert_eq!(sink.arrived(), ["a:1"]);
}

#[tokio::test]
async fn a_table_that_is_renamed_is_read_on_and_never_passed_over() {
    let Some((f, _)) = plain("table_renamed").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    insert(&f, "plain", "a", 1).await;
    f.streams().await;
    sink.has(1).await;
    insert(&f, "plain", "b", 1).await;
    sink.has(2).await;
    f.sql("ALTER TABLE plain RENAME TO other").await;
    insert(&f, "other", "a", 2).await;
    sink.has(3).await;
    // With a new connection it must be looked for by its name, which it no longer has.
    eventually(SOON, "the walsender to end", async || f.end_walsender().await).await;
    insert(&f, "other", "a", 3).await;
    let error = relay.error().await;
    assert!(error.message().contains("plain"), "{error}");
    f.sql("ALTER TABLE other RENAME TO plain").await;
    insert(&f, "plain", "a", 4).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.first_arrivals(), ["a:1", "b:1", "a:2", "a:3", "a:4"]);
}

#[tokio::test]
async fn a_table_of_the_same_name_elsewhere_is_another_one() {
    let Some((f, _)) = plain("namesake").await else { return };
    f.sql("CREATE SCHEMA archive; CREATE TABLE archive.plain (LIKE plain INCLUDING ALL)").await;
    f.sql(&format!("CREATE PUBLICATION \"{}\" FOR ALL TABLES", f.slot())).await;
    let sink = Recorder::default();
    let relay = f.start(&sink);
    insert(&f, "plain", "a", 1).await;
    insert(&f, "archive.plain", "archived", 1).await;
    insert(&f, "plain", "a", 2).await;
    sink.has(2).await;
    relay.stop().await;
    assert_eq!(sink.arrived(), ["a:1", "a:2"]);
}

#[tokio::test]
async fn partitions_come_and_go() {
    let Some((f, _)) = plain("partitions").await else { return };
    f.sql(
        "DROP TABLE plain; CREATE TABLE plain (id uuid NOT NULL DEFAULT gen_random_uuid(), position bigserial, \
         kind text NOT NULL DEFAULT 'K', entity text NOT NULL DEFAULT 'E', entity_id text NOT NULL, body text, \
         PRIMARY KEY (position, id)) PARTITION BY RANGE (position); \
         CREATE TABLE plain_1 PARTITION OF plain FOR VALUES FROM (0) TO (3)",
    )
    .await;
    insert(&f, "plain", "a", 1).await;
    let sink = Recorder::default();
    let relay = f.start(&sink);
    insert(&f, "plain_1", "a", 2).await;
    sink.has(2).await;
    f.sql("CREATE TABLE plain_2 PARTITION OF plain FOR VALUES FROM (3) TO (5)").await;
    insert(&f, "plain", "a", 3).await;
    f.sql("ALTER TABLE plain DETACH PARTITION plain_1").await;
    insert(&f, "plain_2", "a", 4).await;
    // With its columns in another order.
    f.sql(
        "CREATE TABLE plain_3 (body text, entity_id text NOT NULL, entity text NOT NULL DEFAULT 'E', gone int, \
         position bigint NOT NULL, kind text NOT NULL DEFAULT 'K', id uuid NOT NULL DEFAULT gen_random_uuid()); \
         ALTER TABLE plain_3 DROP COLUMN gone; ALTER TABLE plain ATTACH PARTITION plain_3 FOR VALUES FROM (5) TO (99)",
    )
    .await;
    insert(&f, "plain", "a", 5).await;
    f.sql("DROP TABLE plain_2").await;
    insert(&f, "plain", "a", 6).await;
    sink.has(6).await;
    relay.stop().await;
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3", "a:4", "a:5", "a:6"]);
}

#[tokio::test]
async fn what_was_committed_before_a_truncate_is_delivered() {
    let Some((f, _)) = plain("truncate").await else { return };
    let sink = Recorder::default();
    insert(&f, "plain", "a", 1).await;
    f.drain(&sink).await.unwrap();
    insert(&f, "plain", "a", 2).await;
    f.sql("TRUNCATE plain").await;
    insert(&f, "plain", "a", 3).await;
    f.sql("ALTER TABLE plain ALTER COLUMN body TYPE json USING body::json").await;
    insert(&f, "plain", "a", 4).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3", "a:4"]);
}
