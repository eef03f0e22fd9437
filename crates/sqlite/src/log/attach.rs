//! Registers a consumer, and reads its offsets.

use airtight_core::{
    Code, Error, Order, Result,
    group::Member,
    log::{ConsumerState, Replay, Revision, Standing, Start, behind_retention, unknown_consumer},
};
use serde_json::json;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{end, floor, partition_of, restarted};
use crate::{
    error::db,
    outbox::SqliteOutbox,
    sql::{NOW, Sql},
};

pub(super) async fn attach(outbox: &SqliteOutbox, member: &Member, start: Start) -> Result<()> {
    let sql = outbox.log_sql()?;
    let mut tx = outbox.begin().await?;
    let conn = tx.conn();
    let consumer = member.consumer();
    let partitions = member.partitions.max(1);
    let select =
        format!("SELECT partitions FROM airtight_consumer WHERE outbox = {} AND name = ?1", sql.name());
    let before: Option<u16> = sqlx::query_scalar(AssertSqlSafe(select))
        .bind(consumer)
        .fetch_optional(&mut *conn)
        .await
        .map_err(db)?;
    let last = end(conn, sql).await?;
    let offset = match before {
        Some(_) => smallest_offset(conn, sql, consumer).await?.unwrap_or(0),
        None if start == Start::Latest => last,
        None => floor(conn, sql).await?.seq,
    };
    if offset > last {
        return Err(restarted(&sql.spec.display_name(), consumer, offset, last));
    }
    if let Some(before) = before {
        refuse_live(conn, sql, member, before).await?;
        if before != partitions {
            repartition(conn, sql, member, partitions).await?;
        }
    }
    let upsert = format!(
        "INSERT INTO airtight_consumer (outbox, name, partitions, streams, by_key, block_on_dead) \
         VALUES ({}, ?1, ?2, ?3, ?4, ?5) ON CONFLICT (outbox, name) DO UPDATE SET \
         partitions = ?2, streams = ?3, by_key = ?4, block_on_dead = ?5",
        sql.name()
    );
    sqlx::query(AssertSqlSafe(upsert))
        .bind(consumer)
        .bind(partitions)
        .bind(json!(member.streams).to_string())
        .bind(member.order == Order::Key)
        .bind(member.block_on_dead)
        .execute(&mut *conn)
        .await
        .map_err(db)?;
    let offsets = format!(
        "INSERT INTO airtight_offset (outbox, consumer, n, last_seq) SELECT {}, ?1, value, ?3 FROM json_each(?2) \
         WHERE true ON CONFLICT (outbox, consumer, n) DO NOTHING",
        sql.name()
    );
    let numbers: Vec<u16> = (0..partitions).collect();
    sqlx::query(AssertSqlSafe(offsets))
        .bind(consumer)
        .bind(json!(numbers).to_string())
        .bind(offset)
        .execute(&mut *conn)
        .await
        .map_err(db)?;
    tx.commit().await
}

/// The smallest offset of a consumer's partitions.
pub(super) async fn smallest_offset(
    conn: &mut SqliteConnection,
    sql: &Sql,
    consumer: &str,
) -> Result<Option<i64>> {
    let select =
        format!("SELECT min(last_seq) FROM airtight_offset WHERE outbox = {} AND consumer = ?1", sql.name());
    sqlx::query_scalar(AssertSqlSafe(select)).bind(consumer).fetch_one(conn).await.map_err(db)
}

/// Refuses to work beside instances that read otherwise: another number of partitions, other streams or another
/// order. What one leaves out, the other would take for done.
async fn refuse_live(conn: &mut SqliteConnection, sql: &Sql, member: &Member, before: u16) -> Result<()> {
    // Those whose lease has run out must not come back.
    let evict = format!(
        "DELETE FROM airtight_relay WHERE outbox = {} AND grp = ?1 AND expires_at < {NOW} AND id <> ?2",
        sql.name()
    );
    sqlx::query(AssertSqlSafe(evict))
        .bind(member.group.stored())
        .bind(member.id.to_string())
        .execute(&mut *conn)
        .await
        .map_err(db)?;
    let repartitions = before != member.partitions.max(1);
    let select = format!(
        "SELECT host FROM airtight_relay WHERE outbox = {} AND grp = ?1 AND id <> ?2 \
         AND (?3 OR streams <> ?4 OR ord <> ?5) ORDER BY host LIMIT 1",
        sql.name()
    );
    let host: Option<String> = sqlx::query_scalar(AssertSqlSafe(select))
        .bind(member.group.stored())
        .bind(member.id.to_string())
        .bind(repartitions)
        .bind(json!(member.streams).to_string())
        .bind(member.order.as_str())
        .fetch_optional(conn)
        .await
        .map_err(db)?;
    let Some(host) = host else { return Ok(()) };
    if !repartitions {
        return Err(Error::permanent(
            Code::OVERLAP,
            format!("consumer `{}` runs on {host} with other streams or another order", member.consumer()),
        )
        .with_remedy("give all of its instances the same, stop the others first, or take another name"));
    }
    Err(Error::permanent(
        Code::OVERLAP,
        format!(
            "consumer `{}` has {before} partitions, and a relay on {host} works with them",
            member.consumer()
        ),
    )
    .with_remedy(format!("stop it (and all others) before one starts with {}", member.partitions)))
}

/// Restarts all partitions from the smallest offset. Events beyond it that are parked already stay so, in
/// the partition that their key is in now; reading passes over them.
async fn repartition(conn: &mut SqliteConnection, sql: &Sql, member: &Member, partitions: u16) -> Result<()> {
    let consumer = member.consumer();
    for (statement, name) in [
        // They hold no lease any more; gone, they cannot come back to one.
        ("DELETE FROM airtight_relay WHERE outbox = {} AND grp = ?1", member.group.stored()),
        (
            "UPDATE airtight_partition SET owner = NULL, epoch = epoch + 1 WHERE outbox = {} AND grp = ?1",
            member.group.stored(),
        ),
        (
            "UPDATE airtight_offset SET last_seq = (SELECT min(last_seq) FROM airtight_offset \
             WHERE outbox = {} AND consumer = ?1) WHERE outbox = {} AND consumer = ?1",
            consumer,
        ),
    ] {
        sqlx::query(AssertSqlSafe(statement.replace("{}", sql.name())))
            .bind(name)
            .execute(&mut *conn)
            .await
            .map_err(db)?;
    }
    for (statement, name) in [
        ("DELETE FROM airtight_partition WHERE outbox = {} AND grp = ?1 AND n >= ?2", member.group.stored()),
        ("DELETE FROM airtight_offset WHERE outbox = {} AND consumer = ?1 AND n >= ?2", consumer),
    ] {
        sqlx::query(AssertSqlSafe(statement.replace("{}", sql.name())))
            .bind(name)
            .bind(partitions)
            .execute(&mut *conn)
            .await
            .map_err(db)?;
    }
    let keys = format!(
        "SELECT DISTINCT aggregate_id FROM airtight_parked WHERE outbox = {} AND consumer = ?1",
        sql.name()
    );
    let keys: Vec<String> =
        sqlx::query_scalar(AssertSqlSafe(keys)).bind(consumer).fetch_all(&mut *conn).await.map_err(db)?;
    let update = format!(
        "UPDATE airtight_parked SET n = ?3 WHERE outbox = {} AND consumer = ?1 AND aggregate_id = ?2",
        sql.name()
    );
    for key in keys {
        sqlx::query(AssertSqlSafe(update.clone()))
            .bind(consumer)
            .bind(&key)
            .bind(partition_of(&key, partitions))
            .execute(&mut *conn)
            .await
            .map_err(db)?;
    }
    Ok(())
}

pub(super) async fn positions(
    outbox: &SqliteOutbox,
    member: &Member,
    partitions: &[u16],
) -> Result<Vec<Standing>> {
    let sql = outbox.log_sql()?;
    // One snapshot for all of it.
    let mut tx = outbox.snapshot().await?;
    let conn = &mut *tx;
    let numbers = json!(partitions).to_string();
    let select = format!(
        "SELECT p.n, p.epoch, f.last_seq, c.replay, c.replay_after, c.replay_through \
         FROM airtight_partition AS p JOIN airtight_offset AS f \
         ON f.outbox = p.outbox AND f.consumer = ?2 AND f.n = p.n \
         LEFT JOIN airtight_consumer AS c ON c.outbox = p.outbox AND c.name = ?2 \
         WHERE p.outbox = {} AND p.grp = ?1 AND p.owner = ?3 AND p.n IN (SELECT value FROM json_each(?4)) ORDER BY p.n",
        sql.name()
    );
    let rows = sqlx::query(AssertSqlSafe(select))
        .bind(member.group.stored())
        .bind(member.consumer())
        .bind(member.id.to_string())
        .bind(&numbers)
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    let mut standings = Vec::with_capacity(rows.len());
    for row in rows {
        standings.push(Standing {
            partition: row.try_get(0).map_err(db)?,
            epoch: row.try_get(1).map_err(db)?,
            offset: row.try_get(2).map_err(db)?,
            waiting: Vec::new(),
            // Reading on leaves out what is parked by itself.
            parked: Vec::new(),
            replay: match (row.try_get(3), row.try_get(4), row.try_get(5)) {
                (Ok(Some(id)), Ok(Some(after)), Ok(Some(through))) => Some(Replay { id, after, through }),
                _ => None,
            },
        });
    }
    let (floor, last) = (floor(conn, sql).await?.seq, end(conn, sql).await?);
    for standing in &standings {
        if standing.offset < floor {
            return Err(behind_retention(member.consumer(), standing.offset, floor));
        }
        if standing.offset > last {
            return Err(restarted(&sql.spec.display_name(), member.consumer(), standing.offset, last));
        }
    }
    let states = if member.block_on_dead { "'pending', 'dead', 'unknown'" } else { "'pending'" };
    let waiting = format!(
        "SELECT n, aggregate_id FROM airtight_parked WHERE outbox = {} AND consumer = ?1 AND state IN ({states}) \
         AND n IN (SELECT value FROM json_each(?2))",
        sql.name()
    );
    let waiting = sqlx::query(AssertSqlSafe(waiting))
        .bind(member.consumer())
        .bind(&numbers)
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    for row in waiting {
        let partition: u16 = row.try_get(0).map_err(db)?;
        let key = crate::decode::lossy(&row, 1).unwrap_or_default();
        if let Some(standing) = standings.iter_mut().find(|standing| standing.partition == partition) {
            standing.waiting.push(key);
        }
    }
    Ok(standings)
}

pub(super) async fn consumer_state(outbox: &SqliteOutbox, member: &Member) -> Result<ConsumerState> {
    let sql = outbox.log_sql()?;
    let mut conn = outbox.acquire().await?;
    let select =
        format!("SELECT paused, revision FROM airtight_consumer WHERE outbox = {} AND name = ?1", sql.name());
    let row = sqlx::query(AssertSqlSafe(select))
        .bind(member.consumer())
        .fetch_optional(&mut *conn)
        .await
        .map_err(db)?;
    let Some(row) = row else {
        return Err(unknown_consumer(member.consumer(), &names(&mut conn, sql).await?));
    };
    Ok(ConsumerState {
        paused: row.try_get(0).map_err(db)?,
        revision: Revision::At(row.try_get(1).map_err(db)?),
    })
}

/// All consumers' names.
pub(super) async fn names(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<String>> {
    let select = format!("SELECT name FROM airtight_consumer WHERE outbox = {} ORDER BY name", sql.name());
    sqlx::query_scalar(AssertSqlSafe(select)).fetch_all(conn).await.map_err(db)
}
