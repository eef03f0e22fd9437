//! An outbox in one SQLite file, and a relay in the same process that hands its events to a typed handler.
//!
//! ```sh
//! cargo run -p airtight --example in_process
//! ```
//!
//! Delivery is at least once, so the handler records the id of each event in the transaction of its own effect. Then a
//! duplicate changes nothing.

use std::error::Error;

use airtight::{
    Dispatcher, NewEvent, Relay, admin::Admin, dispatch::Context, queue::QueueOptions, sqlite::SqliteOutbox,
};
use serde::{Deserialize, Serialize};
use sqlx::SqlitePool;
use tokio_util::sync::CancellationToken;

#[derive(Serialize, Deserialize)]
struct OrderPlaced {
    total: i64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("shop.db");
    let outbox = SqliteOutbox::open(&file.to_string_lossy()).await?;
    outbox.migrate().await?;
    let pool = outbox.pool();
    sqlx::raw_sql(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER NOT NULL);
         CREATE TABLE seen (event_id TEXT PRIMARY KEY);
         CREATE TABLE revenue (total INTEGER NOT NULL);
         INSERT INTO revenue VALUES (0);",
    )
    .execute(pool)
    .await?;

    place_order(&outbox, 1, 1_200, true).await?;
    place_order(&outbox, 2, 9_999, false).await?;
    place_order(&outbox, 3, 300, true).await?;

    let revenue = pool.clone();
    let handlers = Dispatcher::new().on("OrderPlaced", move |order: OrderPlaced, context: Context| {
        let pool = revenue.clone();
        async move {
            println!("order {}: {}", context.event.aggregate_id, order.total);
            // A database error may be temporary; the relay tries again.
            count(&pool, &context.event.id, order.total).await.map_err(|error| {
                airtight::Error::retryable(airtight::Code::custom("revenue"), error.to_string())
            })
        }
    });
    let relay = Relay::new(outbox.queue(QueueOptions::default()), handlers);
    // `run` continues until the token is cancelled; `drain` also ends when nothing is left to deliver.
    let summary = relay.drain(CancellationToken::new()).await?;

    let total: i64 = sqlx::query_scalar("SELECT total FROM revenue").fetch_one(pool).await?;
    println!("{} delivered, revenue {total}", summary.delivered);
    assert_eq!((summary.delivered, total), (2, 1_500));
    Ok(())
}

/// The order and its event, in one transaction.
async fn place_order(outbox: &SqliteOutbox, id: i64, total: i64, commit: bool) -> Result<(), Box<dyn Error>> {
    let mut tx = outbox.pool().begin_with("BEGIN IMMEDIATE").await?;
    sqlx::query("INSERT INTO orders (id, total) VALUES (?, ?)")
        .bind(id)
        .bind(total)
        .execute(&mut *tx)
        .await?;
    let event =
        NewEvent::new("shop.orders", "OrderPlaced", "Order", id.to_string()).json(&OrderPlaced { total })?;
    outbox.publish(&mut tx, &event).await?;
    if commit {
        tx.commit().await?;
    } else {
        tx.rollback().await?;
    }
    Ok(())
}

/// The handler's effect: once for each event, however often the event is delivered.
async fn count(pool: &SqlitePool, event_id: &str, total: i64) -> sqlx::Result<()> {
    let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
    let new = sqlx::query("INSERT INTO seen (event_id) VALUES (?) ON CONFLICT DO NOTHING")
        .bind(event_id)
        .execute(&mut *tx)
        .await?;
    if new.rows_affected() == 1 {
        sqlx::query("UPDATE revenue SET total = total + ?").bind(total).execute(&mut *tx).await?;
    }
    tx.commit().await
}
