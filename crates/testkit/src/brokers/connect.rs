//! Kafka Connect with Debezium, for tests that compare airtight with Debezium: one standalone worker, and any number of
//! connectors.
//!
//! Connect comes with Kafka's jars; Debezium's are where `AIRTIGHT_TEST_DEBEZIUM` says (`AIRTIGHT_WITH_DEBEZIUM=1
//! scripts/services start kafka` fetches them). A worker starts in about three seconds.

use std::{path::Path, time::Duration};

use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::process::{Recipe, ServerProcess};
use crate::{ledger, ports::Port};

const HOME: &str = "AIRTIGHT_TEST_KAFKA_HOME";
const JAVA: &str = "AIRTIGHT_TEST_JAVA";
const JARS: &str = "AIRTIGHT_TEST_DEBEZIUM";
/// For everything that a JVM does, on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(90);
const LOOK: Duration = Duration::from_millis(100);

/// A worker that ends with the test.
#[derive(Debug)]
pub struct Connect {
    server: ServerProcess,
}

impl Connect {
    /// Starts one on this Kafka; none, and a line that says so, where there is no Connect or no Debezium to start.
    pub async fn start(test_name: &str, bootstrap: &str) -> Option<Self> {
        let (Some(java), Some(home)) = (ledger::variable(JAVA), ledger::variable(HOME)) else {
            ledger::skip(test_name, "no Kafka Connect to start", HOME);
            return None;
        };
        let Some(jars) = ledger::variable(JARS) else {
            ledger::skip(test_name, "no Debezium to start", JARS);
            return None;
        };
        ledger::met("debezium", test_name);
        let directory = tempfile::tempdir().expect("a temporary directory");
        let port = Port::reserve();
        let config = directory.path().join("worker.properties");
        std::fs::write(&config, properties(bootstrap, Path::new(&jars), directory.path(), &port))
            .expect("a configuration");
        let recipe = Recipe {
            program: java.into(),
            args: vec![
                format!("@{home}/java.options"),
                "org.apache.kafka.connect.cli.ConnectStandalone".into(),
                config.display().to_string(),
            ],
            env: Vec::new(),
            port,
            patience: PATIENCE,
        };
        let connect = Self { server: ServerProcess::start(recipe, directory).await };
        connect.until(|| async { connect.request("GET", "/connectors", None).await.is_some() }).await;
        Some(connect)
    }

    /// Adds a connector, and waits until its task runs or has failed.
    ///
    /// # Panics
    ///
    /// If the worker refuses it.
    pub async fn add(&self, name: &str, config: &Map<String, Value>) {
        let body = Value::Object(config.clone()).to_string();
        let path = format!("/connectors/{name}/config");
        let answer = self.request("PUT", &path, Some(&body)).await;
        assert!(answer.as_ref().is_some_and(|answer| answer.get("config").is_some()), "{name}: {answer:?}");
        self.until(|| async { self.task(name).await.is_some() }).await;
    }

    /// The state of a connector's task (`RUNNING`, `FAILED`), and why it has failed; none while it has no task.
    pub async fn task(&self, name: &str) -> Option<(String, Option<String>)> {
        let status = self.request("GET", &format!("/connectors/{name}/status"), None).await?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        // A connector that cannot even start has no tasks.
        let part = status["tasks"].get(0).unwrap_or(&status["connector"]);
        let (state, trace) = (text(&part["state"])?, text(&part["trace"]));
        (status["tasks"].get(0).is_some() || state == "FAILED").then_some((state, trace))
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.server.pid()
    }

    /// Asks it to end and waits until it has. Its positions stay.
    pub async fn stop(&self) {
        self.server.stop().await;
    }

    /// Starts it again, without connectors.
    pub async fn start_again(&self) {
        self.server.start_again().await;
        self.until(|| async { self.request("GET", "/connectors", None).await.is_some() }).await;
    }

    /// Removes a connector. Its slot stays.
    pub async fn remove(&self, name: &str) {
        self.request("DELETE", &format!("/connectors/{name}"), None).await;
    }

    /// The last lines that the worker wrote.
    pub fn log_tail(&self) -> String {
        self.server.log_tail()
    }

    /// All that it wrote.
    pub fn log(&self) -> String {
        self.server.log_text()
    }

    /// One call of the worker's API; none where there is no answer, or none in JSON. HTTP/1.0, so that the answer ends
    /// with the connection.
    async fn request(&self, method: &str, path: &str, body: Option<&str>) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.server.port())).await.ok()?;
        let body = body.unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        let text = String::from_utf8_lossy(&answer).into_owned();
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    }

    async fn until<F: Future<Output = bool>>(&self, condition: impl Fn() -> F) {
        let end = tokio::time::Instant::now() + PATIENCE;
        while !condition().await {
            assert!(tokio::time::Instant::now() < end, "Connect does not serve: {}", self.log_tail());
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// What every connector of Debezium for this database needs to know. `url` is `postgres://user[:password]@host:port/name`.
///
/// # Panics
///
/// If the URL is another.
pub fn database(url: &str) -> Map<String, Value> {
    let address = airtight_core::settings::Address::parse(url).expect("a URL of a database");
    let (host, port) = address.host(5_432).expect("one host");
    let settings = json!({
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "tasks.max": "1",
        "plugin.name": "pgoutput",
        "database.hostname": host,
        "database.port": port.to_string(),
        "database.user": address.user.clone().unwrap_or_default(),
        "database.password": address.password.clone().unwrap_or_else(|| "none".into()),
        "database.dbname": address.path().unwrap_or_default(),
    });
    match settings {
        Value::Object(settings) => settings,
        _ => unreachable!("an object was written above"),
    }
}

fn properties(bootstrap: &str, jars: &Path, directory: &Path, port: &Port) -> String {
    // A plugin is a directory below this path, and there may be others beside Debezium's.
    let plugins = directory.join("plugins");
    std::fs::create_dir(&plugins).expect("a directory for the plugin");
    std::os::unix::fs::symlink(jars, plugins.join("debezium")).expect("a link to the plugin");
    format!(
        "bootstrap.servers={bootstrap}\n\
         plugin.path={}\n\
         plugin.discovery=service_load\n\
         listeners=http://127.0.0.1:{port}\n\
         offset.storage.file.filename={}\n\
         offset.flush.interval.ms=1000\n\
         key.converter=org.apache.kafka.connect.storage.StringConverter\n\
         value.converter=org.apache.kafka.connect.storage.StringConverter\n",
        plugins.display(),
        directory.join("offsets").display(),
    )
}
