//! The real Debezium against the recorded messages that `airtight-core` compares its encoder with.
//!
//! `AIRTIGHT_BLESS=1 cargo test -p airtight-kafka --test debezium` records them anew.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

#[path = "debezium/cases/mod.rs"]
mod cases;
#[path = "debezium/golden.rs"]
mod golden;
#[path = "debezium/recorder.rs"]
mod recorder;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use airtight_core::{Class, Delivery, Event, Outcome, Sink};
use airtight_debezium::{DebeziumEncoder, connector::ConnectorConfig};
use airtight_kafka::{KafkaConfig, KafkaSink};
use airtight_testkit::{
    brokers::{
        connect::{Connect, database},
        kafka::Kafka,
    },
    deliveries::{of, sample_event},
    postgres::TestDb,
};

use golden::Golden;
use recorder::Tap;

#[tokio::test(flavor = "multi_thread")]
async fn debezium_still_writes_what_was_recorded() {
    let Some(goldens) = recorder::record("debezium_still_writes_what_was_recorded").await else { return };
    let bless = std::env::var_os("AIRTIGHT_BLESS").is_some();
    std::fs::create_dir_all(golden::folder()).unwrap();
    for golden in goldens {
        if bless {
            std::fs::write(golden.path(), golden.text()).unwrap();
            continue;
        }
        let recorded = std::fs::read_to_string(golden.path()).unwrap_or_default();
        assert_eq!(golden.text(), recorded, "{} has changed", golden.case);
    }
}

/// What arrives at Kafka is what the encoder made: keys, values and headers that are null, empty or doubled included.
#[tokio::test(flavor = "multi_thread")]
async fn the_sink_sends_records_as_they_are() {
    let Some(kafka) = Kafka::start("the_sink_sends_records_as_they_are").await else { return };
    let mut tap = Tap::new(&kafka);
    let mut expected = BTreeMap::new();
    for golden in Golden::all() {
        let mut config = KafkaConfig::new(kafka.bootstrap());
        for (key, value) in [
            ("format", "debezium"),
            ("create", "true"),
            ("create_partitions", "3"),
            ("key_converter", &golden.key),
            ("value_converter", &golden.value),
            ("header_converter", &golden.header),
        ] {
            config.set(key, value).unwrap();
        }
        for (name, value) in &golden.options {
            config.set(&format!("debezium.{name}"), value.as_str().unwrap()).unwrap();
        }
        let encoder = DebeziumEncoder::new(config.debezium.clone(), config.converters).unwrap();
        let sink = KafkaSink::new(config).unwrap();
        assert!(sink.capabilities().wants_rows);
        // Each has a key of its own, so that one that cannot be written holds up nobody.
        let events: Vec<Event> = (0..golden.rows.len())
            .map(|row| Event { aggregate_id: row.to_string(), ..golden.event(row) })
            .collect();
        let batch: Vec<Delivery> = events.iter().cloned().map(of).collect();
        let outcomes = sink.deliver(&batch).await;
        for (event, outcome) in events.iter().zip(outcomes) {
            match (encoder.encode(event), outcome) {
                (Ok(record), Outcome::Delivered) => {
                    let written = recorder::recorded(&record);
                    expected.insert(written.identity(), written);
                }
                (Err(_), Outcome::Failed(error)) => assert_eq!(error.class(), Class::Permanent, "{error}"),
                (record, outcome) => panic!("{}: {outcome:?} for {record:?}", golden.case),
            }
        }
        sink.close().await.unwrap();
    }
    assert!(expected.len() > 200, "{}", expected.len());
    let end = Instant::now() + Duration::from_secs(60);
    while !expected.is_empty() {
        assert!(Instant::now() < end, "still missing {:?}", expected.values().next());
        let Some(mut arrived) = tap.next() else { continue };
        let sent = expected.remove(&arrived.identity()).unwrap_or_else(|| panic!("whose is {arrived:?}?"));
        arrived.partition = arrived.partition.filter(|_| sent.partition.is_some());
        assert_eq!(arrived, sent);
    }
}

/// An event that asks for a partition which is not there is dead, and holds up nobody else.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_not_there_is_the_events_own_fault() {
    let Some(kafka) = Kafka::start("a_partition_that_is_not_there_is_the_events_own_fault").await else {
        return;
    };
    let url = format!(
        "kafka://{}/parted?format=debezium&create=true&create_partitions=2&\
         debezium.table.fields.additional.placement=shard:partition",
        kafka.bootstrap()
    );
    let sink = KafkaSink::new(KafkaConfig::from_url(&url).unwrap()).unwrap();
    let event = |seq: i64, key: &str, shard: i64| {
        let mut event = sample_event(seq, key);
        event.extra.insert("shard".into(), shard.into());
        event
    };
    // One key over several partitions is a lane each, one after the other.
    let batch =
        [event(1, "a", 1), event(2, "b", 7), event(3, "a", 0), event(4, "a", 0), event(5, "b", 1)].map(of);
    let outcomes = sink.deliver(&batch).await;
    let shown: Vec<String> = outcomes
        .iter()
        .map(|outcome| match outcome {
            Outcome::Failed(error) => format!("{} {}", error.code(), error.class().as_str()),
            other => format!("{other:?}"),
        })
        .collect();
    assert_eq!(shown, ["Delivered", "no_partition permanent", "Delivered", "Delivered", "Skipped"]);
    let preview = sink.preview(&batch[0].event).unwrap().unwrap();
    assert_eq!(preview.destination, "topic parted, partition 1");
}

/// The way back: what we write for Kafka Connect is taken by it, and delivers.
#[tokio::test(flavor = "multi_thread")]
async fn debezium_takes_the_connector_that_we_write() {
    let test = "debezium_takes_the_connector_that_we_write";
    let Some(kafka) = Kafka::start(test).await else { return };
    let Some(db) = TestDb::create(test).await else { return };
    let Some(connect) = Connect::start(test, &kafka.bootstrap()).await else { return };
    let pool = db.pool(1).await;
    recorder::run(
        &pool,
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload jsonb); \
         INSERT INTO outbox VALUES ('00000000-0000-4000-8000-000000000001', 'Order', '42', 'Placed', '{}')",
    )
    .await;
    let mut file = database(&db.url());
    for (key, value) in [
        ("topic.prefix", "back"),
        ("slot.name", db.name()),
        ("publication.name", db.name()),
        ("table.include.list", "public.outbox"),
        ("extended.headers.enabled", "false"),
        ("value.converter", "org.apache.kafka.connect.json.JsonConverter"),
        ("value.converter.schemas.enable", "false"),
        ("transforms", "o"),
        ("transforms.o.type", "io.debezium.transforms.outbox.EventRouter"),
        ("transforms.o.route.topic.replacement", "back.${routedByValue}"),
        ("transforms.o.table.fields.additional.placement", "type:header:eventType"),
    ] {
        file.insert(key.into(), value.into());
    }
    let mut config = ConnectorConfig::parse(&serde_json::to_string(&file).unwrap(), &|_| None).unwrap();
    config.bootstrap_servers = Some(kafka.bootstrap());
    let written: serde_json::Value = serde_json::from_str(&config.to_json()).unwrap();
    let mut taken = written["config"].as_object().unwrap().clone();
    // The worker makes topics only where a connector says how.
    taken.insert("topic.creation.default.replication.factor".into(), "1".into());
    taken.insert("topic.creation.default.partitions".into(), "1".into());
    connect.add("back", &taken).await;

    let mut tap = Tap::new(&kafka);
    let end = Instant::now() + Duration::from_secs(90);
    let arrived = loop {
        assert!(Instant::now() < end, "nothing arrives: {:?}", connect.task("back").await);
        if let Some(arrived) = tap.next() {
            break arrived;
        }
    };
    assert_eq!((arrived.topic.as_str(), arrived.value.as_str()), ("back.Order", Some("\"{}\"")));
    assert_eq!(arrived.headers.last().unwrap(), &("eventType".to_owned(), "Placed".into()));
    connect.remove("back").await;
}
