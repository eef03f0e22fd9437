//! Reads events as lines of JSON, checks them and groups them into batches that know their line numbers.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{self, BufRead, Read},
};

use airtight::{NewEvent, Op, Payload, event::MAX_PAYLOAD_BYTES};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::RawValue;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use uuid::Uuid;

use crate::config::suggest;

/// Events committed together.
const BATCH_EVENTS: usize = 1_000;
/// Payload bytes committed together, so that large events do not pile up.
const BATCH_BYTES: usize = 8 << 20;
/// The longest line: the largest payload in base64, and room for the rest.
const MAX_LINE: usize = MAX_PAYLOAD_BYTES / 3 * 4 + (1 << 20);

/// A part of the input.
#[derive(Debug)]
pub(super) enum Chunk {
    /// Events of these lines, first and last.
    Events { events: Vec<NewEvent>, first: u64, last: u64 },
    /// A line that cannot be an event; nothing follows.
    Bad { line: u64, message: String },
}

/// Reads to the end, or to the first bad line, and passes chunks to `send` until `send` returns false. The lines before
/// a bad line are passed first, so that the user can fix that line and continue from there.
pub(super) fn read(mut input: impl BufRead, mut send: impl FnMut(Chunk) -> bool) {
    let (mut events, mut first, mut bytes, mut line) = (Vec::new(), 1, 0, 0u64);
    let mut text = Vec::new();
    loop {
        line += 1;
        let parsed = match next_line(&mut input, &mut text) {
            Ok(false) => None,
            Ok(true) if text.trim_ascii().is_empty() => continue,
            Ok(true) => Some(parse(&text)),
            Err(error) => Some(Err(error.to_string())),
        };
        match parsed {
            Some(Ok(event)) => {
                if events.is_empty() {
                    first = line;
                }
                bytes += event.payload.len();
                events.push(event);
                if events.len() < BATCH_EVENTS && bytes < BATCH_BYTES {
                    continue;
                }
                bytes = 0;
                if !send(Chunk::Events { events: std::mem::take(&mut events), first, last: line }) {
                    return;
                }
            }
            end => {
                let sent = events.is_empty() || send(Chunk::Events { events, first, last: line - 1 });
                if let (true, Some(Err(message))) = (sent, end) {
                    send(Chunk::Bad { line, message });
                }
                return;
            }
        }
    }
}

fn next_line(input: &mut impl BufRead, text: &mut Vec<u8>) -> io::Result<bool> {
    text.clear();
    let read = input.take(MAX_LINE as u64 + 1).read_until(b'\n', text)?;
    if read > MAX_LINE {
        return Err(io::Error::other(format!("the line is longer than {MAX_LINE} bytes")));
    }
    Ok(read > 0)
}

/// One line. Accepts the envelope's names as well, so that the output of `tail --json` can be published.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Line<'a> {
    stream: Cow<'a, str>,
    #[serde(rename = "type", alias = "eventType", alias = "event_type")]
    event_type: Cow<'a, str>,
    #[serde(alias = "aggregate_type")]
    aggregate_type: Cow<'a, str>,
    #[serde(alias = "aggregate_id", alias = "key")]
    aggregate_id: Cow<'a, str>,
    #[serde(borrow, default)]
    payload: Option<&'a RawValue>,
    #[serde(alias = "payload_base64")]
    payload_base64: Option<String>,
    #[serde(default)]
    headers: Option<BTreeMap<String, String>>,
    #[serde(alias = "eventId", alias = "event_id")]
    id: Option<String>,
    op: Option<String>,
    #[serde(alias = "occurred_at")]
    occurred_at: Option<String>,
    #[serde(alias = "schema_version")]
    schema_version: Option<i32>,
    #[serde(alias = "max_attempts")]
    max_attempts: Option<i32>,
    /// The seq in another outbox; this outbox assigns its own.
    #[serde(rename = "seq")]
    _seq: Option<IgnoredAny>,
    trace_id: Option<String>,
}

const FIELDS: [&str; 14] = [
    "stream",
    "type",
    "aggregateType",
    "aggregateId",
    "payload",
    "payloadBase64",
    "headers",
    "id",
    "eventId",
    "op",
    "occurredAt",
    "schemaVersion",
    "maxAttempts",
    "traceId",
];

fn parse(text: &[u8]) -> Result<NewEvent, String> {
    let line: Line<'_> = serde_json::from_slice(text).map_err(|error| json_error(&error))?;
    let mut event = NewEvent::new(line.stream, line.event_type, line.aggregate_type, line.aggregate_id);
    // The envelope of an event with bytes has a null for its JSON.
    let json = line.payload.filter(|json| line.payload_base64.is_none() || json.get() != "null");
    event.payload = match (json, line.payload_base64) {
        (Some(_), Some(_)) => {
            return Err("`payload` and `payloadBase64` are both given: give one of them".into());
        }
        (Some(json), None) => Payload::Json(json.get().to_owned().into()),
        (None, Some(text)) => {
            let bytes = BASE64_STANDARD
                .decode(&text)
                .map_err(|error| format!("`payloadBase64` is not base64: {error}"))?;
            Payload::Bytes(bytes.into())
        }
        (None, None) => Payload::None,
    };
    event.headers = line.headers.unwrap_or_default();
    if let Some(trace_id) = line.trace_id
        && !event.headers.contains_key("traceparent")
    {
        event.headers.entry("traceId".into()).or_insert(trace_id);
    }
    if let Some(id) = line.id {
        event.id = Some(Uuid::parse_str(&id).map_err(|_| format!("`id` must be a UUID, found `{id}`"))?);
    }
    if let Some(op) = line.op {
        event.op = Op::parse(&op).map_err(|error| error.to_string())?;
    }
    if let Some(at) = line.occurred_at {
        let parsed = OffsetDateTime::parse(&at, &Rfc3339);
        event.occurred_at = Some(
            parsed.map_err(|_| format!("`occurredAt` must look like 2026-01-31T12:00:00Z, found `{at}`"))?,
        );
    }
    event.schema_version = line.schema_version.unwrap_or(1);
    event.max_attempts = line.max_attempts;
    event.validate().map_err(|error| error.to_string())?;
    Ok(event)
}

/// serde's message, with a suggestion instead of the whole list, and without its "line 1".
fn json_error(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default();
    if let Some(rest) = message.strip_prefix("unknown field `") {
        let name = rest.split('`').next().unwrap_or_default();
        return format!("unknown field `{name}`{}", suggest::hint(name, &FIELDS, "known fields"));
    }
    if error.is_syntax() || error.is_eof() {
        return format!("not valid JSON: {message} (column {})", error.column());
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(text: &str) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        read(text.as_bytes(), |chunk| {
            chunks.push(chunk);
            true
        });
        chunks
    }

    const GOOD: &str = r#"{"stream":"s","type":"T","aggregateType":"A","aggregateId":"1"}"#;

    #[test]
    fn an_envelope_can_be_published_again() {
        let mut event = airtight_testkit::deliveries::sample_event(7, "k");
        event.headers.insert("traceId".into(), "t".into());
        let text = String::from_utf8(airtight::envelope::to_vec(&event)).unwrap();
        let parsed = parse(text.as_bytes()).unwrap();
        assert_eq!(parsed.id.unwrap().to_string(), event.id);
        assert_eq!((parsed.payload, parsed.headers), (event.payload.clone(), event.headers.clone()));
        assert_eq!(parsed.occurred_at, Some(event.occurred_at));

        event.payload = Payload::Bytes(vec![0, 255, 7].into());
        let text = airtight::envelope::to_vec(&event);
        assert_eq!(parse(&text).unwrap().payload, event.payload);
    }

    #[test]
    fn the_payload_is_kept_byte_for_byte() {
        let line = GOOD.replace('}', r#","payload":{"b": 1.10,"a":[1e2]}}"#);
        assert_eq!(parse(line.as_bytes()).unwrap().payload, Payload::Json(r#"{"b": 1.10,"a":[1e2]}"#.into()));
    }

    #[test]
    fn what_stands_before_a_bad_line_comes_first() {
        let chunks = chunks(&format!("{GOOD}\n\n{GOOD}\n{{oops\n{GOOD}\n"));
        let [Chunk::Events { events, first: 1, last: 3 }, Chunk::Bad { line: 4, message }] = &chunks[..]
        else {
            panic!("{chunks:?}");
        };
        assert_eq!(events.len(), 2);
        assert!(message.starts_with("not valid JSON: "), "{message}");
    }

    #[test]
    fn batches_hold_a_thousand() {
        let chunks = chunks(&format!("{GOOD}\n").repeat(2_500));
        let sizes: Vec<usize> = chunks
            .iter()
            .map(|chunk| match chunk {
                Chunk::Events { events, .. } => events.len(),
                Chunk::Bad { .. } => 0,
            })
            .collect();
        assert_eq!(sizes, [1_000, 1_000, 500]);
    }

    #[test]
    fn bad_lines_say_why() {
        for (line, expected) in [
            (GOOD.replace("stream", "strem"), "unknown field `strem`; did you mean `stream`?"),
            (GOOD.replace('}', r#","op":"drop"}"#), "op must be `upsert` or `delete`, found `drop`"),
            (GOOD.replace('}', r#","id":"7"}"#), "`id` must be a UUID, found `7`"),
            (GOOD.replace('}', r#","occurredAt":"today"}"#), "`occurredAt` must look like"),
            (GOOD.replace("\"1\"", "\"\""), "aggregate_id is empty"),
            (GOOD.replace('}', r#","payload":{"a":"\u0000"}}"#), "payload holds a NUL character"),
            (r#"{"stream":"s"}"#.to_owned(), "missing field `type`"),
            ("[]".to_owned(), "invalid length 0"),
        ] {
            let message = parse(line.as_bytes()).unwrap_err();
            assert!(message.starts_with(expected), "{line}: {message}");
        }
    }
}
