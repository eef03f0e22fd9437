//! What Debezium is asked to do: tables, options of its router, converters, and rows to insert.
//!
//! A row is the column list and the values of an INSERT, in which `{id}` is nine digits that no other row has; they
//! must be in the event's id, by which its message is found again.

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
        Self { extended: like.extended, ..Self::new(name, "", BYTEA, rows) }
            .convert(like.key, like.value, like.header)
    }
}

/// All of them.
pub(crate) fn cases() -> Vec<Case> {
    let mut all = plain();
    all.extend(routing());
    all.extend(placement());
    all.extend(json());
    all.extend(expansion());
    all.extend(binary());
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
    let keys = "id uuid NOT NULL PRIMARY KEY, aggregatetype text NOT NULL, k_uuid uuid, k_int8 int8, payload text";
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
            vec![event("Json", "key-1", "'{ \"b\" : 1.10,  \"a\":[ ] }'"), event("Json", "schlüssel 😀", "'1'")],
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
            vec![event("Bytea", "key-1", "'\\xdeadbeef'"), event("Bytea", "key-1", "'\\x'"), event("Bytea", "key-1", "NULL")],
        ),
        Case::new("tombstones", "`route.tombstone.on.empty.payload`", TEXT, texts("Tombstone"))
            .with("route.tombstone.on.empty.payload", "true"),
        Case::new(
            "tombstones_jsonb",
            "the same for `jsonb`",
            OUTBOX,
            ["NULL", "'null'", "'\"\"'", "'{}'"].iter().map(|p| event("TombstoneJsonb", "key-1", p)).collect(),
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
            vec!["(event_id, topic, akey, etype, body) VALUES ('e-{id}', 'OtherNames', 'k', 't', 'x')".into()],
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
    let at_timestamp = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at timestamp";
    let at_millis = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at timestamp(3)";
    let at_zoned = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at timestamptz";
    let at_number = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, at int8";
    vec![
        Case::new(
            "topic_case",
            "the case of a topic is kept",
            OUTBOX,
            ["Order", "ORDER", "order.Line_1"].iter().map(|name| event(name, "key-1", "'{}'")).collect(),
        ),
        Case::new("route_by_type", "`route.by.field` of another column", OUTBOX, vec![event("Nobody", "key-1", "'{}'")])
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
        Case::new("replacement", "`route.topic.replacement` alone", OUTBOX, vec![event("thing", "key-1", "'{}'")])
            .with("route.topic.replacement", "ivm.events.${routedByValue}"),
        timed(
            "time_of_timestamp",
            "`table.field.event.timestamp` of type `timestamp`",
            at_timestamp,
            &["'2025-01-25 12:34:56.789999'", "'2025-01-25 12:34:56'", "NULL"],
        ),
        timed("time_of_millis", "… of type `timestamp(3)`", at_millis, &["'2025-01-25 12:34:56.789'", "'1999-12-31 23:59:59'"]),
        timed("time_of_timestamptz", "… of type `timestamptz`", at_zoned, &["'2025-01-25 12:34:56.789+02'"]),
        timed("time_of_int8", "… of type `int8`", at_number, &["1737808496789"]),
    ]
}

/// Columns that go along.
fn placement() -> Vec<Case> {
    let part = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, part int4, big int8";
    let parted = |topic: &str, value: &str| more(topic, "key-1", "'x'", ", part, big", &format!(", {value}"));
    let others = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, \
        c5 char(5), ip inet, net cidr, mac macaddr, x xml, q \"char\", nm name, m money, o oid, b1 bit(1), b8 bit(8), \
        tm3 time(3), tm0 time(0), tz0 timetz, ts3 timestamp(3), ts0 timestamp(0), iv interval, r int4range, tv tsvector, \
        ia int4[], la int8[], ba bool[], fa float8[], ua uuid[], na numeric(6,2)[], n50 numeric(5,0), n5 numeric(5), \
        tsz3 timestamptz(3)";
    let others_placed = "c5:header,ip:header,net:header,mac:header,x:header,q:header,nm:header,m:header,o:header,\
        b1:header,b8:header,tm3:header,tm0:header,tz0:header,ts3:header,ts0:header,iv:header,r:header,tv:header,\
        ia:header,la:header,ba:header,fa:header,ua:header,na:header,n50:header,n5:header,tsz3:header";
    let other = |topic: &str| {
        more(
            topic,
            "key-1",
            "'x'",
            ", c5, ip, net, mac, x, q, nm, m, o, b1, b8, tm3, tm0, tz0, ts3, ts0, iv, r, tv, ia, la, ba, fa, ua, na, \
             n50, n5, tsz3",
            ", 'ab', '10.0.0.1', '10.0.0.0/8', '08:00:2b:01:02:03', '<a>b</a>', 'c', 'nam', 12.30, 42, B'1', B'10100101', \
             '12:34:56.789', '12:34:56', '12:34:56.5+02', '2025-01-25 12:34:56.789', '2025-01-25 12:34:56', \
             '1 year 2 mons 3 days 04:05:06.7', '[1,5)', 'a fat cat', '{1,2,NULL}', '{3}', '{t,f}', '{1.5,1e10}', \
             '{6ba7b810-9dad-11d1-80b4-00c04fd430c8}', '{1.50,-2.00}', 77, 78, '2025-01-25 12:34:56.789+00'",
        )
    };
    let floats = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, f4 float4, f8 float8";
    let float = |topic: &str| -> Vec<String> {
        ["0.1, 0.1", "1e10, 1e10", "0.001, 0.001", "0.00099, 0.00099", "9999999, 9999999", "1e7, 1e7", "3.4e38, 1.7976931348623157e308",
         "'NaN', 'NaN'", "'Infinity', '-Infinity'", "-0.0, -0.0", "123456.79, 123456789.123", "1e-45, 5e-324"]
            .iter()
            .map(|value| more(topic, "key-1", "'x'", ", f4, f8", &format!(", {value}")))
            .collect()
    };
    let far = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, d date, tm time, ts timestamp, \
        ts3 timestamp(3), tz timestamptz, tt timetz, iv interval";
    let far_off = |topic: &str| -> Vec<String> {
        [
            "'infinity', '24:00:00', 'infinity', 'infinity', 'infinity', '24:00:00+00', '-1 day'",
            "'-infinity', '00:00:00.000001', '-infinity', '-infinity', '-infinity', '00:00:00-12', '00:00:00.000001'",
            "'0044-03-15 BC', '01:00', '0044-03-15 01:00 BC', '0044-03-15 01:00 BC', '0044-03-15 01:00+00 BC', '01:00:00.123456+05:30', '-1 year -2 days +03:00'",
            "'20000-01-01', '01:00', '20000-01-01 01:00', '20000-01-01 01:00', '20000-01-01 01:00+00', '23:30:00-05:45', '100 hours'",
            "'1582-10-10', '01:00', '1582-10-10 01:00', '1582-10-10 01:00', '1582-10-10 01:00+00', '10:00:00.10+00', '1 mon'",
        ]
        .iter()
        .map(|value| more(topic, "key-1", "'x'", ", d, tm, ts, ts3, tz, tt, iv", &format!(", {value}")))
        .collect()
    };
    let numbers = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, n numeric, n102 numeric(10,2), \
        n9 numeric(20,9), nn numeric(4,-2)";
    let number = |topic: &str| -> Vec<String> {
        [
            "123456789012345678901234567890.12345, -12345678.99, 0.000000001, 123400",
            "0.0000000000001, 0, 0, 0",
            "100000, 1, -0.000000100, -100",
            "-128, -1.28, 12345678901.123456789, NULL",
            "128, 1.28, 0.5, 99900",
        ]
        .iter()
        .map(|value| more(topic, "key-1", "'x'", ", n, n102, n9, nn", &format!(", {value}")))
        .collect()
    };
    let mood = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, m {table}_mood, mn {table}_mood";
    let moody = |topic: &str| more(topic, "key-1", "'x'", ", m", ", 'so so'");
    let defaults = "id uuid PRIMARY KEY, aggregatetype text NOT NULL DEFAULT 'Defaults', aggregateid text NOT NULL DEFAULT 'k', \
        type text, payload text DEFAULT 'none', n int4 DEFAULT 7, m int4 NOT NULL DEFAULT 8";
    let default = |topic: &str| {
        vec![
            more(topic, "key-1", "'x'", ", n, m", ", 1, 2"),
            more(topic, "key-1", "NULL", ", n, m", ", NULL, 2"),
        ]
    };
    vec![
        Case::new("header_types", "every common type in a header", TYPES, typed("HeaderTypes")).with(PLACEMENT, TYPES_HEADER),
        Case::new("header_types_as_string", "the same with the `StringConverter` for headers", TYPES, typed("HeaderString"))
            .with(PLACEMENT, TYPES_HEADER)
            .convert("string", "string", "string"),
        Case::new("header_types_as_json", "the same with the `JsonConverter` for headers", TYPES, typed("HeaderJson"))
            .with(PLACEMENT, TYPES_HEADER)
            .convert("json", "json", "json"),
        Case::new("header_types_as_json_schemas", "the same with schemas", TYPES, typed("HeaderSchemas"))
            .with(PLACEMENT, TYPES_HEADER)
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("header_alias", "headers with other names, and one twice", OUTBOX, vec![event("Alias", "key-1", "'{}'")])
            .with(PLACEMENT, "type:header:eventType,aggregatetype:header:aggregate,type:header"),
        Case::new("other_types", "less common types in headers", others, vec![other("OtherTypes")]).with(PLACEMENT, others_placed),
        Case::new("other_types_as_json_schemas", "the same as JSON with schemas", others, vec![other("OtherTypesSchemas")])
            .with(PLACEMENT, others_placed)
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("floats", "numbers as Java writes them", floats, float("Floats")).with(PLACEMENT, "f4:header,f8:header"),
        Case::new("floats_as_json", "the same as JSON", floats, float("FloatsJson"))
            .with(PLACEMENT, "f4:envelope,f8:envelope")
            .convert("json", "json", "json"),
        Case::new("extremes", "infinite and far-off times", far, far_off("Extremes"))
            .with(PLACEMENT, "d:header,tm:header,ts:header,ts3:header,tz:header,tt:header,iv:header"),
        Case::new("numbers", "large and small numbers", numbers, number("Numbers"))
            .with(PLACEMENT, "n:header,n102:header,n9:header,nn:header"),
        Case::new("numbers_as_json_schemas", "large and small numbers with schemas", numbers, number("NumbersSchemas"))
            .with(PLACEMENT, "n:envelope,n102:envelope,n9:envelope,nn:envelope")
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("enums", "an enum in a header", mood, vec![moody("Enums")]).with(PLACEMENT, "m:header,mn:header"),
        Case::new("enums_as_json", "an enum as JSON", mood, vec![moody("EnumsJson")])
            .with(PLACEMENT, "m:envelope,mn:envelope")
            .convert("json", "json", "json"),
        Case::new("enums_as_json_schemas", "an enum as JSON with schemas", mood, vec![moody("EnumsSchemas")])
            .with(PLACEMENT, "m:envelope,mn:envelope")
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("defaults", "columns with a DEFAULT", defaults, default("Defaults")).with(PLACEMENT, "n:header,m:header"),
        Case::new("defaults_as_json_schemas", "columns with a DEFAULT, with schemas", defaults, default("DefaultsSchemas"))
            .with(PLACEMENT, "n:envelope,m:envelope")
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("envelope_as_string", "envelope through the `StringConverter`", TYPES, typed("EnvelopeString"))
            .with(PLACEMENT, TYPES_ENVELOPE),
        Case::new("partition", "a partition of type `int4`", part, vec![parted("Partition", "2, 1"), parted("Partition", "0, 1"), parted("Partition", "NULL, 1")])
            .with(PLACEMENT, "part:partition"),
        Case::new("partition_int8", "a partition of type `int8`", part, vec![parted("PartitionInt8", "2, 1")])
            .with(PLACEMENT, "big:partition"),
        Case::new("missing_ignored", "a missing column, `table.fields.additional.error.on.missing=false`", OUTBOX, vec![event("Missing", "key-1", "'{}'")])
            .with(PLACEMENT, "nope:header,type:header")
            .with("table.fields.additional.error.on.missing", "false"),
        Case::new("missing_error", "a missing column", OUTBOX, vec![event("MissingError", "key-1", "'{}'")])
            .with(PLACEMENT, "nope:header"),
        Case::new("missing_envelope", "a missing column for the envelope, ignored", OUTBOX, vec![event("MissingEnvelope", "key-1", "'{}'")])
            .with(PLACEMENT, "nope:envelope,type:envelope")
            .with("table.fields.additional.error.on.missing", "false"),
    ]
}

/// With the `JsonConverter`.
fn json() -> Vec<Case> {
    let version = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text NOT NULL, payload jsonb NOT NULL, ver int4";
    let versioned = |topic: &str, value: &str| more(topic, "key-1", "'{}'", ", ver", &format!(", {value}"));
    let keys = "id uuid PRIMARY KEY, aggregatetype text, aggregateid int8, type text, payload text";
    let keyed = |topic: &str, key: &str| {
        format!("(id, aggregatetype, aggregateid, payload) VALUES ('00000000-0000-4000-8000-000{{id}}', '{topic}', {key}, 'x')")
    };
    vec![
        Case::new("text_as_json", "`text` payload, `JsonConverter` without schemas", TEXT, texts("TextJson"))
            .convert("json", "json", "json"),
        Case::new("text_as_json_schemas", "`text` payload, `JsonConverter` with schemas", TEXT, texts("TextSchemas"))
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("jsonb_as_json", "`jsonb` payload is a string in a string", OUTBOX, vec![event("JsonbJson", "key-1", "'{\"a\": \"b\"}'")])
            .convert("string", "json", "simple"),
        Case::new("jsonb_as_json_schemas", "the same with schemas", OUTBOX, vec![event("JsonbSchemas", "key-1", "'{\"a\": \"b\"}'")])
            .convert("string", "json-schemas", "simple"),
        Case::new("bytea_as_json", "`bytea` payload as JSON", BYTEA, vec![event("ByteaJson", "key-1", "'\\xdeadbeef'"), event("ByteaJson", "key-1", "NULL")])
            .convert("string", "json", "simple"),
        Case::new("bytea_as_json_schemas", "`bytea` payload as JSON with schemas", BYTEA, vec![event("ByteaSchemas", "key-1", "'\\xdeadbeef'")])
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
        Case::new("envelope_as_json_schemas", "envelope of every common type, with schemas", TYPES, typed("EnvelopeSchemas"))
            .with(PLACEMENT, TYPES_ENVELOPE)
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("envelope_alias", "envelope with other names, and a header", OUTBOX, vec![event("EnvelopeAlias", "key-1", "'{}'"), event("EnvelopeAlias", "key-1", "NULL")])
            .with(PLACEMENT, "type:envelope:eventType,aggregatetype:header:aggregate,id:envelope")
            .convert("string", "json-schemas", "simple"),
        Case::new("envelope_tombstone", "envelope, null payload and tombstones", OUTBOX, vec![event("EnvelopeTombstone", "key-1", "NULL")])
            .with(PLACEMENT, "type:envelope")
            .with("route.tombstone.on.empty.payload", "true")
            .convert("string", "json-schemas", "simple"),
        Case::new("schema_version", "`table.field.event.schema.version`", version, vec![versioned("Version", "3"), versioned("Version", "4"), versioned("Version", "NULL")])
            .with("table.field.event.schema.version", "ver")
            .with(PLACEMENT, "type:envelope")
            .convert("string", "json-schemas", "simple"),
        Case::new("schema_version_unused", "the same without an envelope", version, vec![versioned("VersionUnused", "3")])
            .with("table.field.event.schema.version", "ver")
            .convert("string", "json-schemas", "simple"),
        Case::new("key_int8_as_json", "an `int8` key as JSON, and none", keys, vec![keyed("KeyJson", "5"), keyed("KeyJson", "NULL")])
            .convert("json", "json", "json"),
        Case::new("key_int8_as_json_schemas", "an `int8` key with schemas, and none", keys, vec![keyed("KeySchemas", "5"), keyed("KeySchemas", "NULL")])
            .convert("json-schemas", "json-schemas", "json-schemas"),
    ]
}

/// `table.expand.json.payload`.
fn expansion() -> Vec<Case> {
    let expanded = |name, about, topic| {
        let case = Case::new(name, about, TEXT, documents(topic));
        case.with(EXPAND.0, EXPAND.1)
    };
    vec![
        expanded("expanded_as_json", "`table.expand.json.payload`, without schemas", "ExpandedJson")
            .convert("string", "json", "simple"),
        expanded("expanded_as_json_schemas", "`table.expand.json.payload`, with schemas", "ExpandedSchemas")
            .convert("string", "json-schemas", "simple"),
        expanded("expanded_as_string", "`table.expand.json.payload` through the `StringConverter`", "ExpandedString"),
        expanded("expanded_nulls", "… with `table.json.payload.null.behavior=optional_bytes`", "ExpandedNulls")
            .with("table.json.payload.null.behavior", "optional_bytes")
            .convert("string", "json-schemas", "simple"),
        Case::new("expanded_jsonb", "`table.expand.json.payload` of a `jsonb` column, and of none", OUTBOX, vec![
            event("ExpandedJsonb", "key-1", r#"'{"b": {"a": 1}, "aa": [], "c": null}'"#),
            event("ExpandedJsonb", "key-1", "NULL"),
        ])
        .with(EXPAND.0, EXPAND.1)
        .convert("string", "json-schemas", "simple"),
        Case::new("expanded_envelope", "`table.expand.json.payload` in an envelope", OUTBOX, vec![
            event("ExpandedEnvelope", "key-1", r#"'{"b": {"a": 1}}'"#),
            event("ExpandedEnvelope", "key-1", r#"'[1]'"#),
            event("ExpandedEnvelope", "key-1", r#"'[]'"#),
            event("ExpandedEnvelope", "key-1", "NULL"),
            event("ExpandedEnvelope", "key-1", r#"'{"c": "x"}'"#),
        ])
        .with(EXPAND.0, EXPAND.1)
        .with(PLACEMENT, "type:envelope")
        .convert("string", "json-schemas", "simple"),
    ]
}

/// Bytes as they are.
fn binary() -> Vec<Case> {
    let rows = |topic: &str| vec![event(topic, "key-1", "'\\x00ff10'"), event(topic, "key-1", "'\\x'"), event(topic, "key-1", "NULL")];
    vec![
        Case::new("bytea_as_bytes", "`bytea` payload, `ByteArrayConverter`", BYTEA, rows("Bytes"))
            .convert("string", "bytes", "simple"),
        Case::new("bytea_as_bytes_tombstones", "the same with tombstones", BYTEA, rows("BytesTombstone"))
            .with("route.tombstone.on.empty.payload", "true")
            .convert("string", "bytes", "simple"),
        Case::new("bytea_as_binary", "`bytea` payload, Debezium's `BinaryDataConverter`", BYTEA, rows("Binary"))
            .convert("string", "binary", "simple"),
        Case::new("text_as_bytes", "`text` payload, `ByteArrayConverter`", TEXT, vec![event("TextBytes", "key-1", "'x'")])
            .convert("string", "bytes", "simple"),
        Case::new("text_as_binary", "`text` payload, `BinaryDataConverter` without a delegate", TEXT, vec![event("TextBinary", "key-1", "'x'")])
            .convert("string", "binary", "simple"),
        Case::new("text_as_binary_json", "`text` payload, `BinaryDataConverter` with the `JsonConverter` behind it", TEXT, texts("TextBinaryJson"))
            .convert("string", "binary+json", "simple"),
        Case::new("bytea_as_binary_json", "`bytea` payload, `BinaryDataConverter` with the `JsonConverter` behind it", BYTEA, rows("BinaryJson"))
            .convert("string", "binary+json", "simple"),
    ]
}
