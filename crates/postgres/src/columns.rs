//! From a `TableSpec` to SQL expressions. Every statement that is not written for the canonical table gets its columns
//! and status words from here.
//!
//! Expressions are about a row `t` of the outbox and, where the table cannot hold something, a row `s` of
//! the side table, which [`crate::queue::QueueTable::side`] joins. In an expression a column is qualified ([`col`]); what a
//! statement sets is named bare ([`Assignments`]).

use std::{
    collections::{HashMap, HashSet},
    fmt,
    ops::Deref,
    sync::Arc,
};

use airtight_core::{
    Code, Error, Result,
    table::{Count, Field, PayloadKind, Role, StatusSpec, TableSpec, literal, quote},
};
use sqlx::Row;

use crate::{PgOutbox, error::doing, outbox::Conn};

/// A queue's table: its events, and the words of its status.
#[derive(Debug)]
pub(crate) struct Columns {
    events: EventColumns,
    pub(crate) status: StatusSpec,
}

impl Deref for Columns {
    type Target = EventColumns;

    fn deref(&self) -> &EventColumns {
        &self.events
    }
}

/// A spec together with what the database says of its columns: all there is to know of a table of events that
/// are never updated.
#[derive(Debug, Clone)]
pub(crate) struct EventColumns {
    pub(crate) spec: Arc<TableSpec>,
    pub(crate) table: String,
    pub(crate) side: String,
    pub(crate) relay: String,
    pub(crate) partition: String,
    pub(crate) mark: String,
    /// The name under which the side table and the relays know this outbox.
    pub(crate) outbox: String,
    /// By column; of a domain, what it is a domain of.
    types: HashMap<String, String>,
    /// How many characters fit, where that is bounded.
    widths: HashMap<String, i32>,
    /// Columns that may be NULL.
    nullable: HashSet<String>,
}

/// The largest count that is read: one more still fits everywhere.
const MOST: i32 = i32::MAX - 1;

impl EventColumns {
    /// Reads the table's columns and refuses a table that does not fit, naming what is missing.
    pub(crate) async fn load(outbox: &PgOutbox, conn: &mut Conn) -> Result<Self> {
        let spec = outbox.spec.clone();
        let rows = sqlx::query(
            // With -1 a character of any length is `bpchar`; with NULL it would be `character`, which as a cast
            // means one of length 1.
            "WITH RECURSIVE c AS (SELECT a.attname::text AS name, NOT a.attnotnull AS nullable, a.atttypid AS kind, \
                 a.atttypmod AS mod FROM pg_attribute a \
               WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped \
               UNION ALL SELECT c.name, c.nullable, t.typbasetype, t.typtypmod FROM c JOIN pg_type t \
                 ON t.oid = c.kind AND t.typtype = 'd') \
             SELECT c.name, format_type(c.kind, -1), CASE WHEN c.kind IN (1042, 1043) AND c.mod > 4 THEN c.mod - 4 END, \
               c.nullable FROM c JOIN pg_type t ON t.oid = c.kind WHERE t.typtype <> 'd'",
        )
        .persistent(!outbox.pooled)
        .bind(spec.qualified())
        .fetch_all(conn.get())
        .await
        .map_err(doing("reading the table's columns"))?;
        if rows.is_empty() {
            let remedy = match outbox.options.spec {
                None => format!("run {}", crate::schema::migrate_command(&outbox.options)),
                Some(_) => "correct its name".to_owned(),
            };
            return Err(Error::permanent(
                Code::NO_TABLE,
                format!("there is no table {}", spec.display_name()),
            )
            .with_remedy(remedy));
        }
        let mut types = HashMap::new();
        let mut widths = HashMap::new();
        let mut nullable = HashSet::new();
        for row in rows {
            let failed = doing("reading the table's columns");
            let name: String = row.try_get(0).map_err(&failed)?;
            if let Some(width) = row.try_get(2).map_err(&failed)? {
                widths.insert(name.clone(), width);
            }
            if row.try_get(3).map_err(&failed)? {
                nullable.insert(name.clone());
            }
            types.insert(name, row.try_get(1).map_err(&failed)?);
        }
        let missing: Vec<&str> =
            spec.columns().into_iter().filter(|column| !types.contains_key(*column)).collect();
        if !missing.is_empty() {
            return Err(Error::permanent(
                Code::BAD_COLUMN,
                format!("{} has no column {}", spec.display_name(), missing.join(", ")),
            )
            .with_remedy("correct the mapping"));
        }
        let spec = checked_json(spec, &types);
        Ok(Self {
            table: spec.qualified(),
            side: outbox.own("side"),
            relay: outbox.own("relay"),
            partition: outbox.own("partition"),
            mark: outbox.own("mark"),
            outbox: spec.display_name(),
            types,
            widths,
            nullable,
            spec,
        })
    }

    /// The type of the identity, as the database writes it.
    pub(crate) fn identity_type(&self) -> &str {
        self.type_of(&self.spec.identity)
    }

    /// A text expression, cut to what the column takes.
    pub(crate) fn fitted(&self, column: &str, value: &str) -> String {
        self.widths.get(column).map_or(value.to_owned(), |width| format!("left({value}, {width})"))
    }

    /// The type of a column, as the database writes it.
    pub(crate) fn type_of(&self, column: &str) -> &str {
        self.types.get(column).map_or("text", String::as_str)
    }

    /// Whether a column holds UUIDs.
    pub(crate) fn is_uuid(&self, column: &str) -> bool {
        self.type_of(column) == "uuid"
    }

    /// Whether a column holds integers.
    pub(crate) fn is_integer(&self, column: &str) -> bool {
        matches!(self.type_of(column), "bigint" | "integer" | "smallint")
    }

    /// Whether a column holds times that carry no zone.
    pub(crate) fn is_without_zone(&self, column: &str) -> bool {
        self.type_of(column) == "timestamp without time zone"
    }

    /// The largest number that a column of counts can hold.
    pub(crate) fn most(&self, column: &str) -> i64 {
        match self.type_of(column) {
            "smallint" => i16::MAX.into(),
            "integer" => i32::MAX.into(),
            _ => i64::MAX,
        }
    }

    /// A number of `t`, no smaller and no larger than that: a cast that fails would fail for all rows.
    fn within(&self, column: &str, low: i64, high: i64, cast: &str) -> String {
        let value = col(column);
        match self.type_of(column) {
            "bigint" | "integer" | "smallint" | "numeric" => format!(
                "CASE WHEN {value} IS NOT NULL THEN least(greatest({value}, {low}), {high})::{cast} END"
            ),
            _ => format!("{value}::{cast}"),
        }
    }

    /// The identity of `t`.
    pub(crate) fn identity(&self) -> String {
        col(&self.spec.identity)
    }

    /// A timestamp column as `timestamptz`. A number counts as seconds since 1970.
    pub(crate) fn read_time(&self, column: &str) -> String {
        let value = col(column);
        if self.is_without_zone(column) {
            // A zone moves the last and the first day out of what the server can count.
            format!(
                "(CASE WHEN {value} > timestamp '294000-01-01' THEN timestamptz 'infinity' \
                 WHEN {value} < timestamp '4700-01-01 BC' THEN timestamptz '-infinity' \
                 ELSE {value} AT TIME ZONE {} END)",
                literal(&self.spec.zone)
            )
        } else if self.is_integer(column) {
            // From the year 1 to 9999.
            format!("to_timestamp({})", self.within(column, -62_135_596_800, 253_402_300_799, "float8"))
        } else {
            value
        }
    }

    /// A timestamp column for a program: see [`in_calendar`].
    pub(crate) fn show_time(&self, column: &str) -> String {
        in_calendar(&self.read_time(column))
    }

    /// A `timestamptz` expression as the column wants it.
    pub(crate) fn write_time(&self, column: &str, value: &str) -> String {
        if self.is_without_zone(column) {
            format!("(({value}) AT TIME ZONE {})", literal(&self.spec.zone))
        } else {
            value.to_owned()
        }
    }

    /// What orders rows, most significant first.
    pub(crate) fn order(&self) -> Vec<String> {
        match (&self.spec.seq, &self.spec.created_at) {
            (Some(seq), _) => vec![col(seq)],
            // Compared with NULL, a row would be neither before nor behind any other.
            (None, Some(created_at)) if self.nullable.contains(created_at) => {
                let first =
                    if self.is_integer(created_at) { i64::MIN.to_string() } else { "'-infinity'".into() };
                vec![format!("coalesce({}, {first})", col(created_at)), self.identity()]
            }
            (None, Some(created_at)) => vec![col(created_at), self.identity()],
            (None, None) => vec![self.identity()],
        }
    }

    /// The event's `seq`. A table without one gets the microseconds of its creation time.
    pub(crate) fn seq(&self) -> String {
        match (&self.spec.seq, &self.spec.created_at) {
            (Some(seq), _) if self.type_of(seq) == "numeric" => {
                format!("({})", self.within(seq, i64::MIN, i64::MAX, "bigint"))
            }
            (Some(seq), _) => format!("{}::bigint", col(seq)),
            (None, Some(created_at)) => {
                format!("coalesce(extract(epoch FROM {}) * 1000000, 0)::bigint", self.show_time(created_at))
            }
            (None, None) => "0::bigint".into(),
        }
    }

    /// A routing field.
    pub(crate) fn field(&self, field: &Field) -> String {
        match field {
            Field::Column(column) => format!("{}::text", col(column)),
            Field::Constant(text) => format!("{}::text", literal(text)),
            Field::FirstOf(columns) => {
                let columns: Vec<String> =
                    columns.iter().map(|column| format!("{}::text", col(column))).collect();
                format!("coalesce({})", columns.join(", "))
            }
        }
    }

    /// A routing field for people, who are shown rows that have none, too.
    pub(crate) fn label(&self, field: &Field) -> String {
        format!("coalesce({}, '')", self.field(field))
    }

    /// The ordering key.
    pub(crate) fn key(&self) -> String {
        self.field(&self.spec.aggregate_id)
    }

    /// Attempts used so far. A row that is being processed includes the one under way only where attempts
    /// are counted as such.
    pub(crate) fn attempts(&self) -> String {
        let count = match &self.spec.count {
            Some(Count::Attempts(column) | Count::Retries(column)) => col(column),
            None => "s.attempts".into(),
        };
        // One more must not be too many: that would fail the claim of all rows.
        format!("least(greatest(coalesce({count}, 0), 0), {MOST})::int")
    }

    pub(crate) fn next_retry_at(&self) -> String {
        self.spec.next_retry_at.as_ref().map_or("s.next_retry_at".into(), |column| self.read_time(column))
    }

    pub(crate) fn error_code(&self) -> String {
        self.spec.error_code.as_ref().map_or("s.error_code".into(), |column| col(column))
    }

    pub(crate) fn error_message(&self) -> String {
        self.spec.error_message.as_ref().map_or("s.error_message".into(), |column| col(column))
    }

    pub(crate) fn created_at(&self) -> String {
        self.spec.created_at.as_ref().map_or("NULL::timestamptz".into(), |column| self.show_time(column))
    }

    /// How many bytes the payload takes as stored.
    pub(crate) fn stored_size(&self) -> String {
        if self.spec.log.lookup.is_some() {
            return "0".into();
        }
        let payload = format!("coalesce(pg_column_size({}), 0)", col(&self.spec.payload));
        match &self.spec.payload_bytes {
            Some(bytes) => format!("({payload} + coalesce(pg_column_size({}), 0))", col(bytes)),
            None => payload,
        }
    }

    /// The body: a column, or what it refers to in another table.
    fn payload(&self) -> String {
        let Some(lookup) = &self.spec.log.lookup else { return col(&self.spec.payload) };
        let body = if self.spec.payload.is_empty() {
            "to_jsonb(l)".to_owned()
        } else {
            format!("l.{}", quote(&self.spec.payload))
        };
        let table = qualified(lookup.schema.as_deref(), &lookup.table);
        format!("(SELECT {body} FROM {table} l WHERE l.{} = {})", quote(&lookup.key), col(&lookup.by))
    }

    /// What [`crate::decode`] turns into an event, in its order. Payloads whose stored size is above
    /// `max_payload` (an SQL expression) are left out.
    pub(crate) fn event_columns(&self, max_payload: &str) -> String {
        let optional = |column: &Option<String>, cast: &str| {
            column.as_ref().map_or(format!("NULL::{cast}"), |column| format!("{}::{cast}", col(column)))
        };
        let number = |column: &Option<String>, low: i64, high: i64, cast: &str| {
            column.as_ref().map_or(format!("NULL::{cast}"), |column| self.within(column, low, high, cast))
        };
        let size = self.stored_size();
        let payload = self.payload();
        let (text, bytes) = match self.spec.payload_kind {
            PayloadKind::Json | PayloadKind::JsonText => {
                (format!("{payload}::text"), optional(&self.spec.payload_bytes, "bytea"))
            }
            PayloadKind::Text => ("NULL::text".into(), format!("convert_to({payload}::text, 'UTF8')")),
            PayloadKind::Bytes => ("NULL::text".into(), format!("{payload}::bytea")),
        };
        let occurred = [&self.spec.occurred_at, &self.spec.created_at].into_iter().flatten().next();
        let extra: Vec<String> = self
            .spec
            .extra
            .iter()
            .map(|(name, column)| format!("{}, {}", literal(name), col(column)))
            .collect();
        let extra = if extra.is_empty() {
            "NULL::text".into()
        } else {
            format!("json_build_object({})::text", extra.join(", "))
        };
        [
            format!("{}::text AS e_id", col(&self.spec.id)),
            format!("{} AS e_seq", self.seq()),
            format!("{} AS e_stream", self.field(&self.spec.stream)),
            format!("{} AS e_type", self.field(&self.spec.event_type)),
            format!("{} AS e_aggregate_type", self.field(&self.spec.aggregate_type)),
            format!("{} AS e_aggregate_id", self.key()),
            format!("{} AS e_op", optional(&self.spec.op, "text")),
            format!("CASE WHEN {size} <= {max_payload} THEN {text} END AS e_payload"),
            format!("CASE WHEN {size} <= {max_payload} THEN {bytes} END AS e_payload_bytes"),
            format!("{size}::bigint AS e_size"),
            format!("{} AS e_headers", optional(&self.spec.headers, "text")),
            format!(
                "{} AS e_occurred_at",
                occurred.map_or("NULL::timestamptz".into(), |column| self.show_time(column))
            ),
            format!(
                "{} AS e_schema_version",
                number(&self.spec.schema_version, i32::MIN.into(), i32::MAX.into(), "integer")
            ),
            format!("{} AS e_max_attempts", number(&self.spec.max_attempts, -1, u32::MAX.into(), "bigint")),
            format!("{extra} AS e_extra"),
        ]
        .join(", ")
    }
}

impl Columns {
    /// Reads the table's columns and refuses a table that does not fit, or that has no status.
    pub(crate) async fn load(outbox: &PgOutbox, conn: &mut Conn) -> Result<Self> {
        let status = outbox.spec.require_status()?.clone();
        Ok(Self { events: EventColumns::load(outbox, conn).await?, status })
    }

    /// Whether the row has a role.
    pub(crate) fn is(&self, role: &Role) -> String {
        has_role(&self.status, role)
    }

    /// Whether the status means nothing to us, or nothing tells the row from others.
    pub(crate) fn is_unexplained(&self) -> String {
        format!(
            "NOT coalesce({} OR {} OR {}, false)",
            self.is_open(),
            self.is_dead_or_unknown(),
            self.is(&self.status.done)
        )
    }

    /// Whether the row is neither finished nor dead.
    pub(crate) fn is_open(&self) -> String {
        if let Some(phase) = &self.spec.phase {
            return format!("{} = 0", col(phase));
        }
        let open = open_roles(&self.status);
        match self.nullable.contains(&self.spec.identity) {
            // Nobody could settle it.
            true => format!("({open} AND {} IS NOT NULL)", self.identity()),
            false => open,
        }
    }

    /// Whether the row waits for a person.
    pub(crate) fn is_dead_or_unknown(&self) -> String {
        if let Some(phase) = &self.spec.phase {
            return format!("{} = 1", col(phase));
        }
        let unknown = self.status.unknown.as_ref().map(|role| format!(" OR {}", self.is(role)));
        format!("({}{})", self.is(&self.status.dead), unknown.unwrap_or_default())
    }

    /// The state as the table's own words say it: the canonical word, or the table's where no role explains it.
    pub(crate) fn state_by_words(&self) -> String {
        let mut cases = String::new();
        let roles = [
            (Some(&self.status.new), "pending"),
            (Some(&self.status.retrying), "pending"),
            (self.status.processing.as_ref(), "processing"),
            (Some(&self.status.done), "done"),
            (Some(&self.status.dead), "dead"),
            (self.status.unknown.as_ref(), "unknown"),
        ];
        for (role, word) in roles {
            if let Some(role) = role {
                cases.push_str(&format!(" WHEN {} THEN '{word}'", self.is(role)));
            }
        }
        format!("(CASE{cases} ELSE {}::text END)", col(&self.status.column))
    }
}

/// Whether `t` has a role.
fn has_role(status: &StatusSpec, role: &Role) -> String {
    let word = format!("{} = {}", col(&status.column), literal(&role.word));
    match &role.when {
        None => word,
        Some(when) => {
            format!("({word} AND coalesce({}, 0) {} {})", col(&when.column), when.test.sql(), when.value)
        }
    }
}

/// Whether the words of `t` say that it is neither finished nor dead.
pub(crate) fn open_roles(status: &StatusSpec) -> String {
    let roles = [Some(&status.new), Some(&status.retrying), status.processing.as_ref()];
    let mut tests: Vec<String> = roles.into_iter().flatten().map(|role| has_role(status, role)).collect();
    tests.dedup();
    format!("({})", tests.join(" OR "))
}

/// A time for a program, whose calendar has neither infinity nor more than four digits for a year.
pub(crate) fn in_calendar(time: &str) -> String {
    format!(
        "CASE WHEN {time} IS NOT NULL THEN least(greatest({time}, timestamptz '0001-01-01 00:00:00+00'), \
         timestamptz '9999-12-31 23:59:59+00') END"
    )
}

/// Text that is meant to be JSON is checked row by row, also where the mapping takes it for a type that is always valid.
fn checked_json(spec: Arc<TableSpec>, types: &HashMap<String, String>) -> Arc<TableSpec> {
    let is_json = |column: &String| types.get(column).is_none_or(|of| of == "json" || of == "jsonb");
    if spec.payload_kind != PayloadKind::Json || spec.log.lookup.is_some() || is_json(&spec.payload) {
        return spec;
    }
    Arc::new(TableSpec { payload_kind: PayloadKind::JsonText, ..TableSpec::clone(&spec) })
}

/// A table as one quoted name.
pub(crate) fn qualified(schema: Option<&str>, table: &str) -> String {
    schema.map_or(quote(table), |schema| format!("{}.{}", quote(schema), quote(table)))
}

/// What a statement sets in a row of `t`.
#[derive(Debug, Default)]
pub(crate) struct Assignments(Vec<String>);

impl Assignments {
    /// `column = value`: the column is named bare, as SET wants it.
    pub(crate) fn set(&mut self, column: &str, value: impl fmt::Display) {
        self.0.push(format!("{} = {value}", quote(column)));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Assignments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

/// A column of `t`, quoted and qualified.
pub(crate) fn col(column: &str) -> String {
    format!("t.{}", quote(column))
}
