//! Settings as text: what stands in a sink's address and in its table of a config, read the same way by all sinks.
//!
//! Nothing here repeats a value in an error unless it is the value that is wrong: addresses hold passwords.

use std::{str::FromStr, time::Duration};

use crate::{Error, Result};

/// An address in parts, percent-decoded: `scheme://user:password@hosts/path?key=value&key=value`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Address {
    /// What stands before `://`, in lower case.
    pub scheme: String,
    /// What stands before the `@`, up to a colon.
    pub user: Option<String>,
    /// The rest of it.
    pub password: Option<String>,
    /// One host with its port, or several with commas between.
    pub hosts: String,
    /// What stands behind the first `/`; none where that is nothing.
    pub path: Option<String>,
    /// The pairs behind the `?`, in order.
    pub query: Vec<(String, String)>,
}

impl Address {
    /// Takes an address apart. It may have several hosts, which a URL may not.
    pub fn parse(text: &str) -> Result<Self> {
        let (scheme, rest) =
            text.split_once("://").ok_or_else(|| bad("the address", "has no `://` in it"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            Some((user, password)) => (given(decode(user)?), given(decode(password)?)),
            None => (None, None),
        };
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decode(key)?, decode(value)?))
        };
        let query = query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect::<Result<_>>()?;
        let hosts = hosts.to_owned();
        Ok(Self {
            scheme: scheme.to_ascii_lowercase(),
            user,
            password,
            hosts,
            path: given(decode(path)?),
            query,
        })
    }
}

fn given(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// `%XX` to the byte that it stands for. A plus is a plus.
fn decode(text: &str) -> Result<String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = text.get(at + 1..at + 3).filter(|_| bytes[at] == b'%');
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8(out).map_err(|_| bad("the address", "holds %XX that are not UTF-8 text"))
}

/// A duration: a whole number with `ms`, `s`, `m` or `h`.
pub fn duration(key: &str, text: &str) -> Result<Duration> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "ms" => Some(1),
        "s" => Some(1_000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        _ => None,
    };
    let millis =
        number.parse::<u64>().ok().zip(factor).and_then(|(number, factor)| number.checked_mul(factor));
    match millis {
        Some(millis) if millis > 0 => Ok(Duration::from_millis(millis)),
        _ => Err(bad(key, &format!("must be a duration like `500ms`, `10s` or `2m`, found `{text}`"))),
    }
}

/// `true` or `false`.
pub fn boolean(key: &str, text: &str) -> Result<bool> {
    text.parse().map_err(|_| bad(key, &format!("must be `true` or `false`, found `{text}`")))
}

/// A whole number of at least `least`.
pub fn number<T: FromStr + PartialOrd + std::fmt::Display>(key: &str, text: &str, least: T) -> Result<T> {
    let number = text.parse().ok().filter(|number| *number >= least);
    number.ok_or_else(|| bad(key, &format!("must be a whole number of at least {least}, found `{text}`")))
}

/// The permanent error of a setting that is wrong: its key and what is wrong with it.
pub fn bad(key: &str, what: &str) -> Error {
    Error::permanent("bad_config", format!("`{key}` {what}"))
}

/// The permanent error of a key that nobody knows.
pub fn unknown(key: &str, known: &[&str]) -> Error {
    let list: Vec<String> = known.iter().map(|known| format!("`{known}`")).collect();
    bad(key, &format!("is not a setting of this sink; there are {}", list.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_apart() {
        let address =
            Address::parse("Kafka://me:p%40ss:w@a:1,b:2/ev.%7Bstream%7D?format=raw&linger.ms=5&x").unwrap();
        assert_eq!(address.scheme, "kafka");
        assert_eq!((address.user.as_deref(), address.password.as_deref()), (Some("me"), Some("p@ss:w")));
        assert_eq!((address.hosts.as_str(), address.path.as_deref()), ("a:1,b:2", Some("ev.{stream}")));
        let pairs: Vec<(&str, &str)> = address.query.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(pairs, [("format", "raw"), ("linger.ms", "5"), ("x", "")]);
        let bare = Address::parse("nats://h").unwrap();
        assert_eq!((bare.user, bare.path, bare.query.len()), (None, None, 0));
        assert!(Address::parse("h:1").is_err());
    }

    #[test]
    fn values_are_read_or_named() {
        assert_eq!(duration("timeout", "2m").unwrap(), Duration::from_secs(120));
        assert_eq!(duration("timeout", "500ms").unwrap(), Duration::from_millis(500));
        for wrong in ["", "5", "s", "-1s", "1.5s", "0s", "99999999999999999999h"] {
            let error = duration("timeout", wrong).unwrap_err();
            assert!(error.message().starts_with("`timeout` must be a duration"), "{error}");
        }
        assert!(boolean("create", "yes").unwrap_err().message().contains("`create`"));
        assert_eq!(number("window", "3", 1usize).unwrap(), 3);
        assert!(number("window", "0", 1usize).is_err());
        assert!(unknown("x", &["a", "b"]).message().contains("`a`, `b`"));
    }
}
