//! A RabbitMQ node for one test, with its own epmd, so that the nodes of several tests do not find each other.
//!
//! A node takes some seconds to start, so tests that do not change the broker share the one of `scripts/services`
//! ([`shared`]).

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use super::process::{Recipe, ServerProcess};
use crate::{ledger, ports::Port};

const BINARY: &str = "AIRTIGHT_TEST_RABBITMQ_BIN";
const SHARED: &str = "AIRTIGHT_TEST_RABBITMQ";

/// How long a node may take to start, on a machine that has other things to do.
const PATIENCE: Duration = Duration::from_secs(90);

/// The URL of the broker that `scripts/services` has started, for tests that leave it as it is; none if there is
/// none.
pub fn shared(test_name: &str) -> Option<String> {
    match ledger::variable(SHARED) {
        Some(url) => {
            ledger::met("rabbitmq", test_name);
            Some(url)
        }
        None => {
            ledger::skip(test_name, "needs a RabbitMQ", SHARED);
            None
        }
    }
}

/// A RabbitMQ node. Whatever belongs to it ends when this is dropped.
#[derive(Debug)]
pub struct RabbitmqServer {
    // Before epmd, which it is registered with.
    node: ServerProcess,
    _epmd: ServerProcess,
    binary: PathBuf,
    env: Vec<(String, String)>,
    tls_port: Option<Port>,
    /// For `rabbitmqctl`.
    _dist_port: Port,
}

impl RabbitmqServer {
    /// The user that tests log in as.
    pub const USER: &'static str = "airtight";
    /// Its password, until a test changes it.
    pub const PASSWORD: &'static str = "airtight";

    /// Starts a node; none, noted as skipped, where there is no RabbitMQ.
    pub async fn start(test_name: &str) -> Option<Self> {
        Self::start_with(test_name, "", None).await
    }

    /// Starts one with further lines in its `rabbitmq.conf`, and a TLS listener with these files, if there are any.
    pub async fn start_with(test_name: &str, settings: &str, tls: Option<TlsFiles>) -> Option<Self> {
        let Some(binary) = ledger::variable(BINARY) else {
            ledger::skip(test_name, "needs a RabbitMQ of its own", BINARY);
            return None;
        };
        ledger::met("rabbitmq", test_name);
        let binary = PathBuf::from(binary);
        let epmd_port = Port::reserve();
        let epmd = Recipe {
            program: "epmd".into(),
            args: ["-port", &epmd_port.to_string(), "-address", "127.0.0.1"].map(Into::into).to_vec(),
            env: Vec::new(),
            port: epmd_port.clone(),
            patience: PATIENCE,
        };
        let epmd = ServerProcess::start(epmd, tempfile::tempdir().expect("a directory for epmd")).await;

        let directory = tempfile::tempdir().expect("a directory for RabbitMQ");
        let (port, dist_port) = (Port::reserve(), Port::reserve());
        let tls_port = tls.as_ref().map(|_| Port::reserve());
        let mut conf = format!(
            "listeners.tcp.1 = 127.0.0.1:{port}\n\
             default_user = {}\n\
             default_pass = {}\n\
             log.console = true\n\
             log.file = false\n\
             {settings}\n",
            Self::USER,
            Self::PASSWORD
        );
        if let (Some(files), Some(port)) = (&tls, &tls_port) {
            conf.push_str(&format!(
                "listeners.ssl.1 = 127.0.0.1:{port}\n\
                 ssl_options.certfile = {}\n\
                 ssl_options.keyfile = {}\n",
                files.certificate.display(),
                files.key.display()
            ));
        }
        std::fs::write(directory.path().join("rabbitmq.conf"), conf).expect("a config to write");
        std::fs::write(directory.path().join("enabled_plugins"), "[].\n").expect("a list to write");
        let env = environment(directory.path(), &port, &epmd_port, &dist_port);
        let recipe =
            Recipe { program: binary.clone(), args: Vec::new(), env: env.clone(), port, patience: PATIENCE };
        let node = ServerProcess::start(recipe, directory).await;
        Some(Self { node, _epmd: epmd, binary, env, tls_port, _dist_port: dist_port })
    }

    /// Where it listens, with its user.
    pub fn url(&self) -> String {
        self.url_as(Self::USER, Self::PASSWORD)
    }

    /// The same for another user.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("amqp://{user}:{password}@127.0.0.1:{}/%2F", self.node.port())
    }

    /// Where it listens for TLS. The certificate is for `localhost`.
    pub fn tls_url(&self) -> Option<String> {
        let (user, password) = (Self::USER, Self::PASSWORD);
        self.tls_port.as_ref().map(|port| format!("amqps://{user}:{password}@localhost:{port}/%2F"))
    }

    /// The process.
    pub fn process(&self) -> &ServerProcess {
        &self.node
    }

    /// Runs `rabbitmqctl` and returns what it says.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn ctl(&self, args: &[&str]) -> String {
        let output = Command::new(self.binary.with_file_name("rabbitmqctl"))
            .arg("--quiet")
            .args(args)
            .envs(self.env.iter().cloned())
            .current_dir(self.node.directory())
            .output()
            .expect("rabbitmqctl runs");
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        assert!(
            output.status.success(),
            "rabbitmqctl {args:?}: {} {}",
            said(&output.stdout),
            said(&output.stderr)
        );
        said(&output.stdout)
    }
}

/// The files of a TLS listener.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// Its certificate, in PEM form.
    pub certificate: PathBuf,
    /// The certificate's key, in PEM form.
    pub key: PathBuf,
}

/// What the node and `rabbitmqctl` must agree on. What is not said here would be looked for in /etc and /var.
fn environment(directory: &Path, port: &Port, epmd_port: &Port, dist_port: &Port) -> Vec<(String, String)> {
    let file = |name: &str| directory.join(name).display().to_string();
    [
        // The cookie is kept there.
        ("HOME", directory.display().to_string()),
        ("ERL_EPMD_PORT", epmd_port.to_string()),
        ("ERL_EPMD_ADDRESS", "127.0.0.1".into()),
        ("RABBITMQ_NODENAME", format!("airtight_{port}@localhost")),
        ("RABBITMQ_DIST_PORT", dist_port.to_string()),
        ("RABBITMQ_CONF_ENV_FILE", file("none")),
        ("RABBITMQ_CONFIG_FILE", file("rabbitmq.conf")),
        ("RABBITMQ_ADVANCED_CONFIG_FILE", file("none.config")),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", file("enabled_plugins")),
        ("RABBITMQ_MNESIA_BASE", file("mnesia")),
        ("RABBITMQ_LOG_BASE", file("logs")),
        ("RABBITMQ_GENERATED_CONFIG_DIR", file("generated")),
        ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}".into()),
        // The script replaces itself by the server, so that a signal to the child is one to the server.
        ("detached", "yes".into()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}
