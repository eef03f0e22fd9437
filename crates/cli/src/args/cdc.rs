//! The arguments for reading PostgreSQL's WAL: the options of `run --read cdc`, and `airtight cdc`.

use clap::{Args, Subcommand, ValueEnum};

use super::{DatabaseArgs, OutputArgs};

/// The options that only `run --read cdc` accepts.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct WalArgs {
    /// The replication slot, created if it does not exist [default: airtight_DATABASE]
    #[arg(long, value_name = "NAME", help_heading = "With --read cdc", conflicts_with = "config")]
    pub(crate) slot: Option<String>,
    /// The publication, created if it does not exist [default: the slot's name]
    #[arg(long, value_name = "NAME", help_heading = "With --read cdc", conflicts_with = "config")]
    pub(crate) publication: Option<String>,
    /// Whether rows that are already in the table are delivered first [default: initial]
    #[arg(long, value_enum, help_heading = "With --read cdc", conflicts_with = "config")]
    pub(crate) snapshot: Option<SnapshotArg>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SnapshotArg {
    /// The first start delivers the table's unfinished rows, then reads the slot
    Initial,
    /// The same if the slot is new; an existing slot is read from its current position
    NewSlot,
    /// No rows of the table; only what is committed after the slot's position
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CdcCommand {
    List(CdcListArgs),
    Recover(CdcRecoverArgs),
    Remove(CdcRemoveArgs),
}

/// List readers of the WAL: their lag, and how much WAL the server keeps for them
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight cdc list\n  \
        airtight cdc list --json | jq '.[] | select(.lag_seconds > 60) | .name'")]
pub(crate) struct CdcListArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// One reader of one outbox.
#[derive(Debug, Args)]
pub(crate) struct OneReader {
    /// The replication slot of the reader
    #[arg(value_name = "SLOT")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Do not ask for confirmation; required without a terminal
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// Restart a reader whose slot was lost, from the rows that are still in the table
///
/// Drops the slot if it exists. The next `airtight run` creates a new slot and first delivers the unfinished rows of
/// the table, or all rows if the table has no status. Rows that were deleted in the meantime, and events without a
/// table, are lost. The command is refused while a relay reads the slot. It asks for confirmation on a terminal;
/// without a terminal it requires --yes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight cdc recover airtight_shop --yes")]
pub(crate) struct CdcRecoverArgs {
    #[command(flatten)]
    pub(crate) one: OneReader,
}

/// Remove a reader with its slot, its position and its parked events
///
/// This is the last step of a change back to polling. The publication stays. The command is refused while a relay
/// reads the slot. It asks for confirmation on a terminal; without a terminal it requires --yes.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight cdc remove airtight_shop --yes\n  airtight cdc remove debezium --keep-slot --yes"
)]
pub(crate) struct CdcRemoveArgs {
    #[command(flatten)]
    pub(crate) one: OneReader,
    /// Keep the slot for another reader, such as Debezium; with `--snapshot new-slot` airtight can read it again
    #[arg(long)]
    pub(crate) keep_slot: bool,
}

/// Print a Debezium connector file that does what a pipeline does
///
/// The pipeline must read `cdc` and write `format = "debezium"` to Kafka. Stop the relay, then start Debezium with
/// the same slot: it continues where the relay stopped.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight debezium-config -c airtight.toml\n  \
        airtight debezium-config -c airtight.toml orders --password > connector.json")]
pub(crate) struct DebeziumConfigArgs {
    /// The pipeline; optional if the config has only one
    #[arg(value_name = "PIPELINE")]
    pub(crate) pipeline: Option<String>,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Write the database's password into the file
    #[arg(long)]
    pub(crate) password: bool,
}
