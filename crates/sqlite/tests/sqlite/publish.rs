//! Publishing belongs to the caller's transaction.

use airtight_core::{NewEvent, Op, Order, Payload, admin::Admin};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::common::{Fixture, event};

#[tokio::test]
async fn an_event_commits_and_rolls_back_with_the_callers_transaction() {
    let fixture = Fixture::new().await;
    fixture.exec("CREATE TABLE orders (id TEXT)").await;
    for commit in [true, false] {
        let mut tx = fixture.outbox.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query("INSERT INTO orders VALUES ('o')").execute(&mut *tx).await.unwrap();
        assert!(fixture.outbox.publish(&mut tx, &event("o")).await.unwrap().is_new);
        if commit { tx.commit().await.unwrap() } else { tx.rollback().await.unwrap() }
    }
    assert_eq!(fixture.text("SELECT count(*) FROM orders").await, "1");
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox").await, "1");
}

#[tokio::test]
async fn an_id_is_stored_once_and_the_repeat_says_so() {
    let fixture = Fixture::new().await;
    let id = Uuid::now_v7();
    let mut conn = fixture.outbox.pool().acquire().await.unwrap();
    let first = fixture.outbox.publish(&mut conn, &event("a").id(id)).await.unwrap();
    let again =
        fixture.outbox.publish_many(&mut conn, &[event("b"), event("a").id(id), event("c")]).await.unwrap();
    assert!(first.is_new && again[0].is_new && again[2].is_new);
    assert!(!again[1].is_new);
    assert_eq!((again[1].seq, again[1].id.as_str()), (first.seq, id.to_string().as_str()));
    let twice = Uuid::now_v7();
    let both =
        fixture.outbox.publish_many(&mut conn, &[event("d").id(twice), event("d").id(twice)]).await.unwrap();
    assert_eq!((both[0].is_new, both[1].is_new), (true, false));
    assert_eq!(both[0].seq, both[1].seq);
}

#[tokio::test]
async fn a_refused_event_leaves_the_transaction_as_it_was() {
    let fixture = Fixture::new().await;
    let mut tx = fixture.outbox.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    fixture.outbox.publish(&mut tx, &event("a")).await.unwrap();
    let bad = [event("b"), NewEvent::new("s", "T", "A", "c").json_text("{oops")];
    assert_eq!(fixture.outbox.publish_many(&mut tx, &bad).await.unwrap_err().code(), "bad_payload");
    tx.commit().await.unwrap();
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox").await, "1");
}

#[tokio::test]
async fn many_events_keep_their_order_and_all_their_fields() {
    let fixture = Fixture::new().await;
    let at = OffsetDateTime::from_unix_timestamp_nanos(1_700_000_000_123_456_000).unwrap();
    let events: Vec<NewEvent> = (0..1_000)
        .map(|n| {
            let event =
                NewEvent::new("s", "T", "A", format!("k{n}")).occurred_at(at).header("n", n.to_string());
            match n % 3 {
                0 => event.json(&n).unwrap().max_attempts(3),
                1 => event.bytes(vec![0xff, 0, 1]).schema_version(7),
                _ => event.delete(),
            }
        })
        .collect();
    let published = Admin::publish(&fixture.outbox, &events).await.unwrap();
    assert!(published.windows(2).all(|pair| pair[0].seq < pair[1].seq));

    let mut relay = fixture.relay(Order::Key).await;
    let got = relay.claim(2_000).await;
    assert_eq!(got.claimed.rows.len(), 1_000);
    for (row, sent) in got.claimed.rows.iter().zip(&events) {
        let event = row.event.as_ref().unwrap();
        assert_eq!((&event.aggregate_id, &event.headers), (&sent.aggregate_id, &sent.headers));
        assert_eq!((&event.payload, event.op), (&sent.payload, sent.op));
        assert_eq!((event.occurred_at, event.schema_version), (at, sent.schema_version));
        assert_eq!(row.max_attempts, sent.max_attempts.map(i32::unsigned_abs));
    }
}

#[tokio::test]
async fn a_plain_insert_is_an_event_like_any_other() {
    let fixture = Fixture::new().await;
    for key in ["a", "b", "a"] {
        fixture
            .exec(&format!(
                "INSERT INTO airtight_outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
                 VALUES ('s', 'T', 'A', '{key}', '{{\"n\":1}}')"
            ))
            .await;
    }
    fixture.publish(&["a"]).await;
    let mut relay = fixture.relay(Order::Key).await;
    // Half of the partitions: the hash of a plain INSERT must put it where a publish would.
    let all = std::mem::take(&mut relay.partitions);
    let mut seen = Vec::new();
    for partition in all {
        relay.partitions = vec![partition];
        let got = relay.claim(10).await;
        assert!(got.claimed.rows.iter().all(|row| row.partition == partition));
        seen.push(got.seqs());
    }
    seen.retain(|seqs| !seqs.is_empty());
    seen.sort();
    assert_eq!(seen, [vec![1, 3, 4], vec![2]]);

    let detail = fixture.outbox.show("1").await.unwrap().unwrap();
    let event = detail.event.unwrap();
    assert_eq!(event.payload, Payload::Json("{\"n\":1}".into()));
    assert_eq!((event.op, event.schema_version), (Op::Upsert, 1));
    assert_eq!(Uuid::parse_str(&event.id).unwrap().get_version_num(), 4);
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox WHERE part IS NULL").await, "0");
}
