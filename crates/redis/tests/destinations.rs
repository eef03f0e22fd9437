//! One stream of several that takes nothing: the others go on, and it is named.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use airtight_core::{Delivery, Sink};
use airtight_testkit::{
    brokers::redis::RedisServer,
    deliveries::{delivery, error_of, letters},
    destinations::{OneAway, one_away},
};

use crate::support::{run, seqs, sink, sink_at};

fn to(stream: &str, mut delivery: Delivery) -> Delivery {
    stream.clone_into(&mut delivery.event.stream);
    delivery
}

#[tokio::test]
async fn a_key_that_is_no_stream_keeps_no_other_waiting() {
    let Some(server) = RedisServer::start("a_key_that_is_no_stream_keeps_no_other_waiting").await else {
        return;
    };
    run(&server, "SET bad x").await;
    let case = OneAway { good: "good", bad: "bad", code: "wrong_type", named: "stream bad" };
    one_away(sink(&server, "?key={stream}"), case, async || run(&server, "DEL bad").await).await;
}

#[tokio::test]
async fn a_key_without_rights_leaves_the_others_alone() {
    let settings = [("user", "app on >hunter2 ~good* -@all +xadd +eval")];
    let name = "a_key_without_rights_leaves_the_others_alone";
    let Some(server) = RedisServer::start_with(name, &settings).await else { return };
    let sink = sink_at(&format!("redis://app:hunter2@127.0.0.1:{}?key={{stream}}&format=raw", server.port()));
    let batch = [
        to("good.1", delivery(1, "a")),
        to("denied", delivery(2, "b")),
        to("good.2", delivery(3, "b")),
        to("denied", delivery(4, "c")),
        to("good.2", delivery(5, "d")),
        to("good.1", delivery(6, "a")),
    ];
    let outcomes = sink.deliver(&batch).await;
    assert_eq!(letters(&outcomes), "dusudd", "{outcomes:?}");
    let error = error_of(&outcomes[1]);
    assert_eq!((error.code(), error.destination()), ("not_permitted", Some("stream denied")));
    assert_eq!(seqs(&server, "good.1").await, [1, 6]);
    assert_eq!(seqs(&server, "good.2").await, [5]);
    // A right that the command lacks is the whole sink's trouble.
    run(&server, "ACL SETUSER app -xadd").await;
    let outcomes = sink.deliver(&batch[..1]).await;
    assert_eq!(error_of(&outcomes[0]).destination(), None);
}
