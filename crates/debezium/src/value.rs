//! From a column of PostgreSQL, as text, to what Debezium's connector makes of it with its default modes
//! (`time.precision.mode=adaptive`, `decimal.handling.mode=precise`, `binary.handling.mode=bytes`).

use airtight_core::{Code, Error, Result, SourceColumn};
use bytes::Bytes;

use super::{
    schema::{Decimal, Kind, Schema, Value},
    temporal,
};

/// Types of a database's own have larger numbers.
const FIRST_OWN: u32 = 16_384;

/// What a column is to Connect; none where the type is one that is not supported here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    Boolean,
    Int16,
    Int32,
    Int64,
    Float32,
    Float64,
    Text(Option<&'static str>),
    Bytea,
    Numeric,
    Money,
    Bits,
    Date,
    Time,
    TimeZoned,
    Timestamp,
    TimestampZoned,
    Interval,
    /// An enum, most likely; or an extension's type.
    Own,
}

const JSON: &str = "io.debezium.data.Json";

/// The type of a number in `pg_type`, and whether it is an array of it.
fn type_of(oid: u32) -> Option<(Type, bool)> {
    let plain = match oid {
        16 => Type::Boolean,
        21 => Type::Int16,
        23 => Type::Int32,
        20 | 26 => Type::Int64,
        700 => Type::Float32,
        701 => Type::Float64,
        // text, varchar, bpchar, "char", name; inet, cidr, macaddr, macaddr8; ranges of int4, num, ts, tstz, date, int8
        25 | 1043 | 1042 | 18 | 19 | 869 | 650 | 829 | 774 | 3904 | 3906 | 3908 | 3910 | 3912 | 3926 => {
            Type::Text(None)
        }
        114 | 3802 => Type::Text(Some(JSON)),
        2950 => Type::Text(Some("io.debezium.data.Uuid")),
        142 => Type::Text(Some("io.debezium.data.Xml")),
        3614 => Type::Text(Some("io.debezium.data.Tsvector")),
        17 => Type::Bytea,
        1700 => Type::Numeric,
        790 => Type::Money,
        1560 | 1562 => Type::Bits,
        1082 => Type::Date,
        1083 => Type::Time,
        1266 => Type::TimeZoned,
        1114 => Type::Timestamp,
        1184 => Type::TimestampZoned,
        1186 => Type::Interval,
        own if own >= FIRST_OWN => Type::Own,
        other => return Some((type_of(element_of(other)?)?.0, true)),
    };
    Some((plain, false))
}

/// Of those arrays that Debezium writes.
fn element_of(array: u32) -> Option<u32> {
    Some(match array {
        1000 => 16,
        1005 => 21,
        1007 => 23,
        1016 => 20,
        1028 => 26,
        1021 => 700,
        1022 => 701,
        1009 => 25,
        1015 => 1043,
        1014 => 1042,
        1002 => 18,
        1041 => 869,
        651 => 650,
        1040 => 829,
        775 => 774,
        3905 => 3904,
        3907 => 3906,
        3909 => 3908,
        3911 => 3910,
        3913 => 3912,
        3927 => 3926,
        199 => 114,
        3807 => 3802,
        2951 => 2950,
        1001 => 17,
        1231 => 1700,
        1182 => 1082,
        1183 => 1083,
        1270 => 1266,
        1115 => 1114,
        1185 => 1184,
        _ => return None,
    })
}

/// What a column is; a type that is not supported is a permanent error.
pub(super) fn schema(column: &SourceColumn) -> Result<Schema> {
    let (plain, is_array) = type_of(column.type_oid).ok_or_else(|| {
        let message = format!(
            "the column `{}` has the type with the number {}, which airtight does not write as Debezium does",
            column.name, column.type_oid
        );
        Error::permanent(Code::DEBEZIUM_TYPE, message)
    })?;
    if !is_array {
        return Ok(plain_schema(plain, column.type_modifier, column.nullable));
    }
    let items = plain_schema(plain, column.type_modifier, true);
    Ok(Schema::new(Kind::Array(Box::new(items)), column.nullable))
}

/// Whether a column's text is its value as it stands.
pub(super) fn is_text(column: &SourceColumn) -> bool {
    matches!(type_of(column.type_oid), Some((Type::Text(_) | Type::Own, false)))
}

fn plain_schema(plain: Type, modifier: i32, optional: bool) -> Schema {
    let of = |kind| Schema::new(kind, optional);
    let named = |kind, name| Schema::named(kind, optional, name);
    let is_coarse = (0..=3).contains(&modifier);
    match plain {
        Type::Boolean => of(Kind::Boolean),
        Type::Int16 => of(Kind::Int16),
        Type::Int32 => of(Kind::Int32),
        Type::Int64 => of(Kind::Int64),
        Type::Float32 => of(Kind::Float32),
        Type::Float64 => of(Kind::Float64),
        Type::Text(None) => of(Kind::String),
        Type::Text(Some(name)) => named(Kind::String, name),
        Type::Own => Schema { is_partial: true, ..of(Kind::String) },
        Type::Bytea => of(Kind::Bytes),
        Type::Numeric => match precision_and_scale(modifier) {
            Some((precision, scale)) => Schema {
                parameters: vec![
                    ("scale", scale.to_string()),
                    ("connect.decimal.precision", precision.to_string()),
                ],
                ..named(Kind::Bytes, "org.apache.kafka.connect.data.Decimal")
            },
            None => {
                let required = |kind| Schema::new(kind, false);
                let fields = vec![
                    ("scale".to_owned(), required(Kind::Int32)),
                    ("value".to_owned(), required(Kind::Bytes)),
                ];
                Schema {
                    doc: Some("Variable scaled decimal"),
                    ..named(Kind::Struct(fields), "io.debezium.data.VariableScaleDecimal")
                }
            }
        },
        Type::Money => Schema {
            parameters: vec![("scale", "2".into())],
            ..named(Kind::Bytes, "org.apache.kafka.connect.data.Decimal")
        },
        Type::Bits if modifier == 1 => of(Kind::Boolean),
        Type::Bits => Schema {
            parameters: vec![("length", modifier.to_string())],
            ..named(Kind::Bytes, "io.debezium.data.Bits")
        },
        Type::Date => named(Kind::Int32, "io.debezium.time.Date"),
        Type::Time if is_coarse => named(Kind::Int32, "io.debezium.time.Time"),
        Type::Time => named(Kind::Int64, "io.debezium.time.MicroTime"),
        Type::TimeZoned => named(Kind::String, "io.debezium.time.ZonedTime"),
        Type::Timestamp if is_coarse => named(Kind::Int64, "io.debezium.time.Timestamp"),
        Type::Timestamp => named(Kind::Int64, "io.debezium.time.MicroTimestamp"),
        Type::TimestampZoned => named(Kind::String, "io.debezium.time.ZonedTimestamp"),
        Type::Interval => named(Kind::Int64, "io.debezium.time.MicroDuration"),
    }
}

/// Debezium takes the scale's eleven bits for a positive number, so that `numeric(4,-2)` has 2046 decimals.
fn precision_and_scale(modifier: i32) -> Option<(i32, i32)> {
    let modifier = modifier.checked_sub(4).filter(|modifier| *modifier >= 0)?;
    Some(((modifier >> 16) & 0xffff, modifier & 0x7ff))
}

/// What a column holds. Text is not copied.
pub(super) fn value(column: &SourceColumn, text: Option<&Bytes>) -> Result<Value> {
    let Some(text) = text else { return Ok(Value::Null) };
    // Debezium has no such numbers, says so in its log, and writes nothing.
    if column.type_oid == 1700 && column.nullable && matches!(&text[..], b"NaN" | b"Infinity" | b"-Infinity")
    {
        return Ok(Value::Null);
    }
    let (plain, is_array) = type_of(column.type_oid).unwrap_or((Type::Own, false));
    let read = if is_array {
        items(text).and_then(|items| {
            items
                .into_iter()
                .map(|item| match item {
                    Some(item) => plain_value(plain, column.type_modifier, &item.into()),
                    None => Some(Value::Null),
                })
                .collect::<Option<Vec<_>>>()
                .map(Value::Array)
        })
    } else {
        plain_value(plain, column.type_modifier, text)
    };
    read.ok_or_else(|| {
        let shown: String = String::from_utf8_lossy(text).chars().take(80).collect();
        let message = format!(
            "the column `{}` holds `{}`, which airtight cannot write as Debezium does",
            column.name,
            shown.escape_debug()
        );
        Error::permanent(Code::DEBEZIUM_VALUE, message)
    })
}

fn plain_value(plain: Type, modifier: i32, bytes: &Bytes) -> Option<Value> {
    if let Type::Text(_) | Type::Own = plain {
        return Some(Value::Text(bytes.clone()));
    }
    let text = std::str::from_utf8(bytes).ok()?;
    let is_coarse = (0..=3).contains(&modifier);
    Some(match plain {
        Type::Boolean => Value::Boolean(text == "t"),
        Type::Int16 | Type::Int32 | Type::Int64 => Value::Int(text.parse().ok()?),
        Type::Float32 => Value::Float32(text.parse().ok()?),
        Type::Float64 => Value::Float64(text.parse().ok()?),
        Type::Bytea => Value::Bytes(unhex(text.strip_prefix("\\x")?)?.into()),
        Type::Numeric => match precision_and_scale(modifier) {
            Some((_, scale)) => Value::Decimal(Decimal::parse(text)?.with_scale(scale)?),
            None => {
                let number = Decimal::parse(text)?.stripped();
                Value::Struct(vec![Value::Int(i64::from(number.scale)), Value::Raw(number.unscaled().into())])
            }
        },
        Type::Money => {
            let digits: String =
                text.chars().filter(|c| c.is_ascii_digit() || matches!(c, '-' | '.')).collect();
            Value::Decimal(Decimal::parse(&digits)?.with_scale(2)?)
        }
        Type::Bits if modifier == 1 => Value::Boolean(text == "1"),
        Type::Bits => Value::Raw(bits(text)?.into()),
        Type::Date => Value::Int(temporal::date(text)?),
        Type::Time if is_coarse => Value::Int(temporal::time(text)? / 1_000),
        Type::Time => Value::Int(temporal::time(text)?),
        Type::TimeZoned => Value::Text(temporal::zoned_time(text)?.into()),
        Type::Timestamp if is_coarse => Value::Int(temporal::timestamp(text)?.div_euclid(1_000)),
        Type::Timestamp => Value::Int(temporal::timestamp(text)?),
        Type::TimestampZoned => Value::Text(temporal::zoned_timestamp(text, modifier)?.into()),
        Type::Interval => Value::Int(temporal::interval(text)?),
        Type::Text(_) | Type::Own => return None,
    })
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| u8::try_from(digit(*pair.first()?)? * 16 + digit(*pair.get(1)?)?).ok()).collect()
}

/// Lowest byte first, and none for zeros at the upper end.
fn bits(text: &str) -> Option<Vec<u8>> {
    let mut bytes = vec![0_u8; text.len().div_ceil(8)];
    for (at, bit) in text.bytes().rev().enumerate() {
        match bit {
            b'1' => bytes[at / 8] |= 1 << (at % 8),
            b'0' => {}
            _ => return None,
        }
    }
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    Some(bytes)
}

/// What is in `{1,NULL,"a \"b\""}`; none for more dimensions than one.
fn items(text: &[u8]) -> Option<Vec<Option<Vec<u8>>>> {
    let inner = text.strip_prefix(b"{")?.strip_suffix(b"}")?;
    let mut items = Vec::new();
    let mut rest = inner;
    while !rest.is_empty() {
        let mut item = Vec::new();
        let quoted = rest.first() == Some(&b'"');
        let mut at = usize::from(quoted);
        loop {
            match rest.get(at) {
                Some(b'\\') => {
                    item.push(*rest.get(at + 1)?);
                    at += 2;
                }
                Some(b'"') if quoted => {
                    at += 1;
                    break;
                }
                Some(b'{') if !quoted => return None,
                Some(b',') | None if !quoted => break,
                Some(byte) => {
                    item.push(*byte);
                    at += 1;
                }
                None => return None,
            }
        }
        let is_null = !quoted && item.eq_ignore_ascii_case(b"NULL");
        items.push(Some(item).filter(|_| !is_null));
        rest = match rest.get(at) {
            Some(b',') => &rest[at + 1..],
            None => &[],
            Some(_) => return None,
        };
    }
    Some(items)
}

/// The schema of text that a JSON column holds, for events without a row.
pub(super) fn json_schema() -> Schema {
    Schema::named(Kind::String, true, JSON)
}
