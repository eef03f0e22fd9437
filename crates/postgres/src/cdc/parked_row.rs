//! A row of the WAL as JSON, and back. Parked events keep it for formats that need the row.

use std::sync::Arc;

use airtight_core::{SourceColumn, SourceRow};
use bytes::Bytes;
use serde_json::{Value, json};

/// `{"columns": [[name, type, modifier, nullable], …], "values": [text or null, …]}`
pub(super) fn to_json(row: &SourceRow) -> Value {
    let columns: Vec<Value> = row
        .columns
        .iter()
        .map(|column| json!([column.name, column.type_oid, column.type_modifier, column.nullable]))
        .collect();
    let values: Vec<Option<String>> = row
        .values
        .iter()
        .map(|value| value.as_ref().map(|text| String::from_utf8_lossy(text).into_owned()))
        .collect();
    json!({ "columns": columns, "values": values })
}

/// None for what was not written by [`to_json`].
pub(super) fn from_json(text: &str) -> Option<SourceRow> {
    type Column = (String, u32, i32, bool);
    #[derive(serde::Deserialize)]
    struct Row {
        columns: Vec<Column>,
        values: Vec<Option<String>>,
    }
    let row: Row = serde_json::from_str(text).ok()?;
    let column = |(name, type_oid, type_modifier, nullable): Column| SourceColumn {
        name,
        type_oid,
        type_modifier,
        nullable,
    };
    let columns: Arc<[SourceColumn]> = row.columns.into_iter().map(column).collect();
    let values = row.values.into_iter().map(|value| value.map(Bytes::from)).collect();
    Some(SourceRow { columns, values })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back_whole() {
        let column = |name: &str, nullable| SourceColumn {
            name: name.into(),
            type_oid: 3802,
            type_modifier: -1,
            nullable,
        };
        let row = SourceRow {
            columns: vec![column("id", false), column("payload", true)].into(),
            values: vec![Some(Bytes::from_static("\"ü\"".as_bytes())), None],
        };
        assert_eq!(from_json(&to_json(&row).to_string()), Some(row));
        assert_eq!(from_json("{}"), None);
    }
}
