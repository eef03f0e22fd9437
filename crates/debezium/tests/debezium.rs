//! Our encoder against what the real Debezium wrote, message by message.
//!
//! The files in `golden/records` are recorded by `airtight-kafka`'s test of the same name. Where we deviate, the table
//! below says so, with the reason, and `docs/debezium.md` has it from here.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

use std::{path::PathBuf, sync::Arc};

use airtight_core::{Event, Payload, SourceColumn, SourceRow};
use airtight_debezium::{
    Converter, Converters, DebeziumEncoder, DebeziumOptions, Record, connector::ConnectorConfig,
};
use airtight_testkit::deliveries::sample_event;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use proptest::prelude::*;
use serde_json::Value;

/// Rows whose messages are not Debezium's, and why.
const DEVIATIONS: &[(&str, &[usize], &str)] = &[
    (
        "arrays_of_arrays",
        &[0],
        "Debezium writes nulls in the place of inner arrays; we refuse the event rather than lose them",
    ),
    (
        "defaults",
        &[1],
        "a NULL in a column with a DEFAULT is that default to Debezium; we write what the row has",
    ),
    (
        "defaults_as_json_schemas",
        &[0, 1],
        "Debezium puts a column's DEFAULT into its schema, and in the place of a NULL; a row does not know it",
    ),
    (
        "enums_as_json_schemas",
        &[0],
        "Debezium's schema of an enum lists its values, which a row does not know: refused, with the reason",
    ),
    (
        "envelope_as_string",
        &[0, 1, 2],
        "Java writes the digits of a `numeric` without a scale as an address in memory (`[B@1b2c3d`), and we `[B@0`",
    ),
    ("header_types_as_string", &[0, 1, 2], "the same: `[B@0` for a `numeric` without a scale"),
    ("other_types", &[0], "Debezium loses the value of a column of type `name`; we write it"),
    ("other_types_as_json_schemas", &[0], "the same: the value of a column of type `name`"),
    ("time_of_timestamptz", &[0], "Debezium's task ends over a `timestamptz` here; we take its time"),
];

struct Golden(Value);

impl Golden {
    fn all() -> Vec<Self> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/records");
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
            .iter()
            .map(|path| Self(serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()))
            .collect()
    }

    fn text(&self, key: &str) -> &str {
        self.0[key].as_str().unwrap()
    }

    fn name(&self) -> &str {
        self.text("case")
    }

    fn options(&self) -> DebeziumOptions {
        let mut options = DebeziumOptions::default();
        for (name, value) in self.0["options"].as_object().unwrap() {
            options.set(name, value.as_str().unwrap()).unwrap();
        }
        options
    }

    fn encoder(&self) -> DebeziumEncoder {
        let converter = |key: &str| Converter::parse(key, self.text(key)).unwrap();
        let converters =
            Converters { key: converter("key"), value: converter("value"), header: converter("header") };
        DebeziumEncoder::new(self.options(), converters).unwrap()
    }

    fn rows(&self) -> &[Value] {
        self.0["rows"].as_array().unwrap()
    }

    /// An event of which only the row counts.
    fn event(&self, row: &Value) -> Event {
        let columns: Arc<[SourceColumn]> = self.0["columns"]
            .as_array()
            .unwrap()
            .iter()
            .map(|column| SourceColumn {
                name: column["name"].as_str().unwrap().into(),
                type_oid: column["type_oid"].as_u64().unwrap().try_into().unwrap(),
                type_modifier: column["type_modifier"].as_i64().unwrap().try_into().unwrap(),
                nullable: column["nullable"].as_bool().unwrap(),
            })
            .collect();
        let values = row["values"].as_array().unwrap();
        let values =
            values.iter().map(|value| value.as_str().map(|text| Bytes::from(text.to_owned()))).collect();
        Event { row: Some(Arc::new(SourceRow { columns, values })), ..sample_event(1, "not this one") }
    }
}

/// As the recorder writes it.
fn shown(bytes: Option<&Bytes>) -> Value {
    match bytes.map(|bytes| std::str::from_utf8(bytes)) {
        None => Value::Null,
        Some(Ok(text)) => text.into(),
        Some(Err(_)) => serde_json::json!({ "base64": STANDARD.encode(bytes.unwrap()) }),
    }
}

/// The record as the recorder writes it, with the random part masked.
fn written(record: &Record) -> Value {
    let headers: Vec<Value> = record
        .headers
        .iter()
        .map(|(name, value)| {
            let mut value = shown(value.as_ref());
            if &**name == "__debezium.context.runId" {
                let text = value.as_str().unwrap();
                let id = text.rsplit('"').find(|part| part.len() == 36 && part.contains('-')).unwrap_or(text);
                value = text.replace(id, "(the run's id)").into();
            }
            serde_json::json!([&**name, value])
        })
        .collect();
    serde_json::json!({
        "topic": record.topic,
        "key": shown(record.key.as_ref()),
        "value": shown(record.value.as_ref()),
        "headers": headers,
        "timestamp": record.timestamp,
        "partition": record.partition,
    })
}

#[test]
fn every_message_is_debeziums_or_a_deviation_with_a_reason() {
    let mut differ = Vec::new();
    let mut same = 0;
    for golden in Golden::all() {
        let encoder = golden.encoder();
        for (at, row) in golden.rows().iter().enumerate() {
            let deviates =
                DEVIATIONS.iter().any(|(case, rows, _)| *case == golden.name() && rows.contains(&at));
            let ours = encoder.encode(&golden.event(row));
            let is_same = match (&ours, row["message"].is_null()) {
                (Ok(record), false) => written(record) == row["message"],
                (Err(error), true) => error.class() == airtight_core::Class::Permanent,
                _ => false,
            };
            match (is_same, deviates) {
                (true, false) => same += 1,
                (false, true) => {}
                (true, true) => differ.push(format!("{} {at} is the same by now", golden.name())),
                (false, false) => differ.push(format!(
                    "{} {at}\n  debezium {} {}\n  ours     {}",
                    golden.name(),
                    row["message"],
                    row["failure"],
                    ours.map_or_else(|error| error.to_string(), |record| written(&record).to_string()),
                )),
            }
        }
    }
    assert!(differ.is_empty(), "{} differ, {same} are the same\n{}", differ.len(), differ.join("\n"));
    assert!(same > 200, "only {same} messages were compared");
}

/// What the test below writes between these lines of `docs/debezium.md`.
const BEGIN: &str =
    "<!-- cases: written by `AIRTIGHT_BLESS=1 cargo test -p airtight-debezium --test debezium` -->";
const END: &str = "<!-- end of cases -->";

/// Text in a cell of a table.
fn cell(text: &str, most: usize) -> String {
    let mut shown: String = String::new();
    for c in text.chars() {
        match c.is_control() {
            true => shown.extend(c.escape_debug()),
            false => shown.push(c),
        }
    }
    if shown.chars().count() > most {
        shown = shown.chars().take(most).collect::<String>() + "…";
    }
    // A backtick would end the code, and a bar the cell.
    format!("`{}`", shown.replace('`', "'").replace('|', "\\|"))
}

/// What the first message of a case looks like.
fn sample(golden: &Golden) -> String {
    let row = &golden.rows()[0];
    let message = &row["message"];
    if message.is_null() {
        return format!("fails: {}", cell(row["failure"].as_str().unwrap(), 90));
    }
    let header = message["headers"].as_array().unwrap().last().unwrap();
    let is_about_headers = header[0] != "id" || golden.name().contains("header");
    match (is_about_headers, &message["value"]) {
        (true, _) => {
            cell(&format!("{}: {}", header[0].as_str().unwrap(), header[1].as_str().unwrap_or("(null)")), 90)
        }
        (false, Value::Null) => "a tombstone".into(),
        (false, Value::String(text)) => cell(text, 90),
        (false, bytes) => format!("the bytes {}", cell(bytes["base64"].as_str().unwrap(), 90)),
    }
}

#[test]
fn the_documentation_lists_every_case() {
    let mut table = String::from(
        "| case | what | converters: key, value, header | rows | the first, by Debezium | ours |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for golden in Golden::all() {
        let deviations: Vec<_> = DEVIATIONS.iter().filter(|(case, ..)| *case == golden.name()).collect();
        let ours = match deviations.as_slice() {
            [] if golden.rows().iter().all(|row| row["message"].is_null()) => "refused, too".to_owned(),
            [] => "the same".to_owned(),
            [(_, rows, why)] if rows.len() < golden.rows().len() => {
                format!("{} of {} the same; {why}", golden.rows().len() - rows.len(), golden.rows().len())
            }
            [(_, _, why)] => (*why).to_owned(),
            _ => panic!("{} is there twice", golden.name()),
        };
        table.push_str(&format!(
            "| `{}` | {} | {}, {}, {} | {} | {} | {ours} |\n",
            golden.name(),
            golden.text("about"),
            golden.text("key"),
            golden.text("value"),
            golden.text("header"),
            golden.rows().len(),
            sample(&golden),
        ));
    }
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/debezium.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let wanted = format!("{before}{BEGIN}\n\n{table}\n{END}{after}");
    if std::env::var_os("AIRTIGHT_BLESS").is_some() {
        std::fs::write(&path, wanted).unwrap();
    } else {
        assert!(text == wanted, "docs/debezium.md is not up to date: {BEGIN}");
    }
    for name in DebeziumOptions::NAMES {
        assert!(text.contains(&format!("`{name}`")), "docs/debezium.md does not mention {name}");
    }
}

#[test]
fn a_payload_is_neither_read_nor_copied_on_the_usual_way() {
    let golden = Golden::all().into_iter().find(|golden| golden.name() == "default_jsonb").unwrap();
    let event = golden.event(&golden.rows()[0]);
    let encoder = DebeziumEncoder::new(DebeziumOptions::default(), Converters::default()).unwrap();
    let record = encoder.encode(&event).unwrap();
    let (_, payload) = event.row.as_ref().unwrap().get("payload").unwrap();
    assert_eq!(record.value.unwrap().as_ptr(), payload.unwrap().as_ptr());
}

/// A queue or a log hands out events without their rows.
#[test]
fn an_event_without_a_row_has_its_own_fields_for_columns() {
    let mut event = sample_event(7, "acc-1");
    event.payload = Payload::Json("{\"a\":1}".into());
    event.extra.insert("shard".into(), 3.into());
    event.extra.insert("region".into(), "eu".into());
    event.headers.insert("tenant".into(), "t1".into());
    let mut options = DebeziumOptions::default();
    for (name, value) in [
        (
            "table.fields.additional.placement",
            "type:header:eventType,region:header,tenant:header,shard:partition",
        ),
        ("table.field.event.timestamp", "created_at"),
    ] {
        options.set(name, value).unwrap();
    }
    let text = |text: &str| Some(Bytes::from(text.to_owned()));
    let record =
        DebeziumEncoder::new(options.clone(), Converters::default()).unwrap().encode(&event).unwrap();
    assert_eq!(
        (record.topic.as_str(), record.key, record.value),
        ("outbox.event.Test", text("acc-1"), text("{\"a\":1}"))
    );
    let headers = [("id", event.id.as_str()), ("eventType", "Tested"), ("region", "eu"), ("tenant", "t1")];
    assert_eq!(record.headers, headers.map(|(name, value)| (name.into(), text(value))));
    assert_eq!(record.partition, Some(3));
    assert_eq!(
        record.timestamp,
        Some((event.occurred_at.unix_timestamp_nanos() / 1_000_000).try_into().unwrap())
    );

    let json = Converters { value: Converter::Json { schemas: true }, ..Converters::default() };
    let record = DebeziumEncoder::new(DebeziumOptions::default(), json).unwrap().encode(&event).unwrap();
    let expected = r#"{"schema":{"type":"string","optional":true,"name":"io.debezium.data.Json","version":1},"payload":"{\"a\":1}"}"#;
    assert_eq!(record.value, text(expected));

    // As the format has always written it.
    event.payload = Payload::Bytes(vec![0, 159].into());
    let record = DebeziumEncoder::new(DebeziumOptions::default(), Converters::default())
        .unwrap()
        .encode(&event)
        .unwrap();
    assert_eq!(record.value, Some(Bytes::from_static(&[0, 159])));
    event.payload = Payload::None;
    let record = DebeziumEncoder::new(options, Converters::default()).unwrap().encode(&event).unwrap();
    assert_eq!(record.value, None);
}

#[test]
fn what_a_message_would_lack_is_asked_for_before_any_event_comes() {
    let mut options = DebeziumOptions::default();
    options.set("table.fields.additional.placement", "type:envelope").unwrap();
    let schemas = Converters { value: Converter::Json { schemas: true }, ..Converters::default() };
    for (name, value) in [("topic.prefix", "shop"), ("table.include.list", "public.outbox")] {
        let error = DebeziumEncoder::new(options.clone(), schemas).unwrap_err();
        assert!(error.message().contains(name), "{error}");
        options.set(name, value).unwrap();
    }
    DebeziumEncoder::new(options, schemas).unwrap();
    let mut options = DebeziumOptions::default();
    options.set("extended.headers.enabled", "true").unwrap();
    let error = DebeziumEncoder::new(options.clone(), Converters::default()).unwrap_err();
    assert!(error.message().contains("topic.prefix"), "{error}");
    options.set("route.topic.regex", "(?=x)").unwrap();
    options.set("topic.prefix", "shop").unwrap();
    assert_eq!(DebeziumEncoder::new(options, Converters::default()).unwrap_err().code(), "bad_regex");
}

/// The one that `infra/` runs.
#[test]
fn the_connector_of_the_local_stack_can_be_taken_over() {
    let file = |name: &str| {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../infra/debezium").join(name);
        std::fs::read_to_string(path).unwrap()
    };
    let lookup = |name: &str| match name {
        "env:IVM_PG_PORT" => Some("5432".into()),
        name => name.strip_prefix("env:IVM_").map(str::to_lowercase),
    };
    let mut config = ConnectorConfig::parse(&file("ivm-outbox-connector.json"), &lookup).unwrap();
    config.set_worker(&file("connect.properties"), &lookup).unwrap();
    assert_eq!(
        (config.slot.as_str(), config.table.as_str(), config.host.as_str()),
        ("ivm_outbox", "outbox", "pg_host")
    );
    assert_eq!(
        (config.key_converter, config.value_converter),
        (Some(Converter::String), Some(Converter::String))
    );
    assert_eq!(config.router.route_replacement, "ivm.events.${routedByValue}");
    DebeziumEncoder::new(config.router, Converters::default()).unwrap();
}

/// Every type that has a way of its own, arrays and a database's own types included.
const OIDS: [u32; 36] = [
    16, 17, 18, 19, 20, 21, 23, 25, 26, 114, 142, 600, 700, 701, 790, 869, 1000, 1001, 1007, 1009, 1042,
    1043, 1082, 1083, 1114, 1184, 1185, 1186, 1231, 1266, 1560, 1562, 1700, 2950, 3802, 16_384,
];

/// Text that is nearly what a database writes.
fn nearly() -> impl Strategy<Value = String> {
    prop_oneof![
        "[-+]?[0-9]{1,25}([.][0-9]{0,8})?",
        "[0-9]{1,12}-[0-9]{1,3}-[0-9]{1,3}( [0-9]{1,19}:[0-9]{2}:[0-9]{2}([.][0-9]{0,7})?([-+][0-9:]{1,9})?)?( BC)?",
        "-?[0-9]{1,19} (years|mons|days) [-+]?[0-9]{1,19}:[0-9]{2}:[0-9]{2}",
        "[{](\"?[a-z0-9\\\\, ]*\"?,?){0,4}[}]?",
        "\\\\x[0-9a-g]{0,7}",
        "[{\\[](\"[a-zé😀\\\\]{0,3}\":?|[0-9.e-]{1,4}|[\\[\\]{}, ]|true|null){0,12}",
        "\\PC{0,20}",
    ]
}

proptest! {
    /// Whatever a column holds, the answer is a record or a permanent error.
    #[test]
    fn nothing_that_a_column_holds_makes_it_panic(
        text in nearly(),
        payload in nearly(),
        oid in prop::sample::select(OIDS.to_vec()),
        modifier in prop_oneof![Just(-1), 0..7, Just(655_366), any::<i32>()],
        word in prop::sample::select(vec!["string", "json", "json-schemas", "bytes", "binary", "binary+json"]),
        place in prop::sample::select(vec!["header", "envelope", "partition"]),
    ) {
        let converter = Converter::parse("value_converter", word).unwrap();
        let column = |name: &str, type_oid, type_modifier| {
            SourceColumn { name: name.into(), type_oid, type_modifier, nullable: true }
        };
        let columns = [
            column("id", 25, -1), column("aggregatetype", 25, -1), column("aggregateid", 25, -1),
            column("payload", 25, -1), column("x", oid, modifier),
        ];
        let values = ["1", "t", "k", &payload, &text].map(|text| Some(Bytes::from(text.to_owned()))).into();
        let row = Arc::new(SourceRow { columns: columns.into(), values });
        let mut options = DebeziumOptions::default();
        for (name, value) in [
            ("table.fields.additional.placement", format!("x:{place}")),
            ("table.expand.json.payload", "true".into()),
            ("table.field.event.timestamp", "x".into()),
            ("topic.prefix", "p".into()),
            ("table.include.list", "public.outbox".into()),
        ] {
            options.set(name, &value).unwrap();
        }
        let event = Event { row: Some(row), ..sample_event(1, "k") };
        for timed in [true, false] {
            if !timed {
                options.event_timestamp = None;
            }
            for converters in [
                Converters { value: converter, ..Converters::default() },
                Converters { header: converter, ..Converters::default() },
            ] {
                let record = DebeziumEncoder::new(options.clone(), converters).unwrap().encode(&event);
                if let Err(error) = record {
                    prop_assert_eq!(error.class(), airtight_core::Class::Permanent);
                }
            }
        }
    }
}
