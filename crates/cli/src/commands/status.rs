//! `airtight status`.

use super::open;
use crate::{
    args::StatusArgs,
    errors::Outcome,
    output::{self, Table, age, counted, line},
};

pub(crate) async fn run(args: &StatusArgs) -> Outcome {
    let status = open(&args.database).await?.admin().status().await?;
    if args.output.json {
        return output::json(&status);
    }
    line(format!("outbox {}", status.outbox))?;
    line("")?;
    if status.streams.is_empty() {
        line("no events")?;
    } else {
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
            let counts = [
                stream.pending,
                stream.retrying,
                stream.processing,
                stream.done,
                stream.dead,
                stream.unknown,
            ];
            let mut cells = vec![stream.stream.clone()];
            cells.extend(counts.iter().map(u64::to_string));
            cells.push(stream.oldest_pending_seconds.map_or_else(|| "-".into(), age));
            table.row(cells);
        }
        table.print()?;
    }
    line("")?;
    if status.relays.is_empty() {
        line("no relay is running; start one with `airtight run`")?;
    } else {
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
        table.print()?;
    }
    if status.blocked_keys > 0 {
        line("")?;
        let keys = counted(status.blocked_keys, "key");
        line(format!("{keys} waiting behind a failed or dead event; see `airtight events blocked`"))?;
    }
    let dead: u64 = status.streams.iter().map(|stream| stream.dead + stream.unknown).sum();
    if dead > 0 {
        line(format!("{} to decide on; see `airtight dead list`", counted(dead, "dead letter")))?;
    }
    Ok(())
}
