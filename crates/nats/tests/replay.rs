//! Replays: what was asked for again arrives again, what was only repeated does not.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::{
    Delivery, NewEvent, Outcome, Relay, Sink,
    admin::Admin,
    log::{LogAdmin, LogOptions, SeekOptions, SeekTo},
    relay::Summary,
};
use airtight_nats::NatsSink;
use airtight_sqlite::SqliteOutbox;
use airtight_testkit::brokers::nats::NatsServer;
use async_nats::jetstream::Context;
use async_trait::async_trait;
use support::{config, create_stream, jetstream, orders, sink, stored};
use tokio_util::sync::CancellationToken;

const C: &str = "shop";

async fn log_of(events: usize) -> (tempfile::TempDir, SqliteOutbox) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shop.db");
    let outbox = SqliteOutbox::open(path.to_str().unwrap()).await.unwrap();
    let outbox = outbox.shape(airtight_core::table::Shape::Log);
    outbox.migrate().await.unwrap();
    publish(&outbox, 0..events).await;
    (directory, outbox)
}

async fn publish(outbox: &SqliteOutbox, numbers: std::ops::Range<usize>) {
    let event =
        |n| NewEvent::new("shop.orders", "OrderPlaced", "Order", format!("k{}", n % 7)).json(&n).unwrap();
    Admin::publish(outbox, &numbers.map(event).collect::<Vec<_>>()).await.unwrap();
}

async fn drain(outbox: &SqliteOutbox, sink: impl Sink) -> Summary {
    let source = outbox.log(LogOptions::consumer(C));
    Relay::new(source, sink).drain(CancellationToken::new()).await.unwrap()
}

async fn seek(outbox: &SqliteOutbox, to: SeekTo) {
    outbox.seek(C, to, SeekOptions::default()).await.unwrap();
}

async fn purge(jetstream: &Context) {
    jetstream.get_stream("ORDERS").await.unwrap().purge().await.unwrap();
}

/// Delivers, and says that nobody answered: as if the relay had been killed between the publish and the settle.
struct Forgetful(NatsSink);

#[async_trait]
impl Sink for Forgetful {
    async fn open(&self) -> airtight_core::Result<()> {
        self.0.open().await
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        self.0.deliver(batch).await;
        let gone =
            airtight_core::Error::permanent(airtight_core::Code::custom("killed"), "the relay is gone");
        batch.iter().map(|_| Outcome::Failed(gone.clone())).collect()
    }
}

/// Runs a relay that stops with its first batch delivered and nothing settled.
async fn crash(outbox: &SqliteOutbox, sink: NatsSink) {
    let mut options = LogOptions::consumer(C);
    options.on_failure = airtight_core::log::OnFailure::Halt;
    let ended = Relay::new(outbox.log(options), Forgetful(sink)).run(CancellationToken::new()).await;
    assert!(ended.is_err(), "{ended:?}");
}

#[tokio::test]
async fn a_replay_into_a_stream_that_was_purged_fills_it_again() {
    let name = "a_replay_into_a_stream_that_was_purged_fills_it_again";
    let Some(server) = NatsServer::start(name).await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, orders()).await;
    let (_directory, outbox) = log_of(100).await;
    let summary = drain(&outbox, sink(config(&server.address()))).await;
    assert_eq!((summary.delivered, summary.duplicates), (100, 0));
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 100);
    // Twice: the second replay is not the first.
    for _ in 0..2 {
        purge(&jetstream).await;
        seek(&outbox, SeekTo::Earliest).await;
        let summary = drain(&outbox, sink(config(&server.address()))).await;
        assert_eq!((summary.delivered, summary.duplicates), (100, 0));
        assert_eq!(
            stored(&jetstream, "ORDERS").await.len(),
            100,
            "well within the two minutes of the window"
        );
    }
}

#[tokio::test]
async fn a_crash_between_publish_and_settle_leaves_one_message_each_also_in_a_replay() {
    let name = "a_crash_between_publish_and_settle_leaves_one_message_each_also_in_a_replay";
    let Some(server) = NatsServer::start(name).await else { return };
    let jetstream = jetstream(&server.address(), None).await;
    create_stream(&jetstream, orders()).await;
    let (_directory, outbox) = log_of(20).await;
    crash(&outbox, sink(config(&server.address()))).await;
    let before = stored(&jetstream, "ORDERS").await.len();
    assert!(before > 0, "some were published");
    let summary = drain(&outbox, sink(config(&server.address()))).await;
    assert_eq!((summary.delivered, summary.duplicates), (20, before as u64), "the repeats are counted");
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 20);

    purge(&jetstream).await;
    seek(&outbox, SeekTo::Earliest).await;
    crash(&outbox, sink(config(&server.address()))).await;
    let before = stored(&jetstream, "ORDERS").await.len();
    assert!(before > 0, "some were published again");
    // New ones behind the replay, of which a crash repeats some as well.
    publish(&outbox, 20..30).await;
    let summary = drain(&outbox, sink(config(&server.address()))).await;
    assert_eq!((summary.delivered, summary.duplicates), (30, before as u64));
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 30, "one message each");
    publish(&outbox, 30..35).await;
    crash(&outbox, sink(config(&server.address()))).await;
    drain(&outbox, sink(config(&server.address()))).await;
    assert_eq!(stored(&jetstream, "ORDERS").await.len(), 35, "what is new after a replay is no part of it");
}
