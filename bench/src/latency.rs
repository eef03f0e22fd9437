//! How long a committed event takes to reach a consumer of a log, with and without an unrelated transaction that
//! writes and is left open all the time. Polling only: no NOTIFY.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use airtight_core::{
    CancellationToken, Capabilities, Delivery, NewEvent, Outcome, Relay, Sink, admin::Admin, log::LogOptions,
    table::Shape,
};
use airtight_postgres::{PgOptions, PgOutbox};
use airtight_testkit::postgres::TestDb;
use async_trait::async_trait;

/// Rounds without and with, in turn, so that a noisy minute hits both.
const ROUNDS: usize = 4;

type Committed = Arc<Mutex<HashMap<i64, Instant>>>;

struct Stopwatch {
    committed: Committed,
    taken: Arc<Mutex<Vec<Duration>>>,
}

#[async_trait]
impl Sink for Stopwatch {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let now = Instant::now();
        let mut committed = self.committed.lock().expect("not poisoned");
        let mut taken = self.taken.lock().expect("not poisoned");
        for delivery in batch {
            // One that overtook its own publisher's return took no time.
            let since = committed.remove(&delivery.event.seq).unwrap_or(now);
            taken.push(now.saturating_duration_since(since));
        }
        vec![Outcome::Delivered; batch.len()]
    }
}

pub(crate) async fn run(db: &TestDb, rate: u32, seconds: u64) {
    let options = PgOptions { shape: Shape::Log, ..PgOptions::default() };
    let outbox = PgOutbox::connect(&db.url(), options).await.expect("connecting");
    outbox.migrate().await.expect("migrating");
    let pool = db.pool(2).await;
    sqlx::raw_sql("CREATE TABLE public.business (n bigint)").execute(&pool).await.expect("a table");
    let (committed, taken) = (Committed::default(), Arc::new(Mutex::new(Vec::new())));
    let stop = CancellationToken::new();
    let sink = Stopwatch { committed: committed.clone(), taken: taken.clone() };
    let relay = tokio::spawn(Relay::new(outbox.log(LogOptions::consumer("bench")), sink).run(stop.clone()));

    let mut medians: [Vec<Duration>; 2] = Default::default();
    for round in 0..ROUNDS * 2 {
        let unrelated = if round % 2 == 1 {
            let mut open = pool.begin().await.expect("a transaction");
            sqlx::query("INSERT INTO public.business VALUES (1)").execute(&mut *open).await.expect("writing");
            Some(open)
        } else {
            None
        };
        write(&outbox, rate, seconds, &committed).await;
        let seen = || taken.lock().expect("not poisoned").len() as u64 >= u64::from(rate) * seconds;
        while !seen() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let round_taken = std::mem::take(&mut *taken.lock().expect("not poisoned"));
        medians[round % 2].extend(round_taken);
        if let Some(open) = unrelated {
            open.rollback().await.expect("ending it");
        }
    }
    stop.cancel();
    relay.await.expect("the relay").expect("the relay");
    let [without, with] = medians.map(median_ms);
    println!(
        "commit to consumer at {rate} events/s, polling: median {without:.2} ms; with an unrelated writer left open {with:.2} ms, {:.2}x",
        with / without
    );
    println!(
        "{}",
        serde_json::json!({"bench": "latency", "rate": rate, "median_ms": without, "median_ms_open_writer": with, "ratio": with / without})
    );
}

async fn write(outbox: &PgOutbox, rate: u32, seconds: u64, committed: &Committed) {
    let mut tick = tokio::time::interval(Duration::from_secs(1) / rate);
    for n in 0..u64::from(rate) * seconds {
        tick.tick().await;
        let event = NewEvent::new("bench", "Benched", "Thing", format!("key-{}", n % 100));
        let published = Admin::publish(outbox, &[event]).await.expect("publishing");
        committed.lock().expect("not poisoned").insert(published[0].seq, Instant::now());
    }
}

fn median_ms(mut taken: Vec<Duration>) -> f64 {
    taken.sort_unstable();
    taken[taken.len() / 2].as_secs_f64() * 1_000.0
}
