//! Checks that run next to the stream, because the stream does not report these things: whether the publication still has
//! what it must have, whether the server is shutting down, and whether a silent connection still works.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use airtight_core::{Class, Code, Error, Result};

use super::{Shared, session::Session, wire::Wire};
use crate::error::{doing, sqlstate};

/// How often it is looked: as often as relays look after each other.
const LOOK: Duration = Duration::from_secs(2);

/// How often it is tried whether the server takes connections. In a smart shutdown nothing else tells: it waits for the
/// sessions that there are, and these are not told.
const PROBE: Duration = Duration::from_secs(4);

/// The server answers at once while it has nothing to do, so after so long it is asked elsewhere what it does.
const MUTE: Duration = Duration::from_secs(5);

/// What a walsender waits for when it would answer: WAL, room in the socket, anything.
const IDLE: [&str; 3] = ["walsendermain", "walsenderwaitforwal", "walsenderwritedata"];

/// How often to check whether the server still works on a long statement.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long it may take to end a connection, and how often to look for more of them.
const CLOSE: Duration = Duration::from_secs(1);
const LET_GO: Duration = Duration::from_millis(500);

impl Session {
    /// Looks until something is wrong. `pid` is the walsender's.
    pub(super) async fn watch(&self, pid: i32) -> Error {
        // Side by side: a pool waits for a server that shuts down.
        tokio::select! {
            error = self.look_on(pid) => error,
            error = self.probe_on() => error,
        }
    }

    async fn look_on(&self, pid: i32) -> Error {
        loop {
            tokio::select! {
                () = self.shared.look.notified() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
            let looked = async {
                self.refuse_mute(pid).await?;
                self.shared.verify(self.name()).await
            };
            match looked.await {
                Ok(()) => {}
                Err(error)
                    if error.class() == Class::Permanent
                        || error.is(&Code::TIMEOUT)
                        || is_going_down(&error) =>
                {
                    return error;
                }
                // The code that needs that connection reports the error.
                Err(error) => {
                    tracing::debug!(slot = self.name(), %error, "could not check the publication");
                }
            }
        }
    }

    async fn probe_on(&self) -> Error {
        loop {
            tokio::time::sleep(PROBE).await;
            match Wire::connect(&self.shared.endpoint).await {
                Ok(wire) => wire.close().await,
                Err(error) if is_going_down(&error) => return error,
                Err(error) => {
                    tracing::debug!(slot = self.name(), %error, "could not open a second connection to check the stream");
                }
            }
        }
    }

    /// Refuses a stream that has sent nothing for a while, although the server was asked, if the server has nothing else to do.
    /// A server that decodes a large transaction sends nothing, either, and must not be made to start over.
    async fn refuse_mute(&self, pid: i32) -> Result<()> {
        let silence = self.silence();
        if silence < MUTE {
            return Ok(());
        }
        let sql =
            "SELECT wait_event, state FROM pg_stat_activity WHERE pid = $1 AND backend_type = 'walsender'";
        let does = match self.activity(sql, pid).await? {
            None => "has ended its side".to_owned(),
            Some((Some(wait), _)) if IDLE.contains(&wait.to_ascii_lowercase().as_str()) => {
                "has nothing else to do".into()
            }
            Some(_) => return Ok(()),
        };
        Err(Error::retryable(
            Code::TIMEOUT,
            format!(
                "nothing arrived on the replication connection for {} s, although the server was asked every second \
                 and {does}: the connection is given up",
                silence.as_secs()
            ),
        ))
    }

    /// Waits for the answer to a statement for as long as the server works on it.
    pub(super) async fn patiently<T>(
        &self,
        pid: i32,
        what: &str,
        answer: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::pin!(answer);
        let mut idle = 0;
        loop {
            tokio::select! {
                answer = &mut answer => return answer,
                () = tokio::time::sleep(PATIENCE) => {}
            }
            let sql = "SELECT wait_event, state FROM pg_stat_activity WHERE pid = $1";
            idle = match self.activity(sql, pid).await {
                Ok(Some((_, Some(state)))) if state == "active" => 0,
                Ok(Some((_, Some(state)))) if state.starts_with("idle") => idle + 1,
                Ok(None) => idle + 1,
                // It cannot be known.
                _ => idle,
            };
            if idle == 2 {
                return Err(Error::retryable(
                    Code::TIMEOUT,
                    format!(
                        "{what}: the server has finished the statement, but its answer does not arrive: the connection is given up"
                    ),
                ));
            }
        }
    }

    async fn activity(
        &self,
        sql: &'static str,
        pid: i32,
    ) -> Result<Option<(Option<String>, Option<String>)>> {
        let outbox = &self.shared.outbox;
        let mut conn = outbox.acquire().await?;
        let found = sqlx::query_as(sql)
            .persistent(!outbox.pooled)
            .bind(pid)
            .fetch_optional(conn.get())
            .await
            .map_err(doing("checking the activity of the server"))?;
        conn.commit().await?;
        Ok(found)
    }
}

/// Whether an error says that the server shuts down, or is not up yet: it takes no connections. One connection that is ended
/// (57P01) says nothing of the others.
pub(super) fn is_going_down(error: &Error) -> bool {
    error.sqlstate() == Some(sqlstate::CANNOT_CONNECT_NOW)
}

/// Ends the connections of the pool that nobody uses, until a session has begun again: a smart shutdown waits for them,
/// also for those that come back later.
pub(super) fn let_go(shared: &Arc<Shared>) {
    if shared.going_down.swap(true, Ordering::AcqRel) {
        return;
    }
    let shared = Arc::downgrade(shared);
    tokio::spawn(async move {
        while let Some(shared) = shared.upgrade().filter(|shared| shared.going_down.load(Ordering::Acquire)) {
            while let Some(connection) = shared.outbox.pool.try_acquire() {
                // One that cannot be ended is dropped.
                let _ = tokio::time::timeout(CLOSE, connection.close()).await;
            }
            drop(shared);
            tokio::time::sleep(LET_GO).await;
        }
    });
}
