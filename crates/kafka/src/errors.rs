//! What librdkafka's error codes mean: for one event, for one topic, and for the whole sink.

use airtight_core::{Code, Error};
use rdkafka::error::RDKafkaErrorCode as KafkaCode;

/// What follows from the error on one message.
#[derive(Debug, Clone)]
pub(crate) enum Fate {
    /// The broker refused the request that this message was in. This message may be the cause, or another one of the request.
    MayBeTheCause(Error),
    /// Nothing is wrong with this message: it failed because another message or its producer failed.
    Collateral,
    /// No message can be accepted now.
    Away(Error),
}

/// The fate of a message to `topic` that failed with `code`.
pub(crate) fn fate(brokers: &str, topic: &str, code: KafkaCode, create: bool) -> Fate {
    match code {
        KafkaCode::MessageSizeTooLarge | KafkaCode::InvalidMessageSize => Fate::MayBeTheCause(
            Error::permanent(
                Code::TOO_LARGE,
                format!("Kafka refuses the message as too large for topic `{topic}`"),
            )
            .with_remedy(
                "store the payload elsewhere and publish a reference, or raise the topic's `max.message.bytes`",
            ),
        ),
        KafkaCode::InvalidRecord
        | KafkaCode::InvalidTimestamp
        | KafkaCode::InvalidMessage
        | KafkaCode::BadMessage => Fate::MayBeTheCause(Error::permanent(
            Code::REFUSED,
            format!("Kafka refuses the message for topic `{topic}` as invalid ({code})"),
        )),
        // The name passed our own check, so it is a topic that Kafka reserves for itself.
        KafkaCode::InvalidTopic => Fate::MayBeTheCause(self::topic(brokers, topic, code, create)),
        KafkaCode::QueueFull => Fate::Away(Error::unavailable(
            Code::QUEUE_FULL,
            "librdkafka's own queue has no room for the events that the relay has under way (Kafka itself was not asked)",
        )
        .with_remedy(
            "raise `queue.buffering.max.messages` and `queue.buffering.max.kbytes`, or remove both settings",
        )),
        code if is_collateral(code) => Fate::Collateral,
        code if is_about_topic(code) => Fate::Away(self::topic(brokers, topic, code, create)),
        code => Fate::Away(away(brokers, Some((code, format!("topic `{topic}`: {code}"))), "")),
    }
}

/// The error for a message that is larger than its topic accepts. It was not sent.
pub(crate) fn over_limit(topic: &str, size: usize, limit: usize) -> Error {
    Error::permanent(
        Code::TOO_LARGE,
        format!(
            "the message has more than {size} bytes, and topic `{topic}` takes {limit} (its `max.message.bytes`)"
        ),
    )
    .with_remedy("store the payload elsewhere and publish a reference, or raise the topic's limit")
}

/// Whether a message failed only because another message or its producer failed.
pub(crate) fn is_collateral(code: KafkaCode) -> bool {
    matches!(
        code,
        KafkaCode::Fatal
            | KafkaCode::GaplessGuarantee
            | KafkaCode::PurgeInflight
            | KafkaCode::PurgeQueue
            | KafkaCode::OutOfOrderSequenceNumber
            | KafkaCode::UnknownProducerId
            | KafkaCode::InvalidProducerEpoch
            | KafkaCode::Inconsistent
            | KafkaCode::InvalidDifferentRecord
            | KafkaCode::BrokerDestroy
    )
}

fn is_about_topic(code: KafkaCode) -> bool {
    matches!(
        code,
        KafkaCode::UnknownTopicOrPartition
            | KafkaCode::UnknownTopic
            | KafkaCode::UnknownPartition
            | KafkaCode::LeaderNotAvailable
            | KafkaCode::TopicAuthorizationFailed
            | KafkaCode::NotEnoughReplicas
            | KafkaCode::NotEnoughReplicasAfterAppend
    )
}

/// A topic as a destination: its name in errors, and for [`airtight_core::Sink::destinations`].
pub(crate) fn destination(topic: &str) -> String {
    format!("topic {topic}")
}

/// What is wrong with a topic. It concerns every event for this topic.
pub(crate) fn topic(brokers: &str, topic: &str, code: KafkaCode, create: bool) -> Error {
    about(brokers, topic, code, create).at(destination(topic))
}

fn about(brokers: &str, topic: &str, code: KafkaCode, create: bool) -> Error {
    match code {
        KafkaCode::TopicAuthorizationFailed => Error::unavailable(
            Code::NOT_PERMITTED,
            format!("Kafka at {brokers} does not let this user write to topic `{topic}`"),
        )
        .with_remedy(format!("grant the user Write and Describe on topic `{topic}`")),
        KafkaCode::NotEnoughReplicas | KafkaCode::NotEnoughReplicasAfterAppend => Error::unavailable(
            Code::TOO_FEW_REPLICAS,
            format!("topic `{topic}` at {brokers} has fewer replicas in sync than its `min.insync.replicas`"),
        )
        .with_remedy("check that all brokers of the topic are up"),
        KafkaCode::LeaderNotAvailable => Error::unavailable(
            Code::NO_LEADER,
            format!("topic `{topic}` at {brokers} has a partition without a leader"),
        )
        .with_remedy("check that all brokers of the topic are up"),
        KafkaCode::InvalidTopic => Error::permanent(
            Code::BAD_NAME,
            format!("Kafka at {brokers} refuses the name of topic `{topic}`"),
        ),
        _ if create => Error::unavailable(
            Code::NO_TOPIC,
            format!(
                "topic `{topic}` does not exist at {brokers}; `create` is set, so the next attempt creates it, or finds it if the broker was slow to show it"
            ),
        ),
        _ => Error::unavailable(
            Code::NO_TOPIC,
            format!("topic `{topic}` does not exist at {brokers}, and the broker does not create it"),
        )
        .with_remedy("create the topic, or set `create = true`"),
    }
}

/// The error for a topic with a partition that has fewer replicas in sync than the topic demands.
pub(crate) fn too_few_replicas(
    brokers: &str,
    topic: &str,
    partition: i32,
    in_sync: usize,
    wanted: Option<usize>,
) -> Error {
    let wanted = match wanted {
        Some(wanted) => format!("its `min.insync.replicas` is {wanted}"),
        None => "its `min.insync.replicas` seems to be higher".to_owned(),
    };
    Error::unavailable(
        Code::TOO_FEW_REPLICAS,
        format!(
            "topic `{topic}` at {brokers} accepts no messages: {in_sync} of its replicas are in sync (partition {partition}), and {wanted}"
        ),
    )
    .with_remedy("start the topic's brokers that are down, or lower the setting")
    .at(destination(topic))
}

/// Why a topic could not be created.
pub(crate) fn creating(brokers: &str, topic: &str, code: KafkaCode) -> Error {
    let error = match code {
        KafkaCode::TopicAuthorizationFailed | KafkaCode::ClusterAuthorizationFailed => Error::unavailable(
            Code::NOT_PERMITTED,
            format!("Kafka at {brokers} does not let this user create topic `{topic}`"),
        )
        .with_remedy("create the topic yourself, or grant the user Create"),
        KafkaCode::InvalidTopic => Error::permanent(
            Code::BAD_NAME,
            format!("Kafka at {brokers} refuses the name of topic `{topic}`"),
        ),
        code => Error::unavailable(
            Code::NO_TOPIC,
            format!("topic `{topic}` could not be created at {brokers}: {code}"),
        ),
    };
    error.at(destination(topic))
}

/// Why nothing can be sent at all. `trouble` is the last error that librdkafka reported. `advertised` lists the addresses
/// that the cluster gives for its brokers, if it has answered.
pub(crate) fn away(brokers: &str, trouble: Option<(KafkaCode, String)>, advertised: &str) -> Error {
    let trouble = trouble.filter(|(code, _)| *code != KafkaCode::AllBrokersDown);
    let is_elsewhere = |broker: &str| !brokers.split(',').any(|known| known.trim() == broker);
    let is_unreachable = match &trouble {
        Some((code, reason)) => {
            is_connection(*code) && !brokers.split(',').any(|known| reason.contains(known.trim()))
        }
        None => true,
    };
    if is_unreachable && !advertised.is_empty() && advertised.split(", ").any(is_elsewhere) {
        let reason = trouble.map(|(_, reason)| format!(" ({})", brief(&reason))).unwrap_or_default();
        return Error::unavailable(
            Code::ADVERTISED,
            format!(
                "the cluster answers at {brokers} and says (`advertised.listeners`) that its brokers are at {advertised}, but nothing is acknowledged there{reason}"
            ),
        )
        .with_remedy(
            "correct `advertised.listeners`, or make these addresses reachable from this host",
        );
    }
    if trouble.is_none() && !advertised.is_empty() {
        return Error::unavailable(
            Code::TIMEOUT,
            format!("Kafka at {brokers} has answered before, and acknowledges nothing now"),
        )
        .with_remedy("check whether a broker is stuck or overloaded");
    }
    let Some((code, reason)) = trouble else {
        // A closed port would refuse the connection, which is a reason. So something listens there and does not answer.
        return Error::unavailable(
            Code::TIMEOUT,
            format!("nothing at {brokers} answers as a Kafka broker would"),
        )
        .with_remedy(
            "check that a broker is up there, and that TLS and SASL are on at both ends or at neither",
        );
    };
    let reason = brief(&reason);
    match code {
        KafkaCode::Authentication
        | KafkaCode::SaslAuthenticationFailed
        | KafkaCode::UnsupportedSASLMechanism => {
            Error::unavailable(Code::CREDENTIALS, format!("Kafka at {brokers} refuses the login: {reason}"))
        }
        KafkaCode::ClusterAuthorizationFailed | KafkaCode::TransactionalIdAuthorizationFailed => {
            Error::unavailable(
                Code::NOT_PERMITTED,
                format!("Kafka at {brokers} does not let this user write with idempotence: {reason}"),
            )
        }
        KafkaCode::SSL => {
            Error::unavailable(Code::TLS, format!("TLS with Kafka at {brokers} fails: {reason}"))
        }
        KafkaCode::Resolve => {
            Error::unavailable(Code::UNREACHABLE, format!("Kafka at {brokers} cannot be found: {reason}"))
        }
        // How another protocol looks to librdkafka: impossible sizes, or a connection closed at the first request.
        _ if speaks_something_else(&reason) => Error::unavailable(
            Code::WRONG_PROTOCOL,
            format!(
                "the server at {brokers} does not answer in Kafka's protocol as it was asked ({reason})"
            ),
        )
        .with_remedy(
            "check that the server is a Kafka broker, and that TLS and SASL are on at both ends or at neither",
        ),
        _ => Error::unavailable(Code::UNREACHABLE, format!("Kafka at {brokers} cannot be reached: {reason}")),
    }
}

/// Whether librdkafka reports with this code that it cannot reach a broker.
fn is_connection(code: KafkaCode) -> bool {
    matches!(code, KafkaCode::BrokerTransportFailure | KafkaCode::Resolve | KafkaCode::OperationTimedOut)
}

fn speaks_something_else(reason: &str) -> bool {
    ["ApiVersion", "Invalid response size", "incorrect security.protocol", "Receive failed", "Disconnected"]
        .iter()
        .any(|sign| reason.contains(sign))
        && !reason.contains("Connection refused")
}

/// A reason of librdkafka's without the timings at its end.
fn brief(reason: &str) -> String {
    let reason = reason.split(" (after ").next().unwrap_or(reason);
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect()
}
