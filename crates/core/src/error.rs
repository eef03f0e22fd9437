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
    /// Nothing can be accepted now: connection refused, wrong password, missing topic, 401, 403, 404. No attempt is
    /// spent, because one rotated password must not dead-letter a backlog. It concerns the whole sink, and the circuit
    /// opens; or, with [`Error::at`], one destination, and only the events for that one wait.
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
    destination: Option<String>,
    lasting: bool,
}

/// What the code of a stored error begins with while its event waits for a destination that is away.
const AWAY: &str = "away:";

impl Error {
    /// An error of the given class. `code` is a short snake_case word; `message` says what is wrong and,
    /// where known, what to do.
    pub fn new(class: Class, code: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            class,
            code: code.into(),
            message: message.into(),
            retry_after: None,
            destination: None,
            lasting: false,
        }))
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

    /// It concerns one destination of the sink, and not the others: a topic that is missing, an exchange without a
    /// binding, an endpoint that is gone. Named as [`crate::Sink::destinations`] names it.
    #[must_use]
    pub fn at(mut self, destination: impl Into<String>) -> Self {
        self.0.destination = Some(destination.into());
        self
    }

    /// The other side says that this will not pass by itself (HTTP's 410). Whoever waits for an empty backlog need
    /// not wait for it.
    #[must_use]
    pub fn lasting(mut self) -> Self {
        self.0.lasting = true;
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

    /// The one destination that an *unavailable* error is about; none for the whole sink.
    pub fn destination(&self) -> Option<&str> {
        self.0.destination.as_deref().filter(|_| self.0.class == Class::Unavailable)
    }

    /// See [`Error::lasting`].
    pub fn is_lasting(&self) -> bool {
        self.0.lasting
    }

    /// The error as it is stored with an event that waits for its destination: the code tells such events from those
    /// that failed ([`Error::is_away_code`]), and the message names the destination.
    #[must_use]
    pub(crate) fn waiting(&self) -> Self {
        let Some(destination) = self.destination() else { return self.clone() };
        let mut waiting = self.clone();
        waiting.0.code = format!("{AWAY}{}", self.code()).into();
        waiting.0.message = format!("{destination} is away: {}", self.message());
        waiting
    }

    /// The pattern, for SQL's `LIKE`, of codes that are stored with events that wait for a destination.
    pub const AWAY_CODES: &'static str = "away:%";

    /// The same for messages, where a table keeps no codes.
    pub const AWAY_MESSAGES: &'static str = "% is away: %";

    /// Whether a stored code says that an event waits for a destination.
    pub fn is_away_code(code: &str) -> bool {
        code.starts_with(AWAY)
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
