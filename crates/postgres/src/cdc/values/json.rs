//! Values as `json_build_object` prints them.

use airtight_core::Result;
use serde_json::Value;

use super::{bad, oid, quoted, text};

/// An array has no more dimensions than this.
const MAX_DIMENSIONS: usize = 6;

/// A value in JSON: numbers, booleans and JSON as such, arrays of the usual types as arrays, times in ISO 8601, and
/// all else as the text that its type writes. (The database would make objects of composite types and of `hstore`,
/// and arrays of arrays of somebody's own type; the number of a type does not tell.)
pub(crate) fn json(type_oid: u32, value: &[u8]) -> Result<Value> {
    of_text(type_oid, text(value)?)
}

fn of_text(type_oid: u32, text: &str) -> Result<Value> {
    Ok(match type_oid {
        oid::BOOL => Value::Bool(text == "t"),
        oid::INT2 | oid::INT4 | oid::INT8 | oid::FLOAT4 | oid::FLOAT8 | oid::NUMERIC => match text {
            "NaN" | "Infinity" | "-Infinity" => text.into(),
            _ => parse(text)?,
        },
        oid::JSON | oid::JSONB => parse(text)?,
        oid::TIMESTAMP | oid::TIMESTAMPTZ => iso(text).into(),
        _ => match element_of(type_oid) {
            Some(element) => array(element, text)?,
            None => text.into(),
        },
    })
}

fn parse(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| bad(format!("{}: {error}", quoted(text))))
}

/// From `2026-11-16 05:47:43+00` to `2026-11-16T05:47:43+00:00`.
fn iso(text: &str) -> String {
    let Some((date, rest)) = text.split_once(' ') else { return text.into() };
    let (time, era) = rest.split_once(' ').map_or((rest, ""), |(time, _)| (time, " BC"));
    let minutes = match time.rfind(['+', '-']) {
        Some(at) if !time[at..].contains(':') => ":00",
        _ => "",
    };
    format!("{date}T{time}{minutes}{era}")
}

/// The arrays of the usual types: the name of what they hold, their number, and what to take an element for.
const ARRAYS: [(&str, u32, u32); 23] = [
    ("bool", 1000, oid::BOOL),
    ("bytea", 1001, oid::BYTEA),
    ("name", 1003, oid::TEXT),
    ("int2", 1005, oid::INT2),
    ("int4", 1007, oid::INT4),
    ("text", 1009, oid::TEXT),
    ("bpchar", 1014, oid::TEXT),
    ("varchar", 1015, oid::TEXT),
    ("int8", 1016, oid::INT8),
    ("float4", 1021, oid::FLOAT4),
    ("float8", 1022, oid::FLOAT8),
    ("inet", 1041, oid::TEXT),
    ("timestamp", 1115, oid::TIMESTAMP),
    ("date", 1182, oid::DATE),
    ("time", 1183, oid::TEXT),
    ("timestamptz", 1185, oid::TIMESTAMPTZ),
    ("interval", 1187, oid::TEXT),
    ("numeric", 1231, oid::NUMERIC),
    ("timetz", 1270, oid::TEXT),
    ("uuid", 2951, oid::UUID),
    ("cidr", 651, oid::TEXT),
    ("json", 199, oid::JSON),
    ("jsonb", 3807, oid::JSONB),
];

fn element_of(type_oid: u32) -> Option<u32> {
    ARRAYS.iter().find(|(_, array, _)| *array == type_oid).map(|(.., element)| *element)
}

/// The number of the array of a type.
pub(super) fn array_of(name: &str) -> Option<u32> {
    ARRAYS.iter().find(|(element, ..)| *element == name).map(|(_, array, _)| *array)
}

/// An array: `{1,2,NULL}`, `{"a b","say \"x\""}`, `{{1,2},{3,4}}`, `[0:1]={1,2}`.
fn array(element: u32, text: &str) -> Result<Value> {
    let body = match text.strip_prefix('[') {
        Some(bounds) => bounds.split_once("={").map(|(bounds, _)| &text[bounds.len() + 2..]),
        None => Some(text),
    };
    let mut scan = Scan { element, rest: body.unwrap_or_default() };
    match scan.array(1)? {
        Some(value) if scan.rest.is_empty() => Ok(value),
        _ => Err(bad(format!("not an array: {}", quoted(text)))),
    }
}

struct Scan<'a> {
    element: u32,
    rest: &'a str,
}

impl Scan<'_> {
    /// The next array; none if there is none.
    fn array(&mut self, dimension: usize) -> Result<Option<Value>> {
        if dimension > MAX_DIMENSIONS || !self.after('{') {
            return Ok(None);
        }
        let mut values = Vec::new();
        if self.after('}') {
            return Ok(Some(Value::Array(values)));
        }
        loop {
            let value = if self.rest.starts_with('{') { self.array(dimension + 1)? } else { self.value()? };
            let Some(value) = value else { return Ok(None) };
            values.push(value);
            if self.after('}') {
                return Ok(Some(Value::Array(values)));
            }
            if !self.after(',') {
                return Ok(None);
            }
        }
    }

    fn value(&mut self) -> Result<Option<Value>> {
        if self.after('"') {
            let Some(text) = self.quoted() else { return Ok(None) };
            return of_text(self.element, &text).map(Some);
        }
        let Some(end) = self.rest.find([',', '}']) else { return Ok(None) };
        let (text, rest) = self.rest.split_at(end);
        self.rest = rest;
        match text {
            "NULL" => Ok(Some(Value::Null)),
            _ => of_text(self.element, text).map(Some),
        }
    }

    /// Text up to the quote that ends it.
    fn quoted(&mut self) -> Option<String> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices();
        while let Some((at, char)) = chars.next() {
            match char {
                '"' => {
                    self.rest = &self.rest[at + 1..];
                    return Some(text);
                }
                '\\' => text.push(chars.next()?.1),
                char => text.push(char),
            }
        }
        None
    }

    fn after(&mut self, char: char) -> bool {
        let rest = self.rest.strip_prefix(char);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json as j;

    use super::*;

    #[test]
    fn prints_what_the_database_would() {
        for (type_oid, text, expected) in [
            (oid::BOOL, "t", j!(true)),
            (oid::INT8, "-42", j!(-42)),
            (oid::NUMERIC, "1.50", j!(1.5)),
            (oid::NUMERIC, "NaN", j!("NaN")),
            (oid::FLOAT8, "1e+20", j!(1e20)),
            (oid::FLOAT8, "-Infinity", j!("-Infinity")),
            (oid::TEXT, "42", j!("42")),
            (oid::BPCHAR, "ab  ", j!("ab  ")),
            (oid::INET, "10.0.0.1", j!("10.0.0.1")),
            (oid::BYTEA, "\\x00ff", j!("\\x00ff")),
            (oid::JSONB, r#"{"a": [1, null]}"#, j!({"a": [1, null]})),
            (oid::TIMESTAMPTZ, "2026-11-16 05:47:43.1+00", j!("2026-11-16T05:47:43.1+00:00")),
            (oid::TIMESTAMPTZ, "2026-11-16 05:47:43-03:30", j!("2026-11-16T05:47:43-03:30")),
            (oid::TIMESTAMPTZ, "0044-03-15 12:00:00+00 BC", j!("0044-03-15T12:00:00+00:00 BC")),
            (oid::TIMESTAMP, "2026-11-16 05:47:43", j!("2026-11-16T05:47:43")),
            (oid::TIMESTAMP, "infinity", j!("infinity")),
            (oid::DATE, "2026-11-16", j!("2026-11-16")),
            (1007, "{}", j!([])),
            (1007, "{1,NULL,-3}", j!([1, null, -3])),
            (1007, "{{1,2},{3,4}}", j!([[1, 2], [3, 4]])),
            (1007, "[0:1][5:5]={{1},{2}}", j!([[1], [2]])),
            (
                1009,
                r#"{a,"b c","say \"x\" \\","NULL",NULL,""}"#,
                j!(["a", "b c", "say \"x\" \\", "NULL", null, ""]),
            ),
            (1000, "{t,f}", j!([true, false])),
            (3807, r#"{"{\"a\": 1}",2}"#, j!([{"a": 1}, 2])),
            (1185, r#"{"2026-11-16 05:47:43+00"}"#, j!(["2026-11-16T05:47:43+00:00"])),
            (99999, "{a,b}", j!("{a,b}")),
        ] {
            assert_eq!(json(type_oid, text.as_bytes()).unwrap(), expected, "{text}");
        }
        for (type_oid, text) in [
            (1007, ""),
            (1007, "{"),
            (1007, "{1"),
            (1007, "{1,}"),
            (1007, "{1}x"),
            (1007, "{x}"),
            (1009, r#"{"a}"#),
            (1009, r#"{"a"b}"#),
            (1007, "[0:1]"),
            (1007, "{{{{{{{1}}}}}}}"),
            (oid::JSON, "{oops"),
            (oid::FLOAT8, "1e400"),
        ] {
            assert!(json(type_oid, text.as_bytes()).is_err(), "{text}");
        }
    }
}
