//! Events into NATS JetStream: one message per event, acknowledged by the stream that has stored it.
//!
//! ```no_run
//! # fn main() -> airtight_core::Result<()> {
//! use airtight_nats::{NatsConfig, NatsSink};
//!
//! let sink = NatsSink::new(NatsConfig::from_url("nats://relay:secret@n1:4222,n2:4222/orders.{event_type}?stream=ORDERS")?)?;
//! # let _ = sink;
//! # Ok(()) }
//! ```
//!
//! The URL is `nats://[user:password@|token@]host[:port][,host[:port]…][/SUBJECT][?key=value&…]`; `tls://` and
//! `nats+tls://` insist on encryption, and a server that asks for it gets it with `nats://` too. The subject is a
//! [template](airtight_core::route::Template), `{stream}` by default; the keys are the fields of [`NatsConfig`].
//! Any of the servers will do; those that a cluster advertises are not used, so list the ones to fall back on.
//!
//! # What a consumer sees
//!
//! The body and the headers are those of the [format](airtight_core::format). Besides, there are:
//!
//! | header | content |
//! | --- | --- |
//! | `Nats-Msg-Id` | the event's id and the subject, `id/subject`. By it the stream drops repeats, for as long as its duplicate window (2 minutes by default). An id that is not a UUID may be another table's too, so there it is `id/subject/stream/aggregate type/aggregate id/seq/time in microseconds`. What a replay asked for has `/replay/` and the replay's number behind it |
//! | `Nats-Expected-Stream` | `stream`, where it is set, so that no other stream takes the event |
//! | `content-type` | what the body is, where the format says so |
//!
//! There is no key in NATS: the aggregate id is the header `aggregateId` (formats `raw` and `event`) or in the
//! body, and may be in the subject. A delete is a message like others, with the header `op`.
//!
//! Header values are percent-encoded where NATS could not carry them (and `%` itself, so that decoding is never
//! ambiguous). So are the characters of a name that no name can have: `:`, `%`, spaces, what is not ASCII. An
//! event's own header that would mean something to the server or to client libraries (`Nats-…`, `Status`,
//! `Description`), and one with an empty name, comes behind `header.`: `header.Nats-Rollup`. None is lost.
//!
//! # What an answer means
//!
//! | answer | class | code |
//! | --- | --- | --- |
//! | the stream's acknowledgement, of a repeat too | delivered | |
//! | the subject that the template makes of this event is none, or is the server's (`$JS.…`) | permanent | `bad_name` |
//! | over the server's `max_payload`, the stream's `max_msg_size`, or 64 KiB of headers | permanent | `too_large` |
//! | this subject is full (`discard_new_per_subject`) | retryable | `subject_full` |
//! | JetStream is busy, or refuses for a reason not known here | retryable | `busy`, `server_error` |
//! | no connection: refused, no greeting in time, no such host, TLS | unavailable | `unreachable`, for TLS `tls` |
//! | something else than NATS on the port | unavailable | `wrong_protocol` |
//! | the connection broke while an answer was due | unavailable | `connection_lost` |
//! | wrong or missing credentials | unavailable | `credentials` |
//! | no right to publish there, or to hear the answer | unavailable | `not_permitted` |
//! | no stream takes the subject | unavailable | `no_stream` |
//! | another stream than `stream` takes it | unavailable | `wrong_stream` |
//! | something else than a stream answered | unavailable | `not_jetstream` |
//! | the stream is full, sealed, or cannot write | unavailable | `stream_full`, `sealed` |
//! | JetStream has no leader, no resources, or is not enabled | unavailable | `server_error`, `no_jetstream` |
//! | no acknowledgement within `timeout` | unavailable | `timeout` |
//!
//! Where the subject is a template, these are about the event's subject alone, and others go on: `not_permitted` to publish,
//! `no_stream`, `wrong_stream`, `not_jetstream`, `stream_full`, `sealed`, and `timeout` from a server that answers otherwise.
//!
//! An acknowledgement that does not come is *unavailable* and not *retryable*, because its causes are the
//! stream's: no quorum, a server that is stuck, `no_ack`. None of them should use up the attempts of events.
//!
//! # What JetStream promises
//!
//! A stream acknowledges when it has stored the message: in a stream of one replica, written to the file but not
//! fsynced (the server does that every two minutes, `sync_interval`); in one of three, written by two servers. So a
//! server that crashes loses nothing that was acknowledged, and a machine that loses power may, with one replica.
//! For events that must survive that, use three replicas on machines that do not fail together, or set
//! `sync_interval: always` (nats-server 2.10 and later). A stream in memory forgets with its server, which is
//! warned of; and what a stream's own limits discard, or `interest` retention does not keep, is gone as its owner
//! has decided.
//!
//! Events of one key arrive in order, on first sight: the next is sent when the one before was acknowledged.
//! Repeats are dropped within the duplicate window and may be seen after it.

mod client;
mod config;
mod destination;
mod encode;
mod errors;
mod resolved;
mod sink;
mod subject;
mod tls;

pub use self::{config::NatsConfig, sink::NatsSink};
