//! Redis Streams. Its append-only file is synced at every write, so it may be killed, too.

use airtight_testkit::brokers::redis::RedisServer;
use async_trait::async_trait;
use redis::{
    Client, Commands, Connection,
    streams::{StreamId, StreamRangeReply},
};

use super::{Broker, Plan, entry, outlast, survive};
use crate::bank::{Bank, Entry};

const KEY: &str = "bank";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_between_postgres_and_redis() {
    let test = "nothing_is_lost_between_postgres_and_redis";
    let (Some(bank), Some(redis)) = (Bank::postgres("to_redis").await, RedisServer::start(test).await) else {
        return;
    };
    survive(&bank, &redis, Plan::new(4_000, 400)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_away_costs_nothing() {
    let test = "a_redis_that_is_away_costs_nothing";
    let (Some(bank), Some(redis)) = (Bank::postgres("away_redis").await, RedisServer::start(test).await)
    else {
        return;
    };
    outlast(&bank, &redis).await;
}

#[async_trait]
impl Broker for RedisServer {
    fn to(&self) -> String {
        self.url()
    }

    async fn stop(&self) {
        self.kill().await;
    }

    async fn start(&self) {
        self.start_again().await;
    }

    async fn count(&self) -> usize {
        connection(self).xlen(KEY).unwrap()
    }

    async fn messages(&self) -> Vec<Entry> {
        let all: StreamRangeReply = connection(self).xrange_all(KEY).unwrap();
        all.ids.iter().map(|entry| self::entry(&field(entry))).collect()
    }
}

fn field(entry: &StreamId) -> Vec<u8> {
    entry.get("payload").unwrap()
}

fn connection(server: &RedisServer) -> Connection {
    Client::open(server.url()).unwrap().get_connection().unwrap()
}
