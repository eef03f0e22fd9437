//! What can be configured, in code, in a URL or in a table. `resolved.rs` checks it.
//!
//! Secrets are never shown: neither `Debug` nor an error contains a password, a token or a seed.

use std::{fmt, path::PathBuf, time::Duration};

use airtight_core::{
    Format, Result,
    format::Formats,
    settings::{Address, bad, boolean, duration, number, unknown},
};

/// Where to publish events, and how. Checked by [`crate::NatsSink::new`].
///
/// The names of the fields are the keys of a URL's query and of a table in the config; see [`NatsConfig::KEYS`].
#[derive(Clone)]
pub struct NatsConfig {
    /// `host:port`, or several separated by commas; the default port is 4222. Any of the servers may be used.
    pub servers: String,
    /// Whether the connection must be encrypted (`tls://`). A server may ask for it too.
    pub tls: bool,
    /// User name; needs a password.
    pub user: Option<String>,
    /// Password of the user.
    pub password: Option<String>,
    /// A token, instead of a user.
    pub token: Option<String>,
    /// A credentials file (JWT and seed), read again for each connection.
    pub creds: Option<PathBuf>,
    /// The seed of an NKey (`SU…`).
    pub nkey: Option<String>,
    /// A PEM file with the authorities to trust, instead of the system's.
    pub ca: Option<PathBuf>,
    /// A PEM file with a certificate to show to the server; needs `key`.
    pub cert: Option<PathBuf>,
    /// A PEM file with the private key of `cert`.
    pub key: Option<PathBuf>,
    /// The subject, a template (`{stream}`).
    pub subject: String,
    /// The JetStream stream that must take the events. If it is not set, any stream with the subject may take them.
    pub stream: Option<String>,
    /// Whether to create `stream` if it is missing (false).
    pub create: bool,
    /// The subjects of a created stream. Empty means all subjects that the template can give, which needs a template that
    /// begins with a literal token.
    pub create_subjects: Vec<String>,
    /// The replicas of a created stream (1).
    pub create_replicas: usize,
    /// What a message looks like.
    pub format: Format,
    /// What the key `format` may name.
    pub formats: Formats,
    /// How long a stream may take to acknowledge (10 s).
    pub timeout: Duration,
    /// How long connecting to one server may take (5 s).
    pub connect_timeout: Duration,
    /// How many events may be under way, each of a different key (256).
    pub window: usize,
    /// The connection's name in the server's reports (`airtight`).
    pub name: String,
    /// Where acknowledgements are sent to, for users who may not subscribe to `_INBOX.>`.
    pub inbox_prefix: String,
}

impl NatsConfig {
    /// What [`NatsConfig::set`] knows.
    pub const KEYS: &'static [&'static str] = &[
        "servers",
        "tls",
        "user",
        "password",
        "token",
        "creds",
        "nkey",
        "ca",
        "cert",
        "key",
        "subject",
        "stream",
        "create",
        "create_subjects",
        "create_replicas",
        "format",
        "timeout",
        "connect_timeout",
        "window",
        "name",
        "inbox_prefix",
    ];

    /// The defaults, for these servers: `host:port`, or several separated by commas.
    pub fn new(servers: impl Into<String>) -> Self {
        Self {
            servers: servers.into(),
            tls: false,
            user: None,
            password: None,
            token: None,
            creds: None,
            nkey: None,
            ca: None,
            cert: None,
            key: None,
            subject: "{stream}".into(),
            stream: None,
            create: false,
            create_subjects: Vec::new(),
            create_replicas: 1,
            format: Format::default(),
            formats: Formats::default(),
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            window: 256,
            name: "airtight".into(),
            inbox_prefix: "_INBOX".into(),
        }
    }

    /// Reads `nats://[user:password@|token@]host[:port][,host…][/SUBJECT][?key=value&…]`; `tls://` and
    /// `nats+tls://` require encryption. Special characters are written as `%XX`.
    pub fn from_url(url: &str) -> Result<Self> {
        Self::from_url_with(url, Formats::default())
    }

    /// As [`NatsConfig::from_url`]; the URL, and keys that are set later, may name any of these formats.
    pub fn from_url_with(url: &str, formats: Formats) -> Result<Self> {
        let address = Address::parse(url)?;
        let tls = match address.scheme.as_str() {
            "nats" => false,
            "tls" | "nats+tls" => true,
            other => {
                return Err(bad(
                    "url",
                    format!("must begin with nats://, tls:// or nats+tls://, found `{other}:`"),
                ));
            }
        };
        let subject = address.path();
        let mut config = Self { formats, ..Self::new(address.hosts) };
        config.tls = tls;
        match address.password {
            None => config.token = address.user,
            password => (config.user, config.password) = (address.user, password),
        }
        if let Some(subject) = subject {
            config.subject = subject;
        }
        for (key, value) in &address.query {
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Sets one key of a URL's query or of a config's table.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let text = || value.to_owned();
        match key {
            "servers" => self.servers = text(),
            "tls" => self.tls = boolean(key, value)?,
            "user" => self.user = Some(text()),
            "password" => self.password = Some(text()),
            "token" => self.token = Some(text()),
            "creds" => self.creds = Some(value.into()),
            "nkey" => self.nkey = Some(text()),
            "ca" => self.ca = Some(value.into()),
            "cert" => self.cert = Some(value.into()),
            "key" => self.key = Some(value.into()),
            "subject" => self.subject = text(),
            "stream" => self.stream = Some(text()),
            "create" => self.create = boolean(key, value)?,
            "create_subjects" => {
                self.create_subjects = value.split(',').map(|subject| subject.trim().to_owned()).collect();
            }
            "create_replicas" => self.create_replicas = number(key, value, 1)?,
            "format" => self.format = self.formats.parse(value).map_err(|error| bad(key, error))?,
            "timeout" => self.timeout = duration(key, value)?,
            "connect_timeout" => self.connect_timeout = duration(key, value)?,
            "window" => self.window = number(key, value, 1)?,
            "name" => self.name = text(),
            "inbox_prefix" => self.inbox_prefix = text(),
            other => return Err(unknown(other, Self::KEYS)),
        }
        Ok(())
    }
}

impl fmt::Debug for NatsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = |secret: &Option<String>| secret.as_ref().map(|_| "(hidden)");
        f.debug_struct("NatsConfig")
            // Where they are written as in a URL, which `resolve` refuses, without what is before the `@`.
            .field("servers", &self.servers.rsplit('@').next().unwrap_or_default())
            .field("tls", &self.tls)
            .field("user", &self.user)
            .field("password", &hidden(&self.password))
            .field("token", &hidden(&self.token))
            .field("creds", &self.creds)
            .field("nkey", &hidden(&self.nkey))
            .field("ca", &self.ca)
            .field("cert", &self.cert)
            .field("key", &self.key)
            .field("subject", &self.subject)
            .field("stream", &self.stream)
            .field("create", &self.create)
            .field("create_subjects", &self.create_subjects)
            .field("create_replicas", &self.create_replicas)
            .field("format", &self.format)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("window", &self.window)
            .field("name", &self.name)
            .field("inbox_prefix", &self.inbox_prefix)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use airtight_core::{Class, Error};

    use super::*;

    fn refused(config: Result<NatsConfig>) -> Error {
        match config.and_then(NatsConfig::resolve) {
            Ok(_) => panic!("this config should be refused"),
            Err(error) => error,
        }
    }

    #[test]
    fn a_url_says_it_all() {
        let config = NatsConfig::from_url(
            "nats://us%40er:p%3Aw@one,two:4333/orders.{event_type}?stream=ORDERS&create=true&create_replicas=3\
             &timeout=500ms&connect_timeout=2m&window=7&format=raw&name=a%20b&inbox_prefix=acks",
        )
        .unwrap();
        assert_eq!((config.user.as_deref(), config.password.as_deref()), (Some("us@er"), Some("p:w")));
        assert_eq!(
            (config.timeout, config.connect_timeout),
            (Duration::from_millis(500), Duration::from_secs(120))
        );
        let resolved = config.resolve().unwrap();
        let ports: Vec<(&str, u16)> =
            resolved.servers.iter().map(|server| (server.host(), server.port())).collect();
        assert_eq!(ports, [("one", 4222), ("two", 4333)]);
        assert_eq!(resolved.subject.to_string(), "orders.{event_type}");
        assert_eq!(resolved.stream.as_deref(), Some("ORDERS"));
        let created = resolved.created.unwrap();
        assert_eq!((created.subjects, created.replicas), (vec!["orders.>".to_owned()], 3));
        assert_eq!((resolved.window, resolved.format), (7, Format::Raw));
        assert_eq!((resolved.name.as_str(), resolved.inbox_prefix.as_str()), ("a b", "acks"));

        let config = NatsConfig::from_url("tls://t%2F0k@[::1]:4222").unwrap();
        assert_eq!(
            (config.tls, config.token.as_deref(), config.subject.as_str()),
            (true, Some("t/0k"), "{stream}")
        );
        assert!(NatsConfig::from_url("NATS+TLS://host/").unwrap().tls);
    }

    #[test]
    fn every_key_can_be_set() {
        let example = |key: &str| match key {
            "tls" | "create" => "true",
            "create_replicas" | "window" => "3",
            "format" => "event",
            "timeout" | "connect_timeout" => "3s",
            _ => "text",
        };
        let mut config = NatsConfig::new("host");
        let before = format!("{config:?}");
        for key in NatsConfig::KEYS {
            config.set(key, example(key)).unwrap();
        }
        let after = format!("{config:?}");
        for key in NatsConfig::KEYS {
            let value =
                |shown: &str| shown.split_once(&format!(" {key}: ")).map(|(_, rest)| rest[..6].to_owned());
            assert_ne!(value(&before), value(&after), "{key}");
        }
    }

    #[test]
    fn a_wrong_config_is_refused_with_the_key_and_without_secrets() {
        let url = |rest: &str| NatsConfig::from_url(&format!("nats://user:hunter2@host/{rest}"));
        let bare = |rest: &str| NatsConfig::from_url(&format!("nats://host/{rest}"));
        let cases = [
            (NatsConfig::from_url("hunter2"), "`url` has no `://`"),
            (NatsConfig::from_url("http://user:hunter2@host"), "found `http:`"),
            (NatsConfig::from_url("nats://"), "`servers` must be host:port"),
            (NatsConfig::from_url("nats://a,,b"), "`servers` must be host:port"),
            (NatsConfig::from_url("nats://host:port"), "`servers` must be host:port"),
            (Ok(NatsConfig::new("user:hunter2@host")), "`servers` must be host:port"),
            (NatsConfig::from_url("nats://u:hunter2%@host"), "`password` has a `%`"),
            (url("?widnow=1"), "`widnow` is not a setting of this sink; there are `servers`, `tls`"),
            (url("?window=0"), "`window` must be a whole number of at least 1"),
            (url("?window=70000"), "`window` must be between"),
            (url("?window=many"), "`window` must be a whole number"),
            (url("?timeout=0s"), "`timeout` must be a millisecond at least"),
            (url("?connect_timeout=0ms"), "`connect_timeout` must be a millisecond at least"),
            (url("?timeout=10"), "`timeout` must be a duration"),
            (url("?format=xml"), "`format` unknown format `xml`"),
            (url("?token=hunter2"), "exclude each other"),
            (bare("?user=u"), "`user` needs `password`"),
            (bare("?password=hunter2"), "`password` needs `user`"),
            (bare("?nkey=hunter2"), "`nkey` is not the seed"),
            (bare("?creds=/nowhere/x.creds"), "`creds` is the file /nowhere/x.creds, which cannot be read"),
            (bare("?creds=/dev/null"), "which is not a NATS credentials file"),
            (bare("?ca=/nowhere/ca.pem"), "`ca` is the file /nowhere/ca.pem, which cannot be read"),
            (bare("?ca=/dev/null"), "`ca` is the file /dev/null, which holds no certificate"),
            (bare("?cert=/dev/null"), "`cert` needs `key`"),
            (bare("?key=/dev/null"), "`key` needs `cert`"),
            (url("{agregate_type}"), "did you mean `{aggregate_type}`"),
            (url("orders..{event_type}"), "`subject`"),
            (url("orders.*"), "`subject`"),
            (url("orders%20{event_type}"), "`subject`"),
            (url("$JS.API.{event_type}"), "`subject`"),
            (url("?inbox_prefix=a..b"), "`inbox_prefix`"),
            (url("?stream=a.b"), "`stream` is not a stream's name"),
            (url("?stream="), "`stream` is not a stream's name"),
            (url("?create=yes"), "`create` must be `true` or `false`"),
            (url("?create=true"), "`create` needs `stream`"),
            (url("?create=true&stream=S"), "`create_subjects` must be set"),
            (url("?create=true&stream=S&create_subjects=a,,b"), "`create_subjects` has ``"),
            (url("o.{op}?create=true&stream=S&create_replicas=0"), "`create_replicas` must be"),
        ];
        for (config, expected) in cases {
            let error = refused(config);
            assert!(error.to_string().contains(expected), "{error} should say {expected}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
            assert_eq!(error.class(), Class::Permanent);
        }
    }

    #[test]
    fn debug_tells_no_secrets() {
        let mut config = NatsConfig::from_url("nats://user:hunter2@host").unwrap();
        config.servers = "user:hunter2@host".into();
        config.token = Some("hunter2".into());
        config.nkey = Some("hunter2".into());
        let shown = format!("{config:?}");
        assert!(shown.contains("host") && shown.contains("user"), "{shown}");
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}
