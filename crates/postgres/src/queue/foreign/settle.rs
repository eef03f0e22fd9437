//! Settling, renewing and marking on a foreign table. The lease is a row of the side table: a relay that updates this row by
//! its token may write the table.

use airtight_core::{
    Error, Order, Result,
    group::Member,
    queue::{RowClaim, RowKey},
    table::{Condition, Count, Test, literal},
};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::{
    super::settle::{Kind, Marked, Settled, fence, marked},
    identities,
};
use crate::{
    PgOutbox,
    columns::{Assignments, Columns, col},
    error::doing,
    outbox::Conn,
    session::Session,
};

pub(super) async fn settle(
    c: &Columns,
    outbox: &PgOutbox,
    conn: &mut Conn,
    member: &Member,
    kind: Kind,
    rows: Settled<'_>,
) -> Result<Vec<RowKey>> {
    let settled: Vec<String> = sqlx::query_scalar(AssertSqlSafe(statement(c, member.order, kind)))
        .persistent(!outbox.pooled)
        .bind(identities(rows.claims.iter().copied()))
        .bind(rows.tokens)
        .bind(rows.waits)
        .bind(rows.codes)
        .bind(rows.messages)
        .bind(member.id)
        .fetch_all(conn.get())
        .await
        .map_err(doing("settling"))?;
    Ok(settled.into_iter().map(RowKey::Text).collect())
}

pub(super) async fn renew(
    c: &Columns,
    outbox: &PgOutbox,
    conn: &mut Conn,
    member: &Member,
    rows: &[RowClaim],
) -> Result<Vec<RowKey>> {
    let sql = format!(
        "UPDATE {} s SET locked_until = now() + make_interval(secs => $3) \
         FROM unnest($1::text[], $2::uuid[]) AS v(event, token) \
         WHERE s.outbox = {} AND s.event = v.event AND s.claim_token = v.token RETURNING s.event",
        c.side,
        literal(&c.outbox)
    );
    let renewed: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(identities(rows.iter()))
        .bind(rows.iter().map(|row| row.token).collect::<Vec<Uuid>>())
        .bind(member.lease.as_secs_f64())
        .fetch_all(conn.get())
        .await
        .map_err(doing("renewing leases"))?;
    Ok(renewed.into_iter().map(RowKey::Text).collect())
}

pub(super) async fn mark(
    c: &Columns,
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    rows: &[(String, Option<&Error>)],
    unknown: bool,
) -> Result<()> {
    for Marked { kind, ids, codes, messages } in marked(rows, unknown) {
        sqlx::query(AssertSqlSafe(mark_statement(c, kind)))
            .persistent(!outbox.pooled)
            .bind(ids)
            .bind(codes)
            .bind(messages)
            .execute(&mut *conn)
            .await
            .map_err(doing("marking rows"))?;
    }
    Ok(())
}

/// Parameters: identities, codes, messages.
fn mark_statement(c: &Columns, kind: Kind) -> String {
    // One that is dead may still be delivered, once a person has said so.
    let open = if kind == Kind::Delivered { format!("NOT {}", c.is(&c.status.done)) } else { c.is_open() };
    let (side, outbox) = (&c.side, literal(&c.outbox));
    let error = side_error(c, "excluded.error_code", "excluded.error_message");
    let beside = if kind == Kind::Delivered || error.is_empty() {
        format!("DELETE FROM {side} s USING v WHERE s.outbox = {outbox} AND s.event = v.id")
    } else {
        // What the table has no column for would be forgotten otherwise.
        format!(
            "INSERT INTO {side} AS s (outbox, event, error_code, error_message, unknown) \
             SELECT {outbox}, m.id, m.code, m.message, {unknown} FROM marked m ON CONFLICT (outbox, event) DO UPDATE SET \
             claim_token = NULL, locked_until = NULL, next_retry_at = NULL, unknown = excluded.unknown{error}",
            unknown = kind == Kind::Unknown,
        )
    };
    format!(
        "WITH v AS (SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) AS v(id, code, message)), \
         marked AS (UPDATE {table} t SET {set} FROM v WHERE {id} = v.id::{cast} AND {open} \
           RETURNING v.id, v.code, v.message) {beside}",
        table = c.table,
        set = assignments(c, kind),
        id = c.identity(),
        cast = c.identity_type(),
    )
}

/// Who wins the side row by its token may write the table, in one statement.
fn statement(c: &Columns, order: Order, kind: Kind) -> String {
    let (me, alive) = fence(c, order);
    let side = &c.side;
    let outbox = literal(&c.outbox);
    let mine = format!("{alive} AND s.outbox = {outbox} AND s.event = v.id AND s.claim_token = v.token");
    let values = "unnest($1::text[], $2::uuid[], $3::float8[], $4::text[], $5::text[]) \
                  AS v(id, token, wait, code, message)";
    let free = "claim_token = NULL, locked_until = NULL";
    let returning = "RETURNING v.id AS event, v.wait, v.code, v.message, s.attempts";
    // What the table holds itself need not be kept here; a row is kept only while it says something.
    let error = side_error(c, "v.code", "v.message");
    let error_here = !error.is_empty();
    let won = match kind {
        Kind::Delivered | Kind::Deleted => {
            format!("DELETE FROM {side} s USING {values} WHERE {mine} {returning}")
        }
        Kind::Dead if !error_here => format!("DELETE FROM {side} s USING {values} WHERE {mine} {returning}"),
        Kind::Dead => {
            format!(
                "UPDATE {side} s SET {free}, lost_leases = 0, unknown = false{error} FROM {values} WHERE {mine} {returning}"
            )
        }
        Kind::Unknown => format!(
            "UPDATE {side} s SET {free}, lost_leases = 0, unknown = true{error} FROM {values} WHERE {mine} {returning}"
        ),
        Kind::Retry | Kind::Away => {
            let retry = if c.spec.next_retry_at.is_none() {
                ", next_retry_at = now() + make_interval(secs => v.wait)"
            } else {
                ""
            };
            let back = if kind.gives_back() { ", attempts = greatest(s.attempts - 1, 0)" } else { "" };
            format!(
                "UPDATE {side} s SET {free}, lost_leases = 0{back}{retry}{error} FROM {values} WHERE {mine} {returning}"
            )
        }
        Kind::Released => format!(
            "UPDATE {side} s SET {free}, attempts = greatest(s.attempts - 1, 0) FROM {values} WHERE {mine} {returning}"
        ),
    };
    let set = assignments(c, kind);
    format!(
        "WITH {me}, won AS ({won}) UPDATE {table} t SET {set} FROM won v WHERE {id} = v.event::{cast} RETURNING {id}::text",
        table = c.table,
        id = c.identity(),
        cast = c.identity_type(),
    )
}

/// What the side table keeps of an error because the table has no column for it: `, name = value` for each.
fn side_error(c: &Columns, code: &str, message: &str) -> String {
    let code = c.spec.error_code.is_none().then(|| format!(", error_code = {code}"));
    let message = c.spec.error_message.is_none().then(|| format!(", error_message = {message}"));
    code.into_iter().chain(message).collect()
}

/// What a verdict writes into the table. Lease columns that it has are emptied, for its own readers.
fn assignments(c: &Columns, kind: Kind) -> Assignments {
    let spec = &c.spec;
    let role = match kind {
        Kind::Retry => &c.status.retrying,
        Kind::Dead => &c.status.dead,
        Kind::Unknown => c.status.unknown.as_ref().unwrap_or(&c.status.dead),
        Kind::Delivered | Kind::Deleted => &c.status.done,
        Kind::Released | Kind::Away => &c.status.new,
    };
    let word = if kind.gives_back() && c.status.new.word != c.status.retrying.word {
        // Given back as what it was: an event that had failed before is still a retry.
        let failed_before = match &spec.count {
            Some(Count::Attempts(column)) => format!("coalesce({}, 0) > 1", col(column)),
            Some(Count::Retries(column)) => format!("coalesce({}, 0) > 0", col(column)),
            None => "v.attempts > 0".into(),
        };
        format!(
            "(CASE WHEN {failed_before} THEN {} ELSE {} END)::{}",
            literal(&c.status.retrying.word),
            literal(&c.status.new.word),
            c.type_of(&c.status.column)
        )
    } else {
        literal(&role.word)
    };
    let mut set = Assignments::default();
    set.set(&c.status.column, word);
    let mut count = None;
    match (&spec.count, kind) {
        (Some(Count::Attempts(column)), Kind::Released | Kind::Away) => {
            count = Some((column, format!("greatest({}, 1) - 1", col(column))));
        }
        (Some(Count::Retries(column)), Kind::Retry | Kind::Dead) => {
            // At its end it stays there: a count that overflows would fail the settle of all rows.
            let most = c.most(column) - 1;
            count = Some((column, format!("least(greatest(coalesce({}, 0), 0), {most}) + 1", col(column))));
        }
        _ => {}
    }
    // A role that shares its word with another is told apart by its count: a permanent failure spends it.
    if let Some(Condition { column, test, value }) = &role.when {
        let base = || match &count {
            Some((name, expression)) if *name == column => expression.clone(),
            _ => col(column),
        };
        match test {
            Test::AtLeast => count = Some((column, format!("greatest({}, {value})", base()))),
            Test::Equal => count = Some((column, value.to_string())),
            // One that has failed too often is what the table's own words make of it.
            Test::Less => {}
        }
    }
    if let Some((column, value)) = count {
        set.set(column, value);
    }
    if let (Kind::Retry | Kind::Away, Some(column)) = (kind, &spec.next_retry_at) {
        set.set(column, c.write_time(column, "now() + make_interval(secs => v.wait)"));
    }
    if kind != Kind::Released {
        // Nothing to say on delivery: what went wrong before is history.
        for (column, value) in [(&spec.error_code, "v.code"), (&spec.error_message, "v.message")] {
            if let Some(column) = column {
                set.set(column, c.fitted(column, value));
            }
        }
    }
    if let (Kind::Delivered | Kind::Dead | Kind::Unknown, Some(column)) = (kind, &spec.finished_at) {
        set.set(column, c.write_time(column, "now()"));
    }
    if let Some(column) = &spec.updated_at {
        set.set(column, c.write_time(column, "now()"));
    }
    for column in [&spec.claim_token, &spec.locked_until].into_iter().flatten() {
        set.set(column, "NULL");
    }
    set
}
