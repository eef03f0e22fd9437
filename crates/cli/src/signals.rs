//! SIGINT, SIGTERM and SIGHUP: the first signal asks the process to finish, the second ends it at once.
//!
//! SIGHUP has two meanings. For a process with a terminal, it means that the terminal was closed: a relay that was
//! started there ends cleanly, as after a SIGTERM. For a service, it means by convention "read your config again",
//! which airtight does not do: the relay logs a warning and continues. A process under `nohup` has no terminal, so the
//! second meaning applies.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Signals within this time count as one: coreutils' `timeout` signals the process and then its group, and both the
/// kernel and the shell report a closed terminal. A person is slower.
const SAME: Duration = Duration::from_millis(500);

/// Returns a token that the first signal cancels. The second signal runs `at_second` and then ends the process.
pub(crate) fn shutdown(at_second: impl FnOnce() + Send + 'static) -> CancellationToken {
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        let mut signals = Signals::new();
        signals.next().await;
        let first = Instant::now();
        tracing::info!("stopping: finishing the deliveries in flight; a second signal stops at once");
        cancelled.cancel();
        let code = loop {
            let code = signals.next().await;
            if first.elapsed() > SAME {
                break code;
            }
            tracing::info!(
                "a signal {} ms after the first counts as the same one; the next stops at once",
                first.elapsed().as_millis()
            );
        };
        at_second();
        // Claimed events are delivered again when their lease has expired.
        std::process::exit(code);
    });
    token
}

#[cfg(unix)]
struct Signals {
    interrupt: Option<tokio::signal::unix::Signal>,
    terminate: Option<tokio::signal::unix::Signal>,
    hangup: Option<tokio::signal::unix::Signal>,
    has_terminal: bool,
}

#[cfg(unix)]
impl Signals {
    fn new() -> Self {
        use std::io::{IsTerminal, stderr, stdin, stdout};
        use tokio::signal::unix::{SignalKind, signal};
        Self {
            interrupt: signal(SignalKind::interrupt()).ok(),
            terminate: signal(SignalKind::terminate()).ok(),
            hangup: signal(SignalKind::hangup()).ok(),
            has_terminal: stdin().is_terminal() || stdout().is_terminal() || stderr().is_terminal(),
        }
    }

    /// Waits for a signal; returns the exit code that a shell would give it.
    async fn next(&mut self) -> i32 {
        loop {
            tokio::select! {
                () = received(&mut self.interrupt) => return 130,
                () = received(&mut self.terminate) => return 143,
                () = received(&mut self.hangup) => {
                    if self.has_terminal {
                        return 129;
                    }
                    tracing::warn!(
                        "SIGHUP has no effect: a running relay does not read its config again. To use another config, \
                         restart the process: SIGTERM stops it cleanly"
                    );
                }
            }
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
