//! Which event is to blame for what Kafka refuses, and that no other is.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::time::Duration;

use airtight_core::{Delivery, Outcome, Sink};
use airtight_kafka::{KafkaConfig, KafkaSink};
use rdkafka::{
    ClientConfig, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
};

use airtight_testkit::{
    deliveries::{error_of, letters},
    wait::eventually,
};

use crate::support::{PATIENCE, Tail, create_topic, shared, sink, sized, unique};

fn to(topic: &str, mut delivery: Delivery) -> Delivery {
    topic.clone_into(&mut delivery.event.stream);
    delivery
}

/// The broker of the second topic knows nothing of the producer yet, though that of the first does: what follows the
/// refused message there must not be sent, and neither must what follows it in the first.
#[tokio::test]
async fn a_key_that_goes_to_several_topics_stops_at_the_event_that_was_refused() {
    let Some(brokers) = shared("a_key_that_goes_to_several_topics_stops_at_the_event_that_was_refused")
    else {
        return;
    };
    for round in 0..5 {
        let (one, two) = (unique("one"), unique("two"));
        create_topic(&brokers, &one, 1, &[]).await;
        create_topic(&brokers, &two, 1, &[("max.message.bytes", "20000")]).await;
        let sink = sink(&format!("kafka://{brokers}?linger.ms=0&batch.num.messages=1"));
        let batch = [
            to(&one, sized(1, "k", 100)),
            to(&two, sized(2, "k", 50_000)),
            to(&two, sized(3, "k", 100)),
            to(&one, sized(4, "k", 100)),
        ];
        assert_eq!(letters(&sink.deliver(&batch).await), "dpss", "round {round}");
        assert_eq!(letters(&sink.deliver(&batch[2..]).await), "dd");
        // Nothing twice: nothing was sent before its turn.
        let (one, two) = (Tail::new(&brokers, &one, 1), Tail::new(&brokers, &two, 1));
        let ids = |tail: &Tail| -> Vec<String> {
            tail.seen().iter().map(|seen| seen.header("id").unwrap().to_owned()).collect()
        };
        one.at_least(2).await;
        two.at_least(1).await;
        assert_eq!(ids(&one), [&*batch[0].event.id, &*batch[3].event.id], "round {round}");
        assert_eq!(ids(&two), [&*batch[2].event.id], "round {round}");
        sink.close().await.unwrap();
    }
}

/// Kafka lets nobody write to a topic of its own. That is the fault of the event that wants to, not of the first one
/// that happens to wait.
#[tokio::test]
async fn a_topic_that_kafka_keeps_for_itself_is_the_fault_of_its_event_alone() {
    let Some(brokers) = shared("a_topic_that_kafka_keeps_for_itself_is_the_fault_of_its_event_alone") else {
        return;
    };
    let topic = unique("good");
    create_topic(&brokers, &topic, 1, &[]).await;
    // A group that asks for its offsets makes Kafka create it. Until that is done there is no coordinator to answer.
    eventually(PATIENCE, "Kafka to create the topic of its own", async || {
        let (asked, at) = (brokers.clone(), topic.clone());
        let ask = move || {
            let mut config = ClientConfig::new();
            config.set("bootstrap.servers", asked).set("group.id", &at);
            let consumer: BaseConsumer = config.create().unwrap();
            let mut list = TopicPartitionList::new();
            list.add_partition(&at, 0);
            consumer.committed_offsets(list, Duration::from_secs(5)).is_ok()
        };
        tokio::task::spawn_blocking(ask).await.unwrap()
    })
    .await;
    for round in 0..5 {
        let sink = sink(&format!("kafka://{brokers}?linger.ms=0&batch.num.messages=1"));
        let mut batch: Vec<Delivery> = (0..200).map(|n| to(&topic, sized(n + 1, "good", 10_000))).collect();
        batch.push(to("__consumer_offsets", sized(201, "bad", 100)));
        let outcomes = sink.deliver(&batch).await;
        assert_eq!(letters(&outcomes), format!("{}p", "d".repeat(200)), "round {round}");
        assert_eq!(error_of(&outcomes[200]).code(), "bad_name");
        sink.close().await.unwrap();
    }
}

/// Requests of one key that the broker finds too large together, though each message is welcome, are nobody's fault,
/// and no reason to call Kafka unavailable.
#[tokio::test]
async fn one_key_passes_a_limit_below_our_batches() {
    let Some(brokers) = shared("one_key_passes_a_limit_below_our_batches") else { return };
    let topic = unique("narrow");
    create_topic(&brokers, &topic, 1, &[("max.message.bytes", "3000")]).await;
    let sink = sink(&format!("kafka://{brokers}/{topic}"));
    let batch: Vec<_> = (0..100).map(|n| sized(n + 1, "k", 1_000)).collect();
    assert_eq!(letters(&sink.deliver(&batch).await), "d".repeat(100));
    // And from then on it is known.
    assert_eq!(letters(&sink.deliver(&batch).await), "d".repeat(100));
}

/// The guilty one is in the middle of its key, and in one request with those around it.
#[tokio::test]
async fn the_guilty_one_is_found_among_others_of_its_key() {
    let Some(brokers) = shared("the_guilty_one_is_found_among_others_of_its_key") else { return };
    let topic = unique("middle");
    create_topic(&brokers, &topic, 1, &[("max.message.bytes", "20000")]).await;
    let sink = sink(&format!("kafka://{brokers}/{topic}?linger.ms=20"));
    let batch: Vec<_> = (0..60).map(|n| sized(n + 1, "k", if n == 40 { 50_000 } else { 50 })).collect();
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), format!("{}p{}", "d".repeat(40), "s".repeat(19)));
    assert_eq!(error_of(&outcomes[40]).code(), "too_large");
}

/// A file of the configuration that is being replaced is nobody's fault: no event may die of it.
#[tokio::test]
async fn a_certificate_that_is_away_for_a_moment_kills_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let ca = directory.path().join("ca.pem");
    std::fs::write(&ca, "read when a producer is made").unwrap();
    let url = format!("kafka+tls://127.0.0.1:1/t?ca={}&connect_timeout=200ms", ca.display());
    let sink = KafkaSink::new(KafkaConfig::from_url(&url).unwrap()).unwrap();
    std::fs::remove_file(&ca).unwrap();
    let outcomes: Vec<Outcome> = sink.deliver(&[sized(1, "a", 10), sized(2, "b", 10)]).await;
    assert!(!letters(&outcomes).contains('p'), "{outcomes:?}");
    assert!(letters(&outcomes).contains('u'), "{outcomes:?}");
}

/// A cluster that does not answer is asked once, not once for each topic of a batch.
#[tokio::test]
async fn a_batch_of_many_topics_gives_up_as_soon_as_one_of_a_single_topic() {
    let sink = sink("kafka://127.0.0.1:1?connect_timeout=500ms");
    let batch: Vec<_> = (0..60).map(|n| to(&format!("t{n}"), sized(n + 1, &format!("k{n}"), 10))).collect();
    let began = std::time::Instant::now();
    let outcomes = sink.deliver(&batch).await;
    assert!(letters(&outcomes).starts_with('u') && !letters(&outcomes).contains('r'), "{outcomes:?}");
    assert!(began.elapsed() < std::time::Duration::from_secs(8), "it took {:?}", began.elapsed());
}
