//! Every committed event reaches every consumer, in strictly ascending order within each of its runs; a reader
//! that only uses `seq > last` misses some events under the same load.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{
    Capabilities, Limits, Settlement, Source, Verdict,
    admin::Admin,
    log::{LogAdmin, LogOptions},
    table::Shape,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;
use sqlx::PgPool;

use crate::{
    seconds,
    writers::{Plan, Writers},
};

/// What a consumer has seen: run by run, in the order it came.
pub(crate) type Seen = Arc<Mutex<Vec<Vec<i64>>>>;

pub(crate) async fn outbox(url: &str) -> PgOutbox {
    let outbox =
        PgOutbox::connect(url, PgOptions { shape: Shape::Log, ..PgOptions::default() }).await.unwrap();
    outbox.migrate().await.unwrap();
    outbox
}

/// Follows until told to stop. With `restarts` it vanishes at random, or leaves in good order. Errors of a server
/// that is away are survived, as a relay does.
pub(crate) async fn follow(
    outbox: PgOutbox,
    consumer: &str,
    restarts: bool,
    stop: Arc<AtomicBool>,
    seen: Seen,
) {
    while !stop.load(Ordering::Relaxed) {
        let options = LogOptions::consumer(consumer).reading(|read| read.lease = Duration::from_secs(1));
        let log = outbox.log(options);
        if log.open(&Capabilities::default()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        }
        seen.lock().unwrap().push(Vec::new());
        let end = Instant::now() + Duration::from_millis(fastrand::u64(200..1_500));
        let mut fenced = false;
        let goes = || !stop.load(Ordering::Relaxed) && (!restarts || Instant::now() < end);
        while goes() && !fenced {
            let Ok(batch) = log.next(Limits { events: 500, bytes: 8 << 20 }).await else {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            };
            assert!(batch.rejects.is_empty());
            if batch.is_empty() {
                log.wait(Duration::from_millis(20)).await;
                continue;
            }
            seen.lock().unwrap().last_mut().unwrap().extend(batch.deliveries.iter().map(|one| one.event.seq));
            let verdicts: Vec<Settlement> = batch
                .deliveries
                .iter()
                .map(|one| Settlement { position: one.position, verdict: Verdict::Delivered })
                .collect();
            fenced = loop {
                match log.settle(&verdicts).await {
                    Ok(settled) => break settled.fenced > 0,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            };
        }
        if fastrand::bool() {
            let _ = log.close().await;
        }
    }
}

/// Waits until a consumer has seen everything there is, then compares.
pub(crate) async fn verify(pool: &PgPool, name: &str, seen: &Seen, stop: &AtomicBool) -> usize {
    let all: BTreeSet<i64> = sqlx::query_scalar::<_, i64>("SELECT seq FROM airtight.outbox")
        .fetch_all(pool)
        .await
        .unwrap()
        .into_iter()
        .collect();
    let deadline = Instant::now() + Duration::from_secs(30);
    let union = || seen.lock().unwrap().iter().flatten().copied().collect::<BTreeSet<i64>>();
    while union().len() < all.len() && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.store(true, Ordering::Relaxed);
    let missed: Vec<i64> = all.difference(&union()).copied().collect();
    assert!(
        missed.is_empty(),
        "{name} missed {} of {}: {:?}…",
        missed.len(),
        all.len(),
        &missed[..missed.len().min(10)]
    );
    assert_eq!(union().difference(&all).count(), 0, "{name} saw what was never committed");
    for run in seen.lock().unwrap().iter() {
        let turned = run.windows(2).find(|pair| pair[0] >= pair[1]);
        assert!(turned.is_none(), "{name} went back within a run: {turned:?}");
    }
    all.len()
}

/// `seq > last`, as many have written it.
async fn plain(pool: PgPool, stop: Arc<AtomicBool>) -> BTreeSet<i64> {
    let mut seen = BTreeSet::new();
    let mut last = 0i64;
    let mut rounds_after = 0;
    while rounds_after < 3 {
        rounds_after += u32::from(stop.load(Ordering::Relaxed));
        let seqs: Vec<i64> =
            sqlx::query_scalar("SELECT seq FROM airtight.outbox WHERE seq > $1 ORDER BY seq LIMIT 500")
                .bind(last)
                .fetch_all(&pool)
                .await
                .unwrap();
        last = seqs.last().copied().unwrap_or(last);
        if !seqs.is_empty() {
            rounds_after = 0;
        }
        seen.extend(seqs);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    seen
}

async fn torture(name: &str, writers: usize, short: u64) {
    let Some(db) = TestDb::create(name).await else { return };
    let outbox = outbox(&db.url()).await;
    let pool = db.pool(4).await;
    let stop = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicBool::new(false));
    let consumers: Vec<(&str, bool, Seen)> = vec![
        ("one", false, Seen::default()),
        ("two", false, Seen::default()),
        ("three", true, Seen::default()),
    ];
    let mut tasks = Vec::new();
    for (consumer, restarts, seen) in &consumers {
        // Each with a pool of its own, as in a process of its own.
        let own = PgOutbox::connect(&db.url(), PgOptions { shape: Shape::Log, ..PgOptions::default() })
            .await
            .unwrap();
        let (consumer, restarts, stop, seen) = (consumer.to_string(), *restarts, stop.clone(), seen.clone());
        tasks.push(tokio::spawn(async move { follow(own, &consumer, restarts, stop, seen).await }));
    }
    let control = tokio::spawn(plain(pool.clone(), written.clone()));
    // One that writes elsewhere, all the time.
    let mut unrelated = pool.begin().await.unwrap();
    sqlx::raw_sql("CREATE TABLE business (n int); INSERT INTO business VALUES (1)")
        .execute(&mut *unrelated)
        .await
        .unwrap();

    let plan = Plan { options: db.connect_options(), prefix: db.name().to_owned(), survive: false };
    let load = Writers::start(&plan, writers);
    tokio::time::sleep(seconds(short)).await;
    let committed = load.stop().await;
    written.store(true, Ordering::Relaxed);
    let control = control.await.unwrap();

    let none = AtomicBool::new(false);
    let mut total = 0;
    for (consumer, _, seen) in &consumers {
        total = verify(&pool, consumer, seen, &none).await;
    }
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    unrelated.rollback().await.unwrap();
    assert_eq!(total as u64, committed, "what was committed is in the table");
    let runs = consumers[2].2.lock().unwrap().len();
    let missed = total - control.len();
    println!(
        "{writers} writers: {committed} events committed; consumer three ran {runs} times; `seq > last` missed {missed}"
    );
    assert!(runs > 1, "consumer three has restarted");
    assert!(missed > 0, "the load is no test: even `seq > last` has missed nothing of {total}");
    let consumers = outbox.consumers().await.unwrap();
    assert!(consumers.iter().all(|consumer| consumer.retrying + consumer.dead == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixteen_writers_and_every_consumer_sees_everything() {
    torture("torture_16", 16, 6).await;
}

/// Many writers hide what few show.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_writers_and_every_consumer_sees_everything() {
    torture("torture_2", 2, 4).await;
}
