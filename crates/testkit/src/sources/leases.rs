//! Checks of ownership: renewal, fencing, takeover, suspects, leaving.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use airtight_core::{Limits, Order, Settlement, Source, Verdict};

use super::{
    SourceUnderTest,
    hand::{Hand, assert_key_order, event, events, ids, long, retry, short},
};
use crate::{ledger::cannot, wait::eventually};

/// Who lost its claim cannot settle any more, and the event goes to its new owner exactly once more.
pub async fn a_settle_after_a_takeover_is_fenced(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().order_none {
        return cannot("a_settle_after_a_takeover_is_fenced", "order_none");
    }
    sut.publish(&events("a", 2)).await;
    let stale = Hand::open(sut, long(Order::None)).await;
    let held = stale.collect(2).await;
    // The heir renews often, so that it takes over before the other one renews its lease again.
    let heir = Hand::open(sut, short(sut, Order::None)).await;
    assert!(heir.next(10).await.is_empty(), "the lease is good");
    sut.expire_leases().await;
    let taken = heir.collect(2).await;
    assert_eq!(ids(&taken), ids(&held));

    for verdict in [Verdict::Delivered, Verdict::Released] {
        let settled = stale.settle(&held[..1], &verdict).await;
        assert_eq!((settled.applied, settled.fenced), (0, 1), "{verdict:?} by a former owner is refused");
    }
    assert!(heir.next(10).await.is_empty(), "nothing was given back by the former owner");
    let settled = heir.settle(&taken, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (2, 0));
    let settled = stale.settle(&held[1..], &super::hand::dead()).await;
    assert_eq!((settled.applied, settled.fenced), (0, 1), "not even after the new owner is done");
    assert_eq!(heir.source().backlog().await.expect("backlog").unfinished, 0);
}

async fn takeover(sut: &dyn SourceUnderTest, order: Order) {
    sut.publish(&events("a", 2)).await;
    let options = short(sut, order);
    let lease = options.lease;
    let first = Hand::open(sut, options.clone()).await;
    let held = first.collect(2).await;
    let second = Hand::open(sut, options).await;
    let crashed = Instant::now();
    first.crash();
    let taken = second.collect(2).await;
    let after = crashed.elapsed();
    assert!(
        after < lease * 3 + Duration::from_secs(1),
        "the lease is {lease:?}, the takeover took {after:?}"
    );
    assert_eq!(ids(&taken), ids(&held), "in order");
    for delivery in &taken {
        assert_eq!(delivery.attempt, 1, "a lost lease costs no attempt");
        if sut.capabilities().counts_lost_leases {
            assert_eq!(delivery.lost_leases, 1, "it is counted apart");
        }
    }
    let settled = second.settle(&taken, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (2, 0));
}

/// What a crashed relay held goes to another within its lease, at no cost to the events.
pub async fn a_crashed_relay_is_taken_over(sut: &dyn SourceUnderTest) {
    takeover(sut, Order::Key).await;
}

/// The same where rows are claimed freely.
pub async fn a_crashed_relay_is_taken_over_without_order(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().order_none {
        return cannot("a_crashed_relay_is_taken_over_without_order", "order_none");
    }
    takeover(sut, Order::None).await;
}

/// The new owner of a partition gets what the old one held before anything newer of the same keys.
pub async fn a_takeover_keeps_the_order_of_a_key(sut: &dyn SourceUnderTest) {
    for key in ["a", "b", "c"] {
        sut.publish(&events(key, 6)).await;
    }
    let first = Hand::open(sut, short(sut, Order::Key)).await;
    let held = first.collect(10).await;
    // Some in the middle are settled, as a relay that works in parallel leaves them.
    let (done, open): (Vec<_>, Vec<_>) = held.into_iter().partition(|d| d.event.aggregate_id == "b");
    first.settle(&done, &Verdict::Delivered).await;
    first.crash();
    let second = Hand::open(sut, short(sut, Order::Key)).await;
    let got = second.deliver(18 - done.len()).await;
    assert_key_order(&got);
    assert!(open.iter().all(|d| ids(&got).contains(&d.event.id.as_str())), "what was held comes again");
    assert!(second.next(10).await.is_empty());
}

/// A relay settles late, at the very moment at which another one takes over what it held. Whoever wins, the key
/// stays in order: a takeover that skips rows which the late settle has locked would get this wrong.
pub async fn a_late_settle_beside_a_takeover_keeps_the_order(sut: &dyn SourceUnderTest) {
    for round in 0..8 {
        let published = sut.publish(&events(&format!("k{round}"), 4)).await;
        // Renews so seldom that it does not learn of its eviction meanwhile.
        let late = Hand::open(sut, long(Order::Key)).await;
        let held = late.collect(4).await;
        let heir = Hand::open(sut, short(sut, Order::Key)).await;
        sut.expire_leases().await;
        let settle = async {
            // The heir takes over at its next renewal: a quarter of its lease, at most.
            let beat = u64::try_from(sut.capabilities().lease.as_millis() / 4).unwrap_or(100);
            tokio::time::sleep(Duration::from_millis(fastrand::u64(beat / 2..=beat + beat / 4))).await;
            let verdict =
                |n: usize| if n == 0 { retry(Duration::from_millis(50)) } else { Verdict::Released };
            let settlements: Vec<Settlement> = held
                .iter()
                .enumerate()
                .map(|(n, d)| Settlement { position: d.position, verdict: verdict(n) })
                .collect();
            late.source().settle(&settlements).await.expect("settle")
        };
        let (settled, got) = futures::join!(settle, heir.deliver(4));
        let expected: Vec<&str> = published.iter().map(|p| p.id.as_str()).collect();
        assert_eq!(ids(&got), expected, "round {round}: the late settle {settled:?}");
        heir.close().await;
        late.close().await;
    }
}

/// An event that was held by three relays when they vanished is delivered alone.
pub async fn three_lost_leases_make_an_event_travel_alone(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().counts_lost_leases {
        return cannot("three_lost_leases_make_an_event_travel_alone", "counts_lost_leases");
    }
    let poison = sut.publish(&events("a", 1)).await;
    for crash in 0..3 {
        let relay = Hand::open(sut, short(sut, Order::Key)).await;
        let held = relay.collect(1).await;
        assert_eq!((held[0].lost_leases, held[0].attempt), (crash, 1));
        relay.crash();
    }
    let behind = sut.publish(&events("a", 1)).await;
    sut.publish(&events("b", 3)).await;
    let relay = Hand::open(sut, short(sut, Order::Key)).await;
    let mut seen = 0;
    loop {
        let batch = relay.some(10).await.deliveries;
        if batch.iter().any(|d| d.event.id == poison[0].id) {
            assert_eq!(ids(&batch), [&poison[0].id], "it comes alone");
            assert_eq!((batch[0].lost_leases, batch[0].attempt), (3, 1));
            assert!(relay.next(10).await.is_empty(), "and nothing beside it while it is out");
            relay.settle(&batch, &Verdict::Delivered).await;
            break;
        }
        assert!(!batch.iter().any(|d| d.event.id == behind[0].id), "its key waits for it");
        seen += batch.len();
        relay.settle(&batch, &Verdict::Delivered).await;
    }
    relay.deliver(4 - seen).await;
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
}

/// A relay that leaves gives back what it holds at once and at no cost, however long its lease.
pub async fn a_graceful_close_gives_back_at_once(sut: &dyn SourceUnderTest) {
    let published = sut.publish(&events("a", 3)).await;
    let first = Hand::open(sut, long(Order::Key)).await;
    first.collect(2).await;
    first.close().await;
    let second = Hand::open(sut, long(Order::Key)).await;
    let got = second.deliver(3).await;
    assert_eq!(ids(&got), published.iter().map(|p| p.id.as_str()).collect::<Vec<_>>());
    for delivery in &got {
        assert_eq!((delivery.attempt, delivery.lost_leases), (1, 0), "a shutdown costs nothing");
    }
}

async fn slow_delivery(sut: &dyn SourceUnderTest, order: Order) {
    sut.publish(&events("a", 2)).await;
    let options = short(sut, order);
    let lease = options.lease;
    let slow = Hand::open(sut, options.clone()).await;
    let batch = slow.some(2).await;
    let other = Hand::open(sut, options).await;
    let claimed = Instant::now();
    eventually(lease * 5, "three leases to pass", async || {
        assert!(other.next(10).await.is_empty(), "renewed, so nobody else's, after {:?}", claimed.elapsed());
        claimed.elapsed() > lease * 3
    })
    .await;
    assert!(!batch.ownership.is_lost(), "the relay knows that it still owns the batch");
    let settled = slow.settle(&batch.deliveries, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (batch.deliveries.len(), 0));
}

/// A delivery that takes several leases stays with its relay, because leases are renewed.
pub async fn renewal_keeps_a_slow_delivery(sut: &dyn SourceUnderTest) {
    slow_delivery(sut, Order::Key).await;
}

/// The same where rows are claimed freely.
pub async fn renewal_keeps_a_slow_delivery_without_order(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().order_none {
        return cannot("renewal_keeps_a_slow_delivery_without_order", "order_none");
    }
    slow_delivery(sut, Order::None).await;
}

/// Relays that are alive never hold one event at the same time.
pub async fn no_event_is_held_twice(sut: &dyn SourceUnderTest) {
    let free = sut.capabilities().order_none;
    if !free {
        cannot("no_event_is_held_twice", "order_none, for a part of it");
    }
    for order in [Order::Key].into_iter().chain(free.then_some(Order::None)) {
        let count = 150;
        let new: Vec<_> = (0..count).map(|n| event(&format!("k{}", n % 23), n)).collect();
        sut.publish(&new).await;
        let relays = [
            Hand::open(sut, long(order)).await,
            Hand::open(sut, long(order)).await,
            Hand::open(sut, long(order)).await,
        ];
        let held: Mutex<HashSet<i64>> = Mutex::default();
        let done: Mutex<usize> = Mutex::default();
        let work = async |source: &dyn Source| {
            let end = Instant::now() + sut.capabilities().patience;
            while *done.lock().unwrap_or_else(PoisonError::into_inner) < count {
                assert!(
                    Instant::now() < end,
                    "{order:?}: {} of {count} events came in time",
                    done.lock().unwrap_or_else(PoisonError::into_inner)
                );
                let batch = source.next(Limits { events: 7, bytes: 1 << 20 }).await.expect("next");
                for delivery in &batch.deliveries {
                    let new = held.lock().unwrap_or_else(PoisonError::into_inner).insert(delivery.event.seq);
                    assert!(new, "{order:?}: seq {} is held twice", delivery.event.seq);
                }
                // Let the others look while this one holds. Not `Source::wait`, which may return at once.
                tokio::time::sleep(Duration::from_millis(3)).await;
                if batch.is_empty() {
                    continue;
                }
                let settlements: Vec<Settlement> = batch
                    .deliveries
                    .iter()
                    .map(|d| Settlement { position: d.position, verdict: Verdict::Delivered })
                    .collect();
                for delivery in &batch.deliveries {
                    held.lock().unwrap_or_else(PoisonError::into_inner).remove(&delivery.event.seq);
                }
                let settled = source.settle(&settlements).await.expect("settle");
                assert_eq!(settled.fenced, 0, "nobody else may touch what a live relay holds");
                *done.lock().unwrap_or_else(PoisonError::into_inner) += settled.applied;
            }
        };
        futures::join!(work(relays[0].source()), work(relays[1].source()), work(relays[2].source()));
        assert_eq!(done.into_inner().unwrap_or_else(PoisonError::into_inner), count);
        for relay in relays {
            relay.close().await;
        }
    }
}
