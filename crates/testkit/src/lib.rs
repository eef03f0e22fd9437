//! What airtight's tests share.

#[cfg(feature = "postgres")]
pub mod postgres;
