//! The operator's side of the model.

use std::collections::BTreeMap;

use airtight_core::{
    Error, NewEvent, Published, Result,
    admin::{
        Acted, Admin, AwayStatus, BlockedKey, Detail, EventRow, Filter, Finding, Prune, RelayStatus, Removed,
        Status, StreamStatus,
    },
    state::State,
};
use async_trait::async_trait;
use time::OffsetDateTime;

use super::{MemoryStore, tables};

impl MemoryStore {
    fn to_row(&self, row: &tables::ModelRow) -> EventRow {
        let now = self.now();
        let event = &row.event;
        let next_retry_at = row.due.filter(|_| row.state == State::Pending).map(|due| {
            let wall = OffsetDateTime::now_utc();
            if due >= now { wall + (due - now) } else { wall - (now - due) }
        });
        EventRow {
            seq: event.seq,
            id: event.id.clone(),
            stream: event.stream.clone(),
            event_type: event.event_type.clone(),
            aggregate_type: event.aggregate_type.clone(),
            aggregate_id: event.aggregate_id.clone(),
            state: row.state.as_str().into(),
            attempts: row.attempts,
            lost_leases: row.lost_leases,
            next_retry_at,
            held: row.held,
            error_code: row.error.as_ref().map(|error| error.code().to_owned()),
            error_message: row.error.as_ref().map(|error| error.to_string()),
            created_at: Some(row.created_at()),
        }
    }

    /// Seqs of the dead events of a filter; unknown ones are never among them.
    fn dead(&self, filter: &Filter) -> Vec<i64> {
        let tables = self.tables();
        let dead = tables.rows.values().filter(|row| row.state == State::Dead && matches(filter, row));
        dead.map(|row| row.event.seq).collect()
    }

    fn act(
        &self,
        id: &str,
        allowed: impl Fn(State) -> bool,
        act: impl Fn(&mut tables::Tables, i64),
    ) -> Acted {
        let mut tables = self.tables();
        let Some(seq) = tables.seq_of(id).or_else(|| id.parse().ok()) else { return Acted::NotFound };
        let Some(row) = tables.rows.get(&seq) else { return Acted::NotFound };
        if !allowed(row.state) {
            return Acted::Refused(row.state);
        }
        act(&mut tables, seq);
        drop(tables);
        self.database.published.notify_waiters();
        Acted::Yes
    }
}

fn matches(filter: &Filter, row: &tables::ModelRow) -> bool {
    let is = |wanted: &Option<String>, value: &str| wanted.as_deref().is_none_or(|wanted| wanted == value);
    is(&filter.stream, &row.event.stream)
        && is(&filter.event_type, &row.event.event_type)
        && is(&filter.aggregate_id, &row.event.aggregate_id)
        && is(&filter.error_code, row.error.as_ref().map_or("", |error| error.code()))
        && filter.after_seq.is_none_or(|after| row.event.seq > after)
        && (filter.states.is_empty() || filter.states.contains(&row.state))
}

#[async_trait]
impl Admin for MemoryStore {
    async fn migrate(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        Ok(Vec::new())
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Published>> {
        events.iter().try_for_each(NewEvent::validate)?;
        Ok(MemoryStore::publish(self, events))
    }

    async fn status(&self) -> Result<Status> {
        let blocked_keys = self.blocked(usize::MAX).await?.len() as u64;
        let now = self.now();
        let wall = OffsetDateTime::now_utc();
        let tables = self.tables();
        let mut streams: BTreeMap<String, StreamStatus> = BTreeMap::new();
        for row in tables.rows.values() {
            let name = row.event.stream.clone();
            let status = streams.entry(name.clone()).or_default();
            status.stream = name;
            let count = match row.state {
                State::Pending if row.held || row.waited => &mut status.retrying,
                State::Pending => &mut status.pending,
                State::Processing => &mut status.processing,
                State::Done => &mut status.done,
                State::Dead => &mut status.dead,
                State::Unknown => &mut status.unknown,
            };
            *count += 1;
            if matches!(row.state, State::Pending | State::Processing) {
                let age = (wall - row.created_at()).as_seconds_f64().max(0.0);
                status.oldest_pending_seconds = Some(status.oldest_pending_seconds.unwrap_or(0.0).max(age));
            }
        }
        let relays = tables.live_members(now).into_iter().map(|(member, left, partitions)| RelayStatus {
            id: member.id.to_string(),
            host: member.host,
            streams: member.streams,
            order: member.order.as_str().into(),
            partitions,
            lease_seconds: left.as_secs_f64(),
        });
        let relays = relays.collect();
        let mut away: BTreeMap<String, AwayStatus> = BTreeMap::new();
        for row in tables.rows.values().filter(|row| row.state == State::Pending) {
            let Some(error) = row.error.as_ref().filter(|error| Error::is_away_code(error.code())) else {
                continue;
            };
            let status = away.entry(error.to_string()).or_default();
            (status.code, status.message) = (error.code().to_owned(), error.to_string());
            status.events += 1;
        }
        Ok(Status {
            away: away.into_values().collect(),
            slots: Vec::new(),
            outbox: "memory".into(),
            streams: streams.into_values().collect(),
            relays,
            blocked_keys,
            consumers: Vec::new(),
        })
    }

    async fn list(&self, filter: &Filter) -> Result<Vec<EventRow>> {
        let tables = self.tables();
        let mut rows: Vec<EventRow> =
            tables.rows.values().filter(|row| matches(filter, row)).map(|row| self.to_row(row)).collect();
        if filter.newest_first {
            rows.reverse();
        }
        rows.truncate(if filter.limit == 0 { 50 } else { filter.limit });
        Ok(rows)
    }

    async fn show(&self, id: &str) -> Result<Option<Detail>> {
        let tables = self.tables();
        let seq = tables.seq_of(id).or_else(|| id.parse().ok());
        let row = seq.and_then(|seq| tables.rows.get(&seq));
        Ok(row.map(|row| Detail { row: self.to_row(row), event: Ok(row.event.clone()) }))
    }

    async fn retry(&self, id: &str) -> Result<Acted> {
        Ok(self.act(id, State::can_retry, tables::Tables::revive))
    }

    async fn retry_dead(&self, filter: &Filter) -> Result<u64> {
        let dead = self.dead(filter);
        dead.iter().for_each(|seq| self.tables().revive(*seq));
        self.database.published.notify_waiters();
        Ok(dead.len() as u64)
    }

    async fn discard(&self, id: &str) -> Result<Acted> {
        let allowed = |state| !matches!(state, State::Processing | State::Done);
        Ok(self.act(id, allowed, tables::Tables::remove))
    }

    async fn discard_dead(&self, filter: &Filter) -> Result<u64> {
        let dead = self.dead(filter);
        dead.iter().for_each(|seq| self.tables().remove(*seq));
        self.database.published.notify_waiters();
        Ok(dead.len() as u64)
    }

    async fn prune(&self, what: Prune, progress: &(dyn Fn(u64) + Sync)) -> Result<Removed> {
        let mut tables = self.tables();
        let limit = OffsetDateTime::now_utc() - what.keep;
        let old = tables.rows.values().filter(|row| row.state == State::Done && row.created_at() <= limit);
        let old: Vec<i64> = old.map(|row| row.event.seq).collect();
        if !what.dry_run {
            old.iter().for_each(|seq| tables.remove(*seq));
            progress(old.len() as u64);
        }
        Ok(Removed { events: old.len() as u64, column: "created_at".into() })
    }

    async fn blocked(&self, limit: usize) -> Result<Vec<BlockedKey>> {
        let tables = self.tables();
        let mut heads: BTreeMap<&str, BlockedKey> = BTreeMap::new();
        for row in tables.rows.values() {
            let key = row.event.aggregate_id.as_str();
            if row.held {
                if let Some(blocked) = heads.get_mut(key) {
                    blocked.held += 1;
                }
            } else if row.waited && row.state != State::Done {
                heads.entry(key).or_insert_with(|| BlockedKey {
                    aggregate_id: key.to_owned(),
                    behind_id: row.event.id.clone(),
                    behind_state: row.state.as_str().to_owned(),
                    held: 0,
                });
            }
        }
        Ok(heads.into_values().filter(|blocked| blocked.held > 0).take(limit).collect())
    }
}
