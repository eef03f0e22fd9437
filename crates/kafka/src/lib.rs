//! x
mod config;
pub use config::{KafkaConfig, KafkaConnection, Sasl};
