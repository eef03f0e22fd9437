//! One request and what its answer means.
//!
//! Only the status of the answer decides. The body is read for two reasons: to show its beginning to the operator, and to
//! use the connection again. It comes from another program, so bytes and time are bounded.

use std::{sync::Arc, time::Duration};

use airtight_core::{Class, Code, Error, Event, Result, error::root_cause};
use reqwest::{
    Request, Response, StatusCode, Url,
    header::{DATE, HeaderMap, LOCATION, RETRY_AFTER},
    redirect,
};
use rustls::crypto::ring;
use rustls_platform_verifier::BuilderVerifierExt;
use time::{
    OffsetDateTime, PrimitiveDateTime, format_description::BorrowedFormatItem, macros::format_description,
};

use crate::{
    config::{Resolved, bad, origin},
    encode::Encoded,
    endpoint::Endpoint,
};

/// How much of a refusal's body an error shows.
const SHOWN_BYTES: usize = 200;
/// How much of a body is read so that its connection returns to the pool; past that a new connection is
/// cheaper.
const DRAINED_BYTES: usize = 64 * 1024;
/// How long that may take, for the same reason.
const DRAINED_FOR: Duration = Duration::from_secs(1);
/// Some servers (Node's) close a connection after five idle seconds. A request that meets that moment fails
/// and costs an attempt, so ours are given up a little earlier.
const IDLE: Duration = Duration::from_secs(4);
/// The longest `Retry-After` that is believed.
const RETRY_AFTER_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// HTTP's date, in the one form that is not obsolete.
const HTTP_DATE: &[BorrowedFormatItem<'_>] =
    format_description!("[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT");

/// A connection pool for one endpoint.
pub(crate) struct Client {
    http: reqwest::Client,
    /// What is the same in all requests: method, authentication, configured headers; and the URL, where that is.
    template: Request,
    endpoint: Endpoint,
    origin: String,
    timeout: Duration,
    connect_timeout: Duration,
}

impl Client {
    pub(crate) fn new(config: &Resolved) -> Result<Self> {
        // Below the whole, or a host that is gone would look like one that is slow, and cost attempts.
        let connect_timeout = config.connect_timeout.min(config.timeout / 10 * 9);
        let builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls(config)?)
            .redirect(redirect::Policy::none())
            .referer(false)
            .timeout(config.timeout)
            .connect_timeout(connect_timeout)
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(config.concurrency)
            .user_agent(config.user_agent.clone());
        let builder = match &config.proxy {
            Some(proxy) => builder.proxy(proxy.clone()),
            None => builder.no_proxy(),
        };
        let http = builder.build().map_err(|error| cannot_build(error.without_url()))?;
        // Building moves the URL's credentials into a header that is marked sensitive.
        let mut template = http
            .post(config.endpoint.base().clone())
            .build()
            .map_err(|error| cannot_build(error.without_url()))?;
        template.headers_mut().extend(config.headers.clone());
        let endpoint = config.endpoint.clone();
        let origin = endpoint.origin();
        Ok(Self { http, template, endpoint, origin, timeout: config.timeout, connect_timeout })
    }

    /// Where requests go.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Sends the request for an event; `Ok` is a 2xx. An error says whether it is about this endpoint of several alone.
    pub(crate) async fn send(&self, event: &Event, encoded: Encoded) -> Result<()> {
        let url = self.endpoint.of(event)?.unwrap_or_else(|| self.template.url().clone());
        self.post(url, encoded).await.map_err(|error| {
            let is_answer = error.class() == Class::Unavailable && error.http_status().is_some();
            // A proxy that wants a login wants it for all.
            match self.endpoint.destination(event).filter(|_| is_answer && error.http_status() != Some(407)) {
                Some(destination) => error.at(destination),
                None => error,
            }
        })
    }

    async fn post(&self, url: Url, encoded: Encoded) -> Result<()> {
        let mut request = Request::new(self.template.method().clone(), url.clone());
        *request.headers_mut() = encoded.headers;
        // Last, so that a configured `Content-Type` wins.
        request.headers_mut().extend(self.template.headers().clone());
        *request.body_mut() = Some(encoded.body.into());
        match self.http.execute(request).await {
            Ok(response) => self.judge(&url, response).await,
            // Without the URL, which may hold a token.
            Err(error) => Err(self.no_answer(&error.without_url())),
        }
    }

    async fn judge(&self, url: &Url, mut response: Response) -> Result<()> {
        let status = response.status();
        // Whatever happens to the body afterwards, the answer has been given.
        let shown = drain(&mut response).await;
        if status.is_success() {
            return Ok(());
        }
        let class = class(status);
        let mut message = format!("{} answered {status}", self.origin);
        let mut remedy = None;
        if status.is_redirection() {
            let redirect = redirected(url, response.headers());
            message.push_str(&redirect.0);
            remedy = Some(redirect.1);
        }
        if !shown.is_empty() {
            message.push_str(": ");
            message.push_str(&shown);
        }
        let mut error = Error::new(class, Code::http(status.as_u16()), message);
        if status == StatusCode::GONE {
            error = error.lasting();
        }
        if let Some(remedy) = remedy {
            error = error.with_remedy(remedy);
        }
        match retry_after(response.headers(), OffsetDateTime::now_utc()) {
            Some(after) if class != Class::Permanent => Err(error.with_retry_after(after)),
            _ => Err(error),
        }
    }

    /// The error for a request that got no answer.
    fn no_answer(&self, error: &reqwest::Error) -> Error {
        let origin = &self.origin;
        let cause = root_cause(error);
        if error.is_connect() {
            // Before anything was sent, and so for every event alike. A timeout here is a host that drops
            // packets: as gone as one that refuses.
            let message = match error.is_timeout() {
                true => {
                    format!("cannot connect to {origin} within {:?}", self.connect_timeout)
                }
                false => format!("cannot connect to {origin}: {cause}"),
            };
            let code = if cause.is::<rustls::Error>() { Code::TLS } else { Code::UNREACHABLE };
            Error::unavailable(code, message)
        } else if error.is_timeout() {
            Error::retryable(Code::TIMEOUT, format!("{origin} did not answer within {:?}", self.timeout))
        } else {
            Error::retryable(Code::CONNECTION_LOST, format!("the connection to {origin} broke: {cause}"))
        }
    }
}

/// Where a redirect points, in words, and what to do about it.
fn redirected(ours: &Url, headers: &HeaderMap) -> (String, &'static str) {
    let location = headers.get(LOCATION).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    match location.and_then(|location| ours.join(&location).ok()) {
        Some(url) => {
            // A path that is ours already need not be shown; it may hold a token.
            let path = if url.path() == ours.path() { " (the same path)" } else { url.path() };
            let target = printable(format!("{}{path}", origin(&url)).as_bytes());
            let what = format!(" and redirects to {target}; redirects are not followed");
            (what, "set `url` to that address")
        }
        None => ("; redirects are not followed".into(), "set `url` to the endpoint itself"),
    }
}

/// ring, without a process-wide default that an application might want to set itself; and the system's roots, or those of
/// a file.
fn tls(config: &Resolved) -> Result<rustls::ClientConfig> {
    let is_used = config.endpoint.base().scheme() == "https" || config.proxy.is_some();
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(cannot_build)?;
    let mut config = if let Some(roots) = &config.roots {
        builder.with_root_certificates(roots.clone()).with_no_client_auth()
    } else if is_used {
        builder
            .with_platform_verifier()
            .map_err(|error| {
                bad("url", format!("is https, but the system's root certificates cannot be read ({error})"))
                    .with_remedy("install ca-certificates, set `ca`, or set SSL_CERT_FILE")
            })?
            .with_no_client_auth()
    } else {
        // Never used, and a container without certificates can still speak plain HTTP.
        builder.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth()
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn cannot_build(error: impl std::error::Error + 'static) -> Error {
    Error::permanent(
        Code::BAD_CONFIG,
        format!("webhook: cannot set up the HTTP client: {}", root_cause(&error)),
    )
}

fn class(status: StatusCode) -> Class {
    match status.as_u16() {
        408 | 425 | 429 => Class::Retryable,
        300..400 | 401 | 403 | 404 | 405 | 407 | 410 => Class::Unavailable,
        400..500 => Class::Permanent,
        // 5xx, and numbers that HTTP does not know.
        _ => Class::Retryable,
    }
}

/// Reads a body to its end, within bounds; returns its beginning, fit for one line.
async fn drain(response: &mut Response) -> String {
    let mut shown = Vec::new();
    let reading = async {
        let mut read = 0;
        while read < DRAINED_BYTES {
            let Ok(Some(chunk)) = response.chunk().await else { break };
            read += chunk.len();
            let room = SHOWN_BYTES - shown.len();
            shown.extend_from_slice(&chunk[..chunk.len().min(room)]);
        }
    };
    // Late is as good as ended: what was read is shown.
    let _ = tokio::time::timeout(DRAINED_FOR, reading).await;
    printable(&shown)
}

/// The first bytes as text without control characters.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN_BYTES)]);
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.trim().into()
}

/// `Retry-After` in seconds or as a date, bounded. A date is measured against the server's own clock, where
/// it tells that.
fn retry_after(headers: &HeaderMap, now: OffsetDateTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let after = match value.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let now = headers.get(DATE).and_then(|date| http_date(date.to_str().ok()?)).unwrap_or(now);
            Duration::try_from(http_date(value)? - now).ok()?
        }
    };
    (!after.is_zero()).then(|| after.min(RETRY_AFTER_LIMIT))
}

fn http_date(text: &str) -> Option<OffsetDateTime> {
    PrimitiveDateTime::parse(text, HTTP_DATE).ok().map(PrimitiveDateTime::assume_utc)
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn every_status_has_its_class() {
        let of = |status| class(StatusCode::from_u16(status).unwrap());
        for status in [408, 425, 429, 500, 502, 503, 504, 599, 600, 999] {
            assert_eq!(of(status), Class::Retryable, "{status}");
        }
        for status in [300, 301, 302, 304, 307, 308, 399, 401, 403, 404, 405, 407, 410] {
            assert_eq!(of(status), Class::Unavailable, "{status}");
        }
        for status in [400, 402, 406, 409, 411, 412, 413, 414, 415, 422, 431, 451, 499] {
            assert_eq!(of(status), Class::Permanent, "{status}");
        }
    }

    #[test]
    fn retry_after_takes_seconds_and_dates_up_to_a_day() {
        let now = datetime!(2026-01-02 03:04:05 UTC);
        let after = |value: &str, date: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, value.parse().unwrap());
            if let Some(date) = date {
                headers.insert(DATE, date.parse().unwrap());
            }
            retry_after(&headers, now).map(|after| after.as_secs())
        };
        assert_eq!(after("120", None), Some(120));
        assert_eq!(after("9999999999", None), Some(86_400));
        assert_eq!(after("Fri, 02 Jan 2026 03:05:05 GMT", None), Some(60));
        assert_eq!(after("Fri, 02 Jan 2036 03:05:05 GMT", None), Some(86_400));
        // A server whose clock is an hour behind still means ten seconds.
        let behind = Some("Fri, 02 Jan 2026 02:00:00 GMT");
        assert_eq!(after("Fri, 02 Jan 2026 02:00:10 GMT", behind), Some(10));
        for nothing in ["0", "-5", "soon", "", "Fri, 02 Jan 2026 03:04:00 GMT"] {
            assert_eq!(after(nothing, None), None, "{nothing}");
        }
    }

    #[test]
    fn what_strangers_say_fits_on_a_line() {
        assert_eq!(printable(b"a\r\n\tb\x1b[31m\xff\0 "), "a   b [31m\u{fffd}");
        assert_eq!(printable(&[b'x'; 500]).len(), SHOWN_BYTES);
    }
}
