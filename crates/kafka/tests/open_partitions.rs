//! The first request to a partition goes alone (`src/open_partitions.rs`): if it is refused for a moment, none may overtake it.
//!
//! On librdkafka's mock cluster, which refuses on demand, and like a broker that does not know the producer takes any
//! number for its first.
#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::{Delivery, Outcome, Sink};
use airtight_kafka::KafkaSink;
use airtight_testkit::deliveries::letters;
use rdkafka::{
    mocking::MockCluster,
    producer::DefaultProducerContext,
    types::{RDKafkaApiKey, RDKafkaRespErr},
};

use crate::support::{Tail, sink, sized};

/// Each of another key.
fn events(first: i64) -> Vec<Delivery> {
    (first..first + 40).map(|seq| sized(seq, &format!("k{seq}"), 50)).collect()
}

fn ids(batch: &[Delivery]) -> Vec<String> {
    batch.iter().map(|delivery| delivery.event.id.clone()).collect()
}

async fn seen(brokers: &str, topic: &str, count: usize) -> Vec<String> {
    let tail = Tail::new(brokers, topic, 1);
    tail.at_least(count).await;
    tail.seen().iter().map(|seen| seen.header("id").unwrap().to_owned()).collect()
}

/// A topic whose first request will be refused, and a sink that makes one of each message, with as many on their way as may
/// be.
async fn refusing(cluster: &MockCluster<'_, DefaultProducerContext>) -> (String, KafkaSink) {
    let brokers = cluster.bootstrap_servers();
    cluster.create_topic("t", 1, 1).unwrap();
    let sink = sink(&format!("kafka://{brokers}/t?linger.ms=0&batch.num.messages=1"));
    sink.open().await.unwrap();
    let refusal = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS;
    cluster.request_errors(RDKafkaApiKey::Produce, &[refusal]);
    (brokers, sink)
}

#[tokio::test]
async fn what_is_refused_first_arrives_first() {
    let cluster = MockCluster::new(1).unwrap();
    let (brokers, sink) = refusing(&cluster).await;
    let batch = events(1);
    assert_eq!(letters(&sink.deliver(&batch).await), "d".repeat(40));
    assert_eq!(seen(&brokers, "t", 40).await, ids(&batch));
    sink.close().await.unwrap();
}

/// Two calls, of which neither knows what the other sends.
#[tokio::test]
async fn only_one_call_opens_a_partition() {
    let cluster = MockCluster::new(1).unwrap();
    let (brokers, sink) = refusing(&cluster).await;
    let (one, two) = (events(1), events(101));
    let (first, second) = tokio::join!(sink.deliver(&one), sink.deliver(&two));
    for outcome in first.iter().chain(&second) {
        assert!(matches!(outcome, Outcome::Delivered), "{outcome:?}");
    }
    let seen = seen(&brokers, "t", 80).await;
    assert_eq!(seen.len(), 80);
    for batch in [one, two] {
        let ids = ids(&batch);
        let of_this: Vec<String> = seen.iter().filter(|id| ids.contains(id)).cloned().collect();
        assert_eq!(of_this, ids);
    }
    sink.close().await.unwrap();
}
