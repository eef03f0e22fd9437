//! From an event to a message: subject, headers, body.

use std::borrow::Cow;

use airtight_core::{
    Code, Error, Event, Preview, Result,
    format::{Carrier, Encoder, percent_encode},
};
use async_nats::HeaderMap;
use bytes::Bytes;

use crate::{resolved::Resolved, subject};

/// A message has no key, so the aggregate id is a header; and an empty body means nothing in particular.
const CARRIER: Carrier = Carrier { has_key: false, has_tombstones: false, cloudevents_prefix: "ce-" };

/// By this a stream tells a repeat.
const MESSAGE_ID: &str = "Nats-Msg-Id";
/// With this a stream of another name refuses.
const EXPECTED_STREAM: &str = "Nats-Expected-Stream";

/// JetStream refuses more.
const MAX_HEADERS: usize = 65_535;

/// A message on its way.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) subject: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Bytes,
}

impl Outgoing {
    /// The message for an event, which this replay may have asked for. A permanent error says why there can be none.
    pub(crate) fn new(event: &Event, replay: Option<i64>, config: &Resolved) -> Result<Self> {
        let subject = config.subject.render(event)?.into_owned();
        subject::check(&subject)?;
        let message = Encoder::new(config.format, CARRIER).encode(event);
        let mut headers = Vec::with_capacity(message.headers.len() + 3);
        headers
            .push((MESSAGE_ID.to_owned(), percent_encode(&message_id(event, replay, &subject)).into_owned()));
        if let Some(stream) = &config.stream {
            headers.push((EXPECTED_STREAM.to_owned(), percent_encode(stream).into_owned()));
        }
        for (name, value) in &message.headers {
            headers.push((header_name(name).into_owned(), percent_encode(value).into_owned()));
        }
        if let Some(content_type) = message.content_type {
            headers.push(("content-type".to_owned(), content_type.to_owned()));
        }
        let outgoing = Self { subject, headers, body: message.body.unwrap_or_default() };
        let size = outgoing.header_size();
        if size > MAX_HEADERS {
            let what = format!("the event's headers have {size} bytes, and a stream takes {MAX_HEADERS}");
            return Err(Error::permanent(Code::TOO_LARGE, what));
        }
        Ok(outgoing)
    }

    /// What counts towards a limit: headers as they are written, and the body.
    pub(crate) fn size(&self) -> usize {
        self.header_size() + self.body.len()
    }

    fn header_size(&self) -> usize {
        let lines: usize = self.headers.iter().map(|(name, value)| name.len() + value.len() + 4).sum();
        "NATS/1.0\r\n\r\n".len() + lines
    }

    pub(crate) fn header_map(&self) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in &self.headers {
            map.insert(name.as_str(), value.as_str());
        }
        map
    }

    pub(crate) fn into_preview(self) -> Preview {
        Preview {
            destination: format!("subject {}", self.subject),
            key: None,
            headers: self.headers,
            body: Some(self.body),
        }
    }
}

/// What a repeat of this message has too, and no other message of the same stream: one that is taken for a repeat is
/// acknowledged and dropped.
///
/// The subject is part of it, because two pipelines may send the same event to two subjects of one stream. An id that is
/// not a UUID is unique in its own table at best, and several tables, or databases that count alike, may feed one
/// stream; so such ids are joined by all else that an event is known by, down to the microsecond of its time.
///
/// What a replay asked for is meant to be there again, whether or not the stream still remembers the first time. Its
/// number is part of the id from the first try on: with the plain id first, and the other only after *duplicate*, a crash
/// would double what the stream had forgotten before the replay and not after it.
fn message_id(event: &Event, replay: Option<i64>, subject: &str) -> String {
    let Event { stream, aggregate_type, aggregate_id, seq, id, occurred_at, .. } = event;
    let again = replay.map(|replay| format!("/replay/{replay}")).unwrap_or_default();
    if uuid::Uuid::try_parse(id).is_ok() {
        return format!("{id}/{subject}{again}");
    }
    let micros = occurred_at.unix_timestamp_nanos() / 1_000;
    format!("{id}/{subject}/{stream}/{aggregate_type}/{aggregate_id}/{seq}/{micros}{again}")
}

/// A header's name as NATS can carry it.
///
/// Names that mean something to the server (`Nats-Rollup` deletes messages) or to client libraries (`Status`) come
/// behind `header.`, as the names that airtight itself uses do; so does the empty one. What cannot stand in a name
/// is percent-encoded, and so is `%`. Two names never become one, because core has given `header.` to those that
/// begin with it already.
fn header_name(name: &str) -> Cow<'_, str> {
    let begins_with_nats = name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-"));
    let reserved = ["", "status", "description"].iter().any(|word| name.eq_ignore_ascii_case(word));
    let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b':' && byte != b'%';
    if !begins_with_nats && !reserved && name.bytes().all(is_plain) {
        return name.into();
    }
    let mut out = String::with_capacity(name.len() + 16);
    if begins_with_nats || reserved {
        out.push_str("header.");
    }
    for byte in name.bytes() {
        if is_plain(byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use airtight_core::{Class, Format, Payload};
    use airtight_testkit::deliveries::sample_event;

    use super::*;
    use crate::NatsConfig;

    fn outgoing(event: &Event, change: impl FnOnce(&mut NatsConfig)) -> Result<Outgoing> {
        let mut config = NatsConfig::new("host");
        config.format = Format::Raw;
        change(&mut config);
        Outgoing::new(event, None, &config.resolve().unwrap())
    }

    fn header<'a>(outgoing: &'a Outgoing, name: &str) -> Option<&'a str> {
        outgoing.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn no_header_is_lost_doubled_or_obeyed() {
        let mut event = sample_event(1, "k");
        let odd = [
            ("plain", "plain"),
            ("a b", "a%20b"),
            ("a:b", "a%3Ab"),
            ("a\r\nb", "a%0D%0Ab"),
            ("ключ", "%D0%BA%D0%BB%D1%8E%D1%87"),
            ("50%", "50%25"),
            ("a%20b", "a%2520b"),
            ("", "header."),
            ("header.", "header.header."),
            ("id", "header.id"),
            ("Nats-Rollup", "header.Nats-Rollup"),
            ("nats-msg-id", "header.nats-msg-id"),
            ("header.Nats-Rollup", "header.header.Nats-Rollup"),
            ("Status", "header.Status"),
            ("nats", "nats"),
        ];
        for (name, _) in odd {
            event.headers.insert(name.into(), format!("value of {name}"));
        }
        let outgoing = outgoing(&event, |_| {}).unwrap();
        let map = outgoing.header_map();
        assert_eq!(map.len(), outgoing.headers.len(), "a name occurs twice: {:?}", outgoing.headers);
        for (name, carried) in odd {
            let expected = percent_encode(&format!("value of {name}")).into_owned();
            assert_eq!(header(&outgoing, carried), Some(expected.as_str()), "{name}");
        }
        let id = format!("{}/{}", event.id, outgoing.subject);
        assert_eq!(header(&outgoing, "Nats-Msg-Id"), Some(id.as_str()));
        assert_eq!(header(&outgoing, "aggregateId"), Some("k"));
        assert_eq!(header(&outgoing, "content-type"), Some("application/json"));
        assert_eq!(header(&outgoing, "Nats-Expected-Stream"), None);
    }

    #[test]
    fn two_tables_with_the_same_numbers_have_no_message_id_in_common() {
        let mut event = sample_event(7, "k");
        event.id = "1001".into();
        let subject = outgoing(&event, |_| {}).unwrap().subject;
        let micros = event.occurred_at.unix_timestamp_nanos() / 1_000;
        let here = outgoing(&event, |_| {}).unwrap();
        let id = format!("1001/{subject}/test.stream/Test/k/7/{micros}");
        assert_eq!(header(&here, "Nats-Msg-Id"), Some(id.as_str()));
        event.aggregate_id = "other\n".into();
        let there = outgoing(&event, |_| {}).unwrap();
        let id = format!("1001/{subject}/test.stream/Test/other%0A/7/{micros}");
        assert_eq!(header(&there, "Nats-Msg-Id"), Some(id.as_str()));
    }

    #[test]
    fn a_subject_that_cannot_be_is_the_events_fault() {
        let by_id = |config: &mut NatsConfig| config.subject = "orders.{aggregate_id}".into();
        assert_eq!(outgoing(&sample_event(1, "a.b"), by_id).unwrap().subject, "orders.a.b");
        for key in ["a b", ".", "x.*.>", "a\r\nPUB evil 0"] {
            let error = outgoing(&sample_event(1, key), by_id).unwrap_err();
            assert_eq!((error.code(), error.class()), ("bad_name", Class::Permanent), "{key}");
        }
        let error = outgoing(&sample_event(1, ""), by_id).unwrap_err();
        assert_eq!((error.code(), error.class()), ("missing_field", Class::Permanent));
        let mut event = sample_event(1, "k");
        event.stream = "$JS.API.STREAM.PURGE.ORDERS".into();
        assert_eq!(outgoing(&event, |_| {}).unwrap_err().code(), "bad_name");
    }

    #[test]
    fn sizes_are_those_on_the_wire() {
        let mut event = sample_event(1, "k");
        event.payload = Payload::Bytes(Bytes::from_static(b"12345"));
        let outgoing = outgoing(&event, |config| config.stream = Some("S".into())).unwrap();
        let lines: Vec<String> =
            outgoing.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        assert_eq!(outgoing.size(), format!("NATS/1.0\r\n{}\r\n12345", lines.concat()).len());
        assert_eq!(header(&outgoing, "Nats-Expected-Stream"), Some("S"));
        assert_eq!(header(&outgoing, "content-type"), Some("application/octet-stream"));
    }

    #[test]
    fn headers_have_a_limit() {
        let mut event = sample_event(1, "k");
        event.headers.insert("big".into(), "x".repeat(MAX_HEADERS));
        let error = outgoing(&event, |_| {}).unwrap_err();
        assert_eq!((error.code(), error.class()), ("too_large", Class::Permanent));
        // In the body they are none.
        assert!(outgoing(&event, |config| config.format = Format::Envelope).is_ok());
    }
}
