//! Objects that were dropped: `check` names them, and `migrate` creates them again and reports what is lost.

use airtight_core::{
    Capabilities, NewEvent, Source, admin::Admin, log::LogOptions, queue::QueueOptions, table::Shape,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{Fixture, event};

struct Made {
    _db: TestDb,
    outbox: PgOutbox,
    pool: PgPool,
}

impl Made {
    async fn create(name: &str, shape: Shape) -> Option<Self> {
        let db = TestDb::create(name).await?;
        let outbox = PgOutbox::connect(&db.url(), PgOptions { shape, ..PgOptions::default() }).await.unwrap();
        outbox.migrate().await.unwrap();
        let pool = db.pool(2).await;
        Some(Self { _db: db, outbox, pool })
    }

    async fn sql(&self, sql: &str) {
        let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await;
        done.unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    /// Every object of the schema, with its definition.
    async fn objects(&self) -> Vec<(String, String)> {
        let sql = "SELECT 'table ' || c.relname, coalesce((SELECT string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod) \
               || coalesce(' ' || pg_get_expr(d.adbin, d.adrelid), ''), ',' ORDER BY a.attname) \
               FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
               WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped), '') \
               || coalesce((SELECT string_agg(pg_get_constraintdef(k.oid), ',' ORDER BY pg_get_constraintdef(k.oid)) FROM pg_constraint k WHERE k.conrelid = c.oid), '') \
             FROM pg_class c WHERE c.relnamespace = 'airtight'::regnamespace AND c.relkind IN ('r', 'p', 'S') \
             UNION ALL SELECT 'index ' || c.relname, pg_get_indexdef(c.oid) || (SELECT indisvalid::text FROM pg_index WHERE indexrelid = c.oid) \
               FROM pg_class c WHERE c.relnamespace = 'airtight'::regnamespace AND c.relkind IN ('i', 'I') \
             UNION ALL SELECT 'function ' || p.proname, pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = 'airtight'::regnamespace \
             UNION ALL SELECT 'trigger ' || t.tgname || ' on ' || t.tgrelid::regclass::text, pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid \
               WHERE c.relnamespace = 'airtight'::regnamespace AND NOT t.tgisinternal \
             ORDER BY 1, 2";
        sqlx::query_as(sql).fetch_all(&self.pool).await.unwrap()
    }

    /// What `check` says is missing.
    async fn said(&self) -> String {
        let findings = self.outbox.check().await.unwrap();
        findings.into_iter().map(|finding| finding.to_string()).collect::<Vec<_>>().join("\n")
    }

    /// One event goes through.
    async fn works(&self) {
        Admin::publish(&self.outbox, &[event("k", 1)]).await.unwrap();
        sqlx::query("SELECT * FROM airtight.publish('test.log', 'Tested', 'Thing', 'k', '{}')")
            .execute(&self.pool)
            .await
            .unwrap();
        let sink = airtight_core::sinks::MemorySink::new();
        let stop = tokio_util::sync::CancellationToken::new();
        if self.outbox.spec().status.is_some() {
            let queue = self.outbox.queue(QueueOptions::default());
            airtight_core::Relay::new(queue, sink.clone()).drain(stop).await.unwrap();
        } else {
            let log = self.outbox.log(LogOptions::consumer("c"));
            airtight_core::Relay::new(log, sink.clone()).drain(stop).await.unwrap();
        }
        assert_eq!(sink.len(), 2);
    }
}

/// Drops each object in turn, with all that hangs on it.
async fn whatever_is_dropped(name: &str, shape: Shape) {
    let Some(made) = Made::create(name, shape).await else { return };
    let whole = made.objects().await;
    assert!(made.said().await.is_empty(), "{}", made.said().await);
    let mut dropped = 0;
    for (object, definition) in &whole {
        let (kind, rest) = object.split_once(' ').unwrap();
        let (name, drop) = match kind {
            // Retention drops it, in its time.
            _ if rest == "outbox_1" || rest.starts_with("outbox_1_") || rest == "outbox_first_id" => continue,
            // Primary keys and the like are part of their table.
            "index" if rest.ends_with("key") && rest != "parked_key" && rest != "outbox_waiting_key" => {
                continue;
            }
            // An index of a partition belongs to the one of the table.
            "index" if definition.contains("outbox_default USING brin") => continue,
            "table" if definition.is_empty() || rest == "outbox_seq" || rest == "outbox_seq_seq" => {
                if shape == Shape::Queue {
                    continue;
                }
                (rest, format!("DROP SEQUENCE airtight.{rest} CASCADE"))
            }
            "table" => (rest, format!("DROP TABLE airtight.{rest} CASCADE")),
            "index" => (rest, format!("DROP INDEX airtight.{rest}")),
            "function" => (rest, format!("DROP FUNCTION airtight.{rest} CASCADE")),
            "trigger" => {
                let (trigger, table) = rest.split_once(" on ").unwrap();
                if table != "airtight.outbox" {
                    continue;
                }
                (trigger, format!("DROP TRIGGER {trigger} ON {table}"))
            }
            other => panic!("{other}"),
        };
        made.sql(&drop).await;
        let said = made.said().await;
        // Whether it is an index of ids, by whichever name, or a thing of that name.
        let named = said.contains(name) || said.contains("unique index");
        assert!(named && said.contains("airtight migrate"), "{drop}: {said}");
        let did = made.outbox.migrate().await.unwrap();
        assert!(!did.is_empty(), "{drop}");
        let now = made.objects().await;
        let missing: Vec<_> = whole.iter().filter(|one| !now.contains(one)).collect();
        assert!(
            missing.iter().all(|(object, _)| object.starts_with("index") && kind == "index"),
            "{drop}: {missing:?}\n{did:?}"
        );
        assert_eq!(now.len(), whole.len(), "{drop}: {did:?}");
        assert!(made.said().await.is_empty(), "{drop}: {}", made.said().await);
        assert!(made.outbox.migrate().await.unwrap().is_empty(), "{drop}");
        dropped += 1;
    }
    assert!(dropped > 15, "{dropped}");
    made.works().await;
}

#[tokio::test]
async fn whatever_is_dropped_of_a_queue_is_named_and_made_again() {
    whatever_is_dropped("missing_queue", Shape::Queue).await;
}

#[tokio::test]
async fn whatever_is_dropped_of_a_log_is_named_and_made_again() {
    whatever_is_dropped("missing_log", Shape::Log).await;
}

/// What was in the table is gone. That is said, to consumers that had not seen all of it too; and no number comes again.
#[tokio::test]
async fn a_log_that_was_dropped_goes_on_behind_its_consumers() {
    let Some(f) = Fixture::create("missing_dropped").await else { return };
    let events: Vec<NewEvent> = (1..=80).map(|n| event("k", n)).collect();
    let ahead = f.reader("ahead").await;
    Admin::publish(&f.outbox, &events[..50]).await.unwrap();
    let behind = f.reader("behind").await;
    assert_eq!((ahead.seqs(50).await.len(), behind.seqs(50).await.len()), (50, 50));
    behind.close().await;
    Admin::publish(&f.outbox, &events[50..]).await.unwrap();
    assert_eq!(ahead.seqs(30).await.len(), 30);
    ahead.close().await;

    f.sql("DROP TABLE airtight.outbox").await;
    let findings = f.outbox.check().await.unwrap();
    assert!(findings.iter().any(|one| one.fatal && one.message.contains("airtight.outbox")), "{findings:?}");
    let did = f.outbox.migrate().await.unwrap();
    assert!(
        did.iter().any(|line| line.contains("airtight.outbox") && line.contains("its contents are lost")),
        "{did:?}"
    );
    assert_eq!(f.publish("k", 81).await, 81);
    let ahead = f.reader("ahead").await;
    assert_eq!(ahead.seqs(1).await, [81]);
    let error = f.outbox.log(LogOptions::consumer("behind"));
    let opened = match error.open(&Capabilities::default()).await {
        Ok(()) => error.next(airtight_core::Limits { events: 1, bytes: 1 << 20 }).await.map(|_| ()),
        Err(error) => Err(error),
    };
    let error = opened.unwrap_err();
    assert!(error.message().contains("up to 80"), "{error}");
}

#[tokio::test]
async fn half_a_schema_is_made_whole() {
    for shape in [Shape::Queue, Shape::Log] {
        let Some(made) = Made::create("missing_half", shape).await else { return };
        let whole = made.objects().await;
        // Not even what was applied is known.
        made.sql(
            "DROP TABLE airtight.migration, airtight.relay, airtight.parked, airtight.slot; \
             DROP FUNCTION airtight.publish, airtight.uuid_v7 CASCADE",
        )
        .await;
        if shape == Shape::Log {
            made.sql("DROP TABLE airtight.log, airtight.outbox_default").await;
        }
        // Nor was this program told what the outbox is for.
        let told = PgOptions { shape: Shape::Queue, ..PgOptions::default() };
        let outbox = PgOutbox::with_pool(made.pool.clone(), told).unwrap().detect().await.unwrap();
        outbox.migrate().await.unwrap();
        assert_eq!(made.objects().await, whole);
        made.works().await;

        made.sql("DROP SCHEMA airtight CASCADE").await;
        made.outbox.migrate().await.unwrap();
        assert_eq!(made.objects().await, whole);
        made.works().await;
    }
}

/// A build that was broken off leaves an index that nobody can use, and no statement says so.
#[tokio::test]
async fn an_index_that_is_not_valid_is_made_anew() {
    let Some(made) = Made::create("missing_invalid", Shape::Queue).await else { return };
    made.sql("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'airtight.outbox_claim'::regclass")
        .await;
    assert!(made.said().await.contains("outbox_claim"), "{}", made.said().await);
    let did = made.outbox.migrate().await.unwrap();
    assert!(did.iter().any(|line| line.contains("outbox_claim")), "{did:?}");
    let valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'airtight.outbox_claim'::regclass";
    assert!(sqlx::query_scalar::<_, bool>(valid).fetch_one(&made.pool).await.unwrap());
}

/// With a transaction open that has published, `migrate` waits in short turns and never makes publishers wait for long.
#[tokio::test]
async fn an_index_is_made_beside_publishers() {
    let Some(made) = Made::create("missing_beside", Shape::Queue).await else { return };
    made.sql("DROP INDEX airtight.outbox_claim").await;
    let mut open = made.pool.begin().await.unwrap();
    made.outbox.publish(&mut open, &event("k", 1)).await.unwrap();
    let outbox = made.outbox.clone();
    let migrating = tokio::spawn(async move { outbox.migrate().await });
    airtight_testkit::wait::eventually(crate::support::SOON, "the build to wait for the writer", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX CONCURRENTLY%' AND wait_event_type = 'Lock' AND datname = current_database()";
        sqlx::query_scalar::<_, i64>(waiting).fetch_one(&made.pool).await.unwrap() > 0
    })
    .await;
    let begun = std::time::Instant::now();
    Admin::publish(&made.outbox, &[event("k", 2)]).await.unwrap();
    assert!(begun.elapsed() < std::time::Duration::from_secs(3), "{:?}", begun.elapsed());
    open.commit().await.unwrap();
    assert!(!migrating.await.unwrap().unwrap().is_empty());
    assert!(made.said().await.is_empty() || !made.said().await.contains("outbox_claim"));
}

/// Of a mapped table only airtight's own tables are made.
#[tokio::test]
async fn what_a_mapped_table_needs_is_made_again() {
    let Some(made) = Made::create("missing_mapped", Shape::Log).await else { return };
    let spec = made.outbox.spec().clone();
    let mapped = PgOptions { spec: Some(spec), schema: "own".into(), ..PgOptions::default() };
    let outbox = PgOutbox::with_pool(made.pool.clone(), mapped).unwrap();
    outbox.migrate().await.unwrap();
    made.sql("DROP TABLE own.consumer").await;
    let findings = outbox.check().await.unwrap();
    assert!(findings.iter().any(|one| one.fatal && one.message.contains("own.consumer")), "{findings:?}");
    let did = outbox.migrate().await.unwrap();
    assert!(did.len() == 1 && did[0].contains("own.consumer"), "{did:?}");
    assert!(outbox.check().await.unwrap().is_empty());
}
