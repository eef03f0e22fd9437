//! What the sink knows about topics: which exist, how many partitions they have, how large a message may be, and which
//! topics cannot be written to while others can.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use airtight_core::{Error, Result};
use rdkafka::{
    admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication},
    client::DefaultClientContext,
    config::FromClientConfig,
    error::RDKafkaErrorCode as KafkaCode,
    producer::Producer as _,
};

use crate::{
    client::{Client, Producer, blocking, later, lock},
    connection::refused,
    errors,
};

/// How long a topic may take to appear where brokers create topics by themselves.
const APPEARS_WITHIN: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(100);
/// Topics that are known to exist; past this the list starts over.
const KNOWN_TOPICS: usize = 10_000;
/// How long the number of a topic's partitions, and its limit, are believed. Keys that move because partitions were added
/// do so after this.
const BELIEVED: Duration = Duration::from_secs(30);

/// What is remembered about a topic that exists.
#[derive(Debug, Clone, Copy)]
struct CachedTopic {
    partitions: i32,
    since: Instant,
}

/// The result of looking up a topic.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    pub(crate) partitions: i32,
    /// Whether the cluster said so, now or a short time ago.
    pub(crate) answered: bool,
}

/// A topic as the cluster describes it.
#[derive(Debug, Clone, Copy)]
struct TopicDescription {
    partitions: i32,
    /// The partition with the fewest replicas in sync: its number, how many are, and how many there should be.
    weakest: (i32, usize, usize),
}

/// What a client remembers about topics.
#[derive(Debug, Default)]
pub(crate) struct Topics {
    known: Mutex<HashMap<String, CachedTopic>>,
    /// Could not be written to when last looked at. One more look is enough to tell whether that is still so; nobody
    /// need wait for them to appear, nor send something to find out.
    troubled: Mutex<HashSet<String>>,
    /// The largest batch that a topic takes.
    limits: Mutex<HashMap<String, (usize, Instant)>>,
}

impl Topics {
    /// What is known of a topic, however old that is.
    pub(crate) fn partitions(&self, topic: &str) -> Option<i32> {
        lock(&self.known).get(topic).map(|known| known.partitions)
    }

    /// The largest batch that a topic takes, if that is known and not long ago.
    pub(crate) fn limit(&self, topic: &str) -> Option<usize> {
        let limit = lock(&self.limits).get(topic).copied();
        limit.filter(|(_, since)| since.elapsed() < BELIEVED).map(|(limit, _)| limit)
    }

    /// It is not as it was: look again.
    pub(crate) fn forget(&self, topic: &str) {
        lock(&self.known).remove(topic);
    }

    fn remember(&self, topic: &str, partitions: i32) {
        let mut topics = lock(&self.known);
        if topics.len() >= KNOWN_TOPICS {
            topics.clear();
        }
        topics.insert(topic.to_owned(), CachedTopic { partitions, since: Instant::now() });
    }

    fn set_troubled(&self, topic: &str, is_troubled: bool) {
        let mut troubled = lock(&self.troubled);
        if !is_troubled {
            troubled.remove(topic);
            return;
        }
        if troubled.len() >= KNOWN_TOPICS {
            troubled.clear();
        }
        troubled.insert(topic.to_owned());
    }
}

impl Client {
    /// Makes sure that a topic is there, before a message to it would wait for half a minute; the number of its partitions,
    /// and whether the cluster could be asked.
    pub(crate) async fn topic(&self, topic: &str) -> Result<Found> {
        if lock(&self.topics.troubled).contains(topic) {
            let partitions = self.look_again(topic).await?;
            self.topics.remember(topic, partitions);
            return Ok(Found { partitions, answered: true });
        }
        let known = lock(&self.topics.known).get(topic).copied();
        let partitions = match known {
            Some(known) if known.since.elapsed() < BELIEVED => known.partitions,
            Some(known) => {
                // Others need not ask meanwhile.
                self.topics.remember(topic, known.partitions);
                match self.look(&self.producer()?, topic).await {
                    Ok(Ok(seen)) => seen.partitions,
                    Ok(Err(KafkaCode::UnknownTopicOrPartition)) => self.find(topic).await?,
                    // It was there, and still is as far as anybody knows.
                    Ok(Err(_)) => known.partitions,
                    Err(_) => return Ok(Found { partitions: known.partitions, answered: false }),
                }
            }
            None => self.find(topic).await?,
        };
        if known.is_none_or(|known| known.partitions != partitions) {
            self.topics.remember(topic, partitions);
        }
        Ok(Found { partitions, answered: true })
    }

    /// What keeps a topic from being written to while others are: asked when it has not acknowledged anything for a while.
    /// None where the cluster sees nothing wrong with it, or does not answer.
    pub(crate) async fn trouble(&self, topic: &str) -> Option<Error> {
        let producer = self.producer().ok()?;
        let error = match self.look(&producer, topic).await.ok()? {
            Ok(seen) => self.shortage(topic, seen, true).await?,
            Err(code) => self.topic_error(topic, code),
        };
        self.topics.set_troubled(topic, true);
        Some(error)
    }

    /// One look at a topic that could not be written to.
    async fn look_again(&self, topic: &str) -> Result<i32> {
        let seen = match self.look(&self.producer()?, topic).await? {
            Ok(seen) => seen,
            Err(KafkaCode::UnknownTopicOrPartition) if self.config.create => {
                self.topics.set_troubled(topic, false);
                return self.find(topic).await;
            }
            Err(code) => return Err(self.topic_error(topic, code)),
        };
        match self.shortage(topic, seen, false).await {
            Some(error) => Err(error),
            None => {
                self.topics.set_troubled(topic, false);
                Ok(seen.partitions)
            }
        }
    }

    /// Whether a topic has too few replicas in sync to take anything. Newer brokers want no more of them than there are, so
    /// more than that is a reason only for a topic that `is_silent`.
    async fn shortage(&self, topic: &str, seen: TopicDescription, is_silent: bool) -> Option<Error> {
        let (partition, in_sync, replicas) = seen.weakest;
        let wanted = self.setting(topic, "min.insync.replicas").await;
        // Without the right to ask we guess: none but those that lag behind can be the reason.
        let needed = wanted.map_or(replicas, |wanted| if is_silent { wanted } else { wanted.min(replicas) });
        (in_sync < needed)
            .then(|| errors::too_few_replicas(self.brokers(), topic, partition, in_sync, wanted))
    }

    pub(crate) fn topic_error(&self, topic: &str, code: KafkaCode) -> Error {
        errors::topic(self.brokers(), topic, code, self.config.create)
    }

    /// Looks for a topic, creates it where that is wanted, and waits for it to appear.
    async fn find(&self, topic: &str) -> Result<i32> {
        let producer = self.producer()?;
        let deadline = Instant::now() + APPEARS_WITHIN;
        let mut created = false;
        loop {
            match self.look(&producer, topic).await? {
                Ok(seen) => return Ok(seen.partitions),
                Err(KafkaCode::UnknownTopicOrPartition) if self.config.create && !created => {
                    self.create(topic).await.inspect_err(|_| self.topics.set_troubled(topic, true))?;
                    created = true;
                }
                Err(KafkaCode::UnknownTopicOrPartition | KafkaCode::LeaderNotAvailable)
                    if Instant::now() < deadline =>
                {
                    tokio::time::sleep(LOOK).await;
                }
                Err(code) => {
                    self.topics.set_troubled(topic, true);
                    return Err(self.topic_error(topic, code));
                }
            }
        }
    }

    /// What the cluster says of a topic: how many partitions it has, or what is wrong.
    async fn look(
        &self,
        producer: &Arc<Producer>,
        topic: &str,
    ) -> Result<std::result::Result<TopicDescription, KafkaCode>> {
        let (asked, name) = (producer.clone(), topic.to_owned());
        let timeout = self.config.connection.connect_timeout;
        let metadata =
            blocking(move || Ok(asked.inner.client().fetch_metadata(Some(&name), timeout))).await?;
        let Ok(metadata) = metadata else { return Err(self.away(producer)) };
        producer.health.listed(metadata.brokers());
        let Some(found) = metadata.topics().iter().find(|found| found.name() == topic) else {
            return Ok(Err(KafkaCode::UnknownTopicOrPartition));
        };
        if let Some(code) = found.error() {
            return Ok(Err(code.into()));
        }
        let led = found.partitions().iter().all(|partition| partition.leader() >= 0);
        let partitions = i32::try_from(found.partitions().len()).unwrap_or(i32::MAX);
        let weakest = found.partitions().iter().min_by_key(|partition| partition.isr().len());
        let seen = weakest.map(|weakest| TopicDescription {
            partitions,
            weakest: (weakest.id(), weakest.isr().len(), weakest.replicas().len()),
        });
        Ok(seen.filter(|_| led).ok_or(KafkaCode::LeaderNotAvailable))
    }

    async fn create(&self, topic: &str) -> Result<()> {
        let admin = self.admin()?;
        let partitions = self.config.create_partitions.unwrap_or(-1);
        let replication = TopicReplication::Fixed(self.config.create_replication.unwrap_or(-1));
        let topics = [NewTopic::new(topic, partitions, replication)];
        let answer = admin.create_topics(&topics, &self.admin_options()).await;
        retire(admin);
        let code = match answer.map(|mut answer| answer.pop()) {
            Ok(None | Some(Ok(_)) | Some(Err((_, KafkaCode::TopicAlreadyExists)))) => {
                tracing::info!(target: "airtight::kafka", topic, "created the topic");
                return Ok(());
            }
            Ok(Some(Err((_, code)))) => code,
            // Nobody was there to answer, which is not about the topic.
            Err(_) => {
                let producer = self.producer()?;
                return Err(self.away(&producer));
            }
        };
        Err(errors::creating(self.brokers(), topic, code))
    }

    /// Asks for the largest batch that a topic takes, and remembers it; none where we may not ask, or where it says little:
    /// compressed, a batch may be smaller than its messages.
    pub(crate) async fn ask_limit(&self, topic: &str) -> Option<usize> {
        if self.config.compression != "none" {
            return None;
        }
        let limit = self.setting(topic, "max.message.bytes").await?;
        let mut limits = lock(&self.topics.limits);
        if limits.len() >= KNOWN_TOPICS {
            limits.clear();
        }
        limits.insert(topic.to_owned(), (limit, Instant::now()));
        Some(limit)
    }

    /// A setting of a topic, as it is in force. None without the right to ask (DescribeConfigs).
    async fn setting(&self, topic: &str, name: &str) -> Option<usize> {
        let admin = self.admin().ok()?;
        let answer = admin.describe_configs(&[ResourceSpecifier::Topic(topic)], &self.admin_options()).await;
        retire(admin);
        let resource = answer.ok()?.pop()?.ok()?;
        resource.get(name)?.value.as_deref()?.parse().ok()
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>> {
        let settings = self.config.connection.client_config(&[]).map_err(later)?;
        AdminClient::from_config(&settings).map_err(|error| later(refused(&error)))
    }

    fn admin_options(&self) -> AdminOptions {
        let timeout = self.config.connection.connect_timeout;
        AdminOptions::new().request_timeout(Some(timeout)).operation_timeout(Some(timeout))
    }
}

/// Its threads end with a wait.
fn retire(admin: AdminClient<DefaultClientContext>) {
    drop(tokio::task::spawn_blocking(move || drop(admin)));
}
