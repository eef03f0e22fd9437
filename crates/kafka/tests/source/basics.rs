//! Offsets, order, giving back, beginnings and ends.

use std::time::Duration;

use airtight_core::{CancellationToken, Policy, Relay, Source, Verdict};
use airtight_kafka::{KafkaSource, Start};
use airtight_testkit::wait::eventually;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer};

use crate::support::*;

fn numbered(count: i64) -> impl Iterator<Item = (i64, String)> {
    (1..=count).map(|seq| (seq, format!("k{}", seq % 3)))
}

#[tokio::test(flavor = "multi_thread")]
async fn events_come_as_they_were_published_and_a_relay_drains_them() {
    let Some(brokers) = cluster("events_come_as_they_were_published_and_a_relay_drains_them") else { return };
    let topic = topic(&brokers, "drained", 4).await;
    publish(&brokers, &topic, numbered(1_000)).await;
    let log = Log::default();
    let relay = Relay::new(KafkaSource::new(config(&brokers, &topic)).unwrap(), noting(&log, Duration::ZERO));
    let summary = relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!((summary.delivered, log.distinct(), log.len()), (1_000, 1_000, 1_000));
    for (key, seqs) in log.first_sights() {
        assert!(seqs.is_sorted(), "{key}: {seqs:?}");
    }
    // It has left with everything committed: nothing comes again.
    publish(&brokers, &topic, [(1_001, "k".to_owned())]).await;
    let relay = Relay::new(KafkaSource::new(config(&brokers, &topic)).unwrap(), noting(&log, Duration::ZERO));
    assert_eq!(relay.drain(CancellationToken::new()).await.unwrap().delivered, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_follow_the_settled_prefix() {
    let Some(brokers) = cluster("offsets_follow_the_settled_prefix") else { return };
    let topic = topic(&brokers, "prefix", 1).await;
    publish(&brokers, &topic, (1..=10).map(|seq| (seq, format!("key{seq}")))).await;
    let source = open(config(&brokers, &topic)).await;
    let taken = take(&source, 10).await;
    assert_eq!(seqs(&taken), (1..=10).collect::<Vec<_>>());
    let all_but_the_fourth: Vec<_> = [&taken[..3], &taken[4..]].concat();
    let settled = source.settle(&delivered(&all_but_the_fourth)).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (9, 0));
    let group = format!("{topic}.group");
    eventually(PATIENCE, "the prefix to be committed", async || {
        committed(&brokers, &group, &topic, 0).await == Some(3)
    })
    .await;
    source.close().await.unwrap();
    assert_eq!(committed(&brokers, &group, &topic, 0).await, Some(3));

    // The fourth comes again, and what was settled behind it too.
    let source = open(config(&brokers, &topic)).await;
    let again = take(&source, 7).await;
    assert_eq!(seqs(&again), (4..=10).collect::<Vec<_>>());
    source.settle(&delivered(&again)).await.unwrap();
    source.close().await.unwrap();
    assert_eq!(committed(&brokers, &group, &topic, 0).await, Some(10));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_handed_out_and_not_settled_comes_again() {
    let Some(brokers) = cluster("what_was_handed_out_and_not_settled_comes_again") else { return };
    let topic = topic(&brokers, "unsettled", 1).await;
    publish(&brokers, &topic, numbered(5)).await;
    let source = open(config(&brokers, &topic)).await;
    assert_eq!(take(&source, 5).await.len(), 5);
    // Dropped without a word to anyone.
    drop(source);
    let source = open(config(&brokers, &topic)).await;
    let again = take(&source, 5).await;
    assert_eq!(seqs(&again), [1, 2, 3, 4, 5]);
    assert!(again.iter().all(|delivery| delivery.attempt == 1));
    source.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_comes_again_in_order_and_costs_no_attempt() {
    let Some(brokers) = cluster("what_is_given_back_comes_again_in_order_and_costs_no_attempt") else {
        return;
    };
    let topic = topic(&brokers, "released", 1).await;
    publish(&brokers, &topic, (1..=6).map(|seq| (seq, "k".to_owned()))).await;
    let source = open(config(&brokers, &topic)).await;
    let taken = take(&source, 6).await;
    let mut verdicts = delivered(&taken[..1]);
    verdicts.extend(taken[1..4].iter().map(|delivery| verdict(delivery, Verdict::Released)));
    // In two calls, the later ones first.
    let last: Vec<_> = taken[4..].iter().map(|delivery| verdict(delivery, Verdict::Released)).collect();
    source.settle(&last).await.unwrap();
    source.settle(&verdicts).await.unwrap();
    let again = take(&source, 5).await;
    assert_eq!(seqs(&again), [2, 3, 4, 5, 6]);
    assert!(again.iter().all(|delivery| delivery.attempt == 1));
    source.settle(&delivered(&again)).await.unwrap();
    source.close().await.unwrap();
    assert_eq!(committed(&brokers, &format!("{topic}.group"), &topic, 0).await, Some(6));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_in_place_holds_back_its_key_and_nobody_else() {
    let Some(brokers) = cluster("a_retry_in_place_holds_back_its_key_and_nobody_else") else { return };
    let topic = topic(&brokers, "in-place", 1).await;
    let keys = ["a", "b", "a", "b", "a"];
    publish(&brokers, &topic, (1..).zip(keys.map(str::to_owned))).await;
    let source = open(config(&brokers, &topic)).await;
    let mut taken = take(&source, 5).await;
    taken.sort_by_key(|delivery| delivery.event.seq);
    // As the relay does it: the first of `a` fails, what is behind it in its lane is given back.
    let pause = Duration::from_secs(4);
    source
        .settle(&[
            verdict(&taken[0], retry(pause)),
            verdict(&taken[1], Verdict::Delivered),
            verdict(&taken[2], Verdict::Released),
            verdict(&taken[3], Verdict::Delivered),
            verdict(&taken[4], Verdict::Released),
        ])
        .await
        .unwrap();
    let failed_at = std::time::Instant::now();
    publish(&brokers, &topic, [(6, "b".to_owned()), (7, "a".to_owned())]).await;
    let others = take(&source, 1).await;
    assert_eq!((seqs(&others), key_of(&others[0].event)), (vec![6], "b"));
    assert!(failed_at.elapsed() < pause, "the test took too long to tell");
    source.settle(&delivered(&others)).await.unwrap();
    assert_eq!(
        committed(&brokers, &format!("{topic}.group"), &topic, 0).await,
        Some(0),
        "past an open event"
    );

    let first = take(&source, 1).await;
    assert!(failed_at.elapsed() >= pause, "before its time");
    assert_eq!((seqs(&first), first[0].attempt), (vec![1], 2));
    // While it is out, the rest of its key still waits; also when it fails again.
    assert!(source.next(LIMITS).await.unwrap().is_empty());
    source.settle(&[verdict(&first[0], retry(Duration::from_millis(50)))]).await.unwrap();
    let first = take(&source, 1).await;
    assert_eq!((seqs(&first), first[0].attempt), (vec![1], 3));
    source.settle(&delivered(&first)).await.unwrap();
    let rest = take(&source, 3).await;
    assert_eq!(seqs(&rest), [3, 5, 7]);
    assert!(rest.iter().all(|delivery| delivery.attempt == 1));
    source.settle(&delivered(&rest)).await.unwrap();
    source.close().await.unwrap();
    assert_eq!(committed(&brokers, &format!("{topic}.group"), &topic, 0).await, Some(7));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_starts_latest_misses_nothing_from_then_on() {
    let Some(brokers) = cluster("a_group_that_starts_latest_misses_nothing_from_then_on") else { return };
    let topic = topic(&brokers, "latest", 1).await;
    publish(&brokers, &topic, numbered(3)).await;
    let mut config = config(&brokers, &topic);
    config.start = Start::Latest;
    // Not by the way: the place is committed when it is taken.
    config.commit_interval = Duration::from_secs(600);
    let source = open(config.clone()).await;
    eventually(PATIENCE, "the partition", async || !source.owned_partitions().is_empty()).await;
    assert_eq!(committed(&brokers, &config.group, &topic, 0).await, Some(3));
    // It goes before it has seen a message. What is written meanwhile belongs to the group all the same.
    source.close().await.unwrap();
    publish(&brokers, &topic, [(4, "k".to_owned())]).await;
    let source = open(config).await;
    assert_eq!(seqs(&take(&source, 1).await), [4]);
    source.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_handler_bounds_what_is_in_memory() {
    let Some(brokers) = cluster("a_slow_handler_bounds_what_is_in_memory") else { return };
    let topic = topic(&brokers, "slow", 3).await;
    publish(&brokers, &topic, (1..=5_000).map(|seq| (seq, format!("k{}", seq % 50)))).await;
    let mut config = config(&brokers, &topic);
    config.buffer_events = 200;
    config.max_ahead = 1_000;
    // A poll interval that a handler could exceed, were it the one who polls.
    config.set("max.poll.interval.ms", "6000").unwrap();
    let source = open(config).await;
    let mut seen = 0;
    let mut most = 0;
    while seen < 5_000 {
        let batch = next(&source).await;
        most = most.max(source.held().0);
        seen += batch.deliveries.len();
        let settled = source.settle(&delivered(&batch.deliveries)).await.unwrap();
        assert_eq!(settled.fenced, 0, "the membership was lost");
    }
    assert!(most <= 300, "{most} events were in memory");
    // Nothing more is read than settled by far: one event that stays open holds its partition.
    publish(&brokers, &topic, (5_001..=8_000).map(|seq| (seq, "k1".to_owned()))).await;
    let stuck = take(&source, 1).await;
    let mut rest = stuck[1..].to_vec();
    let mut beyond = 0;
    loop {
        source.settle(&delivered(&rest)).await.unwrap();
        beyond += rest.len();
        let quiet = std::time::Instant::now();
        rest.clear();
        while rest.is_empty() && quiet.elapsed() < Duration::from_secs(1) {
            source.wait(Duration::from_millis(100)).await;
            rest = source.next(LIMITS).await.unwrap().deliveries;
        }
        if rest.is_empty() {
            break;
        }
    }
    assert!((900..1_200).contains(&beyond), "{beyond} events were read past an open one");
    // Held for longer than the poll interval, and still a member.
    let held_since = std::time::Instant::now();
    eventually(PATIENCE, "the poll interval to pass", async || held_since.elapsed() > Duration::from_secs(7))
        .await;
    assert_eq!(source.settle(&delivered(&stuck[..1])).await.unwrap().applied, 1);
    let rest = take(&source, 1).await;
    assert!(!rest.is_empty());
    source.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_keeps_order_while_handlers_fail() {
    let Some(brokers) = cluster("the_relay_keeps_order_while_handlers_fail") else { return };
    let topic = topic(&brokers, "failing", 4).await;
    publish(&brokers, &topic, (1..=2_000).map(|seq| (seq, format!("k{}", seq % 40)))).await;
    let log = Log::default();
    let noted = log.clone();
    let handlers =
        airtight_core::Dispatcher::new().otherwise(move |context: airtight_core::dispatch::Context| {
            let log = noted.clone();
            async move {
                // Every seventh event fails twice.
                if context.event.seq % 7 == 0 && context.attempt < 3 {
                    return Err(airtight_core::Error::retryable(airtight_core::Code::BUSY, "not yet"));
                }
                log.note(&context);
                Ok(())
            }
        });
    let backoff =
        airtight_core::Backoff { base: Duration::from_millis(5), ..airtight_core::Backoff::default() };
    let policy = Policy { backoff, ..Policy::default() };
    let relay = Relay::new(KafkaSource::new(config(&brokers, &topic)).unwrap(), handlers).policy(policy);
    let summary = relay.drain(CancellationToken::new()).await.unwrap();
    assert_eq!((summary.delivered, log.len()), (2_000, 2_000));
    assert_eq!(summary.retried, 2 * (2_000 / 7));
    for (key, seqs) in log.first_sights() {
        assert!(seqs.is_sorted(), "{key}: {seqs:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_sees_the_end_of_a_topic_that_is_written_in_transactions() {
    let name = "a_drain_sees_the_end_of_a_topic_that_is_written_in_transactions";
    let Some(brokers) = cluster(name) else { return };
    let topic = topic(&brokers, "transactional", 2).await;
    let mut settings = client(&brokers);
    let producer: FutureProducer = settings.set("transactional.id", &topic).create().unwrap();
    let producing = producer.clone();
    let begun = tokio::task::spawn_blocking(move || producing.init_transactions(PATIENCE));
    begun.await.unwrap().unwrap();
    for commit in [true, false] {
        producer.begin_transaction().unwrap();
        for partition in 0..2 {
            let record = FutureRecord::to(&topic).partition(partition).key("k").payload("1");
            producer.send(record, PATIENCE).await.unwrap();
        }
        let producing = producer.clone();
        let end = move || match commit {
            true => producing.commit_transaction(PATIENCE),
            false => producing.abort_transaction(PATIENCE),
        };
        tokio::task::spawn_blocking(end).await.unwrap().unwrap();
    }
    let mut config = config(&brokers, &topic);
    config.format = airtight_core::Format::Raw;
    let log = Log::default();
    let relay = Relay::new(KafkaSource::new(config).unwrap(), noting(&log, Duration::ZERO));
    // Behind the last message stand markers, so that offsets alone would promise more for ever.
    let drained = tokio::time::timeout(PATIENCE, relay.drain(CancellationToken::new())).await;
    assert_eq!(drained.expect("it does not end").unwrap().delivered, 2);
}
