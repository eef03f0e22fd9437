//! A log of another program, which keeps its own offsets.

use std::time::Duration;

use airtight_core::{
    Code, Error, Source, Verdict,
    admin::Admin,
    log::{LogAdmin, LogOptions, Retention, SeekOptions, SeekTo},
    table::TableSpec,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;

use crate::support::Fixture;

const RELAY_LOG: &str = "CREATE SCHEMA cn_relay; \
    CREATE TABLE cn_relay.events (event_id text PRIMARY KEY, content text); \
    CREATE TABLE cn_relay.events_outbox (seq BIGSERIAL PRIMARY KEY, op TEXT NOT NULL, event_id TEXT NOT NULL, \
      topic_id TEXT NOT NULL, kind INT NOT NULL, created_at INT NOT NULL, ingested_at TIMESTAMPTZ NOT NULL, \
      effective_key TEXT NULL, reason TEXT NULL); \
    CREATE TABLE cn_relay.consumer_offsets (consumer TEXT PRIMARY KEY, last_seq BIGINT NOT NULL, \
      updated_at TIMESTAMPTZ NOT NULL)";

async fn relay_log(name: &str) -> Option<Fixture> {
    let db = TestDb::create(&format!("log_{name}")).await?;
    let pool = db.pool(5).await;
    sqlx::raw_sql(RELAY_LOG).execute(&pool).await.unwrap();
    let options = PgOptions { spec: Some(TableSpec::relay_log()), ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
    outbox.migrate().await.unwrap();
    Some(Fixture { db, outbox, pool })
}

async fn relay_log_publish(f: &Fixture, n: i64, ingested: &str) {
    f.sql(&format!(
        "INSERT INTO cn_relay.events VALUES ('e{n}', 'hello {n}'); \
         INSERT INTO cn_relay.events_outbox (op, event_id, topic_id, kind, created_at, ingested_at) \
         VALUES ('upsert', 'e{n}', 't', 1, 1700000000, {ingested})"
    ))
    .await;
}

#[tokio::test]
async fn the_relay_log_is_followed_as_its_document_says() {
    let Some(f) = relay_log("relay").await else { return };
    for n in 1..=5 {
        relay_log_publish(&f, n, "now()").await;
    }
    let reader = f.reader("index-v1").await;
    let batch = reader.look().await;
    assert_eq!(batch.len(), 5);
    let one = &batch[0].event;
    assert_eq!((&*one.stream, &*one.event_type, &*one.aggregate_id), ("t", "1", "e1"));
    reader.deliver(&batch).await;
    let offset = "SELECT last_seq FROM cn_relay.consumer_offsets WHERE consumer = 'index-v1'";
    assert_eq!(f.number(offset).await, 5);
    // Replay by hand, while it runs and has nothing to settle.
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 2").await;
    assert_eq!(reader.seqs(3).await, [3, 4, 5]);
    assert_eq!(f.number(offset).await, 5);
    // And while something is in flight.
    relay_log_publish(&f, 6, "now()").await;
    let batch = reader.look().await;
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 0").await;
    reader.deliver(&batch).await;
    assert_eq!(f.number(offset).await, 0, "what a person says wins");
    assert_eq!(reader.seqs(6).await, [1, 2, 3, 4, 5, 6]);
    // What fails is parked; the offset goes on.
    relay_log_publish(&f, 7, "now()").await;
    let batch = reader.look().await;
    let after = Duration::from_millis(1);
    reader
        .settle(&batch, &Verdict::Retry { after, error: Error::retryable(Code::custom("r"), "again") })
        .await;
    assert_eq!(f.number(offset).await, 7);
    assert_eq!(reader.seqs(1).await, [7]);
    reader.close().await;
    // Time alone decides, and whoever is behind is told so.
    f.sql("UPDATE cn_relay.events_outbox SET ingested_at = now() - interval '31 days' WHERE seq <= 4").await;
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 1").await;
    let told = Retention { keep: Duration::from_secs(30 * 86_400), wait_for_consumers: false };
    let pruned = f.outbox.prune_log(told, &|_| {}).await.unwrap();
    assert_eq!((pruned.events, pruned.floor), (4, 4));
    let late = f.outbox.log(LogOptions::consumer("index-v1"));
    let error = late.open(&airtight_core::Capabilities::default()).await.unwrap_err();
    assert_eq!(error.code(), "behind_retention", "{error}");
    late.close().await.unwrap();
    let seek = f.outbox.seek("index-v1", SeekTo::Earliest, SeekOptions::default()).await.unwrap();
    assert_eq!((seek.from, seek.to), (1, 4));
    let reader = f.reader("index-v1").await;
    assert_eq!(reader.seqs(3).await, [5, 6, 7]);
}

/// Counted from the offset that counts, which is not airtight's own.
#[tokio::test]
async fn a_seek_counts_from_the_offset_that_was_set_by_hand() {
    let Some(f) = relay_log("by_hand").await else { return };
    for n in 1..=5 {
        relay_log_publish(&f, n, "now()").await;
    }
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(5).await.len(), 5);
    reader.close().await;
    f.sql("UPDATE cn_relay.consumer_offsets SET last_seq = 1").await;
    let dry = SeekOptions { dry_run: true, ..SeekOptions::default() };
    let seek = f.outbox.seek("c", SeekTo::Seq(3), dry).await.unwrap();
    assert_eq!((seek.from, seek.to, seek.again, seek.skipped), (1, 3, 0, 2));
}
