//! A Kafka server for one test: one KRaft node, with listeners for several kinds of login.
//!
//! `scripts/services start kafka` fetches it and leaves its address in the environment. It starts in two to four
//! seconds, most of them the JVM's, and takes about 200 MB.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
    time::timeout,
};

use super::process::{Recipe, ServerProcess};
use crate::{ledger, ports::Port};

const HOME: &str = "AIRTIGHT_TEST_KAFKA_HOME";
const JAVA: &str = "AIRTIGHT_TEST_JAVA";
/// The id of every cluster.
const CLUSTER: &str = "AAAAAAAAAAAAAAAAAAAAAQ";
/// For everything that starts a JVM, on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(90);

/// Who can log in on [`Listener::Sasl`] and [`Listener::SaslTls`], by `PLAIN` and both kinds of `SCRAM`.
/// `OAUTHBEARER` takes any unsecured token, for any `sub`.
pub const USER: &str = "alice";
/// The password of [`USER`].
pub const PASSWORD: &str = "alice-secret";

/// A listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// No encryption, no login. Always present; with ACLs, clients of this listener may do everything.
    Plain,
    /// A login: see [`USER`].
    Sasl,
    /// TLS: see [`Kafka::ca`].
    Tls,
    /// A login through TLS.
    SaslTls,
}

impl Listener {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAINTEXT",
            Self::Sasl => "SASL_PLAINTEXT",
            Self::Tls => "SSL",
            Self::SaslTls => "SASL_SSL",
        }
    }
}

/// The options of a server.
#[derive(Debug, Clone, Default)]
pub struct KafkaOptions {
    /// Listeners besides [`Listener::Plain`].
    pub listeners: Vec<Listener>,
    /// A user that logs in may do nothing until [`Kafka::allow`].
    pub acls: bool,
    /// `auto.create.topics.enable`.
    pub auto_create_topics: bool,
    /// `message.max.bytes`; about 1 MiB otherwise.
    pub message_max_bytes: Option<u32>,
    /// Further lines of `server.properties`.
    pub settings: Vec<String>,
}

/// A server that ends with the test.
#[derive(Debug)]
pub struct Kafka {
    server: ServerProcess,
    installation: Installation,
    ports: Ports,
}

/// Where Kafka's jars are, and what runs them.
#[derive(Debug)]
pub struct Installation {
    java: String,
    home: PathBuf,
}

impl Kafka {
    /// Starts a plain one; none, and a line that says so, where `scripts/services` has found none to start.
    pub async fn start(test_name: &str) -> Option<Self> {
        Self::start_with(test_name, KafkaOptions::default()).await
    }

    /// Starts one like this.
    pub async fn start_with(test_name: &str, options: KafkaOptions) -> Option<Self> {
        let (Some(java), Some(home)) = (ledger::variable(JAVA), ledger::variable(HOME)) else {
            ledger::skip(test_name, "no Kafka to start", HOME);
            return None;
        };
        ledger::met("kafka", test_name);
        let installation = Installation { java, home: home.into() };
        let directory = tempfile::tempdir().expect("a temporary directory");
        let ports = Ports::pick();
        write_certificates(directory.path());
        let config = directory.path().join("server.properties");
        std::fs::write(&config, properties(&options, &ports, directory.path())).expect("a configuration");
        installation.format(&directory).await;

        let recipe = Recipe {
            program: installation.java.clone().into(),
            args: vec![installation.options(), "kafka.Kafka".into(), config.display().to_string()],
            env: Vec::new(),
            port: ports.of(Listener::Plain).clone(),
            patience: PATIENCE,
        };
        let server = ServerProcess::start(recipe, directory).await;
        let kafka = Self { server, installation, ports };
        kafka.until_it_serves().await;
        Some(kafka)
    }

    /// `bootstrap.servers` for [`Listener::Plain`].
    pub fn bootstrap(&self) -> String {
        self.address(Listener::Plain)
    }

    /// `bootstrap.servers` for one of the listeners that [`KafkaOptions`] has asked for.
    pub fn address(&self, listener: Listener) -> String {
        format!("127.0.0.1:{}", self.ports.of(listener))
    }

    /// The file with the certificate to trust (`ssl.ca.location`).
    pub fn ca(&self) -> PathBuf {
        self.server.directory().join("ca.pem")
    }

    /// A second broker of the same cluster, numbered 2, for topics with two replicas.
    pub async fn second_broker(&self) -> ServerProcess {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (port, path) = (Port::reserve(), directory.path().display());
        let controller = self.ports.controller();
        let properties = format!(
            "process.roles=broker\n\
             node.id=2\n\
             controller.quorum.voters=1@127.0.0.1:{controller}\n\
             listeners=PLAINTEXT://127.0.0.1:{port}\n\
             controller.listener.names=CONTROLLER\n\
             listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\n\
             log.dirs={path}/data\n\
             log.cleaner.dedupe.buffer.size=4194304\n\
             log.cleaner.io.buffer.size=131072\n"
        );
        let config = directory.path().join("server.properties").display().to_string();
        std::fs::write(&config, properties).expect("a configuration");
        let args = ["format", "-t", CLUSTER, "-c", &config];
        let formatted = self.installation.run("kafka.tools.StorageTool", &args).await;
        formatted.unwrap_or_else(|text| panic!("formatting: {text}"));
        let recipe = Recipe {
            program: self.installation.java.clone().into(),
            args: vec![self.installation.options(), "kafka.Kafka".into(), config],
            env: Vec::new(),
            port,
            patience: PATIENCE,
        };
        let server = ServerProcess::start(recipe, directory).await;
        let end = tokio::time::Instant::now() + PATIENCE;
        while !brokers(&self.bootstrap()).await.is_ok_and(|count| count > 1) {
            assert!(tokio::time::Instant::now() < end, "it does not join: {}", server.log_tail());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server
    }

    /// Starts it after [`Kafka::stop`] or [`Kafka::kill`], on the same ports and data.
    pub async fn start_again(&self) {
        self.server.start_again().await;
        self.until_it_serves().await;
    }

    /// Asks it to end and waits until it has.
    pub async fn stop(&self) {
        self.server.stop().await;
    }

    /// Ends it as a crash would.
    pub async fn kill(&self) {
        self.server.kill().await;
    }

    /// Suspends it: connections stay open, but nothing answers.
    pub fn suspend(&self) {
        self.server.suspend();
    }

    /// Lets it continue.
    pub fn resume(&self) {
        self.server.resume();
    }

    /// The last lines that it wrote.
    pub fn log_tail(&self) -> String {
        self.server.log_tail()
    }

    /// Makes a topic.
    pub async fn create_topic(&self, topic: &str, partitions: u32) {
        let partitions = partitions.to_string();
        self.tool(
            "org.apache.kafka.tools.TopicCommand",
            &["--create", "--topic", topic, "--partitions", &partitions],
        )
        .await;
    }

    /// With ACLs: lets `user` do `operation` (`Write`, `Describe`, `Create`, …) on a topic, or on `*`.
    pub async fn allow(&self, user: &str, operation: &str, topic: &str) {
        let user = format!("User:{user}");
        let args = ["--add", "--allow-principal", &user, "--operation", operation, "--topic", topic];
        self.tool("org.apache.kafka.tools.AclCommand", &args).await;
    }

    /// Takes back what [`Kafka::allow`] gave.
    pub async fn forbid(&self, user: &str, operation: &str, topic: &str) {
        let user = format!("User:{user}");
        let args =
            ["--remove", "--force", "--allow-principal", &user, "--operation", operation, "--topic", topic];
        self.tool("org.apache.kafka.tools.AclCommand", &args).await;
    }

    /// Runs one of Kafka's own tools on this server, and returns what it printed. It takes a second or two.
    ///
    /// # Panics
    ///
    /// With its output, if it fails.
    pub async fn tool(&self, class: &str, args: &[&str]) -> String {
        let address = self.bootstrap();
        let mut all = vec!["--bootstrap-server", &address];
        all.extend(args);
        self.installation.run(class, &all).await.unwrap_or_else(|text| panic!("{class} {args:?}: {text}"))
    }

    /// For tools that speak to other listeners.
    pub fn installation(&self) -> &Installation {
        &self.installation
    }

    /// A port that is open is not yet a broker that serves. A loop of its own: a closure would not be `Send`.
    async fn until_it_serves(&self) {
        let end = tokio::time::Instant::now() + PATIENCE;
        loop {
            let asked = timeout(Duration::from_secs(5), brokers(&self.bootstrap())).await;
            if asked.is_ok_and(|answer| answer.is_ok_and(|brokers| brokers > 0)) {
                return;
            }
            assert!(tokio::time::Instant::now() < end, "Kafka does not serve: {}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// One for each listener, asked for or not, and the controller's.
#[derive(Debug)]
struct Ports([Port; 5]);

impl Ports {
    fn pick() -> Self {
        Self(std::array::from_fn(|_| Port::reserve()))
    }

    fn of(&self, listener: Listener) -> &Port {
        &self.0[listener as usize]
    }

    fn controller(&self) -> &Port {
        &self.0[4]
    }
}

impl Installation {
    /// Writes the data directory's first files, with the users that SCRAM knows.
    async fn format(&self, directory: &TempDir) {
        let config = directory.path().join("server.properties").display().to_string();
        let [sha256, sha512] = ["SCRAM-SHA-256", "SCRAM-SHA-512"]
            .map(|kind| format!("{kind}=[name={USER},password={PASSWORD}]"));
        let args = ["format", "-t", CLUSTER, "-c", &config, "--add-scram", &sha256, "--add-scram", &sha512];
        self.run("kafka.tools.StorageTool", &args).await.unwrap_or_else(|text| panic!("formatting: {text}"));
    }

    /// Runs one of Kafka's classes: what it printed, also if it failed.
    pub async fn run(&self, class: &str, args: &[&str]) -> Result<String, String> {
        let output = Command::new(&self.java)
            .arg(self.options())
            .arg("-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
            .arg(class)
            .args(args)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = timeout(PATIENCE, output)
            .await
            .unwrap_or_else(|_| panic!("{class} does not end"))
            .unwrap_or_else(|error| panic!("{} does not start: {error}", self.java));
        let text =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        if output.status.success() { Ok(text) } else { Err(text) }
    }

    /// The file that `scripts/services.d/kafka.sh` has written: heap, class path, archive of classes.
    fn options(&self) -> String {
        format!("@{}", self.home.join("java.options").display())
    }
}

fn properties(options: &KafkaOptions, ports: &Ports, directory: &Path) -> String {
    let directory = directory.display();
    let controller = ports.controller();
    let mut listeners = vec![Listener::Plain];
    listeners.extend(&options.listeners);
    listeners.dedup();
    let addresses: Vec<_> = listeners
        .iter()
        .map(|&listener| format!("{}://127.0.0.1:{}", listener.name(), ports.of(listener)))
        .collect();
    // One node has one replica of everything; the small buffers save 130 MB, the rest saves waiting.
    let mut text = format!(
        "process.roles=broker,controller\n\
         node.id=1\n\
         controller.quorum.voters=1@127.0.0.1:{controller}\n\
         listeners={},CONTROLLER://127.0.0.1:{controller}\n\
         controller.listener.names=CONTROLLER\n\
         listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,\
         SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL\n\
         log.dirs={directory}/data\n\
         auto.create.topics.enable={}\n\
         offsets.topic.num.partitions=1\n\
         offsets.topic.replication.factor=1\n\
         transaction.state.log.num.partitions=1\n\
         transaction.state.log.replication.factor=1\n\
         transaction.state.log.min.isr=1\n\
         group.initial.rebalance.delay.ms=0\n\
         log.cleaner.dedupe.buffer.size=4194304\n\
         log.cleaner.io.buffer.size=131072\n\
         num.network.threads=2\n\
         num.io.threads=4\n\
         background.threads=2\n",
        addresses.join(","),
        options.auto_create_topics,
    );
    for listener in listeners {
        match listener {
            Listener::Plain => {}
            Listener::Sasl => text.push_str(&sasl("sasl_plaintext")),
            Listener::Tls => text.push_str(&tls("ssl", &directory)),
            Listener::SaslTls => {
                text.push_str(&sasl("sasl_ssl"));
                text.push_str(&tls("sasl_ssl", &directory));
            }
        }
    }
    if options.acls {
        // ANONYMOUS is who comes without a login: the plain listener, and the node itself.
        text.push_str(
            "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n\
             allow.everyone.if.no.acl.found=false\n\
             super.users=User:ANONYMOUS\n",
        );
    }
    if let Some(bytes) = options.message_max_bytes {
        text.push_str(&format!("message.max.bytes={bytes}\n"));
    }
    for line in &options.settings {
        text.push_str(&format!("{line}\n"));
    }
    text
}

fn sasl(listener: &str) -> String {
    let prefix = format!("listener.name.{listener}");
    let modules = "org.apache.kafka.common.security";
    format!(
        "{prefix}.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER\n\
         {prefix}.plain.sasl.jaas.config={modules}.plain.PlainLoginModule required user_{USER}=\"{PASSWORD}\";\n\
         {prefix}.scram-sha-256.sasl.jaas.config={modules}.scram.ScramLoginModule required;\n\
         {prefix}.scram-sha-512.sasl.jaas.config={modules}.scram.ScramLoginModule required;\n\
         {prefix}.oauthbearer.sasl.jaas.config={modules}.oauthbearer.OAuthBearerLoginModule required \
         unsecuredLoginStringClaim_sub=\"broker\";\n"
    )
}

fn tls(listener: &str, directory: &impl std::fmt::Display) -> String {
    let prefix = format!("listener.name.{listener}");
    format!("{prefix}.ssl.keystore.type=PEM\n{prefix}.ssl.keystore.location={directory}/server.pem\n")
}

/// An authority (`ca.pem`), and a key and certificate by it for this machine (`server.pem`).
fn write_certificates(directory: &Path) {
    let key = || KeyPair::generate().expect("a key");
    let mut authority = CertificateParams::new(Vec::new()).expect("no names");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "airtight test authority");
    let authority_key = key();
    let ca = authority.self_signed(&authority_key).expect("a certificate");
    let server_key = key();
    let server = CertificateParams::new(["localhost".into(), "127.0.0.1".into()])
        .and_then(|params| params.signed_by(&server_key, &Issuer::new(authority, &authority_key)))
        .expect("a certificate");
    let server = server_key.serialize_pem() + &server.pem();
    for (file, text) in [("ca.pem", ca.pem()), ("server.pem", server)] {
        std::fs::write(directory.join(file), text).expect("a file for a certificate");
    }
}

/// How many brokers one of them knows of. By hand, as a client would bring its own ideas of waiting along.
async fn brokers(address: &str) -> std::io::Result<i32> {
    // Size, Metadata, version 1, correlation id, no client id, no topics.
    const REQUEST: &[u8] = b"\0\0\0\x0e\0\x03\0\x01\0\0\0\x01\xff\xff\0\0\0\0";
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(REQUEST).await?;
    let _size = stream.read_i32().await?;
    let _correlation = stream.read_i32().await?;
    stream.read_i32().await
}
