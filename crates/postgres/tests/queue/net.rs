//! Rows that no cursor leads to, because somebody wrote them directly in SQL: the net finds them, or the start refuses.

use airtight_core::{Capabilities, Source};

use crate::*;

#[tokio::test]
async fn an_explicit_seq_is_delivered_below_and_far_above_the_sequence() {
    let Some(sut) = Canonical::create("q_explicit").await else { return };
    let mut sql = Writer::new(&sut).await;
    let relay = reader(&sut).await;
    for _ in 0..10 {
        sql.insert("k").await;
    }
    sql.run("DELETE FROM airtight.outbox WHERE seq = 4").await;
    assert_eq!(relay.deliver(9).await.len(), 9);
    for seq in [4, -7, 1_000_000_000_000] {
        sql.insert_at(&seq.to_string(), "k").await;
        assert_eq!(seqs(&relay.deliver(1).await), [seq]);
    }
    let next = sql.insert("k").await;
    assert_eq!(seqs(&relay.deliver(1).await), [next], "the sequence goes on where it was");
    nothing_comes(&relay).await;
}

#[tokio::test]
async fn a_row_whose_key_changes_is_delivered_once_more_under_the_new_key() {
    let Some(sut) = Canonical::create("q_key").await else { return };
    let mut sql = Writer::new(&sut).await;
    let relay = reader(&sut).await;
    let seq = sql.insert("old").await;
    sql.insert("other").await;
    let held = relay.collect(2).await;
    sql.run(&format!("UPDATE airtight.outbox SET aggregate_id = 'new' WHERE seq = {seq}")).await;
    let again = relay.some(10).await.deliveries;
    assert_eq!((seqs(&again), again[0].event.aggregate_id.as_str()), (vec![seq], "new"));
    let settled = relay.settle(&held, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (1, 1), "the hand-out of the old version is void");
    assert_eq!(relay.settle(&again, &Verdict::Delivered).await.applied, 1);
    nothing_comes(&relay).await;
}

#[tokio::test]
async fn many_rows_that_are_set_back_by_hand_come_again_in_order() {
    let Some(sut) = Canonical::create("q_set_back").await else { return };
    sut.publish(&(0..300).map(|n| event(&format!("k{}", n % 3))).collect::<Vec<_>>()).await;
    let relay = reader(&sut).await;
    relay.deliver(300).await;
    let mut sql = Writer::new(&sut).await;
    sql.run("UPDATE airtight.outbox SET status = 'pending' WHERE seq > 100").await;
    let again = relay.deliver(200).await;
    for key in ["k0", "k1", "k2"] {
        let of_key: Vec<i64> =
            again.iter().filter(|d| d.event.aggregate_id == key).map(|d| d.event.seq).collect();
        assert!(of_key.is_sorted(), "{key}: {of_key:?}");
    }
    nothing_comes(&relay).await;
}

/// With a cache, values are not drawn in order, and a look would say nothing.
#[tokio::test]
async fn a_sequence_with_a_cache_is_refused_with_the_statement_that_repairs_it() {
    let Some(sut) = Canonical::create("q_cache").await else { return };
    let mut sql = Writer::new(&sut).await;
    sql.run("ALTER TABLE airtight.outbox ALTER COLUMN seq SET CACHE 20").await;
    let queue = sut.outbox.queue(QueueOptions::default());
    let error = queue.open(&Capabilities::default()).await.unwrap_err();
    assert_eq!(error.code(), "bad_sequence", "{error}");
    sql.run(error.remedy().unwrap()).await;
    queue.open(&Capabilities::default()).await.unwrap();
    queue.close().await.unwrap();
}

/// What is in flight is told by the relays' marks, since nothing is written into the rows.
#[tokio::test]
async fn events_in_flight_are_shown_and_not_discarded() {
    use airtight_core::{
        admin::{Acted, Admin, Filter},
        state::State,
    };
    let Some(sut) = Canonical::create("q_shown").await else { return };
    let published = sut.publish(&[event("a"), event("b"), event("c")]).await;
    let relay =
        Hand::open(&sut, QueueOptions { lease: Duration::from_secs(2), ..QueueOptions::default() }).await;
    let held = relay.collect(3).await;
    let processing = Filter { states: vec![State::Processing], ..Filter::default() };
    assert_eq!(sut.outbox.list(&processing).await.unwrap().len(), 3);
    assert_eq!(sut.outbox.discard(&published[0].id).await.unwrap(), Acted::Refused(State::Processing));
    let status = sut.outbox.status().await.unwrap();
    assert_eq!((status.streams[0].processing, status.streams[0].pending), (3, 0));
    relay.settle(&held, &Verdict::Released).await;
    // A heartbeat says that nothing is in flight any more.
    eventually(Duration::from_secs(10), "the marks to be renewed", async || {
        sut.outbox.list(&processing).await.unwrap().is_empty()
    })
    .await;
    assert_eq!(sut.outbox.discard(&published[0].id).await.unwrap(), Acted::Yes);
    assert_eq!(relay.deliver(2).await.len(), 2);
}

/// The settle waits for the row that an operator changes, and must not write over the change.
#[tokio::test]
async fn a_settle_that_waited_for_an_operators_change_is_fenced() {
    let Some(sut) = Canonical::create("q_wait").await else { return };
    let mut operator = Writer::new(&sut).await;
    let relay = reader(&sut).await;
    let seq = operator.insert("a").await;
    operator.insert("b").await;
    let held = relay.collect(2).await;
    operator.run("BEGIN").await;
    operator
        .run(&format!("UPDATE airtight.outbox SET payload = '{{\"changed\": true}}' WHERE seq = {seq}"))
        .await;
    let settle = relay.settle(&held, &Verdict::Delivered);
    let change = async {
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'";
        eventually(Duration::from_secs(10), "the settle to wait", async || {
            let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(sut.outbox.pool()).await.unwrap();
            waiting > 0
        })
        .await;
        operator.run("COMMIT").await;
    };
    let (settled, ()) = futures::join!(settle, change);
    assert_eq!((settled.applied, settled.fenced), (1, 1), "the changed row is another version");
    let again = relay.deliver(1).await;
    assert_eq!(seqs(&again), [seq]);
    assert_eq!(again[0].event.payload.as_bytes(), b"{\"changed\": true}");
}
