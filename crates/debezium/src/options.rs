//! The options of Debezium's outbox event router, and Kafka Connect's converters, by their own names.

use std::fmt;

use airtight_core::{
    Error, Result,
    settings::{bad, boolean, one_of},
};

use crate::route::RegexRoute;

/// What the router is told, with Debezium's names and defaults.
///
/// The last three are options of the connector that show in messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebeziumOptions {
    /// `table.field.event.id`: the column of the header `id` (`id`).
    pub event_id: String,
    /// `table.field.event.key`: the column of the message's key (`aggregateid`).
    pub event_key: String,
    /// `table.field.event.type`: the column of the type, which is written only where it is placed (`type`).
    pub event_type: String,
    /// `table.field.event.payload`: the column of the payload (`payload`).
    pub event_payload: String,
    /// `table.field.event.timestamp`: the column of the message's time; none is the time of processing.
    pub event_timestamp: Option<String>,
    /// `table.field.event.schema.version`: the column of the version of an envelope's schema.
    pub event_schema_version: Option<String>,
    /// `table.fields.additional.placement`: columns that go along.
    pub additional: Vec<Additional>,
    /// `table.fields.additional.error.on.missing`: whether such a column must be there (true).
    pub error_on_missing: bool,
    /// `table.expand.json.payload`: a text payload that holds JSON becomes a structure (false).
    pub expand_json: bool,
    /// `table.json.payload.null.behavior=optional_bytes`: null fields of such a structure are kept (`ignore`).
    pub keep_nulls: bool,
    /// `table.op.invalid.behavior`: what an update of the table means. For whoever reads it; the encoder sees inserts
    /// only.
    pub invalid_operation: InvalidOperation,
    /// `route.by.field`: the column that a topic is made of (`aggregatetype`).
    pub route_by: String,
    /// `route.topic.regex`.
    pub route_regex: String,
    /// `route.topic.replacement`.
    pub route_replacement: String,
    /// `route.tombstone.on.empty.payload`: a null or blank payload is a message without a value (false).
    pub tombstone_on_empty: bool,
    /// `topic.prefix`, which is in context headers and in the names of schemas.
    pub topic_prefix: Option<String>,
    /// `table.include.list`: the one table, with its schema, which is in the names of schemas.
    pub table: Option<String>,
    /// `extended.headers.enabled`: writes `__debezium.context.…` headers, as Debezium 3.4 does. Off here unless asked
    /// for, and on there.
    pub extended_headers: bool,
}

impl Default for DebeziumOptions {
    fn default() -> Self {
        Self {
            event_id: "id".into(),
            event_key: "aggregateid".into(),
            event_type: "type".into(),
            event_payload: "payload".into(),
            event_timestamp: None,
            event_schema_version: None,
            additional: Vec::new(),
            error_on_missing: true,
            expand_json: false,
            keep_nulls: false,
            invalid_operation: InvalidOperation::Warn,
            route_by: "aggregatetype".into(),
            route_regex: RegexRoute::REGEX.into(),
            route_replacement: RegexRoute::REPLACEMENT.into(),
            tombstone_on_empty: false,
            topic_prefix: None,
            table: None,
            extended_headers: false,
        }
    }
}

/// A column that goes along.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Additional {
    /// Its name in the table.
    pub column: String,
    /// Where it goes.
    pub placement: Placement,
    /// Its name there.
    pub alias: String,
}

/// Where a column goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// A header.
    Header,
    /// A field beside the payload; the value is a structure then.
    Envelope,
    /// The partition, by its number.
    Partition,
}

impl Placement {
    const WORDS: [(&'static str, Self); 3] =
        [("header", Self::Header), ("envelope", Self::Envelope), ("partition", Self::Partition)];
}

/// What an update of the outbox table means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidOperation {
    /// It is dropped, with a warning.
    Warn,
    /// It is dropped, with an error in the log.
    Error,
    /// It ends the relay.
    Fatal,
}

impl InvalidOperation {
    const WORDS: [(&'static str, Self); 3] =
        [("warn", Self::Warn), ("error", Self::Error), ("fatal", Self::Fatal)];
}

impl DebeziumOptions {
    /// The names that [`DebeziumOptions::set`] knows.
    pub const NAMES: &'static [&'static str] = &[
        "table.field.event.id",
        "table.field.event.key",
        "table.field.event.type",
        "table.field.event.payload",
        "table.field.event.timestamp",
        "table.field.event.schema.version",
        "table.fields.additional.placement",
        "table.fields.additional.error.on.missing",
        "table.expand.json.payload",
        "table.json.payload.null.behavior",
        "table.op.invalid.behavior",
        "route.by.field",
        "route.topic.regex",
        "route.topic.replacement",
        "route.tombstone.on.empty.payload",
        "topic.prefix",
        "table.include.list",
        "extended.headers.enabled",
    ];

    /// Sets one option; an unknown one is a permanent error that names the nearest.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let column = || match value.trim() {
            "" => Err(bad(name, "must name a column")),
            column => Ok(column.to_owned()),
        };
        match name {
            "table.field.event.id" => self.event_id = column()?,
            "table.field.event.key" => self.event_key = column()?,
            "table.field.event.type" => self.event_type = column()?,
            "table.field.event.payload" => self.event_payload = column()?,
            "table.field.event.timestamp" => self.event_timestamp = Some(column()?),
            "table.field.event.schema.version" => self.event_schema_version = Some(column()?),
            "table.fields.additional.placement" => self.additional = placements(name, value)?,
            "table.fields.additional.error.on.missing" => self.error_on_missing = boolean(name, value)?,
            "table.expand.json.payload" => self.expand_json = boolean(name, value)?,
            "table.json.payload.null.behavior" => {
                self.keep_nulls = one_of(name, value, &[("ignore", false), ("optional_bytes", true)])?;
            }
            "table.op.invalid.behavior" => {
                self.invalid_operation = one_of(name, value, &InvalidOperation::WORDS)?;
            }
            "route.by.field" => self.route_by = column()?,
            "route.topic.regex" => value.clone_into(&mut self.route_regex),
            "route.topic.replacement" => value.clone_into(&mut self.route_replacement),
            "route.tombstone.on.empty.payload" => self.tombstone_on_empty = boolean(name, value)?,
            "topic.prefix" => self.topic_prefix = Some(value.trim().to_owned()),
            "table.include.list" => self.table = Some(one_table(name, value)?),
            "extended.headers.enabled" => self.extended_headers = boolean(name, value)?,
            other => return Err(unknown(other)),
        }
        Ok(())
    }

    /// What differs from the defaults, as [`DebeziumOptions::set`] reads it.
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let all = |options: &Self| -> Vec<(&'static str, Option<String>)> {
            let null_behavior = if options.keep_nulls { "optional_bytes" } else { "ignore" };
            let operation = InvalidOperation::WORDS.iter().find(|(_, of)| *of == options.invalid_operation);
            vec![
                ("table.field.event.id", Some(options.event_id.clone())),
                ("table.field.event.key", Some(options.event_key.clone())),
                ("table.field.event.type", Some(options.event_type.clone())),
                ("table.field.event.payload", Some(options.event_payload.clone())),
                ("table.field.event.timestamp", options.event_timestamp.clone()),
                ("table.field.event.schema.version", options.event_schema_version.clone()),
                ("table.fields.additional.placement", written(&options.additional)),
                ("table.fields.additional.error.on.missing", Some(options.error_on_missing.to_string())),
                ("table.expand.json.payload", Some(options.expand_json.to_string())),
                ("table.json.payload.null.behavior", Some(null_behavior.into())),
                ("table.op.invalid.behavior", operation.map(|(word, _)| (*word).to_owned())),
                ("route.by.field", Some(options.route_by.clone())),
                ("route.topic.regex", Some(options.route_regex.clone())),
                ("route.topic.replacement", Some(options.route_replacement.clone())),
                ("route.tombstone.on.empty.payload", Some(options.tombstone_on_empty.to_string())),
                ("topic.prefix", options.topic_prefix.clone()),
                ("table.include.list", options.table.clone()),
                ("extended.headers.enabled", Some(options.extended_headers.to_string())),
            ]
        };
        let changed = all(self).into_iter().zip(all(&Self::default())).filter(|(mine, usual)| mine != usual);
        changed.filter_map(|((name, value), _)| Some((name, value?))).collect()
    }

    /// Whether the value is a structure, with the payload as one of its fields.
    pub(super) fn has_envelope(&self) -> bool {
        self.additional.iter().any(|additional| additional.placement == Placement::Envelope)
    }
}

fn placements(name: &str, value: &str) -> Result<Vec<Additional>> {
    let one = |text: &str| {
        let parts: Vec<&str> = text.split(':').map(str::trim).collect();
        let (column, placement, alias) = match parts[..] {
            [column, placement] => (column, placement, column),
            [column, placement, alias] => (column, placement, alias),
            _ => {
                let what = format!(
                    "must be a list like `type:header:eventType,tenant:envelope`, found `{}`",
                    text.escape_debug()
                );
                return Err(bad(name, what));
            }
        };
        let placement = one_of(name, &placement.to_ascii_lowercase(), &Placement::WORDS)?;
        Ok(Additional { column: column.to_owned(), placement, alias: alias.to_owned() })
    };
    value.split(',').filter(|text| !text.trim().is_empty()).map(one).collect()
}

fn written(additional: &[Additional]) -> Option<String> {
    let one = |of: &Additional| {
        let placement = Placement::WORDS
            .iter()
            .find(|(_, placement)| *placement == of.placement)
            .map_or("", |(word, _)| word);
        match of.alias == of.column {
            true => format!("{}:{placement}", of.column),
            false => format!("{}:{placement}:{}", of.column, of.alias),
        }
    };
    (!additional.is_empty()).then(|| additional.iter().map(one).collect::<Vec<_>>().join(","))
}

/// Debezium has a list of regexes here; for an outbox it is one table, in which a dot may be escaped.
pub(super) fn one_table(name: &str, value: &str) -> Result<String> {
    let table = value.trim().replace("\\.", ".");
    let is_plain = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '$' | '-' | ' '))
    };
    let mut parts = table.split('.');
    let (schema, rest, more) = (parts.next(), parts.next(), parts.next());
    if schema.is_some_and(is_plain) && rest.is_some_and(is_plain) && more.is_none() {
        return Ok(table);
    }
    let what =
        format!("must be one table with its schema, like `public.outbox`, found `{}`", value.escape_debug());
    Err(bad(name, what))
}

fn unknown(name: &str) -> Error {
    let nearest = DebeziumOptions::NAMES.iter().min_by_key(|known| distance(known, name));
    let nearest = nearest.map_or(String::new(), |known| format!("; did you mean `{known}`?"));
    bad(name, format!("is not an option of Debezium's outbox event router{nearest}"))
}

/// How many letters must be inserted, removed or changed to make one of the other.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().take(200).collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, candidate) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != *candidate);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

/// One of Kafka Connect's converters: how a key, a value or a header becomes bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Converter {
    /// `SimpleHeaderConverter`, Connect's default for headers: text as it is, everything else like JSON.
    Simple,
    /// `StringConverter`: text as it is, everything else as Java's `toString` writes it.
    String,
    /// `JsonConverter`.
    Json {
        /// `schemas.enable`: `{"schema":…,"payload":…}` around each value.
        schemas: bool,
    },
    /// `ByteArrayConverter`: bytes as they are, and nothing else.
    ByteArray,
    /// Debezium's `BinaryDataConverter`: bytes as they are, everything else by its delegate.
    Binary(Option<Delegate>),
}

/// `delegate.converter.type` of a [`Converter::Binary`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Delegate {
    /// See [`Converter::String`].
    String,
    /// See [`Converter::Json`].
    Json {
        /// `schemas.enable`.
        schemas: bool,
    },
}

impl Converter {
    const WORDS: [(&'static str, Self); 9] = [
        ("simple", Self::Simple),
        ("string", Self::String),
        ("json", Self::Json { schemas: false }),
        ("json-schemas", Self::Json { schemas: true }),
        ("bytes", Self::ByteArray),
        ("binary", Self::Binary(None)),
        ("binary+string", Self::Binary(Some(Delegate::String))),
        ("binary+json", Self::Binary(Some(Delegate::Json { schemas: false }))),
        ("binary+json-schemas", Self::Binary(Some(Delegate::Json { schemas: true }))),
    ];

    /// Reads the word of a config; `key` is what is being set.
    pub fn parse(key: &str, word: &str) -> Result<Self> {
        one_of(key, word, &Self::WORDS)
    }

    /// The word in configs.
    pub fn as_str(self) -> &'static str {
        Self::WORDS.iter().find(|(_, of)| *of == self).map_or("", |(word, _)| word)
    }

    pub(super) fn has_schemas(self) -> bool {
        matches!(self, Self::Json { schemas: true } | Self::Binary(Some(Delegate::Json { schemas: true })))
    }
}

impl fmt::Display for Converter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The three converters of a connector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Converters {
    /// `key.converter`.
    pub key: Converter,
    /// `value.converter`.
    pub value: Converter,
    /// `header.converter`.
    pub header: Converter,
}

impl Default for Converters {
    /// Text as it is, as nearly everybody has it for an outbox. Connect itself has no default for keys and values.
    fn default() -> Self {
        Self { key: Converter::String, value: Converter::String, header: Converter::Simple }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_back_as_they_were_set() {
        let pairs = [
            ("table.field.event.key", "k"),
            ("table.fields.additional.placement", "type:header:eventType,a:envelope,p:partition"),
            ("table.fields.additional.error.on.missing", "false"),
            ("table.json.payload.null.behavior", "optional_bytes"),
            ("table.op.invalid.behavior", "fatal"),
            ("topic.prefix", "shop"),
            ("table.include.list", "public.outbox"),
        ];
        let mut options = DebeziumOptions::default();
        for (name, value) in pairs {
            options.set(name, value).unwrap();
        }
        assert_eq!(options.pairs(), pairs.map(|(name, value)| (name, value.to_owned())));
        assert!(DebeziumOptions::default().pairs().is_empty());
        let mut defaults = DebeziumOptions::default();
        for name in DebeziumOptions::NAMES {
            // All of them are known, whatever they think of the value.
            let error = defaults.set(name, "\u{1}").err();
            assert!(error.is_none_or(|error| !error.message().contains("is not an option")), "{name}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let mut options = DebeziumOptions::default();
        for (name, value, expected) in [
            ("table.field.payload", "x", "did you mean `table.field.event.payload`?"),
            ("route.topic.regexp", "x", "did you mean `route.topic.regex`?"),
            ("table.field.schema.version", "x", "did you mean `table.field.event.schema.version`?"),
            ("table.fields.additional.placement", "type", "must be a list like"),
            ("table.fields.additional.placement", "type:body", "must be `header`"),
            ("table.expand.json.payload", "yes", "must be `true`"),
            ("table.include.list", "public.outbox.*", "one table"),
            ("table.include.list", "outbox", "one table"),
            ("table.field.event.id", " ", "must name a column"),
        ] {
            let error = options.set(name, value).unwrap_err();
            assert!(error.message().contains(expected), "{name}: {error}");
        }
        for (word, of) in Converter::WORDS {
            assert_eq!(Converter::parse("key_converter", word).unwrap(), of);
            assert_eq!(of.as_str(), word);
        }
        assert!(Converter::parse("key_converter", "avro").is_err());
    }
}
