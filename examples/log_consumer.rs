//! One log in an SQLite file, and two consumers that follow it, each with its own offset.
//!
//! ```sh
//! cargo run -p airtight --example log_consumer
//! ```
//!
//! `mail` hands events to a plain handler: at least once. `billing` writes to the same file, so one transaction contains
//! the handler's writes, the inbox's row and the offset: each event counts exactly once, even when it is replayed.

use std::error::Error;

use airtight::{
    CancellationToken, Dispatcher, NewEvent, Relay,
    admin::Admin,
    dispatch::Context,
    log::{LogAdmin, LogOptions, SeekOptions, SeekTo},
    sqlite::{SqliteHandlers, SqliteOutbox},
    table::Shape,
};
use serde::{Deserialize, Serialize};
use sqlx::SqliteConnection;

#[derive(Serialize, Deserialize)]
struct OrderPlaced {
    total: i64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("shop.db");
    let outbox = SqliteOutbox::open(&file.to_string_lossy()).await?.shape(Shape::Log);
    outbox.migrate().await?;
    sqlx::raw_sql("CREATE TABLE revenue (total INTEGER NOT NULL); INSERT INTO revenue VALUES (0);")
        .execute(outbox.pool())
        .await?;

    place_order(&outbox, 1, 1_200).await?;
    place_order(&outbox, 2, 300).await?;

    assert_eq!((mail(&outbox).await?, billing(&outbox).await?), (2, 2));
    assert_eq!(revenue(&outbox).await?, 1_500);

    // Each consumer continues from its offset.
    place_order(&outbox, 3, 500).await?;
    assert_eq!(mail(&outbox).await?, 1);
    // How far `billing` is behind. This is cheap, so a backfill can wait while the number is large.
    assert_eq!(outbox.lag("billing").await?, 1);

    // Replay from the start: all three events are delivered, and only the third is new to the inbox.
    let seek = outbox.seek("billing", SeekTo::Earliest, SeekOptions::default()).await?;
    println!("billing goes back to seq {}: {} events are delivered again", seek.to, seek.again);
    assert_eq!(billing(&outbox).await?, 3);
    println!("revenue {}", revenue(&outbox).await?);
    assert_eq!(revenue(&outbox).await?, 2_000);

    for consumer in outbox.consumers().await? {
        println!("{} is at seq {}, {} behind", consumer.name, consumer.offset, consumer.lag_events);
        assert_eq!((consumer.offset, consumer.lag_events), (3, 0));
    }
    Ok(())
}

/// Publishing to a log is the same call as to a queue.
async fn place_order(outbox: &SqliteOutbox, id: i64, total: i64) -> Result<(), Box<dyn Error>> {
    let mut tx = outbox.pool().begin_with("BEGIN IMMEDIATE").await?;
    let event =
        NewEvent::new("shop.orders", "OrderPlaced", "Order", id.to_string()).json(&OrderPlaced { total })?;
    outbox.publish(&mut tx, &event).await?;
    tx.commit().await?;
    Ok(())
}

/// Follows the log as `mail`, to its end. Returns how many events were delivered.
async fn mail(outbox: &SqliteOutbox) -> airtight::Result<u64> {
    let handlers = Dispatcher::new().on("OrderPlaced", |order: OrderPlaced, context: Context| async move {
        println!("mail: order {} over {}", context.event.aggregate_id, order.total);
    });
    let relay = Relay::new(outbox.log(LogOptions::consumer("mail")), handlers);
    // `run` continues until the token is cancelled; `drain` also ends at the end of the log.
    Ok(relay.drain(CancellationToken::new()).await?.delivered)
}

/// Follows the log as `billing`, with effects in the same file.
async fn billing(outbox: &SqliteOutbox) -> airtight::Result<u64> {
    let log = outbox.log(LogOptions::consumer("billing"));
    let handlers = SqliteHandlers::new(outbox, "billing")
        .on::<OrderPlaced, _>("OrderPlaced", |order, _context, conn: &mut SqliteConnection| {
            Box::pin(async move {
                println!("billing: {}", order.total);
                add(conn, order.total).await.map_err(|error| {
                    airtight::Error::retryable(airtight::Code::custom("revenue"), error.to_string())
                })
            })
        })
        .with_log(&log);
    Ok(Relay::new(log, handlers).drain(CancellationToken::new()).await?.delivered)
}

async fn add(conn: &mut SqliteConnection, total: i64) -> sqlx::Result<()> {
    sqlx::query("UPDATE revenue SET total = total + ?").bind(total).execute(conn).await.map(|_| ())
}

async fn revenue(outbox: &SqliteOutbox) -> sqlx::Result<i64> {
    sqlx::query_scalar("SELECT total FROM revenue").fetch_one(outbox.pool()).await
}
