//! Handlers that commit their writes, the inbox's entry and the offset in one transaction.

use airtight_core::{
    CancellationToken, Code, Error, Policy, Relay,
    admin::Admin,
    log::{LogAdmin, LogOptions, ParkedFilter, SeekOptions, SeekTo},
};
use airtight_postgres::PgHandlers;
use futures::FutureExt;

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
