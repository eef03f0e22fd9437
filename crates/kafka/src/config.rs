//! What can be configured about the sink, and its way into librdkafka's settings. Needs no network.

use std::time::Duration;

use airtight_core::{
    Format, Result,
    format::Formats,
    settings::{Address, bad, boolean, duration, number, unknown},
};
use airtight_debezium::{Converter, Converters, DebeziumOptions, FORMAT, RegexRoute};
use rdkafka::ClientConfig;

use crate::{
    connection::{FIXED, KafkaConnection, refused},
    route::Route,
};

/// librdkafka's word for what Java's clients, Debezium among them, do.
const PARTITIONER: &str = "murmur2_random";

/// What may be named as a format.
pub(crate) const FORMATS: Formats = Formats::with(&[FORMAT]);

/// How many calls of the sink run side by side, and how much is in each.
pub(crate) const CALLS: usize = 4;
pub(crate) const BATCH_EVENTS: usize = 1_000;
pub(crate) const BATCH_BYTES: usize = 8 << 20;

/// Where to send events, and how. Checked by [`crate::KafkaSink::new`].
#[derive(Debug, Clone)]
pub struct KafkaConfig {
    /// The cluster.
    pub connection: KafkaConnection,
    /// The topic of each event; none is `{stream}` and, with the format [`FORMAT`], what `debezium.route.…` says.
    pub topic: Option<Route>,
    /// What the message is ([`Format::Envelope`]).
    pub format: Format,
    /// The options of Debezium's outbox event router, for the format [`FORMAT`].
    pub debezium: DebeziumOptions,
    /// How keys, values and headers are written, for the format [`FORMAT`].
    pub converters: Converters,
    /// Writes a delete as a message without a value, which a compacted topic takes for the end of its key (true).
    pub tombstones: bool,
    /// Gives messages the time at which their event happened, not that at which they are sent (false).
    pub event_time: bool,
    /// Creates a topic that is missing (false). Brokers that create topics by themselves do so in any case.
    pub create: bool,
    /// With so many partitions; as the broker likes where there is none.
    pub create_partitions: Option<i32>,
    /// On so many brokers; as the broker likes where there is none.
    pub create_replication: Option<i32>,
    /// `none`, `gzip`, `snappy`, `lz4` or `zstd` (`none`).
    pub compression: String,
    /// How long nothing at all may be acknowledged before what is under way counts as undelivered (30 s).
    pub timeout: Duration,
    /// The largest message that is sent at all; the broker has a limit of its own (32 MiB).
    pub max_message_bytes: usize,
}

impl KafkaConfig {
    /// The keys that [`KafkaConfig::set`] knows, those of the connection included; a key with a dot in it is an option of
    /// Debezium's router, if it begins with `debezium.`, or a setting of librdkafka.
    pub const KEYS: &'static [&'static str] = &[
        "topic",
        "topic_by",
        "topic_regex",
        "topic_replacement",
        "format",
        "key_converter",
        "value_converter",
        "header_converter",
        "tombstones",
        "event_time",
        "create",
        "create_partitions",
        "create_replication",
        "compression",
        "timeout",
        "max_message_bytes",
        "tls",
        "ca",
        "cert",
        "cert_key",
        "sasl",
        "user",
        "password",
        "name",
        "connect_timeout",
    ];

    /// The defaults, for these brokers: the envelope, to a topic named as the stream.
    pub fn new(brokers: impl Into<String>) -> Self {
        Self::with(KafkaConnection::new(brokers))
    }

    /// The defaults, for this cluster.
    pub fn with(connection: KafkaConnection) -> Self {
        Self {
            connection,
            topic: None,
            format: Format::default(),
            debezium: DebeziumOptions::default(),
            converters: Converters::default(),
            tombstones: true,
            event_time: false,
            create: false,
            create_partitions: None,
            create_replication: None,
            compression: "none".into(),
            timeout: Duration::from_secs(30),
            max_message_bytes: 32 << 20,
        }
    }

    /// Reads `kafka://[USER:PASSWORD@]HOST:PORT[,HOST:PORT][/TOPIC][?KEY=VALUE&…]`, and `kafka+tls://…`.
    pub fn from_url(url: &str) -> Result<Self> {
        let address = Address::parse(url)?;
        let mut config = Self::with(KafkaConnection::from_address(&address)?);
        if let Some(topic) = address.path() {
            config.topic = Some(Route::template(&topic)?);
        }
        config.set_all(&address.query)?;
        Ok(config)
    }

    /// Sets several keys. Those of a regex route stand together, so they are read together.
    pub fn set_all(&mut self, pairs: &[(String, String)]) -> Result<()> {
        let of = |key: &str| pairs.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str());
        let (by, regex, replacement) = (of("topic_by"), of("topic_regex"), of("topic_replacement"));
        if by.is_some() || regex.is_some() || replacement.is_some() {
            if of("topic").is_some() {
                return Err(bad("topic", "and a topic regex are two ways to say where events go")
                    .with_remedy("keep one"));
            }
            self.topic = Some(Route::Regex(Box::new(RegexRoute::new(
                by.unwrap_or("{aggregate_type}"),
                regex.unwrap_or(RegexRoute::REGEX),
                replacement.unwrap_or(RegexRoute::REPLACEMENT),
            )?)));
        }
        for (key, value) in pairs {
            if !["topic_by", "topic_regex", "topic_replacement"].contains(&key.as_str()) {
                self.set(key, value)?;
            }
        }
        Ok(())
    }

    /// Sets one key, as in the query of a URL; see [`KafkaConfig::KEYS`].
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "topic" => self.topic = Some(Route::template(value)?),
            "topic_by" | "topic_regex" | "topic_replacement" => {
                return self.set_all(&[(key.to_owned(), value.to_owned())]);
            }
            "format" => self.format = FORMATS.parse(value)?,
            "key_converter" => self.converters.key = Converter::parse(key, value)?,
            "value_converter" => self.converters.value = Converter::parse(key, value)?,
            "header_converter" => self.converters.header = Converter::parse(key, value)?,
            "tombstones" => self.tombstones = boolean(key, value)?,
            "event_time" => self.event_time = boolean(key, value)?,
            "create" => self.create = boolean(key, value)?,
            "create_partitions" => self.create_partitions = Some(number(key, value, 1)?),
            "create_replication" => self.create_replication = Some(number(key, value, 1)?),
            "compression" => self.compression = value.to_owned(),
            "timeout" => self.timeout = duration(key, value)?,
            "max_message_bytes" => self.max_message_bytes = number(key, value, 1_000)?,
            other => {
                if let Some(option) = other.strip_prefix("debezium.") {
                    return self.debezium.set(option, value).map_err(|error| error.context("debezium"));
                }
                if !self.connection.set(other, value)? {
                    return Err(unknown(other, Self::KEYS));
                }
            }
        }
        Ok(())
    }

    /// Whether keys are put where Java's clients put them, so that their partition is known before they are sent.
    pub(crate) fn knows_partitions(&self) -> bool {
        self.connection.settings.get("partitioner").is_none_or(|word| word == PARTITIONER)
    }

    /// The relay bounds what is under way: calls side by side, and events and bytes in each. With less room than that,
    /// librdkafka would refuse what it should send.
    fn check_queue(&self) -> Result<()> {
        let bytes = CALLS * self.max_message_bytes.max(BATCH_BYTES);
        for (key, least) in [
            ("queue.buffering.max.messages", CALLS * BATCH_EVENTS),
            ("queue.buffering.max.kbytes", bytes / 1_024),
        ] {
            let set = self.connection.settings.get(key).and_then(|value| value.parse::<usize>().ok());
            // Zero is "without a limit" for messages.
            if let Some(set) = set.filter(|set| *set > 0 && *set < least) {
                let what = format!("is {set}, less than the {least} that the relay may have under way");
                return Err(bad(key, what).with_remedy("remove the setting, or raise it"));
            }
        }
        Ok(())
    }

    /// librdkafka's settings for the producer, with batches of at most `batch_bytes`.
    pub(crate) fn producer_config(&self, batch_bytes: usize) -> Result<ClientConfig> {
        const COMPRESSIONS: [&str; 5] = ["none", "gzip", "snappy", "lz4", "zstd"];
        if !COMPRESSIONS.contains(&self.compression.as_str()) {
            let what = format!("must be one of {}, found `{}`", COMPRESSIONS.join(", "), self.compression);
            return Err(bad("compression", what));
        }
        if self.timeout.is_zero() {
            return Err(bad("timeout", "must be longer than zero"));
        }
        self.check_queue()?;
        let (batch_bytes, max_bytes) = (batch_bytes.to_string(), self.max_message_bytes.to_string());
        let mut config = self.connection.client_config(&[
            ("partitioner", PARTITIONER),
            // A batch is handed over whole, so there is nobody to wait for; a moment lets it fill its requests.
            ("linger.ms", "1"),
            ("compression.type", &self.compression),
            ("batch.size", &batch_bytes),
            ("message.max.bytes", &max_bytes),
            // The relay bounds what is under way; these only must not be smaller.
            ("queue.buffering.max.messages", "1000000"),
            ("queue.buffering.max.kbytes", "1048576"),
            ("retry.backoff.max.ms", "1000"),
        ])?;
        for (key, value) in FIXED {
            if !value.is_empty() {
                config.set(key, value);
            }
        }
        if !self.knows_partitions() {
            // See `open_partitions`: where the partition is not known beforehand, messages are sent one after the other.
            config.remove("max.in.flight");
            config.set("max.in.flight.requests.per.connection", "1");
        }
        config.create_native_config().map_err(|error| refused(&error))?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;
    use airtight_testkit::deliveries::sample_event;

    use super::*;

    #[test]
    fn an_address_says_it_all() {
        let config = KafkaConfig::from_url(
            "kafka+tls://me:s%3Acret@a:9092,b:9093/ivm.events.{aggregate_type}?format=event&sasl=scram-sha-512&create=true&create_partitions=6&compression=lz4&linger.ms=20",
        )
        .unwrap();
        let topic = config.topic.as_ref().unwrap();
        assert_eq!(topic.render(&sample_event(1, "k")).unwrap(), "ivm.events.Test");
        assert_eq!((config.format, config.create, config.create_partitions), (Format::Event, true, Some(6)));
        let settings = config.producer_config(1_000_000).unwrap();
        for (key, value) in [
            ("bootstrap.servers", "a:9092,b:9093"),
            ("security.protocol", "sasl_ssl"),
            ("sasl.mechanism", "SCRAM-SHA-512"),
            ("sasl.username", "me"),
            ("sasl.password", "s:cret"),
            ("compression.type", "lz4"),
            ("linger.ms", "20"),
            ("acks", "all"),
            ("enable.gapless.guarantee", "true"),
            ("message.timeout.ms", "0"),
        ] {
            assert_eq!(settings.get(key), Some(value), "{key}");
        }
        assert!(!format!("{config:?}").contains("s:cret"));
    }

    /// See `open_partitions`.
    #[test]
    fn where_partitions_are_not_known_requests_go_one_by_one() {
        const IN_FLIGHT: &str = "max.in.flight.requests.per.connection";
        for (query, expected) in [
            ("", None),
            ("?partitioner=murmur2_random", None),
            ("?partitioner=consistent", Some("1")),
            ("?partitioner=fnv1a&max.in.flight=5", Some("1")),
        ] {
            let mut config = KafkaConfig::new("h:1");
            // Names without a dot are no keys of an address.
            for pair in query.trim_start_matches('?').split('&').filter_map(|pair| pair.split_once('=')) {
                config.connection.settings.insert(pair.0.into(), pair.1.into());
            }
            let settings = config.producer_config(1_000_000).unwrap();
            assert_eq!((settings.get(IN_FLIGHT), settings.get("max.in.flight")), (expected, None), "{query}");
            assert_eq!(config.knows_partitions(), expected.is_none(), "{query}");
        }
    }

    #[test]
    fn debeziums_route_can_be_written_as_it_is() {
        let url = "kafka://h:1?topic_by={aggregate_type}&topic_replacement=ivm.events.${routedByValue}";
        let config = KafkaConfig::from_url(url).unwrap();
        assert_eq!(config.topic.unwrap().render(&sample_event(1, "k")).unwrap(), "ivm.events.Test");
    }

    #[test]
    fn a_wrong_config_is_refused_with_the_key_and_without_secrets() {
        for (url, expected) in [
            ("kafka:/hunter2", "has no `://`"),
            ("http://h:1", "must begin with kafka://"),
            ("kafka://", "must name brokers as host:port"),
            ("kafka://h:hunter2", "must name brokers as host:port"),
            ("kafka://h:1/{nope}", "unknown field `{nope}`"),
            ("kafka://h:1?topc=x", "`topc` is not a setting"),
            ("kafka://h:1?format=xml", "unknown format `xml`"),
            ("kafka://h:1?value_converter=avro", "`value_converter` must be `simple` or `string`"),
            ("kafka://h:1?debezium.route.by=x", "did you mean `route.by.field`?"),
            ("kafka://h:1?acks=1", "`acks` is not a setting"),
            ("kafka://h:1?enable.idempotence=false", "always `true`"),
            ("kafka://h:1?message.timeout.ms=5", "always `0`"),
            ("kafka://h:1?group.id=x", "set by airtight itself"),
            ("kafka://h:1?no.such.thing=hunter2", "`no.such.thing` is not a setting of librdkafka"),
            ("kafka://h:1?linger.ms=hunter2", "`linger.ms` has a value that librdkafka refuses"),
            ("kafka://h:1?compression=rar", "`compression` must be one of"),
            ("kafka://h:1?sasl=kerberos", "`sasl` must be one of"),
            ("kafka://h:1?password=hunter2", "without a `user`"),
            ("kafka://h:1?ca=/nowhere", "needs TLS"),
            ("kafka+tls://h:1?cert=/nowhere", "belong together"),
            ("kafka+tls://h:1?topic_regex=(&create=true", "cannot be used"),
            ("kafka://h:1/a?topic=b&topic_regex=.*", "two ways"),
            ("kafka://h:1?timeout=5", "`timeout` must be a duration"),
        ] {
            let config =
                KafkaConfig::from_url(url).and_then(|config| config.producer_config(1_000).map(drop));
            let error = config.expect_err(url);
            assert!(error.to_string().contains(expected), "{url}: {error}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
            assert_eq!(error.class(), Class::Permanent);
        }
    }
}
