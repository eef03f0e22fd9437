//! `[pipelines.NAME]`: one source, one sink and the policies between them.

use std::time::Duration;

use airtight::{
    Backoff, Order, Policy,
    log::{LogOptions, OnFailure, Start},
    postgres::{CdcOptions, Snapshot},
    queue::QueueOptions,
    table::TableSpec,
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
const LOG_KEYS: [&str; 3] = ["consumer", "start", "max_ahead"];

/// What only one with `read = "cdc"` may say.
const CDC_KEYS: [&str; 8] =
    ["slot", "publication", "snapshot", "mark", "messages", "buffer", "failover", "replication_url"];

/// What both of them may say, and a queue may not.
const FOLLOW_KEYS: [&str; 2] = ["on_failure", "max_parked"];

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
        if read.log_options().is_some_and(|log| log.on_failure == OnFailure::Halt) {
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
    /// Followed through the WAL. A slot without a name gets one when the database's is known.
    Cdc(Box<CdcOptions>),
}

impl Reading {
    /// Only these; empty for all.
    pub(crate) fn streams(&self) -> &[String] {
        match self {
            Self::Queue(queue) => &queue.streams,
            Self::Log(log) => &log.streams,
            Self::Cdc(cdc) => &cdc.log.streams,
        }
    }

    pub(crate) fn order(&self) -> Order {
        match self {
            Self::Queue(queue) => queue.order,
            Self::Log(log) => log.order,
            Self::Cdc(cdc) => cdc.log.order,
        }
    }

    /// The consumer, for a log.
    pub(crate) fn consumer(&self) -> Option<&str> {
        match self {
            Self::Queue(_) | Self::Cdc(_) => None,
            Self::Log(log) => Some(&log.consumer),
        }
    }

    /// The word for it.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Queue(_) => "queue",
            Self::Log(_) => "log",
            Self::Cdc(_) => "cdc",
        }
    }

    fn log_options(&self) -> Option<&LogOptions> {
        match self {
            Self::Queue(_) => None,
            Self::Log(log) => Some(log),
            Self::Cdc(cdc) => Some(&cdc.log),
        }
    }
}

/// What all ways to read have in common; none where each has a default of its own.
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

    pub(crate) fn cdc(self) -> CdcOptions {
        // Named, if not by the config, when the database's name is known.
        let default = CdcOptions::slot("");
        let log = LogOptions { group: default.log.group, ..self.log(String::new()) };
        CdcOptions { log, ..default }
    }
}

pub(super) fn read_all(
    value: &Value<'_>,
    default: ReadWord,
    table: Option<&TableSpec>,
) -> Result<Vec<Pipeline>> {
    let mut pipelines: Vec<Pipeline> = Vec::new();
    for (name, value) in value.names()?.entries() {
        let pipeline = read_pipeline(name, &value, default)?;
        // Through the WAL, too, rows with a status are marked.
        if let (Some(table), Reading::Queue(_) | Reading::Cdc(_)) = (table, &pipeline.read) {
            let fits = table.check_attempts(pipeline.policy.max_attempts);
            fits.map_err(|error| value.error(error.to_string()))?;
        }
        for other in &pipelines {
            check_overlap(other, &pipeline).map_err(|message| value.error(message))?;
        }
        pipelines.push(pipeline);
    }
    Ok(pipelines)
}

fn read_pipeline(name: String, value: &Value<'_>, default: ReadWord) -> Result<Pipeline> {
    let known: Vec<&str> = KEYS.into_iter().chain(LOG_KEYS).chain(CDC_KEYS).chain(FOLLOW_KEYS).collect();
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
    let misplaced =
        |keys: &[&str], of: &str| match keys.iter().find_map(|key| Some((*key, section.get(key)?))) {
            Some((key, value)) => {
                Err(value.error(format!("`{key}` is for {of}, and this is read as {}", read.shown())))
            }
            None => Ok(()),
        };
    let read = match read {
        ReadWord::Queue => {
            misplaced(&LOG_KEYS, "`read = \"log\"`")?;
            misplaced(&CDC_KEYS, "`read = \"cdc\"`")?;
            misplaced(&FOLLOW_KEYS, "`read = \"log\"` and `read = \"cdc\"`")?;
            Reading::Queue(common.queue())
        }
        ReadWord::Log => {
            misplaced(&CDC_KEYS, "`read = \"cdc\"`")?;
            Reading::Log(read_log(&section, common, &name)?)
        }
        ReadWord::Cdc => {
            misplaced(&LOG_KEYS, "`read = \"log\"`")?;
            misplaced(&["partitions"], "`read = \"queue\"` and `read = \"log\"`")?;
            Reading::Cdc(Box::new(read_cdc(&section, common)?))
        }
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
    read_follow(section, &mut log)?;
    if let Some(ahead) = section.number("max_ahead", 1)? {
        log.max_ahead = ahead;
    }
    Ok(log)
}

fn read_follow(section: &Section<'_>, log: &mut LogOptions) -> Result<()> {
    if let Some(value) = section.get("on_failure") {
        log.on_failure = value.word(&[("park", OnFailure::Park), ("halt", OnFailure::Halt)])?;
    }
    if let Some(parked) = section.number("max_parked", 1)? {
        log.max_parked = parked;
    }
    Ok(())
}

fn read_cdc(section: &Section<'_>, common: Common) -> Result<CdcOptions> {
    let mut cdc = common.cdc();
    read_follow(section, &mut cdc.log)?;
    if let Some(value) = section.get("slot") {
        cdc.log.consumer = value.name()?;
        check_slot(&cdc.log.consumer).map_err(|message| value.error(message))?;
    }
    if let Some(value) = section.get("publication") {
        cdc.publication = value.name()?;
    }
    if let Some(value) = section.get("snapshot") {
        cdc.snapshot = value.word(&[
            ("initial", Snapshot::Initial),
            ("new_slot", Snapshot::NewSlot),
            ("never", Snapshot::Never),
        ])?;
    }
    if let Some(mark) = section.boolean("mark")? {
        cdc.mark = mark;
    }
    if let Some(prefix) = section.text("messages")? {
        cdc.messages = Some(prefix).filter(|prefix| !prefix.is_empty());
    }
    if let Some(value) = section.get("buffer") {
        cdc.buffer_bytes = value.size()?;
    }
    if let Some(failover) = section.boolean("failover")? {
        cdc.failover = failover;
    }
    cdc.url = section.text("replication_url")?;
    Ok(cdc)
}

/// What the server takes for the name of a slot.
pub(crate) fn check_slot(name: &str) -> std::result::Result<(), String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if (1..=63).contains(&name.len()) && name.chars().all(fits) {
        Ok(())
    } else {
        Err(format!(
            "a slot's name has 1 to 63 lower-case letters, digits and underscores, `{name}` does not"
        ))
    }
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
    Cdc,
}

impl ReadWord {
    fn shown(self) -> &'static str {
        match self {
            Self::Queue => "a queue",
            Self::Log => "a log",
            Self::Cdc => "cdc",
        }
    }
}

pub(crate) fn read_source(word: &str) -> std::result::Result<ReadWord, String> {
    match word {
        "queue" => Ok(ReadWord::Queue),
        "log" => Ok(ReadWord::Log),
        "cdc" => Ok(ReadWord::Cdc),
        _ => Err(format!("unknown word `{word}`; allowed are `queue`, `log` and `cdc`")),
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
