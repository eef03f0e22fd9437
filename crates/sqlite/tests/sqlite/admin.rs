//! What operators do and see.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use airtight_core::{
    Code, Error, Order, Verdict,
    admin::{Acted, Admin, Filter, Prune},
    queue::QueueStore,
    state::State,
};

use crate::common::{Fixture, Hand, dead, member, retry};

async fn one_of_each() -> (Fixture, Hand) {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b", "c", "d", "e", "f"]).await;
    let mut relay = fixture.relay(Order::Key).await;
    let got = relay.claim(5).await;
    let unknown = Verdict::Unknown { error: Error::retryable(Code::custom("lost"), "who knows") };
    for (index, verdict) in [Verdict::Delivered, retry(), dead(), unknown].into_iter().enumerate() {
        relay.settle_one(&got, index, verdict).await;
    }
    (fixture, relay)
}

#[tokio::test]
async fn status_counts_every_state() {
    let (fixture, relay) = one_of_each().await;
    let status = fixture.outbox.status().await.unwrap();
    assert_eq!(status.outbox, "airtight_outbox");
    let stream = &status.streams[0];
    assert_eq!(stream.stream, "shop.orders");
    let counts =
        [stream.done, stream.retrying, stream.dead, stream.unknown, stream.processing, stream.pending];
    assert_eq!(counts, [1; 6]);
    assert!(stream.oldest_pending_seconds.is_some_and(|age| (-1.0..60.0).contains(&age)));
    let there = &status.relays[0];
    assert_eq!(
        (there.id.clone(), there.partitions, there.order.as_str()),
        (relay.member.id.to_string(), 8, "key")
    );
    assert!(there.lease_seconds > 1.0 && there.lease_seconds <= 30.5);
}

#[tokio::test]
async fn lists_filter_and_page() {
    let (fixture, _relay) = one_of_each().await;
    let seqs = async |filter: Filter| -> Vec<i64> {
        fixture.outbox.list(&filter).await.unwrap().iter().map(|row| row.seq).collect()
    };
    assert_eq!(seqs(Filter::default()).await, [1, 2, 3, 4, 5, 6]);
    assert_eq!(seqs(Filter { newest_first: true, limit: 2, ..Filter::default() }).await, [6, 5]);
    assert_eq!(seqs(Filter { after_seq: Some(4), ..Filter::default() }).await, [5, 6]);
    assert_eq!(seqs(Filter { aggregate_id: Some("c".into()), ..Filter::default() }).await, [3]);
    assert_eq!(seqs(Filter { error_code: Some("bad".into()), ..Filter::default() }).await, [3]);
    assert_eq!(seqs(Filter { stream: Some("other".into()), ..Filter::default() }).await, Vec::<i64>::new());
    for (state, seq) in [
        (State::Done, vec![1]),
        (State::Dead, vec![3]),
        (State::Unknown, vec![4]),
        (State::Processing, vec![5]),
        (State::Pending, vec![2, 6]),
    ] {
        assert_eq!(seqs(Filter { states: vec![state], ..Filter::default() }).await, seq, "{state:?}");
    }
    let row =
        &fixture.outbox.list(&Filter { aggregate_id: Some("b".into()), ..Filter::default() }).await.unwrap()
            [0];
    assert_eq!((row.state.as_str(), row.attempts, row.held), ("pending", 1, false));
    assert!(row.next_retry_at.is_some() && row.created_at.is_some());
    assert_eq!(row.error_message.as_deref(), Some("no answer"));
}

#[tokio::test]
async fn one_event_is_retried_or_discarded_if_its_state_allows() {
    let (fixture, mut relay) = one_of_each().await;
    let outbox = &fixture.outbox;
    assert_eq!(outbox.retry("nobody").await.unwrap(), Acted::NotFound);
    assert_eq!(outbox.retry("1").await.unwrap(), Acted::Refused(State::Done));
    assert_eq!(outbox.retry("5").await.unwrap(), Acted::Refused(State::Processing));
    assert_eq!(outbox.discard("1").await.unwrap(), Acted::Refused(State::Done));
    assert_eq!(outbox.discard("5").await.unwrap(), Acted::Refused(State::Processing));
    let id = outbox.show("3").await.unwrap().unwrap().row.id;
    assert_eq!(outbox.retry(&id).await.unwrap(), Acted::Yes);
    assert_eq!(outbox.retry("2").await.unwrap(), Acted::Yes);
    assert_eq!(outbox.discard("4").await.unwrap(), Acted::Yes);
    assert!(outbox.show("4").await.unwrap().is_none());
    let got = relay.claim(10).await;
    assert_eq!(got.seqs(), [2, 3, 6]);
    assert!(got.claimed.rows.iter().all(|row| row.attempt == 1));
}

#[tokio::test]
async fn dead_events_are_retried_and_discarded_in_bulk_but_never_unknown_ones() {
    let fixture = Fixture::new().await;
    let keys: Vec<String> = (0..2_500).map(|n| format!("k{n}")).collect();
    fixture.publish(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    fixture.exec("UPDATE airtight_outbox SET status = 'dead', error_code = CASE WHEN seq % 2 THEN 'odd' ELSE 'even' END").await;
    fixture.exec("UPDATE airtight_outbox SET status = 'unknown' WHERE seq <= 10").await;
    let even = Filter { error_code: Some("even".into()), ..Filter::default() };
    assert_eq!(fixture.outbox.retry_dead(&even).await.unwrap(), 1_245);
    assert_eq!(fixture.outbox.discard_dead(&Filter { limit: 100, ..Filter::default() }).await.unwrap(), 100);
    assert_eq!(fixture.outbox.discard_dead(&Filter::default()).await.unwrap(), 1_145);
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox WHERE status = 'unknown'").await, "10");
    assert_eq!(
        fixture.text("SELECT count(*) FROM airtight_outbox WHERE status = 'pending' AND attempts = 0").await,
        "1245"
    );
}

#[tokio::test]
async fn prune_removes_old_done_events_only() {
    let fixture = Fixture::new().await;
    let keys = vec!["a"; 2_100];
    fixture.publish(&keys).await;
    fixture.exec("UPDATE airtight_outbox SET status = 'done', finished_at = '2000-01-01T00:00:00.000Z' WHERE seq <= 2050").await;
    fixture.exec("UPDATE airtight_outbox SET status = 'done', finished_at = strftime('%Y-%m-%dT%H:%M:%fZ','now') WHERE seq BETWEEN 2051 AND 2060").await;
    fixture.exec("UPDATE airtight_outbox SET status = 'dead', finished_at = '2000-01-01T00:00:00.000Z' WHERE seq = 2061").await;
    let seen = AtomicU64::new(0);
    let day = Prune::older_than(Duration::from_secs(24 * 3600));
    let pruned = fixture.outbox.prune(day, &|total| seen.store(total, Ordering::Relaxed)).await.unwrap();
    assert_eq!((pruned.events, seen.into_inner()), (2_050, 2_050));
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox").await, "50");
}

#[tokio::test]
async fn check_names_streams_that_nobody_reads() {
    let fixture = Fixture::new().await;
    assert!(fixture.outbox.check().await.unwrap().is_empty());
    fixture.publish(&["a"]).await;
    let findings = fixture.outbox.check().await.unwrap();
    assert!(!findings[0].fatal && findings[0].message.contains("shop.orders"));
    let mut other = member(Order::Key);
    other.streams = vec!["elsewhere".into()];
    let other = Hand::join(&fixture.outbox, other).await;
    assert_eq!(fixture.outbox.check().await.unwrap().len(), 1);
    other.store.members().leave(&other.member).await.unwrap();
    let _all = fixture.relay(Order::Key).await;
    assert!(fixture.outbox.check().await.unwrap().is_empty());
}
