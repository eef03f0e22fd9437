//! Progress bars on standard error, and log lines that do not overwrite them.

use std::{
    fmt,
    io::{self, Write},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use airtight::{log::Consumer, relay::Stats};
use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};

use crate::wiring::Store;

/// All progress bars; drawn only on a terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// The shortest time between two queries of a consumer's offset.
const LOOK: Duration = Duration::from_millis(300);

/// How often the bar moves between two queries.
const MOVE: Duration = Duration::from_millis(100);

/// Queries take at most one part in this many of the time.
const SHARE: u32 = 20;

/// Fewer events get no bar: they are delivered before anyone could read it.
const WORTH_IT: u64 = 1_000;

const STYLE: &str = "{msg} {wide_bar} {human_pos}/{human_len} events  {rate}  {eta} left";

/// Standard error for log lines: the bars are hidden while a line is written.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Shows how far a consumer is from the end that the log had when this began. The bar disappears when the consumer
/// reaches that end, or when this future is dropped. Nothing is shown while the offset cannot be read.
///
/// A query costs the database something, so the relay's own counters move the bar between two queries. These counters
/// do not include other instances, streams that are skipped, or holes; the next query corrects the bar.
pub(crate) async fn catch_up(store: Arc<Store>, consumer: String, stats: Arc<Stats>) {
    let mut shown: Option<Shown> = None;
    loop {
        let asked = Instant::now();
        let settled = settled(&stats);
        if let Some(now) = standing(&store, &consumer).await {
            let shown = shown.get_or_insert_with(|| Shown::new(&consumer, &now));
            if now.offset >= shown.end {
                return;
            }
            // A seek may have moved it to before where it began.
            shown.base = (u64::try_from(now.offset - shown.begin).unwrap_or(0), settled);
        }
        let look_at = asked + (asked.elapsed() * SHARE).max(LOOK);
        while Instant::now() < look_at {
            let at_end = shown.as_ref().is_some_and(|shown| shown.advance(&stats));
            if at_end && asked.elapsed() >= LOOK {
                break;
            }
            tokio::time::sleep(MOVE).await;
        }
    }
}

/// How many events the relay has settled.
fn settled(stats: &Stats) -> u64 {
    let done = stats.summary();
    done.delivered + done.dead + done.unknown
}

/// The consumer. None before it has attached for the first time, and while the database is unavailable.
async fn standing(store: &Store, consumer: &str) -> Option<Consumer> {
    let all = store.log_admin().consumers().await.ok()?;
    all.into_iter().find(|one| one.name == consumer)
}

struct Shown {
    bar: ProgressBar,
    begin: i64,
    end: i64,
    /// The bar's position at the last query, and how many events the relay had settled by then.
    base: (u64, u64),
}

impl Shown {
    fn new(consumer: &str, now: &Consumer) -> Self {
        let behind = now.end.saturating_sub(now.offset).unsigned_abs();
        let bar = if behind >= WORTH_IT { BARS.add(ProgressBar::new(behind)) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template(STYLE) {
            bar.set_style(style.with_key("rate", rate));
        }
        bar.set_message(consumer.to_owned());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, begin: now.offset, end: now.end, base: (0, 0) }
    }

    /// Moves the bar by what the relay has settled since the last query. Returns whether it seems to be at the end.
    fn advance(&self, stats: &Stats) -> bool {
        let (position, before) = self.base;
        let position = position + settled(stats).saturating_sub(before);
        let length = self.bar.length().unwrap_or(0);
        self.bar.set_position(position.min(length));
        position >= length
    }
}

/// Events per second, as a whole number.
fn rate(state: &ProgressState, out: &mut dyn fmt::Write) {
    // Nothing is drawn where this cannot be written.
    let _ = write!(out, "{:.0}/s", state.per_sec());
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
