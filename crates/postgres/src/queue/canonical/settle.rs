//! Settling, renewing and marking on the canonical table: one statement each, every row fenced by its claim token.

use airtight_core::{
    Error, Result,
    group::Member,
    queue::{RowClaim, RowKey},
};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::{
    super::settle::{Kind, Marked, Settled, fence, marked},
    seqs,
};
use crate::{PgOutbox, columns::Columns, error::doing, outbox::Conn, session::Session};

pub(super) async fn settle(
    c: &Columns,
    outbox: &PgOutbox,
    conn: &mut Conn,
    member: &Member,
    kind: Kind,
    rows: Settled<'_>,
) -> Result<Vec<RowKey>> {
    let (me, alive) = fence(c, member.order);
    let set = written(kind);
    // An event that is only given back was not delivered: its lost leases still count.
    let lost = if kind == Kind::Released { "" } else { ", lost_leases = 0" };
    let sql = format!(
        "
        WITH {me} UPDATE {table} t SET {set}, claim_token = NULL, locked_until = NULL{lost}
        FROM unnest($1::bigint[], $2::uuid[], $3::float8[], $4::text[], $5::text[]) AS v(seq, token, wait, code, message)
        WHERE {alive} AND t.seq = v.seq AND t.claim_token = v.token RETURNING t.seq",
        table = c.table,
    );
    let settled: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(seqs(rows.claims.iter().copied()))
        .bind(rows.tokens)
        .bind(rows.waits)
        .bind(rows.codes)
        .bind(rows.messages)
        .bind(member.id)
        .fetch_all(conn.get())
        .await
        .map_err(doing("settling"))?;
    Ok(settled.into_iter().map(RowKey::Int).collect())
}

pub(super) async fn renew(
    c: &Columns,
    outbox: &PgOutbox,
    conn: &mut Conn,
    member: &Member,
    rows: &[RowClaim],
) -> Result<Vec<RowKey>> {
    let sql = format!(
        "
        UPDATE {table} t SET locked_until = now() + make_interval(secs => $3)
        FROM unnest($1::bigint[], $2::uuid[]) AS v(seq, token)
        WHERE t.seq = v.seq AND t.claim_token = v.token RETURNING t.seq",
        table = c.table,
    );
    let renewed: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(seqs(rows.iter()))
        .bind(rows.iter().map(|row| row.token).collect::<Vec<Uuid>>())
        .bind(member.lease.as_secs_f64())
        .fetch_all(conn.get())
        .await
        .map_err(doing("renewing leases"))?;
    Ok(renewed.into_iter().map(RowKey::Int).collect())
}

pub(super) async fn mark(
    c: &Columns,
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    rows: &[(String, Option<&Error>)],
    unknown: bool,
) -> Result<()> {
    for Marked { kind, ids, codes, messages } in marked(rows, unknown) {
        // One that is dead may still be delivered, once a person has said so.
        let open = if kind == Kind::Delivered { "t.status <> 'done'" } else { "t.phase = 0" };
        let sql = format!(
            "
            UPDATE {table} t SET {set}, claim_token = NULL, locked_until = NULL
            FROM unnest($1::text[], $2::text[], $3::text[]) AS v(seq, code, message)
            WHERE t.seq = v.seq::bigint AND {open}",
            table = c.table,
            set = written(kind),
        );
        sqlx::query(AssertSqlSafe(sql))
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

/// What a verdict writes, apart from the lease.
fn written(kind: Kind) -> &'static str {
    match kind {
        Kind::Retry => {
            "status = 'pending', next_retry_at = now() + make_interval(secs => v.wait),
            error_code = v.code, error_message = v.message"
        }
        Kind::Away => {
            "status = 'pending', attempts = greatest(t.attempts, 1) - 1,
            next_retry_at = now() + make_interval(secs => v.wait), error_code = v.code, error_message = v.message"
        }
        Kind::Dead => "status = 'dead', error_code = v.code, error_message = v.message, finished_at = now()",
        Kind::Unknown => {
            "status = 'unknown', error_code = v.code, error_message = v.message, finished_at = now()"
        }
        // What went wrong before is history: the error's columns become NULL.
        Kind::Delivered => "status = 'done', error_code = v.code, error_message = v.message, finished_at = now()",
        Kind::Released => "status = 'pending', attempts = greatest(t.attempts, 1) - 1",
    }
}
