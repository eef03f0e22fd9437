//! From an event to a message: exchange, routing key, properties, headers, body.
//!
//! An event cannot be sent for only two reasons: a name that AMQP cannot carry, and its size. Everything else that does not
//! fit AMQP's short strings, or clashes with the broker's own headers, is written differently, and none of it is left out.

use airtight_core::{
    Code, Error, Event, Preview, Result,
    format::{Carrier, Encoder, Message},
    route::Template,
};
use bytes::Bytes;
use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable, ShortString},
};

use crate::resolved::{Resolved, SHORT, short};

const CARRIER: Carrier =
    Carrier { has_key: false, has_tombstones: false, cloudevents_prefix: "cloudEvents:" };

/// AMQP's word for a message that is written to disk.
const PERSISTENT: u8 = 2;

/// Headers in which a broker expects further routing keys. With anything else in them it closes the channel.
const ROUTING_HEADERS: [&str; 2] = ["CC", "BCC"];

/// The header for those whose names AMQP cannot carry: a JSON object of names and values.
const LONG_NAMES: &str = "airtight-long-names";

/// A message, ready to be published.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) exchange: ShortString,
    pub(crate) routing_key: ShortString,
    pub(crate) properties: BasicProperties,
    pub(crate) body: Bytes,
    /// The size of the frame with the properties, the one frame of a message that cannot be divided.
    pub(crate) header_frame: usize,
}

impl Outgoing {
    /// Where it goes, in words.
    pub(crate) fn destination(&self) -> String {
        destination(self.exchange.as_str(), self.routing_key.as_str())
    }
}

/// Writes events as a config says.
pub(crate) struct Writer {
    encoder: Encoder,
    exchange: Option<Template>,
    routing_key: Option<Template>,
}

impl Writer {
    pub(crate) fn new(config: &Resolved) -> Self {
        Self {
            encoder: Encoder::new(config.format, CARRIER),
            exchange: config.exchange.clone(),
            routing_key: config.routing_key.clone(),
        }
    }

    /// The message for an event; a permanent error where it has none.
    pub(crate) fn write(&self, event: &Event) -> Result<Outgoing> {
        let (exchange, routing_key) = self.names(event)?;
        let message = self.message(event);
        let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
        // Frame, class, weight, body size, flags, delivery mode.
        let mut header_frame = 8 + 2 + 2 + 8 + 2 + 1;
        // These repeat what the message says elsewhere. Cut, they would say something else.
        if let Some(id) = short(&event.id) {
            header_frame += 1 + event.id.len();
            properties = properties.with_message_id(id);
        }
        if let Some(event_type) = short(&event.event_type).filter(|word| !word.as_str().is_empty()) {
            header_frame += 1 + event.event_type.len();
            properties = properties.with_type(event_type);
        }
        if let Some(content_type) = message.content_type.and_then(short) {
            header_frame += 1 + content_type.as_str().len();
            properties = properties.with_content_type(content_type);
        }
        // AMQP's times are whole seconds, and none is before 1970.
        if let Ok(seconds) = u64::try_from(event.occurred_at.unix_timestamp()) {
            header_frame += 8;
            properties = properties.with_timestamp(seconds);
        }
        let mut headers = FieldTable::default();
        header_frame += 4;
        for (name, value) in &message.headers {
            if let Some(name) = short(name) {
                header_frame += 1 + name.as_str().len() + 5 + value.len();
                headers.insert(name, AMQPValue::LongString(value.as_bytes().into()));
            }
        }
        let properties = properties.with_headers(headers);
        let body = message.body.unwrap_or_default();
        Ok(Outgoing { exchange, routing_key, properties, body, header_frame })
    }

    /// The message for a person to look at.
    pub(crate) fn preview(&self, event: &Event) -> Result<Preview> {
        let (exchange, routing_key) = self.names(event)?;
        Ok(Preview::new(destination(exchange.as_str(), routing_key.as_str()), None, self.message(event)))
    }

    /// Where an event goes: exchange and routing key.
    pub(crate) fn names(&self, event: &Event) -> Result<(ShortString, ShortString)> {
        Ok((
            name(self.exchange.as_ref(), event, "exchange")?,
            name(self.routing_key.as_ref(), event, "routing key")?,
        ))
    }

    /// In the format, with headers as AMQP and the broker can take them.
    fn message<'a>(&self, event: &'a Event) -> Message<'a> {
        let mut message = self.encoder.encode(event);
        for (name, _) in &mut message.headers {
            if ROUTING_HEADERS.contains(&name.as_ref()) {
                *name = format!("header.{name}").into();
            }
        }
        if message.headers.iter().any(|(name, _)| name.len() > SHORT) {
            let (kept, long): (Vec<_>, Vec<_>) =
                message.headers.into_iter().partition(|(name, _)| name.len() <= SHORT);
            let long: serde_json::Map<String, serde_json::Value> = long
                .into_iter()
                .map(|(name, value)| (name.into_owned(), value.into_owned().into()))
                .collect();
            message.headers = kept;
            message.headers.push((LONG_NAMES.into(), serde_json::Value::Object(long).to_string().into()));
        }
        message
    }
}

/// The name that a template gives for an event.
fn name(template: Option<&Template>, event: &Event, what: &str) -> Result<ShortString> {
    let Some(template) = template else { return Ok(ShortString::default()) };
    let rendered = template.render(event)?;
    short(&rendered).ok_or_else(|| {
        let (bytes, begin) = (rendered.len(), rendered.chars().take(40).collect::<String>());
        Error::permanent(
            Code::BAD_NAME,
            format!("the {what} `{begin}…` that `{template}` gives for this event has {bytes} bytes, and AMQP's names have at most {SHORT}"),
        )
    })
}

/// Where a message goes, in words.
pub(crate) fn destination(exchange: &str, routing_key: &str) -> String {
    match (exchange, routing_key) {
        ("", queue) => format!("queue {queue}"),
        (exchange, "") => format!("exchange {exchange}"),
        (exchange, key) => format!("exchange {exchange}, routing key {key}"),
    }
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;
    use airtight_testkit::deliveries::sample_event;

    use super::*;
    use crate::RabbitmqConfig;

    fn writer(query: &str) -> Writer {
        let config = RabbitmqConfig::from_url(&format!("amqp://host?{query}")).unwrap();
        Writer::new(&config.resolve().unwrap())
    }

    fn header<'a>(outgoing: &'a Outgoing, name: &str) -> Option<&'a str> {
        match outgoing.properties.headers().as_ref()?.inner().get(name)? {
            AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok(),
            _ => None,
        }
    }

    #[test]
    fn a_message_is_persistent_and_says_what_it_is() {
        let mut event = sample_event(7, "k");
        event.headers.insert("ünïcode".into(), "välue\n".into());
        let outgoing =
            writer("exchange=x&routing_key={aggregate_type}.{op}&format=raw").write(&event).unwrap();
        assert_eq!((outgoing.exchange.as_str(), outgoing.routing_key.as_str()), ("x", "Test.upsert"));
        assert_eq!(*outgoing.properties.delivery_mode(), Some(2));
        assert_eq!(outgoing.properties.message_id().as_ref().unwrap().as_str(), event.id);
        assert_eq!(outgoing.properties.kind().as_ref().unwrap().as_str(), "Tested");
        assert_eq!(outgoing.properties.content_type().as_ref().unwrap().as_str(), "application/json");
        assert_eq!(*outgoing.properties.timestamp(), Some(0));
        assert_eq!(header(&outgoing, "aggregateId"), Some("k"));
        assert_eq!(header(&outgoing, "ünïcode"), Some("välue\n"));
    }

    #[test]
    fn nothing_but_the_names_of_exchange_and_routing_key_can_be_too_long() {
        let long = "ü".repeat(200);
        let mut event = sample_event(1, &long);
        event.id = long.clone();
        event.event_type = long.clone();
        event.stream = long.clone();
        event.headers.insert(long.clone(), "v\"1".into());
        let outgoing = writer("routing_key=q&format=raw").write(&event).unwrap();
        assert!(outgoing.properties.message_id().is_none() && outgoing.properties.kind().is_none());
        assert_eq!(header(&outgoing, "id"), Some(long.as_str()));
        assert_eq!(header(&outgoing, LONG_NAMES), Some(format!("{{\"{long}\":\"v\\\"1\"}}").as_str()));
        for (query, what) in
            [("routing_key={stream}", "the routing key"), ("exchange={stream}", "the exchange")]
        {
            let error = writer(query).write(&event).unwrap_err();
            assert_eq!((error.class(), error.code()), (Class::Permanent, "bad_name"), "{error}");
            assert!(error.message().contains(what) && error.message().contains("400 bytes"), "{error}");
        }
    }

    #[test]
    fn headers_that_the_broker_would_route_by_are_renamed() {
        let mut event = sample_event(1, "k");
        event.headers.insert("CC".into(), "a".into());
        event.headers.insert("BCC".into(), "b".into());
        let outgoing = writer("format=raw").write(&event).unwrap();
        assert_eq!((header(&outgoing, "CC"), header(&outgoing, "BCC")), (None, None));
        assert_eq!((header(&outgoing, "header.CC"), header(&outgoing, "header.BCC")), (Some("a"), Some("b")));
    }

    #[test]
    fn a_preview_is_what_would_be_sent() {
        let event = sample_event(1, "k");
        let preview = writer("exchange=x&routing_key={stream}&format=raw").preview(&event).unwrap();
        assert_eq!(preview.destination, "exchange x, routing key test.stream");
        assert_eq!(writer("").preview(&event).unwrap().destination, "queue test.stream");
        assert!(preview.headers.iter().any(|(name, _)| name == "aggregateId"));
    }
}
