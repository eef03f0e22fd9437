//! Messages that go to another topic: dead letters, and retries if they have their own topic.
//!
//! They are written as the sink writes, idempotently and to all replicas. Their event counts as settled only when that is
//! acknowledged. If the process is killed in between, the event is read again, and its message may be written twice; both
//! have the same origin in their headers.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use airtight_core::{Class, Code, Error, Position, Result, Verdict};
use rdkafka::{error::RDKafkaErrorCode as KafkaCode, producer::BaseRecord};

use super::{
    KafkaSourceConfig,
    message::{ATTEMPTS, DUE, ERROR, ERROR_CODE, GROUP, OFFSET, PARTITION, TOPIC, VERDICT},
    track::Letter,
};
use crate::{
    client::{Client, Reports},
    errors::Fate,
};

/// An error's words in a header.
const MAX_ERROR: usize = 2_000;
const LOOK: Duration = Duration::from_millis(200);

pub(super) struct Letters {
    config: Arc<KafkaSourceConfig>,
    client: Client,
}

impl Letters {
    /// Checks the settings; connects to nothing.
    pub(super) fn new(config: Arc<KafkaSourceConfig>) -> Result<Self> {
        Ok(Self { client: Client::new(config.letters_config())?, config })
    }

    /// Makes sure that the topics are there. A dead-letter topic may still appear; a retry topic is read as well.
    pub(super) async fn open(&self) -> Result<()> {
        if let Some(topic) = self.config.retry_topic() {
            self.client.topic(topic).await?;
        }
        for topic in &self.config.topics {
            let Some(dead) = self.config.dead_letter_topic_of(topic) else { continue };
            if let Err(error) = self.client.topic(&dead).await {
                tracing::warn!(target: "airtight::kafka", code = error.code(), %error, "the dead-letter topic does not exist yet: the first dead event would wait for it");
            }
        }
        Ok(())
    }

    /// Writes them all. Returns those that are written, and what was wrong with the others.
    pub(super) async fn send(&self, letters: &[Letter]) -> (Vec<Position>, Result<()>) {
        let mut written = Vec::new();
        let sent = self.send_all(letters, &mut written).await;
        let written = written.into_iter().map(|at: usize| letters[at].position).collect();
        // Whatever it is, the event is kept, and the same verdict comes again.
        let sent = sent.map_err(|error| {
            error
                .with_class(Class::Retryable)
                .context("cannot write an event to its dead-letter or retry topic")
        });
        (written, sent)
    }

    async fn send_all(&self, letters: &[Letter], written: &mut Vec<usize>) -> Result<()> {
        let topics: Vec<String> = letters.iter().map(|letter| self.topic(letter)).collect();
        for (at, topic) in topics.iter().enumerate() {
            if !topics[..at].contains(topic) {
                self.client.topic(topic).await?;
            }
        }
        let producer = self.client.producer()?;
        let reports = Arc::<Reports>::default();
        let (mut open, mut fallen): (usize, Vec<(usize, KafkaCode)>) = (0, Vec::new());
        for (at, letter) in letters.iter().enumerate() {
            let record = BaseRecord {
                topic: &topics[at],
                partition: None,
                payload: letter.raw.value.as_deref(),
                key: letter.raw.key.as_deref(),
                timestamp: None,
                headers: Some(letter.raw.headers_with(&self.headers(letter))),
                delivery_opaque: (),
            };
            let open_partitions = producer.open_partitions.of(&topics[at]);
            match producer.send(record, (&reports, &open_partitions, at)) {
                Ok(()) => open += 1,
                Err(code) => fallen.push((at, code)),
            }
        }
        let began = tokio::time::Instant::now();
        while open > 0 {
            let Ok(arrived) = tokio::time::timeout(LOOK, reports.next()).await else {
                if began.elapsed() < self.config.timeout {
                    continue;
                }
                let away = self.client.away(&producer);
                self.client.discard(&producer);
                return Err(away);
            };
            for report in arrived {
                open -= 1;
                match report.error {
                    None => written.push(report.at),
                    Some(code) => fallen.push((report.at, code)),
                }
            }
        }
        let Some(&(at, code)) = fallen.last() else { return Ok(()) };
        // Whatever made a message fall has ended the producer.
        self.client.discard(&producer);
        // Perhaps the topic takes them in smaller requests: the next try is the same letters again.
        let too_large = fallen.iter().filter(|(_, code)| *code == KafkaCode::MessageSizeTooLarge);
        let sizes: Vec<usize> = too_large.map(|(at, _)| letters[*at].raw.size()).collect();
        if sizes.len() > 1 {
            self.client.shrink_batches(sizes.iter().sum());
        }
        Err(match self.client.fate(&topics[at], code) {
            Fate::MayBeTheCause(error) | Fate::Away(error) => error,
            Fate::Collateral => {
                Error::retryable(Code::CLIENT_ENDED, format!("the Kafka client has ended ({code})"))
            }
        })
    }

    fn topic(&self, letter: &Letter) -> String {
        let dead = || self.config.dead_letter_topic_of(&letter.origin.topic_partition.topic);
        let topic = match letter.verdict {
            Verdict::Retry { .. } => self.config.retry_topic().map(str::to_owned),
            _ => dead(),
        };
        topic.unwrap_or_default()
    }

    fn headers(&self, letter: &Letter) -> Vec<(&'static str, String)> {
        let origin = &letter.origin;
        let (verdict, error) = match &letter.verdict {
            Verdict::Retry { error, .. } => ("retry", Some(error)),
            Verdict::Unknown { error } => ("unknown", Some(error)),
            Verdict::Dead { error } => ("dead", Some(error)),
            Verdict::Delivered | Verdict::SettledInTransaction | Verdict::Released | Verdict::Away { .. } => {
                ("", None)
            }
        };
        let mut headers = vec![
            (TOPIC, origin.topic_partition.topic.to_string()),
            (PARTITION, origin.topic_partition.partition.to_string()),
            (OFFSET, origin.offset.to_string()),
            (GROUP, self.config.group.clone()),
            (ATTEMPTS, letter.attempts.to_string()),
            (VERDICT, verdict.to_owned()),
        ];
        if let Some(error) = error {
            headers.push((ERROR_CODE, error.code().to_owned()));
            headers.push((ERROR, error.to_string().chars().take(MAX_ERROR).collect()));
        }
        if let Verdict::Retry { after, .. } = &letter.verdict {
            let due = (SystemTime::now() + *after).duration_since(UNIX_EPOCH).unwrap_or_default();
            headers.push((DUE, due.as_millis().to_string()));
        }
        headers
    }

    pub(super) fn close(&self) {
        self.client.close();
    }
}
