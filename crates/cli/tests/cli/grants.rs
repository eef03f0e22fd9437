//! `migrate --print-grants`: each role has exactly what is printed, does what it is for, and nothing else.

use airtight_testkit::postgres::TestDb;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{Ran, airtight, finish};

const LINE: &str =
    r#"{"stream":"s","type":"T","aggregateType":"A","aggregateId":"1","payload":{"secret":1}}"#;

/// A database, and a role that owns nothing in it.
struct Place {
    db: TestDb,
    role: String,
    dir: tempfile::TempDir,
}

impl Place {
    /// Migrated with these arguments; the role has what is printed for it.
    async fn create(test: &str, who: &str, migrate: &[&str]) -> Option<Self> {
        let db = TestDb::create(&format!("grants_{test}")).await?;
        let role = format!("{}_role", db.name());
        let place = Self { db, role, dir: tempfile::tempdir().expect("a directory") };
        place.owner(&[&["migrate"], migrate].concat(), "").ok();
        place.sql(&format!("CREATE ROLE \"{}\" LOGIN", place.role)).await;
        let grants = place
            .owner(&[&["migrate", "--print-grants", who, "--role", &place.role], migrate].concat(), "")
            .ok();
        // By hand, as anybody would; and again, which changes nothing.
        place.sql(&grants).await;
        place.sql(&grants).await;
        Some(place)
    }

    fn run(&self, url: &str, args: &[&str], input: &str) -> Ran {
        let mut command = airtight(args);
        command.current_dir(self.dir.path()).env("DATABASE_URL", url);
        tokio::task::block_in_place(|| finish(command, input))
    }

    fn owner(&self, args: &[&str], input: &str) -> Ran {
        self.run(&self.db.url(), args, input)
    }

    fn url(&self) -> String {
        let mut url = url::Url::parse(&self.db.url()).expect("a URL");
        url.set_username(&self.role).expect("a URL that takes a name");
        url.into()
    }

    /// As the role.
    fn ran(&self, args: &[&str]) -> Ran {
        self.run(&self.url(), args, "")
    }

    #[track_caller]
    fn can(&self, args: &[&str]) -> String {
        let ran = self.ran(args);
        assert_eq!(ran.code, Some(0), "{args:?}: {ran:?}");
        assert!(!format!("{}{}", ran.stderr, ran.stdout).contains("permission denied"), "{args:?}: {ran:?}");
        ran.stdout
    }

    #[track_caller]
    fn cannot(&self, args: &[&str]) {
        let ran = self.ran(args);
        assert_eq!(ran.code, Some(1), "{args:?}: {ran:?}");
        assert!(
            ran.stderr.contains("permission denied") || ran.stderr.contains("must be owner"),
            "{args:?}: {ran:?}"
        );
    }

    async fn sql(&self, sql: &str) {
        let mut conn = PgConnection::connect(&self.db.url()).await.expect("a connection");
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut conn).await;
        done.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    /// A statement of the role's own.
    async fn try_sql(&self, sql: &str) -> Result<(), String> {
        let mut conn = PgConnection::connect(&self.url()).await.expect("a connection");
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut conn).await;
        done.map(|_| ()).map_err(|error| error.to_string())
    }

    async fn denied(&self, sql: &str) {
        let error = self.try_sql(sql).await.expect_err(sql);
        assert!(error.contains("permission denied") || error.contains("must be owner"), "{sql}: {error}");
    }

    fn publish(&self, events: usize) {
        self.owner(&["publish"], &format!("{LINE}\n").repeat(events)).ok();
    }

    /// Roles outlive their database.
    async fn end(self) {
        self.sql(&format!("DROP OWNED BY \"{0}\"; DROP ROLE \"{0}\"", self.role)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_publishes_and_reads_no_payload() {
    for (test, shape) in [("producer_queue", &[][..]), ("producer_log", &["--shape", "log"][..])] {
        let Some(place) = Place::create(test, "producer", shape).await else { return };
        let input = format!("{LINE}\n").repeat(20);
        assert_eq!(place.run(&place.url(), &["publish", "--json"], &input).json()["published"], 20);
        let one = ["publish", "--stream", "s", "--type", "T", "--aggregate-type", "A", "--key", "1"];
        let id = ["--id", "01a1e133-5f6b-750a-8373-d17e77a5e858", "--json"];
        let first: Value = serde_json::from_str(&place.can(&[&one[..], &id[..]].concat())).unwrap();
        let again: Value = serde_json::from_str(&place.can(&[&one[..], &id[..]].concat())).unwrap();
        assert_eq!(
            (&first["is_new"], &again["is_new"], &again["seq"]),
            (&true.into(), &false.into(), &first["seq"])
        );
        let function = "SELECT airtight.publish('s', 'T', 'A', '1', '{}', event_id => '01a1e133-5f6b-750a-8373-d17e77a5e859')";
        for sql in [
            function,
            function,
            "SELECT airtight.publish_bytes('s', 'T', 'A', '1', '\\x00')",
            "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id) VALUES ('s', 'T', 'A', '1')",
        ] {
            place.try_sql(sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
        }
        let emitted = place.try_sql("SELECT airtight.emit('s', 'T', 'A', '1', '{}')").await.unwrap_err();
        assert!(emitted.contains("no replication slot"), "{emitted}");
        if test == "producer_log" {
            place.try_sql("SELECT airtight.backlog('c')").await.unwrap();
        }
        for sql in [
            "SELECT payload FROM airtight.outbox",
            "SELECT * FROM airtight.outbox",
            "UPDATE airtight.outbox SET payload = NULL",
            "DELETE FROM airtight.outbox",
            "TRUNCATE airtight.outbox",
            "DROP TABLE airtight.outbox",
            "CREATE TABLE airtight.mine ()",
            "SELECT payload FROM airtight.parked",
            "DELETE FROM airtight.partition",
        ] {
            place.denied(sql).await;
        }
        for command in [
            &["events", "list"][..],
            &["tail", "--json"],
            &["run", "--to", "null:", "--drain"],
            &["migrate", "--notify"],
        ] {
            if !(test == "producer_log" && command[0] == "run") {
                place.cannot(command);
            }
        }
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_delivers_and_looks_after_its_events() {
    let Some(place) = Place::create("relay", "relay", &[]).await else { return };
    place.publish(5);
    assert_eq!(
        serde_json::from_str::<Value>(&place.can(&["run", "--to", "null:", "--drain", "--json"])).unwrap()["delivered"],
        5
    );
    place.publish(3);
    place.sql("UPDATE airtight.outbox SET status = 'dead', error_code = 'x' WHERE status = 'pending'").await;
    let dead: Value = serde_json::from_str(&place.can(&["dead", "list", "--json"])).unwrap();
    let seq = dead[0]["seq"].to_string();
    for command in [
        &["status"][..],
        &["status", "--metrics"],
        &["check"],
        &["events", "list"],
        &["events", "show", &seq],
        &["events", "blocked"],
        &["dead", "retry", &seq],
        &["events", "discard", &seq],
        &["dead", "retry", "--all"],
        &["run", "--to", "null:", "--drain"],
        &["prune", "--older-than", "0s"],
    ] {
        place.can(command);
    }
    place.publish(1);
    place.can(&["events", "list", "--json"]);
    for sql in [
        "INSERT INTO airtight.migration VALUES ('x', 1)",
        "DROP TABLE airtight.outbox",
        "DELETE FROM airtight.slot",
        "CREATE TABLE airtight.mine ()",
    ] {
        place.denied(sql).await;
    }
    place.cannot(&["publish", "--stream", "s", "--type", "T", "--aggregate-type", "A", "--key", "1"]);
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_follows_and_looks_after_itself() {
    let Some(place) = Place::create("consumer", "consumer", &["--shape", "log"]).await else { return };
    place.publish(5);
    let run = ["run", "--read", "log", "--consumer", "c", "--to", "null:", "--drain", "--json"];
    assert_eq!(serde_json::from_str::<Value>(&place.can(&run)).unwrap()["delivered"], 5);
    place.sql(
        "INSERT INTO airtight.parked (outbox, consumer, seq, slot, key, id, stream, event_type, aggregate_type, aggregate_id, op, state) \
         SELECT 'airtight.outbox', 'c', seq, 0, '1', id::text, stream, event_type, aggregate_type, aggregate_id, op, 'dead' FROM airtight.outbox",
    )
    .await;
    for command in [
        &["status"][..],
        &["status", "--metrics"],
        &["check"],
        &["events", "list"],
        &["events", "show", "1"],
        &["consumers", "list"],
        &["consumers", "show", "c"],
        &["consumers", "lag", "c"],
        &["consumers", "parked", "c"],
        &["dead", "list"],
        &["dead", "retry", "1", "--consumer", "c"],
        &["dead", "discard", "2", "--consumer", "c"],
        &["dead", "retry", "--all", "--consumer", "c"],
        &["run", "--read", "log", "--consumer", "c", "--to", "null:", "--drain"],
        &["consumers", "pause", "c"],
        &["consumers", "resume", "c"],
        &["consumers", "seek", "c", "--earliest", "--forget-inbox", "--yes"],
        &["run", "--read", "log", "--consumer", "c", "--to", "null:", "--drain"],
        &["consumers", "remove", "c", "--yes"],
    ] {
        place.can(command);
    }
    // Removing events is for the owner.
    place.sql("UPDATE airtight.outbox SET created_at = now() - interval '40 days'").await;
    place.cannot(&["prune"]);
    place.owner(&["prune"], "").ok();
    for sql in [
        "DELETE FROM airtight.outbox",
        "UPDATE airtight.outbox SET payload = NULL",
        "SELECT nextval('airtight.outbox_seq')",
        "DROP TABLE airtight.outbox_1",
    ] {
        place.denied(sql).await;
    }
    place.cannot(&["publish", "--stream", "s", "--type", "T", "--aggregate-type", "A", "--key", "1"]);
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_the_wal_finds_its_publication_prepared() {
    for (test, shape) in [("cdc_queue", &[][..]), ("cdc_log", &["--shape", "log"][..])] {
        let Some(place) = Place::create(test, "cdc", shape).await else { return };
        place.publish(5);
        let run = ["run", "--read", "cdc", "--to", "null:", "--drain", "--json"];
        assert_eq!(serde_json::from_str::<Value>(&place.can(&run)).unwrap()["delivered"], 5, "{test}");
        place.publish(2);
        assert_eq!(serde_json::from_str::<Value>(&place.can(&run)).unwrap()["delivered"], 2, "{test}");
        let slot = format!("airtight_{}", place.db.name());
        for command in [
            &["status"][..],
            &["check"],
            &["cdc", "list"],
            &["consumers", "parked", &slot],
            &["consumers", "pause", &slot],
            &["consumers", "resume", &slot],
            &["dead", "list"],
            &["events", "list"],
        ] {
            place.can(command);
        }
        place.denied("DROP TABLE airtight.outbox").await;
        place.denied("INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id) VALUES ('s', 'T', 'A', '1')").await;
        place.can(&["cdc", "remove", &slot, "--yes"]);
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_viewer_looks_and_changes_nothing() {
    for (test, shape) in [("viewer_queue", &[][..]), ("viewer_log", &["--shape", "log"][..])] {
        let Some(place) = Place::create(test, "viewer", shape).await else { return };
        place.publish(5);
        let log = test == "viewer_log";
        let run: &[&str] = if log {
            &["run", "--read", "log", "--consumer", "c", "--to", "null:", "--drain"]
        } else {
            &["run", "--to", "null:", "--drain"]
        };
        place.owner(run, "").ok();
        for command in [
            &["status"][..],
            &["status", "--json"],
            &["check"],
            &["events", "list"],
            &["events", "show", "1"],
            &["events", "blocked"],
            &["dead", "list"],
            &["cdc", "list"],
        ] {
            place.can(command);
        }
        if log {
            for command in [
                &["consumers", "list"][..],
                &["consumers", "show", "c"],
                &["consumers", "lag", "c"],
                &["consumers", "parked", "c"],
            ] {
                place.can(command);
            }
            for command in [
                &["consumers", "pause", "c"][..],
                &["consumers", "seek", "c", "--earliest", "--yes"],
                &["consumers", "remove", "c", "--yes"],
            ] {
                place.cannot(command);
            }
        } else {
            place.sql("UPDATE airtight.outbox SET status = 'dead'").await;
            for command in [
                &["dead", "retry", "--all"][..],
                &["events", "discard", "1"],
                &["prune", "--older-than", "0s"],
            ] {
                place.cannot(command);
            }
        }
        let tail = place.can(&["tail", "--from-start", "--no-follow", "--json"]);
        assert_eq!(tail.lines().count(), 5, "{tail}");
        place.cannot(run);
        place.cannot(&["publish", "--stream", "s", "--type", "T", "--aggregate-type", "A", "--key", "1"]);
        for table in [
            "outbox",
            "relay",
            "partition",
            "side",
            "log",
            "consumer",
            "parked",
            "inbox",
            "slot",
            "migration",
        ] {
            place.denied(&format!("DELETE FROM airtight.{table}")).await;
        }
        place.end().await;
    }
}

/// Another schema and table, with names that need quoting.
#[tokio::test(flavor = "multi_thread")]
async fn other_names_are_granted_alike() {
    let names = ["--schema", "My Shop", "--table", "Out box", "--shape", "log"];
    let Some(place) = Place::create("names", "producer", &names).await else { return };
    let args = [&["publish", "--json"], &names[..4]].concat();
    assert_eq!(place.run(&place.url(), &args, &format!("{LINE}\n")).json()["published"], 1);
    place.try_sql("SELECT \"My Shop\".\"publish_Out box\"('s', 'T', 'A', '1', '{}')").await.unwrap();
    place.denied("SELECT payload FROM \"My Shop\".\"Out box\"").await;
    place.end().await;
}

const MAPPED: &str = r#"
[table]
schema = "bank"
name = "transfers"
id = "id"
created_at = "created_at"
aggregate_id = "account"
aggregate_type = { constant = "Transfer" }
event_type = { constant = "Sent" }
stream = { constant = "transfers" }
payload = "body"

[table.status]
column = "status"
new = "NEW"
done = "SENT"
dead = "FAILED"

[pipelines.transfers]
to = "null:"
"#;

/// An application's own table, in a schema of its own.
#[tokio::test(flavor = "multi_thread")]
async fn a_mapped_table_is_granted_alike() {
    for who in ["relay", "viewer"] {
        let Some(db) = TestDb::create(&format!("grants_mapped_{who}")).await else { return };
        let role = format!("{}_role", db.name());
        let place = Place { db, role, dir: tempfile::tempdir().expect("a directory") };
        std::fs::write(place.dir.path().join("bank.toml"), MAPPED).expect("written");
        let config = ["-c", "bank.toml"];
        place
            .sql(&format!(
                "CREATE SCHEMA bank; CREATE TABLE bank.transfers (id text PRIMARY KEY, account text NOT NULL, body jsonb, \
                 status text NOT NULL DEFAULT 'NEW', created_at timestamptz NOT NULL DEFAULT now()); \
                 INSERT INTO bank.transfers (id, account, body) SELECT n, n, '{{}}' FROM generate_series(1, 5) AS n; \
                 CREATE ROLE \"{}\" LOGIN",
                place.role
            ))
            .await;
        place.owner(&[&["migrate"], &config[..]].concat(), "").ok();
        let grants = ["migrate", "--print-grants", who, "--role", &place.role];
        let grants = place.owner(&[&grants[..], &config].concat(), "").ok();
        place.sql(&grants).await;
        for command in [&["status"][..], &["check"], &["events", "list"], &["dead", "list"]] {
            place.can(&[command, &config].concat());
        }
        let run = [&["run", "--drain"], &config[..]].concat();
        if who == "relay" {
            assert!(place.can(&run).starts_with("delivered 5 events"));
        } else {
            place.cannot(&run);
            place.denied("UPDATE bank.transfers SET status = 'SENT'").await;
        }
        let error =
            place.owner(&[&["migrate", "--print-grants", "producer"], &config[..]].concat(), "").error(2);
        assert!(error.contains("its own INSERT"), "{error}");
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused() {
    let Some(db) = TestDb::create("grants_refused").await else { return };
    let run = |args: &[&str]| {
        let mut command = airtight(args);
        command.env("DATABASE_URL", db.url());
        tokio::task::block_in_place(|| finish(command, ""))
    };
    let error = run(&["migrate", "--print-grants", "relay", "--shape", "log"]).error(2);
    assert!(error.contains("`consumer`") && error.contains("`cdc`"), "{error}");
    let error = run(&["migrate", "--print-grants", "consumer", "--shape", "queue"]).error(2);
    assert!(error.contains("`relay`"), "{error}");
    let error = run(&["migrate", "--print-grants", "viewer", "--url", "sqlite:x.db"]).error(2);
    assert!(error.contains("SQLite"), "{error}");
    // Not told what it is, the database says; one that has none is taken for a queue.
    run(&["migrate", "--shape", "log"]).ok();
    assert!(run(&["migrate", "--print-grants", "viewer"]).ok().contains("outbox_seq"));
}

/// docs/operations.md shows what is printed, word for word.
#[test]
fn the_documents_show_what_is_printed() {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md")).unwrap();
    for (who, shape) in [
        ("producer", "queue"),
        ("relay", "queue"),
        ("producer", "log"),
        ("consumer", "log"),
        ("cdc", "queue"),
        ("viewer", "queue"),
        ("viewer", "log"),
    ] {
        let url = "postgres://owner@localhost/shop";
        let command = airtight(["migrate", "--url", url, "--print-grants", who, "--shape", shape]);
        let printed = finish(command, "").ok();
        assert!(page.contains(printed.trim_end()), "{who} of a {shape}:\n{printed}");
    }
}
