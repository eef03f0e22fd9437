//! NATS JetStream, its stream on disk.

use airtight_testkit::brokers::nats::NatsServer;
use async_nats::jetstream::{
    self,
    stream::{Config, Stream},
};
use async_trait::async_trait;

use super::{Broker, Plan, entry, outlast, survive};
use crate::bank::{Bank, Entry};

const STREAM: &str = "BANK";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_between_postgres_and_nats() {
    let test = "nothing_is_lost_between_postgres_and_nats";
    let (Some(bank), Some(nats)) = (Bank::postgres("to_nats").await, start(test).await) else { return };
    survive(&bank, &nats, Plan::new(4_000, 400)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nats_that_is_away_costs_nothing() {
    let test = "a_nats_that_is_away_costs_nothing";
    let (Some(bank), Some(nats)) = (Bank::postgres("away_nats").await, start(test).await) else { return };
    outlast(&bank, &nats).await;
}

async fn start(test: &str) -> Option<NatsServer> {
    let nats = NatsServer::start(test).await?;
    let subjects = vec!["bank".to_owned()];
    let config = Config { name: STREAM.into(), subjects, ..Config::default() };
    jetstream(&nats).await.create_stream(config).await.unwrap();
    Some(nats)
}

#[async_trait]
impl Broker for NatsServer {
    fn to(&self) -> String {
        format!("{}?stream={STREAM}", self.url())
    }

    async fn stop(&self) {
        self.kill().await;
    }

    async fn start(&self) {
        self.start_again().await;
    }

    async fn count(&self) -> usize {
        usize::try_from(stream(self).await.cached_info().state.messages).unwrap()
    }

    async fn messages(&self) -> Vec<Entry> {
        let stream = stream(self).await;
        let state = &stream.cached_info().state;
        let mut entries = Vec::new();
        for sequence in state.first_sequence..=state.last_sequence {
            entries.push(entry(&stream.get_raw_message(sequence).await.unwrap().payload));
        }
        entries
    }
}

async fn jetstream(nats: &NatsServer) -> jetstream::Context {
    jetstream::new(async_nats::connect(nats.address()).await.unwrap())
}

async fn stream(nats: &NatsServer) -> Stream {
    jetstream(nats).await.get_stream(STREAM).await.unwrap()
}
