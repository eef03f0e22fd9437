//! Which relays are members and which partitions each owns, for queues and logs.
//!
//! Every operation is one immediate transaction, and SQLite has one writer at a time. So evicting a relay waits for its
//! transaction under way, and every later transaction of the relay finds that it was evicted.

use std::{collections::BTreeMap, time::Duration};

use airtight_core::{
    Code, Error, Order, Result,
    group::{GroupKind, Member, Members, Peer, Pulse},
    queue::RowClaim,
    table::literal,
};
use async_trait::async_trait;
use serde_json::json;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};
use uuid::Uuid;

use crate::{
    candidate::key_value,
    error::db,
    hold,
    outbox::SqliteOutbox,
    settle::{run, still_held},
    sql::{NOW, RowField},
};

/// The group of the relays of an outbox, be it a queue or a log.
#[async_trait]
impl Members for SqliteOutbox {
    async fn join(&self, member: &Member) -> Result<()> {
        let sql = match member.group.kind() {
            GroupKind::Queue => self.queue_sql()?,
            GroupKind::Log | GroupKind::Cdc => self.log_sql()?,
        };
        let mut tx = self.begin().await?;
        let conn = tx.conn();
        if !member.is_consumer() {
            refuse_overlap(conn, sql.name(), member).await?;
        }
        let insert = format!(
            "INSERT INTO airtight_relay (id, outbox, host, grp, streams, ord, expires_at) \
             VALUES (?1, {}, ?2, ?3, ?4, ?5, {}) \
             ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at",
            sql.name(),
            from_now("?6")
        );
        sqlx::query(AssertSqlSafe(insert))
            .bind(member.id.to_string())
            .bind(&member.host)
            .bind(member.group.stored())
            .bind(json!(member.streams).to_string())
            .bind(member.order.as_str())
            .bind(seconds(member.lease))
            .execute(&mut *conn)
            .await
            .map_err(db)?;
        let partitions = format!(
            "INSERT INTO airtight_partition (outbox, grp, n) SELECT {}, ?1, value FROM json_each(?2) WHERE true \
             ON CONFLICT (outbox, grp, n) DO NOTHING",
            sql.name()
        );
        let numbers: Vec<u16> = (0..member.partitions).collect();
        sqlx::query(AssertSqlSafe(partitions))
            .bind(member.group.stored())
            .bind(json!(numbers).to_string())
            .execute(&mut *conn)
            .await
            .map_err(db)?;
        if member.order != Order::Key && !member.is_consumer() {
            hold::unhold_all(conn, sql, member).await?;
        }
        tx.commit().await
    }

    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse> {
        let sql = self.sql();
        let mut tx = self.begin().await?;
        let conn = tx.conn();
        let renew = format!("UPDATE airtight_relay SET expires_at = {} WHERE id = ?1", from_now("?2"));
        let renewed = sqlx::query(AssertSqlSafe(renew))
            .bind(member.id.to_string())
            .bind(seconds(member.lease))
            .execute(&mut *conn)
            .await
            .map_err(db)?;
        if renewed.rows_affected() == 0 {
            return Ok(Pulse::default());
        }
        let held = still_held(conn, sql, rows.iter()).await?;
        let items: Vec<_> = held.keys().map(|index| json!({"k": key_value(&rows[*index].key)})).collect();
        let until = from_now("?2");
        let statements = sql.change(None, &[(RowField::LockedUntil, until.as_str())]);
        run(conn, &statements, &items, &[&seconds(member.lease)]).await?;
        let lost = rows
            .iter()
            .enumerate()
            .filter(|(index, _)| !held.contains_key(index))
            .map(|(_, row)| row.key.clone())
            .collect();

        let select = format!(
            "SELECT id, host, expires_at, (julianday(expires_at) - julianday('now')) * 86400.0 FROM airtight_relay \
             WHERE outbox = {} AND grp = ?1 AND expires_at >= {NOW}",
            sql.name()
        );
        let live: Vec<(String, String, String, f64)> = sqlx::query_as(AssertSqlSafe(select))
            .bind(member.group.stored())
            .fetch_all(&mut *conn)
            .await
            .map_err(db)?;
        let select = format!(
            "SELECT n, owner FROM airtight_partition WHERE outbox = {} AND grp = ?1 AND owner IS NOT NULL",
            sql.name()
        );
        let owned = sqlx::query(AssertSqlSafe(select))
            .bind(member.group.stored())
            .fetch_all(conn)
            .await
            .map_err(db)?;
        let mut owners = BTreeMap::new();
        for row in owned {
            let owner: String = row.try_get(1).map_err(db)?;
            if let Ok(owner) = Uuid::parse_str(&owner) {
                owners.insert(row.try_get::<u16, _>(0).map_err(db)?, owner);
            }
        }
        tx.commit().await?;
        let mut members = Vec::with_capacity(live.len());
        let mut peers = Vec::new();
        for (id, host, renewal, seconds) in live {
            let Ok(id) = Uuid::parse_str(&id) else { continue };
            members.push(id);
            if id != member.id {
                let left = Duration::try_from_secs_f64(seconds).unwrap_or_default();
                peers.push(Peer { id, host, renewal, left });
            }
        }
        Ok(Pulse { alive: true, members, owners, lost, peers })
    }

    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>> {
        let sql = self.sql();
        let mut tx = self.begin().await?;
        let conn = tx.conn();
        let me = member.id.to_string();
        // Whoever calls is alive, however late it is.
        let evict = format!(
            "DELETE FROM airtight_relay WHERE outbox = {} AND expires_at < {NOW} AND id <> ?1",
            sql.name()
        );
        sqlx::query(AssertSqlSafe(evict)).bind(&me).execute(&mut *conn).await.map_err(db)?;
        let take = format!(
            "UPDATE airtight_partition SET owner = ?1, epoch = epoch + 1 \
             WHERE outbox = {} AND grp = ?2 AND n IN (SELECT value FROM json_each(?3)) \
             AND EXISTS (SELECT 1 FROM airtight_relay WHERE id = ?1) \
             AND (owner IS NULL OR owner NOT IN (SELECT id FROM airtight_relay)) RETURNING n",
            sql.name()
        );
        let mut taken: Vec<u16> = sqlx::query_scalar(AssertSqlSafe(take))
            .bind(&me)
            .bind(member.group.stored())
            .bind(json!(wanted).to_string())
            .fetch_all(conn)
            .await
            .map_err(db)?;
        tx.commit().await?;
        taken.sort_unstable();
        Ok(taken)
    }

    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()> {
        let sql = self.sql();
        let mut tx = self.begin().await?;
        let give = format!(
            "UPDATE airtight_partition SET owner = NULL WHERE outbox = {} AND grp = ?1 AND owner = ?2 \
             AND n IN (SELECT value FROM json_each(?3))",
            sql.name()
        );
        sqlx::query(AssertSqlSafe(give))
            .bind(member.group.stored())
            .bind(member.id.to_string())
            .bind(json!(partitions).to_string())
            .execute(tx.conn())
            .await
            .map_err(db)?;
        tx.commit().await
    }

    async fn leave(&self, member: &Member) -> Result<()> {
        let mut tx = self.begin().await?;
        let me = member.id.to_string();
        for statement in [
            "DELETE FROM airtight_relay WHERE id = ?1",
            "UPDATE airtight_partition SET owner = NULL WHERE owner = ?1",
        ] {
            sqlx::query(statement).bind(&me).execute(tx.conn()).await.map_err(db)?;
        }
        tx.commit().await
    }
}

/// Refuses a relay that would share streams with a live one of another group. Dead ones of such groups are
/// evicted, so that they cannot come back to life beside it. A log's consumers are in nobody's way.
async fn refuse_overlap(conn: &mut SqliteConnection, outbox: &str, member: &Member) -> Result<()> {
    let select = format!(
        "SELECT id, host, streams, ord, expires_at >= {NOW} FROM airtight_relay WHERE outbox = {outbox} AND grp <> ?1 \
         AND substr(grp, 1, {}) <> {}",
        GroupKind::Log.prefix().len(),
        literal(GroupKind::Log.prefix())
    );
    let others = sqlx::query(AssertSqlSafe(select))
        .bind(member.group.stored())
        .fetch_all(&mut *conn)
        .await
        .map_err(db)?;
    for other in others {
        let streams: String = other.try_get(2).map_err(db)?;
        let streams: Vec<String> = serde_json::from_str(&streams).unwrap_or_default();
        let shared = streams.is_empty()
            || member.streams.is_empty()
            || streams.iter().any(|stream| member.streams.contains(stream));
        if !shared {
            continue;
        }
        let id: String = other.try_get(0).map_err(db)?;
        if other.try_get::<bool, _>(4).map_err(db)? {
            let (host, order): (String, String) =
                (other.try_get(1).map_err(db)?, other.try_get(3).map_err(db)?);
            return Err(Error::permanent(
                Code::OVERLAP,
                format!(
                    "relay {id} on {host} reads {} with order `{order}`, this one {} with order `{}`: two groups on \
                     one stream would break the order of both",
                    names(&streams),
                    names(&member.streams),
                    member.order.as_str()
                ),
            )
            .with_remedy("give both the same streams, order and partitions, or stop the other one"));
        }
        sqlx::query("DELETE FROM airtight_relay WHERE id = ?1")
            .bind(id)
            .execute(&mut *conn)
            .await
            .map_err(db)?;
    }
    Ok(())
}

fn names(streams: &[String]) -> String {
    if streams.is_empty() { "all streams".into() } else { streams.join(", ") }
}

/// A duration as a modifier for SQLite's time functions.
pub(crate) fn seconds(duration: Duration) -> String {
    format!("+{}.{:03} seconds", duration.as_secs(), duration.subsec_millis())
}

/// A duration ago, as a modifier.
pub(crate) fn before(duration: Duration) -> String {
    seconds(duration).replacen('+', "-", 1)
}

/// A time from now, by a modifier that a parameter brings.
pub(crate) fn from_now(parameter: &str) -> String {
    format!("strftime('%Y-%m-%dT%H:%M:%fZ','now',{parameter})")
}
