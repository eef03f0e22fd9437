//! Wakes a relay up on NOTIFY. A notification is only a hint: a relay that waits also polls.

use std::{sync::Arc, time::Duration};

use airtight_core::Result;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgPoolOptions};
use sqlx::{ConnectOptions, Connection};
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{PgOutbox, error::doing};

/// After so long without a notification the connection is tried.
const SILENCE: Duration = Duration::from_secs(10);

/// How long an answer is waited for.
const ANSWER: Duration = Duration::from_secs(10);

/// A background task with its own connection, which turns notifications into wake-ups.
#[derive(Debug)]
pub(crate) struct Listener {
    woken: Arc<Notify>,
    _stop: DropGuard,
}

impl Listener {
    /// Starts listening. The session is checked first, so that a wrong `listen_url` shows at the start.
    pub(crate) async fn start(outbox: &PgOutbox) -> Result<Self> {
        let options = match &outbox.options.listen_url {
            Some(url) => url.parse::<PgConnectOptions>().map_err(doing("reading listen_url"))?,
            None => (*outbox.pool.connect_options()).clone(),
        };
        let probe = async {
            let probe: PgConnection = options.connect().await?;
            // It was only to see that it works.
            let _ = probe.close().await;
            Ok(())
        };
        let probed = tokio::time::timeout(ANSWER, probe).await.unwrap_or(Err(sqlx::Error::PoolTimedOut));
        probed.map_err(doing("connecting the listener"))?;

        let woken = Arc::new(Notify::new());
        let stop = CancellationToken::new();
        let task = listen(options, outbox.channel(), woken.clone());
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stopped.cancelled() => {}
                () = task => {}
            }
        });
        Ok(Self { woken, _stop: stop.drop_guard() })
    }

    /// Returns at the next notification, or at one that came since the last call.
    pub(crate) async fn woken(&self) {
        self.woken.notified().await;
    }
}

/// Listens until it is dropped. A connection that breaks is replaced, and every waiting relay is woken, since notifications
/// were missed meanwhile; a half-open one is found out by the ping after each silence.
async fn listen(options: PgConnectOptions, channel: String, woken: Arc<Notify>) {
    let late = |_| sqlx::Error::PoolTimedOut;
    loop {
        // A pool of its own each time: what becomes of a mute connection holds its only place for ever.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(ANSWER)
            .connect_lazy_with(options.clone());
        let result: sqlx::Result<()> = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            tokio::time::timeout(ANSWER, listener.listen(&channel)).await.map_err(late)??;
            woken.notify_one();
            loop {
                match tokio::time::timeout(SILENCE, listener.try_recv()).await {
                    Ok(notification) => {
                        // None: the connection broke and was replaced.
                        notification?;
                    }
                    Err(_) => {
                        let ping = sqlx::query("SELECT 1").execute(&mut listener);
                        tokio::time::timeout(ANSWER, ping).await.map_err(late)??;
                        continue;
                    }
                }
                woken.notify_one();
            }
        }
        .await;
        if let Err(error) = result {
            tracing::info!(%error, "the listener lost its connection and opens another; polling continues");
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
