//! Relays as processes.

use std::process::{Child, Command, Stdio};

/// A relay that is killed when the test ends, however it ends.
pub(crate) struct RelayProcess(Child);

impl RelayProcess {
    pub(crate) fn start<const N: usize>(args: [&str; N]) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_airtight"))
            .args(args)
            .env_remove("DATABASE_URL")
            .env("RUST_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the binary starts");
        Self(child)
    }

    /// Lets a last relay finish; returns its summary.
    pub(crate) fn drain(url: &str, to: &str) -> String {
        Self::drain_as("queue", url, to)
    }

    /// The same for another way to read.
    pub(crate) fn drain_as(read: &str, url: &str, to: &str) -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_airtight"))
            .args(["run", "--read", read, "--from", url, "--to", to])
            .args(["--drain", "--lease", "1", "--poll", "50", "--json"])
            .stderr(Stdio::inherit())
            .output()
            .expect("the binary runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The bytes that it has in memory.
    pub(crate) fn resident(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.0.id())).expect("it runs");
        let pages: u64 = statm.split(' ').nth(1).expect("the second field").parse().expect("a number");
        pages * 4_096
    }

    /// SIGKILL, at whatever instruction it is.
    pub(crate) fn kill(&mut self) {
        self.0.kill().expect("it was ours to kill");
        self.0.wait().expect("it has ended");
    }

    /// Sends a signal by name; the standard library knows only SIGKILL.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.0.id().to_string()]).status();
        assert!(sent.expect("kill runs").success(), "SIG{name} was sent");
    }

    /// SIGTERM, and waits for the end, which must be a clean one.
    pub(crate) fn stop(&mut self) {
        self.signal("TERM");
        let status = self.0.wait().expect("it ends");
        assert!(status.success(), "a graceful shutdown is a success, not {status}");
    }
}

impl Drop for RelayProcess {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
