//! The JSON envelope: the event's metadata around its payload.
//!
//! The text is written directly and not through a value tree, because the payload is already JSON text and is passed
//! through byte for byte.

use std::io::Write;

use base64::{Engine, prelude::BASE64_STANDARD as STANDARD};
use serde::Serialize;
use time::format_description::well_known::Rfc3339;

use crate::{Event, Payload};

/// The envelope as JSON text.
pub fn to_vec(event: &Event) -> Vec<u8> {
    let mut out = Vec::with_capacity(event.payload.len() + 512);
    write(&mut out, event);
    out
}

/// Appends the envelope and a line feed.
pub fn write_line(out: &mut Vec<u8>, event: &Event) {
    let start = out.len();
    write(out, event);
    // JSON text may hold line feeds between tokens, but never inside a string: a space means the same.
    out[start..].iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
    out.push(b'\n');
}

fn write(out: &mut Vec<u8>, event: &Event) {
    let occurred_at = event.occurred_at.format(&Rfc3339).unwrap_or_default();
    out.extend_from_slice(b"{\"eventId\":");
    value(out, &event.id);
    // Writing to a Vec cannot fail.
    let _ = write!(out, ",\"seq\":{},\"stream\":", event.seq);
    value(out, &event.stream);
    field(out, "type", &event.event_type);
    field(out, "aggregateType", &event.aggregate_type);
    field(out, "aggregateId", &event.aggregate_id);
    field(out, "occurredAt", &occurred_at);
    field(out, "schemaVersion", &event.schema_version);
    field(out, "traceId", &event.trace_id());
    field(out, "op", event.op.as_str());
    field(out, "headers", &event.headers);
    for (name, extra) in &event.extra {
        if !RESERVED.contains(&name.as_str()) {
            field(out, name, extra);
        }
    }
    payload(out, &event.payload);
    out.push(b'}');
}

/// The field `payload`; bytes are in a second field, since JSON has no bytes.
pub(crate) fn payload(out: &mut Vec<u8>, payload: &Payload) {
    match payload {
        Payload::None => out.extend_from_slice(b",\"payload\":null"),
        Payload::Json(text) => {
            out.extend_from_slice(b",\"payload\":");
            out.extend_from_slice(text);
        }
        Payload::Bytes(bytes) => {
            out.extend_from_slice(b",\"payload\":null");
            field(out, "payloadBase64", &STANDARD.encode(bytes));
        }
    }
}

/// The fields that an extra column cannot override.
const RESERVED: [&str; 13] = [
    "eventId",
    "seq",
    "stream",
    "type",
    "aggregateType",
    "aggregateId",
    "occurredAt",
    "schemaVersion",
    "traceId",
    "op",
    "headers",
    "payload",
    "payloadBase64",
];

pub(crate) fn field<T: Serialize + ?Sized>(out: &mut Vec<u8>, name: &str, content: &T) {
    out.push(b',');
    value(out, name);
    out.push(b':');
    value(out, content);
}

pub(crate) fn value<T: Serialize + ?Sized>(out: &mut Vec<u8>, content: &T) {
    // Strings, numbers and string maps always serialise, and a Vec takes everything.
    let _ = serde_json::to_writer(out, content);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::sample_event;

    #[test]
    fn the_payload_is_passed_through_byte_for_byte() {
        let mut event = sample_event(7, "k\"1");
        event.payload = Payload::Json(r#"{"b":1.10,  "a":[1e2]}"#.into());
        event.headers.insert("traceId".into(), "t-1".into());
        event.extra.insert("market".into(), "KRW-BTC".into());
        event.extra.insert("seq".into(), "not mine".into());
        let text = String::from_utf8(to_vec(&event)).unwrap();
        assert_eq!(
            text,
            r#"{"eventId":"00000000-0000-7000-8000-000000000007","seq":7,"stream":"test.stream","type":"Tested","aggregateType":"Test","aggregateId":"k\"1","occurredAt":"1970-01-01T00:00:00Z","schemaVersion":1,"traceId":"t-1","op":"upsert","headers":{"traceId":"t-1"},"market":"KRW-BTC","payload":{"b":1.10,  "a":[1e2]}}"#
        );
    }

    #[test]
    fn a_line_is_one_line() {
        let mut event = sample_event(1, "k");
        event.payload = Payload::Json("{\n  \"a\": \"x\\ny\"\r\n}".into());
        let mut out = Vec::new();
        write_line(&mut out, &event);
        assert_eq!(out.iter().filter(|byte| **byte == b'\n').count(), 1);
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["payload"]["a"], "x\ny");
    }

    #[test]
    fn bytes_are_base64_beside_a_null() {
        let mut event = sample_event(1, "k");
        event.payload = Payload::Bytes(vec![0, 255, 1].into());
        let value: serde_json::Value = serde_json::from_slice(&to_vec(&event)).unwrap();
        assert!(value["payload"].is_null());
        assert_eq!(value["payloadBase64"], "AP8B");
    }
}
