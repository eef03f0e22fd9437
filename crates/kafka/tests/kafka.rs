//! What the conformance suite cannot ask: formats on the wire, topics, limits, and brokers that are not there or
//! not what they should be.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::{
    io::{Read, Write},
    net::TcpListener,
    time::{Duration, Instant},
};

use airtight_core::{Class, Format, Op, Payload, Sink};
use airtight_kafka::{KafkaConfig, KafkaSink};
use airtight_testkit::{
    deliveries::{error_of, letters, of, sample_event},
    ports::Port,
};

use self::support::{Tail, create_topic, shared, shared_or_mock, sink, sized, unique};

#[tokio::test]
async fn every_format_arrives_with_its_headers() {
    let Some(brokers) = shared_or_mock("every_format_arrives_with_its_headers") else { return };
    let mut event = sample_event(7, "acc-1");
    event.headers.insert("traceparent".into(), "00-aa-bb-01".into());
    for format in Format::ALL.into_iter().chain([airtight_debezium::FORMAT]) {
        let topic = unique(format.as_str());
        create_topic(&brokers, &topic, 1, &[]).await;
        let sink = sink(&format!("kafka://{brokers}/{topic}?format={}", format.as_str()));
        sink.open().await.unwrap();
        assert_eq!(letters(&sink.deliver(&[of(event.clone())]).await), "d", "{}", format.as_str());
        let seen = Tail::new(&brokers, &topic, 1).at_least(1).await.remove(0);
        let preview = sink.preview(&event).unwrap().unwrap();
        assert_eq!(seen.key.as_deref(), Some("acc-1"));
        assert_eq!(seen.headers, preview.headers, "{}", format.as_str());
        assert_eq!(seen.body.as_deref(), preview.body.as_deref());
        assert_eq!(preview.destination, format!("topic {topic}"));
        match format {
            Format::Raw => {
                assert_eq!(seen.text(), r#"{"n":7}"#);
                assert_eq!(seen.header("id"), Some(event.id.as_str()));
                assert_eq!(seen.header("eventType"), Some("Tested"));
                assert_eq!(seen.header("traceparent"), Some("00-aa-bb-01"));
            }
            Format::Custom(_) => assert_eq!(seen.headers, [("id".to_owned(), event.id.clone())]),
            Format::CloudEventsBinary => assert_eq!(seen.header("ce_type"), Some("Tested")),
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_delete_is_a_tombstone_and_an_empty_upsert_is_not() {
    let Some(brokers) = shared_or_mock("a_delete_is_a_tombstone_and_an_empty_upsert_is_not") else { return };
    let topic = unique("tombstones");
    create_topic(&brokers, &topic, 1, &[("cleanup.policy", "compact")]).await;
    let sink = sink(&format!("kafka://{brokers}/{topic}?format=raw&event_time=true"));
    let mut events = [sample_event(1, "k"), sample_event(2, "k"), sample_event(3, "k")];
    events[0].payload = Payload::None;
    events[1].op = Op::Delete;
    events[2].occurred_at = time::macros::datetime!(2026-01-25 12:00 UTC);
    let batch = events.map(of);
    assert_eq!(letters(&sink.deliver(&batch).await), "ddd");
    let seen = Tail::new(&brokers, &topic, 1).at_least(3).await;
    assert_eq!(seen[0].body.as_deref(), Some(&b""[..]));
    assert_eq!((seen[1].body.as_deref(), seen[1].header("payload")), (None, Some(r#"{"n":2}"#)));
    assert_eq!(seen[2].timestamp, Some(1_769_342_400_000));
}

#[tokio::test]
async fn keys_keep_their_order_when_a_batch_holds_many_of_each() {
    let test = "keys_keep_their_order_when_a_batch_holds_many_of_each";
    let Some(brokers) = shared_or_mock(test) else { return };
    let topic = unique("order");
    create_topic(&brokers, &topic, 3, &[]).await;
    let sink = sink(&format!("kafka://{brokers}/{topic}?batch.num.messages=7"));
    let batch: Vec<_> = (1..=500).map(|n| sized(n, &format!("k{}", n % 13), 20)).collect();
    assert_eq!(letters(&sink.deliver(&batch).await), "d".repeat(500));
    let seen = Tail::new(&brokers, &topic, 3).at_least(500).await;
    for key in 0..13 {
        let key = format!("k{key}");
        let of_key = seen.iter().filter(|seen| seen.key.as_deref() == Some(key.as_str()));
        let ids: Vec<&str> = of_key.map(|seen| seen.header("id").unwrap()).collect();
        assert!(ids.len() >= 38 && ids.is_sorted(), "{key}: {ids:?}");
    }
}

#[tokio::test]
async fn one_message_too_large_dies_alone_and_its_key_waits() {
    let Some(brokers) = shared("one_message_too_large_dies_alone_and_its_key_waits") else { return };
    let topic = unique("limit");
    create_topic(&brokers, &topic, 1, &[("max.message.bytes", "20000")]).await;
    // Each message a request of its own, so that those behind the large one are on their way when it is refused.
    let sink = sink(&format!("kafka://{brokers}/{topic}?batch.num.messages=1&linger.ms=0"));
    sink.open().await.unwrap();
    // Two of its key before it, two behind it; other keys around.
    let batch = [
        sized(1, "a", 100),
        sized(2, "big", 100),
        sized(3, "b", 100),
        sized(4, "big", 100),
        sized(5, "big", 50_000),
        sized(6, "big", 100),
        sized(7, "c", 100),
        sized(8, "big", 100),
    ];
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "ddddpsds");
    assert_eq!(error_of(&outcomes[4]).code(), "too_large");
    let tail = Tail::new(&brokers, &topic, 1);
    // And the next call finds a producer that works.
    assert_eq!(letters(&sink.deliver(&[batch[5].clone(), batch[7].clone()]).await), "dd");
    let seen = tail.at_least(7).await;
    let ids: Vec<&str> = seen
        .iter()
        .filter(|seen| seen.key.as_deref() == Some("big"))
        .map(|s| s.header("id").unwrap())
        .collect();
    let of_big = [&batch[1], &batch[3], &batch[5], &batch[7]].map(|delivery| delivery.event.id.as_str());
    let mut firsts: Vec<&str> = Vec::new();
    ids.into_iter().for_each(|id| {
        if !firsts.contains(&id) {
            firsts.push(id);
        }
    });
    assert_eq!(firsts, of_big);
    // None came twice: what was behind the large one was not taken before its turn.
    assert_eq!(tail.seen().len(), 7);
}

/// A broker that knows nothing of a producer takes any sequence number, so the very first request of a key is the
/// one that could be overtaken: with a request for each message, it would be.
#[tokio::test]
async fn what_follows_a_refused_first_message_is_not_sent() {
    let Some(brokers) = shared("what_follows_a_refused_first_message_is_not_sent") else { return };
    for round in 0..5 {
        let topic = unique("first");
        create_topic(&brokers, &topic, 1, &[("max.message.bytes", "20000")]).await;
        let sink = sink(&format!("kafka://{brokers}/{topic}?linger.ms=0&batch.num.messages=1"));
        let batch = [sized(1, "k", 50_000), sized(2, "k", 100), sized(3, "k", 100)];
        assert_eq!(letters(&sink.deliver(&batch).await), "pss", "round {round}");
        assert_eq!(letters(&sink.deliver(&batch[1..]).await), "dd");
        let seen = Tail::new(&brokers, &topic, 1).at_least(2).await;
        assert_eq!(seen.len(), 2);
    }
}

#[tokio::test]
async fn a_limit_below_our_batches_only_makes_them_smaller() {
    let Some(brokers) = shared("a_limit_below_our_batches_only_makes_them_smaller") else { return };
    let topic = unique("small");
    create_topic(&brokers, &topic, 1, &[("max.message.bytes", "3000")]).await;
    let sink = sink(&format!("kafka://{brokers}/{topic}"));
    let batch: Vec<_> = (0..60).map(|n| sized(n + 1, &format!("k{}", n % 20), 1_000)).collect();
    let mut waiting = batch.clone();
    for _ in 0..20 {
        let outcomes = sink.deliver(&waiting).await;
        assert!(!letters(&outcomes).contains('p'), "{}", letters(&outcomes));
        let mut outcomes = outcomes.iter();
        waiting.retain(|_| !matches!(outcomes.next(), Some(airtight_core::Outcome::Delivered)));
        if waiting.is_empty() {
            break;
        }
    }
    assert!(waiting.is_empty(), "{} are left", waiting.len());
    let seen = Tail::new(&brokers, &topic, 1).at_least(60).await;
    for key in 0..20 {
        let key = format!("k{key}");
        let mut ids: Vec<&str> = seen
            .iter()
            .filter(|seen| seen.key.as_deref() == Some(key.as_str()))
            .map(|s| s.header("id").unwrap())
            .collect();
        ids.dedup();
        assert!(ids.is_sorted(), "{key}: {ids:?}");
    }
}

#[tokio::test]
async fn a_missing_topic_is_named_or_created() {
    let Some(brokers) = shared("a_missing_topic_is_named_or_created") else { return };
    let topic = unique("missing");
    let strict = sink(&format!("kafka://{brokers}/{topic}"));
    let refused = strict.open().await.unwrap_err();
    assert_eq!((refused.code(), refused.class()), ("no_topic", Class::Unavailable));
    assert!(refused.message().contains(&topic) && refused.to_string().contains("create = true"), "{refused}");
    let batch = [sized(1, "a", 10), sized(2, "a", 10), sized(3, "b", 10)];
    let outcomes = strict.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "usu");
    assert_eq!(error_of(&outcomes[0]).code(), "no_topic");

    let creating = sink(&format!("kafka://{brokers}/{topic}?create=true&create_partitions=3"));
    creating.open().await.unwrap();
    assert_eq!(letters(&creating.deliver(&batch).await), "ddd");
    // The strict one needs no restart.
    assert_eq!(letters(&strict.deliver(&batch).await), "ddd");
    Tail::new(&brokers, &topic, 3).at_least(6).await;
}

#[tokio::test]
async fn only_the_event_with_a_bad_topic_is_guilty() {
    let Some(brokers) = shared("only_the_event_with_a_bad_topic_is_guilty") else { return };
    let prefix = unique("by-header");
    let sink = sink(&format!("kafka://{brokers}/{prefix}.{{header.to}}?create=true"));
    let to = |seq, key: &str, to: Option<&str>| {
        let mut event = sample_event(seq, key);
        event.headers.extend(to.map(|to| ("to".to_owned(), to.to_owned())));
        of(event)
    };
    let batch = [
        to(1, "a", Some("x")),
        to(2, "b", Some("not a name")),
        to(3, "b", Some("x")),
        to(4, "c", None),
        to(5, "d", Some("y")),
    ];
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "dpspd");
    assert_eq!(error_of(&outcomes[1]).code(), "bad_name");
    assert_eq!(error_of(&outcomes[3]).code(), "missing_field");
}

#[tokio::test]
async fn nobody_there_is_unavailable_soon_and_costs_no_memory() {
    let port = Port::reserve();
    let sink = sink(&format!("kafka://127.0.0.1:{port}/t?connect_timeout=1s"));
    let refused = sink.open().await.unwrap_err();
    assert_eq!((refused.code(), refused.class()), ("unreachable", Class::Unavailable), "{refused}");
    assert!(refused.message().contains("refused"), "{refused}");
    let batch: Vec<_> = (0..200).map(|n| sized(n + 1, &format!("k{n}"), 10_000)).collect();
    let before = resident();
    for _ in 0..20 {
        let began = Instant::now();
        let outcomes = sink.deliver(&batch).await;
        assert_eq!(letters(&outcomes).replace(['s', 'u'], ""), "");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }
    // Forty megabytes were offered.
    assert!(resident() < before + 20_000_000, "from {before} to {}", resident());
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4_096
}

/// Answers every connection with `answer`, or with nothing at all.
fn impostor(answer: Option<&'static str>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            match answer {
                Some(answer) => {
                    let _ = stream.read(&mut [0; 64]);
                    let _ = stream.write_all(answer.as_bytes());
                }
                None => held.push(stream),
            }
        }
    });
    port
}

#[tokio::test]
async fn another_protocol_is_told_from_nobody() {
    let http = Some("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
    for (answer, code) in [(http, "wrong_protocol"), (None, "timeout")] {
        let port = impostor(answer);
        let sink = sink(&format!(
            "kafka://127.0.0.1:{port}/t?connect_timeout=3s&socket.timeout.ms=1000&api.version.request.timeout.ms=1000"
        ));
        let refused = sink.open().await.unwrap_err();
        assert_eq!(refused.class(), Class::Unavailable);
        assert_eq!(refused.code(), code, "{refused}");
    }
}

#[test]
fn a_config_that_can_never_work_is_refused_before_anything_connects() {
    for (url, code) in [
        ("kafka://h:1/white space", "bad_name"),
        ("kafka://h:1/{nope}", "bad_template"),
        ("kafka://h:1?no.such=1", "bad_config"),
        ("kafka+tls://h:1?ca=/nowhere/ca.pem", "bad_config"),
    ] {
        let made = KafkaConfig::from_url(url).and_then(KafkaSink::new);
        let refused = made.expect_err(url);
        assert_eq!((refused.code(), refused.class()), (code, Class::Permanent), "{url}: {refused}");
    }
}
