//! Delivers events as signed HTTP requests: one `POST` per event, in the form of [Standard Webhooks].
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
//! | `webhook-id`, `Idempotency-Key` | the event's id, which is the same for every attempt, so that a receiver recognizes a repeat |
//! | `webhook-timestamp` | when this attempt was sent, in unix seconds |
//! | `webhook-signature` | `v1,<base64>`: HMAC-SHA256 of `{id}.{timestamp}.{body}`; one per secret, separated by spaces |
//! | `airtight-stream`, `-event-type`, `-aggregate-type`, `-aggregate-id`, `-op`, `-seq`, `-attempt` | the event's metadata |
//! | `traceparent`, `tracestate` | those of the event, if it has them |
//!
//! The body is the JSON envelope, or another [`Format`]. If the body does not contain the whole event (`raw`, `event`,
//! `debezium`), the rest is in `airtight-occurred-at`, `airtight-schema-version` and `airtight-header-*`. CloudEvents are
//! bound to HTTP as their specification says. Characters of header values that HTTP cannot carry are percent-encoded, and
//! so is `%` itself, so that decoding is never ambiguous. Metadata that would make the headers larger than common servers
//! accept is left out of the headers.
//!
//! # What an answer means
//!
//! | answer | class |
//! | --- | --- |
//! | 2xx | delivered |
//! | 408, 425, 429, 5xx; a timeout; a connection that broke | retryable |
//! | 401, 403, 404, 405, 407, 410, any 3xx; no connection (refused, DNS, TLS, no answer) | unavailable; if `url` contains fields, an answer other than 407 is about that URL alone |
//! | any other 4xx | permanent |
//!
//! 410 means that the endpoint is gone permanently: a relay continues to try it like any other, but a drain ends.
//!
//! Redirects are not followed: a redirected `POST` can lose its body, or its signature can become meaningless.
//! `Retry-After` is honoured, up to a day.
//!
//! [Standard Webhooks]: https://www.standardwebhooks.com

mod client;
mod config;
mod encode;
mod endpoint;
mod sink;

pub use self::{config::WebhookConfig, sink::WebhookSink};
pub use airtight_core::Format;
