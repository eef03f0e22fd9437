//! Values of PostgreSQL in Rust, in the text form of their types.
//!
//! What the queue leaves to SQL (`::text`, `::bigint`, `AT TIME ZONE`, `json_build_object`) is done here, with the
//! same result: an event from the WAL must equal the one that the queue would have read. Text is expected to be
//! written with `DateStyle` ISO, `TimeZone` UTC and `client_encoding` UTF8.

mod binary;
mod json;
mod time;

use std::borrow::Cow;

use airtight_core::{Code, Error, Result};
use bytes::Bytes;

pub(crate) use self::{
    binary::binary_to_text,
    json::json,
    time::{Zone, from_pg_micros, time},
};

/// The numbers of the built-in types that are not just text.
pub(crate) mod oid {
    pub(crate) const BOOL: u32 = 16;
    pub(crate) const BYTEA: u32 = 17;
    pub(crate) const NAME: u32 = 19;
    pub(crate) const INT8: u32 = 20;
    pub(crate) const INT2: u32 = 21;
    pub(crate) const INT4: u32 = 23;
    pub(crate) const TEXT: u32 = 25;
    pub(crate) const JSON: u32 = 114;
    pub(crate) const FLOAT4: u32 = 700;
    pub(crate) const FLOAT8: u32 = 701;
    pub(crate) const UNKNOWN: u32 = 705;
    pub(crate) const INET: u32 = 869;
    pub(crate) const BPCHAR: u32 = 1042;
    pub(crate) const VARCHAR: u32 = 1043;
    pub(crate) const DATE: u32 = 1082;
    pub(crate) const TIMESTAMP: u32 = 1114;
    pub(crate) const TIMESTAMPTZ: u32 = 1184;
    pub(crate) const NUMERIC: u32 = 1700;
    pub(crate) const UUID: u32 = 2950;
    pub(crate) const JSONB: u32 = 3802;

    /// From here on the types are somebody's own: what they are is not known by their number.
    pub(crate) const FIRST_OWN: u32 = 16384;
}

/// The built-in type of a name, if it is one of those that are not just text. The WAL numbers a column by its domain
/// and names the type below it: this leads from one to the other.
pub(crate) fn builtin(schema: &str, name: &str) -> Option<u32> {
    if !matches!(schema, "" | "pg_catalog") {
        return None;
    }
    if let Some(element) = name.strip_prefix('_') {
        return json::array_of(element);
    }
    Some(match name {
        "bool" => oid::BOOL,
        "bytea" => oid::BYTEA,
        "name" => oid::NAME,
        "int8" => oid::INT8,
        "int2" => oid::INT2,
        "int4" => oid::INT4,
        "text" => oid::TEXT,
        "json" => oid::JSON,
        "float4" => oid::FLOAT4,
        "float8" => oid::FLOAT8,
        "inet" => oid::INET,
        "bpchar" => oid::BPCHAR,
        "varchar" => oid::VARCHAR,
        "date" => oid::DATE,
        "timestamp" => oid::TIMESTAMP,
        "timestamptz" => oid::TIMESTAMPTZ,
        "numeric" => oid::NUMERIC,
        "uuid" => oid::UUID,
        "jsonb" => oid::JSONB,
        _ => return None,
    })
}

fn bad(what: impl Into<String>) -> Error {
    Error::permanent(Code::BAD_ROW, what)
}

/// A value at most this long is quoted in an error; no error needs more.
fn quoted(text: &str) -> String {
    let end = text.char_indices().nth(40).map_or(text.len(), |(end, _)| end);
    format!("`{}`{}", &text[..end], if end < text.len() { "…" } else { "" })
}

/// The value as text, as it came.
pub(crate) fn text(value: &[u8]) -> Result<&str> {
    std::str::from_utf8(value).map_err(|error| bad(format!("text is not UTF-8: {error}")))
}

/// The value as SQL's `::text` has it, which is not for every type what the type itself writes.
pub(crate) fn cast_text(type_oid: u32, value: &[u8]) -> Result<Cow<'_, str>> {
    let text = text(value)?;
    Ok(match type_oid {
        oid::BOOL if text == "t" => "true".into(),
        oid::BOOL if text == "f" => "false".into(),
        oid::BPCHAR => text.trim_end_matches(' ').into(),
        oid::INET if !text.contains('/') => {
            format!("{text}/{}", if text.contains(':') { 128 } else { 32 }).into()
        }
        _ => text.into(),
    })
}

/// The same without a copy, where the text is part of the value.
pub(crate) fn cast_bytes(type_oid: u32, value: &Bytes) -> Result<Bytes> {
    Ok(match cast_text(type_oid, value)? {
        Cow::Borrowed(text) if text.len() == value.len() => value.clone(),
        Cow::Borrowed(text) if value.starts_with(text.as_bytes()) => value.slice(..text.len()),
        Cow::Borrowed(text) => Bytes::copy_from_slice(text.as_bytes()),
        Cow::Owned(text) => text.into(),
    })
}

/// A truth value, as the type writes it (`t`) and as people do (`true`).
pub(crate) fn boolean(value: &[u8]) -> Result<bool> {
    match value.to_ascii_lowercase().as_slice() {
        b"t" | b"true" | b"y" | b"yes" | b"on" | b"1" => Ok(true),
        b"f" | b"false" | b"n" | b"no" | b"off" | b"0" => Ok(false),
        _ => Err(bad(format!("not a boolean: {}", quoted(text(value)?)))),
    }
}

/// A whole number: SQL's `::bigint`, which rounds.
pub(crate) fn integer(type_oid: u32, value: &[u8]) -> Result<i64> {
    let text = text(value)?.trim();
    let number = match type_oid {
        oid::BOOL => return boolean(value).map(i64::from),
        oid::NUMERIC => round_numeric(text),
        oid::FLOAT4 | oid::FLOAT8 => text.parse::<f64>().ok().and_then(round_float),
        _ => text.parse().ok(),
    };
    number.ok_or_else(|| bad(format!("not a whole number of 64 bits: {}", quoted(text))))
}

/// Halves go away from zero.
fn round_numeric(text: &str) -> Option<i64> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if !(whole.bytes().chain(fraction.bytes())).all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let up = fraction.as_bytes().first().is_some_and(|digit| *digit >= b'5');
    let number = whole.parse::<i128>().ok()? + i128::from(up);
    i64::try_from(if negative { -number } else { number }).ok()
}

/// Halves go to the even number.
fn round_float(number: f64) -> Option<i64> {
    let number = number.round_ties_even();
    // Both bounds are exact as floats; the upper one is one too many.
    let fits = (-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&number);
    #[allow(clippy::cast_possible_truncation, reason = "it fits and has no fraction")]
    fits.then_some(number as i64)
}

/// Bytes, in either form that `bytea_output` knows.
pub(crate) fn bytea(value: &[u8]) -> Result<Vec<u8>> {
    match value.strip_prefix(b"\\x") {
        Some(hex) => bytea_hex(hex),
        None => bytea_escape(value),
    }
    .ok_or_else(|| bad("not bytes in hex or escape form"))
}

fn bytea_hex(hex: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut bytes = Vec::with_capacity(hex.len() / 2);
    let mut rest = hex;
    while let Some((&first, tail)) = rest.split_first() {
        // The input function allows blanks between bytes; they come from text columns only.
        if matches!(first, b' ' | b'\n' | b'\t' | b'\r') {
            rest = tail;
            continue;
        }
        let (&second, tail) = tail.split_first()?;
        bytes.push(digit(first)? << 4 | digit(second)?);
        rest = tail;
    }
    Some(bytes)
}

fn bytea_escape(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(rest.len());
    loop {
        match *rest {
            [] => return Some(bytes),
            [b'\\', b'\\', ..] => {
                bytes.push(b'\\');
                rest = &rest[2..];
            }
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = &rest[4..];
            }
            [b'\\', ..] => return None,
            [byte, ..] => {
                bytes.push(byte);
                rest = &rest[1..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn text_as_a_cast_has_it() {
        for (type_oid, value, expected) in [
            (oid::TEXT, "t", "t"),
            (oid::BOOL, "t", "true"),
            (oid::BOOL, "f", "false"),
            (oid::BPCHAR, "ab  ", "ab"),
            (oid::VARCHAR, "ab  ", "ab  "),
            (oid::INET, "10.0.0.1", "10.0.0.1/32"),
            (oid::INET, "10.0.0.0/8", "10.0.0.0/8"),
            (oid::INET, "::1", "::1/128"),
        ] {
            assert_eq!(cast_text(type_oid, value.as_bytes()).unwrap(), expected);
            assert_eq!(cast_bytes(type_oid, &Bytes::from(value)).unwrap(), expected);
        }
        let value = Bytes::from("ab   ");
        assert_eq!(cast_bytes(oid::BPCHAR, &value).unwrap().as_ptr(), value.as_ptr());
        assert!(cast_text(oid::TEXT, b"\xFF").is_err());
    }

    #[test]
    fn whole_numbers_are_rounded_as_a_cast_does() {
        for (type_oid, value, expected) in [
            (oid::INT8, "-9223372036854775808", Some(i64::MIN)),
            (oid::INT8, "9223372036854775808", None),
            (oid::TEXT, " 42 ", Some(42)),
            (oid::TEXT, "4.2", None),
            (oid::NUMERIC, "2.5", Some(3)),
            (oid::NUMERIC, "-2.5", Some(-3)),
            (oid::NUMERIC, "-0.4", Some(0)),
            (oid::NUMERIC, "9223372036854775807.5", None),
            (oid::NUMERIC, "99999999999999999999999999999999999999999999", None),
            (oid::NUMERIC, "NaN", None),
            (oid::NUMERIC, "+1", None),
            (oid::FLOAT8, "2.5", Some(2)),
            (oid::FLOAT8, "1e+18", Some(1_000_000_000_000_000_000)),
            (oid::FLOAT8, "1e+19", None),
            (oid::FLOAT8, "NaN", None),
            (oid::BOOL, "t", Some(1)),
        ] {
            assert_eq!(integer(type_oid, value.as_bytes()).ok(), expected, "{value}");
        }
    }

    #[test]
    fn bytes_in_both_forms() {
        for (value, expected) in [
            (&b"\\x"[..], Some(&b""[..])),
            (b"\\x00fF10", Some(b"\x00\xff\x10")),
            (b"\\x00 ff\n", Some(b"\x00\xff")),
            (b"\\x0", None),
            (b"\\x0g", None),
            (b"\\x0 0", None),
            (b"", Some(b"")),
            (b"a\\\\b\\000\\377", Some(b"a\\b\x00\xff")),
            (b"a\\400", None),
            (b"a\\", None),
        ] {
            assert_eq!(bytea(value).ok().as_deref(), expected, "{}", value.escape_ascii());
        }
    }

    #[test]
    fn truth_and_ids() {
        assert!(boolean(b"t").unwrap() && boolean(b"TRUE").unwrap() && !boolean(b"off").unwrap());
        assert!(boolean(b"maybe").is_err());
    }

    proptest! {
        #[test]
        fn nothing_panics(type_oid in prop::sample::select(vec![16, 17, 20, 25, 114, 701, 869, 1042, 1082, 1114, 1184,
                                                                1700, 1007, 1009, 3802, 99999]),
                          value in prop_oneof![".{0,40}".prop_map(String::into_bytes),
                                               "[-+0-9:. TZBC{}\"\\\\,NUL\\[\\]=]{0,40}".prop_map(String::into_bytes),
                                               prop::collection::vec(any::<u8>(), 0..40)]) {
            let bytes = Bytes::from(value);
            let _ = cast_bytes(type_oid, &bytes);
            let _ = integer(type_oid, &bytes);
            let _ = time(type_oid, &bytes, Zone::UTC);
            let _ = json(type_oid, &bytes);
            let _ = bytea(&bytes);
            let _ = boolean(&bytes);
            let _ = binary_to_text(type_oid, bytes);
        }

        #[test]
        fn bytes_come_back(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let text = binary_to_text(oid::BYTEA, bytes.clone().into()).unwrap();
            prop_assert_eq!(bytea(&text).unwrap(), bytes);
        }
    }
}
