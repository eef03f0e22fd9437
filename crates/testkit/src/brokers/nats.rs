//! A NATS server with JetStream, on disk.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use super::process::{Recipe, ServerProcess};
use crate::{ledger, ports::Port};

const BINARY: &str = "AIRTIGHT_TEST_NATS_BIN";
const LOOK: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(30);

/// A server for one test. Its config can be changed while it runs.
#[derive(Debug)]
pub struct NatsServer {
    process: ServerProcess,
}

impl NatsServer {
    /// Starts one that accepts every client; none, with a printed note, if there is no `nats-server`.
    pub async fn start(test_name: &str) -> Option<Self> {
        Self::start_with(test_name, |_| String::new()).await
    }

    /// The same with more in its config, which may name files of the server's directory.
    pub async fn start_with(test_name: &str, config: impl FnOnce(&Path) -> String) -> Option<Self> {
        let Some(program) = ledger::variable(BINARY).map(PathBuf::from) else {
            ledger::skip(test_name, "no NATS server", BINARY);
            return None;
        };
        ledger::met("nats", test_name);
        let directory = TempDir::with_prefix("airtight-nats-").expect("a directory for a server");
        let file = directory.path().join("server.conf");
        let recipe = Recipe {
            program,
            args: vec!["--config".into(), file.display().to_string()],
            env: Vec::new(),
            port: Port::reserve(),
            patience: PATIENCE,
        };
        write_config(directory.path(), recipe.port.number(), &config(directory.path()));
        let process = ServerProcess::start(recipe, directory).await;
        Some(Self { process })
    }

    /// `nats://127.0.0.1:PORT`, without credentials.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address())
    }

    /// `127.0.0.1:PORT`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.process.port())
    }

    /// The process, to be stopped, killed, suspended and started again.
    pub fn process(&self) -> &ServerProcess {
        &self.process
    }

    /// Ends it as a crash would.
    pub async fn kill(&self) {
        self.process.kill().await;
    }

    /// Asks it to end and waits until it has.
    pub async fn stop(&self) {
        self.process.stop().await;
    }

    /// Starts it again on the same port and data.
    pub async fn start_again(&self) {
        self.process.start_again().await;
    }

    /// Suspends it: connections stay open, but nothing answers.
    pub fn suspend(&self) {
        self.process.suspend();
    }

    /// Lets it continue.
    pub fn resume(&self) {
        self.process.resume();
    }

    /// Changes what [`NatsServer::start_with`] has put into the config, for the next start.
    pub fn reconfigure(&self, config: &str) {
        write_config(self.process.directory(), self.process.port(), config);
    }

    /// The same for the server that runs; returns when it is in force.
    pub async fn reload(&self, config: &str) {
        self.reconfigure(config);
        let before = self.reloaded();
        let pid = self.process.pid().expect("a server that runs").to_string();
        let sent = Command::new("kill").args(["-s", "HUP", &pid]).status();
        assert!(sent.is_ok_and(|status| status.success()), "sending HUP to {pid}");
        let end = Instant::now() + PATIENCE;
        while self.reloaded() == before {
            assert!(
                Instant::now() < end,
                "the server does not read its config again:\n{}",
                self.process.log_tail()
            );
            tokio::time::sleep(LOOK).await;
        }
    }

    /// How often it has reloaded, by its log.
    fn reloaded(&self) -> usize {
        let log = std::fs::read(self.process.directory().join("server.log")).unwrap_or_default();
        String::from_utf8_lossy(&log).matches("Reloaded server configuration").count()
    }
}

fn write_config(directory: &Path, port: u16, more: &str) {
    let store = directory.join("jetstream");
    let text =
        format!("listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: \"{}\" }}\n{more}\n", store.display());
    std::fs::write(directory.join("server.conf"), text).expect("a config for a server");
}
