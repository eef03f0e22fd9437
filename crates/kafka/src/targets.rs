//! The target of each event of a batch: its topic and partition, and why a topic cannot be written to.

use std::collections::HashMap;

use airtight_core::{Delivery, Error, Result};
use tokio::time::Instant;

use crate::{encode::Address, open_partitions::partition_of, sink::KafkaSink};

impl KafkaSink {
    /// The targets of a batch. Each topic is looked up once.
    pub(crate) async fn targets<'a>(
        &'a self,
        batch: &'a [Delivery],
    ) -> (Vec<Topic>, Vec<Result<Target<'a>>>) {
        let mut topics: Vec<Topic> = Vec::new();
        // By what decides on the topic: a template or a regex need not be followed for each event.
        let mut known: HashMap<String, Result<usize>> = HashMap::new();
        let mut targets = Vec::with_capacity(batch.len());
        for delivery in batch {
            targets.push(self.encode.address(&delivery.event).and_then(|address| {
                let topic = match known.get(address.by.as_ref()) {
                    Some(topic) => topic.clone(),
                    None => {
                        let topic = self.encode.topic_of(&address.by).map(|topic| enter(&mut topics, &topic));
                        known.insert(address.by.as_ref().to_owned(), topic.clone());
                        topic
                    }
                }?;
                Ok(Target { topic, partition: address.partition, address })
            }));
        }
        self.look(&mut topics).await;
        for (target, delivery) in targets.iter_mut().zip(batch) {
            if let Ok(target) = target
                && target.partition.is_none()
                && self.client.knows_partitions()
                && let Ok(partitions @ 1..) = topics[target.topic].partitions
            {
                // What has no key goes anywhere, but always there.
                let key = target.address.key.as_deref().unwrap_or(delivery.event.id.as_bytes());
                target.partition = Some(partition_of(key, partitions));
            }
        }
        (topics, targets)
    }

    /// How many partitions the topics have, or what is wrong with those that cannot be written to.
    async fn look(&self, topics: &mut [Topic]) {
        let began = Instant::now();
        let (mut away, mut answers, mut waited): (Option<Error>, bool, bool) = (None, true, false);
        for topic in topics {
            // A batch may have a thousand topics, and each of them may take its time to be missing.
            let is_late = began.elapsed() >= self.client.patience();
            topic.partitions = match (self.client.topics.partitions(&topic.name), away.clone()) {
                (Some(known), _) if !answers => Ok(known),
                (_, Some(away)) if is_late => Err(away),
                // Its events are left to the next call, since those before it have taken all the time there is.
                (None, None) if is_late && waited => Ok(NOT_LOOKED_AT),
                _ => self.client.topic(&topic.name).await.map(|found| {
                    answers &= found.answered;
                    found.partitions
                }),
            };
            topic.limit = self.client.topics.limit(&topic.name);
            match &topic.partitions {
                Err(error) if self.is_whole(error) => away = Some(error.clone()),
                Err(_) => waited = true,
                Ok(_) => {}
            }
        }
    }
}

/// In place of a number of partitions, for a topic that there was no time to look at.
pub(crate) const NOT_LOOKED_AT: i32 = 0;

/// A topic that a batch goes to.
pub(crate) struct Topic {
    pub(crate) name: String,
    pub(crate) partitions: Result<i32>,
    /// The largest batch that it takes, where that is known.
    pub(crate) limit: Option<usize>,
}

/// The index of a topic in the list, at its end if it was not there.
fn enter(topics: &mut Vec<Topic>, name: &str) -> usize {
    topics.iter().position(|topic| topic.name == name).unwrap_or_else(|| {
        topics.push(Topic { name: name.to_owned(), partitions: Ok(NOT_LOOKED_AT), limit: None });
        topics.len() - 1
    })
}

/// The target of one event.
pub(crate) struct Target<'a> {
    pub(crate) topic: usize,
    /// None if only librdkafka knows.
    pub(crate) partition: Option<i32>,
    pub(crate) address: Address<'a>,
}

impl Target<'_> {
    /// Whether two events keep their order once the broker knows the producer: both go to one partition.
    pub(crate) fn keeps_order_with(&self, other: &Self) -> bool {
        let (own, others) = (self.address.key.as_deref(), other.address.key.as_deref());
        self.topic == other.topic
            && match (self.partition, other.partition) {
                (Some(one), Some(another)) => one == another,
                (None, None) => own.is_some() && own == others,
                _ => false,
            }
    }
}
