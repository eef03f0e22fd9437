//! How a command ends when it does not succeed: one line for a person, one exit code for a script.

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
    /// It was asked rightly and could not be done: exit code 1.
    Failed(String),
    /// The command has said what there is to say already: exit code 1.
    Reported,
    /// Whoever read our output has gone (`airtight tail | head`): no failure, and nobody to tell.
    ReaderGone,
}

/// What commands return.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::Usage(message.into())
    }

    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::Failed(message.into())
    }

    /// The same failure with words in front: where it happened.
    pub(crate) fn context(self, what: impl fmt::Display) -> Self {
        match self {
            Self::Usage(message) => Self::Usage(format!("{what}: {message}")),
            Self::Failed(message) => Self::Failed(format!("{what}: {message}")),
            other => other,
        }
    }

    /// Prints the one line and gives the exit code.
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

/// A line on standard error, as far as it can be had: `eprintln!` would panic where it is closed or full, and the panic's
/// exit code would hide the command's own.
pub(crate) fn complain(line: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// A database's message may span lines; the first line feed would cut the sentence in a log.
fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// What the error says and, where this program has a remedy, what to do.
pub(crate) fn advice(error: &airtight::Error) -> String {
    match error.remedy() {
        None if error.is(&Code::NO_TABLE) => {
            format!("{error}. Fix: create the tables with `airtight migrate`")
        }
        _ => error.to_string(),
    }
}

impl From<airtight::Error> for Failure {
    fn from(error: airtight::Error) -> Self {
        Self::Failed(advice(&error))
    }
}

/// For output; reading a file has its path to add and makes its own message.
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
