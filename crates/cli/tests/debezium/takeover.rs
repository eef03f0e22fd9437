//! One goes on where the other stopped, while the application goes on writing.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_testkit::{
    brokers::{connect::Connect, kafka::Kafka},
    postgres::TestDb,
    wait::eventually,
};
use serde_json::{Map, Value};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::task::JoinHandle;

use super::support::{
    JSON, Message, PARTITIONS, PATIENCE, Relay, STRING, Tap, airtight, connector, is_streaming, sql, write,
};

const KEYS: usize = 11;
/// How many each of them is seen to deliver before the other takes over.
const SOME: usize = 300;
/// What a stop may make come again: at most so many.
const FEW: usize = 150;

/// An application that inserts one row at a time, numbered for each key, and deletes every third at once.
struct Application {
    written: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Application {
    fn start(pool: PgPool) -> Self {
        let (written, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let task = tokio::spawn({
            let (written, stop) = (written.clone(), stop.clone());
            async move {
                while !stop.load(Ordering::Relaxed) {
                    let n = written.load(Ordering::Relaxed);
                    let id = format!("00000000-0000-4000-8000-{n:012}");
                    let then = if n.is_multiple_of(3) {
                        format!("DELETE FROM outbox WHERE id = '{id}';")
                    } else {
                        String::new()
                    };
                    let insert = format!(
                        "BEGIN; INSERT INTO outbox VALUES ('{id}', 'Order', 'key-{}', 'Placed', '{{\"n\": {n}}}'); {then} COMMIT",
                        n % KEYS
                    );
                    sql(&pool, &insert).await;
                    written.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        });
        Self { written, stop, task }
    }

    /// Ends it; returns how many rows it wrote.
    async fn finish(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
        self.written.load(Ordering::Relaxed)
    }
}

/// What a topic has: how often each number came, by its place.
struct Audit {
    first: HashMap<usize, usize>,
    again: Vec<usize>,
}

impl Audit {
    fn of(messages: &[Message]) -> Self {
        let mut audit = Self { first: HashMap::new(), again: Vec::new() };
        let mut last: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
        for (place, message) in messages.iter().enumerate() {
            let id = message.header("id").unwrap();
            let n: usize = id.rsplit('-').next().unwrap().trim_matches('"').parse().unwrap();
            assert_eq!(message.value.as_deref(), Some(format!("\"{{\\\"n\\\": {n}}}\"").as_bytes()));
            assert_eq!(message.header("eventType").as_deref(), Some("Placed"));
            if audit.first.contains_key(&n) {
                audit.again.push(n);
                continue;
            }
            audit.first.insert(n, place);
            // Whoever delivers, and however often: nothing comes for the first time after a later one of its key.
            let before = last.insert(message.key.clone().unwrap(), n);
            assert!(before.is_none_or(|before| before < n), "{n} came after {before:?} of its key");
        }
        audit
    }
}

fn options() -> [(&'static str, &'static str); 6] {
    [
        ("topic.prefix", "shop"),
        ("key.converter", STRING),
        ("value.converter", JSON),
        ("value.converter.schemas.enable", "false"),
        ("transforms.outbox.route.topic.replacement", "shop.${routedByValue}"),
        ("transforms.outbox.table.fields.additional.placement", "type:header:eventType"),
    ]
}

const TABLE: &str = "CREATE TABLE outbox (id uuid NOT NULL PRIMARY KEY, aggregatetype varchar(255) NOT NULL, \
    aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)";

#[tokio::test(flavor = "multi_thread")]
async fn one_goes_on_where_the_other_stopped() {
    let test = "one_goes_on_where_the_other_stopped";
    let Some(db) = TestDb::create(test).await else { return };
    let Some(kafka) = Kafka::start(test).await else { return };
    let Some(connect) = Connect::start(test, &kafka.bootstrap()).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = db.pool(3).await;
    sql(&pool, TABLE).await;
    // Debezium's default: a publication of all tables, airtight's own included.
    let slot = db.name();
    let mut file = connector(&db, slot, "public.outbox", &options());
    file.remove("publication.name");
    connect.add("orders", &file).await;
    eventually(PATIENCE, "Debezium", async || is_streaming(&pool, slot).await).await;
    let app = Application::start(pool.clone());
    let mut tap = Tap::new(&kafka);
    let wait_for = |tap: &mut Tap, what: &str, log: &dyn Fn() -> String| {
        let goal = app.written.load(Ordering::Relaxed) + SOME;
        let all = |seen: &[Message]| {
            seen.iter().filter_map(|message| message.header("id")).collect::<HashSet<_>>().len()
        };
        tap.read_until(
            |seen| all(seen) >= goal,
            |seen| format!("{what}: {} of {goal}; {}", all(seen), log()),
        );
    };

    wait_for(&mut tap, "Debezium delivers", &|| connect.log_tail());
    let by_debezium = tap.seen.len();
    connect.stop().await;
    let left = position(&pool, "SELECT pg_current_wal_lsn()::text").await;

    let path = write(&dir, "connector.json", &serde_json::to_string(&file).unwrap());
    let to = format!("kafka://{}", kafka.bootstrap());
    let (log, args) = (dir.path().join("log"), ["run", "--debezium", path.to_str().unwrap(), "--to", &to]);
    let relay = Relay::start(&args, &log);
    wait_for(&mut tap, "airtight delivers", &|| relay.log());
    // As after a day: the server no longer has what was before.
    sql(&pool, "CHECKPOINT").await;
    let kept = format!("SELECT restart_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'");
    eventually(PATIENCE, "the server to forget", async || position(&pool, &kept).await > left).await;
    let said = relay.stop();
    assert!(said.contains("streaming") && !said.contains("the table was read"), "{said}");
    tap.read();
    let (then, by_airtight) = (Audit::of(&tap.seen), tap.seen.len());
    println!(
        "{by_debezium} by Debezium, then {} by airtight, {} of them again",
        by_airtight - by_debezium,
        then.again.len()
    );
    assert!(then.again.len() <= FEW, "{:?}", then.again);

    // And back, with what we print. Not by a name that Connect knows: what it remembers is gone from the server.
    let (name, back) = printed(&db, &kafka, slot, &dir);
    connect.start_again().await;
    connect.add("orders", &back).await;
    let failed = async || connect.task("orders").await.is_some_and(|(state, _)| state == "FAILED");
    eventually(PATIENCE, "Debezium to fail over its old position", failed).await;
    assert!(connect.task("orders").await.unwrap().1.unwrap().contains("no longer available on the server"));
    connect.remove("orders").await;
    connect.add(&name, &back).await;
    eventually(PATIENCE, "Debezium again", async || {
        let task = connect.task(&name).await;
        assert!(task.as_ref().is_none_or(|(state, _)| state != "FAILED"), "{task:?}");
        is_streaming(&pool, slot).await
    })
    .await;
    wait_for(&mut tap, "Debezium delivers again", &|| connect.log_tail());
    let written = app.finish().await;
    tap.read_until(
        |seen| Audit::of(seen).first.len() == written,
        |seen| {
            let audit = Audit::of(seen);
            let missing: Vec<usize> = (0..written).filter(|n| !audit.first.contains_key(n)).collect();
            format!("{} of {written} are missing: {missing:?}", missing.len())
        },
    );
    let audit = Audit::of(&tap.seen);
    println!(
        "then {} by Debezium, {} of them again",
        tap.seen.len() - by_airtight,
        audit.again.len() - then.again.len()
    );
    assert!(audit.again.len() - then.again.len() <= FEW, "{:?}", audit.again);
    connect.stop().await;

    // A third change: the slot was moved by somebody else since we have read it, and that is said, not passed over.
    let refused = airtight(&args).stdout(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("the slot") && said.contains("stands at"), "{said}");
}

/// A place in the WAL, to be compared.
async fn position(pool: &PgPool, sql: &str) -> u64 {
    let lsn: String = sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(pool).await.unwrap();
    let (high, low) = lsn.split_once('/').unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    number(high) << 32 | number(low)
}

/// What `airtight debezium-config` prints for a config that does the same.
fn printed(db: &TestDb, kafka: &Kafka, slot: &str, dir: &tempfile::TempDir) -> (String, Map<String, Value>) {
    let toml = format!(
        r#"[database]
url = "{}"

[table]
schema = "public"
name = "outbox"
id = "id"
stream = "aggregatetype"
event_type = "type"
aggregate_type = "aggregatetype"
aggregate_id = "aggregateid"
payload = "payload"

[pipelines.orders]
read = "cdc"
slot = "{slot}"
publication = "dbz_publication"
snapshot = "new_slot"

[pipelines.orders.to]
url = "kafka://{}"
format = "debezium"
value_converter = "json"
create = true
create_partitions = {PARTITIONS}

[pipelines.orders.to.settings]
"debezium.topic.prefix" = "shop"
"debezium.extended.headers.enabled" = "true"
"debezium.table.fields.additional.placement" = "type:header:eventType"
"debezium.route.topic.replacement" = "shop.$${{routedByValue}}"
"#,
        db.url(),
        kafka.bootstrap()
    );
    let config = write(dir, "airtight.toml", &toml);
    // Who has such a config can also ask after the reader that the connector's file began.
    let readers = airtight(&["cdc", "list", "-c", config.to_str().unwrap(), "--json"]).output().unwrap();
    let readers: Value = serde_json::from_slice(&readers.stdout).unwrap();
    assert_eq!(readers[0]["name"], slot, "{readers}");
    let output =
        airtight(&["debezium-config", "-c", config.to_str().unwrap(), "--password"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let whole: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(whole["name"], "orders-from-airtight");
    let mut printed = whole["config"].as_object().unwrap().clone();
    assert_eq!(printed["slot.name"], slot);
    // The test's own server lets everybody in, and Debezium wants a password all the same.
    printed.entry("database.password").or_insert("none".into());
    printed.insert("topic.creation.default.replication.factor".into(), "1".into());
    printed.insert("topic.creation.default.partitions".into(), PARTITIONS.into());
    ("orders-from-airtight".into(), printed)
}
