//! The WAL as the source, against a real PostgreSQL.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "cdc/basics.rs"]
mod basics;
#[path = "support/mod.rs"]
mod foreign;
#[path = "cdc/gaps.rs"]
mod gaps;
#[path = "cdc/schema.rs"]
mod schema;
#[path = "cdc/settling.rs"]
mod settling;
#[path = "cdc/support.rs"]
mod support;
