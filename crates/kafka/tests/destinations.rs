//! One topic of several that cannot be written to: the others go on, the topic is named, and so is the cause.
#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::time::{Duration, Instant};

use airtight_core::{Class, Delivery, Sink};
use airtight_kafka::{KafkaConfig, KafkaSink};
use airtight_testkit::{
    brokers::kafka::{Kafka, KafkaOptions},
    deliveries::{error_of, letters},
    destinations::{OneAway, one_away},
};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewPartitions, NewTopic, TopicReplication},
    client::DefaultClientContext,
};

use crate::support::{Tail, create_topic, delete_topic, shared, sink, sized, unique};

fn to(topic: &str, mut delivery: Delivery) -> Delivery {
    topic.clone_into(&mut delivery.event.stream);
    delivery
}

fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    ClientConfig::new().set("bootstrap.servers", brokers).create().unwrap()
}

#[tokio::test]
async fn a_missing_topic_keeps_no_other_waiting() {
    let Some(brokers) = shared("a_missing_topic_keeps_no_other_waiting") else { return };
    let (good, bad) = (unique("good"), unique("missing"));
    create_topic(&brokers, &good, 2, &[]).await;
    let sink = sink(&format!("kafka://{brokers}?allow.auto.create.topics=false"));
    let case = OneAway { good: &good, bad: &bad, code: "no_topic", named: &format!("topic {bad}") };
    one_away(sink, case, async || create_topic(&brokers, &bad, 1, &[]).await).await;
}

#[tokio::test]
async fn a_topic_with_too_few_replicas_keeps_no_other_waiting_and_is_named() {
    let test = "a_topic_with_too_few_replicas_keeps_no_other_waiting_and_is_named";
    let Some(kafka) = Kafka::start(test).await else { return };
    let second = kafka.second_broker().await;
    let brokers = kafka.bootstrap();
    let new = |topic, replicas| NewTopic::new(topic, 1, TopicReplication::Variable(replicas));
    let topics = [new("good", &[&[1]]), new("thin", &[&[1, 2]]).set("min.insync.replicas", "2")];
    for created in admin(&brokers).create_topics(&topics, &AdminOptions::new()).await.unwrap() {
        created.unwrap();
    }
    let direct = sink(&format!("kafka://{brokers}"));
    let batch = [to("thin", sized(1, "a", 10)), to("good", sized(2, "b", 10)), to("thin", sized(3, "a", 10))];
    assert_eq!(letters(&direct.deliver(&batch).await), "ddd");
    second.stop().await;
    // Found long before `timeout` would end the call, and in words.
    let began = Instant::now();
    let outcomes = direct.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "uds", "{outcomes:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "took {:?}", began.elapsed());
    let error = error_of(&outcomes[0]);
    assert_eq!(error.code(), "too_few_replicas");
    for part in ["`thin`", "1 of its replicas", "`min.insync.replicas` is 2"] {
        assert!(error.message().contains(part), "{error} should say {part}");
    }
    direct.close().await.unwrap();

    let case = OneAway { good: "good", bad: "thin", code: "too_few_replicas", named: "topic thin" };
    one_away(sink(&format!("kafka://{brokers}")), case, async || second.start_again().await).await;
}

/// With one topic for all there is nobody else to go on, and the whole sink is away.
#[tokio::test]
async fn a_sink_with_one_topic_names_no_destination() {
    let Some(brokers) = shared("a_sink_with_one_topic_names_no_destination") else { return };
    let (one, event) = (sink(&format!("kafka://{brokers}/fixed")), sized(1, "a", 10).event);
    assert!(one.destinations(&event).is_empty());
    let many = sink(&format!("kafka://{brokers}/ev.{{aggregate_type}}"));
    assert_eq!(many.destinations(&event), ["topic ev.Test"]);
}

/// The size is known before it is sent, once the topic has said what it takes.
#[tokio::test]
async fn a_burst_of_messages_that_are_too_large_is_soon_over() {
    let Some(brokers) = shared("a_burst_of_messages_that_are_too_large_is_soon_over") else { return };
    let topic = unique("small");
    create_topic(&brokers, &topic, 2, &[("max.message.bytes", "20000")]).await;
    let sink = sink(&format!("kafka://{brokers}"));
    let batch: Vec<Delivery> = (0..60)
        .map(|n| to(&topic, sized(n + 1, &format!("k{n}"), if n % 3 == 0 { 50_000 } else { 1_000 })))
        .collect();
    let expected = "pdd".repeat(20);
    let began = Instant::now();
    assert_eq!(letters(&sink.deliver(&batch).await), expected);
    assert!(began.elapsed() < Duration::from_secs(6), "the first burst took {:?}", began.elapsed());
    let began = Instant::now();
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), expected);
    assert!(began.elapsed() < Duration::from_secs(2), "the next one took {:?}", began.elapsed());
    let error = error_of(&outcomes[0]);
    assert_eq!((error.class(), error.code()), (Class::Permanent, "too_large"));
    assert!(error.message().contains("takes 20000 (its `max.message.bytes`)"), "{error}");
    // A limit that was raised is noticed, at the latest when it is no longer believed.
    sink.close().await.unwrap();
}

/// Where we may not ask for the limit, or it says little, the large ones are found one by one, and all of them at once.
#[tokio::test]
async fn a_burst_is_over_though_nobody_says_what_the_limit_is() {
    let Some(brokers) = shared("a_burst_is_over_though_nobody_says_what_the_limit_is") else { return };
    let topic = unique("small");
    create_topic(&brokers, &topic, 1, &[("max.message.bytes", "20000")]).await;
    let sink = sink(&format!("kafka://{brokers}?compression=lz4"));
    let noise = |n: i64, bytes: usize| {
        let mut delivery = to(&topic, sized(n, &format!("k{n}"), 0));
        let mut random = fastrand::Rng::with_seed(n.unsigned_abs());
        delivery.event.payload =
            airtight_core::Payload::Bytes((0..bytes).map(|_| random.u8(..)).collect::<Vec<u8>>().into());
        delivery
    };
    let batch: Vec<Delivery> = (0..40).map(|n| noise(n + 1, if n % 2 == 0 { 50_000 } else { 500 })).collect();
    let began = Instant::now();
    assert_eq!(letters(&sink.deliver(&batch).await), "pd".repeat(20));
    // A producer for each, on a machine that may be busy; what counts is that it is one call, and no outage.
    assert!(began.elapsed() < Duration::from_secs(60), "took {:?}", began.elapsed());
    sink.close().await.unwrap();
}

/// Partitions that were added are found by looking again, and not after five minutes.
#[tokio::test]
async fn keys_move_to_new_partitions_within_half_a_minute() {
    let Some(brokers) = shared("keys_move_to_new_partitions_within_half_a_minute") else { return };
    let topic = unique("grows");
    create_topic(&brokers, &topic, 1, &[]).await;
    let sink = sink(&format!("kafka://{brokers}"));
    let batch: Vec<Delivery> = (0..50).map(|n| to(&topic, sized(n + 1, &format!("k{n}"), 10))).collect();
    assert_eq!(letters(&sink.deliver(&batch).await), "d".repeat(50));
    let more =
        admin(&brokers).create_partitions(&[NewPartitions::new(&topic, 4)], &AdminOptions::new()).await;
    more.unwrap().into_iter().for_each(|one| drop(one.unwrap()));
    let began = Instant::now();
    let tail = Tail::new(&brokers, &topic, 4);
    loop {
        assert_eq!(letters(&sink.deliver(&batch).await), "d".repeat(50));
        if tail.seen().iter().any(|seen| seen.partition > 0) {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(45), "still on the old partition");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    sink.close().await.unwrap();
}

/// The cluster answers where we ask, and sends us to where nobody is.
#[tokio::test]
async fn wrong_advertised_listeners_are_named() {
    let settings = vec!["advertised.listeners=PLAINTEXT://127.0.0.1:1".to_owned()];
    let options = KafkaOptions { settings, auto_create_topics: true, ..KafkaOptions::default() };
    let Some(kafka) = Kafka::start_with("wrong_advertised_listeners_are_named", options).await else {
        return;
    };
    for more in ["", "&create=true"] {
        let sink = sink(&format!("kafka://{}/orders{}?timeout=8s{more}", kafka.bootstrap(), more.len()));
        let outcomes = sink.deliver(&[sized(1, "a", 10)]).await;
        let error = error_of(&outcomes[0]);
        assert_eq!(error.class(), Class::Unavailable);
        for part in ["127.0.0.1:1", "`advertised.listeners`"] {
            assert!(error.message().contains(part), "{more}: {error} should say {part}");
        }
        sink.close().await.unwrap();
    }
}

#[test]
fn a_queue_that_is_too_small_is_refused_and_not_called_an_outage() {
    for (key, value) in [("queue.buffering.max.messages", "1"), ("queue.buffering.max.kbytes", "64")] {
        let config = KafkaConfig::from_url(&format!("kafka://h:1?{key}={value}")).unwrap();
        let error = KafkaSink::new(config).unwrap_err();
        assert_eq!(error.code(), "bad_config");
        assert!(error.message().contains(key) && error.message().contains("under way"), "{error}");
    }
}

/// A topic that is deleted under a sink which may create it is made again, and nobody is told to set `create`.
#[tokio::test]
async fn a_topic_that_is_made_anew_is_no_reason_for_advice() {
    let Some(brokers) = shared("a_topic_that_is_made_anew_is_no_reason_for_advice") else { return };
    let (topic, other) = (unique("anew"), unique("other"));
    create_topic(&brokers, &other, 1, &[]).await;
    let sink = sink(&format!("kafka://{brokers}?create=true"));
    let one = |seq| [to(&topic, sized(seq, "a", 10)), to(&other, sized(seq, "b", 10))];
    assert_eq!(letters(&sink.deliver(&one(1)).await), "dd");
    delete_topic(&brokers, &topic).await;
    let began = Instant::now();
    loop {
        let outcomes = sink.deliver(&one(2)).await;
        if letters(&outcomes) == "dd" {
            break;
        }
        assert_eq!(letters(&outcomes), "ud");
        let error = error_of(&outcomes[0]);
        assert!(!error.to_string().contains("set `create"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(30), "{error}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    sink.close().await.unwrap();
}
