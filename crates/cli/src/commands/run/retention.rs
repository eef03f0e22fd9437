//! Removing what is old, in the background of a relay.

use std::{sync::Arc, time::Duration};

use airtight::{Result, log::LogAdmin};
use tokio_util::sync::CancellationToken;

use crate::{
    config::{Pipeline, Reading, Retention, units},
    wiring::{Store, Target},
};

/// Between two rounds; the first is soon after the start.
const FIRST: Duration = Duration::from_secs(60);
const EVERY: Duration = Duration::from_secs(3_600);

/// Removes what the pipelines have left behind and nobody wants any more, until told to stop.
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
            said(queue_round(&store, &retention).await);
        }
        if log {
            said(log_round(&store, &retention).await);
        }
        if wal && !log && store.is_log() {
            said(wal_round(&store, &retention).await);
            // Where it can be a log, consumers decide what may go.
            if store.is_followable() {
                said(log_round(&store, &retention).await);
            }
        }
    }
}

/// Says what will be removed from a table that is not airtight's own, before anything is.
pub(super) fn announce(store: &Store, target: &Target, pipelines: &[Pipeline], retention: &Retention) {
    let Some(spec) = &target.database.spec else { return };
    let table = spec.display_name();
    if let (Some(keep), false) = (retention.done, store.is_log())
        && let Ok(column) = spec.age_column(retention.done_by_creation)
    {
        tracing::info!(
            "rows of {table} that are done are removed after {}, by {column}, as {} says",
            units::shown(keep),
            retention.done_said
        );
    }
    let followed = pipelines.iter().any(|one| !matches!(one.read, Reading::Queue(_)));
    if let (Some(keep), true) = (retention.log, store.is_log() && followed)
        && let Some(column) = &spec.created_at
    {
        tracing::info!(
            "rows of {table} are removed after {}, by {column}, as {} says{}",
            units::shown(keep),
            retention.log_said,
            if retention.log_waits_for_consumers { "" } else { ", whether consumers have seen them or not" }
        );
    }
}

fn said(round: Result<()>) {
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

/// A table without a status is pruned behind its readers, like a log.
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
    // Neither waits for the other: a log that is locked must not keep the inbox from being cleaned.
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
            "older events than retention wants stay, since this consumer has not seen them; one that is no longer \
             needed is removed with `airtight consumers remove {consumer}`"
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
