//! Which relays are alive, and which relay owns which partition.

use std::{
    collections::HashSet,
    sync::{Arc, OnceLock},
    time::Duration,
};

use airtight_core::{
    Code, Error, Result,
    group::{GroupKind, Member, Members, Peer, Pulse},
    queue::{RowClaim, RowKey},
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row, postgres::PgRow};
use uuid::Uuid;

use crate::{
    PgOutbox,
    columns::EventColumns,
    error::doing,
    groups,
    outbox::Conn,
    queue::{Evicted, Store, count_lost_leases, forget_marks},
    slots,
};

/// The table that a group of relays reads.
#[derive(Debug)]
enum Table {
    Queue(Arc<dyn Store>),
    /// Read as a log, or through the WAL.
    Followed(Box<EventColumns>),
}

impl Table {
    fn columns(&self) -> &EventColumns {
        match self {
            Self::Queue(store) => store,
            Self::Followed(columns) => columns,
        }
    }
}

/// The relays of an outbox, which they read as a queue, as a log or through the WAL.
#[derive(Debug)]
pub(crate) struct RelayGroup {
    outbox: PgOutbox,
    /// Set when the outbox is opened.
    table: OnceLock<Table>,
}

impl RelayGroup {
    pub(crate) fn new(outbox: PgOutbox) -> Self {
        Self { outbox, table: OnceLock::new() }
    }

    /// They read a queue. Opening again finds the table set already.
    pub(crate) fn read_queue(&self, store: Arc<dyn Store>) {
        let _ = self.table.set(Table::Queue(store));
    }

    /// They follow a log or the WAL. Opening again finds the table set already.
    pub(crate) fn follow(&self, columns: &EventColumns) {
        let _ = self.table.set(Table::Followed(columns.clone().into()));
    }

    fn table(&self) -> Result<&Table> {
        self.table.get().ok_or_else(|| Error::permanent(Code::NOT_OPEN, "the outbox was not opened"))
    }
}

#[async_trait]
impl Members for RelayGroup {
    async fn join(&self, member: &Member) -> Result<()> {
        let (outbox, table) = (&self.outbox, self.table()?);
        let c = table.columns();
        slots::check(member)?;
        let mut conn = outbox.begin().await?;
        lock_group(outbox, &mut conn, c).await?;
        // A relay that is not counted below must not come back with its next heartbeat: it is evicted, which waits
        // for a claim that it has under way. Relays of one's own group are left to `take`, which gives away what
        // they owned.
        // Without order no relay takes partitions, so rows of relays that ended long ago are removed here.
        let ended = "expires_at < now() AND (grp <> $2 OR expires_at < now() - interval '1 day')";
        evict(outbox, &mut conn, c, member, ended).await?;
        // Consumers of a log share with everyone, and readers of the WAL with one another.
        let overlap = format!(
            "SELECT host, grp FROM {} WHERE outbox = $1 AND grp <> $2 \
             AND NOT {my_log} AND NOT {log} AND NOT ({my_cdc} AND {cdc}) \
             AND (cardinality(streams) = 0 OR cardinality($3::text[]) = 0 OR streams && $3) LIMIT 1",
            c.relay,
            my_log = member.is_consumer(),
            log = groups::is_kind("grp", GroupKind::Log),
            my_cdc = member.group.kind() == GroupKind::Cdc,
            cdc = groups::is_kind("grp", GroupKind::Cdc),
        );
        let found = sqlx::query(AssertSqlSafe(overlap))
            .persistent(!outbox.pooled)
            .bind(&c.outbox)
            .bind(member.group.stored())
            .bind(&member.streams)
            .fetch_optional(conn.get())
            .await
            .map_err(doing("looking for other relays"))?;
        if let Some(other) = found {
            let host: String = other.try_get(0).map_err(doing("looking for other relays"))?;
            let group: String = other.try_get(1).map_err(doing("looking for other relays"))?;
            if member.reads() && !group.contains("/reads:") {
                return Err(Error::retryable(
                    Code::EARLIER_RELAYS,
                    format!(
                        "a relay of an earlier version of airtight, on {host}, reads the same streams of {} ({group}): this \
                         relay starts when that one has ended",
                        c.outbox
                    ),
                )
                .with_remedy("end the relays of the earlier version; nothing is lost meanwhile"));
            }
            return Err(Error::permanent(
                Code::OVERLAP,
                format!(
                    "a relay on {host} reads the same streams of {} with other settings ({group}, this one is {})",
                    c.outbox, member.group
                ),
            )
            .with_remedy("give both relays the same order and streams, or different streams"));
        }
        let sql = format!(
            "WITH me AS (INSERT INTO {} (id, outbox, grp, host, streams, ord, expires_at) \
               VALUES ($1, $2, $3, $4, $5, $6, now() + make_interval(secs => $7)) \
               ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at) \
             INSERT INTO {} (outbox, grp, n) SELECT $2, $3, n FROM generate_series(0, $8::int - 1) AS n \
               ON CONFLICT DO NOTHING",
            c.relay, c.partition
        );
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(member.id)
            .bind(&c.outbox)
            .bind(member.group.stored())
            .bind(&member.host)
            .bind(&member.streams)
            .bind(member.order.as_str())
            .bind(member.lease.as_secs_f64())
            .bind(i32::from(member.partitions))
            .execute(conn.get())
            .await
            .map_err(doing("joining the other relays"))?;
        conn.commit().await?;
        match table {
            Table::Queue(store) => store.joined(outbox, member).await,
            Table::Followed(_) => Ok(()),
        }
    }

    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse> {
        let (outbox, table) = (&self.outbox, self.table()?);
        let mut conn = outbox.acquire().await?;
        let mut pulse = pulse(outbox, &mut conn, table.columns(), member).await?;
        if let Table::Queue(store) = table
            && pulse.alive
            && !rows.is_empty()
        {
            let renewed = store.renew(outbox, &mut conn, member, rows).await?;
            let renewed: HashSet<RowKey> = renewed.into_iter().collect();
            pulse.lost =
                rows.iter().map(|row| row.key.clone()).filter(|key| !renewed.contains(key)).collect();
        }
        conn.commit().await?;
        if let (Table::Queue(store), true) = (table, pulse.alive) {
            store.beat(outbox, member).await?;
        }
        Ok(pulse)
    }

    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>> {
        let (outbox, c) = (&self.outbox, self.table()?.columns());
        let failed = doing("taking partitions");
        let mut conn = outbox.begin().await?;
        lock_group(outbox, &mut conn, c).await?;
        // Waits for a claim that the evicted relay has under way: that holds its row.
        evict(outbox, &mut conn, c, member, "expires_at < now() AND $2::text IS NOT NULL").await?;
        // A statement of its own, so that it sees what was deleted by others, too.
        let sql = format!(
            "UPDATE {} p SET owner = $1, epoch = epoch + 1 WHERE p.outbox = $2 AND p.grp = $3 AND p.n = ANY($4::smallint[]) \
             AND (p.owner IS NULL OR NOT EXISTS (SELECT FROM {relay} r WHERE r.id = p.owner)) \
             AND EXISTS (SELECT FROM {relay} r WHERE r.id = $1) RETURNING p.n",
            c.partition,
            relay = c.relay,
        );
        let taken: Vec<i16> = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(member.id)
            .bind(&c.outbox)
            .bind(member.group.stored())
            .bind(numbers(wanted))
            .fetch_all(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        Ok(taken.into_iter().filter_map(|n| u16::try_from(n).ok()).collect())
    }

    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()> {
        let (outbox, table) = (&self.outbox, self.table()?);
        let c = table.columns();
        if let Table::Queue(store) = table {
            // Before the answer: if that is lost, the partitions are read from the start. And with marks that do not name them:
            // an eviction of this relay must not touch what the next owner has in flight.
            store.gave(member, partitions);
            store.beat(outbox, member).await?;
        }
        let failed = doing("giving up partitions");
        let sql = format!(
            "UPDATE {} SET owner = NULL WHERE outbox = $1 AND grp = $2 AND n = ANY($3::smallint[]) AND owner = $4",
            c.partition
        );
        let mut conn = outbox.begin().await?;
        // Waits for a settle of this relay that is under way: it could take effect after the partition has a new owner.
        sqlx::query(AssertSqlSafe(format!("SELECT FROM {} WHERE id = $1 FOR UPDATE", c.relay)))
            .persistent(!outbox.pooled)
            .bind(member.id)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(&c.outbox)
            .bind(member.group.stored())
            .bind(numbers(partitions))
            .bind(member.id)
            .execute(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await
    }

    async fn leave(&self, member: &Member) -> Result<()> {
        // Without a table it was refused before it joined.
        let Some(table) = self.table.get() else { return Ok(()) };
        let (outbox, c) = (&self.outbox, table.columns());
        let sql = format!(
            "WITH me AS (DELETE FROM {} WHERE id = $1) UPDATE {} SET owner = NULL WHERE outbox = $2 AND grp = $3 AND owner = $1",
            c.relay, c.partition
        );
        let mut conn = outbox.begin().await?;
        sqlx::query(AssertSqlSafe(sql))
            .persistent(!outbox.pooled)
            .bind(member.id)
            .bind(&c.outbox)
            .bind(member.group.stored())
            .execute(conn.get())
            .await
            .map_err(doing("leaving the other relays"))?;
        if member.reads() {
            forget_marks(outbox, &mut conn, c, &[member.id]).await?;
        }
        conn.commit().await
    }
}

/// Removes relays of this outbox that have ended, and counts what they had in flight as lost.
async fn evict(
    outbox: &PgOutbox,
    conn: &mut Conn,
    c: &EventColumns,
    member: &Member,
    ended: &str,
) -> Result<()> {
    let failed = doing("evicting other relays");
    let sql = format!(
        "DELETE FROM {} WHERE outbox = $1 AND {ended} \
         RETURNING id, to_jsonb(streams)::text AS streams, grp LIKE '%/reads:%' AS reads",
        c.relay
    );
    let gone = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .bind(member.group.stored())
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    let mut evicted = Evicted::default();
    for row in gone {
        if row.try_get("reads").map_err(&failed)? {
            evicted.relays.push(row.try_get("id").map_err(&failed)?);
            evicted.streams.push(row.try_get("streams").map_err(&failed)?);
        }
    }
    count_lost_leases(outbox, conn, c, &evicted).await
}

/// Only one relay of a group changes ownership at a time. This is a transaction's lock, so that it works behind a
/// pooler and ends with the transaction, however that ends.
pub(crate) async fn lock_group(outbox: &PgOutbox, conn: &mut Conn, c: &EventColumns) -> Result<()> {
    sqlx::query("SELECT pg_advisory_xact_lock(hashtextextended('airtight relays ' || $1, 0))")
        .persistent(!outbox.pooled)
        .bind(&c.outbox)
        .execute(conn.get())
        .await
        .map_err(doing("waiting for other relays"))?;
    Ok(())
}

/// Renews the relay's own lease, and returns which other relays are alive.
async fn pulse(outbox: &PgOutbox, conn: &mut Conn, c: &EventColumns, member: &Member) -> Result<Pulse> {
    let failed = doing("renewing leases");
    // The relays and the partitions as they were before the renewal: only this relay's own row changes.
    let sql = format!(
        "WITH me AS (UPDATE {relay} SET expires_at = now() + make_interval(secs => $4) WHERE id = $1 RETURNING id) \
         SELECT EXISTS (SELECT FROM me) AS alive, \
           ARRAY(SELECT id FROM {relay} WHERE outbox = $2 AND grp = $3 AND (expires_at > now() OR id = $1)) AS members, \
           ARRAY(SELECT id FROM {relay} WHERE {peers} ORDER BY id) AS peers, \
           ARRAY(SELECT host FROM {relay} WHERE {peers} ORDER BY id) AS hosts, \
           ARRAY(SELECT expires_at::text FROM {relay} WHERE {peers} ORDER BY id) AS renewals, \
           ARRAY(SELECT extract(epoch FROM expires_at - now())::float8 FROM {relay} WHERE {peers} ORDER BY id) AS leases, \
           ARRAY(SELECT n FROM {partition} WHERE outbox = $2 AND grp = $3 AND owner IS NOT NULL ORDER BY n) AS owned, \
           ARRAY(SELECT owner FROM {partition} WHERE outbox = $2 AND grp = $3 AND owner IS NOT NULL ORDER BY n) AS owners",
        relay = c.relay,
        partition = c.partition,
        peers = "outbox = $2 AND grp = $3 AND expires_at > now() AND id <> $1",
    );
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .bind(member.id)
        .bind(&c.outbox)
        .bind(member.group.stored())
        .bind(member.lease.as_secs_f64())
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
    let owned: Vec<i16> = row.try_get("owned").map_err(&failed)?;
    let owners: Vec<Uuid> = row.try_get("owners").map_err(&failed)?;
    Ok(Pulse {
        alive: row.try_get("alive").map_err(&failed)?,
        members: row.try_get("members").map_err(&failed)?,
        owners: owned.into_iter().filter_map(|n| u16::try_from(n).ok()).zip(owners).collect(),
        lost: Vec::new(),
        peers: peers(&row).map_err(&failed)?,
    })
}

fn peers(row: &PgRow) -> sqlx::Result<Vec<Peer>> {
    let (ids, hosts): (Vec<Uuid>, Vec<String>) = (row.try_get("peers")?, row.try_get("hosts")?);
    let (renewals, leases): (Vec<String>, Vec<f64>) = (row.try_get("renewals")?, row.try_get("leases")?);
    let peers = ids.into_iter().zip(hosts).zip(renewals.into_iter().zip(leases));
    let left = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
    Ok(peers
        .map(|((id, host), (renewal, seconds))| Peer { id, host, renewal, left: left(seconds) })
        .collect())
}

fn numbers(partitions: &[u16]) -> Vec<i16> {
    partitions.iter().filter_map(|n| i16::try_from(*n).ok()).collect()
}
