//! The validated configuration, read from a TOML file or from the command line. Nothing here connects.
//!
//! | file | what it does |
//! | --- | --- |
//! | `file` | reads TOML; errors name the line and the key |
//! | `env` | expands `${ENV}` |
//! | `suggest` | finds the nearest known word |
//! | `units` | durations and sizes |
//! | `urls` | addresses of databases and sinks |
//! | `table` | `[table]`, the mapping of a foreign table |
//! | `pipeline` | `[pipelines.NAME]`: how an outbox is read, and the policies |
//! | `sink` | `to`: the sink of a pipeline |
//! | `retention` | `[retention]` |
//! | `validate` | checks across several values: pipelines that overlap |

mod env;
mod file;
mod pipeline;
mod retention;
mod sink;
pub(crate) mod suggest;
mod table;
pub(crate) mod units;
pub(crate) mod urls;
mod validate;

use std::path::Path;

use airtight::{
    OnEnd,
    table::{Shape, TableSpec},
};

use self::{
    file::{Document, Result, Section, Value},
    urls::{DatabaseUrl, Secret},
};
use crate::errors::{Failure, Outcome};

pub(crate) use self::{
    pipeline::{Pipeline, ReadWord, Reading, check_slot, read_source, set_batch, unnamed_cdc},
    retention::{Retention, SetBy, parse as parse_keep},
    validate::check_overlap,
};

/// A whole config.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// None if the file does not set it; `--url` or `DATABASE_URL` is used then.
    pub(crate) url: Option<DatabaseUrl>,
    pub(crate) database: Database,
    pub(crate) pipelines: Vec<Pipeline>,
    /// What is removed while a relay runs, and when.
    pub(crate) retention: Retention,
    /// What the other pipelines of a process do when one ends by itself.
    pub(crate) on_end: OnEnd,
}

/// How to use the database.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Database {
    pub(crate) schema: Option<String>,
    pub(crate) table: Option<String>,
    /// The shape of airtight's own outbox; None to keep the existing shape.
    pub(crate) shape: Option<Shape>,
    pub(crate) spec: Option<TableSpec>,
    pub(crate) max_connections: Option<u32>,
    /// Whether the outbox wakes relays up; a trigger that `migrate` adds.
    pub(crate) notify: Option<bool>,
    pub(crate) listen: Option<bool>,
    pub(crate) listen_url: Option<Secret>,
    pub(crate) prepared_statements: Option<bool>,
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
        let root = Section::root(&doc, &root, &["database", "pipelines", "table", "retention", "run"])?;

        let (url, mut database) =
            root.get("database").map(|value| read_database(&value)).transpose()?.unwrap_or_default();
        let mut retention = Retention::default();
        if let Some(value) = root.get("table") {
            if database.table.is_some() {
                return Err(value.error(
                    "`database.table` names airtight's own table, but [table] maps another table: remove one of them",
                ));
            }
            if database.shape.is_some() {
                return Err(value.error(
                    "`database.shape` applies to airtight's own table, but [table] maps another table: remove one of them",
                ));
            }
            let mapped = table::read(&value)?;
            retention = if mapped.is_relay_log { Retention::relay_log() } else { Retention::foreign() };
            database.spec = Some(mapped.spec);
        }
        let pipelines = match root.get("pipelines") {
            Some(value) => pipeline::read_all(&value, database.default_read(), database.spec.as_ref())?,
            None => Vec::new(),
        };
        if let Some(value) = root.get("retention") {
            retention.read(&value)?;
            if let Some(spec) = &database.spec {
                retention.check(spec).map_err(|message| value.error(message))?;
            }
        }
        let on_end = root.get("run").map(|value| read_run(&value)).transpose()?.unwrap_or_default();
        Ok(Self { url, database, pipelines, retention, on_end })
    }
}

impl Database {
    /// How the outbox is read by default: a table without a status can only be followed.
    fn default_read(&self) -> ReadWord {
        let is_log = match &self.spec {
            Some(spec) => spec.status.is_none(),
            None => self.shape == Some(Shape::Log),
        };
        if is_log { ReadWord::Log } else { ReadWord::Queue }
    }
}

fn read_database(value: &Value<'_>) -> Result<(Option<DatabaseUrl>, Database)> {
    let section = value.section(&[
        "url",
        "schema",
        "table",
        "shape",
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
        shape: section
            .get("shape")
            .map(|value| value.word(&[("queue", Shape::Queue), ("log", Shape::Log)]))
            .transpose()?,
        spec: None,
        max_connections: section.number("max_connections", 1)?,
        notify: section.boolean("notify")?,
        listen: section.boolean("listen")?,
        listen_url: section.text("listen_url")?.map(Secret::new),
        prepared_statements: section.boolean("prepared_statements")?,
    };
    Ok((url, database))
}

fn read_run(value: &Value<'_>) -> Result<OnEnd> {
    let words = [("continue", OnEnd::Continue), ("stop", OnEnd::Stop)];
    let on_end = value.section(&["on_pipeline_end"])?.get("on_pipeline_end").map(|value| value.word(&words));
    Ok(on_end.transpose()?.unwrap_or_default())
}

fn parsed<T>(value: &Value<'_>, parse: impl Fn(&str) -> std::result::Result<T, String>) -> Result<T> {
    parse(&value.text()?).map_err(|message| value.error(message))
}

#[cfg(test)]
mod documented;
#[cfg(test)]
mod tests;
