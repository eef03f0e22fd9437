//! `airtight check`: the config, the database, its tables, and streams that nobody reads.

use airtight::admin::{Finding, Status};
use serde_json::json;

use crate::{
    args::CheckArgs,
    config::{Config, Pipeline, Reading},
    errors::{Failure, Outcome, advice},
    output,
    wiring::{self, Store, Target},
};

pub(crate) async fn run(args: &CheckArgs) -> Outcome {
    let mut passed = Vec::new();
    let config = args.database.config.as_deref().map(Config::load).transpose()?;
    if let (Some(config), Some(path)) = (&config, &args.database.config) {
        for pipeline in &config.pipelines {
            wiring::sink(&pipeline.sink)
                .map_err(|error| Failure::usage(format!("pipelines.{}.to: {error}", pipeline.name)))?;
        }
        let pipelines = output::counted(config.pipelines.len() as u64, "pipeline");
        passed.push(format!("config {} is valid: {pipelines}", path.display()));
    }

    let mut findings = Vec::new();
    if !args.offline {
        let mut target = Target::resolve(&args.database, config.as_ref())?;
        if config.iter().flat_map(|config| &config.pipelines).any(|one| one.read.consumer().is_some()) {
            target.expect_log();
        }
        findings = look(&target, config.as_ref(), &mut passed).await;
    }
    let ok = !findings.iter().any(|finding| finding.fatal);
    report(args, ok, &passed, &findings)?;
    if ok { Ok(()) } else { Err(Failure::Reported) }
}

async fn look(target: &Target, config: Option<&Config>, passed: &mut Vec<String>) -> Vec<Finding> {
    let fatal = |error| vec![Finding { fatal: true, message: advice(&error) }];
    let store = match target.open().await {
        Ok(store) => store,
        Err(error) => return fatal(error),
    };
    let mut findings = match store.admin().check().await {
        Ok(findings) => findings,
        Err(error) => return fatal(error),
    };
    passed.push(format!("database {} answers", target.url));
    if findings.iter().any(|finding| finding.fatal) {
        return findings;
    }
    passed.push("the tables fit".to_owned());
    let pipelines = config.map(|config| config.pipelines.as_slice()).unwrap_or_default();
    findings.extend(misread(&store, target, pipelines));
    match store.admin().status().await {
        Ok(status) => {
            findings.extend(unread(&status, pipelines));
        }
        Err(error) => findings.extend(fatal(error)),
    }
    findings
}

/// Pipelines that read the outbox as what it is not.
fn misread(store: &Store, target: &Target, pipelines: &[Pipeline]) -> Vec<Finding> {
    let wrong = |pipeline: &&Pipeline| match pipeline.read {
        Reading::Queue(_) => store.is_log(),
        // An application's own table may be both.
        Reading::Log(_) => !store.is_log() && target.database.spec.is_none(),
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
        let mut readers = pipelines.iter().map(|pipeline| pipeline.read.streams());
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

fn report(args: &CheckArgs, ok: bool, passed: &[String], findings: &[Finding]) -> Outcome {
    if args.output.json {
        return output::json(&json!({"ok": ok, "passed": passed, "findings": findings}));
    }
    for line in passed {
        output::line(format!("ok    {line}"))?;
    }
    for finding in findings {
        let word = if finding.fatal { "fatal" } else { "note " };
        output::line(format!("{word} {}", finding.message))?;
    }
    Ok(())
}
