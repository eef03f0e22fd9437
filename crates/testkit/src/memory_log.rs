//! A log in memory: the reference model that real stores are compared to, and a store that can be made to fail.
//!
//! [`MemoryLogStore`] keeps the whole contract of [`LogStore`] and of [`airtight_core::log::LogAdmin`]. Its clones
//! share everything; [`MemoryLogStore::connection`] shares the tables but has its own faults and counters.
//! Its clock is real time plus whatever [`MemoryLogStore::advance`] added.
//!
//! A transaction gets its numbers when it publishes, and its events become visible when it commits. So tests can leave
//! *holes*: open holes, which may still be filled, and dead holes, which a rollback left. Retention moves the floor.

mod admin;
mod tables;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use airtight_core::{
    Backlog, Capabilities, Error, NewEvent, Published, Result,
    group::{Member, Members, Pulse},
    log::{Changes, ConsumerState, Due, LogRow, LogStore, Read, ReadRequest, Standing, Start},
    queue::RowClaim,
};
use async_trait::async_trait;
use tokio::sync::Notify;
use uuid::Uuid;

use self::tables::Tables;
pub use crate::script::{Gate, Verb, When};
use crate::script::{Script, broken};

/// An in-memory [`LogStore`]; see the module.
#[derive(Debug, Clone)]
pub struct MemoryLogStore {
    database: Arc<Database>,
    script: Arc<Script>,
}

#[derive(Debug)]
struct Database {
    tables: Mutex<Tables>,
    start: Instant,
    ahead: Mutex<Duration>,
    published: Notify,
}

/// What a test may know of a parked event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedInfo {
    /// Its place.
    pub seq: i64,
    /// Its key.
    pub key: String,
    /// Attempts so far.
    pub attempts: u32,
    /// `held`, `pending`, `dead` or `unknown`.
    pub state: &'static str,
}

impl Default for MemoryLogStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryLogStore {
    /// An empty log.
    pub fn new() -> Self {
        let database = Database {
            tables: Mutex::default(),
            start: Instant::now(),
            ahead: Mutex::new(Duration::ZERO),
            published: Notify::new(),
        };
        Self { database: Arc::new(database), script: Arc::default() }
    }

    /// Another connection to the same log, with its own faults and counters.
    #[must_use]
    pub fn connection(&self) -> Self {
        Self { database: self.database.clone(), script: Arc::default() }
    }

    // --- producers --------------------------------------------------------------------------------------

    /// Publishes in a separate transaction.
    pub fn publish(&self, events: &[NewEvent]) -> Vec<Published> {
        let mut transaction = self.begin();
        for event in events {
            transaction.publish(event);
        }
        transaction.commit()
    }

    /// Starts a transaction: `seq` is drawn at once, which leaves an open hole; the events are seen after the
    /// commit, and a rollback leaves a dead hole.
    pub fn begin(&self) -> MemoryLogTransaction {
        MemoryLogTransaction { store: self.clone(), events: Vec::new() }
    }

    /// A row that cannot be an event, of this key.
    pub fn publish_bad(&self, key: &str) -> i64 {
        let seq = self.tables().insert_bad(key);
        self.database.published.notify_waiters();
        seq
    }

    // --- the clock --------------------------------------------------------------------------------------

    /// Moves the store's clock on. Relays do not notice: to them, the database's clock has jumped.
    pub fn advance(&self, by: Duration) {
        *lock(&self.database.ahead) += by;
    }

    fn now(&self) -> Duration {
        self.database.start.elapsed() + *lock(&self.database.ahead)
    }

    // --- faults -----------------------------------------------------------------------------------------

    /// The next call of `verb` fails, before or after it took effect.
    pub fn fail_next(&self, verb: Verb, when: When) {
        self.fail_next_with(verb, when, broken("scripted"));
    }

    /// The same with an error of the test's choice.
    pub fn fail_next_with(&self, verb: Verb, when: When, error: Error) {
        self.script.fail(verb, when, error);
    }

    /// The next call of `verb` stops at a gate, before or after it took effect.
    pub fn pause_next(&self, verb: Verb, when: When) -> Gate {
        self.script.pause(verb, when)
    }

    /// From now on calls fail at random, with these probabilities for before and after they took effect, and take
    /// up to `slow` each way, so that they overlap.
    pub fn chaos(&self, seed: u64, before: f64, after: f64, slow: Duration) {
        self.script.chaos(seed, before, after, slow);
    }

    /// While down, every call fails before it takes effect.
    pub fn set_down(&self, down: bool) {
        self.script.set_down(down);
    }

    /// Ends chaos, outage and what is scripted but has not happened yet.
    pub fn calm(&self) {
        self.script.calm();
    }

    /// How often `verb` was called on this connection.
    pub fn calls(&self, verb: Verb) -> u64 {
        self.script.calls(verb)
    }

    /// Evicts every relay, as if their leases had run out and another relay had noticed.
    pub fn evict_all(&self) {
        self.tables().evict_all();
    }

    /// Makes every lease run out now. No relay has noticed yet.
    pub fn expire_leases(&self) {
        let now = self.now();
        self.tables().expire(now);
    }

    /// Retention: removes everything up to `seq`, whoever needs it.
    pub fn prune_through(&self, seq: i64) {
        self.tables().prune_through(seq);
    }

    // --- looking ----------------------------------------------------------------------------------------

    /// The offset of each partition of a consumer; empty for an unknown consumer.
    pub fn offsets(&self, consumer: &str) -> Vec<i64> {
        self.tables().offsets(consumer)
    }

    /// A consumer's parked events, in the order of `seq`.
    pub fn parked_of(&self, consumer: &str) -> Vec<ParkedInfo> {
        self.tables().parked_of(consumer).map(ParkedInfo::from).collect()
    }

    /// The relays on the list, expired or not.
    pub fn members(&self) -> Vec<Member> {
        self.tables().members.values().map(|there| there.member.clone()).collect()
    }

    /// The partition of a key.
    pub fn partition_of(key: &str, partitions: u16) -> u16 {
        crate::memory_queue::tables::partition_of(key, partitions)
    }

    /// The newest `seq` that was drawn.
    pub fn end(&self) -> i64 {
        self.tables().last_seq
    }

    /// What relays did that the contract of a store forbids. A test ends by asserting that there is nothing.
    pub fn violations(&self) -> Vec<String> {
        self.tables().violations.iter().cloned().collect()
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.database.tables)
    }
}

impl From<&tables::Entry> for ParkedInfo {
    fn from(entry: &tables::Entry) -> Self {
        Self {
            seq: entry.row.event.seq,
            key: entry.row.event.aggregate_id.clone(),
            attempts: entry.attempts,
            state: entry.state.word(),
        }
    }
}

/// A producer's transaction. Dropped without [`MemoryLogTransaction::commit`] it is rolled back, and the numbers
/// it drew stay dead holes.
#[derive(Debug)]
pub struct MemoryLogTransaction {
    store: MemoryLogStore,
    events: Vec<(i64, String, NewEvent)>,
}

impl MemoryLogTransaction {
    /// Writes one event.
    ///
    /// # Panics
    ///
    /// If the event is not valid: the test is wrong.
    pub fn publish(&mut self, event: &NewEvent) {
        event.validate().expect("a test publishes valid events");
        let seq = self.store.tables().draw();
        let id = event.id.unwrap_or_else(Uuid::now_v7).to_string();
        self.events.push((seq, id, event.clone()));
    }

    /// The keys of its events, in order.
    pub fn keys(&self) -> Vec<String> {
        self.events.iter().map(|(_, _, event)| event.aggregate_id.clone()).collect()
    }

    /// Commits: the events become visible.
    pub fn commit(mut self) -> Vec<Published> {
        let mut tables = self.store.tables();
        let events = std::mem::take(&mut self.events);
        let published = events.into_iter().map(|(seq, id, event)| tables.insert(seq, id, &event)).collect();
        drop(tables);
        self.store.database.published.notify_waiters();
        published
    }

    /// Rolls back: the events never existed.
    pub fn rollback(self) {
        drop(self);
    }
}

impl Drop for MemoryLogTransaction {
    fn drop(&mut self) {
        let mut tables = self.store.tables();
        self.events.iter().for_each(|(seq, ..)| tables.close_hole(*seq));
    }
}

#[async_trait]
impl Members for MemoryLogStore {
    async fn join(&self, member: &Member) -> Result<()> {
        let rest = self.script.before(Verb::Join).await?;
        self.tables().join(member, self.now());
        rest.after(()).await
    }

    async fn heartbeat(&self, member: &Member, _rows: &[RowClaim]) -> Result<Pulse> {
        let rest = self.script.before(Verb::Heartbeat).await?;
        let pulse = self.tables().heartbeat(member, self.now());
        rest.after(pulse).await
    }

    async fn take(&self, member: &Member, wanted: &[u16]) -> Result<Vec<u16>> {
        let rest = self.script.before(Verb::Take).await?;
        let taken = self.tables().take(member, wanted, self.now());
        rest.after(taken).await
    }

    async fn give(&self, member: &Member, partitions: &[u16]) -> Result<()> {
        let rest = self.script.before(Verb::Give).await?;
        self.tables().give(member, partitions);
        rest.after(()).await
    }

    async fn leave(&self, member: &Member) -> Result<()> {
        let rest = self.script.before(Verb::Leave).await?;
        self.tables().leave(member.id);
        rest.after(()).await
    }
}

#[async_trait]
impl LogStore for MemoryLogStore {
    fn members(&self) -> &dyn Members {
        self
    }

    async fn open(&self, _sink: &Capabilities) -> Result<()> {
        self.script.before(Verb::Open).await?.after(()).await
    }

    async fn attach(&self, member: &Member, start: Start) -> Result<()> {
        let rest = self.script.before(Verb::Attach).await?;
        let attached = self.tables().attach(member, start, self.now());
        rest.after(attached).await?
    }

    async fn positions(&self, member: &Member, partitions: &[u16]) -> Result<Vec<Standing>> {
        let rest = self.script.before(Verb::Positions).await?;
        let standings = self.tables().positions(member, partitions);
        rest.after(standings).await?
    }

    async fn consumer_state(&self, member: &Member) -> Result<ConsumerState> {
        let rest = self.script.before(Verb::Watch).await?;
        let watch = self.tables().consumer_state(member);
        rest.after(watch).await?
    }

    async fn read(&self, request: &ReadRequest<'_>) -> Result<Read> {
        let rest = self.script.before(Verb::Read).await?;
        let read = self.tables().read(request);
        rest.after(read).await?
    }

    async fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>> {
        let rest = self.script.before(Verb::Reread).await?;
        let rows = self.tables().reread(request, seqs);
        rest.after(rows).await?
    }

    async fn due(&self, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due> {
        let rest = self.script.before(Verb::Due).await?;
        let due = self.tables().due(request, except, self.now());
        rest.after(due).await
    }

    async fn settle(&self, member: &Member, changes: &Changes) -> Result<Vec<u16>> {
        let rest = self.script.before(Verb::Settle).await?;
        let refused = self.tables().settle(member, changes, self.now());
        rest.after(refused).await?
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        let rest = self.script.before(Verb::Unhold).await?;
        let freed = self.tables().unhold(member, Some(partitions), self.now());
        rest.after(freed).await
    }

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        let rest = self.script.before(Verb::Backlog).await?;
        let backlog = self.tables().backlog(member);
        rest.after(backlog).await
    }

    async fn wait(&self, at_most: Duration) {
        // A timeout is the ordinary end of waiting.
        let _ = tokio::time::timeout(at_most, self.database.published.notified()).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
