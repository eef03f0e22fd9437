//! The canonical queue, which relays read without claiming: late commits, rows changed directly in SQL, evictions, earlier
//! versions, plans, and a stress of writers and relays.

#![allow(clippy::unwrap_used, reason = "all of it is test code, its helpers included")]

#[path = "queue/earlier.rs"]
mod earlier;
#[path = "queue/net.rs"]
mod net;
#[path = "queue/stress.rs"]
mod stress;
mod support;
#[path = "queue/traps.rs"]
mod traps;

use std::time::Duration;

use airtight_core::{Delivery, NewEvent, Order, Verdict, queue::QueueOptions};
use airtight_testkit::{
    sources::{Hand, SourceUnderTest},
    wait::eventually,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use support::Canonical;

/// A session that publishes, statement by statement.
struct Writer(PgConnection);

impl Writer {
    async fn new(sut: &Canonical) -> Self {
        Self(PgConnection::connect(&sut.db.url()).await.unwrap())
    }

    async fn run(&mut self, sql: &str) {
        self.0.execute(AssertSqlSafe(sql.to_owned())).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    async fn insert(&mut self, key: &str) -> i64 {
        self.insert_at("DEFAULT", key).await
    }

    async fn insert_at(&mut self, seq: &str, key: &str) -> i64 {
        let sql = format!(
            "INSERT INTO airtight.outbox (seq, stream, event_type, aggregate_type, aggregate_id, payload) \
             VALUES ({seq}, 's', 'T', 'A', '{key}', '{{}}') RETURNING seq"
        );
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut self.0).await.unwrap()
    }

    async fn number(&mut self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&mut self.0).await.unwrap()
    }
}

fn event(key: &str) -> NewEvent {
    NewEvent::new("s", "T", "A", key).json_text("{}")
}

fn seqs(deliveries: &[Delivery]) -> Vec<i64> {
    deliveries.iter().map(|delivery| delivery.event.seq).collect()
}

async fn reader(sut: &Canonical) -> Hand {
    Hand::open(sut, QueueOptions { lease: Duration::from_secs(30), ..QueueOptions::default() }).await
}

/// Two looks find nothing, one of which casts the net.
async fn nothing_comes(reader: &Hand) {
    let begun = std::time::Instant::now();
    eventually(Duration::from_secs(10), "the net to be cast", async || {
        let batch = reader.next(100).await;
        assert!(batch.is_empty(), "{:?} came", seqs(&batch.deliveries));
        begun.elapsed() > Duration::from_millis(1_100)
    })
    .await;
}
