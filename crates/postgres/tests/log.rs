//! The log on a real PostgreSQL: what is particular to it. What every store must do is in the conformance suite.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "log/failover.rs"]
mod failover;
#[path = "log/handlers.rs"]
mod handlers;
#[path = "log/instances.rs"]
mod instances;
#[path = "log/relay_log.rs"]
mod relay_log;
#[path = "log/set_back.rs"]
mod set_back;
#[path = "log/support.rs"]
mod support;
#[path = "log/table.rs"]
mod table;
#[path = "log/traps.rs"]
mod traps;
#[path = "log/upkeep.rs"]
mod upkeep;
#[path = "log/waiting_keys.rs"]
mod waiting_keys;
