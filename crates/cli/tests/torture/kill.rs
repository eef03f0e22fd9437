//! SIGKILL at random moments, at least 50 times, while transactions commit and roll back.

use std::{path::Path, time::Duration};

use serde_json::Value;

use crate::{
    bank::{Bank, Entry, audit},
    process::RelayProcess,
};

/// At least so many kills, and so many of relays that had delivered something; on a slow machine that takes more.
const KILLS: usize = 50;
const WORKED: usize = 15;
const MOST_KILLS: usize = 150;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_by_50_kills_on_postgres() {
    let Some(bank) = Bank::postgres("kill_50").await else { return };
    let dir = tempfile::tempdir().unwrap();
    survive(&bank, &dir.path().join("out.ndjson")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_by_50_kills_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let bank = Bank::sqlite(&dir).await;
    survive(&bank, &dir.path().join("out.ndjson")).await;
}

async fn survive(bank: &Bank, out: &Path) {
    let (url, to) = (bank.url(), format!("file:{}", out.display()));
    let writers = bank.start_writers(4, 8, Duration::from_millis(8));
    let (mut kills, mut worked) = (0, 0);
    while kills < KILLS || (worked < WORKED && kills < MOST_KILLS) {
        let before = size(out);
        let mut relay = RelayProcess::start([
            "run", "--from", &url, "--to", &to, "--lease", "1", "--poll", "50", "--batch", "50",
        ]);
        // A lease of one second has to run out before the next relay may work, hence the upper end.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(20..1_700))).await;
        relay.kill();
        kills += 1;
        worked += usize::from(size(out) > before);
    }
    writers.stop().await;
    let summary = RelayProcess::drain(&url, &to);

    let arrived = read(out);
    let ledger = bank.ledger().await;
    println!(
        "{kills} kills, {worked} of them after deliveries; {} committed, {} arrived",
        ledger.len(),
        arrived.len()
    );
    audit(&ledger, &arrived);
    assert!(worked >= WORKED, "only {worked} of {kills} relays lived to deliver anything: no test at all");
    assert!(ledger.len() > 500, "only {} events were committed", ledger.len());
    let dead: u64 = bank.admin().status().await.unwrap().streams.iter().map(|s| s.dead + s.unknown).sum();
    assert_eq!(dead, 0, "kills make no event dead; {summary}");
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// What the file sink wrote: every line whole.
fn read(path: &Path) -> Vec<Entry> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| {
            let envelope: Value =
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            Entry {
                id: envelope["eventId"].as_str().unwrap().into(),
                key: envelope["aggregateId"].as_str().unwrap().into(),
                n: envelope["payload"]["n"].as_i64().unwrap(),
            }
        })
        .collect()
}
