//! The WAL as the source, through the binary: delivering, looking after readers, dead letters, a lost slot.

use std::time::Duration;

use airtight_testkit::{
    http::{HttpServer, Reply},
    postgres::TestDb,
    wait::eventually,
};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{Ran, airtight, finish};

/// An outbox in a database of its own, and a directory to write to.
struct Wal {
    db: TestDb,
    dir: tempfile::TempDir,
}

impl Wal {
    async fn create(test: &str) -> Option<Self> {
        let db = TestDb::create(&format!("cli_{test}")).await?;
        let wal = Self { db, dir: tempfile::tempdir().expect("a directory") };
        wal.run(&["migrate"]).ok();
        Some(wal)
    }

    fn run(&self, args: &[&str]) -> Ran {
        let mut command = airtight(args);
        command.current_dir(self.dir.path()).env("DATABASE_URL", self.db.url());
        tokio::task::block_in_place(|| finish(command, ""))
    }

    /// Slots are shared by all databases of a server.
    fn slot(&self) -> String {
        format!("airtight_{}", self.db.name())
    }

    fn publish(&self, key: &str, n: u32) {
        let line = format!(
            "{{\"stream\":\"shop\",\"type\":\"Sold\",\"aggregateType\":\"Order\",\"aggregateId\":\"{key}\",\"payload\":{n}}}\n"
        );
        let mut command = airtight(["publish"]);
        command.env("DATABASE_URL", self.db.url());
        tokio::task::block_in_place(|| finish(command, &line)).ok();
    }

    fn drain(&self, to: &str) -> Value {
        self.run(&[
            "run",
            "--read",
            "cdc",
            "--to",
            to,
            "--drain",
            "--lease",
            "1",
            "--max-attempts",
            "1",
            "--json",
        ])
        .json()
    }

    fn lines(&self, file: &str) -> usize {
        std::fs::read_to_string(self.dir.path().join(file)).unwrap_or_default().lines().count()
    }

    async fn sql(&self, sql: &str) {
        let mut conn = PgConnection::connect(&self.db.url()).await.expect("a connection");
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut conn).await.expect("a statement");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outbox_is_followed_and_its_reader_looked_after() {
    let Some(wal) = Wal::create("cdc").await else { return };
    wal.publish("a", 1);
    wal.publish("a", 2);
    assert_eq!(wal.drain("file:out")["delivered"], 2);
    wal.publish("b", 3);
    assert_eq!(wal.drain("file:out")["delivered"], 1);
    assert_eq!(wal.lines("out"), 3);

    let readers = wal.run(&["cdc", "list", "--json"]).json();
    assert_eq!((&readers[0]["name"], &readers[0]["phase"]), (&wal.slot().into(), &"streaming".into()));
    assert!(readers[0]["lag_bytes"].is_u64() && readers[0]["retained_bytes"].is_u64(), "{readers}");
    let shown = wal.run(&["status"]).ok();
    assert!(shown.contains(&wal.slot()) && shown.contains("not being read"), "{shown}");
    assert_eq!(wal.run(&["status", "--json"]).json()["slots"][0]["name"], wal.slot().as_str());
    let page = wal.run(&["status", "--metrics", "--prefix", "shop"]).ok();
    for metric in ["slot_lag_bytes", "slot_lag_seconds", "slot_retained_bytes"] {
        let line = format!("shop_{metric}{{outbox=\"airtight.outbox\",slot=\"{}\"}} ", wal.slot());
        assert!(page.contains(&line), "{metric}: {page}");
    }

    let error = wal.run(&["cdc", "remove", "nothing", "--yes"]).error(1);
    assert!(error.contains(&format!("there are: {}", wal.slot())), "{error}");
    let removed = wal.run(&["cdc", "remove", &wal.slot(), "--yes"]).ok();
    assert!(removed.contains("DROP PUBLICATION"), "{removed}");
    assert_eq!(
        wal.run(&["cdc", "list"]).ok().trim(),
        "no readers of the WAL; start one with `airtight run --read cdc`"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_slot_is_told_and_recovered_from() {
    let Some(wal) = Wal::create("lost").await else { return };
    wal.publish("a", 1);
    assert_eq!(wal.drain("file:out")["delivered"], 1);
    // The connection of the relay that has ended may keep the slot for a moment.
    let drop = format!("SELECT pg_drop_replication_slot('{}')", wal.slot());
    let mut conn = PgConnection::connect(&wal.db.url()).await.expect("a connection");
    eventually(Duration::from_secs(30), "the slot to be free", async || {
        sqlx::raw_sql(AssertSqlSafe(drop.clone())).execute(&mut conn).await.is_ok()
    })
    .await;
    wal.publish("a", 2);
    let error = wal.run(&["run", "--read", "cdc", "--to", "file:out", "--drain"]).error(1);
    let recover = format!("airtight cdc recover {}", wal.slot());
    assert!(error.contains("is gone") && error.contains(&recover), "{error}");
    let listed = wal.run(&["cdc", "list"]).ok();
    assert!(listed.contains("slot lost"), "{listed}");
    wal.run(&["cdc", "recover", &wal.slot(), "--yes"]).ok();
    assert_eq!(
        wal.drain("file:out")["delivered"],
        1,
        "what was delivered is marked, and not delivered again"
    );
    assert_eq!(wal.lines("out"), 2);
}

/// As when Debezium had the slot in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_others_have_read_is_taken_again_once_the_place_is_forgotten() {
    let Some(wal) = Wal::create("again").await else { return };
    wal.publish("a", 1);
    assert_eq!(wal.drain("file:out")["delivered"], 1);
    wal.publish("a", 2);
    wal.sql(&format!("SELECT pg_replication_slot_advance('{}', pg_current_wal_lsn())", wal.slot())).await;
    let again = [
        "run",
        "--read",
        "cdc",
        "--snapshot",
        "new-slot",
        "--to",
        "file:out",
        "--drain",
        "--lease",
        "1",
        "--json",
    ];
    let error = wal.run(&again).error(1);
    assert!(error.contains("recreated or moved manually"), "{error}");
    let removed = wal.run(&["cdc", "remove", &wal.slot(), "--keep-slot", "--yes"]).ok();
    assert!(removed.contains(&format!("pg_drop_replication_slot('{}')", wal.slot())), "{removed}");
    wal.publish("a", 3);
    assert_eq!(wal.run(&again).json()["delivered"], 1, "the others had the second");
    assert_eq!(wal.lines("out"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_of_a_reader_is_retried_by_its_own_number() {
    let Some(wal) = Wal::create("dead_cdc").await else { return };
    // So that the numbers of rows and of parked events differ.
    wal.sql("SELECT setval(pg_get_serial_sequence('airtight.outbox', 'seq'), 40)").await;
    wal.publish("a", 1);
    wal.publish("b", 2);
    let refusing = HttpServer::start().await;
    refusing.rule(|_| Reply::status(422));
    let summary = wal.drain(&refusing.url("/"));
    assert_eq!((&summary["dead"], &summary["delivered"]), (&2.into(), &0.into()), "{summary}");
    let dead = wal.run(&["dead", "list", "--json"]).json();
    assert_eq!((&dead[0]["seq"], &dead[1]["seq"]), (&41.into(), &42.into()), "{dead}");
    let status = wal.run(&["status", "--json"]).json();
    assert_eq!(status["slots"][0]["dead"], 2, "{status}");

    wal.run(&["dead", "retry", "41"]).ok();
    assert_eq!(wal.drain("file:out")["delivered"], 1);
    let text = std::fs::read_to_string(wal.dir.path().join("out")).unwrap();
    assert!(text.contains("\"seq\":41") || text.contains("\"aggregateId\":\"a\""), "{text}");
    wal.run(&["dead", "discard", "42"]).ok();
    assert_eq!(wal.run(&["dead", "list", "--json"]).json(), serde_json::json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn check_says_what_the_wal_needs() {
    let Some(wal) = Wal::create("check_cdc").await else { return };
    let config = "[pipelines.shop]\nread = \"cdc\"\nto = \"null:\"\n";
    std::fs::write(wal.dir.path().join("airtight.toml"), config).unwrap();
    let shown = wal.run(&["check", "-c", "airtight.toml"]).ok();
    for expected in
        ["pipelines.shop: the WAL can be followed", "CREATE PUBLICATION", "max_slot_wal_keep_size"]
    {
        assert!(shown.contains(expected), "{expected:?} is not in {shown}");
    }
    wal.sql(&format!("CREATE PUBLICATION {}_shop WITH (publish = 'insert')", wal.slot())).await;
    let shown = wal.run(&["check", "-c", "airtight.toml"]);
    assert_eq!(shown.code, Some(1));
    assert!(shown.stdout.contains("ADD TABLE \"airtight\".\"outbox\""), "{shown:?}");
}
