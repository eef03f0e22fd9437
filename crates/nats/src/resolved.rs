//! Turns a config into checked types. Needs no network.

use std::{path::PathBuf, time::Duration};

use airtight_core::{Format, Result, route::Template, settings::bad};
use async_nats::ServerAddr;

use crate::{config::NatsConfig, subject, tls};

/// A config that was checked.
pub(crate) struct Resolved {
    /// The servers as they may be shown.
    pub(crate) shown: String,
    pub(crate) servers: Vec<ServerAddr>,
    pub(crate) auth: Auth,
    pub(crate) tls: rustls::ClientConfig,
    pub(crate) subject: Template,
    pub(crate) stream: Option<String>,
    pub(crate) created: Option<Created>,
    pub(crate) format: Format,
    pub(crate) timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) window: usize,
    pub(crate) name: String,
    pub(crate) inbox_prefix: String,
}

/// How to say who we are.
pub(crate) enum Auth {
    None,
    User(String, String),
    Token(String),
    Credentials(PathBuf),
    NKey(String),
}

/// A stream that may be created.
pub(crate) struct Created {
    pub(crate) subjects: Vec<String>,
    pub(crate) replicas: usize,
}

impl NatsConfig {
    /// The checked form.
    pub(crate) fn resolve(self) -> Result<Resolved> {
        let servers = servers(&self.servers, self.tls)?;
        let auth = self.auth()?;
        let tls = tls::client_config(
            self.tls,
            self.ca.as_deref(),
            match (&self.cert, &self.key) {
                (Some(cert), Some(key)) => Some((cert, key)),
                (None, None) => None,
                (Some(_), None) => return Err(bad("cert", "needs `key`, the certificate's private key")),
                (None, Some(_)) => {
                    return Err(bad("key", "needs `cert`, the certificate that it belongs to"));
                }
            },
        )?;
        let subject = Template::parse(&self.subject).map_err(|error| bad("subject", error))?;
        subject::check_template(&subject).map_err(|error| bad("subject", error.message()))?;
        let created = self.created(&subject)?;
        for (key, duration) in [("timeout", self.timeout), ("connect_timeout", self.connect_timeout)] {
            if duration.is_zero() {
                return Err(bad(key, "must be longer than zero"));
            }
        }
        if !(1..=65_536).contains(&self.window) {
            return Err(bad("window", "must be between 1 and 65536"));
        }
        subject::check(&self.inbox_prefix).map_err(|error| bad("inbox_prefix", error.message()))?;
        Ok(Resolved {
            shown: self.servers.trim().to_owned(),
            servers,
            auth,
            tls,
            subject,
            stream: self.stream,
            created,
            format: self.format,
            timeout: self.timeout,
            connect_timeout: self.connect_timeout,
            window: self.window,
            name: self.name,
            inbox_prefix: self.inbox_prefix,
        })
    }

    fn auth(&self) -> Result<Auth> {
        let mut ways = Vec::new();
        match (&self.user, &self.password) {
            (Some(user), Some(password)) => ways.push(Auth::User(user.clone(), password.clone())),
            (Some(_), None) => return Err(bad("user", "needs `password`")),
            (None, Some(_)) => return Err(bad("password", "needs `user`")),
            (None, None) => {}
        }
        if let Some(token) = &self.token {
            ways.push(Auth::Token(token.clone()));
        }
        if let Some(path) = &self.creds {
            // What only the file's content can tell, the server will; that it is there can be said now.
            let text = std::fs::read_to_string(path).map_err(|error| {
                bad("creds", format!("is the file {}, which cannot be read: {error}", path.display()))
            })?;
            if async_nats::ConnectOptions::with_credentials(&text).is_err() {
                return Err(bad(
                    "creds",
                    format!("is the file {}, which is not a NATS credentials file", path.display()),
                ));
            }
            ways.push(Auth::Credentials(path.clone()));
        }
        if let Some(seed) = &self.nkey {
            let seed = seed.trim();
            let plain = seed.len() == 58 && seed.bytes().all(|byte| byte.is_ascii_alphanumeric());
            if !(plain && seed.starts_with("SU")) {
                return Err(bad(
                    "nkey",
                    "is not the seed of a user, which begins with SU and has 58 letters",
                ));
            }
            ways.push(Auth::NKey(seed.to_owned()));
        }
        if ways.len() > 1 {
            return Err(bad("user", "and `token`, `creds` and `nkey` exclude each other")
                .with_remedy("set one of them"));
        }
        Ok(ways.pop().unwrap_or(Auth::None))
    }

    /// What to create, if that is allowed.
    fn created(&self, template: &Template) -> Result<Option<Created>> {
        if let Some(name) = &self.stream {
            let forbidden =
                |c: char| c.is_whitespace() || c.is_control() || matches!(c, '.' | '*' | '>' | '/' | '\\');
            if name.is_empty() || name.len() > 255 || name.contains(forbidden) {
                return Err(bad("stream", "is not a stream's name: no dots, spaces, slashes, `*` or `>`"));
            }
        }
        if !self.create {
            return Ok(None);
        }
        if self.stream.is_none() {
            return Err(bad("create", "needs `stream`, the name of the stream to create"));
        }
        if !(1..=5).contains(&self.create_replicas) {
            return Err(bad("create_replicas", "must be between 1 and 5"));
        }
        let subjects = match self.create_subjects.as_slice() {
            [] => vec![subject::all_of(template).ok_or_else(|| {
                let why = "must be set: the subject's template does not begin with a literal token";
                bad("create_subjects", format!("{why} (`orders.{{event_type}}` would be `orders.>`)"))
            })?],
            given => given.to_vec(),
        };
        if let Some(wrong) = subjects.iter().find(|subject| !subject::is_filter(subject)) {
            return Err(bad(
                "create_subjects",
                format!("has `{}`, which is not a subject", wrong.escape_debug()),
            ));
        }
        Ok(Some(Created { subjects, replicas: self.create_replicas }))
    }
}

/// The servers of a list with commas.
fn servers(text: &str, tls: bool) -> Result<Vec<ServerAddr>> {
    let scheme = if tls { "tls" } else { "nats" };
    // The text itself stays out of the message: somebody may have written a password into it.
    let parse = |server: &str| {
        let server = server.trim();
        let address = format!("{scheme}://{server}").parse::<ServerAddr>().ok();
        address.filter(|_| !server.is_empty() && !server.contains(['@', '/', ' '])).ok_or_else(|| {
            bad("servers", "must be host:port, or several separated by commas, like n1:4222,n2:4222")
        })
    };
    text.split(',').map(parse).collect()
}
