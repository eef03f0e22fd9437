//! The status column: can it hold each word, and tell them apart?

use airtight_core::{
    Result,
    admin::Finding,
    table::{StatusSpec, literal, quote},
};
use sqlx::Row;

use super::{row, rows, trial};
use crate::{
    PgOutbox,
    columns::{EventColumns, col},
    queue::QueueTable,
};

pub(super) async fn problems(
    outbox: &PgOutbox,
    c: &EventColumns,
    status: &StatusSpec,
) -> Result<Vec<Finding>> {
    let column = &status.column;
    let known = row(
        outbox,
        "SELECT format_type(a.atttypid, -1) AS type, t.typtype::text AS kind, \
           information_schema._pg_char_max_length(information_schema._pg_truetypid(a, t), \
             information_schema._pg_truetypmod(a, t))::int AS width, \
           CASE WHEN a.attcollation <> 0 THEN (SELECT quote_ident(n.nspname) || '.' || quote_ident(l.collname) \
             FROM pg_collation l JOIN pg_namespace n ON n.oid = l.collnamespace WHERE l.oid = a.attcollation) END AS collation \
         FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid \
         WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND NOT a.attisdropped"
            .into(),
        &[&c.table, column],
    )
    .await?;
    let failed = crate::error::doing("checking the status column");
    let of_type: String = known.try_get("type").map_err(&failed)?;
    let kind: String = known.try_get("kind").map_err(&failed)?;
    let width: Option<i32> = known.try_get("width").map_err(&failed)?;
    let collation: Option<String> = known.try_get("collation").map_err(&failed)?;
    let checks: Vec<(String, String)> = rows(
        outbox,
        "SELECT k.conname::text, pg_get_expr(k.conbin, k.conrelid) FROM pg_constraint k \
         JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attname = $2 \
         WHERE k.conrelid = to_regclass($1) AND k.contype = 'c' AND k.conkey = ARRAY[a.attnum]"
            .into(),
        &[&c.table, column],
    )
    .await?;

    let mut problems = Vec::new();
    let mut words: Vec<(&str, &str)> = Vec::new();
    for (name, role) in status.roles() {
        if words.iter().all(|(_, word)| *word != role.word) {
            words.push((name, &role.word));
        }
    }
    for (role, word) in &words {
        let mut refuse = |why: String, or: String| {
            let message = format!("{}.{column} cannot hold `{word}`, the word for `{role}`: {why}", c.outbox);
            let remedy = format!("correct the word in [table.status]{or}");
            problems.push(Finding::fatal(message).with_remedy(remedy));
        };
        let typed = format!("CAST({} AS {of_type})", literal(word));
        if let Some(width) = width.filter(|width| word.chars().count() > usize::try_from(*width).unwrap_or(0))
        {
            refuse(
                format!("it takes {width} characters at most"),
                format!(", or let the column take {}", word.chars().count()),
            );
            continue;
        }
        if let Err(why) = trial(outbox, format!("SELECT {typed} IS NULL")).await? {
            let or = match kind.as_str() {
                "e" => format!(", or ALTER TYPE {of_type} ADD VALUE {}", literal(word)),
                "d" => format!(", or let the domain {of_type} allow it"),
                _ => String::new(),
            };
            refuse(why, or);
            continue;
        }
        for (check, expression) in &checks {
            let sql = format!("SELECT ({expression}) FROM (SELECT {typed} AS {}) AS t", quote(column));
            if let Ok(Some(false)) = trial(outbox, sql).await? {
                refuse(
                    format!("its constraint {check} refuses it: CHECK ({expression})"),
                    format!(", or let {check} allow it"),
                );
            }
        }
    }
    if problems.is_empty() {
        let collate = collation.map(|collation| format!(" COLLATE {collation}")).unwrap_or_default();
        for [(left, one), (right, other)] in status.distinct() {
            if one.word == other.word {
                continue;
            }
            let sql = format!(
                "SELECT CAST({} AS {of_type}){collate} = CAST({} AS {of_type})",
                literal(&one.word),
                literal(&other.word)
            );
            if let Ok(Some(true)) = trial(outbox, sql).await? {
                problems.push(same(c, column, (left, &one.word), (right, &other.word)));
            }
        }
    }
    Ok(problems)
}

fn same(c: &EventColumns, column: &str, one: (&str, &str), other: (&str, &str)) -> Finding {
    Finding::fatal(format!(
        "{}.{column} takes `{}` and `{}`, the words for `{}` and `{}`, for the same word: events would be delivered again and \
         again, or never",
        c.outbox, one.1, other.1, one.0, other.0
    ))
    .with_remedy("choose words in [table.status] that differ for the column, too")
}

/// Rows whose status means nothing, by their words.
pub(super) async fn unexplained(outbox: &PgOutbox, c: &dyn QueueTable) -> Result<Option<Finding>> {
    let Some(unexplained) = c.unexplained() else { return Ok(None) };
    let sql = format!(
        "SELECT coalesce(quote_literal({status}::text), 'NULL'), count(*) FROM {} t WHERE {unexplained} GROUP BY 1 ORDER BY 2 DESC LIMIT 10",
        c.table,
        status = col(&c.status.column),
    );
    let found: Vec<(String, i64)> = rows(outbox, sql, &[]).await?;
    if found.is_empty() {
        return Ok(None);
    }
    let words: Vec<String> = found.iter().map(|(word, count)| format!("{word} ({count})")).collect();
    Ok(Some(Finding::note(format!(
        "{} has rows with a status that no role explains. They are left alone: {}",
        c.outbox,
        words.join(", ")
    ))))
}
