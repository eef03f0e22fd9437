//! Kafka as a source, against a real Kafka: what it promises, one test per promise.
#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

#[path = "source/basics.rs"]
mod basics;
#[path = "source/broker.rs"]
mod broker;
#[path = "source/failures.rs"]
mod failures;
#[path = "source/inbox.rs"]
mod inbox;
#[path = "source/rebalance.rs"]
mod rebalance;
#[path = "source/support.rs"]
mod support;
