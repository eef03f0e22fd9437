//! Connections that silently carry no data any more: a load balancer that failed over, a dropped NAT entry. Each wait for
//! an answer ends, deliveries continue over new connections, and a shutdown ends in time.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

use std::{sync::Arc, time::Duration};

use airtight_core::{
    NewEvent, Policy, Relay, Source, admin::Admin, log::LogOptions, queue::QueueOptions, sinks::MemorySink,
    table::Shape,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{mute::MuteProxy, postgres::TestDb, wait::eventually};
use tokio::{task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(10);

/// The deadline of a statement, 10 s, and what follows it.
const RESUMED: Duration = Duration::from_secs(20);

const GRACE: Duration = Duration::from_secs(2);

/// An outbox, a relay that reaches it through a proxy, and a publisher that does not.
struct HalfOpen {
    _db: TestDb,
    proxy: MuteProxy,
    publisher: PgOutbox,
    sink: MemorySink,
    stop: CancellationToken,
    relay: JoinHandle<airtight_core::Result<airtight_core::relay::Summary>>,
}

impl HalfOpen {
    async fn start(test: &str, shape: Shape, options: PgOptions) -> Option<Self> {
        let db = TestDb::create(test).await?;
        let options = PgOptions { shape, ..options };
        let publisher = PgOutbox::connect(&db.url(), options.clone()).await.unwrap();
        publisher.migrate().await.unwrap();
        let proxy = MuteProxy::before(&db.url()).await;
        let outbox = PgOutbox::connect(&proxy.through(&db.url()), options).await.unwrap();
        let source: Arc<dyn Source> = match shape {
            Shape::Queue => Arc::new(outbox.queue(QueueOptions::default())),
            Shape::Log => Arc::new(outbox.log(LogOptions::consumer("c"))),
        };
        let (sink, stop) = (MemorySink::default(), CancellationToken::new());
        let policy = Policy { grace: GRACE, ..Policy::default() };
        let relay = Relay::from_parts(source, Arc::new(sink.clone())).policy(policy);
        let relay = tokio::spawn(relay.run(stop.clone()));
        let it = Self { _db: db, proxy, publisher, sink, stop, relay };
        it.publish(10).await;
        it.delivered(10, SOON).await;
        Some(it)
    }

    async fn publish(&self, count: usize) {
        let events: Vec<NewEvent> =
            (0..count).map(|n| NewEvent::new("s", "T", "A", format!("k{n}"))).collect();
        Admin::publish(&self.publisher, &events).await.unwrap();
    }

    async fn delivered(&self, count: usize, within: Duration) {
        eventually(within, "deliveries", async || self.sink.len() >= count).await;
    }

    /// Mutes all connections, and returns how long it took until deliveries went on.
    async fn goes_on(&self, within: Duration) -> Duration {
        let before = self.sink.len();
        self.proxy.mute();
        let muted = Instant::now();
        self.publish(10).await;
        self.delivered(before + 10, within).await;
        muted.elapsed()
    }

    /// Tells the relay to stop, and returns how long it took.
    async fn stops(self) -> Duration {
        let told = Instant::now();
        self.stop.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(60), self.relay).await;
        ended.expect("it ends").unwrap().unwrap();
        told.elapsed()
    }
}

async fn deliveries_go_on(test: &str, shape: Shape) {
    let Some(it) = HalfOpen::start(test, shape, PgOptions::default()).await else { return };
    let took = it.goes_on(RESUMED).await;
    println!("{test}: deliveries went on after {took:.1?}");
    // And again: the pool has all its places back.
    for _ in 0..2 {
        let took = it.goes_on(RESUMED).await;
        println!("{test}: once more, after {took:.1?}");
    }
    // Others may still wait for the last ones.
    let took = it.stops().await;
    assert!(took < GRACE + Duration::from_secs(3), "{took:?}");
}

#[tokio::test]
async fn a_queue_over_mute_connections_goes_on() {
    deliveries_go_on("half_open_queue", Shape::Queue).await;
}

#[tokio::test]
async fn a_log_over_mute_connections_goes_on() {
    deliveries_go_on("half_open_log", Shape::Log).await;
}

/// The listener's connection is mute as well, and wakes nobody up any more.
#[tokio::test]
async fn a_listener_over_a_mute_connection_is_replaced() {
    let options = PgOptions { notify: Some(true), ..PgOptions::default() };
    let Some(it) = HalfOpen::start("half_open_listen", Shape::Queue, options).await else { return };
    let muted: String =
        sqlx::query_scalar("SELECT clock_timestamp()::text").fetch_one(it.publisher.pool()).await.unwrap();
    it.goes_on(RESUMED).await;
    // What a listener says last: LISTEN, or the ping after a silence.
    let new_listeners = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
         AND (query LIKE 'LISTEN%' OR query = 'SELECT 1') AND backend_start > $1::timestamptz";
    eventually(Duration::from_secs(30), "a second listener", async || {
        let count = sqlx::query_scalar::<_, i64>(new_listeners).bind(&muted);
        count.fetch_one(it.publisher.pool()).await.unwrap() >= 1
    })
    .await;
}

async fn it_stops(test: &str, shape: Shape, unreachable: bool) {
    let Some(it) = HalfOpen::start(test, shape, PgOptions::default()).await else { return };
    it.proxy.mute();
    it.proxy.mute_new(unreachable);
    it.publish(10).await;
    it.proxy.has_swallowed(SOON).await;
    let took = it.stops().await;
    println!("{test}: stopped {took:.1?} after it was told to, with a grace of {GRACE:?}");
    assert!(took < GRACE + Duration::from_secs(3), "{took:?}");
}

#[tokio::test]
async fn a_queue_over_mute_connections_stops_within_its_grace_and_a_little_more() {
    it_stops("half_open_queue_stop", Shape::Queue, false).await;
    it_stops("half_open_queue_stop_gone", Shape::Queue, true).await;
}

#[tokio::test]
async fn a_log_over_mute_connections_stops_within_its_grace_and_a_little_more() {
    it_stops("half_open_log_stop", Shape::Log, false).await;
    it_stops("half_open_log_stop_gone", Shape::Log, true).await;
}
