//! Publishing directly to Kafka, without an outbox and so without atomicity.

use airtight_core::NonAtomicBus;

use crate::KafkaSink;

/// An [`airtight_core::EventBus`] for any type of transaction, which it ignores: see [`NonAtomicBus`] for what a crash
/// between the two writes does. With an outbox in the database and a relay to Kafka, neither can happen.
///
/// ```no_run
/// # async fn example() -> airtight_core::Result<()> {
/// use airtight_kafka::{KafkaConfig, KafkaSink, NonAtomicKafkaBus};
///
/// let sink = KafkaSink::new(KafkaConfig::from_url("kafka://localhost:9092/{stream}")?)?;
/// let bus = NonAtomicKafkaBus::open(sink).await?;
/// # drop(bus); Ok(()) }
/// ```
pub type NonAtomicKafkaBus = NonAtomicBus<KafkaSink>;
