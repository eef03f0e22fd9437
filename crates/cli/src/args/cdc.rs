//! The command line of readers of the WAL: how `run` follows it, and `airtight cdc`.

use clap::{Args, Subcommand, ValueEnum};

use super::{DatabaseArgs, OutputArgs};

/// What only `run --read cdc` takes.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct WalArgs {
    /// The replication slot, made if it is not there [default: airtight_DATABASE]
    #[arg(long, value_name = "NAME", help_heading = "With --read cdc", conflicts_with = "config")]
    pub(crate) slot: Option<String>,
    /// The publication, made if it is not there [default: the slot's name]
    #[arg(long, value_name = "NAME", help_heading = "With --read cdc", conflicts_with = "config")]
    pub(crate) publication: Option<String>,
    /// Whether what is in the table already is delivered first [default: initial]
    #[arg(long, value_enum, help_heading = "With --read cdc", conflicts_with = "config")]
    pub(crate) snapshot: Option<SnapshotArg>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SnapshotArg {
    /// At the first start, rows that are not finished come first
    Initial,
    /// The same, but a slot that was there before is read on from where it stands
    NewSlot,
    /// Only what is committed from the slot's place on
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CdcCommand {
    List(CdcListArgs),
    Recover(CdcRecoverArgs),
    Remove(CdcRemoveArgs),
}

/// List readers of the WAL: where they stand, and how much WAL the server keeps for them
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight cdc list\n  \
        airtight cdc list --json | jq '.[] | select(.lag_seconds > 60) | .name'")]
pub(crate) struct CdcListArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Which reader, of which outbox.
#[derive(Debug, Args)]
pub(crate) struct OneReader {
    /// The slot
    #[arg(value_name = "SLOT")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Do not ask; needed where there is no terminal
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// Let a reader begin anew after its slot was lost: what the table still has is delivered
///
/// The slot is dropped if it is there; the next `airtight run` makes a new one and first delivers the rows of the
/// table that are not finished, or all of them where the table has no status. What was deleted meanwhile, and events
/// without a table, are lost. Refused while a relay reads the slot. On a terminal it asks first; elsewhere it wants --yes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight cdc recover airtight_shop --yes")]
pub(crate) struct CdcRecoverArgs {
    #[command(flatten)]
    pub(crate) one: OneReader,
}

/// Forget a reader with its slot, its place and its parked events: the last step back to polling
///
/// Refused while a relay reads the slot. The publication stays. On a terminal it asks first; elsewhere it wants --yes.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight cdc remove airtight_shop --yes\n  airtight cdc remove debezium --keep-slot --yes"
)]
pub(crate) struct CdcRemoveArgs {
    #[command(flatten)]
    pub(crate) one: OneReader,
    /// Leave the slot to whoever reads it next, Debezium for one; with `--snapshot new-slot` that may be airtight again
    #[arg(long)]
    pub(crate) keep_slot: bool,
}

/// Print the connector's file with which Debezium would do what a pipeline does
///
/// For a pipeline of a config that reads `cdc` and writes `format = "debezium"` to Kafka. Stop the relay, let Debezium
/// read the same slot, and it goes on where the relay stopped.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight debezium-config -c airtight.toml\n  \
        airtight debezium-config -c airtight.toml orders --password > connector.json")]
pub(crate) struct DebeziumConfigArgs {
    /// The pipeline; may be left out where there is only one
    #[arg(value_name = "PIPELINE")]
    pub(crate) pipeline: Option<String>,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Write the database's password into it
    #[arg(long)]
    pub(crate) password: bool,
}
