//! Values with their schemas, as Kafka Connect has them: what a router passes to a converter.

use std::borrow::Cow;

use bytes::Bytes;

/// What a value is.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Schema {
    pub(super) kind: Kind,
    pub(super) optional: bool,
    /// The logical type, `io.debezium.data.Json`.
    pub(super) name: Option<Cow<'static, str>>,
    pub(super) version: Option<i32>,
    pub(super) doc: Option<&'static str>,
    pub(super) parameters: Vec<(&'static str, String)>,
    /// Of a type that only the database knows all about, such as an enum: good for values, and no schema to be shown.
    pub(super) is_partial: bool,
}

/// The type behind a logical one.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Kind {
    Boolean,
    Int16,
    Int32,
    Int64,
    Float32,
    Float64,
    String,
    Bytes,
    Array(Box<Schema>),
    Struct(Vec<(String, Schema)>),
}

impl Schema {
    pub(super) fn new(kind: Kind, optional: bool) -> Self {
        Self {
            kind,
            optional,
            name: None,
            version: None,
            doc: None,
            parameters: Vec::new(),
            is_partial: false,
        }
    }

    /// A logical type of Debezium's or Connect's, all of which are in their first version.
    pub(super) fn named(kind: Kind, optional: bool, name: &'static str) -> Self {
        Self { name: Some(name.into()), version: Some(1), ..Self::new(kind, optional) }
    }

    /// The kind, as Connect's messages call it.
    pub(super) fn kind_name(&self) -> &'static str {
        match self.kind {
            Kind::Boolean => "BOOLEAN",
            Kind::Int16 => "INT16",
            Kind::Int32 => "INT32",
            Kind::Int64 => "INT64",
            Kind::Float32 => "FLOAT32",
            Kind::Float64 => "FLOAT64",
            Kind::String => "STRING",
            Kind::Bytes => "BYTES",
            Kind::Array(_) => "ARRAY",
            Kind::Struct(_) => "STRUCT",
        }
    }

    /// Whether the value may stand where this schema is asked for.
    pub(super) fn takes(&self, value: &Value) -> bool {
        match (&self.kind, value) {
            (_, Value::Null) => self.optional,
            (Kind::Boolean, Value::Boolean(_))
            | (Kind::Int16 | Kind::Int32 | Kind::Int64, Value::Int(_))
            | (Kind::Float32, Value::Float32(_))
            | (Kind::Float64, Value::Float64(_))
            | (Kind::String, Value::Text(_))
            | (Kind::Bytes, Value::Bytes(_) | Value::Raw(_) | Value::Decimal(_)) => true,
            (Kind::Array(items), Value::Array(values)) => values.iter().all(|value| items.takes(value)),
            (Kind::Struct(fields), Value::Struct(values)) => fields.len() == values.len(),
            _ => false,
        }
    }
}

/// A value. What it is called is the schema's business.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Null,
    Boolean(bool),
    Int(i64),
    Float32(f32),
    Float64(f64),
    /// UTF-8, as the database wrote it.
    Text(Bytes),
    /// A `ByteBuffer` to Java.
    Bytes(Bytes),
    /// A `byte[]` to Java, which shows when it is written as text.
    Raw(Bytes),
    Decimal(Decimal),
    Array(Vec<Value>),
    /// In the order of the schema's fields.
    Struct(Vec<Value>),
}

/// A number with a fixed scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decimal {
    pub(super) negative: bool,
    /// Decimal digits without leading zeros; `0` is zero.
    pub(super) digits: String,
    pub(super) scale: i32,
}
