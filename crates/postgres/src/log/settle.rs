//! Settling: offsets and parked events change together, or not at all.
//!
//! The statement that moves an offset is the fence: it matches only while the partition is this relay's, under
//! the epoch it was taken with, and the stored offset is what the relay thinks it is. A takeover, a seek and an
//! operator's UPDATE each change one of these in the same row, so they and the settle wait for each other.
//!
//! It also matches only on the server from which the partition was taken, and only until that server restarts. After a
//! failover to a standby that lacked the last events, or a crash that lost asynchronous commits, the sequence draws
//! their values again: an offset that moved past these values would lose the events that have them now.

use std::collections::BTreeSet;

use airtight_core::{
    Error, Result,
    group::Member,
    log::{Changes, Fate, Move, Park, behind_retention},
    table::quote,
};
use sqlx::AssertSqlSafe;

use super::{LogTable, consumers::SERVER, numbers};
use crate::{
    PgOutbox,
    columns::{EventColumns, qualified},
    error::doing,
    queue::{LONGEST_WAIT, storable},
    session::Session,
    slots,
};

/// Applies changes; returns the partitions that were refused. In a transaction of the caller's, unless only
/// offsets move.
pub(super) async fn apply(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    table: &LogTable,
    member: &Member,
    server: Option<String>,
    changes: &Changes,
) -> Result<Vec<u16>> {
    let accepted = move_offsets(outbox, conn, table, member, server, &changes.moves).await?;
    let is_accepted = |park: &&Park| accepted.contains(&park.partition);
    let mut keys: BTreeSet<String> = BTreeSet::new();

    let park: Vec<&Park> = changes.park.iter().filter(is_accepted).collect();
    if !park.is_empty() {
        keys.extend(copy(outbox, conn, table, member, &park).await?);
    }
    let parked: Vec<&Park> = changes.parked.iter().filter(is_accepted).collect();
    if !parked.is_empty() {
        keys.extend(update(outbox, conn, table, member, &parked).await?);
    }
    if member.by_key() && !keys.is_empty() {
        let keys: Vec<String> = keys.into_iter().collect();
        free(outbox, conn, table, member.consumer(), &keys, member.block_on_dead).await?;
    }
    let refused = changes.moves.iter().map(|change| change.partition).filter(|n| !accepted.contains(n));
    Ok(refused.collect())
}

async fn move_offsets(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    table: &LogTable,
    member: &Member,
    server: Option<String>,
    moves: &[Move],
) -> Result<Vec<u16>> {
    let failed = doing("moving offsets");
    let foreign = table.columns.spec.log.offsets.as_ref();
    // Where the offset is in a table of the application's, that one is compared below.
    let same = if foreign.is_some() { "" } else { "AND p.last_seq IN (v.here, v.there)" };
    let sql = format!(
        "UPDATE {} p SET last_seq = v.there, moved_at = now() \
         FROM unnest($3::smallint[], $4::bigint[], $5::bigint[], $6::bigint[]) AS v(n, epoch, here, there) \
         WHERE p.outbox = $1 AND p.grp = $2 AND p.n = v.n AND p.owner = $7 AND p.epoch = v.epoch {same} \
           AND $8 = {SERVER} RETURNING p.n",
        outbox.own("partition")
    );
    let column = |value: fn(&Move) -> i64| moves.iter().map(value).collect::<Vec<i64>>();
    let partitions: Vec<u16> = moves.iter().map(|change| change.partition).collect();
    let accepted: Vec<i16> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.columns.outbox)
        .bind(member.group.stored())
        .bind(numbers(&partitions))
        .bind(column(|change| change.epoch))
        .bind(column(|change| change.from))
        .bind(column(|change| change.to))
        .bind(member.id)
        .bind(server.unwrap_or_default())
        .fetch_all(&mut *conn)
        .await
        .map_err(&failed)?;
    let mut accepted: Vec<u16> = accepted.into_iter().filter_map(|n| u16::try_from(n).ok()).collect();
    if let (Some(offsets), Some(change)) = (foreign, moves.first().filter(|_| !accepted.is_empty())) {
        let touch = offsets.updated_at.as_ref().map(|column| format!(", {} = now()", quote(column)));
        let sql = format!(
            "UPDATE {table} SET {last} = $2{touch} WHERE {consumer} = $1 AND {last} IN ($2, $3)",
            table = qualified(offsets.schema.as_deref(), &offsets.table),
            last = quote(&offsets.last_seq),
            consumer = quote(&offsets.consumer),
            touch = touch.unwrap_or_default(),
        );
        let moved = sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(member.consumer())
            .bind(change.to)
            .bind(change.from)
            .execute(conn)
            .await
            .map_err(&failed)?;
        if moved.rows_affected() == 0 {
            // An operator has changed it, and that wins.
            accepted.clear();
        }
    }
    Ok(accepted)
}

/// Fates as columns.
pub(crate) struct Fates {
    pub(crate) seqs: Vec<i64>,
    pub(crate) states: Vec<&'static str>,
    pub(crate) attempts: Vec<i32>,
    /// Seconds until it is due; none for one that is not.
    pub(crate) waits: Vec<Option<f64>>,
    pub(crate) codes: Vec<Option<String>>,
    pub(crate) messages: Vec<Option<String>>,
}

impl Fates {
    pub(crate) fn new<'a>(parks: impl Iterator<Item = &'a Park>) -> Self {
        let mut fates = Self {
            seqs: Vec::new(),
            states: Vec::new(),
            attempts: Vec::new(),
            waits: Vec::new(),
            codes: Vec::new(),
            messages: Vec::new(),
        };
        for park in parks {
            let (state, wait, error): (_, _, Option<&Error>) = match &park.fate {
                // A delivered one is not written.
                Fate::Delivered | Fate::Held => ("waiting", None, None),
                Fate::Retry { after, error } => {
                    ("waiting", Some(after.as_secs_f64().min(LONGEST_WAIT)), Some(error))
                }
                Fate::Dead { error } => ("dead", None, Some(error)),
                Fate::Unknown { error } => ("unknown", None, Some(error)),
            };
            fates.seqs.push(park.seq);
            fates.states.push(state);
            fates.attempts.push(i32::try_from(park.attempts).unwrap_or(i32::MAX));
            fates.waits.push(wait);
            fates.codes.push(error.map(|error| storable(error.code(), 100)));
            fates.messages.push(error.map(|error| storable(&error.to_string(), 4_000)));
        }
        fates
    }
}

/// Copies events from the log to the parked ones. Returns their keys.
async fn copy(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    table: &LogTable,
    member: &Member,
    park: &[&Park],
) -> Result<Vec<String>> {
    let c = &table.columns;
    let failed = doing("parking events");
    let sql = format!(
        "INSERT INTO {parked} (outbox, consumer, seq, slot, key, id, stream, event_type, aggregate_type, aggregate_id, \
           op, payload, payload_bytes, headers, occurred_at, schema_version, max_attempts, extra, state, attempts, \
           due_at, error_code, error_message) \
         SELECT $1, $2, {seq}::bigint, {slot}, coalesce({key}, ''), e_id, e_stream, e_type, e_aggregate_type, \
           e_aggregate_id, e_op, e_payload, e_payload_bytes, e_headers, e_occurred_at, e_schema_version, e_max_attempts, \
           e_extra, v.state, v.attempts, now() + make_interval(secs => v.wait), v.code, v.message \
         FROM unnest($3::bigint[], $4::text[], $5::int[], $6::float8[], $7::text[], $8::text[]) \
           AS v(place, state, attempts, wait, code, message) \
         JOIN {log} t ON {seq} = v.place CROSS JOIN LATERAL (SELECT {events}) e \
         ON CONFLICT (outbox, consumer, seq) DO UPDATE SET state = excluded.state, attempts = excluded.attempts, \
           due_at = excluded.due_at, error_code = excluded.error_code, error_message = excluded.error_message \
           WHERE excluded.error_code IS NOT NULL",
        parked = outbox.own("parked"),
        seq = table.seq(),
        slot = table.slot(),
        key = c.key(),
        log = c.table,
        // What was rejected for its size is kept all the same: a person decides.
        events = c.event_columns("2147483647"),
    );
    let fates = Fates::new(park.iter().copied());
    sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(&fates.seqs)
        .bind(&fates.states)
        .bind(&fates.attempts)
        .bind(&fates.waits)
        .bind(&fates.codes)
        .bind(&fates.messages)
        .execute(&mut *conn)
        .await
        .map_err(&failed)?;
    // One that is not there was removed by retention before it was delivered: it must not vanish in silence.
    let sql = format!(
        "SELECT p.seq, p.key FROM {} p WHERE p.outbox = $1 AND p.consumer = $2 AND p.seq = ANY($3::bigint[])",
        outbox.own("parked")
    );
    let found: Vec<(i64, String)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.consumer())
        .bind(&fates.seqs)
        .fetch_all(conn)
        .await
        .map_err(&failed)?;
    if let Some(gone) = fates.seqs.iter().find(|seq| !found.iter().any(|(there, _)| there == *seq)) {
        return Err(behind_retention(member.consumer(), gone - 1, *gone));
    }
    Ok(found.into_iter().map(|(_, key)| key).collect())
}

/// Writes down what became of parked events. Returns their keys.
pub(crate) async fn update(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    table: &EventColumns,
    member: &Member,
    parked: &[&Park],
) -> Result<Vec<String>> {
    let failed = doing("settling parked events");
    let name = outbox.own("parked");
    let (delivered, others): (Vec<&Park>, Vec<&Park>) =
        parked.iter().partition(|park| matches!(park.fate, Fate::Delivered));
    let mut keys: Vec<String> = Vec::new();
    if !delivered.is_empty() {
        let seqs: Vec<i64> = delivered.iter().map(|park| park.seq).collect();
        let sql = format!(
            "DELETE FROM {name} WHERE outbox = $1 AND consumer = $2 AND seq = ANY($3::bigint[]) RETURNING key"
        );
        let gone: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&table.outbox)
            .bind(member.consumer())
            .bind(seqs)
            .fetch_all(&mut *conn)
            .await
            .map_err(&failed)?;
        keys.extend(gone);
    }
    if !others.is_empty() {
        let fates = Fates::new(others.into_iter());
        let sql = format!(
            "UPDATE {name} p SET state = v.state, attempts = v.attempts, due_at = now() + make_interval(secs => v.wait), \
               error_code = v.code, error_message = v.message \
             FROM unnest($3::bigint[], $4::text[], $5::int[], $6::float8[], $7::text[], $8::text[]) \
               AS v(place, state, attempts, wait, code, message) \
             WHERE p.outbox = $1 AND p.consumer = $2 AND p.seq = v.place RETURNING p.key"
        );
        let changed: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&table.outbox)
            .bind(member.consumer())
            .bind(&fates.seqs)
            .bind(&fates.states)
            .bind(&fates.attempts)
            .bind(&fates.waits)
            .bind(&fates.codes)
            .bind(&fates.messages)
            .fetch_all(conn)
            .await
            .map_err(&failed)?;
        keys.extend(changed);
    }
    Ok(keys)
}

/// Makes the first waiting event of each key due, if it is not: nothing is before it any more. With
/// `block_on_dead` one that a person must decide about counts as being before it.
pub(crate) async fn free(
    outbox: &PgOutbox,
    conn: &mut Session<'_>,
    table: &EventColumns,
    consumer: &str,
    keys: &[String],
    block_on_dead: bool,
) -> Result<u64> {
    let sql = format!(
        "UPDATE {parked} p SET due_at = now() \
         FROM unnest($3::text[]) AS k(key) CROSS JOIN LATERAL (SELECT h.seq, h.state, h.due_at FROM {parked} h \
           WHERE h.outbox = $1 AND h.consumer = $2 AND h.key = k.key AND (h.state = 'waiting' OR $4) \
           ORDER BY h.seq LIMIT 1) AS head \
         WHERE p.outbox = $1 AND p.consumer = $2 AND p.seq = head.seq AND head.state = 'waiting' AND head.due_at IS NULL",
        parked = outbox.own("parked"),
    );
    let freed = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(consumer)
        .bind(keys)
        .bind(block_on_dead)
        .execute(conn)
        .await
        .map_err(doing("freeing held events"))?;
    Ok(freed.rows_affected())
}

/// The same for all keys of some partitions.
pub(crate) async fn unhold(
    outbox: &PgOutbox,
    table: &EventColumns,
    member: &Member,
    partitions: &[u16],
) -> Result<u64> {
    let mut conn = outbox.begin().await?;
    let sql = format!(
        "SELECT DISTINCT key FROM {} WHERE outbox = $1 AND consumer = $2 AND state = 'waiting' AND due_at IS NULL \
         AND {} = ANY($3::smallint[])",
        outbox.own("parked"),
        slots::partition_of("slot", member.partitions)
    );
    let keys: Vec<String> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(member.consumer())
        .bind(numbers(partitions))
        .fetch_all(conn.get())
        .await
        .map_err(doing("looking for held events"))?;
    let freed = if keys.is_empty() {
        0
    } else {
        free(outbox, conn.get(), table, member.consumer(), &keys, member.block_on_dead).await?
    };
    conn.commit().await?;
    Ok(freed)
}
