//! A group of instances, each in its own process: one is killed, one is added.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use airtight_core::{Capabilities, Delivery, NewEvent, Outcome, Sink, admin::Admin, log::LogAdmin};
use airtight_postgres::PgOutbox;
use airtight_testkit::{postgres::TestDb, wait::eventually};
use async_trait::async_trait;
use sqlx::PgPool;

use crate::{children::Process, readers::outbox, seconds};

pub(crate) const LEASE: Duration = Duration::from_secs(3);
const KEYS: i64 = 64;

/// Writes down what comes, by whom and when, in transactions of its own: repeats show.
pub(crate) struct Recorder(PgPool);

impl Recorder {
    pub(crate) fn new(outbox: &PgOutbox) -> Self {
        Self(outbox.pool().clone())
    }
}

#[async_trait]
impl Sink for Recorder {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let keys: Vec<&str> = batch.iter().map(|one| one.event.aggregate_id.as_str()).collect();
        let seqs: Vec<i64> = batch.iter().map(|one| one.event.seq).collect();
        sqlx::query(
            "INSERT INTO seen (key, seq, pid) SELECT k, s, $3 FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS v(k, s, o) ORDER BY o",
        )
        .bind(keys)
        .bind(seqs)
        .bind(i64::from(std::process::id()))
        .execute(&self.0)
        .await
        .unwrap();
        vec![Outcome::Delivered; batch.len()]
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_instance_is_killed_and_one_is_added() {
    let Some(db) = TestDb::create("group").await else { return };
    let outbox = outbox(&db.url()).await;
    let pool = db.pool(4).await;
    sqlx::raw_sql("CREATE TABLE seen (id bigserial PRIMARY KEY, key text, seq bigint, pid bigint, at timestamptz DEFAULT clock_timestamp()); CREATE INDEX ON seen (key, seq)")
        .execute(&pool)
        .await
        .unwrap();
    let mut instances: Vec<Process> = (0..3).map(|_| Process::start("group", &db.url())).collect();
    let shared = async |instances: usize| {
        let group = outbox.consumers().await.unwrap().into_iter().find(|consumer| consumer.name == "group");
        group.is_some_and(|group| {
            group.instances.len() == instances
                && group.instances.iter().all(|one| one.partitions >= 2)
                && group.instances.iter().map(|one| one.partitions).sum::<u64>() == 8
        })
    };
    eventually(Duration::from_secs(20), "three instances to share the partitions", async || shared(3).await)
        .await;

    // One writer: the events of a key are published one after the other.
    let end = Instant::now() + seconds(10);
    let writer = {
        let outbox = outbox.clone();
        tokio::spawn(async move {
            let mut n = 0;
            while Instant::now() < end {
                let events: Vec<NewEvent> =
                    (0..KEYS).map(|key| NewEvent::new("s", "T", "A", format!("k{key}"))).collect();
                Admin::publish(&outbox, &events).await.unwrap();
                n += KEYS;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            n
        })
    };
    tokio::time::sleep(seconds(10) / 5).await;
    let killed_at: time::OffsetDateTime =
        sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&pool).await.unwrap();
    instances.remove(0).kill();
    eventually(LEASE * 3, "two instances to share the partitions", async || {
        let group = outbox.consumers().await.unwrap().into_iter().find(|consumer| consumer.name == "group");
        group.is_some_and(|group| {
            group.instances.len() == 2 && group.instances.iter().all(|one| one.partitions == 4)
        })
    })
    .await;
    instances.push(Process::start("group", &db.url()));
    eventually(Duration::from_secs(20), "a third instance to get its share", async || shared(3).await).await;
    let published = writer.await.unwrap();

    eventually(Duration::from_secs(30), "everything to be seen", async || {
        let seen: i64 =
            sqlx::query_scalar("SELECT count(DISTINCT seq) FROM seen").fetch_one(&pool).await.unwrap();
        seen == published
    })
    .await;
    let rows: Vec<(String, i64)> = sqlx::query_as(
        "SELECT key, min(id) FILTER (WHERE true)::bigint FROM seen GROUP BY key, seq ORDER BY key, seq",
    )
    .fetch_all(&pool)
    .await
    .unwrap();
    let mut last: HashMap<String, i64> = HashMap::new();
    for (key, first_seen) in rows {
        let before = last.insert(key.clone(), first_seen).unwrap_or(0);
        assert!(first_seen > before, "events of {key} came out of order");
    }
    // The longest silence of a key that spans the kill or follows it.
    let silence: f64 = sqlx::query_scalar(
        "SELECT extract(epoch FROM max(gap))::float8 FROM (SELECT at - lag(at) OVER (PARTITION BY key ORDER BY at) AS gap, at FROM seen) AS s WHERE at > $1",
    )
    .bind(killed_at)
    .fetch_one(&pool)
    .await
    .unwrap();
    let repeats: i64 =
        sqlx::query_scalar("SELECT count(*) - count(DISTINCT seq) FROM seen").fetch_one(&pool).await.unwrap();
    println!(
        "{published} events, {repeats} repeats; the longest silence of a key was {silence:.2} s, the lease is {LEASE:?}"
    );
    // One that is killed just after it has renewed its lease is missed by the first heartbeat of the others after the lease:
    // they come four times in a lease.
    assert!(silence <= LEASE.as_secs_f64() * 1.25, "work resumed only after {silence:.2} s");
}
