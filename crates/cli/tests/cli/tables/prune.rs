//! What retention removes, by which column, and only when told.

use serde_json::json;

use super::{Bank, Mapping, PLAIN};
use crate::support::Shop;

fn table(more: &str) -> String {
    format!(
        "CREATE TABLE transfer_events (event_id varchar(20) PRIMARY KEY, transfer_id varchar(20), body text, \
         status varchar(20) NOT NULL DEFAULT 'PENDING', created_at timestamp{more})"
    )
}

/// Three rows, the first two written ten days ago.
async fn fill(bank: &Bank) {
    let ago = |days: u32| match bank.is_postgres() {
        true => format!("now() at time zone 'UTC' - interval '{days} days'"),
        false => format!("strftime('%Y-%m-%d %H:%M:%f', 'now', '-{days} days')"),
    };
    bank.execute(&format!(
        "INSERT INTO transfer_events (event_id, transfer_id, body, created_at) VALUES ('a', 't', '1', {ten}), \
         ('b', 't', '2', {ten}), ('c', 't', '3', {now})",
        ten = ago(10),
        now = ago(0)
    ))
    .await;
}

async fn left(bank: &Bank) -> String {
    bank.text("SELECT count(*) FROM transfer_events").await
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_obeys_the_files_retention() {
    let shop = Shop::new();
    shop.publish("a", "{}");
    shop.write("keep.toml", "[retention]\ndone = \"30d\"\n[pipelines.a]\nto = \"null:\"\n");
    shop.write("drop.toml", "[retention]\ndone = \"5d\"\n[pipelines.a]\nto = \"null:\"\n");
    shop.write("forever.toml", "[retention]\ndone = \"forever\"\n[pipelines.a]\nto = \"null:\"\n");
    shop.run(&["run", "--to", "null:", "--drain"]).ok();
    let mut connection = <sqlx::SqliteConnection as sqlx::Connection>::connect(&shop.url()).await.unwrap();
    sqlx::query("UPDATE airtight_outbox SET finished_at = strftime('%Y-%m-%dT%H:%M:%fZ','now','-10 days')")
        .execute(&mut connection)
        .await
        .unwrap();
    assert_eq!(
        shop.run(&["prune", "-c", "keep.toml"]).ok(),
        "removed 0 events delivered more than 30d ago, by finished_at ([retention] done)\n"
    );
    let error = shop.run(&["prune", "-c", "forever.toml"]).error(2);
    assert!(error.contains("forever") && error.contains("--older-than"), "{error}");
    let report = shop.run(&["prune", "-c", "drop.toml", "--dry-run", "--json"]).json();
    assert_eq!(report, json!({"pruned": 1, "by": "finished_at", "older_than": "5d", "dry_run": true}));
    assert_eq!(
        shop.run(&["prune", "--dry-run"]).ok(),
        "would remove 1 event delivered more than 7d ago, by finished_at (the default)\n"
    );
    assert_eq!(
        shop.run(&["prune", "-c", "keep.toml", "--older-than", "9d"]).ok(),
        "removed 1 event delivered more than 9d ago, by finished_at (--older-than)\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_applications_rows_are_removed_only_when_told() {
    for bank in Bank::both("prune_only_when_told").await {
        bank.execute(&table(", updated_at timestamp")).await;
        let columns = "created_at = \"created_at\"\nupdated_at = \"updated_at\"";
        bank.config(&Mapping { columns, ..PLAIN }.text());
        bank.run(&["migrate"]).ok();
        fill(&bank).await;
        assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 3);
        let error = bank.run(&["prune"]).error(2);
        assert!(error.contains("transfer_events") && error.contains("[retention]"), "{error}");
        assert_eq!(left(&bank).await, "3");

        let rest = "[retention]\ndone = \"1d\"";
        bank.config(&Mapping { columns, rest, ..PLAIN }.text());
        let said = bank.run(&["prune", "--dry-run"]).ok();
        assert_eq!(
            said,
            "would remove 0 events delivered more than 1d ago, by updated_at ([retention] done)\n"
        );
        bank.execute(
            "UPDATE transfer_events SET updated_at = '2001-01-01 00:00:00' WHERE event_id = 'a'; \
             UPDATE transfer_events SET updated_at = NULL WHERE event_id = 'b'",
        )
        .await;
        let said = bank.run(&["prune", "--dry-run"]).ok();
        assert_eq!(
            said,
            "would remove 1 event delivered more than 1d ago, by updated_at ([retention] done)\n"
        );
        assert_eq!(left(&bank).await, "3");
        let said = bank.run(&["prune"]).ok();
        assert_eq!(said, "removed 1 event delivered more than 1d ago, by updated_at ([retention] done)\n");
        // One that does not say when it was delivered stays, however long ago it was written.
        assert_eq!(bank.text("SELECT min(event_id) FROM transfer_events").await, "b");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_delivered_just_now_is_not_old() {
    for bank in Bank::both("prune_just_now").await {
        bank.execute(&table("")).await;
        let columns = "created_at = \"created_at\"";
        bank.config(&Mapping { columns, ..PLAIN }.text());
        bank.run(&["migrate"]).ok();
        fill(&bank).await;
        assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 3);
        let error = bank.run(&["prune", "--older-than", "7d"]).error(1);
        assert!(error.contains("when an event was delivered") && error.contains("Fix: map"), "{error}");
        assert_eq!(left(&bank).await, "3");
        // The same in a config is refused before anything runs, and by `check`.
        bank.config(&Mapping { columns, rest: "[retention]\ndone = \"7d\"", ..PLAIN }.text());
        for command in [["check", "--offline"], ["run", "--drain"], ["prune", "--dry-run"]] {
            let error = bank.run(&command).error(2);
            assert!(error.contains("done_by_creation"), "{command:?}: {error}");
        }
        // Who wants that says so.
        let rest = "[retention]\ndone = \"7d\"\ndone_by_creation = true";
        bank.config(&Mapping { columns, rest, ..PLAIN }.text());
        let said = bank.run(&["prune"]).ok();
        assert_eq!(said, "removed 2 events written more than 7d ago, by created_at ([retention] done)\n");
        let said = bank.run(&["prune", "--older-than", "0s", "--by-creation", "--dry-run"]).ok();
        assert_eq!(said, "would remove 1 event written more than 0s ago, by created_at (--older-than)\n");
        assert_eq!(left(&bank).await, "1");
    }
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_start_says_what_will_be_removed_from_an_applications_table() {
    for bank in Bank::both("prune_start_says").await {
        bank.execute(&table(", updated_at timestamp")).await;
        let columns = "created_at = \"created_at\"\nupdated_at = \"updated_at\"";
        bank.config(&Mapping { columns, rest: "[retention]\ndone = \"9d\"", ..PLAIN }.text());
        bank.run(&["migrate"]).ok();
        let relay = crate::support::Running::start(bank.command(&["run"]));
        let line = tokio::task::block_in_place(|| relay.wait_for_log("are removed"));
        assert!(
            line.contains("transfer_events") && line.contains("9d") && line.contains("updated_at"),
            "{line}"
        );
        relay.signal("TERM");
        tokio::task::block_in_place(|| relay.wait());
    }
}

/// What ascends may be a small number, and may recur; the identity alone tells rows apart.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_shares_its_place_with_an_old_one_stays() {
    for bank in Bank::both("prune_shared_place").await {
        bank.execute(&table(", sort int, updated_at timestamp")).await;
        let columns = "seq = \"sort\"\ncreated_at = \"created_at\"\nupdated_at = \"updated_at\"";
        bank.config(&Mapping { columns, rest: "[retention]\ndone = \"1d\"", ..PLAIN }.text());
        bank.run(&["migrate"]).ok();
        bank.execute(
            "INSERT INTO transfer_events (event_id, transfer_id, body, sort, status, created_at, updated_at) VALUES \
             ('a', 't', '1', 1, 'PUBLISHED', '2001-01-01 00:00:00', '2001-01-01 00:00:00'), \
             ('b', 't', '2', 1, 'PENDING', '2001-01-01 00:00:00', '2001-01-01 00:00:00'), \
             ('c', 't', '3', 2, 'DEAD', NULL, '2001-01-01 00:00:00')",
        )
        .await;
        assert_eq!(bank.run(&["prune", "--json"]).json()["pruned"], 1);
        assert_eq!(bank.text("SELECT min(event_id) FROM transfer_events").await, "b");
        assert_eq!(left(&bank).await, "2");
    }
}
