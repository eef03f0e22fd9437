//! Runs all cases through the real Debezium.
//!
//! Cases with the same converters share a connector, in which each table has a router of its own (by a predicate on the
//! topic that Debezium would write to). Slots are made before rows are inserted and connectors are started after, so
//! that everything is streamed, and nobody has to be waited for in between. What cannot be routed or converted is left
//! out and logged (`errors.tolerance`), in the order of the stream; the last row of each connector says when to look.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, SystemTime},
};

use airtight_debezium::Record;
use airtight_testkit::{
    brokers::{
        connect::{Connect, database},
        kafka::Kafka,
    },
    postgres::TestDb,
};
use rdkafka::{
    ClientConfig, Message, Offset, Timestamp, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::{BorrowedMessage, Headers},
};
use serde_json::{Map, Value};
use sqlx::{AssertSqlSafe, Column as _, PgPool, Row as _, postgres::PgRow};

use super::{
    cases::{Case, cases},
    golden::{Column, Golden, Row, Written, shown},
};

const PATIENCE: Duration = Duration::from_secs(120);
/// Topics have so many partitions.
const PARTITIONS: &str = "3";
/// In the place of what is new in every run.
pub(crate) const RUN_ID: &str = "(the run's id)";

/// Those that one connector serves.
struct Group {
    prefix: String,
    /// Numbers of cases.
    members: Vec<usize>,
}

/// What became of every case; none where there is no Debezium.
pub(crate) async fn record(test: &str) -> Option<Vec<Golden>> {
    let kafka = Kafka::start(test).await?;
    let db = TestDb::create(test).await?;
    let connect = Connect::start(test, &kafka.bootstrap()).await?;
    let pool = db.pool(2).await;
    let mut cases = cases();
    let groups = groups(&mut cases);
    for case in &cases {
        create(&pool, case).await;
    }
    for (at, group) in groups.iter().enumerate() {
        let tables: Vec<_> = group.members.iter().map(|case| cases[*case].name).collect();
        let name = slot(&db, at);
        run(&pool, &format!("CREATE PUBLICATION {name} FOR TABLE {}", tables.join(", "))).await;
        run(&pool, &format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")).await;
    }
    let mut goldens = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let group = groups.iter().find(|group| group.members.contains(&number)).unwrap();
        goldens.push(insert(&pool, number, case, &group.prefix).await);
    }
    for (at, group) in groups.iter().enumerate() {
        connect.add(&group.prefix, &config(&db, at, group, &cases)).await;
    }
    collect(&kafka, &connect, &cases, &groups, &mut goldens).await;
    goldens.retain(|golden| !golden.case.starts_with("last_"));
    Some(goldens)
}

/// Each with a case of its own at the end.
fn groups(cases: &mut Vec<Case>) -> Vec<Group> {
    let mut shared: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, case) in cases.iter().enumerate() {
        let letters = |word: &str| word.replace(|c: char| !c.is_ascii_alphanumeric(), "");
        let name = match case.extended {
            true => format!("{}{}{}", letters(case.key), letters(case.value), letters(case.header)),
            false => "short".to_owned(),
        };
        shared.entry(name).or_default().push(number);
    }
    let mut groups = Vec::new();
    for (prefix, mut members) in shared {
        let last = Case::last(String::leak(format!("last_{prefix}")), &cases[members[0]]);
        members.push(cases.len());
        cases.push(last);
        groups.push(Group { prefix, members });
    }
    groups
}

fn slot(db: &TestDb, group: usize) -> String {
    format!("{}_{group}", db.name())
}

/// Runs statements by the simple protocol, whose rows are text.
pub(crate) async fn run(pool: &PgPool, sql: &str) -> Vec<PgRow> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .fetch_all(pool)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"))
}

fn table_sql(case: &Case) -> String {
    format!("CREATE TABLE {} ({})", case.name, case.columns.replace("{table}", case.name))
}

async fn create(pool: &PgPool, case: &Case) {
    if case.columns.contains("_mood") {
        run(pool, &format!("CREATE TYPE {}_mood AS ENUM ('happy', 'so so')", case.name)).await;
    }
    run(pool, &table_sql(case)).await;
}

/// Inserts a case's rows, and keeps them as the server shows them.
async fn insert(pool: &PgPool, number: usize, case: &Case, prefix: &str) -> Golden {
    let columns = run(
        pool,
        &format!(
            "SELECT attname::text, atttypid::int8::text, atttypmod::text, (NOT attnotnull)::text FROM pg_attribute \
             WHERE attrelid = '{}'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            case.name
        ),
    )
    .await
    .iter()
    .map(|row| Column {
        name: row.get(0),
        // Those of a database's own types are new in every run.
        type_oid: row.get::<String, _>(1).parse::<u32>().unwrap().min(16_384),
        type_modifier: row.get::<String, _>(2).parse().unwrap(),
        nullable: row.get::<String, _>(3) == "true",
    })
    .collect();
    let mut rows = Vec::new();
    for (at, row) in case.rows.iter().enumerate() {
        let row = row.replace("{id}", &mark(number, at));
        let then = case.then.replace("{table}", case.name);
        let sql = format!(
            "SET TimeZone = 'UTC'; SET DateStyle = 'ISO'; SET bytea_output = 'hex'; BEGIN; \
             INSERT INTO {} {row} RETURNING *; {then}; COMMIT",
            case.name
        );
        let inserted = run(pool, &sql).await.pop().unwrap();
        // The simple protocol's rows are text.
        let values = (0..inserted.columns().len())
            .map(|at| {
                assert!(!inserted.column(at).name().is_empty());
                inserted.try_get_raw(at).ok().and_then(|value| value.as_str().ok().map(str::to_owned))
            })
            .collect();
        rows.push(Row { values, message: None, failure: None });
    }
    let mut options: Map<String, Value> =
        case.options.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
    options.insert("topic.prefix".into(), prefix.into());
    options.insert("table.include.list".into(), format!("public.{}", case.name).into());
    options.insert("extended.headers.enabled".into(), case.extended.to_string().into());
    Golden {
        case: case.name.into(),
        about: case.about.into(),
        table: table_sql(case),
        options,
        key: case.key.into(),
        value: case.value.into(),
        header: case.header.into(),
        columns,
        rows,
    }
}

/// Nine digits in the id of a row.
fn mark(case: usize, row: usize) -> String {
    format!("9{case:04}{row:04}")
}

fn config(db: &TestDb, at: usize, group: &Group, cases: &[Case]) -> Map<String, Value> {
    let mut config = database(&db.url());
    let mut set = |name: &str, value: &str| config.insert(name.to_owned(), value.into());
    let members: Vec<&Case> = group.members.iter().map(|case| &cases[*case]).collect();
    let names: Vec<&str> = members.iter().map(|case| case.name).collect();
    let tables: Vec<String> = names.iter().map(|name| format!("public.{name}")).collect();
    set("topic.prefix", &group.prefix);
    set("slot.name", &slot(db, at));
    set("publication.name", &slot(db, at));
    set("publication.autocreate.mode", "disabled");
    set("snapshot.mode", "no_data");
    set("table.include.list", &tables.join(","));
    set("tombstones.on.delete", "false");
    set("poll.interval.ms", "50");
    set("errors.tolerance", "all");
    set("errors.log.enable", "true");
    set("topic.creation.default.replication.factor", "1");
    set("topic.creation.default.partitions", PARTITIONS);
    set("extended.headers.enabled", if members[0].extended { "true" } else { "false" });
    converter(&mut set, "key.converter", members[0].key);
    converter(&mut set, "value.converter", members[0].value);
    converter(&mut set, "header.converter", members[0].header);
    set("transforms", &names.join(","));
    set("predicates", &names.join(","));
    for case in members {
        let name = case.name;
        set(
            &format!("predicates.{name}.type"),
            "org.apache.kafka.connect.transforms.predicates.TopicNameMatches",
        );
        set(&format!("predicates.{name}.pattern"), &format!("{}\\.public\\.{name}", group.prefix));
        set(&format!("transforms.{name}.type"), "io.debezium.transforms.outbox.EventRouter");
        set(&format!("transforms.{name}.predicate"), name);
        for (option, value) in &case.options {
            set(&format!("transforms.{name}.{option}"), value);
        }
    }
    config
}

/// The classes behind our words.
fn converter(set: &mut impl FnMut(&str, &str) -> Option<Value>, key: &str, word: &str) {
    const JSON: &str = "org.apache.kafka.connect.json.JsonConverter";
    match word {
        "simple" => set(key, "org.apache.kafka.connect.storage.SimpleHeaderConverter"),
        "string" => set(key, "org.apache.kafka.connect.storage.StringConverter"),
        "json" | "json-schemas" => {
            set(&format!("{key}.schemas.enable"), if word == "json" { "false" } else { "true" });
            set(key, JSON)
        }
        "bytes" => set(key, "org.apache.kafka.connect.converters.ByteArrayConverter"),
        "binary" => set(key, "io.debezium.converters.BinaryDataConverter"),
        "binary+json" => {
            set(&format!("{key}.delegate.converter.type"), JSON);
            set(&format!("{key}.delegate.converter.type.schemas.enable"), "false");
            set(key, "io.debezium.converters.BinaryDataConverter")
        }
        other => panic!("no converter {other}"),
    };
}

/// Reads all topics from their beginning, those that appear meanwhile included. Not by a subscription: each new topic
/// would be a rebalance, and a minute of them was seen.
pub(crate) struct Tap {
    consumer: BaseConsumer,
    known: HashSet<(String, i32)>,
}

impl Tap {
    pub(crate) fn new(kafka: &Kafka) -> Self {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", kafka.bootstrap())
            .set("group.id", "tap")
            .set("enable.auto.commit", "false");
        Self { consumer: config.create().unwrap(), known: HashSet::new() }
    }

    /// The next message, if there is one soon.
    pub(crate) fn next(&mut self) -> Option<Written> {
        const SOON: Duration = Duration::from_millis(200);
        if let Some(message) = self.consumer.poll(SOON) {
            return Some(written(&message.unwrap()));
        }
        let metadata = self.consumer.fetch_metadata(None, Duration::from_secs(10)).unwrap();
        let mut fresh = TopicPartitionList::new();
        for topic in metadata.topics().iter().filter(|topic| !topic.name().starts_with('_')) {
            for partition in topic.partitions().iter().filter(|partition| partition.leader() >= 0) {
                if self.known.insert((topic.name().to_owned(), partition.id())) {
                    fresh.add_partition_offset(topic.name(), partition.id(), Offset::Beginning).unwrap();
                }
            }
        }
        if fresh.count() > 0 {
            self.consumer.incremental_assign(&fresh).unwrap();
        }
        None
    }
}

/// Waits for a message or a failure for every row.
async fn collect(kafka: &Kafka, connect: &Connect, cases: &[Case], groups: &[Group], goldens: &mut [Golden]) {
    let mut tap = Tap::new(kafka);
    let mut places: HashMap<String, (usize, usize)> = HashMap::new();
    for (number, case) in cases.iter().enumerate() {
        for row in 0..case.rows.len() {
            places.insert(mark(number, row), (number, row));
        }
    }
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        // Not to block the runtime, on which nothing else runs.
        while let Some(written) = tap.next() {
            let Some((case, row)) = place(&written, &places) else { panic!("whose is {written:?}?") };
            let target = &mut goldens[case].rows[row];
            assert!(target.message.is_none(), "{}: two messages for row {row}", cases[case].name);
            let is_placed = cases[case].options.iter().any(|(_, value)| value.contains(":partition"));
            let has_time = cases[case].options.iter().any(|(name, _)| name.ends_with("event.timestamp"));
            let partition = written.partition.filter(|_| is_placed && target.values[5].is_some());
            target.message =
                Some(Written { partition, timestamp: written.timestamp.filter(|_| has_time), ..written });
        }
        // Other topics may come later than the last row's, and what is neither here nor in the log will come.
        let log = connect.log();
        let is_over = |group: &Group| {
            let last = group.members.last().is_some_and(|last| goldens[*last].rows[0].message.is_some());
            last && left_out(group, goldens).len() == failures(&log, &group.prefix).len()
        };
        let Some(open) = groups.iter().find(|group| !is_over(group)) else { break };
        let task = connect.task(&open.prefix).await;
        let runs = task.as_ref().is_none_or(|(state, _)| state != "FAILED");
        let in_time = tokio::time::Instant::now() < end;
        assert!(runs && in_time, "{} is not over: {task:?}; {}", open.prefix, connect.log_tail());
    }
    let log = connect.log();
    for group in groups {
        for ((case, row), failure) in left_out(group, goldens).into_iter().zip(failures(&log, &group.prefix))
        {
            goldens[case].rows[row].failure = Some(failure);
        }
    }
}

/// Rows without a message, in the order of the stream.
fn left_out(group: &Group, goldens: &[Golden]) -> Vec<(usize, usize)> {
    let rows = group.members.iter().flat_map(|case| (0..goldens[*case].rows.len()).map(|row| (*case, row)));
    rows.filter(|(case, row)| goldens[*case].rows[*row].message.is_none()).collect()
}

/// What a connector's task could not do, in order.
fn failures(log: &str, connector: &str) -> Vec<String> {
    let begin = format!("Error encountered in task {connector}-0.");
    log.split(&begin)
        .skip(1)
        .map(|text| {
            // Until the next line of the log, which begins with a time.
            let trace =
                text.lines().skip(1).take_while(|line| !line.starts_with(|c: char| c.is_ascii_digit()));
            cause(&trace.collect::<Vec<_>>().join("\n"))
        })
        .collect()
}

/// The last cause that a trace names, without its package.
fn cause(trace: &str) -> String {
    let line = trace.lines().filter_map(|line| line.strip_prefix("Caused by: ")).next_back();
    let line = line.or_else(|| trace.lines().next()).unwrap_or_default();
    let (class, message) = line.split_once(": ").unwrap_or((line, ""));
    format!("{}: {message}", class.rsplit('.').next().unwrap_or_default())
}

fn place(written: &Written, places: &HashMap<String, (usize, usize)>) -> Option<(usize, usize)> {
    let (_, id) = written.headers.iter().find(|(name, _)| name == "id")?;
    let id = id.as_str()?;
    // `…-8000-000900010002`, `900010002`, `e-900010002`, with or without JSON around it.
    id.match_indices('9').find_map(|(at, _)| places.get(id.get(at..at + 9)?)).copied()
}

/// A record of ours, in the same form.
pub(crate) fn recorded(record: &Record) -> Written {
    let headers =
        record.headers.iter().map(|(name, value)| (name.to_string(), header(name, value.as_deref())));
    Written {
        topic: record.topic.clone(),
        key: shown(record.key.as_deref()),
        value: unhashed(shown(record.value.as_deref())),
        headers: headers.collect(),
        timestamp: record.timestamp,
        partition: record.partition,
    }
}

/// A header's value.
fn header(name: &str, value: Option<&[u8]>) -> Value {
    match name {
        // Random, and new for each start of the task; with quotes around it where there are some.
        "__debezium.context.runId" => mask(value),
        _ => unhashed(shown(value)),
    }
}

/// A message that has arrived.
fn written(message: &BorrowedMessage<'_>) -> Written {
    let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
    let headers = headers.map(|of| (of.key.to_owned(), header(of.key, of.value)));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
    let timestamp = match message.timestamp() {
        Timestamp::CreateTime(at) => {
            Some(at).filter(|at| (i64::try_from(now).unwrap() - at).abs() > 86_400_000)
        }
        other => panic!("{other:?}"),
    };
    Written {
        topic: message.topic().to_owned(),
        key: shown(message.key()),
        value: unhashed(shown(message.payload())),
        headers: headers.collect(),
        timestamp,
        partition: Some(message.partition()),
    }
}

/// Java writes an array of bytes as `[B@` and where it is in memory.
fn unhashed(value: Value) -> Value {
    let Value::String(text) = &value else { return value };
    let mut parts = text.split("[B@");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str("[B@(hash)");
        out.push_str(part.trim_start_matches(|c: char| c.is_ascii_hexdigit()));
    }
    out.into()
}

/// The id of a run, which is a UUID, in what surrounds it.
fn mask(value: Option<&[u8]>) -> Value {
    let text = std::str::from_utf8(value.unwrap_or_default()).unwrap();
    let id = text.rsplit('"').find(|part| part.len() == 36 && part.contains('-')).unwrap_or(text);
    text.replace(id, RUN_ID).into()
}
