//! Changes by operators to consumers and parked events.

use std::{collections::BTreeSet, time::Duration};

use airtight_core::{
    Code, Error, Result,
    admin::Detail,
    group::GroupName,
    log::{
        Consumer, Instance, LogAdmin, Parked, ParkedFilter, PartitionOffset, Pruned, Retention, Seek,
        SeekOptions, SeekTo, unknown_consumer,
    },
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{
    attach::names,
    end, floor, inspect,
    lag::{Counted, offsets, smallest},
    parked::{Rule, Scope},
    retain, seek,
};
use crate::{
    decode::integer,
    error::db,
    outbox::SqliteOutbox,
    sql::{NOW, Sql},
};

/// With more than so many events before it, a consumer's lag is not counted but taken from the numbers.
const COUNT_UP_TO: i64 = 100_000;

#[async_trait]
impl LogAdmin for SqliteOutbox {
    async fn consumers(&self) -> Result<Vec<Consumer>> {
        let sql = self.log_sql()?;
        let mut tx = self.snapshot().await?;
        consumers(&mut tx, sql).await
    }

    async fn seek(&self, consumer: &str, to: SeekTo, options: SeekOptions) -> Result<Seek> {
        seek::seek(self, consumer, to, options).await
    }

    async fn pause(&self, consumer: &str, paused: bool) -> Result<()> {
        let sql = self.log_sql()?;
        let mut tx = self.begin().await?;
        consumer_row(tx.conn(), sql, consumer).await?;
        let update =
            format!("UPDATE airtight_consumer SET paused = ?2 WHERE outbox = {} AND name = ?1", sql.name());
        sqlx::query(AssertSqlSafe(update))
            .bind(consumer)
            .bind(paused)
            .execute(tx.conn())
            .await
            .map_err(db)?;
        tx.commit().await
    }

    async fn remove(&self, consumer: &str) -> Result<()> {
        let sql = self.log_sql()?;
        let mut tx = self.begin().await?;
        let conn = tx.conn();
        consumer_row(conn, sql, consumer).await?;
        if let Some(instance) = instances(conn, sql, consumer).await?.first() {
            return Err(Error::permanent(
                Code::IN_USE,
                format!("a relay on {} works for consumer `{consumer}`: stop it first", instance.host),
            ));
        }
        let group = GroupName::log(consumer);
        for (statement, name) in [
            ("DELETE FROM airtight_consumer WHERE outbox = {} AND name = ?1", consumer),
            ("DELETE FROM airtight_offset WHERE outbox = {} AND consumer = ?1", consumer),
            ("DELETE FROM airtight_parked WHERE outbox = {} AND consumer = ?1", consumer),
            ("DELETE FROM airtight_partition WHERE outbox = {} AND grp = ?1", group.stored()),
            ("DELETE FROM airtight_relay WHERE outbox = {} AND grp = ?1", group.stored()),
        ] {
            let statement = statement.replace("{}", sql.name());
            sqlx::query(AssertSqlSafe(statement)).bind(name).execute(&mut *conn).await.map_err(db)?;
        }
        tx.commit().await
    }

    async fn lag(&self, consumer: &str) -> Result<u64> {
        let sql = self.log_sql()?;
        let mut tx = self.snapshot().await?;
        consumer_row(&mut tx, sql, consumer).await?;
        let offset = smallest(&offsets(&mut tx, sql, consumer).await?);
        Ok(u64::try_from(end(&mut tx, sql).await? - offset).unwrap_or(0))
    }

    async fn parked(&self, filter: &ParkedFilter) -> Result<Vec<Parked>> {
        let sql = self.log_sql()?;
        let mut tx = self.snapshot().await?;
        known_or_all(&mut tx, sql, filter).await?;
        inspect::list_parked(&mut tx, sql, filter).await
    }

    async fn show_parked(&self, consumer: &str, seq: i64) -> Result<Option<Detail>> {
        let sql = self.log_sql()?;
        let mut tx = self.snapshot().await?;
        consumer_row(&mut tx, sql, consumer).await?;
        inspect::show_parked(&mut tx, sql, consumer, seq).await
    }

    async fn retry_parked(&self, filter: &ParkedFilter) -> Result<u64> {
        self.act(filter, Act::Retry).await
    }

    async fn discard_parked(&self, filter: &ParkedFilter) -> Result<u64> {
        self.act(filter, Act::Discard).await
    }

    async fn prune_log(&self, retention: Retention, progress: &(dyn Fn(u64) + Sync)) -> Result<Pruned> {
        retain::prune_log(self, retention, progress).await
    }

    async fn prunable(&self, retention: Retention) -> Result<Pruned> {
        retain::prunable(self, retention).await
    }

    async fn prune_inbox(&self, keep: Duration) -> Result<u64> {
        retain::prune_inbox(self, keep).await
    }
}

/// What to do with parked events that a person decides about.
#[derive(Clone, Copy)]
enum Act {
    Retry,
    Discard,
}

impl SqliteOutbox {
    async fn act(&self, filter: &ParkedFilter, act: Act) -> Result<u64> {
        let sql = self.log_sql()?;
        let mut tx = self.begin().await?;
        let conn = tx.conn();
        known_or_all(conn, sql, filter).await?;
        // An unknown one, or one whose destination is away, is retried or dropped only by somebody who means just that one.
        let states = if filter.seqs.is_empty() {
            "p.state = 'dead'".to_owned()
        } else {
            format!("(p.state IN ('dead', 'unknown') OR p.error_code LIKE '{}')", Error::AWAY_CODES)
        };
        let which = format!("{} AND {states}", inspect::parked_where(sql, filter));
        let statement = match act {
            Act::Retry => format!(
                "UPDATE airtight_parked AS p SET state = 'pending', attempts = 0, next_retry_at = {NOW} WHERE {which} \
                 RETURNING consumer"
            ),
            Act::Discard => format!("DELETE FROM airtight_parked AS p WHERE {which} RETURNING consumer"),
        };
        let touched = inspect::bind_parked(sqlx::query(AssertSqlSafe(statement)), filter)
            .fetch_all(&mut *conn)
            .await
            .map_err(db)?;
        let mut consumers = BTreeSet::new();
        for row in &touched {
            consumers.insert(row.try_get::<String, _>(0).map_err(db)?);
        }
        for consumer in consumers {
            touch(conn, sql, &consumer).await?;
        }
        tx.commit().await?;
        Ok(touched.len() as u64)
    }
}

/// Tells the relays of a consumer that its parked events were changed by hand, and which of them are due.
async fn touch(conn: &mut SqliteConnection, sql: &Sql, consumer: &str) -> Result<()> {
    let update = format!(
        "UPDATE airtight_consumer SET revision = revision + 1 WHERE outbox = {} AND name = ?1",
        sql.name()
    );
    sqlx::query(AssertSqlSafe(update)).bind(consumer).execute(&mut *conn).await.map_err(db)?;
    let ConsumerRow { by_key, block_on_dead, .. } = consumer_row(conn, sql, consumer).await?;
    if by_key {
        Rule { sql, consumer, block_on_dead }.restore(conn, Scope::All).await?;
    }
    Ok(())
}

/// A consumer that was written down.
pub(super) struct ConsumerRow {
    pub(super) partitions: u16,
    pub(super) streams: Vec<String>,
    pub(super) by_key: bool,
    pub(super) block_on_dead: bool,
    pub(super) paused: bool,
}

/// Refuses a consumer that nobody has heard of.
pub(super) async fn consumer_row(
    conn: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
) -> Result<ConsumerRow> {
    let select = format!(
        "SELECT partitions, streams, by_key, block_on_dead, paused FROM airtight_consumer WHERE outbox = {} AND name = ?1",
        sql.name()
    );
    let row =
        sqlx::query(AssertSqlSafe(select)).bind(consumer).fetch_optional(&mut *conn).await.map_err(db)?;
    let Some(row) = row else { return Err(unknown_consumer(consumer, &names(conn, sql).await?)) };
    let streams: String = row.try_get(1).map_err(db)?;
    Ok(ConsumerRow {
        partitions: row.try_get(0).map_err(db)?,
        streams: serde_json::from_str(&streams).unwrap_or_default(),
        by_key: row.try_get(2).map_err(db)?,
        block_on_dead: row.try_get(3).map_err(db)?,
        paused: row.try_get(4).map_err(db)?,
    })
}

async fn known_or_all(conn: &mut SqliteConnection, sql: &Sql, filter: &ParkedFilter) -> Result<()> {
    match &filter.consumer {
        Some(consumer) => consumer_row(conn, sql, consumer).await.map(|_| ()),
        None => Ok(()),
    }
}

/// All consumers, in one snapshot.
pub(super) async fn consumers(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<Consumer>> {
    let (floor, end) = (floor(conn, sql).await?.seq, end(conn, sql).await?);
    let mut consumers = Vec::new();
    for name in names(conn, sql).await? {
        let ConsumerRow { partitions, streams, paused, .. } = consumer_row(conn, sql, &name).await?;
        let offsets = offsets(conn, sql, &name).await?;
        let offset = smallest(&offsets);
        let counted = Counted { sql, consumer: &name, streams: &streams, offsets: &offsets };
        let ahead = counted.ahead_within(conn, end, COUNT_UP_TO).await?;
        let [retrying, dead, unknown] = counts(conn, sql, &name).await?;
        consumers.push(Consumer {
            partitions,
            paused,
            offset,
            end,
            lag_events: ahead.events,
            lag_seconds: ahead.first_age.unwrap_or(0.0).max(0.0),
            behind_retention: offset < floor,
            retrying,
            dead,
            unknown,
            // There is one writer at a time, and no holes.
            waits_for: Vec::new(),
            instances: instances(conn, sql, &name).await?,
            offsets: partition_offsets(conn, sql, &name).await?,
            name,
        });
    }
    Ok(consumers)
}

async fn counts(conn: &mut SqliteConnection, sql: &Sql, consumer: &str) -> Result<[u64; 3]> {
    let select = format!(
        "SELECT count(*) FILTER (WHERE state = 'pending'), count(*) FILTER (WHERE state = 'dead'), \
         count(*) FILTER (WHERE state = 'unknown') FROM airtight_parked WHERE outbox = {} AND consumer = ?1",
        sql.name()
    );
    let row = sqlx::query(AssertSqlSafe(select)).bind(consumer).fetch_one(conn).await.map_err(db)?;
    Ok([0, 1, 2].map(|at| integer(&row, at).unwrap_or(0).unsigned_abs()))
}

async fn instances(conn: &mut SqliteConnection, sql: &Sql, consumer: &str) -> Result<Vec<Instance>> {
    let select = format!(
        "SELECT r.id, r.host, (SELECT count(*) FROM airtight_partition AS p WHERE p.outbox = r.outbox \
         AND p.grp = r.grp AND p.owner = r.id), (julianday(r.expires_at) - julianday('now')) * 86400.0 \
         FROM airtight_relay AS r WHERE r.outbox = {} AND r.grp = ?1 AND r.expires_at >= {NOW} ORDER BY r.host, r.id",
        sql.name()
    );
    let rows = sqlx::query(AssertSqlSafe(select))
        .bind(GroupName::log(consumer).stored())
        .fetch_all(conn)
        .await
        .map_err(db)?;
    rows.iter()
        .map(|row| {
            Ok(Instance {
                id: row.try_get(0).map_err(db)?,
                host: row.try_get(1).map_err(db)?,
                partitions: integer(row, 2).unwrap_or(0).unsigned_abs(),
                lease_seconds: row.try_get_unchecked::<f64, _>(3).map_err(db)?.max(0.0),
            })
        })
        .collect()
}

async fn partition_offsets(
    conn: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
) -> Result<Vec<PartitionOffset>> {
    // An owner that was evicted owns nothing, though nobody has taken it yet.
    let select = format!(
        "SELECT f.n, f.last_seq, r.id FROM airtight_offset AS f \
         LEFT JOIN airtight_partition AS p ON p.outbox = f.outbox AND p.grp = ?2 AND p.n = f.n \
         LEFT JOIN airtight_relay AS r ON r.id = p.owner AND r.expires_at >= {NOW} \
         WHERE f.outbox = {} AND f.consumer = ?1 ORDER BY f.n",
        sql.name()
    );
    let rows = sqlx::query(AssertSqlSafe(select))
        .bind(consumer)
        .bind(GroupName::log(consumer).stored())
        .fetch_all(conn)
        .await
        .map_err(db)?;
    rows.iter()
        .map(|row| {
            Ok(PartitionOffset {
                partition: row.try_get(0).map_err(db)?,
                offset: row.try_get(1).map_err(db)?,
                owner: row.try_get(2).map_err(db)?,
            })
        })
        .collect()
}
