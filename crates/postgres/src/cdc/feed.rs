//! Events that were read from the WAL, or from the table at first, and are not settled yet. This module does no I/O.
//!
//! Events are numbered in the order of the stream. The relay and the parked events use these numbers. They are the same
//! every time the stream is read, because they count from a stored [`Boundary`]. A boundary says: after the event of this
//! number, everything in the WAL up to this position is complete. Only boundaries are acknowledged, and only when every
//! event up to them is settled.
//!
//! Events stay here until they are settled, as slices of the network buffers in which they arrived. An event that is given
//! back is read again from here, and an event that fails is parked from here. The feed is bounded by the bytes of its events.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use airtight_core::{Code, Error, Result};
use bytes::Bytes;

use super::{Lsn, pgoutput::Tuple, row::Mapping};

/// What an event costs here besides its bytes.
const OVERHEAD: usize = 128;

/// A position between two transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Boundary {
    /// The event before it.
    pub(crate) seq: i64,
    /// Everything up to here is complete.
    pub(crate) lsn: Lsn,
    /// When that was, in microseconds since 2000.
    pub(crate) time: i64,
    /// The transaction before it; none for rows of the table.
    pub(crate) xid: u32,
}

/// An event as it came.
#[derive(Debug, Clone)]
pub(crate) enum Raw {
    /// An inserted row.
    Tuple(Arc<Mapping>, Tuple),
    /// A row of the table.
    Values(Arc<Mapping>, Vec<Option<Bytes>>),
    /// An event without a table.
    Emitted(Bytes),
    /// Of a stream that is not read here; it only has a number.
    Unwanted,
}

impl Raw {
    fn size(&self) -> usize {
        OVERHEAD
            + match self {
                Self::Tuple(_, tuple) => tuple.size(),
                Self::Values(_, values) => {
                    values.iter().map(|value| 32 + value.as_ref().map_or(0, Bytes::len)).sum()
                }
                Self::Emitted(content) => content.len(),
                Self::Unwanted => 0,
            }
    }

    /// The row as text; none for an event without one.
    pub(crate) fn values(&self) -> Option<(&Mapping, Vec<Option<Bytes>>)> {
        match self {
            Self::Tuple(mapping, tuple) => Some((mapping, mapping.texts(tuple).ok()?)),
            Self::Values(mapping, values) => Some((mapping, values.clone())),
            Self::Emitted(_) | Self::Unwanted => None,
        }
    }
}

/// Events that are not settled, in order.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    rows: VecDeque<Raw>,
    /// The number of the first of them, or of the next one.
    first: i64,
    bytes: usize,
    /// Boundaries behind `base`, ascending.
    boundaries: VecDeque<Boundary>,
    /// The newest boundary that is settled whole.
    base: Boundary,
    /// The transaction that is being read: where it ends, and its number.
    open: Option<(Lsn, u32)>,
    /// The number of the last event of the stream, as far as it was read by the session there is.
    counted: i64,
    /// The most bytes there ever were.
    #[cfg(test)]
    pub(super) peak: usize,
}

impl Feed {
    /// Starts over: everything up to `settled` is settled, and the stream is read from `base`.
    pub(crate) fn reset(&mut self, base: Boundary, settled: i64) {
        *self = Self { first: settled + 1, base, counted: base.seq, ..Self::default() };
    }

    /// From where a new session reads on: the newest boundary there is. What is here already is not taken twice.
    pub(crate) fn resume(&mut self) -> Boundary {
        let from = self.boundaries.back().copied().unwrap_or(self.base);
        self.counted = from.seq;
        from
    }

    /// What is pushed next comes behind everything that is here: rows of a table that is read once more.
    pub(crate) fn resume_at_end(&mut self) {
        self.counted = self.last();
    }

    /// How many bytes are held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of the last event that is here, or was.
    pub(crate) fn last(&self) -> i64 {
        self.first + i64::try_from(self.rows.len()).unwrap_or(i64::MAX) - 1
    }

    /// The newest position up to which everything was read.
    pub(crate) fn received(&self) -> Boundary {
        self.boundaries.back().copied().unwrap_or(self.base)
    }

    /// A transaction begins.
    pub(crate) fn begin(&mut self, at: Lsn, xid: u32) -> Result<()> {
        // Events of it that were read before the connection broke are here under the same numbers. If this is
        // another transaction, they are not: the server has another past than the one we know.
        let is_partly_here = self.counted < self.last();
        if let Some(open) = self.open.map(|(open, _)| open).filter(|open| is_partly_here && *open != at) {
            return Err(Error::permanent(
                Code::DIVERGED,
                format!(
                    "the stream now has a transaction at {at} where it had one at {open}: this server is not a \
                     continuation of the one that was read before"
                ),
            ));
        }
        self.open = Some((at, xid));
        Ok(())
    }

    /// An event; numbered, and kept unless it is here already or settled.
    pub(crate) fn push(&mut self, raw: Raw) {
        self.counted += 1;
        if self.counted > self.last() {
            self.bytes += raw.size();
            self.rows.push_back(raw);
            #[cfg(test)]
            {
                self.peak = self.peak.max(self.bytes);
            }
        }
    }

    /// Whether the next event is here already, or settled.
    pub(crate) fn is_next_known(&self) -> bool {
        self.counted < self.last()
    }

    /// Whether a transaction is being read.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// The server says how far it is. Within a transaction that says nothing of what is complete.
    pub(crate) fn heard(&mut self, lsn: Lsn, time: i64) {
        if self.open.is_none() {
            self.complete(lsn, time);
        }
    }

    /// The transaction ends: everything up to `lsn` is complete.
    pub(crate) fn commit(&mut self, lsn: Lsn, time: i64) {
        let xid = self.open.take().map_or(0, |(_, xid)| xid);
        self.mark(Boundary { seq: self.counted, lsn, time, xid });
    }

    /// Nothing more comes from before `lsn`. Not to be called within a transaction.
    pub(crate) fn complete(&mut self, lsn: Lsn, time: i64) {
        self.mark(Boundary { seq: self.counted, lsn, time, xid: 0 });
    }

    fn mark(&mut self, boundary: Boundary) {
        if boundary.lsn <= self.received().lsn {
            return;
        }
        match self.boundaries.back_mut() {
            // Nothing came since: it is the same transaction that is before it.
            Some(last) if last.seq == boundary.seq => *last = Boundary { xid: last.xid, ..boundary },
            _ => self.boundaries.push_back(boundary),
        }
    }

    /// The transactions of the events behind `from`, up to `to`.
    pub(crate) fn transactions(&self, from: i64, to: i64) -> HashSet<u32> {
        let behind = self.boundaries.iter().skip_while(|boundary| boundary.seq <= from);
        let mut found = HashSet::new();
        for boundary in behind {
            found.insert(boundary.xid);
            if boundary.seq >= to {
                return found;
            }
        }
        found.extend(self.open.map(|(_, xid)| xid));
        found
    }

    /// The newest boundary with nothing unsettled before it, when everything up to `settled` is.
    pub(crate) fn position(&self, settled: i64) -> Boundary {
        let behind = self.boundaries.partition_point(|boundary| boundary.seq <= settled);
        behind.checked_sub(1).map_or(self.base, |at| self.boundaries[at])
    }

    /// Forgets events up to `settled`, and boundaries up to the position that is stored now.
    pub(crate) fn settle(&mut self, settled: i64, stored: Boundary) {
        while self.first <= settled
            && let Some(raw) = self.rows.pop_front()
        {
            self.bytes -= raw.size();
            self.first += 1;
        }
        // Emptied, it may be behind: what another relay has settled was never here.
        self.first = self.first.max(settled + 1);
        while self.boundaries.front().is_some_and(|boundary| boundary.lsn <= stored.lsn) {
            self.boundaries.pop_front();
        }
        if stored.lsn >= self.base.lsn {
            self.base = stored;
        }
    }

    /// One event.
    pub(crate) fn get(&self, seq: i64) -> Option<&Raw> {
        let at = usize::try_from(seq.checked_sub(self.first)?).ok()?;
        self.rows.get(at)
    }

    /// The events behind `after`, with their numbers; none if some of them are not here any more.
    pub(crate) fn after(&self, after: i64) -> Option<impl Iterator<Item = (i64, &Raw)>> {
        let skip = usize::try_from(after + 1 - self.first).ok()?;
        Some((after + 1..).zip(self.rows.iter().skip(skip)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw() -> Raw {
        Raw::Emitted(Bytes::from_static(b"{}"))
    }

    fn feed() -> Feed {
        let mut feed = Feed::default();
        feed.reset(Boundary { seq: 0, lsn: Lsn(100), ..Boundary::default() }, 0);
        feed
    }

    fn transaction(feed: &mut Feed, at: u64, events: usize) {
        feed.begin(Lsn(at), 7).unwrap();
        (0..events).for_each(|_| feed.push(raw()));
        feed.commit(Lsn(at + 10), 0);
    }

    #[test]
    fn only_whole_transactions_are_acknowledged() {
        let mut feed = feed();
        transaction(&mut feed, 200, 2);
        transaction(&mut feed, 300, 3);
        feed.begin(Lsn(400), 7).unwrap();
        feed.push(raw());
        for (settled, lsn) in [(0, 100), (1, 100), (2, 210), (4, 210), (5, 310), (6, 310)] {
            assert_eq!(feed.position(settled).lsn, Lsn(lsn), "with {settled} settled");
        }
    }

    #[test]
    fn what_is_idle_is_acknowledged_in_the_order_of_the_stream() {
        let mut feed = feed();
        feed.complete(Lsn(150), 0);
        assert_eq!(feed.position(0).lsn, Lsn(150));
        transaction(&mut feed, 200, 1);
        feed.complete(Lsn(900), 0);
        assert_eq!(feed.position(0).lsn, Lsn(150), "an event is before it");
        assert_eq!(feed.position(1).lsn, Lsn(900));
        // An old one says nothing new.
        feed.complete(Lsn(800), 0);
        assert_eq!(feed.position(1).lsn, Lsn(900));
    }

    #[test]
    fn a_keepalive_within_a_transaction_completes_nothing() {
        let mut feed = feed();
        feed.begin(Lsn(400), 7).unwrap();
        feed.push(raw());
        feed.heard(Lsn(390), 0);
        assert_eq!((feed.received().lsn, feed.position(1).lsn), (Lsn(100), Lsn(100)));
        // Not after a break in its middle, either.
        feed.resume();
        feed.heard(Lsn(390), 0);
        assert_eq!(feed.received().lsn, Lsn(100));
        transaction(&mut feed, 400, 2);
        feed.heard(Lsn(500), 0);
        assert_eq!((feed.received(), feed.last()), (Boundary { seq: 2, lsn: Lsn(500), time: 0, xid: 7 }, 2));
    }

    #[test]
    fn a_session_that_reads_again_takes_nothing_twice() {
        let mut feed = feed();
        transaction(&mut feed, 200, 2);
        feed.begin(Lsn(300), 7).unwrap();
        feed.push(raw());
        assert_eq!(feed.last(), 3);
        assert_eq!(feed.resume(), Boundary { seq: 2, lsn: Lsn(210), time: 0, xid: 7 });
        transaction(&mut feed, 300, 2);
        assert_eq!(feed.last(), 4);
        assert_eq!(feed.position(4).lsn, Lsn(310));
    }

    #[test]
    fn another_past_is_refused() {
        let mut feed = feed();
        feed.begin(Lsn(300), 7).unwrap();
        feed.push(raw());
        feed.resume();
        assert_eq!(feed.begin(Lsn(290), 7).unwrap_err().code(), "diverged");
    }

    #[test]
    fn what_was_settled_before_is_counted_and_not_kept() {
        let mut feed = Feed::default();
        feed.reset(Boundary { seq: 10, lsn: Lsn(100), ..Boundary::default() }, 12);
        transaction(&mut feed, 200, 4);
        let numbers: Vec<i64> = feed.after(12).unwrap().map(|(seq, _)| seq).collect();
        assert_eq!(numbers, [13, 14]);
        assert_eq!(feed.position(12).lsn, Lsn(100));
        assert_eq!(feed.position(14), Boundary { seq: 14, lsn: Lsn(210), time: 0, xid: 7 });
    }

    #[test]
    fn settled_events_make_room() {
        let mut feed = feed();
        transaction(&mut feed, 200, 3);
        let full = feed.bytes();
        feed.settle(2, feed.position(2));
        assert_eq!(feed.bytes() * 3, full);
        assert!(feed.get(2).is_none() && feed.get(3).is_some());
        assert!(feed.after(1).is_none(), "2 is gone");
        feed.settle(3, feed.position(3));
        assert_eq!((feed.bytes(), feed.last(), feed.position(3).lsn), (0, 3, Lsn(210)));
    }

    #[test]
    fn it_is_known_which_transactions_events_came_from() {
        let mut feed = feed();
        for (at, xid) in [(200, 1), (300, 2), (400, 3)] {
            feed.begin(Lsn(at), xid).unwrap();
            (0..2).for_each(|_| feed.push(raw()));
            feed.commit(Lsn(at + 10), 0);
            feed.complete(Lsn(at + 20), 0);
        }
        feed.begin(Lsn(500), 4).unwrap();
        feed.push(raw());
        for (from, to, expected) in
            [(0, 2, &[1][..]), (0, 3, &[1, 2]), (1, 2, &[1]), (2, 4, &[2]), (3, 7, &[2, 3, 4])]
        {
            assert_eq!(feed.transactions(from, to), expected.iter().copied().collect(), "{from} to {to}");
        }
    }
}
