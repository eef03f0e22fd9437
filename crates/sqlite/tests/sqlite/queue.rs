//! Claims, leases, fences and membership.

use std::time::Duration;

use airtight_core::{
    Code, Error, Order, Verdict,
    group::{GroupKind, GroupName},
    queue::{QueueStore, RowClaim, RowKey},
};
use airtight_sqlite::SqliteQueue;
use uuid::Uuid;

use crate::common::{DUE, Fixture, Hand, dead, event, member, retry};

const EXPIRE: &str = "UPDATE airtight_outbox SET locked_until = '2000-01-01T00:00:00.000Z'";

#[tokio::test]
async fn verdicts_become_states() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b", "c", "d", "e"]).await;
    let mut relay = fixture.relay(Order::None).await;
    let got = relay.claim(10).await;
    assert_eq!(got.seqs(), [1, 2, 3, 4, 5]);
    assert!(got.claimed.rows.iter().all(|row| row.attempt == 1 && row.lost_leases == 0 && !row.waited));
    assert!(relay.claim(10).await.seqs().is_empty(), "claimed rows are nobody else's");

    let unknown = Verdict::Unknown { error: Error::retryable(Code::custom("lost"), "who knows") };
    for (index, verdict) in
        [Verdict::Delivered, retry(), dead(), unknown, Verdict::Released].into_iter().enumerate()
    {
        assert!(relay.settle_one(&got, index, verdict).await);
    }
    for (seq, status) in [(1, "done"), (2, "pending"), (3, "dead"), (4, "unknown"), (5, "pending")] {
        assert_eq!(fixture.status(seq).await, status);
    }
    assert_eq!(
        fixture.text("SELECT error_code || ':' || error_message FROM airtight_outbox WHERE seq = 2").await,
        "timeout:no answer"
    );
    assert_eq!(fixture.text("SELECT group_concat(attempts) FROM airtight_outbox").await, "1,1,1,1,0");
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox WHERE claim_token IS NOT NULL OR locked_until IS NOT NULL").await, "0");
    assert_eq!(
        fixture.text("SELECT group_concat(seq) FROM airtight_outbox WHERE finished_at IS NOT NULL").await,
        "1,3,4"
    );

    let again = relay.claim(10).await;
    assert_eq!(again.seqs(), [5], "a released event comes at once, a retry when it is due");
    assert_eq!(again.claimed.rows[0].attempt, 1);
    fixture.exec(DUE).await;
    let again = relay.claim(10).await;
    assert_eq!(
        (again.seqs(), again.claimed.rows[0].attempt, again.claimed.rows[0].waited),
        (vec![2], 2, true)
    );
}

#[tokio::test]
async fn a_settle_is_fenced_by_its_token() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b"]).await;
    let mut relay = fixture.relay(Order::None).await;
    let got = relay.claim(10).await;
    let stranger = RowClaim { key: RowKey::Int(1), token: Uuid::new_v4() };
    let mine = RowClaim { key: RowKey::Int(2), token: got.token };
    let verdict = Verdict::Delivered;
    let rows = [(stranger, &verdict), (mine.clone(), &verdict), (mine.clone(), &verdict)];
    assert_eq!(relay.store.settle(&relay.member, &rows).await.unwrap(), [false, true, false]);
    assert_eq!(fixture.status(1).await, "processing");
    assert_eq!(relay.store.settle(&relay.member, &rows[1..2]).await.unwrap(), [false], "done is done");
}

#[tokio::test]
async fn without_order_a_lease_that_ran_out_is_taken_over() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a"]).await;
    let mut first = fixture.relay(Order::None).await;
    let mut second = fixture.relay(Order::None).await;
    let lost = first.claim(10).await;
    assert!(second.claim(10).await.seqs().is_empty());
    fixture.exec(EXPIRE).await;
    let taken = second.claim(10).await;
    let row = &taken.claimed.rows[0];
    assert_eq!((row.attempt, row.lost_leases), (1, 1), "a lost lease costs no attempt");
    assert_eq!(first.settle(&lost, Verdict::Delivered).await, [false]);
    assert_eq!(second.settle(&taken, Verdict::Delivered).await, [true]);
}

#[tokio::test]
async fn heartbeats_renew_leases_and_tell_what_is_lost() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b"]).await;
    let mut relay = fixture.relay(Order::Key).await;
    let got = relay.claim(10).await;
    fixture.exec("UPDATE airtight_outbox SET locked_until = '2000', claim_token = CASE seq WHEN 1 THEN claim_token ELSE 'x' END").await;
    let rows: Vec<RowClaim> = [1, 2].map(|seq| RowClaim { key: RowKey::Int(seq), token: got.token }).to_vec();
    let pulse = relay.store.members().heartbeat(&relay.member, &rows).await.unwrap();
    assert!(pulse.alive);
    assert_eq!(pulse.members, [relay.member.id]);
    assert_eq!(pulse.owners.len(), 8);
    assert_eq!(pulse.lost, [RowKey::Int(2)]);
    assert_eq!(
        fixture.text("SELECT group_concat(seq) FROM airtight_outbox WHERE locked_until > '2001'").await,
        "1"
    );

    relay.store.members().leave(&relay.member).await.unwrap();
    let pulse = relay.store.members().heartbeat(&relay.member, &rows).await.unwrap();
    assert!(!pulse.alive && pulse.members.is_empty());
}

#[tokio::test]
async fn an_evicted_relay_claims_nothing_and_its_rows_are_taken_over_in_order() {
    for order in [Order::Key, Order::Total] {
        let fixture = Fixture::new().await;
        fixture.publish(&["a", "a", "a"]).await;
        let mut first = fixture.relay(order).await;
        let lost = first.claim(2).await;
        assert_eq!(lost.seqs(), [1, 2]);
        let mut second = fixture.relay(order).await;
        assert!(second.partitions.is_empty(), "all partitions belong to a live relay");

        fixture.exec("UPDATE airtight_relay SET expires_at = '2000' WHERE expires_at = (SELECT min(expires_at) FROM airtight_relay)").await;
        let wanted: Vec<u16> = (0..second.member.partitions).collect();
        second.partitions = second.store.members().take(&second.member, &wanted).await.unwrap();
        assert_eq!(second.partitions, wanted);
        assert_eq!(first.try_claim(10, false).await.err().unwrap().code(), "evicted");
        let taken = second.claim(10).await;
        assert_eq!(taken.seqs(), [1, 2, 3]);
        let lost_leases: Vec<u32> = taken.claimed.rows.iter().map(|row| row.lost_leases).collect();
        assert_eq!(lost_leases, [1, 1, 0]);
        assert!(taken.claimed.rows.iter().all(|row| row.attempt == 1));
        assert_eq!(first.settle(&lost, Verdict::Delivered).await, [false, false]);
        assert_eq!(second.settle(&taken, Verdict::Delivered).await, [true; 3]);
    }
}

#[tokio::test]
async fn a_relay_of_none_order_that_left_gets_the_evicted_error() {
    let fixture = Fixture::new().await;
    let mut relay = fixture.relay(Order::None).await;
    relay.store.members().leave(&relay.member).await.unwrap();
    assert_eq!(relay.try_claim(1, false).await.err().unwrap().code(), "evicted");
}

#[tokio::test]
async fn groups_must_not_share_streams() {
    let fixture = Fixture::new().await;
    let mut orders = member(Order::Key);
    (orders.streams, orders.group) = (vec!["orders".into()], GroupName::new(GroupKind::Queue, "key:orders"));
    let first = Hand::join(&fixture.outbox, orders.clone()).await;

    let store = SqliteQueue::new(fixture.outbox.clone());
    let error = store.members().join(&member(Order::None)).await.unwrap_err();
    assert_eq!(error.code(), "overlap");
    assert!(error.message().contains(&first.member.id.to_string()), "{error}");
    assert!(error.remedy().unwrap().contains("stop the other"), "{error}");
    let mut other = member(Order::None);
    other.streams = vec!["payments".into()];
    store.members().join(&other).await.unwrap();
    let mut same = orders.clone();
    same.id = Uuid::new_v4();
    store.members().join(&same).await.unwrap();

    fixture.exec("UPDATE airtight_relay SET expires_at = '2000'").await;
    store.members().join(&member(Order::None)).await.unwrap();
    assert!(
        !first.store.members().heartbeat(&first.member, &[]).await.unwrap().alive,
        "it must not come back beside it"
    );
}

#[tokio::test]
async fn partitions_are_given_and_taken() {
    let fixture = Fixture::new().await;
    let first = fixture.relay(Order::Key).await;
    let second = fixture.relay(Order::Key).await;
    assert_eq!(second.store.members().take(&second.member, &[0, 1]).await.unwrap(), Vec::<u16>::new());
    second.store.members().give(&second.member, &[0]).await.unwrap();
    first.store.members().give(&first.member, &[0, 1]).await.unwrap();
    assert_eq!(second.store.members().take(&second.member, &[0, 1, 2]).await.unwrap(), [0, 1]);
    assert_eq!(fixture.text("SELECT epoch FROM airtight_partition WHERE n = 0").await, "2");
    first.store.members().leave(&first.member).await.unwrap();
    let rest: Vec<u16> = (0..8).collect();
    assert_eq!(second.store.members().take(&second.member, &rest).await.unwrap(), [2, 3, 4, 5, 6, 7]);
}

#[tokio::test]
async fn an_event_that_lost_three_leases_is_delivered_alone() {
    for order in [Order::None, Order::Key, Order::Total] {
        let fixture = Fixture::new().await;
        fixture.publish(&["a", "b"]).await;
        for lost in 0..3 {
            let mut relay = fixture.relay(order).await;
            let got = relay.claim(1).await;
            assert_eq!(got.claimed.rows[0].lost_leases, lost, "{order:?}");
            fixture.exec(EXPIRE).await;
            relay.store.members().leave(&relay.member).await.unwrap();
        }
        let mut relay = fixture.relay(order).await;
        let got = relay.claim(10).await;
        assert!(got.claimed.suspects, "{order:?}");
        // Nothing passes it in total order; elsewhere the others go on.
        let expected: &[i64] = if order == Order::Total { &[] } else { &[2] };
        assert_eq!(got.seqs(), expected, "{order:?}");
        assert_eq!(fixture.status(1).await, "pending");
        relay.settle(&got, Verdict::Delivered).await;
        let again = relay.claim(10).await;
        assert!(again.claimed.suspects && again.seqs().is_empty(), "{order:?}: it is left alone");

        let alone = relay.claim_alone().await;
        assert_eq!(alone.seqs(), [1]);
        let row = &alone.claimed.rows[0];
        assert_eq!((row.attempt, row.lost_leases), (1, 3), "{order:?}");
        assert!(relay.claim_alone().await.seqs().is_empty());
        assert_eq!(relay.settle(&alone, retry()).await, [true]);
        assert_eq!(fixture.text("SELECT lost_leases FROM airtight_outbox WHERE seq = 1").await, "0");
    }
}

#[tokio::test]
async fn suspects_keep_the_order_of_their_key() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "a", "b"]).await;
    fixture.exec("UPDATE airtight_outbox SET lost_leases = 3 WHERE seq IN (1, 2)").await;
    let mut relay = fixture.relay(Order::Key).await;
    let got = relay.claim(10).await;
    assert_eq!((got.seqs(), got.claimed.suspects), (vec![3], true));
    relay.settle(&got, Verdict::Delivered).await;
    let first = relay.claim_alone().await;
    assert_eq!(first.seqs(), [1]);
    assert!(!relay.claim(10).await.claimed.suspects, "the other one stands behind it");
    relay.settle(&first, Verdict::Delivered).await;
    relay.unhold().await;
    assert!(relay.claim(10).await.claimed.suspects);
    assert_eq!(relay.claim_alone().await.seqs(), [2]);
}

#[tokio::test]
async fn nothing_of_its_key_passes_a_suspect() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "a", "b"]).await;
    let mut first = fixture.relay(Order::Key).await;
    assert_eq!(first.claim(1).await.seqs(), [1]);
    fixture.exec("UPDATE airtight_outbox SET lost_leases = 2 WHERE seq = 1").await;
    first.store.members().leave(&first.member).await.unwrap();
    let mut second = fixture.relay(Order::Key).await;
    let got = second.claim(10).await;
    assert_eq!((got.seqs(), got.claimed.suspects), (vec![3], true));
    second.settle(&got, Verdict::Delivered).await;
    assert!(second.claim(10).await.seqs().is_empty());
    let alone = second.claim_alone().await;
    assert_eq!(alone.seqs(), [1]);
    second.settle(&alone, Verdict::Delivered).await;
    second.unhold().await;
    assert_eq!(second.claim(10).await.seqs(), [2]);
}

#[tokio::test]
async fn claims_are_bounded_in_events_and_bytes() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b", "c", "d"]).await;
    let mut relay = fixture.relay(Order::None).await;
    assert_eq!(relay.claim(1).await.seqs(), [1]);
    // {"key":"b"} has 11 bytes.
    relay.bytes = 25;
    assert_eq!(relay.claim(10).await.seqs(), [2, 3]);
    relay.bytes = 1;
    assert_eq!(relay.claim(10).await.seqs(), [4], "always at least one");
}

#[tokio::test]
async fn a_row_that_is_no_event_does_not_stop_the_others() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a", "b", "c", "d", "e"]).await;
    fixture.exec("UPDATE airtight_outbox SET op = 'explode' WHERE seq = 1").await;
    fixture.exec("UPDATE airtight_outbox SET headers = '[1]' WHERE seq = 2").await;
    fixture.exec("UPDATE airtight_outbox SET occurred_at = 'yesterday' WHERE seq = 3").await;
    fixture.exec("UPDATE airtight_outbox SET payload = json_quote(hex(zeroblob(500))) WHERE seq = 4").await;
    let mut relay = fixture.relay(Order::Key).await;
    relay.max_payload = 100;
    let got = relay.claim(10).await;
    let codes: Vec<String> = got
        .claimed
        .rows
        .iter()
        .map(|row| row.event.as_ref().map_or_else(|bad| bad.error.code().to_owned(), |_| "ok".into()))
        .collect();
    assert_eq!(codes, ["bad_op", "bad_headers", "bad_row", "too_large", "ok"]);
    let bad = got.claimed.rows[0].event.as_ref().unwrap_err();
    assert_eq!(bad.key.as_deref(), Some("a"));
    assert_eq!(Uuid::parse_str(&bad.id).unwrap().get_version_num(), 7);
    assert_eq!(relay.settle(&got, dead()).await, [true; 5]);
}

#[tokio::test]
async fn streams_are_claimed_apart() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a"]).await;
    fixture.exec("UPDATE airtight_outbox SET stream = 'it''s'").await;
    fixture.publish(&["b"]).await;
    for (streams, expected) in
        [(vec!["it's"], vec![1]), (vec!["shop.orders", "x"], vec![2]), (vec!["x"], vec![])]
    {
        let mut member = member(Order::Key);
        member.streams = streams.iter().map(|stream| (*stream).to_owned()).collect();
        member.group = GroupName::new(GroupKind::Queue, &format!("{streams:?}"));
        let mut relay = Hand::join(&fixture.outbox, member).await;
        assert_eq!(relay.store.backlog(&relay.member).await.unwrap().unfinished, expected.len() as u64);
        let got = relay.claim(10).await;
        assert_eq!(got.seqs(), expected);
        relay.settle(&got, Verdict::Released).await;
        relay.store.members().leave(&relay.member).await.unwrap();
    }
}

#[tokio::test]
async fn a_relay_wakes_up_for_a_commit_of_another_connection() {
    let fixture = Fixture::new().await;
    let relay = fixture.relay(Order::Key).await;
    let forever = Duration::from_secs(3600);
    let soon = Duration::from_secs(10);
    // The first wait returns at once: nobody has looked before it.
    tokio::time::timeout(soon, relay.store.wait(forever)).await.unwrap();
    for other in [fixture.outbox.clone(), fixture.second().await] {
        let waits = relay.store.wait(forever);
        let publishes = async {
            let mut tx = other.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
            other.publish(&mut tx, &event("a")).await.unwrap();
            tx.commit().await.unwrap();
        };
        tokio::time::timeout(soon, async { tokio::join!(waits, publishes) }).await.unwrap();
    }
    // Nothing more happened, so the time is up first.
    relay.store.wait(Duration::from_millis(1)).await;
}
