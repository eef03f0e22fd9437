//! A small disk that a test can fill: a separate tmpfs, mounted by root and unmounted at the end of the test.

use std::{path::Path, process::Command};

use tempfile::TempDir;

use crate::ledger;

/// A directory on a disk of so many bytes.
#[derive(Debug)]
pub struct SmallDisk {
    directory: TempDir,
}

impl SmallDisk {
    /// Mounts one; none, and the test counts as skipped, where this user may not.
    pub fn mount(test_name: &str, bytes: u64) -> Option<Self> {
        let directory = TempDir::with_prefix("airtight-disk-").expect("a directory to mount a disk on");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "airtight-test"])
            .arg(directory.path())
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self { directory });
        }
        ledger::skip_for(test_name, "no small disk: mounting a tmpfs takes root");
        None
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Fills it to the last byte. The returned value frees the space when it is dropped.
    ///
    /// # Panics
    ///
    /// If there is still free space.
    pub fn fill(&self) -> Ballast {
        use std::io::Write;
        let file = tempfile::NamedTempFile::new_in(self.path()).expect("a file to fill the disk with");
        let mut writer = file.as_file();
        // In pieces, the last of them small: a write that does not fit as a whole may write nothing.
        for size in [64 * 1024, 4096, 1] {
            let piece = vec![0; size];
            while writer.write_all(&piece).is_ok() {}
        }
        Ballast { _file: file }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a server or a database of the test may be about to close its files.
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

/// What fills a disk.
#[derive(Debug)]
pub struct Ballast {
    _file: tempfile::NamedTempFile,
}
