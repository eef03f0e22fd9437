//! The log in a SQLite file: the methods of [`LogStore`].
//!
//! # Why nothing is ever missed
//!
//! SQLite has one writer at a time, and what AUTOINCREMENT has given out is part of the transaction: a rollback
//! takes it back. So the order of `seq` is the order of commits, and when a row is visible, every row with a
//! smaller `seq` that will ever be there is visible, too. There is no hole to wait for, and [`Read::blocked`] is
//! never set. (An id that was published before may use up a number, which then stays unused.)
//!
//! Rows that retention has removed are not mistaken for such holes: the transaction that deletes them records how far it
//! got (`airtight_floor`), and a consumer whose offset is before that gets an error.
//!
//! # Fences
//!
//! Ownership is in `airtight_partition`, as for a queue: the epoch grows when a partition is taken and with every
//! seek. A settle is one immediate transaction that checks owner, epoch and stored offset, and changes nothing
//! in a partition where one of them differs.
//!
//! | module | contents |
//! | --- | --- |
//! | `attach` | registering a consumer, and its offsets |
//! | `read` | rows from the log |
//! | `settle` | moving offsets and parking events, in one transaction |
//! | `parked` | events that wait, and the rule which of a key is due |
//! | `lag` | how many events a consumer has not read yet |
//! | `admin`, `seek`, `retain`, `inspect` | changes by operators, and reads for them |

mod admin;
mod attach;
pub(crate) mod inspect;
mod lag;
mod parked;
mod read;
mod retain;
mod seek;
mod settle;

use std::time::Duration;

use airtight_core::{
    Backlog, Capabilities, Code, Error, Result,
    admin::Finding,
    group::{self, Member, Members},
    log::{Changes, ConsumerState, Due, LogRow, LogStore, Read, ReadRequest, Standing, Start},
};
use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

pub(crate) use self::settle::settle_in;
#[cfg(test)]
pub(crate) use self::{
    parked::{OF_KEYS, rule_statements},
    settle::change_statement,
};
use crate::{
    error::db,
    outbox::SqliteOutbox,
    schema,
    sql::{Sql, time},
    watch::CommitWatcher,
};

/// The log in a SQLite file; [`SqliteOutbox::log`] makes it a source.
#[derive(Debug)]
pub struct SqliteLog {
    outbox: SqliteOutbox,
    watch: CommitWatcher,
}

impl SqliteLog {
    /// The log in `outbox`.
    pub fn new(outbox: SqliteOutbox) -> Self {
        Self { watch: CommitWatcher::new(outbox.clone()), outbox }
    }
}

#[async_trait]
impl LogStore for SqliteLog {
    fn members(&self) -> &dyn Members {
        &self.outbox
    }

    async fn open(&self, _sink: &Capabilities) -> Result<()> {
        let mut conn = self.outbox.acquire().await?;
        // First, since it knows best what the file holds.
        schema::refuse_other_shape(&mut conn, self.outbox.sql()).await?;
        let problems = problems(&mut conn, self.outbox.log_sql()?).await?;
        if problems.is_empty() { Ok(()) } else { Err(Finding::refusal(Code::BAD_TABLE, &problems)) }
    }

    async fn attach(&self, member: &Member, start: Start) -> Result<()> {
        attach::attach(&self.outbox, member, start).await
    }

    async fn positions(&self, member: &Member, partitions: &[u16]) -> Result<Vec<Standing>> {
        attach::positions(&self.outbox, member, partitions).await
    }

    async fn consumer_state(&self, member: &Member) -> Result<ConsumerState> {
        attach::consumer_state(&self.outbox, member).await
    }

    async fn read(&self, request: &ReadRequest<'_>) -> Result<Read> {
        read::read(&self.outbox, request).await
    }

    async fn reread(&self, request: &ReadRequest<'_>, seqs: &[i64]) -> Result<Vec<LogRow>> {
        read::reread(&self.outbox, request, seqs).await
    }

    async fn due(&self, request: &ReadRequest<'_>, except: &[i64]) -> Result<Due> {
        parked::due(&self.outbox, request, except).await
    }

    async fn settle(&self, member: &Member, changes: &Changes) -> Result<Vec<u16>> {
        let mut tx = self.outbox.begin().await?;
        let refused = settle_in(tx.conn(), self.outbox.sql(), member, changes).await?;
        tx.commit().await?;
        Ok(refused)
    }

    async fn unhold(&self, member: &Member, partitions: &[u16]) -> Result<u64> {
        parked::unhold(&self.outbox, member, partitions).await
    }

    async fn backlog(&self, member: &Member) -> Result<Backlog> {
        lag::backlog(&self.outbox, member).await
    }

    async fn wait(&self, at_most: Duration) {
        self.watch.wait(at_most).await;
    }
}

/// The partition of a key. The same as the queue's, so that it never changes.
fn partition_of(key: &str, partitions: u16) -> u16 {
    group::partition_of(group::hash_of(key.as_bytes()), partitions)
}

/// The column that ascends, which every log has: see [`unfollowable`].
fn seq(sql: &Sql, alias: &str) -> String {
    sql.seq(alias).unwrap_or_else(|| sql.identity(alias))
}

/// How far retention got.
#[derive(Debug, Clone, Default)]
struct Floor {
    /// The newest row that was removed; zero when none was.
    seq: i64,
    /// When that was written.
    created_at: Option<String>,
}

async fn floor(conn: &mut SqliteConnection, sql: &Sql) -> Result<Floor> {
    let select = format!("SELECT seq, created_at FROM airtight_floor WHERE outbox = {}", sql.name());
    let row = sqlx::query(AssertSqlSafe(select)).fetch_optional(conn).await.map_err(db)?;
    let Some(row) = row else { return Ok(Floor::default()) };
    Ok(Floor { seq: row.try_get(0).map_err(db)?, created_at: row.try_get(1).map_err(db)? })
}

/// The newest `seq` of the log, removed ones included.
async fn end(conn: &mut SqliteConnection, sql: &Sql) -> Result<i64> {
    let select = format!("SELECT COALESCE(max({}), 0) FROM {} AS o", seq(sql, "o"), sql.spec.qualified());
    let newest: i64 = sqlx::query_scalar(AssertSqlSafe(select)).fetch_one(&mut *conn).await.map_err(db)?;
    Ok(newest.max(floor(conn, sql).await?.seq))
}

/// When a row was written, in the canonical form; NULL where the table does not tell.
fn created(sql: &Sql, alias: &str) -> String {
    match &sql.spec.created_at {
        Some(_) if sql.canonical => sql.created(alias),
        Some(name) => time(&format!("{alias}.{}", airtight_core::table::quote(name))),
        None => "NULL".into(),
    }
}

/// Why the table cannot be followed, with what fixes it; empty when it can.
async fn problems(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<Finding>> {
    let spec = &sql.spec;
    if spec.log.lookup.is_some() || spec.log.offsets.is_some() {
        let message = format!(
            "{}: bodies in another table (`lookup`) and offsets in the application's own table (`offsets`) are for \
             PostgreSQL",
            spec.display_name()
        );
        let remedy = "in SQLite give the table a column for the body, and leave the offsets to airtight";
        return Ok(vec![Finding::fatal(message).with_remedy(remedy)]);
    }
    let problems = schema::problems(conn, sql).await?;
    if problems.is_empty() { unfollowable(conn, sql).await } else { Ok(problems) }
}

/// What is wrong with the numbers that give events their order.
async fn unfollowable(conn: &mut SqliteConnection, sql: &Sql) -> Result<Vec<Finding>> {
    let spec = &sql.spec;
    let name = spec.display_name();
    let mut problems = Vec::new();
    let Some(column) = &spec.seq else {
        problems.push(
            Finding::fatal(format!("{name} has no ascending column"))
                .with_remedy("map one as `seq`, `INTEGER PRIMARY KEY AUTOINCREMENT`"),
        );
        return Ok(problems);
    };
    let schema = spec.schema.as_deref().unwrap_or("main");
    let select = format!(
        "SELECT (SELECT count(*) FROM pragma_table_xinfo(?1, ?2) WHERE name = ?3 COLLATE NOCASE AND pk = 1 \
         AND type = 'INTEGER' COLLATE NOCASE), \
         (SELECT sql LIKE '%AUTOINCREMENT%' FROM {}.sqlite_schema WHERE type = 'table' AND name = ?1 COLLATE NOCASE)",
        airtight_core::table::quote(schema)
    );
    let row = sqlx::query(AssertSqlSafe(select))
        .bind(&spec.table)
        .bind(schema)
        .bind(column)
        .fetch_one(conn)
        .await
        .map_err(db)?;
    let is_key: i64 = row.try_get(0).map_err(db)?;
    let never_again: Option<bool> = row.try_get(1).map_err(db)?;
    if is_key == 0 || never_again != Some(true) {
        let message = format!(
            "{name}.{column} is not `INTEGER PRIMARY KEY AUTOINCREMENT`: SQLite would give a number again once the \
             newest row is removed, and consumers would pass the event"
        );
        problems.push(Finding::fatal(message).with_remedy("create the table anew with it and copy the rows"));
    }
    Ok(problems)
}

/// The error for a table whose numbers went back behind a consumer's offset.
fn restarted(name: &str, consumer: &str, offset: i64, end: i64) -> Error {
    Error::permanent(
        Code::SEQUENCE_BEHIND,
        format!(
            "consumer `{consumer}` stands at seq {offset}, but the last event of {name} is {end}: the table was \
             created again or restored, and events that are published now would be skipped"
        ),
    )
    .with_remedy(format!("seek the consumer: `airtight consumers seek {consumer} --earliest` (or --latest)"))
}
