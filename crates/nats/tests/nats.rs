//! The NATS sink against a real server: what is stored, what each refusal means, and what bad input does.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::time::Duration;

use airtight_core::{
    Class, Delivery, Event, Format, Op, Outcome, Payload, Sink,
    format::{Incoming, decode},
};
use airtight_nats::NatsConfig;
use airtight_testkit::{
    brokers::nats::NatsServer,
    deliveries::{delivery, of, percent_decode, sample_event},
};
use async_nats::jetstream::stream::{Config, DiscardPolicy};
use futures::StreamExt;
use support::{Stored, config, create_stream, expect, jetstream, orders, send, sink, stored};

/// Starts a server with the stream `ORDERS`, or leaves the test.
macro_rules! server_with_orders {
    ($name:literal) => {{
        let Some(server) = NatsServer::start($name).await else { return };
        let jetstream = jetstream(&server.address(), None).await;
        create_stream(&jetstream, orders()).await;
        (server, jetstream)
    }};
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
    for (at, format) in Format::ALL.into_iter().chain([airtight_debezium::FORMAT]).enumerate() {
        event.id = format!("00000000-0000-7000-8000-{at:012}");
        let mut config = config(&server.address());
        config.format = format;
        send(&sink(config), of(event.clone())).await.unwrap();

        let message = stored(&jetstream, "ORDERS").await.pop().unwrap();
        let read = read_back(format, &message);
        assert_eq!(message.subject, "orders.Tested");
        let id = format!("{}/{}", event.id, message.subject);
        assert_eq!(message.header("Nats-Msg-Id"), Some(id), "{format:?}");
        assert_eq!(read.id, event.id, "{format:?}");
        assert_eq!(read.payload, event.payload, "{format:?}");
        let word = format.as_str();
        let type_of_body = message.header("content-type");
        match format {
            Format::Custom(_) => assert_eq!(type_of_body, None),
            Format::CloudEvents => assert!(type_of_body.unwrap().starts_with("application/cloudevents+json")),
            _ => assert_eq!(type_of_body.as_deref(), Some("application/json"), "{word}"),
        }
        if format != airtight_debezium::FORMAT {
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
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), Format::ALL.len() + 1);
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
    let first = format!("{}/orders.{}", sample_event(1, "k").id, event.event_type);
    event.headers.insert("Nats-Msg-Id".into(), first);
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
    expect(&error, Class::Unavailable, "timeout", &["`orders.Tested`", "300ms", "`no_ack`"]);
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
                expect(error, Class::Permanent, "bad_name", &[]);
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
    expect(&error, Class::Permanent, "bad_name", &[]);
    jetstream.get_stream("ORDERS").await.unwrap();
}
