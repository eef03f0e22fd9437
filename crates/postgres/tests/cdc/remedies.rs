//! Every remedy that an error of the reader prints, followed to the letter after the fault that it is printed for: no event
//! is lost.
//!
//! [`Fixture::follow`] reads the message as an operator would: the statements of its remedy are run as they stand, then
//! `airtight cdc recover NAME` if the message has it.

use std::time::{Duration, Instant};

use airtight_core::Error;
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{postgres_server::PrivateServer, wait::eventually};

use crate::support::{Fixture, Recorder, SOON};

impl Fixture {
    /// Does what the message says.
    pub(crate) async fn follow(&self, error: &Error) {
        let message = error.message();
        let mut did = false;
        if let Some(sql) = error.remedy() {
            self.sql(sql).await;
            did = true;
        }
        if let Some((_, rest)) = message.split_once("`airtight cdc recover ") {
            let (name, _) = rest.split_once('`').unwrap();
            self.outbox.recover_reader(name).await.unwrap_or_else(|error| panic!("{message}: {error}"));
            did = true;
        }
        assert!(did, "no remedy in: {message}");
    }

    /// What of `key:0..count` has not arrived.
    fn lost(&self, sink: &Recorder, key: &str, count: i64) -> Vec<String> {
        let arrived = sink.arrived();
        (0..count).map(|n| format!("{key}:{n}")).filter(|name| !arrived.contains(name)).collect()
    }
}

fn fill(f: &Fixture, sql: &str) -> String {
    sql.replace("{p}", &format!("\"{}\"", f.slot())).replace("{t}", "airtight.outbox")
}

/// The fault happens under a relay.
async fn under_a_relay(name: &str, before: &str, fault: &str, after: &str) {
    let Some(f) = Fixture::create(&format!("remedy_{name}")).await else { return };
    if !before.is_empty() {
        f.sql(&fill(&f, before)).await;
    }
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.publish("a", 0..1).await;
    sink.has(1).await;
    f.streams().await;
    f.sql(&fill(&f, fault)).await;
    let since = Instant::now();
    f.publish("b", 0..10).await;
    if !after.is_empty() {
        f.sql(&fill(&f, after)).await;
    }
    let error = relay.error().await;
    println!("{name}: noticed after {:.1?}: {} {error}", since.elapsed(), error.code());
    assert!(error.message().contains("airtight cdc recover"), "{error}");
    f.publish("c", 0..5).await;
    // Mended in part only, it is refused still.
    if let Some(sql) = error.remedy() {
        f.sql(sql).await;
        let again = f.drain(&sink).await.unwrap_err();
        assert!(again.message().contains("airtight cdc recover"), "{again}");
        f.follow(&again).await;
    } else {
        f.follow(&error).await;
    }
    f.drain(&sink).await.unwrap();
    assert_eq!((f.lost(&sink, "b", 10), f.lost(&sink, "c", 5)), (vec![], vec![]), "{name}: lost");
    assert!(since.elapsed() < Duration::from_secs(60));
}

/// The fault happens while no relay is there.
async fn between_two_starts(name: &str, before: &str, fault: &str, after: &str) {
    let Some(f) = Fixture::create(&format!("remedy_{name}")).await else { return };
    if !before.is_empty() {
        f.sql(&fill(&f, before)).await;
    }
    let sink = Recorder::default();
    f.publish("a", 0..1).await;
    f.drain(&sink).await.unwrap();
    f.sql(&fill(&f, fault)).await;
    f.publish("b", 0..10).await;
    if !after.is_empty() {
        f.sql(&fill(&f, after)).await;
    }
    let error = f.drain(&sink).await.unwrap_err();
    println!("{name}: {} {error}", error.code());
    let checked = f.outbox.check_cdc(&f.options()).await.unwrap();
    assert!(
        checked.iter().any(|finding| finding.fatal && finding.message.contains("airtight cdc recover")),
        "{checked:?}"
    );
    f.follow(&error).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(f.lost(&sink, "b", 10), Vec::<String>::new(), "{name}: lost");
}

macro_rules! faults {
    ($($name:ident, $before:expr, $fault:expr, $after:expr;)*) => {
        mod running {
            $(#[tokio::test]
            async fn $name() {
                super::under_a_relay(concat!(stringify!($name), "_r"), $before, $fault, $after).await;
            })*
        }
        mod stopped {
            $(#[tokio::test]
            async fn $name() {
                super::between_two_starts(concat!(stringify!($name), "_s"), $before, $fault, $after).await;
            })*
        }
    };
}

const COPY: &str = "CREATE TABLE airtight.copy (LIKE {t} INCLUDING ALL); \
     INSERT INTO airtight.copy (id, stream, event_type, aggregate_type, aggregate_id, payload, status) \
       SELECT id, stream, event_type, aggregate_type, aggregate_id, payload, status FROM {t}; \
     ALTER TABLE {t} RENAME TO outbox_old; ALTER TABLE airtight.copy RENAME TO outbox";

// What is done to a publication, or to the table, after which events are missing: its name, what is done before the reader
// starts, the fault, and what is done after the events. `{p}` is the publication, `{t}` the table.
faults! {
    publication_dropped, "", "DROP PUBLICATION {p}", "";
    publication_made_anew, "", "DROP PUBLICATION {p}", "CREATE PUBLICATION {p} FOR TABLE {t} WITH (publish = 'insert')";
    publication_renamed, "", "ALTER PUBLICATION {p} RENAME TO elsewhere", "";
    publication_renamed_and_back, "", "ALTER PUBLICATION {p} RENAME TO elsewhere", "ALTER PUBLICATION elsewhere RENAME TO {p}";
    table_taken_out, "", "CREATE TABLE other (x int); ALTER PUBLICATION {p} SET TABLE other", "";
    table_taken_out_and_back, "", "ALTER PUBLICATION {p} DROP TABLE {t}", "ALTER PUBLICATION {p} ADD TABLE {t}";
    inserts_left_out, "", "ALTER PUBLICATION {p} SET (publish = 'update')", "";
    inserts_left_out_and_back, "", "ALTER PUBLICATION {p} SET (publish = 'update')", "ALTER PUBLICATION {p} SET (publish = 'insert')";
    rows_filtered, "", "ALTER PUBLICATION {p} SET TABLE {t} WHERE (stream = 'x')", "";
    columns_left_out, "", "ALTER PUBLICATION {p} SET TABLE {t} (id, seq, stream)", "";
    table_replaced, "", super::COPY, "";
    table_replaced_for_all_tables, "CREATE PUBLICATION {p} FOR ALL TABLES", super::COPY, "";
    all_tables_dropped, "CREATE PUBLICATION {p} FOR ALL TABLES", "DROP PUBLICATION {p}", "";
    schema_taken_out, "CREATE PUBLICATION {p} FOR TABLES IN SCHEMA airtight", "ALTER PUBLICATION {p} DROP TABLES IN SCHEMA airtight", "";
}

impl Fixture {
    /// Does what messages say until it is read again, and returns what was lost of `key:0..count`.
    async fn until_read(&self, sink: &Recorder, key: &str, count: i64) -> Vec<String> {
        for _ in 0..4 {
            match self.drain(sink).await {
                Ok(_) => return self.lost(sink, key, count),
                Err(error) => {
                    println!("{}: {error}", error.code());
                    self.follow(&error).await;
                }
            }
        }
        panic!("the remedies lead nowhere");
    }

    /// Delivered one event, and stopped.
    async fn delivered_one(name: &str) -> Option<(Self, Recorder)> {
        let f = Self::create(&format!("remedy_{name}")).await?;
        let sink = Recorder::default();
        f.publish("a", 0..1).await;
        f.drain(&sink).await.unwrap();
        Some((f, sink))
    }
}

const NONE: [String; 0] = [];

#[tokio::test]
async fn a_slot_that_was_dropped() {
    let Some((f, sink)) = Fixture::delivered_one("slot_dropped").await else { return };
    f.publish("b", 0..5).await;
    f.drop_slot().await;
    f.publish("b", 5..10).await;
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_slot_that_was_made_anew() {
    let Some((f, sink)) = Fixture::delivered_one("slot_anew").await else { return };
    f.drop_slot().await;
    f.publish("b", 0..5).await;
    f.sql(&format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", f.slot())).await;
    f.publish("b", 5..10).await;
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_slot_that_was_moved() {
    let Some((f, sink)) = Fixture::delivered_one("slot_moved").await else { return };
    f.publish("b", 0..10).await;
    f.advance_slot().await;
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_position_of_another_server() {
    let Some((f, sink)) = Fixture::delivered_one("other_server").await else { return };
    f.sql("UPDATE airtight.slot SET system = '7000000000000000000'").await;
    f.publish("b", 0..10).await;
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_slot_that_the_server_gave_up_for_its_size() {
    let settings =
        ["wal_level = logical", "max_slot_wal_keep_size = 1MB", "min_wal_size = 32MB", "max_wal_size = 32MB"];
    let Some(server) = PrivateServer::start_with("remedy_gave_up", &settings) else { return };
    let (f, sink) = (Fixture::on(&server.url()).await, Recorder::default());
    f.publish("a", 0..1).await;
    f.drain(&sink).await.unwrap();
    f.publish("b", 0..10).await;
    f.sql("CREATE TABLE filler (x text)").await;
    is_lost(&f, "INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 5000); SELECT pg_switch_wal(); CHECKPOINT").await;
    let error = f.drain(&sink).await.unwrap_err();
    assert!(error.message().contains("max_slot_wal_keep_size"), "{error}");
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_slot_that_the_server_gave_up_for_its_idleness() {
    let test = "a_slot_that_the_server_gave_up_for_its_idleness";
    let Some(server) = PrivateServer::start_with(test, &["wal_level = logical"]) else { return };
    let (f, sink) = (Fixture::on(&server.url()).await, Recorder::default());
    if f.number("SELECT current_setting('server_version_num')::bigint").await < 180_000 {
        airtight_testkit::ledger::leave_out(test, "older than PostgreSQL 18", "AIRTIGHT_PG");
        return;
    }
    f.publish("a", 0..1).await;
    f.drain(&sink).await.unwrap();
    f.publish("b", 0..10).await;
    f.sql("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'").await;
    f.sql("SELECT pg_reload_conf()").await;
    is_lost(&f, "CHECKPOINT").await;
    f.sql("ALTER SYSTEM RESET idle_replication_slot_timeout").await;
    f.sql("SELECT pg_reload_conf()").await;
    let error = f.drain(&sink).await.unwrap_err();
    assert!(error.message().contains("idle_replication_slot_timeout"), "{error}");
    assert!(!error.message().contains("max_slot_wal_keep_size"), "{error}");
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

async fn is_lost(f: &Fixture, by: &str) {
    let status = format!("SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{}'", f.slot());
    eventually(SOON, "the slot to be lost", async || {
        f.sql(by).await;
        f.text(&status).await == "lost"
    })
    .await;
}

/// A publication that leaves something out at the first start, with and without a slot that is there already.
#[tokio::test]
async fn a_publication_that_leaves_something_out_from_the_beginning() {
    let Some(f) = Fixture::create("remedy_first").await else { return };
    f.sql("CREATE TABLE other (x int)").await;
    let cases = [
        "FOR TABLE other",
        "FOR TABLE {t} WITH (publish = 'update, delete')",
        "FOR TABLE other, {t} WHERE (stream = 'x') WITH (publish = 'insert')",
        "FOR TABLE other, {t} (id, seq, stream)",
    ];
    for (n, how) in cases.iter().enumerate() {
        for given in [false, true] {
            let sink = Recorder::default();
            let key = format!("{n}{given}");
            f.sql(&fill(&f, "DROP PUBLICATION IF EXISTS {p}")).await;
            f.sql(&fill(&f, &format!("CREATE PUBLICATION {{p}} {how}"))).await;
            if given {
                f.sql(&format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", f.slot()))
                    .await;
            }
            f.publish(&key, 0..5).await;
            let error = f.drain(&sink).await.unwrap_err();
            assert_eq!(error.code(), "bad_publication", "{error}");
            assert_eq!(error.message().contains("cdc recover"), given, "{error}");
            f.publish(&key, 5..10).await;
            assert_eq!(f.until_read(&sink, &key, 10).await, NONE, "{how}, slot given: {given}");
            f.outbox.remove_reader(f.slot()).await.unwrap();
        }
    }
    // No publication at all beside a slot that somebody has made.
    let sink = Recorder::default();
    f.sql(&fill(&f, "DROP PUBLICATION {p}")).await;
    f.sql(&format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", f.slot())).await;
    f.publish("none", 0..10).await;
    let error = f.drain(&sink).await.unwrap_err();
    assert_eq!(error.code(), "publication_lost", "{error}");
    assert_eq!(f.until_read(&sink, "none", 10).await, NONE);
}

#[tokio::test]
async fn a_partition_that_is_not_in_the_wal() {
    let Some((f, _)) = crate::schema::plain("remedy_unlogged").await else { return };
    f.sql(
        "DROP TABLE plain; CREATE TABLE plain (id uuid NOT NULL DEFAULT gen_random_uuid(), position bigserial, \
         kind text NOT NULL DEFAULT 'K', entity text NOT NULL DEFAULT 'E', entity_id text NOT NULL, body text, \
         PRIMARY KEY (position, id)) PARTITION BY RANGE (position); \
         CREATE TABLE plain_1 PARTITION OF plain FOR VALUES FROM (0) TO (3)",
    )
    .await;
    let sink = Recorder::default();
    let relay = f.start(&sink);
    let insert = async |from: i64, to: i64| {
        let values: Vec<String> = (from..to).map(|n| format!("('b', '{{\"n\":{n}}}')")).collect();
        f.sql(&format!("INSERT INTO plain (entity_id, body) VALUES {}", values.join(", "))).await;
    };
    insert(0, 2).await;
    sink.has(2).await;
    f.sql("CREATE UNLOGGED TABLE plain_2 PARTITION OF plain FOR VALUES FROM (3) TO (99)").await;
    insert(2, 6).await;
    let error = relay.error().await;
    assert_eq!(error.code(), "unlogged", "{error}");
    insert(6, 10).await;
    f.follow(&error).await;
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_partitioned_table_that_would_come_as_its_partitions() {
    let Some((f, _)) = crate::schema::plain("remedy_viaroot").await else { return };
    f.sql(
        "DROP TABLE plain; CREATE TABLE plain (id uuid NOT NULL DEFAULT gen_random_uuid(), position bigserial, \
         kind text NOT NULL DEFAULT 'K', entity text NOT NULL DEFAULT 'E', entity_id text NOT NULL, body text, \
         PRIMARY KEY (position, id)) PARTITION BY RANGE (position); \
         CREATE TABLE plain_1 PARTITION OF plain FOR VALUES FROM (0) TO (99)",
    )
    .await;
    let sink = Recorder::default();
    let relay = f.start(&sink);
    let insert = "INSERT INTO plain (entity_id, body) SELECT 'b', jsonb_build_object('n', n) FROM generate_series({}) n";
    f.sql(&insert.replace("{}", "0, 1")).await;
    sink.has(2).await;
    f.sql(&fill(&f, "ALTER PUBLICATION {p} SET (publish_via_partition_root = false)")).await;
    f.sql(&insert.replace("{}", "2, 5")).await;
    let error = relay.error().await;
    assert_eq!(error.code(), "bad_publication", "{error}");
    f.sql(&insert.replace("{}", "6, 9")).await;
    f.follow(&error).await;
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_server_without_logical_wal() {
    let Some(server) = PrivateServer::start_with("remedy_wal_level", &[]) else { return };
    let mut f = Fixture::on(&server.url()).await;
    f.publish("b", 0..5).await;
    let sink = Recorder::default();
    let error = f.drain(&sink).await.unwrap_err();
    f.sql(error.remedy().unwrap()).await;
    server.stop();
    server.resume();
    f = Fixture::on(&server.url()).await;
    f.publish("b", 5..10).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(f.lost(&sink, "b", 10), NONE);
}

#[tokio::test]
async fn a_role_without_rights() {
    let Some(mut f) = Fixture::create("remedy_rights").await else { return };
    let role = format!("{}_r", f.slot());
    f.sql(&format!("CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA airtight TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA airtight TO {role}")).await;
    f.publish("b", 0..5).await;
    let url = f.url().replace("airtight@", &format!("{role}@"));
    f.outbox = PgOutbox::connect(&url, PgOptions::default()).await.unwrap();
    let sink = Recorder::default();
    let error = f.drain(&sink).await.unwrap_err();
    f.sql(error.remedy().unwrap()).await;
    let error = f.drain(&sink).await.unwrap_err();
    f.sql(error.remedy().unwrap()).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(f.lost(&sink, "b", 5), NONE);
    f.outbox.pool().close().await;
    f.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn a_server_without_room_for_a_slot() {
    let settings = ["wal_level = logical", "max_replication_slots = 1"];
    let Some(server) = PrivateServer::start_with("remedy_no_slots", &settings) else { return };
    let (f, sink) = (Fixture::on(&server.url()).await, Recorder::default());
    f.sql("SELECT pg_create_physical_replication_slot('standby')").await;
    f.publish("b", 0..5).await;
    let error = f.drain(&sink).await.unwrap_err();
    assert_eq!(f.number("SELECT count(*) FROM pg_publication").await, 0, "a refused start leaves none");
    let (_, sql) = error.remedy().unwrap().split_once("free one (").unwrap();
    let (sql, _) = sql.split_once("), or").unwrap();
    f.sql(&sql.replace("NAME", "standby")).await;
    f.publish("b", 5..10).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(f.lost(&sink, "b", 10), NONE);
}

#[tokio::test]
async fn a_slot_that_somebody_else_reads() {
    let Some((f, sink)) = Fixture::delivered_one("held").await else { return };
    f.is_free().await;
    let (url, publications) = (f.url(), format!("publication_names={}", f.slot()));
    let arguments = [
        "--start",
        "--slot",
        f.slot(),
        "-o",
        "proto_version=1",
        "-o",
        &publications,
        "-f",
        "/dev/null",
        "-d",
        &url,
    ];
    let Ok(mut reader) =
        std::process::Command::new("pg_recvlogical").arg("--no-loop").args(arguments).spawn()
    else {
        return;
    };
    f.streams().await;
    f.publish("b", 0..10).await;
    let error = f.drain(&sink).await.unwrap_err();
    assert_eq!(error.code(), "in_use", "{error}");
    f.sql(error.message().split_once("To end it: ").unwrap().1).await;
    reader.wait().unwrap();
    // It may have read some of them already: then the slot has moved, which has a remedy of its own.
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

#[tokio::test]
async fn a_slot_of_another_kind() {
    let Some(f) = Fixture::create("remedy_kind").await else { return };
    f.sql(&format!("SELECT pg_create_logical_replication_slot('{}', 'test_decoding')", f.slot())).await;
    f.publish("b", 0..5).await;
    let sink = Recorder::default();
    let error = f.drain(&sink).await.unwrap_err();
    assert!(error.message().contains("use another name (`--slot NAME`)"), "{error}");
    assert_eq!(f.number("SELECT count(*) FROM pg_publication").await, 0, "a refused start leaves none");
    let mut options = airtight_postgres::CdcOptions::slot(format!("{}_2", f.slot()));
    options.log.read.lease = f.options().log.read.lease;
    f.drain_with(options, &sink).await.unwrap();
    assert_eq!(f.lost(&sink, "b", 5), NONE);
}

#[tokio::test]
async fn a_table_that_was_renamed() {
    let Some((f, sink)) = Fixture::delivered_one("renamed").await else { return };
    let relay = f.start(&sink);
    f.streams().await;
    f.sql("ALTER TABLE airtight.outbox RENAME TO elsewhere").await;
    eventually(SOON, "the walsender to end", async || f.end_walsender().await).await;
    f.sql(
        "INSERT INTO airtight.elsewhere (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'test.cdc', 'Tested', 'Thing', 'b', jsonb_build_object('n', n) FROM generate_series(0, 9) AS n",
    )
    .await;
    let error = relay.error().await;
    assert!(error.message().contains("elsewhere"), "{error}");
    f.follow(&error).await;
    assert_eq!(f.until_read(&sink, "b", 10).await, NONE);
}

/// What was not delivered is in the old table, what came since in the new one.
#[tokio::test]
async fn a_table_that_was_renamed_and_made_anew() {
    for before in ["", "CREATE PUBLICATION {p} FOR ALL TABLES"] {
        let Some(f) = Fixture::create("remedy_renamed_anew").await else { return };
        if !before.is_empty() {
            f.sql(&fill(&f, before)).await;
        }
        let sink = Recorder::default();
        f.publish("a", 0..1).await;
        f.drain(&sink).await.unwrap();
        f.publish("b", 0..5).await;
        f.sql("ALTER TABLE airtight.outbox RENAME TO outbox_old; CREATE TABLE airtight.outbox (LIKE airtight.outbox_old INCLUDING ALL)")
            .await;
        f.publish("b", 5..10).await;
        assert_eq!(f.until_read(&sink, "b", 10).await, NONE, "{before}");
        assert_eq!(f.lost(&sink, "a", 1), NONE);
    }
}
