//! Files that cannot be honoured: the exit code, and one line that says what to do.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::Stdio,
};

use airtight_testkit::postgres::TestDb;
use serde_json::{Map, Value, json};

use super::support::{STRING, airtight, connector, sql, write};

/// Nobody listens there.
const NOWHERE: &str = "kafka://127.0.0.1:1";
const SECRET: &str = "hunter2";

/// A file that would do, were there such a database.
fn good() -> Map<String, Value> {
    let Value::Object(file) = json!({
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "plugin.name": "pgoutput",
        "database.hostname": "127.0.0.1",
        "database.port": "1",
        "database.user": "app",
        "database.password": SECRET,
        "database.dbname": "shop",
        "topic.prefix": "shop",
        "table.include.list": "public.outbox",
        "producer.override.sasl.jaas.config": format!("x required password=\"{SECRET}\";"),
        "key.converter": STRING,
        "value.converter": STRING,
        "transforms": "outbox",
        "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
    }) else {
        unreachable!("an object was written above");
    };
    file
}

/// Runs it to its end; the exit code and what it said. One that begins to work has no complaint, and is ended.
fn run(args: &[&str]) -> (Option<i32>, String) {
    let mut child = airtight(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        said += &format!("{line}\n");
        if line.contains("trying again") || line.contains("INFO relaying") {
            child.kill().unwrap();
            break;
        }
    }
    assert!(!said.contains("panicked") && !said.contains(SECRET), "{said}");
    (child.wait().unwrap().code(), said)
}

#[track_caller]
fn assert_refused(args: &[&str], code: i32, text: &str) {
    let (found, said) = run(args);
    // clap's own complaints have more lines.
    let line = said.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(
        found == Some(code) && line.contains(text),
        "{args:?}: {found:?}, not {code} with {text:?}: {said}"
    );
}

fn run_with(file: &Path) -> [&str; 5] {
    ["run", "--debezium", file.to_str().unwrap(), "--to", NOWHERE]
}

#[test]
fn a_file_that_cannot_be_honoured_is_refused_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    for (key, value, text) in [
        ("made.up", "x", "`made.up` is not known"),
        ("plugin.name", "decoderbufs", "`plugin.name` is `decoderbufs`"),
        ("plugin.name", "", "`plugin.name` is `decoderbufs`"),
        ("key.converter", "", "`key.converter` is missing: give the worker's properties with --worker FILE"),
        ("value.converter", "", "`value.converter` is missing"),
        (
            "value.converter",
            "io.confluent.connect.avro.AvroConverter",
            "`value.converter` names the converter",
        ),
        ("connector.class", "io.debezium.connector.mysql.MySqlConnector", "`connector.class` must be"),
        ("transforms.outbox.route.by", "x", "did you mean `route.by.field`?"),
        ("transforms.outbox.route.topic.regex", "(?=x)", "look-around"),
        ("transforms.outbox.table.fields.additional.placement", "type", "must be a list like"),
        ("decimal.handling.mode", "string", "`decimal.handling.mode` changes what is delivered"),
        ("table.include.list", "public.a,public.b", "one table"),
        ("database.hostname", "", "`database.hostname` is missing"),
        ("database.user", "${env:NOBODY_HAS_SET_THIS}", "needs `${env:NOBODY_HAS_SET_THIS}`"),
        ("snapshot.mode", "initial_only", "`snapshot.mode` cannot be honoured: `initial_only`"),
        ("snapshot.mode", "always", "`snapshot.mode` cannot be honoured: `always`"),
        ("snapshot.mode", "inital", "`snapshot.mode`"),
        ("topic.creation.default.partitions", "many", "topic.creation.default.partitions"),
        (
            "producer.override.partitioner.class",
            "org.example.Mine",
            "`producer.override.partitioner.class` changes",
        ),
        ("slot.name", "Upper-Case", "a slot's name must consist of"),
    ] {
        let mut file = good();
        file.insert(key.into(), value.into());
        let path = write(&dir, "connector.json", &Value::Object(file).to_string());
        assert_refused(&run_with(&path), 2, text);
    }
    for (text, expected) in [("{", "not JSON"), ("", "are missing"), ("[]", "are missing")] {
        let path = write(&dir, "connector.json", text);
        assert_refused(&run_with(&path), 2, expected);
    }
}

#[test]
fn where_kafka_is_must_be_said_and_be_kafka() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(&dir, "connector.json", &Value::Object(good()).to_string());
    let file = path.to_str().unwrap();
    assert_refused(
        &["run", "--debezium", file],
        2,
        "does not give Kafka's address: pass --to kafka://HOST:PORT",
    );
    assert_refused(&["run", "--debezium", file, "--to", "stdout:"], 2, "--debezium delivers to Kafka");
    assert_refused(
        &["run", "--debezium", file, "--to", "nats://127.0.0.1"],
        2,
        "--debezium delivers to Kafka",
    );
    assert_refused(&["run", "--debezium", file, "--to", "ftp://x"], 2, "--to: ");
    assert_refused(
        &["run", "--debezium", "/nowhere/connector.json", "--to", NOWHERE],
        2,
        "cannot read /nowhere",
    );
    let worker = ["run", "--debezium", file, "--to", NOWHERE, "--worker", "/nowhere/worker.properties"];
    assert_refused(&worker, 2, "cannot read /nowhere");
    assert_refused(&["run", "--worker", file, "--to", "stdout:"], 2, "required arguments");
    // Flags that the file has its own words for.
    for (flag, value) in [
        ("--from", "postgres://x/y"),
        ("--read", "queue"),
        ("--slot", "other"),
        ("--publication", "other"),
        ("--snapshot", "never"),
        ("--stream", "orders"),
        ("--order", "none"),
        ("--consumer", "c"),
        ("--keep-done", "1d"),
    ] {
        let args = ["run", "--debezium", file, "--to", NOWHERE, flag, value];
        assert_refused(&args, 2, "cannot be used with");
    }
    // Everything is as it should be, except that nobody is there: it waits for the server.
    let (code, said) =
        run(&[&run_with(&path)[..], &["--lease", "5", "--batch", "10", "--on-dead", "block"]].concat());
    assert!(code.is_none() && said.contains("cannot reach postgres://app:XXX@127.0.0.1:1/shop"), "{said}");
    let mut six = good();
    six.insert("database.hostname".into(), "::1".into());
    let six = write(&dir, "six.json", &Value::Object(six).to_string());
    let (code, said) = run(&run_with(&six));
    assert!(code.is_none() && said.contains("cannot reach postgres://app:XXX@[::1]:1/shop"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_does_not_fit_the_file_is_refused_at_the_start() {
    let Some(db) = TestDb::create("a_table_that_does_not_fit_the_file").await else { return };
    let pool = db.pool(1).await;
    sql(
        &pool,
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text, type text, payload jsonb, \
         big int8, at timestamp)",
    )
    .await;
    let dir = tempfile::tempdir().unwrap();
    let placement = "transforms.outbox.table.fields.additional.placement";
    let check = |table: &str, options: &[(&str, &str)], text: &str| {
        let mut all = vec![("topic.prefix", "x"), ("key.converter", STRING), ("value.converter", STRING)];
        all.extend(options);
        let file = Value::Object(connector(&db, db.name(), table, &all)).to_string();
        assert_refused(&run_with(&write(&dir, "connector.json", &file)), 1, text);
    };
    check("public.nothing", &[], "there is no table public.nothing (`table.include.list`)");
    for (option, column) in [
        ("table.field.event.id", "uid"),
        ("table.field.event.key", "entity"),
        ("table.field.event.payload", "body"),
        ("table.field.event.timestamp", "created"),
        ("table.field.event.schema.version", "version"),
        ("route.by.field", "topic"),
    ] {
        let text = format!("public.outbox has no column `{column}`, which `{option}` names");
        check("public.outbox", &[(&format!("transforms.outbox.{option}"), column)], &text);
    }
    // Debezium's task would end over the first row, and here every one of them would be dead.
    let option = "table.fields.additional.placement";
    let text = format!("public.outbox has no column `nope`, which `{option}` names");
    check("public.outbox", &[(placement, "type:header,nope:header")], &text);
    let lenient = ("transforms.outbox.table.fields.additional.error.on.missing", "false");
    check("public.outbox", &[(placement, "nope:envelope"), lenient], &text);
    check(
        "public.outbox",
        &[(placement, "big:partition")],
        "`big` has type int8, but a partition must be an int4",
    );
    check(
        "public.outbox",
        &[("transforms.outbox.table.field.event.timestamp", "big")],
        "`big` has type int8, but `table.field.event.timestamp` must be a timestamp",
    );
}

#[test]
fn a_pipeline_that_debezium_could_not_replace_has_no_connector() {
    let dir = tempfile::tempdir().unwrap();
    let cdc = "read = \"cdc\"\n";
    let debezium = "to = \"kafka://k:9092?format=debezium\"\n";
    for (pipelines, text) in [
        (
            format!("[pipelines.a]\n{debezium}"),
            "does not read the WAL, as Debezium does: set `read = \"cdc\"`",
        ),
        (format!("[pipelines.a]\n{cdc}to = \"stdout:\"\n"), "does not deliver to Kafka"),
        (format!("[pipelines.a]\n{cdc}to = \"kafka://k:9092\"\n"), "does not write `format = \"debezium\"`"),
        (format!("[pipelines.a]\n{cdc}to = \"kafka://k:9092/mine?format=debezium\"\n"), "sets `topic`"),
    ] {
        let text_of = format!("[database]\nurl = \"postgres://app:{SECRET}@db/shop\"\n{pipelines}");
        let path = write(&dir, "airtight.toml", &text_of);
        assert_refused(&["debezium-config", "-c", path.to_str().unwrap()], 1, text);
    }
    assert_refused(&["debezium-config"], 2, "no config given; pass -c FILE");
    let two = format!(
        "[database]\nurl = \"postgres://app:{SECRET}@db/shop\"\n[pipelines.a]\n{cdc}{debezium}[pipelines.b]\n{cdc}slot = \"b\"\n{debezium}"
    );
    let path = write(&dir, "airtight.toml", &two);
    let path = path.to_str().unwrap();
    assert_refused(&["debezium-config", "-c", path], 2, "name one pipeline; the config has: a, b");
    assert_refused(&["debezium-config", "-c", path, "c"], 2, "name one pipeline");
    for (flag, is_shown) in [(None, false), (Some("--password"), true)] {
        let mut command = airtight(&["debezium-config", "-c", path, "b"]);
        let output = command.args(flag).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(printed["config"].get("database.password").is_some(), is_shown);
        assert_eq!(printed["config"]["slot.name"], "b");
        assert_eq!(printed["config"]["database.hostname"], "db");
        // The canonical table's columns, by the names that Debezium must know them by.
        assert_eq!(printed["config"]["table.include.list"], "airtight.outbox");
        assert_eq!(printed["config"]["transforms.outbox.table.field.event.key"], "aggregate_id");
        assert_eq!(printed["config"]["transforms.outbox.route.by.field"], "aggregate_type");
    }
}
