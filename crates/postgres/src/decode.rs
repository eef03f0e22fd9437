//! From a row to an event. A row that cannot become an event is reported as a bad row, not as an error, so that other rows continue.

use airtight_core::{
    Code, Error, Event, Op, Payload, Result,
    event::{Headers, check_json},
    queue::BadRow,
    table::{PayloadKind, TableSpec},
};
use bytes::Bytes;
use sqlx::{Column, Row, ValueRef, postgres::PgRow};
use time::OffsetDateTime;

/// Decodes the columns of [`crate::columns::EventColumns::event_columns`] in one row.
pub(crate) fn event(row: &PgRow, spec: &TableSpec, max_payload: usize) -> Result<Event, BadRow> {
    match Layout::of(row) {
        Ok(layout) => layout.event(row, spec, max_payload),
        Err(error) => Err(BadRow { id: "(no id)".into(), key: None, error }),
    }
}

/// Where these columns begin. They always follow one another, so a result is searched for their names once,
/// not once a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout(usize);

impl Layout {
    pub(crate) fn of(row: &PgRow) -> Result<Self> {
        let first =
            row.try_column("e_id").map_err(|error| Error::permanent(Code::BAD_ROW, error.to_string()))?;
        Ok(Self(first.ordinal()))
    }

    /// Whether the row has an event at all: it has none where a filter left it out.
    pub(crate) fn is_there(self, row: &PgRow) -> Result<bool> {
        Ok(get_at::<Option<i64>>(row, self.0 + E_SEQ, "e_seq")?.is_some())
    }

    /// The row's own limit of attempts.
    pub(crate) fn max_attempts(self, row: &PgRow) -> Option<u32> {
        let limit = get_at::<Option<i64>>(row, self.0 + E_MAX_ATTEMPTS, "e_max_attempts").ok().flatten();
        limit.and_then(|limit| u32::try_from(limit).ok())
    }

    pub(crate) fn event(self, row: &PgRow, spec: &TableSpec, max_payload: usize) -> Result<Event, BadRow> {
        let id = text(row, self.0, "e_id").ok().flatten().unwrap_or_else(|| "(no id)".into());
        decode(row, self.0, spec, max_payload, &id).map_err(|error| BadRow {
            error: error.context(format_args!("event {id}")),
            id,
            key: text(row, self.0 + E_AGGREGATE_ID, "e_aggregate_id").ok().flatten(),
        })
    }
}

const E_SEQ: usize = 1;
const E_STREAM: usize = 2;
const E_TYPE: usize = 3;
const E_AGGREGATE_TYPE: usize = 4;
const E_AGGREGATE_ID: usize = 5;
const E_OP: usize = 6;
const E_PAYLOAD: usize = 7;
const E_PAYLOAD_BYTES: usize = 8;
const E_SIZE: usize = 9;
const E_HEADERS: usize = 10;
const E_OCCURRED_AT: usize = 11;
const E_SCHEMA_VERSION: usize = 12;
const E_MAX_ATTEMPTS: usize = 13;
const E_EXTRA: usize = 14;

fn decode(row: &PgRow, at: usize, spec: &TableSpec, max_payload: usize, id: &str) -> Result<Event> {
    let required = |column: usize, name: &str| {
        text(row, at + column, name)?.ok_or_else(|| {
            Error::permanent(Code::BAD_ROW, format!("{name} is NULL, which the mapping does not allow"))
        })
    };
    let payload = payload(row, at, spec, max_payload)?;
    let headers: Headers = match get_at::<Option<&str>>(row, at + E_HEADERS, "headers")? {
        None | Some("{}") => Headers::new(),
        Some(json) => serde_json::from_str(json).map_err(|error| {
            Error::permanent(Code::BAD_HEADERS, format!("headers are not a JSON object of strings: {error}"))
        })?,
    };
    let extra = match text(row, at + E_EXTRA, "extra")? {
        Some(json) => serde_json::from_str(&json)
            .map_err(|error| Error::permanent(Code::BAD_ROW, format!("extra columns: {error}")))?,
        None => serde_json::Map::new(),
    };
    let op = get_at::<Option<&str>>(row, at + E_OP, "op")?.map_or(Ok(Op::Upsert), Op::parse)?;
    Ok(Event {
        id: id.to_owned(),
        seq: get_at::<Option<i64>>(row, at + E_SEQ, "seq")?.unwrap_or(0),
        stream: required(E_STREAM, "stream")?,
        event_type: required(E_TYPE, "event type")?,
        aggregate_type: required(E_AGGREGATE_TYPE, "aggregate type")?,
        aggregate_id: required(E_AGGREGATE_ID, "aggregate id")?,
        op,
        payload,
        headers,
        occurred_at: get_at::<Option<OffsetDateTime>>(row, at + E_OCCURRED_AT, "occurred_at")?
            .unwrap_or(OffsetDateTime::UNIX_EPOCH),
        schema_version: get_at::<Option<i32>>(row, at + E_SCHEMA_VERSION, "schema_version")?.unwrap_or(1),
        extra,
        row: None,
    })
}

fn payload(row: &PgRow, at: usize, spec: &TableSpec, max_payload: usize) -> Result<Payload> {
    let stored: i64 = get_at(row, at + E_SIZE, "size")?;
    let too_large = |bytes: u64| {
        Error::permanent(Code::TOO_LARGE, format!("payload has {bytes} bytes, the limit is {max_payload}"))
    };
    if stored.unsigned_abs() > max_payload as u64 {
        return Err(too_large(stored.unsigned_abs()));
    }
    if let Some(json) = get_at::<Option<&str>>(row, at + E_PAYLOAD, "payload")? {
        // What was stored compressed may be larger than it looked.
        if json.len() > max_payload {
            return Err(too_large(json.len() as u64));
        }
        if spec.payload_kind == PayloadKind::JsonText {
            check_json(json.as_bytes())?;
        }
        return Ok(Payload::Json(Bytes::copy_from_slice(json.as_bytes())));
    }
    match get_at::<Option<&[u8]>>(row, at + E_PAYLOAD_BYTES, "payload_bytes")? {
        Some(bytes) if bytes.len() > max_payload => Err(too_large(bytes.len() as u64)),
        Some(bytes) => Ok(Payload::Bytes(Bytes::copy_from_slice(bytes))),
        None => Ok(Payload::None),
    }
}

fn text(row: &PgRow, at: usize, name: &str) -> Result<Option<String>> {
    get_at(row, at, name)
}

fn get_at<'r, T>(row: &'r PgRow, at: usize, name: &str) -> Result<T>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(at).map_err(|error| Error::permanent(Code::BAD_ROW, format!("column {name}: {error}")))
}

/// A column's text, whatever bytes it holds: a server that keeps no particular encoding hands them out as they are.
pub(crate) fn lossy(row: &PgRow, column: &str) -> Result<Option<String>> {
    let failed = |error: String| Error::permanent(Code::BAD_ROW, format!("column {column}: {error}"));
    let raw = row.try_get_raw(column).map_err(|error| failed(error.to_string()))?;
    if raw.is_null() {
        return Ok(None);
    }
    let bytes = raw.as_bytes().map_err(|error| failed(error.to_string()))?;
    Ok(Some(String::from_utf8_lossy(bytes).into_owned()))
}

/// A column of the row, or an error that names it.
pub(crate) fn get<'r, T>(row: &'r PgRow, column: &str) -> Result<T>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(column).map_err(|error| Error::permanent(Code::BAD_ROW, format!("column {column}: {error}")))
}
