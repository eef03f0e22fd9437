//! The event: an immutable fact, and the shape it has before it is published.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use serde::Serialize;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Code, Error, Result};

/// The largest payload that publishing accepts, and that a relay reads by default.
pub const MAX_PAYLOAD_BYTES: usize = 16 * 1024 * 1024;

/// Headers: a sorted string map.
pub type Headers = BTreeMap<String, String>;

/// What happened to the aggregate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Op {
    /// It exists, in this form.
    #[default]
    Upsert,
    /// It is gone. A sink whose broker has tombstones writes one.
    Delete,
}

impl Op {
    /// The word in tables and envelopes.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Upsert => "upsert",
            Self::Delete => "delete",
        }
    }

    /// The op that a word stands for; any other word is an error that names it.
    pub fn parse(word: &str) -> Result<Self> {
        match word {
            "upsert" => Ok(Self::Upsert),
            "delete" => Ok(Self::Delete),
            other => Err(Error::permanent(
                Code::BAD_OP,
                format!("op must be `upsert` or `delete`, found `{other}`"),
            )),
        }
    }
}

/// The body of an event. It is passed through as stored, and never serialised again.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Payload {
    /// No body; usual for a delete.
    #[default]
    None,
    /// UTF-8 JSON text.
    Json(Bytes),
    /// Anything else.
    Bytes(Bytes),
}

impl Payload {
    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.as_bytes().len()
    }

    /// Whether there is no body, or an empty one.
    pub fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// The raw bytes; empty for [`Payload::None`].
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Json(bytes) | Self::Bytes(bytes) => bytes,
        }
    }
}

/// An event as a source hands it out: it has a number (`seq`) in an outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Opaque text; a UUID in the canonical table.
    pub id: String,
    /// The outbox's own ascending position.
    pub seq: i64,
    /// Logical topic, e.g. `everbit.trade.command`.
    pub stream: String,
    /// What happened, e.g. `OrderAccepted`.
    pub event_type: String,
    /// What it happened to, e.g. `Order`.
    pub aggregate_type: String,
    /// Which one it happened to: the ordering key.
    pub aggregate_id: String,
    /// Upsert or delete.
    pub op: Op,
    /// The body.
    pub payload: Payload,
    /// String headers, including W3C `traceparent` if the producer set it.
    pub headers: Headers,
    /// When it happened, as the producer said or by the database's clock.
    pub occurred_at: OffsetDateTime,
    /// Version of the payload's schema.
    pub schema_version: i32,
    /// Further columns that the table's spec names.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// The whole row, if the source was asked to keep it: for formats that need more than an event has.
    pub row: Option<Arc<SourceRow>>,
}

/// The row that an event was read from, as the database writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceRow {
    /// What the columns are; one for all rows of a table, until the table changes.
    pub columns: Arc<[SourceColumn]>,
    /// What they hold, in the same order, as text in the database's own form (`t`, `2026-01-25 12:00:00+00`, `\x00ff`,
    /// `{1,2}`); none is NULL.
    pub values: Vec<Option<Bytes>>,
}

impl SourceRow {
    /// A column and what it holds.
    pub fn get(&self, name: &str) -> Option<(&SourceColumn, Option<&Bytes>)> {
        let at = self.columns.iter().position(|column| column.name == name)?;
        Some((&self.columns[at], self.values.get(at)?.as_ref()))
    }
}

/// A column of a [`SourceRow`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceColumn {
    /// Its name.
    pub name: String,
    /// The database's number for its type.
    pub type_oid: u32,
    /// The type's modifier, such as a length or a scale; -1 for none.
    pub type_modifier: i32,
    /// Whether it can be NULL.
    pub nullable: bool,
}

impl Event {
    /// Roughly how many bytes this event occupies in memory, to limit buffers.
    pub fn size(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(k, v)| k.len() + v.len() + 48).sum();
        std::mem::size_of::<Self>()
            + self.id.len()
            + self.stream.len()
            + self.event_type.len()
            + self.aggregate_type.len()
            + self.aggregate_id.len()
            + self.payload.len()
            + headers
            + self.extra.len() * 64
            + self.row.as_ref().map_or(0, |row| row.values.len() * 48)
    }

    /// The trace id for logs and envelopes: the header `traceId`, else the id inside `traceparent`.
    pub fn trace_id(&self) -> Option<&str> {
        self.headers
            .get("traceId")
            .map(String::as_str)
            .or_else(|| self.headers.get("traceparent").and_then(|value| value.split('-').nth(1)))
    }
}

/// What publishing returned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Published {
    /// The event's id, as given or as generated.
    pub id: String,
    /// Its number in the outbox.
    pub seq: i64,
    /// False if an event of this id already existed; then nothing was stored.
    pub is_new: bool,
}

/// An event that is about to be published.
///
/// ```
/// use airtight_core::NewEvent;
/// let event = NewEvent::new("shop.orders", "OrderPlaced", "Order", "42")
///     .json(&serde_json::json!({"total": 1200}))
///     .unwrap()
///     .header("source", "checkout");
/// assert_eq!(event.aggregate_id, "42");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvent {
    /// The caller's id, or none for a generated UUID v7. Publishing one id twice stores one event.
    pub id: Option<Uuid>,
    /// See [`Event::stream`].
    pub stream: String,
    /// See [`Event::event_type`].
    pub event_type: String,
    /// See [`Event::aggregate_type`].
    pub aggregate_type: String,
    /// See [`Event::aggregate_id`].
    pub aggregate_id: String,
    /// See [`Event::op`].
    pub op: Op,
    /// See [`Event::payload`].
    pub payload: Payload,
    /// See [`Event::headers`].
    pub headers: Headers,
    /// When it happened; the time of the database's clock if not given.
    pub occurred_at: Option<OffsetDateTime>,
    /// See [`Event::schema_version`].
    pub schema_version: i32,
    /// This event's own limit of attempts, instead of the pipeline's.
    pub max_attempts: Option<i32>,
}

impl NewEvent {
    /// An event without a body yet.
    pub fn new(
        stream: impl Into<String>,
        event_type: impl Into<String>,
        aggregate_type: impl Into<String>,
        aggregate_id: impl Into<String>,
    ) -> Self {
        Self {
            id: None,
            stream: stream.into(),
            event_type: event_type.into(),
            aggregate_type: aggregate_type.into(),
            aggregate_id: aggregate_id.into(),
            op: Op::Upsert,
            payload: Payload::None,
            headers: Headers::new(),
            occurred_at: None,
            schema_version: 1,
            max_attempts: None,
        }
    }

    /// The body, serialised once, here.
    pub fn json<T: Serialize + ?Sized>(mut self, body: &T) -> Result<Self> {
        let text = serde_json::to_vec(body)
            .map_err(|error| Error::permanent(Code::BAD_PAYLOAD, format!("payload is not JSON: {error}")))?;
        self.payload = Payload::Json(text.into());
        Ok(self)
    }

    /// The body as JSON text. The text is checked when the event is published.
    #[must_use]
    pub fn json_text(mut self, text: impl Into<Bytes>) -> Self {
        self.payload = Payload::Json(text.into());
        self
    }

    /// The body as bytes.
    #[must_use]
    pub fn bytes(mut self, body: impl Into<Bytes>) -> Self {
        self.payload = Payload::Bytes(body.into());
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Sets the id.
    #[must_use]
    pub fn id(mut self, id: Uuid) -> Self {
        self.id = Some(id);
        self
    }

    /// Makes the event a delete.
    #[must_use]
    pub fn delete(mut self) -> Self {
        self.op = Op::Delete;
        self
    }

    /// Sets the time at which it happened.
    #[must_use]
    pub fn occurred_at(mut self, at: OffsetDateTime) -> Self {
        self.occurred_at = Some(at);
        self
    }

    /// Sets the payload's schema version.
    #[must_use]
    pub fn schema_version(mut self, version: i32) -> Self {
        self.schema_version = version;
        self
    }

    /// Sets this event's own limit of attempts.
    #[must_use]
    pub fn max_attempts(mut self, attempts: i32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// Refuses an event that no outbox can hold, and names the field. Every publish calls this before it sends a
    /// statement, because a failed statement would abort the caller's transaction.
    pub fn validate(&self) -> Result<()> {
        for (field, value) in [
            ("stream", &self.stream),
            ("event_type", &self.event_type),
            ("aggregate_type", &self.aggregate_type),
            ("aggregate_id", &self.aggregate_id),
        ] {
            if value.is_empty() {
                return Err(bad(field, "is empty"));
            }
            no_nul(field, value)?;
        }
        for (name, value) in &self.headers {
            no_nul("headers", name)?;
            no_nul("headers", value)?;
        }
        if self.payload.len() > MAX_PAYLOAD_BYTES {
            return Err(Error::permanent(
                Code::TOO_LARGE,
                format!(
                    "payload has {} bytes, the limit is {MAX_PAYLOAD_BYTES}: store it elsewhere and publish a reference",
                    self.payload.len()
                ),
            ));
        }
        if let Payload::Json(text) = &self.payload {
            check_json(text)?;
        }
        if self.max_attempts.is_some_and(|n| n < 1) {
            return Err(bad("max_attempts", "must be at least 1"));
        }
        Ok(())
    }
}

/// Refuses text that is not JSON, or that holds an escaped NUL, which not every database can store.
pub fn check_json(text: &[u8]) -> Result<()> {
    serde_json::from_slice::<serde::de::IgnoredAny>(text)
        .map_err(|error| Error::permanent(Code::BAD_PAYLOAD, format!("payload is not JSON: {error}")))?;
    if has_escaped_nul(text) {
        return Err(bad("payload", "holds a NUL character (\\u0000)"));
    }
    Ok(())
}

/// Whether valid JSON text holds `\u0000` as an escape, rather than a backslash followed by `u0000`.
fn has_escaped_nul(text: &[u8]) -> bool {
    let mut at = 0;
    while at + 1 < text.len() {
        if text[at] != b'\\' {
            at += 1;
        } else if text[at..].starts_with(b"\\u0000") {
            return true;
        } else {
            at += 2;
        }
    }
    false
}

fn no_nul(field: &str, value: &str) -> Result<()> {
    if value.contains('\0') { Err(bad(field, "holds a NUL byte")) } else { Ok(()) }
}

fn bad(field: &str, what: &str) -> Error {
    Error::permanent(Code::BAD_EVENT, format!("{field} {what}"))
}

#[cfg(test)]
/// An event for this crate's own tests; others have that of `airtight-testkit`.
pub(crate) fn sample_event(seq: i64, key: &str) -> Event {
    Event {
        id: format!("00000000-0000-7000-8000-{seq:012}"),
        seq,
        stream: "test.stream".into(),
        event_type: "Tested".into(),
        aggregate_type: "Test".into(),
        aggregate_id: key.into(),
        op: Op::Upsert,
        payload: Payload::Json(format!("{{\"n\":{seq}}}").into()),
        headers: Headers::new(),
        occurred_at: OffsetDateTime::UNIX_EPOCH,
        schema_version: 1,
        extra: serde_json::Map::new(),
        row: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> NewEvent {
        NewEvent::new("s", "T", "A", "1")
    }

    #[test]
    fn refuses_what_no_outbox_can_hold() {
        let cases = [
            (NewEvent::new("", "T", "A", "1"), "stream is empty"),
            (NewEvent::new("s", "T", "A", "a\0b"), "aggregate_id holds a NUL byte"),
            (event().header("a", "b\0"), "headers holds a NUL byte"),
            (event().json_text("{oops"), "payload is not JSON"),
            (event().json_text(r#"{"a":"\u0000"}"#), "payload holds a NUL character"),
            (event().max_attempts(0), "max_attempts must be at least 1"),
            (event().bytes(vec![0; MAX_PAYLOAD_BYTES + 1]), "the limit is"),
        ];
        for (event, expected) in cases {
            let error = event.validate().unwrap_err();
            assert!(error.message().contains(expected), "{error} should say {expected}");
            assert_eq!(error.class(), crate::Class::Permanent);
        }
    }

    #[test]
    fn a_backslash_before_u0000_is_not_a_nul() {
        event().json_text(r#"{"path":"C:\\u0000"}"#).validate().unwrap();
        event().bytes(vec![0, 1, 2]).validate().unwrap();
    }

    #[test]
    fn the_trace_id_comes_from_either_header() {
        let mut headers = Headers::new();
        headers
            .insert("traceparent".into(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
        let mut event = crate::event::sample_event(1, "k");
        event.headers = headers;
        assert_eq!(event.trace_id(), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
        event.headers.insert("traceId".into(), "mine".into());
        assert_eq!(event.trace_id(), Some("mine"));
    }
}
