//! A server, slot or table that cannot be read is refused at the start, with the statement that fixes it.

use airtight_core::{Error, admin::Admin};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres_server::PrivateServer;

use crate::support::{Fixture, Recorder};

fn says(error: &Error, code: &str, texts: &[&str]) {
    assert_eq!(error.code(), code, "{error}");
    for text in texts {
        assert!(error.to_string().contains(text), "{error} should have: {text}");
    }
}

impl Fixture {
    async fn refused(&self) -> Error {
        self.drain(&Recorder::default()).await.unwrap_err()
    }

    /// Runs the statement that a refusal ends with.
    async fn mend(&self, error: &Error) {
        let sql = error.remedy().unwrap_or_else(|| panic!("{error}"));
        self.sql(sql).await;
    }
}

#[tokio::test]
async fn a_server_without_logical_wal() {
    let Some(server) = PrivateServer::start_with("wal_level", &["wal_level = replica"]) else { return };
    let f = Fixture::on(&server.url()).await;
    let error = f.refused().await;
    says(&error, "wal_level", &["replica", "ALTER SYSTEM SET wal_level = 'logical'", "restart"]);
}

#[tokio::test]
async fn a_server_whose_slots_are_all_in_use() {
    let settings = ["wal_level = logical", "max_replication_slots = 1"];
    let Some(server) = PrivateServer::start_with("no_slots", &settings) else { return };
    let f = Fixture::on(&server.url()).await;
    f.sql("SELECT pg_create_physical_replication_slot('standby')").await;
    let error = f.refused().await;
    says(&error, "no_slots", &["pg_drop_replication_slot", "max_replication_slots"]);
    f.sql("SELECT pg_drop_replication_slot('standby')").await;
    f.publish("a", 1..2).await;
    assert_eq!(f.drain(&Recorder::default()).await.unwrap().delivered, 1);
}

#[tokio::test]
async fn a_role_that_may_not_replicate() {
    let Some(mut f) = Fixture::create("norepl").await else { return };
    let role = format!("{}_r", f.slot());
    f.sql(&format!("CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA airtight TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA airtight TO {role}")).await;
    let url = f.url().replace("airtight@", &format!("{role}@"));
    f.outbox = PgOutbox::connect(&url, PgOptions::default()).await.unwrap();
    let error = f.refused().await;
    says(&error, "no_replication", &[&format!("ALTER ROLE \"{role}\" REPLICATION")]);
    f.sql(&format!("ALTER ROLE {role} REPLICATION")).await;
    // It does not own the table, so that it cannot make a publication.
    let error = f.refused().await;
    says(&error, "no_publication", &["CREATE PUBLICATION", "FOR TABLE"]);
    f.mend(&error).await;
    f.publish("a", 1..2).await;
    let sink = Recorder::default();
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:1"]);
    f.outbox.pool().close().await;
    f.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn a_slot_of_another_kind() {
    let Some(f) = Fixture::create("kinds").await else { return };
    let slot = f.slot().to_owned();
    let drop = format!("SELECT pg_drop_replication_slot('{slot}')");
    f.sql(&format!("SELECT pg_create_physical_replication_slot('{slot}')")).await;
    says(&f.refused().await, "bad_slot", &["physical", "--slot"]);
    f.sql(&drop).await;
    f.sql(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')")).await;
    says(&f.refused().await, "bad_slot", &["test_decoding", "pgoutput", "--slot"]);
    f.sql(&drop).await;
    let Some(other) = airtight_testkit::postgres::TestDb::create("cdc_kinds_other").await else { return };
    let pool = other.pool(1).await;
    sqlx::query("SELECT pg_create_logical_replication_slot($1, 'pgoutput')")
        .bind(&slot)
        .execute(&pool)
        .await
        .unwrap();
    says(&f.refused().await, "bad_slot", &[other.name(), "--slot"]);
}

#[tokio::test]
async fn a_slot_that_somebody_else_reads() {
    let Some(f) = Fixture::create("held").await else { return };
    let sink = Recorder::default();
    f.publish("a", 1..2).await;
    f.drain(&sink).await.unwrap();
    f.is_free().await;
    let url = f.url();
    let arguments = [
        "--start",
        "--slot",
        f.slot(),
        "-o",
        "proto_version=1",
        "-o",
        &format!("publication_names={}", f.slot()),
        "-f",
        "/dev/null",
        "-d",
        &url,
    ];
    let Ok(mut reader) = std::process::Command::new("pg_recvlogical").args(arguments).spawn() else { return };
    f.streams().await;
    let error = f.refused().await;
    says(&error, "in_use", &["pg_recvlogical", "pg_terminate_backend(", "--slot"]);
    reader.kill().unwrap();
    reader.wait().unwrap();
    f.is_free().await;
    f.publish("a", 2..3).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.first_arrivals(), ["a:1", "a:2"]);
}

#[tokio::test]
async fn publications_that_leave_something_out() {
    let Some(f) = Fixture::create("publications").await else { return };
    let name = f.slot().to_owned();
    f.sql("CREATE TABLE other (x int)").await;
    f.publish("a", 1..2).await;
    let cases = [
        ("FOR TABLE other", "does not contain the table"),
        ("FOR TABLE airtight.outbox WITH (publish = 'update, delete')", "does not publish inserts"),
        ("FOR TABLE other, airtight.outbox WHERE (stream = 'x') WITH (publish = 'insert')", "filters rows"),
        ("FOR TABLE other, airtight.outbox (id, seq, stream)", "leaves out columns"),
    ];
    for (how, text) in cases {
        f.sql(&format!("DROP PUBLICATION IF EXISTS \"{name}\"; CREATE PUBLICATION \"{name}\" {how}")).await;
        let error = f.refused().await;
        says(&error, "bad_publication", &[text, "Fix: ALTER PUBLICATION"]);
        f.mend(&error).await;
        let sink = Recorder::default();
        f.publish("a", 2..3).await;
        let drained = f.drain(&sink).await;
        assert!(drained.is_ok(), "{how}, mended: {drained:?}");
        // What else is in there is somebody's.
        if how.contains("other") {
            let others = format!(
                "SELECT count(*) FROM pg_publication_tables WHERE pubname = '{name}' AND tablename = 'other'"
            );
            assert_eq!(f.number(&others).await, 1, "{how}: the mending has removed another table");
        }
        f.drop_slot().await;
        f.recover().await;
    }
}

#[tokio::test]
async fn a_partitioned_table_that_would_come_as_its_partitions() {
    let Some((f, _)) = crate::schema::plain("viaroot").await else { return };
    f.sql(
        "DROP TABLE plain; CREATE TABLE plain (id uuid NOT NULL DEFAULT gen_random_uuid(), position bigserial, \
         kind text NOT NULL DEFAULT 'K', entity text NOT NULL DEFAULT 'E', entity_id text NOT NULL, body text, \
         PRIMARY KEY (position, id)) PARTITION BY RANGE (position); \
         CREATE TABLE plain_1 PARTITION OF plain FOR VALUES FROM (0) TO (9)",
    )
    .await;
    f.sql(&format!("CREATE PUBLICATION \"{}\" FOR TABLE plain", f.slot())).await;
    let error = f.refused().await;
    says(&error, "bad_publication", &["partitioned", "publish_via_partition_root = true"]);
    f.mend(&error).await;
    f.drain(&Recorder::default()).await.unwrap();
    // A partition whose rows are not in the WAL.
    f.sql("CREATE UNLOGGED TABLE plain_2 PARTITION OF plain FOR VALUES FROM (9) TO (99)").await;
    let error = f.refused().await;
    says(&error, "unlogged", &["plain_2", "SET LOGGED"]);
}

#[tokio::test]
async fn a_table_that_is_not_in_the_wal() {
    let Some(f) = Fixture::create("unlogged").await else { return };
    f.sql("ALTER TABLE airtight.outbox SET UNLOGGED").await;
    let error = f.refused().await;
    says(&error, "unlogged", &["SET LOGGED"]);
    f.mend(&error).await;
    f.drain(&Recorder::default()).await.unwrap();
}

#[tokio::test]
async fn a_mapped_column_that_is_not_there() {
    let Some((mut f, mut options)) = crate::schema::plain("no_column").await else { return };
    if let Some(spec) = &mut options.spec {
        spec.payload = "content".into();
    }
    f.outbox = PgOutbox::connect(&f.url(), options).await.unwrap();
    let error = f.refused().await;
    assert!(error.message().contains("content"), "{error}");
    let _ = Admin::migrate(&f.outbox).await;
}

#[tokio::test]
async fn names_that_no_slot_can_have() {
    let Some(f) = Fixture::create("names").await else { return };
    for name in ["", "Upper", "a-b", "a b", "ü", &"x".repeat(64), "a\"; DROP TABLE x"] {
        let error = f.outbox.cdc(airtight_postgres::CdcOptions::slot(name)).err().unwrap();
        says(&error, "bad_name", &["lower-case"]);
    }
}
