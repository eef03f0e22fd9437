//! Turns a config into checked types. Needs no network.

use std::time::Duration;

use airtight_core::{Result, format::Format, route::Template, settings::bad};
use lapin::{
    ExchangeKind,
    tcp::OwnedTLSConfig,
    types::{FieldTable, ShortString},
    uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo},
};

use crate::{
    config::{QueueType, RabbitmqConfig, Unroutable},
    encode::destination,
};

/// AMQP's short strings, which all names are, have a byte for their length.
pub(crate) const SHORT: usize = 255;
/// Each message under way has a channel to itself, and a broker allows 2,047 of them on a connection.
const MAX_WINDOW: usize = 1_000;

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

    /// The exchange of a message, or its queue where there is none, as a destination that may be away on its own; none
    /// where all messages have the same.
    pub(crate) fn wide(&self, exchange: &str, routing_key: &str) -> Option<String> {
        let key = if exchange.is_empty() { routing_key } else { "" };
        self.destination().is_none().then(|| destination(exchange, key))
    }

    /// The same for its exchange and routing key together.
    pub(crate) fn narrow(&self, exchange: &str, routing_key: &str) -> Option<String> {
        let is_same = |template: &Option<Template>| {
            template.as_ref().is_none_or(|template| template.constant().is_some())
        };
        let is_everyones = is_same(&self.exchange) && is_same(&self.routing_key);
        (!is_everyones).then(|| destination(exchange, routing_key))
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

impl RabbitmqConfig {
    /// The checked form.
    pub(crate) fn resolve(self) -> Result<Resolved> {
        let exchange = template("exchange", &self.exchange)?;
        let routing_key = template("routing_key", &self.routing_key)?;
        if exchange.is_none() && routing_key.is_none() {
            return Err(bad(
                "routing_key",
                "is empty, and so is `exchange`: one of them must say where events go",
            ));
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
                "begins with `amq.`, which the broker reserves for its own queues",
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
            return Err(bad("ca", "is for TLS only").with_remedy("begin the URL with amqps://, or remove it"));
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

fn template(key: &str, text: &str) -> Result<Option<Template>> {
    if text.is_empty() {
        return Ok(None);
    }
    let template = Template::parse(text).map_err(|error| error.context(format!("`{key}`")))?;
    let literals: usize = template.literals().map(str::len).sum();
    if literals > SHORT {
        return Err(bad(key, format!("has {literals} bytes of text, and AMQP's names have at most {SHORT}")));
    }
    Ok(Some(template))
}

/// A name as AMQP carries it; none if it is too long.
pub(crate) fn short(text: &str) -> Option<ShortString> {
    ShortString::try_new(text).ok()
}
