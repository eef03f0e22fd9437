//! Placeholder docs.

mod answer;
mod client;
mod config;
mod destination;
mod encode;
mod sink;
mod subject;
mod tls;

pub use self::{config::NatsConfig, sink::NatsSink};
