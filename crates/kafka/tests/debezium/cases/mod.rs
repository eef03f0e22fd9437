//! What Debezium is asked to do: tables, options of its router, converters, and rows to insert.
//!
//! A row is the column list and the values of an INSERT, in which `{id}` is nine digits that no other row has; they
//! must be in the event's id, by which its message is found again.

mod converters;
mod placement;

/// One table, with the options of the router that reads it.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// For the documentation.
    pub(crate) about: &'static str,
    pub(crate) columns: &'static str,
    pub(crate) options: Vec<(&'static str, &'static str)>,
    pub(crate) key: &'static str,
    pub(crate) value: &'static str,
    pub(crate) header: &'static str,
    pub(crate) rows: Vec<String>,
    /// What follows each insert in the same transaction.
    pub(crate) then: &'static str,
    /// The context headers, which Debezium writes unless told otherwise.
    pub(crate) extended: bool,
}

/// Debezium's own table.
const OUTBOX: &str = "id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, \
    aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb";
/// The same with another payload.
const TEXT: &str = "id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, \
    aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload text";
const BYTEA: &str = "id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, \
    aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload bytea";
/// A column of every common type.
const TYPES: &str = "id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, \
    aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb, \
    t text, v varchar(20), i2 int2, i4 int4, i8 int8, b bool, f4 float4, f8 float8, n102 numeric(10,2), n numeric, \
    u uuid, d date, tm time, ts timestamp, tz timestamptz, j jsonb, y bytea, ta text[]";
/// Where the columns of [`TYPES`] go.
const TYPES_HEADER: &str = "t:header,v:header,i2:header,i4:header,i8:header,b:header,f4:header,f8:header,\
    n102:header,n:header,u:header,d:header,tm:header,ts:header,tz:header,j:header,y:header,ta:header";
const TYPES_ENVELOPE: &str = "t:envelope,v:envelope,i2:envelope,i4:envelope,i8:envelope,b:envelope,f4:envelope,\
    f8:envelope,n102:envelope,n:envelope,u:envelope,d:envelope,tm:envelope,ts:envelope,tz:envelope,j:envelope,\
    y:envelope,ta:envelope";
const PLACEMENT: &str = "table.fields.additional.placement";
const EXPAND: (&str, &str) = ("table.expand.json.payload", "true");

/// A row of Debezium's own table. `payload` is SQL.
fn event(aggregate_type: &str, key: &str, payload: &str) -> String {
    more(aggregate_type, key, payload, "", "")
}

/// A row with further columns.
fn more(aggregate_type: &str, key: &str, payload: &str, columns: &str, values: &str) -> String {
    format!(
        "(id, aggregatetype, aggregateid, type, payload{columns}) VALUES ('00000000-0000-4000-8000-000{{id}}', \
         '{aggregate_type}', '{key}', 'Happened', {payload}{values})"
    )
}

/// Rows for [`TYPES`]: usual values, unusual ones, and none at all.
fn typed(aggregate_type: &str) -> Vec<String> {
    let columns = ", t, v, i2, i4, i8, b, f4, f8, n102, n, u, d, tm, ts, tz, j, y, ta";
    [
        ", 'some text', 'short', 12, 1234567, 1234567890123, true, 1.5, 2.25, 12.30, 123.456000, \
         '6ba7b810-9dad-11d1-80b4-00c04fd430c8', '2025-01-25', '12:34:56.789012', '2025-01-25 12:34:56.789012', \
         '2025-01-25 12:34:56.789012+02', '{\"a\": [1, 2]}', '\\xdeadbeef00', ARRAY['a', 'b c']",
        ", 'q\"uo\\te 한글 😀', '', -32768, -1, -9223372036854775808, false, 0.1, 1e300, -0.01, -1000, \
         '00000000-0000-0000-0000-000000000000', '1969-12-31', '00:00:00', '1969-12-31 23:59:59.999999', \
         '1969-12-31 23:59:59+00', '[]', '\\x', ARRAY['q\"', 'b,c', NULL, '', '{}', 'NULL']::text[]",
        ", '', ' pad ', 0, 2147483647, 0, false, 16777216, 0.00001, 99999999.99, 0.000, \
         'ffffffff-ffff-ffff-ffff-ffffffffffff', '0001-01-01', '23:59:59.999', '2025-06-01 00:00:00', \
         '2025-06-01 00:00:00.5+00', '\"s\"', '\\x00', '{}'",
        ", NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL",
    ]
    .iter()
    .map(|values| more(aggregate_type, "key-1", "'{\"n\": 1}'", columns, values))
    .collect()
}

/// Payloads that test how text is written.
fn texts(aggregate_type: &str) -> Vec<String> {
    [
        "'{\"a\": \"b\"}'",
        "'plain, with \"quotes\", a \\ backslash, a / slash and ''ticks'''",
        "E'line\\nbreak\\ttab\\rreturn\\bback\\fform\\x01\\x1f\\x7f'",
        "'Grüße 한글 😀 \u{2028} \u{e000}'",
        "'123456789012345678901234567890.10'",
        "''",
        "E' \\t\\n '",
        "NULL",
    ]
    .iter()
    .map(|payload| event(aggregate_type, "key-1", payload))
    .collect()
}

/// Payloads that test how JSON is expanded.
fn documents(aggregate_type: &str) -> Vec<String> {
    [
        r#"{"s": "t", "i": 1, "b": true, "d": 1.5, "o": {"x": "y", "deep": {"z": 1}}}"#,
        r#"{"int": 2147483647, "long": 2147483648, "most": 9223372036854775807, "neg": -5}"#,
        r#"{"d": 1.0, "e": 1e5, "small": 0.00001, "large": 1e20, "third": 0.3333333333333333, "zero": -0.0}"#,
        r#"{"null": null, "empty": [], "o": {}, "inner": {"gone": null}, "kept": 1}"#,
        r#"{"strings": ["a", "b", null], "ints": [1, 2], "doubles": [1.5, 2.5], "bools": [true, false]}"#,
        r#"{"objects": [{"a": 1}, {"a": 2}], "nested": [[1], [2, 3]]}"#,
        r#"{"mixed": [1, "a"], "other": 1}"#,
        r#"{"numbers": [1, 2147483648]}"#,
        r#"{"nulls": [null, null]}"#,
        // Where each has what others lack, the order of fields is that of a hash of addresses in Java's memory.
        r#"{"merged": [{"a": 1, "b": "x"}, {"a": 2}, null]}"#,
        r#"{"merged": [{"a": 1, "b": "x"}, {"a": 2}]}"#,
        r#"{"once": [{"a": 1}, null]}"#,
        r#"{"clash": [{"a": 1}, {"a": "x"}]}"#,
        r#"{"clash": [[1], ["a"]]}"#,
        r#"{"deep": [[{"a": {"b": 1}}]], "list": [{"a": {"b": 1}}]}"#,
        r#"[]"#,
        r#"{"first": 1} {"second": 2}"#,
        r#"{"first": 1} rubbish"#,
        r#"{"lead": 01}"#,
        r#"{"minus": -0, "over": 1e400, "a": "\u00e9\/\ud83d\ude00"}"#,
        r#"{"a b": 1, "dot.ted": 2, "1st": 3, "ü": 4, "dash-ed": 5}"#,
        r#"{"esc": "q\"uo\\te\nline 😀"}"#,
        r#"{"dup": 1, "dup": "x"}"#,
        r#"{"huge": 123456789012345678901234567890}"#,
        r#"[1, 2]"#,
        r#"[{"a": 1}]"#,
        r#""text""#,
        r#"{"#,
        r#"  {"led": 1}"#,
        r#"{}"#,
    ]
    .iter()
    .map(|payload| event(aggregate_type, "key-1", &format!("'{payload}'")))
    .collect()
}

impl Case {
    fn new(name: &'static str, about: &'static str, columns: &'static str, rows: Vec<String>) -> Self {
        Self {
            name,
            about,
            columns,
            options: Vec::new(),
            key: "string",
            value: "string",
            header: "simple",
            rows,
            then: "",
            extended: true,
        }
    }

    fn with(mut self, option: &'static str, value: &'static str) -> Self {
        self.options.push((option, value));
        self
    }

    fn convert(mut self, key: &'static str, value: &'static str, header: &'static str) -> Self {
        (self.key, self.value, self.header) = (key, value, header);
        self
    }

    /// The last of a connector, which any converter can write.
    pub(crate) fn last(name: &'static str, like: &Self) -> Self {
        let rows = vec![event("TheEnd", "key-1", "'\\x00'")];
        Self { extended: like.extended, ..Self::new(name, "", BYTEA, rows) }.convert(
            like.key,
            like.value,
            like.header,
        )
    }
}

/// All of them.
pub(crate) fn cases() -> Vec<Case> {
    let mut all = plain();
    all.extend(routing());
    all.extend(placement::placement());
    all.extend(converters::json());
    all.extend(converters::expansion());
    all.extend(converters::binary());
    all
}

/// Payloads and keys as they are, with the `StringConverter`.
fn plain() -> Vec<Case> {
    let jsonb = [
        r#"'{"b": 2, "a": [1, {"x": null}], "text": "q\"uo\\te\nline 한글 😀"}'"#,
        r#"'{"big": 123456789012345678901234567890, "small": 0.1000, "exp": 1e400}'"#,
        "'[1,2]'",
        "'\"text\"'",
        "'null'",
        "'{}'",
    ];
    let keys =
        "id uuid NOT NULL PRIMARY KEY, aggregatetype text NOT NULL, k_uuid uuid, k_int8 int8, payload text";
    let keyed = |value: &str| {
        format!(
            "(id, aggregatetype, k_uuid, k_int8, payload) VALUES ('00000000-0000-4000-8000-000{{id}}', 'Keyed', \
             '6BA7B810-9DAD-11D1-80B4-00C04FD430C8', {value}, 'x')"
        )
    };
    vec![
        Case::new(
            "default_jsonb",
            "default options, `jsonb` payload",
            OUTBOX,
            jsonb.iter().map(|payload| event("Jsonb", "key-1", payload)).collect(),
        ),
        Case::new(
            "json_column",
            "`json` payload, which keeps its blanks",
            "id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL, \
             type varchar(255) NOT NULL, payload json",
            vec![
                event("Json", "key-1", "'{ \"b\" : 1.10,  \"a\":[ ] }'"),
                event("Json", "schlüssel 😀", "'1'"),
            ],
        ),
        Case::new("text_column", "`text` payload, null and blank ones too", TEXT, texts("Text")),
        Case::new(
            "varchar_column",
            "`varchar` payload",
            "id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL, \
             type varchar(255) NOT NULL, payload varchar(100) NOT NULL",
            vec![event("Varchar", "", "'a \"b\"'")],
        ),
        Case::new(
            "bytea_as_string",
            "`bytea` payload through the `StringConverter`",
            BYTEA,
            vec![
                event("Bytea", "key-1", "'\\xdeadbeef'"),
                event("Bytea", "key-1", "'\\x'"),
                event("Bytea", "key-1", "NULL"),
            ],
        ),
        Case::new("tombstones", "`route.tombstone.on.empty.payload`", TEXT, texts("Tombstone"))
            .with("route.tombstone.on.empty.payload", "true"),
        Case::new(
            "tombstones_jsonb",
            "`route.tombstone.on.empty.payload` for `jsonb`",
            OUTBOX,
            ["NULL", "'null'", "'\"\"'", "'{}'"]
                .iter()
                .map(|p| event("TombstoneJsonb", "key-1", p))
                .collect(),
        )
        .with("route.tombstone.on.empty.payload", "true"),
        Case::new("key_uuid", "`table.field.event.key` of type `uuid`", keys, vec![keyed("1")])
            .with("table.field.event.key", "k_uuid"),
        Case::new("key_int8", "a key of type `int8`, and none", keys, vec![keyed("-5"), keyed("NULL")])
            .with("table.field.event.key", "k_int8"),
        Case::new(
            "id_int8",
            "an id of type `int8`",
            "id int8 PRIMARY KEY, aggregatetype text, aggregateid text, payload text",
            vec!["(id, aggregatetype, aggregateid, payload) VALUES ({id}, 'IdInt8', NULL, 'x')".into()],
        ),
        Case::new(
            "other_names",
            "other columns for id, key, type and payload",
            "event_id text PRIMARY KEY, topic text NOT NULL, akey text NOT NULL, etype text, body text",
            vec![
                "(event_id, topic, akey, etype, body) VALUES ('e-{id}', 'OtherNames', 'k', 't', 'x')".into(),
            ],
        )
        .with("table.field.event.id", "event_id")
        .with("table.field.event.key", "akey")
        .with("table.field.event.type", "etype")
        .with("table.field.event.payload", "body")
        .with("route.by.field", "topic"),
        Case {
            then: "DELETE FROM {table}",
            ..Case::new(
                "deleted_at_once",
                "insert and delete in one transaction",
                OUTBOX,
                vec![event("Deleted", "key-1", "'{\"a\": 1}'"), event("Deleted", "key-2", "'{\"a\": 2}'")],
            )
        },
        Case {
            then: "UPDATE {table} SET type = 'Changed'",
            ..Case::new(
                "updated",
                "`table.op.invalid.behavior=warn`: updates are dropped",
                OUTBOX,
                vec![event("Updated", "key-1", "'{\"a\": 1}'")],
            )
            .with("table.op.invalid.behavior", "warn")
        },
        Case {
            extended: false,
            ..Case::new(
                "no_context_headers",
                "`extended.headers.enabled=false`",
                OUTBOX,
                vec![event("Short", "key-1", "'{\"a\": 1}'")],
            )
        },
    ]
}

/// Topics and times.
fn routing() -> Vec<Case> {
    let timed = |name, about, columns, values: &[&str]| {
        let rows = values.iter().map(|value| more("Timed", "key-1", "'x'", ", at", &format!(", {value}")));
        Case::new(name, about, columns, rows.collect()).with("table.field.event.timestamp", "at")
    };
    let at_timestamp =
        "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at timestamp";
    let at_millis =
        "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at timestamp(3)";
    let at_zoned =
        "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at timestamptz";
    let at_number =
        "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at int8";
    vec![
        Case::new(
            "topic_case",
            "the case of a topic is kept",
            OUTBOX,
            ["Order", "ORDER", "order.Line_1"].iter().map(|name| event(name, "key-1", "'{}'")).collect(),
        ),
        Case::new(
            "route_by_type",
            "`route.by.field` of another column",
            OUTBOX,
            vec![event("Nobody", "key-1", "'{}'")],
        )
        .with("route.by.field", "type"),
        Case::new(
            "regex_groups",
            "`route.topic.regex` with groups",
            OUTBOX,
            vec![event("raw_data", "key-1", "'{}'"), event("a_b_c", "key-1", "'{}'")],
        )
        .with("route.topic.regex", "(.*)_(?<rest>.*)")
        .with("route.topic.replacement", "${rest}.$1.x"),
        Case::new(
            "regex_without_match",
            "a value that the regex does not match",
            OUTBOX,
            vec![event("unmatched", "key-1", "'{}'")],
        )
        .with("route.topic.regex", "(.*)_nope")
        .with("route.topic.replacement", "never.$1"),
        Case::new(
            "replacement",
            "`route.topic.replacement` alone",
            OUTBOX,
            vec![event("thing", "key-1", "'{}'")],
        )
        .with("route.topic.replacement", "ivm.events.${routedByValue}"),
        timed(
            "time_of_timestamp",
            "`table.field.event.timestamp` of type `timestamp`",
            at_timestamp,
            &["'2025-01-25 12:34:56.789999'", "'2025-01-25 12:34:56'", "NULL"],
        ),
        timed(
            "time_of_millis",
            "`table.field.event.timestamp` of type `timestamp(3)`",
            at_millis,
            &["'2025-01-25 12:34:56.789'", "'1999-12-31 23:59:59'"],
        ),
        timed(
            "time_of_timestamptz",
            "`table.field.event.timestamp` of type `timestamptz`",
            at_zoned,
            &["'2025-01-25 12:34:56.789+02'"],
        ),
        timed("time_of_int8", "`table.field.event.timestamp` of type `int8`", at_number, &["1737808496789"]),
    ]
}
