//! Ports that no two tests share, in this process or another, and which process listens on a port.
//!
//! A port that was free a moment ago is not reserved: two tests chose the same port, one server ended because the port
//! was taken, and its test used the other server until that one ended as well. So a reserved port is a lock on a file
//! with its number, held as long as the server may restart, and a server is up when *its process* listens.

use std::{
    fmt,
    fs::{self, File},
    io,
    net::{TcpListener, TcpStream},
    ops::Range,
    path::PathBuf,
    sync::Arc,
};

/// Below those that the kernel gives to outgoing connections, so that a port is still free when the server comes
/// back after a stop. `scripts/services` draws from 26,000 on.
const RANGE: Range<u16> = 20_000..26_000;
/// How many ports are tried. The range has six thousand, and a test takes a few.
const TRIES: usize = 10_000;

/// A port on the loopback interface, reserved until the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Port {
    number: u16,
    /// Closed by the kernel if the test is killed, and not inherited by servers.
    _lock: Arc<File>,
}

impl Port {
    /// Reserves a port that no process listens on.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn reserve() -> Self {
        let mut last = None;
        for _ in 0..TRIES {
            match Self::take(fastrand::u16(RANGE)) {
                Ok(port) => return port,
                Err(error) => last = Some(error),
            }
        }
        panic!("of {TRIES} ports none can be reserved: {last:?}");
    }

    /// Reserves this port, unless another test or process uses it.
    pub fn take(number: u16) -> io::Result<Self> {
        // Never removed: whoever waits for a lock on a removed file would share the port with who makes it anew.
        let file = directory()?.join(number.to_string());
        let lock = File::options().create(true).truncate(false).write(true).open(file)?;
        lock.try_lock()?;
        // The server of a test that was killed lives on without the lock.
        TcpListener::bind(("127.0.0.1", number))?;
        Ok(Self { number, _lock: Arc::new(lock) })
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

/// The same for every checkout and every user of this machine, as `scripts/services` has it.
fn directory() -> io::Result<PathBuf> {
    let directory = std::env::temp_dir().join("airtight-ports");
    if fs::create_dir(&directory).is_ok() {
        #[cfg(unix)]
        fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o1777))?;
    }
    if directory.is_dir() { Ok(directory) } else { Err(io::Error::from(io::ErrorKind::NotADirectory)) }
}

/// Whether the process `pid` itself listens on `port`. Where there is no `/proc` to tell, whether anybody does.
pub fn listens(pid: u32, port: u16) -> bool {
    match listeners(port) {
        Ok(inodes) => {
            sockets(pid).is_some_and(|sockets| sockets.iter().any(|socket| inodes.contains(socket)))
        }
        Err(_) => TcpStream::connect(("127.0.0.1", port)).is_ok(),
    }
}

/// The sockets that listen on a port, as `/proc/PID/fd` names them.
fn listeners(port: u16) -> io::Result<Vec<String>> {
    const LISTEN: &str = "0A";
    let mut found = Vec::new();
    // A JVM listens on IPv6 for both.
    let tables = [fs::read_to_string("/proc/net/tcp"), fs::read_to_string("/proc/net/tcp6")];
    let [ipv4, ipv6] = tables;
    for line in ipv4?.lines().chain(ipv6.unwrap_or_default().lines()) {
        // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode
        let columns: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, local, _, state, _, _, _, _, _, inode, ..] = columns[..] else { continue };
        if state == LISTEN && local.ends_with(&format!(":{port:04X}")) {
            found.push(format!("socket:[{inode}]"));
        }
    }
    Ok(found)
}

fn sockets(pid: u32) -> Option<Vec<String>> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    Some(links.map(|link| link.to_string_lossy().into_owned()).collect())
}
