//! `airtight run`.

use airtight_testkit::http::{HttpServer, Reply};
use serde_json::Value;

use crate::support::{Running, Shop, finish};

#[test]
fn a_drain_delivers_each_key_in_order_and_says_how_much() {
    let shop = Shop::new();
    let lines: String = (0..300)
        .map(|n| {
            format!(
                "{{\"stream\":\"s\",\"type\":\"T\",\"aggregateType\":\"A\",\"aggregateId\":\"{}\",\"payload\":{n}}}\n",
                n % 7
            )
        })
        .collect();
    shop.run_with(&["publish"], &lines).ok();
    let summary = shop.run(&["run", "--to", "file:out.ndjson", "--drain", "--batch", "50", "--json"]).json();
    assert_eq!(summary["delivered"], 300);
    let mut last = std::collections::HashMap::new();
    for event in shop.lines("out.ndjson") {
        let number = event["payload"].as_u64();
        let before = last.insert(event["aggregateId"].clone(), number);
        assert!(before.is_none_or(|before| before < number), "{event}");
    }
    let again = shop.run(&["run", "--to", "null:", "--drain"]).ok();
    assert!(again.starts_with("delivered 0 events in "), "{again}");
}

#[test]
fn only_the_streams_that_were_asked_for() {
    let shop = Shop::new();
    shop.publish("1", "{}");
    let summary = shop.run(&["run", "--to", "null:", "--stream", "other", "--drain", "--json"]).json();
    assert_eq!(summary["delivered"], 0);
    let summary = shop.run(&["run", "--to", "null:", "--stream", "shop.orders", "--drain", "--json"]).json();
    assert_eq!(summary["delivered"], 1);
}

#[test]
fn the_summary_stays_out_of_the_events_on_standard_output() {
    let shop = Shop::new();
    shop.publish("1", "{}");
    let ran = shop.run(&["run", "--to", "stdout:", "--drain", "--json"]);
    assert!(ran.stderr.contains("\"delivered\":1"), "{ran:?}");
    let event = ran.json();
    assert_eq!(event["aggregateId"], "1");
}

#[cfg(unix)]
#[test]
fn a_relay_follows_and_stops_at_a_signal() {
    for signal in ["INT", "TERM"] {
        let shop = Shop::new();
        let relay = Running::start(shop.command(&["run", "--to", "stdout:", "--poll", "20"]));
        relay.wait_for_log("relaying");
        shop.publish("later", "{}");
        let event: Value = serde_json::from_str(&relay.next_line()).unwrap();
        assert_eq!(event["aggregateId"], "later");
        relay.signal(signal);
        let (status, rest) = relay.wait();
        assert!(status.success(), "{status}: {rest}");
        let rows = shop.run(&["events", "list", "--json"]).json();
        assert_eq!(rows[0]["state"], "done");
        let relays = shop.run(&["status", "--json"]).json();
        assert_eq!(relays["relays"], serde_json::json!([]), "it has left");
    }
}

/// The remedy is followed to the letter.
#[cfg(unix)]
#[test]
fn a_file_removed_under_a_relay_ends_it_and_the_remedy_delivers_what_it_held() {
    let shop = Shop::new();
    let nobody = airtight_testkit::ports::Port::reserve();
    let to = format!("http://127.0.0.1:{nobody}/");
    shop.publish("1", "{}");
    shop.publish("2", "{}");
    let relay = Running::start(shop.command(&["run", "--to", &to, "--lease", "1"]));
    relay.wait_for_log("the sink is unavailable");
    for file in ["shop.db", "shop.db-wal", "shop.db-shm"] {
        std::fs::remove_file(shop.path(file)).unwrap();
    }
    let (status, rest) = relay.wait();
    assert_eq!(status.code(), Some(1), "{rest}");
    let error = rest.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("{rest}"));
    let (_, remedy) = error.split_once("Fix: ").unwrap_or_else(|| panic!("{error}"));
    let url =
        remedy.split(' ').find(|word| word.starts_with("sqlite:")).unwrap_or_else(|| panic!("{remedy}"));
    assert!(remedy.contains(&format!("--from {url}")) && remedy.contains("with --drain"), "{remedy}");
    let args = ["run", "--to", "file:out.ndjson", "--lease", "1", "--from", url, "--drain", "--json"];
    assert_eq!(shop.run(&args).json()["delivered"], 2);
    assert_eq!(shop.lines("out.ndjson").len(), 2);
}

#[test]
fn json_logs_are_json() {
    let shop = Shop::new();
    let ran = shop.run(&["run", "--to", "null:", "--drain", "--log-format", "json"]);
    let line: Value = serde_json::from_str(ran.stderr.lines().next().unwrap()).unwrap();
    assert_eq!(line["message"], "relaying");
    assert_eq!(line["pipeline"], "default");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_is_signed_with_the_secret_of_the_environment() {
    let server = HttpServer::start().await;
    let shop = Shop::new();
    shop.publish("1", "{\"n\":1}");
    let mut command = shop.command(&["run", "--to", &server.url("/hook"), "--drain"]);
    command.env("AIRTIGHT_WEBHOOK_SECRET", "hush");
    let ran = tokio::task::spawn_blocking(move || finish(command, "")).await.unwrap();
    assert!(!ran.stderr.contains("hush"), "{ran:?}");
    ran.ok();
    let requests = server.requests();
    assert_eq!(requests.len(), 1);
    assert!(requests[0].header("webhook-signature").is_some_and(|value| value.starts_with("v1,")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_event_is_dead_and_a_person_decides() {
    let server = HttpServer::start().await;
    server.rule(|_| Reply::status(422));
    let shop = Shop::new();
    let first = shop.publish("1", "{}");
    shop.publish("2", "{}");
    shop.publish("3", "{}");
    let drain = |to: String| {
        let command = shop.command(&["run", "--to", &to, "--drain", "--json"]);
        tokio::task::spawn_blocking(move || finish(command, "").json())
    };
    assert_eq!(drain(server.url("/")).await.unwrap()["dead"], 3);

    let dead = shop.run(&["dead", "list", "--json"]).json();
    assert_eq!(dead.as_array().unwrap().len(), 3);
    assert_eq!(dead[0]["error_code"], "http_422", "{dead}");
    let human = shop.run(&["dead", "list"]).ok();
    assert!(human.contains("http_422"), "{human}");
    assert!(shop.run(&["status"]).ok().contains("3 dead letters to decide about"));

    // One by one, by id and by seq; then all the rest.
    let id = first["id"].as_str().unwrap();
    assert_eq!(shop.run(&["dead", "retry", id]).ok(), format!("{id}: due now\n"));
    assert_eq!(shop.run(&["dead", "discard", "2"]).ok(), "2: discarded\n");
    assert_eq!(shop.run(&["dead", "discard", "2"]).error(1), "error: 2: there is no such event");
    assert_eq!(shop.run(&["dead", "retry", "--all", "--stream", "other", "--json"]).json()["retried"], 0);
    assert_eq!(
        shop.run(&["dead", "retry", "--all", "--stream", "shop.orders"]).ok(),
        "1 dead letter due now\n"
    );

    server.rule(|_| Reply::status(204));
    assert_eq!(drain(server.url("/")).await.unwrap()["delivered"], 2);
    assert_eq!(shop.run(&["dead", "list"]).ok(), "no dead letters\n");
    assert_eq!(
        shop.run(&["events", "retry", id]).error(1),
        format!("error: {id}: refused, the event is done")
    );

    server.rule(|_| Reply::status(400));
    shop.publish("4", "{}");
    assert_eq!(drain(server.url("/")).await.unwrap()["dead"], 1);
    assert_eq!(shop.run(&["dead", "discard", "--all", "--yes"]).ok(), "1 dead letter discarded\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_key_is_listed_and_goes_on_when_its_dead_event_is_gone() {
    let server = HttpServer::start().await;
    server.rule(|request| {
        Reply::status(if request.body.windows(6).any(|word| word == b"poison") { 422 } else { 204 })
    });
    let shop = Shop::new();
    shop.publish("k", "\"poison\"");
    shop.publish("k", "\"behind\"");
    let drain = |to: String| {
        let command = shop.command(&["run", "--to", &to, "--on-dead", "block", "--drain", "--json"]);
        tokio::task::spawn_blocking(move || finish(command, "").json())
    };
    assert_eq!(drain(server.url("/")).await.unwrap()["delivered"], 0);
    let blocked = shop.run(&["events", "blocked", "--json"]).json();
    assert_eq!((&blocked[0]["aggregate_id"], &blocked[0]["behind_state"]), (&"k".into(), &"dead".into()));
    shop.run(&["dead", "discard", "1"]).ok();
    assert_eq!(drain(server.url("/")).await.unwrap()["delivered"], 1);
    assert_eq!(shop.run(&["events", "blocked"]).ok(), "no key is blocked\n");
}

#[test]
fn a_secret_that_cannot_be_is_refused_before_anything_starts() {
    let shop = Shop::new();
    let args = ["run", "--to", "http://127.0.0.1:1/", "--webhook-secret", "whsec_hush!"];
    let error = shop.run(&args).error(2);
    assert!(error.contains("`secret`") && !error.contains("hush"), "{error}");
}
