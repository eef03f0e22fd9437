//! Every broker from the command line alone: what would be sent, and that it is.

use airtight_testkit::ledger;

use crate::support::Shop;

/// The address of a shared server, as `scripts/services` tells it.
fn server(name: &str, test: &str) -> Option<String> {
    let variable = format!("AIRTIGHT_TEST_{}", name.to_uppercase());
    match ledger::variable(&variable) {
        Some(address) => {
            ledger::met(name, test);
            Some(address)
        }
        None => {
            ledger::skip(test, &format!("no {name}"), &variable);
            None
        }
    }
}

/// Shows three events in `check`, and drains them.
fn goes_through(to: &str, destination: &str) {
    let shop = Shop::new();
    let made_up = shop.run(&["check", "--to", to]).ok();
    assert!(made_up.contains("would get an event that is made up:"), "{made_up}");
    for n in 1..=3 {
        shop.publish("order-7", &format!("{{\"n\": {n}}}"));
    }
    let shown = shop.run(&["check", "--to", to]).ok();
    for expected in [" answers", "would get the newest event:", destination, "{\"n\": 3}"] {
        assert!(shown.contains(expected), "{expected:?} is not in {shown}");
    }
    let json = shop.run(&["check", "--to", to, "--json"]).json();
    assert_eq!(json["samples"][0]["body"], "{\"n\": 3}");
    assert_eq!(json["samples"][0]["madeUp"], false);
    let summary = shop.run(&["run", "--to", to, "--drain", "--json"]).json();
    assert_eq!(summary["delivered"], 3, "{summary}");
    assert_eq!(summary["dead"], 0, "{summary}");
}

fn unique() -> String {
    uuid::Uuid::now_v7().simple().to_string()
}

#[test]
fn kafka_from_the_command_line() {
    let Some(address) = server("kafka", "kafka_from_the_command_line") else { return };
    let topic = format!("cli.{}", unique());
    goes_through(&format!("kafka://{address}/{topic}?format=raw&create=true"), &format!("topic {topic}"));
}

#[test]
fn nats_from_the_command_line() {
    let Some(address) = server("nats", "nats_from_the_command_line") else { return };
    let subject = format!("cli{}", unique());
    let to = format!("{address}/{subject}?format=raw&stream={subject}&create=true");
    goes_through(&to, &format!("subject {subject}"));
}

#[test]
fn rabbitmq_from_the_command_line() {
    let Some(address) = server("rabbitmq", "rabbitmq_from_the_command_line") else { return };
    let queue = format!("cli.{}", unique());
    goes_through(&format!("{address}?format=raw&routing_key={queue}&declare=true"), &queue);
}

#[test]
fn redis_from_the_command_line() {
    let Some(address) = server("redis", "redis_from_the_command_line") else { return };
    let key = format!("cli.{}", unique());
    goes_through(&format!("{address}?format=raw&key={key}"), &key);
}

#[test]
fn a_broker_that_is_not_there_is_found_by_check_and_waited_for_by_a_relay() {
    let shop = Shop::new();
    let port = airtight_testkit::ports::Port::reserve();
    for to in [
        format!("kafka://127.0.0.1:{port}?connect_timeout=1s"),
        format!("nats://127.0.0.1:{port}?connect_timeout=1s"),
        format!("amqp://127.0.0.1:{port}?connect_timeout=1s"),
        format!("redis://127.0.0.1:{port}?connect_timeout=1s"),
    ] {
        let ran = shop.run(&["check", "--to", &to]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stdout.contains("fatal --to: "), "{ran:?}");
        assert!(ran.stdout.contains("a relay would wait for it"), "{ran:?}");
    }
}
