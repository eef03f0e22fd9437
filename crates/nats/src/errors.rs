//! JetStream's answers, and the errors that they become.
//!
//! An answer is JSON: where the message is stored, or what is wrong. Its `err_code` decides; the text is for people.

use airtight_core::{Code, Error, Outcome, Result};
use serde::Deserialize;

/// How much of another program's answer an error shows.
const SHOWN_BYTES: usize = 200;

/// The codes of JetStream's errors that airtight handles one by one.
pub(crate) mod code {
    pub(crate) const MESSAGE_TOO_LARGE: u32 = 10_054;
    pub(crate) const NAME_IN_USE: u32 = 10_058;
    pub(crate) const STREAM_NOT_FOUND: u32 = 10_059;
    pub(crate) const OTHER_STREAM_EXPECTED: u32 = 10_060;
    pub(crate) const STORE_FAILED: u32 = 10_077;
    pub(crate) const HEADERS_TOO_LARGE: u32 = 10_097;
    pub(crate) const STREAM_SEALED: u32 = 10_109;
    pub(crate) const TOO_MANY_REQUESTS: u32 = 10_167;
}

/// The answer to a message that was published.
#[derive(Debug, Deserialize)]
struct Answer {
    error: Option<Refusal>,
    #[serde(default)]
    stream: String,
    #[serde(default)]
    seq: u64,
    #[serde(default)]
    duplicate: bool,
}

/// An error as JetStream words it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Refusal {
    pub(crate) code: u32,
    #[serde(default)]
    pub(crate) err_code: u32,
    #[serde(default)]
    pub(crate) description: String,
}

/// Reads the answer to a message. `Ok` means that the stream has it, or had it before and dropped this one.
pub(crate) fn check_answer(subject: &str, expected: Option<&str>, payload: &[u8]) -> Result<Outcome> {
    let Ok(answer) = serde_json::from_slice::<Answer>(payload) else {
        return Err(not_a_stream(subject, payload));
    };
    if let Some(refusal) = answer.error {
        return Err(refused(&refusal, subject));
    }
    if answer.stream.is_empty() || answer.seq == 0 {
        return Err(not_a_stream(subject, payload));
    }
    match expected {
        Some(expected) if expected != answer.stream => Err(Error::unavailable(
            Code::WRONG_STREAM,
            format!(
                "the subject `{subject}` belongs to the stream `{}`, but `stream` is `{expected}`",
                answer.stream
            ),
        )),
        _ if answer.duplicate => Ok(Outcome::Duplicate),
        _ => Ok(Outcome::Delivered),
    }
}

/// The stream that an answer names, if it does.
pub(crate) fn stream_of(payload: &[u8]) -> Option<String> {
    let answer: Answer = serde_json::from_slice(payload).ok()?;
    Some(answer.stream).filter(|stream| !stream.is_empty())
}

/// The class of a refusal.
pub(crate) fn refused(refusal: &Refusal, subject: &str) -> Error {
    let Refusal { code: status, err_code, description } = refusal;
    let said = printable(description.as_bytes());
    match *err_code {
        code::MESSAGE_TOO_LARGE | code::HEADERS_TOO_LARGE => Error::permanent(Code::TOO_LARGE, said),
        code::OTHER_STREAM_EXPECTED => Error::unavailable(
            Code::WRONG_STREAM,
            format!(
                "the subject `{subject}` belongs to another stream than the one that `stream` names ({said})"
            ),
        ),
        code::STREAM_SEALED => Error::unavailable(
            Code::SEALED,
            format!("the stream of the subject `{subject}` is sealed ({said})"),
        ),
        // This subject is full, and others need not be.
        code::STORE_FAILED if said.contains("per subject") => {
            Error::retryable(Code::SUBJECT_FULL, format!("the subject `{subject}` is full ({said})"))
        }
        code::STORE_FAILED => Error::unavailable(
            Code::STREAM_FULL,
            format!("the stream of the subject `{subject}` cannot store events ({said})"),
        )
        .with_remedy("raise the stream's limits, or let it discard old messages"),
        code::TOO_MANY_REQUESTS => Error::retryable(Code::BUSY, format!("the stream is busy ({said})")),
        // 503 and the like: no resources, no leader, no JetStream for this account.
        _ if *status >= 500 => Error::unavailable(
            Code::SERVER_ERROR,
            format!("JetStream cannot accept events now: {said} ({err_code})"),
        ),
        // An unknown reason. It may pass; if it does not, the event becomes dead in the end.
        _ => {
            Error::retryable(Code::SERVER_ERROR, format!("JetStream refused the event: {said} ({err_code})"))
        }
    }
}

/// A subject as a destination: its name in errors, and for [`airtight_core::Sink::destinations`].
pub(crate) fn destination(subject: &str) -> String {
    format!("subject {subject}")
}

/// Whether an error is about the subject or its stream, and says nothing about other subjects.
pub(crate) fn is_about_subject(error: &Error) -> bool {
    const CODES: [Code; 5] =
        [Code::NO_STREAM, Code::WRONG_STREAM, Code::NOT_JETSTREAM, Code::SEALED, Code::STREAM_FULL];
    CODES.iter().any(|code| error.is(code))
}

pub(crate) fn no_stream(subject: &str, stream: Option<&str>) -> Error {
    let remedy = match stream {
        None => {
            "create a stream with this subject, or set `stream` and `create=true` to let airtight create it"
                .to_owned()
        }
        Some(name) => format!(
            "create the stream `{name}` with this subject, or set `create=true` to let airtight create `{name}` if it is missing"
        ),
    };
    Error::unavailable(Code::NO_STREAM, format!("no stream takes the subject `{subject}`"))
        .with_remedy(remedy)
}

pub(crate) fn too_large(size: usize, limit: usize, whose: &str) -> Error {
    let what = format!("the message has {size} bytes with its headers, and {whose} is {limit}");
    Error::permanent(Code::TOO_LARGE, what)
}

pub(crate) fn too_large_for_stream(size: usize, limit: Option<usize>) -> Error {
    match limit {
        Some(limit) => too_large(size, limit, "the stream's `max_msg_size`"),
        None => {
            let what = format!(
                "the message has {size} bytes with its headers, which is over the stream's `max_msg_size`"
            );
            Error::permanent(Code::TOO_LARGE, what)
        }
    }
}

fn not_a_stream(subject: &str, payload: &[u8]) -> Error {
    let said = printable(payload);
    Error::unavailable(
        Code::NOT_JETSTREAM,
        format!("the answer on the subject `{subject}` did not come from a stream (`{said}`)"),
    )
    .with_remedy("publish to a subject that no other service subscribes to")
}

/// The first bytes as text without control characters.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN_BYTES)]);
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.trim().into()
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;

    use super::*;

    #[test]
    fn only_the_acknowledgement_of_the_right_stream_counts() {
        let read = |expected, text: &str| check_answer("orders", expected, text.as_bytes());
        assert!(matches!(read(None, r#"{"stream":"S","seq":1}"#), Ok(Outcome::Delivered)));
        assert!(read(Some("S"), r#"{"stream":"S","seq":1,"domain":"d"}"#).is_ok());
        let repeat = read(Some("S"), r#"{"stream":"S","seq":1,"duplicate":true}"#);
        assert!(matches!(repeat, Ok(Outcome::Duplicate)), "{repeat:?}");
        assert_eq!(read(Some("T"), r#"{"stream":"S","seq":1}"#).unwrap_err().code(), "wrong_stream");
        for stranger in ["", "ok", "+ACK", "{}", "[]", "null", r#"{"stream":"S"}"#, r#"{"seq":1}"#, "\u{1}"] {
            let error = read(None, stranger).unwrap_err();
            assert_eq!((error.code(), error.class()), ("not_jetstream", Class::Unavailable), "{stranger}");
        }
    }

    #[test]
    fn every_refusal_has_its_class() {
        let of = |code, err_code, description: &str| {
            let text = format!(
                r#"{{"error":{{"code":{code},"err_code":{err_code},"description":"{description}"}},"stream":"S","seq":0}}"#
            );
            let error = check_answer("orders", Some("S"), text.as_bytes()).unwrap_err();
            (error.class(), error.code().to_owned())
        };
        let expect = |class, code: &str| (class, code.to_owned());
        assert_eq!(
            of(400, 10_054, "message size exceeds maximum allowed"),
            expect(Class::Permanent, "too_large")
        );
        assert_eq!(of(400, 10_097, "header size exceeds maximum"), expect(Class::Permanent, "too_large"));
        assert_eq!(
            of(400, 10_060, "expected stream does not match"),
            expect(Class::Unavailable, "wrong_stream")
        );
        assert_eq!(of(503, 10_077, "maximum messages exceeded"), expect(Class::Unavailable, "stream_full"));
        assert_eq!(of(503, 10_077, "maximum bytes exceeded"), expect(Class::Unavailable, "stream_full"));
        assert_eq!(
            of(503, 10_077, "maximum messages per subject exceeded"),
            expect(Class::Retryable, "subject_full")
        );
        assert_eq!(
            of(400, 10_109, "invalid operation on sealed stream"),
            expect(Class::Unavailable, "sealed")
        );
        assert_eq!(of(503, 10_023, "insufficient resources"), expect(Class::Unavailable, "server_error"));
        assert_eq!(of(503, 10_076, "JetStream not enabled"), expect(Class::Unavailable, "server_error"));
        assert_eq!(of(429, 10_167, "too many requests"), expect(Class::Retryable, "busy"));
        assert_eq!(of(400, 10_999, "something new"), expect(Class::Retryable, "server_error"));
    }

    #[test]
    fn what_strangers_say_fits_on_a_line() {
        assert_eq!(printable(b"a\r\n\tb\x1b[31m\xff\0 "), "a   b [31m\u{fffd}");
        assert_eq!(printable(&[b'x'; 500]).len(), SHOWN_BYTES);
    }
}
