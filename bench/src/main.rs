//! Benchmarks. Every figure is a ratio within one run, because absolute figures of different machines and runs cannot be
//! compared.
//!
//! `bench/run` starts a PostgreSQL and runs all of them; `docs/performance.md` has the figures.

mod cdc;
mod claim;
mod contenders;
mod drain;
mod idle;
mod kafka;
mod latency;
mod log;
mod sample;
mod sqlite;
mod wal;

use airtight_testkit::postgres::TestDb;
use clap::Parser;

/// What to measure.
#[derive(Debug, Parser)]
enum Bench {
    /// Draining a PostgreSQL queue to a null sink, compared with a loop that marks each row by itself.
    Drain {
        /// How many events.
        #[arg(long, default_value_t = 200_000)]
        events: i64,
        /// How long the row-by-row loop runs.
        #[arg(long, default_value_t = 15)]
        baseline_seconds: u64,
    },
    /// What a claim costs at a backlog of 10,000, of 1,000,000, and with 100,000 events waiting for a retry.
    Claim {
        /// The large backlog.
        #[arg(long, default_value_t = 1_000_000)]
        backlog: i64,
        /// How many claims of each.
        #[arg(long, default_value_t = 40)]
        claims: usize,
    },
    /// Following a PostgreSQL log to a null sink, compared with `COPY … TO STDOUT` of the same rows.
    Log {
        /// How many events.
        #[arg(long, default_value_t = 1_000_000)]
        events: i64,
    },
    /// From commit to a log's consumer, with and without an unrelated transaction left open.
    Latency {
        /// Events a second.
        #[arg(long, default_value_t = 200)]
        rate: u32,
        /// How long each of eight rounds lasts.
        #[arg(long, default_value_t = 5)]
        seconds: u64,
    },
    /// PostgreSQL to Kafka, queue and log, compared with librdkafka's own producer.
    Kafka {
        /// How many events.
        #[arg(long, default_value_t = 200_000)]
        events: i64,
    },
    /// From commit to a consumer of Kafka, with NOTIFY on, compared with a bare producer and consumer.
    KafkaLatency {
        /// Events a second.
        #[arg(long, default_value_t = 500)]
        rate: u32,
        /// For how long.
        #[arg(long, default_value_t = 20)]
        seconds: u64,
    },
    /// From the WAL to Kafka, compared with Debezium on the same backlog.
    Cdc {
        /// The binary.
        #[arg(long)]
        binary: std::path::PathBuf,
        /// How many events.
        #[arg(long, default_value_t = 200_000)]
        events: usize,
        /// Events a second, for the latency.
        #[arg(long, default_value_t = 500)]
        rate: u32,
        /// For how long.
        #[arg(long, default_value_t = 20)]
        seconds: u64,
    },
    /// How much WAL an idle outbox retains while other tables are written, compared with Debezium.
    Wal {
        /// The binary.
        #[arg(long)]
        binary: std::path::PathBuf,
        /// How many megabytes are written to other tables.
        #[arg(long, default_value_t = 2_048)]
        megabytes: u64,
    },
    /// Publishing into and draining an SQLite file.
    Sqlite {
        /// How many events.
        #[arg(long, default_value_t = 50_000)]
        events: usize,
    },
    /// Memory and processor time of an idle `airtight run`.
    Idle {
        /// The binary.
        #[arg(long)]
        binary: std::path::PathBuf,
        /// How long to watch it.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
    },
}

#[tokio::main]
async fn main() {
    let bench = Bench::parse();
    if let Bench::Sqlite { events } = bench {
        return sqlite::run(events).await;
    }
    let Some(db) = TestDb::create("bench").await else {
        eprintln!("no PostgreSQL: run `bench/run`, which starts one");
        std::process::exit(1);
    };
    match bench {
        Bench::Drain { events, baseline_seconds } => drain::run(&db, events, baseline_seconds).await,
        Bench::Claim { backlog, claims } => claim::run(&db, backlog, claims).await,
        Bench::Log { events } => log::run(&db, events).await,
        Bench::Latency { rate, seconds } => latency::run(&db, rate, seconds).await,
        Bench::Kafka { events } => kafka::throughput(&db, events).await,
        Bench::KafkaLatency { rate, seconds } => kafka::latency(&db, rate, seconds).await,
        Bench::Cdc { binary, events, rate, seconds } => cdc::run(&db, &binary, events, rate, seconds).await,
        Bench::Wal { binary, megabytes } => wal::run(&db, &binary, megabytes).await,
        Bench::Sqlite { .. } => unreachable!("needs no server, and has returned"),
        Bench::Idle { binary, seconds } => idle::run(&db, &binary, seconds).await,
    }
    db.drop_now().await;
}
