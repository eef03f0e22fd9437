//! Who reads standard output: nobody from the start, or nobody any more while nothing is written there.

/// Says so where what is written goes nowhere. A program that is started with standard output closed (`>&-`) has
/// `/dev/null` there, so closed or not cannot be told apart; either way events would be gone without a word.
#[cfg(unix)]
pub(super) fn warn_of_nowhere(written: bool) {
    use std::os::unix::fs::MetadataExt;

    let device = |path: &str| std::fs::metadata(path).map(|file| (file.rdev(), file.dev(), file.ino())).ok();
    if written && device("/dev/null").is_some_and(|null| device("/dev/fd/1") == Some(null)) {
        tracing::warn!(
            "standard output is closed, or is /dev/null: what is written there counts as delivered, and is gone. Where \
             that is meant, `null:` says so"
        );
    }
}

/// Elsewhere nobody is warned.
#[cfg(not(unix))]
pub(super) fn warn_of_nowhere(_written: bool) {}

/// Comes back when the reader of a pipe has closed it; never, where standard output is no pipe or is not `written`.
///
/// A write would tell as well, but an idle outbox writes nothing, and `airtight run --to stdout: | head -1` would wait
/// for an event that nobody wants.
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

/// Elsewhere the next write tells.
#[cfg(not(target_os = "linux"))]
pub(super) async fn reader_gone(_written: bool) {
    std::future::pending::<()>().await;
}
