//! TLS: which authorities are trusted, and the client's own certificate.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use airtight_core::{Result, settings::bad};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use rustls_platform_verifier::BuilderVerifierExt;

/// ring, without a process-wide default that an application might want to set itself; the roots of `ca` or of the
/// system; a certificate of our own, with its key.
pub(crate) fn client_config(
    required: bool,
    ca: Option<&Path>,
    own: Option<(&PathBuf, &PathBuf)>,
) -> Result<ClientConfig> {
    let builder = || {
        ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| bad("tls", format!("cannot be set up: {error}")))
    };
    let trusting = match ca {
        Some(path) => builder()?.with_root_certificates(roots(path)?),
        None => match builder()?.with_platform_verifier() {
            Ok(builder) => builder,
            Err(error) if required => {
                let what =
                    format!("is requested, but the system's root certificates cannot be read ({error})");
                return Err(bad("tls", what).with_remedy("install ca-certificates, or set `ca`"));
            }
            // A container without certificates can still speak to a server that does not encrypt.
            Err(_) => builder()?.with_root_certificates(RootCertStore::empty()),
        },
    };
    let Some((cert, key)) = own else { return Ok(trusting.with_no_client_auth()) };
    let chain = certificates("cert", cert)?;
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|_| bad("key", format!("is the file {}, which holds no private key", key.display())))?;
    trusting
        .with_client_auth_cert(chain, private)
        .map_err(|error| bad("cert", format!("and `key` cannot be used: {error}")))
}

fn roots(path: &Path) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates("ca", path)?);
    if added == 0 {
        return Err(bad("ca", format!("is the file {}, which holds no authority", path.display())));
    }
    Ok(roots)
}

fn certificates(key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = std::fs::read(path).map_err(|error| {
        bad(key, format!("is the file {}, which cannot be read: {error}", path.display()))
    })?;
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    found
        .ok()
        .filter(|found| !found.is_empty())
        .ok_or_else(|| bad(key, format!("is the file {}, which holds no certificate in PEM", path.display())))
}
