//! `airtight debezium-config`: prints a connector file, for a change back to Debezium.

use airtight::table::TableSpec;

use crate::{
    args::DebeziumConfigArgs,
    config::{Config, Pipeline, Reading},
    debezium,
    errors::{Failure, Outcome},
    output,
    wiring::{self, Target},
};

pub(crate) async fn run(args: &DebeziumConfigArgs) -> Outcome {
    let Some(path) = &args.database.config else {
        return Err(Failure::usage("no config given; pass -c FILE"));
    };
    let config = Config::load(path)?;
    let pipeline = find(&config.pipelines, args.pipeline.as_deref())?;
    let Reading::Cdc(cdc) = &pipeline.read else {
        return Err(Failure::failed(format!(
            "pipeline `{}` does not read the WAL, as Debezium does: set `read = \"cdc\"`",
            pipeline.name
        )));
    };
    let target = Target::resolve(&args.database, Some(&config))?;
    let database = &target.database;
    let canonical = || {
        let schema = database.schema.as_deref().unwrap_or("airtight");
        TableSpec::canonical(Some(schema), database.table.as_deref().unwrap_or("outbox"))
    };
    let table = database.spec.clone().unwrap_or_else(canonical);
    let slot = wiring::named(&target.database_name()?, &pipeline.name, cdc);
    let text = debezium::connector(&target.url, &table, pipeline, &slot, args.password)?;
    output::raw(text.as_bytes())
}

fn find<'a>(pipelines: &'a [Pipeline], name: Option<&str>) -> Outcome<&'a Pipeline> {
    let found = match name {
        Some(name) => pipelines.iter().find(|pipeline| pipeline.name == name),
        None if pipelines.len() == 1 => pipelines.first(),
        None => None,
    };
    found.ok_or_else(|| {
        let names: Vec<&str> = pipelines.iter().map(|pipeline| pipeline.name.as_str()).collect();
        Failure::usage(format!("name one pipeline; the config has: {}", names.join(", ")))
    })
}
