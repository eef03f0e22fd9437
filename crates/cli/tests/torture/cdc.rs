//! The WAL as the source.
//!
//! The long forms are in CONTRIBUTING: `AIRTIGHT_TORTURE_EVENTS` and `AIRTIGHT_TORTURE_WAL_MB` make them as long as
//! you like.

use std::time::{Duration, Instant};

use airtight_testkit::brokers::kafka::Kafka;

use crate::{
    bank::{Bank, audit},
    brokers::{
        Broker, entry,
        kafka::{PARTITIONS, TOPIC},
        number, wait,
    },
    process::RelayProcess,
};

const LOGICAL: [&str; 3] = ["wal_level = logical", "max_wal_size = 4GB", "checkpoint_timeout = 1h"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_between_the_wal_and_kafka() {
    let test = "nothing_is_lost_between_the_wal_and_kafka";
    let Some(bank) = Bank::private(test, &LOGICAL).await else { return };
    let Some(kafka) = Kafka::start(test).await else { return };
    kafka.create_topic(TOPIC, PARTITIONS.unsigned_abs()).await;
    let (events, kills, crashes, restarts) = match number("AIRTIGHT_TORTURE_EVENTS") {
        Some(events) => (events, 20, 3, 3),
        None => (4_000, 6, 2, 2),
    };
    let (url, to) = (bank.url(), kafka.to());
    let began = Instant::now();
    let writers = bank.start_writers(8, 125, Duration::from_millis(1));
    let (mut killed, mut worked, mut crashed, mut restarted) = (0, 0, 0, 0);
    let run = ["run", "--read", "cdc", "--from", &url, "--to", &to, "--lease", "1"];
    while killed < kills || bank.committed().await < events {
        let before = kafka.count().await;
        let mut relay = RelayProcess::start(run);
        pause(1_200..3_500).await;
        if crashed < crashes && killed >= (crashed + 1) * kills / (crashes + 1) {
            // Under the relay and the writers.
            let bank = bank.clone();
            tokio::task::spawn_blocking(move || bank.crash()).await.unwrap();
            crashed += 1;
            pause(500..3_000).await;
        }
        if restarted < restarts && killed >= (restarted + 1) * kills / (restarts + 1) {
            kafka.stop().await;
            kafka.start().await;
            restarted += 1;
            pause(0..3_000).await;
        }
        let delivered = kafka.count().await;
        relay.kill();
        killed += 1;
        worked += usize::from(delivered > before);
    }
    writers.stop().await;
    let drained = RelayProcess::drain_as("cdc", &url, &to);
    let (ledger, arrived) = (bank.ledger().await, kafka.messages().await);
    println!(
        "{} committed, {} arrived; {killed} kills, {worked} of them after deliveries, {crashed} crashes of PostgreSQL, \
         {restarted} restarts of Kafka; {:.0?}",
        ledger.len(),
        arrived.len(),
        began.elapsed()
    );
    audit(&ledger, &arrived);
    assert_eq!((crashed, restarted), (crashes, restarts));
    assert!(
        worked * 2 >= killed,
        "only {worked} of {killed} relays lived to deliver anything: no test at all"
    );
    assert_eq!(bank.unfinished().await, 0, "delivered rows are marked; {drained}");
    let slots = bank.admin().status().await.unwrap().slots;
    assert_eq!(slots.iter().map(|slot| slot.dead + slot.unknown + slot.waiting).sum::<u64>(), 0);
}

async fn pause(milliseconds: std::ops::Range<u64>) {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(milliseconds))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn going_over_to_the_wal_and_back_loses_nothing() {
    let Some(bank) = Bank::postgres("switch_cdc").await else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.ndjson");
    let (url, to) = (bank.url(), format!("file:{}", out.display()));
    let slot = format!("sw_{}", fastrand::u64(..));
    let writers = bank.start_writers(4, 50, Duration::from_millis(2));
    let arrived = || std::fs::read_to_string(&out).unwrap_or_default().lines().count();
    let mut seen = 0;
    // docs/cdc.md, "From polling to the WAL, and back".
    for round in 0..3 {
        let mut queue =
            RelayProcess::start(["run", "--from", &url, "--to", &to, "--lease", "1", "--poll", "50"]);
        wait(Duration::from_secs(30), "deliveries by polling", async || arrived() > seen + 200).await;
        // Politely, or not.
        if round == 1 {
            queue.kill();
        } else {
            queue.stop();
        }
        // One that was killed is there until its lease has run out: two ways to read at once are refused.
        let gone = async || bank.admin().status().await.unwrap().relays.is_empty();
        wait(Duration::from_secs(10), "the queue's relay to be gone", gone).await;
        seen = arrived();
        let mut cdc = RelayProcess::start([
            "run", "--read", "cdc", "--slot", &slot, "--from", &url, "--to", &to, "--lease", "1",
        ]);
        wait(Duration::from_secs(30), "deliveries through the WAL", async || arrived() > seen + 200).await;
        if round == 1 {
            cdc.kill();
        } else {
            cdc.stop();
        }
        seen = arrived();
        wait(Duration::from_secs(10), "the reader to be gone", async || {
            bank.pg().remove_reader(&slot).await.is_ok()
        })
        .await;
    }
    writers.stop().await;
    RelayProcess::drain(&url, &to);
    assert_eq!(bank.unfinished().await, 0);
    let text = std::fs::read_to_string(&out).unwrap();
    let entries: Vec<_> = text.lines().map(|line| entry(line.as_bytes())).collect();
    let ledger = bank.ledger().await;
    println!("{} committed, {} arrived, three times there and back", ledger.len(), entries.len());
    audit(&ledger, &entries);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_outbox_pins_no_wal() {
    const TIGHT: u64 = 64 << 20;
    let Some(bank) = Bank::private("an_idle_outbox_pins_no_wal", &LOGICAL).await else { return };
    let megabytes = number("AIRTIGHT_TORTURE_WAL_MB").unwrap_or(150);
    let pool = bank.pg().pool().clone();
    sqlx::query("CREATE TABLE neighbour (n bigint, filler text)").execute(&pool).await.unwrap();
    let url = bank.url();
    let _relay = RelayProcess::start(["run", "--read", "cdc", "--from", &url, "--to", "null:"]);
    let status = async || bank.admin().status().await.unwrap().slots;
    wait(Duration::from_secs(20), "the stream", async || status().await.iter().any(|slot| slot.active)).await;

    let writer = tokio::spawn({
        let pool = pool.clone();
        async move {
            let insert =
                "INSERT INTO neighbour SELECT n, repeat(md5(n::text), 30) FROM generate_series(1, 1000) n";
            // A thousand rows of one kilobyte each time.
            for _ in 0..megabytes {
                sqlx::query(insert).execute(&pool).await.unwrap();
            }
        }
    });
    let behind = "SELECT coalesce(extract(epoch FROM now() - max(moved_at)), 0)::float8 FROM airtight.slot";
    let (mut oldest, mut most) = (0.0_f64, 0);
    while !writer.is_finished() {
        let age: f64 = sqlx::query_scalar(behind).fetch_one(&pool).await.unwrap();
        oldest = oldest.max(age);
        most = most.max(status().await.first().and_then(|slot| slot.lag_bytes).unwrap_or(0));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    writer.await.unwrap();
    let written = Instant::now();
    // The server itself moves what it keeps only with its own records of what runs, about every 15 s.
    let retained = async || status().await.first().and_then(|slot| slot.retained_bytes).unwrap_or(u64::MAX);
    wait(Duration::from_secs(30), "the slot to let go of the WAL", async || retained().await < TIGHT).await;
    println!(
        "{megabytes} MB of other WAL: the position was at most {oldest:.1} s old and {} MB behind; {} MB kept {:.1?} after the last write",
        most >> 20,
        retained().await >> 20,
        written.elapsed()
    );
    assert!(oldest < 5.0, "the position was {oldest:.1} s old while WAL was written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_transaction_passes_in_little_memory() {
    const LITTLE: u64 = 200 << 20;
    let Some(bank) = Bank::postgres("large_tx").await else { return };
    let events = number("AIRTIGHT_TORTURE_EVENTS").unwrap_or(100_000).max(100_000);
    let pool = bank.pg().pool().clone();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.ndjson");
    let (url, to) = (bank.url(), format!("file:{}", out.display()));
    let slot = format!("large_{}", fastrand::u64(..));
    let relay = RelayProcess::start(["run", "--read", "cdc", "--slot", &slot, "--from", &url, "--to", &to]);
    let status = async || bank.admin().status().await.unwrap().slots;
    wait(Duration::from_secs(20), "the stream", async || status().await.iter().any(|slot| slot.active)).await;
    let insert = "INSERT INTO airtight.outbox (stream, event_type, aggregate_type, aggregate_id, payload) \
         SELECT 'bank', 'Moved', 'Account', 'k' || n % 1000, jsonb_build_object('n', n, 'filler', repeat('x', 400)) \
         FROM generate_series(1, $1) n";
    let began = Instant::now();
    sqlx::query(insert).bind(i64::try_from(events).unwrap()).execute(&pool).await.unwrap();
    let committed = Instant::now();
    let mut most = relay.resident();
    let done = "SELECT count(*) FROM airtight.outbox WHERE status = 'done'";
    loop {
        most = most.max(relay.resident());
        let finished: i64 = sqlx::query_scalar(done).fetch_one(&pool).await.unwrap();
        if usize::try_from(finished).unwrap() == events {
            break;
        }
        assert!(committed.elapsed() < Duration::from_secs(600), "{finished} of {events}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!(
        "{events} events in one transaction: written in {:.0?}, delivered in {:.0?}, memory {} MB at most",
        committed - began,
        committed.elapsed(),
        most >> 20
    );
    assert_eq!(std::fs::read_to_string(&out).unwrap().lines().count(), events, "each once");
    assert!(most < LITTLE, "{most} bytes");
    drop(relay);
    wait(Duration::from_secs(60), "the reader to be gone", async || {
        bank.pg().remove_reader(&slot).await.is_ok()
    })
    .await;
}
