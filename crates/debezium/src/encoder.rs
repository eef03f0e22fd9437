//! The router and the converters: they turn an event into a record.

use std::{borrow::Cow, sync::Arc};

use airtight_core::{Code, Error, Event, Payload, Result, settings::bad};
use bytes::Bytes;
use uuid::Uuid;

use crate::{
    expand::{self, Expanded},
    json,
    options::{Additional, Converter, Converters, DebeziumOptions, Delegate, Placement},
    route::RegexRoute,
    schema::{Kind, Schema, Value},
    temporal, text, value,
};

/// A message for Kafka.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Where to.
    pub topic: String,
    /// The key; none is no key.
    pub key: Option<Bytes>,
    /// The value; none is a tombstone.
    pub value: Option<Bytes>,
    /// Names and values in order. A name may occur twice, and a value may be none.
    pub headers: Vec<(Arc<str>, Option<Bytes>)>,
    /// Milliseconds since 1970; none is the time of sending.
    pub timestamp: Option<i64>,
    /// The partition; none is left to the key.
    pub partition: Option<i32>,
}

/// What says where an event goes, without its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address<'a> {
    /// The value of `route.by.field`, which decides on the [topic](DebeziumEncoder::topic_of).
    pub by: Cow<'a, str>,
    /// The key; none is no key.
    pub key: Option<Bytes>,
    /// The partition; none is left to the key.
    pub partition: Option<i32>,
}

/// What a message holds, wherever it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// The value; none is a tombstone.
    pub value: Option<Bytes>,
    /// Names and values in order. A name may occur twice, and a value may be none.
    pub headers: Vec<(Arc<str>, Option<Bytes>)>,
    /// Milliseconds since 1970; none is the time of sending.
    pub timestamp: Option<i64>,
}

/// Makes records of events; see the [crate](crate).
#[derive(Debug, Clone)]
pub struct DebeziumEncoder {
    options: DebeziumOptions,
    converters: Converters,
    route: RegexRoute,
    /// The headers that are the same for all, converted.
    context: Vec<(Arc<str>, Option<Bytes>)>,
    has_envelope: bool,
    /// The name of the header that has the id.
    id: Arc<str>,
}

impl DebeziumEncoder {
    /// Checks what can be checked before an event comes; a permanent error names the option that is wrong.
    pub fn new(options: DebeziumOptions, converters: Converters) -> Result<Self> {
        let route = RegexRoute::new("{aggregate_type}", &options.route_regex, &options.route_replacement)?;
        let has_envelope = options.has_envelope();
        let is_known = |option: &Option<String>| option.as_ref().is_some_and(|value| !value.is_empty());
        if options.extended_headers && !is_known(&options.topic_prefix) {
            return Err(bad(
                "topic.prefix",
                "is in the headers that `extended.headers.enabled` asks for: set it",
            ));
        }
        if has_envelope && converters.value.has_schemas() {
            for (name, option) in
                [("topic.prefix", &options.topic_prefix), ("table.include.list", &options.table)]
            {
                if !is_known(option) {
                    return Err(bad(
                        name,
                        "is in the name of an envelope's schema, which the converter writes: set it",
                    ));
                }
            }
        }
        let mut encoder =
            Self { options, converters, route, context: Vec::new(), has_envelope, id: "id".into() };
        if encoder.options.extended_headers {
            encoder.context = encoder.context_headers()?;
        }
        Ok(encoder)
    }

    /// The options.
    pub fn options(&self) -> &DebeziumOptions {
        &self.options
    }

    /// The record for an event. One that cannot be written is a permanent error that says why; Debezium's task ends
    /// over it.
    pub fn encode(&self, event: &Event) -> Result<Record> {
        let Address { by, key, partition } = self.address(event)?;
        let Content { value, headers, timestamp } = self.content(event, &by)?;
        let topic = self.topic_of(&by).into_owned();
        Ok(Record { topic, key, value, headers, timestamp, partition })
    }

    /// Where an event goes.
    pub fn address<'a>(&self, event: &'a Event) -> Result<Address<'a>> {
        let by = self.text_of(event, &self.options.route_by, Role::Route)?;
        let (schema, key) = self.required(event, &self.options.event_key, Role::Key)?;
        let mut partition = None;
        for additional in self.options.additional.iter().filter(|of| of.placement == Placement::Partition) {
            partition = match self.additional(event, additional)? {
                Some((schema, value)) => number(&additional.column, &schema, &value, event.row.is_none())?,
                None => partition,
            };
        }
        if partition.is_some_and(|partition| partition < 0) {
            return Err(Error::permanent(Code::DEBEZIUM_PARTITION, "the event's partition is below 0"));
        }
        Ok(Address { by, key: convert(self.converters.key, Some(&schema), &key)?, partition })
    }

    /// The topic of all events that have this in `route.by.field`.
    pub fn topic_of<'a>(&self, by: &'a str) -> Cow<'a, str> {
        self.route.replace(by).map_or(by.into(), Cow::Owned)
    }

    /// The content of an event that goes [`by`](Address::by) this.
    pub fn content(&self, event: &Event, by: &str) -> Result<Content> {
        let options = &self.options;
        let (id_schema, id) = self.required(event, &options.event_id, Role::Id)?;
        let (payload_schema, payload) = self.required(event, &options.event_payload, Role::Payload)?;
        let timestamp = self.timestamp(event)?;

        let mut headers = Vec::with_capacity(self.context.len() + 1 + options.additional.len());
        headers.extend_from_slice(&self.context);
        headers.push((self.id.clone(), convert(self.converters.header, Some(&id_schema), &id)?));

        let (payload_schema, payload) = self.expanded(payload_schema, payload);
        let mut beside = Vec::new();
        for additional in options.additional.iter().filter(|of| of.placement != Placement::Partition) {
            let Some((schema, value)) = self.additional(event, additional)? else { continue };
            if additional.placement == Placement::Envelope {
                beside.push((additional.alias.clone(), schema, value));
            } else {
                let header = convert(self.converters.header, Some(&schema), &value)?;
                headers.push((additional.alias.as_str().into(), header));
            }
        }
        let value = if options.tombstone_on_empty && is_blank(&payload) {
            None
        } else if self.has_envelope {
            let (schema, value) = self.envelope(event, by, payload_schema, payload, beside)?;
            convert(self.converters.value, Some(&schema), &value)?
        } else {
            convert(self.converters.value, payload_schema.as_ref(), &payload)?
        };
        Ok(Content { value, headers, timestamp })
    }

    /// A column that `fields.additional.placement` names; none where the table has none and that is no error.
    fn additional(&self, event: &Event, additional: &Additional) -> Result<Option<(Schema, Value)>> {
        let found = self.field(event, &additional.column, Role::Other)?;
        if found.is_none() && (self.options.error_on_missing || additional.placement == Placement::Envelope) {
            return Err(missing(&additional.column));
        }
        Ok(found)
    }

    /// The number of a task and the id of its run are what a relay of one task, started now, would have.
    fn context_headers(&self) -> Result<Vec<(Arc<str>, Option<Bytes>)>> {
        let prefix = self.options.topic_prefix.clone().unwrap_or_default();
        [
            ("connectorLogicalName", prefix),
            ("taskId", "0".into()),
            ("connectorName", "postgresql".into()),
            ("runId", Uuid::new_v4().to_string()),
        ]
        .into_iter()
        .map(|(name, text)| {
            let schema = Schema::new(Kind::String, false);
            let value = convert(self.converters.header, Some(&schema), &Value::Text(text.into()))?;
            Ok((format!("__debezium.context.{name}").into(), value))
        })
        .collect()
    }

    /// A column that must be there.
    fn required(&self, event: &Event, name: &str, role: Role) -> Result<(Schema, Value)> {
        self.field(event, name, role)?.ok_or_else(|| missing(name))
    }

    /// A column; none where the table has no such one.
    fn field(&self, event: &Event, name: &str, role: Role) -> Result<Option<(Schema, Value)>> {
        let Some(row) = &event.row else { return Ok(self.own_field(event, name, role)) };
        let Some((column, text)) = row.get(name) else { return Ok(None) };
        Ok(Some((value::schema(column)?, value::value(column, text)?)))
    }

    /// A column that must be text, and there.
    fn text_of<'a>(&self, event: &'a Event, name: &str, role: Role) -> Result<Cow<'a, str>> {
        if let Some((column, Some(text))) = event.row.as_ref().and_then(|row| row.get(name))
            && value::is_text(column)
            && let Ok(text) = std::str::from_utf8(text)
        {
            return Ok(text.into());
        }
        let (schema, value) = self.required(event, name, role)?;
        match value {
            Value::Text(text) => Ok(String::from_utf8_lossy(&text).into_owned().into()),
            Value::Null => {
                let message = format!("the event has nothing in `{name}`, so that it has no topic");
                Err(Error::permanent(Code::DEBEZIUM_TOPIC, message))
            }
            _ => Err(wrong_type(name, &schema, "STRING")),
        }
    }

    /// What stands for a column in an event without a row.
    fn own_field(&self, event: &Event, name: &str, role: Role) -> Option<(Schema, Value)> {
        let options = &self.options;
        let text = |text: &str| {
            (Schema::new(Kind::String, false), Value::Text(Bytes::copy_from_slice(text.as_bytes())))
        };
        match (role, name) {
            (Role::Id, _) => Some(text(&event.id)),
            (Role::Key, _) => Some(text(&event.aggregate_id)),
            (Role::Payload, _) => Some(self.own_payload(&event.payload)),
            (_, name) if name == options.event_id => Some(text(&event.id)),
            (_, name) if name == options.event_key => Some(text(&event.aggregate_id)),
            (_, name) if name == options.event_type => Some(text(&event.event_type)),
            (_, name) if name == options.event_payload => Some(self.own_payload(&event.payload)),
            (_, "aggregatetype" | "aggregate_type") => Some(text(&event.aggregate_type)),
            (_, "stream") => Some(text(&event.stream)),
            (role, name) => match (event.extra.get(name), event.headers.get(name)) {
                (Some(value), _) => Some(own_value(value)),
                (None, Some(value)) => Some(text(value)),
                (None, None) => (role == Role::Route).then(|| text(&event.aggregate_type)),
            },
        }
    }

    fn own_payload(&self, payload: &Payload) -> (Schema, Value) {
        match payload {
            Payload::None => (value::json_schema(), Value::Null),
            Payload::Json(text) => (value::json_schema(), Value::Text(text.clone())),
            Payload::Bytes(bytes) if self.converters.value == Converter::String => {
                (Schema::new(Kind::String, true), Value::Text(bytes.clone()))
            }
            Payload::Bytes(bytes) => (Schema::new(Kind::Bytes, true), Value::Bytes(bytes.clone())),
        }
    }

    /// The time of `table.field.event.timestamp`, which must be a `timestamp`. Debezium refuses a `timestamptz`, and
    /// there is no other way to read one, so it is taken here.
    fn timestamp(&self, event: &Event) -> Result<Option<i64>> {
        let Some(name) = &self.options.event_timestamp else { return Ok(None) };
        let Some(row) = &event.row else {
            let millis = event.occurred_at.unix_timestamp_nanos() / 1_000_000;
            return Ok(i64::try_from(millis).ok());
        };
        let (column, text) = row.get(name).ok_or_else(|| missing(name))?;
        let Some(text) = text else { return Ok(None) };
        let (schema, value) = (value::schema(column)?, value::value(column, Some(text))?);
        let millis = match (schema.name.as_deref(), value) {
            (Some("io.debezium.time.Timestamp"), Value::Int(millis)) => millis,
            (Some("io.debezium.time.MicroTimestamp"), Value::Int(micros)) => micros / 1_000,
            (Some("io.debezium.time.ZonedTimestamp"), _) => {
                let micros = std::str::from_utf8(text).ok().and_then(temporal::instant);
                micros.unwrap_or_default() / 1_000
            }
            _ => return Err(wrong_type(name, &schema, "timestamp")),
        };
        if millis < 0 {
            let message = format!("the event's time in `{name}` is before 1970, which Kafka cannot have");
            return Err(Error::permanent(Code::DEBEZIUM_TIMESTAMP, message));
        }
        Ok(Some(millis))
    }

    fn expanded(&self, schema: Schema, payload: Value) -> (Option<Schema>, Value) {
        let Value::Text(text) = &payload else { return (Some(schema), payload) };
        if !self.options.expand_json {
            return (Some(schema), payload);
        }
        match expand::expand(&self.options.event_payload, text, self.options.keep_nulls) {
            Expanded::Struct(schema, value) => (Some(schema), value),
            Expanded::Unchanged => (Some(schema), payload),
            Expanded::Mismatched(schema) => (schema, payload),
        }
    }

    /// The payload with what is placed beside it.
    fn envelope(
        &self,
        event: &Event,
        by: &str,
        payload_schema: Option<Schema>,
        payload: Value,
        beside: Vec<(String, Schema, Value)>,
    ) -> Result<(Schema, Value)> {
        let payload_schema =
            payload_schema.filter(|schema| schema.takes(&payload)).ok_or_else(not_expanded)?;
        let version = match &self.options.event_schema_version {
            None => None,
            Some(_) if event.row.is_none() => Some(event.schema_version),
            Some(name) => {
                let (schema, value) = self.required(event, name, Role::Other)?;
                number(name, &schema, &value, false)?
            }
        };
        let mut fields = vec![("payload".to_owned(), payload_schema)];
        let mut values = vec![payload];
        for (name, schema, value) in beside {
            fields.push((name, schema));
            values.push(value);
        }
        let known = |option: &Option<String>| option.clone().unwrap_or_default();
        let name = format!("{}.{}.{by}.Value", known(&self.options.topic_prefix), known(&self.options.table));
        let schema = Schema { name: Some(name.into()), version, ..Schema::new(Kind::Struct(fields), false) };
        Ok((schema, Value::Struct(values)))
    }
}

/// What a column is wanted for, which says what stands for it in an event without a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Id,
    Key,
    Payload,
    Route,
    Other,
}

/// An extra column of an event without a row.
fn own_value(value: &serde_json::Value) -> (Schema, Value) {
    let of = |kind, value| (Schema::new(kind, true), value);
    match value {
        serde_json::Value::Null => of(Kind::String, Value::Null),
        serde_json::Value::Bool(value) => of(Kind::Boolean, Value::Boolean(*value)),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => of(Kind::Int64, Value::Int(number)),
            (None, Some(number)) => of(Kind::Float64, Value::Float64(number)),
            (None, None) => of(Kind::String, Value::Text(number.to_string().into())),
        },
        serde_json::Value::String(text) => of(Kind::String, Value::Text(text.clone().into())),
        other => of(Kind::String, Value::Text(other.to_string().into())),
    }
}

/// Text of blanks is nothing to Debezium; an empty `bytea` is not.
fn is_blank(payload: &Value) -> bool {
    match payload {
        Value::Null => true,
        Value::Text(text) => text.iter().all(|byte| *byte <= b' '),
        _ => false,
    }
}

/// A column that must be an `int4`; without a row any number may be one.
fn number(name: &str, schema: &Schema, value: &Value, or_any: bool) -> Result<Option<i32>> {
    match (&schema.kind, value) {
        (Kind::Int32, Value::Null) => Ok(None),
        (Kind::Int32, Value::Int(number)) => Ok(i32::try_from(*number).ok()),
        (_, Value::Null) if or_any => Ok(None),
        (_, Value::Int(number)) if or_any => {
            i32::try_from(*number).map(Some).map_err(|_| wrong_type(name, schema, "INT32"))
        }
        _ => Err(wrong_type(name, schema, "INT32")),
    }
}

/// One value to bytes.
fn convert(converter: Converter, schema: Option<&Schema>, value: &Value) -> Result<Option<Bytes>> {
    let is_bytes = schema.is_none_or(|schema| schema.kind == Kind::Bytes);
    match converter {
        Converter::String | Converter::Simple => Ok(match (value, schema) {
            (Value::Null, _) => None,
            (Value::Text(text), _) => Some(text.clone()),
            (value, Some(schema)) if converter == Converter::String => {
                Some(text::to_string(schema, value).into())
            }
            (value, Some(schema)) => Some(text::simple(schema, value).into()),
            (_, None) => None,
        }),
        Converter::Json { schemas } => {
            let Some(of) = schema else {
                return Ok(match value {
                    Value::Null => None,
                    value if schemas => Some(json::with_schema(None, value).into()),
                    value => Some(json::without_schema(None, value).into()),
                });
            };
            if !of.takes(value) {
                return Err(not_expanded());
            }
            if schemas && is_partial(of) {
                return Err(Error::permanent(
                    Code::DEBEZIUM_TYPE,
                    "a column of the event has a type of the database's own, such as an enum, whose schema \
                     airtight does not know: write it without schemas, or leave it out",
                ));
            }
            let bytes =
                if schemas { json::with_schema(schema, value) } else { json::without_schema(schema, value) };
            Ok(Some(bytes.into()))
        }
        Converter::ByteArray => match value {
            _ if !is_bytes => Err(no_bytes("ByteArrayConverter", schema)),
            Value::Null => Ok(None),
            Value::Bytes(bytes) | Value::Raw(bytes) => Ok(Some(bytes.clone())),
            _ => Err(no_bytes("ByteArrayConverter", schema)),
        },
        Converter::Binary(delegate) => match (value, delegate) {
            (Value::Null, _) if is_bytes => Ok(None),
            (Value::Bytes(bytes), _) if is_bytes => Ok(Some(bytes.clone())),
            (_, Some(Delegate::String)) => convert(Converter::String, schema, value),
            (_, Some(Delegate::Json { schemas })) => convert(Converter::Json { schemas }, schema, value),
            (_, None) => Err(no_bytes("BinaryDataConverter without a delegate", schema)),
        },
    }
}

fn is_partial(schema: &Schema) -> bool {
    schema.is_partial
        || match &schema.kind {
            Kind::Array(items) => is_partial(items),
            Kind::Struct(fields) => fields.iter().any(|(_, schema)| is_partial(schema)),
            _ => false,
        }
}

fn missing(name: &str) -> Error {
    let message =
        format!("the event's table has no column `{name}`, which an option of Debezium's router names");
    Error::permanent(Code::DEBEZIUM_COLUMN, message)
}

fn wrong_type(name: &str, schema: &Schema, wanted: &str) -> Error {
    let message = format!(
        "the column `{name}` is of type {}, and Debezium's router wants {wanted}",
        schema.kind_name()
    );
    Error::permanent(Code::DEBEZIUM_TYPE, message)
}

fn no_bytes(converter: &str, schema: Option<&Schema>) -> Error {
    let kind = schema.map_or("STRING", Schema::kind_name);
    Error::permanent(
        Code::DEBEZIUM_CONVERTER,
        format!("the {converter} writes bytes, and this is of type {kind}"),
    )
}

fn not_expanded() -> Error {
    Error::permanent(
        Code::DEBEZIUM_EXPAND,
        "the payload is JSON that `table.expand.json.payload` finds a schema for and cannot fill it: an array instead \
         of an object, members of an array that differ, or a number of more than 64 bits",
    )
}
