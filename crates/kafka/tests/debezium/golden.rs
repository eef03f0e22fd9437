//! The files in `crates/debezium/tests/golden/records`: what was asked of Debezium, and what it wrote.

use std::{path::PathBuf, sync::Arc};

use airtight_core::{Event, SourceColumn, SourceRow};
use airtight_testkit::deliveries::sample_event;
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One case, as [`super::cases::Case`] has it, with what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Golden {
    pub(crate) case: String,
    pub(crate) about: String,
    pub(crate) table: String,
    /// The router's, and those of the connector that show in messages.
    pub(crate) options: Map<String, Value>,
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) header: String,
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Row>,
}

/// As `pg_attribute` has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) type_oid: u32,
    pub(crate) type_modifier: i32,
    pub(crate) nullable: bool,
}

/// A row, and the message for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// As the server writes them.
    pub(crate) values: Vec<Option<String>>,
    /// None where Debezium's task has failed.
    pub(crate) message: Option<Written>,
    /// What it said then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) topic: String,
    /// Text, or an object with `base64`.
    pub(crate) key: Value,
    pub(crate) value: Value,
    pub(crate) headers: Vec<(String, Value)>,
    /// None is the time of processing.
    pub(crate) timestamp: Option<i64>,
    /// None where the key decides.
    pub(crate) partition: Option<i32>,
}

impl Written {
    /// No two of them have the same id.
    pub(crate) fn identity(&self) -> String {
        self.headers.iter().find(|(name, _)| name == "id").map(|(_, id)| id.to_string()).unwrap()
    }
}

/// Bytes in a file that people read.
pub(crate) fn shown(bytes: Option<&[u8]>) -> Value {
    match bytes.map(std::str::from_utf8) {
        None => Value::Null,
        Some(Ok(text)) => text.into(),
        Some(Err(_)) => serde_json::json!({ "base64": STANDARD.encode(bytes.unwrap_or_default()) }),
    }
}

impl Golden {
    /// All that are recorded.
    pub(crate) fn all() -> Vec<Self> {
        let files =
            std::fs::read_dir(folder()).unwrap().map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
        files.map(|text| serde_json::from_slice(&text).unwrap()).collect()
    }

    /// An event with one of its rows.
    pub(crate) fn event(&self, row: usize) -> Event {
        let column = |column: &Column| SourceColumn {
            name: column.name.clone(),
            type_oid: column.type_oid,
            type_modifier: column.type_modifier,
            nullable: column.nullable,
        };
        let values = self.rows[row].values.iter().map(|value| value.clone().map(Bytes::from)).collect();
        let row = SourceRow { columns: self.columns.iter().map(column).collect(), values };
        Event { row: Some(Arc::new(row)), ..sample_event(1, "not this one") }
    }

    /// Where it is kept.
    pub(crate) fn path(&self) -> PathBuf {
        folder().join(format!("{}.json", self.case))
    }

    /// The file's text.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string_pretty(self).unwrap() + "\n"
    }
}

/// Where they are kept.
pub(crate) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../debezium/tests/golden/records")
}
