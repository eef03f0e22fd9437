//! Order per key, order of all, and what a failing event holds back.

use airtight_core::{Order, Verdict, admin::Admin, queue::QueueStore};

use crate::common::{DUE, Fixture, Hand, dead, member, retry};

#[tokio::test]
async fn a_retrying_event_holds_its_key_and_no_other() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "a", "b", "a", "b"]).await;
    let mut relay = fixture.relay(Order::Key).await;
    let first = relay.claim(1).await;
    relay.settle(&first, retry()).await;

    let others = relay.claim(10).await;
    assert_eq!(others.seqs(), [3, 5]);
    relay.settle(&others, Verdict::Delivered).await;
    fixture.publish(&["a"]).await;
    assert!(relay.claim(10).await.seqs().is_empty());
    assert_eq!(
        fixture.text("SELECT group_concat(seq) FROM airtight_outbox WHERE next_retry_at > '9000'").await,
        "2,4,6"
    );
    assert_eq!(relay.unhold().await, 0, "its head still waits");

    let blocked = fixture.outbox.blocked(10).await.unwrap();
    assert_eq!(
        (blocked[0].aggregate_id.as_str(), blocked[0].behind_state.as_str(), blocked[0].held),
        ("a", "pending", 3)
    );

    fixture.exec(DUE).await;
    let head = relay.claim(10).await;
    assert_eq!((head.seqs(), head.claimed.rows[0].waited), (vec![1], true));
    assert_eq!(relay.unhold().await, 0, "its head is on its way, not there");
    fixture.publish(&["a"]).await;
    assert!(relay.claim(10).await.seqs().is_empty());
    relay.settle(&head, Verdict::Delivered).await;
    assert_eq!(relay.unhold().await, 4);
    assert_eq!(relay.claim(10).await.seqs(), [2, 4, 6, 7]);
    assert!(fixture.outbox.blocked(10).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_window_full_of_held_events_does_not_hide_what_is_behind() {
    let fixture = Fixture::new().await;
    let mut keys = vec!["a"; 500];
    keys.push("b");
    fixture.publish(&keys).await;
    let mut relay = fixture.relay(Order::Key).await;
    let head = relay.claim(1).await;
    relay.settle(&head, retry()).await;
    assert_eq!(relay.claim(20).await.seqs(), [501]);
    fixture.exec("UPDATE airtight_outbox SET status = 'done' WHERE seq = 1").await;
    assert_eq!(relay.unhold().await, 499);
    assert_eq!(relay.claim(1_000).await.seqs().len(), 499);
}

#[tokio::test]
async fn a_due_event_waits_for_earlier_ones_of_its_key() {
    let fixture = Fixture::new().await;
    fixture.publish(&["x", "y", "a", "a"]).await;
    // An operator set 3 back to pending by hand while 4 retries.
    fixture.exec("UPDATE airtight_outbox SET next_retry_at = '2000-01-01T00:00:00.000Z', attempts = 1 WHERE seq = 4").await;
    let mut relay = fixture.relay(Order::Key).await;
    assert_eq!(relay.claim(2).await.seqs(), [1, 2]);
    assert_eq!(relay.claim(2).await.seqs(), [3, 4]);
}

#[tokio::test]
async fn a_due_event_does_not_overtake_what_the_window_did_not_show() {
    let fixture = Fixture::new().await;
    let mut keys = vec!["x"; 501];
    keys.extend(["a", "a"]);
    fixture.publish(&keys).await;
    // The window is full of events that wait behind the first; of the two last, the later one is due.
    fixture.exec("UPDATE airtight_outbox SET next_retry_at = '2900-01-01T00:00:00.000Z' WHERE seq = 1").await;
    fixture
        .exec("UPDATE airtight_outbox SET next_retry_at = '2000-01-01T00:00:00.000Z' WHERE seq = 503")
        .await;
    let mut relay = fixture.relay(Order::Key).await;
    assert_eq!(relay.claim(10).await.seqs(), [502, 503]);
}

#[tokio::test]
async fn total_order_does_not_overtake_what_the_window_did_not_show() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b", "c", "d"]).await;
    fixture
        .exec("UPDATE airtight_outbox SET next_retry_at = '2000-01-01T00:00:00.000Z' WHERE seq IN (1, 2, 3)")
        .await;
    let mut relay = fixture.relay(Order::Total).await;
    // Room for two: one hot event and two of the three due ones are seen.
    assert_eq!(relay.claim(2).await.seqs(), [1, 2]);
    assert_eq!(relay.claim(2).await.seqs(), [3, 4]);
}

#[tokio::test]
async fn two_due_events_of_a_key_go_out_together_or_in_order() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "a", "a"]).await;
    fixture.exec("UPDATE airtight_outbox SET next_retry_at = '2000-01-0' || (4 - seq) || 'T00:00:00.000Z' WHERE seq < 3").await;
    let mut relay = fixture.relay(Order::Key).await;
    let got = relay.claim(1).await;
    assert!(got.seqs().is_empty() || got.seqs() == [1], "{:?}", got.seqs());
    let rest = relay.claim(10).await;
    let mut all = got.seqs();
    all.extend(rest.seqs());
    assert_eq!(all[0], 1);
    assert!(all.is_sorted());
}

#[tokio::test]
async fn a_key_goes_on_behind_a_dead_event_unless_told_to_block() {
    for block in [false, true] {
        let fixture = Fixture::new().await;
        fixture.publish(&["a", "a", "b"]).await;
        let mut member = member(Order::Key);
        member.block_on_dead = block;
        let mut relay = Hand::join(&fixture.outbox, member).await;
        let first = relay.claim(1).await;
        relay.settle(&first, dead()).await;
        let rest = relay.claim(10).await;
        if !block {
            assert_eq!(rest.seqs(), [2, 3]);
            continue;
        }
        assert_eq!(rest.seqs(), [3]);
        relay.settle(&rest, Verdict::Delivered).await;
        assert_eq!(relay.unhold().await, 0);
        let backlog = relay.store.backlog(&relay.member).await.unwrap();
        assert_eq!((backlog.unfinished, backlog.blocked), (1, 1));
        let blocked = fixture.outbox.blocked(10).await.unwrap();
        assert_eq!((blocked[0].behind_state.as_str(), blocked[0].held), ("dead", 1));

        // A person decides.
        fixture.outbox.retry("1").await.unwrap();
        assert_eq!(relay.unhold().await, 1);
        assert_eq!(relay.claim(10).await.seqs(), [1, 2]);
    }
}

#[tokio::test]
async fn total_order_stops_at_the_first_event_that_waits() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b", "c"]).await;
    let mut relay = fixture.relay(Order::Total).await;
    let got = relay.claim(2).await;
    assert_eq!(got.seqs(), [1, 2]);
    assert!(relay.settle_one(&got, 0, Verdict::Delivered).await);
    assert!(relay.settle_one(&got, 1, retry()).await);
    assert!(relay.claim(10).await.seqs().is_empty());
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox WHERE next_retry_at > '9000'").await, "0");
    fixture.exec(DUE).await;
    assert_eq!(relay.claim(10).await.seqs(), [2, 3]);
}

#[tokio::test]
async fn total_order_stops_at_a_dead_event_when_told_to() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b", "c"]).await;
    let mut member = member(Order::Total);
    member.block_on_dead = true;
    let mut relay = Hand::join(&fixture.outbox, member).await;
    let got = relay.claim(1).await;
    relay.settle(&got, dead()).await;
    assert!(relay.claim(10).await.seqs().is_empty());
    let backlog = relay.store.backlog(&relay.member).await.unwrap();
    assert_eq!((backlog.unfinished, backlog.blocked), (2, 2));
    fixture.outbox.discard("1").await.unwrap();
    assert_eq!(relay.claim(10).await.seqs(), [2, 3]);
}

#[tokio::test]
async fn what_key_order_held_back_is_free_for_an_order_that_holds_nothing() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "a"]).await;
    let mut relay = fixture.relay(Order::Key).await;
    let head = relay.claim(1).await;
    relay.settle(&head, retry()).await;
    assert!(relay.claim(10).await.seqs().is_empty());
    relay.store.members().leave(&relay.member).await.unwrap();
    let mut relay = fixture.relay(Order::None).await;
    assert_eq!(relay.claim(10).await.seqs(), [2]);
}

#[tokio::test]
async fn a_taken_over_event_behind_one_that_waits_is_held_too() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "a"]).await;
    let mut first = fixture.relay(Order::Key).await;
    let got = first.claim(10).await;
    first.settle_one(&got, 0, retry()).await;
    // It vanishes with the second event in its hands.
    first.store.members().leave(&first.member).await.unwrap();
    let mut second = fixture.relay(Order::Key).await;
    assert!(second.claim(10).await.seqs().is_empty());
    fixture.exec(DUE).await;
    let head = second.claim(10).await;
    assert_eq!(head.seqs(), [1]);
    second.settle(&head, Verdict::Delivered).await;
    assert_eq!(second.unhold().await, 1);
    let rest = second.claim(10).await;
    assert_eq!(
        (rest.seqs(), rest.claimed.rows[0].lost_leases, rest.claimed.rows[0].attempt),
        (vec![2], 1, 1)
    );
}
