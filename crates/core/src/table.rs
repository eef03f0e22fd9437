//! `TableSpec`: what each column of an outbox table means.
//!
//! A statement that reads or settles rows of a mapped table takes the names of columns and status words from the spec.
//! The canonical table has a spec, too, but PostgreSQL has statements for its queue that name the canonical columns. What
//! a table has no column for (next retry time, error, lease, claim token) is in a side table that airtight owns, keyed by
//! the event.

mod roles;

use crate::{Code, Error, Result, inbox::DedupeKey, state::State};

/// A table and the meaning of its columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableSpec {
    /// The schema, where the database has such a thing.
    pub schema: Option<String>,
    /// The table.
    pub table: String,
    /// The unique column that identifies a row. Settles use it.
    pub identity: String,
    /// The event's id.
    pub id: String,
    /// The ascending column. Without one the order is `created_at, identity`, unspecified within a
    /// transaction.
    pub seq: Option<String>,
    /// When the row was written. Retention of unfinished rows and the order without `seq` use it.
    pub created_at: Option<String>,
    /// Logical topic.
    pub stream: Field,
    /// What happened.
    pub event_type: Field,
    /// What it happened to.
    pub aggregate_type: Field,
    /// Which one: the ordering key.
    pub aggregate_id: Field,
    /// Upsert or delete.
    pub op: Option<String>,
    /// The body. With [`LogSpec::lookup`], a column there; empty for the whole row there, as JSON.
    pub payload: String,
    /// What the body's column holds.
    pub payload_kind: PayloadKind,
    /// A second column for bodies that are bytes, where the first is for JSON.
    pub payload_bytes: Option<String>,
    /// A JSON object of strings.
    pub headers: Option<String>,
    /// When it happened; by default `created_at`.
    pub occurred_at: Option<String>,
    /// Version of the payload's schema.
    pub schema_version: Option<String>,
    /// The row's own limit of attempts.
    pub max_attempts: Option<String>,
    /// Further columns for the envelope, as (name there, column here).
    pub extra: Vec<(String, String)>,
    /// The status column and its words. A table without one cannot be read as a queue.
    pub status: Option<StatusSpec>,
    /// The column that counts attempts or retries.
    pub count: Option<Count>,
    /// When a failed event is due again; NULL means now.
    pub next_retry_at: Option<String>,
    /// Until when the claim holds.
    pub locked_until: Option<String>,
    /// The claim token, text or UUID; `locked_by` serves.
    pub claim_token: Option<String>,
    /// How often a relay vanished while it held the row.
    pub lost_leases: Option<String>,
    /// The last error's code.
    pub error_code: Option<String>,
    /// The last error's message.
    pub error_message: Option<String>,
    /// When it was finished.
    pub finished_at: Option<String>,
    /// When the row last changed.
    pub updated_at: Option<String>,
    /// When it was last claimed.
    pub last_attempt_at: Option<String>,
    /// A stored hash of the key, if the table has one.
    pub partition: Option<String>,
    /// A stored column with 0 for open, 1 for dead or unknown, 2 for done, if the table has one. The claim's index uses
    /// it, so that a claim changes no indexed column.
    pub phase: Option<String>,
    /// The time zone of timestamps without one.
    pub zone: String,
    /// What only a log uses.
    pub log: LogSpec,
}

/// What only a table that is followed as a log has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LogSpec {
    /// Where the body is, if the table only refers to it.
    pub lookup: Option<Lookup>,
    /// A table of offsets that the application owns.
    pub offsets: Option<OffsetTable>,
    /// The channel on which the application notifies.
    pub channel: Option<String>,
    /// Which events the inbox treats as the same.
    pub dedupe: DedupeKey,
}

/// A row of another table, found by a column of this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    /// The other table's schema, where the database has such a thing.
    pub schema: Option<String>,
    /// The other table.
    pub table: String,
    /// Its column.
    pub key: String,
    /// The column here that has the same value.
    pub by: String,
}

/// An offset per consumer in a table that the application owns. It moves by compare-and-set, so a value that an
/// operator sets directly is kept. Such a consumer has one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffsetTable {
    /// The schema, where the database has such a thing.
    pub schema: Option<String>,
    /// The table.
    pub table: String,
    /// The column with the consumer's name: unique.
    pub consumer: String,
    /// The column with the offset.
    pub last_seq: String,
    /// When it last moved.
    pub updated_at: Option<String>,
}

/// How the canonical table is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Shape {
    /// Rows with a status, claimed and settled one by one.
    #[default]
    Queue,
    /// Rows that never change, followed by any number of consumers.
    Log,
}

impl Shape {
    /// The word in configs and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Log => "log",
        }
    }

    /// Reads the word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Queue, Self::Log].into_iter().find(|shape| shape.as_str() == word)
    }
}

/// A column, or the same text for every row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Field {
    /// Read from this column.
    Column(String),
    /// The table has no such column; every event gets this.
    Constant(String),
    /// Read from the first of these that is not NULL.
    FirstOf(Vec<String>),
}

impl Field {
    /// The columns it reads.
    pub fn columns(&self) -> &[String] {
        match self {
            Self::Column(column) => std::slice::from_ref(column),
            Self::Constant(_) => &[],
            Self::FirstOf(columns) => columns,
        }
    }
}

/// What the payload's column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadKind {
    /// A JSON type of the database: always valid.
    Json,
    /// Text that should be JSON: checked row by row.
    JsonText,
    /// Text of any kind: passed on as bytes, unread.
    Text,
    /// Bytes.
    Bytes,
}

/// The status column and what its words mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusSpec {
    /// The column.
    pub column: String,
    /// Never tried.
    pub new: Role,
    /// Failed before, to be tried again.
    pub retrying: Role,
    /// Claimed; none if the table has no word for it: then only the side table knows.
    pub processing: Option<Role>,
    /// Delivered.
    pub done: Role,
    /// Given up on.
    pub dead: Role,
    /// Outcome unknown; none if the table has no word for it: then the row says dead, and the side table says unknown.
    pub unknown: Option<Role>,
}

/// A word in the status column, and a condition that distinguishes its role from another role with the same word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// The word.
    pub word: String,
    /// A further condition.
    pub when: Option<Condition>,
}

impl Role {
    /// A role that its word alone identifies.
    pub fn word(word: impl Into<String>) -> Self {
        Self { word: word.into(), when: None }
    }

    /// A role that also needs a condition.
    pub fn when(word: impl Into<String>, condition: Condition) -> Self {
        Self { word: word.into(), when: Some(condition) }
    }
}

/// A condition such as `column < value`. It is plain data, so that no text of a config becomes part of SQL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The column.
    pub column: String,
    /// How to compare.
    pub test: Test,
    /// With what.
    pub value: i64,
}

/// A comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// `<`
    Less,
    /// `>=`
    AtLeast,
    /// `=`
    Equal,
}

impl Test {
    /// The SQL operator.
    pub fn sql(self) -> &'static str {
        match self {
            Self::Less => "<",
            Self::AtLeast => ">=",
            Self::Equal => "=",
        }
    }
}

/// What a counting column counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Count {
    /// Attempts: grows at the claim.
    Attempts(String),
    /// Retries: grows at a failure.
    Retries(String),
}

impl TableSpec {
    /// The canonical table, `outbox`, in a schema, or without one where the database has no schemas.
    pub fn canonical(schema: Option<&str>, table: &str) -> Self {
        let column = |name: &str| Some(name.to_owned());
        Self {
            schema: schema.map(str::to_owned),
            table: table.to_owned(),
            identity: "seq".into(),
            id: "id".into(),
            seq: column("seq"),
            created_at: column("created_at"),
            stream: Field::Column("stream".into()),
            event_type: Field::Column("event_type".into()),
            aggregate_type: Field::Column("aggregate_type".into()),
            aggregate_id: Field::Column("aggregate_id".into()),
            op: column("op"),
            payload: "payload".into(),
            payload_kind: PayloadKind::Json,
            payload_bytes: column("payload_bytes"),
            headers: column("headers"),
            occurred_at: column("occurred_at"),
            schema_version: column("schema_version"),
            max_attempts: column("max_attempts"),
            extra: Vec::new(),
            status: Some(StatusSpec {
                column: "status".into(),
                new: Role::word(State::Pending.as_str()),
                retrying: Role::word(State::Pending.as_str()),
                processing: Some(Role::word(State::Processing.as_str())),
                done: Role::word(State::Done.as_str()),
                dead: Role::word(State::Dead.as_str()),
                unknown: Some(Role::word(State::Unknown.as_str())),
            }),
            count: Some(Count::Attempts("attempts".into())),
            next_retry_at: column("next_retry_at"),
            locked_until: column("locked_until"),
            claim_token: column("claim_token"),
            lost_leases: column("lost_leases"),
            error_code: column("error_code"),
            error_message: column("error_message"),
            finished_at: column("finished_at"),
            updated_at: None,
            last_attempt_at: column("last_attempt_at"),
            partition: column("part"),
            phase: column("phase"),
            zone: "UTC".into(),
            log: LogSpec::default(),
        }
    }

    /// The canonical log: the event's columns of the canonical table, without the columns that change.
    pub fn canonical_log(schema: Option<&str>, table: &str) -> Self {
        Self {
            status: None,
            count: None,
            next_retry_at: None,
            locked_until: None,
            claim_token: None,
            lost_leases: None,
            error_code: None,
            error_message: None,
            finished_at: None,
            last_attempt_at: None,
            partition: None,
            phase: None,
            ..Self::canonical(schema, table)
        }
    }

    /// The canonical table of a shape.
    pub fn of_shape(shape: Shape, schema: Option<&str>, table: &str) -> Self {
        match shape {
            Shape::Queue => Self::canonical(schema, table),
            Shape::Log => Self::canonical_log(schema, table),
        }
    }

    /// The preset `relay-log`: `cn_relay.events_outbox` with its `cn_relay.consumer_offsets`, whose rows refer to
    /// the bodies in `cn_relay.events`.
    pub fn relay_log() -> Self {
        let own = |table: &str| (Some("cn_relay".to_owned()), table.to_owned());
        let (schema, table) = own("events_outbox");
        let (offsets_schema, offsets) = own("consumer_offsets");
        let (events_schema, events) = own("events");
        Self {
            schema,
            table,
            id: "event_id".into(),
            created_at: Some("ingested_at".into()),
            stream: Field::Column("topic_id".into()),
            event_type: Field::Column("kind".into()),
            aggregate_type: Field::Constant("Event".into()),
            aggregate_id: Field::FirstOf(vec!["effective_key".into(), "event_id".into()]),
            payload: String::new(),
            payload_bytes: None,
            headers: None,
            occurred_at: Some("created_at".into()),
            schema_version: None,
            max_attempts: None,
            extra: vec![("reason".into(), "reason".into())],
            log: LogSpec {
                lookup: Some(Lookup {
                    schema: events_schema,
                    table: events,
                    key: "event_id".into(),
                    by: "event_id".into(),
                }),
                offsets: Some(OffsetTable {
                    schema: offsets_schema,
                    table: offsets,
                    consumer: "consumer".into(),
                    last_seq: "last_seq".into(),
                    updated_at: Some("updated_at".into()),
                }),
                channel: Some("cn_relay_outbox".into()),
                dedupe: DedupeKey::EventIdAndOp,
            },
            ..Self::canonical_log(None, "")
        }
    }

    /// The table as one quoted name.
    pub fn qualified(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{}.{}", quote(schema), quote(&self.table)),
            None => quote(&self.table),
        }
    }

    /// A name for messages and keys: `schema.table`, unquoted.
    pub fn display_name(&self) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{}", self.table),
            None => self.table.clone(),
        }
    }

    /// Whether there is a column for everything that a claim must store, so that no side table is needed.
    pub fn is_self_contained(&self) -> bool {
        self.count.is_some()
            && self.next_retry_at.is_some()
            && self.locked_until.is_some()
            && self.claim_token.is_some()
            && self.lost_leases.is_some()
            && self.error_message.is_some()
            && self.status.as_ref().is_some_and(|status| status.processing.is_some())
    }

    /// The columns that make an event and identify its row: they must be in the WAL.
    pub fn event_columns(&self) -> Vec<&str> {
        let fields = [&self.stream, &self.event_type, &self.aggregate_type, &self.aggregate_id];
        let optional = [
            &self.seq,
            &self.created_at,
            &self.op,
            &self.payload_bytes,
            &self.headers,
            &self.occurred_at,
            &self.schema_version,
            &self.max_attempts,
        ];
        let mut columns = vec![self.identity.as_str(), self.id.as_str()];
        columns.push(self.log.lookup.as_ref().map_or(&self.payload, |lookup| &lookup.by));
        columns.extend(fields.iter().flat_map(|field| field.columns()).map(String::as_str));
        columns.extend(optional.into_iter().flatten().map(String::as_str));
        columns.extend(self.extra.iter().map(|(_, column)| column.as_str()));
        columns
    }

    /// Every column the spec names, for checking that the table has them.
    pub fn columns(&self) -> Vec<&str> {
        let optional = [
            &self.next_retry_at,
            &self.locked_until,
            &self.claim_token,
            &self.lost_leases,
            &self.error_code,
            &self.error_message,
            &self.finished_at,
            &self.updated_at,
            &self.last_attempt_at,
            &self.partition,
            &self.phase,
        ];
        let mut columns = self.event_columns();
        columns.extend(optional.into_iter().filter_map(|column| column.as_deref()));
        columns.extend(self.count_column());
        if let Some(status) = &self.status {
            columns.push(&status.column);
            let conditions = status.roles().into_iter().filter_map(|(_, role)| role.when.as_ref());
            columns.extend(conditions.map(|when| when.column.as_str()));
        }
        columns.sort_unstable();
        columns.dedup();
        columns
    }

    /// The column that counts attempts or retries.
    pub fn count_column(&self) -> Option<&str> {
        self.count.as_ref().map(|count| match count {
            Count::Attempts(column) | Count::Retries(column) => column.as_str(),
        })
    }

    /// The column that says how long ago an event was delivered. The time when the event was written is used only on
    /// request: by that time, an event that waited long would be removed as soon as it is delivered.
    pub fn age_column(&self, by_creation: bool) -> Result<&str> {
        let delivered = self.finished_at.as_deref().or(self.updated_at.as_deref());
        let created = self.created_at.as_deref();
        delivered.or(created.filter(|_| by_creation)).ok_or_else(|| {
            let or = match created {
                Some(created) => format!(
                    "; or go by {created}, when an event was written, however late it was delivered: \
                     `done_by_creation = true` in [retention], or `prune --by-creation`"
                ),
                None => String::new(),
            };
            Error::permanent(
                Code::NO_TIME,
                format!(
                    "{} has no column that says when an event was delivered, so the old events cannot be found",
                    self.display_name()
                ),
            )
            .with_remedy(format!("map `finished_at` or `updated_at`{or}"))
        })
    }

    /// The status spec, or an error that says how such a table can be read instead.
    pub fn require_status(&self) -> Result<&StatusSpec> {
        self.status.as_ref().ok_or_else(|| {
            Error::permanent(
                Code::NO_STATUS,
                format!("{} has no status column, so it cannot be read as a queue", self.display_name()),
            )
            .with_remedy("map one, or read it with `log` or `cdc`")
        })
    }
}

/// Quotes an identifier as in standard SQL.
pub fn quote(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// Quotes a text literal.
pub fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_quoted_never_spliced() {
        let spec = TableSpec::canonical(Some("a\"; DROP TABLE x; --"), "out");
        assert_eq!(spec.qualified(), "\"a\"\"; DROP TABLE x; --\".\"out\"");
        assert_eq!(literal("it's"), "'it''s'");
    }

    #[test]
    fn the_canonical_table_needs_no_side_table() {
        let mut spec = TableSpec::canonical(None, "outbox");
        assert!(spec.is_self_contained());
        spec.claim_token = None;
        assert!(!spec.is_self_contained());
        assert!(spec.columns().contains(&"aggregate_id"));
    }
}
