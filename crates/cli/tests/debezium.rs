//! The real binary in the place of the real Debezium, and beside it.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `same` | one database read by both, through one connector file: the topics are the same byte by byte |
//! | `takeover` | one goes on where the other stopped, there and back |
//! | `files` | files that cannot be honoured, and what is said about them |
//! | `topics` | new topics get all that is reported as delivered |
//! | `support` | files, processes, and what is in Kafka |

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "debezium/files.rs"]
mod files;
#[path = "debezium/same.rs"]
mod same;
#[path = "debezium/scenarios.rs"]
mod scenarios;
#[path = "debezium/support.rs"]
mod support;
#[path = "debezium/takeover.rs"]
mod takeover;
#[path = "debezium/topics.rs"]
mod topics;
