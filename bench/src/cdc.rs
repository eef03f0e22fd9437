//! From the WAL to Kafka, compared with Debezium on the same table, the same backlog and the same Kafka: how many events
//! per second, at what cost, how soon after the start, and how long a committed event takes.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use airtight_testkit::postgres::TestDb;
use serde_json::{Value, json};

use crate::{
    contenders::{Airtight, Arena, Contender, Debezium, Tables},
    idle::cpu_seconds,
    kafka::{Begun, Quantiles, consume, consumer, consumer_from_now, paced},
};

const PATIENCE: Duration = Duration::from_secs(600);

/// What one of the two did.
struct Figures {
    rate: f64,
    cpu_per_million: f64,
    peak_megabytes: f64,
    start_seconds: f64,
    latency: Quantiles,
}

impl Figures {
    fn print(&self, name: &str) {
        println!(
            "{name}: {:.0} events/s, {:.1} CPU seconds per million, {:.0} MB at most, first message {:.1} s after the start, \
             commit to consumer {}",
            self.rate, self.cpu_per_million, self.peak_megabytes, self.start_seconds, self.latency
        );
    }

    fn json(&self) -> Value {
        json!({"rate": self.rate, "cpu_per_million": self.cpu_per_million, "peak_mb": self.peak_megabytes,
            "start_s": self.start_seconds, "median_ms": self.latency.median, "p99_ms": self.latency.p99})
    }
}

pub(crate) async fn run(db: &TestDb, binary: &Path, events: usize, rate: u32, seconds: u64) {
    let arena = Arena::new(db, Tables::TheOutbox).await;
    let mut debezium = Debezium::new(&arena).await;
    let mut airtight = Airtight::new(&arena, binary);
    // Each has its slot before anything is written, and has delivered something.
    arena.prime(&mut airtight).await;
    airtight.stop().await;
    arena.prime(&mut debezium).await;
    debezium.stop().await;
    let bench = Bench { arena, events, rate, seconds };
    bench.fill().await;
    let ours = bench.measure(&mut airtight).await;
    ours.print("airtight, read = \"cdc\"");
    let theirs = bench.measure(&mut debezium).await;
    theirs.print("Debezium, its defaults");
    println!(
        "{:.1} times the events a second, {:.3} of the CPU, {:.3} of the memory",
        ours.rate / theirs.rate,
        ours.cpu_per_million / theirs.cpu_per_million,
        ours.peak_megabytes / theirs.peak_megabytes
    );
    println!(
        "{}",
        json!({"bench": "cdc", "events": events, "airtight": ours.json(), "debezium": theirs.json()})
    );
    drop((airtight, debezium));
    bench.arena.clear().await;
}

struct Bench {
    arena: Arena,
    events: usize,
    rate: u32,
    seconds: u64,
}

impl Bench {
    /// The backlog, in transactions of ten events.
    async fn fill(&self) {
        for _ in 0..self.events / 1_000 {
            let mut batch = String::new();
            for _ in 0..100 {
                batch.push_str(
                    "BEGIN; INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload) SELECT 'thing', \
                     'key-' || (random() * 1000)::int, 'Happened', jsonb_build_object('n', n, 'text', \
                     rpad(md5(n::text), 470, md5((n * 7)::text))) FROM generate_series(1, 10) n; COMMIT;",
                );
            }
            sqlx::raw_sql(sqlx::AssertSqlSafe(batch)).execute(&self.arena.pool).await.expect("filling");
        }
        sqlx::query("CHECKPOINT").execute(&self.arena.pool).await.expect("a checkpoint");
    }

    async fn measure(&self, who: &mut impl Contender) -> Figures {
        let consumer = consumer(&who.topic());
        // Past what priming left.
        let mut before = 0;
        while tokio::time::timeout(Duration::from_secs(3), consumer.recv()).await.is_ok() {
            before += 1;
        }
        println!("{before} messages were there before");
        let begun = Instant::now();
        who.start().await;
        let (mut first, mut count) = (None, 0);
        while count < self.events {
            tokio::time::timeout(PATIENCE, consumer.recv()).await.expect("in time").expect("a message");
            first.get_or_insert_with(Instant::now);
            count += 1;
        }
        let (first, last) = (first.expect("one came"), Instant::now());
        let (cpu, peak) = (cpu_seconds(who.pid()), peak_megabytes(who.pid()));
        let latency = self.latency(who).await;
        who.stop().await;
        Figures {
            rate: self.events as f64 / (last - first).as_secs_f64(),
            cpu_per_million: cpu / self.events as f64 * 1e6,
            peak_megabytes: peak,
            start_seconds: (first - begun).as_secs_f64(),
            latency,
        }
    }

    async fn latency(&self, who: &impl Contender) -> Quantiles {
        let total = usize::try_from(u64::from(self.rate) * self.seconds).expect("few");
        let begun = Begun::default();
        let from_now = consumer_from_now(&who.topic()).await;
        let consumer = tokio::spawn(consume(from_now, begun.clone(), total));
        paced(self.rate, total, async |n| {
            let insert = "INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload) \
                 VALUES ('thing', 'key-' || $1, 'Happened', '{}') RETURNING id::text";
            let n = i64::try_from(n % 100).expect("few");
            let id: String =
                sqlx::query_scalar(insert).bind(n).fetch_one(&self.arena.pool).await.expect("inserting");
            begun.lock().expect("not poisoned").insert(id, Instant::now());
        })
        .await;
        consumer.await.expect("the consumer")
    }
}

fn peak_megabytes(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").trim().parse().expect("a number");
    kilobytes / 1_024.0
}
