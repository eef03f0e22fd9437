//! The command line of logs: how `run` follows one, and `airtight consumers`.

use clap::{ArgGroup, Args, Subcommand, ValueEnum};

use super::{DatabaseArgs, FilterArgs, OutputArgs};

/// What only `run --read log` takes.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct FollowArgs {
    /// Whose offset; a name that is new begins at --start, a known one goes on where it was left
    #[arg(long, value_name = "NAME", help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) consumer: Option<String>,
    /// Key partitions, the most instances that work side by side; with 1 the others stand by [default: 1]
    #[arg(long, value_name = "N", help_heading = "With --read log", conflicts_with = "config", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) partitions: Option<u16>,
    /// Where a new consumer begins [default: earliest]
    #[arg(long, value_enum, help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) start: Option<StartArg>,
    /// What becomes of an event that fails, also with --read cdc [default: park]
    #[arg(long, value_enum, help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) on_failure: Option<OnFailureArg>,
    /// How long events are kept, e.g. 30d, or `forever` [default: 30d, and as long as a consumer
    /// needs them; with --drain nothing is removed]
    #[arg(long, value_name = "DURATION", help_heading = "With --read log", conflicts_with = "config")]
    pub(crate) keep_log: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StartArg {
    /// With the oldest event there is
    Earliest,
    /// With what is published from now on
    Latest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnFailureArg {
    /// It is set aside and tried again; the others go on
    Park,
    /// The consumer waits for it, and stops when it is given up on
    Halt,
}

/// Narrows what `airtight dead` acts on.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ConsumerArg {
    /// On a log: only of this consumer [default: all]
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

/// List consumers: where they stand, how far they are behind, what they have set aside
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers list\n  \
        airtight consumers list --json | jq '.[] | select(.lag_events > 1000) | .name'")]
pub(crate) struct ConsumersListArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Which consumer, of which log.
#[derive(Debug, Args)]
pub(crate) struct OneConsumer {
    /// The consumer
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

/// Move a consumer, to deliver events again or to leave some out
///
/// Safe while relays run: what they have under way is fenced, and they go on from the new place. Parked events
/// behind it are dropped, since they come again. On a terminal it asks first; elsewhere it wants --yes if events would
/// be left out.
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
    /// Behind this seq: the next event is the first with a greater one; 0 is the beginning
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) to_seq: Option<i64>,
    /// To the first event that was published at this time or later, e.g. 2026-01-31T00:00:00Z
    #[arg(long, value_name = "RFC3339", value_parser = rfc3339)]
    pub(crate) to_time: Option<time::OffsetDateTime>,
    /// To the oldest event there is
    #[arg(long)]
    pub(crate) earliest: bool,
    /// Behind the last event
    #[arg(long)]
    pub(crate) latest: bool,
    /// Say what would happen, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Make the inbox forget what comes again, so that handlers process it again
    #[arg(long)]
    pub(crate) forget_inbox: bool,
    /// Do not ask; needed where there is no terminal and events would be left out
    #[arg(long, short)]
    pub(crate) yes: bool,
}

fn rfc3339(text: &str) -> Result<time::OffsetDateTime, String> {
    time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339)
        .map_err(|_| "write a date, a time and a zone, like 2026-01-31T18:30:00Z".to_owned())
}

/// Let a consumer stand still; relays notice within two seconds
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers pause billing")]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
}

/// Let a paused consumer go on
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers resume billing")]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
}

/// Forget a consumer with its offset and its parked events, so that retention no longer waits for it
///
/// Refused while a relay works for it. On a terminal it asks first; elsewhere it wants --yes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers remove billing --yes")]
pub(crate) struct RemoveArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
    /// Do not ask; needed where there is no terminal
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// Print how many events a consumer has before it, and nothing else
///
/// Cheap enough for a producer that holds back a backfill while somebody is behind. Holes in the sequence count,
/// so it is an upper bound.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
        while [ \"$(airtight consumers lag billing)\" -gt 10000 ]; do sleep 5; done")]
pub(crate) struct LagArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
}

/// List what a consumer has set aside: events that failed, and those held back behind one
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight consumers parked billing\n  \
        airtight consumers parked billing --dead --error-code http_422 --json")]
pub(crate) struct ParkedArgs {
    #[command(flatten)]
    pub(crate) one: OneConsumer,
    /// Only those that a person must decide about: dead, or of unknown outcome
    #[arg(long, help_heading = "Filter")]
    pub(crate) dead: bool,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Only after this seq
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub(crate) after: Option<i64>,
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: u32,
}
