//! Log lines on standard error.

use std::io::{self, IsTerminal};

use tracing_subscriber::{EnvFilter, fmt};

use crate::{
    args::{Command, LogArgs, LogFormat},
    progress::Stderr,
};

/// Starts logging. `RUST_LOG` decides what is logged; without it, the command and `--verbose` do.
pub(crate) fn init(args: &LogArgs, command: &Command) {
    // lapin logs a message that came back, payload and all, and both log what their sinks report.
    let default = match command {
        _ if args.verbose => "info,airtight=debug,lapin=off,async_nats=off",
        Command::Run(_) => "warn,airtight=info,lapin=off,async_nats=off",
        // Its sink fails on purpose, thousands of times.
        Command::Demo(_) => "off",
        _ => "warn,lapin=off,async_nats=off",
    };
    let chosen = std::env::var("RUST_LOG").ok().filter(|text| !text.trim().is_empty());
    let filter = EnvFilter::builder().parse_lossy(chosen.as_deref().unwrap_or(default));
    // A line that cannot be written is lost. To say so on the same standard error would panic.
    let lines = fmt().with_env_filter(filter).with_writer(|| Stderr).log_internal_errors(false);
    match args.log_format {
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(false).init(),
        LogFormat::Human => lines.with_ansi(io::stderr().is_terminal()).with_target(false).init(),
    }
}
