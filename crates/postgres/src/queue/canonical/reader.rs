//! What a relay remembers of the rows that it reads: cursors, open publishers, and rows in hand. No SQL is here.
//!
//! The relay owns key slots. It reads the rows of a slot in the order of `seq`, from the slot's cursor on, and writes
//! nothing. A plain cursor would lose events: a `seq` is drawn before its transaction commits, so 6 can be visible while 5
//! is not. These rules prevent that.
//!
//! # The rules
//!
//! 1. A *look* is two statements: first the newest value of the sequence, `top`; then the transactions that hold the
//!    sequence's lock, which are those that have drawn a value and not ended (the *publishers*).
//! 2. The *bound* of a publisher is the `top` of the look before the one that first saw it, or 0 at the first look. It has
//!    drawn nothing up to its bound: else that earlier look would have seen it.
//! 3. A page is a later statement. It reads above a slot's cursor, and never above `top`. No cursor passes `top`.
//! 4. When a publisher is gone at a look, every cursor goes back to its bound. The same when it is still listed, but is not
//!    known to be running: a transaction that commits is visible before it releases its locks. What is in hand is left out
//!    of the page.
//! 5. A page leaves out what a transaction has written that was running at the look, although it has committed since: some of
//!    its rows may be below the cursors. A new look is taken at once, and the cursors do not pass such a row.
//! 6. A publisher without a process that is seen for the first time is a prepared transaction. It may be one that was
//!    seen under another name, so its bound is the lowest bound of those that are gone at this look.
//!
//! # Why nothing is lost
//!
//! Take a row that a transaction T drew and committed. If no look saw T as a publisher, T drew above the `top` of the last
//! look before it ended (that look read `top` first, and T did not hold the lock afterwards), where no cursor has been. If
//! a look saw T, the cursors go back to its bound at the first look at which T is gone, and the pages after that look see
//! the row.
//!
//! # Why a key stays in order
//!
//! Take two events of a key in two transactions, the second of which draws after the first has become visible. If the first
//! was running at the last look, which is certain only after `top` was read, the second has drawn above `top`, so no page of
//! that look hands it out. If not, the pages of that look see the first and begin at its bound or below.
//!
//! # What is in hand
//!
//! Rows are known by `seq` and version. A page may have begun before a settle was answered, and return a row that is
//! settled. So the versions that are settled while a page is out are remembered until that page has ended. Another version
//! of a row in hand is a new hand-out, and the old one is fenced.
//!
//! A row that is given back is not written: its slot's cursor goes below it. What a page that is out returns for this slot
//! is dropped, since it began above the row.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant},
};

use uuid::Uuid;

use super::version::Version;

/// A look is repeated after this time even if `top` is not reached: late commits wait for it.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How often the net is cast, at most.
const NET_EVERY: Duration = Duration::from_secs(1);

/// The net may take this part of the time.
const NET_SHARE: u32 = 50;

/// The smallest limit of a slot in a page.
const LEAST: usize = 4;

/// See the module.
#[derive(Debug)]
pub(super) struct Reader {
    /// The membership under which everything here was read.
    member: Uuid,
    lanes: BTreeMap<i16, Lane>,
    publishers: Publishers,
    looked_at: Option<Instant>,
    in_hand: HashMap<i64, InHand>,
    /// Rows that were settled while the page that is out was under way.
    settled: HashMap<i64, Version>,
    /// The number of the last page.
    page: u64,
    is_out: bool,
    /// Counts the settles that made an event wait or die. A look that began before one of them does not show it.
    failures: u64,
    waiting: Waiting,
    net_due: Instant,
    /// What was last written.
    marked: Marks,
}

/// What a look says of events that are not fresh.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Waiting {
    /// An event of the relay's slots waits.
    pub(super) waits: bool,
    /// One of them is due.
    pub(super) due: bool,
    /// There are dead events, and they block their keys.
    pub(super) dead: bool,
    /// In total order: the first event that nothing may pass.
    pub(super) barrier: Option<i64>,
}

/// One owned slot.
#[derive(Debug)]
struct Lane {
    /// Everything up to here was read, except what late commits add.
    cursor: i64,
    /// How many rows the slot had, compared with the others.
    weight: usize,
    /// Grows when rows were given back: a page that was sent before has begun above them.
    resets: u64,
}

#[derive(Debug)]
struct InHand {
    version: Version,
    /// The hand-out that it belongs to.
    token: Uuid,
    slot: i16,
    /// It was claimed in its row, and no cursor leads to it.
    waited: bool,
}

/// Transactions that have drawn a value and not ended, by name, each with its bound.
#[derive(Debug, Default)]
struct Publishers {
    /// When the server that gave these names was started.
    server: String,
    top: i64,
    open: HashMap<String, i64>,
    /// See [`Holders`].
    unseen: HashSet<Version>,
    next: Option<Version>,
}

/// The holders of the sequence's lock, as one statement saw them.
#[derive(Debug)]
pub(super) struct Holders {
    pub(super) all: Vec<Holder>,
    /// What transactions write that were running.
    pub(super) unseen: HashSet<Version>,
    /// What the first transaction writes that began later.
    pub(super) next: Version,
    pub(super) server: String,
}

#[derive(Debug, Clone)]
pub(super) struct Holder {
    pub(super) name: String,
    /// It has no process.
    pub(super) prepared: bool,
    /// It is certain that the statement did not see what it has written.
    pub(super) running: bool,
}

/// What a page asks for. Parallel vectors, as the statement takes them.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) number: u64,
    pub(super) slots: Vec<i16>,
    pub(super) after: Vec<i64>,
    pub(super) through: Vec<i64>,
    pub(super) limits: Vec<i64>,
    pub(super) hand_seqs: Vec<i64>,
    pub(super) hand_versions: Vec<Version>,
    asked: Vec<Asked>,
    /// It reads what lies beyond `top`.
    is_beyond: bool,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    slot: i16,
    /// Without the room for rows in hand.
    most: usize,
    resets: u64,
    after: i64,
    through: i64,
}

/// What a page returned for one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) seq: i64,
    pub(super) slot: i16,
    pub(super) version: Version,
    /// An earlier event of its key waits. The row is held, and not handed out.
    pub(super) blocked: bool,
}

/// Marks for the slots that have something in flight.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) slots: Vec<i16>,
    pub(super) seqs: Vec<i64>,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self {
            member: Uuid::nil(),
            lanes: BTreeMap::new(),
            publishers: Publishers::default(),
            looked_at: None,
            in_hand: HashMap::new(),
            settled: HashMap::new(),
            page: 0,
            is_out: false,
            failures: 0,
            waiting: Waiting::default(),
            net_due: Instant::now(),
            marked: Marks::default(),
        }
    }

    /// The slots that the relay owns now. Under a new membership everything begins again.
    pub(super) fn own(&mut self, member: Uuid, slots: &[i16]) {
        if self.member != member {
            *self = Self { member, page: self.page, ..Self::new() };
        }
        self.lanes.retain(|slot, _| slots.contains(slot));
        for slot in slots {
            self.lanes.entry(*slot).or_insert_with(|| {
                // The last look does not say what waits in this slot.
                self.looked_at = None;
                Lane::new()
            });
        }
    }

    /// These slots were given up: another relay reads them until they come back.
    pub(super) fn gave(&mut self, slots: &[i16]) {
        self.lanes.retain(|slot, _| !slots.contains(slot));
    }

    /// Whether to look before the next page.
    pub(super) fn wants_look(&self) -> bool {
        let recent = self.looked_at.is_some_and(|at| at.elapsed() < LOOK_EVERY);
        !recent || self.lanes.values().all(|lane| lane.cursor >= self.publishers.top)
    }

    /// To be taken before a look, and given to [`Self::looked`] with its answer.
    pub(super) fn failures(&self) -> u64 {
        self.failures
    }

    /// Takes in a look.
    pub(super) fn looked(&mut self, top: i64, holders: &Holders, waiting: Waiting, failures: u64) {
        let starts_over = self.publishers.server != holders.server || top < self.publishers.top;
        if starts_over {
            self.publishers = Publishers { server: holders.server.clone(), ..Publishers::default() };
            self.start_over();
        }
        self.looked_at = Some(Instant::now());
        let from = self.publishers.look(top, holders);
        for lane in self.lanes.values_mut() {
            lane.cursor = from.map_or(lane.cursor, |from| lane.cursor.min(from)).min(top);
        }
        let known = self.waiting;
        self.waiting = waiting;
        if self.failures != failures {
            self.waiting.waits |= known.waits;
            self.waiting.dead |= known.dead;
            self.waiting.barrier = match (known.barrier, waiting.barrier) {
                (Some(known), Some(seen)) => Some(known.min(seen)),
                (known, seen) => known.or(seen),
            };
        }
    }

    /// Forgets how far slots were read: the connection was lost, or the server is another one.
    pub(super) fn start_over(&mut self) {
        for lane in self.lanes.values_mut() {
            lane.cursor = 0;
            lane.resets += 1;
        }
        self.looked_at = None;
    }

    /// A call has failed, perhaps after one of its statements had handed out rows: nobody got them, and they are read or
    /// claimed again. What an answer that was lost has said is not known, and the connection may be to another server now.
    pub(super) fn call_failed(&mut self, token: Uuid) {
        self.in_hand.retain(|_, row| row.token != token);
        self.start_over();
    }

    /// The newest value of the sequence at the last look.
    pub(super) fn top(&self) -> i64 {
        self.publishers.top
    }

    pub(super) fn waiting(&self) -> Waiting {
        self.waiting
    }

    /// The due events were claimed: the next look says whether there are more.
    pub(super) fn claimed_due(&mut self) {
        self.waiting.due = false;
    }

    /// The next page, for so many events; none if every slot was read to its end.
    pub(super) fn ask(&mut self, events: usize) -> Option<Page> {
        let end =
            self.waiting.barrier.map_or(self.publishers.top, |first| self.publishers.top.min(first - 1));
        let lanes: Vec<(i16, &Lane)> = self
            .lanes
            .iter()
            .filter(|(_, lane)| lane.cursor < end)
            .map(|(slot, lane)| (*slot, lane))
            .collect();
        if lanes.is_empty() {
            return None;
        }
        let weights: usize = lanes.iter().map(|(_, lane)| lane.weight).sum();
        let asked: Vec<Asked> = lanes
            .iter()
            .map(|(slot, lane)| Asked {
                slot: *slot,
                most: (events * lane.weight / weights.max(1)).max(LEAST),
                resets: lane.resets,
                after: lane.cursor,
                through: end,
            })
            .collect();
        Some(self.send(asked))
    }

    /// What lies beyond `top`, where only an explicit `seq` can be: see [`super::read`].
    pub(super) fn ask_beyond(&mut self, events: usize) -> Option<Page> {
        let top = self.publishers.top;
        if self.waiting.barrier.is_some() || self.lanes.values().any(|lane| lane.cursor < top) {
            return None;
        }
        let most = (events / self.lanes.len().max(1)).max(LEAST);
        let asked = self.lanes.iter().map(|(slot, lane)| Asked {
            slot: *slot,
            most,
            resets: lane.resets,
            after: top,
            through: i64::MAX,
        });
        let asked: Vec<Asked> = asked.collect();
        (!asked.is_empty()).then(|| Page { is_beyond: true, ..self.send(asked) })
    }

    fn send(&mut self, asked: Vec<Asked>) -> Page {
        self.page += 1;
        self.is_out = true;
        let lowest = asked.iter().map(|lane| lane.after).min().unwrap_or(0);
        let mut page = Page { number: self.page, ..Page::default() };
        let mut in_lane: HashMap<i16, usize> = HashMap::new();
        for (seq, row) in self.in_hand.iter().filter(|(seq, row)| **seq > lowest && !row.waited) {
            *in_lane.entry(row.slot).or_default() += 1;
            page.hand_seqs.push(*seq);
            page.hand_versions.push(row.version);
        }
        for lane in &asked {
            page.slots.push(lane.slot);
            page.after.push(lane.after);
            page.through.push(lane.through);
            let room = in_lane.get(&lane.slot).copied().unwrap_or(0);
            page.limits.push(i64::try_from(lane.most + room).unwrap_or(i64::MAX));
        }
        page.asked = asked;
        page
    }

    /// A page has failed: it is as if it had not been sent.
    pub(super) fn failed(&mut self) {
        self.is_out = false;
        self.settled.clear();
    }

    /// Takes in a page: moves the cursors, and says which of the rows may be handed out, in the order of seq, and no more
    /// than `events`. `cut_short` says that the page was not read to its end. With `total`, nothing is handed out beyond
    /// the end of a slot that had more.
    pub(super) fn read(
        &mut self,
        page: &Page,
        rows: &[Found],
        events: usize,
        cut_short: bool,
        total: bool,
    ) -> Vec<usize> {
        self.is_out = false;
        let settled = std::mem::take(&mut self.settled);
        let mut per_lane: HashMap<i16, Vec<i64>> = HashMap::new();
        for row in rows {
            per_lane.entry(row.slot).or_default().push(row.seq);
        }
        // Up to where each slot is known, by this page.
        let mut ends: HashMap<i16, i64> = HashMap::new();
        for asked in &page.asked {
            // Given up, or begun again, since the page was sent.
            let Some(lane) = self.lanes.get_mut(&asked.slot).filter(|lane| lane.resets == asked.resets)
            else {
                continue;
            };
            let seqs = per_lane.get(&asked.slot);
            let found = seqs.map_or(0, Vec::len);
            let last = seqs.and_then(|seqs| seqs.iter().max().copied()).unwrap_or(asked.after);
            let end = if found >= asked.most || cut_short { last } else { asked.through };
            ends.insert(asked.slot, end);
            lane.weight =
                if found >= asked.most { (lane.weight * 2).clamp(2, 1 << 12) } else { found.max(1) };
        }
        let lowest_end = ends.values().min().copied().unwrap_or(0);
        let mut order: Vec<usize> = (0..rows.len())
            .filter(|at| {
                let row = &rows[*at];
                ends.get(&row.slot).is_some_and(|end| row.seq <= *end)
                    && settled.get(&row.seq) != Some(&row.version)
                    && self.in_hand.get(&row.seq).is_none_or(|held| held.version != row.version)
            })
            .collect();
        order.sort_by_key(|at| rows[*at].seq);
        let mut taken = Vec::with_capacity(order.len());
        for at in order {
            let row = &rows[at];
            let seen = self.publishers.saw(row.version) || page.is_beyond;
            if !seen {
                // Its transaction may have rows below the cursor. The next look sees all of them.
                self.looked_at = None;
            }
            let fits = seen && taken.len() < events && (!total || row.seq <= lowest_end);
            if fits {
                if !row.blocked {
                    taken.push(at);
                }
            } else if let Some(end) = ends.get_mut(&row.slot) {
                *end = (*end).min(row.seq - 1);
            }
        }
        for asked in &page.asked {
            let (Some(end), Some(lane)) = (ends.get(&asked.slot), self.lanes.get_mut(&asked.slot)) else {
                continue;
            };
            // Beyond `top` there is no cursor.
            if asked.through <= self.publishers.top {
                lane.cursor = (*end).max(asked.after);
            }
        }
        taken
    }

    /// A row is handed out.
    pub(super) fn hand_out(&mut self, row: &Found, token: Uuid, waited: bool) {
        let row_in_hand = InHand { version: row.version, token, slot: row.slot, waited };
        self.in_hand.insert(row.seq, row_in_hand);
    }

    /// A page that was read, but not handed out after all, is read again.
    pub(super) fn give_back(&mut self, rows: &[Found]) {
        for row in rows {
            self.lower(row.slot, row.seq);
        }
    }

    /// How far events were handed out, in the slots that have some in flight.
    pub(super) fn marks(&self) -> Marks {
        let mut newest: BTreeMap<i16, i64> = BTreeMap::new();
        for (seq, row) in self.in_hand.iter().filter(|(_, row)| !row.waited) {
            let mark = newest.entry(row.slot).or_insert(*seq);
            *mark = (*mark).max(*seq);
        }
        Marks { slots: newest.keys().copied().collect(), seqs: newest.values().copied().collect() }
    }

    /// The marks to write with a heartbeat, and the number of their page, if something was settled or given back since the
    /// last ones.
    pub(super) fn outdated_marks(&mut self) -> Option<(u64, Marks)> {
        let marks = self.marks();
        if self.is_out || marks == self.marked {
            return None;
        }
        self.page += 1;
        Some((self.page, marks))
    }

    /// These marks were written, and earlier ones can be removed.
    pub(super) fn marked(&mut self, marks: Marks) {
        self.marked = marks;
    }

    /// The version of a row in hand, if it was handed out under this token.
    pub(super) fn version(&self, seq: i64, token: Uuid) -> Option<Version> {
        self.in_hand.get(&seq).filter(|row| row.token == token).map(|row| row.version)
    }

    /// Whether the row was claimed in the table.
    pub(super) fn waited(&self, seq: i64) -> bool {
        self.in_hand.get(&seq).is_some_and(|row| row.waited)
    }

    /// The rows in hand that were claimed in the table.
    pub(super) fn waited_in_hand(&self) -> Vec<i64> {
        self.in_hand.iter().filter(|(_, row)| row.waited).map(|(seq, _)| *seq).collect()
    }

    /// Forgets a row whose verdict was stored, or is refused for good.
    pub(super) fn settled(&mut self, seq: i64, token: Uuid) {
        if self.version(seq, token).is_none() {
            return;
        }
        if let Some(row) = self.in_hand.remove(&seq)
            && self.is_out
        {
            self.settled.insert(seq, row.version);
        }
    }

    /// The event waits, or blocks its key: what a page finds of it must be checked.
    pub(super) fn makes_wait(&mut self, seq: i64, dead: bool, total: bool) {
        self.failures += 1;
        self.waiting.dead |= dead;
        self.waiting.waits |= !dead;
        if total {
            self.waiting.barrier = Some(self.waiting.barrier.map_or(seq, |first| first.min(seq)));
        }
    }

    /// Gives a row back. Its version is not remembered: it is to be read again.
    pub(super) fn released(&mut self, seq: i64, token: Uuid) {
        if self.version(seq, token).is_none() {
            return;
        }
        if let Some(row) = self.in_hand.remove(&seq)
            && !row.waited
        {
            self.lower(row.slot, seq);
        }
    }

    fn lower(&mut self, slot: i16, seq: i64) {
        if let Some(lane) = self.lanes.get_mut(&slot) {
            lane.cursor = lane.cursor.min(seq - 1);
            lane.resets += 1;
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_hand.is_empty()
    }

    /// What the net is to look at, if it is time: slots, cursors and limits, and what is in hand.
    pub(super) fn net(&self) -> Option<Page> {
        if self.lanes.is_empty() || Instant::now() < self.net_due {
            return None;
        }
        let mut page = Page::default();
        let mut in_lane: HashMap<i16, i64> = HashMap::new();
        for (seq, row) in self.in_hand.iter().filter(|(_, row)| !row.waited) {
            *in_lane.entry(row.slot).or_default() += 1;
            page.hand_seqs.push(*seq);
            page.hand_versions.push(row.version);
        }
        for (slot, lane) in &self.lanes {
            page.slots.push(*slot);
            page.through.push(lane.cursor);
            page.limits.push(1 + in_lane.get(slot).copied().unwrap_or(0));
        }
        Some(page)
    }

    /// Takes in what the net has found: the first row of each slot that the cursor has passed.
    pub(super) fn netted(&mut self, took: Duration, found: &[(i16, i64)]) {
        self.net_due = Instant::now() + NET_EVERY.max(took * NET_SHARE);
        for (slot, seq) in found {
            self.lower(*slot, *seq);
        }
    }
}

impl Lane {
    fn new() -> Self {
        Self { cursor: 0, weight: 1, resets: 0 }
    }
}

impl Publishers {
    /// Whether the last look saw what this version's transaction has written.
    fn saw(&self, version: Version) -> bool {
        !self.unseen.contains(&version) && !self.next.is_some_and(|next| version.is_after(next))
    }

    /// Takes in a look. Returns from where to read again, if publishers are gone or may be visible.
    fn look(&mut self, top: i64, holders: &Holders) -> Option<i64> {
        let there: HashMap<&String, &Holder> =
            holders.all.iter().map(|holder| (&holder.name, holder)).collect();
        let may_be_visible = |name: &String| there.get(name).is_none_or(|holder| !holder.running);
        let bounds = |test: &dyn Fn(&String) -> bool| {
            self.open.iter().filter(|(name, _)| test(name)).map(|(_, bound)| *bound).min()
        };
        let gone = bounds(&|name| !there.contains_key(name));
        let from = bounds(&may_be_visible);
        let bound = |holder: &Holder| match self.open.get(&holder.name) {
            Some(bound) => *bound,
            None if holder.prepared => gone.unwrap_or(self.top).min(self.top),
            None => self.top,
        };
        self.open = holders.all.iter().map(|holder| (holder.name.clone(), bound(holder))).collect();
        self.top = top;
        self.unseen.clone_from(&holders.unseen);
        self.next = Some(holders.next);
        from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: fn(u32) -> Version = Version::test;

    fn holders(names: &[(&str, bool)]) -> Holders {
        let holder = |(name, prepared): &(&str, bool)| Holder {
            name: (*name).to_owned(),
            prepared: *prepared,
            running: !name.ends_with("visible"),
        };
        Holders {
            all: names.iter().map(holder).collect(),
            unseen: [V(66)].into(),
            next: V(1_000),
            server: "s".into(),
        }
    }

    fn reader(slots: &[i16]) -> Reader {
        let mut reader = Reader::new();
        reader.own(Uuid::from_u128(1), slots);
        reader
    }

    fn look(reader: &mut Reader, top: i64, names: &[(&str, bool)]) {
        let failures = reader.failures();
        reader.looked(top, &holders(names), Waiting::default(), failures);
    }

    fn found(slot: i16, seqs: &[i64]) -> Vec<Found> {
        seqs.iter().map(|seq| Found { seq: *seq, slot, version: V(1), blocked: false }).collect()
    }

    /// Reads a page with these rows and hands them out.
    fn take(reader: &mut Reader, rows: &[Found]) -> Vec<i64> {
        let page = reader.ask(1_000).expect("something to read");
        let taken = reader.read(&page, rows, 1_000, false, false);
        for at in &taken {
            reader.hand_out(&rows[*at], Uuid::nil(), false);
        }
        taken.into_iter().map(|at| rows[at].seq).collect()
    }

    #[test]
    fn a_page_never_reads_above_the_top_and_the_cursor_stops_there() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[]);
        let page = reader.ask(100).unwrap();
        assert_eq!((page.after.as_slice(), page.through.as_slice()), ([0].as_slice(), [10].as_slice()));
        reader.read(&page, &[], 100, false, false);
        assert!(reader.ask(100).is_none());
        look(&mut reader, 12, &[]);
        let page = reader.ask(100).unwrap();
        assert_eq!((page.after, page.through), (vec![10], vec![12]));
    }

    #[test]
    fn when_a_publisher_is_gone_the_cursors_go_back_to_its_bound() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[]);
        take(&mut reader, &found(0, &[3, 10]));
        look(&mut reader, 20, &[("3/1", false)]);
        take(&mut reader, &found(0, &[15]));
        look(&mut reader, 30, &[("3/1", false)]);
        assert_eq!(reader.ask(100).unwrap().after, [20], "it is still there");
        reader.failed();
        look(&mut reader, 30, &[]);
        let page = reader.ask(100).unwrap();
        assert_eq!(page.after, [10], "it was first seen at the look after that of 10");
        assert_eq!(page.hand_seqs, [15], "what is in hand above it is left out");
    }

    /// It has committed and not released the lock yet. Its successors in a key may have drawn below the top.
    #[test]
    fn a_publisher_that_may_be_visible_is_read_from_its_bound_and_stays() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[]);
        take(&mut reader, &found(0, &[10]));
        look(&mut reader, 20, &[("3/visible", false)]);
        take(&mut reader, &found(0, &[20]));
        for _ in 0..2 {
            look(&mut reader, 30, &[("3/visible", false)]);
            assert_eq!(reader.ask(100).unwrap().after, [10]);
            reader.failed();
        }
    }

    /// One of its rows is below the cursor, and would come after this one.
    #[test]
    fn what_was_running_at_the_look_waits_for_the_next() {
        for version in [66, 1_000, 1_001] {
            let mut reader = reader(&[0]);
            look(&mut reader, 20, &[]);
            let mut rows = found(0, &[11, 12, 13]);
            rows[1].version = V(version);
            let page = reader.ask(100).unwrap();
            assert_eq!(reader.read(&page, &rows, 100, false, false), [0, 2]);
            assert!(reader.wants_look());
            assert_eq!(reader.ask(100).unwrap().after, [11], "the cursor does not pass it");
        }
    }

    #[test]
    fn a_publisher_of_the_first_look_is_read_from_the_start() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[("3/1", false)]);
        take(&mut reader, &found(0, &[10]));
        look(&mut reader, 10, &[]);
        assert_eq!(reader.ask(100).unwrap().after, [0]);
    }

    #[test]
    fn a_transaction_that_was_prepared_keeps_its_bound_under_its_new_name() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[]);
        look(&mut reader, 20, &[("3/1", false)]);
        take(&mut reader, &found(0, &[]));
        look(&mut reader, 30, &[("-1/77", true)]);
        take(&mut reader, &found(0, &[]));
        look(&mut reader, 40, &[("-1/77", true), ("-1/78", true)]);
        take(&mut reader, &found(0, &[]));
        look(&mut reader, 40, &[("-1/78", true)]);
        assert_eq!(reader.ask(100).unwrap().after, [10], "77 was 3/1");
        reader.failed();
        look(&mut reader, 40, &[]);
        assert_eq!(reader.ask(100).unwrap().after, [10]);
    }

    #[test]
    fn another_server_and_a_top_that_falls_start_over() {
        for (top, server) in [(5, "s"), (20, "t")] {
            let mut reader = reader(&[0]);
            look(&mut reader, 10, &[]);
            take(&mut reader, &found(0, &[]));
            let failures = reader.failures();
            let other = Holders { server: server.into(), ..holders(&[]) };
            reader.looked(top, &other, Waiting::default(), failures);
            assert_eq!(reader.ask(100).unwrap().after, [0]);
        }
    }

    #[test]
    fn what_is_settled_while_a_page_is_out_is_not_handed_out_again() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[("3/1", false)]);
        assert_eq!(take(&mut reader, &found(0, &[4, 5])), [4, 5]);
        look(&mut reader, 11, &[]);
        let page = reader.ask(100).unwrap();
        reader.settled(4, Uuid::nil());
        let rows = found(0, &[4, 5, 6]);
        let taken = reader.read(&page, &rows, 100, false, false);
        assert_eq!(taken, [2], "4 was settled meanwhile, 5 is in hand");
        reader.own(Uuid::from_u128(1), &[0]);
        let mut set_back = found(0, &[4]);
        set_back[0].version = V(2);
        look(&mut reader, 12, &[]);
        reader.netted(Duration::ZERO, &[(0, 4)]);
        assert_eq!(take(&mut reader, &set_back), [4], "another version is another hand-out");
    }

    #[test]
    fn what_is_given_back_comes_again_and_the_page_that_is_out_does_not_count() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[]);
        assert_eq!(take(&mut reader, &found(0, &[4, 5])), [4, 5]);
        look(&mut reader, 20, &[]);
        let page = reader.ask(100).unwrap();
        reader.released(5, Uuid::nil());
        let rows = found(0, &[11]);
        assert!(reader.read(&page, &rows, 100, false, false).is_empty(), "11 would overtake 5");
        let page = reader.ask(100).unwrap();
        assert_eq!((page.after.as_slice(), page.hand_seqs.as_slice()), ([4].as_slice(), [].as_slice()));
    }

    #[test]
    fn what_a_call_that_failed_had_handed_out_comes_again() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[]);
        take(&mut reader, &found(0, &[4]));
        let (kept, failed) = (Uuid::nil(), Uuid::from_u128(7));
        reader.hand_out(&found(0, &[5])[0], failed, false);
        reader.hand_out(&found(0, &[6])[0], failed, true);
        reader.call_failed(failed);
        assert_eq!((reader.version(4, kept), reader.version(5, failed)), (Some(V(1)), None));
        assert_eq!(reader.waited_in_hand(), [] as [i64; 0], "it can be claimed again");
        look(&mut reader, 10, &[]);
        let page = reader.ask(100).unwrap();
        assert_eq!((page.after.as_slice(), page.hand_seqs.as_slice()), ([0].as_slice(), [4].as_slice()));
    }

    #[test]
    fn what_does_not_fit_is_read_again() {
        let mut reader = reader(&[0, 1]);
        look(&mut reader, 10, &[]);
        let page = reader.ask(2).unwrap();
        let rows: Vec<Found> = [found(0, &[1, 4]), found(1, &[2, 3])].concat();
        assert_eq!(reader.read(&page, &rows, 2, false, false), [0, 2]);
        let page = reader.ask(2).unwrap();
        assert_eq!(page.after, [3, 2], "4 and 3 did not fit");
    }

    #[test]
    fn in_total_order_nothing_passes_the_end_of_a_slot_that_had_more() {
        let mut reader = reader(&[0, 1]);
        look(&mut reader, 100, &[]);
        let page = reader.ask(4).unwrap();
        let rows: Vec<Found> = [found(0, &[1, 2, 3, 4]), found(1, &[50])].concat();
        assert_eq!(
            reader.read(&page, &rows, 100, false, true),
            [0, 1, 2, 3],
            "slot 0 may have rows before 50"
        );
        assert_eq!(reader.ask(4).unwrap().after, [4, 49]);
    }

    #[test]
    fn a_slot_that_is_new_is_not_read_before_a_look() {
        let mut reader = reader(&[0]);
        look(&mut reader, 10, &[]);
        assert!(!reader.wants_look(), "there is more to read up to the top");
        reader.own(Uuid::from_u128(1), &[0, 1]);
        assert!(reader.wants_look(), "nothing is known of what waits in it");
    }

    #[test]
    fn a_look_that_began_before_a_failure_does_not_hide_it() {
        let mut reader = reader(&[0]);
        let failures = reader.failures();
        reader.makes_wait(7, false, true);
        reader.looked(10, &holders(&[]), Waiting::default(), failures);
        assert_eq!(reader.waiting(), Waiting { waits: true, barrier: Some(7), ..Waiting::default() });
        look(&mut reader, 10, &[]);
        assert_eq!(reader.waiting(), Waiting::default());
    }
}
