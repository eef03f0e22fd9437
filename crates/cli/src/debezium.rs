//! Migration from Debezium and back: converts a connector file to a pipeline, and a pipeline to a connector file.

use std::path::Path;

use airtight::{
    Code, Error, Policy,
    debezium::{Converters, FORMAT, Placement, connector::ConnectorConfig},
    kafka::KafkaConfig,
    postgres::{CdcOptions, Snapshot},
    table::{Field, PayloadKind, TableSpec},
};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use crate::{
    config::{
        Pipeline, Reading, check_slot,
        urls::{Broker, BrokerKind, DatabaseUrl, Secret, SinkTarget},
    },
    errors::{Failure, Outcome},
};

/// A connector file, converted to a database address and a pipeline.
#[derive(Debug)]
pub(crate) struct FromConnector {
    pub(crate) url: DatabaseUrl,
    pub(crate) pipeline: Pipeline,
    pub(crate) connector: ConnectorConfig,
}

/// Reads the connector file, and the worker's properties if they are given.
pub(crate) fn read(file: &Path, worker: Option<&Path>, to: Option<&str>) -> Outcome<FromConnector> {
    let text = |path: &Path| {
        std::fs::read_to_string(path)
            .map_err(|error| Failure::usage(format!("cannot read {}: {error}", path.display())))
    };
    let in_file = |path: &Path, error: Error| Failure::usage(format!("{}: {error}", path.display()));
    let lookup = |name: &str| std::env::var(name.strip_prefix("env:").unwrap_or(name)).ok();
    let mut connector =
        ConnectorConfig::parse(&text(file)?, &lookup).map_err(|error| in_file(file, error))?;
    if let Some(path) = worker {
        connector.set_worker(&text(path)?, &lookup).map_err(|error| in_file(path, error))?;
    }
    if connector.plugin != "pgoutput" {
        return Err(Failure::usage(format!(
            "{}: `plugin.name` is `{}`, and airtight cannot continue a slot of that plugin: it reads `pgoutput`. Let \
             Debezium deliver the remaining events, drop its slot, and set `plugin.name` to `pgoutput`",
            file.display(),
            connector.plugin
        )));
    }
    check_slot(&connector.slot)
        .map_err(|message| Failure::usage(format!("{}: `slot.name`: {message}", file.display())))?;
    let producer_settings = producer_settings(&connector, file)?;
    // Without their values, some of which are passwords.
    let is_used =
        |key: &str| key == "database.sslrootcert" || producer_settings.iter().any(|(_, of, _)| *of == key);
    for (key, _) in connector.ignored.iter().filter(|(key, _)| !is_used(key)) {
        tracing::info!(key, "airtight does not use this key of the connector file, and ignores it");
    }
    let converters = converters(&connector, file)?;
    let sink = sink(&connector, converters, &producer_settings, to, file)?;
    let read = Reading::Cdc(Box::new(CdcOptions {
        publication: connector.publication.clone(),
        snapshot: match connector.snapshot_mode.as_str() {
            "never" | "no_data" | "schema_only" => Snapshot::Never,
            // A slot that Debezium has read is read on; its own positions are behind that.
            _ => Snapshot::NewSlot,
        },
        messages: None,
        ..CdcOptions::slot(connector.slot.clone())
    }));
    let name = connector.name.clone().unwrap_or_else(|| "debezium".into());
    let pipeline = Pipeline { name, read, policy: Policy::default(), sink };
    Ok(FromConnector { url: url(&connector), pipeline, connector })
}

fn url(connector: &ConnectorConfig) -> DatabaseUrl {
    let encode = |text: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        text.bytes()
            .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
            .collect::<String>()
    };
    let password = connector.password.as_ref().map(|text| format!(":{}", encode(text))).unwrap_or_default();
    let host = match connector.host.contains(':') {
        true => format!("[{}]", connector.host),
        false => connector.host.clone(),
    };
    let root = given(connector, "database.sslrootcert");
    let root = root.map(|path| format!("&sslrootcert={}", encode(path))).unwrap_or_default();
    DatabaseUrl::Postgres(Secret::new(format!(
        "postgres://{}{password}@{host}:{}/{}?sslmode={}{root}",
        encode(&connector.user),
        connector.port,
        encode(&connector.dbname),
        encode(&connector.sslmode)
    )))
}

/// A key that the connector's own config has no field for.
fn given<'a>(connector: &'a ConnectorConfig, key: &str) -> Option<&'a str> {
    let found = connector.ignored.iter().find(|(name, _)| name == key);
    found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
}

/// Connect has no default converter for keys and values: one of the two files must name them.
fn converters(connector: &ConnectorConfig, file: &Path) -> Outcome<Converters> {
    let (key, value) = match (connector.key_converter, connector.value_converter) {
        (Some(key), Some(value)) => (key, value),
        (key, value) => {
            let parts = [("`key.converter`", key.is_none()), ("`value.converter`", value.is_none())];
            let missing: Vec<&str> =
                parts.into_iter().filter(|(_, missing)| *missing).map(|(part, _)| part).collect();
            let (verb, keys) = if missing.len() == 1 { ("is", "key") } else { ("are", "keys") };
            return Err(Failure::usage(format!(
                "{}: {} {verb} missing: give the worker's properties with --worker FILE, or add the {keys}",
                file.display(),
                missing.join(" and ")
            )));
        }
    };
    Ok(Converters { key, value, header: connector.header_converter.unwrap_or(Converters::default().header) })
}

/// The connector's settings for Connect's producer and for topic creation: our key, the connector's key, the value.
fn producer_settings(
    connector: &ConnectorConfig,
    file: &Path,
) -> Outcome<Vec<(&'static str, &'static str, String)>> {
    const KEYS: [(&str, &str); 4] = [
        ("create_partitions", "topic.creation.default.partitions"),
        ("create_replication", "topic.creation.default.replication.factor"),
        ("compression", "producer.override.compression.type"),
        ("max_message_bytes", "producer.override.max.request.size"),
    ];
    let mut found = Vec::new();
    for (ours, theirs) in KEYS {
        // -1 is the broker's own default, which is ours as well.
        let Some(value) = given(connector, theirs).filter(|value| *value != "-1") else { continue };
        KafkaConfig::new("")
            .set(ours, value)
            .map_err(|error| Failure::usage(format!("{}: `{theirs}`: {error}", file.display())))?;
        found.push((ours, theirs, value.to_owned()));
    }
    Ok(found)
}

fn sink(
    connector: &ConnectorConfig,
    converters: Converters,
    producer_settings: &[(&str, &str, String)],
    to: Option<&str>,
    file: &Path,
) -> Outcome<SinkTarget> {
    let to = match (to, &connector.bootstrap_servers) {
        (Some(to), _) => to.to_owned(),
        (None, Some(servers)) => format!("kafka://{servers}"),
        (None, None) => {
            return Err(Failure::usage(format!(
                "{} does not give Kafka's address: pass --to kafka://HOST:PORT, or the worker's properties with --worker FILE",
                file.display()
            )));
        }
    };
    let target = SinkTarget::parse(&to).map_err(|message| Failure::usage(format!("--to: {message}")))?;
    let SinkTarget::Broker(Broker { kind: BrokerKind::Kafka, url, settings: given }) = target else {
        return Err(Failure::usage(
            "--debezium delivers to Kafka, as Debezium does: pass --to kafka://HOST:PORT",
        ));
    };
    let mut settings: Vec<(String, String)> = vec![
        ("format".into(), FORMAT.as_str().into()),
        ("key_converter".into(), converters.key.as_str().into()),
        ("value_converter".into(), converters.value.as_str().into()),
        ("header_converter".into(), converters.header.as_str().into()),
        // As Connect does, where the cluster lets it.
        ("create".into(), "true".into()),
    ];
    settings.extend(producer_settings.iter().map(|(key, _, value)| ((*key).to_owned(), value.clone())));
    settings
        .extend(connector.router.pairs().into_iter().map(|(key, value)| (format!("debezium.{key}"), value)));
    let settings = settings.into_iter().map(|(key, value)| (key, Secret::new(value))).chain(given).collect();
    Ok(SinkTarget::Broker(Broker { kind: BrokerKind::Kafka, url, settings }))
}

/// The mapping of the table's columns, from the router's options and the columns' types in the database.
pub(crate) async fn spec(url: &str, connector: &ConnectorConfig) -> Result<TableSpec, Error> {
    let failed = |error: sqlx::Error| {
        Error::retryable(Code::UNREACHABLE, format!("reading the outbox's columns: {error}"))
    };
    let mut conn = PgConnection::connect(url).await.map_err(failed)?;
    let columns: Vec<(String, String)> = sqlx::query_as(
        "SELECT a.attname::text, t.typname::text FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid \
         JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_type b ON b.oid = a.atttypid \
         JOIN pg_type t ON t.oid = CASE b.typtype WHEN 'd' THEN b.typbasetype ELSE b.oid END \
         WHERE n.nspname = $1 AND c.relname = $2 AND a.attnum > 0 AND NOT a.attisdropped",
    )
    .bind(&connector.schema)
    .bind(&connector.table)
    .fetch_all(&mut conn)
    .await
    .map_err(failed)?;
    // The connection is no longer needed, so a failure to close it cleanly does not matter.
    let _ = conn.close().await;
    let table = format!("{}.{}", connector.schema, connector.table);
    if columns.is_empty() {
        return Err(Error::permanent(
            Code::NO_TABLE,
            format!("there is no table {table} (`table.include.list`)"),
        )
        .with_remedy("create it, or correct `table.include.list`"));
    }
    let type_of =
        |name: &str| columns.iter().find(|(column, _)| column == name).map(|(_, kind)| kind.as_str());
    let router = &connector.router;
    let optional = [
        ("table.field.event.timestamp", &router.event_timestamp),
        ("table.field.event.schema.version", &router.event_schema_version),
    ];
    let mut needed = vec![
        ("table.field.event.id", &router.event_id),
        ("table.field.event.key", &router.event_key),
        ("table.field.event.payload", &router.event_payload),
        ("route.by.field", &router.route_by),
    ];
    needed.extend(optional.into_iter().filter_map(|(option, column)| Some((option, column.as_ref()?))));
    let placed =
        router.additional.iter().filter(|of| router.error_on_missing || of.placement == Placement::Envelope);
    needed.extend(placed.map(|of| ("table.fields.additional.placement", &of.column)));
    let bad = |message: String| Err(Error::permanent(Code::BAD_COLUMN, message));
    // Debezium's task ends over the first row that lacks one; here all rows would be dead.
    for (option, column) in needed {
        if type_of(column).is_none() {
            return bad(format!("{table} has no column `{column}`, which `{option}` names"));
        }
    }
    for of in router.additional.iter().filter(|of| of.placement == Placement::Partition) {
        if let Some(kind) = type_of(&of.column).filter(|kind| *kind != "int4") {
            return bad(format!("`{}` has type {kind}, but a partition must be an int4", of.column));
        }
    }
    if let Some(column) = &router.event_timestamp
        && let Some(kind) = type_of(column).filter(|kind| !matches!(*kind, "timestamp" | "timestamptz"))
    {
        return bad(format!(
            "`{column}` has type {kind}, but `table.field.event.timestamp` must be a timestamp"
        ));
    }
    let routed = Field::FirstOf(vec![router.route_by.clone()]);
    Ok(TableSpec {
        identity: router.event_id.clone(),
        id: router.event_id.clone(),
        seq: None,
        created_at: None,
        stream: routed.clone(),
        event_type: match type_of(&router.event_type) {
            Some(_) => Field::FirstOf(vec![router.event_type.clone(), router.route_by.clone()]),
            None => Field::Constant("event".into()),
        },
        aggregate_type: routed,
        // Debezium writes a message without a key where there is none; such events are ordered by nothing.
        aggregate_id: Field::FirstOf(vec![router.event_key.clone(), router.event_id.clone()]),
        op: None,
        payload: router.event_payload.clone(),
        payload_kind: match type_of(&router.event_payload) {
            Some("json" | "jsonb") => PayloadKind::Json,
            Some("bytea") => PayloadKind::Bytes,
            _ => PayloadKind::Text,
        },
        payload_bytes: None,
        headers: None,
        occurred_at: router.event_timestamp.clone(),
        schema_version: None,
        max_attempts: None,
        ..TableSpec::canonical_log(Some(&connector.schema), &connector.table)
    })
}

/// Converts a pipeline to a connector file. `password` decides whether the database's password is written to it.
pub(crate) fn connector(
    url: &DatabaseUrl,
    table: &TableSpec,
    pipeline: &Pipeline,
    slot: &CdcOptions,
    password: bool,
) -> Outcome<String> {
    let refuse = |what: &str| Err(Failure::failed(format!("pipeline `{}` {what}", pipeline.name)));
    let DatabaseUrl::Postgres(url) = url else { return refuse("reads SQLite, which Debezium cannot read") };
    let SinkTarget::Broker(Broker { kind: BrokerKind::Kafka, url: to, settings }) = &pipeline.sink else {
        return refuse("does not deliver to Kafka, which is where Kafka Connect delivers");
    };
    let settings: Vec<(String, String)> =
        settings.iter().map(|(key, value)| (key.clone(), value.reveal().to_owned())).collect();
    let kafka = KafkaConfig::from_url(to.reveal())
        .and_then(|mut config| config.set_all(&settings).map(|()| config))?;
    if kafka.format != FORMAT {
        return refuse("does not write `format = \"debezium\"`: Debezium would write something else");
    }
    if kafka.topic.is_some() {
        return refuse("sets `topic`, but Debezium builds the topic from `debezium.route.topic.replacement`");
    }
    let options: PgConnectOptions =
        url.reveal().parse().map_err(|error| Failure::usage(format!("the database's URL: {error}")))?;
    let address = airtight::settings::Address::parse(url.reveal())?;
    let mut router = kafka.debezium.clone();
    let name = |field: &Field| field.columns().first().cloned();
    router.event_id.clone_from(&table.id);
    router.event_payload.clone_from(&table.payload);
    if let Some(column) = name(&table.aggregate_id) {
        router.event_key = column;
    }
    if let Some(column) = name(&table.event_type) {
        router.event_type = column;
    }
    if router.route_by == "aggregatetype"
        && let Some(column) = name(&table.aggregate_type)
    {
        router.route_by = column;
    }
    router.topic_prefix.get_or_insert_with(|| pipeline.name.clone());
    let schema = table.schema.clone().unwrap_or_else(|| "public".into());
    router.table = Some(format!("{schema}.{}", table.table));
    let connector = ConnectorConfig {
        // Connect remembers positions by connectors' names. One that has run before would ask for WAL that is gone
        // since, and fail.
        name: Some(format!("{}-from-airtight", pipeline.name)),
        host: options.get_host().to_owned(),
        port: options.get_port(),
        user: options.get_username().to_owned(),
        password: address.password.filter(|_| password),
        dbname: options.get_database().unwrap_or_default().to_owned(),
        sslmode: address
            .query
            .iter()
            .find(|(key, _)| key == "sslmode")
            .map_or("prefer".into(), |(_, mode)| mode.clone()),
        slot: slot.log.consumer.clone(),
        publication: slot.publication.clone(),
        plugin: "pgoutput".into(),
        schema,
        table: table.table.clone(),
        // What is before the slot's place was delivered.
        snapshot_mode: "no_data".into(),
        router,
        key_converter: Some(kafka.converters.key),
        value_converter: Some(kafka.converters.value),
        header_converter: Some(kafka.converters.header),
        bootstrap_servers: None,
        ignored: Vec::new(),
    };
    Ok(connector.to_json())
}
