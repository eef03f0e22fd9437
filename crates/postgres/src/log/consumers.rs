//! Consumers: their registration, their offsets, and what is left for them.

use std::collections::HashMap;

use airtight_core::{
    Backlog, Code, Error, Result,
    group::Member,
    log::{ConsumerState, Replay, Revision, Standing, Start, behind_retention},
    table::{OffsetTable, quote},
};
use sqlx::{AssertSqlSafe, Row};

use super::{LogTable, numbers, seek, witness};
use crate::{
    PgOutbox,
    columns::{EventColumns, qualified},
    error::doing,
    members,
    outbox::Conn,
    slots,
};

/// Counting what is left stops here: it is asked whether anything is.
const BACKLOG_CAP: i64 = 100_000;

/// The life of the server, as text.
pub(super) const SERVER: &str = "extract(epoch FROM pg_postmaster_start_time())::text";

/// Which server this is, and which life of it.
pub(super) async fn server(conn: &mut Conn) -> Result<String> {
    let row = sqlx::raw_sql(AssertSqlSafe(format!("SELECT {SERVER}"))).fetch_one(conn.get()).await;
    row.and_then(|row| row.try_get(0)).map_err(doing("reading the start time of the server"))
}

/// Up to where retention has removed events, and when the newest of these was published.
pub(super) async fn floor(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
) -> Result<(i64, Option<time::OffsetDateTime>)> {
    let sql = format!("SELECT floor, floor_time FROM {} WHERE outbox = $1", outbox.own("log"));
    let found = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("reading the floor"))?;
    Ok(found.unwrap_or((0, None)))
}

/// The newest value that was drawn from the sequence, as a subquery. One that was set with `is_called` false has not
/// drawn its value yet.
pub(super) fn top(table: &LogTable) -> String {
    format!(
        "(SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM {})",
        table.sequence.name
    )
}

/// The newest value that was drawn from the sequence.
pub(super) async fn last_value(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable) -> Result<i64> {
    sqlx::query_scalar(AssertSqlSafe(format!("SELECT * FROM {} AS s(top)", top(table))))
        .persistent(!outbox.pooled)
        .fetch_one(conn.get())
        .await
        .map_err(doing("reading the sequence"))
}

/// Writes the consumer down, and makes its partitions as many as they should be.
pub(super) async fn attach(outbox: &PgOutbox, table: &LogTable, member: &Member, start: Start) -> Result<()> {
    let failed = doing("registering the consumer");
    let (name, count) = (member.consumer(), member.partitions);
    slots::check(member)?;
    if count > 1 && table.columns.spec.log.offsets.is_some() {
        return Err(Error::permanent(
            Code::TOO_MANY_PARTITIONS,
            format!(
                "consumer `{name}` has its offset in a table of the application, which has room for one partition only"
            ),
        ));
    }
    // Where a new consumer begins is found out before anything is locked: it may have to wait for publishers.
    let begin = match start {
        Start::Earliest => None,
        Start::Latest => Some(seek::latest(outbox, table).await?),
    };
    let mut conn = outbox.begin().await?;
    members::lock_group(outbox, &mut conn, &table.columns).await?;
    let (floor, _) = floor(outbox, &mut conn, table).await?;
    let begin = begin.unwrap_or(floor);
    let stored: Vec<(i16, i64)> = {
        let sql = format!(
            "SELECT n, last_seq FROM {} WHERE outbox = $1 AND grp = $2 AND last_seq IS NOT NULL ORDER BY n",
            outbox.own("partition")
        );
        sqlx::query_as(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&table.columns.outbox)
            .bind(member.group.stored())
            .fetch_all(conn.get())
            .await
            .map_err(&failed)?
    };
    let offset = match &table.columns.spec.log.offsets {
        Some(offsets) => Some(foreign_offset(outbox, &mut conn, offsets, name, Some(begin)).await?),
        None => stored.iter().map(|(_, last_seq)| *last_seq).min(),
    };
    witness::check(outbox, &mut conn, table, name).await?;
    if !stored.is_empty() {
        refuse_other_instances(outbox, &mut conn, table, member, stored.len()).await?;
    }
    if stored.len() != usize::from(count) {
        let sql = format!(
            "WITH old AS (DELETE FROM {partition} WHERE outbox = $1 AND grp = $2 RETURNING epoch), \
             epoch AS (SELECT coalesce(max(epoch), 0) + 1 AS epoch FROM old) \
             SELECT epoch FROM epoch",
            partition = outbox.own("partition")
        );
        let epoch: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&table.columns.outbox)
            .bind(member.group.stored())
            .fetch_one(conn.get())
            .await
            .map_err(&failed)?;
        let sql = format!(
            "INSERT INTO {} (outbox, grp, n, epoch, last_seq, moved_at) \
             SELECT $1, $2, n, $4, $5, now() FROM generate_series(0, $3::int - 1) AS n",
            outbox.own("partition")
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&table.columns.outbox)
            .bind(member.group.stored())
            .bind(i32::from(count))
            .bind(epoch)
            .bind(offset.unwrap_or(begin))
            .execute(conn.get())
            .await
            .map_err(&failed)?;
    }
    let sql = format!(
        "WITH log AS (INSERT INTO {} (outbox) VALUES ($1) ON CONFLICT DO NOTHING) \
         INSERT INTO {} (outbox, name, partitions, streams) VALUES ($1, $2, $3, $4) \
         ON CONFLICT (outbox, name) DO UPDATE SET partitions = excluded.partitions, streams = excluded.streams",
        outbox.own("log"),
        outbox.own("consumer")
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(name)
        .bind(i16::try_from(count).unwrap_or(1))
        .bind(&member.streams)
        .execute(conn.get())
        .await
        .map_err(&failed)?;
    conn.commit().await
}

/// Refuses to work next to instances that read differently: another number of partitions, other streams or another
/// order. What one leaves out, the other would take for done.
pub(crate) async fn refuse_other_instances(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    member: &Member,
    partitions: usize,
) -> Result<()> {
    let failed = doing("looking for other relays");
    // Those whose lease has run out must not come back.
    let sql = format!(
        "WITH gone AS (DELETE FROM {relay} WHERE outbox = $1 AND grp = $2 AND expires_at <= now() AND id <> $4) \
         SELECT host, streams, ord FROM {relay} WHERE outbox = $1 AND grp = $2 AND expires_at > now() AND id <> $4 \
           AND (streams <> $5 OR ord <> $6 OR $3) LIMIT 1",
        relay = outbox.own("relay")
    );
    let live: Option<(String, Vec<String>, String)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(member.group.stored())
        .bind(partitions != usize::from(member.partitions))
        .bind(member.id)
        .bind(&member.streams)
        .bind(member.order.as_str())
        .fetch_optional(conn.get())
        .await
        .map_err(&failed)?;
    let Some((host, streams, order)) = live else { return Ok(()) };
    let described = |partitions: usize, streams: &[String], order: &str| {
        let streams =
            if streams.is_empty() { "all streams".into() } else { format!("streams {}", streams.join(", ")) };
        format!("{partitions} partitions, {streams}, order {order}")
    };
    Err(Error::permanent(
        Code::OVERLAP,
        format!(
            "consumer `{}` runs on {host} with {}, here with {}",
            member.consumer(),
            described(partitions, &streams, &order),
            described(usize::from(member.partitions), &member.streams, member.order.as_str())
        ),
    )
    .with_remedy("give all of its instances the same settings, stop the others first, or use another name"))
}

/// The offset in a table of the application's own, made if it is not there.
pub(super) async fn foreign_offset(
    outbox: &PgOutbox,
    conn: &mut Conn,
    offsets: &OffsetTable,
    consumer: &str,
    begin: Option<i64>,
) -> Result<i64> {
    let failed = doing("reading the consumer's offset");
    let name = qualified(offsets.schema.as_deref(), &offsets.table);
    let (key, last) = (quote(&offsets.consumer), quote(&offsets.last_seq));
    if let Some(begin) = begin {
        let (columns, values) = match &offsets.updated_at {
            Some(column) => (format!(", {}", quote(column)), ", now()"),
            None => (String::new(), ""),
        };
        let sql = format!(
            "INSERT INTO {name} ({key}, {last}{columns}) VALUES ($1, $2{values}) ON CONFLICT ({key}) DO NOTHING"
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(consumer)
            .bind(begin)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
    }
    let found = find_foreign_offset(outbox, conn, offsets, consumer).await?;
    found.ok_or_else(|| failed(sqlx::Error::RowNotFound))
}

/// The same, if it exists.
pub(super) async fn find_foreign_offset(
    outbox: &PgOutbox,
    conn: &mut Conn,
    offsets: &OffsetTable,
    consumer: &str,
) -> Result<Option<i64>> {
    let name = qualified(offsets.schema.as_deref(), &offsets.table);
    let (key, last) = (quote(&offsets.consumer), quote(&offsets.last_seq));
    sqlx::query_scalar(AssertSqlSafe(format!("SELECT {last}::bigint FROM {name} WHERE {key} = $1")))
        .persistent(!outbox.pooled)
        .bind(consumer)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("reading the consumer's offset"))
}

/// Where partitions of the member's stand, and on which server. If that is another than before, what the member
/// has under way is fenced: see `settle`.
pub(super) async fn positions(
    outbox: &PgOutbox,
    table: &LogTable,
    member: &Member,
    partitions: &[u16],
    before: Option<String>,
) -> Result<(Vec<Standing>, String)> {
    let failed = doing("reading offsets");
    let mut conn = outbox.begin().await?;
    let server = server(&mut conn).await?;
    if before.is_some_and(|before| before != server) {
        let sql = format!(
            "UPDATE {} SET epoch = epoch + 1 WHERE outbox = $1 AND grp = $2 AND owner = $3",
            outbox.own("partition")
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&table.columns.outbox)
            .bind(member.group.stored())
            .bind(member.id)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
    }
    let sql = format!(
        "SELECT n, epoch, coalesce(last_seq, 0) AS last_seq, \
           (SELECT ARRAY[replay, replay_after, replay_through] FROM {} WHERE outbox = $1 AND name = $5) AS replay \
         FROM {} WHERE outbox = $1 AND grp = $2 AND owner = $3 AND n = ANY($4::smallint[]) ORDER BY n FOR SHARE",
        outbox.own("consumer"),
        outbox.own("partition")
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(member.group.stored())
        .bind(member.id)
        .bind(numbers(partitions))
        .bind(member.consumer())
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    let foreign = match &table.columns.spec.log.offsets {
        Some(offsets) => Some(foreign_offset(outbox, &mut conn, offsets, member.consumer(), None).await?),
        None => None,
    };
    let mut smallest = foreign;
    for row in &rows {
        let offset: i64 = row.try_get("last_seq").map_err(&failed)?;
        smallest = smallest.or(Some(offset)).map(|seq| if foreign.is_some() { seq } else { seq.min(offset) });
    }
    // Of those that a person must decide about there may be any number: only where they count.
    let sql = format!(
        "SELECT {}, key, seq, state = 'waiting' OR $3 FROM {} WHERE outbox = $1 AND consumer = $2 \
         AND (state = 'waiting' OR $3 OR seq > $4)",
        slots::partition_of("slot", member.partitions),
        outbox.own("parked")
    );
    let parked: Vec<(i16, String, i64, bool)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(member.consumer())
        .bind(member.block_on_dead)
        .bind(smallest.unwrap_or(0))
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    // Read last, so that it is no older than the offsets.
    let (floor, _) = floor(outbox, &mut conn, table).await?;
    conn.commit().await?;
    let mut waiting: HashMap<i16, Vec<String>> = HashMap::new();
    let mut places: HashMap<i16, Vec<i64>> = HashMap::new();
    for (partition, key, seq, waits) in parked {
        places.entry(partition).or_default().push(seq);
        if waits {
            waiting.entry(partition).or_default().push(key);
        }
    }
    let mut standings = Vec::with_capacity(rows.len());
    for row in rows {
        let n: i16 = row.try_get("n").map_err(&failed)?;
        let offset = foreign.map_or_else(|| row.try_get("last_seq").map_err(&failed), Ok)?;
        if offset < floor {
            return Err(behind_retention(member.consumer(), offset, floor));
        }
        standings.push(Standing {
            partition: u16::try_from(n).unwrap_or(0),
            epoch: row.try_get("epoch").map_err(&failed)?,
            offset,
            waiting: waiting.remove(&n).unwrap_or_default(),
            parked: places.remove(&n).unwrap_or_default().into_iter().filter(|seq| *seq > offset).collect(),
            replay: replay(row.try_get("replay").map_err(&failed)?),
        });
    }
    Ok((standings, server))
}

/// The replay that a consumer was last asked for, if it was.
fn replay(columns: Option<Vec<Option<i64>>>) -> Option<Replay> {
    match columns?[..] {
        [Some(id), Some(after), Some(through)] => Some(Replay { id, after, through }),
        _ => None,
    }
}

/// What operators have said, and on which server.
pub(super) async fn consumer_state(
    outbox: &PgOutbox,
    table: &LogTable,
    member: &Member,
) -> Result<(ConsumerState, String)> {
    let failed = doing("checking the state of the consumer");
    let mut conn = outbox.acquire().await?;
    let sql = format!(
        "SELECT c.paused, c.revision, coalesce(l.floor, 0) AS floor, {SERVER} AS server, \
           (SELECT min(last_seq) FROM {} WHERE outbox = $1 AND grp = $3 AND owner = $4) AS last_seq \
         FROM {} c LEFT JOIN {} l ON l.outbox = c.outbox WHERE c.outbox = $1 AND c.name = $2",
        outbox.own("partition"),
        outbox.own("consumer"),
        outbox.own("log"),
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(member.consumer())
        .bind(member.group.stored())
        .bind(member.id)
        .fetch_optional(conn.get())
        .await
        .map_err(&failed)?;
    let foreign = match &table.columns.spec.log.offsets {
        Some(offsets) if row.is_some() => {
            Some(foreign_offset(outbox, &mut conn, offsets, member.consumer(), None).await?)
        }
        _ => None,
    };
    conn.commit().await?;
    let Some(row) = row else {
        return Err(Error::permanent(
            Code::UNKNOWN_CONSUMER,
            format!("consumer `{}` was removed while it ran", member.consumer()),
        ));
    };
    let floor: i64 = row.try_get("floor").map_err(&failed)?;
    let stored: Option<i64> = row.try_get("last_seq").map_err(&failed)?;
    if let Some(offset) = foreign.or(stored).filter(|offset| *offset < floor) {
        return Err(behind_retention(member.consumer(), offset, floor));
    }
    let by_hand = foreign.filter(|offset| stored.is_some_and(|stored| stored != *offset));
    let watch = ConsumerState {
        paused: row.try_get("paused").map_err(&failed)?,
        revision: match by_hand {
            Some(offset) => Revision::SetByHand(offset),
            None => Revision::At(row.try_get("revision").map_err(&failed)?),
        },
    };
    Ok((watch, row.try_get("server").map_err(&failed)?))
}

/// What is left for the whole consumer.
pub(super) async fn backlog(outbox: &PgOutbox, table: &LogTable, member: &Member) -> Result<Backlog> {
    let c = &table.columns;
    let failed = doing("counting what is left");
    let mut conn = outbox.acquire().await?;
    let foreign = match &c.spec.log.offsets {
        Some(offsets) => Some(foreign_offset(outbox, &mut conn, offsets, member.consumer(), None).await?),
        None => None,
    };
    let parked = outbox.own("parked");
    let sql = format!(
        "WITH offsets AS (SELECT n, coalesce($4::bigint, last_seq) AS last_seq FROM {partition} WHERE outbox = $1 AND grp = $2), \
         ahead AS (SELECT FROM {table} t JOIN offsets o ON o.n = {part} WHERE {seq} > (SELECT min(last_seq) FROM offsets) \
           AND {seq} > o.last_seq AND (cardinality($3::text[]) = 0 OR {stream} = ANY($3)) \
           AND NOT EXISTS (SELECT FROM {parked} p WHERE p.outbox = $1 AND p.consumer = $5 AND p.seq = {seq}) LIMIT {BACKLOG_CAP}), \
         waiting AS (SELECT EXISTS (SELECT FROM {parked} d WHERE $6 AND d.outbox = p.outbox AND d.consumer = p.consumer \
             AND d.key = p.key AND d.state <> 'waiting' AND d.seq < p.seq) AS blocked \
           FROM {parked} p WHERE p.outbox = $1 AND p.consumer = $5 AND p.state = 'waiting') \
         SELECT (SELECT count(*) FROM ahead) + (SELECT count(*) FROM waiting) AS unfinished, \
           (SELECT count(*) FROM waiting WHERE blocked) AS blocked",
        partition = outbox.own("partition"),
        table = c.table,
        part = table.partition(member.partitions),
        seq = table.seq(),
        stream = c.field(&c.spec.stream),
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.group.stored())
        .bind(&member.streams)
        .bind(foreign)
        .bind(member.consumer())
        .bind(member.block_on_dead)
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    conn.commit().await?;
    let count = |name: &str| row.try_get::<i64, _>(name).map(i64::unsigned_abs).map_err(&failed);
    Ok(Backlog { unfinished: count("unfinished")?, blocked: count("blocked")?, ..Backlog::default() })
}
