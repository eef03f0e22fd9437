//! The stream's deduplication: it must not take one event for a repeat of another, drop it, and acknowledge it all the
//! same.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::Payload;
use airtight_testkit::{
    brokers::nats::NatsServer,
    deliveries::{of, sample_event},
};

use crate::support::{config, create_stream, jetstream, orders, send, sink, stored};

/// Two shards, or two tenants with a database each, count alike: the first order of one is not that of the other.
#[tokio::test]
async fn databases_that_count_alike_lose_nothing_in_a_stream_they_share() {
    let name = "databases_that_count_alike_lose_nothing_in_a_stream_they_share";
    let Some(server) = NatsServer::start(name).await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, orders()).await;
    let sink = sink(config(&server.address()));
    let mut event = sample_event(1, "1");
    event.id = "1".into();
    let mut other = event.clone();
    other.payload = Payload::Json(r#"{"tenant": 2}"#.into());
    other.occurred_at += std::time::Duration::from_micros(1);
    for event in [&event, &other, &event, &other] {
        send(&sink, of(event.clone())).await.unwrap();
    }
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 2, "each once: none lost, repeats dropped");
}

/// Two pipelines that send the same events to different subjects: the stream of both has both.
#[tokio::test]
async fn an_event_on_two_subjects_of_a_stream_is_there_twice() {
    let Some(server) = NatsServer::start("an_event_on_two_subjects_of_a_stream_is_there_twice").await else {
        return;
    };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, orders()).await;
    let mut audit = config(&server.address());
    audit.subject = "orders.audit.{event_type}".into();
    let (first, second) = (sink(config(&server.address())), sink(audit));
    let event = sample_event(1, "k");
    for _ in 0..2 {
        send(&first, of(event.clone())).await.unwrap();
        send(&second, of(event.clone())).await.unwrap();
    }
    let subjects: Vec<String> =
        stored(&jetstream, "ORDERS").await.into_iter().map(|stored| stored.subject).collect();
    let (once, again) =
        (format!("orders.{}", event.event_type), format!("orders.audit.{}", event.event_type));
    assert_eq!(subjects, [once, again]);
}
