//! A reader does not prevent a server from shutting down, and loses no events when it does.

use std::{collections::HashSet, sync::Arc, time::Duration};

use airtight_postgres::{CdcOptions, Lsn};
use airtight_testkit::{logged::Logged, postgres_server::PrivateServer, wait::eventually};
use sqlx::{Connection, PgConnection, PgPool};

use crate::support::{Fixture, Recorder, SOON};

/// How long it may take until the server is down. Without a reader it is down within half a second.
const DOWN: Duration = Duration::from_secs(10);

/// What the reader does while its server is shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Busy {
    /// Nothing.
    Idle,
    /// Delivers what others write.
    Working,
    /// Waits for its sink, with more to read than it may hold.
    Blocked,
}

async fn shut_down(server: &Arc<PrivateServer>, mode: &'static str) -> Duration {
    let server = server.clone();
    tokio::task::spawn_blocking(move || server.shut_down(mode, DOWN)).await.unwrap().unwrap()
}

/// Writes until the server ends it. Returns what was committed.
async fn write(url: String) -> Vec<String> {
    let mut conn = PgConnection::connect(&url).await.unwrap();
    let mut committed = Vec::new();
    for n in 1.. {
        let insert = "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
             VALUES ('test.cdc', 'Tested', 'Thing', 'w', jsonb_build_object('n', $1::bigint))";
        if sqlx::query(insert).bind(n).execute(&mut conn).await.is_err() {
            break;
        }
        committed.push(format!("w:{n}"));
    }
    committed
}

/// Commits so many events at once, of many keys.
async fn backlog(f: &Fixture, events: i64, size: i64) -> Vec<String> {
    f.sql(&format!(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'test.cdc', 'Tested', 'Thing', 'b' || n % 50, jsonb_build_object('n', n, 'x', repeat('x', {size})) \
         FROM generate_series(1, {events}) AS n"
    ))
    .await;
    (1..=events).map(|n| format!("b{}:{n}", n % 50)).collect()
}

async fn stops(test: &str, mode: &'static str, busy: Busy) {
    let Some(server) = PrivateServer::start_with(test, &["wal_level = logical"]) else { return };
    let server = Arc::new(server);
    let log = Logged::start();
    let mut f = Fixture::on(&server.url()).await;
    let sink = Recorder::default();
    let options = CdcOptions { buffer_bytes: 256 << 10, ..f.options() };
    let relay = f.start_with(options, &sink);
    f.publish("a", 0..10).await;
    sink.has(10).await;
    f.streams().await;
    let mut committed: Vec<String> = (0..10).map(|n| format!("a:{n}")).collect();
    let mut writer = None;
    match busy {
        // Nothing of the outbox, but WAL that the position is behind.
        Busy::Idle => {
            f.sql("CREATE TABLE noise AS SELECT generate_series(1, 1000) AS n").await;
        }
        // A smart shutdown waits for whoever writes, so then there is a backlog instead.
        Busy::Working if mode == "fast" => {
            writer = Some(tokio::spawn(write(server.url())));
            sink.has(50).await;
        }
        Busy::Working => {
            committed.extend(backlog(&f, 20_000, 10).await);
            sink.has(500).await;
        }
        Busy::Blocked => {
            sink.hold_at(10);
            // More than sockets hold.
            committed.extend(backlog(&f, 10_000, 3000).await);
            f.is_read().await;
        }
    }
    // The test's own must not be waited for.
    f.pool.close().await;
    let before = log.text().len();
    let took = shut_down(&server, mode).await;
    println!("{mode}, {busy:?}: stopped after {took:.1?}");
    // What it says while the server is away, for as long as it is.
    let end = std::time::Instant::now() + Duration::from_secs(3);
    eventually(SOON, "some time to pass", async || std::time::Instant::now() > end).await;
    let said = log.text()[before..].to_owned();
    assert!(said.lines().count() < 20, "{} lines in {took:?} and 3 s:\n{said}", said.lines().count());
    if let Some(writer) = writer {
        committed.extend(writer.await.unwrap());
    }
    sink.release();
    tokio::task::spawn_blocking({
        let server = server.clone();
        move || server.resume()
    })
    .await
    .unwrap();
    f.pool = PgPool::connect(&server.url()).await.unwrap();
    let everything = async || {
        // Looking at all of them takes a while.
        sink.count() >= committed.len() && {
            let arrived: HashSet<String> = sink.arrived().into_iter().collect();
            committed.iter().all(|name| arrived.contains(name))
        }
    };
    eventually(Duration::from_secs(60), "everything that was committed", everything).await;
    // The position is stored, and told to the server.
    let end: Lsn = f.text("SELECT pg_current_wal_flush_lsn()::text").await.parse().unwrap();
    eventually(SOON, "the position", async || {
        let stored: Lsn = f.text("SELECT lsn::text FROM airtight.slot").await.parse().unwrap();
        let confirmed = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE NOT temporary";
        stored >= end && f.text(confirmed).await.parse::<Lsn>().unwrap() >= end
    })
    .await;
    eventually(SOON, "marks", async || {
        f.number("SELECT count(*) FROM airtight.outbox WHERE status <> 'done'").await == 0
    })
    .await;
    relay.stop().await;
    println!("{mode}, {busy:?}: {} deliveries of {}", sink.count(), committed.len());
}

#[tokio::test]
async fn a_fast_shutdown_of_an_idle_server() {
    stops("fast_idle", "fast", Busy::Idle).await;
}

#[tokio::test]
async fn a_fast_shutdown_of_a_busy_server() {
    stops("fast_busy", "fast", Busy::Working).await;
}

#[tokio::test]
async fn a_fast_shutdown_while_the_sink_blocks() {
    stops("fast_blocked", "fast", Busy::Blocked).await;
}

#[tokio::test]
async fn a_smart_shutdown_of_an_idle_server() {
    stops("smart_idle", "smart", Busy::Idle).await;
}

#[tokio::test]
async fn a_smart_shutdown_of_a_busy_server() {
    stops("smart_busy", "smart", Busy::Working).await;
}

#[tokio::test]
async fn a_smart_shutdown_while_the_sink_blocks() {
    stops("smart_blocked", "smart", Busy::Blocked).await;
}
