//! Where a request goes: one URL for all events, or a URL made from each event's fields.
//!
//! Fields may be in the path and in the query, never in scheme, host, port or credentials: an event must not choose the
//! host that receives it with a signature. Errors show only the origin of a URL and the fields; path and query often
//! contain a token.

use airtight_core::{Code, Error, Event, Result, route::Template};
use reqwest::Url;

use crate::config::bad;

/// The endpoint as it was configured.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    /// With something harmless in place of the fields.
    url: Url,
    template: Option<Template>,
}

impl Endpoint {
    /// Checks it. The text itself stays out of errors: it may hold a password.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if !text.contains(['{', '}']) {
            return Ok(Self { url: checked(text)?, template: None });
        }
        let template = Template::parse(text).map_err(|error| {
            let what = error.message().replace(&format!("the template `{text}` "), "");
            bad("url", format!("{what}; a literal brace is written twice"))
        })?;
        let authority = text.split_once("://").map_or("", |(_, rest)| rest);
        let authority = authority.split(['/', '?', '#']).next().unwrap_or_default();
        if authority.contains('{') {
            return Err(bad(
                "url",
                "has a field before its path: events must not choose the host that they are sent to",
            ));
        }
        let harmless: String = template.sample("x");
        let template = template.constant().is_none().then_some(template);
        Ok(Self { url: checked(&harmless)?, template })
    }

    /// One that stands for all of them: same scheme, host and credentials.
    pub(crate) fn base(&self) -> &Url {
        &self.url
    }

    /// Scheme, host and port: as much of it as may be shown.
    pub(crate) fn origin(&self) -> String {
        self.url.origin().ascii_serialization()
    }

    /// The URL for an event, without credentials; none where it is the same for all.
    pub(crate) fn of(&self, event: &Event) -> Result<Option<Url>> {
        let Some(template) = &self.template else { return Ok(None) };
        let hidden = |error: Error| {
            let shown = format!("the template `{template}`");
            error.map_message(|message| message.replace(&shown, "`url`"))
        };
        let text = template.render_with(event, encode).map_err(hidden)?;
        // As a whole segment these would mean another path, encoded or not.
        let path = text.split(['?', '#']).next().unwrap_or_default();
        if path.split('/').any(|segment| matches!(segment, "." | "..")) {
            let message = "a field of the event is `.` or `..`, which cannot be a segment of a URL's path";
            return Err(Error::permanent(Code::BAD_URL, message));
        }
        let mut url = Url::parse(&text).map_err(|error| {
            Error::permanent(Code::BAD_URL, format!("`url` with the event's fields is not a URL: {error}"))
        })?;
        // They are in a header already. A URL with a host can be without them.
        let _ = (url.set_username(""), url.set_password(None));
        Ok(Some(url))
    }

    /// The endpoint of an event as a destination, named by its fields: it may be unavailable while others are not.
    pub(crate) fn destination(&self, event: &Event) -> Option<String> {
        let fields = self.template.as_ref()?.values(event);
        let fields: Vec<String> = fields.map(|(name, value)| format!("{name}={value}")).collect();
        Some(format!("{} with {}", self.origin(), fields.join(", ")))
    }

    /// Where an event goes, in words.
    pub(crate) fn shown(&self, event: &Event) -> String {
        self.destination(event).unwrap_or_else(|| self.origin())
    }
}

fn checked(text: &str) -> Result<Url> {
    let url = Url::parse(text).map_err(|error| {
        bad("url", format!("is not a URL ({error}); it should look like https://host/path"))
    })?;
    match url.scheme() {
        "http" | "https" => Ok(url),
        // `localhost:8080/hooks` parses as the scheme `localhost`.
        other => Err(bad("url", format!("must begin with http:// or https://, found `{other}:`"))),
    }
}

/// A value as one component of a URL: nothing in it ends the segment or the parameter that it stands in.
fn encode(value: &str, out: &mut String) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            out.push(char::from(byte));
        } else {
            out.extend([
                '%',
                char::from(HEX[usize::from(byte >> 4)]),
                char::from(HEX[usize::from(byte & 15)]),
            ]);
        }
    }
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;
    use airtight_testkit::deliveries::sample_event;

    use super::*;

    fn of(url: &str, key: &str) -> Result<String> {
        let endpoint = Endpoint::parse(url)?;
        Ok(endpoint
            .of(&sample_event(1, key))?
            .map_or_else(|| endpoint.base().to_string(), |url| url.to_string()))
    }

    #[test]
    fn fields_become_one_component_of_the_url() {
        let url =
            "https://user:pw@shop.example/hooks/{aggregate_type}/{aggregate_id}?t=hunter2&k={aggregate_id}#x";
        for (key, path) in [
            ("42", "42"),
            ("a/b?c=d&e#f", "a%2Fb%3Fc%3Dd%26e%23f"),
            ("../x", "..%2Fx"),
            ("naïve %", "na%C3%AFve%20%25"),
            ("a.b", "a.b"),
        ] {
            let expected = format!("https://shop.example/hooks/Test/{path}?t=hunter2&k={path}#x");
            assert_eq!(of(url, key).unwrap(), expected);
        }
        assert_eq!(of("https://h/{{plain}}", "k").unwrap(), "https://h/%7Bplain%7D");
        for key in [".", ".."] {
            let error = of(url, key).unwrap_err();
            assert_eq!((error.class(), error.code()), (Class::Permanent, "bad_url"));
        }
    }

    #[test]
    fn what_is_wrong_is_refused_without_showing_the_url() {
        for (url, expected) in [
            ("https://h/hunter2/{agregate_type}", "did you mean `{aggregate_type}`"),
            ("https://h/hunter2/{", "has a `{` without a `}`"),
            ("https://{stream}.example/hunter2", "before its path"),
            ("https://hunter2:{id}@h/", "before its path"),
        ] {
            let error = Endpoint::parse(url).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
            assert!(!error.message().contains("hunter2"), "{error}");
        }
        let error = of("https://h/hunter2/{header.tenant}", "k").unwrap_err();
        assert_eq!((error.class(), error.code()), (Class::Permanent, "missing_field"));
        assert!(
            error.message().contains("`header.tenant`") && !error.message().contains("hunter2"),
            "{error}"
        );
    }

    #[test]
    fn a_destination_is_named_by_its_fields() {
        let endpoint = Endpoint::parse("https://h:8443/hunter2/{aggregate_type}/{stream}").unwrap();
        let event = sample_event(1, "k");
        let expected = "https://h:8443 with aggregate_type=Test, stream=test.stream";
        assert_eq!(endpoint.destination(&event).as_deref(), Some(expected));
        assert_eq!(Endpoint::parse("https://h/x").unwrap().destination(&event), None);
    }
}
