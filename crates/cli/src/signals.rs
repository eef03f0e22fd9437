//! SIGINT, SIGTERM and SIGHUP: the first asks to finish, the second does not ask.
//!
//! SIGHUP means two things. To a process with a terminal it says that the terminal is gone: a relay that somebody
//! started there ends, cleanly, as at a SIGTERM. To a service it says, by convention, "read your config again", which
//! airtight does not do; so there it is refused with a line in the log, and nothing stops. `nohup` takes the terminal
//! away, and so falls under the second.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Signals so close together are one: coreutils' `timeout` signals the process and then its group, a terminal that
/// goes away is told by the kernel and by the shell. A person is slower.
const SAME: Duration = Duration::from_millis(500);

/// A token that the first signal cancels. `at_second` is run on the second, which then ends the process.
pub(crate) fn shutdown(at_second: impl FnOnce() + Send + 'static) -> CancellationToken {
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(async move {
        let mut signals = Signals::new();
        signals.next().await;
        let first = Instant::now();
        tracing::info!("stopping: finishing what is under way; a second signal stops at once");
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
        // Whatever was claimed comes again when its lease has run out: that is what leases are for.
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
                        "SIGHUP is refused: nothing is read again while this runs, and everything goes on as before. \
                         For another config, restart: SIGTERM ends cleanly"
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
