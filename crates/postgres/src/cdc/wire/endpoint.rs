//! The address of the server and the login, taken from the options of the pool.

use std::path::PathBuf;

use airtight_core::{Code, Error, Result};
use sqlx::{
    ConnectOptions,
    postgres::{PgConnectOptions, PgSslMode},
};

/// A server, a user and a database.
#[derive(Clone)]
pub(crate) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
    /// The directory of a Unix socket, or the socket itself.
    pub(super) socket: Option<PathBuf>,
    pub(super) user: String,
    pub(super) password: Option<String>,
    pub(super) database: String,
    pub(super) ssl: PgSslMode,
    pub(super) root: Option<PathBuf>,
    pub(super) certificate: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
}

impl Endpoint {
    /// The same server, user and database as a pool's.
    pub(crate) fn of(options: &PgConnectOptions) -> Self {
        // The password and the files have no getters; a URL tells them. Host and user are left out of it, for a URL
        // cannot hold all of them.
        let url = options.clone().host("localhost").username("x").to_url_lossy();
        let file = |name: &str| {
            let value = url.query_pairs().find(|(key, _)| key == name)?.1.into_owned();
            // As sqlx shows it.
            Some(PathBuf::from(value.strip_prefix("file: ").map_or(value.clone(), str::to_owned)))
        };
        let password = url.password().map(percent_decode);
        let user = options.get_username().to_owned();
        Self {
            host: options.get_host().trim_matches(['[', ']']).to_owned(),
            port: options.get_port(),
            socket: options
                .get_socket()
                .cloned()
                .or_else(|| options.get_host().starts_with('/').then(|| PathBuf::from(options.get_host()))),
            database: options.get_database().unwrap_or(&user).to_owned(),
            user,
            password,
            ssl: options.get_ssl_mode(),
            root: file("sslrootcert"),
            certificate: file("sslcert"),
            key: file("sslkey"),
        }
    }

    /// The same from a URL.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let options: PgConnectOptions = url.parse().map_err(|error: sqlx::Error| {
            Error::permanent(Code::BAD_URL, format!("the URL for replication is not usable: {error}"))
        })?;
        Ok(Self::of(&options))
    }

    /// For messages.
    pub(crate) fn shown(&self) -> String {
        match &self.socket {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", self.host, self.port),
        }
    }
}

fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = (byte == b'%').then(|| tail.get(..2)).flatten();
        let decoded = hex.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(decoded.unwrap_or(byte));
        rest = if decoded.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_taken_over() {
        let endpoint = Endpoint::parse(
            "postgres://me:p%40ss%2Fw%C3%B6rd@db.example:6543/shop?sslmode=verify-full&sslrootcert=/etc/ca.pem",
        )
        .unwrap();
        assert_eq!((endpoint.host.as_str(), endpoint.port), ("db.example", 6543));
        assert_eq!(endpoint.password.as_deref(), Some("p@ss/wörd"));
        assert_eq!((endpoint.user.as_str(), endpoint.database.as_str()), ("me", "shop"));
        assert!(matches!(endpoint.ssl, PgSslMode::VerifyFull));
        assert_eq!(endpoint.root, Some(PathBuf::from("/etc/ca.pem")));
        assert_eq!(endpoint.shown(), "db.example:6543");
    }

    #[test]
    fn odd_users_and_hosts_do_no_harm() {
        let options = PgConnectOptions::new_without_pgpass().host("::1").username("a/b@c:d").password("100%");
        let endpoint = Endpoint::of(&options);
        assert_eq!((endpoint.host.as_str(), endpoint.user.as_str()), ("::1", "a/b@c:d"));
        assert_eq!(endpoint.password.as_deref(), Some("100%"));
        let socket = Endpoint::of(&PgConnectOptions::new_without_pgpass().socket("/run/postgresql"));
        assert_eq!(socket.socket, Some(PathBuf::from("/run/postgresql")));
    }
}
