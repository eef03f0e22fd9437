//! Settings as text: a sink's address and its table in a config, parsed in the same way for all sinks.
//!
//! An error repeats a value only if that value is wrong, because addresses contain passwords.

use std::{fmt, str::FromStr, time::Duration};

use crate::{Code, Error, Result};

/// An address in parts, percent-decoded: `scheme://user:password@hosts/path?key=value&key=value`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Address {
    /// The text before `://`, in lower case.
    pub scheme: String,
    /// The text before the `@`, up to a colon; none if it is empty.
    pub user: Option<String>,
    /// The text after that colon, which may be empty.
    pub password: Option<String>,
    /// One host with its port, or several with commas between.
    pub hosts: String,
    /// The text after the first `/`, split at further ones. A part may have had a `%2F`.
    pub path: Vec<String>,
    /// The pairs after the `?`, in order.
    pub query: Vec<(String, String)>,
}

impl Address {
    /// Parses an address. Unlike a URL, it may have several hosts.
    pub fn parse(text: &str) -> Result<Self> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("url", "has no `://` in it"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match rest.split_once('/') {
            Some((authority, path)) => (authority, Some(path)),
            None => (rest, None),
        };
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        // Text that looks like a host may be the beginning of a password.
        if login.is_none() && (path.is_some_and(|path| path.contains('@')) || query.contains('@')) {
            let what = "has an `@` behind a `/` or `?`: in a password these are written %2F and %3F, elsewhere \
                        an `@` is written %40";
            return Err(bad("url", what));
        }
        let (user, password) = match login.map(|login| login.split_once(':').ok_or(login)) {
            Some(Ok((user, password))) => (decode("user", user)?, Some(decode("password", password)?)),
            Some(Err(user)) => (decode("user", user)?, None),
            None => (String::new(), None),
        };
        let path = path.map(|path| path.split('/').map(|part| decode("url", part)).collect());
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let key = decode("url", key)?;
            let value = decode(&key, value)?;
            Ok((key, value))
        };
        let query = query.split('&').filter(|pair| !pair.is_empty()).map(pair).collect::<Result<_>>()?;
        Ok(Self {
            scheme: scheme.to_ascii_lowercase(),
            user: Some(user).filter(|user| !user.is_empty()),
            password,
            hosts: decode("url", hosts)?,
            path: path.transpose()?.unwrap_or_default(),
            query,
        })
    }

    /// The path as one text; none if it is empty.
    pub fn path(&self) -> Option<String> {
        Some(self.path.join("/")).filter(|path| !path.is_empty())
    }

    /// The only host, and its port or else this one. The brackets of an IPv6 address are removed.
    pub fn host(&self, default_port: u16) -> Result<(String, u16)> {
        let (host, port) = match self.hosts.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, rest)) => (host, Some(rest.strip_prefix(':').unwrap_or(rest))),
            None => match self.hosts.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (self.hosts.as_str(), None),
            },
        };
        if host.is_empty() {
            return Err(bad("url", format!("names no host; it should look like {}://host", self.scheme)));
        }
        // The error does not repeat the text: it may be part of a password.
        if host.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, ',' | '[' | ']')) {
            return Err(bad("url", "must name one host, or an IPv6 address in brackets"));
        }
        let port = port.map_or(Some(default_port), |port| port.parse().ok());
        let port = port.ok_or_else(|| {
            bad("url", "has a port that is not a number (write special characters in a password as %XX)")
        })?;
        Ok((host.to_owned(), port))
    }
}

/// Replaces `%XX` by the byte that it stands for. A plus stays a plus.
fn decode(key: &str, text: &str) -> Result<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        rest = behind;
        if *first != b'%' {
            out.push(*first);
            continue;
        }
        let digit = |at: usize| behind.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        let byte = digit(0).zip(digit(1)).and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        // This is most likely a password that was not encoded; with a wrong one the server would refuse the login later.
        out.push(byte.ok_or_else(|| {
            bad(key, "has a `%` without two hex digits after it; write a percent sign as %25")
        })?);
        rest = &behind[2..];
    }
    String::from_utf8(out).map_err(|_| bad(key, "has a %XX that is not UTF-8 text"))
}

const UNITS: [(&str, f64); 6] =
    [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3_600.0), ("d", 86_400.0), ("w", 604_800.0)];

/// A thousand years: no setting needs more, and no clock overflows with it.
const LONGEST: f64 = 31_557_600_000.0;

/// `500ms`, `1.5s`, `5m`, `2h`, `7d`, `1w`; none if the text has another form.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = (text[..at].parse::<f64>().ok()?, text[at..].trim_start());
    let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit)?;
    Some(number * factor).filter(|seconds| *seconds <= LONGEST).map(Duration::from_secs_f64)
}

/// A duration as [`parse_duration`] reads it, of at least one millisecond.
pub fn duration(key: &str, text: &str) -> Result<Duration> {
    match parse_duration(text) {
        Some(duration) if duration.as_millis() > 0 => Ok(duration),
        Some(_) => Err(bad(key, format!("must be a millisecond at least, found `{}`", text.escape_debug()))),
        None => Err(bad(
            key,
            format!("must be a duration like `500ms`, `10s` or `2m`, found `{}`", text.escape_debug()),
        )),
    }
}

/// `true` or `false`.
pub fn boolean(key: &str, text: &str) -> Result<bool> {
    one_of(key, text, &[("true", true), ("false", false)])
}

/// What one of these words stands for.
pub fn one_of<T: Copy>(key: &str, text: &str, known: &[(&str, T)]) -> Result<T> {
    known.iter().find(|(word, _)| *word == text).map(|(_, meant)| *meant).ok_or_else(|| {
        let words: Vec<String> = known.iter().map(|(word, _)| format!("`{word}`")).collect();
        bad(key, format!("must be {}, found `{}`", words.join(" or "), text.escape_debug()))
    })
}

/// A whole number of at least `least`.
pub fn number<T: FromStr + PartialOrd + fmt::Display>(key: &str, text: &str, least: T) -> Result<T> {
    let number = text.parse().ok().filter(|number| *number >= least);
    number.ok_or_else(|| {
        bad(key, format!("must be a whole number of at least {least}, found `{}`", text.escape_debug()))
    })
}

/// The permanent error for a wrong setting: its key and what is wrong with it.
pub fn bad(key: &str, what: impl fmt::Display) -> Error {
    Error::permanent(Code::BAD_CONFIG, format!("`{}` {what}", key.escape_debug()))
}

/// The permanent error for an unknown key.
pub fn unknown(key: &str, known: &[&str]) -> Error {
    let list: Vec<String> = known.iter().map(|known| format!("`{known}`")).collect();
    bad(key, format!("is not a setting of this sink; there are {}", list.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_apart() {
        let address =
            Address::parse("Amqp://me:p%40ss:w@a:1,b:2/ev.%7Bstream%7D?format=raw&linger.ms=5&x").unwrap();
        assert_eq!(address.scheme, "amqp");
        assert_eq!((address.user.as_deref(), address.password.as_deref()), (Some("me"), Some("p@ss:w")));
        assert_eq!((address.hosts.as_str(), address.path()), ("a:1,b:2", Some("ev.{stream}".into())));
        let pairs: Vec<(&str, &str)> = address.query.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(pairs, [("format", "raw"), ("linger.ms", "5"), ("x", "")]);
        let bare = Address::parse("http://h").unwrap();
        assert_eq!((bare.user, bare.password, bare.path.len(), bare.query.len()), (None, None, 0, 0));
        for (text, user, password) in
            [("a://u@h", Some("u"), None), ("a://u:@h", Some("u"), Some("")), ("a://:p@h", None, Some("p"))]
        {
            let address = Address::parse(text).unwrap();
            assert_eq!((address.user.as_deref(), address.password.as_deref()), (user, password), "{text}");
        }
        for (text, parts) in
            [("a://h/", vec![""]), ("a://h/a%2Fb", vec!["a/b"]), ("a://h/a/b?x=/c", vec!["a", "b"])]
        {
            assert_eq!(Address::parse(text).unwrap().path, parts, "{text}");
        }
    }

    #[test]
    fn one_host_has_a_port() {
        for (text, host, port) in [
            ("a://h", "h", 1),
            ("a://h:2/x", "h", 2),
            ("a://[::1]", "::1", 1),
            ("a://u:p@[::1]:2?x", "::1", 2),
            ("a://127.0.0.1:2", "127.0.0.1", 2),
        ] {
            assert_eq!(Address::parse(text).unwrap().host(1).unwrap(), (host.to_owned(), port), "{text}");
        }
    }

    #[test]
    fn a_wrong_address_is_refused_without_what_may_be_a_password() {
        for (text, expected) in [
            ("hunter2", "`url` has no `://`"),
            ("a://u:hunter2%@h", "`password` has a `%` without"),
            ("a://u:hunter2%zz@h", "`password` has a `%` without"),
            ("a://u:hunter2%é@h", "`password` has a `%` without"),
            ("a://u:hunter2%ff@h", "`password` has a %XX that is not UTF-8"),
            ("a://h?x=%ff", "`x` has a %XX"),
            ("a://u:hunter2/3@h", "written %2F"),
            ("a://u:hunter2?3@h", "written %2F"),
            ("a://u:hunter2", "a port that is not a number"),
            ("a://u:hunter2@", "names no host"),
            ("a://:1", "names no host"),
            ("a://h:", "a port that"),
            ("a://[::1]x", "a port that"),
            ("a://h:65536", "a port that"),
            ("a://::1", "names no host"),
            ("a://h,hunter2", "must name one host"),
            ("a://a b", "must name one host"),
        ] {
            let error = Address::parse(text).and_then(|address| address.host(1)).unwrap_err();
            assert!(error.message().contains(expected), "{text}: {error}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn values_are_read_or_named() {
        assert_eq!(duration("timeout", "2m").unwrap(), Duration::from_secs(120));
        assert_eq!(duration("timeout", "500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(duration("timeout", "1.5 s").unwrap(), Duration::from_millis(1_500));
        assert_eq!(duration("timeout", "7d").unwrap(), Duration::from_secs(604_800));
        for wrong in ["", "5", "s", "-1s", "1y", "1e9s", "1.2.3s", "99999999999w"] {
            let error = duration("timeout", wrong).unwrap_err();
            assert!(error.message().starts_with("`timeout` must be a duration"), "{error}");
        }
        assert!(duration("timeout", "0s").unwrap_err().message().contains("a millisecond at least"));
        assert_eq!(parse_duration("0s"), Some(Duration::ZERO));
        assert!(boolean("create", "yes").unwrap_err().message().contains("`create`"));
        assert_eq!(number("window", "3", 1usize).unwrap(), 3);
        assert!(number("window", "0", 1usize).is_err());
        assert!(unknown("x", &["a", "b"]).message().contains("`a`, `b`"));
    }
}
