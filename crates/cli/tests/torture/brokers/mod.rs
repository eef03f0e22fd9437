//! PostgreSQL to a real broker, with relays killed and the broker restarted meanwhile, and a broker that stays away.
//!
//! What arrived is read by a client that shares nothing with the sink. The long form is in CONTRIBUTING:
//! `AIRTIGHT_TORTURE_EVENTS` and `AIRTIGHT_TORTURE_OUTAGE` make it as long as you like.

pub(crate) mod kafka;
mod nats;
mod rabbitmq;
mod redis;

use std::{
    env,
    time::{Duration, Instant},
};

use airtight::admin::Filter;
use async_trait::async_trait;

use crate::{
    bank::{Bank, Entry, audit},
    process::RelayProcess,
};

/// A broker of a test's own.
#[async_trait]
pub(crate) trait Broker: Sync {
    /// Where a relay sends to.
    fn to(&self) -> String;

    /// Ends it as a crash would, where its persistence allows that; else asks it to end.
    async fn stop(&self);

    /// Starts it again, at the same address.
    async fn start(&self);

    /// How many messages it has.
    async fn count(&self) -> usize;

    /// All of them, in order of arrival.
    async fn messages(&self) -> Vec<Entry>;
}

/// What a run is to be like.
pub(crate) struct Plan {
    pub(crate) events: usize,
    pub(crate) keys: usize,
    pub(crate) kills: usize,
    pub(crate) restarts: usize,
}

impl Plan {
    /// Bounded in CI, and as long as the environment says.
    pub(crate) fn new(events: usize, keys: usize) -> Self {
        match number("AIRTIGHT_TORTURE_EVENTS") {
            Some(events) => Self { events, keys, kills: 20, restarts: 3 },
            None => Self { events, keys, kills: 6, restarts: 2 },
        }
    }
}

pub(crate) fn number(variable: &str) -> Option<usize> {
    env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

const WRITERS: usize = 8;

/// Commits, kills, restarts; then looks whether what was committed arrived, in order.
pub(crate) async fn survive(bank: &Bank, broker: &dyn Broker, plan: Plan) {
    let (url, to) = (bank.url(), broker.to());
    let began = Instant::now();
    let writers = bank.start_writers(WRITERS, plan.keys / WRITERS, Duration::from_millis(1));
    let (mut kills, mut worked, mut restarts) = (0, 0, 0);
    let run = ["run", "--from", &url, "--to", &to, "--lease", "1", "--poll", "50"];
    while kills < plan.kills || bank.committed().await < plan.events {
        let before = broker.count().await;
        let mut relay = RelayProcess::start(run);
        tokio::time::sleep(Duration::from_millis(fastrand::u64(1_200..3_500))).await;
        if restarts < plan.restarts && kills >= (restarts + 1) * plan.kills / (plan.restarts + 1) {
            // While the relay sends.
            broker.stop().await;
            broker.start().await;
            restarts += 1;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..3_000))).await;
        }
        let delivered = broker.count().await;
        relay.kill();
        kills += 1;
        worked += usize::from(delivered > before);
    }
    writers.stop().await;
    let drained = RelayProcess::drain(&url, &to);
    let (ledger, arrived) = (bank.ledger().await, broker.messages().await);
    println!(
        "{} committed over {} keys, {} arrived; {kills} kills, {worked} of them after deliveries, {restarts} restarts of the broker; {:.0?}",
        ledger.len(),
        plan.keys,
        arrived.len(),
        began.elapsed()
    );
    audit(&ledger, &arrived);
    assert_eq!(restarts, plan.restarts);
    assert!(worked * 2 >= kills, "only {worked} of {kills} relays lived to deliver anything: no test at all");
    let dead: u64 = bank.admin().status().await.unwrap().streams.iter().map(|s| s.dead + s.unknown).sum();
    assert_eq!(dead, 0, "neither kills nor restarts make an event dead; {drained}");
}

/// How much the relay's memory may grow while its broker is away.
const GROWTH: u64 = 16 << 20;

/// A broker that is away: nothing dies, no attempt is spent, memory stays flat, and delivery goes on soon after.
pub(crate) async fn outlast(bank: &Bank, broker: &dyn Broker) {
    let away = Duration::from_secs(number("AIRTIGHT_TORTURE_OUTAGE").unwrap_or(12) as u64);
    let (url, to) = (bank.url(), broker.to());
    let relay = RelayProcess::start(["run", "--from", &url, "--to", &to, "--poll", "50"]);
    let writers = bank.start_writers(4, 50, Duration::from_millis(4));
    wait(Duration::from_secs(30), "the first deliveries", async || broker.count().await > 100).await;

    let before = relay.resident();
    broker.stop().await;
    let (mut most, end) = (before, Instant::now() + away);
    while Instant::now() < end {
        most = most.max(relay.resident());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    broker.start().await;
    let up = Instant::now();
    let waiting = broker.count().await;
    wait(Duration::from_secs(30), "deliveries to go on", async || broker.count().await > waiting).await;
    let resumed = up.elapsed();
    writers.stop().await;
    let committed = bank.committed().await;
    wait(Duration::from_secs(120), "the backlog to be gone", async || bank.unfinished().await == 0).await;
    println!(
        "away for {away:?}: {committed} committed, memory {} MB before and {} MB at most; deliveries went on {resumed:.1?} after it was up",
        before >> 20,
        most >> 20
    );
    audit(&bank.ledger().await, &broker.messages().await);
    let rows = bank.admin().list(&Filter { limit: 1_000_000, ..Filter::default() }).await.unwrap();
    let spent = rows.iter().filter(|row| row.attempts > 1).count();
    assert_eq!(spent, 0, "{spent} of {} events have spent an attempt on a broker that was away", rows.len());
    assert!(resumed < Duration::from_secs(10), "deliveries went on only {resumed:?} after the broker was up");
    assert!(most < before + GROWTH, "memory grew from {before} to {most} bytes while the broker was away");
}

/// A message that is the envelope of a transfer.
pub(crate) fn entry(body: &[u8]) -> Entry {
    let envelope: serde_json::Value = serde_json::from_slice(body).unwrap();
    Entry {
        id: envelope["eventId"].as_str().unwrap().into(),
        key: envelope["aggregateId"].as_str().unwrap().into(),
        n: envelope["payload"]["n"].as_i64().unwrap(),
    }
}

pub(crate) async fn wait(deadline: Duration, what: &str, condition: impl AsyncFnMut() -> bool) {
    airtight_testkit::wait::eventually(deadline, what, condition).await;
}
