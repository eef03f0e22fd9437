//! The sinks of the core run the conformance suite; sinks that break one rule each show that the suite would
//! tell; and the faulty sink does what it says.

#![allow(clippy::unwrap_used, reason = "this whole file is a test")]

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use airtight_core::{
    Capabilities, Class, Code, Delivery, Dispatcher, Error, Event, Outcome, Sink,
    sinks::{FileSink, MemorySink, StdoutSink},
};
use airtight_testkit::{
    deliveries::{delivery, letters},
    faults::{Fault, FaultySink, Gate, Odds},
    sinks::{Hooks, Received, SinkUnderTest, conformance, failures},
};
use async_trait::async_trait;

// The sinks of the core.

struct Memory(FaultySink<MemorySink>);

#[async_trait]
impl SinkUnderTest for Memory {
    type Sink = FaultySink<MemorySink>;

    async fn sink(&self) -> Self::Sink {
        self.0.clone()
    }

    async fn received(&self) -> Vec<Received> {
        self.0.inner().events().iter().map(Received::from).collect()
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, can_refuse: true, can_be_unavailable: true }
    }

    async fn stop(&self) {
        self.0.set_down(Some(Error::retryable(Code::custom("down"), "stopped")));
    }

    async fn start(&self) {
        self.0.set_down(None);
    }

    async fn refuse(&self, event_id: Option<&str>) {
        let refused = event_id.map(str::to_owned);
        self.0.set_rule(move |delivery| match refused.as_ref() == Some(&delivery.event.id) {
            true => Fault::permanent(),
            false => Fault::None,
        });
    }

    async fn turn_away(&self, everyone: bool) {
        self.0.set_down(everyone.then(|| Error::unavailable(Code::custom("away"), "turned away")));
    }
}

#[tokio::test]
async fn memory_behind_faults_conforms() {
    conformance(Memory(FaultySink::new(MemorySink::new()))).await;
}

/// One envelope a line.
fn read_envelopes(path: &Path) -> Vec<Received> {
    let text = std::fs::read(path).unwrap();
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| Received::from_envelope(line).expect("every line is an envelope")).collect()
}

struct File {
    dir: tempfile::TempDir,
}

impl File {
    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    fn away(&self) -> PathBuf {
        self.dir.path().join("away")
    }
}

#[async_trait]
impl SinkUnderTest for File {
    type Sink = FileSink;

    async fn sink(&self) -> FileSink {
        FileSink::new(self.home().join("events.ndjson"))
    }

    async fn received(&self) -> Vec<Received> {
        read_envelopes(&self.home().join("events.ndjson"))
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, ..Hooks::default() }
    }

    async fn stop(&self) {
        std::fs::rename(self.home(), self.away()).unwrap();
    }

    async fn start(&self) {
        std::fs::rename(self.away(), self.home()).unwrap();
    }
}

#[tokio::test]
async fn file_conforms() {
    let file = File { dir: tempfile::tempdir().unwrap() };
    std::fs::create_dir(file.home()).unwrap();
    conformance(file).await;
}

/// Standard output with a file in its place.
struct Stdout {
    file: tempfile::NamedTempFile,
}

#[async_trait]
impl SinkUnderTest for Stdout {
    type Sink = StdoutSink;

    async fn sink(&self) -> StdoutSink {
        let file = std::fs::OpenOptions::new().append(true).open(self.file.path()).unwrap();
        StdoutSink::to(tokio::fs::File::from_std(file))
    }

    async fn received(&self) -> Vec<Received> {
        read_envelopes(self.file.path())
    }
}

#[tokio::test]
async fn stdout_conforms() {
    conformance(Stdout { file: tempfile::NamedTempFile::new().unwrap() }).await;
}

#[derive(Default)]
struct Handlers {
    received: Arc<Mutex<Vec<Received>>>,
    refused: Arc<Mutex<Option<String>>>,
    away: Arc<Mutex<bool>>,
}

#[async_trait]
impl SinkUnderTest for Handlers {
    type Sink = Dispatcher;

    async fn sink(&self) -> Dispatcher {
        let (received, refused, away) = (self.received.clone(), self.refused.clone(), self.away.clone());
        Dispatcher::new().otherwise(move |context| {
            let answer = if *away.lock().unwrap() {
                Err(Error::unavailable(Code::custom("away"), "the handler's database is away"))
            } else if refused.lock().unwrap().as_ref() == Some(&context.event.id) {
                Err(Error::permanent(Code::REFUSED, "not this one"))
            } else {
                received.lock().unwrap().push(Received::from(&*context.event));
                Ok(())
            };
            async { answer }
        })
    }

    async fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_refuse: true, can_be_unavailable: true, ..Hooks::default() }
    }

    async fn refuse(&self, event_id: Option<&str>) {
        *self.refused.lock().unwrap() = event_id.map(str::to_owned);
    }

    async fn turn_away(&self, everyone: bool) {
        *self.away.lock().unwrap() = everyone;
    }
}

#[tokio::test]
async fn dispatcher_conforms() {
    conformance(Handlers::default()).await;
}

// Sinks that break a rule.

#[derive(Clone, Copy, PartialEq)]
enum Break {
    /// Reports delivered and forgets every seventh.
    Forgets,
    /// Leaves out the last outcome.
    AnswersShort,
    /// Delivers a batch backwards.
    Reverses,
    /// Delivers what follows a refused event of the same key.
    LeavesHoles,
    /// Calls an outage the events' fault.
    Blames,
    /// Says delivered while it is down.
    Lies,
    /// Changes the payload.
    Rewrites,
}

#[derive(Clone)]
struct Broken {
    how: Break,
    events: Arc<Mutex<Vec<Event>>>,
    refused: Arc<Mutex<Option<String>>>,
    down: Arc<Mutex<bool>>,
}

impl Broken {
    fn new(how: Break) -> Self {
        Self { how, events: Arc::default(), refused: Arc::default(), down: Arc::default() }
    }
}

#[async_trait]
impl Sink for Broken {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if *self.down.lock().unwrap() {
            let outcome = match self.how {
                Break::Lies => Outcome::Delivered,
                Break::Blames => Outcome::Failed(Error::permanent(Code::custom("down"), "refused")),
                _ => Outcome::Failed(Error::unavailable(Code::custom("down"), "down")),
            };
            return vec![outcome; batch.len()];
        }
        let mut events = self.events.lock().unwrap();
        let refused = self.refused.lock().unwrap().clone();
        let mut outcomes = Vec::new();
        let start = events.len();
        let mut broken: Option<String> = None;
        for delivery in batch {
            let mut event = delivery.event.clone();
            if refused.as_ref() == Some(&event.id) {
                broken = Some(event.aggregate_id.clone());
                outcomes.push(Outcome::Failed(Error::permanent(Code::REFUSED, "not this one")));
                continue;
            }
            if broken.as_ref() == Some(&event.aggregate_id) && self.how != Break::LeavesHoles {
                outcomes.push(Outcome::Skipped);
                continue;
            }
            if self.how == Break::Rewrites {
                let value: serde_json::Value =
                    serde_json::from_slice(event.payload.as_bytes()).unwrap_or_default();
                event.payload = airtight_core::Payload::Json(value.to_string().into());
            }
            if self.how != Break::Forgets || event.seq % 7 != 0 {
                events.push(event);
            }
            outcomes.push(Outcome::Delivered);
        }
        match self.how {
            Break::Reverses => events[start..].reverse(),
            Break::AnswersShort => drop(outcomes.pop()),
            _ => {}
        }
        outcomes
    }
}

#[async_trait]
impl SinkUnderTest for Broken {
    type Sink = Broken;

    async fn sink(&self) -> Broken {
        self.clone()
    }

    async fn received(&self) -> Vec<Received> {
        self.events.lock().unwrap().iter().map(Received::from).collect()
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, can_refuse: true, can_be_unavailable: true }
    }

    async fn turn_away(&self, everyone: bool) {
        *self.down.lock().unwrap() = everyone;
    }

    async fn stop(&self) {
        *self.down.lock().unwrap() = true;
    }

    async fn start(&self) {
        *self.down.lock().unwrap() = false;
    }

    async fn refuse(&self, event_id: Option<&str>) {
        *self.refused.lock().unwrap() = event_id.map(str::to_owned);
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(50)
    }
}

#[tokio::test]
async fn the_suite_finds_every_broken_rule() {
    let cases = [
        (Break::Forgets, "what_is_reported_delivered_is_there", "not at the destination"),
        (Break::AnswersShort, "what_is_reported_delivered_is_there", "one each"),
        (Break::Reverses, "keys_keep_their_order", "arrived after"),
        (Break::LeavesHoles, "a_failure_ends_the_prefix_of_its_key", "are reported delivered"),
        (Break::Blames, "a_destination_that_is_down_comes_back_by_itself", "permanent"),
        (Break::Blames, "a_destination_that_turns_everyone_away_is_unavailable", "not unavailable"),
        (Break::Lies, "a_destination_that_is_down_comes_back_by_itself", "Delivered"),
        (Break::Rewrites, "every_kind_of_event_arrives_unchanged", "arrived as"),
    ];
    for (how, check, words) in cases {
        let failed = failures(&Broken::new(how)).await;
        let found = failed.iter().find(|failure| failure.check == check);
        let found = found.unwrap_or_else(|| panic!("{check} should have failed; these did: {failed:?}"));
        assert!(found.message.contains(words), "{found} should say {words}");
    }
}

// The faulty sink.

fn seqs(sink: &FaultySink<MemorySink>) -> Vec<i64> {
    sink.inner().events().iter().map(|event| event.seq).collect()
}

/// Six events, `a b a b a c`, with a fault at the third.
async fn with_fault_at_three(fault: Fault) -> (String, Vec<i64>) {
    let sink = FaultySink::new(MemorySink::new())
        .rule(move |delivery| if delivery.event.seq == 3 { fault.clone() } else { Fault::None });
    let batch: Vec<Delivery> =
        (1..).zip("ababac".chars()).map(|(seq, key)| delivery(seq, &key.to_string())).collect();
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(sink.injected(), 1);
    (letters(&outcomes), seqs(&sink))
}

#[tokio::test]
async fn a_fault_ends_its_key_and_nobody_elses() {
    let cases = [
        (Fault::retryable(), "ddrdsd", vec![1, 2, 4, 6]),
        (Fault::permanent(), "ddpdsd", vec![1, 2, 4, 6]),
        (Fault::unavailable(), "ddudsd", vec![1, 2, 4, 6]),
        (Fault::lost_answer(), "ddrdsd", vec![1, 2, 3, 4, 6]),
        (Fault::Unknown { delivered: false }, "dd?dsd", vec![1, 2, 4, 6]),
        (Fault::Unknown { delivered: true }, "dd?dsd", vec![1, 2, 3, 4, 6]),
        (Fault::AnswerShort { delivered: false }, "dd", vec![1, 2]),
        (Fault::AnswerShort { delivered: true }, "dd", vec![1, 2, 3]),
        (Fault::Delay(Duration::from_millis(1)), "dddddd", vec![1, 2, 3, 4, 5, 6]),
    ];
    for (fault, outcomes, delivered) in cases {
        let shown = format!("{fault:?}");
        assert_eq!(with_fault_at_three(fault).await, (outcomes.to_owned(), delivered), "{shown}");
    }
}

#[tokio::test]
async fn a_panic_leaves_what_was_sent_before_it() {
    let sink = FaultySink::new(MemorySink::new())
        .rule(|delivery| if delivery.event.seq == 2 { Fault::Panic } else { Fault::None });
    let faulty = sink.clone();
    let task = tokio::spawn(async move { faulty.deliver(&[delivery(1, "a"), delivery(2, "b")]).await });
    assert!(task.await.unwrap_err().is_panic());
    assert_eq!(seqs(&sink), [1]);
    assert_eq!(letters(&sink.deliver(&[delivery(3, "c")]).await), "d", "a panic must not poison the sink");
}

#[tokio::test]
async fn a_hanging_delivery_waits_for_its_gate() {
    let gate = Gate::new();
    let at_gate = gate.clone();
    let sink = FaultySink::new(MemorySink::new()).rule(move |delivery| match delivery.event.seq {
        2 => Fault::Hang(at_gate.clone()),
        _ => Fault::None,
    });
    let faulty = sink.clone();
    let task = tokio::spawn(async move { faulty.deliver(&[delivery(1, "a"), delivery(2, "b")]).await });
    tokio::time::timeout(Duration::from_secs(10), gate.reached(1)).await.expect("the sink comes to the gate");
    assert_eq!(seqs(&sink), [1]);
    assert!(!task.is_finished());
    gate.open();
    assert_eq!(letters(&task.await.unwrap()), "dd");
    assert_eq!(seqs(&sink), [1, 2]);
}

#[tokio::test]
async fn a_seed_means_the_same_faults_and_retries_get_through() {
    let run = async |seed| {
        let odds = Odds { panic: 0, ..Odds::survivable() };
        let sink = FaultySink::seeded(MemorySink::new(), seed, odds);
        let mut letters_by_attempt = Vec::new();
        for seq in 1..=200 {
            let mut next = delivery(seq, "k");
            loop {
                let outcome = letters(&sink.deliver(std::slice::from_ref(&next)).await);
                let done = outcome == "d";
                letters_by_attempt.push(outcome);
                if done {
                    break;
                }
                next.attempt += 1;
                assert!(next.attempt < 50, "odds of a third cannot fail that often");
            }
        }
        assert!(sink.injected() > 30, "{}", sink.injected());
        letters_by_attempt
    };
    assert_eq!(run(7).await, run(7).await);
    assert_ne!(run(7).await, run(8).await);
}

#[tokio::test]
async fn a_sink_that_is_down_does_not_open() {
    let sink = FaultySink::new(MemorySink::new());
    sink.set_down(Some(Error::unavailable(Code::custom("down"), "gone")));
    assert_eq!(sink.open().await.unwrap_err().class(), Class::Unavailable);
    assert_eq!(letters(&sink.deliver(&[delivery(1, "a"), delivery(2, "a")]).await), "us");
    sink.set_down(None);
    sink.open().await.unwrap();
    assert_eq!(letters(&sink.deliver(&[delivery(1, "a")]).await), "d");
}
