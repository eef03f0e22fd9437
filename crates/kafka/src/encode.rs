//! From an event to a Kafka message: topic, key, headers, value.

use std::{borrow::Cow, ops::Deref};

use airtight_core::{
    Code, Error, Event, Format, Preview, Result,
    format::{Carrier, Encoder, Message},
    settings::bad,
};
use airtight_debezium::{Converters, DebeziumEncoder, DebeziumOptions, FORMAT};
use bytes::Bytes;
use rdkafka::message::{Header, OwnedHeaders};

use crate::{config::KafkaConfig, route::Route};

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

/// What decides where an event goes.
#[derive(Debug)]
pub(crate) struct Address<'a> {
    /// What decides on the topic, and often is its name; see [`Encode::topic_of`].
    pub(crate) by: Cow<'a, str>,
    pub(crate) key: Option<Key<'a>>,
    /// The partition that the event itself asks for.
    pub(crate) partition: Option<i32>,
}

/// The key of a message, not copied from where it is.
#[derive(Debug)]
pub(crate) enum Key<'a> {
    Own(&'a str),
    Written(Bytes),
}

impl Deref for Key<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(text) => text.as_bytes(),
            Self::Written(bytes) => bytes,
        }
    }
}

/// What a message holds.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) body: Option<Bytes>,
    pub(crate) headers: OwnedHeaders,
    /// In milliseconds; none is the time of sending.
    pub(crate) timestamp: Option<i64>,
}

impl Encode {
    /// Checks what can be checked of the topic before an event comes.
    pub(crate) fn new(config: &KafkaConfig) -> Result<Self> {
        let debezium = if config.format == FORMAT {
            Some(DebeziumEncoder::new(config.debezium.clone(), config.converters)?)
        } else {
            refuse_debezium(config)?
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
            return Err(Error::permanent(Code::BAD_NAME, message));
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

    /// Whether events are written better with the row that they came from.
    pub(crate) fn wants_rows(&self) -> bool {
        self.debezium.is_some()
    }

    /// The topic, if it is the same for all events.
    pub(crate) fn only_topic(&self) -> Option<&str> {
        self.topic.as_ref()?.constant()
    }

    /// Where an event goes.
    pub(crate) fn address<'a>(&'a self, event: &'a Event) -> Result<Address<'a>> {
        let (by, key, partition) = match &self.debezium {
            Some(debezium) => {
                let address = debezium.address(event)?;
                (address.by, address.key.map(Key::Written), address.partition)
            }
            None => (event.stream.as_str().into(), Some(Key::Own(&event.aggregate_id)), None),
        };
        let by = match &self.topic {
            Some(route) => route.render(event)?,
            None => by,
        };
        Ok(Address { by, key, partition })
    }

    /// The topic behind an [`Address::by`]; a name that Kafka refuses is the fault of the events that have it.
    pub(crate) fn topic_of<'a>(&self, by: &'a str) -> Result<Cow<'a, str>> {
        let topic = match (&self.topic, &self.debezium) {
            (None, Some(debezium)) => debezium.topic_of(by),
            _ => by.into(),
        };
        check_topic(&topic)?;
        Ok(topic)
    }

    /// What the message for an event holds, if it is not larger than any that may be sent.
    pub(crate) fn content(&self, event: &Event, address: &Address<'_>) -> Result<Content> {
        let (content, size) = match &self.debezium {
            Some(debezium) => {
                let made = match &self.topic {
                    // A topic of the config's own: the router's value is still in the name of an envelope's schema.
                    Some(_) => debezium.content(event, &debezium.address(event)?.by)?,
                    None => debezium.content(event, &address.by)?,
                };
                let mut size = made.value.as_ref().map_or(0, Bytes::len);
                let mut headers = OwnedHeaders::new_with_capacity(made.headers.len());
                for (name, value) in &made.headers {
                    size += name.len() + value.as_ref().map_or(0, Bytes::len) + 8;
                    headers = headers.insert(Header { key: name, value: value.as_deref() });
                }
                // Zero means "now" to librdkafka.
                let timestamp = made.timestamp.map(|millis| millis.max(1)).or_else(|| self.timestamp(event));
                (Content { body: made.value, headers, timestamp }, size)
            }
            None => {
                let message = self.encoder.encode(event);
                let (size, headers) = (message.size(), headers(&message));
                (Content { body: message.body, headers, timestamp: self.timestamp(event) }, size)
            }
        };
        let size = size + address.key.as_ref().map_or(0, |key| key.len()) + OVERHEAD;
        if size > self.max_bytes {
            return Err(Error::permanent(
                Code::TOO_LARGE,
                format!(
                    "the message has about {size} bytes, and `max_message_bytes` is {}",
                    self.max_bytes
                ),
            )
            .with_remedy(
                "store the payload elsewhere and publish a reference, or raise the limit here and at the broker",
            ));
        }
        Ok(content)
    }

    /// Kafka's time of an event, in milliseconds; none is the time of sending.
    fn timestamp(&self, event: &Event) -> Option<i64> {
        let millis = event.occurred_at.unix_timestamp_nanos() / 1_000_000;
        // Zero means "now" to librdkafka.
        self.event_time.then(|| i64::try_from(millis).unwrap_or_default().max(1))
    }

    /// What would be sent.
    pub(crate) fn preview(&self, event: &Event) -> Result<Preview> {
        let address = self.address(event)?;
        let topic = self.topic_of(&address.by)?;
        // Refuses what is too large, too.
        self.content(event, &address)?;
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
                .map(|(name, value)| {
                    (name.to_string(), value.as_ref().map_or_else(|| "(null)".to_owned(), text))
                })
                .collect(),
            body: record.value,
        })
    }
}

/// Refuses settings that have no effect.
fn refuse_debezium(config: &KafkaConfig) -> Result<Option<DebeziumEncoder>> {
    let is_set = config.debezium != DebeziumOptions::default() || config.converters != Converters::default();
    let what = "must be `debezium`, because `debezium.…` options or converters are set";
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
        None if topic.is_empty() || topic == "." || topic == ".." => {
            "is not a name that Kafka accepts".to_owned()
        }
        None => return Ok(()),
    };
    let shown: String = topic.chars().take(80).collect();
    Err(Error::permanent(Code::BAD_NAME, format!("the topic `{}` {what}", shown.escape_debug())))
}

#[cfg(test)]
mod tests {
    use airtight_core::{Class, Payload};
    use airtight_testkit::deliveries::sample_event;

    use super::*;

    fn encode(url: &str) -> Result<Encode> {
        Encode::new(&KafkaConfig::from_url(url)?)
    }

    fn topic(encode: &Encode, event: &Event) -> Result<String> {
        encode.topic_of(&encode.address(event)?.by).map(Cow::into_owned)
    }

    #[test]
    fn names_that_kafka_refuses_are_refused_early() {
        for url in ["kafka://h:1/a b", "kafka://h:1/..", "kafka://h:1/x.{stream}/y", "kafka://h:1/grün"] {
            assert_eq!(encode(url).unwrap_err().code(), "bad_name", "{url}");
        }
        let encode = encode("kafka://h:1/ev.{aggregate_id}").unwrap();
        for key in ["a b", "a/b", "naïve", &"k".repeat(300)] {
            let event = sample_event(1, key);
            let error = topic(&encode, &event).unwrap_err();
            assert_eq!((error.code(), error.class()), ("bad_name", Class::Permanent), "{key}");
        }
        assert_eq!(topic(&encode, &sample_event(1, "a-1_b.c")).unwrap(), "ev.a-1_b.c");
    }

    #[test]
    fn a_message_over_the_limit_is_refused_with_both_sizes() {
        let encode = encode("kafka://h:1?max_message_bytes=1000&format=raw").unwrap();
        let mut event = sample_event(1, "k");
        event.payload = Payload::Bytes(vec![0; 1_000].into());
        let error = encode.content(&event, &encode.address(&event).unwrap()).unwrap_err();
        assert_eq!((error.code(), error.class()), ("too_large", Class::Permanent));
        assert!(error.message().contains("`max_message_bytes` is 1000"), "{error}");
    }
}
