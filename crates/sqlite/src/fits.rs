//! Checks that a foreign table fits its mapping: that the status column can hold each word and distinguishes them, and that
//! its times are not in the future. airtight's own tables need no such check.

use airtight_core::{
    Result,
    admin::Finding,
    table::{StatusSpec, literal, quote},
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Row, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteQueryResult},
};

use crate::{error::db, sql::Sql};

/// Clocks of hosts may differ by this; zones differ by more.
const TOLERANCE_SECONDS: f64 = 300.0;

/// How many of the newest rows are looked at.
const NEWEST: u32 = 100;

/// What keeps the table from being read as a queue.
pub(crate) async fn problems(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<Finding>> {
    let Some(status) = sql.spec.status.as_ref().filter(|_| !sql.canonical) else { return Ok(Vec::new()) };
    if let Err(error) = sql.spec.check_roles() {
        return Ok(vec![error.into()]);
    }
    let Some(mut trial) = Trial::of(conn, sql, status).await? else { return Ok(Vec::new()) };
    let column = &status.column;
    let name = sql.spec.display_name();
    let mut problems = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for (role, word) in status.roles().into_iter().map(|(role, of)| (role, of.word.as_str())) {
        if seen.contains(&word) {
            continue;
        }
        seen.push(word);
        if let Some(why) = trial.refuses(word).await {
            let message = format!("{name}.{column} cannot hold `{word}`, the word for `{role}`: {why}");
            let remedy = "correct the word in [table.status], or let the constraint allow it";
            problems.push(Finding::fatal(message).with_remedy(remedy));
        }
    }
    for [(left, one), (right, other)] in status.distinct() {
        if one.word != other.word && trial.are_the_same(&one.word, &other.word).await {
            let message = format!(
                "{name}.{column} takes `{}` and `{}`, the words for `{left}` and `{right}`, for the same: events would be \
                 delivered again and again, or never",
                one.word, other.word
            );
            let remedy = "choose words in [table.status] that differ for the column, too";
            problems.push(Finding::fatal(message).with_remedy(remedy));
        }
    }
    Ok(problems)
}

/// A copy of the table in memory, without its rows: SQLite says itself what its constraints mean.
struct Trial {
    conn: SqliteConnection,
    table: String,
    status: String,
}

impl Trial {
    /// None where the table cannot be made elsewhere: it needs a function or a collation of the application's own.
    async fn of(conn: &mut SqliteConnection, sql: &Sql, status: &StatusSpec) -> Result<Option<Self>> {
        let schema = quote(sql.spec.schema.as_deref().unwrap_or("main"));
        let made = format!(
            "SELECT sql FROM {schema}.sqlite_schema WHERE type = 'table' AND lower(name) = lower(?1)"
        );
        let made: Option<Option<String>> = sqlx::query_scalar(AssertSqlSafe(made))
            .bind(&sql.spec.table)
            .fetch_optional(&mut *conn)
            .await
            .map_err(db)?;
        let Some(made) = made.flatten() else { return Ok(None) };
        let columns =
            sqlx::query("SELECT name, type, \"notnull\", pk, hidden FROM pragma_table_xinfo(?1, ?2)")
                .bind(&sql.spec.table)
                .bind(sql.spec.schema.as_deref().unwrap_or("main"))
                .fetch_all(conn)
                .await
                .map_err(db)?;
        let options =
            SqliteConnectOptions::new().filename(":memory:").foreign_keys(false).disable_statement_logging();
        let Ok(memory) = options.connect().await else { return Ok(None) };
        let mut trial = Self { conn: memory, table: quote(&sql.spec.table), status: quote(&status.column) };
        // One row with as little in it as goes, and one with something in every column: a constraint that also asks
        // for another column is met by one of them.
        let mut inserts = Vec::new();
        for (at, full) in [false, true].into_iter().enumerate() {
            let mut names = Vec::new();
            let mut values = Vec::new();
            for column in &columns {
                let name: String = column.try_get("name").map_err(db)?;
                let of: String = column.try_get("type").map_err(db)?;
                let wanted: i64 = column.try_get("notnull").map_err(db)?;
                let key: i64 = column.try_get("pk").map_err(db)?;
                let hidden: i64 = column.try_get("hidden").map_err(db)?;
                if hidden == 0 && (full || wanted != 0 || key != 0) {
                    names.push(quote(&name));
                    values.push(some_value(&of, at));
                }
            }
            inserts.push(match names.is_empty() {
                true => format!("INSERT INTO {} DEFAULT VALUES", trial.table),
                false => format!(
                    "INSERT INTO {} ({}) VALUES ({})",
                    trial.table,
                    names.join(", "),
                    values.join(", ")
                ),
            });
        }
        let unchecked = ["PRAGMA ignore_check_constraints = ON".to_owned(), made];
        let checked = ["PRAGMA ignore_check_constraints = OFF".to_owned()];
        for statement in unchecked.into_iter().chain(inserts).chain(checked) {
            if trial.run(&statement).await.is_err() {
                return Ok(None);
            }
        }
        Ok(Some(trial))
    }

    async fn run(&mut self, sql: &str) -> sqlx::Result<SqliteQueryResult> {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.conn).await
    }

    /// Why neither row can have the word.
    async fn refuses(&mut self, word: &str) -> Option<String> {
        let mut why = None;
        for order in ["ASC", "DESC"] {
            let sql = format!(
                "UPDATE {0} SET {1} = {2} WHERE rowid = (SELECT rowid FROM {0} ORDER BY rowid {order} LIMIT 1)",
                self.table,
                self.status,
                literal(word)
            );
            match self.run(&sql).await {
                Err(sqlx::Error::Database(error)) if is_refusal(error.message()) => {
                    why = Some(error.message().to_owned());
                }
                _ => return None,
            }
        }
        why
    }

    /// Whether the column's collation takes two words for one.
    async fn are_the_same(&mut self, one: &str, other: &str) -> bool {
        // The constraints are not the question.
        let set = format!(
            "PRAGMA ignore_check_constraints = ON; UPDATE {} SET {} = {}; PRAGMA ignore_check_constraints = OFF",
            self.table,
            self.status,
            literal(one)
        );
        if self.run(&set).await.is_err() {
            return false;
        }
        let same = format!("SELECT {} = {} FROM {} LIMIT 1", self.status, literal(other), self.table);
        let same = sqlx::query_scalar::<_, bool>(AssertSqlSafe(same)).fetch_one(&mut self.conn).await;
        same.unwrap_or(false)
    }
}

fn is_refusal(message: &str) -> bool {
    message.contains("CHECK constraint failed") || message.contains("cannot store")
}

/// Something that a column of this type takes, different in each row.
fn some_value(of: &str, row: usize) -> String {
    let of = of.to_ascii_uppercase();
    let is = |words: &[&str]| words.iter().any(|word| of.contains(word));
    if is(&["CHAR", "CLOB", "TEXT"]) {
        format!("'{row}'")
    } else if is(&["BLOB"]) {
        format!("x'0{row}'")
    } else {
        row.to_string()
    }
}

/// What suggests that the times of the table are not in UTC.
pub(crate) async fn suspicion(conn: &mut SqliteConnection, sql: &Sql) -> Result<Option<Finding>> {
    let Some(created) = sql.spec.created_at.as_ref().filter(|_| !sql.canonical) else { return Ok(None) };
    // Along an index where there is one. Else among the open rows, all of which a claim looks at as well.
    let newest = match (&sql.spec.seq, &sql.spec.status) {
        (Some(seq), _) => {
            format!("FROM {} AS o ORDER BY o.{} DESC LIMIT {NEWEST}", sql.spec.qualified(), quote(seq))
        }
        (None, Some(_)) => format!("FROM {} WHERE {}", sql.from("o"), sql.open("o")),
        (None, None) => return Ok(None),
    };
    let select = format!(
        "SELECT (max(julianday(at)) - julianday('now')) * 86400.0 FROM (SELECT o.{} AS at {newest}) \
         WHERE julianday(at) < julianday('now', '+2 days')",
        quote(created)
    );
    let ahead: Option<f64> = sqlx::query_scalar(AssertSqlSafe(select)).fetch_one(conn).await.map_err(db)?;
    Ok(ahead.filter(|seconds| *seconds > TOLERANCE_SECONDS).map(|seconds| {
        let minutes = (seconds / 60.0).round();
        Finding::note(format!(
            "{}: the newest {created} is {}h {}m in the future, read as UTC; events would wait for as long where they wait \
             for a time",
            sql.spec.display_name(),
            (minutes / 60.0).floor(),
            minutes % 60.0
        ))
        .with_remedy("write times in UTC, as CURRENT_TIMESTAMP is")
    }))
}

/// Rows that are in no state, by their words.
pub(crate) async fn unexplained(conn: &mut SqliteConnection, sql: &Sql) -> Result<Option<Finding>> {
    let Some(status) = sql.spec.status.as_ref().filter(|_| !sql.canonical) else { return Ok(None) };
    let select = format!(
        "SELECT COALESCE(quote(o.{}), 'NULL'), count(*) FROM {} WHERE {} GROUP BY 1 ORDER BY 2 DESC LIMIT 10",
        quote(&status.column),
        sql.from("o"),
        sql.unexplained("o")
    );
    let found: Vec<(String, i64)> =
        sqlx::query_as(AssertSqlSafe(select)).fetch_all(conn).await.map_err(db)?;
    if found.is_empty() {
        return Ok(None);
    }
    let words: Vec<String> = found.iter().map(|(word, count)| format!("{word} ({count})")).collect();
    Ok(Some(Finding::note(format!(
        "{} has rows with a status that no role explains, or whose {} cannot be told apart from others (NULL, or bytes); they \
         are left alone: {}",
        sql.spec.display_name(),
        sql.spec.identity,
        words.join(", ")
    ))))
}
