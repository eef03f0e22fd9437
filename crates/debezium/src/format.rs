//! The format `debezium` for sinks that have only a body and headers.

use airtight_core::{
    Event, Format, Payload,
    format::{Carrier, Formatter, Message},
};

/// What the router writes with Kafka Connect's `StringConverter`, as far as a body and headers go: the payload, and the
/// id in a header. The Kafka sink writes all the rest as well, with a [`DebeziumEncoder`](crate::DebeziumEncoder).
pub const FORMAT: Format = Format::Custom(&Debezium);

#[derive(Debug)]
struct Debezium;

impl Formatter for Debezium {
    fn name(&self) -> &'static str {
        "debezium"
    }

    /// Debezium knows no `op`: a delete is an event like others, and no payload is no value.
    fn encode<'a>(&self, event: &'a Event, _: Carrier) -> Message<'a> {
        let body = match &event.payload {
            Payload::None => None,
            Payload::Json(body) | Payload::Bytes(body) => Some(body.clone()).filter(|body| !body.is_empty()),
        };
        Message { body, headers: vec![("id".into(), event.id.as_str().into())], content_type: None }
    }
}
