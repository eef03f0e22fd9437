//! Removes old events in the background of a relay.

use std::{sync::Arc, time::Duration};

use airtight::{Result, log::LogAdmin};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{Pipeline, Reading, Retention, units},
    wiring::{Store, Target},
};

/// The wait before the first round, and between two rounds.
const FIRST: Duration = Duration::from_secs(60);
const EVERY: Duration = Duration::from_secs(3_600);

/// Removes the pipelines' old events until `stop` is cancelled.
pub(super) async fn keep(
    store: Arc<Store>,
    pipelines: Vec<Pipeline>,
    retention: Retention,
    stop: CancellationToken,
) {
    let log = pipelines.iter().any(|one| matches!(one.read, Reading::Log(_)));
    let wal = pipelines.iter().any(|one| matches!(one.read, Reading::Cdc(_)));
    // Rows with a status are done, however they were read.
    let queue = !store.is_log();
    let mut wait = FIRST;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
        wait = EVERY;
        if queue {
            warn_if_failed(queue_round(&store, &retention).await);
        }
        if log {
            warn_if_failed(log_round(&store, &retention).await);
        }
        if wal && !log && store.is_log() {
            warn_if_failed(wal_round(&store, &retention).await);
            // If the table can also be followed as a log, its consumers decide what may be removed.
            if store.is_followable() {
                warn_if_failed(log_round(&store, &retention).await);
            }
        }
    }
}

/// Logs what will be removed from an application's table, before anything is removed.
pub(super) fn announce(store: &Store, target: &Target, pipelines: &[Pipeline], retention: &Retention) {
    let Some(spec) = &target.database.spec else { return };
    let table = spec.display_name();
    if let (Some(keep), false) = (retention.done, store.is_log())
        && let Ok(column) = spec.age_column(retention.done_by_creation)
    {
        tracing::info!(
            "rows of {table} that are done are removed after {}, by {column} ({})",
            units::shown(keep),
            retention.done_set_by
        );
    }
    let followed = pipelines.iter().any(|one| !matches!(one.read, Reading::Queue(_)));
    if let (Some(keep), true) = (retention.log, store.is_log() && followed)
        && let Some(column) = &spec.created_at
    {
        tracing::info!(
            "rows of {table} are removed after {}, by {column} ({}){}",
            units::shown(keep),
            retention.log_set_by,
            if retention.log_waits_for_consumers { "" } else { ", whether consumers have seen them or not" }
        );
    }
}

fn warn_if_failed(round: Result<()>) {
    if let Err(error) = round {
        tracing::warn!(%error, "could not remove old events; trying again in an hour");
    }
}

async fn queue_round(store: &Store, retention: &Retention) -> Result<()> {
    let Some(what) = retention.of_queue() else { return Ok(()) };
    let removed = store.admin().prune(what, &|_| {}).await?;
    if removed.events > 0 {
        tracing::info!(events = removed.events, by = removed.column, "removed old delivered events");
    }
    Ok(())
}

/// Removes old rows of a table without a status up to where all its readers are, as for a log.
async fn wal_round(store: &Store, retention: &Retention) -> Result<()> {
    let (Some(wanted), Some(outbox)) = (retention.of_log(), store.postgres()) else { return Ok(()) };
    let events = outbox.prune_behind(wanted.keep, &|_| {}).await?;
    if events > 0 {
        tracing::info!(events, "removed old events that all readers have passed");
    }
    Ok(())
}

async fn log_round(store: &Store, retention: &Retention) -> Result<()> {
    let log = store.log_admin();
    // Both run in any case: a locked log must not prevent the removal of old inbox entries.
    let (events, inbox) = (log_events(log, retention).await, log_inbox(log, retention).await);
    events.and(inbox)
}

async fn log_events(log: &dyn LogAdmin, retention: &Retention) -> Result<()> {
    let Some(wanted) = retention.of_log() else { return Ok(()) };
    let pruned = log.prune_log(wanted, &|_| {}).await?;
    if pruned.events > 0 {
        let (events, partitions, floor) = (pruned.events, pruned.partitions, pruned.floor);
        tracing::info!(events, partitions, floor, "removed old events of the log");
    }
    if let Some(consumer) = pruned.held_by {
        tracing::warn!(
            consumer,
            floor = pruned.floor,
            "events older than the retention stay, because this consumer has not seen them; if it is no longer needed, \
             remove it with `airtight consumers remove {consumer}`"
        );
    }
    Ok(())
}

async fn log_inbox(log: &dyn LogAdmin, retention: &Retention) -> Result<()> {
    let Some(keep) = retention.inbox else { return Ok(()) };
    let entries = log.prune_inbox(keep).await?;
    if entries > 0 {
        tracing::info!(entries, "removed old entries of the inbox");
    }
    Ok(())
}
