//! From SQLite's result codes to what they mean for a relay.

use airtight_core::Error;

/// Turns a driver's error into one that says what to do about it.
pub(crate) fn db(error: sqlx::Error) -> Error {
    let sqlx::Error::Database(database) = &error else { return driver(&error) };
    let message = database.message();
    // The low byte is the primary code; the rest only refines it.
    let code = database.code().and_then(|code| code.parse::<i32>().ok()).unwrap_or(1) & 0xff;
    match code {
        5 | 6 => Error::retryable("busy", format!("the database is locked by another writer: {message}")),
        1 if message.contains("no such table") => Error::permanent(
            "no_table",
            format!(
                "{message}: run `airtight migrate` to create airtight's tables, or correct the table's name"
            ),
        ),
        1 if message.contains("no such column") || message.contains("has no column named") => {
            Error::permanent(
                "no_column",
                format!("{message}: the table does not fit its spec; run `airtight check`"),
            )
        }
        1 => Error::permanent("sql", message),
        8 => Error::permanent(
            "read_only",
            format!(
                "cannot write: {message}. Mend it: let this user write to the file, to the two beside it that end in -wal \
                 and -shm, and to their directory, then start again; nothing is lost meanwhile"
            ),
        ),
        10 => Error::retryable("io", message),
        11 | 26 => Error::permanent("corrupt", message),
        13 => Error::retryable("disk_full", message),
        // At the start this is final; later it is a file that was removed a moment ago, which the next look tells, or a
        // limit of the process that may pass.
        14 => Error::retryable("cannot_open", message),
        19 => Error::permanent("constraint", message),
        20 => Error::permanent("mismatch", format!("a value does not fit its column: {message}")),
        _ => Error::retryable("sqlite", message),
    }
}

fn driver(error: &sqlx::Error) -> Error {
    match error {
        sqlx::Error::PoolTimedOut => Error::retryable("busy", "no connection to the database became free"),
        sqlx::Error::PoolClosed => Error::permanent("closed", "the connection pool was closed"),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => {
            Error::permanent("bad_row", error.to_string())
        }
        _ => Error::retryable("sqlite", error.to_string()),
    }
}
