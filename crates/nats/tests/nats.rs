//! The NATS sink against a real server: what is stored, what each refusal means, and what bad input does.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::time::{Duration, Instant};

use airtight_core::{
    Class, Delivery, Error, Event, Format, Op, Outcome, Payload, Sink,
    format::{Incoming, decode},
    sinks::memory::sample_event,
};
use airtight_nats::{NatsConfig, NatsSink};
use airtight_testkit::brokers::{nats::NatsServer, process::free_port};
use async_nats::jetstream::stream::{Config, DiscardPolicy};
use futures::StreamExt;
use support::{
    Stored, config, create_stream, delivery, jetstream, of, orders, percent_decode, send, sink, stored,
};
use tokio::{io::AsyncWriteExt, net::TcpListener};

/// Starts a server with the stream `ORDERS`, or leaves the test.
macro_rules! server_with_orders {
    ($name:literal) => {{
        let Some(server) = NatsServer::start($name).await else { return };
        let jetstream = jetstream(&server.address(), None).await;
        create_stream(&jetstream, orders()).await;
        (server, jetstream)
    }};
}

#[track_caller]
fn expect(error: &Error, class: Class, code: &str, words: &[&str]) {
    assert_eq!((error.class(), error.code()), (class, code), "{error:?}");
    for word in words {
        assert!(error.message().contains(word), "`{error}` should say {word}");
    }
}

/// The event that a consumer makes of a message.
fn read_back(format: Format, message: &Stored) -> Event {
    let headers: Vec<(String, String)> = message
        .headers
        .iter()
        .flat_map(|(name, values)| {
            values.iter().map(|value| (percent_decode(name.as_ref()), percent_decode(value.as_str())))
        })
        .filter(|(name, _)| !name.starts_with("Nats-"))
        .collect();
    let incoming = Incoming {
        topic: &message.subject,
        headers: headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect(),
        body: Some(message.body.clone()),
        ..Incoming::default()
    };
    decode(format, &incoming).unwrap()
}

#[tokio::test]
async fn every_format_arrives_with_its_headers_and_body() {
    let (server, jetstream) = server_with_orders!("every_format_arrives_with_its_headers_and_body");
    let mut event = sample_event(7, "ключ\r\n50%");
    event.payload = Payload::Json("{ \"n\": 1.10 }".into());
    event
        .headers
        .insert("traceparent".into(), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
    event.headers.insert("tenant".into(), " naïve ".into());
    for (at, format) in Format::ALL.into_iter().enumerate() {
        event.id = format!("00000000-0000-7000-8000-{at:012}");
        let mut config = config(&server.address());
        config.format = format;
        send(&sink(config), of(event.clone())).await.unwrap();

        let message = stored(&jetstream, "ORDERS").await.pop().unwrap();
        let read = read_back(format, &message);
        assert_eq!(message.subject, "orders.Tested");
        assert_eq!(message.header("Nats-Msg-Id").as_deref(), Some(event.id.as_str()), "{format:?}");
        assert_eq!(read.id, event.id, "{format:?}");
        assert_eq!(read.payload, event.payload, "{format:?}");
        let word = format.as_str();
        let type_of_body = message.header("content-type");
        match format {
            Format::Debezium => assert_eq!(type_of_body, None),
            Format::CloudEvents => assert!(type_of_body.unwrap().starts_with("application/cloudevents+json")),
            _ => assert_eq!(type_of_body.as_deref(), Some("application/json"), "{word}"),
        }
        if format != Format::Debezium {
            assert_eq!(
                (&read.aggregate_id, read.event_type.as_str()),
                (&event.aggregate_id, "Tested"),
                "{word}"
            );
        }
        if matches!(format, Format::Raw | Format::Envelope | Format::Event) {
            assert_eq!(read.headers["tenant"], " naïve ", "{word}");
            assert_eq!((read.seq, read.stream.as_str()), (7, "test.stream"), "{word}");
        }
        if format == Format::CloudEventsBinary {
            assert_eq!(message.header("ce-type").as_deref(), Some("Tested"));
        }
    }
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), Format::ALL.len());
}

#[tokio::test]
async fn a_preview_is_what_is_sent() {
    let (server, jetstream) = server_with_orders!("a_preview_is_what_is_sent");
    let mut config = config(&server.address());
    config.format = Format::Raw;
    let sink = sink(config);
    let event = sample_event(1, "ключ");
    let preview = sink.preview(&event).unwrap().unwrap();
    send(&sink, of(event)).await.unwrap();
    let message = stored(&jetstream, "ORDERS").await.remove(0);
    assert_eq!(preview.destination, format!("subject {}", message.subject));
    assert_eq!(preview.body.unwrap(), message.body);
    assert_eq!(preview.headers.len(), message.headers.len());
    for (name, value) in &preview.headers {
        assert_eq!(
            message.headers.get(name.as_str()).map(|found| found.as_str()),
            Some(value.as_str()),
            "{name}"
        );
    }
}

#[tokio::test]
async fn a_repeat_is_delivered_and_stored_once() {
    let (server, jetstream) = server_with_orders!("a_repeat_is_delivered_and_stored_once");
    for _ in 0..3 {
        // Another relay, after a crash, as likely as the same one.
        send(&sink(config(&server.address())), delivery(1, "k")).await.unwrap();
    }
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 1);
}

/// A header of an event is data. To the server, this one would mean that all messages before it are to go.
#[tokio::test]
async fn the_server_obeys_no_header_of_an_event() {
    let Some(server) = NatsServer::start("the_server_obeys_no_header_of_an_event").await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, Config { allow_rollup: true, ..orders() }).await;
    let mut config = config(&server.address());
    config.format = Format::Raw;
    let sink = sink(config);
    send(&sink, delivery(1, "k")).await.unwrap();
    let mut event = sample_event(2, "k");
    event.headers.insert("Nats-Rollup".into(), "all".into());
    event.headers.insert("Nats-Msg-Id".into(), sample_event(1, "k").id);
    send(&sink, of(event)).await.unwrap();
    let messages = stored(&jetstream, "ORDERS").await;
    assert_eq!(messages.len(), 2);
    assert_eq!(messages[1].header("header.Nats-Rollup").as_deref(), Some("all"));
}

#[tokio::test]
async fn deletes_and_empty_bodies_arrive() {
    let (server, jetstream) = server_with_orders!("deletes_and_empty_bodies_arrive");
    let mut config = config(&server.address());
    config.format = Format::Raw;
    let mut event = sample_event(1, "gone");
    event.op = Op::Delete;
    event.payload = Payload::None;
    send(&sink(config), of(event)).await.unwrap();
    let message = stored(&jetstream, "ORDERS").await.remove(0);
    assert!(message.body.is_empty());
    assert_eq!(message.header("op").as_deref(), Some("delete"));
    assert_eq!(message.header("aggregateId").as_deref(), Some("gone"));
}

// Destinations.

#[tokio::test]
async fn a_missing_stream_is_nobodys_fault_and_is_made_if_allowed() {
    let Some(server) = NatsServer::start("a_missing_stream_is_nobodys_fault_and_is_made_if_allowed").await
    else {
        return;
    };
    let words = ["`orders.Tested`", "create=true"];
    let by_template = sink(config(&server.address()));
    by_template.open().await.unwrap();
    expect(&send(&by_template, delivery(1, "k")).await.unwrap_err(), Class::Unavailable, "no_stream", &words);

    let mut constant = config(&server.address());
    constant.subject = "orders.Tested".into();
    expect(&sink(constant).open().await.unwrap_err(), Class::Unavailable, "no_stream", &words);

    let mut named = config(&server.address());
    named.stream = Some("ORDERS".into());
    let named_sink = sink(named.clone());
    let words = ["`ORDERS`", "`orders.{event_type}`", "create=true"];
    expect(&named_sink.open().await.unwrap_err(), Class::Unavailable, "no_stream", &words);
    expect(&send(&named_sink, delivery(1, "k")).await.unwrap_err(), Class::Unavailable, "no_stream", &[]);

    named.create = true;
    let creating = sink(named);
    creating.open().await.unwrap();
    send(&creating, delivery(1, "k")).await.unwrap();
    creating.open().await.unwrap();
    let jetstream = jetstream(&server.address(), None).await;
    let made = jetstream.get_stream("ORDERS").await.unwrap().cached_info().config.clone();
    assert_eq!((made.subjects, made.num_replicas), (vec!["orders.>".to_owned()], 1));
    assert_eq!(made.storage, async_nats::jetstream::stream::StorageType::File);
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 1);

    // Gone again: nobody's fault again, and the next `open` makes it anew.
    jetstream.delete_stream("ORDERS").await.unwrap();
    expect(&send(&creating, delivery(2, "k")).await.unwrap_err(), Class::Unavailable, "no_stream", &[]);
    creating.open().await.unwrap();
    send(&creating, delivery(2, "k")).await.unwrap();
}

#[tokio::test]
async fn only_the_stream_that_was_named_will_do() {
    let (server, jetstream) = server_with_orders!("only_the_stream_that_was_named_will_do");
    let other = Config { name: "OTHER".into(), subjects: vec!["other".into()], ..Config::default() };
    create_stream(&jetstream, other).await;
    let mut config = config(&server.address());
    config.stream = Some("OTHER".into());
    let error = send(&sink(config), delivery(1, "k")).await.unwrap_err();
    expect(&error, Class::Unavailable, "wrong_stream", &["`orders.Tested`"]);
    assert!(stored(&jetstream, "ORDERS").await.is_empty(), "the other stream took it");
}

#[tokio::test]
async fn a_stream_that_is_full_makes_no_event_dead() {
    let Some(server) = NatsServer::start("a_stream_that_is_full_makes_no_event_dead").await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    let full = Config { max_messages: 1, discard: DiscardPolicy::New, ..orders() };
    create_stream(&jetstream, full).await;
    let sink = sink(config(&server.address()));
    send(&sink, delivery(1, "k")).await.unwrap();
    let error = send(&sink, delivery(2, "k")).await.unwrap_err();
    expect(&error, Class::Unavailable, "stream_full", &["`orders.Tested`", "maximum messages"]);
    jetstream.get_stream("ORDERS").await.unwrap().purge().await.unwrap();
    send(&sink, delivery(2, "k")).await.unwrap();
}

#[tokio::test]
async fn a_subject_that_is_full_leaves_others_alone() {
    let Some(server) = NatsServer::start("a_subject_that_is_full_leaves_others_alone").await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    let full = Config {
        max_messages_per_subject: 1,
        discard: DiscardPolicy::New,
        discard_new_per_subject: true,
        ..orders()
    };
    create_stream(&jetstream, full).await;
    let mut config = config(&server.address());
    config.subject = "orders.{aggregate_id}".into();
    let sink = sink(config);
    let outcomes = sink.deliver(&[delivery(1, "a"), delivery(2, "a"), delivery(3, "b")]).await;
    assert!(
        matches!(&outcomes[1], Outcome::Failed(error) if error.class() == Class::Retryable),
        "{outcomes:?}"
    );
    assert!(matches!((&outcomes[0], &outcomes[2]), (Outcome::Delivered, Outcome::Delivered)), "{outcomes:?}");
}

#[tokio::test]
async fn a_service_that_answers_is_not_a_stream() {
    let Some(server) = NatsServer::start("a_service_that_answers_is_not_a_stream").await else { return };
    let service = async_nats::connect(server.address()).await.unwrap();
    let mut requests = service.subscribe("orders.>").await.unwrap();
    service.flush().await.unwrap();
    let answering = tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            service.publish(request.reply.unwrap(), "ok".into()).await.unwrap();
        }
    });
    let error = send(&sink(config(&server.address())), delivery(1, "k")).await.unwrap_err();
    expect(&error, Class::Unavailable, "not_jetstream", &["`orders.Tested`", "`ok`"]);
    answering.abort();
}

#[tokio::test]
async fn a_stream_that_never_answers_is_found_out() {
    let Some(server) = NatsServer::start("a_stream_that_never_answers_is_found_out").await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, Config { no_ack: true, ..orders() }).await;
    let mut config = config(&server.address());
    config.timeout = Duration::from_millis(300);
    let error = send(&sink(config.clone()), delivery(1, "k")).await.unwrap_err();
    expect(&error, Class::Unavailable, "no_ack", &["`orders.Tested`", "300ms", "`no_ack`"]);
    config.stream = Some("ORDERS".into());
    expect(&sink(config).open().await.unwrap_err(), Class::Unavailable, "no_ack", &["`ORDERS`"]);
}

// Guilty events.

#[tokio::test]
async fn a_message_over_the_servers_limit_is_guilty_alone() {
    let name = "a_message_over_the_servers_limit_is_guilty_alone";
    let Some(server) = NatsServer::start_with(name, |_| "max_payload: 4096".into()).await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, orders()).await;
    let mut config = config(&server.address());
    config.format = Format::Raw;
    let sink = sink(config);
    // What is not the body: the same for all, since ids, keys and numbers have the same length.
    let preview = sink.preview(&sample_event(1, "a")).unwrap().unwrap();
    let headers =
        preview.headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum::<usize>() + 12;
    let sized = |seq, key, size: usize| {
        let mut event = sample_event(seq, key);
        event.payload = Payload::Json(format!("\"{}\"", "x".repeat(size - headers - 2)).into());
        of(event)
    };
    let batch = [sized(1, "a", 4096), sized(2, "b", 4097), sized(3, "c", 100_000), sized(4, "d", 1_000)];
    let outcomes = sink.deliver(&batch).await;
    for (at, size) in [(1, "4097"), (2, "100000")] {
        let Outcome::Failed(error) = &outcomes[at] else { panic!("{outcomes:?}") };
        expect(error, Class::Permanent, "too_large", &[size, "4096", "max_payload"]);
    }
    assert!(matches!((&outcomes[0], &outcomes[3]), (Outcome::Delivered, Outcome::Delivered)), "{outcomes:?}");
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 2);
}

#[tokio::test]
async fn a_message_over_the_streams_limit_is_guilty_alone() {
    let Some(server) = NatsServer::start("a_message_over_the_streams_limit_is_guilty_alone").await else {
        return;
    };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, Config { max_message_size: 2_000, ..orders() }).await;
    let sink = sink(config(&server.address()));
    let mut large = sample_event(2, "b");
    large.payload = Payload::Json(format!("\"{}\"", "x".repeat(2_000)).into());
    let outcomes = sink.deliver(&[delivery(1, "a"), of(large), delivery(3, "c")]).await;
    let Outcome::Failed(error) = &outcomes[1] else { panic!("{outcomes:?}") };
    expect(error, Class::Permanent, "too_large", &["2000", "max_msg_size"]);
    assert!(matches!((&outcomes[0], &outcomes[2]), (Outcome::Delivered, Outcome::Delivered)), "{outcomes:?}");
}

#[tokio::test]
async fn a_subject_that_nats_refuses_is_the_events_fault() {
    let (server, jetstream) = server_with_orders!("a_subject_that_nats_refuses_is_the_events_fault");
    let mut config = config(&server.address());
    config.subject = "orders.{aggregate_id}".into();
    let sink = sink(config);
    // The longest that is let through must not make the server hang up.
    let longest = "x".repeat(3_840 - "orders.".len());
    let keys = ["a b", "good", ".", "x.*.>", "line\r\nbreak", "ключ", &longest, &format!("{longest}x")];
    let batch: Vec<Delivery> = (1..).zip(keys).map(|(seq, key)| delivery(seq, key)).collect();
    let outcomes = sink.deliver(&batch).await;
    for (key, outcome) in keys.iter().zip(&outcomes) {
        match outcome {
            Outcome::Delivered => assert!(["good", "ключ", &longest].contains(key), "{key}"),
            Outcome::Failed(error) => {
                expect(error, Class::Permanent, "bad_subject", &[]);
                assert!(!["good", "ключ", &longest].contains(key), "{key}: {error}");
            }
            other => panic!("{other:?}"),
        }
    }
    let subjects: Vec<String> =
        stored(&jetstream, "ORDERS").await.into_iter().map(|message| message.subject).collect();
    assert_eq!(subjects.len(), 3);
    for key in ["good", "ключ", &longest] {
        assert!(subjects.contains(&format!("orders.{key}")));
    }
}

#[tokio::test]
async fn an_event_cannot_give_orders_to_the_server() {
    let (server, jetstream) = server_with_orders!("an_event_cannot_give_orders_to_the_server");
    let mut event = sample_event(1, "k");
    event.stream = "$JS.API.STREAM.DELETE.ORDERS".into();
    let error = send(&sink(NatsConfig::new(server.address())), of(event)).await.unwrap_err();
    expect(&error, Class::Permanent, "bad_subject", &[]);
    jetstream.get_stream("ORDERS").await.unwrap();
}

// Credentials and rights.

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
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not_nats"),
        (b"-ERR unknown command\r\n", "not_nats"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not_nats"),
        (b"\x00\xff\xfe\r\n", "not_nats"),
        (b"INFO {\r\n", "not_nats"),
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
        expect(&error, Class::Unavailable, "connect", &["200ms", "something else than NATS"]);
    }
    // Once for all of them, not once for each.
    assert!(started.elapsed() < Duration::from_secs(10), "took {:?}", started.elapsed());

    let hanging_up = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let error = sink(config.clone()).open().await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error:?}");
    hanging_up.abort();

    config.servers = format!("127.0.0.1:{}", free_port());
    expect(&sink(config).open().await.unwrap_err(), Class::Unavailable, "connect", &["refused"]);
}

#[tokio::test]
async fn one_server_of_several_is_enough() {
    let (server, jetstream) = server_with_orders!("one_server_of_several_is_enough");
    let servers = format!("127.0.0.1:{},{}", free_port(), server.address());
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
    expect(&untrusted, Class::Unavailable, "connect", &["certificate"]);
    let by_the_systems_roots = open(&format!("tls://localhost:{port}/orders.x")).await.unwrap_err();
    expect(&by_the_systems_roots, Class::Unavailable, "connect", &["certificate"]);

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
