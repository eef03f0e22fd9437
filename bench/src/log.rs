//! How fast a log is followed, compared with the fastest way to read the same rows: `COPY … TO STDOUT`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{CancellationToken, Relay, admin::Admin, log::LogOptions, table::Shape};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;
use futures::TryStreamExt;
use sqlx::PgPool;

use crate::{drain::NullSink, idle::resident_kb, sample};

/// The columns that the log reads.
const COPY: &str = "COPY (SELECT seq, id, stream, event_type, aggregate_type, aggregate_id, op, payload, payload_bytes, \
     headers, occurred_at, schema_version, max_attempts FROM airtight.outbox ORDER BY seq) TO STDOUT";

pub(crate) async fn run(db: &TestDb, events: i64) {
    let options = PgOptions { shape: Shape::Log, ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.expect("connecting");
    outbox.migrate().await.expect("migrating");
    let pool = db.pool(2).await;
    fill(&outbox, &pool, events).await;

    // Once for the caches, then before and after.
    copy(&pool, events).await;
    let before = copy(&pool, events).await;
    let memory = Memory::watch();
    let begun = Instant::now();
    let relay = Relay::new(outbox.log(LogOptions::consumer("bench")), NullSink);
    let summary = relay.drain(CancellationToken::new()).await.expect("draining");
    let rate = summary.delivered as f64 / begun.elapsed().as_secs_f64();
    let grown = memory.grown_mb();
    assert_eq!(i64::try_from(summary.delivered), Ok(events), "all of them, once");
    let copied = (before + copy(&pool, events).await) / 2.0;

    let dead = dead_tuples(&pool).await;
    println!("COPY TO STDOUT: {copied:.0} rows/s");
    println!(
        "airtight, read = log: {rate:.0} events/s, {:.0} % of it, memory grew by {grown:.1} MB, {dead} dead tuples in the log",
        100.0 * rate / copied
    );
    println!(
        "{}",
        serde_json::json!({"bench": "log", "events": events, "copy": copied, "log": rate, "ratio": rate / copied,
            "memory_mb": grown, "dead_tuples": dead})
    );
}

async fn fill(outbox: &PgOutbox, pool: &PgPool, events: i64) {
    sqlx::query(
        "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'bench', 'Benched', 'Thing', 'key-' || n % 1000, \
         jsonb_build_object('n', n, 'text', rpad(md5(n::text), 470, md5((n * 7)::text))) \
         FROM generate_series(1, $1::bigint) AS n",
    )
    .bind(events)
    .execute(pool)
    .await
    .expect("filling");
    outbox.make_partitions().await.expect("making partitions");
    sample::settle_down(pool, "airtight.outbox").await;
}

async fn copy(pool: &PgPool, events: i64) -> f64 {
    let mut conn = pool.acquire().await.expect("a connection");
    let begun = Instant::now();
    let mut out = conn.copy_out_raw(COPY).await.expect("copying");
    let mut bytes = 0;
    while let Some(chunk) = out.try_next().await.expect("copying") {
        bytes += chunk.len();
    }
    assert!(bytes > usize::try_from(events).expect("positive") * 400, "the rows are there");
    events as f64 / begun.elapsed().as_secs_f64()
}

async fn dead_tuples(pool: &PgPool) -> i64 {
    // The server reports within a second.
    tokio::time::sleep(Duration::from_secs(2)).await;
    sqlx::query_scalar(
        "SELECT coalesce(sum(n_dead_tup + n_tup_upd + n_tup_del), 0)::bigint FROM pg_stat_user_tables \
         WHERE relid IN (SELECT relid FROM pg_partition_tree('airtight.outbox'))",
    )
    .fetch_one(pool)
    .await
    .expect("statistics")
}

/// Watches how much this process grows.
struct Memory {
    start: u64,
    peak: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Memory {
    fn watch() -> Self {
        let start = resident_kb(std::process::id());
        let peak = Arc::new(AtomicU64::new(start));
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, ended) = (peak.clone(), stop.clone());
        tokio::spawn(async move {
            while !ended.load(Ordering::Relaxed) {
                seen.fetch_max(resident_kb(std::process::id()), Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { start, peak, stop }
    }

    fn grown_mb(self) -> f64 {
        self.stop.store(true, Ordering::Relaxed);
        (self.peak.load(Ordering::Relaxed) - self.start) as f64 / 1024.0
    }
}
