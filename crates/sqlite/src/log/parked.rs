//! Events that wait, and the rule which of a key is due.
//!
//! Of each key, the first event that waits has a time at which it is due, and those behind it have none: they
//! are held. Where a dead event blocks its key, nothing behind it has a time. [`Rule::restore`] makes that true
//! for the keys that a transaction touched, in that transaction.

use std::{sync::LazyLock, time::Duration};

use airtight_core::{
    Result,
    group::Member,
    log::{Due, LogRow, ParkedRow, ReadRequest},
    table::{PayloadKind, TableSpec},
};
use futures::TryStreamExt;
use serde_json::json;
use sqlx::{AssertSqlSafe, Row, SqliteConnection, sqlite::SqliteRow};

use super::read::{Taken, log_row, max_payload};
use crate::{
    decode,
    error::db,
    outbox::SqliteOutbox,
    sql::{NOW, Sql},
};

/// The parked events as a table that can be decoded. What the log's own spec has beyond that is one JSON object.
pub(super) static PARKED: LazyLock<Sql> = LazyLock::new(|| {
    Sql::new(TableSpec {
        payload_kind: PayloadKind::JsonText,
        extra: vec![(EXTRA.to_owned(), EXTRA.to_owned())],
        ..TableSpec::canonical_log(None, "airtight_parked")
    })
});

const EXTRA: &str = "extra";

/// Puts the extra columns back in their places.
pub(super) fn unpack(event: &mut airtight_core::Event) {
    let packed = event.extra.remove(EXTRA);
    let packed = packed.as_ref().and_then(|value| value.as_str());
    event.extra = packed.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
}

/// An earlier event of the key of `alias` in one of these states.
fn earlier(alias: &str, states: &str) -> String {
    format!(
        "EXISTS (SELECT 1 FROM airtight_parked AS e WHERE e.outbox = {alias}.outbox AND e.consumer = {alias}.consumer \
         AND e.aggregate_id = {alias}.aggregate_id AND e.seq < {alias}.seq AND e.state IN ({states}))"
    )
}

/// What must not be before an event of `alias` that is to be due.
fn behind(alias: &str, block_on_dead: bool) -> String {
    // Any other than `pending` is dead or unknown.
    earlier(alias, if block_on_dead { "'pending', 'dead', 'unknown'" } else { "'pending'" })
}

/// Which events [`Rule::restore`] looks at.
pub(super) enum Scope<'a> {
    /// Those of these keys, in hex: text need not be UTF-8.
    Keys(&'a [String]),
    /// Those of these partitions.
    Partitions(&'a [u16]),
    /// All of the consumer's.
    All,
}

/// The rule for one consumer whose events of a key wait for one another.
pub(super) struct Rule<'a> {
    pub(super) sql: &'a Sql,
    pub(super) consumer: &'a str,
    pub(super) block_on_dead: bool,
}

impl Rule<'_> {
    /// Makes the rule true again; returns how many events became due.
    pub(super) async fn restore(&self, conn: &mut SqliteConnection, scope: Scope<'_>) -> Result<u64> {
        let (within, bind) = match scope {
            Scope::Keys([]) | Scope::Partitions([]) => return Ok(0),
            Scope::Keys(keys) => (OF_KEYS, json!(keys).to_string()),
            Scope::Partitions(partitions) => {
                (" AND p.n IN (SELECT value FROM json_each(?2))", json!(partitions).to_string())
            }
            Scope::All => (" AND ?2 IS NOT NULL", String::new()),
        };
        let mut freed = 0;
        for statement in rule_statements(self.sql, within, self.block_on_dead) {
            let done = sqlx::query(AssertSqlSafe(statement))
                .bind(self.consumer)
                .bind(&bind)
                .execute(&mut *conn)
                .await
                .map_err(db)?;
            freed = done.rows_affected();
        }
        Ok(freed)
    }
}

/// Events of the keys in `?2`, in hex.
pub(crate) const OF_KEYS: &str =
    " AND p.aggregate_id IN (SELECT CAST(unhex(value) AS TEXT) FROM json_each(?2))";

/// Holds what must be held, then frees what may go, of the consumer `?1`.
pub(crate) fn rule_statements(sql: &Sql, within: &str, block_on_dead: bool) -> [String; 2] {
    let behind = behind("p", block_on_dead);
    let all = format!("p.outbox = {} AND p.consumer = ?1 AND p.state = 'pending'{within}", sql.name());
    // The plus keeps the planner from the index of due times, and with it from all that wait.
    [
        format!(
            "UPDATE airtight_parked AS p SET next_retry_at = NULL WHERE {all} AND +p.next_retry_at IS NOT NULL AND {behind}"
        ),
        format!(
            "UPDATE airtight_parked AS p SET next_retry_at = {NOW} WHERE {all} AND +p.next_retry_at IS NULL AND NOT {behind}"
        ),
    ]
}

pub(super) async fn unhold(outbox: &SqliteOutbox, member: &Member, partitions: &[u16]) -> Result<u64> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.begin().await?;
    let rule = Rule { sql, consumer: member.consumer(), block_on_dead: member.block_on_dead };
    let freed = rule.restore(tx.conn(), Scope::Partitions(partitions)).await?;
    tx.commit().await?;
    Ok(freed)
}

pub(super) async fn due(outbox: &SqliteOutbox, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.snapshot().await?;
    let conn = &mut *tx;
    let consumer = request.member.consumer();
    let (numbers, except) = (json!(request.partitions).to_string(), json!(except).to_string());
    let mut can = format!(
        "h.outbox = {} AND h.consumer = ?1 AND h.state = 'pending' AND h.n IN (SELECT value FROM json_each(?2)) \
         AND h.seq NOT IN (SELECT value FROM json_each(?3))",
        sql.name()
    );
    if request.member.by_key() {
        can.push_str(&format!(" AND NOT {}", behind("h", request.member.block_on_dead)));
    }
    // Without an order nothing is held: what an earlier order held back is due.
    let when = if request.member.by_key() { "h.next_retry_at" } else { "COALESCE(h.next_retry_at, '')" };
    let heads = format!(
        "SELECT h.seq FROM airtight_parked AS h WHERE {can} AND {when} <= {NOW} ORDER BY h.seq LIMIT ?4"
    );
    let heads: Vec<i64> = sqlx::query_scalar(AssertSqlSafe(heads))
        .bind(consumer)
        .bind(&numbers)
        .bind(&except)
        .bind(i64::try_from(request.events).unwrap_or(i64::MAX))
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    if heads.is_empty() {
        let next = format!(
            "SELECT (julianday(min(h.next_retry_at)) - julianday('now')) * 86400.0 FROM airtight_parked AS h WHERE {can}"
        );
        let next: Option<f64> = sqlx::query_scalar(AssertSqlSafe(next))
            .bind(consumer)
            .bind(&numbers)
            .bind(&except)
            .fetch_one(&mut *conn)
            .await
            .map_err(db)?;
        // Not at once, however the clocks round: this is asked again then.
        let next_in =
            next.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.001)).unwrap_or(Duration::MAX));
        return Ok(Due { rows: Vec::new(), next_in });
    }
    let which = if request.member.by_key() {
        let blocked = earlier("o", "'dead', 'unknown'");
        let unblocked =
            if request.member.block_on_dead { format!(" AND NOT {blocked}") } else { String::new() };
        format!(
            "o.aggregate_id IN (SELECT h.aggregate_id FROM json_each(?4) AS j CROSS JOIN airtight_parked AS h \
             WHERE h.outbox = {} AND h.consumer = ?1 AND h.seq = j.value){unblocked}",
            sql.name()
        )
    } else {
        "o.seq IN (SELECT value FROM json_each(?4))".into()
    };
    // The plus makes it sort the few events of these keys rather than go through all that are parked.
    let select = format!(
        "SELECT {}, o.attempts AS parked_attempts FROM airtight_parked AS o WHERE o.outbox = {} AND o.consumer = ?1 \
         AND o.state = 'pending' AND o.seq NOT IN (SELECT value FROM json_each(?3)) AND {which} ORDER BY +o.seq LIMIT ?5",
        decode::columns(&PARKED),
        sql.name()
    );
    let mut found = sqlx::query(AssertSqlSafe(select))
        .bind(consumer)
        .bind(max_payload(request))
        .bind(&except)
        .bind(json!(heads).to_string())
        .bind(i64::try_from(request.events).unwrap_or(i64::MAX))
        .fetch(&mut *conn);
    let mut taken = Taken::new(request);
    let mut rows = Vec::new();
    while let Some(row) = found.try_next().await.map_err(db)? {
        let attempts = row.try_get::<u32, _>("parked_attempts").map_err(db)?;
        let row = parked_row(&row, request);
        if !taken.fits(&row) {
            break;
        }
        rows.push(ParkedRow { row, attempts });
    }
    Ok(Due { rows, next_in: None })
}

fn parked_row(row: &SqliteRow, request: &ReadRequest<'_>) -> LogRow {
    let mut row = log_row(row, &PARKED, request);
    if let Ok(event) = &mut row.event {
        unpack(event);
    }
    row
}
