//! Converters other than the `StringConverter`.

use super::{
    BYTEA, Case, EXPAND, OUTBOX, PLACEMENT, TEXT, TYPES, TYPES_ENVELOPE, documents, event, more, texts, typed,
};

/// With the `JsonConverter`.
pub(super) fn json() -> Vec<Case> {
    let version = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text NOT NULL, payload jsonb NOT NULL, ver int4";
    let versioned = |topic: &str, value: &str| more(topic, "key-1", "'{}'", ", ver", &format!(", {value}"));
    let keys = "id uuid PRIMARY KEY, aggregatetype text, aggregateid int8, type text, payload text";
    let keyed = |topic: &str, key: &str| {
        format!(
            "(id, aggregatetype, aggregateid, payload) VALUES ('00000000-0000-4000-8000-000{{id}}', '{topic}', {key}, 'x')"
        )
    };
    vec![
        Case::new("text_as_json", "`text` payload, `JsonConverter` without schemas", TEXT, texts("TextJson"))
            .convert("json", "json", "json"),
        Case::new(
            "text_as_json_schemas",
            "`text` payload, `JsonConverter` with schemas",
            TEXT,
            texts("TextSchemas"),
        )
        .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new(
            "jsonb_as_json",
            "`jsonb` payload is a string in a string",
            OUTBOX,
            vec![event("JsonbJson", "key-1", "'{\"a\": \"b\"}'")],
        )
        .convert("string", "json", "simple"),
        Case::new(
            "jsonb_as_json_schemas",
            "`jsonb` payload with schemas",
            OUTBOX,
            vec![event("JsonbSchemas", "key-1", "'{\"a\": \"b\"}'")],
        )
        .convert("string", "json-schemas", "simple"),
        Case::new(
            "bytea_as_json",
            "`bytea` payload as JSON",
            BYTEA,
            vec![event("ByteaJson", "key-1", "'\\xdeadbeef'"), event("ByteaJson", "key-1", "NULL")],
        )
        .convert("string", "json", "simple"),
        Case::new(
            "bytea_as_json_schemas",
            "`bytea` payload as JSON with schemas",
            BYTEA,
            vec![event("ByteaSchemas", "key-1", "'\\xdeadbeef'")],
        )
        .convert("string", "json-schemas", "simple"),
        Case::new("tombstones_as_json", "tombstones without schemas", TEXT, texts("TombstoneJson"))
            .with("route.tombstone.on.empty.payload", "true")
            .convert("string", "json", "simple"),
        Case::new("tombstones_as_json_schemas", "tombstones with schemas", TEXT, texts("TombstoneSchemas"))
            .with("route.tombstone.on.empty.payload", "true")
            .convert("string", "json-schemas", "simple"),
        Case::new("envelope_as_json", "envelope of every common type", TYPES, typed("EnvelopeJson"))
            .with(PLACEMENT, TYPES_ENVELOPE)
            .convert("json", "json", "json"),
        Case::new(
            "envelope_as_json_schemas",
            "envelope of every common type, with schemas",
            TYPES,
            typed("EnvelopeSchemas"),
        )
        .with(PLACEMENT, TYPES_ENVELOPE)
        .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new(
            "envelope_alias",
            "envelope with other names, and a header",
            OUTBOX,
            vec![event("EnvelopeAlias", "key-1", "'{}'"), event("EnvelopeAlias", "key-1", "NULL")],
        )
        .with(PLACEMENT, "type:envelope:eventType,aggregatetype:header:aggregate,id:envelope")
        .convert("string", "json-schemas", "simple"),
        Case::new(
            "envelope_tombstone",
            "envelope, null payload and tombstones",
            OUTBOX,
            vec![event("EnvelopeTombstone", "key-1", "NULL")],
        )
        .with(PLACEMENT, "type:envelope")
        .with("route.tombstone.on.empty.payload", "true")
        .convert("string", "json-schemas", "simple"),
        Case::new(
            "schema_version",
            "`table.field.event.schema.version`",
            version,
            vec![versioned("Version", "3"), versioned("Version", "4"), versioned("Version", "NULL")],
        )
        .with("table.field.event.schema.version", "ver")
        .with(PLACEMENT, "type:envelope")
        .convert("string", "json-schemas", "simple"),
        Case::new(
            "schema_version_unused",
            "`table.field.event.schema.version` without an envelope",
            version,
            vec![versioned("VersionUnused", "3")],
        )
        .with("table.field.event.schema.version", "ver")
        .convert("string", "json-schemas", "simple"),
        Case::new(
            "key_int8_as_json",
            "an `int8` key as JSON, and none",
            keys,
            vec![keyed("KeyJson", "5"), keyed("KeyJson", "NULL")],
        )
        .convert("json", "json", "json"),
        Case::new(
            "key_int8_as_json_schemas",
            "an `int8` key with schemas, and none",
            keys,
            vec![keyed("KeySchemas", "5"), keyed("KeySchemas", "NULL")],
        )
        .convert("json-schemas", "json-schemas", "json-schemas"),
    ]
}

/// `table.expand.json.payload`.
pub(super) fn expansion() -> Vec<Case> {
    let expanded = |name, about, topic| {
        let case = Case::new(name, about, TEXT, documents(topic));
        case.with(EXPAND.0, EXPAND.1)
    };
    vec![
        expanded("expanded_as_json", "`table.expand.json.payload`, without schemas", "ExpandedJson")
            .convert("string", "json", "simple"),
        expanded("expanded_as_json_schemas", "`table.expand.json.payload`, with schemas", "ExpandedSchemas")
            .convert("string", "json-schemas", "simple"),
        expanded(
            "expanded_as_string",
            "`table.expand.json.payload` through the `StringConverter`",
            "ExpandedString",
        ),
        expanded(
            "expanded_nulls",
            "`table.expand.json.payload` with `table.json.payload.null.behavior=optional_bytes`",
            "ExpandedNulls",
        )
        .with("table.json.payload.null.behavior", "optional_bytes")
        .convert("string", "json-schemas", "simple"),
        Case::new(
            "expanded_jsonb",
            "`table.expand.json.payload` of a `jsonb` column, and of none",
            OUTBOX,
            vec![
                event("ExpandedJsonb", "key-1", r#"'{"b": {"a": 1}, "aa": [], "c": null}'"#),
                event("ExpandedJsonb", "key-1", "NULL"),
            ],
        )
        .with(EXPAND.0, EXPAND.1)
        .convert("string", "json-schemas", "simple"),
        Case::new(
            "expanded_envelope",
            "`table.expand.json.payload` in an envelope",
            OUTBOX,
            vec![
                event("ExpandedEnvelope", "key-1", r#"'{"b": {"a": 1}}'"#),
                event("ExpandedEnvelope", "key-1", r#"'[1]'"#),
                event("ExpandedEnvelope", "key-1", r#"'[]'"#),
                event("ExpandedEnvelope", "key-1", "NULL"),
                event("ExpandedEnvelope", "key-1", r#"'{"c": "x"}'"#),
            ],
        )
        .with(EXPAND.0, EXPAND.1)
        .with(PLACEMENT, "type:envelope")
        .convert("string", "json-schemas", "simple"),
    ]
}

/// Bytes as they are.
pub(super) fn binary() -> Vec<Case> {
    let rows = |topic: &str| {
        vec![
            event(topic, "key-1", "'\\x00ff10'"),
            event(topic, "key-1", "'\\x'"),
            event(topic, "key-1", "NULL"),
        ]
    };
    vec![
        Case::new("bytea_as_bytes", "`bytea` payload, `ByteArrayConverter`", BYTEA, rows("Bytes"))
            .convert("string", "bytes", "simple"),
        Case::new(
            "bytea_as_bytes_tombstones",
            "`bytea` payload and tombstones",
            BYTEA,
            rows("BytesTombstone"),
        )
        .with("route.tombstone.on.empty.payload", "true")
        .convert("string", "bytes", "simple"),
        Case::new("bytea_twice", "`bytea` payload that is also in a header", BYTEA, rows("BytesTwice"))
            .with(PLACEMENT, "payload:header:copy")
            .convert("string", "bytes", "simple"),
        Case::new(
            "bytea_as_binary",
            "`bytea` payload, Debezium's `BinaryDataConverter`",
            BYTEA,
            rows("Binary"),
        )
        .convert("string", "binary", "simple"),
        Case::new(
            "text_as_bytes",
            "`text` payload, `ByteArrayConverter`",
            TEXT,
            vec![event("TextBytes", "key-1", "'x'")],
        )
        .convert("string", "bytes", "simple"),
        Case::new(
            "text_as_binary",
            "`text` payload, `BinaryDataConverter` without a delegate",
            TEXT,
            vec![event("TextBinary", "key-1", "'x'")],
        )
        .convert("string", "binary", "simple"),
        Case::new(
            "text_as_binary_json",
            "`text` payload, `BinaryDataConverter` with the `JsonConverter` behind it",
            TEXT,
            texts("TextBinaryJson"),
        )
        .convert("string", "binary+json", "simple"),
        Case::new(
            "bytea_as_binary_json",
            "`bytea` payload, `BinaryDataConverter` with the `JsonConverter` behind it",
            BYTEA,
            rows("BinaryJson"),
        )
        .convert("string", "binary+json", "simple"),
    ]
}
