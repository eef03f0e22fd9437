//! Checks whether a foreign table fits its mapping: what a start refuses, what it warns about, and what `check` reports.
//! Tables that airtight created are not checked here.
//!
//! | file | what it looks at |
//! | --- | --- |
//! | `types` | columns and other tables: can they be read and written as the mapping says |
//! | `words` | the status column: can it hold each word, and tell them apart |
//! | `zone` | times without a zone: does the server know the zone, and do the writers use it |

mod types;
mod words;
mod zone;

use airtight_core::{Code, Result, admin::Finding, table::StatusSpec};
use sqlx::{AssertSqlSafe, FromRow, Row, postgres::PgRow};

use crate::{PgOutbox, columns::EventColumns, error::doing, queue::QueueTable};

/// What is wrong with the table, or would surprise.
pub(crate) async fn findings(
    outbox: &PgOutbox,
    c: &EventColumns,
    status: Option<&StatusSpec>,
) -> Result<Vec<Finding>> {
    if outbox.options.spec.is_none() {
        return Ok(Vec::new());
    }
    let mut findings = types::problems(outbox, c).await?;
    findings.extend(zone::unknown(outbox, c).await?);
    if let Some(status) = status {
        findings.extend(c.spec.check_roles().err().map(Finding::from));
        // What the server thinks of a word depends on its column, which may be of the wrong type altogether.
        if findings.is_empty() {
            findings.extend(words::problems(outbox, c, status).await?);
        }
    }
    if findings.is_empty() {
        findings.extend(zone::suspicion(outbox, c, status).await?);
    }
    Ok(findings)
}

/// Refuses a table that does not fit, and warns of what would surprise.
pub(crate) async fn at_start(outbox: &PgOutbox, c: &EventColumns, status: Option<&StatusSpec>) -> Result<()> {
    let (fatal, notes): (Vec<Finding>, Vec<Finding>) =
        findings(outbox, c, status).await?.into_iter().partition(|finding| finding.fatal);
    if !fatal.is_empty() {
        return Err(Finding::refusal(Code::BAD_TABLE, &fatal));
    }
    for note in notes {
        tracing::warn!(outbox = c.outbox, "{note}");
    }
    Ok(())
}

/// Notes that cost a look at every row, for `check` alone.
pub(crate) async fn unexplained(outbox: &PgOutbox, table: &dyn QueueTable) -> Result<Option<Finding>> {
    words::unexplained(outbox, table).await
}

/// One row of a statement of our own.
async fn row(outbox: &PgOutbox, sql: String, binds: &[&str]) -> Result<PgRow> {
    let mut conn = outbox.acquire().await?;
    let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(!outbox.pooled);
    for bind in binds {
        query = query.bind(*bind);
    }
    let row = query.fetch_one(conn.get()).await.map_err(doing("checking the table"))?;
    conn.commit().await?;
    Ok(row)
}

/// All rows of a statement of our own.
async fn rows<T>(outbox: &PgOutbox, sql: String, binds: &[&str]) -> Result<Vec<T>>
where
    T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    let mut conn = outbox.acquire().await?;
    let mut query = sqlx::query_as::<_, T>(AssertSqlSafe(sql)).persistent(!outbox.pooled);
    for bind in binds {
        query = query.bind(*bind);
    }
    let rows = query.fetch_all(conn.get()).await.map_err(doing("checking the table"))?;
    conn.commit().await?;
    Ok(rows)
}

/// What a statement says that may be refused for what is in it; the inner error is what the server said then.
async fn trial(outbox: &PgOutbox, sql: String) -> Result<std::result::Result<Option<bool>, String>> {
    // Of its own, since a refusal ends the transaction that a pooler needs.
    let mut conn = outbox.acquire().await?;
    match sqlx::query(AssertSqlSafe(sql)).persistent(false).fetch_one(conn.get()).await {
        Ok(row) => {
            conn.commit().await?;
            Ok(Ok(row.try_get::<Option<bool>, _>(0).unwrap_or(None)))
        }
        Err(sqlx::Error::Database(error))
            if error.code().is_some_and(|code| ["22", "23", "42"].iter().any(|of| code.starts_with(of))) =>
        {
            Ok(Err(error.message().to_owned()))
        }
        Err(error) => Err(doing("checking the table")(error)),
    }
}
