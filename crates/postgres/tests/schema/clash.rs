//! A sequence that is behind its table: a number that is drawn again is taken by another event. An event that
//! clashes is refused, and never mistaken for a repeated id.

use std::time::Duration;

use airtight_core::{
    Capabilities, Error, NewEvent, Source,
    admin::Admin,
    log::{LogAdmin, LogOptions, SeekOptions, SeekTo},
    table::Shape,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::{postgres::TestDb, wait::eventually};
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use crate::support::{Fixture, SOON, event};

/// A log of 80 events that a consumer has seen, its sequence set back by 50.
async fn set_back(name: &str) -> Option<Fixture> {
    let f = Fixture::create(name).await?;
    let events: Vec<NewEvent> = (1..=80).map(|n| event(&format!("k{n}"), n)).collect();
    Admin::publish(&f.outbox, &events).await.unwrap();
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(80).await.len(), 80);
    reader.close().await;
    f.sql("SELECT setval('airtight.outbox_seq', 30)").await;
    Some(f)
}

fn sixty() -> Vec<NewEvent> {
    (101..=160).map(|n| event(&format!("k{n}"), n)).collect()
}

#[track_caller]
fn is_clash(error: &Error) {
    assert_eq!(error.code(), "sequence_behind", "{error}");
    assert!(error.message().contains("seq 31") && error.message().contains("nothing was stored"), "{error}");
    assert!(error.remedy().unwrap().contains("`airtight migrate --shape log`"), "{error}");
}

/// What the message says to do, then what was refused: all of it is delivered, and nothing is missing.
async fn mended(f: &Fixture) {
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox").await, 80, "nothing was stored");
    // What was refused has drawn numbers, and may have come past those that are taken.
    f.sql("SELECT setval('airtight.outbox_seq', 30)").await;
    let did = f.outbox.migrate().await.unwrap();
    assert!(did.iter().any(|line| line.contains("airtight.outbox_seq") && line.contains("80")), "{did:?}");
    let stored = Admin::publish(&f.outbox, &sixty()).await.unwrap();
    assert!(stored.iter().all(|one| one.is_new), "{stored:?}");
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(60).await, (81..=140).collect::<Vec<i64>>());
    assert!(f.outbox.migrate().await.unwrap().is_empty(), "nothing is left to do");
}

#[tokio::test]
async fn sqlx_refuses_a_number_that_is_taken() {
    let Some(f) = set_back("clash_sqlx").await else { return };
    let mut tx = f.pool.begin().await.unwrap();
    is_clash(&f.outbox.publish_many(&mut tx, &sixty()).await.unwrap_err());
    // Whoever does not look at the error cannot commit what is there without what is not.
    assert!(sqlx::query("SELECT 1").execute(&mut *tx).await.is_err(), "the transaction is aborted");
    tx.commit().await.ok();
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox").await, 80);

    f.sql("SELECT setval('airtight.outbox_seq', 30)").await;
    is_clash(&Admin::publish(&f.outbox, &sixty()).await.unwrap_err());
    f.sql("SELECT setval('airtight.outbox_seq', 30)").await;
    let mut tx = f.pool.begin().await.unwrap();
    is_clash(&f.outbox.publish(&mut tx, &event("k", 1)).await.unwrap_err());
    drop(tx);
    mended(&f).await;
}

#[tokio::test]
async fn tokio_postgres_refuses_a_number_that_is_taken() {
    let Some(f) = set_back("clash_tokio").await else { return };
    let (mut client, connection) = tokio_postgres::connect(&f.db.url(), tokio_postgres::NoTls).await.unwrap();
    let driver = tokio::spawn(connection);
    let tx = client.transaction().await.unwrap();
    is_clash(&f.outbox.publish_many_tokio(&tx, &sixty()).await.unwrap_err());
    assert!(tx.query("SELECT 1", &[]).await.is_err(), "the transaction is aborted");
    tx.rollback().await.unwrap();
    drop(client);
    driver.await.unwrap().unwrap();
    mended(&f).await;
}

#[tokio::test]
async fn the_sql_functions_refuse_a_number_that_is_taken() {
    let Some(f) = set_back("clash_sql").await else { return };
    let functions = [
        "SELECT count((airtight.publish('s', 'T', 'A', n::text, '{}')).seq) FROM generate_series(1, 60) AS n",
        "SELECT count((airtight.publish_bytes('s', 'T', 'A', n::text, '\\x00')).seq) FROM generate_series(1, 60) AS n",
    ];
    for sql in functions {
        f.sql("SELECT setval('airtight.outbox_seq', 30)").await;
        let error = sqlx::query(sql).execute(&f.pool).await.unwrap_err();
        let error = error.as_database_error().unwrap().downcast_ref::<sqlx::postgres::PgDatabaseError>();
        assert_eq!(error.code(), "23505");
        assert!(error.message().contains("seq 31"), "{error:?}");
        assert!(error.hint().unwrap().contains("`airtight migrate --shape log`"), "{error:?}");
    }
    mended(&f).await;
}

/// A plain INSERT never had the trouble: the server names the constraint.
#[tokio::test]
async fn a_plain_insert_is_refused_by_the_server() {
    let Some(f) = set_back("clash_insert").await else { return };
    let mut writer = f.writer().await;
    let error = writer.try_run(&crate::support::insert("airtight.outbox", "DEFAULT", "k")).await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().unwrap(), "23505");
    mended(&f).await;
}

/// Until it is told, the consumer stands still.
async fn seek_as_told(f: &Fixture, did: &[String], consumer: &str) {
    let told = format!("`airtight consumers seek {consumer} --earliest`");
    assert!(did.iter().any(|line| line.contains(&told)), "{did:?}");
    let error =
        f.outbox.log(LogOptions::consumer(consumer)).open(&Capabilities::default()).await.unwrap_err();
    assert!(error.code() == "sequence_behind" && error.remedy() == Some(told.as_str()), "{error}");
    f.outbox.seek(consumer, SeekTo::Earliest, SeekOptions::default()).await.unwrap();
}

/// Numbers that were rolled back are free. An event that takes one of them stands below the offsets of consumers: moving
/// the sequence on and no more would leave it there for good.
#[tokio::test]
async fn what_was_stored_below_an_offset_is_delivered_after_the_remedy() {
    let Some(f) = Fixture::create("clash_gaps").await else { return };
    for n in 1..=80 {
        let mut tx = f.pool.begin().await.unwrap();
        f.outbox.publish(&mut tx, &event("k", n)).await.unwrap();
        if n % 8 == 0 { tx.rollback().await.unwrap() } else { tx.commit().await.unwrap() }
    }
    for consumer in ["one", "two"] {
        let reader = f.reader(consumer).await;
        assert_eq!(reader.seqs(70).await.len(), 70);
        reader.close().await;
    }
    f.sql("SELECT setval('airtight.outbox_seq', 30)").await;
    let mut stored = Vec::new();
    let mut refused = 0;
    for n in 0..12 {
        match Admin::publish(&f.outbox, &[event("late", n)]).await {
            Ok(published) => stored.push(published[0].seq),
            Err(error) => {
                assert_eq!(error.code(), "sequence_behind", "{error}");
                refused += 1;
            }
        }
    }
    assert_eq!((stored.as_slice(), refused), ([32, 40].as_slice(), 10));
    let did = f.outbox.migrate().await.unwrap();
    for consumer in ["one", "two"] {
        seek_as_told(&f, &did, consumer).await;
        let reader = f.reader(consumer).await;
        let mut seen = Vec::new();
        eventually(SOON, "what was stored below the offset", async || {
            let batch = reader.look().await;
            seen.extend(batch.iter().map(|delivery| delivery.event.seq));
            reader.deliver(&batch).await;
            stored.iter().all(|seq| seen.contains(seq))
        })
        .await;
    }
}

/// Here the offset is all that is left to tell: retention has removed what would have clashed.
#[tokio::test]
async fn an_emptied_log_goes_on_behind_its_consumers() {
    let Some(f) = set_back("clash_emptied").await else { return };
    f.sql("DELETE FROM airtight.outbox").await;
    let stored = Admin::publish(&f.outbox, &sixty()[..10]).await.unwrap();
    assert_eq!((stored[0].seq, stored[9].seq), (31, 40));
    let did = f.outbox.migrate().await.unwrap();
    seek_as_told(&f, &did, "c").await;
    f.publish("k", 1).await;
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(11).await, (31..=40).chain([81]).collect::<Vec<i64>>());
}

#[tokio::test]
async fn a_unique_index_of_ones_own_is_no_repeated_id() {
    let Some(f) = Fixture::create("clash_own").await else { return };
    f.sql("CREATE UNIQUE INDEX ON airtight.outbox_1 (aggregate_id)").await;
    let published = Admin::publish(&f.outbox, &[event("a", 1)]).await.unwrap();
    let error = Admin::publish(&f.outbox, &[event("b", 2), event("a", 3)]).await.unwrap_err();
    assert_eq!(error.code(), "conflict", "{error}");
    let error =
        sqlx::query("SELECT * FROM airtight.publish('s', 'T', 'A', 'a', '{}')").execute(&f.pool).await;
    let error = error.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().unwrap(), "23505", "{error}");
    assert_eq!(f.number("SELECT count(*) FROM airtight.outbox").await, 1);

    let again = event("c", 4).id(published[0].id.parse().unwrap());
    let again = Admin::publish(&f.outbox, &[again]).await.unwrap();
    assert_eq!((again[0].is_new, again[0].seq), (false, published[0].seq), "a repeated id is one still");
}

/// Two transactions with one id: the second waits for the first, and then says that it is there, in every way.
#[tokio::test]
async fn a_repeated_id_that_is_not_committed_yet_is_waited_for() {
    let Some(f) = Fixture::create("clash_waits").await else { return };
    let by_rust = async |id: Uuid| {
        let published = Admin::publish(&f.outbox, &[event("k", 2).id(id)]).await.unwrap();
        (published[0].is_new, published[0].seq)
    };
    let by_sql = async |id: Uuid| {
        let sql = "SELECT * FROM airtight.publish('s', 'T', 'A', 'k', '{}', event_id => $1)";
        let row = sqlx::query(sql).bind(id).fetch_one(&f.pool).await.unwrap();
        (row.get::<bool, _>("is_new"), row.get::<i64, _>("seq"))
    };
    for way in ["rust", "sql"] {
        let id = Uuid::now_v7();
        let mut tx = f.pool.begin().await.unwrap();
        let first = f.outbox.publish(&mut tx, &event("k", 1).id(id)).await.unwrap();
        let commits = async {
            let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'";
            eventually(SOON, "the second to wait", async || f.number(waiting).await > 0).await;
            tx.commit().await.unwrap();
        };
        let second = async { if way == "rust" { by_rust(id).await } else { by_sql(id).await } };
        let (second, ()) = tokio::time::timeout(SOON, async { tokio::join!(second, commits) }).await.unwrap();
        assert_eq!(second, (false, first.seq), "{way}");
    }
}

#[tokio::test]
async fn a_queue_whose_sequence_is_behind_says_so_and_is_mended() {
    let Some(db) = TestDb::create("clash_queue").await else { return };
    let options = PgOptions { schema: "My \"Shop\"".into(), table: "events".into(), ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.unwrap();
    outbox.migrate().await.unwrap();
    let events: Vec<NewEvent> = (1..=80).map(|n| event(&format!("k{n}"), n)).collect();
    Admin::publish(&outbox, &events).await.unwrap();
    let back = r#"SELECT setval(pg_get_serial_sequence('"My ""Shop""".events', 'seq'), 30)"#;
    sqlx::query(back).execute(outbox.pool()).await.unwrap();
    let error = Admin::publish(&outbox, &sixty()).await.unwrap_err();
    assert_eq!(error.code(), "sequence_behind", "{error}");
    let command = r#"`airtight migrate --schema 'My "Shop"' --table events`"#;
    assert!(error.remedy().unwrap().starts_with(command), "{error}");
    sqlx::query(back).execute(outbox.pool()).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&db.url(), tokio_postgres::NoTls).await.unwrap();
    let driver = tokio::spawn(connection);
    let error = outbox.publish_many_tokio(&client, &sixty()).await.unwrap_err();
    assert!(error.code() == "sequence_behind" && error.remedy().unwrap().starts_with(command), "{error}");
    drop(client);
    driver.await.unwrap().unwrap();
    assert!(!outbox.migrate().await.unwrap().is_empty());
    let stored = Admin::publish(&outbox, &sixty()).await.unwrap();
    assert!(stored.iter().all(|one| one.is_new) && stored[0].seq == 81, "{stored:?}");
    let count = AssertSqlSafe(r#"SELECT count(*) FROM "My ""Shop""".events"#);
    assert_eq!(sqlx::query_scalar::<_, i64>(count).fetch_one(outbox.pool()).await.unwrap(), 140);
}

/// Nobody publishes between the look at the table and the move of the sequence.
#[tokio::test]
async fn the_sequence_is_moved_beside_publishers() {
    let Some(f) = set_back("clash_beside").await else { return };
    let stop = tokio_util::sync::CancellationToken::new();
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (outbox, stop) = (f.outbox.clone(), stop.clone());
            tokio::spawn(async move {
                let mut stored = Vec::new();
                while !stop.is_cancelled() {
                    let published = Admin::publish(&outbox, &[event(&format!("w{writer}"), 1)]).await;
                    if let Ok(published) = published {
                        assert!(published[0].is_new);
                        stored.push(published[0].seq);
                    }
                }
                stored
            })
        })
        .collect();
    let other = PgOptions { shape: Shape::Log, ..PgOptions::default() };
    let other = PgOutbox::connect(&f.db.url(), other).await.unwrap();
    other.migrate().await.unwrap();
    eventually(SOON, "events behind the rest", async || {
        f.number("SELECT count(*) FROM airtight.outbox WHERE seq > 80").await > 20
    })
    .await;
    stop.cancel();
    let mut stored = Vec::new();
    for writer in writers {
        stored.extend(writer.await.unwrap());
    }
    stored.sort_unstable();
    assert_eq!(stored.first(), Some(&81));
    assert!(f.number("SELECT last_value FROM airtight.outbox_seq").await >= *stored.last().unwrap());
    let reader = f.reader("c").await;
    assert_eq!(reader.seqs(stored.len()).await, stored);
    tokio::time::timeout(Duration::from_secs(5), f.outbox.consumers()).await.unwrap().unwrap();
}
