//! What airtight's tests share: isolated databases, scripted faults, and the conformance suites that every
//! source and every sink runs.

pub mod brokers;
pub mod deliveries;
pub mod destinations;
pub mod faults;
pub mod http;
pub mod ledger;
pub mod logged;
pub mod logs;
pub mod memory_log;
pub mod memory_queue;
pub mod mute;
pub mod ports;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "postgres")]
pub mod postgres_server;
mod script;
pub mod sinks;
pub mod small_disk;
pub mod sources;
pub mod wait;
