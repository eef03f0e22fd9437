//! Delivers events to Kafka, and reads them from Kafka for handlers, through librdkafka, which is built in.
//!
//! [`KafkaSink`] delivers events. [`KafkaSource`] reads topics as a member of a consumer group, for the same relay.
//! [`NonAtomicKafkaBus`] publishes without an outbox. This page is about the sink; [`KafkaSource`] documents what the
//! source promises.
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
//! The key is the aggregate id. It is hashed as Java's clients hash keys (`murmur2_random`), so airtight and Java programs
//! can write to the same topic. The value is in one of the [formats](airtight_core::format), or in `debezium`; headers
//! carry what the value does not.
//!
//! A delete is a message without a value, which is a tombstone in a compacted topic. The header `payload` carries the
//! payload of the delete. With `tombstones = false` a delete is written like any other event. The format `debezium` has no
//! deletes, and `cloudevents` has no messages without a value: with these formats a delete is written like any other event.
//!
//! With `debezium`, topic, key, null headers, time and partition are as Debezium's outbox event router and Kafka Connect's
//! converters write them ([`airtight_debezium`]).
//!
//! # What is promised
//!
//! - **Delivered means acknowledged by all in-sync replicas** (`acks=all`, idempotent). To survive the loss of a broker,
//!   the topic needs `min.insync.replicas` of 2 or more.
//! - **A prefix per key**, pipelined: see [`KafkaSink`]. The settings that this depends on cannot be changed.
//! - **In order per key**, as long as the number of the topic's partitions does not change: added partitions move keys.
//! - **Bounded memory.** librdkafka holds only what the relay has under way, and holds nothing after a call has returned.
//!
//! # What an error means
//!
//! | what Kafka says | class, code |
//! | --- | --- |
//! | the message is too large for the topic, or for `max_message_bytes` | permanent, `too_large`, for this event alone; it is found by sending the messages of the refused request one by one |
//! | invalid record or timestamp | permanent, `refused` |
//! | Kafka refuses the topic's name; the event lacks a field of the template | permanent, `bad_name`, `missing_field` |
//! | the login is refused; TLS fails | unavailable, `credentials`, `tls` |
//! | no right to write with idempotence | unavailable, `not_permitted` |
//! | no right to write to a topic, or to create it | unavailable for this topic, `not_permitted` |
//! | the topic is missing, and neither airtight nor the broker may create it | unavailable for this topic, `no_topic` |
//! | fewer replicas in sync than `min.insync.replicas`; a partition without a leader | unavailable for this topic, `too_few_replicas`, `no_leader` |
//! | connection refused or host not found; no answer; another protocol | unavailable, `unreachable`, `timeout`, `wrong_protocol` |
//! | the cluster answers, but nothing answers at the addresses that it gives for its brokers | unavailable, `advertised` |
//! | nothing acknowledged for `timeout` | unavailable, with the code of the cause |
//! | a fatal error of the producer | none: the sink makes a new producer, and the call continues |
//!
//! librdkafka retries errors that may pass, in order, for as long as the call lasts.

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
