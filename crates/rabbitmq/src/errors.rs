//! The table from what the broker and the network say to classes.
//!
//! A message has its channel to itself, so what the broker says of a channel it says of that message. What it says
//! of the connection meets everyone on it.

use airtight_core::{Code, Error, error::root_cause};
use lapin::{ErrorKind, message::BasicReturnMessage, protocol::AMQPError, uri::AMQPScheme};

use crate::{
    config::Unroutable,
    encode::{Outgoing, destination},
    resolved::Resolved,
};

/// What was under way when something went wrong.
#[derive(Clone, Copy)]
pub(crate) enum Doing<'a> {
    Connecting,
    /// Looking at a destination, or declaring it, in words; and whether it is the same for all events.
    Preparing(&'a str, bool),
    Publishing(&'a Outgoing),
}

/// What an error of the client library means, with the connection still `up` or not.
pub(crate) fn classify(config: &Resolved, error: &lapin::Error, doing: Doing<'_>, up: bool) -> Error {
    let address = &config.address;
    match error.kind() {
        ErrorKind::ProtocolError(said) => refused(config, said, doing),
        ErrorKind::ParsingError(_) | ErrorKind::InvalidProtocolVersion(_) => wrong_protocol(config),
        ErrorKind::MissingHeartbeatError => Error::unavailable(
            Code::CONNECTION_LOST,
            format!("nothing was heard from {address} for too long, and the connection was given up"),
        ),
        ErrorKind::ChannelsLimitReached => Error::unavailable(
            Code::TOO_MANY_CHANNELS,
            format!(
                "{address} allows no more channels on a connection: lower `window`, or raise its channel_max"
            ),
        ),
        // Without a word from the broker, and with the connection still there.
        ErrorKind::InvalidChannel(_) | ErrorKind::InvalidChannelState(..) if up => {
            Error::retryable(Code::CHANNEL_CLOSED, format!("the channel to {address} was closed: {error}"))
        }
        _ if matches!(doing, Doing::Connecting) => Error::unavailable(
            Code::UNREACHABLE,
            format!(
                "{address} ended the connection before it was one of AMQP ({}): check host and port; {}",
                root_cause(error),
                hint(config)
            ),
        ),
        _ => Error::unavailable(
            Code::CONNECTION_LOST,
            format!("the connection to {address} broke: {}", root_cause(error)),
        ),
    }
}

/// The broker's own codes; its text follows a dash in them: `NOT_FOUND - no exchange 'x' in vhost '/'`.
fn refused(config: &Resolved, said: &AMQPError, doing: Doing<'_>) -> Error {
    let error = meaning(config, said, doing);
    let destination = match (said.get_id(), doing) {
        (403 | 404 | 406, Doing::Preparing(what, false)) => Some(what.to_owned()),
        // Rights may be for some routing keys of an exchange only.
        (403, Doing::Publishing(message)) if said.get_message().as_str().contains("access to topic") => {
            config.narrow(message.exchange.as_str(), message.routing_key.as_str())
        }
        (403 | 404, Doing::Publishing(message)) => {
            config.wide(message.exchange.as_str(), message.routing_key.as_str())
        }
        _ => None,
    };
    about(error, destination)
}

/// An error about one destination of several, or about all.
fn about(error: Error, destination: Option<String>) -> Error {
    match destination {
        Some(destination) => error.at(destination),
        None => error,
    }
}

fn meaning(config: &Resolved, said: &AMQPError, doing: Doing<'_>) -> Error {
    let (address, vhost) = (&config.address, &config.uri.vhost);
    let text = said.get_message().as_str();
    match (said.get_id(), doing) {
        (403, Doing::Connecting) => Error::unavailable(
            Code::CREDENTIALS,
            format!(
                "{address} does not let the user `{}` in: check user and password ({text})",
                config.uri.authority.userinfo.username
            ),
        ),
        (402 | 530, _) => Error::unavailable(
            Code::NO_VHOST,
            format!(
                "{address} has no virtual host `{vhost}`, or not for this user: the URL's path names it, none is `/`, and a slash in it is written %2F ({text})"
            ),
        ),
        (403, Doing::Preparing(what, everyones)) if text.contains("reserved prefix") => {
            let message = format!("the broker keeps the name of {what} for itself: {text}");
            if everyones {
                Error::unavailable(Code::BAD_NAME, message)
            } else {
                Error::permanent(Code::BAD_NAME, message)
            }
        }
        (403, Doing::Preparing(what, _)) => Error::unavailable(
            Code::NOT_PERMITTED,
            format!(
                "the user may not declare {what}: grant it, or declare it yourself and set `declare` to false ({text})"
            ),
        ),
        (403, Doing::Publishing(message)) => Error::unavailable(
            Code::NOT_PERMITTED,
            format!("the user may not write to {}: grant it ({text})", message.destination()),
        ),
        (404, Doing::Preparing(what, _)) => missing(config, what, text),
        // The routing key has nothing to do with it.
        (404, Doing::Publishing(message)) => {
            missing(config, &destination(message.exchange.as_str(), ""), text)
        }
        (406, Doing::Preparing(what, _)) => Error::unavailable(
            Code::DECLARED_DIFFERENTLY,
            format!(
                "there is {what} already, with other settings: set `exchange_type` or `queue_type` to what it is, or `declare` to false ({text})"
            ),
        ),
        (311, Doing::Publishing(message)) => too_large(message, text),
        (406, Doing::Publishing(message)) if text.contains("size") => too_large(message, text),
        (406, Doing::Publishing(_)) => {
            Error::permanent(Code::REFUSED, format!("the broker refuses this message: {text}"))
        }
        (320, _) => {
            Error::unavailable(Code::CONNECTION_LOST, format!("{address} ended the connection: {text}"))
        }
        // Faults of a kind that a single message could cause, though it should not: its attempts are counted, so
        // that it cannot hold up everyone for ever.
        (code, Doing::Publishing(_)) => {
            Error::retryable(Code::SERVER_ERROR, format!("{address} answered with error {code}: {text}"))
        }
        (code, _) => {
            Error::unavailable(Code::SERVER_ERROR, format!("{address} answered with error {code}: {text}"))
        }
    }
}

fn missing(config: &Resolved, what: &str, text: &str) -> Error {
    let (code, what) = match what.strip_prefix("queue ") {
        Some(queue) => (Code::NO_QUEUE, format!("there is no queue `{queue}`")),
        None => (Code::NO_EXCHANGE, format!("there is no {what}")),
    };
    Error::unavailable(code, format!("{what}: {} ({text})", remedy(config)))
}

/// What makes a destination that is missing.
fn remedy(config: &Resolved) -> &'static str {
    match config.declare {
        None => "create it, or set `declare` to true",
        Some(_) => "it was deleted after it had been declared, and is declared again at the next try",
    }
}

fn too_large(message: &Outgoing, text: &str) -> Error {
    let bytes = message.body.len();
    Error::permanent(
        Code::TOO_LARGE,
        format!("the message has {bytes} bytes, and the broker refuses it: {text}"),
    )
}

/// The one part of a message that must fit into a frame. Sent, it would cost everyone the connection.
pub(crate) fn headers_too_large(message: &Outgoing, frame_max: usize) -> Error {
    let bytes = message.header_frame;
    Error::permanent(
        Code::TOO_LARGE,
        format!("the message's headers have {bytes} bytes, and the broker takes {frame_max} (its frame_max)"),
    )
}

/// A message that came back.
pub(crate) fn unroutable(config: &Resolved, message: &Outgoing, returned: &BasicReturnMessage) -> Error {
    let destination = message.destination();
    let text = match message.exchange.as_str() {
        "" => format!("there is no {destination}: {}", remedy(config)),
        _ => format!(
            "no queue is bound there for {destination}: bind one, or give the exchange an alternate one"
        ),
    };
    let text = format!("{text} ({})", returned.reply_text);
    let narrow = config.narrow(message.exchange.as_str(), message.routing_key.as_str());
    match config.unroutable {
        Unroutable::Wait => about(Error::unavailable(Code::UNROUTABLE, text), narrow),
        Unroutable::Dead => Error::permanent(Code::UNROUTABLE, text),
    }
}

/// The broker took the message and could not keep it. That is no event's fault, however long it lasts.
pub(crate) fn nacked(config: &Resolved, message: &Outgoing) -> Error {
    let error = Error::unavailable(
        Code::NACK,
        format!(
            "the broker could not store the message for {}: its queue is full (reject-publish) or failed",
            message.destination()
        ),
    );
    about(error, config.narrow(message.exchange.as_str(), message.routing_key.as_str()))
}

pub(crate) fn lost(config: &Resolved) -> Error {
    Error::unavailable(Code::CONNECTION_LOST, format!("the connection to {} is lost", config.address))
}

pub(crate) fn blocked(config: &Resolved, reason: &str) -> Error {
    Error::unavailable(
        Code::BLOCKED,
        format!("{} takes no messages until its alarm is over: {reason}", config.address),
    )
}

pub(crate) fn wrong_protocol(config: &Resolved) -> Error {
    Error::unavailable(
        Code::WRONG_PROTOCOL,
        format!("{} does not speak AMQP 0-9-1: check host and port; {}", config.address, hint(config)),
    )
}

/// The mistake that is made most often.
fn hint(config: &Resolved) -> &'static str {
    match config.uri.scheme {
        AMQPScheme::AMQP => "if it is RabbitMQ's port for TLS, write amqps://",
        AMQPScheme::AMQPS => "is it RabbitMQ's port for TLS (5671)?",
    }
}

pub(crate) fn no_tls(config: &Resolved, error: &std::io::Error) -> Error {
    Error::unavailable(
        Code::TLS,
        format!(
            "no TLS with {}: {}; check that the port is RabbitMQ's for TLS, and that its certificate is for this host and from an authority that `ca` or the system knows",
            config.address,
            root_cause(error)
        ),
    )
}
