//! What arrives, and what the broker refuses: on the broker that all tests share, with names of their own.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::{
    Class, Event, Op, Outcome, Payload, Sink,
    format::{Format, Incoming, decode},
};
use airtight_testkit::{
    brokers::rabbitmq::shared,
    deliveries::{delivery, error_of, letters},
};
use lapin::{
    ExchangeKind,
    message::BasicGetMessage,
    options::{ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};

use crate::support::{Hand, deliver_one, sink, unique};

fn header(message: &BasicGetMessage, name: &str) -> Option<String> {
    match message.properties.headers().as_ref()?.inner().get(name)? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        other => panic!("the header {name} is {other:?}"),
    }
}

/// The event that a consumer would make of a message.
fn read_back(format: Format, message: &BasicGetMessage) -> Event {
    let content_type = message.properties.content_type().clone().unwrap_or_default();
    let table = message.properties.headers().clone().unwrap_or_default();
    let mut headers: Vec<(&str, &[u8])> = table
        .inner()
        .iter()
        .map(|(name, value)| match value {
            AMQPValue::LongString(text) => (name.as_str(), text.as_bytes()),
            other => panic!("{name} is {other:?}"),
        })
        .collect();
    headers.push(("content-type", content_type.as_str().as_bytes()));
    let body = Some(message.data.clone().into());
    decode(format, &Incoming { topic: "q", place: "1".into(), body, headers, ..Incoming::default() }).unwrap()
}

#[tokio::test]
async fn every_format_arrives_with_headers_and_body() {
    let Some(url) = shared("every_format_arrives_with_headers_and_body") else { return };
    let hand = Hand::on(&url).await;
    let queue = unique("formats");
    hand.make_queue(&queue, FieldTable::default()).await;
    for format in Format::ALL.into_iter().chain([airtight_debezium::FORMAT]) {
        let sink = sink(&url, &[("routing_key", &queue), ("format", format.as_str())]);
        let mut sent = delivery(7, "naïve ключ");
        sent.event.op = Op::Delete;
        sent.event.payload = Payload::Json("{\"b\": 1.10}".into());
        sent.event.headers.insert("source".into(), "kasse ü\n".into());
        assert!(matches!(deliver_one(&sink, &sent).await, Outcome::Delivered), "{format:?}");
        let messages = hand.drain(&queue).await;
        let [message] = messages.as_slice() else { panic!("{format:?}: {} messages", messages.len()) };
        let properties = &message.properties;
        assert_eq!(*properties.delivery_mode(), Some(2), "{format:?}");
        assert_eq!(properties.message_id().as_ref().unwrap().as_str(), sent.event.id);
        assert_eq!(properties.kind().as_ref().unwrap().as_str(), sent.event.event_type);
        assert_eq!(*properties.timestamp(), Some(0));
        let prefix = if format == Format::CloudEventsBinary { "cloudEvents:" } else { "" };
        if format != Format::CloudEvents {
            assert_eq!(header(message, &format!("{prefix}id")).as_deref(), Some(sent.event.id.as_str()));
        }
        let back = read_back(format, message);
        assert_eq!((back.id, back.payload), (sent.event.id, sent.event.payload), "{format:?}");
        if format != airtight_debezium::FORMAT {
            assert_eq!((back.aggregate_id, back.op), (sent.event.aggregate_id, sent.event.op), "{format:?}");
        }
        if [Format::Raw, Format::Envelope].contains(&format) {
            assert_eq!(back.headers, sent.event.headers, "{format:?}");
        }
    }
    hand.delete_queue(&queue).await;
}

/// The one that must not be: an event that no queue has taken, reported delivered.
#[tokio::test(flavor = "multi_thread")]
async fn among_many_only_those_that_came_back_are_unroutable() {
    let Some(url) = shared("among_many_only_those_that_came_back_are_unroutable") else { return };
    let hand = Hand::on(&url).await;
    let queue = unique("routable");
    hand.make_queue(&queue, FieldTable::default()).await;
    let sink = sink(&url, &[("routing_key", "{aggregate_type}"), ("unroutable", "dead")]);
    let batch: Vec<_> = (0..400)
        .map(|n| {
            let mut delivery = delivery(1 + n, &format!("key-{n}"));
            delivery.event.aggregate_type = if n % 3 == 1 { unique("nowhere") } else { queue.clone() };
            delivery
        })
        .collect();
    let outcomes = sink.deliver(&batch).await;
    let mut expected: Vec<String> = Vec::new();
    for (delivery, outcome) in batch.iter().zip(outcomes) {
        if delivery.event.aggregate_type == queue {
            assert!(matches!(outcome, Outcome::Delivered), "{outcome:?}");
            expected.push(delivery.event.id.clone());
        } else {
            let error = error_of(&outcome);
            assert_eq!((error.class(), error.code()), (Class::Permanent, "unroutable"));
            assert!(error.message().contains(&delivery.event.aggregate_type), "{error}");
        }
    }
    let mut arrived = hand.ids(&queue).await;
    arrived.sort();
    expected.sort();
    assert_eq!(arrived, expected);
    hand.delete_queue(&queue).await;
}

#[tokio::test]
async fn an_unroutable_event_waits_for_its_binding() {
    let Some(url) = shared("an_unroutable_event_waits_for_its_binding") else { return };
    let hand = Hand::on(&url).await;
    let (exchange, queue) = (unique("exchange"), unique("queue"));
    let channel = hand.channel().await;
    let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    channel
        .exchange_declare(exchange.as_str().into(), ExchangeKind::Topic, options, FieldTable::default())
        .await
        .unwrap();
    let sink = sink(&url, &[("exchange", &exchange), ("routing_key", "orders.{event_type}")]);
    sink.open().await.unwrap();
    let event = delivery(1, "k");
    let error = error_of(&deliver_one(&sink, &event).await);
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "unroutable"));
    assert!(error.message().contains(&exchange) && error.message().contains("orders.Tested"), "{error}");

    hand.make_queue(&queue, FieldTable::default()).await;
    let (to, from) = (queue.as_str().into(), exchange.as_str().into());
    let options = QueueBindOptions::default();
    channel.queue_bind(to, from, "orders.#".into(), options, FieldTable::default()).await.unwrap();
    assert!(matches!(deliver_one(&sink, &event).await, Outcome::Delivered));
    assert_eq!(hand.ids(&queue).await, [event.event.id]);
    hand.delete_queue(&queue).await;
    channel.exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
}

#[tokio::test]
async fn a_missing_exchange_is_named_and_makes_no_event_dead() {
    let Some(url) = shared("a_missing_exchange_is_named_and_makes_no_event_dead") else { return };
    let missing = unique("missing");
    // Known before the first event where it is the same for all.
    let fixed = sink(&url, &[("exchange", &missing)]);
    let error = fixed.open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "no_exchange"));
    assert!(error.message().contains(&missing), "{error}");
    // The same for a queue.
    let error = sink(&url, &[("routing_key", &missing)]).open().await.unwrap_err();
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "no_queue"));
    assert!(error.message().contains(&missing), "{error}");
    // And with the event's own.
    let by_field = sink(&url, &[("exchange", "{aggregate_type}")]);
    by_field.open().await.unwrap();
    let mut event = delivery(1, "k");
    event.event.aggregate_type = missing.clone();
    for _ in 0..3 {
        let error = error_of(&deliver_one(&by_field, &event).await);
        assert_eq!((error.class(), error.code()), (Class::Unavailable, "no_exchange"));
        assert!(error.message().contains(&missing), "{error}");
    }
}

#[tokio::test]
async fn queues_are_declared_on_first_use_and_again_when_they_are_gone() {
    let Some(url) = shared("queues_are_declared_on_first_use_and_again_when_they_are_gone") else { return };
    let hand = Hand::on(&url).await;
    for queue_type in ["classic", "quorum"] {
        let stream = unique(queue_type);
        let sink = sink(&url, &[("declare", "true"), ("queue_type", queue_type)]);
        sink.open().await.unwrap();
        let mut event = delivery(1, "k");
        event.event.stream = stream.clone();
        assert!(matches!(deliver_one(&sink, &event).await, Outcome::Delivered));
        assert_eq!(hand.ids(&stream).await.len(), 1);
        // It survives the broker: declaring it as durable again is no contradiction.
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(queue_type.into()));
        hand.make_queue(&stream, arguments).await;
        // Somebody deletes it: the event waits once, and then there is a new one.
        hand.delete_queue(&stream).await;
        let error = error_of(&deliver_one(&sink, &event).await);
        assert_eq!((error.class(), error.code()), (Class::Unavailable, "unroutable"));
        assert!(matches!(deliver_one(&sink, &event).await, Outcome::Delivered));
        hand.delete_queue(&stream).await;
    }
}

#[tokio::test]
async fn exchanges_are_declared_and_one_with_other_settings_is_explained() {
    let Some(url) = shared("exchanges_are_declared_and_one_with_other_settings_is_explained") else { return };
    let hand = Hand::on(&url).await;
    let (exchange, queue) = (unique("declared"), unique("queue"));
    let keys = [("exchange", exchange.as_str()), ("declare", "true"), ("exchange_type", "fanout")];
    let fanout = sink(&url, &keys);
    fanout.open().await.unwrap();
    hand.make_queue(&queue, FieldTable::default()).await;
    let channel = hand.channel().await;
    let (to, from) = (queue.as_str().into(), exchange.as_str().into());
    channel
        .queue_bind(to, from, "".into(), QueueBindOptions::default(), FieldTable::default())
        .await
        .unwrap();
    assert!(matches!(deliver_one(&fanout, &delivery(1, "k")).await, Outcome::Delivered));
    assert_eq!(hand.ids(&queue).await.len(), 1);

    let topic = sink(&url, &[("exchange", &exchange), ("declare", "true")]);
    let of_open = topic.open().await.unwrap_err();
    let of_event = error_of(&deliver_one(&topic, &delivery(1, "k")).await);
    let transient = unique("transient");
    let options = QueueDeclareOptions { auto_delete: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(transient.as_str().into(), options, FieldTable::default()).await.unwrap();
    let of_queue = sink(&url, &[("routing_key", &transient), ("declare", "true")]).open().await.unwrap_err();
    for error in [of_open, of_event, of_queue] {
        assert_eq!((error.class(), error.code()), (Class::Unavailable, "declared_differently"));
        assert!(error.to_string().contains("`declare` to false"), "{error}");
    }
    hand.delete_queue(&transient).await;
    hand.delete_queue(&queue).await;
    channel.exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
}

#[tokio::test]
async fn a_full_queue_is_waited_for() {
    let Some(url) = shared("a_full_queue_is_waited_for") else { return };
    let hand = Hand::on(&url).await;
    let queue = unique("full");
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(1));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    hand.make_queue(&queue, arguments).await;
    let sink = sink(&url, &[("routing_key", &queue)]);
    assert!(matches!(deliver_one(&sink, &delivery(1, "k")).await, Outcome::Delivered));
    let batch = [delivery(2, "k"), delivery(3, "k")];
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "us");
    let error = error_of(&outcomes[0]);
    assert_eq!((error.class(), error.code()), (Class::Unavailable, "nack"));
    assert!(error.message().contains(&queue), "{error}");
    assert_eq!(hand.ids(&queue).await.len(), 1);
    assert!(matches!(deliver_one(&sink, &batch[0]).await, Outcome::Delivered));
    hand.delete_queue(&queue).await;
}

#[tokio::test]
async fn a_name_that_amqp_refuses_is_the_events_own_fault() {
    let Some(url) = shared("a_name_that_amqp_refuses_is_the_events_own_fault") else { return };
    let hand = Hand::on(&url).await;
    let queue = unique("names");
    let sink = sink(&url, &[("routing_key", "{stream}"), ("declare", "true")]);
    let mut batch =
        vec![delivery(1, "a"), delivery(2, "b"), delivery(3, "c"), delivery(4, "d"), delivery(5, "b")];
    for delivery in &mut batch {
        delivery.event.stream = queue.clone();
    }
    batch[1].event.stream = "x".repeat(256);
    batch[2].event.stream = "amq.mine".into();
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "dppds");
    let (long, reserved) = (error_of(&outcomes[1]), error_of(&outcomes[2]));
    assert_eq!((long.class(), long.code()), (Class::Permanent, "bad_name"));
    assert_eq!((reserved.class(), reserved.code()), (Class::Permanent, "bad_name"), "{reserved}");
    assert_eq!(hand.ids(&queue).await.len(), 2);
    hand.delete_queue(&queue).await;
}

#[tokio::test]
async fn headers_of_any_kind_arrive_and_only_too_many_are_refused() {
    let Some(url) = shared("headers_of_any_kind_arrive_and_only_too_many_are_refused") else { return };
    let hand = Hand::on(&url).await;
    let queue = unique("headers");
    hand.make_queue(&queue, FieldTable::default()).await;
    let sink = sink(&url, &[("routing_key", &queue), ("format", "raw")]);
    let long = "n".repeat(300);
    let mut odd = delivery(1, "k");
    for name in ["CC", "BCC", "x-death", "x-delay", "", &long] {
        odd.event.headers.insert(name.into(), "v".into());
    }
    odd.event.event_type = "t".repeat(300);
    assert!(matches!(deliver_one(&sink, &odd).await, Outcome::Delivered));
    let messages = hand.drain(&queue).await;
    for name in ["header.CC", "header.BCC", "x-death", "x-delay", ""] {
        assert_eq!(header(&messages[0], name).as_deref(), Some("v"), "{name:?}");
    }
    assert_eq!(header(&messages[0], "airtight-long-names"), Some(format!("{{\"{long}\":\"v\"}}")));

    // A frame of 131,072 bytes is what the broker takes. Larger ones would cost everyone the connection.
    let with_padding = |key: &str, bytes: usize| {
        let mut delivery = delivery(1, key);
        delivery.event.headers.insert("p".into(), "x".repeat(bytes));
        delivery
    };
    let error = error_of(&deliver_one(&sink, &with_padding("k", 131_072)).await);
    assert_eq!((error.class(), error.code()), (Class::Permanent, "too_large"));
    let said: usize = error.message().split(' ').find_map(|word| word.parse().ok()).unwrap();
    let most = 131_072 - (said - 131_072);
    let batch = [delivery(2, "a"), with_padding("b", most), with_padding("c", most + 1), delivery(3, "d")];
    assert_eq!(letters(&sink.deliver(&batch).await), "ddpd");
    assert_eq!(hand.drain(&queue).await.len(), 3);
    hand.delete_queue(&queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_keep_their_order_and_go_side_by_side() {
    let Some(url) = shared("keys_keep_their_order_and_go_side_by_side") else { return };
    let hand = Hand::on(&url).await;
    let queue = unique("order");
    hand.make_queue(&queue, FieldTable::default()).await;
    let sink = sink(&url, &[("routing_key", &queue)]);
    let batch: Vec<_> = (0..1_000).map(|n| delivery(n, &format!("key-{}", n * 7 % 50))).collect();
    let outcomes = sink.deliver(&batch).await;
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Delivered)), "{}", letters(&outcomes));
    let mut last = std::collections::HashMap::new();
    let messages = hand.drain(&queue).await;
    assert_eq!(messages.len(), 1_000);
    let mut switches = 0;
    let mut before = String::new();
    for message in &messages {
        let event = read_back(Format::Envelope, message);
        let earlier = last.insert(event.aggregate_id.clone(), event.seq);
        assert!(earlier.is_none_or(|earlier| earlier < event.seq), "{earlier:?} before {}", event.seq);
        switches += usize::from(before != event.aggregate_id);
        before = event.aggregate_id;
    }
    assert!(switches > 200, "keys wait for each other: {switches} switches");
    hand.delete_queue(&queue).await;
}

#[test]
fn a_preview_needs_no_broker() {
    let sink = sink("amqp://nobody.invalid", &[("exchange", "x"), ("format", "raw")]);
    let preview = sink.preview(&delivery(1, "k").event).unwrap().unwrap();
    assert_eq!(preview.destination, "exchange x, routing key test.stream");
    assert_eq!(preview.body.unwrap(), delivery(1, "k").event.payload.as_bytes());
}
