//! Partitions of the log's table, created before they are needed.
//!
//! A table partition holds about a day's events, so that retention can drop it whole. It is created as a separate table
//! and then attached, which does not wait for writers. The DEFAULT partition takes the events that arrive before their
//! partition exists. Every statement here has a `lock_timeout` and is retried: DDL that waits for an open writer would make
//! every later statement wait as well.

use std::time::Duration;

use airtight_core::{Code, Error, Result, admin::Finding, log::open_publishers, table::literal};
use sqlx::{AssertSqlSafe, Row};

use super::{LogTable, consumers, publishers};
use crate::{PgOutbox, error::doing, outbox::Conn};

/// How long DDL waits for a lock before it lets others go first: publishers stand behind it for so long.
pub(super) const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '100ms'";

/// How often it is tried.
const TRIES: u32 = 6;

/// How many events a partition is made for.
const SMALLEST: i64 = 100_000;
const LARGEST: i64 = 50_000_000;

const DAY: f64 = 86_400.0;
const MINUTES_OF_A_DAY: f64 = 1_440.0;

/// How many events at least still go into the net, once it catches some.
const ROOM: i64 = 10_000;

/// One partition of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Quoted.
    pub(super) name: String,
    /// From this `seq` on, and up to that one; none for the DEFAULT partition.
    pub(super) bounds: Option<(i64, i64)>,
}

impl PgOutbox {
    /// Creates table partitions of a log before events need them, and analyses the table if it has created any. Relays
    /// that follow the log do this by themselves. Returns how many were created.
    pub async fn make_partitions(&self) -> Result<u64> {
        if self.spec.status.is_some() || self.options.spec.is_some() {
            return Ok(0);
        }
        let mut made = 0;
        while self.retried("creating a partition", || self.make_partition()).await? {
            made += 1;
        }
        if made > 0 {
            // Autovacuum never analyses a partitioned table as a whole, only its partitions.
            let mut conn = self.acquire().await?;
            sqlx::raw_sql(AssertSqlSafe(format!("ANALYZE {}", self.spec.qualified())))
                .execute(conn.get())
                .await
                .map_err(doing("analysing the log"))?;
            conn.commit().await?;
        }
        Ok(made)
    }

    /// Tries something again for which a lock could not be had in time.
    pub(super) async fn retried<T, F>(&self, what: &'static str, attempt: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<Option<T>>>,
    {
        let mut wait = Duration::from_millis(100);
        for _ in 0..TRIES {
            if let Some(done) = attempt().await? {
                return Ok(done);
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
        let holders = publishers::holders(self).await?;
        Err(Error::retryable(
            Code::LOCKED,
            format!(
                "{what}: open transactions have kept {} locked ({}); end them, or try again later",
                self.spec.display_name(),
                if holders.is_empty() {
                    "they have ended just now".into()
                } else {
                    open_publishers(&holders)
                }
            ),
        ))
    }

    /// Makes the next partition if it is time: whether it has. None when a lock could not be had.
    async fn make_partition(&self) -> Result<Option<bool>> {
        let mut conn = self.begin().await?;
        let table = LogTable::load(self, &mut conn).await?;
        let alone: bool = sqlx::query_scalar(
            "SELECT pg_try_advisory_xact_lock(hashtextextended('airtight partitions ' || $1, 0))",
        )
        .persistent(!self.pooled)
        .bind(&table.columns.outbox)
        .fetch_one(conn.get())
        .await
        .map_err(doing("creating a partition"))?;
        if !alone {
            return Ok(Some(false));
        }
        let last = consumers::last_value(self, &mut conn, &table).await?;
        let leaves = leaves(self, &mut conn, &table).await?;
        let (start, end) = leaves.iter().filter_map(|leaf| leaf.bounds).max().unwrap_or((1, 1));
        let rate = rate(self, &mut conn, &table, &leaves, last).await?;
        let ahead = ((rate / 24.0) as i64).max((end - start) / 2);
        if end - last > ahead {
            return Ok(Some(false));
        }
        let size = (rate as i64).clamp(SMALLEST, LARGEST);
        let in_net = net_end(self, &mut conn, &table, &leaves).await?;
        // If the DEFAULT partition has events already, more arrive before the partition exists: it begins well behind
        // them, or it would never be let in.
        let from = if in_net.max(last) > end {
            in_net.max(last) + ROOM.max((rate / MINUTES_OF_A_DAY) as i64)
        } else {
            end
        };
        let script = format!(
            "{LOCK_TIMEOUT}; CREATE TABLE {leaf} (LIKE {table} INCLUDING ALL); CREATE UNIQUE INDEX ON {leaf} (id); \
             ALTER TABLE {table} ATTACH PARTITION {leaf} FOR VALUES FROM ({from}) TO ({to})",
            leaf = self.own(&format!("{}_{from}", self.options.table)),
            table = table.columns.table,
            to = from + size,
        );
        match sqlx::raw_sql(AssertSqlSafe(script)).execute(conn.get()).await {
            Ok(_) => {}
            // Something was written to the net meanwhile, which the new partition would cover.
            Err(error) if is_locked(&error) || has_code(&error, "23514") => return Ok(None),
            Err(error) => return Err(doing("creating a partition")(error)),
        }
        conn.commit().await?;
        Ok(Some(true))
    }
}

/// Whether a lock could not be had in time, or two of us stood in each other's way.
pub(crate) fn is_locked(error: &sqlx::Error) -> bool {
    has_code(error, "55P03") || has_code(error, "40P01")
}

fn has_code(error: &sqlx::Error, code: &str) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|found| found == code)
}

/// The partitions of the table, in the order of their bounds.
pub(super) async fn leaves(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable) -> Result<Vec<Leaf>> {
    let failed = doing("listing partitions");
    let rows = sqlx::query(
        "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name, \
           pg_get_expr(c.relpartbound, c.oid) AS bounds \
         FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE i.inhparent = to_regclass($1)",
    )
    .persistent(!outbox.pooled)
    .bind(&table.columns.table)
    .fetch_all(conn.get())
    .await
    .map_err(&failed)?;
    let mut leaves = Vec::with_capacity(rows.len());
    for row in rows {
        let bounds: String = row.try_get("bounds").map_err(&failed)?;
        leaves.push(Leaf { name: row.try_get("name").map_err(&failed)?, bounds: parse_bounds(&bounds) });
    }
    leaves.sort_by_key(|leaf| leaf.bounds);
    Ok(leaves)
}

/// Reads `FOR VALUES FROM ('1') TO ('1000001')`.
fn parse_bounds(text: &str) -> Option<(i64, i64)> {
    let mut numbers = text
        .split(|letter: char| !letter.is_ascii_digit() && letter != '-')
        .filter_map(|part| part.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}

/// How many events come in a day, by those of the partition that is written to.
async fn rate(
    outbox: &PgOutbox,
    conn: &mut Conn,
    table: &LogTable,
    leaves: &[Leaf],
    last: i64,
) -> Result<f64> {
    let bounds = leaves.iter().filter_map(|leaf| leaf.bounds).rfind(|(from, _)| *from <= last);
    let Some((from, _)) = bounds else { return Ok(0.0) };
    let sql = format!(
        "SELECT extract(epoch FROM clock_timestamp() - {created})::float8 FROM {table} t WHERE {seq} >= $1 ORDER BY {seq} LIMIT 1",
        created = table.columns.created_at(),
        table = table.columns.table,
        seq = table.seq(),
    );
    let age: Option<f64> = sqlx::query_scalar(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(from)
        .fetch_optional(conn.get())
        .await
        .map_err(doing("measuring the rate of events"))?
        .flatten();
    // Of a few seconds nothing can be told.
    Ok(age.map_or(0.0, |age| (last - from + 1) as f64 / age.max(60.0) * DAY))
}

/// Behind the last event that fell into the net.
async fn net_end(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable, leaves: &[Leaf]) -> Result<i64> {
    let Some(net) = leaves.iter().find(|leaf| leaf.bounds.is_none()) else { return Ok(0) };
    let last: Option<i64> =
        sqlx::query_scalar(AssertSqlSafe(format!("SELECT max({}) FROM {} t", table.seq(), net.name)))
            .persistent(!outbox.pooled)
            .fetch_one(conn.get())
            .await
            .map_err(doing("reading the DEFAULT partition"))?;
    Ok(last.map_or(0, |last| last + 1))
}

/// How many events are in the net, as a finding for operators; none when it is empty.
pub(super) async fn caught(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable) -> Result<Option<Finding>> {
    let leaves = leaves(outbox, conn, table).await?;
    let Some(net) = leaves.iter().find(|leaf| leaf.bounds.is_none()) else {
        let finding = Finding::note(format!(
            "{} has no DEFAULT partition: an event that arrives before its partition is created would be refused",
            table.columns.outbox
        ));
        return Ok(Some(finding.with_remedy(format!(
            "CREATE TABLE {} PARTITION OF {} DEFAULT",
            outbox.own(&format!("{}_default", outbox.options.table)),
            table.columns.table
        ))));
    };
    let there: bool = sqlx::query_scalar(AssertSqlSafe(format!("SELECT EXISTS (SELECT FROM {})", net.name)))
        .persistent(!outbox.pooled)
        .fetch_one(conn.get())
        .await
        .map_err(doing("reading the DEFAULT partition"))?;
    Ok(there.then(|| {
        Finding::note(format!(
            "the DEFAULT partition {} holds events: they are delivered, but retention must delete them one by one",
            literal(&net.name)
        ))
        .with_remedy(
            "keep a relay running, or run `airtight migrate` regularly, so that partitions are created in advance",
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_read_as_the_server_writes_them() {
        assert_eq!(parse_bounds("FOR VALUES FROM ('1') TO ('1000001')"), Some((1, 1_000_001)));
        assert_eq!(parse_bounds("DEFAULT"), None);
    }
}
