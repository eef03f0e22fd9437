//! `airtight run`: the pipelines of a config, or the one of the command line, until told to stop.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use airtight::{Backoff, Class, Order, Policy, Relay, Sink, queue::QueueOptions, relay::Summary};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    args::{OnDead, OrderArg, RunArgs},
    config::{
        Config, KEEP_DONE, Pipeline, read_source, set_batch, units,
        urls::{Secret, SinkTarget},
    },
    errors::{Failure, Outcome},
    output, signals,
    wiring::{self, Store, Target},
};

/// Between two rounds of removing old events; the first is soon after the start.
const PRUNE_FIRST: Duration = Duration::from_secs(60);
const PRUNE_EVERY: Duration = Duration::from_secs(3_600);

/// Waits between tries of a database that is away.
const CONNECT: Backoff =
    Backoff { base: Duration::from_millis(200), multiplier: 2.0, cap: Duration::from_secs(10), jitter: 0.2 };

pub(crate) async fn run(args: &RunArgs) -> Outcome {
    let plan = Plan::new(args)?;
    // Before anything connects: a bad header or secret is a matter of the config.
    let mut sinks = Vec::with_capacity(plan.pipelines.len());
    for pipeline in &plan.pipelines {
        let sink = wiring::sink(&pipeline.sink)
            .map_err(|error| Failure::usage(format!("pipeline `{}`: {error}", pipeline.name)))?;
        sinks.push(sink);
    }

    let shutdown = signals::shutdown(|| {});
    let start = Instant::now();
    let Some(store) = connect(&plan.target, &shutdown).await? else { return interrupted(args) };
    let store = Arc::new(store);

    // Ends with the signal, and when a pipeline cannot go on.
    let stop = shutdown.child_token();
    if let Some(keep) = plan.keep_done.filter(|_| !args.drain) {
        tokio::spawn(keep_pruned(store.clone(), keep, stop.clone()));
    }
    let summaries = relay_all(&plan, &store, sinks, &stop, args.drain).await?;
    let report = Report::new(summaries, start.elapsed());
    if args.drain {
        report.print(args.json, plan.writes_to_stdout())?;
        if shutdown.is_cancelled() {
            return interrupted(args);
        }
    } else {
        tracing::info!(delivered = report.total.delivered, dead = report.total.dead, "stopped");
    }
    Ok(())
}

/// A drain that was told to stop has not done what it was asked; a relay has.
fn interrupted(args: &RunArgs) -> Outcome {
    if args.drain { Err(Failure::failed("interrupted before the backlog was empty")) } else { Ok(()) }
}

/// Runs every pipeline; the first that fails stops the others, which finish what they have under way.
async fn relay_all(
    plan: &Plan,
    store: &Store,
    sinks: Vec<Arc<dyn Sink>>,
    stop: &CancellationToken,
    drain: bool,
) -> Outcome<Vec<(String, Summary)>> {
    let mut relays = JoinSet::new();
    for (pipeline, sink) in plan.pipelines.iter().zip(sinks) {
        let streams = &pipeline.queue.streams;
        tracing::info!(
            pipeline = pipeline.name,
            from = %plan.target.url,
            to = %pipeline.sink,
            streams = if streams.is_empty() { "all".into() } else { streams.join(",") },
            order = pipeline.queue.order.as_str(),
            "relaying"
        );
        let relay = Relay::from_parts(store.source(pipeline.queue.clone()), sink)
            .policy(pipeline.policy.clone())
            .name(&pipeline.name);
        let (name, stop) = (pipeline.name.clone(), stop.clone());
        relays.spawn(async move {
            let summary = if drain { relay.drain(stop).await } else { relay.run(stop).await };
            (name, summary)
        });
    }
    let mut summaries = Vec::new();
    let mut failure = None;
    while let Some(ended) = relays.join_next().await {
        match ended {
            Ok((name, Ok(summary))) => summaries.push((name, summary)),
            Ok((name, Err(error))) => {
                stop.cancel();
                tracing::debug!(pipeline = name, code = error.code(), "the pipeline cannot go on");
                failure.get_or_insert(Failure::from(error).context(format!("pipeline `{name}`")));
            }
            Err(error) => {
                stop.cancel();
                failure.get_or_insert(Failure::failed(format!("a pipeline crashed: {error}")));
            }
        }
    }
    match failure {
        Some(failure) => Err(failure),
        None => Ok(summaries),
    }
}

/// Opens the store, waiting for a database that is away. None when told to stop first.
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

async fn keep_pruned(store: Arc<Store>, keep: Duration, stop: CancellationToken) {
    let mut wait = PRUNE_FIRST;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
        wait = PRUNE_EVERY;
        match store.admin().prune(keep, &|_| {}).await {
            Ok(0) => {}
            Ok(events) => tracing::info!(events, "removed old delivered events"),
            Err(error) => tracing::warn!(%error, "could not remove old events; trying again in an hour"),
        }
    }
}

/// What to run.
struct Plan {
    target: Target,
    pipelines: Vec<Pipeline>,
    keep_done: Option<Duration>,
}

impl Plan {
    fn new(args: &RunArgs) -> Outcome<Self> {
        let config = args.database.config.as_deref().map(Config::load).transpose()?;
        let mut database = args.database.clone();
        database.url = args.from.clone().or(database.url);
        let target = Target::resolve(&database, config.as_ref())?;
        let (mut pipelines, keep_done) = match (config, &args.to) {
            (Some(config), _) => (config.pipelines, config.keep_done),
            (None, Some(to)) => (vec![from_args(args, to)?], keep_done(args.keep_done.as_deref())?),
            (None, None) => {
                return Err(Failure::usage("nothing to run; give -c FILE, or --from URL and --to URL"));
            }
        };
        if pipelines.is_empty() {
            return Err(Failure::usage(
                "the config has no pipeline; add [pipelines.NAME] with `to = \"URL\"`",
            ));
        }
        if let Some(secret) = &args.webhook_secret {
            for pipeline in &mut pipelines {
                if let SinkTarget::Webhook(webhook) = &mut pipeline.sink {
                    webhook.secret.get_or_insert_with(|| Secret::new(secret));
                }
            }
        }
        Ok(Self { target, pipelines, keep_done })
    }

    fn writes_to_stdout(&self) -> bool {
        self.pipelines.iter().any(|pipeline| pipeline.sink == SinkTarget::Stdout)
    }
}

fn keep_done(text: Option<&str>) -> Outcome<Option<Duration>> {
    match text {
        None => Ok(Some(KEEP_DONE)),
        Some("forever") => Ok(None),
        Some(text) => units::duration(text)
            .map(Some)
            .map_err(|message| Failure::usage(format!("--keep-done: {message}, or `forever`"))),
    }
}

fn from_args(args: &RunArgs, to: &str) -> Outcome<Pipeline> {
    read_source(&args.read).map_err(|message| Failure::usage(format!("--read: {message}")))?;
    let sink = SinkTarget::parse(to).map_err(|message| Failure::usage(format!("--to: {message}")))?;
    let order = match args.order {
        Some(OrderArg::None) => Order::None,
        Some(OrderArg::Total) => Order::Total,
        Some(OrderArg::Key) | None => Order::Key,
    };
    let block_on_dead = args.on_dead == Some(OnDead::Block);
    let mut queue =
        QueueOptions { streams: args.streams.clone(), order, block_on_dead, ..QueueOptions::default() };
    let mut policy = Policy { order, block_on_dead, ..Policy::default() };
    if let Some(seconds) = args.lease {
        queue.lease = Duration::from_secs(seconds);
    }
    if let Some(attempts) = args.max_attempts {
        policy.max_attempts = attempts;
    }
    if let Some(batch) = args.batch {
        set_batch(&mut policy, batch as usize);
    }
    if let Some(poll) = args.poll {
        policy.poll = Duration::from_millis(poll);
    }
    Ok(Pipeline { name: "default".into(), queue, policy, sink })
}

/// What a drain did.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    total: Counts,
    seconds: f64,
    events_per_second: f64,
    pipelines: Vec<PipelineReport>,
}

#[derive(Serialize)]
struct PipelineReport {
    name: String,
    #[serde(flatten)]
    counts: Counts,
}

#[derive(Clone, Copy, Default, Serialize)]
struct Counts {
    delivered: u64,
    retried: u64,
    dead: u64,
    unknown: u64,
    released: u64,
    fenced: u64,
    circuit_opened: u64,
}

impl Counts {
    fn add(&mut self, summary: &Summary) {
        self.delivered += summary.delivered;
        self.retried += summary.retried;
        self.dead += summary.dead;
        self.unknown += summary.unknown;
        self.released += summary.released;
        self.fenced += summary.fenced;
        self.circuit_opened += summary.circuit_opened;
    }
}

impl Report {
    fn new(mut summaries: Vec<(String, Summary)>, elapsed: Duration) -> Self {
        summaries.sort_by(|one, other| one.0.cmp(&other.0));
        let mut total = Counts::default();
        let mut pipelines = Vec::new();
        for (name, summary) in summaries {
            total.add(&summary);
            let mut counts = Counts::default();
            counts.add(&summary);
            pipelines.push(PipelineReport { name, counts });
        }
        let events_per_second = output::rate(total.delivered, elapsed);
        Self { total, seconds: elapsed.as_secs_f64(), events_per_second, pipelines }
    }

    /// On standard output, unless events go there.
    fn print(&self, json: bool, stdout_taken: bool) -> Outcome {
        let text = if json { serde_json::to_string(self)? } else { self.sentence() };
        if stdout_taken {
            eprintln!("{text}");
            return Ok(());
        }
        output::line(text)
    }

    fn sentence(&self) -> String {
        let mut text = format!(
            "delivered {} in {:.1} s, {:.0} a second",
            output::counted(self.total.delivered, "event"),
            self.seconds,
            self.events_per_second
        );
        let rest = [
            (self.total.retried, "retried"),
            (self.total.dead, "dead"),
            (self.total.unknown, "of unknown outcome"),
            (self.total.fenced, "taken over by another relay"),
        ];
        for (number, what) in rest.into_iter().filter(|(number, _)| *number > 0) {
            text.push_str(&format!("; {} {what}", output::count(number)));
        }
        if self.total.dead + self.total.unknown > 0 {
            text.push_str("; see `airtight dead list`");
        }
        text
    }
}
