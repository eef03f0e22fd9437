//! Connector files, relays as processes, and what is in Kafka.

use std::{
    collections::{BTreeMap, HashSet},
    fmt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use airtight_testkit::{
    brokers::{connect::database, kafka::Kafka},
    postgres::TestDb,
};
use rdkafka::{
    ClientConfig, Message as _, Offset, Timestamp, TopicPartitionList,
    consumer::{BaseConsumer, Consumer},
    message::Headers,
};
use serde_json::{Map, Value};
use sqlx::{AssertSqlSafe, PgPool};

/// For everything that waits for a JVM, on a machine that is busy with other tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
pub(crate) const STRING: &str = "org.apache.kafka.connect.storage.StringConverter";
pub(crate) const JSON: &str = "org.apache.kafka.connect.json.JsonConverter";
pub(crate) const BINARY: &str = "io.debezium.converters.BinaryDataConverter";
/// Topics have so many partitions.
pub(crate) const PARTITIONS: &str = "3";

/// Runs statements, one after the other, outside of a transaction unless they begin one.
pub(crate) async fn sql(pool: &PgPool, text: &str) {
    sqlx::raw_sql(AssertSqlSafe(text.to_owned()))
        .execute(pool)
        .await
        .unwrap_or_else(|error| panic!("{text}: {error}"));
}

/// Whether somebody streams from a slot.
pub(crate) async fn is_streaming(pool: &PgPool, slot: &str) -> bool {
    let sql = "SELECT EXISTS (SELECT FROM pg_stat_replication r JOIN pg_replication_slots s ON s.active_pid = r.pid \
         WHERE s.slot_name = $1 AND r.state = 'streaming')";
    sqlx::query_scalar(sql).bind(slot).fetch_one(pool).await.unwrap()
}

/// A connector for one table, as `database` has it, with the router and what is the same for all of them.
pub(crate) fn connector(
    db: &TestDb,
    slot: &str,
    table: &str,
    options: &[(&str, &str)],
) -> Map<String, Value> {
    let mut file = database(&db.url());
    let common = [
        ("slot.name", slot),
        ("publication.name", slot),
        ("table.include.list", table),
        ("poll.interval.ms", "50"),
        ("topic.creation.default.replication.factor", "1"),
        ("topic.creation.default.partitions", PARTITIONS),
        ("transforms", "outbox"),
        ("transforms.outbox.type", "io.debezium.transforms.outbox.EventRouter"),
    ];
    for (key, value) in common.iter().chain(options) {
        file.insert((*key).to_owned(), (*value).into());
    }
    file
}

/// As a standalone worker reads it.
pub(crate) fn as_properties(file: &Map<String, Value>) -> String {
    let line = |(key, value): (&String, &Value)| {
        format!("{key}={}\n", value.as_str().unwrap().replace('\\', "\\\\"))
    };
    file.iter().map(line).collect()
}

/// Writes a file into a directory.
pub(crate) fn write(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// The program, with nothing inherited that would change what it does.
pub(crate) fn airtight(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_airtight"));
    command.args(args).env_remove("DATABASE_URL").env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// A relay that is killed when the test ends, however it ends.
pub(crate) struct Relay {
    child: Child,
    log: PathBuf,
}

impl Relay {
    /// Starts one that writes its log to this file.
    pub(crate) fn start(args: &[&str], log: &Path) -> Self {
        let file = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let child = airtight(args).stdout(Stdio::null()).stderr(file).spawn().expect("the binary starts");
        Self { child, log: log.to_owned() }
    }

    /// What it wrote.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Panics with its log if it has ended.
    pub(crate) fn assert_alive(&mut self) {
        let ended = self.child.try_wait().expect("it is ours");
        assert!(ended.is_none(), "{ended:?}: {}", self.log());
    }

    /// SIGTERM, and waits for the end, which must be a clean one.
    pub(crate) fn stop(mut self) -> String {
        let sent = Command::new("kill").args(["-s", "TERM", &self.child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
        let status = self.child.wait().expect("it ends");
        assert!(status.success(), "{status}: {}", self.log());
        self.log()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A message as consumers see it. What is random in every run is masked.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) value: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, Option<Vec<u8>>)>,
    /// None is the time at which it was written, give or take a day.
    pub(crate) timestamp: Option<i64>,
}

impl Message {
    /// A header's value as text.
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        let (_, value) = self.headers.iter().find(|(key, _)| key == name)?;
        value.as_deref().map(|value| String::from_utf8_lossy(value).into_owned())
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |bytes: &Option<Vec<u8>>| bytes.as_deref().map(|bytes| bytes.escape_ascii().to_string());
        write!(
            f,
            "{}[{}] {:?} = {:?} at {:?}",
            self.topic,
            self.partition,
            text(&self.key),
            text(&self.value),
            self.timestamp
        )?;
        self.headers.iter().try_for_each(|(name, value)| write!(f, "; {name}: {:?}", text(value)))
    }
}

/// Reads all topics from their beginning, those that appear meanwhile included.
pub(crate) struct Tap {
    bootstrap: String,
    consumer: BaseConsumer,
    known: HashSet<(String, i32)>,
    pub(crate) seen: Vec<Message>,
}

impl Tap {
    pub(crate) fn new(kafka: &Kafka) -> Self {
        let bootstrap = kafka.bootstrap();
        Self { consumer: consumer(&bootstrap), bootstrap, known: HashSet::new(), seen: Vec::new() }
    }

    /// Begins anew: a partition that was assigned when its topic was a moment old may never be fetched from.
    fn restart(&mut self) {
        self.consumer = consumer(&self.bootstrap);
        self.known.clear();
        self.seen.clear();
    }

    /// Reads until that is all, or panics with what `complain` has to say.
    pub(crate) fn read_until(
        &mut self,
        done: impl Fn(&[Message]) -> bool,
        complain: impl FnOnce(&[Message]) -> String,
    ) {
        let end = Instant::now() + PATIENCE;
        tokio::task::block_in_place(|| {
            let mut idle = 0;
            loop {
                let before = self.seen.len();
                self.read();
                idle = if self.seen.len() > before { 0 } else { idle + 1 };
                if idle >= 20 && self.stored() > i64::try_from(self.seen.len()).unwrap() {
                    self.restart();
                    idle = 0;
                }
                if done(&self.seen) {
                    return;
                }
                if Instant::now() > end {
                    panic!("{} are stored. {}", self.stored(), complain(&self.seen));
                }
            }
        });
    }

    /// Reads what is there, and looks for new topics.
    pub(crate) fn read(&mut self) {
        // Not for ever: somebody may write all the time.
        let end = Instant::now() + Duration::from_secs(1);
        while let Some(message) = self.consumer.poll(Duration::from_millis(100)) {
            self.seen.push(read(&message.unwrap()));
            if Instant::now() > end {
                break;
            }
        }
        let metadata = self.consumer.fetch_metadata(None, Duration::from_secs(10)).unwrap();
        let mut fresh = TopicPartitionList::new();
        for topic in metadata.topics().iter().filter(|topic| !topic.name().starts_with('_')) {
            for partition in topic.partitions().iter().filter(|partition| partition.leader() >= 0) {
                if self.known.insert((topic.name().to_owned(), partition.id())) {
                    fresh.add_partition_offset(topic.name(), partition.id(), Offset::Beginning).unwrap();
                }
            }
        }
        if fresh.count() > 0 {
            self.consumer.incremental_assign(&fresh).unwrap();
        }
    }

    /// How many messages the server says there are, whatever was read of them.
    pub(crate) fn stored(&self) -> i64 {
        let end = |(topic, partition): &(String, i32)| {
            self.consumer
                .fetch_watermarks(topic, *partition, Duration::from_secs(10))
                .map_or(0, |(_, end)| end)
        };
        self.known.iter().map(end).sum()
    }

    /// How many partitions each topic has.
    pub(crate) fn partitions(&self) -> BTreeMap<String, usize> {
        let mut topics = BTreeMap::new();
        for (topic, _) in &self.known {
            *topics.entry(topic.clone()).or_default() += 1;
        }
        topics
    }
}

fn consumer(bootstrap: &str) -> BaseConsumer {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", bootstrap).set("group.id", "tap").set("enable.auto.commit", "false");
    // Where a new partition is not ready to say where it begins; the default is its end.
    config.set("auto.offset.reset", "earliest").create().unwrap()
}

fn read(message: &rdkafka::message::BorrowedMessage<'_>) -> Message {
    const DAY: i64 = 86_400_000;
    let header = |name: &str, value: Option<&[u8]>| match (name, value) {
        // Random at each start; with quotes around it where there are some.
        ("__debezium.context.runId", Some(value)) => Some(masked(value)),
        (_, value) => value.map(<[u8]>::to_vec),
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    let timestamp = match message.timestamp() {
        Timestamp::CreateTime(at) => Some(at).filter(|at| (i64::try_from(now).unwrap() - at).abs() > DAY),
        other => panic!("{other:?}"),
    };
    let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
    Message {
        topic: message.topic().to_owned(),
        partition: message.partition(),
        key: message.key().map(<[u8]>::to_vec),
        value: message.payload().map(<[u8]>::to_vec),
        headers: headers.map(|of| (of.key.to_owned(), header(of.key, of.value))).collect(),
        timestamp,
    }
}

/// With zeros in the place of a UUID, if there is one.
fn masked(value: &[u8]) -> Vec<u8> {
    let text = std::str::from_utf8(value).unwrap();
    let is_id = |word: &&str| word.len() == 36 && word.matches('-').count() == 4;
    match text.split('"').find(is_id) {
        Some(id) => text.replace(id, "(the run's id)").into_bytes(),
        None => value.to_vec(),
    }
}
