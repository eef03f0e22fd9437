//! airtight testkit

pub mod faults;
pub mod http;
pub mod sinks;
