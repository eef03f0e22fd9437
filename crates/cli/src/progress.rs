//! Progress bars on standard error, and log lines that do not run into them.

use std::{
    io::{self, Write},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use airtight::log::Consumer;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::wiring::Store;

/// Everything that is drawn; on a terminal only.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// How often to look how far a consumer has come, at most.
const LOOK: Duration = Duration::from_millis(500);

/// Looking takes at most one part in so many of the time.
const SHARE: u32 = 20;

/// Fewer events are not worth a bar: they are there before it is read.
const WORTH_IT: u64 = 1_000;

const STYLE: &str = "{msg} {wide_bar} {human_pos}/{human_len} events  {per_sec}  {eta} left";

/// Standard error for log lines: bars step aside for each.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Shows how far a consumer is from the end that it had when this began; gone once it is there, or when this is
/// dropped. What cannot be seen is not shown.
pub(crate) async fn catch_up(store: Arc<Store>, consumer: String) {
    let mut shown: Option<Shown> = None;
    loop {
        let asked = Instant::now();
        if let Some(now) = standing(&store, &consumer).await {
            let shown = shown.get_or_insert_with(|| Shown::new(&consumer, &now));
            if now.offset >= shown.end {
                return;
            }
            // A seek may have moved it to before where it began.
            shown.bar.set_position(u64::try_from(now.offset - shown.begin).unwrap_or(0));
        }
        tokio::time::sleep((asked.elapsed() * SHARE).max(LOOK)).await;
    }
}

/// None before it has attached for the first time, and while the database is away.
async fn standing(store: &Store, consumer: &str) -> Option<Consumer> {
    let all = store.log_admin().ok()?.consumers().await.ok()?;
    all.into_iter().find(|one| one.name == consumer)
}

struct Shown {
    bar: ProgressBar,
    begin: i64,
    end: i64,
}

impl Shown {
    fn new(consumer: &str, now: &Consumer) -> Self {
        let behind = now.end.saturating_sub(now.offset).unsigned_abs();
        let bar = if behind >= WORTH_IT { BARS.add(ProgressBar::new(behind)) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template(STYLE) {
            bar.set_style(style);
        }
        bar.set_message(consumer.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, begin: now.offset, end: now.end }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
