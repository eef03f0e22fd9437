//! Checks of what operators do to consumers: seeking, pausing, removing, and the mistakes they make.

use std::time::Duration;

use airtight_core::{
    Class, Order, Verdict,
    log::{ParkedFilter, Retention, Seek, SeekOptions, SeekTo},
};
use time::OffsetDateTime;

use super::{
    C, LogUnderTest, assert_still, consumer, deliver_again, offset, open, options, parked, published,
    reaches, seqs,
};
use crate::{
    ledger::cannot,
    sources::hand::{dead, event, events, retry},
    wait::eventually,
};

const DRY: SeekOptions = SeekOptions { dry_run: true, forget_inbox: false };

async fn seek(sut: &dyn LogUnderTest, to: SeekTo, options: SeekOptions) -> Seek {
    sut.admin().seek(C, to, options).await.expect("the seek succeeds")
}

/// A relay has events under way while its consumer is moved: its settles are fenced, and events come again from the
/// target, in order.
pub async fn a_seek_while_a_relay_works_fences_it_and_comes_again(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 8)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    relay.deliver(4).await;
    reaches(sut, C, all[3]).await;
    let held = relay.collect(3).await;
    let done = seek(sut, SeekTo::Seq(all[1]), SeekOptions::default()).await;
    assert_eq!((done.from, done.to, done.again, done.skipped), (all[3], all[1], 2, 0));
    let settled = relay.settle(&held, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (0, 3), "they are from before the seek");
    assert_eq!(offset(sut, C).await, all[1]);
    let again = deliver_again(sut, &relay, 6).await;
    assert_eq!(seqs(&again), all[2..], "from the target, all of it");
    reaches(sut, C, all[7]).await;
}

/// A relay that has delivered everything and has nothing to settle hears of a seek, too.
pub async fn a_seek_reaches_a_relay_that_has_nothing_to_do(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 4)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    relay.deliver(4).await;
    reaches(sut, C, all[3]).await;
    assert_still(sut, &relay, "all is delivered").await;
    let done = seek(sut, SeekTo::Earliest, SeekOptions::default()).await;
    assert_eq!(done.again, 4);
    assert_eq!(seqs(&deliver_again(sut, &relay, 4).await), all);
    reaches(sut, C, all[3]).await;
    assert!(relay.next(10).await.is_empty(), "once");
}

/// Parked events beyond the target are dropped, since they come again; those before it stay.
pub async fn a_seek_drops_parked_events_beyond_the_target(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&[event("a", 0), event("b", 1), event("c", 2), event("d", 3)]).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(4).await;
    relay.settle(&held[..1], &dead()).await;
    relay.settle(&held[1..2], &dead()).await;
    relay.settle(&held[2..3], &retry(Duration::from_secs(60))).await;
    relay.settle(&held[3..], &Verdict::Delivered).await;
    reaches(sut, C, all[3]).await;
    let done = seek(sut, SeekTo::Seq(all[0]), SeekOptions::default()).await;
    assert_eq!((done.again, done.parked_dropped), (3, 2));
    let left: Vec<i64> = parked(sut).await.iter().map(|parked| parked.row.seq).collect();
    assert_eq!(left, all[..1], "the one before the target stays");
    let again = deliver_again(sut, &relay, 3).await;
    assert_eq!(seqs(&again), all[1..]);
    assert!(again.iter().all(|d| d.attempt == 1), "from the first attempt");
    reaches(sut, C, all[3]).await;
    assert_eq!(relay.source().backlog().await.expect("backlog").unfinished, 0);
}

/// What a seek back asked for carries the replay's number, the same after a restart or a takeover. What comes for the
/// first time, or again because a relay vanished, carries none.
pub async fn a_replay_has_a_number_of_its_own_and_nothing_else_has(sut: &dyn LogUnderTest) {
    let mut all = published(&sut.publish(&events("a", 4)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let first = relay.collect(4).await;
    assert!(first.iter().all(|d| d.replay.is_none()), "the first time: {first:?}");
    relay.settle(&first[..2], &Verdict::Delivered).await;
    reaches(sut, C, all[1]).await;
    relay.close().await;
    let relay = open(sut, options(sut, Order::Key)).await;
    let again = relay.collect(2).await;
    assert!(again.iter().all(|d| d.replay.is_none()), "nobody asked for these: {again:?}");
    relay.settle(&again, &Verdict::Delivered).await;
    reaches(sut, C, all[3]).await;

    seek(sut, SeekTo::Seq(all[0]), SeekOptions::default()).await;
    all.extend(published(&sut.publish(&[event("a", 4)]).await));
    let replayed = deliver_again(sut, &relay, 4).await;
    assert_eq!(seqs(&replayed), all[1..]);
    let number = replayed[0].replay.expect("the number of the replay");
    let numbers: Vec<_> = replayed.iter().map(|d| d.replay).collect();
    assert_eq!(numbers, [Some(number), Some(number), Some(number), None], "the last one is new");
    reaches(sut, C, all[4]).await;

    seek(sut, SeekTo::Earliest, SeekOptions::default()).await;
    let half = deliver_again(sut, &relay, 2).await;
    let second = half[0].replay.expect("the number of the second replay");
    assert_ne!(second, number, "each has its own");
    reaches(sut, C, all[1]).await;
    relay.close().await;
    let relay = open(sut, options(sut, Order::Key)).await;
    let rest = deliver_again(sut, &relay, 3).await;
    assert!(rest.iter().all(|d| d.replay == Some(second)), "a restart is no replay: {rest:?}");
    reaches(sut, C, all[4]).await;

    seek(sut, SeekTo::Latest, SeekOptions::default()).await;
    all.extend(published(&sut.publish(&[event("a", 5)]).await));
    let new = deliver_again(sut, &relay, 1).await;
    assert_eq!((seqs(&new), new[0].replay), (all[5..].to_vec(), None));
}

/// A seek ahead leaves events out, and says how many.
pub async fn a_seek_ahead_skips(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 6)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    relay.deliver(1).await;
    reaches(sut, C, all[0]).await;
    let done = seek(sut, SeekTo::Seq(all[3]), SeekOptions::default()).await;
    assert_eq!((done.again, done.skipped), (0, 3));
    assert_eq!(seqs(&deliver_again(sut, &relay, 2).await), all[4..]);
    reaches(sut, C, all[5]).await;
    sut.publish(&events("b", 2)).await;
    let done = seek(sut, SeekTo::Latest, SeekOptions::default()).await;
    assert_eq!(done.skipped, 2);
    let new = published(&sut.publish(&events("c", 1)).await);
    assert_eq!(seqs(&deliver_again(sut, &relay, 1).await), new, "only what is new");
}

/// A seek to a time goes to the first event that was published then or later.
pub async fn a_seek_to_a_time_goes_to_its_first_event(sut: &dyn LogUnderTest) {
    let old = published(&sut.publish(&events("a", 3)).await);
    // Databases keep times to the millisecond, and their clock is not quite ours.
    tokio::time::sleep(Duration::from_millis(150)).await;
    let between = OffsetDateTime::now_utc();
    tokio::time::sleep(Duration::from_millis(150)).await;
    let new = published(&sut.publish(&events("a", 2)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    relay.deliver(5).await;
    reaches(sut, C, new[1]).await;
    let done = seek(sut, SeekTo::Time(between), SeekOptions::default()).await;
    assert_eq!((done.to, done.again), (new[0] - 1, 2), "old ones end at {}", old[2]);
    assert_eq!(seqs(&deliver_again(sut, &relay, 2).await), new);
}

/// A dry run tells what would happen, and changes nothing.
pub async fn a_dry_run_changes_nothing(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 5)).await);
    let relay = open(sut, options(sut, Order::None)).await;
    let held = relay.collect(1).await;
    relay.settle(&held, &dead()).await;
    relay.deliver(2).await;
    reaches(sut, C, all[2]).await;
    let held = relay.collect(2).await;
    let dry = seek(sut, SeekTo::Earliest, DRY).await;
    assert_eq!((dry.from, dry.again, dry.skipped, dry.parked_dropped), (all[2], 3, 0, 1), "{dry:?}");
    assert_eq!(offset(sut, C).await, all[2]);
    assert_eq!(parked(sut).await.len(), 1);
    let settled = relay.settle(&held, &Verdict::Delivered).await;
    assert_eq!((settled.applied, settled.fenced), (2, 0), "nobody was fenced");
    assert_still(sut, &relay, "nothing comes again").await;
    let real = seek(sut, SeekTo::Earliest, SeekOptions::default()).await;
    assert_eq!((real.again, real.parked_dropped), (5, 1));
}

/// A paused consumer hands out nothing more, settles what is under way, and goes on where it was.
pub async fn a_paused_consumer_stands_still(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 4)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(2).await;
    sut.admin().pause(C, true).await.expect("pause");
    assert!(consumer(sut, C).await.paused);
    // Renewals bring the news; a backlog is refused from then on, or a drain would never end.
    eventually(sut.capabilities().patience, "the relay to notice", async || {
        relay.source().backlog().await.is_err_and(|error| error.code() == "paused")
    })
    .await;
    assert_still(sut, &relay, "it is paused").await;
    assert_eq!(relay.settle(&held, &Verdict::Delivered).await.applied, 2);
    reaches(sut, C, all[1]).await;
    relay.close().await;
    let relay = open(sut, options(sut, Order::Key)).await;
    assert_still(sut, &relay, "a restart does not resume it").await;
    sut.admin().pause(C, false).await.expect("resume");
    assert_eq!(seqs(&relay.deliver(2).await), all[2..]);
}

/// A target that cannot be is an error that says why, and nothing moves.
pub async fn bad_targets_are_errors_and_nothing_moves(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 6)).await);
    let before = OffsetDateTime::now_utc();
    let relay = open(sut, options(sut, Order::Key)).await;
    relay.deliver(4).await;
    reaches(sut, C, all[3]).await;
    let admin = sut.admin();
    let mut targets = vec![(SeekTo::Seq(-1), "bad_offset"), (SeekTo::Seq(all[5] + 1_000), "bad_offset")];
    if sut.capabilities().prunes_at_once {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let keep_none = Retention { keep: Duration::ZERO, wait_for_consumers: true };
        let pruned = admin.prune_log(keep_none, &|_| ()).await.expect("prune");
        assert_eq!(pruned.floor, all[3]);
        let long_ago = before - Duration::from_secs(3_600);
        targets.push((SeekTo::Seq(all[1]), "before_retention"));
        targets.push((SeekTo::Time(long_ago), "before_retention"));
    } else {
        cannot("bad_targets_are_errors_and_nothing_moves", "prunes_at_once, for a part of it");
    }
    for (to, code) in targets {
        for options in [SeekOptions::default(), DRY] {
            let error = admin.seek(C, to, options).await.expect_err("it cannot be");
            assert_eq!((error.code(), error.class()), (code, Class::Permanent), "{to:?}: {error}");
        }
    }
    assert_eq!(offset(sut, C).await, all[3]);
    assert_eq!(seqs(&relay.deliver(2).await), all[4..], "and the relay is not disturbed");
    // The oldest place there is can always be had.
    let oldest = seek(sut, SeekTo::Earliest, SeekOptions::default()).await;
    let expected = if sut.capabilities().prunes_at_once { &all[4..] } else { &all[..] };
    assert_eq!(oldest.again, expected.len() as u64);
    assert_eq!(seqs(&deliver_again(sut, &relay, expected.len()).await), expected);
}

/// A consumer that nobody has heard of is an error that names those there are.
pub async fn an_unknown_consumer_is_an_error(sut: &dyn LogUnderTest) {
    open(sut, options(sut, Order::Key)).await.close().await;
    let admin = sut.admin();
    let who = "nobody";
    let filter = ParkedFilter { consumer: Some(who.into()), ..ParkedFilter::default() };
    let errors = [
        admin.seek(who, SeekTo::Earliest, SeekOptions::default()).await.err(),
        admin.seek(who, SeekTo::Earliest, DRY).await.err(),
        admin.pause(who, true).await.err(),
        admin.remove(who).await.err(),
        admin.lag(who).await.err(),
        admin.show_parked(who, 1).await.err(),
        admin.parked(&filter).await.err(),
        admin.retry_parked(&filter).await.err(),
        admin.discard_parked(&filter).await.err(),
    ];
    for (n, error) in errors.into_iter().enumerate() {
        let error = error.unwrap_or_else(|| panic!("number {n} must be an error"));
        assert_eq!(error.code(), "unknown_consumer", "number {n}: {error}");
        assert!(error.message().contains(&format!(": {C}")), "number {n} names those there are: {error}");
    }
    let names: Vec<String> =
        admin.consumers().await.expect("consumers").into_iter().map(|c| c.name).collect();
    assert_eq!(names, [C], "none was made by asking");
}

/// A consumer is removed with all it has, but not while a relay works for it.
pub async fn a_consumer_is_removed_once_nobody_works_for_it(sut: &dyn LogUnderTest) {
    let all = published(&sut.publish(&events("a", 3)).await);
    let relay = open(sut, options(sut, Order::Key)).await;
    let held = relay.collect(1).await;
    relay.settle(&held, &dead()).await;
    let refused = sut.admin().remove(C).await.expect_err("a relay works for it");
    assert_eq!(refused.class(), Class::Permanent, "{refused}");
    relay.deliver(2).await;
    relay.close().await;
    sut.admin().remove(C).await.expect("nobody works for it now");
    assert!(sut.admin().consumers().await.expect("consumers").is_empty());
    // A new one of that name begins anew.
    let relay = open(sut, options(sut, Order::Key)).await;
    assert_eq!(seqs(&relay.deliver(3).await), all);
    assert!(parked(sut).await.is_empty());
}
