//! Addresses of databases and sinks, parsed into types before anything connects.

use std::{collections::BTreeMap, fmt, path::PathBuf, time::Duration};

use airtight::{Format, settings::Address};
use url::Url;

use super::suggest;

/// A string that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself, for the one place that needs it.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("•••")
    }
}

/// The address of an outbox. Displayed without a password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DatabaseUrl {
    /// A file.
    Sqlite(PathBuf),
    /// A server.
    Postgres(Secret),
}

impl DatabaseUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let known = "write `sqlite:PATH`, a path that ends in .db, .sqlite or .sqlite3, or `postgres://USER@HOST/DATABASE`";
        if text.trim().is_empty() {
            return Err(format!("the database's address is empty; {known}"));
        }
        if let Some(rest) = text.strip_prefix("sqlite:") {
            let path = rest.strip_prefix("//").unwrap_or(rest);
            let (path, parameters) = path.split_once('?').unwrap_or((path, ""));
            for pair in parameters.split('&').filter(|pair| !pair.is_empty()) {
                check_sqlite_parameter(pair)?;
            }
            return match path {
                "" => Err("`sqlite:` needs a path, like `sqlite:outbox.db`".into()),
                ":memory:" => Err(
                    "a database in memory is gone when this command ends; give a file, like `sqlite:outbox.db`"
                        .into(),
                ),
                path => Ok(Self::Sqlite(PathBuf::from(path))),
            };
        }
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            // The parser's own message cannot quote the password, ours could.
            let url = Url::parse(text).map_err(|error| {
                format!("the postgres address is malformed: {error} (special characters in a password are written as %XX)")
            })?;
            if url.path().trim_start_matches('/').is_empty() && !text.contains("dbname=") {
                return Err(format!(
                    "`{}` names no database; write `postgres://USER@HOST/DATABASE`",
                    redact(text)
                ));
            }
            return Ok(Self::Postgres(Secret::new(text)));
        }
        let is_file = [".db", ".sqlite", ".sqlite3"].iter().any(|ending| text.ends_with(ending));
        if is_file && !text.contains("://") {
            return Ok(Self::Sqlite(PathBuf::from(text)));
        }
        Err(format!("`{}` is not a database that this version knows; {known}", redact(text)))
    }
}

/// An SQLite address has no settings. `mode=rwc` is accepted because airtight works so anyway, and an application may
/// share the address.
fn check_sqlite_parameter(pair: &str) -> Result<(), String> {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    match (name, value) {
        ("mode", "rwc") => Ok(()),
        ("mode", _) => Err(format!(
            "`mode={value}` is not supported: airtight reads and writes the file, and `airtight migrate` creates a missing \
             one; remove `mode`, or write `mode=rwc`"
        )),
        _ => {
            let hint = suggest::hint(name, &["mode"], "known parameters");
            Err(format!("unknown parameter `{name}` of an SQLite address{hint}"))
        }
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Postgres(url) => f.write_str(&redact(url.reveal())),
        }
    }
}

/// The address and settings of a sink.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum SinkTarget {
    /// One envelope per line on standard output.
    Stdout,
    /// Nowhere: for benchmarks.
    Null,
    /// One envelope per line, appended and fsynced.
    File(PathBuf),
    /// A signed POST for each event.
    Webhook(Webhook),
    /// A message for each event.
    Broker(Broker),
}

/// A broker and its settings. The broker's crate reads the settings; see [`crate::wiring`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Broker {
    pub(crate) kind: BrokerKind,
    pub(crate) url: Secret,
    /// Keys and values in addition to those of the URL.
    pub(crate) settings: Vec<(String, Secret)>,
}

/// The kinds of brokers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BrokerKind {
    Kafka,
    Nats,
    RabbitMq,
    Redis,
}

impl BrokerKind {
    fn of_scheme(scheme: &str) -> Option<Self> {
        Some(match scheme {
            "kafka" | "kafka+tls" => Self::Kafka,
            "nats" | "nats+tls" | "tls" => Self::Nats,
            "amqp" | "amqps" => Self::RabbitMq,
            "redis" | "rediss" => Self::Redis,
            _ => return None,
        })
    }
}

/// The settings of a webhook.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Webhook {
    pub(crate) url: String,
    pub(crate) secret: Option<Secret>,
    pub(crate) headers: BTreeMap<String, Secret>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) concurrency: Option<usize>,
    pub(crate) format: Format,
    pub(crate) ca: Option<PathBuf>,
    /// The address of the proxy, which may contain a password.
    pub(crate) proxy: Option<Secret>,
}

impl SinkTarget {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let known = "known sinks are `stdout:`, `file:PATH`, `http(s)://…`, `kafka://…`, `nats://…`, `amqp://…`, `redis://…` and `null:`";
        let Some((scheme, rest)) = text.split_once(':') else {
            return Err(format!("`{text}` is not a sink's address; {known}"));
        };
        match scheme.to_ascii_lowercase().as_str() {
            "stdout" if rest.is_empty() => Ok(Self::Stdout),
            "null" if rest.is_empty() => Ok(Self::Null),
            "stdout" | "null" => Err(format!("`{scheme}:` takes nothing after the colon, found `{rest}`")),
            "file" => match rest.strip_prefix("//").unwrap_or(rest) {
                "" => Err("`file:` needs a path, like `file:events.ndjson`".into()),
                path => Ok(Self::File(PathBuf::from(path))),
            },
            "http" | "https" => {
                let url = Url::parse(text)
                    .map_err(|error| format!("the webhook's address is malformed: {error}"))?;
                if url.host_str().is_none_or(str::is_empty) {
                    return Err(format!("`{}` names no host", redact(text)));
                }
                Ok(Self::Webhook(Webhook {
                    url: text.to_owned(),
                    secret: None,
                    headers: BTreeMap::new(),
                    timeout: None,
                    concurrency: None,
                    format: Format::default(),
                    ca: None,
                    proxy: None,
                }))
            }
            scheme => match BrokerKind::of_scheme(scheme) {
                Some(kind) => {
                    if !rest.starts_with("//") {
                        return Err(format!("`{scheme}:` needs an address, like `{scheme}://localhost`"));
                    }
                    Ok(Self::Broker(Broker { kind, url: Secret::new(text), settings: Vec::new() }))
                }
                None => Err(format!("unknown sink `{scheme}:`; {known}")),
            },
        }
    }
}

impl fmt::Display for SinkTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("stdout:"),
            Self::Null => f.write_str("null:"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            // Paths and queries of webhooks often hold a token.
            Self::Webhook(webhook) => match Url::parse(&webhook.url) {
                Ok(url) => f.write_str(&url.origin().ascii_serialization()),
                Err(_) => f.write_str("a webhook"),
            },
            // A setting may be a secret.
            Self::Broker(broker) => match Address::parse(broker.url.reveal()) {
                Ok(address) => {
                    write!(f, "{}://{}", address.scheme, address.hosts)?;
                    address.path().map_or(Ok(()), |path| write!(f, "/{path}"))
                }
                Err(_) => f.write_str("a broker"),
            },
        }
    }
}

/// An address without its password, and without query values that look like one.
pub(crate) fn redact(text: &str) -> String {
    let Some(mut url) = Url::parse(text).ok().filter(|url| !url.cannot_be_a_base()) else {
        // Not an address, but the text before an `@` may still be a password.
        return match text.rsplit_once('@') {
            Some((_, rest)) => format!("•••@{rest}"),
            None => text.to_owned(),
        };
    };
    if url.password().is_some() {
        // Refused only by addresses that cannot have a password.
        let _ = url.set_password(Some("XXX"));
    }
    let pairs: Vec<(String, String)> = url
        .query_pairs()
        .map(|(name, value)| {
            let secret = ["pass", "secret", "token", "key"].iter().any(|word| name.contains(word));
            (name.into_owned(), if secret { "XXX".into() } else { value.into_owned() })
        })
        .collect();
    if !pairs.is_empty() {
        url.query_pairs_mut().clear().extend_pairs(pairs);
    }
    url.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn databases() {
        for (text, path) in [
            ("sqlite:a/b", "a/b"),
            ("sqlite:///tmp/x.db", "/tmp/x.db"),
            ("sqlite:x.db?mode=rwc", "x.db"),
            ("shop.db", "shop.db"),
            ("./x.sqlite3", "./x.sqlite3"),
        ] {
            assert_eq!(DatabaseUrl::parse(text), Ok(DatabaseUrl::Sqlite(path.into())), "{text}");
        }
        for (text, expected) in [
            ("", "is empty"),
            ("sqlite:", "needs a path"),
            ("sqlite::memory:", "gone when this command ends"),
            ("sqlite:x.db?mod=rwc", "unknown parameter `mod` of an SQLite address; did you mean `mode`?"),
            ("sqlite:x.db?mode=rwc&journal_mode=off", "unknown parameter `journal_mode`"),
            ("sqlite:x.db?cache=shared", "known parameters are `mode`"),
            ("sqlite:x.db?mode=ro", "`mode=ro` is not supported"),
            ("mysql://u:hush@h/db", "is not a database that this version knows"),
            ("postgres://u:hush@h", "names no database"),
            ("postgres://u:hush@h:port/db", "malformed"),
            ("outbox", "is not a database"),
        ] {
            let message = DatabaseUrl::parse(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
            assert!(!message.contains("hush"), "{message}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let url = DatabaseUrl::parse("postgres://app:hush@db:5432/shop?sslpassword=hush").unwrap();
        assert_eq!(url.to_string(), "postgres://app:XXX@db:5432/shop?sslpassword=XXX");
        assert!(!format!("{url:?}").contains("hush"));
        assert_eq!(redact("u:hush@nowhere"), "•••@nowhere");
    }

    #[test]
    fn sinks() {
        assert_eq!(SinkTarget::parse("stdout:"), Ok(SinkTarget::Stdout));
        assert_eq!(SinkTarget::parse("null:"), Ok(SinkTarget::Null));
        assert_eq!(SinkTarget::parse("file:///tmp/a"), Ok(SinkTarget::File("/tmp/a".into())));
        let kafka = SinkTarget::parse("kafka://me:hush@a:1,b:2/orders?format=raw&password=hush").unwrap();
        assert_eq!(kafka.to_string(), "kafka://a:1,b:2/orders");
        assert!(!format!("{kafka:?}").contains("hush"));
        for (text, expected) in [
            ("kafka:localhost", "`kafka:` needs an address, like `kafka://localhost`"),
            ("ftp://x", "unknown sink `ftp:`; known sinks are `stdout:`, `file:PATH`"),
            ("events.ndjson", "is not a sink's address"),
            ("file:", "needs a path"),
            ("http://", "malformed"),
        ] {
            let message = SinkTarget::parse(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
