//! What the tests share: a look into the server by other means than the sink's own.

#![allow(dead_code, reason = "each test binary uses some of it")]

use std::{collections::BTreeMap, time::Duration};

use airtight_core::{Delivery, Error, Outcome, Sink, format::Formats};
use airtight_redis::{RedisConfig, RedisSink};
use airtight_testkit::brokers::redis::RedisServer;
use redis::{aio::MultiplexedConnection, streams::StreamRangeReply};

/// What sinks here may be told to write.
const FORMATS: Formats = Formats::with(&[airtight_debezium::FORMAT]);

/// Long enough for any server here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

/// A connection of the test's own, as soon as the server answers. An answer may take a while.
pub(crate) async fn admin(server: &RedisServer) -> MultiplexedConnection {
    let client = redis::Client::open(format!("redis://127.0.0.1:{}", server.port())).unwrap();
    let settings = redis::AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
    // By hand, because the suite wants futures that are `Send`, and the closure of `wait::eventually` makes none.
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        let answered = async {
            let mut connection = client.get_multiplexed_async_connection_with_config(&settings).await?;
            redis::cmd("PING").query_async::<String>(&mut connection).await.map(|_| connection)
        };
        match answered.await {
            Ok(connection) => return connection,
            Err(error) => assert!(tokio::time::Instant::now() < end, "Redis does not answer: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(4)).await;
    }
}

/// Runs a command written as text: `CONFIG SET maxmemory 1`.
pub(crate) async fn run(server: &RedisServer, command: &str) {
    let mut words = command.split(' ');
    let mut cmd = redis::cmd(words.next().unwrap());
    cmd.arg(words.collect::<Vec<_>>());
    let _: redis::Value =
        cmd.query_async(&mut admin(server).await).await.unwrap_or_else(|error| panic!("{command}: {error}"));
}

/// The entries of a stream, in order.
pub(crate) async fn entries(server: &RedisServer, key: &str) -> Vec<BTreeMap<String, Vec<u8>>> {
    let mut connection = admin(server).await;
    let reply: StreamRangeReply =
        redis::cmd("XRANGE").arg(key).arg("-").arg("+").query_async(&mut connection).await.unwrap();
    let fields = |entry: redis::streams::StreamId| {
        let field = |(name, value)| (name, redis::from_redis_value(value).unwrap());
        entry.map.into_iter().map(field).collect()
    };
    reply.ids.into_iter().map(fields).collect()
}

/// The `seq` of each entry of a stream that was written as `raw`.
pub(crate) async fn seqs(server: &RedisServer, key: &str) -> Vec<i64> {
    let entries = entries(server, key).await;
    entries.iter().map(|entry| text(entry, "seq").parse().unwrap()).collect()
}

pub(crate) fn text(entry: &BTreeMap<String, Vec<u8>>, field: &str) -> String {
    let value = entry.get(field).unwrap_or_else(|| panic!("{entry:?} has no `{field}`"));
    String::from_utf8(value.clone()).unwrap()
}

/// A sink on this server; `more` goes behind the URL: `/1?key=x`.
pub(crate) fn sink(server: &RedisServer, more: &str) -> RedisSink {
    sink_at(&format!("{}{more}", server.url()))
}

pub(crate) fn sink_at(url: &str) -> RedisSink {
    RedisSink::new(RedisConfig::from_url_with(url, FORMATS).unwrap()).unwrap()
}

/// Delivers one event.
pub(crate) async fn send(sink: &RedisSink, delivery: Delivery) -> Result<(), Error> {
    match sink.deliver(&[delivery]).await.as_slice() {
        [Outcome::Delivered] => Ok(()),
        [Outcome::Failed(error)] => Err(error.clone()),
        other => panic!("{other:?} is no answer for one event"),
    }
}
