//! One partition: which of its events are where, and how far it is settled.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Instant,
};

use airtight_core::Ownership;

use super::message::{Origin, Raw};

/// The group has no offset in this partition yet: any is further.
pub(super) const NEVER: i64 = -1;

/// The hash of a key. Two keys that collide wait for each other, which costs nothing else.
pub(super) type Key = u64;

/// An event that is not settled.
pub(super) struct Open {
    pub(super) raw: Arc<Raw>,
    pub(super) origin: Origin,
    pub(super) size: usize,
    /// Attempts that failed.
    pub(super) attempts: u32,
    /// Known once it was decoded.
    pub(super) key: Option<Key>,
    /// It was written to the topic that its verdict sends it to.
    pub(super) is_sent: bool,
}

pub(super) struct Partition {
    /// New for each time it is taken up.
    pub(super) load: u64,
    pub(super) ownership: Ownership,
    pub(super) is_retry: bool,
    /// It goes to another member: nothing more is handed out.
    pub(super) is_leaving: bool,
    pub(super) is_paused: bool,
    /// Read too far past its first unsettled event; until half of that is settled.
    pub(super) is_too_far: bool,
    /// Behind the last message that was read.
    pub(super) next_offset: i64,
    pub(super) committed: i64,
    pub(super) open: BTreeMap<i64, Open>,
    pub(super) ready: BTreeSet<i64>,
    pub(super) out: BTreeSet<i64>,
    pub(super) waiting: BTreeSet<(Instant, i64)>,
    /// Events that failed and are not finished, by key: they hold back what comes later.
    pub(super) blockers: HashMap<Key, BTreeSet<i64>>,
    pub(super) behind: HashMap<Key, BTreeSet<i64>>,
}

impl Partition {
    /// One that is read from `offset` on. `committed` is what the broker has, or none for a group that is new there.
    pub(super) fn new(
        load: u64,
        is_retry: bool,
        offset: i64,
        committed: Option<i64>,
        ownership: Ownership,
    ) -> Self {
        Self {
            load,
            ownership,
            is_retry,
            is_leaving: false,
            is_paused: false,
            is_too_far: false,
            next_offset: offset,
            committed: committed.unwrap_or(NEVER),
            open: BTreeMap::new(),
            ready: BTreeSet::new(),
            out: BTreeSet::new(),
            waiting: BTreeSet::new(),
            blockers: HashMap::new(),
            behind: HashMap::new(),
        }
    }

    /// What may be committed: everything before it is settled.
    pub(super) fn offset(&self) -> i64 {
        self.open.first_key_value().map_or(self.next_offset, |(offset, _)| *offset)
    }

    pub(super) fn is_blocked(&self, key: Key, offset: i64) -> bool {
        self.blockers.get(&key).and_then(BTreeSet::first).is_some_and(|first| *first < offset)
    }

    /// What is due becomes ready.
    pub(super) fn wake(&mut self, now: Instant) {
        while let Some((due, offset)) = self.waiting.first().copied().filter(|(due, _)| *due <= now) {
            self.waiting.remove(&(due, offset));
            self.ready.insert(offset);
        }
    }

    /// It no longer holds back others of its key; another one that failed may.
    pub(super) fn unblock(&mut self, key: Key, offset: i64) {
        let Some(blockers) = self.blockers.get_mut(&key) else { return };
        blockers.remove(&offset);
        let first = blockers.first().copied();
        if first.is_none() {
            self.blockers.remove(&key);
        }
        if let Some(behind) = self.behind.get_mut(&key) {
            let still = first.map(|first| behind.split_off(&(first + 1))).unwrap_or_default();
            self.ready.append(behind);
            *behind = still;
            if behind.is_empty() {
                self.behind.remove(&key);
            }
        }
    }
}

/// How much is held, and whether that is too much; until half of it is gone.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Buffer {
    pub(super) events: usize,
    pub(super) bytes: usize,
    pub(super) is_full: bool,
}

impl Buffer {
    pub(super) fn add(&mut self, size: usize) {
        self.events += 1;
        self.bytes += size;
    }

    pub(super) fn remove(&mut self, size: usize) {
        self.events -= 1;
        self.bytes -= size;
    }

    pub(super) fn judge(&mut self, max_events: usize, max_bytes: usize) -> bool {
        let share = if self.is_full { 2 } else { 1 };
        self.is_full = self.events >= (max_events / share).max(1) || self.bytes >= (max_bytes / share).max(1);
        self.is_full
    }
}
