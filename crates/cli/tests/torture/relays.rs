//! Three relays before a flaky webhook: joining, leaving, killed, and suspended past their lease.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use airtight_testkit::{
    http::{HttpServer, Reply},
    wait::eventually,
};
use serde_json::Value;

use crate::{
    bank::{Bank, Entry, audit},
    process::RelayProcess,
};

const RELAYS: usize = 3;
const CHAOS: Duration = Duration::from_secs(25);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_relays_keep_every_key_in_order_on_postgres() {
    let Some(bank) = Bank::postgres("three_relays").await else { return };
    chaos(&bank, tempfile::tempdir().unwrap().path()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_relays_keep_every_key_in_order_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let bank = Bank::sqlite(&dir).await;
    chaos(&bank, dir.path()).await;
}

/// What the webhook's side saw.
#[derive(Default)]
struct Seen {
    /// Accepted, in order of arrival.
    accepted: Vec<Entry>,
    last: HashMap<String, i64>,
    /// Requests for an event whose predecessor had not been accepted yet.
    violations: Vec<String>,
    workers: HashSet<String>,
    refused: usize,
}

impl Seen {
    /// Takes or refuses a request, and notes whether it may come now at all.
    fn take(&mut self, worker: &str, entry: Entry) -> u16 {
        self.workers.insert(worker.to_owned());
        let last = self.last.entry(entry.key.clone()).or_default();
        if entry.n > *last + 1 {
            self.violations.push(format!("{worker} sent {entry:?} when {last} was the last accepted"));
        }
        // Some are refused; of those some had an effect, which the sender cannot know.
        let luck = fastrand::u8(..100);
        if luck < 8 {
            self.refused += 1;
            return 503;
        }
        *last = entry.n.max(*last);
        self.accepted.push(entry);
        if luck < 12 { 500 } else { 200 }
    }
}

async fn chaos(bank: &Bank, dir: &Path) {
    let server = HttpServer::start().await;
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let noting = seen.clone();
    server.rule(move |request| {
        let body: Value = serde_json::from_slice(&request.body).expect("an envelope");
        let entry = Entry {
            id: body["eventId"].as_str().unwrap().into(),
            key: body["aggregateId"].as_str().unwrap().into(),
            n: body["payload"]["n"].as_i64().unwrap(),
        };
        Reply::status(noting.lock().unwrap().take(&request.target, entry))
    });

    let writers = bank.start_writers(3, 12, Duration::from_millis(15));
    let start = |name: String| {
        let config = dir.join(format!("{name}.toml"));
        std::fs::write(
            &config,
            format!(
                "[database]\nurl = \"{}\"\n[pipelines.bank]\nlease = \"1s\"\npoll = \"50ms\"\nbatch = 20\nmax_attempts = 100\n\
                 backoff = {{ base = \"30ms\", multiplier = 2.0, cap = \"500ms\", jitter = 0.2 }}\nto = \"{}\"\n",
                bank.url(),
                server.url(&format!("/{name}")),
            ),
        )
        .unwrap();
        RelayProcess::start(["run", "-c", config.to_str().unwrap()])
    };
    let mut relays: Vec<(usize, RelayProcess)> =
        (0..RELAYS).map(|n| (n, start(format!("relay-{n}")))).collect();
    eventually(Duration::from_secs(30), "every relay to get work", async || {
        seen.lock().unwrap().workers.len() == RELAYS
    })
    .await;
    let mut names = RELAYS;
    let mut done: HashMap<&str, usize> = HashMap::new();
    let begun = Instant::now();
    while begun.elapsed() < CHAOS {
        tokio::time::sleep(Duration::from_millis(fastrand::u64(100..900))).await;
        let victim = fastrand::usize(..relays.len());
        let action = ["kill", "stop", "suspend", "suspend", "join"][fastrand::usize(..5)];
        match action {
            "kill" => relays[victim].1.kill(),
            "stop" => relays[victim].1.stop(),
            "suspend" => {
                relays[victim].1.signal("STOP");
                // Past its lease, so that the others take over what it holds.
                tokio::time::sleep(Duration::from_millis(fastrand::u64(1_200..2_200))).await;
                relays[victim].1.signal("CONT");
            }
            _ => {}
        }
        *done.entry(action).or_default() += 1;
        if action != "suspend" {
            // Whoever went is replaced by a newcomer; a join only adds one, and the oldest leaves.
            let newcomer = (names, start(format!("relay-{names}")));
            names += 1;
            if action == "join" {
                relays[victim].1.stop();
            }
            relays[victim] = newcomer;
        }
    }
    writers.stop().await;
    let ledger = bank.ledger().await;
    eventually(Duration::from_secs(90), "everything to arrive", async || {
        let seen = seen.lock().unwrap();
        seen.accepted.iter().map(|entry| &entry.id).collect::<HashSet<_>>().len() >= ledger.len()
    })
    .await;
    // Those who are left give back what they hold, and settle what was delivered.
    for (_, relay) in &mut relays {
        relay.stop();
    }
    let dead: u64 = bank.admin().status().await.unwrap().streams.iter().map(|s| s.dead + s.unknown).sum();
    assert_eq!(dead, 0);
    let seen = seen.lock().unwrap();
    println!(
        "{done:?}; {} committed, {} accepted, {} refused, {} of {names} relays worked",
        ledger.len(),
        seen.accepted.len(),
        seen.refused,
        seen.workers.len()
    );
    assert!(seen.violations.is_empty(), "{} violations: {:?}", seen.violations.len(), &seen.violations[..1]);
    audit(&ledger, &seen.accepted);
    // Newcomers may be killed before they own anything; most are not.
    assert!(seen.workers.len() * 2 >= names, "only {} of {names} relays got work", seen.workers.len());
}
