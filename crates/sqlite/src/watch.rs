//! Wakes an idle relay as soon as another connection has committed.
//!
//! SQLite does not notify other connections of a commit. A separate connection reads `data_version`, which changes with
//! the commits of others. Before that it looks at the write-ahead log, which is cheaper still.

use std::time::Duration;

use sqlx::{ConnectOptions, SqliteConnection};
use tokio::{sync::Mutex, time::Instant};

use crate::outbox::SqliteOutbox;

/// How often an idle relay looks whether another connection has committed.
const LOOK: Duration = Duration::from_millis(100);

/// How long it asks more often after a publish in this process, whose commit is to come.
const EAGER: Duration = Duration::from_millis(100);

/// A commit writes the log first and is visible only once that is synced. A log that was written to just now may
/// be that of a commit to come, and says nothing.
const QUIET: Duration = Duration::from_millis(250);

/// Waits for commits to an outbox's file.
#[derive(Debug)]
pub(crate) struct CommitWatcher {
    outbox: SqliteOutbox,
    watch: Mutex<Option<WatchConnection>>,
}

/// A connection that only watches for the commits of others.
#[derive(Debug)]
struct WatchConnection {
    conn: SqliteConnection,
    version: i64,
    /// The write-ahead log when the version was read.
    log: Option<LogStamp>,
}

/// Size and time of the write-ahead log: every commit writes there. Looking at it costs a few microseconds, a
/// statement, with its way to SQLite's thread and back, some hundred; an idle relay looks ten times a second.
/// Two commits within one tick of the file system's clock may look like one, which polling makes up for.
type LogStamp = (u64, std::time::SystemTime);

impl CommitWatcher {
    pub(crate) fn new(outbox: SqliteOutbox) -> Self {
        Self { outbox, watch: Mutex::new(None) }
    }

    /// Returns after a commit, or after `at_most`.
    pub(crate) async fn wait(&self, at_most: Duration) {
        // A timeout is no error: the call returns either way.
        let _ = tokio::time::timeout(at_most, self.wait_for_commit()).await;
    }

    /// Whether another connection has committed since the last call. The first call returns true.
    async fn committed(&self) -> bool {
        let mut guard = self.watch.lock().await;
        if guard.is_none() {
            let options = self.outbox.pool().connect_options();
            match options
                .as_ref()
                .clone()
                .create_if_missing(false)
                .disable_statement_logging()
                .connect()
                .await
            {
                Ok(conn) => *guard = Some(WatchConnection { conn, version: -1, log: None }),
                // The claim that follows meets the same error, and reports it.
                Err(_) => return false,
            }
        }
        let Some(watch) = guard.as_mut() else { return false };
        let log = self.log_stamp().filter(|(_, at)| at.elapsed().is_ok_and(|age| age >= QUIET));
        if log.is_some() && log == watch.log {
            return false;
        }
        watch.log = log;
        match sqlx::query_scalar::<_, i64>("PRAGMA data_version").fetch_one(&mut watch.conn).await {
            Ok(version) => std::mem::replace(&mut watch.version, version) != version,
            Err(_) => {
                *guard = None;
                false
            }
        }
    }

    fn log_stamp(&self) -> Option<LogStamp> {
        let options = self.outbox.pool().connect_options();
        let mut path = options.get_filename().as_os_str().to_owned();
        path.push("-wal");
        let log = std::fs::metadata(path).ok()?;
        Some((log.len(), log.modified().ok()?))
    }

    async fn wait_for_commit(&self) {
        loop {
            // Registered before the look, so that a publish in between is not missed.
            let published = self.outbox.published().notified();
            if self.committed().await {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = published => {
                    let until = Instant::now() + EAGER;
                    let mut pause = Duration::from_millis(1);
                    while Instant::now() < until {
                        tokio::time::sleep(pause).await;
                        if self.committed().await {
                            return;
                        }
                        pause = (pause * 2).min(Duration::from_millis(16));
                    }
                }
            }
        }
    }
}
