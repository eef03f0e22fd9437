//! How an outbox is followed through the WAL.

use std::fmt;

use airtight_core::{Code, Error, Result, log::LogOptions};

/// How an outbox is followed through the WAL.
#[derive(Clone, PartialEq, Eq)]
pub struct CdcOptions {
    /// What it has in common with a log's consumer; its name is the slot's.
    pub log: LogOptions,
    /// The publication; made if it is not there.
    pub publication: String,
    /// Whether what is in the table already is delivered first.
    pub snapshot: Snapshot,
    /// Whether delivered rows get the table's word for it, where it has a status.
    pub mark: bool,
    /// The prefix of logical messages that are delivered, too; none for none.
    pub messages: Option<String>,
    /// How many bytes may be read ahead of what is settled.
    pub buffer_bytes: usize,
    /// Whether the slot is kept on standbys, too, where the server can (PostgreSQL 17).
    pub failover: bool,
    /// Where to replicate from, if not where the pool connects to: a pooler cannot replicate.
    pub url: Option<String>,
}

/// Whether what is in the table already is delivered before what is in the WAL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Snapshot {
    /// At the reader's first start, also when the slot was there before: nothing is left out, some may come twice.
    #[default]
    Initial,
    /// Only if the slot is new. One that was there before is read on from where it stands: somebody else has delivered
    /// what is before that.
    NewSlot,
    /// Never: only what is committed from the slot's place on.
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
