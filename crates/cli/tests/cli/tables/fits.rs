//! What `check` says of columns, types and other tables, and how an event is named.

use serde_json::json;

use super::{Bank, Mapping, PLAIN};
use crate::support::Shop;

const TABLE: &str = "CREATE TABLE transfer_events (event_id varchar(20) PRIMARY KEY, transfer_id varchar(20), body text, \
    status varchar(20) DEFAULT 'PENDING', attempts int DEFAULT 0, next_retry_at timestamp, created_at timestamp, problem text)";

#[tokio::test(flavor = "multi_thread")]
async fn columns_of_the_wrong_type_are_refused() {
    let Some(bank) = Bank::postgres("fits_types").await else { return };
    bank.execute(&TABLE.replace("attempts int", "spare bytea, attempts int")).await;
    bank.config(&PLAIN.text());
    bank.run(&["migrate"]).ok();
    for (columns, column) in [
        ("created_at = \"body\"", "body"),
        ("next_retry_at = \"attempts\"", "attempts"),
        ("finished_at = \"problem\"", "problem"),
        ("count = { attempts = \"problem\" }", "problem"),
        ("error_message = \"attempts\"", "attempts"),
        ("error_code = \"attempts\"", "attempts"),
        ("schema_version = \"problem\"", "problem"),
        ("max_attempts = \"problem\"", "problem"),
        ("claim_token = \"attempts\"", "attempts"),
        ("headers = \"spare\"", "spare"),
        ("payload_bytes = \"problem\"", "problem"),
        ("seq = \"problem\"", "problem"),
    ] {
        bank.config(&Mapping { columns, ..PLAIN }.text());
        let checked = bank.run(&["check"]);
        assert_eq!(checked.code, Some(1), "{columns}: {checked:?}");
        let line = checked.stdout.lines().find(|line| line.starts_with("fatal"));
        let line = line.unwrap_or_else(|| panic!("{columns}: {checked:?}"));
        let key = columns.split(' ').next().unwrap();
        assert!(line.contains(column) && line.contains(key) && line.contains("of type"), "{line}");
        let error = bank.run(&["run", "--drain"]).error(1);
        assert!(error.contains("of type"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tables_of_a_preset_are_looked_at() {
    let Some(bank) = Bank::postgres("fits_lookup").await else { return };
    bank.config("[table]\npreset = \"relay-log\"\n[pipelines.index-v1]\nto = \"null:\"\n");
    let outbox = "CREATE SCHEMA cn_relay; CREATE TABLE cn_relay.events_outbox (seq bigserial PRIMARY KEY, op text NOT NULL, \
        event_id text NOT NULL, topic_id text NOT NULL, kind int NOT NULL, created_at int NOT NULL, \
        ingested_at timestamptz NOT NULL, effective_key text, reason text)";
    bank.execute(outbox).await;
    bank.run(&["migrate"]).ok();
    let refused = |words: &[&str]| {
        let checked = bank.run(&["check"]);
        assert_eq!(checked.code, Some(1), "{checked:?}");
        let error = bank.run(&["run", "--drain"]).error(1);
        for word in words {
            assert!(checked.stdout.contains(word), "{word}: {checked:?}");
            assert!(error.contains(word), "{word}: {error}");
        }
    };
    refused(&["\"cn_relay\".\"events\"", "no such table"]);
    bank.execute("CREATE TABLE cn_relay.events (event_id uuid PRIMARY KEY)").await;
    refused(&["\"cn_relay\".\"events\"", "cannot be looked up"]);
    bank.execute("DROP TABLE cn_relay.events; CREATE TABLE cn_relay.events (id text PRIMARY KEY)").await;
    refused(&["no column event_id"]);
    bank.execute("DROP TABLE cn_relay.events; CREATE TABLE cn_relay.events (event_id text PRIMARY KEY)")
        .await;
    refused(&["\"cn_relay\".\"consumer_offsets\"", "no such table"]);
    bank.execute("CREATE TABLE cn_relay.consumer_offsets (consumer text PRIMARY KEY, last_seq text)").await;
    refused(&["no column updated_at"]);
    bank.execute(
        "DROP TABLE cn_relay.consumer_offsets; CREATE TABLE cn_relay.consumer_offsets (consumer text PRIMARY KEY, \
         last_seq bigint NOT NULL, updated_at timestamptz NOT NULL)",
    )
    .await;
    bank.run(&["check"]).ok();
    bank.run(&["run", "--drain"]).ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn codes_are_kept_where_only_the_message_has_a_column() {
    for bank in Bank::both("fits_codes").await {
        bank.execute(TABLE).await;
        let columns = "error_message = \"problem\"\ncount = { attempts = \"attempts\" }\nnext_retry_at = \"next_retry_at\"";
        bank.config(&Mapping { columns, ..PLAIN }.text());
        bank.run(&["migrate"]).ok();
        bank.execute("INSERT INTO transfer_events (event_id, transfer_id, body) VALUES ('a', 't', '{'), ('b', 'u', '1')").await;
        assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["dead"], 1);
        let dead = bank.run(&["dead", "list", "--json"]).json();
        assert_eq!(dead[0]["error_code"], "bad_payload", "{dead}");
        assert_eq!(
            dead[0]["error_message"].as_str(),
            Some(bank.text("SELECT max(problem) FROM transfer_events").await.as_str())
        );
        let found = bank.run(&["dead", "list", "--error-code", "bad_payload", "--json"]).json();
        assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_is_found_by_what_the_list_shows() {
    for bank in Bank::both("fits_seq").await {
        let table = match bank.is_postgres() {
            true => TABLE.to_owned(),
            false => TABLE.replace("event_id varchar(20)", "event_id integer"),
        };
        bank.execute(&table).await;
        bank.config(&Mapping { columns: "created_at = \"created_at\"", ..PLAIN }.text());
        bank.run(&["migrate"]).ok();
        bank.execute(
            "INSERT INTO transfer_events (event_id, transfer_id, body, status, created_at) VALUES \
             (7, 't', '1', 'DEAD', '2026-01-01 00:00:00.000001'), (8, 'u', '1', 'DEAD', '2026-01-01 00:00:00.000002'), \
             (9, 'u', '1', 'DEAD', '2026-01-01 00:00:00.000003'), (10, 'u', '1', 'DEAD', '2026-01-01 00:00:00.000003')",
        )
        .await;
        let listed = bank.run(&["dead", "list", "--json"]).json();
        for row in listed.as_array().unwrap().iter().take(2) {
            let seq = row["seq"].to_string();
            let shown = bank.run(&["dead", "show", &seq, "--json"]).json();
            assert_eq!(shown["id"], row["id"], "{seq}: {shown}");
        }
        bank.run(&["dead", "retry", &listed[1]["seq"].to_string()]).ok();
        assert_eq!(bank.text("SELECT count(*) FROM transfer_events WHERE status = 'PENDING'").await, "1");
        if bank.is_postgres() {
            let error = bank.run(&["dead", "retry", &listed[2]["seq"].to_string()]).error(1);
            assert!(error.contains("give an id"), "{error}");
        }
        let error = bank.run(&["dead", "show", "99"]).error(1);
        assert!(error.contains("there is no event `99`"), "{error}");
    }
}

#[test]
fn a_config_that_cannot_run_does_not_pass_offline() {
    let shop = Shop::new();
    for (text, words) in [
        ("[database]\nurl = \"sqlite:shop.db\"\n", "no pipeline"),
        (
            "[pipelines.a]\nread = \"cdc\"\nto = \"null:\"\n[database]\nurl = \"sqlite:shop.db\"\n",
            "cannot follow SQLite's WAL",
        ),
        ("[pipelines.a]\nread = \"cdc\"\nto = \"null:\"\n", "cannot follow SQLite's WAL"),
    ] {
        shop.write("airtight.toml", text);
        for args in [
            &["check", "-c", "airtight.toml", "--offline", "--json"][..],
            &["check", "-c", "airtight.toml", "--json"],
        ] {
            let ran = shop.run(args);
            assert_eq!(ran.code, Some(1), "{ran:?}");
            let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
            assert_eq!(report["ok"], json!(false), "{report}");
            assert!(report["findings"][0]["message"].as_str().unwrap().contains(words), "{report}");
        }
    }
}

#[test]
fn all_keys_that_a_connectors_file_lacks_are_named_at_once() {
    let shop = Shop::new();
    shop.write("connector.json", "{\"name\": \"c\", \"config\": {\"connector.class\": \"io.debezium.connector.postgresql.PostgresConnector\"}}");
    let error = shop.run(&["run", "--debezium", "connector.json", "--to", "kafka://localhost"]).error(2);
    for key in ["database.hostname", "database.user", "database.dbname", "transforms"] {
        assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
    }
}
