//! `[pipelines.NAME]`: one source, one sink and the policies between them.

use std::time::Duration;

use airtight::{
    Backoff, Order, Policy, ReadOptions,
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

/// The keys of every pipeline.
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

/// The keys that only a pipeline with `read = "log"` has.
const LOG_KEYS: [&str; 3] = ["consumer", "start", "max_ahead"];

/// The keys that only a pipeline with `read = "cdc"` has.
const CDC_KEYS: [&str; 8] =
    ["slot", "publication", "snapshot", "mark", "messages", "buffer", "failover", "replication_url"];

/// The keys that pipelines with `read = "log"` and `read = "cdc"` have, and a queue does not.
const FOLLOW_KEYS: [&str; 2] = ["on_failure", "max_parked"];

/// The maximum number of partitions of a consumer.
const MAX_PARTITIONS: u16 = 64;

/// One source, one sink and the policies between them.
#[derive(Debug, Clone)]
pub(crate) struct Pipeline {
    pub(crate) name: String,
    pub(crate) read: Reading,
    pub(crate) policy: Policy,
    pub(crate) sink: SinkTarget,
}

/// How the outbox is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Claimed and settled row by row.
    Queue(QueueOptions),
    /// Followed by a consumer.
    Log(LogOptions),
    /// Followed through the WAL. A slot without a name gets one when the database's name is known.
    Cdc(Box<CdcOptions>),
}

impl Reading {
    /// The options that all ways to read have in common.
    pub(crate) fn options(&self) -> &ReadOptions {
        match self {
            Self::Queue(queue) => queue,
            Self::Log(log) => &log.read,
            Self::Cdc(cdc) => &cdc.log.read,
        }
    }

    /// The consumer, for a log.
    pub(crate) fn consumer(&self) -> Option<&str> {
        match self {
            Self::Queue(_) | Self::Cdc(_) => None,
            Self::Log(log) => Some(&log.consumer),
        }
    }

    /// The value of `read`.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Queue(_) => "queue",
            Self::Log(_) => "log",
            Self::Cdc(_) => "cdc",
        }
    }
}

/// Options for a slot and a publication without names. They get names when the database's name is known, if the config
/// has none.
pub(crate) fn unnamed_cdc(options: ReadOptions) -> CdcOptions {
    let mut cdc = CdcOptions::slot("");
    cdc.log.read = options;
    cdc
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
    let mut options = read.defaults();
    let mut policy = Policy::default();

    if let Some(value) = section.get("streams") {
        options.streams = value.list()?.iter().map(Value::name).collect::<Result<_>>()?;
        if options.streams.is_empty() {
            return Err(value.error("is empty; leave the key out to read all streams"));
        }
    }
    if let Some(value) = section.get("order") {
        let words = [("key", Order::Key), ("none", Order::None), ("total", Order::Total)];
        options.order = value.word(&words)?;
    }
    if let Some(value) = section.get("on_dead") {
        options.block_on_dead = value.word(&[("continue", false), ("block", true)])?;
    }
    if let Some(value) = section.get("lease") {
        let lease = value.duration()?;
        check_lease(lease).map_err(|message| value.error(message))?;
        options.lease = lease;
    }
    if let Some(partitions) = section.number("partitions", 1)? {
        options.partitions = partitions;
    }
    if let Some(value) = section.get("max_payload") {
        options.max_payload = value.size()?;
    }
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
                Err(value.error(format!("`{key}` is for {of}, but this pipeline reads {}", read.shown())))
            }
            None => Ok(()),
        };
    let read = match read {
        ReadWord::Queue => {
            misplaced(&LOG_KEYS, "`read = \"log\"`")?;
            misplaced(&CDC_KEYS, "`read = \"cdc\"`")?;
            misplaced(&FOLLOW_KEYS, "`read = \"log\"` and `read = \"cdc\"`")?;
            Reading::Queue(options)
        }
        ReadWord::Log => {
            misplaced(&CDC_KEYS, "`read = \"cdc\"`")?;
            Reading::Log(read_log(&section, options, &name)?)
        }
        ReadWord::Cdc => {
            misplaced(&LOG_KEYS, "`read = \"log\"`")?;
            misplaced(&["partitions"], "`read = \"queue\"` and `read = \"log\"`")?;
            Reading::Cdc(Box::new(read_cdc(&section, options)?))
        }
    };
    Ok(Pipeline { name, read, policy, sink })
}

fn read_log(section: &Section<'_>, options: ReadOptions, name: &str) -> Result<LogOptions> {
    let partitions = options.partitions;
    if let Some(value) = section.get("partitions")
        && partitions > MAX_PARTITIONS
    {
        return Err(
            value.error(format!("a consumer has at most {MAX_PARTITIONS} partitions, found {partitions}"))
        );
    }
    let consumer = section.get("consumer").map(|value| value.name()).transpose()?;
    let consumer = consumer.unwrap_or_else(|| name.to_owned());
    let mut log = LogOptions { read: options, ..LogOptions::consumer(consumer) };
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

fn read_cdc(section: &Section<'_>, options: ReadOptions) -> Result<CdcOptions> {
    let mut cdc = unnamed_cdc(options);
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

/// Checks that PostgreSQL accepts the name of a slot.
pub(crate) fn check_slot(name: &str) -> std::result::Result<(), String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if (1..=63).contains(&name.len()) && name.chars().all(fits) {
        Ok(())
    } else {
        Err(format!(
            "a slot's name must consist of 1 to 63 lower-case letters, digits and underscores, found `{name}`"
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
    /// The default options for this way to read.
    pub(crate) fn defaults(self) -> ReadOptions {
        match self {
            Self::Queue => QueueOptions::default(),
            Self::Log | Self::Cdc => LogOptions::consumer("").read,
        }
    }

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
        _ => Err(format!("unknown word `{word}`; allowed words are `queue`, `log` and `cdc`")),
    }
}

/// Checks a lease. It is renewed four times in its length, and a short network failure must not lose it.
fn check_lease(lease: Duration) -> std::result::Result<(), String> {
    if (Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&lease) {
        Ok(())
    } else {
        Err("a lease must last from 1s to 1d".into())
    }
}

fn check_poll(poll: Duration) -> std::result::Result<(), String> {
    if poll >= Duration::from_millis(10) { Ok(()) } else { Err("must be at least 10ms".into()) }
}

/// Sets the batch, and raises the limit in memory to fit it: a larger batch could never be fetched whole.
pub(crate) fn set_batch(policy: &mut Policy, batch: usize) {
    policy.batch_events = batch;
    policy.in_flight_events = policy.in_flight_events.max(batch.saturating_mul(2));
}
