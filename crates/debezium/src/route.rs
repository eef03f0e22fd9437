//! From the value of `route.by.field` to a topic, as the router does it.

use std::{borrow::Cow, fmt};

use airtight_core::{Code, Error, Event, Result, route::Template};
use regex::{Captures, Regex};

/// `route.by.field`, `route.topic.regex` and `route.topic.replacement` of Debezium's outbox event router.
///
/// A value that the regex matches as a whole becomes the replacement, in which `${name}` and `$1` are groups; any
/// other is the topic as it is. The regex is Rust's, which knows Java's `(?<name>…)` and has no look-around.
///
/// ```
/// use airtight_debezium::RegexRoute;
/// let route = RegexRoute::new("{aggregate_type}", RegexRoute::REGEX, RegexRoute::REPLACEMENT)?;
/// # let event = airtight_testkit::deliveries::sample_event(1, "k");
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

impl fmt::Display for RegexRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} → {}", self.whole.as_str(), self.replacement)
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

    fn event() -> Event {
        let mut event = airtight_testkit::deliveries::sample_event(7, "acc-1");
        event.aggregate_type = "raw_data".into();
        event
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
