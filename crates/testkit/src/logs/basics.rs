//! Checks of what is handed out at all: commits, fields, limits, streams, consumers, holes, backlog.

use std::sync::Arc;

use airtight_core::{
    CancellationToken, Limits, NewEvent, Op, Order, Payload, Policy, Relay, Settlement, Verdict,
    log::{LogOptions, Start},
    sinks::MemorySink,
};
use time::OffsetDateTime;

use super::{
    C, LogUnderTest, assert_still, consumer, offset, open, options, parked, published, reaches, seqs,
};
use crate::{
    ledger::cannot,
    sources::hand::{dead, event, events, ids},
    wait::eventually_some,
};

/// What was committed comes, in the order of `seq`, once; what was rolled back never existed.
pub async fn committed_events_come_in_the_order_of_seq(sut: &dyn LogUnderTest) {
    let mut all = published(&sut.publish(&[event("a", 0), event("b", 1)]).await);
    sut.publish_rolled_back(&events("a", 3)).await;
    all.extend(published(&sut.publish(&[event("b", 2), event("a", 3), event("c", 4)]).await));
    let relay = open(sut, options(sut, Order::Key)).await;
    let got = relay.deliver(5).await;
    assert_eq!(seqs(&got), all, "exactly what was committed, ascending");
    assert!(got.iter().all(|d| d.attempt == 1 && d.lost_leases == 0), "first attempts");
    assert!(relay.next(10).await.is_empty(), "delivered events do not come again");
}

/// Every field arrives as it was published.
pub async fn log_events_arrive_as_published(sut: &dyn LogUnderTest) {
    let caps = sut.capabilities();
    // To the millisecond, which every database keeps.
    let at = OffsetDateTime::from_unix_timestamp(1_700_000_000).expect("a time")
        + time::Duration::milliseconds(123);
    let json = NewEvent::new("s", "OrderPlaced", "Order", "Ωrder-1")
        .json_text(r#"{"total": 12.50, "items": ["a", "ü"]}"#)
        .header("traceId", "abc")
        .header("tenant", "7")
        .occurred_at(at)
        .schema_version(3)
        .max_attempts(4);
    let delete = NewEvent::new("s", "OrderGone", "Order", "Ωrder-1").delete();
    let raw = NewEvent::new("s", "Scanned", "Image", "i-1").bytes(vec![0, 159, 146, 150]);
    let mut stored = sut.publish(&[json.clone(), delete.clone()]).await;
    if caps.bytes {
        stored.extend(sut.publish(std::slice::from_ref(&raw)).await);
    }
    let relay = open(sut, options(sut, Order::Key)).await;
    let got = relay.deliver(stored.len()).await;
    let expected: Vec<&str> = stored.iter().map(|event| event.id.as_str()).collect();
    assert_eq!((ids(&got), seqs(&got)), (expected, published(&stored)));
    let placed = &got[0].event;
    assert_eq!((placed.event_type.as_str(), placed.aggregate_type.as_str()), ("OrderPlaced", "Order"));
    assert_eq!((&placed.aggregate_id, &placed.headers), (&json.aggregate_id, &json.headers));
    let value = |payload: &Payload| -> serde_json::Value {
        serde_json::from_slice(payload.as_bytes()).expect("the payload is JSON")
    };
    assert_eq!(value(&placed.payload), value(&json.payload), "the payload means the same");
    if caps.envelope_fields {
        assert_eq!((placed.stream.as_str(), placed.op, placed.schema_version), ("s", Op::Upsert, 3));
        assert_eq!((placed.occurred_at, got[0].max_attempts), (at, Some(4)));
        assert_eq!((got[1].event.op, got[1].max_attempts), (Op::Delete, None));
    } else {
        cannot("log_events_arrive_as_published", "envelope_fields, for a part of it");
    }
    if caps.bytes {
        assert_eq!(got[2].event.payload, raw.payload);
    } else {
        cannot("log_events_arrive_as_published", "bytes, for a part of it");
    }
}

/// No batch is larger than asked for, in events or in bytes, though one event always fits; all events come.
pub async fn batches_stay_within_the_limits(sut: &dyn LogUnderTest) {
    let body = |n: usize| format!("{{\"n\":{n},\"pad\":\"{}\"}}", "x".repeat(3_000));
    let new: Vec<NewEvent> = (0..12).map(|n| event("a", n).json_text(body(n))).collect();
    let all = published(&sut.publish(&new).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let next = async |events: usize, bytes: usize| {
        let limits = Limits { events, bytes };
        eventually_some(sut.capabilities().patience, "a batch", async || {
            let batch = relay.next_within(limits).await.deliveries;
            (!batch.is_empty()).then_some(batch)
        })
        .await
    };
    let mut got = next(10, 10).await;
    assert_eq!(got.len(), 1, "the limit is smaller than any event: one at a time");
    while got.len() < 6 {
        let batch = next(10, 10_000).await;
        let bytes: usize = batch.iter().map(|d| d.event.payload.len()).sum();
        assert!(bytes <= 10_000, "asked for 10000 bytes, got {bytes}");
        got.extend(batch);
    }
    while got.len() < 12 {
        let batch = next(2, 1 << 20).await;
        assert!(batch.len() <= 2, "asked for 2, got {}", batch.len());
        got.extend(batch);
    }
    assert_eq!(seqs(&got), all);
    // The same holds for what is given back.
    relay.settle(&got, &Verdict::Released).await;
    let again = next(10, 10_000).await;
    let bytes: usize = again.iter().map(|d| d.event.payload.len()).sum();
    assert!(bytes <= 10_000, "asked for 10000 bytes again, got {bytes}");
    assert_eq!(seqs(&again), all[..again.len()]);
}

/// A payload beyond the limit becomes a reject that is parked as dead, and others go on.
pub async fn a_large_payload_is_rejected_unread(sut: &dyn LogUnderTest) {
    let large = event("big", 0).json_text(format!("\"{}\"", "x".repeat(5_000)));
    let all = published(&sut.publish(&[large, event("small", 1)]).await);
    let relay = open(sut, options(sut, Order::Key).reading(|read| read.max_payload = 2_000)).await;
    reject_one(sut, &relay, all[0], "big").await;
    reaches(sut, C, all[1]).await;
}

/// A row that cannot be an event does not stop its consumer: it is handed out as a reject and parked as it is.
pub async fn a_row_that_cannot_be_an_event_is_rejected_and_parked(sut: &dyn LogUnderTest) {
    let Some(bad) = sut.publish_bad("bad").await else {
        return cannot("a_row_that_cannot_be_an_event_is_rejected_and_parked", "publish_bad");
    };
    let good = published(&sut.publish(&[event("good", 1)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    reject_one(sut, &relay, bad, "bad").await;
    reaches(sut, C, good[0]).await;
    let shown = sut.admin().show_parked(C, bad).await.expect("show").expect("it is parked");
    assert!(shown.event.is_err(), "what it is in the way of is told: {:?}", shown.event);
    assert_eq!(shown.row.state, "dead");
}

async fn reject_one(sut: &dyn LogUnderTest, relay: &crate::sources::Hand, seq: i64, key: &str) {
    let (mut came, mut rejects) = (Vec::new(), Vec::new());
    while came.is_empty() || rejects.is_empty() {
        let batch = relay.some(10).await;
        came.extend(batch.deliveries);
        rejects.extend(batch.rejects);
    }
    assert_eq!((came.len(), rejects.len()), (1, 1), "one event, one reject");
    assert_eq!(rejects[0].key.as_deref(), Some(key), "a reject names its key");
    let verdict = Verdict::Dead { error: rejects[0].error.clone() };
    let settlement = Settlement { position: rejects[0].position, verdict };
    let settled = relay.source().settle(&[settlement]).await.expect("settle succeeds");
    assert_eq!(settled.applied, 1, "a reject is settled like an event");
    relay.settle(&came, &Verdict::Delivered).await;
    let parked = parked(sut).await;
    assert_eq!(parked.len(), 1, "{parked:?}");
    assert_eq!((parked[0].row.seq, parked[0].row.state.as_str()), (seq, "dead"));
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
}

/// A consumer of some streams sees no others, and its offset moves on over them.
pub async fn a_filtered_consumer_sees_its_streams_and_moves_on(sut: &dyn LogUnderTest) {
    if !sut.capabilities().streams {
        return cannot("a_filtered_consumer_sees_its_streams_and_moves_on", "streams");
    }
    let of = |stream: &str, n: usize| NewEvent { stream: stream.into(), ..event("k", n) };
    let all = published(&sut.publish(&[of("x", 0), of("y", 1), of("x", 2), of("z", 3), of("y", 4)]).await);
    let relay = open(sut, options(sut, Order::Key).reading(|read| read.streams = vec!["x".into()])).await;
    assert_eq!(seqs(&relay.deliver(2).await), [all[0], all[2]]);
    // Reading is by small looks: none of them may end it early.
    let more: Vec<NewEvent> = (5..40).map(|n| of("y", n)).chain([of("x", 40)]).collect();
    let more = published(&sut.publish(&more).await);
    let got = eventually_some(sut.capabilities().patience, "the one event", async || {
        let batch = relay.next(3).await.deliveries;
        (!batch.is_empty()).then_some(batch)
    })
    .await;
    assert_eq!(seqs(&got), more[35..]);
    relay.settle(&got, &Verdict::Delivered).await;
    let last = published(&sut.publish(&[of("z", 41)]).await)[0];
    eventually_some(sut.capabilities().patience, "the offset to pass what is not wanted", async || {
        assert!(relay.next(10).await.is_empty(), "z is not x's business");
        (offset(sut, C).await >= last).then_some(())
    })
    .await;
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
}

/// Each consumer has an offset and parked events of its own.
pub async fn consumers_are_independent(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 6)).await);
    let named = |name: &str| LogOptions { consumer: name.into(), ..options(sut, Order::Key) };
    let (one, two) = (open(sut, named("one")).await, open(sut, named("two")).await);
    assert_eq!(seqs(&one.deliver(4).await), all[..4]);
    let held = two.collect(1).await;
    two.settle(&held, &dead()).await;
    assert_eq!(seqs(&two.deliver(5).await), all[1..]);
    reaches(sut, "one", all[3]).await;
    assert_eq!(offset(sut, "one").await, all[3]);
    reaches(sut, "two", all[5]).await;
    let (one_is, two_is) = (consumer(sut, "one").await, consumer(sut, "two").await);
    assert_eq!((one_is.dead, one_is.lag_events, one_is.end), (0, 2, all[5]));
    assert_eq!((two_is.dead, two_is.lag_events), (1, 0));
    assert_eq!(one_is.instances.len(), 1, "one relay works for it");
    assert_eq!(sut.admin().lag("two").await.expect("lag"), 0);
    assert!(sut.admin().lag("one").await.expect("lag") >= 2, "an upper bound");
    assert_eq!(seqs(&one.deliver(2).await), all[4..]);
}

/// A new consumer that is to begin at the end sees what is published from then on; one that is known already goes
/// on where it was.
pub async fn a_new_consumer_may_begin_at_the_end(sut: &dyn LogUnderTest) {
    sut.publish(&events("a", 3)).await;
    let latest = LogOptions { start: Start::Latest, ..options(sut, Order::Key) };
    let relay = open(sut, latest.clone()).await;
    let new = published(&sut.publish(&events("a", 2)).await);
    assert_eq!(seqs(&relay.collect(2).await), new, "and nothing older");
    relay.close().await;
    let relay = open(sut, latest).await;
    assert_eq!(seqs(&relay.deliver(2).await), new, "what it has not settled");
}

/// A number that was drawn by a transaction that is still open stops the reading; what it turns into decides.
pub async fn an_open_transaction_is_waited_for_and_nothing_is_skipped(sut: &dyn LogUnderTest) {
    let first = published(&sut.publish(&events("a", 1)).await);
    let Some(late) = sut.publish_open(&events("b", 2)).await else {
        return cannot("an_open_transaction_is_waited_for_and_nothing_is_skipped", "publish_open");
    };
    let behind = published(&sut.publish(&events("c", 2)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    assert_eq!(seqs(&relay.deliver(1).await), first);
    assert_still(sut, &relay, "behind an open hole").await;
    assert!(offset(sut, C).await < behind[0] - 2, "the offset stays before the hole");
    late.commit().await;
    let got = relay.deliver(4).await;
    let keys: Vec<&str> = got.iter().map(|d| d.event.aggregate_id.as_str()).collect();
    assert_eq!(keys, ["b", "b", "c", "c"], "the late ones first, by seq");
    let Some(never) = sut.publish_open(&events("d", 2)).await else {
        return cannot("an_open_transaction_is_waited_for_and_nothing_is_skipped", "publish_open");
    };
    let last = published(&sut.publish(&events("e", 1)).await);
    assert_still(sut, &relay, "behind an open hole").await;
    never.rollback().await;
    assert_eq!(seqs(&relay.deliver(1).await), last, "a dead hole is passed");
    reaches(sut, C, last[0]).await;
}

/// The backlog counts what waits, what is being delivered and what is parked, each once, and nothing that is
/// finished.
pub async fn what_is_left_is_counted(sut: &dyn LogUnderTest) {
    let relay = open(sut, options(sut, Order::Key)).await;
    let left = async || {
        let backlog = relay.source().backlog().await.expect("backlog");
        (backlog.unfinished, backlog.blocked)
    };
    assert_eq!(left().await, (0, 0));
    sut.publish(&[event("a", 0), event("b", 1), event("c", 2), event("d", 3), event("a", 4)]).await;
    assert_eq!(left().await, (5, 0));
    let held = relay.collect(4).await;
    assert_eq!(left().await, (5, 0), "what is being delivered is not finished");
    relay.settle(&held[..1], &Verdict::Delivered).await;
    assert_eq!(left().await, (4, 0));
    relay.settle(&held[2..3], &crate::sources::hand::retry(std::time::Duration::from_secs(60))).await;
    assert_eq!(left().await, (4, 0), "parked beyond the offset, and still one event");
    relay.settle(&held[3..], &dead()).await;
    assert_eq!(left().await, (3, 0), "dead is finished, for a relay");
    relay.settle(&held[1..2], &Verdict::Delivered).await;
    assert_eq!(left().await, (2, 0));
    relay.deliver(1).await;
    assert_eq!(left().await, (1, 0), "the one that is to be tried again");
}

/// A relay that drains delivers everything, what has to be tried again included, and ends.
pub async fn a_drain_delivers_everything_and_ends(sut: &dyn LogUnderTest) {
    let new: Vec<NewEvent> = (0..200).map(|n| event(&format!("k{}", n % 20), n)).collect();
    let all = published(&sut.publish(&new).await);
    let sink = MemorySink::new();
    let faulty = crate::faults::FaultySink::new(sink.clone()).rule(|delivery| {
        let fails = delivery.attempt == 1 && delivery.event.seq % 7 == 0;
        if fails { crate::faults::Fault::retryable() } else { crate::faults::Fault::None }
    });
    let quick = airtight_core::Backoff {
        base: std::time::Duration::from_millis(20),
        multiplier: 1.0,
        cap: std::time::Duration::from_millis(20),
        jitter: 0.0,
    };
    let policy = Policy { backoff: quick, batch_events: 50, ..Policy::default() };
    let relay = Relay::from_parts(sut.log(options(sut, Order::Key)), Arc::new(faulty)).policy(policy);
    let drained = tokio::time::timeout(sut.capabilities().patience, relay.drain(CancellationToken::new()));
    let summary = drained.await.expect("the drain ends").expect("the drain succeeds");
    assert_eq!(summary.delivered, 200);
    let mut came: Vec<i64> = sink.events().iter().map(|event| event.seq).collect();
    came.sort_unstable();
    assert_eq!(came, all, "each of them once");
    assert_eq!(offset(sut, C).await, all[199], "the offset is at the end");
    assert!(parked(sut).await.is_empty(), "nothing is left parked");
}
