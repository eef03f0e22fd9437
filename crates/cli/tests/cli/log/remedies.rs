//! Every remedy that an error about a log prints, executed to the letter after the fault that it is printed for:
//! SQL as it stands, commands as they stand. Afterwards everything that was published since must arrive.

use std::{collections::BTreeSet, sync::atomic::Ordering};

use serde_json::Value;

use super::{Log, operate::moody};

/// What an error offers: SQL behind the marker, or the commands between backticks.
fn remedies(error: &str) -> Vec<String> {
    let (_, remedy) = error.split_once("Fix: ").unwrap_or(("", error));
    let commands: Vec<String> =
        remedy.split('`').filter(|part| part.starts_with("airtight ")).map(str::to_owned).collect();
    if commands.is_empty() { vec![remedy.to_owned()] } else { commands }
}

impl Log {
    async fn follow(&self, remedy: &str) {
        match remedy.strip_prefix("airtight ") {
            Some(command) => {
                let mut args: Vec<&str> = command.split_whitespace().collect();
                // On a terminal it asks, and is told yes.
                if args.starts_with(&["consumers", "seek"]) {
                    args.push("--yes");
                }
                self.run(&args).ok();
            }
            None => self.execute(remedy).await,
        }
    }

    fn publish_numbered(&self, name: &str, count: usize) -> BTreeSet<String> {
        let keys: Vec<String> = (0..count).map(|n| format!("{name}{n}")).collect();
        self.publish(&keys.iter().map(String::as_str).collect::<Vec<_>>());
        keys.into_iter().collect()
    }

    /// The keys in a file of events.
    fn arrived(&self, name: &str) -> BTreeSet<String> {
        let text = std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
        let key = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["aggregateId"].clone();
        text.lines().map(|line| key(line).as_str().expect("a key").to_owned()).collect()
    }
}

const DRAIN: [&str; 8] = ["run", "--read", "log", "--consumer", "c", "--to", "file:c.ndjson", "--drain"];

/// Fifty events delivered, the fault, some more published, the error, its remedy. Returns the error.
async fn nothing_is_lost(test: &str, fault: &str, since: usize) -> String {
    let Some(log) = Log::create(&format!("cli_remedy_{test}")).await else { return String::new() };
    log.publish_numbered("old", 50);
    log.run(&DRAIN).ok();
    log.execute(fault).await;
    let new = log.publish_numbered("new", since);
    let error = log.run(&DRAIN).error(1);
    // Time goes by before anybody reads it.
    let late = log.publish_numbered("late", 20);
    for remedy in remedies(&error) {
        log.follow(&remedy).await;
    }
    log.run(&DRAIN).ok();
    let arrived = log.arrived("c.ndjson");
    let lost: Vec<&String> = new.union(&late).filter(|key| !arrived.contains(*key)).collect();
    assert!(lost.is_empty(), "{fault}: {error}\nlost: {lost:?}");
    println!("{fault}: {} published since, {} lost", new.len() + late.len(), lost.len());
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_set_back() {
    for (n, fault) in [
        "TRUNCATE airtight.outbox RESTART IDENTITY",
        "DELETE FROM airtight.outbox; SELECT setval('airtight.outbox_seq', 1, false)",
        "DELETE FROM airtight.outbox WHERE seq > 20; SELECT setval('airtight.outbox_seq', 20)",
        "DELETE FROM airtight.outbox; ALTER SEQUENCE airtight.outbox_seq RESTART",
    ]
    .into_iter()
    .enumerate()
    {
        for since in [10, 80] {
            let error = nothing_is_lost(&format!("set_back_{n}_{since}"), fault, since).await;
            assert!(error.is_empty() || error.contains("are drawn again"), "{error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_that_does_not_draw_in_order() {
    for (n, fault) in ["CACHE 20", "INCREMENT 2", "CYCLE"].into_iter().enumerate() {
        let fault = format!("ALTER SEQUENCE airtight.outbox_seq {fault}");
        let error = nothing_is_lost(&format!("sequence_{n}"), &fault, 10).await;
        assert!(error.is_empty() || error.contains("values would not be drawn in order"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_a_crash_would_empty() {
    let error = nothing_is_lost("unlogged", "ALTER TABLE airtight.outbox_1 SET UNLOGGED", 10).await;
    assert!(error.is_empty() || error.contains("is not logged"), "{error}");
}

/// What retention has removed is gone. Everything else arrives.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_retention_has_overtaken() {
    let fault = "UPDATE airtight.log SET floor = 40; DELETE FROM airtight.outbox WHERE seq <= 40; \
                 UPDATE airtight.partition SET last_seq = 30 WHERE grp = 'log:c'";
    let error = nothing_is_lost("retention", fault, 10).await;
    assert!(error.is_empty() || error.contains("retention has removed events up to 40"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_is_paused() {
    let error =
        nothing_is_lost("paused", "UPDATE airtight.consumer SET paused = true WHERE name = 'c'", 10).await;
    assert!(error.is_empty() || error.contains("is paused"), "{error}");
}

/// The remedy leaves one event out, as it says, and no other.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_halts() {
    let Some(log) = Log::create("cli_remedy_halt").await else { return };
    let (server, accepts) = moody().await;
    let to = server.url("/");
    log.publish(&["a"; 10]);
    let halting = ["run", "--read", "log", "--consumer", "c", "--on-failure", "halt", "--to", &to, "--drain"];
    let error = log.run(&halting).error(1);
    for remedy in remedies(&error) {
        log.follow(&remedy).await;
    }
    accepts.store(true, Ordering::Relaxed);
    let done = log.run(&halting).ok();
    assert!(done.starts_with("delivered 9 events"), "{error}\n{done}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_without_its_net() {
    let Some(log) = Log::create("cli_remedy_net").await else { return };
    log.execute("DROP TABLE airtight.outbox_default").await;
    let checked = log.run(&["check"]);
    let said = format!("{}{}", checked.stdout, checked.stderr);
    let line = said.lines().find(|line| line.contains("has no DEFAULT partition")).expect(&said);
    for remedy in remedies(line) {
        log.follow(&remedy).await;
    }
    log.execute("SELECT setval('airtight.outbox_seq', 90000000)").await;
    let new = log.publish_numbered("new", 10);
    log.run(&DRAIN).ok();
    assert_eq!(log.arrived("c.ndjson"), new);
}

/// A number is taken: refused, with exit code 1. Another is free and below the consumer's offset: stored there, where nobody
/// would look again.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_that_is_behind_its_table() {
    let Some(log) = Log::create("cli_remedy_behind").await else { return };
    log.publish_numbered("old", 50);
    log.run(&DRAIN).ok();
    log.execute("DELETE FROM airtight.outbox WHERE seq = 25; SELECT setval('airtight.outbox_seq', 23)").await;
    let publish = |key: &'static str| {
        log.run(&["publish", "--stream", "s", "--type", "T", "--aggregate-type", "A", "--key", key, "--json"])
    };
    let error = publish("refused").error(1);
    assert!(error.contains("seq 24 of airtight.outbox is taken"), "{error}");
    assert_eq!(publish("free").json()["seq"], 25);
    for remedy in remedies(&error) {
        log.follow(&remedy).await;
    }
    assert_eq!(publish("again").json()["seq"], 51);
    let error = log.run(&DRAIN).error(1);
    for remedy in remedies(&error) {
        log.follow(&remedy).await;
    }
    log.run(&DRAIN).ok();
    let arrived = log.arrived("c.ndjson");
    assert!(
        arrived.contains("free") && arrived.contains("again") && !arrived.contains("refused"),
        "{arrived:?}"
    );
}
