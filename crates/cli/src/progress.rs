//! Progress bars on standard error, and log lines that do not run into them.

use std::{
    fmt,
    io::{self, Write},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use airtight::{log::Consumer, relay::Stats};
use indicatif::{MultiProgress, ProgressBar, ProgressState, ProgressStyle};

use crate::wiring::Store;

/// Everything that is drawn; on a terminal only.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// How often to look how far a consumer has come, at most.
const LOOK: Duration = Duration::from_millis(300);

/// How often the bar moves in between.
const MOVE: Duration = Duration::from_millis(100);

/// Looking takes at most one part in so many of the time.
const SHARE: u32 = 20;

/// Fewer events are not worth a bar: they are there before it is read.
const WORTH_IT: u64 = 1_000;

const STYLE: &str = "{msg} {wide_bar} {human_pos}/{human_len} events  {rate}  {eta} left";

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
///
/// Looking costs the database something, so in between the relay's own counters move the bar: they know nothing of
/// other instances, of streams that are passed over, or of holes, which the next look makes up for.
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

/// How many events the relay has done with.
fn settled(stats: &Stats) -> u64 {
    let done = stats.summary();
    done.delivered + done.dead + done.unknown
}

/// None before it has attached for the first time, and while the database is away.
async fn standing(store: &Store, consumer: &str) -> Option<Consumer> {
    let all = store.log_admin().consumers().await.ok()?;
    all.into_iter().find(|one| one.name == consumer)
}

struct Shown {
    bar: ProgressBar,
    begin: i64,
    end: i64,
    /// How far it had come at the last look, and what the relay had done with by then.
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

    /// Moves the bar by what the relay has done since the last look; whether it seems to be at the end.
    fn advance(&self, stats: &Stats) -> bool {
        let (position, before) = self.base;
        let position = position + settled(stats).saturating_sub(before);
        let length = self.bar.length().unwrap_or(0);
        self.bar.set_position(position.min(length));
        position >= length
    }
}

/// Events a second, without the fractions.
fn rate(state: &ProgressState, out: &mut dyn fmt::Write) {
    // Nothing is drawn where this cannot be written.
    let _ = write!(out, "{:.0}/s", state.per_sec());
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
