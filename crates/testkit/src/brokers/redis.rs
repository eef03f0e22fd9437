//! A Redis server for one test.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use super::process::{Recipe, ServerProcess};
use crate::{ledger, ports::Port};

const BINARY: &str = "AIRTIGHT_TEST_REDIS_BIN";
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(20);

/// A server that ends with the test. Every write is fsynced before it is answered: what survives a crash is what
/// the test is about.
#[derive(Debug)]
pub struct RedisServer {
    process: ServerProcess,
    scheme: &'static str,
}

impl RedisServer {
    /// Starts one; none, and a line that says so, where `scripts/services` has not told which program to run.
    pub async fn start(test_name: &str) -> Option<Self> {
        Self::start_with(test_name, &[]).await
    }

    /// The same with settings of `redis.conf` on top: `("replicaof", "127.0.0.1 6379")`.
    pub async fn start_with(test_name: &str, settings: &[(&str, &str)]) -> Option<Self> {
        let port = Port::reserve();
        let plain_port = port.to_string();
        Self::launch(test_name, port, "redis", directory(), &plain_port, settings).await
    }

    /// The same behind TLS, with a certificate and its key in PEM. If it `asks_back`, clients must show the same one.
    pub async fn start_tls(test_name: &str, certificate: &str, key: &str, asks_back: bool) -> Option<Self> {
        let directory = directory();
        for (file, text) in [("cert.pem", certificate), ("key.pem", key)] {
            std::fs::write(directory.path().join(file), text).expect("a file in a new directory");
        }
        let port = Port::reserve();
        let settings = [
            ("tls-port", port.to_string()),
            ("tls-cert-file", "cert.pem".into()),
            ("tls-key-file", "key.pem".into()),
            ("tls-ca-cert-file", "cert.pem".into()),
            ("tls-auth-clients", if asks_back { "yes" } else { "no" }.into()),
        ];
        let settings = settings.each_ref().map(|(name, value)| (*name, value.as_str()));
        Self::launch(test_name, port, "rediss", directory, "0", &settings).await
    }

    async fn launch(
        test_name: &str,
        port: Port,
        scheme: &'static str,
        directory: TempDir,
        plain_port: &str,
        settings: &[(&str, &str)],
    ) -> Option<Self> {
        let Some(program) = ledger::variable(BINARY) else {
            ledger::skip(test_name, "no Redis to start", BINARY);
            return None;
        };
        let own = [
            ("bind", "127.0.0.1"),
            ("port", plain_port),
            ("appendonly", "yes"),
            ("appendfsync", "always"),
            ("save", ""),
            // A replica would be given a snapshot after five seconds of waiting for others.
            ("repl-diskless-sync-delay", "0"),
        ];
        let args = own.iter().chain(settings).flat_map(|(name, value)| {
            // Words of their own: `--replicaof 127.0.0.1 6379`.
            let words: Vec<&str> = if value.is_empty() { vec![""] } else { value.split(' ').collect() };
            std::iter::once(format!("--{name}"))
                .chain(words.into_iter().map(str::to_owned))
                .collect::<Vec<_>>()
        });
        let recipe = Recipe {
            program: program.into(),
            args: args.collect(),
            env: Vec::new(),
            port,
            patience: PATIENCE,
        };
        let process = ServerProcess::start(recipe, directory).await;
        ledger::met("redis", test_name);
        Some(Self { process, scheme })
    }

    /// Where it is: `redis://127.0.0.1:PORT`, or `rediss://localhost:PORT`.
    pub fn url(&self) -> String {
        let host = if self.scheme == "rediss" { "localhost" } else { "127.0.0.1" };
        format!("{}://{host}:{}", self.scheme, self.port())
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.process.port()
    }

    /// Asks it to end and waits until it has.
    pub async fn stop(&self) {
        self.process.stop().await;
    }

    /// Ends it as a crash would.
    pub async fn kill(&self) {
        self.process.kill().await;
    }

    /// Starts it again, on the same port and data, and waits until it has read them: it listens long before.
    ///
    /// # Panics
    ///
    /// If it has not in time.
    pub async fn start_again(&self) {
        self.process.start_again().await;
        let end = Instant::now() + PATIENCE;
        while self.is_loading() {
            assert!(Instant::now() < end, "redis is still reading its data:\n{}", self.process.log_tail());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Asked in the clear: behind TLS nobody restarts it.
    fn is_loading(&self) -> bool {
        if self.scheme == "rediss" {
            return false;
        }
        let ask = || -> io::Result<[u8; 8]> {
            let mut connection = TcpStream::connect(("127.0.0.1", self.port()))?;
            connection.set_read_timeout(Some(PATIENCE))?;
            connection.write_all(b"EXISTS any\r\n")?;
            let mut answer = [0; 8];
            let read = connection.read(&mut answer)?;
            answer[read..].fill(0);
            Ok(answer)
        };
        ask().is_ok_and(|answer| answer == *b"-LOADING")
    }

    /// Suspends it: connections stay open, but nothing answers.
    pub fn suspend(&self) {
        self.process.suspend();
    }

    /// Lets it continue.
    pub fn resume(&self) {
        self.process.resume();
    }
}

fn directory() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}
