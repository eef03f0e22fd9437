//! Status words that cannot be told apart, or that the column cannot hold.

use super::{Bank, Mapping, PLAIN, WORDS};

const TABLE: &str = "CREATE TABLE transfer_events (event_id varchar(20) PRIMARY KEY, transfer_id varchar(20), body text, \
    status varchar(9) NOT NULL DEFAULT 'PENDING', retries int NOT NULL DEFAULT 0)";
const ROWS: &str =
    "INSERT INTO transfer_events (event_id, transfer_id, body) VALUES ('a', 't', '1'), ('b', 'u', '2')";

async fn bank_with(bank: &Bank, table: &str, mapping: Mapping<'_>) {
    bank.execute("DROP TABLE IF EXISTS transfer_events").await;
    bank.execute(table).await;
    bank.execute(ROWS).await;
    bank.config(&PLAIN.text());
    bank.run(&["migrate"]).ok();
    bank.config(&mapping.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_that_cannot_be_told_apart_are_refused() {
    let few = |least: u32| {
        format!(
            "new = \"PENDING\"\nretrying = {{ word = \"FAILED\", when = {{ column = \"retries\", less = 5 }} }}\n\
             done = \"DONE\"\ndead = {{ word = \"FAILED\", when = {{ column = \"retries\", at_least = {least} }} }}"
        )
    };
    let cases = [
        (
            "new = \"PENDING\"\nretrying = \"FAILED\"\ndone = \"DONE\"\ndead = \"FAILED\"".to_owned(),
            "`retrying` and `dead`",
        ),
        ("new = \"PENDING\"\ndone = \"PENDING\"\ndead = \"DEAD\"".to_owned(), "`new` and `done`"),
        (
            "new = \"PENDING\"\nprocessing = \"PENDING\"\ndone = \"DONE\"\ndead = \"DEAD\"".to_owned(),
            "`new` and `processing`",
        ),
        ("new = \"PENDING\"\ndone = \"DONE\"\ndead = \"DONE\"".to_owned(), "`done` and `dead`"),
        (
            "new = \"PENDING\"\ndone = \"DONE\"\ndead = \"DEAD\"\nunknown = \"DEAD\"".to_owned(),
            "`dead` and `unknown`",
        ),
        (few(4), "`retrying` and `dead`"),
    ];
    for bank in Bank::both("words_apart").await {
        for (words, expected) in &cases {
            let columns = "count = { retries = \"retries\" }";
            let mapping = Mapping { columns, words, pipeline: "max_attempts = 5", ..PLAIN };
            bank_with(&bank, TABLE, mapping).await;
            for command in [&["check", "--offline"][..], &["check"], &["run", "--drain"], &["status"]] {
                let error = bank.run(command).error(2);
                assert!(error.contains(expected), "{command:?}: {error}");
            }
            assert_eq!(bank.delivered().len(), 0);
        }
        // Told apart by their counts, they pass.
        let columns = "count = { retries = \"retries\" }";
        let words = few(5);
        bank_with(&bank, TABLE, Mapping { columns, words: &words, pipeline: "max_attempts = 5", ..PLAIN })
            .await;
        bank.run(&["check"]).ok();
        assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 2);
        std::fs::remove_file(bank.dir.path().join("out.ndjson")).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_constant_that_contradicts_max_attempts_is_refused() {
    let words = "new = \"PENDING\"\nretrying = { word = \"FAILED\", when = { column = \"retries\", less = 5 } }\n\
                 done = \"DONE\"\ndead = { word = \"FAILED\", when = { column = \"retries\", at_least = 5 } }";
    let columns = "count = { retries = \"retries\" }";
    for bank in Bank::both("words_attempts").await {
        for (pipeline, fits) in
            [("", false), ("max_attempts = 6", false), ("max_attempts = 5", true), ("max_attempts = 2", true)]
        {
            bank_with(&bank, TABLE, Mapping { columns, words, pipeline, ..PLAIN }).await;
            for command in [&["check", "--offline"][..], &["check"], &["run", "--drain"]] {
                let ran = bank.run(command);
                if fits {
                    ran.ok();
                } else {
                    let error = ran.error(2);
                    assert!(error.contains("max_attempts") && error.contains("retries"), "{error}");
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn words_that_the_column_cannot_hold_are_refused() {
    let checked = "CREATE TABLE transfer_events (event_id varchar(20) PRIMARY KEY, transfer_id varchar(20), body text NOT NULL, \
        status varchar(20) NOT NULL DEFAULT 'PENDING' CONSTRAINT known CHECK (status IN ('PENDING', 'SENDING', 'FAILED', 'DEAD')), \
        finished_at timestamp, CHECK (status <> 'DEAD' OR finished_at IS NOT NULL))";
    for bank in Bank::both("words_fit").await {
        let mut cases = vec![(checked.to_owned(), "PUBLISHED", "known")];
        if bank.is_postgres() {
            bank.execute(
                "CREATE TYPE state AS ENUM ('PENDING', 'SENDING', 'FAILED', 'DEAD'); \
                 CREATE DOMAIN word AS varchar(8) CHECK (VALUE <> 'DEAD')",
            )
            .await;
            let of = |kind: &str| {
                format!(
                    "CREATE TABLE transfer_events (event_id varchar(20) PRIMARY KEY, transfer_id varchar(20), body text NOT NULL, \
                     status {kind} NOT NULL DEFAULT 'PENDING')"
                )
            };
            cases.push((of("varchar(8)"), "PUBLISHED", "8 characters"));
            cases.push((of("state"), "PUBLISHED", "state"));
            cases.push((of("word"), "DEAD", "word"));
            cases.push((of("word"), "PUBLISHED", "8 characters"));
        }
        for (table, word, why) in &cases {
            bank_with(&bank, table, PLAIN).await;
            let checked = bank.run(&["check"]);
            assert_eq!(checked.code, Some(1), "{checked:?}");
            let line = |text: &str| {
                text.lines().find(|line| line.contains(word) && line.contains(why)).map(str::to_owned)
            };
            let fatal = line(&checked.stdout).unwrap_or_else(|| panic!("{why}: {checked:?}"));
            assert!(fatal.starts_with("fatal") && fatal.contains("Fix:"), "{fatal}");
            let started = bank.run(&["run", "--drain"]);
            assert_eq!(started.code, Some(1), "{started:?}");
            assert!(line(&started.stderr).is_some(), "{why}: {started:?}");
            assert_eq!(bank.delivered().len(), 0, "{why}");
        }
        bank_with(&bank, TABLE, Mapping { words: WORDS, ..PLAIN }).await;
        bank.run(&["check"]).ok();
        assert_eq!(bank.run(&["run", "--drain", "--json"]).json()["delivered"], 2);
    }
}

/// Words that differ for us and are the same for the column.
#[tokio::test(flavor = "multi_thread")]
async fn words_that_the_column_takes_for_the_same_are_refused() {
    let words = "new = \"failed\"\nretrying = \"failed\"\ndone = \"DONE\"\ndead = \"FAILED\"";
    for bank in Bank::both("words_same").await {
        let kind = match bank.is_postgres() {
            true => {
                bank.execute(
                    "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
                )
                .await;
                "text COLLATE nocase"
            }
            false => "text COLLATE NOCASE",
        };
        let table = format!(
            "CREATE TABLE transfer_events (event_id varchar(20) PRIMARY KEY, transfer_id varchar(20), body text NOT NULL, \
             status {kind} NOT NULL DEFAULT 'failed')"
        );
        bank_with(&bank, &table, Mapping { words, ..PLAIN }).await;
        let checked = bank.run(&["check"]);
        assert_eq!(checked.code, Some(1), "{checked:?}");
        assert!(checked.stdout.contains("`failed` and `FAILED`"), "{checked:?}");
        let error = bank.run(&["run", "--drain"]).error(1);
        assert!(error.contains("`failed` and `FAILED`"), "{error}");
    }
}
