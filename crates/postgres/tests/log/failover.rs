//! A server that comes back without its last events.

use std::time::{Duration, Instant};

use airtight_core::{Limits, Source, Verdict, admin::Admin, log::LogOptions, table::Shape};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres_server::PrivateServer;

use crate::support::{Reader, SOON, event};

const LIMITS: Limits = Limits { events: 100, bytes: 8 << 20 };

/// After a failover to a standby that lacks the last events, their places are drawn again.
#[tokio::test]
async fn what_another_server_had_is_not_settled_here() {
    let Some(server) = PrivateServer::start("failover") else { return };
    let options = PgOptions { shape: Shape::Log, ..PgOptions::default() };
    let outbox = PgOutbox::connect(&server.url(), options).await.unwrap();
    outbox.migrate().await.unwrap();
    let publish = async |key: &str| Admin::publish(&outbox, &[event(key, 1)]).await.unwrap()[0].seq;
    for n in 1..=4 {
        publish(&format!("k{n}")).await;
    }
    let reader = Reader { log: outbox.log(LogOptions::consumer("c")) };
    reader.log.open(&airtight_core::Capabilities::default()).await.unwrap();
    let batch = reader.look().await;
    assert_eq!(batch.len(), 4, "read, and being delivered");
    let crashed = tokio::task::spawn_blocking(move || {
        server.crash();
        server
    });
    let _server = crashed.await.unwrap();
    // As a standby that had not got the last two has it.
    let sql = "DELETE FROM airtight.outbox WHERE seq > 2; SELECT setval('airtight.outbox_seq', 2)";
    let deadline = Instant::now() + SOON;
    while let Err(error) = sqlx::raw_sql(sql).execute(outbox.pool()).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!((publish("new").await, publish("new").await), (3, 4));
    let settlements: Vec<airtight_core::Settlement> = batch
        .iter()
        .map(|one| airtight_core::Settlement { position: one.position, verdict: Verdict::Delivered })
        .collect();
    while let Err(error) = reader.log.settle(&settlements).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut came = Vec::new();
    while came.iter().filter(|key| *key == "new").count() < 2 {
        assert!(Instant::now() < deadline, "only {came:?} came");
        if let Ok(batch) = reader.log.next(LIMITS).await {
            came.extend(batch.deliveries.iter().map(|one| one.event.aggregate_id.to_string()));
        }
        reader.log.wait(Duration::from_millis(50)).await;
    }
}
