//! Events to Kafka.

mod client;
mod config;
mod encode;
mod errors;
mod sink;
mod source;

pub use self::{
    config::{KafkaConfig, KafkaConnection, Sasl},
    sink::KafkaSink,
    source::{KafkaSource, KafkaSourceConfig, Retry, Start},
};
