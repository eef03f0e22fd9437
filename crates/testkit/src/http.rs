//! A scripted HTTP/1.1 server on a free loopback port, for sinks that speak HTTP.
//!
//! It uses a plain socket because tests need what a framework prevents: answers that stop in the middle, never end or
//! never come, and a server that stops listening on its port and starts again.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
};

use crate::ports::Port;

/// How long [`HttpServer::wait_for`] waits.
const DEADLINE: Duration = Duration::from_secs(10);
/// The largest head of a request.
const HEAD_BYTES: usize = 64 * 1024;

/// How an answer ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Ending {
    /// As it should; the connection stays open.
    #[default]
    Whole,
    /// As it should, then the connection is closed.
    Close,
    /// Nothing is sent, and the connection is closed.
    NoAnswer,
    /// Nothing is sent, and the connection stays open.
    Hang,
    /// The head and half of the body, then the connection is closed.
    Torn,
    /// The head, then body for ever.
    Endless,
    /// The head, which promises a body that never comes.
    Stalled,
}

/// What the server does with one request.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    delay: Duration,
    ending: Ending,
}

impl Reply {
    /// An answer with this status and no body.
    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    /// Takes the request, closes the connection and says nothing.
    pub fn no_answer() -> Self {
        Self { ending: Ending::NoAnswer, ..Self::default() }
    }

    /// Takes the request and never says anything.
    pub fn hang() -> Self {
        Self { ending: Ending::Hang, ..Self::default() }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the body.
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// Waits before it answers.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Closes the connection after the answer.
    #[must_use]
    pub fn then_close(mut self) -> Self {
        self.ending = Ending::Close;
        self
    }

    /// Closes the connection in the middle of the body.
    #[must_use]
    pub fn torn(mut self) -> Self {
        self.ending = Ending::Torn;
        self
    }

    /// Repeats the body for ever.
    #[must_use]
    pub fn endless(mut self) -> Self {
        self.ending = Ending::Endless;
        self
    }

    /// Promises a body and never sends it.
    #[must_use]
    pub fn stalled(mut self) -> Self {
        self.ending = Ending::Stalled;
        self
    }

    fn answers(&self) -> Option<u16> {
        (!matches!(self.ending, Ending::NoAnswer | Ending::Hang)).then_some(self.status)
    }
}

/// A request as it came in.
#[derive(Debug, Clone)]
pub struct Request {
    /// `POST` and so on.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Names in lower case, values as sent.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
    /// The status that the server chose for it; none where it chose not to answer.
    pub answered: Option<u16>,
}

impl Request {
    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }
}

type Rule = Box<dyn Fn(&Request) -> Reply + Send>;

struct Script {
    once: VecDeque<Reply>,
    rule: Rule,
    requests: Vec<Request>,
}

struct Shared {
    script: Mutex<Script>,
    connections: watch::Sender<usize>,
    /// How many requests have come in.
    arrived: watch::Sender<usize>,
}

impl Shared {
    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, mut request: Request) -> Reply {
        let mut script = self.script();
        let reply = script.once.pop_front().unwrap_or_else(|| (script.rule)(&request));
        request.answered = reply.answers();
        script.requests.push(request);
        drop(script);
        self.arrived.send_modify(|count| *count += 1);
        reply
    }
}

/// A server that follows a script, and records the requests. It answers 200 by default.
pub struct HttpServer {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: tokio::sync::Mutex<Option<JoinHandle<()>>>,
    /// Keeps the port ours while the server is stopped.
    _port: Port,
}

impl HttpServer {
    /// Starts one on a free port of the loopback interface.
    pub async fn start() -> Self {
        let port = Port::reserve();
        let addr = SocketAddr::from(([127, 0, 0, 1], port.number()));
        let script =
            Script { once: VecDeque::new(), rule: Box::new(|_| Reply::status(200)), requests: Vec::new() };
        let shared = Arc::new(Shared {
            script: Mutex::new(script),
            connections: watch::Sender::new(0),
            arrived: watch::Sender::new(0),
        });
        let server = Self { addr, shared, accepting: tokio::sync::Mutex::new(None), _port: port };
        server.restart().await;
        server
    }

    /// The address that it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its URL with this path.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    /// The next requests are answered so, one reply each; those after them by the rule again.
    pub fn script(&self, replies: impl IntoIterator<Item = Reply>) {
        self.shared.script().once.extend(replies);
    }

    /// Answers requests by this rule, from now on.
    pub fn rule(&self, rule: impl Fn(&Request) -> Reply + Send + 'static) {
        self.shared.script().rule = Box::new(rule);
    }

    /// What has come in, in order of arrival.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.script().requests.clone()
    }

    /// Waits until so many requests have come in, ten seconds at most, and returns all of them.
    pub async fn wait_for(&self, requests: usize) -> Vec<Request> {
        let mut arrived = self.shared.arrived.subscribe();
        let waiting = arrived.wait_for(|count| *count >= requests);
        if tokio::time::timeout(DEADLINE, waiting).await.is_err() {
            panic!("{requests} requests should have come in, there are {}", self.requests().len());
        }
        self.requests()
    }

    /// How many TCP connections were accepted so far.
    pub fn connections(&self) -> usize {
        *self.shared.connections.borrow()
    }

    /// Closes the port and every connection. What was recorded stays.
    pub async fn stop(&self) {
        if let Some(accepting) = self.accepting.lock().await.take() {
            accepting.abort();
            // Aborted is what it is to be; only then is the port closed.
            let _ = accepting.await;
        }
    }

    /// Listens on the same port again.
    pub async fn restart(&self) {
        self.stop().await;
        let listener =
            bind(self.addr).and_then(|socket| socket.listen(1024)).expect("the port is reserved for us");
        *self.accepting.lock().await = Some(tokio::spawn(accept(listener, self.shared.clone())));
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        if let Some(accepting) = self.accepting.get_mut().take() {
            accepting.abort();
        }
    }
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Connections of an earlier life may linger on the port.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Dropped with this task, and every connection with it.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    shared.connections.send_modify(|count| *count += 1);
                    connections.spawn(serve(stream, shared.clone()));
                }
            }
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    let mut buffer = Vec::new();
    while let Some(request) = read_request(&mut stream, &mut buffer).await? {
        let reply = shared.record(request);
        tokio::time::sleep(reply.delay).await;
        answer(&mut stream, &reply).await?;
        if !matches!(reply.ending, Ending::Whole) {
            break;
        }
    }
    Ok(())
}

async fn answer(stream: &mut TcpStream, reply: &Reply) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Scripted\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let length = match reply.ending {
        Ending::Endless => u64::MAX / 2,
        Ending::Stalled => reply.body.len() as u64 + 1,
        _ => reply.body.len() as u64,
    };
    head.push_str(&format!("content-length: {length}\r\n\r\n"));
    match reply.ending {
        Ending::NoAnswer => {}
        Ending::Hang => std::future::pending().await,
        Ending::Torn => {
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&reply.body[..reply.body.len() / 2]).await?;
        }
        Ending::Endless => {
            stream.write_all(head.as_bytes()).await?;
            loop {
                stream.write_all(if reply.body.is_empty() { &[b'x'; 4096] } else { &reply.body }).await?;
            }
        }
        Ending::Stalled => {
            stream.write_all(&[head.as_bytes(), &reply.body].concat()).await?;
            std::future::pending::<()>().await;
        }
        Ending::Whole | Ending::Close => stream.write_all(&[head.as_bytes(), &reply.body].concat()).await?,
    }
    stream.flush().await
}

/// Reads one request; none when the other side has closed. `buffer` keeps what was read beyond it.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<Option<Request>> {
    let head_len = loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if buffer.len() > HEAD_BYTES {
            return Err(io::Error::other("the head of the request is too large"));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8_lossy(&buffer[..head_len]).into_owned();
    let mut lines = head.lines();
    let mut first = lines.next().unwrap_or_default().split(' ');
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length: usize = length.and_then(|(_, value)| value.parse().ok()).unwrap_or_default();
    while buffer.len() < head_len + length {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let rest = buffer.split_off(head_len + length);
    let body = std::mem::replace(buffer, rest).split_off(head_len);
    let (method, target) = (first.next().unwrap_or_default().into(), first.next().unwrap_or_default().into());
    Ok(Some(Request { method, target, headers, body, answered: None }))
}
