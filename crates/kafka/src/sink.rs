//! The sink: it pipelines a batch, reports an outcome for each event, and delivers a prefix per key.
//!
//! # Why the prefix holds
//!
//! Events of one key go to one partition. A broker appends a producer's requests to a partition in the order of their
//! sequence numbers and refuses a gap, so after a request that it refused it takes none behind it; and librdkafka, with
//! `enable.gapless.guarantee`, then ends the producer instead of numbering anew. That holds in partitions that are open to
//! the producer, and [`crate::open_partitions`] is about the others: first, one event is sent to each of them, alone; then whatever
//! goes to an open one, all at once. Where the next event of a key goes to another topic or partition, it waits for all
//! before it. Nothing is given up on by time ([`crate::config`]): when a call has waited too long, the whole producer goes.
//!
//! With a `partitioner` other than Java's we don't know where a key goes. Then one request at a time is on its way to a
//! broker, and of each key the first event is sent alone, and the others follow when it is acknowledged.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use airtight_core::{
    Capabilities, Class, Code, Delivery, Error, Event, Outcome, Preview, Result, Sink, keyed::by_key,
};
use async_trait::async_trait;
use rdkafka::{error::RDKafkaErrorCode as KafkaCode, producer::BaseRecord};
use tokio::time::Instant;

use crate::{
    client::{Client, Producer, Reports},
    config::{BATCH_BYTES, BATCH_EVENTS, CALLS, KafkaConfig},
    encode::Encode,
    errors::{self, Fate, destination},
    open_partitions::OpenInTopic,
    targets::{NOT_LOOKED_AT, Target, Topic},
};

/// How often a call starts over in vain for events that fell with others.
const PASSES: usize = 4;
/// How long nothing is acknowledged before the topics that it should come from are looked at.
const STUCK: Duration = Duration::from_secs(3);
/// How many of them are looked at each time.
const LOOKED_AT: usize = 16;
/// How many messages of a refused request are sent alone, to find the one that caused the refusal, before the rest is left to the next call.
const CANDIDATES: usize = 20;
/// How long all brokers may be out of reach before a call gives up. A broker's restart takes about as long.
const DOWN: Duration = Duration::from_secs(5);
/// How long acknowledgements are waited for after a message has fallen.
const ENDED: Duration = Duration::from_millis(500);
/// How often a waiting call looks at that.
const LOOK: Duration = Duration::from_millis(250);
/// How long librdkafka may take to give back what was purged.
const PURGE: Duration = Duration::from_secs(2);

/// Writes each event to a Kafka topic; see the crate's documentation.
pub struct KafkaSink {
    pub(crate) client: Client,
    pub(crate) encode: Encode,
    timeout: Duration,
}

impl KafkaSink {
    /// Checks the config, and nothing on the network. A permanent error names the key that is wrong.
    pub fn new(config: KafkaConfig) -> Result<Self> {
        let encode = Encode::new(&config)?;
        let timeout = config.timeout;
        Ok(Self { client: Client::new(config)?, encode, timeout })
    }

    /// Whether nobody can be accepted because of this, or only those for one topic of several.
    pub(crate) fn is_whole(&self, error: &Error) -> bool {
        let is_everybodys = error.destination().is_none() || self.encode.only_topic().is_some();
        error.class() == Class::Unavailable && is_everybodys
    }
}

impl fmt::Debug for KafkaSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSink")
            .field("brokers", &self.client.brokers())
            .field("format", &self.encode.format())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Sink for KafkaSink {
    fn capabilities(&self) -> Capabilities {
        let wants_rows = self.encode.wants_rows();
        Capabilities {
            prefix_per_key: true,
            concurrency: CALLS,
            max_batch_events: BATCH_EVENTS,
            max_batch_bytes: BATCH_BYTES,
            wants_rows,
        }
    }

    async fn open(&self) -> Result<()> {
        self.client.reach().await?;
        match self.encode.only_topic() {
            Some(topic) => self.client.topic(topic).await.map(drop),
            None => Ok(()),
        }
    }

    fn destinations(&self, event: &Event) -> Vec<String> {
        if self.encode.only_topic().is_some() {
            return Vec::new();
        }
        let address = self.encode.address(event);
        let topic =
            address.and_then(|address| self.encode.topic_of(&address.by).map(|name| destination(&name)));
        topic.into_iter().collect()
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let (topics, targets) = self.targets(batch).await;
        let mut call = Call {
            sink: self,
            batch,
            topics,
            targets,
            chains: by_key(batch).into(),
            outcomes: vec![None; batch.len()],
            away: false,
            one_by_one: false,
            refused_bytes: 0,
        };
        call.leave_out_unseen();
        let mut in_vain = 0;
        while in_vain < PASSES && !call.away && call.unresolved().next().is_some() {
            let before = call.resolved();
            if let Err(error) = call.pass().await {
                call.give_up(&error);
            }
            in_vain = if call.resolved() > before { 0 } else { in_vain + 1 };
        }
        call.answer()
    }

    fn preview(&self, event: &Event) -> Result<Option<Preview>> {
        self.encode.preview(event).map(Some)
    }

    async fn close(&self) -> Result<()> {
        self.client.close();
        Ok(())
    }
}

/// One call of `deliver`.
struct Call<'a> {
    sink: &'a KafkaSink,
    batch: &'a [Delivery],
    topics: Vec<Topic>,
    targets: Vec<Result<Target<'a>>>,
    /// The events of each key.
    chains: Arc<[Vec<usize>]>,
    /// None: not delivered yet, and nothing wrong with it.
    outcomes: Vec<Option<Outcome>>,
    /// Nobody can be accepted now.
    away: bool,
    /// A request with several events of a key was refused, and any of them may be the reason: one of a key at a time.
    one_by_one: bool,
    /// What was refused together, until somebody is found guilty of it.
    refused_bytes: usize,
}

/// Messages on their way.
struct Flight {
    producer: Arc<Producer>,
    reports: Arc<Reports>,
    /// What the producer knows of each topic's partitions.
    open_partitions: Vec<Arc<OpenInTopic>>,
    /// Sent and not reported yet; and how many of them to each topic.
    open: usize,
    open_of: Vec<usize>,
    /// What fell, with the code.
    fallen: Vec<(usize, KafkaCode)>,
}

impl Call<'_> {
    /// Keys that have an event which can be sent now: its first one and those behind it.
    fn unresolved(&self) -> impl Iterator<Item = &[usize]> {
        self.unresolved_of(&self.chains)
    }

    fn unresolved_of<'c>(&self, chains: &'c [Vec<usize>]) -> impl Iterator<Item = &'c [usize]> {
        chains.iter().filter_map(|chain| {
            let first =
                chain.iter().position(|at| !matches!(self.outcomes[*at], Some(Outcome::Delivered)))?;
            self.outcomes[chain[first]].is_none().then_some(&chain[first..])
        })
    }

    /// Events for topics that there was no time to look at are left to the next call.
    fn leave_out_unseen(&mut self) {
        for (target, outcome) in self.targets.iter().zip(&mut self.outcomes) {
            if let Ok(target) = target
                && matches!(self.topics[target.topic].partitions, Ok(NOT_LOOKED_AT))
            {
                *outcome = Some(Outcome::Skipped);
            }
        }
    }

    /// Sends all that is unresolved, and waits for what becomes of it.
    async fn pass(&mut self) -> Result<()> {
        let mut flight = self.flight()?;
        while self.unresolved().next().is_some() {
            // Another call has given it up, and nothing of ours was with it.
            if flight.producer.has_ended() {
                flight = self.flight()?;
            }
            self.open_new_partitions(&mut flight).await?;
            if flight.fallen.is_empty() {
                let chains = self.chains.clone();
                let waiting: Vec<&[usize]> = self.unresolved_of(&chains).collect();
                let mut behind = HashMap::new();
                self.send_runs(None, &waiting, &mut flight, &mut behind);
                self.collect(&mut flight, &mut behind).await?;
            }
            if !flight.fallen.is_empty() {
                return self.judge(flight).await;
            }
        }
        // Each of those that were refused together was taken alone.
        if self.refused_bytes > 0 {
            self.sink.client.shrink_batches(std::mem::take(&mut self.refused_bytes));
        }
        Ok(())
    }

    fn flight(&self) -> Result<Flight> {
        Ok(self.flight_with(self.sink.client.producer()?))
    }

    fn flight_with(&self, producer: Arc<Producer>) -> Flight {
        let open_partitions =
            self.topics.iter().map(|topic| producer.open_partitions.of(&topic.name)).collect();
        let open_of = vec![0; self.topics.len()];
        Flight { producer, open_partitions, reports: Arc::default(), open: 0, open_of, fallen: Vec::new() }
    }

    /// One message was reported.
    fn reported(&self, at: usize, flight: &mut Flight) {
        flight.open -= 1;
        if let Ok(target) = &self.targets[at] {
            flight.open_of[target.topic] -= 1;
        }
    }

    fn resolved(&self) -> usize {
        self.outcomes.iter().flatten().count()
    }

    /// Sends one event to each partition that waits for one and is not open, and waits until they are.
    async fn open_new_partitions(&mut self, flight: &mut Flight) -> Result<()> {
        if self.first_of_closed(flight).is_empty() {
            return Ok(());
        }
        let producer = flight.producer.clone();
        let alone = tokio::time::timeout(self.sink.timeout, producer.open_partitions.opening.lock()).await;
        let Ok(_alone) = alone else { return Err(self.sink.client.away(&producer)) };
        if let Some(_held) = producer.hold() {
            // Another call may have opened some meanwhile.
            for first in self.first_of_closed(flight) {
                self.send(first, flight);
            }
        }
        self.collect(flight, &mut HashMap::new()).await
    }

    /// Of each partition that is not open, the first event that could be sent there now.
    fn first_of_closed(&self, flight: &Flight) -> Vec<usize> {
        let mut seen = HashSet::new();
        let heads = self.unresolved().filter_map(|chain| chain.first().copied());
        let is_first = |at: &usize| match &self.targets[*at] {
            Ok(Target { topic, partition: Some(partition), .. }) => {
                !flight.open_partitions[*topic].is_open(*partition) && seen.insert((*topic, *partition))
            }
            _ => false,
        };
        heads.filter(is_first).collect()
    }

    /// Waits until everything sent is reported, sending on behind each head.
    async fn collect(&mut self, flight: &mut Flight, behind: &mut HashMap<usize, &[usize]>) -> Result<()> {
        let (mut heard, mut looked) = (Instant::now(), Instant::now());
        while flight.open > 0 {
            let Ok(arrived) = tokio::time::timeout(LOOK, flight.reports.next()).await else {
                if heard.elapsed() >= self.sink.patience(flight) {
                    let error = self.sink.client.away(&flight.producer);
                    self.recall(flight).await;
                    // What has fallen says why.
                    return if flight.fallen.is_empty() { Err(error) } else { Ok(()) };
                }
                if looked.elapsed() >= STUCK && flight.fallen.is_empty() {
                    if self.find_trouble(flight).await {
                        // A producer cannot take back what it holds for one topic alone. The next one sends the rest.
                        self.recall(flight).await;
                        return Ok(());
                    }
                    looked = Instant::now();
                }
                continue;
            };
            (heard, looked) = (Instant::now(), Instant::now());
            for report in arrived {
                self.reported(report.at, flight);
                if let Some(code) = report.error {
                    flight.fallen.push((report.at, code));
                    continue;
                }
                self.outcomes[report.at] = Some(Outcome::Delivered);
                if let Some(rest) = behind.remove(&report.at) {
                    self.send_runs(Some(report.at), &[rest], flight, behind);
                }
            }
        }
        Ok(())
    }

    /// Whether the cluster says of topics that acknowledge nothing what is wrong with them: too few replicas, no leader.
    async fn find_trouble(&mut self, flight: &Flight) -> bool {
        let silent = (0..self.topics.len()).filter(|topic| flight.open_of[*topic] > 0);
        let mut found = false;
        for topic in silent.take(LOOKED_AT).collect::<Vec<_>>() {
            if let Some(error) = self.sink.client.trouble(&self.topics[topic].name).await {
                self.topics[topic].partitions = Err(error);
                found = true;
            }
        }
        found
    }

    /// Sends the first events of chains, in the order of the batch. The rest of a chain may follow when the last of these is
    /// acknowledged. `acknowledged` is what was before them in their chain.
    fn send_runs<'c>(
        &mut self,
        acknowledged: Option<usize>,
        chains: &[&'c [usize]],
        flight: &mut Flight,
        behind: &mut HashMap<usize, &'c [usize]>,
    ) {
        let producer = flight.producer.clone();
        let Some(_held) = producer.hold() else { return };
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let lengths: Vec<usize> = chains.iter().map(|chain| self.run(acknowledged, chain, flight)).collect();
        for (number, (chain, length)) in chains.iter().zip(&lengths).enumerate() {
            runs.extend(chain[..*length].iter().map(|at| (*at, number)));
        }
        runs.sort_unstable();
        let mut stopped = HashSet::new();
        for (at, number) in runs {
            if !stopped.contains(&number) && !self.send(at, flight) {
                stopped.insert(number);
            }
        }
        for (number, (chain, length)) in chains.iter().zip(lengths).enumerate() {
            let (now, later) = chain.split_at(length);
            if let Some(last) = now.last().filter(|_| !stopped.contains(&number) && !later.is_empty()) {
                behind.insert(*last, later);
            }
        }
    }

    /// How many of a chain may be sent at once: as many as go to one partition, if the broker knows the producer there.
    fn run(&self, acknowledged: Option<usize>, chain: &[usize], flight: &Flight) -> usize {
        let Some(head) = chain.first() else { return 0 };
        let Ok(target) = &self.targets[*head] else { return 1 };
        let is_known = match target.partition {
            Some(partition) if flight.open_partitions[target.topic].is_open(partition) => true,
            // Its turn to be opened comes when all others have had theirs.
            Some(_) => return 0,
            None => acknowledged.is_some_and(|before| self.is_with(target, before)),
        };
        if !is_known || self.one_by_one {
            return 1;
        }
        chain.iter().take_while(|at| self.is_with(target, **at)).count().max(1)
    }

    fn is_with(&self, target: &Target<'_>, at: usize) -> bool {
        matches!(&self.targets[at], Ok(other) if other.keeps_order_with(target))
    }

    /// Hands one event to the producer; false if it, and so what is behind it, does not go.
    fn send(&mut self, at: usize, flight: &mut Flight) -> bool {
        match self.hand_over(at, flight) {
            Ok(sent) => sent,
            Err(error) => {
                self.away |= self.sink.is_whole(&error);
                self.outcomes[at] = Some(Outcome::Failed(error));
                false
            }
        }
    }

    fn hand_over(&self, at: usize, flight: &mut Flight) -> Result<bool> {
        let target = self.targets[at].as_ref().map_err(Error::clone)?;
        let topic = &self.topics[target.topic];
        if let Err(trouble) = &topic.partitions {
            return Err(trouble.clone());
        }
        let content = self.sink.encode.content(&self.batch[at].event, &target.address)?;
        let least = content.body.as_ref().map_or(0, |body| body.len());
        if let Some(limit) = topic.limit.filter(|limit| least > *limit) {
            return Err(errors::over_limit(&topic.name, least, limit));
        }
        let record = BaseRecord {
            topic: &topic.name,
            partition: target.partition,
            payload: content.body.as_deref(),
            key: target.address.key.as_deref(),
            timestamp: content.timestamp,
            headers: Some(content.headers),
            delivery_opaque: (),
        };
        let ticket = (&flight.reports, &flight.open_partitions[target.topic], at);
        match flight.producer.send(record, ticket) {
            Ok(()) => {
                flight.open += 1;
                flight.open_of[target.topic] += 1;
                Ok(true)
            }
            Err(code) => {
                flight.fallen.push((at, code));
                Ok(false)
            }
        }
    }

    /// Takes back what was sent: the producer goes, and with it all that it holds. What was acknowledged until
    /// then is delivered.
    async fn recall(&mut self, flight: &mut Flight) {
        self.sink.client.discard(&flight.producer);
        let purged = async {
            while flight.open > 0 {
                for report in flight.reports.next().await {
                    self.reported(report.at, flight);
                    if report.error.is_none() {
                        self.outcomes[report.at] = Some(Outcome::Delivered);
                    }
                }
            }
        };
        // What is not reported by then is not delivered as far as anybody knows.
        let _ = tokio::time::timeout(PURGE, purged).await;
        flight.open = 0;
    }

    /// Finds out why messages fell: the producer's end, somebody's fault, or everybody's.
    async fn judge(&mut self, flight: Flight) -> Result<()> {
        let Flight { producer, fallen, .. } = flight;
        let refused = producer.refused().map(|_| self.sink.client.away(&producer));
        // Whatever made a message fall has ended the producer, or left a gap that only a new one closes.
        self.sink.client.discard(&producer);
        if let Some(error) = refused {
            return Err(error);
        }
        let mut candidates = Vec::new();
        for (at, code) in fallen {
            match self.fate(at, code)? {
                Fate::Collateral => {}
                Fate::MayBeTheCause(error) => candidates.push((at, error)),
                Fate::Away(error) => self.set_away(at, error)?,
            }
        }
        if self.find_limits(&candidates).await {
            return Ok(());
        }
        self.find_cause(candidates).await
    }

    /// A topic has refused an event, and would refuse the others: what waits for it is not sent. An error where that is
    /// everybody's.
    fn set_away(&mut self, at: usize, error: Error) -> Result<()> {
        match &self.targets[at] {
            Ok(target) if !self.sink.is_whole(&error) => {
                self.topics[target.topic].partitions = Err(error);
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Asks how large a message may be in topics that have refused one for its size; whether one of these is certainly
    /// larger. Then those are known, and need not be found by sending them one by one.
    async fn find_limits(&mut self, candidates: &[(usize, Error)]) -> bool {
        let mut is_any = false;
        for (at, error) in candidates {
            let Ok(target) = &self.targets[*at] else { continue };
            let topic = &mut self.topics[target.topic];
            if !error.is(&Code::TOO_LARGE) {
                continue;
            }
            if topic.limit.is_none() {
                topic.limit = self.sink.client.ask_limit(&topic.name).await;
            }
            let content = self.sink.encode.content(&self.batch[*at].event, &target.address);
            let least = content.ok().and_then(|content| content.body).map_or(0, |body| body.len());
            is_any |= topic.limit.is_some_and(|limit| least > limit);
        }
        is_any
    }

    /// What a code means for one event.
    fn fate(&self, at: usize, code: KafkaCode) -> Result<Fate> {
        let target = self.targets[at].as_ref().map_err(Error::clone)?;
        let topic = &self.topics[target.topic].name;
        match (code, target.address.partition) {
            (KafkaCode::UnknownPartition, None) => {
                self.sink.client.fate(topic, code);
                let message =
                    format!("the number of partitions of topic `{topic}` has changed; it is looked up again");
                Ok(Fate::Away(Error::unavailable(Code::NO_PARTITION, message)))
            }
            (KafkaCode::UnknownPartition, Some(partition)) => Ok(Fate::MayBeTheCause(Error::permanent(
                Code::NO_PARTITION,
                format!(
                    "the event asks for partition {partition} of topic `{topic}`, which the topic does not have"
                ),
            ))),
            _ => Ok(self.sink.client.fate(topic, code)),
        }
    }

    /// Sends the candidates alone, the largest first, until the one that caused the refusal is found.
    async fn find_cause(&mut self, mut candidates: Vec<(usize, Error)>) -> Result<()> {
        let bytes = candidates.iter().map(|(at, _)| self.batch[*at].event.size()).sum();
        let all = candidates.len();
        // Only those whose turn it is in their key.
        let heads: HashSet<usize> = self.unresolved().map(|chain| chain[0]).collect();
        candidates.retain(|(at, _)| heads.contains(at));
        candidates.sort_by_key(|(at, _)| std::cmp::Reverse(self.batch[*at].event.payload.len()));
        let has_others = candidates.len() < all;
        let mut is_any_guilty = false;
        // With a producer of their own, or they would share requests with what other calls send.
        let mut alone: Option<(Flight, Ended<'_>)> = None;
        for (at, error) in candidates.into_iter().take(CANDIDATES) {
            let (mut flight, ended) = match alone.take() {
                Some(alone) => alone,
                None => {
                    let flight = self.flight_with(self.sink.client.new_producer()?);
                    let ended = Ended(&self.sink.client, flight.producer.clone());
                    (flight, ended)
                }
            };
            self.send(at, &mut flight);
            self.collect(&mut flight, &mut HashMap::new()).await?;
            let Some((_, code)) = flight.fallen.first() else {
                alone = Some((flight, ended)).filter(|(flight, _)| !flight.producer.has_ended());
                continue;
            };
            // What it refused has ended the producer: the next candidate gets another.
            match self.fate(at, *code)? {
                Fate::MayBeTheCause(_) => self.outcomes[at] = Some(Outcome::Failed(error)),
                Fate::Collateral => {}
                Fate::Away(error) => self.set_away(at, error)?,
            }
            is_any_guilty = true;
        }
        if is_any_guilty {
            self.refused_bytes = 0;
        } else if has_others {
            (self.one_by_one, self.refused_bytes) = (true, bytes);
        } else if all > 1 {
            self.sink.client.shrink_batches(bytes);
        }
        Ok(())
    }

    /// Nobody can be accepted: the first event that waits says why, the others were not tried.
    fn give_up(&mut self, error: &Error) {
        self.away = true;
        let first = self.unresolved().map(|chain| chain[0]).min();
        if let Some(first) = first {
            self.outcomes[first] = Some(Outcome::Failed(error.clone()));
        }
    }

    fn answer(mut self) -> Vec<Outcome> {
        if !self.away && self.unresolved().next().is_some() {
            self.give_up(&Error::unavailable(
                Code::CLIENT_ENDED,
                format!("the Kafka client for {} has ended repeatedly", self.sink.client.brokers()),
            ));
        }
        for chain in self.chains.iter() {
            let mut is_prefix = true;
            for at in chain {
                let delivered = matches!(self.outcomes[*at], Some(Outcome::Delivered));
                if delivered && !is_prefix {
                    tracing::error!(
                        target: "airtight::kafka",
                        event_id = self.batch[*at].event.id,
                        "an event was acknowledged although an earlier event of its key was not"
                    );
                }
                if !is_prefix {
                    self.outcomes[*at] = None;
                }
                is_prefix &= delivered;
            }
        }
        self.outcomes.into_iter().map(|outcome| outcome.unwrap_or(Outcome::Skipped)).collect()
    }
}

/// Gives a producer up in the end, whatever that is.
struct Ended<'a>(&'a Client, Arc<Producer>);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.discard(&self.1);
    }
}

impl KafkaSink {
    /// How long nothing may be heard before what is on its way is given up.
    fn patience(&self, flight: &Flight) -> Duration {
        match flight.fallen.is_empty() {
            // The producer has ended. What was on its way is acknowledged now, or not by this one.
            false => ENDED,
            true if flight.producer.health.is_down() => DOWN,
            true => self.timeout,
        }
    }
}
