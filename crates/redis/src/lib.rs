//! Delivers events to Redis Streams: one entry for each event, added by `XADD`.
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
//! The URL is `redis://[[user]:password@]host[:6379][/DATABASE]`, or `rediss://` for TLS. The keys after its `?` are listed
//! in [`RedisConfig::KEYS`]; each is a field of [`RedisConfig`]. The user needs `+xadd +eval` and access to the streams'
//! keys. Redis 5 or later is required, with `max_age` 6.2 or later. Redis Cluster and Sentinel are not supported: name the
//! primary.
//!
//! # What an entry looks like
//!
//! | field | content |
//! | --- | --- |
//! | `id`, `eventType`, … | the headers of the format, one field for each |
//! | `content-type` | the content type of the payload, if the format has one |
//! | `payload` | the body. Without a body there is no such field; with an empty body the field is empty |
//!
//! An entry in the format `raw`:
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
//! Names and values are written as they are; nothing is encoded. A repeat has another entry id and the same `id`.
//!
//! # Order
//!
//! A batch is sent in requests of up to 250 events. Each request is one script, which adds the events in turn. When Redis
//! refuses an event, the script skips the later events of its key. The next request waits for the answer. So a later event
//! of a key is never in the stream without the earlier ones.
//!
//! # What an answer means
//!
//! | answer | class |
//! | --- | --- |
//! | the entry's id | delivered |
//! | no connection (refused, DNS, TLS, no answer), a broken connection, no answer in time, another protocol | unavailable |
//! | `NOAUTH`, `WRONGPASS` (`credentials`); `NOPERM` (`not_permitted`) | unavailable |
//! | `OOM`, `READONLY`, `LOADING`, `MISCONF`, `NOREPLICAS`, `MASTERDOWN`, `BUSY` | unavailable |
//! | `WRONGTYPE`: the key does not hold a stream | unavailable |
//! | `MOVED`, `CROSSSLOT`, `CLUSTERDOWN`: a cluster | unavailable |
//! | fewer replicas than `wait_replicas` | unavailable |
//! | a field over `proto-max-bulk-len` (`too_large`); an event without a field that `key` asks for | permanent |
//! | the connection broke, or no answer came, while an event of more than 1 MiB was sent | retryable |
//! | any other error about one entry | retryable |
//!
//! If `key` is a template, `WRONGTYPE` and `NOPERM` for a key are about that stream alone; events for other streams are
//! still delivered.
//!
//! A large event is retryable when the connection breaks, because Redis closes the connection on a request that is too
//! large, often before it can answer. Users who may `CONFIG GET` can read the limit in advance; then an event over the
//! limit becomes dead at once, and is never sent.
//!
//! # What Redis does not promise
//!
//! What *delivered* is worth depends on how Redis is configured. The sink checks the configuration when it opens, and logs
//! warnings.
//!
//! - **`appendonly yes` with `appendfsync always`** is what makes *delivered* durable: Redis answers after the fsync.
//! - **`appendfsync everysec`**, the default of the append-only file: a crash of the host loses about the last second
//!   of delivered events.
//! - **No append-only file**: snapshots only. A crash, or any other unclean restart, loses minutes of delivered events;
//!   without snapshots, all of them.
//! - **Failover**: replication is asynchronous. A replica that takes over lacks the events that had not reached it. With
//!   `wait_replicas` an event counts as delivered when that many replicas have it in memory. This narrows the gap but does
//!   not close it: Redis may promote another replica. While too few replicas have them, events are already in the stream
//!   and are sent again later, so there are repeats.
//! - **`max_len` and `max_age`** remove entries whether or not a consumer has read them. Without these settings a stream
//!   grows until it is trimmed.
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
