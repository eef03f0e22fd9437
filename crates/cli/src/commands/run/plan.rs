//! The pipelines to run, from a config, from the command line or from a Debezium connector file.

use std::{path::Path, sync::Arc, time::Duration};

use airtight::{
    OnEnd, Order, Policy, ReadOptions,
    log::{LogOptions, OnFailure, Start},
    postgres::Snapshot,
};

use crate::{
    args::{OnDead, OnFailureArg, OnPipelineEnd, OrderArg, RunArgs, SnapshotArg, StartArg},
    config::{
        Config, Database, Pipeline, ReadWord, Reading, Retention, SetBy, check_slot, parse_keep, read_source,
        set_batch, unnamed_cdc,
        urls::{Secret, SinkTarget},
    },
    debezium,
    errors::{Failure, Outcome},
    wiring::Target,
};

pub(super) struct Plan {
    pub(super) target: Target,
    pub(super) pipelines: Vec<Pipeline>,
    pub(super) retention: Retention,
    /// What the other pipelines do when one ends by itself.
    pub(super) on_end: OnEnd,
}

impl Plan {
    pub(super) fn new(args: &RunArgs) -> Outcome<Self> {
        if let Some(file) = &args.debezium {
            return Self::of_connector(args, file);
        }
        let config = args.database.config.as_deref().map(Config::load).transpose()?;
        let mut database = args.database.clone();
        database.url = args.from.clone().or(database.url);
        let mut target = Target::resolve(&database, config.as_ref())?;
        let on_end = match args.on_pipeline_end {
            Some(OnPipelineEnd::Continue) => OnEnd::Continue,
            Some(OnPipelineEnd::Stop) => OnEnd::Stop,
            None => config.as_ref().map_or_else(OnEnd::default, |config| config.on_end),
        };
        let (mut pipelines, retention) = match (config, &args.to) {
            (Some(config), _) => (config.pipelines, config.retention),
            (None, Some(to)) => (vec![from_args(args, to)?], retention(args)?),
            (None, None) => {
                return Err(Failure::usage("nothing to run; pass -c FILE, or --from URL and --to URL"));
            }
        };
        if pipelines.is_empty() {
            return Err(Failure::usage(
                "the config has no pipeline; add [pipelines.NAME] with `to = \"URL\"`",
            ));
        }
        if pipelines.iter().any(|pipeline| pipeline.read.consumer().is_some()) {
            target.expect_log();
        }
        if let Some(secret) = &args.webhook_secret {
            for pipeline in &mut pipelines {
                if let SinkTarget::Webhook(webhook) = &mut pipeline.sink {
                    webhook.secret.get_or_insert_with(|| Secret::new(secret));
                }
            }
        }
        Ok(Self { target, pipelines, retention, on_end })
    }

    /// The pipeline of a Debezium connector file.
    fn of_connector(args: &RunArgs, file: &Path) -> Outcome<Self> {
        let mut read = debezium::read(file, args.worker.as_deref(), args.to.as_deref())?;
        if let Reading::Cdc(cdc) = &mut read.pipeline.read {
            cdc.log.on_failure = on_failure(args);
            cdc.log.read.block_on_dead = args.on_dead == Some(OnDead::Block);
            if let Some(lease) = args.lease {
                cdc.log.read.lease = Duration::from_secs(lease);
            }
        }
        read.pipeline.policy = policy(args);
        let database = Database { schema: args.database.schema.clone(), ..Database::default() };
        let target = Target { url: read.url, database, connector: Some(Arc::new(read.connector)) };
        // Debezium removes nothing.
        let retention = Retention { done: None, log: None, ..Retention::default() };
        Ok(Self { target, pipelines: vec![read.pipeline], retention, on_end: OnEnd::default() })
    }

    pub(super) fn writes_to_stdout(&self) -> bool {
        self.pipelines.iter().any(|pipeline| pipeline.sink == SinkTarget::Stdout)
    }
}

fn retention(args: &RunArgs) -> Outcome<Retention> {
    let mut retention = Retention::default();
    let given = [
        ("--keep-done", &args.keep_done, &mut retention.done, &mut retention.done_set_by),
        ("--keep-log", &args.follow.keep_log, &mut retention.log, &mut retention.log_set_by),
    ];
    for (flag, text, kept, set_by) in given {
        if let Some(text) = text {
            *kept = parse_keep(text).map_err(|message| Failure::usage(format!("{flag}: {message}")))?;
            *set_by = SetBy::Explicitly(flag);
        }
    }
    Ok(retention)
}

fn from_args(args: &RunArgs, to: &str) -> Outcome<Pipeline> {
    let word = read_source(&args.read).map_err(|message| Failure::usage(format!("--read: {message}")))?;
    let sink = SinkTarget::parse(to).map_err(|message| Failure::usage(format!("--to: {message}")))?;
    let order = match args.order {
        Some(OrderArg::None) => Order::None,
        Some(OrderArg::Total) => Order::Total,
        Some(OrderArg::Key) | None => Order::Key,
    };
    let mut options = ReadOptions {
        streams: args.streams.clone(),
        order,
        block_on_dead: args.on_dead == Some(OnDead::Block),
        ..word.defaults()
    };
    if let Some(lease) = args.lease {
        options.lease = Duration::from_secs(lease);
    }
    if let Some(partitions) = args.follow.partitions {
        options.partitions = partitions;
    }
    let read = reading(args, word, options)?;
    let name = read.consumer().unwrap_or("default").to_owned();
    Ok(Pipeline { name, read, policy: policy(args), sink })
}

/// The policies that the command line can set.
fn policy(args: &RunArgs) -> Policy {
    let mut policy = Policy::default();
    if let Some(attempts) = args.max_attempts {
        policy.max_attempts = attempts;
    }
    if let Some(batch) = args.batch {
        set_batch(&mut policy, batch as usize);
    }
    if let Some(poll) = args.poll {
        policy.poll = Duration::from_millis(poll);
    }
    policy
}

fn on_failure(args: &RunArgs) -> OnFailure {
    match args.follow.on_failure {
        Some(OnFailureArg::Halt) => OnFailure::Halt,
        Some(OnFailureArg::Park) | None => OnFailure::Park,
    }
}

fn reading(args: &RunArgs, word: ReadWord, options: ReadOptions) -> Outcome<Reading> {
    let follow = &args.follow;
    let on_failure = on_failure(args);
    if word != ReadWord::Cdc {
        let wal = &args.wal;
        let given = [
            ("--slot", wal.slot.is_some()),
            ("--publication", wal.publication.is_some()),
            ("--snapshot", wal.snapshot.is_some()),
        ];
        if let Some((flag, _)) = given.iter().find(|(_, given)| *given) {
            return Err(Failure::usage(format!("{flag} is for the WAL; add `--read cdc`, or remove {flag}")));
        }
    }
    match word {
        ReadWord::Cdc => {
            let given = [
                ("--consumer", follow.consumer.is_some()),
                ("--partitions", follow.partitions.is_some()),
                ("--start", follow.start.is_some()),
                ("--keep-log", follow.keep_log.is_some()),
            ];
            if let Some((flag, _)) = given.iter().find(|(_, given)| *given) {
                return Err(Failure::usage(format!(
                    "{flag} is for a log, and the outbox is read through the WAL; remove {flag}"
                )));
            }
            let mut cdc = unnamed_cdc(options);
            cdc.log.on_failure = on_failure;
            if let Some(slot) = &args.wal.slot {
                check_slot(slot).map_err(|message| Failure::usage(format!("--slot: {message}")))?;
                cdc.log.consumer.clone_from(slot);
            }
            if let Some(publication) = &args.wal.publication {
                cdc.publication.clone_from(publication);
            }
            cdc.snapshot = match args.wal.snapshot {
                Some(SnapshotArg::Initial) | None => Snapshot::Initial,
                Some(SnapshotArg::NewSlot) => Snapshot::NewSlot,
                Some(SnapshotArg::Never) => Snapshot::Never,
            };
            Ok(Reading::Cdc(Box::new(cdc)))
        }
        ReadWord::Queue => {
            let given = [
                ("--consumer", follow.consumer.is_some()),
                ("--partitions", follow.partitions.is_some()),
                ("--start", follow.start.is_some()),
                ("--on-failure", follow.on_failure.is_some()),
                ("--keep-log", follow.keep_log.is_some()),
            ];
            match given.iter().find(|(_, given)| *given) {
                Some((flag, _)) => Err(Failure::usage(format!(
                    "{flag} is for a log, and the outbox is read as a queue; add `--read log`, or remove {flag}"
                ))),
                None => Ok(Reading::Queue(options)),
            }
        }
        ReadWord::Log => {
            if args.keep_done.is_some() {
                return Err(Failure::usage("--keep-done is for a queue; for a log, use --keep-log"));
            }
            let Some(consumer) = follow.consumer.clone().filter(|name| !name.is_empty()) else {
                return Err(Failure::usage(
                    "--read log needs --consumer NAME: the name of the consumer whose offset is kept",
                ));
            };
            let mut log = LogOptions { read: options, ..LogOptions::consumer(consumer) };
            log.start = match follow.start {
                Some(StartArg::Latest) => Start::Latest,
                Some(StartArg::Earliest) | None => Start::Earliest,
            };
            log.on_failure = on_failure;
            Ok(Reading::Log(log))
        }
    }
}
