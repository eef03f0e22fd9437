//! Failures of a command: one line for a person, and one exit code for a script.

use std::{
    fmt,
    io::{self, Write},
    process::ExitCode,
};

use airtight::Code;

/// Why a command did not succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line or the config is wrong: exit code 2.
    Usage(String),
    /// The request is valid, and the command could not do it: exit code 1.
    Failed(String),
    /// The command has printed its errors already: exit code 1.
    Reported,
    /// The reader of our output has closed it (`airtight tail | head`): not a failure, and nothing is printed.
    ReaderGone,
}

/// The result of a command.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into())
    }

    /// Adds where it happened in front of the message.
    pub(crate) fn context(self, what: impl fmt::Display) -> Self {
        match self {
            Self::Usage(message) => Self::Usage(format!("{what}: {message}")),
            Self::Failed(message) => Self::Failed(format!("{what}: {message}")),
            other => other,
        }
    }

    /// Prints the message as one line and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        let (message, code) = match self {
            Self::Usage(message) => (message, 2),
            Self::Failed(message) => (message, 1),
            Self::Reported => return ExitCode::from(1),
            Self::ReaderGone => return ExitCode::SUCCESS,
        };
        complain(format_args!("error: {}", one_line(&message)));
        ExitCode::from(code)
    }
}

/// Prints a line on standard error and ignores a failure: `eprintln!` would panic if standard error is closed or full,
/// and the panic's exit code would hide the command's own.
pub(crate) fn complain(line: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Joins the lines of a message: a database's message can span lines, and a log would cut it at the first line feed.
fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// The same error, with a remedy if the command line knows one.
pub(crate) fn with_advice(error: airtight::Error) -> airtight::Error {
    if error.remedy().is_none() && error.is(&Code::NO_TABLE) {
        error.with_remedy("create the tables with `airtight migrate`")
    } else {
        error
    }
}

impl From<airtight::Error> for Failure {
    fn from(error: airtight::Error) -> Self {
        Self::Failed(with_advice(error).to_string())
    }
}

/// For writing output. Code that reads a file builds its own message, which names the path.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self::ReaderGone
        } else {
            Self::Failed(format!("cannot write the output: {error}"))
        }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        match error.io_error_kind() {
            Some(io::ErrorKind::BrokenPipe) => Self::ReaderGone,
            _ => Self::Failed(format!("cannot write the output: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line() {
        assert_eq!(one_line("ERROR: no\n  DETAIL: really\n\n"), "ERROR: no; DETAIL: really");
    }
}
