//! A TCP proxy on loopback that can go mute: connections stay open but transfer nothing any more, as behind a load
//! balancer that has failed over, or a NAT entry that was dropped.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{JoinHandle, JoinSet},
};

use crate::wait::eventually;

/// A proxy in front of one address. Dropped, it closes all its connections.
#[derive(Debug)]
pub struct MuteProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    /// Connections with a lower number than this are mute.
    mute_below: watch::Sender<usize>,
    mute_new: AtomicBool,
    accepted: AtomicUsize,
    /// Mute connections over which a client has sent something.
    swallowed: AtomicUsize,
}

impl MuteProxy {
    /// Starts one in front of `target`, like `127.0.0.1:5432`.
    ///
    /// # Panics
    ///
    /// If loopback has no port left.
    pub async fn start(target: impl Into<String>) -> Self {
        let target = target.into();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            mute_below: watch::Sender::new(0),
            mute_new: AtomicBool::new(false),
            accepted: AtomicUsize::new(0),
            swallowed: AtomicUsize::new(0),
        });
        let task = tokio::spawn(serve(listener, target, shared.clone()));
        Self { address, shared, task }
    }

    /// Starts one in front of the server that a URL names. [`MuteProxy::through`] leads there.
    ///
    /// # Panics
    ///
    /// If the URL has no `host:port`.
    pub async fn before(url: &str) -> Self {
        let (_, target, _) = parts(url);
        assert!(target.contains(':'), "{url} has no host and port");
        Self::start(target).await
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same URL through this proxy.
    pub fn through(&self, url: &str) -> String {
        let (head, _, tail) = parts(url);
        format!("{head}{}{tail}", self.address)
    }

    /// From now on, nothing passes over the present connections in either direction, and neither side is told: the
    /// connections stay open on both sides, whatever the other side does. New connections work.
    pub fn mute(&self) {
        let accepted = self.shared.accepted.load(Ordering::Acquire);
        self.shared.mute_below.send_replace(accepted);
    }

    /// Whether connections that are made from now on are accepted and mute from their beginning.
    pub fn mute_new(&self, mute: bool) {
        self.shared.mute_new.store(mute, Ordering::Release);
    }

    /// Waits until a client waits for an answer that does not come: it has sent something over a mute connection, or has
    /// opened another one, because an answer was on its way when the first one went mute.
    ///
    /// # Panics
    ///
    /// After `deadline`.
    pub async fn has_swallowed(&self, deadline: Duration) {
        eventually(deadline, "a client that waits for an answer", async || {
            self.shared.swallowed.load(Ordering::Acquire) > 0
                || self.accepted() > *self.shared.mute_below.borrow()
        })
        .await;
    }

    /// How many connections were ever accepted.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Acquire)
    }
}

impl Drop for MuteProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What is before `host:port`, that, and what is behind it.
fn parts(url: &str) -> (&str, &str, &str) {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?']).map_or(url.len(), |at| start + at);
    let start = url[start..end].rfind('@').map_or(start, |at| start + at + 1);
    (&url[..start], &url[start..end], &url[end..])
}

async fn serve(listener: TcpListener, target: String, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                let number = shared.accepted.fetch_add(1, Ordering::AcqRel);
                let is_mute = shared.mute_new.load(Ordering::Acquire);
                connections.spawn(carry(client, target.clone(), is_mute, number, shared.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn carry(mut client: TcpStream, target: String, is_mute: bool, number: usize, shared: Arc<Shared>) {
    if is_mute {
        return swallow(&client, &shared).await;
    }
    let mut mute_below = shared.mute_below.subscribe();
    let Ok(mut server) = TcpStream::connect(&target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let is_mute = tokio::select! {
        _ = copy_bidirectional(&mut client, &mut server) => false,
        _ = mute_below.wait_for(|below| number < *below) => true,
    };
    if is_mute {
        swallow(&client, &shared).await;
    }
}

/// Holds the socket, notes whether anything comes, and never reads it.
async fn swallow(client: &TcpStream, shared: &Shared) {
    if client.peek(&mut [0]).await.is_ok_and(|bytes| bytes > 0) {
        shared.swallowed.fetch_add(1, Ordering::AcqRel);
    }
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const A_MOMENT: Duration = Duration::from_millis(200);

    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        address
    }

    async fn answers(stream: &mut TcpStream) -> bool {
        stream.write_all(b"x").await.unwrap();
        tokio::time::timeout(A_MOMENT, stream.read_u8()).await.is_ok_and(|read| read.is_ok())
    }

    #[tokio::test]
    async fn what_is_mute_stays_open_and_new_connections_work() {
        let proxy = MuteProxy::start(echo().await.to_string()).await;
        let mut old = TcpStream::connect(proxy.address()).await.unwrap();
        assert!(answers(&mut old).await);
        proxy.mute();
        assert!(!answers(&mut old).await);
        proxy.has_swallowed(A_MOMENT).await;
        let mut new = TcpStream::connect(proxy.address()).await.unwrap();
        assert!(answers(&mut new).await);
        proxy.mute_new(true);
        let mut newer = TcpStream::connect(proxy.address()).await.unwrap();
        assert!(!answers(&mut newer).await);
        assert!(answers(&mut new).await, "it was there before");
        // Still open: nothing to read, and no end of it.
        assert!(tokio::time::timeout(A_MOMENT, old.read_u8()).await.is_err());
        assert_eq!(proxy.accepted(), 3);
    }

    #[tokio::test]
    async fn urls_lead_through_it() {
        let proxy = MuteProxy::before("postgres://me:p@127.0.0.1:5432/shop?x=a@b:1").await;
        let through = proxy.through("postgres://me:p@127.0.0.1:5432/shop?x=a@b:1");
        assert_eq!(through, format!("postgres://me:p@{}/shop?x=a@b:1", proxy.address()));
    }
}
