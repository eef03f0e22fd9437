//! The tables of the model: rows, relays, partitions, and what each operation does to them in one transaction.
//!
//! The code is written to be read, not to be fast: a claim goes through the unfinished rows in seq order and decides row
//! by row, as the contract in `airtight_core::queue` says.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::Duration,
};

use airtight_core::{
    Backlog, Code, Error, Event, NewEvent, Order, Published, Result, Verdict,
    group::{self, GroupName, Member, Pulse, evicted},
    queue::{BadRow, ClaimRequest, Claimed, ClaimedRow, RowClaim, RowKey, SUSPECT_AFTER},
    state::State,
};
use time::OffsetDateTime;
use uuid::Uuid;

/// A moment on the store's own clock.
pub(super) type Now = Duration;

#[derive(Debug, Clone)]
pub(super) struct ModelRow {
    pub(super) event: Event,
    pub(super) max_attempts: Option<u32>,
    pub(super) state: State,
    pub(super) attempts: u32,
    pub(super) lost_leases: u32,
    /// When a retry is due; none for at once.
    pub(super) due: Option<Now>,
    /// Waits behind an earlier event of its key.
    pub(super) held: bool,
    /// Has failed or lost its relays before: others of its key may wait behind it.
    pub(super) waited: bool,
    pub(super) error: Option<Error>,
    token: Option<Uuid>,
    lease_until: Now,
    created_at: OffsetDateTime,
}

#[derive(Debug)]
struct Presence {
    member: Member,
    until: Now,
}

#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) rows: BTreeMap<i64, ModelRow>,
    /// Rows that are not done.
    open: BTreeSet<i64>,
    ids: HashMap<String, i64>,
    last_seq: i64,
    members: BTreeMap<Uuid, Presence>,
    owners: HashMap<GroupName, BTreeMap<u16, Uuid>>,
    /// What a caller did that the contract forbids.
    pub(super) violations: BTreeSet<String>,
}

impl ModelRow {
    pub(super) fn created_at(&self) -> OffsetDateTime {
        self.created_at
    }

    fn is_due(&self, now: Now) -> bool {
        self.due.is_none_or(|due| due <= now)
    }

    fn is_suspect(&self) -> bool {
        self.lost_leases >= SUSPECT_AFTER
    }

    fn is_finished(&self) -> bool {
        !matches!(self.state, State::Pending | State::Processing)
    }

    fn back_to_pending(&mut self) {
        self.state = State::Pending;
        self.token = None;
        self.attempts = self.attempts.saturating_sub(1);
    }

    /// A claim found it under a token that is void.
    fn lose(&mut self) {
        self.lost_leases += 1;
        if self.is_suspect() {
            self.back_to_pending();
            self.due = None;
            self.waited = true;
        }
    }
}

/// The partition of a key.
pub(crate) fn partition_of(key: &str, partitions: u16) -> u16 {
    group::partition_of(group::hash_of(key.as_bytes()), partitions)
}

fn reads(member: &Member, row: &ModelRow) -> bool {
    member.streams.is_empty() || member.streams.contains(&row.event.stream)
}

fn partition(member: &Member, row: &ModelRow) -> u16 {
    match member.order {
        Order::None | Order::Total => 0,
        Order::Key => partition_of(&row.event.aggregate_id, member.partitions),
    }
}

/// The key within which order is kept; with total order, one key for all events.
fn ordering_key(member: &Member, row: &ModelRow) -> String {
    if member.order == Order::Total { String::new() } else { row.event.aggregate_id.clone() }
}

impl Tables {
    // --- producers and operators ------------------------------------------------------------------------

    pub(super) fn draw(&mut self) -> i64 {
        self.last_seq += 1;
        self.last_seq
    }

    /// The seq under which an id is stored already.
    pub(super) fn seq_of(&self, id: &str) -> Option<i64> {
        self.ids.get(id).copied()
    }

    pub(super) fn insert(&mut self, seq: i64, id: String, new: &NewEvent) -> Published {
        if let Some(seq) = self.seq_of(&id) {
            return Published { id, seq, is_new: false };
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
        let row = ModelRow {
            event,
            max_attempts: new.max_attempts.and_then(|limit| u32::try_from(limit).ok()),
            state: State::Pending,
            attempts: 0,
            lost_leases: 0,
            due: None,
            held: false,
            waited: false,
            error: None,
            token: None,
            lease_until: Now::ZERO,
            created_at,
        };
        self.rows.insert(seq, row);
        self.open.insert(seq);
        self.ids.insert(id.clone(), seq);
        Published { id, seq, is_new: true }
    }

    pub(super) fn remove(&mut self, seq: i64) {
        if let Some(row) = self.rows.remove(&seq) {
            self.open.remove(&seq);
            self.ids.remove(&row.event.id);
        }
    }

    /// An operator's retry: from the first attempt, and free of the suspicion.
    pub(super) fn revive(&mut self, seq: i64) {
        if let Some(row) = self.rows.get_mut(&seq) {
            row.state = State::Pending;
            row.attempts = 0;
            row.lost_leases = 0;
            row.due = None;
            row.held = false;
            row.token = None;
            self.open.insert(seq);
        }
    }

    /// What an operator's UPDATE of the status alone does.
    pub(super) fn set_pending(&mut self, seq: i64) {
        if let Some(row) = self.rows.get_mut(&seq) {
            row.state = State::Pending;
            row.held = false;
            self.open.insert(seq);
        }
    }

    // --- relays -----------------------------------------------------------------------------------------

    pub(super) fn join(&mut self, member: &Member, now: Now) -> Result<()> {
        let shares = |other: &Member| {
            member.streams.is_empty()
                || other.streams.is_empty()
                || member.streams.iter().any(|stream| other.streams.contains(stream))
        };
        let rival = self
            .members
            .values()
            .find(|there| there.until > now && there.member.group != member.group && shares(&there.member));
        if let Some(rival) = rival {
            return Err(Error::permanent(
                Code::custom("overlapping_relays"),
                format!("`{}` shares streams with the live group `{}`", member.group, rival.member.group),
            ));
        }
        self.members.insert(member.id, Presence { member: member.clone(), until: now + member.lease });
        self.owners.entry(member.group.clone()).or_default();
        Ok(())
    }

    pub(super) fn heartbeat(&mut self, member: &Member, rows: &[RowClaim], now: Now) -> Pulse {
        let Some(presence) = self.members.get_mut(&member.id) else { return Pulse::default() };
        presence.until = now + member.lease;
        let mut lost = Vec::new();
        for claim in rows {
            match self.claimed(claim) {
                Some(row) => row.lease_until = now + member.lease,
                None => lost.push(claim.key.clone()),
            }
        }
        let members = self
            .members
            .values()
            .filter(|there| there.member.group == member.group && there.until > now)
            .map(|there| there.member.id)
            .collect();
        let owners = self.owners.get(&member.group).cloned().unwrap_or_default();
        Pulse { alive: true, members, owners, lost, peers: Vec::new() }
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

    pub(super) fn expire(&mut self, now: Now) {
        self.members.values_mut().for_each(|there| there.until = now);
        self.rows.values_mut().for_each(|row| row.lease_until = now);
    }

    pub(super) fn member_ids(&self) -> Vec<Uuid> {
        self.members.keys().copied().collect()
    }

    pub(super) fn live_members(&self, now: Now) -> Vec<(Member, Duration, u64)> {
        let live = self.members.values().filter(|there| there.until > now);
        live.map(|there| {
            let owners = self.owners.get(&there.member.group);
            let owned = owners.map_or(0, |o| o.values().filter(|owner| **owner == there.member.id).count());
            (there.member.clone(), there.until.saturating_sub(now), owned as u64)
        })
        .collect()
    }

    // --- the queue --------------------------------------------------------------------------------------

    /// The row, if the claim is still good.
    fn claimed(&mut self, claim: &RowClaim) -> Option<&mut ModelRow> {
        let RowKey::Int(seq) = claim.key else { return None };
        let row = self.rows.get_mut(&seq)?;
        (row.state == State::Processing && row.token == Some(claim.token)).then_some(row)
    }

    pub(super) fn claim(&mut self, request: &ClaimRequest<'_>, now: Now) -> Result<Claimed> {
        let member = request.member;
        if !self.members.contains_key(&member.id) {
            return Err(evicted());
        }
        self.check_partitions(request);
        let mut claimed = Claimed::default();
        let mut bytes = 0;
        let mut blocked: HashSet<String> = HashSet::new();
        for seq in self.open.iter().copied().collect::<Vec<_>>() {
            if claimed.rows.len() >= request.events || !claimed.overflow.is_empty() {
                break;
            }
            let row = self.rows.get_mut(&seq).expect("an open row exists");
            if !reads(member, row)
                || (member.order != Order::None && !request.partitions.contains(&partition(member, row)))
            {
                continue;
            }
            let ordering_key = ordering_key(member, row);
            let held_back = member.order != Order::None && blocked.contains(&ordering_key);
            if !Self::claimable(row, request, held_back, now, &mut claimed.suspects) {
                if Self::stands_in_the_way(row, request) {
                    blocked.insert(ordering_key);
                }
                continue;
            }
            if request.alone && !claimed.rows.is_empty() {
                break;
            }
            if row.state == State::Pending {
                row.attempts += 1;
            }
            row.state = State::Processing;
            row.token = Some(request.token);
            row.lease_until = now + member.lease;
            let size = row.event.payload.len();
            let read = size <= request.max_payload;
            if read && !claimed.rows.is_empty() && bytes + size > request.bytes {
                claimed.overflow.push(RowKey::Int(seq));
                break;
            }
            bytes += if read { size } else { 0 };
            claimed.rows.push(ClaimedRow {
                key: RowKey::Int(seq),
                partition: partition(member, row),
                attempt: row.attempts,
                max_attempts: row.max_attempts,
                lost_leases: row.lost_leases,
                waited: row.waited,
                event: if read { Ok(row.event.clone()) } else { Err(too_large(row)) },
            });
        }
        Ok(claimed)
    }

    /// Whether a claim may take the row; on the way, what is void becomes what it is now.
    fn claimable(
        row: &mut ModelRow,
        request: &ClaimRequest<'_>,
        held_back: bool,
        now: Now,
        suspects: &mut bool,
    ) -> bool {
        let ordered = request.member.order != Order::None;
        match row.state {
            State::Done | State::Dead | State::Unknown => false,
            State::Processing => {
                let ours = row.token.is_some_and(|token| request.tokens.contains(&token));
                let void = if ordered { !ours } else { row.lease_until <= now };
                if !void || request.alone {
                    return false;
                }
                row.lose();
                if held_back && row.state == State::Processing {
                    row.back_to_pending();
                }
                if held_back {
                    row.held = request.member.order == Order::Key;
                } else if row.is_suspect() {
                    *suspects = true;
                }
                row.state == State::Processing
            }
            State::Pending if held_back => {
                // Total order has no use for the mark: whoever is first holds back all others.
                row.held = request.member.order == Order::Key;
                false
            }
            State::Pending if row.held || !row.is_due(now) => false,
            State::Pending if row.is_suspect() => {
                *suspects = true;
                request.alone
            }
            State::Pending => !request.alone,
        }
    }

    /// Whether a row that was not claimed keeps the later rows of its key from being claimed.
    fn stands_in_the_way(row: &ModelRow, request: &ClaimRequest<'_>) -> bool {
        match row.state {
            State::Done => false,
            State::Dead | State::Unknown => request.member.block_on_dead,
            State::Processing => !row.token.is_some_and(|token| request.tokens.contains(&token)),
            State::Pending => true,
        }
    }

    fn check_partitions(&mut self, request: &ClaimRequest<'_>) {
        let member = request.member;
        let owners = self.owners.get(&member.group);
        for n in request.partitions {
            if owners.and_then(|owners| owners.get(n)) != Some(&member.id) {
                self.violations
                    .insert(format!("{} claims from partition {n}, which is not its own", member.id));
            }
        }
    }

    pub(super) fn settle(&mut self, rows: &[(RowClaim, &Verdict)], now: Now) -> Vec<bool> {
        rows.iter().map(|(claim, verdict)| self.settle_one(claim, verdict, now)).collect()
    }

    fn settle_one(&mut self, claim: &RowClaim, verdict: &Verdict, now: Now) -> bool {
        let Some(row) = self.claimed(claim) else { return false };
        row.token = None;
        match verdict {
            Verdict::Delivered | Verdict::SettledInTransaction => row.state = State::Done,
            Verdict::Retry { after, error } => {
                (row.state, row.due, row.waited) = (State::Pending, Some(now + *after), true);
                row.error = Some(error.clone());
            }
            Verdict::Away { after, error } => {
                row.back_to_pending();
                (row.due, row.waited) = (Some(now + *after), true);
                row.error = Some(error.clone());
            }
            Verdict::Dead { error } => {
                (row.state, row.waited, row.error) = (State::Dead, true, Some(error.clone()));
            }
            Verdict::Unknown { error } => {
                (row.state, row.waited, row.error) = (State::Unknown, true, Some(error.clone()));
            }
            Verdict::Released => {
                row.back_to_pending();
                row.due = None;
            }
        }
        if row.state == State::Done {
            let seq = row.event.seq;
            self.open.remove(&seq);
        }
        true
    }

    pub(super) fn unhold(&mut self, member: &Member, partitions: &[u16]) -> u64 {
        let mut blocked: HashSet<String> = HashSet::new();
        let mut freed = 0;
        for seq in &self.open {
            let row = self.rows.get_mut(seq).expect("an open row exists");
            if !reads(member, row) || !partitions.contains(&partition(member, row)) {
                continue;
            }
            let ordering_key = ordering_key(member, row);
            if row.held && !blocked.contains(&ordering_key) {
                row.held = false;
                freed += 1;
            }
            if row.waited && (!row.is_finished() || member.block_on_dead) {
                blocked.insert(ordering_key);
            }
        }
        freed
    }

    pub(super) fn backlog(&self, member: &Member) -> Backlog {
        let mut behind: HashSet<String> = HashSet::new();
        let mut backlog = Backlog::default();
        for row in self.open.iter().filter_map(|seq| self.rows.get(seq)).filter(|row| reads(member, row)) {
            let ordering_key = ordering_key(member, row);
            if row.is_finished() {
                if member.block_on_dead && member.order != Order::None {
                    behind.insert(ordering_key);
                }
                continue;
            }
            backlog.unfinished += 1;
            backlog.blocked += u64::from(row.state == State::Pending && behind.contains(&ordering_key));
        }
        backlog
    }
}

fn too_large(row: &ModelRow) -> BadRow {
    let size = row.event.payload.len();
    BadRow {
        id: row.event.id.clone(),
        key: Some(row.event.aggregate_id.clone()),
        error: Error::permanent(Code::TOO_LARGE, format!("the payload has {size} bytes")),
    }
}
