//! Our encoder against what the real Debezium wrote, message by message.
//!
//! The files in `golden/debezium` are recorded by `airtight-kafka`'s test of the same name. Where we deviate, the table
//! below says so, with the reason, and `docs/debezium.md` has it from here.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

use std::{path::PathBuf, sync::Arc};

use airtight_core::{
    Event, SourceColumn, SourceRow,
    format::debezium::{Converter, Converters, DebeziumEncoder, DebeziumOptions, Record},
    sinks::memory::sample_event,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde_json::Value;

/// Rows whose messages are not Debezium's, and why.
const DEVIATIONS: &[(&str, &[usize], &str)] = &[
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
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/debezium");
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| Self(serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap())).collect()
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
        let values = values.iter().map(|value| value.as_str().map(|text| Bytes::from(text.to_owned()))).collect();
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
            if name == "__debezium.context.runId" {
                let text = value.as_str().unwrap();
                let id = text.rsplit('"').find(|part| part.len() == 36 && part.contains('-')).unwrap_or(text);
                value = text.replace(id, "(the run's id)").into();
            }
            serde_json::json!([name, value])
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
