//! A log in PostgreSQL and its consumers, through the binary.

use std::{
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use airtight_testkit::{
    http::{HttpServer, Reply},
    postgres::TestDb,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use crate::support::{DEADLINE, Ran, Running, Shop, airtight, finish};

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
    let error = log.run(&["consumers", "list"]).error(1);
    assert!(error.contains("airtight migrate"), "{error}");

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

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_sent_back_and_delivers_again() {
    let Some(log) = Log::create("cli_log_seek").await else { return };
    log.publish(&["a", "b", "c", "d"]);
    log.drain("billing", "file:out.ndjson");

    let before = log.consumer("billing");
    let dry = log.run(&["consumers", "seek", "billing", "--to-seq", "1", "--dry-run", "--json"]).json();
    assert_eq!((&dry["dry_run"], &dry["again"], &dry["to"]), (&json!(true), &json!(3), &json!(1)));
    let dry = log.run(&["consumers", "seek", "billing", "--earliest", "--dry-run"]).ok();
    assert_eq!(
        dry,
        "consumer `billing` from seq 4 to 0: 4 events delivered again, 0 skipped, 0 parked events dropped\nnothing was changed\n"
    );
    assert_eq!(log.consumer("billing"), before);
    assert_eq!(log.drain("billing", "file:out.ndjson")["delivered"], 0);

    let done = log.run(&["consumers", "seek", "billing", "--to-seq", "2", "--json"]).json();
    assert_eq!((&done["again"], &done["skipped"]), (&json!(2), &json!(0)));
    log.drain("billing", "file:out.ndjson");
    assert_eq!(log.seqs("out.ndjson"), [1, 2, 3, 4, 3, 4]);

    // By time: everything is younger than an hour, nothing comes after the next.
    let hours = |by: i64| {
        let at = time::OffsetDateTime::now_utc() + time::Duration::hours(by);
        at.format(&time::format_description::well_known::Rfc3339).unwrap()
    };
    let done = log
        .run(&["consumers", "seek", "billing", "--to-time", &hours(-1), "--forget-inbox", "--json"])
        .json();
    assert_eq!((&done["to"], &done["again"], &done["forgotten"]), (&json!(0), &json!(4), &json!(0)));
    let error = log.run(&["consumers", "seek", "billing", "--to-time", &hours(1)]).error(1);
    assert!(error.contains("no event was published at") && error.contains("--latest"), "{error}");

    let done = log.run(&["consumers", "seek", "billing", "--latest", "--yes"]).ok();
    assert!(done.contains("0 events delivered again, 4 skipped"), "{done}");
    assert_eq!(log.drain("billing", "null:")["delivered"], 0);
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_running_relay_follows_a_seek() {
    let Some(log) = Log::create("cli_log_seek_live").await else { return };
    let args =
        ["run", "--read", "log", "--consumer", "live", "--to", "stdout:", "--poll", "20", "--lease", "2"];
    let relay = Running::start(log.command(&args));
    let seq = |line: &str| serde_json::from_str::<Value>(line).unwrap()["seq"].clone();
    log.publish(&["a", "b"]);
    assert_eq!((seq(&relay.next_line()), seq(&relay.next_line())), (1.into(), 2.into()));
    eventually("its offset is stored", || log.consumer("live")["offset"] == 2);
    let shown = log.consumer("live");
    assert_eq!(shown["offsets"][0]["owner"], shown["instances"][0]["id"], "{shown}");
    let error = log.run(&["consumers", "remove", "live"]).error(1);
    assert!(error.contains("works for consumer `live`: stop it first"), "{error}");

    log.run(&["consumers", "seek", "live", "--to-seq", "1"]).ok();
    assert_eq!(seq(&relay.next_line()), 2);
    relay.signal("TERM");
    let (status, rest) = relay.wait();
    assert!(status.success(), "{rest}");
    assert_eq!(log.run(&["consumers", "remove", "live"]).ok(), "consumer `live` removed\n");
    assert_eq!(log.run(&["consumers", "list", "--json"]).json(), json!([]));
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_consumer_stands_still() {
    let Some(log) = Log::create("cli_log_pause").await else { return };
    log.drain("billing", "null:");
    assert_eq!(log.run(&["consumers", "pause", "billing"]).ok(), "consumer `billing` is paused\n");
    assert_eq!(log.run(&["consumers", "list", "--json"]).json()[0]["paused"], true);
    assert!(log.run(&["consumers", "list"]).ok().contains("paused"));
    let drain = ["run", "--read", "log", "--consumer", "billing", "--to", "null:", "--drain"];
    let error = log.run(&drain).error(1);
    assert!(error.contains("airtight consumers resume billing"), "{error}");

    let relay = Running::start(log.command(&[
        "run",
        "--read",
        "log",
        "--consumer",
        "billing",
        "--to",
        "stdout:",
        "--lease",
        "2",
    ]));
    eventually("it is there", || log.consumer("billing")["instances"][0].is_object());
    log.publish(&["a"]);
    assert_eq!(log.consumer("billing")["offset"], 0);
    let resumed = log.run(&["consumers", "resume", "billing", "--json"]).json();
    assert_eq!(resumed, json!({"consumer": "billing", "paused": false}));
    assert!(relay.next_line().contains("\"seq\":1"));
}

/// A receiver that refuses everything until told otherwise.
async fn moody() -> (HttpServer, Arc<AtomicBool>) {
    let server = HttpServer::start().await;
    let accepts = Arc::new(AtomicBool::new(false));
    let mood = accepts.clone();
    server.rule(move |_| Reply::status(if mood.load(Ordering::Relaxed) { 204 } else { 422 }));
    (server, accepts)
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_each_consumer_wait_for_a_person() {
    let Some(log) = Log::create("cli_log_dead").await else { return };
    let (server, accepts) = moody().await;
    let to = server.url("/");
    log.publish(&["a", "b"]);
    assert_eq!(log.drain("billing", &to)["dead"], 2);
    assert_eq!(log.drain("mail", &to)["dead"], 2);

    let dead = log.run(&["dead", "list", "--json"]).json();
    assert_eq!(keys(&dead, "consumer"), ["billing", "mail", "billing", "mail"]);
    assert_eq!((&dead[0]["error_code"], &dead[0]["state"]), (&json!("http_422"), &json!("dead")), "{dead}");
    let dead = log.run(&["dead", "list", "--consumer", "mail", "--key", "b", "--json"]).json();
    assert_eq!(keys(&dead, "seq"), [2]);
    let parked =
        log.run(&["consumers", "parked", "mail", "--dead", "--error-code", "http_422", "--json"]).json();
    assert_eq!(keys(&parked, "seq"), [1, 2]);
    assert!(log.run(&["consumers", "parked", "mail"]).ok().contains("http_422"));
    let status = log.run(&["status"]).ok();
    assert!(status.contains("4 dead letters to decide on"), "{status}");

    let error = log.run(&["dead", "show", "1"]).error(1);
    assert_eq!(error, "error: event `1` is parked for billing, mail: say which with --consumer NAME");
    let shown = log.run(&["dead", "show", "1", "--consumer", "mail", "--json"]).json();
    assert_eq!((&shown["consumer"], &shown["event"]["aggregateId"]), (&json!("mail"), &json!("a")));
    // The id serves as well as the seq.
    let id = shown["id"].as_str().unwrap();
    let shown = log.run(&["dead", "show", id, "--consumer", "billing"]).ok();
    assert!(shown.starts_with("consumer    billing\n") && shown.contains("http_422"), "{shown}");
    let error = log.run(&["dead", "show", "77"]).error(1);
    assert_eq!(error, "error: no event `77` is parked; give an id or a seq");

    assert_eq!(log.run(&["dead", "retry", id, "--consumer", "billing"]).ok(), format!("{id}: due now\n"));
    let error = log.run(&["dead", "retry", "77", "--consumer", "billing"]).error(1);
    assert_eq!(error, "error: 77: there is no such event");
    accepts.store(true, Ordering::Relaxed);
    assert_eq!(log.drain("billing", &to)["delivered"], 1);
    assert_eq!(log.drain("mail", &to)["delivered"], 0, "nobody has retried for it");
    let shown = log.consumer("billing");
    assert_eq!((&shown["dead"], &shown["retrying"]), (&json!(1), &json!(0)), "{shown}");

    assert_eq!(log.run(&["dead", "discard", "2", "--consumer", "billing"]).ok(), "2: discarded\n");
    assert_eq!(
        log.run(&["dead", "retry", "--all", "--consumer", "mail", "--key", "a"]).ok(),
        "1 dead letter due now\n"
    );
    assert_eq!(log.drain("mail", &to)["delivered"], 1);
    assert_eq!(log.run(&["dead", "discard", "--all", "--yes", "--json"]).json()["discarded"], 1);
    assert_eq!(log.run(&["dead", "list"]).ok(), "no dead letters\n");
    assert_eq!(
        keys(&log.run(&["events", "list", "--json"]).json(), "seq"),
        [1, 2],
        "the log keeps its events"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn halting_stops_at_the_event_that_fails() {
    let Some(log) = Log::create("cli_log_halt").await else { return };
    let (server, accepts) = moody().await;
    let to = server.url("/");
    // Of one key: the second is not even tried.
    log.publish(&["a", "a"]);
    let args =
        ["run", "--read", "log", "--consumer", "strict", "--on-failure", "halt", "--to", &to, "--drain"];
    let error = log.run(&args).error(1);
    assert!(
        error.contains("consumer `strict` halts at seq 1") && error.contains("422 Unprocessable"),
        "{error}"
    );
    assert!(error.contains("airtight consumers seek strict --to-seq 1"), "{error}");
    assert_eq!(server.requests().len(), 1);
    let shown = log.consumer("strict");
    assert_eq!((&shown["offset"], &shown["dead"]), (&json!(0), &json!(0)), "nothing is parked: {shown}");
    accepts.store(true, Ordering::Relaxed);
    assert!(log.run(&args).ok().starts_with("delivered 2 events"));
}

#[tokio::test(flavor = "multi_thread")]
async fn retention_waits_for_consumers_unless_told_otherwise() {
    let Some(log) = Log::create("cli_log_prune").await else { return };
    log.publish(&["a", "b", "c"]);
    log.drain("fast", "null:");
    log.drain("slow", "null:");
    log.run(&["consumers", "seek", "slow", "--to-seq", "1"]).ok();

    let pruned = log.run(&["prune", "--keep", "0s", "--json"]).json();
    assert_eq!(
        (&pruned["events"], &pruned["floor"], &pruned["held_by"]),
        (&json!(1), &json!(1), &json!("slow"))
    );
    let human = log.run(&["prune", "--keep", "0s"]).ok();
    assert!(
        human.starts_with(
            "removed 0 events of the log, 0 partitions dropped whole; all up to seq 1 are gone\n"
        ),
        "{human}"
    );
    assert!(
        human.contains("consumer `slow` has not seen them")
            && human.contains("airtight consumers remove slow"),
        "{human}"
    );
    let error = log.run(&["consumers", "seek", "slow", "--to-seq", "0"]).error(1);
    assert!(error.contains("removed by retention") && error.contains("--earliest"), "{error}");
    let error = log.run(&["consumers", "seek", "slow", "--to-time", "2001-01-01T00:00:00Z"]).error(1);
    assert!(error.contains("removed by retention") && error.contains("--earliest"), "{error}");
    assert_eq!(log.consumer("slow")["offset"], 1, "nothing moved");

    let ran = log.run(&["prune", "--keep", "0s", "--ignore-consumers"]);
    assert!(ran.stderr.contains("behind retention now: slow"), "{ran:?}");
    assert!(ran.ok().starts_with("removed 2 events of the log, whether consumers have seen them or not"));
    assert_eq!(log.consumer("slow")["behind_retention"], true);
    assert!(log.run(&["consumers", "list"]).ok().contains("behind retention"));
    assert!(log.run(&["consumers", "show", "slow"]).ok().contains("airtight consumers seek slow --earliest"));
    assert_eq!(log.run(&["check"]).code, Some(1));
    let error = log.run(&["run", "--read", "log", "--consumer", "slow", "--to", "null:", "--drain"]).error(1);
    assert!(error.contains("stands at seq 1") && error.contains("Rebuilding a consumer"), "{error}");

    log.run(&["consumers", "seek", "slow", "--earliest"]).ok();
    log.publish(&["d"]);
    assert_eq!(log.drain("slow", "null:")["delivered"], 1);
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
    assert!(error.contains("`billing` and `mail` are both consumer `billing`"), "{error}");

    log.write("queue.toml", "[pipelines.billing]\nread = \"queue\"\nto = \"null:\"\n");
    let error = log.run(&["run", "-c", "queue.toml", "--drain"]).error(1);
    assert!(error.contains("the outbox is a log; follow it with `--read log --consumer NAME`"), "{error}");
    let ran = log.run(&["check", "-c", "queue.toml"]);
    assert!(
        ran.code == Some(1) && ran.stdout.contains("the outbox is a log; write `read = \"log\"`"),
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

    // By time, whatever the consumers: its own default.
    let ran = with_config(&["prune", "--json"]);
    assert!(ran.stderr.contains("behind retention now: index-v1"), "{ran:?}");
    let pruned = ran.json();
    assert_eq!((&pruned["events"], &pruned["floor"]), (&json!(1), &json!(1)), "{pruned}");
    let error = with_config(&["run", "--drain"]).error(1);
    assert!(error.contains("Rebuilding a consumer"), "{error}");
    let error = with_config(&["migrate", "--shape", "log"]).error(2);
    assert!(error.contains("--shape is for airtight's own table"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_moves_nothing() {
    let Some(log) = Log::create("cli_log_bad").await else { return };
    log.publish(&["a", "b"]);
    log.drain("billing", "null:");
    let before = log.consumer("billing");
    for (args, code, expected) in [
        (&["seek", "billing", "--to-seq", "-1"] as &[&str], 1, "seq -1 is negative; 0 is the beginning"),
        (&["seek", "billing", "--to-seq", "3"], 1, "seq 3 is in the future: the last event has seq 2"),
        (&["seek", "billing", "--to-seq", "two"], 2, "invalid value 'two'"),
        (&["seek", "billing", "--to-time", "yesterday"], 2, "like 2026-01-31T18:30:00Z"),
        (&["seek", "billing", "--to-time", "2026-01-31"], 2, "write a date, a time and a zone"),
        (&["seek", "billing"], 2, "required arguments were not provided"),
        (&["seek", "billing", "--earliest", "--latest"], 2, "cannot be used with"),
        (&["seek", "biling", "--earliest"], 1, "there is no consumer `biling`; there are: billing"),
        (&["show", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["lag", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["pause", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["resume", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["remove", "biling"], 1, "there is no consumer `biling`; there are: billing"),
        (&["parked", "biling"], 1, "there is no consumer `biling`; there are: billing"),
    ] {
        let error = log.run(&[&["consumers"], args].concat()).error(code);
        assert!(error.contains(expected) || code == 2, "{args:?}: {error}");
    }
    for (args, code, expected) in [
        (&["dead", "list", "--consumer", "biling"] as &[&str], 1, "there is no consumer `biling`"),
        (&["dead", "retry", "--all", "--consumer", "biling"], 1, "there is no consumer `biling`"),
        (&["dead", "retry", "1", "--consumer", "biling"], 1, "there is no consumer `biling`"),
        (&["dead", "list", "--newest"], 2, "page with --after SEQ"),
        (&["prune", "--older-than", "1d"], 2, "say --keep"),
        (&["prune", "--keep", "long"], 2, "--keep: `long` is not a duration"),
        (
            &["run", "--to", "null:", "--drain"],
            1,
            "the outbox is a log; follow it with `--read log --consumer NAME`",
        ),
        (&["run", "--read", "log", "--to", "null:"], 2, "--read log needs --consumer NAME"),
        (&["run", "--read", "cdc", "--to", "null:"], 2, "`cdc` is not in this version"),
        (&["run", "--read", "queue", "--consumer", "x", "--to", "null:"], 2, "--consumer is for a log"),
        (&["run", "--start", "latest", "--to", "null:"], 2, "--start is for a log"),
        (
            &["run", "--read", "log", "--consumer", "x", "--keep-done", "1d", "--to", "null:"],
            2,
            "say --keep-log",
        ),
        (&["run", "--read", "log", "--consumer", "x", "--keep-log", "1", "--to", "null:"], 2, "or `forever`"),
    ] {
        let error = log.run(args).error(code);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    assert_eq!(log.consumer("billing"), before);
    assert_eq!(keys(&log.run(&["consumers", "list", "--json"]).json(), "name"), ["billing"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_has_no_consumers() {
    let Some(log) = Log::empty("cli_log_queue").await else { return };
    log.run(&["migrate"]).ok();
    for (args, code, expected) in [
        (
            &["consumers", "list"] as &[&str],
            1,
            "airtight.outbox is a queue; a log is made by `airtight migrate --shape log`",
        ),
        (&["consumers", "seek", "x", "--earliest"], 1, "airtight.outbox is a queue"),
        (
            &["run", "--read", "log", "--consumer", "x", "--to", "null:", "--drain"],
            1,
            "airtight.outbox is a queue",
        ),
        (&["dead", "list", "--consumer", "x"], 2, "--consumer is for a log, and this outbox is a queue"),
        (&["dead", "retry", "1", "--consumer", "x"], 2, "--consumer is for a log"),
        (&["dead", "discard", "--all", "--yes", "--consumer", "x"], 2, "--consumer is for a log"),
        (&["dead", "show", "1", "--consumer", "x"], 2, "--consumer is for a log"),
        (&["prune", "--keep", "1d"], 2, "say --older-than"),
        (&["prune", "--ignore-consumers"], 2, "say --older-than"),
        (&["migrate", "--shape", "log"], 1, "airtight.outbox is a queue already"),
    ] {
        let error = log.run(args).error(code);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    log.write("airtight.toml", "[pipelines.a]\nread = \"log\"\nto = \"null:\"\n");
    let ran = log.run(&["check", "-c", "airtight.toml"]);
    assert!(ran.code == Some(1) && ran.stdout.contains("pipelines.a: the outbox is a queue"), "{ran:?}");
}

// MERGE(sqlite): goes away; what is above then holds for SQLite, too.
#[test]
fn sqlite_says_that_it_has_no_log_yet() {
    let shop = Shop::new();
    for args in [
        &["migrate", "--shape", "log", "--url", "sqlite:log.db"] as &[&str],
        &["migrate", "--shape", "log", "--print"],
        &["consumers", "list"],
        &["run", "--read", "log", "--consumer", "x", "--to", "null:", "--drain"],
    ] {
        let error = shop.run(args).error(1);
        assert!(error.ends_with("\"log\" for SQLite is not in this build yet"), "{args:?}: {error}");
    }
}
