//! What a claim costs, for different contents of the table.

use std::time::{Duration, Instant};

use airtight_core::{
    Capabilities, Limits, Order, Settlement, Source, Verdict,
    queue::{Queue, QueueOptions},
};
use airtight_postgres::{PgOutbox, PgQueue};
use airtight_testkit::postgres::TestDb;
use sqlx::AssertSqlSafe;

use crate::sample;

/// Events per claim.
const BATCH: usize = 100;

/// Claims that warm caches and plans up, before any is measured.
const WARM_UP: usize = 10;

pub(crate) async fn run(db: &TestDb, backlog: i64, claims: usize) {
    assert!(
        (claims + WARM_UP) * BATCH <= 10_000,
        "the small backlog has 10,000 events; ask for fewer claims"
    );
    let small = 10_000;
    for order in [Order::None, Order::Key] {
        let name = |what: &str| format!("{what}_{}", order.as_str());
        let plain = sample::outbox(db, &name("small")).await;
        sample::fill(&plain, small).await;
        let large = sample::outbox(db, &name("large")).await;
        sample::fill(&large, backlog).await;
        let waiting = sample::outbox(db, &name("waiting")).await;
        wait_for_retry(&waiting, 100_000).await;
        sample::fill(&waiting, small).await;

        let mut contestants = Vec::new();
        for outbox in [plain, large, waiting] {
            let queue =
                outbox.queue(QueueOptions { order, lease: Duration::from_secs(600), ..Default::default() });
            queue.open(&Capabilities::default()).await.expect("opening");
            contestants.push((queue, Vec::new()));
        }
        // In turns, so that noise falls on all alike.
        for round in 0..claims + WARM_UP {
            for (queue, times) in &mut contestants {
                let took = claim_and_settle(queue).await;
                if round >= WARM_UP {
                    times.push(took);
                }
            }
        }
        let medians: Vec<f64> = contestants.iter_mut().map(|(_, times)| median(times)).collect();
        println!(
            "order = {}: claim of {BATCH} at {small}: {:.2} ms, at {backlog}: {:.2} ms ({:.2}x), with 100000 waiting: {:.2} ms ({:.2}x)",
            order.as_str(),
            medians[0],
            medians[1],
            medians[1] / medians[0],
            medians[2],
            medians[2] / medians[0],
        );
        println!(
            "{}",
            serde_json::json!({"bench": "claim", "order": order.as_str(), "claims": claims, "small_ms": medians[0],
                "large_ms": medians[1], "waiting_ms": medians[2], "large_ratio": medians[1] / medians[0],
                "waiting_ratio": medians[2] / medians[0]})
        );
        for (queue, _) in contestants {
            queue.close().await.expect("closing");
        }
    }
}

/// Events that failed and are due in an hour, of other keys than the rest.
async fn wait_for_retry(outbox: &PgOutbox, events: i64) {
    let sql = format!(
        "INSERT INTO {} (stream, event_type, aggregate_type, aggregate_id, payload, attempts, next_retry_at) \
         SELECT 'bench', 'Happened', 'Thing', 'waiting-' || n, jsonb_build_object('n', n), 1, now() + interval '1 hour' \
         FROM generate_series(1, $1::bigint) AS n",
        outbox.spec().qualified()
    );
    sqlx::query(AssertSqlSafe(sql)).bind(events).execute(outbox.pool()).await.expect("filling");
}

async fn claim_and_settle(queue: &Queue<PgQueue>) -> f64 {
    let begun = Instant::now();
    let batch = queue.next(Limits { events: BATCH, bytes: 32 << 20 }).await.expect("claiming");
    let took = begun.elapsed().as_secs_f64() * 1_000.0;
    assert_eq!(batch.deliveries.len(), BATCH, "a full claim");
    let settlements: Vec<Settlement> = batch
        .deliveries
        .iter()
        .map(|delivery| Settlement { position: delivery.position, verdict: Verdict::Delivered })
        .collect();
    queue.settle(&settlements).await.expect("settling");
    took
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
