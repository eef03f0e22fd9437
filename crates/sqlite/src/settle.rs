//! Stores the verdicts on claimed rows.
//!
//! A settle is one immediate transaction. It reads which rows still have the token that they were claimed with, then
//! changes those rows, with one statement per kind of verdict. No other write can come in between.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use airtight_core::{
    Error, Result, Verdict,
    queue::{RowClaim, RowKey},
    table::Role,
};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use crate::{
    candidate::key_value,
    error::db,
    members::seconds,
    outbox::SqliteOutbox,
    sql::{NOW, RowField, Sql},
};

/// A retry later than this would be taken for one that is held back for ever.
pub(crate) const LONGEST_RETRY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Errors longer than this are cut: they are for people.
const MAX_MESSAGE: usize = 4_000;

/// Runs statements whose first parameter is `items`; nothing when there are none.
pub(crate) async fn run(
    conn: &mut SqliteConnection,
    statements: &[String],
    items: &[Value],
    binds: &[&str],
) -> Result<()> {
    if items.is_empty() {
        return Ok(());
    }
    let items = Value::from(items).to_string();
    for statement in statements {
        let mut query = sqlx::query(AssertSqlSafe(statement.as_str())).bind(&items);
        for bind in binds {
            query = query.bind(*bind);
        }
        query.execute(&mut *conn).await.map_err(db)?;
    }
    Ok(())
}

/// Which of the rows are still processing under their token, by index, with what the table counts.
pub(crate) async fn still_held<'a>(
    conn: &mut SqliteConnection,
    sql: &Sql,
    rows: impl Iterator<Item = &'a RowClaim>,
) -> Result<HashMap<usize, i64>> {
    let items: Vec<Value> =
        rows.map(|row| json!({"k": key_value(&row.key), "t": row.token.to_string()})).collect();
    if items.is_empty() {
        return Ok(HashMap::new());
    }
    let found = sqlx::query(AssertSqlSafe(still_held_statement(sql)))
        .bind(Value::from(items).to_string())
        .fetch_all(conn)
        .await
        .map_err(db)?;
    let mut held = HashMap::with_capacity(found.len());
    for row in found {
        let index: i64 = row.try_get(0).map_err(db)?;
        held.insert(usize::try_from(index).unwrap_or(usize::MAX), row.try_get(1).map_err(db)?);
    }
    Ok(held)
}

pub(crate) fn still_held_statement(sql: &Sql) -> String {
    // CROSS JOIN keeps the order of the tables: the rows are looked up by their identity, never scanned.
    format!(
        "SELECT j.key, {} FROM json_each(?1) AS j CROSS JOIN {} \
         WHERE {} = j.value->>'k' AND CAST({} AS TEXT) = j.value->>'t' AND {}",
        sql.count("o"),
        sql.from("o"),
        sql.identity("o"),
        sql.token("o"),
        sql.processing("o")
    )
}

/// Rows by what happens to them.
#[derive(Default)]
struct Kinds {
    delivered: Vec<Value>,
    retry: Vec<Value>,
    dead: Vec<Value>,
    unknown: Vec<Value>,
    released_new: Vec<Value>,
    released_again: Vec<Value>,
    away_new: Vec<Value>,
    away_again: Vec<Value>,
}

pub(crate) async fn settle(outbox: &SqliteOutbox, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>> {
    let sql = outbox.queue_sql()?;
    let mut tx = outbox.begin().await?;
    let held = still_held(tx.conn(), sql, rows.iter().map(|(claim, _)| claim)).await?;
    let mut seen: HashSet<&RowKey> = HashSet::new();
    let mut applied = vec![false; rows.len()];
    let mut kinds = Kinds::default();
    for (index, (claim, verdict)) in rows.iter().enumerate() {
        let Some(count) = held.get(&index).filter(|_| seen.insert(&claim.key)) else { continue };
        applied[index] = true;
        kinds.add(sql, &claim.key, *count, verdict);
    }
    kinds.write(tx.conn(), sql).await?;
    tx.commit().await?;
    Ok(applied)
}

impl Kinds {
    fn add(&mut self, sql: &Sql, key: &RowKey, count: i64, verdict: &Verdict) {
        let key = key_value(key);
        // A table that counts retries counts a failure now; one that counts attempts did at the claim.
        let failures = count.max(0).saturating_add((!sql.counts_attempts()).into());
        let given_back = count.saturating_sub(sql.counts_attempts().into()).max(0);
        let failed = |error: &Error| {
            let message = error_message(sql, error);
            json!({"k": key, "n": failures, "c": error.code(), "m": message})
        };
        match verdict {
            Verdict::Delivered | Verdict::SettledInTransaction => self.delivered.push(json!({"k": key})),
            Verdict::Retry { after, error } => {
                let mut item = failed(error);
                item["a"] = seconds((*after).min(LONGEST_RETRY)).into();
                self.retry.push(item);
            }
            Verdict::Dead { error } => self.dead.push(failed(error)),
            Verdict::Unknown { error } => self.unknown.push(failed(error)),
            Verdict::Released => {
                let item = json!({"k": key, "n": given_back});
                if given_back > 0 { self.released_again.push(item) } else { self.released_new.push(item) }
            }
            Verdict::Away { after, error } => {
                let mut item = failed(error);
                item["n"] = given_back.into();
                item["a"] = seconds((*after).min(LONGEST_RETRY)).into();
                if given_back > 0 { self.away_again.push(item) } else { self.away_new.push(item) }
            }
        }
    }

    async fn write(self, conn: &mut SqliteConnection, sql: &Sql) -> Result<()> {
        let free = [(RowField::ClaimToken, "NULL"), (RowField::LockedUntil, "NULL")];
        let with = |more: &[(RowField, &'static str)]| [&free, more].concat();
        let count = (RowField::Count, "j.value->>'n'");
        let code = (RowField::ErrorCode, "j.value->>'c'");
        let message = (RowField::ErrorMessage, "j.value->>'m'");
        let finished = (RowField::FinishedAt, NOW);
        let healthy = (RowField::LostLeases, "0");
        let later = (RowField::NextRetryAt, "strftime('%Y-%m-%dT%H:%M:%fZ','now',j.value->>'a')");
        let change = |role: Option<&Role>, set: &[(RowField, &'static str)]| sql.change(role, &with(set));

        let retry = change(sql.role_retrying(), &[count, later, code, message, healthy]);
        run(conn, &retry, &self.retry, &[]).await?;
        let waits = [count, later, code, message, healthy];
        run(conn, &change(sql.role_new(), &waits), &self.away_new, &[]).await?;
        run(conn, &change(sql.role_retrying(), &waits), &self.away_again, &[]).await?;
        let never = (RowField::NextRetryAt, "NULL");
        let dead =
            change(sql.role_dead(), &[count, never, code, message, finished, (RowField::Unknown, "0")]);
        run(conn, &dead, &self.dead, &[]).await?;
        let unknown =
            change(sql.role_unknown(), &[count, never, code, message, finished, (RowField::Unknown, "1")]);
        run(conn, &unknown, &self.unknown, &[]).await?;

        let clean = [never, (RowField::ErrorCode, "NULL"), (RowField::ErrorMessage, "NULL"), finished];
        let delivered = match sql.forget() {
            // What the side table holds is forgotten as a whole.
            Some(forget) => {
                let mut statements = change(sql.role_done(), &clean);
                statements.retain(|statement| statement.starts_with("UPDATE"));
                statements.push(forget);
                statements
            }
            None => change(sql.role_done(), &clean),
        };
        run(conn, &delivered, &self.delivered, &[]).await?;
        run(conn, &change(sql.role_new(), &[count]), &self.released_new, &[]).await?;
        run(conn, &change(sql.role_retrying(), &[count]), &self.released_again, &[]).await
    }
}

/// The message to keep; with the code in front where the table has no place for that.
fn error_message(sql: &Sql, error: &Error) -> String {
    let message = if sql.spec.error_code.is_none() && !sql.side {
        format!("{}: {error}", error.code())
    } else {
        error.to_string()
    };
    cut(message)
}

/// A message that is not too long to keep.
pub(crate) fn cut(message: String) -> String {
    match message.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message,
    }
}
