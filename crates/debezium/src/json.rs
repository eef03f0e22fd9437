//! Connect's `JsonConverter`: Jackson's way to write a value, with its schema before it or without.

use base64::{Engine, engine::general_purpose::STANDARD};

use super::{
    number,
    schema::{Kind, Schema, Value},
};

/// `{"schema":…,"payload":…}`.
pub(super) fn with_schema(schema: Option<&Schema>, value: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(b"{\"schema\":");
    match schema {
        Some(schema) => write_schema(&mut out, schema, None),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"payload\":");
    write(&mut out, schema, value);
    out.push(b'}');
    out
}

/// The value alone.
pub(super) fn without_schema(schema: Option<&Schema>, value: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    write(&mut out, schema, value);
    out
}

fn write(out: &mut Vec<u8>, schema: Option<&Schema>, value: &Value) {
    match value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Boolean(true) => out.extend_from_slice(b"true"),
        Value::Boolean(false) => out.extend_from_slice(b"false"),
        Value::Int(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Float32(number) => write_number(out, &number::float(*number), number.is_finite()),
        Value::Float64(number) => write_number(out, &number::double(*number), number.is_finite()),
        Value::Text(text) => write_string(out, text),
        Value::Bytes(bytes) | Value::Raw(bytes) => write_base64(out, bytes),
        Value::Decimal(decimal) => write_base64(out, &decimal.unscaled()),
        Value::Array(values) => {
            let items = match schema.map(|schema| &schema.kind) {
                Some(Kind::Array(items)) => Some(items.as_ref()),
                _ => None,
            };
            out.push(b'[');
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write(out, items, value);
            }
            out.push(b']');
        }
        Value::Struct(values) => {
            let fields = match schema.map(|schema| &schema.kind) {
                Some(Kind::Struct(fields)) => fields.as_slice(),
                _ => &[],
            };
            out.push(b'{');
            for (at, ((name, schema), value)) in fields.iter().zip(values).enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write_string(out, name.as_bytes());
                out.push(b':');
                write(out, Some(schema), value);
            }
            out.push(b'}');
        }
    }
}

/// What JSON has no number for is a string to Jackson.
fn write_number(out: &mut Vec<u8>, text: &str, is_finite: bool) {
    if is_finite {
        out.extend_from_slice(text.as_bytes());
    } else {
        write_string(out, text.as_bytes());
    }
}

fn write_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'"');
    out.extend_from_slice(STANDARD.encode(bytes).as_bytes());
    out.push(b'"');
}

fn write_schema(out: &mut Vec<u8>, schema: &Schema, field: Option<&str>) {
    out.extend_from_slice(b"{\"type\":\"");
    let kind = match &schema.kind {
        Kind::Boolean => "boolean",
        Kind::Int16 => "int16",
        Kind::Int32 => "int32",
        Kind::Int64 => "int64",
        Kind::Float32 => "float",
        Kind::Float64 => "double",
        Kind::String => "string",
        Kind::Bytes => "bytes",
        Kind::Array(_) => "array",
        Kind::Struct(_) => "struct",
    };
    out.extend_from_slice(kind.as_bytes());
    out.push(b'"');
    match &schema.kind {
        Kind::Array(items) => {
            out.extend_from_slice(b",\"items\":");
            write_schema(out, items, None);
        }
        Kind::Struct(fields) => {
            out.extend_from_slice(b",\"fields\":[");
            for (at, (name, schema)) in fields.iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write_schema(out, schema, Some(name));
            }
            out.push(b']');
        }
        _ => {}
    }
    out.extend_from_slice(if schema.optional { b",\"optional\":true" } else { b",\"optional\":false" });
    if let Some(name) = &schema.name {
        member(out, "name", name);
    }
    if let Some(version) = schema.version {
        out.extend_from_slice(format!(",\"version\":{version}").as_bytes());
    }
    if let Some(doc) = schema.doc {
        member(out, "doc", doc);
    }
    if !schema.parameters.is_empty() {
        out.extend_from_slice(b",\"parameters\":{");
        for (at, (name, value)) in schema.parameters.iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            write_string(out, name.as_bytes());
            out.push(b':');
            write_string(out, value.as_bytes());
        }
        out.push(b'}');
    }
    if let Some(field) = field {
        member(out, "field", field);
    }
    out.push(b'}');
}

fn member(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
    write_string(out, value.as_bytes());
}

/// As Jackson writes text: what has no short escape gets one in capitals, and so does each half of what UTF-16 needs two
/// halves for.
fn write_string(out: &mut Vec<u8>, text: &[u8]) {
    out.push(b'"');
    let mut clean = 0;
    let mut at = 0;
    while at < text.len() {
        let byte = text[at];
        let short = match byte {
            b'"' => Some(b'"'),
            b'\\' => Some(b'\\'),
            0x08 => Some(b'b'),
            b'\t' => Some(b't'),
            b'\n' => Some(b'n'),
            0x0c => Some(b'f'),
            b'\r' => Some(b'r'),
            _ => None,
        };
        let width = if byte >= 0xf0 { 4 } else { 1 };
        if short.is_none() && (0x20..0xf0).contains(&byte) {
            at += 1;
            continue;
        }
        out.extend_from_slice(&text[clean..at]);
        match (short, text.get(at..at + 4).filter(|_| width == 4)) {
            (Some(short), _) => out.extend_from_slice(&[b'\\', short]),
            (None, Some(four)) => {
                let mut halves = [0; 2];
                for c in String::from_utf8_lossy(four).chars() {
                    for half in c.encode_utf16(&mut halves) {
                        out.extend_from_slice(format!("\\u{half:04X}").as_bytes());
                    }
                }
            }
            (None, None) => out.extend_from_slice(format!("\\u{byte:04X}").as_bytes()),
        }
        at += width;
        clean = at;
    }
    out.extend_from_slice(text.get(clean..).unwrap_or_default());
    out.push(b'"');
}
