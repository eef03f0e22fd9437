//! The connection: how it is made, used, given up and made again.
//!
//! # One connection, and no queue that outlives it
//!
//! Left to itself, async-nats reconnects in the background. Meanwhile it keeps what was to be sent, and sends it
//! once it is connected, long after we have reported it as failed; requests whose answers went down with the old
//! connection wait for their whole timeout, and leave an entry behind forever. So here a client never survives
//! its connection: once connected, it is told that its only server is [`NOWHERE`], and when the connection breaks
//! it fails to reconnect, ends, and drops its queue. Every request that waits for an answer fails at once. The
//! next delivery makes a new client.
//!
//! What is buffered is then bounded by what is under way: `window` messages.
//!
//! # Order
//!
//! An event of a key is sent only when the one before it was acknowledged by the stream ([`deliver_keyed`] within a
//! batch, the relay between batches). An event that is reported as failed may still be stored, now or later: in
//! the socket's buffer, or in a server that was frozen. It comes again, and the event behind it is not sent
//! before that second one was acknowledged. So whatever arrives late is a repeat of something that is there
//! already, which the stream drops by its `Nats-Msg-Id`, and consumers tell by the event's id; it is never
//! the first sight of an event after a later one of its key.
//!
//! [`deliver_keyed`]: airtight_core::keyed::deliver_keyed

use std::{
    future::pending,
    io,
    sync::{
        Arc, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use airtight_core::{Code, Error, Outcome, Result, error::root_cause};
use async_nats::{
    ConnectError, ConnectErrorKind, ConnectOptions, Event, Message, Request, RequestErrorKind, ServerAddr,
    ServerError, connection::State as Link,
};
use tokio::{
    sync::{Mutex, Semaphore, watch},
    time::timeout,
};

use crate::{
    encode::Outgoing,
    errors::{self, printable},
    resolved::{Auth, Resolved},
};

/// Nobody listens on port 0, and asking takes no time.
const NOWHERE: &str = "nats://127.0.0.1:0";
/// How often a silent connection is tested. Three tests unanswered end it.
const PING: Duration = Duration::from_secs(10);
/// How long a server may take to show that it is there, after a stream has not answered.
const ALIVE: Duration = Duration::from_secs(2);
/// How many errors of the server are kept for the requests that they concern.
const COMPLAINTS: usize = 64;

/// What there is of a server: at most one connection.
pub(crate) struct Client {
    config: Resolved,
    current: std::sync::Mutex<Option<Arc<Connection>>>,
    /// Held by the one who connects: when that failed last, and why.
    connecting: Mutex<Option<(Instant, Error)>>,
    window: Semaphore,
}

/// One connection, from its greeting to its end.
pub(crate) struct Connection {
    nats: async_nats::Client,
    /// What the server has said of what it dropped.
    complaints: watch::Receiver<Vec<String>>,
    /// Nothing more is sent here.
    given_up: AtomicBool,
}

/// Why a request has no answer.
pub(crate) enum Unanswered {
    /// Nobody listens on the subject.
    NoResponders,
    /// We have no right to ask, or to hear.
    Denied(String),
    /// The message is over the server's limit.
    TooLarge(usize),
    /// The connection broke.
    Lost(String),
    /// Nothing came in time.
    Late,
}

impl Client {
    pub(crate) fn new(config: Resolved) -> Self {
        let window = Semaphore::new(config.window);
        Self { config, current: std::sync::Mutex::default(), connecting: Mutex::default(), window }
    }

    pub(crate) fn config(&self) -> &Resolved {
        &self.config
    }

    /// The connection; a new one if there is none.
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>> {
        let asked = Instant::now();
        if let Some(connection) = self.connected() {
            return Ok(connection);
        }
        let mut failed = self.connecting.lock().await;
        // Whoever waited for somebody else's attempt takes what came of it.
        if let Some(connection) = self.connected() {
            return Ok(connection);
        }
        if let Some((at, error)) = &*failed
            && *at >= asked
        {
            return Err(error.clone());
        }
        match self.connect().await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                *self.current() = Some(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                *failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    fn connected(&self) -> Option<Arc<Connection>> {
        self.current().clone().filter(|connection| connection.is_up())
    }

    /// Gives a connection up, so that the next delivery makes a new one.
    fn forget(&self, connection: &Arc<Connection>) {
        connection.given_up.store(true, Ordering::Relaxed);
        self.replace(connection);
    }

    /// Makes the next delivery use a new connection. This one is used to the end by those who have it.
    fn replace(&self, connection: &Arc<Connection>) {
        let mut current = self.current();
        if current.as_ref().is_some_and(|known| Arc::ptr_eq(known, connection)) {
            *current = None;
        }
    }

    /// Ends the connection. Nothing is under way any more.
    pub(crate) fn close(&self) {
        *self.current() = None;
    }

    fn current(&self) -> MutexGuard<'_, Option<Arc<Connection>>> {
        // Nothing that holds it can panic half-way.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self) -> Result<Connection> {
        let config = &self.config;
        let (told, complaints) = watch::channel(Vec::new());
        let told = Arc::new(told);
        let options = self
            .authenticated(ConnectOptions::new())
            .await?
            .name(&config.name)
            .custom_inbox_prefix(&config.inbox_prefix)
            .tls_client_config(config.tls.clone())
            .connection_timeout(config.connect_timeout)
            .ping_interval(PING)
            .client_capacity(config.window.min(2_048))
            // See the module's documentation: one round through the servers, and after that nowhere to go.
            .max_reconnects(config.servers.len())
            .reconnect_delay_callback(|_| Duration::ZERO)
            .ignore_discovered_servers()
            .event_callback(move |event| {
                let told = told.clone();
                async move { note(&told, event) }
            });
        let rounds = u32::try_from(2 * config.servers.len()).unwrap_or(u32::MAX);
        // Names are looked up without a limit of time, and a host may have several addresses.
        let patience = config.connect_timeout.saturating_mul(rounds);
        let connected = timeout(patience, options.connect(config.servers.as_slice())).await;
        let nats = match connected {
            Ok(Ok(nats)) => nats,
            Ok(Err(error)) => return Err(self.cannot_connect(&error)),
            Err(_) => return Err(self.no_greeting()),
        };
        let nowhere: ServerAddr = NOWHERE.parse().map_err(|error| self.lost(&format!("{error}")))?;
        let pinned = timeout(config.connect_timeout, nats.set_server_pool([nowhere].as_slice())).await;
        if !matches!(pinned, Ok(Ok(()))) {
            return Err(self.lost("it broke immediately"));
        }
        tracing::debug!(servers = %config.shown, "connected to NATS");
        Ok(Connection { nats, complaints, given_up: AtomicBool::new(false) })
    }

    async fn authenticated(&self, options: ConnectOptions) -> Result<ConnectOptions> {
        Ok(match &self.config.auth {
            Auth::None => options,
            Auth::User(user, password) => options.user_and_password(user.clone(), password.clone()),
            Auth::Token(token) => options.token(token.clone()),
            Auth::NKey(seed) => options.nkey(seed.clone()),
            // It was there when the sink was made; now it may be in the middle of being replaced.
            Auth::Credentials(path) => options.credentials_file(path).await.map_err(|error| {
                let what = format!("the credentials file {} cannot be read: {error}", path.display());
                Error::unavailable(Code::CREDENTIALS, what)
            })?,
        })
    }

    /// Publishes one message; `Ok` is the stream's acknowledgement. An error says whether it is about this subject alone.
    pub(crate) async fn publish(&self, connection: &Arc<Connection>, outgoing: &Outgoing) -> Result<Outcome> {
        let error = match self.publish_now(connection, outgoing).await {
            Err(error) if self.config.subject.constant().is_none() => error,
            other => return other,
        };
        let is_narrow = if error.is(&Code::NOT_PERMITTED) {
            !is_about_hearing(error.message())
        } else if error.is(&Code::TIMEOUT) {
            // A stream without a quorum, or a server that is stuck?
            connection.answers().await
        } else {
            errors::is_about_subject(&error)
        };
        Err(if is_narrow { error.at(errors::destination(&outgoing.subject)) } else { error })
    }

    async fn publish_now(&self, connection: &Arc<Connection>, outgoing: &Outgoing) -> Result<Outcome> {
        // Never closed.
        let _permit = self.window.acquire().await;
        if connection.given_up.load(Ordering::Relaxed) {
            // Whoever waited for a place need not wait for the same end.
            return Err(self.lost("an earlier event met the same error"));
        }
        let (size, limit) = (outgoing.size(), connection.nats.max_payload());
        if size > limit {
            return Err(errors::too_large(size, limit, "the server's `max_payload`"));
        }
        let request = Request::new().headers(outgoing.header_map()).payload(outgoing.body.clone());
        match self.ask(connection, &outgoing.subject, request).await {
            Ok(message) => self.judge(connection, outgoing, &message).await,
            Err(unanswered) => Err(self.unanswered(unanswered, outgoing)),
        }
    }

    async fn judge(
        &self,
        connection: &Arc<Connection>,
        outgoing: &Outgoing,
        message: &Message,
    ) -> Result<Outcome> {
        let stream = self.config.stream.as_deref();
        match errors::check_answer(&outgoing.subject, stream, &message.payload) {
            Err(error) if error.is(&Code::TOO_LARGE) => {
                let limit = self.stream_limit(connection, &message.payload).await;
                Err(errors::too_large_for_stream(outgoing.size(), limit))
            }
            other => other,
        }
    }

    /// Sends a request and waits for its answer, for `timeout` at most. A connection that fails at this is given up.
    pub(crate) async fn ask(
        &self,
        connection: &Arc<Connection>,
        subject: &str,
        request: Request,
    ) -> std::result::Result<Message, Unanswered> {
        let request = connection.nats.send_request(subject.to_owned(), request.timeout(None));
        let asked = timeout(self.config.timeout, async {
            tokio::select! {
                biased;
                answered = request => answered.map_err(|error| match error.kind() {
                    RequestErrorKind::NoResponders => Unanswered::NoResponders,
                    RequestErrorKind::MaxPayloadExceeded => Unanswered::TooLarge(connection.nats.max_payload()),
                    _ => Unanswered::Lost(connection.last_complaint()),
                }),
                complaint = connection.complaint(subject) => Err(Unanswered::Denied(complaint)),
            }
        });
        let answer = asked.await.unwrap_or(Err(Unanswered::Late));
        // Late: nobody may be there any more. Denied: rights are those of a connection. Either way a new one is
        // the only way to know better.
        match &answer {
            // Others have rights of their own: what they have under way goes on.
            Err(Unanswered::Denied(complaint)) if !is_about_hearing(complaint) => self.replace(connection),
            Err(Unanswered::Late | Unanswered::Denied(_) | Unanswered::Lost(_)) => self.forget(connection),
            _ => {}
        }
        answer
    }

    fn unanswered(&self, unanswered: Unanswered, outgoing: &Outgoing) -> Error {
        let Outgoing { subject, .. } = outgoing;
        match unanswered {
            Unanswered::NoResponders => errors::no_stream(subject, self.config.stream.as_deref()),
            Unanswered::Denied(complaint) => self.denied(&complaint),
            Unanswered::TooLarge(limit) => {
                errors::too_large(outgoing.size(), limit, "the server's `max_payload`")
            }
            Unanswered::Lost(why) => self.lost(&why),
            // A stream that has lost its quorum does not answer, nor does one with `no_ack`, nor a server that
            // is frozen: none of it is for this event alone, and none of it should cost events their attempts.
            Unanswered::Late => Error::unavailable(
                Code::TIMEOUT,
                format!(
                    "no stream acknowledged an event on the subject `{subject}` within {:?}: the server at {} is stuck, the stream has no leader or quorum, or it is set to `no_ack`",
                    self.config.timeout, self.config.shown
                ),
            ),
        }
    }

    pub(crate) fn denied(&self, complaint: &str) -> Error {
        let what = if is_about_hearing(complaint) {
            format!("allow the user to subscribe to `{}.>`, or set `inbox_prefix`", self.config.inbox_prefix)
        } else {
            "allow the user to publish to this subject".into()
        };
        Error::unavailable(Code::NOT_PERMITTED, format!("{} says: {complaint}", self.config.shown))
            .with_remedy(what)
    }

    pub(crate) fn lost(&self, why: &str) -> Error {
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        Error::unavailable(
            Code::CONNECTION_LOST,
            format!("the connection to {} broke{why}", self.config.shown),
        )
    }

    fn no_greeting(&self) -> Error {
        Error::unavailable(
            Code::UNREACHABLE,
            format!(
                "no NATS server sent its greeting at {} within {:?}: no server is there, or it is something else than NATS",
                self.config.shown, self.config.connect_timeout
            ),
        )
    }

    fn cannot_connect(&self, error: &ConnectError) -> Error {
        let shown = &self.config.shown;
        let root = root_cause(error);
        let cause = printable(root.to_string().as_bytes());
        match error.kind() {
            ConnectErrorKind::AuthorizationViolation => Error::unavailable(
                Code::CREDENTIALS,
                format!("{shown} refuses the credentials, or requires some"),
            )
            .with_remedy("check `user`, `token`, `creds` or `nkey`"),
            ConnectErrorKind::Authentication => Error::unavailable(
                Code::CREDENTIALS,
                "the seed of `nkey` or `creds` cannot sign the server's challenge",
            )
            .with_remedy("check the seed"),
            ConnectErrorKind::TimedOut => self.no_greeting(),
            ConnectErrorKind::Io if speaks_something_else(error) => {
                Error::unavailable(Code::WRONG_PROTOCOL, format!("{shown} does not speak NATS ({cause})"))
                    .with_remedy("check host and port")
            }
            _ if root.is::<rustls::Error>() => {
                Error::unavailable(Code::TLS, format!("TLS with {shown} failed: {cause}"))
            }
            _ => Error::unavailable(Code::UNREACHABLE, format!("cannot connect to {shown}: {cause}")),
        }
    }
}

impl Connection {
    fn is_up(&self) -> bool {
        self.nats.connection_state() == Link::Connected
    }

    /// Waits until the server complains about this subject, or about our hearing the answer.
    async fn complaint(&self, subject: &str) -> String {
        let named = format!("\"{subject}\"");
        let concerns = |text: &String| {
            is_about_hearing(text) || (text.starts_with("Permissions Violation") && text.contains(&named))
        };
        let mut complaints = self.complaints.clone();
        let found = match complaints.wait_for(|list| list.iter().any(concerns)).await {
            Ok(list) => list.iter().rev().find(|text| concerns(text)).cloned(),
            Err(_) => None,
        };
        match found {
            Some(text) => printable(text.as_bytes()),
            // The connection has ended, which the request hears by itself.
            None => pending().await,
        }
    }

    /// Whether the server answers at all, though a stream did not.
    async fn answers(&self) -> bool {
        let request = self.nats.send_request("$JS.API.INFO".to_owned(), Request::new().timeout(None));
        matches!(timeout(ALIVE, request).await, Ok(Ok(_)))
    }

    fn last_complaint(&self) -> String {
        self.complaints.borrow().last().map(|text| printable(text.as_bytes())).unwrap_or_default()
    }
}

fn note(told: &watch::Sender<Vec<String>>, event: Event) {
    let Event::ServerError(error) = event else { return };
    let text = match error {
        ServerError::Other(text) => text,
        other => other.to_string(),
    };
    told.send_modify(|complaints| {
        if complaints.len() == COMPLAINTS {
            complaints.remove(0);
        }
        complaints.push(text);
    });
}

fn is_about_hearing(complaint: &str) -> bool {
    complaint.contains("Permissions Violation for Subscription")
}

/// Whether somebody greeted, but not as a NATS server does.
fn speaks_something_else(error: &ConnectError) -> bool {
    let mut cause: &(dyn std::error::Error + 'static) = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    // async-nats has no kind for a greeting of another kind than a server's.
    let words = root_cause(cause).to_string();
    cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::InvalidInput)
        || words.starts_with("expected INFO") && !words.ends_with("nothing")
}
