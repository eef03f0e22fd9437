//! A server that is set back to an earlier state under a running relay, as when a snapshot of its disk is restored: the
//! same system and timeline, but an older WAL, an older position, and the relay's own row as it was. What commits
//! afterwards is delivered.
//!
//! The server is stopped by calls that block their thread, so the relay has another one.

use std::time::Duration;

use airtight_postgres::{CdcOptions, PgOptions, PgOutbox};
use airtight_testkit::{mute::MuteProxy, postgres_server::PrivateServer, wait::eventually};

use crate::support::{Fixture, Recorder};

/// As long as it takes to notice a mute connection and to come back.
const LONG: Duration = Duration::from_secs(60);

const LOGICAL: [&str; 1] = ["wal_level = logical"];

/// Longer than any of these tests: nobody is evicted meanwhile.
fn options(f: &Fixture) -> CdcOptions {
    let mut options = f.options();
    options.log.read.lease = Duration::from_secs(120);
    options
}

#[tokio::test(flavor = "multi_thread")]
async fn what_commits_after_a_server_was_set_back_is_delivered() {
    let Some(server) = PrivateServer::start_with("set_back", &LOGICAL) else { return };
    let mut f = Fixture::on(&server.url()).await;
    let sink = Recorder::default();
    let relay = f.start_with(options(&f), &sink);
    f.publish("a", 0..1).await;
    sink.has(1).await;
    server.save();
    f = Fixture::on(&server.url()).await;
    f.streams().await;
    // These move the relay's place far beyond what the server will have.
    f.publish("gone", 0..2_000).await;
    sink.has(2_001).await;
    is_stored(&f, "2001").await;

    server.set_back();
    f = Fixture::on(&server.url()).await;
    for n in 0..10 {
        f.publish("b", n..n + 1).await;
    }
    eventually(LONG, "what was committed since", async || {
        lost(&sink, "b", 10).is_empty() || relay.has_ended()
    })
    .await;
    assert_eq!(lost(&sink, "b", 10), Vec::<String>::new());
    f.publish("c", 0..10).await;
    eventually(LONG, "what comes next", async || lost(&sink, "c", 10).is_empty() || relay.has_ended()).await;
    assert_eq!(lost(&sink, "c", 10), Vec::<String>::new());
    relay.stop().await;
}

/// Idle, so that no event's number tells, only the place in the WAL.
#[tokio::test(flavor = "multi_thread")]
async fn an_idle_relay_notices_that_its_server_was_set_back() {
    let Some(server) = PrivateServer::start_with("set_back_idle", &LOGICAL) else { return };
    let mut f = Fixture::on(&server.url()).await;
    f.sql("CREATE TABLE other (x text)").await;
    let sink = Recorder::default();
    let relay = f.start_with(options(&f), &sink);
    f.publish("a", 0..1).await;
    sink.has(1).await;
    is_stored(&f, "1").await;
    server.save();
    f = Fixture::on(&server.url()).await;
    f.streams().await;
    let stored = "SELECT lsn::text FROM airtight.slot";
    let before = f.text(stored).await;
    f.sql("INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 10000)").await;
    eventually(LONG, "the idle place to move on", async || {
        f.number(&format!(
            "SELECT (pg_wal_lsn_diff(lsn, '{before}') > 5000000)::int::bigint FROM airtight.slot"
        ))
        .await
            == 1
    })
    .await;

    server.set_back();
    f = Fixture::on(&server.url()).await;
    for n in 0..10 {
        f.publish("b", n..n + 1).await;
    }
    eventually(LONG, "what was committed since", async || {
        lost(&sink, "b", 10).is_empty() || relay.has_ended()
    })
    .await;
    assert_eq!(lost(&sink, "b", 10), Vec::<String>::new());
    relay.stop().await;
}

/// In the middle of a large transaction that the server then never had, and back only when its WAL is as long as before, with
/// the stored position set by hand to what it was: no place tells, but the next transaction stands elsewhere. The remedy that
/// the message prints loses nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_diverged_loses_nothing_if_the_message_is_followed() {
    let Some(server) = PrivateServer::start_with("diverged", &LOGICAL) else { return };
    let mut f = Fixture::on(&server.url()).await;
    f.sql("CREATE TABLE other (x text)").await;
    let proxy = MuteProxy::before(&server.url()).await;
    f.outbox = PgOutbox::connect(&proxy.through(&server.url()), PgOptions::default()).await.unwrap();
    let sink = Recorder::default();
    // Rows are not marked: those that the server draws again have the numbers of those that it no longer has.
    let relay = f.start_with(CdcOptions { buffer_bytes: 64 << 10, mark: false, ..options(&f) }, &sink);
    f.publish("a", 0..1).await;
    sink.has(1).await;
    is_stored(&f, "1").await;
    let url = server.url();
    server.save();
    f = Fixture::on(&url).await;
    f.streams().await;

    // Half of it is read, and nothing of it settled.
    sink.hold_at(1);
    f.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'test.cdc', 'Tested', 'Thing', 'gone', jsonb_build_object('n', n, 'text', repeat('x', 1000)) \
         FROM generate_series(0, 19999) AS n",
    )
    .await;
    eventually(LONG, "the stream to wait for room", async || {
        f.number("SELECT count(*) FROM pg_stat_replication WHERE sent_lsn < pg_current_wal_flush_lsn()").await
            == 1
    })
    .await;
    proxy.mute();
    proxy.mute_new(true);
    let stored = f.text("SELECT lsn::text FROM airtight.slot").await;
    server.set_back();
    f = Fixture::on(&url).await;
    f.sql("INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 100000)").await;
    f.sql(&format!("UPDATE airtight.slot SET lsn = '{stored}'")).await;
    f.publish("b", 0..10).await;
    proxy.mute_new(false);
    // Without room nothing more is read.
    sink.release();

    // Whatever was half read is settled by then, or it is not: then the stream cannot be continued.
    eventually(LONG, "an end, or what was committed since", async || {
        relay.has_ended() || lost(&sink, "b", 10).is_empty()
    })
    .await;
    if relay.has_ended() {
        let error = relay.error().await;
        println!("{}: {error}", error.code());
        assert_eq!(error.code(), "diverged", "{error}");
        f.follow(&error).await;
        f.drain_with(CdcOptions { mark: false, ..options(&f) }, &sink).await.unwrap();
    } else {
        relay.stop().await;
    }
    assert_eq!(lost(&sink, "b", 10), Vec::<String>::new());
}

async fn is_stored(f: &Fixture, seq: &str) {
    let sql = "SELECT last_seq::text FROM airtight.partition WHERE grp LIKE 'cdc:%'";
    eventually(LONG, "the position to be stored", async || f.text(sql).await == seq).await;
}

fn lost(sink: &Recorder, key: &str, count: i64) -> Vec<String> {
    let arrived = sink.arrived();
    (0..count).map(|n| format!("{key}:{n}")).filter(|name| !arrived.contains(name)).collect()
}
