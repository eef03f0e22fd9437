//! The operator's side of the model.

use std::time::Duration;

use airtight_core::{
    Code, Error, Result,
    admin::{Detail, EventRow},
    log::{
        Consumer, Instance, LogAdmin, Parked, ParkedFilter, PartitionOffset, Pruned, Replay, Retention, Seek,
        SeekOptions, SeekTo, check_offset,
    },
};
use async_trait::async_trait;
use time::OffsetDateTime;

use super::{
    MemoryLogStore,
    tables::{ConsumerRow, Entry, Tables, Waits},
};

impl MemoryLogStore {
    fn to_row(&self, entry: &Entry) -> EventRow {
        let event = &entry.row.event;
        let next_retry_at = match entry.state {
            Waits::Until(at) => {
                let (now, wall) = (self.now(), OffsetDateTime::now_utc());
                Some(if at >= now { wall + (at - now) } else { wall - (now - at) })
            }
            _ => None,
        };
        EventRow {
            seq: event.seq,
            id: event.id.clone(),
            stream: event.stream.clone(),
            event_type: event.event_type.clone(),
            aggregate_type: event.aggregate_type.clone(),
            aggregate_id: event.aggregate_id.clone(),
            state: if entry.state == Waits::Held { "pending" } else { entry.state.word() }.into(),
            attempts: entry.attempts,
            lost_leases: 0,
            next_retry_at,
            held: entry.state == Waits::Held,
            error_code: entry.error.as_ref().map(|error| error.code().to_owned()),
            error_message: entry.error.as_ref().map(|error| error.to_string()),
            created_at: Some(entry.row.created_at),
        }
    }

    /// Acts on the dead ones of the filter, and on unknown ones that it names.
    fn act(&self, filter: &ParkedFilter, act: impl Fn(&mut ConsumerRow, i64, Duration)) -> Result<u64> {
        let now = self.now();
        let mut tables = self.tables();
        if let Some(name) = &filter.consumer {
            tables.consumer(name)?;
        }
        let mut acted = 0;
        for (name, consumer) in &mut tables.consumers {
            let decided = |entry: &&Entry| match entry.state {
                Waits::Dead => true,
                Waits::Unknown => filter.seqs.contains(&entry.row.event.seq),
                Waits::Held | Waits::Until(_) => {
                    entry.error.as_ref().is_some_and(|error| Error::is_away_code(error.code()))
                        && filter.seqs.contains(&entry.row.event.seq)
                }
            };
            let found = consumer.parked.values().filter(|entry| matches(filter, name, entry)).filter(decided);
            let seqs: Vec<i64> = found.map(|entry| entry.row.event.seq).collect();
            if !seqs.is_empty() {
                consumer.revision += 1;
            }
            acted += seqs.len() as u64;
            seqs.into_iter().for_each(|seq| act(consumer, seq, now));
        }
        drop(tables);
        self.database.published.notify_waiters();
        Ok(acted)
    }

    fn describe(&self, tables: &Tables, name: &str, consumer: &ConsumerRow) -> Consumer {
        let (now, wall) = (self.now(), OffsetDateTime::now_utc());
        let offset = smallest(consumer);
        let left = || tables.rows.range(offset + 1..).map(|(_, row)| row);
        let group = airtight_core::group::GroupName::log(name);
        let owners = tables.owners.get(&group).cloned().unwrap_or_default();
        let live = tables.members.values().filter(|there| there.member.group == group && there.until > now);
        let instances = live.map(|there| Instance {
            id: there.member.id.to_string(),
            host: there.member.host.clone(),
            partitions: owners.values().filter(|owner| **owner == there.member.id).count() as u64,
            lease_seconds: there.until.saturating_sub(now).as_secs_f64(),
        });
        let offsets =
            consumer.partitions.iter().zip(0u16..).map(|((offset, _), partition)| PartitionOffset {
                partition,
                offset: *offset,
                owner: owners.get(&partition).map(ToString::to_string),
            });
        let count = |wanted: fn(Waits) -> bool| {
            consumer.parked.values().filter(|entry| wanted(entry.state)).count() as u64
        };
        Consumer {
            name: name.to_owned(),
            partitions: u16::try_from(consumer.partitions.len()).unwrap_or(u16::MAX),
            paused: consumer.paused,
            offset,
            end: end(tables),
            lag_events: left().count() as u64,
            lag_seconds: left().next().map_or(0.0, |row| (wall - row.created_at).as_seconds_f64().max(0.0)),
            behind_retention: offset < tables.floor,
            retrying: count(|state| !state.is_finished()),
            dead: count(|state| state == Waits::Dead),
            unknown: count(|state| state == Waits::Unknown),
            waits_for: Vec::new(),
            instances: instances.collect(),
            offsets: offsets.collect(),
        }
    }
}

fn smallest(consumer: &ConsumerRow) -> i64 {
    consumer.partitions.iter().map(|(offset, _)| *offset).min().unwrap_or(0)
}

fn end(tables: &Tables) -> i64 {
    tables.rows.last_key_value().map_or(tables.floor, |(seq, _)| *seq)
}

fn matches(filter: &ParkedFilter, consumer: &str, entry: &Entry) -> bool {
    let is = |wanted: &Option<String>, value: &str| wanted.as_deref().is_none_or(|wanted| wanted == value);
    let event = &entry.row.event;
    is(&filter.consumer, consumer)
        && (filter.seqs.is_empty() || filter.seqs.contains(&event.seq))
        && (!filter.dead_only || entry.state.is_finished())
        && is(&filter.stream, &event.stream)
        && is(&filter.event_type, &event.event_type)
        && is(&filter.aggregate_id, &event.aggregate_id)
        && is(&filter.error_code, entry.error.as_ref().map_or("", |error| error.code()))
        && filter.after_seq.is_none_or(|after| event.seq > after)
}

/// The offset that is meant.
fn target(tables: &Tables, to: SeekTo) -> Result<i64> {
    match to {
        SeekTo::Seq(seq) => {
            check_offset(seq, tables.floor, end(tables))?;
            Ok(seq)
        }
        SeekTo::Time(at) => {
            if tables.floor_at.is_some_and(|floor_at| at <= floor_at) {
                check_offset(tables.floor - 1, tables.floor, end(tables))?;
            }
            let first = tables.rows.values().find(|row| row.created_at >= at);
            Ok(first.map_or_else(|| tables.frontier(), |row| (row.event.seq - 1).min(tables.frontier())))
        }
        SeekTo::Earliest => Ok(tables.floor),
        SeekTo::Latest => Ok(tables.frontier()),
    }
}

#[async_trait]
impl LogAdmin for MemoryLogStore {
    async fn consumers(&self) -> Result<Vec<Consumer>> {
        let tables = self.tables();
        let all = tables.consumers.iter();
        Ok(all.map(|(name, consumer)| self.describe(&tables, name, consumer)).collect())
    }

    async fn seek(&self, name: &str, to: SeekTo, options: SeekOptions) -> Result<Seek> {
        let mut tables = self.tables();
        let consumer = tables.consumer(name)?;
        let to = target(&tables, to)?;
        let count = u16::try_from(consumer.partitions.len()).unwrap_or(u16::MAX);
        let (mut again, mut skipped) = (0, 0);
        for (seq, row) in &tables.rows {
            let partition = crate::memory_queue::tables::partition_of(row.key(), count);
            let offset = consumer.partitions[usize::from(partition)].0;
            again += u64::from(*seq > to && *seq <= offset);
            skipped += u64::from(*seq > offset && *seq <= to);
        }
        let seek = Seek {
            consumer: name.to_owned(),
            from: smallest(consumer),
            to,
            again,
            skipped,
            parked_dropped: consumer.parked.range(to + 1..).count() as u64,
            forgotten: 0,
        };
        if !options.dry_run {
            let through = tables.last_seq;
            let consumer = tables.consumer_mut(name)?;
            if consumer.partitions.iter().any(|(offset, _)| to < *offset) {
                let after = consumer.replay.map_or(to, |before| before.after.min(to));
                let id = consumer.replay.map_or(1, |before| before.id + 1);
                consumer.replay = Some(Replay { id, after, through });
            }
            consumer.parked.retain(|seq, _| *seq <= to);
            consumer.partitions.iter_mut().for_each(|(offset, epoch)| {
                (*offset, *epoch) = (to, *epoch + 1);
            });
            // Relays that have nothing to settle hear of it by this.
            consumer.revision += 1;
        }
        drop(tables);
        self.database.published.notify_waiters();
        Ok(seek)
    }

    async fn pause(&self, consumer: &str, paused: bool) -> Result<()> {
        self.tables().consumer_mut(consumer)?.paused = paused;
        Ok(())
    }

    async fn remove(&self, consumer: &str) -> Result<()> {
        let now = self.now();
        let mut tables = self.tables();
        tables.consumer(consumer)?;
        let works = |there: &super::tables::Presence| {
            there.member.consumer() == consumer && there.member.is_consumer() && there.until > now
        };
        if tables.members.values().any(works) {
            return Err(airtight_core::Error::permanent(
                Code::custom("consumer_in_use"),
                format!("a relay works for `{consumer}`: stop it first"),
            ));
        }
        tables.consumers.remove(consumer);
        Ok(())
    }

    async fn lag(&self, consumer: &str) -> Result<u64> {
        let tables = self.tables();
        let offset = smallest(tables.consumer(consumer)?);
        Ok(tables.last_seq.abs_diff(offset))
    }

    async fn parked(&self, filter: &ParkedFilter) -> Result<Vec<Parked>> {
        let tables = self.tables();
        if let Some(name) = &filter.consumer {
            tables.consumer(name)?;
        }
        let mut parked = Vec::new();
        for (name, consumer) in &tables.consumers {
            let found = consumer.parked.values().filter(|entry| matches(filter, name, entry));
            parked.extend(found.map(|entry| Parked { consumer: name.clone(), row: self.to_row(entry) }));
        }
        parked.sort_by_key(|parked| parked.row.seq);
        parked.truncate(if filter.limit == 0 { 50 } else { filter.limit });
        Ok(parked)
    }

    async fn show_parked(&self, consumer: &str, seq: i64) -> Result<Option<Detail>> {
        let tables = self.tables();
        let entry = tables.consumer(consumer)?.parked.get(&seq);
        Ok(entry.map(|entry| {
            let event = match &entry.row.bad {
                None => Ok(entry.row.event.clone()),
                Some(error) => Err(error.to_string()),
            };
            Detail { row: self.to_row(entry), event }
        }))
    }

    async fn retry_parked(&self, filter: &ParkedFilter) -> Result<u64> {
        self.act(filter, |consumer, seq, now| {
            if let Some(entry) = consumer.parked.get_mut(&seq) {
                (entry.state, entry.attempts) = (Waits::Until(now), 0);
            }
        })
    }

    async fn discard_parked(&self, filter: &ParkedFilter) -> Result<u64> {
        self.act(filter, |consumer, seq, _| {
            consumer.parked.remove(&seq);
        })
    }

    async fn prune_log(&self, retention: Retention, progress: &(dyn Fn(u64) + Sync)) -> Result<Pruned> {
        let mut tables = self.tables();
        let (through, mut pruned) = prunable(&tables, retention);
        if pruned.events > 0 {
            tables.prune_through(through);
        }
        progress(pruned.events);
        pruned.floor = tables.floor;
        Ok(pruned)
    }

    async fn prunable(&self, retention: Retention) -> Result<Pruned> {
        Ok(prunable(&self.tables(), retention).1)
    }

    async fn prune_inbox(&self, _keep: Duration) -> Result<u64> {
        Ok(0)
    }
}

/// Up to where events may go, and what that would remove.
fn prunable(tables: &Tables, retention: Retention) -> (i64, Pruned) {
    let limit = OffsetDateTime::now_utc() - retention.keep;
    let young = tables.rows.values().find(|row| row.created_at > limit);
    let mut through = young.map_or(end(tables), |row| row.event.seq - 1).min(tables.frontier());
    let mut held_by = None;
    let slowest = tables.consumers.iter().min_by_key(|(_, consumer)| smallest(consumer));
    if let Some((name, consumer)) = slowest
        && retention.wait_for_consumers
        && smallest(consumer) < through
    {
        through = smallest(consumer);
        held_by = Some(name.clone());
    }
    let events = tables.rows.range(..=through).count() as u64;
    (through, Pruned { events, partitions: 0, floor: tables.floor, held_by })
}
