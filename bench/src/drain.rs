//! How fast a queue drains, compared with the loop that most people write first.

use std::time::{Duration, Instant};

use airtight_core::{
    CancellationToken, Capabilities, Delivery, Order, Outcome, Relay, Sink, queue::QueueOptions,
};
use airtight_testkit::postgres::TestDb;
use async_trait::async_trait;
use sqlx::{PgPool, Row};

use crate::sample;

/// A sink that accepts every event and discards it.
#[derive(Debug)]
pub(crate) struct NullSink;

#[async_trait]
impl Sink for NullSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, concurrency: 4, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        vec![Outcome::Delivered; batch.len()]
    }
}

pub(crate) async fn run(db: &TestDb, events: i64, baseline_seconds: u64) {
    let baseline = row_by_row(&db.pool(2).await, events, Duration::from_secs(baseline_seconds)).await;
    println!("row by row: {baseline:.0} events/s");
    let mut rates = Vec::new();
    for order in [Order::None, Order::Key] {
        let outbox = sample::outbox(db, &format!("drain_{}", order.as_str())).await;
        sample::fill(&outbox, events).await;
        let queue = outbox.queue(QueueOptions { order, ..QueueOptions::default() });
        let begun = Instant::now();
        let summary = Relay::new(queue, NullSink).drain(CancellationToken::new()).await.expect("draining");
        let rate = summary.delivered as f64 / begun.elapsed().as_secs_f64();
        assert_eq!(i64::try_from(summary.delivered), Ok(events), "all of them, once");
        println!("airtight, order = {}: {rate:.0} events/s, {:.1}x", order.as_str(), rate / baseline);
        rates.push(rate);
    }
    println!(
        "{}",
        serde_json::json!({"bench": "drain", "events": events, "row_by_row": baseline, "none": rates[0], "key": rates[1],
            "none_ratio": rates[0] / baseline, "key_ratio": rates[1] / baseline})
    );
}

/// The row-by-row loop, on its own table: read 500 rows, then mark each as published in a separate statement.
async fn row_by_row(pool: &PgPool, events: i64, limit: Duration) -> f64 {
    sqlx::raw_sql(
        "CREATE TABLE transfer_events (event_id BIGSERIAL PRIMARY KEY, aggregate_type VARCHAR(50) NOT NULL, \
         aggregate_id VARCHAR(100) NOT NULL, event_type VARCHAR(50) NOT NULL, payload TEXT NOT NULL, headers TEXT, \
         status VARCHAR(20) NOT NULL DEFAULT 'PENDING', attempt_count INT NOT NULL DEFAULT 0, \
         next_retry_at TIMESTAMP NOT NULL DEFAULT NOW(), created_at TIMESTAMP NOT NULL DEFAULT NOW(), \
         updated_at TIMESTAMP NOT NULL DEFAULT NOW(), published_at TIMESTAMP, last_error TEXT); \
         CREATE INDEX idx_transfer_events_status ON transfer_events(status); \
         CREATE INDEX idx_transfer_events_next_retry ON transfer_events(next_retry_at); \
         CREATE INDEX idx_transfer_events_created ON transfer_events(created_at);",
    )
    .execute(pool)
    .await
    .expect("the table of the loop");
    sqlx::query(
        "INSERT INTO transfer_events (aggregate_type, aggregate_id, event_type, payload) \
         SELECT 'Transfer', 'key-' || n % 1000, 'TransferCompleted', \
         jsonb_build_object('n', n, 'text', rpad(md5(n::text), 470, md5((n * 7)::text)))::text \
         FROM generate_series(1, $1::bigint) AS n",
    )
    .bind(events)
    .execute(pool)
    .await
    .expect("filling");
    sample::settle_down(pool, "transfer_events").await;

    let begun = Instant::now();
    let mut done = 0u32;
    'measure: loop {
        let rows =
            sqlx::query("SELECT * FROM transfer_events WHERE status = 'PENDING' ORDER BY event_id LIMIT 500")
                .fetch_all(pool)
                .await
                .expect("reading");
        if rows.is_empty() {
            break;
        }
        for row in rows {
            let id: i64 = row.get("event_id");
            sqlx::query(
                "UPDATE transfer_events SET status = 'PUBLISHED', published_at = now(), updated_at = now() WHERE event_id = $1",
            )
            .bind(id)
            .execute(pool)
            .await
            .expect("marking");
            done += 1;
            if begun.elapsed() > limit {
                break 'measure;
            }
        }
    }
    f64::from(done) / begun.elapsed().as_secs_f64()
}
