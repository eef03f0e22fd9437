//! From a row to an event. A row that cannot be one is an answer, not an error: the others go on.

use airtight_core::{
    Error, Event, Op, Payload, Result,
    event::{Headers, check_json},
    queue::BadRow,
    table::{PayloadKind, TableSpec},
};
use bytes::Bytes;
use sqlx::{Row, postgres::PgRow};
use time::OffsetDateTime;

/// Decodes the columns of [`crate::columns::Columns::event_columns`].
pub(crate) fn event(row: &PgRow, spec: &TableSpec, max_payload: usize) -> Result<Event, BadRow> {
    let id = text(row, "e_id").ok().flatten().unwrap_or_else(|| "(no id)".into());
    let key = text(row, "e_aggregate_id").ok().flatten();
    decode(row, spec, max_payload, &id).map_err(|error| BadRow {
        error: error.context(format_args!("event {id}")),
        id,
        key,
    })
}

fn decode(row: &PgRow, spec: &TableSpec, max_payload: usize, id: &str) -> Result<Event> {
    let required = |column: &str, name: &str| {
        text(row, column)?.ok_or_else(|| {
            Error::permanent("bad_row", format!("{name} is NULL, which the mapping does not allow"))
        })
    };
    let payload = payload(row, spec, max_payload)?;
    let headers: Headers = match text(row, "e_headers")? {
        Some(json) => serde_json::from_str(&json).map_err(|error| {
            Error::permanent("bad_headers", format!("headers are not a JSON object of strings: {error}"))
        })?,
        None => Headers::new(),
    };
    let extra = match text(row, "e_extra")? {
        Some(json) => serde_json::from_str(&json)
            .map_err(|error| Error::permanent("bad_row", format!("extra columns: {error}")))?,
        None => serde_json::Map::new(),
    };
    let op = text(row, "e_op")?.map_or(Ok(Op::Upsert), |word| Op::parse(&word))?;
    Ok(Event {
        id: id.to_owned(),
        seq: get(row, "e_seq")?,
        stream: required("e_stream", "stream")?,
        event_type: required("e_type", "event type")?,
        aggregate_type: required("e_aggregate_type", "aggregate type")?,
        aggregate_id: required("e_aggregate_id", "aggregate id")?,
        op,
        payload,
        headers,
        occurred_at: get::<Option<OffsetDateTime>>(row, "e_occurred_at")?
            .unwrap_or(OffsetDateTime::UNIX_EPOCH),
        schema_version: get::<Option<i32>>(row, "e_schema_version")?.unwrap_or(1),
        extra,
    })
}

fn payload(row: &PgRow, spec: &TableSpec, max_payload: usize) -> Result<Payload> {
    let stored: i64 = get(row, "e_size")?;
    let too_large = |bytes: u64| {
        Error::permanent(
            "payload_too_large",
            format!("payload has {bytes} bytes, the limit is {max_payload}"),
        )
    };
    if stored.unsigned_abs() > max_payload as u64 {
        return Err(too_large(stored.unsigned_abs()));
    }
    if let Some(json) = get::<Option<&str>>(row, "e_payload")? {
        // What was stored compressed may be larger than it looked.
        if json.len() > max_payload {
            return Err(too_large(json.len() as u64));
        }
        if spec.payload_kind == PayloadKind::JsonText {
            check_json(json.as_bytes())?;
        }
        return Ok(Payload::Json(Bytes::copy_from_slice(json.as_bytes())));
    }
    match get::<Option<&[u8]>>(row, "e_payload_bytes")? {
        Some(bytes) if bytes.len() > max_payload => Err(too_large(bytes.len() as u64)),
        Some(bytes) => Ok(Payload::Bytes(Bytes::copy_from_slice(bytes))),
        None => Ok(Payload::None),
    }
}

fn text(row: &PgRow, column: &str) -> Result<Option<String>> {
    get(row, column)
}

/// A column of the row, or an error that names it.
pub(crate) fn get<'r, T>(row: &'r PgRow, column: &str) -> Result<T>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(column).map_err(|error| Error::permanent("bad_row", format!("column {column}: {error}")))
}
