//! The store against real files. Nothing here sleeps: where time must pass, the row's times are set back.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic like tests")]

mod admin;
mod common;
mod disk;
mod follow;
mod foreign;
mod inbox;
mod log;
mod model;
mod order;
mod publish;
mod queue;
mod relay;
mod replay;
mod schema;
