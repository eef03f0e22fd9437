//! Checks of verdicts: retry, release, dead, unknown, and the operator's answers to them.

use std::time::{Duration, Instant};

use airtight_core::{
    Code, Delivery, Error, Order, Verdict,
    admin::{Acted, Filter},
    queue::QueueOptions,
};

use super::{
    SourceUnderTest,
    hand::{Hand, away, dead, event, events, ids, long, retry, short},
};
use crate::{ledger::cannot, wait::eventually};

/// Handing out costs an attempt, a failure keeps it spent, a release gives it back.
pub async fn attempts_grow_at_claims_and_a_release_gives_back(sut: &dyn SourceUnderTest) {
    sut.publish(&events("a", 1)).await;
    let relay = Hand::open(sut, long(Order::Key)).await;
    let mut attempts = Vec::new();
    for verdict in [Verdict::Released, retry(Duration::ZERO), Verdict::Released, retry(Duration::ZERO)] {
        let batch = relay.some(1).await;
        attempts.push(batch.deliveries[0].attempt);
        assert_eq!(relay.settle(&batch.deliveries, &verdict).await.applied, 1);
    }
    attempts.push(relay.deliver(1).await[0].attempt);
    assert_eq!(attempts, [1, 1, 2, 2, 3], "released, failed, released, failed, delivered");
}

/// An event whose destination is unavailable waits like a retry, with its key behind it, and gets its attempt back. No
/// relay holds it meanwhile, so a person may discard it, and the status says what it waits for.
pub async fn an_event_whose_destination_is_away_waits_at_no_cost(sut: &dyn SourceUnderTest) {
    sut.publish(&events("a", 1)).await;
    let relay = Hand::open(sut, long(Order::Key)).await;
    let wait = Duration::from_millis(700);
    let mut attempts = Vec::new();
    for verdict in [away(Duration::ZERO), retry(Duration::ZERO), away(wait)] {
        let batch = relay.some(1).await;
        attempts.push(batch.deliveries[0].attempt);
        assert_eq!(relay.settle(&batch.deliveries, &verdict).await.applied, 1);
    }
    let put_back = Instant::now();
    sut.publish(&events("a", 2)).await;
    sut.publish(&events("b", 3)).await;
    let others = relay.deliver(3).await;
    assert!(others.iter().all(|d| d.event.aggregate_id == "b"), "{:?} must wait", ids(&others));
    let again = relay.some(1).await.deliveries;
    assert!(put_back.elapsed() + Duration::from_millis(150) >= wait, "came after {:?}", put_back.elapsed());
    attempts.push(again[0].attempt);
    assert_eq!(attempts, [1, 1, 2, 2], "away, failed, away, and now");
    relay.settle(&again, &away(Duration::from_secs(600))).await;

    let Some(admin) = sut.admin() else {
        return cannot("an_event_whose_destination_is_away_waits_at_no_cost", "admin");
    };
    let status = admin.status().await.expect("status");
    let [waiting] = &status.away[..] else { panic!("{:?}", status.away) };
    assert_eq!((waiting.events, waiting.consumer.as_deref()), (1, None));
    assert!(waiting.message.contains("topic t is away"), "{waiting:?}");
    assert_eq!(status.streams.iter().map(|stream| stream.processing).sum::<u64>(), 0);
    let id = again[0].event.id.clone();
    assert_eq!(admin.discard(&id).await.expect("discard"), Acted::Yes);
    assert_eq!(admin.status().await.expect("status").away, []);
    relay.deliver(2).await;
}

/// `max_attempts` of an event comes along with it.
pub async fn an_events_own_limit_comes_with_it(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().envelope_fields {
        return cannot("an_events_own_limit_comes_with_it", "envelope_fields");
    }
    sut.publish(&[event("a", 0).max_attempts(3), event("b", 1)]).await;
    let relay = Hand::open(sut, long(Order::Key)).await;
    let got = relay.deliver(2).await;
    let limit = |key: &str| {
        let found = got.iter().find(|d| d.event.aggregate_id == key);
        found.unwrap_or_else(|| panic!("{key} is handed out")).max_attempts
    };
    assert_eq!((limit("a"), limit("b")), (Some(3), None));
}

/// While an event waits for its retry its key waits with it, and every other key goes on.
pub async fn a_retry_waits_and_holds_its_key_only(sut: &dyn SourceUnderTest) {
    sut.publish(&events("a", 1)).await;
    let relay = Hand::open(sut, long(Order::Key)).await;
    let head = relay.collect(1).await;
    let wait = Duration::from_millis(700);
    relay.settle(&head, &retry(wait)).await;
    let failed = Instant::now();
    sut.publish(&events("a", 2)).await;
    sut.publish(&events("b", 3)).await;

    let others = relay.deliver(3).await;
    assert!(others.iter().all(|d| d.event.aggregate_id == "b"), "{:?} must wait", ids(&others));
    let again = relay.some(1).await.deliveries;
    assert_eq!(ids(&again), ids(&head), "the failed event is the next of its key");
    // The database's clock may be a little ahead of ours at the settle, never by this much.
    assert!(failed.elapsed() + Duration::from_millis(150) >= wait, "came after {:?}", failed.elapsed());
    assert_eq!(again[0].attempt, 2);
    relay.settle(&again, &Verdict::Delivered).await;
    relay.deliver(2).await;
}

/// What waited behind a retry is freed when that is finished, in order, and with what came meanwhile behind it.
pub async fn what_was_held_is_freed_in_order(sut: &dyn SourceUnderTest) {
    let published = sut.publish(&events("a", 4)).await;
    let relay = Hand::open(sut, short(sut, Order::Key)).await;
    let held = relay.collect(2).await;
    relay.settle(&held[..1], &retry(Duration::from_millis(250))).await;
    relay.settle(&held[1..], &Verdict::Released).await;
    assert!(relay.next(10).await.is_empty(), "the whole key waits");
    let later = sut.publish(&events("a", 2)).await;
    let got = relay.deliver(6).await;
    let expected: Vec<&str> = published.iter().chain(&later).map(|p| p.id.as_str()).collect();
    assert_eq!(ids(&got), expected, "everything of the key, in order");
}

/// What is held stays held while its head is being tried again, and nothing newer of the key overtakes it then.
pub async fn what_is_held_is_not_overtaken_while_its_head_is_tried(sut: &dyn SourceUnderTest) {
    let mut published = sut.publish(&events("a", 2)).await;
    let relay = Hand::open(sut, short(sut, Order::Key)).await;
    for _ in 0..2 {
        let head = relay.collect(1).await;
        relay.settle(&head, &retry(Duration::from_millis(100))).await;
        assert!(relay.next(10).await.is_empty(), "the whole key waits");
    }
    let head = relay.some(1).await.deliveries;
    assert_eq!(ids(&head), [&published[0].id], "the head first");
    published.extend(sut.publish(&events("a", 2)).await);
    let early = relay.next(10).await.deliveries;
    assert!(early.is_empty(), "{:?} would overtake what is held", ids(&early));
    relay.settle(&head, &Verdict::Delivered).await;
    let expected: Vec<&str> = published[1..].iter().map(|p| p.id.as_str()).collect();
    assert_eq!(ids(&relay.deliver(3).await), expected);
}

/// An event that is given back together with the failure of the one before it waits for that one, too.
pub async fn a_release_behind_a_retry_waits_for_it(sut: &dyn SourceUnderTest) {
    let published = sut.publish(&events("a", 3)).await;
    let relay = Hand::open(sut, short(sut, Order::Key)).await;
    let held = relay.collect(3).await;
    let verdicts = [retry(Duration::from_millis(200)), Verdict::Released, Verdict::Released];
    let settlements: Vec<_> = held
        .iter()
        .zip(verdicts)
        .map(|(d, verdict)| airtight_core::Settlement { position: d.position, verdict })
        .collect();
    let settled = relay.source().settle(&settlements).await.expect("settle succeeds");
    assert_eq!((settled.applied, settled.fenced), (3, 0));
    let got = relay.deliver(3).await;
    let expected: Vec<&str> = published.iter().map(|p| p.id.as_str()).collect();
    assert_eq!(ids(&got), expected);
    assert_eq!(got.iter().map(|d| d.attempt).collect::<Vec<_>>(), [2, 1, 1]);
}

/// A dead event does not come again by itself, and without `block_on_dead` its key goes on.
pub async fn dead_stays_dead_and_its_key_goes_on(sut: &dyn SourceUnderTest) {
    let published = sut.publish(&events("a", 3)).await;
    let relay = Hand::open(sut, short(sut, Order::Key)).await;
    let head = relay.collect(1).await;
    relay.settle(&head, &dead()).await;
    let rest = relay.deliver(2).await;
    assert_eq!(ids(&rest), [&published[1].id, &published[2].id]);
    assert!(relay.next(10).await.is_empty(), "dead is dead");
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);

    // The same after a retry, when others are held behind it.
    let published = sut.publish(&events("b", 2)).await;
    let head = relay.collect(1).await;
    relay.settle(&head, &retry(Duration::from_millis(50))).await;
    let again = relay.some(1).await.deliveries;
    assert_eq!(ids(&again), [&published[0].id]);
    relay.settle(&again, &dead()).await;
    assert_eq!(ids(&relay.deliver(1).await), [&published[1].id], "what was held goes on");
}

fn blocking(sut: &dyn SourceUnderTest) -> QueueOptions {
    QueueOptions { block_on_dead: true, ..short(sut, Order::Key) }
}

/// Publishes three events of a key, lets the first die, and shows that the key is blocked and others are not.
async fn block(sut: &dyn SourceUnderTest, relay: &Hand) -> (Vec<Delivery>, Vec<String>) {
    let published = sut.publish(&events("a", 3)).await;
    let head = relay.collect(1).await;
    relay.settle(&head, &dead()).await;
    sut.publish(&events("b", 2)).await;
    let others = relay.deliver(2).await;
    assert!(others.iter().all(|d| d.event.aggregate_id == "b"), "{:?} is blocked", ids(&others));
    assert!(relay.next(10).await.is_empty(), "a is blocked");
    (head, published.into_iter().map(|p| p.id).collect())
}

/// With `block_on_dead` a key waits behind its dead event until an operator retries that.
pub async fn a_blocked_key_waits_for_the_operators_retry(sut: &dyn SourceUnderTest) {
    let Some(admin) = sut.admin() else {
        return cannot("a_blocked_key_waits_for_the_operators_retry", "admin");
    };
    let relay = Hand::open(sut, blocking(sut)).await;
    let (head, published) = block(sut, &relay).await;
    let blocked = admin.blocked(10).await.expect("blocked");
    assert_eq!(blocked.len(), 1, "one key is blocked: {blocked:?}");
    assert_eq!((blocked[0].aggregate_id.as_str(), &blocked[0].behind_id), ("a", &published[0]));
    assert_eq!(admin.retry(&head[0].event.id).await.expect("retry"), Acted::Yes);
    let got = relay.deliver(3).await;
    assert_eq!(ids(&got), published, "the revived event first, then those behind it");
    assert_eq!(got[0].attempt, 1, "an operator's retry starts from the first attempt");
    let refused = admin.retry(&published[0]).await.expect("retry");
    assert_eq!(refused, Acted::Refused(airtight_core::state::State::Done), "done has happened");
}

/// With `block_on_dead` a key goes on once its dead event is discarded.
pub async fn a_blocked_key_goes_on_after_a_discard(sut: &dyn SourceUnderTest) {
    let Some(admin) = sut.admin() else { return cannot("a_blocked_key_goes_on_after_a_discard", "admin") };
    let relay = Hand::open(sut, blocking(sut)).await;
    let (head, published) = block(sut, &relay).await;
    assert_eq!(admin.discard(&head[0].event.id).await.expect("discard"), Acted::Yes);
    assert_eq!(ids(&relay.deliver(2).await), published[1..], "what was behind it");
    assert_eq!(admin.discard(&head[0].event.id).await.expect("discard"), Acted::NotFound);
}

/// The backlog says what only a person can move, so that a drain can end.
pub async fn a_blocked_backlog_is_told_apart(sut: &dyn SourceUnderTest) {
    let relay = Hand::open(sut, blocking(sut)).await;
    block(sut, &relay).await;
    let backlog = relay.source().backlog().await.expect("backlog");
    assert_eq!((backlog.unfinished, backlog.blocked), (2, 2), "two events behind a dead one");
    sut.publish(&events("c", 1)).await;
    let backlog = relay.source().backlog().await.expect("backlog");
    assert_eq!((backlog.unfinished, backlog.blocked), (3, 2));
    relay.deliver(1).await;
}

/// An unknown outcome is not retried by itself nor in bulk, does not count as unfinished, and comes again only
/// when somebody asks for that very event.
pub async fn unknown_is_out_of_reach_of_bulk_retry(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().unknown {
        return cannot("unknown_is_out_of_reach_of_bulk_retry", "unknown");
    }
    sut.publish(&[event("a", 0), event("b", 1), event("c", 2)]).await;
    let relay = Hand::open(sut, long(Order::Key)).await;
    let held = relay.collect(3).await;
    let error = Error::retryable(Code::TIMEOUT, "it may have happened");
    relay.settle(&held[..1], &Verdict::Unknown { error }).await;
    relay.settle(&held[1..2], &dead()).await;
    relay.settle(&held[2..], &Verdict::Delivered).await;
    let backlog = relay.source().backlog().await.expect("backlog");
    assert_eq!(backlog.unfinished, 0, "nothing that a relay could still do");
    assert!(relay.next(10).await.is_empty());

    let Some(admin) = sut.admin() else { return cannot("unknown_is_out_of_reach_of_bulk_retry", "admin") };
    assert_eq!(admin.retry_dead(&Filter::default()).await.expect("bulk retry"), 1, "the dead one only");
    assert_eq!(ids(&relay.deliver(1).await), ids(&held[1..2]));
    assert_eq!(admin.discard_dead(&Filter::default()).await.expect("bulk discard"), 0);
    assert_eq!(admin.retry(&held[0].event.id).await.expect("retry"), Acted::Yes);
    assert_eq!(ids(&relay.deliver(1).await), ids(&held[..1]));
}

/// Status and error text are the operators' interface: a row set back to pending in SQL is picked up again.
pub async fn a_dead_row_set_back_by_hand_comes_again(sut: &dyn SourceUnderTest) {
    sut.publish(&[event("a", 0), event("b", 1)]).await;
    let relay = Hand::open(sut, long(Order::Key)).await;
    let held = relay.collect(2).await;
    relay.settle(&held[..1], &dead()).await;
    relay.settle(&held[1..], &Verdict::Delivered).await;
    assert!(relay.next(10).await.is_empty());
    sut.set_back_by_hand(&held[0].event.id).await;
    assert_eq!(ids(&relay.deliver(1).await), ids(&held[..1]), "dead, set back");
    sut.set_back_by_hand(&held[1].event.id).await;
    assert_eq!(ids(&relay.deliver(1).await), ids(&held[1..]), "done, set back: a replay by hand");
}

/// A row that is set back while a relay holds it is lost to that claim, and to nothing else: the relay goes on
/// with everything it has and will have.
pub async fn a_row_set_back_under_a_live_claim_fences_that_claim_only(sut: &dyn SourceUnderTest) {
    if !sut.capabilities().shows_claims {
        return cannot("a_row_set_back_under_a_live_claim_fences_that_claim_only", "shows_claims");
    }
    sut.publish(&[event("a", 0), event("b", 1)]).await;
    let options = short(sut, Order::Key);
    let lease = options.lease;
    let relay = Hand::open(sut, options).await;
    let held = relay.collect(2).await;
    sut.set_back_by_hand(&held[0].event.id).await;
    // Long enough for several renewals to find out.
    let claimed = Instant::now();
    eventually(lease * 4, "a lease to pass", async || claimed.elapsed() > lease * 3 / 2).await;

    sut.publish(&[event("c", 2)]).await;
    let mut fresh = Vec::new();
    while fresh.len() < 2 {
        let batch = relay.some(10).await;
        assert!(!batch.ownership.is_lost(), "a relay that renews owns what it claims");
        fresh.extend(batch.deliveries);
    }
    assert_eq!(ids(&fresh)[0], held[0].event.id, "what was set back comes again, before what is newer");
    let settled = relay.settle(&held, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (1, 1), "one claim was void, the other was not");
    let settled = relay.settle(&fresh, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (2, 0));
}
