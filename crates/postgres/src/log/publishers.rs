//! Publishers that keep a log waiting: transactions that have published and have not ended.

use std::time::{Duration, Instant};

use airtight_core::{Result, log::OpenPublisher, table::literal};
use sqlx::{AssertSqlSafe, Row};

use super::LogTable;
use crate::{PgOutbox, error::doing, outbox::Conn};

/// A hole that stays open for so long is worth a line in the log.
const SAY_AFTER: Duration = Duration::from_secs(3);

/// How often it is said again.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// How long a read has stood before the same hole.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Where it stands, and since when.
    at: Option<(i64, Instant)>,
    said: Option<Instant>,
}

impl Waiting {
    /// It stands behind this `seq`: whether it is time to say so.
    pub(super) fn stands(&mut self, seq: i64) -> bool {
        let since = match self.at {
            Some((at, since)) if at == seq => since,
            _ => {
                *self = Self { at: Some((seq, Instant::now())), said: None };
                return false;
            }
        };
        let due = match self.said {
            None => since.elapsed() >= SAY_AFTER,
            Some(said) => said.elapsed() >= SAY_AGAIN,
        };
        if due {
            self.said = Some(Instant::now());
        }
        due
    }

    /// The log continues: for how long it had waited, if a message had reported the wait.
    pub(super) fn goes_on(&mut self) -> Option<Duration> {
        let (_, since) = self.at.take()?;
        self.said.take().map(|_| since.elapsed())
    }
}

/// Those who have drawn from the sequence and may still fill holes, the oldest first.
pub(super) async fn open(outbox: &PgOutbox, conn: &mut Conn, table: &LogTable) -> Result<Vec<OpenPublisher>> {
    let held = format!("l.relation = {}::bigint::oid AND l.mode = 'RowExclusiveLock'", table.sequence.oid);
    transactions(outbox, conn, &held).await
}

/// Those who hold any lock on the table or a partition of it, the oldest first.
pub(super) async fn holders(outbox: &PgOutbox) -> Result<Vec<OpenPublisher>> {
    let mut conn = outbox.acquire().await?;
    let table = literal(&outbox.spec.qualified());
    let held = format!(
        "(l.relation = to_regclass({table}) OR l.relation IN (SELECT relid FROM pg_partition_tree(to_regclass({table})))) \
         AND l.pid IS DISTINCT FROM pg_backend_pid()"
    );
    let found = transactions(outbox, &mut conn, &held).await?;
    conn.commit().await?;
    Ok(found)
}

async fn transactions(outbox: &PgOutbox, conn: &mut Conn, held: &str) -> Result<Vec<OpenPublisher>> {
    let failed = doing("looking for open transactions");
    // A prepared transaction has no process. Its own id, which it holds a lock on, leads to its name.
    let sql = format!(
        "SELECT DISTINCT l.pid, p.gid, nullif(a.application_name, '') AS application, a.state, \
           extract(epoch FROM clock_timestamp() - coalesce(p.prepared, a.xact_start))::float8 AS seconds \
         FROM (SELECT DISTINCT pid, virtualtransaction FROM pg_locks l WHERE l.locktype = 'relation' AND l.granted \
           AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND {held}) AS l \
         LEFT JOIN pg_stat_activity a ON a.pid = l.pid \
         LEFT JOIN pg_locks x ON l.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid' AND x.granted \
           AND x.mode = 'ExclusiveLock' AND x.virtualtransaction = l.virtualtransaction \
         LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid \
         ORDER BY seconds DESC NULLS LAST LIMIT 10"
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .persistent(!outbox.pooled)
        .fetch_all(conn.get())
        .await
        .map_err(&failed)?;
    rows.iter()
        .map(|row| {
            Ok(OpenPublisher {
                pid: row.try_get("pid").map_err(&failed)?,
                prepared: row.try_get("gid").map_err(&failed)?,
                application: row.try_get("application").map_err(&failed)?,
                state: row.try_get("state").map_err(&failed)?,
                seconds: row.try_get("seconds").map_err(&failed)?,
            })
        })
        .collect()
}
