//! Reads an event from a message, for consumers.
//!
//! A message that airtight wrote gives back the whole event, except that `raw` and `event` have extra fields among the
//! headers, and `cloudevents` cannot carry some of the fields. A message that another program wrote gives as much of an
//! event as it has: the id is made from the position of the message, so that an inbox can recognize a repeat, and the
//! topic is used as the stream.

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use serde_json::value::RawValue;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{BYTES, Format, cloudevents, headers};
use crate::{Code, Error, Event, Op, Payload, Result, event::Headers};

/// A message as a broker hands it out.
#[derive(Debug, Clone, Default)]
pub struct Incoming<'a> {
    /// The topic, subject or queue that it was read from.
    pub topic: &'a str,
    /// Its position there, unique in the topic: `partition/offset`, for example.
    pub place: String,
    /// Its ascending number there.
    pub offset: i64,
    /// When it was written, as the broker says.
    pub written_at: Option<OffsetDateTime>,
    /// The key.
    pub key: Option<&'a [u8]>,
    /// The value; none for a tombstone.
    pub body: Option<Bytes>,
    /// Header names and values.
    pub headers: Vec<(&'a str, &'a [u8])>,
}

/// Reads a message that was written in `format`. A permanent error says why the message is not in this format.
pub fn decode(format: Format, incoming: &Incoming<'_>) -> Result<Event> {
    if let Format::Custom(formatter) = format {
        return formatter.decode(incoming);
    }
    let mut event = bare(incoming)?;
    match (format, &incoming.body) {
        // A custom format has returned above.
        (Format::Raw | Format::Custom(_), body) => {
            apply_headers(&mut event, incoming)?;
            if let Some(body) = body {
                event.payload = payload_of(body, incoming);
            }
        }
        // A tombstone has everything in its headers.
        (Format::Envelope | Format::Event, None) => apply_headers(&mut event, incoming)?,
        (Format::Envelope, Some(body)) => apply_envelope(&mut event, body)?,
        (Format::Event, Some(body)) => {
            apply_headers(&mut event, incoming)?;
            apply_short(&mut event, body)?;
        }
        (Format::CloudEvents, Some(body)) => apply_structured(&mut event, body)?,
        (Format::CloudEvents, None) => return Err(bad("has no body, but a structured CloudEvent needs one")),
        (Format::CloudEventsBinary, body) => {
            apply_attributes(&mut event, incoming)?;
            if let Some(body) = body {
                event.payload = payload_of(body, incoming);
            }
        }
    }
    Ok(event)
}

/// The fields that any message gives.
fn bare(incoming: &Incoming<'_>) -> Result<Event> {
    let key =
        incoming.key.map(|key| std::str::from_utf8(key).map_err(|_| bad("has a key that is not UTF-8 text")));
    Ok(Event {
        id: format!("{}/{}", incoming.topic, incoming.place),
        seq: incoming.offset,
        stream: incoming.topic.to_owned(),
        event_type: String::new(),
        aggregate_type: String::new(),
        aggregate_id: key.transpose()?.unwrap_or_default().to_owned(),
        op: if incoming.body.is_none() { Op::Delete } else { Op::Upsert },
        payload: Payload::None,
        headers: Headers::new(),
        occurred_at: incoming.written_at.unwrap_or(OffsetDateTime::UNIX_EPOCH),
        schema_version: 1,
        extra: serde_json::Map::new(),
        row: None,
    })
}

fn apply_headers(event: &mut Event, incoming: &Incoming<'_>) -> Result<()> {
    for (name, value) in &incoming.headers {
        let value = String::from_utf8_lossy(value).into_owned();
        match *name {
            "id" => event.id = value,
            "eventType" => event.event_type = value,
            "aggregateType" => event.aggregate_type = value,
            "aggregateId" => event.aggregate_id = value,
            "stream" => event.stream = value,
            "seq" => event.seq = number(name, &value)?,
            "op" => event.op = Op::parse(&value)?,
            "occurredAt" => event.occurred_at = time(name, &value)?,
            "schemaVersion" => event.schema_version = number(name, &value)?,
            "content-type" => {}
            headers::PAYLOAD | headers::PAYLOAD_BASE64 if incoming.body.is_none() => {
                event.payload = reason(name, value)?;
            }
            other => {
                let other =
                    other.strip_prefix("header.").or_else(|| other.strip_prefix("extra.")).unwrap_or(other);
                event.headers.insert(other.to_owned(), value);
            }
        }
    }
    Ok(())
}

type Fields<'a> = BTreeMap<String, &'a RawValue>;

fn fields(body: &Bytes) -> Result<Fields<'_>> {
    serde_json::from_slice(body).map_err(|error| bad(&format!("is not a JSON object: {error}")))
}

fn text(name: &str, value: &RawValue) -> Result<String> {
    // An absent text and a null one mean the same.
    let text: Option<String> =
        serde_json::from_str(value.get()).map_err(|_| bad(&format!("has a `{name}` that is not text")))?;
    Ok(text.unwrap_or_default())
}

fn apply_envelope(event: &mut Event, body: &Bytes) -> Result<()> {
    let fields = fields(body)?;
    require(&fields, "eventId")?;
    for (name, value) in &fields {
        match name.as_str() {
            "eventId" => event.id = text(name, value)?,
            "type" => event.event_type = text(name, value)?,
            "aggregateType" => event.aggregate_type = text(name, value)?,
            "aggregateId" => event.aggregate_id = text(name, value)?,
            "stream" => event.stream = text(name, value)?,
            "seq" => event.seq = number(name, value.get())?,
            "op" => event.op = Op::parse(&text(name, value)?)?,
            "occurredAt" => event.occurred_at = time(name, &text(name, value)?)?,
            "schemaVersion" => event.schema_version = number(name, value.get())?,
            "headers" => {
                event.headers = serde_json::from_str(value.get())
                    .map_err(|_| bad("has `headers` that are not a map of texts"))?;
            }
            // In the headers, where it came from one.
            "traceId" => {
                let id = text(name, value)?;
                if !id.is_empty() && event.trace_id().is_none() && !fields.contains_key("headers") {
                    event.headers.insert("traceId".into(), id);
                }
            }
            "payload" | "payloadBase64" => {}
            other => {
                let value = serde_json::from_str(value.get()).unwrap_or_default();
                event.extra.insert(other.to_owned(), value);
            }
        }
    }
    event.payload = payload_in(&fields, body, "payload", "payloadBase64")?;
    Ok(())
}

fn apply_short(event: &mut Event, body: &Bytes) -> Result<()> {
    let fields = fields(body)?;
    require(&fields, "eventId")?;
    for (name, value) in &fields {
        match name.as_str() {
            "eventId" => event.id = text(name, value)?,
            "eventType" => event.event_type = text(name, value)?,
            "timestamp" => event.occurred_at = time(name, &text(name, value)?)?,
            "aggregateId" => event.aggregate_id = text(name, value)?,
            _ => {}
        }
    }
    event.payload = payload_in(&fields, body, "payload", "payloadBase64")?;
    Ok(())
}

fn apply_structured(event: &mut Event, body: &Bytes) -> Result<()> {
    let fields = fields(body)?;
    require(&fields, "specversion")?;
    for (name, value) in &fields {
        if !matches!(name.as_str(), "data" | "data_base64" | "datacontenttype" | "dataschema") {
            // Attributes of others may be numbers or booleans.
            let text = text(name, value).unwrap_or_else(|_| value.get().to_owned());
            attribute(event, name, text)?;
        }
    }
    event.payload = payload_in(&fields, body, "data", "data_base64")?;
    Ok(())
}

fn apply_attributes(event: &mut Event, incoming: &Incoming<'_>) -> Result<()> {
    let mut is_one = false;
    for (name, value) in &incoming.headers {
        let value = String::from_utf8_lossy(value).into_owned();
        let stripped = ["ce_", "ce-", "cloudEvents:", "cloudEvents_"]
            .iter()
            .find_map(|prefix| name.strip_prefix(prefix));
        match stripped {
            Some(name) => {
                is_one |= name == "specversion";
                attribute(event, name, value)?;
            }
            None if *name == "content-type" => {}
            None if incoming.body.is_none() && [headers::PAYLOAD, headers::PAYLOAD_BASE64].contains(name) => {
                event.payload = reason(name, value)?;
            }
            None => drop(event.headers.insert((*name).to_owned(), value)),
        }
    }
    if is_one { Ok(()) } else { Err(bad("has no `ce_specversion`: it is not a CloudEvent in binary mode")) }
}

fn attribute(event: &mut Event, name: &str, value: String) -> Result<()> {
    match name {
        "specversion" if value.starts_with("1.") => {}
        "specversion" => return Err(bad(&format!("is of CloudEvents {value}; only 1.x can be read"))),
        "id" => event.id = value,
        "source" => event.stream = cloudevents::stream(&value),
        "type" => event.event_type = value,
        "subject" => event.aggregate_id = value,
        "time" => event.occurred_at = time(name, &value)?,
        "partitionkey" if event.aggregate_id.is_empty() => event.aggregate_id = value,
        "partitionkey" | "datacontenttype" => {}
        "aggregatetype" => event.aggregate_type = value,
        // Other programs may number their events differently.
        "sequence" => event.seq = value.parse().unwrap_or(event.seq),
        "schemaversion" => event.schema_version = value.parse().unwrap_or(event.schema_version),
        "op" => event.op = Op::parse(&value)?,
        other => drop(event.headers.insert(other.to_owned(), value)),
    }
    Ok(())
}

/// The payload that a tombstone has in a header.
fn reason(name: &str, value: String) -> Result<Payload> {
    Ok(if name == headers::PAYLOAD_BASE64 {
        Payload::Bytes(from_base64(name, &value)?)
    } else {
        Payload::Json(value.into())
    })
}

fn from_base64(name: &str, text: &str) -> Result<Bytes> {
    let bytes = BASE64_STANDARD.decode(text);
    bytes.map(Bytes::from).map_err(|_| bad(&format!("has a `{name}` that is not base64")))
}

/// A body that is the payload: JSON, unless its content type says otherwise or it is not valid JSON.
fn payload_of(body: &Bytes, incoming: &Incoming<'_>) -> Payload {
    if body.is_empty() && !incoming.headers.iter().any(|(name, _)| *name == "content-type") {
        return Payload::None;
    }
    let said = incoming.headers.iter().find(|(name, _)| *name == "content-type").map(|(_, value)| *value);
    let is_json =
        said != Some(BYTES.as_bytes()) && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok();
    if is_json { Payload::Json(body.clone()) } else { Payload::Bytes(body.clone()) }
}

/// A payload inside a JSON body, with exactly its bytes in that body.
fn payload_in(fields: &Fields<'_>, body: &Bytes, plain: &str, base64: &str) -> Result<Payload> {
    if let Some(encoded) = fields.get(base64) {
        return Ok(Payload::Bytes(from_base64(base64, &text(base64, encoded)?)?));
    }
    Ok(match fields.get(plain) {
        Some(value) if value.get() != "null" => Payload::Json(body.slice_ref(value.get().as_bytes())),
        _ => Payload::None,
    })
}

fn require(fields: &Fields<'_>, name: &str) -> Result<()> {
    if fields.contains_key(name) { Ok(()) } else { Err(bad(&format!("has no `{name}`"))) }
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| bad(&format!("has a `{name}` that is not a whole number: {text:.40}")))
}

fn time(name: &str, text: &str) -> Result<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339)
        .map_err(|_| bad(&format!("has a `{name}` that is not an RFC 3339 time: {text:.40}")))
}

fn bad(what: &str) -> Error {
    Error::permanent(Code::BAD_MESSAGE, format!("the message {what}"))
}
