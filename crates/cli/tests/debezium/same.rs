//! The same inserts through Debezium and through airtight.

use std::collections::{BTreeMap, HashSet};

use airtight_testkit::{
    brokers::{connect::Connect, kafka::Kafka},
    postgres::TestDb,
    wait::eventually,
};
use serde_json::json;

use super::{
    scenarios::{self, Form, Scenario},
    support::{Message, PATIENCE, Relay, STRING, Tap, as_properties, connector, is_streaming, sql, write},
};

/// Both read one database, each through a slot of its own, and write to a Kafka of their own.
#[tokio::test(flavor = "multi_thread")]
async fn both_write_the_same() {
    let test = "both_write_the_same";
    let Some(db) = TestDb::create(test).await else { return };
    let (Some(theirs), Some(ours)) = (Kafka::start(test).await, Kafka::start(test).await) else { return };
    let Some(connect) = Connect::start(test, &theirs.bootstrap()).await else { return };
    let dir = tempfile::tempdir().unwrap();
    let pool = db.pool(2).await;
    // What a server is told about dates is nothing that consumers may notice.
    sql(
        &pool,
        &format!(
            "ALTER DATABASE {} SET DateStyle = 'German'; ALTER DATABASE {0} SET TimeZone = 'Asia/Seoul'",
            db.name()
        ),
    )
    .await;
    let scenarios = scenarios::all();
    for scenario in &scenarios {
        sql(&pool, &scenario.setup).await;
        sql(&pool, &scenario.before).await;
    }
    let mut relays = Vec::new();
    for scenario in &scenarios {
        let slots = ["d", "a"].map(|side| format!("{}_{}_{side}", db.name(), scenario.name));
        let [debezium, airtight] =
            slots.each_ref().map(|slot| connector(&db, slot, scenario.table, &scenario.options));
        connect.add(scenario.name, &debezium).await;
        relays.push(start(scenario, &airtight, &ours, &dir));
        for (slot, side) in slots.iter().zip(["Debezium", "airtight"]) {
            let what = format!(
                "{side} to stream `{}`: {:?}, {}",
                scenario.name,
                connect.task(scenario.name).await,
                relays.last().unwrap().log()
            );
            eventually(PATIENCE, &what, async || {
                relays.last_mut().unwrap().assert_alive();
                is_streaming(&pool, slot).await
            })
            .await;
        }
    }
    for scenario in &scenarios {
        sql(&pool, &scenario.statements).await;
    }
    let expected: usize = scenarios.iter().map(|scenario| scenario.expected).sum();
    let [mut debezium, mut airtight] = [&theirs, &ours].map(Tap::new);
    let tasks = async || {
        let mut states = String::new();
        for scenario in &scenarios {
            states += &format!("{}: {:?}\n", scenario.name, connect.task(scenario.name).await);
        }
        states
    };
    let states = tasks().await;
    debezium.read_until(
        |seen| seen.len() >= expected,
        |seen| format!("Debezium wrote {} of {expected}: {:?}\n{states}", seen.len(), counts(seen)),
    );
    airtight.read_until(
        |seen| seen.len() >= expected,
        |seen| {
            let logs: String = relays.drain(..).map(Relay::stop).collect();
            let missing: Vec<&Message> =
                debezium.seen.iter().filter(|one| !ids(seen).contains(&one.header("id"))).collect();
            format!("airtight wrote {} of {expected}, and not {missing:#?}\n{logs}", seen.len())
        },
    );
    for relay in relays {
        relay.stop();
    }
    debezium.read();
    airtight.read();
    println!(
        "{} messages from Debezium, {} from airtight, in {:?}",
        debezium.seen.len(),
        airtight.seen.len(),
        counts(&airtight.seen)
    );
    assert_eq!(debezium.seen.len(), expected, "{:?}", counts(&debezium.seen));
    assert_eq!(counts(&airtight.seen), counts(&debezium.seen));
    assert_eq!(airtight.partitions(), debezium.partitions());
    let (ours, theirs) = (by_key(&airtight.seen), by_key(&debezium.seen));
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (key, theirs) in &theirs {
        let ours = &ours[key];
        assert_eq!(ours.len(), theirs.len(), "{key:?}");
        for (mine, yours) in ours.iter().zip(theirs) {
            assert_eq!(mine, yours);
        }
    }
}

/// The binary, with the same file in one of its forms.
fn start(
    scenario: &Scenario,
    config: &serde_json::Map<String, serde_json::Value>,
    kafka: &Kafka,
    dir: &tempfile::TempDir,
) -> Relay {
    let text = match scenario.form {
        Form::Json => serde_json::to_string_pretty(config).unwrap(),
        Form::Api => json!({ "name": scenario.name, "config": config, "tasks": [] }).to_string(),
        Form::Properties => as_properties(config),
    };
    let file = write(dir, &format!("{}.connector", scenario.name), &text);
    let worker = format!(
        "bootstrap.servers={}\nkey.converter={STRING}\nvalue.converter={STRING}\n",
        kafka.bootstrap()
    );
    let worker = write(dir, "worker.properties", &worker);
    let to = format!("kafka://{}", kafka.bootstrap());
    let mut args = vec!["run", "--debezium", file.to_str().unwrap()];
    match scenario.form {
        Form::Properties => args.extend(["--worker", worker.to_str().unwrap()]),
        Form::Json | Form::Api => args.extend(["--to", &to]),
    }
    Relay::start(&args, &dir.path().join(format!("{}.log", scenario.name)))
}

/// Messages in each partition. Those without a key are anywhere.
fn counts(messages: &[Message]) -> BTreeMap<(String, i32), usize> {
    let mut counts = BTreeMap::new();
    for message in messages {
        let partition = if message.key.is_some() { message.partition } else { -1 };
        *counts.entry((message.topic.clone(), partition)).or_default() += 1;
    }
    counts
}

fn ids(messages: &[Message]) -> HashSet<Option<String>> {
    messages.iter().map(|message| message.header("id")).collect()
}

/// Topic, partition and key.
type Key = (String, i32, Option<Vec<u8>>);

/// What each key got, in order. Those without a key have no order, so theirs is that of their ids.
fn by_key(messages: &[Message]) -> BTreeMap<Key, Vec<Message>> {
    let mut keys: BTreeMap<_, Vec<Message>> = BTreeMap::new();
    for message in messages {
        let mut message = message.clone();
        if message.key.is_none() {
            message.partition = -1;
        }
        keys.entry((message.topic.clone(), message.partition, message.key.clone()))
            .or_default()
            .push(message);
    }
    for (_, messages) in keys.iter_mut().filter(|((.., key), _)| key.is_none()) {
        messages.sort_by_key(|message| message.header("id"));
    }
    keys
}
