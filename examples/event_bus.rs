//! One service and its handlers, connected by PostgreSQL's outbox or by Kafka.
//!
//! ```sh
//! export DATABASE_URL=postgres://app@localhost/shop KAFKA=localhost:9092
//! cargo run -p airtight --features kafka --example event_bus -- postgres
//! cargo run -p airtight --features kafka --example event_bus -- kafka
//! ```
//!
//! `Orders` publishes through an `EventBus`, and `handlers` are a sink for any source: neither changes. Only the promise
//! changes. One of three orders is rolled back. With the outbox its event never existed. With Kafka alone its event is
//! published and handled nevertheless.

use std::{env, error::Error, sync::Arc};

use airtight::{
    CancellationToken, EventBus, NewEvent, Relay, Source,
    admin::Admin,
    kafka::{KafkaConfig, KafkaSink, KafkaSource, KafkaSourceConfig, NonAtomicKafkaBus},
    postgres::{PgHandlers, PgOptions, PgOutbox},
    queue::QueueOptions,
};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;

#[derive(Serialize, Deserialize)]
struct OrderPlaced {
    total: i64,
}

/// The domain, which knows its tables and a bus.
struct Orders {
    bus: Arc<dyn EventBus<PgConnection>>,
}

impl Orders {
    async fn place(&self, tx: &mut PgConnection, total: i64) -> Result<(), Box<dyn Error>> {
        let id: i64 = sqlx::query_scalar("INSERT INTO orders (total) VALUES ($1) RETURNING id")
            .bind(total)
            .fetch_one(&mut *tx)
            .await?;
        let event = NewEvent::new("shop.orders", "OrderPlaced", "Order", id.to_string());
        self.bus.publish(tx, &event.json(&OrderPlaced { total })?).await?;
        Ok(())
    }
}

/// Each event has its effect once, however often it is delivered: the handler's transaction contains the inbox's row.
fn handlers(outbox: &PgOutbox) -> PgHandlers {
    PgHandlers::new(outbox, "billing").on(
        "OrderPlaced",
        |order: OrderPlaced, context, tx: &mut PgConnection| {
            Box::pin(async move {
                println!("order {} over {}", context.event.aggregate_id, order.total);
                sqlx::query("UPDATE revenue SET total = total + $1").bind(order.total).execute(tx).await?;
                Ok(())
            })
        },
    )
}

/// What connects the service and its handlers.
async fn wiring(
    word: &str,
    outbox: &PgOutbox,
    brokers: &str,
) -> Result<(Arc<dyn EventBus<PgConnection>>, Arc<dyn Source>), Box<dyn Error>> {
    match word {
        "postgres" => Ok((Arc::new(outbox.clone()), Arc::new(outbox.queue(QueueOptions::default())))),
        "kafka" => {
            let sink = KafkaConfig::from_url(&format!("kafka://{brokers}/{{stream}}?create=true"))?;
            let source = format!("kafka://{brokers}/shop.orders?group=billing&create=true");
            let bus = NonAtomicKafkaBus::open(KafkaSink::new(sink)?).await?;
            Ok((Arc::new(bus), Arc::new(KafkaSource::new(KafkaSourceConfig::from_url(&source)?)?)))
        }
        other => Err(format!("`{other}` is neither `postgres` nor `kafka`").into()),
    }
}

/// Returns by how much the revenue has grown.
pub async fn run(word: &str, database: &str, brokers: &str) -> Result<i64, Box<dyn Error>> {
    let outbox = PgOutbox::connect(database, PgOptions::default()).await?;
    outbox.migrate().await?;
    sqlx::raw_sql(
        "CREATE TABLE IF NOT EXISTS orders (id bigserial PRIMARY KEY, total bigint NOT NULL);
         CREATE TABLE IF NOT EXISTS revenue (total bigint NOT NULL);
         INSERT INTO revenue SELECT 0 WHERE NOT EXISTS (SELECT FROM revenue);",
    )
    .execute(outbox.pool())
    .await?;
    let before = revenue(&outbox).await?;

    let (bus, source) = wiring(word, &outbox, brokers).await?;
    let orders = Orders { bus };
    for (total, commit) in [(1_200, true), (9_999, false), (300, true)] {
        let mut tx = outbox.pool().begin().await?;
        orders.place(&mut tx, total).await?;
        if commit { tx.commit().await? } else { tx.rollback().await? }
    }

    let relay = Relay::from_parts(source, Arc::new(handlers(&outbox)));
    // `run` continues until the token is cancelled; `drain` also ends when nothing is left to deliver.
    let summary = relay.drain(CancellationToken::new()).await?;
    let grown = revenue(&outbox).await? - before;
    println!("{} delivered, revenue has grown by {grown}", summary.delivered);
    Ok(grown)
}

async fn revenue(outbox: &PgOutbox) -> sqlx::Result<i64> {
    sqlx::query_scalar("SELECT total FROM revenue").fetch_one(outbox.pool()).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let word = env::args().nth(1).ok_or("say `postgres` or `kafka`")?;
    let brokers = env::var("KAFKA").unwrap_or_else(|_| "localhost:9092".into());
    let grown = run(&word, &env::var("DATABASE_URL")?, &brokers).await?;
    // 1,500 were committed.
    assert_eq!(grown, if word == "postgres" { 1_500 } else { 11_499 });
    Ok(())
}
