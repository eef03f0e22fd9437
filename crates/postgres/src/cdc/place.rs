//! Settling: what is written about a reader's place, and when.
//!
//! A position that is only a number can wait a little: what is lost with it is delivered again. So moves are gathered
//! and written a few times a second, together with the rows to mark; what is parked is written at once. Where nothing
//! comes from the outbox, the place moves on with the rest of the WAL, but not for every little bit of it: writing it
//! down is WAL itself.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use airtight_core::{
    Error, Result,
    event::MAX_PAYLOAD_BYTES,
    group::Member,
    log::{Changes, Fate, Standing},
    queue::BadRow,
};

use super::{
    Lsn, Shared,
    feed::Boundary,
    state::{self, Write},
};

/// How long moves are gathered.
const GATHER: Duration = Duration::from_millis(100);

/// The same in rows to mark.
const ROWS: usize = 4_000;

/// An idle place moves on after so much WAL, though not more often than this.
const IDLE: (u64, Duration) = (1 << 20, Duration::from_secs(1));

/// After less it takes its time. It moves on all the same: the server lets go of WAL only when a place behind its
/// own record of what runs is acknowledged, and that record is small.
const QUIET: Duration = Duration::from_secs(1);

/// Where a reader is.
#[derive(Debug)]
pub(super) struct Place {
    /// None while the reader is not ours.
    epoch: Option<i64>,
    /// Everything up to here is settled: as stored, and as it is.
    stored: i64,
    to: i64,
    stored_lsn: Lsn,
    /// What was in the WAL after an idle place was written: that much is our own doing, and no reason to write.
    own_end: Lsn,
    /// Rows to mark as delivered.
    delivered: Vec<String>,
    /// Events beyond `to` that were parked: they are not delivered when it passes them.
    parked: HashSet<i64>,
    written_at: Instant,
    /// A write was refused: somebody else has the reader.
    fenced: bool,
}

impl Default for Place {
    fn default() -> Self {
        Self {
            epoch: None,
            stored: 0,
            to: 0,
            stored_lsn: Lsn(0),
            own_end: Lsn(0),
            delivered: Vec::new(),
            parked: HashSet::new(),
            written_at: Instant::now(),
            fenced: false,
        }
    }
}

impl Place {
    pub(super) fn new(standing: &Standing) -> Self {
        Self {
            epoch: Some(standing.epoch),
            stored: standing.offset,
            to: standing.offset,
            parked: standing.parked.iter().copied().collect(),
            ..Self::default()
        }
    }

    pub(super) fn epoch(&self) -> Option<i64> {
        self.epoch
    }

    /// Whether this is the place as it was taken with this epoch, and still ours.
    pub(super) fn is_under(&self, epoch: i64) -> bool {
        self.epoch == Some(epoch) && !self.fenced
    }

    pub(super) fn settled(&self) -> i64 {
        self.to
    }

    /// Takes note that everything up to `to` is settled.
    fn pass(&mut self, shared: &Shared, to: i64) {
        let marks = shared.marks().is_some();
        let feed = shared.feed();
        for seq in self.to + 1..=to {
            if self.parked.remove(&seq) || !marks {
                continue;
            }
            let values = feed.get(seq).and_then(super::Raw::values);
            if let Some((mapping, values)) = values
                && let Some(identity) = mapping.identity(&values)
            {
                self.delivered.push(String::from_utf8_lossy(identity).into_owned());
            }
        }
        self.to = self.to.max(to);
    }

    fn is_due(&self, shared: &Shared) -> bool {
        self.written_at.elapsed() >= GATHER
            || self.delivered.len() >= ROWS
            || shared.feed().bytes() * 2 > shared.options.buffer_bytes
    }

    /// Whether the place has moved on enough without any event to be written down.
    fn is_idle_due(&self, position: Boundary) -> bool {
        let moved = position.lsn.since(self.stored_lsn);
        let waited = self.written_at.elapsed();
        (moved >= IDLE.0 && waited >= IDLE.1)
            || (position.lsn > self.own_end.max(self.stored_lsn) && waited >= QUIET)
    }
}

/// Applies changes. Returns the partition if it is no longer ours.
pub(super) async fn settle(shared: &Shared, member: &Member, changes: &Changes) -> Result<Vec<u16>> {
    const REFUSED: [u16; 1] = [0];
    let Some(change) = changes.moves.first() else { return Ok(Vec::new()) };
    let mut place = shared.place.lock().await;
    if place.fenced || place.epoch != Some(change.epoch) {
        return Ok(REFUSED.to_vec());
    }
    place.parked.extend(changes.park.iter().map(|park| park.seq));
    place.pass(shared, change.to);
    let parks = !changes.park.is_empty() || !changes.parked.is_empty();
    if !parks && !place.is_due(shared) {
        shared.pending.notify_one();
        return Ok(Vec::new());
    }
    let accepted = write(shared, member, &mut place, Some(changes)).await?;
    Ok(if accepted { Vec::new() } else { REFUSED.to_vec() })
}

/// Writes what was gathered.
pub(super) async fn flush(shared: &Shared, member: &Member) -> Result<()> {
    let mut place = shared.place.lock().await;
    if place.epoch.is_none() || place.fenced || !shared.life().begun {
        return Ok(());
    }
    let position = shared.feed().position(place.to);
    if place.to > place.stored || !place.delivered.is_empty() || position.lsn > place.stored_lsn {
        write(shared, member, &mut place, None).await?;
    }
    Ok(())
}

/// Writes in the background, for as long as the session lasts.
pub(super) async fn keep(shared: Arc<Shared>, member: Member) {
    loop {
        tokio::select! {
            () = shared.pending.notified() => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(IDLE.1) => {}
        }
        let written = async {
            let mut place = shared.place.lock().await;
            if place.epoch.is_none() || place.fenced || !shared.life().begun {
                return Ok(true);
            }
            let position = shared.feed().position(place.to);
            // Right after the snapshot the first position is stored, whatever it is.
            let first = place.stored_lsn == Lsn(0) && position.lsn > Lsn(0);
            let moved = place.to > place.stored || !place.delivered.is_empty();
            if moved || first {
                return write(&shared, &member, &mut place, None).await;
            }
            if place.is_idle_due(position) {
                let accepted = write(&shared, &member, &mut place, None).await?;
                place.own_end = super::current_lsn(&shared.outbox).await?;
                return Ok(accepted);
            }
            Ok(true)
        };
        if let Err(error) = written.await {
            // What was gathered is still there.
            tracing::warn!(slot = member.consumer(), %error, "could not store the position; trying again");
            shared.pending.notify_one();
        }
    }
}

/// Writes everything there is. Nothing is forgotten before it is stored.
async fn write(
    shared: &Shared,
    member: &Member,
    place: &mut Place,
    changes: Option<&Changes>,
) -> Result<bool> {
    let c = shared.columns()?;
    let (position, caught_up, events, identities) = {
        let feed = shared.feed();
        let mut events = HashMap::new();
        let mut identities: HashMap<i64, String> = HashMap::new();
        for park in changes.map_or(&[][..], |changes| &changes.park) {
            let Some(raw) = feed.get(park.seq) else { continue };
            // What was rejected for its size is kept all the same, as far as it can be.
            let row = shared.event(raw, MAX_PAYLOAD_BYTES.max(shared.options.log.max_payload));
            if let Some((mapping, values)) = raw.values()
                && let Some(identity) = mapping.identity(&values)
            {
                identities.insert(park.seq, String::from_utf8_lossy(identity).into_owned());
            }
            events.insert(park.seq, row.map(|row| row.event));
        }
        let caught_up = feed.last() <= place.to && !feed.is_open();
        (feed.position(place.to), caught_up, events, identities)
    };
    let mut park = Vec::new();
    let mut dead = Vec::new();
    for one in changes.map_or(&[][..], |changes| &changes.park) {
        let event = match events.get(&one.seq) {
            Some(Some(Ok(event))) => Ok(event.clone()),
            Some(Some(Err(bad))) => {
                Err(BadRow { id: bad.id.clone(), key: bad.key.clone(), error: bad.error.clone() })
            }
            _ => return Err(Error::retryable("moved", "the reader was moved; taking it up again")),
        };
        let fate = match &one.fate {
            Fate::Dead { error } => Some((error, false)),
            Fate::Unknown { error } => Some((error, true)),
            Fate::Delivered | Fate::Held | Fate::Retry { .. } => None,
        };
        if let (Some((error, unknown)), Some(identity)) = (fate, identities.get(&one.seq)) {
            dead.push((identity.clone(), error, unknown));
        }
        park.push((one, event));
    }
    let write = Write {
        epoch: place.epoch.unwrap_or_default(),
        from: place.stored,
        to: place.to,
        position,
        caught_up,
        park,
        parked: changes.map_or(Vec::new(), |changes| changes.parked.iter().collect()),
        delivered: &place.delivered,
        dead,
        changes,
    };
    let accepted = state::write(&shared.outbox, c, shared.marks(), member, &write).await?;
    place.written_at = Instant::now();
    if !accepted {
        place.fenced = true;
        shared.arrived.notify_one();
        return Ok(false);
    }
    place.delivered.clear();
    place.stored = place.to;
    place.stored_lsn = place.stored_lsn.max(position.lsn);
    shared.feed().settle(place.to, position);
    shared.room.notify_waiters();
    if position.lsn > *shared.acked.borrow() {
        shared.acked.send_replace(position.lsn);
    }
    Ok(true)
}
