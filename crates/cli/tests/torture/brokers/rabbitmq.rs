//! RabbitMQ, a durable queue of persistent messages.

use airtight_testkit::brokers::rabbitmq::RabbitmqServer;
use async_trait::async_trait;
use lapin::{
    Channel, Connection, ConnectionProperties,
    options::{BasicGetOptions, QueueDeclareOptions},
    types::FieldTable,
};

use super::{Broker, Plan, entry, outlast, survive};
use crate::bank::{Bank, Entry};

const QUEUE: &str = "bank";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_between_postgres_and_rabbitmq() {
    let test = "nothing_is_lost_between_postgres_and_rabbitmq";
    let (Some(bank), Some(rabbit)) = (Bank::postgres("to_rabbitmq").await, start(test).await) else { return };
    survive(&bank, &rabbit, Plan::new(4_000, 400)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rabbitmq_that_is_away_costs_nothing() {
    let test = "a_rabbitmq_that_is_away_costs_nothing";
    let (Some(bank), Some(rabbit)) = (Bank::postgres("away_rabbitmq").await, start(test).await) else {
        return;
    };
    outlast(&bank, &rabbit).await;
}

async fn start(test: &str) -> Option<RabbitmqServer> {
    let rabbit = RabbitmqServer::start(test).await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    declare(&channel(&rabbit).await.1, options).await;
    // The node itself forgets a queue that was declared in the last moments before it was killed.
    rabbit.ctl(&["eval", "mnesia:dump_log()."]);
    Some(rabbit)
}

#[async_trait]
impl Broker for RabbitmqServer {
    fn to(&self) -> String {
        self.url()
    }

    async fn stop(&self) {
        self.process().kill().await;
    }

    async fn start(&self) {
        self.process().start_again().await;
    }

    async fn count(&self) -> usize {
        let (_connection, channel) = channel(self).await;
        declare(&channel, QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() }).await
    }

    async fn messages(&self) -> Vec<Entry> {
        let (_connection, channel) = channel(self).await;
        let mut entries = Vec::new();
        while let Some(message) =
            channel.basic_get(QUEUE.into(), BasicGetOptions { no_ack: true }).await.unwrap()
        {
            entries.push(entry(&message.delivery.data));
        }
        entries
    }
}

async fn channel(rabbit: &RabbitmqServer) -> (Connection, Channel) {
    let connection = Connection::connect(&rabbit.url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    (connection, channel)
}

/// Returns how many messages are in it.
async fn declare(channel: &Channel, options: QueueDeclareOptions) -> usize {
    let queue = channel.queue_declare(QUEUE.into(), options, FieldTable::default()).await.unwrap();
    usize::try_from(queue.message_count()).unwrap()
}
