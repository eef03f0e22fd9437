//! What `status`, `check` and `blocked` read: counts, relays, streams that no relay reads, keys that wait.

use airtight_core::{
    Error, Result,
    admin::{AWAY_SHOWN, AwayStatus, BlockedKey, RelayStatus, StreamStatus},
};
use sqlx::AssertSqlSafe;

use super::DONE_CAP;
use crate::{
    PgOutbox,
    columns::{EventColumns, col},
    decode,
    error::doing,
    outbox::Conn,
    queue::QueueTable,
};

pub(super) async fn open_counts(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &dyn QueueTable,
) -> Result<Vec<StreamStatus>> {
    let sql = format!(
        "SELECT stream, \
           count(*) FILTER (WHERE state = 'pending' AND NOT waits) AS pending, \
           count(*) FILTER (WHERE state = 'pending' AND waits) AS retrying, \
           count(*) FILTER (WHERE state = 'processing') AS processing, \
           count(*) FILTER (WHERE state = 'unknown') AS unknown, \
           count(*) FILTER (WHERE state NOT IN ('pending', 'processing', 'unknown')) AS dead, \
           greatest(extract(epoch FROM now() - min(created) FILTER (WHERE state IN ('pending', 'processing'))), 0)::float8 \
             AS oldest, count(created) FILTER (WHERE state IN ('pending', 'processing')) > 0 AS aged \
         FROM (SELECT {stream} AS stream, {state} AS state, {waits} AS waits, \
             {created} AS created FROM {table} t {side} WHERE {open} \
           UNION ALL SELECT {stream}, {state}, false, {created} FROM {table} t {side} WHERE {dead}) AS open \
         GROUP BY stream",
        stream = c.label(&c.spec.stream),
        state = c.state(),
        waits = c.waits(),
        created = c.created_at(),
        table = c.table,
        side = c.side(),
        open = c.is_open(),
        dead = c.is_dead_or_unknown(),
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .fetch_all(conn.get())
        .await
        .map_err(doing("counting events"))?;
    rows.iter()
        .map(|row| {
            let count =
                |name: &str| Ok::<u64, airtight_core::Error>(decode::get::<i64>(row, name)?.unsigned_abs());
            let aged: bool = decode::get(row, "aged")?;
            Ok(StreamStatus {
                stream: decode::get(row, "stream")?,
                pending: count("pending")?,
                retrying: count("retrying")?,
                processing: count("processing")?,
                done: 0,
                dead: count("dead")?,
                unknown: count("unknown")?,
                unexplained: 0,
                oldest_pending_seconds: decode::get::<Option<f64>>(row, "oldest")?.filter(|_| aged),
            })
        })
        .collect()
}

/// What events wait for that are not to blame. Where a table has no place for codes, the message tells.
pub(super) async fn away(outbox: &PgOutbox, conn: &mut Conn, c: &dyn QueueTable) -> Result<Vec<AwayStatus>> {
    let (code, message) = (c.error_code(), c.error_message());
    let sql = format!(
        "SELECT NULL::text AS consumer, coalesce({code}::text, '') AS code, coalesce({message}::text, '') AS message, \
           count(*) AS events \
         FROM {table} t {side} WHERE {open} AND {retry} IS NOT NULL AND coalesce({code}::text LIKE $1, {message}::text LIKE $2) \
         GROUP BY 1, 2, 3 ORDER BY events DESC, message LIMIT {AWAY_SHOWN}",
        table = c.table,
        side = c.side(),
        open = c.is_open(),
        retry = c.next_retry_at(),
    );
    let query = sqlx::query(AssertSqlSafe(sql)).persistent(!outbox.pooled);
    let query = query.bind(Error::AWAY_CODES).bind(Error::AWAY_MESSAGES);
    let rows = query.fetch_all(conn.get()).await.map_err(doing("counting what waits for destinations"))?;
    rows.iter().map(away_row).collect()
}

pub(crate) fn away_row(row: &sqlx::postgres::PgRow) -> Result<AwayStatus> {
    Ok(AwayStatus {
        consumer: decode::get(row, "consumer")?,
        code: decode::get(row, "code")?,
        message: decode::get(row, "message")?,
        events: decode::get::<i64>(row, "events")?.unsigned_abs(),
    })
}

pub(super) async fn done_counts(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &dyn QueueTable,
) -> Result<Vec<(String, u64)>> {
    let sql = format!(
        "SELECT stream, count(*) FROM (SELECT {} AS stream FROM {} t WHERE {} LIMIT {DONE_CAP}) AS done GROUP BY stream",
        c.label(&c.spec.stream),
        c.table,
        c.is(&c.status.done)
    );
    let rows: Vec<(String, i64)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .fetch_all(conn.get())
        .await
        .map_err(doing("counting done events"))?;
    Ok(rows.into_iter().map(|(stream, count)| (stream, count.unsigned_abs())).collect())
}

/// Rows that no other count has.
pub(super) async fn unexplained_counts(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &dyn QueueTable,
) -> Result<Vec<(String, u64)>> {
    let Some(unexplained) = c.unexplained() else { return Ok(Vec::new()) };
    let sql = format!(
        "SELECT {}, count(*) FROM {} t WHERE {unexplained} GROUP BY 1",
        c.label(&c.spec.stream),
        c.table,
    );
    let rows: Vec<(String, i64)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .fetch_all(conn.get())
        .await
        .map_err(doing("counting rows that no role explains"))?;
    Ok(rows.into_iter().map(|(stream, count)| (stream, count.unsigned_abs())).collect())
}

pub(crate) async fn relays(outbox: &PgOutbox, conn: &mut Conn, c: &EventColumns) -> Result<Vec<RelayStatus>> {
    let sql = format!(
        "SELECT r.id::text AS id, r.host, r.streams, r.ord, extract(epoch FROM r.expires_at - now())::float8 AS lease, \
           (SELECT count(*) FROM {} p WHERE p.owner = r.id) AS partitions \
         FROM {} r WHERE r.outbox = $1 AND r.expires_at > now() ORDER BY r.started_at, r.id",
        c.partition, c.relay
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .fetch_all(conn.get())
        .await
        .map_err(doing("listing relays"))?;
    rows.iter()
        .map(|row| {
            Ok(RelayStatus {
                id: decode::get(row, "id")?,
                host: decode::get(row, "host")?,
                streams: decode::get(row, "streams")?,
                order: decode::get(row, "ord")?,
                partitions: decode::get::<i64>(row, "partitions")?.unsigned_abs(),
                lease_seconds: decode::get(row, "lease")?,
            })
        })
        .collect()
}

/// Streams with something to deliver that no live relay reads.
pub(super) async fn unread_streams(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &dyn QueueTable,
) -> Result<Vec<String>> {
    let sql = format!(
        "SELECT DISTINCT stream FROM (SELECT {} AS stream FROM {} t WHERE {} LIMIT 100000) AS open \
         WHERE NOT EXISTS (SELECT FROM {} r WHERE r.outbox = $1 AND r.expires_at > now() \
           AND (cardinality(r.streams) = 0 OR open.stream = ANY(r.streams))) ORDER BY stream LIMIT 100",
        c.label(&c.spec.stream),
        c.table,
        c.is_open(),
        c.relay
    );
    sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .fetch_all(conn.get())
        .await
        .map_err(doing("looking for streams that no relay reads"))
}

/// Keys with a failed or dead event and others waiting behind it.
pub(super) async fn blocked_keys(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &dyn QueueTable,
    limit: i64,
) -> Result<Vec<BlockedKey>> {
    let retry = c.next_retry_at();
    let waits = format!("({} AND {retry} IS NOT NULL AND {retry} < 'infinity')", c.is_open());
    let order = c.order().join(", ");
    let sql = format!(
        "WITH head AS MATERIALIZED (SELECT DISTINCT ON ({key}) {key} AS key, {id}::text AS id, {state} AS state, \
             ROW({order}) AS place FROM {table} t {side} WHERE {waits} OR {dead} ORDER BY {key}, {order}) \
         SELECT head.key, head.id, head.state, behind.held FROM head CROSS JOIN LATERAL (SELECT count(*) AS held \
           FROM {table} t {side} WHERE {key} = head.key AND {held} AND ROW({order}) > head.place) AS behind \
         WHERE behind.held > 0 ORDER BY behind.held DESC, head.key LIMIT $1",
        key = c.blocked_key(),
        held = c.is_blocked(),
        id = col(&c.spec.id),
        state = c.state(),
        table = c.table,
        side = c.side(),
        dead = c.is_dead_or_unknown(),
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(limit)
        .fetch_all(conn.get())
        .await
        .map_err(doing("listing blocked keys"))?;
    rows.iter()
        .map(|row| {
            Ok(BlockedKey {
                aggregate_id: decode::get(row, "key")?,
                behind_id: decode::get(row, "id")?,
                behind_state: decode::get(row, "state")?,
                held: decode::get::<i64>(row, "held")?.unsigned_abs(),
            })
        })
        .collect()
}
