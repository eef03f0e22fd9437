//! The log under load and under failures: many writers that roll back and prepare, consumers that vanish, a server that
//! crashes, handlers that are killed. Each test has a short form, which runs with the others; `AIRTIGHT_TORTURE_SECONDS`
//! sets how long it runs (see CONTRIBUTING.md).

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "log_torture/children.rs"]
mod children;
#[path = "log_torture/crash.rs"]
mod crash;
#[path = "log_torture/exactly_once.rs"]
mod exactly_once;
#[path = "log_torture/group.rs"]
mod group;
#[path = "log_torture/readers.rs"]
mod readers;
#[path = "log_torture/writers.rs"]
mod writers;

use std::time::Duration;

/// How long the load lasts.
pub(crate) fn seconds(short: u64) -> Duration {
    let asked = std::env::var("AIRTIGHT_TORTURE_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(short))
}
