//! First light.
use airtight_core::{NewEvent, Policy, Relay, admin::Admin, queue::QueueOptions, sinks::MemorySink};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;
use tokio_util::sync::CancellationToken;

#[tokio::test]
async fn first_light() {
    let Some(db) = TestDb::create("first_light").await else { return };
    let outbox = PgOutbox::connect(&db.url(), PgOptions::default()).await.unwrap();
    println!("{:?}", outbox.migrate().await.unwrap());
    println!("{:?}", outbox.migrate().await.unwrap());
    let events: Vec<NewEvent> = (0..5000)
        .map(|n| NewEvent::new("s", "T", "A", format!("k{}", n % 100)).json(&serde_json::json!({"n": n})).unwrap())
        .collect();
    outbox.publish(&mut *outbox.pool().acquire().await.unwrap(), &events[0]).await.unwrap();
    Admin::publish(&outbox, &events).await.unwrap();
    for order in [airtight_core::Order::Key, airtight_core::Order::None, airtight_core::Order::Total] {
        let sink = MemorySink::new();
        Admin::publish(&outbox, &events[..300]).await.unwrap();
        let queue = outbox.queue(QueueOptions { order, ..Default::default() });
        let summary = Relay::new(queue, sink.clone()).policy(Policy { order, ..Default::default() }).drain(CancellationToken::new()).await.unwrap();
        println!("{summary:?} {}", sink.len());
    }
    println!("{:#?}", outbox.status().await.unwrap());
    println!("{:#?}", outbox.check().await.unwrap());
    println!("{:#?}", outbox.list(&Default::default()).await.unwrap().len());
    println!("{:#?}", outbox.show("1").await.unwrap().unwrap().row);
    println!("{:#?}", outbox.retry("1").await.unwrap());
    println!("{:#?}", outbox.prune(std::time::Duration::ZERO, &|_| {}).await.unwrap());
}
