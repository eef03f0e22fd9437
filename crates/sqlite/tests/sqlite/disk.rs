//! What happens to the file: the disk is full, the file is replaced or removed under a relay that has it open.

use std::{path::Path, time::Duration};

use airtight_core::{
    Class, Code, Delivery, Error, Order, Outcome, Policy, Relay, Result, Sink, Verdict, admin::Admin,
    log::LogOptions, queue::QueueOptions, sinks::memory::MemorySink, table::Shape,
};
use airtight_sqlite::SqliteOutbox;
use airtight_testkit::{small_disk::SmallDisk, wait::eventually};
use async_trait::async_trait;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::common::{Fixture, Hand, event, member};

fn path_in(directory: &Path) -> String {
    directory.join("outbox.db").to_str().unwrap().to_owned()
}

/// Publishes until there is no room, and says how many it was.
async fn publish_until_full(outbox: &SqliteOutbox) -> (usize, Error) {
    let mut published = 0;
    loop {
        let event = event(&format!("k{published}")).json(&"x".repeat(2_000)).unwrap();
        match Admin::publish(outbox, &[event]).await {
            Ok(_) => published += 1,
            Err(error) => return (published, error),
        }
        assert!(published < 10_000, "the disk is never full");
    }
}

#[tokio::test]
async fn a_disk_that_was_full_costs_nothing_but_the_time() {
    let name = "a_disk_that_was_full_costs_nothing_but_the_time";
    let Some(disk) = SmallDisk::mount(name, 4 << 20) else { return };
    let outbox = SqliteOutbox::open(&path_in(disk.path())).await.unwrap();
    outbox.migrate().await.unwrap();
    let mut relay = Hand::join(&outbox, member(Order::Key)).await;
    let ballast = disk.fill();
    let (published, error) = publish_until_full(&outbox).await;
    assert_eq!((error.code(), error.class()), ("disk_full", Class::Retryable), "{error}");
    // More often than there are connections: each of them has met it.
    for _ in 0..20 {
        let event = event("late").json(&"x".repeat(100_000)).unwrap();
        let error = Admin::publish(&outbox, &[event]).await.unwrap_err();
        assert_eq!(error.code(), "disk_full", "{error}");
    }
    drop(ballast);

    Admin::publish(&outbox, &[event("afterwards")]).await.unwrap();
    let mut delivered = 0;
    loop {
        let got = relay.claim(100).await;
        if got.claimed.rows.is_empty() {
            break;
        }
        delivered += got.claimed.rows.len();
        assert!(relay.settle(&got, Verdict::Delivered).await.into_iter().all(|settled| settled));
    }
    assert_eq!(delivered, published + 1, "what was committed, and nothing else");
}

/// Connections of an application's own pool are not ours to make, and heal all the same.
#[tokio::test]
async fn a_pool_of_ones_own_recovers_as_well() {
    let name = "a_pool_of_ones_own_recovers_as_well";
    let Some(disk) = SmallDisk::mount(name, 4 << 20) else { return };
    let path = path_in(disk.path());
    let ours = SqliteOutbox::open(&path).await.unwrap().shape(Shape::Log);
    ours.migrate().await.unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&path);
    let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
    let outbox = SqliteOutbox::with_pool(pool.clone(), ours.table().clone());
    let ballast = disk.fill();
    let (published, error) = publish_until_full(&outbox).await;
    assert_eq!(error.code(), "disk_full", "{error}");
    // The application's own transactions meet it, too, and leave their connections behind.
    for _ in 0..4 {
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap_or_else(|error| panic!("{error}"));
        let event = event("late").json(&"x".repeat(100_000)).unwrap();
        let failed = outbox.publish(&mut tx, &event).await;
        let failed = match failed {
            Ok(_) => tx.commit().await.is_err(),
            Err(_) => true,
        };
        assert!(failed, "the disk is full");
        if outbox.pool().size() >= 2 {
            break;
        }
    }
    drop(ballast);
    for _ in 0..4 {
        Admin::publish(&outbox, &[event("afterwards")]).await.unwrap();
    }
    let sink = MemorySink::default();
    let source = outbox.log(LogOptions::consumer("c"));
    Relay::new(source, sink.clone()).drain(CancellationToken::new()).await.unwrap();
    assert_eq!(sink.len(), published + 4);
}

/// A sink that is away, so that events stay where they are.
struct Away;

#[async_trait]
impl Sink for Away {
    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let away = Error::new(Class::Unavailable, Code::custom("away"), "nobody is there");
        batch.iter().map(|_| Outcome::Failed(away.clone())).collect()
    }
}

/// A relay on an outbox whose events, or some of them, are only in the write-ahead log.
async fn relay_on(fixture: &Fixture, keys: &[&str]) -> JoinHandle<Result<airtight_core::relay::Summary>> {
    fixture.publish(keys).await;
    let source =
        fixture.outbox.queue(QueueOptions { lease: Duration::from_secs(1), ..QueueOptions::default() });
    let relay = Relay::new(source, Away).policy(Policy::default());
    let stats = relay.stats();
    let running = tokio::spawn(relay.run(CancellationToken::new()));
    eventually(Duration::from_secs(10), "the relay to read", async || stats.summary().fetched > 0).await;
    running
}

async fn ended(running: JoinHandle<Result<airtight_core::relay::Summary>>) -> Error {
    let ended = tokio::time::timeout(Duration::from_secs(20), running).await;
    ended.expect("it is noticed").unwrap().unwrap_err()
}

/// The copy that an error names: `… --from sqlite:COPY …`.
fn copy_named_by(error: &Error) -> String {
    let message = error.remedy().unwrap_or_default();
    let start = message.find("--from sqlite:").unwrap_or_else(|| panic!("no copy is named: {message}"));
    let url = &message[start + "--from ".len()..];
    url[..url.find(' ').unwrap()].to_owned()
}

async fn drained(url: &str) -> Vec<String> {
    let outbox = SqliteOutbox::open(url).await.unwrap();
    let sink = MemorySink::default();
    let source = outbox.queue(QueueOptions::default());
    Relay::new(source, sink.clone()).drain(CancellationToken::new()).await.unwrap();
    let mut keys: Vec<String> = sink.events().into_iter().map(|event| event.aggregate_id).collect();
    keys.sort();
    keys
}

fn with(path: &str, suffix: &str) -> String {
    format!("{path}{suffix}")
}

#[tokio::test]
async fn a_file_that_is_removed_under_a_relay_is_noticed_and_its_events_are_kept() {
    let fixture = Fixture::new().await;
    let running = relay_on(&fixture, &["one", "two"]).await;
    for suffix in ["", "-wal", "-shm"] {
        std::fs::remove_file(with(&fixture.path(), suffix)).unwrap();
    }
    let error = ended(running).await;
    assert_eq!((error.code(), error.class()), ("file_replaced", Class::Permanent), "{error}");
    assert!(error.message().contains("outbox.db was removed while it was open"), "{error}");
    assert!(!Path::new(&fixture.path()).exists(), "an empty one in its place would look as if all were well");
    assert_eq!(drained(&copy_named_by(&error)).await, ["one", "two"]);
}

#[tokio::test]
async fn a_file_that_is_replaced_under_a_relay_is_noticed_and_its_events_are_kept() {
    let fixture = Fixture::new().await;
    let other = Fixture::new().await;
    other.publish(&["new"]).await;
    other.outbox.pool().close().await;
    let running = relay_on(&fixture, &["one", "two"]).await;
    // With its write-ahead log taken in, as a backup would be.
    let restored = with(&fixture.path(), ".restored");
    sqlx::query("VACUUM INTO ?1").bind(&restored).execute(other.second().await.pool()).await.unwrap();
    for suffix in ["-wal", "-shm"] {
        std::fs::remove_file(with(&fixture.path(), suffix)).unwrap();
    }
    std::fs::rename(&restored, fixture.path()).unwrap();
    let error = ended(running).await;
    assert_eq!(error.code(), "file_replaced", "{error}");
    assert_eq!(drained(&copy_named_by(&error)).await, ["one", "two"]);
    drop(fixture.outbox);
    assert_eq!(drained(&path_in(fixture.dir.path())).await, ["new"]);
}

/// New connections would be to the other file, and writes would be in two files at once.
#[tokio::test]
async fn nothing_is_written_to_a_file_that_took_the_place_of_another() {
    let fixture = Fixture::new().await;
    fixture.publish(&["one"]).await;
    let copy = with(&fixture.path(), ".copy");
    sqlx::query("VACUUM INTO ?1").bind(&copy).execute(fixture.outbox.pool()).await.unwrap();
    std::fs::rename(&copy, fixture.path()).unwrap();
    for _ in 0..3 {
        let error = Admin::publish(&fixture.outbox, &[event("lost")]).await.unwrap_err();
        assert_eq!(error.code(), "file_replaced", "{error}");
    }
    let mut conn = fixture.outbox.pool().acquire().await.unwrap();
    let error = fixture.outbox.publish(&mut conn, &event("lost")).await.unwrap_err();
    assert_eq!(error.code(), "file_replaced", "{error}");
    let kept = std::fs::read_dir(fixture.dir.path()).unwrap();
    let kept = kept.filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().contains(".kept-"));
    assert_eq!(kept.count(), 1, "one copy, however often it is asked");
}

#[tokio::test]
async fn a_write_ahead_log_that_is_removed_is_noticed_and_what_it_held_is_kept() {
    let fixture = Fixture::new().await;
    let running = relay_on(&fixture, &["one", "two"]).await;
    std::fs::remove_file(with(&fixture.path(), "-wal")).unwrap();
    let error = ended(running).await;
    assert!(error.message().contains("outbox.db-wal was removed while it was open"), "{error}");
    assert_eq!(drained(&copy_named_by(&error)).await, ["one", "two"]);
}

/// The next connection of any process creates the log again, so another log says no more than that this one is gone.
#[tokio::test]
async fn a_removed_write_ahead_log_that_sqlite_has_created_again_is_noticed_as_well() {
    let fixture = Fixture::new().await;
    fixture.publish(&["one", "two"]).await;
    let log = with(&fixture.path(), "-wal");
    std::fs::remove_file(&log).unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(fixture.path());
    let other = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let _ = sqlx::query("SELECT count(*) FROM sqlite_schema").execute(&other).await;
    assert!(Path::new(&log).exists(), "SQLite has created it");
    let error = Admin::publish(&fixture.outbox, &[event("lost")]).await.unwrap_err();
    assert_eq!(error.code(), "file_replaced", "{error}");
    assert!(error.message().contains("outbox.db-wal was removed while it was open"), "{error}");
    assert_eq!(drained(&copy_named_by(&error)).await, ["one", "two"]);
}

#[tokio::test]
async fn a_directory_that_vanishes_takes_no_event_with_it() {
    let fixture = Fixture::new().await;
    let running = relay_on(&fixture, &["one", "two"]).await;
    std::fs::remove_dir_all(fixture.dir.path()).unwrap();
    let error = ended(running).await;
    assert_eq!(error.code(), "file_replaced", "{error}");
    let copy = copy_named_by(&error);
    assert_eq!(drained(&copy).await, ["one", "two"]);
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(with(copy.trim_start_matches("sqlite:"), suffix));
    }
}

/// As long as it cannot be kept, the process that has it open is all there is: it must not end.
#[tokio::test]
async fn a_removed_file_that_cannot_be_kept_is_held_until_it_can() {
    let name = "a_removed_file_that_cannot_be_kept_is_held_until_it_can";
    let Some(disk) = SmallDisk::mount(name, 4 << 20) else { return };
    let path = path_in(disk.path());
    let outbox = SqliteOutbox::open(&path).await.unwrap();
    outbox.migrate().await.unwrap();
    Admin::publish(&outbox, &[event("one")]).await.unwrap();
    let ballast = disk.fill();
    std::fs::remove_file(&path).unwrap();
    let error = Admin::publish(&outbox, &[event("lost")]).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("file_replaced", Class::Retryable), "{error}");
    assert!(error.remedy().unwrap().contains("do not stop this process"), "{error}");
    drop(ballast);
    let error = Admin::publish(&outbox, &[event("lost")]).await.unwrap_err();
    assert_eq!(error.class(), Class::Permanent, "{error}");
    assert_eq!(drained(&copy_named_by(&error)).await, ["one"]);
}

/// A file that comes and goes with its readers is none that was replaced.
#[tokio::test]
async fn write_ahead_logs_of_others_that_come_and_go_are_nothing_to_worry_about() {
    let fixture = Fixture::new().await;
    for n in 0..5 {
        let second = fixture.second().await;
        Admin::publish(&second, &[event(&format!("k{n}"))]).await.unwrap();
        sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(second.pool()).await.unwrap();
        second.pool().close().await;
        drop(second);
        fixture.publish(&["mine"]).await;
    }
    sqlx::query("VACUUM").execute(fixture.outbox.pool()).await.unwrap();
    fixture.publish(&["mine"]).await;
}

#[tokio::test]
async fn a_file_that_cannot_be_written_says_what_to_do() {
    let fixture = Fixture::new().await;
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(fixture.path()).read_only(true);
    let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let outbox = SqliteOutbox::with_pool(pool, fixture.outbox.table().clone());
    let error = Admin::publish(&outbox, &[event("one")]).await.unwrap_err();
    assert_eq!((error.code(), error.class()), ("read_only", Class::Permanent), "{error}");
    assert!(error.remedy().unwrap().starts_with("let this user write to the file"), "{error}");
}
