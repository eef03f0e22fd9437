//! What SQLite's result codes mean for a relay.

use airtight_core::{Code, Error};

/// Turns a driver's error into one that says what to do about it.
pub(crate) fn db(error: sqlx::Error) -> Error {
    let sqlx::Error::Database(database) = &error else { return driver(&error) };
    let message = database.message();
    // The low byte is the primary code; the rest only refines it.
    let code = database.code().and_then(|code| code.parse::<i32>().ok()).unwrap_or(1) & 0xff;
    match code {
        5 | 6 => {
            Error::retryable(Code::LOCKED, format!("the database is locked by another writer: {message}"))
        }
        1 if message.contains("no such table") => Error::permanent(Code::NO_TABLE, message)
            .with_remedy("run `airtight migrate` to create airtight's tables, or correct the table's name"),
        1 if message.contains("no such column") || message.contains("has no column named") => {
            Error::permanent(Code::BAD_COLUMN, format!("{message}: the table does not fit its spec"))
                .with_remedy("correct the mapping: `airtight check` shows what does not fit")
        }
        1 => Error::permanent(Code::REFUSED, message),
        8 => Error::permanent(Code::READ_ONLY, format!("cannot write: {message}")).with_remedy(
            "let this user write to the file, to the two files next to it that end in -wal and -shm, and to their directory, then \
             start again; nothing is lost in the meantime",
        ),
        10 => Error::retryable(Code::IO, message),
        11 | 26 => Error::permanent(Code::CORRUPT, message),
        13 => Error::retryable(Code::DISK_FULL, message),
        // At the start this is final; later it is a file that was removed a moment ago, which the next look tells, or a
        // limit of the process that may pass.
        14 => Error::retryable(Code::CANNOT_OPEN, message),
        19 => Error::permanent(Code::CONSTRAINT, message),
        20 => Error::permanent(Code::REFUSED, format!("a value does not fit its column: {message}")),
        _ => Error::retryable(Code::SERVER_ERROR, message),
    }
}

fn driver(error: &sqlx::Error) -> Error {
    match error {
        sqlx::Error::PoolTimedOut => {
            Error::retryable(Code::POOL_EXHAUSTED, "no connection to the database became free")
        }
        sqlx::Error::PoolClosed => Error::permanent(Code::NOT_OPEN, "the connection pool was closed"),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => {
            Error::permanent(Code::BAD_ROW, error.to_string())
        }
        _ => Error::retryable(Code::SERVER_ERROR, error.to_string()),
    }
}
