//! The connection: it is made when it is needed, given up when it may be broken, and shared by all calls in between.
//!
//! lapin's own recovery stays off: it repeats what it had queued, and a caller cannot tell which messages arrived. Here a
//! broken connection is an error for every message under way, and the next call makes a new connection.
//!
//! Each message has its own channel until it is confirmed. AMQP allows many messages on one channel. But then a message
//! that the broker refuses fails the others too, and lapin hands a returned message to whichever confirmation comes
//! next, so an unroutable event would be reported as delivered. Channels are cheap, and are used again.

use std::{
    collections::HashSet,
    fmt, io,
    net::Shutdown,
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use airtight_core::{Code, Error, Result, error::root_cause};
use futures::StreamExt;
use lapin::{
    AsyncTcpStream, BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Event,
    options::{BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueDeclareOptions},
    types::{FieldTable, ShortString},
    uri::AMQPScheme,
};
use tokio::{
    net::lookup_host,
    sync::{Semaphore, watch},
    task::AbortHandle,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    encode::Outgoing,
    errors::{self, Doing, classify},
    resolved::{Declare, Destination, Resolved},
};

/// How long a broker that has not confirmed a message may take to show that it is there at all.
const PROBE: Duration = Duration::from_secs(2);
/// How long closing a connection may take.
const FAREWELL: Duration = Duration::from_secs(1);
/// How many declared names are remembered; past that, they are declared again.
const DECLARED: usize = 10_000;

/// One broker, and the connection to it while there is one.
pub(crate) struct Client {
    config: Arc<Resolved>,
    state: tokio::sync::Mutex<ConnectionState>,
}

#[derive(Default)]
struct ConnectionState {
    link: Option<Arc<Link>>,
    /// When the last attempt to connect failed, and why.
    failed: Option<(Instant, Error)>,
}

impl Client {
    pub(crate) fn new(config: Resolved) -> Self {
        Self { config: Arc::new(config), state: tokio::sync::Mutex::default() }
    }

    pub(crate) fn config(&self) -> &Resolved {
        &self.config
    }

    /// The connection; a new one if there is none that works.
    pub(crate) async fn link(&self) -> Result<Arc<Link>> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(link) = &state.link
            && link.is_up()
        {
            return Ok(link.clone());
        }
        // Whoever waited for somebody's attempt takes its answer, or they would all wait in turns.
        if let Some((at, error)) = &state.failed
            && *at >= asked
        {
            return Err(error.clone());
        }
        state.link = None;
        match Link::connect(self.config.clone()).await {
            Ok(link) => Ok(state.link.insert(Arc::new(link)).clone()),
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Closes the connection, if there is one.
    pub(crate) async fn close(&self) {
        let link = self.state.lock().await.link.take();
        if let Some(link) = link.filter(|link| link.is_up()) {
            // Everything was confirmed before: a broker that does not answer has missed nothing.
            let _ = timeout(FAREWELL, link.connection.close(200, "OK".into())).await;
        }
    }
}

/// A connection that was made.
pub(crate) struct Link {
    config: Arc<Resolved>,
    connection: Connection,
    /// Channels without a message under way.
    idle: Mutex<Vec<Channel>>,
    window: Semaphore,
    declared: Mutex<HashSet<String>>,
    /// Why the broker takes no messages now.
    blocked: watch::Receiver<Option<String>>,
    listener: AbortHandle,
    /// Nobody answered in time. lapin may not have noticed.
    given_up: AtomicBool,
    socket: Socket,
}

/// A second handle of the connection's socket. lapin reads and writes it in a thread of its own, which waits for a
/// silent broker for ever; shut down, the thread ends.
struct Socket(std::net::TcpStream);

impl Drop for Socket {
    fn drop(&mut self) {
        // It may have been closed by the other side.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Link {
    async fn connect(config: Arc<Resolved>) -> Result<Self> {
        let (connection, socket) = establish(&config).await?;
        let (tell, blocked) = watch::channel(None);
        let mut events = Box::pin(connection.events_listener());
        let listener = tokio::spawn(async move {
            while let Some(event) = events.next().await {
                match event {
                    Event::ConnectionBlocked(reason) => drop(tell.send_replace(Some(reason))),
                    Event::ConnectionUnblocked => drop(tell.send_replace(None)),
                    _ => {}
                }
            }
        });
        // One is left for the probe.
        let channels = usize::from(connection.configuration().channel_max()).saturating_sub(1).max(1);
        Ok(Self {
            window: Semaphore::new(config.window.min(channels)),
            config,
            connection,
            idle: Mutex::default(),
            declared: Mutex::default(),
            blocked,
            listener: listener.abort_handle(),
            given_up: AtomicBool::new(false),
            socket,
        })
    }

    fn is_up(&self) -> bool {
        self.connection.status().connected() && !self.given_up.load(Ordering::Relaxed)
    }

    fn failed(&self, error: &lapin::Error, doing: Doing<'_>) -> Error {
        classify(&self.config, error, doing, self.is_up())
    }

    /// An error while the broker takes no messages.
    pub(crate) fn ensure_open(&self) -> Result<()> {
        if !self.is_up() {
            return Err(errors::lost(&self.config));
        }
        match &*self.blocked.borrow() {
            Some(reason) => Err(errors::blocked(&self.config, reason)),
            None => Ok(()),
        }
    }

    /// Checks that the destination is there, or declares it, if all events have the same.
    pub(crate) async fn prepare(&self) -> Result<()> {
        let Some((what, name)) = self.config.destination() else { return Ok(()) };
        let preparing = async {
            let channel = self.channel().await?;
            match what {
                Destination::Exchange => self.exchange(&channel, name, true).await?,
                Destination::Queue => self.queue(&channel, name, true).await?,
            }
            self.give_back(channel);
            Ok(())
        };
        self.in_time(preparing).await
    }

    /// Publishes a message; `Ok` when the broker has confirmed it.
    pub(crate) async fn publish(&self, message: &Outgoing) -> Result<()> {
        let frame_max = self.connection.configuration().frame_max() as usize;
        if frame_max > 0 && message.header_frame > frame_max {
            return Err(errors::headers_too_large(message, frame_max));
        }
        // Its holders have timeouts, and so this wait ends too.
        let _turn = self.window.acquire().await;
        // lapin would queue what a blocked connection cannot send.
        self.ensure_open()?;
        self.in_time(self.publish_now(message)).await
    }

    async fn publish_now(&self, message: &Outgoing) -> Result<()> {
        let failed = |error| self.failed(&error, Doing::Publishing(message));
        let channel = self.channel().await?;
        self.declare(&channel, message).await?;
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let (exchange, key) = (message.exchange.clone(), message.routing_key.clone());
        let properties: BasicProperties = message.properties.clone();
        let confirm = channel
            .basic_publish(exchange, key, options, &message.body, properties)
            .await
            .map_err(failed)
            .inspect_err(|error| self.forget(message, error))?;
        let confirmed = confirm.await.map_err(failed).inspect_err(|error| self.forget(message, error))?;
        // From here on nothing is under way on the channel.
        self.give_back(channel);
        match confirmed {
            Confirmation::Ack(None) => Ok(()),
            Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned)) => {
                let error = errors::unroutable(&self.config, message, &returned);
                self.forget(message, &error);
                Err(error)
            }
            Confirmation::Nack(None) | Confirmation::NotRequested => {
                Err(errors::nacked(&self.config, message))
            }
        }
    }

    /// Ends what takes too long, and what waits for a broker that takes nothing.
    async fn in_time<T>(&self, doing: impl Future<Output = Result<T>>) -> Result<T> {
        let mut blocked = self.blocked.clone();
        let stopped = async {
            let reason = blocked.wait_for(Option::is_some).await.ok()?.clone();
            reason.map(|reason| errors::blocked(&self.config, &reason))
        };
        tokio::select! {
            biased;
            done = timeout(self.config.timeout, doing) => match done {
                Ok(result) => result,
                Err(_) => Err(self.too_late().await),
            },
            Some(error) = stopped => Err(error),
        }
    }

    /// The error for a late answer: it is about one message if the broker still answers, and about all if it does not.
    async fn too_late(&self) -> Error {
        let (address, within) = (&self.config.address, self.config.timeout);
        match timeout(PROBE, self.connection.create_channel()).await {
            Ok(Ok(_)) => Error::retryable(
                Code::TIMEOUT,
                format!("{address} did not confirm the message within {within:?}"),
            ),
            _ => {
                // No call shall wait for this connection any longer.
                self.given_up.store(true, Ordering::Relaxed);
                let _ = self.socket.0.shutdown(Shutdown::Both);
                Error::unavailable(Code::TIMEOUT, format!("{address} has not answered for {within:?}"))
            }
        }
    }

    /// A channel that nobody else uses. Dropped before it is given back, it is closed: what is under way on it is
    /// not known to have arrived.
    async fn channel(&self) -> Result<Channel> {
        loop {
            let Some(channel) = self.idle().pop() else { break };
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let opening = async {
            let channel = self.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok(channel)
        };
        opening.await.map_err(|error| self.failed(&error, Doing::Preparing("a channel", true)))
    }

    fn give_back(&self, channel: Channel) {
        self.idle().push(channel);
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Channel>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares where a message goes, once for each name.
    async fn declare(&self, channel: &Channel, message: &Outgoing) -> Result<()> {
        let name = match &self.config.declare {
            None => return Ok(()),
            Some(Declare::Exchange(_)) => &message.exchange,
            Some(Declare::Queue(_)) => &message.routing_key,
        };
        if self.declared().contains(name.as_str()) {
            return Ok(());
        }
        let everyones = self.config.destination().is_some();
        match &self.config.declare {
            Some(Declare::Exchange(_)) => self.exchange(channel, name.clone(), everyones).await?,
            _ => self.queue(channel, name.clone(), everyones).await?,
        }
        let mut declared = self.declared();
        if declared.len() >= DECLARED {
            declared.clear();
        }
        declared.insert(name.as_str().to_owned());
        Ok(())
    }

    /// What was declared may have been deleted since.
    fn forget(&self, message: &Outgoing, error: &Error) {
        if error.is(&Code::UNROUTABLE) || error.is(&Code::NO_EXCHANGE) {
            let mut declared = self.declared();
            declared.remove(message.exchange.as_str());
            declared.remove(message.routing_key.as_str());
        }
    }

    fn declared(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        self.declared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn exchange(&self, channel: &Channel, name: ShortString, everyones: bool) -> Result<()> {
        let what = format!("exchange {name}");
        let (kind, passive) = match &self.config.declare {
            Some(Declare::Exchange(kind)) => (kind.clone(), false),
            _ => (lapin::ExchangeKind::default(), true),
        };
        let options = ExchangeDeclareOptions { passive, durable: true, ..ExchangeDeclareOptions::default() };
        let declared = channel.exchange_declare(name, kind, options, FieldTable::default()).await;
        declared.map_err(|error| self.failed(&error, Doing::Preparing(&what, everyones)))
    }

    async fn queue(&self, channel: &Channel, name: ShortString, everyones: bool) -> Result<()> {
        let what = format!("queue {name}");
        let (arguments, passive) = match &self.config.declare {
            Some(Declare::Queue(arguments)) => (arguments.clone(), false),
            _ => (FieldTable::default(), true),
        };
        let options = QueueDeclareOptions { passive, durable: true, ..QueueDeclareOptions::default() };
        let declared = channel.queue_declare(name, options, arguments).await;
        declared.map(drop).map_err(|error| self.failed(&error, Doing::Preparing(&what, everyones)))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("address", &self.config.address).field("up", &self.is_up()).finish()
    }
}

/// Connects the socket, speaks TLS on it where asked to, and logs in.
///
/// Dropped in the middle, it leaves nothing behind: the socket's second handle ends lapin's thread.
async fn establish(config: &Resolved) -> Result<(Connection, Socket)> {
    let deadline = Instant::now() + config.connect_timeout;
    let (address, within) = (&config.address, config.connect_timeout);
    let too_late =
        |what| Error::unavailable(Code::UNREACHABLE, format!("{address} {what} within {within:?}"));
    let cannot = |error: io::Error| {
        Error::unavailable(Code::UNREACHABLE, format!("cannot connect to {address}: {}", root_cause(&error)))
    };
    let failed = |error: lapin::Error| classify(config, &error, Doing::Connecting, false);
    let authority = &config.uri.authority;

    let runtime = lapin::runtime::default_runtime().map_err(failed)?;
    let dialling = async {
        let addresses: Vec<_> = lookup_host((authority.host.as_str(), authority.port)).await?.collect();
        let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
        let AsyncTcpStream::Plain(plain) = &stream else {
            return Err(io::Error::other("a new connection is not a plain one"));
        };
        let socket = Socket(plain.get_ref().as_fd().try_clone_to_owned()?.into());
        Ok((stream, socket))
    };
    let (stream, socket) = timeout_at(deadline, dialling)
        .await
        .map_err(|_| too_late("does not accept a connection"))?
        .map_err(cannot)?;

    let secured = async {
        match config.uri.scheme {
            AMQPScheme::AMQP => Ok(stream),
            AMQPScheme::AMQPS => stream.into_tls(&authority.host, config.tls.as_ref()).await,
        }
    };
    let stream = timeout_at(deadline, secured)
        .await
        .map_err(|_| {
            too_late("accepted the connection and did not answer in TLS")
                .with_remedy("check that the port is RabbitMQ's for TLS")
        })?
        .map_err(|error| errors::no_tls(config, &error))?;

    // lapin asks for the stream in its own thread, and again if it wanted to reconnect.
    let stream = Mutex::new(Some(stream));
    let hand_over = async move |_, _| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected).into())
    };
    let properties = ConnectionProperties::default()
        .with_connection_name(config.name.as_str().into())
        .with_client_property("product".into(), "airtight".into())
        .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into());
    let connection =
        timeout_at(deadline, Connection::connector(config.uri.clone(), runtime, hand_over, properties))
            .await
            .map_err(|_| {
                too_late("accepted the connection and did not answer as RabbitMQ would")
                    .with_remedy("check the port, and whether the broker is stuck")
            })?
            .map_err(failed)?;
    Ok((connection, socket))
}
