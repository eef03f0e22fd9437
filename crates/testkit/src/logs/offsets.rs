//! Checks of offsets: restarts, the settled prefix, reading ahead, lost answers, retention.

use std::time::Duration;

use airtight_core::{
    Capabilities, Error, NewEvent, Order, Settlement, Verdict,
    log::{LogOptions, ParkedFilter, Retention},
};

use super::{
    C, LogUnderTest, LostAnswers, assert_still, consumer, grouped, offset, open, options, parked, published,
    reaches, seqs,
};
use crate::{
    ledger::cannot,
    sources::{
        Hand,
        hand::{assert_key_order, dead, event, events, retry},
    },
    wait::{eventually, eventually_some},
};

/// Who comes after goes on where the last one stopped, whether that one closed or vanished.
pub async fn a_restart_goes_on_at_the_offset(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 9)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    assert_eq!(seqs(&relay.deliver(3).await), all[..3]);
    relay.close().await;
    assert_eq!(offset(sut, C).await, all[2]);
    let relay = open(sut, options(sut, Order::Key)).await;
    assert_eq!(seqs(&relay.deliver(3).await), all[3..6]);
    relay.crash();
    sut.expire_leases().await;
    let relay = open(sut, options(sut, Order::Key)).await;
    assert_eq!(seqs(&relay.deliver(3).await), all[6..], "what was settled does not come again");
    assert!(relay.next(10).await.is_empty());
}

/// An event that is not settled keeps the offset back, and a restart repeats from there.
pub async fn the_offset_moves_over_the_settled_prefix_only(sut: &dyn LogUnderTest) {
    let new: Vec<NewEvent> = (0..6).map(|n| event(&format!("k{n}"), n)).collect();
    let all = published(&sut.publish(&new).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(6).await;
    relay.settle(&held[..1], &Verdict::Delivered).await;
    reaches(sut, C, all[0]).await;
    relay.settle(&held[2..5], &Verdict::Delivered).await;
    // Long enough for a relay that moves offsets by itself to get it wrong.
    assert_still(sut, &relay, "all are out").await;
    assert_eq!(offset(sut, C).await, all[0], "the second is not settled");
    relay.crash();
    sut.expire_leases().await;
    let relay = open(sut, options(sut, Order::Key)).await;
    let again = relay.collect(5).await;
    assert_eq!(seqs(&again), all[1..], "everything from the first that was not settled");
    relay.settle(&again, &Verdict::Delivered).await;
    reaches(sut, C, all[5]).await;
}

/// What is given back comes again, before anything newer, at no cost, and keeps the offset back meanwhile.
pub async fn released_comes_again_before_anything_newer_and_costs_nothing(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1), event("a", 2)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(3).await;
    let newer = published(&sut.publish(&[event("a", 3), event("b", 4)]).await);
    relay.settle(&held[1..2], &Verdict::Delivered).await;
    relay.settle(&[held[0].clone(), held[2].clone()], &Verdict::Released).await;
    assert!(offset(sut, C).await < all[0], "what is given back is not settled");
    let got = relay.deliver(4).await;
    let of = |key: &str| -> Vec<i64> {
        got.iter().filter(|d| d.event.aggregate_id == key).map(|d| d.event.seq).collect()
    };
    assert_eq!((of("a"), of("b")), (vec![all[0], all[2], newer[0]], vec![newer[1]]));
    assert!(got.iter().all(|d| d.attempt == 1), "it costs no attempt");
    reaches(sut, C, newer[1]).await;
}

/// A relay reads ahead of an unsettled event only so far.
pub async fn reading_ahead_is_bounded(sut: &dyn LogUnderTest) {
    let new: Vec<NewEvent> = (0..60).map(|n| event(&format!("k{n}"), n)).collect();
    let all = published(&sut.publish(&new).await);
    let relay = open(sut, LogOptions { max_ahead: 20, ..options(sut, Order::Key) }).await;
    let head = relay.collect(1).await;
    let mut ahead = Vec::new();
    loop {
        let batch = relay.next(5).await.deliveries;
        if batch.is_empty() {
            break;
        }
        relay.settle(&batch, &Verdict::Delivered).await;
        ahead.extend(batch);
    }
    assert!((10..=25).contains(&ahead.len()), "read {} ahead", ahead.len());
    assert_still(sut, &relay, "far enough ahead").await;
    relay.settle(&head, &Verdict::Delivered).await;
    relay.deliver(59 - ahead.len()).await;
    reaches(sut, C, all[59]).await;
}

/// Partitions without events of their own move on with what was read.
pub async fn an_idle_partition_moves_on(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("one", 10)).await);
    let relay = open(sut, grouped(sut)).await;
    relay.deliver(10).await;
    // All of them, though one key has one partition.
    reaches(sut, C, all[9]).await;
    let consumer = consumer(sut, C).await;
    assert_eq!(consumer.offsets.len(), usize::from(grouped(sut).read.partitions));
    assert!(consumer.offsets.iter().all(|partition| partition.owner.is_some()), "{consumer:?}");
}

/// An event that was parked while an earlier one was unsettled is in the log beyond the offset, too. After a
/// restart it comes when it is due, not from there.
pub async fn what_is_parked_beyond_the_offset_does_not_come_from_the_log(sut: &dyn LogUnderTest) {
    for order in [Order::Key, Order::None] {
        let new = [event("a", 0), event("b", 1), event("c", 2), event("b", 3)];
        let all = published(&sut.publish(&new).await);
        let relay = open(sut, options(sut, order)).await;
        let held = relay.collect(4).await;
        relay.settle(&held[1..2], &retry(Duration::from_millis(1_500))).await;
        relay.settle(&held[2..3], &dead()).await;
        relay.crash();
        sut.expire_leases().await;
        let relay = open(sut, options(sut, order)).await;
        let got = relay.deliver(3).await;
        let expected = match order {
            Order::Key => [all[0], all[1], all[3]],
            _ => [all[0], all[3], all[1]],
        };
        assert_eq!(seqs(&got), expected, "{order:?}: what is to be tried again comes when it is due");
        let attempts = got.iter().find(|d| d.event.seq == all[1]).map(|d| d.attempt);
        assert_eq!(attempts, Some(2), "{order:?}: it has failed once");
        reaches(sut, C, all[3]).await;
        let left = parked(sut).await;
        assert_eq!(left.len(), 1, "{order:?}: the dead one stays: {left:?}");
        assert_eq!(left[0].row.seq, all[2]);
        // The key goes on as if nothing had been.
        let more = published(&sut.publish(&[event("b", 4), event("c", 5)]).await);
        assert_eq!(seqs(&relay.deliver(2).await), more, "{order:?}");
        let filter = ParkedFilter { consumer: Some(C.into()), ..ParkedFilter::default() };
        assert_eq!(sut.admin().discard_parked(&filter).await.expect("discard"), 1);
        relay.close().await;
    }
}

/// The store settles, and nobody hears of it: the same verdicts come again, and in the end every event is settled
/// once and nothing stands still.
pub async fn a_lost_answer_to_a_settle_neither_loses_nor_wedges(sut: &dyn LogUnderTest) {
    let answers = LostAnswers::default();
    let Some(source) = sut.flaky_log(options(sut, Order::Key), answers.clone()) else {
        return cannot("a_lost_answer_to_a_settle_neither_loses_nor_wedges", "flaky_log");
    };
    let relay = Hand::over(source, sut.capabilities().patience).await;
    let mut seen = std::collections::HashSet::new();
    let mut all = Vec::new();
    for round in 0..6 {
        all.extend(published(
            &sut.publish(&[event("a", 0), event("b", 1), event("a", 2), event("c", 3)]).await,
        ));
        let held = relay.some(10).await.deliveries;
        let settlements: Vec<Settlement> = held
            .iter()
            .enumerate()
            .map(|(n, d)| {
                let verdict = match (n + round) % 4 {
                    0 => retry(Duration::from_millis(30)),
                    2 => Verdict::Released,
                    _ => Verdict::Delivered,
                };
                if matches!(verdict, Verdict::Delivered) {
                    seen.insert(d.event.seq);
                }
                Settlement { position: d.position, verdict }
            })
            .collect();
        answers.lose_one();
        // A relay tries on with the same verdicts. What else there is to settle may be settled in between.
        let mut tries = 0;
        while relay.source().settle(&settlements).await.is_err() {
            tries += 1;
            assert!(tries < 5, "one answer is lost, not all");
            if tries == 1 {
                all.extend(published(&sut.publish(&[event("d", 4)]).await));
            }
        }
    }
    let end = published(&sut.publish(&[event("e", 5)]).await)[0];
    eventually(sut.capabilities().patience, "everything to be delivered", async || {
        let batch = relay.next(10).await.deliveries;
        relay.settle(&batch, &Verdict::Delivered).await;
        seen.extend(seqs(&batch));
        relay.source().backlog().await.expect("backlog").unfinished == 0
    })
    .await;
    reaches(sut, C, end).await;
    assert!(parked(sut).await.is_empty());
    assert!(all.iter().all(|seq| seen.contains(seq)), "of {all:?} came {seen:?}");
    assert!(relay.next(10).await.is_empty());
}

/// A consumer whose next events were removed is told so, at its start and while it runs, and skips nothing.
pub async fn a_consumer_behind_retention_is_told_and_never_skips(sut: &dyn LogUnderTest) {
    if !sut.capabilities().prunes_at_once {
        return cannot("a_consumer_behind_retention_is_told_and_never_skips", "prunes_at_once");
    }
    sut.publish(&events("a", 6)).await;
    let relay = open(sut, options(sut, Order::Key)).await;
    let before = seqs(&relay.deliver(2).await)[1];
    reaches(sut, C, before).await;
    let all_gone = Retention { keep: Duration::ZERO, wait_for_consumers: false };
    let pruned = prune_all(sut, all_gone).await;
    assert!(pruned > before, "events were removed that it had not seen");
    let last = published(&sut.publish(&events("a", 1)).await)[0];
    // What a store had read ahead may still come; what it had not must be told.
    let mut next = before + 1;
    let told = eventually_some(sut.capabilities().patience, "the error", async || {
        match relay.source().next(airtight_core::Limits { events: 10, bytes: 1 << 20 }).await {
            Ok(batch) => {
                for seq in seqs(&batch.deliveries) {
                    assert!(seq == next && seq <= last, "it skips what is gone: {seq} in place of {next}");
                    next += 1;
                }
                None
            }
            Err(error) => Some(error),
        }
    })
    .await;
    assert_eq!(told.code(), "behind_retention", "{told}");
    assert!(
        told.remedy().is_some_and(|remedy| remedy.contains("operations.md")),
        "it names the way out: {told}"
    );
    relay.crash();
    sut.expire_leases().await;
    let refused = eventually_some(sut.capabilities().patience, "the error at the start", async || {
        open_or_next(sut, options(sut, Order::Key)).await.err()
    })
    .await;
    assert_eq!(refused.code(), "behind_retention", "{refused}");
    sut.expire_leases().await;
    assert_eq!(offset(sut, C).await, before, "nothing moves by itself");
    assert!(consumer(sut, C).await.behind_retention);
}

async fn open_or_next(sut: &dyn LogUnderTest, options: LogOptions) -> Result<(), Error> {
    let source = sut.log(options);
    let opened = source.open(&Capabilities::default()).await;
    let next = match opened {
        Ok(()) => source.next(airtight_core::Limits { events: 10, bytes: 1 << 20 }).await.map(|_| ()),
        Err(error) => Err(error),
    };
    // It has failed already; whether it leaves cleanly is another matter.
    let _ = source.close().await;
    next
}

/// Prunes until the floor stays where it is.
async fn prune_all(sut: &dyn LogUnderTest, retention: Retention) -> i64 {
    // An event must be older than nothing at all, by the database's clock.
    tokio::time::sleep(Duration::from_millis(20)).await;
    sut.admin().prune_log(retention, &|_| ()).await.expect("prune").floor
}

/// Retention that waits for consumers stops at the slowest one and names it.
pub async fn retention_waits_for_the_slowest_consumer(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 8)).await);
    let named = |name: &str| LogOptions { consumer: name.into(), ..options(sut, Order::Key) };
    let (slow, fast) = (open(sut, named("slow")).await, open(sut, named("fast")).await);
    slow.deliver(3).await;
    fast.deliver(8).await;
    reaches(sut, "slow", all[2]).await;
    reaches(sut, "fast", all[7]).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let waiting = Retention { keep: Duration::ZERO, wait_for_consumers: true };
    let pruned = sut.admin().prune_log(waiting, &|_| ()).await.expect("prune");
    assert!(pruned.floor <= all[2], "nothing that the slow one needs: {pruned:?}");
    if sut.capabilities().prunes_at_once {
        assert_eq!((pruned.events, pruned.held_by.as_deref()), (3, Some("slow")), "{pruned:?}");
        let young = Retention { keep: Duration::from_secs(3_600), wait_for_consumers: false };
        let pruned = sut.admin().prune_log(young, &|_| ()).await.expect("prune");
        assert_eq!(pruned.events, 0, "all are young");
    } else {
        cannot("retention_waits_for_the_slowest_consumer", "prunes_at_once, for a part of it");
    }
    let rest = slow.deliver(5).await;
    assert_eq!(seqs(&rest), all[3..], "the slow one misses nothing");
    assert_key_order(&rest);
}
