//! What can be configured, and its checks. Needs no network.
//!
//! The password is never shown: neither `Debug` nor an error contains it or the URL that it was in.

use std::{fmt, path::PathBuf, time::Duration};

use airtight_core::{
    Result,
    format::{Format, Formats},
    settings::{Address, bad, duration, number, unknown},
};

const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Which Redis, which streams, and how. Checked by [`crate::RedisSink::new`].
#[derive(Clone)]
pub struct RedisConfig {
    /// Host name or address.
    pub host: String,
    /// Port (6379).
    pub port: u16,
    /// Speaks TLS (`rediss://`).
    pub tls: bool,
    /// The ACL user; none is Redis's `default` user.
    pub user: Option<String>,
    /// Its password.
    pub password: Option<String>,
    /// The database's number (0).
    pub database: u32,
    /// Template of the stream's key (`{stream}`).
    pub key: String,
    /// Trims each stream to about this many entries, read or not. None keeps all.
    pub max_len: Option<u64>,
    /// Trims entries older than about this, read or not, by the server's clock (Redis 6.2). None keeps all.
    pub max_age: Option<Duration>,
    /// What an entry holds.
    pub format: Format,
    /// What the key `format` may name.
    pub formats: Formats,
    /// How long one request may take (10 s).
    pub timeout: Duration,
    /// How long connecting may take, TLS and authentication included (5 s).
    pub connect_timeout: Duration,
    /// Counts an entry as delivered when this many replicas have it too (0).
    pub wait_replicas: u32,
    /// A PEM file with the certificates to trust, instead of the system's.
    pub ca: Option<PathBuf>,
    /// A PEM file with the certificate to show, where the server asks for one.
    pub cert: Option<PathBuf>,
    /// A PEM file with that certificate's private key.
    pub cert_key: Option<PathBuf>,
    /// The name of the connection in `CLIENT LIST` (`airtight`).
    pub name: String,
}

impl RedisConfig {
    /// What [`RedisConfig::set`] knows.
    pub const KEYS: &'static [&'static str] = &[
        "key",
        "max_len",
        "max_age",
        "format",
        "timeout",
        "connect_timeout",
        "wait_replicas",
        "ca",
        "cert",
        "cert_key",
        "name",
    ];

    /// The defaults, for this server.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            tls: false,
            user: None,
            password: None,
            database: 0,
            key: "{stream}".into(),
            max_len: None,
            max_age: None,
            format: Format::default(),
            formats: Formats::default(),
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            wait_replicas: 0,
            ca: None,
            cert: None,
            cert_key: None,
            name: "airtight".into(),
        }
    }

    /// Reads `redis://[[user]:password@]host[:6379][/DATABASE][?key=value&…]`, or `rediss://` for TLS.
    pub fn from_url(url: &str) -> Result<Self> {
        Self::from_url_with(url, Formats::default())
    }

    /// As [`RedisConfig::from_url`]; the URL, and keys that are set later, may name any of these formats.
    pub fn from_url_with(url: &str, formats: Formats) -> Result<Self> {
        let address = Address::parse(url)?;
        let tls = match address.scheme.as_str() {
            "redis" => false,
            "rediss" => true,
            other => {
                return Err(bad("url", format!("must begin with redis:// or rediss://, found `{other}:`")));
            }
        };
        let (host, port) = address.host(6379)?;
        let mut config = Self { formats, ..Self::new(host, port) };
        config.tls = tls;
        config.database = match address.path().unwrap_or_default().trim_matches('/') {
            "" => 0,
            number => number.parse().map_err(|_| {
                bad(
                    "url",
                    "has a path that is not a database's number; it should look like redis://host:6379/0",
                )
            })?,
        };
        config.user = address.user;
        config.password = address.password.filter(|password| !password.is_empty());
        for (key, value) in &address.query {
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Sets one key of the URL's query or of a config file's table; a permanent error names what is wrong.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "key" => self.key = value.to_owned(),
            "max_len" => self.max_len = Some(number(key, value, 1)?),
            "max_age" => self.max_age = Some(duration(key, value)?),
            "format" => self.format = self.formats.parse(value)?,
            "timeout" => self.timeout = duration(key, value)?,
            "connect_timeout" => self.connect_timeout = duration(key, value)?,
            "wait_replicas" => self.wait_replicas = number(key, value, 0)?,
            "ca" => self.ca = Some(value.into()),
            "cert" => self.cert = Some(value.into()),
            "cert_key" => self.cert_key = Some(value.into()),
            "name" => self.name = value.to_owned(),
            other => return Err(unknown(other, Self::KEYS)),
        }
        Ok(())
    }

    /// Checks everything that can be checked without the server.
    pub(crate) fn check(&self) -> Result<()> {
        if self.host.is_empty() {
            return Err(bad("host", "is empty"));
        }
        for (key, timeout) in [("timeout", self.timeout), ("connect_timeout", self.connect_timeout)] {
            if timeout.as_millis() == 0 || timeout > LONGEST_TIMEOUT {
                return Err(bad(key, "must be between a millisecond and a day"));
            }
        }
        if self.max_age.is_some_and(|age| age.as_millis() == 0) {
            return Err(bad("max_age", "must be at least a millisecond"));
        }
        if self.max_len == Some(0) {
            return Err(bad("max_len", "must be at least 1: with 0 every entry would be removed at once"));
        }
        if self.max_len.is_some() && self.max_age.is_some() {
            return Err(bad("max_age", "cannot be set together with `max_len`: Redis trims by one of them"));
        }
        if self.user.is_some() && self.password.is_none() {
            return Err(bad(
                "url",
                "has a user without a password; it should look like redis://user:password@host",
            ));
        }
        if self.cert.is_some() != self.cert_key.is_some() {
            return Err(bad("cert", "and `cert_key` belong together").with_remedy("set both or neither"));
        }
        if !self.tls && (self.ca.is_some() || self.cert.is_some()) {
            return Err(
                bad("ca", "and `cert` are for TLS").with_remedy("write rediss:// instead of redis://")
            );
        }
        // Redis refuses others in a client's name.
        if !self.name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad("name", "must be printable ASCII without spaces"));
        }
        Ok(())
    }

    /// The server, as much of it as may be shown.
    pub(crate) fn address(&self) -> String {
        let host = &self.host;
        if host.contains(':') { format!("[{host}]:{}", self.port) } else { format!("{host}:{}", self.port) }
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("address", &self.address())
            .field("tls", &self.tls)
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "(hidden)"))
            .field("database", &self.database)
            .field("key", &self.key)
            .field("max_len", &self.max_len)
            .field("max_age", &self.max_age)
            .field("format", &self.format)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("wait_replicas", &self.wait_replicas)
            .field("ca", &self.ca)
            .field("cert", &self.cert)
            .field("cert_key", &self.cert_key)
            .field("name", &self.name)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;

    use super::*;

    #[test]
    fn a_url_says_it_all() {
        let config = RedisConfig::from_url(
            "rediss://app:hunter%402@shop.example:6380/3?key=events.%7Baggregate_type%7D&max_len=1000&format=raw&timeout=500ms&connect_timeout=2m&wait_replicas=1&ca=/etc/ca.pem&cert=c.pem&cert_key=k.pem&name=orders+1",
        )
        .unwrap();
        assert!(config.tls);
        assert_eq!(config.address(), "shop.example:6380");
        assert_eq!((config.user.as_deref(), config.password.as_deref()), (Some("app"), Some("hunter@2")));
        assert_eq!((config.database, config.key.as_str()), (3, "events.{aggregate_type}"));
        assert_eq!((config.max_len, config.format), (Some(1_000), Format::Raw));
        assert_eq!(config.timeout, Duration::from_millis(500));
        assert_eq!(config.connect_timeout, Duration::from_secs(120));
        assert_eq!((config.wait_replicas, config.name.as_str()), (1, "orders+1"));
        assert_eq!(config.ca, Some("/etc/ca.pem".into()));
        config.check().unwrap();

        let config = RedisConfig::from_url("redis://[::1]").unwrap();
        assert_eq!((config.address().as_str(), config.key.as_str()), ("[::1]:6379", "{stream}"));
        let config = RedisConfig::from_url("redis://:hunter2@host?max_age=7d").unwrap();
        assert_eq!((config.user.as_deref(), config.password.as_deref()), (None, Some("hunter2")));
        assert_eq!(config.max_age, Some(Duration::from_secs(604_800)));
    }

    #[test]
    fn a_wrong_config_is_refused_with_the_key_and_without_secrets() {
        for (url, expected) in [
            ("hunter2 no url", "`url` has no `://`"),
            ("http://u:hunter2@host", "found `http:`"),
            ("redis:///0", "names no host"),
            ("redis://u:hunter2@host:port", "`url` has a port that is not a number"),
            ("redis://u:hunter2@host/orders", "not a database's number"),
            ("redis://u:%ff@host", "`password` has a %XX"),
            ("redis://host?keey=x", "`keey` is not a setting of this sink; there are `key`, `max_len`"),
            ("redis://host?max_len=many", "`max_len` must be a whole number of at least 1, found `many`"),
            ("redis://host?max_len=0", "`max_len` must be a whole number of at least 1"),
            ("redis://host?max_len=1&max_age=1d", "`max_age` cannot be set together with"),
            ("redis://host?timeout=10", "`timeout` must be a duration"),
            ("redis://host?timeout=0s", "`timeout` must be a millisecond at least"),
            ("redis://host?connect_timeout=2d", "`connect_timeout` must be between"),
            ("redis://host?max_age=0s", "`max_age` must be a millisecond"),
            ("redis://host?timeout=99999999999999999999d", "`timeout` must be a duration"),
            ("redis://host?format=xml", "unknown format `xml`"),
            ("redis://host?ca=x", "write rediss://"),
            ("rediss://host?cert=x", "belong together"),
            ("redis://host?name=a%20b", "`name` must be printable"),
            ("redis://app@host", "a user without a password"),
        ] {
            let error = RedisConfig::from_url(url).and_then(|config| config.check()).unwrap_err();
            assert!(error.to_string().contains(expected), "{url}: {error} should say {expected}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
            assert_eq!(error.class(), Class::Permanent);
        }
    }

    #[test]
    fn every_key_can_be_set() {
        for key in RedisConfig::KEYS {
            let value = match *key {
                "format" => "raw",
                "timeout" | "connect_timeout" | "max_age" => "1s",
                _ => "1",
            };
            RedisConfig::new("host", 1).set(key, value).unwrap();
        }
    }

    #[test]
    fn debug_tells_no_secrets() {
        let shown = format!("{:?}", RedisConfig::from_url("redis://app:hunter2@host").unwrap());
        assert!(
            shown.contains("host:6379") && shown.contains("app") && !shown.contains("hunter2"),
            "{shown}"
        );
    }
}
