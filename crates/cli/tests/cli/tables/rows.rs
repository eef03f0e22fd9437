//! One bad row never blinds the rest.

use serde_json::json;

use super::{Bank, Mapping, PLAIN};

const TABLE: &str = "CREATE TABLE transfer_events (event_id varchar(20) PRIMARY KEY, transfer_id varchar(20), body text, \
    status varchar(20) DEFAULT 'PENDING', attempts int DEFAULT 0, next_retry_at timestamp, created_at timestamp)";

const COLUMNS: &str =
    "created_at = \"created_at\"\nnext_retry_at = \"next_retry_at\"\ncount = { attempts = \"attempts\" }";

async fn open(bank: &Bank, table: &str, columns: &str, rows: &str) {
    bank.execute(table).await;
    bank.config(&Mapping { columns, ..PLAIN }.text());
    bank.run(&["migrate"]).ok();
    bank.execute(&format!("INSERT INTO transfer_events {rows}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_without_a_time_is_listed_counted_and_delivered() {
    for bank in Bank::both("rows_null_time").await {
        open(
            &bank,
            TABLE,
            COLUMNS,
            "(event_id, transfer_id, body, created_at, status) VALUES ('a', 't', '1', NULL, 'PENDING'), \
             ('b', 't', '2', '2026-01-01 00:00:00', 'PENDING'), ('c', 'u', '3', NULL, 'DEAD'), \
             ('d', 'u', '4', '2026-01-01 00:00:00', 'DEAD')",
        )
        .await;
        assert_eq!(bank.run(&["events", "list", "--json"]).json().as_array().unwrap().len(), 4);
        assert_eq!(bank.run(&["dead", "list", "--json"]).json().as_array().unwrap().len(), 2);
        let shown = bank.run(&["events", "show", "a", "--json"]).json();
        assert_eq!((&shown["created_at"], &shown["problem"]), (&json!(null), &json!(null)), "{shown}");
        assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 2);
        assert_eq!(bank.delivered(), ["a", "b"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_that_nobody_explains_is_counted() {
    for bank in Bank::both("rows_null_status").await {
        open(
            &bank,
            TABLE,
            COLUMNS,
            "(event_id, transfer_id, body, status) VALUES ('a', 't', '1', NULL), ('b', 't', '2', 'CANCELLED'), \
             ('c', 'u', '3', 'PENDING'), ('d', 'u', '4', 'PUBLISHED')",
        )
        .await;
        let status = bank.run(&["status", "--json"]).json();
        let stream = &status["streams"][0];
        assert_eq!(
            (&stream["unexplained"], &stream["pending"], &stream["done"]),
            (&json!(2), &json!(1), &json!(1)),
            "{status}"
        );
        let said = bank.run(&["status"]).ok();
        assert!(said.contains("2 rows have a status that no role explains"), "{said}");
        assert!(bank.run(&["status", "--metrics"]).ok().contains("unexplained"));
        let checked = bank.run(&["check"]).ok();
        let line = checked.lines().find(|line| line.contains("no role explains")).expect("a note");
        assert!(line.contains("NULL") && line.contains("CANCELLED") && !line.contains("PUBLISHED"), "{line}");
        assert_eq!(bank.run(&["events", "list", "--json"]).json().as_array().unwrap().len(), 4);
        assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn times_that_no_calendar_has_are_listed() {
    let Some(bank) = Bank::postgres("rows_far_times").await else { return };
    open(
        &bank,
        TABLE,
        COLUMNS,
        "(event_id, transfer_id, body, created_at, next_retry_at) VALUES ('a', 'a', '1', now(), '20000-01-01'), \
         ('b', 'b', '2', now(), 'infinity'), ('c', 'c', '3', now(), '-infinity'), ('d', 'd', '4', '4000-01-01 BC', NULL), \
         ('e', 'e', '5', 'infinity', NULL), ('f', 'f', '6', '-infinity', '4000-01-01 BC'), ('g', 'g', '7', '200000-01-01', NULL)",
    )
    .await;
    let rows = bank.run(&["events", "list", "--json"]).json();
    assert_eq!(rows.as_array().unwrap().len(), 7, "{rows}");
    assert!(rows.as_array().unwrap().iter().all(|row| row["held"] == false), "{rows}");
    bank.run(&["events", "list"]).ok();
    for id in ["a", "b", "c", "d", "e", "f", "g"] {
        bank.run(&["events", "show", id]).ok();
        assert_eq!(bank.run(&["events", "show", id, "--json"]).json()["problem"], json!(null), "{id}");
    }
    bank.run(&["status"]).ok();
    bank.execute("UPDATE transfer_events SET next_retry_at = NULL WHERE event_id IN ('a', 'b')").await;
    assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_at_its_end_costs_one_row_at_most() {
    for bank in Bank::both("rows_counts").await {
        for (kind, values) in [
            ("smallint", ["32767", "-32768", "NULL"]),
            ("int", ["2147483647", "-2147483648", "NULL"]),
            ("bigint", ["9223372036854775807", "-9223372036854775808", "NULL"]),
        ] {
            for count in ["attempts", "retries"] {
                bank.execute("DROP TABLE IF EXISTS transfer_events").await;
                let [most, least, none] = values;
                open(
                    &bank,
                    &TABLE.replace("attempts int", &format!("attempts {kind}")),
                    &COLUMNS.replace("{ attempts", &format!("{{ {count}")),
                    &format!(
                        "(event_id, transfer_id, body, attempts) VALUES ('a', 'a', '{{', {most}), ('b', 'b', '1', {most}), \
                         ('c', 'c', '2', {least}), ('d', 'd', '3', {none}), ('e', 'e', '{{', {least})"
                    ),
                )
                .await;
                assert_eq!(bank.run(&["events", "list", "--json"]).json().as_array().unwrap().len(), 5);
                bank.run(&["status"]).ok();
                let summary = bank.run(&["run", "--drain", "--json"]).json();
                assert_eq!(
                    (&summary["delivered"], &summary["dead"]),
                    (&json!(3), &json!(2)),
                    "{kind} {count}: {summary}"
                );
                std::fs::remove_file(bank.dir.path().join("out.ndjson")).unwrap();
            }
        }
    }
}

/// Values that their columns allow and that no event can have.
#[tokio::test(flavor = "multi_thread")]
async fn odd_values_cost_their_own_row_at_most() {
    let Some(bank) = Bank::postgres("rows_odd").await else { return };
    open(
        &bank,
        "CREATE TABLE transfer_events (event_id text PRIMARY KEY, transfer_id text, body text, headers text, op text, \
         version numeric, most numeric, sort numeric, status text DEFAULT 'PENDING', made bigint)",
        "created_at = \"made\"\nheaders = \"headers\"\nop = \"op\"\nschema_version = \"version\"\nmax_attempts = \"most\"\n\
         seq = \"sort\"\nextra = { version = \"version\" }",
        "(event_id, transfer_id, body, headers, op, version, most, sort, made) VALUES \
         ('headers', 'a', '1', '{oops', NULL, 1, 1, 1, 1700000000), ('op', 'b', '1', NULL, 'replace', 1, 1, 2, 1700000000), \
         ('version', 'c', '1', NULL, NULL, 1e30, 1, 3, 1700000000), ('most', 'd', '1', NULL, NULL, 1, 1e30, 4, 1700000000), \
         ('sort', 'e', '1', NULL, NULL, 1, 1, 1e30, 1700000000), ('made', 'f', '1', NULL, NULL, 1, 1, 5, 9223372036854775807), \
         ('least', 'g', '1', NULL, NULL, -1e30, -1e30, -1e30, -9223372036854775808), \
         ('nan', 'h', '1', NULL, NULL, 'NaN', 'NaN', 6, 1700000000), \
         (chr(27) || '[2J' || chr(8238), chr(7), '1', NULL, NULL, 1, 1, 7, 1700000000), ('good', 'i', '1', '{}', 'upsert', 1, 1, 8, 1700000000)",
    )
    .await;
    let rows = bank.run(&["events", "list", "--json"]).json();
    assert_eq!(rows.as_array().unwrap().len(), 10, "{rows}");
    bank.run(&["status"]).ok();
    let summary = bank.run(&["run", "--drain", "--json"]).json();
    let ended = summary["delivered"].as_u64().unwrap() + summary["dead"].as_u64().unwrap();
    assert_eq!(ended, 10, "{summary}");
    let dead = bank.run(&["dead", "list", "--json"]).json();
    let dead: Vec<&str> = dead.as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap()).collect();
    assert_eq!(dead, ["headers", "op"]);
}

/// SQLite takes any value in any column, and NULL in most primary keys.
#[tokio::test(flavor = "multi_thread")]
async fn odd_values_of_sqlite_cost_their_own_row_at_most() {
    let bank = Bank::sqlite();
    open(
        &bank,
        TABLE,
        COLUMNS,
        "(event_id, transfer_id, body, attempts, created_at, next_retry_at) VALUES (NULL, 'a', '1', 0, NULL, NULL), \
         (x'ff00', 'b', '1', 0, NULL, NULL), ('attempts', 'c', '1', 'many', NULL, NULL), ('real', 'd', '1', 1e300, NULL, NULL), \
         ('blob', x'ff', '1', x'ff', x'ff', NULL), ('time', 'e', '1', 0, 'yesterday', NULL), (7, 'f', '1', 0, NULL, NULL), \
         (7.5, 'g', '1', 0, NULL, NULL), ('good', 'h', '1', 0, NULL, NULL)",
    )
    .await;
    assert_eq!(bank.run(&["events", "list", "--json"]).json().as_array().unwrap().len(), 9);
    let status = bank.run(&["status", "--json"]).json();
    assert_eq!(status["streams"][0]["unexplained"], 2, "rows that cannot be told apart: {status}");
    let summary = bank.run(&["run", "--drain", "--json"]).json();
    // A key that is no text, and a time that is none: those two are dead, and say why.
    assert_eq!((&summary["delivered"], &summary["dead"]), (&json!(5), &json!(2)), "{summary}");
    let checked = bank.run(&["check"]).ok();
    assert!(checked.contains("cannot be told apart"), "{checked}");
}
