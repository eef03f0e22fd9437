//! The class of each error of the broker and the network.
//!
//! Each message has its own channel, so an error of a channel is about that message. An error of the connection concerns
//! all messages on it.

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
    /// Checking or declaring a destination, which the text names; and whether it is the same for all events.
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
            format!("{address} sent nothing for too long, and the connection was given up"),
        ),
        ErrorKind::ChannelsLimitReached => Error::unavailable(
            Code::TOO_MANY_CHANNELS,
            format!("{address} allows no more channels on a connection"),
        )
        .with_remedy("lower `window`, or raise the broker's channel_max"),
        // The broker gave no reason, and the connection is still up.
        ErrorKind::InvalidChannel(_) | ErrorKind::InvalidChannelState(..) if up => {
            Error::retryable(Code::CHANNEL_CLOSED, format!("the channel to {address} was closed: {error}"))
        }
        _ if matches!(doing, Doing::Connecting) => Error::unavailable(
            Code::UNREACHABLE,
            format!(
                "{address} ended the connection before the AMQP handshake was complete ({})",
                root_cause(error)
            ),
        )
        .with_remedy(check_port(config)),
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
                "{address} does not accept the user `{}` with this password ({text})",
                config.uri.authority.userinfo.username
            ),
        )
        .with_remedy("correct the user and the password"),
        (402 | 530, _) => Error::unavailable(
            Code::NO_VHOST,
            format!("{address} has no virtual host `{vhost}`, or not for this user ({text})"),
        )
        .with_remedy(
            "create it, grant the user access to it, or correct the path of the URL, which names it; without a path it is `/`, and a slash in its name is written %2F",
        ),
        (403, Doing::Preparing(what, everyones)) if text.contains("reserved prefix") => {
            let message = format!("the broker reserves the name of {what} for itself: {text}");
            if everyones {
                Error::unavailable(Code::BAD_NAME, message)
            } else {
                Error::permanent(Code::BAD_NAME, message)
            }
        }
        (403, Doing::Preparing(what, _)) => Error::unavailable(
            Code::NOT_PERMITTED,
            format!("the user may not declare {what} ({text})"),
        )
        .with_remedy(
            "grant the user the right to configure it, or declare it yourself and set `declare` to false",
        ),
        (403, Doing::Publishing(message)) => Error::unavailable(
            Code::NOT_PERMITTED,
            format!("the user may not write to {} ({text})", message.destination()),
        )
        .with_remedy("grant the user the right to write"),
        (404, Doing::Preparing(what, _)) => missing(config, what, text),
        // The routing key has nothing to do with it.
        (404, Doing::Publishing(message)) => {
            missing(config, &destination(message.exchange.as_str(), ""), text)
        }
        (406, Doing::Preparing(what, _)) => Error::unavailable(
            Code::DECLARED_DIFFERENTLY,
            format!("{what} exists already, with other settings ({text})"),
        )
        .with_remedy("set `exchange_type` or `queue_type` to its type, or set `declare` to false"),
        (311, Doing::Publishing(message)) => too_large(message, text),
        (406, Doing::Publishing(message)) if text.contains("size") => too_large(message, text),
        (406, Doing::Publishing(_)) => {
            Error::permanent(Code::REFUSED, format!("the broker refuses this message: {text}"))
        }
        (320, _) => {
            Error::unavailable(Code::CONNECTION_LOST, format!("{address} ended the connection: {text}"))
        }
        // A single message could cause such an error, though it should not. Its attempts are counted, so that it
        // cannot block all other messages forever.
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
    with_way_out(config, Error::unavailable(code, format!("{what}{} ({text})", deleted(config))))
}

/// Why a destination is missing, if that is known.
fn deleted(config: &Resolved) -> &'static str {
    match config.declare {
        None => "",
        Some(_) => ": it was deleted after it had been declared, and is declared again at the next attempt",
    }
}

/// Adds how to create a destination that is missing. A sink that declares destinations needs no remedy.
fn with_way_out(config: &Resolved, error: Error) -> Error {
    match config.declare {
        None => error.with_remedy("create it, or set `declare` to true"),
        Some(_) => error,
    }
}

fn too_large(message: &Outgoing, text: &str) -> Error {
    let bytes = message.body.len();
    Error::permanent(
        Code::TOO_LARGE,
        format!("the message has {bytes} bytes, and the broker refuses it: {text}"),
    )
}

/// The error for headers that do not fit into one frame. Sent, they would end the connection for all messages.
pub(crate) fn headers_too_large(message: &Outgoing, frame_max: usize) -> Error {
    let bytes = message.header_frame;
    Error::permanent(
        Code::TOO_LARGE,
        format!("the message's headers have {bytes} bytes, and the broker takes {frame_max} (its frame_max)"),
    )
}

/// The error for a message that the broker returned.
pub(crate) fn unroutable(config: &Resolved, message: &Outgoing, returned: &BasicReturnMessage) -> Error {
    let destination = message.destination();
    let is_queue = message.exchange.as_str().is_empty();
    let text = match is_queue {
        true => format!("there is no {destination}{}", deleted(config)),
        false => format!("no queue is bound for {destination}"),
    };
    let text = format!("{text} ({})", returned.reply_text);
    let narrow = config.narrow(message.exchange.as_str(), message.routing_key.as_str());
    let error = match config.unroutable {
        Unroutable::Wait => about(Error::unavailable(Code::UNROUTABLE, text), narrow),
        Unroutable::Dead => Error::permanent(Code::UNROUTABLE, text),
    };
    match is_queue {
        true => with_way_out(config, error),
        false => error.with_remedy("bind a queue, or give the exchange an alternate exchange"),
    }
}

/// The broker received the message and could not store it. The event is not the cause, however long this lasts.
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
        format!("{} accepts no messages until its alarm is over: {reason}", config.address),
    )
}

pub(crate) fn wrong_protocol(config: &Resolved) -> Error {
    Error::unavailable(Code::WRONG_PROTOCOL, format!("{} does not speak AMQP 0-9-1", config.address))
        .with_remedy(check_port(config))
}

/// The most frequent mistakes.
fn check_port(config: &Resolved) -> &'static str {
    match config.uri.scheme {
        AMQPScheme::AMQP => "check host and port; if it is RabbitMQ's port for TLS, write amqps://",
        AMQPScheme::AMQPS => "check that host and port are RabbitMQ's for TLS (5671)",
    }
}

pub(crate) fn no_tls(config: &Resolved, error: &std::io::Error) -> Error {
    Error::unavailable(
        Code::TLS,
        format!(
            "TLS with {} fails: {}",
            config.address,
            root_cause(error)
        ),
    )
    .with_remedy(
        "check that the port is RabbitMQ's for TLS, and that its certificate is for this host and from an authority that `ca` or the system trusts",
    )
}
