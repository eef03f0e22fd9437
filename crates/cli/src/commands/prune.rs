//! `airtight prune`.

use std::time::Duration;

use airtight::log;
use serde::Serialize;
use serde_json::json;

use super::counter;
use crate::{
    args::PruneArgs,
    config::{Config, Retention, units},
    errors::{Failure, Outcome},
    output::{self, counted, line, printable},
    wiring::{Store, Target},
};

/// How long ago a queue's event must have been delivered, unless told.
const OLDER_THAN: &str = "7d";

pub(crate) async fn run(args: &PruneArgs) -> Outcome {
    let config = args.database.config.as_deref().map(Config::load).transpose()?;
    let target = Target::resolve(&args.database, config.as_ref())?;
    // Before anything connects.
    let older_than = args.older_than.as_deref().unwrap_or(OLDER_THAN);
    let older_than = (older_than, duration("--older-than", older_than)?);
    let keep = args.keep.as_deref().map(|text| duration("--keep", text)).transpose()?;
    let store = target.open().await?;
    if store.is_log() {
        let retention = config.map(|config| config.retention).unwrap_or_default();
        return of_log(args, &store, keep, &retention).await;
    }
    if args.keep.is_some() || args.ignore_consumers {
        return Err(Failure::usage(
            "--keep and --ignore-consumers are for a log, and this outbox is a queue: say --older-than",
        ));
    }
    of_queue(args, &store, older_than).await
}

fn duration(flag: &str, text: &str) -> Outcome<Duration> {
    units::duration(text).map_err(|message| Failure::usage(format!("{flag}: {message}")))
}

async fn of_queue(args: &PruneArgs, store: &Store, (text, older_than): (&str, Duration)) -> Outcome {
    let bar = counter("events removed");
    let pruned = store.admin().prune(older_than, &|total| bar.set_position(total)).await;
    bar.finish_and_clear();
    let pruned = pruned?;
    if args.output.json {
        return output::json(&json!({"pruned": pruned}));
    }
    line(format!("removed {} delivered more than {text} ago", counted(pruned, "event")))
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    log: log::Pruned,
    /// Entries removed from the inbox.
    inbox: u64,
}

async fn of_log(args: &PruneArgs, store: &Store, keep: Option<Duration>, configured: &Retention) -> Outcome {
    if args.older_than.is_some() {
        return Err(Failure::usage(
            "--older-than is for a queue, and this outbox is a log, which knows no delivered events: say --keep",
        ));
    }
    let Some(keep) = keep.or(configured.log) else {
        return Err(Failure::usage("the config keeps the log for ever; say how long with --keep DURATION"));
    };
    let wait_for_consumers = configured.log_waits_for_consumers && !args.ignore_consumers;
    let admin = store.log_admin();
    let bar = counter("events removed");
    let wanted = log::Retention { keep, wait_for_consumers };
    let pruned = admin.prune_log(wanted, &|total| bar.set_position(total)).await;
    bar.finish_and_clear();
    let log = pruned?;
    let inbox = match configured.inbox {
        Some(keep) => admin.prune_inbox(keep).await?,
        None => 0,
    };
    if !wait_for_consumers {
        let behind: Vec<String> = admin
            .consumers()
            .await?
            .into_iter()
            .filter(|one| one.behind_retention)
            .map(|one| one.name)
            .collect();
        if !behind.is_empty() {
            eprintln!(
                "note: behind retention now: {}; rebuild what they feed, then `airtight consumers seek NAME --earliest`",
                printable(&behind.join(", "))
            );
        }
    }
    if args.output.json {
        return output::json(&Report { log, inbox });
    }
    line(format!(
        "removed {} of the log{}, {} dropped whole{}",
        counted(log.events, "event"),
        if wait_for_consumers { "" } else { ", whether consumers have seen them or not" },
        counted(log.partitions, "partition"),
        if log.floor > 0 { format!("; all up to seq {} are gone", log.floor) } else { String::new() },
    ))?;
    if inbox > 0 {
        line(format!("removed {}", counted(inbox, "inbox row")))?;
    }
    match log.held_by {
        Some(consumer) => line(format!(
            "older events stay, since consumer `{0}` has not seen them; one that is no longer needed: \
             `airtight consumers remove {0}`",
            printable(&consumer)
        )),
        None => Ok(()),
    }
}
