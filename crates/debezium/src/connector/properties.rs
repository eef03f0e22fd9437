//! Java's properties, and what Debezium Server calls things.

use std::collections::BTreeMap;

use airtight_core::{Result, settings::bad};

use super::{BINARY, JSON, STRING};

/// Reads a file of properties: comments, lines that go on, escapes. A key that comes again wins.
pub(super) fn parse(text: &str) -> Result<BTreeMap<String, String>> {
    let mut pairs = BTreeMap::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let mut line = line.trim_start().to_owned();
        if line.is_empty() || line.starts_with(['#', '!']) {
            continue;
        }
        while goes_on(&line) {
            line.pop();
            line.push_str(lines.next().unwrap_or_default().trim_start());
        }
        let (key, value) = split(&line);
        let key = unescape(key);
        let value = unescape(value).map_err(|what| bad(key.as_deref().unwrap_or_default(), what))?;
        pairs.insert(key.map_err(|what| bad("", what))?, value);
    }
    Ok(pairs)
}

/// Whether the line ends in a backslash that is not itself escaped.
fn goes_on(line: &str) -> bool {
    let backslashes = line.len() - line.trim_end_matches('\\').len();
    !backslashes.is_multiple_of(2)
}

/// At the first `=`, `:` or blank that is not escaped, with the blanks around it.
fn split(line: &str) -> (&str, &str) {
    let mut is_escaped = false;
    let end = line.char_indices().find(|(_, c)| {
        let ends = !is_escaped && matches!(c, '=' | ':' | ' ' | '\t');
        is_escaped = !is_escaped && *c == '\\';
        ends
    });
    let Some((at, _)) = end else { return (line, "") };
    let (key, rest) = line.split_at(at);
    let rest = rest.trim_start();
    let rest = rest.strip_prefix(['=', ':']).unwrap_or(rest);
    (key, rest.trim_start())
}

fn unescape(text: &str) -> std::result::Result<String, &'static str> {
    let mut units: Vec<u16> = Vec::with_capacity(text.len());
    let mut chars = text.chars();
    let mut buffer = [0; 2];
    while let Some(c) = chars.next() {
        let c = match c {
            '\\' => match chars.next() {
                Some('t') => '\t',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('f') => '\u{c}',
                Some('u') => {
                    let digits: String = chars.by_ref().take(4).collect();
                    let unit = u16::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 4);
                    units.push(unit.ok_or("has a `\\u` without four hex digits")?);
                    continue;
                }
                Some(other) => other,
                None => break,
            },
            other => other,
        };
        units.extend_from_slice(c.encode_utf16(&mut buffer));
    }
    String::from_utf16(&units).map_err(|_| "has half a character (`\\uD8…`)")
}

/// The keys of Debezium Server by the names that a connector has for them.
pub(super) fn of_server(server: BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
    let mut pairs = BTreeMap::new();
    let mut formats = BTreeMap::new();
    for (key, value) in server {
        let plain = if let Some(rest) = key.strip_prefix("debezium.source.") {
            rest.to_owned()
        } else if let Some(rest) = key.strip_prefix("debezium.sink.kafka.") {
            rest.to_owned()
        } else if let Some(rest) = key.strip_prefix("debezium.format.") {
            formats.insert(rest.to_owned(), value);
            continue;
        } else if key == "debezium.sink.type" {
            if value.trim() != "kafka" {
                return Err(bad(&key, format!("must be `kafka`, found `{}`", value.escape_debug())));
            }
            continue;
        } else if let Some(rest) = key.strip_prefix("debezium.") {
            rest.to_owned()
        } else {
            key
        };
        pairs.insert(plain, value);
    }
    if let Some(servers) = pairs.remove("producer.bootstrap.servers") {
        pairs.insert("bootstrap.servers".into(), servers);
    }
    let common = formats.remove("schemas.enable");
    for part in ["key", "value", "header"] {
        let key = format!("{part}.converter");
        let schemas = formats.remove(&format!("{part}.schemas.enable")).or_else(|| common.clone());
        let word = formats.remove(part).unwrap_or_else(|| "json".into());
        let class = match word.trim().to_ascii_lowercase().as_str() {
            "json" | "jsonbytearray" => JSON,
            "simplestring" => STRING,
            "binary" => BINARY,
            other => {
                let what =
                    format!("must be `json`, `simplestring` or `binary`, found `{}`", other.escape_debug());
                return Err(bad(&format!("debezium.format.{part}"), what));
            }
        };
        if class == JSON {
            pairs.insert(format!("{key}.schemas.enable"), schemas.unwrap_or_else(|| "true".into()));
        }
        pairs.insert(key, class.to_owned());
    }
    if let Some(other) = formats.keys().next() {
        return Err(bad(&format!("debezium.format.{other}"), "cannot be honoured"));
    }
    Ok(pairs)
}
