//! The other keys of a connector: which are harmless, and which are refused.

/// What is to be done about a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It changes how Debezium works, and nothing that it delivers.
    Harmless,
    /// It changes what is delivered; why.
    Refused(String),
    /// The key is unknown.
    Unknown,
}

/// Keys that change what is delivered unless they are left at this.
const DEFAULTS: &[(&str, &str)] = &[
    ("time.precision.mode", "adaptive"),
    ("decimal.handling.mode", "precise"),
    ("binary.handling.mode", "bytes"),
    ("hstore.handling.mode", "json"),
    ("interval.handling.mode", "numeric"),
    ("money.fraction.digits", "2"),
    ("schema.name.adjustment.mode", "none"),
    ("field.name.adjustment.mode", "none"),
    ("include.unknown.datatypes", "false"),
    ("provide.transaction.metadata", "false"),
    ("include.schema.comments", "false"),
    ("topic.delimiter", "."),
    ("topic.naming.strategy", "io.debezium.schema.SchemaTopicNamingStrategy"),
];

/// Keys that change what is delivered whatever they say.
const REFUSED: &[&str] = &[
    "converters",
    "post.processors",
    "column.include.list",
    "column.exclude.list",
    "column.propagate.source.type",
    "datatype.propagate.source.type",
    "snapshot.include.collection.list",
    "snapshot.select.statement.overrides",
    "message.prefix.include.list",
    "message.prefix.exclude.list",
];

/// The same by how they begin.
const REFUSED_PREFIXES: &[&str] = &[
    "column.mask.",
    "column.truncate.",
    "converters.",
    "post.processors.",
    "transforms.",
    "snapshot.select.",
];

const HARMLESS: &[&str] = &[
    "tasks.max",
    "tombstones.on.delete",
    "poll.interval.ms",
    "status.update.interval.ms",
    "retriable.restart.connector.wait.ms",
    "schema.include.list",
    "schema.exclude.list",
    "table.exclude.list",
    "schema.refresh.mode",
    "publication.autocreate.mode",
    "publish.via.partition.root",
    "replica.identity.autoset.values",
    "message.key.columns",
    "unavailable.value.placeholder",
    "source.struct.version",
    "sanitize.field.names",
    "read.only",
    "lsn.flush.mode",
    "lsn.flush.timeout.ms",
    "lsn.flush.timeout.action",
    "flush.lsn.source",
    "xmin.fetch.interval.ms",
    "offset.mismatch.strategy",
    "streaming.delay.ms",
    "executor.shutdown.timeout.ms",
    "connection.validation.timeout.ms",
    "custom.metric.tags",
    "skip.messages.without.change",
    "statistic.metrics.enabled",
    "config.action.reload",
    "transaction.metadata.factory",
    "transaction.boundary",
    "transaction.boundary.interval.ms",
    "offsets.storage.topic",
];

const HARMLESS_PREFIXES: &[&str] = &[
    "database.",
    "driver.",
    "max.",
    "heartbeat.",
    "topic.heartbeat.",
    "topic.cache.",
    "topic.transaction",
    "topic.creation.",
    "slot.",
    "snapshot.",
    "signal.",
    "notification.",
    "incremental.",
    "event.",
    "errors.",
    "producer.",
    "producer.override.",
    "guardrail.",
    "openlineage.",
    "internal.",
    "log.",
    "offset.storage",
    "offset.flush.",
    "config.providers",
    "quarkus.",
    "query.",
];

/// What a key means.
pub(super) fn judge(key: &str, value: &str) -> Verdict {
    let value = value.trim();
    if value.is_empty() {
        return Verdict::Harmless;
    }
    if let Some((_, default)) = DEFAULTS.iter().find(|(known, _)| *known == key) {
        return match value.eq_ignore_ascii_case(default) {
            true => Verdict::Harmless,
            false => {
                Verdict::Refused(format!("changes what is delivered, and airtight has only `{default}`"))
            }
        };
    }
    let of_skipped = || value.split(',').map(str::trim).any(|op| matches!(op, "c" | "r"));
    match key {
        "skipped.operations" if of_skipped() => {
            return Verdict::Refused("skips inserts, and then nothing is delivered".into());
        }
        "skipped.operations" => return Verdict::Harmless,
        "exactly.once.support" if value.eq_ignore_ascii_case("required") => {
            return Verdict::Refused("is `required`, and airtight delivers at least once".into());
        }
        "exactly.once.support" => return Verdict::Harmless,
        _ if key.starts_with("producer.") && key.contains("partitioner.") => {
            return Verdict::Refused(
                "changes which partition a key goes to, and airtight has only Kafka's own".into(),
            );
        }
        _ => {}
    }
    let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| key.starts_with(prefix));
    if REFUSED.contains(&key) || begins(REFUSED_PREFIXES) {
        return Verdict::Refused("changes what is delivered, and cannot be honoured".into());
    }
    if HARMLESS.contains(&key) || begins(HARMLESS_PREFIXES) {
        return Verdict::Harmless;
    }
    Verdict::Unknown
}
