//! Events to Kafka.

mod client;
mod config;
mod encode;
mod errors;
mod sink;

pub use self::{
    config::{KafkaConfig, KafkaConnection, Sasl},
    sink::KafkaSink,
};
