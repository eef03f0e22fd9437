//! Columns that go along: in headers, in an envelope, as a partition.

use super::{Case, OUTBOX, PLACEMENT, TYPES, TYPES_ENVELOPE, TYPES_HEADER, event, more, typed};

/// Columns that go along.
pub(super) fn placement() -> Vec<Case> {
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
        [
            "0.1, 0.1",
            "1e10, 1e10",
            "0.001, 0.001",
            "0.00099, 0.00099",
            "9999999, 9999999",
            "1e7, 1e7",
            "3.4e38, 1.7976931348623157e308",
            "'NaN', 'NaN'",
            "'Infinity', '-Infinity'",
            "-0.0, -0.0",
            "123456.79, 123456789.123",
            "1e-45, 5e-324",
        ]
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
    let odd = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, tz0 timestamptz(0), tz2 timestamptz(2), \
        b8 bit(8), b12 bit(12), vb varbit(10), m money, iv interval, o oid, ts6 timestamp(6), da date[], tza timestamptz[], \
        ya bytea[], ja jsonb[], sa int2[], ra float4[], pt point";
    let oddly = |topic: &str| -> Vec<String> {
        [
            "'2025-01-25 12:34:56+00', '2025-01-25 12:34:56.78+00', B'00000000', B'100000000001', B'101', -1234.5, '0', 4294967295, \
             '2025-01-25 12:34:56.7', '{2025-01-25}', '{\"2025-01-25 12:34:56+02\"}', ARRAY['\\xff'::bytea], \
             ARRAY['{\"a\": 1}'::jsonb], '{1}', '{0.1}', '(1,2)'",
            "'2025-01-25 12:34:56+00', '2025-01-25 12:34:56+00', B'00000001', B'000000000001', B'', 0, '-00:00:01', 0, \
             '2025-01-25 12:34:56', '{}', '{}', '{}', '{}', '{NULL}', '{1e10}', NULL",
        ]
        .iter()
        .map(|value| {
            let columns = ", tz0, tz2, b8, b12, vb, m, iv, o, ts6, da, tza, ya, ja, sa, ra, pt";
            more(topic, "key-1", "'x'", columns, &format!(", {value}"))
        })
        .collect()
    };
    let odd_placed = "tz0:envelope,tz2:envelope,b8:envelope,b12:envelope,vb:envelope,m:envelope,iv:envelope,o:envelope,\
        ts6:envelope,da:envelope,tza:envelope,ya:envelope,ja:envelope,sa:envelope,ra:envelope";
    let nan = "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, n numeric, n102 numeric(10,2)";
    let square =
        "id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text, aa int4[]";
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
        Case::new("header_types", "every common type in a header", TYPES, typed("HeaderTypes"))
            .with(PLACEMENT, TYPES_HEADER),
        Case::new(
            "header_types_as_string",
            "every common type in a header, `StringConverter`",
            TYPES,
            typed("HeaderString"),
        )
        .with(PLACEMENT, TYPES_HEADER)
        .convert("string", "string", "string"),
        Case::new(
            "header_types_as_json",
            "every common type in a header, `JsonConverter`",
            TYPES,
            typed("HeaderJson"),
        )
        .with(PLACEMENT, TYPES_HEADER)
        .convert("json", "json", "json"),
        Case::new(
            "header_types_as_json_schemas",
            "every common type in a header, with schemas",
            TYPES,
            typed("HeaderSchemas"),
        )
        .with(PLACEMENT, TYPES_HEADER)
        .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new(
            "header_alias",
            "headers with other names, and one twice",
            OUTBOX,
            vec![event("Alias", "key-1", "'{}'")],
        )
        .with(PLACEMENT, "type:header:eventType,aggregatetype:header:aggregate,type:header"),
        Case::new("other_types", "less common types in headers", others, vec![other("OtherTypes")])
            .with(PLACEMENT, others_placed),
        Case::new(
            "other_types_as_json_schemas",
            "less common types in headers, with schemas",
            others,
            vec![other("OtherTypesSchemas")],
        )
        .with(PLACEMENT, others_placed)
        .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("floats", "numbers as Java writes them", floats, float("Floats"))
            .with(PLACEMENT, "f4:header,f8:header"),
        Case::new("floats_as_json", "numbers as Java writes them, in JSON", floats, float("FloatsJson"))
            .with(PLACEMENT, "f4:envelope,f8:envelope")
            .convert("json", "json", "json"),
        Case::new("extremes", "infinite and far-off times", far, far_off("Extremes"))
            .with(PLACEMENT, "d:header,tm:header,ts:header,ts3:header,tz:header,tt:header,iv:header"),
        Case::new("numbers", "large and small numbers", numbers, number("Numbers"))
            .with(PLACEMENT, "n:header,n102:header,n9:header,nn:header"),
        Case::new(
            "numbers_as_json_schemas",
            "large and small numbers with schemas",
            numbers,
            number("NumbersSchemas"),
        )
        .with(PLACEMENT, "n:envelope,n102:envelope,n9:envelope,nn:envelope")
        .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("odd_types", "types with other precisions, and arrays", odd, oddly("OddTypes"))
            .with(PLACEMENT, odd_placed)
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new(
            "numeric_nan",
            "`numeric` that is no number",
            nan,
            vec![
                more("NumericNan", "key-1", "'x'", ", n, n102", ", 'NaN', 'NaN'"),
                more("NumericNan", "key-1", "'x'", ", n, n102", ", 'Infinity', NULL"),
            ],
        )
        .with(PLACEMENT, "n:header,n102:header"),
        Case::new(
            "arrays_of_arrays",
            "an array of two dimensions",
            square,
            vec![more("ArraysOfArrays", "key-1", "'x'", ", aa", ", '{{1,2},{3,4}}'")],
        )
        .with(PLACEMENT, "aa:header"),
        Case::new("enums", "an enum in a header", mood, vec![moody("Enums")])
            .with(PLACEMENT, "m:header,mn:header"),
        Case::new("enums_as_json", "an enum as JSON", mood, vec![moody("EnumsJson")])
            .with(PLACEMENT, "m:envelope,mn:envelope")
            .convert("json", "json", "json"),
        Case::new("enums_as_json_schemas", "an enum as JSON with schemas", mood, vec![moody("EnumsSchemas")])
            .with(PLACEMENT, "m:envelope,mn:envelope")
            .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new("defaults", "columns with a DEFAULT", defaults, default("Defaults"))
            .with(PLACEMENT, "n:header,m:header"),
        Case::new(
            "defaults_as_json_schemas",
            "columns with a DEFAULT, with schemas",
            defaults,
            default("DefaultsSchemas"),
        )
        .with(PLACEMENT, "n:envelope,m:envelope")
        .convert("json-schemas", "json-schemas", "json-schemas"),
        Case::new(
            "envelope_as_string",
            "envelope through the `StringConverter`",
            TYPES,
            typed("EnvelopeString"),
        )
        .with(PLACEMENT, TYPES_ENVELOPE),
        Case::new(
            "partition",
            "a partition of type `int4`",
            part,
            vec![parted("Partition", "2, 1"), parted("Partition", "0, 1"), parted("Partition", "NULL, 1")],
        )
        .with(PLACEMENT, "part:partition"),
        Case::new(
            "partition_int8",
            "a partition of type `int8`",
            part,
            vec![parted("PartitionInt8", "2, 1")],
        )
        .with(PLACEMENT, "big:partition"),
        Case::new(
            "missing_ignored",
            "a missing column, `table.fields.additional.error.on.missing=false`",
            OUTBOX,
            vec![event("Missing", "key-1", "'{}'")],
        )
        .with(PLACEMENT, "nope:header,type:header")
        .with("table.fields.additional.error.on.missing", "false"),
        Case::new("missing_error", "a missing column", OUTBOX, vec![event("MissingError", "key-1", "'{}'")])
            .with(PLACEMENT, "nope:header"),
        Case::new(
            "missing_envelope",
            "a missing column for the envelope, ignored",
            OUTBOX,
            vec![event("MissingEnvelope", "key-1", "'{}'")],
        )
        .with(PLACEMENT, "nope:envelope,type:envelope")
        .with("table.fields.additional.error.on.missing", "false"),
    ]
}
