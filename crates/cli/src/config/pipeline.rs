//! `[pipelines.NAME]`: one source, one sink and the policies between them.

use std::time::Duration;

use airtight::{
    Backoff, Order, Policy,
    log::{LogOptions, OnFailure, Start},
    queue::QueueOptions,
};

use super::{
    check_overlap,
    file::{Result, Section, Value},
    urls::SinkTarget,
};

/// What every pipeline may say.
const KEYS: [&str; 16] = [
    "read",
    "streams",
    "order",
    "on_dead",
    "lease",
    "batch",
    "max_attempts",
    "poll",
    "partitions",
    "max_payload",
    "in_flight_events",
    "in_flight_bytes",
    "backoff",
    "circuit",
    "grace",
    "to",
];

/// What only one with `read = "log"` may say.
const LOG_KEYS: [&str; 5] = ["consumer", "start", "on_failure", "max_parked", "max_ahead"];

/// The most partitions that a consumer has.
const MAX_PARTITIONS: u16 = 64;

/// One source, one sink and the policies between them.
#[derive(Debug, Clone)]
pub(crate) struct Pipeline {
    pub(crate) name: String,
    pub(crate) read: Reading,
    pub(crate) policy: Policy,
    pub(crate) sink: SinkTarget,
}

impl Pipeline {
    pub(crate) fn new(name: String, read: Reading, mut policy: Policy, sink: SinkTarget) -> Self {
        // Going on with the key of an event that is to be delivered again after the halt would turn the two round.
        if matches!(&read, Reading::Log(log) if log.on_failure == OnFailure::Halt) {
            policy.block_on_dead = true;
        }
        Self { name, read, policy, sink }
    }
}

/// How the outbox is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Claimed and settled row by row.
    Queue(QueueOptions),
    /// Followed by a consumer.
    Log(LogOptions),
}

impl Reading {
    /// Only these; empty for all.
    pub(crate) fn streams(&self) -> &[String] {
        match self {
            Self::Queue(queue) => &queue.streams,
            Self::Log(log) => &log.streams,
        }
    }

    pub(crate) fn order(&self) -> Order {
        match self {
            Self::Queue(queue) => queue.order,
            Self::Log(log) => log.order,
        }
    }

    /// The consumer, for a log.
    pub(crate) fn consumer(&self) -> Option<&str> {
        match self {
            Self::Queue(_) => None,
            Self::Log(log) => Some(&log.consumer),
        }
    }
}

/// What both ways to read have in common; none where each has a default of its own.
#[derive(Debug, Default)]
pub(crate) struct Common {
    pub(crate) streams: Vec<String>,
    pub(crate) order: Order,
    pub(crate) block_on_dead: bool,
    pub(crate) lease: Option<Duration>,
    pub(crate) partitions: Option<u16>,
    pub(crate) max_payload: Option<usize>,
}

impl Common {
    pub(crate) fn queue(self) -> QueueOptions {
        let default = QueueOptions::default();
        QueueOptions {
            streams: self.streams,
            order: self.order,
            block_on_dead: self.block_on_dead,
            lease: self.lease.unwrap_or(default.lease),
            partitions: self.partitions.unwrap_or(default.partitions),
            max_payload: self.max_payload.unwrap_or(default.max_payload),
        }
    }

    pub(crate) fn log(self, consumer: String) -> LogOptions {
        let default = LogOptions::consumer(consumer);
        LogOptions {
            streams: self.streams,
            order: self.order,
            block_on_dead: self.block_on_dead,
            lease: self.lease.unwrap_or(default.lease),
            partitions: self.partitions.unwrap_or(default.partitions),
            max_payload: self.max_payload.unwrap_or(default.max_payload),
            ..default
        }
    }
}

pub(super) fn read_all(value: &Value<'_>, default: ReadWord) -> Result<Vec<Pipeline>> {
    let mut pipelines: Vec<Pipeline> = Vec::new();
    for (name, value) in value.names()?.entries() {
        let pipeline = read_pipeline(name, &value, default)?;
        for other in &pipelines {
            check_overlap(other, &pipeline).map_err(|message| value.error(message))?;
        }
        pipelines.push(pipeline);
    }
    Ok(pipelines)
}

fn read_pipeline(name: String, value: &Value<'_>, default: ReadWord) -> Result<Pipeline> {
    let known: Vec<&str> = KEYS.into_iter().chain(LOG_KEYS).collect();
    let section = value.section(&known)?;
    let read = match section.get("read") {
        Some(value) => read_source(&value.text()?).map_err(|message| value.error(message))?,
        None => default,
    };
    let mut common = Common::default();
    let mut policy = Policy::default();

    if let Some(value) = section.get("streams") {
        common.streams = value.list()?.iter().map(Value::name).collect::<Result<_>>()?;
        if common.streams.is_empty() {
            return Err(value.error("is empty; leave the key out to read all streams"));
        }
    }
    if let Some(value) = section.get("order") {
        let words = [("key", Order::Key), ("none", Order::None), ("total", Order::Total)];
        common.order = value.word(&words)?;
        policy.order = common.order;
    }
    if let Some(value) = section.get("on_dead") {
        common.block_on_dead = value.word(&[("continue", false), ("block", true)])?;
        policy.block_on_dead = common.block_on_dead;
    }
    if let Some(value) = section.get("lease") {
        let lease = value.duration()?;
        check_lease(lease).map_err(|message| value.error(message))?;
        common.lease = Some(lease);
    }
    common.partitions = section.number("partitions", 1)?;
    common.max_payload = section.get("max_payload").map(|value| value.size()).transpose()?;
    if let Some(batch) = section.number("batch", 1)? {
        set_batch(&mut policy, batch);
    }
    if let Some(attempts) = section.number("max_attempts", 1)? {
        policy.max_attempts = attempts;
    }
    if let Some(value) = section.get("poll") {
        policy.poll = value.duration()?;
        check_poll(policy.poll).map_err(|message| value.error(message))?;
    }
    if let Some(events) = section.number("in_flight_events", 1)? {
        policy.in_flight_events = events;
    }
    if let Some(value) = section.get("in_flight_bytes") {
        policy.in_flight_bytes = value.size()?;
    }
    if let Some(value) = section.get("backoff") {
        policy.backoff = read_backoff(&value, policy.backoff)?;
    }
    if let Some(value) = section.get("circuit") {
        policy.circuit = read_backoff(&value, policy.circuit)?;
    }
    if let Some(grace) = section.duration("grace")? {
        policy.grace = grace;
    }
    let sink = super::sink::read(&section.require("to")?)?;
    let read = match read {
        ReadWord::Queue => {
            if let Some((key, value)) = LOG_KEYS.iter().find_map(|key| Some((key, section.get(key)?))) {
                return Err(value.error(format!("`{key}` is for `read = \"log\"`; a queue has no consumers")));
            }
            Reading::Queue(common.queue())
        }
        ReadWord::Log => Reading::Log(read_log(&section, common, &name)?),
    };
    Ok(Pipeline::new(name, read, policy, sink))
}

fn read_log(section: &Section<'_>, common: Common, name: &str) -> Result<LogOptions> {
    if let (Some(partitions), Some(value)) = (common.partitions, section.get("partitions"))
        && partitions > MAX_PARTITIONS
    {
        return Err(value.error(format!("a consumer has at most {MAX_PARTITIONS}, found {partitions}")));
    }
    let consumer = section.get("consumer").map(|value| value.name()).transpose()?;
    let mut log = common.log(consumer.unwrap_or_else(|| name.to_owned()));
    if let Some(value) = section.get("start") {
        log.start = value.word(&[("earliest", Start::Earliest), ("latest", Start::Latest)])?;
    }
    if let Some(value) = section.get("on_failure") {
        log.on_failure = value.word(&[("park", OnFailure::Park), ("halt", OnFailure::Halt)])?;
    }
    if let Some(parked) = section.number("max_parked", 1)? {
        log.max_parked = parked;
    }
    if let Some(ahead) = section.number("max_ahead", 1)? {
        log.max_ahead = ahead;
    }
    Ok(log)
}

fn read_backoff(value: &Value<'_>, default: Backoff) -> Result<Backoff> {
    let section = value.section(&["base", "multiplier", "cap", "jitter"])?;
    let in_range = |key: &str, low: f64, high: f64| -> Result<Option<f64>> {
        let Some(value) = section.get(key) else { return Ok(None) };
        let number = value.float()?;
        if (low..=high).contains(&number) {
            Ok(Some(number))
        } else {
            Err(value.error(format!("must be from {low} to {high}, found {number}")))
        }
    };
    Ok(Backoff {
        base: section.duration("base")?.unwrap_or(default.base),
        multiplier: in_range("multiplier", 1.0, 1_000.0)?.unwrap_or(default.multiplier),
        cap: section.duration("cap")?.unwrap_or(default.cap),
        jitter: in_range("jitter", 0.0, 1.0)?.unwrap_or(default.jitter),
    })
}

/// A way to read an outbox that this version knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadWord {
    Queue,
    Log,
}

pub(crate) fn read_source(word: &str) -> std::result::Result<ReadWord, String> {
    match word {
        "queue" => Ok(ReadWord::Queue),
        "log" => Ok(ReadWord::Log),
        "cdc" => Err("`cdc` is not in this version; write `queue` or `log`".into()),
        _ => Err(format!("unknown word `{word}`; allowed are `queue` and `log`")),
    }
}

/// A lease is renewed four times in its length, and network hiccups must not lose it.
fn check_lease(lease: Duration) -> std::result::Result<(), String> {
    if (Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&lease) {
        Ok(())
    } else {
        Err("a lease lasts from 1s to 1d".into())
    }
}

fn check_poll(poll: Duration) -> std::result::Result<(), String> {
    if poll >= Duration::from_millis(10) { Ok(()) } else { Err("must be at least 10ms".into()) }
}

/// A batch larger than what may be in memory could never be fetched whole.
pub(crate) fn set_batch(policy: &mut Policy, batch: usize) {
    policy.batch_events = batch;
    policy.in_flight_events = policy.in_flight_events.max(batch.saturating_mul(2));
}
