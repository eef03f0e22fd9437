//! Checks of what is handed out at all: commits, fields, limits, order, streams, backlog.

use airtight_core::{Limits, NewEvent, Op, Order, Payload, Verdict, queue::QueueOptions};

use super::{
    SourceUnderTest,
    hand::{Hand, assert_key_order, event, events, ids, long},
};
use crate::{ledger::cannot, wait::eventually_some};

/// What was committed comes; what was rolled back never existed, though it may have drawn numbers.
pub async fn committed_is_handed_out_and_rolled_back_never(sut: &dyn SourceUnderTest) {
    let first = sut.publish(&events("a", 2)).await;
    sut.publish_rolled_back(&events("a", 3)).await;
    let last = sut.publish(&events("b", 1)).await;

    let relay = Hand::open(sut, long(Order::Key)).await;
    let mut got: Vec<String> = relay.deliver(3).await.into_iter().map(|d| d.event.id).collect();
    let mut committed: Vec<String> = first.into_iter().chain(last).map(|p| p.id).collect();
    got.sort();
    committed.sort();
    assert_eq!(got, committed, "exactly what was committed is handed out");
    assert!(relay.next(10).await.is_empty(), "delivered events do not come again");
}

/// Every field arrives as it was published.
pub async fn events_arrive_as_published(sut: &dyn SourceUnderTest) {
    let json = NewEvent::new("s", "OrderPlaced", "Order", "Ωrder-1")
        .json_text(r#"{"total": 12.50, "items": ["a", "ü"]}"#)
        .header("traceId", "abc")
        .header("tenant", "7");
    let delete = NewEvent::new("s", "OrderGone", "Order", "Ωrder-1").delete();
    let raw = NewEvent::new("s", "Scanned", "Image", "i-1").bytes(vec![0, 159, 146, 150]);
    let bytes = sut.capabilities().bytes;
    let published = sut.publish(&[json.clone(), delete.clone()]).await;
    if bytes {
        sut.publish(std::slice::from_ref(&raw)).await;
    }

    let relay = Hand::open(sut, long(Order::Key)).await;
    let got = relay.deliver(if bytes { 3 } else { 2 }).await;
    let find = |kind: &str| {
        let found = got.iter().find(|delivery| delivery.event.event_type == kind);
        found.unwrap_or_else(|| panic!("the event of type {kind} is handed out")).event.clone()
    };
    let placed = find("OrderPlaced");
    assert_eq!(placed.id, published[0].id);
    assert_eq!(placed.seq, published[0].seq, "the seq that publishing returned");
    assert_eq!(placed.aggregate_type, "Order");
    assert_eq!(placed.aggregate_id, json.aggregate_id);
    assert_eq!(placed.headers, json.headers);
    let sent: serde_json::Value = serde_json::from_slice(json.payload.as_bytes()).expect("valid JSON");
    let came: serde_json::Value =
        serde_json::from_slice(placed.payload.as_bytes()).expect("still valid JSON");
    assert_eq!(came, sent, "the payload means the same");
    if sut.capabilities().envelope_fields {
        assert_eq!(placed.stream, "s");
        assert_eq!(find("OrderGone").op, Op::Delete);
    } else {
        cannot("events_arrive_as_published", "envelope_fields, for a part of it");
    }
    if bytes {
        assert_eq!(find("Scanned").payload, Payload::Bytes(raw.payload.as_bytes().to_vec().into()));
    } else {
        cannot("events_arrive_as_published", "bytes, for a part of it");
    }
}

/// Publishing one id twice stores one event and says so.
pub async fn one_id_is_stored_once(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().unique_ids {
        return cannot("one_id_is_stored_once", "unique_ids");
    }
    let id = uuid::Uuid::now_v7();
    let first = sut.publish(&[event("a", 0).id(id)]).await;
    let again = sut.publish(&[event("a", 1).id(id)]).await;
    assert!(first[0].is_new && !again[0].is_new, "the second publish says that nothing was stored");
    assert_eq!(again[0].id, first[0].id);

    let relay = Hand::open(sut, long(Order::Key)).await;
    let got = relay.deliver(1).await;
    let stored: serde_json::Value = serde_json::from_slice(got[0].event.payload.as_bytes()).expect("JSON");
    assert_eq!(stored, serde_json::json!({"n": 0}), "the first one stays");
    assert!(relay.next(10).await.is_empty(), "one id is one event");
}

/// No batch is larger than asked for, and all events come.
pub async fn the_limit_in_events_holds(sut: &dyn SourceUnderTest) {
    for key in ["a", "b", "c"] {
        sut.publish(&events(key, 4)).await;
    }
    let relay = Hand::open(sut, long(Order::Key)).await;
    let mut got = Vec::new();
    while got.len() < 12 {
        let batch = relay.some(5).await;
        assert!(batch.deliveries.len() <= 5, "asked for 5, got {}", batch.deliveries.len());
        relay.settle(&batch.deliveries, &Verdict::Delivered).await;
        got.extend(batch.deliveries);
    }
    assert_key_order(&got);
    assert!(relay.next(5).await.is_empty());
}

/// Payloads stay within the limit in bytes, though one event always fits, and what did not fit comes later, in
/// order and at no cost.
pub async fn the_limit_in_bytes_holds_but_one_event_always_fits(sut: &dyn SourceUnderTest) {
    let body = |n: usize| format!("{{\"n\":{n},\"pad\":\"{}\"}}", "x".repeat(3_000));
    let new: Vec<NewEvent> = (0..9).map(|n| event("a", n).json_text(body(n))).collect();
    sut.publish(&new).await;
    let relay = Hand::open(sut, long(Order::Key)).await;

    let first = eventually_some(sut.capabilities().patience, "one event", async || {
        let batch = relay.next_within(Limits { events: 10, bytes: 10 }).await;
        (!batch.is_empty()).then_some(batch)
    })
    .await;
    assert_eq!(first.deliveries.len(), 1, "the limit is smaller than any event: one at a time");
    relay.settle(&first.deliveries, &Verdict::Delivered).await;

    let mut got = first.deliveries;
    while got.len() < 9 {
        let batch = relay.next_within(Limits { events: 10, bytes: 10_000 }).await;
        let bytes: usize = batch.deliveries.iter().map(|delivery| delivery.event.payload.len()).sum();
        assert!(bytes <= 10_000, "asked for 10000 bytes, got {bytes}");
        relay.settle(&batch.deliveries, &Verdict::Delivered).await;
        got.extend(batch.deliveries);
    }
    assert_key_order(&got);
    for delivery in &got {
        assert_eq!(delivery.attempt, 1, "not fitting in costs no attempt");
        assert_eq!(delivery.lost_leases, 0, "not fitting in is no lost lease");
    }
}

/// Events of a key leave in order, whether what came before is settled or still held.
pub async fn a_key_stays_in_order_across_calls(sut: &dyn SourceUnderTest) {
    let mut new = Vec::new();
    for n in 0..10 {
        for key in ["a", "b", "c", "d"] {
            new.push(event(key, n));
        }
    }
    sut.publish(&new).await;
    let relay = Hand::open(sut, long(Order::Key)).await;
    let held = relay.collect(15).await;
    relay.settle(&held[..7], &Verdict::Delivered).await;
    let mut all = held.clone();
    all.extend(relay.collect(25).await);
    assert_key_order(&all);
    if sut.capabilities().seq_order {
        assert!(all.is_sorted_by_key(|d| d.event.seq), "one relay reads in the order of seq");
    } else {
        cannot("a_key_stays_in_order_across_calls", "seq_order, for a part of it");
    }
    let settled = relay.settle(&all[7..], &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (33, 0));
    assert!(relay.next(10).await.is_empty());
}

/// A payload beyond the limit becomes a reject that can be settled as dead, and others go on.
pub async fn a_payload_beyond_the_limit_is_rejected_unread(sut: &dyn SourceUnderTest) {
    let large = event("big", 0).json_text(format!("\"{}\"", "x".repeat(5_000)));
    sut.publish(&[large, event("small", 1)]).await;
    let relay = Hand::open(sut, QueueOptions { max_payload: 2_000, ..long(Order::Key) }).await;
    let (mut events, mut rejects) = (Vec::new(), Vec::new());
    while events.len() + rejects.len() < 2 {
        let batch = relay.some(10).await;
        events.extend(batch.deliveries);
        rejects.extend(batch.rejects);
    }
    assert_eq!((events.len(), rejects.len()), (1, 1), "one event, one reject");
    assert_eq!(rejects[0].key.as_deref(), Some("big"), "a reject names its key");
    let verdict = Verdict::Dead { error: rejects[0].error.clone() };
    let settlement = airtight_core::Settlement { position: rejects[0].position, verdict };
    let settled = relay.source().settle(&[settlement]).await.expect("settle succeeds");
    assert_eq!(settled.applied, 1, "a reject is settled like an event");
    relay.settle(&events, &Verdict::Delivered).await;
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
}

/// A relay that was given streams sees no others.
pub async fn only_the_streams_asked_for_are_read(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().streams {
        return cannot("only_the_streams_asked_for_are_read", "streams");
    }
    let of = |stream: &str, n: usize| NewEvent { stream: stream.into(), ..event("k", n) };
    sut.publish(&[of("x", 0), of("y", 1), of("x", 2), of("z", 3)]).await;
    let on = |streams: &[&str]| QueueOptions {
        streams: streams.iter().map(|&s| s.to_owned()).collect(),
        ..long(Order::Key)
    };
    let x = Hand::open(sut, on(&["x"])).await;
    let yz = Hand::open(sut, on(&["y", "z"])).await;
    let (got_x, got_yz) = (x.deliver(2).await, yz.deliver(2).await);
    assert!(got_x.iter().all(|d| d.event.stream == "x"), "{:?}", ids(&got_x));
    assert!(got_yz.iter().all(|d| d.event.stream != "x"), "{:?}", ids(&got_yz));
    sut.publish(&[of("y", 4)]).await;
    assert!(x.next(10).await.is_empty(), "y is not x's business");
    assert_eq!(x.source().backlog().await.expect("backlog").unfinished, 0);
    assert_eq!(yz.source().backlog().await.expect("backlog").unfinished, 1);
    yz.deliver(1).await;
}

/// The backlog counts what waits and what is being delivered, and nothing that is finished.
pub async fn the_backlog_counts_what_is_left(sut: &dyn SourceUnderTest) {
    let relay = Hand::open(sut, long(Order::Key)).await;
    let left = async || relay.source().backlog().await.expect("backlog").unfinished;
    assert_eq!(left().await, 0);
    sut.publish(&events("a", 3)).await;
    sut.publish(&events("b", 2)).await;
    assert_eq!(left().await, 5);
    let held = relay.collect(2).await;
    assert_eq!(left().await, 5, "what is being delivered is not finished");
    relay.settle(&held[..1], &Verdict::Delivered).await;
    relay.settle(&held[1..], &Verdict::Released).await;
    assert_eq!(left().await, 4);
    relay.deliver(4).await;
    assert_eq!(left().await, 0);
}
