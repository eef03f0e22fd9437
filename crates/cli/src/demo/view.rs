//! The demo's progress: bars on a terminal, or one line per second without one.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{
    Relays,
    bank::{Goal, Tally},
    sink::FlakySink,
};
use crate::{
    errors::complain,
    output::{count, rate},
};

/// The view, as a task of its own.
pub(super) struct View {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl View {
    pub(super) fn start(live: bool, goal: Goal, tally: Arc<Tally>, sink: FlakySink, relays: Relays) -> Self {
        let stop = CancellationToken::new();
        let state = DemoState { goal, tally, sink, relays, start: Instant::now() };
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            if live {
                draw(&state, &stopped).await;
            } else {
                report(&state, &stopped).await;
            }
        });
        Self { stop, task }
    }

    /// Draws the final numbers and releases the terminal.
    pub(super) async fn finish(self) {
        self.stop.cancel();
        // A crash of the view does not affect the demo.
        let _ = self.task.await;
    }
}

/// What the view reads its numbers from.
struct DemoState {
    goal: Goal,
    tally: Arc<Tally>,
    sink: FlakySink,
    relays: Relays,
    start: Instant,
}

/// The numbers at one moment.
struct Moment {
    committed: u64,
    rolled_back: u64,
    delivered: u64,
    repeats: u64,
    rest: String,
}

impl DemoState {
    fn now(&self) -> Moment {
        let totals = self.relays.total();
        let delivered = self.sink.distinct();
        let circuit = if totals.circuit_open { "open" } else { "closed" };
        let rest = format!(
            "retried {} · in flight {} · circuit {circuit} · {:.0} events/s",
            count(totals.retried),
            count(totals.in_flight),
            rate(delivered, self.start.elapsed()),
        );
        Moment {
            committed: self.tally.committed.load(Ordering::Relaxed),
            rolled_back: self.tally.rolled_back.load(Ordering::Relaxed),
            delivered,
            repeats: self.sink.arrivals().saturating_sub(delivered),
            rest,
        }
    }
}

async fn draw(state: &DemoState, stop: &CancellationToken) {
    let bars = MultiProgress::new();
    // Overwrites lines in place instead of clearing them first, which flickers.
    bars.set_move_cursor(true);
    let bar = |name: &'static str| {
        let bar = bars.add(ProgressBar::new(0));
        if let Ok(style) = ProgressStyle::with_template("{prefix:<10} {wide_bar} {human_pos:>9}  {msg:<24}") {
            bar.set_style(style);
        }
        bar.set_prefix(name);
        bar
    };
    let (committed, delivered) = (bar("committed"), bar("delivered"));
    let rest = bars.add(ProgressBar::new(0));
    if let Ok(style) = ProgressStyle::with_template("{msg}") {
        rest.set_style(style);
    }
    loop {
        let moment = state.now();
        let whole = state.goal.events.unwrap_or(moment.committed).max(moment.committed);
        for (bar, position, note) in [
            (&committed, moment.committed, format!("{} rolled back", count(moment.rolled_back))),
            (&delivered, moment.delivered, format!("{} repeats", count(moment.repeats))),
        ] {
            bar.set_length(whole);
            bar.set_position(position);
            bar.set_message(note);
        }
        rest.set_message(moment.rest);
        if stop.is_cancelled() {
            break;
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(Duration::from_millis(100)) => {}
        }
    }
    for bar in [committed, delivered, rest] {
        bar.abandon();
    }
}

async fn report(state: &DemoState, stop: &CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
        let moment = state.now();
        complain(format_args!(
            "committed {} · rolled back {} · delivered {} · repeats {} · {}",
            count(moment.committed),
            count(moment.rolled_back),
            count(moment.delivered),
            count(moment.repeats),
            moment.rest
        ));
    }
}
