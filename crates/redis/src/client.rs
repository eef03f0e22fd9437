//! Connections, and the errors when one breaks or the server refuses.
//!
//! Each request has its own connection and waits for its answer before the next, so an error on one connection affects no
//! other delivery. Nothing is queued for a server that is unavailable: there is no connection then, and every call that
//! needs one gets the error.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use airtight_core::{Code, Error, Result};
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, RedisConnectionInfo, RedisError, Value, aio::MultiplexedConnection,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{config::RedisConfig, errors::Refusal, tls::Tls};

/// A connection that was idle for this long is tested before use: servers and firewalls close idle connections, and no
/// delivery should fail because of that.
const RESTED: Duration = Duration::from_millis(100);

/// Connections to one server.
pub(crate) struct Client {
    pub(crate) config: RedisConfig,
    pub(crate) address: String,
    tls: Option<Tls>,
    idle: Mutex<Vec<Connection>>,
    /// The largest part of a request that the server takes, where it tells.
    largest: AtomicUsize,
    pub(crate) has_warned: AtomicBool,
}

/// A connection. Dropping it closes it, whatever is under way.
pub(crate) struct Connection {
    redis: MultiplexedConnection,
    // Left to itself, it would wait for answers that may never come.
    _driver: AbortOnDropHandle<()>,
    used: Instant,
    /// When it was opened, by the server's clock in unix milliseconds (asked with `max_age` only) and by ours.
    opened: (i64, Instant),
}

impl Connection {
    /// The server's time, in unix milliseconds. Ids are made from it, so trimming goes by no other clock.
    pub(crate) fn server_time(&self) -> i64 {
        let (then, at) = self.opened;
        then.saturating_add(i64::try_from(at.elapsed().as_millis()).unwrap_or(i64::MAX))
    }
}

impl Client {
    /// Checks the config and reads its files.
    pub(crate) fn new(config: RedisConfig) -> Result<Self> {
        config.check()?;
        let tls = Tls::new(&config)?;
        Ok(Self {
            address: config.address(),
            config,
            tls,
            idle: Mutex::default(),
            largest: AtomicUsize::new(usize::MAX),
            has_warned: AtomicBool::new(false),
        })
    }

    /// The largest part of a request that the server takes, as far as is known.
    pub(crate) fn largest(&self) -> usize {
        self.largest.load(Ordering::Relaxed)
    }

    /// A connection that works, or did a moment ago.
    pub(crate) async fn connection(&self) -> Result<Connection> {
        let idle = self.idle().pop();
        if let Some(mut connection) = idle {
            if connection.used.elapsed() < RESTED {
                return Ok(connection);
            }
            // Any answer will do.
            let ping = redis::cmd("PING");
            if self.ask(&mut connection, &ping, self.config.connect_timeout).await.is_ok() {
                return Ok(connection);
            }
            // The others have rested longer.
            self.forget();
        }
        self.connect().await
    }

    /// Takes back a connection that has answered all it was asked.
    pub(crate) fn keep(&self, mut connection: Connection) {
        connection.used = Instant::now();
        self.idle().push(connection);
    }

    /// Closes the connections that nobody uses.
    pub(crate) fn forget(&self) {
        self.idle().clear();
    }

    /// Sends one command and waits for its answer. An error means that the connection is of no more use.
    pub(crate) async fn ask(
        &self,
        connection: &mut Connection,
        command: &Cmd,
        within: Duration,
    ) -> Result<Result<Value, Refusal>> {
        let asked = tokio::time::timeout(within, connection.redis.send_packed_command(command)).await;
        let Ok(answer) = asked else {
            return Err(Error::unavailable(
                Code::TIMEOUT,
                format!("{} did not answer within {within:?}", self.address),
            ));
        };
        match answer.and_then(Value::extract_error) {
            Ok(value) => Ok(Ok(value)),
            Err(error) => Refusal::from_redis(error).map(Err).map_err(|error| self.broken(&error)),
        }
    }

    pub(crate) async fn connect(&self) -> Result<Connection> {
        let within = self.config.connect_timeout;
        let deadline = Instant::now() + within;
        let address = &self.address;
        let cannot = |why: String| {
            Error::unavailable(Code::UNREACHABLE, format!("cannot connect to {address}: {why}"))
        };
        let tcp = timeout_at(deadline, TcpStream::connect((self.config.host.as_str(), self.config.port)));
        let tcp = match tcp.await {
            Ok(Ok(tcp)) => tcp,
            Ok(Err(error)) => return Err(cannot(error.to_string())),
            Err(_) => return Err(cannot(format!("no answer within {within:?}"))),
        };
        // Requests are whole, and each waits for its answer. Without this some would wait for more to send.
        let _ = tcp.set_nodelay(true);
        let greet = async {
            match &self.tls {
                None => self.greet(tcp).await,
                Some(tls) => match tls.connector.connect(tls.name.clone(), tcp).await {
                    Ok(stream) => self.greet(stream).await,
                    Err(error) => {
                        Err(Error::unavailable(Code::TLS, format!("TLS with {address} fails: {error}"))
                            .with_remedy("for a port without TLS, write redis://"))
                    }
                },
            }
        };
        timeout_at(deadline, greet).await.unwrap_or_else(|_| {
            Err(Error::unavailable(
                Code::TIMEOUT,
                format!("{address} accepted the connection but did not answer within {within:?}"),
            )
            .with_remedy("check that it is Redis; for a port with TLS, write rediss://"))
        })
    }

    /// Who we are, which database, and what the server's limits are.
    async fn greet<S>(&self, stream: S) -> Result<Connection>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // Every request has a deadline of ours, and what Redis answers to `AUTH` is for us to judge.
        let settings = AsyncConnectionConfig::new().set_response_timeout(None);
        let info = RedisConnectionInfo::default().set_skip_set_lib_name();
        let (redis, driver) = MultiplexedConnection::new_with_config(&info, stream, settings)
            .await
            .map_err(|error| self.broken(&error))?;
        let driver = AbortOnDropHandle::new(tokio::spawn(driver));
        let now = Instant::now();
        let mut connection = Connection { redis, _driver: driver, used: now, opened: (0, now) };
        if let Some(password) = &self.config.password {
            let mut auth = redis::cmd("AUTH");
            if let Some(user) = &self.config.user {
                auth.arg(user);
            }
            match self.greeting(&mut connection, auth.arg(password)).await? {
                Ok(Value::Okay) => {}
                Ok(_) => return Err(self.stranger()),
                Err(refusal) => return Err(refusal.of_auth(&self.address)),
            }
        }
        match self.greeting(&mut connection, &redis::cmd("PING")).await? {
            Ok(Value::SimpleString(pong)) if pong == "PONG" => {}
            Ok(_) => return Err(self.stranger()),
            // Then it knows who we are, and that is all we asked.
            Err(refusal) if refusal.is_about_rights() => {}
            Err(refusal) => return Err(refusal.of_server(&self.address)),
        }
        let must = |refusal: Refusal| refusal.of_server(&self.address);
        if self.config.database != 0 {
            let mut select = redis::cmd("SELECT");
            self.greeting(&mut connection, select.arg(self.config.database)).await?.map_err(must)?;
        }
        if self.config.max_age.is_some() {
            let time = self.greeting(&mut connection, &redis::cmd("TIME")).await?.map_err(must)?;
            connection.opened = (millis(time).map_err(|error| self.broken(&error))?, Instant::now());
        }
        // What follows is nice to have, and not everybody may.
        if !self.config.name.is_empty() {
            let mut name = redis::cmd("CLIENT");
            drop(self.greeting(&mut connection, name.arg("SETNAME").arg(&self.config.name)).await?);
        }
        let limit = self.setting(&mut connection, "proto-max-bulk-len").await?;
        let largest = limit.and_then(|text| text.parse().ok()).unwrap_or(usize::MAX);
        self.largest.store(largest, Ordering::Relaxed);
        Ok(connection)
    }

    /// A value of `redis.conf`; none where we may not look.
    pub(crate) async fn setting(&self, connection: &mut Connection, name: &str) -> Result<Option<String>> {
        let answer = self.greeting(connection, redis::cmd("CONFIG").arg("GET").arg(name)).await?;
        let pair = answer.ok().and_then(|value| redis::from_redis_value::<Vec<String>>(value).ok());
        Ok(pair.and_then(|pair| pair.into_iter().nth(1)))
    }

    /// Asks while connecting. The whole has a deadline, and that one should be what is missed.
    async fn greeting(&self, connection: &mut Connection, command: &Cmd) -> Result<Result<Value, Refusal>> {
        self.ask(connection, command, self.config.connect_timeout * 2).await
    }

    /// The error for another protocol. It does not show the answer: the other program may repeat what was sent to it,
    /// including the password.
    pub(crate) fn stranger(&self) -> Error {
        let address = &self.address;
        Error::unavailable(Code::WRONG_PROTOCOL, format!("{address} does not speak Redis's protocol"))
            .with_remedy("check the port; for a port with TLS, write rediss://")
    }

    /// A connection that ended, or never was one.
    fn broken(&self, error: &RedisError) -> Error {
        match error.kind() {
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => self.stranger(),
            _ => Error::unavailable(
                Code::CONNECTION_LOST,
                format!("the connection to {} broke: {error}", self.address),
            ),
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answer to `TIME`: seconds and microseconds.
fn millis(time: Value) -> Result<i64, RedisError> {
    let (seconds, micros): (i64, i64) = redis::from_redis_value(time)?;
    Ok(seconds.saturating_mul(1_000).saturating_add(micros / 1_000))
}
