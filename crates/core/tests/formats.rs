//! Every format, byte for byte: the files in `golden/` are what consumers rely on. A change to one of them is a
//! change that breaks somebody; `AIRTIGHT_BLESS=1 cargo test -p airtight-core --test formats` writes them anew.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

use std::{fmt::Write, path::PathBuf};

use airtight_core::{
    Event, Format, Op, Payload,
    format::{Carrier, Encoder, Incoming, Message, decode},
};
use proptest::prelude::*;
use time::macros::datetime;

const KAFKA: Carrier = Carrier { has_key: true, has_tombstones: true, cloudevents_prefix: "ce_" };
const OTHER: Carrier = Carrier { has_key: false, has_tombstones: false, cloudevents_prefix: "ce-" };

/// A typical event, with a JSON payload.
fn ingested() -> Event {
    Event {
        id: "0198f3c2-7b1e-7c3a-9d2f-0a1b2c3d4e5f".into(),
        seq: 42,
        stream: "ivm.raw".into(),
        event_type: "RawDataIngested".into(),
        aggregate_type: "raw_data".into(),
        aggregate_id: "tenant-1:product-123".into(),
        op: Op::Upsert,
        payload: Payload::Json(
            r#"{"tenantId": "tenant-1",  "entityKey": "product-123", "version": 1, "price": 1.10, "name": "빵"}"#.into(),
        ),
        headers: [
            ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            ("source", "ingest"),
            // Names that mean something else to airtight, or to CloudEvents.
            ("id", "theirs"),
            ("X-Tenant", "tenant-1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into(),
        occurred_at: datetime!(2026-01-25 12:00:00.5 UTC),
        schema_version: 2,
        extra: serde_json::from_str(r#"{"market": "KRW-BTC", "shard": 3, "source": "column"}"#).unwrap(),
        row: None,
    }
}

fn bytes() -> Event {
    let payload = Payload::Bytes(vec![0, 159, 146, 150].into());
    Event { payload, headers: Default::default(), extra: Default::default(), ..ingested() }
}

fn deleted(payload: Payload) -> Event {
    Event { op: Op::Delete, payload, headers: Default::default(), extra: Default::default(), ..ingested() }
}

fn cases() -> Vec<(&'static str, Event)> {
    vec![
        ("json", ingested()),
        ("bytes", bytes()),
        ("delete", deleted(Payload::None)),
        ("delete with a reason", deleted(Payload::Json(r#"{"reason":"gdpr"}"#.into()))),
    ]
}

fn shown(message: &Message<'_>) -> String {
    let mut out = String::new();
    if let Some(content_type) = message.content_type {
        writeln!(out, "content type: {content_type}").unwrap();
    }
    for (name, value) in &message.headers {
        writeln!(out, "{name}: {value}").unwrap();
    }
    match &message.body {
        None => writeln!(out, "(no value)"),
        Some(body) => match std::str::from_utf8(body) {
            Ok(text) => writeln!(out, "\n{text}"),
            Err(_) => writeln!(out, "\n(bytes) {body:?}"),
        },
    }
    .unwrap();
    out
}

#[test]
fn messages_are_what_they_have_always_been() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden"));
    for format in Format::ALL {
        let mut all = String::new();
        for (carrier_name, carrier) in [("kafka", KAFKA), ("other brokers", OTHER)] {
            for (name, event) in cases() {
                let message = Encoder::new(format, carrier).encode(&event);
                write!(all, "=== {name}, {carrier_name}\n{}\n", shown(&message)).unwrap();
            }
        }
        let path = folder.join(format!("{}.txt", format.as_str()));
        if std::env::var_os("AIRTIGHT_BLESS").is_some() {
            std::fs::write(&path, &all).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap();
        assert_eq!(all, golden, "{} is not what {} says", format.as_str(), path.display());
    }
}

/// As a consumer gets it.
fn received(format: Format, carrier: Carrier, event: &Event) -> Event {
    let message = Encoder::new(format, carrier).encode(event);
    let mut headers: Vec<(&str, &[u8])> =
        message.headers.iter().map(|(name, value)| (&**name, value.as_bytes())).collect();
    if let Some(content_type) = message.content_type {
        headers.push(("content-type", content_type.as_bytes()));
    }
    let incoming = Incoming {
        topic: "some.topic",
        place: "0/7".into(),
        offset: 7,
        written_at: None,
        key: carrier.has_key.then_some(event.aggregate_id.as_bytes()),
        body: message.body.clone(),
        headers,
    };
    decode(format, &incoming).unwrap()
}

fn event() -> impl Strategy<Value = Event> {
    let text = "[a-zA-Z0-9 :./%äé鍵\"\\\\-]{1,24}";
    let payload = prop_oneof![
        Just(Payload::None),
        Just(Payload::Json("{\"a\": [1.10, null], \"ü\":\"x\\ny\"}".into())),
        Just(Payload::Json("42".into())),
        proptest::collection::vec(any::<u8>(), 1..64).prop_map(|bytes| Payload::Bytes(bytes.into())),
    ];
    let headers = proptest::collection::btree_map("[a-z]{1,10}|traceparent|eventType|payload|op", text, 0..4);
    (text, any::<i64>(), text, text, (text, text), (any::<bool>(), payload, headers, 0i32..9)).prop_map(
        |(
            id,
            seq,
            stream,
            event_type,
            (aggregate_type, aggregate_id),
            (delete, payload, headers, version),
        )| Event {
            id,
            seq,
            stream,
            event_type,
            aggregate_type,
            aggregate_id,
            op: if delete { Op::Delete } else { Op::Upsert },
            payload,
            headers,
            occurred_at: datetime!(2026-01-25 12:00:00.123456 UTC),
            schema_version: version,
            extra: Default::default(),
            row: None,
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_comes_back(event in event()) {
        for carrier in [KAFKA, OTHER] {
            for format in [Format::Raw, Format::Envelope, Format::Event] {
                prop_assert_eq!(&received(format, carrier, &event), &event, "{}", format.as_str());
            }
            for format in [Format::CloudEvents, Format::CloudEventsBinary] {
                let mut back = received(format, carrier, &event);
                // Headers whose names CloudEvents does not allow, or has taken, are not carried.
                back.headers.clone_from(&event.headers);
                prop_assert_eq!(&back, &event, "{}", format.as_str());
            }
        }
    }
}

#[test]
fn messages_of_others_come_back_as_far_as_they_go() {
    let incoming = Incoming {
        topic: "orders",
        place: "3/99".into(),
        offset: 99,
        written_at: Some(datetime!(2026-01-01 00:00 UTC)),
        key: Some(b"42"),
        body: Some("{\"total\":1}".into()),
        headers: vec![("id", b"abc"), ("tenant", b"t1")],
    };
    let event = decode(Format::Raw, &incoming).unwrap();
    assert_eq!(
        (event.id.as_str(), event.stream.as_str(), event.aggregate_id.as_str()),
        ("abc", "orders", "42")
    );
    assert_eq!(event.headers["tenant"], "t1");
    assert_eq!(event.occurred_at, datetime!(2026-01-01 00:00 UTC));
    let bare = decode(Format::Raw, &Incoming { headers: vec![], key: None, ..incoming.clone() }).unwrap();
    assert_eq!((bare.id.as_str(), bare.seq), ("orders/3/99", 99));
    let not_json = decode(Format::Raw, &Incoming { body: Some("plain".into()), ..incoming.clone() }).unwrap();
    assert_eq!(not_json.payload, Payload::Bytes("plain".into()));
}

#[test]
fn what_is_not_of_the_format_is_refused_with_the_reason() {
    let body = |text: &str| Incoming { body: Some(text.to_owned().into()), ..Incoming::default() };
    for (format, incoming, expected) in [
        (Format::Envelope, body("{oops"), "not a JSON object"),
        (Format::Envelope, body("{\"type\":\"x\"}"), "has no `eventId`"),
        (Format::Envelope, body("{\"eventId\":1}"), "`eventId` that is not text"),
        (Format::Envelope, body("{\"eventId\":\"x\",\"op\":\"merge\"}"), "`merge`"),
        (Format::Event, body("[]"), "not a JSON object"),
        (Format::Event, body("{\"eventId\":\"x\",\"timestamp\":\"noon\"}"), "RFC 3339"),
        (Format::CloudEvents, body("{\"specversion\":\"0.3\",\"id\":\"x\"}"), "0.3"),
        (Format::CloudEvents, Incoming::default(), "has no body"),
        (Format::CloudEventsBinary, body("{}"), "no `ce_specversion`"),
        (Format::Raw, Incoming { key: Some(&[255]), ..body("{}") }, "key that is not UTF-8"),
    ] {
        let error = decode(format, &incoming).unwrap_err();
        assert!(error.message().contains(expected), "{error} should say {expected}");
        assert_eq!(error.code(), if expected == "`merge`" { "bad_op" } else { "bad_message" });
    }
}
