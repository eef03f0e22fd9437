//! An event's metadata as headers.

use std::borrow::Cow;

use base64::{Engine, prelude::BASE64_STANDARD};

use super::{Carrier, timestamp};
use crate::{Event, Payload};

pub(super) type Headers<'a> = Vec<(Cow<'a, str>, Cow<'a, str>)>;

/// The header in which a tombstone carries the payload of its delete.
pub(super) const PAYLOAD: &str = "payload";
/// The same for bytes.
pub(super) const PAYLOAD_BASE64: &str = "payloadBase64";

/// Everything about an event except its payload. The event's own headers and extra fields keep their
/// names, unless a name is taken: then they get the prefix `header.` or `extra.`, so that none is lost and none occurs twice.
pub(super) fn all(event: &Event, carrier: Carrier) -> Headers<'_> {
    let mut headers: Headers<'_> = Vec::with_capacity(10 + event.headers.len() + event.extra.len());
    headers.push(("id".into(), event.id.as_str().into()));
    headers.push(("eventType".into(), event.event_type.as_str().into()));
    headers.push(("aggregateType".into(), event.aggregate_type.as_str().into()));
    if !carrier.has_key {
        headers.push(("aggregateId".into(), event.aggregate_id.as_str().into()));
    }
    headers.push(("stream".into(), event.stream.as_str().into()));
    headers.push(("seq".into(), event.seq.to_string().into()));
    headers.push(("op".into(), event.op.as_str().into()));
    headers.push(("occurredAt".into(), timestamp(event).into()));
    headers.push(("schemaVersion".into(), event.schema_version.to_string().into()));
    for (name, value) in &event.headers {
        let name = if is_ours(name) { format!("header.{name}").into() } else { name.as_str().into() };
        headers.push((name, value.as_str().into()));
    }
    for (name, value) in &event.extra {
        let name = if is_ours(name) || event.headers.contains_key(name) {
            format!("extra.{name}").into()
        } else {
            name.as_str().into()
        };
        put(&mut headers, name, text(value));
    }
    headers
}

/// The fields that consumers filter by without reading the body.
pub(super) fn routing(event: &Event) -> Headers<'_> {
    let mut headers: Headers<'_> =
        vec![("id".into(), event.id.as_str().into()), ("eventType".into(), event.event_type.as_str().into())];
    for name in ["traceparent", "tracestate"] {
        if let Some(value) = event.headers.get(name) {
            headers.push((name.into(), value.as_str().into()));
        }
    }
    headers
}

/// Sets a header that may already exist, from an extra field whose name looks like one of airtight's.
pub(super) fn put<'a>(headers: &mut Headers<'a>, name: Cow<'a, str>, value: Cow<'a, str>) {
    match headers.iter_mut().find(|(known, _)| *known == name) {
        Some((_, old)) => *old = value,
        None => headers.push((name, value)),
    }
}

/// The payload as a header.
pub(super) fn payload(payload: &Payload) -> (&'static str, Cow<'_, str>) {
    match payload {
        Payload::None => (PAYLOAD, "".into()),
        Payload::Json(text) => (PAYLOAD, String::from_utf8_lossy(text)),
        Payload::Bytes(bytes) => (PAYLOAD_BASE64, BASE64_STANDARD.encode(bytes).into()),
    }
}

/// Names that airtight gives a meaning to, in this format or in another.
pub(super) fn is_ours(name: &str) -> bool {
    const OURS: [&str; 12] = [
        "id",
        "eventType",
        "aggregateType",
        "aggregateId",
        "stream",
        "seq",
        "op",
        "occurredAt",
        "schemaVersion",
        "content-type",
        PAYLOAD,
        PAYLOAD_BASE64,
    ];
    OURS.contains(&name) || name.starts_with("header.") || name.starts_with("extra.")
}

fn text(value: &serde_json::Value) -> Cow<'_, str> {
    match value {
        serde_json::Value::String(text) => text.as_str().into(),
        other => other.to_string().into(),
    }
}

/// Text that any header can carry: printable ASCII, with `%` encoded so that decoding is unambiguous. Spaces at the
/// ends could be trimmed in transit, so they are encoded too.
///
/// This is only for headers: `/`, `:` and `.` stay as they are, so the result is not a safe path or file name. To encode
/// the values of a template, use [`crate::route::Template::render_with`].
pub fn percent_encode(text: &str) -> Cow<'_, str> {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let last = text.len().saturating_sub(1);
    let is_plain = |at: usize, byte: u8| match byte {
        b'%' => false,
        b' ' => at != 0 && at != last,
        _ => (b'!'..=b'~').contains(&byte),
    };
    if text.bytes().enumerate().all(|(at, byte)| is_plain(at, byte)) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for (at, byte) in text.bytes().enumerate() {
        if is_plain(at, byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push(char::from(HEX[usize::from(byte >> 4)]));
            out.push(char::from(HEX[usize::from(byte & 15)]));
        }
    }
    out.into()
}
