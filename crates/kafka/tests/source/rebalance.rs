//! Members that come, go, and vanish.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use airtight_core::{CancellationToken, Policy, Relay, Source, Verdict};
use airtight_kafka::{KafkaSource, KafkaSourceConfig};
use airtight_testkit::wait::eventually;

use crate::support::*;

/// Waits until these members share all partitions.
async fn share(members: &[&KafkaSource], partitions: usize) {
    eventually(PATIENCE, "all partitions to be shared", async || {
        let owned: Vec<usize> = members.iter().map(|member| member.owned_partitions().len()).collect();
        owned.iter().sum::<usize>() == partitions && owned.iter().all(|owned| *owned > 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_is_handed_over_after_what_is_under_way_and_late_verdicts_are_fenced() {
    let name = "a_partition_is_handed_over_after_what_is_under_way_and_late_verdicts_are_fenced";
    let Some(brokers) = cluster(name) else { return };
    let topic = topic(&brokers, "handover", 2).await;
    publish(&brokers, &topic, (1..=40).map(|seq| (seq, format!("k{seq}")))).await;
    let first = open(config(&brokers, &topic)).await;
    eventually(PATIENCE, "all to be read", async || first.held().0 == 40).await;
    let (one, two) = (next(&first).await, next(&first).await);
    // Half of each partition is settled, one way or the other; the rest is being handled.
    for batch in [&one, &two] {
        first.settle(&delivered(&batch.deliveries[..5])).await.unwrap();
    }
    let second = open(config(&brokers, &topic)).await;
    eventually(PATIENCE, "one of the batches to be lost", async || {
        one.ownership.is_lost() || two.ownership.is_lost()
    })
    .await;
    // Lost means: send nothing more of it. What was sent is still settled, until the handover is over.
    let (lost, kept) = if one.ownership.is_lost() { (&one, &two) } else { (&two, &one) };
    assert!(second.next(LIMITS).await.unwrap().is_empty(), "handed over while it was being handled");
    let settled = first.settle(&delivered(&lost.deliveries[5..9])).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (4, 0));
    // The last ones never end. After the handover they are the second's, and so is their verdict.
    share(&[&first, &second], 2).await;
    let settled = first.settle(&delivered(&lost.deliveries[9..])).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (0, lost.deliveries.len() - 9));
    let again = take(&second, lost.deliveries.len() - 9).await;
    assert_eq!(seqs(&again), seqs(&lost.deliveries[9..]), "neither a gap nor what was settled in time");
    assert!(!kept.ownership.is_lost(), "a partition that stays is not disturbed");
    let settled = first.settle(&delivered(&kept.deliveries[5..])).await.unwrap();
    assert_eq!(settled.fenced, 0);
    second.settle(&delivered(&again)).await.unwrap();
    first.close().await.unwrap();
    second.close().await.unwrap();
    for partition in 0..2 {
        let end = [&one, &two].map(|batch| batch.deliveries.len());
        let offset = committed(&brokers, &format!("{topic}.group"), &topic, partition).await.unwrap();
        assert!(end.contains(&usize::try_from(offset).unwrap()), "{offset} of {end:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_comes_back_begins_at_its_committed_offset() {
    let Some(brokers) = cluster("a_partition_that_comes_back_begins_at_its_committed_offset") else { return };
    let topic = topic(&brokers, "boomerang", 2).await;
    publish(&brokers, &topic, (1..=40).map(|seq| (seq, format!("k{seq}")))).await;
    let first = open(config(&brokers, &topic)).await;
    eventually(PATIENCE, "all to be read", async || first.held().0 == 40).await;
    let (one, two) = (next(&first).await, next(&first).await);
    for batch in [&one, &two] {
        first.settle(&delivered(&batch.deliveries[..5])).await.unwrap();
        // Given back: these were read, and are still in memory when the partition goes.
        let back: Vec<_> = batch.deliveries[5..].iter().map(|d| verdict(d, Verdict::Released)).collect();
        first.settle(&back).await.unwrap();
    }
    let second = open(config(&brokers, &topic)).await;
    share(&[&first, &second], 2).await;
    second.close().await.unwrap();
    eventually(PATIENCE, "both to be back", async || first.owned_partitions().len() == 2).await;
    let rest = take(&first, 30).await;
    let mut found = seqs(&rest);
    found.sort_unstable();
    let mut expected: Vec<i64> = [&one, &two].iter().flat_map(|batch| seqs(&batch.deliveries[5..])).collect();
    expected.sort_unstable();
    assert_eq!(found, expected);
    first.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_was_full_when_it_went_is_read_on_when_it_comes_back() {
    let name = "a_partition_that_was_full_when_it_went_is_read_on_when_it_comes_back";
    let Some(brokers) = cluster(name) else { return };
    let topic = topic(&brokers, "full", 2).await;
    publish(&brokers, &topic, (1..=400).map(|seq| (seq, format!("k{}", seq % 40)))).await;
    let mut config = config(&brokers, &topic);
    config.buffer_events = 20;
    let first = open(config.clone()).await;
    eventually(PATIENCE, "no more room", async || first.held().0 >= 20).await;
    let second = open(config).await;
    share(&[&first, &second], 2).await;
    // There is room for what comes back, so that it is not paused once more and resumed with the rest.
    let mut found = std::collections::HashSet::new();
    let mine = end_of(&brokers, &topic, first.owned_partitions()[0].1).await;
    while found.len() < mine {
        let batch = next(&first).await.deliveries;
        found.extend(seqs(&batch));
        first.settle(&delivered(&batch)).await.unwrap();
    }
    second.close().await.unwrap();
    eventually(PATIENCE, "both to be back", async || first.owned_partitions().len() == 2).await;
    while found.len() < 400 {
        let batch = next(&first).await.deliveries;
        found.extend(seqs(&batch));
        first.settle(&delivered(&batch)).await.unwrap();
    }
    first.close().await.unwrap();
}

// --- members as processes of their own ---------------------------------------------------------------

const MEMBER: &str = "AIRTIGHT_TEST_MEMBER";

/// Not a test but a member of a group, which [`member`] starts as a process of its own: it can be killed.
#[tokio::test(flavor = "multi_thread")]
async fn member_process() {
    let Ok(told) = std::env::var(MEMBER) else { return };
    let (url, file) = told.split_once(' ').unwrap();
    let mut config = KafkaSourceConfig::from_url(url).unwrap();
    config.create = true;
    let file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    let file = std::sync::Arc::new(file);
    let handlers =
        airtight_core::Dispatcher::new().otherwise(move |context: airtight_core::dispatch::Context| {
            let file = file.clone();
            async move {
                use std::io::Write;
                // One write, so that lines of several members do not mix.
                let line = format!("{} {}\n", context.event.aggregate_id, context.event.seq);
                (&*file).write_all(line.as_bytes()).unwrap();
            }
        });
    let stop = CancellationToken::new();
    let ending = stop.clone();
    tokio::spawn(async move {
        let mut asked = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
        asked.recv().await;
        ending.cancel();
    });
    Relay::new(KafkaSource::new(config).unwrap(), handlers)
        .policy(Policy::default())
        .run(stop)
        .await
        .unwrap();
}

fn member(url: &str, file: &std::path::Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rebalance::member_process", "--nocapture"])
        .env(MEMBER, format!("{url} {}", file.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

fn signal(name: &str, child: &Child) {
    let sent = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

fn ask_to_end(child: &Child) {
    signal("TERM", child);
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_go_and_are_killed_and_no_event_is_lost_or_out_of_order() {
    let name = "members_come_go_and_are_killed_and_no_event_is_lost_or_out_of_order";
    let Some(brokers) = cluster(name) else { return };
    let topic = topic(&brokers, "restless", 6).await;
    let (events, keys) = (20_000, 200);
    let url = format!(
        "kafka://{brokers}/{topic}?group=restless.{topic}&commit_interval=100ms&session.timeout.ms=6000&heartbeat.interval.ms=500"
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("seen");
    std::fs::write(&file, "").unwrap();
    // While they flow: a burst at a time, so that there is something to read at every rebalance.
    let writer = {
        let (brokers, topic) = (brokers.clone(), topic.clone());
        tokio::spawn(async move {
            for burst in 0..40 {
                let seqs = burst * 500 + 1..=(burst + 1) * 500;
                publish(&brokers, &topic, seqs.map(|seq| (seq, format!("k{}", seq % keys)))).await;
            }
        })
    };
    let lines = || std::fs::read_to_string(&file).unwrap();
    let progress = async |at_least: usize| {
        eventually(Duration::from_secs(120), "progress", async || lines().lines().count() >= at_least).await;
    };
    let mut first = member(&url, &file);
    let mut second = member(&url, &file);
    progress(2_000).await;
    let mut third = member(&url, &file);
    progress(5_000).await;
    // Abruptly: nothing is said to anyone, and nothing committed.
    second.kill().unwrap();
    second.wait().unwrap();
    progress(8_000).await;
    ask_to_end(&first);
    assert!(first.wait().unwrap().success());
    let mut fourth = member(&url, &file);
    progress(12_000).await;
    third.kill().unwrap();
    third.wait().unwrap();
    let mut fifth = member(&url, &file);
    writer.await.unwrap();
    let distinct = || {
        let lines = lines();
        let seqs = lines.lines().filter_map(|line| line.split_once(' ')).map(|(_, seq)| seq.to_owned());
        seqs.collect::<std::collections::HashSet<_>>().len()
    };
    eventually(Duration::from_secs(120), "all events", async || distinct() >= events).await;
    for child in [&mut fourth, &mut fifth] {
        ask_to_end(child);
        assert!(child.wait().unwrap().success());
    }

    let mut known = std::collections::HashSet::new();
    let mut last: std::collections::HashMap<String, i64> = std::collections::HashMap::new();
    let lines = lines();
    let total = lines.lines().count();
    for line in lines.lines() {
        let (key, seq) = line.split_once(' ').unwrap();
        let seq: i64 = seq.parse().unwrap();
        if known.insert(seq) {
            let before = last.insert(key.to_owned(), seq).unwrap_or(0);
            assert!(before < seq, "{key}: {seq} was first seen after {before}");
        }
    }
    assert_eq!(known.len(), events, "events are missing");
    println!("{total} handled, {} of them repeats", total - events);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_sleeps_past_its_session_loses_nothing_and_takes_nothing_back() {
    let name = "a_member_that_sleeps_past_its_session_loses_nothing_and_takes_nothing_back";
    let Some(brokers) = cluster(name) else { return };
    let topic = topic(&brokers, "sleeper", 2).await;
    let group = format!("sleeper.{topic}");
    let url = format!(
        "kafka://{brokers}/{topic}?group={group}&commit_interval=100ms&session.timeout.ms=6000&heartbeat.interval.ms=500"
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("seen");
    std::fs::write(&file, "").unwrap();
    let seen = || {
        let text = std::fs::read_to_string(&file).unwrap();
        text.lines().map(str::to_owned).collect::<std::collections::HashSet<_>>().len()
    };
    publish(&brokers, &topic, (1..=2_000).map(|seq| (seq, format!("k{}", seq % 20)))).await;
    let mut sleeper = member(&url, &file);
    eventually(PATIENCE, "its first events", async || seen() >= 100).await;
    signal("STOP", &sleeper);
    let mut other = member(&url, &file);
    eventually(PATIENCE, "the other to take over", async || seen() == 2_000).await;
    publish(&brokers, &topic, (2_001..=3_000).map(|seq| (seq, format!("k{}", seq % 20)))).await;
    eventually(PATIENCE, "the other to go on", async || seen() == 3_000).await;
    let both = async || {
        let (one, two) =
            (committed(&brokers, &group, &topic, 0).await, committed(&brokers, &group, &topic, 1).await);
        one.unwrap_or(0) + two.unwrap_or(0)
    };
    eventually(PATIENCE, "the other's commit", async || both().await == 3_000).await;
    signal("CONT", &sleeper);
    publish(&brokers, &topic, (3_001..=4_000).map(|seq| (seq, format!("k{}", seq % 20)))).await;
    // It never moves an offset back, whatever it still had in mind.
    eventually(PATIENCE, "all events", async || {
        assert!(both().await >= 3_000, "an offset has gone back");
        seen() == 4_000
    })
    .await;
    // Before they leave: a commit that meets a rebalance at the very end is a repeat for the next member, and no loss.
    eventually(PATIENCE, "all commits", async || both().await == 4_000).await;
    for child in [&mut sleeper, &mut other] {
        ask_to_end(child);
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(both().await, 4_000);
}
