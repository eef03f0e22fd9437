//! From a row to an event.
//!
//! A row that cannot be read as an event is a result, not an error: it is handed out as a [`BadRow`], and the claim
//! continues with the other rows.

use std::collections::HashMap;

use airtight_core::{
    Code, Error, Event, Op, Payload, Result,
    event::Headers,
    queue::{BadRow, RowKey},
    table::{PayloadKind, quote},
};
use serde_json::Value;
use sqlx::{AssertSqlSafe, Row, SqliteConnection, TypeInfo, ValueRef, sqlite::SqliteRow};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    error::db,
    sql::{Sql, time as as_time},
};

/// An event or why the row is none, and the row's own limit of attempts.
pub(crate) type Decoded = (std::result::Result<Event, BadRow>, Option<u32>);

/// Bytes of the body, told without reading it.
pub(crate) fn size(sql: &Sql, a: &str) -> String {
    let length = |name: &str| format!("COALESCE(octet_length({a}.{}), 0)", quote(name));
    match &sql.spec.payload_bytes {
        Some(bytes) => format!("{} + {}", length(&sql.spec.payload), length(bytes)),
        None => length(&sql.spec.payload),
    }
}

/// Reads the rows with these identities in full, but no body larger than `max_payload`.
pub(crate) async fn events(
    conn: &mut SqliteConnection,
    sql: &Sql,
    keys: &[Value],
    max_payload: usize,
) -> Result<HashMap<RowKey, Decoded>> {
    let statement = format!(
        "SELECT {} FROM {} AS o WHERE {} IN (SELECT value FROM json_each(?1))",
        columns(sql),
        sql.spec.qualified(),
        sql.identity("o")
    );
    let rows = sqlx::query(AssertSqlSafe(statement))
        .bind(Value::from(keys).to_string())
        .bind(i64::try_from(max_payload).unwrap_or(i64::MAX))
        .fetch_all(conn)
        .await
        .map_err(db)?;
    rows.iter().map(|row| Ok((row_key(row, 0)?, decode(row, sql, max_payload)))).collect()
}

/// What [`decode`] reads, of alias `o`; `?2` is the largest body that is read.
pub(crate) fn columns(sql: &Sql) -> String {
    let spec = &sql.spec;
    let optional =
        |name: Option<&String>| name.map_or("NULL".to_owned(), |name| format!("o.{}", quote(name)));
    let body = |name: Option<&String>| match name {
        Some(name) => format!("CASE WHEN {} <= ?2 THEN o.{} END", size(sql, "o"), quote(name)),
        None => "NULL".into(),
    };
    let occurred = optional(spec.occurred_at.as_ref().or(spec.created_at.as_ref()));
    let created = optional(spec.created_at.as_ref());
    let occurred = format!("COALESCE({occurred}, {created})");
    let mut columns = vec![
        sql.identity("o"),
        format!("CAST(o.{} AS TEXT)", quote(&spec.id)),
        sql.seq("o").unwrap_or_else(|| {
            format!("CASE typeof({}) WHEN 'integer' THEN {0} ELSE 0 END", sql.identity("o"))
        }),
        sql.field("o", &spec.stream),
        sql.field("o", &spec.event_type),
        sql.field("o", &spec.aggregate_type),
        sql.field("o", &spec.aggregate_id),
        optional(spec.op.as_ref()),
        body(Some(&spec.payload)),
        body(spec.payload_bytes.as_ref()),
        size(sql, "o"),
        optional(spec.headers.as_ref()),
        format!("CAST({occurred} AS TEXT)"),
        as_time(&occurred),
        optional(spec.schema_version.as_ref()),
        optional(spec.max_attempts.as_ref()),
    ];
    columns.extend(spec.extra.iter().map(|(_, name)| format!("o.{}", quote(name))));
    columns.join(", ")
}

/// Where the extra columns begin.
const EXTRA: usize = 16;

pub(crate) fn decode(row: &SqliteRow, sql: &Sql, max_payload: usize) -> Decoded {
    let limit = integer(row, 15).and_then(|limit| u32::try_from(limit).ok()).filter(|limit| *limit > 0);
    let event = decode_event(row, sql, max_payload).map_err(|error| BadRow {
        id: lossy(row, 1).unwrap_or_default(),
        key: lossy(row, 6),
        error,
    });
    (event, limit)
}

fn decode_event(row: &SqliteRow, sql: &Sql, max_payload: usize) -> Result<Event> {
    let size = integer(row, 10).and_then(|size| usize::try_from(size).ok()).unwrap_or(0);
    if size > max_payload {
        return Err(Error::permanent(
            Code::TOO_LARGE,
            format!("payload has {size} bytes, the limit is {max_payload}"),
        ));
    }
    let mut extra = serde_json::Map::new();
    for (at, (name, _)) in sql.spec.extra.iter().enumerate() {
        extra.insert(name.clone(), any(row, EXTRA + at));
    }
    let op = text(row, 7, "op")?;
    Ok(Event {
        id: required(row, 1, "id")?,
        seq: integer(row, 2).unwrap_or(0),
        stream: required(row, 3, "stream")?,
        event_type: required(row, 4, "event_type")?,
        aggregate_type: required(row, 5, "aggregate_type")?,
        aggregate_id: required(row, 6, "aggregate_id")?,
        op: op.as_deref().map_or(Ok(Op::Upsert), Op::parse)?,
        payload: payload(row, sql)?,
        headers: headers(row)?,
        occurred_at: occurred_at(row)?,
        schema_version: integer(row, 14).and_then(|version| i32::try_from(version).ok()).unwrap_or(1),
        extra,
        row: None,
    })
}

fn payload(row: &SqliteRow, sql: &Sql) -> Result<Payload> {
    if let Some(body) = bytes(row, 9) {
        return Ok(Payload::Bytes(body.into()));
    }
    let Some(body) = bytes(row, 8) else { return Ok(Payload::None) };
    match sql.spec.payload_kind {
        PayloadKind::Bytes | PayloadKind::Text => return Ok(Payload::Bytes(body.into())),
        // The canonical table's own constraint has seen to it.
        PayloadKind::Json if sql.canonical => {}
        PayloadKind::Json | PayloadKind::JsonText => {
            serde_json::from_slice::<serde::de::IgnoredAny>(&body).map_err(|error| {
                Error::permanent(Code::BAD_PAYLOAD, format!("payload is not JSON: {error}"))
            })?;
        }
    }
    Ok(Payload::Json(body.into()))
}

fn headers(row: &SqliteRow) -> Result<Headers> {
    match text(row, 11, "headers")? {
        None => Ok(Headers::new()),
        Some(text) if text.is_empty() => Ok(Headers::new()),
        Some(text) => serde_json::from_str(&text).map_err(|error| {
            Error::permanent(Code::BAD_HEADERS, format!("headers are not a JSON object of strings: {error}"))
        }),
    }
}

fn occurred_at(row: &SqliteRow) -> Result<OffsetDateTime> {
    // As written, it may have more digits than SQLite's functions keep.
    let Some(written) = text(row, 12, "occurred_at")? else { return Ok(OffsetDateTime::UNIX_EPOCH) };
    if let Ok(at) = OffsetDateTime::parse(&written, &Rfc3339) {
        return Ok(at);
    }
    lossy(row, 13)
        .and_then(|text| parse_time(&text))
        .ok_or_else(|| Error::permanent(Code::BAD_ROW, format!("occurred_at is not a time: `{written}`")))
}

/// Reads a time in the canonical form.
pub(crate) fn parse_time(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339).ok()
}

/// A row's identity.
pub(crate) fn row_key(row: &SqliteRow, at: usize) -> Result<RowKey> {
    let raw = row.try_get_raw(at).map_err(db)?;
    if raw.type_info().name() == "INTEGER" {
        return Ok(RowKey::Int(row.try_get_unchecked(at).map_err(db)?));
    }
    Ok(RowKey::Text(row.try_get_unchecked(at).map_err(db)?))
}

/// Any value as text, whatever bytes it holds.
pub(crate) fn lossy(row: &SqliteRow, at: usize) -> Option<String> {
    bytes(row, at).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn bytes(row: &SqliteRow, at: usize) -> Option<Vec<u8>> {
    row.try_get_unchecked(at).ok().flatten()
}

pub(crate) fn integer(row: &SqliteRow, at: usize) -> Option<i64> {
    row.try_get_unchecked(at).ok().flatten()
}

fn text(row: &SqliteRow, at: usize, name: &str) -> Result<Option<String>> {
    row.try_get_unchecked(at)
        .map_err(|error| Error::permanent(Code::BAD_ROW, format!("{name} cannot be read: {error}")))
}

fn required(row: &SqliteRow, at: usize, name: &str) -> Result<String> {
    text(row, at, name)?.ok_or_else(|| Error::permanent(Code::BAD_ROW, format!("{name} is NULL")))
}

/// A column that only the spec knows, as JSON.
fn any(row: &SqliteRow, at: usize) -> Value {
    let Ok(raw) = row.try_get_raw(at) else { return Value::Null };
    if raw.is_null() {
        return Value::Null;
    }
    match raw.type_info().name() {
        "INTEGER" => integer(row, at).map_or(Value::Null, Value::from),
        "REAL" => row.try_get_unchecked::<f64, _>(at).map_or(Value::Null, Value::from),
        _ => lossy(row, at).map_or(Value::Null, Value::from),
    }
}
