//! A row that is read in two ways becomes the same event: with the queue's SQL and its decoder, and from the WAL with [`Mapping`]. A
//! change on one side only fails here.

use std::{collections::HashMap, sync::Arc};

use airtight_core::{
    Event,
    admin::Admin,
    event::SourceColumn,
    queue::BadRow,
    table::{Condition, Field, PayloadKind, Role, StatusSpec, TableSpec, Test},
};
use airtight_testkit::postgres::TestDb;
use bytes::Bytes;
use sqlx::{AssertSqlSafe, Column, PgConnection, Row, TypeInfo, ValueRef};

use super::{
    emitted,
    pgoutput::{Message, Relation, parse},
    row::{Mapping, RowOptions, texts},
    values::{binary_to_text, builtin},
};
use crate::{
    PgOptions, PgOutbox,
    columns::{Columns, EventColumns},
    decode::Layout,
};

const MAX_PAYLOAD: usize = 100_000;
const CONTEXT: RowOptions = RowOptions { max_payload: MAX_PAYLOAD, keep_row: false };

/// What there is to know of a row.
#[derive(Debug, PartialEq)]
struct Observed {
    identity: Option<String>,
    event: Result<Event, (String, Option<String>, String)>,
    max_attempts: Option<u32>,
    is_open: bool,
}

fn told(event: Result<Event, BadRow>) -> Result<Event, (String, Option<String>, String)> {
    event.map_err(|bad| (bad.id, bad.key, bad.error.code().to_owned()))
}

/// The rows of a table as they came out of the WAL.
type Rows = (Arc<[SourceColumn]>, Vec<Vec<Option<Bytes>>>);

async fn run(conn: &mut PgConnection, sql: impl Into<String>) {
    let sql = sql.into();
    sqlx::raw_sql(AssertSqlSafe(sql.clone()))
        .execute(conn)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}

async fn through_the_queue(outbox: &PgOutbox) -> Vec<Observed> {
    let mut conn = outbox.acquire().await.unwrap();
    let columns = EventColumns::load(outbox, &mut conn).await.unwrap();
    let is_open = match outbox.spec.status {
        Some(_) => Columns::load(outbox, &mut conn).await.unwrap().is_open(),
        None => "true".into(),
    };
    let sql = format!(
        "SELECT {}, {}::text AS identity, coalesce({is_open}, false) AS is_open FROM {} t ORDER BY {}",
        columns.event_columns(&MAX_PAYLOAD.to_string()),
        columns.identity(),
        columns.table,
        columns.identity(),
    );
    let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(conn.get()).await.unwrap();
    rows.iter()
        .map(|row| {
            let layout = Layout::of(row).unwrap();
            Observed {
                identity: row.get("identity"),
                event: told(layout.event(row, &outbox.spec, MAX_PAYLOAD)),
                max_attempts: layout.max_attempts(row),
                is_open: row.get("is_open"),
            }
        })
        .collect()
}

fn through_the_wal(spec: &TableSpec, (columns, rows): &Rows) -> Vec<Observed> {
    let mapping = Mapping::new(spec, columns.clone()).unwrap();
    let seen = |values: &Vec<Option<Bytes>>| Observed {
        identity: mapping.identity(values).map(|text| std::str::from_utf8(text).unwrap().to_owned()),
        event: told(mapping.event(values.clone(), &CONTEXT)),
        max_attempts: mapping.max_attempts(values),
        is_open: mapping.is_open(values),
    };
    rows.iter().map(seen).collect()
}

fn source_columns(relation: &Relation, domains: &HashMap<u32, u32>) -> Arc<[SourceColumn]> {
    let column = |column: &super::pgoutput::RelationColumn| SourceColumn {
        name: column.name.clone(),
        type_oid: domains.get(&column.type_oid).copied().unwrap_or(column.type_oid),
        type_modifier: column.type_modifier,
        nullable: true,
    };
    relation.columns.iter().map(column).collect()
}

/// A slot of the session's own, and a publication of everything.
async fn open_slot(conn: &mut PgConnection) {
    run(conn, "CREATE PUBLICATION p FOR ALL TABLES").await;
    let slot = "SELECT pg_create_logical_replication_slot('drift_' || pg_backend_pid(), 'pgoutput', true)";
    run(conn, slot).await;
}

/// What the WAL has since then, by table, and the events without one.
async fn read_slot(conn: &mut PgConnection) -> (HashMap<String, Rows>, Vec<Bytes>) {
    let changes: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT data FROM pg_logical_slot_get_binary_changes('drift_' || pg_backend_pid(), NULL, NULL, \
         'proto_version', '1', 'publication_names', 'p', 'messages', 'true')",
    )
    .fetch_all(conn)
    .await
    .unwrap();
    let mut names = HashMap::new();
    let mut domains = HashMap::new();
    let mut tables: HashMap<String, Rows> = HashMap::new();
    let mut emitted = Vec::new();
    for change in changes {
        match parse(change.into()).unwrap() {
            Message::Type { oid, schema, name } => {
                domains.extend(builtin(&schema, &name).map(|base| (oid, base)));
            }
            Message::Relation(relation) => {
                tables
                    .entry(relation.name.clone())
                    .or_insert((source_columns(&relation, &domains), Vec::new()));
                names.insert(relation.id, relation.name);
            }
            Message::Insert { relation, tuple } => {
                let (columns, rows) = tables.get_mut(&names[&relation]).unwrap();
                rows.push(texts(&tuple, columns).unwrap());
            }
            Message::Logical { transactional: true, prefix, content, .. } if prefix == "airtight" => {
                emitted.push(content);
            }
            _ => {}
        }
    }
    (tables, emitted)
}

fn same(name: &str, queue: &[Observed], cdc: &[Observed]) {
    assert!(!queue.is_empty(), "{name}: no rows");
    assert_eq!(queue.len(), cdc.len(), "{name}");
    for (queue, cdc) in queue.iter().zip(cdc) {
        assert_eq!(queue, cdc, "{name}: the queue (left) and cdc (right) differ");
    }
}

#[tokio::test]
async fn the_canonical_outbox_gives_equal_events() {
    let Some(db) = TestDb::create("the_canonical_outbox_gives_equal_events").await else { return };
    let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
    outbox.migrate().await.unwrap();
    let mut conn = db.pool(1).await.acquire().await.unwrap();
    // Rows of before anything was refused.
    run(&mut conn, "ALTER TABLE airtight.outbox DISABLE TRIGGER outbox_refuse").await;
    open_slot(&mut conn).await;

    let insert = "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id";
    for rest in [
        ") VALUES ('shop', 'Placed', 'Order', '1')",
        ", payload, headers) VALUES ('shop', 'Placed', 'Order', 'a b', '{\"b\":1.50,\"a\":[\"é\\\\n\",null]}', '{\"traceparent\":\"00\"}')",
        ", payload) VALUES ('s', 'T', 'A', E'tab\\there', 'null'), ('s', 'T', 'A', 'x', '\"text\"'), ('s', 'T', 'A', 'x', '1e3')",
        ", payload_bytes, op) VALUES ('s', 'T', 'A', '2', '\\x00ff5c78', 'delete'), ('s', 'T', 'A', '2', '', 'delete')",
        ", occurred_at, schema_version, max_attempts) VALUES ('s', 'T', 'A', '3', '2026-11-16 05:47:43.123456+09', 7, 3), \
         ('s', 'T', 'A', '3', 'infinity', -7, 2147483647), ('s', 'T', 'A', '3', '-infinity', 1, NULL), \
         ('s', 'T', 'A', '3', '0044-03-15 12:00:00+00 BC', 1, NULL), ('s', 'T', 'A', '3', '12345-01-01', 1, NULL), \
         ('s', 'T', 'A', '3', '9999-12-31 23:59:59.5+00', 1, NULL), ('s', 'T', 'A', '3', '1969-12-31 23:59:59.999999+00', 1, NULL)",
        ", status) VALUES ('s', 'T', 'A', '4', 'processing'), ('s', 'T', 'A', '4', 'done'), ('s', 'T', 'A', '4', 'dead'), \
         ('s', 'T', 'A', '4', 'unknown')",
        ", headers) VALUES ('s', 'T', 'A', '5', '{\"n\":1}'), ('s', 'T', 'A', '5', '{\"n\":\"\\u00e9\\\"\"}')",
        // Text that shrinks when it is stored, above and below the limit.
        ", payload) VALUES ('s', 'T', 'A', '6', to_jsonb(repeat('x', 99998))), ('s', 'T', 'A', '6', to_jsonb(repeat('x', 99999)))",
        ", payload_bytes) VALUES ('s', 'T', 'A', '7', decode(repeat('ab', 100000), 'hex')), \
         ('s', 'T', 'A', '7', decode(repeat('ab', 100001), 'hex'))",
    ] {
        run(&mut conn, format!("{insert}{rest}")).await;
    }
    run(
        &mut conn,
        "SELECT pg_logical_emit_message(true, 'airtight', json_build_object('id', gen_random_uuid(), 'stream', 's', \
         'eventType', 'T', 'aggregateType', 'A', 'aggregateId', 'é', 'payload', '{\"a\" :1.50}'::json, \
         'occurredAt', timestamptz '2026-11-16 05:47:43.5+00')::text)",
    )
    .await;

    let queue = through_the_queue(&outbox).await;
    assert_eq!(queue.len(), 24);
    assert_eq!(queue.iter().filter(|seen| seen.event.is_err()).count(), 3, "{queue:#?}");
    let (tables, emitted) = read_slot(&mut conn).await;
    same("outbox", &queue, &through_the_wal(outbox.spec(), &tables["outbox"]));

    let [content] = emitted.as_slice() else { panic!("{emitted:?}") };
    let event = emitted::event(content.clone(), &CONTEXT).unwrap();
    assert_eq!((event.aggregate_id.as_str(), event.payload.as_bytes()), ("é", &b"{\"a\" :1.50}"[..]));
    assert_eq!(event.occurred_at, time::macros::datetime!(2026-11-16 05:47:43.5 UTC));
}

const FOREIGN: &str = "
    CREATE TYPE mood AS ENUM ('fine', 'so so');
    CREATE DOMAIN price AS numeric(9, 2);
    CREATE DOMAIN label AS char(6);
    CREATE DOMAIN moment AS timestamptz;
    CREATE DOMAIN list AS int[];
    CREATE TABLE foreign_outbox (
        n integer PRIMARY KEY, code char(8), flag boolean, addr inet, topic varchar(40), word name, body text, raw bytea,
        raw_text text, op char(9), headers text, at timestamp, day date, epoch bigint, tz timestamptz, pos numeric,
        f8 float8, f4 real, version smallint, tries numeric(4, 1), status char(10), retries smallint, doc jsonb,
        doc_json json, ints int[], texts text[], stamps timestamptz[], docs jsonb[], flags bool[], nums numeric[],
        uids uuid[], mood mood, span interval, net cidr, clock time, chars char(3)[], plain timestamp[], days date[],
        d_price price DEFAULT 1.50, d_label label DEFAULT 'l', d_moment moment DEFAULT '2026-11-16 05:47:43.5+00',
        d_list list DEFAULT '{1,2}', moods mood[]
    );
    ALTER TABLE foreign_outbox REPLICA IDENTITY FULL;
    INSERT INTO foreign_outbox VALUES
        (1, 'ab', true, '10.0.0.1', 'orders', 'w', '{\"a\": 1}', '\\x00ff', '\\x6162', 'upsert', '{\"h\":\"v\"}',
         '2026-11-16 05:47:43.123456', '2026-11-16', 1700000000, '2026-11-16 05:47:43+00', 2.5, 1e20, 0.1, 3, 4.5, 'NEW', 0,
         '{\"z\": [1.50, 1e2], \"a\": null}', '{\"b\" :1, \"b\":2}', '{1,NULL,-3}', '{a,\"b c\",\"say \\\"x\\\" \\\\\\\\\",\"NULL\",NULL,\"\"}',
         '{2026-11-16 05:47:43.5+00,infinity}', array['{\"a\":1}', '2']::jsonb[], '{t,f}', '{1.10,NaN}',
         array['0192f3a4-0000-7000-8000-000000000001']::uuid[], 'so so', '1 day 02:03:04', '10.0.0.0/8', '05:06:07.5', '{a,bc}',
         '{2026-11-16 05:47:43,-infinity}', '{2026-11-16}'),
        (2, 'a b', false, '::1', 'orders', 'w', '[]', '', '', NULL, NULL, '9999-12-31 23:59:59.75', 'infinity', -1,
         'infinity', -2.5, 'NaN', '-Infinity', NULL, NULL, 'FAILED', 4, 'null', '\"\\u0000\"', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
         'fine', '-1 mon', '::/0', '23:59:59', '{}', '{}', '{}'),
        (3, '', true, '10.0.0.0/8', 'orders', 'w', '{oops', NULL, 'a\\\\b\\001é', 'delete', '{}', '0044-03-15 12:00:00 BC',
         '0044-03-15 BC', 253402300800, '0044-03-15 12:00:00.25+00 BC', 123456789012345678, 'Infinity', 1.5e-7, 32767, 0.4,
         'FAILED', 5, '1', '[ ]', '{{1,2},{3,4}}', '[0:1]={x,y}', NULL, NULL, NULL, '{1e-10}', NULL, NULL, NULL, NULL, NULL, NULL,
         '{0044-03-15 12:00:00 BC}', '{0044-03-15 BC,infinity}'),
        (4, 'x', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'upsert', '[1]', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
         NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
        (5, 'é', false, '1.2.3.4/24', '', 'w', '\"\\u0000\"', '\\x', 'x', 'insert', '{\"a\":\"b\"}', '-infinity', '1999-01-01', 0,
         '1890-01-01 00:00:00+00', -0.5, -0.0, 16777216, -1, -3, 'NEW', NULL, '{}', '0.10', '{7}', '{\"{\"}', NULL, NULL, NULL, NULL, NULL,
         NULL, '00:00', NULL, NULL, NULL, NULL, NULL),
        (6, 'long', false, NULL, 'orders', 'w', 'true', NULL, NULL, 'upsert', NULL, '10000-01-01 02:00:00', '12345-06-07', 1,
         '9999-12-31 23:59:59.999999+00', 9007199254740993, 4.5, 2.5, 1, 99.9, 'DONE', NULL, '12345678901234567890', '1e2', NULL, NULL,
         NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
        -- A number that no float holds.
        (7, 'huge', true, NULL, 'orders', 'w', NULL, NULL, NULL, 'upsert', NULL, NULL, NULL, NULL, NULL, 1, NULL, NULL, NULL, NULL,
         'FAILED', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{1e400}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
";

fn foreign() -> TableSpec {
    let column = |name: &str| Some(name.to_owned());
    let extra = [
        "d_price", "d_label", "d_moment", "d_list", "code", "flag", "addr", "topic", "raw", "at", "day",
        "tz", "pos", "f8", "f4", "version", "tries", "doc", "doc_json", "ints", "texts", "stamps", "docs",
        "flags", "nums", "uids", "mood", "span", "net", "clock", "chars", "plain", "days", "word", "epoch",
    ];
    TableSpec {
        identity: "n".into(),
        id: "code".into(),
        seq: column("n"),
        created_at: column("tz"),
        stream: Field::FirstOf(vec!["topic".into(), "code".into()]),
        event_type: Field::Constant("it's".into()),
        aggregate_type: Field::FirstOf(vec!["flag".into(), "word".into(), "n".into()]),
        aggregate_id: Field::FirstOf(vec!["addr".into(), "code".into()]),
        op: None,
        payload: "doc".into(),
        payload_bytes: None,
        headers: None,
        occurred_at: None,
        schema_version: column("version"),
        max_attempts: column("tries"),
        extra: extra.iter().map(|name| (format!("x_{name}"), (*name).to_owned())).collect(),
        ..TableSpec::canonical_log(None, "foreign_outbox")
    }
}

fn variants() -> Vec<(&'static str, TableSpec)> {
    let column = |name: &str| Some(name.to_owned());
    let base = foreign;
    let status = StatusSpec {
        column: "status".into(),
        new: Role::word("NEW"),
        retrying: Role::when("FAILED", Condition { column: "retries".into(), test: Test::Less, value: 5 }),
        processing: None,
        done: Role::word("DONE"),
        dead: Role::when("FAILED", Condition { column: "retries".into(), test: Test::AtLeast, value: 5 }),
        unknown: None,
    };
    let timed = |name: &str, zone: &str| TableSpec { occurred_at: column(name), zone: zone.into(), ..base() };
    vec![
        ("extra columns", base()),
        ("status", TableSpec { status: Some(status), ..base() }),
        ("op, headers", TableSpec { op: column("op"), headers: column("headers"), ..base() }),
        ("JSON text", TableSpec { payload: "body".into(), payload_kind: PayloadKind::JsonText, ..base() }),
        ("JSON text, unchecked", TableSpec { payload: "body".into(), ..base() }),
        ("json", TableSpec { payload: "doc_json".into(), payload_bytes: column("raw"), ..base() }),
        ("text", TableSpec { payload: "raw_text".into(), payload_kind: PayloadKind::Text, ..base() }),
        ("bytes", TableSpec { payload: "raw".into(), payload_kind: PayloadKind::Bytes, ..base() }),
        (
            "bytes in text",
            TableSpec { payload: "raw_text".into(), payload_kind: PayloadKind::Bytes, ..base() },
        ),
        ("no seq", TableSpec { seq: None, ..base() }),
        (
            "no seq, zoneless",
            TableSpec { seq: None, created_at: column("at"), zone: "-09:00".into(), ..base() },
        ),
        ("nothing that ascends", TableSpec { seq: None, created_at: None, ..base() }),
        ("numeric seq", TableSpec { seq: column("pos"), ..base() }),
        ("timestamp", timed("at", "UTC")),
        ("timestamp, east", timed("at", "-09:00")),
        ("timestamp, west", timed("at", "+3:30")),
        ("date", timed("day", "+05:00")),
        ("seconds", timed("epoch", "UTC")),
        (
            "domains",
            TableSpec {
                occurred_at: column("d_moment"),
                aggregate_id: Field::Column("d_label".into()),
                stream: Field::Column("d_price".into()),
                seq: column("d_price"),
                ..base()
            },
        ),
        (
            "strange fields",
            TableSpec {
                id: "n".into(),
                stream: Field::Column("word".into()),
                aggregate_type: Field::Column("tz".into()),
                aggregate_id: Field::Column("doc".into()),
                ..base()
            },
        ),
    ]
}

#[tokio::test]
async fn a_foreign_table_gives_equal_events() {
    let Some(db) = TestDb::create("a_foreign_table_gives_equal_events").await else { return };
    let mut conn = db.pool(1).await.acquire().await.unwrap();
    open_slot(&mut conn).await;
    run(&mut conn, FOREIGN).await;
    let (tables, _) = read_slot(&mut conn).await;
    let rows = &tables["foreign_outbox"];
    assert_eq!(rows.1.len(), 7);
    for (name, spec) in variants() {
        let options = PgOptions { spec: Some(spec), max_connections: 1, ..PgOptions::default() };
        let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
        let queue = through_the_queue(&outbox).await;
        assert!(queue.iter().any(|seen| seen.event.is_ok()), "{name}: {queue:?}");
        same(name, &queue, &through_the_wal(outbox.spec(), rows));
        outbox.pool().close().await;
    }
}

#[tokio::test]
async fn binary_values_become_the_text_that_the_server_writes() {
    let Some(db) = TestDb::create("binary_values_become_the_text_that_the_server_writes").await else {
        return;
    };
    let mut conn = db.pool(1).await.acquire().await.unwrap();
    run(&mut conn, FOREIGN).await;
    let sql = "SELECT code, flag, topic, word, raw, at, epoch, tz, n, version, doc, doc_json, uids[1], op FROM foreign_outbox \
               ORDER BY n";
    let binary = sqlx::query(sql).fetch_all(&mut *conn).await.unwrap();
    let text = sqlx::raw_sql(sql).fetch_all(&mut *conn).await.unwrap();
    let mut compared = 0;
    for (binary, text) in binary.iter().zip(&text) {
        for column in binary.columns() {
            let value = binary.try_get_raw(column.ordinal()).unwrap();
            let expected = text.try_get_raw(column.ordinal()).unwrap();
            assert_eq!(value.is_null(), expected.is_null());
            if value.is_null() {
                continue;
            }
            let type_oid = column.type_info().oid().unwrap().0;
            let value = Bytes::copy_from_slice(value.as_bytes().unwrap());
            let expected = expected.as_bytes().unwrap();
            let name = column.type_info().name();
            assert_eq!(binary_to_text(type_oid, value).unwrap(), expected, "{}, {name}", column.name());
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared}");
}
