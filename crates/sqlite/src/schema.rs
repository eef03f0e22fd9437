//! airtight's tables and their migrations.
//!
//! A migration is one immediate transaction that looks at `airtight_meta` first, so ten processes that start
//! at once migrate once. Own tables and each canonical outbox have a version of their own, since a file may
//! hold several outboxes, or only foreign ones. The entry `outbox:NAME` or `log:NAME` records the shape of the canonical
//! table.
//!
//! The version alone is not trusted: every statement creates only what is missing, so all of them run each time, and
//! whatever was dropped is created again.

use airtight_core::{
    Code, Error, Result,
    admin::Finding,
    event::MAX_PAYLOAD_BYTES,
    table::{Shape, TableSpec, quote},
};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use crate::{
    error::db,
    fits,
    outbox::SqliteOutbox,
    sql::{HELD, Sql},
};

/// The newest version of airtight's own tables that this program knows. 2: consumers of logs, and the inbox.
/// 3: replays.
const OWN_VERSION: i64 = 3;

/// The same of a canonical outbox, of either shape.
const OUTBOX_VERSION: i64 = 1;

const META: &str = "CREATE TABLE IF NOT EXISTS airtight_meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID";

const OWN_TABLES: [&str; 3] = [
    "CREATE TABLE IF NOT EXISTS airtight_relay (
    id TEXT PRIMARY KEY,
    outbox TEXT NOT NULL,
    host TEXT NOT NULL,
    grp TEXT NOT NULL,
    streams TEXT NOT NULL,
    ord TEXT NOT NULL,
    expires_at TEXT NOT NULL
) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS airtight_partition (
    outbox TEXT NOT NULL,
    grp TEXT NOT NULL,
    n INTEGER NOT NULL,
    owner TEXT,
    epoch INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (outbox, grp, n)
) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS airtight_side (
    outbox TEXT NOT NULL,
    event TEXT NOT NULL,
    next_retry_at TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    lost_leases INTEGER NOT NULL DEFAULT 0,
    claim_token TEXT,
    locked_until TEXT,
    error_code TEXT,
    error_message TEXT,
    unknown INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (outbox, event)
) WITHOUT ROWID",
];

/// What version 2 adds. Offsets are apart from `airtight_partition`, which says who owns what: a queue has that,
/// too. A parked event carries the whole event, since retention may remove it from the log.
const LOG_TABLES: [&str; 8] = [
    "CREATE TABLE IF NOT EXISTS airtight_consumer (
    outbox TEXT NOT NULL,
    name TEXT NOT NULL,
    partitions INTEGER NOT NULL,
    streams TEXT NOT NULL DEFAULT '[]',
    by_key INTEGER NOT NULL DEFAULT 1,
    block_on_dead INTEGER NOT NULL DEFAULT 0,
    paused INTEGER NOT NULL DEFAULT 0,
    revision INTEGER NOT NULL DEFAULT 0,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ','now')),
    replay INTEGER,
    replay_after INTEGER,
    replay_through INTEGER,
    PRIMARY KEY (outbox, name)
) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS airtight_offset (
    outbox TEXT NOT NULL,
    consumer TEXT NOT NULL,
    n INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    updated_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ','now')),
    PRIMARY KEY (outbox, consumer, n)
) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS airtight_parked (
    outbox TEXT NOT NULL,
    consumer TEXT NOT NULL,
    seq INTEGER NOT NULL,
    n INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'dead', 'unknown')),
    attempts INTEGER NOT NULL DEFAULT 0,
    next_retry_at TEXT,
    error_code TEXT,
    error_message TEXT,
    parked_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ','now')),
    id TEXT,
    stream TEXT,
    event_type TEXT,
    aggregate_type TEXT,
    aggregate_id TEXT NOT NULL,
    op TEXT,
    headers TEXT,
    occurred_at TEXT,
    created_at TEXT,
    schema_version INTEGER,
    max_attempts INTEGER,
    extra TEXT,
    payload TEXT,
    payload_bytes BLOB,
    PRIMARY KEY (outbox, consumer, seq)
)",
    "CREATE INDEX IF NOT EXISTS airtight_parked_key ON airtight_parked (outbox, consumer, aggregate_id, seq, state)",
    "CREATE INDEX IF NOT EXISTS airtight_parked_due ON airtight_parked (outbox, consumer, next_retry_at) \
     WHERE state = 'pending'",
    "CREATE TABLE IF NOT EXISTS airtight_floor (
    outbox TEXT PRIMARY KEY,
    seq INTEGER NOT NULL,
    created_at TEXT
) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS airtight_inbox (
    outbox TEXT NOT NULL,
    consumer TEXT NOT NULL,
    key TEXT NOT NULL,
    seq INTEGER,
    seen_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ','now')),
    PRIMARY KEY (outbox, consumer, key)
) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS airtight_inbox_seen ON airtight_inbox (outbox, seen_at)",
];

/// What version 3 adds where the tables of version 2 are there: which replay a consumer was last asked for, and of what.
const REPLAY_COLUMNS: [(&str, &str); 3] =
    [("replay", "INTEGER"), ("replay_after", "INTEGER"), ("replay_through", "INTEGER")];

/// The canonical log. Nothing in it is ever updated, and the seq is never given twice, also after the newest
/// row was removed: that is what AUTOINCREMENT is for. The body comes last, so that what is looked at without it
/// is on the row's first page.
fn log_table(sql: &Sql) -> String {
    format!(
        "CREATE TABLE IF NOT EXISTS {} (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE DEFAULT ({NEW_ID}),
    stream TEXT NOT NULL,
    event_type TEXT NOT NULL,
    aggregate_type TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    op TEXT NOT NULL DEFAULT 'upsert',
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ','now')),
    occurred_at TEXT,
    schema_version INTEGER NOT NULL DEFAULT 1,
    max_attempts INTEGER,
    headers TEXT NOT NULL DEFAULT '{{}}',
    payload TEXT CHECK (payload IS NULL OR json_valid(payload)),
    payload_bytes BLOB
)",
        sql.spec.qualified()
    )
}

/// Refuses rows that no relay could deliver. One trigger for both: each costs an insert a tenth.
fn refusal(sql: &Sql) -> String {
    let (name, on) = (quote(&format!("{}_refuse", sql.spec.table)), quote(&sql.spec.table));
    let name = match &sql.spec.schema {
        Some(schema) => format!("{}.{name}", quote(schema)),
        None => name,
    };
    let large = |column: &str| format!("octet_length(NEW.{column}) > {MAX_PAYLOAD_BYTES}");
    let large = format!("({} OR {})", large("payload"), large("payload_bytes"));
    format!(
        "CREATE TRIGGER IF NOT EXISTS {name} BEFORE INSERT ON {on} WHEN {large} OR (NEW.headers <> '{{}}' AND CASE
        WHEN NOT json_valid(NEW.headers) THEN 1 WHEN json_type(NEW.headers) <> 'object' THEN 1
        ELSE EXISTS (SELECT 1 FROM json_each(NEW.headers) WHERE type <> 'text') END)
    BEGIN
        SELECT CASE WHEN {large}
            THEN RAISE(ABORT, 'the payload is above the limit of {MAX_PAYLOAD_BYTES} bytes: store it elsewhere and publish a reference')
            ELSE RAISE(ABORT, 'headers must be a JSON object of strings') END;
    END"
    )
}

/// A random UUID, for rows that are inserted by hand.
const NEW_ID: &str = "lower(
        hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-'
        || substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))";

/// The canonical table and its indexes. A claim changes no column that stands in an index of unfinished
/// events; events that wait for a retry, and those that are done, stand in other indexes than the one that
/// claims walk along.
fn outbox_tables(sql: &Sql) -> Vec<String> {
    let table = sql.spec.qualified();
    // An index lives in its table's schema, and names the table without it.
    let on = quote(&sql.spec.table);
    let index = |name: &str, columns: &str, predicate: &str| {
        let name = quote(&format!("{}_{name}", sql.spec.table));
        let name = match &sql.spec.schema {
            Some(schema) => format!("{}.{name}", quote(schema)),
            None => name,
        };
        format!("CREATE INDEX IF NOT EXISTS {name} ON {on} ({columns}) WHERE {predicate}")
    };
    vec![
        format!(
            "CREATE TABLE IF NOT EXISTS {table} (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE DEFAULT ({NEW_ID}),
    stream TEXT NOT NULL,
    event_type TEXT NOT NULL,
    aggregate_type TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    op TEXT NOT NULL DEFAULT 'upsert',
    payload TEXT CHECK (payload IS NULL OR json_valid(payload)),
    payload_bytes BLOB,
    headers TEXT NOT NULL DEFAULT '{{}}',
    occurred_at TEXT,
    schema_version INTEGER NOT NULL DEFAULT 1,
    max_attempts INTEGER,
    status TEXT NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'processing', 'done', 'dead', 'unknown')),
    attempts INTEGER NOT NULL DEFAULT 0,
    next_retry_at TEXT,
    locked_until TEXT,
    claim_token TEXT,
    lost_leases INTEGER NOT NULL DEFAULT 0,
    error_code TEXT,
    error_message TEXT,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ','now')),
    finished_at TEXT,
    last_attempt_at TEXT,
    part INTEGER,
    phase INTEGER GENERATED ALWAYS AS (
        CASE status WHEN 'done' THEN 2 WHEN 'dead' THEN 1 WHEN 'unknown' THEN 1 ELSE 0 END) VIRTUAL
)"
        ),
        index("hot", "seq", "phase = 0 AND next_retry_at IS NULL"),
        index("hot_stream", "stream, seq", "phase = 0 AND next_retry_at IS NULL"),
        index("due", "next_retry_at", &format!("phase = 0 AND next_retry_at < '{HELD}'")),
        index("waiting", "aggregate_id, seq", "phase = 0 AND next_retry_at IS NOT NULL"),
        index("held", "aggregate_id, seq", &format!("phase = 0 AND next_retry_at = '{HELD}'")),
        index("dead", "aggregate_id, seq", "phase = 1"),
        index("suspect", "seq", "phase = 0 AND lost_leases >= 3"),
        index("unparted", "seq", "phase = 0 AND part IS NULL"),
        index("done", "finished_at, stream", "phase = 2"),
        refusal(sql),
    ]
}

impl SqliteOutbox {
    /// The statements that `migrate` runs on an empty database, for those who run them by hand.
    pub fn migration_sql(shape: Shape) -> String {
        let sql = Sql::new(TableSpec::of_shape(shape, None, &Self::canonical_sql().spec.table));
        let mut statements: Vec<String> = vec![META.into()];
        for part in parts(&sql) {
            statements.extend(part.statements(&sql));
            statements.push(format!(
                "INSERT INTO airtight_meta (name, value) VALUES ({}, {}) ON CONFLICT (name) DO NOTHING",
                airtight_core::table::literal(&part.name),
                part.newest
            ));
        }
        format!("BEGIN IMMEDIATE;\n\n{};\n\nCOMMIT;\n", statements.join(";\n\n"))
    }
}

/// What has a version: airtight's own tables, and the outbox where it is canonical.
struct Part {
    name: String,
    newest: i64,
    own: bool,
}

impl Part {
    /// What makes whatever is not there.
    fn statements(&self, sql: &Sql) -> Vec<String> {
        if !self.own {
            return match sql.shape {
                Shape::Queue => outbox_tables(sql),
                Shape::Log => vec![log_table(sql), refusal(sql)],
            };
        }
        OWN_TABLES.into_iter().chain(LOG_TABLES).map(str::to_owned).collect()
    }

    fn did(&self, sql: &Sql, found: Option<i64>) -> String {
        match (self.own, found, sql.shape) {
            (true, Some(found), _) => {
                format!("upgraded airtight's own tables from version {found} to {}", self.newest)
            }
            (true, None, _) => "created airtight's own tables".into(),
            (false, _, Shape::Queue) => format!("created {} and its indexes", sql.spec.display_name()),
            (false, _, Shape::Log) => format!("created {}, a log", sql.spec.display_name()),
        }
    }
}

fn parts(sql: &Sql) -> Vec<Part> {
    let mut parts = vec![Part { name: "schema".to_owned(), newest: OWN_VERSION, own: true }];
    if sql.canonical {
        parts.push(Part { name: part_of(sql, sql.shape), newest: OUTBOX_VERSION, own: false });
    }
    parts
}

fn part_of(sql: &Sql, shape: Shape) -> String {
    let word = match shape {
        Shape::Queue => "outbox",
        Shape::Log => "log",
    };
    format!("{word}:{}", sql.spec.display_name())
}

/// The shape of the canonical table that the file holds under this name, if it holds one.
pub(crate) async fn found_shape(conn: &mut SqliteConnection, sql: &Sql) -> Result<Option<Shape>> {
    if !sql.canonical || table_columns(conn, None, "airtight_meta").await?.is_empty() {
        return Ok(None);
    }
    for shape in [Shape::Queue, Shape::Log] {
        if version(conn, &part_of(sql, shape)).await?.is_some() {
            return Ok(Some(shape));
        }
    }
    Ok(None)
}

/// Refuses a canonical table whose shape in the file is another than the one it was opened with.
pub(crate) async fn refuse_other_shape(conn: &mut SqliteConnection, sql: &Sql) -> Result<()> {
    match found_shape(conn, sql).await? {
        Some(found) if found != sql.shape => Err(wrong_shape(&sql.spec.display_name(), found)),
        _ => Ok(()),
    }
}

/// The error for a table that is used as what it is not.
pub(crate) fn wrong_shape(name: &str, is: Shape) -> Error {
    let (not, how) = match is {
        Shape::Queue => (Shape::Log, "read it with `--read queue`"),
        Shape::Log => (Shape::Queue, "read it with `--read log --consumer NAME`"),
    };
    Error::permanent(
        Code::WRONG_SHAPE,
        format!(
            "{name} in this file is a {}, not a {}, and stays one: {how}, or take another file for the {1} \
             (`airtight migrate --shape {1}`)",
            is.as_str(),
            not.as_str()
        ),
    )
}

/// Creates what is missing, in the transaction it is given. Returns what it did.
pub(crate) async fn migrate(tx: &mut SqliteConnection, sql: &Sql) -> Result<Vec<String>> {
    sqlx::query(META).execute(&mut *tx).await.map_err(db)?;
    refuse_other_shape(tx, sql).await?;
    let mut did = Vec::new();
    for part in parts(sql) {
        let found = version(tx, &part.name).await?;
        refuse_newer(&part, found)?;
        let missing = missing(tx, sql, &part).await?;
        for statement in part.statements(sql) {
            sqlx::query(AssertSqlSafe(statement)).execute(&mut *tx).await.map_err(db)?;
        }
        if part.own {
            add_columns(tx).await?;
        }
        if !part.own && missing.contains(&("table", sql.spec.table.clone())) && sql.shape == Shape::Log {
            go_on_behind_consumers(tx, sql).await?;
        }
        if found == Some(part.newest) {
            did.extend(missing.into_iter().map(|(kind, name)| {
                let gone = if kind == "table" { ": what it held is gone" } else { "" };
                format!("made the {kind} {name}, which was missing{gone}")
            }));
            continue;
        }
        did.push(part.did(sql, found));
        sqlx::query("INSERT INTO airtight_meta (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = ?2")
            .bind(part.name)
            .bind(part.newest)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
    }
    Ok(did)
}

/// A log that is made anew gives no number again that a consumer has seen; and consumers that were behind others are told
/// that they have missed something.
async fn go_on_behind_consumers(tx: &mut SqliteConnection, sql: &Sql) -> Result<()> {
    let outbox = sql.spec.display_name();
    let last: i64 = sqlx::query_scalar(
        "SELECT max(COALESCE((SELECT max(last_seq) FROM airtight_offset WHERE outbox = ?1), 0), \
         COALESCE((SELECT max(seq) FROM airtight_floor WHERE outbox = ?1), 0))",
    )
    .bind(&outbox)
    .fetch_one(&mut *tx)
    .await
    .map_err(db)?;
    if last == 0 {
        return Ok(());
    }
    let sequences = match &sql.spec.schema {
        Some(schema) => format!("{}.sqlite_sequence", quote(schema)),
        None => "sqlite_sequence".to_owned(),
    };
    let statement = format!("INSERT INTO {sequences} (name, seq) VALUES (?1, ?2)");
    let insert = sqlx::query(AssertSqlSafe(statement)).bind(&sql.spec.table).bind(last);
    insert.execute(&mut *tx).await.map_err(db)?;
    sqlx::query("INSERT INTO airtight_floor (outbox, seq) VALUES (?1, ?2) ON CONFLICT (outbox) DO UPDATE SET seq = max(seq, ?2)")
        .bind(outbox)
        .bind(last)
        .execute(&mut *tx)
        .await
        .map_err(db)?;
    Ok(())
}

/// Adds the columns that came later to a table that is there without them.
async fn add_columns(tx: &mut SqliteConnection) -> Result<()> {
    let there = table_columns(tx, None, "airtight_consumer").await?;
    for (column, kind) in REPLAY_COLUMNS {
        if !there.iter().any(|there| there == column) {
            let statement = format!("ALTER TABLE airtight_consumer ADD COLUMN {column} {kind}");
            sqlx::query(AssertSqlSafe(statement)).execute(&mut *tx).await.map_err(db)?;
        }
    }
    Ok(())
}

/// What a part should have and has not: its kind and its name.
async fn missing(conn: &mut SqliteConnection, sql: &Sql, part: &Part) -> Result<Vec<(&'static str, String)>> {
    let schema = if part.own { None } else { sql.spec.schema.as_deref() };
    let statement = format!("SELECT name FROM {}.sqlite_schema", quote(schema.unwrap_or("main")));
    let there: Vec<String> =
        sqlx::query_scalar(AssertSqlSafe(statement)).fetch_all(&mut *conn).await.map_err(db)?;
    Ok(part
        .statements(sql)
        .iter()
        .filter_map(|statement| made_by(statement))
        .filter(|(_, name)| !there.iter().any(|there| there.eq_ignore_ascii_case(name)))
        .collect())
}

/// The kind and the name of what a statement makes.
fn made_by(statement: &str) -> Option<(&'static str, String)> {
    let kinds = [("TABLE", "table"), ("INDEX", "index"), ("TRIGGER", "trigger")];
    kinds.into_iter().find_map(|(word, kind)| {
        let rest = statement.strip_prefix(&format!("CREATE {word} IF NOT EXISTS "))?;
        let (first, rest) = identifier(rest);
        // A schema in front names no part of it.
        Some((kind, rest.strip_prefix('.').map_or(first, |rest| identifier(rest).0)))
    })
}

/// A name at the beginning of a text, and what follows it.
fn identifier(text: &str) -> (String, &str) {
    let Some(mut rest) = text.strip_prefix('"') else {
        let end = text.find(|letter: char| letter.is_whitespace() || letter == '(').unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut name = String::new();
    while let Some(end) = rest.find('"') {
        name.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        let Some(more) = rest.strip_prefix('"') else { break };
        name.push('"');
        rest = more;
    }
    (name, rest)
}

/// What `migrate` would make again, and nothing stands still without: indexes, and the trigger.
pub(crate) async fn notes(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<Finding>> {
    let mut notes = Vec::new();
    for part in parts(sql) {
        let missing = missing(conn, sql, &part).await?;
        let missing = missing.into_iter().filter(|(kind, _)| *kind != "table");
        notes.extend(missing.map(|(kind, name)| {
            Finding::note(format!("the {kind} {name} is missing")).with_remedy("run `airtight migrate`")
        }));
    }
    Ok(notes)
}

/// Says what keeps the table from being read as what it is; all is well when it is empty.
pub(crate) async fn problems(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<Finding>> {
    let mut problems = Vec::new();
    let not_migrated = |message: String| Finding::fatal(message).with_remedy("run `airtight migrate`");
    if !matches!(sql.spec.zone.as_str(), "UTC" | "utc" | "Z" | "+00:00") {
        let message = format!(
            "{}: timestamps are in `{}`, but SQLite's own time functions support only UTC",
            sql.spec.display_name(),
            sql.spec.zone
        );
        problems.push(Finding::fatal(message).with_remedy("store UTC"));
    }
    let encoding: String = sqlx::query_scalar("PRAGMA encoding").fetch_one(&mut *conn).await.map_err(db)?;
    if encoding != "UTF-8" {
        problems.push(Finding::fatal(format!(
            "the database's encoding is {encoding}: airtight reads text as UTF-8 only"
        )));
    }
    if table_columns(conn, None, "airtight_meta").await?.is_empty() {
        problems.push(not_migrated("airtight's tables are missing".into()));
        return Ok(problems);
    }
    refuse_other_shape(conn, sql).await?;
    for part in parts(sql) {
        match version(conn, &part.name).await? {
            None => problems.push(not_migrated(format!("airtight's tables are missing ({})", part.name))),
            Some(found) if found < part.newest => problems.push(not_migrated(format!(
                "airtight's tables ({}) are of version {found}, this program needs {}",
                part.name, part.newest
            ))),
            found => {
                refuse_newer(&part, found)?;
                let missing = missing(conn, sql, &part).await?;
                let missing = missing.into_iter().filter(|(kind, _)| *kind == "table");
                problems
                    .extend(missing.map(|(_, name)| not_migrated(format!("the table {name} is missing"))));
            }
        }
    }
    let columns = table_columns(conn, sql.spec.schema.as_deref(), &sql.spec.table).await?;
    let name = sql.spec.display_name();
    if columns.is_empty() {
        problems.push(
            Finding::fatal(format!("there is no table {name}"))
                .with_remedy("correct its name, or run `airtight migrate`"),
        );
        return Ok(problems);
    }
    // SQLite compares column names without regard to case.
    let missing: Vec<&str> = sql
        .spec
        .columns()
        .into_iter()
        .filter(|wanted| !columns.iter().any(|column| column.eq_ignore_ascii_case(wanted)))
        .collect();
    if !missing.is_empty() {
        problems.push(
            Finding::fatal(format!("{name} has no column {}", missing.join(", ")))
                .with_remedy("correct the table's spec"),
        );
        return Ok(problems);
    }
    problems.extend(fits::problems(conn, sql).await?);
    Ok(problems)
}

/// The columns of a table; `xinfo`, because `table_info` leaves generated ones out.
async fn table_columns(
    conn: &mut SqliteConnection,
    schema: Option<&str>,
    table: &str,
) -> Result<Vec<String>> {
    sqlx::query_scalar("SELECT name FROM pragma_table_xinfo(?1, ?2)")
        .bind(table)
        .bind(schema.unwrap_or("main"))
        .fetch_all(conn)
        .await
        .map_err(db)
}

async fn version(conn: &mut SqliteConnection, part: &str) -> Result<Option<i64>> {
    let row = sqlx::query("SELECT value FROM airtight_meta WHERE name = ?1")
        .bind(part)
        .fetch_optional(conn)
        .await
        .map_err(db)?;
    row.map(|row| row.try_get(0).map_err(db)).transpose()
}

fn refuse_newer(part: &Part, found: Option<i64>) -> Result<()> {
    match found {
        Some(found) if found > part.newest => Err(Error::permanent(
            Code::SCHEMA_TOO_NEW,
            format!(
                "the database has version {found} of airtight's tables ({}), this program knows up to {}",
                part.name, part.newest
            ),
        )
        .with_remedy("upgrade this program")),
        _ => Ok(()),
    }
}
