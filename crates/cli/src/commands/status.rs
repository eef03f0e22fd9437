//! `airtight status`: shows the counts of events, the consumers, the readers and the relays.

use std::collections::BTreeSet;

use airtight::{admin::Status, metrics};
use serde::Serialize;

use super::consumers;
use crate::{
    args::StatusArgs,
    config::{Config, Pipeline, Reading},
    errors::Outcome,
    output::{self, Table, age, counted, line, printable},
    wiring::{self, Target},
};

pub(crate) async fn run(args: &StatusArgs) -> Outcome {
    let config = args.database.config.as_deref().map(Config::load).transpose()?;
    let target = Target::resolve(&args.database, config.as_ref())?;
    let store = target.open().await?;
    let status = store.admin().status().await?;
    let database = target.database_name()?;
    let pipelines: Vec<PipelineStatus> = config
        .iter()
        .flat_map(|config| &config.pipelines)
        .map(|one| PipelineStatus { name: one.name.clone(), running: is_running(one, &status, &database) })
        .collect();
    if args.output.json {
        return output::json(&Shown { status: &status, pipelines });
    }
    if args.metrics {
        return line(metrics::prometheus(&status, &args.prefix).trim_end());
    }
    line(format!("outbox {}{}", status.outbox, if store.is_log() { ", a log" } else { "" }))?;
    line("")?;
    if store.is_log() && (status.slots.is_empty() || !status.consumers.is_empty()) {
        consumers::print_all(&status.consumers)?;
    } else if !store.is_log() {
        print_streams(&status)?;
    }
    if !status.slots.is_empty() {
        line("")?;
        super::cdc::print(&status.slots)?;
    }
    line("")?;
    print_relays(&status, store.is_log())?;
    for one in pipelines.iter().filter(|one| !one.running) {
        let name = printable(&one.name);
        line(format!(
            "pipeline `{name}` is in the config, but no relay runs it: the log of its process says why"
        ))?;
    }
    print_away(&status)?;
    if status.blocked_keys > 0 {
        line("")?;
        let keys = counted(status.blocked_keys, "key");
        line(format!("{keys} waiting behind a failed or dead event; see `airtight events blocked`"))?;
    }
    let unexplained: u64 = status.streams.iter().map(|stream| stream.unexplained).sum();
    if unexplained > 0 {
        line(format!(
            "{} a status that no role explains, and airtight ignores such rows; `airtight check` says which",
            match unexplained {
                1 => "1 row has".to_owned(),
                rows => format!("{} rows have", output::count(rows)),
            }
        ))?;
    }
    let of_streams: u64 = status.streams.iter().map(|stream| stream.dead + stream.unknown).sum();
    let of_consumers: u64 = status.consumers.iter().map(|one| one.dead + one.unknown).sum();
    // Rows of a table with a status are counted by their status.
    let of_slots: u64 =
        if store.is_log() { status.slots.iter().map(|one| one.dead + one.unknown).sum() } else { 0 };
    let dead = of_streams + of_consumers + of_slots;
    if dead > 0 {
        line(format!("{} to decide about; see `airtight dead list`", counted(dead, "dead letter")))?;
    }
    Ok(())
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    status: &'a Status,
    /// Those of the config, where there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pipelines: Vec<PipelineStatus>,
}

#[derive(Serialize)]
struct PipelineStatus {
    name: String,
    running: bool,
}

/// Whether a relay runs the pipeline. A queue's relays have no names: they are recognised by what they read.
fn is_running(pipeline: &Pipeline, status: &Status, database: &str) -> bool {
    match &pipeline.read {
        Reading::Queue(queue) => {
            let wanted: BTreeSet<&String> = queue.streams.iter().collect();
            status.relays.iter().any(|relay| {
                relay.order == queue.order.as_str() && relay.streams.iter().collect::<BTreeSet<_>>() == wanted
            })
        }
        Reading::Log(log) => {
            status.consumers.iter().any(|one| one.name == log.consumer && !one.instances.is_empty())
        }
        Reading::Cdc(cdc) => {
            let slot = wiring::named(database, &pipeline.name, cdc).log.consumer;
            status.slots.iter().any(|one| one.name == slot && one.active)
        }
    }
}

fn print_streams(status: &Status) -> Outcome {
    if status.streams.is_empty() {
        return line("no events");
    }
    let mut table = Table::new(&[
        "stream",
        "pending",
        "retrying",
        "processing",
        "done",
        "dead",
        "unknown",
        "oldest waiting",
    ]);
    for stream in &status.streams {
        let counts =
            [stream.pending, stream.retrying, stream.processing, stream.done, stream.dead, stream.unknown];
        let mut cells = vec![stream.stream.clone()];
        cells.extend(counts.iter().map(u64::to_string));
        cells.push(stream.oldest_pending_seconds.map_or_else(|| "-".into(), age));
        table.row(cells);
    }
    table.print()
}

/// Prints what is unavailable, with the error message that is stored with the waiting events.
fn print_away(status: &Status) -> Outcome {
    for away in &status.away {
        line("")?;
        let consumer = away.consumer.as_ref().map(|name| format!(" of consumer {name}")).unwrap_or_default();
        let (events, wait) = (counted(away.events, "event"), if away.events == 1 { "waits" } else { "wait" });
        line(format!("{events}{consumer} {wait}; no attempt is spent: {}", away.message))?;
    }
    Ok(())
}

fn print_relays(status: &Status, is_log: bool) -> Outcome {
    if status.relays.is_empty() {
        let how = match (is_log, status.slots.is_empty()) {
            (_, false) => " --read cdc",
            (true, true) => " --read log --consumer NAME",
            (false, true) => "",
        };
        return line(format!("no relay is running; start one with `airtight run{how}`"));
    }
    let mut table = Table::new(&["relay", "host", "streams", "order", "partitions", "lease"]);
    for relay in &status.relays {
        let streams = if relay.streams.is_empty() { "all".into() } else { relay.streams.join(", ") };
        table.row(vec![
            relay.id.clone(),
            relay.host.clone(),
            streams,
            relay.order.clone(),
            relay.partitions.to_string(),
            age(relay.lease_seconds),
        ]);
    }
    table.print()
}
