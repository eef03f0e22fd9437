//! Timestamps without a zone, and what a drain waits for.

use super::{Bank, Mapping, PLAIN};
use crate::support::Running;

const TABLE: &str = "CREATE TABLE transfer_events (event_id bigserial PRIMARY KEY, transfer_id text DEFAULT 't', body text DEFAULT '1', \
    status text NOT NULL DEFAULT 'PENDING', next_retry_at TIMESTAMP DEFAULT NOW(), created_at TIMESTAMP DEFAULT NOW())";
const COLUMNS: &str = "created_at = \"created_at\"\nnext_retry_at = \"next_retry_at\"";

/// A database at a place, whose writers leave their zone to it.
async fn at(bank: &Bank, zone: &str) {
    let name = bank.db.as_ref().expect("PostgreSQL").name();
    bank.execute(&format!("ALTER DATABASE {name} SET TimeZone = '{zone}'")).await;
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_zone_that_is_not_the_writers_is_noticed() {
    let Some(bank) = Bank::postgres("seoul").await else { return };
    at(&bank, "Asia/Seoul").await;
    bank.execute(TABLE).await;
    bank.config(&Mapping { columns: COLUMNS, ..PLAIN }.text());
    bank.run(&["migrate"]).ok();
    // What psql or a JDBC driver would write there.
    bank.execute("SET TimeZone = 'Asia/Seoul'; INSERT INTO transfer_events DEFAULT VALUES").await;

    let checked = bank.run(&["check"]);
    let line =
        checked.stdout.lines().find(|line| line.contains("zone")).unwrap_or_else(|| panic!("{checked:?}"));
    assert!(line.contains("in the future") && line.contains("zone = \"Asia/Seoul\""), "{line}");
    let status = bank.run(&["status", "--json"]).json();
    assert_eq!(status["streams"][0]["oldest_pending_seconds"], 0.0, "{status}");
    assert!(!bank.run(&["status"]).ok().contains("-3"));

    let drain = Running::start(bank.command(&["run", "--drain"]));
    let line = tokio::task::block_in_place(|| drain.wait_for_log("in the future"));
    assert!(line.contains("WARN") && line.contains("Asia/Seoul"), "{line}");
    let line = tokio::task::block_in_place(|| drain.wait_for_log("waits for"));
    assert!(line.contains("1 event that is not due") && line.contains("8h 59m"), "{line}");
    drain.signal("TERM");
    tokio::task::block_in_place(|| drain.wait());

    let columns = format!("{COLUMNS}\nzone = \"Asia/Seoul\"");
    bank.config(&Mapping { columns: &columns, ..PLAIN }.text());
    let checked = bank.run(&["check"]).ok();
    assert!(!checked.contains("zone"), "{checked}");
    assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 1);
}

/// West of Greenwich new rows only look old. The database's own zone tells, also of an empty table.
#[tokio::test(flavor = "multi_thread")]
async fn the_databases_zone_is_compared_where_it_fills_the_column() {
    let Some(bank) = Bank::postgres("new_york").await else { return };
    at(&bank, "America/New_York").await;
    bank.execute(TABLE).await;
    bank.config(&Mapping { columns: COLUMNS, ..PLAIN }.text());
    bank.run(&["migrate"]).ok();
    let checked = bank.run(&["check"]).ok();
    let line = checked.lines().find(|line| line.contains("zone")).unwrap_or_else(|| panic!("{checked}"));
    assert!(line.contains("America/New_York") && line.contains("created_at"), "{line}");
    let columns = format!("{COLUMNS}\nzone = \"America/New_York\"");
    bank.config(&Mapping { columns: &columns, ..PLAIN }.text());
    let checked = bank.run(&["check"]).ok();
    assert!(!checked.contains("zone"), "{checked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_zone_is_refused() {
    for bank in Bank::both("no_such_place").await {
        let table = match bank.is_postgres() {
            true => TABLE.to_owned(),
            false => TABLE.replace("bigserial", "integer").replace("NOW()", "CURRENT_TIMESTAMP"),
        };
        bank.execute(&table).await;
        bank.config(&Mapping { columns: COLUMNS, ..PLAIN }.text());
        bank.run(&["migrate"]).ok();
        let columns = format!("{COLUMNS}\nzone = \"Asia/Soul\"");
        bank.config(&Mapping { columns: &columns, ..PLAIN }.text());
        let checked = bank.run(&["check"]);
        assert_eq!(checked.code, Some(1), "{checked:?}");
        assert!(checked.stdout.contains("fatal") && checked.stdout.contains("Asia/Soul"), "{checked:?}");
        let error = bank.run(&["run", "--drain"]).error(1);
        assert!(error.contains("Asia/Soul"), "{error}");
    }
}

/// Nothing is known of an empty file but its rows.
#[tokio::test(flavor = "multi_thread")]
async fn local_times_in_a_file_are_noticed() {
    let bank = Bank::sqlite();
    bank.execute(
        "CREATE TABLE transfer_events (event_id integer PRIMARY KEY, transfer_id text DEFAULT 't', body text DEFAULT '1', \
         status text NOT NULL DEFAULT 'PENDING', next_retry_at TIMESTAMP, created_at TIMESTAMP); \
         INSERT INTO transfer_events (created_at) VALUES (datetime('now', '+9 hours'))",
    )
    .await;
    bank.config(&Mapping { columns: COLUMNS, ..PLAIN }.text());
    bank.run(&["migrate"]).ok();
    let checked = bank.run(&["check"]).ok();
    assert!(checked.contains("in the future"), "{checked}");
    let status = bank.run(&["status", "--json"]).json();
    assert_eq!(status["streams"][0]["oldest_pending_seconds"], 0.0, "{status}");
}
