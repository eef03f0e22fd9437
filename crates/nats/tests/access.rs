//! Who is let in, who is told what, and what else may listen on a port: credentials, rights, TLS, strangers.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::time::{Duration, Instant};

use airtight_core::{Class, Delivery, Error, Outcome, Sink};
use airtight_nats::{NatsConfig, NatsSink};
use airtight_testkit::{
    brokers::nats::NatsServer,
    deliveries::{delivery, of, sample_event},
    ports::Port,
};
use support::{config, create_stream, expect, jetstream, orders, send, sink, stored};
use tokio::{io::AsyncWriteExt, net::TcpListener};

const SEED: &str = "SUANQDPB2RUOE4ETUA26CNX7FUKE5ZZKFCQIIW63OX225F2CO7UEXTM7ZY";

#[tokio::test]
async fn wrong_credentials_are_nobodys_fault_and_are_not_told() {
    let public = nkeys::KeyPair::from_seed(SEED).unwrap().public_key();
    let users = format!(
        "accounts {{ A {{ jetstream: enabled, users: [
            {{ user: relay, password: right }}, {{ nkey: {public} }}
        ] }} }}"
    );
    let name = "wrong_credentials_are_nobodys_fault_and_are_not_told";
    let Some(server) = NatsServer::start_with(name, |_| users).await else { return };
    let jetstream = jetstream(&server.address(), Some(("relay", "right"))).await;
    create_stream(&jetstream, orders()).await;
    let with = |credentials: &str| {
        NatsConfig::from_url(&format!("nats://{credentials}{}/orders.{{event_type}}", server.address()))
            .unwrap()
    };
    let mut by_key = with("");
    by_key.nkey = Some(SEED.into());
    for (seq, good) in [(1, with("relay:right@")), (2, by_key)] {
        let good = sink(good);
        good.open().await.unwrap();
        send(&good, delivery(seq, "k")).await.unwrap();
    }
    let mut other_key = with("");
    other_key.nkey = Some(nkeys::KeyPair::new_user().seed().unwrap());
    for bad in [with(""), with("relay:hunter2@"), with("hunter2@"), other_key] {
        let bad = sink(bad);
        let opened = bad.open().await.unwrap_err();
        let sent = send(&bad, delivery(3, "k")).await.unwrap_err();
        for error in [opened, sent] {
            expect(&error, Class::Unavailable, "credentials", &[&server.address()]);
            assert!(!format!("{error:?} {bad:?}").contains("hunter2"), "{error:?} tells a secret");
        }
    }
}

#[tokio::test]
async fn a_token_is_enough_where_the_server_says_so() {
    let name = "a_token_is_enough_where_the_server_says_so";
    let Some(server) = NatsServer::start_with(name, |_| "authorization { token: t0k3n }".into()).await else {
        return;
    };
    let url = |token: &str| format!("nats://{token}@{}/orders.x?stream=ORDERS&create=true", server.address());
    let good = sink(NatsConfig::from_url(&url("t0k3n")).unwrap());
    good.open().await.unwrap();
    send(&good, delivery(1, "k")).await.unwrap();
    let bad = sink(NatsConfig::from_url(&url("other")).unwrap());
    expect(&bad.open().await.unwrap_err(), Class::Unavailable, "credentials", &[]);
}

#[tokio::test]
async fn a_missing_right_is_said_at_once() {
    let users = r#"accounts { A { jetstream: enabled, users: [
        { user: admin, password: pw }
        { user: mute, password: pw, permissions: { publish: "orders.Allowed", subscribe: "_INBOX.>" } }
        { user: deaf, password: pw, permissions: { publish: "orders.>", subscribe: "acks.>" } }
    ] } }"#;
    let Some(server) = NatsServer::start_with("a_missing_right_is_said_at_once", |_| users.into()).await
    else {
        return;
    };
    let jetstream = jetstream(&server.address(), Some(("admin", "pw"))).await;
    create_stream(&jetstream, orders()).await;
    let of_user = |user: &str| {
        let mut config = config(&server.address());
        (config.user, config.password) = (Some(user.into()), Some("pw".into()));
        // Much longer than the test should take.
        config.timeout = Duration::from_secs(40);
        config
    };

    let mute = sink(of_user("mute"));
    let started = Instant::now();
    let error = send(&mute, delivery(1, "k")).await.unwrap_err();
    expect(&error, Class::Unavailable, "not_permitted", &["\"orders.Tested\"", "allow the user to publish"]);
    let mut allowed = sample_event(2, "k");
    allowed.event_type = "Allowed".into();
    send(&mute, of(allowed.clone())).await.unwrap();
    // No right to ask about the stream is no reason not to publish to it.
    let mut named = of_user("mute");
    named.stream = Some("ORDERS".into());
    let named = sink(named);
    named.open().await.unwrap();
    send(&named, of(allowed)).await.unwrap();

    let error = send(&sink(of_user("deaf")), delivery(3, "k")).await.unwrap_err();
    expect(&error, Class::Unavailable, "not_permitted", &["`_INBOX.>`", "inbox_prefix"]);
    let mut hearing = of_user("deaf");
    hearing.inbox_prefix = "acks".into();
    send(&sink(hearing), delivery(3, "k")).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(30), "took {:?}", started.elapsed());
}

#[tokio::test]
async fn an_account_without_jetstream_is_told_so() {
    let users = "accounts { A { users: [ { user: relay, password: pw } ] } }";
    let Some(server) =
        NatsServer::start_with("an_account_without_jetstream_is_told_so", |_| users.into()).await
    else {
        return;
    };
    let mut config = config(&server.address());
    (config.user, config.password) = (Some("relay".into()), Some("pw".into()));
    config.stream = Some("ORDERS".into());
    let sink = sink(config);
    let error = sink.open().await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error:?}");
    assert!(error.message().contains("JetStream"), "{error}");
    let error = send(&sink, delivery(1, "k")).await.unwrap_err();
    expect(&error, Class::Unavailable, "no_stream", &["`orders.Tested`"]);
}

// Something else on the port, or nobody.

#[tokio::test]
async fn something_else_on_the_port_is_named_as_such() {
    let greetings: [(&[u8], &str); 5] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "wrong_protocol"),
        (b"-ERR unknown command\r\n", "wrong_protocol"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "wrong_protocol"),
        (b"\x00\xff\xfe\r\n", "wrong_protocol"),
        (b"INFO {\r\n", "wrong_protocol"),
    ];
    for (greeting, code) in greetings {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let greeting_everyone = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(greeting).await;
                let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
            }
        });
        let sink = sink(config(&address));
        let shown = String::from_utf8_lossy(greeting).into_owned();
        let error = sink.open().await.unwrap_err();
        assert_eq!((error.class(), error.code()), (Class::Unavailable, code), "{shown}: {error:?}");
        assert!(error.message().contains(&address) && !error.message().contains('\n'), "{error}");
        assert_eq!(send(&sink, delivery(1, "k")).await.unwrap_err().class(), Class::Unavailable);
        greeting_everyone.abort();
    }
}

#[tokio::test]
async fn a_port_that_stays_silent_or_hangs_up_is_not_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = listener.local_addr().unwrap().to_string();
    let mut config = config(&silent);
    config.connect_timeout = Duration::from_millis(200);
    let started = Instant::now();
    let quiet = sink(config.clone());
    let batch: Vec<Delivery> = (1..=100).map(|seq| delivery(seq, &format!("k{seq}"))).collect();
    for outcome in quiet.deliver(&batch).await {
        let Outcome::Failed(error) = outcome else { panic!("{outcome:?}") };
        expect(&error, Class::Unavailable, "unreachable", &["200ms", "something else than NATS"]);
    }
    // Once for all of them, not once for each.
    assert!(started.elapsed() < Duration::from_secs(10), "took {:?}", started.elapsed());

    let hanging_up = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let error = sink(config.clone()).open().await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error:?}");
    hanging_up.abort();

    let nobody = Port::reserve();
    config.servers = format!("127.0.0.1:{nobody}");
    expect(&sink(config).open().await.unwrap_err(), Class::Unavailable, "unreachable", &["refused"]);
}

#[tokio::test]
async fn one_server_of_several_is_enough() {
    let Some(server) = NatsServer::start("one_server_of_several_is_enough").await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, orders()).await;
    let nobody = Port::reserve();
    let servers = format!("127.0.0.1:{nobody},{}", server.address());
    let sink = sink(config(&servers));
    for seq in 1..=3 {
        sink.close().await.unwrap();
        send(&sink, delivery(seq, "k")).await.unwrap();
    }
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 3);
}

#[tokio::test]
async fn tls_trusts_the_given_authority_and_nobody_else() {
    let certified = || rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (ours, strange) = (certified(), certified());
    let files = tempfile::tempdir().unwrap();
    let (cert, key, other) =
        (files.path().join("cert.pem"), files.path().join("key.pem"), files.path().join("other.pem"));
    std::fs::write(&cert, ours.cert.pem()).unwrap();
    std::fs::write(&key, ours.signing_key.serialize_pem()).unwrap();
    std::fs::write(&other, strange.cert.pem()).unwrap();
    let tls = format!("tls {{ cert_file: \"{}\", key_file: \"{}\" }}", cert.display(), key.display());
    let name = "tls_trusts_the_given_authority_and_nobody_else";
    let Some(server) = NatsServer::start_with(name, |_| tls).await else { return };
    let port = server.process().port();
    let url = |scheme: &str, ca: &std::path::Path| {
        format!("{scheme}://localhost:{port}/orders.x?stream=ORDERS&create=true&ca={}", ca.display())
    };
    let open = async |url: &str| -> Result<NatsSink, Error> {
        let sink = sink(NatsConfig::from_url(url).unwrap());
        sink.open().await.map(|()| sink)
    };
    for (seq, scheme) in [(1, "tls"), (2, "nats")] {
        send(&open(&url(scheme, &cert)).await.unwrap(), delivery(seq, "k")).await.unwrap();
    }
    let untrusted = open(&url("tls", &other)).await.unwrap_err();
    expect(&untrusted, Class::Unavailable, "tls", &["certificate"]);
    let by_the_systems_roots = open(&format!("tls://localhost:{port}/orders.x")).await.unwrap_err();
    expect(&by_the_systems_roots, Class::Unavailable, "tls", &["certificate"]);

    // And a server that wants to know us.
    let private = files.path().join("other-key.pem");
    std::fs::write(&private, strange.signing_key.serialize_pem()).unwrap();
    let mutual = format!(
        "tls {{ cert_file: \"{}\", key_file: \"{}\", ca_file: \"{}\", verify: true }}",
        cert.display(),
        key.display(),
        other.display()
    );
    server.stop().await;
    server.reconfigure(&mutual);
    server.start_again().await;
    let unknown = open(&url("tls", &cert)).await.unwrap_err();
    assert_eq!(unknown.class(), Class::Unavailable, "{unknown:?}");
    let known = format!("{}&cert={}&key={}", url("tls", &cert), other.display(), private.display());
    send(&open(&known).await.unwrap(), delivery(3, "k")).await.unwrap();
}
