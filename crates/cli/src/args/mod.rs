//! The command line: every command, its options, and examples that work as they are written. The arguments that only
//! logs have are in `log`; those that only readers of the WAL have are in `cdc`.

mod cdc;
mod log;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use self::{
    cdc::{
        CdcCommand, CdcListArgs, CdcRecoverArgs, CdcRemoveArgs, DebeziumConfigArgs, OneReader, SnapshotArg,
        WalArgs,
    },
    log::{
        ConsumerArg, ConsumerShowArgs, ConsumersCommand, ConsumersListArgs, FollowArgs, LagArgs,
        OnFailureArg, OneConsumer, ParkedArgs, RemoveArgs, SeekArgs, StartArg,
    },
};

/// A transactional outbox: delivers every committed event, and none that is rolled back
#[derive(Debug, Parser)]
#[command(
    name = "airtight",
    version,
    propagate_version = true,
    after_help = "Examples:\n  \
        airtight demo\n  \
        airtight migrate --url sqlite:shop.db\n  \
        airtight run --from sqlite:shop.db --to stdout:\n\n\
        To start, run `airtight demo`: it needs nothing but this program.\n\n\
        Give the database with --url or DATABASE_URL: `sqlite:PATH`, a path that ends in .db or .sqlite,\n\
        or `postgres://USER:PASSWORD@HOST/DATABASE`.\n\n\
        Exit codes: 0 success, 1 failure, 2 wrong usage or config."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) log: LogArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
pub(crate) struct LogArgs {
    /// Log more; RUST_LOG overrides this option
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,
    /// The format of log lines on standard error
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Human, value_name = "FORMAT")]
    pub(crate) log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Human,
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Demo(DemoArgs),
    Migrate(MigrateArgs),
    Check(CheckArgs),
    Run(RunArgs),
    Publish(PublishArgs),
    Status(StatusArgs),
    /// List, show, retry and discard events
    #[command(
        subcommand,
        after_help = "Examples:\n  airtight events list --state pending\n  airtight events show 42\n  \
            airtight events retry 42 43"
    )]
    Events(EventsCommand),
    /// List, show, retry and discard dead letters
    #[command(
        subcommand,
        after_help = "Examples:\n  airtight dead list\n  airtight dead show 42\n  \
            airtight dead retry --all --stream shop.orders"
    )]
    Dead(DeadCommand),
    /// List, move, pause and remove the consumers of a log
    #[command(
        subcommand,
        after_help = "Examples:\n  airtight consumers list\n  airtight consumers seek billing --earliest --dry-run\n  \
            airtight consumers pause billing"
    )]
    Consumers(ConsumersCommand),
    /// List, recover and remove readers of PostgreSQL's WAL
    #[command(
        subcommand,
        after_help = "Examples:\n  airtight cdc list\n  airtight cdc recover airtight_shop --yes"
    )]
    Cdc(CdcCommand),
    DebeziumConfig(DebeziumConfigArgs),
    Tail(TailArgs),
    Prune(PruneArgs),
    Completions(CompletionsArgs),
}

/// The outbox to work on.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DatabaseArgs {
    /// The database of the outbox [default: the config's, else DATABASE_URL]
    #[arg(long, value_name = "URL", help_heading = "Database")]
    pub(crate) url: Option<String>,
    /// Read the database and the table's mapping from this config file
    #[arg(long, short, value_name = "FILE", help_heading = "Database")]
    pub(crate) config: Option<PathBuf>,
    /// PostgreSQL: the schema of airtight's tables [default: airtight]
    #[arg(long, value_name = "NAME", help_heading = "Database")]
    pub(crate) schema: Option<String>,
    /// PostgreSQL: the outbox table [default: outbox]
    #[arg(long, value_name = "NAME", help_heading = "Database")]
    pub(crate) table: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct OutputArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show committed events being delivered, with nothing to install
///
/// Moves money between bank accounts in a temporary SQLite file. Each transaction commits its transfers and their
/// events together; some transactions are rolled back on purpose. A relay delivers to a sink that fails, repeats,
/// stalls and becomes unavailable. At the end, the demo compares what was committed with what arrived. The exit code
/// is not 0 if an event was lost, arrived without being committed, or arrived out of order.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight demo\n  airtight demo --events 50000 --headless --json\n  \
        airtight demo --seconds 10 --seed 7")]
pub(crate) struct DemoArgs {
    /// Stop writing after N committed events [default: 2000, or no limit with --seconds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) events: Option<u64>,
    /// Stop writing after N seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: Option<u64>,
    /// Repeat the transfers, rollbacks and faults of an earlier run with this seed, and so the counts of its audit,
    /// unless --seconds or a signal ends the run. Timing, and the order among the writers, can still differ
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Print progress lines on standard error instead of the live view
    #[arg(long)]
    pub(crate) headless: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Create or upgrade airtight's tables
///
/// Safe to run again, and from many processes at once. Creates objects again that were dropped, and advances a
/// sequence that is behind its table. Refuses a schema that a newer version of airtight created.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight migrate --url sqlite:shop.db\n  \
        airtight migrate --url postgres://app@localhost/shop --print > outbox.sql\n  \
        airtight migrate --url postgres://app@localhost/shop --shape log\n  \
        airtight migrate --url postgres://app@localhost/shop --print-grants relay --role shop_relay | psql shop")]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// How the outbox is read [default: the config's, else the existing shape, else queue]
    #[arg(long, value_enum)]
    pub(crate) shape: Option<ShapeArg>,
    /// Print the SQL instead of running it
    #[arg(long)]
    pub(crate) print: bool,
    /// PostgreSQL: print the least rights that a role needs, as SQL for the owner of the tables. Without --shape,
    /// the shape is read from the database
    #[arg(long, value_enum, value_name = "WHO", conflicts_with = "print")]
    pub(crate) print_grants: Option<GranteeArg>,
    /// The role that gets the rights [default: the value of --print-grants]
    #[arg(long, value_name = "NAME", requires = "print_grants")]
    pub(crate) role: Option<String>,
    /// PostgreSQL: wake relays at every insert; takes a lock at commit, and such transactions cannot be prepared
    #[arg(long, conflicts_with = "no_notify")]
    pub(crate) notify: bool,
    /// PostgreSQL: stop waking relays, which then poll [default: no change]
    #[arg(long)]
    pub(crate) no_notify: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GranteeArg {
    /// An application that publishes
    Producer,
    /// `run --read queue`, and commands that manage events
    Relay,
    /// `run --read log`, and commands that manage consumers
    Consumer,
    /// `run --read cdc`, and commands that manage readers
    Cdc,
    /// Commands that only read
    Viewer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShapeArg {
    /// Rows with a status: each event goes to one relay
    Queue,
    /// Rows that never change: any number of consumers, with replay and retention
    Log,
}

/// Report problems of a config, a database, its tables and the sinks
///
/// Shows what each sink would receive: the newest event of the outbox, or an invented one if the outbox is empty. The
/// exit code is 1 if airtight cannot work because of a problem found.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
        airtight check -c airtight.toml\n  \
        airtight check --url sqlite:shop.db --json\n  \
        airtight check --url sqlite:shop.db --to 'kafka://localhost:9092/{stream}?format=raw'")]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// A sink to check: whether it answers, and what it would receive
    #[arg(long, value_name = "URL", conflicts_with = "config")]
    pub(crate) to: Option<String>,
    /// Check the config only; connect to nothing
    #[arg(long, requires = "config")]
    pub(crate) offline: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Deliver events from an outbox to one or more sinks
///
/// With a config, this runs all its pipelines; without one, the pipeline given by --from and --to. If a pipeline ends
/// by itself, the log names it at once, the other pipelines continue, and the exit code is 1 in the end. The first
/// SIGINT or SIGTERM finishes the deliveries in flight and releases the other claimed events; the second stops at
/// once. SIGHUP cleanly ends a relay that was started from a terminal; without a terminal, the relay logs a warning
/// and continues.
#[derive(Debug, Args)]
#[command(after_help = "Sinks:\n  \
        stdout:            one JSON envelope per line\n  \
        file:PATH          the same, appended and fsynced\n  \
        http(s)://…        a POST for each event, signed as in Standard Webhooks\n  \
        kafka://HOST:PORT[,…]/TOPIC            a Kafka topic, e.g. 'shop.{aggregate_type}'\n  \
        nats://HOST:PORT/SUBJECT               a subject of NATS JetStream\n  \
        amqp://HOST:PORT/VHOST?routing_key=…   RabbitMQ\n  \
        redis://HOST:PORT/DB?key=…             a Redis stream\n  \
        null:              discards every event; for benchmarks\n\n\
        The address of a broker accepts more keys after a question mark, like ?format=raw&create=true;\n\
        docs/configuration.md lists them.\n\n\
        Examples:\n  \
        airtight run -c airtight.toml\n  \
        airtight run --from sqlite:shop.db --to stdout:\n  \
        airtight run --from sqlite:shop.db --to file:events.ndjson --drain\n  \
        airtight run --from postgres://app@db/shop --stream shop.orders --to https://example.org/hook\n  \
        airtight run --from postgres://app@db/shop --to 'kafka://broker:9092/shop.{aggregate_type}?format=raw'\n  \
        airtight run --from postgres://app@db/shop --read log --consumer billing --to https://example.org/hook\n  \
        airtight run --from postgres://app@db/shop --read cdc --to 'kafka://broker:9092/shop.{aggregate_type}'\n  \
        airtight run --debezium connector.json --worker connect.properties")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// The database of the outbox; the same as --url
    #[arg(long, value_name = "URL", conflicts_with = "url")]
    pub(crate) from: Option<String>,
    /// The sink that receives the events; see below
    #[arg(long, value_name = "URL", required_unless_present_any = ["config", "debezium"], conflicts_with = "config")]
    pub(crate) to: Option<String>,
    /// Run the pipeline that this Debezium connector file describes: JSON as for Kafka Connect's API, or properties.
    /// --to gives Kafka's address if neither this file nor --worker does
    #[arg(long, value_name = "FILE", help_heading = "Instead of Debezium", conflicts_with_all = ["config", "from", "url", "read", "table", "streams", "order", "keep_done", "consumer", "partitions", "start", "on_failure", "keep_log", "slot", "publication", "snapshot"])]
    pub(crate) debezium: Option<PathBuf>,
    /// The properties of the Connect worker, for settings that the connector file leaves to the worker
    #[arg(long, value_name = "FILE", help_heading = "Instead of Debezium", requires = "debezium")]
    pub(crate) worker: Option<PathBuf>,
    /// How to read the outbox: `queue`, `log` with --consumer, or `cdc` (PostgreSQL's WAL)
    #[arg(long, value_name = "WORD", default_value = "queue", conflicts_with = "config")]
    pub(crate) read: String,
    #[command(flatten)]
    pub(crate) follow: FollowArgs,
    #[command(flatten)]
    pub(crate) wal: WalArgs,
    /// Read only this stream; can be given several times
    #[arg(long = "stream", value_name = "NAME", conflicts_with = "config")]
    pub(crate) streams: Vec<String>,
    /// The order that deliveries keep [default: key]
    #[arg(long, value_enum, conflicts_with = "config")]
    pub(crate) order: Option<OrderArg>,
    /// What happens to a key when one of its events is dead [default: continue]
    #[arg(long, value_enum, conflicts_with = "config")]
    pub(crate) on_dead: Option<OnDead>,
    /// An event is dead after N failed attempts [default: 10]
    #[arg(long, value_name = "N", conflicts_with = "config", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_attempts: Option<u32>,
    /// The maximum number of events in one claim [default: 1000]
    #[arg(long, value_name = "N", conflicts_with = "config", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) batch: Option<u32>,
    /// How long a claim is valid without renewal [default: 30]
    #[arg(long, value_name = "SECONDS", conflicts_with = "config", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) lease: Option<u64>,
    /// The longest wait between two polls of an idle outbox [default: 1000]
    #[arg(long, value_name = "MS", conflicts_with = "config", value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    pub(crate) poll: Option<u64>,
    /// The key that signs webhooks
    #[arg(long, value_name = "SECRET", env = "AIRTIGHT_WEBHOOK_SECRET", hide_env_values = true)]
    pub(crate) webhook_secret: Option<String>,
    /// How long delivered events are kept if rows have a status, e.g. 7d, or `forever` [default: 7d; with --drain nothing is removed]
    #[arg(long, value_name = "DURATION", conflicts_with = "config")]
    pub(crate) keep_done: Option<String>,
    /// What the other pipelines of this process do when one ends by itself [default: the config's, else continue]
    #[arg(long, value_enum, value_name = "WORD")]
    pub(crate) on_pipeline_end: Option<OnPipelineEnd>,
    /// Stop when the backlog is empty, and print a summary
    #[arg(long)]
    pub(crate) drain: bool,
    /// Print the summary as JSON
    #[arg(long, requires = "drain")]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OrderArg {
    /// Per key (the aggregate id)
    Key,
    /// No order
    None,
    /// All events in one order, one at a time
    Total,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnDead {
    /// Later events of the key are delivered
    Continue,
    /// Later events of the key wait until a person decides
    Block,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnPipelineEnd {
    /// They continue
    Continue,
    /// They stop
    Stop,
}

/// Publish one event, or many from NDJSON on standard input
///
/// For tools and tests: an application publishes inside its own transaction. Each line of NDJSON is an object
/// with `stream`, `type`, `aggregateType`, `aggregateId`, and optionally `payload` (any JSON) or `payloadBase64`,
/// `headers`, `id`, `op`, `occurredAt`, `schemaVersion`, `maxAttempts`. The output of `airtight tail --json` is
/// accepted unchanged. Lines are committed in batches of 1,000. The command stops at an invalid line and prints its
/// number.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
        airtight publish --stream shop.orders --type OrderPlaced --aggregate-type Order --key 42 --payload '{\"total\":1200}'\n  \
        airtight publish --stdin < events.ndjson\n  \
        airtight tail --url sqlite:a.db --json | airtight publish --url sqlite:b.db")]
pub(crate) struct PublishArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Read NDJSON from standard input; the default if no event is given and standard input is not a terminal
    #[arg(long, conflicts_with_all = ["stream", "event_type", "aggregate_type", "key", "payload", "payload_file", "headers", "id", "op"])]
    pub(crate) stdin: bool,
    /// The stream: the event's logical topic
    #[arg(long, value_name = "NAME", requires_all = ["event_type", "aggregate_type", "key"])]
    pub(crate) stream: Option<String>,
    /// The event's type: what happened
    #[arg(long = "type", value_name = "NAME", requires = "stream")]
    pub(crate) event_type: Option<String>,
    /// The kind of thing that it happened to, e.g. Order
    #[arg(long, value_name = "NAME", requires = "stream")]
    pub(crate) aggregate_type: Option<String>,
    /// The aggregate's id, which is the ordering key
    #[arg(long, visible_alias = "aggregate-id", value_name = "ID", requires = "stream")]
    pub(crate) key: Option<String>,
    /// The payload as JSON, or `-` to read it from standard input
    #[arg(long, value_name = "JSON", requires = "stream", conflicts_with = "payload_file")]
    pub(crate) payload: Option<String>,
    /// Read the payload from this file, or from standard input with `-`
    #[arg(long, value_name = "FILE", requires = "stream")]
    pub(crate) payload_file: Option<PathBuf>,
    /// The payload is bytes, not JSON
    #[arg(long, requires = "stream")]
    pub(crate) bytes: bool,
    /// A header; can be given several times
    #[arg(long = "header", value_name = "NAME=VALUE", requires = "stream")]
    pub(crate) headers: Vec<String>,
    /// The event's id; publishing one id twice stores one event
    #[arg(long, value_name = "UUID", requires = "stream")]
    pub(crate) id: Option<uuid::Uuid>,
    /// What the event does to the aggregate [default: upsert]
    #[arg(long, value_name = "OP", requires = "stream", value_parser = ["upsert", "delete"])]
    pub(crate) op: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Show how many events are waiting, retrying, done or dead, and which relays run
///
/// With a config, also shows which of its pipelines no relay runs.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight status --url sqlite:shop.db\n  DATABASE_URL=postgres://app@db/shop airtight status --json\n  \
        airtight status --metrics > /var/lib/node_exporter/airtight.prom"
)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Print the Prometheus text format, for a collector of text files
    #[arg(long, conflicts_with = "json")]
    pub(crate) metrics: bool,
    /// The prefix of the metrics' names
    #[arg(long, value_name = "PREFIX", default_value = "airtight", requires = "metrics")]
    pub(crate) prefix: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EventsCommand {
    List(ListArgs),
    Show(ShowArgs),
    /// Make events due now and reset their attempts
    ///
    /// Refused for events that are done or being delivered.
    #[command(after_help = "Examples:\n  airtight events retry 42 43")]
    Retry(IdsArgs),
    /// Delete events
    ///
    /// Refused for events that are done or being delivered.
    #[command(after_help = "Examples:\n  airtight events discard 0198f2c4-7a5e-7c3e-9d0a-0d2f5a3f9b11")]
    Discard(IdsArgs),
    Blocked(BlockedArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeadCommand {
    /// List dead letters, and events with an unknown outcome
    List(DeadListArgs),
    Show(DeadShowArgs),
    Retry(BulkRetryArgs),
    Discard(BulkDiscardArgs),
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct FilterArgs {
    /// Only events of this stream
    #[arg(long, value_name = "NAME", help_heading = "Filter")]
    pub(crate) stream: Option<String>,
    /// Only events of this type
    #[arg(long = "type", value_name = "NAME", help_heading = "Filter")]
    pub(crate) event_type: Option<String>,
    /// Only events of this key (aggregate id)
    #[arg(long, value_name = "ID", help_heading = "Filter")]
    pub(crate) key: Option<String>,
    /// Only events with this error code
    #[arg(long, value_name = "CODE", help_heading = "Filter")]
    pub(crate) error_code: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PageArgs {
    /// Only events after this seq
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub(crate) after: Option<i64>,
    /// List the newest events first
    #[arg(long)]
    pub(crate) newest: bool,
    /// The maximum number of events
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: u32,
}

/// List events, oldest first
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight events list --state pending --stream shop.orders\n  \
        airtight events list --newest --limit 10 --json")]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Only events in this state; can be given several times
    #[arg(long = "state", value_name = "STATE", value_parser = ["pending", "processing", "done", "dead", "unknown"], help_heading = "Filter")]
    pub(crate) states: Vec<String>,
    #[command(flatten)]
    pub(crate) page: PageArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight dead list\n  airtight dead list --error-code http_422 --json\n  \
        airtight dead list --consumer billing"
)]
pub(crate) struct DeadListArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) of: ConsumerArg,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    #[command(flatten)]
    pub(crate) page: PageArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Show one event in full, by id or by seq
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight events show 42\n  airtight events show 0198f2c4-7a5e-7c3e-9d0a-0d2f5a3f9b11 --json"
)]
pub(crate) struct ShowArgs {
    /// The event's id or seq
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Show one dead letter in full, by id or by seq
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight dead show 42\n  \
        airtight dead show 0198f2c4-7a5e-7c3e-9d0a-0d2f5a3f9b11 --consumer billing --json")]
pub(crate) struct DeadShowArgs {
    #[command(flatten)]
    pub(crate) show: ShowArgs,
    #[command(flatten)]
    pub(crate) of: ConsumerArg,
}

#[derive(Debug, Args)]
pub(crate) struct IdsArgs {
    /// The events' ids or seqs
    #[arg(value_name = "ID", required = true)]
    pub(crate) ids: Vec<String>,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// List keys that wait behind a failed or dead event
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight events blocked --url sqlite:shop.db")]
pub(crate) struct BlockedArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// The maximum number of keys
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: u32,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Make dead letters due now and reset their attempts
///
/// --all takes every dead letter that matches the filter, but no event with an unknown outcome: retry those by id. On
/// a log, the dead letters of all consumers are retried unless --consumer names one.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight dead retry 42\n  airtight dead retry --all --stream shop.orders"
)]
pub(crate) struct BulkRetryArgs {
    /// The events' ids or seqs
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with_all = ["all", "stream", "event_type", "key", "error_code"])]
    pub(crate) ids: Vec<String>,
    /// All dead letters that match the filter
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) of: ConsumerArg,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Delete dead letters permanently
///
/// --all takes every dead letter that matches the filter, but no event with an unknown outcome: discard those by id.
/// On a log, the dead letters of all consumers are discarded unless --consumer names one; the log itself keeps the
/// event. --all asks for confirmation on a terminal; without a terminal it requires --yes.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight dead discard 42\n  airtight dead discard --all --yes --type OrderPlaced"
)]
pub(crate) struct BulkDiscardArgs {
    /// The events' ids or seqs
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with_all = ["all", "stream", "event_type", "key", "error_code"])]
    pub(crate) ids: Vec<String>,
    /// All dead letters that match the filter
    #[arg(long)]
    pub(crate) all: bool,
    /// Do not ask for confirmation; required with --all without a terminal
    #[arg(long, short)]
    pub(crate) yes: bool,
    #[command(flatten)]
    pub(crate) of: ConsumerArg,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Print events as they are written
///
/// Shows the events of the outbox, delivered or not. Claims nothing and changes nothing.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight tail --url sqlite:shop.db\n  airtight tail --from-start --json | jq .type"
)]
pub(crate) struct TailArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Begin with the oldest event of the outbox instead of the next new one
    #[arg(long)]
    pub(crate) from_start: bool,
    /// Stop after the newest event instead of waiting for more
    #[arg(long)]
    pub(crate) no_follow: bool,
    /// The time between two polls, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    pub(crate) poll: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Delete old events: delivered events of a queue, or events of a log
///
/// A log keeps events that a consumer has not seen, however old they are, unless --ignore-consumers is given.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight prune --url sqlite:shop.db\n  airtight prune --older-than 36h --dry-run\n  \
        airtight prune --url postgres://app@db/shop --keep 30d"
)]
pub(crate) struct PruneArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// On a queue: how long ago an event must have been delivered [default: the config's, else 7d for airtight's own
    /// table, and none for an application's table]
    #[arg(long, value_name = "DURATION", conflicts_with_all = ["keep", "ignore_consumers"])]
    pub(crate) older_than: Option<String>,
    /// On a table without a delivery time: use the time at which the event was written
    #[arg(long)]
    pub(crate) by_creation: bool,
    /// Print how many events would be deleted, and by which column; delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// On a log: keep events that are younger than this [default: the config's, else 30d]
    #[arg(long, value_name = "DURATION")]
    pub(crate) keep: Option<String>,
    /// On a log: also delete events that consumers have not seen; what those consumers feed must then be rebuilt
    #[arg(long)]
    pub(crate) ignore_consumers: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight completions bash > /etc/bash_completion.d/airtight\n  \
        airtight completions zsh > ~/.zfunc/_airtight")]
pub(crate) struct CompletionsArgs {
    /// The shell that the script is for
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
