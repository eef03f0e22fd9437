//! What can be configured, in code, in a URL or in a table. `resolved.rs` checks it.
//!
//! The password is never shown: neither `Debug` nor an error contains it, and a URL that cannot be parsed is not repeated.

use std::{fmt, path::PathBuf, time::Duration};

use airtight_core::{
    Result,
    format::{Format, Formats},
    settings::{Address, bad, boolean, duration, number, one_of, unknown},
};
use lapin::uri::AMQPScheme;

/// The type of the queues that `declare` makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueType {
    /// On one node, on its disk.
    #[default]
    Classic,
    /// On the disks of a majority of nodes.
    Quorum,
}

/// What happens to an event that the exchange has no queue for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unroutable {
    /// The event waits until a queue is bound, and so do all events with the same routing key, or all events if the routing
    /// key is the same for all. Nothing is lost, and no event becomes dead.
    #[default]
    Wait,
    /// The event becomes dead, and delivery of the others continues. For routing keys that are made from fields, when not
    /// all of them have a consumer.
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
    /// The user (`guest`, which a broker accepts only from its own machine).
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
    /// What happens to an event that no queue takes.
    pub unroutable: Unroutable,
    /// What a message looks like.
    pub format: Format,
    /// What the key `format` may name.
    pub formats: Formats,
    /// How long the broker may take to confirm a message (10 s).
    pub timeout: Duration,
    /// How long connecting and logging in may take (5 s).
    pub connect_timeout: Duration,
    /// How many messages may be under way, each of a different key (128).
    pub window: usize,
    /// The connection is given up if the broker sends nothing for twice this long (10 s); whole seconds.
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
            formats: Formats::default(),
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
        Self::from_url_with(url, Formats::default())
    }

    /// As [`RabbitmqConfig::from_url`]; the URL, and keys that are set later, may name any of these formats.
    pub fn from_url_with(url: &str, formats: Formats) -> Result<Self> {
        let address = Address::parse(url)?;
        let scheme: AMQPScheme = address.scheme.parse().map_err(|_| {
            bad("url", format!("must begin with amqp:// or amqps://, found `{}:`", address.scheme))
        })?;
        let (host, port) = address.host(scheme.default_port())?;
        let mut config = Self { formats, ..Self::new(host) };
        config.port = port;
        config.tls = scheme == AMQPScheme::AMQPS;
        if let Some(user) = address.user {
            config.username = user;
        }
        if let Some(password) = address.password {
            config.password = password;
        }
        match address.path.as_slice() {
            [] => {}
            [vhost] => config.vhost.clone_from(vhost),
            _ => {
                return Err(bad(
                    "url",
                    "has a path of several parts; it is the virtual host, in which a slash is written %2F",
                ));
            }
        }
        for (key, value) in &address.query {
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Sets one key of a URL's query or of a config's table. An unknown one or a bad value is a permanent error
    /// that names it.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "exchange" => self.exchange = value.into(),
            "routing_key" => self.routing_key = value.into(),
            "declare" => self.declare = boolean(key, value)?,
            "exchange_type" => self.exchange_type = value.into(),
            "queue_type" => {
                let known = [("classic", QueueType::Classic), ("quorum", QueueType::Quorum)];
                self.queue_type = one_of(key, value, &known)?;
            }
            "unroutable" => {
                let known = [("wait", Unroutable::Wait), ("dead", Unroutable::Dead)];
                self.unroutable = one_of(key, value, &known)?;
            }
            "format" => self.format = self.formats.parse(value)?,
            "timeout" => self.timeout = duration(key, value)?,
            "connect_timeout" => self.connect_timeout = duration(key, value)?,
            "window" => self.window = number(key, value, 1)?,
            "heartbeat" => self.heartbeat = duration(key, value)?,
            "ca" => self.ca = Some(value.into()),
            "name" => self.name = value.into(),
            other => return Err(unknown(other, Self::KEYS)),
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use airtight_core::{Class, Error};

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
            ("h?exchnge=x", "`exchnge` is not a setting of this sink; there are `exchange`, `routing_key`"),
            ("h?declare=yes", "`declare` must be `true` or `false`, found `yes`"),
            ("h?declare=true&exchange=x&exchange_type=topics", "`exchange_type` must be"),
            ("h?queue_type=stream", "`queue_type` must be `classic` or `quorum`"),
            ("h?unroutable=drop", "`unroutable` must be `wait` or `dead`"),
            ("h?format=xml", "unknown format `xml`"),
            ("h?timeout=10", "`timeout` must be a duration like"),
            ("h?timeout=99999999999999999h", "`timeout` must be a duration like"),
            ("h?timeout=0s", "`timeout` must be a millisecond at least"),
            ("h?connect_timeout=0ms", "`connect_timeout` must be a millisecond at least"),
            ("h?window=0", "`window` must be a whole number of at least 1"),
            ("h?window=1001", "`window` must be 1 to 1000"),
            ("h?window=many", "`window` must be a whole number"),
            ("h?heartbeat=10ms", "`heartbeat` must be 1 s to"),
            ("h?routing_key={strem}", "`routing_key`: the template `{strem}` has the unknown field"),
            ("h?routing_key=", "`routing_key` is empty"),
            (&format!("h?exchange={long}"), "`exchange` has 256 bytes"),
            (&format!("h/{long}"), "virtual host of more than 255"),
            ("h?declare=true&routing_key=amq.x", "`routing_key` begins with `amq.`"),
            ("h?ca=/nowhere", "`ca` is for TLS only"),
            ("h/a/b", "`url` has a path of several parts"),
            ("h/%ff", "`url` has a %XX that is not UTF-8"),
        ] {
            let error = refused(RabbitmqConfig::from_url(&format!("amqp://user:hunter2@{rest}")));
            assert!(error.to_string().contains(expected), "{rest}: {error} should say {expected}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
            assert_eq!(error.class(), Class::Permanent);
        }
        for (url, expected) in [
            ("hunter2 not a url", "`url` has no `://`"),
            ("https://user:hunter2@host/", "found `https:`"),
            ("amqp://", "`url` names no host"),
            ("amqps://u:hunter2@host?ca=/nowhere/ca.pem", "names /nowhere/ca.pem, which cannot be read"),
            ("amqps://u:hunter2@host?ca=/dev/null", "holds no certificate"),
        ] {
            let error = refused(RabbitmqConfig::from_url(url));
            assert!(error.to_string().contains(expected), "{url}: {error} should say {expected}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
        }
    }

    #[test]
    fn every_key_can_be_set_and_debug_tells_no_secret() {
        let mut config = RabbitmqConfig::from_url("amqp://user:hunter2@host/v").unwrap();
        for key in RabbitmqConfig::KEYS {
            let told = config.set(key, "\u{0}").err().map(|error| error.message().to_owned());
            assert!(!told.unwrap_or_default().contains("is not a setting"), "{key}");
        }
        let shown = format!("{config:?}");
        assert!(shown.contains("host") && !shown.contains("hunter2"), "{shown}");
    }
}
