//! Which subjects NATS accepts.
//!
//! A subject is tokens with dots between, and an event's fields may hold anything. The server itself checks little
//! of what a client publishes to: it would store a wildcard as if it were a name, and take an event for
//! `$JS.API.STREAM.DELETE.ORDERS` as a request to delete a stream. So all of it is checked here.

use airtight_core::{Code, Error, Result, route::Template};

/// The longest subject. A server hangs up on a command line over 4096 bytes (`max_control_line`), and beside the
/// subject that line holds the address for the answer and three numbers.
pub(crate) const MAX_SUBJECT: usize = 3_840;

/// Stands for a field in [`shape`]. It can be in no subject.
const FIELD: char = '\0';

/// Whether events may be published to it; else a permanent error that says why not.
pub(crate) fn check(subject: &str) -> Result<()> {
    let bad = |what: &str| {
        let shown: String = subject.chars().take(200).collect();
        let message =
            format!("`{}` is not a subject that events can be published to: {what}", shown.escape_debug());
        Err(Error::permanent(Code::BAD_NAME, message))
    };
    if subject.len() > MAX_SUBJECT {
        return bad(&format!("it has {} bytes, and the limit is {MAX_SUBJECT}", subject.len()));
    }
    if subject.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return bad("it has spaces or control characters");
    }
    if subject.contains(['*', '>']) {
        return bad("`*` and `>` are wildcards");
    }
    if subject.split('.').any(str::is_empty) {
        return bad("a token between dots is empty");
    }
    // Requests to the server itself. Key-value buckets are ordinary streams.
    if subject.starts_with('$') && !subject.starts_with("$KV.") {
        return bad("subjects that begin with `$` belong to the server");
    }
    Ok(())
}

/// Whether some event could make a subject of it.
pub(crate) fn check_template(template: &Template) -> Result<()> {
    match template.literals().find(|text| text.contains(FIELD)) {
        Some(text) => check(text),
        None => check(&shape(template).replace(FIELD, "x")),
    }
}

/// The subjects that a template can make, as a filter; none if it does not begin with a token of its own.
pub(crate) fn all_of(template: &Template) -> Option<String> {
    if let Some(constant) = template.constant() {
        return Some(constant.to_owned());
    }
    let shape = shape(template);
    let own: Vec<&str> = shape.split('.').take_while(|token| !token.contains(FIELD)).collect();
    (!own.is_empty()).then(|| format!("{}.>", own.join(".")))
}

/// Whether a stream can have it among its subjects.
pub(crate) fn is_filter(subject: &str) -> bool {
    let plain = subject.strip_suffix(".>").unwrap_or(subject);
    let tokens: Vec<&str> = plain.split('.').map(|token| if token == "*" { "x" } else { token }).collect();
    check(&tokens.join(".")).is_ok()
}

/// The template's text with [`FIELD`] for each field.
fn shape(template: &Template) -> String {
    let text = template.to_string();
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    // A template that was read has its braces in pairs.
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let found = &rest[at..];
        rest = if found.starts_with("{{") || found.starts_with("}}") {
            out.push_str(&found[..1]);
            &found[2..]
        } else {
            out.push(FIELD);
            found.split_once('}').map_or("", |(_, behind)| behind)
        };
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> Template {
        Template::parse(text).unwrap()
    }

    #[test]
    fn subjects_are_tokens_between_dots() {
        for good in ["a", "orders.placed", "ключ.鍵", "a-b_c/d:e", "{}", "$KV.bucket.key", "a.$b", "_x"]
        {
            assert!(check(good).is_ok(), "{good}");
        }
        assert!(check(&"x".repeat(MAX_SUBJECT)).is_ok());
        for bad in [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "a b",
            "a\tb",
            "a\r\nPUB x",
            "a\0",
            "a\u{85}b",
            "*",
            "a.*",
            "a.>",
            "a*b",
            "$JS.API.STREAM.DELETE.ORDERS",
            "$SYS.REQ",
            "$KV",
            &"x".repeat(MAX_SUBJECT + 1),
        ] {
            let error = check(bad).unwrap_err();
            assert_eq!((error.code(), error.class()), ("bad_name", airtight_core::Class::Permanent));
            assert!(!error.message().contains('\n') && error.message().len() < 500, "{error}");
        }
    }

    #[test]
    fn a_template_that_no_event_can_fill_is_found_at_once() {
        for good in ["{stream}", "a.{op}", "a-{op}.b", "{op}{op}", "{{{op}}}", "$KV.b.{aggregate_id}"] {
            assert!(check_template(&template(good)).is_ok(), "{good}");
        }
        for bad in [".{op}", "{op}.", "a..{op}", "a .{op}", "{op}.*", "{op}.>", "$JS.{op}", "\0"] {
            assert!(check_template(&template(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_created_stream_has_all_subjects_of_the_template() {
        let all = |text| all_of(&template(text));
        assert_eq!(all("orders").as_deref(), Some("orders"));
        assert_eq!(all("orders.{op}").as_deref(), Some("orders.>"));
        assert_eq!(all("a.b.{op}.c").as_deref(), Some("a.b.>"));
        assert_eq!(all("a.b-{op}").as_deref(), Some("a.>"));
        assert_eq!(all("{{x}}.{op}").as_deref(), Some("{x}.>"));
        assert_eq!((all("{stream}"), all("a-{op}.b")), (None, None));
        for good in ["a", "a.>", "a.*", "*.a", "a.*.b.>"] {
            assert!(is_filter(good), "{good}");
        }
        for bad in ["", "a.", ">.a", "a.>.b", "a b", "$JS.API.>"] {
            assert!(!is_filter(bad), "{bad}");
        }
    }
}
