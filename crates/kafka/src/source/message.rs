//! A message as it was read, kept until it is settled: what cannot be handled goes to another topic as it came.

use std::{panic::AssertUnwindSafe, sync::Arc};

use airtight_core::{
    Code, Error, Event, Format, Result,
    format::{Incoming, decode},
};
use bytes::Bytes;
use rdkafka::message::{BorrowedMessage, Header, Headers as _, Message as _, OwnedHeaders};
use time::OffsetDateTime;

/// What all headers begin with that this source adds to a message.
pub(crate) const PREFIX: &str = "airtight-";
pub(crate) const TOPIC: &str = "airtight-topic";
pub(crate) const PARTITION: &str = "airtight-partition";
pub(crate) const OFFSET: &str = "airtight-offset";
pub(crate) const GROUP: &str = "airtight-group";
pub(crate) const ATTEMPTS: &str = "airtight-attempts";
pub(crate) const DUE: &str = "airtight-due";
pub(crate) const ERROR_CODE: &str = "airtight-error-code";
pub(crate) const ERROR: &str = "airtight-error";
pub(crate) const VERDICT: &str = "airtight-verdict";

/// What a message costs in memory besides its key, value and headers, near enough.
const OVERHEAD: usize = 256;

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TopicPartition {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
}

impl TopicPartition {
    pub(crate) fn new(topic: &str, partition: i32) -> Self {
        Self { topic: topic.into(), partition }
    }
}

/// A message, with all that it had.
#[derive(Debug, Clone)]
pub(crate) struct Raw {
    pub(crate) topic_partition: TopicPartition,
    pub(crate) offset: i64,
    pub(crate) written_at: Option<OffsetDateTime>,
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Option<Bytes>,
    /// None where they cannot be read.
    pub(crate) headers: Option<Vec<(String, Option<Bytes>)>>,
}

/// Where a message was read first, and what it has been through since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) topic_partition: TopicPartition,
    pub(crate) offset: i64,
    pub(crate) attempts: u32,
    /// When it is to be tried, in milliseconds since 1970.
    pub(crate) due: Option<i64>,
    /// Whose retry it is.
    pub(crate) group: Option<String>,
}

impl Raw {
    pub(crate) fn new(message: &BorrowedMessage<'_>, topic_partition: TopicPartition) -> Self {
        let millis = message.timestamp().to_millis();
        let nanos = millis.map(|millis| i128::from(millis) * 1_000_000);
        // rdkafka panics at a header's name that is not UTF-8, and one message must not end the source.
        let headers = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let headers = message.headers();
            headers.map_or_else(Vec::new, |headers| {
                let owned = |header: Header<'_, &[u8]>| {
                    (header.key.to_owned(), header.value.map(Bytes::copy_from_slice))
                };
                headers.iter().map(owned).collect()
            })
        }));
        Self {
            topic_partition,
            offset: message.offset(),
            written_at: nanos.and_then(|nanos| OffsetDateTime::from_unix_timestamp_nanos(nanos).ok()),
            key: message.key().map(Bytes::copy_from_slice),
            value: message.payload().map(Bytes::copy_from_slice),
            headers: headers.ok(),
        }
    }

    /// What it takes in memory.
    pub(crate) fn size(&self) -> usize {
        let length = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        let headers = self.headers.iter().flatten();
        let headers: usize = headers.map(|(name, value)| name.len() + length(value) + 48).sum();
        OVERHEAD + length(&self.key) + length(&self.value) + headers
    }

    fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().flatten().rev().find(|(known, _)| known == name);
        found.and_then(|(_, value)| std::str::from_utf8(value.as_deref()?).ok())
    }

    /// Where it comes from: its own place, or, read from the retry topic, the one that it had at first.
    pub(crate) fn origin(&self, is_retry: bool) -> Origin {
        let here = Origin {
            topic_partition: self.topic_partition.clone(),
            offset: self.offset,
            attempts: 0,
            due: None,
            group: None,
        };
        if !is_retry {
            return here;
        }
        let number = |name| self.header(name).and_then(|value| value.parse::<i64>().ok());
        let (topic, partition, offset) = (self.header(TOPIC), number(PARTITION), number(OFFSET));
        let (Some(topic), Some(partition), Some(offset)) = (topic, partition, offset) else { return here };
        Origin {
            topic_partition: TopicPartition::new(topic, i32::try_from(partition).unwrap_or_default()),
            offset,
            attempts: number(ATTEMPTS).and_then(|n| u32::try_from(n).ok()).unwrap_or_default(),
            due: number(DUE),
            group: self.header(GROUP).map(str::to_owned),
        }
    }

    /// The event. An id that is made up comes from the origin, so that a retry has the id of the first attempt.
    pub(crate) fn event(&self, format: Format, origin: &Origin) -> Result<Event> {
        let Some(headers) = &self.headers else {
            return Err(Error::permanent(
                Code::BAD_MESSAGE,
                "the message has a header whose name is not UTF-8 text",
            ));
        };
        let own = headers.iter().filter(|(name, _)| !name.starts_with(PREFIX));
        decode(
            format,
            &Incoming {
                topic: &origin.topic_partition.topic,
                place: format!("{}/{}", origin.topic_partition.partition, origin.offset),
                offset: origin.offset,
                written_at: self.written_at,
                key: self.key.as_deref(),
                body: self.value.clone(),
                headers: own
                    .map(|(name, value)| (name.as_str(), value.as_deref().unwrap_or_default()))
                    .collect(),
            },
        )
    }

    /// Its own headers, without what an earlier retry has added, and these.
    pub(crate) fn headers_with(&self, added: &[(&str, String)]) -> OwnedHeaders {
        let own = self.headers.iter().flatten().filter(|(name, _)| !name.starts_with(PREFIX));
        let mut headers = OwnedHeaders::new();
        for (name, value) in own {
            headers = headers.insert(Header { key: name, value: value.as_deref() });
        }
        for (name, value) in added {
            headers = headers.insert(Header { key: name, value: Some(value.as_bytes()) });
        }
        headers
    }
}
