//! The errors of the server, and what they mean.

use airtight_core::{Code, Error, Result};
use redis::{RedisError, ServerError};

/// A stream as a destination: its name in errors, and for [`airtight_core::Sink::destinations`].
pub(crate) fn destination(key: &str) -> String {
    format!("stream {}", printable(key))
}

/// How much of the server's text an error shows.
const SHOWN: usize = 200;

/// A server's error, `CODE words`.
#[derive(Debug)]
pub(crate) struct Refusal {
    code: String,
    words: String,
}

impl Refusal {
    /// The server's error; any other is handed back.
    pub(crate) fn from_redis(error: RedisError) -> Result<Self, RedisError> {
        let error = ServerError::try_from(error)?;
        Ok(Self { code: error.code().to_owned(), words: printable(error.details().unwrap_or_default()) })
    }

    /// The text of an error that a script met. Before Redis 7 some say where: `@user_script: 8: -OOM command …`.
    pub(crate) fn from_script(text: &str) -> Self {
        let text = match text.strip_prefix("@user_script:") {
            Some(place) => place.trim_start().split_once(':').map_or(place, |(_, said)| said.trim_start()),
            None => text,
        };
        let text = text.strip_prefix('-').unwrap_or(text);
        let (code, words) = text.split_once(' ').unwrap_or((text, ""));
        let is_code = !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_uppercase());
        let (code, words) = if is_code { (code, words) } else { ("ERR", text) };
        Self { code: code.to_owned(), words: printable(words) }
    }

    /// Whether the server closes the connection after this error, as it does when a part is longer than `proto-max-bulk-len`.
    pub(crate) fn is_last_word(&self) -> bool {
        self.says("Protocol error")
    }

    /// Whether this user lacks a right.
    pub(crate) fn is_about_rights(&self) -> bool {
        self.code == "NOPERM"
    }

    /// Whether this user may not write to one key, but may use the command.
    pub(crate) fn is_about_key(&self) -> bool {
        let is_refused = self.is_about_rights() || self.code == "ERR";
        is_refused && (self.says("access") && self.says("key"))
    }

    /// Whether one entry was too large to be stored.
    pub(crate) fn is_too_large(&self) -> bool {
        self.says("invalid bulk length") || self.says("Elements are too large")
    }

    /// The error for a refused password. It shows only the code: if `AUTH` is unknown, the server's text contains the
    /// password.
    pub(crate) fn of_auth(&self, address: &str) -> Error {
        if let Some(error) = self.known(address, None) {
            return error;
        }
        let code = &self.code;
        Error::unavailable(Code::CREDENTIALS, format!("{address} does not accept the password ({code})"))
            .with_remedy("check the password, that the user exists, and that the server asks for a password")
    }

    /// The error for a request as a whole: no event can be delivered.
    pub(crate) fn of_server(&self, address: &str) -> Error {
        self.known(address, None).unwrap_or_else(|| {
            Error::unavailable(Code::SERVER_ERROR, format!("{address} refuses: {} {}", self.code, self.words))
        })
    }

    /// The error for one entry.
    pub(crate) fn of_entry(&self, address: &str, key: &str) -> Error {
        let Some(error) = self.known(address, Some(key)) else {
            let key = printable(key);
            return Error::retryable(
                Code::SERVER_ERROR,
                format!("{address} refuses an entry of `{key}`: {} {}", self.code, self.words),
            );
        };
        let is_narrow = self.is_about_key() || error.is(&Code::WRONG_TYPE);
        if is_narrow { error.at(destination(key)) } else { error }
    }

    /// Errors that concern every event, or every event of a stream: memory, rights, replicas, the wrong server, the wrong
    /// type of key.
    fn known(&self, address: &str, key: Option<&str>) -> Option<Error> {
        const GRANT: &str = "grant the user `+xadd +eval` and the stream's key";
        let (code, what, remedy) = match self.code.as_str() {
            "NOAUTH" => {
                (Code::CREDENTIALS, "asks for a password", "put it into the URL, redis://user:password@host")
            }
            "WRONGPASS" => (Code::CREDENTIALS, "does not accept this user and password", ""),
            "NOPERM" => (Code::NOT_PERMITTED, "does not grant this user a right that airtight needs", GRANT),
            "ERR" if self.says("can't run this command") || self.says("can't access at least one") => {
                (Code::NOT_PERMITTED, "does not grant this user a right that airtight needs", GRANT)
            }
            "DENIED" => (
                Code::NOT_PERMITTED,
                "accepts no connections from other hosts",
                "set a password in Redis, or turn protected mode off",
            ),
            "OOM" => (Code::OUT_OF_MEMORY, "is full", "raise `maxmemory`, or trim streams"),
            "READONLY" => (Code::READ_ONLY, "is a replica", "name the primary"),
            "LOADING" => (Code::LOADING, "is still loading its data", ""),
            "MISCONF" => (Code::MISCONF, "cannot save to its disk and accepts no writes", ""),
            "NOREPLICAS" => {
                (Code::TOO_FEW_REPLICAS, "has too few replicas for its `min-replicas-to-write`", "")
            }
            "MASTERDOWN" => (Code::READ_ONLY, "is a replica that has lost its primary", ""),
            "BUSY" => (Code::BUSY, "is busy with a script", ""),
            "CLUSTERDOWN" | "MOVED" | "ASK" | "CROSSSLOT" | "TRYAGAIN" => {
                (Code::CLUSTER, "is part of a Redis Cluster, which airtight does not support", "")
            }
            "WRONGTYPE" => (Code::WRONG_TYPE, "has a value under this key that is not a stream", ""),
            "ERR" if self.says("exhausted the last possible ID") => {
                (Code::WRONG_TYPE, "has a stream under this key that has reached the last possible id", "")
            }
            "ERR" if self.says("unknown command") || self.says("syntax error") => (
                Code::SERVER_TOO_OLD,
                "does not know a command that airtight needs",
                "use Redis 5 or later, with `max_age` 6.2 or later",
            ),
            "ERR" if self.says("index is out of range") => {
                (Code::NO_DATABASE, "has no database with this number", "")
            }
            "ERR" if self.says("max number of clients") => {
                (Code::TOO_MANY_CONNECTIONS, "has reached its limit of connections", "")
            }
            _ => return None,
        };
        // `unknown command` repeats the arguments, and a password may be among them.
        let words = if code == Code::SERVER_TOO_OLD { String::new() } else { format!(" {}", self.words) };
        let key = key.map(|key| format!(", key `{}`", printable(key))).unwrap_or_default();
        let error = Error::unavailable(code, format!("{address} {what} ({}{words}{key})", self.code));
        Some(if remedy.is_empty() { error } else { error.with_remedy(remedy) })
    }

    fn says(&self, words: &str) -> bool {
        self.words.contains(words)
    }
}

/// A text of the server as one line.
fn printable(text: &str) -> String {
    text.chars()
        .take(SHOWN)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect::<String>()
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;

    use super::*;

    #[test]
    fn the_code_is_found_in_what_scripts_say() {
        for (text, code, words) in [
            ("WRONGTYPE Operation against", "WRONGTYPE", "Operation against"),
            ("@user_script: 8: -OOM command not allowed", "OOM", "command not allowed"),
            ("@user_script:8: ERR odd: things", "ERR", "odd: things"),
            ("@user_script: 8: The user executing", "ERR", "The user executing"),
            ("", "ERR", ""),
        ] {
            let refusal = Refusal::from_script(text);
            assert_eq!((refusal.code.as_str(), refusal.words.as_str()), (code, words), "{text}");
        }
    }

    #[test]
    fn what_is_everybodys_trouble_is_unavailable() {
        for (text, code) in [
            ("NOAUTH Authentication required.", "credentials"),
            ("WRONGPASS invalid username-password pair", "credentials"),
            ("NOPERM this user has no permissions", "not_permitted"),
            ("OOM command not allowed", "out_of_memory"),
            ("READONLY You can't write", "read_only"),
            ("LOADING Redis is loading", "loading"),
            ("MISCONF Redis is configured to save", "misconf"),
            ("MASTERDOWN Link with MASTER is down", "read_only"),
            ("CLUSTERDOWN Hash slot not served", "cluster"),
            ("MOVED 1 127.0.0.1:1", "cluster"),
            ("CROSSSLOT Keys in request", "cluster"),
            ("WRONGTYPE Operation", "wrong_type"),
            ("BUSY Redis is busy", "busy"),
            ("NOREPLICAS Not enough good replicas to write.", "too_few_replicas"),
            ("ERR max number of clients reached", "too_many_connections"),
            ("ERR unknown command 'XADD'", "server_too_old"),
        ] {
            let error = Refusal::from_script(text).of_entry("host:1", "orders");
            assert_eq!((error.class(), error.code()), (Class::Unavailable, code), "{error}");
            assert!(error.message().contains("host:1") && error.message().contains("`orders`"), "{error}");
        }
    }

    #[test]
    fn what_nobody_knows_is_retried_for_one_and_waits_for_all() {
        let odd = Refusal::from_script("ERR something new");
        assert_eq!(odd.of_entry("host:1", "k").class(), Class::Retryable);
        assert_eq!(odd.of_server("host:1").class(), Class::Unavailable);
    }

    #[test]
    fn no_password_is_repeated() {
        let odd = Refusal::from_script("ERR unknown command 'AUTH', with args beginning with: 'hunter2'");
        assert!(!odd.of_auth("host:1").message().contains("hunter2"));
        assert!(!Refusal::from_script("ERR hunter2").of_auth("host:1").message().contains("hunter2"));
    }
}
