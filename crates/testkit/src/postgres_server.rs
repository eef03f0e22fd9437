//! A PostgreSQL of a test's own, to be crashed and restarted at will.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use tempfile::TempDir;

/// A server that ends with the test. Its data is fsynced: what survives a crash is what the test is about.
#[derive(Debug)]
pub struct PrivateServer {
    bindir: PathBuf,
    user: String,
    port: u16,
    directory: TempDir,
}

impl PrivateServer {
    /// Starts one, with prepared transactions allowed; none, and a line that says so, where `scripts/services` has
    /// not told where the server's programs are.
    pub fn start(test_name: &str) -> Option<Self> {
        let (Ok(bindir), Ok(user)) =
            (std::env::var("AIRTIGHT_TEST_PG_BINDIR"), std::env::var("AIRTIGHT_TEST_PG_USER"))
        else {
            crate::ledger::skip(test_name, "no PostgreSQL to start", "AIRTIGHT_TEST_PG_BINDIR");
            return None;
        };
        let directory = tempfile::tempdir().expect("a temporary directory");
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.local_addr())
            .expect("a free port")
            .port();
        let server = Self { bindir: bindir.into(), user, port, directory };
        server.own_directory();
        let data = server.data();
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
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = ''\nmax_prepared_transactions = 64\nshared_buffers = 32MB\n"
        );
        let conf = data.join("postgresql.auto.conf");
        let written = server
            .command("sh", &["-c", &format!("printf '%s' \"$1\" >> '{}'", conf.display()), "sh", &settings]);
        assert!(written.status.success(), "writing the configuration: {written:?}");
        server.run(
            "pg_ctl",
            &["start", "--silent", "--wait", "--pgdata", path(&data), "--log", path(&server.log())],
        );
        Some(server)
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("postgres://airtight@127.0.0.1:{}/postgres", self.port)
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
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    fn log(&self) -> PathBuf {
        self.directory.path().join("log")
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
