//! What cannot be handled: dead letters, messages that are no events, retries elsewhere, places that are gone.

use std::{collections::HashMap, time::Duration};

use airtight_core::{
    CancellationToken, Class, Code, Dispatcher, Error, Order, Outcome, Policy, Relay, Settlement, Source,
    Verdict, dispatch::Context,
};
use airtight_kafka::{KafkaSource, Retry};
use airtight_testkit::wait::eventually_some;
use rdkafka::{
    Offset, TopicPartitionList,
    admin::{AdminOptions, NewTopic, TopicReplication},
    message::{Header, OwnedHeaders},
    producer::{FutureProducer, FutureRecord},
};

use crate::support::*;

fn text(bytes: &Option<Vec<u8>>) -> &str {
    std::str::from_utf8(bytes.as_deref().unwrap_or_default()).unwrap()
}

/// The headers that the source has added.
fn added(seen: &Seen) -> HashMap<&str, &str> {
    let ours = seen.headers.iter().filter(|(name, _)| name.starts_with("airtight-"));
    ours.map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dead_go_to_their_topic_as_they_came() {
    let Some(brokers) = cluster("the_dead_go_to_their_topic_as_they_came") else { return };
    let topic = topic(&brokers, "mortal", 1).await;
    publish(&brokers, &topic, [(1, "a".to_owned()), (2, "b".to_owned()), (3, "a".to_owned())]).await;
    let original = read(&brokers, &topic, 3).await;
    let source = open(config(&brokers, &topic)).await;
    let taken = take(&source, 3).await;
    source.settle(&[verdict(&taken[0], retry(Duration::from_millis(1)))]).await.unwrap();
    let again = take(&source, 1).await;
    let unknown = Verdict::Unknown { error: Error::retryable(Code::TIMEOUT, "nobody knows") };
    let settled = source
        .settle(&[
            verdict(&again[0], dead()),
            verdict(&taken[1], unknown),
            verdict(&taken[2], Verdict::Delivered),
        ])
        .await
        .unwrap();
    assert_eq!((settled.applied, settled.fenced), (3, 0));
    source.close().await.unwrap();
    let group = format!("{topic}.group");
    assert_eq!(committed(&brokers, &group, &topic, 0).await, Some(3));

    let mut letters = read(&brokers, &format!("{topic}.{group}.dead"), 2).await;
    letters.sort_by(|a, b| a.key.cmp(&b.key));
    for (letter, original) in letters.iter().zip(&original) {
        assert_eq!((&letter.key, &letter.value), (&original.key, &original.value));
        for (name, value) in &original.headers {
            assert_eq!(letter.headers.get(name), Some(value), "{name}");
        }
    }
    let first = added(&letters[0]);
    for (name, value) in [
        ("airtight-topic", topic.as_str()),
        ("airtight-partition", "0"),
        ("airtight-offset", "0"),
        ("airtight-group", group.as_str()),
        ("airtight-attempts", "2"),
        ("airtight-verdict", "dead"),
        ("airtight-error-code", "no_good"),
        ("airtight-error", "no good at all"),
    ] {
        assert_eq!(first.get(name), Some(&value), "{name}");
    }
    let second = added(&letters[1]);
    assert_eq!((second["airtight-verdict"], second["airtight-offset"]), ("unknown", "1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_no_event_is_put_aside_and_the_rest_goes_on() {
    let Some(brokers) = cluster("a_message_that_is_no_event_is_put_aside_and_the_rest_goes_on") else {
        return;
    };
    let topic = topic(&brokers, "garbled", 1).await;
    publish(&brokers, &topic, [(1, "a".to_owned())]).await;
    write(&brokers, &topic, b"a", b"\xff\xfe no JSON").await;
    write(&brokers, &topic, b"\xc3\x28", b"{}").await;
    let producer: FutureProducer = client(&brokers).create().unwrap();
    let headers = OwnedHeaders::new().insert(Header { key: "fine", value: Some("x") });
    let no_object = FutureRecord::to(&topic).key("a").payload("null").headers(headers);
    producer.send(no_object, PATIENCE).await.unwrap();
    publish(&brokers, &topic, [(2, "a".to_owned())]).await;
    let log = Log::default();
    let relay = Relay::new(KafkaSource::new(config(&brokers, &topic)).unwrap(), noting(&log, Duration::ZERO));
    let summary = relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!((summary.delivered, summary.dead), (2, 3));
    let letters = read(&brokers, &format!("{topic}.{topic}.group.dead"), 3).await;
    let no_json = letters.iter().find(|letter| letter.value.as_deref() == Some(b"\xff\xfe no JSON")).unwrap();
    assert_eq!(added(no_json)["airtight-error-code"], "bad_message");
    assert_eq!(added(no_json)["airtight-offset"], "1");
    let no_key = letters.iter().find(|letter| letter.key.as_deref() == Some(b"\xc3\x28")).unwrap();
    assert!(added(no_key)["airtight-error"].contains("not UTF-8"), "{no_key:?}");
    assert!(letters.iter().any(|letter| letter.headers.get("fine").map(String::as_str) == Some("x")));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_topic_it_halts_and_skips_nothing() {
    let Some(brokers) = cluster("without_a_dead_letter_topic_it_halts_and_skips_nothing") else { return };
    let topic = topic(&brokers, "halting", 1).await;
    publish(&brokers, &topic, (1..=5).map(|seq| (seq, format!("k{seq}")))).await;
    let mut config = config(&brokers, &topic);
    config.dead_letter_topic = None;
    let handlers = || {
        Dispatcher::new().otherwise(|context: Context| async move {
            if context.event.seq == 3 {
                Err(Error::permanent(Code::custom("no_good"), "no good"))
            } else {
                Ok(())
            }
        })
    };
    for _ in 0..2 {
        let relay = Relay::new(KafkaSource::new(config.clone()).unwrap(), handlers());
        let error = relay.drain(CancellationToken::new()).await.unwrap_err();
        assert_eq!((error.code(), error.class()), ("no_dead_letter_topic", Class::Permanent));
        assert!(error.message().contains(&format!("{topic}/0/2")), "{error}");
        assert!(error.message().contains("no_good"), "{error}");
        let group = format!("{topic}.group");
        assert_eq!(committed(&brokers, &group, &topic, 0).await, Some(2), "it has skipped the event");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_cannot_be_written_keeps_its_event() {
    let Some(brokers) = cluster("a_dead_letter_that_cannot_be_written_keeps_its_event") else { return };
    let topic = topic(&brokers, "undead", 1).await;
    publish(&brokers, &topic, (1..=2).map(|seq| (seq, format!("k{seq}")))).await;
    let mut config = config(&brokers, &topic);
    config.create = false;
    let source = open(config).await;
    let taken = take(&source, 2).await;
    let verdicts = [verdict(&taken[0], dead()), verdict(&taken[1], Verdict::Delivered)];
    let error = source.settle(&verdicts).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("no_topic", Class::Retryable));
    let dead_topic = format!("{topic}.{topic}.group.dead");
    assert!(error.message().contains(&dead_topic), "{error}");
    // The same verdicts again, as the relay does: none was applied, and both are when the topic is there.
    create(&brokers, &dead_topic, 1).await;
    let settled = source.settle(&verdicts).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (2, 0));
    assert_eq!(read(&brokers, &dead_topic, 1).await.len(), 1);
    source.close().await.unwrap();
    assert_eq!(committed(&brokers, &format!("{topic}.group"), &topic, 0).await, Some(2));
}

/// The dead of one settle go out together, and together they may be more than the topic takes in one request.
#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_pass_a_limit_below_our_batches() {
    let Some(brokers) = cluster("dead_letters_pass_a_limit_below_our_batches") else { return };
    let topic = topic(&brokers, "narrow", 1).await;
    let dead_topic = format!("{topic}.{topic}.group.dead");
    let narrow = NewTopic::new(&dead_topic, 1, TopicReplication::Fixed(1)).set("max.message.bytes", "20000");
    admin(&brokers).create_topics(&[narrow], &AdminOptions::new()).await.unwrap();
    for n in 0..30 {
        // No event, and nothing to compress.
        let value: String = std::iter::repeat_with(fastrand::alphanumeric).take(2_000).collect();
        write(&brokers, &topic, format!("k{n}").as_bytes(), value.as_bytes()).await;
    }
    let source = open(config(&brokers, &topic)).await;
    let mut verdicts: Vec<Settlement> = Vec::new();
    while verdicts.len() < 30 {
        let rejects = next(&source).await.rejects;
        verdicts.extend(rejects.into_iter().map(|reject| Settlement {
            position: reject.position,
            verdict: Verdict::Dead { error: reject.error },
        }));
    }
    // The same verdicts again and again, as the relay does.
    let mut tries = 0;
    let settled = loop {
        tries += 1;
        match source.settle(&verdicts).await {
            Ok(settled) => break settled,
            Err(error) => assert!(tries < 10, "for ever: {error}"),
        }
    };
    assert_eq!((settled.applied, settled.fenced), (30, 0));
    source.close().await.unwrap();
    assert_eq!(read(&brokers, &dead_topic, 30).await.len(), 30, "none is written twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_topic_lets_others_pass_and_brings_the_event_back_when_it_is_due() {
    let name = "a_retry_topic_lets_others_pass_and_brings_the_event_back_when_it_is_due";
    let Some(brokers) = cluster(name) else { return };
    let topic = topic(&brokers, "elsewhere", 1).await;
    let retry_topic = format!("{topic}.retry");
    let mut config = config(&brokers, &topic);
    config.order = Order::None;
    config.retry = Retry::Topic(retry_topic.clone());
    // A message that nobody gave an id: it keeps the one that is made for it.
    config.format = airtight_core::Format::Raw;
    write(&brokers, &topic, b"k", b"1").await;
    write(&brokers, &topic, b"k", b"2").await;
    let log = Log::default();
    let (noted, ids) = (log.clone(), std::sync::Arc::new(std::sync::Mutex::new(Vec::new())));
    let seen = ids.clone();
    let handlers = Dispatcher::new().otherwise(move |context: Context| {
        let (log, seen) = (noted.clone(), seen.clone());
        async move {
            log.note(&context);
            seen.lock().unwrap().push((context.event.id.clone(), std::time::Instant::now()));
            assert!(!context.event.headers.keys().any(|name| name.starts_with("airtight-")));
            match context.event.payload.as_bytes() {
                b"1" if context.attempt < 3 => Outcome::Failed(Error::retryable(Code::BUSY, "not yet")),
                b"1" => Outcome::Failed(Error::permanent(Code::custom("no_good"), "never")),
                _ => Outcome::Delivered,
            }
        }
    });
    let base = Duration::from_millis(400);
    let backoff =
        airtight_core::Backoff { base, multiplier: 1.0, jitter: 0.0, ..airtight_core::Backoff::default() };
    let policy = Policy { backoff, ..Policy::default() };
    let relay = Relay::new(KafkaSource::new(config).unwrap(), handlers).policy(policy);
    let summary = relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!((summary.delivered, summary.retried, summary.dead), (1, 2, 1));

    let entries = log.entries();
    assert_eq!(entries.len(), 4);
    let ids = ids.lock().unwrap().clone();
    let tries: Vec<_> = ids.iter().filter(|(id, _)| *id == format!("{topic}/0/0")).collect();
    assert_eq!(tries.len(), 3, "{ids:?}");
    assert!(
        tries.windows(2).all(|pair| pair[1].1 - pair[0].1 >= base - Duration::from_millis(5)),
        "too early"
    );
    // Both were committed past it at once: its second life is in the other topic.
    let group = format!("{topic}.group");
    assert_eq!(committed(&brokers, &group, &topic, 0).await, Some(2));

    let retries = read(&brokers, &retry_topic, 2).await;
    let last = added(&retries[1]);
    assert_eq!(
        (last["airtight-attempts"], last["airtight-offset"], last["airtight-verdict"]),
        ("2", "0", "retry")
    );
    assert!(last["airtight-due"].parse::<i64>().unwrap() > 1_600_000_000_000);
    let letters = read(&brokers, &format!("{topic}.{group}.dead"), 1).await;
    let letter = added(&letters[0]);
    assert_eq!(text(&letters[0].value), "1");
    assert_eq!((letter["airtight-topic"], letter["airtight-attempts"]), (topic.as_str(), "3"));
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_retention_took_are_an_error_with_the_place() {
    let Some(brokers) = cluster("messages_that_retention_took_are_an_error_with_the_place") else { return };
    let topic = topic(&brokers, "retention", 2).await;
    publish(&brokers, &topic, (1..=40).map(|seq| (seq, format!("k{seq}")))).await;
    let source = open(config(&brokers, &topic)).await;
    let taken = next(&source).await.deliveries;
    source.settle(&delivered(&taken[..3])).await.unwrap();
    source.close().await.unwrap();

    // As retention does, past the place where the group stands.
    let group = format!("{topic}.group");
    let mut behind = -1;
    for partition in 0..2 {
        if committed(&brokers, &group, &topic, partition).await == Some(3) {
            behind = partition;
        }
    }
    assert!(behind >= 0, "one of the two stands at 3");
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(&topic, behind, Offset::Offset(10)).unwrap();
    admin(&brokers).delete_records(&list, &AdminOptions::new()).await.unwrap();

    let source = open(config(&brokers, &topic)).await;
    let error = eventually_some(PATIENCE, "an error", async || source.next(LIMITS).await.err()).await;
    assert_eq!((error.code(), error.class()), ("behind_retention", Class::Permanent));
    let expected = format!("{topic}/{behind} is at offset 3, and the oldest message is 10: 7 are gone");
    assert!(error.message().contains(&expected), "{error}");
    assert!(error.to_string().contains("--reset-offsets"), "{error}");
    source.close().await.unwrap();
    assert_eq!(committed(&brokers, &group, &topic, behind).await, Some(3), "it has moved by itself");
}
