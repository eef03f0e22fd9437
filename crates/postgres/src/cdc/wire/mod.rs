//! airtight's own connection to PostgreSQL, for replication, which sqlx does not support.
//!
//! It knows the simple query protocol and `COPY BOTH`, and nothing else. Messages are encoded and decoded by
//! `postgres-protocol`; those of a stream are passed on as slices of the buffer they were read into. Nothing is read
//! before it is requested, so data that does not fit into the socket stays with the server. ADR 0020 says why no
//! existing crate is used.

mod endpoint;
mod tls;

use std::{io, pin::Pin, time::Duration};

use airtight_core::{Code, Error, Result};
use bytes::{Buf, Bytes, BytesMut};
use postgres_protocol::{
    authentication::{
        md5_hash,
        sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256},
    },
    message::{
        backend::{ErrorFields, Header, Message},
        frontend,
    },
};
use socket2::{SockRef, TcpKeepalive};
use sqlx::postgres::PgSslMode;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
};

pub(crate) use self::endpoint::Endpoint;
use crate::error::from_sqlstate;

/// How long connecting and getting in may take.
const CONNECT: Duration = Duration::from_secs(10);

/// How long an answer may take, and sending what the other side must take.
const ANSWER: Duration = Duration::from_secs(30);

/// When a connection that is quiet is tried, how often again, and for how long what was sent may wait for its receipt.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(5));
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// How much is read at once.
const CHUNK: usize = 128 * 1024;

/// The answer to `START_REPLICATION`, which is no message of a plain client's.
const COPY_BOTH: u8 = b'W';
const COPY_DATA: u8 = b'd';

/// How times and bytes are written as text, whatever the database's defaults are; and none of the limits that are
/// meant for clients in a hurry: reading a table waits for the sink, and making a slot for writers.
const SETTINGS: &str = "-c datestyle=ISO -c timezone=UTC -c intervalstyle=postgres -c extra_float_digits=3 \
     -c bytea_output=hex -c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0";

trait Transport: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Transport for T {}

/// A connection.
pub(crate) struct Wire {
    transport: Pin<Box<dyn Transport>>,
    input: BytesMut,
    output: BytesMut,
    /// The server's process.
    pid: i32,
}

/// What a statement returned: rows of text.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Vec<Option<Bytes>>>,
}

/// A column of a result.
#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) type_oid: u32,
    pub(crate) type_modifier: i32,
}

impl Table {
    /// A value of the first row as text, by the column's name.
    pub(crate) fn first(&self, name: &str) -> Option<String> {
        let at = self.columns.iter().position(|column| column.name == name)?;
        let value = self.rows.first()?.get(at)?.as_ref()?;
        Some(String::from_utf8_lossy(value).into_owned())
    }
}

impl Wire {
    /// Connects as an ordinary client.
    pub(crate) async fn connect(endpoint: &Endpoint) -> Result<Self> {
        Self::start(endpoint, false).await
    }

    /// Connects to a walsender, which replicates this database and answers statements, too.
    pub(crate) async fn connect_for_replication(endpoint: &Endpoint) -> Result<Self> {
        Self::start(endpoint, true).await
    }

    async fn start(endpoint: &Endpoint, replication: bool) -> Result<Self> {
        let connect = async {
            let transport = transport(endpoint).await?;
            let mut wire = Self { transport, input: BytesMut::new(), output: BytesMut::new(), pid: 0 };
            wire.start_up(endpoint, replication).await?;
            Ok(wire)
        };
        tokio::time::timeout(CONNECT, connect).await.unwrap_or_else(|_| {
            Err(unreachable(endpoint, &format_args!("no answer within {} s", CONNECT.as_secs())))
        })
    }

    async fn start_up(&mut self, endpoint: &Endpoint, replication: bool) -> Result<()> {
        let mut parameters = vec![
            ("user", endpoint.user.as_str()),
            ("database", endpoint.database.as_str()),
            ("application_name", "airtight"),
            ("client_encoding", "UTF8"),
            ("options", SETTINGS),
        ];
        if replication {
            parameters.push(("replication", "database"));
        }
        frontend::startup_message(parameters, &mut self.output).map_err(broken)?;
        self.flush().await?;
        self.authenticate(endpoint).await?;
        loop {
            match self.message().await? {
                Message::ReadyForQuery(_) => return Ok(()),
                Message::BackendKeyData(body) => self.pid = body.process_id(),
                Message::ErrorResponse(body) => return Err(refused(body.fields(), "connecting")),
                _ => {}
            }
        }
    }

    /// The server's process at the other end.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    async fn authenticate(&mut self, endpoint: &Endpoint) -> Result<()> {
        let password = || {
            endpoint.password.as_deref().ok_or_else(|| {
                Error::unavailable(
                    Code::CREDENTIALS,
                    format!("{} requires a password for replication, too", endpoint.shown()),
                )
            })
        };
        let mut scram = None;
        loop {
            match self.message().await? {
                Message::AuthenticationOk => return Ok(()),
                Message::AuthenticationCleartextPassword => {
                    frontend::password_message(password()?.as_bytes(), &mut self.output).map_err(broken)?;
                }
                Message::AuthenticationMd5Password(body) => {
                    let hash = md5_hash(endpoint.user.as_bytes(), password()?.as_bytes(), body.salt());
                    frontend::password_message(hash.as_bytes(), &mut self.output).map_err(broken)?;
                }
                Message::AuthenticationSasl(_) => {
                    let client = ScramSha256::new(password()?.as_bytes(), ChannelBinding::unsupported());
                    frontend::sasl_initial_response(SCRAM_SHA_256, client.message(), &mut self.output)
                        .map_err(broken)?;
                    scram = Some(client);
                }
                Message::AuthenticationSaslContinue(body) => {
                    let client = scram.as_mut().ok_or_else(unexpected)?;
                    client.update(body.data()).map_err(broken)?;
                    frontend::sasl_response(client.message(), &mut self.output).map_err(broken)?;
                }
                Message::AuthenticationSaslFinal(body) => {
                    let client = scram.as_mut().ok_or_else(unexpected)?;
                    // The server's own proof: without it, anybody could be at the other end.
                    client.finish(body.data()).map_err(broken)?;
                    continue;
                }
                Message::ErrorResponse(body) => return Err(refused(body.fields(), "connecting")),
                Message::NoticeResponse(_) | Message::ParameterStatus(_) => continue,
                _ => {
                    return Err(Error::unavailable(
                        Code::CREDENTIALS,
                        format!(
                            "{} requires an authentication method that airtight does not support",
                            endpoint.shown()
                        ),
                    ));
                }
            }
            self.flush().await?;
        }
    }

    /// Runs a statement (or a replication command) and collects what it returns. `doing` is for messages.
    pub(crate) async fn query(&mut self, sql: &str, doing: &str) -> Result<Table> {
        within(doing, self.ask(sql, doing)).await
    }

    /// The same without a time limit: the caller checks meanwhile whether the server works on it.
    pub(crate) async fn ask(&mut self, sql: &str, doing: &str) -> Result<Table> {
        frontend::query(sql, &mut self.output).map_err(broken)?;
        self.flush().await?;
        let mut table = Table::default();
        let mut failure = None;
        loop {
            match self.message().await? {
                Message::RowDescription(body) => {
                    let mut fields = body.fields();
                    while let Some(field) = fallible(&mut fields) {
                        let field = field.map_err(broken)?;
                        table.columns.push(Column {
                            name: field.name().to_owned(),
                            type_oid: field.type_oid(),
                            type_modifier: field.type_modifier(),
                        });
                    }
                }
                Message::DataRow(body) => {
                    let mut ranges = body.ranges();
                    let mut row = Vec::with_capacity(table.columns.len());
                    let buffer = body.buffer_bytes();
                    while let Some(range) = fallible(&mut ranges) {
                        row.push(range.map_err(broken)?.map(|range| buffer.slice(range)));
                    }
                    table.rows.push(row);
                }
                Message::ErrorResponse(body) => failure = Some(refused(body.fields(), doing)),
                Message::ReadyForQuery(_) => return failure.map_or(Ok(table), Err),
                _ => {}
            }
        }
    }

    /// Runs a command that turns the connection into a stream both ways.
    pub(crate) async fn copy_both(&mut self, command: &str, doing: &str) -> Result<()> {
        within(doing, self.begin_copy(command, doing)).await
    }

    async fn begin_copy(&mut self, command: &str, doing: &str) -> Result<()> {
        frontend::query(command, &mut self.output).map_err(broken)?;
        self.flush().await?;
        loop {
            self.fill_frame().await?;
            if self.input[0] == COPY_BOTH {
                self.take_frame()?;
                return Ok(());
            }
            if let Message::ErrorResponse(body) = self.message().await? {
                return Err(refused(body.fields(), doing));
            }
        }
    }

    /// The next message of the stream. May be dropped at any time: nothing is lost.
    pub(crate) async fn receive(&mut self) -> Result<Bytes> {
        loop {
            self.fill_frame().await?;
            if self.input[0] == COPY_DATA {
                return self.take_frame();
            }
            match self.message().await? {
                Message::ErrorResponse(body) => return Err(refused(body.fields(), "streaming")),
                Message::CopyDone | Message::CommandComplete(_) | Message::ReadyForQuery(_) => {
                    return Err(Error::retryable(Code::CONNECTION_LOST, "the server has ended the stream"));
                }
                _ => {}
            }
        }
    }

    /// A message of the stream that has arrived whole already.
    pub(crate) fn received(&mut self) -> Option<Result<Bytes>> {
        let ready = frame_length(&self.input).ok()? <= self.input.len();
        (ready && self.input[0] == COPY_DATA).then(|| self.take_frame())
    }

    /// Sends a message into the stream.
    pub(crate) async fn send(&mut self, data: &[u8]) -> Result<()> {
        frontend::CopyData::new(data).map_err(broken)?.write(&mut self.output);
        within("streaming", self.flush()).await
    }

    /// Says that the stream is over, and leaves.
    pub(crate) async fn close(mut self) {
        frontend::copy_done(&mut self.output);
        frontend::terminate(&mut self.output);
        // The server finds out by itself, too.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.flush()).await;
    }

    async fn message(&mut self) -> Result<Message> {
        self.fill_frame().await?;
        match Message::parse(&mut self.input).map_err(broken)? {
            Some(message) => Ok(message),
            None => Err(unexpected()),
        }
    }

    /// Reads until a whole message has arrived.
    async fn fill_frame(&mut self) -> Result<()> {
        loop {
            let length = frame_length(&self.input)?;
            if self.input.len() >= length {
                return Ok(());
            }
            // Reserved in large pieces: slices of the last one are still out, so it cannot be used again.
            let (wanted, spare) = (length - self.input.len(), self.input.capacity() - self.input.len());
            if spare < wanted.max(CHUNK / 8) {
                self.input.reserve(wanted.max(CHUNK));
            }
            let read = self.transport.read_buf(&mut self.input).await.map_err(lost)?;
            if read == 0 {
                return Err(Error::retryable(Code::CONNECTION_LOST, "the server has closed the connection"));
            }
        }
    }

    fn take_frame(&mut self) -> Result<Bytes> {
        let length = frame_length(&self.input)?;
        let mut frame = self.input.split_to(length).freeze();
        frame.advance(5);
        Ok(frame)
    }

    async fn flush(&mut self) -> Result<()> {
        // A write that is dropped half way continues with the next: `output` is what is left.
        while !self.output.is_empty() {
            let written = self.transport.write(&self.output).await.map_err(lost)?;
            self.output.advance(written);
        }
        self.transport.flush().await.map_err(lost)
    }
}

/// How long the message at the front is with its head; the head's length while that is not known.
fn frame_length(input: &[u8]) -> Result<usize> {
    const HEAD: usize = 5;
    let Some(header) = Header::parse(input).map_err(broken)? else { return Ok(HEAD) };
    // Refused above if it is less than four.
    Ok(usize::try_from(header.len()).unwrap_or(usize::MAX - 1) + 1)
}

async fn transport(endpoint: &Endpoint) -> Result<Pin<Box<dyn Transport>>> {
    if let Some(socket) = &endpoint.socket {
        let name = format!(".s.PGSQL.{}", endpoint.port);
        let path = if socket.is_dir() { socket.join(name) } else { socket.clone() };
        let stream = UnixStream::connect(path).await.map_err(|error| unreachable(endpoint, &error))?;
        return Ok(Box::pin(stream));
    }
    let connect = || async {
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await?;
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE.0).with_interval(KEEPALIVE.1))?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
        io::Result::Ok(stream)
    };
    let mut stream = connect().await.map_err(|error| unreachable(endpoint, &error))?;
    if matches!(endpoint.ssl, PgSslMode::Disable | PgSslMode::Allow) {
        return Ok(Box::pin(stream));
    }
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    stream.write_all(&request).await.map_err(|error| unreachable(endpoint, &error))?;
    let answer = stream.read_u8().await.map_err(|error| unreachable(endpoint, &error))?;
    if answer == b'S' {
        return Ok(Box::pin(tls::connect(endpoint, stream).await?));
    }
    if matches!(endpoint.ssl, PgSslMode::Prefer) {
        return Ok(Box::pin(stream));
    }
    Err(Error::unavailable(
        Code::TLS,
        format!("{} does not support TLS, but `sslmode` requires it", endpoint.shown()),
    ))
}

/// What takes longer is not waited for.
async fn within<T>(doing: &str, answer: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(ANSWER, answer).await.unwrap_or_else(|_| {
        let message = format!("{doing}: PostgreSQL has not answered within {} s", ANSWER.as_secs());
        Err(Error::retryable(Code::TIMEOUT, message))
    })
}

/// The next item of a fallible iterator, as an iterator would give it.
fn fallible<I: fallible_iterator::FallibleIterator>(items: &mut I) -> Option<Result<I::Item, I::Error>> {
    items.next().transpose()
}

fn refused(mut fields: ErrorFields<'_>, doing: &str) -> Error {
    let (mut code, mut message, mut more) = (None, String::new(), String::new());
    while let Some(Ok(field)) = fallible(&mut fields) {
        let text = || String::from_utf8_lossy(field.value_bytes()).into_owned();
        match field.type_() {
            b'C' => code = Some(text()),
            b'M' => message = text(),
            b'D' | b'H' => more.push_str(&format!("; {}", text())),
            _ => {}
        }
    }
    from_sqlstate(code.as_deref(), &format!("{message}{more}"), doing)
}

fn unreachable(endpoint: &Endpoint, why: &dyn std::fmt::Display) -> Error {
    Error::retryable(Code::UNREACHABLE, format!("cannot reach PostgreSQL at {}: {why}", endpoint.shown()))
}

fn lost(error: io::Error) -> Error {
    Error::retryable(Code::CONNECTION_LOST, format!("the connection to PostgreSQL is lost: {error}"))
}

fn broken(error: io::Error) -> Error {
    Error::retryable(
        Code::WRONG_PROTOCOL,
        format!("PostgreSQL has sent a message that cannot be read: {error}"),
    )
}

fn unexpected() -> Error {
    Error::retryable(Code::WRONG_PROTOCOL, "PostgreSQL has sent a message that was not expected")
}
