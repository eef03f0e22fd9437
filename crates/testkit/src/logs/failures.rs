//! Checks of verdicts: retry, dead, unknown, what is held behind them, what operators answer, and halting.

use std::time::{Duration, Instant};

use airtight_core::{
    Code, Error, Limits, NewEvent, Order, Settlement, Verdict,
    log::{LogOptions, OnFailure, ParkedFilter, Retention},
};

use super::{
    C, LogUnderTest, assert_still, consumer, offset, only, open, options, parked, published, reaches, seqs,
};
use crate::{
    ledger::cannot,
    sources::{
        Hand,
        hand::{away, dead, event, events, retry},
    },
    wait::{eventually, eventually_some},
};

/// A retry is parked with its attempts and its error, the offset passes it, and it comes again after its time.
pub async fn a_retry_is_parked_and_comes_again(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(2).await;
    let wait = Duration::from_millis(700);
    relay.settle(&held[..1], &retry(wait)).await;
    let failed = Instant::now();
    relay.settle(&held[1..], &Verdict::Delivered).await;
    reaches(sut, C, all[1]).await;
    let row = &parked(sut).await[0].row;
    assert_eq!((row.seq, row.state.as_str(), row.attempts, row.held), (all[0], "pending", 1, false));
    assert_eq!(row.error_code.as_deref(), Some("refused"));
    assert!(row.error_message.as_deref().is_some_and(|text| text.contains("the check says so")), "{row:?}");
    assert!(row.next_retry_at.is_some());
    assert_eq!(consumer(sut, C).await.retrying, 1);

    let again = relay.some(10).await.deliveries;
    assert!(failed.elapsed() + Duration::from_millis(150) >= wait, "came after {:?}", failed.elapsed());
    assert_eq!((seqs(&again), again[0].attempt), (vec![all[0]], 2));
    // Given back, it costs nothing and comes again.
    relay.settle(&again, &Verdict::Released).await;
    let again = relay.some(10).await.deliveries;
    assert_eq!((seqs(&again), again[0].attempt), (vec![all[0]], 2));
    relay.settle(&again, &retry(Duration::ZERO)).await;
    let again = relay.some(10).await.deliveries;
    assert_eq!((seqs(&again), again[0].attempt), (vec![all[0]], 3));
    assert_eq!(parked(sut).await[0].row.attempts, 2);
    relay.settle(&again, &Verdict::Delivered).await;
    assert!(parked(sut).await.is_empty(), "nothing is kept of what was delivered");
}

/// An event whose destination is unavailable is parked with its key, and gets its attempt back. The status says what it
/// waits for, if there is a status.
pub async fn an_event_whose_destination_is_away_is_parked_at_no_cost(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("a", 1), event("b", 2)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(3).await;
    let verdicts = [away(Duration::ZERO), Verdict::Released, Verdict::Delivered];
    let settlements: Vec<Settlement> =
        held.iter().zip(verdicts).map(|(d, verdict)| Settlement { position: d.position, verdict }).collect();
    relay.source().settle(&settlements).await.expect("settle");
    reaches(sut, C, all[2]).await;
    let mut attempts = Vec::new();
    for verdict in [retry(Duration::ZERO), away(Duration::ZERO), away(Duration::from_secs(600))] {
        let again = relay.some(1).await.deliveries;
        assert_eq!(seqs(&again), [all[0]], "its key waits behind it");
        attempts.push(again[0].attempt);
        relay.settle(&again, &verdict).await;
    }
    assert_eq!(attempts, [1, 2, 2], "away, failed, away");
    let row = parked(sut).await.remove(0).row;
    assert_eq!((row.seq, row.state.as_str(), row.attempts, row.held), (all[0], "pending", 1, false));
    assert_eq!(row.error_code.as_deref(), Some("away:no_topic"));
    assert!(row.error_message.as_deref().is_some_and(|text| text.contains("topic t is away")), "{row:?}");
    let waiting = sut.away().await;
    if let Some(waiting) = waiting {
        let [waiting] = &waiting[..] else { panic!("{waiting:?}") };
        assert_eq!((waiting.events, waiting.consumer.as_deref()), (1, Some(C)));
    } else {
        cannot("an_event_whose_destination_is_away_is_parked_at_no_cost", "away, for a part of it");
    }
    let filter = ParkedFilter { consumer: Some(C.into()), seqs: vec![all[0]], ..ParkedFilter::default() };
    assert_eq!(sut.admin().discard_parked(&filter).await.expect("discard"), 1);
    assert_eq!(seqs(&relay.deliver(1).await), [all[1]], "and its key goes on when a person discards it");
}

/// Later events of a key wait behind one that is to be tried again, and come in order after it; others go on.
pub async fn a_retry_holds_its_key_and_no_other(sut: &dyn LogUnderTest) {
    let mut a = published(&sut.publish(&events("a", 3)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(2).await;
    // The one behind it is given back together with the failure, as a relay does it.
    let verdicts = [retry(Duration::from_millis(1_500)), Verdict::Released];
    let settlements: Vec<Settlement> =
        held.iter().zip(verdicts).map(|(d, verdict)| Settlement { position: d.position, verdict }).collect();
    let settled = relay.source().settle(&settlements).await.expect("settle");
    assert_eq!((settled.applied, settled.fenced), (2, 0));
    let b = published(&sut.publish(&events("b", 3)).await);
    a.extend(published(&sut.publish(&events("a", 1)).await));
    assert_eq!(seqs(&relay.deliver(3).await), b, "other keys go on, and only they");
    let all_parked = async || {
        assert!(relay.next(10).await.is_empty(), "the key waits");
        parked(sut).await.len() == 4 && offset(sut, C).await >= a[3]
    };
    eventually(sut.capabilities().patience, "the key to be parked", all_parked).await;
    let waits: Vec<(i64, bool, u32)> =
        parked(sut).await.iter().map(|p| (p.row.seq, p.row.held, p.row.attempts)).collect();
    assert_eq!(waits, [(a[0], false, 1), (a[1], true, 0), (a[2], true, 0), (a[3], true, 0)]);

    let head = relay.some(1).await.deliveries;
    assert_eq!((seqs(&head), head[0].attempt), (vec![a[0]], 2), "the failed one first");
    a.extend(published(&sut.publish(&events("a", 1)).await));
    relay.settle(&head, &Verdict::Delivered).await;
    let rest = relay.deliver(4).await;
    assert_eq!(seqs(&rest), a[1..], "then those behind it, in order, with what came meanwhile");
    assert!(rest.iter().all(|d| d.attempt == 1), "waiting costs no attempt");
    // The key is free again, and nothing is parked for its sake any more.
    let after = published(&sut.publish(&events("a", 2)).await);
    assert_eq!(seqs(&relay.deliver(2).await), after);
    reaches(sut, C, after[1]).await;
    assert!(parked(sut).await.is_empty());
}

/// Without order a failure holds nothing back.
pub async fn order_none_holds_nothing(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 4)).await);
    let relay = open(sut, options(sut, Order::None)).await;
    let head = relay.collect(1).await;
    // Longer than a busy machine takes for the others.
    relay.settle(&head, &retry(Duration::from_secs(3))).await;
    assert_eq!(seqs(&relay.deliver(3).await), all[1..], "those behind it come at once");
    assert_eq!(seqs(&relay.deliver(1).await), all[..1], "and it after its time");
}

/// In total order everything waits for an event that is to be tried again.
pub async fn total_order_holds_everything(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1), event("c", 2)]).await);
    let relay = open(sut, options(sut, Order::Total)).await;
    let held = relay.collect(2).await;
    let wait = Duration::from_millis(500);
    relay.settle(&held[..1], &retry(wait)).await;
    let failed = Instant::now();
    relay.settle(&held[1..], &Verdict::Released).await;
    let got = relay.deliver(3).await;
    assert!(failed.elapsed() + Duration::from_millis(150) >= wait, "came after {:?}", failed.elapsed());
    assert_eq!(seqs(&got), all);
    assert_eq!(got.iter().map(|d| d.attempt).collect::<Vec<_>>(), [2, 1, 1]);
    reaches(sut, C, all[2]).await;
}

/// What was held for the sake of an order that is no longer kept comes all the same.
pub async fn held_events_come_when_the_order_is_dropped(sut: &dyn LogUnderTest) {
    for order in [Order::None, Order::Total] {
        let all = published(&sut.publish(&events("a", 3)).await);
        let relay = open(sut, options(sut, Order::Key)).await;
        let head = relay.collect(1).await;
        relay.settle(&head, &retry(Duration::from_millis(300))).await;
        let parked_all = async || {
            assert!(relay.next(10).await.is_empty(), "the key waits");
            parked(sut).await.len() == 3
        };
        eventually(sut.capabilities().patience, "the key to be parked", parked_all).await;
        relay.close().await;
        let relay = open(sut, options(sut, order)).await;
        let mut got = seqs(&relay.deliver(3).await);
        got.sort_unstable();
        assert_eq!(got, all, "{order:?}");
        assert!(parked(sut).await.is_empty(), "{order:?}");
        relay.close().await;
    }
}

/// A dead event stays parked with its error and does not come by itself; its key goes on.
pub async fn a_dead_event_stays_parked_and_its_key_goes_on(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 3)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let head = relay.collect(1).await;
    relay.settle(&head, &dead()).await;
    assert_eq!(seqs(&relay.deliver(2).await), all[1..]);
    reaches(sut, C, all[2]).await;
    let row = &parked(sut).await[0].row;
    assert_eq!((row.seq, row.state.as_str(), row.attempts), (all[0], "dead", 1));
    assert_eq!(row.error_code.as_deref(), Some("hopeless"));
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
    assert_still(sut, &relay, "dead is dead").await;

    // The same after a retry, when others are held behind it.
    let more = published(&sut.publish(&events("b", 2)).await);
    let head = relay.collect(1).await;
    relay.settle(&head, &retry(Duration::from_millis(50))).await;
    let again = relay.some(1).await.deliveries;
    assert_eq!(seqs(&again), more[..1]);
    relay.settle(&again, &dead()).await;
    assert_eq!(seqs(&relay.deliver(1).await), more[1..], "what was held goes on");
    assert_eq!(consumer(sut, C).await.dead, 2);

    // An operator's retry starts it from the first attempt.
    assert_eq!(sut.admin().retry_parked(&only(&all[..1])).await.expect("retry"), 1);
    let revived = relay.deliver(1).await;
    assert_eq!((seqs(&revived), revived[0].attempt), (all[..1].to_vec(), 1));
    assert_eq!(sut.admin().retry_parked(&only(&all[..1])).await.expect("retry"), 0, "it is gone");
    assert_eq!(consumer(sut, C).await.dead, 1);
}

/// Lets the first of three events of a key die under `block_on_dead`; the others are blocked, other keys are not.
async fn block(sut: &dyn LogUnderTest) -> (Hand, Vec<i64>) {
    let a = published(&sut.publish(&events("a", 3)).await);
    let relay = open(sut, options(sut, Order::Key).reading(|read| read.block_on_dead = true)).await;
    let head = relay.collect(1).await;
    relay.settle(&head, &dead()).await;
    let b = published(&sut.publish(&events("b", 2)).await);
    assert_eq!(seqs(&relay.deliver(2).await), b, "other keys go on");
    assert_still(sut, &relay, "its key is blocked").await;
    reaches(sut, C, b[1]).await;
    let backlog = relay.source().backlog().await.expect("backlog");
    assert_eq!((backlog.unfinished, backlog.blocked), (2, 2), "only a person moves these");
    (relay, a)
}

/// With `block_on_dead` a key waits behind its dead event until a person retries that.
pub async fn a_key_blocked_by_a_dead_event_waits_for_a_retry(sut: &dyn LogUnderTest) {
    let (relay, a) = block(sut).await;
    relay.close().await;
    let relay = open(sut, options(sut, Order::Key).reading(|read| read.block_on_dead = true)).await;
    assert_still(sut, &relay, "blocked after a restart, too").await;
    let later = published(&sut.publish(&events("a", 1)).await);
    assert_still(sut, &relay, "what is new of that key as well").await;
    assert_eq!(sut.admin().retry_parked(&only(&[])).await.expect("retry"), 1);
    let got = relay.deliver(4).await;
    assert_eq!(seqs(&got), [a[0], a[1], a[2], later[0]], "the revived one first, then those behind it");
    assert_eq!(got[0].attempt, 1);
    assert!(parked(sut).await.is_empty());
}

/// With `block_on_dead` a key goes on once its dead event is discarded.
pub async fn a_key_blocked_by_a_dead_event_goes_on_after_a_discard(sut: &dyn LogUnderTest) {
    let (relay, a) = block(sut).await;
    assert_eq!(sut.admin().discard_parked(&only(&a[..1])).await.expect("discard"), 1);
    assert_eq!(seqs(&relay.deliver(2).await), a[1..], "what was behind it");
    assert_eq!(sut.admin().discard_parked(&only(&a[..1])).await.expect("discard"), 0, "it is gone");
    let after = published(&sut.publish(&events("a", 1)).await);
    assert_eq!(seqs(&relay.deliver(1).await), after, "the key is free");
}

fn unknown() -> Verdict {
    Verdict::Unknown { error: Error::retryable(Code::TIMEOUT, "it may have happened") }
}

/// An unknown outcome is not retried by itself nor in bulk; only who names that very event moves it.
pub async fn an_unknown_outcome_is_out_of_reach_of_bulk_retry(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(2).await;
    relay.settle(&held[..1], &unknown()).await;
    relay.settle(&held[1..], &dead()).await;
    reaches(sut, C, all[1]).await;
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
    let is = consumer(sut, C).await;
    assert_eq!((is.unknown, is.dead, is.retrying), (1, 1, 0));
    assert_eq!(sut.admin().retry_parked(&only(&[])).await.expect("bulk retry"), 1, "the dead one only");
    assert_eq!(seqs(&relay.deliver(1).await), all[1..]);
    assert_eq!(sut.admin().discard_parked(&only(&[])).await.expect("bulk discard"), 0);
    assert_still(sut, &relay, "nobody asked for it").await;
    assert_eq!(parked(sut).await[0].row.state, "unknown");
    assert_eq!(sut.admin().retry_parked(&only(&all[..1])).await.expect("retry"), 1);
    assert_eq!(seqs(&relay.deliver(1).await), all[..1]);
}

/// Not even a crash that leaves the offset before it makes an event come again whose outcome is unknown.
pub async fn an_unknown_outcome_does_not_come_again_after_a_crash(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1), event("c", 2)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(3).await;
    relay.settle(&held[1..2], &unknown()).await;
    relay.crash();
    sut.expire_leases().await;
    let relay = open(sut, options(sut, Order::Key)).await;
    assert_eq!(seqs(&relay.deliver(2).await), [all[0], all[2]]);
    reaches(sut, C, all[2]).await;
    assert_eq!(consumer(sut, C).await.unknown, 1);
}

/// A parked event carries everything, since retention may remove its row from the log.
pub async fn a_parked_event_survives_retention_as_a_whole(sut: &dyn LogUnderTest) {
    if !sut.capabilities().prunes_at_once {
        return cannot("a_parked_event_survives_retention_as_a_whole", "prunes_at_once");
    }
    let new = NewEvent::new("s", "OrderPlaced", "Order", "a")
        .json_text(r#"{"total":12.5}"#)
        .header("tenant", "7")
        .max_attempts(9);
    let all = published(&sut.publish(&[new.clone(), event("a", 1)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let head = relay.collect(1).await;
    relay.settle(&head, &retry(Duration::from_millis(800))).await;
    let parked_both = async || {
        assert!(relay.next(10).await.is_empty(), "the key waits");
        parked(sut).await.len() == 2
    };
    eventually(sut.capabilities().patience, "both to be parked", parked_both).await;
    reaches(sut, C, all[1]).await;
    let retention = Retention { keep: Duration::ZERO, wait_for_consumers: true };
    let pruned = eventually_some(sut.capabilities().patience, "the log to be empty", async || {
        let pruned = sut.admin().prune_log(retention, &|_| ()).await.expect("prune");
        (pruned.floor >= all[1]).then_some(pruned)
    })
    .await;
    assert_eq!(pruned.held_by, None, "{pruned:?}");
    let shown = sut.admin().show_parked(C, all[0]).await.expect("show").expect("it is parked");
    assert_eq!(shown.event.expect("an event").headers, new.headers);
    let got = relay.deliver(2).await;
    assert_eq!(seqs(&got), all);
    let mut expected = head[0].event.clone();
    expected.payload = got[0].event.payload.clone();
    assert_eq!(got[0].event, expected, "all of it, as it came the first time");
    let value = |bytes: &[u8]| -> serde_json::Value { serde_json::from_slice(bytes).expect("JSON") };
    assert_eq!(value(got[0].event.payload.as_bytes()), value(new.payload.as_bytes()));
    assert_eq!((got[0].attempt, got[0].max_attempts), (2, head[0].max_attempts));
}

/// With so many parked events waiting nothing new is read until some are delivered.
pub async fn so_many_parked_events_hold_back_reading(sut: &dyn LogUnderTest) {
    let new: Vec<NewEvent> = (0..30).map(|n| event(&format!("k{n}"), n)).collect();
    let all = published(&sut.publish(&new).await);
    let relay = open(sut, LogOptions { max_parked: 10, ..options(sut, Order::Key) }).await;
    let mut failed = Vec::new();
    loop {
        let batch = relay.next(5).await.deliveries;
        if batch.is_empty() {
            break;
        }
        relay.settle(&batch, &retry(Duration::from_secs(1))).await;
        failed.extend(batch);
        assert!(failed.len() <= 15, "{} are parked, and it reads on", failed.len());
    }
    assert_eq!(failed.len(), 10, "all others wait");
    let got = relay.deliver(30).await;
    assert_eq!(seqs(&got[..5]), seqs(&failed[..5]), "nothing new before some of them are delivered");
    let mut got = seqs(&got);
    got.sort_unstable();
    assert_eq!(got, all);
}

fn halting(sut: &dyn LogUnderTest) -> LogOptions {
    LogOptions { on_failure: OnFailure::Halt, ..options(sut, Order::Key) }
}

/// With `halt` the consumer waits for an event that failed: nothing newer is handed out until it is delivered,
/// nothing is parked, and the offset stays.
pub async fn halting_lets_nothing_pass_a_failing_event(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1), event("c", 2), event("d", 3)]).await);
    let relay = open(sut, halting(sut)).await;
    let held = relay.collect(3).await;
    relay.settle(&held[..1], &Verdict::Delivered).await;
    let wait = Duration::from_millis(400);
    relay.settle(&held[1..2], &retry(wait)).await;
    let failed = Instant::now();
    relay.settle(&held[2..], &Verdict::Released).await;
    for attempt in 2..4 {
        let again = relay.some(10).await.deliveries;
        assert_eq!((seqs(&again), again[0].attempt), (vec![all[1]], attempt), "it alone");
        assert!(failed.elapsed() + Duration::from_millis(150) >= wait, "came after {:?}", failed.elapsed());
        assert!(relay.next(10).await.is_empty(), "nothing beside it");
        relay.settle(&again, &retry(Duration::from_millis(50))).await;
    }
    assert_eq!(offset(sut, C).await, all[0]);
    assert!(parked(sut).await.is_empty(), "nothing is parked");
    let rest = relay.deliver(3).await;
    assert_eq!(seqs(&rest), all[1..]);
    reaches(sut, C, all[3]).await;
}

async fn error_of(sut: &dyn LogUnderTest, relay: &Hand) -> Error {
    eventually_some(sut.capabilities().patience, "the error", async || {
        relay.source().next(Limits { events: 10, bytes: 1 << 20 }).await.err()
    })
    .await
}

/// With `halt` an event that is given up on ends the consumer, with an error that says how to go on.
pub async fn halting_ends_with_an_error_once_the_event_is_dead(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1), event("c", 2)]).await);
    let relay = open(sut, halting(sut)).await;
    let held = relay.collect(3).await;
    // The failure of a later event in the same settle must not cover it up.
    let verdicts = [Verdict::Delivered, dead(), retry(Duration::ZERO)];
    let settlements: Vec<Settlement> =
        held.iter().zip(verdicts).map(|(d, verdict)| Settlement { position: d.position, verdict }).collect();
    relay.source().settle(&settlements).await.expect("settle");
    let error = error_of(sut, &relay).await;
    assert_eq!(error.code(), "halted", "{error}");
    assert_eq!(error.class(), airtight_core::Class::Permanent, "waiting does not help");
    assert!(error.to_string().contains(&format!("--to-seq {}", all[1])), "it says what to do: {error}");
    relay.close().await;
    assert_eq!(offset(sut, C).await, all[0]);
    assert!(parked(sut).await.is_empty());
    // What it says works.
    let to = airtight_core::log::SeekTo::Seq(all[1]);
    sut.admin().seek(C, to, Default::default()).await.expect("seek");
    let relay = open(sut, halting(sut)).await;
    assert_eq!(seqs(&relay.deliver(1).await), all[2..]);
}

/// What is given back while a consumer halts for it keeps the attempts that it has spent.
pub async fn a_release_gives_a_halted_attempt_back(sut: &dyn LogUnderTest) {
    sut.publish(&events("a", 1)).await;
    let relay = open(sut, halting(sut)).await;
    let mut attempts = Vec::new();
    for verdict in [retry(Duration::ZERO), Verdict::Released, retry(Duration::ZERO), Verdict::Released] {
        let batch = relay.some(1).await.deliveries;
        attempts.push(batch[0].attempt);
        relay.settle(&batch, &verdict).await;
    }
    attempts.push(relay.deliver(1).await[0].attempt);
    assert_eq!(attempts, [1, 2, 2, 3, 3], "failed, released, failed, released, delivered");
}

/// Events that fail together halt the consumer together: the attempts of each are counted.
pub async fn two_failures_at_once_halt_with_both_counted(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1)]).await);
    let relay = open(sut, halting(sut)).await;
    let held = relay.collect(2).await;
    relay.settle(&held, &retry(Duration::from_millis(50))).await;
    let got = relay.deliver(2).await;
    let attempts: Vec<(i64, u32)> = got.iter().map(|d| (d.event.seq, d.attempt)).collect();
    assert_eq!(attempts, [(all[0], 2), (all[1], 2)]);
}
