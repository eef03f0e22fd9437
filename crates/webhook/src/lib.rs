//! Events as signed HTTP requests: one `POST` per event, in the form of [Standard Webhooks].
//!
//! ```no_run
//! # fn main() -> airtight_core::Result<()> {
//! use airtight_webhook::{WebhookConfig, WebhookSink};
//!
//! let config = WebhookConfig::new("https://shop.example/hooks").secret("whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ=");
//! let sink = WebhookSink::new(config)?;
//! # let _ = sink;
//! # Ok(()) }
//! ```
//!
//! # What a receiver sees
//!
//! | header | content |
//! | --- | --- |
//! | `webhook-id`, `Idempotency-Key` | the event's id: the same for every attempt, so a repeat can be told |
//! | `webhook-timestamp` | when this attempt was sent, in unix seconds |
//! | `webhook-signature` | `v1,<base64>`: HMAC-SHA256 of `{id}.{timestamp}.{body}`; one per secret, with spaces between |
//! | `airtight-stream`, `-event-type`, `-aggregate-type`, `-aggregate-id`, `-op`, `-seq`, `-attempt` | the event's metadata |
//! | `traceparent`, `tracestate` | the event's, where it has them |
//!
//! The body is the JSON envelope, or another [`Format`]. Where the body does not hold it (`raw`, `event`,
//! `debezium`), the rest of the event is in `airtight-occurred-at`, `airtight-schema-version` and
//! `airtight-header-*`. CloudEvents are bound to HTTP as their specification says. Header values are
//! percent-encoded where HTTP could not carry them (and `%` itself, so that decoding is never ambiguous);
//! metadata that would make the headers larger than common servers accept is left out of them.
//!
//! # What an answer means
//!
//! | answer | class |
//! | --- | --- |
//! | 2xx | delivered |
//! | 408, 425, 429, 5xx; a timeout; a connection that broke | retryable |
//! | 401, 403, 404, 405, 407, 410, any 3xx; no connection (refused, DNS, TLS, nobody there) | unavailable; where `url` holds fields, an answer (but 407) is about that URL alone |
//! | any other 4xx | permanent |
//!
//! 410 says that the endpoint is gone for good: a relay goes on trying it like any other, but a drain ends.
//!
//! Redirects are not followed: a `POST` that is followed blindly can lose its body or its signature's
//! meaning. `Retry-After` is honoured, up to a day.
//!
//! [Standard Webhooks]: https://www.standardwebhooks.com

mod client;
mod config;
mod encode;
mod endpoint;
mod sink;

pub use self::{config::WebhookConfig, sink::WebhookSink};
pub use airtight_core::Format;
