//! `airtight demo`: a bank, a relay, a sink that fails, and an audit.
//!
//! | file | what it does |
//! | --- | --- |
//! | `bank` | writers that move money and publish in the same transaction, and roll some of it back |
//! | `sink` | fails before delivery, fails after delivery, is unavailable, is slow; remembers what arrived |
//! | `view` | the live view, or progress lines without a terminal |
//! | `audit` | compares what the database says was committed with what arrived |
//!
//! The seed decides every transfer, which transactions are rolled back, which events meet which fault, and after how many
//! arrivals the sink becomes unavailable. So the audit counts the same in every run that no deadline or signal ends. The
//! seed does not decide which writer is first, how events are grouped into batches, how often a call is slow, or how long
//! anything takes.
//!
//! Everything but the bank and the sink is what a real deployment uses: the same store, queue and relay.

mod audit;
mod bank;
mod sink;
mod view;

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use airtight::{Backoff, Policy, Relay, admin::Admin, queue::QueueOptions, relay::Stats};
use tokio_util::sync::CancellationToken;

use self::{
    audit::Audit,
    bank::{Bank, Goal},
    sink::FlakySink,
    view::View,
};
use crate::{
    args::DemoArgs,
    errors::{Failure, Outcome},
    output, signals, wiring,
};

/// The default number of committed events.
const EVENTS: u64 = 2_000;

/// How long the default demo lasts on a terminal, so that people can watch it.
const WATCH_SECONDS: u64 = 6;

/// If nothing arrives for this long, the backlog counts as stuck, and the audit reports what is missing.
const STUCK_AFTER: Duration = Duration::from_secs(60);

pub(crate) async fn run(args: &DemoArgs) -> Outcome {
    let directory = tempfile::Builder::new()
        .prefix("airtight-demo-")
        .tempdir()
        .map_err(|error| Failure::failed(format!("cannot create a temporary directory: {error}")))?;
    // The second Ctrl-C ends the process without running destructors.
    let leftover: PathBuf = directory.path().to_owned();
    let stop_writing = signals::shutdown(move || {
        let _ = std::fs::remove_dir_all(leftover);
    });

    let outbox = wiring::open_sqlite(&directory.path().join("bank.db")).await?;
    outbox.migrate().await?;
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
    let events = args.events.or_else(|| args.seconds.is_none().then_some(EVENTS));
    let live = !args.headless && io::stderr().is_terminal();
    let goal = Goal {
        events,
        deadline: args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds)),
        pause: if live { Goal::pause_for(events.unwrap_or(EVENTS), WATCH_SECONDS) } else { Duration::ZERO },
    };
    let bank = Arc::new(Bank::open(outbox, seed).await?);
    let sink = FlakySink::new(seed);
    let relays = Relays::default();
    let view = View::start(live, goal, bank.tally(), sink.clone(), relays.clone());

    let start = Instant::now();
    let outcome = write_and_relay(&bank, &sink, &relays, goal, &stop_writing).await;
    view.finish().await;
    outcome?;

    let elapsed = start.elapsed();
    let audit = Audit::compare(&bank, &sink.received(), sink.absences(), relays.total(), elapsed).await?;
    if args.output.json {
        output::json(&audit)?;
    } else {
        output::raw(audit.report(seed, live).as_bytes())?;
    }
    drop(directory);
    if audit.is_clean() { Ok(()) } else { Err(Failure::failed(audit.complaint())) }
}

/// Writes and relays at the same time, then lets a second relay deliver what the first has left.
async fn write_and_relay(
    bank: &Arc<Bank>,
    sink: &FlakySink,
    relays: &Relays,
    goal: Goal,
    stop_writing: &CancellationToken,
) -> Outcome {
    // The relay stops when the writers are done, and the writers stop when the relay fails.
    let stop_relay = CancellationToken::new();
    let stop_writing = stop_writing.child_token();
    let relay = async {
        let ended = relays.relay(bank, sink).run(stop_relay.clone()).await;
        if ended.is_err() {
            stop_writing.cancel();
        }
        ended
    };
    let write = async {
        let written = bank.write(goal, sink, &stop_writing).await;
        stop_relay.cancel();
        written
    };
    let (ended, written) = tokio::join!(relay, write);
    ended?;
    written?;

    sink.recover_soon();
    let stop = CancellationToken::new();
    let drain = relays.relay(bank, sink).drain(stop.clone());
    tokio::pin!(drain);
    loop {
        let before = sink.arrivals();
        tokio::select! {
            ended = &mut drain => return ended.map(|_| ()).map_err(Failure::from),
            () = tokio::time::sleep(STUCK_AFTER) => if sink.arrivals() == before {
                stop.cancel();
            },
        }
    }
}

/// The counters of every relay of this demo, one after the other.
#[derive(Clone, Default)]
struct Relays(Arc<Mutex<Vec<Arc<Stats>>>>);

impl Relays {
    fn relay(&self, bank: &Bank, sink: &FlakySink) -> Relay {
        // Short waits: people are watching.
        let backoff = Backoff {
            base: Duration::from_millis(20),
            multiplier: 2.0,
            cap: Duration::from_millis(500),
            jitter: 0.2,
        };
        let policy = Policy {
            // The sink fails often, and the demo is not about dead letters.
            max_attempts: 100,
            backoff,
            circuit: Backoff { base: Duration::from_millis(100), ..backoff },
            poll: Duration::from_millis(50),
            ..Policy::default()
        };
        let source = bank.outbox().queue(QueueOptions::default());
        let relay = Relay::new(source, sink.clone()).policy(policy).name("demo");
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(relay.stats());
        relay
    }

    fn total(&self) -> Totals {
        let mut totals = Totals::default();
        for stats in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let summary = stats.summary();
            totals.settled += summary.delivered;
            totals.retried += summary.retried;
            totals.dead += summary.dead;
            totals.in_flight = summary.in_flight_events;
            totals.circuit_open = stats.is_circuit_open();
        }
        totals
    }
}

/// Sums over the relays; momentary values are those of the last relay.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    settled: u64,
    retried: u64,
    dead: u64,
    in_flight: u64,
    circuit_open: bool,
}
