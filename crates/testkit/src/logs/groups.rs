//! Checks of several instances of one consumer: shares, leaving, dying, fencing, another partition count.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use airtight_core::{Capabilities, Class, Limits, NewEvent, Order, Verdict};

use super::{C, LogUnderTest, consumer, grouped, offset, open, options, parked, published, reaches, seqs};
use crate::{
    ledger::cannot,
    sources::{
        Hand,
        hand::{assert_key_order, dead, event, events, retry},
    },
    wait::eventually,
};

/// What the instances of a check have seen, in order.
#[derive(Default)]
struct Deliveries {
    /// First deliveries per key.
    first: RefCell<BTreeMap<String, Vec<i64>>>,
    seqs: RefCell<HashSet<i64>>,
    workers: RefCell<HashSet<usize>>,
}

impl Deliveries {
    /// One round of an instance: fetch a few, note them, settle them; now and then one fails.
    async fn work(&self, who: usize, relay: &Hand) {
        let batch = relay.next(20).await.deliveries;
        let fails = batch.first().is_some_and(|d| d.attempt == 1 && d.event.seq % 11 == 0);
        let (failed, fine) = batch.split_at(usize::from(fails));
        // Behind a failure the rest of its key is given back, as a relay does it.
        let key = failed.first().map(|d| d.event.aggregate_id.clone());
        let (behind, fine): (Vec<_>, Vec<_>) =
            fine.iter().cloned().partition(|d| key.as_ref() == Some(&d.event.aggregate_id));
        for delivery in &fine {
            if self.seqs.borrow_mut().insert(delivery.event.seq) {
                let key = delivery.event.aggregate_id.clone();
                self.first.borrow_mut().entry(key).or_default().push(delivery.event.seq);
            }
            self.workers.borrow_mut().insert(who);
        }
        relay.settle(failed, &retry(Duration::from_millis(30))).await;
        relay.settle(&behind, &Verdict::Released).await;
        relay.settle(&fine, &Verdict::Delivered).await;
    }

    fn count(&self) -> usize {
        self.seqs.borrow().len()
    }
}

/// What one instance leaves out, another would take for done: all of them read the same streams, also one that comes
/// back after its lease has run out.
pub async fn instances_of_a_consumer_read_the_same_streams(sut: &dyn LogUnderTest) {
    if !sut.capabilities().streams {
        return cannot("instances_of_a_consumer_read_the_same_streams", "streams");
    }
    let all = || options(sut, Order::Key).reading(|read| read.lease = Duration::from_secs(8));
    let first = sut.log(all().reading(|read| read.streams = vec!["other".into()]));
    first.open(&Capabilities::default()).await.expect("it opens");
    let error = sut
        .log(all())
        .open(&Capabilities::default())
        .await
        .expect_err("other streams beside a live instance");
    assert_eq!(error.class(), Class::Permanent, "{error}");
    // It stands still for too long, and the consumer is given all streams.
    let second = sut.log(all());
    eventually(
        sut.capabilities().patience,
        "the second to come between two heartbeats of the first",
        async || {
            sut.expire_leases().await;
            second.open(&Capabilities::default()).await.is_ok()
        },
    )
    .await;
    let refused = RefCell::new(None);
    eventually(sut.capabilities().patience, "the first to be refused", async || {
        let next = first.next(Limits { events: 1, bytes: 1 << 20 }).await;
        *refused.borrow_mut() = next.err();
        refused.borrow().is_some()
    })
    .await;
    let error = refused.into_inner().expect("it was refused");
    assert_eq!(error.class(), Class::Permanent, "{error}");
    for relay in [first, second] {
        relay.close().await.expect("it closes");
    }
}

/// Three instances share the partitions; one joins late, one vanishes with events in hand, one leaves. Nothing is
/// lost, each gets work, and first deliveries of each key are in order.
pub async fn instances_share_partitions_and_keep_the_order_of_keys(sut: &dyn LogUnderTest) {
    if !sut.capabilities().groups {
        return cannot("instances_share_partitions_and_keep_the_order_of_keys", "groups");
    }
    let patience = sut.capabilities().patience;
    let seen = Deliveries::default();
    let total = RefCell::new(0);
    let last = RefCell::new(0);
    let publish = async |count: usize| {
        let done = *total.borrow();
        let new: Vec<NewEvent> =
            (0..count).map(|n| event(&format!("k{}", (done + n) % 40), done + n)).collect();
        let stored = sut.publish(&new).await;
        *total.borrow_mut() += count;
        *last.borrow_mut() = stored[count - 1].seq;
    };

    let first = open(sut, grouped(sut)).await;
    publish(40).await;
    seen.work(0, &first).await;
    let (second, third) = (open(sut, grouped(sut)).await, open(sut, grouped(sut)).await);
    eventually(patience, "every instance to get work", async || {
        publish(8).await;
        futures::join!(seen.work(0, &first), seen.work(1, &second), seen.work(2, &third));
        seen.workers.borrow().len() == 3
    })
    .await;
    let owned: HashSet<Option<String>> =
        consumer(sut, C).await.offsets.into_iter().map(|partition| partition.owner).collect();
    assert!(owned.len() >= 3, "the partitions are shared: {owned:?}");

    let held = second.next(5).await.deliveries;
    second.crash();
    publish(40).await;
    seen.work(0, &first).await;
    first.close().await;
    publish(40).await;
    eventually(patience, "the last instance to deliver everything", async || {
        seen.work(2, &third).await;
        seen.count() == *total.borrow()
    })
    .await;
    assert!(held.iter().all(|d| seen.seqs.borrow().contains(&d.event.seq)), "what was held came again");
    for (key, order) in seen.first.borrow().iter() {
        assert!(order.is_sorted(), "key {key} came as {order:?}");
    }
    let end = *last.borrow();
    eventually(patience, "all offsets to be at the end, and nothing parked", async || {
        seen.work(2, &third).await;
        offset(sut, C).await >= end && parked(sut).await.is_empty()
    })
    .await;
    assert_eq!(third.source().backlog().await.expect("backlog").unfinished, 0);
}

/// Who lost a partition cannot settle any more: not an offset, not a parked event. It is counted, and the new owner
/// is not disturbed.
pub async fn a_stale_owner_is_fenced(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 4)).await);
    // Renews so seldom that it does not learn of its eviction meanwhile.
    let long = options(sut, Order::Key).reading(|read| read.lease = Duration::from_secs(30));
    let stale = open(sut, long).await;
    let held = stale.collect(4).await;
    let heir = open(sut, options(sut, Order::Key)).await;
    assert!(heir.next(10).await.is_empty(), "the lease is good");
    sut.expire_leases().await;
    let taken = heir.collect(4).await;
    assert_eq!(seqs(&taken), all);

    for (delivery, verdict) in held.iter().zip([Verdict::Delivered, retry(Duration::ZERO), dead()]) {
        let settled = stale.settle(std::slice::from_ref(delivery), &verdict).await;
        assert_eq!((settled.applied, settled.fenced), (0, 1), "{verdict:?} by a former owner is refused");
    }
    assert!(offset(sut, C).await < all[0], "nothing moved");
    assert!(parked(sut).await.is_empty(), "nothing was parked");
    assert!(heir.next(10).await.is_empty(), "nothing was given back by the former owner");
    let settled = heir.settle(&taken, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (4, 0));
    reaches(sut, C, all[3]).await;
    let settled = stale.settle(&held[3..], &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (0, 1), "not even after the new owner is done");
}

/// An instance that vanishes is replaced within its lease, at no cost to the events and in order; what it had
/// parked is taken over as well.
pub async fn a_dead_instance_is_replaced_within_its_lease(sut: &dyn LogUnderTest) {
    let a = published(&sut.publish(&events("a", 3)).await);
    let b = published(&sut.publish(&events("b", 2)).await);
    let first = open(sut, options(sut, Order::Key)).await;
    let held = first.collect(5).await;
    first.settle(&held[..1], &retry(Duration::from_millis(100))).await;
    let lease = options(sut, Order::Key).read.lease;
    let second = open(sut, options(sut, Order::Key)).await;
    let crashed = Instant::now();
    first.crash();
    let got = second.deliver(5).await;
    let after = crashed.elapsed();
    assert!(after < lease * 3 + Duration::from_secs(1), "the lease is {lease:?}, it took {after:?}");
    assert_key_order(&got);
    let mut came = seqs(&got);
    came.sort_unstable();
    assert_eq!(came, [a, b].concat());
    for delivery in &got {
        let expected = if delivery.event.seq == held[0].event.seq { 2 } else { 1 };
        assert_eq!(delivery.attempt, expected, "a lost instance costs no attempt");
    }
    assert!(parked(sut).await.is_empty());
}

/// Another number of partitions is refused while instances with the old one live; then all partitions restart from
/// the smallest offset, so nothing is lost.
pub async fn another_partition_count_restarts_from_the_smallest_offset(sut: &dyn LogUnderTest) {
    if !sut.capabilities().groups {
        return cannot("another_partition_count_restarts_from_the_smallest_offset", "groups");
    }
    let new: Vec<NewEvent> = (0..24).map(|n| event(&format!("k{}", n % 12), n)).collect();
    let all = published(&sut.publish(&new).await);
    let relay = open(sut, grouped(sut)).await;
    let held = relay.collect(24).await;
    // One key is left alone, one fails; the others are done, so most partitions are at the end.
    let of = |key: &str| held.iter().filter(|d| d.event.aggregate_id == key).cloned().collect::<Vec<_>>();
    let (slow, bad) = (of("k3"), of("k5"));
    let rest: Vec<_> =
        held.iter().filter(|d| !["k3", "k5"].contains(&d.event.aggregate_id.as_str())).cloned().collect();
    relay.settle(&rest, &Verdict::Delivered).await;
    relay.settle(&bad[..1], &retry(Duration::from_millis(200))).await;
    relay.settle(&bad[1..], &Verdict::Released).await;
    let fewer = grouped(sut).reading(|read| read.partitions = 3);
    let refused = sut
        .log(fewer.clone())
        .open(&Capabilities::default())
        .await
        .expect_err("instances with the old number live");
    assert_eq!(refused.class(), Class::Permanent, "{refused}");
    let before = offset(sut, C).await;
    assert!(before < slow[0].event.seq);
    relay.close().await;

    let relay = open(sut, fewer).await;
    let after = consumer(sut, C).await;
    assert_eq!(usize::from(after.partitions), after.offsets.len());
    assert!(after.offsets.iter().all(|partition| partition.offset <= slow[0].event.seq), "{after:?}");
    let mut seen = HashSet::new();
    let mut got = Vec::new();
    let wanted: HashSet<i64> = slow.iter().chain(&bad).map(|d| d.event.seq).collect();
    eventually(sut.capabilities().patience, "what was not settled to come", async || {
        let batch = relay.next(10).await.deliveries;
        relay.settle(&batch, &Verdict::Delivered).await;
        seen.extend(seqs(&batch));
        got.extend(batch);
        wanted.is_subset(&seen)
    })
    .await;
    assert_key_order(&got);
    eventually(sut.capabilities().patience, "everything to be settled", async || {
        let batch = relay.next(10).await.deliveries;
        relay.settle(&batch, &Verdict::Delivered).await;
        offset(sut, C).await >= all[23] && parked(sut).await.is_empty()
    })
    .await;
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
}
