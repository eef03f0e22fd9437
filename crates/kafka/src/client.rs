//! The producer: how it is made, what it reports, and when it is replaced.
//!
//! librdkafka retries for as long as it lives, in order, and with `enable.gapless.guarantee` a message that cannot
//! be delivered ends the producer rather than let the next one overtake it. So a producer is used until it has
//! ended or has not acknowledged anything for too long; then what it still holds is purged, and a new one is made.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_core::{Class, Code, Error, Result};
use rdkafka::{
    ClientContext,
    config::{FromClientConfigAndContext, RDKafkaLogLevel},
    error::{KafkaError, RDKafkaErrorCode as KafkaCode},
    message::{Message as _, ToBytes},
    metadata::MetadataBroker,
    producer::{BaseRecord, DeliveryResult, Producer as _, ProducerContext, PurgeConfig, ThreadedProducer},
};
use tokio::sync::Notify;

use crate::{
    complaint::{self, Complaint},
    config::KafkaConfig,
    connection::refused,
    errors::{self, Fate},
    open_partitions::{Acknowledged, OpenInTopic, OpenPartitions},
    topics::Topics,
};

/// Batches of this size fill a request and fit the default limit of brokers.
const BATCH_BYTES: usize = 1_000_000;
/// Below this a batch is one message in any case.
const LEAST_BATCH_BYTES: usize = 1_000;
/// How often it is looked whether a producer is still in use.
const LOOK: Duration = Duration::from_millis(100);

/// What became of one message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    /// The index that it was sent with.
    pub(crate) at: usize,
    pub(crate) error: Option<KafkaCode>,
}

/// Where the reports on the messages of one call arrive.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    arrived: Mutex<Vec<Report>>,
    news: Notify,
}

impl Reports {
    /// What has arrived since the last time; waits for at least one.
    pub(crate) async fn next(&self) -> Vec<Report> {
        loop {
            // Registered before the look, so that none arrives unseen in between.
            let news = self.news.notified();
            let arrived = std::mem::take(&mut *lock(&self.arrived));
            if !arrived.is_empty() {
                return arrived;
            }
            news.await;
        }
    }
}

/// What librdkafka keeps with a message until its report.
pub(crate) struct Ticket {
    reports: Arc<Reports>,
    open_partitions: Arc<OpenInTopic>,
    at: usize,
}

/// What a producer says of its connections.
#[derive(Debug, Default)]
pub(crate) struct Health {
    complaint: Complaint,
    /// No broker can be reached. librdkafka says so once, and never that one is back.
    down: AtomicBool,
    /// Where the cluster says that its brokers are, once it has answered.
    advertised: Mutex<String>,
}

impl Health {
    fn note(&self, error: &KafkaError, reason: &str) {
        if error.rdkafka_error_code() == Some(KafkaCode::AllBrokersDown) {
            self.down.store(true, Ordering::Relaxed);
        }
        self.complaint.note(error, reason);
    }

    /// The cluster has answered, and said where its brokers are.
    pub(crate) fn listed(&self, brokers: &[MetadataBroker]) {
        let list: Vec<String> =
            brokers.iter().map(|broker| format!("{}:{}", broker.host(), broker.port())).collect();
        *lock(&self.advertised) = list.join(", ");
    }

    fn answered(&self) {
        self.down.store(false, Ordering::Relaxed);
        self.complaint.forget();
    }

    /// Whether no broker could be reached, and nothing was acknowledged since.
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }
}

/// Connects librdkafka's callbacks with the two above.
pub(crate) struct SinkContext(Arc<Health>);

impl ClientContext for SinkContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        complaint::log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.note(&error, reason);
    }
}

impl ProducerContext for SinkContext {
    type DeliveryOpaque = Box<Ticket>;

    fn delivery(&self, result: &DeliveryResult<'_>, ticket: Box<Ticket>) {
        let error = match result {
            Ok(message) => match ticket.open_partitions.acknowledged(message.partition(), message.offset()) {
                Acknowledged::Believed => {
                    self.0.answered();
                    None
                }
                // All that follow it in that partition are in doubt as well: said once.
                doubted => {
                    if doubted == Acknowledged::Impossible {
                        tracing::warn!(
                            target: "airtight::kafka",
                            topic = message.topic(), partition = message.partition(), offset = message.offset(),
                            "a message was reported as delivered at an offset that was reported before, as after a topic was \
                             deleted and created again; the sink sends it and the messages after it again"
                        );
                    }
                    Some(KafkaCode::OutOfOrderSequenceNumber)
                }
            },
            Err((error, _)) => Some(error.rdkafka_error_code().unwrap_or(KafkaCode::Fail)),
        };
        lock(&ticket.reports.arrived).push(Report { at: ticket.at, error });
        ticket.reports.news.notify_one();
    }
}

/// One producer, from its first message to the fault that ends it.
pub(crate) struct Producer {
    pub(crate) inner: ThreadedProducer<SinkContext>,
    pub(crate) health: Arc<Health>,
    pub(crate) open_partitions: OpenPartitions,
    /// Whether it was given up.
    ended: RwLock<bool>,
}

impl Producer {
    /// Keeps it from being given up while several messages of a key are handed over; none if it was. A purge in their middle
    /// would take the first ones, and librdkafka would number the others anew.
    pub(crate) fn hold(&self) -> Option<RwLockReadGuard<'_, bool>> {
        Some(self.ended.read().unwrap_or_else(PoisonError::into_inner)).filter(|ended| !**ended)
    }

    /// Whether it was given up.
    pub(crate) fn has_ended(&self) -> bool {
        self.hold().is_none()
    }

    /// Gives it up: whatever it still holds fails, and nothing more is handed over. Whether it was not given up before.
    fn end(&self) -> bool {
        let is_first =
            !std::mem::replace(&mut *self.ended.write().unwrap_or_else(PoisonError::into_inner), true);
        self.purge();
        is_first
    }

    /// Hands a message over; its report comes to `reports` under the index `at`, after its topic's `OpenInTopic` has checked it.
    pub(crate) fn send<K: ToBytes + ?Sized>(
        &self,
        record: BaseRecord<'_, K, [u8], ()>,
        (reports, open_partitions, at): (&Arc<Reports>, &Arc<OpenInTopic>, usize),
    ) -> std::result::Result<(), KafkaCode> {
        let ticket =
            Box::new(Ticket { reports: reports.clone(), open_partitions: open_partitions.clone(), at });
        let record = BaseRecord {
            topic: record.topic,
            partition: record.partition,
            payload: record.payload,
            key: record.key,
            timestamp: record.timestamp,
            headers: record.headers,
            delivery_opaque: ticket,
        };
        self.inner.send(record).map_err(|(error, _)| error.rdkafka_error_code().unwrap_or(KafkaCode::Fail))
    }

    /// What has ended it, if that is nobody's fault: a missing right, an identity that the cluster does not give.
    pub(crate) fn refused(&self) -> Option<(KafkaCode, String)> {
        self.inner.client().fatal_error().filter(|(code, _)| !errors::is_collateral(*code))
    }

    /// Makes every message that is still held fail now.
    fn purge(&self) {
        self.inner.purge(PurgeConfig::default().queue().inflight());
    }
}

/// Makes producers, and knows which topics there are.
pub(crate) struct Client {
    pub(crate) config: KafkaConfig,
    pub(crate) topics: Topics,
    current: Mutex<Option<Arc<Producer>>>,
    batch_bytes: AtomicUsize,
}

impl Client {
    /// Checks the settings; connects to nothing.
    pub(crate) fn new(config: KafkaConfig) -> Result<Self> {
        config.producer_config(BATCH_BYTES)?;
        Ok(Self {
            config,
            current: Mutex::default(),
            topics: Topics::default(),
            batch_bytes: AtomicUsize::new(BATCH_BYTES),
        })
    }

    /// Whether keys are put where [`crate::open_partitions::partition_of`] says.
    pub(crate) fn knows_partitions(&self) -> bool {
        self.config.knows_partitions()
    }

    pub(crate) fn brokers(&self) -> &str {
        &self.config.connection.brokers
    }

    /// How long the cluster may take to answer at all.
    pub(crate) fn patience(&self) -> Duration {
        self.config.connection.connect_timeout
    }

    /// The producer in use, or a new one.
    pub(crate) fn producer(&self) -> Result<Arc<Producer>> {
        let mut current = lock(&self.current);
        if let Some(producer) = current.as_ref().filter(|producer| !producer.has_ended()) {
            return Ok(producer.clone());
        }
        let producer = self.new_producer()?;
        // Whoever has ended the one before sees to it.
        *current = Some(producer.clone());
        Ok(producer)
    }

    /// One that nobody else uses; to be [given up](Self::discard) in the end.
    pub(crate) fn new_producer(&self) -> Result<Arc<Producer>> {
        let health = Arc::<Health>::default();
        let config = self.config.producer_config(self.batch_bytes.load(Ordering::Relaxed)).map_err(later)?;
        let inner = ThreadedProducer::from_config_and_context(&config, SinkContext(health.clone()))
            .map_err(|error| later(refused(&error)))?;
        Ok(Arc::new(Producer {
            inner,
            health,
            open_partitions: OpenPartitions::default(),
            ended: RwLock::new(false),
        }))
    }

    /// Gives a producer up: whatever it still holds fails, here and in other calls.
    pub(crate) fn discard(&self, producer: &Arc<Producer>) {
        let is_first = producer.end();
        lock(&self.current).take_if(|current| Arc::ptr_eq(current, producer));
        if is_first {
            retire(producer.clone());
        }
    }

    /// Gives up whatever there is.
    pub(crate) fn close(&self) {
        let current = lock(&self.current).take();
        if let Some(producer) = current.filter(|producer| producer.end()) {
            retire(producer);
        }
    }

    /// A batch, of so many bytes or fewer, was refused though each of its messages is welcome: the broker's limit is
    /// below ours.
    pub(crate) fn shrink_batches(&self, refused: usize) {
        let before = self.batch_bytes.load(Ordering::Relaxed);
        let after = (before.min(refused) / 4).max(LEAST_BATCH_BYTES);
        self.batch_bytes.store(after, Ordering::Relaxed);
        tracing::warn!(
            target: "airtight::kafka",
            "the broker refuses a batch of messages that it accepts one by one: its `max.message.bytes` is lower than `batch.size`. The sink sends batches of {after} bytes from now on"
        );
    }

    /// Whether the cluster answers.
    pub(crate) async fn reach(&self) -> Result<()> {
        let producer = self.producer()?;
        let timeout = self.config.connection.connect_timeout;
        let asked = producer.clone();
        let answer = blocking(move || Ok(asked.inner.client().fetch_cluster_id(timeout))).await?;
        match answer {
            Some(_) => {
                producer.health.answered();
                Ok(())
            }
            None => Err(self.away(&producer)),
        }
    }

    /// Why nothing is acknowledged, in words.
    pub(crate) fn away(&self, producer: &Producer) -> Error {
        let trouble = producer.refused().or_else(|| producer.health.complaint.last());
        errors::away(self.brokers(), trouble, &lock(&producer.health.advertised))
    }

    /// What an error code on a message means.
    pub(crate) fn fate(&self, topic: &str, code: KafkaCode) -> Fate {
        if matches!(
            code,
            KafkaCode::UnknownTopicOrPartition | KafkaCode::UnknownTopic | KafkaCode::UnknownPartition
        ) {
            self.topics.forget(topic);
        }
        errors::fate(self.brokers(), topic, code, self.config.create)
    }
}

/// The settings were good when the sink was made. What is wrong with them now, a file that is being replaced or a host
/// without threads to spare, is no event's fault.
pub(crate) fn later(error: Error) -> Error {
    error.with_class(Class::Unavailable)
}

/// A producer ends with waits of its own, which must not be on a runtime's thread: so here is who lets go of it last. Once
/// for each.
fn retire(producer: Arc<Producer>) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    drop(runtime.spawn(async move {
        while Arc::strong_count(&producer) > 1 {
            tokio::time::sleep(LOOK).await;
        }
        drop(tokio::task::spawn_blocking(move || drop(producer)));
    }));
}

/// librdkafka's calls that wait.
pub(crate) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(call)
        .await
        .unwrap_or_else(|_| Err(Error::retryable(Code::STOPPING, "the runtime is shutting down")))
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
