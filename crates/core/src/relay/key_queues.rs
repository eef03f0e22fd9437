//! Events that were fetched and wait to be delivered, in queues: one queue per key, one for all events, or none.
//!
//! A queue is busy while one of its events is being delivered, and a busy queue hands out nothing more. This alone keeps
//! the order inside one relay.

use std::{collections::VecDeque, hash::BuildHasher};

use crate::Order;
use crate::{
    Delivery, Ownership,
    hash::{Map, Seed},
};

/// The hash of a key, which identifies its queue. Two keys with the same hash share a queue; this costs a little
/// concurrency and nothing else.
pub(super) type KeyHash = u64;

#[derive(Debug)]
pub(super) struct Queued {
    pub(super) delivery: Delivery,
    /// The hash of its key; see [`KeyQueues::hash_of`].
    pub(super) key_hash: Option<KeyHash>,
    pub(super) ownership: Ownership,
    pub(super) size: usize,
}

#[derive(Debug, Default)]
struct KeyQueue {
    waiting: VecDeque<Queued>,
    busy: bool,
}

#[derive(Debug)]
pub(super) struct KeyQueues {
    order: Order,
    seed: Seed,
    queues: Map<KeyHash, KeyQueue>,
    /// Queues that are not busy and not empty, in the order in which they became ready.
    ready: VecDeque<KeyHash>,
    /// All events, if no order is kept: then there are no queues per key.
    free: VecDeque<Queued>,
}

impl KeyQueues {
    pub(super) fn new(order: Order) -> Self {
        Self {
            order,
            seed: Seed::default(),
            queues: Map::default(),
            ready: VecDeque::new(),
            free: VecDeque::new(),
        }
    }

    /// Which queue a key belongs to; none if no order is kept.
    pub(super) fn hash_of(&self, key: &str) -> Option<KeyHash> {
        match self.order {
            Order::None => None,
            Order::Key => Some(self.seed.hash_one(key)),
            Order::Total => Some(0),
        }
    }

    pub(super) fn push(&mut self, queued: Queued) {
        let Some(key_hash) = queued.key_hash else {
            self.free.push_back(queued);
            return;
        };
        let queue = self.queues.entry(key_hash).or_default();
        if !queue.busy && queue.waiting.is_empty() {
            self.ready.push_back(key_hash);
        }
        queue.waiting.push_back(queued);
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.free.is_empty() || !self.ready.is_empty()
    }

    /// Takes a batch within the bounds, but always at least one event, and makes its queues busy. With `prefix`, a queue
    /// may hand out several events at once, in order.
    pub(super) fn take(&mut self, events: usize, bytes: usize, prefix: bool) -> Vec<Queued> {
        let mut batch: Vec<Queued> = Vec::new();
        let mut size = 0;
        let mut fits = |batch: &[Queued], next: &Queued| {
            let fits = batch.is_empty() || (batch.len() < events && size + next.size <= bytes);
            size += if fits { next.size } else { 0 };
            fits
        };
        while self.free.front().is_some_and(|next| fits(&batch, next)) {
            batch.extend(self.free.pop_front());
        }
        while let Some(&key_hash) = self.ready.front() {
            let Some(queue) = self.queues.get_mut(&key_hash) else {
                self.ready.pop_front();
                continue;
            };
            if !queue.waiting.front().is_some_and(|next| fits(&batch, next)) {
                break;
            }
            self.ready.pop_front();
            queue.busy = true;
            batch.extend(queue.waiting.pop_front());
            while prefix && queue.waiting.front().is_some_and(|next| fits(&batch, next)) {
                batch.extend(queue.waiting.pop_front());
            }
        }
        batch
    }

    /// Records that no event of the queue is being delivered any more.
    pub(super) fn finish(&mut self, key_hash: KeyHash) {
        let Some(queue) = self.queues.get_mut(&key_hash) else { return };
        if !std::mem::take(&mut queue.busy) {
            return;
        }
        if queue.waiting.is_empty() {
            self.queues.remove(&key_hash);
        } else {
            self.ready.push_back(key_hash);
        }
    }

    /// Removes the waiting events of one queue.
    pub(super) fn clear_key(&mut self, key_hash: KeyHash) -> Vec<Queued> {
        self.queues.get_mut(&key_hash).map(|queue| queue.waiting.drain(..).collect()).unwrap_or_default()
    }

    /// Removes all waiting events; busy queues stay busy.
    pub(super) fn clear(&mut self) -> Vec<Queued> {
        self.ready.clear();
        let mut all: Vec<Queued> = self.free.drain(..).collect();
        self.queues.retain(|_, queue| {
            all.extend(queue.waiting.drain(..));
            queue.busy
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Position, event::sample_event};
    use proptest::prelude::*;

    fn queued(queues: &KeyQueues, seq: i64, key: &str) -> Queued {
        let delivery = Delivery {
            event: sample_event(seq, key),
            position: Position(seq.cast_unsigned()),
            attempt: 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        };
        Queued { delivery, key_hash: queues.hash_of(key), ownership: Ownership::forever(), size: 10 }
    }

    proptest! {
        /// Pushes, takes and finishes in any order: no key is ever taken while it is out, and each key comes
        /// out in the order it went in, complete.
        #[test]
        fn a_key_is_never_out_twice_and_never_out_of_order(
            keys in proptest::collection::vec(0u8..5, 1..60),
            takes in proptest::collection::vec((1usize..6, any::<bool>()), 1..200),
            prefix in any::<bool>(),
        ) {
            let mut queues = KeyQueues::new(Order::Key);
            let mut out: Vec<Vec<Queued>> = Vec::new();
            let mut seen: Map<String, Vec<i64>> = Map::default();
            let mut pushed = 0;
            let mut step = |queues: &mut KeyQueues, out: &mut Vec<Vec<Queued>>, size: usize, finish: bool| {
                if finish && !out.is_empty() {
                    for done in out.remove(0) {
                        if let Some(key_hash) = done.key_hash { queues.finish(key_hash); }
                    }
                }
                let batch = queues.take(size, 1_000, prefix);
                for queued in &batch {
                    let key = &queued.delivery.event.aggregate_id;
                    assert!(!out.iter().flatten().any(|q| q.delivery.event.aggregate_id == *key));
                    seen.entry(key.clone()).or_default().push(queued.delivery.event.seq);
                }
                if !batch.is_empty() { out.push(batch); }
            };
            for (size, finish) in takes {
                if pushed < keys.len() {
                    let next = queued(&queues, i64::try_from(pushed).unwrap(), &keys[pushed].to_string());
                    queues.push(next);
                    pushed += 1;
                }
                step(&mut queues, &mut out, size, finish);
            }
            for _ in 0..pushed * 2 { step(&mut queues, &mut out, 10, true); }
            let total: usize = seen.values().map(Vec::len).sum();
            prop_assert_eq!(total, pushed);
            for order in seen.values() { prop_assert!(order.is_sorted()); }
        }
    }

    #[test]
    fn bounds_hold_but_one_event_always_fits() {
        let mut queues = KeyQueues::new(Order::None);
        (0..10).for_each(|n| queues.push(queued(&queues, n, "k")));
        assert_eq!(queues.take(3, 1_000, false).len(), 3);
        assert_eq!(queues.take(10, 25, false).len(), 2);
        assert_eq!(queues.take(10, 1, false).len(), 1);
        assert_eq!(queues.clear().len(), 4);
    }
}
