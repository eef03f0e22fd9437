use airtight_core::table::StatusSpec;
use time::macros::datetime;

use super::*;

const CONTEXT: RowOptions = RowOptions { max_payload: 1000, keep_row: false };

fn columns(names: &[(&str, u32)]) -> Arc<[SourceColumn]> {
    let column = |&(name, type_oid): &(&str, u32)| SourceColumn {
        name: name.into(),
        type_oid,
        type_modifier: -1,
        nullable: true,
    };
    names.iter().map(column).collect()
}

fn canonical_columns() -> Arc<[SourceColumn]> {
    columns(&[
        ("seq", oid::INT8),
        ("id", oid::UUID),
        ("stream", oid::TEXT),
        ("event_type", oid::TEXT),
        ("aggregate_type", oid::TEXT),
        ("aggregate_id", oid::TEXT),
        ("op", oid::TEXT),
        ("payload", oid::JSONB),
        ("payload_bytes", oid::BYTEA),
        ("headers", oid::JSONB),
        ("occurred_at", oid::TIMESTAMPTZ),
        ("schema_version", oid::INT4),
        ("max_attempts", oid::INT4),
        ("status", oid::TEXT),
        ("created_at", oid::TIMESTAMPTZ),
    ])
}

fn row() -> Vec<Option<Bytes>> {
    [
        Some("7"),
        Some("0192f3a4-0000-7000-8000-000000000001"),
        Some("shop"),
        Some("Placed"),
        Some("Order"),
        Some("42"),
        Some("upsert"),
        Some(r#"{"a": 1}"#),
        None,
        Some(r#"{"h": "v"}"#),
        Some("2026-11-16 05:47:43.5+00"),
        Some("2"),
        Some("9"),
        Some("pending"),
        Some("2026-11-16 05:47:43+00"),
    ]
    .map(|text| text.map(Bytes::from))
    .to_vec()
}

fn canonical() -> TableSpec {
    TableSpec::canonical(Some("airtight"), "outbox")
}

fn set(values: &mut [Option<Bytes>], name: &str, text: Option<&'static str>) {
    let at = canonical_columns().iter().position(|column| column.name == name).unwrap();
    values[at] = text.map(Bytes::from);
}

#[test]
fn reads_the_canonical_row_without_its_generated_columns() {
    let mapping = Mapping::new(&canonical(), canonical_columns()).unwrap();
    let values = row();
    let event = mapping.event(values.clone(), &CONTEXT).unwrap();
    assert_eq!((event.seq, event.id.as_str()), (7, "0192f3a4-0000-7000-8000-000000000001"));
    assert_eq!((event.stream.as_str(), event.aggregate_id.as_str(), event.schema_version), ("shop", "42", 2));
    assert_eq!(event.occurred_at, datetime!(2026-11-16 05:47:43.5 UTC));
    assert_eq!(event.headers["h"], "v");
    assert_eq!(mapping.max_attempts(&values), Some(9));
    assert_eq!(mapping.identity(&values), Some(&Bytes::from("7")));
    assert_eq!(mapping.stream(&values).as_deref(), Some("shop"));
    assert_eq!(event.row, None);

    let Payload::Json(payload) = &event.payload else { panic!("{:?}", event.payload) };
    assert_eq!(payload.as_ptr(), values[7].as_ref().unwrap().as_ptr(), "the payload was copied");
}

#[test]
fn keeps_the_row_when_asked() {
    let mapping = Mapping::new(&canonical(), canonical_columns()).unwrap();
    let event = mapping.event(row(), &RowOptions { keep_row: true, ..CONTEXT }).unwrap();
    let kept = event.row.unwrap();
    assert_eq!(kept.values, row());
    assert_eq!(kept.get("op").unwrap().1, Some(&Bytes::from("upsert")));
}

#[test]
fn a_bad_row_says_why_and_keeps_its_id_and_key() {
    let mapping = Mapping::new(&canonical(), canonical_columns()).unwrap();
    for (column, text, code, expected) in [
        ("stream", None, "bad_row", "stream is NULL, which the mapping does not allow"),
        ("seq", None, "bad_row", "seq: it is NULL"),
        ("seq", Some("x"), "bad_row", "column seq: not a whole number"),
        ("op", Some("insert"), "bad_op", "op must be"),
        ("headers", Some(r#"{"a": 1}"#), "bad_headers", "headers are not a JSON object of strings"),
        ("occurred_at", Some("soon"), "bad_row", "column occurred_at: not a time in ISO form: `soon`"),
        ("schema_version", Some("4294967296"), "bad_row", "over 32 bits"),
    ] {
        let mut values = row();
        set(&mut values, column, text);
        let bad = mapping.event(values.clone(), &CONTEXT).unwrap_err();
        assert_eq!(bad.error.code(), code);
        assert!(bad.error.message().contains(expected), "{} should say {expected}", bad.error);
        assert!(bad.error.message().starts_with("event 0192f3a4-"), "{}", bad.error);
        assert_eq!(bad.key.as_deref(), Some("42"));
    }
    let bad = mapping.event(row()[1..].to_vec(), &CONTEXT).unwrap_err();
    assert!(bad.error.message().contains("the row has 14 values, the table 15 columns"), "{}", bad.error);
}

#[test]
fn a_payload_that_is_too_large_is_refused_in_every_kind() {
    let tiny = RowOptions { max_payload: 4, ..CONTEXT };
    let mapping = Mapping::new(&canonical(), canonical_columns()).unwrap();
    let too_large = |values: &[Option<Bytes>], bytes: &str| {
        let bad = mapping.event(values.to_vec(), &tiny).unwrap_err();
        assert_eq!(bad.error.code(), "too_large");
        assert!(bad.error.message().contains(bytes), "{}", bad.error);
    };
    let mut values = row();
    too_large(&values, "payload has 8 bytes, the limit is 4");
    set(&mut values, "payload", None);
    assert_eq!(mapping.event(values.clone(), &tiny).unwrap().payload, Payload::None);
    set(&mut values, "payload_bytes", Some("\\x0001020304"));
    too_large(&values, "payload has 5 bytes, the limit is 4");
    set(&mut values, "payload_bytes", Some("abcde"));
    too_large(&values, "payload has 5 bytes, the limit is 4");
    set(&mut values, "payload_bytes", Some("\\x00010203"));
    let event = mapping.event(values.clone(), &tiny).unwrap();
    assert_eq!(event.payload, Payload::Bytes(vec![0, 1, 2, 3].into()));
}

#[test]
fn a_table_that_does_not_fit_is_refused_by_name() {
    let mut spec = canonical();
    spec.payload = "body".into();
    spec.extra = vec![("tenant".into(), "tenant_id".into())];
    let error = Mapping::new(&spec, canonical_columns()).unwrap_err();
    assert_eq!(error.code(), "bad_column");
    assert!(error.message().contains("airtight.outbox has no column body, tenant_id"), "{error}");

    let error = Mapping::new(&TableSpec::relay_log(), canonical_columns()).unwrap_err();
    assert_eq!(error.code(), "no_lookup");

    let spec = TableSpec { occurred_at: Some("stream".into()), ..canonical() };
    let error = Mapping::new(&spec, canonical_columns()).unwrap_err();
    assert!(error.message().contains("column stream (type 25) does not hold a time"), "{error}");

    let spec = TableSpec { payload_bytes: Some("headers".into()), ..canonical() };
    let error = Mapping::new(&spec, canonical_columns()).unwrap_err();
    assert!(error.message().contains("column headers (type 3802) does not hold bytes"), "{error}");
}

#[test]
fn a_named_zone_is_refused_only_where_it_matters() {
    let spec = TableSpec { zone: "Asia/Seoul".into(), ..canonical() };
    Mapping::new(&spec, canonical_columns()).unwrap();
    let mut with_timestamp = canonical_columns().to_vec();
    with_timestamp[10].type_oid = oid::TIMESTAMP;
    let error = Mapping::new(&spec, with_timestamp.into()).unwrap_err();
    assert_eq!(error.code(), "bad_zone");
    assert!(error.message().contains("Asia/Seoul"), "{error}");
}

#[test]
fn an_open_row_is_known_by_its_word_and_condition() {
    let mapping = Mapping::new(&canonical(), canonical_columns()).unwrap();
    for (word, open) in [
        (Some("pending"), true),
        (Some("processing"), true),
        (Some("done"), false),
        (Some("dead"), false),
        (Some("unknown"), false),
        (None, false),
    ] {
        let mut values = row();
        set(&mut values, "status", word);
        assert_eq!(mapping.is_open(&values), open, "{word:?}");
    }
    let log = Mapping::new(&TableSpec::canonical_log(None, "outbox"), canonical_columns()).unwrap();
    assert!(log.is_open(&row()));

    let when = |test| Condition { column: "max_attempts".into(), test, value: 5 };
    let spec = TableSpec {
        status: Some(StatusSpec {
            column: "status".into(),
            new: Role::word("new"),
            retrying: Role::when("failed", when(Test::Less)),
            processing: None,
            done: Role::word("done"),
            dead: Role::when("failed", when(Test::AtLeast)),
            unknown: None,
        }),
        ..canonical()
    };
    let mapping = Mapping::new(&spec, canonical_columns()).unwrap();
    for (word, count, open) in [
        ("new", Some("9"), true),
        ("failed", Some("4"), true),
        ("failed", Some("5"), false),
        ("failed", Some("4.5"), true),
        ("failed", None, true),
        // Nobody knows: rather twice than never.
        ("failed", Some("?"), true),
    ] {
        let mut values = row();
        set(&mut values, "status", Some(word));
        set(&mut values, "max_attempts", count);
        assert_eq!(mapping.is_open(&values), open, "{word} {count:?}");
    }
}

#[test]
fn status_words_compare_as_their_type_does() {
    for (type_oid, status, word, same) in [
        (oid::BPCHAR, "new     ", "new", true),
        (oid::TEXT, "new ", "new", false),
        (oid::BOOL, "f", "false", true),
        (oid::BOOL, "t", "false", false),
        (oid::INT2, "1", "1", true),
    ] {
        assert_eq!(is_word(type_oid, status.as_bytes(), word), same, "{status} {word}");
    }
}

#[test]
fn an_insert_has_all_its_values() {
    use crate::cdc::pgoutput::{Message, parse};
    let insert = |columns: &'static [u8]| {
        let message = [&b"I\0\0\0\x07N"[..], columns].concat();
        let Ok(Message::Insert { tuple, .. }) = parse(message.into()) else { panic!("not an insert") };
        texts(&tuple, &super::tests::columns(&[("a", oid::INT2), ("b", oid::TEXT)]))
    };
    let values = insert(b"\0\x02b\0\0\0\x02\0\x05n").unwrap();
    assert_eq!(values, [Some(Bytes::from("5")), None]);
    assert!(insert(b"\0\x01u").unwrap_err().message().contains("left out"));
}
