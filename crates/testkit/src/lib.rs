//! What airtight's tests share: isolated databases, scripted faults, and the conformance suites that every
//! source and every sink runs.

pub mod faults;
pub mod http;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod sinks;
