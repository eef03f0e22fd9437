//! Retention: drops whole table partitions where possible, deletes in bounded statements otherwise, and maintains the floor.
//!
//! The floor is the `seq` of the newest event that was removed. It is written in the transaction that removes events, so that
//! no reader can mistake a removed event for a hole: see `read::refuse_behind`. Removal holds the lock that is also taken to
//! create and move consumers, so that no consumer begins below the floor.

use std::time::Duration;

use airtight_core::{
    Result,
    group::GroupKind,
    log::{Pruned, Retention},
    table::{literal, quote},
};
use sqlx::{AssertSqlSafe, Row};

use super::{
    LogTable, consumers,
    table_partitions::{self, LOCK_TIMEOUT, Leaf},
};
use crate::{PgOutbox, columns::qualified, error::doing, groups, members, outbox::Conn};

/// How many rows one statement removes.
const CHUNK: i64 = 5_000;

/// Rows of a partition that cannot be dropped yet are deleted one by one only when they have outlived retention
/// by so much of it: at thirty days, by one.
const SLACK: u32 = 30;

pub(super) async fn prune(
    outbox: &PgOutbox,
    retention: Retention,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Pruned> {
    let mut conn = outbox.acquire().await?;
    let table = LogTable::load(outbox, &mut conn).await?;
    let leaves = if table.partitioned {
        table_partitions::leaves(outbox, &mut conn, &table).await?
    } else {
        Vec::new()
    };
    conn.commit().await?;
    let mut pruned = Pruned::default();
    for leaf in leaves.iter().filter(|leaf| leaf.bounds.is_some()) {
        let what = "dropping an old partition";
        let Some(events) = outbox.retried(what, || drop_leaf(outbox, &table, leaf, retention)).await? else {
            break;
        };
        pruned.events += events;
        pruned.partitions += 1;
        progress(pruned.events);
    }
    let slack = if table.partitioned { retention.keep / SLACK } else { Duration::ZERO };
    loop {
        let removed = delete_some(outbox, &table, retention, slack).await?;
        if removed == 0 {
            break;
        }
        pruned.events += removed;
        progress(pruned.events);
    }
    let mut conn = outbox.acquire().await?;
    (pruned.floor, _) = consumers::floor(outbox, &mut conn, &table).await?;
    pruned.held_by = held_by(outbox, &mut conn, &table, retention).await?;
    conn.commit().await?;
    Ok(pruned)
}

/// What [`prune`] would remove. Nothing is locked, so what is written meanwhile may make it keep more.
pub(super) async fn prunable(outbox: &PgOutbox, retention: Retention) -> Result<Pruned> {
    let failed = doing("counting old events");
    let mut conn = outbox.acquire().await?;
    let table = LogTable::load(outbox, &mut conn).await?;
    let limit = limit(outbox, &mut conn, &table, retention).await?;
    let last = consumers::last_value(outbox, &mut conn, &table).await?;
    let (mut pruned, mut after) = (Pruned::default(), i64::MIN);
    if table.partitioned {
        for leaf in table_partitions::leaves(outbox, &mut conn, &table).await? {
            let Some((_, end)) = leaf.bounds else { continue };
            if last < end || limit < end - 1 || !is_old(outbox, &mut conn, &table, &leaf, retention).await? {
                break;
            }
            (pruned.partitions, after) = (pruned.partitions + 1, end - 1);
        }
    }
    let slack = if table.partitioned { retention.keep / SLACK } else { Duration::ZERO };
    let sql = format!(
        "SELECT count(*) FROM {table} t WHERE {seq} <= $1 AND ({seq} <= $2 OR {seq} < coalesce((SELECT min({seq}) \
         FROM {table} t WHERE {seq} > $2 AND {young}), {end}))",
        table = table.columns.table,
        seq = table.seq(),
        young = is_young(&table, "$3"),
        end = i64::MAX,
    );
    let events: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(limit)
        .bind(after)
        .bind((retention.keep + slack).as_secs_f64())
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    pruned.events = events.unsigned_abs();
    (pruned.floor, _) = consumers::floor(outbox, &mut conn, &table).await?;
    pruned.held_by = held_by(outbox, &mut conn, &table, retention).await?;
    conn.commit().await?;
    Ok(pruned)
}

/// Whether `t` is younger than a parameter in seconds. A row without a time is, so that it stays.
fn is_young(table: &LogTable, keep: &str) -> String {
    format!("coalesce({} >= now() - make_interval(secs => {keep}), true)", table.columns.created_at())
}

/// Whether all events of a partition are old.
async fn is_old(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    leaf: &Leaf,
    retention: Retention,
) -> Result<bool> {
    let sql = format!("SELECT NOT EXISTS (SELECT FROM {} t WHERE {})", leaf.name, is_young(table, "$1"));
    sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(retention.keep.as_secs_f64())
        .fetch_one(conn.get())
        .await
        .map_err(doing("looking for old partitions"))
}

/// The slowest consumer and its offset; none without consumers.
async fn slowest(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable) -> Result<Option<(String, i64)>> {
    let sql = match &table.columns.spec.log.offsets {
        Some(offsets) => format!(
            "SELECT {consumer}::text, {last}::bigint FROM {table} WHERE $1 <> '' ORDER BY {last} LIMIT 1",
            consumer = quote(&offsets.consumer),
            last = quote(&offsets.last_seq),
            table = qualified(offsets.schema.as_deref(), &offsets.table),
        ),
        None => format!(
            "SELECT c.name, p.last_seq FROM {} c JOIN {} p ON p.outbox = c.outbox AND p.grp = {} \
             WHERE c.outbox = $1 ORDER BY p.last_seq LIMIT 1",
            outbox.own("consumer"),
            outbox.own("partition"),
            groups::stored(GroupKind::Log, "c.name")
        ),
    };
    sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("looking for the slowest consumer"))
}

/// Up to where events may be removed for the sake of consumers.
async fn limit(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable, retention: Retention) -> Result<i64> {
    if !retention.wait_for_consumers {
        return Ok(i64::MAX);
    }
    Ok(slowest(outbox, conn, table).await?.map_or(i64::MAX, |(_, offset)| offset))
}

/// Drops a partition of which every event is old and settled: how many it held, or none if it must stay. The
/// outer none: a lock could not be had.
async fn drop_leaf(
    outbox: &PgOutbox,
    table: &LogTable,
    leaf: &Leaf,
    retention: Retention,
) -> Result<Option<Option<u64>>> {
    let failed = doing("dropping an old partition");
    let Some((_, end)) = leaf.bounds else { return Ok(Some(None)) };
    let c = &table.columns;
    let mut conn = outbox.begin().await?;
    members::lock_group(outbox, &mut conn, c).await?;
    // It is written to until the sequence has left it.
    if consumers::last_value(outbox, &mut conn, table).await? < end
        || limit(outbox, &mut conn, table, retention).await? < end - 1
    {
        return Ok(Some(None));
    }
    let locked = format!(
        "{LOCK_TIMEOUT}; LOCK TABLE {} IN ACCESS EXCLUSIVE MODE; LOCK TABLE {} IN ACCESS EXCLUSIVE MODE",
        c.table, leaf.name
    );
    // The look before the lock is cheap, the one behind it is true.
    for (round, lock) in [None, Some(locked)].into_iter().enumerate() {
        if let Some(lock) = lock {
            match sqlx::raw_sql(AssertSqlSafe(lock)).execute(conn.get()).await {
                Ok(_) => {}
                Err(error) if table_partitions::is_locked(&error) => return Ok(None),
                Err(error) => return Err(failed(error)),
            }
        }
        if !is_old(outbox, &mut conn, table, leaf, retention).await? {
            return Ok(Some(None));
        }
        if round == 0 {
            continue;
        }
        let sql = format!(
            "WITH gone AS (SELECT count(*) AS events, max({seq}) AS seq, max({created}) AS created FROM {leaf} t), \
             floor AS (UPDATE {log} l SET floor = greatest(l.floor, gone.seq), \
               floor_time = greatest(l.floor_time, gone.created) FROM gone WHERE l.outbox = {name}) \
             SELECT events FROM gone",
            seq = table.seq(),
            created = c.created_at(),
            leaf = leaf.name,
            log = outbox.own("log"),
            name = literal(&c.outbox),
        );
        let events: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .fetch_one(conn.get())
            .await
            .map_err(&failed)?;
        sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {}", leaf.name)))
            .execute(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        return Ok(Some(Some(events.unsigned_abs())));
    }
    Ok(Some(None))
}

/// Deletes the oldest events, as far as they are old, in one bounded statement. Returns how many.
async fn delete_some(
    outbox: &PgOutbox,
    table: &LogTable,
    retention: Retention,
    slack: Duration,
) -> Result<u64> {
    let failed = doing("removing old events");
    let c = &table.columns;
    let mut conn = outbox.begin().await?;
    members::lock_group(outbox, &mut conn, c).await?;
    let limit = limit(outbox, &mut conn, table, retention).await?;
    let (seq, created) = (table.seq(), c.created_at());
    let sql = format!(
        "WITH head AS (SELECT {seq} AS seq, {created} AS created, {young} AS young FROM {table} t WHERE {seq} <= $1 \
           ORDER BY {seq} LIMIT {CHUNK}), \
         young AS (SELECT min(seq) AS seq FROM head WHERE young), \
         gone AS (DELETE FROM {table} t USING head h, young y WHERE {seq} = h.seq AND (y.seq IS NULL OR h.seq < y.seq) \
           RETURNING h.seq, h.created), \
         total AS (SELECT count(*) AS events, max(seq) AS seq, max(created) AS created FROM gone), \
         floor AS (INSERT INTO {log} AS l (outbox, floor, floor_time) SELECT {name}, seq, created FROM total WHERE events > 0 \
           ON CONFLICT (outbox) DO UPDATE SET floor = greatest(l.floor, excluded.floor), \
             floor_time = greatest(l.floor_time, excluded.floor_time)) \
         SELECT events FROM total",
        young = is_young(table, "$2"),
        table = c.table,
        log = outbox.own("log"),
        name = literal(&c.outbox),
    );
    let events: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(limit)
        .bind((retention.keep + slack).as_secs_f64())
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    conn.commit().await?;
    Ok(events.unsigned_abs())
}

/// The consumer for whose sake events stay that are old enough to go.
async fn held_by(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    retention: Retention,
) -> Result<Option<String>> {
    let Some((name, offset)) = slowest(outbox, conn, table).await?.filter(|_| retention.wait_for_consumers)
    else {
        return Ok(None);
    };
    let sql = format!(
        "SELECT {created} < now() - make_interval(secs => $2) AS old FROM {table} t WHERE {seq} > $1 ORDER BY {seq} LIMIT 1",
        created = table.columns.created_at(),
        table = table.columns.table,
        seq = table.seq(),
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(offset)
        .bind(retention.keep.as_secs_f64())
        .fetch_optional(conn.get())
        .await
        .map_err(doing("looking for the slowest consumer"))?;
    let old = row.and_then(|row| row.try_get::<Option<bool>, _>("old").ok().flatten()).unwrap_or(false);
    Ok(old.then_some(name))
}
