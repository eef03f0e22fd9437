//! `airtight check`: checks the config, the database and its tables, finds streams that no pipeline reads and sinks that
//! do not answer, and shows what the sinks would receive.

mod sinks;

use airtight::admin::{Finding, Status};
use serde_json::{Value, json};

use self::sinks::{Destination, Sample};
use crate::{
    args::CheckArgs,
    config::{Config, Pipeline, Reading, urls::SinkTarget},
    errors::{Failure, Outcome, with_advice},
    output,
    wiring::{self, Store, Target},
};

/// What the checks found.
#[derive(Default)]
struct CheckResults {
    passed: Vec<String>,
    findings: Vec<Finding>,
    samples: Vec<Sample>,
}

pub(crate) async fn run(args: &CheckArgs) -> Outcome {
    let config = args.database.config.as_deref().map(Config::load).transpose()?;
    let destinations = destinations(args, config.as_ref())?;
    let mut results = CheckResults::default();
    if let (Some(config), Some(path)) = (&config, &args.database.config) {
        let pipelines = output::counted(config.pipelines.len() as u64, "pipeline");
        results.passed.push(format!("config {} is valid: {pipelines}", path.display()));
    }
    results.findings.extend(cannot_run(args, config.as_ref()));
    let mut store = None;
    if !args.offline {
        let mut target = Target::resolve(&args.database, config.as_ref())?;
        if config.iter().flat_map(|config| &config.pipelines).any(|one| one.read.consumer().is_some()) {
            target.expect_log();
        }
        store = look(&target, config.as_ref(), &mut results).await;
    }
    for destination in &destinations {
        if !args.offline {
            match destination.reach().await {
                Some(Ok(passed)) => results.passed.push(passed),
                Some(Err(finding)) => results.findings.push(finding),
                None => {}
            }
        }
        match destination.sample(store.as_ref()).await {
            Some(Ok(sample)) => results.samples.push(sample),
            Some(Err(finding)) => results.findings.push(finding),
            None => {}
        }
    }
    let ok = !results.findings.iter().any(|finding| finding.fatal);
    report(args, ok, &results)?;
    if ok { Ok(()) } else { Err(Failure::Reported) }
}

/// The problems that prevent a run of the config, independent of the database.
fn cannot_run(args: &CheckArgs, config: Option<&Config>) -> Vec<Finding> {
    let Some(config) = config else { return Vec::new() };
    if config.pipelines.is_empty() {
        let finding = Finding::fatal("the config has no pipeline, so `airtight run` refuses it");
        return vec![finding.with_remedy("add [pipelines.NAME] with `to = \"URL\"`")];
    }
    // With --offline, the config need not name a database.
    let Ok(target) = Target::resolve(&args.database, Some(config)) else { return Vec::new() };
    let follows = |pipeline: &&Pipeline| matches!(pipeline.read, Reading::Cdc(_)) && target.is_sqlite();
    let message = |pipeline: &Pipeline| format!("pipelines.{}.read: {}", pipeline.name, wiring::no_wal());
    config.pipelines.iter().filter(follows).map(|pipeline| Finding::fatal(message(pipeline))).collect()
}

/// The sinks of the config's pipelines, and the sink of the command line. Making them checks their settings.
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

/// Checks the database and its tables. Returns the store if it can be used.
async fn look(target: &Target, config: Option<&Config>, results: &mut CheckResults) -> Option<Store> {
    let fatal = |error| Finding::from(with_advice(error));
    let opened = async {
        let store = target.open().await?;
        let findings = store.admin().check().await?;
        Ok((store, findings))
    };
    let (store, findings) = match opened.await {
        Ok(opened) => opened,
        Err(error) => {
            results.findings.push(fatal(error));
            return None;
        }
    };
    results.passed.push(format!("database {} answers", target.url));
    let fits = !findings.iter().any(|finding| finding.fatal);
    results.findings.extend(findings);
    if !fits {
        return None;
    }
    results.passed.push("the tables are valid".to_owned());
    let pipelines = config.map(|config| config.pipelines.as_slice()).unwrap_or_default();
    results.findings.extend(misread(&store, target, pipelines));
    for pipeline in pipelines {
        if let (Reading::Cdc(cdc), false) = (&pipeline.read, target.is_sqlite()) {
            match store.check_cdc(&pipeline.name, cdc).await {
                Ok(findings) => {
                    if !findings.iter().any(|finding| finding.fatal) {
                        results.passed.push(format!("pipelines.{}: the WAL can be followed", pipeline.name));
                    }
                    results.findings.extend(findings);
                }
                Err(error) => results.findings.push(fatal(error)),
            }
        }
    }
    match store.admin().status().await {
        Ok(status) => results.findings.extend(unread(&status, pipelines)),
        Err(error) => results.findings.push(fatal(error)),
    }
    Some(store)
}

/// Pipelines whose `read` does not fit the shape of the outbox.
fn misread(store: &Store, target: &Target, pipelines: &[Pipeline]) -> Vec<Finding> {
    let wrong = |pipeline: &&Pipeline| match pipeline.read {
        Reading::Queue(_) => store.is_log(),
        // An application's own table may be both.
        Reading::Log(_) => !store.is_log() && target.database.spec.is_none(),
        Reading::Cdc(_) => false,
    };
    let (is, fix) = match store.is_log() {
        true => ("a log", "write `read = \"log\"`"),
        false => (
            "a queue",
            "write `read = \"queue\"`, or create a log with `airtight migrate --shape log --table NAME`",
        ),
    };
    let finding = |pipeline: &Pipeline| {
        Finding::fatal(format!("pipelines.{}: the outbox is {is}", pipeline.name)).with_remedy(fix)
    };
    pipelines.iter().filter(wrong).map(finding).collect()
}

/// Streams with waiting events that no pipeline of the config reads. The store's own check covers running relays.
fn unread(status: &Status, pipelines: &[Pipeline]) -> Vec<Finding> {
    let is_read = |stream: &String| {
        let mut readers = pipelines.iter().map(|pipeline| &pipeline.read.options().streams);
        pipelines.is_empty() || readers.any(|names| names.is_empty() || names.contains(stream))
    };
    status
        .streams
        .iter()
        .filter(|stream| stream.pending + stream.retrying > 0 && !is_read(&stream.stream))
        .map(|stream| {
            Finding::note(format!(
                "no pipeline of the config reads stream `{}`, where {} waiting",
                stream.stream,
                match stream.pending + stream.retrying {
                    1 => "1 event is".to_owned(),
                    events => format!("{} events are", output::count(events)),
                }
            ))
        })
        .collect()
}

fn report(args: &CheckArgs, ok: bool, results: &CheckResults) -> Outcome {
    let CheckResults { passed, findings, samples } = results;
    if args.output.json {
        let samples: Vec<Value> = samples.iter().map(Sample::json).collect();
        return output::json(&json!({"ok": ok, "passed": passed, "findings": findings, "samples": samples}));
    }
    for line in passed {
        output::line(format!("ok    {line}"))?;
    }
    for finding in findings {
        let word = if finding.fatal { "fatal" } else { "note " };
        output::line(format!("{word} {finding}"))?;
    }
    samples.iter().try_for_each(Sample::print)
}
