//! Makes stores and sinks from addresses. This is the only file that knows which backends exist: a new backend needs a
//! line here and a scheme in `config/urls.rs`.

use std::{path::Path, sync::Arc, time::Duration};

use airtight::{
    Code, Error, Sink, Source,
    admin::{Admin, Finding},
    debezium::{FORMAT as DEBEZIUM, connector::ConnectorConfig},
    format::Formats,
    kafka::{KafkaConfig, KafkaSink},
    log::LogAdmin,
    nats::{NatsConfig, NatsSink},
    postgres::{CdcOptions, Grantee, PgOptions, PgOutbox},
    rabbitmq::{RabbitmqConfig, RabbitmqSink},
    redis::{RedisConfig, RedisSink},
    sinks::{FileSink, StdoutSink},
    table::Shape,
    webhook::{WebhookConfig, WebhookSink},
};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use crate::{
    args::DatabaseArgs,
    config::{
        Config, Database, Pipeline, Reading,
        urls::{Broker, BrokerKind, DatabaseUrl, SinkTarget, Webhook},
    },
    debezium,
    errors::{Failure, Outcome},
    null_sink::NullSink,
};

/// The formats that configs and addresses can name.
pub(crate) const FORMATS: Formats = Formats::with(&[DEBEZIUM]);

/// How long a server may take to accept a connection.
const REACH: Duration = Duration::from_secs(5);

/// The demo keeps its bank in the same file, so it needs the connections that [`Store`] does not expose.
pub(crate) use airtight::sqlite::SqliteOutbox;

/// An outbox and how to use it: everything that is known before connecting.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) url: DatabaseUrl,
    pub(crate) database: Database,
    /// The Debezium connector that the table belongs to, with `run --debezium`.
    pub(crate) connector: Option<Arc<ConnectorConfig>>,
}

impl Target {
    /// From the command line, the config and the environment, in this order.
    pub(crate) fn resolve(args: &DatabaseArgs, config: Option<&Config>) -> Outcome<Self> {
        let url = match (&args.url, config.and_then(|config| config.url.clone())) {
            (Some(text), _) => parse_url(text, "--url")?,
            (None, Some(url)) => url,
            (None, None) => match std::env::var("DATABASE_URL") {
                Ok(text) => parse_url(&text, "DATABASE_URL")?,
                Err(_) => {
                    return Err(Failure::usage(
                        "no database given; pass --url sqlite:PATH or --url postgres://USER@HOST/DATABASE, or set DATABASE_URL",
                    ));
                }
            },
        };
        let mut database = config.map(|config| config.database.clone()).unwrap_or_default();
        if args.table.is_some() && database.spec.is_some() {
            return Err(Failure::usage(
                "--table and the config's [table] name two tables: remove one of them",
            ));
        }
        database.schema = args.schema.clone().or(database.schema);
        database.table = args.table.clone().or(database.table);
        if matches!(url, DatabaseUrl::Sqlite(_)) {
            refuse_for_sqlite(&database)?;
        }
        Ok(Self { url, database, connector: None })
    }

    /// Whether it is an SQLite file.
    pub(crate) fn is_sqlite(&self) -> bool {
        matches!(self.url, DatabaseUrl::Sqlite(_))
    }

    /// Sets whether `migrate` adds the trigger that notifies relays.
    pub(crate) fn set_notify(&mut self, notify: bool) -> Outcome {
        self.database.notify = Some(notify);
        if matches!(self.url, DatabaseUrl::Sqlite(_)) { refuse_for_sqlite(&self.database) } else { Ok(()) }
    }

    /// If no outbox exists yet, treats the missing one as a log.
    pub(crate) fn expect_log(&mut self) {
        if self.database.spec.is_none() {
            self.database.shape.get_or_insert(Shape::Log);
        }
    }

    /// Sets the shape of the outbox that `migrate` creates.
    pub(crate) fn set_shape(&mut self, shape: Shape) -> Outcome {
        if self.database.spec.is_some() {
            return Err(Failure::usage(
                "--shape applies to airtight's own table, but the config's [table] maps another table: remove --shape",
            ));
        }
        self.database.shape = Some(shape);
        Ok(())
    }

    /// The same from a command's arguments; reads their config if they name one.
    pub(crate) fn from_args(args: &DatabaseArgs) -> Outcome<Self> {
        let config = args.config.as_deref().map(Config::load).transpose()?;
        Self::resolve(args, config.as_ref())
    }

    /// Opens a store whose tables should exist, in the shape that it was created with.
    pub(crate) async fn open(&self) -> Result<Store, Error> {
        if let DatabaseUrl::Sqlite(path) = &self.url
            && !path.exists()
        {
            // Opening would create an empty file and then complain about its tables.
            return Err(Error::permanent(
                Code::NO_FILE,
                format!(
                    "there is no file {}; check the path, or create it with `airtight migrate --url sqlite:{}`",
                    path.display(),
                    path.display()
                ),
            ));
        }
        self.connect().await?.detect().await
    }

    /// Opens a store to migrate, and creates a missing SQLite file. Without a configured shape, the existing shape stays.
    pub(crate) async fn create(&self) -> Result<Store, Error> {
        let store = self.connect().await?;
        if self.database.shape.is_some() { Ok(store) } else { store.detect().await }
    }

    async fn connect(&self) -> Result<Store, Error> {
        match &self.url {
            DatabaseUrl::Sqlite(path) => {
                let outbox = open_sqlite(path).await?.shape(self.shape());
                Ok(Store::Sqlite(match &self.database.spec {
                    Some(spec) => outbox.spec(spec.clone()),
                    None => outbox,
                }))
            }
            DatabaseUrl::Postgres(url) => {
                reach(url.reveal(), &self.url).await?;
                let mut options = self.pg_options();
                let Some(connector) = &self.connector else {
                    return Ok(Store::Postgres(PgOutbox::connect(url.reveal(), options).await?));
                };
                options.spec = Some(debezium::spec(url.reveal(), connector).await?);
                let outbox = PgOutbox::connect(url.reveal(), options).await?;
                // Debezium keeps its positions elsewhere. These tables are airtight's, and the user has not run `migrate`.
                for line in outbox.migrate().await? {
                    tracing::info!("{line}");
                }
                Ok(Store::Postgres(outbox))
            }
        }
    }

    /// The name of the database, where it has one.
    pub(crate) fn database_name(&self) -> Outcome<String> {
        let DatabaseUrl::Postgres(url) = &self.url else { return Ok(String::new()) };
        let options: PgConnectOptions =
            url.reveal().parse().map_err(|error| Failure::usage(format!("the database's URL: {error}")))?;
        Ok(options.get_database().unwrap_or_else(|| options.get_username()).to_owned())
    }

    /// The SQL that `migrate` would run.
    pub(crate) fn migration_sql(&self) -> String {
        match &self.url {
            DatabaseUrl::Sqlite(_) => SqliteOutbox::migration_sql(self.shape()),
            DatabaseUrl::Postgres(_) => PgOutbox::migration_sql(&self.pg_options()),
        }
    }

    /// The SQL that gives a role the least rights it needs. Without a configured shape, the database's shape is used.
    pub(crate) async fn grants_sql(&self, to: Grantee, role: &str) -> Outcome<String> {
        if matches!(self.url, DatabaseUrl::Sqlite(_)) {
            return Err(Failure::usage("--print-grants is for PostgreSQL: an SQLite file has no roles"));
        }
        let mut options = self.pg_options();
        if self.database.shape.is_none()
            && self.database.spec.is_none()
            && let Store::Postgres(outbox) = self.open().await?
        {
            options.shape = if outbox.spec().status.is_some() { Shape::Queue } else { Shape::Log };
        }
        let publication = named(&self.database_name()?, "default", &CdcOptions::slot("")).publication;
        PgOutbox::grants_sql(&options, to, role, &publication)
            .map_err(|error| Failure::usage(error.to_string()))
    }

    fn shape(&self) -> Shape {
        self.database.shape.unwrap_or_default()
    }

    fn pg_options(&self) -> PgOptions {
        PgOptions { shape: self.shape(), ..pg_options(&self.database) }
    }
}

/// Opens one plain connection first: a pool retries silently until its timeout, and then reports only the timeout.
/// The store reports all other errors of the server.
async fn reach(url: &str, shown: &DatabaseUrl) -> Result<(), Error> {
    let connect = async { PgConnection::connect(url).await?.close().await };
    let problem = match tokio::time::timeout(REACH, connect).await {
        Ok(Err(sqlx::Error::Io(error))) => error.to_string(),
        Ok(_) => return Ok(()),
        Err(_) => format!("no answer within {} s", REACH.as_secs()),
    };
    Err(Error::retryable(Code::UNREACHABLE, format!("cannot reach {shown}: {problem}")))
}

fn parse_url(text: &str, from: &str) -> Outcome<DatabaseUrl> {
    DatabaseUrl::parse(text).map_err(|message| Failure::usage(format!("{from}: {message}")))
}

fn refuse_for_sqlite(database: &Database) -> Outcome {
    let given = [
        ("schema", database.schema.is_some()),
        ("table", database.table.is_some()),
        ("table.schema", database.spec.as_ref().is_some_and(|spec| spec.schema.is_some())),
        ("max_connections", database.max_connections.is_some()),
        ("notify", database.notify.is_some()),
        ("listen", database.listen.is_some()),
        ("listen_url", database.listen_url.is_some()),
        ("prepared_statements", database.prepared_statements.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((key, _)) => {
            Err(Failure::usage(format!("`{key}` is for PostgreSQL; an SQLite outbox does not have it")))
        }
        None => Ok(()),
    }
}

/// Opens an SQLite outbox for the demo, which uses its connections.
pub(crate) async fn open_sqlite(path: &Path) -> Result<SqliteOutbox, Error> {
    let path = path.to_str().ok_or_else(|| {
        Error::permanent(Code::BAD_PATH, format!("the path {} is not valid UTF-8", path.display()))
    })?;
    SqliteOutbox::open(path).await
}

pub(crate) fn pg_options(database: &Database) -> PgOptions {
    let mut options = PgOptions { spec: database.spec.clone(), ..PgOptions::default() };
    if let Some(schema) = &database.schema {
        options.schema.clone_from(schema);
    }
    if let Some(table) = &database.table {
        options.table.clone_from(table);
    }
    if let Some(connections) = database.max_connections {
        options.max_connections = connections;
    }
    options.notify = database.notify;
    if let Some(listen) = database.listen {
        options.listen = listen;
    }
    if let Some(prepared) = database.prepared_statements {
        options.prepared_statements = prepared;
    }
    options.listen_url = database.listen_url.as_ref().map(|url| url.reveal().to_owned());
    options
}

/// An outbox of either kind.
pub(crate) enum Store {
    Sqlite(SqliteOutbox),
    Postgres(PgOutbox),
}

impl Store {
    /// The operator's side.
    pub(crate) fn admin(&self) -> &dyn Admin {
        match self {
            Self::Sqlite(outbox) => outbox,
            Self::Postgres(outbox) => outbox,
        }
    }

    /// The operator's side of a log. On a queue, each of its methods returns an error that says so.
    pub(crate) fn log_admin(&self) -> &dyn LogAdmin {
        match self {
            Self::Sqlite(outbox) => outbox,
            Self::Postgres(outbox) => outbox,
        }
    }

    /// The relay's side.
    pub(crate) fn source(&self, pipeline: &Pipeline) -> Result<Arc<dyn Source>, Error> {
        Ok(match (self, &pipeline.read) {
            (Self::Sqlite(outbox), Reading::Queue(queue)) => Arc::new(outbox.queue(queue.clone())),
            (Self::Sqlite(outbox), Reading::Log(log)) => Arc::new(outbox.log(log.clone())),
            (Self::Sqlite(_), Reading::Cdc(_)) => return Err(no_wal()),
            (Self::Postgres(outbox), Reading::Queue(queue)) => Arc::new(outbox.queue(queue.clone())),
            (Self::Postgres(outbox), Reading::Log(log)) => Arc::new(outbox.log(log.clone())),
            (Self::Postgres(outbox), Reading::Cdc(cdc)) => {
                Arc::new(outbox.cdc(named(&database_of(outbox), &pipeline.name, cdc))?)
            }
        })
    }

    /// The problems that prevent reading the outbox through the WAL.
    pub(crate) async fn check_cdc(&self, name: &str, cdc: &CdcOptions) -> Result<Vec<Finding>, Error> {
        match self {
            Self::Sqlite(_) => Err(no_wal()),
            Self::Postgres(outbox) => outbox.check_cdc(&named(&database_of(outbox), name, cdc)).await,
        }
    }

    /// The PostgreSQL outbox, for operations that only PostgreSQL has.
    pub(crate) fn postgres(&self) -> Option<&PgOutbox> {
        match self {
            Self::Sqlite(_) => None,
            Self::Postgres(outbox) => Some(outbox),
        }
    }

    /// The names of the readers that follow the outbox through the WAL.
    pub(crate) async fn readers(&self) -> Result<Vec<String>, Error> {
        match self {
            Self::Sqlite(_) => Ok(Vec::new()),
            Self::Postgres(outbox) => Ok(outbox.readers().await?.into_iter().map(|one| one.name).collect()),
        }
    }

    /// Whether the outbox is a log, because its rows have no status.
    pub(crate) fn is_log(&self) -> bool {
        match self {
            Self::Sqlite(outbox) => outbox.table().status.is_none(),
            Self::Postgres(outbox) => outbox.spec().status.is_none(),
        }
    }

    /// The column that says when a row was written.
    pub(crate) fn created_at(&self) -> Option<&str> {
        match self {
            Self::Sqlite(outbox) => outbox.table().created_at.as_deref(),
            Self::Postgres(outbox) => outbox.spec().created_at.as_deref(),
        }
    }

    /// Whether its rows have a seq that consumers can follow.
    pub(crate) fn is_followable(&self) -> bool {
        match self {
            Self::Sqlite(_) => true,
            Self::Postgres(outbox) => outbox.spec().seq.is_some(),
        }
    }

    /// Creates a log's table partitions in advance, if the database has them. Returns how many.
    pub(crate) async fn make_partitions(&self) -> Result<u64, Error> {
        match self {
            Self::Sqlite(_) => Ok(0),
            Self::Postgres(outbox) => outbox.make_partitions().await,
        }
    }

    /// The store in the shape that the database has.
    async fn detect(self) -> Result<Self, Error> {
        Ok(match self {
            Self::Sqlite(outbox) => Self::Sqlite(outbox.detect().await?),
            Self::Postgres(outbox) => Self::Postgres(outbox.detect().await?),
        })
    }
}

/// The error for `cdc` on SQLite.
pub(crate) fn no_wal() -> Error {
    Error::permanent(Code::NO_WAL, "airtight cannot follow SQLite's WAL: `cdc` is for PostgreSQL")
}

/// Fills in the names that the config leaves out. All databases of a server share its slots, so the database's name is
/// part of a slot's name.
pub(crate) fn named(database: &str, pipeline: &str, cdc: &CdcOptions) -> CdcOptions {
    let mut options = cdc.clone();
    if options.log.consumer.is_empty() {
        let pipeline = if pipeline == "default" { String::new() } else { format!("_{pipeline}") };
        let name = format!("airtight_{database}{pipeline}").to_lowercase();
        let fit = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        options.log.consumer = name.chars().map(fit).take(63).collect();
    }
    if options.publication.is_empty() {
        options.publication.clone_from(&options.log.consumer);
    }
    options
}

fn database_of(outbox: &PgOutbox) -> String {
    let options = outbox.pool().connect_options();
    options.get_database().unwrap_or_else(|| options.get_username()).to_owned()
}

/// Makes a sink, without connecting.
pub(crate) fn sink(target: &SinkTarget) -> Result<Arc<dyn Sink>, Error> {
    Ok(match target {
        SinkTarget::Stdout => Arc::new(StdoutSink::new()),
        SinkTarget::Null => Arc::new(NullSink),
        SinkTarget::File(path) => Arc::new(FileSink::new(path)),
        SinkTarget::Webhook(webhook) => Arc::new(WebhookSink::new(webhook_config(webhook))?),
        SinkTarget::Broker(broker) => broker_sink(broker)?,
    })
}

/// The keys that a broker's table of a config may have.
pub(crate) fn broker_keys(kind: BrokerKind) -> &'static [&'static str] {
    match kind {
        BrokerKind::Kafka => KafkaConfig::KEYS,
        BrokerKind::Redis => RedisConfig::KEYS,
        BrokerKind::Nats => NatsConfig::KEYS,
        BrokerKind::RabbitMq => RabbitmqConfig::KEYS,
    }
}

fn broker_sink(broker: &Broker) -> Result<Arc<dyn Sink>, Error> {
    let url = broker.url.reveal();
    let settings: Vec<(String, String)> =
        broker.settings.iter().map(|(key, value)| (key.clone(), value.reveal().to_owned())).collect();
    Ok(match broker.kind {
        BrokerKind::Kafka => {
            let mut config = KafkaConfig::from_url(url)?;
            config.set_all(&settings)?;
            Arc::new(KafkaSink::new(config)?)
        }
        BrokerKind::Redis => {
            let mut config = RedisConfig::from_url_with(url, FORMATS)?;
            settings.iter().try_for_each(|(key, value)| config.set(key, value))?;
            Arc::new(RedisSink::new(config)?)
        }
        BrokerKind::Nats => {
            let mut config = NatsConfig::from_url_with(url, FORMATS)?;
            settings.iter().try_for_each(|(key, value)| config.set(key, value))?;
            Arc::new(NatsSink::new(config)?)
        }
        BrokerKind::RabbitMq => {
            let mut config = RabbitmqConfig::from_url_with(url, FORMATS)?;
            settings.iter().try_for_each(|(key, value)| config.set(key, value))?;
            Arc::new(RabbitmqSink::new(config)?)
        }
    })
}

pub(crate) fn webhook_config(webhook: &Webhook) -> WebhookConfig {
    let mut config = WebhookConfig::new(&webhook.url);
    if let Some(secret) = &webhook.secret {
        config = config.secret(secret.reveal());
    }
    for (name, value) in &webhook.headers {
        config = config.header(name, value.reveal());
    }
    if let Some(timeout) = webhook.timeout {
        config = config.timeout(timeout);
    }
    if let Some(concurrency) = webhook.concurrency {
        config = config.concurrency(concurrency);
    }
    if let Some(file) = &webhook.ca {
        config = config.ca(file);
    }
    if let Some(proxy) = &webhook.proxy {
        config = config.proxy(proxy.reveal());
    }
    config.format(webhook.format)
}
