//! Checks of several relays at once: groups, shared partitions, joins and leaves, total order.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashSet},
    time::{Duration, Instant},
};

use airtight_core::{Capabilities, NewEvent, Order, Verdict, queue::QueueOptions};

use super::{
    SourceUnderTest,
    hand::{Hand, event, events, ids, long, retry, short},
};
use crate::{ledger::cannot, wait::eventually};

/// Two groups of relays that share a stream would break the order of both: the second is refused, until the
/// first is gone.
pub async fn overlapping_groups_are_refused(sut: &dyn SourceUnderTest) {
    let on = |streams: &[&str], order: Order| QueueOptions {
        streams: streams.iter().map(|&s| s.to_owned()).collect(),
        ..long(order)
    };
    let streams = sut.capabilities().streams;
    let names: &[&str] = if streams { &["x", "y"] } else { &[] };
    let first = Hand::open(sut, on(names, Order::Key)).await;
    Hand::open(sut, on(names, Order::Key)).await.close().await;

    let mut rivals = vec![QueueOptions { partitions: 3, ..on(names, Order::Key) }];
    if streams {
        rivals.extend([on(&["y", "z"], Order::Key), on(&[], Order::Key), on(&["x"], Order::Key)]);
        Hand::open(sut, on(&["z"], Order::Key)).await.close().await;
    } else {
        cannot("overlapping_groups_are_refused", "streams, for a part of it");
    }
    if sut.capabilities().order_none {
        rivals.push(on(names, Order::None));
    } else {
        cannot("overlapping_groups_are_refused", "order_none, for a part of it");
    }
    for rival in rivals {
        let refused = sut.queue(rival.clone()).open(&Capabilities::default()).await;
        let error = refused.expect_err(&format!("{rival:?} overlaps with a live group"));
        assert_eq!(error.class(), airtight_core::Class::Permanent, "waiting does not help: {error}");
    }
    first.close().await;
    let second = sut.queue(QueueOptions { partitions: 3, ..on(names, Order::Key) });
    second.open(&Capabilities::default()).await.expect("the first group is gone");
    second.close().await.expect("close");
}

/// What the relays of a check have seen, in order.
#[derive(Default)]
struct Log {
    /// First deliveries per key, and by whom.
    first: RefCell<BTreeMap<String, Vec<i64>>>,
    seen: RefCell<HashSet<i64>>,
    workers: RefCell<HashSet<usize>>,
}

impl Log {
    /// One round of a relay: fetch a few, note them, settle them.
    async fn work(&self, who: usize, relay: &Hand) {
        let batch = relay.next(5).await.deliveries;
        for delivery in &batch {
            if self.seen.borrow_mut().insert(delivery.event.seq) {
                let key = delivery.event.aggregate_id.clone();
                self.first.borrow_mut().entry(key).or_default().push(delivery.event.seq);
            }
            self.workers.borrow_mut().insert(who);
        }
        if !batch.is_empty() {
            relay.settle(&batch, &Verdict::Delivered).await;
        }
    }

    fn count(&self) -> usize {
        self.seen.borrow().len()
    }
}

/// Three relays share the partitions; one joins late, one leaves, one crashes with events in hand. Nothing is
/// lost, every relay gets work, and first deliveries of each key are in order.
pub async fn relays_share_the_work_and_keep_the_order_of_keys(sut: &dyn SourceUnderTest) {
    let patience = sut.capabilities().patience;
    let options = short(sut, Order::Key);
    let log = Log::default();
    let mut published = 0;
    let mut publish = async |count: usize| {
        let new: Vec<NewEvent> = (0..count).map(|n| event(&format!("k{}", n % 40), published + n)).collect();
        sut.publish(&new).await;
        published += count;
        published
    };

    let first = Hand::open(sut, options.clone()).await;
    publish(40).await;
    log.work(0, &first).await;
    let (second, third) = (Hand::open(sut, options.clone()).await, Hand::open(sut, options).await);
    eventually(patience, "every relay to get work", async || {
        publish(40).await;
        futures::join!(log.work(0, &first), log.work(1, &second), log.work(2, &third));
        log.workers.borrow().len() == 3
    })
    .await;

    let held = second.next(5).await.deliveries;
    second.crash();
    publish(40).await;
    log.work(0, &first).await;
    first.close().await;
    let total = publish(40).await;
    eventually(patience, "the last relay to deliver everything", async || {
        log.work(2, &third).await;
        log.count() == total
    })
    .await;
    assert!(held.iter().all(|d| log.seen.borrow().contains(&d.event.seq)), "what was held came again");
    for (key, order) in log.first.borrow().iter() {
        assert!(order.is_sorted(), "key {key} came as {order:?}");
    }
    eventually(patience, "an empty backlog", async || {
        log.work(2, &third).await;
        third.source().backlog().await.expect("backlog").unfinished == 0
    })
    .await;
}

/// In total order one relay works and the others stand by; when it crashes one of them takes over where it was.
pub async fn total_order_is_kept_and_a_standby_takes_over(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().order_total {
        return cannot("total_order_is_kept_and_a_standby_takes_over", "order_total");
    }
    let new: Vec<NewEvent> = (0..12).map(|n| event(&format!("k{}", n % 5), n)).collect();
    let published: Vec<String> = sut.publish(&new).await.into_iter().map(|p| p.id).collect();
    let active = Hand::open(sut, short(sut, Order::Total)).await;
    let standby = Hand::open(sut, short(sut, Order::Total)).await;
    let mut got: Vec<String> = ids(&active.deliver(4).await).into_iter().map(Into::into).collect();
    let held = active.collect(3).await;
    assert!(standby.next(10).await.is_empty(), "one relay at a time");
    active.crash();
    let rest = standby.deliver(8).await;
    assert_eq!(ids(&rest)[..3], ids(&held), "where the crashed one was");
    got.extend(rest.into_iter().map(|d| d.event.id));
    assert_eq!(got, published, "all events in the order of seq");
}

/// In total order everything waits for an event that is to be tried again.
pub async fn in_total_order_a_retry_holds_everything(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().order_total {
        return cannot("in_total_order_a_retry_holds_everything", "order_total");
    }
    let mut new = events("a", 1);
    new.extend(events("b", 2));
    let published: Vec<String> = sut.publish(&new).await.into_iter().map(|p| p.id).collect();
    let relay = Hand::open(sut, short(sut, Order::Total)).await;
    let held = relay.collect(3).await;
    let wait = Duration::from_millis(400);
    relay.settle(&held[..1], &retry(wait)).await;
    let failed = Instant::now();
    relay.settle(&held[1..], &Verdict::Released).await;
    let got = relay.deliver(3).await;
    assert!(failed.elapsed() + Duration::from_millis(150) >= wait, "came after {:?}", failed.elapsed());
    assert_eq!(ids(&got), published);
}
