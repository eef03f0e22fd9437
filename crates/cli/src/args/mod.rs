//! The command line: every command, its options, and examples that work as they stand. What only logs have is in
//! `log`, what only readers of the WAL have in `cdc`.

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

/// A transactional outbox: what commits is delivered, what rolls back never existed.
#[derive(Debug, Parser)]
#[command(
    name = "airtight",
    version,
    propagate_version = true,
    after_help = "New here? `airtight demo` needs nothing but this program.\n\n\
        The database is given by --url or DATABASE_URL: `sqlite:PATH`, a path that ends in .db or .sqlite,\n\
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
    /// Log more; RUST_LOG, when set, decides instead
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,
    /// How log lines on standard error look
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
    #[command(subcommand)]
    Events(EventsCommand),
    /// List, show, retry and discard dead letters
    #[command(subcommand)]
    Dead(DeadCommand),
    /// List, move, pause and remove the consumers of a log
    #[command(subcommand)]
    Consumers(ConsumersCommand),
    /// List, recover and remove readers of PostgreSQL's WAL
    #[command(subcommand)]
    Cdc(CdcCommand),
    DebeziumConfig(DebeziumConfigArgs),
    Tail(TailArgs),
    Prune(PruneArgs),
    Completions(CompletionsArgs),
}

/// The outbox to work on.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DatabaseArgs {
    /// Where the outbox is; else the config's, else DATABASE_URL
    #[arg(long, value_name = "URL", help_heading = "Database")]
    pub(crate) url: Option<String>,
    /// Take the database and the table's mapping from this config
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

/// Watch committed events being delivered, with nothing to install
///
/// Moves money between bank accounts in a temporary SQLite file: each transaction commits its transfers and
/// their events together, some are rolled back on purpose, and a relay delivers to a sink that fails, repeats,
/// stalls and goes away. At the end what was committed is compared with what arrived. The exit code is not 0
/// if anything was lost, was never committed, or came out of order.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight demo\n  airtight demo --events 50000 --headless --json\n  \
        airtight demo --seconds 10 --seed 7")]
pub(crate) struct DemoArgs {
    /// Stop writing at so many committed events [default: 2000, or none with --seconds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    pub(crate) events: Option<u64>,
    /// Stop writing after so many seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) seconds: Option<u64>,
    /// The same transfers, rollbacks and faults again, and so the same counts in the audit; unless --seconds or a signal
    /// ends it. Times, and who of the writers is first, are the machine's
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// No live view; progress lines on standard error
    #[arg(long)]
    pub(crate) headless: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Create or upgrade airtight's tables
///
/// Safe to run again, and from many processes at once. Refuses a schema that a newer airtight made.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  airtight migrate --url sqlite:shop.db\n  \
        airtight migrate --url postgres://app@localhost/shop --print > outbox.sql\n  \
        airtight migrate --url postgres://app@localhost/shop --shape log")]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// What the outbox is made for [default: the config's, else what it is already, else queue]
    #[arg(long, value_enum)]
    pub(crate) shape: Option<ShapeArg>,
    /// Print the SQL instead of running it, for those who apply it by hand
    #[arg(long)]
    pub(crate) print: bool,
    /// PostgreSQL: wake relays at every insert; costs a lock at commit, and such transactions cannot be prepared
    #[arg(long, conflicts_with = "no_notify")]
    pub(crate) notify: bool,
    /// PostgreSQL: no longer wake relays; they poll [default: leave it as it is]
    #[arg(long)]
    pub(crate) no_notify: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShapeArg {
    /// Rows with a status: each event goes to one relay
    Queue,
    /// Rows that never change: any number of consumers, replay, retention
    Log,
}

/// Say what is wrong with a config, a database, its tables or where events go
///
/// Shows what each sink would be sent: the newest event of the outbox, or one that is made up. The exit code is 1
/// if something found would keep airtight from working.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
        airtight check -c airtight.toml\n  \
        airtight check --url sqlite:shop.db --json\n  \
        airtight check --url sqlite:shop.db --to 'kafka://localhost:9092/{stream}?format=raw'")]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Where events would go: see whether it answers and what it would get
    #[arg(long, value_name = "URL", conflicts_with = "config")]
    pub(crate) to: Option<String>,
    /// Check the config only; connect to nothing
    #[arg(long, requires = "config")]
    pub(crate) offline: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Relay events from an outbox to where they must go
///
/// With a config, all its pipelines; without one, the pipeline given by --from and --to. A pipeline that ends by itself
/// is named in the log at once, the others go on, and the exit code is 1 in the end. The first SIGINT or SIGTERM
/// finishes what is under way and gives the rest back; the second stops at once. SIGHUP ends a relay that was started
/// from a terminal, cleanly, and is refused by one without.
#[derive(Debug, Args)]
#[command(after_help = "Sinks:\n  \
        stdout:            one JSON envelope a line\n  \
        file:PATH          the same, appended and fsynced\n  \
        http(s)://…        a POST for each event, signed as in Standard Webhooks\n  \
        kafka://HOST:PORT[,…]/TOPIC            a Kafka topic, e.g. 'shop.{aggregate_type}'\n  \
        nats://HOST:PORT/SUBJECT               a subject of NATS JetStream\n  \
        amqp://HOST:PORT/VHOST?routing_key=…   RabbitMQ\n  \
        redis://HOST:PORT/DB?key=…             a Redis stream\n  \
        null:              nowhere; for benchmarks\n\n\
        Brokers take more behind a question mark, like ?format=raw&create=true; docs/configuration.md has the keys.\n\n\
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
    /// Where the outbox is; the same as --url
    #[arg(long, value_name = "URL", conflicts_with = "url")]
    pub(crate) from: Option<String>,
    /// Where events go; see below
    #[arg(long, value_name = "URL", required_unless_present_any = ["config", "debezium"], conflicts_with = "config")]
    pub(crate) to: Option<String>,
    /// Do what this connector's file says: JSON as for Kafka Connect's API, or properties. --to says where
    /// Kafka is, where neither this file nor --worker does
    #[arg(long, value_name = "FILE", help_heading = "Instead of Debezium", conflicts_with_all = ["config", "from", "url", "read", "table", "streams", "order", "keep_done", "consumer", "partitions", "start", "on_failure", "keep_log", "slot", "publication", "snapshot"])]
    pub(crate) debezium: Option<PathBuf>,
    /// The properties of the Connect worker that it ran on, for what the connector's file leaves to it
    #[arg(long, value_name = "FILE", help_heading = "Instead of Debezium", requires = "debezium")]
    pub(crate) worker: Option<PathBuf>,
    /// How to read the outbox: `queue`, `log` with --consumer, or `cdc` (PostgreSQL's WAL)
    #[arg(long, value_name = "WORD", default_value = "queue", conflicts_with = "config")]
    pub(crate) read: String,
    #[command(flatten)]
    pub(crate) follow: FollowArgs,
    #[command(flatten)]
    pub(crate) wal: WalArgs,
    /// Only this stream; may be given several times
    #[arg(long = "stream", value_name = "NAME", conflicts_with = "config")]
    pub(crate) streams: Vec<String>,
    /// Which order deliveries keep [default: key]
    #[arg(long, value_enum, conflicts_with = "config")]
    pub(crate) order: Option<OrderArg>,
    /// What becomes of a key when one of its events is dead [default: continue]
    #[arg(long, value_enum, conflicts_with = "config")]
    pub(crate) on_dead: Option<OnDead>,
    /// The attempt that, when it fails, makes an event dead [default: 10]
    #[arg(long, value_name = "N", conflicts_with = "config", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_attempts: Option<u32>,
    /// Events in one claim [default: 1000]
    #[arg(long, value_name = "N", conflicts_with = "config", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) batch: Option<u32>,
    /// How long a claim holds without renewal [default: 30]
    #[arg(long, value_name = "SECONDS", conflicts_with = "config", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) lease: Option<u64>,
    /// The longest wait between two looks at an idle outbox [default: 1000]
    #[arg(long, value_name = "MS", conflicts_with = "config", value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    pub(crate) poll: Option<u64>,
    /// The key that signs webhooks
    #[arg(long, value_name = "SECRET", env = "AIRTIGHT_WEBHOOK_SECRET", hide_env_values = true)]
    pub(crate) webhook_secret: Option<String>,
    /// How long done events are kept, where rows have a status, e.g. 7d, or `forever` [default: 7d; with --drain nothing is removed]
    #[arg(long, value_name = "DURATION", conflicts_with = "config")]
    pub(crate) keep_done: Option<String>,
    /// What becomes of the other pipelines of this process when one ends by itself [default: the config's, else continue]
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
    /// None
    None,
    /// Of all events, one at a time
    Total,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnDead {
    /// Later events of the key go on
    Continue,
    /// They wait until a person has decided
    Block,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnPipelineEnd {
    /// They go on
    Continue,
    /// They stop
    Stop,
}

/// Publish one event, or many from NDJSON on standard input
///
/// For tools and tests: an application publishes inside its own transaction. Each line of NDJSON is an object
/// with `stream`, `type`, `aggregateType`, `aggregateId`, and as wanted `payload` (any JSON) or `payloadBase64`,
/// `headers`, `id`, `op`, `occurredAt`, `schemaVersion`, `maxAttempts`; what `airtight tail --json` prints is
/// accepted as it is. Lines are committed in batches of 1,000; a bad line stops with its number.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
        airtight publish --stream shop.orders --type OrderPlaced --aggregate-type Order --key 42 --payload '{\"total\":1200}'\n  \
        airtight publish --stdin < events.ndjson\n  \
        airtight tail --url sqlite:a.db --json | airtight publish --url sqlite:b.db")]
pub(crate) struct PublishArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Read NDJSON from standard input; the default when no event is given and it is not a terminal
    #[arg(long, conflicts_with_all = ["stream", "event_type", "aggregate_type", "key", "payload", "payload_file", "headers", "id", "op"])]
    pub(crate) stdin: bool,
    /// Logical topic
    #[arg(long, value_name = "NAME", requires_all = ["event_type", "aggregate_type", "key"])]
    pub(crate) stream: Option<String>,
    /// What happened
    #[arg(long = "type", value_name = "NAME", requires = "stream")]
    pub(crate) event_type: Option<String>,
    /// What it happened to
    #[arg(long, value_name = "NAME", requires = "stream")]
    pub(crate) aggregate_type: Option<String>,
    /// Which one it happened to: the ordering key
    #[arg(long, visible_alias = "aggregate-id", value_name = "ID", requires = "stream")]
    pub(crate) key: Option<String>,
    /// The body as JSON, or `-` to read it from standard input
    #[arg(long, value_name = "JSON", requires = "stream", conflicts_with = "payload_file")]
    pub(crate) payload: Option<String>,
    /// The body from a file, or from standard input with `-`
    #[arg(long, value_name = "FILE", requires = "stream")]
    pub(crate) payload_file: Option<PathBuf>,
    /// The body is bytes, not JSON
    #[arg(long, requires = "stream")]
    pub(crate) bytes: bool,
    /// A header; may be given several times
    #[arg(long = "header", value_name = "NAME=VALUE", requires = "stream")]
    pub(crate) headers: Vec<String>,
    /// The event's id; publishing one id twice stores one event
    #[arg(long, value_name = "UUID", requires = "stream")]
    pub(crate) id: Option<uuid::Uuid>,
    /// What it did to the aggregate [default: upsert]
    #[arg(long, value_name = "OP", requires = "stream", value_parser = ["upsert", "delete"])]
    pub(crate) op: Option<String>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Show how many events wait, retry, are done or dead, and which relays are there
///
/// With a config, also which of its pipelines nobody runs.
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
    /// Print it as Prometheus reads it, for a collector of text files
    #[arg(long, conflicts_with = "json")]
    pub(crate) metrics: bool,
    /// What the names of metrics begin with
    #[arg(long, value_name = "PREFIX", default_value = "airtight", requires = "metrics")]
    pub(crate) prefix: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EventsCommand {
    List(ListArgs),
    Show(ShowArgs),
    Retry(IdsArgs),
    Discard(IdsArgs),
    Blocked(BlockedArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum DeadCommand {
    /// List dead letters, and events whose outcome is unknown
    List(DeadListArgs),
    Show(DeadShowArgs),
    Retry(BulkRetryArgs),
    Discard(BulkDiscardArgs),
}

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct FilterArgs {
    /// Only this stream
    #[arg(long, value_name = "NAME", help_heading = "Filter")]
    pub(crate) stream: Option<String>,
    /// Only this event type
    #[arg(long = "type", value_name = "NAME", help_heading = "Filter")]
    pub(crate) event_type: Option<String>,
    /// Only this key (aggregate id)
    #[arg(long, value_name = "ID", help_heading = "Filter")]
    pub(crate) key: Option<String>,
    /// Only with this error code
    #[arg(long, value_name = "CODE", help_heading = "Filter")]
    pub(crate) error_code: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PageArgs {
    /// Only after this seq
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    pub(crate) after: Option<i64>,
    /// Newest first
    #[arg(long)]
    pub(crate) newest: bool,
    /// At most so many
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
    /// Only this state; may be given several times
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
    /// Id or seq
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

/// Act on single events
///
/// Retrying makes an event due now with its attempts at zero; discarding deletes it. Events that are done or
/// being delivered refuse both.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight events retry 42 43\n  airtight events discard 0198f2c4-7a5e-7c3e-9d0a-0d2f5a3f9b11"
)]
pub(crate) struct IdsArgs {
    /// Ids or seqs
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
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) limit: u32,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Give dead letters another chance: due now, attempts at zero
///
/// With --all, every dead letter of the filter; events whose outcome is unknown only one by one. On a log, those of
/// all consumers unless --consumer names one.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight dead retry 42\n  airtight dead retry --all --stream shop.orders"
)]
pub(crate) struct BulkRetryArgs {
    /// Ids or seqs
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with_all = ["all", "stream", "event_type", "key", "error_code"])]
    pub(crate) ids: Vec<String>,
    /// All of the filter
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

/// Delete dead letters for good
///
/// With --all, every dead letter of the filter; events whose outcome is unknown only one by one. On a log, those of all
/// consumers unless --consumer names one; the log itself keeps its event. On a terminal --all asks first; elsewhere it
/// wants --yes.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight dead discard 42\n  airtight dead discard --all --yes --type OrderPlaced"
)]
pub(crate) struct BulkDiscardArgs {
    /// Ids or seqs
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with_all = ["all", "stream", "event_type", "key", "error_code"])]
    pub(crate) ids: Vec<String>,
    /// All of the filter
    #[arg(long)]
    pub(crate) all: bool,
    /// Do not ask; needed with --all where there is no terminal
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

/// Follow events as they are written
///
/// Shows what is in the outbox, whether delivered or not; it claims nothing and changes nothing.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight tail --url sqlite:shop.db\n  airtight tail --from-start --json | jq .type"
)]
pub(crate) struct TailArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Begin with the oldest event that is there, not with the next
    #[arg(long)]
    pub(crate) from_start: bool,
    /// Stop at the end instead of waiting for more
    #[arg(long)]
    pub(crate) no_follow: bool,
    /// How often to look
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    pub(crate) poll: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// Delete what is old enough: done events of a queue, events of a log
///
/// A log keeps what a consumer has not seen, however old, unless told otherwise.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  airtight prune --url sqlite:shop.db\n  airtight prune --older-than 36h --dry-run\n  \
        airtight prune --url postgres://app@db/shop --keep 30d"
)]
pub(crate) struct PruneArgs {
    #[command(flatten)]
    pub(crate) database: DatabaseArgs,
    /// Of a queue: how long ago an event must have been delivered [default: the config's, else 7d for airtight's own
    /// table, and none for a table of your own]
    #[arg(long, value_name = "DURATION", conflicts_with_all = ["keep", "ignore_consumers"])]
    pub(crate) older_than: Option<String>,
    /// Of a table that does not say when an event was delivered: go by when it was written
    #[arg(long)]
    pub(crate) by_creation: bool,
    /// Say how many would go, and by which column; remove nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Of a log: younger events stay [default: the config's, else 30d]
    #[arg(long, value_name = "DURATION")]
    pub(crate) keep: Option<String>,
    /// Of a log: also remove what consumers have not seen; they then need rebuilding
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
    /// The shell
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
