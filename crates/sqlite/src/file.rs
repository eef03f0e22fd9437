//! Checks that the file is still the one that was opened, and saves its contents if it is not.
//!
//! A file that was removed or replaced continues to exist only for the processes that have it open. No process that opens
//! the path later reads what they commit, and it is lost when the last of them closes the file. SQLite does not notice this
//! in WAL mode. So every operation first compares device and inode. On a difference the relay does not continue with the
//! new file, which may not be this outbox, and does not end and let the old file disappear: it makes a copy, then stops and
//! names the copy.

use std::{
    io,
    path::{Path, PathBuf},
};

use airtight_core::{Code, Error, Result};
use sqlx::{ConnectOptions, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use crate::error::db;

/// How often opening is tried while somebody replaces the file.
const TRIES: usize = 5;

/// A connection that does nothing but hold the file open, and what the files were when it was opened.
///
/// As long as it is open, SQLite itself neither removes nor replaces the write-ahead log and its index, whoever comes
/// and goes. The database file is never opened by other means: closing it would drop SQLite's locks.
#[derive(Debug)]
pub(crate) struct Anchor {
    file: PathBuf,
    watched: Vec<(PathBuf, Identity)>,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    conn: SqliteConnection,
    /// Where its contents were copied to.
    copy: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Anchor {
    /// Opens the file once more; none for a database in memory.
    pub(crate) async fn open(options: &SqliteConnectOptions) -> Result<Option<Self>> {
        let file = std::path::absolute(options.get_filename()).unwrap_or_default();
        for _ in 0..TRIES {
            let Ok(before) = identity(&file) else { return Ok(None) };
            let options = options.clone().create_if_missing(false).disable_statement_logging();
            let mut conn = options.connect().await.map_err(db)?;
            // A read opens the write-ahead log.
            sqlx::query("SELECT count(*) FROM sqlite_schema").execute(&mut conn).await.map_err(db)?;
            // SQLite puts them beside the file that a link leads to.
            let real = std::fs::canonicalize(&file).unwrap_or_else(|_| file.clone());
            let beside = ["-wal", "-shm"].map(|suffix| with_suffix(&real, suffix));
            let beside = beside.into_iter().filter_map(|path| Some((identity(&path).ok()?, path)));
            let mut watched: Vec<_> = beside.map(|(identity, path)| (path, identity)).collect();
            watched.insert(0, (file.clone(), before));
            let anchor = Self { file: file.clone(), watched, held: Mutex::new(Held { conn, copy: None }) };
            if anchor.change().is_none() {
                return Ok(Some(anchor));
            }
        }
        Err(Error::retryable(Code::LOCKED, format!("{} is being replaced", file.display())))
    }

    /// Which of the files is another one now, or gone. One that cannot be looked at has not changed.
    pub(crate) fn change(&self) -> Option<String> {
        self.watched.iter().find_map(|(path, was)| {
            let what = match identity(path) {
                Ok(is) if is == *was => return None,
                // SQLite creates a removed log again when the next connection opens the file.
                Ok(_) if *path != self.file => "removed",
                Ok(_) => "replaced",
                Err(error) if is_gone(&error) => "removed",
                Err(_) => return None,
            };
            Some(format!("{} was {what} while it was open", path.display()))
        })
    }

    /// Fails if a file has changed, with what it held kept in a copy.
    pub(crate) async fn check(&self) -> Result<()> {
        let Some(change) = self.change() else { return Ok(()) };
        let mut held = self.held.lock().await;
        if held.copy.is_none() {
            match self.keep(&mut held.conn).await {
                Ok(copy) => held.copy = Some(copy),
                Err(error) => {
                    return Err(Error::retryable(
                        Code::FILE_REPLACED,
                        format!(
                            "{change}. Its contents exist only in processes that still have it open, and cannot be copied: {error}"
                        ),
                    )
                    .with_remedy(format!(
                        "do not stop this process; make room in {}, and the copy is tried again",
                        self.directory().display()
                    )));
                }
            }
        }
        let copy = held.copy.as_deref().unwrap_or(&self.file).display();
        Err(Error::permanent(
            Code::FILE_REPLACED,
            format!(
                "{change}, so events that are published now would not be read here. All of its contents, including \
                 events that wait, are in {copy}"
            ),
        )
        .with_remedy(format!(
            "end all processes that have the old file open; run the same command once with its database given as --from sqlite:{copy} \
             and with --drain, which delivers what waits in the copy; then start again as before"
        )))
    }

    /// Copies what the open file holds, its write-ahead log included, to where it was. Not to where temporary files are:
    /// those of a service may be gone when it stops.
    async fn keep(&self, conn: &mut SqliteConnection) -> Result<PathBuf> {
        let io = |error: io::Error| Error::retryable(Code::IO, error.to_string());
        let directory = self.directory();
        std::fs::create_dir_all(directory).map_err(io)?;
        let name = self.file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let copy = directory.join(format!("{name}.kept-{}", uuid::Uuid::now_v7().simple()));
        // Whoever finds a name without this ending finds all of it.
        let partial = with_suffix(&copy, ".partial");
        let text = partial.to_string_lossy().into_owned();
        let copied = sqlx::query("VACUUM INTO ?1").bind(text).execute(conn).await.map_err(db);
        let kept = copied.and_then(|_| {
            std::fs::File::open(&partial).and_then(|file| file.sync_all()).map_err(io)?;
            std::fs::rename(&partial, &copy).map_err(io)
        });
        if kept.is_err() {
            // Half of a copy is of no use to anybody, and takes the room that the next one needs.
            let _ = std::fs::remove_file(&partial);
        }
        kept.map(|()| copy)
    }

    fn directory(&self) -> &Path {
        self.file.parent().unwrap_or(Path::new("/"))
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(unix)]
fn identity(path: &Path) -> io::Result<Identity> {
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::metadata(path)?;
    Ok(Identity { device: metadata.dev(), inode: metadata.ino() })
}

/// Elsewhere an open file can be neither removed nor replaced.
#[cfg(not(unix))]
fn identity(path: &Path) -> io::Result<Identity> {
    std::fs::metadata(path).map(|_| Identity { device: 0, inode: 0 })
}
