//! What a PostgreSQL error means: the one table from SQLSTATE to class.

use airtight_core::Error;

/// The code of an error for a lock that could not be had in time.
pub(crate) const LOCKED: &str = "locked";

/// The code of an error for a transaction that the server ended because two stood in each other's way.
pub(crate) const DEADLOCK: &str = "deadlock";

/// Maps an error of sqlx's. `doing` says what was tried, for the message.
pub(crate) fn from_sqlx(error: &sqlx::Error, doing: &str) -> Error {
    match error {
        sqlx::Error::Database(database) => {
            from_sqlstate(database.code().as_deref(), database.message(), doing)
        }
        sqlx::Error::Configuration(what) => {
            Error::permanent("bad_url", format!("{doing}: the database URL is not usable: {what}"))
        }
        sqlx::Error::Tls(what) => Error::unavailable("tls", format!("{doing}: TLS failed: {what}")),
        sqlx::Error::Io(what) => {
            Error::retryable("unreachable", format!("{doing}: cannot reach PostgreSQL: {what}"))
        }
        sqlx::Error::PoolTimedOut => Error::retryable(
            "unreachable",
            format!("{doing}: no connection to PostgreSQL within the time limit"),
        ),
        sqlx::Error::RowNotFound | sqlx::Error::ColumnNotFound(_) | sqlx::Error::ColumnDecode { .. } => {
            Error::permanent("bad_row", format!("{doing}: {error}"))
        }
        other => Error::retryable("postgres", format!("{doing}: {other}")),
    }
}

/// Maps a SQLSTATE.
pub(crate) fn from_sqlstate(code: Option<&str>, message: &str, doing: &str) -> Error {
    let text = |advice: &str| {
        let code = code.unwrap_or("no code");
        format!("{doing}: {message} (SQLSTATE {code}){advice}")
    };
    match code.unwrap_or_default() {
        "28P01" | "28000" => Error::unavailable("auth", text(": check user and password")),
        "3D000" => Error::unavailable("no_database", text(": create it, or correct the URL")),
        "42501" => Error::unavailable("permission", text(": grant it to this user")),
        "42P01" | "3F000" | "42883" => {
            Error::permanent("not_migrated", text(": run `airtight migrate`, or correct the table's name"))
        }
        "42703" => Error::permanent(
            "bad_column",
            text(
                ": the table does not fit its mapping, or airtight's own tables are older than this program: run `airtight migrate`",
            ),
        ),
        // Statements that another session prepared, or that this one did elsewhere: a transaction pooler.
        "42P05" | "26000" => Error::permanent(
            "pooler",
            text(": behind a transaction pooler, add `?statement-cache-capacity=0` to the URL"),
        ),
        "25006" => Error::unavailable("read_only", text(": this is a standby or a read-only session")),
        // Bad data, violated constraints: the same statement never succeeds.
        code if code.starts_with("22") || code.starts_with("23") || code.starts_with("42") => {
            Error::permanent("refused", text(""))
        }
        "53300" => Error::retryable(
            "too_many_connections",
            text(
                ": PostgreSQL lets nobody else in, or not this user or database. Raise max_connections, or their \
                 CONNECTION LIMIT; or end what is connected and not needed",
            ),
        ),
        "55P03" => Error::retryable(LOCKED, text("")),
        "40P01" => Error::retryable(DEADLOCK, text("")),
        // Everything else (serialisation, shutdown) may pass.
        _ => Error::retryable("postgres", text("")),
    }
}

/// Adapter for `map_err`.
pub(crate) fn doing(what: &'static str) -> impl Fn(sqlx::Error) -> Error {
    move |error| from_sqlx(&error, what)
}
