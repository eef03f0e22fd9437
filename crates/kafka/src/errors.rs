//! What librdkafka's error codes mean, for one event and for all of them.

use airtight_core::{Code, Error};
use rdkafka::error::RDKafkaErrorCode as KafkaCode;

/// What follows from the error on one message.
#[derive(Debug, Clone)]
pub(crate) enum Fate {
    /// The broker refused the request that this message was in: this one may be the reason, or another.
    MayBeTheCause(Error),
    /// Nothing is wrong with it: it fell with another, or with its producer.
    Collateral,
    /// Nobody can be accepted now.
    Away(Error),
}

/// The fate of a message to `topic` that failed with `code`.
pub(crate) fn fate(brokers: &str, topic: &str, code: KafkaCode, create: bool) -> Fate {
    match code {
        KafkaCode::MessageSizeTooLarge | KafkaCode::InvalidMessageSize => {
            Fate::MayBeTheCause(Error::permanent(
                Code::TOO_LARGE,
                format!(
                    "Kafka refuses the message as too large for topic `{topic}`: store the payload elsewhere and publish a reference, or raise the topic's `max.message.bytes`"
                ),
            ))
        }
        KafkaCode::InvalidRecord
        | KafkaCode::InvalidTimestamp
        | KafkaCode::InvalidMessage
        | KafkaCode::BadMessage => Fate::MayBeTheCause(Error::permanent(
            Code::REFUSED,
            format!("Kafka refuses the message for topic `{topic}` as invalid ({code})"),
        )),
        // Its name passed our own look, so it is a topic that Kafka keeps for itself.
        KafkaCode::InvalidTopic => Fate::MayBeTheCause(self::topic(brokers, topic, code, create)),
        KafkaCode::QueueFull => Fate::Away(Error::unavailable(
            Code::QUEUE_FULL,
            "librdkafka's own queue has no room for what the relay has under way: raise \
             `queue.buffering.max.messages` and `queue.buffering.max.kbytes`, or remove them (Kafka itself was not asked)",
        )),
        code if is_collateral(code) => Fate::Collateral,
        code if is_about_topic(code) => Fate::Away(self::topic(brokers, topic, code, create)),
        code => Fate::Away(away(brokers, Some((code, format!("topic `{topic}`: {code}"))), "")),
    }
}

/// A message that is larger than its topic takes, known before it is sent.
pub(crate) fn over_limit(topic: &str, size: usize, limit: usize) -> Error {
    Error::permanent(
        Code::TOO_LARGE,
        format!(
            "the message has more than {size} bytes, and topic `{topic}` takes {limit} (its `max.message.bytes`): store the payload elsewhere and publish a reference, or raise the topic's limit"
        ),
    )
}

/// What befalls a message because of another one, or a producer because of a message.
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

/// What is wrong with a topic, for everybody who writes to it.
pub(crate) fn topic(brokers: &str, topic: &str, code: KafkaCode, create: bool) -> Error {
    about(brokers, topic, code, create).at(destination(topic))
}

fn about(brokers: &str, topic: &str, code: KafkaCode, create: bool) -> Error {
    match code {
        KafkaCode::TopicAuthorizationFailed => Error::unavailable(
            Code::NOT_PERMITTED,
            format!(
                "Kafka at {brokers} does not let this user write to topic `{topic}`: grant Write and Describe on it"
            ),
        ),
        KafkaCode::NotEnoughReplicas | KafkaCode::NotEnoughReplicasAfterAppend => Error::unavailable(
            Code::TOO_FEW_REPLICAS,
            format!(
                "topic `{topic}` at {brokers} has fewer replicas in sync than its `min.insync.replicas`: are all its brokers up?"
            ),
        ),
        KafkaCode::LeaderNotAvailable => Error::unavailable(
            Code::NO_LEADER,
            format!("topic `{topic}` at {brokers} has a partition without a leader: are all its brokers up?"),
        ),
        KafkaCode::InvalidTopic => Error::permanent(
            Code::BAD_NAME,
            format!("Kafka at {brokers} refuses the name of topic `{topic}`"),
        ),
        _ if create => Error::unavailable(
            Code::NO_TOPIC,
            format!(
                "topic `{topic}` does not exist at {brokers}: `create` is set, and it is made at the next try, or the broker was slow to show it"
            ),
        ),
        _ => Error::unavailable(
            Code::NO_TOPIC,
            format!(
                "topic `{topic}` does not exist at {brokers}, and the broker does not create it: create it, or set `create = true`"
            ),
        ),
    }
}

/// A topic whose partition has so many replicas in sync, fewer than it wants.
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
            "topic `{topic}` at {brokers} takes nothing: {in_sync} of its replicas are in sync (partition {partition}), and {wanted}. Bring its brokers back, or lower the setting"
        ),
    )
    .at(destination(topic))
}

/// Why a topic could not be created.
pub(crate) fn creating(brokers: &str, topic: &str, code: KafkaCode) -> Error {
    let error = match code {
        KafkaCode::TopicAuthorizationFailed | KafkaCode::ClusterAuthorizationFailed => Error::unavailable(
            Code::NOT_PERMITTED,
            format!(
                "Kafka at {brokers} does not let this user create topic `{topic}`: create it by hand, or grant Create"
            ),
        ),
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

/// Why nothing can be sent at all. `trouble` is the last thing that librdkafka has complained of; `advertised` is where the
/// cluster says that its brokers are, if it has answered.
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
                "the cluster answers at {brokers} and says that its brokers are at {advertised}, but nothing is acknowledged there: check `advertised.listeners`, and that these addresses can be reached from here{reason}"
            ),
        );
    }
    if trouble.is_none() && !advertised.is_empty() {
        return Error::unavailable(
            Code::TIMEOUT,
            format!(
                "Kafka at {brokers} has answered before, and acknowledges nothing now: is a broker stuck or overloaded?"
            ),
        );
    }
    let Some((code, reason)) = trouble else {
        // A port where nobody listens refuses, and that is a reason; so somebody keeps silent.
        return Error::unavailable(
            Code::TIMEOUT,
            format!(
                "nobody answers at {brokers} as Kafka would; is it a broker that is up, and is TLS or SASL on at both ends or at none?"
            ),
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
        // What librdkafka sees of another protocol: sizes that make no sense, or hanging up at the first request.
        _ if speaks_something_else(&reason) => Error::unavailable(
            Code::WRONG_PROTOCOL,
            format!(
                "what answers at {brokers} does not speak Kafka in the way it is asked to; is it a Kafka broker, and is TLS or SASL on at both ends or at none? ({reason})"
            ),
        ),
        _ => Error::unavailable(Code::UNREACHABLE, format!("Kafka at {brokers} cannot be reached: {reason}")),
    }
}

/// What librdkafka says of a broker that it cannot reach.
fn is_connection(code: KafkaCode) -> bool {
    matches!(code, KafkaCode::BrokerTransportFailure | KafkaCode::Resolve | KafkaCode::OperationTimedOut)
}

fn speaks_something_else(reason: &str) -> bool {
    ["ApiVersion", "Invalid response size", "incorrect security.protocol", "Receive failed", "Disconnected"]
        .iter()
        .any(|sign| reason.contains(sign))
        && !reason.contains("Connection refused")
}

/// librdkafka's reasons begin with the broker and end in timings.
fn brief(reason: &str) -> String {
    let reason = reason.split(" (after ").next().unwrap_or(reason);
    reason.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect()
}
