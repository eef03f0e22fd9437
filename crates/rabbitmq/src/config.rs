//! What can be configured, and its way into checked types. Needs no network.
//!
//! The password goes in here and never comes out in words: neither `Debug` nor an error shows it, and a URL that
//! cannot be read is not repeated.

use std::{fmt, path::PathBuf, time::Duration};

use airtight_core::{Error, Result, format::Format, route::Template};
use lapin::{
    ExchangeKind,
    tcp::OwnedTLSConfig,
    types::{FieldTable, ShortString},
    uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo},
};
use url::Url;

/// AMQP's short strings, which all names are, have a byte for their length.
pub(crate) const SHORT: usize = 255;
/// Each message under way has a channel to itself, and a broker allows 2,047 of them on a connection.
const MAX_WINDOW: usize = 1_000;

/// The type of the queues that `declare` makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueType {
    /// On one node, on its disk.
    #[default]
    Classic,
    /// On the disks of a majority of nodes.
    Quorum,
}

/// What becomes of an event that the exchange has no queue for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unroutable {
    /// It waits, and all others with it, until somebody has made the binding: nothing is lost, and nothing is dead.
    #[default]
    Wait,
    /// It is dead-lettered, and the others go on: for routing keys made from fields of which nobody needs all.
    Dead,
}

/// Where to send events, and how. Checked by [`crate::RabbitmqSink::new`].
#[derive(Clone)]
pub struct RabbitmqConfig {
    /// Speak TLS (`amqps`).
    pub tls: bool,
    /// The broker's name or address.
    pub host: String,
    /// Its port (5672, or 5671 for TLS).
    pub port: u16,
    /// The virtual host (`/`).
    pub vhost: String,
    /// Who to log in as (`guest`, whom a broker lets in from its own machine only).
    pub username: String,
    /// The password (`guest`).
    pub password: String,
    /// The exchange, a template. Empty is the default exchange, whose routing keys are names of queues.
    pub exchange: String,
    /// The routing key, a template (`{stream}`). May be empty for exchanges that do not look at it.
    pub routing_key: String,
    /// Declares the exchange, or with the default exchange the queue, before its first message (false).
    pub declare: bool,
    /// The type of a declared exchange (`topic`).
    pub exchange_type: String,
    /// The type of a declared queue.
    pub queue_type: QueueType,
    /// What becomes of an event that no queue wants.
    pub unroutable: Unroutable,
    /// What a message looks like.
    pub format: Format,
    /// How long the broker may take to confirm a message (10 s).
    pub timeout: Duration,
    /// How long connecting and logging in may take (5 s).
    pub connect_timeout: Duration,
    /// How many messages may be under way, each of another key (128).
    pub window: usize,
    /// A connection on which nothing was heard for twice this long is given up (10 s); whole seconds.
    pub heartbeat: Duration,
    /// A file of certificates (PEM) to trust besides the system's.
    pub ca: Option<PathBuf>,
    /// The connection's name, as the broker's own tools show it (`airtight`).
    pub name: String,
}

impl RabbitmqConfig {
    /// What [`RabbitmqConfig::set`] knows.
    pub const KEYS: &'static [&'static str] = &[
        "exchange",
        "routing_key",
        "declare",
        "exchange_type",
        "queue_type",
        "unroutable",
        "format",
        "timeout",
        "connect_timeout",
        "window",
        "heartbeat",
        "ca",
        "name",
    ];

    /// The defaults, for this broker.
    pub fn new(host: impl Into<String>) -> Self {
        Self {
            tls: false,
            host: host.into(),
            port: AMQPScheme::AMQP.default_port(),
            vhost: "/".into(),
            username: "guest".into(),
            password: "guest".into(),
            exchange: String::new(),
            routing_key: "{stream}".into(),
            declare: false,
            exchange_type: "topic".into(),
            queue_type: QueueType::default(),
            unroutable: Unroutable::default(),
            format: Format::default(),
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            window: 128,
            heartbeat: Duration::from_secs(10),
            ca: None,
            name: "airtight".into(),
        }
    }

    /// Reads `amqp://user:password@host:port/vhost?key=value`, or the same with `amqps`. Without a path the virtual
    /// host is `/`; in one, a slash is written `%2F`.
    pub fn from_url(url: &str) -> Result<Self> {
        // The text itself stays out of messages: it may hold a password.
        let url = Url::parse(url).map_err(|error| {
            bad("url", format!("is not a URL ({error}); it should look like amqp://user:password@host/vhost"))
        })?;
        let scheme: AMQPScheme = url.scheme().parse().map_err(|_| {
            bad("url", format!("must begin with amqp:// or amqps://, found `{}:`", url.scheme()))
        })?;
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| {
            bad("url", "names no host; it should look like amqp://user:password@host/vhost")
        })?;
        // An IPv6 address has brackets in a URL only.
        let mut config = Self::new(percent_decode(host.trim_start_matches('[').trim_end_matches(']'))?);
        config.tls = scheme == AMQPScheme::AMQPS;
        config.port = url.port().unwrap_or(scheme.default_port());
        if !url.username().is_empty() {
            config.username = percent_decode(url.username())?;
        }
        if let Some(password) = url.password() {
            config.password = percent_decode(password)?;
        }
        if let Some(path) = url.path().strip_prefix('/') {
            if path.contains('/') {
                return Err(bad(
                    "url",
                    "has a path of several parts; it is the virtual host, in which a slash is written %2F",
                ));
            }
            config.vhost = percent_decode(path)?;
        }
        for pair in url.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            config.set(&percent_decode(key)?, &percent_decode(value)?)?;
        }
        Ok(config)
    }

    /// Sets one key of a URL's query or of a config's table. An unknown one or a bad value is a permanent error
    /// that names it.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "exchange" => self.exchange = value.into(),
            "routing_key" => self.routing_key = value.into(),
            "declare" => self.declare = one_of(key, value, &[("true", true), ("false", false)])?,
            "exchange_type" => self.exchange_type = value.into(),
            "queue_type" => {
                let known = [("classic", QueueType::Classic), ("quorum", QueueType::Quorum)];
                self.queue_type = one_of(key, value, &known)?;
            }
            "unroutable" => {
                let known = [("wait", Unroutable::Wait), ("dead", Unroutable::Dead)];
                self.unroutable = one_of(key, value, &known)?;
            }
            "format" => self.format = Format::parse(value)?,
            "timeout" => self.timeout = duration(key, value)?,
            "connect_timeout" => self.connect_timeout = duration(key, value)?,
            "window" => {
                self.window =
                    value.parse().map_err(|_| bad(key, format!("must be a number, found `{value}`")))?;
            }
            "heartbeat" => self.heartbeat = duration(key, value)?,
            "ca" => self.ca = Some(value.into()),
            "name" => self.name = value.into(),
            other => {
                return Err(Error::permanent(
                    "bad_config",
                    format!("rabbitmq: unknown key `{other}`; there are {}", Self::KEYS.join(", ")),
                ));
            }
        }
        Ok(())
    }

    /// The checked form.
    pub(crate) fn resolve(self) -> Result<Resolved> {
        let exchange = template("exchange", &self.exchange)?;
        let routing_key = template("routing_key", &self.routing_key)?;
        if exchange.is_none() && routing_key.is_none() {
            return Err(bad("routing_key", "is empty, and so is `exchange`: one of them must say where to"));
        }
        for (key, duration) in [("timeout", self.timeout), ("connect_timeout", self.connect_timeout)] {
            if duration.is_zero() {
                return Err(bad(key, "must be longer than zero"));
            }
        }
        if !(1..=MAX_WINDOW).contains(&self.window) {
            return Err(bad("window", format!("must be 1 to {MAX_WINDOW}, found {}", self.window)));
        }
        let heartbeat = u16::try_from(self.heartbeat.as_secs()).ok().filter(|seconds| *seconds > 0);
        let heartbeat = heartbeat.ok_or_else(|| bad("heartbeat", "must be 1 s to 65535 s"))?;
        if self.vhost.len() > SHORT {
            return Err(bad("url", format!("names a virtual host of more than {SHORT} bytes")));
        }
        let declare = self.declare.then(|| self.declaration(routing_key.as_ref())).transpose()?;
        let scheme = if self.tls { AMQPScheme::AMQPS } else { AMQPScheme::AMQP };
        let address = format!("{scheme}://{}:{}", self.host, self.port);
        let tls = self.certificates()?;
        let uri = AMQPUri {
            scheme,
            authority: AMQPAuthority {
                userinfo: AMQPUserInfo { username: self.username, password: self.password },
                host: self.host,
                port: self.port,
            },
            vhost: self.vhost,
            query: AMQPQueryString { heartbeat: Some(heartbeat), ..AMQPQueryString::default() },
        };
        Ok(Resolved {
            uri,
            tls,
            address,
            name: self.name,
            exchange,
            routing_key,
            declare,
            unroutable: self.unroutable,
            format: self.format,
            timeout: self.timeout,
            connect_timeout: self.connect_timeout,
            window: self.window,
        })
    }

    fn declaration(&self, routing_key: Option<&Template>) -> Result<Declare> {
        if !self.exchange.is_empty() {
            return Ok(Declare::Exchange(match self.exchange_type.as_str() {
                "direct" => ExchangeKind::Direct,
                "fanout" => ExchangeKind::Fanout,
                "headers" => ExchangeKind::Headers,
                "topic" => ExchangeKind::Topic,
                custom if custom.starts_with("x-") && custom.len() <= SHORT => {
                    ExchangeKind::Custom(custom.into())
                }
                other => {
                    return Err(bad(
                        "exchange_type",
                        format!(
                            "must be `direct`, `fanout`, `headers`, `topic` or a plugin's `x-…`, found `{other}`"
                        ),
                    ));
                }
            }));
        }
        if routing_key.and_then(Template::constant).is_some_and(|name| name.starts_with("amq.")) {
            return Err(bad(
                "routing_key",
                "begins with `amq.`, which the broker keeps for queues of its own",
            ));
        }
        let mut arguments = FieldTable::default();
        if self.queue_type == QueueType::Quorum {
            arguments.insert("x-queue-type".into(), lapin::types::AMQPValue::LongString("quorum".into()));
        }
        Ok(Declare::Queue(arguments))
    }

    /// Read here, so that a wrong path is found before the first event.
    fn certificates(&self) -> Result<OwnedTLSConfig> {
        let Some(path) = &self.ca else { return Ok(OwnedTLSConfig::default()) };
        if !self.tls {
            return Err(bad("ca", "is for TLS only: begin the URL with amqps://, or remove it"));
        }
        let pem = std::fs::read_to_string(path)
            .map_err(|error| bad("ca", format!("names {}, which cannot be read: {error}", path.display())))?;
        if !pem.contains("-----BEGIN CERTIFICATE-----") {
            return Err(bad(
                "ca",
                format!("names {}, which holds no certificate in PEM form", path.display()),
            ));
        }
        Ok(OwnedTLSConfig { identity: None, cert_chain: Some(pem) })
    }
}

impl fmt::Debug for RabbitmqConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitmqConfig")
            .field("tls", &self.tls)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("vhost", &self.vhost)
            .field("username", &self.username)
            .field("password", &"(hidden)")
            .field("exchange", &self.exchange)
            .field("routing_key", &self.routing_key)
            .field("declare", &self.declare)
            .field("exchange_type", &self.exchange_type)
            .field("queue_type", &self.queue_type)
            .field("unroutable", &self.unroutable)
            .field("format", &self.format)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("window", &self.window)
            .field("heartbeat", &self.heartbeat)
            .field("ca", &self.ca)
            .field("name", &self.name)
            .finish()
    }
}

/// A config that was checked. Holds the password, and so has no `Debug`.
pub(crate) struct Resolved {
    pub(crate) uri: AMQPUri,
    pub(crate) tls: OwnedTLSConfig,
    /// Scheme, host and port: as much of the URL as may be shown.
    pub(crate) address: String,
    pub(crate) name: String,
    pub(crate) exchange: Option<Template>,
    pub(crate) routing_key: Option<Template>,
    pub(crate) declare: Option<Declare>,
    pub(crate) unroutable: Unroutable,
    pub(crate) format: Format,
    pub(crate) timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) window: usize,
}

impl Resolved {
    /// Where all events go, if it is the same for all of them.
    pub(crate) fn destination(&self) -> Option<(Destination, ShortString)> {
        let (what, template) = match &self.exchange {
            Some(exchange) => (Destination::Exchange, exchange),
            None => (Destination::Queue, self.routing_key.as_ref()?),
        };
        Some((what, short(template.constant()?)?))
    }
}

/// What a message is addressed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    Exchange,
    Queue,
}

/// What is declared before the first message.
pub(crate) enum Declare {
    Exchange(ExchangeKind),
    /// With these arguments.
    Queue(FieldTable),
}

/// A config error: the key, and what to do.
pub(crate) fn bad(key: &str, what: impl fmt::Display) -> Error {
    Error::permanent("bad_config", format!("rabbitmq: `{key}` {what}"))
}

fn template(key: &str, text: &str) -> Result<Option<Template>> {
    if text.is_empty() {
        return Ok(None);
    }
    let template = Template::parse(text).map_err(|error| error.context(format!("rabbitmq: `{key}`")))?;
    let literals: usize = template.literals().map(str::len).sum();
    if literals > SHORT {
        return Err(bad(key, format!("has {literals} bytes of text, and AMQP's names have at most {SHORT}")));
    }
    Ok(Some(template))
}

fn one_of<T: Copy>(key: &str, value: &str, known: &[(&str, T)]) -> Result<T> {
    known.iter().find(|(word, _)| *word == value).map(|(_, meant)| *meant).ok_or_else(|| {
        let words: Vec<String> = known.iter().map(|(word, _)| format!("`{word}`")).collect();
        bad(key, format!("must be {}, found `{value}`", words.join(" or ")))
    })
}

/// `10s`, `500ms`, `2m`.
fn duration(key: &str, text: &str) -> Result<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let milliseconds: Option<u64> = match unit {
        "ms" => Some(1),
        "s" => Some(1_000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        _ => None,
    };
    number
        .parse()
        .ok()
        .and_then(|number: u64| number.checked_mul(milliseconds?))
        .map(Duration::from_millis)
        .ok_or_else(|| bad(key, format!("must look like `10s`, `500ms` or `2m`, found `{text}`")))
}

fn percent_decode(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        rest = behind;
        let hex = |at: usize| behind.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        match (first, hex(0), hex(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.extend(u8::try_from(high * 16 + low));
                rest = &behind[2..];
            }
            _ => bytes.push(*first),
        }
    }
    String::from_utf8(bytes).map_err(|_| bad("url", "is not UTF-8 text once its %XX are decoded"))
}

/// A name as AMQP carries it; none if it is too long.
pub(crate) fn short(text: &str) -> Option<ShortString> {
    ShortString::try_new(text).ok()
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;

    use super::*;

    fn refused(config: Result<RabbitmqConfig>) -> Error {
        match config.and_then(RabbitmqConfig::resolve) {
            Ok(_) => panic!("this config should be refused"),
            Err(error) => error,
        }
    }

    #[test]
    fn a_url_says_it_all() {
        let config = RabbitmqConfig::from_url(
            "amqps://me%40home:p%2Fw@[::1]:1234/my%2Fhost?exchange=ev.{aggregate_type}&routing_key={event_type}+x\
             &declare=true&exchange_type=direct&queue_type=quorum&unroutable=dead&format=raw&timeout=500ms\
             &connect_timeout=2m&window=7&heartbeat=30s&ca=%2Ftmp%2Fca.pem&name=it",
        )
        .unwrap();
        assert!(config.tls && config.declare);
        assert_eq!((config.host.as_str(), config.port, config.vhost.as_str()), ("::1", 1234, "my/host"));
        assert_eq!((config.username.as_str(), config.password.as_str()), ("me@home", "p/w"));
        assert_eq!(config.exchange, "ev.{aggregate_type}");
        assert_eq!(config.routing_key, "{event_type}+x");
        assert_eq!((config.exchange_type.as_str(), config.queue_type), ("direct", QueueType::Quorum));
        assert_eq!((config.unroutable, config.format), (Unroutable::Dead, Format::Raw));
        assert_eq!(
            (config.timeout, config.connect_timeout),
            (Duration::from_millis(500), Duration::from_secs(120))
        );
        assert_eq!((config.window, config.heartbeat), (7, Duration::from_secs(30)));
        assert_eq!((config.ca, config.name), (Some("/tmp/ca.pem".into()), "it".into()));
    }

    #[test]
    fn the_path_is_the_virtual_host_as_amqp_has_it() {
        for (url, vhost, port) in [
            ("amqp://host", "/", 5672),
            ("amqp://host/", "", 5672),
            ("amqp://host/%2F", "/", 5672),
            ("amqps://host/live", "live", 5671),
            ("amqp://host?window=1", "/", 5672),
        ] {
            let config = RabbitmqConfig::from_url(url).unwrap();
            assert_eq!((config.vhost.as_str(), config.port), (vhost, port), "{url}");
            assert_eq!((config.username.as_str(), config.password.as_str()), ("guest", "guest"));
        }
    }

    #[test]
    fn a_wrong_config_is_refused_with_the_key_and_without_secrets() {
        let long = "x".repeat(256);
        for (rest, expected) in [
            ("h?exchnge=x", "unknown key `exchnge`; there are exchange, routing_key"),
            ("h?declare=yes", "`declare` must be `true` or `false`, found `yes`"),
            ("h?declare=true&exchange=x&exchange_type=topics", "`exchange_type` must be"),
            ("h?queue_type=stream", "`queue_type` must be `classic` or `quorum`"),
            ("h?unroutable=drop", "`unroutable` must be `wait` or `dead`"),
            ("h?format=xml", "unknown format `xml`"),
            ("h?timeout=10", "`timeout` must look like `10s`"),
            ("h?timeout=99999999999999999h", "`timeout` must look like `10s`"),
            ("h?timeout=0s", "`timeout` must be longer"),
            ("h?connect_timeout=0ms", "`connect_timeout` must be longer"),
            ("h?window=0", "`window` must be 1 to 1000"),
            ("h?window=many", "`window` must be a number"),
            ("h?heartbeat=10ms", "`heartbeat` must be 1 s to"),
            ("h?routing_key={strem}", "`routing_key`: the template `{strem}` has the unknown field"),
            ("h?routing_key=", "`routing_key` is empty"),
            (&format!("h?exchange={long}"), "`exchange` has 256 bytes"),
            (&format!("h/{long}"), "virtual host of more than 255"),
            ("h?declare=true&routing_key=amq.x", "`routing_key` begins with `amq.`"),
            ("h?ca=/nowhere", "`ca` is for TLS only"),
            ("h/a/b", "`url` has a path of several parts"),
            ("h/%ff", "`url` is not UTF-8"),
        ] {
            let error = refused(RabbitmqConfig::from_url(&format!("amqp://user:hunter2@{rest}")));
            assert!(error.message().contains(expected), "{rest}: {error} should say {expected}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
            assert_eq!(error.class(), Class::Permanent);
        }
        for (url, expected) in [
            ("hunter2 not a url", "`url` is not a URL"),
            ("https://user:hunter2@host/", "found `https:`"),
            ("amqp://", "`url` names no host"),
            ("amqps://u:hunter2@host?ca=/nowhere/ca.pem", "names /nowhere/ca.pem, which cannot be read"),
            ("amqps://u:hunter2@host?ca=/dev/null", "holds no certificate"),
        ] {
            let error = refused(RabbitmqConfig::from_url(url));
            assert!(error.message().contains(expected), "{url}: {error} should say {expected}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
        }
    }

    #[test]
    fn every_key_can_be_set_and_debug_tells_no_secret() {
        let mut config = RabbitmqConfig::from_url("amqp://user:hunter2@host/v").unwrap();
        for key in RabbitmqConfig::KEYS {
            let told = config.set(key, "\u{0}").err().map(|error| error.message().to_owned());
            assert!(!told.unwrap_or_default().contains("unknown key"), "{key}");
        }
        let shown = format!("{config:?}");
        assert!(shown.contains("host") && !shown.contains("hunter2"), "{shown}");
    }
}
