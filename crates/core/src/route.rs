//! Where an event goes: topics, subjects, exchanges and keys made from its fields.
//!
//! A [`Template`] is text with fields in braces, `ivm.events.{aggregate_type}`. It is checked when it is parsed, before
//! there is any event. If an event lacks a field (a header, an extra column, a value that is not empty), that is a
//! permanent error that names the field.

use std::{borrow::Cow, fmt};

use crate::{Code, Error, Event, Result};

/// The longest pattern and template, and the longest text that one may render to: no broker's topic is longer.
const MAX_TEMPLATE: usize = 4_096;

/// One field of an event, as a template names it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Field {
    Id,
    Stream,
    EventType,
    AggregateType,
    AggregateId,
    Op,
    SchemaVersion,
    Header(String),
    Extra(String),
}

/// The names that stand for themselves.
const NAMED: [(&str, Field); 7] = [
    ("id", Field::Id),
    ("stream", Field::Stream),
    ("event_type", Field::EventType),
    ("aggregate_type", Field::AggregateType),
    ("aggregate_id", Field::AggregateId),
    ("op", Field::Op),
    ("schema_version", Field::SchemaVersion),
];

impl Field {
    fn parse(name: &str) -> Option<Self> {
        let of_a_map = |prefix| name.strip_prefix(prefix).filter(|rest: &&str| !rest.is_empty());
        if let Some(header) = of_a_map("header.") {
            return Some(Self::Header(header.to_owned()));
        }
        if let Some(extra) = of_a_map("extra.") {
            return Some(Self::Extra(extra.to_owned()));
        }
        NAMED.into_iter().find(|(known, _)| *known == name).map(|(_, field)| field)
    }

    /// Its value; none if the event has none, or an empty one.
    fn of<'a>(&self, event: &'a Event) -> Option<Cow<'a, str>> {
        let value = match self {
            Self::Id => event.id.as_str().into(),
            Self::Stream => event.stream.as_str().into(),
            Self::EventType => event.event_type.as_str().into(),
            Self::AggregateType => event.aggregate_type.as_str().into(),
            Self::AggregateId => event.aggregate_id.as_str().into(),
            Self::Op => event.op.as_str().into(),
            Self::SchemaVersion => event.schema_version.to_string().into(),
            Self::Header(name) => event.headers.get(name)?.as_str().into(),
            Self::Extra(name) => match event.extra.get(name)? {
                serde_json::Value::String(text) => text.as_str().into(),
                serde_json::Value::Null => return None,
                other => Cow::Owned(other.to_string()),
            },
        };
        Some(value).filter(|value| !value.is_empty())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    /// The field and the name that it was written with.
    Field(Field, String),
}

/// Text with fields of an event in braces.
///
/// The fields are `id`, `stream`, `event_type`, `aggregate_type`, `aggregate_id`, `op`, `schema_version`,
/// `header.NAME` and `extra.NAME`; `{{` and `}}` are braces.
///
/// ```
/// use airtight_core::route::Template;
/// let topic = Template::parse("ivm.events.{aggregate_type}")?;
/// # use airtight_core::{Format, format::{Incoming, decode}};
/// # let headers: Vec<(&str, &[u8])> = vec![("aggregateType", b"Order")];
/// # let event = decode(Format::Raw, &Incoming { headers, ..Incoming::default() })?;
/// assert_eq!(topic.render(&event)?, "ivm.events.Order");
/// assert!(Template::parse("{agregate_type}").unwrap_err().message().contains("aggregate_type"));
/// # Ok::<_, airtight_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

impl Template {
    /// Parses a template; a permanent error says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self> {
        let bad =
            |what: String| Err(Error::permanent(Code::BAD_TEMPLATE, format!("the template `{text}` {what}")));
        if text.is_empty() || text.len() > MAX_TEMPLATE {
            return bad(format!("must have 1 to {MAX_TEMPLATE} bytes"));
        }
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let found = &rest[at..];
            if let Some(after) = found.strip_prefix("{{") {
                literal.push('{');
                rest = after;
            } else if let Some(after) = found.strip_prefix("}}") {
                literal.push('}');
                rest = after;
            } else if found.starts_with('}') {
                return bad("has a `}` without a `{`; write `}}` for a brace".into());
            } else {
                let Some((name, after)) = found[1..].split_once('}') else {
                    return bad("has a `{` without a `}`; write `{{` for a brace".into());
                };
                let Some(field) = Field::parse(name) else {
                    return bad(format!("has the unknown field `{{{name}}}`; {}", nearest(name)));
                };
                if !literal.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut literal)));
                }
                parts.push(Part::Field(field, name.to_owned()));
                rest = after;
            }
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Text(literal));
        }
        Ok(Self { text: text.to_owned(), parts })
    }

    /// `{stream}`.
    pub fn stream() -> Self {
        let name = "stream".to_owned();
        Self { text: "{stream}".to_owned(), parts: vec![Part::Field(Field::Stream, name)] }
    }

    /// The text for one event. A field that the event lacks is a permanent error.
    pub fn render<'a>(&'a self, event: &'a Event) -> Result<Cow<'a, str>> {
        if let [only] = self.parts.as_slice() {
            return match only {
                Part::Text(text) => Ok(text.as_str().into()),
                Part::Field(field, name) => field.of(event).ok_or_else(|| self.missing(name)),
            };
        }
        self.render_with(event, |value, out| out.push_str(value)).map(Cow::Owned)
    }

    /// The text for one event, with each value written by `write`, which may encode it.
    pub fn render_with(&self, event: &Event, write: impl Fn(&str, &mut String)) -> Result<String> {
        let mut out = String::with_capacity(self.text.len() + 32);
        for part in &self.parts {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Field(field, name) => {
                    write(&field.of(event).ok_or_else(|| self.missing(name))?, &mut out);
                }
            }
        }
        Ok(out)
    }

    /// The text with the same word in place of every field: to check whether the result could be valid.
    pub fn sample(&self, word: &str) -> String {
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Field(..) => word.to_owned(),
        };
        self.parts.iter().map(part).collect()
    }

    /// The fields in it, by name, as an event has them.
    pub fn values<'a>(&'a self, event: &'a Event) -> impl Iterator<Item = (&'a str, Cow<'a, str>)> {
        self.parts.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Field(field, name) => Some((name.as_str(), field.of(event)?)),
        })
    }

    /// The text, if it is the same for all events.
    pub fn constant(&self) -> Option<&str> {
        match self.parts.as_slice() {
            [Part::Text(text)] => Some(text),
            _ => None,
        }
    }

    /// The literal parts, so that a sink can check whether its broker accepts the characters.
    pub fn literals(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            Part::Field(..) => None,
        })
    }

    fn missing(&self, name: &str) -> Error {
        Error::permanent(
            Code::MISSING_FIELD,
            format!("the event has no `{name}` (or an empty one), which the template `{self}` needs"),
        )
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

/// The field that was probably meant, or all fields.
fn nearest(name: &str) -> String {
    let plain = |text: &str| -> String {
        text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
    };
    let shared = |known: &str| known.chars().zip(name.chars()).take_while(|(a, b)| a == b).count();
    let close = NAMED.iter().map(|(known, _)| *known).find(|known| {
        let (known, name) = (plain(known), plain(name));
        known == name || known.starts_with(&name) || one_edit(&known, &name)
    });
    match close.or_else(|| NAMED.iter().map(|(known, _)| *known).find(|known| shared(known) >= 4)) {
        Some(known) => format!("did you mean `{{{known}}}`?"),
        None => {
            let names: Vec<String> = NAMED.iter().map(|(name, _)| format!("`{{{name}}}`")).collect();
            format!("there are {}, `{{header.NAME}}` and `{{extra.NAME}}`", names.join(", "))
        }
    }
}

/// Whether one text becomes the other when one letter is inserted, removed or changed.
fn one_edit(one: &str, other: &str) -> bool {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let same = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let tail = |from: usize, of: &[char]| of[from.min(of.len())..].to_vec();
    tail(same + 1, &one) == tail(same + 1, &other)
        || tail(same + 1, &one) == tail(same, &other)
        || tail(same, &one) == tail(same + 1, &other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::sample_event;

    fn event() -> Event {
        let mut event = sample_event(7, "acc-1");
        event.aggregate_type = "raw_data".into();
        event.headers.insert("tenant".into(), "t1".into());
        event.extra.insert("market".into(), "KRW-BTC".into());
        event.extra.insert("shard".into(), 3.into());
        event.extra.insert("none".into(), serde_json::Value::Null);
        event
    }

    #[test]
    fn templates_render_what_an_event_has() {
        for (text, expected) in [
            ("ivm.events.{aggregate_type}", "ivm.events.raw_data"),
            ("{stream}", "test.stream"),
            ("plain", "plain"),
            ("{header.tenant}-{extra.market}-{extra.shard}-{op}-{schema_version}", "t1-KRW-BTC-3-upsert-1"),
            ("{{{event_type}}}", "{Tested}"),
            ("{aggregate_id}/{id}", "acc-1/00000000-0000-7000-8000-000000000007"),
        ] {
            assert_eq!(Template::parse(text).unwrap().render(&event()).unwrap(), expected, "{text}");
        }
        assert_eq!(Template::parse("a{{b").unwrap().constant(), Some("a{b"));
        assert_eq!(Template::parse("a.{op}").unwrap().constant(), None);
    }

    #[test]
    fn a_wrong_template_is_refused_with_what_was_meant() {
        for (text, expected) in [
            ("", "must have 1 to"),
            ("a{", "`{` without a `}`"),
            ("a}", "`}` without a `{`"),
            ("{}", "unknown field `{}`"),
            ("{aggregateType}", "did you mean `{aggregate_type}`?"),
            ("{agregate_id}", "did you mean `{aggregate_id}`?"),
            ("{type}", "there are `{id}`"),
            ("{event}", "did you mean `{event_type}`?"),
            ("{header.}", "unknown field"),
        ] {
            let error = Template::parse(text).unwrap_err();
            assert!(error.message().contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_missing_field_is_the_events_fault_and_named() {
        for text in ["{header.nope}", "x-{extra.nope}", "{extra.none}", "{aggregate_type}"] {
            let mut event = event();
            event.aggregate_type.clear();
            let template = Template::parse(text).unwrap();
            let error = template.render(&event).unwrap_err();
            assert_eq!((error.class(), error.code()), (crate::Class::Permanent, "missing_field"));
            assert!(error.message().contains(text), "{error}");
        }
    }
}
