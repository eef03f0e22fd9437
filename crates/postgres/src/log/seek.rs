//! Replay: moving a consumer while its relays run.
//!
//! A seek takes the partitions away from their owners and increases their epoch, in one transaction with the new
//! offset. Deliveries that a relay has in progress are fenced, and the relay takes the partitions again at their new offset.

use std::time::Duration;

use airtight_core::{
    Code, Error, Result,
    group::{GroupKind, GroupName},
    log::{Seek, SeekOptions, SeekTo, check_offset},
    table::quote,
};
use sqlx::{AssertSqlSafe, Row};

use super::{
    LogTable, admin, consumers,
    holes::{self, Holes},
    witness,
};
use crate::{PgOutbox, columns::qualified, error::doing, groups, members, outbox::Conn};

/// How long looking for the end waits for open publishers before it stops at their hole.
const PATIENCE: Duration = Duration::from_secs(5);

/// Behind the last event, or before the first hole that may still be filled.
pub(super) async fn latest(outbox: &PgOutbox, table: &LogTable) -> Result<i64> {
    let mut conn = outbox.acquire().await?;
    let last = consumers::last_value(outbox, &mut conn, table).await?;
    conn.commit().await?;
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let mut holes = Holes::default();
    let mut wait = Duration::from_millis(1);
    while tokio::time::Instant::now() < deadline {
        if holes.look(last, holes::holders(outbox, table.sequence.oid).await?) {
            return Ok(last);
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(Duration::from_millis(100));
    }
    // Everything up to where some consumer stands is decided; behind that, up to the first hole.
    let mut conn = outbox.acquire().await?;
    let (floor, _) = consumers::floor(outbox, &mut conn, table).await?;
    let sql = format!(
        "WITH base AS (SELECT greatest($3, coalesce((SELECT max(last_seq) FROM {partition} WHERE outbox = $1 AND {is_log}), 0)) AS seq), \
         rows AS (SELECT {seq} AS seq, lag({seq}, 1, (SELECT seq FROM base)) OVER (ORDER BY {seq}) AS before \
           FROM {table} t WHERE {seq} > (SELECT seq FROM base) AND {seq} <= $2) \
         SELECT coalesce((SELECT min(before) FROM rows WHERE seq > before + 1), (SELECT max(seq) FROM rows), (SELECT seq FROM base))",
        partition = outbox.own("partition"),
        is_log = groups::is_kind("grp", GroupKind::Log),
        seq = table.seq(),
        table = table.columns.table,
    );
    let latest = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(last)
        .bind(floor)
        .fetch_one(conn.get())
        .await
        .map_err(doing("looking for the end of the log"))?;
    conn.commit().await?;
    Ok(latest)
}

pub(super) async fn seek(
    outbox: &PgOutbox,
    consumer: &str,
    to: SeekTo,
    options: SeekOptions,
) -> Result<Seek> {
    let mut conn = outbox.acquire().await?;
    let table = LogTable::load(outbox, &mut conn).await?;
    conn.commit().await?;
    let end = match to {
        SeekTo::Latest => Some(latest(outbox, &table).await?),
        _ => None,
    };
    let group = GroupName::log(consumer);
    let mut conn = outbox.begin().await?;
    // Counted before anything is locked: it may take long, and relays that cannot settle lose their leases.
    let known = admin::require(outbox, &mut conn, &table, consumer).await?;
    let set_back = is_set_back(outbox, &mut conn, &table, consumer).await?;
    let about = target(outbox, &mut conn, &table, to, end, set_back).await?;
    let (again, skipped) = count(outbox, &mut conn, &table, &known, group.stored(), about, set_back).await?;
    members::lock_group(outbox, &mut conn, &table.columns).await?;
    admin::require(outbox, &mut conn, &table, consumer).await?;
    let set_back = is_set_back(outbox, &mut conn, &table, consumer).await?;
    let to = target(outbox, &mut conn, &table, to, end, set_back).await?;
    witness::forget(outbox, &mut conn, &table, consumer, set_back).await?;
    let (from, furthest) = lock_offsets(outbox, &mut conn, &table, consumer, group.stored()).await?;
    let mut seek =
        Seek { consumer: consumer.to_owned(), from, to, again, skipped, parked_dropped: 0, forgotten: 0 };
    if options.forget_inbox {
        seek.forgotten = forget(outbox, &mut conn, &table, consumer, to).await?;
    }
    seek.parked_dropped = drop_parked(outbox, &mut conn, &table, consumer, to).await?;
    if to < furthest {
        remember_replay(outbox, &mut conn, &table, consumer, to).await?;
    }
    move_all(outbox, &mut conn, &table, consumer, group.stored(), to).await?;
    if options.dry_run {
        // What would happen has happened, to nobody.
        drop(conn);
        return Ok(seek);
    }
    conn.commit().await?;
    Ok(seek)
}

/// Whether numbers are drawn again that the consumer, or retention, has passed.
async fn is_set_back(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable, consumer: &str) -> Result<bool> {
    let look = witness::look(outbox, conn, table, consumer, None).await?;
    Ok(look.top < look.floor || look.set_back(None).is_some())
}

/// The offset that is meant.
async fn target(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    to: SeekTo,
    end: Option<i64>,
    set_back: bool,
) -> Result<i64> {
    // Where numbers are drawn again, those that retention has noted down are other ones.
    let (floor, floor_time) =
        if set_back { (0, None) } else { consumers::floor(outbox, conn, table).await? };
    let last = consumers::last_value(outbox, conn, table).await?;
    Ok(match to {
        SeekTo::Seq(seq) => {
            check_offset(seq, floor, last)?;
            seq
        }
        SeekTo::Time(time) => at_time(outbox, conn, table, time, floor, floor_time, last).await?,
        SeekTo::Earliest => floor,
        SeekTo::Latest => end.unwrap_or(last).max(floor),
    })
}

/// Before the first event that was published at a time or later.
async fn at_time(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    time: time::OffsetDateTime,
    floor: i64,
    floor_time: Option<time::OffsetDateTime>,
    last: i64,
) -> Result<i64> {
    if let Some(removed) = floor_time.filter(|removed| time <= *removed) {
        return Err(Error::permanent(
            Code::BEFORE_RETENTION,
            format!(
                "events up to {removed} were removed by retention (seq {floor}); the oldest position is `--earliest`"
            ),
        ));
    }
    let Some(created) = &table.columns.spec.created_at else {
        return Err(Error::permanent(
            Code::NO_TIME,
            format!(
                "{} has no column `created_at` mapped, so no position can be found for a time",
                table.columns.outbox
            ),
        )
        .with_remedy("give a seq"));
    };
    let sql = format!(
        "SELECT min({}) FROM {} t WHERE {} >= $1",
        table.seq(),
        table.columns.table,
        table.columns.read_time(created)
    );
    let first: Option<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(time)
        .fetch_one(conn.get())
        .await
        .map_err(doing("looking for the first event of that time"))?;
    let Some(first) = first else {
        return Err(Error::permanent(
            Code::BAD_OFFSET,
            format!("no event was published at {time} or later; the last event has seq {last}"),
        )
        .with_remedy("use `--latest`"));
    };
    Ok((first - 1).max(floor))
}

/// Locks the consumer's partitions against its relays; returns the smallest offset and the largest.
async fn lock_offsets(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    group: &str,
) -> Result<(i64, i64)> {
    let failed = doing("reading offsets");
    let sql = format!(
        "SELECT coalesce(last_seq, 0) FROM {} WHERE outbox = $1 AND grp = $2 ORDER BY n FOR UPDATE",
        outbox.own("partition")
    );
    let offsets: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(group)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    match &table.columns.spec.log.offsets {
        Some(foreign) => {
            let offset = consumers::foreign_offset(outbox, conn, foreign, consumer, None).await?;
            Ok((offset, offset))
        }
        None => {
            let (first, last) = (offsets.iter().min(), offsets.iter().max());
            Ok((first.copied().unwrap_or(0), last.copied().unwrap_or(0)))
        }
    }
}

/// How many events come again, and how many are never delivered. Where the log was set back, the offset says nothing
/// about what was delivered: everything before the target counts as skipped.
async fn count(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    known: &admin::ConsumerRow,
    group: &str,
    to: i64,
    set_back: bool,
) -> Result<(u64, u64)> {
    let failed = doing("counting events");
    let c = &table.columns;
    let foreign = match &c.spec.log.offsets {
        Some(offsets) => Some(consumers::foreign_offset(outbox, conn, offsets, &known.name, None).await?),
        None => None,
    };
    let sql = format!(
        "WITH offsets AS (SELECT n, coalesce($5::bigint, last_seq) AS last_seq FROM {partition} \
           WHERE outbox = $1 AND grp = $2) \
         SELECT count(*) FILTER (WHERE {seq} > $3 AND {seq} <= o.last_seq) AS again, \
           count(*) FILTER (WHERE {seq} <= $3 AND ({seq} > o.last_seq OR $6)) AS skipped \
         FROM {table} t JOIN offsets o ON o.n = {part} \
         WHERE ({seq} > least($3, (SELECT min(last_seq) FROM offsets)) OR $6) AND {seq} <= greatest($3, (SELECT max(last_seq) FROM offsets)) \
           AND (cardinality($4::text[]) = 0 OR {stream} = ANY($4))",
        partition = outbox.own("partition"),
        seq = table.seq(),
        table = c.table,
        part = table.partition(known.partitions),
        stream = c.field(&c.spec.stream),
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(group)
        .bind(to)
        .bind(&known.streams)
        .bind(foreign)
        .bind(set_back)
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    let count = |name: &str| row.try_get::<i64, _>(name).map(i64::unsigned_abs).map_err(&failed);
    Ok((count("again")?, count("skipped")?))
}

/// Makes the inbox forget what comes again. An entry without a place counts when it is no older than the first
/// of these events: to forget one too many costs nothing, one too few would make the replay a no-op.
async fn forget(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    to: i64,
) -> Result<u64> {
    let sql = format!(
        "DELETE FROM {inbox} WHERE consumer = $1 AND (seq > $2 OR seq IS NULL AND seen_at >= \
           (SELECT {created} FROM {table} t WHERE {seq} > $2 ORDER BY {seq} LIMIT 1))",
        inbox = outbox.own("inbox"),
        created = table.columns.created_at(),
        table = table.columns.table,
        seq = table.seq(),
    );
    let gone = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(consumer)
        .bind(to)
        .execute(conn.get())
        .await
        .map_err(doing("clearing the inbox"))?;
    Ok(gone.rows_affected())
}

async fn drop_parked(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    to: i64,
) -> Result<u64> {
    let sql =
        format!("DELETE FROM {} WHERE outbox = $1 AND consumer = $2 AND seq > $3", outbox.own("parked"));
    let gone = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(consumer)
        .bind(to)
        .execute(conn.get())
        .await
        .map_err(doing("dropping parked events"))?;
    Ok(gone.rows_affected())
}

/// Gives the replay a number, by the clock: one that was removed with its consumer may not come back. What was to come
/// again by an earlier replay and has not yet is part of this one.
async fn remember_replay(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    to: i64,
) -> Result<()> {
    let through = consumers::last_value(outbox, conn, table).await?;
    let sql = format!(
        "UPDATE {} SET replay = greatest(coalesce(replay, 0) + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), \
         replay_after = least(coalesce(replay_after, $3), $3), replay_through = $4 WHERE outbox = $1 AND name = $2",
        outbox.own("consumer")
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(consumer)
        .bind(to)
        .bind(through)
        .execute(conn.get())
        .await
        .map_err(doing("recording the replay"))?;
    Ok(())
}

async fn move_all(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    consumer: &str,
    group: &str,
    to: i64,
) -> Result<()> {
    let failed = doing("moving offsets");
    let sql = format!(
        "WITH c AS (UPDATE {} SET revision = revision + 1 WHERE outbox = $1 AND name = $4) \
         UPDATE {} SET last_seq = $3, moved_at = now(), owner = NULL, epoch = epoch + 1 WHERE outbox = $1 AND grp = $2",
        outbox.own("consumer"),
        outbox.own("partition")
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(group)
        .bind(to)
        .bind(consumer)
        .execute(conn.get())
        .await
        .map_err(&failed)?;
    if let Some(offsets) = &table.columns.spec.log.offsets {
        let touch = offsets.updated_at.as_ref().map(|column| format!(", {} = now()", quote(column)));
        let sql = format!(
            "UPDATE {} SET {} = $2{} WHERE {} = $1",
            qualified(offsets.schema.as_deref(), &offsets.table),
            quote(&offsets.last_seq),
            touch.unwrap_or_default(),
            quote(&offsets.consumer)
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(consumer)
            .bind(to)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
    }
    Ok(())
}
