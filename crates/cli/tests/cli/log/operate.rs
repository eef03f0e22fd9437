//! What operators do with consumers.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use airtight_testkit::http::{HttpServer, Reply};
use serde_json::{Value, json};

use super::{Log, eventually, keys};
use crate::support::Running;

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_sent_back_and_delivers_again() {
    let Some(log) = Log::create("cli_log_seek").await else { return };
    log.publish(&["a", "b", "c", "d"]);
    log.drain("billing", "file:out.ndjson");

    let before = log.consumer("billing");
    let dry = log.run(&["consumers", "seek", "billing", "--to-seq", "1", "--dry-run", "--json"]).json();
    assert_eq!((&dry["dry_run"], &dry["again"], &dry["to"]), (&json!(true), &json!(3), &json!(1)));
    let dry = log.run(&["consumers", "seek", "billing", "--earliest", "--dry-run"]).ok();
    assert_eq!(
        dry,
        "consumer `billing` from seq 4 to 0: 4 events delivered again, 0 skipped, 0 parked events dropped\nnothing was changed\n"
    );
    assert_eq!(log.consumer("billing"), before);
    assert_eq!(log.drain("billing", "file:out.ndjson")["delivered"], 0);

    let done = log.run(&["consumers", "seek", "billing", "--to-seq", "2", "--json"]).json();
    assert_eq!((&done["again"], &done["skipped"]), (&json!(2), &json!(0)));
    log.drain("billing", "file:out.ndjson");
    assert_eq!(log.seqs("out.ndjson"), [1, 2, 3, 4, 3, 4]);

    // By time: everything is younger than an hour, nothing comes after the next.
    let hours = |by: i64| {
        let at = time::OffsetDateTime::now_utc() + time::Duration::hours(by);
        at.format(&time::format_description::well_known::Rfc3339).unwrap()
    };
    let done = log
        .run(&["consumers", "seek", "billing", "--to-time", &hours(-1), "--forget-inbox", "--json"])
        .json();
    assert_eq!((&done["to"], &done["again"], &done["forgotten"]), (&json!(0), &json!(4), &json!(0)));
    let error = log.run(&["consumers", "seek", "billing", "--to-time", &hours(1)]).error(1);
    assert!(error.contains("no event was published at") && error.contains("--latest"), "{error}");

    let done = log.run(&["consumers", "seek", "billing", "--latest", "--yes"]).ok();
    assert!(done.contains("0 events delivered again, 4 skipped"), "{done}");
    assert_eq!(log.drain("billing", "null:")["delivered"], 0);
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_running_relay_follows_a_seek() {
    let Some(log) = Log::create("cli_log_seek_live").await else { return };
    let args =
        ["run", "--read", "log", "--consumer", "live", "--to", "stdout:", "--poll", "20", "--lease", "2"];
    let relay = Running::start(log.command(&args));
    let seq = |line: &str| serde_json::from_str::<Value>(line).unwrap()["seq"].clone();
    log.publish(&["a", "b"]);
    assert_eq!((seq(&relay.next_line()), seq(&relay.next_line())), (1.into(), 2.into()));
    eventually("its offset is stored", || log.consumer("live")["offset"] == 2);
    let shown = log.consumer("live");
    assert_eq!(shown["offsets"][0]["owner"], shown["instances"][0]["id"], "{shown}");
    let error = log.run(&["consumers", "remove", "live", "--yes"]).error(1);
    assert!(error.contains("works for consumer `live`: stop it first"), "{error}");

    log.run(&["consumers", "seek", "live", "--to-seq", "1"]).ok();
    assert_eq!(seq(&relay.next_line()), 2);
    relay.signal("TERM");
    let (status, rest) = relay.wait();
    assert!(status.success(), "{rest}");
    assert_eq!(log.run(&["consumers", "remove", "live", "--yes"]).ok(), "consumer `live` removed\n");
    assert_eq!(log.run(&["consumers", "list", "--json"]).json(), json!([]));
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_consumer_stands_still() {
    let Some(log) = Log::create("cli_log_pause").await else { return };
    log.drain("billing", "null:");
    assert_eq!(log.run(&["consumers", "pause", "billing"]).ok(), "consumer `billing` is paused\n");
    assert_eq!(log.run(&["consumers", "list", "--json"]).json()[0]["paused"], true);
    assert!(log.run(&["consumers", "list"]).ok().contains("paused"));
    let drain = ["run", "--read", "log", "--consumer", "billing", "--to", "null:", "--drain"];
    let error = log.run(&drain).error(1);
    assert!(error.contains("airtight consumers resume billing"), "{error}");

    let relay = Running::start(log.command(&[
        "run",
        "--read",
        "log",
        "--consumer",
        "billing",
        "--to",
        "stdout:",
        "--lease",
        "2",
    ]));
    eventually("it is there", || log.consumer("billing")["instances"][0].is_object());
    log.publish(&["a"]);
    assert_eq!(log.consumer("billing")["offset"], 0);
    let resumed = log.run(&["consumers", "resume", "billing", "--json"]).json();
    assert_eq!(resumed, json!({"consumer": "billing", "paused": false}));
    assert!(relay.next_line().contains("\"seq\":1"));
}

/// A receiver that refuses everything until told otherwise.
pub(super) async fn moody() -> (HttpServer, Arc<AtomicBool>) {
    let server = HttpServer::start().await;
    let accepts = Arc::new(AtomicBool::new(false));
    let mood = accepts.clone();
    server.rule(move |_| Reply::status(if mood.load(Ordering::Relaxed) { 204 } else { 422 }));
    (server, accepts)
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_each_consumer_wait_for_a_person() {
    let Some(log) = Log::create("cli_log_dead").await else { return };
    let (server, accepts) = moody().await;
    let to = server.url("/");
    log.publish(&["a", "b"]);
    assert_eq!(log.drain("billing", &to)["dead"], 2);
    assert_eq!(log.drain("mail", &to)["dead"], 2);

    let dead = log.run(&["dead", "list", "--json"]).json();
    assert_eq!(keys(&dead, "consumer"), ["billing", "mail", "billing", "mail"]);
    assert_eq!((&dead[0]["error_code"], &dead[0]["state"]), (&json!("http_422"), &json!("dead")), "{dead}");
    let dead = log.run(&["dead", "list", "--consumer", "mail", "--key", "b", "--json"]).json();
    assert_eq!(keys(&dead, "seq"), [2]);
    let parked =
        log.run(&["consumers", "parked", "mail", "--dead", "--error-code", "http_422", "--json"]).json();
    assert_eq!(keys(&parked, "seq"), [1, 2]);
    assert!(log.run(&["consumers", "parked", "mail"]).ok().contains("http_422"));
    let status = log.run(&["status"]).ok();
    assert!(status.contains("4 dead letters to decide about"), "{status}");

    let error = log.run(&["dead", "show", "1"]).error(1);
    assert_eq!(error, "error: event `1` is parked for billing, mail: choose one with --consumer NAME");
    let shown = log.run(&["dead", "show", "1", "--consumer", "mail", "--json"]).json();
    assert_eq!((&shown["consumer"], &shown["event"]["aggregateId"]), (&json!("mail"), &json!("a")));
    // The id serves as well as the seq.
    let id = shown["id"].as_str().unwrap();
    let shown = log.run(&["dead", "show", id, "--consumer", "billing"]).ok();
    assert!(shown.starts_with("consumer    billing\n") && shown.contains("http_422"), "{shown}");
    let error = log.run(&["dead", "show", "77"]).error(1);
    assert_eq!(error, "error: no event `77` is parked; give an id or a seq");

    assert_eq!(log.run(&["dead", "retry", id, "--consumer", "billing"]).ok(), format!("{id}: due now\n"));
    let error = log.run(&["dead", "retry", "77", "--consumer", "billing"]).error(1);
    assert_eq!(error, "error: 77: there is no such event");
    accepts.store(true, Ordering::Relaxed);
    assert_eq!(log.drain("billing", &to)["delivered"], 1);
    assert_eq!(log.drain("mail", &to)["delivered"], 0, "nobody has retried for it");
    let shown = log.consumer("billing");
    assert_eq!((&shown["dead"], &shown["retrying"]), (&json!(1), &json!(0)), "{shown}");

    assert_eq!(log.run(&["dead", "discard", "2", "--consumer", "billing"]).ok(), "2: discarded\n");
    assert_eq!(
        log.run(&["dead", "retry", "--all", "--consumer", "mail", "--key", "a"]).ok(),
        "1 dead letter due now\n"
    );
    assert_eq!(log.drain("mail", &to)["delivered"], 1);
    assert_eq!(log.run(&["dead", "discard", "--all", "--yes", "--json"]).json()["discarded"], 1);
    assert_eq!(log.run(&["dead", "list"]).ok(), "no dead letters\n");
    assert_eq!(
        keys(&log.run(&["events", "list", "--json"]).json(), "seq"),
        [1, 2],
        "the log keeps its events"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_event_is_set_aside_and_its_key_waits_for_it() {
    let Some(log) = Log::create("cli_log_park").await else { return };
    let server = HttpServer::start().await;
    let tried = AtomicBool::new(false);
    let seq = |body: &[u8]| serde_json::from_slice::<Value>(body).unwrap()["seq"].as_i64();
    server.rule(move |request| {
        let first = seq(&request.body) == Some(1) && !tried.swap(true, Ordering::Relaxed);
        Reply::status(if first { 500 } else { 204 })
    });
    log.publish(&["a", "a", "b"]);
    let summary = log.drain("billing", &server.url("/"));
    assert_eq!((&summary["delivered"], &summary["retried"]), (&json!(3), &json!(1)), "{summary}");
    let seqs: Vec<i64> = server.requests().iter().filter_map(|request| seq(&request.body)).collect();
    let of_a: Vec<i64> = seqs.iter().copied().filter(|seq| *seq < 3).collect();
    assert_eq!(of_a, [1, 1, 2], "{seqs:?}");
    assert_eq!(log.run(&["consumers", "parked", "billing"]).ok(), "no parked events\n");

    // Going back drops what is parked, since it comes again.
    server.rule(|_| Reply::status(422));
    log.publish(&["c"]);
    assert_eq!(log.drain("billing", &server.url("/"))["dead"], 1);
    let done = log.run(&["consumers", "seek", "billing", "--to-seq", "3", "--json"]).json();
    assert_eq!((&done["again"], &done["parked_dropped"]), (&json!(1), &json!(1)), "{done}");
    assert_eq!(log.run(&["dead", "list"]).ok(), "no dead letters\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn halting_stops_at_the_event_that_fails() {
    let Some(log) = Log::create("cli_log_halt").await else { return };
    let (server, accepts) = moody().await;
    let to = server.url("/");
    // Of one key: the second is not even tried.
    log.publish(&["a", "a"]);
    let args =
        ["run", "--read", "log", "--consumer", "strict", "--on-failure", "halt", "--to", &to, "--drain"];
    let error = log.run(&args).error(1);
    assert!(
        error.contains("consumer `strict` halts at seq 1") && error.contains("422 Unprocessable"),
        "{error}"
    );
    assert!(error.contains("airtight consumers seek strict --to-seq 1"), "{error}");
    assert_eq!(server.requests().len(), 1);
    let shown = log.consumer("strict");
    assert_eq!((&shown["offset"], &shown["dead"]), (&json!(0), &json!(0)), "nothing is parked: {shown}");
    accepts.store(true, Ordering::Relaxed);
    assert!(log.run(&args).ok().starts_with("delivered 2 events"));
}

#[tokio::test(flavor = "multi_thread")]
async fn retention_waits_for_consumers_unless_told_otherwise() {
    let Some(log) = Log::create("cli_log_prune").await else { return };
    log.publish(&["a", "b", "c"]);
    log.drain("fast", "null:");
    log.drain("slow", "null:");
    log.run(&["consumers", "seek", "slow", "--to-seq", "1"]).ok();

    for _ in 0..2 {
        let dry = log.run(&["prune", "--keep", "0s", "--dry-run", "--json"]).json();
        assert_eq!(
            (&dry["events"], &dry["floor"], &dry["held_by"], &dry["by"]),
            (&json!(1), &json!(0), &json!("slow"), &json!("created_at"))
        );
    }
    let pruned = log.run(&["prune", "--keep", "0s", "--json"]).json();
    assert_eq!(
        (&pruned["events"], &pruned["floor"], &pruned["held_by"]),
        (&json!(1), &json!(1), &json!("slow"))
    );
    let human = log.run(&["prune", "--keep", "0s"]).ok();
    assert!(
        human.starts_with(
            "removed 0 events of the log, 0 partitions dropped whole; all events up to seq 1 are removed\n\
             events are kept for 0s, by created_at (--keep)\n"
        ),
        "{human}"
    );
    assert!(
        human.contains("consumer `slow` has not seen them")
            && human.contains("airtight consumers remove slow"),
        "{human}"
    );
    let error = log.run(&["consumers", "seek", "slow", "--to-seq", "0"]).error(1);
    assert!(error.contains("removed by retention") && error.contains("--earliest"), "{error}");
    let error = log.run(&["consumers", "seek", "slow", "--to-time", "2001-01-01T00:00:00Z"]).error(1);
    assert!(error.contains("removed by retention") && error.contains("--earliest"), "{error}");
    assert_eq!(log.consumer("slow")["offset"], 1, "nothing moved");

    let ran = log.run(&["prune", "--keep", "0s", "--ignore-consumers"]);
    assert!(ran.stderr.contains("now behind retention: slow"), "{ran:?}");
    assert!(ran.ok().starts_with("removed 2 events of the log, whether consumers have seen them or not"));
    assert_eq!(log.consumer("slow")["behind_retention"], true);
    assert!(log.run(&["consumers", "list"]).ok().contains("behind retention"));
    assert!(log.run(&["consumers", "show", "slow"]).ok().contains("airtight consumers seek slow --earliest"));
    assert_eq!(log.run(&["check"]).code, Some(1));
    let error = log.run(&["run", "--read", "log", "--consumer", "slow", "--to", "null:", "--drain"]).error(1);
    assert!(error.contains("stands at seq 1") && error.contains("Rebuilding a consumer"), "{error}");

    log.run(&["consumers", "seek", "slow", "--earliest"]).ok();
    log.publish(&["d"]);
    assert_eq!(log.drain("slow", "null:")["delivered"], 1);
}
