//! Connect's `StringConverter`, which writes what Java's `toString` says, and its `SimpleHeaderConverter`.

use base64::{Engine, engine::general_purpose::STANDARD};

use super::{
    number,
    schema::{Kind, Schema, Value},
};

/// `toString`. Not for text and for nothing, which need no copy.
pub(super) fn to_string(schema: &Schema, value: &Value) -> String {
    match value {
        Value::Bytes(bytes) => format!("java.nio.HeapByteBuffer[pos=0 lim={0} cap={0}]", bytes.len()),
        // Java writes where the array is in memory.
        Value::Raw(_) => "[B@0".into(),
        Value::Array(values) => {
            let items = items(schema);
            let shown: Vec<String> = values.iter().map(|value| to_string(items, value)).collect();
            format!("[{}]", shown.join(", "))
        }
        Value::Struct(values) => {
            let present = fields(schema).iter().zip(values).filter(|(_, value)| **value != Value::Null);
            let shown: Vec<String> = present
                .map(|((name, schema), value)| format!("{name}={}", to_string(schema, value)))
                .collect();
            format!("Struct{{{}}}", shown.join(","))
        }
        other => scalar(other),
    }
}

/// As headers are written unless somebody asks for another converter.
pub(super) fn simple(schema: &Schema, value: &Value) -> String {
    let mut out = String::new();
    append(&mut out, schema, value, false);
    out
}

fn append(out: &mut String, schema: &Schema, value: &Value, is_inner: bool) {
    match value {
        Value::Text(text) if is_inner => quote(out, &String::from_utf8_lossy(text)),
        Value::Bytes(bytes) | Value::Raw(bytes) => {
            let encoded = STANDARD.encode(bytes);
            if is_inner {
                quote(out, &encoded);
            } else {
                out.push_str(&encoded);
            }
        }
        Value::Array(values) => {
            out.push('[');
            for (at, value) in values.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                append(out, items(schema), value, true);
            }
            out.push(']');
        }
        Value::Struct(values) => {
            out.push('{');
            for (at, ((name, schema), value)) in fields(schema).iter().zip(values).enumerate() {
                if at > 0 {
                    out.push(',');
                }
                quote(out, name);
                out.push(':');
                append(out, schema, value, true);
            }
            out.push('}');
        }
        other => out.push_str(&scalar(other)),
    }
}

fn quote(out: &mut String, text: &str) {
    out.push('"');
    out.push_str(&text.replace('\\', "\\\\").replace('"', "\\\""));
    out.push('"');
}

fn scalar(value: &Value) -> String {
    match value {
        Value::Boolean(value) => value.to_string(),
        Value::Int(number) => number.to_string(),
        Value::Float32(number) => number::float(*number),
        Value::Float64(number) => number::double(*number),
        Value::Text(text) => String::from_utf8_lossy(text).into_owned(),
        Value::Decimal(decimal) => decimal.text(),
        _ => "null".into(),
    }
}

/// A schema that fits nothing has nothing to say of what is inside, either.
fn items(schema: &Schema) -> &Schema {
    match &schema.kind {
        Kind::Array(items) => items,
        _ => schema,
    }
}

fn fields(schema: &Schema) -> &[(String, Schema)] {
    match &schema.kind {
        Kind::Struct(fields) => fields,
        _ => &[],
    }
}
