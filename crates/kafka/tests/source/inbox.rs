//! Handlers with an inbox in PostgreSQL, fed by Kafka: each event has its effect exactly once, though Kafka redelivers.

use std::{io::Write, process::Command, sync::Arc, time::Duration};

use airtight_core::{
    CancellationToken, Capabilities, Delivery, Outcome, Relay, Sink, admin::Admin, async_trait,
};
use airtight_kafka::{KafkaSource, KafkaSourceConfig};
use airtight_postgres::{PgHandlers, PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, wait::eventually};
use futures::FutureExt;

use crate::support::*;

const CONSUMER: &str = "AIRTIGHT_TEST_CONSUMER";

/// Notes what is delivered before anything comes of it.
struct Counting {
    handlers: PgHandlers,
    file: Arc<std::fs::File>,
}

#[async_trait]
impl Sink for Counting {
    fn capabilities(&self) -> Capabilities {
        Capabilities { max_batch_events: 50, ..self.handlers.capabilities() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        (&*self.file).write_all(&vec![b'.'; batch.len()]).unwrap();
        self.handlers.deliver(batch).await
    }
}

/// Not a test but a consumer, which the test below starts as a process of its own, to kill it.
#[tokio::test(flavor = "multi_thread")]
async fn consumer_process() {
    let Ok(told) = std::env::var(CONSUMER) else { return };
    let [url, database, file] = told.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let outbox = PgOutbox::connect(database, PgOptions::default()).await.unwrap();
    let handlers = PgHandlers::new(&outbox, "billing").otherwise(|context, tx: &mut sqlx::PgConnection| {
        async move {
            let seq = context.event.seq;
            sqlx::query("INSERT INTO effect (key, seq) VALUES ($1, $2)")
                .bind(&context.event.aggregate_id)
                .bind(seq)
                .execute(tx)
                .await?;
            Ok(())
        }
        .boxed()
    });
    let file = std::fs::OpenOptions::new().append(true).create(true).open(file).unwrap();
    let source = KafkaSource::new(KafkaSourceConfig::from_url(url).unwrap()).unwrap();
    let relay = Relay::new(source, Counting { handlers, file: Arc::new(file) });
    relay.run(CancellationToken::new()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_has_its_effect_exactly_once_though_its_consumer_is_killed() {
    let name = "each_event_has_its_effect_exactly_once_though_its_consumer_is_killed";
    let Some(brokers) = cluster(name) else { return };
    let Some(db) = TestDb::create(name).await else { return };
    let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
    outbox.migrate().await.unwrap();
    let created = sqlx::raw_sql("CREATE TABLE effect (place bigserial PRIMARY KEY, key text, seq bigint)");
    created.execute(outbox.pool()).await.unwrap();
    let topic = topic(&brokers, "once", 3).await;
    let events = 6_000;
    publish(&brokers, &topic, (1..=events).map(|seq| (seq, format!("k{}", seq % 60)))).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("delivered");
    let url = format!(
        "kafka://{brokers}/{topic}?group=once&dead_letter_topic=none&commit_interval=200ms&session.timeout.ms=6000&heartbeat.interval.ms=500"
    );
    let count = async || {
        let count = sqlx::query_scalar("SELECT count(*) FROM effect").fetch_one(outbox.pool());
        count.await.unwrap()
    };
    let mut kills = 0;
    loop {
        let before: i64 = count().await;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "inbox::consumer_process"])
            .env(CONSUMER, format!("{url} {} {}", db.url(), file.display()))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let some = i64::from(fastrand::u16(100..1_500));
        let enough = (before + some).min(events);
        eventually(Duration::from_secs(90), "effects", async || count().await >= enough).await;
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        if enough == events {
            break;
        }
    }
    let (all, distinct): (i64, i64) = sqlx::query_as("SELECT count(*), count(DISTINCT seq) FROM effect")
        .fetch_one(outbox.pool())
        .await
        .unwrap();
    assert_eq!((all, distinct), (events, events));
    let out_of_order: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM (SELECT seq, lag(seq) OVER (PARTITION BY key ORDER BY place) AS before FROM effect) e \
         WHERE before > seq",
    )
    .fetch_one(outbox.pool())
    .await
    .unwrap();
    assert_eq!(out_of_order, 0);
    let deliveries = std::fs::read(&file).unwrap().len();
    println!("{kills} kills, {deliveries} deliveries of {events} events");
    assert!(
        deliveries > usize::try_from(events).unwrap(),
        "Kafka has redelivered nothing: the test tests nothing"
    );
}
