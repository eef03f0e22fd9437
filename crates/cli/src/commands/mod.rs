//! One file per command. Each command opens the store, uses it through [`airtight::admin::Admin`] (a log's
//! consumers through [`airtight::log::LogAdmin`]), and prints the result.

pub(crate) mod cdc;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod consumers;
pub(crate) mod dead;
pub(crate) mod debezium_config;
pub(crate) mod events;
pub(crate) mod migrate;
mod ndjson;
pub(crate) mod prune;
pub(crate) mod publish;
pub(crate) mod run;
pub(crate) mod status;
pub(crate) mod tail;

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    args::{DatabaseArgs, FilterArgs},
    errors::Outcome,
    wiring::{Store, Target},
};

/// Opens the store that a command's arguments name. Its tables must exist.
async fn open(args: &DatabaseArgs) -> Outcome<Store> {
    Ok(Target::from_args(args)?.open().await?)
}

/// The same for commands that need a log.
async fn open_log(args: &DatabaseArgs) -> Outcome<Store> {
    let mut target = Target::from_args(args)?;
    target.expect_log();
    Ok(target.open().await?)
}

/// The filter of a command's arguments.
fn filter(args: &FilterArgs) -> airtight::admin::Filter {
    airtight::admin::Filter {
        stream: args.stream.clone(),
        event_type: args.event_type.clone(),
        aggregate_id: args.key.clone(),
        error_code: args.error_code.clone(),
        ..airtight::admin::Filter::default()
    }
}

/// A counter on standard error, drawn only on a terminal.
fn counter(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} {human_pos} {msg}  {per_sec}  {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}
