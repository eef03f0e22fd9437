//! The formats of messages: four formats for every broker, one of them in two modes, and an interface for others.
//!
//! A broker's crate says what its messages can carry ([`Carrier`]), an [`Encoder`] makes the [`Message`], and
//! [`decode`] reads it back, for consumers. Payloads are passed through byte for byte, and encoding
//! cannot fail: every event of an outbox can be written in every format.
//!
//! | format | body | headers |
//! | --- | --- | --- |
//! | `raw` | the payload as stored | everything else |
//! | `envelope` | the JSON envelope with everything | `id`, `eventType`, trace context |
//! | `event` | `eventId`, `eventType`, `timestamp`, `aggregateId`, `payload` | everything else |
//! | `cloudevents` | a CloudEvents 1.0 JSON document | only its content type |
//! | `cloudevents-binary` | the payload | CloudEvents attributes |
//! | any other | what its [`Formatter`] writes | what its [`Formatter`] writes |
//!
//! A format from another crate is a [`Formatter`] in a [`Format::Custom`]. A config may name it if it is among the
//! [`Formats`] that the config was given.

mod cloudevents;
mod decode;
mod headers;

use std::{borrow::Cow, fmt, hash};

use bytes::Bytes;
use time::format_description::well_known::Rfc3339;

pub use self::{
    decode::{Incoming, decode},
    headers::percent_encode,
};
use crate::{
    Code, Error, Event, Op, Payload, Result,
    envelope::{self, field},
};

const JSON: &str = "application/json";
const BYTES: &str = "application/octet-stream";

/// What a sink writes for an event; see the [module](self).
#[derive(Debug, Clone, Copy, Default)]
pub enum Format {
    /// The payload alone, and the rest in headers.
    Raw,
    /// The JSON envelope: metadata and payload.
    #[default]
    Envelope,
    /// A short JSON message: id, type, time, aggregate id and payload.
    Event,
    /// CloudEvents 1.0 in structured mode.
    CloudEvents,
    /// CloudEvents 1.0 in binary mode.
    CloudEventsBinary,
    /// A format from outside this crate.
    Custom(&'static dyn Formatter),
}

/// A format from outside this crate. A sink writes it and a source reads it in the same way as the formats of this crate.
///
/// ```
/// use airtight_core::{
///     Event, Format, Payload,
///     format::{Carrier, Formats, Formatter, Message},
/// };
///
/// #[derive(Debug)]
/// struct Id;
///
/// impl Formatter for Id {
///     fn name(&self) -> &'static str {
///         "id"
///     }
///
///     fn encode<'a>(&self, event: &'a Event, _: Carrier) -> Message<'a> {
///         let body = Some(event.id.clone().into());
///         Message { body, headers: Vec::new(), content_type: Some("text/plain") }
///     }
/// }
///
/// const FORMATS: Formats = Formats::with(&[Format::Custom(&Id)]);
/// assert_eq!(FORMATS.parse("id")?, Format::Custom(&Id));
/// assert_eq!(FORMATS.parse("raw")?, Format::Raw);
/// # Ok::<_, airtight_core::Error>(())
/// ```
pub trait Formatter: fmt::Debug + Send + Sync {
    /// The word in configs. Two formats with the same name are the same format.
    fn name(&self) -> &'static str;

    /// The message for an event, including a delete, whether or not the carrier has tombstones. This cannot fail.
    fn encode<'a>(&self, event: &'a Event, carrier: Carrier) -> Message<'a>;

    /// Reads a message that was written in this format. The default reads it as [`Format::Raw`]: the body is the payload,
    /// and the headers have everything else. A permanent error says why the message is not in this format.
    fn decode(&self, incoming: &Incoming<'_>) -> Result<Event> {
        decode(Format::Raw, incoming)
    }
}

impl Format {
    /// The formats of this crate, in the order of the documentation.
    pub const ALL: [Self; 5] =
        [Self::Raw, Self::Envelope, Self::Event, Self::CloudEvents, Self::CloudEventsBinary];

    /// The word in configs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Envelope => "envelope",
            Self::Event => "event",
            Self::CloudEvents => "cloudevents",
            Self::CloudEventsBinary => "cloudevents-binary",
            Self::Custom(formatter) => formatter.name(),
        }
    }

    /// The format of this crate that a word stands for; see [`Formats::parse`] for others.
    pub fn parse(word: &str) -> Result<Self> {
        Formats::default().parse(word)
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Custom(one), Self::Custom(other)) => one.name() == other.name(),
            (one, other) => std::mem::discriminant(one) == std::mem::discriminant(other),
        }
    }
}

impl Eq for Format {}

impl hash::Hash for Format {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

/// The formats that a config may name: those of this crate, and those that were added to them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Formats {
    added: &'static [Format],
}

impl Formats {
    /// The formats of this crate, and these.
    pub const fn with(added: &'static [Format]) -> Self {
        Self { added }
    }

    /// All formats; those that were added come last.
    pub fn all(self) -> impl Iterator<Item = Format> {
        Format::ALL.into_iter().chain(self.added.iter().copied())
    }

    /// The format that a word stands for. Any other word is a permanent error that names the word and all formats.
    pub fn parse(self, word: &str) -> Result<Format> {
        self.all().find(|format| format.as_str() == word).ok_or_else(|| {
            let known: Vec<String> = self.all().map(|format| format!("`{}`", format.as_str())).collect();
            Error::permanent(
                Code::BAD_FORMAT,
                format!("unknown format `{word}`; there are {}", known.join(", ")),
            )
        })
    }
}

/// What a broker's messages can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carrier {
    /// Messages have a key, so that the aggregate id needs no header.
    pub has_key: bool,
    /// A message without a value means that its key was deleted, so a delete is written as such a message.
    pub has_tombstones: bool,
    /// What comes before the name of a CloudEvents attribute in a header: `ce_` where names are words, `ce-` in HTTP.
    pub cloudevents_prefix: &'static str,
}

/// An event as a broker carries it. The key is the event's aggregate id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message<'a> {
    /// The value; none for a tombstone, or for what a [`Formatter`] writes without a value.
    pub body: Option<Bytes>,
    /// Names and values. A name occurs once.
    pub headers: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    /// The content type of the body; none if the format does not set one.
    pub content_type: Option<&'static str>,
}

impl Message<'_> {
    /// Roughly the size in bytes, for limits.
    pub fn size(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len() + 8).sum();
        self.body.as_ref().map_or(0, Bytes::len) + headers
    }
}

/// Writes events in one format for one broker.
#[derive(Debug, Clone, Copy)]
pub struct Encoder {
    format: Format,
    carrier: Carrier,
}

impl Encoder {
    /// Writes this format into messages of this kind.
    pub fn new(format: Format, carrier: Carrier) -> Self {
        Self { format, carrier }
    }

    /// The format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The message for an event.
    pub fn encode<'a>(&self, event: &'a Event) -> Message<'a> {
        if event.op == Op::Delete && self.writes_tombstones() {
            return self.tombstone(event);
        }
        match self.format {
            Format::Raw => {
                let (body, content_type) = payload(event);
                Message { body, headers: headers::all(event, self.carrier), content_type }
            }
            Format::Envelope => Message {
                body: Some(envelope::to_vec(event).into()),
                headers: headers::routing(event),
                content_type: Some(JSON),
            },
            Format::Event => Message {
                body: Some(short(event).into()),
                headers: headers::all(event, self.carrier),
                content_type: Some(JSON),
            },
            Format::CloudEvents => Message {
                body: Some(cloudevents::structured(event).into()),
                headers: Vec::new(),
                content_type: Some(cloudevents::CONTENT_TYPE),
            },
            Format::CloudEventsBinary => {
                let (body, content_type) = payload(event);
                let headers = cloudevents::attributes(event, self.carrier.cloudevents_prefix);
                Message { body, headers, content_type }
            }
            Format::Custom(formatter) => formatter.encode(event, self.carrier),
        }
    }

    /// A structured CloudEvent is all in its body, and a custom format has its own form of a delete.
    fn writes_tombstones(&self) -> bool {
        self.carrier.has_tombstones && !matches!(self.format, Format::CloudEvents | Format::Custom(_))
    }

    /// Only the key and headers; the payload of a delete goes into one of the headers.
    fn tombstone<'a>(&self, event: &'a Event) -> Message<'a> {
        let mut headers = match self.format {
            Format::CloudEventsBinary => cloudevents::attributes(event, self.carrier.cloudevents_prefix),
            _ => headers::all(event, self.carrier),
        };
        if !event.payload.is_empty() {
            let (name, text) = headers::payload(&event.payload);
            headers::put(&mut headers, name.into(), text);
        }
        Message { body: None, headers, content_type: None }
    }
}

/// The payload, and its content type.
fn payload(event: &Event) -> (Option<Bytes>, Option<&'static str>) {
    match &event.payload {
        // Empty, and not absent: that would be a tombstone.
        Payload::None => (Some(Bytes::new()), None),
        Payload::Json(text) => (Some(text.clone()), Some(JSON)),
        Payload::Bytes(bytes) => (Some(bytes.clone()), Some(BYTES)),
    }
}

/// The message of `event`.
fn short(event: &Event) -> Vec<u8> {
    let mut out = Vec::with_capacity(event.payload.len() + 256);
    out.extend_from_slice(b"{\"eventId\":");
    envelope::value(&mut out, &event.id);
    field(&mut out, "eventType", &event.event_type);
    field(&mut out, "timestamp", &timestamp(event));
    field(&mut out, "aggregateId", &event.aggregate_id);
    envelope::payload(&mut out, &event.payload);
    out.push(b'}');
    out
}

fn timestamp(event: &Event) -> String {
    // Fails only for years beyond 9999, which no reader could parse either.
    event.occurred_at.format(&Rfc3339).unwrap_or_default()
}
