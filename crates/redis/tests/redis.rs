//! The Redis sink against real servers: what arrives, that a key stays in order whatever is refused, and what each
//! kind of trouble is called.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::{collections::HashSet, time::Instant};

use airtight_core::{
    Class, Outcome, Payload, Sink,
    format::{Format, Incoming, decode},
};
use airtight_testkit::{
    brokers::redis::RedisServer,
    deliveries::{delivery, error_of, letters, of, sample_event},
    ports::Port,
};
use support::*;

/// The first so many numbers.
fn up_to(count: usize) -> Vec<i64> {
    (0..).take(count).collect()
}

#[tokio::test]
async fn every_format_arrives_and_is_what_preview_shows() {
    let Some(server) = RedisServer::start("every_format_arrives").await else { return };
    for format in Format::ALL.into_iter().chain([airtight_debezium::FORMAT]) {
        let sink = sink(&server, &format!("?format={0}&key={0}.%7Bstream%7D", format.as_str()));
        let mut events: Vec<_> = (1..=3).map(|seq| sample_event(seq, "naïve ключ\r\n")).collect();
        events[0].headers.insert("traceparent".into(), "00-4bf92f3577b34da6-00f067aa-01".into());
        events[1].payload = Payload::Bytes(vec![0, 255, 13, 10].into());
        events[2].payload = Payload::None;
        let deliveries: Vec<_> = events.iter().cloned().map(of).collect();
        // A request of several, and one alone.
        assert_eq!(letters(&sink.deliver(&deliveries[..2]).await), "dd");
        send(&sink, deliveries[2].clone()).await.unwrap();

        let key = format!("{}.test.stream", format.as_str());
        let entries = entries(&server, &key).await;
        assert_eq!(entries.len(), 3);
        for (event, entry) in events.iter().zip(&entries) {
            let shown = sink.preview(event).unwrap().unwrap();
            assert_eq!(shown.destination, format!("stream {key}"));
            assert_eq!(entry.get("payload").map(Vec::as_slice), shown.body.as_deref(), "{format:?}");
            for (name, value) in &shown.headers {
                assert_eq!(&text(entry, name), value, "{format:?}");
            }
            assert_eq!(entry.len(), shown.headers.len() + usize::from(shown.body.is_some()), "{format:?}");

            // And it can be read back.
            let headers = entry.iter().filter(|(name, _)| *name != "payload");
            let incoming = Incoming {
                topic: &key,
                body: entry.get("payload").map(|body| body.clone().into()),
                headers: headers.map(|(name, value)| (name.as_str(), value.as_slice())).collect(),
                ..Incoming::default()
            };
            let back = decode(format, &incoming).unwrap();
            assert_eq!((&back.id, &back.payload), (&event.id, &event.payload), "{format:?}");
        }
    }
}

#[tokio::test]
async fn a_refused_event_keeps_the_rest_of_its_key_out() {
    let Some(server) = RedisServer::start("a_refused_event_keeps_the_rest").await else { return };
    run(&server, "SET Blocked something").await;
    let sink = sink(&server, "?key=%7Bevent_type%7D&format=raw");
    // One request. The second event of `a` goes to a key that is no stream.
    let mut batch: Vec<_> =
        (1..=6).map(|seq| delivery(seq, if [1, 2, 4, 6].contains(&seq) { "a" } else { "b" })).collect();
    batch[1].event.event_type = "Blocked".into();
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "dudsds");
    let error = error_of(&outcomes[1]);
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "wrong_type"), "{error}");
    assert!(error.message().contains("`Blocked`"), "{error}");
    assert_eq!(seqs(&server, "Tested").await, [1, 3, 5]);

    run(&server, "DEL Blocked").await;
    let again: Vec<_> = [1, 3, 5].map(|at| batch[at].clone()).into();
    assert_eq!(letters(&sink.deliver(&again).await), "ddd");
    assert_eq!(seqs(&server, "Tested").await, [1, 3, 5, 4, 6]);
}

#[tokio::test]
async fn a_guilty_event_stops_its_key_over_many_requests_and_nobody_else() {
    let Some(server) = RedisServer::start("a_guilty_event_stops_its_key").await else { return };
    let sink = sink(&server, "?key=%7Bheader.tenant%7D&format=raw");
    let mut batch: Vec<_> =
        (0..1_000).map(|seq| delivery(seq, if seq % 2 == 0 { "even" } else { "odd" })).collect();
    for delivery in &mut batch {
        delivery.event.headers.insert("tenant".into(), "t".into());
    }
    batch[100].event.headers.clear();
    let outcomes = sink.deliver(&batch).await;
    for (seq, outcome) in outcomes.iter().enumerate() {
        match seq {
            100 => assert_eq!(error_of(outcome).code(), "missing_field"),
            _ if seq % 2 == 0 && seq > 100 => {
                assert!(matches!(outcome, Outcome::Skipped), "{seq}: {outcome:?}");
            }
            _ => assert!(matches!(outcome, Outcome::Delivered), "{seq}: {outcome:?}"),
        }
    }
    let expected: Vec<i64> = (0..1_000).filter(|seq| seq % 2 == 1 || *seq < 100).collect();
    assert_eq!(seqs(&server, "t").await, expected);
}

#[tokio::test]
async fn a_server_that_fills_up_holds_a_prefix_of_each_key_and_goes_on_when_there_is_room() {
    let Some(server) = RedisServer::start("a_server_that_fills_up").await else { return };
    let sink = sink(&server, "?format=raw");
    sink.open().await.unwrap();
    let batch: Vec<_> = (0..1_000)
        .map(|seq| {
            let mut delivery = delivery(seq, &format!("key-{}", seq % 7));
            delivery.event.payload = Payload::Json(format!("\"{}\"", "x".repeat(2_000)).into());
            delivery
        })
        .collect();
    // Room for some of the requests, and not for all.
    let info: String = redis::cmd("INFO").arg("memory").query_async(&mut admin(&server).await).await.unwrap();
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    let room = used.trim().parse::<u64>().unwrap() + 1_000_000;
    run(&server, &format!("CONFIG SET maxmemory {room}")).await;
    let outcomes = sink.deliver(&batch).await;
    let delivered: Vec<i64> = batch
        .iter()
        .zip(&outcomes)
        .filter(|(_, outcome)| matches!(outcome, Outcome::Delivered))
        .map(|(delivery, _)| delivery.event.seq)
        .collect();
    assert!((1..1_000).contains(&delivered.len()), "{} of 1000 were to fit", delivered.len());
    let refused = outcomes.iter().find(|outcome| matches!(outcome, Outcome::Failed(_))).unwrap();
    assert_eq!((error_of(refused).class(), error_of(refused).code()), (Class::Unavailable, "out_of_memory"));
    // What is in is what was reported, and it is a beginning of each key.
    let there = seqs(&server, "test.stream").await;
    assert_eq!(there, delivered);
    assert_eq!(there, up_to(there.len()));

    run(&server, "CONFIG SET maxmemory 0").await;
    assert!(
        sink.deliver(&batch[there.len()..]).await.iter().all(|outcome| matches!(outcome, Outcome::Delivered))
    );
    assert_eq!(seqs(&server, "test.stream").await, up_to(1_000));
}

#[tokio::test]
async fn an_event_over_the_limit_is_refused_alone() {
    let Some(server) = RedisServer::start("an_event_over_the_limit").await else { return };
    run(&server, "CONFIG SET proto-max-bulk-len 1mb").await;
    let large = 6 << 20;
    let mut batch: Vec<_> = (1..=5).map(|seq| delivery(seq, if seq == 5 { "b" } else { "a" })).collect();
    batch[1].event.payload = Payload::Bytes(vec![b'x'; large].into());
    // Just below the limit, as far as it goes: these may travel together.
    batch[0].event.payload = Payload::Bytes(vec![b'x'; (1 << 20) - 2_000].into());

    let sink = sink(&server, "?format=raw");
    let outcomes = sink.deliver(&batch[..1]).await;
    assert_eq!(letters(&outcomes), "d");
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "dpssd");
    let error = error_of(&outcomes[1]);
    assert_eq!((error.class(), error.code()), (Class::Permanent, "too_large"));
    assert!(error.message().contains("6291456") && error.message().contains("1048576"), "{error}");
    assert_eq!(seqs(&server, "test.stream").await, [1, 1, 5]);
}

#[tokio::test]
async fn a_limit_that_nobody_told_costs_the_guilty_event_alone() {
    let settings = [("user", "app on nopass ~* +@all -config -info"), ("proto-max-bulk-len", "1mb")];
    let Some(server) = RedisServer::start_with("a_limit_that_nobody_told", &settings).await else { return };
    let sink = sink_at(&format!("redis://app:any@127.0.0.1:{}?format=raw", server.port()));
    // Neither INFO nor CONFIG, and it works all the same.
    sink.open().await.unwrap();
    let mut batch: Vec<_> = (1..=4).map(|seq| delivery(seq, if seq == 4 { "b" } else { "a" })).collect();
    batch[1].event.payload = Payload::Bytes(vec![b'x'; 6 << 20].into());
    let outcomes = sink.deliver(&batch).await;
    // The server says why and hangs up, and not always is it heard before that.
    assert!(["dpsd", "drsd"].contains(&letters(&outcomes).as_str()), "{outcomes:?}");
    let error = error_of(&outcomes[1]);
    assert!(error.message().contains("too large"), "{error}");
    assert_eq!(seqs(&server, "test.stream").await, [1, 4]);
}

#[tokio::test]
async fn an_event_with_thousands_of_headers_is_delivered_like_any_other() {
    let Some(server) = RedisServer::start("an_event_with_thousands_of_headers").await else { return };
    let sink = sink(&server, "?format=raw");
    let mut batch: Vec<_> = (1..=3).map(|seq| delivery(seq, "a")).collect();
    // More words than fit onto Lua's stack.
    batch[1].event.headers = (0..5_000).map(|n| (format!("h{n}"), "x".to_owned())).collect();
    assert_eq!(letters(&sink.deliver(&batch).await), "ddd");
    assert_eq!(seqs(&server, "test.stream").await, [1, 2, 3]);
}

#[tokio::test]
async fn a_key_that_is_no_stream_keeps_everyone_waiting_and_is_named() {
    let Some(server) = RedisServer::start("a_key_that_is_no_stream").await else { return };
    run(&server, "SET orders something").await;
    let sink = sink(&server, "?key=orders");
    let error = send(&sink, delivery(1, "a")).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "wrong_type"));
    assert!(error.message().contains("`orders`"), "{error}");
}

#[tokio::test]
async fn wrong_credentials_are_unavailable_and_never_shown() {
    let settings = [("requirepass", "secret"), ("user", "app on >hunter2 ~allowed* +@all -eval")];
    let Some(server) = RedisServer::start_with("wrong_credentials", &settings).await else { return };
    let Some(open_house) = RedisServer::start("wrong_credentials").await else { return };
    let (port, open_port) = (server.port(), open_house.port());
    for (url, code) in [
        (format!("redis://127.0.0.1:{port}"), "credentials"),
        (format!("redis://:topsecret@127.0.0.1:{port}"), "credentials"),
        (format!("redis://app:topsecret@127.0.0.1:{port}"), "credentials"),
        (format!("redis://nobody:topsecret@127.0.0.1:{port}"), "credentials"),
        (format!("redis://:topsecret@127.0.0.1:{open_port}"), "credentials"),
        (format!("redis://app:hunter2@127.0.0.1:{port}"), "not_permitted"),
        (format!("redis://127.0.0.1:{open_port}/99"), "no_database"),
    ] {
        let sink = sink_at(&url);
        for error in [sink.open().await.unwrap_err(), send(&sink, delivery(1, "a")).await.unwrap_err()] {
            assert_eq!((error.class(), error.code()), (Class::Unavailable, code), "{url}: {error}");
            assert!(
                !error.message().contains("topsecret") && !error.message().contains("hunter2"),
                "{error}"
            );
        }
        assert!(!format!("{sink:?}").contains("topsecret"));
    }
    // A right that only the key lacks shows when the key is known.
    let mut admin = redis::Client::open(format!("redis://:secret@127.0.0.1:{port}")).unwrap();
    let _: redis::Value = redis::cmd("ACL").arg(&["SETUSER", "app", "+eval"]).query(&mut admin).unwrap();
    let sink = sink_at(&format!("redis://app:hunter2@127.0.0.1:{port}"));
    sink.open().await.unwrap();
    for count in [1, 2] {
        let batch: Vec<_> = (1..=count).map(|seq| delivery(seq, "a")).collect();
        let outcomes = sink.deliver(&batch).await;
        assert_eq!(error_of(&outcomes[0]).code(), "not_permitted");
    }
    let sink = sink_at(&format!("redis://app:hunter2@127.0.0.1:{port}?key=allowed.1"));
    assert_eq!(letters(&sink.deliver(&[delivery(1, "a"), delivery(2, "a")]).await), "dd");
}

#[tokio::test]
async fn the_rights_to_add_and_to_run_a_script_are_enough() {
    let settings = [("user", "app on >hunter2 ~test.stream -@all +xadd +eval")];
    let Some(server) = RedisServer::start_with("the_rights_to_add", &settings).await else { return };
    let sink = sink_at(&format!("redis://app:hunter2@127.0.0.1:{}?format=raw", server.port()));
    sink.open().await.unwrap();
    assert_eq!(letters(&sink.deliver(&[delivery(1, "a"), delivery(2, "a")]).await), "dd");
    assert_eq!(seqs(&server, "test.stream").await, [1, 2]);
}

#[tokio::test]
async fn streams_are_trimmed_by_length_and_by_age() {
    let Some(server) = RedisServer::start("streams_are_trimmed").await else { return };
    let batch: Vec<_> = (1..=1_000).map(|seq| delivery(seq, "a")).collect();
    let sink_by_length = sink(&server, "?key=short&max_len=100&format=raw");
    assert!(sink_by_length.deliver(&batch).await.iter().all(|outcome| matches!(outcome, Outcome::Delivered)));
    let left = seqs(&server, "short").await;
    // Redis removes whole nodes, of a hundred entries at most.
    assert!((100..300).contains(&left.len()), "{} are left", left.len());
    assert_eq!(left.last(), Some(&1_000));

    for n in 1..=300 {
        run(&server, &format!("XADD aged {n} seq {n}")).await;
    }
    let sink_by_age = sink(&server, "?key=aged&max_age=1h&format=raw");
    assert!(sink_by_age.deliver(&batch).await.iter().all(|outcome| matches!(outcome, Outcome::Delivered)));
    let left = seqs(&server, "aged").await;
    assert!((1_000..1_100).contains(&left.len()), "{} are left", left.len());
}

#[tokio::test]
async fn a_replica_is_not_written_to_and_replicas_are_waited_for() {
    let Some(primary) = RedisServer::start("a_replica_is_not_written_to").await else { return };
    // None are there yet.
    let waiting = sink(&primary, "?wait_replicas=1&timeout=30s&format=raw");
    let error = waiting.open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "too_few_replicas"));
    let impatient = sink(&primary, "?wait_replicas=1&timeout=2s&format=raw");
    let error = send(&impatient, delivery(1, "a")).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "too_few_replicas"));

    let of = format!("127.0.0.1 {}", primary.port());
    let settings = [("replicaof", of.as_str())];
    let Some(replica) = RedisServer::start_with("a_replica_is_not_written_to", &settings).await else {
        return;
    };
    airtight_testkit::wait::eventually(PATIENCE, "the replica to be there", async || {
        waiting.open().await.is_ok()
    })
    .await;
    assert_eq!(letters(&waiting.deliver(&[delivery(2, "a"), delivery(3, "a")]).await), "dd");
    assert_eq!(seqs(&replica, "test.stream").await, [1, 2, 3]);

    let wrong = sink(&replica, "");
    let error = wrong.open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "read_only"));
    assert!(error.to_string().contains(&primary.port().to_string()), "{error}");
    for count in [1, 2] {
        let batch: Vec<_> = (1..=count).map(|seq| delivery(seq, "a")).collect();
        assert_eq!(error_of(&wrong.deliver(&batch).await[0]).code(), "read_only");
    }

    replica.suspend();
    let error = send(&impatient, delivery(4, "a")).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "too_few_replicas"));
    replica.resume();
    assert_eq!(letters(&waiting.deliver(&[delivery(4, "a")]).await), "d");
}

#[tokio::test]
async fn a_cluster_is_told_that_it_is_none_of_ours() {
    // Its own choice, 10,000 above the port, may be the port of somebody's outgoing connection.
    let bus = Port::reserve();
    let bus_port = bus.to_string();
    let settings = [("cluster-enabled", "yes"), ("cluster-port", &*bus_port)];
    let Some(server) = RedisServer::start_with("a_cluster_is_told", &settings).await else { return };
    let sink = sink(&server, "");
    for error in [sink.open().await.unwrap_err(), send(&sink, delivery(1, "a")).await.unwrap_err()] {
        assert_eq!((error.class(), error.code()), (Class::Unavailable, "cluster"), "{error}");
        assert!(error.message().contains("does not support"), "{error}");
    }
}

#[tokio::test]
async fn what_was_reported_delivered_survives_crashes_in_order() {
    let Some(server) = RedisServer::start("what_was_reported_delivered").await else { return };
    let sink = sink(&server, "?format=raw&timeout=2s");
    let mut delivered: Vec<i64> = Vec::new();
    let deliver = async {
        let mut next = 0;
        while next < 4_000 {
            let batch: Vec<_> = (next..next + 50).map(|seq| delivery(seq, "one")).collect();
            let outcomes = sink.deliver(&batch).await;
            let count = outcomes.iter().take_while(|outcome| matches!(outcome, Outcome::Delivered)).count();
            assert!(!outcomes[count..].iter().any(|outcome| matches!(outcome, Outcome::Delivered)));
            for outcome in &outcomes[count..] {
                if let Outcome::Failed(error) = outcome {
                    assert_eq!(error.class(), Class::Unavailable, "{error}");
                }
            }
            delivered.extend(batch[..count].iter().map(|delivery| delivery.event.seq));
            next = delivered.last().map_or(0, |last| last + 1);
            tokio::task::yield_now().await;
        }
    };
    let crash = async {
        for _ in 0..5 {
            let had = seqs(&server, "test.stream").await.len();
            airtight_testkit::wait::eventually(PATIENCE, "more events", async || {
                seqs(&server, "test.stream").await.len() > had
            })
            .await;
            server.kill().await;
            server.start_again().await;
        }
    };
    tokio::join!(deliver, crash);
    // Repeats there may be; each event's first time comes in order, and none is missing.
    let mut seen = HashSet::new();
    let first: Vec<i64> =
        seqs(&server, "test.stream").await.into_iter().filter(|seq| seen.insert(*seq)).collect();
    assert_eq!(first, delivered);
    assert_eq!(first, up_to(first.len()));
}

#[tokio::test]
async fn a_frozen_server_is_given_up_in_time_and_goes_on() {
    let Some(server) = RedisServer::start("a_frozen_server").await else { return };
    let sink = sink(&server, "?timeout=2s&connect_timeout=2s&format=raw");
    send(&sink, delivery(1, "a")).await.unwrap();
    server.suspend();
    let began = Instant::now();
    let error = send(&sink, delivery(2, "a")).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "timeout"));
    // The connection that says nothing is not used again; a new one says nothing either.
    let error = send(&sink, delivery(2, "a")).await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "timeout"));
    assert!(sink.open().await.is_err());
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    server.resume();
    assert_eq!(letters(&sink.deliver(&[delivery(2, "a"), delivery(3, "a")]).await), "dd");
    let mut arrived = seqs(&server, "test.stream").await;
    arrived.dedup();
    assert_eq!(arrived, [1, 2, 3]);
}

#[tokio::test]
async fn a_server_that_is_back_is_used_at_once() {
    let Some(server) = RedisServer::start("a_server_that_is_back").await else { return };
    let sink = sink(&server, "");
    send(&sink, delivery(1, "a")).await.unwrap();
    server.stop().await;
    // The first may meet the old connection's end; then nobody is there to connect to.
    assert_eq!(send(&sink, delivery(2, "a")).await.unwrap_err().class(), Class::Unavailable);
    assert_eq!(send(&sink, delivery(2, "a")).await.unwrap_err().code(), "unreachable");
    server.start_again().await;
    drop(admin(&server).await);
    let up = Instant::now();
    send(&sink, delivery(2, "a")).await.unwrap();
    // Milliseconds, and seconds on a machine that has much else to do.
    assert!(up.elapsed().as_secs() < 3, "{:?}", up.elapsed());
}

#[tokio::test]
async fn a_connection_that_the_server_closed_in_a_pause_costs_nothing() {
    let Some(server) = RedisServer::start("a_connection_that_the_server_closed").await else { return };
    run(&server, "CONFIG SET timeout 1").await;
    let sink = sink(&server, "?name=rester");
    send(&sink, delivery(1, "a")).await.unwrap();
    airtight_testkit::wait::eventually(PATIENCE, "Redis to close the idle connection", async || {
        let list: String =
            redis::cmd("CLIENT").arg("LIST").query_async(&mut admin(&server).await).await.unwrap();
        !list.contains("name=rester")
    })
    .await;
    send(&sink, delivery(2, "a")).await.unwrap();
}
