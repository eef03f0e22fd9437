//! Errors that carry what to do about them.
//!
//! The backend that met the error knows best what it means, so it sets the [`Class`]; the engine turns the
//! class into a verdict, and nobody parses messages.

use std::{borrow::Cow, fmt, time::Duration};

/// The result of anything in airtight that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What an error means for the event at hand, and for those behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// This attempt failed; a later one may not. Network, timeout, 5xx, 429.
    Retryable,
    /// This event can never be accepted: malformed, too large, 400, 422. It is dead at once.
    Permanent,
    /// Nothing can be accepted now: connection refused, wrong password, missing topic, 401, 403, 404. The
    /// circuit opens and no attempt is spent, because one rotated password must not dead-letter a backlog.
    Unavailable,
}

impl Class {
    /// The word for logs and tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retryable => "retryable",
            Self::Permanent => "permanent",
            Self::Unavailable => "unavailable",
        }
    }
}

/// An error with its class, a short code for machines and a message for people.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    class: Class,
    code: Cow<'static, str>,
    message: String,
    retry_after: Option<Duration>,
}

impl Error {
    /// An error of the given class. `code` is a short snake_case word; `message` says what is wrong and,
    /// where known, what to do.
    pub fn new(class: Class, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { class, code: code.into(), message: message.into(), retry_after: None }))
    }

    /// See [`Class::Retryable`].
    pub fn retryable(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(Class::Retryable, code, message)
    }

    /// See [`Class::Permanent`].
    pub fn permanent(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(Class::Permanent, code, message)
    }

    /// See [`Class::Unavailable`].
    pub fn unavailable(code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(Class::Unavailable, code, message)
    }

    /// The other side asked not to be tried again before `after` (HTTP's `Retry-After`).
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    /// The same error with words in front: where it happened.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// What the error means.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// The short code, kept apart from the message in tables.
    pub fn code(&self) -> &str {
        &self.0.code
    }

    /// The message for people.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// How long the other side asked to be left alone.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.0.code, self.0.class.as_str(), self.0.message)
    }
}

impl std::error::Error for Error {}
