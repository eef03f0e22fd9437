//! Connecting for replication, and staying connected.

use std::{process::Command, time::Duration};

use airtight_core::{Result, admin::Admin};
use airtight_postgres::CdcOptions;
use airtight_testkit::{logged::Logged, postgres_server::PrivateServer, wait::eventually};

use crate::support::{Fixture, Recorder, SOON, event};

impl Fixture {
    /// Delivers one more event over a connection of its own.
    async fn over(&self, url: String) -> Result<()> {
        let (options, sink) = (CdcOptions { url: Some(url), ..self.options() }, Recorder::default());
        self.publish("a", 1..2).await;
        self.drain_with(options, &sink).await?;
        assert!(sink.arrived().iter().all(|name| name == "a:1") && sink.count() >= 1);
        Ok(())
    }
}

#[tokio::test]
async fn every_way_to_log_in() {
    let Some(server) = PrivateServer::start_with("log_in", &["wal_level = logical"]) else { return };
    let f = Fixture::on(&server.url()).await;
    let port = server.port();
    f.sql(
        "CREATE ROLE scram SUPERUSER LOGIN PASSWORD 'p@ss w/örd%'; SET password_encryption = 'md5'; \
         CREATE ROLE md5 SUPERUSER LOGIN PASSWORD 'p@ss w/örd%'; CREATE ROLE clear SUPERUSER LOGIN PASSWORD 'p@ss w/örd%'",
    )
    .await;
    server.let_in(
        "local all all trust\nhost all airtight 127.0.0.1/32 trust\nhost all scram 127.0.0.1/32 scram-sha-256\n\
         host all md5 127.0.0.1/32 md5\nhost all clear 127.0.0.1/32 password\n",
    );
    for role in ["scram", "md5", "clear"] {
        let url = |password: &str| format!("postgres://{role}:{password}@127.0.0.1:{port}/postgres");
        f.over(url("p%40ss%20w%2F%C3%B6rd%25")).await.unwrap();
        let error = f.over(url("wrong")).await.unwrap_err();
        assert_eq!(error.code(), "credentials", "{role}: {error}");
        let error = f.over(format!("postgres://{role}@127.0.0.1:{port}/postgres")).await.unwrap_err();
        assert_eq!(error.code(), "credentials", "{role}: {error}");
    }
    let socket = server.socket();
    f.over(format!("postgres://airtight@localhost:{port}/postgres?host={}", socket.display())).await.unwrap();
    let error = f.over(format!("postgres://airtight@127.0.0.1:{port}/nowhere")).await.unwrap_err();
    assert_eq!(error.code(), "no_database", "{error}");
}

/// A key and a certificate for `name`, signed by itself.
fn certificate(directory: &std::path::Path, file: &str, name: &str) -> (String, String) {
    let (key, certificate) = (directory.join(format!("{file}.key")), directory.join(format!("{file}.crt")));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=airtight-test"])
        .args(["-addext", &format!("subjectAltName={name}")])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    (std::fs::read_to_string(key).unwrap(), std::fs::read_to_string(certificate).unwrap())
}

#[tokio::test]
async fn every_mode_of_tls() {
    let Some(server) = PrivateServer::start_with("tls", &["wal_level = logical"]) else { return };
    let f = Fixture::on(&server.url()).await;
    let port = server.port();
    let url = |role: &str, host: &str, rest: &str| {
        format!("postgres://{role}:secret@{host}:{port}/postgres?{rest}")
    };
    f.over(url("airtight", "127.0.0.1", "sslmode=prefer")).await.unwrap();
    let error = f.over(url("airtight", "127.0.0.1", "sslmode=require")).await.unwrap_err();
    assert!(error.code() == "tls" && error.message().contains("does not support TLS"), "{error}");

    let directory = std::env::temp_dir().join(f.slot().to_owned() + &port.to_string());
    std::fs::create_dir_all(&directory).unwrap();
    let (key, own) = certificate(&directory, "own", "IP:127.0.0.1");
    certificate(&directory, "other", "IP:127.0.0.1");
    server.write("server.key", &key);
    server.write("server.crt", &own);
    f.sql("CREATE ROLE tls SUPERUSER LOGIN PASSWORD 'secret'").await;
    f.sql("ALTER SYSTEM SET ssl = on").await;
    server.let_in("host all airtight 127.0.0.1/32 trust\nhostssl all tls 127.0.0.1/32 scram-sha-256\n");
    eventually(SOON, "TLS", async || f.text("SHOW ssl").await == "on").await;
    let root = |file: &str| format!("&sslrootcert={}", directory.join(file).display());
    let (own, other) = (root("own.crt"), root("other.crt"));
    let cases = [
        ("127.0.0.1", "sslmode=disable".to_owned(), Some("credentials")),
        ("127.0.0.1", "sslmode=prefer".into(), None),
        ("127.0.0.1", "sslmode=require".into(), None),
        ("127.0.0.1", format!("sslmode=verify-ca{own}"), None),
        ("127.0.0.1", format!("sslmode=verify-ca{other}"), Some("tls")),
        ("127.0.0.1", format!("sslmode=verify-full{own}"), None),
        ("127.0.0.1", format!("sslmode=verify-full{other}"), Some("tls")),
        ("localhost", format!("sslmode=verify-full{own}"), Some("tls")),
        ("localhost", format!("sslmode=verify-ca{own}"), None),
        ("127.0.0.1", "sslmode=verify-full&sslrootcert=/nowhere.pem".into(), Some("tls")),
    ];
    for (host, mode, code) in cases {
        let answer = f.over(url("tls", host, &mode)).await;
        assert_eq!(answer.as_ref().err().map(|error| error.code()), code, "{host} {mode}: {answer:?}");
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_goes_away_and_comes_back() {
    let Some(server) =
        PrivateServer::start_with("away", &["wal_level = logical", "synchronous_commit = off"])
    else {
        return;
    };
    let f = Fixture::on(&server.url()).await;
    let sink = Recorder::default();
    let relay = f.start(&sink);
    for round in 0..3 {
        for n in 0..200 {
            // Connections of before are found dead one by one.
            let event = [event("a", round * 1000 + n)];
            eventually(SOON, "a connection", async || Admin::publish(&f.outbox, &event).await.is_ok()).await;
        }
        sink.has(usize::try_from(round).unwrap() * 100 + 50).await;
        f.sql("SET synchronous_commit = on; CREATE TABLE IF NOT EXISTS x (i int); INSERT INTO x VALUES (1)")
            .await;
        server.stop();
        let end = std::time::Instant::now() + Duration::from_secs(if round == 0 { 5 } else { 1 });
        eventually(SOON, "some time to pass", async || std::time::Instant::now() > end).await;
        server.resume();
        eventually(SOON, "the server to answer", async || {
            sqlx::query("SELECT 1").execute(&f.pool).await.is_ok()
        })
        .await;
    }
    eventually(SOON, "a connection", async || Admin::publish(&f.outbox, &[event("last", 0)]).await.is_ok())
        .await;
    let committed: Vec<String> =
        sqlx::query_scalar("SELECT aggregate_id || ':' || (payload->>'n') FROM airtight.outbox")
            .fetch_all(&f.pool)
            .await
            .unwrap();
    eventually(Duration::from_secs(60), "everything that is in the table", async || {
        let arrived: std::collections::HashSet<String> = sink.arrived().into_iter().collect();
        committed.iter().all(|name| arrived.contains(name))
    })
    .await;
    assert!(committed.len() > 500, "{}", committed.len());
    relay.stop().await;
    println!("{} deliveries of {}", sink.count(), committed.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sink_that_blocks_for_longer_than_the_server_waits() {
    let Some(server) =
        PrivateServer::start_with("blocks", &["wal_level = logical", "wal_sender_timeout = 2s"])
    else {
        return;
    };
    let f = Fixture::on(&server.url()).await;
    let sink = Recorder::default();
    let options = CdcOptions { buffer_bytes: 64 << 10, ..f.options() };
    f.publish("a", 0..1).await;
    let relay = f.start_with(options, &sink);
    sink.has(1).await;
    f.streams().await;
    let pid = format!("SELECT active_pid::bigint FROM pg_replication_slots WHERE slot_name = '{}'", f.slot());
    let before = f.number(&pid).await;
    sink.hold_at(1);
    f.sql(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'test.cdc', 'Tested', 'Thing', 'a', jsonb_build_object('n', n, 'x', repeat('x', 500)) FROM generate_series(1, 20000) AS n",
    )
    .await;
    let end = std::time::Instant::now() + Duration::from_secs(8);
    eventually(SOON, "some time to pass", async || std::time::Instant::now() > end).await;
    assert_eq!(f.number(&pid).await, before, "it is the same connection");
    sink.release();
    sink.has(20_001).await;
    assert_eq!(f.number(&pid).await, before, "it is the same connection");
    relay.stop().await;
    assert_eq!(sink.count(), 20_001);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_for_clients_in_a_hurry_do_not_end_the_snapshot() {
    let Some(f) = Fixture::create("hurry").await else { return };
    f.sql(&format!(
        "ALTER DATABASE \"{0}\" SET idle_in_transaction_session_timeout = '300ms'; \
         ALTER DATABASE \"{0}\" SET statement_timeout = '2s'; ALTER DATABASE \"{0}\" SET lock_timeout = '300ms'",
        f.slot()
    ))
    .await;
    f.publish("a", 0..3000).await;
    let sink = Recorder::default();
    sink.hold_at(1);
    let options = CdcOptions { buffer_bytes: 64 << 10, mark: false, ..f.options() };
    let relay = f.start_with(options, &sink);
    sink.has(1).await;
    let end = std::time::Instant::now() + Duration::from_secs(2);
    eventually(SOON, "some time to pass", async || std::time::Instant::now() > end).await;
    sink.release();
    f.streams().await;
    sink.has(3000).await;
    relay.stop().await;
    assert_eq!(sink.count(), 3000, "the table was read once");
}

#[tokio::test]
async fn a_password_that_is_changed_is_not_tried_several_times_a_second() {
    let Some(server) = PrivateServer::start_with("rotated", &["wal_level = logical"]) else { return };
    let log = Logged::start();
    let f = Fixture::on(&server.url()).await;
    let port = server.port();
    f.sql("CREATE ROLE streams SUPERUSER LOGIN PASSWORD 'one'").await;
    server.let_in("host all airtight 127.0.0.1/32 trust\nhost all streams 127.0.0.1/32 scram-sha-256\n");
    let url = format!("postgres://streams:one@127.0.0.1:{port}/postgres");
    let (sink, options) = (Recorder::default(), CdcOptions { url: Some(url), ..f.options() });
    let relay = f.start_with(options, &sink);
    f.publish("a", 0..1).await;
    sink.has(1).await;
    f.streams().await;
    for (wrong, right) in [
        ("ALTER ROLE streams PASSWORD 'two'", "ALTER ROLE streams PASSWORD 'one'"),
        ("ALTER ROLE streams NOSUPERUSER NOREPLICATION", "ALTER ROLE streams SUPERUSER"),
    ] {
        f.sql(wrong).await;
        eventually(SOON, "the walsender to end", async || f.end_walsender().await).await;
        let before = log.count("cannot read the outbox");
        let end = std::time::Instant::now() + Duration::from_secs(8);
        eventually(SOON, "some time to pass", async || std::time::Instant::now() > end).await;
        let tries = log.count("cannot read the outbox") - before;
        println!("{wrong}: {tries} tries in 8 s");
        // After 0.2, 0.4, 0.8, 1.6, 3.2 s and so on.
        assert!((2..=8).contains(&tries), "{tries} tries in 8 s:\n{}", log.text());
        f.sql(right).await;
        f.streams().await;
    }
    f.publish("a", 1..2).await;
    sink.has(2).await;
    relay.stop().await;
}
