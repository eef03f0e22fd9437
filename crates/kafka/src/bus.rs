//! Publishing straight to Kafka. Its name says what is missing.

use airtight_core::NonAtomicBus;

use crate::KafkaSink;

/// An [`airtight_core::EventBus`] for any transaction, none of which it asks: see [`NonAtomicBus`] for what a crash
/// between the two writes does. With an outbox in the database, and a relay from there to Kafka, neither can happen.
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
