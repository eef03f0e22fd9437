//! Consumers in their own processes, so that they can be killed at any instruction. Each process is this test binary
//! again; an environment variable selects its role.

use std::process::{Child, Command, Stdio};

use airtight_core::{CancellationToken, Policy, Relay, log::LogOptions, table::Shape};
use airtight_postgres::{PgHandlers, PgOptions, PgOutbox};
use futures::FutureExt;

const ROLE: &str = "AIRTIGHT_TEST_ROLE";
const URL: &str = "AIRTIGHT_TEST_URL";

/// A process that ends with the test, however it ends.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(role: &str, url: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "children::a_consumer_of_its_own", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .env(URL, url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// SIGKILL.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Waits for its end, which must be a clean one.
    pub(crate) fn wait(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn group_options() -> LogOptions {
    LogOptions::consumer("group").reading(|read| {
        read.partitions = 8;
        read.lease = crate::group::LEASE;
    })
}

#[tokio::test]
#[ignore = "a process that the other tests start"]
async fn a_consumer_of_its_own() {
    let (Ok(role), Ok(url)) = (std::env::var(ROLE), std::env::var(URL)) else { return };
    let outbox =
        PgOutbox::connect(&url, PgOptions { shape: Shape::Log, ..PgOptions::default() }).await.unwrap();
    let never = CancellationToken::new();
    match role.as_str() {
        "counter" | "counter-drain" => {
            let options = LogOptions::consumer("counter")
                .reading(|read| read.lease = std::time::Duration::from_secs(1));
            let log = outbox.log(options);
            let handlers = counting(&outbox).with_log(&log);
            let relay = Relay::new(log, handlers).policy(Policy { batch_events: 50, ..Policy::default() });
            if role == "counter" {
                relay.run(never).await.unwrap()
            } else {
                relay.drain(never).await.unwrap()
            };
        }
        "group" => {
            let log = outbox.log(group_options());
            let sink = crate::group::Recorder::new(&outbox);
            Relay::new(log, sink).run(never).await.unwrap();
        }
        other => panic!("no role {other}"),
    }
}

/// Adds one to the counter for each event.
fn counting(outbox: &PgOutbox) -> PgHandlers {
    PgHandlers::new(outbox, "counter").otherwise(|_context, tx| {
        async move {
            sqlx::query("UPDATE counter SET n = n + 1").execute(tx).await?;
            Ok(())
        }
        .boxed()
    })
}
