//! TLS for replication connections. `sslmode` has the same meaning as everywhere else.

use std::{path::Path, sync::Arc};

use airtight_core::{Code, Error, Result};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
};
use sqlx::postgres::PgSslMode;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::Endpoint;

/// Speaks TLS over a connection to a server that has agreed to it.
pub(super) async fn connect(endpoint: &Endpoint, stream: TcpStream) -> Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(endpoint.host.clone())
        .map_err(|_| failed(endpoint, &"TLS cannot check its name"))?;
    let connector = TlsConnector::from(Arc::new(config(endpoint)?));
    connector.connect(name, stream).await.map_err(|error| failed(endpoint, &error))
}

fn config(endpoint: &Endpoint) -> Result<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(endpoint, &error))?;
    let verifier: Arc<dyn ServerCertVerifier> = match endpoint.ssl {
        PgSslMode::VerifyCa => {
            Arc::new(Lenient { chain: Some(web_pki(endpoint, provider.clone())?), provider })
        }
        PgSslMode::VerifyFull => web_pki(endpoint, provider)?,
        _ => Arc::new(Lenient { chain: None, provider }),
    };
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
    match (&endpoint.certificate, &endpoint.key) {
        (Some(certificate), Some(key)) => {
            let chain = certificates(certificate)?;
            let key = PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable(key, &error))?;
            builder.with_client_auth_cert(chain, key).map_err(|error| failed(endpoint, &error))
        }
        _ => Ok(builder.with_no_client_auth()),
    }
}

fn web_pki(endpoint: &Endpoint, provider: Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>> {
    let mut roots = RootCertStore::empty();
    match &endpoint.root {
        Some(file) => {
            for certificate in certificates(file)? {
                roots.add(certificate).map_err(|error| unreadable(file, &error))?;
            }
        }
        None => {
            // One that cannot be read is as good as none: the server's is then refused.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().map_err(|error| {
        failed(endpoint, &format_args!("there are no root certificates to check its certificate: {error}"))
    })
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unreadable(file, &error))
}

fn unreadable(file: &Path, why: &dyn std::fmt::Display) -> Error {
    Error::unavailable(Code::TLS, format!("the file {} cannot be used: {why}", file.display()))
}

fn failed(endpoint: &Endpoint, why: &dyn std::fmt::Display) -> Error {
    Error::unavailable(Code::TLS, format!("TLS with {} failed: {why}", endpoint.shown()))
}

/// For modes that ask for less than a certificate for the name.
#[derive(Debug)]
struct Lenient {
    /// `verify-ca`: the chain counts, the name does not. None is `prefer` and `require`: against eavesdroppers only, as
    /// everywhere.
    chain: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
