//! What an operator does with a log: seek, pause, retry, retention; and what bad input gets.

use std::time::Duration;

use airtight_core::{
    Class,
    admin::{Acted, Admin, Filter, Prune},
    log::{Fate, LogAdmin, LogStore, ParkedFilter, Retention, Revision, SeekOptions, SeekTo},
    state::State,
};
use airtight_sqlite::SqliteOutbox;
use time::{OffsetDateTime, macros::datetime};

use crate::{
    common::Fixture,
    log::{Follower, consumer, dead, retry_in, seqs},
};

/// Six events, an hour apart, the first at midnight; and a consumer that has settled four.
async fn six() -> (Fixture, Follower) {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "b", "c", "d", "e", "f"]).await;
    fixture
        .exec("UPDATE airtight_outbox SET created_at = printf('2024-01-01T%02d:00:00.000Z', seq - 1)")
        .await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(4, vec![], vec![]).await;
    (fixture, one)
}

const MIDNIGHT: OffsetDateTime = datetime!(2024-01-01 00:00 UTC);

fn all_of_it() -> Retention {
    Retention { keep: Duration::from_secs(1), wait_for_consumers: false }
}

#[tokio::test]
async fn a_consumer_is_moved_to_every_kind_of_target() {
    let (fixture, one) = six().await;
    let hour = time::Duration::HOUR;
    let cases = [
        (SeekTo::Seq(2), 2, 2, 0),
        (SeekTo::Seq(0), 0, 4, 0),
        (SeekTo::Seq(6), 6, 0, 2),
        (SeekTo::Earliest, 0, 4, 0),
        (SeekTo::Latest, 6, 0, 2),
        (SeekTo::Time(MIDNIGHT), 0, 4, 0),
        (SeekTo::Time(MIDNIGHT + hour * 2), 2, 2, 0),
        (SeekTo::Time(MIDNIGHT + hour * 2 + time::Duration::MILLISECOND), 3, 1, 0),
        (SeekTo::Time(MIDNIGHT + hour * 100), 6, 0, 2),
    ];
    for (to, offset, again, skipped) in cases {
        let dry = SeekOptions { dry_run: true, ..SeekOptions::default() };
        let before = one.standing(0).await;
        let said = fixture.outbox.seek("one", to, dry).await.unwrap();
        assert_eq!((said.from, said.to, said.again, said.skipped), (4, offset, again, skipped), "{to:?}");
        assert_eq!(one.standing(0).await, before, "a dry run changes nothing");
        let did = fixture.outbox.seek("one", to, SeekOptions::default()).await.unwrap();
        assert_eq!(did, said);
        assert_eq!(fixture.text("SELECT last_seq FROM airtight_offset").await, offset.to_string());
        assert!(one.store.positions(&one.member, &[0]).await.unwrap().is_empty(), "taken off its owner");
        one.store.members().take(&one.member, &[0]).await.unwrap();
        assert!(one.standing(0).await.epoch > before.epoch);
        fixture.exec("UPDATE airtight_offset SET last_seq = 4").await;
    }
}

#[tokio::test]
async fn bad_targets_are_refused_and_nothing_moves() {
    let (fixture, one) = six().await;
    let before = one.standing(0).await;
    let seek = async |to| fixture.outbox.seek("one", to, SeekOptions::default()).await.unwrap_err();
    assert_eq!(seek(SeekTo::Seq(-1)).await.code(), "bad_offset");
    let error = seek(SeekTo::Seq(7)).await;
    assert_eq!((error.code(), error.class()), ("bad_offset", Class::Permanent));
    assert!(error.message().contains("--latest"), "{error}");
    assert_eq!(seek(SeekTo::Time(datetime!(2999-01-01 00:00 UTC))).await.code(), "bad_offset");

    let kept = one.store.attach(&consumer("two", 1), airtight_core::log::Start::Latest).await;
    kept.unwrap();
    fixture.exec("UPDATE airtight_outbox SET created_at = '2999' WHERE seq > 3").await;
    let pruned = fixture.outbox.prune_log(all_of_it(), &|_| {}).await.unwrap();
    assert_eq!((pruned.events, pruned.floor), (3, 3));
    assert_eq!(seek(SeekTo::Seq(2)).await.code(), "before_retention");
    for hours in [-5, 0, 2] {
        let error = seek(SeekTo::Time(MIDNIGHT + time::Duration::HOUR * hours)).await;
        assert_eq!(error.code(), "before_retention", "{hours}");
        assert!(error.message().contains("--earliest"), "{error}");
    }
    assert_eq!(one.standing(0).await, before);
    let moved = fixture.outbox.seek("one", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
    assert_eq!(moved.to, 3, "the oldest event there is comes next");
}

#[tokio::test]
async fn an_unknown_consumer_is_named_with_those_there_are() {
    let (fixture, _one) = six().await;
    let outbox = &fixture.outbox;
    let filter = ParkedFilter { consumer: Some("onne".into()), ..ParkedFilter::default() };
    let errors = [
        outbox.seek("onne", SeekTo::Latest, SeekOptions::default()).await.unwrap_err(),
        outbox.pause("onne", true).await.unwrap_err(),
        outbox.remove("onne").await.unwrap_err(),
        outbox.lag("onne").await.unwrap_err(),
        outbox.parked(&filter).await.unwrap_err(),
        outbox.show_parked("onne", 1).await.unwrap_err(),
        outbox.retry_parked(&filter).await.unwrap_err(),
        outbox.discard_parked(&filter).await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.code(), "unknown_consumer");
        assert!(error.message().contains("`onne`") && error.message().contains("there are: one"), "{error}");
    }
}

#[tokio::test]
async fn a_seek_makes_the_inbox_forget_what_comes_again() {
    let (fixture, _one) = six().await;
    let inbox = fixture.outbox.inbox();
    let mut conn = fixture.outbox.pool().acquire().await.unwrap();
    for seq in 1..=4 {
        assert!(inbox.first_time_at(&mut conn, "one", &format!("s{seq}"), seq).await.unwrap());
        assert!(inbox.first_time(&mut conn, "one", &format!("t{seq}")).await.unwrap());
        assert!(inbox.first_time_at(&mut conn, "two", &format!("s{seq}"), seq).await.unwrap());
    }
    drop(conn);
    // Seen ten minutes after it was written.
    fixture
        .exec("UPDATE airtight_inbox SET seen_at = printf('2024-01-01T%02d:10:00.000Z', substr(key, 2) - 1) WHERE seq IS NULL")
        .await;
    let forget = SeekOptions { forget_inbox: true, dry_run: true };
    let said = fixture.outbox.seek("one", SeekTo::Seq(2), forget).await.unwrap();
    assert_eq!(said.forgotten, 4, "third and fourth, both ways");
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_inbox").await, "12");
    let without = fixture.outbox.seek("one", SeekTo::Seq(2), SeekOptions::default()).await.unwrap();
    assert_eq!(without.forgotten, 0);
    let did =
        fixture.outbox.seek("one", SeekTo::Seq(2), SeekOptions { dry_run: false, ..forget }).await.unwrap();
    assert_eq!(did.forgotten, 4);
    let left = "SELECT group_concat(key, ' ') FROM (SELECT key FROM airtight_inbox WHERE consumer = 'one' ORDER BY key)";
    assert_eq!(fixture.text(left).await, "s1 s2 t1 t2");
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_inbox WHERE consumer = 'two'").await, "4");
}

#[tokio::test]
async fn retention_stops_at_the_slowest_consumer_unless_told() {
    let (fixture, one) = six().await;
    let fast = Follower::join(&fixture.outbox, consumer("fast", 1)).await;
    fast.settle(6, vec![], vec![]).await;
    let waits = Retention { keep: Duration::from_secs(3600), wait_for_consumers: true };
    let pruned = fixture.outbox.prune_log(waits, &|_| {}).await.unwrap();
    assert_eq!((pruned.events, pruned.floor, pruned.held_by.as_deref()), (4, 4, Some("one")));
    assert_eq!(
        fixture.text("SELECT seq || ' ' || created_at FROM airtight_floor").await,
        "4 2024-01-01T03:00:00.000Z"
    );
    let again = fixture.outbox.prune_log(waits, &|_| {}).await.unwrap();
    assert_eq!((again.events, again.floor, again.held_by.as_deref()), (0, 4, Some("one")));
    assert_eq!(seqs(&one.read(4, 10).await), [5, 6], "removed rows are no hole");

    let seen = std::sync::Mutex::new(Vec::new());
    let pruned =
        fixture.outbox.prune_log(all_of_it(), &|total| seen.lock().unwrap().push(total)).await.unwrap();
    assert_eq!((pruned.events, pruned.floor, pruned.held_by), (2, 6, None));
    assert_eq!(seen.into_inner().unwrap().last(), Some(&2));

    // The consumer that was overtaken is told, and says how to go on; the others go on.
    let error = one.store.positions(&one.member, &[0]).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("behind_retention", Class::Permanent));
    assert!(error.to_string().contains("consumers seek one --earliest"), "{error}");
    fixture.publish(&["g"]).await;
    assert_eq!(fixture.text("SELECT max(seq) FROM airtight_outbox").await, "7", "no number is given twice");
    let consumers = fixture.outbox.consumers().await.unwrap();
    assert_eq!(consumers.iter().map(|found| found.behind_retention).collect::<Vec<_>>(), [false, true]);
    assert!(fixture.outbox.check().await.unwrap().iter().any(|finding| finding.fatal));
    assert_eq!(seqs(&fast.read(6, 10).await), [7]);
    // The rebuild procedure.
    fixture.outbox.seek("one", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
    one.store.members().take(&one.member, &[0]).await.unwrap();
    assert_eq!(one.standing(0).await.offset, 6);
    // A new one begins with what is there.
    let new = Follower::join(&fixture.outbox, consumer("new", 1)).await;
    assert_eq!(new.standing(0).await.offset, 6);
}

#[tokio::test]
async fn a_read_below_the_floor_is_an_error_not_a_hole() {
    let (fixture, one) = six().await;
    fixture.outbox.prune_log(all_of_it(), &|_| {}).await.unwrap();
    fixture.publish(&["g"]).await;
    let request = airtight_core::log::ReadRequest {
        member: &one.member,
        partitions: &[0],
        after: 4,
        events: 10,
        bytes: 1000,
        max_payload: 1000,
    };
    assert_eq!(one.store.read(&request).await.unwrap_err().code(), "behind_retention");
}

#[tokio::test]
async fn retention_removes_more_than_one_statement_may() {
    let fixture = Fixture::log().await;
    let events: Vec<_> = (0..2_500).map(|n| crate::common::event(&format!("k{n}"))).collect();
    Admin::publish(&fixture.outbox, &events).await.unwrap();
    fixture
        .exec("UPDATE airtight_outbox SET created_at = '2024-01-01T00:00:00.000Z' WHERE seq <= 2200")
        .await;
    let calls = std::sync::Mutex::new(Vec::new());
    let pruned = fixture
        .outbox
        .prune_log(Retention::default(), &|total| calls.lock().unwrap().push(total))
        .await
        .unwrap();
    assert_eq!((pruned.events, pruned.floor), (2_200, 2_200));
    assert_eq!(calls.into_inner().unwrap(), [1_000, 2_000, 2_200]);
}

#[tokio::test]
async fn a_parked_event_outlives_its_row() {
    let (fixture, one) = six().await;
    one.settle(6, vec![(5, dead()), (6, retry_in(3600))], vec![]).await;
    fixture.outbox.prune_log(Retention::default(), &|_| {}).await.unwrap();
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox").await, "0");
    let shown = fixture.outbox.show_parked("one", 5).await.unwrap().unwrap();
    assert_eq!((shown.row.state.as_str(), shown.row.error_code.as_deref()), ("dead", Some("bad")));
    assert_eq!(shown.event.unwrap().payload.as_bytes(), br#"{"key":"e"}"#);
    assert!(Admin::show(&fixture.outbox, "5").await.unwrap().is_some());
    assert_eq!(fixture.outbox.show_parked("one", 1).await.unwrap().map(|shown| shown.row.seq), None);
}

#[tokio::test]
async fn a_person_decides_about_dead_and_unknown_events() {
    let (fixture, one) = six().await;
    let unknown =
        Fate::Unknown { error: airtight_core::Error::retryable(airtight_core::Code::TIMEOUT, "who knows") };
    one.settle(6, vec![(1, dead()), (2, unknown), (3, retry_in(3600)), (4, dead())], vec![]).await;
    let outbox = &fixture.outbox;
    let list = async |filter: ParkedFilter| -> Vec<(i64, String)> {
        let found = outbox.parked(&filter).await.unwrap();
        found.into_iter().map(|parked| (parked.row.seq, parked.row.state)).collect()
    };
    let all = ParkedFilter::default();
    let words: Vec<(i64, String)> = [(1, "dead"), (2, "unknown"), (3, "pending"), (4, "dead")]
        .map(|(seq, word)| (seq, word.to_owned()))
        .into();
    assert_eq!(list(all.clone()).await, words);
    assert_eq!(list(ParkedFilter { dead_only: true, ..all.clone() }).await.len(), 3);
    assert_eq!(list(ParkedFilter { error_code: Some("timeout".into()), ..all.clone() }).await.len(), 2);
    assert_eq!(list(ParkedFilter { after_seq: Some(2), limit: 1, ..all.clone() }).await[0].0, 3);
    assert_eq!(list(ParkedFilter { aggregate_id: Some("d".into()), ..all.clone() }).await[0].0, 4);

    let revision = async || match one.store.consumer_state(&one.member).await.unwrap().revision {
        Revision::At(revision) => revision,
        other => panic!("SQLite always knows the number: {other:?}"),
    };
    let before = revision().await;
    let key = ParkedFilter { aggregate_id: Some("a".into()), ..all.clone() };
    assert_eq!(outbox.retry_parked(&key).await.unwrap(), 1);
    assert!(revision().await > before, "relays must hear of it");
    let due = one.due(&[]).await;
    assert_eq!((due.rows.len(), due.rows[0].row.seq, due.rows[0].attempts), (1, 1, 0));
    // In bulk, an unknown one stays as it is; nor is one touched that is tried again by itself.
    assert_eq!(outbox.retry_parked(&all).await.unwrap(), 1);
    assert_eq!(outbox.discard_parked(&all).await.unwrap(), 0);
    let named = ParkedFilter { seqs: vec![2, 3], ..all.clone() };
    assert_eq!(outbox.discard_parked(&named).await.unwrap(), 1);
    assert_eq!(list(all).await.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [1, 3, 4]);
}

#[tokio::test]
async fn a_retried_event_goes_before_what_waits_behind_it() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "a", "a"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(3, vec![(1, dead()), (2, retry_in(3600)), (3, Fate::Held)], vec![]).await;
    fixture.outbox.retry_parked(&ParkedFilter::default()).await.unwrap();
    let due = one.due(&[]).await;
    assert_eq!(due.rows.iter().map(|row| row.row.seq).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(
        fixture.text("SELECT count(*) FROM airtight_parked WHERE next_retry_at IS NOT NULL").await,
        "1",
        "only the first has a time"
    );
}

#[tokio::test]
async fn the_queues_questions_have_answers_for_a_log() {
    let (fixture, one) = six().await;
    one.settle(5, vec![(2, dead()), (3, retry_in(3600))], vec![]).await;
    let outbox = &fixture.outbox;
    let status = outbox.status().await.unwrap();
    let found = &status.consumers[0];
    assert_eq!((found.name.as_str(), found.offset, found.end, found.lag_events), ("one", 5, 6, 1));
    assert_eq!((found.retrying, found.dead, found.unknown), (1, 1, 0));
    assert!(found.lag_seconds > 3600.0);
    assert_eq!((found.instances.len(), found.instances[0].partitions), (1, 1));
    assert_eq!(found.offsets[0].owner, Some(one.member.id.to_string()));
    assert_eq!((status.relays.len(), status.streams[0].dead), (1, 1));

    let rows = outbox.list(&Filter { limit: 3, newest_first: true, ..Filter::default() }).await.unwrap();
    assert_eq!(
        rows.iter().map(|row| (row.seq, row.state.as_str())).collect::<Vec<_>>(),
        [(6, "stored"), (5, "stored"), (4, "stored")]
    );
    let after = Filter { after_seq: Some(5), aggregate_id: Some("f".into()), ..Filter::default() };
    assert_eq!(outbox.list(&after).await.unwrap().len(), 1);
    let dead = outbox.list(&Filter { states: vec![State::Dead], ..Filter::default() }).await.unwrap();
    assert_eq!((dead.len(), dead[0].seq, dead[0].state.as_str()), (1, 2, "dead"));
    let shown = outbox.show("6").await.unwrap().unwrap();
    assert_eq!((shown.row.state.as_str(), shown.event.unwrap().aggregate_id.as_str()), ("stored", "f"));
    assert!(outbox.show(&shown.row.id).await.unwrap().is_some());
    assert!(outbox.show("none").await.unwrap().is_none());

    assert_eq!(outbox.retry("2").await.unwrap(), Acted::Yes);
    assert_eq!(outbox.retry("3").await.unwrap(), Acted::Refused(State::Pending));
    assert_eq!(outbox.retry("1").await.unwrap(), Acted::Refused(State::Done));
    assert_eq!(outbox.discard("99").await.unwrap(), Acted::NotFound);
    assert_eq!(outbox.retry_dead(&Filter::default()).await.unwrap(), 0);
    assert_eq!(outbox.discard_dead(&Filter::default()).await.unwrap(), 0);
    assert_eq!(outbox.prune(Prune::older_than(Duration::ZERO), &|_| {}).await.unwrap().events, 0);
    assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox").await, "6");
    assert!(outbox.check().await.unwrap().is_empty());
    one.store.attach(&consumer("idle", 1), airtight_core::log::Start::Earliest).await.unwrap();
    let findings = outbox.check().await.unwrap();
    assert!(findings[0].message.contains("`idle` has 6 events"), "{findings:?}");
}

#[tokio::test]
async fn blocked_keys_are_listed_with_what_blocks_them() {
    let fixture = Fixture::log().await;
    fixture.publish(&["a", "a", "a", "b"]).await;
    let one = Follower::join(&fixture.outbox, consumer("one", 1)).await;
    one.settle(4, vec![(1, retry_in(3600)), (2, Fate::Held), (3, Fate::Held), (4, retry_in(1))], vec![])
        .await;
    let blocked = fixture.outbox.blocked(10).await.unwrap();
    assert_eq!(blocked.len(), 1);
    assert_eq!((blocked[0].aggregate_id.as_str(), blocked[0].held), ("a", 2));
    assert_eq!(blocked[0].behind_state, "pending");
    assert_eq!(fixture.outbox.status().await.unwrap().blocked_keys, 1);
}

#[tokio::test]
async fn a_consumer_is_removed_only_when_nobody_works_for_it() {
    let (fixture, one) = six().await;
    let error = fixture.outbox.remove("one").await.unwrap_err();
    assert_eq!(error.code(), "in_use");
    one.store.members().leave(&one.member).await.unwrap();
    fixture.outbox.remove("one").await.unwrap();
    assert!(fixture.outbox.consumers().await.unwrap().is_empty());
    let pruned = fixture.outbox.prune_log(Retention::default(), &|_| {}).await.unwrap();
    assert_eq!((pruned.events, pruned.held_by), (6, None), "retention no longer waits for it");
    assert_eq!(one.store.consumer_state(&one.member).await.unwrap_err().code(), "unknown_consumer");
}

#[tokio::test]
async fn lag_is_counted_per_partition() {
    let fixture = Fixture::log().await;
    let keys: Vec<String> = (0..20).map(|n| format!("k{n}")).collect();
    fixture.publish(&keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let two = Follower::join(&fixture.outbox, consumer("one", 2)).await;
    let read = two.read(0, 100).await;
    let of_zero = read.rows.iter().filter(|row| row.partition == 0).count() as u64;
    two.settle(20, vec![], vec![]).await;
    let found = fixture.outbox.consumers().await.unwrap();
    assert_eq!((found[0].offset, found[0].lag_events), (0, 20 - of_zero));
    assert_eq!(two.store.backlog(&two.member).await.unwrap().unfinished, 20 - of_zero);
    let dry = SeekOptions { dry_run: true, ..SeekOptions::default() };
    let said = fixture.outbox.seek("one", SeekTo::Earliest, dry).await.unwrap();
    assert_eq!((said.again, said.skipped), (of_zero, 0));
    let said = fixture.outbox.seek("one", SeekTo::Latest, dry).await.unwrap();
    assert_eq!((said.again, said.skipped), (0, 20 - of_zero));
}

#[tokio::test]
async fn the_inbox_forgets_after_its_time() {
    let fixture = Fixture::log().await;
    let mut conn = fixture.outbox.pool().acquire().await.unwrap();
    let outbox: &SqliteOutbox = &fixture.outbox;
    for key in ["old", "new"] {
        outbox.inbox().first_time(&mut conn, "one", key).await.unwrap();
    }
    drop(conn);
    fixture.exec("UPDATE airtight_inbox SET seen_at = '2024-01-01T00:00:00.000Z' WHERE key = 'old'").await;
    assert_eq!(outbox.prune_inbox(airtight_core::inbox::KEEP).await.unwrap(), 1);
    assert_eq!(fixture.text("SELECT key FROM airtight_inbox").await, "new");
}
