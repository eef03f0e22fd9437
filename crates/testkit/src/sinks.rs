//! The conformance suite for sinks: the contract of [`airtight_core::Sink`], checked from the outside.
//!
//! A sink's crate says how to make the sink and how to read back what arrived ([`SinkUnderTest`]), and which hooks
//! control the destination ([`Hooks`]): stop it, make it refuse one event, make it refuse every client. With more hooks,
//! more is checked. Every check has a name; all of them run, and [`conformance`] reports all that failed. A check that
//! needs a hook which the test does not have is recorded in the [ledger](crate::ledger).
//!
//! Keys and ids are new in every run, so a destination may hold events of earlier runs.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

use airtight_core::{Class, Delivery, Event, Op, Outcome, Payload, Position, Sink, event::Headers};
use async_trait::async_trait;
use base64::{Engine, engine::general_purpose::STANDARD};
use futures::future::join_all;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::ledger::cannot;

/// How often the suite checks while it waits.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A sink must have its own timeouts; a check that takes longer than this has found a sink without one.
const CHECK_DEADLINE: Duration = Duration::from_secs(60);

/// A sink, its destination, and the hooks that control the destination.
#[async_trait]
pub trait SinkUnderTest: Send + Sync {
    /// The sink.
    type Sink: Sink;

    /// A new sink on the same destination, not opened yet.
    async fn sink(&self) -> Self::Sink;

    /// What the destination has accepted, in order of arrival (at least per key), including repeats. The order is the
    /// destination's own: a list that is sorted by `seq` would hide errors. A destination may overwrite an event that
    /// arrives again; then the event is returned once.
    async fn received(&self) -> Vec<Received>;

    /// Which of the hooks below work.
    fn hooks(&self) -> Hooks {
        Hooks::default()
    }

    /// Stops the destination ([`Hooks::can_restart`]). What it has accepted stays.
    async fn stop(&self) {}

    /// Starts it again, at the same address.
    async fn start(&self) {}

    /// Makes the destination refuse this event permanently ([`Hooks::can_refuse`]), or no event. The sink must report a
    /// permanent error for the event.
    async fn refuse(&self, _event_id: Option<&str>) {}

    /// Makes the destination refuse every client, as with a wrong password ([`Hooks::can_be_unavailable`]), or
    /// accept clients again. The sink must report an unavailable error.
    async fn turn_away(&self, _everyone: bool) {}

    /// The size of the large payload: below the destination's own limit.
    fn large_payload(&self) -> usize {
        512 * 1024
    }

    /// How long an event that was reported delivered may take to be readable, and a destination to be up
    /// again.
    fn patience(&self) -> Duration {
        Duration::from_secs(15)
    }
}

/// Which hooks of a [`SinkUnderTest`] work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hooks {
    /// [`SinkUnderTest::stop`] and [`SinkUnderTest::start`].
    pub can_restart: bool,
    /// [`SinkUnderTest::refuse`].
    pub can_refuse: bool,
    /// [`SinkUnderTest::turn_away`].
    pub can_be_unavailable: bool,
}

/// An event as the destination received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// The event's id.
    pub id: String,
    /// Its key.
    pub key: String,
    /// Its number in the outbox.
    pub seq: i64,
    /// Its payload; empty where it has none.
    pub body: Vec<u8>,
}

impl Received {
    /// Reads a JSON envelope; the payload byte for byte. None when it is not one.
    pub fn from_envelope(text: &[u8]) -> Option<Self> {
        let fields: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(text).ok()?;
        let string = |name| serde_json::from_str::<String>(fields.get(name)?.get()).ok();
        let body = match (fields.get("payload"), string("payloadBase64")) {
            (Some(payload), None) if payload.get() == "null" => Vec::new(),
            (Some(payload), None) => payload.get().as_bytes().to_vec(),
            (Some(payload), Some(text)) if payload.get() == "null" => STANDARD.decode(text).ok()?,
            _ => return None,
        };
        let seq = fields.get("seq")?.get().parse().ok()?;
        Some(Self { id: string("eventId")?, key: string("aggregateId")?, seq, body })
    }
}

impl From<&Event> for Received {
    fn from(event: &Event) -> Self {
        Self {
            id: event.id.clone(),
            key: event.aggregate_id.clone(),
            seq: event.seq,
            body: event.payload.as_bytes().to_vec(),
        }
    }
}

/// A check that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The check's name.
    pub check: &'static str,
    /// What was seen, and what should have been.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.message)
    }
}

/// Runs every check that the hooks allow, and panics with all that failed.
pub async fn conformance<T: SinkUnderTest>(t: T) {
    let failures = failures(&t).await;
    let list: Vec<String> = failures.iter().map(|failure| format!("\n  - {failure}")).collect();
    assert!(failures.is_empty(), "the sink does not keep its contract:{}", list.concat());
}

/// Runs every check that the hooks allow, and returns those that failed.
pub async fn failures<T: SinkUnderTest>(t: &T) -> Vec<Failure> {
    let suite = Suite { t, run: Uuid::now_v7().simple().to_string(), seq: AtomicI64::new(1) };
    let hooks = t.hooks();
    let mut failures = Vec::new();
    macro_rules! check {
        ($name:ident, $allowed:expr) => {
            if $allowed {
                let checked = tokio::time::timeout(CHECK_DEADLINE, suite.$name());
                let checked = checked.await.unwrap_or_else(|_| {
                    Err(format!(
                        "did not finish within {CHECK_DEADLINE:?}: the sink needs timeouts of its own"
                    ))
                });
                if let Err(message) = checked {
                    failures.push(Failure { check: stringify!($name), message });
                }
            } else {
                cannot(stringify!($name), stringify!($allowed));
            }
        };
    }
    check!(empty_batch_is_answered_with_nothing, true);
    check!(what_is_reported_delivered_is_there, true);
    check!(every_kind_of_event_arrives_unchanged, true);
    check!(keys_keep_their_order, true);
    check!(duplicates_are_harmless, true);
    check!(calls_run_side_by_side, true);
    check!(a_second_sink_shares_the_destination, true);
    check!(a_refused_event_is_permanent_and_alone, hooks.can_refuse);
    check!(a_failure_ends_the_prefix_of_its_key, hooks.can_refuse);
    check!(a_destination_that_turns_everyone_away_is_unavailable, hooks.can_be_unavailable);
    check!(a_destination_that_is_down_comes_back_by_itself, hooks.can_restart);
    check!(closing_loses_nothing, true);
    failures
}

type Checked<T = ()> = Result<T, String>;

struct Suite<'a, T> {
    t: &'a T,
    run: String,
    seq: AtomicI64,
}

impl<T: SinkUnderTest> Suite<'_, T> {
    // The checks.

    async fn empty_batch_is_answered_with_nothing(&self) -> Checked {
        let sink = self.open().await?;
        let outcomes = sink.deliver(&[]).await;
        ensure(outcomes.is_empty(), || format!("no events, but the outcomes {outcomes:?}"))
    }

    async fn what_is_reported_delivered_is_there(&self) -> Checked {
        let sink = self.open().await?;
        let events = self.events(50, &["a", "b", "c", "d", "e"]);
        self.deliver_all(&sink, &events).await?;
        self.all_there(&events).await?;
        Ok(())
    }

    async fn every_kind_of_event_arrives_unchanged(&self) -> Checked {
        let sink = self.open().await?;
        let mut events = self.events(1, &["plain"]);
        let mut add = |key: &str, op: Op, payload: Payload| {
            let mut delivery = self.event(key);
            delivery.event.op = op;
            delivery.event.payload = payload;
            events.push(delivery);
        };
        let json = |text: &str| Payload::Json(text.to_owned().into());
        for key in [
            "",
            " ",
            "naïve ключ 鍵 🔑",
            "a/b?c=d&e#f%20",
            "line\r\nbreak\ttab",
            "quote\"'\\",
            "x.*.>",
            &"long".repeat(500),
        ] {
            add(key, Op::Upsert, json("{\"key\":\"odd\"}"));
        }
        add("exact", Op::Upsert, json("{\"b\":1.10,  \"a\":[1e2, null], \"ü\": \"\\u00fc 鍵\"}"));
        add("scalar", Op::Upsert, json("42"));
        add("none", Op::Upsert, Payload::None);
        add("no bytes", Op::Upsert, Payload::Bytes(bytes::Bytes::new()));
        add("bytes", Op::Upsert, Payload::Bytes((0..=255u8).collect::<Vec<u8>>().into()));
        add("deleted", Op::Delete, Payload::None);
        add("deleted with a reason", Op::Delete, json("{\"reason\":\"asked to\"}"));
        let size = self.t.large_payload();
        add("large", Op::Upsert, json(&format!("{{\"x\":\"{}\"}}", "x".repeat(size.saturating_sub(8)))));
        self.deliver_all(&sink, &events).await?;
        let received = self.all_there(&events).await?;
        for delivery in &events {
            let expected = Received::from(&delivery.event);
            for found in received.iter().filter(|found| found.id == expected.id) {
                ensure(*found == expected, || {
                    format!("the event {} arrived as {}", brief(&expected), brief(found))
                })?;
            }
        }
        Ok(())
    }

    async fn keys_keep_their_order(&self) -> Checked {
        let sink = self.open().await?;
        // Uneven turns, so that batches hold several events of one key and begin in the middle of others.
        let mut events = Vec::new();
        for turn in 0..40 {
            let key = ["a", "b", "c"][turn % 7 % 3];
            events.extend(self.events(1 + turn % 4, &[key]));
        }
        self.deliver_all(&sink, &events).await?;
        let received = self.all_there(&events).await?;
        in_order(&events, &received)
    }

    async fn duplicates_are_harmless(&self) -> Checked {
        let sink = self.open().await?;
        let mut events = self.events(3, &["twice"]);
        self.deliver_all(&sink, &events).await?;
        for delivery in &mut events {
            delivery.attempt += 1;
        }
        self.deliver_all(&sink, &events).await?;
        self.all_there(&events).await?;
        // And the key goes on.
        let more = self.events(1, &["twice"]);
        self.deliver_all(&sink, &more).await?;
        self.all_there(&more).await?;
        Ok(())
    }

    async fn calls_run_side_by_side(&self) -> Checked {
        let sink = self.open().await?;
        let concurrency = sink.capabilities().concurrency;
        ensure(concurrency > 0, || {
            "capabilities().concurrency is 0: nothing could ever be delivered".into()
        })?;
        let keys: Vec<String> = (0..concurrency.min(64)).map(|number| format!("key-{number}")).collect();
        let batches: Vec<Vec<Delivery>> = keys.iter().map(|key| self.events(5, &[key])).collect();
        for done in join_all(batches.iter().map(|events| self.deliver_all(&sink, events))).await {
            done?;
        }
        let events = batches.concat();
        let received = self.all_there(&events).await?;
        in_order(&events, &received)
    }

    async fn a_second_sink_shares_the_destination(&self) -> Checked {
        let (one, other) = (self.open().await?, self.open().await?);
        let (here, there) = (self.events(10, &["one"]), self.events(10, &["other"]));
        let (done, too) = futures::join!(self.deliver_all(&one, &here), self.deliver_all(&other, &there));
        done.and(too)?;
        self.all_there(&[here, there].concat()).await?;
        Ok(())
    }

    async fn a_refused_event_is_permanent_and_alone(&self) -> Checked {
        let sink = self.open().await?;
        let events = self.events(3, &["x", "y", "z"]);
        self.t.refuse(Some(&events[1].event.id)).await;
        let outcomes = self.deliver_in_batches(&sink, &events).await;
        self.t.refuse(None).await;
        let outcomes = outcomes?;
        match &outcomes[1] {
            Outcome::Failed(error) if error.class() == Class::Permanent => {}
            other => {
                return Err(format!(
                    "an event that the destination refuses for good is {other:?}, not a permanent failure"
                ));
            }
        }
        for at in [0, 2] {
            ensure(outcomes[at].is_delivered(), || {
                format!("an event of another key than the refused one is {:?}, not delivered", outcomes[at])
            })?;
        }
        let received = self.all_there(&[events[0].clone(), events[2].clone()]).await?;
        ensure(received.iter().all(|found| found.id != events[1].event.id), || {
            "the refused event is at the destination".into()
        })
    }

    async fn a_failure_ends_the_prefix_of_its_key(&self) -> Checked {
        let sink = self.open().await?;
        let capabilities = sink.capabilities();
        if !capabilities.prefix_per_key || capabilities.max_batch_events < 5 {
            cannot("a_failure_ends_the_prefix_of_its_key", "prefix_per_key, or a batch of 5 events");
            return Ok(());
        }
        // Events 0, 1, 3 and 4 are of one key; 1 is refused.
        let mut events = self.events(5, &["prefix"]);
        events[2] = self.event("other");
        self.t.refuse(Some(&events[1].event.id)).await;
        let outcomes = sink.deliver(&events).await;
        self.t.refuse(None).await;
        one_each(&events, &outcomes)?;
        ensure(outcomes[0].is_delivered() && outcomes[2].is_delivered(), || {
            format!("events before the refused one, and of other keys, are to be delivered: {outcomes:?}")
        })?;
        ensure(!outcomes[3..].iter().any(Outcome::is_delivered), || {
            format!("after a failed event, later ones of its key are reported delivered: {outcomes:?}")
        })?;
        let received = self.all_there(&[events[0].clone(), events[2].clone()]).await?;
        for skipped in &events[3..] {
            ensure(received.iter().all(|found| found.id != skipped.event.id), || {
                format!("event {} was sent though an earlier one of its key had failed", skipped.event.seq)
            })?;
        }
        // And they can come again.
        self.deliver_all(&sink, &events[3..]).await?;
        let received = self.all_there(&events[3..]).await?;
        in_order(&[&events[..1], &events[3..]].concat(), &received)
    }

    async fn a_destination_that_turns_everyone_away_is_unavailable(&self) -> Checked {
        let sink = self.open().await?;
        let events = self.events(4, &["away-a", "away-b"]);
        self.t.turn_away(true).await;
        let outcomes = self.deliver_in_batches(&sink, &events).await;
        self.t.turn_away(false).await;
        for outcome in outcomes? {
            match &outcome {
                Outcome::Failed(error) if error.class() == Class::Unavailable => {}
                Outcome::Skipped => {}
                other => {
                    return Err(format!(
                        "while everyone is turned away an event is {other:?}, not unavailable"
                    ));
                }
            }
        }
        self.deliver_until_up(&sink, &events).await?;
        self.all_there(&events).await?;
        Ok(())
    }

    async fn a_destination_that_is_down_comes_back_by_itself(&self) -> Checked {
        let sink = self.open().await?;
        let before = self.events(4, &["down-a", "down-b"]);
        self.deliver_all(&sink, &before).await?;
        self.t.stop().await;
        let during = self.events(4, &["down-a", "down-b"]);
        let outcomes = self.deliver_in_batches(&sink, &during).await;
        let opened = self.t.sink().await.open().await;
        self.t.start().await;
        for outcome in outcomes? {
            match &outcome {
                Outcome::Failed(error) if error.class() != Class::Permanent => {}
                Outcome::Skipped => {}
                other => {
                    return Err(format!(
                        "with the destination down an event is {other:?}, not unavailable or retryable"
                    ));
                }
            }
        }
        if let Err(error) = opened {
            ensure(error.class() != Class::Permanent, || {
                format!(
                    "with the destination down `open` fails for good, which would stop the relay: {error:?}"
                )
            })?;
        }
        self.deliver_until_up(&sink, &during).await?;
        let all = [before, during].concat();
        let received = self.all_there(&all).await?;
        in_order(&all, &received)
    }

    async fn closing_loses_nothing(&self) -> Checked {
        let sink = self.open().await?;
        let events = self.events(10, &["last"]);
        self.deliver_all(&sink, &events).await?;
        sink.close().await.map_err(|error| format!("close failed: {error:?}"))?;
        drop(sink);
        let received = self.all_there(&events).await?;
        // Nothing of this run is there that was not sent.
        let highest = self.seq.load(Ordering::Relaxed);
        let strange = received.iter().find(|found| !(1..highest).contains(&found.seq));
        ensure(strange.is_none(), || {
            format!("at the destination is {}, which was never sent", strange.map(brief).unwrap_or_default())
        })
    }

    // What they are made of.

    async fn open(&self) -> Checked<T::Sink> {
        let sink = self.t.sink().await;
        sink.open().await.map_err(|error| format!("open failed: {error:?}"))?;
        Ok(sink)
    }

    /// New events, their keys in turns. Keys belong to this run.
    fn events(&self, count: usize, keys: &[&str]) -> Vec<Delivery> {
        (0..count).map(|n| self.event(keys[n % keys.len()])).collect()
    }

    fn event(&self, key: &str) -> Delivery {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed);
        let event = Event {
            id: Uuid::now_v7().to_string(),
            seq,
            stream: "conformance.stream".into(),
            event_type: "Tested".into(),
            aggregate_type: "Test".into(),
            aggregate_id: format!("{}:{key}", self.run),
            op: Op::Upsert,
            payload: Payload::Json(format!("{{\"n\":{seq}}}").into()),
            headers: Headers::from([("source".to_owned(), "conformance".to_owned())]),
            occurred_at: OffsetDateTime::now_utc(),
            schema_version: 1,
            extra: serde_json::Map::new(),
            row: None,
        };
        let position = Position(seq.unsigned_abs());
        Delivery { event, position, attempt: 1, max_attempts: None, lost_leases: 0, replay: None }
    }

    /// Delivers in batches as a relay would make them: within the declared bounds, and with one event per
    /// key where the sink asks for that.
    async fn deliver_in_batches(&self, sink: &T::Sink, events: &[Delivery]) -> Checked<Vec<Outcome>> {
        let capabilities = sink.capabilities();
        let mut outcomes = Vec::new();
        let mut rest = events;
        while !rest.is_empty() {
            let mut keys = HashSet::new();
            let mut bytes = 0;
            let fits = rest.iter().take(capabilities.max_batch_events.max(1)).take_while(|next| {
                bytes += next.event.size();
                let new = keys.insert(next.event.aggregate_id.as_str());
                bytes <= capabilities.max_batch_bytes && (new || capabilities.prefix_per_key)
            });
            // One always goes, however large.
            let (batch, behind) = rest.split_at(fits.count().max(1));
            let answered = sink.deliver(batch).await;
            one_each(batch, &answered)?;
            outcomes.extend(answered);
            rest = behind;
        }
        Ok(outcomes)
    }

    async fn deliver_all(&self, sink: &T::Sink, events: &[Delivery]) -> Checked {
        let outcomes = self.deliver_in_batches(sink, events).await?;
        let failed = events.iter().zip(&outcomes).find(|(_, outcome)| !outcome.is_delivered());
        match failed {
            None => Ok(()),
            Some((delivery, outcome)) => Err(format!(
                "the event {} is {outcome:?}, not delivered",
                brief(&Received::from(&delivery.event))
            )),
        }
    }

    /// Delivers with the same sink until everything is delivered, as a relay with its circuit would.
    async fn deliver_until_up(&self, sink: &T::Sink, events: &[Delivery]) -> Checked {
        let mut waiting = events.to_vec();
        let delivered = self.wait(async || {
            if sink.open().await.is_err() {
                return Err("the sink does not open".to_owned());
            }
            // One at a time: an event is out of order when a later one of its key went first.
            while let Some(next) = waiting.first() {
                match sink.deliver(std::slice::from_ref(next)).await.pop() {
                    Some(outcome) if outcome.is_delivered() => drop(waiting.remove(0)),
                    other => return Err(format!("an event is {other:?}")),
                }
            }
            Ok(())
        });
        delivered.await.map_err(|last| format!("the destination is up again, but with the same sink {last}"))
    }

    /// Waits until all of these have arrived; returns what is there of this run.
    async fn all_there(&self, events: &[Delivery]) -> Checked<Vec<Received>> {
        let mut found = Vec::new();
        let arrived = self.wait(async || {
            found = self.t.received().await;
            found.retain(|received| received.key.starts_with(&self.run));
            let ids: HashSet<&str> = found.iter().map(|received| received.id.as_str()).collect();
            match events.iter().find(|delivery| !ids.contains(delivery.event.id.as_str())) {
                None => Ok(()),
                Some(missing) => Err(brief(&Received::from(&missing.event))),
            }
        });
        arrived
            .await
            .map_err(|missing| format!("reported delivered, but not at the destination: {missing}"))?;
        Ok(found)
    }

    /// Tries until it works or patience ends, then returns the last error.
    async fn wait(&self, mut attempt: impl AsyncFnMut() -> Checked) -> Checked {
        let deadline = tokio::time::Instant::now() + self.t.patience();
        loop {
            match attempt().await {
                Err(last) if tokio::time::Instant::now() >= deadline => return Err(last),
                Err(_) => tokio::time::sleep(LOOK_EVERY).await,
                Ok(()) => return Ok(()),
            }
        }
    }
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn one_each(batch: &[Delivery], outcomes: &[Outcome]) -> Checked {
    ensure(batch.len() == outcomes.len(), || {
        format!(
            "{} events were answered with {} outcomes: there must be one each",
            batch.len(),
            outcomes.len()
        )
    })
}

/// Each key's first arrivals come in the order of `seq`. Repeats may come at any time.
fn in_order(events: &[Delivery], received: &[Received]) -> Checked {
    let ours: HashSet<&str> = events.iter().map(|delivery| delivery.event.id.as_str()).collect();
    let mut seen = HashSet::new();
    let mut last: HashMap<&str, i64> = HashMap::new();
    for found in received.iter().filter(|found| ours.contains(found.id.as_str())) {
        if !seen.insert(found.id.as_str()) {
            continue;
        }
        let before = last.insert(&found.key, found.seq);
        ensure(before.is_none_or(|before| before < found.seq), || {
            format!(
                "of the key {:?}, event {} arrived after {}",
                found.key,
                found.seq,
                before.unwrap_or_default()
            )
        })?;
    }
    Ok(())
}

/// An event in few words.
fn brief(event: &Received) -> String {
    let Received { seq, key, body, .. } = event;
    let key: String = key.chars().take(80).collect();
    let shown = String::from_utf8_lossy(&body[..body.len().min(80)]);
    format!("{seq} of key {key:?} with {} bytes: {shown:?}", body.len())
}
