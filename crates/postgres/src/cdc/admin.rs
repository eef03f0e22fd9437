//! The operator's side of readers of the WAL: how far they are, what is wrong, and how to start over.

use std::time::{Duration, Instant};

use airtight_core::{
    Code, Error, Result,
    admin::{Finding, SlotStatus},
    group::{GroupKind, GroupName},
    table::{literal, quote},
};
use sqlx::{AssertSqlSafe, Row};

use super::{
    CdcOptions, Endpoint,
    publication::{self, Publication, Reader},
    slot, state,
};
use crate::{
    PgOutbox,
    columns::{Columns, EventColumns},
    error::doing,
    groups, members,
};

/// A reader whose relay has said so recently has nothing before it.
const RECENT: &str = "interval '30 s'";

/// How often to check whether a slot is free, and for how long.
const RELEASED: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// How many rows are removed at once.
const PRUNE: i64 = 10_000;

impl PgOutbox {
    /// The readers of this outbox; none where the database was migrated by an older airtight.
    pub async fn readers(&self) -> Result<Vec<SlotStatus>> {
        let failed = doing("reading slots");
        let mut conn = self.acquire().await?;
        let there: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
            .persistent(!self.pooled)
            .bind(self.own("slot"))
            .fetch_one(conn.get())
            .await
            .map_err(&failed)?;
        if !there {
            conn.commit().await?;
            return Ok(Vec::new());
        }
        let sql = format!(
            "SELECT s.name, s.publication, s.phase, s.lsn::text AS lsn, r.confirmed_flush_lsn::text AS confirmed, \
               coalesce(r.active, false) AS active, r.wal_status, coalesce(c.paused, false) AS paused, \
               CASE WHEN NOT pg_is_in_recovery() THEN greatest(pg_current_wal_lsn() - s.lsn, 0)::bigint END AS lag, \
               CASE WHEN NOT pg_is_in_recovery() THEN greatest(pg_current_wal_lsn() - r.restart_lsn, 0)::bigint END AS retained, \
               r.safe_wal_size, \
               CASE WHEN s.idle_at > now() - {RECENT} THEN 0 \
                 ELSE extract(epoch FROM now() - greatest(s.lsn_time, s.idle_at)) END::float8 AS seconds, \
               count(p.seq) FILTER (WHERE p.state = 'waiting') AS waiting, \
               count(p.seq) FILTER (WHERE p.state = 'dead') AS dead, \
               count(p.seq) FILTER (WHERE p.state = 'unknown') AS unknown \
             FROM {slot} s LEFT JOIN pg_replication_slots r ON r.slot_name = s.name \
               LEFT JOIN {consumer} c ON c.outbox = s.outbox AND c.name = s.name \
               LEFT JOIN {parked} p ON p.outbox = s.outbox AND p.consumer = s.name \
             WHERE s.outbox = $1 GROUP BY s.outbox, s.name, c.paused, r.confirmed_flush_lsn, r.active, r.wal_status, \
               r.restart_lsn, r.safe_wal_size ORDER BY s.name",
            slot = self.own("slot"),
            consumer = self.own("consumer"),
            parked = self.own("parked"),
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(self.spec.display_name())
            .fetch_all(conn.get())
            .await
            .map_err(&failed)?;
        conn.commit().await?;
        rows.iter()
            .map(|row| {
                let count = |name: &str| row.try_get::<i64, _>(name).map(i64::unsigned_abs).map_err(&failed);
                let bytes = |name: &str| {
                    row.try_get::<Option<i64>, _>(name).map(|n| n.map(i64::unsigned_abs)).map_err(&failed)
                };
                Ok(SlotStatus {
                    name: row.try_get("name").map_err(&failed)?,
                    publication: row.try_get("publication").map_err(&failed)?,
                    phase: row.try_get("phase").map_err(&failed)?,
                    lsn: row.try_get("lsn").map_err(&failed)?,
                    confirmed_lsn: row.try_get("confirmed").map_err(&failed)?,
                    active: row.try_get("active").map_err(&failed)?,
                    wal_status: row.try_get("wal_status").map_err(&failed)?,
                    lag_bytes: bytes("lag")?,
                    lag_seconds: row.try_get("seconds").map_err(&failed)?,
                    retained_bytes: bytes("retained")?,
                    safe_bytes: row.try_get("safe_wal_size").map_err(&failed)?,
                    paused: row.try_get("paused").map_err(&failed)?,
                    waiting: count("waiting")?,
                    dead: count("dead")?,
                    unknown: count("unknown")?,
                })
            })
            .collect()
    }

    /// Makes a reader start over: its slot is dropped, and the next start creates a new one and delivers the rows that the
    /// table still has. Parked events stay. For a slot that was lost, moved or recreated.
    pub async fn recover_reader(&self, name: &str) -> Result<()> {
        let sql = format!(
            "UPDATE {} SET phase = 'new', lsn = NULL, system = NULL, timeline = NULL, idle_at = NULL, published = NULL \
             WHERE outbox = $1 AND name = $2",
            self.own("slot")
        );
        self.end_reader(name, &[sql], true).await
    }

    /// Removes a reader: its slot, its position and its parked events. This is the last step of going back to polling.
    pub async fn remove_reader(&self, name: &str) -> Result<()> {
        self.end_reader(name, &self.forgetting(), true).await
    }

    /// Removes a reader, except for its slot, which is left to the program that reads it next.
    pub async fn forget_reader(&self, name: &str) -> Result<()> {
        self.end_reader(name, &self.forgetting(), false).await
    }

    /// The statement that drops a slot.
    pub fn drop_slot(name: &str) -> String {
        format!("SELECT pg_drop_replication_slot({})", literal(name))
    }

    fn forgetting(&self) -> [String; 5] {
        let own = |table: &str, column: &str| {
            format!("DELETE FROM {} WHERE outbox = $1 AND {column} = $2", self.own(table))
        };
        let group = |table: &str| {
            format!(
                "DELETE FROM {} WHERE outbox = $1 AND grp = {}",
                self.own(table),
                groups::stored(GroupKind::Cdc, "$2")
            )
        };
        [
            own("parked", "consumer"),
            own("consumer", "name"),
            own("slot", "name"),
            group("partition"),
            group("relay"),
        ]
    }

    async fn end_reader(&self, name: &str, statements: &[String], drops_slot: bool) -> Result<()> {
        let failed = doing("ending the reader");
        if drops_slot {
            self.wait_for_slot(name).await?;
        }
        let mut conn = self.begin().await?;
        let c = EventColumns::load(self, &mut conn).await?;
        members::lock_group(self, &mut conn, &c).await?;
        if state::load_in(self, &mut conn, &c, name).await?.is_none() {
            // There may be one connection only.
            drop(conn);
            let known: Vec<String> = self.readers().await?.into_iter().map(|reader| reader.name).collect();
            let known = if known.is_empty() {
                "there is none".into()
            } else {
                format!("there are: {}", known.join(", "))
            };
            return Err(Error::permanent(
                Code::UNKNOWN_CONSUMER,
                format!("no reader of {} has the slot `{name}`; {known}", c.outbox),
            ));
        }
        let sql = format!(
            "SELECT host FROM {} WHERE outbox = $1 AND grp = $2 AND expires_at > now() LIMIT 1",
            self.own("relay")
        );
        let live: Option<String> = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(!self.pooled)
            .bind(&c.outbox)
            .bind(GroupName::cdc(name).stored())
            .fetch_optional(conn.get())
            .await
            .map_err(&failed)?;
        if let Some(host) = live {
            return Err(Error::permanent(
                Code::IN_USE,
                format!("a relay on {host} reads the slot `{name}`: stop it first"),
            ));
        }
        for sql in statements {
            sqlx::query(AssertSqlSafe(sql.clone()))
                .persistent(!self.pooled)
                .bind(&c.outbox)
                .bind(name)
                .execute(conn.get())
                .await
                .map_err(&failed)?;
        }
        if !drops_slot {
            return conn.commit().await;
        }
        // Last, for it is not undone by a rollback; one that is in use is refused by the server.
        sqlx::query("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1 AND database = current_database()")
            .persistent(!self.pooled)
            .bind(name)
            .execute(conn.get())
            .await
            .map_err(doing("dropping the slot"))?;
        conn.commit().await
    }

    /// Waits a little until nobody holds the slot: the connection of a relay that has just stopped takes a moment to end. One
    /// that is held for longer is refused by the server.
    async fn wait_for_slot(&self, name: &str) -> Result<()> {
        let end = Instant::now() + RELEASED.1;
        while Instant::now() < end
            && slot::find(self, name).await?.is_some_and(|slot| slot.active_pid.is_some())
        {
            tokio::time::sleep(RELEASED.0).await;
        }
        Ok(())
    }

    /// What prevents this outbox from being followed through the WAL, and what might prevent it later.
    pub async fn check_cdc(&self, options: &CdcOptions) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let mut fatal = |error: Error| findings.push(error.into());
        let mut conn = self.acquire().await?;
        let c = match EventColumns::load(self, &mut conn).await {
            Ok(c) => c,
            Err(error) => {
                fatal(error);
                return Ok(findings);
            }
        };
        conn.commit().await?;
        let endpoint = match &options.url {
            Some(url) => Endpoint::parse(url)?,
            None => Endpoint::of(&self.pool.connect_options()),
        };
        let server = match slot::check_server(self, &endpoint).await {
            Ok(server) => Some(server),
            Err(error) => {
                fatal(error);
                None
            }
        };
        let name = options.log.consumer.as_str();
        let mut conn = self.acquire().await?;
        let stored = state::load_in(self, &mut conn, &c, name).await?;
        conn.commit().await?;
        let contents = publication::contents(&c, &options.publication, slot::server_version(self).await?);
        let open = if options.mark && self.spec.status.is_some() {
            let mut conn = self.acquire().await?;
            let marks = Columns::load(self, &mut conn).await?;
            conn.commit().await?;
            marks.is_open()
        } else {
            "true".into()
        };
        let publication = options.publication.as_str();
        let reader = Reader { outbox: self, columns: &c, name, publication, contents: &contents, open };
        let positioned = stored.as_ref().filter(|stored| stored.has_position());
        match (positioned, publication::check(self, &c, &options.publication).await?) {
            (Some(stored), _) => {
                if let Err(error) = reader.judge(stored).await {
                    fatal(error);
                }
            }
            (None, Publication::Fits) => {}
            (None, Publication::Unfit(unfit)) => fatal(unfit.error()),
            (None, Publication::Missing) => findings.push(Finding::note(format!(
                "the publication `{}` is created at the first start: {}",
                options.publication,
                publication::create(&c, &options.publication)
            ))),
        }
        let found = slot::find(self, name).await?;
        if let Some(server) = server {
            let has_marks =
                options.mark && self.spec.status.is_some() && options.snapshot != super::Snapshot::Never;
            if let Some(stored) = stored
                && let Err(error) =
                    slot::check_gap(self, &c, name, stored, found.as_ref(), &server, has_marks).await
            {
                findings.push(error.into());
            }
        }
        if let Some(slot) = &found
            && let Err(error) = slot::check_kind(self, name, slot).await
        {
            findings.push(error.into());
        }
        findings.extend(self.check_room(found.is_none()).await?);
        Ok(findings)
    }

    /// Slots that are left, and what bounds the WAL that a slot keeps.
    async fn check_room(&self, wants_slot: bool) -> Result<Vec<Finding>> {
        let failed = doing("reading settings");
        let mut conn = self.acquire().await?;
        let row = sqlx::query(
            "SELECT current_setting('max_replication_slots')::bigint AS slots, \
               (SELECT count(*) FROM pg_replication_slots) AS used, \
               current_setting('max_wal_senders')::bigint AS senders, (SELECT count(*) FROM pg_stat_replication) AS sending, \
               current_setting('max_slot_wal_keep_size') AS keep",
        )
        .persistent(!self.pooled)
        .fetch_one(conn.get())
        .await
        .map_err(&failed)?;
        conn.commit().await?;
        let number = |name: &str| row.try_get::<i64, _>(name).map_err(&failed);
        let mut findings = Vec::new();
        for (what, all, used, setting) in [
            ("replication slots", number("slots")?, number("used")?, "max_replication_slots"),
            ("walsenders", number("senders")?, number("sending")?, "max_wal_senders"),
        ] {
            if wants_slot && used >= all {
                findings.push(Finding::fatal(format!("all {all} {what} are in use")).with_remedy(format!(
                    "raise {setting} and restart the server (ALTER SYSTEM SET {setting} = {})",
                    all + 4
                )));
            }
        }
        let keep: String = row.try_get("keep").map_err(&failed)?;
        findings.push(if keep == "-1" {
            Finding::note(
                "max_slot_wal_keep_size is -1: while a relay is unavailable, the server keeps WAL, until its disk is full",
            )
            .with_remedy(
                "set a limit, and watch `lag_bytes` of `airtight status`: ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'",
            )
        } else {
            Finding::note(format!(
                "max_slot_wal_keep_size is {keep}: a relay that falls further behind loses its slot, and the rows \
                 that the table still has must be delivered again (docs/cdc.md, \"A lost slot\")"
            ))
        });
        Ok(findings)
    }

    /// Removes rows that all readers have passed and that are older than `keep`, from a table that has neither a
    /// status nor a `seq`: a table that could be a log is left to the log's retention.
    /// Returns how many.
    pub async fn prune_behind(&self, keep: Duration, progress: &(dyn Fn(u64) + Sync)) -> Result<u64> {
        let failed = doing("removing delivered rows");
        let mut conn = self.acquire().await?;
        let c = EventColumns::load(self, &mut conn).await?;
        conn.commit().await?;
        // A log has consumers and a floor of its own: its retention is the log's.
        let is_log = c.spec.seq.is_some();
        let Some(created_at) = c.spec.created_at.as_ref().filter(|_| c.spec.status.is_none() && !is_log)
        else {
            return Ok(0);
        };
        let identity = c.identity();
        let sql = format!(
            "WITH behind AS (SELECT min(greatest(s.lsn_time, s.idle_at)) AS time, bool_and(s.phase = 'streaming') AS streaming \
               FROM {slot} s WHERE s.outbox = $1), \
             old AS (SELECT {identity} AS id FROM {table} t, behind b WHERE b.streaming \
               AND {created} < least(b.time, now() - make_interval(secs => $2)) ORDER BY {created} LIMIT {PRUNE} FOR UPDATE OF t SKIP LOCKED) \
             DELETE FROM {table} t USING old WHERE {identity} = old.id",
            slot = self.own("slot"),
            table = c.table,
            created = c.read_time(created_at),
        );
        let mut removed = 0;
        loop {
            let mut conn = self.acquire().await?;
            let done = sqlx::query(AssertSqlSafe(sql.clone()))
                .persistent(!self.pooled)
                .bind(&c.outbox)
                .bind(keep.as_secs_f64())
                .execute(conn.get())
                .await
                .map_err(&failed)?
                .rows_affected();
            conn.commit().await?;
            removed += done;
            progress(removed);
            if done < PRUNE.unsigned_abs() {
                return Ok(removed);
            }
        }
    }

    /// The statement that drops the publication. airtight does not run it, because another program may use the publication.
    pub fn drop_publication(publication: &str) -> String {
        format!("DROP PUBLICATION {}", quote(publication))
    }
}
