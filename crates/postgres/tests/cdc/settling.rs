//! What is stored about events when the writes themselves fail.

use std::time::{Duration, Instant};

use airtight_core::{Code, Error};
use airtight_testkit::wait::eventually;

use crate::support::{Fixture, Recorder, Running, SOON, event};

/// Refuses what the switch is on for, as a database in trouble would.
const TROUBLE: &str = "CREATE TABLE trouble (what text); CREATE SEQUENCE refusals; \
    CREATE FUNCTION refuse_parking() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
      IF EXISTS (SELECT FROM trouble) THEN PERFORM nextval('refusals'); RAISE EXCEPTION 'not now' USING ERRCODE = '40001'; END IF; \
      RETURN new; END $$; \
    CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON airtight.parked FOR EACH ROW EXECUTE FUNCTION refuse_parking()";

impl Fixture {
    /// Waits for some refusals. What was delivered is written down several times meanwhile.
    async fn refusals(&self) {
        let refused = "SELECT last_value FROM refusals";
        eventually(SOON, "some refusals", async || self.number(refused).await > 4).await;
    }

    /// A relay that has delivered `good:1` to `good:3`, and has tried in vain to park `bad:1`, which is between them.
    async fn cannot_park(&self) -> (Running, Recorder) {
        self.sql(TROUBLE).await;
        let sink = Recorder::default();
        sink.fail("bad", || Error::permanent(Code::custom("never"), "not this one"));
        let relay = self.start(&sink);
        self.publish("good", 1..2).await;
        sink.has(1).await;
        self.sql("INSERT INTO trouble VALUES ('parking')").await;
        self.publish("bad", 1..2).await;
        self.publish("good", 2..4).await;
        sink.has(3).await;
        self.refusals().await;
        (relay, sink)
    }
}

#[tokio::test]
async fn what_could_not_be_parked_is_not_passed_over() {
    let Some(f) = Fixture::create("unparked").await else { return };
    let (relay, sink) = f.cannot_park().await;
    f.sql("DELETE FROM trouble").await;
    eventually(SOON, "it to be parked", async || {
        f.number("SELECT count(*) FROM airtight.parked WHERE state = 'dead'").await == 1
    })
    .await;
    f.publish("good", 4..5).await;
    sink.has(4).await;
    relay.stop().await;
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status = 'dead'").await, 1);
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox WHERE status = 'done'").await, 4);
}

#[tokio::test]
async fn what_could_not_be_parked_comes_again_after_a_kill() {
    let Some(f) = Fixture::create("unparked_kill").await else { return };
    let (relay, sink) = f.cannot_park().await;
    relay.kill().await;
    f.sql("DELETE FROM trouble").await;
    sink.mend();
    f.drain(&sink).await.unwrap();
    assert!(sink.arrived().contains(&"bad:1".to_owned()), "{:?}", sink.arrived());
}

#[tokio::test]
async fn a_person_who_changes_something_does_not_stop_the_reader() {
    let Some(f) = Fixture::create("revision").await else { return };
    let sink = Recorder::default();
    let relay = f.start(&sink);
    f.publish("a", 0..1).await;
    sink.has(1).await;
    for round in 0..4 {
        f.sql("UPDATE airtight.consumer SET revision = revision + 1").await;
        // For longer than it takes to be heard of.
        let (mut n, end) = (round * 1000 + 1, Instant::now() + Duration::from_millis(800));
        while Instant::now() < end {
            f.publish("a", n..n + 1).await;
            n += 1;
        }
        let last = format!("a:{}", n - 1);
        eventually(SOON, "the last of them", async || sink.arrived().contains(&last)).await;
    }
    relay.stop().await;
    let mut arrived = sink.arrived();
    arrived.sort();
    let all = arrived.len();
    arrived.dedup();
    assert_eq!(arrived.len(), all, "nothing had to be repeated");
}

#[tokio::test]
async fn a_limit_of_attempts_of_its_own_counts_for_a_parked_event() {
    let Some(f) = Fixture::create("own_limit").await else { return };
    let sink = Recorder::default();
    sink.fail("bad", || Error::retryable(Code::custom("down"), "not now"));
    let relay = f.start(&sink);
    let mut limited = event("bad", 1);
    limited.max_attempts = Some(2);
    airtight_core::admin::Admin::publish(&f.outbox, &[limited]).await.unwrap();
    eventually(SOON, "it to be given up on", async || {
        f.number("SELECT count(*) FROM airtight.parked WHERE state = 'dead'").await == 1
    })
    .await;
    relay.stop().await;
    assert_eq!(f.number("SELECT attempts::bigint FROM airtight.parked").await, 2);
}

#[tokio::test]
async fn the_lost_answer_of_a_write_costs_repeats_at_most() {
    let Some(f) = Fixture::create("lost_answer").await else { return };
    let sink = Recorder::default();
    sink.fail("bad", || Error::retryable(Code::custom("down"), "not now"));
    let relay = f.start(&sink);
    // All connections but the ones of this test are cut, again and again: some of them between the commit and
    // its answer.
    for round in 0..60 {
        f.publish("a", round * 5..round * 5 + 5).await;
        f.publish("bad", round..round + 1).await;
        f.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() \
             AND query LIKE '%moved AS (UPDATE%' AND pid <> pg_backend_pid()",
        )
        .await;
    }
    sink.mend();
    eventually(Duration::from_secs(60), "everything", async || {
        let arrived = sink.arrived();
        (0..300).all(|n| arrived.contains(&format!("a:{n}")))
    })
    .await;
    eventually(Duration::from_secs(60), "the rest", async || {
        f.number("SELECT count(*) FROM airtight.outbox WHERE status NOT IN ('done', 'dead')").await == 0
    })
    .await;
    relay.stop().await;
    let dead = f.number("SELECT count(*) FROM airtight.parked WHERE state = 'dead'").await;
    let bad = sink.events().into_iter().filter(|event| event.aggregate_id == "bad").map(|event| event.seq);
    let bad: std::collections::BTreeSet<i64> = bad.collect();
    assert!(i64::try_from(bad.len()).unwrap() + dead >= 60, "{} delivered, {dead} dead", bad.len());
}
