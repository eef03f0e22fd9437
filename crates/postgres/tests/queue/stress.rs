//! Many writers, some of which roll back or prepare, and relays that are killed and stalled: nothing is lost, nothing that
//! was rolled back is delivered, and each key stays in order.
//!
//! `AIRTIGHT_STRESS_SECONDS` sets how long the writers write; 6 by default.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Instant,
};

use airtight_core::{CancellationToken, Code, Error, Outcome, Policy, Relay, Sink};
use async_trait::async_trait;

use crate::*;

const WRITERS: usize = 16;
const RELAYS: usize = 3;
const KEYS: u32 = 40;
const LEASE: Duration = Duration::from_secs(1);

/// One delivery: the event's number within its key, its seq, and the relay.
type Seen = (i64, i64, usize);

/// A relay's sink, which records each key's deliveries for all relays.
#[derive(Clone)]
struct Recorder {
    relay: usize,
    seen: Arc<Mutex<HashMap<String, Vec<Seen>>>>,
}

#[async_trait]
impl Sink for Recorder {
    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        if fastrand::u32(..400) == 0 {
            tokio::time::sleep(LEASE * 3 / 2).await;
        }
        let mut seen = self.seen.lock().unwrap();
        let mut failed: Vec<&str> = Vec::new();
        batch
            .iter()
            .map(|delivery| {
                let key = delivery.event.aggregate_id.as_str();
                if failed.contains(&key) || fastrand::u32(..100) == 0 {
                    failed.push(key);
                    return Outcome::Failed(Error::retryable(Code::REFUSED, "one in a hundred"));
                }
                let payload: serde_json::Value =
                    serde_json::from_slice(delivery.event.payload.as_bytes()).unwrap();
                let n = payload["n"].as_i64().unwrap();
                seen.entry(key.to_owned()).or_default().push((n, delivery.event.seq, self.relay));
                Outcome::Delivered
            })
            .collect()
    }
}

/// Numbers the events of a key in the transaction that publishes them, so that their order is that of the commits.
async fn write(mut sql: Writer, name: String, until: Instant) {
    let mut round = 0;
    while Instant::now() < until {
        round += 1;
        let key = format!("k{}", fastrand::u32(..KEYS));
        sql.run("BEGIN").await;
        for _ in 0..fastrand::u32(1..4) {
            sql.run(&format!(
                "WITH n AS (UPDATE keys SET n = n + 1 WHERE key = '{key}' RETURNING n)
                 INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload)
                 SELECT 's', 'T', 'A', '{key}', jsonb_build_object('n', n) FROM n"
            ))
            .await;
        }
        let pause = Duration::from_millis(fastrand::u64(..8));
        tokio::time::sleep(pause).await;
        match fastrand::u32(..100) {
            0..15 => sql.run("ROLLBACK").await,
            15..20 => {
                let gid = format!("{name}-{round}");
                sql.run(&format!("PREPARE TRANSACTION '{gid}'")).await;
                tokio::time::sleep(pause * 10).await;
                let end = if fastrand::bool() { "COMMIT" } else { "ROLLBACK" };
                sql.run(&format!("{end} PREPARED '{gid}'")).await;
            }
            _ => sql.run("COMMIT").await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_and_killed_relays_lose_nothing_and_keep_the_order() {
    let Some(sut) = Canonical::create("q_stress").await else { return };
    let seconds =
        std::env::var("AIRTIGHT_STRESS_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let mut sql = Writer::new(&sut).await;
    sql.run("CREATE TABLE keys (key text PRIMARY KEY, n bigint NOT NULL DEFAULT 0)").await;
    sql.run(&format!("INSERT INTO keys (key) SELECT 'k' || n FROM generate_series(0, {}) AS n", KEYS - 1))
        .await;

    let until = Instant::now() + Duration::from_secs(seconds);
    let mut writers = Vec::new();
    for n in 0..WRITERS {
        writers.push(tokio::spawn(write(Writer::new(&sut).await, format!("{}-{n}", sut.db.name()), until)));
    }
    let seen: Arc<Mutex<HashMap<String, Vec<Seen>>>> = Arc::default();
    let mut kills = 0;
    let mut number = 0;
    let mut relays: Vec<tokio::task::JoinHandle<_>> = Vec::new();
    let mut start = || {
        number += 1;
        let options = QueueOptions { lease: LEASE, ..QueueOptions::default() };
        let policy = Policy { max_attempts: 1_000, ..Policy::default() };
        let relay = Relay::new(sut.outbox.queue(options), Recorder { relay: number, seen: seen.clone() })
            .policy(policy);
        tokio::spawn(relay.run(CancellationToken::new()))
    };
    relays.extend((0..RELAYS).map(|_| start()));
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(200..900))).await;
        let victim = fastrand::usize(..RELAYS);
        relays[victim].abort();
        relays[victim] = start();
        kills += 1;
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let left = "SELECT count(*) FROM airtight.outbox WHERE status <> 'done'";
    eventually(Duration::from_secs(60), "everything to be delivered", async || {
        let left: i64 = sqlx::query_scalar(left).fetch_one(sut.outbox.pool()).await.unwrap();
        left == 0
    })
    .await;
    relays.iter().for_each(tokio::task::JoinHandle::abort);

    let committed: Vec<(String, i64)> =
        sqlx::query_as("SELECT key, n FROM keys").fetch_all(sut.outbox.pool()).await.unwrap();
    let seen = seen.lock().unwrap();
    let (mut lost, mut phantom, mut disordered, mut repeats, mut total) = (0, 0, 0, 0, 0);
    for (key, last) in &committed {
        let deliveries = seen.get(key).map_or(&[][..], Vec::as_slice);
        let mut first: Vec<i64> = Vec::new();
        for (at, (n, ..)) in deliveries.iter().enumerate() {
            if first.contains(n) {
                repeats += 1;
                continue;
            }
            if first.last().is_some_and(|before| before > n) {
                disordered += 1;
                println!("{key}: {n} came late: {:?}", &deliveries[at.saturating_sub(6)..=at]);
            }
            phantom += usize::from(n > last);
            first.push(*n);
        }
        total += last;
        lost += last - i64::try_from(first.iter().filter(|n| *n <= last).count()).unwrap();
    }
    println!(
        "{total} events, {kills} kills: {lost} lost, {phantom} phantom, {disordered} out of order, {repeats} repeated"
    );
    assert_eq!((lost, phantom, disordered), (0, 0, 0), "of {total}");
}
