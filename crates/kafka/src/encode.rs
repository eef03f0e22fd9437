//! From an event to a Kafka message: topic, key, headers, value.

use std::borrow::Cow;

use airtight_core::{
    Error, Event, Preview, Result,
    format::{
        Carrier, Encoder, Format, Message,
        debezium::{Converters, DebeziumEncoder, DebeziumOptions},
    },
    route::Route,
    settings::bad,
};
use bytes::Bytes;
use rdkafka::message::{Header, OwnedHeaders};

use crate::config::KafkaConfig;

/// The longest name of a topic.
const MAX_TOPIC: usize = 249;
/// What a record takes beside its key, value and headers, at most.
const OVERHEAD: usize = 128;

/// Makes messages of events.
#[derive(Debug, Clone)]
pub(crate) struct Encode {
    encoder: Encoder,
    /// With the format `debezium`, which says more than bodies and headers.
    debezium: Option<DebeziumEncoder>,
    /// None where Debezium's router decides.
    topic: Option<Route>,
    event_time: bool,
    max_bytes: usize,
}

/// A message on its way to librdkafka.
#[derive(Debug)]
pub(crate) struct Outgoing<'a> {
    pub(crate) key: Option<Cow<'a, [u8]>>,
    pub(crate) body: Option<Bytes>,
    pub(crate) headers: OwnedHeaders,
    /// None is left to the key.
    pub(crate) partition: Option<i32>,
    /// In milliseconds; none is the time of sending.
    pub(crate) timestamp: Option<i64>,
}

/// What decides on a message's place: those of one lane keep their order, as their topic, partition and key are the same.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lane<'a> {
    topic: Cow<'a, str>,
    /// Beside the event's own key, which those that are compared have in common.
    debeziums: Option<(Bytes, Option<i32>)>,
}

impl Encode {
    /// Checks what can be checked of the topic before an event comes.
    pub(crate) fn new(config: &KafkaConfig) -> Result<Self> {
        let debezium = match config.format {
            Format::Debezium => Some(DebeziumEncoder::new(config.debezium.clone(), config.converters)?),
            _ => refuse_debezium(config)?,
        };
        let topic = match (&config.topic, &debezium) {
            (Some(topic), _) => Some(topic.clone()),
            (None, Some(_)) => None,
            (None, None) => Some(Route::stream()),
        };
        let literals: Vec<&str> = match &topic {
            Some(Route::Template(template)) => template.literals().collect(),
            _ => Vec::new(),
        };
        let wrong = literals.iter().flat_map(|text| text.chars()).find(|c| !is_allowed(*c));
        if let (Some(wrong), Some(topic)) = (wrong, &topic) {
            let message = format!("the topic `{topic}` holds {wrong:?}: {ALLOWED}");
            return Err(Error::permanent("bad_topic", message));
        }
        if let Some(topic) = topic.as_ref().and_then(Route::constant) {
            check_topic(topic)?;
        }
        let carrier = Carrier { has_key: true, has_tombstones: config.tombstones, cloudevents_prefix: "ce_" };
        Ok(Self {
            encoder: Encoder::new(config.format, carrier),
            debezium,
            topic,
            event_time: config.event_time,
            max_bytes: config.max_message_bytes,
        })
    }

    /// The format.
    pub(crate) fn format(&self) -> Format {
        self.encoder.format()
    }

    /// The topic, if it is the same for all events.
    pub(crate) fn only_topic(&self) -> Option<&str> {
        self.topic.as_ref()?.constant()
    }

    /// Where an event goes; a name that Kafka refuses is the event's own fault.
    pub(crate) fn topic<'a>(&'a self, event: &'a Event) -> Result<Cow<'a, str>> {
        let topic = match (&self.topic, &self.debezium) {
            (Some(route), _) => route.render(event)?,
            (None, Some(debezium)) => debezium.topic(event)?,
            (None, None) => event.stream.as_str().into(),
        };
        check_topic(&topic)?;
        Ok(topic)
    }

    /// The lane of an event; none where it has one of its own, as what has no key goes anywhere.
    pub(crate) fn lane<'a>(&'a self, event: &'a Event) -> Option<Lane<'a>> {
        let topic = self.topic(event).ok()?;
        let debeziums = match &self.debezium {
            Some(debezium) => {
                let (key, partition) = debezium.lane(event).ok()?;
                Some((key.or_else(|| partition.map(|_| Bytes::new()))?, partition))
            }
            None => None,
        };
        Some(Lane { topic, debeziums })
    }

    /// The partition that the event itself asks for.
    pub(crate) fn partition(&self, event: &Event) -> Option<i32> {
        self.debezium.as_ref()?.lane(event).ok()?.1
    }

    /// The message for an event, if it is not larger than any that may be sent.
    pub(crate) fn message<'a>(&self, event: &'a Event) -> Result<Outgoing<'a>> {
        let (outgoing, size) = match &self.debezium {
            Some(debezium) => {
                let record = debezium.encode(event)?;
                let mut size = record.value.as_ref().map_or(0, Bytes::len);
                let mut headers = OwnedHeaders::new_with_capacity(record.headers.len());
                for (name, value) in &record.headers {
                    size += name.len() + value.as_ref().map_or(0, Bytes::len) + 8;
                    headers = headers.insert(Header { key: name, value: value.as_deref() });
                }
                // Zero means "now" to librdkafka.
                let timestamp =
                    record.timestamp.map(|millis| millis.max(1)).or_else(|| self.timestamp(event));
                let key = record.key.map(|key| Cow::Owned(key.into()));
                let (body, partition) = (record.value, record.partition);
                (Outgoing { key, body, headers, partition, timestamp }, size)
            }
            None => {
                let message = self.encoder.encode(event);
                let size = message.size();
                let headers = headers(&message);
                let key = Some(Cow::Borrowed(event.aggregate_id.as_bytes()));
                let timestamp = self.timestamp(event);
                (Outgoing { key, body: message.body, headers, partition: None, timestamp }, size)
            }
        };
        let size = size + outgoing.key.as_ref().map_or(0, |key| key.len()) + OVERHEAD;
        if size > self.max_bytes {
            return Err(Error::permanent(
                "too_large",
                format!(
                    "the message has about {size} bytes, and `max_message_bytes` is {}: store the payload elsewhere and publish a reference, or raise the limit here and at the broker",
                    self.max_bytes
                ),
            ));
        }
        Ok(outgoing)
    }

    /// Kafka's time of an event, in milliseconds; none is the time of sending.
    fn timestamp(&self, event: &Event) -> Option<i64> {
        let millis = event.occurred_at.unix_timestamp_nanos() / 1_000_000;
        // Zero means "now" to librdkafka.
        self.event_time.then(|| i64::try_from(millis).unwrap_or_default().max(1))
    }

    /// What would be sent.
    pub(crate) fn preview(&self, event: &Event) -> Result<Preview> {
        let topic = self.topic(event)?;
        // Refuses what is too large, too.
        self.message(event)?;
        let Some(debezium) = &self.debezium else {
            let message = self.encoder.encode(event);
            return Ok(Preview::new(format!("topic {topic}"), Some(&event.aggregate_id), message));
        };
        let record = debezium.encode(event)?;
        let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
        let destination = match record.partition {
            Some(partition) => format!("topic {topic}, partition {partition}"),
            None => format!("topic {topic}"),
        };
        Ok(Preview {
            destination,
            key: record.key.as_ref().map(text),
            headers: record
                .headers
                .into_iter()
                .map(|(name, value)| (name, value.as_ref().map_or_else(|| "(null)".to_owned(), text)))
                .collect(),
            body: record.value,
        })
    }
}

/// Settings that nobody would read.
fn refuse_debezium(config: &KafkaConfig) -> Result<Option<DebeziumEncoder>> {
    let is_set = config.debezium != DebeziumOptions::default() || config.converters != Converters::default();
    let what = "must be `debezium` for `debezium.…` options and for converters to mean anything";
    if is_set { Err(bad("format", what)) } else { Ok(None) }
}

/// Headers as librdkafka takes them.
fn headers(message: &Message<'_>) -> OwnedHeaders {
    let mut headers = OwnedHeaders::new_with_capacity(message.headers.len() + 1);
    for (name, value) in &message.headers {
        headers = headers.insert(Header { key: name, value: Some(value.as_bytes()) });
    }
    if let Some(content_type) = message.content_type {
        headers = headers.insert(Header { key: "content-type", value: Some(content_type.as_bytes()) });
    }
    headers
}

const ALLOWED: &str = "a topic has letters, digits, `.`, `_` and `-`";

fn is_allowed(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

/// What Kafka itself would refuse, said with the name.
pub(crate) fn check_topic(topic: &str) -> Result<()> {
    let what = match topic.chars().find(|c| !is_allowed(*c)) {
        Some(wrong) => format!("holds {wrong:?}: {ALLOWED}"),
        None if topic.len() > MAX_TOPIC => {
            format!("has {} characters, and Kafka allows {MAX_TOPIC}", topic.len())
        }
        None if topic.is_empty() || topic == "." || topic == ".." => "is no name to Kafka".to_owned(),
        None => return Ok(()),
    };
    let shown: String = topic.chars().take(80).collect();
    Err(Error::permanent("bad_topic", format!("the topic `{}` {what}", shown.escape_debug())))
}

#[cfg(test)]
mod tests {
    use airtight_core::{Class, Payload, sinks::memory::sample_event};

    use super::*;

    fn encode(url: &str) -> Result<Encode> {
        Encode::new(&KafkaConfig::from_url(url)?)
    }

    #[test]
    fn names_that_kafka_refuses_are_refused_early() {
        for url in ["kafka://h:1/a b", "kafka://h:1/..", "kafka://h:1/x.{stream}/y", "kafka://h:1/grün"] {
            assert_eq!(encode(url).unwrap_err().code(), "bad_topic", "{url}");
        }
        let encode = encode("kafka://h:1/ev.{aggregate_id}").unwrap();
        for key in ["a b", "a/b", "naïve", &"k".repeat(300)] {
            let event = sample_event(1, key);
            let error = encode.topic(&event).unwrap_err();
            assert_eq!((error.code(), error.class()), ("bad_topic", Class::Permanent), "{key}");
        }
        assert_eq!(encode.topic(&sample_event(1, "a-1_b.c")).unwrap(), "ev.a-1_b.c");
    }

    #[test]
    fn a_message_over_the_limit_is_refused_with_both_sizes() {
        let encode = encode("kafka://h:1?max_message_bytes=1000&format=raw").unwrap();
        let mut event = sample_event(1, "k");
        event.payload = Payload::Bytes(vec![0; 1_000].into());
        let error = encode.message(&event).unwrap_err();
        assert_eq!((error.code(), error.class()), ("too_large", Class::Permanent));
        assert!(error.message().contains("`max_message_bytes` is 1000"), "{error}");
    }
}
