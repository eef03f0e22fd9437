//! An application's own table, without lease or retry columns, relayed and operated by its config.

use sqlx::{Connection, Row, SqliteConnection};

use crate::support::Shop;

const CONFIG: &str = r#"
[table]
name = "transfer_events"
id = "event_id"
created_at = "created_at"
aggregate_id = "transfer_id"
aggregate_type = { constant = "Transfer" }
event_type = "kind"
stream = { constant = "transfers" }
payload = "body"
payload_kind = "json_text"
extra = { branch = "branch_code" }
count = { retries = "retry_count" }

[table.status]
column = "status"
new = "PENDING"
retrying = { word = "FAILED", when = { column = "retry_count", less = 5 } }
done = "PUBLISHED"
dead = { word = "FAILED", when = { column = "retry_count", at_least = 5 } }

[pipelines.transfers]
max_attempts = 5
to = "file:out.ndjson"
"#;

const TABLE: &str = "CREATE TABLE transfer_events (event_id TEXT PRIMARY KEY, transfer_id TEXT NOT NULL, \
    kind TEXT NOT NULL, body TEXT NOT NULL, branch_code TEXT, status TEXT NOT NULL DEFAULT 'PENDING', \
    retry_count INTEGER NOT NULL DEFAULT 0, created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')))";

const ROWS: &str = "INSERT INTO transfer_events (event_id, transfer_id, kind, body, branch_code) VALUES \
    ('e-1', 't-1', 'TransferSent', '{\"amount\": 5}', 'B7'), ('e-2', 't-2', 'TransferSent', '{oops', NULL), \
    ('e-3', 't-3', 'TransferSent', '{\"amount\": 7}', NULL)";

#[tokio::test(flavor = "multi_thread")]
async fn a_table_without_lease_columns_is_relayed_by_its_mapping() {
    let shop = Shop::new();
    shop.write("airtight.toml", CONFIG);
    let path = shop.path("shop.db");
    let mut connection = SqliteConnection::connect(&format!("sqlite:{}", path.display())).await.unwrap();
    sqlx::query(TABLE).execute(&mut connection).await.unwrap();
    sqlx::query(ROWS).execute(&mut connection).await.unwrap();

    let with_config = |args: &[&'static str]| shop.run(&[args, &["-c", "airtight.toml"]].concat());
    with_config(&["migrate"]).ok();
    let checked = with_config(&["check", "--json"]).json();
    assert_eq!(checked["ok"], true, "{checked}");
    let summary = with_config(&["run", "--drain", "--json"]).json();
    assert_eq!((&summary["delivered"], &summary["dead"]), (&2.into(), &1.into()), "{summary}");

    let events = shop.lines("out.ndjson");
    assert_eq!(events[0]["eventId"], "e-1");
    assert_eq!(events[0]["branch"], "B7");
    assert_eq!(events[0]["stream"], "transfers");
    assert_eq!(events[1]["eventId"], "e-3", "a row that is no JSON does not hold up the others");

    let rows = sqlx::query("SELECT event_id, status FROM transfer_events ORDER BY event_id");
    let rows = rows.fetch_all(&mut connection).await.unwrap();
    let words: Vec<String> = rows.iter().map(|row| row.get("status")).collect();
    assert_eq!(words, ["PUBLISHED", "FAILED", "PUBLISHED"]);
    let error = with_config(&["tail", "--from-start", "--no-follow"]).error(2);
    assert!(error.contains("map one as `seq`"), "{error}");
    let dead = with_config(&["dead", "list", "--json"]).json();
    assert_eq!(dead[0]["id"], "e-2", "{dead}");
}
