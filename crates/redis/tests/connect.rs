//! Who answers on the port, if anybody: strangers, silence, TLS.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::time::Instant;

use airtight_core::{Class, Sink};
use airtight_redis::{RedisConfig, RedisSink};
use airtight_testkit::{
    brokers::redis::RedisServer,
    deliveries::{delivery, error_of, letters},
    ports::Port,
};
use support::*;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// What a stranger does with a connection.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stranger {
    Http,
    Ssh,
    /// Sends back what it gets: valid Redis protocol, with the password in it.
    Echo,
    Rubbish,
    HangsUp,
    Silent,
}

/// A server of another kind; the task ends with the test.
async fn stranger(kind: Stranger) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 4_096];
                if kind == Stranger::Ssh {
                    let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await;
                }
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    let written = match kind {
                        Stranger::Http => stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await,
                        Stranger::Echo => stream.write_all(&buffer[..count]).await,
                        Stranger::Rubbish => stream.write_all(&[0x15, 3, 1, 0, 2, 2, 70]).await,
                        Stranger::HangsUp => return,
                        Stranger::Ssh | Stranger::Silent => Ok(()),
                    };
                    if written.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn another_protocol_on_the_port_is_unavailable_and_told() {
    for (kind, code, words) in [
        (Stranger::Http, "wrong_protocol", "does not speak Redis's protocol"),
        (Stranger::Ssh, "wrong_protocol", "does not speak Redis's protocol"),
        (Stranger::Rubbish, "wrong_protocol", "does not speak Redis's protocol"),
        (Stranger::Echo, "wrong_protocol", "does not speak Redis's protocol"),
        (Stranger::HangsUp, "connection_lost", "broke"),
        (Stranger::Silent, "timeout", "check that it is Redis"),
    ] {
        let port = stranger(kind).await;
        let within = if kind == Stranger::Silent { "500ms" } else { "10s" };
        let sink = sink_at(&format!("redis://app:hunter2@127.0.0.1:{port}?connect_timeout={within}"));
        let began = Instant::now();
        for error in [sink.open().await.unwrap_err(), send(&sink, delivery(1, "a")).await.unwrap_err()] {
            assert_eq!((error.class(), error.code()), (Class::Unavailable, code), "{kind:?}: {error}");
            assert!(error.to_string().contains(words), "{kind:?}: {error}");
            assert!(!error.to_string().contains("hunter2"), "{kind:?}: {error}");
        }
        assert!(began.elapsed() < PATIENCE, "{kind:?} took {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn nobody_there_is_unavailable() {
    let nobody = Port::reserve();
    let sink = sink_at(&format!("redis://127.0.0.1:{nobody}"));
    let error = sink.open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unreachable"));
    let batch: Vec<_> = (1..=3).map(|seq| delivery(seq, &format!("key-{seq}"))).collect();
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "uuu");
    assert_eq!(error_of(&outcomes[0]).code(), "unreachable");
    // A name that nobody knows.
    let error = sink_at("redis://redis.invalid").open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unreachable"), "{error}");
}

const TLS_TEST: &str = "tls_trusts_the_given_certificate_and_no_other";

#[tokio::test]
async fn tls_trusts_the_given_certificate_and_no_other() {
    let certified = || rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (ours, strange) = (certified(), certified());
    let key = ours.signing_key.serialize_pem();
    let certificate = ours.cert.pem();
    let start = |asks_back| RedisServer::start_tls(TLS_TEST, &certificate, &key, asks_back);
    let (Some(server), Some(asking)) = (start(false).await, start(true).await) else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let trusted = file("trusted.pem", &certificate);
    let untrusted = file("untrusted.pem", &strange.cert.pem());

    let sink = sink(&server, &format!("?ca={trusted}"));
    sink.open().await.unwrap();
    assert_eq!(letters(&sink.deliver(&[delivery(1, "a"), delivery(2, "a")]).await), "dd");

    for (url, code) in [
        (format!("{}?ca={untrusted}", server.url()), "tls"),
        // The system knows nothing of it.
        (server.url(), "tls"),
        // For another name than the certificate's.
        (format!("rediss://127.0.0.1:{}?ca={trusted}", server.port()), "tls"),
    ] {
        let error = sink_at(&url).open().await.unwrap_err();
        assert_eq!((error.class(), error.code()), (Class::Unavailable, code), "{url}: {error}");
        assert!(error.message().contains("certificate"), "{error}");
    }
    // Without TLS to a port that wants it, and the other way round.
    let error =
        sink_at(&format!("redis://127.0.0.1:{}?connect_timeout=1s", server.port())).open().await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error}");
    assert!(error.to_string().contains("rediss://") || error.code() == "connection_lost", "{error}");
    let Some(plain) = RedisServer::start(TLS_TEST).await else { return };
    let url = format!("rediss://localhost:{}?ca={trusted}", plain.port());
    let error = sink_at(&url).open().await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error}");

    // Files are read before anything is sent.
    let nothing = file("nothing.pem", "no certificate");
    for (query, words) in [
        (format!("ca={nothing}"), "holds no certificate"),
        ("ca=/nowhere/ca.pem".to_owned(), "/nowhere/ca.pem"),
        (format!("cert={trusted}&cert_key={nothing}"), "`cert_key`"),
    ] {
        let config = RedisConfig::from_url(&format!("rediss://localhost?{query}")).unwrap();
        let error = RedisSink::new(config).unwrap_err();
        assert_eq!((error.class(), error.code()), (Class::Permanent, "bad_config"), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    // One that wants to see ours.
    let error = sink_at(&format!("{}?ca={trusted}", asking.url())).open().await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error}");
    let own_key = file("key.pem", &key);
    let sink = sink_at(&format!("{}?ca={trusted}&cert={trusted}&cert_key={own_key}", asking.url()));
    sink.open().await.unwrap();
}

#[tokio::test]
async fn a_wrong_template_is_refused_before_anything_is_sent() {
    let config = RedisConfig::from_url("redis://localhost?key=%7Bagregate_type%7D").unwrap();
    let error = RedisSink::new(config).unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Permanent, "bad_template"));
    assert!(error.message().contains("`key`") && error.message().contains("aggregate_type"), "{error}");
}
