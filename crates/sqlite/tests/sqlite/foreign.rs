//! Tables that are not airtight's.

use airtight_core::{
    Code, Error, Order, Payload, Policy, Relay, Verdict,
    admin::{Acted, Admin, Filter},
    queue::{QueueOptions, QueueStore, RowKey},
    sinks::MemorySink,
    state::State,
    table::{Condition, Count, Field, PayloadKind, Role, StatusSpec, TableSpec, Test},
};
use airtight_sqlite::{SqliteOutbox, SqliteQueue};
use tokio_util::sync::CancellationToken;

use crate::common::{Fixture, Got, Hand, dead, event, member, retry};

/// A table without an ascending column, a lease, a retry time, a count or a word for processing.
fn legacy_spec() -> TableSpec {
    let mut spec = TableSpec::canonical(None, "legacy_outbox");
    spec.identity = "id".into();
    spec.seq = None;
    spec.stream = Field::Column("topic".into());
    spec.event_type = Field::Column("kind".into());
    spec.aggregate_type = Field::Column("entity".into());
    spec.aggregate_id = Field::Column("entity_id".into());
    (spec.op, spec.headers, spec.payload_bytes) = (None, None, None);
    (spec.payload, spec.payload_kind) = ("body".into(), PayloadKind::JsonText);
    (spec.occurred_at, spec.schema_version, spec.max_attempts) = (None, None, None);
    spec.status = Some(StatusSpec {
        column: "state".into(),
        new: Role::word("NEW"),
        retrying: Role::word("NEW"),
        processing: None,
        done: Role::word("SENT"),
        dead: Role::word("FAILED"),
        unknown: None,
    });
    spec.count = None;
    (spec.next_retry_at, spec.locked_until, spec.claim_token) = (None, None, None);
    (spec.lost_leases, spec.error_code, spec.error_message) = (None, None, None);
    (spec.finished_at, spec.last_attempt_at, spec.partition, spec.phase) = (None, None, None, None);
    spec
}

pub(crate) async fn legacy() -> (Fixture, SqliteOutbox) {
    let fixture = Fixture::empty().await;
    fixture
        .exec(
            "CREATE TABLE legacy_outbox (id TEXT PRIMARY KEY, created_at TEXT, topic TEXT, kind TEXT, entity TEXT, \
             entity_id TEXT, body TEXT, state TEXT)",
        )
        .await;
    let outbox = fixture.outbox.clone().spec(legacy_spec());
    outbox.migrate().await.unwrap();
    (fixture, outbox)
}

async fn insert(fixture: &Fixture, rows: &[(&str, &str)]) {
    for (at, (id, key)) in rows.iter().enumerate() {
        fixture
            .exec(&format!(
                "INSERT INTO legacy_outbox VALUES ('{id}', '2024-01-01 00:00:{at:02}', 't', 'K', 'E', '{key}', '{{}}', 'NEW')"
            ))
            .await;
    }
}

fn ids(got: &Got) -> Vec<&str> {
    let rows = got.claimed.rows.iter();
    rows.map(|row| match &row.key {
        RowKey::Text(text) => text.as_str(),
        RowKey::Int(_) => panic!("ids are text"),
    })
    .collect()
}

#[tokio::test]
async fn a_table_without_lease_or_retry_columns_is_a_queue() {
    for order in [Order::None, Order::Key, Order::Total] {
        let (fixture, outbox) = legacy().await;
        insert(&fixture, &[("z", "a"), ("y", "b"), ("x", "c"), ("w", "d"), ("v", "e")]).await;
        let mut relay = Hand::join(&outbox, member(order)).await;
        let got = relay.claim(10).await;
        assert_eq!(ids(&got), ["z", "y", "x", "w", "v"], "{order:?}: by creation, not by id");
        assert!(relay.claim(10).await.claimed.rows.is_empty(), "the side table knows that they are claimed");
        let first = got.claimed.rows[0].event.as_ref().unwrap();
        assert_eq!((first.stream.as_str(), first.aggregate_id.as_str()), ("t", "a"));
        assert_eq!(first.payload, Payload::Json("{}".into()));
        assert_eq!(first.occurred_at.to_string(), "2024-01-01 0:00:00.0 +00:00:00");

        let unknown = Verdict::Unknown { error: Error::retryable(Code::custom("lost"), "who knows") };
        for (index, verdict) in
            [Verdict::Delivered, dead(), unknown, Verdict::Released, retry()].into_iter().enumerate()
        {
            assert!(relay.settle_one(&got, index, verdict).await);
        }
        assert_eq!(fixture.text("SELECT group_concat(id || state, ' ') FROM (SELECT * FROM legacy_outbox ORDER BY id DESC)").await, "zSENT yFAILED xFAILED wNEW vNEW");
        assert_eq!(
            fixture.text("SELECT count(*) FROM airtight_side WHERE event = 'z'").await,
            "0",
            "forgotten when done"
        );
        let again = relay.claim(10).await;
        assert_eq!((ids(&again), again.claimed.rows[0].attempt), (vec!["w"], 1));

        let states: Vec<String> =
            outbox.list(&Filter::default()).await.unwrap().into_iter().map(|row| row.state).collect();
        assert_eq!(states, ["done", "dead", "unknown", "processing", "pending"]);
        assert_eq!(
            outbox.list(&Filter { states: vec![State::Dead], ..Filter::default() }).await.unwrap().len(),
            1
        );
        assert_eq!(outbox.retry("w").await.unwrap(), Acted::Refused(State::Processing));
        assert_eq!(outbox.retry_dead(&Filter::default()).await.unwrap(), 1, "never unknown ones");
        assert_eq!(outbox.retry("v").await.unwrap(), Acted::Yes);
        let status = outbox.status().await.unwrap();
        assert_eq!((status.streams[0].unknown, status.streams[0].dead, status.streams[0].pending), (1, 0, 2));
        assert_eq!(relay.store.backlog(&relay.member).await.unwrap().unfinished, 3);
        let rest = relay.claim(10).await;
        assert_eq!((ids(&rest), rest.claimed.rows[0].attempt), (vec!["y", "v"], 1));
    }
}

#[tokio::test]
async fn key_order_holds_in_a_table_without_our_columns() {
    let (fixture, outbox) = legacy().await;
    insert(&fixture, &[("5", "a"), ("4", "a"), ("3", "b"), ("2", "a")]).await;
    let mut relay = Hand::join(&outbox, member(Order::Key)).await;
    let first = relay.claim(1).await;
    assert_eq!(ids(&first), ["5"]);
    relay.settle(&first, retry()).await;
    let others = relay.claim(10).await;
    assert_eq!(ids(&others), ["3"]);
    assert_eq!(relay.unhold().await, 0);
    assert_eq!(outbox.blocked(10).await.unwrap()[0].held, 2);
    fixture
        .exec("UPDATE airtight_side SET next_retry_at = '2000-01-01T00:00:00.000Z' WHERE event = '5'")
        .await;
    let head = relay.claim(10).await;
    assert_eq!((ids(&head), head.claimed.rows[0].attempt), (vec!["5"], 2));
    relay.settle(&head, Verdict::Delivered).await;
    assert_eq!(relay.unhold().await, 2);
    assert_eq!(ids(&relay.claim(10).await), ["4", "2"]);
}

#[tokio::test]
async fn its_rows_are_taken_over_and_suspected_too() {
    for order in [Order::None, Order::Key, Order::Total] {
        let (fixture, outbox) = legacy().await;
        insert(&fixture, &[("1", "a"), ("2", "b")]).await;
        for lost in 0..3 {
            let mut relay = Hand::join(&outbox, member(order)).await;
            let got = relay.claim(1).await;
            assert_eq!((ids(&got), got.claimed.rows[0].lost_leases), (vec!["1"], lost));
            fixture.exec("UPDATE airtight_side SET locked_until = '2000'").await;
            relay.store.members().leave(&relay.member).await.unwrap();
        }
        let mut relay = Hand::join(&outbox, member(order)).await;
        let got = relay.claim(1).await;
        assert!(got.claimed.suspects);
        relay.settle(&got, Verdict::Delivered).await;
        let alone = relay.claim_alone().await;
        assert_eq!((ids(&alone), alone.claimed.rows[0].attempt), (vec!["1"], 1));
    }
}

#[tokio::test]
async fn a_word_that_nobody_explained_is_left_alone() {
    let (fixture, outbox) = legacy().await;
    insert(&fixture, &[("1", "a")]).await;
    fixture.exec("UPDATE legacy_outbox SET state = 'CANCELLED'").await;
    let mut relay = Hand::join(&outbox, member(Order::Key)).await;
    assert!(relay.claim(10).await.claimed.rows.is_empty());
    assert_eq!(outbox.list(&Filter::default()).await.unwrap()[0].state, "CANCELLED");
    assert_eq!(outbox.retry("1").await.unwrap_err().code(), "bad_status");
    assert_eq!(outbox.discard("1").await.unwrap_err().code(), "bad_status");
}

#[tokio::test]
async fn a_dead_event_blocks_its_key_there_too() {
    let (fixture, outbox) = legacy().await;
    insert(&fixture, &[("1", "a"), ("2", "a"), ("3", "b")]).await;
    let mut member = member(Order::Key);
    member.block_on_dead = true;
    let mut relay = Hand::join(&outbox, member).await;
    let first = relay.claim(1).await;
    relay.settle(&first, dead()).await;
    assert_eq!(ids(&relay.claim(10).await), ["3"]);
    assert_eq!(relay.unhold().await, 0);
    assert_eq!(relay.store.backlog(&relay.member).await.unwrap().blocked, 1);
    assert_eq!(outbox.discard("1").await.unwrap(), Acted::Yes);
    assert_eq!(relay.unhold().await, 1);
    assert_eq!(ids(&relay.claim(10).await), ["2"]);
}

#[tokio::test]
async fn publishing_goes_to_the_table_it_is_told() {
    let (fixture, outbox) = legacy().await;
    let mut conn = outbox.pool().acquire().await.unwrap();
    let published = outbox.publish(&mut conn, &event("a")).await.unwrap();
    assert_eq!((published.is_new, published.seq), (true, 0));
    assert_eq!(
        fixture.text("SELECT topic || state || body FROM legacy_outbox").await,
        "shop.ordersNEW{\"key\":\"a\"}"
    );
    let error = outbox.publish(&mut conn, &event("a").header("h", "v")).await.unwrap_err();
    assert!(error.message().contains("headers"), "{error}");
}

#[tokio::test]
async fn text_that_is_not_json_is_a_bad_row() {
    let (fixture, outbox) = legacy().await;
    insert(&fixture, &[("1", "a"), ("2", "b")]).await;
    fixture.exec("UPDATE legacy_outbox SET body = '{oops' WHERE id = '1'").await;
    let mut relay = Hand::join(&outbox, member(Order::Key)).await;
    let got = relay.claim(10).await;
    assert_eq!(got.claimed.rows[0].event.as_ref().unwrap_err().error.code(), "bad_payload");
    assert!(got.claimed.rows[1].event.is_ok());
}

#[tokio::test]
async fn check_says_which_columns_are_missing() {
    let (_fixture, outbox) = legacy().await;
    let findings = outbox.check().await.unwrap();
    assert!(findings.iter().all(|finding| !finding.fatal), "{findings:?}");
    assert!(findings.iter().any(|finding| finding.message.contains("no ascending column")));
    let mut spec = legacy_spec();
    (spec.payload, spec.headers) = ("boddy".into(), Some("heads".into()));
    let outbox = outbox.spec(spec);
    let findings = outbox.check().await.unwrap();
    assert!(findings[0].fatal && findings[0].message.contains("boddy, heads"), "{findings:?}");
    let error = SqliteQueue::new(outbox).open().await.unwrap_err();
    assert_eq!(error.code(), "bad_table");
    let mut spec = legacy_spec();
    spec.status = None;
    let outbox = _fixture.outbox.clone().spec(spec);
    // Without a status it could only be a log, and for that it lacks an ascending column.
    assert!(outbox.check().await.unwrap()[0].message.contains("no ascending column"));
    let error = SqliteQueue::new(outbox).open().await.unwrap_err();
    assert!(error.message().contains("no status column"), "{error}");
}

#[tokio::test]
async fn one_word_serves_two_roles_and_retries_are_counted() {
    let fixture = Fixture::empty().await;
    fixture
        .exec(
            "CREATE TABLE work (n INTEGER PRIMARY KEY, key TEXT, body TEXT, state TEXT NOT NULL DEFAULT 'pending', \
             retry_count INTEGER NOT NULL DEFAULT 0, last_error TEXT, updated_at TEXT)",
        )
        .await;
    let mut spec = legacy_spec();
    spec.table = "work".into();
    (spec.identity, spec.id, spec.seq, spec.created_at) = ("n".into(), "n".into(), Some("n".into()), None);
    (spec.stream, spec.event_type) = (Field::Constant("work".into()), Field::Constant("Work".into()));
    (spec.aggregate_type, spec.aggregate_id) = (Field::Constant("Item".into()), Field::Column("key".into()));
    let spent = |test| Condition { column: "retry_count".into(), test, value: 3 };
    spec.status = Some(StatusSpec {
        column: "state".into(),
        new: Role::word("pending"),
        retrying: Role::when("failed", spent(Test::Less)),
        processing: Some(Role::word("processing")),
        done: Role::word("done"),
        dead: Role::when("failed", spent(Test::AtLeast)),
        unknown: None,
    });
    spec.count = Some(Count::Retries("retry_count".into()));
    (spec.error_message, spec.updated_at) = (Some("last_error".into()), Some("updated_at".into()));
    let outbox = fixture.outbox.clone().spec(spec);
    outbox.migrate().await.unwrap();
    fixture.exec("INSERT INTO work (key, body) VALUES ('a', '1'), ('b', '2')").await;

    // A relay that would try more often than the words allow does not start.
    let policy = Policy { max_attempts: 4, ..Policy::default() };
    let relay = Relay::new(outbox.queue(QueueOptions::default()), MemorySink::new()).policy(policy);
    let error = relay.drain(CancellationToken::new()).await.unwrap_err();
    assert!(error.code() == "bad_status_words" && error.message().contains("max_attempts = 4"), "{error}");

    let mut relay = Hand::join(&outbox, member(Order::Key)).await;
    let got = relay.claim(10).await;
    assert_eq!((got.seqs(), got.claimed.rows[0].attempt), (vec![1, 2], 1));
    assert_eq!(
        fixture.text("SELECT group_concat(state || retry_count) FROM work").await,
        "processing0,processing0"
    );
    relay.settle_one(&got, 0, retry()).await;
    relay.settle_one(&got, 1, dead()).await;
    assert_eq!(
        fixture.text("SELECT group_concat(state || retry_count || last_error) FROM work").await,
        "failed1no answer,failed3never"
    );
    fixture.exec("UPDATE airtight_side SET next_retry_at = NULL").await;
    let again = relay.claim(10).await;
    assert_eq!((again.seqs(), again.claimed.rows[0].attempt), (vec![1], 2));
    relay.settle(&again, Verdict::Released).await;
    assert_eq!(fixture.text("SELECT state || retry_count FROM work WHERE n = 1").await, "failed1");
    assert_eq!(outbox.retry("2").await.unwrap(), Acted::Yes);
    assert_eq!(fixture.text("SELECT state || retry_count FROM work WHERE n = 2").await, "pending0");
    assert_ne!(fixture.text("SELECT updated_at FROM work WHERE n = 2").await, "NULL");
    assert_eq!(relay.claim(10).await.seqs(), [1, 2]);
}
