//! Events into Redis Streams: one entry for each event, added by `XADD`.
//!
//! ```no_run
//! # fn main() -> airtight_core::Result<()> {
//! use airtight_redis::{RedisConfig, RedisSink};
//!
//! let config = RedisConfig::from_url("redis://app:secret@redis.example:6379/0?key=events.{aggregate_type}&max_len=1000000")?;
//! let sink = RedisSink::new(config)?;
//! # let _ = sink;
//! # Ok(()) }
//! ```
//!
//! The URL is `redis://[[user]:password@]host[:6379][/DATABASE]`, or `rediss://` for TLS; what may stand behind its
//! `?` is in [`RedisConfig::KEYS`], and each is a field of [`RedisConfig`]. The user needs `+xadd +eval` and the
//! streams' keys. Redis 5 is the oldest that will do, 6.2 with `max_age`. Redis Cluster and Sentinel are not
//! supported: name the primary.
//!
//! # What an entry looks like
//!
//! | field | content |
//! | --- | --- |
//! | `id`, `eventType`, … | the headers of the format, a field each |
//! | `content-type` | what the payload is, where the format says so |
//! | `payload` | the body; no such field where there is no body, and an empty one where it is empty |
//!
//! With the format `raw` that is:
//!
//! ```text
//! > XRANGE shop.orders - +
//! 1) 1) "1731726000000-0"
//!    2)  1) "id"             2) "0190f5c4-…"
//!        3) "eventType"      4) "OrderPlaced"
//!        5) "aggregateType"  6) "Order"
//!        7) "aggregateId"    8) "42"
//!        9) "stream"        10) "shop.orders"
//!       11) "seq"           12) "7"
//!       13) "op"            14) "upsert"
//!       15) "occurredAt"    16) "2024-11-16T03:00:00Z"
//!       17) "schemaVersion" 18) "1"
//!       19) "content-type"  20) "application/json"
//!       21) "payload"       22) "{\"total\":1200}"
//! ```
//!
//! Names and values are bytes as they are; nothing is encoded. A repeat has another entry id and the same `id`.
//!
//! # Order
//!
//! A batch goes out in requests of up to 250 events. Each is one script, which adds them in turn and stops a key at
//! its first event that is refused; the next request waits for the answer. So a later event of a key is never in
//! without the earlier ones.
//!
//! # What an answer means
//!
//! | answer | class |
//! | --- | --- |
//! | the entry's id | delivered |
//! | no connection (refused, DNS, TLS, nobody there), one that broke, no answer in time, another protocol | unavailable |
//! | `NOAUTH`, `WRONGPASS` (`credentials`); `NOPERM` (`not_permitted`) | unavailable |
//! | `OOM`, `READONLY`, `LOADING`, `MISCONF`, `NOREPLICAS`, `MASTERDOWN`, `BUSY` | unavailable |
//! | `WRONGTYPE`: the key holds something else than a stream | unavailable |
//! | `MOVED`, `CROSSSLOT`, `CLUSTERDOWN`: a cluster | unavailable |
//! | fewer replicas than `wait_replicas` | unavailable |
//! | a field over `proto-max-bulk-len` (`too_large`); an event without a field that `key` asks for | permanent |
//! | a connection that broke, or an answer that did not come, under an event of more than 1 MiB | retryable |
//! | any other error about one entry | retryable |
//!
//! Where `key` is a template, `WRONGTYPE` and `NOPERM` for a key are about that stream alone, and others go on.
//!
//! The last but one is because Redis hangs up on what is too large, often before it can say so. It says its limit in
//! advance to users who may `CONFIG GET`; then such an event is dead at once, and is never sent.
//!
//! # What Redis does not promise
//!
//! *Delivered* is what Redis says it is, and that depends on how Redis is set up. Opening the sink looks, and warns.
//!
//! - **`appendonly yes` with `appendfsync always`** is what makes *delivered* durable: Redis answers after the fsync.
//! - **`appendfsync everysec`**, the default of the append-only file: a crash of the host loses about the last second
//!   of delivered events.
//! - **No append-only file**: snapshots only. A crash, and with it any restart that is not clean, loses minutes of
//!   delivered events; without snapshots, all of them.
//! - **Failover**: replication is asynchronous. A replica that takes over lacks what had not reached it. With
//!   `wait_replicas` an event counts as delivered when that many replicas have it in memory, which narrows the gap
//!   and does not close it: Redis may promote another one. While too few have it, events are in the stream already
//!   and come again later, so there are repeats.
//! - **`max_len` and `max_age`** remove entries whether or not a consumer has read them. Without them a stream grows
//!   until somebody trims it.
//! - **`maxmemory-policy allkeys-…`** lets a full Redis drop whole streams. With `noeviction` it refuses, and events
//!   wait.

mod check;
mod client;
mod config;
mod encode;
mod errors;
mod sink;
mod tls;

pub use self::{config::RedisConfig, sink::RedisSink};
