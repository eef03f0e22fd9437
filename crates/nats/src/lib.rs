//! Delivers events to NATS JetStream: one message per event, acknowledged by the stream that stored it.
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
//! `nats+tls://` require encryption; with `nats://` the connection is encrypted if the server asks for it. The subject is a
//! [template](airtight_core::route::Template), `{stream}` by default. The keys are the fields of [`NatsConfig`].
//! The sink connects to any of the servers in the list. It does not use the servers that a cluster advertises, so list all
//! servers that it may fall back on.
//!
//! # What a consumer sees
//!
//! The [format](airtight_core::format) decides the body and the headers. The sink adds these headers:
//!
//! | header | content |
//! | --- | --- |
//! | `Nats-Msg-Id` | the event's id and the subject, `id/subject`. The stream uses it to drop repeats within its duplicate window (2 minutes by default). An id that is not a UUID may occur in another table too; for such an id the header is `id/subject/stream/aggregate type/aggregate id/seq/time in microseconds`. For an event that a replay sends again, `/replay/` and the replay's number follow |
//! | `Nats-Expected-Stream` | the setting `stream`, if there is one, so that no other stream takes the event |
//! | `content-type` | the content type of the body, if the format has one |
//!
//! NATS has no keys: the aggregate id is in the header `aggregateId` (formats `raw` and `event`) or in the
//! body, and may be in the subject. A delete is a message like any other, with the header `op`.
//!
//! Characters of header values that NATS cannot carry are percent-encoded, and so is `%` itself, so that decoding is never
//! ambiguous. In header names, `:`, `%`, spaces and characters outside ASCII are percent-encoded. A header of the event
//! whose name has a meaning to the server or to client libraries (`Nats-…`, `Status`, `Description`), and a header with an
//! empty name, gets the prefix `header.`: `header.Nats-Rollup`. No header is lost.
//!
//! # What an answer means
//!
//! | answer | class | code |
//! | --- | --- | --- |
//! | the stream acknowledged the message, or a repeat of it | delivered | |
//! | the template gives no valid subject for this event, or one that belongs to the server (`$JS.…`) | permanent | `bad_name` |
//! | over the server's `max_payload`, the stream's `max_msg_size`, or 64 KiB of headers | permanent | `too_large` |
//! | this subject is full (`discard_new_per_subject`) | retryable | `subject_full` |
//! | JetStream is busy, or refuses for a reason that airtight does not know | retryable | `busy`, `server_error` |
//! | no connection: refused, no greeting in time, no such host; TLS fails | unavailable | `unreachable`, `tls` |
//! | the server on the port does not speak NATS | unavailable | `wrong_protocol` |
//! | the connection broke while an answer was due | unavailable | `connection_lost` |
//! | wrong or missing credentials | unavailable | `credentials` |
//! | no right to publish to the subject, or to receive the answer | unavailable | `not_permitted` |
//! | no stream takes the subject | unavailable | `no_stream` |
//! | the subject belongs to another stream than `stream` | unavailable | `wrong_stream` |
//! | the answer did not come from a stream | unavailable | `not_jetstream` |
//! | the stream is full, sealed, or cannot write | unavailable | `stream_full`, `sealed` |
//! | JetStream has no leader or no resources; it is not enabled | unavailable | `server_error`, `no_jetstream` |
//! | no acknowledgement within `timeout` | unavailable | `timeout` |
//! | the stream is set to `no_ack` | unavailable | `no_ack` |
//!
//! If the subject is a template, these answers are about the event's subject alone, and events for other subjects are still
//! delivered: `not_permitted` to publish, `no_stream`, `wrong_stream`, `not_jetstream`, `stream_full`, `sealed`, and
//! `timeout` if the server still answers other requests.
//!
//! A missing acknowledgement is *unavailable* and not *retryable*, because the stream is the cause: it has no quorum, its
//! server is stuck, or it is set to `no_ack`. None of these should use up the attempts of events.
//!
//! # What JetStream promises
//!
//! A stream acknowledges a message when it has stored it. With one replica, the message is written to the file but not
//! fsynced (the server does that every two minutes, `sync_interval`). With three replicas, two servers have written it. So
//! a crash of the server loses nothing that was acknowledged. With one replica, a power failure of the machine may lose
//! acknowledged events. For events that must survive it, use three replicas on machines that do not fail together, or set
//! `sync_interval: always` (nats-server 2.10 and later). A stream in memory loses its events when its server restarts; the
//! sink logs a warning. Messages that the stream's limits discard, or that `interest` retention does not keep, are gone:
//! the owner of the stream has decided so.
//!
//! The first copies of the events of one key arrive in order: an event is sent when the one before it was acknowledged.
//! The stream drops repeats within the duplicate window; consumers may see repeats after it.

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
