//! `[retention]`: what is removed while a relay runs, and when.

use std::{fmt, time::Duration};

use airtight::{admin::Prune, log, table::TableSpec};

use super::{
    file::{Result, Section, Value},
    units,
};

const DAY: Duration = Duration::from_secs(24 * 3_600);

/// How long events are kept; None means forever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retention {
    /// Done events of a queue.
    pub(crate) done: Option<Duration>,
    /// Events of a log.
    pub(crate) log: Option<Duration>,
    /// Inbox entries: what consumers remember of the events that they have seen.
    pub(crate) inbox: Option<Duration>,
    /// Whether events of a log stay while a consumer has not settled them, however old they are.
    pub(crate) log_waits_for_consumers: bool,
    /// Whether the age of done events is the time since they were written, if the table has no delivery time.
    pub(crate) done_by_creation: bool,
    /// Where `done` and `log` were set.
    pub(crate) done_set_by: SetBy,
    pub(crate) log_set_by: SetBy,
}

/// Where a retention was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetBy {
    /// Nowhere.
    Default,
    /// The preset of this name.
    Preset(&'static str),
    /// This key of the config, or this option of the command line.
    Explicitly(&'static str),
}

impl fmt::Display for SetBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("the default"),
            Self::Preset(name) => write!(f, "the preset {name}"),
            Self::Explicitly(what) => f.write_str(what),
        }
    }
}

impl Default for Retention {
    /// For airtight's own tables.
    fn default() -> Self {
        let log = log::Retention::default();
        Self {
            done: Some(7 * DAY),
            log: Some(log.keep),
            inbox: Some(30 * DAY),
            log_waits_for_consumers: log.wait_for_consumers,
            done_by_creation: false,
            done_set_by: SetBy::Default,
            log_set_by: SetBy::Default,
        }
    }
}

impl Retention {
    /// For an application's table: its rows are deleted only if its owner asks for it.
    pub(super) fn foreign() -> Self {
        Self { done: None, log: None, ..Self::default() }
    }

    /// For the preset `relay-log`: events are removed by age, without regard to consumers.
    pub(super) fn relay_log() -> Self {
        let log_set_by = SetBy::Preset("relay-log");
        Self { done: None, log_waits_for_consumers: false, log_set_by, ..Self::default() }
    }

    /// Reads the section, which overrides the defaults.
    pub(super) fn read(&mut self, value: &Value<'_>) -> Result<()> {
        let section =
            value.section(&["done", "done_by_creation", "log", "inbox", "log_waits_for_consumers"])?;
        if let Some(given) = keep(&section, "done")? {
            (self.done, self.done_set_by) = (given, SetBy::Explicitly("[retention] done"));
        }
        if let Some(given) = keep(&section, "log")? {
            (self.log, self.log_set_by) = (given, SetBy::Explicitly("[retention] log"));
        }
        if let Some(given) = keep(&section, "inbox")? {
            self.inbox = given;
        }
        if let Some(by_creation) = section.boolean("done_by_creation")? {
            self.done_by_creation = by_creation;
        }
        if let Some(waits) = section.boolean("log_waits_for_consumers")? {
            self.log_waits_for_consumers = waits;
        }
        Ok(())
    }

    /// Refuses a table that has no column for the age of an event.
    pub(super) fn check(&self, spec: &TableSpec) -> std::result::Result<(), String> {
        match self.done {
            Some(_) if spec.status.is_some() => {
                spec.age_column(self.done_by_creation).map(drop).map_err(|error| error.to_string())
            }
            _ => Ok(()),
        }
    }

    /// Which done events are removed; None to remove nothing.
    pub(crate) fn of_queue(&self) -> Option<Prune> {
        self.done.map(|keep| Prune { by_creation: self.done_by_creation, ..Prune::older_than(keep) })
    }

    /// Which events of a log are removed; None to remove nothing.
    pub(crate) fn of_log(&self) -> Option<log::Retention> {
        self.log.map(|keep| log::Retention { keep, wait_for_consumers: self.log_waits_for_consumers })
    }
}

fn keep(section: &Section<'_>, key: &str) -> Result<Option<Option<Duration>>> {
    match section.get(key) {
        Some(value) if value.is_text() && value.text()? == "forever" => Ok(Some(None)),
        Some(value) => value.duration().map(|keep| Some(Some(keep))),
        None => Ok(None),
    }
}

/// Parses `7d`, or `forever`, which gives None.
pub(crate) fn parse(text: &str) -> std::result::Result<Option<Duration>, String> {
    match text {
        "forever" => Ok(None),
        text => units::duration(text).map(Some).map_err(|message| format!("{message}, or `forever`")),
    }
}
