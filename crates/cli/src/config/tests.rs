use super::*;
use airtight::table::{Count, Field};

fn parse(text: &str) -> std::result::Result<Config, String> {
    let env = |name: &str| match name {
        "PASSWORD" => Some("hush".to_owned()),
        "BATCH" => Some("77".to_owned()),
        _ => None,
    };
    Config::parse("airtight.toml", text, &env).map_err(|error| error.to_string())
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
        to = { url = "https://example.org/hook", secret = "whsec_x", headers = { "X-Team" = "a" }, timeout = "5s", concurrency = 4 }

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
    assert_eq!(config.keep_done, Some(Duration::from_secs(30 * 86_400)));
    let orders = &config.pipelines[0];
    assert_eq!(orders.name, "orders");
    assert_eq!((orders.queue.order, orders.policy.order), (Order::Total, Order::Total));
    assert!(orders.queue.block_on_dead && orders.policy.block_on_dead);
    assert_eq!((orders.policy.batch_events, orders.policy.max_attempts), (77, 3));
    assert_eq!(orders.policy.in_flight_bytes, 8 << 20);
    assert_eq!(orders.policy.backoff.cap, Duration::from_secs(600));
    let SinkTarget::Webhook(webhook) = &orders.sink else { panic!("{:?}", orders.sink) };
    assert_eq!(webhook.secret.as_ref().unwrap().reveal(), "whsec_x");
    assert_eq!((webhook.concurrency, webhook.timeout), (Some(4), Some(Duration::from_secs(5))));
    assert_eq!(config.pipelines[1].sink, SinkTarget::File("audit.ndjson".into()));
}

/// The example says that it shows defaults, so it must.
#[test]
fn the_example_is_valid_and_shows_the_defaults() {
    let text = include_str!("../../airtight.example.toml");
    let config = parse(text).unwrap();
    assert_eq!(config.keep_done, Some(KEEP_DONE));
    let [orders, audit] = &config.pipelines[..] else { panic!("{:?}", config.pipelines) };
    assert_eq!(orders.policy, Policy::default());
    assert_eq!(QueueOptions { streams: Vec::new(), ..orders.queue.clone() }, QueueOptions::default());
    assert_eq!(audit.sink, SinkTarget::File("audit.ndjson".into()));

    let (_, table) = text.split_once("unless [retention] says so.").unwrap();
    let table: String =
        table.lines().filter_map(|line| line.strip_prefix("# ")).map(|line| format!("{line}\n")).collect();
    let spec = parse(&table).unwrap().database.spec.unwrap();
    assert_eq!(spec.display_name(), "bank.transfer_events");
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
    assert_eq!(config.keep_done, None, "rows of a foreign table are not deleted unasked");
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
            "airtight.toml:2: unknown key `colour` in [retention]; known keys are `done`",
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
            "airtight.toml:3: pipelines.a.order: unknown word `keys`; allowed are `key`, `none` and `total` (did you mean `key`?)",
        ),
        (
            format!("{p}read = \"cdc\"\n"),
            "airtight.toml:3: pipelines.a.read: `cdc` is not in this version; write `queue`",
        ),
        (
            format!("{p}lease = 30\n"),
            "airtight.toml:3: pipelines.a.lease: expected a duration in quotes, like \"30s\", found a whole number",
        ),
        (
            format!("{p}lease = \"30\"\n"),
            "airtight.toml:3: pipelines.a.lease: `30` is not a duration; write it like `500ms`, `30s`, `5m`, `2h` or `7d`",
        ),
        (format!("{p}lease = \"10ms\"\n"), "airtight.toml:3: pipelines.a.lease: a lease lasts from 1s to 1d"),
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
            "airtight.toml:2: pipelines.a.to.secret: means nothing to `null:`; only webhooks have it",
        ),
    ] {
        assert_eq!(error(&text), expected, "{text}");
    }
    assert!(error("[database\n").starts_with("airtight.toml:1: not valid TOML: "));
    assert!(error("a = 1\na = 2\n").starts_with("airtight.toml:2: not valid TOML: "));
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
}
