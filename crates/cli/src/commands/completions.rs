//! `airtight completions`.

use clap::CommandFactory;

use crate::{
    args::{Cli, CompletionsArgs},
    errors::Outcome,
    output,
};

pub(crate) fn run(args: &CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "airtight", &mut script);
    output::raw(&script)
}
