//! The deliveries that tests give to a sink, and helpers to read its outcomes and what it wrote.

use airtight_core::{Class, Delivery, Error, Event, Op, Outcome, Payload, Position, event::Headers};
use time::OffsetDateTime;

/// An event to test with.
pub fn sample_event(seq: i64, key: &str) -> Event {
    Event {
        id: format!("00000000-0000-7000-8000-{seq:012}"),
        seq,
        stream: "test.stream".into(),
        event_type: "Tested".into(),
        aggregate_type: "Test".into(),
        aggregate_id: key.into(),
        op: Op::Upsert,
        payload: Payload::Json(format!("{{\"n\":{seq}}}").into()),
        headers: Headers::new(),
        occurred_at: OffsetDateTime::UNIX_EPOCH,
        schema_version: 1,
        extra: serde_json::Map::new(),
        row: None,
    }
}

/// The first attempt at a sample event.
pub fn delivery(seq: i64, key: &str) -> Delivery {
    of(sample_event(seq, key))
}

/// The first attempt at this event.
pub fn of(event: Event) -> Delivery {
    let position = Position(event.seq.unsigned_abs());
    Delivery { event, position, attempt: 1, max_attempts: None, lost_leases: 0, replay: None }
}

/// A letter for each outcome: delivered (also duplicate or committed), permanent, retryable, unavailable, skipped, and `?`
/// for unknown.
pub fn letters(outcomes: &[Outcome]) -> String {
    let letter = |outcome: &Outcome| match outcome {
        Outcome::Delivered | Outcome::Duplicate | Outcome::Committed => 'd',
        Outcome::Failed(error) => match error.class() {
            Class::Permanent => 'p',
            Class::Retryable => 'r',
            Class::Unavailable => 'u',
        },
        Outcome::Skipped => 's',
        Outcome::Unknown(_) => '?',
    };
    outcomes.iter().map(letter).collect()
}

/// The error of an outcome.
///
/// # Panics
///
/// If the outcome has no error.
#[track_caller]
pub fn error_of(outcome: &Outcome) -> Error {
    match outcome {
        Outcome::Failed(error) => error.clone(),
        other => panic!("{other:?} is no failure"),
    }
}

/// Undoes `percent_encode`, as a receiver would.
///
/// # Panics
///
/// If the text is not the output of `percent_encode`.
pub fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        rest = behind;
        if let (b'%', [high, low, behind @ ..]) = (first, behind) {
            let hex = String::from_utf8_lossy(&[*high, *low]).into_owned();
            bytes.push(u8::from_str_radix(&hex, 16).expect("two hex digits behind a `%`"));
            rest = behind;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).expect("UTF-8 behind the %XX")
}
