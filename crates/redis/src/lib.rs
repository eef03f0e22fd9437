//! Events into Redis Streams.
mod check;
mod client;
mod config;
mod encode;
mod refusal;
mod sink;
mod tls;

pub use self::{config::RedisConfig, sink::RedisSink};
