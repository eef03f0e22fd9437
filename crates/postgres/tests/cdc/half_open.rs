//! Connections that stay open but carry no data any more are given up, and deliveries continue.

use std::time::{Duration, Instant};

use airtight_postgres::{CdcOptions, PgOptions, PgOutbox};
use airtight_testkit::{logged::Logged, mute::MuteProxy, wait::eventually};

use crate::support::{Fixture, Recorder, SOON};

/// How long it may take until deliveries go on.
const SECONDS: Duration = Duration::from_secs(40);

impl Fixture {
    /// Replicates through the proxy. Statements go straight to the server.
    fn replicating_through(&self, proxy: &MuteProxy) -> CdcOptions {
        CdcOptions { url: Some(proxy.through(&self.url())), ..self.options() }
    }
}

async fn has(sink: &Recorder, count: usize) -> Duration {
    let since = Instant::now();
    eventually(SECONDS, "deliveries to go on", async || sink.count() >= count).await;
    since.elapsed()
}

#[tokio::test]
async fn a_stream_that_goes_mute() {
    let Some(f) = Fixture::create("mute_stream").await else { return };
    let (log, proxy, sink) = (Logged::start(), MuteProxy::before(&f.url()).await, Recorder::default());
    let relay = f.start_with(f.replicating_through(&proxy), &sink);
    f.publish("a", 0..1).await;
    sink.has(1).await;
    // The server says that it streams before the relay has read its answer. An event that arrives says both.
    f.streams().await;
    f.publish("a", 1..2).await;
    sink.has(2).await;
    proxy.mute();
    f.publish("a", 2..12).await;
    let took = has(&sink, 12).await;
    println!("the stream: deliveries went on after {took:.1?}");
    assert!(log.count("the connection is given up") == 1, "{}", log.text());
    relay.stop().await;
    assert_eq!(sink.arrived(), (0..12).map(|n| format!("a:{n}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_first_delivery_that_goes_mute() {
    let Some(f) = Fixture::create("mute_table").await else { return };
    let (log, proxy, sink) = (Logged::start(), MuteProxy::before(&f.url()).await, Recorder::default());
    f.publish("a", 0..3000).await;
    sink.hold_at(1);
    let options = CdcOptions { buffer_bytes: 64 << 10, ..f.replicating_through(&proxy) };
    let relay = f.start_with(options, &sink);
    sink.has(1).await;
    proxy.mute();
    sink.release();
    let took = has(&sink, 3000).await;
    println!("the first delivery: went on after {took:.1?}");
    assert!(log.count("the connection is given up") == 1, "{}", log.text());
    relay.stop().await;
    let arrived: std::collections::HashSet<String> = sink.arrived().into_iter().collect();
    assert_eq!(arrived.len(), 3000);
}

#[tokio::test]
async fn a_slot_that_is_made_behind_a_mute_connection() {
    let Some(f) = Fixture::create("mute_slot").await else { return };
    let (log, proxy, sink) = (Logged::start(), MuteProxy::before(&f.url()).await, Recorder::default());
    f.publish("a", 0..10).await;
    f.sql("CREATE TABLE writers (x int)").await;
    let mut writer = f.pool.begin().await.unwrap();
    sqlx::query("INSERT INTO writers VALUES (1)").execute(&mut *writer).await.unwrap();
    let relay = f.start_with(f.replicating_through(&proxy), &sink);
    eventually(SOON, "the slot to wait", async || log.count("creating the slot waits") > 0).await;
    proxy.mute();
    writer.commit().await.unwrap();
    let took = has(&sink, 10).await;
    println!("the slot: deliveries went on after {took:.1?}");
    relay.stop().await;
    assert_eq!(sink.first_arrivals(), (0..10).map(|n| format!("a:{n}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn every_connection_that_goes_mute() {
    let Some(mut f) = Fixture::create("mute_all").await else { return };
    let (log, proxy, sink) = (Logged::start(), MuteProxy::before(&f.url()).await, Recorder::default());
    let (direct, url) = (f.outbox.clone(), proxy.through(&f.url()));
    f.outbox = PgOutbox::connect(&url, PgOptions::default()).await.unwrap();
    let relay = f.start(&sink);
    f.outbox = direct;
    f.publish("a", 0..1).await;
    sink.has(1).await;
    f.streams().await;
    proxy.mute();
    f.publish("a", 1..11).await;
    let took = has(&sink, 11).await;
    println!("all connections: deliveries went on after {took:.1?}");
    eventually(SECONDS, "the position", async || {
        f.number("SELECT count(*) FROM airtight.outbox WHERE status <> 'done'").await == 0
    })
    .await;
    println!("{}", log.text());
    // And for good: a shutdown does not wait for what never comes.
    proxy.mute();
    proxy.mute_new(true);
    f.publish("a", 11..12).await;
    let since = Instant::now();
    relay.stopped().await;
    println!("stopped after {:.1?}", since.elapsed());
    assert!(since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());
}
