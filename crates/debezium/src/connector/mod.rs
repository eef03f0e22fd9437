//! The config file of a Debezium connector, for a move from Debezium to airtight or back.
//!
//! [`ConnectorConfig::parse`] reads three forms: the JSON that Kafka Connect's API takes (with `name` and `config`, or
//! flat), Java properties as for a standalone worker, and Debezium Server's `application.properties`. A key that would
//! change what is delivered, and that airtight does not support, is refused by its name. Harmless keys are listed as
//! ignored. [`ConnectorConfig::to_json`] writes a connector's file. Nothing here accesses a database or a file.

mod keys;
mod properties;

use std::collections::BTreeMap;

use airtight_core::{
    Code, Error, Result,
    settings::{bad, boolean},
};
use serde_json::{Map, Value, json};

use self::keys::Verdict;
use crate::{Converter, DebeziumOptions, Delegate, options::one_table};

const CLASS: &str = "io.debezium.connector.postgresql.PostgresConnector";
const ROUTER: &str = "io.debezium.transforms.outbox.EventRouter";
const STRING: &str = "org.apache.kafka.connect.storage.StringConverter";
const SIMPLE: &str = "org.apache.kafka.connect.storage.SimpleHeaderConverter";
const JSON: &str = "org.apache.kafka.connect.json.JsonConverter";
const BYTES: &str = "org.apache.kafka.connect.converters.ByteArrayConverter";
const BINARY: &str = "io.debezium.converters.BinaryDataConverter";

/// What a connector's file says, with Debezium's defaults for what it does not say.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectorConfig {
    /// The connector's name.
    pub name: Option<String>,
    /// `database.hostname`.
    pub host: String,
    /// `database.port` (5432).
    pub port: u16,
    /// `database.user`.
    pub user: String,
    /// `database.password`.
    pub password: Option<String>,
    /// `database.dbname`.
    pub dbname: String,
    /// `database.sslmode` (`prefer`).
    pub sslmode: String,
    /// `slot.name` (`debezium`).
    pub slot: String,
    /// `publication.name` (`dbz_publication`).
    pub publication: String,
    /// `plugin.name`, of which airtight reads `pgoutput` alone (`decoderbufs`, with which a slot cannot be taken over).
    pub plugin: String,
    /// The schema of the one table in `table.include.list`.
    pub schema: String,
    /// Its name.
    pub table: String,
    /// `snapshot.mode` (`initial`).
    pub snapshot_mode: String,
    /// The router's options; the context headers are on unless the file says otherwise, as in Debezium.
    pub router: DebeziumOptions,
    /// `key.converter`; none is that of the worker.
    pub key_converter: Option<Converter>,
    /// `value.converter`; none is that of the worker.
    pub value_converter: Option<Converter>,
    /// `header.converter`; none is that of the worker, whose default is [`Converter::Simple`].
    pub header_converter: Option<Converter>,
    /// Where Kafka is, if the file says so.
    pub bootstrap_servers: Option<String>,
    /// What is in the file and means nothing here.
    pub ignored: Vec<(String, String)>,
}

impl std::fmt::Debug for ConnectorConfig {
    /// Without the password, and without values that may be one.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectorConfig")
            .field("name", &self.name)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("dbname", &self.dbname)
            .field("table", &format_args!("{}.{}", self.schema, self.table))
            .field("slot", &self.slot)
            .field("router", &self.router)
            .finish_non_exhaustive()
    }
}

/// What a placeholder stands for: gets `env:NAME` of `${env:NAME}`, or `NAME` of `${NAME}`.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl ConnectorConfig {
    /// Reads a file. A permanent error names the key that is wrong or cannot be honoured.
    pub fn parse(text: &str, lookup: Lookup<'_>) -> Result<Self> {
        let mut pairs = flat(text)?;
        let name = pairs.remove("name");
        for (key, value) in &mut pairs {
            *value = expanded(key, value, lookup)?;
        }
        Reader { pairs }.read(name)
    }

    /// Takes what the file left to the worker from the worker's own properties.
    pub fn set_worker(&mut self, text: &str, lookup: Lookup<'_>) -> Result<()> {
        let mut pairs = properties::parse(text)?;
        for (key, value) in &mut pairs {
            *value = expanded(key, value, lookup)?;
        }
        let mut reader = Reader { pairs };
        let [key, value, header] = ["key", "value", "header"].map(|part| reader.converter(part));
        self.key_converter = self.key_converter.or(key?);
        self.value_converter = self.value_converter.or(value?);
        self.header_converter = self.header_converter.or(header?);
        let bootstrap = reader.pairs.remove("bootstrap.servers");
        self.bootstrap_servers = self.bootstrap_servers.take().or(bootstrap);
        Ok(())
    }

    /// The JSON for Kafka Connect's API that [`ConnectorConfig::parse`] reads as this. Holds the password.
    pub fn to_json(&self) -> String {
        let prefix = self.router.topic_prefix.clone().or_else(|| self.name.clone());
        let mut config: Map<String, Value> = Map::new();
        let mut set = |key: &str, value: &str| {
            config.insert(key.to_owned(), value.into());
        };
        set("connector.class", CLASS);
        set("tasks.max", "1");
        set("database.hostname", &self.host);
        set("database.port", &self.port.to_string());
        set("database.user", &self.user);
        if let Some(password) = &self.password {
            set("database.password", password);
        }
        set("database.dbname", &self.dbname);
        set("database.sslmode", &self.sslmode);
        set("plugin.name", &self.plugin);
        set("slot.name", &self.slot);
        set("publication.name", &self.publication);
        set("table.include.list", &format!("{}.{}", self.schema, self.table));
        set("snapshot.mode", &self.snapshot_mode);
        set("tombstones.on.delete", "false");
        set("topic.prefix", prefix.as_deref().unwrap_or("outbox"));
        set("extended.headers.enabled", &self.router.extended_headers.to_string());
        for (part, converter) in
            [("key", self.key_converter), ("value", self.value_converter), ("header", self.header_converter)]
        {
            for (key, value) in converter.into_iter().flat_map(classes) {
                set(&format!("{part}.converter{key}"), value);
            }
        }
        set("transforms", "outbox");
        set("transforms.outbox.type", ROUTER);
        let connectors = ["topic.prefix", "table.include.list", "extended.headers.enabled"];
        for (option, value) in self.router.pairs() {
            if !connectors.contains(&option) {
                set(&format!("transforms.outbox.{option}"), &value);
            }
        }
        if let Some(servers) = &self.bootstrap_servers {
            set("producer.override.bootstrap.servers", servers);
        }
        let name = self.name.as_deref().unwrap_or("outbox-connector");
        let whole = json!({ "name": name, "config": config });
        format!("{whole:#}\n")
    }
}

/// Keys behind `key.converter`, with their values.
fn classes(converter: Converter) -> Vec<(&'static str, &'static str)> {
    let enabled = |schemas: bool| if schemas { "true" } else { "false" };
    match converter {
        Converter::Simple => vec![("", SIMPLE)],
        Converter::String => vec![("", STRING)],
        Converter::Json { schemas } => vec![("", JSON), (".schemas.enable", enabled(schemas))],
        Converter::ByteArray => vec![("", BYTES)],
        Converter::Binary(None) => vec![("", BINARY)],
        Converter::Binary(Some(Delegate::String)) => {
            vec![("", BINARY), (".delegate.converter.type", STRING)]
        }
        Converter::Binary(Some(Delegate::Json { schemas })) => vec![
            ("", BINARY),
            (".delegate.converter.type", JSON),
            (".delegate.converter.type.schemas.enable", enabled(schemas)),
        ],
    }
}

/// Any of the forms as pairs that a connector would get.
fn flat(text: &str) -> Result<BTreeMap<String, String>> {
    if !text.trim_start().starts_with('{') {
        let pairs = properties::parse(text)?;
        let is_server = pairs.keys().any(|key| key.starts_with("debezium.source."));
        return if is_server { properties::of_server(pairs) } else { Ok(pairs) };
    }
    let whole: Value = serde_json::from_str(text).map_err(|error| {
        Error::permanent(Code::BAD_CONNECTOR, format!("the connector's file is not JSON: {error}"))
    })?;
    let mut pairs = BTreeMap::new();
    let object = match (whole.get("config"), &whole) {
        (Some(Value::Object(config)), whole) => {
            if let Some(name) = whole["name"].as_str() {
                pairs.insert("name".to_owned(), name.to_owned());
            }
            config
        }
        (_, Value::Object(config)) => config,
        _ => return Err(Error::permanent(Code::BAD_CONNECTOR, "the connector's file is not a JSON object")),
    };
    for (key, value) in object {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Bool(_) | Value::Number(_) => value.to_string(),
            Value::Null => continue,
            _ => return Err(bad(key, "must be text, as all values of a connector are")),
        };
        pairs.insert(key.clone(), text);
    }
    Ok(pairs)
}

/// `${env:NAME}` and `${NAME}` in a value. A topic's replacement has `${group}` of its own, so only those with a colon
/// are meant there; `\${` never is.
fn expanded(key: &str, value: &str, lookup: Lookup<'_>) -> Result<String> {
    let has_groups = key.ends_with(".route.topic.replacement");
    let mut out = String::with_capacity(value.len());
    let mut rest = value;
    while let Some(at) = rest.find("${") {
        let (before, found) = rest.split_at(at);
        let inner = found[2..].split_once('}');
        if let Some(before) = before.strip_suffix('\\') {
            out.push_str(before);
            out.push_str("${");
            rest = &found[2..];
            continue;
        }
        out.push_str(before);
        match inner {
            Some((name, after)) if !has_groups || name.contains(':') => {
                let meant =
                    lookup(name).ok_or_else(|| bad(key, format!("needs `${{{name}}}`, which is not set")))?;
                out.push_str(&meant);
                rest = after;
            }
            _ => {
                out.push_str("${");
                rest = &found[2..];
            }
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// Takes pairs away as it understands them.
struct Reader {
    pairs: BTreeMap<String, String>,
}

impl Reader {
    fn read(mut self, name: Option<String>) -> Result<ConnectorConfig> {
        if let Some(class) = self.take("connector.class").filter(|class| class != CLASS) {
            return Err(bad(
                "connector.class",
                format!("must be `{CLASS}`, found `{}`", class.escape_debug()),
            ));
        }
        self.refuse_incomplete()?;
        let table = self.needed("table.include.list")?;
        let full = one_table("table.include.list", &table)?;
        let (schema, table) = full.split_once('.').unwrap_or(("public", &full));
        let port = self.take("database.port").unwrap_or_else(|| "5432".into());
        let port = port.parse().map_err(|_| bad("database.port", "must be a port's number"))?;
        let mut router = self.router()?;
        router.table = Some(full.clone());
        router.topic_prefix = self.take("topic.prefix").or_else(|| self.take("database.server.name"));
        router.extended_headers = match self.take("extended.headers.enabled") {
            Some(word) => boolean("extended.headers.enabled", &word)?,
            // Debezium's default; without the prefix there is nothing to put into them.
            None => router.topic_prefix.is_some(),
        };
        let [key_converter, value_converter, header_converter] =
            ["key", "value", "header"].map(|part| self.converter(part));
        let bootstrap =
            ["producer.override.bootstrap.servers", "bootstrap.servers"].map(|key| self.take(key));
        let config = ConnectorConfig {
            name,
            host: self.needed("database.hostname")?,
            port,
            user: self.needed("database.user")?,
            password: self.take("database.password"),
            dbname: self.needed("database.dbname")?,
            sslmode: self.take("database.sslmode").unwrap_or_else(|| "prefer".into()),
            slot: self.take("slot.name").unwrap_or_else(|| "debezium".into()),
            publication: self.take("publication.name").unwrap_or_else(|| "dbz_publication".into()),
            plugin: self.take("plugin.name").unwrap_or_else(|| "decoderbufs".into()),
            schema: schema.to_owned(),
            table: table.to_owned(),
            snapshot_mode: self.take("snapshot.mode").unwrap_or_else(|| "initial".into()),
            router,
            key_converter: key_converter?,
            value_converter: value_converter?,
            header_converter: header_converter?,
            bootstrap_servers: bootstrap.into_iter().flatten().next(),
            ignored: Vec::new(),
        };
        let mode = config.snapshot_mode.as_str();
        // The others read the table again, or nothing but the table.
        if !["initial", "when_needed", "no_data", "never", "schema_only"].contains(&mode) {
            return Err(bad("snapshot.mode", format!("cannot be honoured: `{}`", mode.escape_debug())));
        }
        self.rest(config)
    }

    /// What is left is harmless, or it is refused.
    fn rest(self, mut config: ConnectorConfig) -> Result<ConnectorConfig> {
        for (key, value) in self.pairs {
            match keys::judge(&key, &value) {
                Verdict::Harmless => config.ignored.push((key, value)),
                Verdict::Refused(why) => return Err(bad(&key, why)),
                Verdict::Unknown => {
                    let what = "is not known, so it may change what is delivered: remove it";
                    return Err(bad(&key, what));
                }
            }
        }
        Ok(config)
    }

    fn take(&mut self, key: &str) -> Option<String> {
        self.pairs.remove(key).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// Names all that is missing at once, rather than the first of it.
    fn refuse_incomplete(&self) -> Result<()> {
        let has = |key: &str| self.pairs.get(key).is_some_and(|value| !value.trim().is_empty());
        let needed =
            ["table.include.list", "database.hostname", "database.user", "database.dbname", "transforms"];
        let mut missing: Vec<String> =
            needed.into_iter().filter(|key| !has(key)).map(|key| format!("`{key}`")).collect();
        if let Some(name) = self.pairs.get("transforms").and_then(|names| names.split(',').next()) {
            let key = format!("transforms.{}.type", name.trim());
            missing.extend((has("transforms") && !has(&key)).then(|| format!("`{key}`")));
        }
        match &missing[..] {
            // One alone is told where it is read, with what it is for.
            [] | [_] => Ok(()),
            several => Err(Error::permanent(
                Code::BAD_CONFIG,
                format!("{} are missing from the connector's file", several.join(", ")),
            )),
        }
    }

    fn needed(&mut self, key: &str) -> Result<String> {
        self.take(key).ok_or_else(|| bad(key, "is missing from the connector's file"))
    }

    /// The one transform that may be there.
    fn router(&mut self) -> Result<DebeziumOptions> {
        let transforms = self.take("transforms").unwrap_or_default();
        let mut names = transforms.split(',').map(str::trim).filter(|name| !name.is_empty());
        let name = names.next().ok_or_else(|| {
            bad(
                "transforms",
                format!("names no outbox event router (`{ROUTER}`): the file is for change events"),
            )
        })?;
        if let Some(other) = names.next() {
            return Err(bad(
                "transforms",
                format!("has `{other}` beside the router, which cannot be honoured"),
            ));
        }
        let prefix = format!("transforms.{name}.");
        let key = format!("{prefix}type");
        let class = self.needed(&key)?;
        if class != ROUTER {
            return Err(bad(&key, format!("must be `{ROUTER}`, found `{}`", class.escape_debug())));
        }
        // Which tables it is for; there is but one.
        self.pairs.remove(&format!("{prefix}predicate"));
        if self.take(&format!("{prefix}negate")).is_some_and(|word| word != "false") {
            return Err(bad(&format!("{prefix}negate"), "cannot be honoured"));
        }
        self.pairs.retain(|key, _| key != "predicates" && !key.starts_with("predicates."));
        let mut options = DebeziumOptions::default();
        let mine: Vec<String> = self.pairs.keys().filter(|key| key.starts_with(&prefix)).cloned().collect();
        for key in mine {
            let value = self.pairs.remove(&key).unwrap_or_default();
            let option = &key[prefix.len()..];
            if option.starts_with("tracing.") {
                return Err(bad(
                    &key,
                    "cannot be honoured: place the column of the trace context in a header instead",
                ));
            }
            options.set(option, &value).map_err(|error| error.context(format!("`{key}`")))?;
        }
        Ok(options)
    }

    /// `key.converter` and what belongs to it; none where the file leaves it to the worker.
    fn converter(&mut self, part: &str) -> Result<Option<Converter>> {
        let key = format!("{part}.converter");
        let Some(class) = self.take(&key) else { return Ok(None) };
        let schemas = self.schemas(&key)?;
        let delegate_key = format!("{key}.delegate.converter.type");
        let delegate = match self.take(&delegate_key).as_deref() {
            None => None,
            Some(STRING) => Some(Delegate::String),
            Some(JSON) => Some(Delegate::Json { schemas: self.schemas(&delegate_key)? }),
            Some(other) => return Err(unsupported(&delegate_key, other)),
        };
        let converter = match class.as_str() {
            STRING => Converter::String,
            SIMPLE if part == "header" => Converter::Simple,
            JSON => Converter::Json { schemas },
            BYTES => Converter::ByteArray,
            BINARY => Converter::Binary(delegate),
            other => return Err(unsupported(&key, other)),
        };
        // Means nothing to the others.
        self.pairs.remove(&format!("{key}.schemas.cache.size"));
        Ok(Some(converter))
    }

    /// `schemas.enable`, which is on unless it is off.
    fn schemas(&mut self, key: &str) -> Result<bool> {
        let key = format!("{key}.schemas.enable");
        self.take(&key).map_or(Ok(true), |word| boolean(&key, &word))
    }
}

fn unsupported(key: &str, class: &str) -> Error {
    let classes = [STRING, JSON, BYTES, BINARY].map(|class| format!("`{class}`")).join(", ");
    bad(key, format!("names the converter `{}`, and airtight has those of {classes}", class.escape_debug()))
}

#[cfg(test)]
mod tests;
