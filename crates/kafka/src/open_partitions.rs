//! Which partitions are open to a producer.
//!
//! A broker appends a producer's requests to a partition in the order of their numbers and refuses a gap. There is one
//! exception: a broker that does not know a producer yet accepts any number as its first. With two requests under way to a
//! new partition, the broker may refuse the first for a moment and accept the second. When the first is sent again, its
//! number is lower than the broker expects, so the broker answers that it has the request already, and librdkafka reports
//! the messages as delivered: they are lost. This was observed with topics that had just been created, for 1 to 3 messages
//! of 480, on a busy machine.
//!
//! So a partition is *open* to a producer once it has acknowledged a message of the producer, and not too long ago: a
//! broker forgets producers that are silent (`producer.id.expiration.ms`, a day). To a partition that is not open, one call
//! sends one message, and no other message follows until this one is acknowledged. For that, the sink must know the
//! partition of a message before librdkafka does, so it computes the partition of a key here, as Java's clients do.
//!
//! There is a second check, in case this reasoning is wrong. Acknowledgements of a partition come with rising offsets. A
//! message that librdkafka only assumes to be stored has no offset. The sink does not believe such a report, nor any later
//! report about that partition.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use crate::client::lock;

/// How many topics are remembered, besides those that are in use.
const TOPICS: usize = 10_000;

/// How long a partition stays open without an acknowledgement. Shorter than any broker's setting.
const OPEN_FOR: Duration = Duration::from_secs(300);

/// The partition that Java's clients choose for a key.
pub(crate) fn partition_of(key: &[u8], partitions: i32) -> i32 {
    let positive = (murmur2(key) & 0x7fff_ffff).cast_signed();
    positive % partitions.max(1)
}

/// Kafka's variant of the hash, with its seed.
fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    const SEED: u32 = 0x9747_b28c;
    // No key has 2^32 bytes.
    let mut hash = SEED ^ u32::try_from(data.len()).unwrap_or(u32::MAX);
    let (chunks, rest) = data.as_chunks::<4>();
    for chunk in chunks {
        let mut k = u32::from_le_bytes(*chunk).wrapping_mul(M);
        k = (k ^ (k >> 24)).wrapping_mul(M);
        hash = hash.wrapping_mul(M) ^ k;
    }
    if !rest.is_empty() {
        for (at, byte) in rest.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * at);
        }
        hash = hash.wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

/// The partitions that are open to one producer.
#[derive(Debug, Default)]
pub(crate) struct OpenPartitions {
    topics: Mutex<HashMap<String, Arc<OpenInTopic>>>,
    /// Held by the call that opens partitions, until they are open.
    pub(crate) opening: tokio::sync::Mutex<()>,
}

impl OpenPartitions {
    pub(crate) fn of(&self, topic: &str) -> Arc<OpenInTopic> {
        let mut topics = lock(&self.topics);
        if let Some(open) = topics.get(topic) {
            return open.clone();
        }
        if topics.len() >= TOPICS {
            topics.retain(|_, open| Arc::strong_count(open) > 1 || open.has_open());
        }
        topics.entry(topic.to_owned()).or_default().clone()
    }
}

/// The open partitions of one topic.
#[derive(Debug, Default)]
pub(crate) struct OpenInTopic(Mutex<Vec<Option<Last>>>);

/// Whether a report of an acknowledgement can be true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acknowledged {
    Believed,
    /// The first report of its partition that cannot be true.
    Impossible,
    /// A report after an impossible one.
    Doubted,
}

/// The last acknowledgement of a partition.
#[derive(Debug, Clone, Copy)]
struct Last {
    offset: i64,
    at: Instant,
    /// An impossible report has been received.
    spoiled: bool,
}

impl OpenInTopic {
    /// Whether the broker knows the producer here, so that it refuses a gap.
    pub(crate) fn is_open(&self, partition: i32) -> bool {
        let partitions = lock(&self.0);
        let last = usize::try_from(partition).ok().and_then(|at| partitions.get(at).copied().flatten());
        last.is_some_and(|last| !last.spoiled && last.at.elapsed() < OPEN_FOR)
    }

    /// Whether any partition is open.
    fn has_open(&self) -> bool {
        lock(&self.0).iter().flatten().any(|last| last.spoiled || last.at.elapsed() < OPEN_FOR)
    }

    /// Records a report, in the order in which librdkafka makes them. Returns whether it can be true.
    pub(crate) fn acknowledged(&self, partition: i32, offset: i64) -> Acknowledged {
        let Ok(at) = usize::try_from(partition) else { return Acknowledged::Impossible };
        let mut partitions = lock(&self.0);
        if partitions.len() <= at {
            partitions.resize(at + 1, None);
        }
        let last = partitions[at].unwrap_or(Last { offset: -1, at: Instant::now(), spoiled: false });
        let spoiled = last.spoiled || offset <= last.offset;
        partitions[at] = Some(Last { offset: offset.max(last.offset), at: Instant::now(), spoiled });
        match (last.spoiled, spoiled) {
            (true, _) => Acknowledged::Doubted,
            (false, true) => Acknowledged::Impossible,
            (false, false) => Acknowledged::Believed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of Java's `Utils.murmur2`, as librdkafka's own tests list them.
    #[test]
    fn the_hash_is_javas() {
        for (key, hash) in [
            ("kafka", 0xd067_cf64_u32),
            ("giberish123456789", 0x8f55_2b0c),
            ("1234", 0x9fc9_7b14),
            ("234", 0xe7c0_09ca),
            ("34", 0x8739_30da),
            ("4", 0x5a4b_5ca1),
            ("PreAmbleWillBeRemoved,ThePrePartThatIs", 0x7842_4f1c),
            ("", 0x106e_08d9),
        ] {
            assert_eq!(murmur2(key.as_bytes()), hash, "{key}");
        }
        assert_eq!(partition_of(b"kafka", 12), (0x5067_cf64 % 12));
    }

    #[test]
    fn a_partition_is_open_once_it_has_acknowledged() {
        let open_partitions = OpenPartitions::default();
        let topic = open_partitions.of("t");
        assert!(!topic.is_open(3));
        assert_eq!(topic.acknowledged(3, 0), Acknowledged::Believed);
        assert!(
            open_partitions.of("t").is_open(3)
                && !topic.is_open(2)
                && !topic.is_open(4)
                && !topic.is_open(-1)
        );
        assert!(!open_partitions.of("u").is_open(3));
    }

    /// librdkafka gives the messages of a request that it believes to be there already no offset, or -1 and counts on
    /// from there.
    #[test]
    fn offsets_that_do_not_rise_are_not_believed() {
        for reported in [[-1_001, -1_001, -1_001], [-1, 0, 1], [9, 10, 11], [-1, 50, 51]] {
            let topic = OpenInTopic::default();
            assert!((0..10).all(|offset| topic.acknowledged(0, offset) == Acknowledged::Believed));
            let [first, rest @ ..] = reported.map(|offset| topic.acknowledged(0, offset));
            assert_eq!((first, rest), (Acknowledged::Impossible, [Acknowledged::Doubted; 2]), "{reported:?}");
            assert!(!topic.is_open(0));
        }
    }
}
