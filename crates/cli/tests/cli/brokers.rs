//! Every broker from the command line alone: what would be sent, and that it is.

use std::time::Instant;

use airtight_testkit::ledger;

use crate::support::{DEADLINE, Running, Shop};

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
    assert!(made_up.contains("would receive an invented event as:"), "{made_up}");
    for n in 1..=3 {
        shop.publish("order-7", &format!("{{\"n\": {n}}}"));
    }
    let shown = shop.run(&["check", "--to", to]).ok();
    for expected in [" answers", "would receive the newest event as:", destination, "{\"n\": 3}"] {
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

/// One topic of a template is missing. The others go on, `status` names it from another process, its event can be
/// discarded while the relay runs, and a drain says what is left.
#[test]
fn a_missing_topic_is_named_by_status_and_keeps_nobody_waiting() {
    let test = "a_missing_topic_is_named_by_status_and_keeps_nobody_waiting";
    let Some(address) = server("kafka", test) else { return };
    let prefix = format!("cli.{}", unique());
    let shop = Shop::new();
    let event = |kind: &str, key: usize| {
        format!(
            "{{\"stream\":\"s\",\"eventType\":\"T\",\"aggregateType\":\"{kind}\",\"aggregateId\":\"{kind}-{key}\",\"payload\":{{}}}}\n"
        )
    };
    // One that may create topics makes that of the good ones.
    shop.run_with(&["publish"], &event("good", 0)).ok();
    let to = format!("kafka://{address}/{prefix}.{{aggregate_type}}");
    shop.run(&["run", "--to", &format!("{to}?create=true"), "--drain"]).ok();

    let to = format!("{to}?allow.auto.create.topics=false");
    shop.run_with(&["publish"], &(0..3).map(|n| event("missing", n)).collect::<String>()).ok();
    let relay = Running::start(shop.command(&["run", "--to", &to]));
    relay.wait_for_log("a destination is unavailable");
    shop.run_with(&["publish"], &(1..=300).map(|n| event("good", n)).collect::<String>()).ok();
    let done = |count: u64| {
        let deadline = Instant::now() + DEADLINE;
        while shop.run(&["status", "--json"]).json()["streams"][0]["done"].as_u64() < Some(count) {
            assert!(Instant::now() < deadline, "{}", shop.run(&["status"]).ok());
        }
    };
    done(301);
    let status = shop.run(&["status"]).ok();
    let topic = format!("{prefix}.missing");
    assert!(
        status.contains(&format!("3 events wait; no attempt is spent: topic {topic} is away: ")),
        "{status}"
    );
    let away = &shop.run(&["status", "--json"]).json()["away"][0];
    assert_eq!((away["code"].as_str(), away["events"].as_u64()), (Some("away:no_topic"), Some(3)));
    let page = shop.run(&["status", "--metrics"]).ok();
    assert!(page.contains("airtight_outbox_waiting_for_destination{"), "{page}");

    let waiting = shop.run(&["events", "list", "--state", "pending", "--json"]).json();
    let id = waiting[0]["id"].as_str().expect("an id").to_owned();
    let deadline = Instant::now() + DEADLINE;
    // For the moment of a look it is in the relay's hands.
    while shop.run(&["events", "discard", &id]).code != Some(0) {
        assert!(Instant::now() < deadline, "it cannot be discarded");
    }
    relay.signal("TERM");
    relay.wait();

    let drained = shop.run(&["run", "--to", &to, "--drain"]);
    assert_eq!(drained.code, Some(1), "{drained:?}");
    let said = format!("2 event(s) are left in the outbox, and wait for topic {topic}: ");
    assert!(drained.stderr.contains(&said), "{drained:?}");
    // As it says: mended, and run again.
    shop.run(&["run", "--to", &to.replace("allow.auto.create.topics=false", "create=true"), "--drain"]).ok();
    done(303);
}

/// Fields in a webhook's address are expanded, `check` shows them, and a drain ends at an endpoint that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_webhook_may_have_fields_in_its_address_and_be_gone() {
    let http = airtight_testkit::http::HttpServer::start().await;
    http.rule(|request| {
        airtight_testkit::http::Reply::status(if request.target == "/hooks/Order" { 200 } else { 410 })
    });
    let shop = Shop::new();
    shop.publish("order-7", "{}");
    let to = http.url("/hooks/{aggregate_type}");
    let shown = shop.run(&["check", "--to", &to]).ok();
    assert!(shown.contains("with aggregate_type=Order"), "{shown}");
    shop.run(&["run", "--to", &to, "--drain"]).ok();
    assert_eq!(http.wait_for(1).await[0].target, "/hooks/Order");
    let refused = shop.run(&["check", "--to", &http.url("/{agregate_type}")]);
    assert!(
        refused.code != Some(0) && refused.stderr.contains("did you mean `{aggregate_type}`"),
        "{refused:?}"
    );

    shop.publish("order-8", "{}");
    for gone in ["/gone", "/gone/{aggregate_id}"] {
        let drained = shop.run(&["run", "--to", &http.url(gone), "--drain"]);
        assert_eq!(drained.code, Some(1), "{drained:?}");
        assert!(drained.stderr.contains("410 Gone"), "{drained:?}");
    }
    shop.run(&["run", "--to", &to, "--drain"]).ok();
}
