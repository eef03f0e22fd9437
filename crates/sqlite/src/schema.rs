//! airtight's tables and their migrations.
//!
//! A migration is one immediate transaction that looks at `airtight_meta` first, so ten processes that start
//! at once migrate once. Own tables and each canonical outbox have a version of their own, since a file may
//! hold several outboxes, or only foreign ones.

use airtight_core::{Error, Result, table::quote};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use crate::{
    error::db,
    outbox::SqliteOutbox,
    sql::{HELD, Sql},
};

/// The newest schema this program knows.
const VERSION: i64 = 1;

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
    id TEXT NOT NULL UNIQUE DEFAULT (lower(
        hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-'
        || substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6)))),
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
    ]
}

impl SqliteOutbox {
    /// The statements that `migrate` runs on an empty database, for those who run them by hand.
    pub fn migration_sql() -> String {
        let sql = Self::canonical_sql();
        let mut statements: Vec<String> = vec![META.into()];
        statements.extend(OWN_TABLES.map(str::to_owned));
        statements.extend(outbox_tables(&sql));
        for part in parts(&sql) {
            statements.push(format!(
                "INSERT INTO airtight_meta (name, value) VALUES ({}, {VERSION}) ON CONFLICT (name) DO NOTHING",
                airtight_core::table::literal(&part)
            ));
        }
        format!("BEGIN IMMEDIATE;\n\n{};\n\nCOMMIT;\n", statements.join(";\n\n"))
    }
}

/// What has a version: airtight's own tables, and the outbox where it is canonical.
fn parts(sql: &Sql) -> Vec<String> {
    let mut parts = vec!["schema".to_owned()];
    if sql.canonical {
        parts.push(format!("outbox:{}", sql.spec.display_name()));
    }
    parts
}

/// Creates what is missing, in the transaction it is given. Returns what it did.
pub(crate) async fn migrate(tx: &mut SqliteConnection, sql: &Sql) -> Result<Vec<String>> {
    sqlx::query(META).execute(&mut *tx).await.map_err(db)?;
    let mut did = Vec::new();
    for part in parts(sql) {
        let found = version(tx, &part).await?;
        refuse_newer(&part, found)?;
        if found == Some(VERSION) {
            continue;
        }
        let statements = if part == "schema" {
            did.push("created airtight_relay, airtight_partition and airtight_side".to_owned());
            OWN_TABLES.map(str::to_owned).to_vec()
        } else {
            did.push(format!("created {} and its indexes", sql.spec.display_name()));
            outbox_tables(sql)
        };
        for statement in statements {
            sqlx::query(AssertSqlSafe(statement)).execute(&mut *tx).await.map_err(db)?;
        }
        sqlx::query("INSERT INTO airtight_meta (name, value) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = ?2")
            .bind(part)
            .bind(VERSION)
            .execute(&mut *tx)
            .await
            .map_err(db)?;
    }
    Ok(did)
}

/// Says what keeps the table from being a queue; all is well when it is empty.
pub(crate) async fn problems(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    if !matches!(sql.spec.zone.as_str(), "UTC" | "utc" | "Z" | "+00:00") {
        problems.push(format!(
            "{}: timestamps are in `{}`, but SQLite's own time functions know UTC only; store UTC",
            sql.spec.display_name(),
            sql.spec.zone
        ));
    }
    let encoding: String = sqlx::query_scalar("PRAGMA encoding").fetch_one(&mut *conn).await.map_err(db)?;
    if encoding != "UTF-8" {
        problems.push(format!("the database's encoding is {encoding}: airtight reads text as UTF-8 only"));
    }
    if table_columns(conn, None, "airtight_meta").await?.is_empty() {
        problems.push("airtight's tables are missing: run `airtight migrate`".into());
        return Ok(problems);
    }
    for part in parts(sql) {
        match version(conn, &part).await? {
            None => problems.push(format!("airtight's tables are missing ({part}): run `airtight migrate`")),
            found => refuse_newer(&part, found)?,
        }
    }
    let columns = table_columns(conn, sql.spec.schema.as_deref(), &sql.spec.table).await?;
    let name = sql.spec.display_name();
    if columns.is_empty() {
        problems.push(format!("there is no table {name}: correct its name, or run `airtight migrate`"));
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
        problems.push(format!("{name} has no column {}: correct the table's spec", missing.join(", ")));
    }
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

fn refuse_newer(part: &str, found: Option<i64>) -> Result<()> {
    match found {
        Some(found) if found > VERSION => Err(Error::permanent(
            "newer_schema",
            format!(
                "the database has version {found} of airtight's tables ({part}), this program knows up to {VERSION}: \
                 upgrade this program"
            ),
        )),
        _ => Ok(()),
    }
}
