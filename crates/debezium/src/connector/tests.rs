//! Files as people have them.

use super::*;

const FLAT: &str = r#"{
  "name": "orders",
  "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
  "tasks.max": 1,
  "database.hostname": "${env:PG_HOST}",
  "database.port": "5433",
  "database.user": "app",
  "database.password": "${PG_PASSWORD}",
  "database.dbname": "shop",
  "topic.prefix": "shop",
  "plugin.name": "pgoutput",
  "slot.name": "orders",
  "publication.name": "orders",
  "table.include.list": "public\\.outbox",
  "snapshot.mode": "no_data",
  "tombstones.on.delete": false,
  "heartbeat.interval.ms": "10000",
  "max.queue.size": "8192",
  "key.converter": "org.apache.kafka.connect.storage.StringConverter",
  "value.converter": "org.apache.kafka.connect.json.JsonConverter",
  "value.converter.schemas.enable": "false",
  "transforms": "outbox",
  "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
  "transforms.outbox.route.topic.replacement": "${env:TEAM}.${routedByValue}",
  "transforms.outbox.table.fields.additional.placement": "type:header:eventType",
  "producer.override.bootstrap.servers": "kafka:9092"
}"#;

const SERVER: &str = r"# Debezium Server
debezium.sink.type=kafka
debezium.sink.kafka.producer.bootstrap.servers: kafka:9092
debezium.sink.kafka.producer.linger.ms = 5
debezium.source.connector.class=io.debezium.connector.postgresql.PostgresConnector
debezium.source.offset.storage.file.filename=data/offsets.dat
debezium.source.offset.flush.interval.ms=0
debezium.source.database.hostname=localhost
debezium.source.database.user=app
debezium.source.database.password=${PG_PASSWORD}
debezium.source.database.dbname=shop
debezium.source.topic.prefix=shop
debezium.source.table.include.list=\
    sales.events
debezium.source.plugin.name=pgoutput
debezium.transforms=outbox
debezium.transforms.outbox.type=io.debezium.transforms.outbox.EventRouter
debezium.transforms.outbox.route.topic.replacement=ev.\\${routedByValue}
debezium.format.value=simplestring
debezium.format.header.schemas.enable=false
quarkus.log.level=INFO
";

fn lookup(name: &str) -> Option<String> {
    match name {
        "env:PG_HOST" => Some("db".into()),
        "PG_PASSWORD" => Some("hunter2".into()),
        "env:TEAM" => Some("sales".into()),
        _ => None,
    }
}

fn with(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Result<ConnectorConfig> {
    let mut config: serde_json::Map<String, Value> = serde_json::from_str(FLAT).unwrap();
    change(&mut config);
    ConnectorConfig::parse(&Value::Object(config).to_string(), &lookup)
}

#[test]
fn a_connectors_json_is_read() {
    let config = ConnectorConfig::parse(FLAT, &lookup).unwrap();
    assert_eq!((config.host.as_str(), config.port, config.user.as_str()), ("db", 5_433, "app"));
    assert_eq!((config.password.as_deref(), config.dbname.as_str()), (Some("hunter2"), "shop"));
    assert_eq!((config.schema.as_str(), config.table.as_str()), ("public", "outbox"));
    assert_eq!((config.slot.as_str(), config.publication.as_str()), ("orders", "orders"));
    assert_eq!((config.sslmode.as_str(), config.snapshot_mode.as_str()), ("prefer", "no_data"));
    assert_eq!(config.router.route_replacement, "sales.${routedByValue}");
    assert_eq!(config.router.additional[0].alias, "eventType");
    assert_eq!(config.router.topic_prefix.as_deref(), Some("shop"));
    assert!(config.router.extended_headers, "Debezium's default");
    assert_eq!(config.value_converter, Some(Converter::Json { schemas: false }));
    assert_eq!((config.key_converter, config.header_converter), (Some(Converter::String), None));
    assert_eq!(config.bootstrap_servers.as_deref(), Some("kafka:9092"));
    let ignored: Vec<&str> = config.ignored.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(ignored, ["heartbeat.interval.ms", "max.queue.size", "tasks.max", "tombstones.on.delete"]);
    assert!(!format!("{config:?}").contains("hunter2"));
    // In the form that the API answers with.
    let mut flat: serde_json::Map<String, Value> = serde_json::from_str(FLAT).unwrap();
    let name = flat.remove("name");
    let wrapped = json!({ "name": name, "config": flat, "tasks": [] }).to_string();
    assert_eq!(ConnectorConfig::parse(&wrapped, &lookup).unwrap(), config);
}

#[test]
fn properties_and_debezium_server_are_read() {
    let config: serde_json::Map<String, Value> = serde_json::from_str(FLAT).unwrap();
    let lines: Vec<String> = config
        .iter()
        .map(|(key, value)| {
            let value = value.as_str().map_or_else(|| value.to_string(), |text| text.replace('\\', "\\\\"));
            format!("{key} = {value}")
        })
        .collect();
    let text = lines.join("\n");
    assert_eq!(
        ConnectorConfig::parse(&text, &lookup).unwrap(),
        ConnectorConfig::parse(FLAT, &lookup).unwrap()
    );

    let config = ConnectorConfig::parse(SERVER, &lookup).unwrap();
    assert_eq!((config.schema.as_str(), config.table.as_str()), ("sales", "events"));
    assert_eq!(config.router.route_replacement, "ev.${routedByValue}");
    assert_eq!(config.key_converter, Some(Converter::Json { schemas: true }));
    assert_eq!(config.value_converter, Some(Converter::String));
    assert_eq!(config.header_converter, Some(Converter::Json { schemas: false }));
    assert_eq!(config.bootstrap_servers.as_deref(), Some("kafka:9092"));
    assert_eq!(
        (config.slot.as_str(), config.publication.as_str(), config.port),
        ("debezium", "dbz_publication", 5_432)
    );
}

#[test]
fn what_the_worker_decides_comes_from_its_own_file() {
    let mut config = ConnectorConfig::parse(FLAT, &lookup).unwrap();
    let worker = "bootstrap.servers=other:9092\nkey.converter=org.apache.kafka.connect.json.JsonConverter\n\
                  header.converter=org.apache.kafka.connect.storage.StringConverter\nplugin.path=/x\n";
    config.set_worker(worker, &lookup).unwrap();
    assert_eq!(config.key_converter, Some(Converter::String), "the connector's own");
    assert_eq!(config.header_converter, Some(Converter::String));
    assert_eq!(config.bootstrap_servers.as_deref(), Some("kafka:9092"));
}

#[test]
fn what_is_written_is_read_as_the_same() {
    let mut config = ConnectorConfig::parse(FLAT, &lookup).unwrap();
    for converter in [
        Converter::String,
        Converter::Json { schemas: true },
        Converter::ByteArray,
        Converter::Binary(None),
        Converter::Binary(Some(Delegate::String)),
        Converter::Binary(Some(Delegate::Json { schemas: false })),
    ] {
        config.value_converter = Some(converter);
        config.header_converter = Some(Converter::Simple);
        config.router.event_timestamp = Some("at".into());
        config.router.extended_headers = false;
        let again = ConnectorConfig::parse(&config.to_json(), &|_| None).unwrap();
        config.ignored.clone_from(&again.ignored);
        assert_eq!(again, config);
    }
}

#[test]
fn what_cannot_be_honoured_is_refused_by_its_name() {
    for (key, value, expected) in [
        ("connector.class", "io.debezium.connector.mysql.MySqlConnector", "`connector.class` must be"),
        ("time.precision.mode", "connect", "`time.precision.mode` changes what is delivered"),
        ("decimal.handling.mode", "string", "`decimal.handling.mode`"),
        ("column.exclude.list", "public.outbox.secret", "`column.exclude.list`"),
        ("column.mask.with.12.chars", "x", "`column.mask.with.12.chars`"),
        ("transforms", "outbox,unwrap", "has `unwrap` beside the router"),
        ("transforms", "", "names no outbox event router"),
        ("transforms.outbox.type", "org.example.Other", "`transforms.outbox.type` must be"),
        ("transforms.outbox.route.by", "x", "did you mean `route.by.field`?"),
        ("transforms.outbox.tracing.span.context.field", "x", "cannot be honoured"),
        ("table.include.list", "public.a,public.b", "one table"),
        (
            "value.converter",
            "io.confluent.connect.avro.AvroConverter",
            "`value.converter` names the converter",
        ),
        ("snapshot.mode", "custom", "`snapshot.mode` cannot be honoured"),
        ("snapshot.mode", "always", "`snapshot.mode` cannot be honoured"),
        ("producer.override.partitioner.class", "org.example.Mine", "which partition"),
        ("skipped.operations", "c,u", "skips inserts"),
        ("exactly.once.support", "required", "at least once"),
        ("made.up", "x", "`made.up` is not known"),
        ("database.user", "${NOBODY}", "needs `${NOBODY}`"),
    ] {
        let error = with(|config| drop(config.insert(key.into(), value.into()))).unwrap_err();
        assert!(error.message().contains(expected), "{key}: {error}");
        assert!(!error.message().contains("hunter2"), "{error}");
    }
    for key in ["database.hostname", "database.dbname", "table.include.list"] {
        let error = with(|config| drop(config.remove(key))).unwrap_err();
        assert!(error.message().contains(&format!("`{key}` is missing")), "{error}");
    }
    for (key, value) in [
        ("time.precision.mode", "Adaptive"),
        ("skipped.operations", "u,d,t"),
        ("exactly.once.support", "requested"),
    ] {
        with(|config| drop(config.insert(key.into(), value.into()))).unwrap();
    }
    assert!(ConnectorConfig::parse("{", &lookup).unwrap_err().message().contains("not JSON"));
}

#[test]
fn properties_are_javas() {
    let text =
        "! comment\n  a = 1\nb:2\nc 3\nd\\ e=f\\\n   g\nh=\\u0041\\uD83D\\uDE00\\tx\\\\\nempty=\nlone\n";
    let pairs = properties::parse(text).unwrap();
    let pairs: Vec<(&str, &str)> = pairs.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(
        pairs,
        [("a", "1"), ("b", "2"), ("c", "3"), ("d e", "fg"), ("empty", ""), ("h", "A😀\tx\\"), ("lone", "")]
    );
    assert!(properties::parse("a=\\u12").unwrap_err().message().contains("`a`"));
}
