//! Noticing that nobody reads standard output any more, while nothing is written there.

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
