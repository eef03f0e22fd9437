//! What airtight's tests share.

pub mod faults;
pub mod http;
#[cfg(feature = "postgres")]
pub mod postgres;
pub mod sinks;
