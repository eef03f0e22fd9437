//! Reads the next events, reads events again, and reads parked events that are due. Bounded in rows and in bytes, however
//! large the rows are.

use std::time::Duration;

use airtight_core::{
    Result,
    log::{Due, LogRow, ParkedRow, Read, ReadRequest, behind_retention},
    table::literal,
};
use futures::TryStreamExt;
use sqlx::{AssertSqlSafe, Row, postgres::PgRow};

use super::{LogTable, holes::Reach, numbers, parked::EVENT};
use crate::{PgOutbox, columns::EventColumns, decode, error::doing, slots};

/// What a row costs in memory besides its payload, near enough.
const ROW_OVERHEAD: usize = 512;

/// The most held events that come along with the one they wait behind.
const BEHIND: i64 = 100;

/// What a page is read by: all that it depends on, so that one can be read ahead.
#[derive(Debug, Clone)]
pub(super) struct Ask {
    pub(super) after: i64,
    pub(super) limit: usize,
    pub(super) bytes: usize,
    pub(super) max_payload: usize,
    pub(super) partitions: Vec<u16>,
    pub(super) count: u16,
    pub(super) streams: Vec<String>,
}

impl Ask {
    pub(super) fn new(request: &ReadRequest<'_>, limit: usize) -> Self {
        Self {
            after: request.after,
            limit,
            bytes: request.bytes,
            max_payload: request.max_payload,
            partitions: request.partitions.to_vec(),
            count: request.member.partitions,
            streams: request.member.streams.clone(),
        }
    }

    /// Whether another one reads the same rows in the same way, wherever it begins and however much it takes.
    pub(super) fn is_read_like(&self, other: &Self) -> bool {
        let Self { after: _, limit: _, bytes: _, max_payload, partitions, count, streams } = self;
        (max_payload, partitions, count, streams)
            == (&other.max_payload, &other.partitions, &other.count, &other.streams)
    }
}

/// Rows as one statement saw them.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) rows: Vec<PageRow>,
    /// Up to where holes were decided when the statement began.
    pub(super) decided_to: i64,
    /// Up to where retention had removed events, in the same snapshot; asked for only where holes may be passed.
    pub(super) floor: i64,
    /// A bound ended it, not the end of the log.
    pub(super) full: bool,
}

#[derive(Debug)]
pub(super) struct PageRow {
    pub(super) seq: i64,
    /// None where the row is not wanted: another partition's, or another stream's.
    row: Option<LogRow>,
}

impl PageRow {
    fn bytes(&self) -> usize {
        self.row.as_ref().map_or(64, InMemory::size)
    }
}

impl Page {
    /// What a row takes on average.
    pub(super) fn row_bytes(&self) -> Option<usize> {
        let wanted = self.rows.iter().filter_map(|row| row.row.as_ref());
        let sizes: Vec<usize> =
            wanted.filter_map(|row| row.event.as_ref().ok()).map(|event| event.size()).collect();
        let total: usize = sizes.iter().sum();
        total.checked_div(sizes.len())
    }

    /// Cuts it to so many rows and bytes, though at least one; returns the rest.
    pub(super) fn cut(&mut self, rows: usize, bytes: usize) -> Option<Page> {
        let mut taken = 0;
        let fits = self.rows.iter().take_while(|row| {
            taken += row.bytes();
            taken <= bytes
        });
        let keep = fits.count().min(rows).max(1);
        if keep >= self.rows.len() {
            return None;
        }
        let rest = Page { rows: self.rows.split_off(keep), ..*self };
        self.full = true;
        Some(rest)
    }

    /// The rows within reach. `again`: holes were decided that stopped it.
    pub(super) fn into_read(self, reach: Reach, again: bool) -> Read {
        let rows = self.rows.into_iter().take(reach.rows).filter_map(|row| row.row).collect();
        let more = if reach.blocked { again } else { self.full };
        Read { rows, through: reach.through, more, blocked: reach.blocked && !again }
    }
}

/// Refuses to take for a hole what retention has removed.
pub(super) fn refuse_behind(request: &ReadRequest<'_>, floor: i64) -> Result<()> {
    if request.after < floor {
        return Err(behind_retention(request.member.consumer(), request.after, floor));
    }
    Ok(())
}

/// Reads from `after` on, every row, wanted or not.
pub(super) async fn page(outbox: &PgOutbox, table: &LogTable, ask: &Ask, decided_to: i64) -> Result<Page> {
    let c = &table.columns;
    let (count, limit) = (ask.count, ask.limit);
    let all = ask.streams.is_empty() && ask.partitions.len() >= usize::from(count.max(1));
    let floor = if decided_to > ask.after {
        format!("(SELECT floor FROM {} WHERE outbox = {})", outbox.own("log"), literal(&c.outbox))
    } else {
        "NULL::bigint".into()
    };
    // The filter comes after the order: what is not wanted still fills its place.
    let (events, join) = if all {
        (c.event_columns("$3"), String::new())
    } else {
        let wanted = format!(
            "({part} = ANY($4::smallint[])) AND (cardinality($5::text[]) = 0 OR {stream} = ANY($5))",
            part = table.partition(count),
            stream = c.field(&c.spec.stream),
        );
        (
            "e.*".into(),
            format!("LEFT JOIN LATERAL (SELECT {} WHERE {wanted}) e ON true", c.event_columns("$3")),
        )
    };
    let seq = table.seq();
    let sql = format!(
        "SELECT {seq}::bigint AS place, {part} AS part, {floor} AS floor, {events} FROM {table} t {join} \
         WHERE {seq} > $1 ORDER BY {seq} LIMIT $2",
        part = table.partition(count),
        table = c.table,
    );
    let mut query = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(ask.after)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .bind(i64::try_from(ask.max_payload).unwrap_or(i64::MAX));
    if !all {
        query = query.bind(numbers(&ask.partitions)).bind(&ask.streams);
    }
    let failed = doing("reading the log");
    let mut conn = outbox.acquire().await?;
    let mut page = Page { rows: Vec::with_capacity(limit.min(4_096)), decided_to, floor: 0, full: false };
    let mut bytes = 0;
    let mut layout = None;
    let mut rows = query.fetch(conn.get());
    while let Some(row) = rows.try_next().await.map_err(&failed)? {
        let layout = match &layout {
            Some(layout) => layout,
            None => layout.insert(decode::Layout::of(&row)?),
        };
        let place: i64 = row.try_get(0).map_err(&failed)?;
        let part: i16 = row.try_get(1).map_err(&failed)?;
        page.floor = row.try_get::<Option<i64>, _>(2).map_err(&failed)?.unwrap_or(0);
        let wanted = layout.is_there(&row)?;
        let row = wanted.then(|| log_row(&row, layout, table, ask.max_payload, place, part));
        let row = PageRow { seq: place, row };
        bytes += row.bytes();
        page.rows.push(row);
        if bytes >= ask.bytes {
            page.full = true;
            break;
        }
    }
    drop(rows);
    page.full |= page.rows.len() >= limit;
    if bytes >= ask.bytes && page.rows.len() < limit {
        // Rows that nobody wants any more are still on their way: rather none than all of them.
        conn.hang_up();
    } else {
        conn.commit().await?;
    }
    Ok(page)
}

fn log_row(
    row: &PgRow,
    layout: &decode::Layout,
    table: &EventColumns,
    max_payload: usize,
    seq: i64,
    part: i16,
) -> LogRow {
    let event = layout.event(row, &table.spec, max_payload);
    LogRow { seq, partition: u16::try_from(part).unwrap_or(0), max_attempts: layout.max_attempts(row), event }
}

/// Reads rows again that were read before.
pub(super) async fn again(
    outbox: &PgOutbox,
    table: &LogTable,
    request: &ReadRequest<'_>,
    seqs: &[i64],
) -> Result<Vec<LogRow>> {
    let c = &table.columns;
    let seq = table.seq();
    let sql = format!(
        "SELECT {seq}::bigint AS place, {part} AS part, {events} FROM {table} t \
         WHERE {seq} = ANY($1::bigint[]) ORDER BY {seq}",
        part = table.partition(request.member.partitions),
        events = c.event_columns("$2"),
        table = c.table,
    );
    let mut conn = outbox.acquire().await?;
    let found = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(seqs)
        .bind(i64::try_from(request.max_payload).unwrap_or(i64::MAX))
        .fetch(conn.get());
    let (rows, cut) = bounded(found, request, |row, layout| {
        let failed = doing("reading the log again");
        let (place, part) = (row.try_get(0).map_err(&failed)?, row.try_get(1).map_err(&failed)?);
        Ok(log_row(row, layout, table, request.max_payload, place, part))
    })
    .await?;
    if cut {
        conn.hang_up();
    } else {
        conn.commit().await?;
        if rows.len() < seqs.len() {
            let first =
                seqs.iter().find(|seq| !rows.iter().any(|row| row.seq == **seq)).copied().unwrap_or(0);
            return Err(behind_retention(request.member.consumer(), first - 1, first));
        }
    }
    Ok(rows)
}

/// Takes rows until the bytes are used up, at least one; says whether that cut it short.
async fn bounded<T: InMemory>(
    mut rows: impl futures::Stream<Item = sqlx::Result<PgRow>> + Unpin,
    request: &ReadRequest<'_>,
    decode: impl Fn(&PgRow, &decode::Layout) -> Result<T>,
) -> Result<(Vec<T>, bool)> {
    let mut taken = Vec::new();
    let mut bytes = 0;
    let mut layout = None;
    while let Some(row) = rows.try_next().await.map_err(doing("reading events"))? {
        let layout = match &layout {
            Some(layout) => layout,
            None => layout.insert(decode::Layout::of(&row)?),
        };
        let decoded = decode(&row, layout)?;
        bytes += decoded.size();
        taken.push(decoded);
        if bytes >= request.bytes {
            return Ok((taken, true));
        }
    }
    Ok((taken, false))
}

/// What a row takes in memory.
trait InMemory {
    fn size(&self) -> usize;
}

impl InMemory for LogRow {
    fn size(&self) -> usize {
        ROW_OVERHEAD + self.event.as_ref().map_or(0, |event| event.size())
    }
}

impl InMemory for ParkedRow {
    fn size(&self) -> usize {
        self.row.size()
    }
}

/// Parked events that are due, each with what is held behind it.
pub(crate) async fn due(
    outbox: &PgOutbox,
    table: &EventColumns,
    request: &ReadRequest<'_>,
    except: &[i64],
) -> Result<Due> {
    let count = request.member.partitions.max(1);
    let parked = outbox.own("parked");
    let mine = format!(
        "outbox = $1 AND consumer = $2 AND {} = ANY($3::smallint[])",
        slots::partition_of("slot", count)
    );
    let behind = if request.member.by_key() {
        let blocked = if request.member.block_on_dead {
            format!(
                "AND NOT EXISTS (SELECT FROM {parked} d WHERE d.outbox = $1 AND d.consumer = $2 AND d.key = h.key \
                 AND d.state <> 'waiting' AND d.seq < p.seq)"
            )
        } else {
            String::new()
        };
        format!(
            "p.key = h.key AND p.seq >= h.seq AND p.state = 'waiting' AND (p.seq = h.seq OR p.due_at IS NULL) \
             {blocked} ORDER BY p.seq LIMIT {BEHIND}"
        )
    } else {
        "p.seq = h.seq".into()
    };
    // The first of its key that waits, and with nothing dead before it where that blocks. Filtered here, and not
    // only below, or blocked ones would take the places of others.
    let first = if request.member.by_key() {
        let dead = if request.member.block_on_dead { "OR e.state <> 'waiting'" } else { "" };
        format!(
            "AND NOT EXISTS (SELECT FROM {parked} e WHERE e.outbox = $1 AND e.consumer = $2 AND e.key = p.key \
             AND e.seq < p.seq AND (e.state = 'waiting' AND (e.due_at IS NULL OR e.due_at > now()) {dead}))"
        )
    } else {
        String::new()
    };
    // Without order by key, what was held under another order waits for nothing.
    let due = if request.member.by_key() { "due_at <= now()" } else { "(due_at <= now() OR due_at IS NULL)" };
    let sql = format!(
        "WITH head AS (SELECT key, seq FROM {parked} p WHERE {mine} AND state = 'waiting' AND {due} \
           AND seq <> ALL($4::bigint[]) {first} ORDER BY due_at, seq LIMIT $5) \
         SELECT p.seq AS place, {part} AS part, p.attempts, {EVENT} \
         FROM head h CROSS JOIN LATERAL (SELECT * FROM {parked} p WHERE p.outbox = $1 AND p.consumer = $2 AND {behind}) p \
         ORDER BY p.seq LIMIT $5",
        part = slots::partition_of("p.slot", count),
    );
    let mut conn = outbox.acquire().await?;
    let found = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(request.member.consumer())
        .bind(numbers(request.partitions))
        .bind(except)
        .bind(i64::try_from(request.events).unwrap_or(i64::MAX))
        .fetch(conn.get());
    let (rows, cut) = bounded(found, request, |row, layout| {
        let failed = doing("reading parked events");
        let (place, part) = (row.try_get(0).map_err(&failed)?, row.try_get(1).map_err(&failed)?);
        let attempts: i32 = row.try_get(2).map_err(&failed)?;
        let row = log_row(row, layout, table, request.max_payload, place, part);
        Ok(ParkedRow { row, attempts: attempts.unsigned_abs() })
    })
    .await?;
    if cut {
        conn.hang_up();
        return Ok(Due { rows, next_in: None });
    }
    if !rows.is_empty() {
        conn.commit().await?;
        return Ok(Due { rows, next_in: None });
    }
    let sql = format!(
        "SELECT extract(epoch FROM min(due_at) - now())::float8 FROM {parked} p \
         WHERE {mine} AND state = 'waiting' AND due_at IS NOT NULL AND seq <> ALL($4::bigint[]) {first}"
    );
    let next: Option<f64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(request.member.consumer())
        .bind(numbers(request.partitions))
        .bind(except)
        .fetch_one(conn.get())
        .await
        .map_err(doing("reading parked events"))?;
    conn.commit().await?;
    let next_in = next.map(|seconds| Duration::from_secs_f64(seconds.clamp(0.001, 86_400.0)));
    Ok(Due { rows, next_in })
}
