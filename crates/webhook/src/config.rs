//! What can be configured, and its way into checked types. Needs no network.
//!
//! Secrets go in here and never come out in words: neither `Debug` nor an error shows the signing secret,
//! the credentials of the URL, header values, or the URL's path and query, which often hold a token.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use airtight_core::{Code, Error, Format, Result};
use reqwest::{
    Url,
    header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue},
};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::{encode::Signer, endpoint::Endpoint};

/// Where to send events, and how. Checked by [`crate::WebhookSink::new`].
#[derive(Clone)]
pub struct WebhookConfig {
    /// The endpoint, `http` or `https`. Credentials in it become basic authentication. Path and query may hold fields of
    /// the event, as in `https://shop.example/hooks/{aggregate_type}`; their values are percent-encoded.
    pub url: String,
    /// Signs requests: `whsec_<base64>` or plain text. Several, separated by spaces, sign side by side, so
    /// that a receiver can go from one to the next. None leaves requests unsigned.
    pub secret: Option<String>,
    /// Headers for every request, e.g. `Authorization`.
    pub headers: BTreeMap<String, String>,
    /// How long one attempt may take, from connecting to the answer (10 s).
    pub timeout: Duration,
    /// How long connecting may take (5 s).
    pub connect_timeout: Duration,
    /// How many requests may be under way, each for another key (16).
    pub concurrency: usize,
    /// What the body is.
    pub format: Format,
    /// The `User-Agent`.
    pub user_agent: String,
    /// A proxy to go through. None means none: the environment's proxy variables are not looked at.
    pub proxy: Option<String>,
    /// A file with the certificates of the authorities to trust, in PEM; the system's where there is none.
    pub ca: Option<PathBuf>,
}

impl WebhookConfig {
    /// The defaults, for this endpoint.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            secret: None,
            headers: BTreeMap::new(),
            timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            concurrency: 16,
            format: Format::default(),
            user_agent: concat!("airtight/", env!("CARGO_PKG_VERSION")).into(),
            proxy: None,
            ca: None,
        }
    }

    /// Sets [`WebhookConfig::secret`].
    #[must_use]
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(secret.into());
        self
    }

    /// Adds one of [`WebhookConfig::headers`].
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Sets [`WebhookConfig::timeout`].
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets [`WebhookConfig::connect_timeout`].
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets [`WebhookConfig::concurrency`].
    #[must_use]
    pub fn concurrency(mut self, requests: usize) -> Self {
        self.concurrency = requests;
        self
    }

    /// Sets [`WebhookConfig::format`].
    #[must_use]
    pub fn format(mut self, format: Format) -> Self {
        self.format = format;
        self
    }

    /// Sets [`WebhookConfig::user_agent`].
    #[must_use]
    pub fn user_agent(mut self, user_agent: impl Into<String>) -> Self {
        self.user_agent = user_agent.into();
        self
    }

    /// Sets [`WebhookConfig::proxy`].
    #[must_use]
    pub fn proxy(mut self, url: impl Into<String>) -> Self {
        self.proxy = Some(url.into());
        self
    }

    /// Sets [`WebhookConfig::ca`].
    #[must_use]
    pub fn ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca = Some(file.into());
        self
    }

    /// The checked form.
    pub(crate) fn resolve(self) -> Result<Resolved> {
        let endpoint = Endpoint::parse(&self.url)?;
        let signer = self.secret.as_deref().map(Signer::parse).transpose()?;
        let headers = headers(&self.headers)?;
        if headers.contains_key(AUTHORIZATION) && has_credentials(endpoint.base()) {
            return Err(bad("headers", "set `Authorization`, and so do the credentials in `url`")
                .with_remedy("keep one"));
        }
        for (key, duration) in [("timeout", self.timeout), ("connect_timeout", self.connect_timeout)] {
            if duration.is_zero() {
                return Err(bad(key, "must be longer than zero"));
            }
        }
        if self.concurrency == 0 {
            return Err(bad("concurrency", "must be at least 1"));
        }
        let user_agent = HeaderValue::from_str(&self.user_agent)
            .map_err(|_| bad("user_agent", "holds characters that HTTP does not allow in a header"))?;
        let proxy = self.proxy.as_deref().map(proxy).transpose()?;
        let roots = self.ca.as_deref().map(roots).transpose()?;
        if roots.is_some() && endpoint.base().scheme() != "https" && self.proxy.is_none() {
            return Err(bad("ca", "needs TLS").with_remedy("write https://"));
        }
        Ok(Resolved {
            endpoint,
            roots,
            signer,
            headers,
            timeout: self.timeout,
            connect_timeout: self.connect_timeout,
            concurrency: self.concurrency,
            format: self.format,
            user_agent,
            proxy,
        })
    }
}

impl fmt::Debug for WebhookConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = Url::parse(&self.url).map_or_else(|_| "(not a URL)".into(), |url| origin(&url));
        f.debug_struct("WebhookConfig")
            .field("url", &url)
            .field("secret", &self.secret.as_ref().map(|_| "(hidden)"))
            .field("headers", &self.headers.keys())
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("concurrency", &self.concurrency)
            .field("format", &self.format)
            .field("user_agent", &self.user_agent)
            .field("proxy", &self.proxy.as_ref().map(|_| "(hidden)"))
            .field("ca", &self.ca)
            .finish()
    }
}

/// A config that was checked.
pub(crate) struct Resolved {
    pub(crate) endpoint: Endpoint,
    pub(crate) roots: Option<RootCertStore>,
    pub(crate) signer: Option<Signer>,
    pub(crate) headers: HeaderMap,
    pub(crate) timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) concurrency: usize,
    pub(crate) format: Format,
    pub(crate) user_agent: HeaderValue,
    pub(crate) proxy: Option<reqwest::Proxy>,
}

/// A config error: the key, and what to do.
pub(crate) fn bad(key: &str, what: impl fmt::Display) -> Error {
    Error::permanent(Code::BAD_CONFIG, format!("webhook: `{key}` {what}"))
}

/// Scheme, host and port: as much of a URL as may be shown.
pub(crate) fn origin(url: &Url) -> String {
    url.origin().ascii_serialization()
}

fn has_credentials(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

fn roots(file: &Path) -> Result<RootCertStore> {
    let unusable = |why: &dyn fmt::Display| {
        bad("ca", format!("names the file {}, which cannot be used: {why}", file.display()))
    };
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut roots = RootCertStore::empty();
    for certificate in read.map_err(|error| unusable(&error))? {
        roots.add(certificate).map_err(|error| unusable(&error))?;
    }
    if roots.is_empty() { Err(unusable(&"it holds no certificate")) } else { Ok(roots) }
}

fn proxy(text: &str) -> Result<reqwest::Proxy> {
    let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    url.and_then(|url| reqwest::Proxy::all(url).ok())
        .ok_or_else(|| bad("proxy", "is not a proxy's URL; it should look like http://host:3128"))
}

fn headers(config: &BTreeMap<String, String>) -> Result<HeaderMap> {
    let mut headers = HeaderMap::with_capacity(config.len());
    for (name, value) in config {
        let header: HeaderName = name.parse().map_err(|_| {
            bad("headers", format!("has the name `{}`, which HTTP does not allow", name.escape_debug()))
        })?;
        if is_ours(&header) {
            return Err(bad("headers", format!("sets `{header}`, which airtight sets itself"))
                .with_remedy("remove it"));
        }
        let mut value = HeaderValue::from_str(value).map_err(|_| {
            bad(
                "headers",
                format!("has a value for `{header}` with characters that HTTP does not allow in a header"),
            )
        })?;
        value.set_sensitive(true);
        // Two spellings of one name are two keys of the config, and one header.
        if headers.insert(header.clone(), value).is_some() {
            return Err(bad("headers", format!("sets `{header}` twice, in different spellings"))
                .with_remedy("keep one"));
        }
    }
    Ok(headers)
}

/// Headers that carry the event or frame the message.
fn is_ours(name: &HeaderName) -> bool {
    const FRAMING: [&str; 5] =
        ["idempotency-key", "content-length", "transfer-encoding", "connection", "user-agent"];
    let name = name.as_str();
    name.starts_with("webhook-") || name.starts_with("airtight-") || FRAMING.contains(&name)
}

#[cfg(test)]
mod tests {
    use airtight_core::Class;

    use super::*;

    fn refused(config: WebhookConfig) -> Error {
        match config.resolve() {
            Ok(_) => panic!("this config should be refused"),
            Err(error) => error,
        }
    }

    #[test]
    fn a_wrong_config_is_refused_with_the_key_and_without_secrets() {
        let good = || WebhookConfig::new("https://user:hunter2@shop.example/hooks");
        let cases = [
            (WebhookConfig::new("hunter2 not a url"), "`url` is not a URL"),
            (WebhookConfig::new("localhost:80/hunter2"), "must begin with http:// or https://"),
            (WebhookConfig::new("ftp://user:hunter2@host/"), "found `ftp:`"),
            (good().header("bad name", "x"), "the name `bad name`"),
            (good().header("X-Token", "hunter2\n"), "a value for `x-token`"),
            (good().header("Webhook-Id", "1"), "which airtight sets itself"),
            (good().header("x-a", "1").header("X-A", "2"), "twice"),
            (good().header("Authorization", "Bearer hunter2"), "keep one"),
            (good().secret(""), "`secret` is empty"),
            (good().secret("  "), "`secret` is empty"),
            (good().secret("whsec_"), "`secret` has nothing after `whsec_`"),
            (good().secret("whsec_hunter2!"), "`secret` begins with `whsec_` but is not base64"),
            (good().timeout(Duration::ZERO), "`timeout` must be longer"),
            (good().connect_timeout(Duration::ZERO), "`connect_timeout` must be longer"),
            (good().concurrency(0), "`concurrency` must be at least 1"),
            (good().user_agent("a\nb"), "`user_agent` holds"),
            (good().proxy("hunter2"), "`proxy` is not a proxy's URL"),
        ];
        for (config, expected) in cases {
            let error = refused(config);
            assert!(error.to_string().contains(expected), "{error} should say {expected}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?} tells a secret");
            assert_eq!(error.class(), Class::Permanent);
        }
    }

    #[test]
    fn debug_tells_no_secrets() {
        let config = WebhookConfig::new("https://user:hunter2@shop.example/hunter2?token=hunter2")
            .secret("hunter2")
            .header("X-Token", "hunter2")
            .proxy("http://user:hunter2@proxy:3128");
        let shown = format!("{config:?}");
        assert!(shown.contains("https://shop.example") && shown.contains("X-Token"), "{shown}");
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}
