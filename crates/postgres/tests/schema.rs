//! What the database itself refuses and what `migrate` creates: numbers that are in use, tables that are missing, rows
//! that no relay could deliver.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "schema/clash.rs"]
mod clash;
#[path = "schema/missing.rs"]
mod missing;
#[path = "schema/refused.rs"]
mod refused;
#[path = "log/support.rs"]
#[allow(dead_code, reason = "shared with the log's tests, which use all of it")]
mod support;
