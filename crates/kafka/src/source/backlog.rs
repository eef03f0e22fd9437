//! What is left for the whole group: of our own partitions what is not settled, of the others' what is not committed.
//!
//! Offsets alone cannot tell. Behind the last message of a transaction stands a marker, and compaction leaves holes:
//! a partition that is read to its end may seem to have more. So where nothing but the offsets speaks for a backlog,
//! a look at the messages decides.

use std::time::Instant;

use rdkafka::{
    Offset, TopicPartitionList,
    config::FromClientConfig,
    consumer::{BaseConsumer, Consumer},
    error::{KafkaError, KafkaResult},
};

use super::{
    Start,
    message::TopicPartition,
    poller::{KafkaConsumer, Shared},
};

/// A partition whose offsets say that there is more.
struct Behind {
    topic_partition: TopicPartition,
    from: i64,
    end: i64,
}

/// How many events are left.
pub(super) fn unfinished(shared: &Shared, consumer: &KafkaConsumer) -> KafkaResult<u64> {
    let timeout = shared.config.connection.connect_timeout;
    let mut list = TopicPartitionList::new();
    for topic in shared.config.subscription() {
        let metadata = consumer.fetch_metadata(Some(topic), timeout)?;
        for found in metadata.topics().iter().filter(|found| found.name() == topic) {
            for partition in found.partitions() {
                list.add_partition(topic, partition.id());
            }
        }
    }
    let mut open = 0;
    let mut behind = Vec::new();
    for element in consumer.committed_offsets(list, timeout)?.elements() {
        let topic_partition = TopicPartition::new(element.topic(), element.partition());
        let (first, end) =
            consumer.fetch_watermarks(&topic_partition.topic, topic_partition.partition, timeout)?;
        let begin = match (element.offset(), shared.config.start) {
            (Offset::Offset(offset), _) => offset,
            (_, Start::Earliest) => first,
            (_, Start::Latest) => end,
        };
        let (held, from) = shared.track().standing(&topic_partition).unwrap_or((0, begin));
        open += held;
        if from < end {
            behind.push(Behind { topic_partition, from, end });
        }
    }
    if open == 0 && is_at_end(shared, &behind)? {
        return Ok(0);
    }
    let unread: u64 = behind.iter().filter_map(|behind| u64::try_from(behind.end - behind.from).ok()).sum();
    Ok(open as u64 + unread)
}

/// Whether none of these has a message at or behind its offset. Asked one by one, by a reader that is in no group.
fn is_at_end(shared: &Shared, behind: &[Behind]) -> KafkaResult<bool> {
    if behind.is_empty() {
        return Ok(true);
    }
    let mut config =
        shared.config.consumer_config().map_err(|error| KafkaError::Subscription(error.to_string()))?;
    config.set("enable.partition.eof", "true");
    let reader = BaseConsumer::from_config(&config)?;
    for Behind { topic_partition, from, .. } in behind {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&topic_partition.topic, topic_partition.partition, Offset::Offset(*from))?;
        reader.assign(&list)?;
        let until = Instant::now() + shared.config.connection.connect_timeout;
        loop {
            match reader.poll(until.saturating_duration_since(Instant::now())) {
                Some(Err(KafkaError::PartitionEOF(_))) => break,
                Some(Err(error)) => return Err(error),
                // A message; or no answer, which is no proof of an end.
                Some(Ok(_)) => return Ok(false),
                None if Instant::now() >= until => return Ok(false),
                None => {}
            }
        }
    }
    Ok(true)
}
