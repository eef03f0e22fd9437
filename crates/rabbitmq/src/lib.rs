//! Events to RabbitMQ, by AMQP 0-9-1, with publisher confirms.
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
//! # Where to
//!
//! `amqp://user:password@host:5672/VHOST?key=value`, or `amqps://` (port 5671). The path is the virtual host, by
//! AMQP's rules: without one it is `/`, and a slash in its name is written `%2F`. Without a user it is `guest`.
//!
//! | key | default | |
//! | --- | --- | --- |
//! | `exchange` | | a template; empty is the default exchange, whose routing keys are names of queues |
//! | `routing_key` | `{stream}` | a template |
//! | `declare` | `false` | declare the exchange, or with the default exchange the queue, before its first message; durable |
//! | `exchange_type` | `topic` | `direct`, `fanout`, `headers`, `topic` or a plugin's `x-…` |
//! | `queue_type` | `classic` | or `quorum` |
//! | `unroutable` | `wait` | what becomes of an event that no queue wants: `wait` or `dead`; see below |
//! | `format` | `envelope` | see [`airtight_core::format`] |
//! | `timeout` | `10s` | for a message to be confirmed |
//! | `connect_timeout` | `5s` | for connecting and logging in |
//! | `window` | `128` | messages under way, each of another key and on a channel of its own |
//! | `heartbeat` | `10s` | a connection on which nothing was heard for twice as long is given up |
//! | `ca` | | a file of certificates to trust besides the system's |
//! | `name` | `airtight` | the connection's name in the broker's tools |
//!
//! # What a message looks like
//!
//! Persistent (`delivery_mode` 2), with the event's id as `message_id`, its type as `type`, its time as `timestamp`
//! (in seconds) and the `content_type`; the rest is as the format says. Header values are long strings, in UTF-8.
//! AMQP's names have at most 255 bytes, and a broker gives a meaning to some headers of its own:
//!
//! - an id or type that is longer is left out of the properties; the format has it elsewhere;
//! - headers with longer names are collected in one, `airtight-long-names`, a JSON object;
//! - the event's headers `CC` and `BCC`, by which a broker would route, are written `header.CC` and `header.BCC`.
//!
//! # What an answer means
//!
//! | answer | class, code |
//! | --- | --- |
//! | confirmed (`basic.ack`) | delivered |
//! | returned: no queue for it | unavailable `unroutable`, or permanent with `unroutable = "dead"` |
//! | not stored (`basic.nack`): a full queue with `reject-publish`, a fault of the queue | unavailable `nack` |
//! | no exchange or queue of that name (404) | unavailable `no_exchange`, `no_queue` |
//! | there is one with other settings (406) | unavailable `declared_differently` |
//! | no right to it (403) | unavailable `not_permitted` |
//! | wrong user or password; no such virtual host (530) | unavailable `credentials`, `no_vhost` |
//! | over `max_message_size`; headers over `frame_max` | permanent `too_large` |
//! | a routing key or exchange of more than 255 bytes; a queue to be declared as `amq.…` | permanent `bad_name` |
//! | refused for something else in it (406) | permanent `refused` |
//! | an alarm of the broker, for memory or disk (`connection.blocked`) | unavailable `blocked` |
//! | no confirmation in time, from a broker that is there; from one that is not | retryable, unavailable `timeout` |
//! | nobody there, another protocol, no TLS, a lost connection | unavailable `unreachable`, `wrong_protocol`, `tls`, `connection_lost` |
//!
//! Where exchange or routing key are templates, 403, 404 and 406 are about that exchange alone, and `unroutable` and `nack`
//! about that routing key: events for others go on.
//!
//! **An unroutable event** waits, as for a missing topic, even if its routing key is made from its own fields: the event is
//! sound, the binding is missing, and once an operator has made it the event can go. Until then all with that routing key
//! wait, and none is dead. Where routing keys are many and nobody needs all of them, that is the wrong answer: say `unroutable = "dead"`, or give the exchange an alternate one, which takes what nobody else does.
//!
//! # What a confirmation promises, and what it does not
//!
//! RabbitMQ confirms a persistent message when every queue that it was routed to has it: a durable classic queue when
//! it is on that node's disk, a quorum queue when a majority of its nodes has it on theirs. It does not promise
//!
//! - anything for queues that are not durable, which a restart empties, and exchanges that are not, which it deletes;
//! - that a queue keeps it: `x-message-ttl`, `x-max-length` without `reject-publish` and a purge take confirmed
//!   messages;
//! - that a classic queue survives the loss of its node's disk;
//! - that a queue itself survives a crash within a second or so of its declaration (seen with 3.10: it was forgotten,
//!   and the messages with it);
//! - that the *right* queues were bound. One is enough for a confirmation.
//!
//! After a lost connection the messages under way are sent again: consumers see some twice, with the same id.

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
