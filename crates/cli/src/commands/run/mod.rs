//! `airtight run`: runs the pipelines of a config, or the pipeline of the command line, until a signal stops it.

mod plan;
mod report;
mod retention;
mod stdout;

use std::{
    io::{self, IsTerminal},
    sync::Arc,
    time::{Duration, Instant},
};

use airtight::{Backoff, Class, Relay, Relays, Sink, relay::Stats, relays::Ended, sinks};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::{plan::Plan, report::Report};
use crate::{
    args::{LogArgs, LogFormat, RunArgs},
    config::{Reading, urls::SinkTarget},
    errors::{self, Failure, Outcome},
    progress, signals,
    wiring::{self, Store, Target},
};

/// The waits between attempts to reach a database that is unavailable.
const CONNECT: Backoff =
    Backoff { base: Duration::from_millis(200), multiplier: 2.0, cap: Duration::from_secs(10), jitter: 0.2 };

pub(crate) async fn run(args: &RunArgs, log: &LogArgs) -> Outcome {
    let plan = Plan::new(args)?;
    // Before anything connects: a bad header or secret is an error of the config.
    let mut sinks = Vec::with_capacity(plan.pipelines.len());
    for pipeline in &plan.pipelines {
        let sink = wiring::sink(&pipeline.sink)
            .map_err(|error| Failure::usage(format!("pipeline `{}`: {error}", pipeline.name)))?;
        sinks.push(sink);
    }

    let shutdown = signals::shutdown(|| {});
    let start = Instant::now();
    let Some(store) = connect(&plan.target, &shutdown).await? else { return interrupted(args) };
    refuse_misread(&plan, &store)?;
    let store = Arc::new(store);

    // Ends with the last pipeline.
    let old = CancellationToken::new();
    if !args.drain {
        retention::announce(&store, &plan.target, &plan.pipelines, &plan.retention);
        let round = retention::keep(store.clone(), plan.pipelines.clone(), plan.retention, old.clone());
        tokio::spawn(round);
    }
    stdout::warn_of_nowhere(plan.writes_to_stdout());
    // Events and a progress bar on the same terminal would overwrite each other.
    let stdout_drawn = plan.writes_to_stdout() && io::stdout().is_terminal();
    let drawn = log.log_format == LogFormat::Human && io::stderr().is_terminal() && !stdout_drawn;
    let mut bars = Bars::new(&store, drawn);
    let ended = relay_all(&plan, &mut bars, sinks, &shutdown, args.drain).await;
    old.cancel();
    bars.clear().await;
    let ended = ended?;
    let failure = failure(&ended);
    let report = Report::new(ended, start.elapsed());
    if args.drain {
        report.print(args.json, plan.writes_to_stdout())?;
    } else {
        tracing::info!(delivered = report.total.delivered, dead = report.total.dead, "stopped");
    }
    match failure {
        Some(failure) => Err(failure),
        None if shutdown.is_cancelled() => interrupted(args),
        None => Ok(()),
    }
}

/// Refuses to read a log as a queue: an error of the command line or the config. The store refuses the opposite case.
fn refuse_misread(plan: &Plan, store: &Store) -> Outcome {
    for pipeline in &plan.pipelines {
        if matches!(pipeline.read, Reading::Queue(_)) && store.is_log() {
            return Err(Failure::failed(format!(
                "pipeline `{}`: the outbox is a log; follow it with `--read log --consumer NAME`, or with \
                 `read = \"log\"` in the config (or through the WAL: `cdc`)",
                pipeline.name
            )));
        }
    }
    Ok(())
}

/// A progress bar for each consumer that has to catch up.
struct Bars {
    store: Arc<Store>,
    drawn: bool,
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Bars {
    fn new(store: &Arc<Store>, drawn: bool) -> Self {
        Self { store: store.clone(), drawn, tasks: JoinSet::new(), stop: CancellationToken::new() }
    }

    fn add(&mut self, consumer: &str, stats: Arc<Stats>) {
        if !self.drawn {
            return;
        }
        let shown = progress::catch_up(self.store.clone(), consumer.to_owned(), stats);
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            stop.run_until_cancelled(shown).await;
        });
    }

    /// Removes the bars from the screen.
    async fn clear(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// The result after a signal: an interrupted drain has failed; a relay has not.
fn interrupted(args: &RunArgs) -> Outcome {
    if args.drain { Err(Failure::failed("interrupted before the backlog was empty")) } else { Ok(()) }
}

/// Runs every pipeline until the last one has ended. If one fails, the others continue, unless configured otherwise.
async fn relay_all(
    plan: &Plan,
    bars: &mut Bars,
    sinks: Vec<Arc<dyn Sink>>,
    shutdown: &CancellationToken,
    drain: bool,
) -> Outcome<Vec<Ended>> {
    let mut relays = Relays::new().on_end(plan.on_end).shutdown_on(shutdown);
    for (pipeline, sink) in plan.pipelines.iter().zip(sinks) {
        let options = pipeline.read.options();
        let streams = &options.streams;
        tracing::info!(
            pipeline = pipeline.name,
            from = %plan.target.url,
            to = %pipeline.sink,
            streams = if streams.is_empty() { "all".into() } else { streams.join(",") },
            read = pipeline.read.word(),
            order = options.order.as_str(),
            consumer = pipeline.read.consumer(),
            "relaying"
        );
        let source = bars.store.source(pipeline)?;
        let relay = Relay::from_parts(source, sink).policy(pipeline.policy.clone()).name(&pipeline.name);
        if let Some(consumer) = pipeline.read.consumer() {
            bars.add(consumer, relay.stats());
        }
        relays = relays.add_relay(relay);
    }
    let mut running = if drain { relays.spawn_drain() } else { relays.spawn() };
    let reader_gone = stdout::reader_gone(plan.writes_to_stdout());
    tokio::pin!(reader_gone);
    let mut watched = true;
    let mut all = Vec::new();
    loop {
        tokio::select! {
            ended = running.next() => match ended {
                Some(ended) => all.push(ended),
                None => return Ok(all),
            },
            () = &mut reader_gone, if watched => {
                watched = false;
                let why = sinks::reader_gone(Class::Permanent);
                for pipeline in plan.pipelines.iter().filter(|one| one.sink == SinkTarget::Stdout) {
                    running.end(&pipeline.name, &why);
                }
            }
        }
    }
}

/// The error of the process: which pipelines failed and why, and which did not fail.
fn failure(all: &[Ended]) -> Option<Failure> {
    let mut failed: Vec<&Ended> = all.iter().filter(|ended| ended.is_failure()).collect();
    failed.sort_by(|one, other| one.name.cmp(&other.name));
    let why = |ended: &&Ended| {
        let error =
            ended.error.clone().map(errors::with_advice).map(|error| error.to_string()).unwrap_or_default();
        format!("pipeline `{}`: {error}", ended.name)
    };
    if failed.is_empty() {
        return None;
    }
    let mut message = failed.iter().map(why).collect::<Vec<_>>().join("; ");
    let mut others: Vec<String> =
        all.iter().filter(|ended| !ended.is_failure()).map(|ended| format!("`{}`", ended.name)).collect();
    if !others.is_empty() {
        others.sort();
        message.push_str(&format!("; these pipelines did not fail: {}", others.join(", ")));
    }
    Some(Failure::failed(message))
}

/// Opens the store, and waits for a database that is unavailable. None if a signal comes first.
async fn connect(target: &Target, shutdown: &CancellationToken) -> Outcome<Option<Store>> {
    let mut failures = 0;
    loop {
        let opened = tokio::select! {
            () = shutdown.cancelled() => return Ok(None),
            opened = target.open() => opened,
        };
        let error = match opened {
            Ok(store) => return Ok(Some(store)),
            Err(error) if error.class() == Class::Retryable => error,
            Err(error) => return Err(error.into()),
        };
        failures += 1;
        let wait = CONNECT.after(failures);
        tracing::warn!(code = error.code(), "{error}; trying again in {wait:.1?}");
        tokio::select! {
            () = shutdown.cancelled() => return Ok(None),
            () = tokio::time::sleep(wait) => {}
        }
    }
}
