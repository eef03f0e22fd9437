//! CDC: an outbox followed through the WAL.
//!
//! A reader has a replication slot, a publication of inserts, and the same engine as the consumers of a log
//! ([`airtight_core::log::Log`]): [`PgCdc`] is its store. One relay streams, others stand by. Events are numbered in
//! the order of the stream (see `feed`); what fails is parked, from memory, in the transaction that moves the stored
//! position past it.
//!
//! Killed at any point, this process leaves a stored position that is too small, never one that is too large, and
//! the slot is told nothing before it is stored. So the slot's own position is never ahead of ours: if it is, events
//! were lost by somebody's hand, and the reader refuses to go on.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `wire` | a connection that can replicate |
//! | `pgoutput`, `values`, `row`, `emitted` | from messages of the WAL to events |
//! | `feed` | what was read and is not settled |
//! | `slot` | the publication, the slot, and what is wrong with them |
//! | `session` | one connection's worth of reading |
//! | `place` | settling: what is written, and when |
//! | `state` | the statements behind it |

#[allow(dead_code, reason = "the source that reads these is on its way")]
mod emitted;
mod lsn;
#[allow(dead_code, reason = "the source that reads these is on its way")]
mod pgoutput;
#[allow(dead_code, reason = "the source that reads these is on its way")]
mod row;
#[allow(dead_code, unused_imports, reason = "the source that reads these is on its way")]
mod values;

pub use self::lsn::Lsn;

#[cfg(test)]
mod drift;
