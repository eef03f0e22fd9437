//! The sink conformance suite against a real Redis that fsyncs every write, restarts and crashes included.
//!
//! There is no `refuse` hook: nothing in Redis refuses one event for good but its size. What the suite would check
//! with it, `tests/redis.rs` does by other means: keys of the wrong type, a full server, an entry that is too large.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_redis::RedisSink;
use airtight_testkit::{
    brokers::redis::RedisServer,
    sinks::{Hooks, Received, SinkUnderTest, conformance},
};
use async_trait::async_trait;

const STREAM: &str = "conformance.stream";

/// A server with the user `app`, and how it is taken away.
struct Redis {
    server: RedisServer,
    format: &'static str,
    crashes: bool,
    /// What turns everyone away, and what lets them in again.
    away: [&'static str; 2],
}

impl Redis {
    async fn start(test_name: &str) -> Option<RedisServer> {
        RedisServer::start_with(test_name, &[("user", "app on >hunter2 ~* &* +@all")]).await
    }
}

#[async_trait]
impl SinkUnderTest for Redis {
    type Sink = RedisSink;

    async fn sink(&self) -> RedisSink {
        let port = self.server.port();
        support::sink_at(&format!("redis://app:hunter2@127.0.0.1:{port}?format={}", self.format))
    }

    async fn received(&self) -> Vec<Received> {
        let entries = support::entries(&self.server, STREAM).await;
        let read = entries.into_iter().map(|entry| match self.format {
            "envelope" => Received::from_envelope(&entry["payload"]).expect("an envelope"),
            _ => Received {
                id: support::text(&entry, "id"),
                key: support::text(&entry, "aggregateId"),
                seq: support::text(&entry, "seq").parse().unwrap(),
                body: entry.get("payload").cloned().unwrap_or_default(),
            },
        });
        read.collect()
    }

    fn hooks(&self) -> Hooks {
        Hooks { can_restart: true, can_refuse: false, can_be_unavailable: true }
    }

    async fn stop(&self) {
        if self.crashes { self.server.kill().await } else { self.server.stop().await }
    }

    async fn start(&self) {
        self.server.start_again().await;
    }

    async fn turn_away(&self, everyone: bool) {
        let [away, back] = self.away;
        support::run(&self.server, if everyone { away } else { back }).await;
        support::run(&self.server, "CLIENT KILL USER app").await;
    }

    fn large_payload(&self) -> usize {
        4 * 1024 * 1024
    }
}

#[tokio::test]
async fn envelopes_conform() {
    let Some(server) = Redis::start("envelopes_conform").await else { return };
    let away = ["ACL SETUSER app resetpass >rotated", "ACL SETUSER app resetpass >hunter2"];
    conformance(Redis { server, format: "envelope", crashes: false, away }).await;
}

#[tokio::test]
async fn raw_payloads_conform_and_survive_a_crash() {
    let Some(server) = Redis::start("raw_payloads_conform_and_survive_a_crash").await else { return };
    let away = ["ACL SETUSER app -xadd", "ACL SETUSER app +xadd"];
    conformance(Redis { server, format: "raw", crashes: true, away }).await;
}
