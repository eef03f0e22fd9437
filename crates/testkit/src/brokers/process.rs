//! A server as a child process, on a port that it keeps across restarts.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::ports::{self, Port};

const LOOK: Duration = Duration::from_millis(20);
/// How long a server may take to end after it was asked to.
const STOP: Duration = Duration::from_secs(30);

/// How a server is started, every time in the same way.
#[derive(Debug)]
pub struct Recipe {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment variables on top of the test's own.
    pub env: Vec<(String, String)>,
    /// It is up when its process listens here.
    pub port: Port,
    /// How long that may take.
    pub patience: Duration,
}

/// A server that ends with the test.
#[derive(Debug)]
pub struct ServerProcess {
    recipe: Recipe,
    directory: TempDir,
    child: Mutex<Option<Child>>,
}

impl ServerProcess {
    /// Starts one. `directory` holds its data and is removed with it.
    ///
    /// # Panics
    ///
    /// With the end of its log, if it is not up in time.
    pub async fn start(recipe: Recipe, directory: TempDir) -> Self {
        let server = Self { recipe, directory, child: Mutex::new(None) };
        server.start_again().await;
        server
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.recipe.port.number()
    }

    /// Its process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child().as_ref().map(Child::id)
    }

    /// Starts it after [`ServerProcess::stop`] or [`ServerProcess::kill`], on the same port and data.
    pub async fn start_again(&self) {
        let log = File::options().create(true).append(true).open(self.log()).expect("a log to write to");
        let errors = log.try_clone().expect("a second handle of the log");
        let mut child = Command::new(&self.recipe.program)
            .args(&self.recipe.args)
            .envs(self.recipe.env.iter().cloned())
            .current_dir(self.directory())
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .unwrap_or_else(|error| panic!("{} does not start: {error}", self.recipe.program.display()));
        let end = Instant::now() + self.recipe.patience;
        loop {
            // Before the look at the port: where that cannot tell whose it is, a child that has ended does not own it.
            let ended = child.try_wait().expect("a child can be waited for");
            if ended.is_none() && ports::listens(child.id(), self.port()) {
                break;
            }
            if ended.is_some() || Instant::now() >= end {
                let _ = child.kill();
                let _ = child.wait();
                panic!(
                    "{} is not up on port {} ({ended:?}); its log ends in:\n{}",
                    self.recipe.program.display(),
                    self.port(),
                    self.log_tail()
                );
            }
            tokio::time::sleep(LOOK).await;
        }
        *self.child() = Some(child);
    }

    /// Asks it to end and waits until it has.
    pub async fn stop(&self) {
        self.end("TERM").await;
    }

    /// Ends it as a crash would.
    pub async fn kill(&self) {
        self.end("KILL").await;
    }

    /// Suspends it: connections stay open, but nothing answers.
    ///
    /// # Panics
    ///
    /// If it does not stop.
    pub fn suspend(&self) {
        self.signal("STOP");
        // The signal takes a moment, in which the server can still answer.
        let end = Instant::now() + STOP;
        while !self.is_suspended() {
            assert!(Instant::now() < end, "{} goes on", self.recipe.program.display());
            std::thread::yield_now();
        }
    }

    /// Whether all its threads have stopped; taken for granted where there is no `/proc`.
    fn is_suspended(&self) -> bool {
        let Some(pid) = self.pid() else { return true };
        let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
        threads.filter_map(Result::ok).all(|thread| {
            // `1234 (name) T …`, and the name may hold anything; a thread that is gone does nothing either.
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('T'))
        })
    }

    /// Lets it continue.
    pub fn resume(&self) {
        self.signal("CONT");
    }

    /// The last lines that it wrote.
    pub fn log_tail(&self) -> String {
        let text = std::fs::read(self.log()).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(4_000)..]).into_owned()
    }

    /// All that it wrote.
    pub fn log_text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.log()).unwrap_or_default()).into_owned()
    }

    fn log(&self) -> PathBuf {
        self.directory().join("server.log")
    }

    async fn end(&self, signal: &str) {
        self.signal(signal);
        let child = self.child().take();
        let Some(mut child) = child else { return };
        let end = Instant::now() + STOP;
        while child.try_wait().expect("a child can be waited for").is_none() {
            if Instant::now() >= end {
                // A child of our own cannot resist this one.
                let _ = child.kill();
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn signal(&self, signal: &str) {
        if let Some(pid) = self.pid() {
            let sent = Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
            assert!(sent.is_ok_and(|status| status.success()), "sending {signal} to {pid}");
        }
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        if let Some(mut child) = self.child().take() {
            // Nothing of it is wanted any more.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
