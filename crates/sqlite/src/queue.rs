//! The verbs of [`QueueStore`]: who is there, who owns what, and when to look again.
//!
//! Every verb that writes is one immediate transaction, and SQLite has one writer at a time. So evicting a
//! relay waits for a claim that it has under way, and the claim after that finds it gone.

use std::{collections::BTreeMap, time::Duration};

use airtight_core::{
    Backlog, Error, Order, Result, Verdict,
    group::{Member, Members, Pulse},
    queue::{ClaimRequest, Claimed, QueueStore, RowClaim},
};
use async_trait::async_trait;
use serde_json::json;
use sqlx::{AssertSqlSafe, ConnectOptions, Row, SqliteConnection};
use tokio::{sync::Mutex, time::Instant};
use uuid::Uuid;

use crate::{
    candidate::{key_value, streams_bind, streams_where},
    claim,
    error::db,
    hold,
    outbox::SqliteOutbox,
    schema,
    settle::{self, run, still_held},
    sql::{NOW, Slot},
};

/// How often an idle relay looks whether another connection has committed.
const LOOK: Duration = Duration::from_millis(100);

/// How long it asks more often after a publish in this process, whose commit is to come.
const EAGER: Duration = Duration::from_millis(100);

/// The queue in a SQLite file; [`SqliteOutbox::queue`] makes it a source.
#[derive(Debug)]
pub struct SqliteQueue {
    outbox: SqliteOutbox,
    watch: Mutex<Option<Watch>>,
}

/// A connection that only watches for the commits of others.
#[derive(Debug)]
struct Watch {
    conn: SqliteConnection,
    version: i64,
    /// The write-ahead log when the version was read.
    log: Option<LogStamp>,
}

/// Size and time of the write-ahead log: every commit writes there. Looking at it costs a few microseconds, a
/// statement, with its way to SQLite's thread and back, some hundred; an idle relay looks ten times a second.
/// Two commits within one tick of the file system's clock may look like one, which polling makes up for.
type LogStamp = (u64, std::time::SystemTime);

impl SqliteQueue {
    /// The queue in `outbox`.
    pub fn new(outbox: SqliteOutbox) -> Self {
        Self { outbox, watch: Mutex::new(None) }
    }

    /// Whether anybody has committed since the last call. The first call says yes: nobody looked before.
    async fn committed(&self) -> bool {
        let mut slot = self.watch.lock().await;
        if slot.is_none() {
            let options = self.outbox.pool().connect_options();
            match options.as_ref().clone().disable_statement_logging().connect().await {
                Ok(conn) => *slot = Some(Watch { conn, version: -1, log: None }),
                // The claim that follows meets the same error, and reports it.
                Err(_) => return false,
            }
        }
        let Some(watch) = slot.as_mut() else { return false };
        let log = self.log_stamp();
        if log.is_some() && log == watch.log {
            return false;
        }
        watch.log = log;
        match sqlx::query_scalar::<_, i64>("PRAGMA data_version").fetch_one(&mut watch.conn).await {
            Ok(version) => std::mem::replace(&mut watch.version, version) != version,
            Err(_) => {
                *slot = None;
                false
            }
        }
    }

    fn log_stamp(&self) -> Option<LogStamp> {
        let options = self.outbox.pool().connect_options();
        let mut path = options.get_filename().as_os_str().to_owned();
        path.push("-wal");
        let log = std::fs::metadata(path).ok()?;
        Some((log.len(), log.modified().ok()?))
    }

    async fn wait_for_commit(&self) {
        loop {
            // Registered before the look, so that a publish in between is not missed.
            let published = self.outbox.published().notified();
            if self.committed().await {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = published => {
                    let until = Instant::now() + EAGER;
                    let mut pause = Duration::from_millis(1);
                    while Instant::now() < until {
                        tokio::time::sleep(pause).await;
                        if self.committed().await {
                            return;
                        }
                        pause = (pause * 2).min(Duration::from_millis(16));
                    }
                }
            }
        }
    }
}

#[async_trait]
impl Members for SqliteQueue {
    async fn join(&self, member: &Member) -> Result<()> {
        let sql = self.outbox.queue_sql()?;
        let mut tx = self.outbox.begin().await?;
        let conn = tx.conn();
        refuse_overlap(conn, sql.name(), member).await?;
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
            .bind(&member.group)
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
            .bind(&member.group)
            .bind(json!(numbers).to_string())
            .execute(&mut *conn)
            .await
            .map_err(db)?;
        if member.order != Order::Key {
            hold::unhold_all(conn, sql, member).await?;
        }
        tx.commit().await
    }

    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse> {
        let sql = self.outbox.queue_sql()?;
        let mut tx = self.outbox.begin().await?;
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
        let statements = sql.change(None, &[(Slot::LockedUntil, until.as_str())]);
        run(conn, &statements, &items, &[&seconds(member.lease)]).await?;
        let lost = rows
            .iter()
            .enumerate()
            .filter(|(index, _)| !held.contains_key(index))
            .map(|(_, row)| row.key.clone())
            .collect();

        let select = format!(
            "SELECT id FROM airtight_relay WHERE outbox = {} AND grp = ?1 AND expires_at >= {NOW}",
            sql.name()
        );
        let ids: Vec<String> = sqlx::query_scalar(AssertSqlSafe(select))
            .bind(&member.group)
            .fetch_all(&mut *conn)
            .await
            .map_err(db)?;
        let select = format!(
            "SELECT n, owner FROM airtight_partition WHERE outbox = {} AND grp = ?1 AND owner IS NOT NULL",
            sql.name()
        );
        let owned =
            sqlx::query(AssertSqlSafe(select)).bind(&member.group).fetch_all(conn).await.map_err(db)?;
        let mut owners = BTreeMap::new();
        for row in owned {
            let owner: String = row.try_get(1).map_err(db)?;
            if let Ok(owner) = Uuid::parse_str(&owner) {
                owners.insert(row.try_get::<u16, _>(0).map_err(db)?, owner);
            }
        }
        tx.commit().await?;
        let members = ids.iter().filter_map(|id| Uuid::parse_str(id).ok()).collect();
        Ok(Pulse { alive: true, members, owners, lost })
    }

    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>> {
        let sql = self.outbox.queue_sql()?;
        let mut tx = self.outbox.begin().await?;
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
            .bind(&member.group)
            .bind(json!(wanted).to_string())
            .fetch_all(conn)
            .await
            .map_err(db)?;
        tx.commit().await?;
        taken.sort_unstable();
        Ok(taken)
    }

    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()> {
        let sql = self.outbox.queue_sql()?;
        let mut tx = self.outbox.begin().await?;
        let give = format!(
            "UPDATE airtight_partition SET owner = NULL WHERE outbox = {} AND grp = ?1 AND owner = ?2 \
             AND n IN (SELECT value FROM json_each(?3))",
            sql.name()
        );
        sqlx::query(AssertSqlSafe(give))
            .bind(&member.group)
            .bind(member.id.to_string())
            .bind(json!(partitions).to_string())
            .execute(tx.conn())
            .await
            .map_err(db)?;
        tx.commit().await
    }

    async fn leave(&self, member: &Member) -> Result<()> {
        let mut tx = self.outbox.begin().await?;
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

#[async_trait]
impl QueueStore for SqliteQueue {
    async fn open(&self) -> Result<()> {
        let sql = self.outbox.queue_sql()?;
        let mut conn = self.outbox.pool().acquire().await.map_err(db)?;
        let problems = schema::problems(&mut conn, sql).await?;
        if problems.is_empty() { Ok(()) } else { Err(Error::permanent("bad_table", problems.join("; "))) }
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed> {
        claim::claim(&self.outbox, request).await
    }

    async fn settle(&self, _member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>> {
        settle::settle(&self.outbox, rows).await
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        hold::unhold(&self.outbox, member, partitions).await
    }

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        let sql = self.outbox.queue_sql()?;
        let mut conn = self.outbox.pool().acquire().await.map_err(db)?;
        let mut unfinished = 0;
        for arm in ["IS NULL", "IS NOT NULL"] {
            let count = format!(
                "SELECT count(*) FROM {} WHERE {} AND {} {arm}{}",
                sql.from("o"),
                sql.open("o"),
                sql.retry("o"),
                streams_where(sql, "o", &member.streams, 1)
            );
            let count: i64 = sqlx::query_scalar(AssertSqlSafe(count))
                .bind(streams_bind(&member.streams))
                .fetch_one(&mut *conn)
                .await
                .map_err(db)?;
            unfinished += count.unsigned_abs();
        }
        let blocked = hold::blocked(&mut conn, sql, member).await?;
        Ok(Backlog { unfinished, blocked })
    }

    async fn wait(&self, at_most: Duration) {
        // Nobody to tell: at the end of the time it returns all the same.
        let _ = tokio::time::timeout(at_most, self.wait_for_commit()).await;
    }
}

/// Refuses a relay that would share streams with a live one of another group. Dead ones of such groups are
/// evicted, so that they cannot come back to life beside it.
async fn refuse_overlap(conn: &mut SqliteConnection, outbox: &str, member: &Member) -> Result<()> {
    let select = format!(
        "SELECT id, host, streams, ord, expires_at >= {NOW} FROM airtight_relay WHERE outbox = {outbox} AND grp <> ?1"
    );
    let others =
        sqlx::query(AssertSqlSafe(select)).bind(&member.group).fetch_all(&mut *conn).await.map_err(db)?;
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
                "overlap",
                format!(
                    "relay {id} on {host} reads {} with order `{order}`, this one {} with order `{}`: two groups on \
                     one stream would break the order of both; give both the same streams, order and partitions, or \
                     stop the other one",
                    names(&streams),
                    names(&member.streams),
                    member.order.as_str()
                ),
            ));
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

/// A time from now, by a modifier that a parameter brings.
fn from_now(parameter: &str) -> String {
    format!("strftime('%Y-%m-%dT%H:%M:%fZ','now',{parameter})")
}
