//! Transactions that commit late, one trap at a time: scripted interleavings of a few connections. Many writers hide what
//! is tested here, so there are few.

use crate::*;

#[tokio::test]
async fn an_event_that_commits_far_behind_the_cursor_is_delivered_once() {
    let Some(sut) = Canonical::create("q_late").await else { return };
    let (mut one, mut two) = (Writer::new(&sut).await, Writer::new(&sut).await);
    let relay = reader(&sut).await;
    one.run("BEGIN").await;
    let late = one.insert("late").await;
    for _ in 0..3 {
        for n in 0..100 {
            two.insert(&format!("k{}", n % 7)).await;
        }
        assert_eq!(relay.deliver(100).await.len(), 100);
    }
    assert!(relay.next(10).await.is_empty());
    one.run("COMMIT").await;
    assert_eq!(seqs(&relay.deliver(1).await), [late]);
    nothing_comes(&relay).await;
}

#[tokio::test]
async fn what_rolls_back_is_never_delivered() {
    let Some(sut) = Canonical::create("q_rollback").await else { return };
    let (mut one, mut two) = (Writer::new(&sut).await, Writer::new(&sut).await);
    let relay = reader(&sut).await;
    one.run("BEGIN").await;
    one.insert("a").await;
    let other = two.insert("b").await;
    assert_eq!(seqs(&relay.deliver(1).await), [other]);
    one.run("ROLLBACK").await;
    nothing_comes(&relay).await;
}

/// PREPARE takes the process away, and on older servers the name.
#[tokio::test]
async fn a_transaction_that_is_prepared_after_it_was_noted_is_found() {
    let Some(sut) = Canonical::create("q_prepare").await else { return };
    let (mut one, mut two) = (Writer::new(&sut).await, Writer::new(&sut).await);
    let relay = reader(&sut).await;
    one.run("BEGIN").await;
    let late = one.insert("a").await;
    two.insert("b").await;
    relay.deliver(1).await;
    let gid = sut.db.name().to_owned();
    one.run(&format!("PREPARE TRANSACTION '{gid}'")).await;
    // The session goes on with something else, and holds the sequence again.
    one.run("BEGIN").await;
    one.insert("c").await;
    two.insert("d").await;
    relay.deliver(1).await;
    one.run("COMMIT").await;
    relay.deliver(1).await;
    nothing_comes(&relay).await;
    two.run(&format!("COMMIT PREPARED '{gid}'")).await;
    assert_eq!(seqs(&relay.deliver(1).await), [late]);
    nothing_comes(&relay).await;
}

#[tokio::test]
async fn a_transaction_that_was_prepared_before_the_relay_started_is_found() {
    let Some(sut) = Canonical::create("q_prepared_before").await else { return };
    let (mut one, mut two) = (Writer::new(&sut).await, Writer::new(&sut).await);
    let gid = sut.db.name().to_owned();
    one.run("BEGIN").await;
    let late = one.insert("a").await;
    one.run(&format!("PREPARE TRANSACTION '{gid}'")).await;
    two.insert("b").await;
    let relay = reader(&sut).await;
    relay.deliver(1).await;
    two.insert("b").await;
    relay.deliver(1).await;
    two.run(&format!("COMMIT PREPARED '{gid}'")).await;
    assert_eq!(seqs(&relay.deliver(1).await), [late]);
}

/// Before its INSERT such a transaction has no lock on any table.
#[tokio::test]
async fn a_value_that_is_drawn_ahead_of_the_insert_is_found() {
    let Some(sut) = Canonical::create("q_ahead").await else { return };
    let (mut one, mut two) = (Writer::new(&sut).await, Writer::new(&sut).await);
    let relay = reader(&sut).await;
    one.run("BEGIN").await;
    let drawn = one.number("SELECT nextval(pg_get_serial_sequence('airtight.outbox', 'seq'))").await;
    for _ in 0..3 {
        two.insert("b").await;
        relay.deliver(1).await;
    }
    one.insert_at(&drawn.to_string(), "a").await;
    two.insert("b").await;
    relay.deliver(1).await;
    one.run("COMMIT").await;
    assert_eq!(seqs(&relay.deliver(1).await), [drawn]);
    nothing_comes(&relay).await;
}

/// A look sees the second transaction of the session, under another name, and the first is gone.
#[tokio::test]
async fn a_session_that_ends_and_begins_anew_between_two_looks_is_two_publishers() {
    let Some(sut) = Canonical::create("q_anew").await else { return };
    let (mut one, mut two) = (Writer::new(&sut).await, Writer::new(&sut).await);
    let relay = reader(&sut).await;
    one.run("BEGIN").await;
    let first = one.insert("a").await;
    two.insert("b").await;
    relay.deliver(1).await;
    one.run("COMMIT; BEGIN").await;
    let second = one.insert("a").await;
    two.insert("b").await;
    let got = relay.deliver(2).await;
    assert!(seqs(&got).contains(&first), "{:?}", seqs(&got));
    one.run("COMMIT").await;
    assert_eq!(seqs(&relay.deliver(1).await), [second]);
    nothing_comes(&relay).await;
}

/// The successor in a key draws after the first has committed, so it must never come before it.
#[tokio::test]
async fn the_successor_of_an_open_publisher_comes_after_it() {
    let Some(sut) = Canonical::create("q_successor").await else { return };
    let (mut one, mut two) = (Writer::new(&sut).await, Writer::new(&sut).await);
    let relay = reader(&sut).await;
    for round in 0..20 {
        one.run("BEGIN").await;
        let first = one.insert("k").await;
        two.insert("other").await;
        // With and without a look in between.
        if round % 2 == 0 {
            relay.deliver(1).await;
        }
        one.run("COMMIT").await;
        let second = two.insert("k").await;
        let left = if round % 2 == 0 { 2 } else { 3 };
        let got = relay.deliver(left).await;
        let of_key: Vec<i64> =
            got.iter().filter(|d| d.event.aggregate_id == "k").map(|d| d.event.seq).collect();
        assert_eq!(of_key, [first, second], "round {round}");
    }
}

/// What is given back comes again, and before what is behind it in its key.
#[tokio::test]
async fn what_is_given_back_comes_again_in_order() {
    let Some(sut) = Canonical::create("q_back").await else { return };
    let published = sut.publish(&(0..10).map(|_| event("k")).collect::<Vec<_>>()).await;
    let relay = reader(&sut).await;
    let held = relay.collect(6).await;
    relay.settle(&held[..2], &Verdict::Delivered).await;
    relay.settle(&held[2..], &Verdict::Released).await;
    let rest = relay.deliver(8).await;
    let expected: Vec<&str> = published[2..].iter().map(|p| p.id.as_str()).collect();
    assert_eq!(rest.iter().map(|d| d.event.id.as_str()).collect::<Vec<_>>(), expected);
    assert!(rest.iter().all(|d| d.attempt == 1 && d.lost_leases == 0), "at no cost");
    nothing_comes(&relay).await;
}

/// Reading writes nothing into the table, and a delivered event is written once.
#[tokio::test]
async fn a_delivered_event_is_one_update_and_without_done_rows_one_delete() {
    let Some(sut) = Canonical::create("q_writes").await else { return };
    let events: Vec<NewEvent> = (0..50).map(|n| event(&format!("k{n}"))).collect();
    sut.publish(&events).await;
    let relay = reader(&sut).await;
    let held = relay.collect(50).await;
    let mut sql = Writer::new(&sut).await;
    let touched = "SELECT count(*) FROM airtight.outbox WHERE xmax::text <> '0' OR claim_token IS NOT NULL OR attempts > 0";
    assert_eq!(sql.number(touched).await, 0, "rows in flight are as they were written");
    relay.settle(&held, &Verdict::Delivered).await;
    assert_eq!(
        sql.number("SELECT count(*) FROM airtight.outbox WHERE status = 'done' AND attempts = 1").await,
        50
    );
    relay.close().await;

    sut.publish(&events).await;
    let deleting = QueueOptions { keep_done: false, ..QueueOptions::default() };
    let relay = Hand::open(&sut, deleting).await;
    relay.deliver(50).await;
    assert_eq!(sql.number("SELECT count(*) FROM airtight.outbox").await, 50, "those of before");
}

/// Without order, slots are shared as well.
#[tokio::test]
async fn relays_without_order_share_the_slots() {
    let Some(sut) = Canonical::create("q_none").await else { return };
    let options =
        QueueOptions { order: Order::None, lease: Duration::from_secs(2), ..QueueOptions::default() };
    let (one, two) = (Hand::open(&sut, options.clone()).await, Hand::open(&sut, options).await);
    let mut sql = Writer::new(&sut).await;
    let owners = "SELECT count(DISTINCT owner) FROM airtight.partition WHERE owner IS NOT NULL";
    eventually(Duration::from_secs(20), "both to own slots", async || {
        let number: i64 = sqlx::query_scalar(owners).fetch_one(sut.outbox.pool()).await.unwrap();
        number == 2
    })
    .await;
    sut.publish(&(0..200).map(|n| event(&format!("k{n}"))).collect::<Vec<_>>()).await;
    let (mut left, mut right) = (0, 0);
    eventually(Duration::from_secs(20), "everything to be delivered", async || {
        for (relay, count) in [(&one, &mut left), (&two, &mut right)] {
            let batch = relay.next(50).await;
            relay.settle(&batch.deliveries, &Verdict::Delivered).await;
            *count += batch.deliveries.len();
        }
        left + right == 200
    })
    .await;
    assert!(left > 0 && right > 0, "{left} and {right}");
    assert_eq!(sql.number("SELECT count(*) FROM airtight.outbox WHERE status = 'done'").await, 200);
}
