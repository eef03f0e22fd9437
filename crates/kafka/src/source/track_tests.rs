use std::collections::BTreeSet;

use airtight_core::{Format, settings::bad};
use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::KafkaConnection;

fn track(change: impl FnOnce(&mut KafkaSourceConfig)) -> GroupTracker {
    let mut config = KafkaSourceConfig::new(KafkaConnection::new("h:1"), ["t"], "g");
    config.format = Format::Raw;
    change(&mut config);
    GroupTracker::new(Arc::new(config))
}

fn topic_partition() -> TopicPartition {
    TopicPartition::new("t", 0)
}

fn raw(offset: i64, key: &str) -> Raw {
    Raw {
        topic_partition: topic_partition(),
        offset,
        written_at: None,
        key: Some(Bytes::copy_from_slice(key.as_bytes())),
        value: Some(Bytes::from_static(b"1")),
        headers: Some(Vec::new()),
    }
}

fn assigned(track: &mut GroupTracker, offset: i64) {
    track.assign(&topic_partition(), offset, Some(offset), Ownership::forever());
}

fn all(track: &mut GroupTracker, now: Instant) -> Vec<Delivery> {
    track.next(Limits { events: 1_000, bytes: 1 << 20 }, now).deliveries
}

fn settle(track: &mut GroupTracker, delivery: &Delivery, verdict: Verdict, now: Instant) -> Settled {
    track.settle(&[Settlement { position: delivery.position, verdict }], now)
}

fn retry(after: Duration) -> Verdict {
    Verdict::Retry { after, error: bad("x", "failed") }
}

#[test]
fn what_was_settled_and_not_committed_is_remembered_when_the_partition_comes_back() {
    let now = Instant::now();
    let mut track = track(|_| {});
    assigned(&mut track, 10);
    for offset in 10..20 {
        track.admit(raw(offset, "k"), now);
    }
    let out = all(&mut track, now);
    for delivery in &out[..4] {
        settle(&mut track, delivery, Verdict::Delivered, now);
    }
    assert_eq!(track.to_commit(None), [(topic_partition(), 14)]);
    // Lost with nothing committed.
    track.drop_partition(&topic_partition());
    assert_eq!(settle(&mut track, &out[4], Verdict::Delivered, now), Settled { applied: 0, fenced: 1 });
    assert_eq!(track.held(), (0, 0));
    // Nobody has gone further; somebody has gone a bit; somebody further than we; somebody has gone back to replay.
    for (committed, resumed) in [(10, 14), (12, 14), (17, 17), (3, 3)] {
        assert_eq!(track.resume_at(&topic_partition(), committed), resumed, "{committed}");
    }
    let offset = track.resume_at(&topic_partition(), 10);
    track.assign(&topic_partition(), offset, Some(10), Ownership::forever());
    assert_eq!(track.to_commit(None), [(topic_partition(), 14)], "to be committed at the first chance");
    // What was handed out in the partition's former life is not ours to settle in this one.
    assert_eq!(settle(&mut track, &out[5], Verdict::Delivered, now), Settled { applied: 0, fenced: 1 });
    track.admit(raw(14, "k"), now);
    assert_eq!(all(&mut track, now).len(), 1);
}

#[test]
fn a_message_from_before_the_place_is_not_taken_in_twice() {
    let now = Instant::now();
    let mut track = track(|_| {});
    assigned(&mut track, 5);
    for offset in [4, 5, 5, 6, 5] {
        track.admit(raw(offset, "k"), now);
    }
    assert_eq!(all(&mut track, now).len(), 2);
    assert_eq!(track.held().0, 2);
}

#[test]
fn retries_that_are_not_due_do_not_keep_new_events_out() {
    let now = Instant::now();
    let mut track = track(|config| {
        config.order = Order::None;
        config.retry = Retry::Topic("r".into());
        config.buffer_events = 40;
    });
    let retries = TopicPartition::new("r", 0);
    assigned(&mut track, 0);
    track.assign(&retries, 0, Some(0), Ownership::forever());
    let due = (SystemTime::now() + Duration::from_secs(60)).duration_since(UNIX_EPOCH).unwrap().as_millis();
    for offset in 0..10 {
        let mut message = raw(offset, "k");
        message.topic_partition = retries.clone();
        let headers = [
            ("airtight-topic", "t".to_owned()),
            ("airtight-partition", "0".to_owned()),
            ("airtight-offset", offset.to_string()),
            ("airtight-group", if offset == 9 { "another" } else { "g" }.to_owned()),
            ("airtight-due", due.to_string()),
        ];
        let header = |(name, value): (&str, String)| (name.to_owned(), Some(Bytes::from(value)));
        message.headers = Some(headers.map(header).to_vec());
        track.admit(message, now);
    }
    assert_eq!(track.held().0, 9, "another group's retry is not ours");
    assert!(track.next_due().is_some());
    assert!(all(&mut track, now).is_empty());
    let mut message = raw(10, "k");
    message.topic_partition = retries.clone();
    track.admit(message, now);
    assert_eq!(track.pauses(), (vec![retries], vec![]), "only the retry topic is full");
    track.admit(raw(0, "k"), now);
    // A batch is of one partition: the new event, and the one that has no due time.
    assert_eq!((all(&mut track, now).len(), all(&mut track, now).len()), (1, 1));
    assert_eq!(all(&mut track, now + Duration::from_secs(61)).len(), 9);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Admit(u8),
    Next(usize),
    /// Which of those that are out, and what becomes of it.
    Settle(prop::sample::Index, u8),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u8..4).prop_map(Step::Admit),
        (1usize..8).prop_map(Step::Next),
        (any::<prop::sample::Index>(), 0u8..4).prop_map(|(which, verdict)| Step::Settle(which, verdict)),
        (0u64..50).prop_map(Step::Pass),
    ]
}

proptest! {
    /// Messages, batches and verdicts in any order: the offset never passes an unsettled event, no event is out
    /// twice, none of a key is handed out past one that is to be tried again, and in the end all have been.
    #[test]
    fn the_offset_is_a_prefix_and_a_failed_event_holds_its_key(steps in prop::collection::vec(step(), 1..200)) {
        let mut now = Instant::now();
        let mut track = track(|_| {});
        assigned(&mut track, 0);
        let mut keys: Vec<String> = Vec::new();
        let mut out: Vec<Delivery> = Vec::new();
        let mut done: BTreeSet<i64> = BTreeSet::new();
        let mut failed: BTreeSet<i64> = BTreeSet::new();
        let mut attempts: HashMap<i64, u32> = HashMap::new();
        let mut finish = steps.clone();
        finish.extend(std::iter::repeat_n([Step::Pass(60), Step::Next(1_000)], 400).flatten());
        for (at, step) in finish.into_iter().enumerate() {
            let ending = at >= steps.len();
            match step {
                Step::Admit(key) => {
                    let offset = i64::try_from(keys.len()).unwrap();
                    keys.push(key.to_string());
                    track.admit(raw(offset, &key.to_string()), now);
                }
                Step::Pass(millis) => now += Duration::from_millis(millis),
                Step::Next(events) => {
                    for delivery in track.next(Limits { events, bytes: 1 << 20 }, now).deliveries {
                        let offset = delivery.event.seq;
                        prop_assert!(!done.contains(&offset) && !out.iter().any(|other| other.event.seq == offset));
                        prop_assert_eq!(delivery.attempt, attempts.get(&offset).copied().unwrap_or(0) + 1);
                        let key = &keys[usize::try_from(offset).unwrap()];
                        let held = failed.iter().any(|f| *f < offset && keys[usize::try_from(*f).unwrap()] == *key);
                        prop_assert!(!held, "{} of {} was handed out past a failed one", offset, key);
                        out.push(delivery);
                    }
                    if ending {
                        for delivery in std::mem::take(&mut out) {
                            settle(&mut track, &delivery, Verdict::Delivered, now);
                            done.insert(delivery.event.seq);
                            failed.remove(&delivery.event.seq);
                        }
                    }
                }
                Step::Settle(which, verdict) => {
                    if out.is_empty() { continue; }
                    let delivery = out.remove(which.index(out.len()));
                    let offset = delivery.event.seq;
                    let verdict = match verdict {
                        0 => Verdict::Released,
                        1 => retry(Duration::from_millis(30)),
                        _ => Verdict::Delivered,
                    };
                    match &verdict {
                        Verdict::Delivered => {
                            done.insert(offset);
                            failed.remove(&offset);
                        }
                        Verdict::Retry { .. } => {
                            *attempts.entry(offset).or_default() += 1;
                            failed.insert(offset);
                        }
                        _ => {}
                    }
                    prop_assert_eq!(settle(&mut track, &delivery, verdict, now).applied, 1);
                }
            }
            let first_open = (0..i64::try_from(keys.len()).unwrap()).find(|offset| !done.contains(offset));
            let expected = first_open.unwrap_or(i64::try_from(keys.len()).unwrap());
            prop_assert_eq!(track.offsets(), vec![(topic_partition(), expected)]);
        }
        prop_assert_eq!(done.len(), keys.len(), "some were never handed out");
        prop_assert_eq!(track.held(), (0, 0));
    }
}
