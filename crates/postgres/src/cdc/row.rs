//! From a row of the WAL to an event.
//!
//! The same row must become the same event as in the queue, where SQL does the work
//! ([`crate::columns::EventColumns::event_columns`]) and [`crate::decode`] does the rest; `cdc/drift.rs` compares the two.
//! One thing differs: the queue checks the stored size of a payload before it checks the size of its text, and the WAL has
//! only the size of the text.

use std::{borrow::Cow, sync::Arc};

use airtight_core::{
    Code, Error, Event, Op, Payload, Result,
    event::{Headers, SourceColumn, SourceRow, check_json},
    queue::BadRow,
    table::{Condition, Field, PayloadKind, Role, TableSpec, Test},
};
use bytes::Bytes;
use time::OffsetDateTime;

use super::{
    pgoutput::{Tuple, Value},
    values::{self, Zone, oid},
};

/// The options that are the same for all rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowOptions {
    /// The largest payload to carry.
    pub(crate) max_payload: usize,
    /// Whether events keep the row they came from.
    pub(crate) keep_row: bool,
}

/// Which value of a row means what.
#[derive(Debug)]
pub(crate) struct Mapping {
    columns: Arc<[SourceColumn]>,
    identity: usize,
    id: usize,
    seq: Seq,
    stream: Source,
    event_type: Source,
    aggregate_type: Source,
    aggregate_id: Source,
    op: Option<usize>,
    payload: usize,
    payload_kind: PayloadKind,
    payload_bytes: Option<usize>,
    headers: Option<usize>,
    occurred_at: Option<usize>,
    schema_version: Option<usize>,
    max_attempts: Option<usize>,
    extra: Vec<(String, usize)>,
    open: Option<Open>,
    zone: Zone,
}

#[derive(Debug)]
enum Source {
    /// The first that is not NULL.
    Columns(Vec<usize>),
    Constant(String),
}

#[derive(Debug)]
enum Seq {
    Column(usize),
    Created(usize),
    None,
}

/// What the status of an open row looks like.
#[derive(Debug)]
struct Open {
    status: usize,
    roles: Vec<OpenRole>,
}

#[derive(Debug)]
struct OpenRole {
    word: String,
    when: Option<When>,
}

#[derive(Debug)]
struct When {
    column: usize,
    test: Test,
    value: i64,
}

impl Mapping {
    /// Finds the columns that make an event, and refuses a table that does not have them, naming what is missing.
    /// Columns that only a claim needs are not looked for: generated ones, as the canonical `part` and `phase`, are
    /// not in the WAL.
    pub(crate) fn new(spec: &TableSpec, columns: Arc<[SourceColumn]>) -> Result<Self> {
        if let Some(lookup) = &spec.log.lookup {
            return Err(Error::permanent(
                Code::NO_LOOKUP,
                format!(
                    "{} has its payloads in {}, and a row of the WAL cannot be joined with that table: read it with `log`",
                    spec.display_name(),
                    lookup.table
                ),
            ));
        }
        let mut find = Find { columns: &columns, missing: Vec::new() };
        let open = spec.status.as_ref().map(|status| Open {
            status: find.column(&status.column),
            roles: [Some(&status.new), Some(&status.retrying), status.processing.as_ref()]
                .into_iter()
                .flatten()
                .map(|role| find.role(role))
                .collect(),
        });
        let created_at = find.optional(&spec.created_at);
        let occurred_at = find.optional(&spec.occurred_at).or(created_at);
        let seq = match (find.optional(&spec.seq), created_at) {
            (Some(seq), _) => Seq::Column(seq),
            (None, Some(created_at)) => Seq::Created(created_at),
            (None, None) => Seq::None,
        };
        let mut mapping = Self {
            identity: find.column(&spec.identity),
            id: find.column(&spec.id),
            stream: find.field(&spec.stream),
            event_type: find.field(&spec.event_type),
            aggregate_type: find.field(&spec.aggregate_type),
            aggregate_id: find.field(&spec.aggregate_id),
            op: find.optional(&spec.op),
            payload: find.column(&spec.payload),
            payload_kind: spec.payload_kind,
            // Beside a payload that is bytes itself, the queue does not look at it.
            payload_bytes: find
                .optional(&spec.payload_bytes)
                .filter(|_| !matches!(spec.payload_kind, PayloadKind::Bytes | PayloadKind::Text)),
            headers: find.optional(&spec.headers),
            schema_version: find.optional(&spec.schema_version),
            max_attempts: find.optional(&spec.max_attempts),
            extra: spec.extra.iter().map(|(name, column)| (name.clone(), find.column(column))).collect(),
            columns: columns.clone(),
            seq,
            occurred_at,
            open,
            zone: Zone::UTC,
        };
        find.finish(spec)?;
        mapping.check_types(spec)?;
        Ok(mapping)
    }

    /// Refuses types that cannot be what the spec takes them for, once and not row by row.
    fn check_types(&mut self, spec: &TableSpec) -> Result<()> {
        let created_at = if let Seq::Created(at) = self.seq { Some(at) } else { None };
        for at in [self.occurred_at, created_at].into_iter().flatten() {
            match self.columns[at].type_oid {
                oid::TIMESTAMP => self.zone = Zone::parse(&spec.zone)?,
                oid::TIMESTAMPTZ | oid::DATE | oid::INT2 | oid::INT4 | oid::INT8 | oid::FIRST_OWN.. => {}
                _ => return Err(self.wrong_type(spec, at, "a time")),
            }
        }
        let bytes =
            if self.payload_kind == PayloadKind::Bytes { Some(self.payload) } else { self.payload_bytes };
        if let Some(at) = bytes {
            match self.columns[at].type_oid {
                oid::BYTEA | oid::TEXT | oid::VARCHAR | oid::BPCHAR | oid::FIRST_OWN.. => {}
                _ => return Err(self.wrong_type(spec, at, "bytes")),
            }
        }
        Ok(())
    }

    fn wrong_type(&self, spec: &TableSpec, at: usize, wanted: &str) -> Error {
        let SourceColumn { name, type_oid, .. } = &self.columns[at];
        Error::permanent(
            Code::BAD_COLUMN,
            format!(
                "{}: column {name} (type {type_oid}) does not hold {wanted}: correct the mapping",
                spec.display_name()
            ),
        )
    }

    /// The text of a tuple's columns: what the other methods read.
    pub(crate) fn texts(&self, tuple: &Tuple) -> Result<Vec<Option<Bytes>>> {
        texts(tuple, &self.columns)
    }

    /// The event of a row, given the text of all its columns, which it may keep.
    pub(crate) fn event(&self, values: Vec<Option<Bytes>>, context: &RowOptions) -> Result<Event, BadRow> {
        let id = self.text(&values, self.id).ok().flatten();
        let id = id.unwrap_or(Cow::Borrowed("(no id)")).into_owned();
        let mut event = self.decode(&values, context).map_err(|error| BadRow {
            error: error.context(format_args!("event {id}")),
            id: id.clone(),
            key: self.source(&values, &self.aggregate_id).ok().flatten().map(Cow::into_owned),
        })?;
        event.id = id;
        if context.keep_row {
            event.row = Some(Arc::new(SourceRow { columns: self.columns.clone(), values }));
        }
        Ok(event)
    }

    /// All of it but the id and the row.
    fn decode(&self, values: &[Option<Bytes>], context: &RowOptions) -> Result<Event> {
        if values.len() != self.columns.len() {
            return Err(Error::permanent(
                Code::BAD_ROW,
                format!("the row has {} values, the table {} columns", values.len(), self.columns.len()),
            ));
        }
        let required = |source: &Source, name: &str| {
            self.source(values, source)?.map(Cow::into_owned).ok_or_else(|| {
                Error::permanent(Code::BAD_ROW, format!("{name} is NULL, which the mapping does not allow"))
            })
        };
        let payload = self.payload(values, context.max_payload)?;
        let headers = match self.optional_text(values, self.headers)?.as_deref() {
            None | Some("{}") => Headers::new(),
            Some(json) => serde_json::from_str(json).map_err(|error| {
                Error::permanent(
                    Code::BAD_HEADERS,
                    format!("headers are not a JSON object of strings: {error}"),
                )
            })?,
        };
        let extra = self.extra(values)?;
        let op = self.optional_text(values, self.op)?.map_or(Ok(Op::Upsert), |word| Op::parse(&word))?;
        Ok(Event {
            id: String::new(),
            seq: self.seq(values)?,
            stream: required(&self.stream, "stream")?,
            event_type: required(&self.event_type, "event type")?,
            aggregate_type: required(&self.aggregate_type, "aggregate type")?,
            aggregate_id: required(&self.aggregate_id, "aggregate id")?,
            op,
            payload,
            headers,
            occurred_at: match self.occurred_at {
                Some(at) => self.time(values, at)?,
                None => None,
            }
            .unwrap_or(OffsetDateTime::UNIX_EPOCH),
            schema_version: self.schema_version(values)?,
            extra,
            row: None,
        })
    }

    /// The row's own limit of attempts.
    pub(crate) fn max_attempts(&self, values: &[Option<Bytes>]) -> Option<u32> {
        let limit = self.integer(values, self.max_attempts?).ok()??;
        u32::try_from(limit).ok()
    }

    /// What tells the row apart, as text.
    pub(crate) fn identity<'v>(&self, values: &'v [Option<Bytes>]) -> Option<&'v Bytes> {
        value(values, self.identity)
    }

    /// The event's stream, to pass over rows of others before they are decoded; none if it cannot be read, which
    /// decoding will say.
    pub(crate) fn stream<'v>(&'v self, values: &'v [Option<Bytes>]) -> Option<Cow<'v, str>> {
        self.source(values, &self.stream).ok().flatten()
    }

    /// Whether the row is neither finished nor dead, by the word and the condition of its status. In doubt it is
    /// open: twice is allowed, never is not.
    pub(crate) fn is_open(&self, values: &[Option<Bytes>]) -> bool {
        let Some(open) = &self.open else { return true };
        let Some(status) = value(values, open.status) else { return false };
        let type_oid = self.columns[open.status].type_oid;
        open.roles.iter().any(|role| {
            is_word(type_oid, status, &role.word) && role.when.as_ref().is_none_or(|when| holds(values, when))
        })
    }

    fn payload(&self, values: &[Option<Bytes>], max: usize) -> Result<Payload> {
        let fits = |length: usize| {
            if length <= max {
                return Ok(());
            }
            let message = format!("payload has {length} bytes, the limit is {max}");
            Err(Error::permanent(Code::TOO_LARGE, message))
        };
        let bytes = match self.payload_kind {
            PayloadKind::Bytes => Some(self.payload),
            PayloadKind::Text => {
                let Some(text) = value(values, self.payload) else { return Ok(Payload::None) };
                let text = values::cast_bytes(self.columns[self.payload].type_oid, text)?;
                fits(text.len())?;
                return Ok(Payload::Bytes(text));
            }
            PayloadKind::Json | PayloadKind::JsonText => {
                if let Some(json) = value(values, self.payload) {
                    let json = values::cast_bytes(self.columns[self.payload].type_oid, json)?;
                    fits(json.len())?;
                    if self.payload_kind == PayloadKind::JsonText {
                        check_json(&json)?;
                    }
                    return Ok(Payload::Json(json));
                }
                self.payload_bytes
            }
        };
        let Some(text) = bytes.and_then(|at| value(values, at)) else { return Ok(Payload::None) };
        // Two digits make a byte: a hopeless one is not decoded first.
        if text.starts_with(b"\\x") {
            fits((text.len() - 2) / 2)?;
        }
        let bytes = values::bytea(text)?;
        fits(bytes.len())?;
        Ok(Payload::Bytes(bytes.into()))
    }

    fn extra(&self, values: &[Option<Bytes>]) -> Result<serde_json::Map<String, serde_json::Value>> {
        let mut extra = serde_json::Map::new();
        for (name, at) in &self.extra {
            let value = match value(values, *at) {
                Some(text) => values::json(self.columns[*at].type_oid, text)
                    .map_err(|error| error.context(format_args!("extra columns: {name}")))?,
                None => serde_json::Value::Null,
            };
            extra.insert(name.clone(), value);
        }
        Ok(extra)
    }

    fn seq(&self, values: &[Option<Bytes>]) -> Result<i64> {
        let seq = match self.seq {
            // NULL counts as zero where it does in the queue: in a column that need not be one of integers.
            Seq::Column(at) if self.columns[at].type_oid == oid::NUMERIC => {
                Some(self.integer(values, at)?.unwrap_or(0))
            }
            Seq::Column(at) => self.integer(values, at)?,
            Seq::Created(at) => match self.time(values, at)? {
                Some(time) => i64::try_from(time.unix_timestamp_nanos().div_euclid(1000)).ok(),
                None => Some(0),
            },
            Seq::None => Some(0),
        };
        seq.ok_or_else(|| {
            Error::permanent(Code::BAD_ROW, "column seq: it is NULL, which the mapping does not allow")
        })
    }

    fn schema_version(&self, values: &[Option<Bytes>]) -> Result<i32> {
        let Some(at) = self.schema_version else { return Ok(1) };
        let Some(version) = self.integer(values, at)? else { return Ok(1) };
        i32::try_from(version).map_err(|_| {
            Error::permanent(Code::BAD_ROW, format!("column schema_version: {version} has over 32 bits"))
        })
    }

    fn source<'v>(&'v self, values: &'v [Option<Bytes>], source: &'v Source) -> Result<Option<Cow<'v, str>>> {
        match source {
            Source::Constant(text) => Ok(Some(text.into())),
            Source::Columns(columns) => {
                let first = columns.iter().find(|at| value(values, **at).is_some());
                first.map_or(Ok(None), |at| self.text(values, *at))
            }
        }
    }

    fn optional_text<'v>(
        &self,
        values: &'v [Option<Bytes>],
        at: Option<usize>,
    ) -> Result<Option<Cow<'v, str>>> {
        at.map_or(Ok(None), |at| self.text(values, at))
    }

    fn text<'v>(&self, values: &'v [Option<Bytes>], at: usize) -> Result<Option<Cow<'v, str>>> {
        self.read(values, at, values::cast_text)
    }

    fn integer(&self, values: &[Option<Bytes>], at: usize) -> Result<Option<i64>> {
        self.read(values, at, values::integer)
    }

    fn time(&self, values: &[Option<Bytes>], at: usize) -> Result<Option<OffsetDateTime>> {
        self.read(values, at, |type_oid, text| values::time(type_oid, text, self.zone))
    }

    fn read<'v, T>(
        &self,
        values: &'v [Option<Bytes>],
        at: usize,
        read: impl FnOnce(u32, &'v [u8]) -> Result<T>,
    ) -> Result<Option<T>> {
        let Some(text) = value(values, at) else { return Ok(None) };
        let SourceColumn { name, type_oid, .. } = &self.columns[at];
        read(*type_oid, text).map(Some).map_err(|error| error.context(format_args!("column {name}")))
    }
}

fn value(values: &[Option<Bytes>], at: usize) -> Option<&Bytes> {
    values.get(at)?.as_ref()
}

/// Whether SQL would find the status equal to the word.
fn is_word(type_oid: u32, status: &[u8], word: &str) -> bool {
    match type_oid {
        oid::BOOL => {
            values::boolean(status).ok().is_some_and(|s| values::boolean(word.as_bytes()).ok() == Some(s))
        }
        oid::BPCHAR => {
            values::text(status).is_ok_and(|text| text.trim_end_matches(' ') == word.trim_end_matches(' '))
        }
        _ => status == word.as_bytes(),
    }
}

/// Whether the condition holds; NULL counts as 0, and what is no number cannot say no.
fn holds(values: &[Option<Bytes>], when: &When) -> bool {
    let Some(count) = value(values, when.column) else { return compare(&0, when.test, &when.value) };
    if let Ok(count) = values::integer(oid::INT8, count) {
        return compare(&count, when.test, &when.value);
    }
    #[allow(clippy::cast_precision_loss, reason = "limits are small")]
    let limit = when.value as f64;
    let count = values::text(count).ok().and_then(|text| text.parse::<f64>().ok());
    count.is_none_or(|count| compare(&count, when.test, &limit))
}

fn compare<T: PartialOrd>(left: &T, test: Test, right: &T) -> bool {
    match test {
        Test::Less => left < right,
        Test::AtLeast => left >= right,
        Test::Equal => left == right,
    }
}

/// Finds columns by name, and remembers what it did not find.
struct Find<'a> {
    columns: &'a [SourceColumn],
    missing: Vec<String>,
}

impl Find<'_> {
    /// Where the column is. With a missing one there will be no mapping, so that what stands for it is never used.
    fn column(&mut self, name: &str) -> usize {
        self.columns.iter().position(|column| column.name == name).unwrap_or_else(|| {
            if !self.missing.iter().any(|missing| missing == name) {
                self.missing.push(name.to_owned());
            }
            0
        })
    }

    fn optional(&mut self, name: &Option<String>) -> Option<usize> {
        name.as_ref().map(|name| self.column(name))
    }

    fn field(&mut self, field: &Field) -> Source {
        match field {
            Field::Constant(text) => Source::Constant(text.clone()),
            Field::Column(_) | Field::FirstOf(_) => {
                Source::Columns(field.columns().iter().map(|column| self.column(column)).collect())
            }
        }
    }

    fn role(&mut self, role: &Role) -> OpenRole {
        let mut when =
            |when: &Condition| When { column: self.column(&when.column), test: when.test, value: when.value };
        OpenRole { word: role.word.clone(), when: role.when.as_ref().map(&mut when) }
    }

    fn finish(self, spec: &TableSpec) -> Result<()> {
        if self.missing.is_empty() {
            return Ok(());
        }
        Err(Error::permanent(
            Code::BAD_COLUMN,
            format!(
                "{} has no column {} in the WAL: correct the mapping, or the column list of the publication (generated \
                 columns are not in the WAL)",
                spec.display_name(),
                self.missing.join(", ")
            ),
        ))
    }
}

/// The text of a tuple's columns: what [`Mapping`] reads and a [`SourceRow`] keeps.
pub(crate) fn texts(tuple: &Tuple, columns: &[SourceColumn]) -> Result<Vec<Option<Bytes>>> {
    let mut texts = Vec::with_capacity(tuple.len());
    for (at, value) in tuple.values().enumerate() {
        texts.push(match value {
            Value::Null => None,
            Value::Text(text) => Some(text),
            Value::Binary(bytes) => {
                let type_oid = columns.get(at).map_or(oid::UNKNOWN, |column| column.type_oid);
                Some(values::binary_to_text(type_oid, bytes)?)
            }
            Value::Unchanged => {
                return Err(Error::permanent(
                    Code::BAD_ROW,
                    format!("value {at} was left out, and an insert has all"),
                ));
            }
        });
    }
    Ok(texts)
}

#[cfg(test)]
mod tests;
