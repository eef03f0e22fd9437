//! Brokers that are wrong, silent, frozen, full or gone.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use airtight_core::{Class, Delivery, Outcome, Payload, Sink};
use airtight_testkit::{
    brokers::rabbitmq::{RabbitmqServer, TlsFiles, shared},
    deliveries::{delivery, error_of, letters},
    wait::eventually,
};
use lapin::types::FieldTable;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::support::{Hand, PATIENCE, deliver_one, resident_memory, sink, threads, unique};

const MIB: u64 = 1 << 20;

/// A server that is not RabbitMQ.
async fn stranger<F: Future<Output = ()> + Send + 'static>(serve: fn(TcpStream) -> F) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    address
}

async fn http(mut stream: TcpStream) {
    let _ = stream.read(&mut [0; 100]).await;
    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
}

async fn rubbish(mut stream: TcpStream) {
    while stream.write_all(&[0x15; 4_096]).await.is_ok() {}
}

async fn silence(mut stream: TcpStream) {
    while stream.read(&mut [0; 100]).await.is_ok_and(|read| read > 0) {}
}

async fn goodbye(stream: TcpStream) {
    drop(stream);
}

/// AMQP 1.0, which says so.
async fn newer(mut stream: TcpStream) {
    let _ = stream.read(&mut [0; 8]).await;
    let _ = stream.write_all(b"AMQP\x00\x01\x00\x00").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_protocol_on_the_port_is_unavailable_and_said() {
    let quick = [("connect_timeout", "300ms")];
    for (who, address, expected) in [
        ("http", stranger(http).await, "does not speak AMQP 0-9-1"),
        ("rubbish", stranger(rubbish).await, "does not speak AMQP 0-9-1"),
        ("newer", stranger(newer).await, "does not speak AMQP 0-9-1"),
        ("silence", stranger(silence).await, "did not answer as RabbitMQ would"),
        ("goodbye", stranger(goodbye).await, "ended the connection before the AMQP handshake"),
    ] {
        let begun = Instant::now();
        let sink = sink(&format!("amqp://user:hunter2@{address}"), &quick);
        let of_open = sink.open().await.unwrap_err();
        let of_event = error_of(&deliver_one(&sink, &delivery(1, "k")).await);
        for error in [of_open, of_event] {
            assert_eq!(error.class(), Class::Unavailable, "{who}: {error:?}");
            assert!(error.message().contains(expected), "{who}: {error}");
            assert!(error.message().contains(&address.to_string()), "{who}: {error}");
            assert!(!format!("{error:?}").contains("hunter2"), "{who}: {error}");
        }
        assert!(begun.elapsed() < Duration::from_secs(3), "{who} took {:?}", begun.elapsed());
        // And in TLS.
        let sink = support::sink(&format!("amqps://user:hunter2@{address}"), &quick);
        let error = sink.open().await.unwrap_err();
        assert_eq!(error.class(), Class::Unavailable, "{who}: {error:?}");
        assert!(error.message().contains("TLS"), "{who}: {error}");
    }
}

/// Calls side by side do not wait for each other's attempts in turns.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_broker_costs_everyone_one_timeout() {
    let address = stranger(silence).await;
    let sink = sink(&format!("amqp://{address}"), &[("connect_timeout", "500ms")]);
    let begun = Instant::now();
    let events: Vec<_> = (0..8).map(|n| delivery(n, &n.to_string())).collect();
    for outcome in futures::future::join_all(events.iter().map(|event| deliver_one(&sink, event))).await {
        assert_eq!(error_of(&outcome).class(), Class::Unavailable);
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

/// lapin has a thread for each connection, which would wait for ever on its own.
#[tokio::test(flavor = "multi_thread")]
async fn attempts_at_a_silent_broker_leave_nothing_behind() {
    let address = stranger(silence).await;
    let sink = sink(&format!("amqp://{address}"), &[("connect_timeout", "20ms")]);
    assert!(sink.open().await.is_err());
    let (before, memory) = (threads(), resident_memory());
    for _ in 0..100 {
        assert!(sink.open().await.is_err());
    }
    eventually(PATIENCE, "the threads of given up connections have ended", async || threads() <= before + 3)
        .await;
    let grown = resident_memory().saturating_sub(memory);
    assert!(grown < 16 * MIB, "{grown} bytes more");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_and_hosts_are_unavailable_and_said() {
    let Some(url) = shared("wrong_credentials_and_hosts_are_unavailable_and_said") else { return };
    let at = url.split_once('@').unwrap().1;
    for (url, code, expected) in [
        (format!("amqp://airtight:hunter2@{at}"), "credentials", "does not accept the user `airtight`"),
        (format!("amqp://hunter:hunter2@{at}"), "credentials", "correct the user and the password"),
        (url.replace("%2F", "hunter-host"), "no_vhost", "no virtual host `hunter-host`"),
        (url.replace("%2F", ""), "no_vhost", "without a path it is `/`"),
        ("amqp://u:hunter2@127.0.0.1:1".into(), "unreachable", "cannot connect to amqp://127.0.0.1:1"),
        (
            "amqp://u:hunter2@nobody.invalid".into(),
            "unreachable",
            "cannot connect to amqp://nobody.invalid:5672",
        ),
    ] {
        let sink = sink(&url, &[]);
        let of_open = sink.open().await.unwrap_err();
        let of_event = error_of(&deliver_one(&sink, &delivery(1, "k")).await);
        for error in [of_open, of_event] {
            assert_eq!((error.class(), error.code()), (Class::Unavailable, code), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
            assert!(!format!("{error:?} {sink:?}").contains("hunter2"), "{error}");
        }
    }
}

fn heavy_batch(round: i64) -> Vec<Delivery> {
    let one = |n: i64| {
        let mut delivery = delivery(1 + round * 50 + n, &format!("key-{n}"));
        delivery.event.payload = Payload::Bytes(vec![7; 100_000].into());
        delivery
    };
    (0..50).map(one).collect()
}

/// A node that crashes, stays away, comes back, freezes and thaws, under one sink.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_crashes_and_freezes_is_waited_for() {
    let Some(server) = RabbitmqServer::start("a_broker_that_crashes_and_freezes_is_waited_for").await else {
        return;
    };
    const QUEUE: &str = "kept";
    Hand::on(&server.url()).await.make_queue(QUEUE, FieldTable::default()).await;
    // RabbitMQ 3.10 now and then forgets a queue that was declared a second before a crash, and all in it.
    server.ctl(&["eval", "mnesia:dump_log()."]);
    let sink =
        sink(&server.url(), &[("routing_key", QUEUE), ("timeout", "1s"), ("connect_timeout", "500ms")]);
    sink.open().await.unwrap();

    // What was confirmed survives a crash at once.
    let batch: Vec<_> = (0..500).map(|n| delivery(1 + n, &format!("key-{n}"))).collect();
    assert!(letters(&sink.deliver(&batch).await).chars().all(|letter| letter == 'd'));
    server.process().kill().await;

    // While it is away: unavailable, at once, and without hoarding.
    let error = error_of(&deliver_one(&sink, &delivery(1_000, "k")).await);
    assert_eq!(error.class(), Class::Unavailable, "{error:?}");
    let (end, before) = (Instant::now() + Duration::from_secs(4), resident_memory());
    let mut calls = 0;
    while Instant::now() < end {
        let outcomes = sink.deliver(&heavy_batch(calls)).await;
        for outcome in outcomes {
            assert!(
                matches!(&outcome, Outcome::Failed(error) if error.class() == Class::Unavailable),
                "{outcome:?}"
            );
        }
        calls += 1;
    }
    let grown = resident_memory().saturating_sub(before);
    println!("{calls} batches of 5 MB while away: {grown} bytes more");
    assert!(calls > 50 && grown < 32 * MIB, "{calls} batches, {grown} bytes more");

    // Back within a second of it being up.
    server.process().start_again().await;
    let up = Instant::now();
    let event = delivery(2_000, "k");
    let mut tries = 0;
    let last = loop {
        let outcome = deliver_one(&sink, &event).await;
        tries += 1;
        if matches!(outcome, Outcome::Delivered) || up.elapsed() > PATIENCE {
            break outcome;
        }
        tokio::task::yield_now().await;
    };
    let log = server.process().log_tail();
    assert!(matches!(last, Outcome::Delivered), "{last:?} after {tries} tries; the broker's log:\n{log}");
    println!("delivered {:?} after the broker was up", up.elapsed());
    assert!(up.elapsed() < Duration::from_secs(1), "{:?}", up.elapsed());
    let arrived = Hand::on(&server.url()).await.ids(QUEUE).await;
    for delivery in &batch {
        assert!(arrived.contains(&delivery.event.id), "{} was confirmed and is lost", delivery.event.seq);
    }

    // Frozen: connections stay, and nobody answers. That is no event's fault.
    server.process().suspend();
    let begun = Instant::now();
    let batch: Vec<_> = (0..300).map(|n| delivery(3_000 + n, &format!("key-{n}"))).collect();
    for outcome in sink.deliver(&batch).await {
        match outcome {
            Outcome::Failed(error) if error.class() == Class::Unavailable => {}
            Outcome::Skipped => {}
            other => panic!("with a frozen broker an event is {other:?}"),
        }
    }
    assert!(sink.open().await.is_err());
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}", begun.elapsed());
    server.process().resume();
    eventually(PATIENCE, "all events go", async || {
        letters(&sink.deliver(&batch).await).chars().all(|letter| letter == 'd')
    })
    .await;
    let arrived = Hand::on(&server.url()).await.ids(QUEUE).await;
    assert!(batch.iter().all(|delivery| arrived.contains(&delivery.event.id)));
    sink.close().await.unwrap();
}

/// One node with small limits, a TLS listener and several users, for all that needs such a one.
#[tokio::test(flavor = "multi_thread")]
async fn limits_rights_alarms_and_tls() {
    let files = tempfile::tempdir().unwrap();
    let certified = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let tls = TlsFiles { certificate: files.path().join("cert.pem"), key: files.path().join("key.pem") };
    std::fs::write(&tls.certificate, certified.cert.pem()).unwrap();
    std::fs::write(&tls.key, certified.signing_key.serialize_pem()).unwrap();
    let name = "limits_rights_alarms_and_tls";
    let settings = "max_message_size = 100000\nchannel_max = 20";
    let Some(server) = RabbitmqServer::start_with(name, settings, Some(tls.clone())).await else { return };
    too_large_is_alone(&server).await;
    rights(&server).await;
    speaks_tls(&server, &tls).await;
    alarm(&server).await;
}

/// The guilty event dies alone, and its key's prefix ends with it.
async fn too_large_is_alone(server: &RabbitmqServer) {
    let queue = unique("limit");
    let hand = Hand::on(&server.url()).await;
    hand.make_queue(&queue, FieldTable::default()).await;
    let sink = sink(&server.url(), &[("routing_key", &queue), ("format", "raw")]);
    let keys = ["a", "b", "a", "c", "a", "b"];
    let mut batch: Vec<_> = keys.iter().zip(1..).map(|(key, n)| delivery(n, key)).collect();
    batch.extend((10..200).map(|n| delivery(n, &format!("key-{n}"))));
    batch[2].event.payload = Payload::Bytes(vec![7; 100_001].into());
    batch[50].event.payload = Payload::Bytes(vec![7; 100_000].into());
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), format!("ddpdsd{}", "d".repeat(190)));
    let error = error_of(&outcomes[2]);
    assert_eq!((error.class(), error.code()), (Class::Permanent, "too_large"));
    assert!(error.message().contains("100001") && error.message().contains("100000"), "{error}");
    let mut arrived = hand.ids(&queue).await;
    arrived.sort();
    let mut sent: Vec<_> = batch.iter().map(|delivery| delivery.event.id.clone()).collect();
    sent.remove(4);
    sent.remove(2);
    sent.sort();
    assert_eq!(arrived, sent);
    // What was skipped can come again.
    assert!(matches!(deliver_one(&sink, &batch[4]).await, Outcome::Delivered));
}

async fn rights(server: &RabbitmqServer) {
    server.ctl(&["add_user", "reader", "reader"]);
    server.ctl(&["set_permissions", "reader", "", "", ".*"]);
    let url = server.url_as("reader", "reader");
    let queue = unique("rights");
    Hand::on(&server.url()).await.make_queue(&queue, FieldTable::default()).await;
    let cases = [
        (vec![("exchange", "amq.topic")], "may not write to exchange amq.topic"),
        (vec![("routing_key", queue.as_str()), ("declare", "true")], "may not declare queue rights"),
        (vec![("exchange", "mine"), ("declare", "true")], "may not declare exchange mine"),
    ];
    for (keys, expected) in cases {
        let error = error_of(&deliver_one(&sink(&url, &keys), &delivery(1, "k")).await);
        assert_eq!((error.class(), error.code()), (Class::Unavailable, "not_permitted"), "{error}");
        assert!(error.message().contains(expected), "{error}");
    }
    // A user without any rights to the virtual host does not even connect.
    server.ctl(&["clear_permissions", "reader"]);
    let error = sink(&url, &[]).open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "no_vhost"), "{error}");
}

async fn speaks_tls(server: &RabbitmqServer, files: &TlsFiles) {
    let url = server.tls_url().unwrap();
    let ca = files.certificate.to_str().unwrap();
    let queue = unique("tls");
    let known = sink(&url, &[("ca", ca), ("routing_key", &queue), ("declare", "true")]);
    known.open().await.unwrap();
    assert!(matches!(deliver_one(&known, &delivery(1, "k")).await, Outcome::Delivered));
    assert_eq!(Hand::on(&server.url()).await.ids(&queue).await.len(), 1);
    known.close().await.unwrap();
    // Signed by nobody that the system knows.
    let error = sink(&url, &[]).open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "tls"), "{error}");
    assert!(error.to_string().contains("certificate"), "{error}");
    // For another name.
    let error = sink(&url.replace("localhost", "127.0.0.1"), &[("ca", ca)]).open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "tls"), "{error}");
    // Plain AMQP on the port for TLS, and the other way round.
    let error = sink(&url.replace("amqps", "amqp"), &[]).open().await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error}");
    assert!(error.to_string().contains("amqps://"), "{error}");
    let error = sink(&server.url().replace("amqp:", "amqps:"), &[("ca", ca)]).open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "tls"), "{error}");
}

/// A broker short of memory takes nothing, says so, and is believed.
async fn alarm(server: &RabbitmqServer) {
    let queue = unique("alarm");
    let sink = sink(&server.url(), &[("routing_key", &queue), ("declare", "true"), ("timeout", "20s")]);
    assert!(matches!(deliver_one(&sink, &delivery(1, "k")).await, Outcome::Delivered));
    server.ctl(&["set_vm_memory_high_watermark", "absolute", "1"]);
    // The broker says it to whoever publishes next; that one may still be taken.
    let mut last = None;
    eventually(PATIENCE, "the broker says that it takes nothing", async || {
        last = deliver_one(&sink, &delivery(2, "k")).await.into();
        matches!(&last, Some(Outcome::Failed(_)))
    })
    .await;
    let error = error_of(&last.unwrap());
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "blocked"), "{error}");
    assert!(error.message().contains("memory"), "{error}");
    // From then on nobody waits, and nothing is piled up.
    let (begun, before) = (Instant::now(), resident_memory());
    for round in 0..100 {
        let outcomes = sink.deliver(&heavy_batch(round)).await;
        assert!(!letters(&outcomes).contains('d'), "{}", letters(&outcomes));
        assert_eq!(sink.open().await.unwrap_err().code(), "blocked");
    }
    let grown = resident_memory().saturating_sub(before);
    println!("100 batches of 5 MB while blocked: {:?}, {grown} bytes more", begun.elapsed());
    assert!(
        grown < 32 * MIB && begun.elapsed() < Duration::from_secs(10),
        "{grown} in {:?}",
        begun.elapsed()
    );
    server.ctl(&["set_vm_memory_high_watermark", "0.8"]);
    let event = delivery(3, "k");
    eventually(PATIENCE, "the alarm is over", async || {
        sink.open().await.is_ok() && matches!(deliver_one(&sink, &event).await, Outcome::Delivered)
    })
    .await;
    let arrived = Hand::on(&server.url()).await.ids(&queue).await;
    assert!(arrived.contains(&event.event.id));
}
