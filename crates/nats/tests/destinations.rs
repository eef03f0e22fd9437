//! One subject of several that no stream takes, or that we may not publish to: the others go on, and it is named.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::{Delivery, Sink};
use airtight_nats::NatsConfig;
use airtight_testkit::{
    brokers::nats::NatsServer,
    deliveries::{delivery, error_of, letters},
    destinations::{OneAway, one_away},
};
use async_nats::jetstream::stream::Config;
use support::{create_stream, jetstream, sink};

fn stream(name: &str) -> Config {
    Config { name: name.to_uppercase(), subjects: vec![format!("{name}.>")], ..Config::default() }
}

fn by_stream(address: &str) -> NatsConfig {
    let mut config = NatsConfig::new(address);
    config.subject = "{stream}".into();
    config
}

fn to(subject: &str, mut delivery: Delivery) -> Delivery {
    subject.clone_into(&mut delivery.event.stream);
    delivery
}

#[tokio::test]
async fn a_subject_without_a_stream_keeps_no_other_waiting() {
    let Some(server) = NatsServer::start("a_subject_without_a_stream_keeps_no_other_waiting").await else {
        return;
    };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, stream("good")).await;
    let case = OneAway { good: "good.one", bad: "bad.one", code: "no_stream", named: "subject bad.one" };
    let mend = async || create_stream(&jetstream, stream("bad")).await;
    one_away(sink(by_stream(&server.address())), case, mend).await;
}

#[tokio::test]
async fn a_stream_that_is_full_keeps_no_other_waiting() {
    let Some(server) = NatsServer::start("a_stream_that_is_full_keeps_no_other_waiting").await else {
        return;
    };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, stream("good")).await;
    let full = Config {
        max_messages: 1,
        discard: async_nats::jetstream::stream::DiscardPolicy::New,
        ..stream("bad")
    };
    create_stream(&jetstream, full.clone()).await;
    let sink = sink(by_stream(&server.address()));
    assert_eq!(letters(&sink.deliver(&[to("bad.one", delivery(1, "first"))]).await), "d");
    let case = OneAway { good: "good.one", bad: "bad.one", code: "stream_full", named: "subject bad.one" };
    one_away(sink, case, async || {
        jetstream.update_stream(Config { max_messages: -1, ..full }).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_subject_that_is_denied_leaves_the_others_alone() {
    let users = "accounts { A { jetstream: enabled, users: [
        { user: relay, password: right, permissions: { publish: { deny: [\"denied.>\"] } } },
        { user: admin, password: right }
    ] } }";
    let name = "a_subject_that_is_denied_leaves_the_others_alone";
    let Some(server) = NatsServer::start_with(name, |_| users.into()).await else { return };
    let jetstream = jetstream(&server.address(), Some(("admin", "right"))).await;
    create_stream(&jetstream, stream("good")).await;
    create_stream(&jetstream, stream("denied")).await;
    let url = format!("nats://relay:right@{}", server.address());
    let mut config = NatsConfig::from_url(&url).unwrap();
    config.subject = "{stream}".into();
    let sink = sink(config);
    for _ in 0..3 {
        let mut batch: Vec<Delivery> =
            (1..=20).map(|seq| to("good.one", delivery(seq, &format!("k{seq}")))).collect();
        batch.insert(7, to("denied.one", delivery(99, "denied")));
        let outcomes = sink.deliver(&batch).await;
        let expected = format!("{}u{}", "d".repeat(7), "d".repeat(13));
        assert_eq!(letters(&outcomes), expected, "{outcomes:?}");
        let error = error_of(&outcomes[7]);
        assert_eq!((error.code(), error.destination()), ("not_permitted", Some("subject denied.one")));
    }
    assert_eq!(sink.destinations(&to("good.one", delivery(1, "k")).event), ["subject good.one"]);
}
