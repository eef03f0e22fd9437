//! Operations on parked events: list, show, retry, discard.

use airtight_core::{
    Error, Result,
    admin::{AWAY_SHOWN, AwayStatus, BlockedKey, Detail},
    event::MAX_PAYLOAD_BYTES,
    log::{Parked, ParkedFilter},
};
use sqlx::{AssertSqlSafe, Postgres, QueryBuilder, Row, postgres::PgArguments, query::QueryAs};

use super::settle;
use crate::{
    PgOutbox,
    admin::{away_row, list_row},
    columns::EventColumns,
    decode,
    error::doing,
    outbox::Conn,
};

/// A parked event as a list shows it; a row `p`.
const LIST: &str = "p.consumer AS l_consumer, p.seq AS l_seq, coalesce(p.id, '') AS l_id, coalesce(p.stream, '') AS l_stream, \
     coalesce(p.event_type, '') AS l_type, coalesce(p.aggregate_type, '') AS l_aggregate_type, \
     coalesce(p.aggregate_id, '') AS l_aggregate_id, CASE p.state WHEN 'waiting' THEN 'pending' ELSE p.state END AS l_state, \
     p.attempts AS l_attempts, 0 AS l_lost, \
     CASE WHEN p.due_at IS NOT NULL THEN least(greatest(p.due_at, timestamptz '0001-01-01 00:00:00+00'), \
       timestamptz '9999-12-31 23:59:59+00') END AS l_retry, p.state = 'waiting' AND p.due_at IS NULL AS l_held, \
     p.error_code AS l_code, p.error_message AS l_message, p.parked_at AS l_created";

/// A parked event as it is decoded.
pub(super) const EVENT: &str = "p.id AS e_id, p.seq AS e_seq, p.stream AS e_stream, p.event_type AS e_type, \
     p.aggregate_type AS e_aggregate_type, p.aggregate_id AS e_aggregate_id, p.op AS e_op, p.payload AS e_payload, \
     p.payload_bytes AS e_payload_bytes, 0::bigint AS e_size, p.headers AS e_headers, p.occurred_at AS e_occurred_at, \
     p.schema_version AS e_schema_version, p.max_attempts AS e_max_attempts, p.extra AS e_extra";

pub(super) async fn list(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    filter: &ParkedFilter,
) -> Result<Vec<Parked>> {
    let mut query = QueryBuilder::<Postgres>::new(format!(
        "SELECT {LIST} FROM {} p WHERE p.outbox = ",
        outbox.own("parked")
    ));
    query.push_bind(&table.outbox);
    push_filter(&mut query, filter, filter.dead_only);
    query.push(" ORDER BY p.seq, p.consumer LIMIT ");
    query.push_bind(i64::try_from(if filter.limit == 0 { 50 } else { filter.limit }).unwrap_or(i64::MAX));
    let rows = query
        .build()
        .persistent(!outbox.pooled)
        .fetch_all(conn.get())
        .await
        .map_err(doing("listing parked events"))?;
    rows.iter()
        .map(|row| Ok(Parked { consumer: decode::get(row, "l_consumer")?, row: list_row(row)? }))
        .collect()
}

pub(super) async fn show(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    consumer: &str,
    seq: i64,
) -> Result<Option<Detail>> {
    let sql = format!(
        "SELECT {LIST}, {EVENT} FROM {} p WHERE p.outbox = $1 AND p.consumer = $2 AND p.seq = $3",
        outbox.own("parked")
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(consumer)
        .bind(seq)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("reading the parked event"))?;
    row.map(|row| {
        let event = decode::event(&row, &table.spec, MAX_PAYLOAD_BYTES).map_err(|bad| bad.error.to_string());
        Ok(Detail { row: list_row(&row)?, event })
    })
    .transpose()
}

/// What to do with dead ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    Retry,
    Discard,
}

/// Acts on dead events of the filter, and on unknown ones that it names. What waits by itself is made due at
/// once when it is named. Returns how many.
pub(super) async fn act(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    filter: &ParkedFilter,
    act: Act,
) -> Result<u64> {
    let failed = doing("changing parked events");
    let parked = outbox.own("parked");
    let statement = match act {
        Act::Retry => {
            format!("UPDATE {parked} p SET state = 'waiting', attempts = 0, due_at = NULL WHERE p.outbox = ")
        }
        Act::Discard => format!("DELETE FROM {parked} p WHERE p.outbox = "),
    };
    let mut query = QueryBuilder::<Postgres>::new(statement);
    query.push_bind(&table.outbox);
    push_filter(&mut query, filter, false);
    query.push(if filter.seqs.is_empty() { " AND p.state = 'dead'" } else { "" });
    query.push(" RETURNING p.consumer, p.key");
    let touched: QueryAs<'_, Postgres, (String, String), PgArguments> = query.build_query_as();
    let touched = touched.persistent(!outbox.pooled).fetch_all(conn.get()).await.map_err(&failed)?;
    let mut consumers: Vec<&str> = touched.iter().map(|(consumer, _)| consumer.as_str()).collect();
    consumers.sort_unstable();
    consumers.dedup();
    for consumer in consumers {
        let mut keys: Vec<String> =
            touched.iter().filter(|(whose, _)| whose == consumer).map(|(_, key)| key.clone()).collect();
        keys.sort_unstable();
        keys.dedup();
        // Whether it blocks on dead ones only its relays know: with them, the next heartbeat frees more.
        settle::free(outbox, conn.get(), table, consumer, &keys, true).await?;
        let sql = format!(
            "UPDATE {} SET revision = revision + 1 WHERE outbox = $1 AND name = $2",
            outbox.own("consumer")
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&table.outbox)
            .bind(consumer)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
    }
    Ok(touched.len() as u64)
}

fn push_filter(query: &mut QueryBuilder<Postgres>, filter: &ParkedFilter, dead_only: bool) {
    let texts = [
        (&filter.consumer, "p.consumer"),
        (&filter.stream, "p.stream"),
        (&filter.event_type, "p.event_type"),
        (&filter.aggregate_id, "p.aggregate_id"),
        (&filter.error_code, "p.error_code"),
    ];
    for (value, column) in texts {
        if let Some(value) = value {
            query.push(format!(" AND {column} = ")).push_bind(value.clone());
        }
    }
    if !filter.seqs.is_empty() {
        query.push(" AND p.seq = ANY(").push_bind(filter.seqs.clone()).push(")");
    }
    if let Some(after) = filter.after_seq {
        query.push(" AND p.seq > ").push_bind(after);
    }
    if dead_only {
        query.push(" AND p.state <> 'waiting'");
    }
}

/// What parked events wait for that are not to blame.
pub(crate) async fn away(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
) -> Result<Vec<AwayStatus>> {
    let sql = format!(
        "SELECT p.consumer, p.error_code AS code, coalesce(p.error_message, '') AS message, count(*) AS events \
         FROM {} p WHERE p.outbox = $1 AND p.state = 'waiting' AND p.error_code LIKE $2 \
         GROUP BY 1, 2, 3 ORDER BY events DESC, message LIMIT {AWAY_SHOWN}",
        outbox.own("parked")
    );
    let query = sqlx::query(AssertSqlSafe(sql)).persistent(!outbox.pooled);
    let rows = query
        .bind(&table.outbox)
        .bind(Error::AWAY_CODES)
        .fetch_all(conn.get())
        .await
        .map_err(doing("counting what waits for destinations"))?;
    rows.iter().map(away_row).collect()
}

/// Keys with events that wait.
pub(super) async fn blocked(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &EventColumns,
    limit: usize,
) -> Result<Vec<BlockedKey>> {
    let failed = doing("listing blocked keys");
    let sql = format!(
        "SELECT DISTINCT ON (p.consumer, p.key) p.key, p.id, CASE p.state WHEN 'waiting' THEN 'pending' ELSE p.state END AS state, \
           (SELECT count(*) FROM {parked} h WHERE h.outbox = p.outbox AND h.consumer = p.consumer AND h.key = p.key \
              AND h.state = 'waiting' AND h.due_at IS NULL) AS held \
         FROM {parked} p WHERE p.outbox = $1 AND EXISTS (SELECT FROM {parked} h WHERE h.outbox = p.outbox \
           AND h.consumer = p.consumer AND h.key = p.key AND h.state = 'waiting' AND h.due_at IS NULL AND h.seq > p.seq) \
         ORDER BY p.consumer, p.key, p.seq LIMIT $2",
        parked = outbox.own("parked")
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&table.outbox)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    rows.iter()
        .map(|row| {
            Ok(BlockedKey {
                aggregate_id: row.try_get("key").map_err(&failed)?,
                behind_id: row.try_get::<Option<String>, _>("id").map_err(&failed)?.unwrap_or_default(),
                behind_state: row.try_get("state").map_err(&failed)?,
                held: row.try_get::<i64, _>("held").map_err(&failed)?.unsigned_abs(),
            })
        })
        .collect()
}
