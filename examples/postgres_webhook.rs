//! A PostgreSQL outbox relayed to a webhook, inside the application, until Ctrl-C.
//!
//! ```sh
//! DATABASE_URL=postgres://app@localhost/shop cargo run -p airtight --example postgres_webhook -- https://example.org/hook
//! ```

use std::{env, error::Error, time::Duration};

use airtight::{
    NewEvent, Order, Policy, Relay,
    admin::Admin,
    postgres::{PgOptions, PgOutbox},
    queue::QueueOptions,
    webhook::{WebhookConfig, WebhookSink},
};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = env::args().nth(1).ok_or("give the address of a webhook")?;
    let outbox = PgOutbox::connect(&env::var("DATABASE_URL")?, PgOptions::default()).await?;
    outbox.migrate().await?;

    // An application that has a pool uses `PgOutbox::with_pool`.
    let mut tx = outbox.pool().begin().await?;
    let event = NewEvent::new("shop.orders", "OrderPlaced", "Order", "42")
        .json(&serde_json::json!({ "total": 1_200 }))?;
    let published = outbox.publish(&mut tx, &event).await?;
    tx.commit().await?;
    println!("published {} at seq {}", published.id, published.seq);

    // The source says which order is kept, and the relay asks it.
    let source = outbox.queue(QueueOptions { order: Order::Key, ..QueueOptions::default() });
    let sink = WebhookSink::new(WebhookConfig::new(endpoint).timeout(Duration::from_secs(5)))?;
    let policy = Policy { max_attempts: 5, ..Policy::default() };

    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            stopped.cancel();
        }
    });
    let summary = Relay::new(source, sink).policy(policy).name("orders").run(stop).await?;
    println!("{} delivered, {} retried, {} dead", summary.delivered, summary.retried, summary.dead);
    Ok(())
}
