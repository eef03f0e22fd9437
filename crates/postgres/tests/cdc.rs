//! The WAL as the source, against a real PostgreSQL.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "cdc/basics.rs"]
mod basics;
#[path = "cdc/connection.rs"]
mod connection;
#[path = "cdc/emitted.rs"]
mod emitted;
#[path = "cdc/failover.rs"]
mod failover;
#[path = "support/mod.rs"]
mod foreign;
#[path = "cdc/gaps.rs"]
mod gaps;
#[path = "cdc/half_open.rs"]
mod half_open;
#[path = "cdc/losses.rs"]
mod losses;
#[path = "cdc/marks.rs"]
mod marks;
#[path = "cdc/positions.rs"]
mod positions;
#[path = "cdc/refusals.rs"]
mod refusals;
#[path = "cdc/remedies.rs"]
mod remedies;
#[path = "cdc/schema.rs"]
mod schema;
#[path = "cdc/set_back.rs"]
mod set_back;
#[path = "cdc/settling.rs"]
mod settling;
#[path = "cdc/shutdown.rs"]
mod shutdown;
#[path = "cdc/standby.rs"]
mod standby;
#[path = "cdc/support.rs"]
mod support;
#[path = "cdc/writers.rs"]
mod writers;

/// How long a load lasts; `AIRTIGHT_TORTURE_SECONDS` makes it as long as wanted.
pub(crate) fn seconds(short: u64) -> std::time::Duration {
    let asked = std::env::var("AIRTIGHT_TORTURE_SECONDS").ok().and_then(|text| text.parse().ok());
    std::time::Duration::from_secs(asked.unwrap_or(short))
}
