//! From a delivery to a Kafka message: topic, key, headers, value.

use std::borrow::Cow;

use airtight_core::{
    Delivery, Error, Event, Preview, Result,
    format::{Carrier, Encoder, Format, Message},
    route::Route,
};
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
    topic: Route,
    event_time: bool,
    max_bytes: usize,
}

impl Encode {
    /// Checks what can be checked of the topic before an event comes.
    pub(crate) fn new(config: &KafkaConfig) -> Result<Self> {
        let literals: Vec<&str> = match &config.topic {
            Route::Template(template) => template.literals().collect(),
            Route::Regex(_) => Vec::new(),
        };
        let wrong = literals.iter().flat_map(|text| text.chars()).find(|c| !is_allowed(*c));
        if let Some(wrong) = wrong {
            let message = format!("the topic `{}` holds {wrong:?}: {ALLOWED}", config.topic);
            return Err(Error::permanent("bad_topic", message));
        }
        if let Some(topic) = config.topic.constant() {
            check_topic(topic)?;
        }
        let carrier = Carrier { has_key: true, has_tombstones: config.tombstones, cloudevents_prefix: "ce_" };
        Ok(Self {
            encoder: Encoder::new(config.format, carrier),
            topic: config.topic.clone(),
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
        self.topic.constant()
    }

    /// Where an event goes; a name that Kafka refuses is the event's own fault.
    pub(crate) fn topic<'a>(&'a self, event: &'a Event) -> Result<Cow<'a, str>> {
        let topic = self.topic.render(event)?;
        check_topic(&topic)?;
        Ok(topic)
    }

    /// The message for an event, if it is not larger than any that may be sent.
    pub(crate) fn message<'a>(&self, event: &'a Event) -> Result<Message<'a>> {
        let message = self.encoder.encode(event);
        let size = message.size() + event.aggregate_id.len() + OVERHEAD;
        if size > self.max_bytes {
            return Err(Error::permanent(
                "too_large",
                format!(
                    "the message has about {size} bytes, and `max_message_bytes` is {}: store the payload elsewhere and publish a reference, or raise the limit here and at the broker",
                    self.max_bytes
                ),
            ));
        }
        Ok(message)
    }

    /// Kafka's time of an event, in milliseconds; none is the time of sending.
    pub(crate) fn timestamp(&self, delivery: &Delivery) -> Option<i64> {
        let millis = delivery.event.occurred_at.unix_timestamp_nanos() / 1_000_000;
        // Zero means "now" to librdkafka.
        self.event_time.then(|| i64::try_from(millis).unwrap_or_default().max(1))
    }

    /// What would be sent.
    pub(crate) fn preview(&self, event: &Event) -> Result<Preview> {
        let topic = format!("topic {}", self.topic(event)?);
        Ok(Preview::new(topic, Some(&event.aggregate_id), self.message(event)?))
    }
}

/// Headers as librdkafka takes them.
pub(crate) fn headers(message: &Message<'_>) -> OwnedHeaders {
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
