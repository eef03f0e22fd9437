//! `airtight cdc`: lists, recovers and removes readers of the WAL and their slots.

use airtight::{admin::SlotStatus, postgres::PgOutbox};
use serde_json::json;

use super::{consumers::consent, open};
use crate::{
    args::{CdcListArgs, CdcRecoverArgs, CdcRemoveArgs, OneReader},
    errors::{Failure, Outcome},
    output::{self, Table, age, counted, line, printable},
    wiring::Store,
};

pub(crate) async fn list(args: &CdcListArgs) -> Outcome {
    let store = open(&args.database).await?;
    let readers = postgres(&store)?.readers().await?;
    if args.output.json {
        return output::json(&readers);
    }
    if readers.is_empty() {
        return line("no readers of the WAL; start one with `airtight run --read cdc`");
    }
    print(&readers)
}

/// Readers as a table.
pub(super) fn print(readers: &[SlotStatus]) -> Outcome {
    let mut table =
        Table::new(&["slot", "phase", "lag", "behind", "server keeps", "waiting", "dead", "state"]);
    for reader in readers {
        let bytes = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), output::bytes);
        table.row(vec![
            reader.name.clone(),
            reader.phase.clone(),
            bytes(reader.lag_bytes),
            reader.lag_seconds.map_or_else(|| "-".into(), age),
            bytes(reader.retained_bytes),
            reader.waiting.to_string(),
            (reader.dead + reader.unknown).to_string(),
            state(reader).to_owned(),
        ]);
    }
    table.print()
}

fn state(reader: &SlotStatus) -> &'static str {
    match (&reader.confirmed_lsn, reader.wal_status.as_deref()) {
        (None, _) if reader.phase != "new" => "slot lost",
        (_, Some("lost")) => "slot lost",
        _ if reader.paused => "paused",
        _ if reader.active => "streaming",
        _ => "not being read",
    }
}

pub(crate) async fn recover(args: &CdcRecoverArgs) -> Outcome {
    let store = open(&args.one.database).await?;
    let outbox = postgres(&store)?;
    ask(
        outbox,
        &args.one,
        "drops its slot; the next `airtight run` creates a new one and delivers the rows that are still in the table",
    )
    .await?;
    outbox.recover_reader(&args.one.name).await?;
    if args.one.output.json {
        return output::json(&json!({"recovered": args.one.name}));
    }
    line(format!("reader `{}` starts from the table at the next `airtight run`", printable(&args.one.name)))
}

pub(crate) async fn remove(args: &CdcRemoveArgs) -> Outcome {
    let store = open(&args.one.database).await?;
    let outbox = postgres(&store)?;
    let publication = outbox.readers().await?.into_iter().find(|reader| reader.name == args.one.name);
    if args.keep_slot {
        ask(outbox, &args.one, "deletes its position and its parked events, and keeps its slot").await?;
        outbox.forget_reader(&args.one.name).await?;
    } else {
        ask(outbox, &args.one, "drops its slot, and deletes its position and its parked events").await?;
        outbox.remove_reader(&args.one.name).await?;
    }
    if args.one.output.json {
        return output::json(&json!({"removed": args.one.name, "slot_dropped": !args.keep_slot}));
    }
    let name = printable(&args.one.name);
    if args.keep_slot {
        return line(format!(
            "reader `{name}` removed; its slot still exists, and the server keeps WAL until another reader reads it. To \
             drop the slot: {}",
            PgOutbox::drop_slot(&args.one.name)
        ));
    }
    line(format!("reader `{name}` removed, and its slot dropped"))?;
    match publication {
        Some(reader) => line(format!(
            "its publication still exists. To drop it: {}",
            PgOutbox::drop_publication(&reader.publication)
        )),
        None => Ok(()),
    }
}

async fn ask(outbox: &PgOutbox, one: &OneReader, what: &str) -> Outcome {
    if one.yes {
        return Ok(());
    }
    let readers = outbox.readers().await?;
    // The store reports an unknown reader: its error lists the known ones.
    let Some(reader) = readers.iter().find(|reader| reader.name == one.name) else { return Ok(()) };
    let parked = counted(reader.waiting + reader.dead + reader.unknown, "parked event");
    consent(false, &format!("reader `{}` with {parked}: this {what}", printable(&one.name)))
}

fn postgres(store: &Store) -> Outcome<&PgOutbox> {
    store
        .postgres()
        .ok_or_else(|| Failure::usage("airtight cannot follow SQLite's WAL: cdc is for PostgreSQL"))
}
