//! CloudEvents 1.0.
//!
//! `source` is the stream, as a path; together with `id` it is unique, as the specification requires. The aggregate id is
//! `subject` and, by the partitioning extension, `partitionkey`; `sequence` and the trace context are extensions of
//! the specification too. The event's own headers become attributes if their names are allowed.

use std::borrow::Cow;

use super::{BYTES, JSON, headers::Headers, timestamp};
use crate::{
    Event, Op, Payload,
    envelope::{field, value},
};

pub(super) const CONTENT_TYPE: &str = "application/cloudevents+json; charset=UTF-8";

/// Attributes that an event's own headers cannot override.
const OURS: [&str; 13] = [
    "specversion",
    "id",
    "source",
    "type",
    "subject",
    "time",
    "datacontenttype",
    "partitionkey",
    "aggregatetype",
    "sequence",
    "schemaversion",
    "op",
    "data",
];

/// The JSON document of the structured mode.
pub(super) fn structured(event: &Event) -> Vec<u8> {
    let mut out = Vec::with_capacity(event.payload.len() + 512);
    out.push(b'{');
    for (at, (name, text)) in context(event).into_iter().enumerate() {
        if at == 0 {
            value(&mut out, &*name);
            out.push(b':');
            value(&mut out, &*text);
        } else {
            field(&mut out, &name, &*text);
        }
    }
    match &event.payload {
        Payload::None => {}
        Payload::Json(text) => {
            field(&mut out, "datacontenttype", JSON);
            out.extend_from_slice(b",\"data\":");
            out.extend_from_slice(text);
        }
        Payload::Bytes(bytes) => {
            use base64::{Engine, prelude::BASE64_STANDARD};
            field(&mut out, "datacontenttype", BYTES);
            field(&mut out, "data_base64", &BASE64_STANDARD.encode(bytes));
        }
    }
    out.push(b'}');
    out
}

/// The attributes of the binary mode. The message's content type describes the data.
pub(super) fn attributes<'a>(event: &'a Event, prefix: &str) -> Headers<'a> {
    context(event).into_iter().map(|(name, text)| (format!("{prefix}{name}").into(), text)).collect()
}

/// All attributes except those about the data.
fn context(event: &Event) -> Headers<'_> {
    let mut attributes: Headers<'_> = vec![
        ("specversion".into(), "1.0".into()),
        ("id".into(), event.id.as_str().into()),
        ("source".into(), source(&event.stream).into()),
        ("type".into(), event.event_type.as_str().into()),
    ];
    // An attribute is never empty.
    if !event.aggregate_id.is_empty() {
        attributes.push(("subject".into(), event.aggregate_id.as_str().into()));
    }
    attributes.push(("time".into(), timestamp(event).into()));
    if !event.aggregate_id.is_empty() {
        attributes.push(("partitionkey".into(), event.aggregate_id.as_str().into()));
    }
    if !event.aggregate_type.is_empty() {
        attributes.push(("aggregatetype".into(), event.aggregate_type.as_str().into()));
    }
    attributes.push(("sequence".into(), event.seq.to_string().into()));
    attributes.push(("schemaversion".into(), event.schema_version.to_string().into()));
    if event.op == Op::Delete {
        attributes.push(("op".into(), event.op.as_str().into()));
    }
    let own = event.headers.iter().filter(|(name, text)| is_allowed(name) && !text.is_empty());
    attributes.extend(own.map(|(name, text)| (Cow::from(name.as_str()), Cow::from(text.as_str()))));
    attributes
}

/// Lower-case letters and digits, at most twenty of them.
fn is_allowed(name: &str) -> bool {
    (1..=20).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        && !OURS.contains(&name)
}

/// A stream as the path of a URI reference.
fn source(stream: &str) -> String {
    let mut out = String::with_capacity(stream.len() + 1);
    out.push('/');
    for byte in stream.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// The inverse of [`source`].
pub(super) fn stream(source: &str) -> String {
    let path = source.strip_prefix('/').unwrap_or(source).as_bytes();
    let mut out = Vec::with_capacity(path.len());
    let mut at = 0;
    while at < path.len() {
        let hex = path.get(at + 1..at + 3).and_then(|two| std::str::from_utf8(two).ok());
        match hex.and_then(|two| u8::from_str_radix(two, 16).ok()) {
            Some(byte) if path[at] == b'%' => {
                out.push(byte);
                at += 3;
            }
            _ => {
                out.push(path[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}
