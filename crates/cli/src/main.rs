//! The `airtight` program: reads the command line, starts logging and a runtime, and runs one command.
//!
//! | where | what |
//! | --- | --- |
//! | `args` | the command line |
//! | `config/` | the validated configuration, from a file or from arguments; nothing there connects |
//! | `wiring` | makes stores and sinks from addresses; the only file that knows which backends exist |
//! | `commands/` | one file per command |
//! | `debezium` | converts a connector file to a pipeline, and back |
//! | `demo/` | `airtight demo` |
//! | `output`, `errors`, `logging`, `progress`, `signals` | tables and JSON, exit codes, log lines, bars, Ctrl-C |

mod args;
mod commands;
mod config;
mod debezium;
mod demo;
mod errors;
mod logging;
mod null_sink;
mod output;
mod progress;
mod signals;
mod wiring;

use std::process::ExitCode;

use clap::Parser;

use self::{
    args::{CdcCommand, Cli, Command, ConsumersCommand, DeadCommand, EventsCommand},
    errors::{Failure, Outcome},
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    logging::init(&cli.log, &cli.command);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Idle threads cost memory, and moving rows needs no more than two.
        .worker_threads(2)
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => {
            let outcome = runtime.block_on(dispatch(cli));
            // A thread that waits for a line on standard input must not keep the program alive.
            runtime.shutdown_background();
            outcome
        }
        Err(error) => Err(Failure::failed(format!("cannot start: {error}"))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

async fn dispatch(cli: Cli) -> Outcome {
    match cli.command {
        Command::Demo(args) => demo::run(&args).await,
        Command::Migrate(args) => commands::migrate::run(&args).await,
        Command::Check(args) => commands::check::run(&args).await,
        Command::Run(args) => commands::run::run(&args, &cli.log).await,
        Command::Publish(args) => commands::publish::run(&args).await,
        Command::Status(args) => commands::status::run(&args).await,
        Command::Events(command) => match command {
            EventsCommand::List(args) => commands::events::list(&args).await,
            EventsCommand::Show(args) => commands::events::show(&args).await,
            EventsCommand::Retry(args) => commands::events::retry(&args).await,
            EventsCommand::Discard(args) => commands::events::discard(&args).await,
            EventsCommand::Blocked(args) => commands::events::blocked(&args).await,
        },
        Command::Dead(command) => match command {
            DeadCommand::List(args) => commands::dead::list(&args).await,
            DeadCommand::Show(args) => commands::dead::show(&args).await,
            DeadCommand::Retry(args) => commands::dead::retry(&args).await,
            DeadCommand::Discard(args) => commands::dead::discard(&args).await,
        },
        Command::Consumers(command) => match command {
            ConsumersCommand::List(args) => commands::consumers::list(&args).await,
            ConsumersCommand::Show(args) => commands::consumers::show(&args).await,
            ConsumersCommand::Seek(args) => commands::consumers::seek(&args).await,
            ConsumersCommand::Pause(args) => commands::consumers::pause(&args.one, true).await,
            ConsumersCommand::Resume(args) => commands::consumers::pause(&args.one, false).await,
            ConsumersCommand::Remove(args) => commands::consumers::remove(&args).await,
            ConsumersCommand::Lag(args) => commands::consumers::lag(&args).await,
            ConsumersCommand::Parked(args) => commands::consumers::parked(&args).await,
        },
        Command::Cdc(command) => match command {
            CdcCommand::List(args) => commands::cdc::list(&args).await,
            CdcCommand::Recover(args) => commands::cdc::recover(&args).await,
            CdcCommand::Remove(args) => commands::cdc::remove(&args).await,
        },
        Command::DebeziumConfig(args) => commands::debezium_config::run(&args).await,
        Command::Tail(args) => commands::tail::run(&args).await,
        Command::Prune(args) => commands::prune::run(&args).await,
        Command::Completions(args) => commands::completions::run(&args),
    }
}
