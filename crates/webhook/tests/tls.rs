//! What the environment decides, and what it does not: the system's roots say whom https trusts; proxy
//! variables say nothing.
//!
//! The environment belongs to the whole process; so each case runs in a process of its own, this same test
//! binary with `SSL_CERT_FILE` set.

#![allow(clippy::unwrap_used, reason = "this whole file is a test")]

use std::{path::Path, process::Stdio, sync::Arc, time::Duration};

use airtight_core::{Delivery, Position, Sink};
use airtight_testkit::{deliveries::sample_event, http::HttpServer};
use airtight_webhook::{WebhookConfig, WebhookSink};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer},
};

const URL: &str = "AIRTIGHT_TEST_HTTPS_URL";

#[tokio::test]
async fn https_trusts_the_systems_roots_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let certified = || rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (ours, strange) = (certified(), certified());
    let (trusted, untrusted) = (dir.path().join("trusted.pem"), dir.path().join("untrusted.pem"));
    std::fs::write(&trusted, ours.cert.pem()).unwrap();
    std::fs::write(&untrusted, strange.cert.pem()).unwrap();

    let key = PrivateKeyDer::try_from(ours.signing_key.serialize_der()).unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![ours.cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config.clone()));
    config.alpn_protocols = vec![b"h2".to_vec()];
    let http2_acceptor = TlsAcceptor::from(Arc::new(config));

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(serve_http2(listener, http2_acceptor));
    let said = outcome(&format!("https://localhost:{port}/"), &trusted).await;
    assert!(said.contains("said: [Delivered]"), "{said}");
    serving.abort();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(serve(listener, acceptor.clone()));
    let said = outcome(&format!("https://localhost:{port}/"), &trusted).await;
    assert!(said.contains("said: [Delivered]"), "{said}");
    let said = outcome(&format!("https://localhost:{port}/"), &untrusted).await;
    assert!(said.contains("tls (unavailable)") && said.contains("certificate"), "{said}");
    serving.abort();

    // What the config names counts, whatever the system trusts.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(serve(listener, acceptor.clone()));
    for (file, expected) in [(&trusted, "Delivered"), (&untrusted, "certificate")] {
        let config = WebhookConfig::new(format!("https://localhost:{port}/")).ca(file);
        let event = sample_event(1, "k");
        let delivery = Delivery {
            event,
            position: Position(1),
            attempt: 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        };
        let said = format!("{:?}", WebhookSink::new(config).unwrap().deliver(&[delivery]).await);
        assert!(said.contains(expected), "{said}");
    }
    serving.abort();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = tokio::spawn(refuse(listener));
    let said = outcome(&format!("https://localhost:{port}/"), &trusted).await;
    assert!(said.contains("tls (unavailable)") && said.contains("corrupt message"), "{said}");
    serving.abort();

    let plain = HttpServer::start().await;
    std::fs::write(&untrusted, "").unwrap();
    let said = outcome("https://localhost/", &untrusted).await;
    assert!(said.contains("bad_config (permanent)") && said.contains("install ca-certificates"), "{said}");
    // Plain HTTP does not need them.
    let said = outcome(&plain.url("/"), &untrusted).await;
    assert!(said.contains("said: [Delivered]"), "{said}");
}

#[tokio::test]
#[ignore = "one case of the test above, which starts it"]
async fn one_case() {
    let url = std::env::var(URL).expect("started by the test above");
    let event = sample_event(1, "k");
    let delivery = Delivery {
        event,
        position: Position(1),
        attempt: 1,
        max_attempts: None,
        lost_leases: 0,
        replay: None,
    };
    match WebhookSink::new(WebhookConfig::new(url)) {
        Ok(sink) => println!("said: {:?}", sink.deliver(&[delivery]).await),
        Err(error) => println!("said: {error:?}"),
    }
}

/// What a process with these roots says of one delivery.
async fn outcome(url: &str, roots: &Path) -> String {
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_case", "--ignored", "--nocapture"])
        .env(URL, url)
        .env("SSL_CERT_FILE", roots)
        .env_remove("SSL_CERT_DIR")
        // Not asked for by the config, and so not gone through: nobody listens there.
        .envs(
            ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"]
                .map(|name| (name, "http://127.0.0.1:9")),
        )
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(30), child).await.expect("the case ends").unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Answers every request with an empty 200.
async fn serve(listener: TcpListener, acceptor: TlsAcceptor) {
    while let Ok((stream, _)) = listener.accept().await {
        // A client that does not trust us breaks off here.
        let _ = answer(stream, &acceptor).await;
    }
}

/// The same in HTTP/2, and in nothing else.
async fn serve_http2(listener: TcpListener, acceptor: TlsAcceptor) {
    let (stream, _) = listener.accept().await.unwrap();
    let mut connection = h2::server::handshake(acceptor.accept(stream).await.unwrap()).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        assert_eq!(request.headers()["airtight-seq"], "1");
        respond.send_response(http::Response::new(()), true).unwrap();
    }
}

/// Speaks plain HTTP to everyone.
async fn refuse(listener: TcpListener) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let _ = stream.write_all(b"HTTP/1.1 400 This is not https\r\n\r\n").await;
        // Until the client has had enough: closing with its words unread would reset the connection.
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
}

async fn answer(stream: TcpStream, acceptor: &TlsAcceptor) -> std::io::Result<()> {
    let mut stream = acceptor.accept(stream).await?;
    let mut request = Vec::new();
    // The envelope's end is the request's.
    while !request.ends_with(b"}") {
        stream.read_buf(&mut request).await?;
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await?;
    stream.shutdown().await
}
