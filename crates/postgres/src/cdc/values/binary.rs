//! Values in binary form, converted to the text that the server would have written. All other code works on text.

use std::fmt::Write;

use airtight_core::Result;
use bytes::Bytes;
use uuid::Uuid;

use super::{bad, oid, time::text_of_micros};

/// The text of a binary value of one of the usual types; text and JSON are slices of it.
pub(crate) fn binary_to_text(type_oid: u32, value: Bytes) -> Result<Bytes> {
    let text: String = match type_oid {
        oid::TEXT | oid::VARCHAR | oid::BPCHAR | oid::NAME | oid::UNKNOWN | oid::JSON => return Ok(value),
        oid::JSONB => {
            return match value.first() {
                Some(1) => Ok(value.slice(1..)),
                version => Err(bad(format!("binary jsonb of version {version:?}, want 1"))),
            };
        }
        oid::UUID => Uuid::from_bytes(fixed(type_oid, &value)?).to_string(),
        oid::INT2 => i16::from_be_bytes(fixed(type_oid, &value)?).to_string(),
        oid::INT4 => i32::from_be_bytes(fixed(type_oid, &value)?).to_string(),
        oid::INT8 => i64::from_be_bytes(fixed(type_oid, &value)?).to_string(),
        oid::BOOL => if fixed::<1>(type_oid, &value)? == [0] { "f" } else { "t" }.into(),
        oid::TIMESTAMP => text_of_micros(i64::from_be_bytes(fixed(type_oid, &value)?), ""),
        oid::TIMESTAMPTZ => text_of_micros(i64::from_be_bytes(fixed(type_oid, &value)?), "+00"),
        oid::BYTEA => {
            let mut text = String::with_capacity(2 + value.len() * 2);
            text.push_str("\\x");
            for byte in &value {
                // Writing to a string cannot fail.
                let _ = write!(text, "{byte:02x}");
            }
            text
        }
        _ => return Err(bad(format!("a binary value of type {type_oid} is not read"))),
    };
    Ok(text.into())
}

fn fixed<const N: usize>(type_oid: u32, value: &[u8]) -> Result<[u8; N]> {
    value
        .try_into()
        .map_err(|_| bad(format!("a binary value of type {type_oid} has {} bytes, want {N}", value.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_what_the_server_would() {
        let cases: [(u32, &[u8], &str); 12] = [
            (oid::TEXT, b"abc", "abc"),
            (oid::JSONB, b"\x01{}", "{}"),
            (oid::UUID, &[0x11; 16], "11111111-1111-1111-1111-111111111111"),
            (oid::INT2, &(-5_i16).to_be_bytes(), "-5"),
            (oid::INT4, &5_i32.to_be_bytes(), "5"),
            (oid::INT8, &i64::MIN.to_be_bytes(), "-9223372036854775808"),
            (oid::BOOL, &[1], "t"),
            (oid::BYTEA, &[0, 255], "\\x00ff"),
            (oid::TIMESTAMPTZ, &0_i64.to_be_bytes(), "2000-01-01 00:00:00+00"),
            (oid::TIMESTAMP, &(-500_000_i64).to_be_bytes(), "1999-12-31 23:59:59.5"),
            (oid::TIMESTAMPTZ, &(-64_509_048_000_000_000_i64).to_be_bytes(), "0046-10-16 12:00:00+00 BC"),
            (oid::TIMESTAMPTZ, &i64::MAX.to_be_bytes(), "infinity"),
        ];
        for (type_oid, value, expected) in cases {
            assert_eq!(binary_to_text(type_oid, Bytes::copy_from_slice(value)).unwrap(), expected);
        }
        for (type_oid, value) in [(oid::JSONB, &b"\x02{}"[..]), (oid::INT4, b"abc"), (oid::NUMERIC, b"")] {
            assert!(binary_to_text(type_oid, Bytes::copy_from_slice(value)).is_err());
        }
    }
}
