//! `airtight publish`.

use serde_json::{Value, json};

use crate::support::Shop;

const GOOD: &str = r#"{"stream":"s","type":"T","aggregateType":"A","aggregateId":"1"}"#;

fn count(shop: &Shop) -> u64 {
    let status = shop.run(&["status", "--json"]).json();
    let streams = status["streams"].as_array().expect("an array");
    streams.iter().filter_map(|stream| stream["pending"].as_u64()).sum()
}

#[test]
fn what_was_published_arrives_as_it_was() {
    let shop = Shop::new();
    let payload = r#"{"b": 1.10, "a": [1e2, "ü"]}"#;
    shop.publish("42", payload);
    shop.run(&["run", "--to", "file:out.ndjson", "--drain"]).ok();
    let text = std::fs::read_to_string(shop.path("out.ndjson")).unwrap();
    assert!(text.contains(&format!("\"payload\":{payload}}}")), "byte for byte: {text}");
    let event = &shop.lines("out.ndjson")[0];
    assert_eq!(event["stream"], "shop.orders");
    assert_eq!(event["type"], "OrderPlaced");
    assert_eq!(event["aggregateType"], "Order");
    assert_eq!(event["aggregateId"], "42");
    assert_eq!(event["op"], "upsert");
}

#[test]
fn one_id_is_stored_once() {
    let shop = Shop::new();
    let id = "0198f2c4-7a5e-7c3e-9d0a-0d2f5a3f9b11";
    let args = [
        "publish",
        "--stream",
        "s",
        "--type",
        "T",
        "--aggregate-type",
        "A",
        "--key",
        "1",
        "--id",
        id,
        "--op",
        "delete",
        "--header",
        "source=test=1",
        "--json",
    ];
    let first = shop.run(&args).json();
    assert_eq!((&first["id"], &first["is_new"]), (&json!(id), &json!(true)));
    assert_eq!(shop.run(&args).json(), json!({"id": id, "seq": first["seq"], "is_new": false}));
    let shown = shop.run(&["events", "show", id, "--json"]).json();
    assert_eq!(shown["event"]["op"], "delete");
    assert_eq!(shown["event"]["headers"], json!({"source": "test=1"}));
}

#[test]
fn a_payload_from_a_file_or_standard_input() {
    let shop = Shop::new();
    shop.write("body.json", "{\"from\": \"file\"}");
    shop.write("body.bin", "\u{1}\u{2}");
    let base = ["publish", "--stream", "s", "--type", "T", "--aggregate-type", "A", "--key", "1"];
    let with = |more: &[&'static str]| [&base[..], more].concat();
    shop.run(&with(&["--payload-file", "body.json"])).ok();
    shop.run_with(&with(&["--payload", "-"]), "{\"from\": \"stdin\"}").ok();
    shop.run(&with(&["--payload-file", "body.bin", "--bytes"])).ok();
    shop.run(&["run", "--to", "file:out.ndjson", "--drain"]).ok();
    let bodies: Vec<Value> = shop.lines("out.ndjson");
    assert_eq!(bodies[0]["payload"], json!({"from": "file"}));
    assert_eq!(bodies[1]["payload"], json!({"from": "stdin"}));
    assert_eq!(bodies[2]["payloadBase64"], "AQI=");

    let error = shop.run(&with(&["--payload", "{oops"])).error(2);
    assert!(error.starts_with("error: payload is not JSON: "), "{error}");
    let error = shop.run(&with(&["--payload-file", "none.json"])).error(1);
    assert!(error.starts_with("error: cannot read none.json: "), "{error}");
}

#[test]
fn many_lines_at_once() {
    let shop = Shop::new();
    let lines: String = (0..2_500).map(|n| GOOD.replace("\"1\"", &format!("\"{n}\"")) + "\n").collect();
    let done = shop.run_with(&["publish", "--stdin", "--json"], &lines).json();
    assert_eq!((&done["published"], &done["duplicates"]), (&json!(2_500), &json!(0)));
    assert_eq!(count(&shop), 2_500);
}

#[test]
fn a_bad_line_stops_with_its_number_and_what_was_committed() {
    for (bad, expected) in [
        (GOOD.replace("stream", "strem"), "line 4: unknown field `strem`; did you mean `stream`?"),
        (GOOD.replace("\"s\"", "7"), "line 4: invalid type: integer `7`"),
        ("{oops".to_owned(), "line 4: not valid JSON: key must be a string (column 2)"),
        (
            GOOD.replace('}', r#","payload":{"a":"\u0000"}}"#),
            "line 4: payload holds a NUL character (\\u0000)",
        ),
    ] {
        let shop = Shop::new();
        // The second line is empty, and counts as a line.
        let error = shop.run_with(&["publish"], &format!("{GOOD}\n\n{GOOD}\n{bad}\n{GOOD}\n")).error(1);
        assert!(error.starts_with(&format!("error: {expected}")), "{error}");
        assert!(error.ends_with("(committed before it: 2 events; after it: none)"), "{error}");
        assert_eq!(count(&shop), 2);
    }
}

#[test]
fn what_tail_prints_can_be_published_elsewhere() {
    let (one, other) = (Shop::new(), Shop::new());
    let id = one.publish("7", "{\"n\": 1}")["id"].clone();
    one.publish("8", "null");
    let lines = one.run(&["tail", "--from-start", "--no-follow", "--json"]).ok();
    assert_eq!(other.run_with(&["publish", "--json"], &lines).json()["published"], 2);
    assert_eq!(other.run_with(&["publish", "--json"], &lines).json()["duplicates"], 2);
    let copied = other.run(&["events", "list", "--json"]).json();
    assert_eq!(copied[0]["id"], id);
}
