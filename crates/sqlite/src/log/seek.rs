//! Moves a consumer, even while relays run.
//!
//! One transaction moves all offsets, increases every epoch and removes every owner. A relay that has events under way
//! finds its settles refused, and takes its partitions again from the new offsets.

use airtight_core::{
    Code, Error, Result,
    group::GroupName,
    log::{Seek, SeekOptions, SeekTo, check_offset},
};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};
use time::OffsetDateTime;

use super::{
    admin::{ConsumerRow, consumer_row},
    created, end, floor,
    lag::{Counted, Parked, greatest, offsets, smallest},
    seq,
};
use crate::{
    decode::parse_time,
    error::db,
    outbox::SqliteOutbox,
    publish::format_time,
    sql::{NOW, Sql},
};

pub(super) async fn seek(
    outbox: &SqliteOutbox,
    consumer: &str,
    to: SeekTo,
    options: SeekOptions,
) -> Result<Seek> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.begin().await?;
    let conn = tx.conn();
    let ConsumerRow { streams, .. } = consumer_row(conn, sql, consumer).await?;
    let to = target(conn, sql, to).await?;
    let offsets = offsets(conn, sql, consumer).await?;
    let counted = Counted { sql, consumer, streams: &streams, offsets: &offsets };
    let again =
        counted.count(conn, to..greatest(&offsets), Parked::With, |seq, offset| seq <= offset).await?;
    let skipped =
        counted.count(conn, smallest(&offsets)..to, Parked::Without, |seq, offset| seq > offset).await?;
    let mut result = Seek {
        consumer: consumer.to_owned(),
        from: smallest(&offsets),
        to,
        again: again.events,
        skipped: skipped.events,
        parked_dropped: 0,
        forgotten: 0,
    };
    // Counted by doing it: a dry run is rolled back.
    result.parked_dropped = execute(
        conn,
        sql,
        "DELETE FROM airtight_parked WHERE outbox = {} AND consumer = ?1 AND seq > ?2",
        consumer,
        to,
    )
    .await?;
    if options.forget_inbox {
        result.forgotten = forget(conn, sql, consumer, to).await?;
    }
    if options.dry_run {
        return Ok(result);
    }
    let offset = format!(
        "UPDATE airtight_offset SET last_seq = ?2, updated_at = {NOW} WHERE outbox = {{}} AND consumer = ?1"
    );
    execute(conn, sql, &offset, consumer, to).await?;
    if to < greatest(&offsets) {
        remember_replay(conn, sql, consumer, to).await?;
    }
    let group = GroupName::log(consumer);
    execute(
        conn,
        sql,
        "UPDATE airtight_partition SET owner = NULL, epoch = epoch + 1 WHERE outbox = {} AND grp = ?1 AND ?2 IS NOT NULL",
        group.stored(),
        to,
    )
    .await?;
    execute(
        conn,
        sql,
        "UPDATE airtight_consumer SET revision = revision + 1 WHERE outbox = {} AND name = ?1 AND ?2 IS NOT NULL",
        consumer,
        to,
    )
    .await?;
    tx.commit().await?;
    Ok(result)
}

/// Gives the replay a number, by the clock: one that was removed with its consumer may not come back. What was to come
/// again by an earlier replay and has not yet is part of this one.
async fn remember_replay(conn: &mut SqliteConnection, sql: &Sql, consumer: &str, to: i64) -> Result<()> {
    let end = end(conn, sql).await?;
    let update = format!(
        "UPDATE airtight_consumer SET \
         replay = max(COALESCE(replay, 0) + 1, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000), \
         replay_after = min(COALESCE(replay_after, ?2), ?2), replay_through = {end} \
         WHERE outbox = {{}} AND name = ?1"
    );
    execute(conn, sql, &update, consumer, to).await.map(drop)
}

async fn execute(conn: &mut SqliteConnection, sql: &Sql, text: &str, name: &str, to: i64) -> Result<u64> {
    let done = sqlx::query(AssertSqlSafe(text.replace("{}", sql.name())))
        .bind(name)
        .bind(to)
        .execute(conn)
        .await
        .map_err(db)?;
    Ok(done.rows_affected())
}

/// Forgets what comes again: by its seq, or, where the handler gave none, by when it was seen.
async fn forget(conn: &mut SqliteConnection, sql: &Sql, consumer: &str, to: i64) -> Result<u64> {
    let delete = format!(
        "DELETE FROM airtight_inbox WHERE outbox = {{}} AND consumer = ?1 AND (seq > ?2 OR (seq IS NULL AND seen_at >= \
         (SELECT {} FROM {} AS o WHERE {2} > ?2 ORDER BY {2} LIMIT 1)))",
        created(sql, "o"),
        sql.spec.qualified(),
        seq(sql, "o")
    );
    execute(conn, sql, &delete, consumer, to).await
}

async fn target(conn: &mut SqliteConnection, sql: &Sql, to: SeekTo) -> Result<i64> {
    let (floor, end) = (floor(conn, sql).await?, end(conn, sql).await?);
    match to {
        SeekTo::Seq(seq) => check_offset(seq, floor.seq, end).map(|()| seq),
        SeekTo::Earliest => Ok(floor.seq),
        SeekTo::Latest => Ok(end),
        SeekTo::Time(at) => {
            let removed = floor.created_at.as_deref().and_then(parse_time);
            if let Some(removed) = removed.filter(|removed| at <= *removed) {
                return Err(Error::permanent(
                    Code::BEFORE_RETENTION,
                    format!(
                        "events published up to {} (seq {}) were removed by retention; the oldest place is `--earliest`",
                        format_time(removed),
                        floor.seq
                    ),
                ));
            }
            at_time(conn, sql, at, end).await
        }
    }
}

/// The offset before the first event that was published at this time or later.
async fn at_time(conn: &mut SqliteConnection, sql: &Sql, at: OffsetDateTime, end: i64) -> Result<i64> {
    if sql.spec.created_at.is_none() {
        return Err(Error::permanent(
            Code::NO_TIME,
            format!(
                "{} has no column that says when an event was written: seek by seq",
                sql.spec.display_name()
            ),
        ));
    }
    let at = format_time(at);
    // Both in SQLite's own form: it keeps milliseconds.
    let select = format!(
        "SELECT strftime('%Y-%m-%dT%H:%M:%fZ', ?1) > {NOW}, \
         (SELECT {1} FROM {0} AS o WHERE {2} >= strftime('%Y-%m-%dT%H:%M:%fZ', ?1) ORDER BY {1} LIMIT 1)",
        sql.spec.qualified(),
        seq(sql, "o"),
        created(sql, "o")
    );
    let row = sqlx::query(AssertSqlSafe(select)).bind(&at).fetch_one(conn).await.map_err(db)?;
    if row.try_get::<Option<bool>, _>(0).map_err(db)? == Some(true) {
        return Err(Error::permanent(
            Code::BAD_OFFSET,
            format!("{at} is in the future; to skip all events, use `--latest`"),
        ));
    }
    let first: Option<i64> = row.try_get(1).map_err(db)?;
    Ok(first.map_or(end, |seq| seq - 1))
}
