//! `[table]`: an application's own outbox, mapped to airtight's fields.
//!
//! ```toml
//! [table]
//! name = "transfer_events"
//! id = "event_id"
//! payload = "payload"
//! aggregate_id = "transfer_id"
//! stream = { constant = "transfers" }
//! count = { retries = "retry_count" }
//! status = { column = "status", new = "PENDING", done = "PUBLISHED", dead = "DEAD_LETTER" }
//! ```
//!
//! or the name of a preset: `preset = "relay-log"`.

use airtight::{
    inbox::DedupeKey,
    table::{
        Condition, Count, Field, LogSpec, Lookup, OffsetTable, PayloadKind, Role, StatusSpec, TableSpec, Test,
    },
};

use super::file::{Result, Section, Value};

/// Columns that a table may or may not have.
const OPTIONAL: [&str; 19] = [
    "seq",
    "created_at",
    "op",
    "payload_bytes",
    "headers",
    "occurred_at",
    "schema_version",
    "max_attempts",
    "next_retry_at",
    "locked_until",
    "claim_token",
    "lost_leases",
    "error_code",
    "error_message",
    "finished_at",
    "updated_at",
    "last_attempt_at",
    "partition",
    "phase",
];

const REST: [&str; 19] = [
    "preset",
    "schema",
    "name",
    "identity",
    "id",
    "stream",
    "event_type",
    "aggregate_type",
    "aggregate_id",
    "payload",
    "payload_kind",
    "extra",
    "status",
    "count",
    "zone",
    "lookup",
    "offsets",
    "channel",
    "dedupe",
];

/// A table and, where it has one, its preset.
pub(super) struct Mapped {
    pub(super) spec: TableSpec,
    pub(super) is_relay_log: bool,
}

pub(super) fn read(value: &Value<'_>) -> Result<Mapped> {
    let known: Vec<&str> = REST.into_iter().chain(OPTIONAL).collect();
    let table = value.section(&known)?;
    match table.get("preset") {
        Some(preset) => {
            let spec = preset.word(&[("relay-log", TableSpec::relay_log as fn() -> TableSpec)])?();
            if let Some((key, value)) = table.entries().into_iter().find(|(key, _)| key != "preset") {
                return Err(
                    value.error(format!("a preset sets all columns; remove either `{key}` or `preset`"))
                );
            }
            Ok(Mapped { spec, is_relay_log: true })
        }
        None => {
            let spec = read_columns(&table)?;
            if let (Err(error), Some(status)) = (spec.check_roles(), table.get("status")) {
                return Err(status.error(error.to_string()));
            }
            Ok(Mapped { spec, is_relay_log: false })
        }
    }
}

fn read_columns(table: &Section<'_>) -> Result<TableSpec> {
    let log = log(table)?;
    let column = |key: &str| table.get(key).map(|value| value.name()).transpose();
    let id = table.require("id")?.name()?;
    Ok(TableSpec {
        schema: column("schema")?,
        table: table.require("name")?.name()?,
        identity: column("identity")?.unwrap_or_else(|| id.clone()),
        id,
        seq: column("seq")?,
        created_at: column("created_at")?,
        stream: field(table, "stream")?,
        event_type: field(table, "event_type")?,
        aggregate_type: field(table, "aggregate_type")?,
        aggregate_id: field(table, "aggregate_id")?,
        op: column("op")?,
        // What is looked up may be the whole row.
        payload: match (column("payload")?, &log.lookup) {
            (Some(payload), _) => payload,
            (None, Some(_)) => String::new(),
            (None, None) => table.require("payload")?.name()?,
        },
        payload_kind: payload_kind(table)?,
        payload_bytes: column("payload_bytes")?,
        headers: column("headers")?,
        occurred_at: column("occurred_at")?,
        schema_version: column("schema_version")?,
        max_attempts: column("max_attempts")?,
        extra: extra(table)?,
        status: table.get("status").map(|value| status(&value)).transpose()?,
        count: table.get("count").map(|value| count(&value)).transpose()?,
        next_retry_at: column("next_retry_at")?,
        locked_until: column("locked_until")?,
        claim_token: column("claim_token")?,
        lost_leases: column("lost_leases")?,
        error_code: column("error_code")?,
        error_message: column("error_message")?,
        finished_at: column("finished_at")?,
        updated_at: column("updated_at")?,
        last_attempt_at: column("last_attempt_at")?,
        partition: column("partition")?,
        phase: column("phase")?,
        zone: column("zone")?.unwrap_or_else(|| "UTC".into()),
        log,
    })
}

fn field(table: &Section<'_>, key: &str) -> Result<Field> {
    let value = table.require(key)?;
    if value.is_text() {
        return Ok(Field::Column(value.name()?));
    }
    let section = value.section(&["constant", "first_of"])?;
    match (section.get("constant"), section.get("first_of")) {
        (Some(constant), None) => Ok(Field::Constant(constant.name()?)),
        (None, Some(columns)) => {
            let names: Vec<String> = columns.list()?.iter().map(Value::name).collect::<Result<_>>()?;
            if names.is_empty() {
                return Err(columns.error("is empty; name the columns, the first that is not NULL wins"));
            }
            Ok(Field::FirstOf(names))
        }
        _ => Err(value.error("give either `constant` or `first_of`, or the name of a column")),
    }
}

/// What only a table that is followed as a log has.
fn log(table: &Section<'_>) -> Result<LogSpec> {
    Ok(LogSpec {
        lookup: table.get("lookup").map(|value| lookup(&value)).transpose()?,
        offsets: table.get("offsets").map(|value| offsets(&value)).transpose()?,
        channel: table.get("channel").map(|value| value.name()).transpose()?,
        dedupe: table.get("dedupe").map(|value| dedupe(&value)).transpose()?.unwrap_or_default(),
    })
}

fn lookup(value: &Value<'_>) -> Result<Lookup> {
    let section = value.section(&["schema", "table", "key", "by"])?;
    let key = section.require("key")?.name()?;
    Ok(Lookup {
        schema: section.get("schema").map(|value| value.name()).transpose()?,
        table: section.require("table")?.name()?,
        by: section.get("by").map(|value| value.name()).transpose()?.unwrap_or_else(|| key.clone()),
        key,
    })
}

fn offsets(value: &Value<'_>) -> Result<OffsetTable> {
    let section = value.section(&["schema", "table", "consumer", "last_seq", "updated_at"])?;
    let optional = |key: &str| section.get(key).map(|value| value.name()).transpose();
    Ok(OffsetTable {
        schema: optional("schema")?,
        table: section.require("table")?.name()?,
        consumer: section.require("consumer")?.name()?,
        last_seq: section.require("last_seq")?.name()?,
        updated_at: optional("updated_at")?,
    })
}

/// `"event_id"`, `"event_id_and_op"`, or `{ aggregate_version = "HEADER OR COLUMN" }`.
fn dedupe(value: &Value<'_>) -> Result<DedupeKey> {
    if value.is_text() {
        let and_op = value.word(&[("event_id", false), ("event_id_and_op", true)])?;
        return Ok(if and_op { DedupeKey::EventIdAndOp } else { DedupeKey::EventId });
    }
    let section = value.section(&["aggregate_version"])?;
    Ok(DedupeKey::AggregateVersion(section.require("aggregate_version")?.name()?))
}

fn payload_kind(table: &Section<'_>) -> Result<PayloadKind> {
    let words = [
        ("json", PayloadKind::Json),
        ("json_text", PayloadKind::JsonText),
        ("text", PayloadKind::Text),
        ("bytes", PayloadKind::Bytes),
    ];
    Ok(table.get("payload_kind").map(|value| value.word(&words)).transpose()?.unwrap_or(PayloadKind::Json))
}

fn extra(table: &Section<'_>) -> Result<Vec<(String, String)>> {
    let Some(value) = table.get("extra") else { return Ok(Vec::new()) };
    value.names()?.entries().into_iter().map(|(name, column)| Ok((name, column.name()?))).collect()
}

fn count(value: &Value<'_>) -> Result<Count> {
    let section = value.section(&["attempts", "retries"])?;
    match (section.get("attempts"), section.get("retries")) {
        (Some(column), None) => Ok(Count::Attempts(column.name()?)),
        (None, Some(column)) => Ok(Count::Retries(column.name()?)),
        _ => {
            Err(value.error("give either `attempts` (grows at the claim) or `retries` (grows at a failure)"))
        }
    }
}

fn status(value: &Value<'_>) -> Result<StatusSpec> {
    let section = value.section(&["column", "new", "retrying", "processing", "done", "dead", "unknown"])?;
    let optional = |key: &str| section.get(key).map(|value| role(&value)).transpose();
    let new = role(&section.require("new")?)?;
    Ok(StatusSpec {
        column: section.require("column")?.name()?,
        retrying: optional("retrying")?.unwrap_or_else(|| new.clone()),
        new,
        processing: optional("processing")?,
        done: role(&section.require("done")?)?,
        dead: role(&section.require("dead")?)?,
        unknown: optional("unknown")?,
    })
}

/// `"WORD"`, or `{ word = "FAILED", when = { column = "retries", less = 5 } }`.
fn role(value: &Value<'_>) -> Result<Role> {
    if value.is_text() {
        return Ok(Role::word(value.name()?));
    }
    let section = value.section(&["word", "when"])?;
    let word = section.require("word")?.name()?;
    let Some(when) = section.get("when") else { return Ok(Role::word(word)) };
    let condition = when.section(&["column", "less", "at_least", "equal"])?;
    let column = condition.require("column")?.name()?;
    let tests: Vec<(Test, Value<'_>)> =
        [("less", Test::Less), ("at_least", Test::AtLeast), ("equal", Test::Equal)]
            .into_iter()
            .filter_map(|(key, test)| condition.get(key).map(|value| (test, value)))
            .collect();
    match &tests[..] {
        [(test, value)] => {
            Ok(Role::when(word, Condition { column, test: *test, value: value.number(i64::MIN)? }))
        }
        _ => Err(when.error("give exactly one of `less`, `at_least` and `equal`")),
    }
}
