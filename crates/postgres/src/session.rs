//! A connection with a deadline for every statement.
//!
//! A server may vanish silently, a load balancer may fail over, a NAT entry may be dropped: no answer ever arrives on such a
//! connection, and no error either. sqlx opens its sockets itself and does not let callers set keepalives. Keepalives would
//! not help where a proxy still answers for a server that it has lost. So each wait for an answer ends after
//! [`crate::PgOptions::answer_within`]. Then a separate connection asks PostgreSQL whether it is working on a statement of this
//! connection: a migration, a count, or a statement that waits for a lock may take as long as it needs. If PostgreSQL is not
//! working on one, the answer is lost. The connection is closed and never returned to the pool. The idle connections are closed
//! as well, since they took the same path.
//!
//! The connection is also closed when a statement is dropped before its answer is complete: the rest of that answer would be
//! mistaken for the answer to the next statement.

use std::{
    fmt, io,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use airtight_core::table::literal;
use futures::{
    FutureExt, StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, Either, Execute, Executor, PgConnection, PgPool, Postgres,
    Row, SqlStr,
    pool::PoolConnection,
    postgres::{PgQueryResult, PgRow, PgStatement, PgTypeInfo},
};

/// A statement that has waited so long for a lock says so.
const NOTICE: Duration = Duration::from_secs(3);

/// How long a connection may take that is only to ask, and its answer.
const ASK: Duration = Duration::from_secs(3);

/// How long an answer that has come already may take to be seen, on a busy machine.
const LAST_LOOK: Duration = Duration::from_millis(200);

/// How often the same is told.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// How long an answer is waited for, and whom to ask when none comes. One for each outbox.
pub(crate) struct Watchdog {
    pool: PgPool,
    within: Duration,
    /// What the statements of this outbox mention.
    names: Vec<String>,
    told: Mutex<Option<Instant>>,
    refused: Mutex<Option<Instant>>,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchdog").field("within", &self.within).finish_non_exhaustive()
    }
}

/// What PostgreSQL says about statements of ours.
enum Answer {
    /// It is at work on one that is at least so old, or keeps it waiting for a lock: which, and who has it.
    Working(Option<String>),
    /// It is not.
    Idle,
    /// It cannot be asked.
    Unreachable(String),
}

impl Watchdog {
    pub(crate) fn new(pool: PgPool, within: Duration, names: Vec<String>) -> Self {
        Self {
            pool,
            within: within.max(Duration::from_millis(100)),
            names,
            told: Mutex::default(),
            refused: Mutex::default(),
        }
    }

    /// Waits for an answer: for as long as PostgreSQL is at work on it, and not longer.
    pub(crate) async fn wait<T>(&self, work: impl Future<Output = T>) -> sqlx::Result<T> {
        let mut work = pin!(work);
        let begun = Instant::now();
        let mut pause = self.within.min(NOTICE);
        loop {
            if let Ok(done) = tokio::time::timeout(pause, &mut work).await {
                return Ok(done);
            }
            let answer = tokio::select! {
                done = &mut work => return Ok(done),
                answer = self.ask(begun.elapsed()) => answer,
            };
            let waited = begun.elapsed();
            let why = match answer {
                Answer::Working(lock) => {
                    if let Some(lock) = lock.filter(|_| may_tell(&self.told)) {
                        tracing::warn!("waiting for {waited:.0?} already: {lock}");
                    }
                    pause = self.within;
                    continue;
                }
                Answer::Idle => "PostgreSQL is not working on it".to_owned(),
                Answer::Unreachable(why) => why,
            };
            if waited < self.within {
                pause = self.within - waited;
                continue;
            }
            // It may have been answered while it was asked about. Polling once would not see it: whether something has
            // come is found out between polls.
            if let Ok(done) = tokio::time::timeout(LAST_LOOK, &mut work).await {
                return Ok(done);
            }
            tracing::warn!(
                "a connection gave no answer for {waited:.1?} ({why}): it is given up, and another one is opened"
            );
            self.drop_idle();
            return Err(sqlx::Error::Io(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no answer for {waited:.1?}, and {why}: the connection was given up"),
            )));
        }
    }

    /// Whether it is time to say that the server refuses connections.
    pub(crate) fn may_say_refused(&self) -> bool {
        may_tell(&self.refused)
    }

    /// Idle connections took the same path, and each would have to be waited for.
    fn drop_idle(&self) {
        while let Some(idle) = self.pool.try_acquire() {
            drop(idle.detach());
        }
    }

    async fn ask(&self, waited: Duration) -> Answer {
        let asked = async {
            let mut conn = self.pool.connect_options().connect().await?;
            let answer = self.look(&mut conn, waited).await;
            // It was only to ask.
            let _ = conn.close().await;
            answer
        };
        match tokio::time::timeout(ASK, asked).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Answer::Unreachable(format!("PostgreSQL cannot be asked: {error}")),
            Err(_) => Answer::Unreachable("PostgreSQL does not answer a new connection either".into()),
        }
    }

    async fn look(&self, conn: &mut PgConnection, waited: Duration) -> sqlx::Result<Answer> {
        // An application's pool may have other long statements under the same name. Half of the wait may have gone into
        // sending a large statement: only then does PostgreSQL begin with it.
        let ours: Vec<String> =
            self.names.iter().map(|name| format!("position({} IN a.query) > 0", literal(name))).collect();
        let sql = format!(
            "SELECT coalesce(a.wait_event_type = 'Lock', false) AS locked, \
               (SELECT coalesce(c.relnamespace::regnamespace || '.' || c.relname, l.locktype) FROM pg_locks l \
                LEFT JOIN pg_class c ON c.oid = l.relation WHERE l.pid = a.pid AND NOT l.granted LIMIT 1) AS what, \
               (SELECT string_agg(format('pid %s (%s, %s%s)', b.pid, coalesce(nullif(b.application_name, ''), 'no application name'), \
                  coalesce(b.state, 'of another user'), coalesce(', open for ' || round(extract(epoch FROM clock_timestamp() \
                  - b.xact_start)) || ' s', '')), ', ') FROM pg_stat_activity b WHERE b.pid = ANY(pg_blocking_pids(a.pid))) AS holders \
             FROM pg_stat_activity a WHERE a.datname = current_database() AND a.usename = session_user \
               AND a.pid <> pg_backend_pid() AND a.state = 'active' \
               AND a.query_start <= clock_timestamp() - make_interval(secs => {secs}) \
               AND ({ours} OR a.query IN ('BEGIN', 'COMMIT', 'ROLLBACK')) ORDER BY locked DESC, a.query_start LIMIT 1",
            secs = waited.as_secs_f64() / 2.0,
            ours = ours.join(" OR "),
        );
        // In the simple protocol, which any pooler takes.
        let Some(row) = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(conn).await? else {
            return Ok(Answer::Idle);
        };
        if !row.try_get::<bool, _>("locked")? {
            return Ok(Answer::Working(None));
        }
        let what: Option<String> = row.try_get("what")?;
        let holders: Option<String> = row.try_get("holders")?;
        Ok(Answer::Working(Some(format!(
            "{} is locked by {}",
            what.as_deref().unwrap_or("a row"),
            holders.as_deref().unwrap_or("a session that has ended")
        ))))
    }
}

fn may_tell(told: &Mutex<Option<Instant>>) -> bool {
    let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
    let may = told.is_none_or(|at| at.elapsed() >= TELL_AGAIN);
    if may {
        *told = Some(Instant::now());
    }
    may
}

/// A connection and its deadline; either from the pool, or the caller's own.
pub(crate) struct Session<'a> {
    raw: Raw<'a>,
    /// A statement has begun and has not ended.
    busy: bool,
    watchdog: Option<Arc<Watchdog>>,
}

enum Raw<'a> {
    Pooled(Option<PoolConnection<Postgres>>),
    Borrowed(&'a mut PgConnection),
}

impl fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("busy", &self.busy).finish_non_exhaustive()
    }
}

impl<'a> Session<'a> {
    pub(crate) fn pooled(raw: PoolConnection<Postgres>, watchdog: Arc<Watchdog>) -> Session<'static> {
        Session { raw: Raw::Pooled(Some(raw)), busy: false, watchdog: Some(watchdog) }
    }

    /// Over the caller's own connection, which stays as it is whatever happens.
    pub(crate) fn borrowed(raw: &'a mut PgConnection, watchdog: Arc<Watchdog>) -> Self {
        Self { raw: Raw::Borrowed(raw), busy: false, watchdog: Some(watchdog) }
    }

    /// In place of one that was used up.
    pub(crate) fn none() -> Session<'static> {
        Session { raw: Raw::Pooled(None), busy: false, watchdog: None }
    }

    /// The connection itself, for a transaction that is not ours. It is closed, unless [`Session::done`] says that
    /// nothing is left open on it.
    pub(crate) fn raw(&mut self) -> sqlx::Result<&mut PgConnection> {
        self.parts().map(|(raw, ..)| raw)
    }

    /// See [`Session::raw`].
    pub(crate) fn done(mut self) {
        self.busy = false;
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy
    }

    /// Runs one or more statements without parameters.
    pub(crate) async fn run(&mut self, sql: &'static str) -> sqlx::Result<()> {
        sqlx::raw_sql(sql).execute(self).await.map(|_| ())
    }

    /// So that it is closed and not given back: more is on its way than anybody wants.
    pub(crate) fn hang_up(&mut self) {
        self.busy = true;
    }

    fn parts(&mut self) -> sqlx::Result<(&mut PgConnection, &mut bool, &Watchdog)> {
        let raw: Option<&mut PgConnection> = match &mut self.raw {
            Raw::Pooled(raw) => raw.as_deref_mut(),
            Raw::Borrowed(raw) => Some(raw),
        };
        let (Some(raw), Some(watchdog)) = (raw, self.watchdog.as_deref()) else {
            return Err(sqlx::Error::PoolClosed);
        };
        self.busy = true;
        Ok((raw, &mut self.busy, watchdog))
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let Raw::Pooled(pooled) = &mut self.raw else { return };
        let Some(mut pooled) = pooled.take() else { return };
        if self.busy {
            drop(pooled.detach());
            return;
        }
        // The pool pings what it gets back, and would wait for that for ever, with the connection's place taken. With
        // no runtime left there is nobody to wait.
        let within = self.watchdog.as_ref().map_or(ASK, |watchdog| watchdog.within);
        let back = pooled.return_to_pool();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { tokio::time::timeout(within, back).await });
        }
    }
}

type Step = sqlx::Result<Either<PgQueryResult, PgRow>>;

impl<'c> Executor<'c> for &'c mut Session<'_> {
    type Database = Postgres;

    fn fetch_many<'e, 'q, E>(self, query: E) -> BoxStream<'e, Step>
    where
        'c: 'e,
        'q: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let (raw, busy, watchdog) = match self.parts() {
            Ok(parts) => parts,
            Err(error) => return stream::once(async { Err(error) }).boxed(),
        };
        let rows = raw.fetch_many(query);
        stream::unfold(Some((rows, busy, watchdog)), |state| async move {
            let (mut rows, busy, watchdog) = state?;
            match watchdog.wait(rows.next()).await {
                Ok(Some(Ok(step))) => Some((Ok(step), Some((rows, busy, watchdog)))),
                Ok(Some(Err(error))) => {
                    *busy = !is_over(&error);
                    Some((Err(error), None))
                }
                Ok(None) => {
                    *busy = false;
                    None
                }
                Err(error) => Some((Err(error), None)),
            }
        })
        .boxed()
    }

    fn fetch_optional<'e, 'q, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Option<PgRow>>>
    where
        'c: 'e,
        'q: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        async move {
            let (raw, busy, watchdog) = self.parts()?;
            let row = watchdog.wait(raw.fetch_optional(query)).await?;
            *busy = row.as_ref().is_err_and(|error| !is_over(error));
            row
        }
        .boxed()
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [PgTypeInfo],
    ) -> BoxFuture<'e, sqlx::Result<PgStatement>>
    where
        'c: 'e,
    {
        async move {
            let (raw, busy, watchdog) = self.parts()?;
            let statement = watchdog.wait(raw.prepare_with(sql, parameters)).await?;
            *busy = statement.as_ref().is_err_and(|error| !is_over(error));
            statement
        }
        .boxed()
    }
}

/// Whether the statement has ended with this error, and the connection can still be used.
fn is_over(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use airtight_testkit::postgres::TestDb;

    /// A large statement takes its time to be sent. PostgreSQL begins with it late, and is asked before it has been at
    /// work for as long as was waited.
    #[tokio::test]
    async fn a_statement_that_took_long_to_send_is_waited_for() {
        let Some(db) = TestDb::create("slow_to_send").await else { return };
        let pool = db.pool(2).await;
        let watchdog = Watchdog::new(pool.clone(), Duration::from_secs(4), vec!["of_ours".into()]);
        let work = async {
            tokio::time::sleep(Duration::from_millis(1_400)).await;
            sqlx::query("SELECT pg_sleep(4) AS of_ours").execute(&pool).await
        };
        watchdog.wait(work).await.expect("it was waited for").expect("it was answered");
    }
}
