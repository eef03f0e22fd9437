//! `airtight prune`: deletes old events of a queue or of a log.

use std::time::Duration;

use airtight::{
    admin::{Prune, Removed},
    log,
};
use serde::Serialize;
use serde_json::json;

use super::counter;
use crate::{
    args::PruneArgs,
    config::{Config, Retention, SetBy, units},
    errors::{Failure, Outcome, complain},
    output::{self, counted, line, printable},
    wiring::{Store, Target},
};

pub(crate) async fn run(args: &PruneArgs) -> Outcome {
    let config = args.database.config.as_deref().map(Config::load).transpose()?;
    let target = Target::resolve(&args.database, config.as_ref())?;
    // Before anything connects.
    let older_than = args.older_than.as_deref().map(|text| duration("--older-than", text)).transpose()?;
    let keep = args.keep.as_deref().map(|text| duration("--keep", text)).transpose()?;
    let mut retention = config.map(|config| config.retention).unwrap_or_default();
    if older_than.is_some() {
        (retention.done, retention.done_set_by) = (older_than, SetBy::Explicitly("--older-than"));
    }
    if keep.is_some() {
        (retention.log, retention.log_set_by) = (keep, SetBy::Explicitly("--keep"));
    }
    retention.done_by_creation |= args.by_creation;
    let store = target.open().await?;
    if store.is_log() {
        return of_log(args, &target, &store, &retention).await;
    }
    if args.keep.is_some() || args.ignore_consumers {
        return Err(Failure::usage(
            "--keep and --ignore-consumers are for a log, and this outbox is a queue: use --older-than",
        ));
    }
    of_queue(args, &target, &store, &retention).await
}

fn duration(flag: &str, text: &str) -> Outcome<Duration> {
    units::duration(text).map_err(|message| Failure::usage(format!("{flag}: {message}")))
}

/// The failure if no retention is configured: nothing may be removed.
fn nothing_to_remove(target: &Target, set_by: SetBy, key: &str, flag: &str) -> Failure {
    Failure::usage(match (&target.database.spec, set_by) {
        (Some(spec), SetBy::Default) => format!(
            "{} is an application's table, and airtight removes nothing from it by default: set `{key}` in [retention], \
             or pass {flag} DURATION",
            spec.display_name()
        ),
        _ => format!("the config keeps events forever; pass {flag} DURATION"),
    })
}

async fn of_queue(args: &PruneArgs, target: &Target, store: &Store, retention: &Retention) -> Outcome {
    let set_by = retention.done_set_by;
    let Some(what) = retention.of_queue() else {
        return Err(nothing_to_remove(target, set_by, "done", "--older-than"));
    };
    let what = Prune { dry_run: args.dry_run, ..what };
    let bar = counter("events removed");
    let removed = store.admin().prune(what, &|total| bar.set_position(total)).await;
    bar.finish_and_clear();
    let Removed { events, column } = removed?;
    let older_than = units::shown(what.keep);
    if args.output.json {
        return output::json(&json!({
            "pruned": events, "by": column, "older_than": older_than, "dry_run": args.dry_run
        }));
    }
    let by_creation = match &target.database.spec {
        Some(spec) => spec.age_column(false).is_err(),
        None => false,
    };
    line(format!(
        "{} {} {} more than {older_than} ago, by {column} ({set_by})",
        if args.dry_run { "would remove" } else { "removed" },
        counted(events, "event"),
        if by_creation { "written" } else { "delivered" },
    ))
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    log: log::Pruned,
    /// Entries removed from the inbox.
    inbox: u64,
    /// The column that says how old an event is.
    by: Option<String>,
    dry_run: bool,
}

async fn of_log(args: &PruneArgs, target: &Target, store: &Store, configured: &Retention) -> Outcome {
    if args.older_than.is_some() {
        return Err(Failure::usage(
            "--older-than is for a queue, and this outbox is a log, which has no delivered events: use --keep",
        ));
    }
    let Some(keep) = configured.log else {
        return Err(nothing_to_remove(target, configured.log_set_by, "log", "--keep"));
    };
    let wait_for_consumers = configured.log_waits_for_consumers && !args.ignore_consumers;
    let admin = store.log_admin();
    let wanted = log::Retention { keep, wait_for_consumers };
    let by = store.created_at().map(str::to_owned);
    if args.dry_run {
        let log = admin.prunable(wanted).await?;
        if args.output.json {
            return output::json(&Report { log, inbox: 0, by, dry_run: true });
        }
        return tell(&log, &by, "would remove", configured, wanted);
    }
    let bar = counter("events removed");
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
            complain(format_args!(
                "note: these consumers are now behind retention: {}; rebuild the data that they feed, then run `airtight \
                 consumers seek NAME --earliest`",
                printable(&behind.join(", "))
            ));
        }
    }
    if args.output.json {
        return output::json(&Report { log, inbox, by, dry_run: false });
    }
    tell(&log, &by, "removed", configured, wanted)?;
    if inbox > 0 {
        line(format!("removed {}", counted(inbox, "inbox row")))?;
    }
    Ok(())
}

fn tell(
    log: &log::Pruned,
    by: &Option<String>,
    removed: &str,
    configured: &Retention,
    wanted: log::Retention,
) -> Outcome {
    line(format!(
        "{removed} {} of the log{}, {} dropped whole{}",
        counted(log.events, "event"),
        if wanted.wait_for_consumers { "" } else { ", whether consumers have seen them or not" },
        counted(log.partitions, "partition"),
        if log.floor > 0 {
            format!("; all events up to seq {} are removed", log.floor)
        } else {
            String::new()
        },
    ))?;
    if let Some(column) = by {
        line(format!(
            "events are kept for {}, by {} ({})",
            units::shown(wanted.keep),
            printable(column),
            configured.log_set_by
        ))?;
    }
    match &log.held_by {
        Some(consumer) => line(format!(
            "older events stay, because consumer `{0}` has not seen them; if it is no longer needed, remove it with \
             `airtight consumers remove {0}`",
            printable(consumer)
        )),
        None => Ok(()),
    }
}
