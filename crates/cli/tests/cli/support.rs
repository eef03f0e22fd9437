//! Runs the binary in a directory of its own, with an environment that is the test's alone.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader, Read, Write},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use serde_json::Value;

/// Nothing here takes longer unless it is broken.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The program, with nothing inherited that would change what it does.
pub(crate) fn airtight<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_airtight"));
    command.args(args);
    for variable in ["DATABASE_URL", "RUST_LOG", "AIRTIGHT_WEBHOOK_SECRET", "COLUMNS"] {
        command.env_remove(variable);
    }
    command
}

/// What a finished command left.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// Asserts success and gives what was printed.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }

    /// Asserts success and reads what was printed as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Asserts a failure with this exit code, reported on one line, and gives that line.
    #[track_caller]
    pub(crate) fn error(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        let lines: Vec<&str> = self.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(lines.len(), 1, "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        lines[0].to_owned()
    }
}

/// Runs to the end, with this on standard input.
pub(crate) fn finish(mut command: Command, input: &str) -> Ran {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_owned();
    // A command that fails early does not read its input to the end.
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().expect("the binary ends");
    writer.join().expect("the writer ends");
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

/// A directory with a migrated outbox in it.
pub(crate) struct Shop {
    dir: tempfile::TempDir,
}

impl Shop {
    pub(crate) fn new() -> Self {
        let shop = Self { dir: tempfile::tempdir().expect("a directory") };
        shop.run(&["migrate"]).ok();
        shop
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn url(&self) -> String {
        format!("sqlite:{}", self.path("shop.db").display())
    }

    /// A command in this directory, on this outbox.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = airtight(args);
        command.current_dir(self.dir.path()).env("DATABASE_URL", self.url());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        finish(self.command(args), "")
    }

    pub(crate) fn run_with(&self, args: &[&str], input: &str) -> Ran {
        finish(self.command(args), input)
    }

    /// Publishes one event of this key.
    pub(crate) fn publish(&self, key: &str, payload: &str) -> Value {
        let args = [
            "publish",
            "--stream",
            "shop.orders",
            "--type",
            "OrderPlaced",
            "--aggregate-type",
            "Order",
            "--key",
            key,
            "--payload",
            payload,
            "--json",
        ];
        self.run(&args).json()
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        std::fs::write(self.path(name), text).expect("written");
        self.path(name)
    }

    /// The lines of a file, as JSON.
    pub(crate) fn lines(&self, name: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(name)).expect("read");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }
}

/// A command that goes on until it is told to stop.
pub(crate) struct Running {
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let stdout = lines_of(child.stdout.take().expect("piped"));
        let stderr = lines_of(child.stderr.take().expect("piped"));
        Self { child, stdout, stderr }
    }

    /// The next line on standard output.
    #[track_caller]
    pub(crate) fn next_line(&self) -> String {
        self.stdout.recv_timeout(DEADLINE).expect("a line in time")
    }

    /// Waits for a line on standard error that holds these words.
    #[track_caller]
    pub(crate) fn wait_for_log(&self, words: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        let mut seen = Vec::new();
        while let Ok(line) = self.stderr.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            if line.contains(words) {
                return line;
            }
            seen.push(line);
        }
        panic!("no line with {words:?} in {seen:#?}");
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is ours").is_none()
    }

    #[cfg(unix)]
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.expect("kill runs").success());
    }

    /// Waits for the end.
    #[track_caller]
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        // Both pipes close when the process ends; the readers then hang up.
        let mut rest = String::new();
        let deadline = Instant::now() + DEADLINE;
        for lines in [&self.stdout, &self.stderr] {
            loop {
                match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(line) => rest.push_str(&format!("{line}\n")),
                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => panic!("it does not stop: {rest}"),
                }
            }
        }
        (self.child.wait().expect("it ended"), rest)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails when it has ended already, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines() {
            let Ok(line) = line else { return };
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}
