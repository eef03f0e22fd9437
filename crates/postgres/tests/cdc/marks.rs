//! The status column of the table, and changes from one way of reading to another.

use airtight_core::{
    Code, Error, Relay,
    admin::{Admin, Filter},
    queue::QueueOptions,
};
use airtight_testkit::{sources::SourceUnderTest, wait::eventually};
use tokio_util::sync::CancellationToken;

use crate::{
    foreign::Foreign,
    support::{Fixture, Recorder, SOON, event, policy},
    writers::Writers,
};

const STATUS: &str = "SELECT coalesce(string_agg(status || ':' || n, ' ' ORDER BY status), '') FROM \
     (SELECT status, count(*) AS n FROM airtight.outbox GROUP BY status) s";

#[tokio::test]
async fn rows_are_marked_as_the_queue_would() {
    let Some(f) = Fixture::create("marks").await else { return };
    let sink = Recorder::default();
    sink.fail("dead", || Error::permanent(Code::custom("never"), "no such thing"));
    f.publish("dead", 1..2).await;
    f.publish("good", 1..3).await;
    f.drain(&sink).await.unwrap();
    f.publish("dead", 2..3).await;
    f.publish("good", 3..5).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(f.text(STATUS).await, "dead:2 done:4");
    let error = "SELECT min(error_code || ': ' || error_message) FROM airtight.outbox WHERE status = 'dead'";
    assert_eq!(f.text(error).await, "never: no such thing");
    let finished = "SELECT count(*) FROM airtight.outbox WHERE status = 'done' AND finished_at IS NULL";
    assert_eq!(f.number(finished).await, 0);
}

#[tokio::test]
async fn nothing_is_marked_where_it_is_not_wanted() {
    let Some(f) = Fixture::create("unmarked").await else { return };
    let sink = Recorder::default();
    f.publish("a", 1..3).await;
    f.sql("UPDATE airtight.outbox SET status = 'done', finished_at = now() WHERE seq = 1").await;
    let mut options = f.options();
    options.mark = false;
    f.drain_with(options.clone(), &sink).await.unwrap();
    f.publish("a", 3..5).await;
    f.drain_with(options, &sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:2", "a:3", "a:4"], "finished rows are not delivered all the same");
    assert_eq!(f.text(STATUS).await, "done:1 pending:3");
}

#[tokio::test]
async fn rows_that_are_finished_are_not_delivered() {
    let Some(f) = Fixture::create("finished").await else { return };
    let sink = Recorder::default();
    f.publish("a", 1..5).await;
    f.sql(
        "UPDATE airtight.outbox SET status = 'done', finished_at = now() WHERE seq = 1; \
         UPDATE airtight.outbox SET status = 'dead' WHERE seq = 2; \
         UPDATE airtight.outbox SET status = 'processing' WHERE seq = 3",
    )
    .await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:3", "a:4"]);
    let insert = "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload, status) VALUES \
        ('test.cdc', 'T', 'Thing', 'b', '{\"n\": 1}', 'done'), ('test.cdc', 'T', 'Thing', 'b', '{\"n\": 2}', 'dead'), \
        ('test.cdc', 'T', 'Thing', 'b', '{\"n\": 3}', 'pending')";
    f.sql(insert).await;
    f.drain(&sink).await.unwrap();
    assert_eq!(sink.arrived(), ["a:3", "a:4", "b:3"]);
}

#[tokio::test]
async fn a_table_with_words_of_its_own_gets_these() {
    let Some(foreign) = Foreign::create("cdc_words").await else { return };
    foreign.publish(&[event("a", 1), event("dead", 1)]).await;
    let Foreign { db, outbox } = foreign;
    let f = Fixture::of(db, outbox).await;
    let sink = Recorder::default();
    sink.fail("dead", || Error::permanent(Code::custom("never"), "no"));
    sink.fail("slow", || Error::retryable(Code::custom("later"), "not now"));
    f.drain(&sink).await.unwrap();
    f.sql(
        "INSERT INTO shop.\"Legacy Outbox\" (id, topic, kind, entity, entity_id, body) \
         SELECT gen_random_uuid(), 'test.cdc', 'K', 'E', key, '{\"n\":2}' FROM unnest(ARRAY['a', 'dead', 'slow']) AS key",
    )
    .await;
    let relay = f.start(&sink);
    sink.has(2).await;
    eventually(SOON, "one to be tried again", async || {
        f.number("SELECT count(*) FROM airtight.parked WHERE state = 'waiting' AND key = 'slow'").await == 1
    })
    .await;
    sink.mend();
    let states = "SELECT string_agg(entity_id || ' ' || state, ', ' ORDER BY entity_id, state) FROM shop.\"Legacy Outbox\"";
    eventually(SOON, "all words", async || {
        let found = f.text(states).await;
        found == "a SENT, a SENT, dead FAILED, dead FAILED, slow SENT"
            || found == "a SENT, a SENT, dead FAILED, dead FAILED, slow FAILED"
    })
    .await;
    relay.stop().await;
    assert_eq!(
        f.number("SELECT count(*) FROM shop.\"Legacy Outbox\" WHERE state = 'SENT' AND sent IS NULL").await,
        0
    );
    // What the table has no column for is remembered beside it.
    let dead = Filter { aggregate_id: Some("dead".into()), ..Filter::default() };
    for row in f.outbox.list(&dead).await.unwrap() {
        assert_eq!((row.error_code.as_deref(), row.error_message.as_deref()), (Some("never"), Some("no")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn from_the_queue_to_the_wal_and_back_with_writers_at_work() {
    let Some(f) = Fixture::create("there_and_back").await else { return };
    let sink = Recorder::default();
    let writers = Writers::start(&f, 4);
    for round in 0..4 {
        let more = sink.count() + 500;
        if round % 2 == 0 {
            let stop = CancellationToken::new();
            let options =
                QueueOptions { lease: std::time::Duration::from_secs(2), ..QueueOptions::default() };
            let relay = Relay::new(f.outbox.queue(options), sink.clone()).policy(policy());
            let task = tokio::spawn(relay.run(stop.clone()));
            eventually(SOON, "the queue to deliver", async || sink.count() >= more).await;
            stop.cancel();
            task.await.unwrap().unwrap();
        } else {
            let relay = f.start(&sink);
            eventually(SOON, "cdc to deliver", async || sink.count() >= more).await;
            relay.stop().await;
        }
    }
    let committed = writers.stop().await;
    let relay = Relay::new(f.outbox.queue(QueueOptions::default()), sink.clone()).policy(policy());
    relay.drain(CancellationToken::new()).await.unwrap();
    let arrived: std::collections::HashSet<String> = sink.arrived().into_iter().collect();
    let missing: Vec<&String> = committed.iter().filter(|name| !arrived.contains(*name)).collect();
    assert!(missing.is_empty(), "{} of {} are missing: {missing:?}", missing.len(), committed.len());
    assert_eq!(f.text(STATUS).await, format!("done:{}", committed.len()), "no event is left unfinished");
    println!("{} events, {} deliveries", committed.len(), sink.count());
}
