//! A table of the application's own, in both stores, as a hostile operator would find it.
//!
//! | file | what it shows |
//! | --- | --- |
//! | `prune` | what retention removes, by which column, and only when told |
//! | `words` | status words that cannot be told apart, or that the column cannot hold |
//! | `zone` | timestamps without a zone, and what a drain waits for |
//! | `rows` | one bad row never blinds the rest |
//! | `fits` | what `check` says of columns, types and other tables |

mod fits;
mod prune;
mod rows;
mod words;
mod zone;

use std::process::Command;

use airtight_testkit::postgres::TestDb;
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};

use crate::support::{Ran, airtight, finish};

/// A bank's database with one table of its own, and a directory for its config.
struct Bank {
    dir: tempfile::TempDir,
    /// None for an SQLite file.
    db: Option<TestDb>,
}

impl Bank {
    fn sqlite() -> Self {
        Self { dir: tempfile::tempdir().expect("a directory"), db: None }
    }

    async fn postgres(test: &str) -> Option<Self> {
        Some(Self { dir: tempfile::tempdir().expect("a directory"), db: Some(TestDb::create(test).await?) })
    }

    /// One in each store that is there.
    async fn both(test: &str) -> Vec<Self> {
        [Some(Self::sqlite()), Self::postgres(test).await].into_iter().flatten().collect()
    }

    fn is_postgres(&self) -> bool {
        self.db.is_some()
    }

    fn url(&self) -> String {
        match &self.db {
            Some(db) => db.url(),
            None => format!("sqlite:{}", self.dir.path().join("bank.db").display()),
        }
    }

    async fn execute(&self, sql: &str) {
        let done = match &self.db {
            Some(db) => {
                let mut connection = PgConnection::connect_with(&db.connect_options()).await.unwrap();
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.map(drop)
            }
            None => {
                let mut connection =
                    SqliteConnection::connect(&format!("{}?mode=rwc", self.url())).await.unwrap();
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.map(drop)
            }
        };
        done.unwrap_or_else(|error| panic!("{error}: {sql}"));
    }

    /// The one value of a query, as text.
    async fn text(&self, sql: &str) -> String {
        let sql = format!("SELECT COALESCE(CAST(({sql}) AS TEXT), 'NULL')");
        match &self.db {
            Some(db) => {
                let mut connection = PgConnection::connect_with(&db.connect_options()).await.unwrap();
                sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut connection).await.unwrap()
            }
            None => {
                let mut connection = SqliteConnection::connect(&self.url()).await.unwrap();
                sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut connection).await.unwrap()
            }
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = airtight(args);
        command.args(["-c", "bank.toml"]).current_dir(self.dir.path()).env("DATABASE_URL", self.url());
        command
    }

    /// Runs a command with the bank's config.
    fn run(&self, args: &[&str]) -> Ran {
        let command = self.command(args);
        tokio::task::block_in_place(|| finish(command, ""))
    }

    fn config(&self, text: &str) {
        std::fs::write(self.dir.path().join("bank.toml"), text).expect("written");
    }

    /// Ids of what was delivered, in order.
    fn delivered(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.dir.path().join("out.ndjson")).unwrap_or_default();
        let id =
            |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON")["eventId"].clone();
        text.lines().map(|line| id(line).as_str().expect("an id").to_owned()).collect()
    }
}

/// What a config says beyond the columns that every table here has.
#[derive(Clone, Copy)]
struct Mapping<'a> {
    /// Further columns of `[table]`.
    columns: &'a str,
    /// The words of `[table.status]`.
    words: &'a str,
    /// Further keys of the pipeline.
    pipeline: &'a str,
    /// Further sections.
    rest: &'a str,
}

const WORDS: &str = "new = \"PENDING\"\nretrying = \"FAILED\"\nprocessing = \"SENDING\"\ndone = \"PUBLISHED\"\ndead = \"DEAD\"";

const PLAIN: Mapping<'static> = Mapping { columns: "", words: WORDS, pipeline: "", rest: "" };

impl Mapping<'_> {
    fn text(&self) -> String {
        let Self { columns, words, pipeline, rest } = self;
        format!(
            r#"
[table]
name = "transfer_events"
id = "event_id"
aggregate_id = "transfer_id"
aggregate_type = {{ constant = "Transfer" }}
event_type = {{ constant = "TransferMade" }}
stream = {{ constant = "transfers" }}
payload = "body"
payload_kind = "json_text"
{columns}

[table.status]
column = "status"
{words}

[pipelines.transfers]
{pipeline}
to = "file:out.ndjson"

{rest}
"#
        )
    }
}
