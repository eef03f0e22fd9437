//! How an outbox is followed through the WAL.

use std::fmt;

use airtight_core::{Code, Error, Result, log::LogOptions};

/// How an outbox is followed through the WAL.
#[derive(Clone, PartialEq, Eq)]
pub struct CdcOptions {
    /// The options that a reader shares with a log's consumer. The name of the consumer is the name of the slot.
    pub log: LogOptions,
    /// The publication. It is created if it does not exist.
    pub publication: String,
    /// Whether the rows that are already in the table are delivered first.
    pub snapshot: Snapshot,
    /// Whether delivered rows are marked as done, if the table has a status.
    pub mark: bool,
    /// The prefix of the logical messages that are delivered, too. With `None`, none are.
    pub messages: Option<String>,
    /// How many bytes of events may be read and not settled yet.
    pub buffer_bytes: usize,
    /// Whether the slot is also kept on standbys, if the server supports this (PostgreSQL 17).
    pub failover: bool,
    /// The server to replicate from, if it is not the one that the pool connects to: a pooler cannot replicate.
    pub url: Option<String>,
}

/// Whether the rows that are already in the table are delivered before the events of the WAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Snapshot {
    /// At the reader's first start, also if the slot existed before. Nothing is left out; some events may be delivered twice.
    #[default]
    Initial,
    /// Only if the slot is new. A slot that existed before is read from its position on: another program has delivered
    /// everything before that.
    NewSlot,
    /// Never: only events that are committed after the slot's position are delivered.
    Never,
}

impl fmt::Debug for CdcOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        let Self { log, publication, snapshot, mark, messages, buffer_bytes, failover, url: _ } = self;
        f.debug_struct("CdcOptions")
            .field("log", log)
            .field("publication", publication)
            .field("snapshot", snapshot)
            .field("mark", mark)
            .field("messages", messages)
            .field("buffer_bytes", buffer_bytes)
            .field("failover", failover)
            .finish_non_exhaustive()
    }
}

impl CdcOptions {
    /// The defaults for a slot of this name.
    pub fn slot(name: impl Into<String>) -> Self {
        let name = name.into();
        Self {
            publication: name.clone(),
            log: LogOptions::consumer(name),
            snapshot: Snapshot::Initial,
            mark: true,
            messages: Some("airtight".into()),
            buffer_bytes: 8 << 20,
            failover: true,
            url: None,
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let name = &self.log.consumer;
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if name.is_empty() || name.len() > 63 || !name.chars().all(fits) {
            return Err(Error::permanent(
                Code::BAD_NAME,
                format!(
                    "a slot's name has 1 to 63 lower-case letters, digits and underscores, `{name}` does not"
                ),
            ));
        }
        if self.publication.is_empty() || self.publication.len() > 63 {
            return Err(Error::permanent(Code::BAD_NAME, "a publication's name has 1 to 63 bytes"));
        }
        Ok(())
    }
}
