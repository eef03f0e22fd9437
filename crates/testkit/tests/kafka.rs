//! The private Kafka is what it says it is, as seen by Kafka's own tools.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

use std::path::{Path, PathBuf};

use airtight_testkit::brokers::kafka::{Kafka, KafkaOptions, Listener, PASSWORD, USER};

const TOPICS: &str = "org.apache.kafka.tools.TopicCommand";
const SECURITY: &str = "org.apache.kafka.common.security";

#[tokio::test]
async fn kafka_keeps_its_data_and_address() {
    let Some(kafka) = Kafka::start("kafka_keeps_its_data_and_address").await else { return };
    let address = kafka.bootstrap();
    kafka.create_topic("kept", 3).await;

    kafka.kill().await;
    kafka.start_again().await;
    let described = kafka.tool(TOPICS, &["--describe", "--topic", "kept"]).await;
    assert!(described.contains("PartitionCount: 3"), "{described}");

    kafka.stop().await;
    assert!(std::net::TcpStream::connect(&address).is_err(), "stopped, and still listening");
    kafka.start_again().await;
    assert_eq!(kafka.bootstrap(), address);
    assert!(topics(&kafka, Listener::Plain, &[]).await.unwrap().contains("kept"));
}

#[tokio::test]
async fn kafka_lets_in_whom_it_knows() {
    let options = KafkaOptions {
        listeners: vec![Listener::Sasl, Listener::Tls, Listener::SaslTls],
        ..KafkaOptions::default()
    };
    let Some(kafka) = Kafka::start_with("kafka_lets_in_whom_it_knows", options).await else { return };
    kafka.create_topic("seen", 1).await;

    let token = format!(
        "sasl.jaas.config={SECURITY}.oauthbearer.OAuthBearerLoginModule required \
         unsecuredLoginStringClaim_sub=\"{USER}\";"
    );
    let token = vec!["security.protocol=SASL_PLAINTEXT".into(), "sasl.mechanism=OAUTHBEARER".into(), token];
    // Not each with each: a tool takes seconds to start.
    let logins = [
        (Listener::Tls, vec!["security.protocol=SSL".into()]),
        (Listener::SaslTls, login("SASL_SSL", "PLAIN", "plain.PlainLoginModule", PASSWORD)),
        (Listener::Sasl, login("SASL_PLAINTEXT", "SCRAM-SHA-512", "scram.ScramLoginModule", PASSWORD)),
        (Listener::Sasl, token),
    ];
    for (listener, settings) in &logins {
        let listed = topics(&kafka, *listener, settings).await;
        assert!(listed.as_ref().is_ok_and(|listed| listed.contains("seen")), "{settings:?}: {listed:?}");
    }

    let wrong = login("SASL_PLAINTEXT", "PLAIN", "plain.PlainLoginModule", "wrong");
    let refused = topics(&kafka, Listener::Sasl, &wrong).await.unwrap_err();
    assert!(refused.contains("Authentication failed"), "{refused}");
}

#[tokio::test]
async fn kafka_shows_nothing_to_who_may_not_see_it() {
    let options = KafkaOptions { listeners: vec![Listener::Sasl], acls: true, ..KafkaOptions::default() };
    let Some(kafka) = Kafka::start_with("kafka_shows_nothing_to_who_may_not_see_it", options).await else {
        return;
    };
    kafka.create_topic("secret", 1).await;
    let alice = login("SASL_PLAINTEXT", "PLAIN", "plain.PlainLoginModule", PASSWORD);
    let before = topics(&kafka, Listener::Sasl, &alice).await.unwrap();
    assert!(!before.contains("secret"), "{before}");
    kafka.allow(USER, "Describe", "secret").await;
    let after = topics(&kafka, Listener::Sasl, &alice).await.unwrap();
    assert!(after.contains("secret"), "{after}");
}

fn login(protocol: &str, mechanism: &str, module: &str, password: &str) -> Vec<String> {
    vec![
        format!("security.protocol={protocol}"),
        format!("sasl.mechanism={mechanism}"),
        format!("sasl.jaas.config={SECURITY}.{module} required username=\"{USER}\" password=\"{password}\";"),
    ]
}

/// The topics that a client with these settings sees, or what the tool said instead.
async fn topics(kafka: &Kafka, listener: Listener, settings: &[String]) -> Result<String, String> {
    let directory = tempfile::tempdir().unwrap();
    let config = client_config(directory.path(), &kafka.ca(), settings);
    let config = config.to_str().unwrap();
    let address = kafka.address(listener);
    let args = ["--bootstrap-server", &address, "--command-config", config, "--list"];
    kafka.installation().run(TOPICS, &args).await
}

fn client_config(directory: &Path, ca: &Path, settings: &[String]) -> PathBuf {
    let file = directory.join("client.properties");
    let trust = format!("ssl.truststore.type=PEM\nssl.truststore.location={}\n", ca.display());
    std::fs::write(&file, trust + &settings.join("\n")).unwrap();
    file
}
