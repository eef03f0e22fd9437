//! The webhook sink against a real server on a socket: what is sent, what each answer means, and what a
//! hostile server can do to it.

#![allow(clippy::unwrap_used, reason = "this whole file is a test")]

use std::time::{Duration, Instant};

use airtight_core::{Class, Delivery, Error, Outcome, Payload, Position, Sink};
use airtight_testkit::{
    deliveries::sample_event,
    http::{HttpServer, Reply},
};
use airtight_webhook::{Format, WebhookConfig, WebhookSink};
use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

fn delivery(seq: i64) -> Delivery {
    let event = sample_event(seq, &format!("key-{seq}"));
    Delivery {
        event,
        position: Position(seq.cast_unsigned()),
        attempt: 1,
        max_attempts: None,
        lost_leases: 0,
        replay: None,
    }
}

fn sink(server: &HttpServer) -> WebhookSink {
    WebhookSink::new(WebhookConfig::new(server.url("/hooks"))).unwrap()
}

async fn send(sink: &WebhookSink, delivery: Delivery) -> Result<(), Error> {
    let mut outcomes = sink.deliver(&[delivery]).await;
    assert_eq!(outcomes.len(), 1);
    match outcomes.remove(0) {
        Outcome::Delivered => Ok(()),
        Outcome::Failed(error) => Err(error),
        other => panic!("{other:?} is not for a webhook to say"),
    }
}

async fn failure(sink: &WebhookSink) -> Error {
    send(sink, delivery(1)).await.expect_err("this should not be delivered")
}

/// An error for a reply.
async fn failure_of(reply: Reply) -> Error {
    let server = HttpServer::start().await;
    server.script([reply]);
    failure(&sink(&server)).await
}

#[tokio::test]
async fn a_request_carries_the_event_and_its_signature() {
    let server = HttpServer::start().await;
    let config = WebhookConfig::new(server.url("/hooks?tenant=1"))
        .secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw other-secret")
        .header("X-Tenant", "one");
    let sink = WebhookSink::new(config).unwrap();
    let mut sent = delivery(7);
    sent.attempt = 2;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    sent.event.headers.insert("traceparent".into(), trace.into());
    send(&sink, sent.clone()).await.unwrap();

    let request = server.wait_for(1).await.remove(0);
    assert_eq!((request.method.as_str(), request.target.as_str()), ("POST", "/hooks?tenant=1"));
    assert_eq!(request.body, airtight_core::envelope::to_vec(&sent.event));
    for (name, value) in [
        ("webhook-id", sent.event.id.as_str()),
        ("idempotency-key", &sent.event.id),
        ("content-type", "application/json"),
        ("airtight-stream", "test.stream"),
        ("airtight-event-type", "Tested"),
        ("airtight-aggregate-type", "Test"),
        ("airtight-aggregate-id", "key-7"),
        ("airtight-seq", "7"),
        ("airtight-attempt", "2"),
        ("airtight-op", "upsert"),
        ("traceparent", trace),
        ("x-tenant", "one"),
        ("user-agent", concat!("airtight/", env!("CARGO_PKG_VERSION"))),
    ] {
        assert_eq!(request.header(name), Some(value), "{name}");
    }
    assert!(request.header("authorization").is_none());
    let timestamp: i64 = request.header("webhook-timestamp").unwrap().parse().unwrap();
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!(timestamp.unsigned_abs().abs_diff(now) < 60, "{timestamp} is not now");
    let signatures: Vec<&str> = request.header("webhook-signature").unwrap().split(' ').collect();
    assert_eq!(signatures.len(), 2, "one signature per secret");
    let key = STANDARD.decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
    for (signature, key) in signatures.iter().zip([key.as_slice(), b"other-secret"]) {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        mac.update(&[format!("{}.{timestamp}.", sent.event.id).as_bytes(), &request.body].concat());
        mac.verify_slice(&STANDARD.decode(signature.strip_prefix("v1,").unwrap()).unwrap()).unwrap();
    }
}

#[tokio::test]
async fn without_a_secret_nothing_is_signed_and_raw_is_raw() {
    let server = HttpServer::start().await;
    let sink = WebhookSink::new(WebhookConfig::new(server.url("/")).format(Format::Raw)).unwrap();
    send(&sink, delivery(7)).await.unwrap();
    let request = server.wait_for(1).await.remove(0);
    assert_eq!(request.body, b"{\"n\":7}");
    assert!(request.header("webhook-signature").is_none());
}

#[tokio::test]
async fn credentials_in_the_url_become_basic_authentication_and_are_never_shown() {
    let server = HttpServer::start().await;
    server.rule(|_| Reply::status(403));
    let url = format!("http://us%40er:hunter2@{}/path-hunter2?token=hunter2", server.addr());
    let sink = WebhookSink::new(WebhookConfig::new(url).secret("hunter2")).unwrap();
    let refused = failure(&sink).await;
    let request = server.wait_for(1).await.remove(0);
    // `us@er:hunter2`
    assert_eq!(request.header("authorization"), Some("Basic dXNAZXI6aHVudGVyMg=="));
    assert_eq!(request.header("host"), Some(server.addr().to_string().as_str()));
    server.stop().await;
    let gone = failure(&sink).await;
    for shown in [format!("{sink:?}"), format!("{refused:?}"), format!("{gone:?}")] {
        assert!(shown.contains(&server.addr().to_string()), "{shown} should say where");
        assert!(
            !shown.contains("hunter2") && !shown.contains("us@er") && !shown.contains("us%40er"),
            "{shown}"
        );
    }
}

#[tokio::test]
async fn an_answer_decides_the_class_and_is_quoted() {
    for (status, class) in [
        (400, Class::Permanent),
        (401, Class::Unavailable),
        (404, Class::Unavailable),
        (409, Class::Permanent),
        (422, Class::Permanent),
        (429, Class::Retryable),
        (500, Class::Retryable),
        (503, Class::Retryable),
    ] {
        let error = failure_of(Reply::status(status).body("because\r\n\u{1b}[31mof \u{fc}")).await;
        assert_eq!((error.class(), error.code()), (class, format!("http_{status}").as_str()));
        assert!(error.message().contains(&status.to_string()), "{error}");
        assert!(error.message().ends_with(": because   [31mof \u{fc}"), "{error}");
    }
    let error = failure_of(Reply::status(500).body("x".repeat(10_000))).await;
    assert!(error.message().len() < 300, "{error}");
}

#[tokio::test]
async fn any_2xx_is_delivered_whatever_becomes_of_its_body() {
    let server = HttpServer::start().await;
    let sink = sink(&server);
    let good = [
        Reply::status(200),
        Reply::status(202).body("accepted"),
        Reply::status(204),
        Reply::status(200).body("half of this is lost").torn(),
        Reply::status(200).stalled(),
        Reply::status(200).endless(),
    ];
    for (seq, reply) in (1..).zip(good) {
        let shown = format!("{reply:?}");
        server.script([reply]);
        let began = Instant::now();
        send(&sink, delivery(seq)).await.expect(&shown);
        assert!(began.elapsed() < Duration::from_secs(5), "{shown} held up the sink");
    }
}

#[tokio::test]
async fn a_refusal_that_streams_for_ever_is_cut_off() {
    let began = Instant::now();
    let error = failure_of(Reply::status(503).body("all work and no play ").endless()).await;
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(error.message().contains("all work and no play") && error.message().len() < 300, "{error}");
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let server = HttpServer::start().await;
    let sink = sink(&server);
    server.script([Reply::status(308).header("location", "/elsewhere?token=hunter2")]);
    let error = failure(&sink).await;
    assert_eq!(error.class(), Class::Unavailable);
    let target = format!("redirects to {}", server.url("/elsewhere"));
    assert!(error.to_string().contains(&target) && error.to_string().contains("set `url`"), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
    server.script([Reply::status(301).header("location", "https://user:hunter2@shop.example/hooks")]);
    let error = failure(&sink).await;
    assert!(error.message().contains("redirects to https://shop.example (the same path)"), "{error}");
    server.script([Reply::status(302)]);
    assert_eq!(failure(&sink).await.class(), Class::Unavailable);
    assert_eq!(server.requests().len(), 3, "a redirect was followed");
}

#[tokio::test]
async fn retry_after_is_passed_on() {
    let after = async |status, value: &str| {
        failure_of(Reply::status(status).header("retry-after", value)).await.retry_after()
    };
    assert_eq!(after(429, "7").await, Some(Duration::from_secs(7)));
    assert_eq!(after(503, "Thu, 31 Dec 2099 23:59:59 GMT").await, Some(Duration::from_secs(86_400)));
    assert_eq!(after(503, "whenever").await, None);
    assert_eq!(after(422, "7").await, None, "what is permanent is not tried again");
}

#[tokio::test]
async fn silence_is_retryable_and_nobody_there_is_unavailable() {
    let server = HttpServer::start().await;
    let config = || WebhookConfig::new(server.url("/")).timeout(Duration::from_millis(300));
    let sink = WebhookSink::new(config()).unwrap();
    server.script([Reply::hang()]);
    let error = failure(&sink).await;
    assert_eq!((error.class(), error.code()), (Class::Retryable, "timeout"), "{error}");
    assert!(error.message().contains("300ms"), "{error}");

    server.script([Reply::status(200).delay(Duration::from_secs(60))]);
    assert_eq!(failure(&sink).await.code(), "timeout");

    server.script([Reply::no_answer()]);
    let error = failure(&sink).await;
    assert_eq!((error.class(), error.code()), (Class::Retryable, "connection_lost"), "{error}");

    server.stop().await;
    let error = failure(&sink).await;
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unreachable"), "{error}");
    assert!(error.message().contains("refused"), "{error}");

    // Some resolvers say no at once, others let one wait.
    let nowhere = WebhookConfig::new("http://nowhere.invalid/").connect_timeout(Duration::from_secs(1));
    let nowhere = WebhookSink::new(nowhere).unwrap();
    let error = failure(&nowhere).await;
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unreachable"), "{error}");
}

/// A port whose queue is full drops what comes next, as a firewall would.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_host_that_drops_packets_is_unavailable() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let listener = socket.listen(1).unwrap();
    let addr = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    let connect = || tokio::time::timeout(Duration::from_millis(200), tokio::net::TcpStream::connect(addr));
    while let Ok(connected) = connect().await {
        queued.push(connected.unwrap());
        assert!(queued.len() < 64, "the queue of one connection never fills");
    }
    let config = WebhookConfig::new(format!("http://{addr}/")).timeout(Duration::from_millis(500));
    let error = failure(&WebhookSink::new(config).unwrap()).await;
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unreachable"), "{error}");
    assert!(error.message().contains("within 450ms"), "{error}");
}

#[tokio::test]
async fn connections_are_used_again() {
    let server = HttpServer::start().await;
    let sink = sink(&server);
    server.rule(|_| Reply::status(200).body("y".repeat(10_000)));
    for seq in 1..=20 {
        send(&sink, delivery(seq)).await.unwrap();
    }
    server.rule(|_| Reply::status(500).body("a refusal is read to its end as well"));
    for _ in 0..20 {
        failure(&sink).await;
    }
    assert_eq!(server.requests().len(), 40);
    assert_eq!(server.connections(), 1);
    server.script([Reply::status(200).then_close()]);
    send(&sink, delivery(50)).await.unwrap();
}

#[tokio::test]
async fn a_slow_answer_delays_nobody_else() {
    let server = HttpServer::start().await;
    server.rule(|request| match request.header("airtight-seq") {
        Some("1") => Reply::hang(),
        _ => Reply::status(200),
    });
    let sink = WebhookSink::new(WebhookConfig::new(server.url("/")).concurrency(4)).unwrap();
    let capabilities = sink.capabilities();
    assert_eq!((capabilities.concurrency, capabilities.max_batch_events), (4, 1));
    let slow = send(&sink, delivery(1));
    let others = async {
        for seq in 2..=10 {
            send(&sink, delivery(seq)).await.unwrap();
        }
    };
    tokio::select! {
        biased;
        _ = slow => panic!("this one hangs"),
        () = others => {}
    }
    assert_eq!(server.requests().len(), 10);
}

#[tokio::test]
async fn the_proxy_is_the_configured_one() {
    let proxy = HttpServer::start().await;
    let config = WebhookConfig::new("http://shop.example/hooks").proxy(proxy.url("/"));
    send(&WebhookSink::new(config).unwrap(), delivery(1)).await.unwrap();
    assert_eq!(proxy.wait_for(1).await[0].target, "http://shop.example/hooks");
}

/// Proxies refuse a large body after its head, and hang up on the rest.
#[tokio::test]
async fn a_refusal_before_the_body_was_sent_counts() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_buf(&mut Vec::with_capacity(2048)).await.unwrap();
        stream.write_all(b"HTTP/1.1 413 Large\r\ncontent-length: 8\r\n\r\ntoo much").await.unwrap();
    });
    let sink = WebhookSink::new(WebhookConfig::new(url).format(Format::Raw)).unwrap();
    let mut large = delivery(1);
    large.event.payload = Payload::Bytes(vec![0; 16 << 20].into());
    let error = send(&sink, large).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Permanent, "http_413"), "{error}");
    serving.await.unwrap();
}

#[tokio::test]
async fn fields_in_the_url_are_expanded_and_encoded() {
    let server = HttpServer::start().await;
    let config = WebhookConfig::new(server.url("/hooks/{aggregate_type}?key={aggregate_id}&token=hunter2"));
    let sink = WebhookSink::new(config).unwrap();
    let mut sent = delivery(1);
    sent.event.aggregate_id = "a/b&c=d".into();
    let preview = sink.preview(&sent.event).unwrap().unwrap();
    assert!(
        preview.destination.ends_with(" with aggregate_type=Test, aggregate_id=a/b&c=d"),
        "{}",
        preview.destination
    );
    assert!(!preview.destination.contains("hunter2"));
    send(&sink, sent).await.unwrap();
    let request = server.wait_for(1).await.remove(0);
    assert_eq!(request.target, "/hooks/Test?key=a%2Fb%26c%3Dd&token=hunter2");

    let error = WebhookSink::new(WebhookConfig::new(server.url("/{agregate_type}"))).unwrap_err();
    assert!(error.message().contains("did you mean `{aggregate_type}`"), "{error}");
}

#[tokio::test]
async fn an_endpoint_that_is_missing_keeps_no_other_waiting() {
    let server = HttpServer::start().await;
    let is_mended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mended = is_mended.clone();
    server.rule(move |request| {
        let is_bad = request.target.ends_with("/bad") && !mended.load(std::sync::atomic::Ordering::SeqCst);
        Reply::status(if is_bad { 404 } else { 200 })
    });
    let sink = WebhookSink::new(WebhookConfig::new(server.url("/hunter2/{stream}"))).unwrap();
    let named = format!("{} with stream=bad", server.url("").trim_end_matches('/'));
    let case =
        airtight_testkit::destinations::OneAway { good: "good", bad: "bad", code: "http_404", named: &named };
    airtight_testkit::destinations::one_away(sink, case, async || {
        is_mended.store(true, std::sync::atomic::Ordering::SeqCst);
    })
    .await;
}

#[tokio::test]
async fn gone_is_for_good_and_nothing_else_is() {
    for (status, is_lasting) in [(410, true), (404, false), (401, false), (503, false)] {
        let error = failure_of(Reply::status(status)).await;
        assert_eq!((error.is_lasting(), error.destination()), (is_lasting, None), "{status}");
    }
}

/// A proxy is gone through where the config says so, and the certificates of a file are trusted instead of the system's.
#[tokio::test]
async fn a_proxy_and_a_ca_are_what_the_config_says() {
    let proxy = HttpServer::start().await;
    let sink =
        WebhookSink::new(WebhookConfig::new("http://shop.invalid/hooks").proxy(proxy.url("/"))).unwrap();
    send(&sink, delivery(1)).await.unwrap();
    assert_eq!(proxy.wait_for(1).await[0].target, "http://shop.invalid/hooks");

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.pem");
    for (content, expected) in [(None, "cannot be used"), (Some(""), "holds no certificate")] {
        if let Some(content) = content {
            std::fs::write(&file, content).unwrap();
        }
        let error = WebhookSink::new(WebhookConfig::new("https://shop.example/").ca(&file)).unwrap_err();
        assert!(error.message().contains("`ca`") && error.message().contains(expected), "{error}");
    }
    std::fs::write(&file, rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap().cert.pem())
        .unwrap();
    let error = WebhookSink::new(WebhookConfig::new("http://shop.example/").ca(&file)).unwrap_err();
    assert!(error.message().contains("needs TLS"), "{error}");
}
