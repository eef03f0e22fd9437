//! Which rows may be claimed.
//!
//! A claim is one immediate transaction: no other connection writes while it runs, so it can read first, decide in
//! Rust, and then write. It reads two kinds of candidates, those never held up (*hot*, in seq order) and those
//! whose retry time has come (*due*), without their payloads; walks them in seq order; and reads the payloads
//! of what it took.
//!
//! With order, the walk keeps three rules. A candidate behind an earlier event of its key that waits is held
//! back, unless that earlier event is in the same batch. An event that may crash relays is claimed alone. And the walk
//! never goes past a row before which it may have missed a candidate.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use airtight_core::{
    Order, Result,
    group::{evicted, hash_of, partition_of},
    queue::{BadRow, ClaimRequest, Claimed, ClaimedRow, RowKey},
};
use futures::TryStreamExt;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Row, SqliteConnection, sqlite::SqliteRow};
use uuid::Uuid;

use crate::{
    candidate::{
        Candidate, Kind, OrderKey, barrier_statements, filters_here, key_value, select_statement,
        streams_bind, streams_where,
    },
    decode::{self, row_key},
    error::db,
    outbox::SqliteOutbox,
    settle::run,
    sql::{HELD, NOW, RowField, Sql},
};

/// Keys of rows from plain INSERTs that are hashed in one claim.
const HASH_AT_ONCE: i64 = 5_000;

/// Suspects looked at in one claim.
const SUSPECTS_AT_ONCE: i64 = 100;

/// Windows full of nothing but held events that one claim clears away. It commits then, which wakes its relay up
/// at once, so that others can write in between.
const WINDOWS: usize = 8;

/// Candidates in a window, at least.
const WINDOW: usize = 500;

/// One claim under way.
struct Claim<'a> {
    sql: &'a Sql,
    request: &'a ClaimRequest<'a>,
    now: String,
    until: String,
    streams: String,
    tokens: String,
    partitions: String,
    /// For tables that no index of ours helps with: who waits, and where the dead are, by key.
    waiting: HashMap<String, BTreeSet<OrderKey>>,
    dead: HashMap<String, OrderKey>,
}

/// What the walk decided.
#[derive(Default)]
struct Decision {
    take: Vec<Candidate>,
    hold: Vec<Candidate>,
    suspects: Vec<Candidate>,
}

pub(crate) async fn claim(outbox: &SqliteOutbox, request: &ClaimRequest<'_>) -> Result<Claimed> {
    let sql = outbox.queue_sql()?;
    if sql.canonical && is_idle(outbox, sql, request.member.id).await? {
        return Ok(Claimed::default());
    }
    let mut tx = outbox.begin().await?;
    let claimed = {
        let conn = tx.conn();
        let mut claim = Claim::start(conn, sql, request).await?;
        claim.run(conn).await?
    };
    tx.commit().await?;
    Ok(claimed)
}

/// Whether there is nothing to claim at all: one read, without a lock and without a commit, which is what an idle
/// relay does every second. A relay that is not on the list any more is to learn it from the claim itself.
async fn is_idle(outbox: &SqliteOutbox, sql: &Sql, relay: Uuid) -> Result<bool> {
    let mut conn = outbox.acquire().await?;
    sqlx::query_scalar(AssertSqlSafe(idle_statement(sql)))
        .bind(relay.to_string())
        .fetch_one(&mut *conn)
        .await
        .map_err(db)
}

pub(crate) fn idle_statement(sql: &Sql) -> String {
    let nothing = |when: &str| {
        format!(
            "NOT EXISTS (SELECT 1 FROM {} o WHERE {} AND {} {when})",
            sql.spec.qualified(),
            sql.open("o"),
            sql.retry("o")
        )
    };
    format!(
        "SELECT EXISTS (SELECT 1 FROM airtight_relay WHERE id = ?1) AND {} AND {}",
        nothing("IS NULL"),
        nothing("IS NOT NULL")
    )
}

impl<'a> Claim<'a> {
    /// Fences: a relay that is not on the list any more claims nothing.
    async fn start(conn: &mut SqliteConnection, sql: &'a Sql, request: &'a ClaimRequest<'a>) -> Result<Self> {
        let member = request.member;
        let lease = crate::members::seconds(member.lease);
        let row = sqlx::query(AssertSqlSafe(format!(
            "SELECT {NOW}, strftime('%Y-%m-%dT%H:%M:%fZ','now',?2) FROM airtight_relay WHERE id = ?1"
        )))
        .bind(member.id.to_string())
        .bind(lease)
        .fetch_optional(conn)
        .await
        .map_err(db)?
        .ok_or_else(evicted)?;
        let tokens: Vec<String> =
            request.tokens.iter().chain([&request.token]).map(ToString::to_string).collect();
        Ok(Self {
            sql,
            request,
            now: row.try_get(0).map_err(db)?,
            until: row.try_get(1).map_err(db)?,
            streams: streams_bind(&member.streams),
            tokens: json!(tokens).to_string(),
            partitions: json!(request.partitions).to_string(),
            waiting: HashMap::new(),
            dead: HashMap::new(),
        })
    }

    async fn run(&mut self, conn: &mut SqliteConnection) -> Result<Claimed> {
        let barrier = match self.request.member.order {
            Order::None => None,
            Order::Key => self.hash_keys(conn).await?,
            Order::Total => self.barrier(conn).await?,
        };
        if self.request.alone {
            let suspect = self.suspect(conn, barrier.as_ref()).await?;
            let rows = self.take(conn, suspect.into_iter().collect()).await?;
            return Ok(Claimed { rows, ..Claimed::default() });
        }
        let mut rows = Vec::new();
        for _ in 0..WINDOWS {
            let (candidates, full) = self.candidates(conn, barrier.as_ref()).await?;
            let decision = self.decide(candidates);
            self.hold(conn, &decision.hold).await?;
            self.set_apart(conn, &decision.suspects).await?;
            let moved = !(decision.hold.is_empty() && decision.suspects.is_empty());
            rows = self.take(conn, decision.take).await?;
            // Total order holds nothing back, so nothing was cleared away.
            if !(rows.is_empty() && full && moved) || self.request.member.order == Order::Total {
                break;
            }
        }
        let suspects = self.suspect(conn, barrier.as_ref()).await?.is_some();
        Ok(Claimed { rows, suspects, ..Claimed::default() })
    }

    // --- candidates -------------------------------------------------------------------------------------

    /// Stores the hashes of keys that came by a plain INSERT. Returns the first order key without one, which no
    /// claim may pass: a later event of that key may have its hash already.
    async fn hash_keys(&self, conn: &mut SqliteConnection) -> Result<Option<OrderKey>> {
        let sql = self.sql;
        let Some(partition) = &sql.spec.partition else { return Ok(None) };
        let name = airtight_core::table::quote(partition);
        let select = format!(
            "SELECT {}, {} FROM {} AS o WHERE {} AND o.{name} IS NULL {} LIMIT ?1",
            sql.order_key("o"),
            sql.key("o"),
            sql.spec.qualified(),
            sql.open("o"),
            sql.order_by("o", "ASC")
        );
        let rows = sqlx::query(AssertSqlSafe(select.clone()))
            .bind(HASH_AT_ONCE)
            .fetch_all(&mut *conn)
            .await
            .map_err(db)?;
        if rows.is_empty() {
            return Ok(None);
        }
        let mut items = Vec::with_capacity(rows.len());
        for row in &rows {
            let key = decode::lossy(row, 3).unwrap_or_default();
            items.push(json!({"k": key_value(&row_key(row, 2)?), "p": hash_of(key.as_bytes())}));
        }
        let update = format!(
            "UPDATE {} AS o SET {name} = j.value->>'p' FROM json_each(?1) AS j WHERE {} = j.value->>'k'",
            sql.spec.qualified(),
            sql.identity("o")
        );
        run(conn, &[update], &items, &[]).await?;
        let rest =
            sqlx::query(AssertSqlSafe(select)).bind(1_i64).fetch_optional(&mut *conn).await.map_err(db)?;
        rest.map(|row| OrderKey::read(&row, 0)).transpose()
    }

    /// With total order: the first event that nothing may pass.
    async fn barrier(&self, conn: &mut SqliteConnection) -> Result<Option<OrderKey>> {
        let mut first: Option<OrderKey> = None;
        for statement in barrier_statements(self.sql, self.request.member) {
            let row = sqlx::query(AssertSqlSafe(statement))
                .bind(&self.now)
                .bind(&self.streams)
                .fetch_optional(&mut *conn)
                .await
                .map_err(db)?;
            let order_key = row.map(|row| OrderKey::read(&row, 0)).transpose()?;
            first = first.into_iter().chain(order_key).min();
        }
        Ok(first)
    }

    /// The next candidates in seq order, and whether there may be more behind them.
    async fn candidates(
        &mut self,
        conn: &mut SqliteConnection,
        barrier: Option<&OrderKey>,
    ) -> Result<(Vec<Candidate>, bool)> {
        let order = self.request.member.order;
        self.look_around(conn).await?;
        let window = if order == Order::Key { self.request.events.max(WINDOW) } else { self.request.events };
        let (mut candidates, hot_full) = self.select(conn, Kind::Hot, window).await?;
        let seen_to = candidates.last().filter(|_| hot_full).map(|last| last.order_key.clone());

        let (due, due_full) = self.select(conn, Kind::Due, self.request.events).await?;
        let due_seen_to =
            due.last().filter(|_| due_full && order == Order::Total).map(|last| last.order_key.clone());

        candidates.extend(due);
        candidates.sort_by(|a, b| a.order_key.cmp(&b.order_key));
        if order != Order::None {
            // Behind the last hot one there may be hot ones not seen, of the same keys; see also the barrier.
            let end = seen_to.into_iter().chain(due_seen_to).min();
            candidates.retain(|candidate| {
                end.as_ref().is_none_or(|end| candidate.order_key <= *end)
                    && barrier.is_none_or(|barrier| candidate.order_key < *barrier)
            });
        }
        Ok((candidates, hot_full || due_full))
    }

    /// Candidates of one kind, and whether the limit cut them off.
    async fn select(
        &self,
        conn: &mut SqliteConnection,
        kind: Kind,
        limit: usize,
    ) -> Result<(Vec<Candidate>, bool)> {
        let member = self.request.member;
        let statement = select_statement(self.sql, self.request, kind);
        let mut query = sqlx::query(AssertSqlSafe(statement))
            .bind(&self.now)
            .bind(&self.streams)
            .bind(&self.tokens)
            .bind(&self.partitions)
            .bind(i64::from(member.partitions))
            .bind(if filters_here(self.sql, self.request) {
                -1
            } else {
                i64::try_from(limit).unwrap_or(i64::MAX)
            });
        for stream in &member.streams {
            query = query.bind(stream);
        }
        let mut rows = query.fetch(conn);
        let mut found = Vec::new();
        while let Some(row) = rows.try_next().await.map_err(db)? {
            if let Some(candidate) = self.read(&row)? {
                found.push(candidate);
                if found.len() >= limit {
                    return Ok((found, true));
                }
            }
        }
        Ok((found, false))
    }

    /// Reads a candidate; none when its partition is not asked for.
    fn read(&self, row: &SqliteRow) -> Result<Option<Candidate>> {
        let member = self.request.member;
        let order_key = OrderKey::read(row, 0)?;
        let key = decode::lossy(row, 3).unwrap_or_default();
        let partition = match member.order {
            Order::Key => {
                let stored: Option<i64> = row.try_get(4).map_err(db)?;
                let hash = stored.unwrap_or_else(|| hash_of(key.as_bytes()));
                partition_of(hash, member.partitions)
            }
            Order::None | Order::Total => 0,
        };
        if member.order == Order::Key && !self.request.partitions.contains(&partition) {
            return Ok(None);
        }
        let (waits_for, behind_dead) = if self.sql.canonical {
            let waits_for: Option<i64> = row.try_get(10).map_err(db)?;
            (waits_for.map(OrderKey::seq), row.try_get(11).map_err(db)?)
        } else {
            let waits_for =
                self.waiting.get(&key).and_then(|order_keys| order_keys.range(..&order_key).next_back());
            (waits_for.cloned(), self.dead.get(&key).is_some_and(|dead| *dead < order_key))
        };
        let size: i64 = row.try_get(9).map_err(db)?;
        Ok(Some(Candidate {
            row: row_key(row, 2)?,
            order_key,
            key,
            partition,
            taken_over: row.try_get(5).map_err(db)?,
            retry_at: row.try_get(6).map_err(db)?,
            count: row.try_get(7).map_err(db)?,
            lost: row.try_get(8).map_err(db)?,
            size: usize::try_from(size).unwrap_or(0),
            waits_for,
            behind_dead,
        }))
    }

    /// For tables without our indexes: one pass over the table instead of a look-up for every candidate.
    async fn look_around(&mut self, conn: &mut SqliteConnection) -> Result<()> {
        if self.sql.canonical || self.request.member.order != Order::Key {
            return Ok(());
        }
        let waits = format!("{} AND {} IS NOT NULL", self.sql.open("o"), self.sql.retry("o"));
        self.waiting.clear();
        for (key, order_key) in self.order_keys(conn, &waits).await? {
            self.waiting.entry(key).or_default().insert(order_key);
        }
        if self.request.member.block_on_dead {
            let closed = self.sql.closed("o");
            let mut first: BTreeMap<String, OrderKey> = BTreeMap::new();
            for (key, order_key) in self.order_keys(conn, &closed).await? {
                let entry = first.entry(key).or_insert_with(|| order_key.clone());
                if order_key < *entry {
                    *entry = order_key;
                }
            }
            self.dead = first.into_iter().collect();
        }
        Ok(())
    }

    async fn order_keys(
        &self,
        conn: &mut SqliteConnection,
        condition: &str,
    ) -> Result<Vec<(String, OrderKey)>> {
        let sql = self.sql;
        let statement = format!(
            "SELECT {}, {} FROM {} WHERE {condition}{}",
            sql.order_key("o"),
            sql.key("o"),
            sql.from("o"),
            streams_where(sql, "o", &self.request.member.streams, 1)
        );
        let rows =
            sqlx::query(AssertSqlSafe(statement)).bind(&self.streams).fetch_all(conn).await.map_err(db)?;
        rows.iter()
            .map(|row| Ok((decode::lossy(row, 3).unwrap_or_default(), OrderKey::read(row, 0)?)))
            .collect()
    }

    // --- deciding ---------------------------------------------------------------------------------------

    fn decide(&self, candidates: Vec<Candidate>) -> Decision {
        let order = self.request.member.order;
        let mut decision = Decision::default();
        let mut taken: HashSet<OrderKey> = HashSet::new();
        let mut stopped: HashSet<String> = HashSet::new();
        let mut bytes = 0_usize;
        for candidate in candidates {
            if decision.take.len() >= self.request.events {
                break;
            }
            if order == Order::Key {
                // If the last one that waits is in this batch, so are those before it, or it would not be.
                let waits = candidate.waits_for.as_ref().is_some_and(|order_key| !taken.contains(order_key));
                if waits || candidate.behind_dead || stopped.contains(&candidate.key) {
                    stopped.insert(candidate.key.clone());
                    decision.hold.push(candidate);
                    continue;
                }
            }
            if candidate.is_suspect() {
                stopped.insert(candidate.key.clone());
                decision.suspects.push(candidate);
                if order == Order::Total {
                    break;
                }
                continue;
            }
            // What is too large is not read, so it takes no room.
            let size = if candidate.size > self.request.max_payload { 0 } else { candidate.size };
            if !decision.take.is_empty() && bytes.saturating_add(size) > self.request.bytes {
                break;
            }
            bytes = bytes.saturating_add(size);
            taken.insert(candidate.order_key.clone());
            decision.take.push(candidate);
        }
        decision
    }

    /// The suspect to deliver next: the first one that is due and that nothing stands in front of.
    async fn suspect(
        &mut self,
        conn: &mut SqliteConnection,
        barrier: Option<&OrderKey>,
    ) -> Result<Option<Candidate>> {
        let order = self.request.member.order;
        let limit = usize::try_from(SUSPECTS_AT_ONCE).unwrap_or(1);
        self.look_around(conn).await?;
        let (candidates, _) = self.select(conn, Kind::Suspect, limit).await?;
        let mut held = Vec::new();
        let mut found = None;
        for candidate in candidates {
            if order != Order::None && barrier.is_some_and(|barrier| candidate.order_key > *barrier) {
                break;
            }
            if order == Order::Key && (candidate.waits_for.is_some() || candidate.behind_dead) {
                held.push(candidate);
                continue;
            }
            if !self.is_preceded(conn, &candidate).await? {
                found = Some(candidate);
                break;
            }
            if order == Order::Total {
                break;
            }
        }
        self.hold(conn, &held).await?;
        Ok(found)
    }

    /// Whether an unfinished event that does not wait comes before this one: any with total order, one of its
    /// key with key order.
    async fn is_preceded(&self, conn: &mut SqliteConnection, candidate: &Candidate) -> Result<bool> {
        let sql = self.sql;
        let condition = match self.request.member.order {
            Order::None => return Ok(false),
            Order::Key => format!("{} IS NULL AND {} = {}", sql.retry("e"), sql.key("e"), sql.key("o")),
            Order::Total => "true".into(),
        };
        let statement = format!(
            "SELECT EXISTS (SELECT 1 FROM {} AS o, {} WHERE {} = ?1 AND {} AND {} AND {condition}{})",
            sql.spec.qualified(),
            sql.from("e"),
            sql.identity("o"),
            sql.before("e", "o"),
            sql.open("e"),
            streams_where(sql, "e", &self.request.member.streams, 2)
        );
        let query = sqlx::query_scalar(AssertSqlSafe(statement));
        let query = match &candidate.row {
            RowKey::Int(number) => query.bind(*number),
            RowKey::Text(text) => query.bind(text.clone()),
        };
        query.bind(&self.streams).fetch_one(conn).await.map_err(db)
    }

    // --- writing ----------------------------------------------------------------------------------------

    /// Moves candidates out of the way until what they wait for is finished.
    async fn hold(&self, conn: &mut SqliteConnection, rows: &[Candidate]) -> Result<()> {
        let items: Vec<Value> = rows.iter().map(|row| json!({"k": key_value(&row.row)})).collect();
        let statements = self.sql.change(None, &[(RowField::NextRetryAt, "?2")]);
        run(conn, &statements, &items, &[HELD]).await
    }

    /// Leaves suspects to a claim with `alone`. Those that were claimed get their attempt back.
    async fn set_apart(&self, conn: &mut SqliteConnection, rows: &[Candidate]) -> Result<()> {
        let sql = self.sql;
        let mut fresh = Vec::new();
        let mut failed = Vec::new();
        for row in rows {
            let given_back = i64::from(row.taken_over && sql.counts_attempts());
            let count = row.count.saturating_sub(given_back).max(0);
            let item = json!({
                "k": key_value(&row.row),
                "n": count,
                "l": row.lost_now(),
                "r": row.retry_at.as_deref().unwrap_or(&self.now),
            });
            if count > 0 { failed.push(item) } else { fresh.push(item) }
        }
        for (role, items) in [(sql.role_new(), fresh), (sql.role_retrying(), failed)] {
            let statements = sql.change(
                role,
                &[
                    (RowField::Count, "j.value->>'n'"),
                    (RowField::LostLeases, "j.value->>'l'"),
                    (RowField::NextRetryAt, "j.value->>'r'"),
                    (RowField::ClaimToken, "NULL"),
                    (RowField::LockedUntil, "NULL"),
                ],
            );
            run(conn, &statements, &items, &[]).await?;
        }
        Ok(())
    }

    async fn take(&self, conn: &mut SqliteConnection, rows: Vec<Candidate>) -> Result<Vec<ClaimedRow>> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let sql = self.sql;
        let mut items = Vec::with_capacity(rows.len());
        for row in &rows {
            let grows = sql.counts_attempts() && !row.taken_over;
            let count = row.count.max(0).saturating_add(grows.into());
            items.push(json!({"k": key_value(&row.row), "n": count, "l": row.lost_now()}));
        }
        let statements = sql.change(
            sql.role_processing(),
            &[
                (RowField::Count, "j.value->>'n'"),
                (RowField::LostLeases, "j.value->>'l'"),
                (RowField::ClaimToken, "?2"),
                (RowField::LockedUntil, "?3"),
                (RowField::LastAttemptAt, NOW),
            ],
        );
        let token = self.request.token.to_string();
        run(conn, &statements, &items, &[&token, &self.until]).await?;

        let keys: Vec<Value> = rows.iter().map(|row| key_value(&row.row)).collect();
        let mut decoded = decode::events(conn, sql, &keys, self.request.max_payload).await?;
        let claimed = rows.into_iter().map(|row| {
            let grows = !(sql.counts_attempts() && row.taken_over);
            let attempt = row.count.max(0).saturating_add(grows.into());
            let (event, max_attempts) = decoded.remove(&row.row).unwrap_or_else(|| {
                let error = airtight_core::Error::permanent(
                    airtight_core::Code::BAD_ROW,
                    "the row could not be read again",
                );
                (Err(BadRow { id: format!("{:?}", row.row), key: Some(row.key.clone()), error }), None)
            });
            ClaimedRow {
                partition: row.partition,
                attempt: u32::try_from(attempt.max(1)).unwrap_or(u32::MAX),
                max_attempts,
                lost_leases: u32::try_from(row.lost_now()).unwrap_or(0),
                waited: row.retry_at.is_some() || row.count > i64::from(row.taken_over),
                key: row.row,
                event,
            }
        });
        Ok(claimed.collect())
    }
}
