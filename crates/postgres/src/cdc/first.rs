//! The first session of a reader: the publication, the slot, and the rows that are already in the table.

use std::time::Duration;

use airtight_core::{Class, Code, Error, Result, table::literal};
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    Lsn, Snapshot,
    feed::{Boundary, Raw},
    publication::{Contents, to_json},
    session::Session,
    slot::{self, Server, Slot},
    state::{self, Entry, Phase, Stored},
    wire::Wire,
};

/// How many rows of the table are fetched at once: at most, and while nothing is known of their size.
const FETCH: (usize, usize) = (500, 10);

impl Session {
    /// The first session since this relay took the reader over: finds out where to begin. Returns a connection to
    /// stream from.
    pub(super) async fn begin(
        &mut self,
        mut wire: Wire,
        server: &Server,
        stored: Stored,
        slot: Option<Slot>,
    ) -> Result<Wire> {
        let shared = self.shared.clone();
        let settled = shared.settled();
        if stored.phase == Phase::Streaming {
            let lsn = stored.lsn.unwrap_or_default();
            shared.begin(Boundary { seq: stored.seq, lsn, ..Boundary::default() }, settled, true);
            return Ok(wire);
        }
        let first = Boundary { seq: settled, ..Boundary::default() };
        let given = slot.is_some() && stored.phase == Phase::New;
        let skip = match shared.options.snapshot {
            Snapshot::Initial => false,
            Snapshot::NewSlot => given,
            Snapshot::Never => true,
        };
        let reader = shared.reader(self.name())?;
        // Before the slot: decoding sees publications as they were when the WAL was written.
        let made = if slot.is_none() { reader.ensure().await? } else { false };
        let published = reader.contents_now().await?;
        let (place, snapshot) = match slot {
            // What is acknowledged is never behind what was acknowledged.
            Some(slot) => (slot.confirmed.unwrap_or_default().max(stored.lsn.unwrap_or_default()), None),
            None => {
                // Written down first: killed in between, this one must not be taken for a slot that was given.
                self.enter(Phase::Snapshot, first, server, published.as_ref()).await?;
                match self.create(&mut wire).await {
                    Err(error) if made && error.class() == Class::Permanent => {
                        reader.take_back().await;
                        return Err(error);
                    }
                    created => created?,
                }
            }
        };
        let (phase, at) = if skip { (Phase::Streaming, place) } else { (Phase::Snapshot, place) };
        let boundary = Boundary { lsn: at, ..first };
        self.enter(phase, boundary, server, published.as_ref()).await?;
        shared.begin(if skip { boundary } else { first }, settled, skip);
        shared.set_start(place);
        if !skip {
            self.snapshot(snapshot).await?;
        }
        // The old connection has held the snapshot until it was imported.
        wire.close().await;
        Wire::connect_for_replication(&shared.endpoint).await
    }

    async fn enter(
        &self,
        phase: Phase,
        at: Boundary,
        server: &Server,
        published: Option<&Contents>,
    ) -> Result<()> {
        let shared = &self.shared;
        let entry = Entry { phase, at, system: &server.system, published: to_json(published) };
        let entered = state::enter(&shared.outbox, shared.columns()?, &self.member, self.epoch, entry);
        if entered.await? {
            return Ok(());
        }
        Err(Error::retryable(Code::FENCED, "another relay has taken over the reader"))
    }

    /// Makes the slot, which waits for all transactions that are open, and says for which.
    async fn create(&self, wire: &mut Wire) -> Result<(Lsn, Option<String>)> {
        let name = self.name().to_owned();
        let pid = wire.pid();
        let made = slot::create(wire, &name, self.version, self.shared.options.failover);
        let made = self.patiently(pid, "creating the slot", made);
        tokio::pin!(made);
        let mut wait = Duration::from_secs(2);
        loop {
            tokio::select! {
                made = &mut made => {
                    let (place, snapshot) = made?;
                    tracing::info!(slot = name, at = %place, "created the slot");
                    return Ok((place, snapshot));
                }
                () = tokio::time::sleep(wait) => {
                    let writers = slot::writers(&self.shared.outbox).await.unwrap_or_default();
                    tracing::warn!(
                        slot = name,
                        "creating the slot waits for open transactions: {}",
                        if writers.is_empty() { "none is known".into() } else { writers.join(", ") }
                    );
                    wait = (wait * 2).min(Duration::from_secs(60));
                }
            }
        }
    }

    /// Delivers what is in the table, finished rows excepted: as of `snapshot`, or as of now where that is lost. What
    /// comes after it comes by the stream, some of it perhaps for the second time.
    pub(super) async fn snapshot(&self, snapshot: Option<String>) -> Result<()> {
        let shared = &self.shared;
        let c = shared.columns()?;
        let mut wire = Wire::connect(&shared.endpoint).await?;
        wire.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "beginning the snapshot").await?;
        if let Some(snapshot) = &snapshot {
            let set = format!("SET TRANSACTION SNAPSHOT {}", literal(snapshot));
            wire.query(&set, "taking the slot's snapshot").await?;
        }
        let open = shared.marks().map_or("true".into(), |marks| marks.is_open());
        let order = if c.spec.seq.is_some() || c.spec.created_at.is_some() {
            format!("ORDER BY {}", c.order().join(", "))
        } else {
            // Nothing says which came first. An id may be random; where a row lies is the nearest to it that there is.
            wire.query("SET LOCAL synchronize_seqscans = off", "beginning the snapshot").await?;
            String::new()
        };
        let declare = format!(
            "DECLARE airtight NO SCROLL CURSOR FOR SELECT t.* FROM {} t WHERE {open} {order}",
            c.table
        );
        let pid = wire.pid();
        self.patiently(pid, "reading the table", wire.ask(&declare, "reading the table")).await?;
        let (mut mapping, mut rows, mut told) = (None, 0_u64, Instant::now());
        let (mut count, mut largest) = (FETCH.1, 1);
        shared.feed().resume_at_end();
        loop {
            let fetch = format!("FETCH {count} FROM airtight");
            let asked = wire.ask(&fetch, "reading the table");
            let table = self.patiently(pid, "reading the table", asked).await?;
            if table.rows.is_empty() {
                break;
            }
            largest = table.rows.iter().map(|row| size(row)).max().unwrap_or(1).max(largest);
            count = fetch_count(largest, shared.options.buffer_bytes);
            let mapping = match &mapping {
                Some(mapping) => mapping,
                None => {
                    let columns = table
                        .columns
                        .iter()
                        .map(|column| (column.name.clone(), column.type_oid, column.type_modifier));
                    mapping.insert(self.mapping(columns.collect()).await?)
                }
            };
            rows += table.rows.len() as u64;
            for values in table.rows {
                self.wait_for_room().await;
                let raw = if shared.wants(mapping, &values) {
                    Raw::Values(mapping.clone(), values)
                } else {
                    Raw::Unwanted
                };
                shared.feed().push(raw);
            }
            shared.arrived.notify_one();
            if told.elapsed() > Duration::from_secs(10) {
                told = Instant::now();
                tracing::info!(slot = self.name(), rows, "delivering what is in the table");
            }
        }
        wire.query("COMMIT", "ending the snapshot").await?;
        wire.close().await;
        shared.end_snapshot();
        tracing::info!(slot = self.name(), rows, "the table was read");
        Ok(())
    }
}

fn size(row: &[Option<Bytes>]) -> usize {
    row.iter().flatten().map(Bytes::len).sum()
}

/// How many rows to fetch next, when the largest so far had so many bytes: they are in memory before there is room
/// for them, so a quarter of what may be.
fn fetch_count(largest: usize, buffer: usize) -> usize {
    (buffer / 4 / largest.max(1)).clamp(1, FETCH.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_rows_are_fetched_few_at_a_time() {
        assert_eq!(fetch_count(1, 32 << 20), 500);
        assert_eq!(fetch_count(1 << 20, 32 << 20), 8);
        assert_eq!(fetch_count(1 << 30, 32 << 20), 1);
        assert_eq!(size(&[None, Some(Bytes::from_static(b"abc"))]), 3);
    }
}
