//! TLS with ring, whatever the process's default is, and with the system's root certificates or those of a file.

use std::{path::Path, sync::Arc};

use airtight_core::{Result, settings::bad};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio_rustls::TlsConnector;

use crate::RedisConfig;

/// What makes a connection a private one.
pub(crate) struct Tls {
    pub(crate) connector: TlsConnector,
    pub(crate) name: ServerName<'static>,
}

impl Tls {
    /// Reads the files that the config names; none for a config without TLS.
    pub(crate) fn new(config: &RedisConfig) -> Result<Option<Self>> {
        if !config.tls {
            return Ok(None);
        }
        let name = ServerName::try_from(config.host.clone()).map_err(|_| {
            bad("host", format!("`{}` is not a name that TLS can check", config.host.escape_debug()))
        })?;
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| bad("url", format!("cannot be used with TLS: {error}")))?;
        let builder = match &config.ca {
            Some(file) => builder.with_root_certificates(roots(file)?),
            None => builder.with_platform_verifier().map_err(|error| {
                bad("url", format!("is rediss, but the system's root certificates cannot be read ({error})"))
                    .with_remedy("install ca-certificates, or set `ca`")
            })?,
        };
        let client = match (&config.cert, &config.cert_key) {
            (Some(cert), Some(key)) => {
                let key =
                    PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable("cert_key", key, &error))?;
                builder
                    .with_client_auth_cert(certificates("cert", cert)?, key)
                    .map_err(|error| bad("cert", format!("and `cert_key` cannot be used: {error}")))?
            }
            _ => builder.with_no_client_auth(),
        };
        Ok(Some(Self { connector: Arc::new(client).into(), name }))
    }
}

fn roots(file: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ca", file)? {
        roots.add(certificate).map_err(|error| unreadable("ca", file, &error))?;
    }
    Ok(roots)
}

fn certificates(key: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|error| unreadable(key, file, &error))?;
    if certificates.is_empty() {
        return Err(unreadable(key, file, &"it holds no certificate"));
    }
    Ok(certificates)
}

fn unreadable(key: &str, file: &Path, why: &dyn std::fmt::Display) -> airtight_core::Error {
    bad(key, format!("names the file {}, which cannot be used: {why}", file.display()))
}
