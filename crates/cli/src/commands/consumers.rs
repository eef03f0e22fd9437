//! `airtight consumers`: lists the consumers of a log with their offsets, and moves, pauses and removes them.

use std::io::{self, IsTerminal, Write};

use airtight::log::{Consumer, LogAdmin, Parked, ParkedFilter, Seek, SeekOptions, SeekTo, unknown_consumer};
use serde_json::json;

use super::{events::error_text, open_log};
use crate::{
    args::{
        ConsumerShowArgs, ConsumersListArgs, FilterArgs, LagArgs, OneConsumer, ParkedArgs, RemoveArgs,
        SeekArgs,
    },
    errors::{Failure, Outcome},
    output::{self, Table, age, count, counted, line, printable, short, time},
};

pub(crate) async fn list(args: &ConsumersListArgs) -> Outcome {
    let consumers = open_log(&args.database).await?.log_admin().consumers().await?;
    if args.output.json {
        return output::json(&consumers);
    }
    print_all(&consumers)
}

/// Prints the table of consumers, or how to start one.
pub(super) fn print_all(consumers: &[Consumer]) -> Outcome {
    if consumers.is_empty() {
        return line("no consumers; start one with `airtight run --read log --consumer NAME`");
    }
    let mut table = Table::new(&[
        "consumer",
        "partitions",
        "instances",
        "offset",
        "lag",
        "behind",
        "retrying",
        "dead",
        "unknown",
        "note",
    ]);
    for one in consumers {
        table.row(vec![
            one.name.clone(),
            one.partitions.to_string(),
            one.instances.len().to_string(),
            one.offset.to_string(),
            one.lag_events.to_string(),
            age(one.lag_seconds),
            one.retrying.to_string(),
            one.dead.to_string(),
            one.unknown.to_string(),
            note(one),
        ]);
    }
    table.print()
}

fn note(one: &Consumer) -> String {
    let words = [(one.paused, "paused"), (one.behind_retention, "behind retention")];
    let mut notes: Vec<String> =
        words.into_iter().filter(|(is, _)| *is).map(|(_, word)| word.to_owned()).collect();
    if let Some(first) = one.waits_for.first() {
        notes.push(printable(&format!("waits for {first}")));
    }
    if notes.is_empty() { "-".into() } else { notes.join(", ") }
}

pub(crate) async fn show(args: &ConsumerShowArgs) -> Outcome {
    let args = &args.one;
    let one = find(open_log(&args.database).await?.log_admin(), &args.name).await?;
    if args.output.json {
        return output::json(&one);
    }
    let fields: [(&str, String); 10] = [
        ("consumer", one.name.clone()),
        ("state", if one.paused { "paused".into() } else { "following".into() }),
        ("offset", one.offset.to_string()),
        ("end", one.end.to_string()),
        ("lag", format!("{}, {}", counted(one.lag_events, "event"), age(one.lag_seconds))),
        ("retrying", count(one.retrying)),
        ("dead", count(one.dead)),
        ("unknown", count(one.unknown)),
        ("partitions", one.partitions.to_string()),
        ("instances", one.instances.len().to_string()),
    ];
    for (name, value) in fields {
        line(format!("{name:<12}{}", printable(&value)))?;
    }
    if one.behind_retention {
        line(format!(
            "{:<12}behind retention: events that this consumer has not seen were removed. Rebuild the data that it feeds, \
             then run `airtight consumers seek {} --earliest`",
            "note",
            printable(&one.name)
        ))?;
    }
    for open in &one.waits_for {
        line(format!(
            "{:<12}{}, which has published events and is still open",
            "waits for",
            printable(&open.to_string())
        ))?;
    }
    line("")?;
    let mut table = Table::new(&["partition", "offset", "owner"]);
    for partition in &one.offsets {
        let owner = partition.owner.clone().unwrap_or_else(|| "-".into());
        table.row(vec![partition.partition.to_string(), partition.offset.to_string(), owner]);
    }
    table.print()?;
    if one.instances.is_empty() {
        return Ok(());
    }
    line("")?;
    let mut table = Table::new(&["instance", "host", "partitions", "lease"]);
    for instance in &one.instances {
        table.row(vec![
            instance.id.clone(),
            instance.host.clone(),
            instance.partitions.to_string(),
            age(instance.lease_seconds),
        ]);
    }
    table.print()
}

/// The consumer with this name, or an error that lists the known names.
async fn find(log: &dyn LogAdmin, name: &str) -> Outcome<Consumer> {
    let mut all = log.consumers().await?;
    match all.iter().position(|one| one.name == name) {
        Some(found) => Ok(all.swap_remove(found)),
        None => {
            let names: Vec<String> = all.into_iter().map(|one| one.name).collect();
            Err(unknown_consumer(name, &names).into())
        }
    }
}

pub(crate) async fn seek(args: &SeekArgs) -> Outcome {
    let one = &args.one;
    let to = match (args.to_seq, args.to_time) {
        (Some(seq), _) => SeekTo::Seq(seq),
        (None, Some(time)) => SeekTo::Time(time),
        // The parser ensures that exactly one is given.
        (None, None) if args.latest => SeekTo::Latest,
        (None, None) => SeekTo::Earliest,
    };
    let store = open_log(&one.database).await?;
    let log = store.log_admin();
    let mut options = SeekOptions { dry_run: true, forget_inbox: args.forget_inbox };
    if !args.dry_run && !args.yes {
        let would = log.seek(&one.name, to, options).await?;
        // Delivering again loses nothing, so a script needs no consent for it. Skipping events cannot be undone.
        if is_interactive() || would.skipped > 0 {
            consent(false, &sentence(&would, args))?;
        }
    }
    options.dry_run = args.dry_run;
    let done = log.seek(&one.name, to, options).await?;
    if one.output.json {
        return output::json(&SeekReport { dry_run: args.dry_run, seek: &done });
    }
    line(sentence(&done, args))?;
    if args.dry_run { line("nothing was changed") } else { Ok(()) }
}

#[derive(serde::Serialize)]
struct SeekReport<'a> {
    dry_run: bool,
    #[serde(flatten)]
    seek: &'a Seek,
}

fn sentence(seek: &Seek, args: &SeekArgs) -> String {
    let mut text = format!(
        "consumer `{}` from seq {} to {}: {} delivered again, {} skipped, {} dropped",
        printable(&seek.consumer),
        seek.from,
        seek.to,
        counted(seek.again, "event"),
        count(seek.skipped),
        counted(seek.parked_dropped, "parked event"),
    );
    if args.forget_inbox {
        text.push_str(&format!(", {} forgotten", counted(seek.forgotten, "inbox row")));
    }
    text
}

/// Consent to what cannot be undone: asks on a terminal, and requires `--yes` without one.
pub(super) fn consent(yes: bool, what: &str) -> Outcome {
    match (yes, is_interactive()) {
        (true, _) => Ok(()),
        (false, true) => confirm(what),
        (false, false) => Err(Failure::usage(format!(
            "{what}; without a terminal this needs confirmation, so nothing was changed: pass --yes"
        ))),
    }
}

/// Whether a person can be asked.
fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks on standard error. Any answer but yes is a failure, and nothing changes.
fn confirm(what: &str) -> Outcome {
    let unread = |error| Failure::failed(format!("cannot ask for confirmation: {error}; pass --yes"));
    let mut err = io::stderr().lock();
    write!(err, "{what}\nContinue? [y/N] ").and_then(|()| err.flush()).map_err(unread)?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(unread)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::failed("nothing was changed")),
    }
}

pub(crate) async fn pause(args: &OneConsumer, paused: bool) -> Outcome {
    open_log(&args.database).await?.log_admin().pause(&args.name, paused).await?;
    if args.output.json {
        return output::json(&json!({"consumer": args.name, "paused": paused}));
    }
    let what = if paused { "is paused" } else { "is resumed" };
    line(format!("consumer `{}` {what}", printable(&args.name)))
}

pub(crate) async fn remove(args: &RemoveArgs) -> Outcome {
    let one = &args.one;
    let store = open_log(&one.database).await?;
    let log = store.log_admin();
    if !args.yes {
        let found = find(log, &one.name).await?;
        let what = format!(
            "consumer `{}` at seq {}, {} behind, with {} that would be lost",
            printable(&found.name),
            found.offset,
            counted(found.lag_events, "event"),
            counted(found.retrying + found.dead + found.unknown, "parked event"),
        );
        consent(false, &what)?;
    }
    log.remove(&one.name).await?;
    if one.output.json {
        return output::json(&json!({"removed": one.name}));
    }
    line(format!("consumer `{}` removed", printable(&one.name)))
}

pub(crate) async fn lag(args: &LagArgs) -> Outcome {
    let args = &args.one;
    let lag = open_log(&args.database).await?.log_admin().lag(&args.name).await?;
    if args.output.json {
        return output::json(&json!({"consumer": args.name, "lag": lag}));
    }
    line(lag)
}

pub(crate) async fn parked(args: &ParkedArgs) -> Outcome {
    let wanted = ParkedFilter {
        dead_only: args.dead,
        after_seq: args.after,
        limit: args.limit as usize,
        ..parked_filter(Some(&args.one.name), &args.filter)
    };
    let rows = open_log(&args.one.database).await?.log_admin().parked(&wanted).await?;
    print_parked(&rows, args.one.output.json, "no parked events")
}

/// The filter for parked events, from a command's arguments.
pub(super) fn parked_filter(consumer: Option<&String>, args: &FilterArgs) -> ParkedFilter {
    ParkedFilter {
        consumer: consumer.cloned(),
        stream: args.stream.clone(),
        event_type: args.event_type.clone(),
        aggregate_id: args.key.clone(),
        error_code: args.error_code.clone(),
        ..ParkedFilter::default()
    }
}

pub(super) fn print_parked(rows: &[Parked], json: bool, none: &str) -> Outcome {
    if json {
        return output::json(rows);
    }
    if rows.is_empty() {
        return line(none);
    }
    let mut table = Table::new(&[
        "consumer", "seq", "id", "stream", "type", "key", "state", "attempts", "next try", "error",
    ]);
    for Parked { consumer, row } in rows {
        table.row(vec![
            consumer.clone(),
            row.seq.to_string(),
            row.id.clone(),
            row.stream.clone(),
            row.event_type.clone(),
            row.aggregate_id.clone(),
            if row.held { format!("{} (held)", row.state) } else { row.state.clone() },
            row.attempts.to_string(),
            time(row.next_retry_at),
            short(&error_text(row), 60),
        ]);
    }
    table.print()
}
