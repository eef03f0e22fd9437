//! `airtight check`: the config, the database, its tables, streams that nobody reads, sinks that do not answer, and
//! what would be sent to those that do.

mod sinks;

use airtight::admin::{Finding, Status};
use serde_json::{Value, json};

use self::sinks::{Destination, Sample};
use crate::{
    args::CheckArgs,
    config::{Config, Pipeline, Reading, urls::SinkTarget},
    errors::{Failure, Outcome, advice},
    output,
    wiring::{self, Store, Target},
};

/// What was seen.
#[derive(Default)]
struct Seen {
    passed: Vec<String>,
    findings: Vec<Finding>,
    samples: Vec<Sample>,
}

pub(crate) async fn run(args: &CheckArgs) -> Outcome {
    let config = args.database.config.as_deref().map(Config::load).transpose()?;
    let destinations = destinations(args, config.as_ref())?;
    let mut seen = Seen::default();
    if let (Some(config), Some(path)) = (&config, &args.database.config) {
        let pipelines = output::counted(config.pipelines.len() as u64, "pipeline");
        seen.passed.push(format!("config {} is valid: {pipelines}", path.display()));
    }
    seen.findings.extend(cannot_run(args, config.as_ref()));
    let mut store = None;
    if !args.offline {
        let mut target = Target::resolve(&args.database, config.as_ref())?;
        if config.iter().flat_map(|config| &config.pipelines).any(|one| one.read.consumer().is_some()) {
            target.expect_log();
        }
        store = look(&target, config.as_ref(), &mut seen).await;
    }
    for destination in &destinations {
        if !args.offline {
            match destination.reach().await {
                Some(Ok(passed)) => seen.passed.push(passed),
                Some(Err(finding)) => seen.findings.push(finding),
                None => {}
            }
        }
        match destination.sample(store.as_ref()).await {
            Some(Ok(sample)) => seen.samples.push(sample),
            Some(Err(finding)) => seen.findings.push(finding),
            None => {}
        }
    }
    let ok = !seen.findings.iter().any(|finding| finding.fatal);
    report(args, ok, &seen)?;
    if ok { Ok(()) } else { Err(Failure::Reported) }
}

/// What keeps the config from being run, whatever the database says.
fn cannot_run(args: &CheckArgs, config: Option<&Config>) -> Vec<Finding> {
    let fatal = |message: String| Finding { fatal: true, message };
    let Some(config) = config else { return Vec::new() };
    if config.pipelines.is_empty() {
        return vec![fatal(
            "the config has no pipeline, so `airtight run` would refuse it; add [pipelines.NAME] with \
                           `to = \"URL\"`"
                .into(),
        )];
    }
    // Offline it may be left open where the database is.
    let Ok(target) = Target::resolve(&args.database, Some(config)) else { return Vec::new() };
    let follows = |pipeline: &&Pipeline| matches!(pipeline.read, Reading::Cdc(_)) && target.is_sqlite();
    let message = |pipeline: &Pipeline| format!("pipelines.{}.read: {}", pipeline.name, wiring::no_wal());
    config.pipelines.iter().filter(follows).map(|pipeline| fatal(message(pipeline))).collect()
}

/// The sinks of the config's pipelines, and the one of the command line. Making them checks their settings.
fn destinations(args: &CheckArgs, config: Option<&Config>) -> Outcome<Vec<Destination>> {
    let mut destinations = Vec::new();
    if let Some(to) = &args.to {
        let target = SinkTarget::parse(to).map_err(|message| Failure::usage(format!("--to: {message}")))?;
        destinations.push(Destination::new("--to", target, &[])?);
    }
    for pipeline in config.iter().flat_map(|config| &config.pipelines) {
        let name = format!("pipelines.{}.to", pipeline.name);
        destinations.push(Destination::new(&name, pipeline.sink.clone(), &pipeline.read.options().streams)?);
    }
    Ok(destinations)
}

/// The database and its tables; the store, if it can be used.
async fn look(target: &Target, config: Option<&Config>, seen: &mut Seen) -> Option<Store> {
    let fatal = |error| Finding { fatal: true, message: advice(&error) };
    let opened = async {
        let store = target.open().await?;
        let findings = store.admin().check().await?;
        Ok((store, findings))
    };
    let (store, findings) = match opened.await {
        Ok(opened) => opened,
        Err(error) => {
            seen.findings.push(fatal(error));
            return None;
        }
    };
    seen.passed.push(format!("database {} answers", target.url));
    let fits = !findings.iter().any(|finding| finding.fatal);
    seen.findings.extend(findings);
    if !fits {
        return None;
    }
    seen.passed.push("the tables fit".to_owned());
    let pipelines = config.map(|config| config.pipelines.as_slice()).unwrap_or_default();
    seen.findings.extend(misread(&store, target, pipelines));
    for pipeline in pipelines {
        if let (Reading::Cdc(cdc), false) = (&pipeline.read, target.is_sqlite()) {
            match store.check_cdc(&pipeline.name, cdc).await {
                Ok(findings) => {
                    if !findings.iter().any(|finding| finding.fatal) {
                        seen.passed.push(format!("pipelines.{}: the WAL can be followed", pipeline.name));
                    }
                    seen.findings.extend(findings);
                }
                Err(error) => seen.findings.push(fatal(error)),
            }
        }
    }
    match store.admin().status().await {
        Ok(status) => seen.findings.extend(unread(&status, pipelines)),
        Err(error) => seen.findings.push(fatal(error)),
    }
    Some(store)
}

/// Pipelines that read the outbox as what it is not.
fn misread(store: &Store, target: &Target, pipelines: &[Pipeline]) -> Vec<Finding> {
    let wrong = |pipeline: &&Pipeline| match pipeline.read {
        Reading::Queue(_) => store.is_log(),
        // An application's own table may be both.
        Reading::Log(_) => !store.is_log() && target.database.spec.is_none(),
        Reading::Cdc(_) => false,
    };
    let (is, mend) = match store.is_log() {
        true => ("a log", "write `read = \"log\"`"),
        false => (
            "a queue",
            "write `read = \"queue\"`, or make a log with `airtight migrate --shape log --table NAME`",
        ),
    };
    let message = |pipeline: &Pipeline| format!("pipelines.{}: the outbox is {is}; {mend}", pipeline.name);
    pipelines
        .iter()
        .filter(wrong)
        .map(|pipeline| Finding { fatal: true, message: message(pipeline) })
        .collect()
}

/// Streams with events that no pipeline of the config reads. Whether a running relay does, the store says.
fn unread(status: &Status, pipelines: &[Pipeline]) -> Vec<Finding> {
    let is_read = |stream: &String| {
        let mut readers = pipelines.iter().map(|pipeline| &pipeline.read.options().streams);
        pipelines.is_empty() || readers.any(|names| names.is_empty() || names.contains(stream))
    };
    status
        .streams
        .iter()
        .filter(|stream| stream.pending + stream.retrying > 0 && !is_read(&stream.stream))
        .map(|stream| Finding {
            fatal: false,
            message: format!(
                "no pipeline of the config reads stream `{}`, where {} waiting",
                stream.stream,
                match stream.pending + stream.retrying {
                    1 => "1 event is".to_owned(),
                    events => format!("{} events are", output::count(events)),
                }
            ),
        })
        .collect()
}

fn report(args: &CheckArgs, ok: bool, seen: &Seen) -> Outcome {
    let Seen { passed, findings, samples } = seen;
    if args.output.json {
        let samples: Vec<Value> = samples.iter().map(Sample::json).collect();
        return output::json(&json!({"ok": ok, "passed": passed, "findings": findings, "samples": samples}));
    }
    for line in passed {
        output::line(format!("ok    {line}"))?;
    }
    for finding in findings {
        let word = if finding.fatal { "fatal" } else { "note " };
        output::line(format!("{word} {}", finding.message))?;
    }
    samples.iter().try_for_each(Sample::print)
}
