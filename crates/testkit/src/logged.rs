//! The log of a test's own thread.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use tracing::{
    Dispatch,
    subscriber::{DefaultGuard, NoSubscriber},
};

/// The log of the thread that it was made on, until it is dropped. On a runtime of one thread that is all of a test's.
pub struct Logged {
    lines: Lines,
    _guard: DefaultGuard,
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Logged {
    /// Starts to record what is logged, at INFO and above.
    pub fn start() -> Self {
        // With one subscriber in the whole process, whatever another thread logs first is off for good.
        static ANOTHER: OnceLock<Dispatch> = OnceLock::new();
        ANOTHER.get_or_init(|| Dispatch::new(NoSubscriber::new()));
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        Self { lines, _guard: tracing::subscriber::set_default(subscriber) }
    }

    /// What was logged so far.
    pub fn text(&self) -> String {
        let lines = self.lines.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&lines).into_owned()
    }

    /// How many lines have this text.
    pub fn count(&self, text: &str) -> usize {
        self.text().lines().filter(|line| line.contains(text)).count()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.text());
        }
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
