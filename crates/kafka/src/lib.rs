//! Events to Kafka.

mod bus;
mod client;
mod config;
mod encode;
mod errors;
mod sink;
mod source;

pub use self::{
    bus::NonAtomicKafkaBus,
    config::{KafkaConfig, KafkaConnection, Sasl},
    sink::KafkaSink,
    source::{KafkaSource, KafkaSourceConfig, Retry, Start},
};
