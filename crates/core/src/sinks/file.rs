//! One JSON envelope per line, appended to a file. An event counts as delivered after an fsync.
//!
//! Several relays may share a file: every append happens under the file's lock. A process that was killed in
//! the middle of a write leaves an incomplete last line; the next append, by any relay, removes it first. An
//! incomplete line was never reported as delivered, so this loses nothing.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;

use crate::{Capabilities, Code, Delivery, Error, Outcome, Result, Sink, envelope};

/// Appends envelopes to a file.
#[derive(Debug, Clone)]
pub struct FileSink {
    path: Arc<PathBuf>,
    file: Arc<Mutex<Option<File>>>,
}

impl FileSink {
    /// A sink on this path. `open` creates the file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: Arc::new(path.into()), file: Arc::default() }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    async fn append(&self, lines: Vec<u8>) -> Result<()> {
        let this = self.clone();
        let appended = tokio::task::spawn_blocking(move || {
            let mut slot = this.file.lock().unwrap_or_else(PoisonError::into_inner);
            let result = append(&mut slot, &this.path, &lines);
            if result.is_err() {
                // After a failed fsync, the kernel may report success for the next one although pages were lost: this
                // handle must not be used again.
                *slot = None;
            }
            result
        });
        match appended.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Error::unavailable(
                Code::IO,
                format!("cannot append to {}: {error}", self.path.display()),
            )),
            Err(error) => Err(Error::retryable(Code::IO, format!("the write did not finish: {error}"))),
        }
    }
}

#[async_trait]
impl Sink for FileSink {
    fn capabilities(&self) -> Capabilities {
        Capabilities { prefix_per_key: true, ..Capabilities::default() }
    }

    async fn open(&self) -> Result<()> {
        self.append(Vec::new()).await
    }

    async fn deliver(&self, batch: &[Delivery]) -> Vec<Outcome> {
        let mut lines = Vec::new();
        for delivery in batch {
            envelope::write_line(&mut lines, &delivery.event);
        }
        let outcome: Outcome = self.append(lines).await.into();
        vec![outcome; batch.len()]
    }
}

fn append(slot: &mut Option<File>, path: &Path, lines: &[u8]) -> io::Result<()> {
    let file = match slot {
        Some(file) if is_at(file, path) => file,
        _ => slot.insert(open(path)?),
    };
    file.lock()?;
    let result = append_locked(file, lines);
    // Closing would unlock as well, but the handle is kept for the next batch.
    file.unlock()?;
    result
}

fn append_locked(file: &mut File, lines: &[u8]) -> io::Result<()> {
    repair(file)?;
    if lines.is_empty() {
        return Ok(());
    }
    let start = file.seek(SeekFrom::End(0))?;
    if let Err(error) = file.write_all(lines).and_then(|()| file.sync_data()) {
        // Best effort: remove what was written in part, so that no reader takes it for delivered. If this fails too,
        // the next append removes an incomplete line, and complete lines are at worst duplicates.
        let _ = file.set_len(start);
        return Err(error);
    }
    Ok(())
}

/// Removes a last line that has no line feed.
fn repair(file: &mut File) -> io::Result<()> {
    let len = file.seek(SeekFrom::End(0))?;
    let mut end = len;
    let mut buffer = [0u8; 8192];
    // Backwards, block by block, to the last line feed.
    while end > 0 {
        let start = end.saturating_sub(buffer.len() as u64);
        let block = &mut buffer[..usize::try_from(end - start).unwrap_or(0)];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(block)?;
        if let Some(at) = block.iter().rposition(|byte| *byte == b'\n') {
            end = start + at as u64 + 1;
            break;
        }
        end = start;
    }
    if end < len {
        tracing::warn!(
            bytes = len - end,
            "removed an incomplete last line, left by a writer that was killed"
        );
        file.set_len(end)?;
        file.sync_data()?;
    }
    Ok(())
}

fn open(path: &Path) -> io::Result<File> {
    let created = !path.exists();
    let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
    if created {
        // The directory entry must be durable too, or a crash could lose the whole file.
        file.sync_all()?;
        if let Some(parent) = path.parent() {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            File::open(parent)?.sync_all()?;
        }
    }
    Ok(file)
}

/// Whether the handle is still the file at `path`: log rotation moves it away.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(theirs)) => ours.ino() == theirs.ino() && ours.dev() == theirs.dev(),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_at(_file: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Position, event::sample_event};

    fn delivery(seq: i64) -> Delivery {
        Delivery {
            event: sample_event(seq, "k"),
            position: Position(seq.cast_unsigned()),
            attempt: 1,
            max_attempts: None,
            lost_leases: 0,
            replay: None,
        }
    }

    fn seqs(path: &Path) -> Vec<i64> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["seq"].as_i64().unwrap())
            .collect()
    }

    #[tokio::test]
    async fn a_torn_last_line_is_cut_off_before_the_next_append() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.ndjson");
        let sink = FileSink::new(&path);
        sink.open().await.unwrap();
        sink.deliver(&[delivery(1)]).await;
        let torn = "x".repeat(20_000);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(torn.as_bytes()).unwrap();
        let outcomes = FileSink::new(&path).deliver(&[delivery(2)]).await;
        assert!(matches!(outcomes[..], [Outcome::Delivered]));
        assert_eq!(seqs(&path), [1, 2]);
    }

    #[tokio::test]
    async fn two_sinks_share_a_file_without_tearing_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.ndjson");
        let writers: Vec<_> = (0..4i64)
            .map(|writer| {
                let sink = FileSink::new(&path);
                tokio::spawn(async move {
                    for n in 0..50 {
                        let outcomes = sink.deliver(&[delivery(writer * 1_000 + n)]).await;
                        assert!(matches!(outcomes[..], [Outcome::Delivered]));
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.await.unwrap();
        }
        assert_eq!(seqs(&path).len(), 200);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_write_error_is_never_reported_as_delivered() {
        // Every write to this device fails with "no space left".
        let sink = FileSink::new("/dev/full");
        let outcomes = sink.deliver(&[delivery(1)]).await;
        assert!(matches!(&outcomes[..], [Outcome::Failed(error)] if error.code() == "io"), "{outcomes:?}");
    }

    #[tokio::test]
    async fn a_rotated_file_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.ndjson");
        let sink = FileSink::new(&path);
        sink.deliver(&[delivery(1)]).await;
        std::fs::rename(&path, dir.path().join("out.1")).unwrap();
        sink.deliver(&[delivery(2)]).await;
        assert_eq!(seqs(&path), [2]);
    }
}
