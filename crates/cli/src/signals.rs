//! SIGINT and SIGTERM: the first asks to finish, the second does not ask.

use tokio_util::sync::CancellationToken;

/// A token that the first signal cancels. `at_second` is run on the second, which then ends the process.
pub(crate) fn shutdown(at_second: impl FnOnce() + Send + 'static) -> CancellationToken {
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        let mut signals = Signals::new();
        signals.next().await;
        tracing::info!("stopping: finishing what is under way; a second signal stops at once");
        cancelled.cancel();
        let code = signals.next().await;
        at_second();
        // Whatever was claimed comes again when its lease has run out: that is what leases are for.
        std::process::exit(code);
    });
    token
}

#[cfg(unix)]
struct Signals {
    interrupt: Option<tokio::signal::unix::Signal>,
    terminate: Option<tokio::signal::unix::Signal>,
}

#[cfg(unix)]
impl Signals {
    fn new() -> Self {
        use tokio::signal::unix::{SignalKind, signal};
        Self {
            interrupt: signal(SignalKind::interrupt()).ok(),
            terminate: signal(SignalKind::terminate()).ok(),
        }
    }

    /// Waits for a signal; returns the exit code that a shell would give it.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            () = received(&mut self.interrupt) => 130,
            () = received(&mut self.terminate) => 143,
        }
    }
}

#[cfg(unix)]
async fn received(signal: &mut Option<tokio::signal::unix::Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> Self {
        Self
    }

    async fn next(&mut self) -> i32 {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        130
    }
}
