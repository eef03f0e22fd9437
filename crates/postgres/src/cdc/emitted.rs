//! Events without a table: what `airtight.emit` writes into the WAL by `pg_logical_emit_message`.
//!
//! The body is a JSON object. Its `payload` is passed on byte for byte, as a slice of the message:
//!
//! ```json
//! {"id": "…", "stream": "…", "eventType": "…", "aggregateType": "…", "aggregateId": "…", "op": "upsert",
//!  "payload": {}, "headers": {}, "occurredAt": "2026-11-16T05:47:43Z", "schemaVersion": 1, "maxAttempts": 5}
//! ```
//!
//! Instead of `payload` there may be `payloadBase64`, for bytes. All keys but the first five can be left out or null.
//! Unknown keys are ignored, so that a later version can add keys.

use airtight_core::{Code, Error, Event, Op, Payload, Result, event::Headers, queue::BadRow};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;
use time::OffsetDateTime;

use super::{
    row::RowOptions,
    values::{self, Zone, oid},
};

/// The body, with every field still as it was written: so that an error can name the one it is about.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    stream: Option<&'a RawValue>,
    #[serde(borrow)]
    event_type: Option<&'a RawValue>,
    #[serde(borrow)]
    aggregate_type: Option<&'a RawValue>,
    #[serde(borrow)]
    aggregate_id: Option<&'a RawValue>,
    #[serde(borrow)]
    op: Option<&'a RawValue>,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
    #[serde(borrow)]
    payload_base64: Option<&'a RawValue>,
    #[serde(borrow)]
    headers: Option<&'a RawValue>,
    #[serde(borrow)]
    occurred_at: Option<&'a RawValue>,
    #[serde(borrow)]
    schema_version: Option<&'a RawValue>,
    #[serde(borrow)]
    max_attempts: Option<&'a RawValue>,
}

/// The event in a message. It has no place in a table: its `seq` is 0. One that does not say when it happened has
/// the beginning of 1970, as a row that does not.
pub(crate) fn event(content: Bytes, context: &RowOptions) -> Result<Event, BadRow> {
    let body: Body<'_> = serde_json::from_slice(&content).map_err(|error| BadRow {
        id: "(no id)".into(),
        key: None,
        error: bad(format!("emitted event is not a JSON object of the right form: {error}")),
    })?;
    decode(&content, &body, context).map_err(|error| {
        let text = |raw| read::<String>("", raw).ok().flatten();
        let id = text(body.id).unwrap_or_else(|| "(no id)".into());
        BadRow { error: error.context(format_args!("event {id}")), id, key: text(body.aggregate_id) }
    })
}

/// The event's own limit of attempts.
pub(crate) fn max_attempts(content: &[u8]) -> Option<u32> {
    // Few have one, and most bodies need not be read again to know.
    const KEY: &[u8] = b"\"maxAttempts\"";
    content.windows(KEY.len()).find(|window| *window == KEY)?;
    let body: Body<'_> = serde_json::from_slice(content).ok()?;
    read("maxAttempts", body.max_attempts).ok()?
}

fn decode(content: &Bytes, body: &Body<'_>, context: &RowOptions) -> Result<Event> {
    Ok(Event {
        id: required("id", body.id)?,
        seq: 0,
        stream: required("stream", body.stream)?,
        event_type: required("eventType", body.event_type)?,
        aggregate_type: required("aggregateType", body.aggregate_type)?,
        aggregate_id: required("aggregateId", body.aggregate_id)?,
        op: read::<String>("op", body.op)?.map_or(Ok(Op::Upsert), |word| Op::parse(&word))?,
        payload: payload(content, body, context.max_payload)?,
        headers: match body.headers {
            Some(headers) => serde_json::from_str(headers.get()).map_err(|error| {
                Error::permanent(
                    Code::BAD_HEADERS,
                    format!("headers are not a JSON object of strings: {error}"),
                )
            })?,
            None => Headers::new(),
        },
        occurred_at: match read::<String>("occurredAt", body.occurred_at)? {
            Some(time) => values::time(oid::TIMESTAMPTZ, time.as_bytes(), Zone::UTC)
                .map_err(|error| error.context("occurredAt"))?,
            None => OffsetDateTime::UNIX_EPOCH,
        },
        schema_version: read("schemaVersion", body.schema_version)?.unwrap_or(1),
        extra: serde_json::Map::new(),
        row: None,
    })
}

fn payload(content: &Bytes, body: &Body<'_>, max: usize) -> Result<Payload> {
    let payload = match (body.payload, body.payload_base64) {
        (None, None) => Payload::None,
        // It was borrowed from there, so it is a part of it.
        (Some(json), None) => Payload::Json(content.slice_ref(json.get().as_bytes())),
        (None, Some(base64)) => {
            let text: String = read("payloadBase64", Some(base64))?.unwrap_or_default();
            let bytes = STANDARD.decode(text).map_err(|error| bad(format!("payloadBase64: {error}")))?;
            Payload::Bytes(bytes.into())
        }
        (Some(_), Some(_)) => return Err(bad("it has both payload and payloadBase64")),
    };
    if payload.len() > max {
        let message = format!("payload has {} bytes, the limit is {max}", payload.len());
        return Err(Error::permanent(Code::TOO_LARGE, message));
    }
    Ok(payload)
}

/// Text that the canonical table would take, too.
fn required(name: &str, raw: Option<&RawValue>) -> Result<String> {
    let text: String = read(name, raw)?.ok_or_else(|| bad(format!("{name} is missing")))?;
    if text.is_empty() {
        return Err(bad(format!("{name} is empty")));
    }
    if text.contains('\0') {
        return Err(bad(format!("{name} holds a NUL byte")));
    }
    Ok(text)
}

fn read<T: DeserializeOwned>(name: &str, raw: Option<&RawValue>) -> Result<Option<T>> {
    let Some(raw) = raw else { return Ok(None) };
    serde_json::from_str(raw.get()).map(Some).map_err(|error| bad(format!("{name}: {error}")))
}

fn bad(what: impl Into<String>) -> Error {
    Error::permanent(Code::BAD_ROW, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use time::macros::datetime;

    use super::*;

    const CONTEXT: RowOptions = RowOptions { max_payload: 100, keep_row: false };

    fn whole() -> Value {
        json!({"id": "1", "stream": "s", "eventType": "T", "aggregateType": "A", "aggregateId": "k"})
    }

    fn with(key: &str, value: Value) -> Bytes {
        let mut body = whole();
        body[key] = value;
        serde_json::to_vec(&body).unwrap().into()
    }

    #[test]
    fn reads_a_whole_event_and_passes_its_payload_through() {
        let content = Bytes::from(
            r#"{"id":"1", "stream":"caf\u00e9", "eventType":"T", "aggregateType":"A", "aggregateId":"k", "op":"delete",
                "payload":  {"b" :1.50, "a":"é\u00e9", "a": 2} , "headers":{"x":"y"}, "schemaVersion":3, "later":[{}],
                "occurredAt":"2026-11-16T05:47:43.123456+00:00", "maxAttempts":7}"#,
        );
        let event = super::event(content.clone(), &CONTEXT).unwrap();
        let Payload::Json(payload) = &event.payload else { panic!("{:?}", event.payload) };
        assert_eq!(payload, r#"{"b" :1.50, "a":"é\u00e9", "a": 2}"#);
        assert!(content.as_ptr_range().contains(&payload.as_ptr()));
        assert_eq!((event.stream.as_str(), event.op, event.seq), ("café", Op::Delete, 0));
        assert_eq!((event.headers["x"].as_str(), event.schema_version), ("y", 3));
        assert_eq!(event.occurred_at, datetime!(2026-11-16 05:47:43.123456 UTC));
        assert_eq!(max_attempts(&content), Some(7));
    }

    #[test]
    fn most_of_it_can_be_left_out_or_null() {
        let event = |content| super::event(content, &CONTEXT).unwrap();
        let plain = event(serde_json::to_vec(&whole()).unwrap().into());
        assert_eq!((&plain.payload, plain.op, plain.schema_version), (&Payload::None, Op::Upsert, 1));
        for key in ["op", "payload", "payloadBase64", "headers", "occurredAt", "schemaVersion", "maxAttempts"]
        {
            assert_eq!(event(with(key, Value::Null)), plain, "{key}");
            assert_eq!(max_attempts(&with(key, Value::Null)), None);
        }
        assert_eq!(event(with("payloadBase64", json!("AP8="))).payload, Payload::Bytes(vec![0, 255].into()));
        assert_eq!(event(with("payloadBase64", json!(""))).payload, Payload::Bytes(Bytes::new()));
        assert_eq!(event(with("payload", json!("text"))).payload, Payload::Json("\"text\"".into()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let mut both = whole();
        both["payload"] = json!({});
        both["payloadBase64"] = json!("");
        let cases = [
            (Bytes::from("{oops"), "not a JSON object"),
            (Bytes::from("\u{FEFF}{}"), "not a JSON object"),
            (Bytes::from_static(b"{\"id\":\"\xFF\"}"), "not a JSON object"),
            (Bytes::from("[]"), "not a JSON object"),
            (with("id", Value::Null), "id is missing"),
            (with("stream", Value::Null), "stream is missing"),
            (with("eventType", json!("")), "eventType is empty"),
            (with("aggregateType", Value::Null), "aggregateType is missing"),
            (with("aggregateId", json!(42)), "aggregateId: invalid type"),
            (with("aggregateId", json!("a\0")), "aggregateId holds a NUL byte"),
            (with("op", json!("insert")), "op must be"),
            (with("headers", json!({"a": 1})), "headers are not a JSON object of strings"),
            (with("occurredAt", json!("yesterday")), "occurredAt: not a time"),
            (with("schemaVersion", json!("1")), "schemaVersion: invalid type"),
            (with("payloadBase64", json!("%")), "payloadBase64: "),
            (with("payload", json!("x".repeat(100))), "payload has 102 bytes, the limit is 100"),
            (serde_json::to_vec(&both).unwrap().into(), "both payload and payloadBase64"),
        ];
        for (content, expected) in cases {
            let bad = super::event(content, &CONTEXT).unwrap_err();
            assert!(bad.error.message().contains(expected), "{} should say {expected}", bad.error);
        }
        let bad = super::event(with("stream", Value::Null), &CONTEXT).unwrap_err();
        assert_eq!((bad.id.as_str(), bad.key.as_deref()), ("1", Some("k")));
        let large = super::event(with("payload", json!("x".repeat(100))), &CONTEXT).unwrap_err();
        assert_eq!(large.error.code(), "too_large");
    }

    proptest! {
        #[test]
        fn nothing_panics(at in any::<prop::sample::Index>(), byte in any::<u8>(),
                          any in prop::collection::vec(any::<u8>(), 0..80)) {
            let mut content = with("payload", json!({"a": [1, "é"]})).to_vec();
            let at = at.index(content.len());
            content[at] = byte;
            let _ = max_attempts(&content);
            let _ = super::event(content.into(), &CONTEXT);
            let _ = super::event(any.into(), &CONTEXT);
        }
    }
}
