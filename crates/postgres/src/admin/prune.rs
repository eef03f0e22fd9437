//! Removes old done events, in bounded statements.

use std::time::Duration;

use airtight_core::{
    Result,
    admin::{Prune, Removed},
};
use sqlx::{AssertSqlSafe, Row};

use super::CHUNK;
use crate::{
    PgOutbox,
    columns::col,
    error::doing,
    outbox::Conn,
    queue::{self, QueueTable},
};

enum Window {
    /// There are further rows after this seq.
    More(i64),
    /// Ask the same again, as long as that deletes something.
    Again,
    /// Nothing older is left.
    End,
}

pub(super) async fn prune(
    outbox: &PgOutbox,
    what: Prune,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Removed> {
    let mut conn = outbox.acquire().await?;
    let c = queue::load(outbox, &mut conn).await?;
    let column = c.spec.age_column(what.by_creation)?;
    let removed = |events| Removed { events, column: column.to_owned() };
    if what.dry_run {
        let events = count_old(outbox, &mut conn, &*c, column, what.keep).await?;
        conn.commit().await?;
        return Ok(removed(events));
    }
    conn.commit().await?;
    let mut total = 0;
    let mut after: Option<i64> = None;
    loop {
        let (deleted, window) = prune_some(outbox, &*c, column, what.keep, after).await?;
        total += deleted;
        progress(total);
        match window {
            Window::More(seq) => after = Some(seq),
            Window::Again if deleted > 0 => {}
            Window::Again | Window::End => return Ok(removed(total)),
        }
    }
}

/// Deletes one chunk of done events.
///
/// With an ascending column the table is walked along it, window by window, to the first window that was
/// written after the deadline: no index on the time of finishing is needed, which every delivery would
/// have to maintain.
async fn prune_some(
    outbox: &PgOutbox,
    c: &dyn QueueTable,
    column: &str,
    keep: Duration,
    after: Option<i64>,
) -> Result<(u64, Window)> {
    let failed = doing("pruning");
    let old = is_old(c, column);
    let done = c.is(&c.status.done);
    let id = c.identity();
    let mut conn = outbox.acquire().await?;
    let walk = c.spec.seq.as_ref().filter(|seq| c.is_integer(seq) && c.spec.created_at.is_some());
    let Some(seq) = walk.map(|seq| col(seq)) else {
        let sql = format!(
            "DELETE FROM {table} t WHERE {id} = ANY(ARRAY(SELECT {id} FROM {table} t WHERE {done} AND {old} \
             LIMIT {CHUNK} FOR UPDATE SKIP LOCKED))",
            table = c.table,
        );
        let query = sqlx::query(AssertSqlSafe(sql)).persistent(!outbox.pooled).bind(keep.as_secs_f64());
        let deleted = query.execute(conn.get()).await.map_err(&failed)?.rows_affected();
        conn.commit().await?;
        return Ok((deleted, Window::Again));
    };
    // By the identity: what ascends need not be unique in a table that is not our own.
    let sql = format!(
        "WITH slice AS MATERIALIZED (SELECT {seq} AS seq, {created} AS created FROM {table} t \
           WHERE {seq} > $2 ORDER BY {seq} LIMIT {CHUNK}), \
         gone AS (DELETE FROM {table} t WHERE {id} = ANY(ARRAY(SELECT t2.id FROM (SELECT {id} AS id FROM {table} t \
           WHERE {seq} > $2 AND {seq} <= (SELECT max(seq) FROM slice) AND {done} AND {old} \
           FOR UPDATE SKIP LOCKED) AS t2)) RETURNING 1) \
         SELECT (SELECT count(*) FROM gone) AS deleted, max(seq)::bigint AS last, \
           coalesce(bool_or(coalesce(created < now() - make_interval(secs => $1), true)), false) AS any_old FROM slice",
        table = c.table,
        created = c.created_at(),
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(keep.as_secs_f64())
        .bind(after.unwrap_or(i64::MIN))
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    conn.commit().await?;
    let deleted: i64 = row.try_get("deleted").map_err(&failed)?;
    let last: Option<i64> = row.try_get("last").map_err(&failed)?;
    let any_old: bool = row.try_get("any_old").map_err(&failed)?;
    let window = last.filter(|_| any_old).map_or(Window::End, Window::More);
    Ok((deleted.unsigned_abs(), window))
}

/// Whether the column says that `t` is older than the first parameter. A row that does not say is not.
fn is_old(c: &dyn QueueTable, column: &str) -> String {
    format!("{} < now() - make_interval(secs => $1)", c.finished(column))
}

async fn count_old(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &dyn QueueTable,
    column: &str,
    keep: Duration,
) -> Result<u64> {
    let sql = format!(
        "SELECT count(*) FROM {} t WHERE {} AND {}",
        c.table,
        c.is(&c.status.done),
        is_old(c, column)
    );
    let events: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(keep.as_secs_f64())
        .fetch_one(conn.get())
        .await
        .map_err(doing("counting old events"))?;
    Ok(events.unsigned_abs())
}
