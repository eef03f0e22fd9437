//! What can be configured, and its way into librdkafka's settings. Needs no network.

use std::time::Duration;

use airtight_core::{
    Format, Order, Result,
    settings::{Address, bad, boolean, duration, number, one_of, unknown},
};
use rdkafka::ClientConfig;

use crate::{KafkaConfig, KafkaConnection, config::FORMATS, connection::refused, encode::check_topic};

/// Settings that are airtight's promises, and what they are.
const FIXED: [(&str, &str); 4] = [
    // Offsets move when events are settled, and at no other time.
    ("enable.auto.commit", "false"),
    ("enable.auto.offset.store", "false"),
    // A place that is gone is an error. Where a group begins is decided at the assignment.
    ("auto.offset.reset", "error"),
    ("enable.partition.eof", "false"),
];

/// Other names of these.
const REFUSED: [&str; 4] =
    ["auto.commit.enable", "offset.store.method", "auto.commit.interval.ms", "group.remote.assignor"];

/// Where a group begins that has no offsets yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// With the oldest message that there is.
    #[default]
    Earliest,
    /// With the first one that is written after the group has begun.
    Latest,
}

/// Where an event waits that is to be tried again.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Retry {
    /// In memory: later events of its key wait behind it, and so does the partition's offset. Attempts are counted in
    /// memory as well: they begin anew when the partition goes to another member or the process ends.
    #[default]
    InPlace,
    /// In this topic, which the source reads as well, with its attempts, the time at which it is due, its error and
    /// its origin as headers. Others of its key overtake it, so it needs [`Order::None`].
    Topic(String),
}

/// What to read, as whom, and what to do with what cannot be handled. Checked by [`crate::KafkaSource::new`].
#[derive(Debug, Clone)]
pub struct KafkaSourceConfig {
    /// The cluster.
    pub connection: KafkaConnection,
    /// The topics.
    pub topics: Vec<String>,
    /// The consumer group. Its members share the partitions.
    pub group: String,
    /// What the messages are ([`Format::Envelope`]).
    pub format: Format,
    /// Which order is kept ([`Order::Key`]). There is no [`Order::Total`]: Kafka has an order within a partition only.
    pub order: Order,
    /// Where a new group begins ([`Start::Earliest`]).
    pub start: Start,
    /// Where events wait for their next attempt ([`Retry::InPlace`]).
    pub retry: Retry,
    /// Where dead events go (`{topic}.{group}.dead`). None: the source halts at the first one rather than skip it.
    pub dead_letter_topic: Option<String>,
    /// Creates the dead-letter topics and the retry topic if they are missing (false). Brokers that create topics by
    /// themselves do so in any case.
    pub create: bool,
    /// How often offsets are committed (500 ms). What was settled since then comes again after a crash.
    pub commit_interval: Duration,
    /// How long a partition that goes to another member waits for what is being handled (10 s).
    pub handover: Duration,
    /// How far a partition is read past its first unsettled event (100,000).
    pub max_ahead: u64,
    /// The most events in memory (10,000).
    pub buffer_events: usize,
    /// The most bytes in memory, though always at least one event (64 MiB). librdkafka holds up to
    /// `queued.max.messages.kbytes` beside them (16 MiB).
    pub buffer_bytes: usize,
    /// How long writing a dead letter or a retry may take (30 s).
    pub timeout: Duration,
}

impl KafkaSourceConfig {
    /// The keys that [`KafkaSourceConfig::set`] knows; a key with a dot in it is a setting of librdkafka.
    pub const KEYS: &'static [&'static str] = &[
        "topics",
        "group",
        "format",
        "order",
        "start",
        "retry_topic",
        "dead_letter_topic",
        "create",
        "commit_interval",
        "handover",
        "max_ahead",
        "buffer_events",
        "buffer_bytes",
        "timeout",
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

    /// The defaults, for this cluster.
    pub fn new(
        connection: KafkaConnection,
        topics: impl IntoIterator<Item = impl Into<String>>,
        group: impl Into<String>,
    ) -> Self {
        Self {
            connection,
            topics: topics.into_iter().map(Into::into).collect(),
            group: group.into(),
            format: Format::default(),
            order: Order::Key,
            start: Start::Earliest,
            retry: Retry::InPlace,
            dead_letter_topic: Some("{topic}.{group}.dead".into()),
            create: false,
            commit_interval: Duration::from_millis(500),
            handover: Duration::from_secs(10),
            max_ahead: 100_000,
            buffer_events: 10_000,
            buffer_bytes: 64 << 20,
            timeout: Duration::from_secs(30),
        }
    }

    /// Reads `kafka://[USER:PASSWORD@]HOST:PORT[,HOST:PORT]/TOPIC[,TOPIC]?group=NAME[&KEY=VALUE…]`, and
    /// `kafka+tls://…`.
    pub fn from_url(url: &str) -> Result<Self> {
        let address = Address::parse(url)?;
        let mut config = Self::new(KafkaConnection::from_address(&address)?, [""; 0], "");
        if let Some(topics) = address.path() {
            config.set("topics", &topics)?;
        }
        for (key, value) in &address.query {
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Sets one key, as in the query of a URL.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "topics" => self.topics = value.split(',').map(|topic| topic.trim().to_owned()).collect(),
            "group" => self.group = value.to_owned(),
            "format" => self.format = FORMATS.parse(value)?,
            "order" => {
                self.order = one_of(key, value, &[("key", Order::Key), ("none", Order::None)])?;
            }
            "start" => {
                let known = [("earliest", Start::Earliest), ("latest", Start::Latest)];
                self.start = one_of(key, value, &known)?;
            }
            "retry_topic" => self.retry = Retry::Topic(value.to_owned()),
            "dead_letter_topic" => {
                self.dead_letter_topic = Some(value.to_owned()).filter(|value| value != "none");
            }
            "create" => self.create = boolean(key, value)?,
            "commit_interval" => self.commit_interval = duration(key, value)?,
            "handover" => self.handover = duration(key, value)?,
            "max_ahead" => self.max_ahead = number(key, value, 1)?,
            "buffer_events" => self.buffer_events = number(key, value, 1)?,
            "buffer_bytes" => self.buffer_bytes = number(key, value, 1)?,
            "timeout" => self.timeout = duration(key, value)?,
            other => {
                if !self.connection.set(other, value)? {
                    return Err(unknown(other, Self::KEYS));
                }
            }
        }
        Ok(())
    }

    /// The topic for the dead of another.
    pub(crate) fn dead_letter_topic_of(&self, topic: &str) -> Option<String> {
        let template = self.dead_letter_topic.as_ref()?;
        Some(template.replace("{topic}", topic).replace("{group}", &self.group))
    }

    pub(crate) fn retry_topic(&self) -> Option<&str> {
        match &self.retry {
            Retry::InPlace => None,
            Retry::Topic(topic) => Some(topic),
        }
    }

    /// Everything that is read.
    pub(crate) fn subscription(&self) -> Vec<&str> {
        self.topics.iter().map(String::as_str).chain(self.retry_topic()).collect()
    }

    /// Refuses what can never work.
    fn check(&self) -> Result<()> {
        if self.topics.is_empty() {
            return Err(bad("topics", "is missing: kafka://HOST:PORT/TOPIC?group=NAME"));
        }
        if self.group.is_empty() {
            return Err(bad("group", "is missing: kafka://HOST:PORT/TOPIC?group=NAME"));
        }
        for topic in self.topics.iter().map(String::as_str) {
            is_topic("topics", topic)?;
            if let Some(dead) = self.dead_letter_topic_of(topic) {
                is_topic("dead_letter_topic", &dead)?;
                if self.subscription().contains(&dead.as_str()) {
                    let what = format!(
                        "must not be a topic that the source reads, or dead events would be read again: `{dead}`"
                    );
                    return Err(bad("dead_letter_topic", what));
                }
            }
        }
        if let Some(retry) = self.retry_topic() {
            is_topic("retry_topic", retry)?;
            if self.topics.iter().any(|topic| topic == retry) {
                return Err(bad("retry_topic", "must be a separate topic that nothing else writes to"));
            }
            if self.order != Order::None {
                let error = bad("retry_topic", "gives up the order of events");
                return Err(error.with_remedy("set `order` to `none`, or retry in place"));
            }
        }
        if self.order == Order::Total {
            return Err(bad("order", "must be `key` or `none`: Kafka has an order within a partition only"));
        }
        for (key, given) in [
            ("commit_interval", self.commit_interval),
            ("handover", self.handover),
            ("timeout", self.timeout),
        ] {
            if given.is_zero() {
                return Err(bad(key, "must be longer than zero"));
            }
        }
        for key in self.connection.settings.keys() {
            if FIXED.iter().any(|(fixed, _)| fixed == key) || REFUSED.contains(&key.as_str()) {
                return Err(bad(key, "is set by airtight itself").with_remedy("remove it"));
            }
        }
        Ok(())
    }

    /// librdkafka's settings for the consumer.
    pub(crate) fn consumer_config(&self) -> Result<ClientConfig> {
        self.check()?;
        let mut defaults = vec![
            ("check.crcs", "true"),
            // What librdkafka fetches ahead counts beside our own bounds: keep it small, and look often whether there
            // is room again.
            ("queued.min.messages", "10000"),
            ("queued.max.messages.kbytes", "16384"),
            ("fetch.max.bytes", "8388608"),
            ("fetch.queue.backoff.ms", "20"),
            // A partition that is taken up or resumed joins the next request.
            ("fetch.wait.max.ms", "100"),
        ];
        // With the protocol of KIP-848 the broker assigns.
        let by_broker = self.connection.settings.get("group.protocol").is_some_and(|word| word == "consumer");
        if !by_broker {
            defaults.push(("partition.assignment.strategy", "cooperative-sticky"));
        }
        let mut config = self.connection.client_config(&defaults)?;
        config.set("group.id", &self.group);
        for (key, value) in FIXED {
            config.set(key, value);
        }
        config.create_native_config().map_err(|error| refused(&error))?;
        Ok(config)
    }

    /// How long a member may be silent before the broker gives its partitions away.
    pub(crate) fn session(&self) -> Duration {
        let set = self.connection.settings.get("session.timeout.ms").and_then(|value| value.parse().ok());
        Duration::from_millis(set.unwrap_or(45_000))
    }

    /// How dead letters and retries are written.
    pub(crate) fn letters_config(&self) -> KafkaConfig {
        let mut config = KafkaConfig::with(self.connection.clone());
        config.create = self.create;
        config.timeout = self.timeout;
        // The original may have been compressed, and must fit again with a few headers more.
        config.compression = "lz4".into();
        config.max_message_bytes = 1_000_000_000;
        // There are few, so none of them need hurry: see `open_partitions`.
        let settings = &mut config.connection.settings;
        settings.remove("max.in.flight");
        settings.insert("max.in.flight.requests.per.connection".into(), "1".into());
        config
    }
}

fn is_topic(key: &str, name: &str) -> Result<()> {
    check_topic(name).map_err(|error| bad(key, format!("cannot be used: {error}")))
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;

    use super::*;

    #[test]
    fn an_address_says_it_all() {
        let config = KafkaSourceConfig::from_url(
            "kafka+tls://me:s%3Acret@a:1,b:2/orders,payments?group=billing&format=event&start=latest&order=none&retry_topic=billing.retry&dead_letter_topic=dead.{topic}&max_ahead=5&fetch.wait.max.ms=7",
        )
        .unwrap();
        assert_eq!(config.topics, ["orders", "payments"]);
        assert_eq!(config.subscription(), ["orders", "payments", "billing.retry"]);
        assert_eq!((config.start, config.format, config.max_ahead), (Start::Latest, Format::Event, 5));
        assert_eq!(config.dead_letter_topic_of("orders").unwrap(), "dead.orders");
        let settings = config.consumer_config().unwrap();
        for (key, value) in [
            ("bootstrap.servers", "a:1,b:2"),
            ("security.protocol", "sasl_ssl"),
            ("group.id", "billing"),
            ("enable.auto.commit", "false"),
            ("auto.offset.reset", "error"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("fetch.wait.max.ms", "7"),
        ] {
            assert_eq!(settings.get(key), Some(value), "{key}");
        }
        assert!(!format!("{config:?}").contains("s:cret"));
        let plain = KafkaSourceConfig::from_url("kafka://h:1/t?group=g").unwrap();
        assert_eq!(plain.dead_letter_topic_of("t").unwrap(), "t.g.dead");
        let none = KafkaSourceConfig::from_url("kafka://h:1/t?group=g&dead_letter_topic=none").unwrap();
        assert_eq!(none.dead_letter_topic_of("t"), None);
    }

    #[test]
    fn a_wrong_config_is_refused_with_the_key_and_without_secrets() {
        for (url, expected) in [
            ("http://h:1/t?group=g", "must begin with kafka://"),
            ("kafka://h:1?group=g", "`topics` is missing"),
            ("kafka://h:1/t", "`group` is missing"),
            ("kafka://h:1/a b?group=g", "`topics` cannot be used: the topic `a b` holds"),
            ("kafka://h:1/t?group=a%20b", "`dead_letter_topic` cannot be used: the topic `t.a b.dead` holds"),
            ("kafka://h:1/t?group=g&dead_letter_topic={tpic}", "the topic `{tpic}` holds"),
            ("kafka://h:1/t?group=g&dead_letter_topic=t", "would be read again"),
            ("kafka://h:1/t?group=g&retry_topic=r", "gives up the order"),
            ("kafka://h:1/t?group=g&retry_topic=t&order=none", "a separate topic"),
            ("kafka://h:1/t?group=g&order=total", "`order` must be `key` or `none`"),
            ("kafka://h:1/t?group=g&start=now", "`start` must be"),
            ("kafka://h:1/t?group=g&grup=x", "`grup` is not a setting"),
            ("kafka://h:1/t?group=g&auto.offset.reset=latest", "set by airtight itself"),
            ("kafka://h:1/t?group=g&enable.auto.commit=true", "set by airtight itself"),
            ("kafka://h:1/t?group=g&session.timeout.ms=hunter2", "a value that librdkafka refuses"),
            ("kafka://h:1/t?group=g&handover=0s", "`handover` must be a millisecond at least"),
        ] {
            let config =
                KafkaSourceConfig::from_url(url).and_then(|config| config.consumer_config().map(drop));
            let error = config.expect_err(url);
            assert!(error.to_string().contains(expected), "{url}: {error}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
            assert_eq!(error.class(), Class::Permanent);
        }
    }
}
