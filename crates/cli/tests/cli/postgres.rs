//! What only a server can show. The first test needs none: it is about a server that is away.

use airtight_testkit::postgres::TestDb;
use serde_json::json;

use crate::support::{Ran, Running, airtight, finish};

#[cfg(unix)]
#[test]
fn a_server_that_is_away_is_waited_for() {
    let port = airtight_testkit::ports::Port::reserve();
    let url = format!("postgres://app:hush@127.0.0.1:{port}/shop");
    let relay = Running::start(airtight(["run", "--from", &url, "--to", "null:"]));
    let first = relay.wait_for_log("trying again in");
    assert!(first.contains("cannot reach postgres://app:XXX@127.0.0.1:"), "{first}");
    relay.wait_for_log("trying again in");
    relay.signal("TERM");
    let (status, rest) = relay.wait();
    assert!(status.success(), "{status}: {rest}");
    assert!(!rest.contains("hush") && !rest.contains("panicked"), "{rest}");
}

async fn run(url: &str, args: &[&str], input: &str) -> Ran {
    let mut command = airtight(args);
    command.env("DATABASE_URL", url);
    let input = input.to_owned();
    tokio::task::spawn_blocking(move || finish(command, &input)).await.expect("it ran")
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_credentials_and_missing_databases_stop_at_once() {
    let Some(db) = TestDb::create("cli_bad_credentials").await else { return };
    let mut nowhere = url::Url::parse(&db.url()).unwrap();
    nowhere.set_path("/no_such_database");
    let error = run(nowhere.as_str(), &["run", "--to", "null:"], "").await.error(1);
    assert!(error.contains("no_such_database"), "{error}");

    let mut stranger = url::Url::parse(&db.url()).unwrap();
    stranger.set_username("no_such_role").unwrap();
    stranger.set_password(Some("hush")).unwrap();
    let error = run(stranger.as_str(), &["run", "--to", "null:"], "").await.error(1);
    assert!(!error.contains("hush"), "{error}");

    let error = run(&db.url(), &["run", "--to", "null:"], "").await.error(1);
    assert!(error.contains("airtight migrate"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_way_through_a_server() {
    let Some(db) = TestDb::create("cli_whole_way").await else { return };
    let url = db.url();
    run(&url, &["migrate"], "").await.ok();
    assert_eq!(run(&url, &["migrate", "--json"], "").await.json()["steps"], json!([]));
    let line = r#"{"stream":"s","type":"T","aggregateType":"A","aggregateId":"1","payload":{"n":1}}"#;
    let lines = format!("{line}\n").repeat(1_200);
    assert_eq!(run(&url, &["publish", "--json"], &lines).await.json()["published"], 1_200);
    assert_eq!(run(&url, &["status", "--json"], "").await.json()["streams"][0]["pending"], 1_200);
    assert_eq!(
        run(&url, &["run", "--to", "null:", "--drain", "--json"], "").await.json()["delivered"],
        1_200
    );
    assert_eq!(run(&url, &["check", "--json"], "").await.json()["ok"], true);
    assert_eq!(run(&url, &["prune", "--older-than", "0s", "--json"], "").await.json()["pruned"], 1_200);
}
