//! Changes by operators: migrate, retry, discard, prune. Reads for operators are in `inspect`.

use std::time::Duration;

use airtight_core::{
    NewEvent, Published, Result,
    admin::{Acted, Admin, BlockedKey, Detail, EventRow, Filter, Finding, Prune, Removed, Status},
    log::LogAdmin,
    queue::RowKey,
    state::State,
    table::quote,
};
use async_trait::async_trait;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, SqliteConnection};

use crate::{
    candidate::key_value,
    decode::row_key,
    error::db,
    inspect, log,
    members::before,
    outbox::SqliteOutbox,
    schema,
    settle::run,
    sql::{RowField, Sql, time},
};

/// Rows that one statement of a bulk action touches.
const AT_ONCE: usize = 1_000;

/// Records of relays that are gone for longer are removed.
const RELAYS_KEPT: Duration = Duration::from_secs(24 * 3600);

#[async_trait]
impl Admin for SqliteOutbox {
    async fn migrate(&self) -> Result<Vec<String>> {
        let mut tx = self.begin().await?;
        let did = schema::migrate(tx.conn(), self.sql()).await?;
        tx.commit().await?;
        Ok(did)
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        inspect::check(self).await
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Published>> {
        let mut tx = self.begin().await?;
        let published = self.publish_many(tx.conn(), events).await?;
        tx.commit().await?;
        Ok(published)
    }

    async fn status(&self) -> Result<Status> {
        if self.is_log() {
            return log::inspect::status(self).await;
        }
        inspect::status(self).await
    }

    async fn list(&self, filter: &Filter) -> Result<Vec<EventRow>> {
        if self.is_log() {
            return log::inspect::list(self, filter).await;
        }
        inspect::list(self, filter).await
    }

    async fn show(&self, id: &str) -> Result<Option<Detail>> {
        if self.is_log() {
            return log::inspect::show(self, id).await;
        }
        inspect::show(self, id).await
    }

    async fn retry(&self, id: &str) -> Result<Acted> {
        if self.is_log() {
            return log::inspect::act(self, id, true).await;
        }
        let sql = self.queue_sql()?;
        let mut tx = self.begin().await?;
        let Some((key, state)) = inspect::find(tx.conn(), sql, id).await? else { return Ok(Acted::NotFound) };
        if !state.can_retry() {
            return Ok(Acted::Refused(state));
        }
        make_due(tx.conn(), sql, &[key]).await?;
        tx.commit().await?;
        Ok(Acted::Yes)
    }

    async fn retry_dead(&self, filter: &Filter) -> Result<u64> {
        if self.is_log() {
            return self.retry_parked(&log::inspect::dead(filter)).await;
        }
        self.for_all_dead(filter, Action::Retry).await
    }

    async fn discard(&self, id: &str) -> Result<Acted> {
        if self.is_log() {
            return log::inspect::act(self, id, false).await;
        }
        let sql = self.queue_sql()?;
        let mut tx = self.begin().await?;
        let Some((key, state)) = inspect::find(tx.conn(), sql, id).await? else { return Ok(Acted::NotFound) };
        if matches!(state, State::Processing | State::Done) {
            return Ok(Acted::Refused(state));
        }
        delete(tx.conn(), sql, &[key]).await?;
        tx.commit().await?;
        Ok(Acted::Yes)
    }

    async fn discard_dead(&self, filter: &Filter) -> Result<u64> {
        if self.is_log() {
            return self.discard_parked(&log::inspect::dead(filter)).await;
        }
        self.for_all_dead(filter, Action::Discard).await
    }

    async fn prune(&self, what: Prune, progress: &(dyn Fn(u64) + Sync)) -> Result<Removed> {
        if self.is_log() {
            // Nothing in a log is ever done: what is old is removed by `prune_log`.
            if !what.dry_run {
                self.prune_own(self.sql()).await?;
            }
            return Ok(Removed::default());
        }
        let sql = self.queue_sql()?;
        let column = sql.spec.age_column(what.by_creation)?;
        let raw = format!("o.{}", quote(column));
        let finished = if sql.canonical { raw } else { time(&raw) };
        let old = format!(
            "FROM {} WHERE {} AND {finished} < strftime('%Y-%m-%dT%H:%M:%fZ','now',?1)",
            sql.from("o"),
            sql.done("o")
        );
        if what.dry_run {
            let count = format!("SELECT count(*) {old}");
            let events: i64 = sqlx::query_scalar(AssertSqlSafe(count))
                .bind(before(what.keep))
                .fetch_one(&mut *self.acquire().await?)
                .await
                .map_err(db)?;
            return Ok(Removed { events: events.unsigned_abs(), column: column.to_owned() });
        }
        let select = format!("SELECT {} {old} ORDER BY {finished} LIMIT {AT_ONCE}", sql.identity("o"));
        let mut total = 0;
        loop {
            let mut tx = self.begin().await?;
            let rows = sqlx::query(AssertSqlSafe(select.clone()))
                .bind(before(what.keep))
                .fetch_all(tx.conn())
                .await
                .map_err(db)?;
            let keys = rows.iter().map(|row| row_key(row, 0)).collect::<Result<Vec<RowKey>>>()?;
            delete(tx.conn(), sql, &keys).await?;
            tx.commit().await?;
            total += keys.len() as u64;
            progress(total);
            if keys.len() < AT_ONCE {
                break;
            }
        }
        self.prune_own(sql).await?;
        Ok(Removed { events: total, column: column.to_owned() })
    }

    async fn blocked(&self, limit: usize) -> Result<Vec<BlockedKey>> {
        if self.is_log() {
            return log::inspect::blocked(self, limit).await;
        }
        inspect::blocked(self, limit).await
    }
}

/// What to do with dead events.
#[derive(Clone, Copy)]
enum Action {
    Retry,
    Discard,
}

impl SqliteOutbox {
    async fn for_all_dead(&self, filter: &Filter, action: Action) -> Result<u64> {
        let sql = self.queue_sql()?;
        let mut filter = Filter { states: vec![State::Dead], ..filter.clone() };
        let mut left = if filter.limit == 0 { usize::MAX } else { filter.limit };
        let mut total = 0;
        while left > 0 {
            filter.limit = left.min(AT_ONCE);
            let mut tx = self.begin().await?;
            let keys = inspect::matching(tx.conn(), sql, &filter).await?;
            match action {
                Action::Retry => make_due(tx.conn(), sql, &keys).await?,
                Action::Discard => delete(tx.conn(), sql, &keys).await?,
            }
            tx.commit().await?;
            total += keys.len() as u64;
            if keys.len() < filter.limit {
                break;
            }
            left -= keys.len();
        }
        Ok(total)
    }

    /// Removes what airtight's own tables remember of relays and events that are gone.
    async fn prune_own(&self, sql: &Sql) -> Result<()> {
        let mut tx = self.begin().await?;
        let relays = format!(
            "DELETE FROM airtight_relay WHERE outbox = {} AND expires_at < strftime('%Y-%m-%dT%H:%M:%fZ','now',?1)",
            sql.name()
        );
        sqlx::query(AssertSqlSafe(relays)).bind(before(RELAYS_KEPT)).execute(tx.conn()).await.map_err(db)?;
        if sql.side {
            let orphans = format!(
                "DELETE FROM airtight_side WHERE outbox = {} AND event NOT IN (SELECT CAST({} AS TEXT) FROM {} AS o)",
                sql.name(),
                sql.identity("o"),
                sql.spec.qualified()
            );
            sqlx::query(AssertSqlSafe(orphans)).execute(tx.conn()).await.map_err(db)?;
        }
        tx.commit().await
    }
}

/// Due now, as if never tried. The last error stays to be read until the next one, or success, replaces it.
async fn make_due(conn: &mut SqliteConnection, sql: &Sql, keys: &[RowKey]) -> Result<()> {
    let mut statements = sql.change(
        sql.role_new(),
        &[
            (RowField::Count, "0"),
            (RowField::LostLeases, "0"),
            (RowField::NextRetryAt, "NULL"),
            (RowField::ClaimToken, "NULL"),
            (RowField::LockedUntil, "NULL"),
            (RowField::FinishedAt, "NULL"),
            (RowField::Unknown, "0"),
        ],
    );
    if let Some(forget) = sql.forget() {
        statements.retain(|statement| statement.starts_with("UPDATE"));
        statements.push(forget);
    }
    run(conn, &statements, &items(keys), &[]).await
}

async fn delete(conn: &mut SqliteConnection, sql: &Sql, keys: &[RowKey]) -> Result<()> {
    let mut statements = vec![format!(
        "DELETE FROM {} WHERE {} IN (SELECT j.value->>'k' FROM json_each(?1) AS j)",
        sql.spec.qualified(),
        quote(&sql.spec.identity)
    )];
    statements.extend(sql.forget());
    run(conn, &statements, &items(keys), &[]).await
}

fn items(keys: &[RowKey]) -> Vec<Value> {
    keys.iter().map(|key| json!({"k": key_value(key)})).collect()
}
