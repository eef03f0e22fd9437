//! A log in PostgreSQL and its consumers, through the binary: making one, following it, alone and in groups.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `operate` | replay, pause, dead letters, halt, retention |
//! | `bad` | what makes no sense, and moves nothing |
//! | `remedies` | what errors tell one to do, done, with nothing lost |

mod bad;
mod operate;
mod remedies;

use std::{process::Command, time::Instant};

use airtight_testkit::postgres::TestDb;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use crate::support::{DEADLINE, Ran, Running, airtight, finish};

/// A log in a database of its own, and a directory to write to.
struct Log {
    db: TestDb,
    dir: tempfile::TempDir,
}

impl Log {
    async fn create(test: &str) -> Option<Self> {
        let log = Self::empty(test).await?;
        log.run(&["migrate", "--shape", "log"]).ok();
        Some(log)
    }

    /// The same without any table.
    async fn empty(test: &str) -> Option<Self> {
        let db = TestDb::create(test).await?;
        Some(Self { db, dir: tempfile::tempdir().expect("a directory") })
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = airtight(args);
        command.current_dir(self.dir.path()).env("DATABASE_URL", self.db.url());
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, "")
    }

    fn run_with(&self, args: &[&str], input: &str) -> Ran {
        let command = self.command(args);
        // Servers of the same test go on meanwhile.
        tokio::task::block_in_place(|| finish(command, input))
    }

    /// Publishes events with these keys, numbered in their payloads.
    fn publish(&self, keys: &[&str]) {
        let lines: String = keys
            .iter()
            .enumerate()
            .map(|(n, key)| {
                format!("{{\"stream\":\"s\",\"type\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"{key}\",\"payload\":{n}}}\n")
            })
            .collect();
        self.run_with(&["publish"], &lines).ok();
    }

    /// Lets a consumer catch up, and gives what that did.
    fn drain(&self, consumer: &str, to: &str) -> Value {
        self.run(&["run", "--read", "log", "--consumer", consumer, "--to", to, "--drain", "--json"]).json()
    }

    fn consumer(&self, name: &str) -> Value {
        self.run(&["consumers", "show", name, "--json"]).json()
    }

    /// The seqs in a file of events.
    fn seqs(&self, name: &str) -> Vec<i64> {
        let text = std::fs::read_to_string(self.dir.path().join(name)).expect("read");
        let seq = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["seq"].as_i64();
        text.lines().map(|line| seq(line).expect("a seq")).collect()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join(name), text).expect("written");
    }

    async fn execute(&self, sql: &str) {
        let mut connection = PgConnection::connect_with(&self.db.connect_options()).await.expect("connected");
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.expect("executed");
    }
}

/// Looks again until it is so.
#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < deadline, "in vain: {what}");
    }
}

fn keys(rows: &Value, field: &str) -> Vec<Value> {
    rows.as_array().expect("an array").iter().map(|row| row[field].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_is_made_once_and_stays_one() {
    let Some(log) = Log::empty("cli_log_made").await else { return };
    let sql = log.run(&["migrate", "--shape", "log", "--print"]).ok();
    assert!(sql.contains("PARTITION BY") && !sql.contains("last_attempt_at"), "{sql}");
    let follow = ["run", "--read", "log", "--consumer", "x", "--to", "null:", "--drain"];
    for args in [&["consumers", "list"] as &[&str], &follow] {
        let error = log.run(args).error(1);
        assert!(
            error.contains("there is no table airtight.outbox. Fix: run `airtight migrate --shape log`"),
            "{error}"
        );
    }

    let steps = log.run(&["migrate", "--shape", "log"]).ok();
    assert!(steps.contains("the log"), "{steps}");
    assert!(log.run(&["migrate"]).ok().ends_with(": up to date\n"), "it knows what it is");
    let error = log.run(&["migrate", "--shape", "queue"]).error(1);
    assert!(error.contains("airtight.outbox is a log already"), "{error}");

    log.write("airtight.toml", "[database]\nshape = \"log\"\ntable = \"other\"\n");
    assert!(log.run(&["migrate", "-c", "airtight.toml"]).ok().contains("the log"));
    let status = log.run(&["status", "--table", "other"]).ok();
    assert!(
        status.starts_with("outbox airtight.other, a log\n") && status.contains("no consumers"),
        "{status}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_consumers_see_every_event_once_each() {
    let Some(log) = Log::create("cli_log_two").await else { return };
    log.publish(&["a", "b", "c"]);
    assert_eq!(log.drain("billing", "file:billing.ndjson")["delivered"], 3);
    log.publish(&["a"]);
    assert_eq!(log.run(&["consumers", "lag", "billing"]).ok(), "1\n");
    assert_eq!(log.run(&["consumers", "lag", "billing", "--json"]).json()["lag"], 1);
    assert_eq!(log.drain("billing", "file:billing.ndjson")["delivered"], 1);
    assert_eq!(log.drain("mail", "file:mail.ndjson")["delivered"], 4);
    for file in ["billing.ndjson", "mail.ndjson"] {
        let mut seqs = log.seqs(file);
        // Order is per key.
        seqs.sort_unstable();
        assert_eq!(seqs, [1, 2, 3, 4], "{file}");
    }
    assert_eq!(log.drain("mail", "file:mail.ndjson")["delivered"], 0);

    // One that begins at the end sees only what comes; one of another stream sees nothing, and is not behind.
    let latest = [
        "run",
        "--read",
        "log",
        "--consumer",
        "late",
        "--start",
        "latest",
        "--to",
        "null:",
        "--drain",
        "--json",
    ];
    assert_eq!(log.run(&latest).json()["delivered"], 0);
    let other = [
        "run",
        "--read",
        "log",
        "--consumer",
        "other",
        "--stream",
        "x",
        "--to",
        "null:",
        "--drain",
        "--json",
    ];
    assert_eq!(log.run(&other).json()["delivered"], 0);
    let consumers = log.run(&["consumers", "list", "--json"]).json();
    assert_eq!(keys(&consumers, "name"), ["billing", "late", "mail", "other"]);
    assert_eq!(keys(&consumers, "lag_events"), [0, 0, 0, 0]);

    log.publish(&["c"]);
    let human = log.run(&["consumers", "list"]).ok();
    assert!(human.starts_with("consumer") && human.contains("late"), "{human}");
    let status = log.run(&["status", "--json"]).json();
    assert_eq!(keys(&status["consumers"], "lag_events"), [1, 1, 1, 0], "{status}");
    assert!(status["consumers"][0]["lag_seconds"].as_f64().is_some_and(|seconds| seconds >= 0.0), "{status}");
    let show = log.run(&["consumers", "show", "billing"]).ok();
    assert!(show.contains("lag         1 event, ") && show.contains("partition  offset  owner"), "{show}");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_commands_work_on_a_log_without_being_told() {
    let Some(log) = Log::create("cli_log_told").await else { return };
    log.publish(&["a", "b"]);
    let rows = log.run(&["events", "list", "--json"]).json();
    assert_eq!(keys(&rows, "aggregate_id"), ["a", "b"]);
    assert_eq!(log.run(&["events", "show", "2", "--json"]).json()["event"]["aggregateId"], "b");
    assert_eq!(log.run(&["check", "--json"]).json()["ok"], true);
    assert_eq!(log.run(&["dead", "list"]).ok(), "no dead letters\n");
    assert_eq!(log.run(&["prune", "--json"]).json()["events"], 0);

    let tail = Running::start(log.command(&["tail", "--from-start", "--json", "--poll", "20"]));
    let key = |line: &str| serde_json::from_str::<Value>(line).unwrap()["aggregateId"].clone();
    assert_eq!((key(&tail.next_line()), key(&tail.next_line())), ("a".into(), "b".into()));
    log.publish(&["c"]);
    assert_eq!(key(&tail.next_line()), "c");
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn instances_share_the_partitions_of_a_consumer() {
    let Some(log) = Log::create("cli_log_group").await else { return };
    let start = |name: &str| {
        let to = format!("file:{name}.ndjson");
        let args = [
            "run",
            "--read",
            "log",
            "--consumer",
            "group",
            "--partitions",
            "4",
            "--lease",
            "2",
            "--poll",
            "20",
            "--to",
            &to,
        ];
        Running::start(log.command(&args))
    };
    let (one, two) = (start("one"), start("two"));
    eventually("both have their share", || {
        let consumers = log.run(&["consumers", "list", "--json"]).json();
        consumers[0].is_object() && keys(&consumers[0]["instances"], "partitions") == [2, 2]
    });
    let names: Vec<String> = (0..40).map(|n| n.to_string()).collect();
    log.publish(&names.iter().map(String::as_str).collect::<Vec<_>>());
    eventually("all are delivered", || log.consumer("group")["lag_events"] == 0);
    for relay in [one, two] {
        relay.signal("TERM");
        let (status, rest) = relay.wait();
        assert!(status.success(), "{rest}");
    }
    let seqs = [log.seqs("one.ndjson"), log.seqs("two.ndjson")];
    assert!(seqs.iter().all(|seqs| !seqs.is_empty()), "{seqs:?}");
    let mut all = seqs.concat();
    all.sort_unstable();
    assert_eq!(all, (1..=40).collect::<Vec<i64>>());
    let error =
        log.run(&["run", "--read", "log", "--consumer", "g", "--partitions", "65", "--to", "null:"]).error(2);
    assert!(error.contains("65"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelines_of_one_log_are_consumers_of_their_own() {
    let Some(log) = Log::create("cli_log_config").await else { return };
    log.publish(&["a", "b"]);
    let config = "[database]\nshape = \"log\"\n[pipelines.billing]\nto = \"file:a.ndjson\"\n\
                  [pipelines.mail]\nread = \"log\"\nconsumer = \"mailer\"\nto = \"file:b.ndjson\"\n";
    log.write("airtight.toml", config);
    let checked = log.run(&["check", "-c", "airtight.toml", "--json"]).json();
    assert_eq!(checked["ok"], true, "{checked}");
    let summary = log.run(&["run", "-c", "airtight.toml", "--drain", "--json"]).json();
    assert_eq!(summary["delivered"], 4, "{summary}");
    assert_eq!((log.seqs("a.ndjson"), log.seqs("b.ndjson")), (vec![1, 2], vec![1, 2]));
    assert_eq!(keys(&log.run(&["consumers", "list", "--json"]).json(), "name"), ["billing", "mailer"]);

    log.write("twice.toml", &config.replace("mailer", "billing"));
    let error = log.run(&["run", "-c", "twice.toml", "--drain"]).error(2);
    assert!(error.contains("`billing` and `mail` both use consumer `billing`"), "{error}");

    log.write("queue.toml", "[pipelines.billing]\nread = \"queue\"\nto = \"null:\"\n");
    let error = log.run(&["run", "-c", "queue.toml", "--drain"]).error(1);
    assert!(error.contains("the outbox is a log; follow it with `--read log --consumer NAME`"), "{error}");
    let ran = log.run(&["check", "-c", "queue.toml"]);
    assert!(
        ran.code == Some(1) && ran.stdout.contains("the outbox is a log. Fix: write `read = \"log\"`"),
        "{ran:?}"
    );
}

const RELAY_LOG: &str = "CREATE SCHEMA cn_relay;
    CREATE TABLE cn_relay.events (event_id text PRIMARY KEY, content text NOT NULL);
    CREATE TABLE cn_relay.events_outbox (seq bigserial PRIMARY KEY, op text NOT NULL, event_id text NOT NULL,
      topic_id text NOT NULL, kind int NOT NULL, created_at int NOT NULL, ingested_at timestamptz NOT NULL,
      effective_key text, reason text);
    CREATE TABLE cn_relay.consumer_offsets (consumer text PRIMARY KEY, last_seq bigint NOT NULL, updated_at timestamptz NOT NULL);
    INSERT INTO cn_relay.events VALUES ('e1', 'one'), ('e2', 'two');
    INSERT INTO cn_relay.events_outbox (op, event_id, topic_id, kind, created_at, ingested_at, effective_key, reason) VALUES
      ('upsert', 'e1', 'kukuri:a', 1, 1700000000, now() - interval '40 days', NULL, NULL),
      ('upsert', 'e2', 'kukuri:a', 30023, 1700000001, now(), 'key', NULL),
      ('delete', 'e1', 'kukuri:a', 1, 1700000002, now(), NULL, 'nip09');";

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_log_of_the_document_is_followed_by_its_preset() {
    let Some(log) = Log::empty("cli_log_preset").await else { return };
    log.execute(RELAY_LOG).await;
    log.write(
        "airtight.toml",
        "[table]\npreset = \"relay-log\"\n[pipelines.index-v1]\nto = \"file:out.ndjson\"\n",
    );
    let with_config = |args: &[&'static str]| log.run(&[args, &["-c", "airtight.toml"]].concat());
    with_config(&["migrate"]).ok();
    let checked = with_config(&["check", "--json"]).json();
    assert_eq!(checked["ok"], true, "{checked}");
    assert_eq!(with_config(&["run", "--drain", "--json"]).json()["delivered"], 3);
    let text = std::fs::read_to_string(log.dir.path().join("out.ndjson")).unwrap();
    let mut events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    events.sort_by_key(|event| event["seq"].as_i64());
    assert_eq!(keys(&json!(events), "aggregateId"), ["e1", "key", "e1"]);
    assert_eq!(keys(&json!(events), "type"), ["1", "30023", "1"]);
    assert_eq!((&events[2]["op"], &events[2]["reason"]), (&json!("delete"), &json!("nip09")));
    assert_eq!(events[1]["payload"]["content"], "two", "{}", events[1]);

    // The document's own way to look, and to replay.
    let mut connection = PgConnection::connect_with(&log.db.connect_options()).await.unwrap();
    let row = sqlx::query("SELECT consumer, last_seq FROM cn_relay.consumer_offsets")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!((row.get::<String, _>(0), row.get::<i64, _>(1)), ("index-v1".into(), 3));
    with_config(&["consumers", "seek", "index-v1", "--to-seq", "2"]).ok();
    assert_eq!(with_config(&["run", "--drain", "--json"]).json()["delivered"], 1);
    log.execute("UPDATE cn_relay.consumer_offsets SET last_seq = 0").await;
    assert_eq!(with_config(&["consumers", "lag", "index-v1"]).ok(), "3\n");

    // By time, whatever the consumers: its own default, which it says.
    let dry = with_config(&["prune", "--dry-run"]).ok();
    assert!(
        dry.starts_with("would remove 1 event of the log, whether consumers have seen them or not")
            && dry.contains("events are kept for 30d, by ingested_at (the preset relay-log)"),
        "{dry}"
    );
    #[cfg(unix)]
    {
        let relay = Running::start(log.command(&["run", "-c", "airtight.toml"]));
        let line = tokio::task::block_in_place(|| relay.wait_for_log("are removed after 30d"));
        assert!(line.contains("by ingested_at (the preset relay-log)"), "{line}");
    }
    let ran = with_config(&["prune", "--json"]);
    assert!(ran.stderr.contains("now behind retention: index-v1"), "{ran:?}");
    let pruned = ran.json();
    assert_eq!((&pruned["events"], &pruned["floor"]), (&json!(1), &json!(1)), "{pruned}");
    let error = with_config(&["run", "--drain"]).error(1);
    assert!(error.contains("Rebuilding a consumer"), "{error}");
    let error = with_config(&["migrate", "--shape", "log"]).error(2);
    assert!(error.contains("--shape applies to airtight's own table"), "{error}");
}
