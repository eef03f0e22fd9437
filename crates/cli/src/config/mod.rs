//! What to run, as validated types: read from a TOML file or from the command line. Nothing here connects.
//!
//! | file | what it does |
//! | --- | --- |
//! | `file` | TOML with lines, keys and `${ENV}` |
//! | `env` | the expansion itself |
//! | `suggest` | the nearest known word |
//! | `units` | durations and sizes |
//! | `urls` | addresses of databases and sinks |
//! | `table` | `[table]`, the mapping of a foreign table |
//! | `validate` | what no single value can show: pipelines that overlap |

mod env;
mod file;
pub(crate) mod suggest;
mod table;
pub(crate) mod units;
pub(crate) mod urls;
mod validate;

use std::{path::Path, time::Duration};

use airtight::{Backoff, Order, Policy, queue::QueueOptions, table::TableSpec};

use self::{
    file::{Document, Result, Section, Value},
    urls::{DatabaseUrl, Secret, SinkTarget, Webhook},
};
use crate::errors::{Failure, Outcome};

pub(crate) use self::validate::check_overlap;

/// How long done events are kept unless told otherwise.
pub(crate) const KEEP_DONE: Duration = Duration::from_secs(7 * 24 * 3_600);

/// A whole config.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// None when the file leaves it to `--url` or `DATABASE_URL`.
    pub(crate) url: Option<DatabaseUrl>,
    pub(crate) database: Database,
    pub(crate) pipelines: Vec<Pipeline>,
    /// How long done events are kept while a relay runs; none for ever.
    pub(crate) keep_done: Option<Duration>,
}

/// How to use the database.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Database {
    pub(crate) schema: Option<String>,
    pub(crate) table: Option<String>,
    pub(crate) spec: Option<TableSpec>,
    pub(crate) max_connections: Option<u32>,
    /// Whether the outbox wakes relays up; a trigger that `migrate` adds.
    pub(crate) notify: Option<bool>,
    pub(crate) listen: Option<bool>,
    pub(crate) listen_url: Option<Secret>,
    pub(crate) prepared_statements: Option<bool>,
}

/// One source, one sink and the policies between them.
#[derive(Debug, Clone)]
pub(crate) struct Pipeline {
    pub(crate) name: String,
    pub(crate) queue: QueueOptions,
    pub(crate) policy: Policy,
    pub(crate) sink: SinkTarget,
}

impl Config {
    /// Reads a file; `${ENV}` comes from the environment.
    pub(crate) fn load(path: &Path) -> Outcome<Self> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::usage(format!("cannot read the config {name}: {error}")))?;
        Self::parse(&name, &text, &|variable| std::env::var(variable).ok())
            .map_err(|error| Failure::usage(error.to_string()))
    }

    fn parse(name: &str, text: &str, env: &file::Lookup<'_>) -> Result<Self> {
        let doc = Document { name, text, env };
        let root = doc.parse()?;
        let root = Section::root(&doc, &root, &["database", "pipelines", "table", "retention"])?;

        let (url, mut database) =
            root.get("database").map(|value| read_database(&value)).transpose()?.unwrap_or_default();
        if let Some(value) = root.get("table") {
            if database.table.is_some() {
                return Err(value.error(
                    "`database.table` names airtight's own table and [table] maps another: keep one of them",
                ));
            }
            database.spec = Some(table::read(&value)?);
        }
        let pipelines = match root.get("pipelines") {
            Some(value) => read_pipelines(&value)?,
            None => Vec::new(),
        };
        // Deleting rows of a table that is not airtight's own is for its owner to ask for.
        let default_keep = if database.spec.is_some() { None } else { Some(KEEP_DONE) };
        let keep_done = match root.get("retention") {
            Some(value) => read_retention(&value, default_keep)?,
            None => default_keep,
        };
        Ok(Self { url, database, pipelines, keep_done })
    }
}

fn read_database(value: &Value<'_>) -> Result<(Option<DatabaseUrl>, Database)> {
    let section = value.section(&[
        "url",
        "schema",
        "table",
        "max_connections",
        "notify",
        "listen",
        "listen_url",
        "prepared_statements",
    ])?;
    let url = section.get("url").map(|value| parsed(&value, DatabaseUrl::parse)).transpose()?;
    let name = |key: &str| section.get(key).map(|value| value.name()).transpose();
    let database = Database {
        schema: name("schema")?,
        table: name("table")?,
        spec: None,
        max_connections: section.number("max_connections", 1)?,
        notify: section.boolean("notify")?,
        listen: section.boolean("listen")?,
        listen_url: section.text("listen_url")?.map(Secret::new),
        prepared_statements: section.boolean("prepared_statements")?,
    };
    Ok((url, database))
}

fn read_pipelines(value: &Value<'_>) -> Result<Vec<Pipeline>> {
    let mut pipelines: Vec<Pipeline> = Vec::new();
    for (name, value) in value.names()?.entries() {
        let pipeline = read_pipeline(name, &value)?;
        for other in &pipelines {
            check_overlap(other, &pipeline).map_err(|message| value.error(message))?;
        }
        pipelines.push(pipeline);
    }
    Ok(pipelines)
}

fn read_pipeline(name: String, value: &Value<'_>) -> Result<Pipeline> {
    let section = value.section(&[
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
    ])?;
    let mut queue = QueueOptions::default();
    let mut policy = Policy::default();

    if let Some(value) = section.get("read") {
        read_source(&value.text()?).map_err(|message| value.error(message))?;
    }
    if let Some(value) = section.get("streams") {
        queue.streams = value.list()?.iter().map(Value::name).collect::<Result<_>>()?;
        if queue.streams.is_empty() {
            return Err(value.error("is empty; leave the key out to read all streams"));
        }
    }
    if let Some(value) = section.get("order") {
        let words = [("key", Order::Key), ("none", Order::None), ("total", Order::Total)];
        queue.order = value.word(&words)?;
        policy.order = queue.order;
    }
    if let Some(value) = section.get("on_dead") {
        queue.block_on_dead = value.word(&[("continue", false), ("block", true)])?;
        policy.block_on_dead = queue.block_on_dead;
    }
    if let Some(value) = section.get("lease") {
        queue.lease = value.duration()?;
        check_lease(queue.lease).map_err(|message| value.error(message))?;
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
    if let Some(partitions) = section.number("partitions", 1)? {
        queue.partitions = partitions;
    }
    if let Some(value) = section.get("max_payload") {
        queue.max_payload = value.size()?;
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
    let sink = read_sink(&section.require("to")?)?;
    Ok(Pipeline { name, queue, policy, sink })
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

/// `to = "URL"`, or a table with more about it.
fn read_sink(value: &Value<'_>) -> Result<SinkTarget> {
    if value.is_text() {
        return parsed(value, SinkTarget::parse);
    }
    const ABOUT_WEBHOOKS: [&str; 5] = ["secret", "headers", "timeout", "concurrency", "format"];
    let known: Vec<&str> = ["url"].into_iter().chain(ABOUT_WEBHOOKS).collect();
    let section = value.section(&known)?;
    let target = parsed(&section.require("url")?, SinkTarget::parse)?;
    let SinkTarget::Webhook(webhook) = target else {
        for key in ABOUT_WEBHOOKS {
            if let Some(value) = section.get(key) {
                return Err(value.error(format!("means nothing to `{target}`; only webhooks have it")));
            }
        }
        return Ok(target);
    };
    let mut headers = webhook.headers;
    if let Some(value) = section.get("headers") {
        for (name, value) in value.names()?.entries() {
            headers.insert(name, Secret::new(value.text()?));
        }
    }
    Ok(SinkTarget::Webhook(Webhook {
        url: webhook.url,
        secret: section.get("secret").map(|value| value.name()).transpose()?.map(Secret::new),
        headers,
        timeout: section.duration("timeout")?,
        concurrency: section.number("concurrency", 1)?,
        raw: match section.get("format") {
            Some(value) => value.word(&[("envelope", false), ("raw", true)])?,
            None => false,
        },
    }))
}

fn read_retention(value: &Value<'_>, default: Option<Duration>) -> Result<Option<Duration>> {
    let section = value.section(&["done"])?;
    match section.get("done") {
        Some(value) if value.is_text() && value.text()? == "forever" => Ok(None),
        Some(value) => value.duration().map(Some),
        None => Ok(default),
    }
}

fn parsed<T>(value: &Value<'_>, parse: impl Fn(&str) -> std::result::Result<T, String>) -> Result<T> {
    parse(&value.text()?).map_err(|message| value.error(message))
}

/// The ways to read an outbox that this version knows: one.
pub(crate) fn read_source(word: &str) -> std::result::Result<(), String> {
    match word {
        "queue" => Ok(()),
        "log" | "cdc" => Err(format!("`{word}` is not in this version; write `queue`")),
        _ => Err(format!("unknown word `{word}`; allowed is `queue`")),
    }
}

/// A lease is renewed four times in its length, and network hiccups must not lose it.
pub(crate) fn check_lease(lease: Duration) -> std::result::Result<(), String> {
    if (Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&lease) {
        Ok(())
    } else {
        Err("a lease lasts from 1s to 1d".into())
    }
}

pub(crate) fn check_poll(poll: Duration) -> std::result::Result<(), String> {
    if poll >= Duration::from_millis(10) { Ok(()) } else { Err("must be at least 10ms".into()) }
}

/// A batch larger than what may be in memory could never be fetched whole.
pub(crate) fn set_batch(policy: &mut Policy, batch: usize) {
    policy.batch_events = batch;
    policy.in_flight_events = policy.in_flight_events.max(batch.saturating_mul(2));
}

#[cfg(test)]
mod tests;
