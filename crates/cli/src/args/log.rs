//! The arguments for logs: the options of `run --read log`, and `airtight consumers`.

use clap::{ArgGroup, Args, Subcommand, ValueEnum};

use super::{DatabaseArgs, FilterArgs, OutputArgs};

/// The options that only `run --read log` accepts.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct FollowArgs {
    /// The consumer's name; a new consumer begins at --start, a known one continues from its offset
    #[arg(long, value_name = "NAME", help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) consumer: Option<String>,
    /// Key partitions: at most this many instances work at the same time, the others stand by [default: 1]
    #[arg(long, value_name = "N", help_heading = "With --read log", conflicts_with = "config", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) partitions: Option<u16>,
    /// Where a new consumer begins [default: earliest]
    #[arg(long, value_enum, help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) start: Option<StartArg>,
    /// What happens to an event that fails; also with --read cdc [default: park]
    #[arg(long, value_enum, help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) on_failure: Option<OnFailureArg>,
    /// How long events are kept, e.g. 30d, or `forever` [default: 30d, and as long as a consumer
    /// needs them; with --drain nothing is removed]
    #[arg(long, value_name = "DURATION", help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) keep_log: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StartArg {
    /// At the oldest event of the log
    Earliest,
    /// At the first event that is published from now on
    Latest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnFailureArg {
    /// The event is parked and retried; other events are delivered
    Park,
    /// The consumer waits for the event, and stops if the event becomes dead
    Halt,
}

/// Restricts `airtight dead` to one consumer.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ConsumerArg {
    /// On a log: only the dead letters of this consumer [default: all]
    #[arg(long, value_name = "NAME", help_heading = "Filter")]
    pub(crate) consumer: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConsumersCommand {
    List(ConsumersListArgs),
    Show(ConsumerShowArgs),
    Seek(SeekArgs),
    Pause(PauseArgs),
    Resume(ResumeArgs),
    Remove(RemoveArgs),
    Lag(LagArgs),
    Parked(ParkedArgs),
}

/// List consumers: their offsets, their lag and their parked events
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers list\n  \
        airtight consumers list --json | jq '.[] | select(.lag_events > 1000) | .name'")]
pub(crate) struct ConsumersListArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// One consumer of one log.
#[derive(Debug, Args)]
pub(crate) struct OneConsumer {
    /// The consumer's name
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Show one consumer, with the offset and the owner of each partition
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers show billing")]
pub(crate) struct ConsumerShowArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
}

/// Move a consumer's offset, to deliver events again or to skip events
///
/// Safe while relays run: their deliveries in flight are fenced, and they continue from the new offset. Parked events
/// after the new offset are dropped, because they are delivered again. The command asks for confirmation on a
/// terminal; without a terminal it requires --yes if events would be skipped.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("target").required(true).args(["to_seq", "to_time", "earliest", "latest"]),
    after_help = "Examples:\n  \
        airtight consumers seek billing --earliest --dry-run\n  \
        airtight consumers seek billing --to-time 2026-01-31T00:00:00Z\n  \
        airtight consumers seek billing --to-seq 4711 --forget-inbox --yes"
)]
pub(crate) struct SeekArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
    /// After this seq: the next event is the first one with a greater seq; 0 is the beginning
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) to_seq: Option<i64>,
    /// To the first event that was published at this time or later, e.g. 2026-01-31T00:00:00Z
    #[arg(long, value_name = "RFC3339", value_parser = rfc3339)]
    pub(crate) to_time: Option<time::OffsetDateTime>,
    /// To the oldest event of the log
    #[arg(long)]
    pub(crate) earliest: bool,
    /// After the newest event
    #[arg(long)]
    pub(crate) latest: bool,
    /// Print what would happen, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Remove the events that are delivered again from the inbox, so that handlers process them again
    #[arg(long)]
    pub(crate) forget_inbox: bool,
    /// Do not ask for confirmation; required without a terminal if events would be skipped
    #[arg(long, short)]
    pub(crate) yes: bool,
}

fn rfc3339(text: &str) -> Result<time::OffsetDateTime, String> {
    time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339)
        .map_err(|_| "write a date, a time and a zone, like 2026-01-31T18:30:00Z".to_owned())
}

/// Pause a consumer; its relays stop within two seconds
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers pause billing")]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
}

/// Resume a paused consumer
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers resume billing")]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
}

/// Remove a consumer with its offset and its parked events
///
/// Retention then no longer waits for this consumer. The command is refused while a relay works for the consumer. It
/// asks for confirmation on a terminal; without a terminal it requires --yes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers remove billing --yes")]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
    /// Do not ask for confirmation; required without a terminal
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// Print only the number of events that a consumer has not settled yet
///
/// The query is cheap, so that a producer can poll it to slow down a backfill. The number is an upper bound: holes
/// in the sequence count.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
        while [ \"$(airtight consumers lag billing)\" -gt 10000 ]; do sleep 5; done")]
pub(crate) struct LagArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
}

/// List a consumer's parked events: those that failed, and those held behind a failed one
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers parked billing\n  \
        airtight consumers parked billing --dead --error-code http_422 --json")]
pub(crate) struct ParkedArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
    /// Only events that need a person's decision: dead, or with an unknown outcome
    #[arg(long, help_heading = "Filter")]
    pub(crate) dead: bool,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Only events after this seq
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub(crate) after: Option<i64>,
    /// The maximum number of events
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: u32,
}
