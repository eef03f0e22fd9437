//! A PostgreSQL server for one test, which the test can crash and restart.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::ports::{self, Port};

/// A server that ends with the test. Its data is fsynced: what survives a crash is what the test is about.
#[derive(Debug)]
pub struct PrivateServer {
    bindir: PathBuf,
    user: String,
    port: Port,
    directory: TempDir,
}

impl PrivateServer {
    /// Starts one, with prepared transactions allowed; none, and a line that says so, where `scripts/services` has
    /// not told where the server's programs are.
    pub fn start(test_name: &str) -> Option<Self> {
        Self::start_with(test_name, &[])
    }

    /// The same with settings of one's own, as lines of `postgresql.conf`.
    pub fn start_with(test_name: &str, settings: &[&str]) -> Option<Self> {
        Self::start_from("AIRTIGHT_TEST_PG_BINDIR", test_name, settings)
    }

    /// The same with the programs in the directory that the environment variable `bindir` names.
    pub fn start_from(bindir: &str, test_name: &str, settings: &[&str]) -> Option<Self> {
        let variable = bindir;
        let (Some(bindir), Some(user)) =
            (crate::ledger::variable(bindir), crate::ledger::variable("AIRTIGHT_TEST_PG_USER"))
        else {
            crate::ledger::skip(test_name, "no PostgreSQL to start", variable);
            return None;
        };
        let server = Self::new(bindir.into(), user);
        let (data, port) = (server.data(), &server.port);
        server.run(
            "initdb",
            &[
                "--pgdata",
                path(&data),
                "--username",
                "airtight",
                "--auth",
                "trust",
                "--no-locale",
                "--encoding",
                "UTF8",
            ],
        );
        let socket = server.socket();
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{}'\nmax_prepared_transactions = 64\nshared_buffers = 32MB\n{}\n",
            socket.display(),
            settings.join("\n"),
        );
        server.append("postgresql.auto.conf", &settings);
        server.resume();
        Some(server)
    }

    fn new(bindir: PathBuf, user: String) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let server = Self { bindir, user, port: Port::reserve(), directory };
        server.own_directory();
        server
    }

    /// A standby of this server, which is stopped for a moment: made from its files, and following it through the
    /// physical slot `slot`, which must be there.
    pub fn standby(&self, slot: &str, settings: &[&str]) -> Self {
        let standby = Self::new(self.bindir.clone(), self.user.clone());
        let (data, copy) = (self.data(), standby.data());
        self.run("pg_ctl", &["stop", "--mode", "fast", "--silent", "--wait", "--pgdata", path(&data)]);
        self.copy(&data, &copy);
        self.resume();
        let settings = format!(
            "port = {}\nunix_socket_directories = '{}'\nprimary_slot_name = '{slot}'\nhot_standby_feedback = on\n\
             primary_conninfo = 'host=127.0.0.1 port={} user=airtight dbname=postgres'\n{}\n",
            standby.port,
            standby.socket().display(),
            self.port,
            settings.join("\n"),
        );
        standby.append("postgresql.auto.conf", &settings);
        standby.write("standby.signal", "");
        standby.resume();
        standby
    }

    /// Keeps a copy of its files for [`PrivateServer::set_back`]. It is shut down for a moment.
    pub fn save(&self) {
        let (data, saved) = (self.data(), self.saved());
        self.run("pg_ctl", &["stop", "--mode", "fast", "--silent", "--wait", "--pgdata", path(&data)]);
        self.copy(&data, &saved);
        self.resume();
    }

    /// Ends it as a crash would, and starts it again with the files of [`PrivateServer::save`], as whoever restores a
    /// snapshot of its disk would.
    pub fn set_back(&self) {
        self.stop();
        let removed = self.command("rm", &["-rf", path(&self.data())]);
        assert!(removed.status.success(), "removing the data: {removed:?}");
        self.copy(&self.saved(), &self.data());
        self.resume();
    }

    /// Makes a standby the primary.
    pub fn promote(&self) {
        self.run("pg_ctl", &["promote", "--silent", "--wait", "--pgdata", path(&self.data())]);
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("postgres://airtight@127.0.0.1:{}/postgres", self.port)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The directory of its Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// Writes a file into its data directory, readable by the server only.
    pub fn write(&self, name: &str, text: &str) {
        self.write_by("umask 077; cat > \"$1\" <<<\"$2\"", name, text);
    }

    /// Who may come in, and how: the lines of `pg_hba.conf`, in force at once.
    pub fn let_in(&self, lines: &str) {
        self.write("pg_hba.conf", lines);
        self.run("pg_ctl", &["reload", "--silent", "--pgdata", path(&self.data())]);
    }

    /// Ends it as a crash would.
    pub fn stop(&self) {
        let data = self.data();
        self.run("pg_ctl", &["stop", "--mode", "immediate", "--silent", "--pgdata", path(&data)]);
    }

    /// Shuts it down as an operator would, in the mode `fast` or `smart`, and waits for it. Returns how long it took, or
    /// an error where it was not down `within` that time.
    pub fn shut_down(&self, mode: &str, within: Duration) -> Result<Duration, String> {
        let (data, seconds, since) = (self.data(), within.as_secs().to_string(), Instant::now());
        let output = self.command(
            path(&self.bindir.join("pg_ctl")),
            &["stop", "--mode", mode, "--wait", "--timeout", &seconds, "--pgdata", path(&data)],
        );
        let log = || std::fs::read_to_string(self.log()).unwrap_or_default();
        if output.status.success() {
            Ok(since.elapsed())
        } else {
            Err(format!("not stopped after {within:?}: {}", log()))
        }
    }

    /// Starts it again after [`PrivateServer::stop`] or [`PrivateServer::shut_down`].
    pub fn resume(&self) {
        let (data, log) = (self.data(), self.log());
        self.run("pg_ctl", &["start", "--silent", "--wait", "--pgdata", path(&data), "--log", path(&log)]);
        self.assert_ours();
    }

    /// Ends it as a crash would, and starts it again.
    pub fn crash(&self) {
        let data = self.data();
        self.run(
            "pg_ctl",
            &[
                "restart",
                "--mode",
                "immediate",
                "--silent",
                "--wait",
                "--pgdata",
                path(&data),
                "--log",
                path(&self.log()),
            ],
        );
        self.assert_ours();
    }

    /// The first line of this file is the server's pid.
    fn assert_ours(&self) {
        let file = std::fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        let pid = file.lines().next().and_then(|pid| pid.parse().ok());
        let listens = pid.is_some_and(|pid| ports::listens(pid, self.port()));
        assert!(listens, "port {} is not that of our PostgreSQL, pid {pid:?}", self.port);
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn saved(&self) -> PathBuf {
        self.directory.path().join("saved")
    }

    fn copy(&self, from: &Path, to: &Path) {
        let copied = self.command("cp", &["-a", path(from), path(to)]);
        assert!(copied.status.success(), "copying the data: {copied:?}");
    }

    fn log(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn append(&self, name: &str, text: &str) {
        self.write_by("cat >> \"$1\" <<<\"$2\"", name, text);
    }

    fn write_by(&self, script: &str, name: &str, text: &str) {
        let file = self.data().join(name);
        let written = self.command("bash", &["-c", script, "bash", path(&file), text]);
        assert!(written.status.success(), "writing {name}: {written:?}");
    }

    /// The server refuses to run as root, and whoever it runs as must own its files.
    fn own_directory(&self) {
        let status = Command::new("chown").arg(&self.user).arg(self.directory.path()).status();
        assert!(status.is_ok_and(|status| status.success()), "handing the directory to {}", self.user);
    }

    fn run(&self, program: &str, args: &[&str]) {
        let program = self.bindir.join(program);
        let output = self.command(path(&program), args);
        assert!(
            output.status.success(),
            "{program:?} {args:?}: {}{}",
            String::from_utf8_lossy(&output.stderr),
            std::fs::read_to_string(self.log()).unwrap_or_default()
        );
    }

    fn command(&self, program: &str, args: &[&str]) -> Output {
        let me = std::env::var("USER").unwrap_or_default();
        let is_root =
            Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0");
        let mut command = if is_root && self.user != me {
            let mut command = Command::new("setpriv");
            let (user, group) = (format!("--reuid={}", self.user), format!("--regid={}", self.user));
            command.args([&user, &group, "--clear-groups", "--", program]);
            command
        } else {
            Command::new(program)
        };
        command.args(args).current_dir(self.directory.path()).output().expect("the program starts")
    }
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        let data = self.data();
        let pg_ctl = self.bindir.join("pg_ctl");
        // Nothing of it is wanted any more.
        let _ = self
            .command(path(&pg_ctl), &["stop", "--mode", "immediate", "--silent", "--pgdata", path(&data)]);
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}
