//! Which of the two stores serves a table: the canonical one where the table is canonical, the foreign one elsewhere.

use airtight_core::{
    Code, Error, Limits, NewEvent, Op, Order, Settlement, Source, Verdict,
    admin::Admin,
    queue::QueueOptions,
    table::{Field, TableSpec},
};
use airtight_postgres::{PgOptions, PgOutbox};

use crate::{drain, event, support::Canonical};

/// A copy of the canonical table with three events, two of one key; `changed` alters it. Mapped.
async fn copy(sut: &Canonical, changed: &str, spec: TableSpec) -> PgOutbox {
    sut.sql("CREATE SCHEMA shop; CREATE TABLE shop.copy (LIKE airtight.outbox INCLUDING ALL)").await;
    Admin::publish(&sut.outbox, &[event("a", 1), event("a", 2), event("b", 3)]).await.unwrap();
    sut.sql(
        "INSERT INTO shop.copy (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT stream, event_type, aggregate_type, aggregate_id, payload FROM airtight.outbox ORDER BY seq",
    )
    .await;
    sut.sql(changed).await;
    let options = PgOptions { spec: Some(spec), ..PgOptions::default() };
    PgOutbox::connect(&sut.db.url(), options).await.unwrap()
}

fn copied() -> TableSpec {
    TableSpec::canonical(Some("shop"), "copy")
}

/// Fails the first event, and gives the others back; says how many leases were in the side table meanwhile.
async fn leases_beside(outbox: &PgOutbox) -> i64 {
    let queue = outbox.queue(QueueOptions { order: Order::Key, ..QueueOptions::default() });
    queue.open(&airtight_core::Capabilities::default()).await.unwrap();
    let batch = queue.next(Limits { events: 10, bytes: 1 << 20 }).await.unwrap();
    assert_eq!(batch.deliveries.len(), 3);
    let beside = sqlx::query_scalar("SELECT count(*) FROM airtight.side WHERE claim_token IS NOT NULL")
        .fetch_one(outbox.pool())
        .await
        .unwrap();
    let failed = || Verdict::Retry {
        after: std::time::Duration::ZERO,
        error: Error::retryable(Code::custom("x"), "again"),
    };
    let settlements: Vec<Settlement> = batch
        .deliveries
        .iter()
        .enumerate()
        .map(|(n, delivery)| Settlement {
            position: delivery.position,
            verdict: if n == 0 { failed() } else { Verdict::Released },
        })
        .collect();
    assert_eq!(queue.settle(&settlements).await.unwrap().applied, 3);
    queue.close().await.unwrap();
    beside
}

/// Delivers the rest: each event once, those of one key in order.
async fn delivers(outbox: &PgOutbox) {
    let events = drain(outbox, Order::Key).await.events();
    let of = |key: &str| -> Vec<i64> {
        events.iter().filter(|event| event.aggregate_id == key).map(|event| event.seq).collect()
    };
    assert_eq!((of("a"), of("b")), (vec![1, 2], vec![3]));
    let status = outbox.status().await.unwrap();
    assert_eq!((status.streams[0].done, status.streams[0].unexplained), (3, 0));
}

#[tokio::test]
async fn a_copy_of_the_canonical_table_is_canonical() {
    let Some(sut) = Canonical::create("copy").await else { return };
    let outbox = copy(&sut, "SELECT 1", copied()).await;
    assert_eq!(leases_beside(&outbox).await, 0, "the leases are in the table's own columns");
    delivers(&outbox).await;
}

/// Other names, as everybody may have them.
#[tokio::test]
async fn a_renamed_copy_is_foreign() {
    let Some(sut) = Canonical::create("renamed").await else { return };
    let spec = TableSpec {
        next_retry_at: Some("again_at".into()),
        aggregate_id: Field::Column("entity id".into()),
        partition: Some("slot".into()),
        ..copied()
    };
    let renamed = "ALTER TABLE shop.copy RENAME next_retry_at TO again_at; \
                   ALTER TABLE shop.copy RENAME aggregate_id TO \"entity id\"; \
                   ALTER TABLE shop.copy RENAME part TO slot";
    let outbox = copy(&sut, renamed, spec).await;
    assert_eq!(leases_beside(&outbox).await, 3, "the leases are in the side table");
    delivers(&outbox).await;
}

/// The canonical names, but a type that the canonical statements do not know.
#[tokio::test]
async fn a_copy_with_other_types_is_foreign() {
    let Some(sut) = Canonical::create("other_types").await else { return };
    let outbox = copy(&sut, "ALTER TABLE shop.copy ALTER error_message TYPE varchar(3)", copied()).await;
    assert_eq!(leases_beside(&outbox).await, 3, "the leases are in the side table");
    let message: Option<String> = sqlx::query_scalar("SELECT error_message FROM shop.copy WHERE seq = 1")
        .fetch_one(outbox.pool())
        .await
        .unwrap();
    assert_eq!(message.as_deref(), Some("aga"), "cut to what the column takes");
    delivers(&outbox).await;
}

/// The claim on the canonical table names the event's columns itself; everything else asks the mapping for them.
#[tokio::test]
async fn a_claim_reads_the_event_that_show_reads() {
    let Some(sut) = Canonical::create("same_event").await else { return };
    let mut full = NewEvent::new("test", "Tested", "Test", "k").json(&serde_json::json!({"n": 1})).unwrap();
    full.op = Op::Delete;
    full.headers.insert("traceparent".into(), "00-1".into());
    full.schema_version = 7;
    full.max_attempts = Some(3);
    let bytes = NewEvent::new("test", "Tested", "Test", "k").bytes(vec![0, 159, 146, 150]);
    let none = NewEvent::new("test", "Tested", "Test", "k");
    Admin::publish(&sut.outbox, &[full, bytes, none]).await.unwrap();
    for (seq, at) in [(1, "-infinity"), (2, "infinity"), (3, "2026-11-18 01:02:03.456789+00")] {
        sut.sql(&format!("UPDATE airtight.outbox SET occurred_at = '{at}' WHERE seq = {seq}")).await;
    }
    let claimed = drain(&sut.outbox, Order::Key).await.events();
    assert_eq!(claimed.len(), 3);
    for event in claimed {
        let shown = sut.outbox.show(&event.id).await.unwrap().unwrap().event.unwrap();
        assert_eq!(event, shown);
    }
}
