//! The meaning of PostgreSQL's errors: the only table from SQLSTATE to class.

use airtight_core::{Code, Error};

/// Maps an error of sqlx's. `doing` says what was tried, for the message.
pub(crate) fn from_sqlx(error: &sqlx::Error, doing: &str) -> Error {
    match error {
        sqlx::Error::Database(database) => {
            from_sqlstate(database.code().as_deref(), database.message(), doing)
        }
        sqlx::Error::Configuration(what) => {
            Error::permanent(Code::BAD_URL, format!("{doing}: the database URL is not usable: {what}"))
        }
        sqlx::Error::Tls(what) => Error::unavailable(Code::TLS, format!("{doing}: TLS failed: {what}")),
        sqlx::Error::Io(what) => {
            Error::retryable(Code::UNREACHABLE, format!("{doing}: cannot reach PostgreSQL: {what}"))
        }
        sqlx::Error::PoolTimedOut => Error::retryable(
            Code::UNREACHABLE,
            format!("{doing}: no connection to PostgreSQL within the time limit"),
        ),
        sqlx::Error::RowNotFound | sqlx::Error::ColumnNotFound(_) | sqlx::Error::ColumnDecode { .. } => {
            Error::permanent(Code::BAD_ROW, format!("{doing}: {error}"))
        }
        other => Error::retryable(Code::SERVER_ERROR, format!("{doing}: {other}")),
    }
}

/// Maps a SQLSTATE.
pub(crate) fn from_sqlstate(code: Option<&str>, message: &str, doing: &str) -> Error {
    let text = format!("{doing}: {message} (SQLSTATE {})", code.unwrap_or("no code"));
    let error = match code.unwrap_or_default() {
        "28P01" | "28000" => {
            Error::unavailable(Code::CREDENTIALS, text).with_remedy("check user and password")
        }
        "3D000" => {
            Error::unavailable(Code::NO_DATABASE, text).with_remedy("create it, or correct the URL")
        }
        "42501" => Error::unavailable(Code::NOT_PERMITTED, text).with_remedy("grant it to this user"),
        "42P01" | "3F000" | "42883" => Error::permanent(Code::NO_TABLE, text)
            .with_remedy("run `airtight migrate`, or correct the table's name"),
        "42703" => Error::permanent(
            Code::BAD_COLUMN,
            format!(
                "{text}: the table does not fit its mapping, or airtight's own tables are older than this program"
            ),
        )
        .with_remedy("correct the mapping, or run `airtight migrate`"),
        // Statements that another session prepared, or that this one did elsewhere: a transaction pooler.
        "42P05" | "26000" => Error::permanent(Code::POOLER, text)
            .with_remedy("behind a transaction pooler, add `?statement-cache-capacity=0` to the URL"),
        "25006" => Error::unavailable(
            Code::READ_ONLY,
            format!("{text}: this is a standby or a read-only session"),
        ),
        // Violated constraints, bad data: the same statement never succeeds.
        code if code.starts_with("23") => Error::permanent(Code::CONSTRAINT, text),
        code if code.starts_with("22") || code.starts_with("42") => Error::permanent(Code::REFUSED, text),
        "53300" => Error::retryable(
            Code::TOO_MANY_CONNECTIONS,
            format!("{text}: PostgreSQL accepts no more connections, or none of this user or to this database"),
        )
        .with_remedy(
            "raise max_connections, or the CONNECTION LIMIT of the user or the database; or end connections that are not needed",
        ),
        "55P03" => Error::retryable(Code::LOCKED, text),
        "40P01" => Error::retryable(Code::DEADLOCK, text),
        // Everything else (serialisation, shutdown) may pass.
        _ => Error::retryable(Code::SERVER_ERROR, text),
    };
    match code {
        Some(code) => error.with_sqlstate(code),
        None => error,
    }
}

/// The SQLSTATEs that are asked for by name.
pub(crate) mod sqlstate {
    /// `undefined_object`: a slot, a publication or a role that is not there.
    pub(crate) const UNDEFINED_OBJECT: &str = "42704";
    /// `duplicate_object`: there is one of that name already.
    pub(crate) const DUPLICATE_OBJECT: &str = "42710";
    /// `configuration_limit_exceeded`: among others, all slots are taken.
    pub(crate) const CONFIGURATION_LIMIT: &str = "53400";
    /// `cannot_connect_now`: the server is shutting down, or is not up yet.
    pub(crate) const CANNOT_CONNECT_NOW: &str = "57P03";
}

/// Adapter for `map_err`.
pub(crate) fn doing(what: &'static str) -> impl Fn(sqlx::Error) -> Error {
    move |error| from_sqlx(&error, what)
}
