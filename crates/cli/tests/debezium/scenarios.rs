//! What both are asked to do: tables, connectors, and what happens in the database.

use super::support::{BINARY, JSON, STRING};

/// How the connector's file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Flat JSON.
    Json,
    /// JSON with `name` and `config`, as Connect's API answers.
    Api,
    /// Java properties, with what the worker knows in the worker's own file.
    Properties,
}

/// One table, with a connector of its own on either side.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// With its schema.
    pub(crate) table: &'static str,
    pub(crate) form: Form,
    pub(crate) setup: String,
    pub(crate) options: Vec<(&'static str, &'static str)>,
    /// Before anybody reads.
    pub(crate) before: String,
    /// While both read.
    pub(crate) statements: String,
    /// How many messages must come of it.
    pub(crate) expected: usize,
}

pub(crate) fn all() -> Vec<Scenario> {
    vec![plain(), typed(), routed(), snapshot(), binary(), renamed()]
}

/// Debezium's own table.
fn outbox(table: &str, payload: &str) -> String {
    format!(
        "CREATE TABLE {table} (id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, \
         aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload {payload});"
    )
}

/// Rows of it, `n` of them, over `keys` keys.
fn rows(table: &str, topic: &str, n: usize, keys: usize, payload: &str) -> String {
    format!(
        "INSERT INTO {table} SELECT gen_random_uuid(), '{topic}', 'key-' || n % {keys}, 'Happened', {payload} \
         FROM generate_series(1, {n}) n;"
    )
}

/// The defaults, converters of the worker.
fn plain() -> Scenario {
    let texts = r#"INSERT INTO plain VALUES
        (gen_random_uuid(), 'Order', '한글 😀', 'Placed', '{"text": "q\"uo\\te\nline 한글 😀", "n": 1.10, "e": []}'),
        (gen_random_uuid(), 'order', '', 'Placed', 'null'), (gen_random_uuid(), 'order', ' ', 'Placed', '"text"'),
        (gen_random_uuid(), 'Order', '42', '', NULL), (gen_random_uuid(), 'Order', '42', 'Placed', '[1, 2]');"#;
    let large = rows("plain", "Large", 3, 1, "jsonb_build_object('filler', repeat('x', 200000))");
    Scenario {
        name: "plain",
        table: "public.plain",
        form: Form::Properties,
        setup: outbox("plain", "jsonb"),
        options: vec![("topic.prefix", "shop")],
        before: String::new(),
        statements: [texts, &rows("plain", "Order", 200, 17, "jsonb_build_object('n', n)"), &large].concat(),
        expected: 208,
    }
}

const TYPES: &str = "t text, v varchar(20), i2 int2, i4 int4, i8 int8, b bool, f4 float4, f8 float8, n102 numeric(10,2), \
    u uuid, d date, tm time, ts timestamp, tz timestamptz, iv interval, j jsonb, y bytea, ta text[]";
// Not a time that is nothing but zero: librdkafka takes that for the time of sending.
const VALUES: [&str; 3] = [
    r#"'some text', 'short', 12, 1234567, 1234567890123, true, 1.5, 2.25, 12.30, '6ba7b810-9dad-11d1-80b4-00c04fd430c8',
       '2025-01-25', '12:34:56.789012', '2025-01-25 12:34:56.789012', '2025-01-25 12:34:56.789012+02',
       '1 year 2 days 03:04:05.6', '{"a": [1, 2]}', '\xdeadbeef00', ARRAY['a', 'b c']"#,
    r#"E'q"uo\\te\n한글', '', -32768, -1, -9223372036854775808, false, 0.1, 1e300, -0.01,
       '00000000-0000-0000-0000-000000000000', '1969-12-31', '00:00:00', '1970-01-01 00:00:00.001999',
       '1969-12-31 23:59:59+00', '-1 day', '[]', '\x', ARRAY['q"', 'b,c', NULL, '', '{}', 'NULL']::text[]"#,
    "NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '2024-02-29 01:02:03', NULL, NULL, NULL, \
     NULL, NULL",
];

/// Rows with a column of every common type.
fn typed_rows(table: &str, topic: &str) -> String {
    let row = |values: &&str| {
        format!(
            "INSERT INTO {table} VALUES (gen_random_uuid(), '{topic}', 'key-1', 'Happened', '{{\"n\": 1}}', {values});"
        )
    };
    VALUES.iter().map(row).collect()
}

/// Schemas, headers, an envelope, a time.
fn typed() -> Scenario {
    Scenario {
        name: "typed",
        table: "public.typed",
        form: Form::Json,
        setup: outbox("typed", &format!("jsonb, {TYPES}")),
        options: vec![
            ("topic.prefix", "typed"),
            ("key.converter", JSON),
            ("value.converter", JSON),
            ("value.converter.schemas.enable", "true"),
            ("header.converter", JSON),
            ("header.converter.schemas.enable", "false"),
            ("transforms.outbox.table.field.event.timestamp", "ts"),
            (
                "transforms.outbox.table.fields.additional.placement",
                "type:header:eventType,t:header,i2:header,i8:header:big,b:header,f8:header,n102:header,u:header,d:header,\
                 tm:header,ts:header,tz:header,iv:header,j:header,y:header,ta:header,t:envelope,v:envelope,i4:envelope,\
                 b:envelope:flag,f4:envelope,n102:envelope,u:envelope,d:envelope,tm:envelope,ts:envelope,tz:envelope,\
                 iv:envelope,j:envelope,y:envelope,ta:envelope,aggregatetype:envelope",
            ),
        ],
        before: String::new(),
        statements: typed_rows("typed", "Typed"),
        expected: 3,
    }
}

/// Routes by a regex, tombstones, and everything that is no event.
fn routed() -> Scenario {
    let statements = [
        // As Quarkus does it.
        "BEGIN; INSERT INTO routed VALUES ('00000000-0000-4000-8000-000000000001', 'shop-order', '1', 'a', '{}'); \
         DELETE FROM routed; COMMIT;",
        "BEGIN; INSERT INTO routed VALUES ('00000000-0000-4000-8000-000000000002', 'shop-order', '1', 'b', '{}'); \
         UPDATE routed SET payload = 'changed'; UPDATE routed SET aggregateid = '2', type = 'c'; COMMIT;",
        "UPDATE routed SET payload = 'again'; DELETE FROM routed;",
        "BEGIN; INSERT INTO routed VALUES (gen_random_uuid(), 'shop-order', '1', 'never', '{}'); ROLLBACK;",
        "BEGIN; INSERT INTO routed VALUES (gen_random_uuid(), 'shop-order', '1', 'kept', 'k'); SAVEPOINT s; \
         INSERT INTO routed VALUES (gen_random_uuid(), 'shop-order', '1', 'never', 'n'); ROLLBACK TO s; \
         INSERT INTO routed VALUES (gen_random_uuid(), 'shop-order', '1', 'kept', 'l'); COMMIT;",
        // Values that are none.
        "INSERT INTO routed VALUES (gen_random_uuid(), 'shop-order', '1', 'd', NULL), (gen_random_uuid(), 'shop-order', '1', 'e', ''), \
         (gen_random_uuid(), 'shop-order', '1', 'f', E' \\n\\t'), (gen_random_uuid(), 'shop-order', '1', 'g', '0');",
        // No match, no key.
        "INSERT INTO routed VALUES (gen_random_uuid(), 'elsewhere', '1', 'h', 'x'), (gen_random_uuid(), 'bank-Payment', NULL, 'i', 'y'), \
         (gen_random_uuid(), 'bank-Payment', NULL, 'j', NULL);",
        "INSERT INTO routed VALUES ('00000000-0000-4000-8000-000000000003', 'bank-Payment', 'u', 'k', 'x') \
         ON CONFLICT (id) DO UPDATE SET payload = 'y';",
        "INSERT INTO routed VALUES ('00000000-0000-4000-8000-000000000003', 'bank-Payment', 'u', 'l', 'x') \
         ON CONFLICT (id) DO UPDATE SET payload = 'y';",
        "CREATE TEMP TABLE copied AS SELECT * FROM routed WHERE aggregateid = 'u'; UPDATE copied SET id = gen_random_uuid(); \
         INSERT INTO routed SELECT * FROM copied; TRUNCATE routed;",
    ]
    .concat();
    Scenario {
        name: "routed",
        table: "public.routed",
        form: Form::Api,
        setup: outbox("routed", "text") + "ALTER TABLE routed ALTER aggregateid DROP NOT NULL;",
        options: vec![
            ("topic.prefix", "routed"),
            ("key.converter", STRING),
            ("value.converter", STRING),
            ("header.converter", STRING),
            ("transforms.outbox.route.topic.regex", "(.*)-(?<what>.*)"),
            ("transforms.outbox.route.topic.replacement", "$1.events.${what}"),
            ("transforms.outbox.route.tombstone.on.empty.payload", "true"),
            ("transforms.outbox.table.fields.additional.placement", "type:header"),
        ],
        before: String::new(),
        statements,
        expected: 13,
    }
}

/// What was there before is delivered first.
fn snapshot() -> Scenario {
    // Keys with several rows, in an order that is that of no column.
    let before = [
        rows("snapshot", "Before", 120, 7, "'{}', NULL"),
        "DELETE FROM snapshot WHERE aggregateid = 'key-3';".into(),
        typed_rows("snapshot", "Before"),
    ]
    .concat();
    Scenario {
        name: "snapshot",
        table: "public.snapshot",
        form: Form::Json,
        setup: outbox("snapshot", &format!("jsonb, {TYPES}")),
        options: vec![
            ("topic.prefix", "snapshot"),
            ("snapshot.mode", "initial"),
            ("key.converter", STRING),
            ("value.converter", JSON),
            ("value.converter.schemas.enable", "false"),
            (
                "transforms.outbox.table.fields.additional.placement",
                "t:header,i8:header,b:header,f4:header,f8:header,n102:header,u:header,d:header,tm:header,ts:header,tz:header,\
                 iv:header,j:header,y:header,ta:header",
            ),
        ],
        before,
        statements: [typed_rows("snapshot", "After"), rows("snapshot", "Before", 7, 7, "'{}'")].concat(),
        expected: 120 - 17 + 3 + 3 + 7,
    }
}

/// Bytes, and a partition of its own.
fn binary() -> Scenario {
    let statements = r"INSERT INTO bin VALUES (gen_random_uuid(), 'Blob', 'a', 't', '\x00ff10', 0), (gen_random_uuid(), 'Blob', 'a', 't', '\x', 1),
        (gen_random_uuid(), 'Blob', 'a', 't', NULL, 2), (gen_random_uuid(), 'Blob', 'b', 't', '\x7b7d', 2),
        (gen_random_uuid(), 'Blob', 'b', 't', decode(repeat('00ff', 50000), 'hex'), 0);";
    Scenario {
        name: "bin",
        table: "public.bin",
        form: Form::Api,
        setup: outbox("bin", "bytea, shard int4 NOT NULL"),
        options: vec![
            ("topic.prefix", "bin"),
            ("key.converter", STRING),
            ("value.converter", BINARY),
            ("value.converter.delegate.converter.type", JSON),
            ("value.converter.delegate.converter.type.schemas.enable", "false"),
            ("transforms.outbox.table.fields.additional.placement", "shard:partition,type:header"),
        ],
        before: String::new(),
        statements: statements.to_owned(),
        expected: 5,
    }
}

/// Columns, a table and a schema with names of their own; JSON that is expanded; no context headers.
fn renamed() -> Scenario {
    let statements = r#"INSERT INTO "Sales"."Event Log" ("eventId", "Topic", subject, body, "createdAt") VALUES
        (1, 'A', 'f81d4fae-7dec-11d0-a765-00a0c91e6bf6', '{"s": "t", "i": 1, "o": {"x": [1, 2]}, "gone": null}', '2025-01-25 12:34:56.789'),
        (2, 'B', NULL, '{"mixed": [1, "a"]}', '2025-01-25 12:34:56'), (3, 'A', 'f81d4fae-7dec-11d0-a765-00a0c91e6bf6', '"text"', '2024-01-01');"#;
    Scenario {
        name: "renamed",
        table: "Sales.Event Log",
        form: Form::Json,
        setup: r#"CREATE SCHEMA "Sales"; CREATE TABLE "Sales"."Event Log" ("eventId" int8 PRIMARY KEY, "Topic" text NOT NULL,
            subject uuid, body jsonb, "createdAt" timestamp(3));"#
            .into(),
        options: vec![
            ("topic.prefix", "renamed"),
            ("key.converter", STRING),
            ("value.converter", JSON),
            ("value.converter.schemas.enable", "false"),
            ("extended.headers.enabled", "false"),
            ("transforms.outbox.table.field.event.id", "eventId"),
            ("transforms.outbox.table.field.event.key", "subject"),
            ("transforms.outbox.table.field.event.payload", "body"),
            ("transforms.outbox.table.field.event.timestamp", "createdAt"),
            ("transforms.outbox.table.expand.json.payload", "true"),
            ("transforms.outbox.route.by.field", "Topic"),
            ("transforms.outbox.route.topic.replacement", "sales.${routedByValue}.v1"),
        ],
        before: String::new(),
        statements: statements.to_owned(),
        expected: 3,
    }
}
