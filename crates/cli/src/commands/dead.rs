//! `airtight dead`: events that were given up on, until a person decides.

use airtight::state::State;
use serde_json::json;

use super::{
    events::{Act, act, page, print_rows},
    filter, open,
};
use crate::{
    args::{BulkDiscardArgs, BulkRetryArgs, DeadListArgs},
    errors::Outcome,
    output::{self, counted, line},
};

pub(crate) async fn list(args: &DeadListArgs) -> Outcome {
    let mut wanted = filter(&args.filter);
    wanted.states = vec![State::Dead, State::Unknown];
    page(&mut wanted, &args.page);
    let rows = open(&args.database).await?.admin().list(&wanted).await?;
    print_rows(&rows, args.output.json, "no dead letters")
}

pub(crate) async fn retry(args: &BulkRetryArgs) -> Outcome {
    let store = open(&args.database).await?;
    if !args.all {
        return act(&store, &args.ids, Act::Retry, args.output.json).await;
    }
    let retried = store.admin().retry_dead(&filter(&args.filter)).await?;
    if args.output.json {
        return output::json(&json!({"retried": retried}));
    }
    line(format!("{} due now", counted(retried, "dead letter")))
}

pub(crate) async fn discard(args: &BulkDiscardArgs) -> Outcome {
    let store = open(&args.database).await?;
    if !args.all {
        return act(&store, &args.ids, Act::Discard, args.output.json).await;
    }
    let discarded = store.admin().discard_dead(&filter(&args.filter)).await?;
    if args.output.json {
        return output::json(&json!({"discarded": discarded}));
    }
    line(format!("{} discarded", counted(discarded, "dead letter")))
}
