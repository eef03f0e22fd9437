//! Keys that wait: which events they hold up, and which not.

use std::time::{Duration, Instant};

use airtight_core::{
    Code, Error, Limits, Source, Verdict,
    log::{LogAdmin, LogOptions, ParkedFilter},
};

use crate::support::{Fixture, SOON};

/// A key that a dead event blocks must not stand in the way of other keys, nor be asked for all the time.
#[tokio::test]
async fn keys_that_are_blocked_hold_up_no_others() {
    let Some(f) = Fixture::create("blocked").await else { return };
    let soon = Duration::from_millis(1);
    let retry = |after| Verdict::Retry { after, error: Error::retryable(Code::custom("r"), "again") };
    let dead = Verdict::Dead { error: Error::permanent(Code::custom("d"), "no") };
    for n in 0..4 {
        f.publish(&format!("blocked{}", n / 2), n).await;
    }
    let reader = f.reader("c").await;
    // A dead one does not block: the next of its key fails, too, and waits for its time.
    let batch = reader.look().await;
    reader.settle(&batch[..1], &dead).await;
    reader.settle(&batch[2..3], &dead).await;
    reader.settle(&batch[1..2], &retry(soon)).await;
    reader.settle(&batch[3..4], &retry(soon)).await;
    reader.close().await;
    // From now on it does.
    let reader = f.reader_with(LogOptions::consumer("c").reading(|read| read.block_on_dead = true)).await;
    f.publish("free", 1).await;
    let batch = reader.look().await;
    assert_eq!(batch.len(), 1, "{batch:?}");
    reader.settle(&batch, &retry(soon)).await;
    let deadline = Instant::now() + SOON;
    loop {
        assert!(Instant::now() < deadline, "it never comes");
        let batch = reader.log.next(Limits { events: 1, bytes: 1 << 20 }).await.unwrap();
        if let Some(one) = batch.deliveries.first() {
            assert_eq!(one.event.aggregate_id, "free");
            reader.deliver(&batch.deliveries).await;
            break;
        }
        reader.log.wait(Duration::from_millis(50)).await;
    }
    let (mut looks, begin) = (0, Instant::now());
    while begin.elapsed() < Duration::from_secs(2) {
        assert!(reader.look().await.is_empty());
        reader.log.wait(Duration::from_secs(1)).await;
        looks += 1;
    }
    assert!(looks < 40, "{looks} looks in two seconds for what a person must decide");
}

/// While an event retries, its key waits: also if a person has brought an earlier one back.
#[tokio::test]
async fn nothing_of_a_key_passes_an_earlier_event_that_waits() {
    let Some(f) = Fixture::create("passes").await else { return };
    let retry = |seconds| Verdict::Retry {
        after: Duration::from_millis(seconds),
        error: Error::retryable(Code::custom("r"), "again"),
    };
    for n in 1..=3 {
        f.publish("k", n).await;
    }
    let reader = f.reader("c").await;
    let batch = reader.look().await;
    reader.settle(&batch[..1], &Verdict::Dead { error: Error::permanent(Code::custom("d"), "no") }).await;
    reader.settle(&batch[1..2], &retry(1_500)).await;
    reader.settle(&batch[2..3], &Verdict::Released).await;
    assert_eq!(f.outbox.retry_parked(&ParkedFilter::default()).await.unwrap(), 1);
    let first = {
        let deadline = Instant::now() + SOON;
        loop {
            assert!(Instant::now() < deadline, "it never comes");
            let batch = reader.look().await;
            if !batch.is_empty() {
                break batch;
            }
            reader.log.wait(Duration::from_millis(50)).await;
        }
    };
    assert_eq!(first[0].event.seq, 1);
    reader.settle(&first[..1], &retry(60_000)).await;
    reader.settle(&first[1..], &Verdict::Released).await;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let seqs: Vec<i64> = reader.look().await.iter().map(|one| one.event.seq).collect();
        assert!(seqs.is_empty(), "{seqs:?} came while 1 waits for its next try");
        reader.log.wait(Duration::from_millis(50)).await;
    }
}
