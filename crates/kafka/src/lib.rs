//! Events to Kafka, and from there back to handlers, through librdkafka, which is built in.
//!
//! [`KafkaSink`] delivers, [`KafkaSource`] reads a consumer group's topics for the same relay, and
//! [`NonAtomicKafkaBus`] publishes without an outbox. What follows is about the sink; the source's promises are its own
//! documentation.
//!
//! ```no_run
//! # fn main() -> airtight_core::Result<()> {
//! use airtight_kafka::{KafkaConfig, KafkaSink};
//!
//! let config = KafkaConfig::from_url("kafka://localhost:9092/ivm.events.{aggregate_type}?format=event")?;
//! let sink = KafkaSink::new(config)?;
//! # let _ = sink;
//! # Ok(()) }
//! ```
//!
//! # What a consumer sees
//!
//! The key is the aggregate id, hashed as Java's clients do (`murmur2_random`), so that a topic may be written by
//! both. The value is one of the [formats](airtight_core::format), or `debezium`, and headers carry what it does not. A delete is a
//! message without a value, a tombstone to compacted topics, and what it says of itself is in the header `payload`;
//! `tombstones = false` writes it like any other event. `debezium` has no deletes and `cloudevents` no message
//! without a value: there a delete is an event like others.
//!
//! With `debezium` everything is as Debezium's outbox event router and Kafka Connect's converters have it
//! ([`airtight_debezium`]): topic and key, null headers, time and partition.
//!
//! # What is promised
//!
//! - **Delivered means acknowledged by all in-sync replicas** (`acks=all`, idempotent). Whether that survives the
//!   loss of a broker is the topic's business: `min.insync.replicas` of 2 or more.
//! - **A prefix per key**, pipelined: see [`KafkaSink`]. The settings that this rests on cannot be changed.
//! - **In order per key** as long as the number of a topic's partitions stays: more partitions move keys.
//! - **Bounded memory.** librdkafka holds what the relay has under way, and nothing is left with it when a call
//!   returns.
//!
//! # What an error means
//!
//! | what Kafka says | class, code |
//! | --- | --- |
//! | message too large for the topic, or for `max_message_bytes` | permanent, `too_large`: this event alone, found by sending suspects one by one |
//! | invalid record or timestamp | permanent, `refused` |
//! | a topic's name that Kafka refuses; a field that the template lacks | permanent, `bad_topic`, `missing_field` |
//! | login refused; TLS fails | unavailable, `credentials`, `tls` |
//! | no right to write with idempotence | unavailable, `rights` |
//! | no right to write to a topic, or to create it | unavailable for this topic, `rights` |
//! | topic missing, and neither we nor the broker may create it | unavailable for this topic, `no_topic` |
//! | fewer replicas in sync than `min.insync.replicas`; a partition without a leader | unavailable for this topic, `too_few_replicas`, `no_leader` |
//! | connection refused, host not found, no answer, another protocol | unavailable, `connect`, `dns`, `no_answer`, `not_kafka` |
//! | brokers that cannot be reached where the cluster says they are | unavailable, `advertised` |
//! | nothing acknowledged for `timeout` | unavailable, as the cause |
//! | a fatal error of the producer | none: a new producer is made, and the call goes on |
//!
//! librdkafka retries what may pass by itself, in order, for as long as the call lasts.

mod bus;
mod client;
mod complaint;
mod config;
mod connection;
mod encode;
mod errors;
mod open_partitions;
mod route;
mod sink;
mod source;
mod targets;
mod topics;

pub use self::{
    bus::NonAtomicKafkaBus,
    config::KafkaConfig,
    connection::{KafkaConnection, Sasl},
    route::Route,
    sink::KafkaSink,
    source::{KafkaSource, KafkaSourceConfig, Retry, Start},
};
