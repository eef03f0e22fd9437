//! The tables of the model: the log, its consumers, their parked events and relays, and what each operation does to
//! them in one transaction. The code is written to be read, not to be fast.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::Duration,
};

use airtight_core::{
    Backlog, Code, Error, Event, NewEvent, Op, Order, Payload, Published, Result,
    group::{GroupName, Member, Pulse},
    log::{
        Changes, ConsumerState, Due, Fate, LogRow, Park, ParkedRow, Read, ReadRequest, Replay, Revision,
        Standing, Start, behind_retention, unknown_consumer,
    },
    queue::BadRow,
};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::memory_queue::tables::partition_of;

/// A moment on the store's own clock.
pub(super) type Now = Duration;

/// A row of the log.
#[derive(Debug, Clone)]
pub(super) struct ModelRow {
    pub(super) event: Event,
    pub(super) created_at: OffsetDateTime,
    max_attempts: Option<u32>,
    /// Why it cannot be an event.
    pub(super) bad: Option<Error>,
}

/// A parked event, with the whole of its row.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) row: ModelRow,
    pub(super) attempts: u32,
    pub(super) state: Waits,
    pub(super) error: Option<Error>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Waits {
    Held,
    Until(Now),
    Dead,
    Unknown,
}

impl Waits {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Until(_) => "pending",
            Self::Dead => "dead",
            Self::Unknown => "unknown",
        }
    }

    pub(super) fn is_finished(self) -> bool {
        matches!(self, Self::Dead | Self::Unknown)
    }
}

#[derive(Debug)]
pub(super) struct ConsumerRow {
    pub(super) paused: bool,
    pub(super) revision: i64,
    pub(super) replay: Option<Replay>,
    /// The offset and the epoch of each partition.
    pub(super) partitions: Vec<(i64, i64)>,
    pub(super) parked: BTreeMap<i64, Entry>,
}

#[derive(Debug)]
pub(super) struct Presence {
    pub(super) member: Member,
    pub(super) until: Now,
}

#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) rows: BTreeMap<i64, ModelRow>,
    /// Drawn by transactions that are still open.
    open: BTreeSet<i64>,
    ids: HashMap<String, i64>,
    pub(super) last_seq: i64,
    /// Retention has removed everything up to here, the last of it published at this time.
    pub(super) floor: i64,
    pub(super) floor_at: Option<OffsetDateTime>,
    pub(super) consumers: BTreeMap<String, ConsumerRow>,
    pub(super) members: BTreeMap<Uuid, Presence>,
    pub(super) owners: HashMap<GroupName, BTreeMap<u16, Uuid>>,
    /// What a caller did that the contract forbids.
    pub(super) violations: BTreeSet<String>,
}

impl ModelRow {
    pub(super) fn key(&self) -> &str {
        &self.event.aggregate_id
    }

    fn partition(&self, partitions: u16) -> u16 {
        partition_of(self.key(), partitions)
    }

    fn to_log_row(&self, partitions: u16, max_payload: usize) -> LogRow {
        let bad = |error| BadRow { id: self.event.id.clone(), key: Some(self.key().to_owned()), error };
        let size = self.event.payload.len();
        let event = match &self.bad {
            Some(error) => Err(bad(error.clone())),
            None if size > max_payload => {
                Err(bad(Error::permanent(Code::TOO_LARGE, format!("the payload has {size} bytes"))))
            }
            None => Ok(self.event.clone()),
        };
        LogRow {
            seq: self.event.seq,
            partition: self.partition(partitions),
            max_attempts: self.max_attempts,
            event,
        }
    }
}

/// Whether another row fits in, which the first always does.
struct Bytes {
    left: usize,
    first: bool,
}

impl Bytes {
    fn fits(&mut self, row: &ModelRow, request: &ReadRequest<'_>) -> bool {
        let size = row.event.payload.len();
        let size = if size > request.max_payload { 0 } else { size };
        if !self.first && size > self.left {
            return false;
        }
        self.first = false;
        self.left = self.left.saturating_sub(size);
        true
    }
}

fn reads(member: &Member, row: &ModelRow) -> bool {
    member.streams.is_empty() || member.streams.contains(&row.event.stream)
}

impl Tables {
    // --- producers and retention ------------------------------------------------------------------------

    pub(super) fn draw(&mut self) -> i64 {
        self.last_seq += 1;
        self.open.insert(self.last_seq);
        self.last_seq
    }

    pub(super) fn close_hole(&mut self, seq: i64) {
        self.open.remove(&seq);
    }

    pub(super) fn insert(&mut self, seq: i64, id: String, new: &NewEvent) -> Published {
        self.close_hole(seq);
        if let Some(seq) = self.ids.get(&id) {
            return Published { id, seq: *seq, is_new: false };
        }
        let created_at = OffsetDateTime::now_utc();
        let event = Event {
            id: id.clone(),
            seq,
            stream: new.stream.clone(),
            event_type: new.event_type.clone(),
            aggregate_type: new.aggregate_type.clone(),
            aggregate_id: new.aggregate_id.clone(),
            op: new.op,
            payload: new.payload.clone(),
            headers: new.headers.clone(),
            occurred_at: new.occurred_at.unwrap_or(created_at),
            schema_version: new.schema_version,
            extra: serde_json::Map::new(),
            row: None,
        };
        let max_attempts = new.max_attempts.and_then(|limit| u32::try_from(limit).ok());
        self.rows.insert(seq, ModelRow { event, created_at, max_attempts, bad: None });
        self.ids.insert(id.clone(), seq);
        Published { id, seq, is_new: true }
    }

    pub(super) fn insert_bad(&mut self, key: &str) -> i64 {
        let seq = self.draw();
        let new =
            NewEvent { op: Op::Upsert, payload: Payload::None, ..NewEvent::new("s", "Bad", "Test", key) };
        self.insert(seq, Uuid::now_v7().to_string(), &new);
        if let Some(row) = self.rows.get_mut(&seq) {
            row.bad =
                Some(Error::permanent(Code::BAD_OP, "op must be `upsert` or `delete`, found `nonsense`"));
        }
        seq
    }

    pub(super) fn prune_through(&mut self, seq: i64) {
        let kept = self.rows.split_off(&(seq + 1));
        let gone = std::mem::replace(&mut self.rows, kept);
        if let Some((_, last)) = gone.last_key_value() {
            self.floor_at = Some(last.created_at);
        }
        self.floor = self.floor.max(seq);
        gone.values().for_each(|row| {
            self.ids.remove(&row.event.id);
        });
    }

    /// As far as it is certain what is there.
    pub(super) fn frontier(&self) -> i64 {
        self.open.first().map_or(self.last_seq, |hole| hole - 1)
    }

    // --- relays -----------------------------------------------------------------------------------------

    pub(super) fn attach(&mut self, member: &Member, start: Start, now: Now) -> Result<()> {
        let begin = match start {
            Start::Earliest => self.floor,
            Start::Latest => self.frontier(),
        };
        let count = usize::from(member.partitions);
        let consumer = self.consumers.entry(member.consumer().to_owned()).or_insert_with(|| ConsumerRow {
            paused: false,
            revision: 0,
            replay: None,
            partitions: vec![(begin, 0); count],
            parked: BTreeMap::new(),
        });
        let before = consumer.partitions.len();
        let other = |there: &Presence| there.member.group == member.group && there.member.id != member.id;
        // Those whose lease has run out must not come back.
        self.members.retain(|_, there| !other(there) || there.until > now);
        let reads = |member: &Member| (member.streams.clone(), member.order);
        let differs = |there: &Presence| before != count || reads(&there.member) != reads(member);
        if self.members.values().any(|there| other(there) && differs(there)) {
            return Err(Error::permanent(
                Code::OVERLAP,
                format!("relays work for `{}` that read otherwise ({before} partitions)", member.consumer()),
            ));
        }
        if before == count {
            return Ok(());
        }
        let smallest = consumer.partitions.iter().map(|(offset, _)| *offset).min().unwrap_or(begin);
        let epoch = consumer.partitions.iter().map(|(_, epoch)| *epoch).max().unwrap_or(0) + 1;
        consumer.partitions = vec![(smallest, epoch); count];
        self.owners.remove(&member.group);
        Ok(())
    }

    pub(super) fn join(&mut self, member: &Member, now: Now) {
        self.members.insert(member.id, Presence { member: member.clone(), until: now + member.lease });
    }

    pub(super) fn heartbeat(&mut self, member: &Member, now: Now) -> Pulse {
        let Some(presence) = self.members.get_mut(&member.id) else { return Pulse::default() };
        presence.until = now + member.lease;
        let there = self.members.values();
        let live = there.filter(|there| there.member.group == member.group && there.until > now);
        Pulse {
            alive: true,
            members: live.map(|there| there.member.id).collect(),
            owners: self.owners.get(&member.group).cloned().unwrap_or_default(),
            lost: Vec::new(),
            peers: Vec::new(),
        }
    }

    pub(super) fn take(&mut self, member: &Member, wanted: &[u16], now: Now) -> Vec<u16> {
        let gone = |there: &Presence| there.member.group == member.group && there.until <= now;
        self.members.retain(|_, there| !gone(there));
        if !self.members.contains_key(&member.id) {
            return Vec::new();
        }
        let owners = self.owners.entry(member.group.clone()).or_default();
        owners.retain(|_, owner| self.members.contains_key(owner));
        let free: Vec<u16> = wanted.iter().copied().filter(|n| !owners.contains_key(n)).collect();
        owners.extend(free.iter().map(|n| (*n, member.id)));
        if let Some(consumer) = self.consumers.get_mut(member.consumer()) {
            for n in &free {
                consumer.partitions[usize::from(*n)].1 += 1;
            }
        }
        free
    }

    pub(super) fn give(&mut self, member: &Member, partitions: &[u16]) {
        if let Some(owners) = self.owners.get_mut(&member.group) {
            owners.retain(|n, owner| *owner != member.id || !partitions.contains(n));
        }
    }

    pub(super) fn leave(&mut self, member: Uuid) {
        self.members.remove(&member);
        for owners in self.owners.values_mut() {
            owners.retain(|_, owner| *owner != member);
        }
    }

    pub(super) fn evict_all(&mut self) {
        self.members.clear();
        self.owners.clear();
    }

    pub(super) fn expire(&mut self, now: Now) {
        self.members.values_mut().for_each(|there| there.until = now);
    }

    fn owns(&self, member: &Member, partition: u16) -> bool {
        self.owners.get(&member.group).and_then(|owners| owners.get(&partition)) == Some(&member.id)
    }

    // --- consumers --------------------------------------------------------------------------------------

    pub(super) fn consumer(&self, name: &str) -> Result<&ConsumerRow> {
        self.consumers.get(name).ok_or_else(|| self.unknown(name))
    }

    pub(super) fn consumer_mut(&mut self, name: &str) -> Result<&mut ConsumerRow> {
        let error = self.unknown(name);
        self.consumers.get_mut(name).ok_or(error)
    }

    fn unknown(&self, name: &str) -> Error {
        unknown_consumer(name, &self.consumers.keys().cloned().collect::<Vec<_>>())
    }

    pub(super) fn offsets(&self, consumer: &str) -> Vec<i64> {
        let consumer = self.consumers.get(consumer);
        consumer.map_or_else(Vec::new, |row| row.partitions.iter().map(|(offset, _)| *offset).collect())
    }

    pub(super) fn parked_of(&self, consumer: &str) -> impl Iterator<Item = &Entry> {
        self.consumers.get(consumer).into_iter().flat_map(|consumer| consumer.parked.values())
    }

    pub(super) fn positions(&self, member: &Member, partitions: &[u16]) -> Result<Vec<Standing>> {
        let consumer = self.consumer(member.consumer())?;
        let mut standings = Vec::new();
        for n in partitions.iter().copied().filter(|n| self.owns(member, *n)) {
            let (offset, epoch) = consumer.partitions[usize::from(n)];
            if offset < self.floor {
                return Err(behind_retention(member.consumer(), offset, self.floor));
            }
            let own = || consumer.parked.values().filter(|e| e.row.partition(member.partitions) == n);
            let waits = |entry: &&Entry| !entry.state.is_finished() || member.block_on_dead;
            standings.push(Standing {
                partition: n,
                epoch,
                offset,
                waiting: own().filter(waits).map(|entry| entry.row.key().to_owned()).collect(),
                parked: own().map(|entry| entry.row.event.seq).filter(|seq| *seq > offset).collect(),
                replay: consumer.replay,
            });
        }
        Ok(standings)
    }

    pub(super) fn consumer_state(&self, member: &Member) -> Result<ConsumerState> {
        let consumer = self.consumer(member.consumer())?;
        Ok(ConsumerState { paused: consumer.paused, revision: Revision::At(consumer.revision) })
    }

    // --- reading ----------------------------------------------------------------------------------------

    fn check_floor(&self, request: &ReadRequest<'_>, after: i64) -> Result<()> {
        if after < self.floor {
            return Err(behind_retention(request.member.consumer(), after, self.floor));
        }
        Ok(())
    }

    pub(super) fn read(&self, request: &ReadRequest<'_>) -> Result<Read> {
        self.check_floor(request, request.after)?;
        let member = request.member;
        let frontier = self.frontier();
        let mut read = Read { through: request.after, ..Read::default() };
        let mut bytes = Bytes { left: request.bytes, first: true };
        for (looked, (seq, row)) in self.rows.range(request.after + 1..).enumerate() {
            if *seq > frontier {
                read.blocked = true;
                break;
            }
            let wanted = reads(member, row) && request.partitions.contains(&row.partition(member.partitions));
            if looked >= request.events || (wanted && !bytes.fits(row, request)) {
                read.more = true;
                return Ok(read);
            }
            if wanted {
                read.rows.push(row.to_log_row(member.partitions, request.max_payload));
            }
            read.through = *seq;
        }
        read.through = read.through.max(frontier);
        Ok(read)
    }

    pub(super) fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>> {
        let mut bytes = Bytes { left: request.bytes, first: true };
        let mut rows = Vec::new();
        for seq in seqs {
            let Some(row) = self.rows.get(seq) else {
                return Err(behind_retention(request.member.consumer(), seq - 1, self.floor));
            };
            if rows.len() >= request.events || !bytes.fits(row, request) {
                break;
            }
            rows.push(row.to_log_row(request.member.partitions, request.max_payload));
        }
        Ok(rows)
    }

    pub(super) fn due(&self, request: &ReadRequest<'_>, except: &[i64], now: Now) -> Due {
        let member = request.member;
        let mut due = Due::default();
        let mut bytes = Bytes { left: request.bytes, first: true };
        // Keys of which one that is not due was passed, and keys of which one that is.
        let (mut blocked, mut heads) = (HashSet::new(), HashSet::new());
        for entry in self.parked_of(member.consumer()) {
            let (seq, key) = (entry.row.event.seq, entry.row.key());
            if !request.partitions.contains(&entry.row.partition(member.partitions))
                || (request.member.by_key() && blocked.contains(key))
            {
                continue;
            }
            let ready = match entry.state {
                Waits::Dead | Waits::Unknown => {
                    if request.member.block_on_dead {
                        blocked.insert(key);
                    }
                    continue;
                }
                Waits::Held => !request.member.by_key() || heads.contains(key),
                Waits::Until(at) => at <= now,
            };
            if !ready || except.contains(&seq) {
                if let Waits::Until(at) = entry.state
                    && !except.contains(&seq)
                {
                    let wait = at.saturating_sub(now);
                    due.next_in = Some(due.next_in.map_or(wait, |next| next.min(wait)));
                }
                blocked.insert(key);
                continue;
            }
            if due.rows.len() >= request.events || !bytes.fits(&entry.row, request) {
                break;
            }
            heads.insert(key);
            let row = entry.row.to_log_row(member.partitions, request.max_payload);
            due.rows.push(ParkedRow { row, attempts: entry.attempts });
        }
        due
    }

    // --- settling ---------------------------------------------------------------------------------------

    pub(super) fn settle(&mut self, member: &Member, changes: &Changes, now: Now) -> Result<Vec<u16>> {
        self.check_changes(changes);
        let consumer = self.consumer(member.consumer())?;
        let (mut refused, mut moves) = (Vec::new(), Vec::new());
        for change in &changes.moves {
            let (offset, epoch) = consumer.partitions[usize::from(change.partition)];
            let good = self.owns(member, change.partition)
                && epoch == change.epoch
                && (offset == change.from || offset == change.to);
            if good { moves.push(*change) } else { refused.push(change.partition) }
        }
        let good = |park: &&Park| moves.iter().any(|change| change.partition == park.partition);
        let mut parks = Vec::new();
        for park in changes.park.iter().filter(good) {
            let there = consumer.parked.get(&park.seq).map(|entry| entry.row.clone());
            let Some(row) = there.or_else(|| self.rows.get(&park.seq).cloned()) else {
                return Err(behind_retention(member.consumer(), park.seq - 1, self.floor));
            };
            parks.push((park, row));
        }
        let consumer = self.consumer_mut(member.consumer())?;
        for (park, row) in parks {
            let entry = Entry { row, attempts: 0, state: Waits::Held, error: None };
            let entry = consumer.parked.entry(park.seq).or_insert(entry);
            entry.end(park, now);
        }
        for park in changes.parked.iter().filter(good) {
            if let Fate::Delivered = park.fate {
                consumer.parked.remove(&park.seq);
            } else if let Some(entry) = consumer.parked.get_mut(&park.seq) {
                entry.end(park, now);
            }
        }
        for change in &moves {
            consumer.partitions[usize::from(change.partition)].0 = change.to;
        }
        if member.by_key() {
            self.unhold(member, None, now);
        }
        Ok(refused)
    }

    fn check_changes(&mut self, changes: &Changes) {
        let partitions: BTreeSet<u16> = changes.moves.iter().map(|change| change.partition).collect();
        if partitions.len() < changes.moves.len() {
            self.violations.insert("a partition moves twice in one settle".into());
        }
        if changes.moves.iter().any(|change| change.to < change.from) {
            self.violations.insert("an offset moves back".into());
        }
        let mut parks = changes.park.iter().chain(&changes.parked);
        if parks.any(|park| !partitions.contains(&park.partition)) {
            self.violations.insert("a change to a partition that is not fenced".into());
        }
        let seqs: HashSet<i64> = changes.park.iter().map(|park| park.seq).collect();
        if seqs.len() < changes.park.len() {
            self.violations.insert("an event is parked twice in one settle".into());
        }
    }

    pub(super) fn unhold(&mut self, member: &Member, partitions: Option<&[u16]>, now: Now) -> u64 {
        let Some(consumer) = self.consumers.get_mut(member.consumer()) else { return 0 };
        let mut waiting = HashSet::new();
        let mut freed = 0;
        for entry in consumer.parked.values_mut() {
            let wanted = partitions.is_none_or(|n| n.contains(&entry.row.partition(member.partitions)));
            if wanted && entry.state == Waits::Held && !waiting.contains(entry.row.key()) {
                entry.state = Waits::Until(now);
                freed += 1;
            }
            if !entry.state.is_finished() || member.block_on_dead {
                waiting.insert(entry.row.key().to_owned());
            }
        }
        freed
    }

    pub(super) fn backlog(&self, member: &Member) -> Backlog {
        let Some(consumer) = self.consumers.get(member.consumer()) else { return Backlog::default() };
        let ordering_key = |row: &ModelRow| match member.order {
            Order::Total => String::new(),
            Order::Key | Order::None => row.key().to_owned(),
        };
        let blocks = member.block_on_dead && member.order != Order::None;
        let finished = consumer.parked.values().filter(|entry| entry.state.is_finished() && blocks);
        let behind: HashSet<String> = finished.map(|entry| ordering_key(&entry.row)).collect();
        let fresh = self.rows.values().filter(|row| {
            let n = usize::from(row.partition(member.partitions));
            let ahead = consumer.partitions.get(n).is_some_and(|(offset, _)| row.event.seq > *offset);
            ahead && reads(member, row) && !consumer.parked.contains_key(&row.event.seq)
        });
        let parked = consumer.parked.values().filter(|entry| !entry.state.is_finished());
        let mut backlog = Backlog::default();
        for row in parked.map(|entry| &entry.row).chain(fresh) {
            backlog.unfinished += 1;
            backlog.blocked += u64::from(behind.contains(&ordering_key(row)));
        }
        backlog
    }
}

impl Entry {
    /// Takes in what became of it.
    fn end(&mut self, park: &Park, now: Now) {
        let (state, error) = match &park.fate {
            // It may be there already, from a try whose answer was lost; Delivered is dealt with elsewhere.
            Fate::Held | Fate::Delivered => return,
            Fate::Retry { after, error } => (Waits::Until(now + *after), error),
            Fate::Dead { error } => (Waits::Dead, error),
            Fate::Unknown { error } => (Waits::Unknown, error),
        };
        (self.state, self.attempts, self.error) = (state, park.attempts, Some(error.clone()));
    }
}
