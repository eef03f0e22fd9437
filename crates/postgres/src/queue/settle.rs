//! Settling: one statement per verdict kind, each row fenced by its claim token.

use std::collections::HashSet;

use airtight_core::{
    Code, Error, Order, Result, Verdict,
    group::Member,
    queue::{RowClaim, RowKey},
    table::{Condition, Count, Test, literal, quote},
};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::{int_keys, text_keys};
use crate::{PgOutbox, columns::Columns, error::doing, outbox::Conn, session::Session};

/// In the order in which they are applied: what holds a key back comes before what it holds back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Retry,
    Away,
    Dead,
    Unknown,
    Delivered,
    Released,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Retry, Self::Away, Self::Dead, Self::Unknown, Self::Delivered, Self::Released];

    fn of(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Retry { .. } => Self::Retry,
            Verdict::Away { .. } => Self::Away,
            Verdict::Dead { .. } => Self::Dead,
            Verdict::Unknown { .. } => Self::Unknown,
            Verdict::Delivered | Verdict::SettledInTransaction => Self::Delivered,
            Verdict::Released => Self::Released,
        }
    }

    /// Whether the attempt that the claim counted is given back.
    fn gives_back(self) -> bool {
        matches!(self, Self::Released | Self::Away)
    }
}

/// How often a settle is tried that stands in a claim's way, each waiting for a row of the other. The server has undone
/// it, so that trying again is safe.
const TRIES: u32 = 3;

pub(super) async fn settle(
    outbox: &PgOutbox,
    c: &Columns,
    member: &Member,
    rows: &[(RowClaim, &Verdict)],
) -> Result<Vec<bool>> {
    for _ in 1..TRIES {
        match settle_once(outbox, c, member, rows).await {
            Err(error) if error.is(&Code::DEADLOCK) => tracing::debug!(%error, "settling again"),
            other => return other,
        }
    }
    settle_once(outbox, c, member, rows).await
}

async fn settle_once(
    outbox: &PgOutbox,
    c: &Columns,
    member: &Member,
    rows: &[(RowClaim, &Verdict)],
) -> Result<Vec<bool>> {
    let kinds: Vec<(Kind, Vec<&(RowClaim, &Verdict)>)> = Kind::ALL
        .into_iter()
        .map(|kind| (kind, rows.iter().filter(|(_, verdict)| Kind::of(verdict) == kind).collect::<Vec<_>>()))
        .filter(|(_, rows)| !rows.is_empty())
        .collect();
    // One statement needs no transaction; several are all or nothing.
    let mut conn = if kinds.len() > 1 { outbox.begin().await? } else { outbox.acquire().await? };
    let mut applied = HashSet::with_capacity(rows.len());
    for (kind, rows) in kinds {
        apply(outbox, &mut conn, c, member, kind, &rows, &mut applied).await?;
    }
    conn.commit().await?;
    Ok(rows.iter().map(|(row, _)| applied.contains(&row.key)).collect())
}

async fn apply(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &Columns,
    member: &Member,
    kind: Kind,
    rows: &[&(RowClaim, &Verdict)],
    applied: &mut HashSet<RowKey>,
) -> Result<()> {
    let claims: Vec<&RowClaim> = rows.iter().map(|(claim, _)| claim).collect();
    let tokens: Vec<Uuid> = claims.iter().map(|claim| claim.token).collect();
    let mut waits: Vec<f64> = Vec::with_capacity(rows.len());
    let mut codes: Vec<Option<String>> = Vec::with_capacity(rows.len());
    let mut messages: Vec<Option<String>> = Vec::with_capacity(rows.len());
    for (_, verdict) in rows {
        let (after, error) = match verdict {
            Verdict::Retry { after, error } | Verdict::Away { after, error } => {
                (after.as_secs_f64().min(LONGEST_WAIT), Some(error))
            }
            Verdict::Dead { error } | Verdict::Unknown { error } => (0.0, Some(error)),
            Verdict::Delivered | Verdict::SettledInTransaction | Verdict::Released => (0.0, None),
        };
        waits.push(after);
        codes.push(error.map(|error| storable(error.code(), 100)));
        messages.push(error.map(|error| storable(&error.to_string(), 4_000)));
    }
    let failed = doing("settling");
    if c.is_fast() {
        let query = sqlx::query_scalar::<_, i64>(AssertSqlSafe(fast(c, member.order, kind)))
            .persistent(!outbox.pooled)
            .bind(int_keys(&claims))
            .bind(tokens)
            .bind(waits)
            .bind(codes)
            .bind(messages)
            .bind(member.id);
        applied.extend(query.fetch_all(conn.get()).await.map_err(failed)?.into_iter().map(RowKey::Int));
    } else {
        let query = sqlx::query_scalar::<_, String>(AssertSqlSafe(general(c, member.order, kind)))
            .persistent(!outbox.pooled)
            .bind(text_keys(&claims))
            .bind(tokens)
            .bind(waits)
            .bind(codes)
            .bind(messages)
            .bind(member.id);
        applied.extend(query.fetch_all(conn.get()).await.map_err(failed)?.into_iter().map(RowKey::Text));
    }
    Ok(())
}

/// Writes what became of rows that were not claimed: another way to read the table has delivered or given up on
/// them. What is finished already stays as it is. Rows are named by their identity, as text.
pub(crate) async fn mark(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    c: &Columns,
    rows: &[(String, Option<&Error>)],
    unknown: bool,
) -> Result<()> {
    let failed = doing("marking rows");
    let (dead, delivered): (Vec<_>, Vec<_>) = rows.iter().partition(|(_, error)| error.is_some());
    let dead_kind = if unknown { Kind::Unknown } else { Kind::Dead };
    for (kind, rows) in [(Kind::Delivered, delivered), (dead_kind, dead)] {
        if rows.is_empty() {
            continue;
        }
        let mut set = assignments(c, kind);
        for column in [&c.spec.claim_token, &c.spec.locked_until].into_iter().flatten() {
            set.push(format!("{} = NULL", quote(column)));
        }
        // One that is dead may still be delivered, once a person has said so.
        let open =
            if kind == Kind::Delivered { format!("NOT {}", c.is(&c.status.done)) } else { c.is_open() };
        let error =
            side_error(c, "excluded").replace(".code", ".error_code").replace(".message", ".error_message");
        let side = match kind == Kind::Delivered || error.is_empty() {
            true => format!(
                "DELETE FROM {side} s USING v WHERE s.outbox = {name} AND s.event = v.id",
                side = c.side,
                name = literal(&c.outbox)
            ),
            // What the table has no column for would be forgotten otherwise.
            false => format!(
                "INSERT INTO {side} AS s (outbox, event, error_code, error_message, unknown) \
                 SELECT {name}, m.id, m.code, m.message, {unknown} FROM marked m ON CONFLICT (outbox, event) DO UPDATE SET \
                 claim_token = NULL, locked_until = NULL, next_retry_at = NULL, unknown = excluded.unknown{error}",
                side = c.side,
                name = literal(&c.outbox)
            ),
        };
        let sql = format!(
            "WITH v AS (SELECT * FROM unnest($1::text[], $2::text[], $3::text[]) AS v(id, code, message)), \
             marked AS (UPDATE {table} t SET {set} FROM v WHERE {id} = v.id::{cast} AND {open} \
               RETURNING v.id, v.code, v.message) {side}",
            table = c.table,
            set = set.join(", "),
            id = c.identity(),
            cast = c.identity_type(),
        );
        let text = |value: fn(&Error) -> String| {
            rows.iter().map(|(_, error)| error.map(value)).collect::<Vec<Option<String>>>()
        };
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(rows.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>())
            .bind(text(|error| storable(error.code(), 100)))
            .bind(text(|error| storable(&error.to_string(), 4_000)))
            .execute(&mut *conn)
            .await
            .map_err(&failed)?;
    }
    Ok(())
}

/// What a sink may ask for at most, in seconds: ten years. The server refuses times that its calendar does not
/// have, and a settle that is refused stops the relay.
pub(crate) const LONGEST_WAIT: f64 = 10.0 * 365.0 * 86_400.0;

/// Text that PostgreSQL can store, and an operator can read.
pub(crate) fn storable(text: &str, limit: usize) -> String {
    text.chars().filter(|letter| *letter != '\0').take(limit).collect()
}

const VALUES: &str = "unnest($1::{identity}[], $2::uuid[], $3::float8[], $4::text[], $5::text[]) \
                      AS v(id, token, wait, code, message)";

/// The relay's own row, locked as its claims lock it, and the condition that it is there. With order, evicting a
/// relay thereby waits for its settles, and afterwards none takes effect: a new owner's claim, which has read
/// the rows already, could not see it. Without order the claim token alone decides.
fn fence(c: &Columns, order: Order) -> (String, &'static str) {
    match order {
        Order::None => ("me AS (SELECT $6::uuid)".into(), "true"),
        Order::Key | Order::Total => (
            format!("me AS (SELECT id FROM {} WHERE id = $6 FOR KEY SHARE)", c.relay),
            "EXISTS (SELECT FROM me)",
        ),
    }
}

/// On a table of the canonical shape.
fn fast(c: &Columns, order: Order, kind: Kind) -> String {
    let (me, alive) = fence(c, order);
    let token = c.spec.claim_token.as_deref().unwrap_or_default();
    let mut set = assignments(c, kind);
    set.push(format!("{} = NULL", quote(token)));
    set.extend(c.spec.locked_until.iter().map(|column| format!("{} = NULL", quote(column))));
    if kind != Kind::Released {
        set.extend(c.spec.lost_leases.iter().map(|column| format!("{} = 0", quote(column))));
    }
    format!(
        "WITH {me} UPDATE {table} t SET {set} FROM {values} \
         WHERE {alive} AND {id} = v.id AND t.{token} = v.token RETURNING {id}",
        table = c.table,
        set = set.join(", "),
        values = VALUES.replace("{identity}", "bigint"),
        id = c.identity(),
        token = quote(token),
    )
}

/// With the lease in the side table: who wins there may write here.
fn general(c: &Columns, order: Order, kind: Kind) -> String {
    let (me, alive) = fence(c, order);
    let side = &c.side;
    let outbox = literal(&c.outbox);
    let mine = format!("{alive} AND s.outbox = {outbox} AND s.event = v.id AND s.claim_token = v.token");
    let values = VALUES.replace("{identity}", "text");
    let free = "claim_token = NULL, locked_until = NULL";
    let returning = "RETURNING v.id AS event, v.wait, v.code, v.message, s.attempts";
    // What the table holds itself need not be kept here; a row is kept only while it says something.
    let error = side_error(c, "v");
    let error_here = !error.is_empty();
    let won = match kind {
        Kind::Delivered => format!("DELETE FROM {side} s USING {values} WHERE {mine} {returning}"),
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
    let mut locks = Vec::new();
    locks.extend(c.spec.claim_token.iter().map(|column| format!("{} = NULL", quote(column))));
    locks.extend(c.spec.locked_until.iter().map(|column| format!("{} = NULL", quote(column))));
    let set: Vec<String> = set.into_iter().chain(locks).collect();
    format!(
        "WITH {me}, won AS ({won}) UPDATE {table} t SET {set} FROM won v WHERE {id} = v.event::{cast} RETURNING {id}::text",
        table = c.table,
        set = set.join(", "),
        id = c.identity(),
        cast = c.identity_type(),
    )
}

/// What the side table keeps of an error because the table has no column for it: `, name = alias.name` for each.
fn side_error(c: &Columns, alias: &str) -> String {
    let code = c.spec.error_code.is_none().then(|| format!(", error_code = {alias}.code"));
    let message = c.spec.error_message.is_none().then(|| format!(", error_message = {alias}.message"));
    code.into_iter().chain(message).collect()
}

/// What a verdict writes into the table, apart from the lease.
fn assignments(c: &Columns, kind: Kind) -> Vec<String> {
    let spec = &c.spec;
    let role = match kind {
        Kind::Retry => &c.status.retrying,
        Kind::Dead => &c.status.dead,
        Kind::Unknown => c.status.unknown.as_ref().unwrap_or(&c.status.dead),
        Kind::Delivered => &c.status.done,
        Kind::Released | Kind::Away => &c.status.new,
    };
    let word = if kind.gives_back() && c.status.new.word != c.status.retrying.word {
        // Given back as what it was: one that had failed before goes on being a retry.
        let failed_before = match &spec.count {
            Some(Count::Attempts(column)) => format!("coalesce(t.{}, 0) > 1", quote(column)),
            Some(Count::Retries(column)) => format!("coalesce(t.{}, 0) > 0", quote(column)),
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
    let mut set = vec![format!("{} = {word}", quote(&c.status.column))];
    let mut count = None;
    match (&spec.count, kind) {
        (Some(Count::Attempts(column)), Kind::Released | Kind::Away) => {
            count = Some((column, format!("greatest(t.{}, 1) - 1", quote(column))));
        }
        (Some(Count::Retries(column)), Kind::Retry | Kind::Dead) => {
            // At its end it stays there: a count that overflows would fail the settle of all rows.
            let most = c.most(column) - 1;
            count =
                Some((column, format!("least(greatest(coalesce(t.{}, 0), 0), {most}) + 1", quote(column))));
        }
        _ => {}
    }
    // A role that shares its word with another is told apart by its count: a permanent failure spends it.
    if let Some(Condition { column, test, value }) = &role.when {
        let base = || match &count {
            Some((name, expression)) if *name == column => expression.clone(),
            _ => format!("t.{}", quote(column)),
        };
        match test {
            Test::AtLeast => count = Some((column, format!("greatest({}, {value})", base()))),
            Test::Equal => count = Some((column, value.to_string())),
            // One that has failed too often is what the table's own words make of it.
            Test::Less => {}
        }
    }
    set.extend(count.map(|(column, value)| format!("{} = {value}", quote(column))));

    if let Some(column) = &spec.next_retry_at {
        match kind {
            Kind::Retry | Kind::Away => set.push(format!(
                "{} = {}",
                quote(column),
                c.write_time(column, "now() + make_interval(secs => v.wait)")
            )),
            Kind::Delivered | Kind::Dead | Kind::Unknown | Kind::Released => {}
        }
    }
    if kind != Kind::Released {
        // Nothing to say on delivery: what went wrong before is history.
        for (column, value) in [(&spec.error_code, "v.code"), (&spec.error_message, "v.message")] {
            set.extend(
                column.iter().map(|column| format!("{} = {}", quote(column), c.fitted(column, value))),
            );
        }
    }
    if matches!(kind, Kind::Delivered | Kind::Dead | Kind::Unknown) {
        set.extend(
            spec.finished_at
                .iter()
                .map(|column| format!("{} = {}", quote(column), c.write_time(column, "now()"))),
        );
    }
    set.extend(
        spec.updated_at.iter().map(|column| format!("{} = {}", quote(column), c.write_time(column, "now()"))),
    );
    set
}
