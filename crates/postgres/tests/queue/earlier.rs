//! A queue that relays of an earlier version have read by claiming rows: they are waited for, and their rows taken over.

use airtight_core::{Capabilities, Class, Source, admin::Admin};

use crate::*;

/// The objects of the earlier version, as its migrations left them.
const EARLIER: &str = "
    DROP TRIGGER relay_refuse_claims ON airtight.relay;
    DROP FUNCTION airtight.refuse_claims();
    DROP TABLE airtight.mark;
    ALTER TABLE airtight.outbox DROP COLUMN not_before;
    CREATE INDEX outbox_claim_stream ON airtight.outbox (stream, part, seq) WHERE phase = 0 AND next_retry_at IS NULL;
    CREATE INDEX outbox_waiting_stream ON airtight.outbox (stream, part, next_retry_at, seq)
        WHERE phase = 0 AND next_retry_at IS NOT NULL;
    DELETE FROM airtight.migration WHERE version >= 12;";

/// What the earlier version writes when it joins.
const JOINS: &str = "
    INSERT INTO airtight.relay (id, outbox, grp, host, streams, ord, expires_at)
    VALUES (gen_random_uuid(), 'airtight.outbox', 'key/64:*', 'earlier-host:1', '{}', 'key', now() + interval '1 hour')";

#[tokio::test]
async fn relays_of_an_earlier_version_are_waited_for_and_their_rows_taken_over() {
    let Some(sut) = Canonical::create("q_earlier").await else { return };
    let mut sql = Writer::new(&sut).await;
    sql.run(EARLIER).await;
    let published = sut.publish(&(0..6).map(|n| event(&format!("k{}", n % 2))).collect::<Vec<_>>()).await;
    sql.run(JOINS).await;
    sql.run(
        "UPDATE airtight.outbox SET status = 'processing', claim_token = gen_random_uuid(), attempts = 1,
           locked_until = now() + interval '1 hour' WHERE seq <= 4",
    )
    .await;

    let done = sut.outbox.migrate().await.unwrap();
    assert_eq!(done.len(), 2, "{done:?}");
    assert_eq!(sut.outbox.migrate().await.unwrap(), Vec::<String>::new());
    let gone =
        "SELECT count(*) FROM pg_class WHERE relname IN ('outbox_claim_stream', 'outbox_waiting_stream')";
    assert_eq!(sql.number(gone).await, 0, "no statement needs them");

    let queue = sut.outbox.queue(QueueOptions::default());
    let error = queue.open(&Capabilities::default()).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("earlier_relays", Class::Retryable), "{error}");
    assert!(error.message().contains("earlier-host:1"), "{error}");
    let refused = sqlx::raw_sql(JOINS).execute(sut.outbox.pool()).await.unwrap_err().to_string();
    assert!(refused.contains("airtight.outbox was migrated for a newer airtight"), "{refused}");

    sql.run("DELETE FROM airtight.relay").await;
    let relay = Hand::over(std::sync::Arc::new(queue), Duration::from_secs(15)).await;
    let got = relay.deliver(6).await;
    let mut ids: Vec<&str> = got.iter().map(|d| d.event.id.as_str()).collect();
    ids.sort_unstable();
    let mut expected: Vec<&str> = published.iter().map(|p| p.id.as_str()).collect();
    expected.sort_unstable();
    assert_eq!(ids, expected, "those that were left processing, too");
    for key in ["k0", "k1"] {
        let of_key: Vec<i64> =
            got.iter().filter(|d| d.event.aggregate_id == key).map(|d| d.event.seq).collect();
        assert!(of_key.is_sorted(), "{key}: {of_key:?}");
    }
}
