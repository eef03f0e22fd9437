//! What the tests of this crate share: streams on a private server, and what is in them.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

use airtight_core::{Class, Delivery, Error, Outcome, Sink};
use airtight_nats::{NatsConfig, NatsSink};
use airtight_testkit::deliveries::percent_decode;
use async_nats::{
    HeaderMap,
    jetstream::{self, stream::Config},
};
use bytes::Bytes;

/// A message of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) subject: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Stored {
    /// A header as it was before it was percent-encoded.
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        self.headers.get(name).map(|value| percent_decode(value.as_str()))
    }
}

/// JetStream of a server that lets everyone in, or of one that knows `admin` (see [`USERS`]).
pub(crate) async fn jetstream(address: &str, user: Option<(&str, &str)>) -> jetstream::Context {
    let options = async_nats::ConnectOptions::new();
    let options = match user {
        Some((user, password)) => options.user_and_password(user.into(), password.into()),
        None => options,
    };
    jetstream::new(options.connect(address).await.unwrap())
}

/// Makes a stream on disk.
pub(crate) async fn create_stream(jetstream: &jetstream::Context, config: Config) {
    jetstream.create_stream(config).await.unwrap();
}

/// A stream of all subjects below `orders`.
pub(crate) fn orders() -> Config {
    Config { name: "ORDERS".into(), subjects: vec!["orders.>".into()], ..Config::default() }
}

/// All that is in a stream, in order.
pub(crate) async fn stored(jetstream: &jetstream::Context, stream: &str) -> Vec<Stored> {
    let stream = jetstream.get_stream(stream).await.unwrap();
    let state = stream.cached_info().state.clone();
    let mut messages = Vec::new();
    if state.messages == 0 {
        return messages;
    }
    for sequence in state.first_sequence..=state.last_sequence {
        let message = stream.get_raw_message(sequence).await.unwrap();
        messages.push(Stored {
            subject: message.subject.to_string(),
            headers: message.headers,
            body: message.payload,
        });
    }
    messages
}

/// A config for events of all subjects below `orders`: `orders.{event_type}`.
pub(crate) fn config(address: &str) -> NatsConfig {
    let mut config = NatsConfig::new(address);
    config.subject = "orders.{event_type}".into();
    config
}

pub(crate) fn sink(config: NatsConfig) -> NatsSink {
    NatsSink::new(config).unwrap()
}

/// Delivers one event.
pub(crate) async fn send(sink: &NatsSink, delivery: Delivery) -> Result<(), Error> {
    let mut outcomes = sink.deliver(&[delivery]).await;
    assert_eq!(outcomes.len(), 1);
    match outcomes.remove(0) {
        // Which of the two is the matter of `replay.rs`.
        Outcome::Delivered | Outcome::Duplicate => Ok(()),
        Outcome::Failed(error) => Err(error),
        other => panic!("{other:?} is not to be said of a single event"),
    }
}

/// Looks at an error's class, code and words.
#[track_caller]
pub(crate) fn expect(error: &Error, class: Class, code: &str, words: &[&str]) {
    assert_eq!((error.class(), error.code()), (class, code), "{error:?}");
    for word in words {
        assert!(error.to_string().contains(word), "`{error}` should say {word}");
    }
}
