//! How to reach a cluster, and its way into librdkafka's settings. Needs no network.
//!
//! Secrets go in here and never come out in words: neither `Debug` nor an error shows a password, nor the value of a
//! librdkafka setting, which may be one.

use std::{collections::BTreeMap, fmt, time::Duration};

use airtight_core::{
    Code, Error, Result,
    settings::{Address, bad, boolean, duration},
};
use rdkafka::{ClientConfig, error::KafkaError};

/// Settings that are airtight's promises. Setting one of them to anything else would break one.
pub(crate) const FIXED: [(&str, &str); 8] = [
    ("enable.idempotence", "true"),
    ("acks", "all"),
    // A message that librdkafka gave up on must not be overtaken by a later one of its key.
    ("enable.gapless.guarantee", "true"),
    ("message.timeout.ms", "0"),
    ("retries", "2147483647"),
    ("message.send.max.retries", "2147483647"),
    ("delivery.report.only.error", "false"),
    ("transactional.id", ""),
];

/// Other names of these, and what belongs to the other side.
const REFUSED: [&str; 8] = [
    "request.required.acks",
    "delivery.timeout.ms",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "group.id",
    "bootstrap.servers",
    "metadata.broker.list",
    "queuing.strategy",
];

/// How to reach a cluster, for a sink and for a source alike.
#[derive(Clone, PartialEq, Eq)]
pub struct KafkaConnection {
    /// `host:port`, several with commas between.
    pub brokers: String,
    /// Speaks TLS.
    pub tls: bool,
    /// A file with the certificates of the authorities to trust, in PEM; the system's where there is none.
    pub ca: Option<String>,
    /// A file with the client's own certificate, in PEM.
    pub cert: Option<String>,
    /// A file with its key, in PEM.
    pub cert_key: Option<String>,
    /// How to log in.
    pub sasl: Option<Sasl>,
    /// Who logs in.
    pub user: Option<String>,
    /// With which password.
    pub password: Option<String>,
    /// How the broker's logs call this client.
    pub name: String,
    /// How long the cluster may take to answer at all (5 s).
    pub connect_timeout: Duration,
    /// Any further settings of librdkafka, which knows about two hundred.
    pub settings: BTreeMap<String, String>,
}

/// A SASL mechanism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sasl {
    /// `PLAIN`: the password as it is, so better over TLS.
    Plain,
    /// `SCRAM-SHA-256`.
    ScramSha256,
    /// `SCRAM-SHA-512`.
    ScramSha512,
    /// `OAUTHBEARER`, with the `sasl.oauthbearer.*` settings of librdkafka; `sasl.oauthbearer.method = "oidc"` gets
    /// tokens from an identity provider.
    OAuthBearer,
}

impl Sasl {
    const WORDS: [(&str, Self, &str); 4] = [
        ("plain", Self::Plain, "PLAIN"),
        ("scram-sha-256", Self::ScramSha256, "SCRAM-SHA-256"),
        ("scram-sha-512", Self::ScramSha512, "SCRAM-SHA-512"),
        ("oauthbearer", Self::OAuthBearer, "OAUTHBEARER"),
    ];

    fn parse(word: &str) -> Result<Self> {
        let found = Self::WORDS.iter().find(|(known, ..)| known.eq_ignore_ascii_case(word));
        found.map(|(_, sasl, _)| *sasl).ok_or_else(|| {
            let known: Vec<String> = Self::WORDS.iter().map(|(word, ..)| format!("`{word}`")).collect();
            bad("sasl", format!("must be one of {}, found `{word}`", known.join(", ")))
        })
    }

    fn mechanism(self) -> &'static str {
        Self::WORDS.iter().find(|(_, sasl, _)| *sasl == self).map_or("PLAIN", |(.., name)| name)
    }
}

impl KafkaConnection {
    /// The keys that an address or a config may set; a key with a dot in it is a setting of librdkafka.
    pub const KEYS: &'static [&'static str] =
        &["tls", "ca", "cert", "cert_key", "sasl", "user", "password", "name", "connect_timeout"];

    /// The defaults, for these brokers.
    pub fn new(brokers: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            tls: false,
            ca: None,
            cert: None,
            cert_key: None,
            sasl: None,
            user: None,
            password: None,
            name: "airtight".into(),
            connect_timeout: Duration::from_secs(5),
            settings: BTreeMap::new(),
        }
    }

    /// From the parts of an address that say how to connect: `kafka://` or `kafka+tls://`.
    pub(crate) fn from_address(address: &Address) -> Result<Self> {
        let mut connection = Self::new(&address.hosts);
        connection.tls = match address.scheme.as_str() {
            "kafka" => false,
            "kafka+tls" => true,
            other => {
                return Err(bad(
                    "url",
                    format!("must begin with kafka:// or kafka+tls://, found `{other}://`"),
                ));
            }
        };
        connection.user.clone_from(&address.user);
        connection.password.clone_from(&address.password);
        Ok(connection)
    }

    /// Sets a key; returns whether it is one of these.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<bool> {
        match key {
            "tls" => self.tls = boolean(key, value)?,
            "ca" => self.ca = Some(value.to_owned()),
            "cert" => self.cert = Some(value.to_owned()),
            "cert_key" => self.cert_key = Some(value.to_owned()),
            "sasl" => self.sasl = Some(Sasl::parse(value)?),
            "user" => self.user = Some(value.to_owned()),
            "password" => self.password = Some(value.to_owned()),
            "name" => self.name = value.to_owned(),
            "connect_timeout" => self.connect_timeout = duration(key, value)?,
            dotted if dotted.contains('.') => {
                self.settings.insert(dotted.to_owned(), value.to_owned());
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// librdkafka's settings for this connection, the caller's own on top of `defaults`.
    pub(crate) fn client_config(&self, defaults: &[(&str, &str)]) -> Result<ClientConfig> {
        self.check()?;
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", &self.name)
            .set("socket.keepalive.enable", "true")
            // A broker that is back is noticed within a second, at the price of one attempt a second.
            .set("reconnect.backoff.ms", "50")
            .set("reconnect.backoff.max.ms", "1000");
        for (key, value) in defaults {
            config.set(*key, *value);
        }
        let sasl = self.sasl.or(self.user.is_some().then_some(Sasl::Plain));
        let protocol = match (self.tls, sasl) {
            (false, None) => "plaintext",
            (true, None) => "ssl",
            (false, Some(_)) => "sasl_plaintext",
            (true, Some(_)) => "sasl_ssl",
        };
        config.set("security.protocol", protocol);
        if let Some(sasl) = sasl {
            config.set("sasl.mechanism", sasl.mechanism());
        }
        for (key, value) in [
            ("sasl.username", &self.user),
            ("sasl.password", &self.password),
            ("ssl.ca.location", &self.ca),
            ("ssl.certificate.location", &self.cert),
            ("ssl.key.location", &self.cert_key),
        ] {
            if let Some(value) = value {
                config.set(key, value);
            }
        }
        for (key, value) in &self.settings {
            config.set(key, value);
        }
        // Files are read and names are checked here, without a connection.
        config.create_native_config().map_err(|error| refused(&error))?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let is_one = |broker: &str| {
            let port = broker.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>()));
            matches!(port, None | Some((_, Ok(_)))) && !broker.trim().is_empty() && !broker.starts_with(':')
        };
        if !self.brokers.split(',').all(is_one) {
            // They are not repeated: a password that was not encoded may have ended up here.
            return Err(bad("url", "must name brokers as host:port, separated by commas"));
        }
        if self.connect_timeout.is_zero() {
            return Err(bad("connect_timeout", "must be longer than zero"));
        }
        if self.password.is_some() && self.user.is_none() {
            return Err(bad("password", "is given without a `user`"));
        }
        if self.cert.is_some() != self.cert_key.is_some() {
            return Err(bad("cert", "and `cert_key` belong together").with_remedy("give both or neither"));
        }
        for (key, given) in [("ca", &self.ca), ("cert", &self.cert)] {
            if given.is_some() && !self.tls {
                return Err(bad(key, "needs TLS").with_remedy("write kafka+tls://, or set `tls` to true"));
            }
        }
        for (key, file) in [("ca", &self.ca), ("cert", &self.cert), ("cert_key", &self.cert_key)] {
            if let Some(file) = file {
                let read = std::fs::read(file);
                read.map_err(|error| {
                    bad(key, format!("names the file `{file}`, which cannot be read: {error}"))
                })?;
            }
        }
        for key in self.settings.keys() {
            if let Some((_, value)) = FIXED.iter().find(|(fixed, _)| fixed == key) {
                return Err(bad(key, format!("is always `{value}`: airtight's promises depend on it")));
            }
            if REFUSED.contains(&key.as_str()) {
                return Err(bad(key, "is set by airtight itself").with_remedy("remove it"));
            }
        }
        Ok(())
    }
}

/// Without values: librdkafka's own words repeat them.
pub(crate) fn refused(error: &KafkaError) -> Error {
    match error {
        KafkaError::ClientConfig(_, why, key, _) => {
            // `No such configuration property: "x"`, `Invalid value "x" for configuration property "y"`.
            let unknown = why.contains("No such configuration property");
            let why = if unknown {
                "is not a setting of librdkafka"
            } else {
                "has a value that librdkafka refuses"
            };
            bad(key, why)
        }
        KafkaError::ClientCreation(why) => {
            Error::permanent(Code::BAD_CONFIG, format!("the Kafka client cannot be set up: {why}"))
        }
        other => Error::permanent(Code::BAD_CONFIG, format!("the Kafka client cannot be set up: {other}")),
    }
}

impl fmt::Debug for KafkaConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaConnection")
            .field("brokers", &self.brokers)
            .field("tls", &self.tls)
            .field("ca", &self.ca)
            .field("cert", &self.cert)
            .field("sasl", &self.sasl)
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "•••"))
            .field("name", &self.name)
            .field("settings", &self.settings.keys())
            .finish_non_exhaustive()
    }
}
