//! Settling: what is written about a reader's position, and when.
//!
//! A position without parked events can wait a little: if it is lost, events are delivered again, and nothing else happens.
//! So moves of the position are collected and written a few times a second, together with the rows to mark. Parked events
//! are written immediately. While no events arrive from the outbox, the position follows the rest of the WAL, but not at
//! every small step, because writing the position produces WAL itself.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use airtight_core::{
    Backoff, Code, Error, Result,
    event::MAX_PAYLOAD_BYTES,
    group::Member,
    log::{Changes, Fate, LogRow, Park, Standing},
};

use super::{
    Lsn, Shared,
    feed::Boundary,
    state::{self, Parking, Write, Written},
};

/// How long moves are gathered.
const GATHER: Duration = Duration::from_millis(100);

/// The same in rows to mark.
const ROWS: usize = 4_000;

/// An idle position moves after so much WAL, though not more often than this.
const IDLE: (u64, Duration) = (1 << 20, Duration::from_secs(1));

/// After less it takes its time. It moves on all the same: the server lets go of WAL only when a position behind its
/// own record of what runs is acknowledged, and that record is small.
const QUIET: Duration = Duration::from_secs(2);

/// How often to check whether a commit is visible, and for how long.
const VISIBLE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(30));

/// Waits between tries to write in the background.
const AGAIN: Backoff =
    Backoff { base: Duration::from_millis(200), multiplier: 2.0, cap: Duration::from_secs(10), jitter: 0.2 };

/// How far a reader is.
#[derive(Debug)]
pub(super) struct Progress {
    /// None while the reader is not ours.
    epoch: Option<i64>,
    /// Everything up to here is settled: as stored, and as it is.
    stored: i64,
    to: i64,
    stored_lsn: Lsn,
    /// What was in the WAL after an idle position was written: that much is our own doing, and no reason to write.
    own_end: Lsn,
    /// The `to` of a write whose answer did not come: it may be what is stored.
    tried: Option<i64>,
    /// Rows to mark as delivered.
    delivered: Vec<String>,
    /// Events beyond `to` that were parked: they are not delivered when it passes them.
    parked: HashSet<i64>,
    written_at: Instant,
    /// A write was refused: another relay has the reader.
    fenced: bool,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            epoch: None,
            stored: 0,
            to: 0,
            tried: None,
            stored_lsn: Lsn(0),
            own_end: Lsn(0),
            delivered: Vec::new(),
            parked: HashSet::new(),
            written_at: Instant::now(),
            fenced: false,
        }
    }
}

impl Progress {
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

    /// Whether this is the progress as it was taken with this epoch, and still ours.
    pub(super) fn is_under(&self, epoch: i64) -> bool {
        self.epoch == Some(epoch) && !self.fenced
    }

    /// Whether a write was refused: another relay has the reader, or the server was set back.
    pub(super) fn is_fenced(&self) -> bool {
        self.fenced
    }

    pub(super) fn settled(&self) -> i64 {
        self.to
    }

    /// What it means that everything up to `to` is settled, some of it by being parked.
    fn step(&self, shared: &Shared, to: i64, park: &[Park]) -> Step {
        let marks = shared.marks().is_some();
        let mut step = Step { to: to.max(self.to), delivered: Vec::new(), parked: self.parked.clone() };
        step.parked.extend(park.iter().map(|park| park.seq).filter(|seq| *seq > self.to));
        let feed = shared.feed();
        for seq in self.to + 1..=to {
            if step.parked.remove(&seq) || !marks {
                continue;
            }
            let values = feed.get(seq).and_then(super::Raw::values);
            if let Some((mapping, values)) = values
                && let Some(identity) = mapping.identity(&values)
            {
                step.delivered.push(String::from_utf8_lossy(identity).into_owned());
            }
        }
        step
    }

    fn pass(&mut self, step: Step) {
        self.to = step.to;
        self.delivered.extend(step.delivered);
        self.parked = step.parked;
    }

    /// Whether a settle is to be tried again, behind whose back nothing is written.
    fn is_settling(&self) -> bool {
        self.tried.is_some_and(|tried| tried > self.to)
    }

    fn is_due(&self, shared: &Shared) -> bool {
        self.written_at.elapsed() >= GATHER
            || self.delivered.len() >= ROWS
            || shared.feed().bytes() * 2 > shared.options.buffer_bytes
    }

    /// Whether the position has moved far enough without an event to be written.
    fn is_idle_due(&self, position: Boundary) -> bool {
        let moved = position.lsn.since(self.stored_lsn);
        let waited = self.written_at.elapsed();
        (moved >= IDLE.0 && waited >= IDLE.1)
            || (position.lsn > self.own_end.max(self.stored_lsn) && waited >= QUIET)
    }
}

/// A move of the position.
struct Step {
    to: i64,
    delivered: Vec<String>,
    parked: HashSet<i64>,
}

/// Applies changes. Returns the partition if it is no longer ours.
pub(super) async fn settle(shared: &Shared, member: &Member, changes: &Changes) -> Result<Vec<u16>> {
    const REFUSED: [u16; 1] = [0];
    let Some(change) = changes.moves.first() else { return Ok(Vec::new()) };
    let mut progress = shared.progress.lock().await;
    if progress.fenced || progress.epoch != Some(change.epoch) {
        return Ok(REFUSED.to_vec());
    }
    let step = progress.step(shared, change.to, &changes.park);
    if !changes.park.is_empty() || !changes.parked.is_empty() {
        // The position passes them when they are parked, and not before: other calls write it, too.
        let accepted = write(shared, member, &mut progress, Some((step, changes))).await?;
        return Ok(if accepted { Vec::new() } else { REFUSED.to_vec() });
    }
    progress.pass(step);
    if !progress.is_due(shared) {
        shared.pending.notify_one();
        return Ok(Vec::new());
    }
    let accepted = write(shared, member, &mut progress, None).await?;
    Ok(if accepted { Vec::new() } else { REFUSED.to_vec() })
}

/// Writes what was gathered.
pub(super) async fn flush(shared: &Shared, member: &Member) -> Result<()> {
    let mut progress = shared.progress.lock().await;
    if progress.epoch.is_none() || progress.fenced || progress.is_settling() || !shared.life().begun {
        return Ok(());
    }
    let position = shared.feed().position(progress.to);
    if progress.to > progress.stored || !progress.delivered.is_empty() || position.lsn > progress.stored_lsn {
        write(shared, member, &mut progress, None).await?;
    }
    Ok(())
}

/// Writes in the background, for as long as the session lasts.
pub(super) async fn keep(shared: Arc<Shared>, member: Member) {
    let mut failures = 0;
    loop {
        tokio::select! {
            () = shared.pending.notified() => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(IDLE.1) => {}
        }
        let written = async {
            let mut progress = shared.progress.lock().await;
            if progress.epoch.is_none() || progress.fenced || progress.is_settling() || !shared.life().begun {
                return Ok(true);
            }
            let position = shared.feed().position(progress.to);
            // Right after the snapshot the first position is stored, whatever it is.
            let first = progress.stored_lsn == Lsn(0) && position.lsn > Lsn(0);
            let moved = progress.to > progress.stored || !progress.delivered.is_empty();
            if moved || first {
                return write(&shared, &member, &mut progress, None).await;
            }
            if progress.is_idle_due(position) {
                let accepted = write(&shared, &member, &mut progress, None).await?;
                progress.own_end = super::current_lsn(&shared.outbox).await?;
                return Ok(accepted);
            }
            Ok(true)
        };
        match written.await {
            Ok(_) => failures = 0,
            Err(error) => {
                // What was gathered is still there.
                failures += 1;
                let wait = AGAIN.after(failures);
                tracing::warn!(
                    slot = member.consumer(), code = error.code(), %error,
                    "could not store the position; trying again in {wait:.1?}"
                );
                tokio::time::sleep(wait).await;
                shared.pending.notify_one();
            }
        }
    }
}

/// Writes everything there is, and a step beyond it. Nothing is forgotten, and nothing passed, before it is stored.
async fn write(
    shared: &Shared,
    member: &Member,
    progress: &mut Progress,
    settle: Option<(Step, &Changes)>,
) -> Result<bool> {
    let c = shared.columns()?;
    let (step, changes) = settle.map_or((None, None), |(step, changes)| (Some(step), Some(changes)));
    let to = step.as_ref().map_or(progress.to, |step| step.to);
    let more = step.as_ref().map_or(&[][..], |step| &step.delivered);
    let delivered: Vec<String> = progress.delivered.iter().chain(more).cloned().collect();
    let (mut park, mut dead) = (Vec::new(), Vec::new());
    let (position, caught_up) = {
        let feed = shared.feed();
        for one in changes.map_or(&[][..], |changes| &changes.park) {
            let (row, identity) = parked(shared, feed.get(one.seq)).ok_or_else(|| {
                Error::retryable(Code::MOVED, "the reader was moved; continuing at its new position")
            })?;
            let fate = match &one.fate {
                Fate::Dead { error } => Some((error, false)),
                Fate::Unknown { error } => Some((error, true)),
                Fate::Delivered | Fate::Held | Fate::Retry { .. } => None,
            };
            if let (Some((error, unknown)), Some(identity)) = (fate, &identity) {
                dead.push((identity.clone(), error, unknown));
            }
            park.push(Parking { park: one, row, identity });
        }
        (feed.position(to), feed.last() <= to && !feed.is_open())
    };
    let write = Write {
        epoch: progress.epoch.unwrap_or_default(),
        from: progress.stored,
        is_uncertain: progress.tried.is_some(),
        to,
        position,
        stored_lsn: progress.stored_lsn,
        caught_up,
        park,
        parked: changes.map_or(Vec::new(), |changes| changes.parked.iter().collect()),
        delivered: &delivered,
        dead,
        changes,
        contents: shared.contents()?,
    };
    if !delivered.is_empty() || !write.dead.is_empty() {
        let transactions = shared.feed().transactions(progress.stored, to);
        wait_for(shared, transactions).await?;
    }
    progress.tried = progress.tried.max(Some(to));
    let written = state::write(&shared.outbox, c, shared.marks(), member, &write).await?;
    progress.written_at = Instant::now();
    match written {
        Written::Stored => {}
        Written::Fenced => {
            progress.fenced = true;
            shared.arrived.notify_one();
            return Ok(false);
        }
        Written::Changed => {
            // Said by the session, too, which then ends: there may be nothing left to settle.
            shared.look.notify_one();
            shared.verify(member.consumer()).await?;
            return Err(Error::retryable(
                Code::PUBLICATION_CHANGED,
                "the publication was changed, but the stream misses nothing; storing the position again",
            ));
        }
    }
    if let Some(step) = step {
        progress.pass(step);
    }
    progress.tried = None;
    progress.delivered.clear();
    progress.stored = to;
    progress.stored_lsn = progress.stored_lsn.max(position.lsn);
    shared.feed().settle(to, position);
    shared.room.notify_waiters();
    if position.lsn > *shared.acked.borrow() {
        shared.acked.send_replace(position.lsn);
    }
    Ok(true)
}

/// Waits until others can see what these transactions have written. The WAL shows a commit before the server does: for
/// a moment the row of an event that was delivered already is not there to be marked.
async fn wait_for(shared: &Shared, transactions: HashSet<u32>) -> Result<()> {
    let end = Instant::now() + VISIBLE.1;
    while state::are_running(&shared.outbox, &transactions).await? {
        if Instant::now() >= end {
            return Err(Error::retryable(
                Code::SERVER_ERROR,
                "a committed transaction has not become visible yet",
            ));
        }
        tokio::time::sleep(VISIBLE.0).await;
    }
    Ok(())
}

/// An event to be parked, and what tells its row apart.
fn parked(shared: &Shared, raw: Option<&super::Raw>) -> Option<(LogRow, Option<String>)> {
    let raw = raw?;
    // What was rejected for its size is kept all the same, as far as it can be.
    let row = shared.event(raw, MAX_PAYLOAD_BYTES.max(shared.options.log.read.max_payload))?;
    let identity = raw
        .values()
        .and_then(|(mapping, values)| Some(String::from_utf8_lossy(mapping.identity(&values)?).into_owned()));
    Some((row, identity))
}
