//! The inbox, and handlers that commit with the offset: the effect of an event is there exactly once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use airtight_core::{
    CancellationToken, Capabilities, Code, Delivery, Error, Limits, NewEvent, Outcome, Position, Relay,
    Result, Sink, Source,
    admin::Admin,
    inbox::DedupeKey,
    log::{Log, LogAdmin, LogOptions, SeekOptions, SeekTo},
    queue::QueueOptions,
};
use airtight_sqlite::{SqliteHandlers, SqliteLog, SqliteOutbox};
use airtight_testkit::wait::eventually;
use futures::FutureExt;
use serde::Deserialize;
use sqlx::SqliteConnection;

use crate::{common::Fixture, relay::policy};

const LONG: Duration = Duration::from_secs(60);
const LIMITS: Limits = Limits { events: 100, bytes: 1 << 20 };

#[derive(Deserialize)]
struct Added {
    n: i64,
}

fn added(key: &str, n: i64) -> NewEvent {
    NewEvent::new("counts", "Added", "Count", key).json(&serde_json::json!({"n": n})).unwrap()
}

async fn counter(fixture: &Fixture) -> i64 {
    fixture.text("SELECT n FROM counter").await.parse().unwrap()
}

async fn with_counter(shape_log: bool) -> Fixture {
    let fixture = if shape_log { Fixture::log().await } else { Fixture::new().await };
    fixture.exec("CREATE TABLE counter (n INTEGER NOT NULL); INSERT INTO counter VALUES (0)").await;
    fixture
}

async fn add(conn: &mut SqliteConnection, n: i64) -> Result<()> {
    let done = sqlx::query("UPDATE counter SET n = n + ?1").bind(n).execute(conn).await;
    done.map(|_| ()).map_err(|error| Error::retryable(Code::custom("counter"), error.to_string()))
}

/// Adds what events say, and fails for what is below zero, after it was added.
fn handlers(outbox: &SqliteOutbox) -> SqliteHandlers {
    SqliteHandlers::new(outbox, "sum").on::<Added, _>("Added", |added, _ctx, conn: &mut SqliteConnection| {
        async move {
            add(conn, added.n).await?;
            if added.n < 0 {
                return Err(Error::retryable(Code::custom("negative"), "below zero"));
            }
            Ok(())
        }
        .boxed()
    })
}

fn options() -> LogOptions {
    LogOptions::consumer("sum").reading(|read| read.lease = Duration::from_millis(600))
}

async fn opened(outbox: &SqliteOutbox) -> (Log<SqliteLog>, SqliteHandlers) {
    let log = outbox.log(options());
    log.open(&Capabilities::default()).await.unwrap();
    (log.clone(), handlers(outbox).with_log(&log))
}

fn words(outcomes: &[Outcome]) -> Vec<&str> {
    let word = |outcome: &Outcome| match outcome {
        Outcome::Delivered | Outcome::Duplicate => "delivered",
        Outcome::Committed => "committed",
        Outcome::Failed(_) => "failed",
        Outcome::Unknown(_) => "unknown",
        Outcome::Skipped => "skipped",
    };
    outcomes.iter().map(word).collect()
}

fn failure(outcome: &Outcome) -> &Error {
    match outcome {
        Outcome::Failed(error) => error,
        other => panic!("{other:?} is no failure"),
    }
}

#[tokio::test]
async fn an_event_is_new_once_per_consumer_and_transaction() {
    let fixture = Fixture::new().await;
    let inbox = fixture.outbox.inbox();
    let mut tx = fixture.outbox.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    assert!(inbox.first_time(&mut tx, "one", "k").await.unwrap());
    assert!(!inbox.first_time(&mut tx, "one", "k").await.unwrap());
    tx.rollback().await.unwrap();
    let mut tx = fixture.outbox.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    assert!(inbox.first_time(&mut tx, "one", "k").await.unwrap(), "rolled back, it was never seen");
    tx.commit().await.unwrap();
    let mut conn = fixture.outbox.pool().acquire().await.unwrap();
    assert!(!inbox.first_time_at(&mut conn, "one", "k", 7).await.unwrap());
    assert!(inbox.first_time_at(&mut conn, "two", "k", 7).await.unwrap());
    assert_eq!(fixture.text("SELECT group_concat(seq) FROM airtight_inbox").await, "7");
}

#[tokio::test]
async fn writes_inbox_and_offset_commit_together() {
    let fixture = with_counter(true).await;
    Admin::publish(&fixture.outbox, &[added("a", 1), added("b", 10)]).await.unwrap();
    let (log, handlers) = opened(&fixture.outbox).await;
    let batch = log.next(LIMITS).await.unwrap();
    assert_eq!(words(&handlers.deliver(&batch.deliveries).await), ["committed", "committed"]);
    assert_eq!(counter(&fixture).await, 11);
    assert_eq!(fixture.text("SELECT last_seq FROM airtight_offset").await, "2", "before anything is settled");
    assert_eq!(fixture.text("SELECT group_concat(seq) FROM airtight_inbox").await, "1,2");
    // The relay's own settle has nothing left to do, and knows it.
    let settlements: Vec<_> = batch
        .deliveries
        .iter()
        .map(|delivery| airtight_core::Settlement {
            position: delivery.position,
            verdict: airtight_core::Verdict::SettledInTransaction,
        })
        .collect();
    assert_eq!(log.settle(&settlements).await.unwrap().applied, 2);
    log.close().await.unwrap();
}

#[tokio::test]
async fn a_failing_event_takes_nothing_but_its_key_with_it() {
    let fixture = with_counter(true).await;
    let events = [added("a", 1), added("b", -5), added("b", 100), added("c", 10)];
    Admin::publish(&fixture.outbox, &events).await.unwrap();
    let (log, handlers) = opened(&fixture.outbox).await;
    let batch = log.next(LIMITS).await.unwrap();
    let outcomes = handlers.deliver(&batch.deliveries).await;
    assert_eq!(words(&outcomes), ["committed", "failed", "skipped", "committed"]);
    assert_eq!(failure(&outcomes[1]).code(), "negative");
    assert_eq!(counter(&fixture).await, 11, "what it had written is undone");
    assert_eq!(fixture.text("SELECT group_concat(seq) FROM airtight_inbox").await, "1,4");
    assert_eq!(fixture.text("SELECT last_seq FROM airtight_offset").await, "1", "a settled prefix only");
    log.close().await.unwrap();
}

#[tokio::test]
async fn what_was_committed_beyond_the_offset_is_known_to_the_inbox() {
    // As above, and the process is killed before the failed ones are parked: 4 comes again.
    let fixture = with_counter(true).await;
    let events = [added("a", 1), added("b", -5), added("c", 10)];
    Admin::publish(&fixture.outbox, &events).await.unwrap();
    let (log, first) = opened(&fixture.outbox).await;
    let batch = log.next(LIMITS).await.unwrap();
    first.deliver(&batch.deliveries).await;
    drop((log, first));
    fixture.exec("UPDATE airtight_relay SET expires_at = '2000-01-01T00:00:00.000Z'").await;
    let (log, second) = opened(&fixture.outbox).await;
    let again = log.next(LIMITS).await.unwrap();
    let seqs: Vec<i64> = again.deliveries.iter().map(|delivery| delivery.event.seq).collect();
    assert_eq!(seqs, [2, 3]);
    assert_eq!(words(&second.deliver(&again.deliveries).await), ["failed", "committed"]);
    assert_eq!(counter(&fixture).await, 11, "not added again");
    log.close().await.unwrap();
}

#[tokio::test]
async fn a_relay_that_lost_its_partition_commits_nothing() {
    let fixture = with_counter(true).await;
    Admin::publish(&fixture.outbox, &[added("a", 1), added("b", 10)]).await.unwrap();
    let (log, handlers) = opened(&fixture.outbox).await;
    let batch = log.next(LIMITS).await.unwrap();
    fixture.outbox.seek("sum", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
    let outcomes = handlers.deliver(&batch.deliveries).await;
    for outcome in &outcomes {
        assert_eq!(
            (failure(outcome).code(), failure(outcome).class()),
            ("fenced", airtight_core::Class::Retryable)
        );
    }
    assert_eq!(counter(&fixture).await, 0, "rolled back as a whole");
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_inbox").await, "0");
    // Somebody else's positions are refused as well.
    let foreign = [Delivery { position: Position(999), ..batch.deliveries[0].clone() }];
    assert_eq!(failure(&handlers.deliver(&foreign).await[0]).code(), "fenced");
    log.close().await.unwrap();
}

#[tokio::test]
async fn types_payloads_and_keys_are_checked() {
    let fixture = with_counter(false).await;
    let handlers = handlers(&fixture.outbox);
    let queue = fixture.outbox.queue(QueueOptions::default());
    queue.open(&Capabilities::default()).await.unwrap();
    let mut other = added("a", 1);
    other.event_type = "Other".into();
    let wrong = added("b", 1).json(&"no number").unwrap();
    Admin::publish(&fixture.outbox, &[other, wrong, added("c", 1)]).await.unwrap();
    let batch = queue.next(LIMITS).await.unwrap();
    let outcomes = handlers.deliver(&batch.deliveries).await;
    assert_eq!(
        words(&outcomes),
        ["failed", "failed", "delivered"],
        "from a queue it is for the relay to settle"
    );
    assert_eq!((failure(&outcomes[0]).code(), failure(&outcomes[1]).code()), ("no_handler", "bad_payload"));
    let again = handlers.clone().otherwise(|ctx, conn| {
        async move {
            assert_eq!(ctx.event.event_type, "Other");
            add(conn, 1000).await
        }
        .boxed()
    });
    assert_eq!(words(&again.deliver(&batch.deliveries[..1]).await), ["delivered"]);
    assert_eq!(counter(&fixture).await, 1001);
    let versioned = handlers.dedupe(DedupeKey::AggregateVersion("version".into()));
    assert_eq!(failure(&versioned.deliver(&batch.deliveries[2..]).await[0]).code(), "no_version");
    queue.close().await.unwrap();
}

#[tokio::test]
async fn replaying_counts_again_only_where_the_inbox_forgets() {
    let fixture = with_counter(true).await;
    Admin::publish(&fixture.outbox, &[added("a", 1), added("b", 10), added("c", 100)]).await.unwrap();
    let drain = async || {
        let log = fixture.outbox.log(options());
        let sink = handlers(&fixture.outbox).with_log(&log);
        Relay::new(log, sink).policy(policy()).drain(CancellationToken::new()).await.unwrap();
        counter(&fixture).await
    };
    assert_eq!(drain().await, 111);
    fixture.outbox.seek("sum", SeekTo::Seq(1), SeekOptions::default()).await.unwrap();
    assert_eq!(drain().await, 111);
    let forget = SeekOptions { forget_inbox: true, ..SeekOptions::default() };
    assert_eq!(fixture.outbox.seek("sum", SeekTo::Seq(1), forget).await.unwrap().forgotten, 2);
    assert_eq!(drain().await, 221);
}

/// Delivers, and is killed before it can say so: now and then, wherever that may be.
struct Dying {
    inner: SqliteHandlers,
    dice: Arc<AtomicU32>,
    dead: CancellationToken,
}

#[async_trait::async_trait]
impl Sink for Dying {
    fn capabilities(&self) -> airtight_core::Capabilities {
        self.inner.capabilities()
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        // Spread, so that it does not always meet the same batch.
        let roll = self.dice.fetch_add(1, Relaxed).wrapping_mul(0x9e37_79b1) >> 28;
        if roll == 3 {
            // Not even begun.
            self.dead.cancel();
            return std::future::pending().await;
        }
        let outcomes = self.inner.deliver(batch).await;
        if roll == 7 {
            // Committed, but nobody is told.
            self.dead.cancel();
            return std::future::pending().await;
        }
        outcomes
    }
}

/// With the offset in the transaction, and without: then the inbox alone makes up for it.
async fn count_through_crashes(with_log: bool) {
    let fixture = with_counter(true).await;
    let dice = Arc::new(AtomicU32::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let crashes = Arc::new(AtomicU32::new(0));
    let failing = Arc::new(AtomicU32::new(0));
    let path = fixture.path();
    let relay = {
        let (dice, done, crashes, failing) = (dice.clone(), done.clone(), crashes.clone(), failing.clone());
        tokio::spawn(async move {
            while !done.load(Relaxed) {
                // A new process, as far as the file can tell.
                let outbox = SqliteOutbox::open(&path).await.unwrap().detect().await.unwrap();
                let log = outbox.log(options().reading(|read| read.lease = Duration::from_millis(150)));
                let failing = failing.clone();
                let mut sink = SqliteHandlers::new(&outbox, "sum").on::<Added, _>(
                    "Added",
                    move |added, _, conn: &mut SqliteConnection| {
                        let failing = failing.clone();
                        async move {
                            add(conn, added.n).await?;
                            if failing.fetch_add(1, Relaxed) % 7 == 3 {
                                return Err(Error::retryable(Code::custom("dice"), "bad luck"));
                            }
                            Ok(())
                        }
                        .boxed()
                    },
                );
                if with_log {
                    sink = sink.with_log(&log);
                }
                let dead = CancellationToken::new();
                let dying = Dying { inner: sink, dice: dice.clone(), dead: dead.clone() };
                let relay = Relay::new(log, dying).policy(policy());
                tokio::select! {
                    ended = relay.run(CancellationToken::new()) => panic!("{ended:?}"),
                    () = dead.cancelled() => { crashes.fetch_add(1, Relaxed); }
                    () = async { while !done.load(Relaxed) { tokio::time::sleep(Duration::from_millis(5)).await; } } => {}
                }
            }
        })
    };
    let total = 200;
    // In small steps, so that there are many batches to be killed in.
    for n in 0..total / 5 {
        let events: Vec<_> = (0..5).map(|k| added(&format!("k{}", (n + k) % 13), 1)).collect();
        Admin::publish(&fixture.outbox, &events).await.unwrap();
        let behind = n * 5 - 20;
        eventually(LONG, "it to keep up", async || counter(&fixture).await >= behind).await;
    }
    eventually(LONG, "all events to be counted", async || counter(&fixture).await >= total).await;
    eventually(LONG, "everything to be settled", async || {
        let found = &fixture.outbox.consumers().await.unwrap()[0];
        found.offset == total && found.retrying == 0
    })
    .await;
    done.store(true, Relaxed);
    relay.await.unwrap();
    assert_eq!(counter(&fixture).await, total, "exactly once each");
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_inbox").await, total.to_string());
    assert!(crashes.load(Relaxed) >= 2, "it was killed {crashes:?} times");
    assert!(failing.load(Relaxed) > 200, "and handlers ran more often than there are events");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_counter_ends_at_the_number_of_events_through_crashes() {
    count_through_crashes(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_inbox_alone_makes_up_for_lost_settles() {
    count_through_crashes(false).await;
}

/// Only the commit finds a deferred constraint, and only one handler panics: neither takes another event along.
#[tokio::test]
async fn what_breaks_a_transaction_kills_the_guilty_event_only() {
    let fixture = with_counter(true).await;
    let tables = "CREATE TABLE parent (n INTEGER PRIMARY KEY); INSERT INTO parent VALUES (1), (2), (4), (5); \
                  CREATE TABLE child (n INTEGER REFERENCES parent (n) DEFERRABLE INITIALLY DEFERRED)";
    sqlx::raw_sql(tables).execute(fixture.outbox.pool()).await.unwrap();
    let events = [added("a", 1), added("b", 2), added("c", 3), added("d", 4), added("e", 5)];
    Admin::publish(&fixture.outbox, &events).await.unwrap();
    let log = fixture.outbox.log(options());
    let sink = SqliteHandlers::new(&fixture.outbox, "sum").with_log(&log).otherwise(|context, conn| {
        async move {
            assert!(context.event.aggregate_id != "e" || context.attempt > 1, "once");
            sqlx::query("INSERT INTO child VALUES (?1)")
                .bind(context.event.seq)
                .execute(conn)
                .await
                .map_err(|error| Error::permanent(Code::custom("sql"), error.to_string()))?;
            Ok(())
        }
        .boxed()
    });
    let summary = Relay::new(log, sink).policy(policy()).drain(CancellationToken::new()).await.unwrap();
    assert_eq!((summary.delivered, summary.dead, summary.retried), (4, 1, 1), "{summary:?}");
    let kept: i64 =
        sqlx::query_scalar("SELECT count(*) FROM child").fetch_one(fixture.outbox.pool()).await.unwrap();
    assert_eq!(kept, 4);
}
