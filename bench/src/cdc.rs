//! From the WAL to Kafka, beside Debezium on the same table, the same backlog and the same Kafka: how many events a
//! second, at what cost, how soon after the start, and how long a committed event takes.
//!
//! Both are processes of their own, so that processor time and memory are theirs alone. Debezium runs with its defaults,
//! on a standalone worker of Kafka Connect.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use airtight_testkit::{
    brokers::connect::{Connect, database},
    postgres::TestDb,
    wait::eventually,
};
use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
};
use serde_json::{Map, Value, json};
use sqlx::PgPool;

use crate::{
    idle::cpu_seconds,
    kafka::{Begun, PARTITIONS, Quantiles, brokers, consume, consumer, consumer_from_now, paced},
};

const TABLE: &str = "CREATE TABLE public.outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype varchar(255) \
     NOT NULL, aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)";
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
    let pool = db.pool(4).await;
    sqlx::query(TABLE).execute(&pool).await.expect("a table");
    let bench = Bench { url: db.url(), name: db.name().to_owned(), pool, events, rate, seconds };
    let Some(mut debezium) = Debezium::new(&bench).await else {
        eprintln!("no Debezium: AIRTIGHT_WITH_DEBEZIUM=1 scripts/services start kafka");
        std::process::exit(1);
    };
    let mut airtight = Airtight::new(&bench, binary);
    // Each has its slot before anything is written, and has delivered something.
    bench.prime(&mut airtight).await;
    bench.prime(&mut debezium).await;
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
    // Nobody may read the slots when the database goes.
    drop((airtight, debezium));
    let slots = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database() AND NOT active";
    eventually(Duration::from_secs(30), "the slots to be free", async || {
        sqlx::query(slots).execute(&bench.pool).await.is_ok()
            && sqlx::query_scalar::<_, i64>(
                "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()",
            )
            .fetch_one(&bench.pool)
            .await
            .is_ok_and(|left| left == 0)
    })
    .await;
}

struct Bench {
    url: String,
    name: String,
    pool: PgPool,
    events: usize,
    rate: u32,
    seconds: u64,
}

/// Something that reads the outbox and writes to a topic.
trait Contender {
    fn topic(&self) -> String;
    async fn start(&mut self);
    async fn stop(&mut self);
    fn pid(&self) -> u32;
}

impl Bench {
    /// What both are told.
    fn connector(&self, who: &str) -> Map<String, Value> {
        let mut config = database(&self.url);
        let more = json!({
            "topic.prefix": who,
            "slot.name": format!("{}_{who}", self.name),
            "publication.name": format!("{}_{who}", self.name),
            "publication.autocreate.mode": "filtered",
            "table.include.list": "public.outbox",
            "snapshot.mode": "no_data",
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "transforms": "outbox",
            "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
            "transforms.outbox.route.topic.replacement": format!("{}-{who}-${{routedByValue}}", self.name),
        });
        if let Value::Object(more) = more {
            config.extend(more);
        }
        config
    }

    fn topic(&self, who: &str) -> String {
        format!("{}-{who}-thing", self.name)
    }

    async fn prime(&self, who: &mut impl Contender) {
        make_topic(&who.topic()).await;
        let consumer = consumer(&who.topic());
        who.start().await;
        let first = async {
            loop {
                // Until it streams, what is inserted is not its business.
                self.insert(1).await;
                if tokio::time::timeout(Duration::from_secs(1), consumer.recv()).await.is_ok() {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(120), first).await.expect("a first message");
        // Whatever else was inserted meanwhile.
        while tokio::time::timeout(Duration::from_secs(3), consumer.recv()).await.is_ok() {}
        who.stop().await;
    }

    async fn insert(&self, events: usize) {
        let insert = "INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload) \
             SELECT 'thing', 'key-' || n % 1000, 'Happened', \
             jsonb_build_object('n', n, 'text', rpad(md5(n::text), 470, md5((n * 7)::text))) FROM generate_series(1, $1::bigint) n";
        let events = i64::try_from(events).expect("few");
        sqlx::query(insert).bind(events).execute(&self.pool).await.expect("inserting");
    }

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
            sqlx::raw_sql(sqlx::AssertSqlSafe(batch)).execute(&self.pool).await.expect("filling");
        }
        sqlx::query("CHECKPOINT").execute(&self.pool).await.expect("a checkpoint");
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
                sqlx::query_scalar(insert).bind(n).fetch_one(&self.pool).await.expect("inserting");
            begun.lock().expect("not poisoned").insert(id, Instant::now());
        })
        .await;
        consumer.await.expect("the consumer")
    }
}

async fn make_topic(topic: &str) {
    let admin: AdminClient<DefaultClientContext> =
        ClientConfig::new().set("bootstrap.servers", brokers()).create().expect("an admin client");
    let topic = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
    let made = admin.create_topics([&topic], &AdminOptions::new()).await.expect("Kafka answers");
    assert!(made.iter().all(Result::is_ok), "{made:?}");
}

fn peak_megabytes(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").trim().parse().expect("a number");
    kilobytes / 1_024.0
}

struct Airtight {
    binary: PathBuf,
    file: tempfile::NamedTempFile,
    topic: String,
    child: Option<Child>,
}

impl Airtight {
    fn new(bench: &Bench, binary: &Path) -> Self {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let config = Value::Object(bench.connector("airtight")).to_string();
        std::fs::write(file.path(), config).expect("a file");
        Self { binary: binary.to_owned(), file, topic: bench.topic("airtight"), child: None }
    }
}

impl Contender for Airtight {
    fn topic(&self) -> String {
        self.topic.clone()
    }

    async fn start(&mut self) {
        let child = Command::new(&self.binary)
            .arg("run")
            .arg("--debezium")
            .arg(self.file.path())
            .args(["--to", &format!("kafka://{}", brokers())])
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .spawn()
            .expect("the binary starts");
        self.child = Some(child);
    }

    async fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let asked = Command::new("kill").arg(child.id().to_string()).status();
            assert!(asked.is_ok_and(|status| status.success()), "asking it to end");
            child.wait().expect("it ends");
        }
    }

    fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }
}

impl Drop for Airtight {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

struct Debezium {
    connect: Connect,
    config: Map<String, Value>,
    topic: String,
    is_fresh: bool,
}

impl Debezium {
    async fn new(bench: &Bench) -> Option<Self> {
        let connect = Connect::start("bench", &brokers()).await?;
        Some(Self {
            connect,
            config: bench.connector("debezium"),
            topic: bench.topic("debezium"),
            is_fresh: true,
        })
    }
}

impl Contender for Debezium {
    fn topic(&self) -> String {
        self.topic.clone()
    }

    async fn start(&mut self) {
        if !std::mem::take(&mut self.is_fresh) {
            self.connect.start_again().await;
        }
        self.connect.add("bench", &self.config).await;
    }

    async fn stop(&mut self) {
        self.connect.stop().await;
    }

    fn pid(&self) -> u32 {
        self.connect.pid().unwrap_or_default()
    }
}
