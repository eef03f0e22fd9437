//! `airtight dead`: events that were given up on, which stay until a person decides. On a log, these are parked events
//! of its consumers.

use airtight::{
    log::{LogAdmin, Parked, ParkedFilter},
    state::State,
};
use serde_json::json;

use super::{
    consumers::{consent, parked_filter, print_parked},
    events::{self, Act, Acting, act, page, print_rows, show_detail},
    filter, open,
};
use crate::{
    args::{BulkDiscardArgs, BulkRetryArgs, ConsumerArg, DeadListArgs, DeadShowArgs},
    errors::{Failure, Outcome},
    output::{self, counted, line},
    wiring::Store,
};

/// Rows per query.
const PAGE: usize = 1_000;

/// The log that dead letters are parked in: for a log, and for an outbox that is read through the WAL. A queue has no
/// consumers.
async fn log_of<'a>(store: &'a Store, of: &ConsumerArg) -> Outcome<Option<&'a dyn LogAdmin>> {
    if store.is_log() || !store.readers().await?.is_empty() {
        return Ok(Some(store.log_admin()));
    }
    match &of.consumer {
        Some(_) => {
            Err(Failure::usage("--consumer is for a log, and this outbox is a queue: remove --consumer"))
        }
        None => Ok(None),
    }
}

pub(crate) async fn list(args: &DeadListArgs) -> Outcome {
    let store = open(&args.database).await?;
    // Rows with a status say themselves that they are dead, however they were read.
    if let Some(log) =
        log_of(&store, &args.of).await?.filter(|_| store.is_log() || args.of.consumer.is_some())
    {
        if args.page.newest {
            return Err(Failure::usage(
                "--newest is for a queue; a log is listed by seq: remove --newest, and page with --after SEQ",
            ));
        }
        let wanted = ParkedFilter {
            dead_only: true,
            after_seq: args.page.after,
            limit: args.page.limit as usize,
            ..parked_filter(args.of.consumer.as_ref(), &args.filter)
        };
        return print_parked(&log.parked(&wanted).await?, args.output.json, "no dead letters");
    }
    let mut wanted = filter(&args.filter);
    wanted.states = vec![State::Dead, State::Unknown];
    page(&mut wanted, &args.page);
    let rows = store.admin().list(&wanted).await?;
    print_rows(&rows, args.output.json, "no dead letters")
}

pub(crate) async fn show(args: &DeadShowArgs) -> Outcome {
    let (id, json) = (&args.show.id, args.show.output.json);
    let store = open(&args.show.database).await?;
    let log = log_of(&store, &args.of).await?.filter(|_| store.is_log() || args.of.consumer.is_some());
    let Some(log) = log else { return events::show_one(&store, id, json).await };
    let found = find(&store, id, args.of.consumer.as_deref()).await?;
    let one = match &found[..] {
        [] => return Err(Failure::failed(format!("no event `{id}` is parked; give an id or a seq"))),
        [one] => one,
        several => {
            let names: Vec<&str> = several.iter().map(|parked| parked.consumer.as_str()).collect();
            return Err(Failure::failed(format!(
                "event `{id}` is parked for {}: choose one with --consumer NAME",
                names.join(", ")
            )));
        }
    };
    match log.show_parked(&one.consumer, one.row.seq).await? {
        Some(detail) => show_detail(detail, Some(&one.consumer), json),
        None => Err(Failure::failed(format!("event `{id}` is no longer parked"))),
    }
}

/// Parked events with this seq or id, of one consumer or of all.
async fn find(store: &Store, id: &str, consumer: Option<&str>) -> Outcome<Vec<Parked>> {
    let log = store.log_admin();
    let of = consumer.map(str::to_owned);
    // If rows have a status, a number is the row's seq, and not the one that a reader of the WAL has given it.
    let id = match store.is_log() {
        true => id.to_owned(),
        false => store.admin().show(id).await?.map_or_else(|| id.to_owned(), |detail| detail.row.id),
    };
    if let Ok(seq) = id.parse()
        && store.is_log()
    {
        let wanted = ParkedFilter { consumer: of.clone(), seqs: vec![seq], ..ParkedFilter::default() };
        let found = log.parked(&wanted).await?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let consumers = match of {
        Some(name) => vec![name],
        None => {
            let mut names = store.readers().await?;
            if names.is_empty() {
                names = log.consumers().await?.into_iter().map(|one| one.name).collect();
            }
            names
        }
    };
    let mut found = Vec::new();
    for consumer in consumers {
        // One consumer at a time: a seq is unique for a consumer, so that a page never ends in the middle of a seq.
        let mut wanted = ParkedFilter { consumer: Some(consumer), limit: PAGE, ..ParkedFilter::default() };
        loop {
            let rows = log.parked(&wanted).await?;
            wanted.after_seq = rows.last().map(|parked| parked.row.seq);
            let last = rows.len() < PAGE;
            found.extend(rows.into_iter().filter(|parked| parked.row.id == id));
            if last {
                break;
            }
        }
    }
    Ok(found)
}

pub(crate) async fn retry(args: &BulkRetryArgs) -> Outcome {
    let store = open(&args.database).await?;
    if !args.all {
        return one_by_one(&store, &args.of, &args.ids, Act::Retry, args.output.json).await;
    }
    let retried = match log_of(&store, &args.of).await? {
        Some(log) => log.retry_parked(&parked_filter(args.of.consumer.as_ref(), &args.filter)).await?,
        None => store.admin().retry_dead(&filter(&args.filter)).await?,
    };
    if args.output.json {
        return output::json(&json!({"retried": retried}));
    }
    line(format!("{} due now", counted(retried, "dead letter")))
}

pub(crate) async fn discard(args: &BulkDiscardArgs) -> Outcome {
    if args.all {
        consent(args.yes, "this permanently deletes every dead letter that matches the filter")?;
    }
    let store = open(&args.database).await?;
    if !args.all {
        return one_by_one(&store, &args.of, &args.ids, Act::Discard, args.output.json).await;
    }
    let discarded = match log_of(&store, &args.of).await? {
        Some(log) => {
            let parked = log.discard_parked(&parked_filter(args.of.consumer.as_ref(), &args.filter)).await?;
            if store.is_log() { parked } else { store.admin().discard_dead(&filter(&args.filter)).await? }
        }
        None => store.admin().discard_dead(&filter(&args.filter)).await?,
    };
    if args.output.json {
        return output::json(&json!({"discarded": discarded}));
    }
    line(format!("{} discarded", counted(discarded, "dead letter")))
}

async fn one_by_one(store: &Store, of: &ConsumerArg, ids: &[String], what: Act, json: bool) -> Outcome {
    let log = log_of(store, of).await?.filter(|_| of.consumer.is_some() || !store.is_log());
    let Some(log) = log else { return act(store, ids, what, json).await };
    let mut acting = Acting::new(what, json);
    for id in ids {
        let mut touched = 0;
        for parked in find(store, id, of.consumer.as_deref()).await? {
            let (consumer, seqs) = (Some(parked.consumer), vec![parked.row.seq]);
            let wanted = ParkedFilter { consumer, seqs, ..ParkedFilter::default() };
            touched += match what {
                Act::Retry => log.retry_parked(&wanted).await?,
                Act::Discard => log.discard_parked(&wanted).await?,
            };
        }
        if matches!(what, Act::Discard) && !store.is_log() {
            // The row is dead as well.
            touched += u64::from(store.admin().discard(id).await? == airtight::admin::Acted::Yes);
        }
        acting.note(
            id,
            if touched > 0 { airtight::admin::Acted::Yes } else { airtight::admin::Acted::NotFound },
        )?;
    }
    acting.finish()
}
