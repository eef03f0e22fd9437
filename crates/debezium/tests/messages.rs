//! The format for sinks without topics and null headers, byte for byte, and the way back.
//! `AIRTIGHT_BLESS=1 cargo test -p airtight-debezium --test messages` writes the file anew.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

use std::{fmt::Write, path::PathBuf};

use airtight_core::{
    Event, Op, Payload,
    format::{Carrier, Encoder, Formats, Incoming, decode},
};
use airtight_debezium::FORMAT;
use time::macros::datetime;

const KAFKA: Carrier = Carrier { has_key: true, has_tombstones: true, cloudevents_prefix: "ce_" };
const OTHER: Carrier = Carrier { has_key: false, has_tombstones: false, cloudevents_prefix: "ce-" };

fn event(op: Op, payload: Payload) -> Event {
    Event {
        id: "0198f3c2-7b1e-7c3a-9d2f-0a1b2c3d4e5f".into(),
        seq: 42,
        stream: "ivm.raw".into(),
        event_type: "RawDataIngested".into(),
        aggregate_type: "raw_data".into(),
        aggregate_id: "tenant-1:product-123".into(),
        op,
        payload,
        headers: [("source", "ingest"), ("id", "theirs")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        occurred_at: datetime!(2026-01-25 12:00:00.5 UTC),
        schema_version: 2,
        extra: serde_json::from_str(r#"{"market": "KRW-BTC"}"#).unwrap(),
        row: None,
    }
}

fn cases() -> [(&'static str, Event); 4] {
    let json =
        r#"{"tenantId": "tenant-1",  "entityKey": "product-123", "version": 1, "price": 1.10, "name": "빵"}"#;
    [
        ("json", event(Op::Upsert, Payload::Json(json.into()))),
        ("bytes", event(Op::Upsert, Payload::Bytes(vec![0, 159, 146, 150].into()))),
        ("delete", event(Op::Delete, Payload::None)),
        ("delete with a reason", event(Op::Delete, Payload::Json(r#"{"reason":"gdpr"}"#.into()))),
    ]
}

#[test]
fn messages_are_what_they_have_always_been() {
    let mut all = String::new();
    for (carrier_name, carrier) in [("kafka", KAFKA), ("other brokers", OTHER)] {
        for (name, event) in cases() {
            let message = Encoder::new(FORMAT, carrier).encode(&event);
            assert_eq!(message.content_type, None);
            writeln!(all, "=== {name}, {carrier_name}").unwrap();
            for (name, value) in &message.headers {
                writeln!(all, "{name}: {value}").unwrap();
            }
            match message.body.as_deref().map(|body| (std::str::from_utf8(body), &message.body)) {
                None => writeln!(all, "(no value)\n"),
                Some((Ok(text), _)) => writeln!(all, "\n{text}\n"),
                Some((Err(_), body)) => writeln!(all, "\n(bytes) {:?}\n", body.as_ref().unwrap()),
            }
            .unwrap();
        }
    }
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/messages.txt"));
    if std::env::var_os("AIRTIGHT_BLESS").is_some() {
        std::fs::write(&path, &all).unwrap();
    }
    assert_eq!(all, std::fs::read_to_string(&path).unwrap(), "not what {} says", path.display());
}

#[test]
fn a_message_comes_back_as_far_as_it_goes() {
    let incoming = Incoming {
        topic: "orders",
        place: "3/99".into(),
        offset: 99,
        written_at: Some(datetime!(2026-01-01 00:00 UTC)),
        key: Some(b"42"),
        body: Some("{\"total\":1}".into()),
        headers: vec![("id", b"abc"), ("tenant", b"t1")],
    };
    let event = decode(FORMAT, &incoming).unwrap();
    assert_eq!(
        (event.id.as_str(), event.stream.as_str(), event.aggregate_id.as_str()),
        ("abc", "orders", "42")
    );
    assert_eq!(event.payload, Payload::Json("{\"total\":1}".into()));
    assert_eq!(event.headers["tenant"], "t1");
    assert_eq!(event.occurred_at, datetime!(2026-01-01 00:00 UTC));
}

#[test]
fn a_config_may_name_it_where_it_was_added() {
    const FORMATS: Formats = Formats::with(&[FORMAT]);
    assert_eq!(FORMATS.parse("debezium").unwrap(), FORMAT);
    assert_eq!(FORMATS.all().last(), Some(FORMAT));
    let error = Formats::default().parse("debezium").unwrap_err();
    assert_eq!(error.code(), "bad_format");
    let error = FORMATS.parse("xml").unwrap_err();
    assert!(error.message().contains("`cloudevents-binary`, `debezium`"), "{error}");
}
