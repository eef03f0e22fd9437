//! Handlers that commit their writes, the inbox's entry and the offset in one transaction, and whom their errors concern.

use airtight_core::{
    CancellationToken, Code, Error, Outcome, Policy, Relay, Sink,
    admin::Admin,
    log::{LogAdmin, LogOptions, ParkedFilter, SeekOptions, SeekTo},
};
use airtight_postgres::{PgHandlers, PgOptions, PgOutbox};
use futures::FutureExt;
use sqlx::PgConnection;

use crate::support::{Fixture, event};

#[derive(serde::Deserialize)]
struct Tested {
    n: i64,
}

async fn fixture(name: &str) -> Option<Fixture> {
    let f = Fixture::create(&format!("handlers_{name}")).await?;
    f.sql("CREATE TABLE public.parent (n bigint PRIMARY KEY); INSERT INTO public.parent SELECT generate_series(1, 100); \
           CREATE TABLE public.effect (n bigint REFERENCES public.parent DEFERRABLE INITIALLY DEFERRED)")
        .await;
    Some(f)
}

/// Writes each number down; refuses odd ones below `refuse_below`.
fn handlers(f: &Fixture, refuse_below: i64) -> PgHandlers {
    PgHandlers::new(&f.outbox, "c").on("Tested", move |tested: Tested, _context, tx| {
        async move {
            sqlx::query("INSERT INTO public.effect VALUES ($1)").bind(tested.n).execute(tx).await?;
            if tested.n < refuse_below && tested.n % 2 == 1 {
                return Err(Error::permanent(Code::custom("odd"), "will not have it").into());
            }
            Ok(())
        }
        .boxed()
    })
}

async fn drain(f: &Fixture, refuse_below: i64) -> airtight_core::relay::Summary {
    let log = f.outbox.log(LogOptions::consumer("c"));
    let sink = handlers(f, refuse_below).with_log(&log);
    Relay::new(log, sink).policy(Policy::default()).drain(CancellationToken::new()).await.unwrap()
}

#[tokio::test]
async fn a_failing_handler_leaves_nothing_behind_and_the_others_go_on() {
    let Some(f) = fixture("fails").await else { return };
    let events: Vec<_> = (1..=20).map(|n| event(&format!("k{n}"), n)).collect();
    Admin::publish(&f.outbox, &events).await.unwrap();
    let summary = drain(&f, 10).await;
    assert_eq!((summary.delivered, summary.dead), (15, 5));
    assert_eq!(f.number("SELECT count(*) FROM public.effect").await, 15, "what failed wrote nothing");
    assert_eq!(f.number("SELECT count(*) FROM airtight.inbox").await, 15, "and was not seen");
    assert_eq!(f.outbox.consumers().await.unwrap()[0].offset, 20);

    // Mended, and tried again.
    f.outbox
        .retry_parked(&ParkedFilter { consumer: Some("c".into()), ..ParkedFilter::default() })
        .await
        .unwrap();
    assert_eq!(drain(&f, 0).await.delivered, 5);
    assert_eq!(f.number("SELECT count(DISTINCT n) FROM public.effect").await, 20);
}

/// Only the commit finds it: it must not take the rest of the batch along.
#[tokio::test]
async fn a_constraint_that_is_checked_at_the_commit_kills_the_guilty_event_only() {
    let Some(f) = fixture("deferred").await else { return };
    let events: Vec<_> = [1, 2, 999, 4, 5].into_iter().map(|n| event(&format!("k{n}"), n)).collect();
    Admin::publish(&f.outbox, &events).await.unwrap();
    let summary = drain(&f, 0).await;
    assert_eq!((summary.delivered, summary.dead), (4, 1), "{summary:?}");
    assert_eq!(f.number("SELECT count(*) FROM public.effect").await, 4);
    let parked = f.outbox.parked(&ParkedFilter::default()).await.unwrap();
    assert_eq!((parked.len(), parked[0].row.seq), (1, 3));
}

/// A replay is a no-op for handlers, unless the inbox is told to forget.
#[tokio::test]
async fn a_replay_has_its_effect_again_only_if_the_inbox_forgets() {
    let Some(f) = fixture("replay").await else { return };
    let events: Vec<_> = (1..=10).map(|n| event("k", n)).collect();
    Admin::publish(&f.outbox, &events).await.unwrap();
    assert_eq!(drain(&f, 0).await.delivered, 10);
    let seek = f.outbox.seek("c", SeekTo::Seq(4), SeekOptions::default()).await.unwrap();
    assert_eq!((seek.again, seek.forgotten), (6, 0));
    assert_eq!(drain(&f, 0).await.delivered, 6);
    assert_eq!(f.number("SELECT count(*) FROM public.effect").await, 10, "seen before");
    let options = SeekOptions { forget_inbox: true, ..SeekOptions::default() };
    let seek = f.outbox.seek("c", SeekTo::Seq(4), options).await.unwrap();
    assert_eq!((seek.again, seek.forgotten), (6, 6));
    assert_eq!(drain(&f, 0).await.delivered, 6);
    assert_eq!(f.number("SELECT count(*) FROM public.effect").await, 16);
}

/// Without its table the inbox is away, and no event is dead for that.
#[tokio::test]
async fn an_inbox_that_is_away_costs_no_event() {
    let Some(f) = fixture("no_inbox").await else { return };
    f.publish("k", 1).await;
    f.sql("ALTER TABLE airtight.inbox RENAME TO inbox_away").await;
    let log = f.outbox.log(LogOptions::consumer("c"));
    let sink = handlers(&f, 0).with_log(&log);
    let relay = Relay::new(log, sink);
    let stats = relay.stats();
    let stop = CancellationToken::new();
    let running = tokio::spawn(relay.run(stop.clone()));
    airtight_testkit::wait::eventually(crate::support::SOON, "the circuit to open", async || {
        stats.summary().circuit_opened > 0
    })
    .await;
    f.sql("ALTER TABLE airtight.inbox_away RENAME TO inbox").await;
    airtight_testkit::wait::eventually(crate::support::SOON, "the event to be handled", async || {
        stats.summary().delivered == 1
    })
    .await;
    stop.cancel();
    let summary = running.await.unwrap().unwrap();
    assert_eq!((summary.dead, summary.retried), (0, 0));
}

type Work = for<'a> fn(&'a mut PgConnection, bool) -> futures::future::BoxFuture<'a, ()>;

/// Ten events of ten keys, the fourth of which breaks; returns outcomes.
async fn with_one_that_breaks(f: &Fixture, work: Work) -> Vec<Outcome> {
    for n in 1..=10 {
        f.publish(&format!("k{n}"), n).await;
    }
    let reader = f.reader("c").await;
    let handlers = PgHandlers::new(&f.outbox, "c").with_log(&reader.log).otherwise(move |context, tx| {
        async move {
            work(tx, context.event.aggregate_id == "k4").await;
            Ok(())
        }
        .boxed()
    });
    let batch = reader.look().await;
    assert_eq!(batch.len(), 10);
    handlers.deliver(&batch).await
}

fn assert_only_the_fourth_failed(outcomes: &[Outcome]) {
    for (n, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Outcome::Committed => assert_ne!(n, 3, "{outcomes:?}"),
            Outcome::Failed(_) => assert_eq!(n, 3, "{outcomes:?}"),
            other => panic!("{n}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_handler_that_swallows_an_error_takes_no_other_event_with_it() {
    let Some(f) = Fixture::create("swallows").await else { return };
    let outcomes = with_one_that_breaks(&f, |tx, breaks| {
        async move {
            if breaks {
                let _ = sqlx::query("SELECT 1 / 0").execute(tx).await;
            }
        }
        .boxed()
    })
    .await;
    assert_only_the_fourth_failed(&outcomes);
}

#[tokio::test]
async fn a_handler_that_panics_takes_no_other_event_with_it() {
    let Some(f) = Fixture::create("panics").await else { return };
    let outcomes = with_one_that_breaks(&f, |_, breaks| {
        async move {
            assert!(!breaks, "on purpose");
        }
        .boxed()
    })
    .await;
    assert_only_the_fourth_failed(&outcomes);
}

/// Such a constraint is checked at COMMIT, which is the whole batch's.
#[tokio::test]
async fn a_deferred_constraint_kills_only_the_event_that_violates_it() {
    let Some(f) = Fixture::create("deferred").await else { return };
    f.sql(
        "CREATE TABLE parent (id int PRIMARY KEY); \
         CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
    )
    .await;
    let outcomes = with_one_that_breaks(&f, |tx, breaks| {
        async move {
            if breaks {
                sqlx::query("INSERT INTO child VALUES (1)").execute(tx).await.unwrap();
            }
        }
        .boxed()
    })
    .await;
    assert_only_the_fourth_failed(&outcomes);
}

/// A database that is away is nobody's fault: §4.4 of the design, no attempt is spent.
#[tokio::test]
async fn handlers_without_a_database_blame_no_event() {
    let Some(f) = Fixture::create("away").await else { return };
    f.publish("k", 1).await;
    let reader = f.reader("c").await;
    let away =
        PgOutbox::connect("postgres://nobody@127.0.0.1:1/nowhere", PgOptions::default()).await.unwrap();
    let handlers = PgHandlers::new(&away, "c").otherwise(|_, _| async { Ok(()) }.boxed());
    let outcomes = handlers.deliver(&reader.look().await).await;
    assert!(
        matches!(&outcomes[..], [Outcome::Failed(error)] if error.class() == airtight_core::Class::Unavailable),
        "{outcomes:?}"
    );
}
