//! `airtight prune`.

use serde_json::json;

use super::{counter, open};
use crate::{
    args::PruneArgs,
    config::units,
    errors::{Failure, Outcome},
    output,
};

pub(crate) async fn run(args: &PruneArgs) -> Outcome {
    let keep = units::duration(&args.older_than)
        .map_err(|message| Failure::usage(format!("--older-than: {message}")))?;
    let store = open(&args.database).await?;
    let bar = counter("events removed");
    let pruned = store.admin().prune(keep, &|total| bar.set_position(total)).await;
    bar.finish_and_clear();
    let pruned = pruned?;
    if args.output.json {
        return output::json(&json!({"pruned": pruned}));
    }
    output::line(format!(
        "removed {} delivered more than {} ago",
        output::counted(pruned, "event"),
        args.older_than
    ))
}
