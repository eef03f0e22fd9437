//! Topics that are new: whatever the broker answers first, nothing that is reported as delivered may be missing.

use std::collections::HashSet;

use airtight_testkit::{brokers::kafka::Kafka, postgres::TestDb, wait::eventually};

use super::support::{PATIENCE, Relay, STRING, Tap, connector, is_streaming, sql, write};

const TOPICS: usize = 40;
const KEYS: usize = 12;

/// A broker that has just made a topic may refuse its first message and take the second.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_messages_of_new_topics_arrive() {
    let test = "the_first_messages_of_new_topics_arrive";
    let Some(db) = TestDb::create(test).await else { return };
    let Some(kafka) = Kafka::start(test).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = db.pool(2).await;
    sql(&pool, "CREATE TABLE outbox (id int8 PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text)")
        .await;
    let options = [("topic.prefix", "x"), ("key.converter", STRING), ("value.converter", STRING)];
    let file = connector(&db, db.name(), "public.outbox", &options);
    let path = write(&dir, "connector.json", &serde_json::to_string(&file).unwrap());
    let to = format!("kafka://{}", kafka.bootstrap());
    let relay =
        Relay::start(&["run", "--debezium", path.to_str().unwrap(), "--to", &to], &dir.path().join("log"));
    eventually(PATIENCE, "the relay", async || is_streaming(&pool, db.name()).await).await;
    let settled = "SELECT coalesce(max(last_seq), 0) FROM airtight.partition";
    for topic in 0..TOPICS {
        let first = topic * KEYS;
        let insert = format!(
            "INSERT INTO outbox SELECT {first} + n, 'topic-{topic}', 'key-' || n, 't', 'x' FROM generate_series(0, {KEYS} - 1) n"
        );
        sql(&pool, &insert).await;
        let goal = i64::try_from(first + KEYS).unwrap();
        eventually(PATIENCE, "a topic to be settled", async || {
            sqlx::query_scalar::<_, i64>(settled).fetch_one(&pool).await.unwrap() >= goal
        })
        .await;
    }
    let said = relay.stop();
    assert!(said.contains(&format!("delivered={} dead=0", TOPICS * KEYS)), "{said}");
    let mut tap = Tap::new(&kafka);
    let ids = |seen: &[super::support::Message]| -> HashSet<String> {
        seen.iter().filter_map(|message| message.header("id")).collect()
    };
    tap.read_until(
        |seen| ids(seen).len() >= TOPICS * KEYS,
        |seen| {
            let all = ids(seen);
            let missing: Vec<usize> =
                (0..TOPICS * KEYS).filter(|id| !all.contains(&id.to_string())).collect();
            format!("missing: {missing:?}\n{said}")
        },
    );
}
