//! The core of airtight: the event, the two traits that move it, and the engine between them.
//!
//! Nothing in this crate knows a database or a broker. A database crate implements [`Source`], most often by
//! implementing the smaller [`queue::QueueStore`] or [`log::LogStore`]; [`queue::Queue`] and [`log::Log`] do the rest.
//! A broker crate implements [`Sink`]. [`relay::Relay`] moves events from a source to a sink with order, retries,
//! dead letters and a circuit.
//!
//! | module | what it has |
//! | --- | --- |
//! | [`event`] | the event, before and after it is stored in an outbox |
//! | [`state`] | the states of a row |
//! | [`error`] | errors that say whether to retry, give up or wait |
//! | [`source`], [`sink`] | the delivery contract |
//! | [`rules`] | order and dead events: what a source promises and its relay follows |
//! | [`relay`] | the engine |
//! | [`relays`] | several relays in one process |
//! | [`group`] | relays that share the partitions of the keys |
//! | [`queue`] | claims and leases, shared by all stores |
//! | [`log`] | following an append-only table: offsets, parked events, consumers |
//! | [`inbox`] | which events count as repeats of each other |
//! | [`table`] | `TableSpec`: what each column of an outbox table means |
//! | [`admin`] | the operations that a store offers to an operator |
//! | [`bus`] | one interface for publishing |
//! | [`dispatch`] | typed in-process handlers as a sink |
//! | [`envelope`], [`mod@format`] | the JSON envelope, and the formats of messages |
//! | [`keyed`] | one event of a key at a time, for sinks |
//! | [`route`] | topics and keys from an event's fields |
//! | [`settings`] | a sink's address and keys, as text |
//! | [`sinks`] | memory, stdout, file |

pub mod admin;
pub mod backoff;
pub mod bus;
pub mod dispatch;
pub mod envelope;
pub mod error;
pub mod event;
pub mod format;
pub mod group;
mod hash;
pub mod inbox;
pub mod keyed;
pub mod log;
pub mod metrics;
pub mod queue;
pub mod relay;
pub mod relays;
pub mod route;
pub mod rules;
pub mod settings;
pub mod sink;
pub mod sinks;
pub mod source;
pub mod state;
pub mod table;

/// For implementing [`Source`] and [`Sink`].
pub use async_trait::async_trait;
pub use backoff::Backoff;
pub use bus::{EventBus, NonAtomicBus};
pub use dispatch::Dispatcher;
pub use error::{Class, Code, Error, KnownCode, Result, Scope};
pub use event::{Event, NewEvent, Op, Payload, Published, SourceColumn, SourceRow};
pub use format::Format;
pub use relay::{Policy, Relay};
pub use relays::{OnEnd, Relays, RunningRelays};
pub use rules::{Order, ReadOptions, Rules};
pub use sink::{Capabilities, Outcome, Preview, Sink};
pub use source::{Backlog, Batch, Delivery, Limits, Ownership, Position, Settlement, Source, Verdict};
/// For [`Relay::run`].
pub use tokio_util::sync::CancellationToken;
