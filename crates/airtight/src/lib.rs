//! airtight, a transactional outbox: an event that commits is delivered, and one that rolls back never existed.
//!
//! This is the crate to depend on. It has no code of its own: the whole core is exported at the top level,
//! and each backend is a module behind the feature of the same name.
//!
//! | feature | module | what it adds |
//! | --- | --- | --- |
//! | `sqlite` (default) | `sqlite` | an outbox in an SQLite file: queue, log, inbox |
//! | `postgres` (default) | `postgres` | an outbox in PostgreSQL, through sqlx: queue, log, inbox |
//! | `tokio-postgres` | `postgres` | publishing, and the inbox, also through tokio-postgres |
//! | `webhook` | `webhook` | a sink that signs and posts events over HTTP |
//! | `debezium` (with `kafka`) | `debezium` | the format of Debezium's outbox event router, and its connectors' files |
//! | `kafka` | `kafka` | Kafka as a sink and as a source (builds librdkafka) |
//! | `nats` | `nats` | a sink for NATS JetStream |
//! | `rabbitmq` | `rabbitmq` | a sink for RabbitMQ |
//! | `redis` | `redis` | a sink for Redis Streams |

pub use airtight_core::*;

#[cfg(feature = "debezium")]
pub use airtight_debezium as debezium;
#[cfg(feature = "kafka")]
pub use airtight_kafka as kafka;
#[cfg(feature = "nats")]
pub use airtight_nats as nats;
#[cfg(feature = "postgres")]
pub use airtight_postgres as postgres;
#[cfg(feature = "rabbitmq")]
pub use airtight_rabbitmq as rabbitmq;
#[cfg(feature = "redis")]
pub use airtight_redis as redis;
#[cfg(feature = "sqlite")]
pub use airtight_sqlite as sqlite;
#[cfg(feature = "webhook")]
pub use airtight_webhook as webhook;

/// Every Rust example of the documents, and the programs under `examples`, as doc tests: an example that no longer
/// compiles fails in CI.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/getting-started.md")]
    struct GettingStarted;
    #[doc = include_str!("../../../CONTRIBUTING.md")]
    struct Contributing;
    #[doc = include_str!("../../../docs/semantics.md")]
    struct Semantics;
    #[doc = include_str!("../../../docs/operations.md")]
    struct Operations;
    #[doc = include_str!("../../../docs/adding-a-sink.md")]
    struct AddingASink;
    #[doc = include_str!("../../../docs/brokers.md")]
    struct Brokers;

    #[doc = concat!("```no_run\n", include_str!("../../../examples/event_bus.rs"), "\n```")]
    struct EventBus;
    #[doc = concat!("```\n", include_str!("../../../examples/in_process.rs"), "\n```")]
    struct InProcess;
    #[doc = concat!("```\n", include_str!("../../../examples/log_consumer.rs"), "\n```")]
    struct LogConsumer;
    #[doc = concat!("```no_run\n", include_str!("../../../examples/postgres_webhook.rs"), "\n```")]
    struct PostgresWebhook;
}
