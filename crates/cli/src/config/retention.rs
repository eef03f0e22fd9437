//! `[retention]`: what is removed while a relay runs, and when.

use std::time::Duration;

use airtight::log;

use super::{
    file::{Result, Section, Value},
    units,
};

const DAY: Duration = Duration::from_secs(24 * 3_600);

/// How long things are kept; none for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Retention {
    /// Done events of a queue.
    pub(crate) done: Option<Duration>,
    /// Events of a log.
    pub(crate) log: Option<Duration>,
    /// What consumers remember of events they have seen.
    pub(crate) inbox: Option<Duration>,
    /// Whether events of a log that a consumer has not settled stay, however old.
    pub(crate) log_waits_for_consumers: bool,
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
        }
    }
}

impl Retention {
    /// Deleting rows of a table that is not airtight's own is for its owner to ask for.
    pub(super) fn foreign() -> Self {
        Self { done: None, log: None, ..Self::default() }
    }

    /// Its document asks for it: by time, whatever the consumers.
    pub(super) fn relay_log() -> Self {
        Self { done: None, log_waits_for_consumers: false, ..Self::default() }
    }

    /// What the file says wins.
    pub(super) fn read(&mut self, value: &Value<'_>) -> Result<()> {
        let section = value.section(&["done", "log", "inbox", "log_waits_for_consumers"])?;
        for (key, kept) in [("done", &mut self.done), ("log", &mut self.log), ("inbox", &mut self.inbox)] {
            if let Some(given) = keep(&section, key)? {
                *kept = given;
            }
        }
        if let Some(waits) = section.boolean("log_waits_for_consumers")? {
            self.log_waits_for_consumers = waits;
        }
        Ok(())
    }

    /// The same for the store; none to remove nothing.
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

/// `7d`, or `forever`, for which the answer is none.
pub(crate) fn parse(text: &str) -> std::result::Result<Option<Duration>, String> {
    match text {
        "forever" => Ok(None),
        text => units::duration(text).map(Some).map_err(|message| format!("{message}, or `forever`")),
    }
}
