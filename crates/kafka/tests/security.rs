//! Logging in, TLS and rights, on a Kafka that asks for them.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::{Class, Sink};
use airtight_testkit::{
    brokers::kafka::{Kafka, KafkaOptions, Listener, PASSWORD, USER},
    deliveries::{error_of, letters},
};

use self::support::{sink, sized};

const QUICK: &str = "connect_timeout=5s";

#[tokio::test]
async fn every_way_in_works_and_every_refusal_says_why() {
    let listeners = vec![Listener::Sasl, Listener::Tls, Listener::SaslTls];
    let options = KafkaOptions { listeners, ..KafkaOptions::default() };
    let Some(kafka) = Kafka::start_with("every_way_in_works_and_every_refusal_says_why", options).await
    else {
        return;
    };
    kafka.create_topic("t", 1).await;
    let (sasl, tls, both) =
        (kafka.address(Listener::Sasl), kafka.address(Listener::Tls), kafka.address(Listener::SaslTls));
    let ca = kafka.ca().display().to_string();
    let login = format!("{USER}:{PASSWORD}");
    let token = "sasl.oauthbearer.config=principal%3Dalice&enable.sasl.oauthbearer.unsecure.jwt=true";
    for url in [
        format!("kafka://{login}@{sasl}/t?{QUICK}"),
        format!("kafka://{login}@{sasl}/t?sasl=plain&{QUICK}"),
        format!("kafka://{login}@{sasl}/t?sasl=scram-sha-256&{QUICK}"),
        format!("kafka://{login}@{sasl}/t?sasl=scram-sha-512&{QUICK}"),
        format!("kafka://{sasl}/t?sasl=oauthbearer&{token}&{QUICK}"),
        format!("kafka+tls://{tls}/t?ca={ca}&{QUICK}"),
        format!("kafka+tls://{login}@{both}/t?ca={ca}&sasl=scram-sha-512&{QUICK}"),
    ] {
        let sink = sink(&url);
        sink.open().await.unwrap_or_else(|error| panic!("{url}: {error}"));
        assert_eq!(letters(&sink.deliver(&[sized(1, "k", 10)]).await), "d", "{url}");
    }
    for (url, code) in [
        (format!("kafka://{USER}:hunter2@{sasl}/t?{QUICK}"), "credentials"),
        (format!("kafka://{USER}:hunter2@{sasl}/t?sasl=scram-sha-512&{QUICK}"), "credentials"),
        // The system's authorities know nothing of this one.
        (format!("kafka+tls://{tls}/t?{QUICK}"), "tls"),
        // TLS where there is none, no login where one is asked for, and plain where TLS is.
        (format!("kafka+tls://{sasl}/t?{QUICK}"), "wrong_protocol"),
        (format!("kafka://{sasl}/t?{QUICK}"), "wrong_protocol"),
        (format!("kafka://{tls}/t?{QUICK}"), "wrong_protocol"),
    ] {
        let sink = sink(&url.replace(QUICK, "connect_timeout=2s"));
        let refused = sink.open().await.expect_err(&url);
        assert_eq!(refused.class(), Class::Unavailable);
        // A server that expects another protocol hangs up, or waits in silence for more.
        let said = if refused.code() == "timeout" { "wrong_protocol" } else { refused.code() };
        assert_eq!(said, code, "{url}: {refused}");
        assert!(!refused.message().contains("hunter2"), "{refused}");
        let outcomes = sink.deliver(&[sized(1, "k", 10)]).await;
        assert_eq!(letters(&outcomes), "u", "{url}");
    }
}

#[tokio::test]
async fn missing_rights_are_nobodys_fault() {
    let options = KafkaOptions { listeners: vec![Listener::Sasl], acls: true, ..KafkaOptions::default() };
    let Some(kafka) = Kafka::start_with("missing_rights_are_nobodys_fault", options).await else { return };
    kafka.create_topic("t", 1).await;
    let url = format!("kafka://{USER}:{PASSWORD}@{}/t?{QUICK}", kafka.address(Listener::Sasl));
    let strict = sink(&url);
    let refused = strict.open().await.unwrap_err();
    assert_eq!((refused.code(), refused.class()), ("not_permitted", Class::Unavailable), "{refused}");
    assert!(refused.message().contains("`t`"), "{refused}");
    // Reading its description is not writing.
    kafka.allow(USER, "Describe", "t").await;
    let batch = [sized(1, "a", 10), sized(2, "b", 10), sized(3, "a", 10)];
    let outcomes = strict.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "uss");
    assert_eq!(error_of(&outcomes[0]).code(), "not_permitted", "{:?}", outcomes[0]);
    kafka.allow(USER, "Write", "t").await;
    assert_eq!(letters(&strict.deliver(&batch).await), "ddd");
    // And creating is another right.
    let creating = sink(&url.replace("/t?", "/new?create=true&"));
    let refused = creating.open().await.unwrap_err();
    assert_eq!((refused.code(), refused.class()), ("not_permitted", Class::Unavailable), "{refused}");
}
