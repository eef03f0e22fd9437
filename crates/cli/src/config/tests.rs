use std::time::Duration;

use airtight::{
    Order, Policy, Rules,
    inbox::DedupeKey,
    kafka::KafkaConfig,
    log::{LogOptions, OnFailure, Start},
    postgres::CdcOptions,
    queue::QueueOptions,
    table::{Count, Field},
};

use super::{urls::SinkTarget, *};

fn parse(text: &str) -> std::result::Result<Config, String> {
    let env = |name: &str| match name {
        "PASSWORD" => Some("hush".to_owned()),
        "BATCH" => Some("77".to_owned()),
        _ => None,
    };
    Config::parse("airtight.toml", text, &env).map_err(|error| error.to_string())
}

fn queue(pipeline: &Pipeline) -> &QueueOptions {
    let Reading::Queue(queue) = &pipeline.read else { panic!("{pipeline:?}") };
    queue
}

fn log(pipeline: &Pipeline) -> &LogOptions {
    let Reading::Log(log) = &pipeline.read else { panic!("{pipeline:?}") };
    log
}

const fn days(days: u64) -> Option<Duration> {
    Some(Duration::from_secs(days * 86_400))
}

fn error(text: &str) -> String {
    parse(text).unwrap_err()
}

#[test]
fn a_full_config() {
    let config = parse(
        r#"
        [database]
        url = "postgres://app:${PASSWORD}@${HOST:-localhost}/shop"
        schema = "outboxes"
        max_connections = 5
        listen = false

        [pipelines.orders]
        read = "queue"
        streams = ["shop.orders", "shop.payments"]
        order = "total"
        on_dead = "block"
        lease = "45s"
        batch = "${BATCH}"
        max_attempts = 3
        poll = "250ms"
        in_flight_bytes = "8MiB"
        backoff = { base = "2s", multiplier = 3, cap = "10m", jitter = 0 }
        to = { url = "https://example.org/hook", secret = "whsec_x", headers = { "X-Team" = "a" }, timeout = "5s", concurrency = 4, ca = "ca.pem", proxy = "http://proxy:3128" }

        [pipelines.rest]
        streams = ["audit"]
        to = "file:audit.ndjson"

        [retention]
        done = "30d"
        "#,
    )
    .unwrap();
    assert_eq!(config.url.unwrap().to_string(), "postgres://app:XXX@localhost/shop");
    assert_eq!(config.database.listen, Some(false));
    assert_eq!((config.retention.done, config.retention.log), (days(30), days(30)));
    let orders = &config.pipelines[0];
    assert_eq!(orders.name, "orders");
    assert_eq!(queue(orders).rules(), Rules { order: Order::Total, block_on_dead: true });
    assert_eq!((orders.policy.batch_events, orders.policy.max_attempts), (77, 3));
    assert_eq!(orders.policy.in_flight_bytes, 8 << 20);
    assert_eq!(orders.policy.backoff.cap, Duration::from_secs(600));
    let SinkTarget::Webhook(webhook) = &orders.sink else { panic!("{:?}", orders.sink) };
    assert_eq!(webhook.secret.as_ref().unwrap().reveal(), "whsec_x");
    assert_eq!((webhook.concurrency, webhook.timeout), (Some(4), Some(Duration::from_secs(5))));
    assert_eq!(webhook.ca.as_deref(), Some(std::path::Path::new("ca.pem")));
    assert_eq!(webhook.proxy.as_ref().unwrap().reveal(), "http://proxy:3128");
    assert_eq!(config.pipelines[1].sink, SinkTarget::File("audit.ndjson".into()));
}

/// The example says that it shows defaults, so it must.
#[test]
fn the_example_is_valid_and_shows_the_defaults() {
    let text = include_str!("../../airtight.example.toml");
    let config = parse(text).unwrap();
    // Where it was set is not part of the value.
    let kept = |one: &Retention| (one.done, one.log, one.inbox, one.log_waits_for_consumers);
    assert_eq!(kept(&config.retention), kept(&Retention::default()));
    let [orders, audit] = &config.pipelines[..] else { panic!("{:?}", config.pipelines) };
    assert_eq!(orders.policy, Policy::default());
    assert_eq!(QueueOptions { streams: Vec::new(), ..queue(orders).clone() }, QueueOptions::default());
    assert_eq!(audit.sink, SinkTarget::File("audit.ndjson".into()));

    let spec = parse(&commented(text, "unless [retention] says so.")).unwrap().database.spec.unwrap();
    assert_eq!(spec.display_name(), "bank.transfer_events");

    let config = parse(&commented(text, "as a log, in place of the pipelines above.")).unwrap();
    let [billing] = &config.pipelines[..] else { panic!("{:?}", config.pipelines) };
    assert_eq!(*log(billing), LogOptions::consumer("billing"));

    let config =
        parse(&commented(text, "PostgreSQL's WAL as the source, in place of polling; docs/cdc.md.")).unwrap();
    let Reading::Cdc(stream) = &config.pipelines[0].read else { panic!("{:?}", config.pipelines) };
    assert_eq!(**stream, CdcOptions::slot("airtight_shop_stream"));

    let config = parse(&commented(text, "Kafka, and its defaults:")).unwrap();
    let SinkTarget::Broker(broker) = &config.pipelines[0].sink else { panic!("{:?}", config.pipelines) };
    let mut kafka = KafkaConfig::from_url(broker.url.reveal()).unwrap();
    let settings = broker.settings.iter().map(|(key, value)| (key.clone(), value.reveal().to_owned()));
    kafka.set_all(&settings.collect::<Vec<_>>()).unwrap();
    // A topic of its own goes without saying, and Debezium's router has another.
    assert_eq!(
        kafka.topic.take().map(|topic| format!("{topic:?}")),
        Some(r#"Template("{stream}")"#.to_owned())
    );
    assert_eq!(format!("{kafka:?}"), format!("{:?}", KafkaConfig::new("localhost:9092")));
}

/// A block of the example that is commented out: from behind these words to the next empty line.
fn commented(text: &str, behind: &str) -> String {
    let (_, block) = text.split_once(behind).unwrap();
    let (_, block) = block.split_once('\n').unwrap();
    let lines = block.lines().take_while(|line| line.starts_with('#'));
    lines.filter_map(|line| line.strip_prefix("# ")).map(|line| format!("{line}\n")).collect()
}

#[test]
fn logs() {
    let config = parse(
        r#"
        [database]
        shape = "log"

        [pipelines.billing]
        to = "null:"

        [pipelines.mail]
        read = "log"
        consumer = "mailer"
        streams = ["shop.orders"]
        partitions = 8
        start = "latest"
        on_failure = "halt"
        on_dead = "block"
        max_parked = 50
        max_ahead = 1000
        lease = "5s"
        to = "null:"

        [retention]
        log = "forever"
        inbox = "7d"
        log_waits_for_consumers = false
        "#,
    )
    .unwrap();
    let [billing, mail] = &config.pipelines[..] else { panic!("{:?}", config.pipelines) };
    assert_eq!(*log(billing), LogOptions::consumer("billing"), "named and read after what is there");
    let mail = log(mail);
    assert_eq!((mail.consumer.as_str(), mail.read.partitions, mail.start), ("mailer", 8, Start::Latest));
    assert_eq!((mail.on_failure, mail.max_parked, mail.max_ahead), (OnFailure::Halt, 50, 1_000));
    assert!(
        mail.read.block_on_dead
            && mail.read.lease == Duration::from_secs(5)
            && mail.read.streams == ["shop.orders"]
    );
    let kept = config.retention;
    assert_eq!((kept.log, kept.inbox, kept.log_waits_for_consumers), (None, days(7), false));
}

#[test]
fn the_relay_log_preset() {
    let config = parse("[table]\npreset = \"relay-log\"\n[pipelines.index]\nto = \"null:\"\n").unwrap();
    assert_eq!(config.database.spec, Some(TableSpec::relay_log()));
    assert_eq!(log(&config.pipelines[0]).consumer, "index");
    assert_eq!((config.retention.log, config.retention.log_waits_for_consumers), (days(30), false));
}

#[test]
fn the_preset_can_be_written_out() {
    let config = parse(
        r#"
        [table]
        schema = "cn_relay"
        name = "events_outbox"
        id = "event_id"
        identity = "seq"
        seq = "seq"
        created_at = "ingested_at"
        occurred_at = "created_at"
        op = "op"
        stream = "topic_id"
        event_type = "kind"
        aggregate_type = { constant = "Event" }
        aggregate_id = { first_of = ["effective_key", "event_id"] }
        extra = { reason = "reason" }
        lookup = { schema = "cn_relay", table = "events", key = "event_id" }
        offsets = { schema = "cn_relay", table = "consumer_offsets", consumer = "consumer", last_seq = "last_seq", updated_at = "updated_at" }
        channel = "cn_relay_outbox"
        dedupe = "event_id_and_op"
        "#,
    )
    .unwrap();
    assert_eq!(config.database.spec, Some(TableSpec::relay_log()));
    assert_eq!(config.retention.log, None, "rows of a foreign table are not deleted unasked");
    let version = "[table]\nname = \"t\"\nid = \"i\"\nstream = \"s\"\nevent_type = \"e\"\naggregate_type = \"a\"\n\
                   aggregate_id = \"k\"\npayload = \"p\"\ndedupe = { aggregate_version = \"version\" }\n";
    let spec = parse(version).unwrap().database.spec.unwrap();
    assert_eq!(spec.log.dedupe, DedupeKey::AggregateVersion("version".into()));
}

#[test]
fn a_foreign_table() {
    let config = parse(
        r#"
        [table]
        schema = "bank"
        name = "transfer_events"
        id = "event_id"
        aggregate_id = "transfer_id"
        aggregate_type = { constant = "Transfer" }
        event_type = "event_type"
        stream = { constant = "transfers" }
        payload = "payload"
        payload_kind = "json_text"
        created_at = "created_at"
        extra = { market = "market_code" }
        count = { retries = "retry_count" }
        [table.status]
        column = "status"
        new = "PENDING"
        retrying = { word = "FAILED", when = { column = "retry_count", less = 5 } }
        done = "PUBLISHED"
        dead = { word = "FAILED", when = { column = "retry_count", at_least = 5 } }
        "#,
    )
    .unwrap();
    let spec = config.database.spec.unwrap();
    assert_eq!(spec.display_name(), "bank.transfer_events");
    assert_eq!((spec.identity.as_str(), spec.zone.as_str()), ("event_id", "UTC"));
    assert_eq!(spec.stream, Field::Constant("transfers".into()));
    assert_eq!(spec.count, Some(Count::Retries("retry_count".into())));
    assert_eq!(spec.extra, [("market".to_owned(), "market_code".to_owned())]);
    let status = spec.status.unwrap();
    assert_eq!(status.dead.when.unwrap().value, 5);
    assert_eq!(status.processing, None);
    assert_eq!(config.retention.done, None, "rows of a foreign table are not deleted unasked");
}

#[test]
fn complaints_name_line_key_and_remedy() {
    let p = "[pipelines.a]\nto = \"null:\"\n";
    for (text, expected) in [
        (
            "[databse]\n".to_owned(),
            "airtight.toml:1: unknown key `databse` at the top level; did you mean `database`?",
        ),
        (
            format!("{p}batc = 5\n"),
            "airtight.toml:3: unknown key `batc` in [pipelines.a]; did you mean `batch`?",
        ),
        (
            "[retention]\ncolour = 1\n".to_owned(),
            "airtight.toml:2: unknown key `colour` in [retention]; known keys are `done`, `done_by_creation`, `log`, `inbox` and `log_waits_for_consumers`",
        ),
        (
            format!("{p}batch = \"many\"\n"),
            "airtight.toml:3: pipelines.a.batch: expected a whole number, found `many`",
        ),
        (format!("{p}batch = 0\n"), "airtight.toml:3: pipelines.a.batch: must be at least 1, found 0"),
        (
            format!("{p}batch = 1.5\n"),
            "airtight.toml:3: pipelines.a.batch: expected a whole number, found a number with a fraction",
        ),
        (format!("{p}partitions = 70000\n"), "airtight.toml:3: pipelines.a.partitions: 70000 is too large"),
        (
            format!("{p}order = \"keys\"\n"),
            "airtight.toml:3: pipelines.a.order: unknown word `keys`; allowed words are `key`, `none` and `total` (did you mean `key`?)",
        ),
        (
            format!("{p}read = \"wal\"\n"),
            "airtight.toml:3: pipelines.a.read: unknown word `wal`; allowed words are `queue`, `log` and `cdc`",
        ),
        (
            format!("{p}consumer = \"billing\"\n"),
            "airtight.toml:3: pipelines.a.consumer: `consumer` is for `read = \"log\"`, but this pipeline reads a queue",
        ),
        (
            format!("{p}read = \"log\"\nslot = \"shop\"\n"),
            "airtight.toml:4: pipelines.a.slot: `slot` is for `read = \"cdc\"`, but this pipeline reads a log",
        ),
        (
            format!("{p}read = \"cdc\"\npartitions = 4\n"),
            "airtight.toml:4: pipelines.a.partitions: `partitions` is for `read = \"queue\"` and `read = \"log\"`, but this pipeline reads cdc",
        ),
        (
            format!("{p}read = \"cdc\"\nslot = \"Shop-1\"\n"),
            "airtight.toml:4: pipelines.a.slot: a slot's name must consist of 1 to 63 lower-case letters, digits and underscores, found `Shop-1`",
        ),
        (
            format!(
                "{p}read = \"cdc\"\nslot = \"s\"\n[pipelines.b]\nto = \"null:\"\nread = \"cdc\"\nslot = \"s\"\n"
            ),
            "airtight.toml:5: pipelines.b: pipelines `a` and `b` both read the slot `s`, but only one can read it; give each its own `slot`",
        ),
        (
            format!("{p}read = \"cdc\"\n[pipelines.b]\nto = \"null:\"\n"),
            "airtight.toml:4: pipelines.b: pipelines `a` and `b` both read all streams, so each event would reach only one of them; give each its own `streams`",
        ),
        (
            format!("{p}read = \"cdc\"\nsnapshot = \"always\"\n"),
            "airtight.toml:4: pipelines.a.snapshot: unknown word `always`; allowed words are `initial`, `new_slot` and `never`",
        ),
        (
            format!("{p}read = \"log\"\npartitions = 65\n"),
            "airtight.toml:4: pipelines.a.partitions: a consumer has at most 64 partitions, found 65",
        ),
        (
            format!("{p}read = \"log\"\nstart = \"first\"\n"),
            "airtight.toml:4: pipelines.a.start: unknown word `first`; allowed words are `earliest` and `latest`",
        ),
        (format!("{p}read = \"log\"\nconsumer = \"\"\n"), "airtight.toml:4: pipelines.a.consumer: is empty"),
        (
            "[database]\nshape = \"logs\"\n".to_owned(),
            "airtight.toml:2: database.shape: unknown word `logs`; allowed words are `queue` and `log` (did you mean `log`?)",
        ),
        (
            "[table]\npreset = \"relay-log\"\nname = \"x\"\n".to_owned(),
            "airtight.toml:3: table.name: a preset sets all columns; remove either `name` or `preset`",
        ),
        (
            "[table]\npreset = \"relaylog\"\n".to_owned(),
            "airtight.toml:2: table.preset: unknown word `relaylog`; allowed words are `relay-log` (did you mean `relay-log`?)",
        ),
        (
            "[database]\nshape = \"log\"\n[table]\npreset = \"relay-log\"\n".to_owned(),
            "airtight.toml:3: table: `database.shape` applies to airtight's own table, but [table] maps another table: remove one of them",
        ),
        (
            "[retention]\nlog = 30\n".to_owned(),
            "airtight.toml:2: retention.log: expected a duration in quotes, like \"30s\", found a whole number",
        ),
        (
            format!("{p}lease = 30\n"),
            "airtight.toml:3: pipelines.a.lease: expected a duration in quotes, like \"30s\", found a whole number",
        ),
        (
            format!("{p}lease = \"30\"\n"),
            "airtight.toml:3: pipelines.a.lease: `30` is not a duration; write it like `500ms`, `30s`, `5m`, `2h` or `7d`",
        ),
        (
            format!("{p}lease = \"10ms\"\n"),
            "airtight.toml:3: pipelines.a.lease: a lease must last from 1s to 1d",
        ),
        (
            format!("{p}streams = []\n"),
            "airtight.toml:3: pipelines.a.streams: is empty; leave the key out to read all streams",
        ),
        (
            format!("{p}streams = [\"a\", 3]\n"),
            "airtight.toml:3: pipelines.a.streams[1]: expected a string, found a whole number",
        ),
        ("[pipelines.a]\nbatch = 5\n".to_owned(), "airtight.toml:1: `to` is missing in [pipelines.a]"),
        (
            "[database]\n\nurl = \"postgres://${NOPE}/x\"\n".to_owned(),
            "airtight.toml:3: database.url: environment variable NOPE is not set; set it, or write ${NOPE:-…} to give a default",
        ),
        (
            format!("{p}backoff = {{ jitter = 2 }}\n"),
            "airtight.toml:3: pipelines.a.backoff.jitter: must be from 0 to 1, found 2",
        ),
        (
            "[pipelines.a]\nto = { url = \"null:\", secret = \"x\" }\n".to_owned(),
            "airtight.toml:2: pipelines.a.to.secret: `null:` does not have this key; its only key is `url`",
        ),
    ] {
        assert_eq!(error(&text), expected, "{text}");
    }
    assert!(error("[database\n").starts_with("airtight.toml:1: not valid TOML: "));
    assert!(error("a = 1\na = 2\n").starts_with("airtight.toml:2: not valid TOML: "));
}

#[test]
fn a_broker_may_be_a_table_with_its_own_keys() {
    let config = parse(
        "[pipelines.a]\n\
         to = { url = \"kafka://h:1\", topic = \"x.{stream}\", create = true, create_partitions = 6, password = \"${PASSWORD}\", settings = { \"linger.ms\" = 5, socket.timeout.ms = 900 } }\n",
    )
    .unwrap();
    let SinkTarget::Broker(broker) = &config.pipelines[0].sink else { panic!("{config:?}") };
    let settings: Vec<(&str, &str)> =
        broker.settings.iter().map(|(key, value)| (key.as_str(), value.reveal())).collect();
    assert_eq!(
        settings,
        [
            ("topic", "x.{stream}"),
            ("create", "true"),
            ("create_partitions", "6"),
            ("password", "hush"),
            ("linger.ms", "5"),
            ("socket.timeout.ms", "900")
        ]
    );
    assert!(!format!("{config:?}").contains("hush"));
    for (line, expected) in [
        (
            "to = { url = \"kafka://h:1\", topc = \"x\" }",
            "unknown key `topc` in [pipelines.a.to]; did you mean `topic`?",
        ),
        ("to = { url = \"redis://h:1\", topic = \"x\" }", "unknown key `topic`"),
        ("to = { url = \"kafka://h:1\", settings = { x = 1 } }", "contains a dot"),
        ("to = { url = \"kafka://h:1\", topic = [] }", "expected a string, a number, true or false"),
    ] {
        let complaint = parse(&format!("[pipelines.a]\n{line}\n")).unwrap_err();
        assert!(complaint.contains(expected), "{complaint}");
    }
}

#[test]
fn pipelines_that_overlap_are_refused() {
    let text = |a: &str, b: &str| {
        format!("[pipelines.one]\nto = \"null:\"\n{a}\n[pipelines.two]\nto = \"null:\"\n{b}\n")
    };
    let both = "streams = [\"x\", \"y\"]";
    assert!(error(&text(both, "streams = [\"y\"]")).contains("`one` and `two` both read stream `y`"));
    assert!(error(&text(both, "")).contains("both read stream `x`"));
    assert!(error(&text("", "")).contains("both read all streams"));
    assert!(parse(&text(both, "streams = [\"z\"]")).is_ok());

    let log = "read = \"log\"";
    assert!(parse(&text(log, log)).is_ok(), "each is a consumer of its own");
    assert!(parse(&text(log, "")).is_ok(), "a queue and a log do not take from each other");
    let named = "read = \"log\"\nconsumer = \"one\"";
    assert!(error(&text(log, named)).contains("`one` and `two` both use consumer `one`"));
}

#[tokio::test]
async fn every_sink_may_be_told_to_write_a_format_from_outside_the_core() {
    for to in [
        r#"{ url = "https://example.org/hook", format = "debezium" }"#,
        r#""kafka://h:1?format=debezium""#,
        r#""nats://h?format=debezium""#,
        r#""amqp://h?routing_key=q&format=debezium""#,
        r#""redis://h?format=debezium""#,
        r#"{ url = "kafka://h:1", format = "debezium" }"#,
        r#"{ url = "nats://h", format = "debezium" }"#,
        r#"{ url = "amqp://h?routing_key=q", format = "debezium" }"#,
        r#"{ url = "redis://h", format = "debezium" }"#,
    ] {
        let config = parse(&format!("[pipelines.one]\nto = {to}\n")).unwrap();
        if let Err(error) = crate::wiring::sink(&config.pipelines[0].sink) {
            panic!("{to}: {error}");
        }
    }
}
