//! What a message looks like: four formats, one of them in two modes, for every broker, and a place for others.
//!
//! A broker's crate says what its messages can carry ([`Carrier`]), an [`Encoder`] makes the [`Message`], and
//! [`decode`] reads it back, for the consumer's side. Payloads are passed through byte for byte, and nothing in
//! here can fail: an event that made it into an outbox can be written in every format.
//!
//! | format | body | headers |
//! | --- | --- | --- |
//! | `raw` | the payload as stored | all the rest |
//! | `envelope` | the JSON envelope with everything | `id`, `eventType`, trace context |
//! | `event` | `eventId`, `eventType`, `timestamp`, `aggregateId`, `payload` | all the rest |
//! | `cloudevents` | a CloudEvents 1.0 JSON document | none but its content type |
//! | `cloudevents-binary` | the payload | CloudEvents attributes |
//! | any other | what its [`Formatter`] writes | as well |
//!
//! A format of somebody else's is a [`Formatter`] in a [`Format::Custom`]. A config may name it where it is among the
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

/// A format from outside this crate: a sink writes it, and a source reads it, as one of the formats here.
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
    /// The word in configs. Two formats of one name are the same format.
    fn name(&self) -> &'static str;

    /// The message for an event; also for a delete, whether or not the carrier has tombstones. It cannot fail.
    fn encode<'a>(&self, event: &'a Event, carrier: Carrier) -> Message<'a>;

    /// Reads a message that was written in this format. As [`Format::Raw`], unless the format says otherwise: the body is
    /// the payload, and headers are the rest. A permanent error says what the message is not.
    fn decode(&self, incoming: &Incoming<'_>) -> Result<Event> {
        decode(Format::Raw, incoming)
    }
}

impl Format {
    /// Those of this crate, in the order of the documentation.
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

    /// Reads the word of a format of this crate; see [`Formats::parse`] for others.
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

    /// All of them, those that were added last.
    pub fn all(self) -> impl Iterator<Item = Format> {
        Format::ALL.into_iter().chain(self.added.iter().copied())
    }

    /// Reads a format's word. Any other word is a permanent error that names the word and all formats.
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

/// What a broker's messages can carry by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carrier {
    /// Messages have a key, so that the aggregate id needs no header.
    pub has_key: bool,
    /// A message without a value means that its key is gone, so that a delete is written as one.
    pub has_tombstones: bool,
    /// What comes before the name of a CloudEvents attribute in a header: `ce_` where names are words, `ce-` in HTTP.
    pub cloudevents_prefix: &'static str,
}

/// An event as a broker carries it. The key is the event's aggregate id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message<'a> {
    /// The value; none is a tombstone, or whatever no value means in a [`Formatter`]'s format.
    pub body: Option<Bytes>,
    /// Names and values. A name occurs once.
    pub headers: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    /// What the body is; none where the format says nothing of it.
    pub content_type: Option<&'static str>,
}

impl Message<'_> {
    /// What it weighs, near enough for limits.
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

    /// A structured CloudEvent is its body, and another's format has its own idea of a delete.
    fn writes_tombstones(&self) -> bool {
        self.carrier.has_tombstones && !matches!(self.format, Format::CloudEvents | Format::Custom(_))
    }

    /// Nothing but the key and headers; what a delete says of itself goes into one of them.
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

/// The payload as it is, and what it is.
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
    // Fails for years beyond 9999 only, and then nobody could read it either.
    event.occurred_at.format(&Rfc3339).unwrap_or_default()
}
