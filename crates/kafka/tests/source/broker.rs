//! A broker that is away, comes back, or says no.

use std::time::Duration;

use airtight_core::{CancellationToken, Capabilities, Class, Policy, Relay, Source};
use airtight_kafka::{KafkaSource, KafkaSourceConfig};
use airtight_testkit::{
    brokers::kafka::{Kafka, KafkaOptions, Listener},
    wait::{eventually, eventually_some},
};

use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_killed_and_comes_back_costs_nothing() {
    let Some(kafka) = Kafka::start("a_broker_that_is_killed_and_comes_back_costs_nothing").await else {
        return;
    };
    let brokers = kafka.bootstrap();
    let topic = topic(&brokers, "outage", 3).await;
    publish(&brokers, &topic, (1..=3_000).map(|seq| (seq, format!("k{}", seq % 30)))).await;
    let log = Log::default();
    let running = run(
        KafkaSource::new(config(&brokers, &topic)).unwrap(),
        noting(&log, Duration::from_millis(5)),
        Policy::default(),
    );
    eventually(PATIENCE, "the first events", async || log.len() >= 500).await;
    kafka.kill().await;
    // What is in memory is handled all the same; then there is nothing.
    let mut before = 0;
    let since = std::time::Instant::now();
    eventually(PATIENCE, "quiet", async || {
        tokio::time::sleep(Duration::from_millis(500)).await;
        std::mem::replace(&mut before, log.len()) == log.len() && since.elapsed() > Duration::from_secs(3)
    })
    .await;
    kafka.start_again().await;
    publish(&brokers, &topic, (3_001..=3_500).map(|seq| (seq, format!("k{}", seq % 30)))).await;
    let back = std::time::Instant::now();
    eventually(PATIENCE, "all events", async || log.distinct() == 3_500).await;
    println!("all handled {:?} after the broker was back, {} repeats", back.elapsed(), log.len() - 3_500);
    let summary = running.end().await;
    assert_eq!((summary.dead, summary.unknown), (0, 0));
    for (key, seqs) in log.first_sights() {
        assert!(seqs.is_sorted(), "{key}: {seqs:?}");
    }
    // It left with everything committed.
    let relay = Relay::new(KafkaSource::new(config(&brokers, &topic)).unwrap(), noting(&log, Duration::ZERO));
    assert_eq!(relay.drain(CancellationToken::new()).await.unwrap().fetched, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_keeps_verdicts_and_dead_letters() {
    let name = "a_broker_that_is_away_keeps_verdicts_and_dead_letters";
    let Some(kafka) = Kafka::start(name).await else { return };
    let brokers = kafka.bootstrap();
    let topic = topic(&brokers, "away", 1).await;
    publish(&brokers, &topic, (1..=3).map(|seq| (seq, format!("k{seq}")))).await;
    let mut config = config(&brokers, &topic);
    config.timeout = Duration::from_secs(2);
    // A restart takes a while on a busy machine, and this is not about losing the membership.
    config.set("session.timeout.ms", "60000").unwrap();
    let source = open(config).await;
    let taken = take(&source, 3).await;
    kafka.kill().await;
    let error = eventually_some(PATIENCE, "a complaint", async || source.next(LIMITS).await.err()).await;
    assert_ne!(error.class(), Class::Permanent, "{error}");
    assert!(error.message().contains(&brokers), "{error}");
    // Verdicts that need no broker are taken; one that does is not, and none with it.
    assert_eq!(source.settle(&delivered(&taken[..1])).await.unwrap().applied, 1);
    let verdicts = [verdict(&taken[1], dead()), verdict(&taken[2], airtight_core::Verdict::Delivered)];
    let error = source.settle(&verdicts).await.unwrap_err();
    assert_eq!(error.class(), Class::Retryable, "{error:?}");
    kafka.start_again().await;
    let mut settled = None;
    eventually(PATIENCE, "the verdicts to be taken", async || {
        settled = source.settle(&verdicts).await.ok();
        settled.is_some()
    })
    .await;
    assert_eq!(settled.unwrap().applied, 2);
    let letters = read(&brokers, &format!("{topic}.{topic}.group.dead"), 1).await;
    assert_eq!(letters[0].headers["airtight-offset"], "1");
    eventually(PATIENCE, "the commit", async || {
        committed(&brokers, &format!("{topic}.group"), &topic, 0).await == Some(3)
    })
    .await;
    source.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn opening_says_what_is_wrong_and_whether_it_may_pass() {
    let name = "opening_says_what_is_wrong_and_whether_it_may_pass";
    let options = KafkaOptions { listeners: vec![Listener::Sasl], ..KafkaOptions::default() };
    let Some(kafka) = Kafka::start_with(name, options).await else { return };
    let (plain, sasl) = (kafka.bootstrap(), kafka.address(Listener::Sasl));
    for (url, code, class, says) in [
        (
            format!("kafka://{plain}/nowhere?group=g"),
            "no_topic",
            Class::Retryable,
            "topic `nowhere` does not exist",
        ),
        (
            format!("kafka://alice:hunter2@{sasl}/t?group=g"),
            "credentials",
            Class::Unavailable,
            "refuses the login",
        ),
        ("kafka://127.0.0.1:1/t?group=g".to_owned(), "unreachable", Class::Retryable, "cannot be reached"),
    ] {
        let mut config = KafkaSourceConfig::from_url(&url).unwrap();
        config.connection.connect_timeout = Duration::from_secs(2);
        let source = KafkaSource::new(config).unwrap();
        let error = source.open(&Capabilities::default()).await.unwrap_err();
        assert_eq!((error.code(), error.class()), (code, class), "{url}: {error:?}");
        assert!(error.message().contains(says), "{error}");
        assert!(!format!("{error:?}").contains("hunter2"));
        source.close().await.unwrap();
    }
    // A topic that comes is found.
    let config = config(&plain, "late");
    let source = KafkaSource::new(config).unwrap();
    assert_eq!(source.open(&Capabilities::default()).await.unwrap_err().class(), Class::Retryable);
    create(&plain, "late", 1).await;
    publish(&plain, "late", [(1, "k".to_owned())]).await;
    source.open(&Capabilities::default()).await.unwrap();
    assert_eq!(take(&source, 1).await.len(), 1);
    source.close().await.unwrap();
}
