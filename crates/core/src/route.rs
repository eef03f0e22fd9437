//! Where an event goes: topics, subjects, exchanges and keys made from its fields.
//!
//! A [`Template`] is text with fields in braces, `ivm.events.{aggregate_type}`. A [`Route`] is a template, or the
//! regex and replacement of Debezium's outbox event router. Both are checked when they are read, before any event
//! comes; what only an event can lack (a header, an extra column, a value that is empty) is a permanent error
//! that names it.

use std::{borrow::Cow, fmt};

use regex::{Captures, Regex};

use crate::{Code, Error, Event, Result};

/// The longest pattern and template, and the most that one may render to: nobody's topic is longer.
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

    /// Its value; none where the event has none, or an empty one.
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
/// # let event = airtight_core::sinks::memory::sample_event(1, "k");
/// assert_eq!(topic.render(&event)?, "ivm.events.Test");
/// assert!(Template::parse("{agregate_type}").unwrap_err().message().contains("aggregate_type"));
/// # Ok::<_, airtight_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

impl Template {
    /// Reads one; a permanent error says what is wrong with it.
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

    /// The text for one event. A field that it does not have is a permanent error.
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

    /// The text with the same word in place of every field: to see whether something can be made of it.
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

    /// What is text in it, for a broker to check which characters it takes.
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

/// The field that was probably meant, or all there are.
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

/// Whether one letter inserted, removed or changed makes one of the other.
fn one_edit(one: &str, other: &str) -> bool {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let same = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let tail = |from: usize, of: &[char]| of[from.min(of.len())..].to_vec();
    tail(same + 1, &one) == tail(same + 1, &other)
        || tail(same + 1, &one) == tail(same, &other)
        || tail(same, &one) == tail(same + 1, &other)
}

/// Which topic an event goes to.
#[derive(Debug, Clone)]
pub enum Route {
    /// By its fields.
    Template(Template),
    /// As Debezium's outbox event router does.
    Regex(Box<RegexRoute>),
}

impl Route {
    /// A [`Template`].
    pub fn template(text: &str) -> Result<Self> {
        Template::parse(text).map(Self::Template)
    }

    /// By the stream alone: what every sink does unless told otherwise.
    pub fn stream() -> Self {
        Self::Template(Template::stream())
    }

    /// The topic of one event.
    pub fn render<'a>(&'a self, event: &'a Event) -> Result<Cow<'a, str>> {
        match self {
            Self::Template(template) => template.render(event),
            Self::Regex(route) => route.render(event),
        }
    }

    /// The topic, if it is the same for all events.
    pub fn constant(&self) -> Option<&str> {
        match self {
            Self::Template(template) => template.constant(),
            Self::Regex(_) => None,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Template(template) => template.fmt(f),
            Self::Regex(route) => write!(f, "{} → {}", route.whole.as_str(), route.replacement),
        }
    }
}

/// `route.by.field`, `route.topic.regex` and `route.topic.replacement` of Debezium's outbox event router.
///
/// A value that the regex matches as a whole becomes the replacement, in which `${name}` and `$1` are groups; any
/// other is the topic as it is. The regex is Rust's, which knows Java's `(?<name>…)` and has no look-around.
///
/// ```
/// use airtight_core::route::RegexRoute;
/// let route = RegexRoute::new("{aggregate_type}", RegexRoute::REGEX, RegexRoute::REPLACEMENT)?;
/// # let event = airtight_core::sinks::memory::sample_event(1, "k");
/// assert_eq!(route.render(&event)?, "outbox.event.Test");
/// # Ok::<_, airtight_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RegexRoute {
    by: Template,
    whole: Regex,
    first: Regex,
    replacement: String,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone)]
enum Piece {
    Text(String),
    Group(usize),
}

impl RegexRoute {
    /// Debezium's default regex.
    pub const REGEX: &str = "(?<routedByValue>.*)";
    /// Debezium's default replacement.
    pub const REPLACEMENT: &str = "outbox.event.${routedByValue}";

    /// Reads the three; a permanent error says which is wrong.
    pub fn new(by: &str, regex: &str, replacement: &str) -> Result<Self> {
        let compile = |pattern: &str| {
            Regex::new(pattern).map_err(|error| {
                let why = error.to_string().lines().last().unwrap_or_default().to_owned();
                Error::permanent(Code::BAD_REGEX, format!("the topic regex `{regex}` cannot be used: {why}"))
            })
        };
        let first = compile(regex)?;
        let whole = compile(&format!(r"\A(?:{regex})\z"))?;
        let pieces = pieces(replacement, &first).map_err(|what| {
            Error::permanent(Code::BAD_REPLACEMENT, format!("the topic replacement `{replacement}` {what}"))
        })?;
        Ok(Self { by: Template::parse(by)?, whole, first, replacement: replacement.to_owned(), pieces })
    }

    /// The topic of one event.
    pub fn render<'a>(&'a self, event: &'a Event) -> Result<Cow<'a, str>> {
        let value = self.by.render(event)?;
        Ok(self.replace(&value).map_or(value, Cow::Owned))
    }

    /// What the value of `route.by.field` becomes; none where it is the topic as it is.
    pub(crate) fn replace(&self, value: &str) -> Option<String> {
        if !self.whole.is_match(value) {
            return None;
        }
        // Java's `replaceFirst` searches anew, so a regex that also matches less replaces less.
        let found = self.first.captures(value)?;
        let matched = found.get_match();
        let mut topic = value[..matched.start()].to_owned();
        self.expand(&found, &mut topic);
        topic.push_str(&value[matched.end()..]);
        Some(topic)
    }

    fn expand(&self, found: &Captures<'_>, out: &mut String) {
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => out.push_str(text),
                Piece::Group(at) => out.push_str(found.get(*at).map_or("", |group| group.as_str())),
            }
        }
    }
}

/// Java's replacement syntax: `${name}`, `$1`, and a backslash before what is meant literally.
fn pieces(replacement: &str, regex: &Regex) -> std::result::Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut text = String::new();
    let mut chars = replacement.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => text.push(chars.next().ok_or("ends in a backslash")?.1),
            '$' => {
                let group = if chars.next_if(|(_, c)| *c == '{').is_some() {
                    let name = replacement[at + 2..].split_once('}').ok_or("has a `${` without a `}`")?.0;
                    while chars.next_if(|(_, c)| *c != '}').is_some() {}
                    chars.next();
                    regex.capture_names().position(|known| known == Some(name)).ok_or_else(|| {
                        format!(
                            "names the group `{name}`, which the regex `{}` does not have",
                            regex.as_str()
                        )
                    })?
                } else {
                    number(&mut chars, regex.captures_len())?
                };
                if !text.is_empty() {
                    pieces.push(Piece::Text(std::mem::take(&mut text)));
                }
                pieces.push(Piece::Group(group));
            }
            other => text.push(other),
        }
    }
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
    Ok(pieces)
}

/// As many digits as still name a group.
fn number(
    chars: &mut std::iter::Peekable<std::str::CharIndices<'_>>,
    groups: usize,
) -> std::result::Result<usize, String> {
    let digit = |c: char| c.to_digit(10).map(|digit| digit as usize);
    let (_, first) = chars
        .next_if(|(_, c)| c.is_ascii_digit())
        .ok_or("has a `$` that is neither `${name}` nor `$1`; write `\\$` for a dollar")?;
    let mut group = digit(first).unwrap_or_default();
    if group >= groups {
        return Err(format!("names the group {group}, and the regex has {}", groups - 1));
    }
    while let Some((_, c)) =
        chars.next_if(|(_, c)| digit(*c).is_some_and(|digit| group * 10 + digit < groups))
    {
        group = group * 10 + digit(c).unwrap_or_default();
    }
    Ok(group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sinks::memory::sample_event;

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

    #[test]
    fn regex_routes_are_debeziums() {
        let route = |regex: &str, replacement: &str| {
            let route = RegexRoute::new("{aggregate_type}", regex, replacement).unwrap();
            route.render(&event()).unwrap().into_owned()
        };
        assert_eq!(route(RegexRoute::REGEX, RegexRoute::REPLACEMENT), "outbox.event.raw_data");
        assert_eq!(route(RegexRoute::REGEX, "ivm.events.${routedByValue}"), "ivm.events.raw_data");
        assert_eq!(route("(.*)_(.*)", "$2.$1x\\$"), "data.rawx$");
        // `$10` is the group 1 and a zero where there are fewer than ten groups.
        assert_eq!(route("(.*)_.*", "$10"), "raw0");
        assert_eq!(route("raw", "x"), "raw_data", "a part is no match");
        // `replaceFirst` finds the empty beginning of `.*?`.
        assert_eq!(route("(.*?)", "x"), "xraw_data");
    }

    #[test]
    fn a_wrong_regex_route_is_refused() {
        for (regex, replacement, expected) in [
            ("(", "x", "cannot be used"),
            ("(?=a).*", "x", "look-around"),
            ("(.*)", "$2", "the regex has 1"),
            ("(.*)", "${nope}", "`nope`"),
            ("(.*)", "a$", "neither"),
            ("(.*)", "${x", "without a `}`"),
        ] {
            let error = RegexRoute::new("{stream}", regex, replacement).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        }
    }
}
