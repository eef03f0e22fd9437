//! Delivers events to RabbitMQ over AMQP 0-9-1, with publisher confirms.
//!
//! ```no_run
//! # fn main() -> airtight_core::Result<()> {
//! use airtight_rabbitmq::{RabbitmqConfig, RabbitmqSink};
//!
//! let mut config = RabbitmqConfig::from_url("amqp://shop:secret@rabbit.example/live?exchange=orders")?;
//! config.set("routing_key", "{aggregate_type}.{event_type}")?;
//! let sink = RabbitmqSink::new(config)?;
//! # let _ = sink;
//! # Ok(()) }
//! ```
//!
//! # The URL and its keys
//!
//! The URL is `amqp://user:password@host:5672/VHOST?key=value`, or `amqps://` (port 5671). The path is the virtual host, by
//! AMQP's rules: without a path it is `/`, and a slash in its name is written `%2F`. The default user is `guest`.
//!
//! | key | default | |
//! | --- | --- | --- |
//! | `exchange` | | a template; empty is the default exchange, whose routing keys are names of queues |
//! | `routing_key` | `{stream}` | a template |
//! | `declare` | `false` | declare the exchange, or with the default exchange the queue, before its first message; durable |
//! | `exchange_type` | `topic` | `direct`, `fanout`, `headers`, `topic` or a plugin's `x-…` |
//! | `queue_type` | `classic` | or `quorum` |
//! | `unroutable` | `wait` | what happens to an event that no queue takes: `wait` or `dead`; see below |
//! | `format` | `envelope` | see [`airtight_core::format`] |
//! | `timeout` | `10s` | how long the broker may take to confirm a message |
//! | `connect_timeout` | `5s` | how long connecting and logging in may take |
//! | `window` | `128` | how many messages may be under way, each of a different key and on its own channel |
//! | `heartbeat` | `10s` | the connection is given up if the broker sends nothing for twice as long |
//! | `ca` | | a file of certificates to trust, in addition to the system's |
//! | `name` | `airtight` | the connection's name in the broker's tools |
//!
//! # What a message looks like
//!
//! A message is persistent (`delivery_mode` 2). It has the event's id as `message_id`, its type as `type`, its time as
//! `timestamp` (in seconds) and the `content_type`; the format decides the rest. Header values are long strings, in UTF-8.
//! AMQP's names have at most 255 bytes, and some headers have a meaning to the broker:
//!
//! - a longer id or type is left out of the properties; the format carries it elsewhere;
//! - headers with longer names are collected in one header, `airtight-long-names`, a JSON object;
//! - the event's headers `CC` and `BCC`, which a broker would use for routing, are written `header.CC` and `header.BCC`.
//!
//! # What an answer means
//!
//! | answer | class, code |
//! | --- | --- |
//! | confirmed (`basic.ack`) | delivered |
//! | returned: no queue for it | unavailable `unroutable`, or permanent with `unroutable = "dead"` |
//! | not stored (`basic.nack`): the queue is full with `reject-publish`, or failed | unavailable `nack` |
//! | no exchange or queue of that name (404) | unavailable `no_exchange`, `no_queue` |
//! | the exchange or queue exists with other settings (406) | unavailable `declared_differently` |
//! | the user lacks a right (403) | unavailable `not_permitted` |
//! | wrong user or password; no such virtual host (530) | unavailable `credentials`, `no_vhost` |
//! | over `max_message_size`; headers over `frame_max` | permanent `too_large` |
//! | a routing key or exchange of more than 255 bytes; a queue to be declared as `amq.…` | permanent `bad_name` |
//! | refused for another reason in the message (406) | permanent `refused` |
//! | an alarm of the broker, for memory or disk (`connection.blocked`) | unavailable `blocked` |
//! | no confirmation in time; no answer from the broker at all | retryable `timeout`; unavailable `timeout` |
//! | no connection, another protocol, no TLS, a lost connection | unavailable `unreachable`, `wrong_protocol`, `tls`, `connection_lost` |
//!
//! If the exchange or the routing key is a template, 403, 404 and 406 are about that exchange alone, and `unroutable` and
//! `nack` about that routing key alone: events for other destinations are still delivered.
//!
//! **An unroutable event** waits, even if its routing key is made from its own fields: the event is valid and the binding is
//! missing, and the event can be delivered as soon as an operator has bound a queue. Until then all events with that routing
//! key wait, and none becomes dead. If there are many routing keys, and not all of them have a consumer, set
//! `unroutable = "dead"`, or give the exchange an alternate exchange, which takes the messages that no queue takes.
//!
//! # What a confirmation promises, and what it does not
//!
//! RabbitMQ confirms a persistent message when every queue that it was routed to has it: a durable classic queue when
//! the message is on that node's disk, a quorum queue when a majority of its nodes has it on disk. A confirmation does not
//! promise
//!
//! - anything for queues and exchanges that are not durable: a restart empties these queues and deletes these exchanges;
//! - that a queue keeps the message: `x-message-ttl`, `x-max-length` without `reject-publish` and a purge remove confirmed
//!   messages;
//! - that a classic queue survives the loss of its node's disk;
//! - that a queue itself survives a crash within about a second of its declaration (observed with 3.10: the queue and its
//!   messages were lost);
//! - that the *right* queues were bound. One queue is enough for a confirmation.
//!
//! After a lost connection the messages under way are sent again: consumers see some of them twice, with the same id.

mod client;
mod config;
mod encode;
mod errors;
mod resolved;
mod sink;

pub use self::{
    config::{QueueType, RabbitmqConfig, Unroutable},
    sink::RabbitmqSink,
};
