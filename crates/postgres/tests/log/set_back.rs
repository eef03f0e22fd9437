//! A log whose numbers are drawn again: `TRUNCATE … RESTART IDENTITY`, `setval`. A consumer that has passed a number
//! would never see the event that has it now, so it stops, and the remedy in its error loses nothing.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use airtight_core::{
    Capabilities, Code, Error, Limits, Source, Verdict,
    admin::Admin,
    log::{LogAdmin, LogOptions, ParkedFilter, SeekOptions, SeekTo},
};

use crate::support::{Fixture, Reader, SOON, event};

const LIMITS: Limits = Limits { events: 100, bytes: 8 << 20 };

const FAULTS: [&str; 3] = [
    "TRUNCATE airtight.outbox RESTART IDENTITY",
    "DELETE FROM airtight.outbox; SELECT setval('airtight.outbox_seq', 1, false)",
    "DELETE FROM airtight.outbox WHERE seq > 20; SELECT setval('airtight.outbox_seq', 20)",
];

/// Beats often, so that the test need not wait for two seconds.
fn quick() -> LogOptions {
    LogOptions::consumer("c").reading(|read| read.lease = Duration::from_millis(800))
}

async fn publish(f: &Fixture, name: &str, count: usize) -> BTreeSet<String> {
    let keys: Vec<String> = (0..count).map(|n| format!("{name}{n}")).collect();
    let events: Vec<_> = keys.iter().map(|key| event(key, 0)).collect();
    Admin::publish(&f.outbox, &events).await.unwrap();
    keys.into_iter().collect()
}

/// Delivers until the consumer stops, or time is up; returns what came and why it stopped.
async fn until_it_stops(reader: &Reader, deadline: Instant) -> (BTreeSet<String>, Option<Error>) {
    let mut came = BTreeSet::new();
    while Instant::now() < deadline {
        match reader.log.next(LIMITS).await {
            Ok(batch) => {
                came.extend(batch.deliveries.iter().map(|one| one.event.aggregate_id.to_string()));
                reader.deliver(&batch.deliveries).await;
                if batch.is_empty() {
                    reader.log.wait(Duration::from_millis(20)).await;
                }
            }
            Err(error) => return (came, Some(error)),
        }
    }
    (came, None)
}

/// Delivers until all of these have come.
async fn until_all_came(reader: &Reader, wanted: &BTreeSet<String>) {
    let deadline = Instant::now() + SOON;
    let mut came = BTreeSet::new();
    while !wanted.is_subset(&came) {
        let missing = wanted.difference(&came).count();
        assert!(Instant::now() < deadline, "{missing} of {} never came", wanted.len());
        let batch = reader.look().await;
        came.extend(batch.iter().map(|one| one.event.aggregate_id.to_string()));
        reader.deliver(&batch).await;
        if batch.is_empty() {
            reader.log.wait(Duration::from_millis(20)).await;
        }
    }
}

/// The remedy that the message names.
async fn seek_earliest(f: &Fixture, error: &Error) {
    assert!(error.remedy() == Some("`airtight consumers seek c --earliest`"), "{error}");
    assert!(!error.message().contains("setval("), "{error}");
    assert!(!error.message().contains("--latest"), "{error}");
    f.outbox.seek("c", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
}

async fn set_back_while_it_runs(test: &str, fault: &str, after: usize) {
    let Some(f) = Fixture::create(test).await else { return };
    publish(&f, "old", 50).await;
    let reader = f.reader_with(quick()).await;
    assert_eq!(reader.seqs(50).await.len(), 50);
    // Whatever a consumer notes down about the log, it has noted down.
    tokio::time::timeout(SOON, settled_at(&f, 50)).await.unwrap();

    f.sql(fault).await;
    let new = publish(&f, "new", after).await;
    let (_, stopped) = until_it_stops(&reader, Instant::now() + Duration::from_secs(5)).await;
    let error = stopped.unwrap_or_else(|| panic!("{fault}, then {after}: it goes on as if nothing were"));
    assert_eq!(error.code(), "sequence_behind", "{error}");
    // It has an end: more events come before anybody looks.
    let late = publish(&f, "late", 60).await;
    let _ = reader.log.close().await;
    let again = f.outbox.log(quick()).open(&Capabilities::default()).await.unwrap_err();
    assert_eq!(again.code(), "sequence_behind", "a restart is no remedy: {again}");
    seek_earliest(&f, &error).await;
    let reader = f.reader_with(quick()).await;
    until_all_came(&reader, &new.union(&late).cloned().collect()).await;
    reader.close().await;
}

async fn settled_at(f: &Fixture, offset: i64) {
    while f.number("SELECT last_seq FROM airtight.partition WHERE grp = 'log:c'").await < offset {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // One beat more: the heartbeat renews the lease at its beginning.
    let expires = "SELECT (extract(epoch FROM expires_at) * 1000)::bigint FROM airtight.relay";
    for _ in 0..2 {
        let before = f.number(expires).await;
        while f.number(expires).await == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn a_running_consumer_stops_when_the_sequence_falls_behind_it() {
    for (n, fault) in FAULTS.into_iter().enumerate() {
        set_back_while_it_runs(&format!("set_back_behind_{n}"), fault, 10).await;
    }
}

#[tokio::test]
async fn a_running_consumer_stops_when_its_numbers_were_drawn_again_and_the_sequence_has_passed_it() {
    for (n, fault) in FAULTS.into_iter().enumerate() {
        set_back_while_it_runs(&format!("set_back_passed_{n}"), fault, 80).await;
    }
}

#[tokio::test]
async fn a_consumer_that_was_stopped_is_refused_whether_or_not_the_sequence_has_passed_it() {
    for (n, fault) in FAULTS.into_iter().enumerate() {
        for after in [10, 80] {
            let Some(f) = Fixture::create(&format!("set_back_stopped_{n}_{after}")).await else { return };
            publish(&f, "old", 50).await;
            let reader = f.reader_with(quick()).await;
            assert_eq!(reader.seqs(50).await.len(), 50);
            tokio::time::timeout(SOON, settled_at(&f, 50)).await.unwrap();
            reader.close().await;

            f.sql(fault).await;
            let new = publish(&f, "new", after).await;
            let Err(error) = f.outbox.log(quick()).open(&Capabilities::default()).await else {
                panic!("{fault}, then {after}: it starts as if nothing were")
            };
            assert_eq!(error.code(), "sequence_behind", "{error}");
            seek_earliest(&f, &error).await;
            let reader = f.reader_with(quick()).await;
            until_all_came(&reader, &new).await;
            reader.close().await;
        }
    }
}

#[tokio::test]
async fn seeking_to_the_end_of_a_log_that_was_set_back_says_what_it_skips() {
    let Some(f) = Fixture::create("set_back_latest").await else { return };
    publish(&f, "old", 50).await;
    let reader = f.reader_with(quick()).await;
    assert_eq!(reader.seqs(50).await.len(), 50);
    tokio::time::timeout(SOON, settled_at(&f, 50)).await.unwrap();
    reader.close().await;
    f.sql(FAULTS[0]).await;
    publish(&f, "new", 10).await;
    let dry = SeekOptions { dry_run: true, ..SeekOptions::default() };
    let sought = f.outbox.seek("c", SeekTo::Latest, dry).await.unwrap();
    assert_eq!((sought.to, sought.skipped, sought.again), (10, 10, 0), "{sought:?}");
    let sought = f.outbox.seek("c", SeekTo::Earliest, dry).await.unwrap();
    assert_eq!((sought.to, sought.skipped), (0, 0), "{sought:?}");
}

/// Retention has noted down up to where it removed events. After a restart of the numbers that means nothing.
#[tokio::test]
async fn the_way_back_leads_below_what_retention_had_removed() {
    for after in [10, 80] {
        let Some(f) = Fixture::create(&format!("set_back_floor_{after}")).await else { return };
        publish(&f, "old", 50).await;
        let reader = f.reader_with(quick()).await;
        assert_eq!(reader.seqs(50).await.len(), 50);
        f.sql("UPDATE airtight.log SET floor = 40, floor_time = now(); DELETE FROM airtight.outbox WHERE seq <= 40")
            .await;
        tokio::time::timeout(SOON, settled_at(&f, 50)).await.unwrap();
        f.sql(FAULTS[0]).await;
        let new = publish(&f, "new", after).await;
        let (_, stopped) = until_it_stops(&reader, Instant::now() + Duration::from_secs(5)).await;
        let _ = reader.log.close().await;
        seek_earliest(&f, &stopped.expect("it stops")).await;
        let reader = f.reader_with(quick()).await;
        until_all_came(&reader, &new).await;
        reader.close().await;
    }
}

/// Parked events are copies: the remedy must not take them for events that come again, nor new events, which have
/// their numbers, for parked ones.
#[tokio::test]
async fn what_was_parked_before_is_delivered_as_well_as_what_has_its_number_now() {
    let Some(f) = Fixture::create("set_back_parked").await else { return };
    publish(&f, "old", 20).await;
    let reader = f.reader_with(quick()).await;
    let batch = reader.look().await;
    assert_eq!(batch.len(), 20);
    let later = Duration::from_secs(4);
    reader.settle(&batch[5..6], &Verdict::Dead { error: Error::permanent(Code::custom("bad"), "bad") }).await;
    reader
        .settle(
            &batch[7..8],
            &Verdict::Retry { after: later, error: Error::retryable(Code::custom("x"), "x") },
        )
        .await;
    let others: Vec<_> = batch.into_iter().enumerate().filter(|(n, _)| *n != 5 && *n != 7).collect();
    let others: Vec<_> = others.into_iter().map(|(_, one)| one).collect();
    reader.deliver(&others).await;
    tokio::time::timeout(SOON, settled_at(&f, 20)).await.unwrap();

    f.sql(FAULTS[0]).await;
    let mut wanted = publish(&f, "new", 30).await;
    let (came, stopped) = until_it_stops(&reader, Instant::now() + Duration::from_secs(5)).await;
    let _ = reader.log.close().await;
    seek_earliest(&f, &stopped.expect("it stops")).await;
    let parked = f.outbox.parked(&ParkedFilter::default()).await.unwrap();
    let keys: Vec<&str> = parked.iter().map(|one| one.row.aggregate_id.as_str()).collect();
    assert!(keys.contains(&"old5"), "a dead letter stays: {keys:?}");
    assert_eq!(
        f.outbox.retry_parked(&ParkedFilter { dead_only: true, ..ParkedFilter::default() }).await.unwrap(),
        1
    );
    wanted.insert("old5".into());
    if !came.contains("old7") {
        wanted.insert("old7".into());
    }
    let reader = f.reader_with(quick()).await;
    until_all_came(&reader, &wanted).await;
    reader.close().await;
}

/// What looks alike and is none: retention, rows that somebody removed, a sequence that was moved on or altered.
#[tokio::test]
async fn a_log_that_only_lost_rows_or_moved_on_is_followed_further() {
    let Some(f) = Fixture::create("set_back_not").await else { return };
    publish(&f, "old", 50).await;
    let reader = f.reader_with(quick()).await;
    assert_eq!(reader.seqs(50).await.len(), 50);
    for (n, harmless) in [
        "UPDATE airtight.log SET floor = 50; DELETE FROM airtight.outbox",
        "DELETE FROM airtight.outbox WHERE seq > 50",
        "SELECT setval('airtight.outbox_seq', 5000)",
        "ALTER SEQUENCE airtight.outbox_seq NO CYCLE",
        "TRUNCATE airtight.outbox",
        "UPDATE airtight.outbox SET headers = '{\"by\": \"hand\"}'",
    ]
    .into_iter()
    .enumerate()
    {
        f.sql(harmless).await;
        let new = publish(&f, &format!("n{n}-"), 3).await;
        until_all_came(&reader, &new).await;
        tokio::time::timeout(SOON, settled_at(&f, 0)).await.unwrap();
    }
    reader.close().await;
    let reader = f.reader_with(quick()).await;
    let new = publish(&f, "end", 3).await;
    until_all_came(&reader, &new).await;
    reader.close().await;
}
