//! airtight and Debezium on the same table: their common settings, and how each is started and ended.
//!
//! Each is a separate process, so that processor time and memory are measured separately. Debezium runs with its defaults,
//! on a standalone worker of Kafka Connect.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
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

use crate::kafka::{PARTITIONS, brokers, consumer};

const TABLE: &str = "CREATE TABLE public.outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype varchar(255) \
     NOT NULL, aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)";

/// Something that reads the outbox and writes to a topic.
pub(crate) trait Contender {
    fn topic(&self) -> String;
    async fn start(&mut self);
    async fn stop(&mut self);
    fn pid(&self) -> u32;
}

/// A database with an outbox as Debezium wants it.
pub(crate) struct Arena {
    pub(crate) pool: PgPool,
    url: String,
    name: String,
    published: Tables,
}

/// What the publications have: what one would choose, or Debezium's default.
#[derive(Clone, Copy)]
pub(crate) enum Tables {
    TheOutbox,
    All,
}

impl Arena {
    pub(crate) async fn new(db: &TestDb, published: Tables) -> Self {
        let pool = db.pool(4).await;
        sqlx::query(TABLE).execute(&pool).await.expect("a table");
        Self { pool, url: db.url(), name: db.name().to_owned(), published }
    }

    /// What both are told; anything else is Debezium's default.
    fn connector(&self, who: &str) -> Map<String, Value> {
        let mut config = database(&self.url);
        let more = json!({
            "topic.prefix": who,
            "slot.name": self.slot(who),
            "publication.name": self.slot(who),
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
        if let Tables::TheOutbox = self.published {
            config.insert("publication.autocreate.mode".into(), "filtered".into());
        }
        config
    }

    fn topic(&self, who: &str) -> String {
        format!("{}-{who}-thing", self.name)
    }

    pub(crate) fn slot(&self, who: &str) -> String {
        format!("{}_{who}", self.name)
    }

    /// Makes its slot: starts it, and inserts until one has arrived.
    pub(crate) async fn prime(&self, who: &mut impl Contender) {
        make_topic(&who.topic()).await;
        let consumer = consumer(&who.topic());
        who.start().await;
        let first = async {
            loop {
                // Until it streams, what is inserted is not its business.
                self.insert().await;
                if tokio::time::timeout(Duration::from_secs(1), consumer.recv()).await.is_ok() {
                    return;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(120), first).await.expect("a first message");
        // Whatever else was inserted meanwhile.
        while tokio::time::timeout(Duration::from_secs(3), consumer.recv()).await.is_ok() {}
    }

    async fn insert(&self) {
        let insert = "INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload) VALUES ('thing', 'key-1', 'Happened', '{}')";
        sqlx::query(insert).execute(&self.pool).await.expect("inserting");
    }

    /// Drops the slots once nobody reads them: the database cannot go before.
    pub(crate) async fn clear(&self) {
        let drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE database = current_database() AND NOT active";
        let count = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
        eventually(Duration::from_secs(30), "the slots to be free", async || {
            sqlx::query(drop).execute(&self.pool).await.is_ok()
                && sqlx::query_scalar::<_, i64>(count).fetch_one(&self.pool).await.is_ok_and(|left| left == 0)
        })
        .await;
    }
}

async fn make_topic(topic: &str) {
    let admin: AdminClient<DefaultClientContext> =
        ClientConfig::new().set("bootstrap.servers", brokers()).create().expect("an admin client");
    let topic = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
    let made = admin.create_topics([&topic], &AdminOptions::new()).await.expect("Kafka answers");
    assert!(made.iter().all(Result::is_ok), "{made:?}");
}

pub(crate) struct Airtight {
    binary: PathBuf,
    file: tempfile::NamedTempFile,
    topic: String,
    child: Option<Child>,
}

impl Airtight {
    pub(crate) fn new(arena: &Arena, binary: &Path) -> Self {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let config = Value::Object(arena.connector("airtight")).to_string();
        std::fs::write(file.path(), config).expect("a file");
        Self { binary: binary.to_owned(), file, topic: arena.topic("airtight"), child: None }
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

pub(crate) struct Debezium {
    connect: Connect,
    config: Map<String, Value>,
    topic: String,
    is_fresh: bool,
}

impl Debezium {
    pub(crate) async fn new(arena: &Arena) -> Self {
        let Some(connect) = Connect::start("bench", &brokers()).await else {
            eprintln!("no Debezium: AIRTIGHT_WITH_DEBEZIUM=1 scripts/services start kafka");
            std::process::exit(1);
        };
        Self { connect, config: arena.connector("debezium"), topic: arena.topic("debezium"), is_fresh: true }
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
