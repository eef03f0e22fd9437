//! What the operator is told of a server whose *delivered* is worth little. Alone in its binary, because the log is
//! the whole process's.

#![allow(clippy::unwrap_used, reason = "a failing test should panic")]

mod support;

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use airtight_core::Sink;
use airtight_testkit::brokers::redis::RedisServer;
use support::*;

/// A log that can be looked at.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn what_may_be_lost_is_said_once() {
    let Some(server) = RedisServer::start("what_may_be_lost_is_said_once").await else { return };
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);

    sink(&server, "").open().await.unwrap();
    assert_eq!(log.take(), "", "every write is fsynced");

    run(&server, "CONFIG SET appendfsync everysec").await;
    let second = sink(&server, "");
    second.open().await.unwrap();
    let said = log.take();
    assert!(said.contains("WARN") && said.contains("about a second"), "{said}");
    second.open().await.unwrap();
    assert_eq!(log.take(), "", "once is enough");

    run(&server, "CONFIG SET appendonly no").await;
    run(&server, "CONFIG SET maxmemory-policy allkeys-lru").await;
    sink(&server, "").open().await.unwrap();
    let said = log.take();
    assert!(said.contains("`appendonly` is off") && said.contains("allkeys-lru"), "{said}");
}
