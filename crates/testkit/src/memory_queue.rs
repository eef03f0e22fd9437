//! A queue in memory: the reference model that real stores are compared to, and a store that can be made to fail.
//!
//! [`MemoryStore`] keeps the whole contract of [`QueueStore`], decided row by row. Its clones share everything;
//! [`MemoryStore::connection`] shares the tables but has its own faults and counters, so that one relay of
//! several can be disconnected. Its clock is real time plus whatever [`MemoryStore::advance`] added.
//!
//! The model shows what a store must do. It proves nothing about a database: locks, snapshots and lost connections are
//! tested against real databases.

mod admin;
pub(crate) mod tables;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use airtight_core::{
    Backlog, Error, NewEvent, Published, Result, Verdict,
    group::{Member, Members, Pulse},
    queue::{ClaimRequest, Claimed, QueueStore, RowClaim},
    state::State,
};
use async_trait::async_trait;
use tokio::sync::Notify;
use uuid::Uuid;

use self::tables::Tables;
pub use crate::script::{Gate, Verb, When};
use crate::script::{Script, broken};

/// An in-memory [`QueueStore`]; see the module.
#[derive(Debug, Clone)]
pub struct MemoryStore {
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

/// What a test may know of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowInfo {
    /// Its place.
    pub seq: i64,
    /// Its key.
    pub key: String,
    /// Its state.
    pub state: State,
    /// Attempts so far.
    pub attempts: u32,
    /// How often a relay vanished with it.
    pub lost_leases: u32,
    /// Whether it waits behind another.
    pub held: bool,
    /// The code of its last error.
    pub error_code: Option<String>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty outbox.
    pub fn new() -> Self {
        let database = Database {
            tables: Mutex::default(),
            start: Instant::now(),
            ahead: Mutex::new(Duration::ZERO),
            published: Notify::new(),
        };
        Self { database: Arc::new(database), script: Arc::default() }
    }

    /// Another connection to the same outbox, with its own faults and counters.
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

    /// Starts a transaction: `seq` is drawn at once, the events are seen after the commit.
    pub fn begin(&self) -> MemoryTransaction {
        MemoryTransaction { store: self.clone(), events: Vec::new() }
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
        let mut tables = self.tables();
        for id in tables.member_ids() {
            tables.leave(id);
        }
    }

    /// Makes every lease run out now, of relays and of rows. No relay has noticed yet.
    pub fn expire_leases(&self) {
        let now = self.now();
        self.tables().expire(now);
    }

    // --- looking ----------------------------------------------------------------------------------------

    /// All rows in seq order.
    pub fn rows(&self) -> Vec<RowInfo> {
        self.tables().rows.values().map(RowInfo::from).collect()
    }

    /// The row of an id.
    pub fn row(&self, id: &str) -> Option<RowInfo> {
        let tables = self.tables();
        let seq = tables.seq_of(id)?;
        tables.rows.get(&seq).map(RowInfo::from)
    }

    /// How many rows are in each state.
    pub fn counts(&self) -> BTreeMap<State, usize> {
        let mut counts = BTreeMap::new();
        for row in self.tables().rows.values() {
            *counts.entry(row.state).or_default() += 1;
        }
        counts
    }

    /// How many rows are in this state.
    pub fn count(&self, state: State) -> usize {
        self.counts().get(&state).copied().unwrap_or(0)
    }

    /// Relays on the list, expired or not.
    pub fn relays(&self) -> usize {
        self.tables().member_ids().len()
    }

    /// What relays did that the contract of a store forbids. A test ends by asserting that there is nothing.
    pub fn violations(&self) -> Vec<String> {
        self.tables().violations.iter().cloned().collect()
    }

    /// The operator's `UPDATE … SET status = 'pending'`, and nothing else.
    pub fn set_back_by_hand(&self, id: &str) {
        let mut tables = self.tables();
        if let Some(seq) = tables.seq_of(id) {
            tables.set_pending(seq);
        }
        drop(tables);
        self.database.published.notify_waiters();
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        lock(&self.database.tables)
    }
}

impl From<&tables::ModelRow> for RowInfo {
    fn from(row: &tables::ModelRow) -> Self {
        Self {
            seq: row.event.seq,
            key: row.event.aggregate_id.clone(),
            state: row.state,
            attempts: row.attempts,
            lost_leases: row.lost_leases,
            held: row.held,
            error_code: row.error.as_ref().map(|error| error.code().to_owned()),
        }
    }
}

/// A producer's transaction. Dropped without [`MemoryTransaction::commit`] it is rolled back, and the numbers it
/// drew stay holes.
#[derive(Debug)]
pub struct MemoryTransaction {
    store: MemoryStore,
    events: Vec<(i64, String, NewEvent)>,
}

impl MemoryTransaction {
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

    /// Commits: the events become visible.
    pub fn commit(self) -> Vec<Published> {
        let mut tables = self.store.tables();
        let published =
            self.events.into_iter().map(|(seq, id, event)| tables.insert(seq, id, &event)).collect();
        drop(tables);
        self.store.database.published.notify_waiters();
        published
    }

    /// Rolls back: the events never existed.
    pub fn rollback(self) {
        drop(self);
    }
}

#[async_trait]
impl Members for MemoryStore {
    async fn join(&self, member: &Member) -> Result<()> {
        let rest = self.script.before(Verb::Join).await?;
        let joined = self.tables().join(member, self.now());
        rest.after(joined).await?
    }

    async fn heartbeat(&self, member: &Member, rows: &[RowClaim]) -> Result<Pulse> {
        let rest = self.script.before(Verb::Heartbeat).await?;
        let pulse = self.tables().heartbeat(member, rows, self.now());
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
impl QueueStore for MemoryStore {
    fn members(&self) -> &dyn Members {
        self
    }

    async fn open(&self) -> Result<()> {
        self.script.before(Verb::Open).await?.after(()).await
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Claimed> {
        let rest = self.script.before(Verb::Claim).await?;
        let claimed = self.tables().claim(request, self.now());
        rest.after(claimed).await?
    }

    async fn settle(&self, _member: &Member, rows: &[(RowClaim, &Verdict)]) -> Result<Vec<bool>> {
        let rest = self.script.before(Verb::Settle).await?;
        let settled = self.tables().settle(rows, self.now());
        rest.after(settled).await
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        let rest = self.script.before(Verb::Unhold).await?;
        let freed = self.tables().unhold(member, partitions);
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
