//! Errors that carry what to do about them.
//!
//! The backend where the error happened knows best what it means, so it sets the [`Class`]. The engine turns the
//! class into a verdict. No code parses messages.

mod code;

use std::{fmt, time::Duration};

pub use code::{Code, KnownCode};

/// The result of anything in airtight that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What an error means for the event at hand, and for the events behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// This attempt failed; a later one may succeed. Network, timeout, 5xx, 429.
    Retryable,
    /// This event can never be accepted: malformed, too large, 400, 422. The event is dead immediately.
    Permanent,
    /// Nothing can be accepted now: connection refused, wrong password, missing topic, 401, 403, 404. No attempt is
    /// spent, because one rotated password must not dead-letter a backlog. The error is about the whole sink, and the
    /// circuit opens; or, with [`Error::at`], it is about one destination, and only the events for that one wait.
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

/// What an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// The event at hand: every error that is not [`Class::Unavailable`].
    Event,
    /// The whole sink: no event can be delivered. If a source reports the error, the whole source.
    Sink,
    /// One destination of the sink, named as in [`crate::Sink::destinations`]. Events for other destinations continue.
    Destination(&'a str),
}

impl Scope<'_> {
    /// The word for logs and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Sink => "sink",
            Self::Destination(_) => "destination",
        }
    }
}

/// An error with its class, a short code for machines, a message for people and, if one is known, a remedy.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    class: Class,
    code: Code,
    message: String,
    remedy: Option<String>,
    sqlstate: Option<String>,
    retry_after: Option<Duration>,
    destination: Option<String>,
    lasting: bool,
}

/// The prefix of a stored error's code while its event waits for a destination that is unavailable.
const AWAY: &str = "away:";

impl Error {
    /// An error of the given class. `message` says what is wrong; what to do goes into [`Error::with_remedy`].
    pub fn new(class: Class, code: Code, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            class,
            code,
            message: message.into(),
            remedy: None,
            sqlstate: None,
            retry_after: None,
            destination: None,
            lasting: false,
        }))
    }

    /// See [`Class::Retryable`].
    pub fn retryable(code: Code, message: impl Into<String>) -> Self {
        Self::new(Class::Retryable, code, message)
    }

    /// See [`Class::Permanent`].
    pub fn permanent(code: Code, message: impl Into<String>) -> Self {
        Self::new(Class::Permanent, code, message)
    }

    /// See [`Class::Unavailable`].
    pub fn unavailable(code: Code, message: impl Into<String>) -> Self {
        Self::new(Class::Unavailable, code, message)
    }

    /// Adds what to do about the error: a command, a statement or an instruction that can be followed literally.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// Adds the SQLSTATE that a database gave with the error.
    #[must_use]
    pub fn with_sqlstate(mut self, sqlstate: impl Into<String>) -> Self {
        self.0.sqlstate = Some(sqlstate.into());
        self
    }

    /// The same error in another class, for a caller that knows more about what the error means.
    #[must_use]
    pub fn with_class(mut self, class: Class) -> Self {
        self.0.class = class;
        self
    }

    /// The same error with another message.
    #[must_use]
    pub fn map_message(mut self, map: impl FnOnce(&str) -> String) -> Self {
        self.0.message = map(&self.0.message);
        self
    }

    /// The server asked for no new try before `after` has passed (HTTP's `Retry-After`).
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    /// The error is about one destination of the sink, and not about the others: a missing topic, an exchange without a
    /// binding, an endpoint that is gone. The name is the same as in [`crate::Sink::destinations`].
    #[must_use]
    pub fn at(mut self, destination: impl Into<String>) -> Self {
        self.0.destination = Some(destination.into());
        self
    }

    /// The server says that the cause is lasting (HTTP's 410). A relay that drains a backlog does not wait for the error
    /// to pass.
    #[must_use]
    pub fn lasting(mut self) -> Self {
        self.0.lasting = true;
        self
    }

    /// The same error, with a prefix to its message that says where it happened.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// What the error means.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// The code as text. Logs show it, and tables store it apart from the message.
    pub fn code(&self) -> &str {
        self.0.code.as_str()
    }

    /// Whether the error has this code.
    pub fn is(&self, code: &Code) -> bool {
        self.0.code == *code
    }

    /// What is wrong, for people, without the remedy. [`Error`]'s `Display` has both.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What to do about the error, if that is known.
    pub fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }

    /// The SQLSTATE, if a database gave one.
    pub fn sqlstate(&self) -> Option<&str> {
        self.0.sqlstate.as_deref()
    }

    /// The HTTP status, if the error is the answer of a web server.
    pub fn http_status(&self) -> Option<u16> {
        self.0.code.http_status()
    }

    /// What the error is about: one event, the whole sink, or one destination.
    pub fn scope(&self) -> Scope<'_> {
        match (self.0.class, &self.0.destination) {
            (Class::Unavailable, Some(destination)) => Scope::Destination(destination),
            (Class::Unavailable, None) => Scope::Sink,
            _ => Scope::Event,
        }
    }

    /// How long the server asked the relay to wait before the next try.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The destination that an *unavailable* error is about; none if it is about the whole sink.
    pub fn destination(&self) -> Option<&str> {
        match self.scope() {
            Scope::Destination(destination) => Some(destination),
            Scope::Event | Scope::Sink => None,
        }
    }

    /// See [`Error::lasting`].
    pub fn is_lasting(&self) -> bool {
        self.0.lasting
    }

    /// The error as it is stored with an event that waits for its destination. The code distinguishes such events from
    /// those that failed ([`Error::is_away_code`]), and the message names the destination.
    #[must_use]
    pub(crate) fn waiting(&self) -> Self {
        let Some(destination) = self.destination() else { return self.clone() };
        let mut waiting = self.clone();
        waiting.0.code = Code::custom(format!("{AWAY}{}", self.code()));
        waiting.0.message = format!("{destination} is away: {}", self.message());
        waiting
    }

    /// The pattern, for SQL's `LIKE`, of the codes that are stored with events that wait for a destination.
    pub const AWAY_CODES: &'static str = "away:%";

    /// The same for messages, for tables that store no codes.
    pub const AWAY_MESSAGES: &'static str = "% is away: %";

    /// Whether a stored code says that an event waits for a destination.
    pub fn is_away_code(code: &str) -> bool {
        code.starts_with(AWAY)
    }
}

/// The innermost cause of an error of a client library: the outer layers say that a request failed, the innermost says
/// what happened.
pub fn root_cause<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    // An I/O error names the source of what it wraps as its own source, and so hides what it wraps.
    match cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(wrapped) => root_cause(wrapped),
        None => cause,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        match &self.0.remedy {
            Some(remedy) => write!(f, ". Fix: {remedy}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {self}", self.0.code, self.0.class.as_str())
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_pointer() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
    }

    #[test]
    fn the_remedy_is_apart_from_the_message_and_shown_behind_it() {
        let error = Error::permanent(Code::NO_TABLE, "there is no table t").with_remedy("CREATE TABLE t ()");
        let error = error.context("starting");
        assert_eq!(
            (error.message(), error.remedy()),
            ("starting: there is no table t", Some("CREATE TABLE t ()"))
        );
        assert_eq!(error.to_string(), "starting: there is no table t. Fix: CREATE TABLE t ()");
    }

    #[test]
    fn the_scope_follows_from_class_and_destination() {
        let error = Error::unavailable(Code::NO_TOPIC, "missing");
        assert_eq!(error.scope(), Scope::Sink);
        let error = error.at("topic t");
        assert_eq!((error.scope(), error.destination()), (Scope::Destination("topic t"), Some("topic t")));
        // One event's failure is not its destination's.
        let error = error.with_class(Class::Retryable);
        assert_eq!((error.scope(), error.destination()), (Scope::Event, None));
    }

    #[test]
    fn an_event_that_waits_keeps_the_remedy() {
        let error = Error::unavailable(Code::NO_TOPIC, "missing").with_remedy("create it").at("topic t");
        let waiting = error.waiting();
        assert_eq!(waiting.code(), "away:no_topic");
        assert_eq!(waiting.to_string(), "topic t is away: missing. Fix: create it");
    }

    #[test]
    fn the_status_of_an_answer_is_in_its_code() {
        let code = Code::http(404);
        assert_eq!((code.as_str(), code.http_status()), ("http_404", Some(404)));
        assert_eq!(Code::NO_TOPIC.http_status(), None);
    }
}
