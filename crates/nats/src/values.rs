//! Single values of a config, as they are written in a URL or a table.

use std::time::Duration;

use airtight_core::Result;
use async_nats::ServerAddr;

use crate::config::bad;

/// The servers of a list with commas.
pub(crate) fn servers(text: &str, tls: bool) -> Result<Vec<ServerAddr>> {
    let scheme = if tls { "tls" } else { "nats" };
    // The text itself stays out of the message: somebody may have written a password into it.
    let parse = |server: &str| {
        let server = server.trim();
        let address = format!("{scheme}://{server}").parse::<ServerAddr>().ok();
        address.filter(|_| !server.is_empty() && !server.contains(['@', '/', ' '])).ok_or_else(|| {
            bad("servers", "must be host:port, or several with commas between, like n1:4222,n2:4222")
        })
    };
    text.split(',').map(parse).collect()
}

pub(crate) fn boolean(key: &str, value: &str) -> Result<bool> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(bad(key, "must be `true` or `false`")),
    }
}

pub(crate) fn number(key: &str, value: &str) -> Result<usize> {
    value.parse().map_err(|_| bad(key, "must be a whole number"))
}

/// `500ms`, `10s`, `2m`.
pub(crate) fn duration(key: &str, value: &str) -> Result<Duration> {
    let digits = value.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = value.split_at(digits);
    let parsed = match (number.parse::<u32>(), unit) {
        (Ok(number), "ms") => Some(Duration::from_millis(number.into())),
        (Ok(number), "s") => Some(Duration::from_secs(number.into())),
        (Ok(number), "m") => Some(Duration::from_secs(60 * u64::from(number))),
        _ => None,
    };
    parsed.ok_or_else(|| bad(key, "is not a duration; write it like `500ms`, `10s` or `2m`"))
}

pub(crate) fn percent_decode(key: &str, text: &str) -> Result<String> {
    let wrong = || {
        // The key may come from a URL that is not ours at all.
        bad(&key.escape_debug().to_string(), "has a `%` without two hex digits behind it, or is not UTF-8")
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        rest = behind;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, behind @ ..] = behind else { return Err(wrong()) };
        let digit = |byte: &u8| char::from(*byte).to_digit(16);
        let byte = digit(high).zip(digit(low)).and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        bytes.push(byte.ok_or_else(wrong)?);
        rest = behind;
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}
