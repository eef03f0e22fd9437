//! Opening files and migrating them.

use airtight_core::{Class, Order, admin::Admin, queue::QueueStore};
use airtight_sqlite::{SqliteOutbox, SqliteQueue};
use sqlx::AssertSqlSafe;
use tempfile::TempDir;

use crate::common::{Fixture, event, member};

#[tokio::test]
async fn ten_processes_migrate_at_once() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("new.db");
    let path = path.to_str().unwrap();
    let all = (0..10).map(|_| async {
        let outbox = SqliteOutbox::open(path).await.unwrap();
        let did = outbox.migrate().await.unwrap();
        outbox.pool().close().await;
        did.len()
    });
    let did = futures::future::join_all(all).await;
    assert_eq!(did.iter().filter(|count| **count > 0).count(), 1, "one of them did it: {did:?}");
    let outbox = SqliteOutbox::open(path).await.unwrap();
    assert!(outbox.check().await.unwrap().is_empty());
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(outbox.pool()).await.unwrap();
    let synchronous: i64 = sqlx::query_scalar("PRAGMA synchronous").fetch_one(outbox.pool()).await.unwrap();
    assert_eq!((mode.as_str(), synchronous), ("wal", 2));
}

#[tokio::test]
async fn a_newer_schema_is_refused() {
    let fixture = Fixture::new().await;
    fixture.exec("UPDATE airtight_meta SET value = 99 WHERE name = 'schema'").await;
    let store = SqliteQueue::new(fixture.outbox.clone());
    for error in [fixture.outbox.migrate().await.unwrap_err(), store.open().await.unwrap_err()] {
        assert_eq!((error.code(), error.class()), ("schema_too_new", Class::Permanent));
        assert!(error.to_string().contains("99") && error.to_string().contains("upgrade"), "{error}");
    }
}

#[tokio::test]
async fn the_printed_sql_is_what_migrate_does() {
    let fixture = Fixture::new().await;
    let printed = Fixture::empty().await;
    sqlx::raw_sql(AssertSqlSafe(SqliteOutbox::migration_sql(airtight_core::table::Shape::Queue)))
        .execute(printed.outbox.pool())
        .await
        .unwrap();
    assert!(printed.outbox.migrate().await.unwrap().is_empty());
    let schema = "SELECT group_concat(sql, ';') FROM (SELECT sql FROM sqlite_schema ORDER BY name)";
    assert_eq!(printed.text(schema).await, fixture.text(schema).await);
}

#[tokio::test]
async fn a_file_without_tables_says_to_migrate() {
    let fixture = Fixture::empty().await;
    let store = SqliteQueue::new(fixture.outbox.clone());
    let mut conn = fixture.outbox.pool().acquire().await.unwrap();
    let errors = [
        store.open().await.unwrap_err(),
        store.members().join(&member(Order::Key)).await.unwrap_err(),
        fixture.outbox.publish(&mut conn, &event("a")).await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.class(), Class::Permanent);
        assert!(error.to_string().contains("airtight migrate"), "{error}");
    }
    let findings = fixture.outbox.check().await.unwrap();
    assert!(findings[0].fatal && findings[0].to_string().contains("airtight migrate"));
}

#[tokio::test]
async fn every_way_to_name_a_file_opens_the_same() {
    let fixture = Fixture::new().await;
    fixture.publish(&["a"]).await;
    let path = fixture.path();
    for url in [path.clone(), format!("sqlite:{path}"), format!("sqlite://{path}")] {
        let outbox = SqliteOutbox::open(&url).await.unwrap();
        assert_eq!(outbox.status().await.unwrap().streams[0].pending, 1, "{url}");
    }
}

#[tokio::test]
async fn what_cannot_be_opened_is_named() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("missing/outbox.db");
    let error = SqliteOutbox::open(path.to_str().unwrap()).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("cannot_open", Class::Permanent));
    assert!(
        error.message().contains("missing/outbox.db") && error.message().contains("directory"),
        "{error}"
    );

    let error = SqliteOutbox::open("sqlite::memory:").await.unwrap_err();
    assert_eq!(error.code(), "no_file");

    let text = dir.path().join("notes.txt");
    std::fs::write(&text, "this is not a database, and long enough to be seen as none").unwrap();
    let error = SqliteOutbox::open(text.to_str().unwrap()).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("corrupt", Class::Permanent));
}

#[tokio::test]
async fn a_locked_database_is_busy_not_broken() {
    let fixture = Fixture::new().await;
    let options = fixture.outbox.pool().connect_options().as_ref().clone();
    let pool = sqlx::sqlite::SqlitePoolOptions::new()
        .connect_with(options.busy_timeout(std::time::Duration::from_millis(1)))
        .await
        .unwrap();
    let impatient = SqliteOutbox::with_pool(pool, fixture.outbox.table().clone());
    let tx = fixture.outbox.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    let error = Admin::publish(&impatient, &[event("a")]).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("locked", Class::Retryable));
    tx.rollback().await.unwrap();
    Admin::publish(&impatient, &[event("a")]).await.unwrap();
}

/// Drops each table, index and trigger in turn.
#[tokio::test]
async fn whatever_is_dropped_is_named_and_made_again() {
    for fixture in [Fixture::new().await, Fixture::log().await] {
        let schema = "SELECT group_concat(sql, ';') FROM (SELECT sql FROM sqlite_schema ORDER BY name)";
        let whole = fixture.text(schema).await;
        let objects: Vec<(String, String)> = sqlx::query_as(
            "SELECT type, name FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite%'",
        )
        .fetch_all(fixture.outbox.pool())
        .await
        .unwrap();
        for (kind, name) in objects {
            if name == "airtight_meta" {
                continue;
            }
            fixture.exec(&format!("DROP {kind} {name}")).await;
            let findings = fixture.outbox.check().await.unwrap();
            let named = |finding: &airtight_core::admin::Finding| {
                finding.message.contains(&name)
                    && finding.remedy.as_deref().is_some_and(|remedy| remedy.contains("airtight migrate"))
            };
            assert!(
                findings.iter().any(|one| named(one) && one.fatal == (kind == "table")),
                "{name}: {findings:?}"
            );
            let did = fixture.outbox.migrate().await.unwrap();
            assert!(did.iter().any(|line| line.contains(&name)), "{name}: {did:?}");
            assert_eq!(fixture.text(schema).await, whole, "{name}");
            assert!(fixture.outbox.migrate().await.unwrap().is_empty());
            assert!(fixture.outbox.check().await.unwrap().is_empty());
        }
        // Not even what was made is known.
        fixture.exec("DROP TABLE airtight_meta; DROP TABLE airtight_relay").await;
        fixture.outbox.migrate().await.unwrap();
        assert_eq!(fixture.text(schema).await, whole);
    }
}

/// What was in the table is gone; no number comes again, and a consumer that had not seen all of it is told.
#[tokio::test]
async fn a_log_that_was_dropped_goes_on_behind_its_consumers() {
    use airtight_core::log::LogAdmin;
    let fixture = Fixture::log().await;
    fixture.publish(&["a"; 8]).await;
    for (consumer, seq) in [("ahead", 8), ("behind", 5)] {
        let insert = "INSERT INTO airtight_consumer (outbox, name, partitions) VALUES ('airtight_outbox', '{}', 1); \
             INSERT INTO airtight_offset (outbox, consumer, n, last_seq) VALUES ('airtight_outbox', '{}', 0, ";
        fixture.exec(&format!("{}{seq})", insert.replace("{}", consumer))).await;
    }
    fixture.exec("DROP TABLE airtight_outbox").await;
    let did = fixture.outbox.migrate().await.unwrap();
    assert!(did.iter().any(|line| line.contains("airtight_outbox") && line.contains("gone")), "{did:?}");
    assert_eq!(fixture.publish(&["a"]).await, [9]);
    let consumers = fixture.outbox.consumers().await.unwrap();
    let behind: Vec<(&str, bool)> =
        consumers.iter().map(|one| (one.name.as_str(), one.behind_retention)).collect();
    assert_eq!(behind, [("ahead", false), ("behind", true)]);
}

/// The number that AUTOINCREMENT keeps is no more than a lower bound: SQLite looks at the table as well.
#[tokio::test]
async fn numbers_that_are_set_back_clash_with_nothing() {
    for fixture in [Fixture::new().await, Fixture::log().await] {
        fixture.publish(&["a"; 8]).await;
        fixture.exec("UPDATE sqlite_sequence SET seq = 3").await;
        assert_eq!(fixture.publish(&["b", "c"]).await, [9, 10]);
    }
}

#[tokio::test]
async fn what_no_relay_could_deliver_is_refused() {
    let insert = |payload: &str, bytes: &str, headers: &str| {
        format!(
            "INSERT INTO airtight_outbox (stream, event_type, aggregate_type, aggregate_id, payload, payload_bytes, headers) \
             VALUES ('s', 'T', 'A', 'k', {payload}, {bytes}, {headers})"
        )
    };
    let json = |bytes: usize| format!("json_quote(printf('%.*c', {}, 'x'))", bytes - 2);
    let limit = airtight_core::event::MAX_PAYLOAD_BYTES;
    for fixture in [Fixture::new().await, Fixture::log().await] {
        let refused = async |sql: String| {
            let error = sqlx::raw_sql(AssertSqlSafe(sql)).execute(fixture.outbox.pool()).await.unwrap_err();
            error.as_database_error().unwrap().message().to_owned()
        };
        for headers in [r#"'{"n":1}'"#, r#"'{"n":null}'"#, r#"'{"a":"b","n":["x"]}'"#, "'[]'", "'nonsense'"] {
            let sql = insert("'{}'", "NULL", headers);
            for sql in [
                sql.clone(),
                sql.replace("INSERT", "INSERT OR IGNORE"),
                format!("{sql} ON CONFLICT DO NOTHING"),
            ] {
                assert!(refused(sql).await.contains("headers must be a JSON object of strings"), "{headers}");
            }
        }
        for sql in [
            insert(&json(limit + 1), "NULL", "'{}'"),
            insert("NULL", &format!("zeroblob({})", limit + 1), "'{}'"),
        ] {
            assert!(refused(sql).await.contains("16777216"));
        }
        for sql in [
            insert(&json(limit), "NULL", r#"'{"a":"b"}'"#),
            insert("NULL", &format!("zeroblob({limit})"), "'{}'"),
        ] {
            fixture.exec(&sql).await;
        }
        assert_eq!(fixture.text("SELECT count(*) FROM airtight_outbox").await, "2");
    }
}
