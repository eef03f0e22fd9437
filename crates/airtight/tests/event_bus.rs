//! The example of the event bus, run both ways on real servers.
#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

#[allow(dead_code, unreachable_pub, reason = "an example has a `main`, and is no library")]
#[path = "../../../examples/event_bus.rs"]
mod example;

use airtight_testkit::{ledger, postgres::TestDb};

#[tokio::test(flavor = "multi_thread")]
async fn the_same_service_and_handlers_run_on_an_outbox_and_on_kafka() {
    let name = "the_same_service_and_handlers_run_on_an_outbox_and_on_kafka";
    let Some(db) = TestDb::create(name).await else { return };
    // With the outbox what was rolled back never existed.
    assert_eq!(example::run("postgres", &db.url(), "").await.unwrap(), 1_500);

    let Some(brokers) = ledger::variable("AIRTIGHT_TEST_KAFKA") else {
        return ledger::skip(name, "no Kafka", "AIRTIGHT_TEST_KAFKA");
    };
    ledger::met("kafka", name);
    // Straight to Kafka it is out: this is what the name of that bus says.
    assert_eq!(example::run("kafka", &db.url(), &brokers).await.unwrap(), 11_499);
    assert_eq!(example::run("postgres", &db.url(), "").await.unwrap(), 1_500);
}
