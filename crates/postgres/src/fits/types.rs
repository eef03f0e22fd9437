//! Columns and other tables: can they be read and written as the mapping says?
//!
//! A value that the server cannot convert fails the statement for all its rows, so types are checked before.

use airtight_core::{
    Result,
    admin::Finding,
    table::{PayloadKind, quote},
};

use super::{rows, trial};
use crate::{
    PgOutbox,
    columns::{EventColumns, qualified},
};

const INTEGERS: [&str; 3] = ["smallint", "integer", "bigint"];
const NUMBERS: [&str; 4] = ["smallint", "integer", "bigint", "numeric"];
const TEXTS: [&str; 4] = ["text", "character varying", "bpchar", "citext"];
const STAMPS: [&str; 2] = ["timestamp with time zone", "timestamp without time zone"];
const TIMES: [&str; 6] =
    ["timestamp with time zone", "timestamp without time zone", "date", "smallint", "integer", "bigint"];
const JSON: [&str; 6] = ["json", "jsonb", "text", "character varying", "bpchar", "citext"];

pub(super) async fn problems(outbox: &PgOutbox, c: &EventColumns) -> Result<Vec<Finding>> {
    let mut problems = of_columns(c);
    problems.extend(of_lookup(outbox, c).await?);
    problems.extend(of_offsets(outbox, c).await?);
    Ok(problems)
}

fn of_columns(c: &EventColumns) -> Vec<Finding> {
    let spec = &c.spec;
    let mut problems = Vec::new();
    let mut expect = |key: &str, column: Option<&str>, types: &[&str]| {
        let Some(column) = column else { return };
        let found = c.type_of(column);
        if !types.contains(&found) {
            problems.push(Finding::fatal(format!(
                "{}.{column}, mapped as `{key}`, is of type {found}; `{key}` takes {}",
                c.outbox,
                types.join(", ")
            )));
        }
    };
    expect("seq", spec.seq.as_deref(), &NUMBERS);
    expect("created_at", spec.created_at.as_deref(), &TIMES);
    expect("occurred_at", spec.occurred_at.as_deref(), &TIMES);
    for (key, column) in [
        ("next_retry_at", &spec.next_retry_at),
        ("locked_until", &spec.locked_until),
        ("finished_at", &spec.finished_at),
        ("updated_at", &spec.updated_at),
        ("last_attempt_at", &spec.last_attempt_at),
    ] {
        expect(key, column.as_deref(), &STAMPS);
    }
    for (key, column) in [("error_code", &spec.error_code), ("error_message", &spec.error_message)] {
        expect(key, column.as_deref(), &TEXTS);
    }
    for (key, column) in [("max_attempts", &spec.max_attempts), ("schema_version", &spec.schema_version)] {
        expect(key, column.as_deref(), &NUMBERS);
    }
    for (key, column) in
        [("partition", &spec.partition), ("phase", &spec.phase), ("lost_leases", &spec.lost_leases)]
    {
        expect(key, column.as_deref(), &INTEGERS);
    }
    expect("count", spec.count_column(), &NUMBERS);
    for (name, role) in spec.status.iter().flat_map(|status| status.roles()) {
        let when = role.when.as_ref().map(|when| when.column.as_str());
        let numbers = ["smallint", "integer", "bigint", "numeric", "real", "double precision"];
        expect(&format!("status.{name}.when"), when, &numbers);
    }
    expect("claim_token", spec.claim_token.as_deref(), &["uuid", "text", "character varying", "bpchar"]);
    expect("headers", spec.headers.as_deref(), &JSON);
    expect("payload_bytes", spec.payload_bytes.as_deref(), &["bytea"]);
    let payload = Some(spec.payload.as_str()).filter(|_| spec.log.lookup.is_none());
    match spec.payload_kind {
        PayloadKind::Json | PayloadKind::JsonText => expect("payload", payload, &JSON),
        PayloadKind::Bytes => expect("payload", payload, &["bytea"]),
        PayloadKind::Text => {}
    }
    problems
}

/// Columns of another table, and their types.
async fn columns_of(outbox: &PgOutbox, table: &str) -> Result<Vec<(String, String)>> {
    let sql = "SELECT a.attname::text, format_type(a.atttypid, -1) FROM pg_attribute a \
               WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped";
    rows(outbox, sql.into(), &[table]).await
}

/// The table that has the payloads.
async fn of_lookup(outbox: &PgOutbox, c: &EventColumns) -> Result<Option<Finding>> {
    let Some(lookup) = &c.spec.log.lookup else { return Ok(None) };
    let table = qualified(lookup.schema.as_deref(), &lookup.table);
    let mut wanted = vec![lookup.key.as_str()];
    wanted.extend(Some(c.spec.payload.as_str()).filter(|payload| !payload.is_empty()));
    let found = columns_of(outbox, &table).await?;
    if let Some(missing) = missing(&format!("{}: the payloads", c.outbox), &table, &found, &wanted) {
        return Ok(Some(missing));
    }
    let sql = format!(
        "SELECT EXISTS (SELECT FROM {table} l JOIN {} t ON l.{} = t.{} WHERE false)",
        c.table,
        quote(&lookup.key),
        quote(&lookup.by)
    );
    Ok(trial(outbox, sql).await?.err().map(|why| {
        Finding::fatal(format!(
            "{}: its payloads cannot be looked up in {table}, whose {} must equal {}: {why}",
            c.outbox, lookup.key, lookup.by
        ))
        .with_remedy("correct `lookup` in [table]")
    }))
}

/// The application's own table of offsets.
async fn of_offsets(outbox: &PgOutbox, c: &EventColumns) -> Result<Option<Finding>> {
    let Some(offsets) = &c.spec.log.offsets else { return Ok(None) };
    let table = qualified(offsets.schema.as_deref(), &offsets.table);
    let mut wanted = vec![offsets.consumer.as_str(), offsets.last_seq.as_str()];
    wanted.extend(offsets.updated_at.as_deref());
    let found = columns_of(outbox, &table).await?;
    if let Some(missing) = missing(&format!("{}: the offsets", c.outbox), &table, &found, &wanted) {
        return Ok(Some(missing));
    }
    let is = |column: &str, types: &[&str]| {
        found.iter().any(|(name, of)| name == column && types.contains(&of.as_str()))
    };
    if !is(&offsets.last_seq, &INTEGERS) {
        return Ok(Some(Finding::fatal(format!(
            "{table}.{}, mapped as `offsets.last_seq`, is not an integer",
            offsets.last_seq
        ))));
    }
    if !is(&offsets.consumer, &TEXTS) {
        return Ok(Some(Finding::fatal(format!(
            "{table}.{}, mapped as `offsets.consumer`, is not text",
            offsets.consumer
        ))));
    }
    Ok(None)
}

fn missing(what: &str, table: &str, found: &[(String, String)], wanted: &[&str]) -> Option<Finding> {
    if found.is_empty() {
        return Some(
            Finding::fatal(format!("{what} are in {table}, and there is no such table"))
                .with_remedy("create it, or correct [table]"),
        );
    }
    let missing: Vec<&str> =
        wanted.iter().copied().filter(|column| !found.iter().any(|(name, _)| name == column)).collect();
    (!missing.is_empty()).then(|| {
        Finding::fatal(format!("{what} are in {table}, which has no column {}", missing.join(", ")))
            .with_remedy("correct [table]")
    })
}
