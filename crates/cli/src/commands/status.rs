//! `airtight status`.

use airtight::{admin::Status, metrics};

use super::{consumers, open};
use crate::{
    args::StatusArgs,
    errors::Outcome,
    output::{self, Table, age, counted, line},
};

pub(crate) async fn run(args: &StatusArgs) -> Outcome {
    let store = open(&args.database).await?;
    let status = store.admin().status().await?;
    if args.output.json {
        return output::json(&status);
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
    print_away(&status)?;
    if status.blocked_keys > 0 {
        line("")?;
        let keys = counted(status.blocked_keys, "key");
        line(format!("{keys} waiting behind a failed or dead event; see `airtight events blocked`"))?;
    }
    let of_streams: u64 = status.streams.iter().map(|stream| stream.dead + stream.unknown).sum();
    let of_consumers: u64 = status.consumers.iter().map(|one| one.dead + one.unknown).sum();
    // Rows of a table with a status say so themselves.
    let of_slots: u64 =
        if store.is_log() { status.slots.iter().map(|one| one.dead + one.unknown).sum() } else { 0 };
    let dead = of_streams + of_consumers + of_slots;
    if dead > 0 {
        line(format!("{} to decide on; see `airtight dead list`", counted(dead, "dead letter")))?;
    }
    Ok(())
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

/// What is away, in the words of the error that is stored with the events that wait for it.
fn print_away(status: &Status) -> Outcome {
    for away in &status.away {
        line("")?;
        let consumer = away.consumer.as_ref().map(|name| format!(" of consumer {name}")).unwrap_or_default();
        let (events, wait) = (counted(away.events, "event"), if away.events == 1 { "waits" } else { "wait" });
        line(format!("{events}{consumer} {wait}, at no cost: {}", away.message))?;
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
