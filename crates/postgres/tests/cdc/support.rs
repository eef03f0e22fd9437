//! An outbox in its own database, and relays that follow it through the WAL.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use airtight_core::{
    Backoff, Capabilities, Delivery, Error, Event, NewEvent, Outcome, Policy, Relay, Result, Sink,
    admin::Admin, relay::Summary,
};
use airtight_postgres::{CdcOptions, PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, wait::eventually};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgPool};
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) struct Fixture {
    /// Keeps the database; none on a server of the test's own.
    _db: Option<TestDb>,
    url: String,
    slot: String,
    pub(crate) outbox: PgOutbox,
    pub(crate) pool: PgPool,
}

impl Fixture {
    pub(crate) async fn create(name: &str) -> Option<Self> {
        Self::with(name, PgOptions::default()).await
    }

    pub(crate) async fn with(name: &str, options: PgOptions) -> Option<Self> {
        let db = TestDb::create(&format!("cdc_{name}")).await?;
        let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
        outbox.migrate().await.unwrap();
        let pool = db.pool(10).await;
        let (slot, url) = (db.name().to_owned(), db.url());
        Some(Self { _db: Some(db), url, slot, outbox, pool })
    }

    /// On a server of the test's own.
    pub(crate) async fn on(url: &str) -> Self {
        let outbox = PgOutbox::connect(url, PgOptions::default()).await.unwrap();
        outbox.migrate().await.unwrap();
        let pool = PgPool::connect(url).await.unwrap();
        Self { _db: None, url: url.into(), slot: "airtight_test".into(), outbox, pool }
    }

    /// An outbox that is there already.
    pub(crate) async fn of(db: TestDb, outbox: PgOutbox) -> Self {
        let (pool, slot, url) = (db.pool(10).await, db.name().to_owned(), db.url());
        Self { _db: Some(db), url, slot, outbox, pool }
    }

    /// Slots are shared by all databases of the server, so each test has one of its own.
    pub(crate) fn options(&self) -> CdcOptions {
        let mut options = CdcOptions::slot(self.slot());
        options.log.read.lease = Duration::from_secs(2);
        options
    }

    pub(crate) fn url(&self) -> String {
        self.url.clone()
    }

    /// The slot's name, and the reader's.
    pub(crate) fn slot(&self) -> &str {
        &self.slot
    }

    pub(crate) async fn text(&self, sql: &str) -> String {
        let found: Option<String> =
            sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap();
        found.unwrap_or_default()
    }

    /// Ends the connection that streams, if there is one.
    pub(crate) async fn end_walsender(&self) -> bool {
        let ended = format!(
            "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots \
             WHERE slot_name = '{}' AND active_pid IS NOT NULL",
            self.slot()
        );
        self.number(&ended).await > 0
    }

    /// Drops the slot under whoever reads it.
    pub(crate) async fn drop_slot(&self) {
        let drop = format!("SELECT pg_drop_replication_slot('{}')", self.slot());
        eventually(SOON, "the slot to be dropped", async || {
            self.end_walsender().await;
            sqlx::query(AssertSqlSafe(drop.clone())).execute(&self.pool).await.is_ok()
        })
        .await;
    }

    /// Waits until nothing holds the slot: the connection of a relay that has ended may keep it for a moment.
    pub(crate) async fn is_free(&self) {
        let active =
            format!("SELECT count(active_pid) FROM pg_replication_slots WHERE slot_name = '{}'", self.slot());
        eventually(SOON, "the slot to be free", async || self.number(&active).await == 0).await;
    }

    /// Moves the slot to the end of the WAL. The connection of a relay that has ended may keep it for a moment.
    pub(crate) async fn advance_slot(&self) {
        let advance =
            format!("SELECT pg_replication_slot_advance('{}', pg_current_wal_flush_lsn())", self.slot());
        eventually(SOON, "the slot to be free", async || {
            sqlx::query(AssertSqlSafe(advance.clone())).execute(&self.pool).await.is_ok()
        })
        .await;
    }

    /// What `airtight cdc recover` does.
    pub(crate) async fn recover(&self) {
        let sql = format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{0}'; \
             UPDATE airtight.slot SET phase = 'new', lsn = NULL, system = NULL WHERE name = '{0}'",
            self.slot()
        );
        eventually(SOON, "the slot to be free", async || {
            sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&self.pool).await.is_ok()
        })
        .await;
    }

    /// Waits until somebody holds the slot, however far behind it is.
    pub(crate) async fn is_read(&self) {
        let active =
            format!("SELECT count(active_pid) FROM pg_replication_slots WHERE slot_name = '{}'", self.slot());
        eventually(SOON, "the slot to be read", async || self.number(&active).await == 1).await;
    }

    /// Waits until the relay streams.
    pub(crate) async fn streams(&self) {
        let active = format!(
            "SELECT count(*) FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid \
             WHERE s.slot_name = '{}' AND r.state = 'streaming'",
            self.slot()
        );
        eventually(SOON, "the stream", async || self.number(&active).await == 1).await;
    }

    pub(crate) async fn sql(&self, sql: &str) -> u64 {
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await;
        done.unwrap_or_else(|error| panic!("{sql}: {error}")).rows_affected()
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.unwrap()
    }

    pub(crate) async fn publish(&self, key: &str, numbers: std::ops::Range<i64>) {
        let events: Vec<NewEvent> = numbers.map(|n| event(key, n)).collect();
        Admin::publish(&self.outbox, &events).await.unwrap();
    }

    pub(crate) fn start(&self, sink: &Recorder) -> Running {
        self.start_with(self.options(), sink)
    }

    pub(crate) fn start_with(&self, options: CdcOptions, sink: &Recorder) -> Running {
        let stop = CancellationToken::new();
        let source = self.outbox.cdc(options).unwrap();
        let relay = Relay::new(source, sink.clone()).policy(policy());
        let task = tokio::spawn(relay.run(stop.clone()));
        Running { stop, task }
    }

    /// Delivers everything there is, and stops.
    pub(crate) async fn drain(&self, sink: &Recorder) -> Result<Summary> {
        self.drain_with(self.options(), sink).await
    }

    pub(crate) async fn drain_with(&self, options: CdcOptions, sink: &Recorder) -> Result<Summary> {
        let relay = Relay::new(self.outbox.cdc(options)?, sink.clone()).policy(policy());
        tokio::time::timeout(Duration::from_secs(60), relay.drain(CancellationToken::new()))
            .await
            .expect("a drain that ends")
    }
}

pub(crate) fn policy() -> Policy {
    let backoff = Backoff {
        base: Duration::from_millis(20),
        multiplier: 1.0,
        cap: Duration::from_millis(20),
        jitter: 0.0,
    };
    Policy {
        backoff,
        circuit: backoff,
        max_attempts: 3,
        poll: Duration::from_millis(100),
        ..Policy::default()
    }
}

pub(crate) fn event(key: &str, n: i64) -> NewEvent {
    NewEvent::new("test.cdc", "Tested", "Thing", key).json(&serde_json::json!({"n": n})).unwrap()
}

/// A relay in the background.
pub(crate) struct Running {
    stop: CancellationToken,
    task: JoinHandle<Result<Summary>>,
}

impl Running {
    /// Stops it as a shutdown would.
    pub(crate) async fn stop(self) -> Summary {
        self.stop.cancel();
        self.task.await.unwrap().unwrap()
    }

    /// Stops it as a shutdown would, whatever that says.
    pub(crate) async fn stopped(self) {
        self.stop.cancel();
        let _ = self.task.await.unwrap();
    }

    /// Drops everything where it stands, as a kill would.
    pub(crate) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Waits for it to end by itself.
    pub(crate) async fn error(self) -> Error {
        tokio::time::timeout(SOON, self.task).await.expect("an end").unwrap().unwrap_err()
    }
}

/// Keeps what it is given, and fails as it is told.
#[derive(Clone, Default)]
pub(crate) struct Recorder {
    events: Arc<Mutex<Vec<Event>>>,
    failing: Arc<Mutex<Vec<Failing>>>,
    /// With so many, nothing more is taken.
    limit: Arc<Mutex<Option<usize>>>,
    released: Arc<Notify>,
}

/// A key, and what is said of its events.
type Failing = (String, fn() -> Error);

impl Recorder {
    pub(crate) fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    /// What has arrived, as `key:n`.
    pub(crate) fn arrived(&self) -> Vec<String> {
        self.events().iter().map(name).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.events.lock().unwrap().len()
    }

    /// Blocks once it has so many, until it is told otherwise.
    pub(crate) fn hold_at(&self, count: usize) {
        *self.limit.lock().unwrap() = Some(count);
        self.released.notify_waiters();
    }

    pub(crate) fn release(&self) {
        *self.limit.lock().unwrap() = None;
        self.released.notify_waiters();
    }

    /// The same without repeats.
    pub(crate) fn first_arrivals(&self) -> Vec<String> {
        let mut seen = std::collections::HashSet::new();
        self.arrived().into_iter().filter(|name| seen.insert(name.clone())).collect()
    }

    pub(crate) fn fail(&self, key: &str, error: fn() -> Error) {
        self.failing.lock().unwrap().push((key.into(), error));
    }

    pub(crate) fn mend(&self) {
        self.failing.lock().unwrap().clear();
    }

    pub(crate) async fn has(&self, count: usize) {
        let what = format!("{count} events");
        eventually(SOON, &what, async || self.count() >= count).await;
    }
}

pub(crate) fn name(event: &Event) -> String {
    let payload: serde_json::Value = serde_json::from_slice(event.payload.as_bytes()).unwrap_or_default();
    format!("{}:{}", event.aggregate_id, payload["n"])
}

#[async_trait]
impl Sink for Recorder {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: false, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        loop {
            let released = self.released.notified();
            if self.limit.lock().unwrap().is_none_or(|limit| self.count() < limit) {
                break;
            }
            released.await;
        }
        let failing = self.failing.lock().unwrap().clone();
        let deliver = |delivery: &Delivery| {
            let error = failing.iter().find(|(key, _)| *key == delivery.event.aggregate_id);
            if let Some((_, error)) = error {
                return Outcome::Failed(error());
            }
            self.events.lock().unwrap().push(delivery.event.clone());
            Outcome::Delivered
        };
        batch.iter().map(deliver).collect()
    }
}
