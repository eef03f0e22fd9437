//! airtight testkit: conformance suites for sources and sinks, fault injection, isolated databases.

pub mod memory_queue;
pub mod sources;
pub mod wait;
