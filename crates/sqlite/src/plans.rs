//! Tests that the statements of the hot path use the indexes made for them.
//!
//! SQLite takes a partial index only when the query implies its predicate literally, and says nothing when it
//! does not: the queue just gets slower with every event that is done.

use std::time::Duration;

use airtight_core::{
    Order,
    admin::{Admin, Filter},
    group::{GroupKind, GroupName, Member},
    queue::ClaimRequest,
    state::State,
    table::Shape,
};
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use crate::{
    SqliteOutbox,
    candidate::{Kind, barrier_statements, select_statement},
    claim::idle_statement,
    hold::free_keys_statement,
    inspect::list_statement,
    log,
    settle::still_held_statement,
    sql::RowField,
};

async fn plan(outbox: &SqliteOutbox, statement: &str) -> String {
    let explain = format!("EXPLAIN QUERY PLAN {statement}");
    let rows = sqlx::query(AssertSqlSafe(explain)).fetch_all(outbox.pool()).await.unwrap();
    rows.iter().map(|row| row.get::<String, _>(3)).collect::<Vec<_>>().join("\n")
}

fn member(order: Order, streams: &[&str], block_on_dead: bool) -> Member {
    Member {
        id: Uuid::nil(),
        host: String::new(),
        group: GroupName::new(GroupKind::Queue, ""),
        streams: streams.iter().map(|stream| (*stream).to_owned()).collect(),
        order,
        block_on_dead,
        lease: Duration::from_secs(1),
        partitions: 64,
    }
}

#[tokio::test]
async fn the_hot_path_uses_its_indexes() {
    let dir = tempfile::TempDir::new().unwrap();
    let outbox = SqliteOutbox::open(dir.path().join("o.db").to_str().unwrap()).await.unwrap();
    outbox.migrate().await.unwrap();
    // With statistics and without: what the planner knows must not change its mind.
    for analysed in [false, true] {
        if analysed {
            let fill = "INSERT INTO airtight_outbox (stream, event_type, aggregate_type, aggregate_id, status, next_retry_at) \
                 WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 5000) \
                 SELECT 's' || i % 3, 'T', 'A', 'k' || i % 50, CASE i % 4 WHEN 0 THEN 'pending' WHEN 1 THEN 'dead' ELSE 'done' END, \
                 CASE i % 8 WHEN 0 THEN '2030' END FROM n; ANALYZE";
            sqlx::raw_sql(fill).execute(outbox.pool()).await.unwrap();
        }
        for order in [Order::None, Order::Key, Order::Total] {
            for streams in [&[][..], &["s1"], &["s1", "s2"]] {
                check(&outbox, &member(order, streams, true)).await;
            }
        }
    }
}

async fn check(outbox: &SqliteOutbox, member: &Member) {
    let sql = outbox.sql();
    let request = ClaimRequest {
        member,
        token: Uuid::nil(),
        events: 1,
        bytes: 1,
        max_payload: 1,
        partitions: &[1, 2],
        tokens: &[],
        alone: false,
    };
    let about = format!("{:?} {:?}", member.order, member.streams);

    let text = plan(outbox, &idle_statement(sql)).await;
    assert!(text.contains("INDEX airtight_outbox_hot"), "{about}: {text}");
    assert!(text.contains("INDEX airtight_outbox_waiting"), "{about}: {text}");

    let text = plan(outbox, &select_statement(sql, &request, Kind::Hot)).await;
    assert!(text.contains("USING INDEX airtight_outbox_hot"), "{about}: {text}");
    assert!(!text.contains("TEMP B-TREE"), "{about} sorts: {text}");
    if member.order == Order::Key {
        assert!(text.contains("INDEX airtight_outbox_waiting (aggregate_id=? AND seq<?)"), "{about}: {text}");
        assert!(text.contains("INDEX airtight_outbox_dead (aggregate_id=? AND seq<?)"), "{about}: {text}");
    }
    let text = plan(outbox, &select_statement(sql, &request, Kind::Due)).await;
    assert!(text.contains("INDEX airtight_outbox_due (next_retry_at<?)"), "{about}: {text}");
    assert!(member.order == Order::Total || !text.contains("TEMP B-TREE"), "{about} sorts: {text}");
    let text = plan(outbox, &select_statement(sql, &request, Kind::Suspect)).await;
    assert!(text.contains("USING INDEX airtight_outbox_suspect"), "{about}: {text}");

    for statement in barrier_statements(sql, member) {
        let text = plan(outbox, &statement).await;
        assert!(text.contains("USING INDEX airtight_outbox_"), "{about}: {text}");
    }
    if member.order == Order::Key {
        let text = plan(outbox, &free_keys_statement(sql, member)).await;
        // The first key, every further one, and the first held event of each.
        assert_eq!(text.matches("INDEX airtight_outbox_held").count(), 3, "{about}: {text}");
        assert!(text.contains("INDEX airtight_outbox_waiting (aggregate_id=? AND seq<?)"), "{about}: {text}");
        assert!(!text.contains("TEMP B-TREE"), "{about} sorts: {text}");
    }
    let dead = Filter { states: vec![State::Dead], ..Filter::default() };
    let text = plan(outbox, &list_statement(sql, &dead)).await;
    assert!(text.contains("USING INDEX airtight_outbox_dead"), "{text}");
    let mut statements = sql.change(sql.role_done(), &[(RowField::ClaimToken, "NULL")]);
    statements.push(still_held_statement(sql));
    for statement in statements {
        let text = plan(outbox, &statement).await;
        assert!(text.contains("SEARCH o USING INTEGER PRIMARY KEY"), "{text}");
    }
}

#[tokio::test]
async fn settling_parked_events_does_not_go_through_all_of_them() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("o.db");
    let outbox = SqliteOutbox::open(path.to_str().unwrap()).await.unwrap().shape(Shape::Log);
    outbox.migrate().await.unwrap();
    for analysed in [false, true] {
        if analysed {
            let fill = "INSERT INTO airtight_parked (outbox, consumer, seq, n, state, next_retry_at, aggregate_id) \
                 WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 5000) \
                 SELECT 'airtight_outbox', 'c' || i % 2, i, 0, 'pending', CASE i % 9 WHEN 0 THEN '2030' END, 'k' || i % 50 \
                 FROM n; ANALYZE";
            sqlx::raw_sql(fill).execute(outbox.pool()).await.unwrap();
        }
        let text = plan(&outbox, &log::change_statement(outbox.sql())).await;
        assert!(text.contains("(outbox=? AND consumer=? AND seq=?)"), "{text}");
        assert!(text.contains("SEARCH p USING INTEGER PRIMARY KEY"), "{text}");
        for statement in log::rule_statements(outbox.sql(), log::OF_KEYS, true) {
            let text = plan(&outbox, &statement).await;
            assert!(text.contains("SEARCH p USING INDEX airtight_parked_key"), "{text}");
            assert!(text.contains("(outbox=? AND consumer=? AND aggregate_id=? AND seq<?)"), "{text}");
        }
    }
}
