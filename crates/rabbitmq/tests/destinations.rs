//! One exchange or routing key of several that takes nothing: the others go on, and it is named.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::Sink;
use airtight_testkit::{
    brokers::rabbitmq::shared,
    deliveries::{delivery, error_of, letters},
    destinations::{OneAway, one_away},
};
use lapin::{
    ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions},
    types::FieldTable,
};

use crate::support::{Hand, sink, unique};

/// An exchange with a queue behind it.
async fn exchange(hand: &Hand, name: &str, kind: ExchangeKind) {
    let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    hand.channel().await.exchange_declare(name.into(), kind, options, FieldTable::default()).await.unwrap();
}

async fn bind(hand: &Hand, exchange: &str, key: &str) {
    let queue = unique("queue");
    hand.make_queue(&queue, FieldTable::default()).await;
    let (channel, options) = (hand.channel().await, QueueBindOptions::default());
    let bound = channel.queue_bind(queue.into(), exchange.into(), key.into(), options, FieldTable::default());
    bound.await.unwrap();
}

#[tokio::test]
async fn a_missing_exchange_keeps_no_other_waiting() {
    let Some(url) = shared("a_missing_exchange_keeps_no_other_waiting") else { return };
    let hand = Hand::on(&url).await;
    let (good, bad) = (unique("good"), unique("missing"));
    exchange(&hand, &good, ExchangeKind::Fanout).await;
    bind(&hand, &good, "").await;
    let sink = sink(&url, &[("exchange", "{stream}"), ("routing_key", "{aggregate_id}")]);
    let case = OneAway { good: &good, bad: &bad, code: "no_exchange", named: &format!("exchange {bad}") };
    one_away(sink, case, async || {
        exchange(&hand, &bad, ExchangeKind::Fanout).await;
        bind(&hand, &bad, "").await;
    })
    .await;
}

#[tokio::test]
async fn an_unroutable_key_keeps_no_other_waiting() {
    let Some(url) = shared("an_unroutable_key_keeps_no_other_waiting") else { return };
    let hand = Hand::on(&url).await;
    let (at, good, bad) = (unique("direct"), unique("good"), unique("unbound"));
    exchange(&hand, &at, ExchangeKind::Direct).await;
    bind(&hand, &at, &good).await;
    let sink = sink(&url, &[("exchange", &at), ("routing_key", "{stream}")]);
    let named = format!("exchange {at}, routing key {bad}");
    let case = OneAway { good: &good, bad: &bad, code: "unroutable", named: &named };
    one_away(sink, case, async || bind(&hand, &at, &bad).await).await;
}

/// What is the same for all is the whole sink's trouble, and what is declared already is not advised.
#[tokio::test]
async fn one_destination_for_all_is_not_named_and_advice_fits_the_config() {
    let Some(url) = shared("one_destination_for_all_is_not_named_and_advice_fits_the_config") else { return };
    let one = sink(&url, &[("exchange", "orders"), ("routing_key", "placed")]);
    let event = delivery(1, "a").event;
    assert!(one.destinations(&event).is_empty());
    let by_key = sink(&url, &[("exchange", "orders"), ("routing_key", "{aggregate_id}")]);
    assert_eq!(by_key.destinations(&event), ["exchange orders, routing key a"]);
    let both = sink(&url, &[("exchange", "x.{aggregate_id}"), ("routing_key", "{event_type}")]);
    assert_eq!(both.destinations(&event), ["exchange x.a", "exchange x.a, routing key Tested"]);
    let queues = sink(&url, &[("routing_key", "{aggregate_id}")]);
    assert_eq!(queues.destinations(&event), ["queue a"]);

    let (hand, queue) = (Hand::on(&url).await, unique("declared"));
    let declaring = sink(&url, &[("routing_key", &queue), ("declare", "true")]);
    assert_eq!(letters(&declaring.deliver(&[delivery(1, "a")]).await), "d");
    hand.delete_queue(&queue).await;
    let outcomes = declaring.deliver(&[delivery(2, "a")]).await;
    let error = error_of(&outcomes[0]);
    assert!(error.message().contains("declared again at the next attempt"), "{error}");
    assert_eq!(letters(&declaring.deliver(&[delivery(2, "a")]).await), "d");
}
