//! Kafka as a source: a member of a consumer group that commits offsets of settled events only.
//!
//! | file | what lives there |
//! | --- | --- |
//! | `config` | what can be set |
//! | `message` | a message as it was read |
//! | `partition` | one partition, and which of its events are where |
//! | `track` | what is read, handed out, waiting and settled; no I/O |
//! | `poller` | the thread that polls, rebalances and commits |
//! | `backlog` | what is left, for the whole group |
//! | `letters` | writing to the dead-letter and retry topics |

mod backlog;
mod config;
mod letters;
mod message;
mod partition;
mod poller;
mod track;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use airtight_core::{
    Backlog, Batch, Capabilities, Class, Code, Error, Limits, Result, Rules, Settlement, Source,
    source::Settled,
};
use async_trait::async_trait;
use rdkafka::{
    config::FromClientConfigAndContext,
    consumer::{BaseConsumer, Consumer},
    error::RDKafkaErrorCode as KafkaCode,
};
use tokio::sync::oneshot;

pub use self::config::{KafkaSourceConfig, Retry, Start};
use self::{
    letters::Letters,
    poller::{KafkaConsumer, Shared, SourceContext},
};
use crate::{connection::refused, errors};

/// Reads topics as a member of a consumer group, for any handler: `Relay::new(source, dispatcher)`.
///
/// ```no_run
/// # async fn example(dispatcher: airtight_core::Dispatcher) -> airtight_core::Result<()> {
/// use airtight_core::{CancellationToken, Relay};
/// use airtight_kafka::{KafkaSource, KafkaSourceConfig};
///
/// let config = KafkaSourceConfig::from_url("kafka://localhost:9092/shop.orders?group=billing")?;
/// Relay::new(KafkaSource::new(config)?, dispatcher).run(CancellationToken::new()).await?;
/// # Ok(()) }
/// ```
///
/// # What is promised
///
/// - **At least once.** An offset is committed only past events that are settled, all before it included. What was
///   settled within the last `commit_interval` comes again after a crash; an inbox makes that harmless.
/// - **Order per key**, within a partition, as long as events are retried in place.
/// - **Nothing is skipped.** What cannot be handled or decoded goes to the dead-letter topic with its key, value and
///   headers, and counts as settled when Kafka has acknowledged it. Without such a topic the source halts. Messages
///   that retention took before they were read are an error.
/// - **Rebalances lose nothing.** Before a partition goes to another member, the source waits for what is being handled and
///   commits it. What is settled too late is refused (`fenced`), and the new owner handles it again.
///
/// No key stays blocked behind a dead event ([`airtight_core::Rules::block_on_dead`]): the event is in another topic, and
/// the source would never learn that it was handled.
pub struct KafkaSource {
    shared: Arc<Shared>,
    letters: Letters,
    member: Mutex<Option<Member>>,
}

struct Member {
    consumer: std::sync::Weak<KafkaConsumer>,
    ended: Option<oneshot::Receiver<()>>,
}

impl KafkaSource {
    /// Checks the config, and nothing on the network. A permanent error names the key that is wrong.
    pub fn new(config: KafkaSourceConfig) -> Result<Self> {
        config.consumer_config()?;
        let config = Arc::new(config);
        Ok(Self {
            letters: Letters::new(config.clone())?,
            shared: Arc::new(Shared::new(config)),
            member: Mutex::default(),
        })
    }

    /// The partitions owned right now, as topic and number; for tests and status.
    pub fn owned_partitions(&self) -> Vec<(String, i32)> {
        let topic_partitions = self.shared.track().topic_partitions();
        topic_partitions
            .into_iter()
            .map(|topic_partition| (topic_partition.topic.to_string(), topic_partition.partition))
            .collect()
    }

    /// Events and bytes in memory; for tests and status.
    pub fn held(&self) -> (usize, usize) {
        self.shared.track().held()
    }

    fn member(&self) -> std::sync::MutexGuard<'_, Option<Member>> {
        self.member.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Drop for KafkaSource {
    /// Without `close`, the thread still commits what was settled and leaves.
    fn drop(&mut self) {
        self.shared.stop();
    }
}

#[async_trait]
impl Source for KafkaSource {
    fn rules(&self) -> Rules {
        Rules { order: self.shared.config.order, block_on_dead: false }
    }

    async fn open(&self, _sink: &Capabilities) -> Result<()> {
        if self.member().is_some() {
            return Ok(());
        }
        let shared = self.shared.clone();
        let consumer = blocking(move || connect(&shared)).await.map_err(may_pass)?;
        self.letters.open().await.map_err(may_pass)?;
        consumer.subscribe(&self.shared.config.subscription()).map_err(|error| {
            Error::retryable(Code::SERVER_ERROR, format!("cannot subscribe to the topics: {error}"))
        })?;
        let (tell, ended) = oneshot::channel();
        let consumer = Arc::new(consumer);
        *self.member() = Some(Member { consumer: Arc::downgrade(&consumer), ended: Some(ended) });
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("airtight-kafka".into()).spawn(move || {
            poller::run(&shared, consumer);
            // Nobody waits for it where the source was dropped.
            let _ = tell.send(());
        });
        thread.map(drop).map_err(|error| {
            Error::retryable(Code::NO_THREAD, format!("cannot start the thread that polls Kafka: {error}"))
        })
    }

    async fn next(&self, limits: Limits) -> Result<Batch> {
        let mut track = self.shared.track();
        if let Some(error) = track.failed.clone() {
            return Err(error);
        }
        let batch = track.next(limits, Instant::now());
        match track.trouble.take() {
            Some(error) if batch.is_empty() => Err(error),
            _ => Ok(batch),
        }
    }

    async fn wait(&self, at_most: Duration) {
        let due = self.shared.track().next_due();
        let until_due = due.map(|due| due.saturating_duration_since(Instant::now()));
        let wait = until_due.map_or(at_most, |until_due| until_due.min(at_most));
        // In time or not, the next look is the truth.
        let _ = tokio::time::timeout(wait, self.shared.news.notified()).await;
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Settled> {
        let letters = self.shared.track().letters(settlements);
        if !letters.is_empty() {
            let (written, sent) = self.letters.send(&letters).await;
            self.shared.track().sent(&written);
            sent?;
        }
        let settled = self.shared.track().settle(settlements, Instant::now());
        self.shared.tell_settled();
        Ok(settled)
    }

    async fn backlog(&self) -> Result<Backlog> {
        let consumer = self.member().as_ref().and_then(|member| member.consumer.upgrade());
        let consumer = consumer.ok_or_else(|| Error::retryable(Code::NOT_OPEN, "the source is not open"))?;
        let shared = self.shared.clone();
        let unfinished = blocking(move || {
            backlog::unfinished(&shared, &consumer).map_err(|error| {
                tracing::debug!(target: "airtight::kafka", %error, "the backlog could not be read");
                may_pass(shared.away())
            })
        });
        Ok(Backlog { unfinished: unfinished.await?, ..Backlog::default() })
    }

    async fn close(&self) -> Result<()> {
        self.shared.stop();
        let ended = self.member().as_mut().and_then(|member| member.ended.take());
        if let Some(ended) = ended {
            // An error is a thread that has ended in a panic, which was reported.
            let _ = ended.await;
        }
        self.letters.close();
        Ok(())
    }
}

/// A consumer of a cluster that answers, and that has the topics.
fn connect(shared: &Arc<Shared>) -> Result<KafkaConsumer> {
    let config = &shared.config;
    let settings = config.consumer_config()?;
    let consumer: KafkaConsumer =
        BaseConsumer::from_config_and_context(&settings, SourceContext(shared.clone()))
            .map_err(|error| refused(&error))?;
    for topic in &config.topics {
        let Ok(metadata) = consumer.fetch_metadata(Some(topic), config.connection.connect_timeout) else {
            // What librdkafka has to say of it comes with a poll.
            drop(consumer.poll(Duration::from_millis(50)));
            return Err(shared.away());
        };
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        let code = match found {
            Some(found) => found.error().map(KafkaCode::from),
            None => Some(KafkaCode::UnknownTopicOrPartition),
        };
        if let Some(code) = code {
            return Err(no_topic(&config.connection.brokers, topic, code));
        }
    }
    Ok(consumer)
}

fn no_topic(brokers: &str, topic: &str, code: KafkaCode) -> Error {
    match code {
        KafkaCode::TopicAuthorizationFailed => Error::unavailable(
            Code::NOT_PERMITTED,
            format!("Kafka at {brokers} does not let this user read from topic `{topic}`"),
        )
        .with_remedy(format!("grant the user Read and Describe on topic `{topic}`")),
        KafkaCode::UnknownTopicOrPartition | KafkaCode::UnknownTopic => {
            Error::retryable(Code::NO_TOPIC, format!("topic `{topic}` does not exist at {brokers}"))
                .with_remedy("create the topic, or correct its name")
        }
        code => errors::topic(brokers, topic, code, false),
    }
}

/// A cluster that is unavailable, or a topic that is missing, may come back. Wrong credentials stay wrong.
fn may_pass(error: Error) -> Error {
    const LASTING: [Code; 4] = [Code::CREDENTIALS, Code::NOT_PERMITTED, Code::TLS, Code::WRONG_PROTOCOL];
    if error.class() != Class::Unavailable || LASTING.iter().any(|code| error.is(code)) {
        return error;
    }
    error.with_class(Class::Retryable)
}

/// librdkafka's calls that wait.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(call)
        .await
        .unwrap_or_else(|_| Err(Error::retryable(Code::STOPPING, "the runtime is shutting down")))
}
