//! What is delivered, in which order, and what is left behind.

use airtight_core::{CancellationToken, Capabilities, Code, Delivery, Error, Outcome, Relay, Sink};
use async_trait::async_trait;

use crate::support::{Fixture, Recorder, SOON, event, name, policy};
use airtight_testkit::wait::eventually;

#[tokio::test]
async fn what_commits_is_delivered_and_what_rolls_back_never_was() {
    let Some(f) = Fixture::create("commits").await else { return };
    f.publish("a", 1..4).await;
    let sink = Recorder::default();
    let relay = f.start(&sink);
    sink.has(3).await;
    f.publish("a", 4..6).await;
    let mut tx = f.pool.begin().await.unwrap();
    f.outbox.publish(&mut tx, &event("a", 99)).await.unwrap();
    tx.rollback().await.unwrap();
    f.publish("b", 1..3).await;
    sink.has(7).await;
    relay.stop().await;
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status = 'done'").await, 7);
    // In order per key; keys go side by side.
    let mut events = sink.events();
    events.sort_by_key(|event| event.aggregate_id.clone());
    let arrived: Vec<String> = events.iter().map(name).collect();
    assert_eq!(arrived, ["a:1", "a:2", "a:3", "a:4", "a:5", "b:1", "b:2"]);
    assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 7, 8]);
}

/// The same sink, but it wants rows.
struct WantsRows(Recorder);

#[async_trait]
impl Sink for WantsRows {
    fn capabilities(&self) -> Capabilities {
        Capabilities { wants_rows: true, ..self.0.capabilities() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        self.0.deliver(batch).await
    }
}

/// Nothing but the sink says so: there is no option that could differ from it.
#[tokio::test]
async fn events_carry_their_row_if_the_sink_wants_it() {
    let Some(f) = Fixture::create("rows").await else { return };
    f.publish("a", 1..3).await;
    let sink = Recorder::default();
    f.drain(&sink).await.unwrap();
    assert!(sink.count() == 2 && sink.events().iter().all(|event| event.row.is_none()));

    f.publish("a", 3..5).await;
    let sink = Recorder::default();
    let relay = Relay::new(f.outbox.cdc(f.options()).unwrap(), WantsRows(sink.clone())).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    assert!(sink.count() == 2 && sink.events().iter().all(|event| event.row.is_some()));
}

#[tokio::test]
async fn a_restart_goes_on_where_it_was_left() {
    let Some(f) = Fixture::create("restart").await else { return };
    f.publish("a", 1..3).await;
    let sink = Recorder::default();
    assert_eq!(f.drain(&sink).await.unwrap().delivered, 2);
    f.publish("a", 3..6).await;
    assert_eq!(f.drain(&sink).await.unwrap().delivered, 3);
    assert_eq!(f.drain(&sink).await.unwrap().delivered, 0);
    assert_eq!(sink.arrived(), ["a:1", "a:2", "a:3", "a:4", "a:5"]);
}

#[tokio::test]
async fn a_row_that_is_deleted_at_once_is_delivered_all_the_same() {
    let Some(f) = Fixture::create("quarkus").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.publish("first", 1..2).await;
    sink.has(1).await;
    let mut tx = f.pool.begin().await.unwrap();
    let published = f.outbox.publish(&mut tx, &event("gone", 1)).await.unwrap();
    sqlx::query("DELETE FROM airtight.outbox WHERE seq = $1")
        .bind(published.seq)
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    sink.has(2).await;
    relay.stop().await;
    assert_eq!(sink.arrived(), ["first:1", "gone:1"]);
}

#[tokio::test]
async fn what_fails_is_parked_and_holds_its_key_only() {
    let Some(f) = Fixture::create("parks").await else { return };
    let sink = Recorder::default();
    sink.fail("bad", || Error::retryable(Code::custom("down"), "not now"));
    let relay = f.start(&sink);
    f.publish("bad", 1..3).await;
    f.publish("good", 1..4).await;
    sink.has(3).await;
    assert_eq!(sink.arrived(), ["good:1", "good:2", "good:3"]);
    eventually(SOON, "the first to be given up on", async || {
        f.number("SELECT count(*) FROM airtight.parked WHERE state = 'dead'").await >= 1
    })
    .await;
    sink.mend();
    eventually(SOON, "the key to go on", async || {
        f.number("SELECT count(*) FROM airtight.parked WHERE state = 'waiting'").await == 0
    })
    .await;
    relay.stop().await;
    let dead = f.number("SELECT count(*) FROM airtight.parked").await;
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status = 'dead'").await, dead);
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status = 'done'").await, 5 - dead);
}

#[tokio::test]
async fn an_event_without_a_table_is_delivered_with_its_transaction() {
    let Some(f) = Fixture::create("emits").await else { return };
    let sink = Recorder::default();
    let mut tx = f.pool.begin().await.unwrap();
    let error = f.outbox.emit(&mut tx, &event("a", 1)).await.unwrap_err();
    assert!(error.message().contains("no replication slot"), "nobody would deliver it: {error}");
    drop(tx);
    assert_eq!(f.drain(&sink).await.unwrap().delivered, 0);

    let mut tx = f.pool.begin().await.unwrap();
    let id = f.outbox.emit(&mut tx, &event("a", 1).header("source", "test").max_attempts(7)).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = f.pool.begin().await.unwrap();
    f.outbox.emit(&mut tx, &event("a", 2)).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(
        f.outbox
            .emit(&mut f.pool.begin().await.unwrap(), &event("a", 3).bytes(vec![0]))
            .await
            .unwrap_err()
            .code(),
        "bad_event"
    );
    assert_eq!(f.drain(&sink).await.unwrap().delivered, 1);
    let events = sink.events();
    assert_eq!((events[0].id.as_str(), sink.arrived()), (id.to_string().as_str(), vec!["a:1".to_owned()]));
    assert_eq!(events[0].headers["source"], "test");
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox").await, 0);
}
