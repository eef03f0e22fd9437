//! Detects that standard output has no reader: from the start, or after the reader of a pipe has closed it.

/// Warns if standard output discards what is written. A program that is started with standard output closed (`>&-`)
/// has `/dev/null` there, so the two cases cannot be told apart; in both, events would be lost silently.
#[cfg(unix)]
pub(super) fn warn_of_nowhere(written: bool) {
    use std::os::unix::fs::MetadataExt;

    let device = |path: &str| std::fs::metadata(path).map(|file| (file.rdev(), file.dev(), file.ino())).ok();
    if written && device("/dev/null").is_some_and(|null| device("/dev/fd/1") == Some(null)) {
        tracing::warn!(
            "standard output is closed, or is /dev/null: events that are written there count as delivered, and are lost. \
             To discard events on purpose, use `null:`"
        );
    }
}

/// Other systems give no warning.
#[cfg(not(unix))]
pub(super) fn warn_of_nowhere(_written: bool) {}

/// Returns when the reader of a pipe has closed it. Never returns if standard output is not a pipe or is not `written`.
///
/// A write would fail as well, but an idle outbox writes nothing, and `airtight run --to stdout: | head -1` would wait
/// for the next event.
#[cfg(target_os = "linux")]
pub(super) async fn reader_gone(written: bool) {
    use std::os::{fd::AsFd, unix::fs::FileTypeExt};

    use tokio::{io::Interest, net::unix::pipe::Sender};

    // A socket reports errors that pass, and a file cannot be watched.
    let is_pipe = std::fs::metadata("/proc/self/fd/1").is_ok_and(|file| file.file_type().is_fifo());
    // Unchecked, since the checked way would make the pipe non-blocking for all who share it. Nothing is written
    // through this handle.
    if written
        && is_pipe
        && let Ok(pipe) = std::io::stdout().as_fd().try_clone_to_owned()
        && let Ok(pipe) = Sender::from_owned_fd_unchecked(pipe)
        && pipe.ready(Interest::ERROR).await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// On other systems, the next write fails.
#[cfg(not(target_os = "linux"))]
pub(super) async fn reader_gone(_written: bool) {
    std::future::pending::<()>().await;
}
