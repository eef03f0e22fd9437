//! Status, lists, tail, prune, migrate.

use serde_json::{Value, json};

use crate::support::{Running, Shop};

#[test]
fn migrating_twice_changes_nothing() {
    let shop = Shop::new();
    assert!(shop.run(&["migrate"]).ok().ends_with(": up to date\n"));
    assert_eq!(shop.run(&["migrate", "--json"]).json()["steps"], json!([]));
}

#[test]
fn the_sql_can_be_printed_for_both_databases() {
    let shop = Shop::new();
    for url in ["sqlite:other.db", "postgres://app:hush@nowhere.invalid/shop"] {
        let sql = shop.run(&["migrate", "--print", "--url", url]).ok();
        assert!(sql.contains("CREATE TABLE"), "{sql}");
        assert!(!sql.contains("hush"));
    }
    assert!(!shop.path("other.db").exists(), "printing touches nothing");
    let sql = shop
        .run(&["migrate", "--print", "--url", "postgres://app@h/shop", "--schema", "mine", "--table", "box"])
        .ok();
    assert!(sql.contains("mine") && sql.contains("box"));
}

#[test]
fn status_for_people_and_for_machines() {
    let shop = Shop::new();
    assert!(shop.run(&["status"]).ok().contains("no events"));
    shop.publish("1", "{}");
    let status = shop.run(&["status", "--json"]).json();
    assert_eq!(status["streams"][0]["stream"], "shop.orders");
    assert_eq!(status["streams"][0]["pending"], 1);
    let human = shop.run(&["status"]).ok();
    assert!(human.contains("shop.orders") && human.contains("no relay is running"), "{human}");
}

#[test]
fn lists_filter_and_page() {
    let shop = Shop::new();
    for key in ["1", "2", "3"] {
        shop.publish(key, "{}");
    }
    let keys = |args: &[&str]| -> Vec<String> {
        let rows = shop.run(&[&["events", "list", "--json"], args].concat()).json();
        rows.as_array().unwrap().iter().map(|row| row["aggregate_id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(keys(&[]), ["1", "2", "3"]);
    assert_eq!(keys(&["--newest", "--limit", "2"]), ["3", "2"]);
    assert_eq!(keys(&["--after", "1"]), ["2", "3"]);
    assert_eq!(keys(&["--key", "2"]), ["2"]);
    assert_eq!(keys(&["--state", "dead"]), [""; 0]);
    assert_eq!(keys(&["--state", "dead", "--state", "pending", "--type", "OrderPlaced"]), ["1", "2", "3"]);
    assert_eq!(keys(&["--stream", "other"]), [""; 0]);
    assert_eq!(shop.run(&["events", "list", "--stream", "other"]).ok(), "no events\n");
    let error = shop.run(&["events", "show", "99"]).error(1);
    assert_eq!(error, "error: there is no event `99`; give an id or a seq");
    assert_eq!(shop.run(&["events", "discard", "1"]).ok(), "1: discarded\n");
    assert_eq!(keys(&[]), ["2", "3"]);
}

#[test]
fn pruning_removes_what_was_delivered_long_enough_ago() {
    let shop = Shop::new();
    shop.publish("1", "{}");
    assert_eq!(shop.run(&["prune", "--older-than", "0s", "--json"]).json()["pruned"], 0, "not delivered yet");
    shop.run(&["run", "--to", "null:", "--drain"]).ok();
    assert_eq!(
        shop.run(&["prune"]).ok(),
        "removed 0 events delivered more than 7d ago, by finished_at (the default)\n"
    );
    assert_eq!(
        shop.run(&["prune", "--older-than", "0s"]).ok(),
        "removed 1 event delivered more than 0s ago, by finished_at (--older-than)\n"
    );
    let error = shop.run(&["prune", "--older-than", "yesterday"]).error(2);
    assert!(error.starts_with("error: --older-than: `yesterday` is not a duration"), "{error}");
}

#[cfg(unix)]
#[test]
fn tail_follows_what_is_written() {
    let shop = Shop::new();
    shop.publish("before", "{}");
    let tail = Running::start(shop.command(&["tail", "--from-start", "--json", "--poll", "20"]));
    let key = |line: &str| serde_json::from_str::<Value>(line).unwrap()["aggregateId"].clone();
    assert_eq!(key(&tail.next_line()), "before");
    shop.publish("after", "{}");
    assert_eq!(key(&tail.next_line()), "after");
    tail.signal("INT");
    let (status, rest) = tail.wait();
    assert!(status.success() && rest.is_empty(), "{status}: {rest}");
}

#[test]
fn tail_for_people_shows_a_line_an_event() {
    let shop = Shop::new();
    shop.publish("1", "{}");
    shop.publish("2", "{}");
    let text = shop.run(&["tail", "--from-start", "--no-follow", "--key", "2"]).ok();
    assert_eq!(text.lines().count(), 1);
    assert!(text.contains("shop.orders  OrderPlaced  Order 2  pending"), "{text}");
    assert_eq!(shop.run(&["tail", "--no-follow"]).ok(), "", "without --from-start the past is the past");
}
