//! Events to RabbitMQ.

mod client;
mod config;
mod encode;
mod error;
mod sink;

pub use self::{
    config::{QueueType, RabbitmqConfig, Unroutable},
    sink::RabbitmqSink,
};
